//! Standard mode: the frames of peers without lanes, between the relay and quinn-proto.

use std::time::{Duration, Instant};

use dataplane::relay::{DropReason, Settlement};
use net::batch::Meta;
use quinn_proto::{ConnectionHandle, SendDatagramError};
use wire::ids::{LaneRef, PeerId};

use crate::{
    control::transport::DATAGRAM_BUFFER_BYTES,
    worker::{
        Worker,
        context::Context,
        parts::{DataPlane, LaneHost, Sessions},
    },
};

/// What quinn-proto may hold of a peer's datagrams that its congestion window does not let out yet, in bytes: 50 ms at 10 Mbit/s.
/// There they do not expire, so the rest waits where they do.
const AHEAD_BYTES: usize = 64 * 1024;

impl Worker {
    /// Takes the plain frames that have come. After each batch, because quinn-proto drops the oldest of them beyond
    /// [`DATAGRAM_BUFFER_BYTES`].
    pub(super) fn take_plain(&mut self, now: Instant) {
        while let Some(handle) = self.sessions.control.take_fed() {
            self.plain_datagrams(handle, now);
        }
    }

    /// Plain frames came on a control connection.
    pub(super) fn plain_datagrams(&mut self, handle: ConnectionHandle, now: Instant) {
        let Some(connection) = self.sessions.control.get(handle) else { return };
        let (peer, source) = (connection.peer, connection.path().destination);
        let Some(peer) =
            peer.filter(|id| self.cx.peers.session(*id).is_some_and(|session| session.handle == handle))
        else {
            // Before its hello nobody knows whose flows these are; quinn-proto bounds what waits meanwhile.
            return;
        };
        let mut taken = 0;
        loop {
            if self.data.notes.work.is_over() {
                if !self.data.plain_waiting.contains(&handle) {
                    self.data.plain_waiting.push(handle);
                }
                return;
            }
            self.data.batch.clear();
            let Some(quinn) = self.sessions.control.quinn(handle) else { return };
            let mut full = false;
            while !full {
                let Some(data) = quinn.datagrams().recv() else { break };
                let meta = Meta {
                    len: data.len(),
                    segment: data.len().max(1),
                    source,
                    local: None,
                    ecn: 0,
                    age: Duration::ZERO,
                };
                // A frame is smaller than a packet, and so than a slot.
                self.data.batch.push(meta, &data);
                full = self.data.batch.len() == self.data.batch.slots();
            }
            if self.data.batch.is_empty() {
                break;
            }
            taken += self.data.batch.len() as u64;
            self.downlink(now, |downlink, batch| downlink.frames(batch, LaneRef { peer, lane: 0 }));
        }
        // Without any there was nothing that could make others give way.
        let lost = if taken > 0 { self.sessions.control.frames_taken(handle, taken) } else { 0 };
        if lost > 0
            && let Some(state) = self.cx.peers.get_mut(peer)
        {
            state.data.relay.downlink.receive(lost, 0);
            state.data.relay.downlink.drop(DropReason::PlainOverflow, lost);
        }
    }
}

impl DataPlane {
    /// Offers quinn-proto what waits for peers without lanes; returns whether it took any.
    pub(super) fn send_plain(
        &mut self,
        cx: &mut Context,
        sessions: &mut Sessions,
        host: &mut LaneHost,
        now: Instant,
    ) -> bool {
        let mut taken = false;
        for id in cx.peers.ids() {
            let link = cx.peers.get(id).and_then(|peer| peer.data.link.as_ref());
            let waits = link.and_then(|link| link.plain.as_ref());
            if waits.is_some_and(|plain| !plain.is_empty()) {
                taken |= self.send_plain_to(cx, sessions, host, id, now);
            }
        }
        taken
    }

    fn send_plain_to(
        &mut self,
        cx: &mut Context,
        sessions: &mut Sessions,
        host: &mut LaneHost,
        id: PeerId,
        now: Instant,
    ) -> bool {
        let (mut blocked, mut taken) = (false, false);
        loop {
            let Some(peer) = cx.peers.get_mut(id) else { return taken };
            let plain = peer.data.link.as_mut().and_then(|link| link.plain.as_mut());
            let handle = peer.session.as_ref().map(|session| session.handle);
            let quinn = handle.and_then(|handle| sessions.control.quinn(handle));
            let (Some(plain), Some(quinn), Some(handle)) = (plain, quinn, handle) else { return taken };
            plain.set_most(quinn.datagrams().max_size());
            // Before the space: a connection that takes nothing holds nothing back that is too old.
            if let Some(late) = plain.pop_late(now, peer.data.config.queue.time) {
                if late.counted {
                    cx.settle_plain(id, DropReason::Expired);
                }
                continue;
            }
            if quinn.datagrams().send_buffer_space() < DATAGRAM_BUFFER_BYTES - AHEAD_BYTES {
                // Expired frames may have left room for what waits behind them, and nobody else fills it.
                blocked = !plain.is_empty();
                break;
            }
            let Some(mut frame) = plain.pop() else { break };
            taken = true;
            let dropped = match sessions.control.send_frame(handle, frame.data, frame.counted) {
                // What becomes of it is settled when it is sent, or when quinn-proto drops it.
                Ok(()) => continue,
                Err(SendDatagramError::Blocked(data)) => {
                    frame.data = data;
                    plain.put_back(frame);
                    blocked = true;
                    break;
                }
                Err(SendDatagramError::TooLarge) => DropReason::SendTooLarge,
                Err(SendDatagramError::UnsupportedByPeer | SendDatagramError::Disabled) => {
                    DropReason::SendOther
                }
            };
            if frame.counted {
                cx.settle_plain(id, dropped);
            }
        }
        // What waited behind a full buffer comes next.
        if !blocked {
            self.drain_queue(cx, host, id, now);
        }
        taken
    }
}

impl Context {
    /// One payload for a peer without lanes was dropped before quinn-proto had it.
    pub(super) fn settle_plain(&mut self, peer: PeerId, dropped: DropReason) {
        if let Some(state) = self.peers.get_mut(peer) {
            state.data.relay.settle_uplink(Settlement { peer, payloads: 1, dropped: Some(dropped) });
        }
    }
}
