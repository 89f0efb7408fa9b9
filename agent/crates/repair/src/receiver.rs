//! The receiver's end of a stream of numbered payloads (pure): what is missing, what symbols give back, and what is delivered when.

use std::{
    sync::Arc,
    time::{Duration, Instant},
};

use wire::repair_terms::{Deadline, Mode, Order, StreamNumber, Terms};

use super::{
    decoder::{Decoder, DecoderLimits, RepairOutcome},
    gaps::{Ask, Asking},
    memory::{RepairMemory, Reserved},
    sequencer::{Arrival, Outcome, Sequencer, SequencerLimits, Waiting},
    symbol::{LENGTH_BYTES, MOST_PAYLOAD, Repair, expand},
};

/// Bytes before the frame in what is kept and recovered: the distance.
pub const DISTANCE_BYTES: usize = 2;

/// The memory of a stream's tables, in bytes.
const TABLE_BYTES: usize = 4 << 10;

/// The most that waits for missing payloads, and the most that decoding needs; the memory of all streams of the peer is limited
/// together.
const MOST_HELD_BYTES: usize = 64 << 20;

/// The longest payload in a packet of an Ethernet: decoders are made for it until a longer symbol comes.
const USUAL_PAYLOAD: usize = 1_500;

#[derive(Clone, Copy, Debug)]
pub enum Delivered<'a> {
    /// The payload that has just come.
    This,
    /// A frame that had waited, or was recovered.
    Other(&'a [u8]),
}

/// The receiver's end of a stream.
#[derive(Debug)]
pub struct Receiver {
    pub stream: StreamNumber,
    pub terms: Terms,
    /// How long a missing payload may still come.
    pub(super) deadline: Duration,
    pub(super) sequencer: Sequencer,
    /// There is one while repair symbols come.
    decoder: Option<Box<Decoder>>,
    /// When the last repair symbol came; `None` before the first.
    symbol: Option<Instant>,
    memory: Arc<RepairMemory>,
    begun: bool,
    _tables: Reserved,
}

impl Receiver {
    /// The end of a stream of which nothing has come; `None` without memory for it.
    #[must_use]
    pub fn new(stream: StreamNumber, terms: Terms, memory: &Arc<RepairMemory>) -> Option<Self> {
        let mut tables = Reserved::of(memory);
        if !tables.grow(TABLE_BYTES) {
            return None;
        }
        let deadline = terms.deadline.on(Duration::ZERO);
        let limits =
            SequencerLimits { deadline, held_packets: 1 << 16, held_bytes: MOST_HELD_BYTES, gaps: 512 };
        Some(Self {
            stream,
            terms,
            deadline,
            sequencer: Sequencer::new(terms.order, limits, memory),
            decoder: None,
            symbol: None,
            memory: Arc::clone(memory),
            begun: false,
            _tables: tables,
        })
    }

    /// The terms have changed; what waits goes by the new ones.
    pub fn set(&mut self, terms: Terms) {
        self.terms = terms;
        if let Deadline::Fixed(deadline) = terms.deadline {
            self.deadline = deadline;
        }
        self.set_times();
    }

    /// The stream begins with this number: what is below came before, or will not come.
    pub(super) fn begin_at(&mut self, number: u64) {
        self.begun = true;
        self.sequencer.begin_at(number);
    }

    /// The path has this round trip now, or zero if nobody knows it.
    pub fn set_rtt(&mut self, rtt: Duration) {
        let deadline = self.terms.deadline.on(rtt);
        if deadline != self.deadline {
            self.deadline = deadline;
            self.set_times();
        }
    }

    fn set_times(&mut self) {
        self.sequencer.set(self.terms.order, self.deadline);
        if let Some(decoder) = &mut self.decoder {
            decoder.set_times(self.deadline, 2 * self.deadline);
        }
    }

    /// The whole number of a payload of which 32 bits have come.
    pub fn complete(&mut self, number: u32) -> u64 {
        /// A first payload with a higher number than this is not the first that was sent.
        const BEGINNING: u64 = 64;
        let number = expand(number, self.sequencer.next());
        if !self.begun {
            self.begun = true;
            if number >= BEGINNING {
                self.sequencer.begin_at(number);
            }
        }
        number
    }

    /// Takes note of a payload that came, with its distance in front, for the decoding of others. Returns the work that it took.
    pub fn learn(
        &mut self,
        number: u64,
        payload: &[u8],
        now: Instant,
        deliver: &mut impl FnMut(Delivered<'_>),
    ) -> u64 {
        let Self { decoder: Some(decoder), sequencer, .. } = self else { return 0 };
        let before = decoder.counts.work;
        decoder.source(number, payload, now, &mut |number, payload| {
            recovered(sequencer, number, payload, now, deliver);
        });
        decoder.counts.work - before
    }

    /// Takes the payload `frame`, which came with this number and distance.
    pub fn receive(
        &mut self,
        number: u64,
        distance: u16,
        frame: &[u8],
        now: Instant,
        deliver: &mut impl FnMut(Delivered<'_>),
    ) -> Outcome {
        let arrival = Arrival { number, distance, recovered: false, payload: frame };
        self.sequencer.receive(&arrival, now, &mut |delivered, payload| {
            deliver(if delivered == number { Delivered::This } else { Delivered::Other(payload) });
        })
    }

    /// Takes a repair symbol. Returns the work that it took.
    pub fn repair(
        &mut self,
        header: [u8; 8],
        symbol: &[u8],
        now: Instant,
        deliver: &mut impl FnMut(Delivered<'_>),
    ) -> u64 {
        let payload_bytes = symbol.len().saturating_sub(LENGTH_BYTES);
        let decoded = Repair::decode(header, self.sequencer.next());
        let Some(repair) = decoded.filter(|_| payload_bytes <= MOST_PAYLOAD) else {
            self.sequencer.counts.malformed += 1;
            return 0;
        };
        self.symbol = Some(now);
        if self.decoder.as_ref().is_none_or(|decoder| decoder.limits.payload_bytes < payload_bytes) {
            self.decoder = None;
            self.decoder = self.new_decoder(payload_bytes);
        }
        let Self { decoder: Some(decoder), sequencer, .. } = self else {
            self.sequencer.counts.without_memory += 1;
            return 0;
        };
        let before = decoder.counts.work;
        let outcome = decoder.repair(&repair, symbol, now, &mut |number, payload| {
            recovered(sequencer, number, payload, now, deliver);
        });
        match outcome {
            RepairOutcome::Taken | RepairOutcome::Redundant | RepairOutcome::Outside => {}
            RepairOutcome::Malformed => sequencer.counts.malformed += 1,
            RepairOutcome::NoRoom => sequencer.counts.without_memory += 1,
        }
        decoder.counts.work - before
    }

    fn new_decoder(&self, payload_bytes: usize) -> Option<Box<Decoder>> {
        let limits = DecoderLimits {
            deadline: self.deadline,
            age: 2 * self.deadline,
            bytes: MOST_HELD_BYTES,
            equations: 64,
            payload_bytes: if payload_bytes <= USUAL_PAYLOAD { USUAL_PAYLOAD } else { MOST_PAYLOAD },
        };
        Decoder::new(limits, &self.memory).map(Box::new)
    }

    /// Gives up what has missed its deadline, and delivers what waited for it.
    pub fn expire(&mut self, now: Instant, deliver: &mut impl FnMut(Delivered<'_>)) {
        /// A decoder without symbols for so long is given up.
        const IDLE: Duration = Duration::from_secs(5);
        self.sequencer.expire(now, &mut |_, payload| deliver(Delivered::Other(payload)));
        if self.symbol.is_some_and(|last| now.saturating_duration_since(last) >= IDLE) {
            self.symbol = None;
            self.decoder = None;
        }
    }

    /// Lets at most so many payloads that waited be delivered from now on; what is due beyond that goes on with the next allowance.
    pub fn allow(&mut self, payloads: usize) {
        self.sequencer.allow(payloads);
    }

    /// How many may still be delivered.
    #[must_use]
    pub fn allowance(&self) -> usize {
        self.sequencer.allowance()
    }

    /// Gives up everything that is missing or waits, and returns what waited: nothing more will come.
    pub fn finish(&mut self) -> Waiting {
        self.sequencer.finish()
    }

    /// Appends the requests that are due on a path with this round trip.
    pub fn ask(&mut self, rtt: Duration, now: Instant, asks: &mut Vec<Ask>) {
        /// Payloads that one turn asks for.
        const MOST: u16 = 256;
        if self.terms.mode == Mode::Fec {
            return;
        }
        // Symbols may give what is missing meanwhile.
        let coded = self.terms.order == Order::Hold && self.decoder.is_some();
        let patience = if coded { rtt / 8 } else { Duration::ZERO };
        let before = asks.len();
        self.sequencer.ask(&Asking { rtt, patience, most: MOST }, now, asks);
        self.sequencer.counts.asked += (asks.len() - before) as u64;
    }

    /// When [`Receiver::ask`] has something to ask for, at the earliest.
    #[must_use]
    pub fn next_ask(&self) -> Option<Instant> {
        self.sequencer.next_ask().filter(|_| self.terms.mode != Mode::Fec)
    }
}

/// Takes a payload that a symbol gave, with its distance in front.
fn recovered(
    sequencer: &mut Sequencer,
    number: u64,
    payload: &[u8],
    now: Instant,
    deliver: &mut impl FnMut(Delivered<'_>),
) {
    // A peer's symbol may give anything.
    let Some((distance, payload)) = payload.split_first_chunk::<DISTANCE_BYTES>() else { return };
    let arrival = Arrival { number, distance: u16::from_be_bytes(*distance), recovered: true, payload };
    sequencer.receive(&arrival, now, &mut |_, payload| deliver(Delivered::Other(payload)));
}
