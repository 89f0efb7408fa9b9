//! The mailbox of one worker: messages, which are never dropped, and hand-off batches in a ring of bounded size.
//!
//! ```text
//!   sender   put, set the flag ─► mark the token ─► wake
//!   worker   drain the tokens ─► take what the flags show ─► … ─► register to be woken ─► check the tokens ─► sleep
//! ```
//!
//! A sender marks the worker's token after it has put something, and the worker empties the mailbox after it has drained its
//! tokens, so nothing waits while the worker sleeps. `tests/virtual/model` runs this file and `net/src/ready.rs` through every
//! interleaving of small cases.

use std::{
    collections::VecDeque,
    sync::{
        Mutex, OnceLock,
        atomic::{AtomicBool, AtomicUsize, Ordering},
    },
};

use base::{
    hash::{Issued, IssuedMap},
    ids::PeerId,
    panics::lock,
};
use net::{Ready, Token};

/// Capacity of a ring in bytes, the default size of a socket's receive buffer. One peer may use half of it.
pub(super) const RING_BYTES: usize = 4 << 20;

/// Capacity of a ring in hand-off batches, so that empty datagrams are bounded too.
pub(super) const RING_HAND_OFFS: usize = 1024;

/// The share of unauthenticated senders in a ring, in bytes and in hand-off batches: the rest is left for peers' packets.
pub(super) const UNAUTHENTICATED_BYTES: usize = RING_BYTES / 4;
pub(super) const UNAUTHENTICATED_HAND_OFFS: usize = RING_HAND_OFFS / 4;

/// The credit of a party in each round, in datagrams, as that of a socket.
const QUANTUM: i64 = 32;

/// The mailbox of one worker, for messages `M` and hand-off batches `H`.
pub(super) struct Mailbox<M, H> {
    messages: Mutex<VecDeque<M>>,
    has_messages: AtomicBool,
    ring: Ring<H>,
    /// The ready queue and the token that wake the worker, once it has joined.
    wake: OnceLock<(Ready, Token)>,
}

impl<M, H> Default for Mailbox<M, H> {
    fn default() -> Self {
        Self {
            messages: Mutex::default(),
            has_messages: AtomicBool::default(),
            ring: Ring::default(),
            wake: OnceLock::default(),
        }
    }
}

impl<M, H> Mailbox<M, H> {
    /// Sets how the worker is woken, and wakes it if something has come before.
    pub(super) fn join(&self, ready: Ready, token: Token) {
        // A worker joins once, when it is made.
        let _first = self.wake.set((ready, token)).is_ok();
        // The locks order this against senders: an earlier one has left something to be seen here, a later one sees `wake`.
        if !lock(&self.messages).is_empty() || lock(&self.ring.inside).hand_offs > 0 {
            self.wake();
        }
    }

    /// Puts a message into the mailbox and wakes the worker.
    pub(super) fn post(&self, message: M) {
        let mut messages = lock(&self.messages);
        messages.push_back(message);
        self.has_messages.store(true, Ordering::Release);
        drop(messages);
        self.wake();
    }

    /// Puts a message into all `mailboxes` at one moment, so that no worker can act on it and refer to it in a message to a
    /// worker that has not received it.
    pub(super) fn post_all(mailboxes: &[Self], mut message: impl FnMut() -> M) {
        let mut locked: Vec<_> = mailboxes.iter().map(|mailbox| lock(&mailbox.messages)).collect();
        for (mailbox, messages) in mailboxes.iter().zip(&mut locked) {
            messages.push_back(message());
            mailbox.has_messages.store(true, Ordering::Release);
        }
        drop(locked);
        for mailbox in mailboxes {
            mailbox.wake();
        }
    }

    /// Puts a hand-off batch into the ring and wakes the worker; returns the batch if there is no room.
    pub(super) fn hand(&self, hand_off: H, size: Size, party: Party) -> Result<(), H> {
        self.ring.put(hand_off, size, party)?;
        self.wake();
        Ok(())
    }

    /// Takes the messages, oldest first, and returns which hand-off batches may be taken now ([`Mailbox::next`]).
    pub(super) fn take(&self) -> (VecDeque<M>, Seen) {
        // The ring comes first: a batch is handed over after the messages that it depends on.
        let seen = self.ring.seen();
        (self.messages(), seen)
    }

    /// Takes a hand-off batch that was `seen`: the oldest of the party whose turn it is, of those that `may` have one.
    pub(super) fn next(&self, seen: Seen, may: impl Fn(Party) -> bool) -> Option<H> {
        if self.has_hand_offs() { lock(&self.ring.inside).take(&self.ring.waiting, seen, may) } else { None }
    }

    /// Whether a batch that was `seen` waits, of a party that `may` have a turn.
    pub(super) fn has_seen(&self, seen: Seen, may: impl Fn(Party) -> bool) -> bool {
        self.has_hand_offs()
            && lock(&self.ring.inside)
                .parties
                .iter()
                .any(|(party, waiting)| waiting.is_seen(seen) && may(*party))
    }

    /// Whether hand-off batches wait.
    pub(super) fn has_hand_offs(&self) -> bool {
        self.ring.waiting.load(Ordering::Acquire) > 0
    }

    fn messages(&self) -> VecDeque<M> {
        // Read in every turn: a plain load does not take the cache line away from the senders.
        if !self.has_messages.load(Ordering::Relaxed) || !self.has_messages.swap(false, Ordering::Acquire) {
            return VecDeque::new();
        }
        std::mem::take(&mut *lock(&self.messages))
    }

    /// The number of messages that wait, and the bytes of the hand-off batches in the ring.
    #[cfg(feature = "inspection")]
    pub(super) fn waiting(&self) -> (usize, usize) {
        (lock(&self.messages).len(), lock(&self.ring.inside).bytes)
    }

    /// Wakes the worker, even if the mailbox is empty.
    pub(super) fn wake(&self) {
        if let Some((ready, token)) = self.wake.get() {
            ready.mark(*token);
        }
    }
}

/// The party whose share of a ring a hand-off batch counts against, and in whose turn it is taken.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) enum Party {
    /// A peer uses at most half of what the others leave of a ring, so that there is always room for one more.
    Peer(PeerId),
    /// The same for payloads on their way to a peer: they do not wait for what it sends.
    To(PeerId),
    /// All unauthenticated senders together use at most a quarter of a ring.
    Unauthenticated,
    /// Batches whose peers are not known yet use at most three quarters of a ring.
    Unknown,
}

impl Issued for Party {}

impl Party {
    /// Whether the party has a turn: not a peer that is `spent`.
    pub(super) fn has_turn(self, spent: impl Fn(PeerId) -> bool) -> bool {
        match self {
            Self::Peer(peer) => !spent(peer),
            Self::To(_) | Self::Unauthenticated | Self::Unknown => true,
        }
    }
}

/// What a hand-off batch takes of a ring, and of its party's turn.
#[derive(Clone, Copy, Debug)]
pub(super) struct Size {
    pub(super) bytes: usize,
    pub(super) datagrams: u64,
}

/// The number of hand-off batches that had been put into a ring at some time.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Seen(u64);

/// Hand-off batches that wait for one worker, in turns by party. The lock is taken once for a batch, not for each datagram.
struct Ring<H> {
    inside: Mutex<Inside<H>>,
    /// The number of batches in the ring: while it is 0, the worker does not take the lock.
    waiting: AtomicUsize,
}

impl<H> Default for Ring<H> {
    fn default() -> Self {
        let inside =
            Inside { parties: IssuedMap::default(), order: VecDeque::new(), put: 0, hand_offs: 0, bytes: 0 };
        Self { inside: Mutex::new(inside), waiting: AtomicUsize::default() }
    }
}

struct Inside<H> {
    /// The parties that have batches here.
    parties: IssuedMap<Party, Waiting<H>>,
    /// The same in the order of their turns: a deficit round robin.
    order: VecDeque<Party>,
    /// The number of batches that were ever put in.
    put: u64,
    hand_offs: usize,
    bytes: usize,
}

/// The batches of one party, each with its number and size.
struct Waiting<H> {
    hand_offs: VecDeque<(u64, Size, H)>,
    bytes: usize,
    /// Datagrams that may be taken before others come first.
    credit: i64,
}

impl<H> Waiting<H> {
    fn is_seen(&self, seen: Seen) -> bool {
        self.hand_offs.front().is_some_and(|(number, ..)| *number <= seen.0)
    }
}

impl<H> Ring<H> {
    /// Adds a hand-off batch, or gives it back if there is no room.
    fn put(&self, hand_off: H, size: Size, party: Party) -> Result<(), H> {
        let mut inside = lock(&self.inside);
        if !inside.has_room(size.bytes, party) {
            return Err(hand_off);
        }
        inside.put += 1;
        inside.hand_offs += 1;
        inside.bytes += size.bytes;
        self.waiting.store(inside.hand_offs, Ordering::Release);
        let Inside { parties, order, put, .. } = &mut *inside;
        let waiting = parties.entry(party).or_insert_with(|| {
            order.push_back(party);
            Waiting { hand_offs: VecDeque::new(), bytes: 0, credit: QUANTUM }
        });
        waiting.bytes += size.bytes;
        waiting.hand_offs.push_back((*put, size, hand_off));
        Ok(())
    }

    fn seen(&self) -> Seen {
        // Read in every turn: a plain load does not take the cache line away from the senders. A batch that comes after it wakes the
        // worker again.
        if self.waiting.load(Ordering::Relaxed) == 0 { Seen(0) } else { Seen(lock(&self.inside).put) }
    }
}

impl<H> Inside<H> {
    fn has_room(&self, bytes: usize, party: Party) -> bool {
        let (held_bytes, held) =
            self.parties.get(&party).map_or((0, 0), |waiting| (waiting.bytes, waiting.hand_offs.len()));
        let (most_bytes, most) = match party {
            Party::Peer(_) | Party::To(_) => (
                (RING_BYTES - (self.bytes - held_bytes)) / 2,
                (RING_HAND_OFFS - (self.hand_offs - held)).div_ceil(2),
            ),
            Party::Unauthenticated => (UNAUTHENTICATED_BYTES, UNAUTHENTICATED_HAND_OFFS),
            Party::Unknown => (RING_BYTES / 4 * 3, RING_HAND_OFFS / 4 * 3),
        };
        held_bytes + bytes <= most_bytes
            && held < most
            && self.bytes + bytes <= RING_BYTES
            && self.hand_offs < RING_HAND_OFFS
    }

    /// Takes a batch out, and notes how many are left in `left`.
    fn take(&mut self, left: &AtomicUsize, seen: Seen, may: impl Fn(Party) -> bool) -> Option<H> {
        let mut skipped = 0;
        while skipped < self.order.len() {
            let party = *self.order.front()?;
            let waiting = self.parties.get_mut(&party)?;
            if !waiting.is_seen(seen) || !may(party) {
                skipped += 1;
                self.order.rotate_left(1);
            } else if waiting.credit <= 0 {
                skipped = 0;
                waiting.credit += QUANTUM;
                self.order.rotate_left(1);
            } else {
                let (_, size, hand_off) = waiting.hand_offs.pop_front()?;
                waiting.bytes -= size.bytes;
                waiting.credit -= i64::try_from(size.datagrams.max(1)).unwrap_or(i64::MAX);
                if waiting.hand_offs.is_empty() {
                    // Nothing of it waits for the others, so it owes them nothing.
                    self.parties.remove(&party);
                    self.order.pop_front();
                }
                self.bytes -= size.bytes;
                self.hand_offs -= 1;
                left.store(self.hand_offs, Ordering::Release);
                return Some(hand_off);
            }
        }
        None
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SIZE: Size = Size { bytes: 60_000, datagrams: 40 };
    const BYTES: usize = SIZE.bytes;

    /// All that waits, in the order of turns.
    fn drain<H>(mailbox: &Mailbox<(), H>) -> Vec<H> {
        let (_, seen) = mailbox.take();
        std::iter::from_fn(|| mailbox.next(seen, |_| true)).collect()
    }

    #[test]
    fn a_full_ring_gives_the_hand_off_back_and_a_peer_has_half_of_what_others_leave() {
        let mailbox = Mailbox::<(), _>::default();
        for _ in 0..2 {
            let put =
                |party| (0_u32..).take_while(|number| mailbox.hand(*number, SIZE, party).is_ok()).count();
            let ours = put(Party::Peer(PeerId(1)));
            assert_eq!(ours, RING_BYTES / 2 / BYTES);
            let others = put(Party::Peer(PeerId(2)));
            assert_eq!(others, (RING_BYTES - ours * BYTES) / 2 / BYTES);
            assert!(put(Party::Peer(PeerId(3))) > 0, "there is room for one more");
            put(Party::Unknown);
            assert_eq!(mailbox.hand(77, SIZE, Party::Peer(PeerId(4))), Err(77), "it comes back");
            assert_eq!(drain(&mailbox).len(), RING_BYTES / BYTES);
            assert!(drain(&mailbox).is_empty());
            assert!(!mailbox.has_hand_offs());
        }
    }

    #[test]
    fn empty_hand_offs_are_bounded_too() {
        let mailbox = Mailbox::<(), _>::default();
        let put = |peer| {
            let size = Size { bytes: 0, datagrams: 1 };
            (0..).take_while(|_| mailbox.hand((), size, Party::Peer(PeerId(peer))).is_ok()).count()
        };
        assert_eq!([put(1), put(2), put(3)], [512, 256, 128]);
    }

    #[test]
    fn unauthenticated_senders_fill_a_quarter_of_a_ring_and_peers_packets_find_room() {
        let mailbox = Mailbox::<(), _>::default();
        for (bytes, most) in [(BYTES, UNAUTHENTICATED_BYTES / BYTES), (0, UNAUTHENTICATED_HAND_OFFS)] {
            let put = |party| mailbox.hand((), Size { bytes, ..SIZE }, party).is_ok();
            assert_eq!((0..2 * most).filter(|_| put(Party::Unauthenticated)).count(), most);
            assert!((0..2 * most).all(|_| put(Party::Unknown)));
            assert_eq!(drain(&mailbox).len(), 3 * most);
        }
    }

    #[test]
    fn parties_take_turns_by_their_datagrams_and_each_keeps_its_order() {
        let mailbox = Mailbox::<(), _>::default();
        let size = |datagrams| Size { bytes: 100, datagrams };
        (0..4).for_each(|number| mailbox.hand((1, number), size(256), Party::Peer(PeerId(1))).unwrap());
        (0..70).for_each(|number| mailbox.hand((2, number), size(1), Party::Peer(PeerId(2))).unwrap());
        let taken = drain(&mailbox);
        assert_eq!(
            taken[..2],
            [(1, 0), (2, 0)],
            "the light one's does not wait behind all of the heavy one's"
        );
        let heavy: Vec<usize> = (0..taken.len()).filter(|place| taken[*place].0 == 1).collect();
        assert_eq!(heavy.len(), 4);
        assert_eq!(heavy[1], 71, "256 datagrams before, so the other's 70 come first");
        for peer in [1, 2] {
            let numbers: Vec<i32> =
                taken.iter().filter(|(of, _)| *of == peer).map(|(_, number)| *number).collect();
            assert!(numbers.is_sorted(), "{numbers:?}");
        }
    }

    #[test]
    fn a_party_that_may_not_have_a_turn_keeps_its_batches_and_holds_nobody_up() {
        let mailbox = Mailbox::<(), _>::default();
        let held = Party::Peer(PeerId(1));
        for (number, party) in [(1, held), (2, held), (3, Party::Peer(PeerId(2)))] {
            mailbox.hand(number, SIZE, party).unwrap();
        }
        let (_, seen) = mailbox.take();
        assert_eq!(mailbox.next(seen, |party| party != held), Some(3));
        assert_eq!(mailbox.next(seen, |party| party != held), None);
        assert!(!mailbox.has_seen(seen, |party| party != held) && mailbox.has_seen(seen, |_| true));
        assert!(mailbox.has_hand_offs());
        assert_eq!(drain(&mailbox), [1, 2]);
    }

    #[test]
    fn a_hand_off_that_came_after_the_messages_waits_for_those_that_it_depends_on() {
        let mailbox = Mailbox::<u8, _>::default();
        mailbox.hand(1, SIZE, Party::Unknown).unwrap();
        let (messages, seen) = mailbox.take();
        assert!(messages.is_empty());
        mailbox.post(7);
        mailbox.hand(2, SIZE, Party::Unknown).unwrap();
        assert_eq!(mailbox.next(seen, |_| true), Some(1));
        assert_eq!(mailbox.next(seen, |_| true), None);
        let (messages, seen) = mailbox.take();
        assert_eq!(messages, [7]);
        assert_eq!(mailbox.next(seen, |_| true), Some(2));
    }
}
