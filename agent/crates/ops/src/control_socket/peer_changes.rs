//! Changes of peers that run, and peers as a file has them.

use std::path::Path;

use config::{
    self, Config,
    export::peer_toml,
    reload::Change,
    state::{self, Edit, NewPeer, PeerChange, StateError},
};
use engine::{origin::PeerOrigin, registry::Listed};

use super::{RequestHandler, failed, protocol::Answer, wrong};
use crate::{control_socket::protocol::ShownChange, state_file};

/// Why a peer of a file is not changed here.
#[must_use]
pub fn stands_in(name: &str, file: &Path) -> String {
    format!(
        "{name:?} stands in {}, which only its author changes (remedy: change it there, then culvert reload)",
        file.display()
    )
}

/// The same for a peer that is not in the configuration `config`; `None` if `name` is no peer of it.
#[must_use]
pub fn of_a_file(config: &Config, name: &str) -> Option<String> {
    config.file_of(name).map(|file| stands_in(name, file))
}

/// What a change of `old` to `new` does to the session and to what it carries.
#[must_use]
pub fn consequences(old: &config::Peer, new: &config::Peer) -> Vec<String> {
    let mut notes = Vec::new();
    let key_gone = old.public_keys.iter().any(|key| !new.public_keys.contains(key));
    if key_gone {
        notes.push("a session under the old key has ended: only the new key is admitted".to_owned());
    }
    if old.preshared_keys != new.preshared_keys {
        notes.push("without a preshared key in common with the peer the session ends".to_owned());
    }
    if old.services.iter().any(|service| !new.services.contains(service)) {
        notes.push("what it had open to services that it may no longer use has ended".to_owned());
    }
    if !key_gone && old != new {
        notes.push("the session goes on".to_owned());
    }
    notes
}

impl RequestHandler {
    /// The state file is written before the change is in effect, and only if it can be.
    pub(super) fn set(&self, change: &PeerChange) -> Result<Answer, Answer> {
        let _one_at_a_time = self.peers.one_at_a_time();
        let old = self.of_state_file(&change.name)?;
        let mut edit = self.edit().map_err(failed)?;
        edit.set(change).map_err(refused)?;
        self.put_in_place(edit, &old)
    }

    /// Of a peer of whichever file: what it has carried stands in neither.
    pub(super) fn set_quota_used(&self, name: &str, used: u64) -> Result<Answer, Answer> {
        let listed = self.peers.list().into_iter().find(|listed| *listed.peer.name == *name);
        let listed = listed
            .ok_or_else(|| wrong(format!("no peer is named {name:?} (remedy: see culvert peer list)")))?;
        let quota = listed.peer.quota.ok_or_else(|| {
            wrong(format!(
                "{name:?} has no quota (remedy: peer.quota in its file, as in {{ bytes = \"500GB\" }})"
            ))
        })?;
        self.peers.set_quota_used(&listed.peer.name, &quota, used).map_err(failed)?;
        Ok(Answer::Done { note: None })
    }

    /// Like [`RequestHandler::set`], or like an addition if there is no such peer.
    pub(super) fn replace(&self, new: &NewPeer) -> Result<Answer, Answer> {
        let held = self.peers.one_at_a_time();
        let is_there = |listed: &Listed| *listed.peer.name == *new.name;
        if !self.peers.list().iter().any(is_there) && of_a_file(&self.peers.config(), &new.name).is_none() {
            drop(held);
            return self.add(new);
        }
        let old = self.of_state_file(&new.name)?;
        let mut edit = self.edit().map_err(failed)?;
        edit.replace(new).map_err(refused)?;
        self.put_in_place(edit, &old)
    }

    /// The peer of the state file that runs under this name.
    fn of_state_file(&self, name: &str) -> Result<Listed, Answer> {
        let config = self.peers.config();
        let listed = self.peers.list().into_iter().find(|listed| *listed.peer.name == *name);
        match listed {
            Some(listed) if listed.origin == PeerOrigin::State => Ok(listed),
            Some(listed) if listed.origin == PeerOrigin::Open => Err(wrong(format!(
                "{name:?} is a guest of open mode, with the services of access.services (remedy: culvert peer add NAME KEY)"
            ))),
            Some(_) | None => Err(wrong(of_a_file(&config, name).unwrap_or_else(|| {
                format!("no peer is named {name:?} (remedy: see culvert peer list; culvert reload if peers.toml was edited)")
            }))),
        }
    }

    /// Checks what `edit` says of the peer `old`, writes it, and puts it into effect.
    fn put_in_place(&self, edit: Edit, old: &Listed) -> Result<Answer, Answer> {
        let config = self.peers.config();
        let name = &*old.peer.name;
        let others = self
            .peers
            .list()
            .into_iter()
            .filter(|listed| listed.origin != PeerOrigin::Open && listed.peer.name != old.peer.name);
        let others: Vec<_> = others.map(|listed| config::Peer::clone(&listed.peer)).collect();
        let table = edit.table(name).unwrap_or_default();
        let new = state::check_table(&config, &[self.own_key], &others, table).map_err(wrong)?;
        self.peers.change(new.clone(), true).map_err(failed)?;
        state_file::commit(edit).map_err(failed)?;
        let changes: Vec<Change> = self.peers.change(new.clone(), false).map_err(|error| {
            failed(format!("the change is in the state file, and not in effect before a reload: {error}"))
        })?;
        for change in &changes {
            tracing::info!(
                peer = name,
                effect = change.effect.label(),
                "{} changed through the control socket",
                change.what
            );
        }
        let notes = consequences(&old.peer, &new);
        Ok(Answer::Reloaded { changes: changes.iter().map(ShownChange::from).collect(), notes })
    }

    pub(super) fn export(&self, name: Option<&str>) -> Result<Answer, Answer> {
        let config = self.peers.config();
        let listed = self.peers.list();
        let wanted = |listed: &&Listed| match name {
            Some(name) => *listed.peer.name == *name,
            None => listed.origin != PeerOrigin::Open,
        };
        let peers: Vec<&config::Peer> = listed.iter().filter(wanted).map(|listed| &*listed.peer).collect();
        exported(&config, name, &peers).map(|text| Answer::Exported { text }).map_err(wrong)
    }
}

/// The text of these peers, which were chosen by `name`.
///
/// # Errors
/// There is no peer of that name.
pub fn exported(config: &Config, name: Option<&str>, peers: &[&config::Peer]) -> Result<String, String> {
    match name {
        Some(name) if peers.is_empty() => {
            Err(format!("no peer is named {name:?} (remedy: see culvert peer list)"))
        }
        Some(_) | None => {
            let texts = peers.iter().map(|peer| peer_toml(peer, &config.services));
            Ok(texts.collect::<Vec<_>>().join("\n"))
        }
    }
}

/// What was asked for is wrong, or the file cannot be changed.
fn refused(error: StateError) -> Answer {
    match error {
        StateError::NoPeer { .. } | StateError::NotThere { .. } | StateError::Exists { .. } => wrong(error),
        StateError::NoUser { .. }
        | StateError::UserExists { .. }
        | StateError::Nowhere
        | StateError::Unusable { .. }
        | StateError::Busy { .. }
        | StateError::Broken { .. } => failed(error),
    }
}
