//! MTU, routes and rules, as `ip` shows them.

use std::{fs, net::UdpSocket, os::unix::fs::MetadataExt, path::PathBuf, sync::Arc, thread, time::Duration};

use base::ids::PeerId;
use config::Config;
use culvert_tests::{clock, place::Place, process::Running};
use engine::{metrics::Value, origin::PeerOrigin, registry::PeerRegistry, tunnel::Tunnel};
use gate::identity::Endpoint;
use net::tun::TunPort;

use crate::{Space, config, gone, health, open, registry, snapshots, tun, until};

const KEYS: [&str; 2] =
    ["bYSIEhy5wmscRtaGPXZXQJ_z71gzt0VIOrC_gSKcVMA", "n-_7AkECV9SwkttuVyrc8Dk1Tz5r_AvCJtYjCfE6-J0"];

/// A configuration with peers that have these `allowed_ips`, each list separated by spaces.
pub(crate) fn with_peers(mark: u32, allowed: &[&str]) -> Config {
    let mut text = String::new();
    for (name, key) in ('a'..).zip(KEYS).take(allowed.len()) {
        text += &format!("[[peer]]\nname = \"{name}\"\npublic_key = \"{key}\"\n");
    }
    let mut config = config(&text);
    config.transport.mark = mark;
    for (peer, allowed) in config.peers.iter_mut().zip(allowed) {
        peer.allowed_ips = allowed.split_whitespace().map(|net| net.parse().unwrap()).collect();
    }
    config
}

pub(crate) fn start(space: &Space, config: &Config, name: &str, addresses: &str) -> (Tunnel, Vec<TunPort>) {
    space.place().enter(|| open(config, &tun(name, addresses), 2).unwrap())
}

/// The same with peers that may change.
pub(crate) fn start_with(
    space: &Space,
    config: &Config,
    registry: &Arc<PeerRegistry>,
    addresses: &str,
) -> (Tunnel, Vec<TunPort>) {
    let tun = tun("culvert7", addresses);
    space.place().enter(|| Tunnel::open(config, &tun, registry, &snapshots(), &health(), 1).unwrap())
}

/// What `ip` says, without its runs of spaces and empty lines.
fn squeezed(text: &str) -> Vec<String> {
    let squeeze = |line: &str| line.split_whitespace().collect::<Vec<_>>().join(" ");
    text.lines().map(squeeze).filter(|line| !line.is_empty()).collect()
}

pub(crate) fn lines(space: &Space, args: &str) -> Vec<String> {
    squeezed(&space.ip(args))
}

/// The thread applies what is said to it in its own time: until `ip ARGS` says this.
#[track_caller]
pub(crate) fn becomes(space: &Space, args: &str, wanted: &[&str]) {
    until(space, args, |said| squeezed(said) == wanted);
}

/// The same for the device's MTU, which may change after the routes.
#[track_caller]
pub(crate) fn mtu_becomes(space: &Space, bytes: u16) {
    until(space, "link show culvert7", |said| said.contains(&format!(" mtu {bytes} ")));
}

#[test]
fn routes_and_mtus_follow_the_peers() {
    let Some(space) = Space::new("routes into a TUN device") else { return };
    let config = with_peers(0, &["10.9.0.0/24 192.0.2.0/24 fd09::/64 2001:db8:5::/48", "10.9.0.7/32"]);
    let (tunnel, ports) = start(&space, &config, "culvert7", "10.9.0.1/24 fd09::1/64");
    let ours = "route show proto 199";
    assert_eq!(
        lines(&space, ours),
        ["10.9.0.7 dev culvert7 scope link", "192.0.2.0/24 dev culvert7 scope link"]
    );
    assert_eq!(
        lines(&space, "-6 route show proto 199"),
        ["2001:db8:5::/48 dev culvert7 metric 1024 pref medium"]
    );
    mtu_becomes(&space, 1_441);
    let link = space.ip("-details addr show culvert7");
    assert!(link.contains("qlen 1000") && link.contains("multi_queue") && !link.contains("fe80"), "{link}");
    let redirects = "cat /proc/sys/net/ipv4/conf/culvert7/send_redirects";
    let redirects = space.place().command("sh").args(["-c", redirects]).output().unwrap();
    assert_eq!(redirects.stdout, b"0\n");

    let board = Arc::clone(&tunnel.board);
    board.set_mtu(PeerId(0), Some(1_200));
    board.set_mtu(PeerId(1), Some(1_400));
    let (first, second) =
        ("10.9.0.0/24 dev culvert7 scope link mtu 1200", "192.0.2.0/24 dev culvert7 scope link mtu 1200");
    becomes(&space, ours, &[first, "10.9.0.7 dev culvert7 scope link", second]);
    becomes(
        &space,
        "-6 route show proto 199",
        &[
            "2001:db8:5::/48 dev culvert7 metric 1024 mtu 1280 pref medium",
            "fd09::/64 dev culvert7 metric 128 mtu 1280 pref medium",
        ],
    );
    mtu_becomes(&space, 1_400);
    assert!(space.ip("route get 10.9.0.5").contains("src 10.9.0.1"));

    // Wider again: the kernel's own route serves.
    board.set_mtu(PeerId(0), Some(1_421));
    board.set_mtu(PeerId(1), Some(1_300));
    becomes(
        &space,
        ours,
        &["10.9.0.7 dev culvert7 scope link mtu 1300", "192.0.2.0/24 dev culvert7 scope link"],
    );
    mtu_becomes(&space, 1_421);
    assert_eq!(lines(&space, "route show proto kernel").len(), 1, "the kernel's own stays");

    // Nobody takes IPv6 away, whatever fits.
    board.set_mtu(PeerId(0), Some(1_000));
    board.set_mtu(PeerId(1), Some(1_000));
    becomes(
        &space,
        ours,
        &[
            "10.9.0.0/24 dev culvert7 scope link mtu 1000",
            "10.9.0.7 dev culvert7 scope link mtu 1000",
            "192.0.2.0/24 dev culvert7 scope link mtu 1000",
        ],
    );
    mtu_becomes(&space, 1_280);
    assert!(space.ip("addr show culvert7").contains("fd09::1/64"));

    drop(ports);
    drop(tunnel);
    gone(&space, "culvert7");
    assert_eq!(lines(&space, "route show"), [""; 0], "all is undone");
}

#[test]
fn peers_come_and_go_while_it_runs() {
    let Some(space) = Space::new("routes of peers that come and go") else { return };
    let config = with_peers(0, &["192.0.2.0/24", "198.51.100.0/24"]);
    let registry = registry(&config);
    let _open = start_with(&space, &config, &registry, "10.9.0.1/24 fd09::1/64");
    let ours = "route show proto 199";
    let (first, second) = ("192.0.2.0/24 dev culvert7 scope link", "198.51.100.0/24 dev culvert7 scope link");
    assert_eq!(lines(&space, ours), [first, second]);
    registry.remove("a").unwrap();
    becomes(&space, ours, &[second]);
    registry.add(config.peers[0].clone(), PeerOrigin::State).unwrap();
    becomes(&space, ours, &[first, second]);
    // The kernel removes the routes of a device that goes down. The agent sets them again as soon as it is up.
    space.ip("link set culvert7 down");
    assert!(!space.ip("addr show culvert7").contains("fd09::1"), "the addresses of IPv6, too");
    space.ip("link set culvert7 up");
    until(&space, "addr show culvert7", |said| said.contains("fd09::1/64"));
    becomes(&space, ours, &[first, second]);
}

/// An uplink, 198.51.100.2 with the default route, and a network beside it, 10.1.0.0/16.
fn underlay(space: &Space) {
    for (ends, address) in [("veth0 veth1", "198.51.100.2/24"), ("lan0 lan1", "10.1.0.1/16")] {
        let (here, there) = ends.split_once(' ').unwrap();
        space.ip(&format!("link add {here} type veth peer name {there}"));
        space.ip(&format!("link set {here} up"));
        space.ip(&format!("link set {there} up"));
        space.ip(&format!("addr add {address} dev {here}"));
    }
    space.ip("route add default via 198.51.100.1");
}

/// Which device a packet takes: its destination, and its mark if it has one.
#[track_caller]
fn takes(space: &Space, packet: &str, device: &str) {
    let route = space.ip(&format!("route get {packet}"));
    assert!(route.contains(&format!("dev {device} ")), "{packet}: {route}");
}

fn endpoint(host: &str) -> Vec<Endpoint> {
    vec![Endpoint::new(host.to_owned(), 4433)]
}

#[test]
fn with_a_mark_the_underlay_keeps_its_routes() {
    let Some(space) = Space::new("routing rules of a tunnel") else { return };
    underlay(&space);
    let before = lines(&space, "rule show");
    // As an agent leaves them that was killed.
    space.ip("rule add not fwmark 9 lookup 51900 priority 31901 protocol 199");
    space.ip("rule add lookup 7 priority 31902 protocol 4");
    let config = with_peers(77, &["0.0.0.0/0", "192.0.2.0/24 2001:db8::/32"]);
    let (tunnel, ports) = start(&space, &config, "culvert7", "10.9.0.1/24");
    let rules = lines(&space, "rule show");
    let expected = [
        &before[0],
        "31900: from all lookup main suppress_prefixlength 0 proto 199",
        "31901: not from all fwmark 0x4d lookup 51900 proto 199",
        "31902: from all lookup 7 proto bgp",
    ];
    assert!(
        rules.len() == before.len() + 3 && rules[1] == expected[1] && rules[2] == expected[2],
        "{rules:?}"
    );
    assert!(!space.ip("-6 rule show").contains("proto 199"), "only where there is something apart");
    assert_eq!(lines(&space, "route show table 51900"), ["default dev culvert7 proto 199 scope link"]);
    assert_eq!(lines(&space, "route show proto 199"), ["192.0.2.0/24 dev culvert7 scope link"]);
    for (packet, device) in [
        ("203.0.113.5", "culvert7"),
        ("203.0.113.5 mark 77", "veth0"),
        ("198.51.100.9", "veth0"),
        ("10.1.0.9", "lan0"),
        ("10.9.0.9", "culvert7"),
        ("192.0.2.9", "culvert7"),
    ] {
        takes(&space, packet, device);
    }
    // A second agent of the host has a table of its own, and takes no rules away; one that needs none has none.
    let other = start(&space, &with_peers(78, &["192.0.0.0/3"]), "culvert8", "10.8.0.1/24");
    let third = start(&space, &with_peers(79, &["203.0.113.0/24"]), "culvert9", "10.7.0.1/24");
    let rules = space.ip("rule show");
    assert!(rules.contains("31903:\tnot from all fwmark 0x4e lookup 51901"), "{rules}");
    assert!(!rules.contains("0x4f") && rules.contains("31900:"), "{rules}");
    drop((other, third));
    drop(ports);
    drop(tunnel);
    space.ip("rule del priority 31902");
    assert_eq!(lines(&space, "rule show"), before, "all is undone");
    assert!(!space.ip("-6 rule show").contains("51900"));
}

#[test]
fn a_wide_prefix_leaves_a_network_beside_it_alone() {
    let Some(space) = Space::new("a tunnel beside a network of the host") else { return };
    underlay(&space);
    let before = lines(&space, "rule show");
    let mut config = with_peers(77, &["10.0.0.0/8", "203.0.113.0/24"]);
    config.peers[0].endpoints = endpoint("203.0.113.7");
    let registry = registry(&config);
    let (tunnel, ports) = start_with(&space, &config, &registry, "10.9.0.1/24");
    let (in_main, in_own) = ("route show proto 199", "route show table 51900");
    let (wide, holding) = ("10.0.0.0/8 dev culvert7", "203.0.113.0/24 dev culvert7");
    assert_eq!(lines(&space, in_main), [format!("{wide} scope link")]);
    assert_eq!(lines(&space, in_own), [format!("{holding} proto 199 scope link")]);
    let everywhere = |space: &Space| {
        for (packet, device) in [
            ("10.1.0.9", "lan0"),
            ("10.2.0.9", "culvert7"),
            ("10.9.0.9", "culvert7"),
            ("203.0.113.7", "culvert7"),
            ("203.0.113.7 mark 77", "veth0"),
            ("192.0.2.9", "veth0"),
        ] {
            takes(space, packet, device);
        }
    };
    everywhere(&space);

    // A peer comes whose endpoint lies in the wide one, which moves, and back when the peer goes.
    let mut guest = config.peers[1].clone();
    registry.remove("b").unwrap();
    becomes(&space, in_own, &[]);
    assert_eq!(lines(&space, "rule show"), before, "without routes there, there are no rules");
    takes(&space, "203.0.113.7", "veth0");
    guest.endpoints = endpoint("10.200.0.5");
    registry.add(guest, PeerOrigin::State).unwrap();
    let [wide_there, holding_there] = [wide, holding].map(|route| format!("{route} proto 199 scope link"));
    becomes(&space, in_own, &[&wide_there, &holding_there]);
    becomes(&space, in_main, &[]);
    everywhere(&space);
    takes(&space, "10.200.0.5", "culvert7");
    takes(&space, "10.200.0.5 mark 77", "veth0");
    registry.remove("b").unwrap();
    becomes(&space, in_own, &[]);
    assert_eq!(lines(&space, in_main), [format!("{wide} scope link")]);

    drop(ports);
    drop(tunnel);
    assert_eq!(lines(&space, "rule show"), before, "all is undone");
}

#[test]
fn what_the_kernel_drops_is_counted() {
    let Some(space) = Space::new("the drops of a TUN device") else { return };
    let (config, snapshots) = (config(""), snapshots());
    let tun = tun("culvert7", "10.9.0.1/24");
    let _unread = space
        .place()
        .enter(|| Tunnel::open(&config, &tun, &registry(&config), &snapshots, &health(), 2).unwrap());
    let dropped = |direction: &str| {
        let series = format!("culvert_tun_kernel_dropped_packets_total{{direction=\"{direction}\"}}");
        match snapshots.value(&series) {
            Some(Value::Count(count)) => count,
            other => panic!("{other:?}"),
        }
    };
    let socket = space.place().enter(|| UdpSocket::bind("10.9.0.1:0").unwrap());
    // Two queues of 1,000 packets each, of which one flow fills one.
    for _ in 0..1_500 {
        // It is told of a full queue now and then.
        drop(socket.send_to(b"unread", "10.9.0.2:9"));
    }
    until(&space, "-s link show culvert7", |_| dropped("uplink") >= 500);
    assert_eq!(dropped("downlink"), 0);
}

/// The processor time of the tunnel's thread in `space`, in ticks of 10 ms.
fn ticks(space: &Space) -> u64 {
    let Place::Namespace(name) = space.place() else { panic!("a namespace") };
    let own = fs::metadata(format!("/run/netns/{name}")).unwrap().ino();
    let threads = fs::read_dir("/proc/self/task").unwrap().map(|thread| thread.unwrap().path());
    let is_it = |thread: &PathBuf| {
        let is_own = fs::metadata(thread.join("ns/net")).is_ok_and(|space| space.ino() == own);
        is_own && fs::read_to_string(thread.join("comm")).is_ok_and(|name| name.trim() == "culvert-tunnel")
    };
    let [thread] = &threads.filter(is_it).collect::<Vec<_>>()[..] else { panic!("one thread") };
    let stat = fs::read_to_string(thread.join("stat")).unwrap();
    let fields: Vec<&str> = stat.rsplit(')').next().unwrap().split_whitespace().collect();
    // utime and stime of proc(5).
    fields[11].parse::<u64>().unwrap() + fields[12].parse::<u64>().unwrap()
}

#[test]
fn a_route_beside_five_thousand_is_one_change_and_looking_after_them_is_cheap() {
    let Some(space) = Space::new("5,000 routes into a TUN device") else { return };
    let many: Vec<String> = (0..5_000).map(|n| format!("10.{}.{}.0/24", 64 + n / 256, n % 256)).collect();
    let config = with_peers(0, &[&many.join(" "), "192.0.2.0/24"]);
    let registry = registry(&config);
    registry.remove("b").unwrap();
    let begun = clock::now();
    let _open = start_with(&space, &config, &registry, "10.9.0.1/24");
    until(&space, "route show proto 199", |said| said.lines().count() == 5_000);
    let set = begun.elapsed();

    // The kernel tells a listener of each change.
    let log = tempfile::NamedTempFile::new().unwrap();
    let mut monitor = space.place().command("ip");
    monitor.args(["-4", "monitor", "route"]).stdout(log.reopen().unwrap());
    let _monitor = Running::start("ip monitor", &mut monitor);
    thread::sleep(Duration::from_secs(1));
    let before = ticks(&space);
    let begun = clock::now();
    registry.add(config.peers[1].clone(), PeerOrigin::State).unwrap();
    let wanted = "192.0.2.0/24 dev culvert7 proto 199 scope link";
    becomes(&space, "route show 192.0.2.0/24", &[wanted]);
    let added = begun.elapsed();
    thread::sleep(Duration::from_secs(10));
    let spent = Duration::from_millis(10 * (ticks(&space) - before));
    println!("5,000 routes set in {set:?}, one more in {added:?}; 10 s of looking after them: {spent:?}");
    let told = fs::read_to_string(log.path()).unwrap();
    let told: Vec<&str> = told.lines().collect();
    assert!(
        told.len() == 1 && told[0].starts_with("192.0.2.0/24 dev culvert7"),
        "{} changes: {told:.3?}",
        told.len()
    );
    assert!(spent < Duration::from_secs(1), "{spent:?}");
}
