//! The lanes of sessions: asked for, accepted, validated, found silent, opened again, retired.

use std::{
    fmt::Display,
    time::{Duration, Instant},
};

use quic_core::{AckProfile, ConnectionId, Lane, LaneConfig, Suite};
use quinn_proto::{ConnectionHandle, Side};

use super::{Timer, Worker, session::largest_packet};
use crate::{
    config::Profile,
    control::{
        messages::{LaneCloseCause, LaneEnd, LaneOffer, LaneRefusal, Message},
        suite,
    },
    io::UdpRole,
    lanes::{DRAIN_TIME, LaneId, LaneSlot, LaneState, UnderlayId, VALIDATION_TIMEOUT, pool, pool::MAX_LANES},
    peer::PeerId,
};

/// A lane is not replaced by another opening before this age, shorter than any silence: openings cost keys and memory.
const LEAST_LANE_AGE: Duration = Duration::from_millis(250);

/// A lane that was heard within this time keeps its control connection alive, which else ends after 30 s.
const IN_USE: Duration = Duration::from_secs(10);

/// The least silence, with something outstanding, after which a peer is dialled anew.
const LEAST_SILENCE: Duration = Duration::from_millis(500);

impl Worker {
    /// Asks the peer for lane `index`, from a socket of its own, or the control connection's for lane 0.
    pub(super) fn ask_for_lane(&mut self, id: PeerId, index: u8, now: Instant) {
        let Some(peer) = self.peers.get_mut(id.0 as usize) else { return };
        let Some(session) = peer.session.as_mut() else { return };
        let handle = session.handle;
        let Some(connection) = self.control.get(handle) else { return };
        let (underlay, remote) = (connection.underlay(), connection.path().destination);
        let underlay = if index == 0 {
            underlay
        } else {
            match self.doors.dial(&mut self.underlays, remote) {
                Ok(underlay) => underlay,
                Err(error) => {
                    tracing::warn!(peer = &*peer.name, lane = index, %error, "cannot open a socket for a lane");
                    self.timers.arm(Timer::Pool(id), now + VALIDATION_TIMEOUT);
                    return;
                }
            }
        };
        let opening = session.pool.ask(index, self.ids.next_id(), underlay, now);
        self.timers.arm(Timer::Pool(id), opening.deadline());
        let offer = LaneOffer { lane: index, epoch: opening.epoch, connection_id: opening.local_cid.0 };
        self.control.send(handle, &Message::LaneOpen(offer));
    }

    /// The dialler asks for a lane.
    pub(super) fn lane_asked(
        &mut self,
        id: PeerId,
        handle: ConnectionHandle,
        offer: &LaneOffer,
        now: Instant,
    ) {
        let Some(session) = self.peers.get_mut(id.0 as usize).and_then(|peer| peer.session.as_mut()) else {
            return;
        };
        let young = session.pool.get(offer.lane).and_then(|lane| self.lanes.get(lane)).is_some_and(|slot| {
            // A lane is replaced when it could not be validated or fell silent: not within moments.
            now.saturating_duration_since(slot.opened) < LEAST_LANE_AGE
        });
        let refusal = if !session.pool.admit(offer.lane, offer.epoch) {
            Some(LaneRefusal::EpochReused)
        } else {
            let none = session.hello.max_lanes == 0;
            // Replaced lanes linger: all of them once beside all of the new ones, and no more.
            let held = self.lanes.iter().filter(|(_, slot)| slot.peer == id).count();
            let full = held >= 2 * usize::from(MAX_LANES);
            (young || none || full).then_some(LaneRefusal::TooMany)
        };
        if let Some(reason) = refusal {
            self.totals.lanes_refused += 1;
            self.control
                .send(handle, &Message::LaneRefuse(LaneEnd { lane: offer.lane, epoch: offer.epoch, reason }));
            return;
        }
        let (local, remote) = (self.ids.next_id(), ConnectionId(offer.connection_id));
        let Some(underlay) = self.control.get(handle).map(|connection| connection.underlay()) else { return };
        let place = (offer.lane, offer.epoch);
        let Some(slot) = self.lane_slot((id, handle), place, (local, remote), underlay, now) else { return };
        let lane = self.lanes.insert(slot);
        if let Some(session) = self.peers.get_mut(id.0 as usize).and_then(|peer| peer.session.as_mut()) {
            session.pool.wanted = session.pool.wanted.max(offer.lane + 1);
            if let Some(old) = session.pool.set(offer.lane, Some(lane)) {
                self.drain_lane(old, now);
            }
        }
        let answer = LaneOffer { connection_id: local.0, ..*offer };
        self.control.send(handle, &Message::LaneAccept(answer));
    }

    /// The listener has the lane: its path is validated with the first packets on it.
    pub(super) fn lane_accepted(
        &mut self,
        id: PeerId,
        handle: ConnectionHandle,
        offer: &LaneOffer,
        now: Instant,
    ) {
        let Some(session) = self.peers.get_mut(id.0 as usize).and_then(|peer| peer.session.as_mut()) else {
            return;
        };
        let Some(opening) = session.pool.answered(offer.lane, offer.epoch) else { return };
        let cids = (opening.local_cid, ConnectionId(offer.connection_id));
        let place = (opening.index, opening.epoch);
        let path = self.control.get(handle).map(|connection| connection.path());
        let slot = self.lane_slot((id, handle), place, cids, opening.underlay, now);
        let (Some(mut slot), Some(mut path)) = (slot, path) else {
            self.release_underlay(opening.underlay);
            return;
        };
        path.source = None;
        slot.validate(path, self.doors.random_bytes(), now);
        let lane = self.lanes.insert(slot);
        self.lanes.touch(lane);
        if let Some(session) = self.peers.get_mut(id.0 as usize).and_then(|peer| peer.session.as_mut())
            && let Some(old) = session.pool.set(offer.lane, Some(lane))
        {
            self.drain_lane(old, now);
        }
    }

    pub(super) fn lane_refused(&mut self, id: PeerId, end: &LaneEnd<LaneRefusal>, now: Instant) {
        let Some(peer) = self.peers.get_mut(id.0 as usize) else { return };
        let Some(session) = peer.session.as_mut() else { return };
        if let Some(opening) = session.pool.answered(end.lane, end.epoch) {
            tracing::warn!(peer = &*peer.name, lane = end.lane, reason = ?end.reason, "the peer refused a lane");
            self.release_underlay(opening.underlay);
            self.timers.arm(Timer::Pool(id), now + VALIDATION_TIMEOUT);
        }
    }

    pub(super) fn lane_closed(&mut self, id: PeerId, end: &LaneEnd<LaneCloseCause>, now: Instant) {
        let Some(peer) = self.peers.get_mut(id.0 as usize) else { return };
        let Some(session) = peer.session.as_mut() else { return };
        let Some(lane) = session.pool.get(end.lane) else { return };
        if self.lanes.get(lane).is_none_or(|slot| slot.epoch != end.epoch) {
            return;
        }
        tracing::info!(peer = &*peer.name, lane = end.lane, reason = ?end.reason, "the peer closed a lane");
        let dialled = session.dialled;
        session.pool.set(end.lane, None);
        self.drain_lane(lane, now);
        if dialled && end.reason != LaneCloseCause::Done {
            self.ask_for_lane(id, end.lane, now);
        }
    }

    /// A lane with the keys that both ends derive from the control connection.
    pub(super) fn lane_slot(
        &mut self,
        (peer, handle): (PeerId, ConnectionHandle),
        place: (u8, u64),
        (local_cid, remote_cid): (ConnectionId, ConnectionId),
        underlay: UnderlayId,
        now: Instant,
    ) -> Option<LaneSlot> {
        let connection = self.control.get(handle)?;
        let (quinn, dialled) = (connection.quinn(), connection.side() == Side::Client);
        let session = quinn.crypto_session();
        let suite: Suite = suite::negotiated(session)?;
        let mut secrets = [zeroize::Zeroizing::new([0; 48]), zeroize::Zeroizing::new([0; 48])];
        for (secret, from_dialler) in secrets.iter_mut().zip([dialled, !dialled]) {
            if !pool::derive_secret(session, place, from_dialler, &mut secret[..suite.secret_len()]) {
                return None;
            }
        }
        let config = LaneConfig {
            suite,
            send_secret: &secrets[0][..suite.secret_len()],
            receive_secret: &secrets[1][..suite.secret_len()],
            remote_cid,
            local_cid,
            ack: match self.peers.get(peer.0 as usize)?.config.profile {
                Profile::Throughput => AckProfile::Throughput,
                Profile::Latency => AckProfile::Latency,
            },
            initial_rtt: Some(quinn.rtt()),
            key_limit: None,
        };
        let core = Lane::new(&config).ok()?;
        let budget = self.packet_budget(peer, quinn.current_mtu());
        Some(LaneSlot::new(core, (peer, handle), place, local_cid, (underlay, budget), now))
    }

    /// The largest packet on a lane of `peer`, in bytes of UDP payload.
    pub(super) fn packet_budget(&self, peer: PeerId, mtu: u16) -> usize {
        let accepted = self.session_of(peer).map_or(u16::MAX, |session| session.hello.max_datagram_packet);
        usize::from(mtu.min(accepted).min(largest_packet(&self.config)))
    }

    pub(super) fn mtu_changed(&mut self, handle: ConnectionHandle, mtu: u16) {
        let Some(peer) = self.control.get(handle).and_then(|connection| connection.peer) else { return };
        let budget = self.packet_budget(peer, mtu);
        let Some(session) = self.session_of(peer).filter(|session| session.handle == handle) else { return };
        let lanes: Vec<LaneId> = session.pool.lanes().collect();
        let mut changed = false;
        for lane in lanes {
            if let Some(slot) = self.lanes.get_mut(lane) {
                changed |= slot.packet_budget != budget;
                slot.packet_budget = budget;
            }
        }
        if changed {
            tracing::debug!(peer = self.name_of(handle), bytes = budget, "packet size");
        }
    }

    /// A lane carries payloads from now on, or its path has moved.
    pub(super) fn lane_up(&mut self, id: LaneId, now: Instant) {
        let Some(slot) = self.lanes.get(id) else { return };
        let (peer, index, destination) = (slot.peer, slot.index, slot.path.map(|path| path.destination));
        if let Some(state) = self.peers.get(peer.0 as usize) {
            tracing::debug!(peer = &*state.name, lane = index, remote = ?destination, "lane up");
        }
        self.drain_queue(peer, now);
    }

    /// A lane cannot go on: it is closed and, by the dialler, opened again with new keys.
    pub(super) fn replace_lane(&mut self, id: LaneId, why: &dyn Display, now: Instant) {
        let Some(slot) = self.lanes.get(id) else { return };
        let (peer, handle, lane, epoch) = (slot.peer, slot.connection, slot.index, slot.epoch);
        if let Some(suppressed) = self.lane_log.allow(now) {
            tracing::warn!(peer = self.name_of(handle), lane, reason = %why, suppressed, "closing a lane");
        }
        let reason = LaneCloseCause::ProtocolViolation;
        self.control.send(handle, &Message::LaneClose(LaneEnd { lane, epoch, reason }));
        if let Some(session) = self.peers.get_mut(peer.0 as usize).and_then(|peer| peer.session.as_mut())
            && session.pool.get(lane) == Some(id)
        {
            session.pool.set(lane, None);
            if session.dialled {
                self.ask_for_lane(peer, lane, now);
            }
        }
        self.remove_lane(id);
    }

    /// A lane could not be validated in time.
    pub(super) fn reopen_lane(&mut self, id: LaneId, now: Instant) {
        let Some(slot) = self.lanes.get(id) else { return };
        let (peer, index, handle) = (slot.peer, slot.index, slot.connection);
        let Some(session) = self.peers.get_mut(peer.0 as usize).and_then(|peer| peer.session.as_mut()) else {
            self.remove_lane(id);
            return;
        };
        let again = session.handle == handle && session.dialled && session.pool.get(index) == Some(id);
        if session.pool.get(index) == Some(id) {
            session.pool.set(index, None);
        }
        self.remove_lane(id);
        self.totals.lanes_unvalidated += 1;
        tracing::warn!(
            peer = self.name_of(handle),
            lane = index,
            again,
            "a lane's path was not validated in time"
        );
        if again {
            self.ask_for_lane(peer, index, now);
        }
    }

    /// Openings that were not answered in time are asked for again.
    pub(super) fn pool_timeout(&mut self, id: PeerId, now: Instant) {
        let Some(session) = self.peers.get_mut(id.0 as usize).and_then(|peer| peer.session.as_mut()) else {
            return;
        };
        for opening in session.pool.overdue(now) {
            self.release_underlay(opening.underlay);
        }
        let missing =
            self.session_of(id).filter(|session| session.dialled).map(|session| session.pool.missing());
        for index in missing.unwrap_or_default() {
            self.ask_for_lane(id, index, now);
        }
        if let Some(at) = self.session_of(id).and_then(|session| session.pool.deadline()) {
            self.timers.arm(Timer::Pool(id), at);
        }
    }

    /// Something is outstanding on a lane: if nothing at all has been heard for too long, dials a new connection
    /// beside the old; if only this lane is silent, opens it again.
    pub(super) fn check_silence(&mut self, id: LaneId, now: Instant) {
        let Some(slot) = self.lanes.get(id) else { return };
        let limit = LEAST_SILENCE.max(slot.core.rtt().pto() * 3);
        let silent = |slot: &LaneSlot| {
            slot.core.silent_since().is_some_and(|since| now.saturating_duration_since(since) >= limit)
        };
        if !slot.is_up() || !silent(slot) {
            return;
        }
        let (peer, index) = (slot.peer, slot.index);
        let Some(session) = self.session_of(peer).filter(|session| session.pool.get(index) == Some(id))
        else {
            return;
        };
        let dialled = session.dialled;
        let heard = |lane: LaneId| {
            let last = self.lanes.get(lane).and_then(|slot| slot.core.last_heard());
            last.is_some_and(|at| now.saturating_duration_since(at) < limit)
        };
        if session.pool.lanes().any(heard) {
            if dialled {
                tracing::warn!(
                    peer = self.name_of(session.handle),
                    lane = index,
                    "a lane fell silent; opening it again"
                );
                self.totals.lanes_silent += 1;
                if let Some(session) =
                    self.peers.get_mut(peer.0 as usize).and_then(|peer| peer.session.as_mut())
                {
                    session.pool.set(index, None);
                }
                self.drain_lane(id, now);
                self.ask_for_lane(peer, index, now);
            }
            return;
        }
        let Some(state) = self.peers.get_mut(peer.0 as usize).filter(|state| !state.suspect) else { return };
        state.suspect = true;
        // A peer that dials us does so again when it notices.
        if !state.dialler.is_dialling() && !state.config.endpoints.is_empty() {
            tracing::warn!(peer = &*state.name, "the peer fell silent; dialling it anew");
            state.dialler.restart(true, now, self.doors.rng());
            if let Some(at) = state.dialler.deadline() {
                self.timers.arm(Timer::Dial(peer), at);
            }
        }
    }

    /// Whether a peer with a session was found silent and has not been heard since; forgets it if it has.
    pub(super) fn is_suspect(&mut self, id: PeerId, now: Instant) -> bool {
        if !self.peers.get(id.0 as usize).is_some_and(|state| state.suspect) {
            return false;
        }
        let heard = self.session_of(id).is_some_and(|session| {
            session.pool.lanes().filter_map(|lane| self.lanes.get(lane)).any(|slot| {
                let last = slot.core.last_heard();
                last.is_some_and(|at| now.saturating_duration_since(at) < LEAST_SILENCE)
            })
        });
        if heard {
            if let Some(state) = self.peers.get_mut(id.0 as usize) {
                state.suspect = false;
                tracing::info!(peer = &*state.name, "the peer is heard again");
            }
            self.stop_dialling(id, now);
            self.drain_queue(id, now);
        }
        !heard
    }

    pub(super) fn drain_lane(&mut self, id: LaneId, now: Instant) {
        if let Some(slot) = self.lanes.get_mut(id) {
            let until = now + DRAIN_TIME;
            slot.state = LaneState::Draining { until };
            self.timers.arm(Timer::Lane(id), until);
        }
    }

    pub(super) fn remove_lane(&mut self, id: LaneId) {
        if let Some(slot) = self.lanes.remove(id) {
            self.totals.retired.add(slot.peer, slot.core.stats());
            self.release_underlay(slot.underlay);
        }
    }

    /// Closes a dialled socket that nothing uses any more.
    pub(super) fn release_underlay(&mut self, id: UnderlayId) {
        let dialled = self.underlays.get(id).is_some_and(|underlay| underlay.role == UdpRole::QuicDial);
        let in_use = self.lanes.iter().any(|(_, slot)| slot.underlay == id)
            || self.control.iter().any(|connection| connection.underlay() == id);
        if dialled && !in_use {
            self.doors.close_underlay(&mut self.underlays, id);
        }
    }

    /// Once a second: silence is looked at again, and what is idle is kept alive.
    pub(super) fn housekeeping(&mut self, now: Instant) {
        for place in 0..self.peers.len() {
            let id = PeerId(super::number(place));
            if self.is_suspect(id, now) {
                self.ask_for_life(id);
            }
            self.keep_alive(id, now);
        }
        self.poll_kernel_drops(now);
    }

    /// Asks a peer that fell silent for a sign of life on every lane.
    fn ask_for_life(&mut self, id: PeerId) {
        let lanes: Vec<LaneId> =
            self.session_of(id).map(|session| session.pool.lanes().collect()).unwrap_or_default();
        for lane in lanes {
            if let Some(slot) = self.lanes.get_mut(lane).filter(|slot| slot.is_up()) {
                slot.core.request_ping();
                self.lanes.touch(lane);
            }
        }
    }

    /// Idle lanes of a dialled session are kept alive, each has a NAT mapping of its own.
    fn keep_alive(&mut self, id: PeerId, now: Instant) {
        let Some(peer) = self.peers.get_mut(id.0 as usize) else { return };
        let Some(session) = peer.session.as_mut().filter(|session| session.dialled) else { return };
        let silence = |slot: &LaneSlot| {
            let last = slot.core.last_heard().unwrap_or(slot.opened);
            now.saturating_duration_since(last)
        };
        if let Some(interval) = peer.config.keepalive {
            for lane in session.pool.lanes() {
                let Some(slot) = self.lanes.get_mut(lane).filter(|slot| slot.is_up()) else { continue };
                if silence(slot) >= interval {
                    slot.core.request_ping();
                    self.lanes.touch(lane);
                }
            }
            return;
        }
        // Without a keepalive the control connection lives for as long as its lanes are used.
        let used =
            session.pool.lanes().filter_map(|lane| self.lanes.get(lane)).any(|slot| silence(slot) < IN_USE);
        if used
            && now.saturating_duration_since(session.pinged) >= IN_USE
            && let Some(quinn) = self.control.quinn(session.handle)
        {
            session.pinged = now;
            quinn.ping();
        }
    }
}
