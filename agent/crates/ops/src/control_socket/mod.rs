//! The control socket: how `culvert peer`, `culvert reload` and `culvert status` reach the running daemon.
//!
//! | question | file |
//! |---|---|
//! | who is asked, and what is done in which order | this one: [`Peers`], [`RequestHandler`] |
//! | how users of the state file are changed, and listed | `user_changes.rs` |
//! | how a peer of the state file is changed or replaced, and shown as a file has it | `peer_changes.rs` |
//! | how the socket is made, and how connections are bounded | `listener.rs` |
//! | requests and answers, as lines of JSON | `protocol.rs` |
//! | what `culvert status` shows | `status/` |
//! | the other end: asking a daemon | `client.rs` |
//!
//! It runs on a thread of its own: a request never waits for the packet path, nor the other way round. Whoever may open
//! the socket may change the peers; the file's mode (0600) says who that is.

use std::{
    error::Error,
    sync::{Arc, MutexGuard},
    time::Duration,
};

use crate::{reload_error::ReloadError, state_file};

pub mod client;
mod listener;
pub mod peer_changes;
pub mod protocol;
#[cfg(test)]
mod reload_tests;
pub mod status;
#[cfg(test)]
mod tests;
pub mod user_changes;
#[cfg(test)]
mod user_changes_tests;

use config::{
    self, AccessMode, Config,
    quota::Quota,
    reload::Change,
    state::{self, Edit},
};
use engine::{origin::PeerOrigin, registry::Listed, status::ForwardId};
use gate::identity::PublicKey;

use crate::qlog::Captures;
use base::fault::{self, Fault};
pub use listener::{ControlSocket, ListenError, MAX_CONNECTIONS, TIMEOUT};
use protocol::{Answer, ListedPeer, Request, ShownChange};
use status::{Scope, Status};

/// Why a peer was not added or removed, with a remedy.
pub type Refused = Box<dyn Error + Send + Sync>;

/// The peers of the running daemon. A change is effective when the call returns.
pub trait Peers: Send + Sync {
    /// Those of both files, as they are now, and those of open mode.
    fn list(&self) -> Vec<Listed>;

    /// Lets a peer in, and dials it if it has endpoints; it was checked against [`Peers::list`].
    ///
    /// # Errors
    /// Why it is not let in; nothing has changed then.
    fn add(&self, peer: config::Peer) -> Result<(), Refused>;

    /// Changes a peer of the state file in place, as a reload would; it was checked against the others of [`Peers::list`]. With
    /// `dry_run` it only says what that would do.
    ///
    /// # Errors
    /// Why it cannot be changed; nothing has changed then.
    fn change(&self, peer: config::Peer, dry_run: bool) -> Result<Vec<Change>, Refused>;

    /// Has a peer have carried so many bytes in this month, and writes that.
    ///
    /// # Errors
    /// Why that could not be written; it holds all the same until the daemon ends.
    fn set_quota_used(&self, name: &Arc<str>, quota: &Quota, used: u64) -> Result<(), Refused>;

    /// Has these users instead of those that run: who is not among them, or may do less, ends at once. With `dry_run` it only says
    /// what that would do.
    ///
    /// # Errors
    /// Why it cannot be; nothing has changed then.
    fn change_users(&self, users: Vec<config::User>, dry_run: bool) -> Result<Vec<Change>, Refused>;

    /// Ends the connections of a peer and never lets its keys in again.
    ///
    /// # Errors
    /// Why it is still there.
    fn remove(&self, name: &str) -> Result<(), Refused>;

    /// Keeps out a removed peer that is still in the state file: no reload lets it in.
    fn keep_out(&self, peer: &config::Peer);

    /// Holds off reloads and other changes of peers until it is dropped.
    fn one_at_a_time(&self) -> MutexGuard<'_, ()>;

    /// Returns what the agent is doing, as far as `scope` asks for it.
    fn status(&self, scope: &Scope) -> Status;

    fn config(&self) -> Arc<Config>;

    /// Reads the configuration again, and makes the agent follow what can be changed while it runs; with `dry_run` it only
    /// says what that would be. One reload at a time: the signal asks for one from another thread.
    ///
    /// # Errors
    /// What is wrong with the file, or what could not be done, as a [`ReloadError`]; nothing has changed then.
    fn reload(&self, dry_run: bool) -> Result<Reloaded, Refused>;

    /// Takes no new peers, and asks those that have dialled the agent to leave it `within` that time, after which they are cut off.
    ///
    /// # Errors
    /// Why not all of them are asked.
    fn drain(&self, within: Duration) -> Result<(), Refused>;

    /// Resets both sides of a TCP forward; false if there is none with this ID.
    ///
    /// # Errors
    /// Why that is not known.
    fn end_forward(&self, id: ForwardId) -> Result<bool, Refused>;

    /// Returns the captures that operators look at.
    fn captures(&self) -> &Captures;
}

/// What a reload did, or would do if it was only tried.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Reloaded {
    pub changes: Vec<Change>,
    /// What an operator should know all the same.
    pub notes: Vec<String>,
}

/// Answers requests: those that change peers one after the other.
pub struct RequestHandler {
    own_key: PublicKey,
    program: &'static str,
    peers: Arc<dyn Peers>,
}

impl RequestHandler {
    /// Of the daemon of this `program` (what `culvert --version` says) that runs under `own_key`.
    #[must_use]
    pub fn new(own_key: PublicKey, program: &'static str, peers: Arc<dyn Peers>) -> Self {
        Self { own_key, program, peers }
    }

    /// The answer to one line, without its end.
    #[must_use]
    pub fn answer(&self, line: &[u8]) -> Answer {
        fault::point(Fault::Control);
        self.try_answer(line).unwrap_or_else(|refused| refused)
    }

    /// Answers; the error is an [`Answer::Refused`].
    fn try_answer(&self, line: &[u8]) -> Result<Answer, Answer> {
        match Request::from_line(line).map_err(wrong)? {
            Request::PeerList {} => Ok(self.list()),
            Request::PeerAdd(new) => self.add(&new),
            Request::PeerReplace(new) => self.replace(&new),
            Request::PeerSet(change) => self.set(&change),
            Request::PeerQuota { name, used_bytes } => self.set_quota_used(&name, used_bytes),
            Request::PeerExport { name } => self.export(name.as_deref()),
            Request::PeerRemove { name } => self.remove(&name),
            Request::UserList {} => Ok(self.users()),
            Request::UserAdd(new) => self.add_user(&new),
            Request::UserSet(change) => self.set_user(&change),
            Request::UserExport { name } => self.export_users(name.as_deref()),
            Request::UserRemove { name } => self.remove_user(&name),
            Request::Reload { dry_run } => self.reload(dry_run),
            Request::Drain { within_seconds } => {
                self.peers.drain(Duration::from_secs(within_seconds)).map_err(failed)?;
                Ok(Answer::Done { note: None })
            }
            Request::Status(scope) => {
                let status = self.peers.status(&scope);
                match status.lacks(&scope) {
                    Some(error) => Err(wrong(error)),
                    None => Ok(Answer::Status { status: Box::new(status) }),
                }
            }
            Request::ForwardEnd { id } => self.end_forward(&id),
            Request::QlogStart(order) => {
                let id = self.peers.captures().start(&order, &self.peers.config()).map_err(no_capture)?;
                Ok(Answer::QlogStarted { id })
            }
            Request::QlogTake { id } => self.peers.captures().take(id).map(Answer::Qlog).map_err(no_capture),
            Request::QlogStop { id } => {
                self.peers.captures().stop(id).map_err(no_capture)?;
                Ok(Answer::Done { note: None })
            }
        }
    }

    fn list(&self) -> Answer {
        let peers = self.peers.list();
        let config = self.peers.config();
        let shown = |listed: &Listed| ListedPeer::new(&listed.peer, listed.origin, &config);
        Answer::Peers { peers: peers.iter().map(shown).collect() }
    }

    /// The peer is let in before it is written, so that a refusal leaves no trace; what can fail without being
    /// effective is tried first.
    fn add(&self, new: &state::NewPeer) -> Result<Answer, Answer> {
        let _one_at_a_time = self.peers.one_at_a_time();
        let config = self.peers.config();
        // A peer of open mode makes way for one that is added with its key.
        let known = self.peers.list().into_iter().filter(|listed| listed.origin != PeerOrigin::Open);
        let known: Vec<_> = known.map(|listed| config::Peer::clone(&listed.peer)).collect();
        let mut configured = config.peers.iter().filter(|peer| peer.origin == config::PeerOrigin::Config);
        let returns = |peer: &config::Peer| {
            let has_key = new.public_key.parse().is_ok_and(|key| peer.public_keys.contains(&key));
            *peer.name == *new.name || has_key
        };
        if let Some(removed) =
            configured.find(|peer| returns(peer) && !known.iter().any(|known| known.name == peer.name))
        {
            return Err(wrong(returns_by_itself(&removed.name)));
        }
        // The registry refuses our previous key.
        let peer = state::check(&config, &[self.own_key], &known, new).map_err(wrong)?;
        let name = Arc::clone(&peer.name);
        let mut edit = self.edit().map_err(failed)?;
        edit.add(new).map_err(failed)?;
        self.peers.add(peer).map_err(failed)?;
        tracing::info!(peer = &*name, key = new.public_key, "a peer was added through the control socket");
        state_file::commit(edit).map_err(|error| {
            tracing::warn!(peer = &*name, %error, "the peer that was added is not in the state file (remedy: mend that and add it again)");
            failed(format!("the peer is let in, but not kept: a restart or a reload ends that: {error}"))
        })?;
        let was_closed = config.closed.iter().any(|closed| **closed == *name);
        let idle = state::idle_note(&config, new).map(str::to_owned);
        Ok(Answer::Done { note: was_closed.then(|| still_closed(&name)).or(idle) })
    }

    /// The peer goes before the file is written: a full disk must not keep a stolen key alive.
    fn remove(&self, name: &str) -> Result<Answer, Answer> {
        let _one_at_a_time = self.peers.one_at_a_time();
        let known = self.peers.list().into_iter().find(|listed| *listed.peer.name == *name);
        if known.is_some() {
            self.peers.remove(name).map_err(failed)?;
            tracing::info!(peer = name, "a peer was removed through the control socket");
        }
        let config = self.peers.config();
        let as_guest = (config.access.mode == AccessMode::Open).then_some(AS_GUEST.to_owned());
        match known.as_ref().map(|known| known.origin) {
            Some(PeerOrigin::Config) => {
                return Ok(Answer::Done { note: joined([Some(still_configured(name)), as_guest]) });
            }
            Some(PeerOrigin::Open) => return Ok(Answer::Done { note: as_guest }),
            Some(PeerOrigin::State) | None => {}
        }
        let named = config.forwards_to(name);
        let kept = self.edit().and_then(|mut edit| {
            let found = edit.remove(name, named)?;
            if found { state_file::commit(edit).map(|()| true) } else { Ok(false) }
        });
        match (known, kept) {
            (None, Ok(false)) => {
                Err(wrong(format!("no peer is named {name:?} (remedy: see culvert peer list)")))
            }
            (_, Ok(_)) => Ok(Answer::Done { note: joined([named.then(|| still_named(name)), as_guest]) }),
            (None, Err(error)) => Err(failed(error)),
            (Some(known), Err(error)) => {
                self.peers.keep_out(&known.peer);
                tracing::warn!(peer = name, %error, "the peer that was removed is still in the state file (remedy: mend that and remove it again)");
                Err(failed(format!(
                    "the peer is shut out, but still in the state file: a restart lets it in again: {error}"
                )))
            }
        }
    }

    fn reload(&self, dry_run: bool) -> Result<Answer, Answer> {
        let Reloaded { changes, notes } = self.peers.reload(dry_run).map_err(|error| {
            let bad_input = error.downcast_ref::<ReloadError>().is_some_and(ReloadError::is_bad_input);
            Answer::Refused { bad_input, error: error.to_string() }
        })?;
        Ok(Answer::Reloaded { changes: changes.iter().map(ShownChange::from).collect(), notes })
    }

    fn end_forward(&self, id: &str) -> Result<Answer, Answer> {
        let parsed: ForwardId = id.parse().map_err(|error| wrong(format!("{id:?} is {error}")))?;
        if self.peers.end_forward(parsed).map_err(failed)? {
            return Ok(Answer::Done { note: None });
        }
        Err(wrong(format!(
            "no TCP forward has the ID {id}: it has ended, or the daemon was restarted since (remedy: culvert status PEER lists those \
             of a peer)"
        )))
    }

    fn edit(&self) -> Result<Edit, state::StateError> {
        Edit::begin(&self.peers.config().state_dir.join(state::FILE_NAME))
    }
}

/// What an operator should know who removed a peer in open mode.
pub const AS_GUEST: &str =
    "in open mode whoever knows our public key may connect: this peer may come again, as a guest";

/// Joins the notes that there are with semicolons; `None` if there are none.
#[must_use]
pub fn joined<const COUNT: usize>(notes: [Option<String>; COUNT]) -> Option<String> {
    let notes: Vec<String> = notes.into_iter().flatten().collect();
    (!notes.is_empty()).then(|| notes.join("; "))
}

/// Why a peer of the configuration that was shut out is not added.
fn returns_by_itself(name: &str) -> String {
    format!(
        "{name:?} is a peer of the configuration that was removed (remedy: restart the daemon, which lets it in again; or take \
         its [[peer]] out of the configuration, reload with culvert reload, and then add it)"
    )
}

/// What an operator should know who added a peer whose ports were closed when the configuration was read.
fn still_closed(name: &str) -> String {
    format!("the ports of the [[udp]] and [[tcp]] that name {name:?} open with culvert reload")
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
        "a [[udp]] or [[tcp]] of the configuration still names {name:?}: what comes to its port is dropped, and a reload or a \
         restart closes the port"
    )
}

fn no_capture(refusal: crate::qlog::Refusal) -> Answer {
    Answer::Refused { bad_input: refusal.is_bad_input(), error: refusal.to_string() }
}

/// What was asked for is wrong.
fn wrong(error: impl ToString) -> Answer {
    Answer::Refused { bad_input: true, error: error.to_string() }
}

/// The daemon's surroundings do not let it do what was asked for.
fn failed(error: impl ToString) -> Answer {
    Answer::Refused { bad_input: false, error: error.to_string() }
}
