//! The parts of a run of payloads that passes to a lane or to another worker.

use std::time::Duration;

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

/// The header of the frames that are to carry a run of datagrams.
#[derive(Clone, Copy, Debug)]
pub struct CountedHeader {
    /// The header that precedes each datagram in its frame.
    pub header: Header,
    /// The number of datagrams of the run that an account counts; 0 for a message about a flow.
    pub counted: u32,
}

/// The marks that go along with the bytes of a run of datagrams.
#[derive(Clone, Copy, Debug)]
pub struct Marks {
    /// The traffic class of the packets that are to carry the datagrams.
    pub tos: u8,
    /// The time for which the datagrams have been at this host.
    pub age: Duration,
    /// How the datagrams are repaired; `None`: they are not.
    pub repair: Option<RepairClass>,
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
        partly_sent.map_or(self, |PartlySent { datagram, offset, .. }| Self { datagram, offset, ..self })
    }

    pub(super) fn header(&self) -> Header {
        let &Self { number, datagram, total, offset } = self;
        Context::Piece { number, datagram, total, offset, payload_at: 0 }.encode()
    }
}
