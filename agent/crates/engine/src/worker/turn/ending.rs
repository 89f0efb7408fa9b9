//! The end of a worker: the agent drains, or stops.
//!
//! ```text
//!   operator ── drain ──► no handshake is answered any more; Leave to every peer that knows it
//!                         dialler: another session beside this one, elsewhere; then closes this one
//!   the bound is over ──► what is still there is closed
//! ```
//!
//! Sessions that this agent has dialled stay: the far end has no other way to it.

use std::time::{Duration, Instant};

use dataplane::relay::DropReason;
use wire::messages::CloseReason;

use crate::worker::{context::timer::Timer, turn::Worker};

impl Worker {
    /// Accepts no further connection, and asks the peers that have dialled this worker to leave it; `within` bounds the time that
    /// they have. Asked again, the newer bound holds.
    pub(crate) fn drain_sessions(&mut self, within: Duration, now: Instant) {
        let Self { cx, sessions, .. } = self;
        if cx.stopping {
            return;
        }
        sessions.refuse_all();
        if cx.id.index == 0 {
            tracing::info!(?within, "draining: no new peers, and those that are here are asked to leave");
        }
        for id in cx.peers.ids() {
            if let Some(mut conn) = sessions.conn(cx, id) {
                conn.ask_to_leave();
            }
        }
        cx.timers.arm(Timer::Drained, now + within);
    }

    /// Shuts down: accepts no more traffic, sends what waits, and closes every session.
    pub(crate) fn shut_down(&mut self, within: Duration, now: Instant) {
        let Self { cx, data, sessions, tcp, tunnel, .. } = self;
        if cx.stopping {
            return;
        }
        cx.stopping = true;
        sessions.control.acceptor.close();
        if cx.id.index == 0 {
            tracing::info!("shutting down");
        }
        tcp.close_ports();
        data.drain_queues(cx, now);
        cx.sockets.underlays.finish(&mut cx.sockets.lanes, now);
        cx.sockets.underlays.flush(&mut cx.sockets.lanes, now);
        data.settle(cx, sessions.control.settlements(), tunnel.settlements());
        for id in cx.peers.ids() {
            for flow in cx.peers.get(id).map(|peer| peer.data.relay.flows.all()).unwrap_or_default() {
                data.close_flow(cx, id, flow, None, now);
            }
            if let Some(peer) = cx.peers.get_mut(id) {
                // The rest of the queue are IP packets, which belong to no flow.
                peer.data.relay.clear_queues(DropReason::Shutdown);
            }
        }
        cx.sockets.underlays.finish(&mut cx.sockets.lanes, now);
        for id in cx.peers.ids() {
            sessions.end_session(cx, id, Some(CloseReason::Shutdown), now);
            sessions.end_stream_connections(cx, id, CloseReason::Shutdown, now);
        }
        for handle in sessions.control.handles() {
            sessions.control.close(handle, CloseReason::Shutdown, now);
        }
        sessions.control.guests.close_all(now);
        cx.timers.arm(Timer::Stop, now + within);
    }

    /// Ends a worker that has shut down, once all workers had stopped when the turn began (`all_stopped`), so that no hand-off batch
    /// can come. It waits until peers have been told, except for attempts that are not answered.
    pub(crate) fn end_if_done(&mut self, all_stopped: bool) {
        if !self.cx.stopping {
            return;
        }
        if !self.stopped {
            self.stopped = true;
            self.count_last_of_quotas();
            self.cx.sockets.read_sockets(false);
            self.charge_lines();
            self.tunnel.record_last_packets(&self.cx.hub);
            self.cx.hub.stopped();
        }
        let telling = self.sessions.control.iter().any(|connection| connection.identity.key().is_some());
        self.ended |= all_stopped && !telling && !self.cx.hub.has_hand_offs(self.cx.id.index);
    }
}
