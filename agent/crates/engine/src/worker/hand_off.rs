//! Hand-off batches from and to other workers.

use std::time::{Duration, Instant};

use base::ids::LaneRef;
use dataplane::{
    datapath::{
        downlink::Received,
        segments::{Segments, Sending},
        work::HANDED_PER_TURN,
    },
    hand_off::{HandOff, Kind},
    relay::{Account, DropReason},
};
use gate::decoy::DecoyDrop;
use net::batch::Meta;

use crate::worker::{Worker, context::Context, parts::DataPlane};

/// Drops frames from an earlier process of the peer, whose flows no longer exist.
pub(super) fn drop_outdated(downlink: &mut Account, hand_off: &HandOff) {
    downlink.receive(hand_off.counted(), hand_off.counted_bytes());
    downlink.drop(DropReason::UnknownFlow, hand_off.counted());
}

/// Limit on hand-off batches accepted in one turn, so that the worker's own sockets get their share.
const HAND_OFFS_PER_TURN: usize = 64;

impl Worker {
    /// Accepts hand-off batches of other workers, before this worker's own sockets are served.
    pub(super) fn accept_hand_offs(&mut self, now: Instant) {
        let (worker, seen) = (self.cx.id.index, self.data.handed);
        self.data.notes.work.begin_share(HANDED_PER_TURN);
        for _ in 0..HAND_OFFS_PER_TURN {
            let notes = &self.data.notes;
            if notes.work.is_over() {
                break;
            }
            let next = self.cx.hub.next_hand_off(worker, seen, |peer| notes.shares.is_spent(peer));
            let Some(hand_off) = next else { break };
            self.cx.stats.unpublished = true;
            self.cx.stats.totals.handed_in[hand_off.kind.content()] += hand_off.datagrams();
            if self.cx.drop_if_outdated(&hand_off) {
                continue;
            }
            let waited =
                hand_off.handed.map_or(Duration::ZERO, |handed| now.saturating_duration_since(handed));
            match hand_off.kind {
                Kind::Packets { port } => {
                    let Some(underlay) = self.cx.sockets.ports.get(port).copied() else { continue };
                    let received = Received { underlay, port: Some(port) };
                    self.take_batches(&hand_off, waited, |worker| {
                        worker.downlink(now, |downlink, batch| downlink.whole_batch(batch, received));
                    });
                }
                Kind::Unauthenticated { port } => self.data.unauthenticated.accept(&hand_off, port),
                Kind::Frames { peer, lane } => {
                    let mut cost = 0;
                    self.take_batches(&hand_off, waited, |worker| {
                        worker.downlink(now, |downlink, batch| {
                            cost += downlink.frames(batch, LaneRef { peer, lane });
                        });
                    });
                    self.data.notes.shares.charge_later(peer, cost);
                }
                Kind::Returned { peer } => {
                    if let Some(mut uplink) = self.data.uplink(&mut self.cx, &mut self.host, peer, now) {
                        for (piece, data) in hand_off.pieces() {
                            let run = Segments { data, segment: piece.meta.segment };
                            uplink.take_back(waited + piece.meta.age, piece.counted_header(), run);
                        }
                    }
                    self.cx.watch_queue(peer, now);
                }
                Kind::Payloads { peer, lane } => {
                    if let Some(mut uplink) = self.data.uplink(&mut self.cx, &mut self.host, peer, now) {
                        for (piece, data) in hand_off.pieces() {
                            let run = Segments { data, segment: piece.meta.segment };
                            let age = waited + piece.meta.age;
                            let sending = Sending { tos: piece.tos, age, repair: piece.repair };
                            uplink.take_over(lane, piece.counted_header(), run, sending);
                        }
                    }
                    self.cx.report_too_large(peer, now);
                    self.data.look_at_queue(&mut self.cx, &mut self.host, peer, now);
                }
            }
        }
        let shares = &mut self.data.notes.shares;
        let left = self.cx.hub.has_seen(worker, seen, |peer| shares.is_spent(peer));
        shares.handed(left, now);
    }

    /// Copies the pieces of a hand-off batch, which has `waited`, into the receive batch, and runs `pass` over each full one.
    fn take_batches(&mut self, hand_off: &HandOff, waited: Duration, mut pass: impl FnMut(&mut Self)) {
        self.data.batch.clear();
        for (piece, data) in hand_off.pieces() {
            if self.data.batch.len() == self.data.batch.slots() {
                pass(self);
                self.data.batch.clear();
            }
            let meta = Meta { age: piece.meta.age + waited, ..piece.meta };
            self.data.batch.push(meta, data);
        }
        if !self.data.batch.is_empty() {
            pass(self);
        }
    }
}

impl Context {
    /// Drops payloads for, and frames from, an earlier process of the peer, whose flow numbers mean other flows now. Returns whether
    /// it did.
    fn drop_if_outdated(&mut self, hand_off: &HandOff) -> bool {
        let Some(peer) = hand_off.peer().and_then(|peer| self.peers.get_mut(peer)) else { return false };
        if peer.data.process() == hand_off.process {
            return false;
        }
        if let Kind::Frames { .. } = hand_off.kind {
            drop_outdated(&mut peer.data.relay.downlink, hand_off);
        } else {
            peer.data.relay.uplink.taken_over += hand_off.counted();
            peer.data.relay.uplink.drop(DropReason::LaneClosed, hand_off.counted());
        }
        true
    }
}

impl DataPlane {
    /// Sends the hand-off batches collected for other workers in this turn.
    pub(super) fn send_hand_offs(&mut self, cx: &mut Context, now: Instant) {
        for (worker, mut hand_off) in self.outgoing.take() {
            if let Some(peer) = hand_off.peer() {
                hand_off.process = cx.peers.get(peer).map_or(0, |peer| peer.data.process());
            }
            hand_off.handed = Some(now);
            let (kind, datagrams) = (hand_off.kind.content(), hand_off.datagrams());
            match cx.hub.hand(worker, hand_off) {
                Ok(()) => cx.stats.totals.handed_out[kind] += datagrams,
                Err(hand_off) => {
                    cx.stats.totals.hand_over_drops[kind] += datagrams;
                    if let Kind::Unauthenticated { .. } = hand_off.kind {
                        self.unauthenticated.stats.drop(DecoyDrop::Overload, datagrams);
                    }
                    let Some(peer) = hand_off.peer().and_then(|peer| cx.peers.get_mut(peer)) else {
                        continue;
                    };
                    let (relay, counted) = (&mut peer.data.relay, hand_off.counted());
                    if let Kind::Frames { .. } = hand_off.kind {
                        relay.downlink.receive(counted, hand_off.counted_bytes());
                        relay.downlink.drop(DropReason::HandOverFull, counted);
                    } else {
                        relay.uplink.handed_over -= counted;
                        relay.uplink.drop(DropReason::HandOverFull, counted);
                    }
                }
            }
        }
    }
}
