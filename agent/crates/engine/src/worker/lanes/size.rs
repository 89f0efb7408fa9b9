//! How large the packets of the lanes here may be at most: the interface on the way, and the peer's rate, are followed.

use std::time::{Duration, Instant};

use dataplane::lanes::LaneId;

use crate::worker::context::{
    Context,
    packet_sizes::{most_at, most_towards},
    timer::Timer,
};

/// After so long, what was asked about an interface is known, unless the kernel's tables are held for longer: then it is seen by the
/// second.
const KNOWN_AFTER: Duration = Duration::from_millis(5);

impl Context {
    /// Looks where the search of a lane is to end, at once and when the interface is known.
    pub(crate) fn begin_to_bound_packets(&mut self, id: LaneId, now: Instant) {
        self.bound_packets(id, now);
        let path = self.sockets.lanes.get(id).and_then(|slot| slot.path());
        if path.is_some_and(|path| self.sockets.factory.ways()(path.destination).is_none()) {
            self.timers.arm(Timer::Interfaces, now + KNOWN_AFTER);
        }
    }

    /// Looks where the search of a lane is to end.
    pub(crate) fn bound_packets(&mut self, id: LaneId, now: Instant) {
        let Some(slot) = self.sockets.lanes.get_mut(id).filter(|slot| slot.is_up()) else { return };
        let Some(path) = slot.path() else { return };
        let rate = self.peers.get(slot.peer).and_then(|peer| peer.data.relay.share.account.rate());
        let ways = self.sockets.factory.ways();
        let most = most_towards(&self.config.transport, ways, path.destination);
        let by_rate = most_at(rate, u16::try_from(slot.size.largest()).unwrap_or(u16::MAX));
        if slot.size.limit(&mut slot.core, most.min(by_rate).into(), now) {
            self.sockets.lanes.touch(id);
        }
    }
}
