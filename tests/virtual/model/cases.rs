// The cases, once with each copy of the sources. Threads stand for workers; the one of the model itself is one of them.

use mailbox::{Mailbox, Party, RING_BYTES, Size};

use crate::{Case, agent::ids::PeerId, sleep_until, std::sync::Arc};
use super::net::{Ready, Token};

pub(crate) const CASES: &[Case] = &[
    Case { name: "two messages of one worker", switches: None, run: two_messages },
    Case { name: "a hand-off batch after its message", switches: None, run: message_then_hand_off },
    Case { name: "a message before its worker is there", switches: None, run: early_message },
    Case { name: "a hand_off before its worker is there", switches: None, run: early_hand_off },
    Case { name: "messages of two workers", switches: Some(4), run: messages_of_two },
    Case { name: "hand_offs of two workers", switches: Some(4), run: hand_offs_of_two },
    Case { name: "an message to all, and what follows from it", switches: Some(4), run: broadcast },
];

type Shared = Mailbox<u32, u32>;

/// A worker of which only the message of steps is left: that of `Worker::turn` and `shell::run`.
struct Worker<'a> {
    mailbox: &'a Shared,
    ready: Ready,
}

impl<'a> Worker<'a> {
    fn join(mailbox: &'a Shared) -> Self {
        let ready = Ready::default();
        mailbox.join(ready.clone(), Token(0));
        Self { mailbox, ready }
    }

    /// Takes turns, and sleeps while there is nothing, until it has `count` messages and hand-off batches, in the message in which it acts.
    fn run(&mut self, count: usize) -> Vec<u32> {
        let (mut seen, mut tokens) = (Vec::new(), Vec::new());
        loop {
            self.ready.drain(&mut tokens);
            let (messages, handed) = self.mailbox.take();
            seen.extend(messages);
            seen.extend(::std::iter::from_fn(|| self.mailbox.next(handed, |_| true)));
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

fn bytes(bytes: usize) -> Size {
    Size { bytes, datagrams: 1 }
}

fn sorted(mut seen: Vec<u32>) -> Vec<u32> {
    seen.sort_unstable();
    seen
}

fn messages_of_two() {
    let mailbox = Arc::new(Shared::default());
    let mut worker = Worker::join(&mailbox);
    [1, 2].into_iter().for_each(|message| spawn(&mailbox, move |mailbox| mailbox.post(message)));
    assert_eq!(sorted(worker.run(2)), [1, 2]);
}

fn two_messages() {
    let mailbox = Arc::new(Shared::default());
    let mut worker = Worker::join(&mailbox);
    spawn(&mailbox, |mailbox| [1, 2].into_iter().for_each(|message| mailbox.post(message)));
    assert_eq!(worker.run(2), [1, 2], "their message is kept");
}

fn message_then_hand_off() {
    let mailbox = Arc::new(Shared::default());
    let mut worker = Worker::join(&mailbox);
    spawn(&mailbox, |mailbox| {
        mailbox.post(1);
        mailbox.hand(2, bytes(100), Party::Peer(PeerId(0))).expect("there is room");
    });
    assert_eq!(worker.run(2), [1, 2], "a hand_off is never looked at before an message that was given first");
}

/// Each hand-off batch is as large as a peer may have in all, so that an account that is not given back refuses the last ones.
fn hand_offs_of_two() {
    let mailbox = Arc::new(Shared::default());
    let mut worker = Worker::join(&mailbox);
    for peer in [1, 2] {
        spawn(&mailbox, move |mailbox| {
            mailbox.hand(peer, bytes(RING_BYTES / 3), Party::Peer(PeerId(peer))).expect("half of the rest is its own");
        });
    }
    assert_eq!(sorted(worker.run(2)), [1, 2]);
    for peer in [1, 2] {
        mailbox.hand(peer, bytes(RING_BYTES / 3), Party::Peer(PeerId(peer))).expect("what was taken out is given back");
    }
    assert_eq!(mailbox.hand(3, bytes(RING_BYTES), Party::Unknown), Err(3), "it is full");
}

/// Whoever acts on an message to all and tells another of it finds that one told already.
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

fn early_message() {
    let mailbox = Arc::new(Shared::default());
    spawn(&mailbox, |mailbox| mailbox.post(1));
    assert_eq!(Worker::join(&mailbox).run(1), [1]);
}

fn early_hand_off() {
    let mailbox = Arc::new(Shared::default());
    spawn(&mailbox, |mailbox| mailbox.hand(1, bytes(100), Party::Unauthenticated).expect("there is room"));
    assert_eq!(Worker::join(&mailbox).run(1), [1]);
}
