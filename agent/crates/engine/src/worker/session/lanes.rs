//! The lanes of a session, at the worker that owns the session: requested, accepted, lost, requested again. `lanes/host.rs` has the
//! lanes themselves.

use std::time::{Duration, Instant};

use dataplane::{
    lanes::{
        OpeningId, PathPacket, VALIDATION_TIMEOUT,
        pool::{self, MAX_LANES},
    },
    peer::Suspicion,
};
use gate::{preshared::PresharedKey, suite};
use quic_core::{ConnectionId, HEADER_LEN, Suite, TAG_LEN};
use quinn_proto::{ConnectionHandle, Side};
use wire::{
    cid::SERVER_ID_AT,
    messages::{Features, LaneCloseCause, LaneEnd, LaneOffer, LaneRefusal, Message},
};
use zeroize::Zeroizing;

use crate::{
    control::liveness::LEAST_SILENCE,
    hub::{LaneEvent, LaneLoss, LaneName, LanePort, LaneRequest, LaneSecrets, WorkerMessage},
    worker::{
        context::{
            Context,
            packet_sizes::{largest_packet, usual_packet},
            timer::Timer,
        },
        report::stats::LaneReopening,
        session::{Conn, Sessions},
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

impl Conn<'_> {
    /// Requests lane `index` from the peer.
    pub(crate) fn ask_for_lane(&mut self, index: u8, now: Instant) {
        let cid = self.ids.next_for_lane(self.lane_host(index));
        let agreed = self.control.preshared.agreed().cloned();
        let (key, preshared_key) = agreed.map(|agreed| (agreed.key, agreed.named)).unzip();
        let epoch = self.session.openings.ask(index, cid, key, now);
        // Until the answer comes, the timer checks whether the peer is alive.
        self.cx.timers.arm(Timer::Pool(self.data.id), now + LEAST_SILENCE);
        // An end that does not know lines sends on all lanes alike.
        let knows_lines = self.session.agreed.hello.features.contains(Features::LINES);
        let lines = self.session.openings.lines.as_ref().filter(|_| knows_lines);
        let line = lines.and_then(|lines| lines.offer(index));
        let offer = LaneOffer { lane: index, epoch, connection_id: cid.0, preshared_key, line };
        self.control.send(&Message::LaneOpen(offer));
    }

    /// Notes the line of a lane that the dialler asks for. False if that contradicts what it said before, or is there for some lanes only.
    pub(super) fn line_fits(&mut self, offer: &LaneOffer) -> bool {
        let openings = &mut self.session.openings;
        match &offer.line {
            Some(line) => openings.learn_line(offer.lane, line),
            None => openings.lines.is_none(),
        }
    }

    /// Handles the dialler's request for a lane: accepts it, or refuses it with a reason.
    pub(super) fn lane_asked(&mut self, offer: &LaneOffer, now: Instant) {
        let of = OpeningId { index: offer.lane, epoch: offer.epoch };
        let key = match self.admit_lane(offer, now) {
            Ok(key) => key,
            Err(reason) => {
                self.cx.totals.lanes_reopened[LaneReopening::Refused] += 1;
                let end = LaneEnd { lane: of.index, epoch: of.epoch, reason };
                return self.control.send(&Message::LaneRefuse(end));
            }
        };
        let lane_host = self.lane_host(of.index);
        let local = self.ids.next_for_lane(lane_host);
        let underlay = self.control.underlay;
        let port = if lane_host == self.cx.id.index {
            LanePort::Shared(underlay, None)
        } else {
            match self.cx.ports.iter().position(|port| *port == underlay) {
                Some(port) => LanePort::Listening(port),
                None => return,
            }
        };
        let terms = LaneTerms { local, remote: ConnectionId(offer.connection_id), key };
        if self.place_lane(of, terms, port, now) {
            // The lane host receives the request before the first packet of the lane can come.
            let answer = LaneOffer { connection_id: local.0, preshared_key: None, line: None, ..*offer };
            self.control.send(&Message::LaneAccept(answer));
        }
    }

    /// The preshared key of a lane that the dialler may have.
    fn admit_lane(&mut self, offer: &LaneOffer, now: Instant) -> Result<Option<PresharedKey>, LaneRefusal> {
        let (hosted, openings) = (self.cx.hub.lanes(self.data.id), &mut self.session.openings);
        if !openings.admit(offer.lane, offer.epoch) {
            return Err(LaneRefusal::EpochReused);
        }
        // A lane is replaced when it could not be validated or is dead, neither of which happens this soon.
        let young = openings
            .since(offer.lane)
            .is_some_and(|since| now.saturating_duration_since(since) < LEAST_LANE_AGE);
        // Replaced lanes linger: at most one complete set of them beside the new ones.
        let full = openings.held(now).max(hosted) >= 2 * usize::from(MAX_LANES);
        if young || full || self.session.agreed.hello.max_lanes == 0 {
            return Err(LaneRefusal::TooMany);
        }
        self.key_of_lane(offer.preshared_key.as_ref())
    }

    /// Opens a lane that the listener has accepted. The first packets on the lane validate its path.
    pub(super) fn lane_accepted(&mut self, offer: &LaneOffer, now: Instant) {
        let Some(opening) = self.session.openings.answered(offer.lane, offer.epoch) else { return };
        self.session.server = Some(offer.connection_id[SERVER_ID_AT]);
        // The answer shows that the peer is alive.
        self.cx.hub.note_heard(self.data.id, now);
        self.heard();
        let remote = self.control.path().destination;
        let line = self.session.openings.lines.as_ref().map(|lines| lines.of_lane(opening.index));
        let port = match (opening.index, line) {
            (0, None) if self.cx.config.transport.hop.is_none() => {
                LanePort::Shared(self.control.underlay, Some(remote))
            }
            _ => LanePort::Dial(self.port_for_lane(remote), line),
        };
        let of = OpeningId { index: opening.index, epoch: opening.epoch };
        let remote = ConnectionId(offer.connection_id);
        self.place_lane(of, LaneTerms { local: opening.local_cid, remote, key: opening.key }, port, now);
    }

    /// Handles the peer's refusal of a lane, which is requested again later.
    pub(super) fn lane_refused(&mut self, end: &LaneEnd<LaneRefusal>, now: Instant) {
        if self.session.openings.answered(end.lane, end.epoch).is_some() {
            throttled!(
                warn, self.cx.logs.lane_refused.allow(now),
                { peer = self.name(), lane = end.lane, reason = ?end.reason },
                "the peer refused a lane (remedy: none if the session goes on; else the same version at both ends)"
            );
            self.cx.timers.arm(Timer::Pool(self.data.id), now + VALIDATION_TIMEOUT);
        }
    }

    /// Has the lane host open a lane, with the keys that both ends derive from the control connection. Returns whether it could.
    fn place_lane(&mut self, of: OpeningId, terms: LaneTerms, port: LanePort, now: Instant) -> bool {
        let (quinn, dialled) = (self.control.quinn(), self.control.side() == Side::Client);
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
            name: self.lane(of),
            local_cid: terms.local,
            remote_cid: terms.remote,
            suite,
            secrets: LaneSecrets(secrets),
            initial_rtt: quinn.rtt(),
            budget: self.packet_budget().bytes,
            largest: self.largest_packet().into(),
            port,
            line: self.session.openings.lines.as_ref().map(|lines| lines.of_lane(of.index)),
        };
        self.session.openings.placed(of.index, of.epoch, now);
        self.broadcast_lanes();
        self.cx.send(self.lane_host(of.index), WorkerMessage::OpenLane(Box::new(request)));
        true
    }

    /// Handles a lane that the peer has closed, or that the listener asks to be replaced.
    pub(super) fn lane_closed(&mut self, end: &LaneEnd<LaneCloseCause>, now: Instant) {
        let of = OpeningId { index: end.lane, epoch: end.epoch };
        let (dialled, openings) = (self.session.agreed.dialled, &mut self.session.openings);
        let since = openings.since(of.index);
        if dialled && end.reason == LaneCloseCause::WornOut {
            // Young lanes are exempt, so that a peer cannot have lanes replaced without end. It repeats a true report.
            let age = since.map(|since| now.saturating_duration_since(since));
            if openings.is_up(of.index, of.epoch) && age.is_some_and(|age| age >= VALIDATION_TIMEOUT) {
                self.lane_nears_limit(of, now);
            }
            return;
        }
        if !openings.lost(of.index, of.epoch, now) {
            return;
        }
        throttled!(
            info, self.cx.logs.lane_closed.allow(now),
            { peer = self.name(), lane = end.lane, reason = ?end.reason },
            "the peer closed a lane"
        );
        self.drain_at_host(of);
        self.broadcast_lanes();
        if dialled && end.reason != LaneCloseCause::Done {
            self.cx.totals.lanes_reopened[LaneReopening::Unresponsive] +=
                u64::from(end.reason == LaneCloseCause::Dead);
            self.ask_again(of.index, since, now);
        }
    }

    /// Handles what has happened to a lane at its host.
    pub(super) fn lane_event(&mut self, of: OpeningId, event: LaneEvent, now: Instant) {
        let openings = &mut self.session.openings;
        match event {
            LaneEvent::Up => {
                openings.up(of.index, of.epoch);
                self.broadcast_lanes();
                self.line_of_lane_is_heard(of, now);
            }
            LaneEvent::Carries(found) => {
                openings.carries(of.index, of.epoch, found);
                self.broadcast_budget();
            }
            LaneEvent::Lost(why) => self.lane_lost(of, why, now),
            LaneEvent::NearLimit => self.lane_nears_limit(of, now),
            LaneEvent::OldPort => self.hop_lane(of, now),
            LaneEvent::ReplacedGone => {
                if openings.replaced_gone(of.index, of.epoch) {
                    self.broadcast_lanes();
                }
            }
            LaneEvent::Quiet(silence) => self.lane_is_quiet(of, silence, now),
            LaneEvent::Silent { silence, limit } => self.lane_is_silent(of, silence, limit, now),
        }
    }

    /// Handles a lane that could not go on: tells the peer, and requests the lane again with new keys if this end dialled.
    fn lane_lost(&mut self, of: OpeningId, why: LaneLoss, now: Instant) {
        let OpeningId { index, epoch } = of;
        let dialled = self.session.agreed.dialled;
        let since = self.session.openings.since(index);
        if !self.session.openings.lost(index, epoch, now) {
            // The lane ended before its host heard of the replacement.
            return self.lane_event(of, LaneEvent::ReplacedGone, now);
        }
        let mut again = dialled;
        match why {
            LaneLoss::Unvalidated => {
                self.cx.totals.lanes_reopened[LaneReopening::Unvalidated] += 1;
                throttled!(
                    warn, self.cx.logs.lane_unvalidated.allow(now),
                    { peer = self.name(), lane = index, again },
                    "a lane's path was not validated in time (remedy: let UDP from any port of the dialler through)"
                );
            }
            LaneLoss::Ended(error) => {
                let reason =
                    error.map_or_else(|| "its keys are used up".to_owned(), |error| error.to_string());
                throttled!(
                    warn, self.cx.logs.lane_ended.allow(now), { peer = self.name(), lane = index, reason },
                    "closing a lane (remedy: none if it is opened again; culvert status shows it)"
                );
                self.close_lane(of, LaneCloseCause::ProtocolViolation);
                self.cx.totals.lanes_reopened[LaneReopening::Ended] += 1;
            }
            LaneLoss::NoSocket => {
                again = false;
                if dialled {
                    self.cx.timers.arm(Timer::Pool(self.data.id), now + VALIDATION_TIMEOUT);
                }
            }
        }
        self.broadcast_lanes();
        if again {
            self.ask_again(index, since, now);
        }
    }

    /// Handles a lane whose key limits are near: the dialler requests a replacement, the listener asks the dialler to. The lane works
    /// until then.
    fn lane_nears_limit(&mut self, of: OpeningId, now: Instant) {
        let (dialled, openings) = (self.session.agreed.dialled, &self.session.openings);
        if !openings.is_placed(of.index, of.epoch) || openings.is_asked(of.index) {
            return;
        }
        self.cx.totals.lanes_reopened[LaneReopening::NearLimit] += u64::from(dialled);
        throttled!(
            info, self.cx.logs.lane_ended.allow(now), { peer = self.name(), lane = of.index },
            "replacing a lane: its keys are nearly used up, because the peer confirms no key update or many packets were \
            forged"
        );
        if dialled {
            self.ask_for_lane(of.index, now);
        } else {
            self.close_lane(of, LaneCloseCause::WornOut);
        }
    }

    /// Requests a lane that is gone again, after a pause if it lived only for a short time.
    fn ask_again(&mut self, index: u8, since: Option<Instant>, now: Instant) {
        if since.is_some_and(|since| now.saturating_duration_since(since) < LEAST_LANE_AGE) {
            self.cx.timers.arm(Timer::Pool(self.data.id), now + LEAST_LANE_AGE);
        } else {
            self.ask_for_lane(index, now);
        }
    }

    /// Handles a lane on which nothing was received for `silence` while packets were outstanding. At `limit` the peer is suspect if
    /// nothing was received on any lane, and it is dialled anew beside the old connection. Otherwise this lane is dead and replaced.
    ///
    /// The other lanes may be idle, so they are pinged half-way to the limit.
    fn lane_is_silent(&mut self, of: OpeningId, silence: Duration, limit: Duration, now: Instant) {
        let openings = &mut self.session.openings;
        if !openings.is_placed(of.index, of.epoch) {
            // The lane was to be replaced, but there was no socket for its replacement.
            if silence >= limit && openings.replaced_gone(of.index, of.epoch) {
                self.drain_at_host(of);
                self.broadcast_lanes();
            }
            return;
        }
        let is_up = openings.is_up(of.index, of.epoch);
        let others = self.cx.hub.silence(self.data.id, now);
        // Each is so long that it counts where another peer can carry the packets, or has the only route.
        if self.data.is_watched && others.is_none_or(|others| others >= silence.min(limit / 2)) {
            self.suspect(Suspicion::Late, true);
        }
        if silence < limit {
            if others.is_none_or(|others| others >= limit / 2) {
                self.ask_for_life();
            }
        } else if others.is_none_or(|others| others >= limit) {
            self.suspect(Suspicion::Unresponsive, true);
        } else if is_up {
            // A lane that is being validated has the time of the validation.
            self.lane_is_dead(of, silence, now);
        }
    }

    /// Handles a dead lane of a peer that other lanes reach: its flows take another lane. The dialler requests it again. The listener
    /// asks the dialler to, which does not notice if it has no packets outstanding on the lane.
    fn lane_is_dead(&mut self, of: OpeningId, silence: Duration, now: Instant) {
        let dialled = self.session.agreed.dialled;
        if !self.session.openings.lost(of.index, of.epoch, now) {
            return;
        }
        throttled!(
            warn, self.cx.logs.lane_unresponsive.allow(now),
            { peer = self.name(), lane = of.index },
            "a lane is unresponsive; {} (remedy: none if it comes back; else look at the path to the peer)", if dialled { "opening it again" } else { "its dialler is to open it again" }
        );
        self.drain_at_host(of);
        self.broadcast_lanes();
        self.line_of_lane_is_dead(of, silence, now);
        if dialled {
            self.cx.totals.lanes_reopened[LaneReopening::Unresponsive] += 1;
            self.ask_for_lane(of.index, now);
        } else {
            self.close_lane(of, LaneCloseCause::Dead);
        }
    }

    /// Requests lanes again whose openings were not answered in time, or for which there was no socket.
    pub(crate) fn pool_timeout(&mut self, now: Instant) {
        self.check_openings(now);
        self.session.openings.expire(now);
        let missing = if self.session.agreed.dialled { self.session.openings.missing() } else { Vec::new() };
        for index in missing {
            self.ask_for_lane(index, now);
        }
        self.rekey_lanes(now);
        if let Some(at) = self.session.openings.deadline() {
            self.cx.timers.arm(Timer::Pool(self.data.id), at.min(now + LEAST_SILENCE));
        }
    }

    /// Suspects a peer that neither answers a lane request nor is heard at all: it has no lane on which it could be found dead.
    fn check_openings(&mut self, now: Instant) {
        let Some(since) = self.session.openings.asked_since() else { return };
        // The request and its answer are repeated after twice the round-trip time if they are lost (RFC 9002 §6.2.2).
        let limit = LEAST_SILENCE.max(self.control.quinn().rtt() * 6);
        let silence = now.saturating_duration_since(since);
        if silence >= limit && self.cx.hub.silence(self.data.id, now).is_none_or(|silence| silence >= limit) {
            self.suspect(Suspicion::Unresponsive, true);
        }
    }

    /// Tells all workers which lanes are up, and the limit on packets.
    pub(super) fn broadcast_lanes(&mut self) {
        let (of, openings) = (self.of(), &self.session.openings);
        let (up, wanted, lines) = (openings.mask(), openings.wanted, openings.lines.clone());
        self.cx.broadcast(|| WorkerMessage::LanesUp { of, up, wanted, lines: lines.clone() });
        self.broadcast_budget();
    }

    /// The limit on packets to the peer, in bytes of UDP payload: the size that the paths of all its lanes carry, or, without lanes,
    /// the path of the control connection.
    fn packet_budget(&self) -> PathPacket {
        let of_lanes = self.session.openings.largest_packet();
        of_lanes.unwrap_or_else(|| {
            let (mtu, is_standard) = (self.control.quinn().current_mtu(), self.session.openings.wanted == 0);
            let agreed = self.largest_packet();
            // What the peer takes on lanes has no say in standard mode.
            let most = if is_standard { largest_packet(&self.cx.config.transport) } else { agreed };
            let may_be = most.min(usual_packet(self.control.path().destination)).max(mtu);
            let bytes = mtu.min(most).into();
            PathPacket { bytes, measured: false, most: may_be.into(), searched: true }
        })
    }

    /// In standard mode: the size of a lane packet with the same room as a frame of the control connection, whose packets have more
    /// overhead.
    fn plain_budget(&mut self) -> Option<usize> {
        let plain = self.data.link.as_mut()?.plain.as_mut()?;
        let most = self.control.open()?.datagrams().max_size();
        plain.set_most(most);
        Some(most? + HEADER_LEN + 1 + TAG_LEN)
    }

    /// Tells all workers the limit on packets to the peer; returns false if it has not changed.
    pub(crate) fn broadcast_budget(&mut self) -> bool {
        let (of, mut largest) = (self.of(), self.packet_budget());
        largest.bytes = self.plain_budget().map_or(largest.bytes, |most| most.min(largest.bytes));
        let changed = self.link().is_some_and(|link| link.budget.differs(&largest));
        if changed {
            self.cx.broadcast(|| WorkerMessage::Budget { of, largest });
        }
        changed
    }

    /// The limit on packets to the peer that both ends agree to, in bytes of UDP payload.
    fn largest_packet(&self) -> u16 {
        self.session.agreed.hello.max_datagram_packet.min(largest_packet(&self.cx.config.transport))
    }

    /// The worker that hosts lane `index`.
    fn lane_host(&self, index: u8) -> u8 {
        pool::lane_host(self.cx.id.index, index, self.cx.id.count)
    }

    fn lane(&self, opening: OpeningId) -> LaneName {
        LaneName { of: self.of(), opening }
    }

    /// Has the lane host drain a lane.
    fn drain_at_host(&mut self, of: OpeningId) {
        self.cx.send(self.lane_host(of.index), WorkerMessage::DrainLane { lane: self.lane(of) });
    }

    /// Tells the peer that a lane is over, or is to be replaced.
    fn close_lane(&mut self, of: OpeningId, reason: LaneCloseCause) {
        self.control.send(&Message::LaneClose(LaneEnd { lane: of.index, epoch: of.epoch, reason }));
    }
}

impl Sessions {
    /// Handles a new path MTU of a control connection.
    pub(crate) fn mtu_changed(&mut self, cx: &mut Context, handle: ConnectionHandle) {
        if let Some(mut conn) = self.conn_on(cx, handle) {
            conn.broadcast_budget();
        }
    }
}
