//! The end of connections, sessions and flows, singly or all of them when the agent stops.

use std::time::{Duration, Instant};

use base::ids::PeerId;
use dataplane::relay::{DropReason, FlowId, Origin};
use quinn_proto::ConnectionHandle;
use wire::{context, messages::CloseReason};

use crate::{
    hub::WorkerMessage,
    peer::Failure,
    worker::{
        Worker,
        context::{Context, Effect},
        parts::{DataPlane, LaneHost, Sessions},
        timer::Timer,
    },
};

/// How long the connection of a session stays that was left on request, because its listener still has payloads for us: shorter
/// than the time for which its lanes open packets.
const LINGER: Duration = Duration::from_secs(2);

impl Worker {
    /// Shuts down: accepts no more traffic, sends what waits, and closes every session.
    pub(super) fn shut_down(&mut self, within: Duration, now: Instant) {
        let Self { cx, data, sessions, host, tcp, tunnel, .. } = self;
        if cx.stopping {
            return;
        }
        cx.stopping = true;
        sessions.control.acceptor.close();
        if cx.id.index == 0 {
            tracing::info!("shutting down");
        }
        tcp.listeners.clear();
        data.drain_queues(cx, host, now);
        cx.sockets.underlays.finish(&mut host.lanes, now);
        cx.sockets.underlays.flush(&mut host.lanes, now);
        data.settle(cx, sessions, tunnel);
        for id in cx.peers.ids() {
            for flow in cx.peers.get(id).map(|peer| peer.data.relay.flows.all()).unwrap_or_default() {
                data.close_flow(cx, host, id, flow, now);
            }
            if let Some(peer) = cx.peers.get_mut(id) {
                // The rest of the queue are IP packets, which belong to no flow.
                peer.data.relay.queue.clear(DropReason::Shutdown, &mut peer.data.relay.uplink);
            }
        }
        cx.sockets.underlays.finish(&mut host.lanes, now);
        for id in cx.peers.ids() {
            sessions.end_session(cx, id, Some(CloseReason::Shutdown), now);
            sessions.end_stream_connections(cx, id, CloseReason::Shutdown, now);
        }
        for handle in sessions.control.handles() {
            sessions.control.close(handle, CloseReason::Shutdown, now);
        }
        cx.timers.arm(Timer::Stop, now + within);
    }
}

impl Sessions {
    /// Handles a connection that is gone, because the far end planned it if `planned`. If it carried a session, the session ends
    /// and the peer is dialled again.
    pub(super) fn lose(
        &mut self,
        cx: &mut Context,
        handle: ConnectionHandle,
        words: &str,
        planned: bool,
        now: Instant,
    ) {
        cx.effects.push_back(Effect::AbortForwards(handle));
        let Some(id) = self.peer_of(handle) else { return };
        if self.stream_connection_lost(cx, id, handle, None, now) {
            return;
        }
        if let Some(peer) = cx.peers.get_mut(id) {
            peer.dialler.ended(handle);
        }
        if !cx.peers.is_session(id, handle) {
            return;
        }
        self.end_session(cx, id, None, now);
        let Some(peer) = cx.peers.get_mut(id) else { return };
        peer.failure = Some(Failure::at(now, words, &[]));
        if let Some(suppressed) = peer.throttles.connections.allow(now) {
            if planned {
                tracing::info!(peer = &**peer.name(), reason = words, suppressed, "connection ended");
            } else {
                tracing::warn!(peer = &**peer.name(), reason = words, suppressed, "connection lost");
            }
        }
    }

    /// Ends a peer's session at its owner: its lanes drain and its TCP forwards are reset; its UDP flows stay.
    pub(super) fn end_session(
        &mut self,
        cx: &mut Context,
        id: PeerId,
        close: Option<CloseReason>,
        now: Instant,
    ) {
        let Some(session) = cx.peers.get_mut(id).and_then(|peer| peer.session.take()) else { return };
        cx.effects.push_back(Effect::AbortForwards(session.handle));
        cx.hub.end(id, session.id, cx.id.index);
        cx.effects.push_back(Effect::Message(WorkerMessage::Disconnected { peer: id, session: session.id }));
        match close {
            Some(CloseReason::Replaced) if session.leaving => {
                self.left.push(session.handle);
                cx.timers.arm(Timer::Left(session.handle), now + LINGER);
            }
            Some(reason) => self.control.close(session.handle, reason, now),
            None => {}
        }
    }

    /// Closes the connection to a peer that asked to be left, and was.
    pub(super) fn close_left(&mut self, cx: &mut Context, handle: ConnectionHandle, now: Instant) {
        if self.has_left(handle) {
            self.close_connection(cx, handle, CloseReason::Replaced, now);
        }
    }

    /// Forgets that a connection was left; returns whether it was.
    fn has_left(&mut self, handle: ConnectionHandle) -> bool {
        let before = self.left.len();
        self.left.retain(|left| *left != handle);
        self.left.len() < before
    }

    /// Closes a connection, tells the far end the reason, and ends everything that the connection carried.
    pub(super) fn close_connection(
        &mut self,
        cx: &mut Context,
        handle: ConnectionHandle,
        reason: CloseReason,
        now: Instant,
    ) {
        self.control.close(handle, reason, now);
        self.lose(cx, handle, reason.label(), false, now);
    }

    /// Closes a connection whose peer broke the protocol: it has to wait before it may connect again.
    pub(super) fn close_offender(
        &mut self,
        cx: &mut Context,
        handle: ConnectionHandle,
        reason: CloseReason,
        now: Instant,
    ) {
        if let Some(peer) = self.control.open(handle).and_then(|connection| connection.identity.peer()) {
            cx.registry.pause(peer, now);
        }
        self.close_connection(cx, handle, reason, now);
    }

    /// Removes a connection that quinn-proto has forgotten, after which quinn-proto may use its handle again.
    pub(super) fn connection_drained(&mut self, cx: &mut Context, handle: ConnectionHandle, now: Instant) {
        self.lose(cx, handle, "it is gone", false, now);
        self.has_left(handle);
        self.admission_ended(handle);
        if let Some(underlay) = self.control.remove(handle) {
            cx.effects.push_back(Effect::ReleaseSocket(underlay));
        }
    }
}

impl DataPlane {
    /// Ends a flow, tells the far end, and closes the flow's socket to a service.
    pub(super) fn close_flow(
        &mut self,
        cx: &mut Context,
        host: &mut LaneHost,
        id: PeerId,
        flow: FlowId,
        now: Instant,
    ) {
        let Some(state) = cx.peers.get_mut(id) else { return };
        let Some(flow) = state.data.relay.remove_flow(flow) else { return };
        if let Some(mut uplink) = self.uplink(cx, host, id, now) {
            uplink.send_flow_message(flow.lane, context::Context::Closed(flow.number));
        }
        if let Origin::Upstream { socket, .. } = flow.origin {
            cx.sockets.factory.close_later(socket);
            cx.sockets.factory.close_now(&mut cx.sockets.locals);
        }
    }
}
