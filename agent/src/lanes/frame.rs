//! What is put into packets: one frame, or a run of datagrams that become a frame each.

/// What one DATAGRAM frame is to carry.
#[derive(Clone, Copy, Debug)]
pub struct Frame<'a> {
    /// The encoded context.
    pub header: &'a [u8],
    /// The payload; empty for a message about a flow.
    pub payload: &'a [u8],
    /// Whether it carries a datagram, which the peer's account settles.
    pub counted: bool,
}

/// Datagrams of one flow, end to end, each of which a DATAGRAM frame is to carry.
#[derive(Clone, Copy, Debug)]
pub struct Payloads<'a> {
    /// The encoded context, alike for all.
    pub header: &'a [u8],
    /// Their bytes; without any they are one empty datagram.
    pub data: &'a [u8],
    /// Bytes of each but the last, which may be shorter.
    pub segment: usize,
}

impl<'a> Payloads<'a> {
    /// How many there are.
    #[must_use]
    pub fn count(&self) -> usize {
        if self.data.is_empty() { 1 } else { self.data.len().div_ceil(self.segment.max(1)) }
    }

    /// Those after the first `count`.
    pub(super) fn skip(&self, count: usize) -> Self {
        Self { data: self.data.get(count * self.segment..).unwrap_or_default(), ..*self }
    }

    pub(super) fn first(&self) -> Frame<'a> {
        let payload = &self.data[..self.segment.min(self.data.len())];
        Frame { header: self.header, payload, counted: true }
    }

    /// Those that have the full length.
    pub(super) fn full(&self) -> std::slice::ChunksExact<'a, u8> {
        self.data.chunks_exact(self.segment.max(1))
    }
}
