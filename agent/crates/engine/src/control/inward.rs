//! The far end's half of the control stream: put in order, cut into messages, handed out in portions.
//!
//! ```text
//!   quinn-proto ──► add: pieces, in any order ──► pull: one message after the other, and what each costs
//! ```
//!
//! quinn-proto has one window for all streams of a connection, wide enough for a TCP forward. So it is read as soon as something
//! comes, gaps or not, and what waits here has a bound of its own.

use std::collections::BTreeMap;

use bytes::Bytes;
use wire::messages::{Framer, MAX_MESSAGE_BYTES, Message, MessageError};

/// The limit on bytes that wait to be cut into messages: four of the longest messages. An honest peer's longest burst, its hello
/// and an opening of each of its lanes, is 20 KiB.
pub const MOST_WAITING_BYTES: usize = 4 * MAX_MESSAGE_BYTES;

/// The memory that a piece costs beside its bytes: its entry and its allocation.
const PIECE_BYTES: usize = 96;

/// More bytes of control messages wait than [`MOST_WAITING_BYTES`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("more than {MOST_WAITING_BYTES} bytes of control messages wait")]
pub(super) struct TooMuch;

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
    /// True once a message could not be read: nothing after it can be.
    broken: bool,
}

impl Inward {
    pub(super) fn new() -> Self {
        Self {
            framer: Framer::new(MAX_MESSAGE_BYTES),
            next: 0,
            front: Bytes::new(),
            pieces: BTreeMap::new(),
            waiting: 0,
            broken: false,
        }
    }

    /// Takes a piece of the stream. Pieces never overlap.
    pub(super) fn add(&mut self, offset: u64, bytes: Bytes) -> Result<(), TooMuch> {
        if self.broken || bytes.is_empty() {
            return Ok(());
        }
        self.waiting += bytes.len() + PIECE_BYTES;
        if self.waiting > MOST_WAITING_BYTES {
            self.end();
            return Err(TooMuch);
        }
        // A small piece must not keep the whole packet that it came in.
        let bytes = if bytes.len() < 1_024 { Bytes::copy_from_slice(&bytes) } else { bytes };
        self.pieces.insert(offset, bytes);
        Ok(())
    }

    /// The next message, if all of it is here.
    pub(super) fn pull(&mut self) -> Option<Pulled> {
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
            let (message, bytes) = match pulled {
                Ok(None) => continue,
                Ok(Some(bytes)) => (Message::decode(&bytes), bytes.len()),
                Err(too_long) => (Err(too_long.into()), 0),
            };
            if message.as_ref().is_err_and(|error| error.close_reason().is_some()) {
                self.end();
            }
            let units = cost(&message, bytes);
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
        self.front = Bytes::new();
        self.pieces.clear();
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
        Ok(
            Message::ServicesChanged(_)
            | Message::ReportsWanted { .. }
            | Message::PacketRepair(_)
            | Message::PresharedKeys(_),
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
            let mut inward = Inward::new();
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
            let mut inward = Inward::new();
            let mut offset = 1;
            let mut taken = 0;
            while inward.add(offset, Bytes::from(vec![0; size])).is_ok() {
                assert!(inward.pull().is_none());
                offset += 2 * size as u64;
                taken += size + PIECE_BYTES;
            }
            assert!(taken <= MOST_WAITING_BYTES && taken + size + PIECE_BYTES > MOST_WAITING_BYTES);
            assert!(inward.pieces.is_empty(), "what was held is given back");
            assert!(inward.add(0, Bytes::from_static(&[0])).is_ok() && !inward.has_more());
        }
    }

    #[test]
    fn nothing_after_a_broken_message_is_read() {
        let (_, bytes) = messages(3);
        let stream = [&[3, 0xff, 0xff, 0xff][..], &bytes].concat();
        let mut inward = Inward::new();
        inward.add(0, stream.into()).unwrap();
        assert!(inward.pull().unwrap().message.is_err());
        assert!(inward.pull().is_none() && !inward.has_more());
    }

    #[test]
    fn a_long_message_costs_more_and_one_for_all_workers_most() {
        let mut inward = Inward::new();
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
