//! The parts of a run of payloads that passes to a lane or to another worker.

use std::time::{Duration, Instant};

use repair::RepairClass;
use wire::context::{Context, FlowNumber, Header};

use crate::relay::PartlySent;

/// Datagrams that lie end to end, all of one size.
#[derive(Clone, Copy, Debug)]
pub struct Segments<'a> {
    /// The bytes of all the datagrams.
    pub data: &'a [u8],
    /// The size of each datagram in bytes; the last one may be shorter.
    pub segment: usize,
}

impl Segments<'_> {
    /// The number of datagrams; no bytes are one empty datagram.
    #[inline]
    pub(super) fn count(&self) -> usize {
        self.data.len().div_ceil(self.segment.max(1)).max(1)
    }

    pub(super) fn first(&self) -> &[u8] {
        &self.data[..self.data.len().min(self.segment)]
    }

    /// The datagrams after the first `count`.
    pub(super) fn skip(&self, count: usize) -> Self {
        Segments { data: self.data.get(count * self.segment..).unwrap_or_default(), segment: self.segment }
    }
}

/// The header of the frames that are to carry a run of datagrams.
#[derive(Clone, Copy, Debug)]
pub struct CountedHeader {
    /// The header that precedes each datagram in its frame.
    pub header: Header,
    /// The number of datagrams of the run that an account counts; 0 for a message about a flow.
    pub counted: u32,
}

impl CountedHeader {
    /// The header of a run of `count` datagrams.
    pub(super) fn of(header: Header, count: usize) -> Self {
        Self { header, counted: u32::try_from(count).unwrap_or(u32::MAX) }
    }
}

/// How a run of datagrams is sent, by this worker or by the lane host that it is handed to.
#[derive(Clone, Copy, Debug)]
pub struct Sending {
    /// The traffic class of the packets that are to carry the datagrams.
    pub tos: u8,
    /// The time for which the datagrams have been at this host.
    pub age: Duration,
    /// How the datagrams are repaired; `None`: they are not.
    pub repair: Option<RepairClass>,
}

impl Sending {
    /// When the datagrams came to this host.
    #[inline]
    pub(super) fn arrived(&self, now: Instant) -> Instant {
        now.checked_sub(self.age).unwrap_or(now)
    }
}

/// A datagram that is being cut: which one, and how much of it is in packets.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Cutting {
    pub(super) number: FlowNumber,
    pub(super) datagram: u32,
    pub(super) total: u16,
    pub(super) offset: u16,
}

impl Cutting {
    /// This datagram where it was partly sent before, if it was.
    pub(super) fn resumed(self, partly_sent: Option<PartlySent>) -> Self {
        partly_sent.map_or(self, |PartlySent { datagram, offset }| Self { datagram, offset, ..self })
    }

    pub(super) fn header(&self) -> Header {
        let &Self { number, datagram, total, offset } = self;
        Context::Piece { number, datagram, total, offset, payload_at: 0 }.encode()
    }
}
