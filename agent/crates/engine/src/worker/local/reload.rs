//! The ports of `[[udp]]`, and the flows that a reload ends.

use std::{sync::Arc, time::Instant};

use base::ids::{IngressId, PeerId};
use config::{Config, Forward, UdpKeys};
use dataplane::{
    forward::Local,
    relay::{FlowEnd, FlowId, Origin},
};

use crate::worker::{
    context::{Context, Sockets, timer::index_u32},
    local::DataPlane,
};

impl Context {
    /// Has the forwards whose peer is called `name` lead to `id`.
    pub(crate) fn point_forwards(&mut self, name: &str, id: PeerId) {
        self.peers.entries_lead_to(&self.config.peers, name, id);
        self.point_ingresses();
    }

    /// Points the local UDP ports to the peers that their forwards name.
    fn point_ingresses(&mut self) {
        for local in self.sockets.locals.iter_mut() {
            if let Local::Ingress { ingress, peer } = local
                && let Some(forward) = self.config.udp.get(ingress.0 as usize)
            {
                *peer = self.peers.of_forward(forward);
            }
        }
    }
}

impl DataPlane {
    /// Opens and closes the ports of `[[udp]]`. A port that now leads to another peer or service keeps its socket.
    pub(crate) fn follow_udp(&mut self, cx: &mut Context, old: &Config, now: Instant) {
        let new = Arc::clone(&cx.config);
        for (index, forward) in new.udp.iter().enumerate() {
            let ingress = IngressId(index_u32(index));
            // Every key is named, so that the compiler asks what a reload does with a new one.
            let Forward { listen, peer, service, open, tcp: _, udp: UdpKeys { accept_proxy } } = forward;
            let before = old.udp.get(index).filter(|before| before.open);
            let led_to = before.and_then(|before| old.peers.get(before.peer)).map(|peer| &peer.name);
            let leads_to = new.peers.get(*peer).map(|peer| &peer.name);
            let same = |before: &Forward| {
                let expects = [&before.udp.accept_proxy, accept_proxy].map(|prefixes| !prefixes.is_empty());
                before.service == *service && expects[0] == expects[1]
            };
            let same = *open && before.is_some_and(same) && led_to == leads_to;
            if before.is_some() && !same {
                let ends =
                    |origin: &Origin| matches!(origin, Origin::Ingress { ingress: of, .. } if *of == ingress);
                for id in cx.peers.ids() {
                    self.end_flows_where(cx, id, now, ends);
                }
            }
            let Sockets { factory, locals, .. } = &mut cx.sockets;
            match (before, *open) {
                (None, true) => {
                    let local = Local::Ingress { ingress, peer: cx.peers.of_forward(forward) };
                    // The kernel's port itself is bound already.
                    if let Err(error) = factory.ingress(locals, *listen, local) {
                        tracing::error!(%listen, %error, "a UDP port of the new configuration cannot be used (remedy: restart the daemon, once the cause is gone)");
                    }
                }
                (Some(_), false) => {
                    let is_it =
                        |local: &Local| matches!(local, Local::Ingress { ingress: of, .. } if *of == ingress);
                    for id in locals.find(is_it) {
                        factory.close_later(id);
                    }
                    factory.close_now(locals);
                }
                (Some(_), true) | (None, false) => {}
            }
        }
        cx.point_ingresses();
    }

    /// Ends flows to addresses that their services have no longer: their next datagram opens one to the new address.
    pub(crate) fn follow_names(&mut self, cx: &mut Context, now: Instant) {
        let moved = cx.moved_services();
        if moved.is_empty() {
            return;
        }
        for id in cx.peers.ids() {
            self.end_flows_where(
                cx,
                id,
                now,
                |origin| matches!(origin, Origin::Upstream { service, .. } if moved.contains(service)),
            );
        }
    }

    /// Ends the flows of a peer for whose local side `ends` is true, and tells the far end.
    pub(crate) fn end_flows_where(
        &mut self,
        cx: &mut Context,
        id: PeerId,
        now: Instant,
        ends: impl Fn(&Origin) -> bool,
    ) {
        self.end_flows_for(cx, id, FlowEnd::Reconfigured, now, ends);
    }

    /// The same for another reason.
    pub(crate) fn end_flows_for(
        &mut self,
        cx: &mut Context,
        id: PeerId,
        why: FlowEnd,
        now: Instant,
        ends: impl Fn(&Origin) -> bool,
    ) {
        let Some(peer) = cx.peers.get(id) else { return };
        let ending = peer.data.relay.flows.iter().filter(|(_, _, flow)| ends(&flow.origin));
        let ending: Vec<FlowId> = ending.map(|(id, ..)| id).collect();
        for flow in ending {
            self.close_flow(cx, id, flow, Some(why), now);
        }
    }
}
