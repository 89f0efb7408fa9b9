//! Records the events on a lane, packet by packet, for an observer: records of one size, in bounded memory.

use std::time::{Duration, Instant};

use crate::{
    ack::{Rtt, Volume},
    frame::{Frame, Frames},
    packet::{HEADER_LEN, TAG_LEN},
};

/// One thing that happened on a lane.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Record {
    /// When, in microseconds after the recorder's origin; an hour and more reads as the last moment that 32 bits hold.
    pub micros: u32,
    /// The event that happened at that time.
    pub event: Event,
}

const _: () = assert!(size_of::<Record>() <= 40, "a recorder holds tens of thousands");

/// An event on a lane. A packet is followed by an [`Event::Frame`] for each of its frames.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Event {
    /// A packet was sealed by this end.
    Sent {
        /// The number of the packet that was sealed.
        number: u64,
        /// The length of the packet, header and tag included.
        bytes: u16,
        /// The reason why the packet was sealed.
        purpose: Purpose,
    },
    /// A packet was opened by this end.
    Received {
        /// The number of the packet that was opened.
        number: u64,
        /// The length of the packet, header and tag included.
        bytes: u16,
        /// The ECN bits of its datagram, as told with [`Recorder::note_ecn`].
        ecn: u8,
    },
    /// A frame of the packet before.
    Frame(SeenFrame),
    /// A packet of this end was declared lost.
    Lost {
        /// The number of the lost packet.
        number: u64,
        /// The length of the lost packet, header and tag included.
        bytes: u16,
        /// The rule by which it was declared lost.
        rule: LossRule,
        /// Whether it probed the path's MTU, and so was most likely lost for its size.
        mtu_probe: bool,
    },
    /// A packet that had been declared lost was acknowledged.
    SpuriouslyLost {
        /// The number of the packet.
        number: u64,
    },
    /// The state of loss recovery after an acknowledgement or a loss.
    Metrics(Metrics),
    /// This end seals with new keys.
    KeyUpdate {
        /// The number of key updates on this lane so far.
        generation: u32,
        /// Whether this end followed an update of the other end.
        followed: bool,
    },
    /// The largest packet that the path carries, as far as is known, is another one.
    Mtu {
        /// The bytes of UDP payload that were possible before.
        old: u16,
        /// The bytes of UDP payload that are possible from now on.
        new: u16,
    },
}

/// The reason why a packet was sealed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Purpose {
    /// To send the frames that the caller wrote.
    Frames,
    /// To draw an acknowledgement, because the tail stays unacknowledged (RFC 9002 §6.2).
    Probe,
    /// To find out whether the path carries packets of its size (RFC 8899).
    MtuProbe,
}

/// A frame, without what it carries.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum SeenFrame {
    /// A run of PADDING frames, recorded as one.
    Padding {
        /// The number of PADDING frames in the run.
        bytes: u16,
    },
    /// A PING frame, which asks for an ACK.
    Ping,
    /// An ACK frame; its ranges follow as [`SeenFrame::AckRange`].
    Ack {
        /// The time for which the largest packet was held back.
        delay_micros: u32,
    },
    /// The next range of the ACK before, from the highest down.
    AckRange {
        /// The lowest packet number of the range.
        first: u64,
        /// The highest packet number of the range.
        last: u64,
    },
    /// A PATH_CHALLENGE frame, without its data.
    PathChallenge,
    /// A PATH_RESPONSE frame, without its data.
    PathResponse,
    /// A DATAGRAM frame, without its payload.
    Datagram {
        /// The bytes of the frame's payload.
        bytes: u16,
    },
}

/// The rule by which a packet was found to be lost (RFC 9002 §6.1).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum LossRule {
    /// Three packets that were sent later were acknowledged.
    Count,
    /// A later one was acknowledged, and it has been long.
    Time,
}

/// The state of loss recovery after an acknowledgement or a loss.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Metrics {
    /// The least RTT, in microseconds; `None` before the first sample.
    pub min_rtt: Option<u32>,
    /// The newest sample, in microseconds; 0 before the first.
    pub latest_rtt: u32,
    /// The smoothed RTT, in microseconds (RFC 9002 §5.3).
    pub smoothed_rtt: u32,
    /// The mean deviation of the RTT, in microseconds.
    pub rtt_variation: u32,
    /// Ack-eliciting packets that are neither acknowledged nor lost.
    pub packets_in_flight: u32,
    /// The bytes of the packets in flight.
    pub bytes_in_flight: u32,
    /// Probes since an acknowledgement last told something new, at most 255.
    pub probes: u8,
}

impl Metrics {
    /// The probe timeout without back-off, as [`Rtt::pto`] counts it.
    pub fn pto(&self) -> Duration {
        let micros = |micros: u32| Duration::from_micros(micros.into());
        Rtt::pto_of(micros(self.smoothed_rtt), micros(self.rtt_variation))
    }
}

/// Holds records until they are taken; what finds it full is counted instead. It allocates when it is made, and never again.
#[derive(Debug)]
pub struct Recorder {
    origin: Instant,
    records: Vec<Record>,
    capacity: usize,
    /// The index of the last record that is no frame.
    head: usize,
    /// Whether that found room, so that its frames belong to it.
    open: bool,
    lost: u64,
}

impl Recorder {
    /// Makes a recorder with room for this many records, whose times count from `origin`.
    pub fn new(capacity: usize, origin: Instant) -> Self {
        Self { origin, records: Vec::with_capacity(capacity), capacity, head: 0, open: false, lost: 0 }
    }

    /// The records since the last [`clear`](Self::clear), oldest first, the frames of each packet behind it.
    pub fn records(&self) -> &[Record] {
        &self.records
    }

    /// The events that found no room since the last [`clear`](Self::clear); a packet is one, whatever its frames.
    pub fn lost(&self) -> u64 {
        self.lost
    }

    /// Forgets all events, which makes room for new ones.
    pub fn clear(&mut self) {
        self.records.clear();
        self.open = false;
        self.lost = 0;
    }

    /// The packet that was opened last came in a datagram with these ECN bits.
    #[cold]
    pub fn note_ecn(&mut self, bits: u8) {
        if self.open
            && let Some(Record { event: Event::Received { ecn, .. }, .. }) = self.packet()
        {
            *ecn = bits;
        }
    }

    /// `packet` is about to be sealed: room, frames, room.
    #[cold]
    pub(crate) fn sealing(&mut self, number: u64, packet: &[u8], now: Instant) {
        // One that is longer is not sealed.
        let bytes = packet.len() as u16;
        self.push(Event::Sent { number, bytes, purpose: Purpose::Frames }, now);
        let end = packet.len().saturating_sub(TAG_LEN);
        self.frames(Frames::new(packet.get(HEADER_LEN..end).unwrap_or_default()), now);
    }

    /// Drops the record of a packet that was not sealed after all.
    #[cold]
    pub(crate) fn not_sealed(&mut self) {
        if self.open {
            self.records.truncate(self.head);
            self.open = false;
        } else {
            self.lost = self.lost.saturating_sub(1);
        }
    }

    /// The packet that was sealed last has another purpose.
    #[cold]
    pub(crate) fn sealed_for(&mut self, why: Purpose) {
        if self.open
            && let Some(Record { event: Event::Sent { purpose, .. }, .. }) = self.packet()
        {
            *purpose = why;
        }
    }

    /// Records that a packet was opened, with its frames.
    #[cold]
    pub(crate) fn opened(&mut self, number: u64, bytes: u16, frames: Frames<'_>, now: Instant) {
        self.push(Event::Received { number, bytes, ecn: 0 }, now);
        self.frames(frames, now);
    }

    /// Something happened that has no frames.
    #[cold]
    pub(crate) fn note(&mut self, event: Event, now: Instant) {
        // The packet that it follows stays the last one: what is told of that later finds it.
        let (head, open) = (self.head, self.open);
        self.push(event, now);
        (self.head, self.open) = (head, open);
    }

    /// An acknowledgement or a loss was seen to.
    #[cold]
    pub(crate) fn metrics(&mut self, rtt: &Rtt, in_flight: Volume, probes: u32, now: Instant) {
        let metrics = Metrics {
            min_rtt: rtt.min().map(micros),
            latest_rtt: rtt.latest().map_or(0, micros),
            smoothed_rtt: micros(rtt.smoothed()),
            rtt_variation: micros(rtt.variation()),
            packets_in_flight: u32::try_from(in_flight.packets).unwrap_or(u32::MAX),
            bytes_in_flight: u32::try_from(in_flight.bytes).unwrap_or(u32::MAX),
            probes: u8::try_from(probes).unwrap_or(u8::MAX),
        };
        self.note(Event::Metrics(metrics), now);
    }

    fn frames(&mut self, mut frames: Frames<'_>, now: Instant) {
        let mut left = frames.remaining();
        while let Some(Ok(frame)) = frames.next() {
            let before = std::mem::replace(&mut left, frames.remaining());
            let seen = match frame {
                Frame::Padding => SeenFrame::Padding { bytes: (before - left) as u16 },
                Frame::Ping => SeenFrame::Ping,
                Frame::Ack(ack) => {
                    self.frame(SeenFrame::Ack { delay_micros: micros(ack.delay) }, now);
                    for range in ack.ranges() {
                        self.frame(SeenFrame::AckRange { first: *range.start(), last: *range.end() }, now);
                    }
                    continue;
                }
                Frame::PathChallenge(_) => SeenFrame::PathChallenge,
                Frame::PathResponse(_) => SeenFrame::PathResponse,
                Frame::Datagram(data) => SeenFrame::Datagram { bytes: data.len() as u16 },
            };
            self.frame(seen, now);
        }
    }

    fn push(&mut self, event: Event, now: Instant) {
        self.head = self.records.len();
        self.open = self.head < self.capacity;
        if self.open {
            self.records.push(Record { micros: self.micros(now), event });
        } else {
            self.lost += 1;
        }
    }

    /// A packet is recorded with all of its frames, or not at all.
    fn frame(&mut self, frame: SeenFrame, now: Instant) {
        if !self.open {
            return;
        }
        if self.records.len() < self.capacity {
            self.records.push(Record { micros: self.micros(now), event: Event::Frame(frame) });
        } else {
            self.records.truncate(self.head);
            self.open = false;
            self.lost += 1;
        }
    }

    /// The record of the packet that is being recorded.
    fn packet(&mut self) -> Option<&mut Record> {
        self.records.get_mut(self.head)
    }

    fn micros(&self, now: Instant) -> u32 {
        micros(now.saturating_duration_since(self.origin))
    }
}

fn micros(time: Duration) -> u32 {
    u32::try_from(time.as_micros()).unwrap_or(u32::MAX)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::frame::datagram;

    #[expect(
        clippy::disallowed_methods,
        reason = "a test needs some instant to start from; only differences matter"
    )]
    fn start() -> Instant {
        Instant::now()
    }

    /// A packet with two datagrams, before it is sealed.
    fn packet() -> Vec<u8> {
        let mut frames = [0; 40];
        let first = datagram::write_header_with_len(&mut frames, 5).unwrap() + 5;
        let len = first + datagram::write_header_to_end(&mut frames[first..]).unwrap() + 9;
        [&[0; HEADER_LEN][..], &frames[..len], &[0; TAG_LEN]].concat()
    }

    #[test]
    fn a_packet_is_followed_by_its_frames_or_is_not_there_at_all() {
        let (now, packet) = (start(), packet());
        let mut recorder = Recorder::new(5, now);
        for number in 0..3 {
            recorder.sealing(number, &packet, now + Duration::from_micros(number));
        }
        let events: Vec<Event> = recorder.records().iter().map(|record| record.event).collect();
        let bytes = packet.len() as u16;
        let sent = Event::Sent { number: 0, bytes, purpose: Purpose::Frames };
        let frame = |bytes| Event::Frame(SeenFrame::Datagram { bytes });
        assert_eq!(events, [sent, frame(5), frame(9)]);
        assert_eq!(recorder.lost(), 2, "the second began in the last two slots");

        // What has no frames finds the room that a packet did not.
        recorder.note(Event::SpuriouslyLost { number: 7 }, now);
        assert_eq!(recorder.records().last().unwrap().event, Event::SpuriouslyLost { number: 7 });
        recorder.clear();
        assert_eq!((recorder.records().len(), recorder.lost()), (0, 0));
    }

    #[test]
    fn what_is_told_of_a_packet_later_finds_it() {
        let (now, packet) = (start(), packet());
        let mut recorder = Recorder::new(8, now);
        recorder.sealing(1, &packet, now);
        recorder.sealed_for(Purpose::MtuProbe);
        recorder.opened(4, 60, Frames::new(&[1]), now + Duration::from_millis(3));
        recorder.note(Event::SpuriouslyLost { number: 2 }, now);
        recorder.note_ecn(3);
        recorder.sealing(2, &packet, now);
        recorder.not_sealed();
        recorder.note_ecn(1);
        let heads: Vec<Event> = recorder
            .records()
            .iter()
            .map(|record| record.event)
            .filter(|event| !matches!(event, Event::Frame(_)))
            .collect();
        let bytes = packet.len() as u16;
        assert_eq!(
            heads,
            [
                Event::Sent { number: 1, bytes, purpose: Purpose::MtuProbe },
                Event::Received { number: 4, bytes: 60, ecn: 3 },
                Event::SpuriouslyLost { number: 2 },
            ]
        );
        assert_eq!(recorder.records()[3].micros, 3000);
        assert_eq!(recorder.records()[4].event, Event::Frame(SeenFrame::Ping));
    }

    #[test]
    fn a_full_recorder_allocates_nothing_and_counts() {
        let (now, packet) = (start(), packet());
        let mut recorder = Recorder::new(4, now);
        let address = recorder.records().as_ptr();
        for number in 0..100 {
            recorder.sealing(number, &packet, now);
            recorder.not_sealed();
            recorder.opened(number, 60, Frames::new(&[1]), now);
        }
        assert_eq!((recorder.records().len(), recorder.lost()), (4, 98));
        assert_eq!(recorder.records().as_ptr(), address);
    }
}
