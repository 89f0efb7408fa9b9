//! The datagrams of a session of a user: what a worker and the users' thread share, in two queues.
//!
//! ```text
//!   worker ── DATAGRAM frame, capsule ──► Datagrams ──► users' thread ──► UDP socket
//!          ◄──                                      ◄──
//!
//!   IP packets: users::ip::Link says which pass; to the device a worker writes them, and any worker reads those from there
//! ```
//!
//! Over HTTP/2 and HTTP/1.1 the thread of the web server on TCP is at both sides.
//!
//! Each queue holds 256 datagrams and 128 KiB; what does not fit is dropped, and counted as every datagram is.

use std::{
    collections::VecDeque,
    sync::{Arc, Mutex, Weak},
    task::{Context, Poll, Waker},
};

use base::panics::lock;
use bytes::Bytes;
use users::{
    account::{Account, Dropped, Place},
    ip::{Device, Link},
    rate::Direction,
};

/// The most datagrams of a queue.
const MOST_DATAGRAMS: usize = 256;

/// The bytes of a queue from which on no more are put. One datagram may go beyond.
const MOST_BYTES: usize = 128 << 10;

/// The queues of one session.
pub struct Datagrams {
    state: Mutex<State>,
    account: Arc<Account>,
    packets: Option<Packets>,
}

/// Where the IP packets of a session go.
struct Packets {
    link: Arc<Link>,
    device: Arc<dyn Device>,
}

#[derive(Default)]
struct State {
    from_user: Queue,
    to_user: Queue,
    /// The users' thread waits for a datagram from the user.
    waits: Option<Waker>,
}

#[derive(Default)]
struct Queue {
    datagrams: VecDeque<Bytes>,
    bytes: usize,
    closed: bool,
}

impl Queue {
    /// Why it does not take another one.
    fn refuses(&self) -> Option<Dropped> {
        if self.closed {
            Some(Dropped::Ended)
        } else if self.datagrams.len() >= MOST_DATAGRAMS || self.bytes >= MOST_BYTES {
            Some(Dropped::QueueFull)
        } else {
            None
        }
    }

    fn put(&mut self, datagram: Bytes) {
        self.bytes += datagram.len();
        self.datagrams.push_back(datagram);
    }

    fn take(&mut self) -> Option<Bytes> {
        let datagram = self.datagrams.pop_front()?;
        self.bytes -= datagram.len();
        Some(datagram)
    }

    /// Takes no more, and gives how many it had.
    fn close(&mut self) -> u64 {
        self.closed = true;
        self.bytes = 0;
        std::mem::take(&mut self.datagrams).len() as u64
    }
}

impl Datagrams {
    /// The queues of a session whose datagrams count in `account`.
    #[must_use]
    pub fn new(account: Arc<Account>) -> Arc<Self> {
        Arc::new(Self { state: Mutex::default(), account, packets: None })
    }

    /// The queue of a session of IP packets of `protocol`, which calls `tell` for each that waits for the user; those from the user go to
    /// `device`.
    pub fn of_packets(
        account: Arc<Account>,
        protocol: Option<u8>,
        tell: impl Fn() + Send + Sync + 'static,
        device: Arc<dyn Device>,
    ) -> Arc<Self> {
        Arc::new_cyclic(|own: &Weak<Self>| {
            let own = Weak::clone(own);
            let link = Link::new(Arc::clone(&account), protocol, move |packet| {
                if let Some(own) = own.upgrade() {
                    let is_within_rate = own.account.lets_pass(Direction::ToUser, packet.len());
                    if own.put_from_target(packet, is_within_rate) {
                        tell();
                    }
                }
            });
            Self { state: Mutex::default(), account, packets: Some(Packets { link, device }) }
        })
    }

    /// The link of a session of IP packets.
    #[must_use]
    pub fn link(&self) -> Option<&Arc<Link>> {
        self.packets.as_ref().map(|packets| &packets.link)
    }

    /// Tells a session of IP packets how many bytes of a packet a DATAGRAM frame takes.
    pub(super) fn set_room(&self, bytes: impl FnOnce() -> Option<usize>) {
        if let Some(link) = self.link() {
            link.set_room(bytes());
        }
    }

    /// Puts a payload from the user.
    pub fn put_from_user(&self, payload: Bytes) {
        self.account.datagram(Place::FromUser, payload.len());
        if let Some(Packets { link, device }) = &self.packets {
            return match link.from_user(&payload) {
                Ok(packet) => device.put(packet, &self.account),
                Err(reason) => self.account.dropped_from_user(reason, 1),
            };
        }
        let mut state = lock(&self.state);
        if let Some(reason) = state.from_user.refuses() {
            return self.account.dropped_from_user(reason, 1);
        }
        state.from_user.put(payload);
        let waker = state.waits.take();
        drop(state);
        if let Some(waker) = waker {
            waker.wake();
        }
    }

    /// Something came from the user that is no datagram for the target.
    pub fn not_for_target(&self, reason: Dropped) {
        self.account.datagram(Place::FromUser, 0);
        self.account.dropped_from_user(reason, 1);
    }

    /// Gives the payloads for the user, one after the other, to `send`, which returns one that it has no room for.
    pub fn to_user(&self, mut send: impl FnMut(Bytes) -> Result<(), Bytes>) {
        loop {
            let Some(payload) = lock(&self.state).to_user.take() else { return };
            let length = payload.len();
            match send(payload) {
                Ok(()) => self.account.datagram(Place::ToUser, length),
                Err(payload) => {
                    let mut state = lock(&self.state);
                    state.to_user.bytes += payload.len();
                    state.to_user.datagrams.push_front(payload);
                    return;
                }
            }
        }
    }

    /// Takes no more in either direction; what waits is dropped.
    pub fn close(&self) {
        let mut state = lock(&self.state);
        let (from_user, to_user) = (state.from_user.close(), state.to_user.close());
        drop(state);
        self.account.dropped_from_user(Dropped::Ended, from_user);
        self.account.dropped_to_user(Dropped::Ended, to_user);
    }

    /// The next payload from the user.
    pub fn poll_from_user(&self, cx: &Context<'_>) -> Poll<Bytes> {
        let mut state = lock(&self.state);
        if let Some(payload) = state.from_user.take() {
            return Poll::Ready(payload);
        }
        state.waits = Some(cx.waker().clone());
        Poll::Pending
    }

    /// What became of a payload from the user.
    pub fn was_sent(&self, outcome: Result<usize, Dropped>) {
        match outcome {
            Ok(length) => self.account.datagram(Place::ToTarget, length),
            Err(reason) => self.account.dropped_from_user(reason, 1),
        }
    }

    /// Puts a payload for the user, for [`Datagrams::to_user`]; false if it was dropped.
    ///
    /// The caller says whether it is within the user's rate.
    pub fn put_from_target(&self, payload: Bytes, is_within_rate: bool) -> bool {
        self.account.datagram(Place::FromTarget, payload.len());
        let mut state = lock(&self.state);
        let beyond = (!is_within_rate).then_some(Dropped::OverRate);
        if let Some(reason) = beyond.or_else(|| state.to_user.refuses()) {
            self.account.dropped_to_user(reason, 1);
            return false;
        }
        state.to_user.put(payload);
        true
    }
}

impl Drop for Datagrams {
    fn drop(&mut self) {
        self.close();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn all(datagrams: &Datagrams, mut room: usize) -> usize {
        let mut count = 0;
        datagrams.to_user(|payload| {
            room = room.checked_sub(1).ok_or_else(|| payload.clone())?;
            count += 1;
            Ok(())
        });
        count
    }

    #[test]
    fn every_datagram_is_accounted_for() {
        let account = Arc::new(Account::new(&"anna".into()));
        let datagrams = Datagrams::new(Arc::clone(&account));
        for _ in 0..300 {
            datagrams.put_from_user(Bytes::from_static(&[1; 100]));
        }
        let cx = Context::from_waker(Waker::noop());
        for _ in 0..6 {
            assert!(datagrams.poll_from_user(&cx).is_ready());
            datagrams.was_sent(Ok(100));
        }
        datagrams.not_for_target(Dropped::UnknownContext);
        datagrams.close();
        datagrams.put_from_user(Bytes::from_static(b"late"));
        let from = account.figures();
        assert_eq!(from.datagrams[Place::FromUser], 302);
        assert_eq!(from.datagrams[Place::ToTarget], 6);
        assert_eq!(from.dropped_from[Dropped::QueueFull], 44);
        assert_eq!(from.dropped_from[Dropped::Ended], 251);
        let dropped: u64 = Dropped::ALL.map(|reason| from.dropped_from[reason]).iter().sum();
        assert_eq!(302, 6 + dropped);
    }

    #[test]
    fn a_full_connection_keeps_what_waits_in_order() {
        let account = Arc::new(Account::new(&"anna".into()));
        let datagrams = Datagrams::new(Arc::clone(&account));
        let state = &datagrams.state;
        for length in [10, 2_000, 20, 30] {
            account.datagram(Place::FromTarget, length);
            lock(state).to_user.put(vec![0; length].into());
        }
        assert_eq!((all(&datagrams, 2), lock(state).to_user.bytes), (2, 50));
        assert_eq!((all(&datagrams, 9), lock(state).to_user.bytes), (2, 0));
        let figures = account.figures();
        assert_eq!((figures.datagrams[Place::ToUser], figures.bytes[Place::ToUser]), (4, 2_060));
    }
}
