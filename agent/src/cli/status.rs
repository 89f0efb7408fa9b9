//! `culvert status`

use clap::Args;
use serde_json::json;

use super::{
    Failure, out,
    reach::{Reach, Reached, not_running, unexpected},
};
use crate::control_socket::wire::{Answer, Request, VERSION};

/// Show what the running daemon is doing: its peers, who was refused and why
#[derive(Debug, Args)]
pub(super) struct Status {
    #[command(flatten)]
    reach: Reach,
    /// One JSON object, as docs/status.md describes it
    #[arg(long)]
    json: bool,
}

impl Status {
    pub(super) fn execute(self) -> Result<(), Failure> {
        let status = match self.reach.ask(&Request::Status {})? {
            Reached::Answer(Answer::Status { status }) => status,
            Reached::Answer(_) => return Err(unexpected()),
            Reached::Offline(offline) => return Err(not_running(&offline)),
        };
        if self.json {
            out::say(&json!({ "version": VERSION, "status": *status }))?;
        } else {
            out::say(&status.to_text().trim_end())?;
        }
        Ok(())
    }
}
