//! What a queue holds: runs of datagrams, and whose they are.

use std::time::Instant;

use base::hash::Issued;
use ip::ecn;
use repair::RepairClass;
use wire::repair_terms::{StreamNumber, Terms};

use crate::relay::{Stripes, flow::FlowId, fragments::PartlySent};

/// The IP and UDP headers, the packet header and the tag around a small datagram, about, in bytes: what a datagram costs in its
/// flow's turn beside its payload.
const OVERHEAD: usize = 60;

/// What queued datagrams are: those of a flow, or IP packets of one.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum QueueClass {
    /// A flow of an ingress or a service.
    Flow(FlowId),
    /// The IP packets whose addresses and ports have the same hash.
    Packets(PacketClass),
}

/// What IP packets that travel together have in common.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PacketClass {
    /// Whose turn they take: the lowest bits of their hash, see [`crate::relay::Stripes::turn`].
    pub turn: u16,
    /// Whether their L4 checksums are partial.
    pub partial: bool,
    /// The traffic class of the packets that carry them.
    pub tos: u8,
    /// The lane that another worker has given them, if they were handed over.
    pub lane: Option<u8>,
    /// Whether their own traffic class puts them ahead of others: CS6, or EF (RFC 4594 §2).
    pub ahead: bool,
    /// How they are repaired; `None`: they are not.
    pub repair: Option<Terms>,
    /// Whether they travel on two lines, if there are two.
    pub copied: bool,
}

impl PacketClass {
    /// Whose lane they take, see [`crate::relay::Stripes`].
    #[inline]
    #[must_use]
    pub fn bucket(&self) -> u8 {
        Stripes::bucket(self.turn.into())
    }

    /// The stream of numbers of these packets, if they are repaired.
    #[must_use]
    pub fn repair_class(&self) -> Option<RepairClass> {
        self.repair.map(|terms| RepairClass { stream: StreamNumber(0), bucket: self.bucket(), terms })
    }
}

/// Whose queue datagrams wait in, each with a share of the whole.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(super) enum FlowKey {
    Flow(FlowId),
    /// IP packets by [`PacketClass::turn`].
    Packets(u16),
    /// Those of them that go ahead of others.
    Ahead(u16),
}

impl Issued for FlowKey {}

impl QueueClass {
    pub(super) fn key(self) -> FlowKey {
        match self {
            Self::Flow(flow) => FlowKey::Flow(flow),
            Self::Packets(class) if class.ahead => FlowKey::Ahead(class.turn),
            Self::Packets(class) => FlowKey::Packets(class.turn),
        }
    }
}

/// Consecutive datagrams of one flow, each `segment` bytes long, the last one at most.
#[derive(Debug)]
pub struct Run {
    pub class: QueueClass,
    /// The time at which the datagrams arrived at this host.
    pub arrived: Instant,
    /// The size of each datagram but the last, in bytes.
    pub segment: usize,
    /// The progress of the first datagram, if it is partly sent.
    pub partly_sent: Option<PartlySent>,
    data: Box<[u8]>,
    /// Where the first datagram that is still here starts.
    start: usize,
    /// The number of datagrams still here; it does not follow from the bytes, because an empty datagram has none.
    count: usize,
    /// The sequence number of the run, which grows along the queue.
    pub(super) sequence: u64,
}

impl Run {
    pub(super) fn new(class: QueueClass, data: &[u8], segment: usize, arrived: Instant) -> Self {
        let count = if data.is_empty() { 1 } else { data.len().div_ceil(segment.max(1)) };
        Self {
            class,
            arrived,
            segment: segment.max(1),
            partly_sent: None,
            data: data.into(),
            start: 0,
            count,
            sequence: 0,
        }
    }

    /// The datagrams that are still here, end to end.
    #[must_use]
    pub fn data(&self) -> &[u8] {
        &self.data[self.start..]
    }

    /// The bytes of memory that it takes.
    #[cfg(test)]
    pub(super) fn memory(&self) -> usize {
        self.data.len()
    }

    /// How many datagrams are still here.
    #[must_use]
    pub fn count(&self) -> usize {
        self.count
    }

    /// The run without its first `sent` datagrams; the next one is `partly_sent`.
    #[must_use]
    pub fn rest(mut self, sent: usize, partly_sent: Option<PartlySent>) -> Self {
        self.advance(sent);
        self.partly_sent = partly_sent;
        self
    }

    /// Takes the first `datagrams` out and returns their bytes.
    pub(super) fn advance(&mut self, datagrams: usize) -> usize {
        let bytes = (datagrams * self.segment).min(self.data.len() - self.start);
        self.start += bytes;
        self.count -= datagrams;
        self.partly_sent = self.partly_sent.filter(|_| datagrams == 0);
        if 2 * self.start > self.data.len() {
            // What is gone takes no more memory than what is here.
            self.data = self.data[self.start..].into();
            self.start = 0;
        }
        bytes
    }

    pub(super) fn truncate(&mut self, keep: usize) {
        if keep < self.count {
            let end = self.data.len().min(self.start + keep * self.segment);
            self.data = self.data[..end].into();
            self.count = keep;
        }
    }

    /// How many datagrams a turn of `bytes` bytes lets go, at least one; the last one may exceed it.
    pub(super) fn portion(&self, bytes: usize) -> usize {
        bytes.div_ceil(self.segment + OVERHEAD).clamp(1, self.count)
    }

    /// What `datagrams` of these cost in a turn, in bytes.
    pub(super) fn cost(&self, datagrams: usize) -> usize {
        (datagrams * self.segment).min(self.data().len()) + datagrams * OVERHEAD
    }

    /// Marks the first datagram as having met congestion, if it is an IP packet whose sender understands that (RFC 3168 §5).
    pub(super) fn mark(&mut self) -> bool {
        let end = self.data.len().min(self.start + self.segment);
        let first = &mut self.data[self.start..end];
        let is_packet = matches!(self.class, QueueClass::Packets(_));
        is_packet && ecn::mark(first)
    }
}
