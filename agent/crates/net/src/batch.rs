//! Batches of datagrams, without system calls.
//!
//! | batch | holds | made by | consumed by |
//! |---|---|---|---|
//! | [`ReceiveBatch`] | buffers as the kernel gave them; with GRO one buffer is many datagrams | `UdpSocket::receive` | the worker, in place |
//! | [`SendBatch`] | datagrams in one contiguous buffer, grouped into GSO messages | the seal chain, at the tail | `UdpSocket::send` |
//! | [`Delivery`](crate::Delivery) | payloads that stay where they were decrypted, grouped into GSO messages | the worker | `UdpSocket::deliver` |

use std::{
    net::{IpAddr, Ipv4Addr, SocketAddr},
    ops::Range,
    time::Duration,
};

use ip::packets::Buffers;

use crate::{SendFailure, SendOutcome, sys};

/// Segments that one `UDP_SEGMENT` message may have anywhere: `UDP_MAX_SEGMENTS` before Linux 6.9.
pub const MAX_SEGMENTS: u16 = 64;

/// Segments that one message may have where the kernel takes them (Linux 6.9): see [`crate::Net::most_segments`].
pub const MOST_SEGMENTS: u16 = 128;

/// Bytes that one message may have: the largest UDP payload over IPv4.
pub const MAX_MESSAGE_BYTES: usize = 65_507;

/// The metadata of one received buffer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Meta {
    /// The bytes that the buffer holds.
    pub len: usize,
    /// Bytes of each datagram in it, of which the last may be shorter; never 0.
    pub segment: usize,
    /// The address that the datagrams came from.
    pub source: SocketAddr,
    /// The local address that it was sent to, on sockets that ask for it (listening and ingress ones).
    pub local: Option<IpAddr>,
    /// The ECN bits, 0 to 3; 0 on sockets that do not ask for them (ingress and upstream ones).
    pub ecn: u8,
    /// The time it waited in the kernel, at most 10 s; an estimate in calls without timestamps, zero if not known.
    pub age: Duration,
}

impl Meta {
    /// The metadata of a buffer that no socket received.
    pub const EMPTY: Self = Self {
        len: 0,
        segment: 1,
        source: SocketAddr::new(IpAddr::V4(Ipv4Addr::UNSPECIFIED), 0),
        local: None,
        ecn: 0,
        age: Duration::ZERO,
    };

    /// The number of datagrams in the buffer. An empty buffer is one datagram without payload.
    #[must_use]
    pub fn datagrams(&self) -> usize {
        self.len.div_ceil(self.segment.max(1)).max(1)
    }

    /// The range of each datagram within the buffer.
    pub fn segments(&self) -> impl Iterator<Item = Range<usize>> + use<> {
        let Self { len, segment, .. } = *self;
        (0..self.datagrams()).map(move |index| index * segment..((index + 1) * segment).min(len))
    }
}

/// The cost of datagrams to a worker: each is one unit, or every 1,500 bytes are one, whichever is more.
#[must_use]
pub fn units(datagrams: usize, bytes: usize) -> u32 {
    const UNIT_BYTES: usize = 1_500;
    u32::try_from(datagrams.max(bytes / UNIT_BYTES)).unwrap_or(u32::MAX)
}

/// Received buffers, in one allocation that is reused.
#[derive(Debug)]
pub struct ReceiveBatch {
    bytes: Box<[u8]>,
    pub(super) slot_bytes: usize,
    slots: usize,
    /// The slot of each accepted buffer: a refused one leaves a hole.
    accepted: Vec<(usize, Meta)>,
    /// Datagrams that lie in no buffer as a whole, put together end to end.
    joined: Vec<u8>,
    /// Whether nothing waited behind it, and the socket's token is reported when something does. Where this is not known, the next
    /// `receive` tells.
    pub last: bool,
    /// Slots that were in use at a time since [`ReceiveBatch::give_back`] was called last.
    recent: usize,
    /// Slots for which the kernel may have given memory.
    touched: usize,
}

impl ReceiveBatch {
    /// Buffers that one `recvmmsg` fills: past this the call's cost no longer shows.
    pub const DEFAULT_SLOTS: usize = 32;

    /// Bytes of a slot: the largest GRO buffer is 65,535 bytes, and a fuller one would be seen as truncated.
    pub const DEFAULT_SLOT_BYTES: usize = 65_536;

    /// In place of a buffer's index, for a [`Delivery`](crate::Delivery): the datagrams that were put together.
    pub const JOINED: usize = usize::MAX;

    /// Room for `slots` buffers of up to `slot_bytes` each.
    #[must_use]
    pub fn new(slots: usize, slot_bytes: usize) -> Self {
        Self {
            bytes: vec![0; slots * slot_bytes].into_boxed_slice(),
            slot_bytes,
            slots,
            accepted: Vec::with_capacity(slots),
            joined: Vec::new(),
            last: false,
            recent: 0,
            touched: 0,
        }
    }

    /// The number of buffers that were received.
    #[must_use]
    pub fn len(&self) -> usize {
        self.accepted.len()
    }

    /// Whether the batch holds no buffer.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.accepted.is_empty()
    }

    /// The number of buffers that it can hold.
    #[must_use]
    pub fn slots(&self) -> usize {
        self.slots
    }

    /// Whether each of its slots holds a buffer: there may be more where they came from.
    #[must_use]
    pub fn is_full(&self) -> bool {
        self.accepted.len() >= self.slots
    }

    /// Drops all buffers, so that the batch is empty.
    pub fn clear(&mut self) {
        self.accepted.clear();
        self.joined.clear();
        self.last = false;
    }

    /// Drops all buffers, and gives the memory of slots that were not in use since the last call back to the kernel.
    pub fn give_back(&mut self) {
        self.clear();
        let touched = self.touched.max(self.recent);
        self.touched = std::mem::take(&mut self.recent).max(1);
        if touched > self.touched {
            sys::give_back(&mut self.bytes[self.touched * self.slot_bytes..touched * self.slot_bytes]);
        }
        self.joined.shrink_to(self.slot_bytes);
    }

    /// The cost of the batch to a worker, in [`units`]: the sum over its buffers.
    #[must_use]
    pub fn units(&self) -> u32 {
        self.accepted.iter().map(|(_, meta)| units(meta.datagrams(), meta.len)).sum()
    }

    /// The metadata of buffer `index`.
    ///
    /// # Panics
    /// When `index` is not below [`ReceiveBatch::len`].
    #[must_use]
    pub fn meta(&self, index: usize) -> &Meta {
        &self.accepted[index].1
    }

    /// No buffer has waited for longer than `most`, whatever is said.
    pub(super) fn limit_ages(&mut self, most: Duration) {
        for (_, meta) in &mut self.accepted {
            meta.age = meta.age.min(most);
        }
    }

    /// Buffer `index`.
    ///
    /// # Panics
    /// When `index` is not below [`ReceiveBatch::len`].
    #[must_use]
    pub fn buffer(&self, index: usize) -> &[u8] {
        let (slot, meta) = &self.accepted[index];
        &self.bytes[slot * self.slot_bytes..][..meta.len]
    }

    /// Buffer `index`, or the datagrams that were put together.
    pub(super) fn buffer_or_joined(&self, index: usize) -> &[u8] {
        if index == Self::JOINED { &self.joined } else { self.buffer(index) }
    }

    /// Buffer `index`, to be decrypted in place, and what came with it.
    ///
    /// # Panics
    /// When `index` is not below [`ReceiveBatch::len`].
    pub fn buffer_mut(&mut self, index: usize) -> (&Meta, &mut [u8]) {
        let (slot, meta) = &self.accepted[index];
        (meta, &mut self.bytes[slot * self.slot_bytes..][..meta.len])
    }

    /// Buffer `index`, and where datagrams of which parts lie there are put together.
    ///
    /// # Panics
    /// When `index` is not below [`ReceiveBatch::len`].
    pub fn buffer_and_joined(&mut self, index: usize) -> (&[u8], &mut Vec<u8>) {
        let (slot, meta) = &self.accepted[index];
        (&self.bytes[slot * self.slot_bytes..][..meta.len], &mut self.joined)
    }

    /// The bytes of the datagrams that were put together.
    #[must_use]
    pub fn joined_bytes(&self) -> usize {
        self.joined.len()
    }

    /// Forgets the datagrams that were put together; nothing may be listed of them any more.
    pub fn forget_joined(&mut self) {
        self.joined.clear();
    }

    /// Moves the bytes at `range` of buffer `index` down to `to`; returns where they are now.
    ///
    /// # Panics
    /// When `index` is not below [`ReceiveBatch::len`], `range` is not within the buffer, or `to` lies above it.
    #[inline]
    pub fn move_down(&mut self, index: usize, range: Range<usize>, to: usize) -> Range<usize> {
        let (_, bytes) = self.buffer_mut(index);
        let moved = to..to + range.len();
        if range.start != to {
            bytes.copy_within(range, to);
        }
        moved
    }

    /// Appends a copy of `bytes`; `meta.len` follows from them. False when there is no slot, or it is too small.
    pub fn push(&mut self, meta: Meta, bytes: &[u8]) -> bool {
        let slot = self.accepted.last().map_or(0, |(last, _)| last + 1);
        if slot >= self.slots || bytes.len() > self.slot_bytes {
            return false;
        }
        self.bytes[slot * self.slot_bytes..][..bytes.len()].copy_from_slice(bytes);
        self.accept(slot, Meta { len: bytes.len(), ..meta });
        true
    }

    /// Forgets the buffers for which `keep` is false.
    pub(super) fn retain(&mut self, mut keep: impl FnMut(&Meta, &[u8]) -> bool) {
        let (bytes, room) = (&self.bytes, self.slot_bytes);
        self.accepted.retain(|(slot, meta)| keep(meta, &bytes[slot * room..][..meta.len]));
    }

    /// All buffers have come from this address.
    pub(super) fn come_from(&mut self, source: SocketAddr) {
        for (_, meta) in &mut self.accepted {
            meta.source = source;
        }
    }

    /// The whole room of every slot, for the kernel to fill; call [`ReceiveBatch::accept`] for those it did.
    pub(super) fn rooms(&mut self) -> impl Iterator<Item = &mut [u8]> {
        self.bytes.chunks_exact_mut(self.slot_bytes)
    }

    /// The whole room of one slot, as [`ReceiveBatch::rooms`] lends all of them.
    pub(super) fn room(&mut self, slot: usize) -> &mut [u8] {
        &mut self.bytes[slot * self.slot_bytes..][..self.slot_bytes]
    }

    /// Takes `slot` into the batch. `slot` grows from call to call.
    pub(super) fn accept(&mut self, slot: usize, mut meta: Meta) {
        meta.segment = meta.segment.max(1);
        meta.len = meta.len.min(self.slot_bytes);
        self.recent = self.recent.max(slot + 1);
        self.accepted.push((slot, meta));
    }
}

impl Buffers for ReceiveBatch {
    #[inline]
    fn bytes(&self, slot: usize) -> &[u8] {
        self.buffer(slot)
    }

    #[inline]
    fn bytes_mut(&mut self, slot: usize) -> &mut [u8] {
        self.buffer_mut(slot).1
    }
}

impl Default for ReceiveBatch {
    fn default() -> Self {
        Self::new(Self::DEFAULT_SLOTS, Self::DEFAULT_SLOT_BYTES)
    }
}

/// The way of an outgoing datagram.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Path {
    /// The address that the datagram goes to.
    pub destination: SocketAddr,
    /// The local address to send from; none lets the kernel choose.
    pub source: Option<IpAddr>,
    /// The traffic class: DSCP in the upper six bits, ECN in the lower two.
    pub tos: u8,
}

/// Datagrams of one path that lie one behind the other, outside of any batch.
#[derive(Clone, Copy, Debug)]
pub struct Burst<'a> {
    /// The path that the datagrams take.
    pub path: Path,
    /// The datagrams of the burst, one behind the other.
    pub bytes: &'a [u8],
    /// Bytes of each datagram, of which the last may be shorter; never 0.
    pub segment: usize,
}

/// The progress of a message. It lasts over a `WouldBlock` in the middle of a message that is sent in single datagrams.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Progress {
    /// Segments that need no more work, failed ones included.
    pub(super) done: u16,
    /// Segments that the kernel did not send.
    pub(super) failed: u16,
    /// Why, for the last of them.
    pub(super) why: Option<SendFailure>,
    /// Send the rest as single datagrams.
    pub(super) single: bool,
}

impl Progress {
    /// The outcome of a message of `segments` segments.
    pub(super) fn outcome(&self, segments: u16) -> SendOutcome {
        match self.why {
            None => SendOutcome::Sent,
            Some(why) if self.failed >= segments => SendOutcome::Failed(why),
            Some(why) => SendOutcome::Partly { failed: self.failed, why },
        }
    }
}

/// Datagrams of one path and owner that the kernel takes in one piece and cuts by `UDP_SEGMENT`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Message {
    /// The path that the datagrams take.
    pub path: Path,
    /// The owner of the datagrams; the caller's number.
    pub owner: u32,
    /// Bytes of each datagram; the last may be shorter.
    pub segment: usize,
    /// The range of the datagrams in the batch.
    pub range: Range<usize>,
    /// The number of datagrams in the message.
    pub segments: u16,
    /// The number of payloads that the datagrams carry together.
    pub payloads: u32,
    /// A shorter datagram ended it: no other may follow.
    closed: bool,
    pub(super) progress: Progress,
}

impl Message {
    /// A message of all datagrams of a burst.
    pub(super) fn of_all(burst: &Burst<'_>) -> Self {
        let Burst { path, bytes, segment } = *burst;
        Self {
            path,
            owner: 0,
            segment,
            range: 0..bytes.len(),
            segments: u16::try_from(bytes.len().div_ceil(segment.max(1))).unwrap_or(u16::MAX),
            payloads: 0,
            closed: true,
            progress: Progress::default(),
        }
    }

    /// The number of its datagrams that the kernel took, if it did not take the whole message at once.
    #[must_use]
    pub fn taken(&self) -> u16 {
        self.progress.done.saturating_sub(self.progress.failed)
    }

    /// The range of datagram `index` in the batch.
    pub(super) fn segment_range(&self, index: u16) -> Range<usize> {
        let start = self.range.start + usize::from(index) * self.segment;
        start..(start + self.segment).min(self.range.end)
    }

    fn takes(&self, path: &Path, owner: u32, len: usize, most_segments: u16) -> bool {
        self.path == *path
            && self.owner == owner
            && !self.closed
            && len > 0
            && len <= self.segment
            && self.segments < most_segments
            && self.range.len() + len <= MAX_MESSAGE_BYTES
    }
}

/// Outgoing datagrams, written one after the other at the tail of one buffer and grouped into messages.
///
/// ```text
/// | message 0: path A, 3 × 1200 + 700 | message 1: path B, 2 × 1200 | tail → room for the next datagram |
/// ```
///
/// A datagram is reserved with [`SendBatch::tail`], written there, and becomes one by [`SendBatch::commit`]; what is
/// not committed is overwritten by the next.
#[derive(Debug)]
pub struct SendBatch {
    buffer: Box<[u8]>,
    tail: usize,
    messages: Vec<Message>,
    most_segments: u16,
}

impl SendBatch {
    /// The bytes of a batch by default: four full GSO messages.
    pub const DEFAULT_BYTES: usize = 256 * 1024;

    /// Messages that a batch may have: each datagram may go its own way, and an empty one takes no bytes.
    const MAX_MESSAGES: usize = 1_024;

    /// Room for `bytes` bytes of datagrams.
    #[must_use]
    pub fn new(bytes: usize) -> Self {
        Self::with_segments(bytes, MAX_SEGMENTS)
    }

    /// Room for `bytes` bytes of datagrams, in messages of at most `most_segments`.
    #[must_use]
    pub fn with_segments(bytes: usize, most_segments: u16) -> Self {
        Self { buffer: vec![0; bytes].into_boxed_slice(), tail: 0, messages: Vec::new(), most_segments }
    }

    /// Room for one datagram of up to `max_len` bytes, at most [`MAX_MESSAGE_BYTES`]; its content is arbitrary.
    /// None when it does not fit: send the batch first.
    pub fn tail(&mut self, max_len: usize) -> Option<&mut [u8]> {
        if max_len > MAX_MESSAGE_BYTES || self.messages.len() >= Self::MAX_MESSAGES {
            return None;
        }
        self.buffer.get_mut(self.tail..self.tail + max_len)
    }

    /// Whether datagrams of `bytes` bytes together fit, each in a message of its own.
    #[inline]
    #[must_use]
    pub fn has_room(&self, datagrams: usize, bytes: usize) -> bool {
        self.messages.len() + datagrams <= Self::MAX_MESSAGES && self.tail + bytes <= self.buffer.len()
    }

    /// Makes the first `len` bytes of the tail a datagram that carries `payloads` payloads.
    ///
    /// It joins the last message when path and owner are the same and the kernel can cut it off again; else it begins
    /// the next one.
    ///
    /// # Panics
    /// When `len` exceeds the room that [`SendBatch::tail`] gave.
    pub fn commit(&mut self, path: &Path, owner: u32, len: usize, payloads: u16) {
        let end = self.tail + len;
        assert!(end <= self.buffer.len() && len <= MAX_MESSAGE_BYTES, "committed more than was reserved");
        match self.messages.last_mut() {
            Some(last) if last.takes(path, owner, len, self.most_segments) => {
                last.range.end = end;
                last.segments += 1;
                last.payloads += u32::from(payloads);
                last.closed = len < last.segment;
            }
            Some(_) | None => self.messages.push(Message {
                path: *path,
                owner,
                segment: len,
                range: self.tail..end,
                segments: 1,
                payloads: u32::from(payloads),
                closed: len == 0,
                progress: Progress::default(),
            }),
        }
        self.tail = end;
    }

    /// Lets no other datagram join the last message.
    pub fn end_message(&mut self) {
        if let Some(last) = self.messages.last_mut() {
            last.closed = true;
        }
    }

    /// Whether no datagram has been committed.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.messages.is_empty()
    }

    /// The number of datagrams that have been committed.
    #[must_use]
    pub fn datagrams(&self) -> usize {
        self.messages.iter().map(|message| usize::from(message.segments)).sum()
    }

    /// The bytes of the datagrams that have been committed.
    #[must_use]
    pub fn bytes(&self) -> usize {
        self.messages.iter().map(|message| message.range.len()).sum()
    }

    /// The committed messages, in the order of sending.
    #[must_use]
    pub fn messages(&self) -> &[Message] {
        &self.messages
    }

    /// The datagrams of `message`, which is one of this batch.
    pub fn segments<'a>(&'a self, message: &'a Message) -> impl Iterator<Item = &'a [u8]> {
        (0..message.segments).map(|index| &self.buffer[message.segment_range(index)])
    }

    /// Drops all messages, so that the batch is empty.
    pub fn clear(&mut self) {
        self.messages.clear();
        self.tail = 0;
    }

    /// Forgets the messages for which `keep` is false. Their room is free again once all are gone, or what is before them was sent.
    pub fn retain(&mut self, keep: impl FnMut(&Message) -> bool) {
        self.messages.retain(keep);
        if let Some(last) = self.messages.last() {
            // The next datagram may join it, and follows it without a gap.
            self.tail = last.range.end;
        }
        self.release(0);
    }

    /// All messages go to this address.
    pub(super) fn lead_to(&mut self, destination: SocketAddr) {
        for message in &mut self.messages {
            message.path.destination = destination;
        }
    }

    /// The messages, to note their progress, beside the bytes that they point into.
    pub(super) fn parts(&mut self) -> (&mut [Message], &[u8]) {
        (&mut self.messages, &self.buffer)
    }

    /// Forgets the first `count` messages and moves the rest to the front, so that the whole room is usable.
    pub(super) fn release(&mut self, count: usize) {
        self.messages.drain(..count);
        let Some(first) = self.messages.first() else {
            self.tail = 0;
            return;
        };
        let start = first.range.start;
        self.buffer.copy_within(start..self.tail, 0);
        self.tail -= start;
        for message in &mut self.messages {
            message.range = message.range.start - start..message.range.end - start;
        }
    }
}

impl Default for SendBatch {
    fn default() -> Self {
        Self::new(Self::DEFAULT_BYTES)
    }
}
