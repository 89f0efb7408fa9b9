//! Liveness of a session: suspicions that its peer or its control connection is dead, and keepalives.
//!
//! TCP forwards that wait for the peer are traffic that waits: an unresponsive peer is found by what they send, and dialled as often
//! as for datagrams.

use std::time::{Duration, Instant};

use base::ids::{PeerId, SessionRef};
use dataplane::peer::Suspicion;
use quinn_proto::{ConnectionHandle, ConnectionStats};
use wire::messages::Message;

use crate::{
    control::liveness::{Finding, FrameCounts, LEAST_SILENCE, Look},
    hub::{ToOwner, WorkerMessage},
    peer::Session,
    worker::{
        context::{
            Context, Effect,
            timer::{HOUSEKEEPING_INTERVAL, Timer},
        },
        lanes::host::TELL_INTERVAL,
        session::{Conn, Sessions, lines::SEEK_INTERVAL},
    },
};

/// How long a stream has to carry a session whose UDP is silent, before a new session is dialled: to be opened, through a proxy perhaps,
/// and to be answered over it.
const OTHER_WAY: Duration = Duration::from_secs(3);

impl Sessions {
    /// Has the lanes asked whether the peer lives, after quinn-proto has probed in vain on a connection that carries forwards. While
    /// nothing else is sent, the lanes could not tell before the next keepalive.
    pub(crate) fn look_after_forwards(&mut self, cx: &mut Context, handle: ConnectionHandle) {
        if self.control.probes_in_vain(handle)
            && let Some(id) = self.peer_of(handle)
            && cx.forwards_on(id, handle).is_some_and(|forwards| *forwards > 0)
        {
            cx.ping_lanes(id);
        }
    }

    /// Once a second while a peer is unresponsive: has it dialled soon if bytes of forwards at this worker wait for it.
    pub(crate) fn await_for_forwards(&self, cx: &mut Context, id: PeerId, now: Instant) {
        let Some(peer) = cx.peers.get_mut(id).filter(|peer| peer.forwards.here > 0) else { return };
        let control = peer.session.as_ref().map(|session| (session.handle, session.forwards));
        let streams = peer.streams.all.iter().map(|stream| (stream.handle, stream.forwards));
        let mut carriers = control.into_iter().chain(streams).filter(|(_, forwards)| *forwards > 0);
        if carriers.any(|(handle, _)| self.control.forwards_wait(handle)) {
            cx.await_soon(id, now);
        }
    }
}

/// A lane that was heard within this time counts as in use, and keeps its control connection from ending after 30 s.
pub(crate) const IN_USE: Duration = Duration::from_secs(10);

/// The least time without an acknowledgement on a control connection, while lanes are heard, after which the control path counts as
/// dead. A path that loses 87 % of packets, as a listener does whose CPU handles an eighth of them, loses all 19 packets sent in
/// this time once in fourteen times. A new connection would fare no better, and this one is pinged again before it ends.
pub(crate) const LEAST_CONTROL_SILENCE: Duration = Duration::from_secs(4);

impl Conn<'_> {
    /// Once a second: checks whether the peer answers on the control connection.
    pub(crate) fn check_control(&mut self, now: Instant) {
        let Session { openings, agreed, liveness, laneless_since, .. } = &mut *self.session;
        let (dialled, has_lanes) = (agreed.dialled, openings.wanted > 0);
        let is_laneless = dialled && has_lanes && openings.mask() == 0;
        let (waited, was_laneless) = (liveness.waits, laneless_since.is_some());
        if !self.control.take_changed() && !waited && !is_laneless && !was_laneless {
            // Nothing was sent since the last look, which found that the far end answers.
            return;
        }
        let (stats, rtt) = (self.control.quinn().stats(), self.control.quinn().rtt());
        let heard = self.cx.hub.silence(self.data.id, now);
        let seen = Look { frames: counts(&stats), lanes: heard, rtt };
        let finding = liveness.look(seen, LEAST_CONTROL_SILENCE.max(rtt * 6), now);
        let begins = liveness.waits && !waited;
        let since = is_laneless.then(|| laneless_since.unwrap_or(now));
        *laneless_since = since;
        let answered = liveness.silence(now);
        if begins && dialled && has_lanes {
            // If a NAT gave us another address, the far end cannot answer packets as short as pings.
            self.control.send(&Message::Here);
        } else if finding != Finding::Answers || is_laneless {
            // A session without lanes cannot become unresponsive on one.
            self.control.ping();
        }
        // As long as for a lane request that is not answered: the peer may be gone since just after the handshake.
        let limit = LEAST_SILENCE.max(rtt * 6);
        if since.is_some_and(|since| answered.min(now.saturating_duration_since(since)) >= limit) {
            return self.suspect(Suspicion::Unresponsive, true);
        }
        let is_unresponsive = self.link().is_some_and(|link| link.suspicions.unresponsive);
        if finding != Finding::Answers && has_lanes && !is_unresponsive {
            // Idle lanes must show whether the peer is alive.
            self.ask_for_life();
        }
        match finding {
            Finding::Answers => self.suspect(Suspicion::ControlDead, false),
            Finding::Waits => {}
            Finding::ControlDead => self.suspect(Suspicion::ControlDead, true),
        }
    }

    /// Tells all workers that a suspicion of the session holds, or no longer does, if that is new.
    pub(crate) fn suspect(&mut self, suspicion: Suspicion, holds: bool) {
        if self.link().is_some_and(|link| *link.suspicions.of(suspicion) != holds) {
            let of = self.of();
            self.cx.totals.sessions_suspected[suspicion] += u64::from(holds);
            self.cx.broadcast(|| WorkerMessage::Suspect { of, suspicion, holds });
        }
    }

    /// Notes that the peer is heard, so it is neither unresponsive nor late.
    pub(crate) fn heard(&mut self) {
        self.suspect(Suspicion::Unresponsive, false);
        self.suspect(Suspicion::Late, false);
    }

    /// Sends a packet on the control connection and on each lane to show the peer our address: it cannot follow us before it receives
    /// a packet from there (RFC 9000 §9.3), and has no other means to ask.
    pub(super) fn address_suspect(&mut self, now: Instant) {
        if self.session.here_sent.is_none_or(|at| now.saturating_duration_since(at) >= TELL_INTERVAL) {
            self.session.here_sent = Some(now);
            self.control.send(&Message::Here);
            self.ask_for_life();
        }
    }

    /// Handles a dialled peer that is at another address. A lane follows it, but a control connection cannot (RFC 9000 §9): unless
    /// the peer still answers at the old address, a new connection replaces the old one.
    pub(super) fn listener_moved(&mut self) {
        self.control.ping();
        self.suspect(Suspicion::ControlDead, true);
    }
}

impl Sessions {
    /// Keeps idle lanes of a dialled session alive, each of which has a NAT mapping of its own, and the control connection.
    pub(crate) fn keep_alive(&mut self, cx: &mut Context, id: PeerId, now: Instant) {
        let Some(peer) = cx.peers.get_mut(id) else { return };
        let Some(link) = peer.data.link.as_ref().filter(|link| link.dialled) else { return };
        // Early enough that an unresponsive peer is found before the interval is over.
        let early = |interval: Duration| interval.saturating_sub(HOUSEKEEPING_INTERVAL + LEAST_SILENCE);
        let mut is_idle = false;
        if let Some(interval) = peer.data.config.keepalive {
            for lane in link.pool.lanes() {
                let Some(slot) = cx.sockets.lanes.get_mut(lane).filter(|slot| slot.is_up()) else { continue };
                if link.pool.lines.as_ref().is_some_and(|lines| lines.rests(slot.index)) {
                    continue;
                }
                let last = slot.core.last_heard().unwrap_or_else(|| slot.meter.opened());
                if now.saturating_duration_since(last) >= early(interval) {
                    slot.core.request_ping();
                    cx.sockets.lanes.touch(lane);
                    is_idle = true;
                }
            }
        }
        // Without a keepalive, the control connection lives for as long as its lanes are in use.
        let used = cx.hub.silence(id, now).is_some_and(|silence| silence < IN_USE);
        let interval = peer.data.config.keepalive.map(early).or_else(|| used.then_some(IN_USE));
        if let Some(session) = peer.session.as_mut()
            && let Some(interval) = interval
            // With a lane rather than after it: the far end then wakes up once for both.
            && now.saturating_duration_since(session.pinged) >= if is_idle { interval / 2 } else { interval }
        {
            session.pinged = now;
            self.control.ping_for_an_answer(session.handle);
        }
    }

    /// Applies a suspicion of a session's owner at this worker, or lifts it: payloads and forwards wait while one holds.
    pub(crate) fn set_suspicion(
        &mut self,
        cx: &mut Context,
        of: SessionRef,
        suspicion: Suspicion,
        holds: bool,
        now: Instant,
    ) {
        let id = of.peer;
        let Some(link) = cx.peers.link_named(of) else { return };
        *link.suspicions.of(suspicion) = holds;
        let is_well = !link.suspicions.any() && !link.suspicions.leaving;
        self.note_carrier(cx, id);
        match (suspicion, holds) {
            (Suspicion::Unresponsive, true) => cx.became_unresponsive(of, now),
            (Suspicion::ControlDead, true) => {
                let what =
                    "the peer does not answer on the control connection, only on lanes; dialling it anew";
                cx.dial_anew(id, Duration::ZERO, what, now);
            }
            // What else holds is found out in the same silence.
            (Suspicion::Late, _) | (Suspicion::Leaving, false) => {}
            (Suspicion::Leaving, true) => cx.dial_elsewhere(id, now),
            (Suspicion::Unresponsive | Suspicion::ControlDead, false) => {
                if cx.peers.session(id).is_some()
                    && let Some(state) = cx.peers.get_mut(id)
                    && let Some(suppressed) = state.throttles.heard.allow(now)
                {
                    tracing::info!(
                        peer = &**state.name(),
                        suppressed = base::throttle::counted(suppressed),
                        "the peer is heard again"
                    );
                }
                if is_well {
                    self.stop_dialling(cx, id, now);
                }
                // TCP connections and payloads may have come meanwhile.
                cx.effects.push_back(Effect::WakeListeners(id));
                if suspicion == Suspicion::Unresponsive {
                    cx.settle_flows(id);
                    cx.effects.push_back(Effect::Drain(id));
                }
            }
        }
    }

    /// Looks for another path to an unresponsive peer.
    pub(crate) fn seek(&mut self, cx: &mut Context, id: PeerId, now: Instant) {
        let moved = self.follow_route(cx, id, now);
        // From another address the session may be answered, whereas a new session would cost its TCP forwards.
        let anew = "the peer is unresponsive; dialling it anew";
        let (delay, what) = match (self.try_other_way(cx, id), moved) {
            (true, _) => (OTHER_WAY, "the peer is unresponsive; trying UDP and TCP at once"),
            (false, true) => (LEAST_SILENCE, anew),
            (false, false) => (Duration::ZERO, anew),
        };
        cx.dial_anew(id, delay, what, now);
    }
}

impl Context {
    /// Pings a peer on all connections and lanes of its session.
    pub(crate) fn ask_the_session(&mut self, peer: PeerId) {
        let Some(of) = self.peers.linked(peer) else { return };
        self.broadcast(|| WorkerMessage::AskForLife { of });
        self.tell_owner(of, ToOwner::Challenged);
    }

    /// Whether a peer has asked to be left.
    pub(crate) fn is_leaving(&self, id: PeerId) -> bool {
        self.suspicions_of(id).leaving
    }

    fn became_unresponsive(&mut self, of: SessionRef, now: Instant) {
        if self.peers.link_named(of).is_some_and(|link| link.pool.lines.is_some()) {
            self.timers.arm(Timer::Lines(of.peer), now + SEEK_INTERVAL);
        }
        if self.hub.silence(of.peer, now).is_some_and(|silence| silence < LEAST_SILENCE) {
            // The peer was heard while the message was under way.
            self.tell_owner(of, ToOwner::Heard);
        }
        self.effects.push_back(Effect::SeekPeer(of.peer));
    }
}

/// Counts of frames on a connection for its liveness. Sent ACK frames are left out, because they are never acknowledged.
pub(crate) fn counts(stats: &ConnectionStats) -> FrameCounts {
    let sent = &stats.frame_tx;
    // What quinn-proto sends again, before an ACK shows what is lost, are IMMEDIATE_ACK frames alone.
    let probes = sent.ping + sent.immediate_ack;
    let asking = probes + sent.stream + sent.datagram + sent.reset_stream + sent.stop_sending;
    let sent = asking + sent.max_data + sent.max_stream_data + sent.path_challenge;
    FrameCounts { acks: stats.frame_rx.acks, sent }
}
