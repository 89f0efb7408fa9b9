//! Lists which payloads of a received batch go where, without system calls: a payload stays in the buffer it was decrypted in.
//!
//! ```text
//!   buffer    | header payload tag | header payload tag | …    as opened
//!             | header payload payload payload …               after `ReceiveBatch::move_down`: one piece
//! ```

use std::{
    net::{IpAddr, SocketAddr},
    ops::Range,
};

use crate::{
    ReceiveBatch,
    batch::{MAX_MESSAGE_BYTES, MOST_SEGMENTS, Progress},
};

/// Payloads of one message that lie end to end in a buffer.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Piece {
    /// The buffer's index in the [`ReceiveBatch`], or [`ReceiveBatch::JOINED`].
    slot: usize,
    range: Range<usize>,
}

impl Piece {
    pub(super) fn bytes<'a>(&self, received: &'a ReceiveBatch) -> &'a [u8] {
        &received.buffer_or_joined(self.slot)[self.range.clone()]
    }
}

/// The destination and the owner of a payload.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Recipient {
    /// The address that the payload is sent to; none on a connected socket.
    pub destination: Option<SocketAddr>,
    /// The local address that the payload is sent from; none lets the kernel choose.
    pub source: Option<IpAddr>,
    /// The owner of the payload; the caller's number.
    pub owner: u32,
}

/// Payloads of one destination and owner that the kernel gathers and cuts by `UDP_SEGMENT`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DeliveryMessage {
    /// The destination and the owner of the payloads.
    pub to: Recipient,
    /// Bytes of each payload; the last may be shorter.
    pub segment: usize,
    /// The number of payloads, each of which is a datagram.
    pub payloads: u16,
    /// The bytes of all payloads together.
    pub bytes: usize,
    pub(super) pieces: Range<usize>,
    /// A shorter payload ended it: no other may follow.
    closed: bool,
    pub(super) progress: Progress,
}

impl DeliveryMessage {
    /// Payload `index` of this message, one of a list of `pieces`.
    pub(super) fn payload<'a>(&self, index: u16, pieces: &[Piece], received: &'a ReceiveBatch) -> &'a [u8] {
        // All payloads but the last have the full length.
        let mut start = usize::from(index) * self.segment;
        for piece in &pieces[self.pieces.clone()] {
            let bytes = piece.bytes(received);
            if start < bytes.len() {
                return &bytes[start..bytes.len().min(start + self.segment)];
            }
            start -= bytes.len();
        }
        &[]
    }
}

/// A list of the payloads of a [`ReceiveBatch`] and where they go.
#[derive(Debug, Default)]
pub struct Delivery {
    messages: Vec<DeliveryMessage>,
    pieces: Vec<Piece>,
}

impl Delivery {
    /// Adds the payload at `range` of buffer `slot`.
    ///
    /// It joins the last message when the recipient is the same, the kernel can cut it off again, and
    /// the message has fewer than `burst` payloads; else it begins the next one. A payload without bytes is a datagram
    /// of its own.
    pub fn push(&mut self, to: Recipient, slot: usize, range: Range<usize>, burst: u16) {
        let len = range.len();
        let piece = self.pieces.len();
        match self.messages.last_mut() {
            Some(last)
                if last.to == to
                    && !last.closed
                    && len > 0
                    && len <= last.segment
                    && last.payloads < burst.min(MOST_SEGMENTS)
                    && last.bytes + len <= MAX_MESSAGE_BYTES =>
            {
                last.payloads += 1;
                last.bytes += len;
                last.closed = len < last.segment;
                match self.pieces.last_mut() {
                    Some(before) if before.slot == slot && before.range.end == range.start => {
                        before.range.end = range.end;
                    }
                    Some(_) | None => {
                        self.pieces.push(Piece { slot, range });
                        last.pieces.end += 1;
                    }
                }
            }
            Some(_) | None => {
                self.pieces.push(Piece { slot, range });
                self.messages.push(DeliveryMessage {
                    to,
                    segment: len,
                    payloads: 1,
                    bytes: len,
                    pieces: piece..piece + 1,
                    closed: len == 0,
                    progress: Progress::default(),
                });
            }
        }
    }

    /// Adds the payloads of `segment` bytes each, at least 1, that lie end to end at `range` of buffer `slot`.
    pub fn push_run(
        &mut self,
        to: Recipient,
        slot: usize,
        mut range: Range<usize>,
        segment: usize,
        burst: u16,
    ) {
        while !range.is_empty() {
            let first = range.start..(range.start + segment).min(range.end);
            range.start = first.end;
            self.push(to, slot, first, burst);
            let (Some(message), Some(piece)) = (self.messages.last_mut(), self.pieces.last_mut()) else {
                return;
            };
            if message.closed || message.segment != segment {
                continue;
            }
            // As many more as the message takes come with it.
            let room = (MAX_MESSAGE_BYTES - message.bytes) / segment;
            let count = (range.len() / segment)
                .min(usize::from(burst.min(MOST_SEGMENTS).saturating_sub(message.payloads)))
                .min(room);
            range.start += count * segment;
            piece.range.end = range.start;
            message.bytes += count * segment;
            message.payloads += u16::try_from(count).unwrap_or(0);
        }
    }

    /// Whether the list holds no message.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.messages.is_empty()
    }

    /// The messages of the list, in the order of sending.
    #[must_use]
    pub fn messages(&self) -> &[DeliveryMessage] {
        &self.messages
    }

    /// The payloads of `message`, which is one of this list.
    ///
    /// # Panics
    /// When `received` is not the batch that the list was made from.
    pub fn payloads<'a>(
        &'a self,
        message: &'a DeliveryMessage,
        received: &'a ReceiveBatch,
    ) -> impl Iterator<Item = &'a [u8]> {
        (0..message.payloads).map(|index| message.payload(index, &self.pieces, received))
    }

    /// Drops all messages, so that the list is empty.
    pub fn clear(&mut self) {
        self.messages.clear();
        self.pieces.clear();
    }

    /// The messages, to note their progress, beside the pieces that they point into.
    pub(super) fn parts(&mut self) -> (&mut [DeliveryMessage], &[Piece]) {
        (&mut self.messages, &self.pieces)
    }
}
