//! Standard mode: the frames that peers without lanes have sent.

use std::time::Instant;

use base::ids::{LaneRef, PeerId};
use dataplane::{datapath::downlink::Came, relay::DropReason};
use net::batch::Meta;
use quinn_proto::ConnectionHandle;

use crate::worker::turn::Worker;

impl Worker {
    /// Takes the frames that waited for this turn, of one peer after the other.
    pub(crate) fn take_waiting_plain(&mut self, now: Instant) {
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
    pub(crate) fn take_plain(&mut self, now: Instant) {
        while let Some(handle) = self.sessions.control.take_fed() {
            self.plain_datagrams(handle, now);
        }
    }

    /// Handles the frames that have come on a control connection, as far as the turn's share of work allows.
    pub(crate) fn plain_datagrams(&mut self, handle: ConnectionHandle, now: Instant) {
        let Some(connection) = self.sessions.control.get(handle) else { return };
        let (peer, source) = (connection.identity.peer(), connection.path().destination);
        // Before the peer's hello its flows are not known. Frames wait in quinn-proto, which bounds them.
        let Some(peer) = peer.filter(|id| self.cx.peers.is_session(*id, handle)) else { return };
        if self.sessions.refuses_plain(handle) {
            return self.drop_plain(handle, peer);
        }
        let mut taken = 0;
        let is_all = loop {
            if self.data.notes.work.is_over() || self.data.notes.shares.is_spent(peer) {
                if !self.data.plain_waiting.contains(&handle) {
                    self.data.plain_waiting.push_back(handle);
                }
                break false;
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
                break true;
            }
            taken += self.data.batch.len() as u64;
            let mut cost = 0;
            self.downlink(now, |downlink, batch| {
                cost = downlink.frames(batch, LaneRef { peer, lane: 0 }, Came::ByConnection);
            });
            self.charge_plain(handle, peer, cost, false);
        };
        if is_all {
            self.charge_plain(handle, peer, 0, true);
        }
        if taken > 0 {
            self.drive_plain_repair(peer, now);
        }
        // Frames are dropped only to make room for others.
        let lost = self.sessions.control.frames_taken(handle, taken, is_all);
        if lost > 0
            && let Some(state) = self.cx.peers.get_mut(peer)
        {
            state.data.relay.downlink.receive(lost, 0);
            state.data.relay.downlink.drop(DropReason::PlainOverflow, lost);
        }
    }

    /// Drops the frames of a peer with a preshared key: whoever breaks TLS could have sent them.
    fn drop_plain(&mut self, handle: ConnectionHandle, peer: PeerId) {
        let Some(quinn) = self.sessions.control.quinn(handle) else { return };
        let (mut frames, mut bytes) = (0, 0);
        while let Some(data) = quinn.datagrams().recv() {
            frames += 1;
            bytes += data.len() as u64;
        }
        let lost = self.sessions.control.frames_taken(handle, frames, true);
        if let Some(state) = self.cx.peers.get_mut(peer) {
            state.data.relay.downlink.receive(frames + lost, bytes);
            state.data.relay.downlink.drop(DropReason::NotAllowed, frames + lost);
        }
    }
}
