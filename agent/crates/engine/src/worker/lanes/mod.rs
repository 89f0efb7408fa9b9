//! The lanes that this worker hosts, whichever worker owns their session.
//!
//! | question | file |
//! |---|---|
//! | lanes are opened, validated, found dead, drained | `host.rs` |
//! | recorded lanes | `capture.rs` |
//! | how large their packets may be at most | `size.rs` |
//! | reports about lanes, for an automatic rate | `reports.rs` |
//! | what is published of lanes, and what an operator asks | `publish.rs`, `inspect.rs`; of the lines that they are on: `line_status.rs` |

use std::{sync::Arc, time::Instant};

use dataplane::lanes::LaneId;

use crate::capture::Capture;

mod capture;
pub(crate) mod host;
pub(crate) mod inspect;
pub(crate) mod line_status;
pub(crate) mod publish;
mod reports;
mod size;

/// What this worker does with the lanes that it hosts. They are in [`Sockets`](crate::worker::context::Sockets), because whatever
/// sends needs both.
#[derive(Default)]
pub(crate) struct LaneHost {
    /// Captures of lanes for an operator; almost always none.
    captures: Vec<Armed>,
    limits: LaneLimits,
    /// Lanes to look at after the sockets were served; almost always none.
    quiet: Vec<QuietLane>,
    /// Lanes whose interface was not known when they came up.
    unknown: Vec<LaneId>,
    /// Which lanes are looked at in this second, of [`size`]'s ten.
    looks: u32,
}

/// A lane on which nothing was heard for long when its timer fired, while its socket may have had something unread.
struct QuietLane {
    lane: LaneId,
    /// When the timer fired.
    since: Instant,
}

/// A capture of a lane, and the lane if this worker hosts it.
struct Armed {
    capture: Arc<Capture>,
    lane: Option<LaneId>,
}

/// Limits of a lane that tests set below the limits of its cipher suite (RFC 9001 §6.6).
#[derive(Clone, Copy, Debug, Default)]
pub struct LaneLimits {
    /// Packets that one key may seal; the keys are updated after half of them.
    pub sealed: Option<u64>,
    /// Packets that may fail authentication.
    pub failed: Option<u64>,
}

#[cfg(feature = "inspection")]
impl LaneHost {
    /// The number of captures that are armed.
    pub(crate) fn armed(&self) -> usize {
        self.captures.len()
    }

    pub(crate) fn set_limits(&mut self, limits: LaneLimits) {
        self.limits = limits;
    }
}
