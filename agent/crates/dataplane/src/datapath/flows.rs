//! Frames that are about flows: openings, confirmations, refusals, ends. Datagrams of known flows are `downlink.rs`'s.

use std::time::Duration;

use base::ids::{LaneRef, PeerId};
use config::ProxyProtocol;
use wire::{
    context::{Context, FlowNumber, Refusal, ServiceNumber},
    proxy::ClientAddresses,
};

use crate::{
    datapath::{
        downlink::{Downlink, Outside},
        work,
    },
    peer::PeerTable,
    relay::{DropReason, FlowEnd, FlowId, Held, Origin, Standing},
};

/// The cost of a flow that the peer opened and ends while it is in use, in openings: a peer that opens and closes as fast as it can gets a
/// quarter of its rate. Flows that end because they are idle cost nothing.
const ENDED_IN_USE: u32 = 3;

/// A flow that had a datagram in this time is in use, or in half of the time after which it would be idle.
const IN_USE: Duration = Duration::from_secs(1);

impl<P: PeerTable, O: Outside> Downlink<'_, P, O> {
    /// The flow of an opening; it is accepted if this is its first.
    pub(super) fn opened(
        &mut self,
        lane: LaneRef,
        number: FlowNumber,
        service: ServiceNumber,
        client: Option<ClientAddresses>,
    ) -> Result<FlowId, DropReason> {
        let peer = lane.peer;
        let state = self.peers.data_mut(peer).ok_or(DropReason::UnknownFlow)?;
        if state.relay.flows.is_ours(number) {
            // The peer opens flows in the other half of the numbers only.
            return Err(DropReason::Malformed);
        }
        if state.relay.held == Held::Stopped {
            self.send_flow_message(lane, Context::Refused(number, Refusal::Limit));
            return Err(DropReason::Quota);
        }
        let result = match state.relay.flows.of_number(number) {
            Some(flow) => Ok(flow),
            None => {
                let accepted = self.accept(lane, number, service, client);
                if accepted.is_err()
                    && let Some(state) = self.peers.data(peer)
                {
                    state.relay.flows.registry.unclaim(number);
                }
                accepted
            }
        };
        match result {
            Ok(flow) => {
                let confirmation = (lane, number);
                if self.notes.confirm.last() != Some(&confirmation) {
                    self.notes.confirm.push(confirmation);
                }
                Ok(flow)
            }
            Err(Unopened::Refused(refusal, reason)) => {
                self.send_flow_message(lane, Context::Refused(number, refusal));
                Err(reason)
            }
            Err(Unopened::TooFast) => Err(DropReason::FlowRate),
        }
    }

    /// Accepts a flow: a socket of its own to the service.
    fn accept(
        &mut self,
        LaneRef { peer, lane }: LaneRef,
        number: FlowNumber,
        service: ServiceNumber,
        client: Option<ClientAddresses>,
    ) -> Result<FlowId, Unopened> {
        let unknown = Unopened::Refused(Refusal::Limit, DropReason::UnknownFlow);
        let state = self.peers.data_mut(peer).ok_or(unknown)?;
        if self.notes.work.is_spent() || !state.allowances.flows.take(1, self.now) {
            state.relay.stats.openings_refused += 1;
            return Err(Unopened::TooFast);
        }
        self.notes.work.charge(work::OPENING);
        let index = service.0 as usize;
        let unknown = Unopened::Refused(Refusal::UnknownService, DropReason::UnknownService);
        let offered = self.config.services.get(index).filter(|service| service.udp).ok_or(unknown)?;
        if !state.config.services.contains(&index) {
            return Err(Unopened::Refused(Refusal::NotAllowed, DropReason::NotAllowed));
        }
        if state.relay.is_full(self.config.limits.flows) {
            return Err(Unopened::Refused(Refusal::Limit, DropReason::FlowLimit));
        }
        if state.relay.flows.registry.is_out_of_sockets() {
            state.relay.stats.sockets_refused += 1;
            state.relay.socket_error = Some(net::process::out_of_descriptors());
            return Err(Unopened::Refused(Refusal::Limit, DropReason::FlowLimit));
        }
        let socket = self.factory.open_upstream(self.locals, peer, &offered.upstream).map_err(|error| {
            state.relay.stats.sockets_refused += 1;
            state.relay.socket_error = Some(error);
            Unopened::Refused(Refusal::Upstream, DropReason::SocketOpen)
        })?;
        let id = state.relay.flows.accept(number, socket, index, lane, offered.idle, self.now);
        self.locals.set_flow(socket, id);
        if offered.proxy_protocol != ProxyProtocol::Off {
            state.relay.flows.told.announce(id, client);
        }
        state.relay.stats.flows_accepted += 1;
        self.notes.new_flows.push((peer, id));
        Ok(id)
    }

    /// Takes a message about the flow `id`.
    pub(super) fn message(&mut self, peer: PeerId, id: FlowId, message: Context) {
        let Some(state) = self.peers.data_mut(peer) else { return };
        let relay = &mut state.relay;
        match message {
            Context::Confirmed(number) => {
                if relay.flows.is_ours(number)
                    && let Some(flow) = relay.flows.get_mut(id)
                {
                    flow.standing = Standing::Confirmed;
                    if let Some(mut uplink) = self.uplink(peer) {
                        uplink.confirmed(id);
                    }
                }
            }
            Context::Unknown(number) => {
                if !relay.flows.is_ours(number) {
                    // The opener has forgotten it: answers have nowhere to go.
                    self.end_flow(peer, id);
                } else if let Some(flow) = relay.flows.get_mut(id)
                    && flow.standing == Standing::Confirmed
                {
                    flow.standing = Standing::Opening;
                }
            }
            Context::Refused(number, refusal) => {
                if relay.flows.is_ours(number) {
                    for run in relay.awaiting.take_flow(id) {
                        relay.uplink.drop(DropReason::FlowRefused, run.count() as u64);
                    }
                    if refusal.is_temporary() {
                        self.end_flow(peer, id);
                    } else {
                        relay.flows.refuse(id);
                    }
                }
            }
            Context::Closed(_) => self.end_flow(peer, id),
            Context::Flow { .. }
            | Context::Piece { .. }
            | Context::Open { .. }
            | Context::OpenEmpty { .. }
            | Context::Packet { .. }
            | Context::Report { .. }
            | Context::Numbered { .. }
            | Context::Repair { .. }
            | Context::Ask { .. }
            | Context::Copied { .. }
            | Context::Unsupported(_) => {}
        }
    }

    fn end_flow(&mut self, peer: PeerId, id: FlowId) {
        let Some(state) = self.peers.data_mut(peer) else { return };
        if let Some(flow) = state.end_flow(id, Some(FlowEnd::Closed), DropReason::Shutdown, self.config) {
            self.notes.work.charge(work::CLOSING);
            let in_use = self.now.saturating_duration_since(flow.last_active) < IN_USE.min(flow.idle / 2);
            if in_use && matches!(flow.origin, Origin::Upstream { .. }) {
                state.allowances.flows.spend(ENDED_IN_USE, self.now);
            }
            self.factory.close_flow_later(flow.origin);
        }
    }
}

/// Why an opening leads to no flow.
#[derive(Clone, Copy, Debug)]
enum Unopened {
    /// The opening is refused, and the peer is told so.
    Refused(Refusal, DropReason),
    /// The peer opens flows faster than it may: it hears nothing, and its next datagram asks again.
    TooFast,
}
