//! The control socket: how `culvert peer` and `culvert status` reach the running daemon.
//!
//! | question | file |
//! |---|---|
//! | who is asked, and what is done in which order | this one: [`Peers`], [`Desk`] |
//! | how the socket is made, and how connections are bounded | `listener.rs` |
//! | requests and answers, as lines of JSON | `wire.rs` |
//! | what `culvert status` shows | `status.rs` |
//! | the other end: asking a daemon | `client.rs` |
//!
//! It runs on a thread of its own: a request never waits for the packet path, nor the other way round. Whoever may open
//! the socket may change the peers; the file's mode (0600) says who that is.

use std::{error::Error, sync::Arc};

use crate::{
    config::{
        self, Config, PeerOrigin,
        state::{self, Edit},
    },
    identity::PublicKey,
};

pub mod client;
mod listener;
pub mod status;
#[cfg(test)]
mod tests;
pub mod wire;

pub use listener::{ControlSocket, ListenError, MAX_CONNECTIONS, TIMEOUT};
use status::Status;
use wire::{Answer, ListedPeer, Request};

/// Why a peer was not added or removed, with a remedy.
pub type Refused = Box<dyn Error + Send + Sync>;

/// The peers of the running daemon. A change is effective when the call returns.
pub trait Peers: Send + Sync {
    /// Those of both files, as they are now.
    fn list(&self) -> Vec<config::Peer>;

    /// Lets a peer in, and dials it if it has endpoints; it was checked against [`Peers::list`].
    ///
    /// # Errors
    /// Why it is not let in; nothing has changed then.
    fn add(&self, peer: config::Peer) -> Result<(), Refused>;

    /// Ends the connections of a peer and never lets its keys in again.
    ///
    /// # Errors
    /// Why it is still there.
    fn remove(&self, name: &str) -> Result<(), Refused>;

    /// What the agent is doing.
    fn status(&self) -> Status;
}

/// Answers requests, one after the other.
pub struct Desk {
    config: Arc<Config>,
    own_key: PublicKey,
    peers: Arc<dyn Peers>,
}

impl Desk {
    /// Of the daemon that runs `config` under `own_key`.
    #[must_use]
    pub fn new(config: Arc<Config>, own_key: PublicKey, peers: Arc<dyn Peers>) -> Self {
        Self { config, own_key, peers }
    }

    /// The answer to one line, without its end.
    #[must_use]
    pub fn answer(&self, line: &[u8]) -> Answer {
        match Request::from_line(line) {
            Ok(Request::PeerList {}) => self.list(),
            Ok(Request::PeerAdd(new)) => self.add(&new.into()),
            Ok(Request::PeerRemove { name }) => self.remove(&name),
            Ok(Request::Status {}) => Answer::Status { status: Box::new(self.peers.status()) },
            Err(error) => Answer::Refused { bad_input: true, error: error.to_string() },
        }
    }

    fn list(&self) -> Answer {
        let peers = self.peers.list();
        Answer::Peers { peers: peers.iter().map(|peer| ListedPeer::new(peer, &self.config)).collect() }
    }

    /// The peer is let in before it is written, so that a refusal leaves no trace; what can fail without being
    /// effective is tried first.
    fn add(&self, new: &state::NewPeer) -> Answer {
        // A peer of the configuration that was removed is known still: after a restart it would be there twice.
        let mut known = self.peers.list();
        let listed = known.len();
        for peer in &self.config.peers {
            if peer.origin == PeerOrigin::Config
                && !known[..listed].iter().any(|known| known.name == peer.name)
            {
                known.push(peer.clone());
            }
        }
        let peer = match state::check(&self.config, self.own_key, &known, new) {
            Ok(peer) => peer,
            Err(problems) => return Answer::Refused { bad_input: true, error: problems.to_string() },
        };
        let name = Arc::clone(&peer.name);
        let edit = self.edit().and_then(|mut edit| edit.add(new).map(|()| edit));
        let edit = match edit {
            Ok(edit) => edit,
            Err(error) => return failed(&error),
        };
        if let Err(error) = self.peers.add(peer) {
            return failed(&*error);
        }
        tracing::info!(peer = &*name, key = new.public_key, "a peer was added through the control socket");
        match edit.commit() {
            Ok(()) => Answer::Done { note: None },
            Err(error) => {
                tracing::warn!(peer = &*name, %error, "the peer that was added is not in the state file");
                failed(&format_args!("the peer is let in, but not kept: a restart ends that: {error}"))
            }
        }
    }

    /// The peer goes before the file is written: a full disk must not keep a stolen key alive.
    fn remove(&self, name: &str) -> Answer {
        let known = self.peers.list().into_iter().find(|peer| *peer.name == *name);
        if known.is_some() {
            if let Err(error) = self.peers.remove(name) {
                return failed(&*error);
            }
            tracing::info!(peer = name, "a peer was removed through the control socket");
        }
        if known.as_ref().is_some_and(|peer| peer.origin == PeerOrigin::Config) {
            return Answer::Done { note: Some(still_configured(name)) };
        }
        let named = self.config.forwards_to(name);
        let kept = self.edit().and_then(|mut edit| {
            let found = edit.remove(name, named)?;
            if found { edit.commit().map(|()| true) } else { Ok(false) }
        });
        match (known, kept) {
            (None, Ok(false)) => {
                let error = format!("no peer is named {name:?} (remedy: see culvert peer list)");
                Answer::Refused { bad_input: true, error }
            }
            (_, Ok(_)) => Answer::Done { note: named.then(|| still_named(name)) },
            (None, Err(error)) => failed(&error),
            (Some(_), Err(error)) => {
                tracing::warn!(peer = name, %error, "the peer that was removed is still in the state file");
                failed(&format_args!(
                    "the peer is shut out, but still in the state file: a restart lets it in again: {error}"
                ))
            }
        }
    }

    fn edit(&self) -> Result<Edit, state::StateError> {
        Edit::begin(&self.config.state_dir.join(state::FILE_NAME))
    }
}

/// What an operator should know who shut out a peer of the configuration.
fn still_configured(name: &str) -> String {
    format!(
        "{name:?} is shut out until the next start; it is a peer of the configuration, which only its author changes: remove its \
         [[peer]] there too"
    )
}

/// What an operator should know who removed a peer to which ports still lead.
#[must_use]
pub fn still_named(name: &str) -> String {
    format!(
        "a [[udp]] or [[tcp]] of the configuration still names {name:?}: what comes to its port is dropped, and after a restart \
         the port stays closed"
    )
}

fn failed(error: &(impl ToString + ?Sized)) -> Answer {
    Answer::Refused { bad_input: false, error: error.to_string() }
}
