//! Whether the far end of a session still answers on its control connection, and what keeps that and idle lanes alive.

use std::time::{Duration, Instant};

use dataplane::{
    lanes::LaneId,
    peer::{Doubt, Doubts},
};
use quinn_proto::ConnectionStats;
use wire::{
    ids::{PeerId, SessionId, SessionRef},
    messages::Message,
};

use crate::{
    control::liveness::{Finding, FrameCounts, Look},
    hub::WorkerMessage,
    worker::{
        context::{Context, Effect},
        parts::{LaneHost, Sessions},
        timer::HOUSEKEEPING_INTERVAL,
    },
};

/// A lane that was heard within this time keeps its control connection alive, which else ends after 30 s.
pub(super) const IN_USE: Duration = Duration::from_secs(10);

/// A control connection is given up at the earliest after so long in which nothing was acknowledged on it, and lanes were heard. A path
/// that loses 87 of 100 packets, as a listener does whose CPU carries an eighth of what comes, loses all of the 19 that are
/// sent meanwhile once in fourteen times; the next connection fares no better, and this one is asked again before it ends.
pub(super) const LEAST_CONTROL_SILENCE: Duration = Duration::from_secs(4);

/// A peer is not told more often where we are, whatever it asks. A NAT that changes its mind twice within that is found by silence.
pub(super) const TELL_INTERVAL: Duration = Duration::from_millis(50);

impl Sessions {
    /// Once a second: whether a peer answers on the control connection.
    pub(super) fn check_control(&mut self, cx: &mut Context, id: PeerId, now: Instant) {
        let Some(session) = cx.peers.session(id) else { return };
        let (name, handle) = (session.id, session.handle);
        let has_lanes = session.openings.wanted > 0;
        let is_laneless = session.dialled && has_lanes && session.openings.mask() == 0;
        let Some(quinn) = self.control.get(handle).map(|connection| connection.quinn()) else {
            return;
        };
        let (stats, rtt) = (quinn.stats(), quinn.rtt());
        let seen = Look { frames: counts(&stats), lanes: cx.hub.silence(id, now), rtt };
        let Some(session) = cx.peers.session_mut(id) else { return };
        let waited = session.liveness.waits();
        let finding = session.liveness.look(seen, LEAST_CONTROL_SILENCE.max(rtt * 6), now);
        let (begins, dialled) = (session.liveness.waits() && !waited, session.dialled);
        let since = is_laneless.then(|| session.laneless_since.unwrap_or(now));
        session.laneless_since = since;
        let answered = session.liveness.silence(now);
        if begins && dialled && has_lanes {
            // If a NAT gave us another address, pings are too short for an answer.
            self.control.send(handle, &Message::Here);
        } else if finding != Finding::Answers || is_laneless {
            // One without a lane has none to fall silent, and has asked for some.
            if let Some(quinn) = self.control.quinn(handle) {
                quinn.ping();
            }
        }
        // As long as for an opening that is not answered: it may have gone just when the handshake was complete.
        let limit = LEAST_SILENCE.max(rtt * 6);
        if since.is_some_and(|since| answered.min(now.saturating_duration_since(since)) >= limit) {
            cx.doubt(SessionRef { peer: id, session: name }, Doubt::Silent, true);
            return;
        }
        let is_silent = cx.peers.link_named(id, name).is_some_and(|link| link.doubts.silent);
        if finding != Finding::Answers && has_lanes && !is_silent {
            // Idle lanes tell whether the peer is there; else it falls silent on them.
            cx.tell_all(|| WorkerMessage::AskForLife { peer: id, session: name });
        }
        match finding {
            Finding::Answers => cx.doubt(SessionRef { peer: id, session: name }, Doubt::ControlDead, false),
            Finding::Waits => {}
            Finding::ControlDead => {
                cx.doubt(SessionRef { peer: id, session: name }, Doubt::ControlDead, true)
            }
        }
    }

    /// A packet on the control connection and on each lane tells the peer where we are, so that what it sends on them comes here:
    /// it cannot follow us before it hears us (RFC 9000 §9.3), and has no other way to ask.
    pub(super) fn address_doubted(&mut self, cx: &mut Context, peer: PeerId, name: SessionId, now: Instant) {
        let Some(session) = cx.peers.session_named(peer, name) else { return };
        if session.told.is_some_and(|at| now.saturating_duration_since(at) < TELL_INTERVAL) {
            return;
        }
        session.told = Some(now);
        let handle = session.handle;
        self.control.send(handle, &Message::Here);
        cx.tell_all(|| WorkerMessage::AskForLife { peer, session: name });
    }

    /// The far end of a connection that we dialled is at another address. A lane can follow it, the control connection cannot (RFC
    /// 9000 §9): unless it is still reached at the old one, too, it takes a new connection.
    pub(super) fn listener_moved(&mut self, cx: &mut Context, peer: PeerId, name: SessionId) {
        let Some(handle) = cx.peers.session_named(peer, name).map(|session| session.handle) else {
            return;
        };
        if let Some(quinn) = self.control.quinn(handle) {
            quinn.ping();
        }
        cx.doubt(SessionRef { peer, session: name }, Doubt::ControlDead, true);
    }

    /// Idle lanes of a dialled session are kept alive, each has a NAT mapping of its own.
    pub(super) fn keep_alive(&mut self, cx: &mut Context, host: &mut LaneHost, id: PeerId, now: Instant) {
        let Some(peer) = cx.peers.get_mut(id) else { return };
        let Some(link) = peer.data.link.as_ref().filter(|link| link.dialled) else { return };
        if let Some(interval) = peer.data.config.keepalive {
            for lane in link.pool.lanes() {
                let Some(slot) = host.lanes.get_mut(lane).filter(|slot| slot.is_up()) else {
                    continue;
                };
                let last = slot.core.last_heard().unwrap_or(slot.opened);
                // So early that the interval is not over before the peer is known to be silent.
                let early = HOUSEKEEPING_INTERVAL + LEAST_SILENCE;
                if now.saturating_duration_since(last) >= interval.saturating_sub(early) {
                    slot.core.request_ping();
                    host.lanes.touch(lane);
                }
            }
        }
        // Without a keepalive the control connection lives for as long as its lanes are used.
        let used = cx.hub.silence(id, now).is_some_and(|silence| silence < IN_USE);
        let interval = peer.data.config.keepalive.or_else(|| used.then_some(IN_USE));
        if let Some(session) = peer.session.as_mut().filter(|session| !session.keeps_alive)
            && interval.is_some_and(|interval| now.saturating_duration_since(session.pinged) >= interval)
            && let Some(quinn) = self.control.quinn(session.handle)
        {
            session.pinged = now;
            quinn.ping();
        }
    }

    pub(super) fn set_doubt(
        &mut self,
        cx: &mut Context,
        of: SessionRef,
        doubt: Doubt,
        holds: bool,
        now: Instant,
    ) {
        let SessionRef { peer: id, session } = of;
        let Some(link) = cx.peers.link_named(id, session) else { return };
        *link.doubts.of(doubt) = holds;
        let is_well = !link.doubts.any();
        self.note_carrier(cx, id);
        match (doubt, holds) {
            (Doubt::Silent, true) => cx.fell_silent(id, session, now),
            (Doubt::ControlDead, true) => {
                let what =
                    "the peer does not answer on the control connection, only on lanes; dialling it anew";
                cx.dial_anew(id, Duration::ZERO, what, now);
            }
            (_, false) => {
                if cx.peers.session(id).is_some()
                    && let Some(state) = cx.peers.get_mut(id)
                    && let Some(suppressed) = state.throttles.heard.allow(now)
                {
                    tracing::info!(peer = &*state.name, suppressed, "the peer is heard again");
                }
                if is_well {
                    self.stop_dialling(cx, id, now);
                }
                // What came meanwhile waits.
                cx.effects.push_back(Effect::WakeListeners(id));
                if doubt == Doubt::Silent {
                    cx.settle_flows(id);
                    cx.effects.push_back(Effect::Drain(id));
                }
            }
        }
    }

    /// Looks for another way to a peer that fell silent.
    pub(super) fn seek(&mut self, cx: &mut Context, host: &mut LaneHost, id: PeerId, now: Instant) {
        let moved = self.follow_route(cx, host, id, now);
        // What the session says from another address may be answered: a new one would cost its TCP forwards.
        let delay = if moved { LEAST_SILENCE } else { Duration::ZERO };
        cx.dial_anew(id, delay, "the peer fell silent; dialling it anew", now);
    }
}

impl LaneHost {
    /// The far end of a lane asked whether its packets come from us. If that was not to open it, and we dialled, they reach it from
    /// another address: most likely a NAT has forgotten all of our ports, not this one alone.
    pub(super) fn lane_challenged(&mut self, cx: &mut Context, id: LaneId, data: [u8; 8], now: Instant) {
        let Some(slot) = self.lanes.get_mut(id) else { return };
        if !slot.is_challenged_anew(data, TELL_INTERVAL, now) {
            return;
        }
        let (peer, session) = (slot.peer, slot.session);
        let dialled = cx.peers.link_named(peer, session).filter(|link| link.dialled);
        if let Some(owner) = dialled.map(|link| link.pool.owner()) {
            cx.tell(owner, WorkerMessage::Challenged { peer, session });
        }
    }
}

impl Context {
    /// Asks a peer for a sign of life on all that its session has.
    pub(super) fn ask_the_session(&mut self, peer: PeerId) {
        let link = self.peers.get(peer).and_then(|peer| peer.data.link.as_ref());
        let Some((session, owner)) = link.map(|link| (link.session, link.pool.owner())) else { return };
        self.tell_all(|| WorkerMessage::AskForLife { peer, session });
        self.tell(owner, WorkerMessage::Challenged { peer, session });
    }

    /// The owner finds that something speaks against a session, or no longer does.
    pub(super) fn doubt(&mut self, SessionRef { peer, session }: SessionRef, doubt: Doubt, holds: bool) {
        let known = self.peers.link_named(peer, session).is_none_or(|link| *link.doubts.of(doubt) == holds);
        if known {
            return;
        }
        if holds {
            self.stats.totals.sessions_doubted[doubt as usize] += 1;
        }
        self.tell_all(|| WorkerMessage::Doubt { peer, session, doubt, holds });
    }

    /// The owner learns that a peer is heard: it is silent no more.
    pub(super) fn heard(&mut self, peer: PeerId, session: SessionId) {
        self.doubt(SessionRef { peer, session }, Doubt::Silent, false);
    }

    /// Whether a peer with a session was found silent and has not been heard since.
    pub(super) fn is_silent(&self, id: PeerId, now: Instant) -> bool {
        self.doubts_of(id).silent && self.hub.silence(id, now).is_none_or(|silence| silence >= LEAST_SILENCE)
    }

    /// Whether something speaks against the session with a peer.
    pub(super) fn is_doubted(&self, id: PeerId, now: Instant) -> bool {
        self.doubts_of(id).control_dead || self.is_silent(id, now)
    }

    fn doubts_of(&self, id: PeerId) -> Doubts {
        let link = self.peers.get(id).and_then(|peer| peer.data.link.as_ref());
        link.map_or_else(Doubts::default, |link| link.doubts)
    }

    fn fell_silent(&mut self, id: PeerId, session: SessionId, now: Instant) {
        if self.hub.silence(id, now).is_some_and(|silence| silence < LEAST_SILENCE) {
            // It was heard while the message was under way.
            if let Some(owner) = self.peers.link(id, session).map(|link| link.pool.owner()) {
                self.tell(owner, WorkerMessage::Heard { peer: id, session });
            }
        }
        self.effects.push_back(Effect::SeekPeer(id));
    }
}

/// The frames that have come and gone on a connection. A packet with an ACK alone is never acknowledged.
pub(super) fn counts(stats: &ConnectionStats) -> FrameCounts {
    let sent = &stats.frame_tx;
    let asking = sent.ping + sent.stream + sent.datagram + sent.reset_stream + sent.stop_sending;
    let sent = asking + sent.max_data + sent.max_stream_data + sent.path_challenge;
    FrameCounts { acks: stats.frame_rx.acks, sent }
}

/// The least silence, with something outstanding, after which a peer is dialled anew.
pub(super) const LEAST_SILENCE: Duration = Duration::from_millis(500);
