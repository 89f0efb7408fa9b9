//! The command line: one file per subcommand.
//!
//! Exit codes: 0 done · 1 failed while working · 2 wrong usage or wrong configuration. `doctor` has its own reading of them:
//! 0 nothing above a note · 1 warnings · 2 errors, which are what keeps the agent from starting or a peer from being reached.

use std::{
    env,
    process::{self, ExitCode},
};

use clap::{
    Parser, Subcommand,
    builder::StyledStr,
    error::{ContextKind, ContextValue, ErrorKind},
};
use config::{
    LoadError,
    state::{Edit, StateError},
};
use lab::bench::{Bench, Terminal};

use crate::out;

mod check;
mod check_lines;
mod completions;
mod doctor;
mod drain;
mod examples;
mod fleet;
mod forward;
mod genpsk;
mod import;
mod init;
mod keygen;
mod link;
mod manual;
mod peer;
mod pubkey;
mod qlog;
pub(crate) mod reach;
mod reference;
mod reload;
mod run;
mod status;
mod uplink;
mod user;
mod user_credentials;
mod watch;

/// Carries UDP flows, IP packets and TCP forwards between sites over QUIC
#[derive(Debug, Parser)]
#[command(name = "culvert", version = env!("CULVERT_VERSION"), arg_required_else_help = true)]
pub struct Cli {
    #[command(subcommand)]
    command: Command,
}

#[derive(Debug, Subcommand)]
#[command(mut_subcommands = with_examples)]
enum Command {
    Init(init::Init),
    Keygen(keygen::Keygen),
    Pubkey(pubkey::Pubkey),
    Genpsk(genpsk::Genpsk),
    Import(import::Import),
    Link(link::Link),
    Check(check::Check),
    Run(run::Run),
    Demo(crate::demo::Demo),
    Status(status::Status),
    Reload(reload::Reload),
    Drain(drain::Drain),
    Peer(peer::Peer),
    User(user::User),
    Forward(forward::Forward),
    Qlog(qlog::Qlog),
    Bench(Box<Bench>),
    Doctor(doctor::Doctor),
    Uplink(uplink::Uplink),
    Fleet(fleet::Fleet),
    Completions(completions::Completions),
    #[command(hide = true)]
    Manual(manual::Manual),
}

/// The help of a command that is shown ends with examples of its use.
fn with_examples(command: clap::Command) -> clap::Command {
    if command.is_hide_set() {
        return command;
    }
    let name = command.get_name().to_owned();
    let command = command.mut_subcommands(|inner| {
        let own = examples::of_inner(&name, inner.get_name());
        if own.is_empty() { inner } else { inner.after_long_help(examples::as_help(&own)) }
    });
    command.after_long_help(examples::help(&name))
}

/// Why a subcommand failed; it decides the exit code.
#[derive(Debug)]
enum Failure {
    /// The operator has to change the configuration: 2.
    Config(LoadError),
    /// What the operator wrote on the command line is wrong, with a remedy: 2.
    Input(String),
    /// Something else went wrong: the command ends with 1.
    Runtime(anyhow::Error),
    /// The same, and the operator was told in the log.
    Logged,
    /// The command has printed what it found, and ends with this code.
    Found(u8),
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

/// Words of a command line that is spelled otherwise, and what to write.
const SPELLINGS: [([&str; 2], &str); 2] = [
    (["status", "routes"], "which peer an address leads to: culvert status --routes ADDRESS"),
    (["init", "--fleet"], "an exit of a fleet has a number: culvert init --role exit --server-id 1"),
];

/// Writes the state file while no daemon runs, and tells the operator what a crash of the host may undo.
fn commit(edit: Edit) -> Result<(), StateError> {
    if let Some(problem) = edit.commit()? {
        out::complain(&format_args!("culvert: {problem}"));
    }
    Ok(())
}

/// The error about a command line, with the spelling that was meant.
fn with_spelling(mut error: clap::Error, words: &[String]) -> clap::Error {
    let is_there = |wrong: &&str| words.iter().any(|word| word == wrong);
    let meant = SPELLINGS.iter().filter(|(wrong, _)| wrong.iter().all(is_there));
    let tips: Vec<StyledStr> = meant.map(|(_, right)| StyledStr::from(*right)).collect();
    if error.kind() == ErrorKind::UnknownArgument && !tips.is_empty() {
        error.insert(ContextKind::Suggested, ContextValue::StyledStrs(tips));
    }
    error
}

/// Ends the process with what is wrong with the command line, or with the help that was asked for.
fn end(error: &clap::Error) -> ! {
    if error.use_stderr() {
        // As all our errors begin.
        let text = error.render().to_string();
        out::complain(&text.trim_end().replacen("error: ", "culvert: ", 1));
        process::exit(error.exit_code());
    }
    error.exit()
}

impl Cli {
    /// Reads the command line; ends the process if that is wrong, or asks for help.
    #[must_use]
    pub fn read() -> Self {
        let words: Vec<String> = env::args_os().map(|word| word.to_string_lossy().into_owned()).collect();
        Self::try_parse().unwrap_or_else(|error| end(&with_spelling(error, &words)))
    }

    /// Does what the command line asks, and tells the operator if that failed.
    #[must_use]
    pub fn execute(self) -> ExitCode {
        let outcome = match self.command {
            Command::Init(command) => command.execute(),
            Command::Keygen(command) => command.execute(),
            Command::Pubkey(command) => command.execute(),
            Command::Genpsk(command) => command.execute(),
            Command::Import(command) => command.execute(),
            Command::Link(command) => command.execute(),
            Command::Check(command) => command.execute(),
            Command::Run(command) => command.execute(),
            Command::Demo(command) => command.run().map_err(Failure::from),
            Command::Status(command) => command.execute(),
            Command::Reload(command) => command.execute(),
            Command::Drain(command) => command.execute(),
            Command::Peer(command) => command.execute(),
            Command::User(command) => command.execute(),
            Command::Forward(command) => command.execute(),
            Command::Qlog(command) => command.execute(),
            Command::Bench(command) => {
                let terminal = Terminal { say: out::say, complain: out::complain };
                command.run(terminal).map_err(Failure::from)
            }
            Command::Doctor(command) => command.execute(),
            Command::Uplink(command) => command.execute(),
            Command::Fleet(command) => command.execute(),
            Command::Completions(command) => command.execute(),
            Command::Manual(command) => command.execute(),
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
            Err(Failure::Logged) => ExitCode::FAILURE,
            Err(Failure::Found(code)) => ExitCode::from(code),
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
