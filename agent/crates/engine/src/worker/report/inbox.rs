//! Commands from other threads to a worker.

use std::{
    collections::VecDeque,
    sync::{Arc, Mutex},
    time::Duration,
};

use base::panics::lock;
use net::{Ready, Token};

use crate::worker::report::{
    forwards_request::{ForwardEnd, ForwardsPortion},
    inspection_request::Inspection,
};

/// Command to a worker from another thread.
#[derive(Clone, Debug)]
pub enum Command {
    /// Stop accepting traffic, tell the peers, and end.
    Shutdown {
        /// The longest time that the shutdown may take.
        within: Duration,
    },
    /// Accept no further connection, and ask the peers to leave.
    Drain {
        /// The time after which sessions that are still there are closed.
        within: Duration,
    },
    Inspect(Arc<Inspection>),
    /// Tell of some TCP forwards.
    Forwards(Arc<ForwardsPortion>),
    EndForward(Arc<ForwardEnd>),
    /// Publish, unless what was last published is recent.
    Publish,
}

/// Limit on waiting commands, which are few and read in every turn.
const MAX_COMMANDS: usize = 64;

/// Queue of commands from other threads to a worker.
#[derive(Debug)]
pub struct Inbox {
    commands: Mutex<VecDeque<Command>>,
    ready: Ready,
    token: Token,
}

impl Inbox {
    pub(crate) fn new(ready: Ready, token: Token) -> Self {
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

    pub(crate) fn take(&self) -> Option<Command> {
        lock(&self.commands).pop_front()
    }
}
