//! Which daemon a command is for, and asking it.

use std::{fmt, path::PathBuf};

use clap::Args;
use config::{Config, Knock, defaults};
use net::folder;
use ops::control_socket::{
    client::{self, AskError},
    protocol::{Answer, Request},
};

use super::Failure;

/// Where the configuration is when it is not named.
pub(crate) const DEFAULT_CONFIG: &str = "/etc/culvert/agent.toml";

/// Which daemon.
#[derive(Clone, Debug, Args)]
pub(super) struct Reach {
    /// The daemon's configuration file; without it and without --socket: /etc/culvert/agent.toml, if it exists
    #[arg(long, value_name = "FILE", conflicts_with = "socket")]
    config: Option<PathBuf>,
    /// The daemon's control socket; without it: the one that the configuration file names
    #[arg(long, value_name = "PATH")]
    socket: Option<PathBuf>,
}

/// The outcome of a request to the daemon.
pub(super) enum Reached {
    Answer(Answer),
    Offline(Offline),
}

/// What is known where no daemon answered.
pub(super) struct Offline {
    /// The configuration file of the daemon.
    pub(super) file: PathBuf,
    /// Where none answered; `None` if the file names no socket.
    socket: Option<PathBuf>,
}

impl fmt::Display for Offline {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.socket {
            Some(socket) => write!(formatter, "no daemon answers at {}", socket.display()),
            None => write!(formatter, "{} names no control.socket to ask a daemon at", self.file.display()),
        }
    }
}

impl Offline {
    /// What an operator must know who changed the state file of `config` alone; `None` if no daemon runs.
    pub(super) fn caution(&self, config: &Config) -> Option<String> {
        // One that listens holds its state folder.
        let would_hold = !config.transport.listen.is_empty() && config.access.knock == Knock::Required;
        match folder::is_taken(&config.state_dir) {
            Ok(false) if would_hold => None,
            Ok(true) => Some(format!(
                "{self}, and yet one runs, which holds {}: it keeps its peers until it is reloaded or restarted",
                config.state_dir.display()
            )),
            Ok(false) | Err(_) => {
                Some(format!("{self}; if one runs, it keeps its peers until it is reloaded or restarted"))
            }
        }
    }
}

impl Reach {
    /// The configuration file that was named.
    pub(super) fn file(&self) -> Option<&std::path::Path> {
        self.config.as_deref()
    }

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
                None => return Ok(Reached::Offline(Offline { file: config.clone(), socket: None })),
            },
            (None, None) => PathBuf::from(defaults::CONTROL_SOCKET),
        };
        match (client::ask(&socket, request, env!("CULVERT_VERSION")), config) {
            (Ok(Answer::Refused { bad_input: true, error }), _) => Err(Failure::Input(error)),
            (Ok(Answer::Refused { bad_input: false, error }), _) => {
                Err(Failure::Runtime(anyhow::Error::msg(error)))
            }
            (Ok(answer), _) => Ok(Reached::Answer(answer)),
            (Err(AskError::NotRunning(_)), Some(file)) => {
                Ok(Reached::Offline(Offline { file, socket: Some(socket) }))
            }
            (Err(error), _) => Err(Failure::Runtime(error.into())),
        }
    }

    /// Asks the daemon for a command that needs it.
    pub(super) fn ask_running(&self, request: &Request) -> Result<Answer, Failure> {
        match self.ask(request)? {
            Reached::Answer(answer) => Ok(answer),
            Reached::Offline(offline) => Err(not_running(&offline)),
        }
    }
}

/// Says that a command needs the daemon.
pub(super) fn not_running(offline: &Offline) -> Failure {
    let config = offline.file.display();
    Failure::Runtime(anyhow::anyhow!(
        "{offline} (remedy: culvert run --config {config}, or name the daemon's socket with --socket)"
    ))
}

/// An answer that does not belong to the request.
pub(super) fn unexpected() -> Failure {
    Failure::Runtime(anyhow::anyhow!(
        "the daemon's answer is of another kind (remedy: the culvert command of the same version as the daemon)"
    ))
}
