//! Connections, sessions and flows end, each alone or all of them when the agent stops.

use std::time::{Duration, Instant};

use dataplane::relay::{DropReason, FlowId};
use quinn_proto::ConnectionHandle;
use wire::{context, ids::PeerId, messages::CloseReason};

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

impl Worker {
    /// Stops: takes nothing more in, sends what waits, tells every peer.
    pub(super) fn shut_down(&mut self, within: Duration, now: Instant) {
        if self.cx.stopping {
            return;
        }
        self.cx.stopping = true;
        self.sessions.control.stop_accepting();
        if self.cx.id.index == 0 {
            tracing::info!("shutting down");
        }
        self.tcp.listeners.clear();
        self.data.drain_queues(&mut self.cx, &mut self.host, now);
        self.cx.sockets.underlays.finish(&mut self.host.lanes, now);
        self.cx.sockets.underlays.flush(&mut self.host.lanes, now);
        self.data.settle(&mut self.cx, &mut self.sessions, &mut self.tunnel);
        for id in self.cx.peers.ids() {
            for flow in self.cx.peers.get(id).map(|peer| peer.data.relay.flows.all()).unwrap_or_default() {
                self.data.close_flow(&mut self.cx, &mut self.host, id, flow, now);
            }
            if let Some(peer) = self.cx.peers.get_mut(id) {
                // What still waits are IP packets.
                peer.data.relay.queue.clear(DropReason::Shutdown, &mut peer.data.relay.uplink);
            }
        }
        self.cx.sockets.underlays.finish(&mut self.host.lanes, now);
        for id in self.cx.peers.ids() {
            self.sessions.end_session(&mut self.cx, id, Some(CloseReason::Shutdown), now);
            self.sessions.end_stream_connections(&mut self.cx, id, CloseReason::Shutdown, now);
        }
        for handle in self.sessions.control.handles() {
            self.sessions.control.close(handle, CloseReason::Shutdown, now);
        }
        self.cx.timers.arm(Timer::Stop, now + within);
    }
}

impl Sessions {
    /// A connection is gone: if it was a peer's session, that ends, and the peer is dialled again.
    pub(super) fn lose(&mut self, cx: &mut Context, handle: ConnectionHandle, words: &str, now: Instant) {
        self.lose_as(cx, handle, words, false, now);
    }

    /// A connection is gone; `planned` if the far end said so.
    pub(super) fn lose_as(
        &mut self,
        cx: &mut Context,
        handle: ConnectionHandle,
        words: &str,
        planned: bool,
        now: Instant,
    ) {
        cx.effects.push_back(Effect::AbortForwards(handle));
        let Some(id) = self.control.get(handle).and_then(|connection| connection.peer) else {
            return;
        };
        if self.stream_connection_lost(cx, id, handle, None, now) {
            return;
        }
        cx.forget_attempt(id, handle);
        if cx.peers.session(id).is_none_or(|session| session.handle != handle) {
            return;
        }
        self.end_session(cx, id, None, now);
        let Some(peer) = cx.peers.get_mut(id) else { return };
        peer.failure = Some(Failure::at(now, words, &[]));
        if let Some(suppressed) = peer.connections_log.allow(now) {
            if planned {
                tracing::info!(peer = &*peer.name, reason = words, suppressed, "connection ended");
            } else {
                tracing::warn!(peer = &*peer.name, reason = words, suppressed, "connection lost");
            }
        }
    }

    /// Ends a peer's session here: its lanes drain, its TCP forwards are reset; its UDP flows stay.
    pub(super) fn end_session(
        &mut self,
        cx: &mut Context,
        id: PeerId,
        close: Option<CloseReason>,
        now: Instant,
    ) {
        let Some(session) = cx.peers.get_mut(id).and_then(|peer| peer.session.take()) else {
            return;
        };
        cx.effects.push_back(Effect::AbortForwards(session.handle));
        cx.hub.end(id, session.id, cx.id.index);
        cx.effects.push_back(Effect::Message(WorkerMessage::Disconnected { peer: id, session: session.id }));
        if let Some(reason) = close {
            self.control.close(session.handle, reason, now);
        }
    }

    /// Closes a connection with a reason that the far end is told, and ends what hangs on it.
    pub(super) fn close_connection(
        &mut self,
        cx: &mut Context,
        handle: ConnectionHandle,
        reason: CloseReason,
        now: Instant,
    ) {
        self.control.close(handle, reason, now);
        self.lose(cx, handle, reason.label(), now);
    }

    /// quinn-proto has forgotten a connection: what ran on it is over, and its handle may be used again.
    pub(super) fn connection_drained(&mut self, cx: &mut Context, handle: ConnectionHandle, now: Instant) {
        self.lose(cx, handle, "it is gone", now);
        self.admission_ended(handle);
        if let Some(underlay) = self.control.remove(handle) {
            cx.effects.push_back(Effect::ReleaseSocket(underlay));
        }
    }
}

impl Context {
    fn forget_attempt(&mut self, id: PeerId, handle: ConnectionHandle) {
        if let Some(peer) = self.peers.get_mut(id) {
            peer.dialler.ended(handle);
        }
    }
}

impl DataPlane {
    /// Ends a flow and tells the far end.
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
            uplink.say(flow.lane, context::Context::Closed(flow.number));
        }
        cx.sockets.close_flow_socket(flow.origin);
    }
}
