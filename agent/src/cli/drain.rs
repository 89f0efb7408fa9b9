//! `culvert drain`

use std::{thread, time::Duration};

use base::clock::{Clock as _, SystemClock};
use clap::Args;
use ops::control_socket::{
    protocol::{Answer, Request},
    status::{Drain as Progress, Scope},
};

use super::{
    Failure,
    reach::{Reach, unexpected},
};
use crate::out;

/// Between two questions how far the daemon is.
const EVERY: Duration = Duration::from_millis(250);

/// How much later than its bound the daemon may be done.
const GRACE: Duration = Duration::from_secs(2);

/// Hand the daemon's peers over to other exits, before it is stopped
///
/// The daemon answers no new handshake, says at /readyz that it is not ready, and asks every peer that has dialled it to connect
/// elsewhere: to another endpoint of its [[peer]], or to another exit behind the same address. A peer leaves its session once it has
/// another one, so it loses no packet. After the bound, sessions that are left are closed. The daemon goes on running, without
/// peers, until it is stopped; a drain cannot be taken back.
///
/// Exit codes: 0: all peers have left. 1: some had to be closed, or the daemon could not be asked. 2: wrong usage.
#[derive(Debug, Args)]
pub(super) struct Drain {
    #[command(flatten)]
    reach: Reach,
    /// How long peers have to leave, in seconds
    #[arg(long, value_name = "SECONDS", default_value_t = 20, value_parser = clap::value_parser!(u64).range(1..=3600))]
    within: u64,
}

impl Drain {
    pub(super) fn execute(self) -> Result<(), Failure> {
        let within = Duration::from_secs(self.within);
        let Answer::Done { .. } = self.reach.ask_running(&Request::Drain { within_seconds: self.within })?
        else {
            return Err(unexpected());
        };
        let begun = SystemClock.now();
        loop {
            let waited = SystemClock.now().saturating_duration_since(begun);
            let Progress { waiting, closed } = self.progress()?;
            match (waiting, closed) {
                (0, 0) => return Ok(out::say(&"all peers have left")?),
                (0, closed) => {
                    out::complain(&format_args!(
                        "culvert: {closed} sessions were closed, because their peers did not leave within {} s: they know no other \
                         exit, or are of a version that does not know how to leave",
                        self.within
                    ));
                    return Err(Failure::Found(1));
                }
                (waiting, _) if waited > within + GRACE => {
                    return Err(anyhow::anyhow!(
                        "{waiting} sessions are still there (remedy: see the daemon's log)"
                    )
                    .into());
                }
                (_, _) => thread::sleep(EVERY),
            }
        }
    }

    fn progress(&self) -> Result<Progress, Failure> {
        let answer = self.reach.ask_running(&Request::Status(Scope::default()))?;
        let Answer::Status { status } = answer else { return Err(unexpected()) };
        status.drain.ok_or_else(unexpected)
    }
}
