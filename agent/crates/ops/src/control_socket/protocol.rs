//! Requests and answers: one line of JSON each, with the version of this format.
//!
//! A reader ignores members of an answer that it does not know; a request with a member that is not known is refused,
//! because ignoring it would do something else than what was asked for.

use config::{
    self, Config, NewUser,
    reload::{Change, Kind},
    state::{NewPeer, PeerChange},
};
use engine::origin::PeerOrigin;
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};

use crate::{
    control_socket::{
        status::{Scope, Status},
        user_changes::ListedUser,
    },
    qlog::{Order, Taken},
};

/// The version of this format; it changes when a reader of the old one would be misled.
pub const VERSION: u64 = 1;

/// The longest request, in bytes with its line end.
pub const MAX_REQUEST_BYTES: usize = 64 * 1024;

/// What the daemon is asked for.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "request", rename_all = "kebab-case", deny_unknown_fields)]
pub enum Request {
    /// The peers of both files, and those of open mode.
    PeerList {},
    /// Let a peer in, and keep it in the state file.
    PeerAdd(NewPeer),
    /// Put a peer in the place of the one of its name in the state file, or let it in if there is none.
    PeerReplace(NewPeer),
    /// Change a peer of the state file.
    PeerSet(PeerChange),
    /// Have a peer with a quota have carried so many bytes in this month.
    PeerQuota {
        name: String,
        /// What it has carried.
        used_bytes: u64,
    },
    /// Say what a file would say of a peer of the files, or of all.
    PeerExport {
        /// Which peer; `None`: all.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        name: Option<String>,
    },
    /// Shut a peer out, and take it out of the state file.
    PeerRemove { name: String },
    /// The users of both files.
    UserList {},
    /// Let a user in, and keep it in the state file.
    UserAdd(NewUser),
    /// Change a user of the state file.
    UserSet(PeerChange),
    /// Say what a file would say of a user, or of all.
    UserExport {
        /// Which user; `None`: all.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        name: Option<String>,
    },
    /// Shut a user out, and take it out of the state file.
    UserRemove { name: String },
    /// Read the configuration again and follow it.
    Reload {
        /// Whether the daemon only says what would change.
        #[serde(default, skip_serializing_if = "std::ops::Not::not")]
        dry_run: bool,
    },
    /// Take no new peers, and ask those that have dialled the agent to leave it.
    Drain {
        /// The time that they have, after which they are cut off.
        within_seconds: u64,
    },
    /// Say what the agent is doing, as far as the scope asks for it.
    Status(Scope),
    /// Reset both sides of a TCP forward.
    ForwardEnd {
        /// The ID that the status of its peer shows.
        id: String,
    },
    /// Look at a lane or at the control connections of a peer.
    QlogStart(Order),
    /// Give some of what a capture has.
    QlogTake {
        /// The number of the capture to take from.
        id: u64,
    },
    /// End a capture, and drop what it has.
    QlogStop {
        /// The number of the capture to end.
        id: u64,
    },
}

/// How the text begins with which a daemon of any version refuses a line that it does not know as a request.
pub const NOT_A_REQUEST: &str = "not a request";

/// Why a line is no request.
#[derive(Debug, thiserror::Error)]
pub enum RequestError {
    /// No JSON, or none of the requests.
    #[error("{NOT_A_REQUEST}: {0}")]
    Malformed(#[from] serde_json::Error),
    /// The request names no version, or another one than the daemon's.
    #[error(
        "{NOT_A_REQUEST} of version {VERSION} (remedy: the culvert command of the same version as the daemon)"
    )]
    Version,
}

impl Request {
    /// Reads a line, without its end.
    ///
    /// # Errors
    /// What is wrong with it.
    pub fn from_line(line: &[u8]) -> Result<Self, RequestError> {
        let mut request: Value = serde_json::from_slice(line)?;
        let version = request.as_object_mut().and_then(|members| members.remove("version"));
        if version.as_ref().and_then(Value::as_u64) != Some(VERSION) {
            return Err(RequestError::Version);
        }
        Ok(serde_json::from_value(request)?)
    }

    /// Returns the request as a line, with its end.
    #[must_use]
    pub fn to_line(&self) -> String {
        to_line(self, None)
    }
}

/// The daemon's answer to a request.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(tag = "answer", rename_all = "kebab-case")]
pub enum Answer {
    Done {
        /// What the operator should know all the same.
        note: Option<String>,
    },
    /// The peers of both files, and those of open mode.
    Peers {
        /// In the order in which they came.
        peers: Vec<ListedPeer>,
    },
    /// The users of both files.
    Users { users: Vec<ListedUser> },
    /// The peers or the users as a file has them.
    Exported {
        /// A `[[peer]]` or a `[[user]]` for each, as TOML.
        text: String,
    },
    /// The daemon says what the agent is doing.
    Status { status: Box<Status> },
    /// The daemon has read the configuration again, or has changed a peer or a user.
    Reloaded {
        /// What changed, or would change, in the order of the documented sections.
        changes: Vec<ShownChange>,
        /// What the operator should know all the same.
        notes: Vec<String>,
    },
    /// A capture has begun, and has this number.
    QlogStarted { id: u64 },
    /// Some of what a capture has.
    Qlog(Taken),
    /// It was not done, or not all of it.
    Refused {
        /// Whether the request was wrong, and not the daemon's surroundings.
        bad_input: bool,
        /// What is wrong, with a remedy.
        error: String,
    },
}

impl Answer {
    /// Reads a line; `None` if it is no answer of this version.
    #[must_use]
    pub fn from_line(line: &[u8]) -> Option<Self> {
        let answer: Value = serde_json::from_slice(line).ok()?;
        (answer.get("version").and_then(Value::as_u64) == Some(VERSION))
            .then(|| serde_json::from_value(answer).ok())
            .flatten()
    }

    /// Returns the answer of a daemon of this `program` as a line, with its end.
    #[must_use]
    pub fn to_line(&self, program: &str) -> String {
        to_line(self, Some(program))
    }
}

/// Returns the program that has written this answer, of whatever version it is; `None` if it does not say.
#[must_use]
pub fn program(line: &[u8]) -> Option<String> {
    let answer: Value = serde_json::from_slice(line).ok()?;
    answer.get(PROGRAM).and_then(Value::as_str).map(str::to_owned)
}

/// The member of an answer that names the daemon's program. A request has none: older daemons would refuse it.
const PROGRAM: &str = "program";

/// A line of the difference that a reload makes.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ShownChange {
    /// What is concerned: `limits.flows`, `peer "exit": endpoints`, `service "dns"`.
    pub what: String,
    /// What happened to it: "added", "removed" or "changed".
    pub kind: String,
    /// What it was; left out of what is new.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub from: Option<String>,
    /// What it is now; left out of what is gone.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub to: Option<String>,
    /// "now", "next-connection" (with the peer) or "restart" (until then the old value holds).
    pub effect: String,
}

impl From<&Change> for ShownChange {
    fn from(change: &Change) -> Self {
        let (kind, from, to) = match &change.kind {
            Kind::Added(new) => ("added", None, Some(new.clone())),
            Kind::Removed(old) => ("removed", Some(old.clone()), None),
            Kind::Changed(old, new) => ("changed", Some(old.clone()), Some(new.clone())),
        };
        let (what, effect) = (change.what.clone(), change.effect.label().to_owned());
        Self { what, kind: kind.to_owned(), from, to, effect }
    }
}

/// A peer in the answer to a request for the list of peers.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ListedPeer {
    pub name: String,
    /// "config" or "state": which file it stands in; "open": let in by open mode.
    pub origin: String,
    /// The keys that it may prove.
    pub public_keys: Vec<String>,
    /// Where it is dialled; none: it dials us.
    pub endpoints: Vec<String>,
    /// The lanes to open; 0: one per worker.
    pub lanes: u8,
    /// The names of our services that it may use.
    pub services: Vec<String>,
    /// Its inner addresses; an older daemon says nothing of them.
    #[serde(default)]
    pub allowed_ips: Vec<String>,
}

impl ListedPeer {
    /// A peer of `config`, or one that has come since.
    #[must_use]
    pub fn new(peer: &config::Peer, origin: PeerOrigin, config: &Config) -> Self {
        let service = |place: &usize| Some(config.services.get(*place)?.name.to_string());
        Self {
            name: peer.name.to_string(),
            origin: origin.label().to_owned(),
            public_keys: peer.public_keys.iter().map(ToString::to_string).collect(),
            endpoints: peer.endpoints.iter().map(ToString::to_string).collect(),
            lanes: peer.lanes,
            services: peer.services.iter().filter_map(service).collect(),
            allowed_ips: peer.allowed_ips.iter().map(ToString::to_string).collect(),
        }
    }
}

fn to_line(message: &impl Serialize, program: Option<&str>) -> String {
    // Texts, numbers and lists of them: nothing here can fail to be JSON.
    let mut value = serde_json::to_value(message).unwrap_or_default();
    if let Value::Object(members) = &mut value {
        members.insert("version".to_owned(), json!(VERSION));
        members.extend(program.map(|program| (PROGRAM.to_owned(), json!(program))));
    }
    format!("{value}\n")
}
