//! Reading the facts: files, `/proc`, the kernel by way of `net/src/`, the control socket. Changes nothing.

use std::{
    ffi::OsStr,
    fs, io,
    net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr},
    os::unix::{ffi::OsStrExt, fs::MetadataExt},
    path::{Path, PathBuf},
    time::Duration,
};

use base::clock::{Clock as _, SystemClock};
use config::{self, Config, LoadError};
use engine::tunnel;
use gate::{identity::Identity, tls::cpu_has_aes, web::WebCertificate};
use ipnet::{IpNet, Ipv4Net, Ipv6Net};
use net::{
    folder,
    host::{self, Route},
    netlink::{DeviceRoute, Netlink, TABLE_MAIN, Which},
    process,
    tun::DRIVER,
};
use ops::control_socket::{
    client::{self, AskError},
    protocol::{Answer, Request},
    status::Scope,
};

use super::{
    dial,
    facts::{
        Access, Clock, ConfigFile, Conntrack, Daemon, Facts, Files, Found, Kernel, Limits, NamedPath,
        Network, Opened, Peer, Port, Tried, Tun, Web,
    },
    limits::wanted_buffer,
    lines, lookup, unit,
};
use crate::cli::reach::DEFAULT_CONFIG;

/// What is to be looked at.
#[derive(Clone, Debug)]
pub struct Options {
    /// The configuration file; `None`: the host alone.
    pub config: Option<PathBuf>,
    /// The rate that the buffers are to be large enough for, in bits per second.
    pub rate: Option<u64>,
    /// Whether nothing may be sent: no questions for names, no handshakes.
    pub offline: bool,
    /// How long a peer may take to answer.
    pub wait: Duration,
}

/// Reads everything; also returns the configuration, if there is a valid one.
#[must_use]
pub fn gather(options: &Options) -> (Facts, Option<Config>) {
    let (file, config, identity) = read_config(options.config.as_deref());
    let of_config = config.as_ref();
    let file_path = file.path.clone();
    let mut facts = Facts {
        service: unit::service(Path::new("/"), file.path.as_deref()),
        file,
        files: of_config.map(files).unwrap_or_default(),
        daemon: of_config.map(daemon).unwrap_or_default(),
        daemon_replaced: file_path
            .as_deref()
            .and_then(process_of)
            .is_some_and(|process| is_replaced(&process)),
        kernel: kernel(),
        limits: limits(of_config, options.rate),
        clock: Clock { unix_seconds: SystemClock.unix_seconds(), state: host::clock().ok() },
        network: Network::default(),
        web: of_config.map(|config| web(config, options.offline)).unwrap_or_default(),
        tun: of_config.and_then(|config| config.tun.as_ref()).map(tun).unwrap_or_default(),
        peers: of_config.map(|config| lookup::peers(config, options.offline)).unwrap_or_default(),
        lines: Vec::new(),
    };
    facts.lines = of_config.map(|config| lines::lines(config, &facts.peers)).unwrap_or_default();
    let ports = of_config.map(ports).unwrap_or_default();
    if let Some(config) = of_config {
        ways(&mut facts, config, identity.as_ref(), options);
    }
    facts.network = network(&facts.peers, ports, of_config);
    (facts, config)
}

/// The configuration, as far as it is valid, and the key, if all of it is.
fn read_config(path: Option<&Path>) -> (ConfigFile, Option<Config>, Option<Identity>) {
    let Some(path) = path else { return (ConfigFile::default(), None, None) };
    // So that the remedies name files that are found from anywhere.
    let path = &std::path::absolute(path).unwrap_or_else(|_| path.to_owned());
    let file = ConfigFile { path: Some(path.to_owned()), ..ConfigFile::default() };
    match Config::load(path) {
        Ok((config, identity)) => {
            (ConfigFile { notes: config.notes.clone(), ..file }, Some(config), Some(identity))
        }
        Err(ref error @ LoadError::Read { ref cause, .. }) => {
            let denied = cause.kind() == io::ErrorKind::PermissionDenied;
            (ConfigFile { unreadable: Some(error.to_string()), denied, ..file }, None, None)
        }
        Err(LoadError::Problems(problems)) => {
            // Without the key and the state file: what is right of it is looked at all the same.
            let text = fs::read_to_string(path).ok();
            let folder = path.parent().unwrap_or_else(|| Path::new(""));
            let config = text.and_then(|text| Config::parse(&text, folder).ok());
            let config = config.map(|config| Config { path: Some(path.clone()), ..config });
            (ConfigFile { problems: problems.problems, ..file }, config, None)
        }
    }
}

/// Dials the peers, or says why not.
fn ways(facts: &mut Facts, config: &Config, identity: Option<&Identity>, options: &Options) {
    let why = match (&facts.daemon, identity) {
        _ if options.offline => "--offline: nothing is sent",
        (Daemon::Running(_), _) => return,
        // It would lose its connections: there is one between two agents.
        (Daemon::Mute(_), _) => "a daemon seems to run, whose connections a handshake of ours would end",
        (Daemon::Unasked | Daemon::Absent, None) => {
            "the configuration is not valid, or its key cannot be read"
        }
        (Daemon::Unasked | Daemon::Absent, Some(identity)) => {
            let dialled = dial::dial(config, identity, &mut facts.peers, options.wait)
                .and_then(|()| dial::dial_lines(config, identity, &mut facts.lines, options.wait));
            match dialled {
                Ok(()) => return,
                Err(error) => {
                    tracing::debug!(%error, "no agent to dial with");
                    "no agent could be started to dial with"
                }
            }
        }
    };
    for peer in facts.peers.iter_mut().filter(|peer| !peer.endpoints.is_empty()) {
        peer.not_dialled = Some(why);
    }
}

fn files(config: &Config) -> Files {
    let folder = |path: &Path| path.parent().map(place).unwrap_or_default();
    Files {
        key: place(&config.identity_key_file),
        key_denied: base::files::in_time(&config.identity_key_file, base::files::open)
            .is_err_and(|error| error.kind() == io::ErrorKind::PermissionDenied),
        key_folder: folder(&config.identity_key_file),
        state: place(&config.state_dir),
        control: config.control.as_deref().map(folder).unwrap_or_default(),
    }
}

fn place(path: &Path) -> NamedPath {
    if path.as_os_str().is_empty() {
        return NamedPath::default();
    }
    NamedPath { path: path.to_owned(), found: found(path) }
}

fn found(path: &Path) -> Found {
    match fs::metadata(path) {
        Ok(there) => Found::There {
            folder: there.is_dir(),
            mode: there.mode() & 0o7777,
            owner: there.uid(),
            writable: host::may_write(path),
        },
        Err(error) if error.kind() == io::ErrorKind::NotFound => {
            Found::Missing { may_make: path.parent().is_some_and(host::may_write) }
        }
        Err(error) => Found::Hidden(error.to_string()),
    }
}

/// Asks the daemon; where it cannot be asked, looks for traces of one.
fn daemon(config: &Config) -> Daemon {
    let trace =
        || match (config.path.as_deref().and_then(process_of).is_some(), folder::is_taken(&config.state_dir))
        {
            (true, _) => Daemon::Mute("a process runs with this configuration".to_owned()),
            (false, Ok(true)) => Daemon::Mute(format!("somebody holds {}", config.state_dir.display())),
            (false, Ok(false) | Err(_)) => Daemon::Absent,
        };
    let Some(socket) = &config.control else { return trace() };
    match client::ask(socket, &Request::Status(Scope::default()), env!("CULVERT_VERSION")) {
        Ok(Answer::Status { status }) => Daemon::Running(status),
        Ok(_) => Daemon::Mute("its answer is of another kind".to_owned()),
        Err(AskError::NotRunning(_)) => trace(),
        Err(error) => Daemon::Mute(error.to_string()),
    }
}

/// The folder in `/proc` of a process `culvert run` that has this file; those of other users are not seen everywhere.
fn process_of(config: &Path) -> Option<PathBuf> {
    let ours = fs::canonicalize(config).ok()?;
    let processes = fs::read_dir("/proc").ok()?;
    processes.flatten().map(|process| process.path()).find(|process| {
        let words = fs::read(process.join("cmdline")).unwrap_or_default();
        let words: Vec<&[u8]> = words.split(|byte| *byte == 0).collect();
        let Some(file) = config_of(&words) else { return false };
        let folder = fs::read_link(process.join("cwd")).unwrap_or_default();
        fs::canonicalize(folder.join(OsStr::from_bytes(file))).is_ok_and(|theirs| theirs == ours)
    })
}

/// The configuration of a command line `… run … --config FILE`; without the option the one that `culvert run` has.
fn config_of<'a>(words: &[&'a [u8]]) -> Option<&'a [u8]> {
    let run = words.iter().position(|word| *word == b"run")?;
    let options = words[run..].iter().zip(words[run..].iter().skip(1));
    let named = options.into_iter().find_map(|(option, value)| {
        option.strip_prefix(b"--config=").or_else(|| (*option == b"--config").then_some(*value))
    });
    let program = words.first()?.rsplit(|byte| *byte == b'/').next();
    named.or_else(|| (run == 1 && program == Some(b"culvert")).then_some(DEFAULT_CONFIG.as_bytes()))
}

/// Whether the file that a process was started from is not there any more: an upgrade has put another in its place.
fn is_replaced(process: &Path) -> bool {
    fs::read_link(process.join("exe"))
        .is_ok_and(|program| program.as_os_str().as_bytes().ends_with(b" (deleted)"))
}

fn ports(config: &Config) -> Vec<Port> {
    let port = |key: &'static str, tcp: bool, address: SocketAddr| {
        let tried = if tcp { host::try_tcp(address) } else { host::try_udp(address) };
        Port { key, tcp, address, opened: opened(tried) }
    };
    let mut ports: Vec<Port> = Vec::new();
    ports.extend(config.transport.listen.iter().map(|address| port("transport.listen", false, *address)));
    for (key, tcp, list) in [("udp.listen", false, &config.udp), ("tcp.listen", true, &config.tcp)] {
        let open = list.iter().filter(|forward| forward.open);
        ports.extend(open.map(|forward| port(key, tcp, forward.listen)));
    }
    ports.extend(config.http.listen.iter().map(|address| port("http.listen", true, *address)));
    ports.extend(config.admin.listen.map(|address| port("metrics.listen", true, address)));
    ports
}

fn web(config: &Config, offline: bool) -> Web {
    const DAY: u64 = 24 * 60 * 60;
    let now = SystemClock.unix_seconds();
    let days = |certificate: &WebCertificate| certificate.expires().saturating_sub(now) / DAY;
    Web {
        certificate_days: config.certificate.as_ref().map(days),
        site: config.http.site.as_ref().filter(|_| !offline).map(super::web::ask),
    }
}

fn opened(tried: io::Result<()>) -> Opened {
    let Err(error) = tried else { return Opened::Free };
    let is = |kind| error.kind() == kind;
    if is(io::ErrorKind::AddrInUse) {
        Opened::Taken
    } else if is(io::ErrorKind::PermissionDenied) {
        Opened::Forbidden
    } else if is(io::ErrorKind::AddrNotAvailable) {
        Opened::NoAddress
    } else {
        Opened::Failed(error.to_string())
    }
}

fn tun(tun: &config::Tun) -> Tun {
    let asked = Netlink::open().and_then(|mut netlink| {
        let link = netlink.link(Which::Name(&tun.name))?;
        let routes = link.as_ref().and_then(|link| device_routes(&mut netlink, link.index).ok());
        Ok((link, routes, tunnel::before(&mut netlink, tun).map_err(|error| error.to_string())))
    });
    let (link, routes, free) =
        asked.map_or((None, None, None), |(link, routes, free)| (link, routes, Some(free)));
    let driver = host::tun_features();
    let access =
        |node: fs::Metadata| Access { mode: node.mode() & 0o7777, user: node.uid(), group: node.gid() };
    Tun {
        denied: driver.as_ref().is_err_and(|error| error.kind() == io::ErrorKind::PermissionDenied),
        node: fs::metadata(DRIVER).ok().map(access),
        driver: Some(driver.map_err(|error| error.to_string())),
        free,
        queue_packets: link.map(|link| link.queue_packets.into()),
        no_ipv6: ipv6_is_disabled(),
        routes: routes.filter(|_| tun.follows_routes()),
    }
}

/// The kernel's routes into an interface.
fn device_routes(netlink: &mut Netlink, index: u32) -> io::Result<Vec<DeviceRoute>> {
    let next_hops = netlink.next_hops()?;
    let mut routes = Vec::new();
    for family_of in [IpAddr::V4(Ipv4Addr::UNSPECIFIED), IpAddr::V6(Ipv6Addr::UNSPECIFIED)] {
        // What changes meanwhile may be missing.
        netlink.device_routes(family_of, index, &next_hops, &mut |route| routes.push(route))?;
    }
    Ok(routes)
}

fn kernel() -> Kernel {
    let tried = |tried: io::Result<bool>| -> Tried { tried.map_err(|error| error.to_string()) };
    Kernel {
        release: read("/proc/sys/kernel/osrelease").trim().to_owned(),
        segmentation: tried(host::cuts_segments()),
        receive_offload: tried(host::joins_segments()),
        takes_gro: host::takes_gro(),
        steering: tried(host::steers()),
        timestamps: tried(host::stamps()),
        aes: cpu_has_aes(),
        #[cfg(target_arch = "x86_64")]
        vector_aes: Some(std::arch::is_x86_feature_detected!("vaes")),
        #[cfg(not(target_arch = "x86_64"))]
        vector_aes: None,
    }
}

fn limits(config: Option<&Config>, rate: Option<u64>) -> Limits {
    let status = read("/proc/self/status");
    let of_status = |name: &str| status.lines().find_map(|line| line.strip_prefix(name)).unwrap_or_default();
    Limits {
        rate,
        buffers: host::buffers(wanted_buffer(config, rate)).ok(),
        rmem_max: parameter("net/core/rmem_max"),
        wmem_max: parameter("net/core/wmem_max"),
        backlog: parameter("net/core/netdev_max_backlog"),
        backlog_drops: softnet_drops(&read("/proc/net/softnet_stat")),
        udp_drops: udp_drops(&read("/proc/net/snmp"), &read("/proc/net/snmp6")),
        descriptors: host::most_descriptors().ok(),
        most_descriptors: parameter("fs/nr_open"),
        cpus: process::available_cpus(),
        cpu_quota: cpu_quota(&read("/proc/self/cgroup"), Path::new("/sys/fs/cgroup")),
        user: of_status("Uid:").split_whitespace().nth(1).and_then(|user| user.parse().ok()).unwrap_or(0),
        capabilities: u64::from_str_radix(of_status("CapEff:").trim(), 16).unwrap_or_default(),
    }
}

/// Whether new interfaces of this host have no IPv6.
pub(crate) fn ipv6_is_disabled() -> bool {
    parameter("net/ipv6/conf/default/disable_ipv6") != Some(0)
}

/// Reads a file; nothing if that fails.
fn read(path: impl AsRef<Path>) -> String {
    fs::read_to_string(path).unwrap_or_default()
}

/// Reads a number from a file of `/proc/sys`; `None` if that fails.
fn parameter(path: &str) -> Option<u64> {
    read(Path::new("/proc/sys").join(path)).trim().parse().ok()
}

/// The second column, in base 16, of each CPU.
fn softnet_drops(stat: &str) -> u64 {
    let column = |line: &str| u64::from_str_radix(line.split_whitespace().nth(1)?, 16).ok();
    stat.lines().filter_map(column).sum()
}

fn udp_drops(snmp: &str, snmp6: &str) -> u64 {
    let mut udp = snmp.lines().filter_map(|line| line.strip_prefix("Udp:"));
    let (names, values) = (udp.next().unwrap_or_default(), udp.next().unwrap_or_default());
    let mut columns = names.split_whitespace().zip(values.split_whitespace());
    let v4 = columns.find(|(name, _)| *name == "RcvbufErrors").map(|(_, value)| value);
    let v6 = snmp6.lines().find_map(|line| line.strip_prefix("Udp6RcvbufErrors"));
    [v4, v6].into_iter().flatten().filter_map(|value| value.trim().parse::<u64>().ok()).sum()
}

/// The least quota, in CPUs, of the control groups that `groups` (`/proc/self/cgroup`) names, and of those above them.
fn cpu_quota(groups: &str, root: &Path) -> Option<f64> {
    let mut least: Option<f64> = None;
    for line in groups.lines() {
        let mut parts = line.splitn(3, ':').skip(1);
        let (Some(controllers), Some(path)) = (parts.next(), parts.next()) else { continue };
        let version_2 = controllers.is_empty();
        if !version_2 && !controllers.split(',').any(|controller| controller == "cpu") {
            continue;
        }
        let top = if version_2 { root.to_owned() } else { root.join(controllers) };
        for group in Path::new(path.trim_start_matches('/')).ancestors() {
            let of_group = |name: &str| read(top.join(group).join(name));
            let text = if version_2 {
                of_group("cpu.max")
            } else {
                [of_group("cpu.cfs_quota_us"), of_group("cpu.cfs_period_us")].join(" ")
            };
            // "max" and -1 mean no limit.
            let numbers: Vec<f64> = text.split_whitespace().map_while(|word| word.parse().ok()).collect();
            if let [quota, period] = numbers[..]
                && quota > 0.0
                && period > 0.0
            {
                least = Some(least.map_or(quota / period, |least| least.min(quota / period)));
            }
        }
    }
    least
}

/// The network as a whole; the ways to `peers` are known already.
fn network(peers: &[Peer], ports: Vec<Port>, config: Option<&Config>) -> Network {
    let on = |path: &str| parameter(path).map(|value| value != 0);
    let conntrack = |name: &str| parameter(&format!("net/netfilter/nf_conntrack_{name}"));
    let table = conntrack("count").zip(conntrack("max"));
    let (rp_filter, interfaces) = links(peers, config).unwrap_or_else(|error| {
        tracing::debug!(%error, "the kernel does not list interfaces");
        (Vec::new(), Vec::new())
    });
    Network {
        ports,
        unprivileged_ports: parameter("net/ipv4/ip_unprivileged_port_start"),
        forwards_ipv4: on("net/ipv4/ip_forward"),
        sends_redirects: sends_redirects(config),
        forwards_ipv6: on("net/ipv6/conf/all/forwarding"),
        advertised: lookup::advertised(&read("/proc/net/ipv6_route"), |name| {
            parameter(&format!("net/ipv6/conf/{name}/accept_ra")) == Some(1)
        }),
        rp_filter,
        conntrack: table.map(|(count, max)| Conntrack {
            count,
            max,
            // The kernel's default where it does not say.
            udp_timeout: Duration::from_secs(conntrack("udp_timeout_stream").unwrap_or(120)),
        }),
        interfaces,
    }
}

/// Whether the kernel sends redirects into the device of the tunnel. The agent turns off those of the device that it makes.
fn sends_redirects(config: Option<&Config>) -> Option<bool> {
    let tun = config?.tun.as_ref()?;
    let of = |name: &str| parameter(&format!("net/ipv4/conf/{name}/send_redirects"));
    // Either of the two is enough.
    Some(of("all")? != 0 || of(&tun.name).unwrap_or(0) != 0)
}

type Links = (Vec<(String, u8)>, Vec<(String, bool)>);

/// The interfaces that are up with their reverse path filters, and those towards the peers with their GRO.
fn links(peers: &[Peer], config: Option<&Config>) -> io::Result<Links> {
    let mut netlink = Netlink::open()?;
    let filter = |name: &str| parameter(&format!("net/ipv4/conf/{name}/rp_filter")).unwrap_or(0);
    let mut filters = Vec::new();
    for entry in fs::read_dir("/proc/sys/net/ipv4/conf")?.flatten() {
        let name = entry.file_name().to_string_lossy().into_owned();
        let up = netlink.link(Which::Name(&name)).ok().flatten().is_some_and(|link| link.up);
        if up && name != "lo" {
            let mode = filter(&name).max(filter("all"));
            filters.push((name, u8::try_from(mode).unwrap_or(u8::MAX)));
        }
    }
    filters.sort();
    let there = netlink.addresses()?;
    let ways = peers.iter().flat_map(|peer| &peer.endpoints).flat_map(|endpoint| endpoint.ways());
    let of_way = |way: &Route| there.iter().find(|has| has.address.addr() == way.source).map(|has| has.index);
    let mut indices: Vec<u32> = ways.filter_map(of_way).collect();
    if indices.is_empty() {
        for default in [IpNet::V4(Ipv4Net::default()), IpNet::V6(Ipv6Net::default())] {
            netlink.routes(default.addr(), None, &mut |route| {
                if route.unicast && route.table == TABLE_MAIN && route.prefix == default && route.index != 0 {
                    indices.push(route.index);
                }
            })?;
        }
    }
    indices.sort_unstable();
    indices.dedup();
    let tunnel = config.and_then(|config| config.tun.as_ref());
    // Loopback needs none, and the device of the tunnel has its own check.
    let is_other = |name: &String| name != "lo" && tunnel.is_none_or(|tunnel| *tunnel.name != **name);
    let names = indices.into_iter().map(|index| netlink.name(index)).filter(is_other);
    let interfaces = names.filter_map(|name| host::interface_joins(&name).ok().map(|joins| (name, joins)));
    Ok((filters, interfaces.collect()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_kernels_tables_are_read_by_their_columns() {
        assert_eq!(softnet_drops("10054b7e 00000010 0000001e\n148c1d92 00000001 00000024\n"), 17);
        let snmp =
            "Tcp: A\nTcp: 1\nUdp: InDatagrams RcvbufErrors SndbufErrors\nUdp: 5 7 9\nUdpLite: RcvbufErrors\n";
        assert_eq!(udp_drops(snmp, "Udp6InErrors 3\nUdp6RcvbufErrors      \t4\n"), 11);
        assert_eq!(udp_drops("", ""), 0);
    }

    #[test]
    fn the_least_quota_of_the_groups_above_counts() {
        let root = tempfile::tempdir().unwrap();
        let inner = root.path().join("system.slice/culvert.service");
        fs::create_dir_all(&inner).unwrap();
        let quota = || cpu_quota("0::/system.slice/culvert.service\n", root.path());
        assert_eq!(quota(), None);
        fs::write(inner.join("cpu.max"), "max 100000\n").unwrap();
        assert_eq!(quota(), None);
        fs::write(inner.join("cpu.max"), "300000 100000\n").unwrap();
        fs::write(root.path().join("system.slice/cpu.max"), "150000 100000\n").unwrap();
        assert_eq!(quota(), Some(1.5));
        let v1 = root.path().join("cpu/box");
        fs::create_dir_all(&v1).unwrap();
        fs::write(v1.join("cpu.cfs_quota_us"), "50000\n").unwrap();
        fs::write(v1.join("cpu.cfs_period_us"), "100000\n").unwrap();
        assert_eq!(cpu_quota("4:memory:/box\n1:cpu:/box\n", root.path()), Some(0.5));
        fs::write(v1.join("cpu.cfs_quota_us"), "-1\n").unwrap();
        assert_eq!(cpu_quota("1:cpu:/box\n", root.path()), None);
    }

    #[test]
    fn a_daemon_is_found_by_its_command_line() {
        let of = |line: &str| {
            let words: Vec<&[u8]> = line.split(' ').map(str::as_bytes).collect();
            config_of(&words).map(|file| String::from_utf8_lossy(file).into_owned())
        };
        assert_eq!(of("/usr/bin/culvert run --config a.toml ").as_deref(), Some("a.toml"));
        assert_eq!(of("strace -f culvert run --config=b.toml ").as_deref(), Some("b.toml"));
        assert_eq!(of("/usr/bin/culvert run ").as_deref(), Some(DEFAULT_CONFIG));
        assert_eq!(of("cargo run "), None);
        assert_eq!(of("culvert status --config a.toml "), None);
    }

    #[test]
    fn what_is_read_of_this_host_is_plausible() {
        let options = Options { config: None, rate: None, offline: true, wait: Duration::ZERO };
        let (facts, config) = gather(&options);
        assert!(config.is_none() && facts.file.path.is_none());
        assert!(
            super::super::kernel::numbers(&facts.kernel.release).is_some_and(|version| version >= (4, 0))
        );
        assert_eq!(facts.kernel.segmentation, Ok(true));
        assert_eq!(facts.kernel.receive_offload, Ok(true));
        let limits = &facts.limits;
        assert!(limits.buffers.is_some_and(|buffers| buffers.receive > 0));
        assert!(limits.descriptors.is_some_and(|most| most >= 256) && limits.cpus > 0);
        assert!(
            limits.user == 0 || !limits.has(Limits::SYS_RESOURCE),
            "tests run as root or without privileges"
        );
        assert!(facts.clock.unix_seconds > 1_735_689_600);
        assert!(facts.network.rp_filter.iter().all(|(name, mode)| name != "lo" && *mode <= 2));
    }
}
