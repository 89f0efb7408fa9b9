//! Standard mode: the frames of peers without lanes, between the relay and quinn-proto.

use std::time::{Duration, Instant};

use base::ids::{LaneRef, PeerId};
use dataplane::{
    lanes::Plain,
    relay::{DropReason, Settlement},
};
use net::batch::Meta;
use quinn_proto::{ConnectionHandle, SendDatagramError};
use repair::PathCounts;

use crate::{
    control::transport::DATAGRAM_BUFFER_BYTES,
    worker::{
        Worker,
        context::Context,
        parts::{DataPlane, LaneHost, Sessions},
        timer::Timer,
    },
};

/// Bytes of a peer's datagrams that may wait in quinn-proto for its congestion window: 50 ms at 10 Mbit/s. Datagrams do not expire
/// there, so the others wait in the queue of [`dataplane::lanes::Plain`], where they do.
const AHEAD_BYTES: usize = 64 * 1024;

/// The bytes that always may wait there: two packets.
const LEAST_AHEAD: usize = 3_000;

impl Worker {
    /// Takes the frames that waited for this turn, of one peer after the other.
    pub(super) fn take_waiting_plain(&mut self, now: Instant) {
        for _ in 0..self.data.plain_waiting.len() {
            // Who finds the share used up keeps its place.
            if self.data.notes.work.is_over() {
                return;
            }
            if let Some(handle) = self.data.plain_waiting.pop_front() {
                self.plain_datagrams(handle, now);
            }
        }
    }

    /// Charges a peer for frames beyond what its packets were expected to cost.
    fn charge_plain(&mut self, handle: ConnectionHandle, peer: PeerId, cost: u64, is_all: bool) {
        let more = self.sessions.control.ask_price(handle, cost, is_all);
        if more > 0 {
            self.data.notes.shares.charge_later(peer, more);
        }
    }

    /// Takes received frames out of quinn-proto, after each batch: beyond [`DATAGRAM_BUFFER_BYTES`] quinn-proto drops the oldest.
    pub(super) fn take_plain(&mut self, now: Instant) {
        while let Some(handle) = self.sessions.control.take_fed() {
            self.plain_datagrams(handle, now);
        }
    }

    /// Handles the frames that have come on a control connection, as far as the turn's share of work allows.
    pub(super) fn plain_datagrams(&mut self, handle: ConnectionHandle, now: Instant) {
        let Some(connection) = self.sessions.control.get(handle) else { return };
        let (peer, source) = (connection.identity.peer(), connection.path().destination);
        // Before the peer's hello its flows are not known. Frames wait in quinn-proto, which bounds them.
        let Some(peer) = peer.filter(|id| self.cx.peers.is_session(*id, handle)) else { return };
        if self.sessions.refuses_plain(handle) {
            return self.drop_plain(handle, peer);
        }
        let mut taken = 0;
        loop {
            if self.data.notes.work.is_over() || self.data.notes.shares.is_spent(peer) {
                if !self.data.plain_waiting.contains(&handle) {
                    self.data.plain_waiting.push_back(handle);
                }
                return;
            }
            self.data.batch.clear();
            let Some(quinn) = self.sessions.control.quinn(handle) else { return };
            let mut full = false;
            while !full {
                let Some(data) = quinn.datagrams().recv() else { break };
                let meta = Meta { len: data.len(), segment: data.len().max(1), source, ..Meta::EMPTY };
                // A frame is smaller than a packet, and so than a slot.
                self.data.batch.push(meta, &data);
                full = self.data.batch.len() == self.data.batch.slots();
            }
            if self.data.batch.is_empty() {
                break;
            }
            taken += self.data.batch.len() as u64;
            let mut cost = 0;
            self.downlink(now, |downlink, batch| cost = downlink.frames(batch, LaneRef { peer, lane: 0 }));
            self.charge_plain(handle, peer, cost, false);
        }
        self.charge_plain(handle, peer, 0, true);
        if taken > 0 {
            self.drive_plain_repair(peer, now);
        }
        // Frames are dropped only to make room for others.
        let lost = if taken > 0 { self.sessions.control.frames_taken(handle, taken) } else { 0 };
        if lost > 0
            && let Some(state) = self.cx.peers.get_mut(peer)
        {
            state.data.relay.downlink.receive(lost, 0);
            state.data.relay.downlink.drop(DropReason::PlainOverflow, lost);
        }
    }
}

impl Worker {
    /// Drops the frames of a peer with a preshared key: whoever breaks TLS could have sent them.
    fn drop_plain(&mut self, handle: ConnectionHandle, peer: PeerId) {
        let Some(quinn) = self.sessions.control.quinn(handle) else { return };
        let (mut frames, mut bytes) = (0, 0);
        while let Some(data) = quinn.datagrams().recv() {
            frames += 1;
            bytes += data.len() as u64;
        }
        let lost = self.sessions.control.frames_taken(handle, frames);
        if let Some(state) = self.cx.peers.get_mut(peer) {
            state.data.relay.downlink.receive(frames + lost, bytes);
            state.data.relay.downlink.drop(DropReason::NotAllowed, frames + lost);
        }
    }
}

/// How many bytes may wait behind the queue at `rate` bytes a second, and how many in quinn-proto: with a rate they wait in the queue,
/// where flows take turns, but for 4 ms and 2 ms.
fn room_at(rate: Option<u64>) -> (usize, usize) {
    let within = |parts| rate.and_then(|rate| usize::try_from(rate / parts).ok()).unwrap_or(usize::MAX);
    (within(250).max(LEAST_AHEAD), within(500).clamp(LEAST_AHEAD, AHEAD_BYTES))
}

impl DataPlane {
    /// Gives quinn-proto the frames that wait for peers without lanes; returns whether it took any.
    pub(super) fn send_plain(
        &mut self,
        cx: &mut Context,
        sessions: &mut Sessions,
        host: &mut LaneHost,
        now: Instant,
    ) -> bool {
        let mut taken = false;
        let mut peers = std::mem::take(&mut self.plain_peers);
        peers.retain(|id| {
            let Some(plain) = cx.peers.link(*id).and_then(|link| link.plain.as_ref()) else { return false };
            if !plain.is_empty() {
                taken |= self.send_plain_to(cx, sessions, host, *id, now);
            }
            true
        });
        self.plain_peers = peers;
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
            if plain.repair.is_some() {
                let path = quinn.stats().path;
                plain.path = Some(PathCounts {
                    acked: path.sent_packets.saturating_sub(path.lost_packets),
                    lost: path.lost_packets,
                    // quinn-proto does not tell runs of losses apart.
                    runs: path.lost_packets,
                    // Nor does it tell late packets from lost ones.
                    reordered: 0,
                    rtt: path.rtt,
                    // An automatic rate needs lanes.
                    congested: false,
                });
            }
            let (room, ahead) = room_at(peer.data.relay.share.account.rate());
            plain.set_room(room);
            // Before the check for space: frames expire even if the connection takes none. They have had the same time in the queue
            // before, which is longer than the configured one under a rate.
            let limit = peer.data.relay.time_limit();
            if let Some(late) = plain.pop_late(now, limit) {
                if late.counted {
                    cx.settle_plain(id, DropReason::Expired);
                }
                continue;
            }
            if quinn.datagrams().send_buffer_space() < DATAGRAM_BUFFER_BYTES - ahead {
                // Expired frames may have left room for the queue behind them, which only this function fills.
                blocked = !plain.is_empty();
                break;
            }
            let Some(mut frame) = plain.pop(now) else { break };
            taken = true;
            let dropped = match sessions.control.send_frame(handle, frame.data, frame.counted) {
                // The payload is settled when quinn-proto sends or drops the frame.
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
        if let Some(peer) = cx.peers.get_mut(id) {
            peer.data.take_plain_repair_counts();
            let plain = peer.data.link.as_ref().and_then(|link| link.plain.as_ref());
            if let Some(oldest) = plain.and_then(Plain::oldest) {
                let late = oldest + peer.data.relay.time_limit() + Duration::from_millis(1);
                cx.timers.arm(Timer::Queue(id), late);
            }
        }
        cx.watch_plain_repair(id);
        // The frames are gone: the peer's queue behind them comes next.
        if !blocked {
            self.drain_queue(cx, host, id, now);
        }
        taken
    }
}

impl Context {
    /// Counts a payload for a peer without lanes that was dropped before quinn-proto had it.
    pub(super) fn settle_plain(&mut self, peer: PeerId, dropped: DropReason) {
        if let Some(state) = self.peers.get_mut(peer) {
            state.data.relay.settle_uplink(Settlement { peer, payloads: 1, dropped: Some(dropped) });
        }
    }
}
