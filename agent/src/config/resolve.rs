//! From the mirror of the file to the typed configuration: every check, each with its remedy.
//!
//! A value that is wrong is reported and replaced by its default, so that the checks go on; a draft with a problem
//! never becomes a [`Config`].

use std::{
    net::SocketAddr,
    ops::{Range, RangeInclusive},
    path::Path,
    sync::Arc,
    time::Duration,
};

use toml::Spanned;

use super::{
    Access, Config, DropPolicy, Forward, Limits, Log, LogFormat, LogLevel, MAX_WORKERS, MaxPacket, Peer,
    Profile, Queue, Service, Transport,
    checks::{At, Checks, Listener, MISSING, PinnedKey},
    defaults,
    file::{self, Amount, Field, OneOrMany},
    problem::{ConfigProblems, Report},
    value,
};
use crate::identity::{Endpoint, Identity, PublicKey};

/// A configuration whose problems are still being collected.
pub(super) struct Draft<'t> {
    report: Report<'t>,
    config: Config,
    key_file: Option<Range<usize>>,
    keys: Vec<PinnedKey>,
}

impl<'t> Draft<'t> {
    /// Reads and checks all of `text`.
    pub(super) fn read(text: &'t str, base: &Path) -> Self {
        let mut report = Report::new(text);
        let file = file::read(text, &mut report);
        let readable = file.is_some();
        let file = file.unwrap_or_default();
        let mut checks =
            Checks { report, keys: Vec::new(), udp_listeners: Vec::new(), tcp_listeners: Vec::new() };

        let key_file = file.identity.unwrap_or_default().key_file;
        let names_key = key_file.is_some();
        let key_file = checks.take("identity.key_file", key_file);
        let file_transport = file.transport.unwrap_or_default();
        let listens =
            file_transport.listen.as_ref().is_some_and(|l| !l.value.as_ref().is_ok_and(Vec::is_empty));
        let dials = !file.peer.is_empty();
        let transport = checks.transport(file_transport);
        let access = checks.access(file.access.unwrap_or_default());
        let services = checks.services(file.service);
        let peers = checks.peers(file.peer, &services, listens);
        let udp = checks.forwards("udp", file.udp, &peers);
        let tcp = checks.forwards("tcp", file.tcp, &peers);
        let metrics = checks.metrics(file.metrics.unwrap_or_default());
        let log = checks.log(file.log.unwrap_or_default());
        let limits = checks.limits(file.limits.unwrap_or_default());
        checks.clashes();

        let Checks { mut report, keys, .. } = checks;
        // What is no TOML looks empty, and would be called incomplete.
        if readable && !names_key {
            report.add("identity.key_file", None, MISSING, "name the file that culvert keygen wrote");
        }
        if readable && !listens && !dials {
            let remedy = "add transport.listen, or a [[peer]] with endpoints";
            report.add("", None, "nothing to do: this agent neither listens nor dials", remedy);
        }
        let identity_key_file = base.join(key_file.as_ref().map_or("", |key_file| &key_file.value));
        let key_file = key_file.map(|key_file| key_file.span);
        let config =
            Config { identity_key_file, transport, access, peers, udp, tcp, services, metrics, log, limits };
        Self { report, config, key_file, keys }
    }

    /// The configuration, or every problem that it has.
    pub(super) fn finish(self, file: Option<&Path>) -> Result<Config, ConfigProblems> {
        if self.report.is_empty() { Ok(self.config) } else { Err(self.report.into_problems(file)) }
    }

    /// The same with the identity, whose problems are among those of the file.
    pub(super) fn finish_with_identity(mut self, file: &Path) -> Result<(Config, Identity), ConfigProblems> {
        let Some(key_file) = self.key_file.take() else {
            return Err(self.report.into_problems(Some(file)));
        };
        let identity = match Identity::load(&self.config.identity_key_file) {
            Ok(identity) => identity,
            Err(error) => {
                self.report.add("identity.key_file", Some(key_file), error.to_string(), error.remedy());
                return Err(self.report.into_problems(Some(file)));
            }
        };
        for pinned in self.keys.iter().filter(|pinned| pinned.key == identity.public_key()) {
            let remedy = "write the peer's key, as culvert pubkey prints it there";
            self.report.add(&pinned.at, Some(pinned.span.clone()), "is our own public key", remedy);
        }
        Ok((self.finish(Some(file))?, identity))
    }
}

// One function per section of the file.
impl Checks<'_> {
    fn transport(&mut self, file: file::Transport) -> Transport {
        let default = defaults::TRANSPORT;
        let mut listen = Vec::new();
        for (at, text) in self.list("transport.listen", file.listen) {
            if let Some(address) = self.read(&at, &text, value::socket_address) {
                self.udp_listeners.push(Listener { address, at, span: text.span });
                listen.push(address);
            }
        }
        let gso = [("auto", true), ("off", false)];
        let mark = 0..=i64::from(u32::MAX);
        let workers = 0..=i64::from(MAX_WORKERS);
        Transport {
            listen,
            workers: self.number("transport.workers", file.workers, workers, default.workers),
            pin_cpus: self
                .take("transport.pin_cpus", file.pin_cpus)
                .map_or(default.pin_cpus, |pin| pin.value),
            gso: self.choice("transport.gso", file.gso, &gso).unwrap_or(default.gso),
            mark: self.number("transport.mark", file.mark, mark, default.mark),
            advertise: self.take("transport.advertise", file.advertise).and_then(|text| {
                self.parse::<Endpoint>(
                    "transport.advertise",
                    &text,
                    "write host:port, as in \"gw.example.net:4433\"",
                )
            }),
            max_packet: self.max_packet(file.max_packet).unwrap_or(default.max_packet),
        }
    }

    fn access(&mut self, file: file::Access) -> Access {
        let at = "access.decoy";
        let Some(text) = self.take(at, file.decoy) else { return defaults::ACCESS };
        let decoy = self.read(at, &text, value::socket_address);
        if decoy.is_some_and(|address| address.port() == 0 || address.ip().is_unspecified()) {
            let remedy = "write where the decoy listens, as in \"127.0.0.1:8443\"";
            self.report.add(at, Some(text.span), "cannot be sent to", remedy);
        }
        Access { decoy }
    }

    fn max_packet(&mut self, field: Option<Field<Amount>>) -> Option<MaxPacket> {
        // RFC 9000 §14: a QUIC path carries at least 1200 bytes. 9000 is the usual jumbo frame.
        const BYTES: RangeInclusive<u16> = 1200..=9000;
        let at = "transport.max_packet";
        let amount = self.take(at, field)?;
        let bytes = match amount.value {
            Amount::Text(text) if text == "auto" => return Some(MaxPacket::Auto),
            Amount::Text(text) => value::size(&text).ok().and_then(|bytes| u16::try_from(bytes).ok()),
            Amount::Number(bytes) => u16::try_from(bytes).ok(),
        };
        match bytes {
            Some(bytes) if BYTES.contains(&bytes) => Some(MaxPacket::Bytes(bytes)),
            Some(_) | None => {
                let remedy = "write \"auto\", or bytes from 1200 to 9000";
                self.report.add(at, Some(amount.span), "is not a packet size", remedy);
                None
            }
        }
    }

    fn services(&mut self, file: Vec<Spanned<file::Service>>) -> Vec<Service> {
        // The hello that tells a peer our services holds at most this many.
        const MAX_SERVICES: usize = 256;
        if let Some(first) = file.get(MAX_SERVICES) {
            let problem = format!("more than {MAX_SERVICES} services");
            self.report.add("service", Some(first.span()), problem, "split them over several agents");
        }
        let mut services: Vec<Service> = Vec::with_capacity(file.len());
        for (index, table) in file.into_iter().enumerate() {
            let at = |key: &str| format!("service[{index}].{key}");
            let (header, table) = (table.span(), table.into_inner());
            let name = self.unique_name(&at("name"), table.name, &header, |name| {
                services.iter().any(|service| *service.name == *name)
            });
            let upstream =
                self.require(&at("upstream"), table.upstream, &header, "write an address and a port");
            let upstream = upstream.and_then(|text| {
                let address = self.read(&at("upstream"), &text, value::socket_address)?;
                if address.port() == 0 || address.ip().is_unspecified() {
                    let remedy = "write where the service listens, as in \"127.0.0.1:53\"";
                    self.report.add(&at("upstream"), Some(text.span), "cannot be sent to", remedy);
                }
                Some(address)
            });
            let idle = self.duration(&at("idle"), table.idle, TENTH..=DAY, defaults::IDLE);
            // `UDP_SEGMENT` takes at most 64 segments.
            let burst = self.number(&at("burst"), table.burst, 1..=128, defaults::BURST);
            let protocols = [("udp", (true, false)), ("tcp", (false, true))];
            let (udp, tcp) = self.choice(&at("protocol"), table.protocol, &protocols).unwrap_or((true, true));
            let upstream = upstream.unwrap_or(PLACEHOLDER);
            services.push(Service { name, upstream, idle, burst, udp, tcp });
        }
        services
    }

    fn peers(&mut self, file: Vec<Spanned<file::Peer>>, services: &[Service], listens: bool) -> Vec<Peer> {
        let mut peers: Vec<Peer> = Vec::with_capacity(file.len());
        for (index, table) in file.into_iter().enumerate() {
            let at = |key: &str| format!("peer[{index}].{key}");
            let (header, table) = (table.span(), table.into_inner());
            let name = self.unique_name(&at("name"), table.name, &header, |name| {
                peers.iter().any(|peer| *peer.name == *name)
            });
            let public_keys = self.public_keys(&at("public_key"), table.public_key, &header);
            let dials = table.endpoints.is_some();
            let endpoints = self.endpoints(&at("endpoints"), table.endpoints);
            if !listens && !dials {
                let remedy = "add endpoints, or transport.listen so that it can dial us";
                let problem = "missing, and nobody can dial us either: this peer can never be connected";
                self.report.add(&at("endpoints"), Some(header), problem, remedy);
            }
            let lanes = self.number(&at("lanes"), table.lanes, 0..=64, defaults::LANES);
            let keepalive = self.keepalive(&at("keepalive"), table.keepalive);
            let queue = self.queue(&at("queue"), table.queue.unwrap_or_default());
            let profiles = [("throughput", Profile::Throughput), ("latency", Profile::Latency)];
            let profile = self.choice(&at("profile"), table.profile, &profiles).unwrap_or(defaults::PROFILE);
            let policies = [("oldest", DropPolicy::Oldest), ("newest", DropPolicy::Newest)];
            let drop = self.choice(&at("drop"), table.drop, &policies).unwrap_or(defaults::DROP);
            let quota = self.quota(&at("quota"), table.quota);
            let services = self.granted(&at("services"), table.services, services);
            peers.push(Peer {
                name,
                public_keys,
                endpoints,
                lanes,
                profile,
                keepalive,
                queue,
                drop,
                quota,
                services,
            });
        }
        peers
    }

    fn public_keys(
        &mut self,
        at: &str,
        field: Option<Field<OneOrMany>>,
        header: &Range<usize>,
    ) -> Vec<PublicKey> {
        const REMEDY: &str = "write what culvert pubkey prints at that peer";
        let Some(field) = self.require(at, field, header, REMEDY) else { return Vec::new() };
        let texts = match field.value {
            OneOrMany::One(value) => vec![(at.to_owned(), At { value, span: field.span })],
            OneOrMany::Many(list) if list.is_empty() => {
                self.report.add(at, Some(field.span), "is an empty list", REMEDY);
                return Vec::new();
            }
            OneOrMany::Many(list) => self.elements(at, list),
        };
        let mut keys = Vec::with_capacity(texts.len());
        for (at, text) in texts {
            let Some(key) = self.parse::<PublicKey>(&at, &text, REMEDY) else { continue };
            if let Some(first) = self.keys.iter().find(|pinned| pinned.key == key) {
                let problem = format!("is the same key as {}", first.at);
                self.report.add(&at, Some(text.span), problem, "each peer has a key of its own: remove one");
                continue;
            }
            self.keys.push(PinnedKey { key, at, span: text.span });
            keys.push(key);
        }
        keys
    }

    fn endpoints(&mut self, at: &str, field: Option<Field<Vec<Field<String>>>>) -> Vec<Endpoint> {
        const REMEDY: &str = "write host:port, as in \"exit.example.net:4433\"";
        if let Some(Field { span, value: Ok(list) }) = &field
            && list.is_empty()
        {
            let remedy = "write host:port, or leave the key out: then the peer dials us";
            self.report.add(at, Some(span.clone()), "is an empty list", remedy);
        }
        let texts = self.list(at, field);
        texts.into_iter().filter_map(|(at, text)| self.parse(&at, &text, REMEDY)).collect()
    }

    fn keepalive(&mut self, at: &str, field: Option<Field<String>>) -> Option<Duration> {
        let Some(text) = self.take(at, field) else { return defaults::KEEPALIVE };
        let keepalive = self.read(at, &text, value::duration)?;
        // A connection that is silent for 30 s is closed, so a longer keepalive would not keep it alive.
        let useful = TENTH..=Duration::from_secs(25);
        if !keepalive.is_zero() && !useful.contains(&keepalive) {
            let problem = format!("{:?} is out of range", text.value);
            self.report.add(at, Some(text.span), problem, "write \"100ms\" to \"25s\", or \"0s\" for none");
        }
        (!keepalive.is_zero()).then_some(keepalive)
    }

    fn queue(&mut self, at: &str, file: file::Queue) -> Queue {
        let default = defaults::QUEUE;
        let at = |key: &str| format!("{at}.{key}");
        Queue {
            packets: self.number(&at("packets"), file.packets, 1..=1 << 20, default.packets),
            // The largest UDP payload must fit.
            bytes: self.size(&at("bytes"), file.bytes, 64 << 10..=1 << 30, default.bytes),
            time: self.duration(
                &at("time"),
                file.time,
                Duration::from_millis(1)..=Duration::from_secs(10),
                default.time,
            ),
        }
    }

    fn quota(&mut self, at: &str, field: Option<Field<f64>>) -> f64 {
        let Some(quota) = self.take(at, field) else { return defaults::QUOTA };
        if !(quota.value > 0.0 && quota.value <= 1.0) {
            let problem = format!("{} is not a share", quota.value);
            self.report.add(at, Some(quota.span), problem, "write a number above 0 and at most 1");
        }
        quota.value
    }

    /// The indices of the services that a peer may use.
    fn granted(
        &mut self,
        at: &str,
        field: Option<Field<Vec<Field<String>>>>,
        services: &[Service],
    ) -> Vec<usize> {
        let mut granted = Vec::new();
        for (at, name) in self.list(at, field) {
            match services.iter().position(|service| *service.name == *name.value) {
                Some(index) if granted.contains(&index) => {
                    self.report.add(&at, Some(name.span), "is named twice", "remove one");
                }
                Some(index) => granted.push(index),
                None => {
                    let problem = format!("no [[service]] is named {:?}", name.value);
                    let remedy = known("add that [[service]]", services.iter().map(|service| &service.name));
                    self.report.add(&at, Some(name.span), problem, remedy);
                }
            }
        }
        granted
    }

    fn forwards(&mut self, section: &str, file: Vec<Spanned<file::Forward>>, peers: &[Peer]) -> Vec<Forward> {
        let mut forwards = Vec::with_capacity(file.len());
        for (index, table) in file.into_iter().enumerate() {
            let at = |key: &str| format!("{section}[{index}].{key}");
            let (header, table) = (table.span(), table.into_inner());
            let listen =
                self.require(&at("listen"), table.listen, &header, "write the local address and port");
            let listen = listen.and_then(|text| {
                let address = self.read(&at("listen"), &text, value::socket_address)?;
                let listeners =
                    if section == "udp" { &mut self.udp_listeners } else { &mut self.tcp_listeners };
                listeners.push(Listener { address, at: at("listen"), span: text.span });
                Some(address)
            });
            let peer = self.require(&at("peer"), table.peer, &header, "name a [[peer]]").and_then(|name| {
                let found = peers.iter().position(|peer| *peer.name == *name.value);
                if found.is_none() {
                    let problem = format!("no [[peer]] is named {:?}", name.value);
                    let remedy = known("add that [[peer]]", peers.iter().map(|peer| &peer.name));
                    self.report.add(&at("peer"), Some(name.span), problem, remedy);
                }
                found
            });
            let service = self.require(&at("service"), table.service, &header, "name a service of that peer");
            let service = service.inspect(|name| {
                self.read(&at("service"), name, value::check_name);
            });
            if let (Some(listen), Some(peer), Some(service)) = (listen, peer, service) {
                forwards.push(Forward { listen, peer, service: service.value.into() });
            }
        }
        forwards
    }

    fn metrics(&mut self, file: file::Metrics) -> Option<SocketAddr> {
        let at = "metrics.listen";
        let text = self.take(at, file.listen)?;
        let address = self.read(at, &text, value::socket_address)?;
        self.tcp_listeners.push(Listener { address, at: at.to_owned(), span: text.span });
        Some(address)
    }

    fn log(&mut self, file: file::Log) -> Log {
        let levels = [
            ("error", LogLevel::Error),
            ("warn", LogLevel::Warn),
            ("info", LogLevel::Info),
            ("debug", LogLevel::Debug),
            ("trace", LogLevel::Trace),
        ];
        let formats = [("text", LogFormat::Text), ("json", LogFormat::Json)];
        Log {
            level: self.choice("log.level", file.level, &levels).unwrap_or(defaults::LOG.level),
            format: self.choice("log.format", file.format, &formats).unwrap_or(defaults::LOG.format),
        }
    }

    fn limits(&mut self, file: file::Limits) -> Limits {
        // Far above what one machine's memory and ports carry; they only keep sums from overflowing.
        const FLOWS: RangeInclusive<i64> = 1..=10_000_000;
        let default = defaults::LIMITS;
        Limits {
            flows_per_peer: self.number(
                "limits.flows_per_peer",
                file.flows_per_peer,
                FLOWS,
                default.flows_per_peer,
            ),
            flows: self.number("limits.flows", file.flows, FLOWS, default.flows),
            tcp_streams_per_peer: self.number(
                "limits.tcp_streams_per_peer",
                file.tcp_streams_per_peer,
                1..=65_535,
                default.tcp_streams_per_peer,
            ),
            pending_open_packets: self.number(
                "limits.pending_open_packets",
                file.pending_open_packets,
                1..=4096,
                default.pending_open_packets,
            ),
            receive_buffer: self.size(
                "limits.receive_buffer",
                file.receive_buffer,
                64 << 10..=1 << 30,
                default.receive_buffer,
            ),
            decoy_flows: self.number("limits.decoy_flows", file.decoy_flows, 1..=65_536, default.decoy_flows),
        }
    }

    /// Listeners of one protocol that the kernel would refuse together.
    fn clashes(&mut self) {
        for listeners in [&self.udp_listeners, &self.tcp_listeners] {
            for (index, second) in listeners.iter().enumerate() {
                let first = listeners.iter().take(index).find(|l| value::clashes(l.address, second.address));
                if let Some(first) = first {
                    let problem = format!("{} is taken by {} ({})", second.address, first.at, first.address);
                    self.report.add(&second.at, Some(second.span.clone()), problem, "choose another port");
                }
            }
        }
    }
}

/// Stands for an address that was reported as wrong.
const PLACEHOLDER: SocketAddr = SocketAddr::V4(std::net::SocketAddrV4::new(std::net::Ipv4Addr::LOCALHOST, 1));
/// Shorter, and timers would cost more than what they guard.
const TENTH: Duration = Duration::from_millis(100);
const DAY: Duration = Duration::from_secs(24 * 60 * 60);

fn known<'a>(remedy: &str, names: impl Iterator<Item = &'a Arc<str>>) -> String {
    let names: Vec<&str> = names.map(|name| &**name).collect();
    if names.is_empty() { remedy.to_owned() } else { format!("{remedy}, or use {}", names.join(" or ")) }
}
