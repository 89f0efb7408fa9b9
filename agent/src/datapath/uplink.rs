//! From local sockets to the peer, in packet order: [`Uplink::ingress`] or [`Uplink::upstream`], then
//! [`Uplink::carry`], then [`Uplink::seal`].

use std::time::Instant;

use crate::{
    config::Limits,
    forward::{IngressId, LocalId},
    io::ReceiveBatch,
    lanes::{Frame, LaneId, Lanes, Pool, PushError, Underlays},
    relay::{Client, Context, DatagramRelay, DropReason, FlowId, Origin, Run, ServiceNumber, Standing},
};

/// What the uplink of one peer needs.
pub struct Uplink<'a> {
    /// The peer's relay.
    pub relay: &'a mut DatagramRelay,
    /// The peer's lanes; `None` while it is not connected.
    pub pool: Option<&'a Pool>,
    /// All lanes of the worker.
    pub lanes: &'a mut Lanes,
    /// Their sockets.
    pub underlays: &'a mut Underlays,
    /// Time of this turn.
    pub now: Instant,
    /// Notes the largest payload that fits when one did not.
    pub too_large: &'a mut Option<TooLarge>,
}

/// A payload that fits into no packet to this peer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TooLarge {
    /// Its size in bytes.
    pub size: usize,
    /// The largest size that fits, in bytes.
    pub most: usize,
}

/// Flows that came to be in a pass over a batch: the worker watches over their idle time.
pub type NewFlows = Vec<FlowId>;

impl Uplink<'_> {
    /// Datagrams of clients came to a local port.
    pub fn ingress(
        &mut self,
        batch: &ReceiveBatch,
        (socket, ingress): (LocalId, IngressId),
        limits: &Limits,
        flows_in_total: usize,
        new_flows: &mut NewFlows,
    ) {
        for slot in 0..batch.len() {
            let (meta, data) = (batch.meta(slot), batch.buffer(slot));
            let client = Client { socket, address: meta.source, local: meta.local };
            let known = self.relay.flows.of_client(&client);
            let flow = match known {
                Some(flow) => flow,
                None => {
                    let full = self.relay.flows.len() >= self.relay.max_flows
                        || flows_in_total + new_flows.len() >= limits.flows;
                    match self.open(client, ingress, full) {
                        Ok(flow) => {
                            new_flows.push(flow);
                            flow
                        }
                        Err(reason) => {
                            let datagrams = meta.datagrams() as u64;
                            self.relay.uplink.receive(datagrams, data.len() as u64);
                            self.relay.uplink.drop(reason, datagrams);
                            continue;
                        }
                    }
                }
            };
            self.carry(flow, data, meta.segment);
        }
    }

    /// A service's answers came to the socket of one flow.
    pub fn upstream(&mut self, batch: &ReceiveBatch, flow: FlowId) {
        for slot in 0..batch.len() {
            let (meta, data) = (batch.meta(slot), batch.buffer(slot));
            self.carry(flow, data, meta.segment);
        }
    }

    /// Sends a run of one flow's datagrams, each `segment` bytes long and the last at most, or queues it.
    fn carry(&mut self, id: FlowId, data: &[u8], segment: usize) {
        let datagrams = count(data, segment);
        self.relay.uplink.receive(datagrams as u64, data.len() as u64);
        let now = self.now;
        let Some(flow) = self.relay.flows.get_mut(id) else {
            self.relay.uplink.drop(DropReason::UnknownFlow, datagrams as u64);
            return;
        };
        flow.last_active = now;
        if flow.standing == Standing::Refused {
            self.relay.uplink.drop(DropReason::FlowRefused, datagrams as u64);
            return;
        }
        // What waits goes first: nothing overtakes within a flow.
        let sent = if self.relay.awaiting.holds(id) {
            self.relay.awaiting.push(id, data, segment, now, &mut self.relay.uplink);
            datagrams
        } else if self.relay.queue.is_empty() {
            self.seal(id, data, segment, datagrams)
        } else {
            0
        };
        if sent < datagrams {
            let rest = data.get(sent * segment..).unwrap_or_default();
            self.relay.queue.push(id, rest, segment, now, &mut self.relay.uplink);
        }
    }

    /// Sends what waits, as far as there are lanes and room.
    pub fn drain(&mut self) {
        self.relay.expire(self.now);
        while let Some(run) = self.relay.queue.pop() {
            let sent = self.seal_run(&run);
            if sent < run.count() {
                self.relay.queue.put_back(run, sent);
                return;
            }
        }
    }

    /// A flow was confirmed: what waited for that follows now.
    pub fn confirmed(&mut self, id: FlowId) {
        self.relay.awaiting.expire(self.now, &mut self.relay.uplink);
        for run in self.relay.awaiting.take_flow(id) {
            let sent = if self.relay.queue.is_empty() { self.seal_run(&run) } else { 0 };
            self.relay.queue.put_back_last(run, sent);
        }
    }

    /// Sends a message about a flow, on lane `index` if it is up.
    pub fn say(&mut self, index: u8, message: Context) {
        let Some(lane) = self.pool.and_then(|pool| pool.pick(self.lanes, index)) else { return };
        let header = message.encode();
        let frame = Frame { header: header.as_slice(), payload: &[], counted: false };
        if self.underlays.push(self.lanes, lane, frame, self.now).is_ok() {
            self.relay.stats.count_sent(&message);
        }
    }

    fn seal_run(&mut self, run: &Run) -> usize {
        // Flows are taken out of the queue when they end, so a run's flow exists; if not, it is counted.
        self.seal(run.flow, run.data(), run.segment, run.count())
    }

    /// Puts datagrams of one flow into packets; returns how many were dealt with: sent, dropped for a reason, or put
    /// among those that await a confirmation. The rest finds no lane or no room.
    fn seal(&mut self, id: FlowId, data: &[u8], segment: usize, datagrams: usize) -> usize {
        let Some((lane, service)) = self.way(id) else { return 0 };
        let service = match service {
            Ok(service) => service,
            Err(reason) => {
                self.relay.uplink.drop(reason, datagrams as u64);
                return datagrams;
            }
        };
        let Some(flow) = self.relay.flows.get(id) else { return datagrams };
        let (standing, header) = (flow.standing, flow.header(service));
        for place in 0..datagrams {
            let start = (place * segment).min(data.len());
            let payload = &data[start..(start + segment).min(data.len())];
            let frame = Frame { header: header.as_slice(), payload, counted: true };
            match self.underlays.push(self.lanes, lane, frame, self.now) {
                Ok(()) => {
                    self.relay.in_outbox += 1;
                    self.relay.stats.uplink_bytes += payload.len() as u64;
                }
                Err(PushError::TooLarge { most }) => {
                    let short =
                        self.relay.flows.get(id).map_or(0, |flow| flow.confirmed_header().as_slice().len());
                    let most_confirmed = most + header.as_slice().len() - short;
                    if standing == Standing::Opening && payload.len() <= most_confirmed {
                        self.await_confirmation(id, service, data, segment, place);
                        return datagrams;
                    }
                    self.relay.uplink.drop(DropReason::TooLarge, 1);
                    *self.too_large = Some(TooLarge { size: payload.len(), most: most_confirmed });
                }
                Err(PushError::Blocked | PushError::NotUp) => return place,
            }
        }
        datagrams
    }

    /// The lane that a flow's datagrams take now, and the number of its service; `None` if no lane is up.
    fn way(&mut self, id: FlowId) -> Option<(LaneId, Result<ServiceNumber, DropReason>)> {
        let relay = &mut *self.relay;
        let flow = relay.flows.get(id)?;
        let (wanted, on, origin) = (flow.lane, flow.on, flow.origin);
        let lane = self.pool?.pick(self.lanes, wanted)?;
        let index = self.lanes.get(lane)?.index;
        if index != on {
            relay.stats.flows_moved += 1;
            if let Some(flow) = relay.flows.get_mut(id) {
                flow.on = index;
            }
        }
        let service = match origin {
            Origin::Ingress { ingress, .. } => {
                relay.service(ingress).map(|service| service.number).ok_or(DropReason::UnknownService)
            }
            // An accepted flow is never in the opening form.
            Origin::Upstream { .. } => Ok(ServiceNumber(0)),
        };
        Some((lane, service))
    }

    /// The datagram at `place` fits only without the opening form: it and what follows wait for the confirmation.
    fn await_confirmation(
        &mut self,
        id: FlowId,
        service: ServiceNumber,
        data: &[u8],
        segment: usize,
        place: usize,
    ) {
        let now = self.now;
        let rest = data.get(place * segment..).unwrap_or_default();
        self.relay.awaiting.push(id, rest, segment, now, &mut self.relay.uplink);
        let Some(flow) = self.relay.flows.get_mut(id) else { return };
        let (number, lane) = (flow.number, flow.lane);
        self.say(lane, Context::OpenEmpty { number, service });
    }

    /// Opens a flow for a client.
    fn open(&mut self, client: Client, ingress: IngressId, full: bool) -> Result<FlowId, DropReason> {
        if full {
            return Err(DropReason::FlowLimit);
        }
        let idle = match (self.relay.service(ingress), self.pool) {
            (Some(service), _) => service.idle,
            (None, Some(_)) => return Err(DropReason::UnknownService),
            // Not connected yet: the peer has not said for how long its flows live.
            (None, None) => DEFAULT_IDLE,
        };
        let lanes = self.pool.map_or(1, Pool::breadth);
        self.relay.stats.flows_opened += 1;
        Ok(self.relay.flows.open((client, ingress), lanes, idle, self.now))
    }
}

/// How long a flow opened before the first connection may be silent.
const DEFAULT_IDLE: std::time::Duration = std::time::Duration::from_secs(60);

/// How many datagrams of `segment` bytes a buffer holds; an empty buffer is one empty datagram.
fn count(data: &[u8], segment: usize) -> usize {
    if data.is_empty() { 1 } else { data.len().div_ceil(segment.max(1)) }
}
