//! The `culvert` command.

use std::process::ExitCode;

use culvert::cli::Cli;

fn main() -> ExitCode {
    Cli::read().execute()
}
