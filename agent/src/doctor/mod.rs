//! `culvert doctor`: what could keep an agent from working well on this host, looked at before it runs, or beside it.
//!
//! | question | file |
//! |---|---|
//! | which checks there are, in their order; what a finding is | this one: [`Check`], [`Finding`], [`examine`] |
//! | what the checks look at | `facts.rs` |
//! | how that is read from the host | `gather.rs`, `lookup.rs`; the system calls are in `net/src/host.rs` |
//! | what a systemd unit gives the daemon | `unit.rs` |
//! | how peers are dialled, if nobody else does | `dial.rs` |
//! | the checks, pure | `files.rs`, `kernel.rs`, `limits.rs`, `network.rs`, `tun.rs`, `routing.rs`, `peers.rs`, `programs.rs`, `paths.rs`, `web.rs` |
//! | the lines of `[[transport.uplink]]` | `line_facts.rs`, read by `lines.rs`; the checks: `uplinks.rs` |
//! | how findings are printed | `report.rs` |
//! | `culvert uplink test` | `line_test.rs` |
//!
//! Nothing is changed, and nothing is sent but questions for names and, if no daemon runs, the handshakes with the peers that
//! the daemon would make.

use std::fmt;

mod dial;
pub mod facts;
mod files;
mod gather;
mod kernel;
mod limits;
mod line_facts;
pub(crate) mod line_test;
mod lines;
mod lookup;
mod network;
mod paths;
mod peers;
mod programs;
mod report;
mod routing;
#[cfg(test)]
mod tests;
mod tun;
mod unit;
mod uplinks;
mod web;

use config::Config;
use facts::Facts;
pub(crate) use gather::ipv6_is_disabled;
pub use gather::{Options, gather};
pub(crate) use lines::end as line_end;
pub use report::Report;
pub(crate) use tun::{ENABLE as ENABLE_IPV6, routes_ipv6};
#[cfg(any(test, feature = "fuzzing"))]
pub use unit::host_text;

base::labelled! {
    /// How much a finding matters to the operator.
    #[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
    pub enum Severity {
        /// What was looked at is as it should be.
        Ok => "ok",
        /// Worth knowing; nothing needs to be done.
        Note => "note",
        /// The agent works, but slower or less reliably than it could.
        Warning => "warning",
        /// The agent does not start, or something that its configuration asks for does not work.
        Error => "error",
    }
}

base::labelled! {
    /// Where a check stands in a report.
    #[derive(Clone, Copy, Debug, PartialEq, Eq)]
    pub enum Group {
        /// The configuration and the files that it names.
        Configuration => "configuration",
        /// What this kernel and this CPU can do.
        Kernel => "kernel",
        /// How much of it this host gives to the agent.
        Limits => "limits",
        /// The ports, the forwarding and the filters of the host.
        Network => "network",
        /// The TUN device of the configuration.
        Tunnel => "tunnel",
        /// The other agents, and the ways to them.
        Peers => "peers",
    }
}

/// Defines [`Check`]: each check with its identifier and its group, in the order of the report.
macro_rules! checks {
    ($($(#[$doc:meta])* $name:ident = $label:literal in $group:ident,)+) => {
        /// What is looked at; `docs/doctor.md` says of each when it fires.
        #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
        pub enum Check { $($(#[$doc])* $name,)+ }

        impl Check {
            /// All of them, in the order of the report.
            pub const ALL: &[Self] = &[$(Self::$name,)+];

            /// Returns the identifier of the check, which stays the same.
            #[must_use]
            pub fn id(self) -> &'static str {
                match self { $(Self::$name => $label,)+ }
            }

            /// Where it stands in a report.
            #[must_use]
            pub fn group(self) -> Group {
                match self { $(Self::$name => Group::$group,)+ }
            }
        }
    };
}

checks! {
    Configuration = "configuration" in Configuration,
    /// The private key is there, readable for us and not for everybody.
    KeyFile = "key-file" in Configuration,
    /// What must survive a restart can be written.
    StateFolder = "state-folder" in Configuration,
    /// The control socket can be made.
    ControlFolder = "control-folder" in Configuration,
    /// A daemon runs, and is the program that a restart would start.
    Daemon = "daemon" in Configuration,
    /// The kernel is new enough.
    KernelVersion = "kernel-version" in Kernel,
    /// Many datagrams leave in one call (GSO).
    UdpSegmentation = "udp-segmentation" in Kernel,
    /// Many datagrams come in one buffer (GRO).
    UdpReceiveOffload = "udp-receive-offload" in Kernel,
    /// The kernel gives each datagram to its worker.
    Steering = "steering" in Kernel,
    /// The kernel says how long a datagram has waited.
    Timestamps = "timestamps" in Kernel,
    /// The CPU has instructions for AES.
    CpuFeatures = "cpu-features" in Kernel,
    /// The receive buffer is as large as it should be.
    ReceiveBuffer = "receive-buffer" in Limits,
    /// The send buffer is as large as it should be.
    SendBuffer = "send-buffer" in Limits,
    /// The kernel's queue before the sockets is long enough.
    Backlog = "backlog" in Limits,
    /// Sockets of this host have lost datagrams.
    UdpDrops = "udp-drops" in Limits,
    /// The process may open as many files as it needs.
    OpenFiles = "open-files" in Limits,
    /// There is a CPU for each worker.
    Workers = "workers" in Limits,
    /// What needs CAP_NET_ADMIN has it.
    Capabilities = "capabilities" in Limits,
    Clock = "clock" in Limits,
    /// The ports are free, or ours.
    Ports = "ports" in Network,
    /// HTTP/3 and the web server on TCP are found by each other.
    WebServer = "web-server" in Network,
    /// The certificate of the web server goes on to be valid.
    WebCertificate = "web-certificate" in Network,
    /// The site behind the web server answers.
    WebSite = "web-site" in Network,
    /// The status page is for those who are meant to read it.
    StatusPage = "status-page" in Network,
    /// Packets are forwarded between peers and networks.
    Forwarding = "forwarding" in Network,
    /// Peers whose packets pass through here are not told that there is a shorter way.
    Redirects = "redirects" in Network,
    /// The reverse path filter lets the peers' packets in.
    RpFilter = "rp-filter" in Network,
    /// The firewall's table of connections has room.
    Conntrack = "conntrack" in Network,
    /// The firewall's table remembers us for longer than we are silent.
    ConntrackTimeout = "conntrack-timeout" in Network,
    /// The interfaces towards the peers join what they receive.
    InterfaceOffload = "interface-offload" in Network,
    /// The interface or the source of a line is there.
    Uplink = "uplink" in Network,
    /// The kernel's TUN driver is there.
    TunDriver = "tun-driver" in Tunnel,
    /// The driver takes super-packets, and a queue for each worker.
    TunOffload = "tun-offload" in Tunnel,
    /// Name and addresses of the device are free, or ours.
    TunDevice = "tun-device" in Tunnel,
    /// The running device's queue is long enough.
    TunQueue = "tun-queue" in Tunnel,
    /// The device can have its IPv6 addresses.
    TunIpv6 = "tun-ipv6" in Tunnel,
    /// The next hops of the kernel's routes into the device are peers.
    TunNextHop = "tun-next-hop" in Tunnel,
    /// Routes of the kernel can name each peer as next hop.
    TunPeerAddress = "tun-peer-address" in Tunnel,
    /// The names in the endpoints can be looked up.
    EndpointName = "endpoint-name" in Peers,
    /// There is a route to each address.
    EndpointRoute = "endpoint-route" in Peers,
    /// The path is wide enough, as far as the kernel knows.
    PathMtu = "path-mtu" in Peers,
    Reachability = "reachability" in Peers,
    /// Packets to each peer have a way over each line.
    UplinkRoute = "uplink-route" in Peers,
    /// Each peer answers over each line.
    UplinkReachability = "uplink-reachability" in Peers,
    /// The program of a peer is not older, nor newer, than ours.
    PeerSoftware = "peer-software" in Peers,
    /// One agent uses the key of a peer.
    OneKey = "one-key" in Peers,
    /// Nothing of a peer is dropped that another configuration would carry.
    Drops = "drops" in Peers,
    /// What was measured to fit into one packet is enough for IP.
    InnerMtu = "inner-mtu" in Peers,
    /// Packets do not wait on the path while there is traffic.
    PathQueue = "path-queue" in Peers,
    /// Few packets are lost on the path to the peer.
    PathLoss = "path-loss" in Peers,
}

/// What one check found of one thing.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Finding {
    pub check: Check,
    /// What was looked at: a file, a parameter of the kernel, a peer's address.
    pub subject: String,
    /// What the check found, in words.
    pub value: String,
    pub severity: Severity,
    /// What follows from it; empty where nothing does.
    pub problem: String,
    /// What to do: a command or a line of the configuration; empty where nothing needs to be done.
    pub remedy: String,
}

impl Finding {
    /// All is well with `subject`, which is `value`, unless a verdict follows.
    fn ok(check: Check, subject: impl Into<String>, value: impl Into<String>) -> Self {
        let (problem, remedy) = (String::new(), String::new());
        Self { check, subject: subject.into(), value: value.into(), severity: Severity::Ok, problem, remedy }
    }

    /// The same finding, with what is wrong and what to do.
    fn but(self, severity: Severity, problem: impl Into<String>, remedy: impl Into<String>) -> Self {
        Self { severity, problem: problem.into(), remedy: remedy.into(), ..self }
    }

    fn note(self, problem: impl Into<String>, remedy: impl Into<String>) -> Self {
        self.but(Severity::Note, problem, remedy)
    }

    fn warning(self, problem: impl Into<String>, remedy: impl Into<String>) -> Self {
        self.but(Severity::Warning, problem, remedy)
    }

    fn error(self, problem: impl Into<String>, remedy: impl Into<String>) -> Self {
        self.but(Severity::Error, problem, remedy)
    }

    /// A note if it `applies`; of several verdicts in a row, the first that applies holds.
    fn note_if(self, applies: bool, problem: impl Into<String>, remedy: impl Into<String>) -> Self {
        if applies && self.severity == Severity::Ok { self.note(problem, remedy) } else { self }
    }

    fn warning_if(self, applies: bool, problem: impl Into<String>, remedy: impl Into<String>) -> Self {
        if applies && self.severity == Severity::Ok { self.warning(problem, remedy) } else { self }
    }

    fn error_if(self, applies: bool, problem: impl Into<String>, remedy: impl Into<String>) -> Self {
        if applies && self.severity == Severity::Ok { self.error(problem, remedy) } else { self }
    }
}

impl fmt::Display for Finding {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(formatter, "{}: {}: {}", self.check.id(), self.subject, self.value)
    }
}

/// What follows from the facts, in the order of [`Check::ALL`]. Without a configuration only the host is looked at.
#[must_use]
pub fn examine(facts: &Facts, config: Option<&Config>) -> Vec<Finding> {
    let mut findings = [
        files::configuration(facts),
        kernel::checks(facts, config),
        limits::checks(facts, config),
        network::host(facts, config),
    ]
    .concat();
    if let Some(config) = config {
        findings.extend([files::state_folder(facts, config), files::control_folder(facts, config)]);
        findings.extend(files::daemon(facts));
        findings.extend(network::checks(facts, config));
        findings.extend(web::checks(facts, config));
        findings.extend(config.tun.iter().flat_map(|tun| tun::checks(facts, config, tun)));
        findings.extend(config.tun.iter().flat_map(|tun| routing::checks(facts, config, tun)));
        findings.extend(peers::checks(facts, config));
        findings.extend(uplinks::checks(facts, config));
        findings.extend(programs::peers(facts));
        findings.extend(paths::checks(facts));
    }
    findings.sort_by_key(|finding| finding.check);
    findings
}
