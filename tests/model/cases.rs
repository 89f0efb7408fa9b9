// The cases, once with each copy of the sources. Threads stand for workers; the one of the model itself is one of them.

use ::std::collections::VecDeque;

use crate::{Case, agent::ids::PeerId, sleep_until, std::sync::Arc};

use super::net::{Ready, Token};
use mailbox::{Mailbox, Party, RING_BYTES};

pub(crate) const CASES: &[Case] = &[
    Case { name: "two orders of one worker", switches: None, run: two_orders },
    Case { name: "a parcel after its order", switches: None, run: order_then_parcel },
    Case { name: "an order before its worker is there", switches: None, run: early_order },
    Case { name: "a parcel before its worker is there", switches: None, run: early_parcel },
    Case { name: "orders of two workers", switches: Some(4), run: orders_of_two },
    Case { name: "parcels of two workers", switches: Some(4), run: parcels_of_two },
    Case { name: "an order to all, and what follows from it", switches: Some(4), run: broadcast },
];

type Shared = Mailbox<u32, u32>;

/// A worker of which only the order of steps is left: that of `Worker::turn` and `shell::run`.
struct Worker<'a> {
    mailbox: &'a Shared,
    ready: Ready,
    hand_offs: VecDeque<u32>,
}

impl<'a> Worker<'a> {
    fn join(mailbox: &'a Shared) -> Self {
        let ready = Ready::new();
        mailbox.join(ready.clone(), Token(0));
        Self { mailbox, ready, hand_offs: VecDeque::new() }
    }

    /// Takes turns, and sleeps while there is nothing, until it has `count` orders and hand-off batches, in the order in which it acts.
    fn run(&mut self, count: usize) -> Vec<u32> {
        let (mut seen, mut tokens) = (Vec::new(), Vec::new());
        loop {
            self.ready.drain(&mut tokens);
            seen.extend(self.mailbox.take(&mut self.hand_offs));
            seen.extend(self.hand_offs.drain(..));
            if seen.len() >= count {
                return seen;
            }
            if self.ready.is_empty() {
                sleep_until(self.ready.marked());
            }
        }
    }
}

/// Runs `send` on a thread of its own. The model ends when every thread has.
fn spawn(mailbox: &Arc<Shared>, send: impl FnOnce(&Shared) + 'static) {
    let mailbox = Arc::clone(mailbox);
    drop(loom::thread::spawn(move || send(&mailbox)));
}

fn sorted(mut seen: Vec<u32>) -> Vec<u32> {
    seen.sort_unstable();
    seen
}

fn orders_of_two() {
    let mailbox = Arc::new(Shared::default());
    let mut worker = Worker::join(&mailbox);
    [1, 2].into_iter().for_each(|order| spawn(&mailbox, move |mailbox| mailbox.post(order)));
    assert_eq!(sorted(worker.run(2)), [1, 2]);
}

fn two_orders() {
    let mailbox = Arc::new(Shared::default());
    let mut worker = Worker::join(&mailbox);
    spawn(&mailbox, |mailbox| [1, 2].into_iter().for_each(|order| mailbox.post(order)));
    assert_eq!(worker.run(2), [1, 2], "their order is kept");
}

fn order_then_parcel() {
    let mailbox = Arc::new(Shared::default());
    let mut worker = Worker::join(&mailbox);
    spawn(&mailbox, |mailbox| {
        mailbox.post(1);
        mailbox.hand(2, 100, Party::Peer(PeerId(0))).expect("there is room");
    });
    assert_eq!(worker.run(2), [1, 2], "a parcel is never looked at before an order that was given first");
}

/// Each hand-off batch is as large as a peer may have in all, so that an account that is not given back refuses the last ones.
fn parcels_of_two() {
    let mailbox = Arc::new(Shared::default());
    let mut worker = Worker::join(&mailbox);
    for peer in [1, 2] {
        spawn(&mailbox, move |mailbox| {
            mailbox.hand(peer, RING_BYTES / 2, Party::Peer(PeerId(peer))).expect("half is its own");
        });
    }
    assert_eq!(sorted(worker.run(2)), [1, 2]);
    for peer in [1, 2] {
        mailbox.hand(peer, RING_BYTES / 2, Party::Peer(PeerId(peer))).expect("what was taken out is given back");
    }
    assert_eq!(mailbox.hand(3, 1, Party::Unknown), Err(3), "it is full");
}

/// Whoever acts on an order to all and tells another of it finds that one told already.
fn broadcast() {
    let boxes: Arc<[Shared; 2]> = Arc::default();
    for place in [0, 1] {
        let boxes = Arc::clone(&boxes);
        drop(loom::thread::spawn(move || {
            let mut worker = Worker::join(&boxes[place]);
            if place == 0 {
                assert_eq!(worker.run(1), [1]);
                boxes[1].post(2);
            } else {
                assert_eq!(worker.run(2), [1, 2]);
            }
        }));
    }
    Shared::post_all(&boxes[..], || 1);
}

fn early_order() {
    let mailbox = Arc::new(Shared::default());
    spawn(&mailbox, |mailbox| mailbox.post(1));
    assert_eq!(Worker::join(&mailbox).run(1), [1]);
}

fn early_parcel() {
    let mailbox = Arc::new(Shared::default());
    spawn(&mailbox, |mailbox| mailbox.hand(1, 100, Party::Strangers).expect("there is room"));
    assert_eq!(Worker::join(&mailbox).run(1), [1]);
}
