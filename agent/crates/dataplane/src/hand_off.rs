//! Hand-off batches: datagrams that came to the wrong worker and go to another one through a bounded ring.
//!
//! | what | when | where it goes |
//! |---|---|---|
//! | packets of the underlay | GRO joined datagrams of several workers; the kernel could not steer | the worker that their connection ID names |
//! | contents of DATAGRAM frames | the flow's own lane is down, or its worker has none | the worker that has the flow |
//! | payloads | the same, in the other direction | the lane host |
//! | datagrams of unauthenticated senders | the agent has a decoy | worker 0, which has all flows of the decoy |

use std::{
    ops::Range,
    time::{Duration, Instant},
};

use base::ids::{LaneRef, PeerId};
use ip::cut::Cut;
use net::batch::Meta;
use repair::RepairClass;
use wire::context::Header;

use crate::datapath::segments::{CountedHeader, Segments, Sending};

/// A hand-off batch takes no further piece beyond this size: about one receive buffer.
const HAND_OFF_BYTES: usize = 64 * 1024;

/// A hand-off batch holds no more pieces than this. It is taken as a whole, in the turn of its peer.
const HAND_OFF_PIECES: usize = 64;

/// What a hand-off batch holds. A `port` is the index of the listening port in `transport.listen`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// Packets that came to this listening port.
    Packets { port: usize },
    /// Contents of DATAGRAM frames that came on lane `lane`.
    Frames { peer: PeerId, lane: u8 },
    /// Payloads, or messages about flows, for lane `lane`.
    Payloads { peer: PeerId, lane: u8 },
    /// Payloads that did not fit beside the opening form, on their way back to the worker that has their flow.
    Returned { peer: PeerId },
    /// Datagrams of unauthenticated senders, for the decoy, that came to this listening port.
    Unauthenticated { port: usize },
}

base::labelled! {
    /// The content of hand-off batches, as it is counted.
    #[derive(Clone, Copy, Debug, PartialEq, Eq)]
    pub enum Content {
        /// [`Kind::Packets`].
        Packets => "packets",
        /// [`Kind::Frames`].
        Frames => "frames",
        /// [`Kind::Payloads`] and [`Kind::Returned`].
        Payloads => "payloads",
        /// [`Kind::Unauthenticated`].
        Unauthenticated => "unauthenticated",
    }
}

impl Kind {
    /// The content as which datagrams of this kind are counted.
    pub fn content(self) -> Content {
        match self {
            Self::Packets { .. } => Content::Packets,
            Self::Frames { .. } => Content::Frames,
            Self::Payloads { .. } | Self::Returned { .. } => Content::Payloads,
            Self::Unauthenticated { .. } => Content::Unauthenticated,
        }
    }
}

/// Part of a hand-off batch: a run of datagrams.
#[derive(Clone, Copy, Debug)]
pub struct Piece {
    /// The length of the run, the size of its datagrams, and where they came from.
    pub meta: Meta,
    /// The header that precedes each payload in its frame; `None` if the piece is a complete frame.
    pub header: Option<Header>,
    /// The number of datagrams of the run that an account counts.
    pub counted: u32,
    /// The number of payload bytes that an account counts.
    counted_bytes: usize,
    /// The traffic class of the packets that are to carry the datagrams.
    pub tos: u8,
    /// How the datagrams are repaired; `None`: they are not.
    pub repair: Option<RepairClass>,
}

impl Piece {
    /// A run that no account counts.
    fn uncounted(meta: Meta) -> Self {
        Self { meta, header: None, counted: 0, counted_bytes: 0, tos: 0, repair: None }
    }

    /// The header that precedes the payloads, with the number of them that an account counts.
    pub fn counted_header(&self) -> CountedHeader {
        CountedHeader { header: self.header.unwrap_or_default(), counted: self.counted }
    }
}

/// A batch on its way to another worker.
#[derive(Debug)]
pub struct HandOff {
    pub kind: Kind,
    /// The peer's process in which the flow numbers of payloads and frames are valid.
    pub process: u64,
    bytes: Vec<u8>,
    pieces: Vec<Piece>,
    /// The time at which the batch went into a ring.
    pub handed: Option<Instant>,
}

impl HandOff {
    fn has_room(&self, len: usize) -> bool {
        self.pieces.len() < HAND_OFF_PIECES
            && (self.bytes.is_empty() || self.bytes.len() + len <= HAND_OFF_BYTES)
    }

    /// The pieces of the batch with their bytes, oldest first.
    pub fn pieces(&self) -> impl Iterator<Item = (&Piece, &[u8])> {
        let mut start = 0;
        self.pieces.iter().map(move |piece| {
            let range: Range<usize> = start..start + piece.meta.len;
            start = range.end;
            (piece, &self.bytes[range])
        })
    }

    /// The number of datagrams that an account counts.
    pub fn counted(&self) -> u64 {
        self.pieces.iter().map(|piece| u64::from(piece.counted)).sum()
    }

    /// The number of payload bytes that an account counts.
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

    /// The peer whose datagrams the batch holds, if that is known.
    pub fn peer(&self) -> Option<PeerId> {
        match self.kind {
            Kind::Packets { .. } | Kind::Unauthenticated { .. } => None,
            Kind::Frames { peer, .. } | Kind::Payloads { peer, .. } | Kind::Returned { peer } => Some(peer),
        }
    }
}

/// The hand-off batches that a worker has collected for others in this turn.
#[derive(Debug, Default)]
pub struct Outgoing {
    /// The hand-off batches in order, each with the index of the worker that it is for.
    hand_offs: Vec<(u8, HandOff)>,
}

impl Outgoing {
    /// A buffer of the underlay for the worker `to`, that came to listening port `port`.
    pub fn packet(&mut self, to: u8, port: usize, meta: Meta, data: &[u8]) {
        self.add(to, Kind::Packets { port }, Piece::uncounted(meta), data);
    }

    /// An unauthenticated sender's datagram for the worker `to`, that came to listening port `port`.
    pub fn unauthenticated(&mut self, to: u8, port: usize, meta: Meta, data: &[u8]) {
        self.add(to, Kind::Unauthenticated { port }, Piece::uncounted(meta), data);
    }

    /// The content of a DATAGRAM frame for the worker `to`, that came on this lane; `payload` is the size of the datagram in
    /// it, if it carries one.
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
        let piece = Piece { counted, counted_bytes, ..Piece::uncounted(meta) };
        self.add(to, Kind::Frames { peer, lane }, piece, data);
    }

    /// Payloads for a lane whose host is the worker `to`.
    pub fn payloads(
        &mut self,
        to: u8,
        LaneRef { peer, lane }: LaneRef,
        CountedHeader { header, counted }: CountedHeader,
        Segments { data, segment }: Segments<'_>,
        Sending { tos, age, repair }: Sending,
    ) {
        let meta = Meta { len: data.len(), segment: segment.max(1), age, ..Meta::EMPTY };
        let piece = Piece { meta, header: Some(header), counted, counted_bytes: data.len(), tos, repair };
        self.add(to, Kind::Payloads { peer, lane }, piece, data);
    }

    /// IP packets for a lane whose host is the worker `to`.
    pub fn packets(
        &mut self,
        to: u8,
        LaneRef { peer, lane }: LaneRef,
        header: Header,
        cut: &Cut<'_>,
        Sending { tos, age, repair }: Sending,
    ) {
        let (len, segment) = (cut.bytes(), cut.header().len() + cut.segment());
        let meta = Meta { len, segment: segment.max(1), age, ..Meta::EMPTY };
        let counted = u32::try_from(cut.count()).unwrap_or(u32::MAX);
        let piece = Piece { meta, header: Some(header), counted, counted_bytes: len, tos, repair };
        self.add_with(to, Kind::Payloads { peer, lane }, piece, |bytes| {
            for index in 0..cut.count() {
                cut.append(index, bytes);
            }
        });
    }

    /// Payloads of a flow of the worker `to`, which did not fit beside the header and came to this host `age` ago.
    pub fn returned(
        &mut self,
        to: u8,
        peer: PeerId,
        CountedHeader { header, counted }: CountedHeader,
        Segments { data, segment }: Segments<'_>,
        age: Duration,
    ) {
        let meta = Meta { len: data.len(), segment: segment.max(1), age, ..Meta::EMPTY };
        let piece =
            Piece { meta, header: Some(header), counted, counted_bytes: data.len(), tos: 0, repair: None };
        self.add(to, Kind::Returned { peer }, piece, data);
    }

    fn add(&mut self, to: u8, kind: Kind, piece: Piece, data: &[u8]) {
        self.add_with(to, kind, piece, |bytes| bytes.extend_from_slice(data));
    }

    /// Adds a piece, whose bytes `write` appends.
    fn add_with(&mut self, to: u8, kind: Kind, piece: Piece, write: impl FnOnce(&mut Vec<u8>)) {
        // The newest for this worker: nothing overtakes what is already in a hand-off batch.
        let newest = self.hand_offs.iter().rposition(|(worker, _)| *worker == to).filter(|newest| {
            let (_, hand_off) = &self.hand_offs[*newest];
            hand_off.kind == kind && hand_off.has_room(piece.meta.len)
        });
        let index = newest.unwrap_or_else(|| {
            let hand_off = HandOff { kind, process: 0, bytes: Vec::new(), pieces: Vec::new(), handed: None };
            self.hand_offs.push((to, hand_off));
            self.hand_offs.len() - 1
        });
        let (_, hand_off) = &mut self.hand_offs[index];
        hand_off.pieces.push(piece);
        write(&mut hand_off.bytes);
    }

    /// Takes out the batches with a peer's datagrams, in either direction.
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
