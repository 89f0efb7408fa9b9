//! What the checks look at: everything that was read from the host, and nothing that follows from it.

use std::{
    net::{IpAddr, SocketAddr},
    path::PathBuf,
    time::Duration,
};

use config::ConfigProblem;
use net::{
    host::{Buffers, ClockState, Route, TunFeatures},
    netlink::DeviceRoute,
};
use ops::control_socket::status::Status;

pub use super::line_facts::{Line, LineEnd, LinePeer};
pub use super::unit::{Access, Account, Service, Unit};

/// Something of the kernel that was tried: whether it works, or why that could not be found out.
pub type Tried = Result<bool, String>;

/// What was read of this host, of the files of a configuration, and of the ways to its peers.
#[derive(Clone, Debug)]
pub struct Facts {
    /// The configuration file, and what is wrong with it.
    pub file: ConfigFile,
    /// The files and folders that it names.
    pub files: Files,
    /// The unit and the user that would run the daemon.
    pub service: Service,
    /// A daemon that runs with it.
    pub daemon: Daemon,
    /// Whether the file of its program is not the one any more that it was started from.
    pub daemon_replaced: bool,
    pub kernel: Kernel,
    /// How much the host gives to the agent.
    pub limits: Limits,
    pub clock: Clock,
    /// The ports, the forwarding and the filters of the host.
    pub network: Network,
    /// The web server of the configuration.
    pub web: Web,
    /// The TUN device of the configuration; nothing of it is known without a `[tun]`.
    pub tun: Tun,
    /// The peers of the configuration, in its order.
    pub peers: Vec<Peer>,
    /// Its lines, in its order.
    pub lines: Vec<Line>,
}

/// The configuration file that the doctor looks at.
#[derive(Clone, Debug, Default)]
pub struct ConfigFile {
    /// Where it is; `None`: only the host is looked at.
    pub path: Option<PathBuf>,
    /// Why it cannot be read, with a remedy.
    pub unreadable: Option<String>,
    /// Whether that is because this user may not.
    pub denied: bool,
    /// What is wrong with it; the key file's problems too.
    pub problems: Vec<ConfigProblem>,
    /// What an operator should know, although the agent starts.
    pub notes: Vec<ConfigProblem>,
}

/// What the configuration names in the file system.
#[derive(Clone, Debug, Default)]
pub struct Files {
    /// The file of the private key.
    pub key: NamedPath,
    /// Whether this user may not read it.
    pub key_denied: bool,
    /// The folder of the key's file.
    pub key_folder: NamedPath,
    /// The folder in which the agent keeps its state.
    pub state: NamedPath,
    /// The folder of the control socket.
    pub control: NamedPath,
}

/// A path that the configuration names, with what is there.
#[derive(Clone, Debug, Default)]
pub struct NamedPath {
    /// Where it is; empty if the configuration has none.
    pub path: PathBuf,
    /// What is found at the path.
    pub found: Found,
}

/// What is found at a path.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub enum Found {
    /// The path was not looked at.
    #[default]
    Unasked,
    Missing {
        /// Whether this user may make it, in a folder that is there.
        may_make: bool,
    },
    /// It cannot be looked at, because of this error.
    Hidden(String),
    /// A file or a folder exists at the path.
    There {
        /// Whether it is a folder, and not a file.
        folder: bool,
        /// The permission bits of the file or folder.
        mode: u32,
        /// The number of the user who owns the file or folder.
        owner: u32,
        /// Whether this user may write to it, or make files in it.
        writable: bool,
    },
}

/// A daemon that runs with the same configuration.
#[derive(Clone, Debug, Default)]
pub enum Daemon {
    /// Nobody was asked: there is no control socket to ask at, and nothing hints at a daemon.
    #[default]
    Unasked,
    /// No daemon runs with the same configuration.
    Absent,
    /// It answers at the control socket.
    Running(Box<Status>),
    /// One seems to run, and does not say more, because of this.
    Mute(String),
}

impl Daemon {
    /// What a daemon that runs said of itself.
    #[must_use]
    pub fn status(&self) -> Option<&Status> {
        match self {
            Self::Running(status) => Some(status),
            Self::Unasked | Self::Absent | Self::Mute(_) => None,
        }
    }

    /// Whether one runs, or seems to: what is taken may be taken by it.
    #[must_use]
    pub fn may_run(&self) -> bool {
        match self {
            Self::Running(_) | Self::Mute(_) => true,
            Self::Unasked | Self::Absent => false,
        }
    }
}

/// What the kernel and the CPU can do.
#[derive(Clone, Debug)]
pub struct Kernel {
    /// Its release, as `uname -r` prints it.
    pub release: String,
    /// What came of trying `UDP_SEGMENT` on loopback.
    pub segmentation: Tried,
    /// What came of trying `UDP_GRO` on loopback.
    pub receive_offload: Tried,
    /// Whether a socket takes the option `UDP_GRO`.
    pub takes_gro: bool,
    pub steering: Tried,
    pub timestamps: Tried,
    /// Whether the CPU has instructions for AES-GCM.
    pub aes: bool,
    /// Whether it has those for several blocks at once; `None`: not a question for this architecture.
    pub vector_aes: Option<bool>,
}

/// How much the host gives. `None`: the kernel does not say.
#[derive(Clone, Debug, Default)]
pub struct Limits {
    /// Bits per second that `--rate` names.
    pub rate: Option<u64>,
    /// What the kernel gives of the buffers that are asked for.
    pub buffers: Option<Buffers>,
    /// The value of `net.core.rmem_max`, in bytes.
    pub rmem_max: Option<u64>,
    /// The value of `net.core.wmem_max`, in bytes.
    pub wmem_max: Option<u64>,
    /// The value of `net.core.netdev_max_backlog`, in packets.
    pub backlog: Option<u64>,
    /// Packets that found that queue full, since the host was started.
    pub backlog_drops: u64,
    /// Datagrams or buffers that found a socket's receive buffer full, since the network came up, in IPv4 and IPv6.
    pub udp_drops: u64,
    /// The hard limit on open files.
    pub descriptors: Option<u64>,
    /// `fs.nr_open`: above this no limit can be raised.
    pub most_descriptors: Option<u64>,
    /// CPUs that this process may use, by affinity and quota.
    pub cpus: usize,
    /// The CPU quota of this process's control groups, in CPUs.
    pub cpu_quota: Option<f64>,
    /// Number of the user that runs this.
    pub user: u32,
    /// Its effective capabilities, as a bit set.
    pub capabilities: u64,
}

impl Limits {
    /// The number of `CAP_NET_ADMIN` in linux/capability.h.
    pub const NET_ADMIN: u8 = 12;
    /// The number of `CAP_SYS_RESOURCE` in linux/capability.h.
    pub const SYS_RESOURCE: u8 = 24;

    /// Whether this user has a capability, by its number in linux/capability.h.
    #[must_use]
    pub fn has(&self, capability: u8) -> bool {
        self.capabilities >> capability & 1 == 1
    }
}

/// The wall clock of the host, and how it is kept.
#[derive(Clone, Debug, Default)]
pub struct Clock {
    /// Its seconds since the Unix epoch.
    pub unix_seconds: u64,
    /// How it is kept; `None`: the kernel does not say.
    pub state: Option<ClockState>,
}

/// The ports, the forwarding and the filters of the host.
#[derive(Clone, Debug, Default)]
pub struct Network {
    /// The ports that the configuration names.
    pub ports: Vec<Port>,
    pub unprivileged_ports: Option<u64>,
    /// `net.ipv4.ip_forward`; `None`: there is no such protocol.
    pub forwards_ipv4: Option<bool>,
    /// Whether the kernel sends ICMP redirects into the device of the tunnel; `None` without a device or without IPv4.
    pub sends_redirects: Option<bool>,
    /// `net.ipv6.conf.all.forwarding`; `None`: there is no such protocol.
    pub forwards_ipv6: Option<bool>,
    /// The interfaces whose router advertisements give this host its IPv6 default route, and which ignore them once the
    /// host forwards (`accept_ra` is 1).
    pub advertised: Vec<String>,
    /// The interfaces that are up, but for loopback, with what holds of `rp_filter`: the larger of its own and that of `all`.
    pub rp_filter: Vec<(String, u8)>,
    /// The firewall's table of connections; `None`: there is none.
    pub conntrack: Option<Conntrack>,
    /// The interfaces towards the peers, or of the default route, and whether they join what they receive.
    pub interfaces: Vec<(String, bool)>,
}

/// A port that the configuration names.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Port {
    /// The key of the configuration that names the port.
    pub key: &'static str,
    /// Whether it is TCP, and not UDP.
    pub tcp: bool,
    pub address: SocketAddr,
    pub opened: Opened,
}

/// Whether a port could be opened.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Opened {
    Free,
    /// Another program has opened the port.
    Taken,
    /// This user may not open the port.
    Forbidden,
    /// The address is not one of this host.
    NoAddress,
    /// The kernel reported another error, which is this one.
    Failed(String),
}

/// The firewall's table of connections, and how full it is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Conntrack {
    /// The number of entries that the table has now.
    pub count: u64,
    /// The number of entries that the table may have.
    pub max: u64,
    /// For how long it remembers UDP that went both ways, without traffic.
    pub udp_timeout: Duration,
}

/// The web server, for whoever names us or connects.
#[derive(Clone, Debug, Default)]
pub struct Web {
    /// The days until its certificate ends; `None`: it has none, or it cannot be read.
    pub certificate_days: Option<u64>,
    /// The status with which the site answers, or why it does not; `None`: there is no site, or it was not asked.
    pub site: Option<Result<u16, String>>,
}

/// The TUN device and its driver.
#[derive(Clone, Debug, Default)]
pub struct Tun {
    /// The driver, or why it cannot be opened.
    pub driver: Option<Result<TunFeatures, String>>,
    /// Whether that is because this user may not open it.
    pub denied: bool,
    /// Who may open the driver's node, if it can be seen.
    pub node: Option<Access>,
    /// Whether name and addresses are free; if not, what is wrong, with a remedy.
    pub free: Option<Result<(), String>>,
    /// `txqueuelen` of an interface with its name, in packets.
    pub queue_packets: Option<u64>,
    /// Whether new interfaces have no IPv6, or the kernel none at all.
    pub no_ipv6: bool,
    /// With `tun.routing = "kernel"`: the kernel's routes into an interface with its name.
    pub routes: Option<Vec<DeviceRoute>>,
}

/// A peer, and the ways to it.
#[derive(Clone, Debug, Default)]
pub struct Peer {
    pub name: String,
    /// Its endpoints, in the configuration's order.
    pub endpoints: Vec<Endpoint>,
    /// Why it was not dialled; `None`: it was, or has no endpoint.
    pub not_dialled: Option<&'static str>,
}

/// An endpoint of a peer, with its addresses.
#[derive(Clone, Debug)]
pub struct Endpoint {
    /// The endpoint as the configuration has it.
    pub text: String,
    /// The addresses that the name of the endpoint stands for.
    pub lookup: Lookup,
}

/// The addresses that a name stands for, or why they are not known.
#[derive(Clone, Debug)]
pub enum Lookup {
    /// No resolver was asked for the name.
    Unasked,
    /// It is not known, because of this error.
    Failed(String),
    /// These addresses, in the resolver's order.
    Found(Vec<Address>),
}

/// An address of a peer, with the way to it.
#[derive(Clone, Debug)]
pub struct Address {
    /// The address and the port of the peer.
    pub remote: SocketAddr,
    /// The way that packets take, or why there is none.
    pub way: Result<Route, String>,
    /// What came of dialling it; `None`: it was not dialled.
    pub answer: Option<Answer>,
}

impl Address {
    /// Whether the address is this host's own.
    #[must_use]
    pub fn is_own(&self) -> bool {
        let source = self.way.as_ref().map(|way| way.source);
        source.is_ok_and(|source: IpAddr| source == self.remote.ip())
    }
}

/// What came of dialling an address.
#[derive(Clone, Debug, PartialEq)]
pub enum Answer {
    /// The peer answered and proved its key.
    Connected {
        /// Round-trip time, if it was measured in time.
        rtt: Option<Duration>,
        /// The largest IP packet that fits into one packet, in bytes, if it was measured in time.
        inner_mtu: Option<u16>,
    },
    /// The peer did not prove its key.
    Failed {
        /// The reason for the failure, in words.
        reason: String,
        /// What to look at, the likeliest first.
        causes: String,
    },
}

impl Endpoint {
    /// Whether it is reached over TCP, so that what is known of UDP on the way there says nothing.
    pub(super) fn is_over_tcp(&self) -> bool {
        self.text.starts_with("https://")
    }

    pub(super) fn addresses(&self) -> &[Address] {
        match &self.lookup {
            Lookup::Found(addresses) => addresses,
            Lookup::Unasked | Lookup::Failed(_) => &[],
        }
    }

    /// The ways to its addresses, those that there are.
    pub(super) fn ways(&self) -> impl Iterator<Item = &Route> {
        self.addresses().iter().filter_map(|address| address.way.as_ref().ok())
    }
}
