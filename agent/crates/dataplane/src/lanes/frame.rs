//! The contents of packets: one frame, or a run of datagrams that become a frame each.

use ip::cut::{Cut, MOST_HEADER};
use repair::Repaired;
use wire::context;

/// Room for what precedes a payload in its frame: a number for repair, a context, and the headers of an IP packet that is cut from a
/// larger one.
pub const MOST_PREFIX: usize = context::MOST_NUMBERED + context::Header::CAPACITY + MOST_HEADER;

/// The content of one DATAGRAM frame.
#[derive(Clone, Copy, Debug)]
pub struct Frame<'a> {
    /// The encoded context and, for a packet that is cut from a larger one, the IP headers.
    pub header: &'a [u8],
    /// The payload; empty for a message about a flow.
    pub payload: &'a [u8],
    /// Whether it carries a datagram, which the peer's account settles.
    pub counted: bool,
    /// The traffic class of the packet that carries it.
    pub tos: u8,
}

/// Datagrams of one flow, end to end, each of which a DATAGRAM frame is to carry.
#[derive(Clone, Copy)]
pub struct Payloads<'a> {
    /// The encoded context, which is the same for all.
    pub header: &'a [u8],
    /// The bytes of all datagrams; no bytes are one empty datagram.
    pub data: &'a [u8],
    /// The size of each datagram in bytes; the last one may be shorter.
    pub segment: usize,
    /// The cut with the IP headers that precede each, if they are cut from one IP packet.
    pub cut: Option<&'a Cut<'a>>,
    /// The traffic class of the packets that carry them.
    pub tos: u8,
    /// How they are repaired; `None`: they are not.
    pub repair: Option<Repaired>,
    /// The index of the first of them among all that were cut.
    pub(crate) first: usize,
}

impl<'a> Payloads<'a> {
    /// Payloads that are the datagrams of one flow.
    #[must_use]
    pub fn new(header: &'a [u8], data: &'a [u8], segment: usize, tos: u8) -> Self {
        Self { header, data, segment, cut: None, tos, repair: None, first: 0 }
    }

    /// The IP packets that are cut from one.
    #[must_use]
    pub fn cut(header: &'a [u8], cut: &'a Cut<'a>, tos: u8) -> Self {
        let headed = (!cut.header().is_empty()).then_some(cut);
        Self { header, data: cut.payload(), segment: cut.segment(), cut: headed, tos, repair: None, first: 0 }
    }

    #[must_use]
    pub fn count(&self) -> usize {
        if self.data.is_empty() { 1 } else { self.data.len().div_ceil(self.segment.max(1)) }
    }

    /// The length of the context and the IP headers that precede each payload.
    pub(super) fn prefix_len(&self) -> usize {
        self.header.len() + self.cut.map_or(0, |cut| cut.header().len())
    }

    /// The bytes of the first `count` datagrams, with the IP headers of each.
    #[must_use]
    pub fn bytes_of(&self, count: usize) -> usize {
        let headers = self.cut.map_or(0, |cut| cut.header().len());
        count * headers + (count * self.segment).min(self.data.len())
    }

    /// The payloads after the first `count`.
    #[must_use]
    pub fn skip(&self, count: usize) -> Self {
        let data = self.data.get(count * self.segment..).unwrap_or_default();
        Self { data, first: self.first + count, ..*self }
    }

    /// The payloads after the first `count`, if there are any.
    pub(crate) fn after(&self, count: usize) -> Option<Self> {
        Some(self.skip(count)).filter(|left| !left.data.is_empty())
    }

    /// The frame of the first datagram, whose header is completed in `prefix` if it is cut.
    pub(super) fn first<'b>(&self, prefix: &'b mut [u8; MOST_PREFIX]) -> Frame<'b>
    where
        'a: 'b,
    {
        let payload = &self.data[..self.segment.min(self.data.len())];
        let header = match self.cut {
            None => self.header,
            Some(cut) => {
                let prefix = &mut prefix[..self.prefix_len()];
                self.write_prefix(prefix);
                cut.complete_header(&mut prefix[self.header.len()..], self.first, payload);
                prefix
            }
        };
        Frame { header, payload, counted: true, tos: self.tos }
    }

    /// Writes the prefix of each payload, for [`Payloads::complete`].
    #[inline]
    pub(super) fn write_prefix(&self, prefix: &mut [u8]) {
        let (context, headers) = prefix.split_at_mut(self.header.len());
        context.copy_from_slice(self.header);
        if let Some(cut) = self.cut {
            headers.copy_from_slice(cut.header());
        }
    }

    /// Completes a copy of the prefix for the payload `index` after the first.
    #[inline]
    pub(super) fn complete(&self, prefix: &mut [u8], index: usize, payload: &[u8]) {
        if let Some(cut) = self.cut {
            cut.complete_header(&mut prefix[self.header.len()..], self.first + index, payload);
        }
    }

    /// The datagrams that have the full length.
    pub(super) fn full(&self) -> std::slice::ChunksExact<'a, u8> {
        self.data.chunks_exact(self.segment.max(1))
    }
}
