//! From the peer to local sockets, in packet order: [`Downlink::buffer`], then [`Downlink::packet`], then
//! [`Downlink::frame`] and [`Downlink::deliver`].

use std::{
    net::{IpAddr, SocketAddr},
    ops::Range,
    time::{Duration, Instant},
};

use base::{
    ids::{LaneRef, LocalId, PeerId, WorkerId},
    sparse,
};
use config::Config;
use net::{
    Path, ReceiveBatch, Recipient,
    batch::{MOST_SEGMENTS, Meta},
};
use quic_core::{ConnectionId, OpenError};
use rand::{Rng, rngs::StdRng};
use wire::context::{Context, FlowNumber, Header, PayloadKind};

use crate::{
    datapath::{
        repair::{FrameAt, Released, Source},
        segments::Cutting,
        shares::Shares,
        uplink::{self, Uplink},
        work::{self, Work},
    },
    forward::{Locals, tun::TunSide},
    hand_off::Outgoing,
    lanes::{LaneId, Lanes, UnderlayId, Underlays, send_buffer::copy_of},
    peer::PeerTable,
    relay::{DatagramRelay, DropReason, FlowId, Origin, Standing, flow::confirmed_header},
    sockets::SocketFactory,
};

/// Random data of a PATH_CHALLENGE frame, which an off-path attacker cannot guess (RFC 9000 §8.2.1).
pub fn challenge_data(rng: &mut StdRng) -> [u8; 8] {
    let mut data = [0; 8];
    rng.fill_bytes(&mut data);
    data
}

/// The parts of a worker that the downlink uses.
pub struct Downlink<'a, P, O> {
    pub peers: &'a mut P,
    /// Takes the datagrams that are no lane's of this worker.
    pub outside: O,
    pub lanes: &'a mut Lanes,
    pub underlays: &'a mut Underlays,
    /// The sockets that payloads are delivered to.
    pub locals: &'a mut Locals,
    /// The device that IP packets are delivered to.
    pub tun: Option<&'a mut TunSide>,
    /// Opens the sockets of new flows.
    pub factory: &'a mut SocketFactory,
    /// The random generator for the data of PATH_CHALLENGE frames.
    pub rng: &'a mut StdRng,
    /// The services that peers may use.
    pub config: &'a Config,
    /// Collects what is to be done after the batch; also scratch space.
    pub notes: &'a mut Notes,
    /// The hand-off batches for other workers.
    pub outgoing: &'a mut Outgoing,
    pub worker: WorkerId,
    pub now: Instant,
}

/// An IP packet from a source that is not the peer's.
#[derive(Clone, Copy, Debug)]
pub struct Spoofed {
    pub peer: PeerId,
    pub source: IpAddr,
    /// Whether it is for a link-local group, for which fewer sources are the peer's own.
    pub multicast: bool,
}

/// The work that a pass over a batch leaves for later, and scratch space that keeps its capacity.
#[derive(Debug, Default)]
pub struct Notes {
    /// Flows that were accepted during the pass.
    pub new_flows: Vec<(PeerId, FlowId)>,
    /// Lanes that came up or moved.
    pub lanes_up: Vec<LaneId>,
    /// Lanes whose peer sent a PATH_CHALLENGE, and its data.
    pub challenged: Vec<(LaneId, [u8; 8])>,
    /// Lanes whose peer broke the protocol.
    pub violations: Vec<(LaneId, OpenError)>,
    /// The first IP packet of a peer from a source that is not its own.
    pub spoofed: Option<Spoofed>,
    /// Peers of whose datagrams pieces are missing.
    pub incomplete: Vec<PeerId>,
    /// Frames that waited for others, or were recovered: to be taken after the batch.
    pub released: Released,
    /// The work that the passes of this turn have done.
    pub work: Work,
    /// The work that peers ask this worker for.
    pub shares: Shares,
    /// Ranges of the payloads of one packet within its buffer.
    ranges: Vec<Range<usize>>,
    /// Flows whose opening is to be confirmed, each once per batch.
    pub(super) confirm: Vec<(LaneRef, FlowNumber)>,
    /// Packets of the lane packet in hand that the path has marked CE.
    pub(super) marked: u64,
    /// Where the last payload went; forgotten between batches and whenever a flow may have changed.
    recent: Option<Recent>,
}

impl Notes {
    /// Charges the payloads that waited and are to be delivered for a frame, beyond the first `before` of them.
    pub(super) fn charge_released(&mut self, before: usize) {
        self.work.release(self.released.len() - before);
    }

    /// How many payloads that waited the frame in hand, which is of `peer`, may have delivered.
    pub(super) fn releases(&self, peer: PeerId) -> usize {
        self.work.releases(self.shares.left(peer))
    }

    /// Gives memory back if a batch held much more than usual once.
    pub fn shrink(&mut self) {
        sparse::shrink_list(&mut self.new_flows);
        sparse::shrink_list(&mut self.confirm);
        sparse::shrink_list(&mut self.ranges);
    }
}

/// Where the payloads of a flow go. Most of a batch belongs to the flow of the payload before.
#[derive(Clone, Copy, Debug)]
struct Recent {
    /// The lane that it came on.
    lane: LaneRef,
    /// The header that precedes the lane's payloads.
    header: Header,
    target: LocalTarget,
    /// The buffer of the last payload, and where it ends there.
    slot: usize,
    end: usize,
}

/// The local end of a flow, for payloads.
#[derive(Clone, Copy, Debug)]
pub(super) struct LocalTarget {
    pub(super) socket: LocalId,
    pub(super) destination: Option<SocketAddr>,
    pub(super) source: Option<IpAddr>,
    /// The flow, if its end is recorded.
    pub(super) tallied: Option<FlowId>,
    /// Whether a header of the PROXY protocol precedes each payload.
    proxied: bool,
    burst: u16,
}

impl LocalTarget {
    /// Where payloads of `peer` go.
    #[inline]
    pub(super) fn recipient(&self, peer: PeerId) -> Recipient {
        Recipient { destination: self.destination, source: self.source, owner: peer.0 }
    }
}

/// Where one datagram of the underlay came from.
#[derive(Clone, Copy, Debug)]
struct Origins {
    underlay: UnderlayId,
    path: Path,
    slot: usize,
    /// How long it waited in the kernel.
    age: Duration,
}

/// Where a batch of the underlay was received.
#[derive(Clone, Copy, Debug)]
pub struct Received {
    pub underlay: UnderlayId,
    /// Its index in `transport.listen`, if it is a listening socket.
    pub port: Option<usize>,
}

/// Takes the datagrams of the underlay that are no lane's of this worker.
pub trait Outside {
    /// Takes `datagram`, unless it is of a peer that `shares` does not admit; `meta` is its own, not that of the buffer that it came in.
    fn datagram(
        &mut self,
        received: Received,
        meta: &Meta,
        datagram: &[u8],
        shares: &mut Shares,
        now: Instant,
    ) -> Outcome<'_>;
}

/// What the data plane does with a datagram that is no lane's of this worker.
#[derive(Clone, Copy, Debug)]
pub enum Outcome<'a> {
    /// Nothing: the datagram was taken, or dropped and counted.
    Taken,
    /// Nothing: it was given to its control connection, which read it.
    Read,
    /// Hands it to the worker that its connection ID names; `port` is the index of its listening port in `transport.listen`.
    HandOff { worker: u8, port: usize },
    /// Sends this packet back to where it came from.
    Reply(&'a [u8]),
}

/// How frames came to this worker.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Came {
    /// On the control connection, in standard mode.
    ByConnection,
    /// Another worker received the packets and has counted them.
    FromWorker,
}

/// The position of a datagram in a batch.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Position {
    slot: usize,
    datagram: usize,
}

impl<P: PeerTable, O: Outside> Downlink<'_, P, O> {
    /// Takes a received batch of one underlay socket, beginning at `from`, until the turn has had its share of work; returns where it goes
    /// on in the next turn. Payloads are listed for delivery, not yet delivered.
    pub fn batch(
        &mut self,
        batch: &mut ReceiveBatch,
        received: Received,
        from: Position,
    ) -> Option<Position> {
        self.batch_from(batch, received, from, false)
    }

    /// Takes all of a batch that another worker received.
    pub fn whole_batch(&mut self, batch: &mut ReceiveBatch, received: Received) {
        let rest = self.batch_from(batch, received, Position::default(), true);
        debug_assert_eq!(rest, None, "nothing of it is left");
    }

    fn batch_from(
        &mut self,
        batch: &mut ReceiveBatch,
        received: Received,
        from: Position,
        whole: bool,
    ) -> Option<Position> {
        self.notes.recent = None;
        let mut rest = None;
        for slot in from.slot..batch.len() {
            let datagram = if slot == from.slot { from.datagram } else { 0 };
            if let Some(datagram) = self.buffer(batch, received, Position { slot, datagram }, whole) {
                rest = Some(Position { slot, datagram });
                break;
            }
        }
        self.confirm();
        rest
    }

    /// Confirms the openings of a batch.
    pub(super) fn confirm(&mut self) {
        while let Some((lane, number)) = self.notes.confirm.pop() {
            self.send_flow_message(lane, Context::Confirmed(number));
        }
    }

    /// Takes contents of DATAGRAM frames, one in each slot of `batch`: they came on the control connection, which
    /// counts as lane 0, or another worker received them on `lane`. Returns their cost in frames.
    pub fn frames(&mut self, batch: &mut ReceiveBatch, lane: LaneRef, came: Came) -> u64 {
        let (peer, before) = (lane.peer, self.notes.work.done);
        self.notes.recent = None;
        self.notes.work.frames(batch.len());
        let time = self.peers.data(peer).map(|state| state.config.queue.time);
        for slot in 0..batch.len() {
            let range = 0..batch.buffer(slot).len();
            let late = time.is_some_and(|time| batch.meta(slot).age > time);
            if late && self.expired(batch.buffer(slot), peer) {
                continue;
            }
            if came == Came::ByConnection
                && self.exceeds_rate(batch.buffer(slot).len(), peer)
                && self.over_rate(batch.buffer(slot), peer)
            {
                continue;
            }
            match PayloadKind::of(batch.buffer(slot)) {
                PayloadKind::Repair => {
                    self.notes.recent = None;
                    // Other workers hand over what is inside only.
                    let source = Source { hop: uplink::NextHop::Plain, lane };
                    self.repaired_frame(batch, FrameAt { slot, range }, source, late);
                }
                PayloadKind::Copied => {
                    self.notes.recent = None;
                    self.copied_frame(batch, FrameAt { slot, range }, lane, late);
                }
                PayloadKind::Packet { .. } | PayloadKind::Report(_) | PayloadKind::Other => {
                    self.frame(batch, slot, range, lane);
                }
            }
        }
        self.confirm();
        self.notes.work.done - before
    }

    /// Takes one buffer, datagrams of one 4-tuple that GRO joined, beginning at `from`. Returns the first one that it leaves,
    /// because the turn has had its share, unless it is to take the `whole`.
    fn buffer(
        &mut self,
        batch: &mut ReceiveBatch,
        received: Received,
        from: Position,
        whole: bool,
    ) -> Option<usize> {
        let Position { slot, datagram: first } = from;
        let meta = *batch.meta(slot);
        let origins = Origins {
            underlay: received.underlay,
            path: Path { destination: meta.source, source: meta.local, tos: 0 },
            slot,
            age: meta.age,
        };
        let mut known: Option<(ConnectionId, LaneId)> = None;
        for (number, place) in meta.segments().enumerate().skip(first) {
            if !whole && self.notes.work.is_over() {
                return Some(number);
            }
            let datagram = &batch.buffer(slot)[place.clone()];
            let lane = quic_core::destination(datagram).and_then(|cid| match known {
                Some((last, lane)) if last == cid => Some(lane),
                Some(_) | None => {
                    let lane = self.lanes.of_cid(cid)?;
                    known = Some((cid, lane));
                    Some(lane)
                }
            });
            match lane {
                Some(lane) => self.packet(batch, &origins, lane, place),
                None => {
                    let meta = Meta { len: datagram.len(), segment: datagram.len().max(1), ..meta };
                    self.outside(received, meta, datagram);
                }
            }
        }
        None
    }

    /// Takes a datagram that is no lane's of this worker: another worker's, a control connection's, or an unauthenticated sender's.
    fn outside(&mut self, received: Received, meta: Meta, datagram: &[u8]) {
        match self.outside.datagram(received, &meta, datagram, &mut self.notes.shares, self.now) {
            Outcome::Taken => {}
            Outcome::Read => self.notes.work.charge(work::CONTROL_PACKET),
            Outcome::HandOff { worker, port } => self.outgoing.packet(worker, port, meta, datagram),
            Outcome::Reply(packet) => {
                let path = Path { destination: meta.source, source: meta.local, tos: 0 };
                let (lanes, underlay, write) = (&mut *self.lanes, received.underlay, copy_of(packet));
                // A packet that finds no room is asked for again: the client repeats its Initial.
                let _sent = self.underlays.packet(lanes, underlay, &path, packet.len(), self.now, write);
            }
        }
    }

    /// Opens one packet of a lane in place and takes its frames.
    fn packet(&mut self, batch: &mut ReceiveBatch, origins: &Origins, id: LaneId, place: Range<usize>) {
        let Some(slot) = self.lanes.get_mut(id) else { return };
        if !self.notes.shares.admits(slot.peer) {
            return;
        }
        let before = self.notes.work.done;
        let (meta, buffer) = batch.buffer_mut(origins.slot);
        let ecn = meta.ecn;
        let opened = match slot.core.open(&mut buffer[place.clone()], self.now) {
            Ok(opened) => opened,
            Err(error) => {
                // The lane has counted the error. Only an error that ends the lane needs more.
                if let OpenError::Violation(_) | OpenError::IntegrityLimit = error {
                    self.notes.violations.push((id, error));
                }
                self.notes.shares.charge(slot.peer, 0);
                return;
            }
        };
        if let Some(recorder) = slot.core.recorder_mut() {
            recorder.note_ecn(ecn);
        }
        let mut ranges = std::mem::take(&mut self.notes.ranges);
        ranges.clear();
        ranges.extend(
            opened
                .datagrams()
                .map(|datagram| place.start + datagram.range.start..place.start + datagram.range.end),
        );
        self.notes.work.frames(ranges.len());
        let (challenge, response, number) =
            (opened.path_challenge, opened.path_response, opened.packet_number);
        let peer = slot.peer;
        let lane = LaneRef { peer, lane: slot.index };
        slot.note_arrival(number, self.now, origins.age);
        if slot.path().is_none() {
            // Of several listening sockets it is on the one that the dialler has chosen for it.
            slot.underlay = origins.underlay;
        }
        slot.came_by(&origins.path, number, place.len(), || challenge_data(self.rng), self.now);
        if let Some(data) = response
            && slot.on_path_response(data, self.now)
        {
            self.notes.lanes_up.push(id);
        }
        self.lanes.touch(id);
        if let Some(data) = challenge {
            self.answer_challenge(id, origins, data, place.len());
            self.notes.challenged.push((id, data));
        }
        let late = self.peers.data(peer).is_some_and(|state| origins.age > state.config.queue.time);
        if late {
            ranges.retain(|range| !self.expired(&batch.buffer(origins.slot)[range.clone()], peer));
        }
        if !ranges.is_empty() && self.exceeds_rate(place.len(), peer) {
            ranges.retain(|range| !self.over_rate(&batch.buffer(origins.slot)[range.clone()], peer));
        }
        let mut rest = &ranges[..];
        while let [first, after @ ..] = rest {
            match PayloadKind::of(&batch.buffer(origins.slot)[first.clone()]) {
                PayloadKind::Packet { partial, .. } => {
                    // It stays where it is until it is written: a payload that is moved down after it would overwrite it.
                    self.notes.recent = None;
                    self.ip(batch, origins.slot, first.start + 1..first.end, partial, peer);
                }
                PayloadKind::Report(fields) => self.report(id, fields),
                PayloadKind::Repair => {
                    self.notes.recent = None;
                    let frame = FrameAt { slot: origins.slot, range: first.clone() };
                    self.repaired_frame(batch, frame, Source { hop: uplink::NextHop::Lane(id), lane }, late);
                }
                PayloadKind::Copied => {
                    self.notes.recent = None;
                    let frame = FrameAt { slot: origins.slot, range: first.clone() };
                    self.copied_frame(batch, frame, lane, late);
                }
                PayloadKind::Other => match self.run(batch, origins.slot, rest, lane) {
                    0 => self.frame(batch, origins.slot, first.clone(), lane),
                    taken => {
                        rest = &rest[taken..];
                        continue;
                    }
                },
            }
            rest = after;
        }
        self.notes.ranges = ranges;
        if self.notes.marked > 0 {
            let marked = std::mem::take(&mut self.notes.marked);
            if let Some(slot) = self.lanes.get_mut(id) {
                slot.note_marked(marked);
            }
        }
        self.notes.shares.charge(peer, self.notes.work.done - before);
    }

    /// Drops a datagram that has waited for too long; false for a message about a flow, which is still useful.
    pub(super) fn expired(&mut self, data: &[u8], peer: PeerId) -> bool {
        match Context::decode(data) {
            Some(Context::Piece { number, datagram, total, offset, payload_at }) => {
                let cutting = Cutting { number, datagram, total, offset };
                return self.late_piece(peer, cutting, data.len() - payload_at);
            }
            Some(
                Context::Packet { payload_at, .. }
                | Context::Flow { payload_at, .. }
                | Context::Open { payload_at, .. },
            ) => self.refuse(peer, Some(data.len() - payload_at), DropReason::Expired),
            Some(
                Context::OpenEmpty { .. }
                | Context::Confirmed(_)
                | Context::Refused(..)
                | Context::Unknown(_)
                | Context::Closed(_)
                | Context::Report { .. }
                | Context::Numbered { .. }
                | Context::Repair { .. }
                | Context::Ask { .. }
                | Context::Copied { .. }
                | Context::Unsupported(_),
            )
            | None => return false,
        }
        true
    }

    /// Takes as many of the frames at `ranges`, which came on `lane`, as are datagrams of the flow of the payload before and of
    /// one length; returns how many. They end up end to end: one piece for the kernel.
    #[inline]
    fn run(
        &mut self,
        batch: &mut ReceiveBatch,
        slot: usize,
        ranges: &[Range<usize>],
        lane: LaneRef,
    ) -> usize {
        let Some(recent) = self.notes.recent.as_mut().filter(|recent| recent.lane == lane) else {
            return 0;
        };
        let (header, Some(first)) = (recent.header.as_slice(), ranges.first()) else { return 0 };
        let segment = first.len().saturating_sub(header.len());
        if segment == 0 {
            return 0;
        }
        let start = if recent.slot == slot { recent.end } else { first.start + header.len() };
        let (mut end, mut count) = (start, 0);
        for range in ranges {
            if range.len() != first.len() || !batch.buffer(slot)[range.clone()].starts_with(header) {
                break;
            }
            end = batch.move_down(slot, range.start + header.len()..range.end, end).end;
            count += 1;
        }
        if count == 0 {
            return 0;
        }
        (recent.slot, recent.end) = (slot, end);
        let (target, peer) = (recent.target, lane.peer);
        if let Some(state) = self.peers.data_mut(peer) {
            state.relay.downlink.receive(count as u64, (end - start) as u64);
            state.relay.count_delivery(count as u64, (end - start) as u64, target.tallied);
        }
        match self.locals.delivery(target.socket) {
            Some(list) => list.push_run(target.recipient(peer), slot, start..end, segment, target.burst),
            None => {
                if let Some(state) = self.peers.data_mut(peer) {
                    state.relay.downlink.drop(DropReason::SocketOpen, count as u64);
                }
            }
        }
        count
    }

    /// Takes the data of one DATAGRAM frame, which lies at `range` of the buffer in `slot` and came on `lane`.
    pub(super) fn frame(
        &mut self,
        batch: &mut ReceiveBatch,
        slot: usize,
        range: Range<usize>,
        lane: LaneRef,
    ) {
        let peer = lane.peer;
        let buffer = batch.buffer(slot);
        let data = &buffer[range.clone()];
        let Some(state) = self.peers.data_mut(peer) else { return };
        let context = Context::decode(data);
        self.notes.recent = None;
        let known = context.and_then(|context| state.relay.flows.of_number(context.flow()?));
        if known.is_none()
            && let Some(context) = &context
        {
            if state.is_too_fast(context, self.now) {
                return state.refuse_opening(context, data.len());
            }
            if self.worker.count > 1 && state.ends_too_many(context, self.now) {
                return state.relay.stats.count_received(context);
            }
            if let Some(worker) = other_worker(&state.relay, context, self.worker) {
                let payload = context.payload_at().map(|at| data.len() - at);
                if payload.is_some() {
                    // The other worker delivers it; the peer is charged where its packets come.
                    self.notes.work.charge(work::DELIVERY);
                }
                self.outgoing.frame(worker, lane, payload, *batch.meta(slot), data);
                return;
            }
        }
        let account = &mut state.relay.downlink;
        match context {
            Some(Context::Packet { partial, payload_at }) => {
                self.ip(batch, slot, range.start + payload_at..range.end, partial, peer);
            }
            Some(Context::Flow { number, payload_at }) => {
                account.receive(1, (data.len() - payload_at) as u64);
                let payload = range.start + payload_at..range.end;
                match known {
                    Some(flow) => {
                        let end = payload.end;
                        let target = self.deliver(batch, lane, flow, slot, payload);
                        let header = confirmed_header(number);
                        self.notes.recent = target.map(|target| Recent { lane, header, target, slot, end });
                    }
                    None => {
                        account.drop(DropReason::UnknownFlow, 1);
                        self.answer_unknown(lane, number);
                    }
                }
            }
            Some(Context::Piece { number, datagram, total, offset, payload_at }) => {
                let bytes = range.start + payload_at..range.end;
                let cutting = Cutting { number, datagram, total, offset };
                self.piece(batch, slot, bytes, lane, cutting, known);
            }
            Some(Context::Open { number, service, client, payload_at }) => {
                account.receive(1, (data.len() - payload_at) as u64);
                let payload = range.start + payload_at..range.end;
                match self.opened(lane, number, service, client) {
                    Ok(flow) => {
                        self.deliver(batch, lane, flow, slot, payload);
                    }
                    Err(reason) => self.drop(peer, reason),
                }
            }
            Some(message @ Context::OpenEmpty { number, service, client }) => {
                state.relay.stats.count_received(&message);
                // A refusal has been sent; there is no datagram to count.
                let _refused = self.opened(lane, number, service, client).is_err();
            }
            Some(
                message @ (Context::Confirmed(_)
                | Context::Refused(..)
                | Context::Unknown(_)
                | Context::Closed(_)),
            ) => {
                state.relay.stats.count_received(&message);
                if let Some(flow) = known {
                    self.message(peer, flow, message);
                }
            }
            // On the control connection, or in a longer form: not about a lane.
            Some(Context::Report { .. }) => state.relay.stats.reports.count(false),
            Some(Context::Unsupported(_)) => self.refuse(peer, Some(data.len()), DropReason::UnknownContext),
            // Those of lanes and of control connections have been unwrapped: here they are inside one another.
            Some(
                Context::Numbered { .. }
                | Context::Repair { .. }
                | Context::Ask { .. }
                | Context::Copied { .. },
            )
            | None => {
                self.refuse(peer, Some(data.len()), DropReason::Malformed);
            }
        }
    }

    /// Lists a payload for delivery to its flow's socket, and says where further ones may go as they are.
    fn deliver(
        &mut self,
        batch: &mut ReceiveBatch,
        lane: LaneRef,
        id: FlowId,
        slot: usize,
        payload: Range<usize>,
    ) -> Option<LocalTarget> {
        let target = self.local_target(lane, id)?;
        let relay = &mut self.peers.data_mut(lane.peer)?.relay;
        relay.count_delivery(1, payload.len() as u64, target.tallied);
        if target.proxied {
            self.list_proxied(batch, lane.peer, id, &target, slot, payload);
            return None;
        }
        self.list(lane.peer, &target, slot, payload);
        Some(target)
    }

    /// Where the payloads of a flow go, one of which has come on `lane`: it is confirmed, if it was not yet.
    #[inline]
    pub(super) fn local_target(&mut self, lane: LaneRef, id: FlowId) -> Option<LocalTarget> {
        let peer = lane.peer;
        let state = self.peers.data_mut(peer)?;
        let proxied = state.relay.flows.told.header(id).is_some();
        let flow = state.relay.flows.get_mut(id)?;
        flow.last_active = self.now;
        let tallied = flow.tally.is_some().then_some(id);
        let target = match flow.origin {
            Origin::Upstream { socket, service } => {
                // Answers take the lane that the flow came by.
                flow.lane = lane.lane;
                let burst = self.config.services.get(service).map_or(1, |service| service.burst);
                LocalTarget { socket, destination: None, source: None, tallied, proxied, burst }
            }
            Origin::Ingress { client, .. } => {
                let newly_confirmed = flow.standing != Standing::Confirmed;
                flow.standing = Standing::Confirmed;
                if newly_confirmed && let Some(mut uplink) = self.uplink(peer) {
                    uplink.confirmed(id);
                }
                let destination = Some(client.address);
                LocalTarget {
                    socket: client.socket,
                    destination,
                    source: client.local,
                    tallied,
                    proxied: false,
                    burst: INGRESS_BURST,
                }
            }
        };
        Some(LocalTarget { burst: self.locals.burst(target.burst), ..target })
    }

    /// Lists a payload for delivery to its local socket.
    #[inline]
    pub(super) fn list(&mut self, peer: PeerId, target: &LocalTarget, slot: usize, payload: Range<usize>) {
        self.notes.work.charge(work::DELIVERY);
        match self.locals.delivery(target.socket) {
            Some(list) => list.push(target.recipient(peer), slot, payload, target.burst),
            None => self.drop(peer, DropReason::SocketOpen),
        }
    }

    pub(super) fn send_flow_message(&mut self, LaneRef { peer, lane }: LaneRef, message: Context) {
        if let Some(mut uplink) = self.uplink(peer) {
            // A message that finds no room is sent when the peer repeats its opening or its datagram.
            uplink.send_flow_message(lane, message);
        }
    }

    /// Tells the peer that a flow is not known, within its allowance of answers.
    pub(super) fn answer_unknown(&mut self, lane: LaneRef, number: FlowNumber) {
        let Some(state) = self.peers.data_mut(lane.peer) else { return };
        if state.allowances.answers.take(1, self.now) {
            self.notes.work.charge(work::ANSWER);
            self.send_flow_message(lane, Context::Unknown(number));
        }
    }

    pub(super) fn drop(&mut self, peer: PeerId, reason: DropReason) {
        if let Some(state) = self.peers.data_mut(peer) {
            state.relay.downlink.drop(reason, 1);
        }
    }

    /// The way back to a peer.
    pub(super) fn uplink(&mut self, peer: PeerId) -> Option<Uplink<'_>> {
        let state = self.peers.data_mut(peer)?;
        Some(state.uplink(self.lanes, self.underlays, self.outgoing, self.now))
    }

    /// Answers a PATH_CHALLENGE in a packet of `len` bytes to where it came from (RFC 9000 §8.2.2), unless the lane is draining.
    fn answer_challenge(&mut self, id: LaneId, origins: &Origins, data: [u8; 8], len: usize) {
        let now = self.now;
        let most = self.lanes.get_mut(id).and_then(|slot| slot.answer_bytes(&origins.path, len));
        let Some(most) = most else { return };
        self.underlays.packet(self.lanes, origins.underlay, &origins.path, most, now, |lanes, tail| {
            lanes.get_mut(id)?.core.seal_path_response(data, tail, now).ok()
        });
    }
}

/// Answers to clients per send: a client's socket is as patient as the service's would be.
const INGRESS_BURST: u16 = MOST_SEGMENTS;

/// The other worker that has the flow of `context`, which is unknown at `worker`; a new flow is claimed for `worker`.
fn other_worker(relay: &DatagramRelay, context: &Context, worker: WorkerId) -> Option<u8> {
    let WorkerId { index: own, count: workers } = worker;
    if workers == 1 {
        return None;
    }
    let number = context.flow()?;
    if context.opens() && !relay.flows.is_ours(number) {
        return Some(relay.flows.registry.claim(number, own)).filter(|worker| *worker != own);
    }
    relay.flows.elsewhere(number)
}
