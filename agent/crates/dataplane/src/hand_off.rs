//! The hand-over: what came to the wrong worker goes to its owner as a batch, through a bounded ring.
//!
//! | what | when | where it goes |
//! |---|---|---|
//! | packets of the underlay | GRO joined datagrams of several owners; the kernel could not steer | the worker that their connection ID names |
//! | contents of DATAGRAM frames | the flow's own lane is down, or its worker has none | the worker that keeps the flow |
//! | payloads | the same, in the other direction | the worker that keeps the lane |
//! | strangers' datagrams | the agent has a decoy | worker 0, which has all of its flows |

use std::{
    ops::Range,
    time::{Duration, Instant},
};

use ip::cut::Cut;
use net::batch::Meta;
use wire::{
    context::Header,
    ids::{LaneRef, PeerId},
};

use crate::datapath::segments::{CountedHeader, Marks, Segments};

/// A hand-off batch takes no further piece beyond this size: about one receive buffer.
const HAND_OFF_BYTES: usize = 64 * 1024;

/// A hand-off batch holds no more pieces than this.
const HAND_OFF_PIECES: usize = 256;

/// What a hand-off batch is for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// Packets that came to this listening port.
    Packets {
        /// The index of the listening port in `transport.listen`.
        port: usize,
    },
    /// Contents of DATAGRAM frames that came on lane `lane`.
    Frames { peer: PeerId, lane: u8 },
    /// Payloads, or messages about flows, for lane `lane`.
    Payloads { peer: PeerId, lane: u8 },
    /// Payloads that did not fit beside the opening form, back to where their flow lives.
    Returned { peer: PeerId },
    /// Datagrams of strangers, for the decoy, that came to this listening port.
    Strangers {
        /// The index of the listening port in `transport.listen`.
        port: usize,
    },
}

impl Kind {
    /// The values of the metric label `kind`.
    pub const LABELS: [&'static str; 4] = ["packets", "frames", "payloads", "strangers"];

    /// The place of this kind in [`Kind::LABELS`].
    pub fn label_index(self) -> usize {
        match self {
            Self::Packets { .. } => 0,
            Self::Frames { .. } => 1,
            Self::Payloads { .. } | Self::Returned { .. } => 2,
            Self::Strangers { .. } => 3,
        }
    }
}

/// Part of a hand-off batch: a run of datagrams.
#[derive(Clone, Copy, Debug)]
pub struct Piece {
    /// How long it is, how it divides, where it came from.
    pub meta: Meta,
    /// What precedes each payload in its frame; `None` where the frame is whole.
    pub header: Option<Header>,
    /// How many of its datagrams an account counts.
    pub counted: u32,
    /// And how many bytes of payload.
    counted_bytes: usize,
    /// The traffic class of the packets that are to carry them.
    pub tos: u8,
}

impl Piece {
    /// What precedes its payloads, and how many of them an account counts.
    pub fn counted_header(&self) -> CountedHeader {
        CountedHeader { header: self.header.unwrap_or_default(), counted: self.counted }
    }
}

/// A batch on its way to another worker.
#[derive(Debug)]
pub struct HandOff {
    pub kind: Kind,
    /// The peer's process to which the numbers in its headers mean something; that of payloads and frames.
    pub process: u64,
    bytes: Vec<u8>,
    pieces: Vec<Piece>,
    /// When it went into a ring.
    pub handed: Option<Instant>,
}

impl HandOff {
    fn new(kind: Kind) -> Self {
        Self { kind, process: 0, bytes: Vec::new(), pieces: Vec::new(), handed: None }
    }

    fn has_room(&self, len: usize) -> bool {
        self.pieces.len() < HAND_OFF_PIECES
            && (self.bytes.is_empty() || self.bytes.len() + len <= HAND_OFF_BYTES)
    }

    /// Its pieces, in the order in which they came.
    pub fn pieces(&self) -> impl Iterator<Item = (&Piece, &[u8])> {
        let mut start = 0;
        self.pieces.iter().map(move |piece| {
            let range: Range<usize> = start..start + piece.meta.len;
            start = range.end;
            (piece, &self.bytes[range])
        })
    }

    /// How many datagrams an account counts.
    pub fn counted(&self) -> u64 {
        self.pieces.iter().map(|piece| u64::from(piece.counted)).sum()
    }

    /// How many bytes of payload an account counts.
    pub fn counted_bytes(&self) -> u64 {
        self.pieces.iter().map(|piece| piece.counted_bytes as u64).sum()
    }

    /// The number of datagrams in this hand-off batch.
    pub fn datagrams(&self) -> u64 {
        self.pieces.iter().map(|piece| piece.meta.datagrams() as u64).sum()
    }

    /// The bytes that this hand-off batch takes in a ring.
    #[must_use]
    pub fn ring_bytes(&self) -> usize {
        self.bytes.len() + self.pieces.len() * size_of::<Piece>()
    }

    /// The peer whose datagrams it holds, if that is known.
    pub fn peer(&self) -> Option<PeerId> {
        match self.kind {
            Kind::Packets { .. } | Kind::Strangers { .. } => None,
            Kind::Frames { peer, .. } | Kind::Payloads { peer, .. } | Kind::Returned { peer } => Some(peer),
        }
    }
}

/// What a worker has collected for the others in this turn.
#[derive(Debug, Default)]
pub struct Outgoing {
    /// The hand-off batches in order, each with the index of the worker that it is for.
    hand_offs: Vec<(u8, HandOff)>,
}

impl Outgoing {
    /// A buffer of the underlay for the worker `to`, that came to listening port `port`.
    pub fn packet(&mut self, to: u8, port: usize, meta: Meta, data: &[u8]) {
        self.add(
            to,
            Kind::Packets { port },
            Piece { meta, header: None, counted: 0, counted_bytes: 0, tos: 0 },
            data,
        );
    }

    /// A stranger's datagram for the worker `to`, that came to listening port `port`.
    pub fn stranger(&mut self, to: u8, port: usize, meta: Meta, data: &[u8]) {
        let piece = Piece { meta, header: None, counted: 0, counted_bytes: 0, tos: 0 };
        self.add(to, Kind::Strangers { port }, piece, data);
    }

    /// The content of a DATAGRAM frame for the worker `to`, that came on this lane; `payload` is how many of its bytes are a
    /// datagram, if it carries one.
    pub fn frame(
        &mut self,
        to: u8,
        LaneRef { peer, lane }: LaneRef,
        payload: Option<usize>,
        meta: Meta,
        data: &[u8],
    ) {
        let meta = Meta { len: data.len(), segment: data.len().max(1), ..meta };
        let (counted, counted_bytes) = (u32::from(payload.is_some()), payload.unwrap_or(0));
        let piece = Piece { meta, header: None, counted, counted_bytes, tos: 0 };
        self.add(to, Kind::Frames { peer, lane }, piece, data);
    }

    /// Payloads for a lane that the worker `to` keeps.
    pub fn payloads(
        &mut self,
        to: u8,
        LaneRef { peer, lane }: LaneRef,
        CountedHeader { header, counted }: CountedHeader,
        Segments { data, segment }: Segments<'_>,
        Marks { tos, age }: Marks,
    ) {
        let meta = Meta { len: data.len(), segment: segment.max(1), age, ..Meta::EMPTY };
        let piece = Piece { meta, header: Some(header), counted, counted_bytes: data.len(), tos };
        self.add(to, Kind::Payloads { peer, lane }, piece, data);
    }

    /// IP packets for a lane that the worker `to` keeps.
    pub fn packets(
        &mut self,
        to: u8,
        LaneRef { peer, lane }: LaneRef,
        header: Header,
        cut: &Cut<'_>,
        Marks { tos, age }: Marks,
    ) {
        let (len, segment) = (cut.bytes(), cut.header().len() + cut.segment());
        let meta = Meta { len, segment: segment.max(1), age, ..Meta::EMPTY };
        let counted = u32::try_from(cut.count()).unwrap_or(u32::MAX);
        let piece = Piece { meta, header: Some(header), counted, counted_bytes: len, tos };
        self.add_with(to, Kind::Payloads { peer, lane }, piece, |bytes| {
            for index in 0..cut.count() {
                cut.append(index, bytes);
            }
        });
    }

    /// Payloads of a flow that the worker `to` keeps, which did not fit beside the header and came to
    /// this host `age` ago.
    pub fn returned(
        &mut self,
        to: u8,
        peer: PeerId,
        CountedHeader { header, counted }: CountedHeader,
        Segments { data, segment }: Segments<'_>,
        age: Duration,
    ) {
        let meta = Meta { len: data.len(), segment: segment.max(1), age, ..Meta::EMPTY };
        let piece = Piece { meta, header: Some(header), counted, counted_bytes: data.len(), tos: 0 };
        self.add(to, Kind::Returned { peer }, piece, data);
    }

    fn add(&mut self, to: u8, kind: Kind, piece: Piece, data: &[u8]) {
        self.add_with(to, kind, piece, |bytes| bytes.extend_from_slice(data));
    }

    /// Adds a piece, whose bytes `write` appends.
    fn add_with(&mut self, to: u8, kind: Kind, piece: Piece, write: impl FnOnce(&mut Vec<u8>)) {
        let fits = |(place, hand_off): &&mut (u8, HandOff)| {
            *place == to && hand_off.kind == kind && hand_off.has_room(piece.meta.len)
        };
        // The newest for this worker: nothing overtakes what is already in a hand-off batch.
        let newest = self.hand_offs.iter_mut().rfind(|(place, _)| *place == to);
        let place = match newest.filter(fits) {
            Some((_, hand_off)) => hand_off,
            None => {
                self.hand_offs.push((to, HandOff::new(kind)));
                match self.hand_offs.last_mut() {
                    Some((_, hand_off)) => hand_off,
                    None => return,
                }
            }
        };
        place.pieces.push(piece);
        write(&mut place.bytes);
    }

    /// Takes out what was collected of a peer's flows, in either direction.
    pub fn take_of_peer(&mut self, id: PeerId) -> impl Iterator<Item = HandOff> {
        self.hand_offs
            .extract_if(.., move |(_, hand_off)| hand_off.peer() == Some(id))
            .map(|(_, hand_off)| hand_off)
    }

    /// Takes out all hand-off batches, each with the index of the worker that it is for.
    pub fn take(&mut self) -> impl Iterator<Item = (u8, HandOff)> + '_ {
        self.hand_offs.drain(..)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn meta(len: usize) -> Meta {
        Meta { len, segment: len.max(1), ..Meta::EMPTY }
    }

    #[test]
    fn pieces_of_one_kind_share_a_hand_off_in_order() {
        let mut outgoing = Outgoing::default();
        outgoing.packet(1, 0, meta(3), b"one");
        outgoing.packet(1, 0, meta(0), b"");
        outgoing.packet(2, 0, meta(5), b"other");
        outgoing.packet(1, 0, meta(3), b"two");
        outgoing.packet(1, 1, meta(4), b"port");
        outgoing.packet(1, 0, meta(5), b"three");
        let hand_offs: Vec<(u8, usize, Vec<Vec<u8>>)> = outgoing
            .take()
            .map(|(to, hand_off)| {
                let Kind::Packets { port } = hand_off.kind else { panic!("packets went in") };
                (to, port, hand_off.pieces().map(|(_, data)| data.to_vec()).collect())
            })
            .collect();
        let bytes = |texts: &[&str]| texts.iter().map(|text| text.as_bytes().to_vec()).collect::<Vec<_>>();
        assert_eq!(
            hand_offs,
            [
                (1, 0, bytes(&["one", "", "two"])),
                (2, 0, bytes(&["other"])),
                (1, 1, bytes(&["port"])),
                (1, 0, bytes(&["three"])),
            ],
            "nothing overtakes, not even what is of another kind"
        );
    }
}
