//! The lanes that this worker hosts, whichever worker owns their session: opened, validated, found dead, drained.

use std::{
    net::SocketAddr,
    time::{Duration, Instant},
};

use base::ids::{PeerId, SessionRef};
use config::Profile;
use dataplane::{
    datapath::downlink,
    lanes::{DRAIN_TIME, Due, LaneId, LaneSlot, LaneState, OpeningId, PacketSize, PathPacket, UnderlayId},
    lines::Standing,
};
use net::{Path, UdpRole};
use quic_core::{AckProfile, Lane, LaneConfig, TRANSMIT_CAPACITY};

use crate::{
    capture::Phase,
    control::{
        driver::Control,
        liveness::{LEAST_SILENCE, silence_limit},
    },
    hub::{LaneEvent, LaneLoss, LaneName, LanePort, LaneRequest, LineEvent, ToOwner},
    worker::{
        context::{Context, Effect, Sockets, packet_sizes::usual_packet, sources::Class, timer::Timer},
        lanes::{LaneHost, QuietLane},
        report::stats::PathMove,
    },
};

/// Bytes a second from which a lane probes several sizes at once: payloads wait no longer than 6 ms for those 11 kB.
const LEAST_BURST_RATE: u64 = 2_000_000;

/// For how long unread sockets put off the look at a quiet lane: some turns, in which a full receive buffer is read.
const MOST_UNREAD: Duration = Duration::from_millis(100);

/// The least silence after which IP packets go to a peer that stands in: well above the pauses of a busy host, and below twice the
/// probe timeout of a path of 20 ms, when the first probe is due under traffic.
pub(crate) const LEAST_LATENESS: Duration = Duration::from_millis(75);

/// The minimum interval between packets that show a peer our address. If a NAT changes our address twice within it, the peer
/// becomes unresponsive.
pub(crate) const TELL_INTERVAL: Duration = Duration::from_millis(50);

impl LaneHost {
    /// Opens a lane for the owner of its session.
    pub(crate) fn open_lane(&mut self, cx: &mut Context, request: &LaneRequest, now: Instant) {
        let lane = request.name;
        let LaneName { of, opening } = lane;
        if cx.peers.link_named(of).is_none() {
            return;
        }
        if cx.sockets.lanes.of_cid(request.local_cid).is_some() {
            // Their packets could not be told apart. With the next opening another ID is drawn.
            cx.lane_event(lane, LaneEvent::Lost(LaneLoss::NoSocket));
            return;
        }
        let Some((underlay, remote)) = cx.lane_socket(request, now) else {
            cx.lane_event(lane, LaneEvent::Lost(LaneLoss::NoSocket));
            return;
        };
        let Some(core) = self.lane_core(cx, request) else {
            cx.effects.push_back(Effect::ReleaseSocket(underlay));
            cx.lane_event(lane, LaneEvent::Lost(LaneLoss::NoSocket));
            return;
        };
        let size = PacketSize::new(request.budget, request.largest);
        let mut slot = LaneSlot::new(core, of, opening, request.local_cid, underlay, size, now);
        slot.line = request.line;
        if let Some(destination) = remote {
            slot.paths.validate(
                Path { destination, source: None, tos: 0 },
                downlink::challenge_data(&mut cx.rng),
                now,
            );
        }
        let is_reported = cx.peers.link_named(of).is_some_and(|link| link.reports);
        slot.set_reports(is_reported.then_some(cx.hub.base), now);
        let id = cx.sockets.lanes.insert(slot);
        self.capture_lane(cx, id, now);
        cx.hub.lane_hosted(of.peer);
        cx.sockets.lanes.touch(id);
        let old = cx.peers.link_named(of).and_then(|link| link.pool.set(opening.index, Some(id)));
        if let Some(old) = old {
            self.replace_lane(cx, lane, old, now);
        }
    }

    /// Handles the replacement of lane `old`: if it works, it carries payloads until its replacement does.
    fn replace_lane(&mut self, cx: &mut Context, by: LaneName, old: LaneId, now: Instant) {
        let works = cx.sockets.lanes.get(old).is_some_and(|slot| slot.works(LEAST_SILENCE, now));
        match cx.peers.link_named(by.of) {
            Some(link) if works => link.pool.keep_replaced(by.opening.index, old),
            Some(_) | None => self.drop_replaced(cx, old, now),
        }
    }

    /// Drains a replaced lane although its replacement does not carry payloads yet, and tells the session owner.
    fn drop_replaced(&mut self, cx: &mut Context, id: LaneId, now: Instant) {
        let Some(lane) = cx.sockets.lanes.get(id).map(name_of_lane) else { return };
        if let Some(link) = cx.peers.link_named(lane.of) {
            link.pool.forget_replaced(id);
        }
        self.drain_lane(cx, id, now);
        cx.lane_event(lane, LaneEvent::ReplacedGone);
    }

    /// Drains the lane that `id` has replaced, now that `id` carries payloads.
    pub(crate) fn drain_replaced(&mut self, cx: &mut Context, lane: LaneName, id: LaneId, now: Instant) {
        if let Some(link) = cx.peers.link_named(lane.of)
            && link.pool.get(lane.opening.index) == Some(id)
            && let Some(replaced) = link.pool.take_replaced(lane.opening.index)
        {
            self.drain_lane(cx, replaced, now);
        }
    }

    fn lane_core(&self, cx: &Context, request: &LaneRequest) -> Option<Lane> {
        let len = request.suite.secret_len();
        let config = LaneConfig {
            suite: request.suite,
            send_secret: &request.secrets.0[0][..len],
            receive_secret: &request.secrets.0[1][..len],
            remote_cid: request.remote_cid,
            local_cid: request.local_cid,
            ack: match cx.peers.get(request.name.of.peer)?.data.config.profile {
                Profile::Throughput => AckProfile::Throughput,
                Profile::Latency => AckProfile::Latency,
            },
            initial_rtt: Some(request.initial_rtt),
            key_limit: self.limits.sealed,
        };
        let mut core = Lane::new(&config).ok()?;
        if let Some(failures) = self.limits.failed {
            core.limit_failures(failures);
        }
        Some(core)
    }

    /// Handles a lane that is up from now on, or whose path has moved.
    pub(crate) fn lane_up(&mut self, cx: &mut Context, id: LaneId, now: Instant) {
        let Some(slot) = cx.sockets.lanes.get_mut(id) else { return };
        let rate = cx.peers.get(slot.peer).and_then(|peer| peer.data.relay.share_of(slot.line).rate());
        let (lane, destination) = (name_of_lane(slot), slot.path().map(|path| path.destination));
        let bursts = rate.is_none_or(|rate| rate >= LEAST_BURST_RATE);
        slot.core
            .plan_mtu_search(bursts, destination.map_or(TRANSMIT_CAPACITY, |to| usual_packet(to).into()));
        self.begin_to_bound_packets(cx, id, now);
        let Some(slot) = cx.sockets.lanes.get_mut(id) else { return };
        slot.size.search(&mut slot.core);
        let from = slot.paths.take_moved();
        cx.sockets.lanes.touch(id);
        self.note_path(cx, id, now);
        self.note_phase(cx, id, Phase::Up, now);
        cx.stats.totals.path_moves[PathMove::Lane] += u64::from(from.is_some());
        if let Some(suppressed) = cx.debug_lines.allow(now) {
            let (peer, lane) = (cx.peers.name(lane.of.peer), lane.opening.index);
            match from {
                Some(from) => {
                    tracing::debug!(peer, lane, %from, to = ?destination, suppressed = base::throttle::counted(suppressed), "lane moved");
                }
                None => {
                    tracing::debug!(peer, lane, remote = ?destination, suppressed = base::throttle::counted(suppressed), "lane up")
                }
            }
        }
        cx.lane_event(lane, LaneEvent::Up);
        if from.is_some() && cx.peers.link_named(lane.of).is_some_and(|link| link.dialled) {
            cx.tell_owner(lane.of, ToOwner::ListenerMoved);
        }
        cx.note_path_packet(id, now);
        cx.effects.push_back(Effect::LaneCarries { lane, id });
    }

    /// Removes a lane that cannot go on, and tells the session owner why if the session still uses it.
    pub(crate) fn end_lane(&mut self, cx: &mut Context, id: LaneId, why: LaneLoss, now: Instant) {
        let Some(slot) = cx.sockets.lanes.get(id) else { return };
        let lane = name_of_lane(slot);
        let mut current = false;
        if let Some(link) = cx.peers.link_named(lane.of)
            && link.pool.get(lane.opening.index) == Some(id)
        {
            link.pool.set(lane.opening.index, None);
            current = true;
        }
        self.remove_lane(cx, id, now);
        if current {
            cx.lane_event(lane, LaneEvent::Lost(why));
        }
    }

    /// Notes a lane on which nothing was heard for long; [`LaneHost::look_at_quiet`] decides, after the sockets were served.
    fn note_silence(&mut self, cx: &mut Context, id: LaneId, now: Instant) {
        let is_quiet = cx.sockets.lanes.get_mut(id).is_some_and(|slot| slot.take_quiet(now));
        if (is_quiet || cx.silence(id, now).is_some()) && !self.quiet.iter().any(|quiet| quiet.lane == id) {
            self.quiet.push(QuietLane { lane: id, since: now });
        }
    }

    /// Looks at quiet lanes again, after the sockets were served: a worker that stood still finds there what was sent meanwhile.
    pub(crate) fn look_at_quiet(&mut self, cx: &mut Context, now: Instant) {
        if self.quiet.is_empty() {
            return;
        }
        let has_unread = cx.sources.count(Class::Underlay) > 0;
        for QuietLane { lane, since } in std::mem::take(&mut self.quiet) {
            if has_unread && now.saturating_duration_since(since) < MOST_UNREAD {
                self.quiet.push(QuietLane { lane, since });
            } else {
                self.check_silence(cx, lane, now);
            }
        }
    }

    /// Tells the session owner if packets of a lane have been outstanding for long and nothing was received.
    fn check_silence(&mut self, cx: &mut Context, id: LaneId, now: Instant) {
        if let Some(slot) = cx.sockets.lanes.get(id)
            && let Some(silence) = slot.quiet_for(now)
        {
            let lane = name_of_lane(slot);
            cx.lane_event(lane, LaneEvent::Quiet(silence));
        }
        let Some((silence, limit)) = cx.silence(id, now) else { return };
        let Some(lane) = cx.sockets.lanes.get(id).map(name_of_lane) else { return };
        let link = cx.peers.link_named(lane.of);
        let is_replaced = link.is_some_and(|link| link.pool.replaced().any(|replaced| replaced == id));
        if !is_replaced {
            cx.lane_event(lane, LaneEvent::Silent { silence, limit });
        } else if silence >= limit {
            self.drop_replaced(cx, id, now);
        }
    }

    /// Drains a lane, or removes it if it was never up.
    pub(crate) fn drain_named(&mut self, cx: &mut Context, lane: LaneName, now: Instant) {
        let Some(link) = cx.peers.link_named(lane.of) else { return };
        let Some(id) = link.pool.get(lane.opening.index) else { return };
        let Some(slot) = cx.sockets.lanes.get(id).filter(|slot| slot.epoch == lane.opening.epoch) else {
            return;
        };
        link.pool.set(lane.opening.index, None);
        if slot.is_up() {
            self.drain_lane(cx, id, now);
        } else {
            // No packets with payloads can be under way on it.
            self.remove_lane(cx, id, now);
        }
    }

    pub(crate) fn drain_lane(&mut self, cx: &mut Context, id: LaneId, now: Instant) {
        if let Some(slot) = cx.sockets.lanes.get_mut(id) {
            let until = now + DRAIN_TIME;
            slot.drain(until);
            cx.timers.arm(Timer::Lane(id), until);
        }
        self.note_phase(cx, id, Phase::Draining, now);
    }

    pub(crate) fn remove_lane(&mut self, cx: &mut Context, id: LaneId, now: Instant) {
        self.end_capture_of(cx, id, now);
        if let Some(mut slot) = cx.sockets.lanes.remove(id) {
            cx.hub.lane_gone(slot.peer);
            if let Some((streams, peer)) = slot.repair.take().zip(cx.peers.get_mut(slot.peer)) {
                peer.data.give_up_repair(*streams);
            }
            let lane = name_of_lane(&slot);
            if cx.peers.link_named(lane.of).is_some_and(|link| link.pool.forget_replaced(id)) {
                cx.lane_event(lane, LaneEvent::ReplacedGone);
            }
            cx.stats.retired.add(&slot);
            cx.effects.push_back(Effect::ReleaseSocket(slot.underlay));
        }
    }

    pub(crate) fn lane_timeout(&mut self, cx: &mut Context, id: LaneId, now: Instant) {
        let Some(slot) = cx.sockets.lanes.get_mut(id) else { return };
        match slot.on_timeout(now) {
            Due::Nothing => {
                if let Some(at) = slot.poll_timeout() {
                    cx.timers.arm(Timer::Lane(id), at);
                }
            }
            Due::Transmit => {
                cx.sockets.lanes.touch(id);
                self.note_silence(cx, id, now);
            }
            Due::Moved => self.lane_up(cx, id, now),
            Due::Reopen => self.end_lane(cx, id, LaneLoss::Unvalidated, now),
            Due::Remove => self.remove_lane(cx, id, now),
        }
    }
}

impl Context {
    /// Tells the session owner if a lane has found a new size of packets that its path carries.
    pub(crate) fn note_path_packet(&mut self, id: LaneId, now: Instant) {
        let Some(slot) = self.sockets.lanes.get_mut(id) else { return };
        let Some(found) = slot.take_path_packet() else { return };
        let lane = name_of_lane(slot);
        throttled!(
            debug, self.debug_lines.allow(now), { peer = self.peers.name(lane.of.peer), lane = lane.opening.index, bytes = found.bytes, measured = found.measured },
            "what the lane's path carries"
        );
        self.lane_event(lane, LaneEvent::Carries(found));
    }

    /// How long nothing was received on a lane while packets were outstanding, and the limit, once that is worth a look.
    fn silence(&self, id: LaneId, now: Instant) -> Option<(Duration, Duration)> {
        let slot = self.sockets.lanes.get(id)?;
        let rtt = slot.core.rtt();
        let limit = silence_limit(rtt);
        let silence = now.saturating_duration_since(slot.core.silent_since()?);
        // When the first probe is due while packets keep coming, or its answer if none came since.
        let late = LEAST_LATENESS.max(rtt.pto() * 3 / 2);
        let is_watched = self.peers.get(slot.peer).is_some_and(|peer| peer.data.is_watched);
        let least = if is_watched { late.min(limit / 2) } else { limit / 2 };
        let drains = matches!(slot.state, LaneState::Draining { .. });
        (!drains && silence >= least).then_some((silence, limit))
    }

    /// Shares with all workers when a peer was heard on a lane.
    pub(crate) fn note_heard(&mut self, id: LaneId, now: Instant) {
        let Some(slot) = self.sockets.lanes.get(id) else { return };
        let of = name_of_lane(slot).of;
        let Some(at) = slot.core.last_heard().filter(|at| now.saturating_duration_since(*at) < LEAST_SILENCE)
        else {
            return;
        };
        self.hub.note_heard(of.peer, at);
        if let Some(line) = slot.line {
            self.hub.note_line_heard(of.peer, line, at);
            let lines = self.peers.link_named(of).and_then(|link| link.pool.lines.as_ref());
            // Whether it is news for the hub does not matter: that may have been noted just before the suspicion.
            if lines.is_some_and(|lines| lines.standing(line) == Standing::Suspect)
                && self.sockets.lanes.get_mut(id).is_some_and(|slot| slot.tells_heard(at))
            {
                self.tell_owner(of, ToOwner::Line(line, LineEvent::Heard(at)));
            }
        }
        if self.peers.link_named(of).is_some_and(|link| link.suspicions.unresponsive || link.suspicions.late)
        {
            self.tell_owner(of, ToOwner::Heard);
        }
    }

    /// Closes a dialled socket that no lane and no connection uses any more.
    pub(crate) fn release_underlay(&mut self, control: &Control, id: UnderlayId) {
        let Sockets { factory, underlays, lanes, .. } = &mut self.sockets;
        let dialled = underlays.get(id).is_some_and(|underlay| underlay.role == UdpRole::QuicDial);
        let in_use = lanes.iter().any(|(_, slot)| slot.underlay == id)
            || control.iter().any(|connection| connection.underlay == id);
        if dialled && !in_use {
            factory.close_underlay(underlays, id);
        }
    }

    /// Applies a new limit on packets to a peer, in bytes of UDP payload, to the lanes that this worker hosts.
    pub(crate) fn set_budget(&mut self, of: SessionRef, largest: PathPacket, now: Instant) {
        let Some(link) = self.peers.link_named(of) else { return };
        let before = link.budget.bytes();
        if link.budget.set(largest, now) {
            self.effects.push_back(Effect::Drain(of.peer));
        }
        let lanes: Vec<LaneId> = link.pool.lanes().chain(link.pool.replaced()).collect();
        for lane in lanes {
            if let Some(slot) = self.sockets.lanes.get_mut(lane) {
                slot.size.set_budget(largest.bytes);
            }
        }
        if before != largest.bytes {
            throttled!(
                debug,
                self.debug_lines.allow(now),
                { peer = self.peers.name(of.peer), bytes = largest.bytes },
                "packet size"
            );
        }
    }

    /// Pings a peer on every lane that this worker hosts.
    pub(crate) fn ask_for_life(&mut self, id: PeerId) {
        let Some(link) = self.peers.link(id) else { return };
        for lane in link.pool.lanes() {
            if let Some(slot) = self.sockets.lanes.get_mut(lane).filter(|slot| slot.is_up()) {
                slot.core.request_ping();
                self.sockets.lanes.touch(lane);
            }
        }
    }

    /// Handles a path challenge on a lane. Unless it validates a new lane, a challenge on a dialled lane means that our packets reach
    /// the far end from another address: most likely a NAT has forgotten all of our ports, not only this one.
    pub(crate) fn lane_challenged(&mut self, id: LaneId, data: [u8; 8], now: Instant) {
        let Some(slot) = self.sockets.lanes.get_mut(id) else { return };
        if !slot.paths.is_challenged_anew(data, TELL_INTERVAL, now) {
            return;
        }
        let of = name_of_lane(slot).of;
        if self.peers.link_named(of).is_some_and(|link| link.dialled) {
            self.tell_owner(of, ToOwner::Challenged);
        }
    }

    /// Gets the socket of a lane, and the address to send to if this end dials.
    fn lane_socket(
        &mut self,
        request: &LaneRequest,
        now: Instant,
    ) -> Option<(UnderlayId, Option<SocketAddr>)> {
        match request.port {
            LanePort::Shared(underlay, remote) => {
                self.sockets.underlays.get(underlay).is_some().then_some((underlay, remote))
            }
            LanePort::Listening(port) => self.sockets.ports.get(port).map(|underlay| (*underlay, None)),
            LanePort::Dial(remote, line) => {
                match self.sockets.factory.dial(&mut self.sockets.underlays, remote, line) {
                    Ok(underlay) => Some((underlay, Some(remote))),
                    Err(error) => {
                        self.warn_of_lane_socket(request, line, &error, now);
                        None
                    }
                }
            }
        }
    }

    fn warn_of_lane_socket(
        &mut self,
        request: &LaneRequest,
        line: Option<u8>,
        error: &std::io::Error,
        now: Instant,
    ) {
        let (peer, lane) = (self.peers.name(request.name.of.peer), request.name.opening.index);
        let uplink = line.and_then(|line| self.sockets.factory.uplinks().get(usize::from(line)));
        if let Some(uplink) = uplink {
            throttled!(
                warn, self.logs.lane_socket.allow(now), { peer, lane, uplink = &*uplink.name, way = uplink.way(), %error },
                "cannot open a socket on a line; the others carry its traffic until that succeeds (remedy: the line's interface, its \
                 address and its route)"
            );
            return;
        }
        throttled!(
            warn, self.logs.lane_socket.allow(now), { peer, lane, %error },
            "cannot open a socket for a lane (remedy: a higher limit on open files, or fewer lanes)"
        );
    }

    pub(crate) fn warn_of_replay_log(&mut self, error: &std::io::Error, now: Instant) {
        throttled!(
            warn, self.logs.replay_log.allow(now), { %error },
            "cannot write down which knocks were used (remedy: space and permissions of identity.state_dir); after a restart \
            none of before would be trusted"
        );
    }
}

/// Returns the name of a lane, by which messages between workers refer to it.
pub(crate) fn name_of_lane(slot: &LaneSlot) -> LaneName {
    LaneName {
        of: SessionRef { peer: slot.peer, session: slot.session },
        opening: OpeningId { index: slot.index, epoch: slot.epoch },
    }
}
