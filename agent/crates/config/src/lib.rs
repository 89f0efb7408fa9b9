//! The configuration: a TOML file, read once, becomes the immutable [`Config`] that everything else takes.
//!
//! | question | file |
//! |---|---|
//! | what the daemon reads | this one: [`Config`] and its parts |
//! | which keys there are: name, type, default, check, effect of a reload and consequence of each, in one place | `sections.rs`, `peers.rs`, `tun.rs`, `users.rs`, `records.rs`, `uplink.rs`; services without an address: `any.rs` |
//! | what follows from such a declaration, and how a file is walked | `section.rs` |
//! | what a value may be | `kinds.rs`; what it may be beside others: `checks.rs`, `resolve.rs` |
//! | where the key is when systemd hands it over | `credential.rs` |
//! | the secret of the admin server | `token.rs` |
//! | what `culvert peer` keeps beside it, and how | `state.rs` |
//! | what `culvert peer set` changes there | `change.rs` |
//! | a peer as a file has it | `export.rs` |
//! | what is said of a file that is not TOML | `syntax.rs` |
//! | how repair is written; what travels on two lines | `repair.rs`, `redundant.rs` |
//! | where a service may be | `upstream.rs` |
//! | how "30s", "4MiB" and "host:port" are read | `value.rs`; prefixes: `prefix.rs`; words of enums: `spelled.rs` |
//! | what a reload changes | `reload.rs` |
//! | how many files it may keep open | `descriptors.rs` |
//! | where the name of a service must not lead | `leads_back.rs` |
//! | whether the files of the web server's certificate have changed | `http.rs` |
//! | what an operator sees when something is wrong, and where that is | `problem.rs` |
//!
//! Each file uses those below it only:
//!
//! ```text
//!   reload
//!   resolve
//!   state
//!   tun
//!   peers   users
//!   sections
//!   redundant   repair   upstream   uplink
//!   section                   how sections declare their keys, and how they are read
//!   kinds
//!   checks
//!   problem   prefix
//!   spelled   value   syntax
//! ```

use std::{
    io,
    path::{Path, PathBuf},
    sync::Arc,
};

use base::files;
use gate::{identity::Identity, web::WebCertificate};
use net::process;

#[cfg(test)]
mod access_tests;
mod any;
mod carrier;
mod change;
mod checks;
mod credential;
pub mod defaults;
mod descriptors;
pub mod directory;
pub mod export;
#[cfg(test)]
mod hop_tests;
mod http;
#[cfg(test)]
mod http_tests;
mod kinds;
pub mod leads_back;
mod map;
mod peers;
mod prefix;
#[cfg(test)]
mod preshared_tests;
mod problem;
#[cfg(any(test, feature = "fuzzing"))]
#[doc(hidden)]
pub mod properties;
pub mod quota;
mod ranges;
mod records;
mod redundant;
#[cfg(test)]
mod reference_tests;
pub mod reload;
#[cfg(test)]
mod reload_properties;
#[cfg(any(test, feature = "fuzzing"))]
#[doc(hidden)]
pub mod reload_rules;
#[cfg(test)]
mod reload_tests;
mod repair;
mod resolve;
mod section;
mod sections;
mod spelled;
pub mod state;
#[cfg(test)]
mod state_tests;
mod syntax;
#[cfg(test)]
mod tests;
mod token;
mod tun;
#[cfg(test)]
mod tun_tests;
mod uplink;
#[cfg(test)]
mod uplink_tests;
mod upstream;
mod users;
#[cfg(test)]
mod users_tests;
mod value;

pub use carrier::{Carrier, MOST_CA_BYTES, Proxy};
pub use checks::MOST_HOLDERS;
pub use descriptors::{
    MOST_SITE_LOOKUPS, MOST_USER_CONNECTIONS, MOST_USER_LOOKUPS, MOST_USER_SESSIONS, MOST_WEB_CONNECTIONS,
};
pub use directory::Directory;
pub use peers::{Aqm, CongestionControl, DropPolicy, Dscp, Peer, Profile, Queue, Rate, ThinStreams};
pub use problem::{ConfigProblem, ConfigProblems, LoadError, PeerOrigin};
pub use records::Records;
pub use redundant::Redundant;
pub use repair::{DscpSet, PacketRepair};
use resolve::{Draft, Sources};
pub use section::nearest;
pub use sections::{
    Access, AccessMode, Admin, Forward, Http, Knock, Limits, Log, LogFormat, LogLevel, Oversize, Protocol,
    ProxyProtocol, Service, TcpKeys, Transport, UdpKeys,
};
pub use token::{Token, TokenError};
pub use tun::{
    INNER_REMEDY, LOOKUP_REMEDY, OwnRoutes, ROUTES_REMEDY, Routing, SourceCheck, Spread, Tun, takes_lookups,
};
pub use uplink::{Cost, Uplink};
pub use upstream::{Target, Upstream};
pub use users::{MAX_USERS, Network, NewUser, User};
pub use value::size_text;

/// The most workers that an agent may have: few enough that the first byte of a connection ID keeps two random bits.
pub const MAX_WORKERS: u8 = 64;

/// Limit on the connections whose PROXY header is awaited, at each worker.
pub const MOST_HEADERS: usize = 1_024;

/// How the names of peers of open mode begin; the rest is the beginning of the key.
pub const OPEN_PREFIX: &str = "open-";

/// The value of the metric label `peer` of all peers of open mode.
pub const OPEN_LABEL: &str = "open";

/// Everything that an operator decided, checked and with defaults filled in.
#[derive(Clone, Debug, PartialEq)]
pub struct Config {
    /// The file that it was read from, as an absolute path; `None`: it was given as text.
    pub path: Option<PathBuf>,
    /// The file of our private key; relative paths were resolved against the folder of the configuration file.
    pub identity_key_file: PathBuf,
    /// The file of the private key before that one, by which some peers still know us. Empty: there is none.
    pub identity_previous_key_file: PathBuf,
    /// The folder of what must survive a restart: [`state`] and the knocks that were used.
    /// Empty: nothing survives.
    pub state_dir: PathBuf,
    /// The underlay: where we listen, and how packets leave.
    pub transport: Transport,
    /// Who may connect, and what everybody else meets.
    pub access: Access,
    /// The other agents that we know: those of the configuration, then those of the state file, in the order of the files.
    pub peers: Vec<Peer>,
    /// Local UDP ports whose datagrams go to a peer's service.
    pub udp: Vec<Forward>,
    /// Local TCP ports whose connections go to a peer's service.
    pub tcp: Vec<Forward>,
    /// What our peers may reach through us.
    pub services: Vec<Service>,
    /// Who may go through the web server: those of the configuration, then those of the state file.
    pub users: Vec<User>,
    /// The TUN device; `None`: no IP packets are carried.
    pub tun: Option<Tun>,
    /// Where `/metrics`, health and the status page are served, and to whom.
    pub admin: Admin,
    /// The web server that whoever names us meets.
    pub http: Http,
    /// Its certificate, once it was read; without one nobody meets it.
    pub certificate: Option<WebCertificate>,
    /// Where it is written what has ended.
    pub records: Records,
    /// The socket at which commands are taken; `None`: nowhere.
    pub control: Option<PathBuf>,
    /// What the daemon logs, and how it writes that.
    pub log: Log,
    /// The hard ceilings of the agent.
    pub limits: Limits,
    /// The directory of peers, whose peers are among the others.
    pub directory: Directory,
    /// Names of removed peers that a `[[udp]]` or `[[tcp]]` still names; its port is not opened.
    pub closed: Vec<String>,
    /// Names of peers of the configuration that stand in the state file, too, where they do not count.
    pub twins: Vec<Arc<str>>,
    /// What an operator should know, although the agent starts.
    pub notes: Vec<ConfigProblem>,
}

impl Config {
    /// The buffer that every UDP socket asks the kernel for, in bytes: a queue like the relay's, so it is as long as the longest
    /// `peer.queue.time` at `limits.receive_rate`. What waited there too long for its own peer is dropped when it is read.
    ///
    /// The kernel doubles it, and charges twice what a datagram of 1150 bytes holds: these cancel out.
    #[must_use]
    pub fn socket_buffer_bytes(&self) -> usize {
        let times = self.peers.iter().map(|peer| peer.queue.time);
        let time = times.max().unwrap_or(Queue::DEFAULT.time);
        self.limits
            .receive_buffer
            .unwrap_or_else(|| sections::socket_buffer_bytes(self.limits.receive_rate, time))
    }

    /// Reads and checks the file at `path`, the state file and the identity that it names; no peer may have our own key.
    ///
    /// # Errors
    /// The file cannot be read, or every problem that it has.
    pub fn load(path: &Path) -> Result<(Self, Identity), LoadError> {
        Self::load_beside(path, None)
    }

    /// The same beside the configuration that runs: a peer whose file in the directory of peers is wrong keeps the settings that it
    /// has there.
    ///
    /// # Errors
    /// As those of [`Config::load`].
    pub fn load_beside(path: &Path, running: Option<&Self>) -> Result<(Self, Identity), LoadError> {
        let (text, absolute) = read_with_path(path)?;
        let mut rejected = Vec::new();
        loop {
            let sources = Sources { host: true, running, rejected: rejected.clone() };
            let draft = Draft::read_all(&text, folder_of(&absolute), state::read, sources);
            let files = draft.peer_files();
            match draft.finish_with_identity(path) {
                Ok((config, identity)) => return Ok((Self { path: Some(absolute), ..config }, identity)),
                // What is known only now, in the file of a peer: our own key, or a preshared key that cannot be read.
                Err(problems) if problems.problems.iter().any(|problem| files.contains(&problem.file)) => {
                    let theirs = problems.problems.into_iter();
                    rejected.extend(theirs.filter(|problem| files.contains(&problem.file)));
                }
                Err(problems) => return Err(problems.into()),
            }
        }
    }

    /// The same, with the text of the state file from `read_state`, which gets its path.
    ///
    /// # Errors
    /// As those of [`Config::load`].
    pub fn load_with(
        path: &Path,
        read_state: impl FnOnce(&Path) -> io::Result<Option<String>>,
    ) -> Result<(Self, Identity), LoadError> {
        let (text, absolute) = read_with_path(path)?;
        let sources = Sources { host: true, ..Sources::default() };
        let draft = Draft::read_all(&text, folder_of(&absolute), read_state, sources);
        let (config, identity) = draft.finish_with_identity(path)?;
        Ok((Self { path: Some(absolute), ..config }, identity))
    }

    /// Checks the file at `path` and the state file, and not the identity that it names, which only another user may be able to read.
    ///
    /// # Errors
    /// The file cannot be read, or every problem that it has but for its key.
    pub fn check_without_key(path: &Path) -> Result<(), LoadError> {
        let sources = Sources { host: true, ..Sources::default() };
        let draft = Draft::read_all(&read(path)?, folder_of(path), state::read, sources);
        Ok(draft.finish(Some(path)).map(drop)?)
    }

    /// The control socket that the file at `path` names, whatever else is wrong with the file: a daemon that runs with an
    /// older version of it can still be reached.
    ///
    /// # Errors
    /// The file cannot be read.
    pub fn control_socket(path: &Path) -> Result<Option<PathBuf>, LoadError> {
        let text = read(path)?;
        Ok(Draft::read(&text, folder_of(path), |_| Ok(None)).config.control)
    }

    /// Checks `text`, without a state file; relative paths in it are taken from `base`.
    ///
    /// # Errors
    /// Every problem of the text, in the order of its lines.
    pub fn parse(text: &str, base: &Path) -> Result<Self, ConfigProblems> {
        Draft::read(text, base, |_| Ok(None)).finish(None)
    }

    /// Whether a `[[udp]]` or `[[tcp]]` names the peer `name`, which may have been removed.
    #[must_use]
    pub fn forwards_to(&self, name: &str) -> bool {
        let named = |forward: &Forward| self.peers.get(forward.peer).is_some_and(|peer| *peer.name == *name);
        self.udp.iter().chain(&self.tcp).any(named) || self.closed.iter().any(|closed| closed == name)
    }

    /// The names that clients may give to meet the web server; none without a certificate.
    #[must_use]
    pub fn web_names(&self) -> &[String] {
        if self.certificate.is_some() { &self.http.names } else { &[] }
    }

    /// The file that the peer `name` stands in; `None` if it is in neither the configuration nor the directory of peers.
    #[must_use]
    pub fn file_of(&self, name: &str) -> Option<&Path> {
        let is_it = |peer: &&Peer| peer.origin == PeerOrigin::Config && *peer.name == *name;
        self.peers.iter().find(is_it)?;
        let entry = self.directory.files.iter().find(|file| *file.peer == *name);
        Some(entry.map_or_else(
            || self.path.as_deref().unwrap_or_else(|| Path::new("the configuration")),
            |file| &file.path,
        ))
    }

    /// How many workers to start: `transport.workers`, or if that is 0 one per CPU that this process may use.
    #[must_use]
    pub fn worker_count(&self) -> u8 {
        match self.transport.workers {
            0 => u8::try_from(process::available_cpus()).unwrap_or(MAX_WORKERS).min(MAX_WORKERS),
            chosen => chosen,
        }
    }
}

/// The text at `path`, and the absolute path: paths in it are the same ones wherever it is read from, and a reload names the file
/// by it.
fn read_with_path(path: &Path) -> Result<(String, PathBuf), LoadError> {
    let absolute = std::path::absolute(path);
    Ok((read(path)?, absolute.map_err(|cause| LoadError::Read { path: path.to_owned(), cause })?))
}

fn read(path: &Path) -> Result<String, LoadError> {
    files::read_text(path, files::MOST_TEXT).map_err(|cause| LoadError::Read { path: path.to_owned(), cause })
}

/// Where the relative paths of the file at `path` begin. The parent of a bare file name is the empty path, which joins to
/// nothing: the current folder.
fn folder_of(path: &Path) -> &Path {
    path.parent().unwrap_or_else(|| Path::new(""))
}
