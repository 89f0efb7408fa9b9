//! The end of a UDP flow: it is counted, and recorded if that is wanted.

use std::{net::SocketAddr, sync::Arc};

use config::Config;

use crate::{
    peer::PeerData,
    records::{Ended, RecordKind, Tally},
    relay::{DropReason, Flow, FlowEnd, FlowId, Origin},
};

impl PeerData {
    /// Ends a flow for `why`, or because the agent stops; datagrams of it that still wait are dropped for `reason`.
    pub fn end_flow(
        &mut self,
        id: FlowId,
        why: Option<FlowEnd>,
        reason: DropReason,
        config: &Config,
    ) -> Option<Flow> {
        let flow = self.relay.remove_flow(id, reason)?;
        if let Some(why) = why {
            self.relay.stats.flows_ended[why] += 1;
        }
        if let Some(tally) = &flow.tally {
            self.record(&flow, tally, why, config);
        }
        Some(flow)
    }

    fn record(&self, flow: &Flow, tally: &Tally, why: Option<FlowEnd>, config: &Config) {
        let Some(recorder) = self.relay.flows.registry.agent.recorder.get() else { return };
        let (service, source, destination) = match flow.origin {
            Origin::Ingress { client, ingress } => {
                let forward = config.udp.get(ingress.0 as usize);
                let asked = forward.map(|forward| {
                    let ip = client.local.unwrap_or_else(|| forward.listen.ip());
                    SocketAddr::new(ip, forward.listen.port())
                });
                (forward.map(|forward| &forward.service), Some(client.address), asked)
            }
            Origin::Upstream { service, .. } => {
                let service = config.services.get(service);
                let address = service.and_then(|service| service.upstream.address());
                (service.map(|service| &service.name), None, address)
            }
        };
        recorder.note(Ended {
            kind: RecordKind::Udp,
            protocol: 17,
            peer: Arc::clone(&self.config.name),
            service: service.map(Arc::clone).unwrap_or_default(),
            opened_here: source.is_some(),
            source,
            destination,
            span: recorder.span(tally.since),
            uplink: tally.uplink,
            downlink: tally.downlink,
            reason: why.map_or("shutdown", FlowEnd::label),
        });
    }
}
