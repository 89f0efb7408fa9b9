//! `culvert forward`

use clap::{Args, Subcommand};
use engine::status::ForwardId;
use ops::control_socket::protocol::{Answer, Request};

use super::{
    Failure,
    reach::{Reach, unexpected},
};
use crate::out;

/// End a TCP forward of the running daemon
#[derive(Debug, Args)]
pub(super) struct Forward {
    #[command(subcommand)]
    command: Command,
}

#[derive(Debug, Subcommand)]
enum Command {
    End(End),
}

/// Reset both sides of one TCP forward, at either end of it
///
/// The client and the service see a connection that was reset; other forwards go on. IDs are those that `culvert status PEER` lists at
/// this end; the other end has one of its own. A reload keeps them. After the forward's end, or a restart, an ID names nothing.
///
/// Exit codes: 0: it was ended. 1: the daemon could not be asked. 2: there is no such forward, or wrong usage.
#[derive(Debug, Args)]
struct End {
    /// Its ID, as in 5f3a9c-17
    #[arg(value_name = "ID")]
    id: ForwardId,
    #[command(flatten)]
    reach: Reach,
}

impl Forward {
    pub(super) fn execute(self) -> Result<(), Failure> {
        match self.command {
            Command::End(command) => command.execute(),
        }
    }
}

impl End {
    fn execute(self) -> Result<(), Failure> {
        let Answer::Done { .. } = self.reach.ask_running(&Request::ForwardEnd { id: self.id.to_string() })?
        else {
            return Err(unexpected());
        };
        Ok(out::say(&format_args!("ended {}", self.id))?)
    }
}
