//! Flows that fall silent, what waits for too long, and what an operator is told of datagrams that are not taken.

use std::{
    io,
    time::{Duration, Instant},
};

use dataplane::{
    datapath::uplink::Uplink,
    forward::Local,
    lanes::STRANGERS,
    relay::{FlowId, Origin},
    socket_stats::{role, role_place},
};
use wire::{
    context,
    ids::{LocalId, PeerId},
};

use crate::worker::{
    Sessions,
    context::Context,
    parts::{DataPlane, LaneHost, Sockets, Tun, Tunnel},
    timer::Timer,
};

impl Context {
    /// Makes sure that what waits is dropped in time, and that a peer for whom something waits is dialled soon.
    pub(super) fn watch_queue(&mut self, id: PeerId, now: Instant) {
        let Some(peer) = self.peers.get_mut(id) else { return };
        if let Some(deadline) = peer.data.relay.reassembly.deadline() {
            self.timers.arm(Timer::Queue(id), deadline);
        }
        let Some(oldest) = peer.data.relay.oldest() else { return };
        self.timers.arm(Timer::Queue(id), oldest + peer.data.config.queue.time + Duration::from_millis(1));
        self.dial_soon(id, now);
    }

    pub(super) fn watch_flow(&mut self, peer: PeerId, id: FlowId, now: Instant) {
        if let Some(flow) = self.peers.get(peer).and_then(|state| state.data.relay.flows.get(id)) {
            self.timers.arm(Timer::Flow(peer, id), now + flow.idle);
        }
    }

    /// The kernel reports that an earlier datagram was not taken: an ICMP error, so of a datagram that was delivered.
    pub(super) fn report_refusal(&mut self, local: &Local, error: &io::Error, now: Instant) {
        self.stats.totals.refusals[role_place(role(local))] += 1;
        let Local::Upstream { peer, flow } = *local else { return };
        let origin =
            self.peers.get(peer).and_then(|state| state.data.relay.flows.get(flow)).map(|flow| flow.origin);
        if let Some(Origin::Upstream { service, .. }) = origin
            && let Some(service) = self.config.services.get(service)
            && let Some(suppressed) = self.logs.refusal.allow(now)
        {
            tracing::warn!(
                service = &*service.name,
                upstream = %service.upstream,
                %error,
                suppressed,
                "the service does not take datagrams (remedy: is it running and listening there?)"
            );
        }
    }

    pub(super) fn report_too_large(&mut self, peer: PeerId, now: Instant) {
        let Some(state) = self.peers.get_mut(peer) else { return };
        if let Some(too_large) = state.data.too_large.take()
            && let Some(suppressed) = self.logs.too_large.allow(now)
        {
            let remedy = if too_large.wanted {
                "the other end cannot put pieces together: run this version there, or send smaller datagrams"
            } else {
                "send smaller datagrams, or set oversize = \"fragment\" for the service, at the agent that offers it"
            };
            tracing::warn!(
                peer = &*state.name,
                bytes = too_large.size,
                largest = too_large.most,
                suppressed,
                "a datagram is too large for the path and was dropped; the largest that fits is given (remedy: {remedy})"
            );
        }
    }
}

impl DataPlane {
    /// Ends a flow that has been silent for too long.
    pub(super) fn flow_timeout(
        &mut self,
        cx: &mut Context,
        host: &mut LaneHost,
        peer: PeerId,
        id: FlowId,
        now: Instant,
    ) {
        let Some(state) = cx.peers.get_mut(peer) else { return };
        let Some(flow) = state.data.relay.flows.get(id) else { return };
        let until = flow.last_active + flow.idle;
        if until > now {
            cx.timers.arm(Timer::Flow(peer, id), until);
            return;
        }
        let lane = flow.lane;
        if let Some(flow) = state.data.relay.remove_flow(id) {
            state.data.relay.stats.flows_idle += 1;
            let mut uplink =
                state.data.uplink(&mut host.lanes, &mut cx.sockets.underlays, &mut self.outgoing, now);
            uplink.say(lane, context::Context::Closed(flow.number));
            cx.sockets.close_flow_socket(flow.origin);
        }
    }

    /// The way of datagrams to a peer.
    pub(super) fn uplink<'a>(
        &'a mut self,
        cx: &'a mut Context,
        host: &'a mut LaneHost,
        peer: PeerId,
        now: Instant,
    ) -> Option<Uplink<'a>> {
        let state = cx.peers.get_mut(peer)?;
        Some(state.data.uplink(&mut host.lanes, &mut cx.sockets.underlays, &mut self.outgoing, now))
    }

    /// A batch from a local socket.
    pub(super) fn service_local(
        &mut self,
        cx: &mut Context,
        host: &mut LaneHost,
        id: LocalId,
        now: Instant,
    ) -> bool {
        if cx.stopping {
            // Nothing more is taken in: what comes now stays with the kernel.
            return false;
        }
        let Some(socket) = cx.sockets.locals.get_mut(id) else { return false };
        let local = socket.local;
        if let Err(error) = socket.socket.receive(&mut self.batch) {
            if error.kind() == io::ErrorKind::WouldBlock {
                return false;
            }
            cx.report_refusal(&local, &error, now);
            return true;
        }
        cx.sockets.locals.touch(id);
        let (Local::Ingress { peer, .. } | Local::Upstream { peer, .. }) = local;
        if !cx.peers.is_live(peer) {
            self.drop_batch_of_removed(cx, peer);
            return true;
        }
        let Some(state) = cx.peers.get_mut(peer) else { return false };
        let mut uplink =
            state.data.uplink(&mut host.lanes, &mut cx.sockets.underlays, &mut self.outgoing, now);
        match local {
            Local::Ingress { ingress, .. } => {
                let mut new_flows = Vec::new();
                uplink.ingress(&self.batch, id, ingress, &cx.config.limits, &mut new_flows);
                for flow in new_flows {
                    cx.watch_flow(peer, flow, now);
                }
            }
            Local::Upstream { flow, .. } => uplink.upstream(&self.batch, flow),
        }
        cx.report_too_large(peer, now);
        cx.watch_queue(peer, now);
        true
    }

    /// Books what became of payloads in send buffers and deliveries.
    pub(super) fn settle(&mut self, cx: &mut Context, sessions: &mut Sessions, tunnel: &mut Tunnel) {
        for settled in cx.sockets.underlays.settlements().chain(sessions.control.settlements()) {
            if let Some(peer) = cx.peers.get_mut(settled.peer) {
                peer.data.relay.settle_uplink(settled);
            } else if settled.peer == STRANGERS {
                self.strangers.settle(&settled);
            }
        }
        let written =
            tunnel.device.as_mut().map(|Tun { side: tun, .. }| tun.settlements()).into_iter().flatten();
        for settled in cx.sockets.locals.settlements().chain(written) {
            if let Some(peer) = cx.peers.get_mut(settled.peer) {
                peer.data.relay.settle_downlink(settled);
            }
        }
    }
}

impl Sockets {
    pub(super) fn close_flow_socket(&mut self, origin: Origin) {
        match origin {
            Origin::Upstream { socket, .. } => {
                self.factory.close_later(socket);
                self.factory.close_now(&mut self.locals);
            }
            Origin::Ingress { .. } => {}
        }
    }
}
