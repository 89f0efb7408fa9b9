//! The effects of a worker's steps, and the messages that workers send to each other.

use std::time::Instant;

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
                    let peer = lane.of.peer;
                    host.drain_replaced(cx, lane, id, now);
                    cx.settle_flows(peer);
                    data.drain_queue(cx, peer, now);
                }
                Effect::SeekPeer(peer) => sessions.seek(cx, peer, now),
                Effect::Drain(peer) => data.drain_queue(cx, peer, now),
                Effect::WakeListeners(peer) => tcp.wake_listeners(cx, peer),
                Effect::AbortForwards(handle) => {
                    tcp.abort_forwards(cx, sessions, handle);
                }
                Effect::EndStream { peer, handle } => {
                    sessions.end_stream_connection(cx, peer, handle, CloseReason::Replaced, now);
                }
                Effect::OpenStreams(peer) => sessions.open_stream_connections(cx, peer, now),
                Effect::CheckLoop { peer, remote } => tunnel.warn_of_loop(cx, Some(peer), remote, now),
                Effect::ReleaseSocket(id) => cx.release_underlay(&sessions.control, id),
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
            WorkerMessage::Disconnected { of } => {
                sessions.control.set_proved(of.peer, None);
                sessions.link_down(cx, host, of, now);
                tunnel.link_changed(cx, of.peer, now);
            }
            WorkerMessage::ToOwner { of, what } => sessions.told(cx, of, what, now),
            WorkerMessage::OpenLane(request) => host.open_lane(cx, &request, now),
            WorkerMessage::DrainLane { lane } => host.drain_named(cx, lane, now),
            WorkerMessage::LanesUp { of, up, wanted, lines } => {
                cx.set_lanes(of, up, wanted, lines, now);
                sessions.follow_lines(cx, of, now);
                sessions.follow_line_rates(cx, of.peer, now);
                tunnel.link_changed(cx, of.peer, now);
            }
            WorkerMessage::Budget { of, largest } => {
                cx.set_budget(of, largest, now);
                let link = cx.peers.link_named(of);
                sessions.control.set_proved(of.peer, link.and_then(|link| link.budget.proved()));
                tunnel.budget_changed(cx, of.peer, now);
            }
            WorkerMessage::Suspect { of, suspicion, holds } => {
                sessions.set_suspicion(cx, of, suspicion, holds, now);
                tunnel.link_changed(cx, of.peer, now);
            }
            WorkerMessage::Services { of, services } => {
                cx.services_changed(of, services);
            }
            WorkerMessage::ReportsWanted { of, wanted } => {
                cx.reports_wanted(of, wanted, now);
            }
            WorkerMessage::PacketRepair { of, terms } => {
                cx.packet_repair_changed(of, terms);
            }
            WorkerMessage::EndStreams { peer, reason } => {
                sessions.end_stream_connections(cx, peer, reason, now);
            }
            WorkerMessage::AskForLife { of } => {
                if cx.peers.link_named(of).is_some() {
                    cx.ask_for_life(of.peer);
                    sessions.send_here_on_streams(cx, of.peer, now);
                }
            }
            WorkerMessage::DialSoon { peer } => {
                cx.await_soon(peer, now);
            }
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
