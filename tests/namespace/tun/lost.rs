//! A device that somebody takes away while the agent runs: it is said, and everything else goes on.

use std::{fs, net::Ipv4Addr};

use culvert_tests::{client::Client, pair::Plan, ports, upstream::Echo};

use crate::{Space, until};

const TUN: &str = "[tun]\nname = \"culvert7\"\naddress = [\"10.9.0.1/24\"]\n";

#[test]
fn services_go_on_without_the_device() {
    let Some(space) = Space::new("a TUN device that is taken away") else { return };
    let (place, ingress) = (space.place(), (Ipv4Addr::LOCALHOST, ports::free()).into());
    let echo = place.enter(Echo::new);
    let plan = Plan::default().at([place.clone(), place.clone()]).workers([2; 2]);
    // One device for both: the exit's.
    let plan = plan.service("echo", echo.address, "").forward("echo", ingress).exit(TUN);
    let mut pair = plan.prepare();
    // Its last section is the peer's.
    let mut config = fs::read_to_string(pair.exit.config()).unwrap();
    config += "allowed_ips = [\"192.0.2.0/24\"]\n";
    fs::write(pair.exit.config(), config).unwrap();
    pair.exit.start();
    pair.entry.start();
    pair.wait_for_connection();
    let mut client = place.enter(|| Client::new(1, ingress));
    client.converse(3);

    space.ip("link set culvert7 down");
    pair.exit.wait_for_log(&["WARN", "the TUN device is down", "(remedy: `ip link set culvert7 up`)"]);
    client.converse(3);
    space.ip("link set culvert7 up");
    pair.exit.wait_for_log(&["the TUN device is up again"]);
    until(&space, "route show", |said| said.contains("192.0.2.0/24 dev culvert7 proto 199"));

    // A namespace for the programs that are to use the tunnel, and nothing else.
    let confined = Space::new("a TUN device that is moved").unwrap();
    space.ip(&format!("link set culvert7 netns {}", confined.0));
    pair.exit.wait_for_log(&["WARN", "was moved to another network namespace"]);
    client.converse(3);
    assert_eq!(pair.exit.get("/readyz").unwrap().status, 200, "packets go on");
    confined.ip("link set culvert7 up");
    confined.ip(&format!("link set culvert7 netns {}", space.0));
    space.ip("link set culvert7 up");
    until(&space, "route show", |said| said.contains("192.0.2.0/24 dev culvert7 proto 199"));

    space.ip("link delete culvert7");
    pair.exit.wait_for_log(&["WARN", "somebody has removed the TUN device", "(remedy: restart the daemon)"]);
    client.converse(3);
    assert_eq!(pair.exit.get("/readyz").unwrap().status, 503, "it is not ready any more");
    assert!(pair.exit.terminate().success());
    let log = pair.exit.log();
    let said = log.lines().filter(|line| line.contains("WARN culvert_engine::tunnel"));
    assert_eq!(said.count(), 3, "each is said once: {log}");
}

#[test]
fn agents_with_different_marks_are_told() {
    let Some(space) = Space::new("agents of one host with different marks") else { return };
    let place = space.place();
    // Of an agent that has packets led there.
    space.ip("rule add not fwmark 9 lookup 51900 priority 31901 protocol 199");
    space.ip("route add blackhole 0.0.0.0/0 table 51900");
    let mut pair = Plan::default().at([place.clone(), place]).transport("mark = 77\n").exit(TUN).prepare();
    pair.exit.start();
    pair.exit.wait_for_log(&["WARN", "another agent of this host has another mark", "mark=77", "other=9"]);
    assert!(pair.exit.terminate().success());
}
