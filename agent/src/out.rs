//! The terminal: what a subcommand prints. The daemon logs instead.

use std::{
    fmt::Display,
    io::{self, Write},
};

/// Whether standard output is still read.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Reader {
    /// Standard output is read, as far as is known.
    There,
    /// The reader closed the pipe (`culvert status --watch | head -3`): a command that prints for it alone is done.
    Gone,
}

/// Prints a line to standard output. A reader that went away has seen what it wanted: that is no error, and the command goes
/// on to the end that it has.
pub(crate) fn say(line: &dyn Display) -> anyhow::Result<()> {
    print(format_args!("{line}\n"))?;
    Ok(())
}

/// Prints text to standard output, as far as anybody reads it.
pub(crate) fn print(text: impl Display) -> anyhow::Result<Reader> {
    let mut stdout = io::stdout().lock();
    heard(write!(stdout, "{text}").and_then(|()| stdout.flush()))
}

fn heard(written: io::Result<()>) -> anyhow::Result<Reader> {
    match written {
        Ok(()) => Ok(Reader::There),
        Err(error) if error.kind() == io::ErrorKind::BrokenPipe => Ok(Reader::Gone),
        Err(error) => Err(anyhow::Error::new(error).context("standard output")),
    }
}

/// Prints a line to standard error, where nothing can be done about a reader that went away.
pub(crate) fn complain(line: &dyn Display) {
    writeln!(io::stderr(), "{line}").ok();
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_reader_that_went_away_is_no_error_and_a_full_disk_is_one() {
        let after = |kind: io::ErrorKind| heard(Err(kind.into()));
        assert_eq!(heard(Ok(())).unwrap(), Reader::There);
        assert_eq!(after(io::ErrorKind::BrokenPipe).unwrap(), Reader::Gone);
        assert!(
            format!("{:#}", after(io::ErrorKind::StorageFull).unwrap_err()).starts_with("standard output: ")
        );
    }
}
