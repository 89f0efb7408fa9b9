//! Two ends that are not alike, and peers that come and go while the tunnel runs.

use culvert_tests::{
    agent::culvert,
    capture::Capture,
    clock::{self, PATIENCE},
    probe,
    process::text,
    sites::{Family, Plan, Site, Sites},
    transfer::Transfer,
};

use super::{mtu::wait_for_packets, possible, two_sites::request};

/// Packets, requests and streams in both directions, none of them with a wrong checksum where they arrive.
#[track_caller]
fn carry(sites: &Sites) {
    sites.cut();
    wait_for_packets(sites);
    for (from, to) in [(sites.a(), sites.b()), (sites.b(), sites.a())] {
        for family in Family::BOTH {
            let source = from.host_address(family);
            let arriving = Capture::start(&to.host, "lan", &format!("src host {source}"));
            probe::reaches(&from.host, to.host_address(family), &[]);
            request(from, to, family);
            Transfer::new(&from.host, &to.host, to.host_address(family), 1 << 20).run();
            let text = arriving.stop_when("the end of the transfer", |text| text.contains("Flags [F")).text();
            for wrong in ["incorrect", "bad udp cksum", "wrong icmp cksum", "bad cksum"] {
                assert!(!text.contains(wrong), "{wrong}: {text}");
            }
        }
    }
    assert_eq!(sites.drops(), []);
    sites.accounts();
}

#[test]
fn ends_with_one_worker_and_with_four_understand_each_other() {
    if !possible("ends with other numbers of workers") {
        return;
    }
    for (a, b) in [(1, 4), (4, 1), (3, 2)] {
        let mut sites = Plan::two().prepare();
        for (site, workers) in sites.all().iter().zip([a, b]) {
            site.edit("workers = 2\n", &format!("workers = {workers}\n"));
        }
        sites.start();
        carry(&sites);
    }
}

#[test]
fn ends_with_and_without_offload_understand_each_other() {
    if !possible("ends without offload") {
        return;
    }
    for (a, b) in [("off", "auto"), ("auto", "off"), ("off", "off")] {
        let mut sites = Plan::two().prepare();
        for (site, offload) in sites.all().iter().zip([a, b]) {
            site.edit("[tun]\n", &format!("[tun]\noffload = \"{offload}\"\n"));
        }
        sites.start();
        carry(&sites);
    }
}

/// Runs a command of the operator of a site's agent.
#[track_caller]
fn command(site: &Site, args: &[&str]) -> String {
    let file = site.agent.config();
    let output = culvert(&[args, &["--config", file.to_str().unwrap()]].concat());
    assert_eq!(output.status.code(), Some(0), "{args:?}: {}", text(&output.stderr));
    text(&output.stdout)
}

#[test]
fn a_peer_that_is_added_while_the_agent_runs_gets_its_routes_and_loses_them_again() {
    if !possible("a peer at run time") {
        return;
    }
    let mut sites = Plan::two().prepare();
    let config = std::fs::read_to_string(sites.a().agent.config()).unwrap();
    let (_, peer) = config.split_once("[[peer]]").unwrap();
    sites.a().edit(&format!("[[peer]]{peer}"), "");
    for site in sites.all_mut() {
        site.agent.start();
    }
    let (a, b) = (sites.a(), sites.b());
    let before = a.routing();
    for round in 0..2 {
        let prefixes = ["10.9.0.2/32", "10.9.2.0/24", "fd09::2/128", "fd09:0:0:2::/64"];
        let allowed = prefixes.map(|prefix| ["--allowed-ip", prefix]);
        command(a, &[&["peer", "add", "b", b.agent.key()], allowed.as_flattened()].concat());
        sites.wait_for_connection();
        clock::until("the routes are there", PATIENCE, || {
            let now = a.routing();
            if now.contains("10.9.2.0/24") && now.contains("fd09:0:0:2::/64") { Ok(()) } else { Err(now) }
        });
        for family in Family::BOTH {
            probe::reaches(&b.host, a.host_address(family), &[]);
            probe::reaches(&a.host, b.host_address(family), &[]);
        }
        if round == 0 {
            sites.accounts();
        }
        command(a, &["peer", "remove", "b"]);
        clock::until("the routes are gone", PATIENCE, || {
            let now = a.routing();
            if now == before { Ok(()) } else { Err(now) }
        });
        assert_eq!(probe::ping(&b.host, a.host_address(Family::V4), &["-c", "1", "-W", "1"]).received, 0);
    }
}
