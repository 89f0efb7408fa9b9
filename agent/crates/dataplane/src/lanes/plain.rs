//! Standard mode: a peer without lanes gets its frames as plain DATAGRAM frames (RFC 9221) of the control connection.

use std::{
    collections::VecDeque,
    mem,
    time::{Duration, Instant},
};

use bytes::{Buf, Bytes, BytesMut};

use repair::{LaneRepair, PathCounts, Repaired};
use wire::context::REPAIR_OVERHEAD;

use crate::lanes::{Frame, Payloads, PushError, Room, frame::MOST_PREFIX, numbers::Number};

/// The limit on the bytes that wait for quinn-proto: as much as quinn-proto's own buffer.
const MAX_BYTES: usize = 1 << 20;

/// The memory that a frame costs beside its bytes: its entry and its allocation. It bounds the number of empty datagrams.
const OVERHEAD_BYTES: usize = 128;

/// Frames on their way to a control connection.
#[derive(Debug)]
pub struct Plain {
    waiting: VecDeque<PlainFrame>,
    /// The sum of the waiting frames' costs.
    held: usize,
    /// The largest frame that the connection takes now, in bytes; 0 if the peer takes none.
    most: usize,
    /// The limit on the sum of their costs.
    room: usize,
    /// The streams of payloads that are repaired; made with the first of them.
    pub repair: Option<Box<LaneRepair>>,
    /// What the control connection's path has done so far; `None` until it was asked, which is once there is something to repair.
    pub path: Option<PathCounts>,
    /// Whether the connection's packets go over TCP, which repairs what is lost.
    pub is_over_tcp: bool,
}

#[derive(Debug)]
pub struct PlainFrame {
    /// The bytes of the frame: context and payload.
    pub data: Bytes,
    /// Whether it carries a datagram, which the peer's account settles.
    pub counted: bool,
    /// The time at which its datagram came to this host.
    pub arrived: Instant,
    /// The number that it still has to get.
    unnumbered: Option<Repaired>,
}

impl PlainFrame {
    /// The bytes that it counts for in the limit.
    fn cost(&self) -> usize {
        self.data.len() + OVERHEAD_BYTES
    }
}

impl Plain {
    /// An empty queue, which takes frames of up to `most` bytes.
    #[must_use]
    pub fn new(most: Option<usize>) -> Self {
        Self {
            waiting: VecDeque::new(),
            held: 0,
            most: most.unwrap_or(0),
            room: MAX_BYTES,
            repair: None,
            path: None,
            is_over_tcp: false,
        }
    }

    /// Sets the largest frame that the connection takes now to `most` bytes.
    pub fn set_most(&mut self, most: Option<usize>) {
        self.most = most.unwrap_or(0);
    }

    /// The payloads that frames take behind a header of `header` bytes: each frame is alone.
    #[must_use]
    pub fn room(&self, header: usize) -> Room {
        Room { begun: 0, empty: self.most.saturating_sub(header) }
    }

    /// Sets the limit on the bytes that wait here: beyond it they wait in the queue, where flows take turns. One frame always fits.
    pub fn set_room(&mut self, bytes: usize) {
        self.room = bytes.min(MAX_BYTES);
    }

    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.waiting.is_empty()
    }

    /// Adds a frame with a payload that may be repaired.
    ///
    /// # Errors
    /// See [`PushError`]; the frame is then not added.
    pub fn push(
        &mut self,
        frame: Frame<'_>,
        repair: Option<Repaired>,
        arrived: Instant,
        now: Instant,
    ) -> Result<(), PushError> {
        let reserve = if repair.is_some() { REPAIR_OVERHEAD } else { 0 };
        let len = frame.header.len() + frame.payload.len();
        if len + reserve > self.most {
            return Err(PushError::TooLarge { most: self.room(frame.header.len() + reserve).empty });
        }
        // The number comes when the frame goes: what expires here leaves no gap.
        let number = Number::of_streams(repair, self.repair.as_deref_mut(), now);
        let len = len + number.header().len();
        if self.held > 0 && self.held + len + OVERHEAD_BYTES > self.room {
            return Err(PushError::Blocked);
        }
        let mut data = BytesMut::with_capacity(len);
        data.extend_from_slice(number.header());
        data.extend_from_slice(frame.header);
        data.extend_from_slice(frame.payload);
        let unnumbered = repair.filter(|_| !number.header().is_empty());
        self.held += len + OVERHEAD_BYTES;
        self.waiting.push_back(PlainFrame {
            data: data.freeze(),
            counted: frame.counted,
            arrived,
            unnumbered,
        });
        Ok(())
    }

    /// Adds a frame for each datagram, in order; returns how many were added, and why the next one was not.
    pub fn push_all(
        &mut self,
        payloads: &Payloads<'_>,
        arrived: Instant,
        now: Instant,
    ) -> (usize, Result<(), PushError>) {
        let (all, mut prefix) = (payloads.count(), [0; MOST_PREFIX]);
        for done in 0..all {
            let frame = payloads.skip(done).first(&mut prefix);
            if let Err(error) = self.push(frame, payloads.repair, arrived, now) {
                return (done, Err(error));
            }
        }
        (all, Ok(()))
    }

    /// All frames that wait, oldest first.
    pub fn into_frames(self) -> impl Iterator<Item = PlainFrame> {
        self.waiting.into_iter()
    }

    /// Takes the oldest frame out of the queue, and gives it its number if it is to be repaired. Repair symbols that are then due come
    /// next.
    pub fn pop(&mut self, now: Instant) -> Option<PlainFrame> {
        let mut frame = self.take_first()?;
        if let Some(repair) = frame.unnumbered.take() {
            self.number(&mut frame, repair, now);
        }
        Some(frame)
    }

    fn take_first(&mut self) -> Option<PlainFrame> {
        let frame = self.waiting.pop_front()?;
        self.held -= frame.cost();
        Some(frame)
    }

    fn number(&mut self, frame: &mut PlainFrame, repair: Repaired, now: Instant) {
        // Nobody else has the bytes: they are not copied.
        let mut data = BytesMut::from(mem::take(&mut frame.data));
        let mut streams = self.repair.take();
        match streams.as_mut().and_then(|streams| streams.sender(repair.stream)) {
            Some(sender) => {
                sender.number(&mut data, repair.bucket, now);
                while let Some((header, symbol)) = sender.repair(now) {
                    let data: Bytes = [header.as_slice(), symbol].concat().into();
                    if data.len() > self.most {
                        break;
                    }
                    self.put_back(PlainFrame { data, counted: false, arrived: now, unnumbered: None });
                }
            }
            // It goes plain.
            None => data.advance(repair.header().as_slice().len()),
        }
        self.repair = streams;
        frame.data = data.freeze();
    }

    /// When the datagram of the oldest frame came to this host.
    #[must_use]
    pub fn oldest(&self) -> Option<Instant> {
        self.waiting.front().map(|frame| frame.arrived)
    }

    /// Takes the oldest frame if its datagram has waited for longer than `limit`. It gets no number.
    pub fn pop_late(&mut self, now: Instant, limit: Duration) -> Option<PlainFrame> {
        let late = now.saturating_duration_since(self.waiting.front()?.arrived) > limit;
        if late { self.take_first() } else { None }
    }

    /// Puts back what [`Plain::pop`] gave, at the front.
    pub fn put_back(&mut self, frame: PlainFrame) {
        self.held += frame.cost();
        self.waiting.push_front(frame);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::Arc;

    use base::clock::{Clock, ManualClock};
    use wire::repair_terms::{StreamNumber, Terms};

    fn frame(payload: &[u8]) -> Frame<'_> {
        Frame { header: &[2, 0], payload, counted: true, tos: 0 }
    }

    #[test]
    fn frames_come_out_whole_in_order_and_within_bounds() {
        let (mut plain, now) = (Plain::new(Some(1000)), ManualClock::default().now());
        assert_eq!(plain.push(frame(&[0; 999]), None, now, now), Err(PushError::TooLarge { most: 998 }));
        let mut taken = 0;
        while plain.push(frame(&[7; 998]), None, now, now).is_ok() {
            taken += 1;
        }
        assert_eq!(taken, MAX_BYTES / (1000 + OVERHEAD_BYTES));
        let first = plain.pop(now).unwrap();
        assert_eq!((first.data.len(), &first.data[..3]), (1000, &[2, 0, 7][..]));
        plain.put_back(first);
        assert_eq!(plain.push(frame(&[7; 998]), None, now, now), Err(PushError::Blocked));
    }

    #[test]
    fn empty_datagrams_are_bounded_and_late_ones_come_out_before_the_others() {
        let (mut plain, clock) = (Plain::new(Some(1000)), ManualClock::default());
        let mut taken = 0;
        while plain.push(frame(&[]), None, clock.now(), clock.now()).is_ok() {
            taken += 1;
        }
        assert_eq!(taken, MAX_BYTES / (2 + OVERHEAD_BYTES));
        let limit = Duration::from_millis(100);
        clock.advance(limit);
        assert!(plain.pop_late(clock.now(), limit).is_none(), "it may wait for so long");
        clock.advance(Duration::from_nanos(1));
        assert!(plain.pop_late(clock.now(), limit).is_some());
        plain.push(frame(&[5]), None, clock.now(), clock.now()).unwrap();
        let late = std::iter::from_fn(|| plain.pop_late(clock.now(), limit)).count();
        assert_eq!(late, taken - 1);
        assert_eq!(plain.pop(clock.now()).unwrap().data[..], [2, 0, 5]);
        assert_eq!((plain.held, plain.is_empty()), (0, true));
    }

    #[test]
    fn a_peer_that_takes_no_datagrams_gets_none() {
        let now = ManualClock::default().now();
        let pushed = Plain::new(None).push(frame(&[]), None, now, now);
        assert_eq!(pushed, Err(PushError::TooLarge { most: 0 }));
    }

    #[test]
    fn what_expires_gets_no_number_and_what_lost_its_stream_goes_plain() {
        let (mut plain, clock, terms) = (Plain::new(Some(1000)), ManualClock::default(), Terms::OFF);
        let stream = StreamNumber(3);
        let mut streams = Box::new(LaneRepair::new(&Arc::default()));
        assert!(streams.sender_for(stream, &terms, 1).is_some());
        plain.repair = Some(streams);
        let repair = Some(Repaired { stream, bucket: 5, numbered: true });
        let limit = Duration::from_millis(100);
        for payload in 0..6 {
            plain.push(frame(&[payload]), repair, clock.now(), clock.now()).unwrap();
            clock.advance(Duration::from_millis(30));
        }
        // Payloads 0 to 2 have waited for more than 100 ms.
        assert_eq!(std::iter::from_fn(|| plain.pop_late(clock.now(), limit)).count(), 3);
        for number in 0..2 {
            let first = plain.pop(clock.now()).unwrap();
            let distance = u8::from(number > 0);
            assert_eq!(first.data[..], [12, 3, 0, 0, 0, number, 0, distance, 2, 0, number + 3]);
            // It keeps its number.
            let data = first.data.clone();
            plain.put_back(first);
            assert_eq!(plain.pop(clock.now()).unwrap().data, data);
        }
        plain.repair = None;
        assert_eq!(plain.pop(clock.now()).unwrap().data[..], [2, 0, 5]);
        assert_eq!((plain.held, plain.is_empty()), (0, true));
    }
}
