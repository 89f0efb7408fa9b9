//! Timeouts of flows and queues, batches of local sockets, and log lines about datagrams that are not delivered.

use std::{
    io,
    net::SocketAddr,
    time::{Duration, Instant},
};

use base::ids::{IngressId, LocalId, PeerId};
use dataplane::{
    datapath::{
        proxied::{ProxyPort, Unproxied},
        uplink::Uplink,
    },
    forward::Local,
    lanes::UNAUTHENTICATED,
    relay::{DropReason, FlowEnd, FlowId, Origin, Settlement},
    socket_stats::role,
};
use wire::context;

use crate::worker::{
    context::{Context, timer::Timer},
    local::DataPlane,
};

impl Context {
    /// Arms the timer that drops expired payloads of a peer, and has the peer dialled soon if payloads wait.
    pub(crate) fn watch_queue(&mut self, id: PeerId, now: Instant) {
        let Some(peer) = self.peers.get_mut(id) else { return };
        if let Some(deadline) = peer.data.relay.reassembly.deadline() {
            self.timers.arm(Timer::Queue(id), deadline);
        }
        let Some(oldest) = peer.data.relay.oldest() else { return };
        self.timers.arm(Timer::Queue(id), oldest + peer.data.relay.time_limit() + Duration::from_millis(1));
        self.dial_soon(id, now);
    }

    /// Arms the idle timer of a flow.
    pub(crate) fn watch_flow(&mut self, peer: PeerId, id: FlowId, now: Instant) {
        if let Some(flow) = self.peers.get(peer).and_then(|state| state.data.relay.flows.get(id)) {
            self.timers.arm(Timer::Flow(peer, id), now + flow.idle);
        }
    }

    /// Counts and logs an ICMP error about an earlier datagram, which counts as delivered.
    pub(crate) fn report_refusal(&mut self, local: &Local, error: &io::Error, now: Instant) {
        self.stats.totals.refusals[role(local)] += 1;
        let Local::Upstream { peer, flow } = *local else { return };
        let flow = self.peers.get(peer).and_then(|state| state.data.relay.flows.get(flow));
        if let Some(Origin::Upstream { service, .. }) = flow.map(|flow| flow.origin)
            && let Some(service) = self.config.services.get(service)
        {
            throttled!(
                warn, self.logs.refusal.allow(now),
                { service = &*service.name, upstream = %service.upstream, %error },
                "the service does not take datagrams (remedy: is it running and listening there?)"
            );
        }
    }

    /// Logs a datagram that came without a good header to a port that expects one.
    fn report_unproxied(&mut self, ingress: IngressId, from: SocketAddr, why: Unproxied, now: Instant) {
        let listen = self.config.udp.get(ingress.0 as usize);
        let listen = listen.map(|forward| tracing::field::display(forward.listen));
        throttled!(
            warn, self.logs.unproxied.allow(now), { listen, %from, %why },
            "a datagram to a port that expects a PROXY header was dropped (remedy: have the proxy send version 2, health checks too, and \
             name its addresses in udp.accept_proxy; without a proxy remove the key)"
        );
    }

    /// Logs a payload that fitted into no packet to the peer.
    pub(crate) fn report_too_large(&mut self, peer: PeerId, now: Instant) {
        let Some(state) = self.peers.get_mut(peer) else { return };
        if let Some(too_large) = state.data.too_large.take() {
            let remedy = if too_large.wanted {
                "the other end cannot put pieces together: run this version there, or send smaller datagrams"
            } else {
                "send smaller datagrams, or set oversize = \"fragment\" for the service, at the agent that offers it"
            };
            throttled!(
                warn, self.logs.too_large.allow(now),
                { peer = &**state.name(), bytes = too_large.size, largest = too_large.most },
                "a datagram is too large for the path and was dropped; the largest that fits is given (remedy: {remedy})"
            );
        }
    }
}

impl DataPlane {
    /// Ends a flow that has been idle for too long.
    pub(crate) fn flow_timeout(&mut self, cx: &mut Context, peer: PeerId, id: FlowId, now: Instant) {
        let Some(state) = cx.peers.get_mut(peer) else { return };
        let Some(flow) = state.data.relay.flows.get(id) else { return };
        let until = flow.last_active + flow.idle;
        if until > now {
            cx.timers.arm(Timer::Flow(peer, id), until);
            return;
        }
        self.close_flow(cx, peer, id, Some(FlowEnd::Idle), now);
    }

    /// The uplink to a peer: the path of datagrams from this worker.
    pub(crate) fn uplink<'a>(
        &'a mut self,
        cx: &'a mut Context,
        peer: PeerId,
        now: Instant,
    ) -> Option<Uplink<'a>> {
        let state = cx.peers.get_mut(peer)?;
        Some(state.data.uplink(&mut cx.sockets.lanes, &mut cx.sockets.underlays, &mut self.outgoing, now))
    }

    /// Handles a batch from a local socket; returns whether the socket may have more.
    pub(crate) fn service_local(&mut self, cx: &mut Context, id: LocalId, now: Instant) -> bool {
        if cx.stopping {
            // No more traffic is accepted; it stays in the kernel.
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
            state.data.uplink(&mut cx.sockets.lanes, &mut cx.sockets.underlays, &mut self.outgoing, now);
        match local {
            Local::Ingress { ingress, .. } => {
                let mut new_flows = Vec::new();
                let (config, new) = (&cx.config, &mut new_flows);
                let accept = config.udp.get(ingress.0 as usize).map(|forward| &forward.udp.accept_proxy[..]);
                let unproxied = match accept {
                    None | Some([]) => {
                        uplink.ingress(&self.batch, id, ingress, &config.limits, new);
                        None
                    }
                    Some(accept) => {
                        let port = ProxyPort { socket: id, ingress, accept };
                        uplink.proxied(&self.batch, port, &config.limits, new)
                    }
                };
                if let Some((from, why)) = unproxied {
                    cx.report_unproxied(ingress, from, why, now);
                }
                for flow in new_flows {
                    cx.watch_flow(peer, flow, now);
                }
                self.end_surplus_told(cx, peer, now);
            }
            Local::Upstream { flow, .. } => uplink.upstream(&self.batch, flow),
        }
        cx.report_too_large(peer, now);
        self.look_at_queue(cx, peer, now);
        true
    }

    /// Ends the oldest flows of a peer that PROXY headers have named, as long as they are more than half of its flows may be: the other
    /// half is for others.
    fn end_surplus_told(&mut self, cx: &mut Context, peer: PeerId, now: Instant) {
        let most = cx.config.limits.flows_per_peer / 2;
        while let Some(oldest) = cx.peers.get(peer).and_then(|it| it.data.relay.flows.surplus_told(most)) {
            self.close_flow(cx, peer, oldest, Some(FlowEnd::Proxied), now);
        }
    }

    /// Counts the outcome of payloads that were in send buffers or handed to the kernel.
    pub(crate) fn settle(
        &mut self,
        cx: &mut Context,
        of_connections: impl Iterator<Item = Settlement>,
        of_device: impl Iterator<Item = Settlement>,
    ) {
        for settled in cx.sockets.underlays.settlements.drain().chain(of_connections) {
            if let Some(peer) = cx.peers.get_mut(settled.peer) {
                peer.data.relay.settle_uplink(settled);
            } else if settled.peer == UNAUTHENTICATED {
                self.unauthenticated.settle(&settled);
            }
        }
        for settled in cx.sockets.locals.settlements.drain().chain(of_device) {
            if let Some(peer) = cx.peers.get_mut(settled.peer) {
                peer.data.relay.downlink.settle(settled);
            }
        }
    }

    /// Ends a flow for `why`, or because the agent stops, tells the far end, and closes the flow's socket to a service.
    pub(crate) fn close_flow(
        &mut self,
        cx: &mut Context,
        id: PeerId,
        flow: FlowId,
        why: Option<FlowEnd>,
        now: Instant,
    ) {
        let Some(state) = cx.peers.get_mut(id) else { return };
        let Some(flow) = state.data.end_flow(flow, why, DropReason::Shutdown, &cx.config) else { return };
        if let Some(mut uplink) = self.uplink(cx, id, now) {
            uplink.send_flow_message(flow.lane, context::Context::Closed(flow.number));
        }
        if let Origin::Upstream { socket, .. } = flow.origin {
            cx.sockets.factory.close_later(socket);
            cx.sockets.factory.close_now(&mut cx.sockets.locals);
        }
    }

    /// Drops a batch that came to a local socket of a removed peer.
    pub(crate) fn drop_batch_of_removed(&self, cx: &mut Context, id: PeerId) {
        let Some(peer) = cx.peers.get_mut(id) else { return };
        for slot in 0..self.batch.len() {
            let datagrams = self.batch.meta(slot).datagrams() as u64;
            peer.data.relay.uplink.receive(datagrams, self.batch.buffer(slot).len() as u64);
            peer.data.relay.uplink.drop(DropReason::PeerRemoved, datagrams);
        }
    }
}
