//! The effects of a worker's steps, and the messages that workers send to each other.

use std::time::Instant;

use base::ids::SessionRef;
use wire::messages::CloseReason;

use crate::{
    hub::WorkerMessage,
    worker::{context::Effect, turn::Worker},
};

impl Worker {
    /// Handles what other workers sent since the last turn.
    pub(crate) fn read_messages(&mut self, now: Instant) {
        let (messages, handed) = self.cx.hub.take(self.cx.id.index);
        self.data.handed = handed;
        for message in messages {
            self.cx.stats.unpublished = true;
            self.handle_message(message, now);
            self.settle_effects(now);
        }
    }

    /// Carries out the effects of the last step and, depth first, the effects that follow from them.
    pub(crate) fn settle_effects(&mut self, now: Instant) {
        while let Some(effect) = self.cx.effects.pop_front() {
            let later = std::mem::take(&mut self.cx.effects);
            let Self { cx, data, sessions, host, tcp, tunnel, .. } = self;
            match effect {
                Effect::Message(message) => self.handle_message(message, now),
                Effect::LaneCarries { lane, id } => {
                    host.drain_replaced(cx, lane, id, now);
                    cx.settle_flows(lane.peer);
                    data.drain_queue(cx, host, lane.peer, now);
                }
                Effect::SeekPeer(peer) => sessions.seek(cx, host, peer, now),
                Effect::Drain(peer) => data.drain_queue(cx, host, peer, now),
                Effect::WakeListeners(peer) => tcp.wake_listeners(cx, peer),
                Effect::AbortForwards(handle) => {
                    tcp.abort_forwards(cx, sessions, handle);
                }
                Effect::EndStream { peer, handle } => {
                    sessions.end_stream_connection(cx, peer, handle, CloseReason::Replaced, now);
                }
                Effect::OpenStreams(peer) => sessions.open_stream_connections(cx, peer, now),
                Effect::CheckLoop { peer, remote } => tunnel.warn_of_loop(cx, Some(peer), remote, now),
                Effect::ReleaseSocket(id) => host.release_underlay(cx, &sessions.control, id),
            }
            self.cx.effects.extend(later);
        }
    }

    fn handle_message(&mut self, message: WorkerMessage, now: Instant) {
        let Self { cx, data, sessions, host, tcp, tunnel, .. } = self;
        match message {
            WorkerMessage::Connected(connected) => {
                if cx.hub.is_current(connected.peer, connected.session) {
                    sessions.link_up(cx, data, host, &connected, now);
                    tunnel.link_changed(cx, connected.peer, now);
                }
            }
            WorkerMessage::Disconnected { peer, session } => {
                sessions.link_down(cx, host, SessionRef { peer, session }, now);
                tunnel.link_changed(cx, peer, now);
            }
            WorkerMessage::EndSession { peer, session, reason } => {
                if cx.peers.session_named(peer, session).is_some() {
                    sessions.end_session(cx, peer, Some(reason), now);
                }
            }
            WorkerMessage::OpenLane(request) => host.open_lane(cx, &request, now),
            WorkerMessage::DrainLane { lane } => host.drain_named(cx, lane, now),
            WorkerMessage::LanesUp { peer, session, up, wanted } => {
                cx.set_lanes(SessionRef { peer, session }, up, wanted);
                tunnel.link_changed(cx, peer, now);
            }
            WorkerMessage::Budget { peer, session, largest } => {
                host.set_budget(cx, SessionRef { peer, session }, largest, now);
                tunnel.budget_changed(cx, peer, now);
            }
            WorkerMessage::Suspect { peer, session, suspicion, holds } => {
                sessions.set_suspicion(cx, SessionRef { peer, session }, suspicion, holds, now);
                tunnel.link_changed(cx, peer, now);
            }
            WorkerMessage::Services { peer, session, services } => {
                cx.services_changed(SessionRef { peer, session }, services);
            }
            WorkerMessage::ReportsWanted { peer, session, wanted } => {
                host.reports_wanted(cx, SessionRef { peer, session }, wanted, now);
            }
            WorkerMessage::PacketRepair { peer, session, terms } => {
                cx.packet_repair_changed(SessionRef { peer, session }, terms);
            }
            WorkerMessage::EndStreams { peer, reason } => {
                sessions.end_stream_connections(cx, peer, reason, now);
            }
            WorkerMessage::LaneUp { lane } => sessions.lane_is_up(cx, lane),
            WorkerMessage::LaneBudget { lane, found } => sessions.lane_carries(cx, lane, found),
            WorkerMessage::LaneLost { lane, why } => sessions.lane_lost(cx, lane, why, now),
            WorkerMessage::LaneNearLimit { lane } => sessions.lane_nears_limit(cx, lane, now),
            WorkerMessage::ReplacedGone { lane } => sessions.replaced_gone(cx, lane),
            WorkerMessage::LaneSilent { lane, silence, limit } => {
                sessions.lane_is_silent(cx, lane, silence, limit, now);
            }
            WorkerMessage::AskForLife { peer, session } => {
                if cx.peers.link_named(peer, session).is_some() {
                    host.ask_for_life(cx, peer);
                    sessions.send_here_on_streams(cx, peer, now);
                }
            }
            WorkerMessage::Challenged { peer, session } => sessions.address_suspect(cx, peer, session, now),
            WorkerMessage::ListenerMoved { peer, session } => sessions.listener_moved(cx, peer, session),
            WorkerMessage::Heard { peer, session } => {
                if cx.peers.session_named(peer, session).is_some() {
                    cx.heard(peer, session);
                }
            }
            WorkerMessage::DialSoon { peer } => {
                cx.await_soon(peer, now);
            }
            WorkerMessage::StreamsWanted { peer, session } => sessions.streams_wanted(cx, peer, session, now),
            WorkerMessage::DialStream(request) => sessions.dial_stream(cx, &request, now),
            WorkerMessage::StreamEnded { peer, number, outcome } => {
                sessions.stream_ended(cx, peer, number, outcome, now);
            }
            WorkerMessage::AcceptTcp { port } => tcp.wake_listener(cx, port),
            WorkerMessage::PeerAdded { id, peer, origin } => {
                cx.peer_added(id, &peer, origin, now);
                tunnel.route_peer(cx, id, now);
                cx.point_forwards(&peer.name, id);
            }
            WorkerMessage::PeerRemoved { id } => {
                sessions.peer_removed(cx, host, id, now);
                tunnel.unroute_peer(cx, id, now);
            }
            WorkerMessage::PeerChanged { id, peer } => self.peer_changed(id, peer, now),
            WorkerMessage::RoutesLearned(learned) => tunnel.routes_learned(cx, &learned, now),
            WorkerMessage::Configured(new) => self.configured(*new, now),
            WorkerMessage::Capture(capture) => host.capture(cx, capture, now),
        }
    }
}
