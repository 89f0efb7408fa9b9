//! What waits for room in a socket of the underlay: send buffers that the kernel does not take, queues behind them.
//!
//! ```text
//!   queue of peer A ─┐ a share each, in turn,
//!   queue of peer B ─┼─► send_buffer ──► socket      no room: a send buffer keeps what it has until its peer's time is over,
//!   queue of peer C ─┘                          and a reserve for what the agent itself says
//! ```

use std::{
    collections::VecDeque,
    time::{Duration, Instant},
};

use config::defaults;
use dataplane::{
    datapath::uplink::Drained,
    lanes::{LaneId, UnderlayId},
};
use wire::ids::PeerId;

use crate::{
    peer::Peers,
    worker::{
        context::Context,
        parts::{DataPlane, LaneHost, Sessions},
        timer::{Timer, number},
    },
};

/// Datagrams that a peer's queue may send before the next peer's: two full packets of the offloads.
const DRAIN_SHARE: usize = 128;

impl DataPlane {
    /// Sends what waits at every peer, a share from each in turn, as long as there is room.
    pub(super) fn drain_queues(&mut self, cx: &mut Context, host: &mut LaneHost, now: Instant) {
        let (all, first) = (number(cx.peers.len()), self.first_to_drain);
        let peers = (0..all).map(|index| PeerId((first + index) % all));
        let has_queue = |id: &PeerId| cx.peers.get(*id).is_some_and(|peer| !peer.data.relay.queue.is_empty());
        let mut waiting: VecDeque<PeerId> = peers.filter(has_queue).collect();
        let mut served = None;
        while let Some(peer) = waiting.pop_front() {
            let drained = self.drain_share(cx, host, peer, DRAIN_SHARE, now);
            match drained {
                Drained::Empty | Drained::Blocked(_) => {}
                Drained::More => waiting.push_back(peer),
            }
            if drained != Drained::Blocked(0) {
                served = served.or(Some(peer));
            }
        }
        // Whoever was the first to get something is the last the next time. Peers that got nothing, for want of a way or of room in
        // a socket of their own, do not hold the turn up.
        if let Some(peer) = served {
            self.first_to_drain = (peer.0 + 1) % all;
        }
    }

    /// Sends what waits at a peer, as long as there is room.
    pub(super) fn drain_queue(&mut self, cx: &mut Context, host: &mut LaneHost, peer: PeerId, now: Instant) {
        self.drain_share(cx, host, peer, usize::MAX, now);
    }

    /// Sends up to `most` datagrams of what waits at a peer, and those that came together with the last of them.
    fn drain_share(
        &mut self,
        cx: &mut Context,
        host: &mut LaneHost,
        peer: PeerId,
        most: usize,
        now: Instant,
    ) -> Drained {
        self.uplink(cx, host, peer, now).map_or(Drained::Empty, |mut uplink| uplink.drain(most))
    }

    /// A socket of the underlay has room again: what the agent itself has to say comes first, then what waited for it.
    pub(super) fn unblocked(
        &mut self,
        cx: &mut Context,
        sessions: &mut Sessions,
        host: &mut LaneHost,
        id: UnderlayId,
        now: Instant,
    ) {
        sessions.control.unblocked(id);
        let lanes: Vec<LaneId> =
            host.lanes.iter().filter(|(_, slot)| slot.underlay == id).map(|(lane, _)| lane).collect();
        for lane in lanes {
            host.lanes.touch(lane);
        }
        self.drain_queues(cx, host, now);
    }

    /// Makes sure that what sockets without room keep in their send buffers is dropped in time.
    pub(super) fn watch_send_buffers(
        &mut self,
        cx: &mut Context,
        sessions: &mut Sessions,
        host: &mut LaneHost,
        now: Instant,
    ) {
        for id in cx.sockets.underlays.take_evicted() {
            self.unblocked(cx, sessions, host, id, now);
        }
        while let Some(id) = cx.sockets.underlays.next_blocked() {
            self.send_buffer_timeout(cx, sessions, host, id, now);
        }
    }

    /// Drops what has waited for room in a socket for longer than its peer's queue allows.
    pub(super) fn send_buffer_timeout(
        &mut self,
        cx: &mut Context,
        sessions: &mut Sessions,
        host: &mut LaneHost,
        id: UnderlayId,
        now: Instant,
    ) {
        let peers = &cx.peers;
        let expiry = cx.sockets.underlays.expire(id, now, |peer| time_of(peers, peer));
        if let Some(at) = expiry.next {
            cx.timers.arm(Timer::SendBuffer(id), at);
        }
        if expiry.emptied {
            // What is younger takes the place, and goes out as soon as there is room.
            self.unblocked(cx, sessions, host, id, now);
        }
    }
}

/// How long what is a peer's may wait; what is nobody's waits as long as it does by default.
fn time_of(peers: &Peers, peer: PeerId) -> Duration {
    peers.get(peer).map_or(defaults::QUEUE.time, |peer| peer.data.config.queue.time)
}
