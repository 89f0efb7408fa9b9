//! Which daemon a command is for, and asking it.

use std::path::{Path, PathBuf};

use clap::Args;

use super::Failure;
use crate::{
    config::{Config, defaults},
    control_socket::{
        client::{self, AskError},
        wire::{Answer, Request},
    },
};

/// Where the configuration is when it is not named.
const DEFAULT_CONFIG: &str = "/etc/culvert/agent.toml";

/// Which daemon.
#[derive(Debug, Args)]
pub(super) struct Reach {
    /// The daemon's configuration file; without it and without --socket: /etc/culvert/agent.toml, if it exists
    #[arg(long, value_name = "FILE", conflicts_with = "socket")]
    config: Option<PathBuf>,
    /// The daemon's control socket; without it: the one that the configuration file names
    #[arg(long, value_name = "PATH")]
    socket: Option<PathBuf>,
}

/// What came of asking.
pub(super) enum Reached {
    /// The daemon's answer.
    Answer(Answer),
    /// No daemon runs with this configuration file.
    Offline(PathBuf),
}

impl Reach {
    /// Asks the daemon, and turns its refusal into a failure.
    pub(super) fn ask(&self, request: &Request) -> Result<Reached, Failure> {
        let config = match (&self.config, &self.socket) {
            (Some(config), _) => Some(config.clone()),
            (None, None) => Some(PathBuf::from(DEFAULT_CONFIG)).filter(|config| config.exists()),
            (None, Some(_)) => None,
        };
        let socket = match (&self.socket, &config) {
            (Some(socket), _) => socket.clone(),
            (None, Some(config)) => match Config::control_socket(config)? {
                Some(socket) => socket,
                None => return Ok(Reached::Offline(config.clone())),
            },
            (None, None) => PathBuf::from(defaults::CONTROL_SOCKET),
        };
        match (client::ask(&socket, request), config) {
            (Ok(Answer::Refused { bad_input: true, error }), _) => Err(Failure::Input(error)),
            (Ok(Answer::Refused { bad_input: false, error }), _) => {
                Err(Failure::Runtime(anyhow::Error::msg(error)))
            }
            (Ok(answer), _) => Ok(Reached::Answer(answer)),
            (Err(AskError::NotRunning(_)), Some(config)) => Ok(Reached::Offline(config)),
            (Err(error), _) => Err(Failure::Runtime(error.into())),
        }
    }
}

/// Says that a command needs the daemon of `config`, which does not run.
pub(super) fn not_running(config: &Path) -> Failure {
    let config = config.display();
    Failure::Runtime(anyhow::anyhow!(
        "no daemon runs with {config} (remedy: culvert run --config {config}, or name its socket with --socket)"
    ))
}

/// An answer that does not belong to the request.
pub(super) fn unexpected() -> Failure {
    Failure::Runtime(anyhow::anyhow!(
        "the daemon's answer is of another kind (remedy: the culvert command of the same version as the daemon)"
    ))
}
