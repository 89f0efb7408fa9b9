//! Tunnels inside of the tunnel: bridges of two sites with a VXLAN or Geneve port between them, as people lay them.

use std::{fs, net::IpAddr, time::Duration};

use culvert_tests::{
    clock::{self, PATIENCE},
    iperf::{self, Server},
    needs::{self, Need},
    place::Place,
    ports,
    process::{Running, run, text},
    sites::{DEVICE, Plan, Site, Sites},
    transfer::Transfer,
};
use tempfile::TempDir;

use super::{mtu::wait_for_packets, possible};

/// A bridge at each site, and the port between them.
const BRIDGE: &str = "inside";
const PORT: &str = "port";

/// The address of site a on its bridge, with its prefix, and that which site b may lease.
const HERE: &str = "10.77.0.1";
const LEASED: &str = "10.77.0.50";

/// A packet inside of VXLAN or Geneve over either version of IP fits into one of the tunnel.
const MTU: &str = "1280";

/// Bridges of both sites with a port to the other one, of the kind that `link` says in words of `ip link add`. `{n}` stands for the
/// site's number, `{m}` for the other's.
fn lay(sites: &Sites, link: &str) {
    for (site, other) in [(sites.a(), sites.b()), (sites.b(), sites.a())] {
        let ip = |words: &str| {
            site.gateway.tell(&[&["ip"][..], &words.split_whitespace().collect::<Vec<_>>()].concat())
        };
        let link = link.replace("{n}", &site.number.to_string()).replace("{m}", &other.number.to_string());
        ip(&format!("link add {BRIDGE} type bridge"));
        ip(&format!("link add {PORT} mtu {MTU} type {link}"));
        ip(&format!("link set {PORT} master {BRIDGE} up"));
        ip(&format!("link set {BRIDGE} mtu {MTU} up"));
    }
    sites.a().gateway.tell(&["ip", "address", "add", &format!("{HERE}/24"), "dev", BRIDGE]);
}

fn take_up(sites: &Sites) {
    for site in [sites.a(), sites.b()] {
        for link in [PORT, BRIDGE] {
            site.gateway.tell(&["ip", "link", "del", link]);
        }
    }
}

/// A DHCP server on the bridge of a site; it ends when it is dropped.
struct Dhcp {
    _process: Running,
    _folder: TempDir,
}

impl Dhcp {
    #[track_caller]
    fn start(place: &Place) -> Self {
        let folder = tempfile::tempdir().unwrap();
        let mut command = place.command(needs::tool("dnsmasq").unwrap());
        command.args([
            "--keep-in-foreground",
            "--conf-file=/dev/null",
            "--port=0",
            "--user=root",
            "--bind-interfaces",
        ]);
        command.arg(format!("--interface={BRIDGE}")).arg(format!("--dhcp-range={LEASED},{LEASED},10m"));
        for (key, file) in [("--pid-file", "pid"), ("--dhcp-leasefile", "leases"), ("--log-facility", "log")]
        {
            command.arg(format!("{key}={}", folder.path().join(file).display()));
        }
        let process = Running::start("dnsmasq", &mut command);
        clock::until("dnsmasq listens", PATIENCE, || {
            let sockets = place.tell(&["ss", "-Hlun", "sport = 67"]);
            if sockets.is_empty() { Err("no socket") } else { Ok(()) }
        });
        Self { _process: process, _folder: folder }
    }
}

/// Has a site lease an address on its bridge.
#[track_caller]
fn lease(place: &Place) {
    let folder = tempfile::tempdir().unwrap();
    let script = folder.path().join("script");
    let body = "#!/bin/sh\n[ \"$1\" != bound ] || exec ip address add \"$ip/24\" dev \"$interface\"\n";
    fs::write(&script, body).unwrap();
    fs::set_permissions(&script, std::os::unix::fs::PermissionsExt::from_mode(0o755)).unwrap();
    let mut command = place.command(needs::tool("busybox").unwrap());
    command.args(["udhcpc", "-f", "-n", "-q", "-t", "10", "-T", "1", "-i", BRIDGE, "-s"]).arg(&script);
    let output = run(&mut command, Duration::from_secs(30));
    assert!(output.status.success(), "{} {}", text(&output.stdout), text(&output.stderr));
    let addresses = place.tell(&["ip", "-4", "address", "show", "dev", BRIDGE]);
    assert!(addresses.contains(LEASED), "{addresses}");
}

/// The super-packets of packets inside of tunnels that a site has read and written.
fn super_packets(site: &Site) -> [u64; 2] {
    let samples = site.agent.samples();
    ["uplink", "downlink"]
        .map(|direction| samples.count("culvert_tun_tunnel_super_packets_total", &[("direction", direction)]))
}

/// TCP and random bytes both ways between the bridges. Each site has then cut what its kernel handed over, and joined what came.
#[track_caller]
fn carry(sites: &Sites, kind: &str) {
    let before = [sites.a(), sites.b()].map(super_packets);
    let (a, b) = (&sites.a().gateway, &sites.b().gateway);
    let [here, there]: [IpAddr; 2] = [HERE, LEASED].map(|address| address.parse().unwrap());
    Transfer::new(b, a, here, 8 << 20).run();
    Transfer::new(a, b, there, 8 << 20).run();
    let server = (here, ports::free()).into();
    let _server = Server::start(a, server);
    for reverse in [false, true] {
        let result = iperf::tcp(b, server, reverse);
        assert!(result.received > 0 && result.received <= result.sent, "{kind}: {result:?}");
    }
    for (site, before) in [sites.a(), sites.b()].into_iter().zip(before) {
        site.agent.wait_for("super-packets both ways", |_| {
            let now = super_packets(site);
            let more = now.iter().zip(before).all(|(now, before)| *now > before);
            if more { Ok(()) } else { Err(format!("{kind}: {before:?}, {now:?}")) }
        });
        let errors = site.agent.samples().by_label("culvert_tun_errors_total", "direction");
        assert_eq!(errors.len(), 0, "{kind}: {errors:?}");
    }
}

/// Two sites with an agent each that cuts and joins packets inside of tunnels; `None`, and the test is listed as skipped, where that
/// cannot be.
fn sites(test: &str) -> Option<Sites> {
    let tools = [
        Need::Tool("dnsmasq", "dnsmasq-base"),
        Need::Tool("busybox", "busybox"),
        Need::Tool("ss", "iproute2"),
    ];
    if !possible(test) || !needs::met(test, &tools) {
        return None;
    }
    let sites = Plan::two().start();
    wait_for_packets(&sites);
    let status = sites.a().agent.ask(&["status"]);
    if !status.contains("tunnels cut") {
        needs::skipped(test, "super-packets of tunnels, of Linux 6.17");
        return None;
    }
    assert!(status.contains("tunnels cut and joined"), "{status}");
    Some(sites)
}

#[test]
fn bridges_of_two_sites_with_vxlan_between_them_lease_addresses_and_carry_tcp() {
    let Some(sites) = sites("VXLAN inside of the tunnel") else { return };
    let kinds = [
        format!("vxlan id 7 local 10.9.0.{{n}} remote 10.9.0.{{m}} dstport 4789 noudpcsum dev {DEVICE}"),
        format!("vxlan id 7 local 10.9.0.{{n}} remote 10.9.0.{{m}} dstport 8472 udpcsum dev {DEVICE}"),
        format!("vxlan id 7 local fd09::{{n}} remote fd09::{{m}} dstport 4789 dev {DEVICE}"),
    ];
    for kind in &kinds {
        lay(&sites, kind);
        let _dhcp = Dhcp::start(&sites.a().gateway);
        lease(&sites.b().gateway);
        carry(&sites, kind);
        take_up(&sites);
    }
    assert_eq!(malformed(&sites), []);
}

#[test]
fn bridges_of_two_sites_with_geneve_between_them_lease_addresses_and_carry_tcp() {
    let test = "Geneve inside of the tunnel";
    let Some(sites) = sites(test) else { return };
    let probe = ["ip", "link", "add", "probe", "type", "geneve", "id", "1", "remote", "192.0.2.1"];
    let mut command = sites.west().command(probe[0]);
    if !run(command.args(&probe[1..]), Duration::from_secs(10)).status.success() {
        return needs::skipped(test, "Geneve devices in the kernel");
    }
    let kind = "geneve id 7 remote 10.9.0.{m} dstport 6081 udpcsum";
    lay(&sites, kind);
    let _dhcp = Dhcp::start(&sites.a().gateway);
    lease(&sites.b().gateway);
    carry(&sites, kind);
    assert_eq!(malformed(&sites), []);
}

/// Packets that agents took for malformed.
fn malformed(sites: &Sites) -> Vec<(String, f64)> {
    sites.drops().into_iter().filter(|(reason, _)| reason == "malformed").collect()
}
