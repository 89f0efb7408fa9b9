//! How large the packets of the lanes here may be at most: the interface on the way, and the peer's rate, are followed.

use std::time::{Duration, Instant};

use dataplane::lanes::LaneId;

use crate::worker::{
    context::{
        Context,
        packet_sizes::{most_at, most_towards},
        timer::Timer,
    },
    lanes::LaneHost,
};

/// After so long, what was asked about an interface is known, unless the kernel's tables are held for longer: then it is seen by the
/// second.
const KNOWN_AFTER: Duration = Duration::from_millis(5);

/// Each lane is looked at once in so many seconds: as often as the kernel is asked for its interface.
const LOOKS: u32 = 10;

impl LaneHost {
    /// Looks where the search of a lane is to end, at once and when the interface is known.
    pub(crate) fn begin_to_bound_packets(&mut self, cx: &mut Context, id: LaneId, now: Instant) {
        cx.bound_packets(id, now);
        let path = cx.sockets.lanes.get(id).and_then(|slot| slot.path());
        if path.is_some_and(|path| cx.sockets.factory.ways()(path.destination).is_none()) {
            self.unknown.push(id);
            cx.timers.arm(Timer::Interfaces, now + KNOWN_AFTER);
        }
    }

    /// What was asked about interfaces may be known: looks at the lanes that wait for it.
    pub(crate) fn look_at_unknown(&mut self, cx: &mut Context, now: Instant) {
        self.unknown.retain(|id| {
            cx.follow_packets(*id, now);
            let path = cx.sockets.lanes.get(*id).and_then(|slot| slot.path());
            path.is_some_and(|path| cx.sockets.factory.ways()(path.destination).is_none())
        });
    }

    /// Once a second: follows the interfaces of the lanes that were not known in time, and of a tenth of all others, and the rates of
    /// peers that have one.
    pub(crate) fn follow_interfaces(&mut self, cx: &mut Context, now: Instant) {
        self.look_at_unknown(cx, now);
        self.unknown.clear();
        self.looks = (self.looks + 1) % LOOKS;
        let mut due = std::mem::take(&mut self.unknown);
        due.extend(cx.sockets.lanes.iter().filter_map(|(id, slot)| {
            let has_rate = || {
                cx.peers
                    .get(slot.peer)
                    .is_some_and(|peer| peer.data.relay.share_of(slot.line).rate().is_some())
            };
            (slot.is_up() && (id.0 % LOOKS == self.looks || has_rate())).then_some(id)
        }));
        for id in due.drain(..) {
            cx.follow_packets(id, now);
        }
        self.unknown = due;
    }
}

impl Context {
    fn follow_packets(&mut self, id: LaneId, now: Instant) {
        self.bound_packets(id, now);
        self.note_path_packet(id, now);
    }

    /// Looks where the search of a lane is to end.
    fn bound_packets(&mut self, id: LaneId, now: Instant) {
        let Some(slot) = self.sockets.lanes.get_mut(id).filter(|slot| slot.is_up()) else { return };
        let Some(path) = slot.path() else { return };
        let rate = self.peers.get(slot.peer).and_then(|peer| peer.data.relay.share_of(slot.line).rate());
        let ways = self.sockets.factory.ways();
        let most = most_towards(&self.config.transport, ways, path.destination);
        let by_rate = most_at(rate, u16::try_from(slot.size.largest()).unwrap_or(u16::MAX));
        if slot.size.limit(&mut slot.core, most.min(by_rate).into(), now) {
            self.sockets.lanes.touch(id);
        }
    }
}
