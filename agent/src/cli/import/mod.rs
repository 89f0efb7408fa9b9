//! `culvert import`: configurations of other programs.

use clap::{Args, Subcommand};

use super::Failure;

mod wg;

/// Turn the configuration of another program into one of culvert
#[derive(Debug, Args)]
pub(super) struct Import {
    #[command(subcommand)]
    command: Command,
}

#[derive(Debug, Subcommand)]
enum Command {
    Wg(wg::Wg),
}

impl Import {
    pub(super) fn execute(self) -> Result<(), Failure> {
        match self.command {
            Command::Wg(command) => command.execute(),
        }
    }
}
