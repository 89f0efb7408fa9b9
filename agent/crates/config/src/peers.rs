//! `[[peer]]`, wherever it stands: in the configuration, in the state file, or in a request to the running daemon.

use std::{
    mem,
    net::IpAddr,
    path::{Path, PathBuf},
    sync::Arc,
    time::Duration,
};

use gate::{
    identity::{Endpoint, PublicKey},
    preshared::{PresharedKey, PresharedKeyError},
};
use ip::map::Mapping;
use ipnet::IpNet;
use wire::messages::MAX_PRESHARED_KEYS;

use crate::{
    OPEN_LABEL, OPEN_PREFIX,
    carrier::{Carrier, Proxy, peer_endpoint, proxy},
    checks::Checks,
    credential,
    kinds::{Kind, granted, name, one_of, or, share, size, text, time, whole},
    map::mappings,
    prefix::{allowed_prefix, inner_host},
    problem::PeerOrigin,
    quota::{Quota, quota},
    redundant::{Redundant, redundant},
    repair::{PacketRepair, packet_repair},
    section::{Table, section},
    sections::TENTH,
    spelled::spelled,
    tun::Tun,
    value::{self, bad, parsed},
};

/// What to write for a key.
const KEY_REMEDY: &str = "write what culvert pubkey prints at that peer";

/// Bits a second.
pub(crate) fn rate() -> Kind<u64> {
    text("64kbit to 100Gbit", value::bit_rate, value::bit_rate_text)
}

fn key() -> Kind<PublicKey> {
    text("key", |text| parsed(text, KEY_REMEDY), ToString::to_string).then(Checks::pin)
}

/// What to write for the file of a preshared key.
const PRESHARED_REMEDY: &str = "name the file that culvert genpsk wrote, or leave the key out";

fn preshared_key_file() -> Kind<PathBuf> {
    file(PRESHARED_REMEDY)
}

fn file(remedy: &'static str) -> Kind<PathBuf> {
    let path = move |text: &str| match text {
        "" => Err(bad("is empty", remedy)),
        _ => Ok(PathBuf::from(text)),
    };
    text("path", path, |path| path.display().to_string())
}

section! {
    /// A `[[peer]]`: another agent, and what it may do here.
    #[derive(Clone, Debug, PartialEq)]
    pub struct Peer {
        /// Our name for it, in logs, metrics, `[[udp]]` and `[[tcp]]`. Unique.
        name: Arc<str> = "".into(), name(), Now, required "give it a name";
        /// The keys that it may prove. A list is for a rotation: add the new key, change the peer, remove the old key. No two
        /// peers share a key, and none has ours.
        public_keys as public_key: Vec<PublicKey> = Vec::new(),
            key().list().or_one(key()).not_empty(KEY_REMEDY), Now, required KEY_REMEDY;
        /// A file with a preshared key, which `culvert genpsk` writes: the same at both ends, closed to other users. Lanes are
        /// then safe even if TLS's key exchange is broken one day, and the two ends connect only with a key in common. A list of
        /// two files is for a [rotation](operations.md#rotate-a-preshared-key): the new key first, then the old one.
        preshared_key_files as preshared_key_file: Vec<PathBuf> = Vec::new(),
            preshared_key_file().list().or_one(preshared_key_file()).not_empty(PRESHARED_REMEDY), Now;
        /// Addresses to dial; a link-local one names its interface, as in `"[fe80::1%eth0]:4433"`. Left out, the peer dials us, which needs `transport.listen`.
        /// `"https://host/"` goes over TCP, where UDP does not pass ([carriers](carrier.md)).
        endpoints: Vec<Endpoint> = Vec::new(),
            peer_endpoint().then(Checks::dials).list()
                .not_empty("write host:port, or leave the key out: then the peer dials us"),
            Now;
        /// When the `https://` endpoints are dialled: after the others, which go over UDP, alone, or never.
        carrier: Carrier = Carrier::Fallback, one_of(), Now;
        /// The certificates of the authorities, as PEM, by which the web server at an `https://` endpoint proves its name. Left out, those of
        /// this system count. Read whenever a stream begins.
        ca_file: Option<PathBuf> = None, file("name a file of certificates, or leave the key out").optional(), Now;
        /// The proxy on the way to `https://` endpoints, which takes CONNECT: `http://host:port`, with a name and a password as in
        /// `http://user:password@host:port`. Left out, the variables `HTTPS_PROXY` and `NO_PROXY` of the process count.
        proxy: Option<Proxy> = None, proxy().optional(), Now;
        /// Parallel lanes, each on a UDP port of its own; 0 is one per worker of the side that has more, at most 8. With fewer
        /// lanes than workers, workers forward datagrams to each other.
        lanes: u8 = 0, whole(0..=64), NextConnection;
        /// How often we acknowledge this peer's packets: every 64 packets or quarter of a round trip, or every 2. `"latency"`
        /// detects losses sooner and costs a third more CPU per packet.
        // Acknowledging every second packet costs a third more CPU per packet (docs/performance.md).
        profile: Profile = Profile::Throughput, one_of(), NextConnection;
        /// The interval of packets on an idle path. They keep NAT mappings alive, and without traffic they detect that the peer
        /// was restarted. Paths are checked once a second. `"0s"` sends none: a peer behind a NAT is then unreachable until it sends.
        // Below the 30 s after which common NATs forget a UDP mapping (RFC 4787 REQ-5 allows no less than 2 minutes, home routers
        // do it all the same). A connection that is silent for 30 s is closed, so a longer one would not keep it alive.
        keepalive: Option<Duration> = Some(Duration::from_secs(20)),
            or!(time(TENTH..=Duration::from_secs(25), None), "0s", Option::{None, Some}), Now;
        /// What a full queue drops. `"oldest"`: the oldest datagrams of the flow that holds most, which keeps latency low.
        /// `"newest"`: the datagram that arrives. At a flow's quota the same holds among its own datagrams.
        // In real-time traffic the newest datagram is worth the most.
        drop: DropPolicy = DropPolicy::Oldest, one_of(), Now;
        /// The share of that queue, in datagrams and in bytes, that one flow may hold. A smaller share is fairer to the other
        /// flows; 1 lets one flow fill the queue.
        // One flow leaves half of the queue to the others.
        flow_quota: f64 = 0.5, share(), Now;
        /// Which of our services the peer may use.
        services: Vec<usize> = Vec::new(), granted(), Now;
        /// The peer's inner addresses. Packets for them go to the peer, and a packet from the peer with another source is
        /// dropped. An address without a length is that address alone. Of nested prefixes the longest decides. Peers may have
        /// the same prefix if each of them has `priority` or `weight`. Needs `[tun]`. With `tun.routing = "kernel"` they are only
        /// the sources that the peer may send from, and peers may share them.
        allowed_ips: Vec<IpNet> = Vec::new(), text("prefix", allowed_prefix, ToString::to_string).then(Checks::claims).list(), Now;
        /// Networks of the peer that have other addresses here than there, for sites whose networks overlap: `"10.1.0.0/16 =
        /// 192.168.0.0/16"` has its network 192.168.0.0/16 seen as 10.1.0.0/16 by this host and all behind it. The prefix here lies
        /// in `allowed_ips`; routes, status and captures name it. Both have the same length, each address becomes one other, and
        /// [what that does to packets](operations.md#sites-whose-networks-overlap) is little.
        map: Vec<Mapping> = Vec::new(), mappings(), Now;
        /// The peer's own addresses in the tunnel, by which routes of the kernel name it as next hop: at most one IPv4 and one IPv6
        /// address is usual. No other peer's. Used with `tun.routing = "kernel"`.
        addresses as address: Vec<IpAddr> = Vec::new(), text("address", inner_host, ToString::to_string).then(Checks::is_next_hop).list(), Now;
        /// Which of several peers with the same prefix carries it: the lowest of those that are connected and answer. A peer that
        /// comes back carries it again after `tun.hold`. 100 if only `weight` is given.
        priority: Option<u16> = None, whole(0..=65_535).optional(), Now;
        /// The share of flows, among peers with the same prefix and the same `priority`. `tun.spread` says what a flow is.
        // As much as the kernel's multipath routes take.
        weight: Option<u16> = None, whole(1..=256).optional(), Now;
        /// The DSCP (RFC 2474) of outer packets to the peer. `"copy"` takes that of the IP packet inside, or 0 if the payload
        /// is not an IP packet; a number applies to all.
        // Routers on the way treat a packet as they would treat the one inside.
        // RFC 2474 §3: six bits.
        dscp: Dscp = Dscp::Copy, or!(whole(0..=63), "copy", Dscp::{Copy, Fixed}), Now;
        /// Congestion control of TCP forwards to this peer. `"bbr"` finds the bottleneck's rate, keeps it under random loss,
        /// and leaves at least a quarter to a CUBIC flow beside it. `"cubic"` treats every loss as congestion and fills the
        /// bottleneck's buffer. `"rate"` sends at `peer.rate` regardless of loss, for a path of known rate that you share with
        /// nobody. Does not affect UDP flows and IP packets.
        // Keeps its rate where packets are lost at random, and shares a bottleneck with CUBIC
        // (`docs/decisions/0014-congestion-of-streams.md`).
        congestion: CongestionControl = CongestionControl::Bbr, one_of(), NextConnection;
        /// TCP forwards to this peer that carry next to nothing, while their path loses 0.3 % or more. `"copy"` sends each of their
        /// small packets again within 10 ms, twice from 3 % on and three times from 9 % on, so that a loss costs no round trip: at most
        /// 256 kbit/s for each connection, and a tenth of `peer.rate`. `"off"` sends each packet once.
        thin: ThinStreams = ThinStreams::Copy, one_of(), NextConnection;
        /// The limit on all that we send to the peer, in bits a second of IP packets: UDP flows, IP packets and TCP forwards
        /// together. A little less than the uplink carries moves the queue from the modem to the agent, where flows take turns
        /// and `peer.aqm` keeps it short. `"auto"` finds that rate and follows it, by what the peer reports about its lanes: for
        /// links whose rate changes or is not known. Without lanes, or with a peer that reports nothing, only `peer.rate_max`
        /// then limits the rate, and a warning says so. A number is required by `congestion = "rate"`.
        rate: Option<Rate> = None, or!(rate(), "auto", Rate::{Auto, Fixed}).optional(), Now;
        /// The lowest rate that `rate = "auto"` falls to, whatever the peer reports; 100 kbit/s if this is left out.
        rate_min: Option<u64> = None, rate().optional(), Now;
        /// The highest rate that `rate = "auto"` tries.
        rate_max: Option<u64> = None, rate().optional(), Now;
        /// The limit on what the peer sends to us, which it is told: a little less than our downlink carries. If it sends a tenth more
        /// all the same, UDP flows and IP packets beyond that are dropped (`over_rate`) and TCP forwards wait, after a second's worth at once.
        rate_receive: Option<u64> = None, rate().optional(), Now;
        /// The bytes that the peer may have carried in a month, both directions together: what its UDP flows, IP packets and TCP
        /// forwards carry, without headers of ours. A month begins at 00:00 UTC on the day `from` (1 if left out), or on its last
        /// day if it has no such day. At the quota `then` holds until the next month: `"stop"` (if left out) ends its flows and
        /// forwards and refuses more, a rate limits each direction. Counted [once a second and kept over
        /// restarts](operations.md#what-a-peer-may-use-in-a-month).
        quota: Option<Quota> = None, quota().optional(), Now;
        /// Bytes that the path adds to each IP packet, which count against `rate`: 18 for Ethernet, 26 for PPPoE over it, 22 to
        /// 48 for DSL.
        rate_overhead: u32 = 0, whole(0..=256), Now;
        /// Repairs IP packets to the peer that the path loses, as `service.repair` does datagrams of a service; in the table,
        /// `dscp` says which: `"all"`, or a list of DSCPs, as in `[46, 34]`. Each end repairs what it sends. The inner MTU
        /// becomes 15 bytes smaller.
        repair: PacketRepair = PacketRepair::OFF, packet_repair(), Now;
        /// What travels to the peer on two [lines](uplinks.md#copies-on-a-second-line) at once, if the session has several: IP packets by
        /// DSCP, as in `dscp = [46]`, and datagrams of services, as in `services = ["voice"]`, the peer's and ours. The first of both is
        /// delivered. Metered lines get no copies without `metered = true`. Each end says it of what it sends.
        redundant: Redundant = Redundant::default(), redundant(), Now;
    }
    tables {
        /// The bounds of the peer's queue, `peer.queue`.
        queue: Queue;
        /// How short the queue is kept when there is a rate.
        aqm: Aqm;
    }
    also {
        /// The kind of file that names the peer.
        origin: PeerOrigin = PeerOrigin::Config;
        /// The keys in `preshared_key_file`, in its order.
        preshared_keys: Vec<PresharedKey> = Vec::new();
    }
}

section! {
    /// The bounds of one peer's queue; the first one reached counts.
    #[derive(Clone, Copy, Debug, PartialEq, Eq)]
    pub struct Queue {
        /// Limit of the queue to this peer in datagrams, at each worker.
        packets: usize = 4096, whole(1..=1 << 20), Now;
        /// Limit of the queue to this peer in payload bytes, at each worker.
        // 100 ms at 335 Mbit/s. The largest UDP payload must fit.
        bytes: usize = 4 << 20, size(64 << 10..=1 << 30), Now;
        /// Datagrams that waited longer, in the kernel's receive buffer included, are dropped instead of sent late. While a rate
        /// limits the peer, it is at least ten times `peer.aqm.interval`.
        // Where a queue hurts more than a loss.
        time: Duration = Duration::from_millis(100), time(Duration::from_millis(1)..=Duration::from_secs(10), None), Now;
    }
    const DEFAULT;
}

section! {
    /// CoDel (RFC 8289) on the queue of a peer with a rate: what waits too long tells its sender of congestion. ECN-capable IP packets
    /// are marked, others are dropped.
    #[derive(Clone, Copy, Debug, PartialEq, Eq)]
    pub struct Aqm {
        /// How long a flow's datagrams may wait while its queue stands.
        // RFC 8289 §4.4: 5 to 10 % of a round trip.
        target: Duration = Duration::from_millis(5), time(Duration::from_micros(100)..=Duration::from_secs(1), None), Now;
        /// For how long they may wait longer before the first signal: about the longest usual round trip.
        // RFC 8289 §4.3.
        interval: Duration = Duration::from_millis(100), time(Duration::from_millis(1)..=Duration::from_secs(10), None), Now;
    }
    const DEFAULT;
}

impl Peer {
    /// Whether other peers may have prefixes of this one.
    #[must_use]
    pub fn shares_prefixes(&self) -> bool {
        self.priority.is_some() || self.weight.is_some()
    }

    /// `priority`, or what holds without it: the middle of what one would write.
    #[must_use]
    pub fn priority_or_default(&self) -> u16 {
        self.priority.unwrap_or(100)
    }

    /// `weight`, or what holds without it.
    #[must_use]
    pub fn weight_or_default(&self) -> u16 {
        self.weight.unwrap_or(1)
    }

    /// The lowest automatic rate, in bits a second.
    #[must_use]
    pub fn least_rate(&self) -> u64 {
        // A call with its headers. A higher floor would fill the queue of a slower link.
        self.rate_min.unwrap_or(100_000)
    }

    /// Reads the files of `preshared_key_file`, or the credentials of systemd that are named like them.
    ///
    /// # Errors
    /// The first file that holds no key that can be used.
    pub fn load_preshared_keys(&mut self) -> Result<(), PresharedKeyError> {
        let load = |path: &PathBuf| PresharedKey::load(&credential::of(path));
        self.preshared_keys = self.preshared_key_files.iter().map(load).collect::<Result<_, _>>()?;
        Ok(())
    }

    /// Takes the relative paths of its files from `base`.
    pub(super) fn resolve_paths(&mut self, base: &Path) {
        for file in self.preshared_key_files.iter_mut().chain(&mut self.ca_file) {
            *file = base.join(&file);
        }
    }
}

spelled! {
    /// When a peer's packets are acknowledged.
    pub enum Profile {
        /// Every 64 packets or a quarter round trip: the least work per packet.
        Throughput => "throughput",
        /// Every 2 packets: losses and round trips are seen soonest.
        Latency => "latency",
    }
}

spelled! {
    /// What a full queue drops when something arrives.
    pub enum DropPolicy {
        /// What has waited longest: right for real-time traffic.
        Oldest => "oldest",
        /// The queue drops what has just arrived.
        Newest => "newest",
    }
}

spelled! {
    /// `peer.thin`: the small packets of TCP forwards that carry little, on a path that loses.
    #[derive(Default)]
    pub enum ThinStreams {
        /// They are sent again before anybody misses them.
        #[default]
        Copy => "copy",
        /// Each is sent once.
        Off => "off",
    }
}

spelled! {
    /// `peer.congestion`: the congestion control of a peer's streams.
    #[derive(Default)]
    #[repr(u8)]
    pub enum CongestionControl {
        /// Finds the bottleneck's rate and the shortest round trip; random loss does not slow it down.
        #[default]
        Bbr => "bbr",
        /// CUBIC (RFC 9438), as quinn-proto has it: takes every loss for congestion.
        Cubic => "cubic",
        /// Sends at `peer.rate`, whatever is lost.
        Rate => "rate",
    }
}

/// `peer.rate`: the limit on all that is sent to a peer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Rate {
    /// What the path is found to take.
    Auto,
    /// Bits a second.
    Fixed(u64),
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

/// What the checks of a peer look at besides its table.
#[derive(Clone, Copy)]
pub(super) struct Around {
    /// Whether a peer can dial us.
    pub(super) listens: bool,
    /// Whether the configuration has a `[tun]` section.
    pub(super) tunnel: bool,
    /// Whether the kernel's routes choose the peer, so that prefixes are only the sources that each may send from.
    pub(super) follows_routes: bool,
}

impl Around {
    pub(super) fn new(listens: bool, tun: Option<&Tun>) -> Self {
        Self { listens, tunnel: tun.is_some(), follows_routes: tun.is_some_and(Tun::follows_routes) }
    }
}

impl Checks {
    /// Checks what the keys about the rate say together.
    fn check_rate(&mut self, table: &mut Table<'_>, peer: &Peer) {
        let is_auto = peer.rate == Some(Rate::Auto);
        if is_auto && peer.congestion == CongestionControl::Rate {
            let problem = "is \"auto\", and congestion = \"rate\" sends at a rate that is known";
            let remedy =
                "write a number and a unit, or another congestion: \"bbr\" follows the path by itself";
            self.report.add(&table.place("rate"), problem, remedy);
        }
        for key in ["rate_min", "rate_max"] {
            if !is_auto && table.has(key) {
                let remedy = "add rate = \"auto\", or leave this out";
                self.report.add(&table.place(key), "only bounds a rate that is \"auto\"", remedy);
            }
        }
        if peer.rate_max.is_some_and(|max| peer.least_rate() > max) {
            let remedy = "write a rate_min that is no higher; left out, it is 100kbit";
            self.report.add(&table.place("rate_min"), "is above rate_max", remedy);
        }
    }

    /// Reads the preshared keys of `peers`, and looks at their files of certificates.
    pub(super) fn load_preshared_keys(&mut self, peers: &mut [Peer]) {
        for (place, at) in mem::take(&mut self.preshared) {
            let Some(peer) = peers.get_mut(place) else { continue };
            if let Err(error) = peer.load_preshared_keys() {
                self.report.add(&at, error.to_string(), error.remedy());
            } else if let [new, old] = &*peer.preshared_keys
                && new == old
            {
                self.report.add(&at, "both files hold the same key", "write a new key, or name one file");
            }
        }
        self.check_ca_files(peers);
    }

    /// Checks tables of one file and appends the peers to `peers`.
    pub(super) fn read_peers(&mut self, tables: Vec<Table<'_>>, around: Around, peers: &mut Vec<Peer>) {
        for mut table in tables {
            let file = table.at.file;
            let name: Arc<str> = table.text("name").into();
            let same = |peer: &&Peer| !name.is_empty() && peer.name == name;
            let taker = peers.iter().find(same).map(|peer| match peer.origin {
                origin if origin == file => "an earlier one",
                PeerOrigin::Config => "a [[peer]] of the configuration",
                PeerOrigin::State => "a peer of the state file",
            });
            if let Some(taker) = taker {
                self.taken(&table.place("name"), &name, taker);
            }
            if *name == *OPEN_LABEL || name.starts_with(OPEN_PREFIX) {
                let problem = format!("{name:?} is kept for peers of open mode");
                self.report.add(&table.place("name"), problem, "choose another name");
            }
            self.peer = name;
            self.shares = around.follows_routes || table.has("priority") || table.has("weight");
            // A name that is wrong stays usable for the checks that follow.
            let peer = Peer { name: Arc::clone(&self.peer), origin: file, ..table.fill(self) };
            if !around.listens && !table.has("endpoints") {
                let remedy = "add endpoints, or transport.listen so that it can dial us";
                let problem = "missing, and nobody can dial us either: this peer can never be connected";
                self.report.add(&table.place("endpoints"), problem, remedy);
            }
            if !around.tunnel && table.length("allowed_ips") > Some(0) {
                let remedy = "add [tun] with an address to the configuration, or leave this out";
                let problem = "there is no [tun]: no IP packets are carried";
                self.report.add(&table.place("allowed_ips"), problem, remedy);
            }
            if peer.congestion == CongestionControl::Rate && !table.has("rate") {
                let problem = "missing, and congestion = \"rate\" sends at it";
                let remedy = "add what the path to the peer carries, as in rate = \"190Mbit\"";
                self.report.add(&table.place("rate"), problem, remedy);
            }
            self.check_rate(&mut table, &peer);
            self.check_carrier(&peer, &table.place("carrier"), table.has("endpoints"));
            self.check_proxy(&peer, &table.place("proxy"));
            self.check_map(&mut table, &peer);
            if !peer.preshared_key_files.is_empty() {
                let at = table.place("preshared_key_file");
                let files = peer.preshared_key_files.len();
                if files > MAX_PRESHARED_KEYS {
                    let remedy = "write the new key and the one before; older ones are of no use";
                    self.report.add(&at, format!("names {files} files"), remedy);
                }
                self.preshared.push((peers.len(), at));
            }
            if peer.ca_file.is_some() {
                self.ca_files.push((peers.len(), table.place("ca_file")));
            }
            self.peers.push(Arc::clone(&self.peer));
            peers.push(peer);
        }
    }
}
