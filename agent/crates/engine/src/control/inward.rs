//! The far end's half of the control stream: put in order, cut into messages, handed out in portions.
//!
//! ```text
//!   quinn-proto ──► add: pieces, in any order ──► pull: one message after the other, and what each costs
//! ```
//!
//! quinn-proto has one window for all streams of a connection, wide enough for a TCP forward. So it is read as soon as something
//! comes, gaps or not, and what waits here has a bound of its own.

use std::{collections::BTreeMap, sync::Arc};

use bytes::Bytes;
use wire::messages::{Framer, MAX_MESSAGE_BYTES, Message, MessageError};

use crate::control::windows::StreamMemory;

/// The limit on bytes that wait to be cut into messages: four of the longest messages. An honest peer's longest burst, its hello
/// and an opening of each of its lanes, is 20 KiB.
pub const MOST_WAITING_BYTES: usize = 4 * MAX_MESSAGE_BYTES;

/// What a connection may have waiting however much the others have: one of the longest messages.
pub(super) const OWN_WAITING_BYTES: usize = MAX_MESSAGE_BYTES;

/// The memory that a piece costs beside its bytes: its entry and its allocation.
const PIECE_BYTES: usize = 96;

/// The bytes of [`Message::StreamCredit`] that cost a unit: some 40 messages, which take 10 µs.
const CREDIT_UNIT_BYTES: usize = 512;

/// Why no more control messages of a connection may wait.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum TooMuch {
    /// The connection has as much waiting as any may.
    #[error("more than {MOST_WAITING_BYTES} bytes of control messages wait")]
    OfConnection,
    /// All connections together have, and this one has more waiting than is its own in any case.
    #[error("the control messages of all connections that wait fill their memory")]
    OfAll,
}

/// A message as it was pulled out of the stream.
#[derive(Debug)]
pub(super) struct Pulled {
    pub(super) message: Result<Message, MessageError>,
    /// What it costs, in the units of [`cost`].
    pub(super) units: u32,
}

/// The part of a control stream that has come and has not been handled.
#[derive(Debug)]
pub(super) struct Inward {
    framer: Framer,
    /// The offset in the stream at which `front` begins.
    next: u64,
    /// The piece that is being cut.
    front: Bytes,
    /// The pieces after it, by their offsets; none overlap.
    pieces: BTreeMap<u64, Bytes>,
    /// The memory of all pieces, in bytes.
    waiting: usize,
    /// The bytes of a message that have been cut and that do not make it whole.
    partial: usize,
    /// The bytes of [`Message::StreamCredit`] that were not charged.
    credit_bytes: usize,
    /// What is counted in `memory` of this connection, in bytes.
    counted: usize,
    /// The memory of the messages of all connections.
    memory: Arc<StreamMemory>,
    /// True once a message could not be read: nothing after it can be.
    broken: bool,
}

impl Inward {
    pub(super) fn new(memory: &Arc<StreamMemory>) -> Self {
        Self {
            framer: Framer::new(MAX_MESSAGE_BYTES),
            next: 0,
            front: Bytes::new(),
            pieces: BTreeMap::new(),
            waiting: 0,
            partial: 0,
            credit_bytes: 0,
            counted: 0,
            memory: Arc::clone(memory),
            broken: false,
        }
    }

    /// Takes a piece of the stream. Pieces never overlap.
    pub(super) fn add(&mut self, offset: u64, bytes: Bytes) -> Result<(), TooMuch> {
        if self.broken || bytes.is_empty() {
            return Ok(());
        }
        self.waiting += bytes.len() + PIECE_BYTES;
        let is_others = self.held_bytes() > OWN_WAITING_BYTES;
        let excess = if self.waiting > MOST_WAITING_BYTES {
            Some(TooMuch::OfConnection)
        } else if is_others && !self.memory.has_room_for_messages() {
            Some(TooMuch::OfAll)
        } else {
            None
        };
        if let Some(excess) = excess {
            self.end();
            return Err(excess);
        }
        self.count();
        // A small piece must not keep the whole packet that it came in.
        let bytes = if bytes.len() < 1_024 { Bytes::copy_from_slice(&bytes) } else { bytes };
        self.pieces.insert(offset, bytes);
        Ok(())
    }

    /// What is kept of messages that have not been handed out, in bytes.
    pub(super) fn held_bytes(&self) -> usize {
        self.waiting + self.partial
    }

    /// Brings what is counted of this connection up to date.
    fn count(&mut self) {
        let held = self.held_bytes();
        self.memory.hold_messages(std::mem::replace(&mut self.counted, held), held);
    }

    /// The next message, if all of it is here.
    pub(super) fn pull(&mut self) -> Option<Pulled> {
        let pulled = self.cut();
        self.count();
        pulled
    }

    fn cut(&mut self) -> Option<Pulled> {
        while self.has_more() {
            if self.front.is_empty() {
                self.front = self.pieces.remove(&self.next)?;
            }
            let before = self.front.len();
            let pulled = self.framer.pull(&mut self.front);
            let taken = before - self.front.len();
            self.next += taken as u64;
            self.waiting -= taken;
            if self.front.is_empty() {
                self.front = Bytes::new();
                self.waiting -= PIECE_BYTES;
            }
            self.partial = if let Ok(None) = pulled { self.partial + taken } else { 0 };
            let (message, bytes) = match pulled {
                Ok(None) => continue,
                Ok(Some(bytes)) => (Message::decode(&bytes), bytes.len()),
                Err(too_long) => (Err(too_long.into()), 0),
            };
            if message.as_ref().is_err_and(|error| error.close_reason().is_some()) {
                self.end();
            }
            let mut units = cost(&message, bytes);
            if let Ok(Message::StreamCredit { .. }) = message {
                self.credit_bytes += bytes + 1;
                units += u32::try_from(self.credit_bytes / CREDIT_UNIT_BYTES).unwrap_or(u32::MAX);
                self.credit_bytes %= CREDIT_UNIT_BYTES;
            }
            return Some(Pulled { message, units });
        }
        None
    }

    /// Whether something can be cut: a message, or the first part of one.
    pub(super) fn has_more(&self) -> bool {
        !self.broken && (!self.front.is_empty() || self.pieces.contains_key(&self.next))
    }

    /// Drops what waits; nothing more is read afterwards.
    fn end(&mut self) {
        self.broken = true;
        self.framer = Framer::new(MAX_MESSAGE_BYTES);
        self.partial = 0;
        self.front = Bytes::new();
        self.pieces.clear();
        self.waiting = 0;
        self.count();
    }
}

impl Drop for Inward {
    fn drop(&mut self) {
        self.memory.hold_messages(self.counted, 0);
    }
}

/// The cost of a message of `bytes` bytes, which is charged to its sender: one unit, one for each 256 bytes, and 15 more if every
/// worker is told of it. A unit takes 0.2 to 3 µs.
fn cost(message: &Result<Message, MessageError>, bytes: usize) -> u32 {
    const UNIT_BYTES: usize = 256;
    const TELLING: u32 = 15;
    // A message has at most 64 KiB.
    let units = 1 + u32::try_from(bytes / UNIT_BYTES).unwrap_or(u32::MAX - TELLING - 1);
    // Every kind is listed, so that a new one is decided on.
    match message {
        // To reset a connection takes as long as some units.
        Ok(Message::StreamAbort(streams)) => {
            units + u32::try_from(streams.len() / 16).unwrap_or(u32::MAX - units)
        }
        // They come as readers read, in place of frames of QUIC that cost nobody anything. `Inward` counts them together.
        Ok(Message::StreamCredit { .. }) => 0,
        Ok(
            Message::ServicesChanged(_)
            | Message::ReportsWanted { .. }
            | Message::PacketRepair(_)
            | Message::PresharedKeys(_)
            | Message::LineState(_),
        ) => units + TELLING,
        Ok(
            Message::Hello(_)
            | Message::LaneOpen(_)
            | Message::LaneAccept(_)
            | Message::LaneRefuse(_)
            | Message::LaneClose(_)
            | Message::Here
            | Message::Join(_)
            | Message::Joined
            | Message::StreamsWanted
            | Message::Release
            | Message::Leave
            | Message::ReceiveRate { .. },
        )
        | Err(_) => units,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use wire::messages::{LaneCloseCause, LaneEnd};

    fn messages(count: u64) -> (Vec<Message>, Vec<u8>) {
        let end = |epoch| Message::LaneClose(LaneEnd { lane: 1, epoch, reason: LaneCloseCause::Done });
        let messages: Vec<Message> = (1..=count).map(end).collect();
        let mut bytes = Vec::new();
        for message in &messages {
            message.encode(&mut bytes);
        }
        (messages, bytes)
    }

    fn pull_all(inward: &mut Inward) -> Vec<Message> {
        std::iter::from_fn(|| inward.pull()).map(|pulled| pulled.message.unwrap()).collect()
    }

    #[test]
    fn pieces_in_any_order_become_the_messages_in_theirs() {
        let (messages, bytes) = messages(100);
        for size in [1, 3, 7, 64, 1_000] {
            let mut pieces: Vec<(u64, Bytes)> = Vec::new();
            for piece in bytes.chunks(size) {
                let offset = pieces.iter().map(|(_, bytes)| bytes.len() as u64).sum();
                pieces.push((offset, Bytes::copy_from_slice(piece)));
            }
            // The first comes last.
            pieces.rotate_left(1);
            let middle = pieces.len() / 2;
            pieces[..middle].reverse();
            let mut inward = Inward::new(&StreamMemory::new(usize::MAX));
            let mut pulled = Vec::new();
            for (offset, piece) in pieces {
                inward.add(offset, piece).unwrap();
                pulled.extend(pull_all(&mut inward));
            }
            assert_eq!(pulled, messages, "pieces of {size}");
            assert_eq!((inward.waiting, inward.has_more()), (0, false));
        }
    }

    #[test]
    fn what_waits_behind_a_gap_is_bounded_however_small_its_pieces() {
        for size in [1_usize, 100, 1_400] {
            let mut inward = Inward::new(&StreamMemory::new(usize::MAX));
            let mut offset = 1;
            let mut taken = 0;
            while inward.add(offset, Bytes::from(vec![0; size])).is_ok() {
                assert!(inward.pull().is_none());
                offset += 2 * size as u64;
                taken += size + PIECE_BYTES;
            }
            assert!(taken <= MOST_WAITING_BYTES && taken + size + PIECE_BYTES > MOST_WAITING_BYTES);
            assert!(inward.pieces.is_empty(), "what was held is given back");
            assert_eq!((inward.held_bytes(), inward.memory.messages()), (0, 0));
            assert!(inward.add(0, Bytes::from_static(&[0])).is_ok() && !inward.has_more());
        }
    }

    #[test]
    fn the_messages_of_all_connections_have_a_sixteenth_of_the_memory_and_each_has_its_own_beside() {
        let memory = StreamMemory::new(8 << 20);
        let piece = || Bytes::from(vec![0; 1_400]);
        let fill = |inward: &mut Inward| {
            let offsets = (1..).map(|number| number * 2_000);
            let taken = offsets.take_while(|offset| inward.add(*offset, piece()).is_ok()).count();
            taken * (1_400 + PIECE_BYTES)
        };
        let mut all: Vec<Inward> = (0..4).map(|_| Inward::new(&memory)).collect();
        let taken: Vec<usize> = all[..2].iter_mut().map(fill).collect();
        assert!(taken.iter().all(|taken| *taken > MOST_WAITING_BYTES - 1_496), "{taken:?}");
        assert_eq!(memory.messages(), 0, "each exceeded its own limit, and nothing of it is kept");
        // These stay below theirs.
        for inward in &mut all[2..] {
            (1..170).for_each(|number| inward.add(number * 2_000, piece()).unwrap());
        }
        assert_eq!(memory.messages(), 2 * 169 * 1_496);
        let mut more: Vec<Inward> = (0..3).map(|_| Inward::new(&memory)).collect();
        let taken: Vec<usize> = more.iter_mut().map(fill).collect();
        let left = (8 << 20) / 16 - 2 * 169 * 1_496;
        assert!(left < taken[0] && taken[0] < MOST_WAITING_BYTES - 1_496, "{taken:?}");
        all.truncate(3);
        assert_eq!(memory.messages(), 169 * 1_496);
        assert!(fill(&mut Inward::new(&memory)) > MOST_WAITING_BYTES - 1_496, "it was room that was missing");
        drop((all, more));
        assert_eq!(memory.messages(), 0);
    }

    #[test]
    fn a_connection_beside_those_that_fill_the_memory_still_has_its_longest_message() {
        let memory = StreamMemory::new(8 << 20);
        let mut greedy: Vec<Inward> = (0..3).map(|_| Inward::new(&memory)).collect();
        for (inward, pieces) in greedy.iter_mut().zip([170, 170, 43]) {
            (1..=pieces).for_each(|number| inward.add(number * 2_000, Bytes::from(vec![0; 1_400])).unwrap());
        }
        assert!(!memory.has_room_for_messages());
        let mut modest = Inward::new(&memory);
        let (_, bytes) = messages(5_000);
        assert!(bytes.len() > OWN_WAITING_BYTES / 2 && bytes.len() < OWN_WAITING_BYTES);
        let pieces = bytes.chunks(1_200).scan(0, |next, piece| {
            let offset = *next;
            *next += piece.len() as u64;
            Some((offset, Bytes::copy_from_slice(piece)))
        });
        for (offset, piece) in pieces {
            modest.add(offset, piece).unwrap();
        }
        assert_eq!(pull_all(&mut modest).len(), 5_000);
    }

    #[test]
    fn nothing_after_a_broken_message_is_read() {
        let (_, bytes) = messages(3);
        let stream = [&[3, 0xff, 0xff, 0xff][..], &bytes].concat();
        let mut inward = Inward::new(&StreamMemory::new(usize::MAX));
        inward.add(0, stream.into()).unwrap();
        assert!(inward.pull().unwrap().message.is_err());
        assert!(inward.pull().is_none() && !inward.has_more());
    }

    #[test]
    fn a_long_message_costs_more_and_one_for_all_workers_most() {
        let mut inward = Inward::new(&StreamMemory::new(usize::MAX));
        let mut bytes = Vec::new();
        let all = [Message::Here, Message::ServicesChanged(Vec::new())];
        for message in &all {
            message.encode(&mut bytes);
        }
        inward.add(0, bytes.into()).unwrap();
        let units: Vec<u32> = std::iter::from_fn(|| inward.pull()).map(|pulled| pulled.units).collect();
        assert_eq!(units, [4, 16]);
    }
}
