//! Peers from a directory (`identity.peers_dir`): a file for each, read beside the configuration.
//!
//! A file that is wrong costs itself only: it is left out, with all of its problems, and everything is read again without it. If
//! its peer runs already, the peer keeps the settings with which it runs. So the rest of the configuration never depends on what
//! others write into the directory.

use std::{
    collections::BTreeSet,
    fs,
    hash::{DefaultHasher, Hash as _, Hasher as _},
    io,
    os::unix::fs::MetadataExt as _,
    path::{Path, PathBuf},
    sync::Arc,
};

use base::files;

use crate::{
    Config, Peer,
    checks::{Checks, PinnedKey},
    peers::Around,
    problem::{At, ConfigProblem, Entry, PeerOrigin},
    section::{self, Table},
};

/// The longest file of a peer, in bytes: a hundred times a usual one.
const MOST_BYTES: usize = 64 << 10;

/// The directory of peers as it was read.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Directory {
    /// The directory; `None`: the configuration names none.
    pub path: Option<PathBuf>,
    /// The files whose peers are in the configuration, also those that kept the settings of an earlier version.
    pub files: Vec<PeerFile>,
    /// What is wrong with files that were left out.
    pub rejected: Vec<ConfigProblem>,
    /// The [`fingerprint`] of the directory just before it was read.
    pub seen: u64,
}

/// A file of the directory and the peer that it is about.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PeerFile {
    pub path: PathBuf,
    pub peer: Arc<str>,
}

impl Directory {
    /// The files that were left out, each once.
    pub fn rejected_files(&self) -> BTreeSet<&Path> {
        self.rejected.iter().filter_map(|problem| problem.file.as_deref()).collect()
    }
}

/// A number that changes when a file of the directory does: made of names, times, sizes and inodes, through symbolic links.
#[must_use]
pub fn fingerprint(directory: &Path) -> u64 {
    let mut hasher = DefaultHasher::new();
    match names(directory) {
        Ok(names) => {
            for path in names {
                path.hash(&mut hasher);
                if let Ok(file) = fs::metadata(&path) {
                    (file.mtime(), file.mtime_nsec(), file.ctime(), file.ctime_nsec()).hash(&mut hasher);
                    (file.len(), file.ino(), file.mode()).hash(&mut hasher);
                }
            }
        }
        Err(error) => error.kind().hash(&mut hasher),
    }
    hasher.finish()
}

/// The files of the directory that are peers', in the order of their names: those that end in `.toml` and are not hidden.
/// Kubernetes keeps its own in hidden ones.
fn names(directory: &Path) -> io::Result<Vec<PathBuf>> {
    let paths = fs::read_dir(directory)?.map(|entry| entry.map(|entry| entry.path()));
    let mut found: Vec<PathBuf> = paths.collect::<Result<_, _>>()?;
    found.retain(|path| {
        let hidden = path.file_name().is_none_or(|name| name.as_encoded_bytes().starts_with(b"."));
        !hidden && path.extension().is_some_and(|extension| extension == "toml")
    });
    found.sort_unstable();
    Ok(found)
}

/// The same, where the file system answers in time.
///
/// # Errors
/// See [`files::in_time`].
pub fn fingerprint_in_time(directory: &Path) -> io::Result<u64> {
    files::in_time(directory, |directory| Ok(fingerprint(directory)))
}

/// What the directory says, as text.
#[derive(Default)]
pub(super) struct Texts {
    path: Option<PathBuf>,
    seen: u64,
    files: Vec<Entry>,
    /// Files that were found wrong, with what is wrong, before they were read as TOML.
    pub(super) rejected: Vec<ConfigProblem>,
    /// The names of peers in those files, as far as they can be read.
    names: Vec<Arc<str>>,
    /// Whether the directory itself could not be read, so that nothing is known of any file.
    unreadable: bool,
}

impl Texts {
    /// Of a directory that is not looked at.
    pub(super) fn unread(path: Option<PathBuf>) -> Self {
        Self { path, ..Self::default() }
    }

    pub(super) fn read(directory: &Path) -> Self {
        let mut texts = Self { path: Some(directory.to_owned()), ..Self::default() };
        let look = |directory: &Path| Ok((fingerprint(directory), names(directory)));
        let names = files::in_time(directory, look).and_then(|(seen, names)| {
            texts.seen = seen;
            names
        });
        match names {
            Ok(names) => {
                let read = files::read_texts(&names, MOST_BYTES);
                for (path, text) in names.into_iter().zip(read) {
                    match text {
                        Ok(text) => texts.files.push(Entry { path, text }),
                        Err(cause) => texts.rejected.push(unreadable(&path, &cause)),
                    }
                }
            }
            Err(cause) => {
                texts.unreadable = true;
                texts.rejected.push(unreadable(directory, &cause));
            }
        }
        texts
    }

    /// Leaves out the files with these problems; false if there is none of them here.
    pub(super) fn reject(&mut self, problems: Vec<ConfigProblem>) -> bool {
        let wrong: BTreeSet<PathBuf> = problems.iter().filter_map(|problem| problem.file.clone()).collect();
        let before = self.files.len();
        for Entry { text, .. } in self.files.iter().filter(|file| wrong.contains(&file.path)) {
            let table = text.parse::<toml::Table>().ok();
            self.names.extend(table.and_then(|table| table.get("name")?.as_str().map(Arc::from)));
        }
        self.files.retain(|file| !wrong.contains(&file.path));
        self.rejected.extend(problems);
        self.files.len() < before
    }

    /// Whether `problem` is one of a file that is here.
    pub(super) fn is_about(&self, problem: &ConfigProblem) -> bool {
        problem.file.as_ref().is_some_and(|path| self.files.iter().any(|file| file.path == *path))
    }

    fn is_rejected(&self, path: &Path) -> bool {
        self.unreadable || self.rejected.iter().any(|problem| problem.file.as_deref() == Some(path))
    }
}

fn unreadable(path: &Path, cause: &io::Error) -> ConfigProblem {
    ConfigProblem {
        file: Some(path.to_owned()),
        key_path: String::new(),
        table: None,
        line: None,
        problem: format!("cannot be read: {cause}"),
        remedy: files::remedy(cause)
            .unwrap_or("let the user that runs culvert read it, or change identity.peers_dir")
            .to_owned(),
    }
}

impl Checks {
    /// Checks the files of the directory and appends their peers; those that were left out keep the settings that they have in
    /// `last`.
    pub(super) fn read_directory(
        &mut self,
        texts: &Texts,
        last: Option<&Config>,
        around: Around,
        peers: &mut Vec<Peer>,
    ) -> Directory {
        let mut files = Vec::with_capacity(texts.files.len());
        for entry in &texts.files {
            let Entry { path, text } = entry;
            let name = path.file_name().unwrap_or_default().to_string_lossy().into_owned();
            let at = At { path: name, ..self.report.read_entry(entry.clone()) };
            let entries = section::parse(text, &at, &mut self.report);
            let Some(entries) = entries else { continue };
            let table = Table::new(at, Some(&entries));
            self.read_peers(vec![table], around, peers);
            let peer = peers.last().map(|peer| Arc::clone(&peer.name)).unwrap_or_default();
            files.push(PeerFile { path: path.clone(), peer });
        }
        self.rejected.clone_from(&texts.names);
        let old = last.into_iter().flat_map(|last| last.directory.files.iter().map(move |file| (last, file)));
        for (last, file) in old.filter(|(_, file)| texts.is_rejected(&file.path)) {
            let known = last.peers.iter().find(|peer| peer.name == file.peer);
            if let Some(peer) = known.and_then(|peer| self.keep(peer, last, around, peers)) {
                peers.push(peer);
                files.push(file.clone());
            }
        }
        Directory { path: texts.path.clone(), files, rejected: texts.rejected.clone(), seen: texts.seen }
    }

    /// A peer whose file is wrong, as it runs, unless another peer has its name or a key of it by now.
    fn keep(&mut self, peer: &Peer, last: &Config, around: Around, peers: &[Peer]) -> Option<Peer> {
        let taken = |other: &Peer| {
            other.name == peer.name || other.public_keys.iter().any(|key| peer.public_keys.contains(key))
        };
        if peer.origin != PeerOrigin::Config || peers.iter().any(taken) {
            return None;
        }
        self.pinned_by(peer);
        self.claimed_by(peer, around.follows_routes);
        self.peers.push(Arc::clone(&peer.name));
        let name = |place: &usize| last.services.get(*place).map(|service| Arc::clone(&service.name));
        let here = |name: Arc<str>| self.services.iter().position(|service| *service == name);
        let services = peer.services.iter().filter_map(|place| here(name(place)?)).collect();
        Some(Peer { services, ..peer.clone() })
    }

    /// Takes the keys of a peer that was checked before.
    pub(super) fn pinned_by(&mut self, peer: &Peer) {
        let at = At { path: format!("the key of {:?}", peer.name), ..At::file(peer.origin) };
        self.keys.extend(peer.public_keys.iter().map(|key| PinnedKey { key: *key, at: at.clone() }));
    }

    /// Claims what a peer has that was checked before.
    pub(super) fn claimed_by(&mut self, peer: &Peer, follows_routes: bool) {
        use crate::checks::{Claim, Holder};
        self.next_hops.extend(peer.addresses.iter().map(|address| (*address, Arc::clone(&peer.name))));
        let (holder, at) = (|| Holder::Peer(Arc::clone(&peer.name)), || At::file(peer.origin));
        let shared = peer.shares_prefixes() || follows_routes;
        let claim = |net: &ipnet::IpNet| Claim { net: *net, holder: holder(), shared, at: at() };
        self.overlay.extend(peer.allowed_ips.iter().map(claim));
        let carried = peer.endpoints.iter().chain(peer.proxy.iter().map(|proxy| &proxy.at));
        for address in carried.filter_map(|endpoint| endpoint.name().parse().ok()) {
            self.carried_by(address, holder(), at());
        }
    }
}

#[cfg(test)]
#[path = "directory_tests.rs"]
mod tests;
