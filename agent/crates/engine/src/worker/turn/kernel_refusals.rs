//! What the kernel of this host refuses to send to peers: it is named, and what was too large is not sent or promised again.
//!
//! A device with a small MTU refuses probes of the path's MTU, too, which is how that is found: only packets that every path
//! carries are worth a word.

use std::{
    collections::BTreeSet,
    time::{Duration, Instant},
};

use base::ids::PeerId;
use dataplane::lanes::{LaneId, UnderlayId};
use net::{RefusedBy, SendRefusal};
use quic_core::TRANSMIT_CAPACITY;
use wire::messages::CloseReason;

use crate::worker::{
    context::{
        Context,
        causes::{refused_in_words, remedy},
    },
    lanes::host::name_of_lane,
    turn::Worker,
};

/// Limit on refusals that are looked at in a turn; others come again with the next packets.
const MOST_IN_TURN: usize = 32;

/// A session ends after its host has refused the least packets of QUIC for so long (RFC 9000 §14.2 would have it end at once, and a
/// device whose MTU is changed twice would end it for nothing).
const NARROW_LIMIT: Duration = Duration::from_secs(30);

impl Worker {
    /// Handles what the kernel has refused to send in this turn.
    pub(crate) fn take_refusals(&mut self, now: Instant) {
        if self.cx.sockets.underlays.refusals.is_empty() {
            return;
        }
        let mut refusals = std::mem::take(&mut self.cx.sockets.underlays.refusals);
        for (underlay, refusal) in refusals.drain(..).take(MOST_IN_TURN) {
            self.packet_refused(underlay, refusal, now);
        }
    }

    fn packet_refused(&mut self, underlay: UnderlayId, refusal: SendRefusal, now: Instant) {
        let to = refusal.destination;
        let lanes = self.cx.sockets.lanes.iter().filter(|(_, slot)| {
            slot.underlay == underlay && slot.path().is_some_and(|path| path.destination == to)
        });
        let lanes: Vec<(LaneId, PeerId)> = lanes.map(|(id, slot)| (id, slot.peer)).collect();
        let connection =
            self.sessions.control.iter().find(|it| it.underlay == underlay && it.path().destination == to);
        let peer = lanes.first().map(|(_, peer)| *peer).or_else(|| connection?.identity.peer());
        if refusal.by() == RefusedBy::Mtu {
            for (lane, _) in lanes {
                if let Some(slot) = self.cx.sockets.lanes.get_mut(lane) {
                    slot.size.refused(&mut slot.core, refusal.bytes, now);
                    self.cx.sockets.lanes.touch(lane);
                }
                self.cx.note_path_packet(lane, now);
                self.settle_effects(now);
            }
            self.sessions.control.packet_refused(underlay, to, refusal.bytes, now);
        }
        let is_probe = refusal.by() == RefusedBy::Mtu && refusal.bytes > TRANSMIT_CAPACITY;
        if let Some(peer) = peer.filter(|_| !is_probe) {
            self.cx.note_kernel_refusal(peer, refusal, now);
        }
    }

    /// Once a second: has sockets asked that refused the least packets of QUIC, and ends sessions for which they have done so for
    /// long.
    pub(crate) fn look_at_narrow(&mut self, now: Instant) {
        let narrow = self.cx.sockets.lanes.iter().filter(|(_, slot)| slot.size.is_narrow() && slot.is_up());
        let narrow: Vec<LaneId> = narrow.map(|(id, _)| id).collect();
        for lane in narrow {
            let Some(slot) = self.cx.sockets.lanes.get_mut(lane) else { continue };
            let (since, of) = (slot.size.narrow_since(&mut slot.core, now), name_of_lane(slot).of);
            self.cx.sockets.lanes.touch(lane);
            let is_over = since.is_some_and(|since| now.saturating_duration_since(since) >= NARROW_LIMIT);
            if is_over && self.cx.peers.link_named(of).is_some() {
                self.end_narrow(of.peer, now);
            }
        }
        // Standard mode has no lanes, and TCP forwards have connections of their own.
        let is_over = |since| now.saturating_duration_since(since) >= NARROW_LIMIT;
        let connections = self.sessions.control.iter().filter(|it| !it.is_over());
        let over = connections.filter(|it| it.narrow().since(now).is_some_and(is_over));
        let peers: BTreeSet<PeerId> = over.filter_map(|it| it.identity.peer()).collect();
        for peer in peers {
            if self.cx.peers.get(peer).is_some_and(|peer| peer.data.link.is_some()) {
                self.end_narrow(peer, now);
            }
        }
    }

    fn end_narrow(&mut self, peer: PeerId, now: Instant) {
        self.cx.report_narrow(peer, now);
        self.cx.hub.end_session(peer, CloseReason::TooNarrow);
    }
}

impl Context {
    fn note_kernel_refusal(&mut self, id: PeerId, refusal: SendRefusal, now: Instant) {
        let Some(peer) = self.peers.get_mut(id) else { return };
        peer.reach.refuse(refusal, now);
        let SendRefusal { destination, bytes, .. } = refusal;
        throttled!(
            warn, peer.throttles.kernel_refusals.allow(now),
            { peer = &**peer.name(), %destination, bytes, error = %refusal.error() },
            "this host refuses to send packets to the peer (remedy: {})", remedy(refusal)
        );
    }

    fn report_narrow(&mut self, id: PeerId, now: Instant) {
        let Some(peer) = self.peers.get_mut(id) else { return };
        let Some(refused) = peer.reach.kernel_refusal() else { return };
        let reason = format!("{} for {} s", refused_in_words(refused.last), NARROW_LIMIT.as_secs());
        peer.reach.fail(reason, &[remedy(refused.last)], now);
        throttled!(
            warn,
            peer.throttles.connections.allow(now),
            { peer = &**peer.name() },
            "this host has refused the smallest packets of QUIC for {} s: the session ends, and a peer with endpoints is dialled again \
             (remedy: {})",
            NARROW_LIMIT.as_secs(),
            remedy(refused.last)
        );
    }
}
