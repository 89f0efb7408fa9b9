//! The lanes that this worker keeps, whichever worker owns their control connection: opened, validated, found silent, drained.

use std::time::{Duration, Instant};

use config::Profile;
use dataplane::lanes::{DRAIN_TIME, LaneId, LaneSlot, LaneState, OpeningId, UnderlayId};
use net::{Path, UdpRole};
use quic_core::{AckProfile, Lane, LaneConfig};
use wire::ids::{LaneRef, PeerId, SessionRef};

use crate::{
    capture::Phase,
    peer::RESETTLE_TIME,
    worker::{
        Timer, Worker,
        exchange::{LaneLoss, LaneName, LaneOrder, LanePort, Order},
        number,
    },
};

/// The least silence, with something outstanding, after which a peer is dialled anew.
pub(super) const LEAST_SILENCE: Duration = Duration::from_millis(500);

/// Limits of a lane, where they are lower than those of its suite (RFC 9001 §6.6): for tests.
#[derive(Clone, Copy, Debug, Default)]
pub struct LaneLimits {
    /// Packets that one key seals; keys are updated after half of it.
    pub sealed: Option<u64>,
    /// Packets that may fail authentication.
    pub failed: Option<u64>,
}

impl Worker {
    /// The owner of a session wants a lane to be kept here.
    pub(super) fn open_lane(&mut self, order: &LaneOrder, now: Instant) {
        let LaneName { peer, session, index, .. } = order.name;
        if self.link_named(peer, session).is_none() {
            return;
        }
        let Some((underlay, remote)) = self.lane_socket(order, now) else {
            self.report_lane(order.name, LaneLoss::NoSocket, now);
            return;
        };
        let Some(core) = self.lane_core(order) else {
            self.release_underlay(underlay);
            self.report_lane(order.name, LaneLoss::NoSocket, now);
            return;
        };
        let owner = SessionRef { peer, session };
        let opening = OpeningId { index, epoch: order.name.epoch };
        let mut slot = LaneSlot::new(core, owner, opening, order.local_cid, underlay, order.budget, now);
        slot.largest_packet = order.largest;
        if let Some(destination) = remote {
            slot.validate(Path { destination, source: None, tos: 0 }, self.doors.random_bytes(), now);
        }
        let id = self.lanes.insert(slot);
        self.capture_lane(id, now);
        self.exchange.lane_kept(peer);
        self.lanes.touch(id);
        let old = self.link_named(peer, session).and_then(|link| link.pool.set(index, Some(id)));
        if let Some(old) = old {
            self.replace_lane(order.name, old, now);
        }
    }

    /// The lane `old` has been replaced: if it works it carries payloads until the one in its place does.
    fn replace_lane(&mut self, by: LaneName, old: LaneId, now: Instant) {
        let LaneName { peer, session, index, .. } = by;
        let works = self.lanes.get(old).is_some_and(|slot| slot.works(LEAST_SILENCE, now));
        match self.link_named(peer, session) {
            Some(link) if works => link.pool.keep_former(index, old),
            Some(_) | None => self.drop_former(old, now),
        }
    }

    /// A lane that was replaced carries payloads no more, though the one in its place does not yet: its owner is told.
    fn drop_former(&mut self, id: LaneId, now: Instant) {
        let Some(lane) = self.lanes.get(id).map(name_of_lane) else { return };
        if let Some(link) = self.link_named(lane.peer, lane.session) {
            link.pool.forget_former(id);
        }
        self.drain_lane(id, now);
        self.tell_owner(lane, Order::FormerGone { lane }, now);
    }

    /// The lane of an index carries payloads: the one before it need no longer.
    fn drain_former(&mut self, lane: LaneName, id: LaneId, now: Instant) {
        if let Some(link) = self.link_named(lane.peer, lane.session)
            && link.pool.get(lane.index) == Some(id)
            && let Some(former) = link.pool.take_former(lane.index)
        {
            self.drain_lane(former, now);
        }
    }

    /// The socket of a lane, and where to if this end dials.
    fn lane_socket(
        &mut self,
        order: &LaneOrder,
        now: Instant,
    ) -> Option<(UnderlayId, Option<std::net::SocketAddr>)> {
        match order.port {
            LanePort::Shared(underlay, remote) => {
                self.underlays.get(underlay).is_some().then_some((underlay, remote))
            }
            LanePort::Listening(port) => self.ports.get(port).map(|underlay| (*underlay, None)),
            LanePort::Dial(remote) => match self.doors.dial(&mut self.underlays, remote) {
                Ok(underlay) => Some((underlay, Some(remote))),
                Err(error) => {
                    if let Some(suppressed) = self.lane_logs.socket.allow(now) {
                        let (peer, lane) = (self.peer_name(order.name.peer), order.name.index);
                        tracing::warn!(
                            peer,
                            lane,
                            %error,
                            suppressed,
                            "cannot open a socket for a lane (remedy: a higher limit on open files, or fewer lanes)"
                        );
                    }
                    None
                }
            },
        }
    }

    fn lane_core(&self, order: &LaneOrder) -> Option<Lane> {
        let len = order.suite.secret_len();
        let config = LaneConfig {
            suite: order.suite,
            send_secret: &order.secrets.0[0][..len],
            receive_secret: &order.secrets.0[1][..len],
            remote_cid: order.remote_cid,
            local_cid: order.local_cid,
            ack: match self.peers.get(order.name.peer.0 as usize)?.config.profile {
                Profile::Throughput => AckProfile::Throughput,
                Profile::Latency => AckProfile::Latency,
            },
            initial_rtt: Some(order.initial_rtt),
            key_limit: self.lane_limits.sealed,
        };
        let mut core = Lane::new(&config).ok()?;
        if let Some(failures) = self.lane_limits.failed {
            core.limit_failures(failures);
        }
        Some(core)
    }

    /// A lane carries payloads from now on, or its path has moved.
    pub(super) fn lane_up(&mut self, id: LaneId, now: Instant) {
        let Some(slot) = self.lanes.get_mut(id) else { return };
        slot.search_mtu();
        let (lane, destination) = (name_of_lane(slot), slot.path().map(|path| path.destination));
        let from = slot.take_moved();
        self.lanes.touch(id);
        self.note_path(id, now);
        self.note_phase(id, Phase::Up, now);
        self.totals.path_moves.lanes += u64::from(from.is_some());
        if let Some(suppressed) = self.details_log.allow(now) {
            let (peer, lane) = (self.peer_name(lane.peer), lane.index);
            match from {
                Some(from) => {
                    tracing::debug!(peer, lane, %from, to = ?destination, suppressed, "lane moved");
                }
                None => tracing::debug!(peer, lane, remote = ?destination, suppressed, "lane up"),
            }
        }
        self.tell_owner(lane, Order::LaneUp { lane }, now);
        let (peer, session) = (lane.peer, lane.session);
        if from.is_some() && self.link_named(peer, session).is_some_and(|link| link.dialled) {
            self.tell_owner(lane, Order::ListenerMoved { peer, session }, now);
        }
        self.note_path_packet(id, now);
        self.drain_former(lane, id, now);
        self.settle_flows(lane.peer);
        self.drain_queue(lane.peer, now);
    }

    /// The owner is told if a lane has found that its path carries other packets than it last said.
    pub(super) fn note_path_packet(&mut self, id: LaneId, now: Instant) {
        let Some(slot) = self.lanes.get_mut(id) else { return };
        let Some(bytes) = slot.take_path_packet() else { return };
        let lane = name_of_lane(slot);
        if let Some(suppressed) = self.details_log.allow(now) {
            tracing::debug!(
                peer = self.peer_name(lane.peer),
                lane = lane.index,
                bytes,
                suppressed,
                "what the lane's path carries"
            );
        }
        self.tell_owner(lane, Order::LaneBudget { lane, bytes }, now);
    }

    /// A lane cannot go on.
    pub(super) fn end_lane(&mut self, id: LaneId, why: LaneLoss, now: Instant) {
        let Some(slot) = self.lanes.get(id) else { return };
        let lane = name_of_lane(slot);
        let mut current = false;
        if let Some(link) = self.link_named(lane.peer, lane.session)
            && link.pool.get(lane.index) == Some(id)
        {
            link.pool.set(lane.index, None);
            current = true;
        }
        self.remove_lane(id, now);
        if current {
            self.report_lane(lane, why, now);
        }
    }

    fn report_lane(&mut self, lane: LaneName, why: LaneLoss, now: Instant) {
        self.tell_owner(lane, Order::LaneLost { lane, why }, now);
    }

    /// Something is outstanding on a lane: its owner is told if it has heard nothing for long.
    pub(super) fn check_silence(&mut self, id: LaneId, now: Instant) {
        let Some(slot) = self.lanes.get(id) else { return };
        let limit = LEAST_SILENCE.max(slot.core.rtt().pto() * 3);
        let Some(since) = slot.core.silent_since() else { return };
        let silence = now.saturating_duration_since(since);
        let alive = match slot.state {
            LaneState::Validating | LaneState::Up => true,
            LaneState::Draining { .. } => false,
        };
        if alive && silence >= limit / 2 {
            let lane = name_of_lane(slot);
            let is_former = self
                .link_named(lane.peer, lane.session)
                .is_some_and(|link| link.pool.former().any(|former| former == id));
            if is_former {
                if silence >= limit {
                    self.drop_former(id, now);
                }
                return;
            }
            self.tell_owner(lane, Order::LaneSilent { lane, silence, limit }, now);
        }
    }

    /// A lane was heard, or may have been: all workers may ask when.
    pub(super) fn note_heard(&mut self, id: LaneId, now: Instant) {
        let Some(slot) = self.lanes.get(id) else { return };
        let (peer, session) = (slot.peer, slot.session);
        let Some(at) = slot.core.last_heard().filter(|at| now.saturating_duration_since(*at) < LEAST_SILENCE)
        else {
            return;
        };
        self.exchange.note_heard(peer, at);
        if let Some(link) = self.link_named(peer, session)
            && link.doubts.silent
        {
            let owner = link.pool.owner();
            self.tell(owner, Order::Heard { peer, session }, now);
        }
    }

    /// Lets the lane of an opening drain.
    pub(super) fn drain_named(&mut self, lane: LaneName, now: Instant) {
        let Some(link) = self.link_named(lane.peer, lane.session) else { return };
        let Some(id) = link.pool.get(lane.index) else { return };
        if self.lanes.get(id).is_some_and(|slot| slot.epoch == lane.epoch) {
            if let Some(link) = self.link_named(lane.peer, lane.session) {
                link.pool.set(lane.index, None);
            }
            if self.lanes.get(id).is_some_and(LaneSlot::is_up) {
                self.drain_lane(id, now);
            } else {
                // Nothing can be under way on it.
                self.remove_lane(id, now);
            }
        }
    }

    pub(super) fn drain_lane(&mut self, id: LaneId, now: Instant) {
        if let Some(slot) = self.lanes.get_mut(id) {
            let until = now + DRAIN_TIME;
            slot.state = LaneState::Draining { until };
            self.timers.arm(Timer::Lane(id), until);
        }
        self.note_phase(id, Phase::Draining, now);
    }

    pub(super) fn remove_lane(&mut self, id: LaneId, now: Instant) {
        self.end_capture_of(id, now);
        if let Some(slot) = self.lanes.remove(id) {
            self.exchange.lane_gone(slot.peer);
            let lane = name_of_lane(&slot);
            if self.link_named(slot.peer, slot.session).is_some_and(|link| link.pool.forget_former(id)) {
                self.tell_owner(lane, Order::FormerGone { lane }, now);
            }
            self.totals.retired.add(LaneRef { peer: slot.peer, lane: slot.index }, slot.core.stats());
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

    /// The largest packet to a peer has changed.
    pub(super) fn set_budget(
        &mut self,
        SessionRef { peer, session }: SessionRef,
        bytes: usize,
        now: Instant,
    ) {
        let Some(link) = self.link_named(peer, session) else { return };
        let before = std::mem::replace(&mut link.budget, bytes);
        if bytes < before {
            link.settles_at = link.settles_at.max(now + RESETTLE_TIME);
        }
        let lanes: Vec<LaneId> = link.pool.lanes().chain(link.pool.former()).collect();
        for lane in lanes {
            if let Some(slot) = self.lanes.get_mut(lane) {
                slot.set_budget(bytes);
            }
        }
        if before != bytes
            && let Some(suppressed) = self.details_log.allow(now)
        {
            tracing::debug!(peer = self.peer_name(peer), bytes, suppressed, "packet size");
        }
    }

    /// Once a second: silence is looked at again, and what is idle is kept alive.
    pub(super) fn housekeeping(&mut self, now: Instant) {
        for place in 0..self.peers.len() {
            let id = PeerId(number(place));
            if self.is_silent(id, now) {
                self.ask_for_life(id);
                self.follow_route(id, now);
            }
            self.check_control(id, now);
            self.see_to_stream_connections(id, now);
            self.keep_alive(id, now);
        }
        self.see_to_roster(now);
        self.see_to_tun(now);
        self.take_stock(now);
        self.look_at_meters(now);
        self.control.look_at_windows();
        self.report_stream_memory(now);
        self.gate.expire(now);
        self.exchange.taps().expire(now);
        if let Some(error) = self.gate.take_replay_log_error() {
            self.metrics.own.gate_journal_errors.count();
            self.warn_of_journal(&error, now);
        }
    }

    fn warn_of_journal(&mut self, error: &std::io::Error, now: Instant) {
        if let Some(suppressed) = self.journal_log.allow(now) {
            tracing::warn!(
                %error,
                suppressed,
                "cannot write down which knocks were used (remedy: space and permissions of identity.state_dir); after a restart \
                 none of before would be trusted"
            );
        }
    }

    /// Asks a peer for a sign of life on every lane.
    pub(super) fn ask_for_life(&mut self, id: PeerId) {
        let Some(link) = self.peers.get(id.0 as usize).and_then(|peer| peer.link.as_ref()) else { return };
        for lane in link.pool.lanes() {
            if let Some(slot) = self.lanes.get_mut(lane).filter(|slot| slot.is_up()) {
                slot.core.request_ping();
                self.lanes.touch(lane);
            }
        }
    }
}

/// Which opening a lane is.
pub(super) fn name_of_lane(slot: &LaneSlot) -> LaneName {
    LaneName { peer: slot.peer, session: slot.session, index: slot.index, epoch: slot.epoch }
}
