//! Connections, sessions and flows end, each alone or all of them when the agent stops.

use std::{
    sync::Arc,
    time::{Duration, Instant},
};

use dataplane::relay::{DropReason, FlowId};
use quinn_proto::ConnectionHandle;
use wire::{context::Context, ids::PeerId, messages::CloseReason};

use crate::{
    peer::Failure,
    worker::{Timer, Worker, number},
};

impl Worker {
    /// A connection is gone: if it was a peer's session, that ends, and the peer is dialled again.
    pub(super) fn lose(&mut self, handle: ConnectionHandle, words: &str, now: Instant) {
        self.lose_as(handle, words, false, now);
    }

    /// A connection is gone; `planned` if the far end said so.
    pub(super) fn lose_as(&mut self, handle: ConnectionHandle, words: &str, planned: bool, now: Instant) {
        self.abort_streams(handle);
        let Some(id) = self.control.get(handle).and_then(|connection| connection.peer) else { return };
        if self.stream_connection_lost(id, handle, None, now) {
            return;
        }
        self.forget_attempt(id, handle);
        if self.session_of(id).is_none_or(|session| session.handle != handle) {
            return;
        }
        self.end_session(id, None, now);
        let Some(peer) = self.peers.get_mut(id.0 as usize) else { return };
        peer.failure = Some(Arc::new(Failure { at: now, reason: words.to_owned(), causes: &[] }));
        if let Some(suppressed) = peer.connections_log.allow(now) {
            if planned {
                tracing::info!(peer = &*peer.name, reason = words, suppressed, "connection ended");
            } else {
                tracing::warn!(peer = &*peer.name, reason = words, suppressed, "connection lost");
            }
        }
    }

    fn forget_attempt(&mut self, id: PeerId, handle: ConnectionHandle) {
        if let Some(peer) = self.peers.get_mut(id.0 as usize) {
            peer.dialler.ended(handle);
        }
    }

    /// Ends a peer's session here: its lanes drain, its TCP forwards are reset; its UDP flows stay.
    pub(super) fn end_session(&mut self, id: PeerId, close: Option<CloseReason>, now: Instant) {
        let Some(session) = self.peers.get_mut(id.0 as usize).and_then(|peer| peer.session.take()) else {
            return;
        };
        self.abort_streams(session.handle);
        self.exchange.end(id, session.id, self.id.index);
        self.link_down(id, session.id, now);
        if let Some(reason) = close {
            self.control.close(session.handle, reason, now);
        }
    }

    /// Closes a connection with a reason that the far end is told, and ends what hangs on it.
    pub(super) fn close(&mut self, handle: ConnectionHandle, reason: CloseReason, now: Instant) {
        self.control.close(handle, reason, now);
        self.lose(handle, reason.label(), now);
    }

    /// quinn-proto has forgotten a connection: what ran on it is over, and its handle may be used again.
    pub(super) fn drained(&mut self, handle: ConnectionHandle, now: Instant) {
        self.lose(handle, "it is gone", now);
        self.admission_ended(handle);
        if let Some(underlay) = self.control.remove(handle) {
            self.release_underlay(underlay);
        }
    }

    /// Stops: takes nothing more in, sends what waits, tells every peer.
    pub(super) fn shut_down(&mut self, within: Duration, now: Instant) {
        if self.stopping {
            return;
        }
        self.stopping = true;
        self.control.stop_accepting();
        if self.id.index == 0 {
            tracing::info!("shutting down");
        }
        self.listeners.clear();
        self.drain_queues(now);
        self.underlays.finish(&mut self.lanes, now);
        self.underlays.flush(&mut self.lanes, now);
        self.settle();
        for place in 0..self.peers.len() {
            let id = PeerId(number(place));
            for flow in self.peers.get(place).map(|peer| peer.relay.flows.all()).unwrap_or_default() {
                self.close_flow(id, flow, now);
            }
            if let Some(peer) = self.peers.get_mut(place) {
                // What still waits are IP packets.
                peer.relay.queue.clear(DropReason::Shutdown, &mut peer.relay.uplink);
            }
        }
        self.underlays.finish(&mut self.lanes, now);
        for id in self.peer_ids() {
            self.end_session(id, Some(CloseReason::Shutdown), now);
            self.end_stream_connections(id, CloseReason::Shutdown, now);
        }
        for handle in self.control.handles() {
            self.control.close(handle, CloseReason::Shutdown, now);
        }
        self.timers.arm(Timer::Stop, now + within);
    }

    /// Ends a flow and tells the far end.
    pub(super) fn close_flow(&mut self, id: PeerId, flow: FlowId, now: Instant) {
        let Some(state) = self.peers.get_mut(id.0 as usize) else { return };
        let Some(flow) = state.relay.remove_flow(flow) else { return };
        if let Some(mut uplink) = self.uplink(id, now) {
            uplink.say(flow.lane, Context::Closed(flow.number));
        }
        self.close_flow_socket(flow.origin);
    }
}
