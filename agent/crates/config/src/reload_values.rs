//! Which keys take effect when, and how their values are shown.
//!
//! Every section is taken apart without `..`: a new key does not compile until its effect is decided here.

use std::{
    fmt::Display,
    net::SocketAddr,
    path::{Path, PathBuf},
    time::Duration,
};

use crate::{
    Access, AccessMode, Config, DropPolicy, Dscp, InnerMtu, Knock, Limits, Log, LogFormat, LogLevel,
    MaxPacket, Oversize, Peer, Profile, Queue, Service, Transport, Tun,
    reload::{Change, Effect, Kind, Places, Waits},
};

/// The lines of the difference, as they are found.
#[derive(Default)]
pub(super) struct Differences(Vec<Change>);

impl Differences {
    pub(super) fn into_changes(self) -> Vec<Change> {
        self.0
    }

    pub(super) fn append(&mut self, later: Self) {
        self.0.extend(later.0);
    }

    pub(super) fn added(&mut self, what: String, description: String, effect: Effect) {
        self.0.push(Change { what, kind: Kind::Added(description), effect });
    }

    pub(super) fn removed(&mut self, what: String, description: String, effect: Effect) {
        self.0.push(Change { what, kind: Kind::Removed(description), effect });
    }

    /// Records a key whose value is another one.
    pub(super) fn key(&mut self, what: &str, effect: Effect, old: impl Into<String>, new: impl Into<String>) {
        let (old, new) = (old.into(), new.into());
        if old != new {
            self.0.push(Change { what: what.to_owned(), kind: Kind::Changed(old, new), effect });
        }
    }

    /// Records a key and returns the value that runs: the new one, or the old one until a restart. `shown` tells any two
    /// values apart.
    fn take<T: Clone>(
        &mut self,
        what: &str,
        effect: Effect,
        old: &T,
        new: T,
        shown: impl Fn(&T) -> String,
    ) -> T {
        self.key(what, effect, shown(old), shown(&new));
        runs(effect, old, new)
    }

    /// The same for a key without a default: where the file leaves it out there is no value to show.
    fn optional<T: Clone>(
        &mut self,
        what: &str,
        effect: Effect,
        old: &Option<T>,
        new: Option<T>,
        shown: impl Fn(&T) -> String,
    ) -> Option<T> {
        match (old.as_ref().map(&shown), new.as_ref().map(&shown)) {
            (None, None) => {}
            (None, Some(new)) => self.added(what.to_owned(), new, effect),
            (Some(old), None) => self.removed(what.to_owned(), old, effect),
            (Some(old), Some(new)) => self.key(what, effect, old, new),
        }
        runs(effect, old, new)
    }

    /// The same for what is shown as it displays itself.
    fn plain<T: Clone + Display>(&mut self, what: &str, effect: Effect, old: &T, new: T) -> T {
        self.take(what, effect, old, new, ToString::to_string)
    }
}

/// The value that runs: the new one, or the old one until a restart.
fn runs<T: Clone>(effect: Effect, old: &T, new: T) -> T {
    match effect {
        Effect::Now | Effect::NextConnection => new,
        Effect::Restart => old.clone(),
    }
}

/// When a value is in effect that may have to wait for another one.
pub(super) fn unless(waits: bool) -> Effect {
    if waits { Effect::Restart } else { Effect::Now }
}

// One function per section of the file.
impl Differences {
    pub(super) fn identity(
        &mut self,
        running: &Config,
        key_file: PathBuf,
        state_dir: PathBuf,
    ) -> (PathBuf, PathBuf) {
        let key_file =
            self.take("identity.key_file", Effect::Restart, &running.identity_key_file, key_file, |file| {
                path(file)
            });
        let state_dir =
            self.take("identity.state_dir", Effect::Restart, &running.state_dir, state_dir, |dir| path(dir));
        (key_file, state_dir)
    }

    pub(super) fn transport(&mut self, old: &Transport, new: Transport) -> Transport {
        const EFFECT: Effect = Effect::Restart;
        let Transport { listen, workers, pin_cpus, gso, mark, advertise, max_packet } = new;
        Transport {
            listen: self.take("transport.listen", EFFECT, &old.listen, listen, |all| list(all)),
            workers: self.plain("transport.workers", EFFECT, &old.workers, workers),
            pin_cpus: self.plain("transport.pin_cpus", EFFECT, &old.pin_cpus, pin_cpus),
            gso: self.take("transport.gso", EFFECT, &old.gso, gso, auto_or_off),
            mark: self.plain("transport.mark", EFFECT, &old.mark, mark),
            // `culvert link` alone goes by it, and reads the file by itself.
            advertise: self.optional(
                "transport.advertise",
                Effect::Now,
                &old.advertise,
                advertise,
                ToString::to_string,
            ),
            max_packet: self.take("transport.max_packet", EFFECT, &old.max_packet, max_packet, |packet| {
                match packet {
                    MaxPacket::Auto => "auto".to_owned(),
                    MaxPacket::Bytes(bytes) => bytes.to_string(),
                }
            }),
        }
    }

    pub(super) fn access(
        &mut self,
        old: &Access,
        new: Access,
        waits: &Waits,
        places: &Places,
        known: &[Service],
    ) -> Access {
        let Access { mode, services, clock_window, knock, decoy } = new;
        Access {
            mode: self.take("access.mode", unless(waits.mode), &old.mode, mode, |mode| {
                match mode {
                    AccessMode::Allowlist => "allowlist",
                    AccessMode::Open => "open",
                }
                .to_owned()
            }),
            services: self.take(
                "access.services",
                Effect::Now,
                &old.services,
                places.of(&services),
                |granted| names(granted, known),
            ),
            clock_window: self.take(
                "access.clock_window",
                Effect::Now,
                &old.clock_window,
                clock_window,
                duration,
            ),
            knock: self.take("access.knock", Effect::Restart, &old.knock, knock, |knock| {
                match knock {
                    Knock::Required => "required",
                    Knock::Off => "off",
                }
                .to_owned()
            }),
            decoy: self.optional("access.decoy", unless(waits.decoy), &old.decoy, decoy, ToString::to_string),
        }
    }

    /// A peer that kept its name `what`; both know our services by their places among `known`.
    pub(super) fn peer(
        &mut self,
        what: &str,
        old: &Peer,
        new: Peer,
        waits: &Waits,
        known: &[Service],
    ) -> Peer {
        const NEXT: Effect = Effect::NextConnection;
        let now = Effect::Now;
        let at = |key: &str| format!("{what}: {key}");
        let Peer {
            name,
            origin,
            public_keys,
            endpoints,
            lanes,
            profile,
            keepalive,
            queue,
            drop,
            quota,
            services,
            allowed_ips,
            dscp,
            congestion,
            rate,
        } = new;
        let waiting = unless(waits.allowed_ips);
        Peer {
            name,
            origin,
            public_keys: self.take(&at("public_key"), now, &old.public_keys, public_keys, |all| list(all)),
            endpoints: self.take(&at("endpoints"), now, &old.endpoints, endpoints, |all| list(all)),
            lanes: self.plain(&at("lanes"), NEXT, &old.lanes, lanes),
            profile: self.take(&at("profile"), NEXT, &old.profile, profile, |profile| {
                match profile {
                    Profile::Throughput => "throughput",
                    Profile::Latency => "latency",
                }
                .to_owned()
            }),
            // The lanes follow at once, the control connection has the interval that it began with.
            keepalive: self.take(&at("keepalive"), NEXT, &old.keepalive, keepalive, |keepalive| {
                duration(&keepalive.unwrap_or_default())
            }),
            drop: self.take(&at("drop"), now, &old.drop, drop, |drop| {
                match drop {
                    DropPolicy::Oldest => "oldest",
                    DropPolicy::Newest => "newest",
                }
                .to_owned()
            }),
            queue: self.queue(&at("queue"), &old.queue, queue),
            quota: self.plain(&at("quota"), now, &old.quota, quota),
            services: self
                .take(&at("services"), now, &old.services, services, |granted| names(granted, known)),
            allowed_ips: self
                .take(&at("allowed_ips"), waiting, &old.allowed_ips, allowed_ips, |all| list(all)),
            dscp: self.take(&at("dscp"), now, &old.dscp, dscp, |dscp| match dscp {
                Dscp::Copy => "copy".to_owned(),
                Dscp::Fixed(dscp) => dscp.to_string(),
            }),
            congestion: self.take(&at("congestion"), NEXT, &old.congestion, congestion, |congestion| {
                congestion.label().to_owned()
            }),
            rate: self.take(&at("rate"), now, &old.rate, rate, |rate| {
                rate.map_or_else(|| "none".to_owned(), bit_rate)
            }),
        }
    }

    fn queue(&mut self, what: &str, old: &Queue, new: Queue) -> Queue {
        let Queue { packets, bytes, time } = new;
        let at = |key: &str| format!("{what}.{key}");
        Queue {
            packets: self.plain(&at("packets"), Effect::Now, &old.packets, packets),
            bytes: self.take(&at("bytes"), Effect::Now, &old.bytes, bytes, size),
            time: self.take(&at("time"), Effect::Now, &old.time, time, duration),
        }
    }

    /// A service that kept its name.
    pub(super) fn service(&mut self, what: &str, old: &Service, new: &Service) {
        let Service { name: _, upstream, idle, burst, oversize: wanted, udp, tcp } = new;
        let at = |key: &str| format!("{what}: {key}");
        self.key(&at("upstream"), Effect::Now, old.upstream.to_string(), upstream.to_string());
        self.key(&at("idle"), Effect::Now, duration(&old.idle), duration(idle));
        self.key(&at("burst"), Effect::Now, old.burst.to_string(), burst.to_string());
        self.key(&at("oversize"), Effect::Now, oversize(old.oversize), oversize(*wanted));
        self.key(&at("protocol"), Effect::Now, protocol(old.udp, old.tcp), protocol(*udp, *tcp));
    }

    pub(super) fn tun(&mut self, old: Option<&Tun>, new: Option<Tun>) -> Option<Tun> {
        const EFFECT: Effect = Effect::Restart;
        match (old, new) {
            (None, None) => None,
            (None, Some(new)) => {
                self.added("tun".to_owned(), described(&new), EFFECT);
                None
            }
            (Some(old), None) => {
                self.removed("tun".to_owned(), described(old), EFFECT);
                Some(old.clone())
            }
            (Some(old), Some(new)) => {
                let Tun { name, addresses, mtu, offload, routes } = new;
                Some(Tun {
                    name: self.plain("tun.name", EFFECT, &old.name, name),
                    addresses: self.take("tun.address", EFFECT, &old.addresses, addresses, |all| list(all)),
                    mtu: self.take("tun.mtu", EFFECT, &old.mtu, mtu, |mtu| match mtu {
                        InnerMtu::Auto => "auto".to_owned(),
                        InnerMtu::Bytes(bytes) => bytes.to_string(),
                    }),
                    offload: self.take("tun.offload", EFFECT, &old.offload, offload, auto_or_off),
                    routes: self.plain("tun.routes", EFFECT, &old.routes, routes),
                })
            }
        }
    }

    pub(super) fn metrics(&mut self, old: Option<SocketAddr>, new: Option<SocketAddr>) -> Option<SocketAddr> {
        self.optional("metrics.listen", Effect::Restart, &old, new, ToString::to_string)
    }

    pub(super) fn control(&mut self, old: Option<&PathBuf>, new: Option<PathBuf>) -> Option<PathBuf> {
        self.optional("control.socket", Effect::Restart, &old.cloned(), new, |socket| path(socket))
    }

    pub(super) fn log(&mut self, old: Log, new: Log) -> Log {
        let Log { level, format } = new;
        Log {
            level: self.take("log.level", Effect::Now, &old.level, level, |level| {
                match level {
                    LogLevel::Error => "error",
                    LogLevel::Warn => "warn",
                    LogLevel::Info => "info",
                    LogLevel::Debug => "debug",
                    LogLevel::Trace => "trace",
                }
                .to_owned()
            }),
            format: self.take("log.format", Effect::Restart, &old.format, format, |format| {
                match format {
                    LogFormat::Text => "text",
                    LogFormat::Json => "json",
                }
                .to_owned()
            }),
        }
    }

    pub(super) fn limits(&mut self, old: Limits, new: Limits) -> Limits {
        let Limits {
            flows_per_peer,
            flows,
            tcp_streams_per_peer,
            tcp_streams,
            stream_bytes,
            pending_open_packets,
            receive_buffer,
            receive_rate,
            reassembly_bytes,
            queue_bytes,
            peers,
            open_peers,
            decoy_flows,
            handshakes,
        } = new;
        let now = Effect::Now;
        Limits {
            flows_per_peer: self.plain("limits.flows_per_peer", now, &old.flows_per_peer, flows_per_peer),
            flows: self.plain("limits.flows", now, &old.flows, flows),
            tcp_streams_per_peer: self.plain(
                "limits.tcp_streams_per_peer",
                now,
                &old.tcp_streams_per_peer,
                tcp_streams_per_peer,
            ),
            tcp_streams: self.plain("limits.tcp_streams", now, &old.tcp_streams, tcp_streams),
            stream_bytes: self.take("limits.stream_bytes", now, &old.stream_bytes, stream_bytes, size),
            pending_open_packets: self.plain(
                "limits.pending_open_packets",
                now,
                &old.pending_open_packets,
                pending_open_packets,
            ),
            receive_buffer: self.take(
                "limits.receive_buffer",
                Effect::Restart,
                &old.receive_buffer,
                receive_buffer,
                |buffer| buffer.as_ref().map_or_else(|| "auto".to_owned(), size),
            ),
            receive_rate: self.take(
                "limits.receive_rate",
                Effect::Restart,
                &old.receive_rate,
                receive_rate,
                size,
            ),
            reassembly_bytes: self.take(
                "limits.reassembly_bytes",
                now,
                &old.reassembly_bytes,
                reassembly_bytes,
                size,
            ),
            queue_bytes: self.take("limits.queue_bytes", now, &old.queue_bytes, queue_bytes, size),
            peers: self.plain("limits.peers", now, &old.peers, peers),
            open_peers: self.plain("limits.open_peers", now, &old.open_peers, open_peers),
            decoy_flows: self.plain("limits.decoy_flows", now, &old.decoy_flows, decoy_flows),
            handshakes: self.plain("limits.handshakes", now, &old.handshakes, handshakes),
        }
    }
}

/// `["a", "b"]`
pub(super) fn list<T: Display>(all: &[T]) -> String {
    let all: Vec<String> = all.iter().map(|one| format!("\"{one}\"")).collect();
    format!("[{}]", all.join(", "))
}

/// The services at these places.
fn names(places: &[usize], services: &[Service]) -> String {
    let names: Vec<&str> = places.iter().filter_map(|place| Some(&*services.get(*place)?.name)).collect();
    list(&names)
}

fn path(path: &Path) -> String {
    path.display().to_string()
}

fn auto_or_off(on: &bool) -> String {
    if *on { "auto" } else { "off" }.to_owned()
}

/// "20s", "1m 30s"
fn duration(duration: &Duration) -> String {
    humantime::format_duration(*duration).to_string()
}

/// "4MiB", or bytes where no unit fits.
fn size(bytes: &usize) -> String {
    let units = [(30, "GiB"), (20, "MiB"), (10, "KiB")];
    let fits = units.into_iter().find(|(bits, _)| *bytes > 0 && bytes.trailing_zeros() >= *bits);
    fits.map_or_else(|| bytes.to_string(), |(bits, unit)| format!("{}{unit}", bytes >> bits))
}

/// "48Mbit", or the smallest unit that shows it whole.
fn bit_rate(bits: u64) -> String {
    let units = [(1_000_000_000, "Gbit"), (1_000_000, "Mbit")];
    let fits = units.into_iter().find(|(unit, _)| bits.is_multiple_of(*unit));
    fits.map_or_else(|| format!("{}kbit", bits as f64 / 1e3), |(unit, name)| format!("{}{name}", bits / unit))
}

/// `service.protocol`, of which both are the default; a service with neither only keeps its place.
fn protocol(udp: bool, tcp: bool) -> String {
    match (udp, tcp) {
        (true, true) => "(both)",
        (true, false) => "udp",
        (false, true) => "tcp",
        (false, false) => "(neither)",
    }
    .to_owned()
}

fn oversize(oversize: Oversize) -> &'static str {
    match oversize {
        Oversize::Drop => "drop",
        Oversize::Fragment => "fragment",
    }
}

/// A `[tun]` in a line.
fn described(tun: &Tun) -> String {
    format!("{} with {}", tun.name, list(&tun.addresses))
}
