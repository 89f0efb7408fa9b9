//! The thread and the runtime around a worker: they wait for it, and give it the time.

use std::{collections::VecDeque, future::poll_fn, sync::Mutex, task::Poll};

use crate::worker::{Command, Worker};
use net::{Ready, Token};
use wire::{clock::Clock, panics::lock};

/// Commands that may wait at once; they are few, and looked at in every turn.
const MAX_COMMANDS: usize = 64;

/// Commands from other threads to a worker.
#[derive(Debug)]
pub struct Inbox {
    commands: Mutex<VecDeque<Command>>,
    ready: Ready,
    token: Token,
}

impl Inbox {
    pub(super) fn new(ready: Ready, token: Token) -> Self {
        Self { commands: Mutex::default(), ready, token }
    }

    /// Puts a command and wakes the worker; false if too many wait.
    pub fn put(&self, command: Command) -> bool {
        let mut commands = lock(&self.commands);
        if commands.len() >= MAX_COMMANDS {
            return false;
        }
        commands.push_back(command);
        drop(commands);
        self.ready.mark(self.token);
        true
    }

    pub(super) fn take(&self) -> Option<Command> {
        lock(&self.commands).pop_front()
    }
}

/// Runs a worker on the current runtime until it has shut down.
pub async fn run(mut worker: Worker, clock: &dyn Clock) {
    loop {
        let now = clock.now();
        // A turn has budgets of its own. tokio's would make every socket beyond the 128th operation look as if it had nothing.
        let turn = tokio::task::unconstrained(poll_fn(|_| Poll::Ready(worker.turn(now)))).await;
        if turn.ended {
            worker.publish_last(now);
            return;
        }
        if turn.busy {
            // Lets the runtime look at its sockets, so that no source starves.
            tokio::task::yield_now().await;
            continue;
        }
        let woken = worker.ready().marked();
        match turn.deadline {
            Some(deadline) => {
                // Either way there is a turn to take.
                let _elapsed = tokio::time::timeout_at(deadline.into(), woken).await.is_err();
            }
            None => woken.await,
        }
    }
}
