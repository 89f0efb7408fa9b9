//! The terminal: what a subcommand prints. The daemon logs instead.

use std::{
    fmt::Display,
    io::{self, Write},
};

/// Prints a line to standard output; a reader that went away (`culvert link | head -0`) is an error, not a panic.
pub(crate) fn say(line: &dyn Display) -> anyhow::Result<()> {
    Ok(writeln!(io::stdout(), "{line}")?)
}

/// Prints a line to standard error, where nothing can be done about a reader that went away.
#[expect(clippy::print_stderr, reason = "the terminal is how a subcommand answers")]
pub(crate) fn complain(line: &dyn Display) {
    eprintln!("{line}");
}
