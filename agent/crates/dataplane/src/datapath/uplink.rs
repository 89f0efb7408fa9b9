//! From local sockets to the peer, in packet order: [`Uplink::ingress`] or [`Uplink::upstream`], then
//! [`Uplink::carry`], then [`Uplink::seal`].

use std::time::{Duration, Instant};

use base::ids::{IngressId, LaneRef, LocalId, PeerId};
use config::Limits;
use net::{ReceiveBatch, batch::Meta};
use rate::Release;
use repair::RepairClass;
use wire::context::{Context, MOST_DATAGRAM, REPAIR_OVERHEAD, ServiceNumber};

use crate::{
    datapath::segments::{CountedHeader, Cutting, Marks, Segments},
    hand_off::Outgoing,
    lanes::{Frame, LaneId, Lanes, Payloads, Place, PushError, Room, Underlays},
    peer::{Link, PeerData, TooLarge},
    relay::{
        Belongs, Client, DatagramRelay, DropReason, FlowId, NO_LANE, Origin, PartlySent, Run, Standing,
        flow::confirmed_header, fragments::LEAST_PIECE,
    },
};

/// The parts of a worker that the uplink of one peer uses.
pub struct Uplink<'a> {
    pub peer: PeerId,
    pub relay: &'a mut DatagramRelay,
    /// The way to the peer; `None` while it is not connected.
    pub link: Option<&'a mut Link>,
    pub lanes: &'a mut Lanes,
    pub underlays: &'a mut Underlays,
    /// The hand-off batches for other workers: a flow's own lane is down, or this worker hosts none.
    pub outgoing: &'a mut Outgoing,
    /// The traffic class of packets with payloads that have none of their own.
    pub tos: u8,
    pub now: Instant,
    /// The time at which the datagrams that are being sent came to this host.
    pub arrived: Instant,
    /// How the datagrams that are being sent are repaired; `None`: they are not.
    pub repair: Option<RepairClass>,
    /// Notes the largest payload that fits when one did not.
    pub too_large: &'a mut Option<TooLarge>,
}

/// The state of the queue after a call of [`Uplink::drain`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Drained {
    /// Nothing waits any more.
    Empty,
    /// More waits, and there may be room for it.
    More,
    /// After this number of datagrams there was no lane, or no room.
    Blocked(usize),
    /// The rate lets nothing more go before this time.
    Paced(Instant),
}

/// What carries a frame to the peer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Way {
    Lane(LaneId),
    /// The control connection carries the payload: standard mode.
    Plain,
    /// Another worker, which hosts the lane with index `lane`; in standard mode, the session owner and index 0.
    Worker {
        worker: u8,
        lane: u8,
    },
}

/// The bytes of a frame beside its payload, about: its type and length, and the context.
const FRAME_OVERHEAD: usize = 6;

/// The bytes of a packet beside its frames: header and tag.
const PACKET_OVERHEAD: usize = quic_core::HEADER_LEN + quic_core::TAG_LEN;

/// The IPv4 and UDP headers around a packet, in bytes.
const OUTER_HEADERS: usize = 28;

/// An unanswered opening without a datagram is repeated after this long: the lane's payloads are not retransmitted.
const ASK_INTERVAL: Duration = Duration::from_millis(50);

/// A flow that was silent for this long overtakes nothing when it goes back to its own lane: the datagrams that it sent before
/// have long been handed over.
const PAUSE: Duration = Duration::from_millis(10);

impl Uplink<'_> {
    /// Takes datagrams of clients, which came to a local port. Flows that they open are added to `new_flows`.
    pub fn ingress(
        &mut self,
        batch: &ReceiveBatch,
        socket: LocalId,
        ingress: IngressId,
        limits: &Limits,
        new_flows: &mut Vec<FlowId>,
    ) {
        for slot in 0..batch.len() {
            let (meta, data) = (batch.meta(slot), batch.buffer(slot));
            let client = Client { socket, address: meta.source, local: meta.local };
            let flow = match self.relay.flows.of_client(&client) {
                Some(flow) => Ok(flow),
                None => self.open(client, ingress, limits).inspect(|flow| new_flows.push(*flow)),
            };
            match flow {
                Ok(flow) => self.carry(flow, data, meta),
                Err(reason) => {
                    let datagrams = meta.datagrams() as u64;
                    self.relay.uplink.receive(datagrams, data.len() as u64);
                    self.relay.uplink.drop(reason, datagrams);
                }
            }
        }
    }

    /// Takes a service's answers, which came to the socket of one flow.
    pub fn upstream(&mut self, batch: &ReceiveBatch, flow: FlowId) {
        for slot in 0..batch.len() {
            let (meta, data) = (batch.meta(slot), batch.buffer(slot));
            self.carry(flow, data, meta);
        }
    }

    /// Sends a run of one flow's datagrams, or queues it, or drops it if it has waited in the kernel for too long.
    fn carry(&mut self, id: FlowId, data: &[u8], meta: &Meta) {
        let (segment, datagrams) = (meta.segment, meta.datagrams());
        self.relay.uplink.receive(datagrams as u64, data.len() as u64);
        let now = self.now;
        let Some(flow) = self.relay.flows.get_mut(id) else {
            self.relay.uplink.drop(DropReason::UnknownFlow, datagrams as u64);
            return;
        };
        flow.paused |= now.saturating_duration_since(flow.last_active) >= PAUSE;
        flow.last_active = now;
        if meta.age > self.relay.queue.time_limit() {
            self.relay.uplink.drop(DropReason::Expired, datagrams as u64);
            return;
        }
        let arrived = now.checked_sub(meta.age).unwrap_or(now);
        self.arrived = arrived;
        let (sent, partly_sent) = if self.relay.sends_at_once() {
            self.seal(id, data, segment, datagrams, None)
        } else {
            (0, None)
        };
        if sent < datagrams {
            let rest = data.get(sent * segment..).unwrap_or_default();
            let queue = &mut self.relay.queue;
            let taken = queue.push(Belongs::Flow(id), rest, segment, arrived, now, &mut self.relay.uplink);
            if partly_sent.is_some()
                && taken > 0
                && let Some(run) = queue.newest_of(id)
            {
                run.partly_sent = partly_sent;
            }
        }
    }

    /// Sends waiting datagrams while there are lanes and room, and the rate lets them go, up to about `most` of them.
    pub fn drain(&mut self, most: usize) -> Drained {
        self.relay.queue.set_rate(self.relay.share.account.rate());
        self.relay.expire(self.now);
        let drained = self.drain_in_turn(most);
        self.relay.share.set_waiting(self.relay.queue.backlogged());
        drained
    }

    fn drain_in_turn(&mut self, most: usize) -> Drained {
        let (mut done, mut credit, mut sparse_is_over) = (0, 0, false);
        while done < most && !self.relay.queue.is_empty() {
            let mut sparse = false;
            if credit == 0 {
                match self.relay.share.release(self.now) {
                    Release::Bytes(bytes) => credit = bytes,
                    Release::At(at) if sparse_is_over || !self.relay.share.account.may_overdraw(self.now) => {
                        return Drained::Paced(at);
                    }
                    Release::At(_) => sparse = true,
                }
            }
            let Some((mut run, portion)) = self.relay.queue.take(sparse, self.now, &mut self.relay.uplink)
            else {
                if !sparse {
                    break;
                }
                // Those that wait have had their share.
                sparse_is_over = true;
                continue;
            };
            self.arrived = run.arrived;
            let (sent, partly_sent) = self.seal_run(&run, portion);
            run.partly_sent = partly_sent;
            let cost = self.outer_bytes(&run, sent);
            self.relay.share.spend(cost);
            credit = credit.saturating_sub(cost);
            self.relay.queue.put_back(run, sent);
            if sent < portion {
                return Drained::Blocked(done + sent);
            }
            done += sent;
        }
        if self.relay.queue.is_empty() { Drained::Empty } else { Drained::More }
    }

    /// Sends the first `portion` datagrams of a run that waited; returns how many were dealt with.
    fn seal_run(&mut self, run: &Run, portion: usize) -> (usize, Option<PartlySent>) {
        let data = run.data();
        let data = data.get(..data.len().min(portion * run.segment)).unwrap_or(data);
        match run.belongs {
            Belongs::Flow(flow) => {
                // It counts the datagrams that are left, here of the portion, there of the run.
                let rest = run.count() - portion;
                let begun = run
                    .partly_sent
                    .map(|partly| PartlySent { left: partly.left.wrapping_sub(rest), ..partly });
                let (sent, partly_sent) = self.seal(flow, data, run.segment, portion, begun);
                (sent, partly_sent.map(|partly| PartlySent { left: partly.left + rest, ..partly }))
            }
            Belongs::Packets(class) => (self.waiting_packets(class, data, run.segment), None),
        }
    }

    /// The bytes of IP packets that carry the first `portion` datagrams of a run, about: small ones share a packet.
    fn outer_bytes(&self, run: &Run, portion: usize) -> u64 {
        if !self.relay.share.is_limited() {
            return 0;
        }
        let budget = self.link.as_deref().map_or(0, |link| link.budget);
        let frame = run.segment.min(run.data().len()) + FRAME_OVERHEAD;
        let room = budget.saturating_sub(PACKET_OVERHEAD);
        let payload = run.data().len().min(portion * run.segment) + portion * FRAME_OVERHEAD;
        // What fits into no packet travels in pieces, which fill packets.
        let packets = match room / frame {
            0 => payload.div_ceil(room.max(LEAST_PIECE)),
            per_packet => portion.div_ceil(per_packet),
        };
        (payload + packets * (PACKET_OVERHEAD + OUTER_HEADERS)) as u64
    }

    /// A flow was confirmed: sends the datagrams that waited for that.
    pub fn confirmed(&mut self, id: FlowId) {
        self.relay.awaiting.expire(self.now, &mut self.relay.uplink);
        let mut runs = self.relay.awaiting.take_flow(id);
        if !runs.is_empty() {
            // Datagrams of the flow that came to the queue meanwhile are younger, and stay behind.
            runs.extend(self.relay.queue.take_flow(id));
        }
        for mut run in runs {
            self.arrived = run.arrived;
            let sealed = if self.relay.sends_at_once() {
                self.seal(id, run.data(), run.segment, run.count(), run.partly_sent)
            } else {
                (0, run.partly_sent)
            };
            let sent;
            (sent, run.partly_sent) = sealed;
            self.relay.queue.put_back_last(run, sent);
        }
    }

    /// Sends a message about a flow, on lane `index` if it is up; false if there is no way or no room now.
    pub fn say(&mut self, index: u8, message: Context) -> bool {
        let Some(way) = self.way(index) else { return false };
        let header = message.encode();
        let sent = match way {
            Way::Worker { worker, lane } => {
                let lane = LaneRef { peer: self.peer, lane };
                let header = CountedHeader { header, counted: 0 };
                let marks = Marks { tos: self.tos, age: Duration::ZERO, repair: None };
                self.outgoing.payloads(worker, lane, header, Segments { data: &[], segment: 1 }, marks);
                true
            }
            Way::Lane(_) | Way::Plain => self.send_message(way, header.as_slice()).is_ok(),
        };
        if sent {
            self.relay.stats.count_sent(&message);
        }
        sent
    }

    /// Puts datagrams of one flow into packets; returns how many were dealt with: sent, dropped for a reason, or put
    /// among those that await a confirmation. The rest found no lane or no room; its first datagram may be partly sent, as the
    /// first of all may have been (`partly_sent`).
    fn seal(
        &mut self,
        id: FlowId,
        data: &[u8],
        segment: usize,
        datagrams: usize,
        partly_sent: Option<PartlySent>,
    ) -> (usize, Option<PartlySent>) {
        let mut partly_sent = partly_sent.filter(|partly_sent| partly_sent.left == datagrams);
        let all = (datagrams, None);
        let Some(flow) = self.relay.flows.get(id) else {
            self.relay.uplink.drop(DropReason::UnknownFlow, datagrams as u64);
            return all;
        };
        let (standing, origin) = (flow.standing, flow.origin);
        let index =
            flow.prefers(|index| self.link.as_deref().is_some_and(|link| link.pool.is_up(self.lanes, index)));
        if standing == Standing::Refused {
            self.relay.uplink.drop(DropReason::FlowRefused, datagrams as u64);
            return all;
        }
        // Waiting datagrams go first: nothing overtakes within a flow.
        if self.relay.awaiting.holds(id) {
            self.await_confirmation(id, data, segment);
            return all;
        }
        let Some(way) = self.way(index) else { return (0, partly_sent) };
        let Some(service) = self.service_of(&origin) else {
            self.relay.uplink.drop(DropReason::UnknownService, datagrams as u64);
            return all;
        };
        self.note_move(id, way);
        let Some(flow) = self.relay.flows.get(id) else { return all };
        let (header, short, number) = (flow.header(service), confirmed_header(flow.number), flow.number);
        self.repair = self.repair_of(&origin, number);
        if standing == Standing::Opening {
            // The far end has forgotten the flow, and with it the first part of the datagram.
            partly_sent = None;
        }
        if let Way::Worker { worker, lane } = way {
            let segments = Segments { data, segment };
            // Smaller ones fit into any packet.
            if segment >= LEAST_PIECE && self.may_fragment(&origin) {
                match standing {
                    Standing::Opening => self.await_confirmation(id, data, segment),
                    Standing::Confirmed | Standing::Refused => {
                        self.hand_over_large(worker, lane, number, segments, partly_sent);
                    }
                }
                return all;
            }
            let counted = u32::try_from(datagrams).unwrap_or(u32::MAX);
            let lane = LaneRef { peer: self.peer, lane };
            let header = CountedHeader { header, counted };
            self.outgoing.payloads(worker, lane, header, segments, self.marks());
            self.relay.uplink.handed_over += u64::from(counted);
            return all;
        }
        let mut done = 0;
        while done < datagrams {
            let rest = data.get(done * segment..).unwrap_or_default();
            if partly_sent.is_some() {
                let first = &rest[..rest.len().min(segment)];
                partly_sent = self.go_on(way, number, first, partly_sent, datagrams - done);
                if partly_sent.is_some() {
                    return (done, partly_sent);
                }
                done += 1;
                continue;
            }
            let payloads = Payloads::new(header.as_slice(), rest, segment, self.tos);
            let (sent, result) = self.send(way, &payloads);
            self.note_sent(sent, (sent * segment).min(rest.len()));
            done += sent;
            match result {
                Ok(()) => {}
                Err(PushError::TooLarge { most }) => {
                    let rest = data.get(done * segment..).unwrap_or_default();
                    let size = rest.len().min(segment);
                    let most_confirmed =
                        (most + header.as_slice().len()).saturating_sub(short.as_slice().len());
                    let pieces = size <= MOST_DATAGRAM && self.may_fragment(&origin);
                    if standing == Standing::Opening && (size <= most_confirmed || pieces) {
                        // It fits only without the opening form, or in pieces, which do not open a flow: it and those behind it
                        // wait for the confirmation.
                        self.await_confirmation(id, rest, segment);
                        return all;
                    }
                    if pieces {
                        partly_sent = self.go_on(way, number, &rest[..size], None, datagrams - done);
                        if partly_sent.is_some() {
                            return (done, partly_sent);
                        }
                    } else {
                        let wanted = size <= MOST_DATAGRAM && self.wants_pieces(&origin);
                        self.drop_too_large(size, most_confirmed, wanted);
                    }
                    done += 1;
                }
                Err(PushError::Blocked | PushError::NotUp) => return (done, None),
            }
        }
        all
    }

    /// Takes over payloads from another worker, for lane `index`, which this worker hosts.
    pub fn take_over(
        &mut self,
        index: u8,
        CountedHeader { header, counted }: CountedHeader,
        segments: Segments<'_>,
        Marks { tos, age, repair }: Marks,
    ) {
        let Segments { data, segment } = segments;
        self.repair = repair;
        self.relay.uplink.taken_over += u64::from(counted);
        self.arrived = self.now.checked_sub(age).unwrap_or(self.now);
        if counted > 0 && age > self.relay.queue.time_limit() {
            self.relay.uplink.drop(DropReason::Expired, u64::from(counted));
            return;
        }
        let way = self.way(index).filter(|way| match way {
            Way::Lane(_) | Way::Plain => true,
            // The payloads were handed over once already: the lane went down meanwhile.
            Way::Worker { .. } => false,
        });
        let Some(way) = way else {
            self.relay.uplink.drop(DropReason::LaneClosed, u64::from(counted));
            return;
        };
        let context = Context::decode(header.as_slice());
        if let Some(Context::Packet { .. }) = context {
            return self.take_over_packets(index, header, segments, tos);
        }
        if let Some(Context::Piece { number, datagram, total, offset, .. }) = context {
            return self.take_over_large(way, Cutting { number, datagram, total, offset }, data, tos);
        }
        if counted == 0 {
            // A message that finds no room is sent again when the peer repeats its datagram.
            let _said = self.send_message(way, header.as_slice()).is_ok();
            return;
        }
        let datagrams = Payloads::new(header.as_slice(), data, segment, tos).count();
        let mut done = 0;
        while done < datagrams {
            let rest = data.get(done * segment..).unwrap_or_default();
            let payloads = Payloads::new(header.as_slice(), rest, segment, tos);
            let (sent, result) = self.send(way, &payloads);
            self.note_sent(sent, (sent * segment).min(rest.len()));
            done += sent;
            let left = (datagrams - done) as u64;
            match result {
                Ok(()) => {}
                Err(PushError::TooLarge { most }) => {
                    let rest = data.get(done * segment..).unwrap_or_default();
                    let size = rest.len().min(segment);
                    if let Some(Context::Open { number, .. }) = context
                        && let Some(worker) = self.relay.flows.elsewhere(number)
                        && size + confirmed_header(number).as_slice().len() <= most + header.as_slice().len()
                    {
                        // It fits only without the opening form: it and those behind it wait at the flow's worker.
                        let counted = u32::try_from(left).unwrap_or(u32::MAX);
                        self.relay.uplink.handed_over += left;
                        let age = self.age();
                        let header = CountedHeader { header, counted };
                        let segments = Segments { data: rest, segment };
                        self.outgoing.returned(worker, self.peer, header, segments, age);
                        return;
                    }
                    self.drop_too_large(size, most, false);
                    done += 1;
                }
                Err(PushError::Blocked) => return self.relay.uplink.drop(DropReason::SendBlocked, left),
                Err(PushError::NotUp) => return self.relay.uplink.drop(DropReason::LaneClosed, left),
            }
        }
    }

    /// Takes back datagrams of a flow of this worker that did not fit beside the opening form: they wait for its confirmation,
    /// and have `waited` since they came to this host.
    pub fn take_back(
        &mut self,
        waited: Duration,
        CountedHeader { header, counted }: CountedHeader,
        Segments { data, segment }: Segments<'_>,
    ) {
        self.relay.uplink.taken_over += u64::from(counted);
        self.arrived = self.now.checked_sub(waited).unwrap_or(self.now);
        let number = Context::decode(header.as_slice()).and_then(|context| context.flow());
        match number.and_then(|number| self.relay.flows.of_number(number)) {
            Some(flow) => self.await_confirmation(flow, data, segment),
            None => self.relay.uplink.drop(DropReason::UnknownFlow, u64::from(counted)),
        }
    }

    /// The time for which the datagrams that are being sent have been at this host.
    #[inline]
    pub(super) fn age(&self) -> Duration {
        self.now.saturating_duration_since(self.arrived)
    }

    /// The marks of payloads that have no traffic class of their own.
    pub(super) fn marks(&self) -> Marks {
        Marks { tos: self.tos, age: self.age(), repair: self.repair }
    }

    /// The way to the peer for a flow that prefers lane `index`; `None` if no lane is up.
    #[inline]
    pub(super) fn way(&self, index: u8) -> Option<Way> {
        let link = self.link.as_deref()?;
        if link.standard {
            let owner = Way::Worker { worker: link.pool.owner, lane: 0 };
            return Some(if link.plain.is_some() { Way::Plain } else { owner });
        }
        Some(match link.pool.pick(self.lanes, index)? {
            Place::Here(lane) => Way::Lane(lane),
            Place::There(worker, lane) => Way::Worker { worker, lane },
        })
    }

    /// Puts datagrams into packets; returns how many, and why the next of them was not.
    pub(super) fn send(&mut self, way: Way, payloads: &Payloads<'_>) -> (usize, Result<(), PushError>) {
        let numbered;
        let payloads = match self.repair {
            None => payloads,
            Some(class) => {
                let repair = self.begin_repair(way, &class, payloads.count());
                numbered = Payloads { repair, ..*payloads };
                &numbered
            }
        };
        match (way, self.link.as_deref_mut().and_then(|link| link.plain.as_mut())) {
            (Way::Lane(lane), _) => self.underlays.push_all(self.lanes, lane, payloads, self.now),
            (Way::Plain, Some(plain)) => plain.push_all(payloads, self.arrived, self.now),
            (Way::Plain, None) | (Way::Worker { .. }, _) => (0, Err(PushError::NotUp)),
        }
    }

    /// Counts datagrams that were put into packets.
    pub(super) fn note_sent(&mut self, datagrams: usize, bytes: usize) {
        if self.repair.is_some() {
            self.relay.repairs.sent.payloads += datagrams as u64;
            self.relay.repairs.sent.payload_bytes += bytes as u64;
        }
        self.relay.in_send_buffer += datagrams as u64;
        self.relay.stats.uplink_bytes += bytes as u64;
    }

    /// Puts a message about a flow into a packet.
    fn send_message(&mut self, way: Way, header: &[u8]) -> Result<(), PushError> {
        self.push(way, Frame { header, payload: &[], counted: false, tos: self.tos })
    }

    /// The payloads that packets take now behind a header of `header` bytes.
    pub(super) fn room(&self, way: Way, header: usize, tos: u8) -> Result<Room, PushError> {
        // As `push` leaves free for repair.
        let header = header + self.repair.map_or(0, |_| REPAIR_OVERHEAD);
        match (way, self.link.as_deref().and_then(|link| link.plain.as_ref())) {
            (Way::Lane(lane), _) => self.underlays.room(self.lanes, lane, header, tos),
            (Way::Plain, Some(plain)) => Ok(plain.room(header)),
            (Way::Plain, None) | (Way::Worker { .. }, _) => Err(PushError::NotUp),
        }
    }

    /// Puts one frame into a packet.
    pub(super) fn push(&mut self, way: Way, frame: Frame<'_>) -> Result<(), PushError> {
        // Messages about flows are repeated when they are needed.
        let class = self.repair.filter(|_| frame.counted || !frame.payload.is_empty());
        let repair = class.and_then(|class| self.begin_repair(way, &class, 1));
        match (way, self.link.as_deref_mut().and_then(|link| link.plain.as_mut())) {
            (Way::Lane(lane), _) => {
                let pushed = self.underlays.push(self.lanes, lane, frame, repair, self.now);
                if let Some(repair) = repair.filter(|repair| repair.numbered) {
                    self.underlays.push_repairs(self.lanes, lane, repair.stream, self.now);
                }
                pushed
            }
            (Way::Plain, Some(plain)) => {
                // A piece is as old as its datagram; a message begins to wait here.
                let since = if frame.payload.is_empty() { self.now } else { self.arrived };
                plain.push(frame, repair, since, self.now)
            }
            (Way::Plain, None) | (Way::Worker { .. }, _) => Err(PushError::NotUp),
        }
    }

    /// The number by which the peer knows the service of a flow; an accepted flow needs none.
    fn service_of(&self, origin: &Origin) -> Option<ServiceNumber> {
        match *origin {
            Origin::Ingress { ingress, .. } => self.relay.service(ingress).map(|service| service.number),
            Origin::Upstream { .. } => Some(ServiceNumber(0)),
        }
    }

    /// Notes the lane that a flow takes, which may be another one than before.
    fn note_move(&mut self, id: FlowId, way: Way) {
        let index = match way {
            Way::Lane(lane) => match self.lanes.get(lane) {
                Some(slot) => slot.index,
                None => return,
            },
            Way::Worker { lane, .. } => lane,
            Way::Plain => return,
        };
        let Some(flow) = self.relay.flows.get_mut(id) else { return };
        if index != flow.on {
            self.relay.stats.flows_moved += u64::from(flow.on != NO_LANE);
            flow.on = index;
        }
        if index == flow.lane {
            flow.paused = false;
        }
    }

    /// Puts datagrams among those that wait for their flow's confirmation, and asks for that, again after a while.
    fn await_confirmation(&mut self, id: FlowId, data: &[u8], segment: usize) {
        let now = self.now;
        self.relay.awaiting.push(Belongs::Flow(id), data, segment, self.arrived, now, &mut self.relay.uplink);
        let Some(flow) = self.relay.flows.get(id) else { return };
        let (number, lane, origin) = (flow.number, flow.lane, flow.origin);
        if flow.asked.is_some_and(|asked| now.saturating_duration_since(asked) < ASK_INTERVAL) {
            return;
        }
        let Some(service) = self.service_of(&origin) else { return };
        if self.say(lane, Context::OpenEmpty { number, service })
            && let Some(flow) = self.relay.flows.get_mut(id)
        {
            flow.asked = Some(now);
        }
    }

    /// Opens a flow for a client.
    fn open(&mut self, client: Client, ingress: IngressId, limits: &Limits) -> Result<FlowId, DropReason> {
        if self.relay.is_full(limits.flows) {
            return Err(DropReason::FlowLimit);
        }
        let idle = match (self.relay.service(ingress), &self.link) {
            (Some(service), _) => service.idle,
            (None, Some(_)) => return Err(DropReason::UnknownService),
            // Not connected yet: the peer has not said for how long its flows live.
            (None, None) => DEFAULT_IDLE,
        };
        let lane = |turn| self.link.as_ref().map_or(NO_LANE, |link| link.pool.lane_for(turn));
        self.relay.stats.flows_opened += 1;
        Ok(self.relay.flows.open(client, ingress, lane, idle, self.now))
    }
}

/// How long a flow opened before the first connection may be silent.
const DEFAULT_IDLE: Duration = Duration::from_secs(60);

impl PeerData {
    /// The way of datagrams to it.
    pub fn uplink<'a>(
        &'a mut self,
        lanes: &'a mut Lanes,
        underlays: &'a mut Underlays,
        outgoing: &'a mut Outgoing,
        now: Instant,
    ) -> Uplink<'a> {
        // Datagrams to an unresponsive peer would only be lost: they wait, and expire if nobody answers.
        let link = self.link.as_mut().filter(|link| !link.suspicions.unresponsive);
        Uplink {
            peer: self.id,
            relay: &mut self.relay,
            link,
            lanes,
            underlays,
            outgoing,
            tos: self.config.dscp.outer(0),
            now,
            arrived: now,
            repair: None,
            too_large: &mut self.too_large,
        }
    }
}
