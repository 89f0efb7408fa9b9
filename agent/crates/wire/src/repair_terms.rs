//! What two agents agree on about the repair of lost payloads, and the streams of numbers in which they travel.

use std::{ops::RangeInclusive, time::Duration};

use crate::{messages::MessageError, protobuf};

base::labelled! {
    /// The means by which lost payloads are repaired.
    #[derive(Clone, Copy, Debug, PartialEq, Eq)]
    pub enum Mode {
        /// Nothing is repaired: payloads travel plain.
        Off => "off",
        /// The receiver asks for what is missing, and gets it again.
        Retransmit => "retransmit",
        /// Repair symbols travel beside the payloads (forward error correction).
        Fec => "fec",
        /// Whatever of these the path needs at present.
        Auto => "auto",
    }
}

base::labelled! {
    /// When a payload is delivered that came before an earlier one of its flow.
    #[derive(Clone, Copy, Debug, PartialEq, Eq)]
    pub enum Order {
        /// At once, so that the payloads of a flow may change places.
        Asap => "asap",
        /// In the order of their flow, waiting at most the deadline for a missing one.
        Hold => "hold",
    }
}

/// The deadlines that [`Deadline::Fixed`] may have.
pub const DEADLINES: RangeInclusive<Duration> = Duration::from_millis(5)..=Duration::from_secs(2);

/// How long a missing payload may still come, from the first later one.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Deadline {
    /// As long as two requests and their answers take on the path at hand.
    Path,
    /// A number of whole milliseconds within [`DEADLINES`].
    Fixed(Duration),
}

impl Deadline {
    /// That of [`Deadline::Path`] on a path that is not known yet, and at an end that knows fixed ones only.
    pub const USUAL: Duration = Duration::from_millis(200);

    /// The deadline on a path with this round trip, which is zero where it is not known.
    #[must_use]
    pub fn on(self, rtt: Duration) -> Duration {
        /// A shorter wait is of no use to most applications: hosts stall, and the next request costs little.
        const LEAST: Duration = Duration::from_millis(100);
        /// Real-time traffic of which less is known than this is of no use after it.
        const MOST: Duration = Duration::from_millis(400);
        /// Batches and timers at both ends, and the variation of a round trip.
        const MARGIN: Duration = Duration::from_millis(20);
        match self {
            Self::Path if rtt.is_zero() => Self::USUAL,
            // A request and its answer, and after an eighth of a round trip both again.
            Self::Path => (2 * rtt + rtt / 4 + MARGIN).clamp(LEAST, MOST),
            Self::Fixed(deadline) => deadline,
        }
    }

    /// What travels: a number of milliseconds for every end.
    pub(crate) fn milliseconds(self) -> u32 {
        // At most two seconds.
        self.on(Duration::ZERO).as_millis() as u32
    }
}

/// The largest [`Terms::max_overhead_ppm`]: two repairs for each payload.
pub const MOST_OVERHEAD_PPM: u32 = 2_000_000;

/// How payloads are repaired: what both ends of a stream have to know.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Terms {
    /// The means that the sender may use.
    pub mode: Mode,
    /// How long a missing payload may still come.
    pub deadline: Deadline,
    /// The bytes of repair in proportion to those of payloads, in millionths, at most [`MOST_OVERHEAD_PPM`].
    pub max_overhead_ppm: u32,
    /// When the receiver delivers what came early.
    pub order: Order,
}

impl Terms {
    /// No repair; the other fields are the defaults of the configuration.
    pub const OFF: Self =
        Self { mode: Mode::Off, deadline: Deadline::Path, max_overhead_ppm: 300_000, order: Order::Asap };

    /// The terms, unless they say that nothing is repaired.
    #[must_use]
    pub fn in_use(self) -> Option<Self> {
        (self.mode != Mode::Off).then_some(self)
    }

    /// Checks terms as they travel; a mode that this version does not know counts as [`Mode::Auto`].
    pub(crate) fn of_wire(repair: protobuf::Repair) -> Result<Option<Self>, MessageError> {
        let protobuf::Repair { mode, deadline_ms, max_overhead_ppm, hold, path_deadline } = repair;
        let mode = match mode {
            0 => return Ok(None),
            1 => Mode::Retransmit,
            2 => Mode::Fec,
            _ => Mode::Auto,
        };
        let deadline = Duration::from_millis(deadline_ms.into());
        if !DEADLINES.contains(&deadline) {
            return Err(MessageError::Range { field: "deadline_ms", value: deadline_ms });
        }
        let deadline = if path_deadline { Deadline::Path } else { Deadline::Fixed(deadline) };
        if max_overhead_ppm > MOST_OVERHEAD_PPM {
            return Err(MessageError::Range { field: "max_overhead_ppm", value: max_overhead_ppm });
        }
        let order = if hold { Order::Hold } else { Order::Asap };
        Ok(Some(Self { mode, deadline, max_overhead_ppm, order }))
    }
}

/// A stream of numbered payloads on one opening of a lane, or in one session without lanes: those of a service, or IP packets.
///
/// ```text
/// 0          IP packets
/// 2n + 1     payloads of service n of the end that numbers them
/// 2n + 2     payloads of service n of the other end
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct StreamNumber(pub u16);

/// Who offers the service whose payloads a stream carries.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum StreamOf {
    /// The stream carries IP packets, which belong to no service.
    Packets,
    /// The end that numbers the payloads offers the service with this number.
    SendersService(u16),
    /// The end that receives the payloads offers the service with this number.
    ReceiversService(u16),
}

impl StreamNumber {
    /// Stream numbers are below this: a varint of at most two bytes.
    pub const END: u16 = 1 << 14;

    /// The number of a stream; `None` for a service whose number is too large to be repaired.
    #[must_use]
    pub fn of(stream: StreamOf) -> Option<Self> {
        let number = match stream {
            StreamOf::Packets => 0,
            StreamOf::SendersService(number) => 2 * u32::from(number) + 1,
            StreamOf::ReceiversService(number) => 2 * u32::from(number) + 2,
        };
        u16::try_from(number).ok().filter(|number| *number < Self::END).map(Self)
    }

    /// What the stream carries, as the end sees it that numbers the payloads.
    #[must_use]
    pub const fn carries(self) -> StreamOf {
        match self.0 {
            0 => StreamOf::Packets,
            odd if odd % 2 == 1 => StreamOf::SendersService(odd / 2),
            even => StreamOf::ReceiversService(even / 2 - 1),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_stream_names_what_it_carries() {
        for number in 0..StreamNumber::END {
            let stream = StreamNumber(number);
            assert_eq!(StreamNumber::of(stream.carries()), Some(stream));
        }
        assert_eq!(StreamNumber::of(StreamOf::SendersService(3)), Some(StreamNumber(7)));
        assert_eq!(StreamNumber::of(StreamOf::ReceiversService(3)), Some(StreamNumber(8)));
        assert_eq!(StreamNumber::of(StreamOf::SendersService(8192)), None);
    }

    #[test]
    fn a_deadline_follows_the_path_within_bounds() {
        let on = |rtt_ms| Deadline::Path.on(Duration::from_millis(rtt_ms)).as_millis();
        assert_eq!([0, 1, 20, 80, 120, 500].map(on), [200, 100, 100, 200, 290, 400]);
        let fixed = Duration::from_secs(2);
        assert_eq!(Deadline::Fixed(fixed).on(Duration::from_millis(80)), fixed);
    }

    #[test]
    fn terms_beyond_the_limits_are_refused() {
        let terms = |mode, deadline_ms, max_overhead_ppm| {
            let path_deadline = deadline_ms == 200;
            Terms::of_wire(protobuf::Repair {
                mode,
                deadline_ms,
                max_overhead_ppm,
                hold: true,
                path_deadline,
            })
        };
        assert_eq!(terms(0, 0, 0).ok(), Some(None));
        let auto = Terms { mode: Mode::Auto, order: Order::Hold, max_overhead_ppm: 5, ..Terms::OFF };
        assert_eq!([terms(3, 200, 5).ok(), terms(9, 200, 5).ok()], [Some(Some(auto)); 2]);
        assert!(terms(1, 4, 0).is_err() && terms(1, 2_001, 0).is_err() && terms(1, 5, 2_000_001).is_err());
        assert!(terms(1, 5, 2_000_000).is_ok());
    }
}
