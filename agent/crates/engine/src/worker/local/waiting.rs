//! Payloads that wait for room in a socket of the underlay: in send buffers that the kernel does not take, and in queues behind them.
//!
//! ```text
//!   queue of peer A ─┐ a share each, in turn
//!   queue of peer B ─┼─► send buffer ──► socket      no room: payloads stay in the send buffer until `peer.queue.time` is over;
//!   queue of peer C ─┘                               a reserve is left for the agent's own packets
//! ```

use std::{
    collections::VecDeque,
    time::{Duration, Instant},
};

use base::ids::PeerId;
use config::defaults;
use dataplane::{
    datapath::uplink::Drained,
    lanes::{LaneId, UnderlayId},
};

use crate::{
    control::driver::Control,
    peer::Peers,
    worker::{
        context::{
            Context,
            timer::{Timer, index_u32},
        },
        local::DataPlane,
    },
};

/// Datagrams that one peer's queue may send before the next peer's: two full GSO batches.
const DRAIN_SHARE: usize = 128;

impl DataPlane {
    /// Sends from the queues of all peers, a share from each in turn, while there is room.
    pub(crate) fn drain_queues(&mut self, cx: &mut Context, now: Instant) {
        let (all, first) = (index_u32(cx.peers.len()), self.first_to_drain);
        let peers = (0..all).map(|index| PeerId((first + index) % all));
        let has_queue = |id: &PeerId| cx.peers.get(*id).is_some_and(|peer| peer.data.relay.is_waiting());
        let mut waiting: VecDeque<PeerId> = peers.filter(has_queue).collect();
        let mut served = None;
        while let Some(peer) = waiting.pop_front() {
            let uplink = self.uplink(cx, peer, now);
            let drained = uplink.map_or(Drained::Empty, |mut uplink| uplink.drain(DRAIN_SHARE));
            match drained {
                Drained::Empty | Drained::Blocked(_) => {}
                Drained::More => waiting.push_back(peer),
                Drained::Paced(at) => cx.timers.arm(Timer::Queue(peer), at),
            }
            if drained != Drained::Blocked(0) {
                served = served.or(Some(peer));
            }
        }
        // The first peer that could send comes last the next time. Peers that could not, because they have no lane or no room in their
        // own sockets, are skipped.
        if let Some(peer) = served {
            self.first_to_drain = (peer.0 + 1) % all;
        }
    }

    /// Sends from the queue of a peer, while there is room and its rate lets it.
    pub(crate) fn drain_queue(&mut self, cx: &mut Context, peer: PeerId, now: Instant) {
        let drained = self.uplink(cx, peer, now).map(|mut uplink| uplink.drain(usize::MAX));
        if let Some(Drained::Paced(at)) = drained {
            cx.timers.arm(Timer::Queue(peer), at);
        }
    }

    /// Something has come for a peer: sends what its rate lets go, and watches what has to wait.
    pub(crate) fn look_at_queue(&mut self, cx: &mut Context, peer: PeerId, now: Instant) {
        if cx.peers.get(peer).is_some_and(|state| state.data.is_reachable() && state.data.relay.is_paced()) {
            self.drain_queue(cx, peer, now);
        }
        cx.watch_queue(peer, now);
    }

    /// Uses the room that a socket of the underlay has again: first for the agent's own packets, then for waiting payloads.
    pub(crate) fn unblocked(
        &mut self,
        cx: &mut Context,
        control: &mut Control,
        id: UnderlayId,
        now: Instant,
    ) {
        control.unblocked(id);
        let lanes: Vec<LaneId> =
            cx.sockets.lanes.iter().filter(|(_, slot)| slot.underlay == id).map(|(lane, _)| lane).collect();
        for lane in lanes {
            cx.sockets.lanes.touch(lane);
        }
        self.drain_queues(cx, now);
    }

    /// Arms the timers that drop expired payloads in the send buffers of sockets without room.
    pub(crate) fn watch_send_buffers(&mut self, cx: &mut Context, control: &mut Control, now: Instant) {
        for id in std::mem::take(&mut cx.sockets.underlays.evicted) {
            self.unblocked(cx, control, id, now);
        }
        while let Some(id) = cx.sockets.underlays.newly_blocked.pop() {
            self.send_buffer_timeout(cx, control, id, now);
        }
    }

    /// Drops payloads that have waited for room in a socket for longer than `peer.queue.time`.
    pub(crate) fn send_buffer_timeout(
        &mut self,
        cx: &mut Context,
        control: &mut Control,
        id: UnderlayId,
        now: Instant,
    ) {
        let peers = &cx.peers;
        let expiry = cx.sockets.underlays.expire(id, now, |peer| time_of(peers, peer));
        if let Some(at) = expiry.next {
            cx.timers.arm(Timer::SendBuffer(id), at);
        }
        if expiry.emptied {
            // Younger payloads move up and leave as soon as there is room.
            self.unblocked(cx, control, id, now);
        }
    }
}

/// How long payloads of a peer may wait; other packets wait for the default time.
fn time_of(peers: &Peers, peer: PeerId) -> Duration {
    peers.get(peer).map_or(defaults::QUEUE.time, |peer| peer.data.config.queue.time)
}
