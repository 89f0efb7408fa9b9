//! Hand-off batches from and to other workers.

use std::time::Instant;

use dataplane::{
    hand_off::{HandOff, Kind},
    relay::DropReason,
};
use gate::decoy::DecoyDrop;

use crate::worker::{
    context::Context,
    local::{DataPlane, drop_outdated},
};

impl Context {
    /// Drops payloads for, and frames from, an earlier process of the peer, whose flow numbers mean other flows now. Returns whether
    /// it did.
    pub(crate) fn drop_if_outdated(&mut self, hand_off: &HandOff) -> bool {
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
    pub(crate) fn send_hand_offs(&mut self, cx: &mut Context, now: Instant) {
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
