//! When a peer is dialled, and what is noted of failures.

use std::time::{Duration, Instant};

use base::ids::{PeerId, WorkerId};
use dataplane::sockets::Source;
use gate::{identity::Endpoint, tls::KeyExchange};

use crate::{
    control::dial::{IDLE_INTERVAL, Step},
    hub::WorkerMessage,
    reach::Failure,
    worker::context::{Context, timer::Timer},
};

impl Context {
    pub(crate) fn look_up(&mut self, id: PeerId, endpoint: &Endpoint, now: Instant) {
        tracing::debug!(peer = self.peers.name(id), %endpoint, "looking up");
        let token = self.sockets.factory.token(Source::Resolve(id));
        self.sockets.factory.resolve(&endpoint.host, endpoint.port, token);
        if let Some(peer) = self.peers.get_mut(id) {
            peer.dialler.looks_up(token, now);
        }
    }

    /// Arms the timer of a peer's dialler, and releases the tokens that it no longer needs.
    pub(crate) fn watch_dialler(&mut self, id: PeerId) {
        self.arm_dial(id);
        let Some(peer) = self.peers.get_mut(id) else { return };
        for token in peer.dialler.take_abandoned() {
            self.sockets.factory.release(token);
        }
    }

    /// Arms the timer of a peer's dialler, if the dialler has a deadline.
    pub(crate) fn arm_dial(&mut self, id: PeerId) {
        if let Some(at) = self.peers.get(id).and_then(|peer| peer.dialler.deadline()) {
            self.timers.arm(Timer::Dial(id), at);
        }
    }

    pub(crate) fn next_step(&mut self, id: PeerId, now: Instant) -> Option<Step> {
        let peer = self.peers.get_mut(id)?;
        let suspicions = peer.data.link.as_ref().map(|link| link.suspicions).unwrap_or_default();
        let awaited = peer.demand.is_awaited(now);
        let waiting =
            suspicions.control_dead || suspicions.leaving || awaited || peer.data.relay.oldest().is_some();
        // With a keepalive, a peer that is back is found within the keepalive interval.
        let slowest = peer.data.config.keepalive.unwrap_or(IDLE_INTERVAL);
        let may_fall_back = self.config.transport.key_exchange == KeyExchange::Hybrid;
        peer.dialler.step(waiting, slowest, may_fall_back, now, &mut self.rng)
    }

    /// Whether a peer that has not been removed lacks a session, or its session is suspect.
    pub(crate) fn needs_dialling(&self, id: PeerId, now: Instant) -> bool {
        self.peers.is_live(id) && (self.peers.link(id).is_none() || self.is_suspect(id, now))
    }

    /// Notes why a peer is not reached, for status.
    pub(crate) fn fail(&mut self, id: PeerId, failure: Failure, now: Instant) {
        if let Some(peer) = self.peers.get_mut(id) {
            peer.reach.fail_with(failure, now);
        }
    }

    pub(crate) fn report_failure(&mut self, id: PeerId, failure: Failure, now: Instant) {
        if let Some(peer) = self.peers.get_mut(id) {
            throttled!(
                warn, peer.throttles.attempts.allow(now), { peer = &**peer.name(), reason = &*failure.reason },
                "could not connect. Likely causes: {}", failure.causes.join("; ")
            );
        }
        self.fail(id, failure, now);
    }

    /// Dials a peer beside its suspect session, if this worker dials the peer. A peer that dials us does the same when it notices.
    pub(crate) fn dial_anew(&mut self, id: PeerId, delay: Duration, why: &'static str, now: Instant) {
        if self.dialler_of(id) != self.id.index {
            return;
        }
        let Some(state) = self.peers.get_mut(id) else { return };
        if state.dialler.is_scheduled() || state.data.config.endpoints.is_empty() {
            return;
        }
        throttled!(warn, state.throttles.unresponsive.allow(now), { peer = &**state.name() }, "{why}");
        state.dialler.restart(Some(delay), now, &mut self.rng);
        self.arm_dial(id);
    }

    /// Dials a peer that has asked to be left, beside its session: another endpoint first, if there is one. A peer that asks again
    /// and again costs a handshake every few seconds.
    pub(crate) fn dial_elsewhere(&mut self, id: PeerId, now: Instant) {
        if self.dialler_of(id) != self.id.index {
            return;
        }
        let Some(peer) = self.peers.get_mut(id) else { return };
        if peer.data.config.endpoints.is_empty() {
            return;
        }
        let earliest = peer.demand.leave(now);
        peer.dialler.restart_elsewhere(peer.reach.dialled(), earliest);
        if let Some(suppressed) = peer.throttles.connections.allow(now) {
            tracing::info!(
                peer = &**peer.name(),
                suppressed = base::throttle::counted(suppressed),
                "the peer is about to stop; dialling elsewhere"
            );
        }
        self.arm_dial(id);
    }

    /// Dials a peer again after its session has ended at any worker, if this worker dials the peer.
    pub(crate) fn redial(&mut self, id: PeerId, now: Instant) {
        if self.stopping || self.dialler_of(id) != self.id.index || !self.peers.is_live(id) {
            return;
        }
        let Some(peer) = self.peers.get_mut(id) else { return };
        if !peer.dialler.is_scheduled() {
            peer.dialler.restart(None, now, &mut self.rng);
        }
        self.arm_dial(id);
    }

    /// The worker that dials a peer: always the same one, so that the peer's lanes stay with their workers.
    pub(crate) fn dialler_of(&self, id: PeerId) -> u8 {
        u8::try_from(id.0 % u32::from(self.id.count)).unwrap_or(0)
    }

    /// Has an unreachable peer dialled soon because datagrams wait for it.
    pub(crate) fn dial_soon(&mut self, id: PeerId, now: Instant) {
        let dialler = self.dialler_of(id);
        let Some(peer) = self.peers.get_mut(id) else { return };
        if peer.data.is_well() || self.stopping || !peer.data.is_live() {
            return;
        }
        if dialler == self.id.index {
            peer.dialler.dial_soon(now);
            self.arm_dial(id);
        } else if peer.demand.tells_dialler(now) {
            self.hub.send(dialler, WorkerMessage::DialSoon { peer: id });
        }
    }

    /// Has an unreachable peer dialled soon, and often for a while, because something waits for it elsewhere than in its queue here.
    pub(crate) fn await_soon(&mut self, id: PeerId, now: Instant) {
        if let Some(peer) = self.peers.get_mut(id) {
            peer.demand.wait(now);
        }
        self.dial_soon(id, now);
    }
}

/// Whether `worker` is the one worker that dials `peer`.
pub(crate) fn dials(peer: PeerId, worker: WorkerId) -> bool {
    peer.0 % u32::from(worker.count) == u32::from(worker.index)
}
