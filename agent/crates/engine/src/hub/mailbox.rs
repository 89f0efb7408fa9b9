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
        atomic::{AtomicBool, Ordering},
    },
};

use base::{hash::IssuedMap, ids::PeerId, panics::lock};
use net::{Ready, Token};

/// Capacity of a ring in bytes, the default size of a socket's receive buffer. One peer may use half of it.
pub(super) const RING_BYTES: usize = 4 << 20;

/// Capacity of a ring in hand-off batches, so that empty datagrams are bounded too.
pub(super) const RING_HAND_OFFS: usize = 1024;

/// The share of unauthenticated senders in a ring, in bytes and in hand-off batches: the rest is left for peers' packets.
pub(super) const UNAUTHENTICATED_BYTES: usize = RING_BYTES / 4;
pub(super) const UNAUTHENTICATED_HAND_OFFS: usize = RING_HAND_OFFS / 4;

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
        if !lock(&self.messages).is_empty() || !lock(&self.ring.inside).hand_offs.is_empty() {
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

    /// Puts a hand-off batch of `bytes` into the ring and wakes the worker; returns the batch if there is no room.
    pub(super) fn hand(&self, hand_off: H, bytes: usize, party: Party) -> Result<(), H> {
        self.ring.put(hand_off, bytes, party)?;
        self.wake();
        Ok(())
    }

    /// Takes the messages, oldest first. If `hand_offs` is empty, it receives the waiting hand-off batches, oldest first.
    pub(super) fn take(&self, hand_offs: &mut VecDeque<H>) -> VecDeque<M> {
        // The ring comes first: a batch is handed over after the messages that it depends on. It is taken only when all earlier
        // batches are done, so that the bound of the ring bounds everything that waits.
        if hand_offs.is_empty() {
            *hand_offs = self.ring.take_all();
        }
        self.messages()
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

/// The party whose share of a ring a hand-off batch counts against.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Party {
    /// A peer uses at most half of a ring.
    Peer(PeerId),
    /// All unauthenticated senders together use at most a quarter of a ring.
    Unauthenticated,
    /// A batch whose peer is not known yet is limited by the capacity of the ring alone.
    Unknown,
}

/// Hand-off batches that wait for one worker. The lock is taken once for a batch, not for each datagram.
struct Ring<H> {
    inside: Mutex<Inside<H>>,
    /// Whether the ring may hold hand-off batches: while it is false, the worker does not take the lock.
    filled: AtomicBool,
}

impl<H> Default for Ring<H> {
    fn default() -> Self {
        let inside = Inside {
            hand_offs: VecDeque::new(),
            bytes: 0,
            by_peer: IssuedMap::default(),
            unauthenticated_bytes: 0,
            unauthenticated_hand_offs: 0,
        };
        Self { inside: Mutex::new(inside), filled: AtomicBool::default() }
    }
}

struct Inside<H> {
    hand_offs: VecDeque<H>,
    bytes: usize,
    /// Bytes of each peer's hand-off batches in the ring.
    by_peer: IssuedMap<PeerId, usize>,
    unauthenticated_bytes: usize,
    unauthenticated_hand_offs: usize,
}

impl<H> Ring<H> {
    /// Adds a hand-off batch of `bytes`, or gives it back if there is no room.
    fn put(&self, hand_off: H, bytes: usize, party: Party) -> Result<(), H> {
        let mut inside = lock(&self.inside);
        if inside.hand_offs.len() >= RING_HAND_OFFS || inside.bytes + bytes > RING_BYTES {
            return Err(hand_off);
        }
        match party {
            Party::Peer(peer) => {
                let held = inside.by_peer.entry(peer).or_default();
                if *held + bytes > RING_BYTES / 2 {
                    return Err(hand_off);
                }
                *held += bytes;
            }
            Party::Unauthenticated => {
                let full = inside.unauthenticated_hand_offs >= UNAUTHENTICATED_HAND_OFFS;
                if full || inside.unauthenticated_bytes + bytes > UNAUTHENTICATED_BYTES {
                    return Err(hand_off);
                }
                inside.unauthenticated_bytes += bytes;
                inside.unauthenticated_hand_offs += 1;
            }
            Party::Unknown => {}
        }
        inside.bytes += bytes;
        inside.hand_offs.push_back(hand_off);
        self.filled.store(true, Ordering::Release);
        Ok(())
    }

    /// Takes all hand-off batches out, oldest first.
    fn take_all(&self) -> VecDeque<H> {
        // As in [`Mailbox::messages`].
        if !self.filled.load(Ordering::Relaxed) || !self.filled.swap(false, Ordering::Acquire) {
            return VecDeque::new();
        }
        let mut inside = lock(&self.inside);
        inside.bytes = 0;
        inside.by_peer.clear();
        (inside.unauthenticated_bytes, inside.unauthenticated_hand_offs) = (0, 0);
        std::mem::take(&mut inside.hand_offs)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SIZE: usize = 60_000;

    #[test]
    fn a_full_ring_gives_the_hand_off_back_and_a_peer_has_half_of_it() {
        let ring = Ring::default();
        for _ in 0..2 {
            let put = |party| (0_u32..).take_while(|number| ring.put(*number, SIZE, party).is_ok()).count();
            let ours = put(Party::Peer(PeerId(1)));
            assert_eq!(ours, RING_BYTES / 2 / SIZE);
            assert_eq!(ours + put(Party::Unknown), RING_BYTES / SIZE);
            assert_eq!(ring.put(77, SIZE, Party::Peer(PeerId(2))), Err(77), "it comes back");
            assert_eq!(ring.take_all().len(), RING_BYTES / SIZE);
            assert!(ring.take_all().is_empty());
        }
    }

    #[test]
    fn unauthenticated_senders_fill_a_quarter_of_a_ring_and_peers_packets_find_room() {
        let ring = Ring::default();
        for (bytes, most) in [(SIZE, UNAUTHENTICATED_BYTES / SIZE), (0, UNAUTHENTICATED_HAND_OFFS)] {
            let put = |party| ring.put((), bytes, party).is_ok();
            assert_eq!((0..2 * most).filter(|_| put(Party::Unauthenticated)).count(), most);
            assert!((0..2 * most).all(|_| put(Party::Unknown)));
            assert_eq!(ring.take_all().len(), 3 * most);
        }
    }

    #[test]
    fn hand_offs_wait_in_the_ring_until_those_before_them_are_taken_in() {
        let mailbox = Mailbox::<(), _>::default();
        let mut hand_offs = VecDeque::new();
        for (number, taken) in [(1, vec![1]), (2, vec![1])] {
            mailbox.hand(number, SIZE, Party::Unknown).unwrap();
            assert!(mailbox.take(&mut hand_offs).is_empty());
            assert_eq!(hand_offs, taken);
        }
        hand_offs.clear();
        mailbox.take(&mut hand_offs);
        assert_eq!(hand_offs, [2]);
    }
}
