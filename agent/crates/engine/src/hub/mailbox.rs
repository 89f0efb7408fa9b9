//! What waits for one worker: messages, which are never lost, and hand-off batches in a ring of bounded size.
//!
//! ```text
//!   sender   put, set the flag ─► mark the token ─► wake
//!   worker   drain the tokens ─► take what the flags show ─► … ─► register to be woken ─► look at the tokens ─► sleep
//! ```
//!
//! Whoever puts something marks the worker's token afterwards, and the worker takes out everything after it has drained its
//! tokens, so that nothing waits while the worker sleeps. `tests/model` runs this file and `net/src/ready.rs` through every
//! interleaving of small cases.

use std::{
    collections::VecDeque,
    sync::{
        Mutex, OnceLock,
        atomic::{AtomicBool, Ordering},
    },
};

use net::{Ready, Token};
use wire::{hash::IssuedMap, ids::PeerId, panics::lock};

/// The most bytes in a ring, and twice the most of one peer: as much as a socket's receive buffer has by default.
pub(super) const RING_BYTES: usize = 4 << 20;

/// The most hand-off batches in a ring, so that empty datagrams are bounded too.
pub(super) const RING_HAND_OFFS: usize = 1024;

/// Strangers' part of a ring, in bytes and in hand-off batches: however many there are, peers' packets find room.
pub(super) const STRANGERS_BYTES: usize = RING_BYTES / 4;
pub(super) const STRANGERS_HAND_OFFS: usize = RING_HAND_OFFS / 4;

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
    /// Says how its worker is woken, and wakes it if something came before.
    pub(super) fn join(&self, ready: Ready, token: Token) {
        // A worker joins once, when it is made.
        let _first = self.wake.set((ready, token)).is_ok();
        // Locked: whoever put something before this has set its flag, and whoever does so later knows whom to wake.
        if !lock(&self.messages).is_empty() || !lock(&self.ring.inside).hand_offs.is_empty() {
            self.wake();
        }
    }

    /// Puts a message into the mailbox and wakes its worker.
    pub(super) fn post(&self, message: M) {
        let mut messages = lock(&self.messages);
        messages.push_back(message);
        self.has_messages.store(true, Ordering::Release);
        drop(messages);
        self.wake();
    }

    /// Gives every worker of `boxes` a message at one moment: none can act on it and name it to another that has not got it.
    pub(super) fn post_all(boxes: &[Self], mut message: impl FnMut() -> M) {
        let mut locked: Vec<_> = boxes.iter().map(|mailbox| lock(&mailbox.messages)).collect();
        for (mailbox, messages) in boxes.iter().zip(&mut locked) {
            messages.push_back(message());
            mailbox.has_messages.store(true, Ordering::Release);
        }
        drop(locked);
        for mailbox in boxes {
            mailbox.wake();
        }
    }

    /// Hands its worker a hand-off batch of `bytes`; gives it back if there is no room.
    pub(super) fn hand(&self, hand_off: H, bytes: usize, party: Party) -> Result<(), H> {
        self.ring.put(hand_off, bytes, party)?;
        self.wake();
        Ok(())
    }

    /// Takes the hand-off batches out, oldest first, unless `hand_offs` still holds some, and the messages, oldest first.
    pub(super) fn take(&self, hand_offs: &mut VecDeque<H>) -> VecDeque<M> {
        // First: what was handed over was so after the messages that it depends on. Only when all before it has been taken in, so
        // that the ring's bound is the bound of what waits.
        if hand_offs.is_empty() {
            *hand_offs = self.ring.take_all();
        }
        self.messages()
    }

    fn messages(&self) -> VecDeque<M> {
        // Looked at in every turn: a load alone does not take the cache line from the others.
        if !self.has_messages.load(Ordering::Relaxed) || !self.has_messages.swap(false, Ordering::Acquire) {
            return VecDeque::new();
        }
        std::mem::take(&mut *lock(&self.messages))
    }

    /// Wakes its worker, also if nothing is there for it.
    pub(super) fn wake(&self) {
        if let Some((ready, token)) = self.wake.get() {
            ready.mark(*token);
        }
    }
}

/// Whose part of a ring a hand-off batch takes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Party {
    /// A peer has no more than half of a ring.
    Peer(PeerId),
    /// All strangers together have no more than a quarter.
    Strangers,
    /// A batch whose peer is not known yet is bounded by the size of the ring alone.
    Unknown,
}

/// Hand-off batches that wait for one worker. Each is locked in and out once, not its datagrams.
struct Ring<H> {
    inside: Mutex<Inside<H>>,
    /// Whether the ring may hold hand-off batches: while it is false, nobody locks the ring to look.
    filled: AtomicBool,
}

impl<H> Default for Ring<H> {
    fn default() -> Self {
        let inside = Inside {
            hand_offs: VecDeque::new(),
            bytes: 0,
            by_peer: IssuedMap::default(),
            stranger_bytes: 0,
            stranger_hand_offs: 0,
        };
        Self { inside: Mutex::new(inside), filled: AtomicBool::default() }
    }
}

struct Inside<H> {
    hand_offs: VecDeque<H>,
    bytes: usize,
    /// Bytes of each peer's hand-off batches in the ring.
    by_peer: IssuedMap<PeerId, usize>,
    stranger_bytes: usize,
    stranger_hand_offs: usize,
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
            Party::Strangers => {
                let full = inside.stranger_hand_offs >= STRANGERS_HAND_OFFS;
                if full || inside.stranger_bytes + bytes > STRANGERS_BYTES {
                    return Err(hand_off);
                }
                inside.stranger_bytes += bytes;
                inside.stranger_hand_offs += 1;
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
        (inside.stranger_bytes, inside.stranger_hand_offs) = (0, 0);
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
    fn strangers_fill_a_quarter_of_a_ring_and_peers_packets_find_room() {
        let ring = Ring::default();
        for (bytes, most) in [(SIZE, STRANGERS_BYTES / SIZE), (0, STRANGERS_HAND_OFFS)] {
            let put = |party| ring.put((), bytes, party).is_ok();
            assert_eq!((0..2 * most).filter(|_| put(Party::Strangers)).count(), most);
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
