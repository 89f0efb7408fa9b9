//! The end of a UDP flow: it is counted, and recorded if that is wanted.

use std::{net::SocketAddr, sync::Arc};

use config::Config;
use wire::proxy::ClientAddresses;

use crate::{
    peer::PeerData,
    records::{Ended, RecordKind, Subject, Tally},
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
        let told = self.relay.flows.told.client(id);
        let flow = self.relay.remove_flow(id, reason)?;
        if let Some(why) = why {
            self.relay.stats.flows_ended[why] += 1;
        }
        if let Some(tally) = &flow.tally {
            self.record(&flow, told, tally, why, config);
        }
        Some(flow)
    }

    /// Has flows that are recorded remember what they are to, before `config` is replaced by another configuration.
    pub fn keep_subjects(&mut self, config: &Config) {
        if self.relay.flows.registry.agent.recorder.get().is_none() {
            return;
        }
        for id in self.relay.flows.all() {
            if let Some(flow) = self.relay.flows.get_mut(id)
                && let Some(tally) = &mut flow.tally
                && tally.subject.is_none()
            {
                tally.subject = Some(subject(&flow.origin, config));
            }
        }
    }

    fn record(
        &self,
        flow: &Flow,
        told: Option<ClientAddresses>,
        tally: &Tally,
        why: Option<FlowEnd>,
        config: &Config,
    ) {
        let Some(recorder) = self.relay.flows.registry.agent.recorder.get() else { return };
        let Subject { service, destination } =
            tally.subject.clone().unwrap_or_else(|| subject(&flow.origin, config));
        let source = match flow.origin {
            Origin::Ingress { client, .. } => Some(told.map_or(client.address, |told| told.source())),
            Origin::Upstream { .. } => None,
        };
        recorder.note(Ended {
            kind: RecordKind::Udp,
            protocol: 17,
            peer: Arc::clone(&self.config.name),
            service,
            opened_here: source.is_some(),
            source,
            destination,
            span: recorder.span_until(tally.since, flow.last_active),
            uplink: tally.uplink,
            downlink: tally.downlink,
            reason: why.map_or("shutdown", FlowEnd::label),
        });
    }
}

/// What a flow of `origin` is to, by the configuration that it was opened with.
fn subject(origin: &Origin, config: &Config) -> Subject {
    match origin {
        Origin::Ingress { client, ingress } => {
            let Some(forward) = config.udp.get(ingress.0 as usize) else { return Subject::default() };
            let ip = client.local.unwrap_or_else(|| forward.listen.ip());
            let destination = Some(SocketAddr::new(ip, forward.listen.port()));
            Subject { service: Arc::clone(&forward.service), destination }
        }
        Origin::Upstream { service, .. } => {
            let Some(service) = config.services.get(*service) else { return Subject::default() };
            Subject { service: Arc::clone(&service.name), destination: service.upstream.address() }
        }
    }
}
