//! Whether the far end of a session still answers on its control connection, and what keeps that and idle lanes alive.

use std::time::{Duration, Instant};

use super::{HOUSEKEEPING_INTERVAL, Worker, exchange::Order, keeper::LEAST_SILENCE};
use crate::{
    control::vigil::Finding,
    lanes::LaneId,
    peer::{Doubt, PeerId, SessionId},
};

/// A lane that was heard within this time keeps its control connection alive, which else ends after 30 s.
const IN_USE: Duration = Duration::from_secs(10);

/// A control connection is given up at the earliest after so long in which nothing was heard on it, and its lanes were.
const LEAST_DEAFNESS: Duration = Duration::from_secs(2);

impl Worker {
    /// Once a second: whether a peer answers on the control connection.
    pub(super) fn check_control(&mut self, id: PeerId, now: Instant) {
        let Some(session) = self.session_of(id) else { return };
        let (name, handle) = (session.id, session.handle);
        let is_laneless = session.dialled && session.openings.wanted > 0 && session.openings.mask() == 0;
        let Some(quinn) = self.control.quinn(handle) else { return };
        if is_laneless {
            // It has no lane to fall silent, and has asked for some.
            quinn.ping();
        }
        let (stats, rtt) = (quinn.stats(), quinn.rtt());
        let lanes = self.exchange.silence(id, now);
        let lanes_heard =
            lanes.is_some_and(|silence| silence < HOUSEKEEPING_INTERVAL + LEAST_SILENCE.max(rtt * 2));
        let counts = (stats.udp_rx.datagrams, stats.udp_tx.datagrams);
        let Some(session) = self.session_mut(id) else { return };
        let finding = session.vigil.look(counts, lanes_heard, LEAST_DEAFNESS.max(rtt * 6), now);
        if !is_laneless {
            session.laned = now;
        }
        // As long as for an opening that is not answered: it may have gone just when the handshake was complete.
        let silence = session.vigil.silence(now).min(now.saturating_duration_since(session.laned));
        if is_laneless && silence >= LEAST_SILENCE.max(rtt * 6) {
            self.doubt(id, name, Doubt::Silent, now);
            return;
        }
        let known = self.link_named(id, name).map(|link| link.doubt);
        match finding {
            Finding::Answers if known == Some(Doubt::Deaf) => self.doubt(id, name, Doubt::None, now),
            Finding::Answers => {}
            Finding::Waits | Finding::Deaf => {
                if let Some(quinn) = self.control.quinn(handle) {
                    quinn.ping();
                }
                // Idle lanes tell whether the peer is there; else it falls silent on them.
                self.tell_all(|| Order::AskForLife { peer: id, session: name }, now);
                if finding == Finding::Deaf && known == Some(Doubt::None) {
                    self.doubt(id, name, Doubt::Deaf, now);
                }
            }
        }
    }

    /// The far end of a lane asked whether its packets come from us. If the lane has been up for a while, and we dialled, that is
    /// because they reach it from another address: most likely a NAT has forgotten all of our ports, not this one alone.
    pub(super) fn lane_challenged(&mut self, id: LaneId, now: Instant) {
        let Some(slot) = self.lanes.get(id).filter(|slot| slot.is_up()) else { return };
        let (peer, session) = (slot.peer, slot.session);
        if now.saturating_duration_since(slot.opened) < LEAST_SILENCE {
            return;
        }
        let dialled = self.link_named(peer, session).filter(|link| link.dialled);
        if let Some(owner) = dialled.map(|link| link.pool.owner()) {
            self.tell(owner, Order::Challenged { peer, session }, now);
        }
    }

    /// A packet on the control connection and on each lane tells the peer where we are, so that what it sends on them comes here:
    /// it cannot follow us before it hears us (RFC 9000 §9.3), and has no other way to ask.
    pub(super) fn address_doubted(&mut self, peer: PeerId, name: SessionId, now: Instant) {
        let Some(session) = self.session_named(peer, name) else { return };
        if now.saturating_duration_since(session.told) < LEAST_SILENCE {
            return;
        }
        session.told = now;
        let handle = session.handle;
        if let Some(quinn) = self.control.quinn(handle) {
            quinn.ping();
        }
        self.tell_all(|| Order::AskForLife { peer, session: name }, now);
    }

    /// Asks a peer for a sign of life on all that its session has.
    pub(super) fn ask_the_session(&mut self, peer: PeerId, now: Instant) {
        let link = self.peers.get(peer.0 as usize).and_then(|peer| peer.link.as_ref());
        let Some((session, owner)) = link.map(|link| (link.session, link.pool.owner())) else { return };
        self.tell_all(|| Order::AskForLife { peer, session }, now);
        self.tell(owner, Order::Challenged { peer, session }, now);
    }

    /// Idle lanes of a dialled session are kept alive, each has a NAT mapping of its own.
    pub(super) fn keep_alive(&mut self, id: PeerId, now: Instant) {
        let Some(peer) = self.peers.get_mut(id.0 as usize) else { return };
        let Some(link) = peer.link.as_ref().filter(|link| link.dialled) else { return };
        if let Some(interval) = peer.config.keepalive {
            for lane in link.pool.lanes() {
                let Some(slot) = self.lanes.get_mut(lane).filter(|slot| slot.is_up()) else { continue };
                let last = slot.core.last_heard().unwrap_or(slot.opened);
                // So early that the interval is not over before the peer is known to be silent.
                let early = HOUSEKEEPING_INTERVAL + LEAST_SILENCE;
                if now.saturating_duration_since(last) >= interval.saturating_sub(early) {
                    slot.core.request_ping();
                    self.lanes.touch(lane);
                }
            }
        }
        // Without a keepalive the control connection lives for as long as its lanes are used.
        let used = self.exchange.silence(id, now).is_some_and(|silence| silence < IN_USE);
        let interval = peer.config.keepalive.or_else(|| used.then_some(IN_USE));
        if let Some(session) = peer.session.as_mut().filter(|session| !session.keeps_alive)
            && interval.is_some_and(|interval| now.saturating_duration_since(session.pinged) >= interval)
            && let Some(quinn) = self.control.quinn(session.handle)
        {
            session.pinged = now;
            quinn.ping();
        }
    }
}
