//! The sections of the file that have no file of their own.

use std::{
    net::{IpAddr, Ipv4Addr, SocketAddr, SocketAddrV4},
    ops::RangeInclusive,
    path::PathBuf,
    sync::Arc,
    time::Duration,
};

use gate::{identity::Endpoint, knock::MAX_CLOCK_WINDOW, tls::KeyExchange};
use ipnet::IpNet;
use wire::repair_terms::Terms;

use crate::{
    MAX_WORKERS,
    any::prefixes,
    checks::Checks,
    kinds::{
        Given, Kind, Shown, granted, index_of, name, named, one_of, or, path, size, text, time, truth, whole,
    },
    prefix::network_prefix,
    repair::repair,
    section::{Section, Walker, section},
    spelled::spelled,
    uplink::Uplink,
    upstream::{Upstream, upstream},
    value,
};

/// A host name or an address at which an agent is reached, and a port or a range of ports.
pub(super) fn endpoint() -> Kind<Endpoint> {
    text("endpoint", value::reached, ToString::to_string)
}

/// Returns the kind of a value that is an IP address with a port.
pub(super) fn address() -> Kind<SocketAddr> {
    text("address", value::socket_address, ToString::to_string)
}

/// The name of a peer, as its index; that of a peer that was removed leads nowhere.
fn peer_name() -> Kind<usize> {
    let read = |mut given: Given<'_>| {
        let name = (named().read)(given.again())?;
        let Given { at, checks, .. } = given;
        let found = index_of(&name, &checks.peers, "peer");
        let (problem, remedy) = if found.is_ok() {
            return found;
        } else if checks.removed.contains(&name) {
            ("was removed with culvert peer", "add the peer again")
        } else if checks.rejected.contains(&name) {
            ("has a file in identity.peers_dir that is wrong", "correct the file")
        } else {
            return found;
        };
        let problem = format!("{name:?} {problem}: this port stays closed");
        checks.report.note(at, problem, format!("{remedy}, or remove this [[{}]]", at.list()));
        checks.closed.push(name.to_string());
        Ok(Forward::NOBODY)
    };
    Kind::new("name", read, |index, names| Shown::text(names.peers.get(*index)?))
}

/// Stands for an address that was reported as wrong.
pub(super) const NOWHERE: SocketAddr = SocketAddr::V4(SocketAddrV4::new(Ipv4Addr::LOCALHOST, 1));

/// `identity.state_dir`: where systemd's `StateDirectory=` puts it.
pub const STATE_DIR: &str = "/var/lib/culvert";

section! {
    #[derive(Clone)]
    pub(super) struct Identity {
        /// Our private key, PKCS#8 PEM as `culvert keygen` or `openssl genpkey -algorithm ed25519` writes it. Relative paths
        /// start at the folder of the configuration file. The agent refuses a file to which every user has access; group access
        /// (systemd credentials) is fine. If systemd hands the process a credential with the file's name
        /// (`LoadCredential=identity.key:/etc/culvert/identity.key`), the agent and `culvert check` read that instead.
        key_file: PathBuf = PathBuf::new(), path(), Restart, required "name the file that culvert keygen wrote";
        /// The key before a rotation ([operations](operations.md#a-new-key)), written and read like `identity.key_file`. Peers that
        /// know us by its public key still reach us and are reached; those that know the new one use that. `""`: there is none.
        previous_key_file: PathBuf = PathBuf::new(), path(), Restart;
        /// The directory for state that must survive a restart: `peers.toml`, which `culvert peer` writes ([The state
        /// file](#the-state-file)), and the replay log of used knocks. The agent creates it on first use, with mode 0700; its
        /// parent must exist. `""`: nothing is kept, and peers cannot be added while the agent runs.
        state_dir: PathBuf = PathBuf::from(STATE_DIR), path(), Restart;
        /// A directory of further peers ([operations](operations.md#peers-from-a-directory)): each file `*.toml` in it has the keys of
        /// one `[[peer]]`, `name` among them. A change is noticed within seconds and followed like a reload. A file that is wrong
        /// costs itself only: its peer keeps the settings that it has, if it has some. `""`: there is none.
        peers_dir: PathBuf = PathBuf::new(), path(), Now;
    }
}

section! {
    #[derive(Clone, Debug, PartialEq, Eq)]
    pub struct Transport {
        /// UDP addresses on which we listen for peers. `[::]` takes IPv6 only, here and at every other `listen`: for both families
        /// name `0.0.0.0`, too. A link-local address names its interface: `"[fe80::1%eth0]:4433"`. Left out, this agent only dials, and
        /// every peer needs endpoints.
        listen: Vec<SocketAddr> = Vec::new(), address().then(Checks::listens_at).list(), Restart;
        /// Number of worker threads, each with its own sockets; 0 is one per CPU that the process may use, at most 64. More
        /// workers than CPUs cost throughput.
        workers: u8 = 0, whole(0..=i64::from(MAX_WORKERS)), Restart;
        /// Pins each worker to one of the CPUs that the process may use, in turn. `true` steadies latency on CPUs that nothing
        /// else uses, and costs throughput on others.
        // The scheduler knows what else runs on a CPU.
        pin_cpus: bool = false, truth(), Restart;
        /// Lets the kernel cut large buffers into datagrams (UDP_SEGMENT). The agent probes it, and sends single datagrams
        /// where it fails; `"off"` costs throughput.
        gso: bool = true, one_of(), Restart;
        /// SO_MARK of the underlay sockets, for policy routing; 0 sets none. Needs CAP_NET_ADMIN.
        mark: u32 = 0, whole(0..=i64::from(u32::MAX)), Restart;
        /// The address that `culvert link` prints. Left out, it prints the listen address, if there is only one and it is not a
        /// wildcard.
        // `culvert link` alone goes by it, and reads the file by itself.
        advertise: Option<Endpoint> = None, endpoint().optional(), Now;
        /// The largest QUIC packet in bytes of UDP payload. `"auto"`: as large as path MTU discovery finds, up to what the interface on
        /// the way to the peer takes ([operations](operations.md#packet-sizes)). A number is a limit, in both directions of lanes, for
        /// paths that lie about their MTU.
        // RFC 9000 §14: a QUIC path carries at least 1200 bytes. A UDP datagram over IPv4 has at most 65507.
        max_packet: Option<u16> = None, or!(size(1200..=65_507), "auto", Option::{None, Some}), Restart;
        /// How the two ends of a handshake agree on a secret. `"hybrid"`: by X25519 and ML-KEM-768 together (X25519MLKEM768), so that
        /// recorded traffic stays secret from a quantum computer; by X25519 alone with a peer that is too old or set to `"x25519"`.
        /// `"hybrid-required"`: by both, or there is no connection. `"x25519"`: by X25519 alone, in handshakes that begin with one
        /// datagram instead of two.
        key_exchange: KeyExchange = KeyExchange::Hybrid, one_of(), NextConnection;
        /// Names this exit among those that have one identity and are behind one address
        /// ([operations](operations.md#a-fleet-behind-one-address)): every connection ID that we issue has this number in its second
        /// byte, for a balancer to go by. Packets with the number of another exit are counted (`other_exit`) and get no answer. Left
        /// out, the byte is random.
        server_id: Option<u8> = None, whole(0..=255).optional(), Restart;
        /// How long a session that we dialled stays on one local port: within this time each of its lanes and connections moves to a
        /// fresh socket, one after the other, and nothing that it carries is lost. For networks that throttle a UDP 4-tuple by its
        /// age ([operations](operations.md#ports-that-change)). Where an endpoint has a range of ports, the remote port changes, too.
        // Below 5 s the old sockets, which stay open for 3 s, would be most of all.
        hop: Option<Duration> = None, or!(
            time(Duration::from_secs(5)..=Duration::from_secs(24 * 60 * 60), Some([
                "each hop costs a handshake of a lane and a socket",
                "write \"off\" for ports that do not change",
            ])),
            "off",
            Option::{None, Some}
        ), Now;
    }
    also {
        /// The lines of this host, if it has several: `[[transport.uplink]]`. Without them packets go where the kernel sends them.
        uplinks: Vec<Uplink> = Vec::new();
    }
    const DEFAULT;
}

spelled!(impl KeyExchange);

section! {
    /// `[access]`: who may connect, and what everybody else meets.
    #[derive(Clone, Debug, PartialEq, Eq)]
    pub struct Access {
        /// `"allowlist"` admits the keys of each `[[peer]]`, here or in the state file. `"open"` admits every client that knows
        /// our public key; a listed peer keeps its own settings.
        mode: AccessMode = AccessMode::Allowlist, one_of(), Now;
        /// The services that open-mode peers may use. Left out, they get a connection and nothing else.
        services: Vec<usize> = Vec::new(), granted(), Now;
        /// The largest accepted difference between a client's clock and ours. At least 20s, because a client without an answer
        /// repeats one knock for 15 s. At most 10m: each further 256 s cost two more hash blocks for every unauthenticated
        /// datagram, keep a recorded but unused knock valid for longer, and used knocks are remembered, in memory, for as long
        /// as the longest window could accept them.
        // 15 s of a client's retransmissions, and what clocks without NTP are off by.
        clock_window: Duration = Duration::from_secs(90), time(
            Duration::from_secs(20)..=MAX_CLOCK_WINDOW,
            Some(["a client repeats one proof for 15 s", "it is how long a recorded proof makes us work"]),
        ), Now;
        /// `"required"`: a client must prove in its first packet that it knows our public key. `"off"` lets any QUIC client
        /// start a handshake, for standard-mode clients on other stacks; the port then answers everybody. Refused together with
        /// `mode = "open"`, which would admit every QUIC client that finds the port.
        knock: Knock = Knock::Required, one_of(), Restart;
        /// A QUIC server that answers unauthenticated senders: we forward their datagrams to it, and its replies to them. Needs
        /// `transport.listen` and a knock, and must not be one of our own addresses. Its connection IDs must have at least 4
        /// bytes, because a sender proves its address by repeating one. Until then, and after a change of address, it gets at
        /// most 3 times the bytes that it sent. Left out, unauthenticated senders get no answer.
        decoy: Option<SocketAddr> = None, address().then(Checks::sendable).optional(), Now;
    }
    const DEFAULT;
}

spelled! {
    /// `access.mode`: whose handshake the agent completes.
    pub enum AccessMode {
        /// Only that of a known peer.
        Allowlist => "allowlist",
        /// That of everybody who knows our public key.
        Open => "open",
    }
}

spelled! {
    /// Whether a client must prove in its first packet that it knows our public key.
    pub enum Knock {
        /// Yes: any other sender is unauthenticated.
        Required => "required",
        /// No: any QUIC client may start a handshake.
        Off => "off",
    }
}

section! {
    /// `[[udp]]` or `[[tcp]]`: a local port that stands for a peer's service.
    #[derive(Clone, Debug, PartialEq, Eq)]
    pub struct Forward {
        /// The address to which applications send datagrams (`[[udp]]`) or connect (`[[tcp]]`). No two listeners of one
        /// protocol may overlap. With a range of ports, as in `"127.0.0.1:6000-6009"`, the service of each is the name below and its
        /// place in the range, from `.0` on ([operations](operations.md#where-a-service-is)).
        listen: SocketAddr = NOWHERE, address().then(Checks::listener), Now,
            required "write the local address and port";
        /// The `[[peer]]` that gets them.
        peer: usize = Self::NOBODY, peer_name(), Now, required "name a [[peer]]";
        /// The name of the service at the peer. The peer decides whether it exists and whether we may use it.
        service: Arc<str> = "".into(), name(), Now, required "name a service of that peer";
    }
    also {
        /// Whether the port is open. A forward that a reload removed keeps its place, closed.
        open: bool = true;
        /// The keys that only `[[tcp]]` has.
        tcp: TcpKeys = TcpKeys::default();
        /// The keys that only `[[udp]]` has.
        udp: UdpKeys = UdpKeys::default();
    }
}

section! {
    /// The keys of `[[udp]]` beside those of a [`Forward`].
    #[derive(Clone, Debug, PartialEq, Eq)]
    pub struct UdpKeys {
        /// Whose datagrams begin, each of them, with a header of the PROXY protocol, version 2, that says who the client is: proxies in
        /// these prefixes, such as dnsdist. Others are dropped (`no_proxy_header`), so the port is the proxies' alone
        /// ([operations](operations.md#proxy-protocol)). Answers have no header. `[]`: no header is expected.
        accept_proxy: Vec<IpNet> = Vec::new(), text("prefix", network_prefix, ToString::to_string).list(), Now;
    }
}

section! {
    /// The keys of `[[tcp]]` beside those of a [`Forward`].
    #[derive(Clone, Debug, PartialEq, Eq)]
    pub struct TcpKeys {
        /// The time without a packet after which the kernel asks whether a client is still there (TCP keepalive); three probes
        /// follow, a sixth of that time apart, but 1 to 10 s. A client that answers none is gone, after 90 s by default: its
        /// forward is reset at both ends. Where bytes wait for it, probes of its window and repetitions count instead, so a
        /// client that has stopped reading, and answers, stays. Rounded up to whole seconds. `"0s"`: a client that vanishes
        /// keeps its forward. Open forwards keep the value that they began with.
        // NATs and firewalls forget a TCP connection that is silent for some minutes, whatever RFC 5382 (REQ-5: 2 h 4 min) asks.
        keepalive: Option<Duration> = KEEPALIVE, keepalive(), Now;
        /// Whose connections begin with a header of the PROXY protocol, version 1 or 2, that says who the client is: balancers in these
        /// prefixes. The connection ends if it has none within 5 s, and if it comes from elsewhere, so the port is the balancers' alone
        /// ([operations](operations.md#proxy-protocol)). `[]`: no header is expected.
        accept_proxy: Vec<IpNet> = Vec::new(), text("prefix", network_prefix, ToString::to_string).list(), Now;
    }
}

/// The default of `tcp.keepalive` and `service.keepalive`.
const KEEPALIVE: Option<Duration> = Some(Duration::from_secs(60));

/// A time before TCP keepalive begins, from the least to the usual default that the kernel has.
fn keepalive() -> Kind<Option<Duration>> {
    or!(time(Duration::from_secs(1)..=Duration::from_secs(2 * 60 * 60), None), "0s", Option::{None, Some})
}

/// `[[udp]]`: a forward with the keys of its own.
#[derive(Default)]
pub(super) struct UdpForward(pub(super) Forward);

impl Section for UdpForward {
    fn walk(&mut self, other: &Self, walker: &mut impl Walker) {
        self.0.walk(&other.0, walker);
        self.0.udp.walk(&other.0.udp, walker);
    }
}

/// `[[tcp]]`: a forward with the keys of its own.
#[derive(Default)]
pub(super) struct TcpForward(pub(super) Forward);

impl Section for TcpForward {
    fn walk(&mut self, other: &Self, walker: &mut impl Walker) {
        self.0.walk(&other.0, walker);
        self.0.tcp.walk(&other.0.tcp, walker);
    }
}

impl Forward {
    /// The index of no peer: that of a forward that is closed.
    pub const NOBODY: usize = usize::MAX;
}

section! {
    /// `[[service]]`: a named upstream that peers may reach through us. One that a reload removed keeps its place, which is its
    /// number on the wire, and serves neither UDP nor TCP.
    #[derive(Clone, Debug, PartialEq, Eq)]
    pub struct Service {
        /// The name by which peers ask for it. Unique; at most 256 services.
        name: Arc<str> = "".into(), name(), Now, required "give it a name";
        /// Where its traffic goes: an address, a name, or for TCP the path of a stream socket. A name is looked up every 30 s and
        /// followed ([operations](operations.md#where-a-service-is)); while that fails, its last addresses stay. Where a name leads to
        /// loopback or to one of our own ports, that address is refused; `localhost` means loopback. Of a list, TCP tries one after the
        /// other within 10 s altogether, and UDP goes to the first that has an address. A service that answers UDP from another
        /// address or port than this, as TFTP does, does not work. `"any"`: it has no place of its own, no peer may use it, and
        /// `user.networks` are reached through it, as far as `service.allow` and `service.deny` say. A range of ports, as in
        /// `"10.0.0.5:6000-6009"`, makes a service of each: their names end in `.0` to `.9`, and the name without it grants all.
        upstream: Upstream = NOWHERE.into(), upstream(), Now,
            required "write an address and a port";
        /// With `upstream = "any"`: the addresses that may be reached. Left out, all public ones. Loopback, private, shared
        /// (100.64.0.0/10), link-local, multicast and IPv4-in-IPv6 addresses have to be named here, by a prefix that lies within
        /// theirs, and this host's own addresses one by one.
        allow: Vec<IpNet> = Vec::new(), prefixes("write what may be reached, or leave it out for all public addresses"), Now;
        /// With `upstream = "any"`: the addresses that may not be reached, whatever `service.allow` says.
        deny: Vec<IpNet> = Vec::new(), prefixes("write what may not be reached, or leave it out"), Now;
        /// The time without traffic after which we forget a UDP flow and close its upstream socket; a later answer is lost. An
        /// entry forgets its flows after an hour at most, whatever the exit says.
        idle: Duration = Duration::from_secs(60), time(TENTH..=Duration::from_secs(24 * 60 * 60), None), Now;
        /// Datagrams per send to the upstream. Fewer cost more CPU, up to twice as much for small datagrams, and spare an
        /// upstream with a very small socket buffer.
        // Small datagrams cost half as much in sends of 128 as in sends of 64 (`docs/decisions/0005-batches.md`); larger ones are
        // bounded by 64 KiB before that.
        burst: u16 = 128, whole(1..=128), Now;
        /// What happens to a datagram, to or from the service, that does not fit into one packet to the peer. `"drop"`: we drop
        /// it (`too_large`), and the log names the largest size that fits. `"fragment"`: it travels in several packets, up to
        /// 65,507 bytes, and the other end reassembles it, if its version knows this key. If one packet is lost, the whole
        /// datagram is (`incomplete`). The peer learns of the setting at once and does the same.
        // A datagram that is lost when one of many packets is had better be made smaller by who sends it.
        oversize: Oversize = Oversize::Drop, one_of(), Now;
        /// Repairs UDP datagrams, to and from the service, that the path loses. `"auto"`: whatever is cheaper and in time;
        /// `"retransmit"`: lost datagrams are sent again; `"fec"`: repair symbols travel beside them (forward error correction). A
        /// table says more: `{ mode = "auto", deadline = "auto", max_overhead = 0.3, order = "asap" }`. `deadline`: how long a
        /// missing datagram may still come, from the first later one: 5ms to 2s, or `"auto"`, the time of two requests on the path,
        /// which is 2.25 round trips and 20 ms, at least 100 ms and at most 400. `max_overhead`: the bytes of repair in proportion
        /// to the datagrams, up to 2; 64 KiB more may precede the datagrams. `order`: deliver what comes `"asap"`, or `"hold"` it
        /// until earlier datagrams of its flow are there or their deadline is over. Numbers take 8 bytes of each datagram, from the
        /// first one on. A lane that has carried 2,000 packets without a loss (with `"hold"`, 20,000, and in order) does without: a
        /// good path then pays nothing. They come back when it loses one (with `"hold"`, or changes the order: it then keeps it
        /// within a round trip), and for 2,000 packets after 4 s without a datagram. Repair symbols begin at a loss of 0.3 %; with
        /// `"hold"` and `"auto"` a lane's first 2,000 packets have some. Where packets queue on the path, and where repair uses up
        /// `max_overhead` and less is lost without it (a policer), nothing is repaired; with `"hold"` everything is, and in order,
        /// until that is no use because the path stays full. The peer learns of the setting and does the same, if its version knows
        /// this key.
        // 30 % are enough for a loss of 10 % without time to send anything again.
        repair: Terms = Terms::OFF, repair(), Now;
        /// As `tcp.keepalive`, for connections to the upstream: a service whose host is gone ends its forwards.
        keepalive: Option<Duration> = KEEPALIVE, keepalive(), Now;
        /// Which protocol it serves, on the upstream's port.
        protocol: Protocol = Protocol::Both, one_of(), Now;
        /// Tells the service who the client is: `"v2"` begins each connection to it, and each datagram, with a header of the PROXY
        /// protocol, version 2, which the service has to expect. A peer whose version does not tell its clients' addresses gets the
        /// header LOCAL, without addresses ([operations](operations.md#proxy-protocol)). Flows end when this changes.
        proxy_protocol: ProxyProtocol = ProxyProtocol::Off, one_of(), Now;
    }
    also {
        /// Whether it takes UDP flows: if `protocol` says so, and it was not removed.
        udp: bool = true;
        /// Whether it takes TCP forwards: likewise.
        tcp: bool = true;
    }
}

spelled! {
    /// `service.oversize`: what becomes of a datagram of the service, in either direction, that fits into no packet to the peer.
    pub enum Oversize {
        /// The datagram that fits into no packet is dropped.
        Drop => "drop",
        /// It travels in pieces, if both ends can.
        Fragment => "fragment",
    }
}

spelled! {
    /// `service.proxy_protocol`: whether a service is told who its client is.
    pub enum ProxyProtocol {
        /// The service sees this host as its client.
        Off => "off",
        /// Each connection, and each datagram, begins with a header of version 2.
        V2 => "v2",
    }
}

spelled! {
    /// `service.protocol`: which protocol a service serves.
    pub enum Protocol {
        /// The service serves UDP flows and TCP forwards.
        Both => "both",
        /// The service serves UDP flows only.
        Udp => "udp",
        /// The service serves TCP forwards only.
        Tcp => "tcp",
    }
}

section! {
    /// `[metrics]`: the admin server.
    #[derive(Clone, Debug, PartialEq, Eq)]
    pub struct Admin {
        /// Serves `/metrics`, `/healthz` and `/readyz` over HTTP, and the status page if `metrics.page` is set. Another address
        /// than loopback needs `metrics.allow` or `metrics.token_file`. Left out: no server.
        listen: Option<SocketAddr> = None, address().then(Checks::listener).optional(), Now;
        /// Serves the [status page](page.md) at `/` and the JSON of `culvert status` at `/api/status`. They name peers and
        /// their addresses.
        page: bool = false, truth(), Now;
        /// The host names under which requests without a secret are answered, besides an address, `localhost` and this host's own name:
        /// those by which Prometheus or a browser asks for it. A request under another name is refused (421), because a web site can
        /// let a name of its own lead here.
        names: Vec<String> = Vec::new(), text("host name", value::host_name, Clone::clone).list(), Now;
        /// The clients that may connect, besides this host; the connections of others are closed unanswered. Left out: all that
        /// reach the address.
        allow: Vec<IpNet> = Vec::new(),
            text("prefix", network_prefix, ToString::to_string).list().not_empty("write who may connect, or remove the key"), Now;
        /// A file with a secret: one line of 16 to 256 visible ASCII characters, closed to other users. `/metrics` and `/api/`
        /// then answer only requests with the header `Authorization: Bearer SECRET`; the page asks for it. The file is read for
        /// each of them, so a new secret needs no reload.
        token_file: PathBuf = PathBuf::new(), path(), Now;
    }
}

impl Admin {
    /// Whether the clients of other hosts can reach the server's address.
    #[must_use]
    pub fn is_remote(&self) -> bool {
        self.listen.is_some_and(|address| !address.ip().to_canonical().is_loopback())
    }

    /// Whether a request has to show the secret of `token_file`.
    #[must_use]
    pub fn has_token(&self) -> bool {
        !self.token_file.as_os_str().is_empty()
    }

    /// Whether `source` may connect, as far as its address says.
    #[must_use]
    pub fn admits(&self, source: IpAddr) -> bool {
        let source = source.to_canonical();
        self.allow.is_empty() || source.is_loopback() || self.allow.iter().any(|net| net.contains(&source))
    }

    /// Whether the status page is shown to every host that reaches its address.
    #[must_use]
    pub fn is_public(&self) -> bool {
        let all = self.allow.iter().any(|net| net.prefix_len() == 0);
        self.page && self.is_remote() && !self.has_token() && all
    }
}

section! {
    /// `[http]`: the web server that whoever names us meets.
    #[derive(Clone, Debug, PartialEq, Eq)]
    pub struct Http {
        /// The certificate and its chain, in PEM form, that a client without a knock meets if it names one of `http.names`. Relative
        /// paths start at the folder of the configuration file. Both files are read at the start, at each reload, and some seconds after
        /// they have changed; the agent's user has to be able to read them
        /// ([operations](operations.md#a-web-server-on-the-same-port)).
        certificate_file: PathBuf = PathBuf::new(), path(), NextConnection;
        /// The key of the certificate, in PEM form: ECDSA, RSA or Ed25519.
        key_file: PathBuf = PathBuf::new(), path(), NextConnection;
        /// The names (SNI) under which `transport.listen` answers as a web server, over HTTP/3. To clients that give another name, or
        /// none, it stays as silent as without this section.
        names: Vec<String> = Vec::new(), text("host name", value::host_name, Clone::clone).list(), NextConnection;
        /// TCP addresses at which the same web server answers over HTTP/2 and HTTP/1.1, under every name and none
        /// ([operations](operations.md#the-web-server-on-tcp)). Left out, there is no web server on TCP. A reload opens and closes
        /// single ones.
        listen: Vec<SocketAddr> = Vec::new(), address().then(Checks::listener).list(), Now;
        /// Whether TLS is spoken at `http.listen`, with the certificate above. `false` is for a web server or balancer in front that
        /// ends it.
        tls: bool = true, truth(), NextConnection;
        /// The prefixes from which such a server connects: of a client there, its PROXY header (version 1 or 2) or its
        /// `X-Forwarded-For` or `Forwarded` says whose request it is. They are ignored from everybody else.
        trusted: Vec<IpNet> = Vec::new(), text("prefix", network_prefix, ToString::to_string).list(), NextConnection;
        /// The web server whose answers they get, over HTTP/1.1: `"http://127.0.0.1:8080"`. It is asked for every
        /// method but CONNECT and TRACE; while it is down the answer is 502. Left out, every answer is 404.
        site: Option<Endpoint> = None, text("web server", value::site, |site| format!("http://{site}")).optional(), NextConnection;
        /// Inner addresses for users of CONNECT-IP, which get one of each family: prefixes that nobody else has, and that are routed
        /// into the TUN device ([operations](operations.md#ip-packets-of-users)). Left out, there is no CONNECT-IP.
        pool: Vec<IpNet> = Vec::new(), text("prefix", network_prefix, ToString::to_string).list(), Restart;
    }
}

/// `control.socket`: where systemd's `RuntimeDirectory=` makes a folder for it.
pub const CONTROL_SOCKET: &str = "/run/culvert/culvert.sock";

section! {
    pub(super) struct Control {
        /// The Unix socket on which `culvert peer`, `reload`, `status` and `qlog` reach the running daemon. Whoever can open it
        /// can change the peers: the daemon's user (mode 0600) and root. At the default path the agent creates a missing
        /// folder, and only warns if it cannot; elsewhere that is an error. `""`: no socket.
        socket: PathBuf = PathBuf::from(CONTROL_SOCKET), path(), Restart;
    }
}

section! {
    #[derive(Clone, Copy, Debug, PartialEq, Eq)]
    pub struct Log {
        /// The least severe level that the agent writes to standard error. `"debug"` writes per flow, `"trace"` per packet.
        level: LogLevel = LogLevel::Info, one_of(), Now;
        /// For people or for machines. An event is one line; in JSON an object with `timestamp`, `level`, `target`, `message`
        /// and the event's fields. If standard error is systemd's journal, the line begins with the priority (`<3>` … `<7>`),
        /// and text has no time of its own.
        format: LogFormat = LogFormat::Text, one_of(), Restart;
    }
    const DEFAULT;
}

spelled! {
    /// A log level, most severe first.
    pub enum LogLevel {
        /// The daemon cannot do its work.
        Error => "error",
        /// The event is worth waking someone.
        Warn => "warn",
        /// What happens once per peer, connection or change.
        Info => "info",
        /// The event happens once per flow.
        Debug => "debug",
        /// The event happens once per packet.
        Trace => "trace",
    }
}

spelled! {
    /// How a log line is written.
    pub enum LogFormat {
        /// Each event is one line for people.
        Text => "text",
        /// Each event is one JSON object.
        Json => "json",
    }
}

/// How many flows and forwards there may be: far above what one machine's memory and ports carry; it only keeps sums from
/// overflowing.
const FLOWS: RangeInclusive<i64> = 1..=10_000_000;

/// How many peers there may be, likewise.
const PEERS: RangeInclusive<i64> = 1..=1_000_000;

section! {
    /// `[limits]`: hard ceilings, so that memory is bounded whatever arrives.
    #[derive(Clone, Copy, Debug, PartialEq, Eq)]
    pub struct Limits {
        /// Flows of one peer, both directions together. A peer may open a fifth of them a second, or 2,000 if that is more.
        // About what the ports of one source address allow.
        flows_per_peer: usize = 25_000, whole(FLOWS), Now;
        /// Flows of all peers together. An eighth is reserved, in equal parts for each peer.
        flows: usize = 50_000, whole(FLOWS), Now;
        /// Concurrent TCP connections of one peer. Further ones wait in the listen backlog for 5 s and are then reset.
        // More than half of the ports of one source address.
        tcp_streams_per_peer: u32 = 16_384, whole(1..=65_535), Now;
        /// Concurrent TCP connections of all peers; each takes a file descriptor.
        tcp_streams: usize = 32_768, whole(FLOWS), Now;
        /// Memory for bytes of TCP connections, of all peers together, that the destination has not read or the peer has not
        /// acknowledged. Windows grow within it as the rate and the round trip need; one stream gets a 20th (at the start of a
        /// connection), one connection to a peer a quarter. Left out, an eighth of the memory of the machine, or of the container
        /// if that has less (`memory.max`), and at most this default.
        // 32 forwards that nobody reads, or 5 Gbit/s over 100 ms.
        stream_bytes: usize = 256 << 20, size(8 << 20..=1 << 40), Now;
        /// Datagrams that one flow may hold back until its far end confirms it.
        pending_open_packets: usize = 64, whole(1..=4096), Now;
        /// The receive buffer that we request for each UDP socket. Auto is `limits.receive_rate` times the longest
        /// `peer.queue.time` of the file: 4 MiB with the defaults. Smaller buffers drop bursts in the kernel; larger ones add
        /// latency under overload. Above net.core.rmem_max it needs CAP_NET_ADMIN.
        receive_buffer: Option<usize> = None, or!(size(SOCKET_BUFFER_RANGE), "auto", Option::{None, Some}), Restart;
        /// The rate that a socket buffer absorbs for `peer.queue.time` while its worker is busy elsewhere, in single datagrams
        /// of 1150 bytes; it absorbs more of datagrams that GRO joins.
        // 0.8 Mbit/s to 86 Gbit/s.
        receive_rate: usize = 40 << 20, size(100 << 10..=10 << 30), Restart;
        /// Memory for incomplete datagrams of one peer at one worker (`service.oversize`), and a 64th of that of all peers. Beyond
        /// it the oldest of that peer are dropped (`incomplete`). A piece waits for the others for a second at most.
        // 15 of the largest datagrams with pieces missing, and 200 of 4 KiB.
        reassembly_bytes: usize = 1 << 20, size(128 << 10..=1 << 30), Now;
        /// Payload bytes in the queues of all peers together, at all workers. Further payloads are dropped. Left out, as
        /// `limits.stream_bytes`.
        // The queues of 64 peers that all stall at once, or a third of a second at 6 Gbit/s.
        queue_bytes: usize = 256 << 20, size(64 << 10..=1 << 40), Now;
        /// Memory for payloads that are kept or held for repair, of all peers together; one peer may have a quarter of it. Beyond
        /// it payloads are not repaired. Left out, half of what `limits.stream_bytes` is then.
        // 500 Mbit/s over 300 ms are 19 MB at each end.
        repair_bytes: usize = 128 << 20, size(1 << 20..=1 << 40), Now;
        /// Peers of the configuration and the state file together.
        peers: usize = 1000, whole(PEERS), Now;
        /// Concurrent open-mode peers.
        open_peers: usize = 256, whole(PEERS), Now;
        /// Concurrent flows of unauthenticated senders to the decoy; each needs a socket. Senders that never answered the decoy
        /// give way first, then the one that was silent for longest. One source prefix (an IPv4 /24, an IPv6 /56) has an eighth
        /// of them at most, or 16.
        decoy_flows: usize = 4096, whole(1..=65_535), Now;
        /// Incomplete inbound handshakes, at all workers together; each worker has its share. A known peer that has none may
        /// always begin one.
        handshakes: usize = 256, whole(PEERS), Now;
    }
    const DEFAULT;
}

impl Limits {
    /// The memory of which the three pools have all that they have by default: each an eighth of it, and that of repair a sixteenth. The
    /// rest is for what an agent has beside them, for the kernel's buffers, and for others.
    const WHOLE: u64 = 2 << 30;

    /// The least that `limits.stream_bytes` and `limits.queue_bytes`, and half of it that `limits.repair_bytes` is by itself.
    const LEAST_POOL: usize = 8 << 20;

    /// Brings the pools that are not `set` down to what `memory` bytes of the machine or the container can have.
    pub(super) fn fit(&mut self, memory: u64, set: impl Fn(&str) -> bool) {
        let fitting = |usual: usize, least: usize| {
            let share = usual as u128 * u128::from(memory.min(Self::WHOLE)) / u128::from(Self::WHOLE);
            // Whole MiB.
            usize::try_from(share >> 20 << 20).unwrap_or(usual).max(least)
        };
        let Self { stream_bytes, queue_bytes, repair_bytes, .. } = Self::DEFAULT;
        for (key, pool, usual, least) in [
            ("stream_bytes", &mut self.stream_bytes, stream_bytes, Self::LEAST_POOL),
            ("queue_bytes", &mut self.queue_bytes, queue_bytes, Self::LEAST_POOL),
            ("repair_bytes", &mut self.repair_bytes, repair_bytes, Self::LEAST_POOL / 2),
        ] {
            if !set(key) {
                *pool = fitting(usual, least);
            }
        }
    }

    /// The bytes that the pools may have together.
    #[must_use]
    pub fn pool_bytes(&self) -> u64 {
        [self.stream_bytes, self.queue_bytes, self.repair_bytes].iter().map(|bytes| *bytes as u64).sum()
    }
}

/// The least and the most that sockets may be told to ask for, in bytes.
const SOCKET_BUFFER_RANGE: RangeInclusive<u64> = 64 << 10..=1 << 30;

/// What comes within `time` at `rate` bytes a second, in bytes.
pub(super) const fn socket_buffer_bytes(rate: usize, time: Duration) -> usize {
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

/// Shorter, and timers would cost more than what they guard.
pub(super) const TENTH: Duration = Duration::from_millis(100);
