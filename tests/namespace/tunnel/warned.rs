//! What does not fit together is said: in the log, by `culvert status`, and when a peer is added.

use std::fs;

use culvert_tests::{
    agent::culvert,
    clock::{self, PATIENCE},
    probe,
    process::text,
    sites::{Family, Plan, Site},
};
use serde_json::Value;

use super::possible;

/// What `culvert status` says of the only peer, as JSON, and all of it as text.
#[track_caller]
fn status(site: &Site) -> (Value, String) {
    let file = site.agent.config();
    let ask = |more: &[&str]| {
        let output = culvert(&[&["status", "--config", file.to_str().unwrap()], more].concat());
        assert_eq!(output.status.code(), Some(0), "{}", text(&output.stderr));
        text(&output.stdout)
    };
    let json: Value = serde_json::from_str(&ask(&["--json"])).unwrap();
    (json["status"]["peers"][0].clone(), ask(&[]))
}

#[test]
fn a_peer_without_a_tunnel_does_not_look_healthy() {
    if !possible("a peer without a tunnel") {
        return;
    }
    let mut sites = Plan::two().prepare();
    let file = sites.b().agent.config();
    let kept: Vec<String> = fs::read_to_string(&file)
        .unwrap()
        .lines()
        .filter(|line| {
            !["[tun]", "name = \"culvert0\"", "address = ", "allowed_ips = "]
                .iter()
                .any(|start| line.starts_with(start))
        })
        .map(|line| format!("{line}\n"))
        .collect();
    fs::write(&file, kept.concat()).unwrap();
    sites.start();
    let (a, b) = (sites.a(), sites.b());
    a.agent.wait_for_log(&["WARN", "the peer has no [tun]: IP packets for it are dropped", "peer=\"b\""]);
    assert_eq!(probe::ping(&a.gateway, b.tunnel_address(Family::V4), &["-c", "3", "-W", "1"]).received, 0);
    let settled = || {
        let (peer, text) = status(a);
        let dropped = peer["dropped"]["uplink"]["no_tun"].as_u64();
        let measured = a.agent.samples().count("culvert_lane_packet_bytes", &[("peer", "b")]) > 1_400;
        if measured && dropped == Some(3) { Ok((peer, text)) } else { Err(text) }
    };
    let (peer, text) = clock::until("drops are shown", PATIENCE, settled);
    assert_eq!(peer["inner_mtu"], Value::Null, "{text}");
    assert!(text.contains("\nb dropped: uplink no_tun 3\n"), "{text}");
}

#[test]
fn a_peer_behind_the_tunnel_that_it_is_to_carry_is_said() {
    if !possible("a loop") {
        return;
    }
    let mut sites = Plan::two().prepare();
    let (net, outer) = ("198.51.100.0/24", sites.b().outer_address(Family::V4));
    sites.a().edit("allowed_ips = [", &format!("allowed_ips = [\"{net}\", "));
    for site in sites.all_mut() {
        site.agent.start();
    }
    let words =
        ["WARN", "the tunnel's own packets go into the tunnel (remedy: set transport.mark", "held_by=\"b\""];
    let line = sites.a().agent.wait_for_log(&words);
    assert!(line.contains(&format!("remote={outer}:")), "{line}");
    // A longer route leads out of it.
    sites.a().gateway.tell(&["ip", "route", "add", &outer.to_string(), "via", "192.0.2.1"]);
    sites.wait_for_connection();
}

#[test]
fn a_peer_whose_prefix_another_interface_has_is_not_added() {
    if !possible("a route that is taken") {
        return;
    }
    let mut sites = Plan::two().prepare();
    sites.a().edit("\"10.9.2.0/24\", ", "");
    sites.start();
    let a = sites.a();
    let file = a.agent.config();
    let add = |prefix: &str| {
        let key = "AQEBAQEBAQEBAQEBAQEBAQEBAQEBAQEBAQEBAQEBAQE";
        let config = ["--config", file.to_str().unwrap()];
        culvert(
            &[&["peer", "add", "c", key, "--allowed-ip", "10.9.2.0/24", "--allowed-ip", prefix], &config[..]]
                .concat(),
        )
    };
    let before = a.routing();
    for prefix in ["10.9.1.0/24", "fd09:0:0:1::/64"] {
        let output = add(prefix);
        assert_eq!(output.status.code(), Some(1));
        let error = text(&output.stderr);
        let words = format!("no route to {prefix} through the tunnel: lan has one already (remedy: ");
        assert!(error.contains(&words), "{error}");
    }
    assert_eq!(a.routing(), before);
    // The prefix of the device's own link is no one else's.
    let output = add("10.9.0.0/24");
    assert_eq!(output.status.code(), Some(0), "{}", text(&output.stderr));
}
