//! Datagrams that fit into no packet: cut into pieces on the way to the peer, put together on the way from it. Both ends have
//! said that they can, and the service wants it; else such a datagram is dropped.

use std::ops::Range;

use base::ids::{LaneRef, PeerId};
use net::{ReceiveBatch, batch::MAX_MESSAGE_BYTES};
use wire::{
    context::{FlowNumber, MOST_DATAGRAM},
    messages::Features,
};

use crate::{
    datapath::{
        downlink::{Downlink, Outside},
        segments::{CountedHeader, Cutting, Segments, Sending},
        uplink::{NextHop, Uplink, not_sent},
    },
    lanes::{Frame, PushError},
    peer::{PeerTable, TooLarge},
    relay::{DropReason, FlowId, Origin, PartlySent, Piece, flow::confirmed_header, fragments::LEAST_PIECE},
};

/// The bytes of datagrams that are put together before those that are complete are delivered: four full GSO messages.
pub(super) const MOST_JOINED: usize = 4 * MAX_MESSAGE_BYTES;

/// How far a datagram was cut.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Progress {
    /// All of it is in packets.
    Done,
    /// There is no room, or no lane, for more of it.
    Stopped(PushError, Cutting),
    /// Even a piece would be too small: the largest payload that fits now has `most` bytes.
    TooSmall { most: usize },
}

impl Uplink<'_> {
    /// Whether datagrams of a flow that fit into no packet travel in pieces.
    pub(super) fn may_fragment(&self, origin: &Origin) -> bool {
        self.link.as_deref().is_some_and(|link| link.has(Features::PIECES)) && self.wants_pieces(origin)
    }

    /// Whether the service of a flow wants such datagrams to travel in pieces.
    pub(super) fn wants_pieces(&self, origin: &Origin) -> bool {
        match *origin {
            Origin::Ingress { ingress, .. } => {
                self.relay.services.of(ingress).is_some_and(|service| service.fragment)
            }
            Origin::Upstream { service, .. } => self.relay.fragmenter.is_for(service),
        }
    }

    /// The start of cutting the datagram `data` of a flow; `None` if it is too large to travel in pieces.
    pub(super) fn cutting(&mut self, number: FlowNumber, data: &[u8]) -> Option<Cutting> {
        let total = u16::try_from(data.len()).ok().filter(|total| usize::from(*total) <= MOST_DATAGRAM)?;
        Some(Cutting { number, datagram: self.relay.fragmenter.number(), total, offset: 0 })
    }

    /// Puts the rest of a datagram into packets. Only its last piece is counted: the datagram shares the fate of that packet.
    fn cut(&mut self, hop: NextHop, mut cutting: Cutting, mut left: &[u8], sending: &Sending) -> Progress {
        loop {
            let header = cutting.header();
            let room = match self.room(hop, header.as_slice().len(), sending) {
                Ok(room) => room,
                Err(error) => return Progress::Stopped(error, cutting),
            };
            let (piece, after) = left.split_at(room.piece(left.len()));
            let counted = after.is_empty();
            if !counted && piece.len() < LEAST_PIECE {
                return Progress::TooSmall { most: room.empty };
            }
            let frame = Frame { header: header.as_slice(), payload: piece, counted, tos: sending.tos };
            if let Err(error) = self.push(hop, frame, sending) {
                return Progress::Stopped(error, cutting);
            }
            self.relay.stats.fragmented.pieces += 1;
            if counted {
                self.relay.stats.fragmented.datagrams += 1;
                self.note_sent(1, usize::from(cutting.total), sending);
                return Progress::Done;
            }
            cutting.offset += u16::try_from(piece.len()).expect("a piece is no longer than its datagram");
            left = after;
        }
    }

    /// Goes on with the datagram `data`, which was partly sent or, without `partly_sent`, not at all. Returns how many it dealt with: one,
    /// or none if it has to wait, and then `partly_sent` is how far it has come.
    pub(super) fn go_on(
        &mut self,
        hop: NextHop,
        number: FlowNumber,
        data: &[u8],
        partly_sent: &mut Option<PartlySent>,
        sending: &Sending,
    ) -> usize {
        let begun = partly_sent.take();
        let Some(new) = self.cutting(number, data) else {
            return self.drop_too_large(data.len(), MOST_DATAGRAM, false);
        };
        let cutting = new.resumed(begun);
        let rest = data.get(usize::from(cutting.offset)..).unwrap_or_default();
        match self.cut(hop, cutting, rest, sending) {
            Progress::Done => 1,
            Progress::Stopped(_, Cutting { datagram, offset, .. }) => {
                *partly_sent = Some(PartlySent { datagram, offset });
                0
            }
            Progress::TooSmall { most } => self.drop_too_large(data.len(), most, false),
        }
    }

    /// Drops a datagram that fits into no packet; see [`TooLarge`] for `wanted`. Returns how many it dealt with: one.
    pub(super) fn drop_too_large(&mut self, size: usize, most: usize, wanted: bool) -> usize {
        self.relay.uplink.drop(DropReason::TooLarge, 1);
        *self.too_large = Some(TooLarge { size, most, wanted });
        1
    }

    /// Hands datagrams of a confirmed flow, some of which may fit into no packet, to the lane host `worker`: each by itself, with
    /// a number of its own in case it has to be cut there. Returns their number.
    pub(super) fn hand_over_large(
        &mut self,
        worker: u8,
        lane: LaneRef,
        number: FlowNumber,
        run: Segments<'_>,
        mut partly_sent: Option<PartlySent>,
        sending: Sending,
    ) -> usize {
        for datagram in run.data.chunks(run.segment.max(1)) {
            let partly_sent = partly_sent.take();
            let Some(new) = self.cutting(number, datagram) else {
                self.drop_too_large(datagram.len(), MOST_DATAGRAM, false);
                continue;
            };
            let cutting = new.resumed(partly_sent);
            let rest = datagram.get(usize::from(cutting.offset)..).unwrap_or_default();
            let header = CountedHeader { header: cutting.header(), counted: 1 };
            let rest = Segments { data: rest, segment: rest.len() };
            self.outgoing.payloads(worker, lane, header, rest, sending);
            self.relay.uplink.handed_over += 1;
        }
        run.count()
    }

    /// Takes over the rest of a datagram from another worker; if that is all of it, it goes out uncut if it fits.
    pub(super) fn take_over_large(&mut self, hop: NextHop, cutting: Cutting, rest: &[u8], sending: &Sending) {
        if cutting.offset == 0 {
            let header = confirmed_header(cutting.number);
            let whole = Frame { header: header.as_slice(), payload: rest, counted: true, tos: sending.tos };
            if self.push(hop, whole, sending).is_ok() {
                return self.note_sent(1, rest.len(), sending);
            }
        }
        match self.cut(hop, cutting, rest, sending) {
            Progress::Done => {}
            Progress::Stopped(error, _) => self.relay.uplink.drop(not_sent(error), 1),
            Progress::TooSmall { most } => {
                self.drop_too_large(cutting.total.into(), most, false);
            }
        }
    }
}

impl<P: PeerTable, O: Outside> Downlink<'_, P, O> {
    /// Takes a piece, whose bytes lie at `bytes` of the buffer in `slot` and came on `lane`, of a flow that is `known` here or unknown.
    pub(super) fn piece(
        &mut self,
        batch: &mut ReceiveBatch,
        slot: usize,
        bytes: Range<usize>,
        lane: LaneRef,
        cutting: Cutting,
        known: Option<FlowId>,
    ) {
        let peer = lane.peer;
        let Some(state) = self.peers.data_mut(peer) else { return };
        state.relay.stats.reassembled.pieces += 1;
        let Cutting { number, datagram, total, offset } = cutting;
        let Some(flow) = known else {
            // The datagram is counted and answered once, with its first piece.
            if offset == 0 {
                self.refuse(peer, Some(bytes.len()), DropReason::UnknownFlow);
                self.answer_unknown(lane, number);
            }
            return;
        };
        let Some(target) = self.local_target(lane, flow) else { return };
        if batch.joined_bytes() + usize::from(total) > MOST_JOINED {
            self.locals.flush(batch);
            batch.forget_joined();
        }
        let Some(state) = self.peers.data_mut(peer) else { return };
        let relay = &mut state.relay;
        let piece = Piece { flow, datagram, total: total.into(), offset: offset.into() };
        let (buffer, joined) = batch.buffer_and_joined(slot);
        let account = &mut relay.downlink;
        let taken = relay.reassembly.take(&piece, &buffer[bytes], self.now, account, joined);
        let Some(whole) = taken else {
            if self.notes.incomplete.last() != Some(&peer) {
                self.notes.incomplete.push(peer);
            }
            return;
        };
        relay.stats.reassembled.datagrams += 1;
        relay.count_delivery(1, whole.len() as u64, target.tallied);
        let whole = match relay.flows.told.header(flow) {
            None => whole,
            Some(header) => {
                let start = joined.len();
                joined.extend_from_slice(header);
                joined.extend_from_within(whole);
                start..joined.len()
            }
        };
        self.list(peer, &target, ReceiveBatch::JOINED, whole);
    }

    /// Drops a piece that has waited for too long, and its datagram with it; false if that is put together at another worker.
    pub(super) fn late_piece(&mut self, peer: PeerId, cutting: Cutting, bytes: usize) -> bool {
        let Some(state) = self.peers.data_mut(peer) else { return false };
        let relay = &mut state.relay;
        let Some(flow) = relay.flows.of_number(cutting.number) else { return false };
        relay.stats.reassembled.pieces += 1;
        relay.reassembly.give_up(flow, cutting.datagram, bytes, self.now, &mut relay.downlink);
        true
    }
}
