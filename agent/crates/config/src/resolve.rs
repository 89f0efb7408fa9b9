//! From the mirror of the file to the typed configuration: every check, each with its remedy.
//!
//! A value that is wrong is reported and replaced by its default, so that the checks go on; a draft with a problem
//! never becomes a [`Config`].

use std::{
    io,
    net::SocketAddr,
    ops::{Range, RangeInclusive},
    path::{Path, PathBuf},
    sync::Arc,
    time::Duration,
};

use gate::identity::{Endpoint, Identity};
use toml::Spanned;

use crate::{
    AccessMode, Config, Forward, Limits, Log, LogFormat, LogLevel, MAX_WORKERS, MaxPacket, Oversize, Peer,
    PeerOrigin, SOCKET_BUFFER_RANGE, Service, Transport,
    checks::{Checks, Listener, MISSING, PinnedKey},
    credential, defaults,
    field::{Amount, Field},
    file,
    peers::Around,
    problem::{ConfigProblem, ConfigProblems, Report},
    state, value,
};

/// The hello that tells a peer our services holds at most this many.
pub(super) const MAX_SERVICES: usize = 256;

/// A configuration whose problems are still being collected.
pub(super) struct Draft {
    report: Report,
    /// Of the state file, if there is one.
    state_report: Option<Report>,
    config: Config,
    key_file: Option<Range<usize>>,
    keys: Vec<PinnedKey>,
}

impl Draft {
    /// Reads and checks all of `text`, and the state file, which `read_state` reads: its text, or `None` if there is none. If
    /// `text` is no configuration at all, the state file is not read.
    pub(super) fn read(
        text: &str,
        base: &Path,
        read_state: impl FnOnce(&Path) -> Result<Option<String>, io::Error>,
    ) -> Self {
        let mut report = Report::new(text.to_owned(), None);
        let file = file::read::<file::File>(text, &file::schema(), &mut report);
        let readable = file.is_some();
        let file = file.unwrap_or_default();
        let mut checks = Checks::new(report);

        let file_identity = file.identity.unwrap_or_default();
        let names_key = file_identity.key_file.is_some();
        let key_file = checks.take("identity.key_file", file_identity.key_file);
        let state_dir = checks.take("identity.state_dir", file_identity.state_dir);
        let state_span = state_dir.as_ref().map(|state_dir| state_dir.span.clone());
        let state_dir = match state_dir.as_ref().map_or(defaults::STATE_DIR, |dir| &dir.value) {
            "" => PathBuf::new(),
            dir => base.join(dir),
        };
        let file_transport = file.transport.unwrap_or_default();
        let listens =
            file_transport.listen.as_ref().is_some_and(|l| !l.value.as_ref().is_ok_and(Vec::is_empty));
        let mut dials = !file.peer.is_empty();
        let transport = checks.transport(file_transport);
        let services = checks.services(file.service);
        let tun = file.tun.map(|tun| (tun.span(), checks.tun(tun)));
        let tunnel = tun.is_some();
        let mut peers = Vec::new();
        let mut around = Around { services: &services, listens, tunnel, origin: PeerOrigin::Config };
        checks.peers(file.peer.into_iter().enumerate(), around, &mut peers);
        around.origin = PeerOrigin::State;
        let state_file = state_dir.join(state::FILE_NAME);
        let no_state = state_dir.as_os_str().is_empty();
        // Beside a configuration of which nothing could be read, every peer of the state file would be called wrong.
        let unread = no_state || !readable;
        let state = match if unread { Ok(None) } else { read_state(&state_file) } {
            Ok(text) => text.map(|text| checks.state(text, state_file, around, &mut peers)),
            Err(cause) => {
                let problem = format!("{} cannot be read: {cause}", state_file.display());
                let remedy = "let the user that runs culvert read it, or set identity.state_dir";
                checks.report.add("identity.state_dir", state_span, problem, remedy);
                None
            }
        };
        dials |= state.is_some();
        let (mut state_report, removed) = state.unzip();
        let removed = removed.unwrap_or_default();
        let udp = checks.forwards("udp", file.udp, &peers, &removed);
        let tcp = checks.forwards("tcp", file.tcp, &peers, &removed);
        let access = checks.access(file.access.unwrap_or_default(), &services, listens);
        let metrics = checks.metrics(file.metrics.unwrap_or_default());
        let control = checks.control(file.control.unwrap_or_default(), base);
        let log = checks.log(file.log.unwrap_or_default());
        let limits = checks.limits(file.limits.unwrap_or_default(), peers.len());
        checks.clashes();
        let tun = tun.map(|(header, tun)| {
            checks.collisions(&tun, transport.mark, state_report.as_mut());
            checks.lookups(&tun, transport.mark, &peers, state_report.as_mut());
            checks.unused(&peers, header);
            tun
        });

        let Checks { mut report, keys, closed, .. } = checks;
        // What is no TOML looks empty, and would be called incomplete.
        if readable && !names_key {
            report.add("identity.key_file", None, MISSING, "name the file that culvert keygen wrote");
        }
        if readable && !listens && !dials {
            let remedy = "add transport.listen, or a [[peer]] with endpoints";
            report.add("", None, "nothing to do: this agent neither listens nor dials", remedy);
        } else if peers.is_empty() && access.mode == AccessMode::Allowlist {
            let remedy = "add one with culvert peer add, or a [[peer]]";
            report.note("", None, "there is no peer: nobody can connect yet", remedy);
        }
        let identity_key_file = base.join(key_file.as_ref().map_or("", |key_file| &key_file.value));
        let key_file = key_file.map(|key_file| key_file.span);
        let config = Config {
            path: None,
            identity_key_file,
            state_dir,
            transport,
            access,
            peers,
            udp,
            tcp,
            services,
            tun,
            metrics,
            control,
            log,
            limits,
            closed,
            notes: Vec::new(),
        };
        Self { report, state_report, config, key_file, keys }
    }

    /// The control socket, whatever the problems are.
    pub(super) fn into_control(self) -> Option<PathBuf> {
        self.config.control
    }

    /// The configuration, or every problem that it has.
    pub(super) fn finish(self, file: Option<&Path>) -> Result<Config, ConfigProblems> {
        let (config, problems) = self.into_parts();
        if problems.is_empty() {
            return Ok(config);
        }
        Err(ConfigProblems { file: file.map(Path::to_owned), problems })
    }

    /// The same with the identity, whose problems are among those of the file.
    pub(super) fn finish_with_identity(mut self, file: &Path) -> Result<(Config, Identity), ConfigProblems> {
        let key_file = credential::of(&self.config.identity_key_file);
        let loaded = self.key_file.take().map(|span| (span, Identity::load(&key_file)));
        let identity = match loaded {
            None => None,
            Some((_, Ok(identity))) => Some(identity),
            Some((span, Err(error))) => {
                self.report.add("identity.key_file", Some(span), error.to_string(), error.remedy());
                None
            }
        };
        let own = identity.as_ref().map(Identity::public_key);
        for pinned in self.keys.iter().filter(|pinned| Some(pinned.key) == own) {
            let report = match (pinned.origin, &mut self.state_report) {
                (PeerOrigin::State, Some(report)) => report,
                (PeerOrigin::State, None) | (PeerOrigin::Config, _) => &mut self.report,
            };
            let remedy = "write the peer's key, as culvert pubkey prints it there";
            report.add(&pinned.at, Some(pinned.span.clone()), "is our own public key", remedy);
        }
        match (self.into_parts(), identity) {
            ((config, problems), Some(identity)) if problems.is_empty() => Ok((config, identity)),
            ((_, problems), _) => Err(ConfigProblems { file: Some(file.to_owned()), problems }),
        }
    }

    /// The configuration with its notes, and the problems of both files.
    fn into_parts(mut self) -> (Config, Vec<ConfigProblem>) {
        let (mut problems, mut notes) = self.report.into_parts();
        if let Some(report) = self.state_report {
            let (more_problems, more_notes) = report.into_parts();
            problems.extend(more_problems);
            notes.extend(more_notes);
        }
        self.config.notes = notes;
        (self.config, problems)
    }
}

// One function per section of the file.
impl Checks {
    fn transport(&mut self, file: file::Transport) -> Transport {
        let default = defaults::TRANSPORT;
        let mut listen = Vec::new();
        for (at, text) in self.list("transport.listen", file.listen) {
            if let Some(address) = self.read(&at, &text, value::socket_address) {
                self.listens_at(address, &at, &text.span);
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
        if let Some(first) = file.get(MAX_SERVICES) {
            let problem = format!("more than {MAX_SERVICES} services");
            self.report.add("service", Some(first.span()), problem, "split them over several agents");
        }
        let mut services: Vec<Service> = Vec::with_capacity(file.len());
        for (index, table) in file.into_iter().enumerate() {
            let at = |key: &str| format!("service[{index}].{key}");
            let (header, table) = (table.span(), table.into_inner());
            let name = self.unique_name(&at("name"), table.name, &header, |name| {
                services.iter().any(|service| *service.name == *name).then_some("an earlier one")
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
            let oversizes = [("drop", Oversize::Drop), ("fragment", Oversize::Fragment)];
            let oversize =
                self.choice(&at("oversize"), table.oversize, &oversizes).unwrap_or(defaults::OVERSIZE);
            let protocols = [("udp", (true, false)), ("tcp", (false, true))];
            let (udp, tcp) = self.choice(&at("protocol"), table.protocol, &protocols).unwrap_or((true, true));
            let upstream = upstream.unwrap_or(PLACEHOLDER);
            services.push(Service { name, upstream, idle, burst, oversize, udp, tcp });
        }
        services
    }

    fn forwards(
        &mut self,
        section: &str,
        file: Vec<Spanned<file::Forward>>,
        peers: &[Peer],
        removed: &[String],
    ) -> Vec<Forward> {
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
                if found.is_none() && removed.contains(&name.value) {
                    let problem =
                        format!("{:?} was removed with culvert peer: this port stays closed", name.value);
                    let remedy = format!("add the peer again, or remove this [[{section}]]");
                    self.report.note(&at("peer"), Some(name.span), problem, remedy);
                    self.closed.push(name.value);
                } else if found.is_none() {
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
                forwards.push(Forward { listen, peer, service: service.value.into(), open: true });
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

    fn limits(&mut self, file: file::Limits, peers: usize) -> Limits {
        // Far above what one machine's memory and ports carry; they only keep sums from overflowing.
        const FLOWS: RangeInclusive<i64> = 1..=10_000_000;
        const PEERS: RangeInclusive<i64> = 1..=1_000_000;
        // Each is a socket.
        const DECOY_FLOWS: RangeInclusive<i64> = 1..=65_535;
        // 0.8 Mbit/s to 86 Gbit/s.
        const RATE: RangeInclusive<u64> = 100 << 10..=10 << 30;
        let default = defaults::LIMITS;
        let peers_span = file.peers.as_ref().map(|field| field.span.clone());
        let limits = Limits {
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
            tcp_streams: self.number("limits.tcp_streams", file.tcp_streams, FLOWS, default.tcp_streams),
            stream_bytes: self.size(
                "limits.stream_bytes",
                file.stream_bytes,
                8 << 20..=1 << 40,
                default.stream_bytes,
            ),
            pending_open_packets: self.number(
                "limits.pending_open_packets",
                file.pending_open_packets,
                1..=4096,
                default.pending_open_packets,
            ),
            receive_buffer: self.receive_buffer(file.receive_buffer),
            receive_rate: self.size("limits.receive_rate", file.receive_rate, RATE, default.receive_rate),
            reassembly_bytes: self.size(
                "limits.reassembly_bytes",
                file.reassembly_bytes,
                128 << 10..=1 << 30,
                default.reassembly_bytes,
            ),
            queue_bytes: self.size(
                "limits.queue_bytes",
                file.queue_bytes,
                64 << 10..=1 << 40,
                default.queue_bytes,
            ),
            peers: self.number("limits.peers", file.peers, PEERS, default.peers),
            open_peers: self.number("limits.open_peers", file.open_peers, PEERS, default.open_peers),
            decoy_flows: self.number(
                "limits.decoy_flows",
                file.decoy_flows,
                DECOY_FLOWS,
                default.decoy_flows,
            ),
            handshakes: self.number("limits.handshakes", file.handshakes, PEERS, default.handshakes),
        };
        if peers > limits.peers {
            let problem = format!("there are {peers} peers, and {} are allowed", limits.peers);
            self.report.add("limits.peers", peers_span, problem, "raise it, or remove peers");
        }
        limits
    }

    fn receive_buffer(&mut self, field: Option<Field<Amount>>) -> Option<usize> {
        let at = "limits.receive_buffer";
        if let Some(Field { value: Ok(Amount::Text(text)), .. }) = &field
            && text == "auto"
        {
            self.take(at, field);
            return None;
        }
        let given = field.is_some();
        let bytes = self.size(at, field, SOCKET_BUFFER_RANGE, defaults::SOCKET_BUFFER_BYTES);
        given.then_some(bytes)
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
pub(super) const TENTH: Duration = Duration::from_millis(100);
const DAY: Duration = Duration::from_secs(24 * 60 * 60);

pub(super) fn known<'a>(remedy: &str, names: impl Iterator<Item = &'a Arc<str>>) -> String {
    let names: Vec<&str> = names.map(|name| &**name).collect();
    if names.is_empty() { remedy.to_owned() } else { format!("{remedy}, or use {}", names.join(" or ")) }
}
