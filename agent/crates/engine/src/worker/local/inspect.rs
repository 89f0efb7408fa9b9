//! Rows of flows for an operator.

use std::{cmp::Reverse, collections::BinaryHeap, net::SocketAddr, time::Instant};

use base::ids::PeerId;
use dataplane::relay::{Flow, NO_LANE, Origin, Standing};

use crate::{
    peer::Peer,
    status::FlowStatus,
    worker::{context::Context, report::inspection_request::MOST_FLOWS},
};

impl Context {
    pub(crate) fn flows_by_lane(&self, chosen: Option<Option<PeerId>>) -> Vec<(PeerId, Vec<u64>)> {
        let wanted = |peer: &&Peer| chosen.is_none_or(|chosen| chosen == Some(peer.data.id));
        let peers = self.peers.iter().filter(wanted).filter(|peer| !peer.data.relay.flows.is_empty());
        let counted = |peer: &Peer| {
            let mut sums = Vec::new();
            peer.data.relay.flows.count_lanes(&mut sums);
            (peer.data.id, sums)
        };
        peers.map(counted).collect()
    }

    /// The flows of a peer with the latest datagrams.
    pub(crate) fn flow_rows(&self, peer: PeerId, now: Instant) -> Vec<FlowStatus> {
        let Some(state) = self.peers.get(peer) else { return Vec::new() };
        // The top of the heap is the oldest of the flows found so far.
        let mut latest = BinaryHeap::with_capacity(MOST_FLOWS + 1);
        for (id, _, flow) in state.data.relay.flows.iter() {
            latest.push(Reverse((flow.last_active, id)));
            if latest.len() > MOST_FLOWS {
                latest.pop();
            }
        }
        let latest = latest.into_sorted_vec();
        let flows = &state.data.relay.flows;
        let rows = latest.iter().filter_map(|Reverse((_, id))| {
            let told = flows.told.client(*id).map(|told| told.source());
            Some(self.flow_row(flows.get(*id)?, told, now))
        });
        rows.collect()
    }

    /// The row of a flow, whose client a PROXY header may have `told`.
    fn flow_row(&self, flow: &Flow, told: Option<SocketAddr>, now: Instant) -> FlowStatus {
        let (opened_by, local_address, service) = match flow.origin {
            Origin::Ingress { client, ingress } => {
                let forward = self.config.udp.get(ingress.0 as usize);
                ("here", told.or(Some(client.address)), forward.map(|forward| &forward.service))
            }
            Origin::Upstream { service, .. } => {
                let service = self.config.services.get(service);
                let upstream =
                    service.and_then(|service| self.sockets.factory.upstreams.udp(&service.upstream));
                ("peer", upstream, service.map(|service| &service.name))
            }
        };
        let [lane, on_lane] = [flow.lane, flow.on].map(|lane| (lane != NO_LANE).then_some(lane));
        FlowStatus {
            number: flow.number.0,
            service: service.cloned().unwrap_or_default(),
            opened_by: opened_by.into(),
            local_address,
            standing: match flow.standing {
                Standing::Opening => "opening",
                Standing::Confirmed => "confirmed",
                Standing::Refused => "refused",
            }
            .into(),
            lane,
            on_lane,
            worker: self.id.index,
            silent_seconds: now.saturating_duration_since(flow.last_active).as_secs_f64(),
            idle_seconds: flow.idle.as_secs_f64(),
        }
    }
}
