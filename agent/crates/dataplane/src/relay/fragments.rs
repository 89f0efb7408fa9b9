//! Datagrams that travel in pieces, because they fit into no packet: put together again, within bounds.
//!
//! ```text
//!   first piece ──► incomplete ──all of it──► complete
//!                       ├── REASSEMBLY_TIME, or a newer one needs the room, or its flow ends ──► Incomplete
//!                       └── pieces that overlap, or do not agree on the length ──► Malformed
//! ```
//!
//! Whatever a peer sends, what waits here holds at most the bytes that the operator allows. A datagram is reserved with its
//! first piece, and its reservation counts.

use std::{
    collections::VecDeque,
    ops::Range,
    sync::Arc,
    time::{Duration, Instant},
};

use base::memory::SharedMemory;
use wire::context::{DATAGRAM_NUMBERS, MOST_DATAGRAM};

use crate::relay::{
    accounting::{Account, DropReason},
    flow::FlowId,
};

/// The least size of every piece but the last one of its datagram. A packet of 1200 bytes has room for more, so that no sender is
/// hindered, and a peer cannot have a datagram put together from many small pieces.
pub const LEAST_PIECE: usize = 1024;

/// How long the first piece of a datagram waits for the others. They leave one after the other and on one lane, and no path
/// reorders packets by a second.
pub const REASSEMBLY_TIME: Duration = Duration::from_secs(1);

/// The largest number of incomplete datagrams of one peer at one worker.
pub const MOST_INCOMPLETE: usize = 256;

/// The memory that an incomplete datagram costs beside its bytes: its entry and the list of its pieces.
pub const OVERHEAD_BYTES: usize = 512;

/// What the incomplete datagrams of one peer at one worker may hold however much those of the others do: one of the largest, and a
/// few small ones.
pub const OWN_BYTES: usize = 128 << 10;

/// The memory of the incomplete datagrams of all peers, in multiples of the limit of one peer at one worker: 64 MiB by default.
pub const ALL_PEERS: usize = 64;

/// The initial number of ended datagrams that are remembered, each for [`REASSEMBLY_TIME`], so that a late piece does not begin one
/// of them anew.
const LEAST_REMEMBERED: usize = 64;

/// The largest number of ended datagrams that are remembered, in 24 KiB: a second of the largest datagrams at 500 Mbit/s, and at the
/// rate of smaller ones far longer than any path reorders pieces.
const MOST_REMEMBERED: usize = 1024;

/// The number of ended datagrams whose memory is kept for the next ones, so that nothing is allocated for a datagram whose pieces
/// come one after the other.
const MOST_SPARE: usize = 4;

/// The memory of a larger datagram is not kept: its packets cost more than an allocation does.
const MOST_SPARE_BYTES: usize = 4096;

/// Kept memory may exceed the datagram that uses it by this; [`OVERHEAD_BYTES`] has room for it.
const SPARE_SLACK_BYTES: usize = 256;

/// The datagram that a piece belongs to, and its position there.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Piece {
    pub flow: FlowId,
    /// The number of the datagram within the flow.
    pub datagram: u32,
    /// The size of the whole datagram, in bytes.
    pub total: usize,
    /// The offset of the piece in the datagram.
    pub offset: usize,
}

/// The progress of a datagram that found no room for all of its pieces.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PartlySent {
    pub datagram: u32,
    /// Bytes of it that are in packets.
    pub offset: u16,
}

/// A datagram of which some pieces have come.
#[derive(Debug)]
struct Incomplete {
    flow: FlowId,
    datagram: u32,
    total: usize,
    /// The time at which the first piece came.
    since: Instant,
    parts: Parts,
}

/// The pieces of a datagram that have come.
#[derive(Debug, Default)]
struct Parts {
    /// Their bytes, in the order in which they came: no more is written than was received.
    bytes: Vec<u8>,
    /// Their places, in the order of the datagram, not joined: at most `total / LEAST_PIECE`.
    spans: Vec<Span>,
}

/// A piece of a datagram that has come.
#[derive(Clone, Copy, Debug)]
struct Span {
    /// Its start and end in the datagram.
    of_whole: (u16, u16),
    /// Its start among the bytes that have come.
    at: u16,
}

impl Incomplete {
    /// The bytes that it counts for in the limits.
    fn cost(&self) -> usize {
        self.total + OVERHEAD_BYTES
    }
}

impl Parts {
    /// The position, among those that have come, of a piece of `len` bytes at `offset`, unless some of its bytes have come before.
    fn place(&self, offset: usize, len: usize) -> Result<usize, Misfit> {
        let of_whole = (short(offset), short(offset + len));
        let index = self.spans.partition_point(|span| span.of_whole < of_whole);
        if self.spans.get(index).is_some_and(|next| next.of_whole == of_whole) {
            return Err(Misfit::Duplicate);
        }
        let after_last = index.checked_sub(1).is_none_or(|last| self.spans[last].of_whole.1 <= of_whole.0);
        let before_next = self.spans.get(index).is_none_or(|next| of_whole.1 <= next.of_whole.0);
        if after_last && before_next { Ok(index) } else { Err(Misfit::Overlap) }
    }

    /// Keeps the piece at `offset`, which belongs at position `index`.
    fn keep(&mut self, index: usize, offset: usize, bytes: &[u8]) {
        let of_whole = (short(offset), short(offset + bytes.len()));
        self.spans.insert(index, Span { of_whole, at: short(self.bytes.len()) });
        self.bytes.extend_from_slice(bytes);
    }

    /// Appends all pieces to `joined` in the order of the datagram, with `missing`, which belongs at position `index`.
    fn join(&self, index: usize, missing: &[u8], joined: &mut Vec<u8>) {
        let (before, after) = self.spans.split_at(index);
        let bytes = |&Span { of_whole: (start, end), at }: &Span| {
            &self.bytes[usize::from(at)..usize::from(at) + usize::from(end - start)]
        };
        before.iter().for_each(|span| joined.extend_from_slice(bytes(span)));
        joined.extend_from_slice(missing);
        after.iter().for_each(|span| joined.extend_from_slice(bytes(span)));
    }
}

/// A length or an offset within a datagram.
fn short(at: usize) -> u16 {
    u16::try_from(at).unwrap_or(u16::MAX)
}

/// Why bytes are not added to a datagram.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Misfit {
    /// The same bytes have come already.
    Duplicate,
    /// Some of these bytes have come in another piece.
    Overlap,
}

/// A datagram whose reassembly has ended.
#[derive(Clone, Copy, Debug)]
struct Ended {
    flow: FlowId,
    datagram: u32,
    at: Instant,
}

impl Ended {
    fn is_fresh(&self, now: Instant) -> bool {
        now.saturating_duration_since(self.at) < REASSEMBLY_TIME
    }
}

/// The datagrams that have ended lately, each in the slot that its number gives it. Numbers are usually consecutive, so that those
/// of a second have slots of their own.
#[derive(Debug, Default)]
struct Memory(Vec<Option<Ended>>);

impl Memory {
    fn has(&self, flow: FlowId, datagram: u32, now: Instant) -> bool {
        let known = self.slot_of(datagram).and_then(|slot| self.0[slot]);
        known.is_some_and(|ended| (ended.flow, ended.datagram) == (flow, datagram) && ended.is_fresh(now))
    }

    /// Adds a datagram; if a fresh one has its slot, doubles the number of slots.
    fn add(&mut self, new: Ended) {
        if self.0.is_empty() {
            self.0.resize(LEAST_REMEMBERED, None);
        }
        while let Some(slot) = self.slot_of(new.datagram) {
            let taken = self.0[slot].is_some_and(|old| {
                (old.flow, old.datagram) != (new.flow, new.datagram) && old.is_fresh(new.at)
            });
            if !taken || self.0.len() == MOST_REMEMBERED {
                self.0[slot] = Some(new);
                return;
            }
            let twice = vec![None; 2 * self.0.len()];
            for ended in std::mem::replace(&mut self.0, twice).into_iter().flatten() {
                if let Some(slot) = self.slot_of(ended.datagram) {
                    self.0[slot] = Some(ended);
                }
            }
        }
    }

    /// The slot of a datagram; the number of slots is a power of two, or 0.
    fn slot_of(&self, datagram: u32) -> Option<usize> {
        self.0.len().checked_sub(1).map(|mask| datagram as usize & mask)
    }

    fn forget(&mut self, flow: FlowId) {
        for slot in &mut self.0 {
            slot.take_if(|ended| ended.flow == flow);
        }
    }
}

/// Which datagrams of our services travel in pieces, and their numbers.
#[derive(Debug, Default)]
pub struct Fragmenter {
    /// The number of the next datagram. All flows share the count, so that by the time a flow gets a number again, nothing of the
    /// datagram that had it before is under way.
    next: u32,
    /// For each of our services, by index, whether datagrams that fit into no packet travel in pieces.
    services: Box<[bool]>,
}

impl Fragmenter {
    /// Notes which of our services want that.
    pub(super) fn set_own(&mut self, services: &[config::Service]) {
        let fragments = |service: &config::Service| service.oversize == config::Oversize::Fragment;
        // Usually none, and then no memory is held for it.
        let most = services.iter().rposition(fragments).map_or(0, |last| last + 1);
        self.services = services[..most].iter().map(fragments).collect();
    }

    /// Whether datagrams from our service with this index travel in pieces if they fit into no packet.
    #[must_use]
    pub fn is_for(&self, service: usize) -> bool {
        self.services.get(service).copied().unwrap_or(false)
    }

    /// A number for a datagram that travels in pieces.
    pub fn number(&mut self) -> u32 {
        let number = self.next;
        self.next = (number + 1) % DATAGRAM_NUMBERS;
        number
    }
}

/// The datagrams of one peer at one worker that are not complete.
#[derive(Debug)]
pub struct Reassembler {
    /// In the order of their first pieces.
    incomplete: VecDeque<Incomplete>,
    /// The sum of the incomplete datagrams' costs, in bytes.
    held: usize,
    most: usize,
    /// The memory of the incomplete datagrams of all peers at all workers.
    memory: Arc<SharedMemory>,
    /// The number of datagrams that were given up because newer ones needed their room, or had none themselves.
    pub evicted: u64,
    ended: Memory,
    /// Emptied memory of datagrams that have ended, for the next ones.
    spare: Vec<Parts>,
}

impl Reassembler {
    /// One that holds at most `most` bytes, which are part of those of all peers.
    #[must_use]
    pub fn within(most: usize, memory: &Arc<SharedMemory>) -> Self {
        Self {
            incomplete: VecDeque::new(),
            held: 0,
            most,
            memory: Arc::clone(memory),
            evicted: 0,
            ended: Memory::default(),
            spare: Vec::new(),
        }
    }

    /// Changes the limit on the memory of the incomplete datagrams; what waits already stays.
    pub fn set_most(&mut self, bytes: usize) {
        self.most = bytes;
    }

    #[must_use]
    pub fn len(&self) -> usize {
        self.incomplete.len()
    }

    /// True if no datagram is incomplete.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.incomplete.is_empty()
    }

    /// The memory of the incomplete datagrams, in bytes.
    #[must_use]
    pub fn held_bytes(&self) -> usize {
        self.held
    }

    /// The time at which the oldest incomplete datagram is given up.
    #[must_use]
    pub fn deadline(&self) -> Option<Instant> {
        self.incomplete.front().map(|oldest| oldest.since + REASSEMBLY_TIME)
    }

    /// Takes a piece in. Once its datagram is complete, appends that to `joined`, and returns where it lies there. The oldest datagrams
    /// give way, so that the others take at most the limit; or at most [`OWN_BYTES`], if all peers together have no more.
    ///
    /// A datagram is received with its first piece that comes here, and in `account` it is delivered or dropped once.
    pub fn take(
        &mut self,
        piece: &Piece,
        bytes: &[u8],
        now: Instant,
        account: &mut Account,
        joined: &mut Vec<u8>,
    ) -> Option<Range<usize>> {
        self.expire(now, account);
        let end = piece.offset + bytes.len();
        let ends = end == piece.total && !bytes.is_empty();
        let fits = end <= piece.total && piece.total <= MOST_DATAGRAM && (ends || bytes.len() >= LEAST_PIECE);
        let known = self.position(piece.flow, piece.datagram);
        let index = match known {
            Some(index) => index,
            None if self.ended.has(piece.flow, piece.datagram, now) => return None,
            None => {
                account.receive(1, 0);
                let reserved = if fits { self.reserve(piece, now, account) } else { None };
                let Some(index) = reserved else {
                    let reason = if fits { DropReason::Incomplete } else { DropReason::Malformed };
                    account.receive(0, bytes.len() as u64);
                    account.drop(reason, 1);
                    self.remember(piece.flow, piece.datagram, now);
                    return None;
                };
                index
            }
        };
        let datagram = &mut self.incomplete[index];
        let place = if fits && datagram.total == piece.total {
            datagram.parts.place(piece.offset, bytes.len())
        } else {
            Err(Misfit::Overlap)
        };
        let place = match place {
            Ok(place) => place,
            Err(Misfit::Duplicate) => return None,
            Err(Misfit::Overlap) => {
                self.end(index, now);
                account.drop(DropReason::Malformed, 1);
                return None;
            }
        };
        account.receive(0, bytes.len() as u64);
        if datagram.parts.bytes.len() + bytes.len() < datagram.total {
            datagram.parts.keep(place, piece.offset, bytes);
            return None;
        }
        let start = joined.len();
        datagram.parts.join(place, bytes, joined);
        self.end(index, now);
        Some(start..joined.len())
    }

    /// Gives up `datagram` of `flow`, because a piece of `bytes` bytes came too late to be taken in.
    pub fn give_up(
        &mut self,
        flow: FlowId,
        datagram: u32,
        bytes: usize,
        now: Instant,
        account: &mut Account,
    ) {
        match self.position(flow, datagram) {
            Some(index) => self.end(index, now),
            None if self.ended.has(flow, datagram, now) => return,
            None => {
                account.receive(1, bytes as u64);
                self.remember(flow, datagram, now);
            }
        }
        account.drop(DropReason::Expired, 1);
    }

    /// Gives up datagrams that have waited for too long.
    pub fn expire(&mut self, now: Instant, account: &mut Account) {
        while self.deadline().is_some_and(|deadline| deadline <= now) {
            self.end(0, now);
            account.drop(DropReason::Incomplete, 1);
        }
    }

    /// Drops the incomplete datagrams of a flow that has ended. Its id may be given to another one.
    pub fn end_flow(&mut self, flow: FlowId, account: &mut Account) {
        self.ended.forget(flow);
        let before = self.incomplete.len();
        self.incomplete.retain(|datagram| datagram.flow != flow);
        if self.incomplete.len() < before {
            let held = self.incomplete.iter().map(Incomplete::cost).sum();
            self.memory.remove(self.held - held);
            self.held = held;
            account.drop(DropReason::Incomplete, (before - self.incomplete.len()) as u64);
        }
    }

    /// Drops everything, because the process that sent the pieces is gone: the next one gives its datagrams the same numbers.
    pub fn clear(&mut self, account: &mut Account) {
        account.drop(DropReason::Incomplete, self.incomplete.len() as u64);
        let evicted = self.evicted;
        *self = Self::within(self.most, &self.memory);
        self.evicted = evicted;
    }

    /// Makes room for the datagram of a piece and begins it; `None` if it does not fit at all.
    fn reserve(&mut self, piece: &Piece, now: Instant, account: &mut Account) -> Option<usize> {
        let &Piece { flow, datagram, total, .. } = piece;
        let cost = total + OVERHEAD_BYTES;
        if cost > self.most {
            self.evicted += 1;
            return None;
        }
        let is_full = |it: &Self| {
            let most = if it.memory.spare() < cost { OWN_BYTES.min(it.most) } else { it.most };
            it.held + cost > most || it.len() >= MOST_INCOMPLETE
        };
        while !self.is_empty() && is_full(self) {
            self.end(0, now);
            account.drop(DropReason::Incomplete, 1);
            self.evicted += 1;
        }
        self.held += cost;
        self.memory.add(cost);
        // A larger memory would exceed what the datagram counts for.
        let spare = self.spare.pop().filter(|spare| spare.bytes.capacity() <= total + SPARE_SLACK_BYTES);
        let mut parts = spare.unwrap_or_default();
        parts.bytes.reserve_exact(total);
        self.incomplete.push_back(Incomplete { flow, datagram, total, since: now, parts });
        Some(self.incomplete.len() - 1)
    }

    /// Takes the datagram at `index` out, and remembers that it has ended.
    fn end(&mut self, index: usize, now: Instant) {
        let Some(ended) = self.incomplete.remove(index) else { return };
        self.held -= ended.cost();
        self.memory.remove(ended.cost());
        self.remember(ended.flow, ended.datagram, now);
        let Parts { mut bytes, mut spans } = ended.parts;
        if self.spare.len() < MOST_SPARE && bytes.capacity() <= MOST_SPARE_BYTES {
            bytes.clear();
            spans.clear();
            self.spare.push(Parts { bytes, spans });
        }
    }

    /// The index of an incomplete datagram. Most pieces belong to the newest.
    fn position(&self, flow: FlowId, datagram: u32) -> Option<usize> {
        self.incomplete.iter().rposition(|known| (known.flow, known.datagram) == (flow, datagram))
    }

    fn remember(&mut self, flow: FlowId, datagram: u32, now: Instant) {
        self.ended.add(Ended { flow, datagram, at: now });
    }
}

impl Drop for Reassembler {
    fn drop(&mut self) {
        self.memory.remove(self.held);
    }
}

#[cfg(test)]
#[path = "fragments_tests.rs"]
mod tests;
