//! The configuration: a TOML file, read once, becomes the immutable [`Config`] that everything else takes.
//!
//! | question | file |
//! |---|---|
//! | what the daemon reads | this one: [`Config`] and its parts |
//! | which keys the file may have, and their TOML types | `file.rs`, `field.rs` |
//! | what a value may be, and what it is when left out | `resolve.rs`, `access.rs`, `peers.rs`, `tun.rs` per section, `checks.rs` per kind of value, `defaults.rs` |
//! | where the key is when systemd hands it over | `credential.rs` |
//! | what `culvert peer` keeps beside it, and how | `state.rs` |
//! | how "30s", "4MiB" and "host:port" are read | `value.rs` |
//! | what a reload changes | `reload.rs`; when each key takes effect: `reload_values.rs` |
//! | how many files it may keep open | `descriptors.rs` |
//! | what an operator sees when something is wrong | `problem.rs` |

use std::{
    fs, io,
    net::SocketAddr,
    ops::RangeInclusive,
    path::{Path, PathBuf},
    sync::Arc,
    time::Duration,
};

use gate::identity::{Endpoint, Identity, PublicKey};
use ipnet::IpNet;
use net::process;

mod access;
#[cfg(test)]
mod access_tests;
mod checks;
mod credential;
pub mod defaults;
mod descriptors;
mod field;
mod file;
mod peers;
mod problem;
#[cfg(any(test, feature = "fuzzing"))]
#[doc(hidden)]
pub mod properties;
pub mod reload;
#[cfg(test)]
mod reload_keys_tests;
#[cfg(test)]
mod reload_properties;
#[cfg(any(test, feature = "fuzzing"))]
#[doc(hidden)]
pub mod reload_rules;
#[cfg(test)]
mod reload_tests;
mod reload_values;
mod resolve;
pub mod state;
#[cfg(test)]
mod state_tests;
#[cfg(test)]
mod tests;
mod tun;
#[cfg(test)]
mod tun_tests;
mod value;

pub use problem::{ConfigProblem, ConfigProblems, LoadError};
use resolve::Draft;
pub use tun::{INNER_REMEDY, LOOKUP_REMEDY, ROUTES_REMEDY, takes_lookups};

/// The most workers that an agent may have: few enough that the first byte of a connection ID keeps two random bits.
pub const MAX_WORKERS: u8 = 64;

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
    /// The TUN device; `None`: no IP packets are carried.
    pub tun: Option<Tun>,
    /// Where `/metrics`, `/healthz` and `/readyz` are served; `None`: nowhere.
    pub metrics: Option<SocketAddr>,
    /// The socket at which commands are taken; `None`: nowhere.
    pub control: Option<PathBuf>,
    /// What is logged, and how.
    pub log: Log,
    /// Hard ceilings.
    pub limits: Limits,
    /// Names of removed peers that a `[[udp]]` or `[[tcp]]` still names; its port is not opened.
    pub closed: Vec<String>,
    /// What an operator should know, although the agent starts.
    pub notes: Vec<ConfigProblem>,
}

/// `[transport]`: the underlay.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Transport {
    /// Where peers can reach us; empty: this agent only dials.
    pub listen: Vec<SocketAddr>,
    /// Threads that move packets, at most [`MAX_WORKERS`]; 0: see [`Config::worker_count`].
    pub workers: u8,
    /// Whether each worker stays on a CPU of its own.
    pub pin_cpus: bool,
    /// Whether UDP segmentation offload may be used (it is probed, and repaired when it fails).
    pub gso: bool,
    /// `SO_MARK` of the underlay sockets; 0: none.
    pub mark: u32,
    /// What `culvert link` prints as our address.
    pub advertise: Option<Endpoint>,
    /// The largest QUIC packet.
    pub max_packet: MaxPacket,
}

/// The largest QUIC packet that we send.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum MaxPacket {
    /// What path MTU discovery finds.
    Auto,
    /// At most this many bytes of UDP payload.
    Bytes(u16),
}

/// `[access]`: who may connect, and what everybody else meets.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Access {
    /// Whose handshake is completed.
    pub mode: AccessMode,
    /// Indices into [`Config::services`]: what peers of open mode may use.
    pub services: Vec<usize>,
    /// How far a client's clock may be from ours, in either direction.
    pub clock_window: Duration,
    /// Whether a client must prove in its first packet that it knows our public key.
    pub knock: Knock,
    /// Where strangers' datagrams go; `None`: nowhere, and they get no answer.
    pub decoy: Option<SocketAddr>,
}

/// Whose handshake is completed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum AccessMode {
    /// Only that of a known peer.
    Allowlist,
    /// That of everybody who knows our public key.
    Open,
}

/// Whether a client must prove in its first packet that it knows our public key.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Knock {
    /// Yes: who does not is a stranger.
    Required,
    /// No: any QUIC client may start a handshake.
    Off,
}

/// Which file a peer stands in.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PeerOrigin {
    /// The configuration, which only its author changes.
    Config,
    /// The state file, which `culvert peer` writes.
    State,
}

impl PeerOrigin {
    /// The file, in JSON.
    #[must_use]
    pub fn label(self) -> &'static str {
        match self {
            Self::Config => "config",
            Self::State => "state",
        }
    }

    /// The file, as an operator calls it.
    #[must_use]
    pub fn words(self) -> &'static str {
        match self {
            Self::Config => "the configuration",
            Self::State => "the state file",
        }
    }
}

/// `[[peer]]`: another agent.
#[derive(Clone, Debug, PartialEq)]
pub struct Peer {
    /// Its name here: in logs, metrics and `[[udp]]`/`[[tcp]]`.
    pub name: Arc<str>,
    /// Which file it stands in.
    pub origin: PeerOrigin,
    /// The keys that it may prove; more than one during a rotation, never none.
    pub public_keys: Vec<PublicKey>,
    /// Where to dial it; empty: it dials us.
    pub endpoints: Vec<Endpoint>,
    /// How many lanes to open; 0: one per worker of the larger side.
    pub lanes: u8,
    /// When its packets are acknowledged.
    pub profile: Profile,
    /// After how long an idle path gets a keepalive; `None`: never.
    pub keepalive: Option<Duration>,
    /// The bounds of its queue.
    pub queue: Queue,
    /// What is dropped when the queue is full.
    pub drop: DropPolicy,
    /// The share of the queue that one flow may hold, above 0 and at most 1.
    pub quota: f64,
    /// Indices into [`Config::services`]: which of our services it may use.
    pub services: Vec<usize>,
    /// Which inner addresses are its own: packets for them go to it, and only from them may its packets come.
    pub allowed_ips: Vec<IpNet>,
    /// The DSCP of the packets that carry its traffic.
    pub dscp: Dscp,
    /// The congestion control of its streams.
    pub congestion: CongestionControl,
    /// The most that its streams are sent, in bits a second of IP packets; always there with [`CongestionControl::Rate`].
    pub rate: Option<u64>,
}

/// `peer.congestion`: the congestion control of a peer's streams.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[repr(u8)]
pub enum CongestionControl {
    /// Finds the bottleneck's rate and the shortest round trip; random loss does not slow it down.
    #[default]
    Bbr,
    /// CUBIC (RFC 9438), as quinn-proto has it: takes every loss for congestion.
    Cubic,
    /// Sends at `peer.rate`, whatever is lost.
    Rate,
}

impl CongestionControl {
    /// All of them, in the order of their discriminants.
    pub const ALL: [Self; 3] = [Self::Bbr, Self::Cubic, Self::Rate];

    /// Its name in the configuration, in `culvert status` and in metrics.
    #[must_use]
    pub const fn label(self) -> &'static str {
        match self {
            Self::Bbr => "bbr",
            Self::Cubic => "cubic",
            Self::Rate => "rate",
        }
    }
}

/// `peer.dscp`: the DSCP (RFC 2474) of outer packets.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Dscp {
    /// That of the IP packet inside; 0 for other payloads.
    Copy,
    /// Always this one, 0 to 63.
    Fixed(u8),
}

impl Dscp {
    /// The upper six bits of an outer packet's traffic class, around a packet of class `inner`.
    #[inline]
    #[must_use]
    pub fn outer(self, inner: u8) -> u8 {
        match self {
            Self::Copy => inner & !0b11,
            Self::Fixed(dscp) => dscp << 2,
        }
    }
}

/// `[tun]`: the TUN device.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Tun {
    /// Its name, 1 to 15 bytes.
    pub name: Arc<str>,
    /// Its addresses, each with the prefix that is on-link there.
    pub addresses: Vec<IpNet>,
    /// The largest inner packet.
    pub mtu: InnerMtu,
    /// Whether the kernel may hand over, and be handed, super-packets and partial checksums (it is probed).
    pub offload: bool,
    /// Whether kernel routes for the peers' `allowed_ips` are installed.
    pub routes: bool,
}

/// `tun.mtu`: the largest inner packet.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum InnerMtu {
    /// What fits into one packet to the peer, as its path is now.
    Auto,
    /// At most this many bytes, and no more than fits.
    Bytes(u16),
}

/// The bounds of one peer's queue; the first one reached counts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Queue {
    /// Datagrams.
    pub packets: usize,
    /// Payload bytes.
    pub bytes: usize,
    /// Age; an older payload is dropped instead of sent late.
    pub time: Duration,
}

/// When a peer's packets are acknowledged.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Profile {
    /// Every 64 packets or a quarter round trip: the least work per packet.
    Throughput,
    /// Every 2 packets: losses and round trips are seen soonest.
    Latency,
}

/// What a full queue drops.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum DropPolicy {
    /// What has waited longest: right for real-time traffic.
    Oldest,
    /// What just arrived.
    Newest,
}

/// `[[udp]]` or `[[tcp]]`: a local port that stands for a peer's service.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Forward {
    /// The local port.
    pub listen: SocketAddr,
    /// Index into [`Config::peers`]; [`Forward::NOBODY`] while it is closed.
    pub peer: usize,
    /// The service's name at that peer.
    pub service: Arc<str>,
    /// Whether the port is open. A forward that a reload removed keeps its place, closed.
    pub open: bool,
}

impl Forward {
    /// The place of no peer: that of a forward that is closed.
    pub const NOBODY: usize = usize::MAX;
}

/// `[[service]]`: a named upstream that peers may reach through us. One that a reload removed keeps its place, which is its
/// number on the wire, and serves neither UDP nor TCP.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Service {
    /// What peers call it.
    pub name: Arc<str>,
    /// Where its traffic goes.
    pub upstream: SocketAddr,
    /// A UDP flow's life without traffic.
    pub idle: Duration,
    /// Datagrams per send to the upstream, 1 to 128.
    pub burst: u16,
    /// What becomes of a datagram that fits into no packet.
    pub oversize: Oversize,
    /// Whether it takes UDP flows.
    pub udp: bool,
    /// Whether it takes TCP forwards.
    pub tcp: bool,
}

/// `service.oversize`: what becomes of a datagram of the service, in either direction, that fits into no packet to the peer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Oversize {
    /// It is dropped.
    Drop,
    /// It travels in pieces, if both ends can.
    Fragment,
}

/// `[log]`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Log {
    /// The least severe level that is written.
    pub level: LogLevel,
    /// For people or for machines.
    pub format: LogFormat,
}

/// A log level, most severe first.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LogLevel {
    /// The daemon cannot do its work.
    Error,
    /// Worth waking someone.
    Warn,
    /// What happens once per peer, connection or change.
    Info,
    /// What happens once per flow.
    Debug,
    /// What happens once per packet.
    Trace,
}

/// How a log line is written.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LogFormat {
    /// One line for people.
    Text,
    /// One JSON object.
    Json,
}

/// The least and the most that sockets may be told to ask for, in bytes.
const SOCKET_BUFFER_RANGE: RangeInclusive<u64> = 64 << 10..=1 << 30;

/// What comes within `time` at `rate` bytes a second, in bytes.
const fn socket_buffer_bytes(rate: usize, time: Duration) -> usize {
    let bytes = rate as u128 * time.as_millis() / 1_000;
    let (least, most) = (*SOCKET_BUFFER_RANGE.start(), *SOCKET_BUFFER_RANGE.end());
    if bytes > most as u128 {
        most as usize
    } else if bytes < least as u128 {
        least as usize
    } else {
        bytes as usize
    }
}

/// `[limits]`: hard ceilings, so that memory is bounded whatever arrives.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Limits {
    /// Flows that one peer may have, both directions together.
    pub flows_per_peer: usize,
    /// Flows of all peers together.
    pub flows: usize,
    /// TCP forwards that one peer may have open.
    pub tcp_streams_per_peer: u32,
    /// TCP forwards that all peers together may have open.
    pub tcp_streams: usize,
    /// Memory that the windows of all TCP forwards together may take, in bytes.
    pub stream_bytes: usize,
    /// Datagrams that one flow may hold back until its far end has confirmed it.
    pub pending_open_packets: usize,
    /// Socket buffer to ask the kernel for, in bytes per UDP socket; `None`: what [`Config::socket_buffer_bytes`] comes to.
    pub receive_buffer: Option<usize>,
    /// Bytes a second that a socket is to take without loss while its worker does something else.
    pub receive_rate: usize,
    /// What datagrams of one peer may take at one worker while pieces of them are missing, in bytes.
    pub reassembly_bytes: usize,
    /// Bytes that may wait in the queues of all peers together.
    pub queue_bytes: usize,
    /// Peers of both files together.
    pub peers: usize,
    /// Peers that open mode has let in.
    pub open_peers: usize,
    /// Strangers whose datagrams go to the decoy at a time.
    pub decoy_flows: usize,
    /// Handshakes that others have begun and not completed.
    pub handshakes: usize,
}

impl Config {
    /// The buffer that every UDP socket asks the kernel for, in bytes: a queue like the relay's, so it is as long as the longest
    /// `peer.queue.time` at `limits.receive_rate`. What waited there too long for its own peer is dropped when it is read.
    ///
    /// The kernel doubles it, and charges twice what a datagram of 1150 bytes holds: these cancel out.
    #[must_use]
    pub fn socket_buffer_bytes(&self) -> usize {
        let times = self.peers.iter().map(|peer| peer.queue.time);
        let time = times.max().unwrap_or(defaults::QUEUE.time);
        self.limits.receive_buffer.unwrap_or_else(|| socket_buffer_bytes(self.limits.receive_rate, time))
    }

    /// Reads and checks the file at `path`, the state file and the identity that it names; no peer may have our own key.
    ///
    /// # Errors
    /// The file cannot be read, or every problem that it has.
    pub fn load(path: &Path) -> Result<(Self, Identity), LoadError> {
        Self::load_with(path, state::read)
    }

    /// The same, with the text of the state file from `read_state`, which gets its path.
    ///
    /// # Errors
    /// As those of [`Config::load`].
    pub fn load_with(
        path: &Path,
        read_state: impl FnOnce(&Path) -> io::Result<Option<String>>,
    ) -> Result<(Self, Identity), LoadError> {
        let text = read(path)?;
        // Paths in it are the same ones wherever it is read from: a reload names the file by its absolute path.
        let absolute =
            std::path::absolute(path).map_err(|cause| LoadError::Read { path: path.to_owned(), cause })?;
        let draft = Draft::read(&text, folder_of(&absolute), read_state);
        let (config, identity) = draft.finish_with_identity(path)?;
        Ok((Self { path: Some(absolute), ..config }, identity))
    }

    /// Checks the file at `path` and the state file, and not the identity that it names, which may be somebody else's to read.
    ///
    /// # Errors
    /// The file cannot be read, or every problem that it has but for its key.
    pub fn check_without_key(path: &Path) -> Result<(), LoadError> {
        let draft = Draft::read(&read(path)?, folder_of(path), state::read);
        Ok(draft.finish(Some(path)).map(drop)?)
    }

    /// The control socket that the file at `path` names, whatever else is wrong with the file: a daemon that runs with an
    /// older version of it can still be reached.
    ///
    /// # Errors
    /// The file cannot be read.
    pub fn control_socket(path: &Path) -> Result<Option<PathBuf>, LoadError> {
        let text = read(path)?;
        Ok(Draft::read(&text, folder_of(path), |_| Ok(None)).into_control())
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

    /// How many workers to start: `transport.workers`, or if that is 0 one per CPU that this process may use.
    #[must_use]
    pub fn worker_count(&self) -> u8 {
        match self.transport.workers {
            0 => u8::try_from(process::available_cpus()).unwrap_or(MAX_WORKERS).min(MAX_WORKERS),
            chosen => chosen,
        }
    }
}

fn read(path: &Path) -> Result<String, LoadError> {
    fs::read_to_string(path).map_err(|cause| LoadError::Read { path: path.to_owned(), cause })
}

/// Where the relative paths of the file at `path` begin. The parent of a bare file name is the empty path, which joins to
/// nothing: the current folder.
fn folder_of(path: &Path) -> &Path {
    path.parent().unwrap_or_else(|| Path::new(""))
}
