//! The state file `<state_dir>/peers.toml`: the peers that `culvert peer` has added, and the users that `culvert user` has.
//!
//! It is read with the configuration ([`Config::load`]) and changed by an [`Edit`]: one at a time, whole or not at all.

use std::{
    fmt::Write as _,
    fs::{File, TryLockError},
    io::{self, Write as _},
    path::{Path, PathBuf},
    sync::Arc,
    thread,
    time::Duration,
};

use base::files::{self, Replacement};
use gate::identity::PublicKey;
use net::folder;
use serde::{Deserialize, Serialize};
use toml::{Table, Value};

use crate::{
    Config, ConfigProblems, Peer, User,
    checks::Checks,
    kinds,
    peers::Around,
    prefix::allowed_prefix,
    problem::{At, PeerOrigin},
    section,
    spelled::spelled,
};

pub use self::of_users::users;
pub use crate::change::{KeyValue, PeerChange};

/// The file beside it that is locked while it is changed.
const LOCK_NAME: &str = "peers.lock";

/// The name of the state file in `identity.state_dir`.
pub const FILE_NAME: &str = "peers.toml";

/// How long another editor may hold the lock: it writes a small file, and the daemon's stop waits for whoever waits here.
const PATIENCE: Duration = Duration::from_secs(2);

const HEADER: &str = "# Written by culvert peer and culvert user; comments are not kept. docs/configuration.md says what each key does.\n";

/// A peer as an operator describes it, not checked yet. On the control socket it is the JSON of `peer_add`.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct NewPeer {
    pub name: String,
    /// Its key, as `culvert pubkey` prints it.
    pub public_key: String,
    /// Where to dial it, as "host:port"; none: it dials us.
    #[serde(default)]
    pub endpoints: Vec<String>,
    /// How many lanes to open; `None`: the default.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub lanes: Option<u8>,
    /// The names of our services that it may use.
    #[serde(default)]
    pub services: Vec<String>,
    /// Its inner addresses, as prefixes. Left out of the JSON if there are none: an older daemon refuses the member.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub allowed_ips: Vec<String>,
    /// `peer.map`, left out of the JSON as `allowed_ips` is.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub map: Vec<String>,
    /// `peer.address`, left out of the JSON as `allowed_ips` is.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub address: Vec<String>,
    /// `peer.priority`, left out of the JSON as `allowed_ips` is.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub priority: Option<u16>,
    /// `peer.weight`, left out of the JSON as `allowed_ips` is.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub weight: Option<u16>,
    /// `peer.preshared_key_file`, left out of the JSON as `allowed_ips` is.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub preshared_key_file: Vec<String>,
    /// `peer.rate`, left out of the JSON as `allowed_ips` is.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub rate: Option<String>,
}

/// Why the state file could not be changed.
#[derive(Debug, thiserror::Error)]
pub enum StateError {
    /// `identity.state_dir` is empty, so that no peer can be kept.
    #[error("there is no state folder: identity.state_dir is empty (remedy: set it)")]
    Nowhere,
    /// The folder or the file cannot be used.
    #[error("{}: {cause} (remedy: {})", path.display(), remedy(.cause))]
    Unusable {
        /// The folder or the file that cannot be used.
        path: PathBuf,
        cause: io::Error,
    },
    /// Another process changes it, or was stopped while doing so.
    #[error("{}: another process changes the peers (remedy: try again; `fuser -v {}` names one that hangs)", path.display(), path.display())]
    Busy {
        /// The lock file that another process holds locked.
        path: PathBuf,
    },
    /// It was changed while the daemon ran.
    #[error("{}: has a peer of that {}, which the daemon does not know (remedy: culvert reload, or remove the peer first)", path.display(), what.label())]
    Exists {
        /// The state file that already has such a peer.
        path: PathBuf,
        /// What a peer in the file and the new one have in common.
        what: Taken,
    },
    /// The file has no peer of this name, so that nothing of it can be changed.
    #[error("{}: has no peer {name:?} (remedy: see culvert peer list)", path.display())]
    NoPeer { path: PathBuf, name: String },
    /// The file has no user of this name, so that nothing of it can be changed.
    #[error("{}: has no user {name:?} (remedy: see culvert user list)", path.display())]
    NoUser { path: PathBuf, name: String },
    /// The file has a user of this name already.
    #[error("{}: has a user {name:?} already (remedy: culvert user set, or remove the user first)", path.display())]
    UserExists { path: PathBuf, name: String },
    /// What is to be taken out of a list is not in it.
    #[error("{key} of {name:?} has no {value:?} (remedy: it has {has:?})")]
    NotThere {
        /// The peer.
        name: String,
        /// The key whose value is the list.
        key: String,
        value: String,
        has: Vec<String>,
    },
    /// It is no TOML, so that nothing can be added to it.
    #[error("{}: is not TOML: {cause} (remedy: repair it, or move it away)", path.display())]
    Broken {
        /// The state file that is not TOML.
        path: PathBuf,
        /// Where, and what was expected there.
        cause: Box<toml::de::Error>,
    },
}

/// The file is written, and the kernel does not say that its folder is.
#[derive(Debug, thiserror::Error)]
#[error(
    "{}: the change is written and counts, but a crash of the host may undo it: its folder is not synced: {cause} (remedy: sync, and \
     look for errors of the disk in dmesg)", path.display()
)]
pub struct NotSynced {
    /// The state file.
    path: PathBuf,
    cause: io::Error,
}

fn remedy(cause: &io::Error) -> &'static str {
    let is = |kinds: &[io::ErrorKind]| kinds.contains(&cause.kind());
    if is(&[io::ErrorKind::StorageFull, io::ErrorKind::QuotaExceeded]) {
        "make room on the file system that it is on, and do it again; or set identity.state_dir"
    } else if is(&[io::ErrorKind::ReadOnlyFilesystem]) {
        "have its file system writable for the daemon (mount, ReadWritePaths=), or set identity.state_dir"
    } else {
        "let the user that runs culvert write there, or set identity.state_dir"
    }
}

/// What makes an error of the kernel's refusal.
fn unusable(path: &Path) -> impl FnOnce(io::Error) -> StateError {
    let path = path.to_owned();
    |cause| StateError::Unusable { path, cause }
}

spelled! {
    /// What no two peers may have in common.
    pub enum Taken {
        Name => "name",
        /// The value is a public key of a peer.
        Key => "key",
        /// The value is a prefix of a peer's `allowed_ips`.
        Prefix => "prefix",
    }
}

/// The text of the state file at `path`; `None` if there is none.
///
/// # Errors
/// It exists and cannot be read.
pub fn read(path: &Path) -> io::Result<Option<String>> {
    match files::read_text(path, files::MOST_TEXT) {
        Ok(text) => Ok(Some(text)),
        Err(error) if matches!(error.kind(), io::ErrorKind::NotFound | io::ErrorKind::NotADirectory) => {
            Ok(None)
        }
        Err(error) => Err(error),
    }
}

/// What a peer may be expected to do and does not: nothing leads to it, or it may use nothing.
#[must_use]
pub fn idle_note(config: &Config, new: &NewPeer) -> Option<&'static str> {
    let leads_to = !new.allowed_ips.is_empty() || !new.address.is_empty();
    let is_used = !new.services.is_empty() || !new.endpoints.is_empty();
    match &config.tun {
        Some(_) if !leads_to => Some(
            "no IP packet passes to it or from it: it has no inner address (remedy: culvert peer set NAME --allowed-ip PREFIX)",
        ),
        None if !is_used && !config.services.is_empty() => {
            Some("it may use no service (remedy: culvert peer set NAME --service SERVICE)")
        }
        Some(_) | None => None,
    }
}

/// Checks `new` as if it stood in the state file, beside the peers of `known`; `own_keys` are ours.
///
/// # Errors
/// Everything that is wrong with it.
pub fn check(
    config: &Config,
    own_keys: &[PublicKey],
    known: &[Peer],
    new: &NewPeer,
) -> Result<Peer, ConfigProblems> {
    check_table(config, own_keys, known, new.to_table())
}

/// The same for a peer as the state file has it.
///
/// # Errors
/// Everything that is wrong with it.
pub fn check_table(
    config: &Config,
    own_keys: &[PublicKey],
    known: &[Peer],
    table: Table,
) -> Result<Peer, ConfigProblems> {
    let text = render(&Table::from_iter([("peer".to_owned(), Value::Array(vec![table.into()]))]));
    let mut checks = Checks::default();
    for peer in known {
        checks.pinned_by(peer);
    }
    checks.services = config.services.iter().map(|service| Arc::clone(&service.name)).collect();
    checks.claimed(config, known);
    let around = Around::new(!config.transport.listen.is_empty(), config.tun.as_ref());
    let mut peers = known.to_vec();
    let entries = section::parse(&text, &At::file(PeerOrigin::State), &mut checks.report);
    let mut root = section::Table::new(At::file(PeerOrigin::State), entries.as_ref());
    let tables = root.tables("peer", &mut checks.report);
    checks.read_peers(tables, around, &mut peers);
    checks.inner_addresses(&[], &config.http, config.tun.as_ref(), &peers[known.len()..], &root.at);
    if let Some(tun) = &config.tun {
        checks.collisions(tun, config.transport.mark);
    }
    if let Some(folder) = config.path.as_deref().and_then(Path::parent) {
        peers[known.len()..].iter_mut().for_each(|peer| peer.resolve_paths(folder));
    }
    checks.load_preshared_keys(&mut peers);
    let peer = peers.pop().filter(|_| peers.len() == known.len());
    own_keys.iter().for_each(|own| checks.own_key(*own));
    if known.len() >= config.limits.peers {
        let at = At { path: "limits.peers".to_owned(), ..At::file(PeerOrigin::State) };
        let problem = format!("there are {} peers already", known.len());
        checks.report.add(&at, problem, "raise it, or remove peers");
    }
    let (mut problems, _) = checks.report.into_parts();
    if let Some(peer) = peer.filter(|_| problems.is_empty()) {
        return Ok(peer);
    }
    for problem in &mut problems {
        // The place in a text that nobody has written says nothing.
        problem.line = None;
        if let Some(key) = problem.key_path.strip_prefix("peer[0].") {
            (problem.key_path, problem.table) = (key.to_owned(), None);
        }
    }
    Err(ConfigProblems { file: None, problems })
}

/// The state file while it is being changed: nobody else changes it until this is dropped.
#[derive(Debug)]
pub struct Edit {
    path: PathBuf,
    pub(super) folder: File,
    /// Locked while this lives. A file of its own: the daemon holds the folder's lock for its journals.
    _lock: File,
    text: String,
}

impl Edit {
    /// Locks the state file at `path`, and makes its folder if there is none.
    ///
    /// # Errors
    /// The folder or the file cannot be used, or another process changes it and does not end in 2 s.
    pub fn begin(path: &Path) -> Result<Self, StateError> {
        Self::begin_within(path, PATIENCE)
    }

    pub(super) fn begin_within(path: &Path, patience: Duration) -> Result<Self, StateError> {
        let of = path.parent().filter(|folder| !folder.as_os_str().is_empty()).ok_or(StateError::Nowhere)?;
        folder::make(of).map_err(unusable(of))?;
        let folder = files::open_folder(of).map_err(unusable(of))?;
        let metadata = folder.metadata().map_err(unusable(of))?;
        let lock_path = of.join(LOCK_NAME);
        let lock = folder::lock_file(&lock_path, &metadata).map_err(unusable(&lock_path))?;
        take(&lock, &lock_path, patience)?;
        let text = read(path).map_err(unusable(path))?;
        Ok(Self { path: path.to_owned(), folder, _lock: lock, text: text.unwrap_or_default() })
    }

    /// The file's text as it will be written.
    #[must_use]
    pub fn text(&self) -> &str {
        &self.text
    }

    /// Appends `new`, which was checked.
    ///
    /// # Errors
    /// The file is no TOML, or has a peer of that name, key or prefix, which another process wrote.
    pub fn add(&mut self, new: &NewPeer) -> Result<(), StateError> {
        let state = self.parse()?;
        self.put(state, new)
    }

    /// Puts `new`, which was checked, in the place of the peer of its name, or adds it if there is none.
    ///
    /// # Errors
    /// As those of [`Edit::add`], but for the name.
    pub fn replace(&mut self, new: &NewPeer) -> Result<(), StateError> {
        let mut state = self.parse()?;
        if let Some(Value::Array(peers)) = state.get_mut("peer") {
            peers.retain(|peer| !is_named(peer, &new.name));
        }
        self.put(state, new)
    }

    fn put(&mut self, mut state: Table, new: &NewPeer) -> Result<(), StateError> {
        for peer in state.get("peer").and_then(Value::as_array).into_iter().flatten() {
            let taken = [
                (Taken::Name, is_named(peer, &new.name)),
                (Taken::Key, has_key(peer, &new.public_key)),
                (
                    Taken::Prefix,
                    has_prefix(peer, &new.allowed_ips) && !(shares(peer) && new.shares_prefixes()),
                ),
            ];
            if let Some((what, _)) = taken.into_iter().find(|(_, taken)| *taken) {
                return Err(StateError::Exists { path: self.path.clone(), what });
            }
        }
        // What is not a list was reported when it was checked.
        if let Value::Array(peers) = state.entry("peer").or_insert_with(|| Value::Array(Vec::new())) {
            peers.push(new.to_table().into());
        }
        self.text = render(&state);
        Ok(())
    }

    /// Changes a peer of the file; the outcome is to be checked.
    ///
    /// # Errors
    /// The file is no TOML, has no such peer, or a list of the peer has not what is to be taken out.
    pub fn set(&mut self, change: &PeerChange) -> Result<(), StateError> {
        let mut state = self.parse()?;
        let peers = state.get_mut("peer").and_then(Value::as_array_mut).into_iter().flatten();
        let peer = peers.filter(|peer| is_named(peer, &change.name)).find_map(Value::as_table_mut);
        let no_peer = || StateError::NoPeer { path: self.path.clone(), name: change.name.clone() };
        change.apply(peer.ok_or_else(no_peer)?)?;
        self.text = render(&state);
        Ok(())
    }

    /// The table of the peer `name`, as it will be written; `None` if there is none.
    #[must_use]
    pub fn table(&self, name: &str) -> Option<Table> {
        let state = self.parse().ok()?;
        let peers = state.get("peer")?.as_array()?;
        peers.iter().find(|peer| is_named(peer, name))?.as_table().cloned()
    }

    /// Takes out the peer `name`, and says whether it was there; with `named`, its name is kept as that of a removed peer.
    ///
    /// # Errors
    /// The file is no TOML.
    pub fn remove(&mut self, name: &str, named: bool) -> Result<bool, StateError> {
        let mut state = self.parse()?;
        let Some(Value::Array(peers)) = state.get_mut("peer") else { return Ok(false) };
        let before = peers.len();
        peers.retain(|peer| !is_named(peer, name));
        if peers.len() == before {
            return Ok(false);
        }
        if named {
            call_removed(&mut state, name);
        }
        self.text = render(&state);
        Ok(true)
    }

    /// The text if it called `name` removed: with it a configuration is checked whose forwards name a peer that is still
    /// to come.
    ///
    /// # Errors
    /// The file is no TOML.
    pub fn text_without(&self, name: &str) -> Result<String, StateError> {
        let mut state = self.parse()?;
        call_removed(&mut state, name);
        Ok(render(&state))
    }

    /// Takes `name` from the names of removed peers.
    ///
    /// # Errors
    /// The file is no TOML.
    pub fn forget(&mut self, name: &str) -> Result<(), StateError> {
        let mut state = self.parse()?;
        if let Some(Value::Array(removed)) = state.get_mut("removed") {
            removed.retain(|removed| removed.as_str() != Some(name));
            if removed.is_empty() {
                state.remove("removed");
            }
        }
        self.text = render(&state);
        Ok(())
    }

    /// Replaces the file, in one step: whoever is killed meanwhile leaves the old one or the new one. Returns why a crash of the host
    /// may undo that, if it may.
    ///
    /// # Errors
    /// The kernel's refusal; the old file is still there.
    #[must_use = "the operator is told what may be undone"]
    pub fn commit(self) -> Result<Option<NotSynced>, StateError> {
        let new_path = self.path.with_extension("toml.new");
        let write = || {
            let replacement = Replacement::beside(&self.path, new_path.clone())?;
            // Root may edit what the daemon, another user, must read.
            let mut file = folder::create_file(replacement.path(), &self.folder.metadata()?)?;
            file.write_all(self.text.as_bytes())?;
            file.sync_all()?;
            Ok(replacement)
        };
        let written = write().map_err(unusable(&new_path))?;
        written.put().map_err(unusable(&self.path))?;
        Ok(self.folder.sync_all().err().map(|cause| NotSynced { path: self.path, cause }))
    }

    fn parse(&self) -> Result<Table, StateError> {
        let broken = |cause| StateError::Broken { path: self.path.clone(), cause: Box::new(cause) };
        self.text.parse().map_err(broken)
    }
}

impl NewPeer {
    /// Whether other peers may have its prefixes.
    fn shares_prefixes(&self) -> bool {
        self.priority.is_some() || self.weight.is_some() || !self.address.is_empty()
    }

    /// Its table in the file, without lists that are empty.
    fn to_table(&self) -> Table {
        let mut table = Table::try_from(self).expect("texts, lists of texts and a small number are TOML");
        table.retain(|_, value| value.as_array().is_none_or(|list| !list.is_empty()));
        table
    }
}

fn call_removed(state: &mut Table, name: &str) {
    let removed = state.entry("removed").or_insert_with(|| Value::Array(Vec::new()));
    if let Value::Array(removed) = removed
        && !removed.iter().any(|removed| removed.as_str() == Some(name))
    {
        removed.push(name.into());
    }
}

fn is_named(peer: &Value, name: &str) -> bool {
    peer.get("name").and_then(Value::as_str) == Some(name)
}

/// Whether `peer` has this key, however its text is written.
fn has_key(peer: &Value, key: &str) -> bool {
    let same = |text: &str| {
        text == key || matches!((text.parse::<PublicKey>(), key.parse()), (Ok(text), Ok(key)) if text == key)
    };
    match peer.get("public_key") {
        Some(Value::Array(keys)) => keys.iter().filter_map(Value::as_str).any(same),
        Some(key) => key.as_str().is_some_and(same),
        None => false,
    }
}

/// Whether other peers may have the prefixes of `peer`.
fn shares(peer: &Value) -> bool {
    ["priority", "weight", "address"].iter().any(|key| peer.get(key).is_some())
}

/// Whether `peer` has one of these prefixes, however they are written.
fn has_prefix(peer: &Value, prefixes: &[String]) -> bool {
    let net = |text: &str| allowed_prefix(text).ok();
    let mut wanted = prefixes.iter().filter_map(|text| net(text));
    let texts = || peer.get("allowed_ips").and_then(Value::as_array).into_iter().flatten();
    wanted.any(|wanted| texts().filter_map(Value::as_str).any(|text| net(text) == Some(wanted)))
}

/// Whether one of `peers` has the name and a key of `table`.
fn is_among(table: &section::Table<'_>, peers: &[Peer]) -> bool {
    let keys: Vec<PublicKey> = table.texts("public_key").filter_map(|text| text.parse().ok()).collect();
    let same = |peer: &&Peer| *peer.name == *table.text("name");
    peers.iter().filter(same).any(|peer| peer.public_keys.iter().any(|own| keys.contains(own)))
}

/// Locks, and waits so long for whoever has locked it before. Not for ever: that may be a process that was stopped.
fn take(lock: &File, path: &Path, patience: Duration) -> Result<(), StateError> {
    /// The time between two attempts to take the lock.
    const PAUSE: Duration = Duration::from_millis(50);
    let mut waited = Duration::ZERO;
    loop {
        match lock.try_lock() {
            Ok(()) => return Ok(()),
            Err(TryLockError::WouldBlock) if waited >= patience => {
                return Err(StateError::Busy { path: path.to_owned() });
            }
            Err(TryLockError::WouldBlock) => thread::sleep(PAUSE),
            Err(TryLockError::Error(cause)) => {
                return Err(StateError::Unusable { path: path.to_owned(), cause });
            }
        }
        waited += PAUSE;
    }
}

/// The text of a state file: a line for each key, a paragraph for each peer and each user.
fn render(state: &Table) -> String {
    let mut text = HEADER.to_owned();
    let line = |text: &mut String, key: &str, value: &Value| {
        let bare = key.bytes().all(|byte| byte.is_ascii_alphanumeric() || b"_-".contains(&byte));
        // What `culvert peer set` was told may be no key at all: as a text it is one that is not known.
        let key = if bare { key.to_owned() } else { Value::from(key).to_string() };
        // Writing to a String cannot fail.
        writeln!(text, "{key} = {value}").ok();
    };
    for (key, value) in state.iter().filter(|(key, _)| !["peer", "user"].contains(&key.as_str())) {
        line(&mut text, key, value);
    }
    for list in ["peer", "user"] {
        for table in state.get(list).and_then(Value::as_array).into_iter().flatten() {
            text += &format!("\n[[{list}]]\n");
            let mut keys: Vec<_> = table.as_table().into_iter().flatten().collect();
            // Who it is comes first.
            keys.sort_by_key(|(key, _)| (*key != "name", *key != "public_key"));
            for (key, value) in keys {
                line(&mut text, key, value);
            }
        }
    }
    text
}

impl Checks {
    /// Checks the state file at `path` and appends its peers.
    pub(super) fn read_state(
        &mut self,
        text: &str,
        path: PathBuf,
        around: Around,
        peers: &mut Vec<Peer>,
        users: &mut Vec<User>,
    ) {
        self.report.read_state(text, path);
        let entries = section::parse(text, &At::file(PeerOrigin::State), &mut self.report);
        let mut root = section::Table::new(At::file(PeerOrigin::State), entries.as_ref());
        // A new peer is called removed while the configuration is checked: its own name is checked later.
        let removed = root.value("removed", &kinds::named().list(), self);
        let tables = root.tables("peer", &mut self.report);
        let of_users = root.tables("user", &mut self.report);
        root.end(&mut self.report);
        self.read_users(of_users, users);
        let (twins, others): (Vec<_>, Vec<_>) = tables.into_iter().partition(|table| is_among(table, peers));
        for table in twins {
            let name = table.text("name");
            let problem = format!("{name:?} is also a [[peer]] of the configuration, and that one counts");
            self.report.note(
                &table.at,
                problem,
                "culvert reload takes it out of this file, and its session goes on",
            );
            self.twins.push(name.into());
        }
        self.read_peers(others, around, peers);
        self.removed = removed.unwrap_or_default();
    }
}

#[path = "state_users.rs"]
mod of_users;
#[cfg(any(test, feature = "fuzzing"))]
#[path = "state_properties.rs"]
pub mod properties;
