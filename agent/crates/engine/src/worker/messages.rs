//! What the workers of an agent tell and hand each other, and what this one makes of it.

use std::time::Instant;

use wire::{ids::SessionRef, messages::CloseReason};

use crate::{
    hub::WorkerMessage,
    worker::{Worker, context::Effect, dial::DIAL_SOON_LASTS},
};

impl Worker {
    /// Handles what other workers sent since the last turn.
    pub(super) fn read_messages(&mut self, now: Instant) {
        for message in self.cx.hub.take(self.cx.id.index, &mut self.data.hand_offs) {
            self.cx.stats.unpublished = true;
            self.handle_message(message, now);
            self.settle_effects(now);
        }
    }

    /// Does what the parts asked for in the last step, and what follows from that, depth first.
    pub(super) fn settle_effects(&mut self, now: Instant) {
        while let Some(effect) = self.cx.effects.pop_front() {
            let later = std::mem::take(&mut self.cx.effects);
            match effect {
                Effect::Message(message) => self.handle_message(message, now),
                Effect::LaneCarries { lane, id } => {
                    self.host.drain_replaced(&mut self.cx, lane, id, now);
                    self.cx.settle_flows(lane.peer);
                    self.data.drain_queue(&mut self.cx, &mut self.host, lane.peer, now);
                }
                Effect::SeekPeer(peer) => {
                    self.sessions.seek(&mut self.cx, &mut self.host, peer, now);
                }
                Effect::Drain(peer) => {
                    self.data.drain_queue(&mut self.cx, &mut self.host, peer, now);
                }
                Effect::WakeListeners(peer) => self.tcp.wake_listeners(&mut self.cx, peer),
                Effect::AbortForwards(handle) => {
                    self.tcp.abort_streams(&mut self.cx, &mut self.sessions, handle);
                }
                Effect::EndStream { peer, handle } => self.sessions.end_stream_connection(
                    &mut self.cx,
                    peer,
                    handle,
                    CloseReason::Replaced,
                    now,
                ),
                Effect::OpenStreams(peer) => {
                    self.sessions.open_stream_connections(&mut self.cx, peer, now);
                }
                Effect::ReleaseSocket(id) => {
                    self.host.release_underlay(&mut self.cx, &self.sessions, id);
                }
            }
            self.cx.effects.extend(later);
        }
    }

    fn handle_message(&mut self, message: WorkerMessage, now: Instant) {
        match message {
            WorkerMessage::Connected(connected) => {
                if self.cx.hub.is_current(connected.peer, connected.session) {
                    self.sessions.link_up(&mut self.cx, &mut self.data, &mut self.host, &connected, now);
                }
            }
            WorkerMessage::Disconnected { peer, session } => {
                self.sessions.link_down(&mut self.cx, &mut self.host, peer, session, now)
            }
            WorkerMessage::EndSession { peer, session, reason } => {
                if self.cx.peers.session_named(peer, session).is_some() {
                    self.sessions.end_session(&mut self.cx, peer, Some(reason), now);
                }
            }
            WorkerMessage::OpenLane(message) => self.host.open_lane(&mut self.cx, &message, now),
            WorkerMessage::DrainLane { lane } => self.host.drain_named(&mut self.cx, lane, now),
            WorkerMessage::LanesUp { peer, session, up, wanted } => {
                self.cx.set_lanes(SessionRef { peer, session }, up, wanted);
            }
            WorkerMessage::Budget { peer, session, bytes } => {
                self.host.set_budget(&mut self.cx, SessionRef { peer, session }, bytes, now);
                self.tunnel.budget_changed(&self.cx, peer, now);
            }
            WorkerMessage::Doubt { peer, session, doubt, holds } => {
                self.sessions.set_doubt(&mut self.cx, SessionRef { peer, session }, doubt, holds, now);
            }
            WorkerMessage::Services { peer, session, services } => {
                if self.cx.peers.link_named(peer, session).is_some()
                    && let Some(state) = self.cx.peers.get_mut(peer)
                {
                    self.cx.stats.work.walked += state.data.relay.set_services(&services) as u64;
                    if let Some(link) = state.data.link.as_mut() {
                        link.services = services;
                    }
                }
            }
            WorkerMessage::LaneUp { lane } => self.sessions.lane_is_up(&mut self.cx, lane),
            WorkerMessage::LaneBudget { lane, bytes } => {
                self.sessions.lane_carries(&mut self.cx, lane, bytes)
            }
            WorkerMessage::LaneLost { lane, why } => self.sessions.lane_lost(&mut self.cx, lane, why, now),
            WorkerMessage::LaneNearLimit { lane } => self.sessions.lane_nears_limit(&mut self.cx, lane, now),
            WorkerMessage::ReplacedGone { lane } => self.sessions.replaced_gone(&mut self.cx, lane),
            WorkerMessage::LaneSilent { lane, silence, limit } => {
                self.sessions.lane_is_silent(&mut self.cx, lane, silence, limit, now)
            }
            WorkerMessage::AskForLife { peer, session } => {
                if self.cx.peers.link_named(peer, session).is_some() {
                    self.host.ask_for_life(&self.cx, peer);
                    self.sessions.tell_on_streams(&mut self.cx, peer, now);
                }
            }
            WorkerMessage::Challenged { peer, session } => {
                self.sessions.address_doubted(&mut self.cx, peer, session, now)
            }
            WorkerMessage::ListenerMoved { peer, session } => {
                self.sessions.listener_moved(&mut self.cx, peer, session)
            }
            WorkerMessage::Heard { peer, session } => {
                if self.cx.peers.session_named(peer, session).is_some() {
                    self.cx.heard(peer, session);
                }
            }
            WorkerMessage::DialSoon { peer } => {
                if let Some(state) = self.cx.peers.get_mut(peer) {
                    state.awaited_until = Some(now + DIAL_SOON_LASTS);
                    self.cx.dial_soon(peer, now);
                }
            }
            WorkerMessage::StreamsWanted { peer, session } => {
                self.sessions.streams_wanted(&mut self.cx, peer, session, now)
            }
            WorkerMessage::DialStream(message) => self.sessions.dial_stream(&mut self.cx, &message, now),
            WorkerMessage::StreamEnded { peer, number, outcome } => {
                self.sessions.stream_ended(&mut self.cx, peer, number, outcome, now)
            }
            WorkerMessage::AcceptTcp { place } => self.tcp.wake_listener(&mut self.cx, place),
            WorkerMessage::PeerAdded { id, peer, origin } => {
                self.cx.peer_added(id, &peer, origin, now);
                self.tunnel.route_peer(&self.cx, id);
                self.tcp.point_forwards(&mut self.cx, &peer.name, id);
            }
            WorkerMessage::PeerRemoved { id } => {
                self.sessions.peer_removed(&mut self.cx, &mut self.host, &mut self.tunnel, id, now)
            }
            WorkerMessage::PeerChanged { id, peer } => self.peer_changed(id, peer, now),
            WorkerMessage::Configured(new) => self.configured(*new, now),
            WorkerMessage::Capture(capture) => self.host.capture(&self.cx, capture, now),
        }
    }
}
