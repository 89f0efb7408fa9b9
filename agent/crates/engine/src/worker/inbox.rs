//! Commands from other threads to a worker.

use std::{
    collections::VecDeque,
    sync::{Arc, Mutex},
    time::Duration,
};

use net::{Ready, Token};
use wire::panics::lock;

use crate::worker::Inspection;

/// A command that the worker gets from outside, through its inbox.
#[derive(Clone, Debug)]
pub enum Command {
    /// Stop taking traffic in, tell the peers, end.
    Shutdown {
        /// The longest time that the shutdown may take.
        within: Duration,
    },
    /// Say what it has, for an operator.
    Inspect(Arc<Inspection>),
}

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
