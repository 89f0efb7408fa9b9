//! The `culvert` command.

use std::process::ExitCode;

use clap::Parser;
use culvert::cli::Cli;

fn main() -> ExitCode {
    Cli::parse().execute()
}
