//! Datagrams of unauthenticated senders, kept within a turn until all other sources have been served.

use std::{net::SocketAddr, ops::Range};

use dataplane::{
    hand_off::HandOff,
    relay::{DropReason, Settlement},
};
use gate::decoy::{DecoyDrop, DecoyStats};
use net::batch::Meta;

/// Limit on the bytes of unauthenticated senders' datagrams in one turn: a full receive batch.
const MOST_BYTES: usize = 2 << 20;

const MOST_DATAGRAMS: usize = 4_096;

/// Datagrams of unauthenticated senders in this turn, and their counts. Without a decoy they are only counted.
#[derive(Default)]
pub struct Unauthenticated {
    pub(crate) has_decoy: bool,
    pub(crate) waiting: Waiting,
    /// Counts of the datagrams, of the decoy's replies, and of drops.
    pub(crate) stats: DecoyStats,
}

/// Waiting datagrams, in buffers that keep their capacity.
#[derive(Default)]
pub(crate) struct Waiting {
    bytes: Vec<u8>,
    /// The listening port, the metadata and the range in `bytes` of each datagram.
    datagrams: Vec<(usize, Meta, Range<usize>)>,
}

impl Unauthenticated {
    pub(crate) fn new(decoy: Option<SocketAddr>) -> Self {
        Self { has_decoy: decoy.is_some(), ..Self::default() }
    }

    /// Adds a datagram that came to listening port `port`; `meta` may be the metadata of its whole buffer.
    pub fn push(&mut self, port: usize, meta: Meta, datagram: &[u8]) {
        self.stats.from_senders.count(datagram.len());
        if !self.has_decoy {
            self.stats.drop(DecoyDrop::NoDecoy, 1);
            return;
        }
        self.insert(port, meta, datagram);
    }

    /// Adds the datagrams of a hand-off batch, which another worker has counted.
    pub(crate) fn accept(&mut self, hand_off: &HandOff, port: usize) {
        for (piece, datagram) in hand_off.pieces() {
            self.insert(port, piece.meta, datagram);
        }
    }

    /// Counts replies that the kernel did not send.
    pub(crate) fn settle(&mut self, settled: &Settlement) {
        match settled.dropped {
            None => {}
            Some(DropReason::SendTooLarge) => self.stats.drop(DecoyDrop::TooLarge, settled.payloads),
            Some(_) => self.stats.drop(DecoyDrop::ToSender, settled.payloads),
        }
    }

    fn insert(&mut self, port: usize, meta: Meta, datagram: &[u8]) {
        let Waiting { bytes, datagrams } = &mut self.waiting;
        let start = bytes.len();
        if start + datagram.len() > MOST_BYTES || datagrams.len() >= MOST_DATAGRAMS {
            self.stats.drop(DecoyDrop::Overload, 1);
            return;
        }
        bytes.extend_from_slice(datagram);
        let meta = Meta { len: datagram.len(), segment: datagram.len().max(1), ..meta };
        datagrams.push((port, meta, start..bytes.len()));
    }
}

impl Waiting {
    /// Iterates over the datagrams with their listening ports and metadata.
    pub(crate) fn iter(&self) -> impl Iterator<Item = (usize, Meta, &[u8])> {
        self.datagrams.iter().map(|(port, meta, range)| (*port, *meta, &self.bytes[range.clone()]))
    }

    pub(crate) fn len(&self) -> usize {
        self.datagrams.len()
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.datagrams.is_empty()
    }

    #[cfg(feature = "inspection")]
    pub(crate) fn bytes(&self) -> usize {
        self.bytes.len()
    }

    pub(crate) fn clear(&mut self) {
        self.bytes.clear();
        self.datagrams.clear();
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use dataplane::lanes::UNAUTHENTICATED;

    #[test]
    fn waiting_datagrams_are_bounded_and_each_one_is_kept_or_counted() {
        let decoy = SocketAddr::from(([127, 0, 0, 1], 8443));
        for (len, kept) in [(0, MOST_DATAGRAMS), (1_000, MOST_BYTES / 1_000), (65_507, MOST_BYTES / 65_507)] {
            let (mut senders, datagram) = (Unauthenticated::new(Some(decoy)), vec![0; len]);
            for _ in 0..5_000 {
                senders.push(0, Meta::EMPTY, &datagram);
            }
            let stats = &senders.stats;
            assert_eq!(senders.waiting.iter().filter(|(_, meta, data)| meta.len == data.len()).count(), kept);
            assert_eq!((stats.from_senders.datagrams, stats.from_senders.bytes), (5_000, 5_000 * len as u64));
            assert_eq!(stats.dropped[DecoyDrop::Overload], 5_000 - kept as u64);
            // The buffers keep their capacity.
            let capacity = senders.waiting.bytes.capacity();
            senders.waiting.clear();
            assert!(senders.waiting.iter().next().is_none());
            assert_eq!(senders.waiting.bytes.capacity(), capacity);
        }
    }

    #[test]
    fn answers_that_the_kernel_refused_are_counted_by_reason() {
        let mut senders = Unauthenticated::new(None);
        for (dropped, payloads) in
            [(None, 7), (Some(DropReason::SendTooLarge), 2), (Some(DropReason::SendBlocked), 3)]
        {
            senders.settle(&Settlement { peer: UNAUTHENTICATED, payloads, dropped });
        }
        let mut expected = DecoyStats::default();
        expected.drop(DecoyDrop::TooLarge, 2);
        expected.drop(DecoyDrop::ToSender, 3);
        assert_eq!(senders.stats, expected);
    }
}
