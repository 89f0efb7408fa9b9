//! Hand-off batches: what comes from other workers, and what goes to them.

use std::time::{Duration, Instant};

use dataplane::{
    datapath::{
        downlink::Received,
        segments::{Marks, Segments},
    },
    hand_off::{HandOff, Kind},
    relay::{Account, DropReason},
};
use gate::decoy::DecoyDrop;
use net::batch::Meta;
use wire::ids::LaneRef;

use crate::worker::{Worker, context::Context, parts::DataPlane};

/// Frames came from a process of the peer that has been replaced: nobody knows their flows.
pub(super) fn drop_outdated(downlink: &mut Account, hand_off: &HandOff) {
    downlink.receive(hand_off.counted(), hand_off.counted_bytes());
    downlink.drop(DropReason::UnknownFlow, hand_off.counted());
}

/// Hand-off batches that are taken in one turn, so that the worker's own sockets get theirs.
const HAND_OFFS_PER_TURN: usize = 64;

impl Worker {
    /// Takes in some of what other workers handed over, before this one's own sockets.
    pub(super) fn accept_hand_offs(&mut self, now: Instant) {
        for _ in 0..HAND_OFFS_PER_TURN {
            if self.data.notes.work.is_over() {
                return;
            }
            let Some(hand_off) = self.data.hand_offs.pop_front() else { return };
            self.cx.stats.unpublished = true;
            self.cx.stats.totals.handed_in[hand_off.kind.label_index()] += hand_off.datagrams();
            if self.cx.is_outdated(&hand_off) {
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
                Kind::Strangers { port } => self.data.strangers.take_over(&hand_off, port),
                Kind::Frames { peer, lane } => {
                    self.take_batches(&hand_off, waited, |worker| {
                        worker
                            .downlink(now, |downlink, batch| downlink.frames(batch, LaneRef { peer, lane }));
                    });
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
                            let marks = Marks { tos: piece.tos, age: waited + piece.meta.age };
                            uplink.take_over(lane, piece.counted_header(), run, marks);
                        }
                    }
                    self.cx.report_too_large(peer, now);
                    self.cx.watch_queue(peer, now);
                }
            }
        }
    }

    /// Puts the pieces of a hand-off batch, which has `waited`, where received buffers lie, and lets `pass` take each batch.
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
    /// Whether payloads are for a process of the peer that has been replaced, or frames are of one: its flows' numbers are
    /// others' now. They are dropped.
    fn is_outdated(&mut self, hand_off: &HandOff) -> bool {
        let Some(peer) = hand_off.peer().and_then(|peer| self.peers.get_mut(peer)) else {
            return false;
        };
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
    /// Hands over what was collected for other workers in this turn.
    pub(super) fn hand_over(&mut self, cx: &mut Context, now: Instant) {
        for (worker, mut hand_off) in self.outgoing.take() {
            if let Some(peer) = hand_off.peer() {
                hand_off.process = cx.peers.get(peer).map_or(0, |peer| peer.data.process());
            }
            hand_off.handed = Some(now);
            let (kind, datagrams) = (hand_off.kind.label_index(), hand_off.datagrams());
            match cx.hub.hand(worker, hand_off) {
                Ok(()) => cx.stats.totals.handed_out[kind] += datagrams,
                Err(hand_off) => {
                    cx.stats.totals.hand_over_drops[kind] += datagrams;
                    let counted = hand_off.counted();
                    match hand_off.kind {
                        Kind::Packets { .. } => {}
                        Kind::Strangers { .. } => self.strangers.stats.drop(DecoyDrop::Overload, datagrams),
                        Kind::Frames { peer, .. } => {
                            if let Some(state) = cx.peers.get_mut(peer) {
                                state.data.relay.downlink.receive(counted, hand_off.counted_bytes());
                                state.data.relay.downlink.drop(DropReason::HandOverFull, counted);
                            }
                        }
                        Kind::Payloads { peer, .. } | Kind::Returned { peer } => {
                            if let Some(state) = cx.peers.get_mut(peer) {
                                state.data.relay.uplink.handed_over -= counted;
                                state.data.relay.uplink.drop(DropReason::HandOverFull, counted);
                            }
                        }
                    }
                }
            }
        }
    }
}
