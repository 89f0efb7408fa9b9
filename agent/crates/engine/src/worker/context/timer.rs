//! The deadlines of a worker, and its intervals.

use std::time::{Duration, Instant};

use base::{hash::Issued, ids::PeerId};
use dataplane::{
    forward::tcp::TcpId,
    lanes::{LaneId, UnderlayId},
    relay::FlowId,
};
use quinn_proto::ConnectionHandle;

/// A deadline of the worker, by its purpose.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub(crate) enum Timer {
    Connection(usize),
    Lane(LaneId),
    Pool(PeerId),
    /// A line of a session has been well for long enough.
    Lines(PeerId),
    /// Connections that stayed on a worse line may move.
    FollowLines(PeerId),
    /// A port of a peer's session is to change.
    Hop(PeerId),
    /// Nothing that was sent to a socket's port is under way any more.
    OldPort(UnderlayId),
    Flow(PeerId, FlowId),
    Queue(PeerId),
    Repair(PeerId),
    SendBuffer(UnderlayId),
    Dial(PeerId),
    Hello(ConnectionHandle),
    Join(ConnectionHandle),
    Left(ConnectionHandle),
    Tcp(TcpId),
    /// A PROXY header has not come in time.
    Proxied(u32),
    Keepalive,
    /// What was asked about interfaces is known.
    Interfaces,
    Listener(usize),
    Publish,
    Housekeeping,
    Decoys,
    Drained,
    Stop,
}

impl Issued for Timer {}

/// The interval of periodic work: keepalives, liveness, kernel drop counters.
pub(crate) const HOUSEKEEPING_INTERVAL: Duration = Duration::from_secs(1);

/// The interval between log lines about the same recurring condition.
pub(crate) const LOG_INTERVAL: Duration = Duration::from_secs(10);

/// Converts an index into a list of the configuration to an identifier; such lists are far shorter than 2^32.
pub(crate) fn index_u32(index: usize) -> u32 {
    u32::try_from(index).unwrap_or(u32::MAX)
}

/// From this time ahead on, deadlines that need not be met exactly are met at whole seconds.
const COARSE_AHEAD: Duration = Duration::from_secs(5);

/// The first whole second since `base` that is not before `at`, if `at` is far enough ahead of `now`; else `at` itself. Deadlines
/// of many idle connections are then met in one turn a second.
pub(crate) fn coarse(base: Instant, at: Instant, now: Instant) -> Instant {
    if at.saturating_duration_since(now) < COARSE_AHEAD {
        return at;
    }
    let since = at.saturating_duration_since(base);
    let whole = Duration::from_secs(since.as_secs());
    base + if whole < since { whole + Duration::from_secs(1) } else { whole }
}

#[cfg(test)]
mod tests {
    use base::clock::{Clock, ManualClock};

    use super::*;

    #[test]
    fn a_far_deadline_is_met_at_a_whole_second_and_a_near_one_exactly() {
        let base = ManualClock::default().now();
        let at = |millis| base + Duration::from_millis(millis);
        assert_eq!(coarse(base, at(5_999), at(1_000)), at(5_999));
        assert_eq!(coarse(base, at(6_000), at(1_000)), at(6_000));
        assert_eq!(coarse(base, at(6_001), at(1_000)), at(7_000));
        assert_eq!(coarse(base, at(900), at(1_000)), at(900));
        // A deadline from before the base is past.
        assert_eq!(coarse(at(500), at(100), at(1_000)), at(100));
    }
}
