//! Paths of the kernel's own netem and fq_codel.

use std::net::SocketAddr;

use culvert_tests::{
    iperf::{self, Client, Server},
    qdiscs::{self, Qdiscs},
    sites::{Family, Plan, Sites},
};
use serde_json::Value;

use super::possible;

/// What any build of an agent carries on a machine that does other things too.
const LINK: &str = "tbf rate 50mbit burst 32k latency 50ms";

/// Sites with qdiscs between them, and a forward from site b to iperf3 at site a.
#[track_caller]
fn sites(peer: &str, there: &[&str], back: &[&str]) -> (Sites, Qdiscs) {
    let mut sites = Plan::two().peer("services = [\"iperf\"]\n").peer(peer).prepare();
    let mut qdiscs = sites.lay_qdiscs();
    qdiscs.set("vec0", there);
    qdiscs.set("vec1", back);
    let (a, b) = (sites.a(), sites.b());
    let upstream = SocketAddr::new(a.host_address(Family::V4), iperf::PORT);
    for site in [a, b] {
        site.append(&format!("[[service]]\nname = \"iperf\"\nupstream = \"{upstream}\"\n"));
    }
    let listen = SocketAddr::new(b.lan_address(Family::V4), iperf::PORT);
    for protocol in ["udp", "tcp"] {
        b.append(&format!("[[{protocol}]]\nlisten = \"{listen}\"\npeer = \"a\"\nservice = \"iperf\"\n"));
    }
    sites.start();
    (sites, qdiscs)
}

/// What agent b says of its peer.
#[track_caller]
fn peer(sites: &Sites) -> Value {
    let mut status: Value = serde_json::from_str(&sites.b().agent.ask(&["status", "--json"])).unwrap();
    status["status"]["peers"][0].take()
}

/// Mbit/s that arrive of what iperf3 sends from site b.
#[track_caller]
fn load(sites: &Sites, server: SocketAddr, args: &[&str]) -> f64 {
    let report = Client::start(&sites.b().host, server, args).finish();
    report["end"]["sum_received"]["bits_per_second"].as_f64().unwrap() / 1e6
}

#[test]
fn packets_that_netem_has_overtake_each_other_are_not_lost_and_slow_no_forward_down() {
    if !possible("netem") || !qdiscs::possible("netem") {
        return;
    }
    let path = ["netem delay 40ms 5ms limit 20000", LINK];
    let (sites, mut qdiscs) = sites("", &path, &path);
    let _server =
        Server::start(&sites.a().host, SocketAddr::new(sites.a().host_address(Family::V4), iperf::PORT));
    let forward = SocketAddr::new(sites.b().lan_address(Family::V4), iperf::PORT);
    load(&sites, forward, &["-u", "-b", "10M", "-l", "1150", "-w", "4M", "-t", "4"]);
    let lanes = peer(&sites)["lane_packets"].take();
    assert!(lanes["reordered"].as_u64().unwrap() > 100, "{lanes:#}");
    assert!(lanes["lost_share"].as_f64().unwrap() <= 0.001, "{lanes:#}");
    assert_eq!([qdiscs.dropped("vec0"), qdiscs.dropped("vec1")], [0, 0]);
    let rate = load(&sites, forward, &["-O", "2", "-t", "4"]);
    assert!(rate >= 25.0, "{rate} Mbit/s of 50");
    sites.accounts();
}

#[test]
fn behind_fq_codel_an_automatic_rate_says_that_no_queue_stands_and_shows_no_limit() {
    if !possible("fq_codel") || !qdiscs::possible("fq_codel") {
        return;
    }
    let (sites, _qdiscs) = sites("rate = \"auto\"\n", &[LINK, "fq_codel"], &["netem delay 20ms limit 20000"]);
    let server = SocketAddr::new(sites.a().host_address(Family::V4), iperf::PORT);
    let _server = Server::start(&sites.a().host, server);
    let carried = load(&sites, server, &["-P", "4", "-C", "cubic", "-t", "8"]);
    let rate = peer(&sites)["rate"].take();
    assert!(carried >= 25.0, "{carried} Mbit/s of 50: {rate:#}");
    assert_eq!(rate["from"], "no_queue", "{carried} Mbit/s: {rate:#}");
    let text = sites.b().agent.ask(&["status", "a"]);
    let limit = text.lines().find(|line| line.contains("rate limit")).unwrap();
    assert!(limit.contains("none"), "{text}");
    sites.accounts();
}
