use std::{collections::BTreeSet, fs, net::SocketAddr, time::Duration};

use proptest::prelude::*;

use super::*;

/// The default of `tcp.keepalive` and `service.keepalive`.
const KEEPALIVE: Option<Duration> = Some(Duration::from_secs(60));

pub(super) const KEY: &str = "bYSIEhy5wmscRtaGPXZXQJ_z71gzt0VIOrC_gSKcVMA";
pub(super) const KEY_2: &str = "AQEBAQEBAQEBAQEBAQEBAQEBAQEBAQEBAQEBAQEBAQE";

/// Lines 1 to 8, so that what a test appends begins at line 9.
pub(super) const BASE: &str = r#"identity.key_file = "id.key"
transport.listen = ["127.0.0.1:4433"]
[[service]]
name = "dns"
upstream = "127.0.0.1:53"
[[peer]]
name = "exit"
public_key = "bYSIEhy5wmscRtaGPXZXQJ_z71gzt0VIOrC_gSKcVMA"
"#;

pub(super) fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../..")
}

pub(super) fn parse(text: &str) -> Result<Config, ConfigProblems> {
    Config::parse(text, Path::new("/etc/culvert"))
}

/// Every problem of `text` as "line key_path", with 0 for no line.
fn problems(text: &str) -> Vec<(usize, String)> {
    match parse(text) {
        Ok(_) => Vec::new(),
        Err(found) => found.problems.into_iter().map(|p| (p.line.unwrap_or(0), p.key_path)).collect(),
    }
}

#[track_caller]
pub(super) fn only_problem(text: &str) -> ConfigProblem {
    let mut found = parse(text).unwrap_err().problems;
    assert_eq!(found.len(), 1, "{found:#?}");
    found.remove(0)
}

/// Appends `more` to the base, whose last table is a peer, and expects one problem there.
#[track_caller]
pub(super) fn expect(more: &str, line: usize, key_path: &str, words: &str) {
    let problem = only_problem(&format!("{BASE}{more}"));
    assert_eq!((problem.line, problem.key_path.as_str()), (Some(line), key_path), "{problem}");
    let text = problem.to_string();
    assert!(text.contains(words), "{text:?} does not say {words:?}");
    assert!(!problem.remedy.is_empty());
}

#[test]
fn defaults_stand_for_what_is_left_out() {
    let config = parse(BASE).unwrap();
    assert!(config.transport.workers == 0 && (1..=64).contains(&config.worker_count()));
    assert_eq!(config.identity_key_file, Path::new("/etc/culvert/id.key"));
    assert_eq!(config.transport.listen, ["127.0.0.1:4433".parse().unwrap()]);
    assert_eq!((config.log, config.limits, config.admin), (Log::DEFAULT, defaults::LIMITS, Admin::default()));
    let peer = Peer {
        name: "exit".into(),
        origin: PeerOrigin::Config,
        public_keys: vec![KEY.parse().unwrap()],
        preshared_key_files: Vec::new(),
        preshared_keys: Vec::new(),
        endpoints: Vec::new(),
        carrier: Carrier::Fallback,
        ca_file: None,
        proxy: None,
        lanes: 0,
        profile: Profile::Throughput,
        keepalive: Some(Duration::from_secs(20)),
        queue: Queue { packets: 4096, bytes: 4_194_304, time: Duration::from_millis(100) },
        drop: DropPolicy::Oldest,
        flow_quota: 0.5,
        services: Vec::new(),
        allowed_ips: Vec::new(),
        map: Vec::new(),
        addresses: Vec::new(),
        priority: None,
        weight: None,
        dscp: Dscp::Copy,
        congestion: CongestionControl::Bbr,
        thin: ThinStreams::Copy,
        rate: None,
        rate_min: None,
        rate_max: None,
        rate_receive: None,
        quota: None,
        rate_overhead: 0,
        repair: PacketRepair::OFF,
        redundant: Redundant::default(),
        aqm: Aqm { target: Duration::from_millis(5), interval: Duration::from_millis(100) },
    };
    assert_eq!(config.peers, [peer]);
    let service = Service {
        name: "dns".into(),
        allow: Vec::new(),
        deny: Vec::new(),
        upstream: "127.0.0.1:53".parse::<SocketAddr>().unwrap().into(),
        idle: Duration::from_secs(60),
        burst: 128,
        oversize: Oversize::Drop,
        repair: wire::repair_terms::Terms::OFF,
        keepalive: KEEPALIVE,
        protocol: Protocol::Both,
        proxy_protocol: ProxyProtocol::Off,
        udp: true,
        tcp: true,
    };
    assert_eq!(config.services, [service]);
}

/// A configuration in which nothing is as by default.
fn with_every_value() -> String {
    format!(
        r#"
[identity]
key_file = "/keys/id"
[transport]
listen = ["[::]:1", "0.0.0.0:1"]
workers = 64
pin_cpus = true
gso = "off"
mark = 7
advertise = "[2001:db8::1]:4433"
max_packet = 1400
[[service]]
name = "a"
upstream = "[::1]:53"
protocol = "udp"
[[service]]
name = "b"
upstream = "10.0.0.1:80"
idle = "5m"
burst = 16
oversize = "fragment"
keepalive = "0s"
protocol = "tcp"
[[peer]]
name = "p"
public_key = ["{KEY}", "{KEY_2}"]
endpoints = ["a.example:1", "192.0.2.1:2"]
lanes = 64
keepalive = "0s"
profile = "latency"
drop = "newest"
queue = {{ packets = 8, bytes = "64KiB", time = "1ms" }}
flow_quota = 1
services = ["b", "a"]
[[udp]]
listen = "127.0.0.1:5301"
peer = "p"
service = "iperf"
[[tcp]]
listen = "127.0.0.1:5301"
peer = "p"
service = "iperf"
keepalive = "90s"
[metrics]
listen = "127.0.0.1:9464"
page = true
allow = ["10.0.0.0/24", "fd09::7"]
token_file = "admin.token"
[log]
level = "trace"
format = "json"
[limits]
flows_per_peer = 1
flows = 2
tcp_streams_per_peer = 3
tcp_streams = 9
stream_bytes = "8MiB"
pending_open_packets = 4
receive_buffer = 65536
receive_rate = "1MiB"
reassembly_bytes = "128KiB"
queue_bytes = 65537
peers = 5
open_peers = 6
decoy_flows = 7
handshakes = 8
"#
    )
}

#[test]
fn every_value_arrives() {
    let config = parse(&with_every_value()).unwrap();
    assert_eq!(config.identity_key_file, Path::new("/keys/id"));
    assert_eq!(config.transport.listen.len(), 2);
    assert!(!config.transport.gso && config.transport.pin_cpus);
    assert_eq!((config.transport.workers, config.worker_count()), (64, 64));
    assert_eq!(config.transport.mark, 7);
    assert_eq!(config.transport.advertise.unwrap().to_string(), "[2001:db8::1]:4433");
    assert_eq!(config.transport.max_packet, Some(1400));
    let protocols: Vec<_> =
        config.services.iter().map(|s| (s.udp, s.tcp, s.burst, s.idle.as_secs(), s.oversize)).collect();
    assert_eq!(
        protocols,
        [(true, false, 128, 60, Oversize::Drop), (false, true, 16, 300, Oversize::Fragment)]
    );
    let peer = &config.peers[0];
    assert_eq!(peer.public_keys, [KEY, KEY_2].map(|key| key.parse().unwrap()));
    assert_eq!(peer.endpoints, ["a.example:1".parse().unwrap(), "192.0.2.1:2".parse().unwrap()]);
    assert_eq!((peer.lanes, peer.keepalive, peer.drop), (64, None, DropPolicy::Newest));
    assert_eq!(peer.profile, Profile::Latency);
    assert_eq!(peer.queue, Queue { packets: 8, bytes: 65_536, time: Duration::from_millis(1) });
    assert!((peer.flow_quota - 1.0).abs() < f64::EPSILON);
    assert_eq!(peer.services, [1, 0]);
    assert_eq!(
        config.services.iter().map(|service| service.keepalive).collect::<Vec<_>>(),
        [KEEPALIVE, None]
    );
    let forward = Forward {
        listen: "127.0.0.1:5301".parse().unwrap(),
        peer: 0,
        service: "iperf".into(),
        open: true,
        tcp: TcpKeys { keepalive: KEEPALIVE, accept_proxy: Vec::new() },
        udp: UdpKeys { accept_proxy: Vec::new() },
    };
    assert_eq!(config.udp, std::slice::from_ref(&forward));
    assert_eq!(
        config.tcp,
        [Forward {
            tcp: TcpKeys { keepalive: Some(Duration::from_secs(90)), accept_proxy: Vec::new() },
            ..forward
        }]
    );
    let Admin { listen, page, names: _, allow, token_file } = &config.admin;
    assert_eq!((*listen, *page), (Some("127.0.0.1:9464".parse().unwrap()), true));
    assert_eq!(*allow, ["10.0.0.0/24", "fd09::7/128"].map(|net| net.parse().unwrap()));
    assert_eq!(token_file, Path::new("/etc/culvert/admin.token"));
    assert_eq!(config.log, Log { level: LogLevel::Trace, format: LogFormat::Json });
    let limits = config.limits;
    assert_eq!((limits.tcp_streams_per_peer, limits.receive_buffer), (3, Some(65_536)));
    let counts =
        [limits.flows_per_peer, limits.flows, limits.tcp_streams, limits.pending_open_packets, limits.peers];
    assert_eq!(counts, [1, 2, 9, 4, 5]);
    assert_eq!([limits.open_peers, limits.decoy_flows, limits.handshakes], [6, 7, 8]);
    let sizes = [limits.stream_bytes, limits.receive_rate, limits.reassembly_bytes, limits.queue_bytes];
    assert_eq!(sizes, [8 << 20, 1 << 20, 131_072, 65_537]);
}

#[test]
fn names_of_the_admin_server_are_kept_as_they_are_compared() {
    let metrics = "[metrics]\nlisten = \"127.0.0.1:1\"\nnames = [\"GW.example.net.\", \"prom\"]\n";
    assert_eq!(parse(&format!("{BASE}{metrics}")).unwrap().admin.names, ["gw.example.net", "prom"]);
}

#[test]
fn pools_that_are_not_set_fit_the_memory() {
    let fit = |mib: u64, set: &[&str]| {
        let mut limits = Limits { stream_bytes: 100 << 20, ..Limits::DEFAULT };
        limits.fit(mib << 20, |key| set.contains(&key));
        [limits.stream_bytes, limits.queue_bytes, limits.repair_bytes].map(|bytes| bytes >> 20)
    };
    assert_eq!(fit(24_000, &[]), [256, 256, 128]);
    assert_eq!(fit(2_048, &[]), [256, 256, 128]);
    assert_eq!(fit(256, &[]), [32, 32, 16]);
    assert_eq!(fit(64, &[]), [8, 8, 4]);
    assert_eq!(fit(24, &[]), [8, 8, 4], "less is no use");
    assert_eq!(fit(64, &["stream_bytes"]), [100, 8, 4], "what is set stays");
}

/// The formula by which an operator sizes a host names every pool of memory.
#[test]
fn the_sizing_of_memory_is_complete() {
    let text = fs::read_to_string(root().join("docs/operations.md")).unwrap();
    let formula = text.split_once("**Memory.**").unwrap().1.split_once("\n## ").unwrap().0;
    let example = fs::read_to_string(root().join("config/agent.example.toml")).unwrap();
    let limits = example.split_once("\n[limits]").unwrap().1;
    let keys = limits.lines().filter_map(|line| line.trim_start_matches("# ").split_once(" = "));
    let pools: Vec<_> = keys.map(|(key, _)| key).filter(|key| key.ends_with("_bytes")).collect();
    assert!(pools.len() >= 4, "{pools:?}");
    for pool in pools {
        assert!(formula.contains(&format!("`limits.{pool}`")), "{pool} is not in the formula");
    }
}

#[test]
fn values_out_of_bounds_are_refused_at_their_line() {
    expect("lanes = 65\n", 9, "peer[0].lanes", "0 to 64");
    expect("lanes = \"4\"\n", 9, "peer[0].lanes", "is a text (remedy: write a whole number");
    expect("keepalive = \"26s\"\n", 9, "peer[0].keepalive", "25s");
    expect("keepalive = 20\n", 9, "peer[0].keepalive", "write \"20s\" if seconds are meant");
    expect("persistent_keepalive = 25\n", 9, "peer[0].persistent_keepalive", "did you mean keepalive?");
    expect("AllowedIPs = \"10.9.0.2/32\"\n", 9, "peer[0].AllowedIPs", "did you mean allowed_ips?");
    expect("name = \"exit\"\n", 9, "", "not TOML: \"name\" is there twice (remedy: remove one");
    expect("[log]\nlevel = info\n", 10, "", "a text needs quotes, as in level = \"info\"");
    expect("[log]\nlevel = on # x\n", 10, "", "a text needs quotes, as in level = \"on\"");
    expect("[transport]\n", 9, "", "\"transport\" is there twice");
    expect("keepalive = \"20\"\n", 9, "peer[0].keepalive", "a unit");
    expect("drop = \"oldset\"\n", 9, "peer[0].drop", "\"oldest\" or \"newest\"");
    expect("congestion = \"reno\"\n", 9, "peer[0].congestion", "\"bbr\" or \"cubic\" or \"rate\"");
    expect("congestion = \"rate\"\n", 6, "peer[0].rate", "add what the path to the peer carries");
    expect("rate = \"190Mbps\"\n", 9, "peer[0].rate", "as in \"48Mbit\"");
    expect("rate = \"1kbit\"\n", 9, "peer[0].rate", "64kbit");
    expect("rate = \"9999Gbit\"\n", 9, "peer[0].rate", "100Gbit");
    expect("rate = \"fast\"\n", 9, "peer[0].rate", "write \"auto\", or a number");
    expect("rate = \"auto\"\ncongestion = \"rate\"\n", 9, "peer[0].rate", "another congestion");
    expect("rate_min = \"1Mbit\"\n", 9, "peer[0].rate_min", "add rate = \"auto\"");
    expect("rate = \"5Mbit\"\nrate_max = \"9Mbit\"\n", 10, "peer[0].rate_max", "add rate = \"auto\"");
    let reversed = "rate = \"auto\"\nrate_min = \"2Mbit\"\nrate_max = \"1Mbit\"\n";
    expect(reversed, 10, "peer[0].rate_min", "is above rate_max");
    expect("rate_receive = 5\n", 9, "peer[0].rate_receive", "64kbit to 100Gbit");
    expect("aqm = { target = \"2s\" }\n", 9, "peer[0].aqm.target", "out of range");
    expect("rate_overhead = 500\n", 9, "peer[0].rate_overhead", "256");
    expect("flow_quota = 0\n", 9, "peer[0].flow_quota", "above 0");
    expect("flow_quota = 1.5\n", 9, "peer[0].flow_quota", "at most 1");
    expect("flow_quota = nan\n", 9, "peer[0].flow_quota", "is not a share");
    expect("\nqueue.packets = 0\n", 10, "peer[0].queue.packets", "1 to 1048576");
    expect("queue = { bytes = \"1KiB\" }\n", 9, "peer[0].queue.bytes", "\"64KiB\" to \"1GiB\"");
    expect("queue = { bytes = \"4Mib\" }\n", 9, "peer[0].queue.bytes", "is not a size");
    expect("queue = { time = \"11s\" }\n", 9, "peer[0].queue.time", "1ms");
    expect("queue = 5\n", 9, "peer[0].queue", "queue = {");
    expect("endpoints = []\n", 9, "peer[0].endpoints", "leave the key out");
    expect("endpoints = [\"a:1\",\n\"b\"]\n", 10, "peer[0].endpoints[1]", "the port is missing");
    expect("endpoints = [\"a:1\",\n2]\n", 10, "peer[0].endpoints[1]", "is an integer");
    expect("endpoints = \"a:1\"\n", 9, "peer[0].endpoints", "a list in brackets");
    expect("services = [\"web\"]\n", 9, "peer[0].services[0]", "no [[service]] is named \"web\"");
    expect("services = [\"dns\", \"dns\"]\n", 9, "peer[0].services[1]", "twice");
    expect("[transport.x]\n", 9, "transport.x", "unknown key");
    expect("[log]\nlevel = \"verbose\"\n", 10, "log.level", "\"error\" or \"warn\"");
    expect("[log]\nformat = \"xml\"\n", 10, "log.format", "\"text\" or \"json\"");
    expect("[limits]\nflows = 0\n", 10, "limits.flows", "out of range");
    expect("[limits]\nreceive_buffer = -1\n", 10, "limits.receive_buffer", "out of range");
    expect("[limits]\nreceive_buffer = \"large\"\n", 10, "limits.receive_buffer", "is not a size");
    expect("[limits]\nreceive_rate = \"1KiB\"\n", 10, "limits.receive_rate", "out of range");
    expect("[limits]\nreassembly_bytes = \"64KiB\"\n", 10, "limits.reassembly_bytes", "out of range");
    expect("[limits]\nflows = 99999999999999999999\n", 10, "limits.flows", "huge");
    expect(
        "[metrics]\nlisten = \"127.0.0.1:1\"\nnames = [\"a:9464\"]\n",
        11,
        "metrics.names[0]",
        "without a port",
    );
    expect("[metrics]\nlisten = \"localhost:9464\"\n", 10, "metrics.listen", "is a host name");
    expect("[metrics]\nlisten = \":9464\"\n", 10, "metrics.listen", "has no address");
    expect("[metrics]\nlisten = \"127.0.0.1\"\n", 10, "metrics.listen", "\"127.0.0.1:4433\"");
}

#[test]
fn transport_and_services_are_checked() {
    let transport = |line: &str| {
        let text = BASE.replace("transport.listen = [\"127.0.0.1:4433\"]", line);
        let problem = only_problem(&text);
        assert_eq!(problem.line, Some(2));
        problem.to_string()
    };
    let keep = "transport = { listen = [\"127.0.0.1:4433\"], ";
    assert!(
        transport("transport.listen = [\"x:1\"]").starts_with("transport.listen[0]: \"x\" is a host name")
    );
    assert!(transport(&format!("{keep} gso = \"on\" }}")).starts_with("transport.gso: "));
    assert!(transport(&format!("{keep} mark = -1 }}")).starts_with("transport.mark: "));
    assert!(transport(&format!("{keep} advertise = \"gw\" }}")).starts_with("transport.advertise: the port"));
    for workers in ["65", "-1", "\"auto\""] {
        let text = transport(&format!("{keep} workers = {workers} }}"));
        assert!(text.starts_with("transport.workers: "), "{text}");
    }
    assert!(transport(&format!("{keep} pin_cpus = 1 }}")).contains("write true or false"));
    for size in ["1199", "65508", "\"big\"", "-5"] {
        assert!(transport(&format!("{keep} max_packet = {size} }}")).starts_with("transport.max_packet: "));
    }

    let service = |from: &str, to: &str| only_problem(&BASE.replace(from, to)).to_string();
    let upstream = "upstream = \"127.0.0.1:53\"";
    assert!(
        service(upstream, &format!("{upstream}\nproxy_protocol = \"v1\""))
            .starts_with("service \"dns\".proxy_protocol: ")
    );
    assert!(service(upstream, "upstream = []").starts_with("service \"dns\".upstream: is an empty list"));
    assert!(service(upstream, "upstream = [\"a:53\", \"a:53\"]").contains("names a:53 twice"));
    assert!(service(upstream, "upstream = \"unix:/run/dns.sock\"").contains("set protocol = \"tcp\""));
    assert!(
        service(upstream, "upstream = \"127.0.0.1:0\"")
            .starts_with("service \"dns\".upstream: cannot be sent to")
    );
    assert!(
        service(upstream, "upstream = \"0.0.0.0:53\"")
            .starts_with("service \"dns\".upstream: cannot be sent to")
    );
    assert!(service(upstream, "").starts_with("service \"dns\".upstream: is missing"));
    for (key, bad) in [
        ("idle", "\"0s\""),
        ("idle", "\"25h\""),
        ("burst", "0"),
        ("burst", "129"),
        ("oversize", "\"split\""),
        ("keepalive", "\"999ms\""),
        ("keepalive", "\"3h\""),
        ("keepalive", "60"),
        ("protocol", "\"sctp\""),
    ] {
        let text = service(upstream, &format!("{upstream}\n{key} = {bad}"));
        assert!(text.starts_with(&format!("service \"dns\".{key}: ")), "{text}");
    }
    assert!(
        service("name = \"dns\"", "name = \"d ns\"").starts_with("service[0].name: \"d ns\" is not a name")
    );
    assert!(service("name = \"dns\"", &format!("name = \"{}\"", "x".repeat(65))).contains("1 to 64"));
    assert!(service("name = \"exit\"", "name = \"\"").starts_with("peer[0].name: \"\" is not a name"));
}

#[test]
fn unknown_keys_get_a_suggestion() {
    expect("endpoint = [\"a:1\"]\n", 9, "peer[0].endpoint", "did you mean endpoints?");
    expect("keep_alive = \"1s\"\n", 9, "peer[0].keep_alive", "did you mean keepalive?");
    expect("queue = { packet = 1 }\n", 9, "peer[0].queue.packet", "did you mean packets?");
    expect("zzz = 1\n", 9, "peer[0].zzz", "the keys here are name, public_key, preshared_key_file");
    expect("[metric]\nlisten = 1\n", 9, "metric", "did you mean metrics?");
    expect("[[peers]]\nname = \"x\"\n", 9, "peers", "did you mean peer?");
    expect("[log]\n\nlevl = \"info\"\n", 11, "log.levl", "did you mean level?");
}

#[test]
fn only_tcp_ports_have_a_keepalive() {
    let port = |section: &str| {
        format!(
            "{BASE}[[{section}]]\nlisten = \"127.0.0.1:1\"\npeer = \"exit\"\nservice = \"s\"\nkeepalive = \"5s\"\n"
        )
    };
    let config = parse(&port("tcp")).unwrap();
    assert_eq!(config.tcp[0].tcp.keepalive, Some(Duration::from_secs(5)));
    let problem = only_problem(&port("udp")).to_string();
    assert!(problem.starts_with("udp[0].keepalive: unknown key"), "{problem}");
}

#[test]
fn sections_of_the_wrong_shape_are_refused() {
    expect("[udp]\nlisten = \"127.0.0.1:1\"\n", 9, "udp", "write [[udp]]");
    expect("[[log]]\nlevel = \"info\"\n", 9, "log", "write [log]");
    let problem = only_problem(&format!("limits = 3\n{BASE}"));
    assert_eq!((problem.line, problem.key_path.as_str()), (Some(1), "limits"));
}

#[test]
fn text_that_is_no_toml_is_refused_at_its_line() {
    let found = problems(&format!("{BASE}name = \n"));
    assert_eq!(found[0], (9, String::new()));
    assert_eq!(found.iter().filter(|(_, key_path)| !key_path.is_empty()).count(), 0, "{found:?}");
    // The same key twice is an error of TOML itself.
    assert_eq!(problems(&format!("{BASE}name = \"b\"\n")), [(9, String::new())]);
}

#[test]
fn names_and_keys_must_be_unique_and_known() {
    let peer = |name: &str, key: &str| format!("[[peer]]\nname = \"{name}\"\npublic_key = \"{key}\"\n");
    expect(&peer("exit", KEY_2), 10, "peer[1].name", "is taken");
    expect(&peer("b", KEY), 11, "peer[1].public_key", "the same key as peer \"exit\".public_key");
    expect(&peer("b", "AA"), 11, "peer[1].public_key", "43 characters, this has 2");
    expect("[[peer]]\nname = \"b\"\n", 9, "peer[1].public_key", "is missing");
    expect("[[peer]]\nname = \"b\"\npublic_key = []\n", 11, "peer[1].public_key", "empty list");
    let twice = format!("[[peer]]\nname = \"b\"\npublic_key = [\n\"{KEY_2}\",\n\"{KEY_2}\"]\n");
    expect(&twice, 13, "peer[1].public_key[1]", "the same key as peer \"b\".public_key[0]");
    let service = "[[service]]\nname = \"dns\"\nupstream = \"127.0.0.1:54\"\n";
    expect(service, 10, "service[1].name", "is taken");
    let forward = "[[udp]]\nlisten = \"127.0.0.1:1\"\npeer = \"exi\"\nservice = \"x\"\n";
    expect(forward, 11, "udp[0].peer", "add that [[peer]], or use exit");
    expect(
        &forward.replace("exi\"", "exit\"").replace("\"x\"", "\"a b\""),
        12,
        "udp[0].service",
        "is not a name",
    );
    expect("[[tcp]]\npeer = \"exit\"\nservice = \"x\"\n", 9, "tcp[0].listen", "is missing");
}

#[test]
fn listeners_of_one_protocol_must_not_clash() {
    let forward = |section: &str, listen: &str| {
        format!("[[{section}]]\nlisten = \"{listen}\"\npeer = \"exit\"\nservice = \"x\"\n")
    };
    let words = "127.0.0.1:4433 is taken by transport.listen[0] (127.0.0.1:4433)";
    expect(&forward("udp", "127.0.0.1:4433"), 10, "udp[0].listen", words);
    expect(&forward("udp", "0.0.0.0:4433"), 10, "udp[0].listen", "is taken by");
    let two = forward("udp", "127.0.0.1:5") + &forward("udp", "127.0.0.1:5");
    expect(&two, 14, "udp[1].listen", "is taken by udp[0].listen");
    let metrics = forward("tcp", "127.0.0.1:5") + "[metrics]\nlisten = \"127.0.0.1:5\"\n";
    expect(&metrics, 14, "metrics.listen", "is taken by tcp[0].listen");
    for fine in ["[::]:4433", "127.0.0.2:4433", "127.0.0.1:4434"] {
        parse(&format!("{BASE}{}", forward("udp", fine))).unwrap();
    }
    parse(&format!("{BASE}{}", forward("tcp", "127.0.0.1:4433"))).unwrap();
    parse(&format!("{BASE}{}{}", forward("udp", "127.0.0.1:0"), forward("udp", "127.0.0.1:0"))).unwrap();
}

#[test]
fn an_agent_without_anything_to_do_is_refused() {
    assert_eq!(problems("identity.key_file = \"x\"\n"), [(0, String::new())]);
    assert_eq!(problems(""), [(0, "identity.key_file".to_owned()), (0, String::new())]);
    let empty = "identity.key_file = \"x\"\ntransport.listen = [\"127.0.0.1:1\"]\n";
    let notes = parse(empty).unwrap().notes;
    assert!(notes.len() == 1 && notes[0].to_string().contains("culvert peer add"), "{notes:?}");
    assert_eq!(parse(&format!("{empty}access.mode = \"open\"\n")).unwrap().notes, []);
    let silent = BASE.replace("transport.listen = [\"127.0.0.1:4433\"]", "");
    assert_eq!(problems(&silent), [(6, "peer[0].endpoints".to_owned())]);
    parse(&format!("{silent}endpoints = [\"a:1\"]\n")).unwrap();
}

#[test]
fn all_problems_are_reported_together_in_the_order_of_their_lines() {
    let text = r#"identity.key_file = 3
transport.listen = ["nowhere"]
[[udp]]
listen = "127.0.0.1:x"
peer = "b"
typo = 1
[[peer]]
name = "b"
lanes = -1
"#;
    let found = problems(text);
    let expected = [
        (1, "identity.key_file"),
        (2, "transport.listen[0]"),
        (3, "udp[0].service"),
        (4, "udp[0].listen"),
        (6, "udp[0].typo"),
        (7, "peer[0].public_key"),
        (9, "peer[0].lanes"),
    ];
    let expected: Vec<_> = expected.iter().map(|(line, key)| (*line, (*key).to_owned())).collect();
    assert_eq!(found, expected);
}

#[test]
fn example_files_are_valid() {
    let mut names = BTreeSet::new();
    for file in fs::read_dir(root().join("config")).unwrap() {
        let path = file.unwrap().path();
        // Others are those of routing daemons.
        if path.extension().is_none_or(|extension| extension != "toml") {
            continue;
        }
        let config = parse(&fs::read_to_string(&path).unwrap());
        let config = config.unwrap_or_else(|problems| panic!("{}: {problems}", path.display()));
        assert_eq!(config.notes, [], "{}", path.display());
        names.insert(path.file_stem().unwrap().to_string_lossy().into_owned());
    }
    for name in ["agent.example", "entry", "exit", "site-a", "site-b", "hub", "spoke"] {
        assert!(names.contains(name), "{name} is not in {names:?}");
    }
}

#[test]
fn the_agent_example_shows_the_defaults() {
    let text = fs::read_to_string(root().join("config/agent.example.toml")).unwrap();
    let shown = parse(&text).unwrap();
    let bare = parse(BASE).unwrap();
    let transport = Transport { listen: Vec::new(), advertise: None, ..shown.transport };
    assert_eq!(transport, defaults::TRANSPORT);
    assert_eq!((shown.log, shown.limits), (bare.log, bare.limits));
    assert_eq!((shown.access, shown.control, shown.state_dir), (bare.access, bare.control, bare.state_dir));
    let tun = shown.tun.unwrap();
    assert_eq!(tun, Tun { addresses: tun.addresses.clone(), ..Tun::default() });
    let (shown_peer, bare_peer) = (&shown.peers[0], &bare.peers[0]);
    assert_eq!(shown_peer.dscp, bare_peer.dscp);
    assert_eq!(shown_peer.queue, bare_peer.queue);
    assert_eq!(
        (shown_peer.lanes, shown_peer.keepalive, shown_peer.drop, shown_peer.flow_quota.to_bits()),
        (bare_peer.lanes, bare_peer.keepalive, bare_peer.drop, bare_peer.flow_quota.to_bits())
    );
    let (shown_service, bare_service) = (&shown.services[0], &bare.services[0]);
    assert_eq!((shown_service.idle, shown_service.burst), (bare_service.idle, bare_service.burst));
    assert_eq!(shown_service.oversize, bare_service.oversize);
}

proptest! {
    #[test]
    fn no_text_panics_and_every_refusal_has_a_remedy(
        at in 0..600_usize,
        removed in 0..20_usize,
        inserted in "[-a-z0-9=\"\\[\\]{}.,\n#é ]{0,8}",
    ) {
        let text: Vec<char> = BASE.replace("[[peer]]", "[log]\nlevel = \"info\"\n[limits]\nflows = 3\n[[peer]]\nqueue = { time = \"1s\" }\nendpoints = [\"192.0.2.1:1\"]\nallowed_ips = [\"10.9.0.2\", \"fd09::/64\"]\ndscp = 9\n[tun]\naddress = [\"10.9.0.1/24\"]\nmtu = 1280\n[[peer]]\nendpoints = [\"a:1\"]").chars().collect();
        let at = at.min(text.len());
        let end = (at + removed).min(text.len());
        let text: String = text[..at].iter().copied().chain(inserted.chars()).chain(text[end..].iter().copied()).collect();
        if let Err(found) = parse(&text) {
            let lines = text.lines().count().max(1);
            prop_assert!(!found.problems.is_empty());
            for problem in found.problems {
                prop_assert!(!problem.remedy.is_empty() && problem.line.is_none_or(|line| line <= lines + 1), "{problem}");
            }
        }
    }
}

#[test]
fn a_socket_is_a_queue_as_long_as_the_longest_of_its_peers() {
    let bytes = |more: &str, limits: &str| {
        let peer = |name, key, more| format!("[[peer]]\nname = \"{name}\"\npublic_key = \"{key}\"\n{more}\n");
        let peers = format!("{}{}", peer("a", KEY, "queue.time = \"20ms\""), peer("b", KEY_2, more));
        let text = format!(
            "identity.key_file = \"id\"\ntransport.listen = [\"127.0.0.1:1\"]\nlimits = {{ {limits} }}\n{peers}"
        );
        Config::parse(&text, Path::new(".")).unwrap().socket_buffer_bytes()
    };
    assert_eq!(bytes("", ""), 4 << 20);
    assert_eq!(bytes("", ""), defaults::SOCKET_BUFFER_BYTES);
    assert_eq!(bytes("queue.time = \"10ms\"", "receive_buffer = \"auto\""), (40 << 20) / 50);
    assert_eq!(bytes("queue.time = \"1s\"", "receive_rate = \"100MiB\""), 100 << 20);
    assert_eq!(bytes("queue.time = \"1ms\"", "receive_rate = \"1MiB\""), 64 << 10, "the least");
    assert_eq!(bytes("queue.time = \"1s\"", "receive_buffer = \"1MiB\""), 1 << 20, "as it was set");
}

#[test]
fn one_mistake_is_one_problem() {
    // A wrong name goes on to be a name, and one that is missing is not taken.
    expect(
        "[[udp]]\nlisten = \"127.0.0.1:1\"\npeer = \"exit\"\nservice = 5\n",
        12,
        "udp[0].service",
        "in quotes: name",
    );
    let nameless = format!("[[peer]]\npublic_key = \"{KEY_2}\"\n");
    expect(&nameless, 9, "peer[1].name", "is missing (remedy: give it a name)");
    let odd = BASE.replace("name = \"exit\"", "name = \"e xit\"");
    let forward = "[[udp]]\nlisten = \"127.0.0.1:1\"\npeer = \"e xit\"\nservice = \"x\"\n";
    assert_eq!(problems(&format!("{odd}{forward}")), [(7, "peer[0].name".to_owned())]);
    // Elements keep their places and lines when others are wrong.
    let services = "services = [\"web\",\n\"dns\",\n\"dns\"]\n";
    let expected = [(9, "peer[0].services[0]".to_owned()), (11, "peer[0].services[2]".to_owned())];
    assert_eq!(problems(&format!("{BASE}{services}")), expected);
    // A socket that is switched off has no path that could be too long.
    let far = PathBuf::from(format!("/{}", "x".repeat(200)));
    assert_eq!(Config::parse(&format!("{BASE}[control]\nsocket = \"\"\n"), &far).unwrap().control, None);
}

#[test]
fn an_admin_server_for_other_hosts_says_who_may_read_it() {
    for (address, says) in [("0.0.0.0:9464", ""), ("192.0.2.1:9464", ""), ("[::]:9464", "page = true\n")] {
        let text = format!("[metrics]\nlisten = \"{address}\"\n{says}");
        expect(&text, 10, "metrics.listen", "every host that reaches this address");
        for says in ["allow = [\"10.0.0.0/8\"]\n", "token_file = \"token\"\n"] {
            assert_eq!(parse(&format!("{BASE}{text}{says}")).unwrap().notes, [], "{says}");
        }
    }
    let everybody = "[metrics]\nlisten = \"0.0.0.0:9464\"\nallow = [\"10.0.0.0/8\", \"0.0.0.0/0\"]\n";
    assert_eq!(
        parse(&format!("{BASE}{everybody}")).unwrap().notes,
        [],
        "metrics are for whom the operator says"
    );
    let page = parse(&format!("{BASE}{everybody}page = true\n")).unwrap();
    assert_eq!((page.notes.len(), &*page.notes[0].key_path), (1, "metrics.allow"));
    let token = parse(&format!("{BASE}{everybody}page = true\ntoken_file = \"token\"\n")).unwrap();
    assert_eq!(token.notes, []);
    for key in ["page = true", "allow = [\"10.0.0.0/8\"]", "token_file = \"token\""] {
        let path = format!("metrics.{}", key.split(' ').next().unwrap());
        expect(&format!("[metrics]\n{key}\n"), 10, &path, "there is no metrics.listen");
    }
    let listen = "[metrics]\nlisten = \"127.0.0.1:1\"\n";
    expect(&format!("{listen}allow = []\n"), 11, "metrics.allow", "empty list");
    expect(&format!("{listen}allow = [\"10.0.0.1/8\"]\n"), 11, "metrics.allow[0]", "\"10.0.0.0/8\"");
}

#[test]
fn an_admin_server_admits_its_own_host_and_the_prefixes_that_it_names() {
    let allow = |allow: &[&str]| Admin {
        allow: allow.iter().map(|net| net.parse().unwrap()).collect(),
        ..Admin::default()
    };
    let some = allow(&["10.0.0.0/24", "fd09::7/128"]);
    for source in ["127.0.0.1", "::1", "127.9.9.9", "10.0.0.255", "::ffff:10.0.0.1", "fd09::7"] {
        assert!(some.admits(source.parse().unwrap()), "{source}");
    }
    for source in ["10.0.1.0", "::ffff:192.0.2.1", "fd09::8", "0.0.0.0"] {
        assert!(!some.admits(source.parse().unwrap()), "{source}");
        assert!(allow(&[]).admits(source.parse().unwrap()), "{source}");
    }
}

#[test]
fn a_note_says_when_hold_does_not_hold() {
    for (repair, noted) in
        [("{ order = \"hold\" }", 1), ("{ mode = \"off\", order = \"hold\" }", 0), ("\"fec\"", 0)]
    {
        let config = parse(&format!("{BASE}repair = {repair}")).expect("it is valid");
        let notes = config.notes.iter().filter(|note| note.problem.contains("20,000"));
        assert_eq!(notes.count(), noted, "{repair}");
    }
}

#[test]
fn repair_is_a_word_or_a_table() {
    use wire::repair_terms::{Deadline, Mode, Order, Terms};
    let service = |repair: &str| {
        let text =
            format!("{BASE}[[service]]\nname = \"voice\"\nupstream = \"127.0.0.1:5004\"\nrepair = {repair}");
        parse(&text).map(|config| config.services.last().map(|service| service.repair))
    };
    let auto = Terms { mode: Mode::Auto, ..Terms::OFF };
    assert_eq!(service("\"auto\"").unwrap(), Some(auto));
    assert_eq!(service("\"off\"").unwrap(), Some(Terms::OFF));
    let all = "{ mode = \"fec\", deadline = \"60ms\", max_overhead = 1.2, order = \"hold\" }";
    let terms = Terms {
        mode: Mode::Fec,
        deadline: Deadline::Fixed(Duration::from_millis(60)),
        max_overhead_ppm: 1_200_000,
        order: Order::Hold,
    };
    assert_eq!(service(all).unwrap(), Some(terms));
    assert_eq!([service("{}").unwrap(), service("{ deadline = \"auto\" }").unwrap()], [Some(auto); 2]);
    for (wrong, remedy) in [
        ("\"always\"", "write \"auto\" or \"retransmit\" or \"fec\" or \"off\""),
        ("{ deadline = \"1ms\" }", "write \"5ms\" to \"2s\""),
        ("{ deadline = \"3s\" }", "write \"5ms\" to \"2s\""),
        ("{ max_overhead = 3 }", "write a number above 0 and at most 2"),
        ("{ max_overhead = 0 }", "write a number above 0 and at most 2"),
        ("{ order = \"late\" }", "write \"asap\" or \"hold\""),
        ("{ dscp = \"all\" }", "the keys here are mode, deadline, max_overhead, order"),
    ] {
        let problems = service(wrong).unwrap_err().to_string();
        assert!(problems.contains(remedy), "{wrong}: {problems}");
    }
    let peer = |repair: &str| parse(&format!("{BASE}repair = {repair}")).map(|config| config.peers[0].repair);
    let some = peer("{ order = \"hold\", dscp = [46, 0] }").unwrap();
    assert_eq!([0, 46, 47].map(|dscp| some.dscp.contains(dscp)), [true, true, false]);
    assert!(peer("\"auto\"").unwrap().dscp.contains(63));
    assert!(peer("{ dscp = [64] }").is_err() && peer("{ dscp = [] }").is_err());
}

/// An address that no socket can use is refused where it is written, with what to write instead.
#[test]
fn addresses_that_cannot_work_are_refused_with_the_remedy() {
    type Place = fn(&str) -> String;
    let keys: [(&str, Place); 3] = [
        ("service[0].upstream", |address| BASE.replace("127.0.0.1:53", address)),
        ("udp[0].listen", |address| {
            format!("{BASE}[[udp]]\nlisten = \"{address}\"\npeer = \"exit\"\nservice = \"x\"\n")
        }),
        ("peer[0].endpoints[0]", |address| {
            let peer = "[[peer]]\n";
            BASE.replacen(peer, &format!("{peer}endpoints = [\"{address}\"]\n"), 1)
        }),
    ];
    for (key, text) in keys {
        for (address, remedy) in [
            ("[::ffff:10.9.1.1]:7100", "write 10.9.1.1, without brackets"),
            ("224.0.0.1:7100", "the address of one host"),
            ("[ff02::1]:7100", "the address of one host"),
            ("255.255.255.255:7100", "the address of one host"),
            ("[fe80::1]:7100", "[fe80::1%eth0]:4433"),
        ] {
            let problem = only_problem(&text(address));
            assert!(problem.key_path == key && problem.to_string().contains(remedy), "{problem}");
        }
    }
    for address in ["0.0.0.0:4433", "[::]:4433"] {
        let problem = only_problem(&keys[2].1(address)).to_string();
        assert!(problem.contains("stands for no host"), "{problem}");
    }
}

#[test]
fn a_zone_is_the_name_or_the_number_of_an_interface() {
    let upstream = |address: &str| BASE.replace("127.0.0.1:53", address);
    for (address, zone) in [("[fe80::1%lo]:53", 1), ("[fe80::1%1]:53", 1), ("[fe80::1%77]:53", 77)] {
        let Some(SocketAddr::V6(v6)) = parse(&upstream(address)).unwrap().services[0].upstream.address()
        else {
            panic!("{address} is IPv6")
        };
        assert_eq!(v6.scope_id(), zone);
    }
    let problem = only_problem(&upstream("[fe80::1%nowhere9]:53")).to_string();
    assert!(problem.contains("no interface \"nowhere9\"") && problem.contains("`ip link`"), "{problem}");
    let endpoints = "[[peer]]\nendpoints = [\"[fe80::1%eth0]:4433\"]\n";
    let config = parse(&BASE.replacen("[[peer]]\n", endpoints, 1)).unwrap();
    let endpoint = &config.peers[0].endpoints[0];
    assert_eq!((&*endpoint.host, &*endpoint.to_string()), ("fe80::1%eth0", "[fe80::1%eth0]:4433"));
}

#[test]
fn a_wildcard_of_ipv6_alone_is_noted() {
    let forward =
        |listen: &str| format!("[[udp]]\nlisten = \"{listen}\"\npeer = \"exit\"\nservice = \"x\"\n");
    let notes = |text: &str| parse(&format!("{BASE}{text}")).unwrap().notes;
    let alone = notes(&forward("[::]:7200"));
    assert!(alone.len() == 1 && alone[0].to_string().contains("IPv6 only"), "{alone:?}");
    assert_eq!(notes(&(forward("[::]:7200") + &forward("0.0.0.0:7200"))), []);
}
