//! Details of a worker for an operator, made on request: lanes, flows, sockets, the TUN device.
//!
//! ```text
//!   control thread:  Inspection::ask ──► inboxes ──► Worker::inspect, in its next turn ──► Inspection::wait
//! ```
//!
//! Values of each peer are cheap and published all the time (`report/stats.rs`). Values of each lane or flow are too many for that with a
//! thousand peers, so they are made here, with limits on the cost of one request.

use std::time::Instant;

use base::counts::PerKind;
use dataplane::socket_stats::role;
use net::{UdpRole, stats::Booked};

use crate::{
    peer::Peer,
    status::SocketStatus,
    worker::{
        context::Context,
        decoy::Decoy,
        report::{
            forwards_request::{ForwardEnd, ForwardsPortion},
            inspection_request::{Inspection, WorkerView},
        },
        turn::Worker,
    },
};

impl Worker {
    /// Answers an inspection. Publishes first unless that is not wanted, so that the published values are as recent as the answer.
    pub(crate) fn inspect(&mut self, inspection: &Inspection, now: Instant) {
        if !inspection.asks.as_published {
            self.publish(now);
        }
        let asks = &inspection.asks;
        let chosen = asks.peer.as_ref().map(|name| {
            let named = |peer: &&Peer| peer.data.is_live() && peer.name() == name;
            self.cx.peers.iter().find(named).map(|peer| peer.data.id)
        });
        let (lanes, lanes_left_out) = self.cx.lane_rows(chosen, asks.lane, now);
        let flows = match (chosen.flatten(), asks.lane) {
            (Some(peer), None) => self.cx.flow_rows(peer, now),
            (Some(_) | None, _) => Vec::new(),
        };
        let view = WorkerView {
            lanes,
            lanes_left_out,
            lane_flows: self.cx.flows_by_lane(chosen),
            stream_connections: self.cx.stream_connection_rows(chosen),
            flows,
            sockets: self.cx.socket_rows(&self.decoy),
            routes: asks.routes.map_or_else(Vec::new, |asked| self.tunnel.route_rows(&self.cx, asked)),
            talkers: if asks.talkers { self.tunnel.talker_rows(now) } else { Vec::new() },
            tun: self.tunnel.tun_row(),
        };
        inspection.answer(self.cx.id.index, view);
    }

    /// Answers a request for a portion of the forwards.
    pub(crate) fn tell_forwards(&mut self, portion: &ForwardsPortion, now: Instant) {
        let worker = self.cx.id.index;
        let Some(from) = portion.from.get(usize::from(worker)).copied().flatten() else { return };
        let Self { cx, tcp, sessions, .. } = self;
        portion.answers.set(worker, tcp.rows(cx, sessions, portion, from, now));
    }

    /// Ends the forward that an operator has named, if this worker has it.
    pub(crate) fn end_forward(&mut self, end: &ForwardEnd, now: Instant) {
        let Self { cx, tcp, sessions, .. } = self;
        let ended = tcp.end_named(cx, sessions, end.id, now);
        end.answers.set(cx.id.index, ended);
    }
}

impl Context {
    fn socket_rows(&self, decoy: &Decoy) -> PerKind<UdpRole, SocketStatus> {
        let mut open = PerKind::<UdpRole, usize>::default();
        let locals = self.sockets.locals.iter().map(|socket| role(&socket.local));
        for role in self.sockets.underlays.iter().map(|underlay| underlay.role).chain(locals) {
            open[role] += 1;
        }
        open[UdpRole::Decoy] = decoy.open_flows();
        let by_role = self.sockets.factory.stats;
        let row = |role: UdpRole| {
            let Booked { stats, kernel_drops, .. } = by_role.0[role];
            SocketStatus {
                role: role.label().into(),
                open: open[role],
                received_datagrams: stats.received_datagrams,
                received_bytes: stats.received_bytes,
                sent_datagrams: stats.sent_datagrams,
                sent_bytes: stats.sent_bytes,
                would_block: stats.would_block,
                send_failures: stats.send_failures,
                gso_fallbacks: stats.gso_fallbacks,
                refusals: self.stats.totals.refusals[role],
                kernel_drops,
            }
        };
        PerKind::from_fn(row)
    }
}
