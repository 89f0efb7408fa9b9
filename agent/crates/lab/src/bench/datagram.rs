//! The format of the datagrams of a run.
//!
//! ```text
//!  0      4      5           6      8     12     16         24        32            size
//!  | CvB1 | kind | direction | size | run | flow | sequence | sent ns | body or pattern |
//! ```
//!
//! All numbers are big-endian. `sent ns` counts from the sender's own start, so only one process can subtract it.

use bytes::BufMut as _;
use net::{Path, SendBatch};

use crate::bench::tally::Counts;

/// The bytes of the header that precedes the body.
pub(super) const HEADER_LEN: usize = 32;

/// The smallest payload of a run: the header, and the longest body of a control datagram that an agent must carry.
pub(super) const MIN_SIZE: usize = 64;

/// The largest payload of a UDP datagram over IPv4.
pub(super) const MAX_SIZE: usize = 65_507;

/// The bytes of the longest control datagram.
pub(super) const CONTROL_LEN: usize = 128;

/// Flows of a run: what one source address has of dynamic ports.
pub(super) const MAX_FLOWS: u32 = 28_232;

/// The flow number of the probe, which no flow of the load has.
pub(super) const PROBE_FLOW: u32 = u32::MAX;

const MAGIC: [u8; 4] = *b"CvB1";

/// The purpose that a datagram of the bench has.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Kind {
    /// Client to sink: makes the flow known; the body is the [`Plan`].
    Open,
    /// Sink to client: the flow is known.
    Welcome,
    /// Client to sink: begin to send, if the plan says so.
    Start,
    /// Load of the warm-up, which is not counted.
    Warmup,
    /// Load of the measurement, which is counted.
    Data,
    /// Client to sink: send it back at once.
    Probe,
    /// Sink to client: a probe that came back.
    Echo,
    /// Client to sink: nothing more follows, how much arrived?
    End,
    /// Sink to client: the answer; the body is the [`Report`].
    Report,
}

impl Kind {
    const ALL: [Self; 9] = [
        Self::Open,
        Self::Welcome,
        Self::Start,
        Self::Warmup,
        Self::Data,
        Self::Probe,
        Self::Echo,
        Self::End,
        Self::Report,
    ];

    fn is_load(self) -> bool {
        matches!(self, Self::Warmup | Self::Data)
    }
}

/// The header that every datagram begins with.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Header {
    pub(super) kind: Kind,
    /// Whether it goes from the sink to a client.
    pub(super) down: bool,
    /// Tells runs apart: what a run before left on its way is ignored.
    pub(super) run: u32,
    pub(super) flow: u32,
    /// Counts the datagrams of a kind, flow and direction.
    pub(super) sequence: u64,
    pub(super) sent_ns: u64,
}

/// The bytes are not what a sender wrote.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Corrupt;

impl Header {
    /// Writes the header, and behind it the pattern of load, over all of `datagram`, which has at least
    /// [`HEADER_LEN`] bytes. The body of a control datagram is left to the caller.
    pub(super) fn write(&self, datagram: &mut [u8]) {
        let size = datagram.len() as u16;
        let (header, rest) = datagram.split_at_mut(HEADER_LEN);
        header[..4].copy_from_slice(&MAGIC);
        header[4] = self.kind as u8;
        header[5] = self.down.into();
        header[6..8].copy_from_slice(&size.to_be_bytes());
        header[8..12].copy_from_slice(&self.run.to_be_bytes());
        header[12..16].copy_from_slice(&self.flow.to_be_bytes());
        header[16..24].copy_from_slice(&self.sequence.to_be_bytes());
        header[24..32].copy_from_slice(&self.sent_ns.to_be_bytes());
        if self.kind.is_load() {
            rest.fill(self.pattern());
        }
    }

    /// Reads the header of a complete datagram; of load it checks the length and both ends of the pattern.
    pub(super) fn read(datagram: &[u8]) -> Result<Self, Corrupt> {
        let (header, rest) = datagram.split_first_chunk::<HEADER_LEN>().ok_or(Corrupt)?;
        let kind = Kind::ALL.get(usize::from(header[4])).copied().ok_or(Corrupt)?;
        let mut fields = Fields(&header[6..]);
        let size: u16 = u16::from_be_bytes(fields.take());
        let read = Self {
            kind,
            down: header[5] != 0,
            run: u32::from_be_bytes(fields.take()),
            flow: u32::from_be_bytes(fields.take()),
            sequence: u64::from_be_bytes(fields.take()),
            sent_ns: u64::from_be_bytes(fields.take()),
        };
        let complete = header[..4] == MAGIC && usize::from(size) == datagram.len() && header[5] <= 1;
        let pattern = read.pattern();
        let intact = !kind.is_load()
            || rest.first().is_none_or(|byte| *byte == pattern)
                && rest.last().is_none_or(|byte| *byte == pattern);
        if complete && intact { Ok(read) } else { Err(Corrupt) }
    }

    /// Adds a control datagram with this header to `batch`, if there is room.
    pub(super) fn put_control(&self, batch: &mut SendBatch, path: &Path, body: &dyn Fn(&mut [u8])) {
        let Some(room) = batch.tail(CONTROL_LEN) else { return };
        self.write(room);
        body(&mut room[HEADER_LEN..]);
        batch.commit(path, 0, CONTROL_LEN, 1);
    }

    /// Makes `datagram`, which holds a probe, its echo.
    pub(super) fn set_echo(datagram: &mut [u8]) {
        datagram[4] = Kind::Echo as u8;
        datagram[5] = true.into();
    }

    /// Neighbours differ in it, and so do the same datagrams of two flows.
    fn pattern(&self) -> u8 {
        let mixed = (self.sequence ^ u64::from(self.flow) << 32).wrapping_mul(0x9e37_79b9_7f4a_7c15);
        (mixed >> 56) as u8
    }
}

/// Takes numbers off the front of bytes; past the end they are 0.
struct Fields<'a>(&'a [u8]);

impl Fields<'_> {
    fn take<const N: usize>(&mut self) -> [u8; N] {
        let Some((bytes, rest)) = self.0.split_first_chunk() else { return [0; N] };
        self.0 = rest;
        *bytes
    }
}

base::labelled! {
    /// The direction in which the load goes.
    #[derive(Clone, Copy, Debug, PartialEq, Eq)]
    pub enum Direction {
        /// From the clients to the sink.
        Up => "up",
        /// From the sink to the clients.
        Down => "down",
        /// Both at once, each at the whole rate.
        Both => "both",
    }
}

impl Direction {
    /// Whether the clients send to the sink.
    pub(super) fn up(self) -> bool {
        self != Self::Down
    }

    /// Whether the sink sends to the clients.
    pub(super) fn down(self) -> bool {
        self != Self::Up
    }
}

/// The parameters that both ends of a run must know.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Plan {
    pub(super) direction: Direction,
    pub(super) flows: u32,
    /// The payload of each datagram, in bytes.
    pub(super) size: u16,
    /// The number of datagrams in a burst.
    pub(super) burst: u16,
    /// Payload bits per second of all flows and each direction; none is as fast as it goes.
    pub(super) bits_per_second: Option<u64>,
    pub(super) warmup_ms: u32,
    pub(super) measured_ms: u32,
}

impl Plan {
    /// Writes the body of [`Kind::Open`] behind the header.
    pub(super) fn write(&self, mut body: &mut [u8]) {
        body.put_u8(self.direction as u8);
        body.put_u32(self.flows);
        body.put_u16(self.size);
        body.put_u16(self.burst);
        body.put_u64(self.bits_per_second.unwrap_or(0));
        body.put_u32(self.warmup_ms);
        body.put_u32(self.measured_ms);
    }

    /// Reads the body; none if a sender cannot have meant it.
    pub(super) fn read(body: &[u8]) -> Option<Self> {
        let mut fields = Fields(body);
        let [direction] = fields.take();
        let plan = Self {
            direction: *Direction::ALL.get(usize::from(direction))?,
            flows: u32::from_be_bytes(fields.take()),
            size: u16::from_be_bytes(fields.take()),
            burst: u16::from_be_bytes(fields.take()),
            bits_per_second: Some(u64::from_be_bytes(fields.take())).filter(|rate| *rate > 0),
            warmup_ms: u32::from_be_bytes(fields.take()),
            measured_ms: u32::from_be_bytes(fields.take()),
        };
        let sane = (1..=MAX_FLOWS).contains(&plan.flows)
            && (MIN_SIZE..=MAX_SIZE).contains(&plan.size.into())
            && plan.burst > 0
            && plan.measured_ms > 0;
        sane.then_some(plan)
    }
}

/// The counts of one flow at the sink, and those of the sink itself.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Report {
    /// The datagrams of the flow that arrived.
    pub(super) counts: Counts,
    /// The datagrams that the sink sent on the flow.
    pub(super) sent: u64,
    /// Whether the sink will send more.
    pub(super) sending: bool,
    /// The counts of the sink, all flows together.
    pub(super) corrupt: u64,
    pub(super) kernel_drops: u64,
    pub(super) blocked: u64,
    pub(super) errors: u64,
}

impl Report {
    /// Writes the body of [`Kind::Report`] behind the header.
    pub(super) fn write(&self, mut body: &mut [u8]) {
        body.put_u64(self.counts.distinct);
        body.put_u64(self.counts.duplicates);
        body.put_u64(self.counts.reordered);
        body.put_u64(self.sent);
        body.put_u64(self.corrupt);
        body.put_u64(self.kernel_drops);
        body.put_u64(self.blocked);
        body.put_u64(self.errors);
        body.put_u8(self.sending.into());
    }

    /// Reads the body of [`Kind::Report`] behind the header.
    pub(super) fn read(body: &[u8]) -> Self {
        let mut fields = Fields(body);
        let mut number = || u64::from_be_bytes(fields.take());
        Self {
            counts: Counts { distinct: number(), duplicates: number(), reordered: number() },
            sent: number(),
            corrupt: number(),
            kernel_drops: number(),
            blocked: number(),
            errors: number(),
            sending: fields.take() != [0],
        }
    }
}

/// Takes `input` as a datagram of a run.
///
/// A header that is read, written over the same number of bytes, is read as the same one. Load is refused if either end of it changed.
#[cfg(any(test, feature = "fuzzing"))]
pub fn bench_datagram(input: &[u8]) {
    let Ok(header) = Header::read(input) else { return };
    let mut again = input.to_vec();
    header.write(&mut again);
    assert_eq!(Header::read(&again), Ok(header));
    if header.kind.is_load() {
        if let Some(last) = again.get_mut(HEADER_LEN..).and_then(<[u8]>::last_mut) {
            *last ^= 1;
            assert_eq!(Header::read(&again), Err(Corrupt));
        }
        return;
    }
    assert_eq!(again, input);
    let body = &input[HEADER_LEN..];
    let mut written = [0; CONTROL_LEN];
    if let Some(plan) = Plan::read(body) {
        plan.write(&mut written);
        assert_eq!(Plan::read(&written), Some(plan));
    }
    let report = Report::read(body);
    report.write(&mut written);
    assert_eq!(Report::read(&written), report);
}

#[cfg(test)]
mod tests {
    use super::*;

    fn header(kind: Kind) -> Header {
        Header { kind, down: true, run: 7, flow: 3, sequence: 1 << 40, sent_ns: 123_456_789_012 }
    }

    #[test]
    fn a_header_is_read_as_it_was_written_at_every_size() {
        for size in [HEADER_LEN, HEADER_LEN + 1, MIN_SIZE, 1150, MAX_SIZE] {
            for kind in Kind::ALL {
                let mut datagram = vec![0xee; size];
                header(kind).write(&mut datagram);
                assert_eq!(Header::read(&datagram), Ok(header(kind)));
            }
        }
    }

    /// A client and a sink may be of two versions.
    #[test]
    fn the_bytes_are_the_same_in_every_version() {
        for (number, kind) in (0..).zip([
            Kind::Open,
            Kind::Welcome,
            Kind::Start,
            Kind::Warmup,
            Kind::Data,
            Kind::Probe,
            Kind::Echo,
            Kind::End,
            Kind::Report,
        ]) {
            let mut datagram = [0; HEADER_LEN];
            header(kind).write(&mut datagram);
            let numbers =
                [0, 0, 0, 7, 0, 0, 0, 3, 0, 0, 1, 0, 0, 0, 0, 0, 0, 0, 0, 0x1c, 0xbe, 0x99, 0x1a, 0x14];
            assert_eq!(datagram[..], [&b"CvB1"[..], &[number, 1, 0, 32], &numbers].concat(), "{kind:?}");
        }
        let plan = Plan {
            direction: Direction::Both,
            flows: 1,
            size: 1150,
            burst: 2,
            bits_per_second: Some(3),
            warmup_ms: 4,
            measured_ms: 5,
        };
        let mut body = [0; 25];
        plan.write(&mut body);
        assert_eq!(body, [2, 0, 0, 0, 1, 4, 0x7e, 0, 2, 0, 0, 0, 0, 0, 0, 0, 3, 0, 0, 0, 4, 0, 0, 0, 5]);
        let report = Report {
            counts: Counts { distinct: 1, duplicates: 2, reordered: 3 },
            sent: 4,
            sending: true,
            corrupt: 5,
            kernel_drops: 6,
            blocked: 7,
            errors: 8,
        };
        let mut body = [0; 65];
        report.write(&mut body);
        let mut counts: Vec<u8> = (1..=8).flat_map(|count: u64| count.to_be_bytes()).collect();
        counts.push(1);
        assert_eq!(body[..], counts);
    }

    #[test]
    fn changed_load_is_corrupt() {
        let mut datagram = vec![0; 100];
        header(Kind::Data).write(&mut datagram);
        // Both ends of the pattern, the length, the magic, the kind, and what the pattern is derived from.
        for at in [HEADER_LEN, 99, 7, 0, 4, 5, 20] {
            let mut changed = datagram.clone();
            changed[at] ^= 0x80;
            assert_eq!(Header::read(&changed), Err(Corrupt), "byte {at}");
        }
        assert_eq!(Header::read(&datagram[..99]), Err(Corrupt));
        assert_eq!(Header::read(&datagram[..HEADER_LEN - 1]), Err(Corrupt));
        assert_eq!(Header::read(&[]), Err(Corrupt));
    }

    #[test]
    fn a_plan_and_a_report_are_read_as_they_were_written() {
        let mut body = [0; CONTROL_LEN - HEADER_LEN];
        for (direction, bits_per_second) in
            [(Direction::Up, None), (Direction::Down, Some(5_000_000_000)), (Direction::Both, Some(1))]
        {
            let plan = Plan {
                direction,
                flows: 300,
                size: 1150,
                burst: 56,
                bits_per_second,
                warmup_ms: 0,
                measured_ms: 5_000,
            };
            plan.write(&mut body);
            assert_eq!(Plan::read(&body), Some(plan));
        }
        assert_eq!(Plan::read(&[0; 32]), None);
        assert_eq!(Plan::read(&[3; 32]), None);

        let report = Report {
            counts: Counts { distinct: 1, duplicates: 2, reordered: 3 },
            sent: 4,
            sending: true,
            corrupt: 5,
            kernel_drops: 6,
            blocked: 7,
            errors: u64::MAX,
        };
        report.write(&mut body);
        assert_eq!(Report::read(&body), report);
    }
}
