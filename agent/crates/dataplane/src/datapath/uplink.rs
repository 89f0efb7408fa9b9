//! From local sockets to the peer, in packet order: [`Uplink::ingress`] or [`Uplink::upstream`], then
//! [`Uplink::carry`], then [`Uplink::seal`].

use std::time::{Duration, Instant};

use base::ids::{IngressId, LaneRef, LocalId, PeerId};
use config::Limits;
use net::{ReceiveBatch, batch::Meta};
use rate::Release;
use wire::{
    context::{Context, FlowNumber, Header, MOST_DATAGRAM, REPAIR_OVERHEAD, ServiceNumber},
    proxy::ClientAddresses,
};

use crate::{
    datapath::segments::{CountedHeader, Cutting, Segments, Sending},
    hand_off::Outgoing,
    lanes::{Frame, LaneId, Lanes, Payloads, PickedLane, PushError, Room, Underlays},
    lines::{Place, count_on_line, on_line},
    peer::{Link, PeerData, TooLarge},
    relay::{
        Client, DatagramRelay, DropReason, FlowId, Held, NO_LANE, Origin, PartlySent, QueueClass, Run,
        Standing, flow::confirmed_header, fragments::LEAST_PIECE,
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
    /// Notes the largest payload that fits when one did not.
    pub too_large: &'a mut Option<TooLarge>,
}

/// The state of the queue after a call of [`Uplink::drain`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Drained {
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
pub(super) enum NextHop {
    Lane(LaneId),
    /// The control connection carries the payload: standard mode.
    Plain,
    /// Another worker, which hosts the lane with index `lane`; in standard mode, the session owner and index 0.
    Worker {
        worker: u8,
        lane: u8,
    },
}

/// How many datagrams were dealt with, and why the next of them was not.
type Sent = (usize, Result<(), PushError>);

/// The bytes of a frame beside its payload, about: its type and length, and the context.
pub(super) const FRAME_OVERHEAD: usize = 6;

/// The bytes of a packet beside its frames: header and tag.
pub(super) const PACKET_OVERHEAD: usize = quic_core::HEADER_LEN + quic_core::TAG_LEN;

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
                None => self.open(client, None, ingress, limits).inspect(|flow| new_flows.push(*flow)),
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
    pub(super) fn carry(&mut self, id: FlowId, data: &[u8], meta: &Meta) {
        let (run, datagrams) = (Segments { data, segment: meta.segment }, meta.datagrams());
        self.relay.uplink.receive(datagrams as u64, data.len() as u64);
        let now = self.now;
        let Some(flow) = self.relay.flows.get_mut(id) else {
            return self.relay.uplink.drop(DropReason::UnknownFlow, datagrams as u64);
        };
        flow.paused |= now.saturating_duration_since(flow.last_active) >= PAUSE;
        flow.last_active = now;
        if let Some(tally) = &mut flow.tally {
            tally.uplink.add(datagrams as u64, data.len() as u64);
        }
        if meta.age > self.relay.time_limit() {
            return self.relay.uplink.drop(DropReason::Expired, datagrams as u64);
        }
        let mut partly_sent = None;
        let line = self.line_of_flow(id);
        let class = QueueClass::Flow(id);
        let at_once = self.relay.sends_at_once(line, class);
        let sent = if at_once { self.seal(id, run, meta.age, &mut partly_sent) } else { 0 };
        if sent < datagrams {
            let rest = run.skip(sent).data;
            let arrived = now.checked_sub(meta.age).unwrap_or(now);
            let taken = self.relay.enqueue(line, class, rest, run.segment, arrived, now);
            if partly_sent.is_some()
                && taken == datagrams - sent
                && let Some(run) = self.relay.waiting(line).0.newest_of(id)
            {
                run.partly_sent = partly_sent;
            }
        }
    }

    /// Sends waiting datagrams while there are lanes and room, and the rate lets them go, up to about `most` of them.
    pub fn drain(&mut self, most: usize) -> Drained {
        self.relay.expire(self.now);
        if self.relay.line_queues.is_empty() {
            return self.drain_queue(None, most);
        }
        self.drain_lines(most)
    }

    /// Sends what waits for a line, or what has none.
    pub(super) fn drain_queue(&mut self, line: Option<u8>, most: usize) -> Drained {
        let drained = self.drain_in_turn(line, most);
        let (queue, share, _) = self.relay.waiting(line);
        share.set_waiting(queue.backlogged());
        drained
    }

    fn drain_in_turn(&mut self, line: Option<u8>, most: usize) -> Drained {
        let rate = self.relay.share_of(line).rate();
        let (mut done, mut credit, mut sparse_is_over) = (0, 0, false);
        while done < most && !self.relay.queue_of(line).is_empty() {
            let mut sparse = false;
            let (queue, share, account) = self.relay.waiting(line);
            if credit == 0 {
                match share.release(self.now) {
                    Release::Bytes(bytes) => credit = bytes,
                    Release::At(at) if sparse_is_over || !share.may_overdraw(self.now) => {
                        return Drained::Paced(at);
                    }
                    Release::At(_) => sparse = true,
                }
            }
            let taken = queue.take(sparse, rate, self.now, account);
            let Some((run, portion)) = taken else {
                if !sparse {
                    break;
                }
                // Those that wait have had their share.
                sparse_is_over = true;
                continue;
            };
            let mut partly_sent = run.partly_sent;
            let sent = self.seal_run(&run, portion, &mut partly_sent);
            let cost = self.outer_bytes(line, &run, sent);
            let (queue, share, _) = self.relay.waiting(line);
            share.spend(cost);
            credit = credit.saturating_sub(cost);
            queue.put_back(run.rest(sent, partly_sent), rate);
            if sent < portion {
                return Drained::Blocked(done + sent);
            }
            done += sent;
        }
        if self.relay.queue_of(line).is_empty() { Drained::Empty } else { Drained::More }
    }

    /// Sends the first `portion` datagrams of a run that waited; returns how many were dealt with.
    fn seal_run(&mut self, run: &Run, portion: usize, partly_sent: &mut Option<PartlySent>) -> usize {
        let age = self.now.saturating_duration_since(run.arrived);
        let (data, segment) = (run.data(), run.segment);
        let data = data.get(..data.len().min(portion * segment)).unwrap_or(data);
        let first = Segments { data, segment };
        match run.class {
            QueueClass::Flow(flow) => self.seal(flow, first, age, partly_sent),
            QueueClass::Packets(class) => self.waiting_packets(class, first, age),
        }
    }

    /// The bytes of IP packets that carry the first `portion` datagrams of a run, about: small ones share a packet.
    fn outer_bytes(&self, line: Option<u8>, run: &Run, portion: usize) -> u64 {
        if !self.relay.share_of(line).is_limited() {
            return 0;
        }
        let budget = self.link.as_deref().map_or(0, |link| link.budget.bytes());
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
        self.relay.awaiting.expire(None, self.now, &mut self.relay.uplink);
        let mut runs = self.relay.awaiting.take_flow(id);
        if !runs.is_empty() {
            // Datagrams of the flow that came to the queue meanwhile are younger, and stay behind.
            runs.extend(self.relay.take_flow(id));
        }
        let line = self.line_of_flow(id);
        for run in runs {
            let age = self.now.saturating_duration_since(run.arrived);
            let waiting = Segments { data: run.data(), segment: run.segment };
            let mut partly_sent = run.partly_sent;
            let at_once = self.relay.sends_at_once(line, run.class);
            let sent = if at_once { self.seal(id, waiting, age, &mut partly_sent) } else { 0 };
            let (queue, share, _) = self.relay.waiting(line);
            let rate = share.rate();
            queue.put_back_last(run.rest(sent, partly_sent), rate);
        }
    }

    /// Sends a message about a flow, on lane `index` if it is up; false if there is no lane or no room now.
    pub fn send_flow_message(&mut self, index: u8, message: Context) -> bool {
        let Some(hop) = self.next_hop(index) else { return false };
        let header = message.encode();
        let sent = match hop {
            NextHop::Worker { worker, lane } => {
                let lane = LaneRef { peer: self.peer, lane };
                let header = CountedHeader { header, counted: 0 };
                let nothing = Segments { data: &[], segment: 1 };
                self.outgoing.payloads(worker, lane, header, nothing, self.unrepaired());
                true
            }
            NextHop::Lane(_) | NextHop::Plain => self.send_message(hop, header.as_slice()).is_ok(),
        };
        if sent {
            self.relay.stats.count_sent(&message);
        }
        sent
    }

    /// Puts datagrams of one flow, which have been at this host for `age`, into packets; returns how many were dealt with: sent, dropped
    /// for a reason, or put among those that await a confirmation. The rest found no lane or no room; its first datagram may be
    /// partly sent, as the first of all may have been.
    fn seal(
        &mut self,
        id: FlowId,
        run: Segments<'_>,
        age: Duration,
        partly_sent: &mut Option<PartlySent>,
    ) -> usize {
        let sending = Sending { age, ..self.unrepaired() };
        let twice = if partly_sent.is_none() { self.seal_twice(id, run, &sending) } else { None };
        let done = twice.unwrap_or(0);
        if done == run.count() {
            return done;
        }
        let alone = self.seal_once(id, run.skip(done), age, partly_sent);
        if twice.is_some() {
            self.relay.copies.alone += alone as u64;
        }
        done + alone
    }

    /// Does the same with datagrams that travel on one lane.
    fn seal_once(
        &mut self,
        id: FlowId,
        run: Segments<'_>,
        age: Duration,
        partly_sent: &mut Option<PartlySent>,
    ) -> usize {
        let mut begun = partly_sent.take();
        let Some(flow) = self.relay.flows.get(id) else { return self.drop_run(DropReason::UnknownFlow, run) };
        let (standing, origin, number) = (flow.standing, flow.origin, flow.number);
        let index =
            flow.prefers(|index| self.link.as_deref().is_some_and(|link| link.pool.is_up(self.lanes, index)));
        let place = Place { bucket: bucket_of(number), index };
        let lines = self.link.as_deref().and_then(|link| link.pool.lines.as_ref());
        let index = on_line(lines, &mut self.relay.lines, place, self.now);
        if standing == Standing::Refused {
            return self.drop_run(DropReason::FlowRefused, run);
        }
        // Waiting datagrams go first: nothing overtakes within a flow.
        if self.relay.awaiting.holds(id) {
            return self.await_confirmation(id, run, age);
        }
        let Some(hop) = self.next_hop(index) else {
            *partly_sent = begun;
            return 0;
        };
        let Some(service) = self.service_of(&origin) else {
            return self.drop_run(DropReason::UnknownService, run);
        };
        let client = if standing == Standing::Opening { self.client_of(id, &origin) } else { None };
        let (header, short) = (flow.header(service, client), confirmed_header(number));
        self.note_move(id, hop);
        let sending = Sending { tos: self.tos, age, repair: self.repair_of(&origin, number) };
        if standing == Standing::Opening {
            // The far end has forgotten the flow, and with it the first part of the datagram.
            begun = None;
        }
        if let NextHop::Worker { worker, lane } = hop {
            let lane = LaneRef { peer: self.peer, lane };
            // Smaller ones fit into any packet.
            if run.segment >= LEAST_PIECE && self.may_fragment(&origin) {
                return match standing {
                    Standing::Opening => self.await_confirmation(id, run, age),
                    Standing::Confirmed | Standing::Refused => {
                        self.count_load(index, run.data.len());
                        self.hand_over_large(worker, lane, number, run, begun, sending)
                    }
                };
            }
            let count = run.count();
            self.count_load(index, run.data.len());
            self.outgoing.payloads(worker, lane, CountedHeader::of(header, count), run, sending);
            self.relay.uplink.handed_over += count as u64;
            return count;
        }
        let mut payloads = Payloads::new(header.as_slice(), run.data, run.segment, sending.tos);
        if begun.is_some() {
            *partly_sent = begun;
            if self.go_on(hop, number, run.first(), partly_sent, &sending) == 0 {
                return 0;
            }
            let Some(rest) = payloads.after(1) else { return 1 };
            payloads = rest;
        }
        let (sent, _) = self.send_all(hop, payloads, &sending, |uplink, left, most| {
            let size = left.first().len();
            let most_confirmed = (most + header.as_slice().len()).saturating_sub(short.as_slice().len());
            let pieces = size <= MOST_DATAGRAM && uplink.may_fragment(&origin);
            if standing == Standing::Opening && (size <= most_confirmed || pieces) {
                // It fits only without the opening form, or in pieces, which do not open a flow: it and those behind it wait for the
                // confirmation.
                uplink.await_confirmation(id, left, age)
            } else if pieces {
                uplink.go_on(hop, number, left.first(), partly_sent, &sending)
            } else {
                let wanted = size <= MOST_DATAGRAM && uplink.wants_pieces(&origin);
                uplink.drop_too_large(size, most_confirmed, wanted)
            }
        });
        let done = usize::from(begun.is_some()) + sent;
        self.count_load(index, run.data.len().min(done.saturating_mul(run.segment)));
        done
    }

    /// Counts bytes for the load of the line that lane `index` is on, if there are several.
    pub(super) fn count_load(&self, index: u8, bytes: usize) {
        let lines = self.link.as_deref().and_then(|link| link.pool.lines.as_ref());
        count_on_line(lines, self.relay.lines.as_deref(), index, bytes, self.now);
    }

    /// Drops a run; returns the number of its datagrams.
    fn drop_run(&mut self, reason: DropReason, run: Segments<'_>) -> usize {
        self.relay.uplink.drop(reason, run.count() as u64);
        run.count()
    }

    /// Puts payloads into packets. `too_large` gets the first of those that are left when it fits into no packet, with those behind it and
    /// the number of payload bytes that would fit, and returns how many it dealt with; none if they have to wait.
    pub(super) fn send_all(
        &mut self,
        hop: NextHop,
        mut left: Payloads<'_>,
        sending: &Sending,
        mut too_large: impl FnMut(&mut Self, Segments<'_>, usize) -> usize,
    ) -> Sent {
        let mut done = 0;
        loop {
            let mut dealt = 1;
            if self.signals_congestion(hop, &left, sending) {
                self.relay.uplink.drop(DropReason::Aqm, 1);
            } else {
                let (sent, result) = self.send(hop, &left, sending);
                self.note_sent(sent, left.bytes_of(sent), sending);
                done += sent;
                let Err(PushError::TooLarge { most }) = result else { return (done, result) };
                left = left.skip(sent);
                dealt = too_large(self, Segments { data: left.data, segment: left.segment }, most);
                if dealt == 0 {
                    return (done, result);
                }
            }
            done += dealt;
            let Some(rest) = left.after(dealt) else { return (done, Ok(())) };
            left = rest;
        }
    }

    /// Takes over payloads from another worker, for lane `index`, which this worker hosts.
    pub fn take_over(
        &mut self,
        index: u8,
        CountedHeader { header, counted }: CountedHeader,
        run: Segments<'_>,
        sending: Sending,
    ) {
        let counted = u64::from(counted);
        self.relay.uplink.taken_over += counted;
        if counted > 0 && sending.age > self.relay.time_limit() {
            return self.relay.uplink.drop(DropReason::Expired, counted);
        }
        let Some(hop @ (NextHop::Lane(_) | NextHop::Plain)) = self.next_hop(index) else {
            // They were handed over once already: the lane went down meanwhile.
            return self.relay.uplink.drop(DropReason::LaneClosed, counted);
        };
        match Context::decode(header.as_slice()) {
            Some(Context::Packet { partial, .. }) => {
                self.take_over_packets(index, header, partial, run, &sending)
            }
            Some(Context::Piece { number, datagram, total, offset, .. }) => {
                self.take_over_large(hop, Cutting { number, datagram, total, offset }, run.data, &sending);
            }
            Some(Context::Open { .. } | Context::Flow { .. }) => {
                self.take_over_datagrams(hop, header, run, &sending);
            }
            Some(Context::Copied { .. }) => {
                self.take_over_copy(hop, header, run.first(), counted > 0, &sending);
            }
            Some(
                Context::OpenEmpty { .. }
                | Context::Confirmed(_)
                | Context::Refused(..)
                | Context::Unknown(_)
                | Context::Closed(_),
            ) => {
                // A message that finds no room is sent again when the peer repeats its datagram.
                let _said = self.send_message(hop, header.as_slice()).is_ok();
            }
            // Lane hosts make these themselves.
            Some(
                Context::Report { .. }
                | Context::Numbered { .. }
                | Context::Repair { .. }
                | Context::Ask { .. }
                | Context::Unsupported(_),
            )
            | None => self.relay.uplink.drop(DropReason::Malformed, counted),
        }
    }

    /// Takes over datagrams of a flow from another worker.
    fn take_over_datagrams(&mut self, hop: NextHop, header: Header, run: Segments<'_>, sending: &Sending) {
        let payloads = Payloads::new(header.as_slice(), run.data, run.segment, sending.tos);
        let (done, result) = self.send_all(hop, payloads, sending, |uplink, left, most| {
            let size = left.first().len();
            if let Some(Context::Open { number, .. }) = Context::decode(header.as_slice())
                && let Some(worker) = uplink.relay.flows.elsewhere(number)
                && size + confirmed_header(number).as_slice().len() <= most + header.as_slice().len()
            {
                // It fits only without the opening form: it and those behind it wait at the flow's worker.
                let count = left.count();
                let header = CountedHeader::of(header, count);
                uplink.outgoing.returned(worker, uplink.peer, header, left, sending.age);
                uplink.relay.uplink.handed_over += count as u64;
                return count;
            }
            uplink.drop_too_large(size, most, false)
        });
        if let Err(error) = result {
            self.relay.uplink.drop(not_sent(error), (run.count() - done) as u64);
        }
    }

    /// Takes back datagrams of a flow of this worker that did not fit beside the opening form: they wait for its confirmation,
    /// and have `waited` since they came to this host.
    pub fn take_back(
        &mut self,
        waited: Duration,
        CountedHeader { header, counted }: CountedHeader,
        run: Segments<'_>,
    ) {
        self.relay.uplink.taken_over += u64::from(counted);
        let number = Context::decode(header.as_slice()).and_then(|context| context.flow());
        match number.and_then(|number| self.relay.flows.of_number(number)) {
            Some(flow) => {
                self.await_confirmation(flow, run, waited);
            }
            None => self.relay.uplink.drop(DropReason::UnknownFlow, u64::from(counted)),
        }
    }

    /// How the agent's own words are sent: what is said about flows, and retransmissions, symbols and requests. They are repeated when they
    /// are needed.
    pub(super) fn unrepaired(&self) -> Sending {
        Sending { tos: self.tos, age: Duration::ZERO, repair: None }
    }

    /// The next hop for a flow that prefers lane `index`; `None` if no lane is up.
    #[inline]
    pub(super) fn next_hop(&self, index: u8) -> Option<NextHop> {
        let link = self.link.as_deref()?;
        if link.is_standard() {
            let owner = NextHop::Worker { worker: link.pool.owner, lane: 0 };
            return Some(if link.plain.is_some() { NextHop::Plain } else { owner });
        }
        Some(match link.pool.pick(self.lanes, index)? {
            PickedLane::Here(lane) => NextHop::Lane(lane),
            PickedLane::There(worker, lane) => NextHop::Worker { worker, lane },
        })
    }

    /// Puts datagrams into packets.
    fn send(&mut self, hop: NextHop, payloads: &Payloads<'_>, sending: &Sending) -> Sent {
        let numbered;
        let payloads = match sending.repair {
            None => payloads,
            Some(class) => {
                let repair = self.begin_repair(hop, &class, payloads.count());
                numbered = Payloads { repair, ..*payloads };
                &numbered
            }
        };
        match (hop, self.link.as_deref_mut().and_then(|link| link.plain.as_mut())) {
            (NextHop::Lane(lane), _) => self.underlays.push_all(self.lanes, lane, payloads, self.now),
            (NextHop::Plain, Some(plain)) => plain.push_all(payloads, sending.arrived(self.now), self.now),
            (NextHop::Plain, None) | (NextHop::Worker { .. }, _) => (0, Err(PushError::NotUp)),
        }
    }

    /// Counts datagrams that were put into packets.
    pub(super) fn note_sent(&mut self, datagrams: usize, bytes: usize, sending: &Sending) {
        if sending.repair.is_some() {
            self.relay.repairs.sent.payloads += datagrams as u64;
            self.relay.repairs.sent.payload_bytes += bytes as u64;
        }
        self.relay.in_send_buffer += datagrams as u64;
        self.relay.stats.uplink_bytes += bytes as u64;
    }

    /// Puts a message about a flow into a packet.
    fn send_message(&mut self, hop: NextHop, header: &[u8]) -> Result<(), PushError> {
        let sending = self.unrepaired();
        self.push(hop, Frame { header, payload: &[], counted: false, tos: sending.tos }, &sending)
    }

    /// The payloads that packets take now behind a header of `header` bytes.
    pub(super) fn room(&self, hop: NextHop, header: usize, sending: &Sending) -> Result<Room, PushError> {
        // As `push` leaves free for repair.
        let header = header + sending.repair.map_or(0, |_| REPAIR_OVERHEAD);
        match (hop, self.link.as_deref().and_then(|link| link.plain.as_ref())) {
            (NextHop::Lane(lane), _) => self.underlays.room(self.lanes, lane, header, sending.tos),
            (NextHop::Plain, Some(plain)) => Ok(plain.room(header)),
            (NextHop::Plain, None) | (NextHop::Worker { .. }, _) => Err(PushError::NotUp),
        }
    }

    /// Puts one frame into a packet.
    pub(super) fn push(
        &mut self,
        hop: NextHop,
        frame: Frame<'_>,
        sending: &Sending,
    ) -> Result<(), PushError> {
        let repair = sending.repair.and_then(|class| self.begin_repair(hop, &class, 1));
        match (hop, self.link.as_deref_mut().and_then(|link| link.plain.as_mut())) {
            (NextHop::Lane(lane), _) => {
                let pushed = self.underlays.push(self.lanes, lane, frame, repair, self.now);
                if let Some(repair) = repair.filter(|repair| repair.numbered) {
                    self.underlays.push_repairs(self.lanes, lane, repair.stream, self.now);
                }
                pushed
            }
            // A piece is as old as its datagram; a message begins to wait here.
            (NextHop::Plain, Some(plain)) => plain.push(frame, repair, sending.arrived(self.now), self.now),
            (NextHop::Plain, None) | (NextHop::Worker { .. }, _) => Err(PushError::NotUp),
        }
    }

    /// The number by which the peer knows the service of a flow; an accepted flow needs none.
    pub(super) fn service_of(&self, origin: &Origin) -> Option<ServiceNumber> {
        match *origin {
            Origin::Ingress { ingress, .. } => self.relay.services.of(ingress).map(|service| service.number),
            Origin::Upstream { .. } => Some(ServiceNumber(0)),
        }
    }

    /// Notes the lane that a flow takes, which may be another one than before.
    pub(super) fn note_move(&mut self, id: FlowId, hop: NextHop) {
        let index = match hop {
            NextHop::Lane(lane) => match self.lanes.get(lane) {
                Some(slot) => slot.index,
                None => return,
            },
            NextHop::Worker { lane, .. } => lane,
            NextHop::Plain => return,
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

    /// Puts datagrams among those that wait for their flow's confirmation, and asks for that, again after a while; returns their number.
    fn await_confirmation(&mut self, id: FlowId, run: Segments<'_>, age: Duration) -> usize {
        let (now, count) = (self.now, run.count());
        let arrived = now.checked_sub(age).unwrap_or(now);
        let (awaiting, account) = (&mut self.relay.awaiting, &mut self.relay.uplink);
        awaiting.expire(None, now, account);
        awaiting.push(QueueClass::Flow(id), run.data, run.segment, arrived, None, account);
        let Some(flow) = self.relay.flows.get(id) else { return count };
        let (number, lane, origin) = (flow.number, flow.lane, flow.origin);
        if flow.asked.is_some_and(|asked| now.saturating_duration_since(asked) < ASK_INTERVAL) {
            return count;
        }
        let client = self.client_of(id, &origin);
        if let Some(service) = self.service_of(&origin)
            && self.send_flow_message(lane, Context::OpenEmpty { number, service, client })
            && let Some(flow) = self.relay.flows.get_mut(id)
        {
            flow.asked = Some(now);
        }
        count
    }

    /// Opens a flow for a client, or for whom a proxy's header has `told` to be one.
    pub(super) fn open(
        &mut self,
        client: Client,
        told: Option<ClientAddresses>,
        ingress: IngressId,
        limits: &Limits,
    ) -> Result<FlowId, DropReason> {
        if self.relay.held == Held::Stopped {
            return Err(DropReason::Quota);
        }
        if self.relay.is_full(limits.flows) {
            return Err(DropReason::FlowLimit);
        }
        let idle = match (self.relay.services.of(ingress), &self.link) {
            (Some(service), _) => service.idle,
            (None, Some(_)) => return Err(DropReason::UnknownService),
            // Not connected yet: the peer has not said for how long its flows live.
            (None, None) => DEFAULT_IDLE,
        };
        let lane = |turn| self.link.as_ref().map_or(NO_LANE, |link| link.pool.lane_for(turn));
        self.relay.stats.flows_opened += 1;
        Ok(self.relay.flows.open(client, told, ingress, lane, idle, self.now))
    }
}

/// The bucket that a flow's datagrams belong to. Numbers of flows count up in steps of two.
#[inline]
pub(super) fn bucket_of(number: FlowNumber) -> u8 {
    (number.0 >> 1).to_le_bytes()[0]
}

/// Why a datagram that another worker has handed over is dropped if it cannot be sent: its flow's queue is there.
pub(super) fn not_sent(error: PushError) -> DropReason {
    match error {
        PushError::NotUp => DropReason::LaneClosed,
        PushError::Blocked | PushError::TooLarge { .. } => DropReason::SendBlocked,
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
            too_large: &mut self.too_large,
        }
    }
}
