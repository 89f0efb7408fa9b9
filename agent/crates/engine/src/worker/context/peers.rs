//! The peers of a worker: added, known by their keys, suspect. The life of a peer's slot:
//!
//! ```text
//!   Live ── PeerRemoved ──► Leaving ── after a while, if nothing is left ──► Vacant ── PeerAdded ──► Live, with another peer
//! ```

use std::{
    mem,
    sync::Arc,
    time::{Duration, Instant},
};

use base::{counts::Counts, ids::PeerId};
use config;
use dataplane::peer::{PeerStanding, Suspicions};

use crate::{
    control::liveness::LEAST_SILENCE,
    origin::PeerOrigin,
    worker::context::{Context, peer_maker::PeerMaker, timer::Timer},
};

impl Context {
    /// Whether a peer with a session was found unresponsive and has not been heard since.
    pub(crate) fn is_unresponsive(&self, id: PeerId, now: Instant) -> bool {
        self.suspicions_of(id).unresponsive
            && self.hub.silence(id, now).is_none_or(|silence| silence >= LEAST_SILENCE)
    }

    /// Whether any suspicion of the session with a peer holds, or the peer has asked to be left: another session may replace it.
    pub(crate) fn is_suspect(&self, id: PeerId, now: Instant) -> bool {
        let suspicions = self.suspicions_of(id);
        suspicions.control_dead || suspicions.leaving || self.is_unresponsive(id, now)
    }

    pub(crate) fn suspicions_of(&self, id: PeerId) -> Suspicions {
        self.peers.link(id).map(|link| link.suspicions).unwrap_or_default()
    }

    /// Adds a peer of the registry to the table, in place of an earlier peer in the same slot.
    pub(crate) fn peer_added(
        &mut self,
        id: PeerId,
        peer: &Arc<config::Peer>,
        origin: PeerOrigin,
        now: Instant,
    ) {
        let mut made = self.maker().make(id, Arc::clone(peer), origin, now);
        let deadline = made.dialler.deadline();
        made.generation = self.peers.get(id).map_or(0, |old| old.generation.wrapping_add(1));
        if let Some(old) = self.peers.insert(made) {
            self.stats.totals.take_over(&old.data.relay);
        }
        if let Some(at) = deadline {
            self.timers.arm(Timer::Dial(id), at);
        }
        if self.dialler_of(id) == self.id.index {
            match origin {
                PeerOrigin::Config | PeerOrigin::State => {
                    tracing::info!(peer = &*peer.name, origin = origin.label(), "peer added")
                }
                // Open-mode peers may come and go often.
                PeerOrigin::Open => tracing::debug!(peer = &*peer.name, "peer of open mode added"),
            }
        }
        self.stats.unpublished = true;
    }

    pub(crate) fn maker(&self) -> PeerMaker<'_> {
        let own_key = self.identity.public_key();
        PeerMaker { config: &self.config, hub: &self.hub, own_key, worker: self.id }
    }

    /// Whether `id` has not been removed and has this key.
    pub(crate) fn knows(&self, id: PeerId, key: &[u8; 32]) -> bool {
        self.peers.get(id).is_some_and(|peer| peer.data.is_live() && peer.has_key(key))
    }

    /// Whether a `[[udp]]` or `[[tcp]]` entry leads to a peer.
    pub(crate) fn forwards_lead_to(&self, id: PeerId) -> bool {
        let mut open = self.config.udp.iter().chain(&self.config.tcp).filter(|forward| forward.open);
        open.any(|forward| self.peers.of_forward(forward) == id)
    }

    /// Removes an idle open-mode peer, at the one worker that dials it.
    pub(crate) fn expire_if_idle(&mut self, id: PeerId, now: Instant) {
        if self.dialler_of(id) != self.id.index {
            return;
        }
        let Some(peer) = self.peers.get_mut(id) else { return };
        if peer.data.link.is_some() || peer.data.relay.flows.registry.count() > 0 {
            peer.idle_since = None;
            return;
        }
        let since = *peer.idle_since.get_or_insert(now);
        if now.saturating_duration_since(since) >= OPEN_IDLE {
            self.registry.expire(id);
        }
    }

    /// The number of peers.
    pub(crate) fn by_origin(&self) -> Counts<PeerOrigin> {
        let mut known = Counts::default();
        for peer in self.peers.iter().filter(|peer| peer.data.is_live()) {
            known[peer.origin] += 1;
        }
        known
    }

    /// Empties the slot of a removed peer, and takes over its counts; false if there is no such slot.
    pub(crate) fn vacate(&mut self, id: PeerId, now: Instant) -> bool {
        let Some(peer) = self.peers.get(id) else { return false };
        let empty = self.maker().relay(id, &peer.data.config, 0, now);
        let Some(peer) = self.peers.get_mut(id) else { return false };
        peer.data.standing = PeerStanding::Vacant;
        self.stats.totals.take_over(&mem::replace(&mut peer.data.relay, empty));
        self.stats.retired.merge(id);
        self.stats.unpublished = true;
        true
    }
}

/// A peer of open mode without a session and without flows is removed after this long.
const OPEN_IDLE: Duration = Duration::from_secs(60);
