//! The command line: one file per subcommand.
//!
//! Exit codes: 0 done · 1 failed while working · 2 wrong usage or wrong configuration.

use std::process::ExitCode;

use clap::{Parser, Subcommand};

use crate::config::{LoadError, state::StateError};

mod bench;
mod check;
mod demo;
mod doctor;
mod keygen;
mod link;
pub(crate) mod out;
mod peer;
mod pubkey;
mod qlog;
mod reach;
mod run;
mod status;

/// Carries UDP flows, IP packets and TCP forwards between sites over QUIC
#[derive(Debug, Parser)]
#[command(name = "culvert", version, arg_required_else_help = true)]
pub struct Cli {
    #[command(subcommand)]
    command: Command,
}

#[derive(Debug, Subcommand)]
enum Command {
    Keygen(keygen::Keygen),
    Pubkey(pubkey::Pubkey),
    Link(link::Link),
    Check(check::Check),
    Run(run::Run),
    Demo(demo::Demo),
    Status(status::Status),
    Peer(peer::Peer),
    Qlog(qlog::Qlog),
    Bench(Box<bench::Bench>),
    Doctor(doctor::Doctor),
}

/// Why a subcommand failed; it decides the exit code.
#[derive(Debug)]
enum Failure {
    /// The operator has to change the configuration: 2.
    Config(LoadError),
    /// What the operator wrote on the command line is wrong, with a remedy: 2.
    Input(String),
    /// Everything else: 1.
    Runtime(anyhow::Error),
}

impl From<LoadError> for Failure {
    fn from(error: LoadError) -> Self {
        Self::Config(error)
    }
}

impl From<StateError> for Failure {
    fn from(error: StateError) -> Self {
        Self::Runtime(error.into())
    }
}

impl From<anyhow::Error> for Failure {
    fn from(error: anyhow::Error) -> Self {
        Self::Runtime(error)
    }
}

impl Cli {
    /// Does what the command line asks, and tells the operator if that failed.
    #[must_use]
    pub fn execute(self) -> ExitCode {
        let outcome = match self.command {
            Command::Keygen(command) => command.execute(),
            Command::Pubkey(command) => command.execute(),
            Command::Link(command) => command.execute(),
            Command::Check(command) => command.execute(),
            Command::Run(command) => command.execute(),
            Command::Demo(command) => command.execute(),
            Command::Status(command) => command.execute(),
            Command::Peer(command) => command.execute(),
            Command::Qlog(command) => command.execute(),
            Command::Bench(command) => command.execute(),
            Command::Doctor(command) => command.execute(),
        };
        match outcome {
            Ok(()) => ExitCode::SUCCESS,
            Err(Failure::Config(error)) => {
                out::complain(&error);
                ExitCode::from(2)
            }
            Err(Failure::Input(error)) => {
                out::complain(&format_args!("culvert: {error}"));
                ExitCode::from(2)
            }
            Err(Failure::Runtime(error)) => {
                // `{:#}` is the whole chain of causes on one line.
                out::complain(&format_args!("culvert: {error:#}"));
                ExitCode::FAILURE
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use clap::CommandFactory;

    use super::*;

    #[test]
    fn the_command_line_is_consistent() {
        Cli::command().debug_assert();
    }
}
