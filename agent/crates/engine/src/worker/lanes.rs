//! The lanes of a session, at the worker that owns its control connection: asked for, accepted, lost, asked for again.
//! Who keeps them is in `lane_host.rs`.

use std::time::{Duration, Instant};

use dataplane::{
    lanes::{
        OpeningId, VALIDATION_TIMEOUT,
        pool::{self, MAX_LANES},
    },
    peer::Doubt,
};
use gate::suite;
use quic_core::{ConnectionId, HEADER_LEN, Suite, TAG_LEN, TRANSMIT_CAPACITY};
use quinn_proto::{ConnectionHandle, Side};
use wire::{
    ids::{PeerId, SessionRef},
    messages::{LaneCloseCause, LaneEnd, LaneOffer, LaneRefusal, Message},
};
use zeroize::Zeroizing;

use crate::{
    hub::{LaneLoss, LaneName, LanePort, LaneRequest, LaneSecrets, WorkerMessage},
    worker::{
        context::Context,
        endpoint::largest_packet,
        liveness::LEAST_SILENCE,
        parts::{Sessions, Tunnel},
        timer::Timer,
    },
};

/// A lane is not replaced by another opening before this age, shorter than any silence: openings cost keys and memory.
const LEAST_LANE_AGE: Duration = Duration::from_millis(250);

/// The connection IDs of a lane.
#[derive(Clone, Copy, Debug)]
struct LaneCids {
    /// The connection ID of packets that come to us.
    local: ConnectionId,
    /// The connection ID of packets that we send.
    remote: ConnectionId,
}

impl Sessions {
    /// Asks the peer for lane `index`.
    pub(super) fn ask_for_lane(&mut self, cx: &mut Context, id: PeerId, index: u8, now: Instant) {
        let lane_host = pool::lane_host(cx.id.index, index, cx.id.count);
        let cid = self.ids.next_for(lane_host);
        let Some(session) = cx.peers.session_mut(id) else { return };
        let handle = session.handle;
        let opening = session.openings.ask(index, cid, now);
        // Before: is there anybody?
        cx.timers.arm(Timer::Pool(id), now + LEAST_SILENCE);
        let offer = LaneOffer { lane: index, epoch: opening.epoch, connection_id: cid.0 };
        self.control.send(handle, &Message::LaneOpen(offer));
    }

    /// The dialler asks for a lane.
    pub(super) fn lane_asked(
        &mut self,
        cx: &mut Context,
        id: PeerId,
        handle: ConnectionHandle,
        offer: &LaneOffer,
        now: Instant,
    ) {
        let kept = cx.hub.lanes(id);
        let Some(session) = cx.peers.session_mut(id) else { return };
        let openings = &mut session.openings;
        let refusal = if !openings.admit(offer.lane, offer.epoch) {
            Some(LaneRefusal::EpochReused)
        } else {
            // A lane is replaced when it could not be validated or fell silent: not within moments.
            let young = openings
                .since(offer.lane)
                .is_some_and(|since| now.saturating_duration_since(since) < LEAST_LANE_AGE);
            // Replaced lanes linger: all of them once beside all of the new ones, and no more.
            let full = openings.held(now).max(kept) >= 2 * usize::from(MAX_LANES);
            (young || full || session.hello.max_lanes == 0).then_some(LaneRefusal::TooMany)
        };
        if let Some(reason) = refusal {
            cx.stats.totals.lanes_refused += 1;
            self.control
                .send(handle, &Message::LaneRefuse(LaneEnd { lane: offer.lane, epoch: offer.epoch, reason }));
            return;
        }
        let lane_host = pool::lane_host(cx.id.index, offer.lane, cx.id.count);
        let local = self.ids.next_for(lane_host);
        let Some(underlay) = self.control.get(handle).map(|connection| connection.underlay()) else {
            return;
        };
        let port = if lane_host == cx.id.index {
            LanePort::Shared(underlay, None)
        } else {
            match cx.sockets.ports.iter().position(|port| *port == underlay) {
                Some(port) => LanePort::Listening(port),
                None => return,
            }
        };
        let cids = LaneCids { local, remote: ConnectionId(offer.connection_id) };
        if self.place_lane(cx, id, OpeningId { index: offer.lane, epoch: offer.epoch }, cids, port, now) {
            // Its lane host has heard of it before its first packet can come.
            let answer = LaneOffer { connection_id: local.0, ..*offer };
            self.control.send(handle, &Message::LaneAccept(answer));
        }
    }

    /// The listener has the lane: its path is validated with the first packets on it.
    pub(super) fn lane_accepted(
        &mut self,
        cx: &mut Context,
        id: PeerId,
        handle: ConnectionHandle,
        offer: &LaneOffer,
        now: Instant,
    ) {
        let Some(session) = cx.peers.session_mut(id) else { return };
        let Some(opening) = session.openings.answered(offer.lane, offer.epoch) else { return };
        let name = session.id;
        // Whoever answers is there.
        cx.hub.note_heard(id, now);
        cx.heard(id, name);
        let Some(connection) = self.control.get(handle) else { return };
        let remote = connection.path().destination;
        let port = match opening.index {
            0 => LanePort::Shared(connection.underlay(), Some(remote)),
            _ => LanePort::Dial(remote),
        };
        let cids = LaneCids { local: opening.local_cid, remote: ConnectionId(offer.connection_id) };
        self.place_lane(cx, id, OpeningId { index: opening.index, epoch: opening.epoch }, cids, port, now);
    }

    /// Tells its lane host to keep a lane, with the keys that both ends derive from the control connection.
    fn place_lane(
        &mut self,
        cx: &mut Context,
        id: PeerId,
        of: OpeningId,
        cids: LaneCids,
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
        }
        let order = LaneRequest {
            name: LaneName { peer: id, session, index, epoch },
            local_cid: cids.local,
            remote_cid: cids.remote,
            suite,
            secrets: LaneSecrets(secrets),
            initial_rtt: quinn.rtt(),
            budget: self.packet_budget(cx, id).unwrap_or(TRANSMIT_CAPACITY),
            largest: cx.largest_to(id).into(),
            port,
        };
        if let Some(session) = cx.peers.session_mut(id) {
            session.openings.placed(index, epoch, now);
        }
        self.tell_lanes(cx, id);
        let lane_host = pool::lane_host(cx.id.index, index, cx.id.count);
        cx.tell(lane_host, WorkerMessage::OpenLane(Box::new(order)));
        true
    }

    pub(super) fn lane_closed(
        &mut self,
        cx: &mut Context,
        id: PeerId,
        end: &LaneEnd<LaneCloseCause>,
        now: Instant,
    ) {
        let Some(session) = cx.peers.session_mut(id) else { return };
        let (session_id, dialled) = (session.id, session.dialled);
        if dialled && end.reason == LaneCloseCause::WornOut {
            // Else a peer that says so of each at once has lanes opened without end. It says so again if it is true.
            let is_up = session.openings.is_up(end.lane, end.epoch);
            let age = session.openings.since(end.lane).map(|since| now.saturating_duration_since(since));
            if !is_up || age.is_none_or(|age| age < VALIDATION_TIMEOUT) {
                return;
            }
            let lane = LaneName { peer: id, session: session_id, index: end.lane, epoch: end.epoch };
            return self.lane_nears_limit(cx, lane, now);
        }
        let since = session.openings.since(end.lane);
        if !session.openings.lost(end.lane, end.epoch, now) {
            return;
        }
        if let Some(suppressed) = cx.logs.lane.closed.allow(now) {
            tracing::info!(
                peer = cx.peers.name(id),
                lane = end.lane,
                reason = ?end.reason,
                suppressed,
                "the peer closed a lane"
            );
        }
        let lane = LaneName { peer: id, session: session_id, index: end.lane, epoch: end.epoch };
        cx.drain_at_host(lane);
        self.tell_lanes(cx, id);
        if dialled && end.reason != LaneCloseCause::Done {
            cx.stats.totals.lanes_silent += u64::from(end.reason == LaneCloseCause::Dead);
            self.ask_again(cx, id, end.lane, since, now);
        }
    }

    /// Notes that a lane carries payloads, and tells the workers which lanes of the peer are up.
    pub(super) fn lane_is_up(&mut self, cx: &mut Context, lane: LaneName) {
        if let Some(session) = cx.peers.session_named(lane.peer, lane.session) {
            session.openings.up(lane.index, lane.epoch);
            self.tell_lanes(cx, lane.peer);
        }
    }

    /// A lane that was replaced carries payloads no more.
    pub(super) fn replaced_gone(&mut self, cx: &mut Context, lane: LaneName) {
        if let Some(session) = cx.peers.session_named(lane.peer, lane.session)
            && session.openings.replaced_gone(lane.index, lane.epoch)
        {
            self.tell_lanes(cx, lane.peer);
        }
    }

    /// The path of a lane carries packets of so many bytes.
    pub(super) fn lane_carries(&mut self, cx: &mut Context, lane: LaneName, bytes: usize) {
        if let Some(session) = cx.peers.session_named(lane.peer, lane.session) {
            session.openings.carries(lane.index, lane.epoch, bytes);
            self.settle_budget(cx, lane.peer);
        }
    }

    /// A lane could not go on: the peer is told, and a dialler opens it again with new keys.
    pub(super) fn lane_lost(&mut self, cx: &mut Context, lane: LaneName, why: LaneLoss, now: Instant) {
        let Some(session) = cx.peers.session_named(lane.peer, lane.session) else { return };
        let (handle, dialled) = (session.handle, session.dialled);
        let since = session.openings.since(lane.index);
        if !session.openings.lost(lane.index, lane.epoch, now) {
            // It ended before its lane host heard that it is replaced.
            return self.replaced_gone(cx, lane);
        }
        let (index, peer) = (lane.index, lane.peer);
        let mut again = dialled;
        match why {
            LaneLoss::Unvalidated => {
                cx.stats.totals.lanes_unvalidated += 1;
                if let Some(suppressed) = cx.logs.lane.unvalidated.allow(now) {
                    tracing::warn!(
                        peer = cx.peers.name(peer),
                        lane = index,
                        again,
                        suppressed,
                        "a lane's path was not validated in time (remedy: let UDP from any port of the dialler through)"
                    );
                }
            }
            LaneLoss::Ended(error) => {
                if let Some(suppressed) = cx.logs.lane.ended.allow(now) {
                    let reason =
                        error.map_or_else(|| "its keys are used up".to_owned(), |error| error.to_string());
                    tracing::warn!(
                        peer = cx.peers.name(peer),
                        lane = index,
                        reason,
                        suppressed,
                        "closing a lane"
                    );
                }
                let reason = LaneCloseCause::ProtocolViolation;
                let end = LaneEnd { lane: index, epoch: lane.epoch, reason };
                self.control.send(handle, &Message::LaneClose(end));
                cx.stats.totals.lanes_ended += 1;
            }
            LaneLoss::NoSocket => {
                again = false;
                if dialled {
                    cx.timers.arm(Timer::Pool(peer), now + VALIDATION_TIMEOUT);
                }
            }
        }
        self.tell_lanes(cx, peer);
        if again {
            self.ask_again(cx, peer, index, since, now);
        }
    }

    /// The limits of a lane are near. The dialler opens it again, the listener asks it to; until then it goes on.
    pub(super) fn lane_nears_limit(&mut self, cx: &mut Context, lane: LaneName, now: Instant) {
        let Some(session) = cx.peers.session_named(lane.peer, lane.session) else { return };
        let (handle, dialled) = (session.handle, session.dialled);
        if !session.openings.is_placed(lane.index, lane.epoch) || session.openings.is_asked(lane.index) {
            return;
        }
        cx.stats.totals.lanes_near_limit += u64::from(dialled);
        if let Some(suppressed) = cx.logs.lane.ended.allow(now) {
            tracing::info!(
                peer = cx.peers.name(lane.peer),
                lane = lane.index,
                suppressed,
                "replacing a lane: its keys are nearly used up, because the peer confirms no key update or many packets were \
                 forged"
            );
        }
        if dialled {
            self.ask_for_lane(cx, lane.peer, lane.index, now);
        } else {
            let end = LaneEnd { lane: lane.index, epoch: lane.epoch, reason: LaneCloseCause::WornOut };
            self.control.send(handle, &Message::LaneClose(end));
        }
    }

    /// Asks for a lane that is gone; one that did not live for long costs a pause first.
    fn ask_again(&mut self, cx: &mut Context, peer: PeerId, index: u8, since: Option<Instant>, now: Instant) {
        if since.is_some_and(|since| now.saturating_duration_since(since) < LEAST_LANE_AGE) {
            cx.timers.arm(Timer::Pool(peer), now + LEAST_LANE_AGE);
        } else {
            self.ask_for_lane(cx, peer, index, now);
        }
    }

    /// Something is outstanding on a lane that hears nothing: if nothing at all has been heard for too long, the peer is
    /// suspect and dialled anew beside the old connection; if only this lane is silent, it is opened again.
    ///
    /// The others may be idle: half-way to the `limit` they are asked for a sign of life.
    pub(super) fn lane_is_silent(
        &mut self,
        cx: &mut Context,
        lane: LaneName,
        silence: Duration,
        limit: Duration,
        now: Instant,
    ) {
        let Some(session) = cx.peers.session_named(lane.peer, lane.session) else { return };
        if !session.openings.is_placed(lane.index, lane.epoch) {
            // One that was to be replaced, but there was no socket for another.
            if silence >= limit && session.openings.replaced_gone(lane.index, lane.epoch) {
                cx.drain_at_host(lane);
                self.tell_lanes(cx, lane.peer);
            }
            return;
        }
        let is_up = session.openings.is_up(lane.index, lane.epoch);
        let peer = lane.peer;
        let others = cx.hub.silence(peer, now);
        if silence < limit {
            if others.is_none_or(|others| others >= limit / 2) {
                let session = lane.session;
                cx.tell_all(|| WorkerMessage::AskForLife { peer, session });
            }
            return;
        }
        if others.is_some_and(|others| others < limit) {
            // One that is being validated has its time for that.
            if is_up {
                self.lane_is_dead(cx, lane, now);
            }
            return;
        }
        cx.doubt(SessionRef { peer: lane.peer, session: lane.session }, Doubt::Silent, true);
    }

    /// Only this lane is silent: its flows take another one. The dialler opens it again; the listener asks it to, for a
    /// dialler with nothing outstanding on the lane does not notice.
    fn lane_is_dead(&mut self, cx: &mut Context, lane: LaneName, now: Instant) {
        let Some(session) = cx.peers.session_named(lane.peer, lane.session) else { return };
        let (handle, dialled) = (session.handle, session.dialled);
        if !session.openings.lost(lane.index, lane.epoch, now) {
            return;
        }
        if let Some(suppressed) = cx.logs.lane.silent.allow(now) {
            tracing::warn!(
                peer = cx.peers.name(lane.peer),
                lane = lane.index,
                suppressed,
                "a lane fell silent; {}",
                if dialled { "opening it again" } else { "its dialler is to open it again" }
            );
        }
        cx.drain_at_host(lane);
        self.tell_lanes(cx, lane.peer);
        if dialled {
            cx.stats.totals.lanes_silent += 1;
            self.ask_for_lane(cx, lane.peer, lane.index, now);
        } else {
            let end = LaneEnd { lane: lane.index, epoch: lane.epoch, reason: LaneCloseCause::Dead };
            self.control.send(handle, &Message::LaneClose(end));
        }
    }

    /// Openings that were not answered in time, and lanes that found no socket, are asked for again.
    pub(super) fn pool_timeout(&mut self, cx: &mut Context, id: PeerId, now: Instant) {
        self.check_openings(cx, id, now);
        let Some(session) = cx.peers.session_mut(id) else { return };
        session.openings.expire(now);
        let missing = if session.dialled { session.openings.missing() } else { Vec::new() };
        for index in missing {
            self.ask_for_lane(cx, id, index, now);
        }
        if let Some(at) = cx.peers.session(id).and_then(|session| session.openings.deadline()) {
            cx.timers.arm(Timer::Pool(id), at.min(now + LEAST_SILENCE));
        }
    }

    /// A lane was asked for, and nothing is heard at all: the far end is gone before it had a lane on which that shows.
    fn check_openings(&self, cx: &mut Context, id: PeerId, now: Instant) {
        let Some(session) = cx.peers.session(id) else { return };
        let Some(since) = session.openings.asked_since() else { return };
        let name = session.id;
        let Some(connection) = self.control.get(session.handle) else { return };
        // The request and its answer are repeated after twice the round-trip time if they are lost (RFC 9002 §6.2.2).
        let limit = LEAST_SILENCE.max(connection.quinn().rtt() * 6);
        let silence = now.saturating_duration_since(since);
        if silence >= limit && cx.hub.silence(id, now).is_none_or(|silence| silence >= limit) {
            cx.doubt(SessionRef { peer: id, session: name }, Doubt::Silent, true);
        }
    }

    /// Tells every worker which lanes are up.
    fn tell_lanes(&mut self, cx: &mut Context, id: PeerId) {
        let Some(session) = cx.peers.session(id) else { return };
        let (session, up, wanted) = (session.id, session.openings.mask(), session.openings.wanted);
        cx.tell_all(|| WorkerMessage::LanesUp { peer: id, session, up, wanted });
        self.settle_budget(cx, id);
    }

    /// The largest packet to `peer`, in bytes of UDP payload: what the paths of all its lanes carry, or while there are none
    /// that of the control connection.
    fn packet_budget(&self, cx: &Context, peer: PeerId) -> Option<usize> {
        let session = cx.peers.session(peer)?;
        let of_lanes = session.openings.largest_packet();
        of_lanes.or_else(|| {
            let mtu = self.control.get(session.handle)?.quinn().current_mtu();
            Some(mtu.min(cx.largest_to(peer)).into())
        })
    }

    /// In standard mode: the packet of a lane that would hold as much as a frame of the control connection does, which has
    /// more around it.
    fn plain_budget(&mut self, cx: &mut Context, peer: PeerId) -> Option<usize> {
        let state = cx.peers.get_mut(peer)?;
        let plain = state.data.link.as_mut()?.plain.as_mut()?;
        let most = self.control.quinn(state.session.as_ref()?.handle)?.datagrams().max_size();
        plain.set_most(most);
        Some(most? + HEADER_LEN + 1 + TAG_LEN)
    }

    /// The largest packet to `peer` may be another.
    fn settle_budget(&mut self, cx: &mut Context, peer: PeerId) {
        self.tell_budget(cx, peer);
    }

    /// Tells every worker the largest packet to `peer`; false if they know.
    fn tell_budget(&mut self, cx: &mut Context, peer: PeerId) -> bool {
        let Some(bytes) = self.packet_budget(cx, peer) else { return false };
        let bytes = self.plain_budget(cx, peer).map_or(bytes, |most| most.min(bytes));
        let Some(session) = cx.peers.session(peer).map(|session| session.id) else { return false };
        let changed = cx.peers.link_named(peer, session).is_some_and(|link| link.budget != bytes);
        if changed {
            cx.tell_all(|| WorkerMessage::Budget { peer, session, bytes });
        }
        changed
    }

    /// A session begins: with the largest packet that the control connection has found so far.
    pub(super) fn begin_budget(&mut self, cx: &mut Context, tunnel: &mut Tunnel, peer: PeerId, now: Instant) {
        if !self.tell_budget(cx, peer) {
            tunnel.budget_changed(cx, peer, now);
        }
    }

    /// The control connection has found that its path carries other packets.
    pub(super) fn mtu_changed(&mut self, cx: &mut Context, handle: ConnectionHandle) {
        let Some(peer) = self.control.get(handle).and_then(|connection| connection.peer) else {
            return;
        };
        if cx.peers.session(peer).is_some_and(|session| session.handle == handle) {
            self.settle_budget(cx, peer);
        }
    }
}

impl Context {
    pub(super) fn lane_refused(&mut self, id: PeerId, end: &LaneEnd<LaneRefusal>, now: Instant) {
        let Some(session) = self.peers.session_mut(id) else { return };
        if session.openings.answered(end.lane, end.epoch).is_some() {
            if let Some(suppressed) = self.logs.lane.refused.allow(now) {
                tracing::warn!(
                    peer = self.peers.name(id),
                    lane = end.lane,
                    reason = ?end.reason,
                    suppressed,
                    "the peer refused a lane"
                );
            }
            self.timers.arm(Timer::Pool(id), now + VALIDATION_TIMEOUT);
        }
    }

    fn drain_at_host(&mut self, lane: LaneName) {
        let lane_host = pool::lane_host(self.id.index, lane.index, self.id.count);
        self.tell(lane_host, WorkerMessage::DrainLane { lane });
    }

    /// The largest packet to `peer` that both ends agree to, in bytes of UDP payload.
    fn largest_to(&self, peer: PeerId) -> u16 {
        let accepted = self.peers.session(peer).map_or(u16::MAX, |session| session.hello.max_datagram_packet);
        accepted.min(largest_packet(&self.config))
    }
}
