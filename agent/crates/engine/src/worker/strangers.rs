//! What strangers sent in this turn, kept until all other sources had their share.

use std::{net::SocketAddr, ops::Range};

use dataplane::{
    hand_off::HandOff,
    relay::{DropReason, Settlement},
};
use gate::decoy::{DecoyDrop, DecoyStats};
use net::batch::Meta;

/// Bytes of strangers' datagrams that are kept in one turn: a full receive batch.
const MOST_BYTES: usize = 2 << 20;

const MOST_DATAGRAMS: usize = 4_096;

/// What strangers sent in this turn, or would have, had there been a decoy.
pub struct Strangers {
    has_decoy: bool,
    pub(super) waiting: Waiting,
    /// Counts of strangers' datagrams and of what became of them.
    pub(super) stats: DecoyStats,
}

/// Datagrams that wait, in buffers that keep their capacity.
#[derive(Default)]
pub(super) struct Waiting {
    bytes: Vec<u8>,
    /// The listening port of each, what came with it, and where it lies.
    datagrams: Vec<(usize, Meta, Range<usize>)>,
}

impl Strangers {
    pub(super) fn new(decoy: Option<SocketAddr>) -> Self {
        Self { has_decoy: decoy.is_some(), waiting: Waiting::default(), stats: DecoyStats::default() }
    }

    /// The operator wants a decoy, or none.
    pub(super) fn set_decoy(&mut self, decoy: Option<SocketAddr>) {
        self.has_decoy = decoy.is_some();
    }

    /// Takes one datagram that came to listening port `port` and is a stranger's; `meta` may be that of its whole buffer.
    pub fn push(&mut self, port: usize, meta: Meta, datagram: &[u8]) {
        self.stats.from_senders.count(datagram.len());
        if !self.has_decoy {
            self.stats.drop(DecoyDrop::NoDecoy, 1);
            return;
        }
        self.keep(port, meta, datagram);
    }

    /// Takes what another worker handed over and has counted.
    pub(super) fn take_over(&mut self, hand_off: &HandOff, port: usize) {
        for (piece, datagram) in hand_off.pieces() {
            self.keep(port, piece.meta, datagram);
        }
    }

    /// Counts what became of answers that were handed to the kernel.
    pub(super) fn settle(&mut self, settled: &Settlement) {
        match settled.dropped {
            None => {}
            Some(DropReason::SendTooLarge) => self.stats.drop(DecoyDrop::TooLarge, settled.payloads),
            Some(_) => self.stats.drop(DecoyDrop::ToSender, settled.payloads),
        }
    }

    fn keep(&mut self, port: usize, meta: Meta, datagram: &[u8]) {
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
    /// Each with its listening port and what came with it.
    pub(super) fn iter(&self) -> impl Iterator<Item = (usize, Meta, &[u8])> {
        self.datagrams.iter().map(|(port, meta, range)| (*port, *meta, &self.bytes[range.clone()]))
    }

    pub(super) fn len(&self) -> usize {
        self.datagrams.len()
    }

    pub(super) fn is_empty(&self) -> bool {
        self.datagrams.is_empty()
    }

    pub(super) fn clear(&mut self) {
        self.bytes.clear();
        self.datagrams.clear();
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use dataplane::lanes::STRANGERS;

    #[test]
    fn what_waits_is_bounded_and_each_datagram_is_kept_or_counted() {
        let decoy = SocketAddr::from(([127, 0, 0, 1], 8443));
        for (len, kept) in [(0, MOST_DATAGRAMS), (1_000, MOST_BYTES / 1_000), (65_507, MOST_BYTES / 65_507)] {
            let (mut strangers, datagram) = (Strangers::new(Some(decoy)), vec![0; len]);
            for _ in 0..5_000 {
                strangers.push(0, Meta::EMPTY, &datagram);
            }
            let stats = &strangers.stats;
            assert_eq!(
                strangers.waiting.iter().filter(|(_, meta, data)| meta.len == data.len()).count(),
                kept
            );
            assert_eq!((stats.from_senders.datagrams, stats.from_senders.bytes), (5_000, 5_000 * len as u64));
            assert_eq!(stats.dropped[DecoyDrop::Overload as usize], 5_000 - kept as u64);
            // The buffers keep what they have grown to.
            let capacity = strangers.waiting.bytes.capacity();
            strangers.waiting.clear();
            assert!(strangers.waiting.iter().next().is_none());
            assert_eq!(strangers.waiting.bytes.capacity(), capacity);
        }
    }

    #[test]
    fn answers_that_the_kernel_refused_are_counted_by_reason() {
        let mut strangers = Strangers::new(None);
        for (dropped, payloads) in
            [(None, 7), (Some(DropReason::SendTooLarge), 2), (Some(DropReason::SendBlocked), 3)]
        {
            strangers.settle(&Settlement { peer: STRANGERS, payloads, dropped });
        }
        let mut expected = DecoyStats::default();
        expected.drop(DecoyDrop::TooLarge, 2);
        expected.drop(DecoyDrop::ToSender, 3);
        assert_eq!(strangers.stats, expected);
    }
}
