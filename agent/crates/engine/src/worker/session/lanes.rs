//! The lanes of a session, at the worker that owns the session: requested, accepted, lost, requested again. `lanes/host.rs` has the
//! lanes themselves.

use std::time::{Duration, Instant};

use base::ids::{PeerId, SessionRef};
use dataplane::{
    lanes::{
        OpeningId, PathPacket, VALIDATION_TIMEOUT,
        pool::{self, MAX_LANES},
    },
    peer::Suspicion,
};
use gate::{preshared::PresharedKey, suite};
use quic_core::{ConnectionId, HEADER_LEN, Suite, TAG_LEN, TRANSMIT_CAPACITY};
use quinn_proto::{ConnectionHandle, Side};
use wire::{
    cid::SERVER_ID_AT,
    messages::{LaneCloseCause, LaneEnd, LaneOffer, LaneRefusal, Message},
};
use zeroize::Zeroizing;

use crate::{
    control::liveness::LEAST_SILENCE,
    hub::{LaneLoss, LaneName, LanePort, LaneRequest, LaneSecrets, WorkerMessage},
    worker::{
        context::{Context, largest_packet, timer::Timer},
        device::Tunnel,
        report::stats::LaneReopening,
        session::Sessions,
    },
};

/// The least age at which a lane may be replaced, because openings cost keys and memory. It is shorter than [`LEAST_SILENCE`].
pub(crate) const LEAST_LANE_AGE: Duration = Duration::from_millis(250);

/// What both ends know of a lane when they derive its keys.
#[derive(Debug)]
struct LaneTerms {
    /// The connection ID of packets that come to us.
    local: ConnectionId,
    /// The connection ID of packets that we send.
    remote: ConnectionId,
    /// The preshared key that is mixed into its secrets.
    key: Option<PresharedKey>,
}

impl Sessions {
    /// Requests lane `index` from the peer.
    pub(crate) fn ask_for_lane(&mut self, cx: &mut Context, id: PeerId, index: u8, now: Instant) {
        let lane_host = pool::lane_host(cx.id.index, index, cx.id.count);
        let cid = self.ids.next_for_lane(lane_host);
        let Some(session) = cx.peers.session_mut(id) else { return };
        let handle = session.handle;
        let agreed = self.control.get(handle).and_then(|connection| connection.preshared.agreed().cloned());
        let (key, preshared_key) = agreed.map(|agreed| (agreed.key, agreed.named)).unzip();
        let epoch = session.openings.ask(index, cid, key, now);
        // Until the answer comes, the timer checks whether the peer is alive.
        cx.timers.arm(Timer::Pool(id), now + LEAST_SILENCE);
        let offer = LaneOffer { lane: index, epoch, connection_id: cid.0, preshared_key };
        self.control.send(handle, &Message::LaneOpen(offer));
    }

    /// Handles the dialler's request for a lane: accepts it, or refuses it with a reason.
    pub(crate) fn lane_asked(&mut self, cx: &mut Context, id: PeerId, offer: &LaneOffer, now: Instant) {
        let hosted = cx.hub.lanes(id);
        let Some(session) = cx.peers.session_mut(id) else { return };
        let (handle, openings) = (session.handle, &mut session.openings);
        let mut key = None;
        let refusal = if !openings.admit(offer.lane, offer.epoch) {
            Some(LaneRefusal::EpochReused)
        } else {
            // A lane is replaced when it could not be validated or is dead, neither of which happens this soon.
            let young = openings
                .since(offer.lane)
                .is_some_and(|since| now.saturating_duration_since(since) < LEAST_LANE_AGE);
            // Replaced lanes linger: at most one complete set of them beside the new ones.
            let full = openings.held(now).max(hosted) >= 2 * usize::from(MAX_LANES);
            if young || full || session.agreed.hello.max_lanes == 0 {
                Some(LaneRefusal::TooMany)
            } else {
                match self.key_of_lane(cx, handle, id, offer.preshared_key.as_ref()) {
                    Ok(named) => {
                        key = named;
                        None
                    }
                    Err(()) => Some(LaneRefusal::PresharedKey),
                }
            }
        };
        if let Some(reason) = refusal {
            cx.stats.totals.lanes_reopened[LaneReopening::Refused] += 1;
            self.control
                .send(handle, &Message::LaneRefuse(LaneEnd { lane: offer.lane, epoch: offer.epoch, reason }));
            return;
        }
        let lane_host = pool::lane_host(cx.id.index, offer.lane, cx.id.count);
        let local = self.ids.next_for_lane(lane_host);
        let Some(underlay) = self.control.get(handle).map(|connection| connection.underlay) else { return };
        let port = if lane_host == cx.id.index {
            LanePort::Shared(underlay, None)
        } else {
            match cx.sockets.ports.iter().position(|port| *port == underlay) {
                Some(port) => LanePort::Listening(port),
                None => return,
            }
        };
        let terms = LaneTerms { local, remote: ConnectionId(offer.connection_id), key };
        if self.place_lane(cx, id, OpeningId { index: offer.lane, epoch: offer.epoch }, terms, port, now) {
            // The lane host receives the request before the first packet of the lane can come.
            let answer = LaneOffer { connection_id: local.0, preshared_key: None, ..*offer };
            self.control.send(handle, &Message::LaneAccept(answer));
        }
    }

    /// Opens a lane that the listener has accepted. The first packets on the lane validate its path.
    pub(crate) fn lane_accepted(&mut self, cx: &mut Context, id: PeerId, offer: &LaneOffer, now: Instant) {
        let Some(session) = cx.peers.session_mut(id) else { return };
        let Some(opening) = session.openings.answered(offer.lane, offer.epoch) else { return };
        session.server = Some(offer.connection_id[SERVER_ID_AT]);
        let (name, handle) = (session.id, session.handle);
        // The answer shows that the peer is alive.
        cx.hub.note_heard(id, now);
        cx.heard(id, name);
        let Some(connection) = self.control.get(handle) else { return };
        let remote = connection.path().destination;
        let port = match opening.index {
            0 => LanePort::Shared(connection.underlay, Some(remote)),
            _ => LanePort::Dial(remote),
        };
        let of = OpeningId { index: opening.index, epoch: opening.epoch };
        let remote = ConnectionId(offer.connection_id);
        let terms = LaneTerms { local: opening.local_cid, remote, key: opening.key };
        self.place_lane(cx, id, of, terms, port, now);
    }

    /// Has the lane host open a lane, with the keys that both ends derive from the control connection. Returns whether it could.
    fn place_lane(
        &mut self,
        cx: &mut Context,
        id: PeerId,
        of: OpeningId,
        terms: LaneTerms,
        port: LanePort,
        now: Instant,
    ) -> bool {
        let OpeningId { index, epoch } = of;
        let Some((session, handle)) = cx.peers.session(id).map(|session| (session.id, session.handle)) else {
            return false;
        };
        let Some(connection) = self.control.get(handle) else { return false };
        let (quinn, dialled) = (connection.quinn(), connection.side() == Side::Client);
        let crypto = quinn.crypto_session();
        let Some(suite) = suite::negotiated(crypto) else { return false };
        let mut secrets = [Zeroizing::new([0; 48]), Zeroizing::new([0; 48])];
        for (secret, from_dialler) in secrets.iter_mut().zip([dialled, !dialled]) {
            let secret = &mut secret[..Suite::secret_len(suite)];
            if !pool::derive_secret(crypto, of, from_dialler, secret) {
                return false;
            }
            if let Some(key) = &terms.key {
                key.mix_into_lane(suite, secret);
            }
        }
        let request = LaneRequest {
            name: LaneName { peer: id, session, index, epoch },
            local_cid: terms.local,
            remote_cid: terms.remote,
            suite,
            secrets: LaneSecrets(secrets),
            initial_rtt: quinn.rtt(),
            budget: self.packet_budget(cx, id).map_or(TRANSMIT_CAPACITY, |largest| largest.bytes),
            largest: cx.largest_to(id).into(),
            port,
        };
        if let Some(session) = cx.peers.session_mut(id) {
            session.openings.placed(index, epoch, now);
        }
        self.broadcast_lanes(cx, id);
        let lane_host = pool::lane_host(cx.id.index, index, cx.id.count);
        cx.send(lane_host, WorkerMessage::OpenLane(Box::new(request)));
        true
    }

    /// Handles a lane that the peer has closed, or that the listener asks to be replaced.
    pub(crate) fn lane_closed(
        &mut self,
        cx: &mut Context,
        id: PeerId,
        end: &LaneEnd<LaneCloseCause>,
        now: Instant,
    ) {
        let Some(session) = cx.peers.session_mut(id) else { return };
        let dialled = session.agreed.dialled;
        let lane = LaneName { peer: id, session: session.id, index: end.lane, epoch: end.epoch };
        if dialled && end.reason == LaneCloseCause::WornOut {
            // Young lanes are exempt, so that a peer cannot have lanes replaced without end. It repeats a true report.
            let is_up = session.openings.is_up(end.lane, end.epoch);
            let age = session.openings.since(end.lane).map(|since| now.saturating_duration_since(since));
            if !is_up || age.is_none_or(|age| age < VALIDATION_TIMEOUT) {
                return;
            }
            return self.lane_nears_limit(cx, lane, now);
        }
        let since = session.openings.since(end.lane);
        if !session.openings.lost(end.lane, end.epoch, now) {
            return;
        }
        throttled!(
            info, cx.logs.lane_closed.allow(now),
            { peer = cx.peers.name(id), lane = end.lane, reason = ?end.reason },
            "the peer closed a lane"
        );
        cx.drain_at_host(lane);
        self.broadcast_lanes(cx, id);
        if dialled && end.reason != LaneCloseCause::Done {
            cx.stats.totals.lanes_reopened[LaneReopening::Unresponsive] +=
                u64::from(end.reason == LaneCloseCause::Dead);
            self.ask_again(cx, id, end.lane, since, now);
        }
    }

    /// Notes that a lane carries payloads, and tells the workers which lanes of the peer are up.
    pub(crate) fn lane_is_up(&mut self, cx: &mut Context, lane: LaneName) {
        if let Some(session) = cx.peers.session_named(lane.peer, lane.session) {
            session.openings.up(lane.index, lane.epoch);
            self.broadcast_lanes(cx, lane.peer);
        }
    }

    /// Notes that a replaced lane carries payloads no more.
    pub(crate) fn replaced_gone(&mut self, cx: &mut Context, lane: LaneName) {
        if let Some(session) = cx.peers.session_named(lane.peer, lane.session)
            && session.openings.replaced_gone(lane.index, lane.epoch)
        {
            self.broadcast_lanes(cx, lane.peer);
        }
    }

    /// Notes the largest packet that the path of a lane carries, in bytes of UDP payload.
    pub(crate) fn lane_carries(&mut self, cx: &mut Context, lane: LaneName, found: PathPacket) {
        if let Some(session) = cx.peers.session_named(lane.peer, lane.session) {
            session.openings.carries(lane.index, lane.epoch, found);
            self.broadcast_budget(cx, lane.peer);
        }
    }

    /// Handles a lane that could not go on: tells the peer, and requests the lane again with new keys if this end dialled.
    pub(crate) fn lane_lost(&mut self, cx: &mut Context, lane: LaneName, why: LaneLoss, now: Instant) {
        let Some(session) = cx.peers.session_named(lane.peer, lane.session) else { return };
        let (handle, dialled) = (session.handle, session.agreed.dialled);
        let since = session.openings.since(lane.index);
        if !session.openings.lost(lane.index, lane.epoch, now) {
            // The lane ended before its host heard of the replacement.
            return self.replaced_gone(cx, lane);
        }
        let (index, peer) = (lane.index, lane.peer);
        let mut again = dialled;
        match why {
            LaneLoss::Unvalidated => {
                cx.stats.totals.lanes_reopened[LaneReopening::Unvalidated] += 1;
                throttled!(
                    warn, cx.logs.lane_unvalidated.allow(now),
                    { peer = cx.peers.name(peer), lane = index, again },
                    "a lane's path was not validated in time (remedy: let UDP from any port of the dialler through)"
                );
            }
            LaneLoss::Ended(error) => {
                let reason =
                    error.map_or_else(|| "its keys are used up".to_owned(), |error| error.to_string());
                throttled!(
                    warn, cx.logs.lane_ended.allow(now), { peer = cx.peers.name(peer), lane = index, reason },
                    "closing a lane"
                );
                let reason = LaneCloseCause::ProtocolViolation;
                let end = LaneEnd { lane: index, epoch: lane.epoch, reason };
                self.control.send(handle, &Message::LaneClose(end));
                cx.stats.totals.lanes_reopened[LaneReopening::Ended] += 1;
            }
            LaneLoss::NoSocket => {
                again = false;
                if dialled {
                    cx.timers.arm(Timer::Pool(peer), now + VALIDATION_TIMEOUT);
                }
            }
        }
        self.broadcast_lanes(cx, peer);
        if again {
            self.ask_again(cx, peer, index, since, now);
        }
    }

    /// Handles a lane whose key limits are near: the dialler requests a replacement, the listener asks the dialler to. The lane works
    /// until then.
    pub(crate) fn lane_nears_limit(&mut self, cx: &mut Context, lane: LaneName, now: Instant) {
        let Some(session) = cx.peers.session_named(lane.peer, lane.session) else { return };
        let (handle, dialled) = (session.handle, session.agreed.dialled);
        if !session.openings.is_placed(lane.index, lane.epoch) || session.openings.is_asked(lane.index) {
            return;
        }
        cx.stats.totals.lanes_reopened[LaneReopening::NearLimit] += u64::from(dialled);
        throttled!(
            info, cx.logs.lane_ended.allow(now), { peer = cx.peers.name(lane.peer), lane = lane.index },
            "replacing a lane: its keys are nearly used up, because the peer confirms no key update or many packets were \
            forged"
        );
        if dialled {
            self.ask_for_lane(cx, lane.peer, lane.index, now);
        } else {
            let end = LaneEnd { lane: lane.index, epoch: lane.epoch, reason: LaneCloseCause::WornOut };
            self.control.send(handle, &Message::LaneClose(end));
        }
    }

    /// Requests a lane that is gone again, after a pause if it lived only for a short time.
    fn ask_again(&mut self, cx: &mut Context, peer: PeerId, index: u8, since: Option<Instant>, now: Instant) {
        if since.is_some_and(|since| now.saturating_duration_since(since) < LEAST_LANE_AGE) {
            cx.timers.arm(Timer::Pool(peer), now + LEAST_LANE_AGE);
        } else {
            self.ask_for_lane(cx, peer, index, now);
        }
    }

    /// Handles a lane on which nothing was received for `silence` while packets were outstanding. At `limit` the peer is suspect if
    /// nothing was received on any lane, and it is dialled anew beside the old connection. Otherwise this lane is dead and replaced.
    ///
    /// The other lanes may be idle, so they are pinged half-way to the limit.
    pub(crate) fn lane_is_silent(
        &mut self,
        cx: &mut Context,
        lane: LaneName,
        silence: Duration,
        limit: Duration,
        now: Instant,
    ) {
        let Some(session) = cx.peers.session_named(lane.peer, lane.session) else { return };
        if !session.openings.is_placed(lane.index, lane.epoch) {
            // The lane was to be replaced, but there was no socket for its replacement.
            if silence >= limit && session.openings.replaced_gone(lane.index, lane.epoch) {
                cx.drain_at_host(lane);
                self.broadcast_lanes(cx, lane.peer);
            }
            return;
        }
        let is_up = session.openings.is_up(lane.index, lane.epoch);
        let peer = lane.peer;
        let others = cx.hub.silence(peer, now);
        // Each is so long that it counts where another peer can carry the packets, or has the only route.
        let is_watched = cx.peers.get(peer).is_some_and(|peer| peer.data.is_watched);
        if is_watched && others.is_none_or(|others| others >= silence.min(limit / 2)) {
            cx.suspect(SessionRef { peer, session: lane.session }, Suspicion::Late, true);
        }
        if silence < limit {
            if others.is_none_or(|others| others >= limit / 2) {
                cx.broadcast(|| WorkerMessage::AskForLife { peer, session: lane.session });
            }
            return;
        }
        if others.is_some_and(|others| others < limit) {
            // A lane that is being validated has the time of the validation.
            if is_up {
                self.lane_is_dead(cx, lane, now);
            }
            return;
        }
        cx.suspect(SessionRef { peer: lane.peer, session: lane.session }, Suspicion::Unresponsive, true);
    }

    /// Handles a dead lane of a peer that other lanes reach: its flows take another lane. The dialler requests it again. The listener
    /// asks the dialler to, which does not notice if it has no packets outstanding on the lane.
    fn lane_is_dead(&mut self, cx: &mut Context, lane: LaneName, now: Instant) {
        let Some(session) = cx.peers.session_named(lane.peer, lane.session) else { return };
        let (handle, dialled) = (session.handle, session.agreed.dialled);
        if !session.openings.lost(lane.index, lane.epoch, now) {
            return;
        }
        throttled!(
            warn, cx.logs.lane_unresponsive.allow(now),
            { peer = cx.peers.name(lane.peer), lane = lane.index },
            "a lane is unresponsive; {}", if dialled { "opening it again" } else { "its dialler is to open it again" }
        );
        cx.drain_at_host(lane);
        self.broadcast_lanes(cx, lane.peer);
        if dialled {
            cx.stats.totals.lanes_reopened[LaneReopening::Unresponsive] += 1;
            self.ask_for_lane(cx, lane.peer, lane.index, now);
        } else {
            let end = LaneEnd { lane: lane.index, epoch: lane.epoch, reason: LaneCloseCause::Dead };
            self.control.send(handle, &Message::LaneClose(end));
        }
    }

    /// Requests lanes again whose openings were not answered in time, or for which there was no socket.
    pub(crate) fn pool_timeout(&mut self, cx: &mut Context, id: PeerId, now: Instant) {
        self.check_openings(cx, id, now);
        let Some(session) = cx.peers.session_mut(id) else { return };
        session.openings.expire(now);
        let missing = if session.agreed.dialled { session.openings.missing() } else { Vec::new() };
        for index in missing {
            self.ask_for_lane(cx, id, index, now);
        }
        self.rekey_lanes(cx, id, now);
        if let Some(at) = cx.peers.session(id).and_then(|session| session.openings.deadline()) {
            cx.timers.arm(Timer::Pool(id), at.min(now + LEAST_SILENCE));
        }
    }

    /// Suspects a peer that neither answers a lane request nor is heard at all: it has no lane on which it could be found dead.
    fn check_openings(&self, cx: &mut Context, id: PeerId, now: Instant) {
        let Some(session) = cx.peers.session(id) else { return };
        let Some(since) = session.openings.asked_since() else { return };
        let name = session.id;
        let Some(connection) = self.control.get(session.handle) else { return };
        // The request and its answer are repeated after twice the round-trip time if they are lost (RFC 9002 §6.2.2).
        let limit = LEAST_SILENCE.max(connection.quinn().rtt() * 6);
        let silence = now.saturating_duration_since(since);
        if silence >= limit && cx.hub.silence(id, now).is_none_or(|silence| silence >= limit) {
            cx.suspect(SessionRef { peer: id, session: name }, Suspicion::Unresponsive, true);
        }
    }

    /// Tells all workers which lanes are up, and the limit on packets.
    fn broadcast_lanes(&mut self, cx: &mut Context, id: PeerId) {
        let Some(session) = cx.peers.session(id) else { return };
        let (session, up, wanted) = (session.id, session.openings.mask(), session.openings.wanted);
        cx.broadcast(|| WorkerMessage::LanesUp { peer: id, session, up, wanted });
        self.broadcast_budget(cx, id);
    }

    /// The limit on packets to `peer`, in bytes of UDP payload: the size that the paths of all its lanes carry, or, without lanes,
    /// the path of the control connection.
    fn packet_budget(&self, cx: &Context, peer: PeerId) -> Option<PathPacket> {
        let session = cx.peers.session(peer)?;
        let of_lanes = session.openings.largest_packet();
        of_lanes.or_else(|| {
            let (mtu, most) = (self.control.get(session.handle)?.quinn().current_mtu(), cx.largest_to(peer));
            Some(PathPacket { bytes: mtu.min(most).into(), measured: false, most: most.into() })
        })
    }

    /// In standard mode: the size of a lane packet with the same room as a frame of the control connection, whose packets have more
    /// overhead.
    fn plain_budget(&mut self, cx: &mut Context, peer: PeerId) -> Option<usize> {
        let state = cx.peers.get_mut(peer)?;
        let plain = state.data.link.as_mut()?.plain.as_mut()?;
        let most = self.control.quinn(state.session.as_ref()?.handle)?.datagrams().max_size();
        plain.set_most(most);
        Some(most? + HEADER_LEN + 1 + TAG_LEN)
    }

    /// Tells all workers the limit on packets to `peer`; returns false if it has not changed.
    fn broadcast_budget(&mut self, cx: &mut Context, peer: PeerId) -> bool {
        let Some(mut largest) = self.packet_budget(cx, peer) else { return false };
        largest.bytes = self.plain_budget(cx, peer).map_or(largest.bytes, |most| most.min(largest.bytes));
        let Some(session) = cx.peers.session(peer).map(|session| session.id) else { return false };
        let link = cx.peers.link_named(peer, session);
        let changed = link.is_some_and(|link| link.budget.differs(&largest));
        if changed {
            cx.broadcast(|| WorkerMessage::Budget { peer, session, largest });
        }
        changed
    }

    /// Sets the limit on packets of a new session from the path MTU that the control connection has found so far.
    pub(crate) fn begin_budget(&mut self, cx: &mut Context, tunnel: &mut Tunnel, peer: PeerId, now: Instant) {
        if !self.broadcast_budget(cx, peer) {
            tunnel.budget_changed(cx, peer, now);
        }
    }

    /// Handles a new path MTU of a control connection.
    pub(crate) fn mtu_changed(&mut self, cx: &mut Context, handle: ConnectionHandle) {
        if let Some(peer) = self.peer_of(handle).filter(|peer| cx.peers.is_session(*peer, handle)) {
            self.broadcast_budget(cx, peer);
        }
    }
}

impl Context {
    /// Handles the peer's refusal of a lane, which is requested again later.
    pub(crate) fn lane_refused(&mut self, id: PeerId, end: &LaneEnd<LaneRefusal>, now: Instant) {
        let Some(session) = self.peers.session_mut(id) else { return };
        if session.openings.answered(end.lane, end.epoch).is_some() {
            throttled!(
                warn, self.logs.lane_refused.allow(now),
                { peer = self.peers.name(id), lane = end.lane, reason = ?end.reason },
                "the peer refused a lane"
            );
            self.timers.arm(Timer::Pool(id), now + VALIDATION_TIMEOUT);
        }
    }

    /// Has the lane host drain a lane.
    fn drain_at_host(&mut self, lane: LaneName) {
        let lane_host = pool::lane_host(self.id.index, lane.index, self.id.count);
        self.send(lane_host, WorkerMessage::DrainLane { lane });
    }

    /// The limit on packets to `peer` that both ends agree to, in bytes of UDP payload.
    fn largest_to(&self, peer: PeerId) -> u16 {
        let accepted =
            self.peers.session(peer).map_or(u16::MAX, |session| session.agreed.hello.max_datagram_packet);
        accepted.min(largest_packet(&self.config))
    }
}
