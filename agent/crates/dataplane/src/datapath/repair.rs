//! Payloads that are repaired if the path loses them: numbered on the way to the peer; put in order, recovered and asked for on the way
//! from it. The crate `repair` decides, this file moves the bytes.
//!
//! ```text
//!  uplink.rs ──► begin_repair: numbers or not ──► lanes/numbers.rs: number, keep, repair symbols
//!
//!  downlink.rs: context 12 ──► numbered ─┬─► frame, ip: at once
//!               context 13 ──► symbol   ─┴─► Released ──► released: in a batch of their own, after the present one
//!               context 14 ──► asked ──► payloads again
//!
//!  a lane's timer, the end of a turn ──► repair_due: requests, symbols after a silence, what waited for too long
//! ```

use std::{ops::Range, time::Duration};

use base::ids::{LaneRef, PeerId};
use ip::ecn::{self, Decapsulated};
use net::{ReceiveBatch, batch::Meta};
use repair::{Ask, DISTANCE_BYTES, Delivered, LaneRepair, Outcome, Receiver, RepairClass, Repaired};
use wire::{
    context::{ASK_BYTES, Context, FlowNumber, NUMBER_BYTES, PayloadKind},
    messages::Features,
    repair_terms::{Order, StreamNumber, StreamOf, Terms},
};

use crate::{
    datapath::{
        downlink::{Downlink, Outside},
        segments::Sending,
        uplink::{NextHop, Uplink},
        work,
    },
    lanes::{Frame, LaneId, LaneState, Lanes, Payloads},
    peer::{Link, PeerData, PeerTable},
    relay::{DropReason, Origin},
};

/// Symbols that are multiplied and added for the work of one frame: each takes some 30 ns.
const SYMBOLS_PER_UNIT: u64 = 4;

/// Payloads that one frame of requests gets at most.
const MOST_ASKED: u16 = 256;

/// Where a repaired frame came from.
#[derive(Clone, Copy, Debug)]
pub(super) struct Source {
    /// A lane, or the control connection.
    pub(super) hop: NextHop,
    pub(super) lane: LaneRef,
}

/// Where a frame lies in the batch.
#[derive(Clone, Debug)]
pub(super) struct FrameAt {
    /// The index of its buffer.
    pub(super) slot: usize,
    pub(super) range: Range<usize>,
}

/// Frames that waited for others, or were recovered: they are taken after the present batch.
#[derive(Debug, Default)]
pub struct Released {
    bytes: Vec<u8>,
    frames: Vec<ReleasedFrame>,
}

#[derive(Debug)]
struct ReleasedFrame {
    /// The lane that it came on.
    lane: LaneRef,
    len: usize,
}

impl Released {
    fn push(&mut self, lane: LaneRef, frame: &[u8]) {
        self.bytes.extend_from_slice(frame);
        self.frames.push(ReleasedFrame { lane, len: frame.len() });
    }

    /// Keeps what a receiver delivers beside the payload at hand, which came on `lane`.
    fn keep(&mut self, lane: LaneRef) -> impl FnMut(Delivered<'_>) {
        move |delivered| {
            if let Delivered::Other(frame) = delivered {
                self.push(lane, frame);
            }
        }
    }

    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.frames.is_empty()
    }

    pub(super) fn len(&self) -> usize {
        self.frames.len()
    }

    /// Forgets the frames, and keeps the memory of as many as are usual.
    pub fn clear(&mut self) {
        const USUAL_BYTES: usize = 256 << 10;
        self.bytes.clear();
        self.bytes.shrink_to(USUAL_BYTES);
        self.frames.clear();
        self.frames.shrink_to(USUAL_BYTES / 64);
    }

    /// Fills `batch` with frames in their order, from that with the index `first` on; returns the lanes that they came on.
    pub fn fill(&self, batch: &mut ReceiveBatch, first: usize) -> Vec<LaneRef> {
        let (before, rest) = self.frames.split_at(first);
        let mut at: usize = before.iter().map(|frame| frame.len).sum();
        let mut lanes = Vec::new();
        for ReleasedFrame { lane, len } in rest {
            let frame = &self.bytes[at..at + len];
            let meta = Meta { len: *len, segment: (*len).max(1), ..Meta::EMPTY };
            if !batch.push(meta, frame) {
                break;
            }
            at += len;
            lanes.push(*lane);
        }
        lanes
    }
}

impl PeerData {
    /// Drops what waits for missing payloads: nothing more comes on the lane that it came on.
    pub fn give_up_repair(&mut self, mut streams: LaneRepair) {
        for receiver in &mut streams.receivers {
            let waiting = receiver.finish();
            self.relay.downlink.receive(waiting.datagrams, waiting.bytes);
            self.relay.downlink.drop(DropReason::LaneClosed, waiting.datagrams);
        }
        self.relay.repairs.take_counts(&mut streams);
    }

    /// Takes the counts of the streams of a peer in standard mode.
    pub fn take_plain_repair_counts(&mut self) {
        let plain = self.link.as_mut().and_then(|link| link.plain.as_mut());
        if let Some(streams) = plain.and_then(|plain| plain.repair.as_mut()) {
            self.relay.repairs.take_counts(streams);
        }
    }

    /// How we repair IP packets with this traffic class that we send to the peer; `None` also if it cannot.
    #[inline]
    #[must_use]
    pub fn repair_of_packets(&self, traffic_class: u8) -> Option<Terms> {
        self.packet_repair().filter(|_| self.config.repair.dscp.contains(traffic_class >> 2))
    }
}

impl Uplink<'_> {
    /// How datagrams of a flow are repaired, if its service wants it and the peer can.
    #[inline]
    pub(super) fn repair_of(&self, origin: &Origin, number: FlowNumber) -> Option<RepairClass> {
        let (terms, stream) = match *origin {
            Origin::Ingress { ingress, .. } => {
                let service = self.relay.services.of(ingress)?;
                let known = u16::try_from(service.number.0).ok()?;
                (service.repair?, StreamOf::ReceiversService(known))
            }
            Origin::Upstream { service, .. } => {
                (self.relay.repairs.of_own(service)?, StreamOf::SendersService(u16::try_from(service).ok()?))
            }
        };
        self.link.as_deref().filter(|link| link.has(Features::REPAIR))?;
        // The lowest bit says which end opened the flow.
        Some(RepairClass { stream: StreamNumber::of(stream)?, bucket: (number.0 >> 1) as u8, terms })
    }

    /// Begins a run of payloads for repair: whether they get numbers now. Over TCP they do not need any.
    pub(super) fn begin_repair(
        &mut self,
        hop: NextHop,
        class: &RepairClass,
        payloads: usize,
    ) -> Option<Repaired> {
        let RepairClass { stream, bucket, terms } = *class;
        let (tos, now) = (self.tos, self.now);
        let memory = &self.relay.flows.registry.repair;
        let (repair, counts) = match hop {
            NextHop::Lane(lane) => {
                let slot = self.lanes.get_mut(lane)?;
                let underlay = self.underlays.get(slot.underlay).zip(slot.path());
                if underlay.is_some_and(|(underlay, path)| underlay.is_over_tcp(&path.destination)) {
                    return None;
                }
                let counts = slot.path_counts(self.relay.account_of(slot.line).congested());
                (&mut slot.repair, Some(counts))
            }
            NextHop::Plain => {
                let plain = self.link.as_deref_mut()?.plain.as_mut().filter(|plain| !plain.is_over_tcp)?;
                (&mut plain.repair, plain.path)
            }
            NextHop::Worker { .. } => return None,
        };
        let streams = repair.get_or_insert_with(|| Box::new(LaneRepair::new(memory)));
        let numbered = streams.sender_for(stream, &terms, payloads).is_some_and(|sender| {
            sender.tos = tos;
            sender.on_lane = matches!(hop, NextHop::Lane(_));
            sender.begin(&terms, payloads, || counts, now)
        });
        Some(Repaired { stream, bucket, numbered })
    }

    /// Whether the next payload is to be dropped instead of sent, so that its flow learns that the path is full: only of IP packets, whose
    /// TCP slows down for that.
    #[inline]
    pub(super) fn signals_congestion(
        &mut self,
        hop: NextHop,
        left: &Payloads<'_>,
        sending: &Sending,
    ) -> bool {
        /// Nobody slows down for the loss of an acknowledgement.
        const LEAST_BYTES: usize = 500;
        let is_held = |class: &RepairClass| {
            class.terms.order == Order::Hold && class.stream.carries() == StreamOf::Packets
        };
        let Some(class) = sending.repair.filter(is_held) else { return false };
        let now = self.now;
        let streams = self.streams(hop).filter(|_| left.bytes_of(1) >= LEAST_BYTES).and_then(Option::as_mut);
        let sender = streams.and_then(|streams| streams.sender(class.stream));
        sender.is_some_and(|sender| sender.signals(class.bucket, now))
    }

    /// Answers requests for payloads of a stream of ours.
    fn answer(&mut self, hop: NextHop, stream: StreamNumber, requests: &[u8]) -> u64 {
        let Some(mut streams) = self.streams(hop).and_then(Option::take) else { return 0 };
        let (mut work, unrepaired) = (0, self.unrepaired());
        if let Some(sender) = streams.sender(stream) {
            let (tos, next) = (sender.tos, sender.next());
            let mut left = MOST_ASKED;
            for request in requests.as_chunks::<ASK_BYTES>().0 {
                let mut ask = Ask::decode(*request, next);
                ask.count = ask.count.min(left);
                left -= ask.count;
                work += u64::from(ask.count) / 8;
                sender.answer(&ask, |header, frame| {
                    work += work::ANSWER;
                    let frame = Frame { header, payload: frame, counted: false, tos };
                    // One that finds no room is asked for again.
                    let _sent = self.push(hop, frame, &unrepaired).is_ok();
                });
            }
        }
        if let Some(place) = self.streams(hop) {
            *place = Some(streams);
        }
        work
    }

    /// Sends the requests that are due, and repair symbols after a silence; returns how many frames it sent.
    fn repair_due(&mut self, hop: NextHop, streams: &mut LaneRepair, rtt: Duration) -> u64 {
        let (now, unrepaired, mut sent) = (self.now, self.unrepaired(), 0);
        for sender in &mut streams.senders {
            sender.forget(now);
            let tos = sender.tos;
            while let Some((header, symbol)) = sender.repair(now) {
                let frame = Frame { header: header.as_slice(), payload: symbol, counted: false, tos };
                if self.push(hop, frame, &unrepaired).is_err() {
                    break;
                }
                sent += 1;
            }
            sender.repeat(now, |header, frame| {
                let frame = Frame { header, payload: frame, counted: false, tos };
                sent += u64::from(self.push(hop, frame, &unrepaired).is_ok());
            });
        }
        let (mut asks, mut requests) = (Vec::new(), Vec::new());
        for receiver in &mut streams.receivers {
            asks.clear();
            receiver.ask(rtt, now, &mut asks);
            let header = Context::Ask { stream: receiver.stream, payload_at: 0 }.encode();
            // What fits into any packet.
            for asks in asks.chunks(128) {
                requests.push((header, asks.iter().flat_map(Ask::encode).collect::<Vec<u8>>()));
            }
        }
        // Twice, in packets of their own: a request is lost as easily as a payload. Those of all streams share them.
        for _ in 0..if requests.is_empty() { 0 } else { 2 } {
            for (header, asks) in &requests {
                let frame = Frame { header: header.as_slice(), payload: asks, counted: false, tos: self.tos };
                sent += u64::from(self.push(hop, frame, &unrepaired).is_ok());
            }
            if let NextHop::Lane(_) = hop {
                self.underlays.finish(self.lanes, now);
            }
        }
        sent
    }

    fn streams(&mut self, hop: NextHop) -> Option<&mut Option<Box<LaneRepair>>> {
        streams_of(hop, self.lanes, self.link.as_deref_mut())
    }
}

impl<P: PeerTable, O: Outside> Downlink<'_, P, O> {
    /// Takes a frame with a numbered payload, a repair symbol or requests. A payload that is `late` is dropped for that, and not missing.
    pub(super) fn repaired_frame(
        &mut self,
        batch: &mut ReceiveBatch,
        frame: FrameAt,
        source: Source,
        late: bool,
    ) {
        let FrameAt { slot, range } = frame;
        let Source { hop, lane } = source;
        let data = &batch.buffer(slot)[range.clone()];
        match Context::decode(data) {
            Some(Context::Numbered { stream, number, distance, payload_at }) => {
                let inner = FrameAt { slot, range: range.start + payload_at..range.end };
                self.numbered(batch, inner, source, &Numbers { stream, number, distance }, late);
            }
            Some(Context::Repair { stream, header, payload_at }) => {
                let receiver = receiver_of(self.peers, self.lanes, source, stream);
                let Some(receiver) = receiver else { return };
                receiver.allow(self.notes.releases(lane.peer));
                let before = self.notes.released.len();
                let mut released = self.notes.released.keep(lane);
                let work = receiver.repair(header, &data[payload_at..], self.now, &mut released);
                drop(released);
                self.notes.work.charge(work / SYMBOLS_PER_UNIT);
                self.notes.charge_released(before);
            }
            Some(Context::Ask { stream, payload_at }) => {
                let requests = &data[payload_at..];
                let work = self.uplink(lane.peer).map(|mut uplink| uplink.answer(hop, stream, requests));
                self.notes.work.charge(work.unwrap_or(0));
            }
            // A context that is cut off.
            Some(_) | None => self.refuse(lane.peer, Some(data.len()), DropReason::Malformed),
        }
    }

    /// Takes a numbered payload, whose frame is `inner`.
    fn numbered(
        &mut self,
        batch: &mut ReceiveBatch,
        inner: FrameAt,
        source: Source,
        numbers: &Numbers,
        late: bool,
    ) {
        let FrameAt { slot, range: inner } = inner;
        let lane = source.lane;
        let Numbers { stream, number, distance } = *numbers;
        let now = self.now;
        if !belongs(&batch.buffer(slot)[inner.clone()], stream) {
            return self.refuse(lane.peer, Some(inner.len()), DropReason::Malformed);
        }
        let receiver = receiver_of(self.peers, self.lanes, source, stream);
        let (before, most) = (self.notes.released.len(), self.notes.releases(lane.peer));
        let released = &mut self.notes.released;
        let mut at_once = receiver.is_none();
        if let Some(receiver) = receiver {
            receiver.allow(most);
            let holds = receiver.terms.order == Order::Hold;
            let number = receiver.complete(number);
            let (meta, buffer) = batch.buffer_mut(slot);
            let ecn = meta.ecn;
            let kept = &buffer[inner.start - DISTANCE_BYTES..inner.end];
            let work = receiver.learn(number, kept, now, &mut released.keep(lane));
            self.notes.work.charge(work / SYMBOLS_PER_UNIT);
            let frame = &mut buffer[inner.clone()];
            let marking = mark(frame, ecn);
            let frame = &*frame;
            let payload =
                || Context::decode(frame).and_then(|context| Some(frame.len() - context.payload_at()?));
            // One that cannot carry its mark is dropped, as is one that does not wait; its number is settled all the same.
            let is_dropped = marking == Marking::Impossible;
            let kept = if is_dropped { &[][..] } else { frame };
            let outcome = receiver.receive(number, distance, kept, now, &mut |delivered| match delivered {
                Delivered::This if is_dropped => {}
                // Nothing overtakes what is released before it.
                Delivered::This if !holds || released.is_empty() => at_once = true,
                Delivered::This => released.push(lane, frame),
                Delivered::Other(frame) => released.push(lane, frame),
            });
            match outcome {
                Outcome::Delivered | Outcome::Held if is_dropped => {
                    self.notes.marked += 1;
                    self.refuse(lane.peer, payload(), DropReason::NotEcnCapable);
                }
                Outcome::Delivered => self.notes.marked += u64::from(marking == Marking::Marked),
                Outcome::Held => {
                    self.notes.work.charge(work::KEPT);
                    self.notes.marked += u64::from(marking == Marking::Marked);
                }
                Outcome::Duplicate => {}
                Outcome::Late => self.refuse(lane.peer, payload(), DropReason::Expired),
                Outcome::Refused => self.refuse(lane.peer, payload(), DropReason::Malformed),
            }
        } else if let Some(streams) = self.streams(source).and_then(Option::as_mut) {
            streams.came_early(stream, number);
        }
        self.notes.charge_released(before);
        if !at_once || late && self.expired(&batch.buffer(slot)[inner.clone()], lane.peer) {
            return;
        }
        self.inner_frame(batch, slot, inner, lane);
    }

    /// Takes the frame in a numbered payload.
    fn inner_frame(&mut self, batch: &mut ReceiveBatch, slot: usize, inner: Range<usize>, lane: LaneRef) {
        match PayloadKind::of(&batch.buffer(slot)[inner.clone()]) {
            PayloadKind::Packet { partial, .. } => {
                self.ip(batch, slot, inner.start + 1..inner.end, partial, lane.peer);
            }
            PayloadKind::Report(_) | PayloadKind::Repair | PayloadKind::Copied | PayloadKind::Other => {
                self.frame(batch, slot, inner, lane);
            }
        }
    }

    /// Drops a payload of `bytes` that is not delivered; `None`: it was no payload.
    pub(super) fn refuse(&mut self, peer: PeerId, bytes: Option<usize>, reason: DropReason) {
        if let Some((state, bytes)) = self.peers.data_mut(peer).zip(bytes) {
            state.relay.downlink.receive(1, bytes as u64);
            state.relay.downlink.drop(reason, 1);
        }
    }

    /// Takes frames that were released, which lie in the slots of `batch` in this order.
    pub fn released(&mut self, batch: &mut ReceiveBatch, lanes: &[LaneRef]) {
        for (slot, lane) in lanes.iter().enumerate() {
            let range = 0..batch.buffer(slot).len();
            let before = self.notes.work.done;
            self.inner_frame(batch, slot, range, *lane);
            self.notes.work.prepaid(before, work::RELEASE);
            let more = self.notes.work.done - before;
            if more > 0 {
                self.notes.shares.charge_later(lane.peer, more);
            }
        }
        self.confirm();
    }

    /// Does what is due for the payloads of a lane: gives up what has missed its deadline, asks for what is missing, sends symbols after a
    /// silence, and takes the counts. Returns the cost in frames; when it reaches `most`, what is left is due in the next turn.
    pub fn repair_lane(&mut self, id: LaneId, most: u64) -> u64 {
        let Some(slot) = self.lanes.get_mut(id) else { return 0 };
        if let (LaneState::Draining { .. }, Some(streams)) = (slot.state, &mut slot.repair) {
            streams.close();
        }
        let lane = LaneRef { peer: slot.peer, lane: slot.index };
        let (sends, rtt) = (slot.is_up(), slot.core.rtt().smoothed());
        self.repair_streams(Source { hop: NextHop::Lane(id), lane }, sends, rtt, most)
    }

    /// Does the same for a peer in standard mode, whose control connection has the round trip `rtt`.
    pub fn repair_plain(&mut self, peer: PeerId, rtt: Duration, most: u64) -> u64 {
        let lane = LaneRef { peer, lane: 0 };
        self.repair_streams(Source { hop: NextHop::Plain, lane }, true, rtt, most)
    }

    fn repair_streams(&mut self, source: Source, sends: bool, rtt: Duration, most: u64) -> u64 {
        let Source { hop, lane } = source;
        let Some(mut streams) = self.streams(source).and_then(Option::take) else { return 0 };
        let before = self.notes.work.done;
        let mut payloads = usize::try_from(most / work::RELEASE).unwrap_or(usize::MAX);
        for receiver in &mut streams.receivers {
            receiver.set_rtt(rtt);
            receiver.allow(payloads);
            let waiting = self.notes.released.len();
            receiver.expire(self.now, &mut self.notes.released.keep(lane));
            payloads = receiver.allowance();
            self.notes.work.charge((self.notes.released.len() - waiting) as u64 * work::RELEASE);
        }
        if sends && let Some(mut uplink) = self.uplink(lane.peer) {
            let packets = uplink.repair_due(hop, &mut streams, rtt);
            self.notes.work.charge(packets * work::ANSWER);
        }
        let cost = self.notes.work.done - before;
        if cost > 0 {
            self.notes.shares.charge_later(lane.peer, cost);
        }
        if let Some(state) = self.peers.data_mut(lane.peer) {
            state.relay.repairs.take_counts(&mut streams);
        }
        if let Some(place) = self.streams(source) {
            *place = Some(streams);
        }
        cost
    }

    fn streams(&mut self, Source { hop, lane }: Source) -> Option<&mut Option<Box<LaneRepair>>> {
        let link = self.peers.data_mut(lane.peer).and_then(|state| state.link.as_mut());
        streams_of(hop, self.lanes, link)
    }
}

/// What precedes the frame in a numbered payload.
struct Numbers {
    stream: StreamNumber,
    number: u32,
    distance: u16,
}

/// Where the streams of a lane, or of the control connection, are kept.
fn streams_of<'a>(
    hop: NextHop,
    lanes: &'a mut Lanes,
    link: Option<&'a mut Link>,
) -> Option<&'a mut Option<Box<LaneRepair>>> {
    match hop {
        NextHop::Lane(lane) => Some(&mut lanes.get_mut(lane)?.repair),
        NextHop::Plain => Some(&mut link?.plain.as_mut()?.repair),
        NextHop::Worker { .. } => None,
    }
}

/// The end of a stream that the peer numbers, which begins now if it has not.
fn receiver_of<'a, P: PeerTable>(
    peers: &'a mut P,
    lanes: &'a mut Lanes,
    Source { hop, lane }: Source,
    stream: StreamNumber,
) -> Option<&'a mut Receiver> {
    let state = peers.data_mut(lane.peer)?;
    let terms = state.relay.repairs.of_stream(stream);
    let memory = &state.relay.flows.registry.repair;
    let streams = streams_of(hop, lanes, state.link.as_mut())?;
    let streams = streams.get_or_insert_with(|| Box::new(LaneRepair::new(memory)));
    streams.receiver_for(stream, terms.as_ref())
}

/// Whether a frame is one that a sender may put into this stream: an IP packet, or a datagram of a flow.
fn belongs(frame: &[u8], stream: StreamNumber) -> bool {
    let is_packet = match Context::decode(frame) {
        Some(Context::Packet { .. }) => true,
        Some(
            Context::Flow { .. } | Context::Open { .. } | Context::OpenEmpty { .. } | Context::Piece { .. },
        ) => false,
        Some(
            Context::Confirmed(_)
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
    };
    is_packet == matches!(stream.carries(), StreamOf::Packets)
}

/// What became of the mark of the packet that an IP packet came in.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Marking {
    /// There is none, or the packet has it.
    Nothing,
    Marked,
    /// The packet cannot carry it: it is to be dropped (RFC 6040 §4.2).
    Impossible,
}

/// Marks the IP packet in a frame that came in a packet with the mark `outer`: it may wait, and then nobody knows of that packet any more.
fn mark(frame: &mut [u8], outer: u8) -> Marking {
    if outer == ecn::CE
        && let PayloadKind::Packet { packet, .. } = PayloadKind::of(frame)
        && let Ok(view) = ip::view::IpView::parse(packet)
    {
        return match ecn::decapsulate(view.traffic_class & 0b11, outer) {
            Decapsulated::Keep => Marking::Nothing,
            Decapsulated::Mark(bits) => {
                ecn::set_ecn(&mut frame[1..], bits);
                Marking::Marked
            }
            Decapsulated::Drop => Marking::Impossible,
        };
    }
    Marking::Nothing
}

const _: () = assert!(NUMBER_BYTES == 4 + DISTANCE_BYTES, "the distance precedes the frame");
