//! TCP that begins as soon as a session has, where packets inside are smaller than the device's usual ones.

use std::{net::SocketAddr, thread, time::Duration};

use culvert_tests::{
    clock::{self, PATIENCE},
    iperf::{Client, PORT, Server},
    process::{run, text},
    sites::{Family, Plan, Site, Sites},
};

use super::possible;

/// How long after the first answered ping of a session the connection begins: twice at once, the second time as all the others after
/// a restart.
const WAITS: [Duration; 4] =
    [Duration::ZERO, Duration::ZERO, Duration::from_millis(100), Duration::from_millis(500)];

/// How much later the connection begins with which the others are compared.
const SETTLED: Duration = Duration::from_secs(5);

/// The link between the routers: what any build of an agent carries on a machine that does other things too.
const LINK: &str = "50mbit";

/// Waits until the sites reach each other, for a moment at a time.
#[track_caller]
fn ping(from: &Site, to: &Site) {
    let address = to.tunnel_address(Family::V4).to_string();
    clock::until("a ping is answered", PATIENCE, || {
        let mut command = from.gateway.command("ping");
        let output = run(command.args(["-c", "1", "-W", "0.2", &address]), PATIENCE);
        if output.status.success() { Ok(()) } else { Err(text(&output.stdout)) }
    });
}

/// Bytes that arrive of what a connection of one second sends.
#[track_caller]
fn carried(from: &Site, to: &Site) -> u64 {
    let server = SocketAddr::new(to.tunnel_address(Family::V4), PORT);
    let report = Client::start(&from.gateway, server, &["-t", "1", "-C", "cubic"]).finish();
    report["end"]["sum_received"]["bytes"].as_u64().unwrap()
}

/// A connection that begins with a session carries at least half in its first second of what one carries that begins later. It
/// was next to nothing while packets that turned out to be too large were dropped without an answer.
#[track_caller]
#[expect(clippy::print_stderr, reason = "captured, and shown with the failure that it belongs to")]
fn begins(mut sites: Sites) {
    for router in [sites.west(), sites.east()] {
        let queue = ["tc", "qdisc", "replace", "dev", "middle", "root", "tbf"];
        router.tell(&[&queue[..], &["rate", LINK, "burst", "32k", "latency", "50ms"]].concat());
    }
    sites.start();
    let any = SocketAddr::new("0.0.0.0".parse().unwrap(), PORT);
    let _server = Server::start(&sites.a().gateway, any);
    let mut begun = Vec::new();
    for (number, wait) in WAITS.into_iter().enumerate() {
        if number > 0 {
            let agent = &mut sites.all_mut()[1].agent;
            agent.kill();
            agent.start();
        }
        ping(sites.b(), sites.a());
        thread::sleep(wait);
        begun.push(carried(sites.b(), sites.a()));
    }
    thread::sleep(SETTLED);
    let settled = carried(sites.b(), sites.a());
    let shares: Vec<u64> = begun.iter().map(|bytes| 100 * bytes / settled).collect();
    eprintln!("begun after {WAITS:?}: {shares:?} % of {} Mbit/s", settled * 8 / 1_000_000);
    assert!(shares.iter().all(|share| *share >= 50), "{shares:?} % of {settled} bytes: {:?}", sites.drops());
}

#[test]
fn tcp_that_begins_with_a_session_on_a_path_of_1400_is_not_slower_than_later() {
    if !possible("TCP from the start, on a path of 1400") {
        return;
    }
    let sites = Plan::two().prepare();
    sites.set_middle_mtu(1400);
    begins(sites);
}

#[test]
fn tcp_that_begins_with_a_session_with_repair_is_not_slower_than_later() {
    if !possible("TCP from the start, with repair") {
        return;
    }
    begins(Plan::two().peer("repair = { mode = \"auto\", dscp = \"all\", order = \"hold\" }\n").prepare());
}
