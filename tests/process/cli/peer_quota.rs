//! `peer.quota` of a running daemon: `culvert peer set --quota-used`, and what outlives a restart and a kill.

use std::{fs, time::Duration};

use culvert_tests::{
    agent::Agent,
    client::Client,
    http::Samples,
    needs,
    pair::{Pair, Plan},
    ports,
    upstream::Echo,
};

const QUOTA: &str = "quota = { bytes = \"1MB\" }\n";

/// What the exit shows of the entry's quota.
fn wait_for_quota(exit: &Agent, name: &str, expected: u64) {
    exit.wait_for_count(&format!("culvert_peer_quota_{name}"), &[("peer", "entry")], expected);
}

#[track_caller]
fn refused(exit: &Agent, args: &[&str], words: &[&str]) {
    let refusal = exit.try_to_ask(&[&["peer", "set"][..], args].concat()).unwrap_err();
    assert!(words.iter().all(|word| refusal.contains(word)), "{words:?}: {refusal}");
}

/// Twenty datagrams of a new client go to the service and back; the bytes that the exit counts for them. It has counted none before.
fn first_bytes(pair: &Pair, client: &mut Client) -> u64 {
    client.converse(20);
    let mut bytes = 0;
    for direction in ["uplink", "downlink"] {
        let labels = [("peer", "entry"), ("direction", direction)];
        pair.exit.wait_for_count("culvert_peer_datagrams_delivered_total", &labels, 20);
        bytes += pair.exit.samples().count("culvert_peer_bytes_delivered_total", &labels);
    }
    assert!(bytes > 0);
    bytes
}

#[test]
fn a_count_is_kept_over_a_restart_and_set_by_an_operator() {
    if !needs::met("a peer's quota", needs::AGENTS) {
        return;
    }
    let (echo, ingress) = (Echo::new(), ports::loopback());
    let mut pair =
        Plan::default().peer(QUOTA).service("echo", echo.address, "").forward("echo", ingress).start();
    let file = pair.exit.folder().join("state/quotas");
    let bytes = first_bytes(&pair, &mut Client::new(0, ingress));
    wait_for_quota(&pair.exit, "used_bytes", bytes);

    // What an operator says is written at once: it outlives a kill.
    let said = pair.exit.ask(&["peer", "set", "entry", "--quota-used", "900kB"]);
    assert_eq!(said, "changed entry: effective now");
    wait_for_quota(&pair.exit, "used_bytes", 900_000);
    assert!(fs::read_to_string(&file).unwrap().contains("\nentry 900000 "));
    pair.exit.kill();
    pair.exit.start();
    wait_for_quota(&pair.exit, "used_bytes", 900_000);

    // What was carried in the last second is written at the stop.
    pair.wait_for_connection();
    let more = first_bytes(&pair, &mut Client::new(1, ingress));
    assert_eq!(pair.exit.terminate().code(), Some(0));
    pair.exit.start();
    wait_for_quota(&pair.exit, "used_bytes", 900_000 + more);

    // At the quota the session stays, and carries nothing.
    pair.wait_for_connection();
    assert_eq!(pair.exit.samples().count("culvert_peer_quota_reached", &[("peer", "entry")]), 0);
    pair.exit.ask(&["peer", "set", "entry", "--quota-used", "1MB"]);
    wait_for_quota(&pair.exit, "reached", 1);
    pair.exit.wait_for_log(&["the peer has used up its quota (remedy: ", "--quota-used 0"]);
    let mut client = Client::new(2, ingress);
    client.send();
    let dropped = |samples: &Samples| {
        let count = samples.count("culvert_datagrams_dropped_total", &[("reason", "quota")]);
        if count > 0 { Ok(()) } else { Err("nothing was dropped".to_owned()) }
    };
    pair.exit.wait_for("the quota drops", dropped);
    assert!(client.receive_any(Duration::from_millis(100)).is_err(), "nothing comes back");
    let status = pair.exit.ask(&["status", "entry"]);
    assert!(status.contains("of 1MB used until ") && status.contains(", stopped"), "{status}");
    let json: serde_json::Value =
        serde_json::from_str(&pair.exit.ask(&["status", "entry", "--json"])).unwrap();
    assert!(json.to_string().contains("\"used_bytes\":1000000"), "{json}");
    pair.exit.ask(&["peer", "set", "entry", "--quota-used", "0"]);
    wait_for_quota(&pair.exit, "reached", 0);
    client.reach();
}

#[test]
fn a_count_that_cannot_be_set_is_refused_and_one_that_cannot_be_read_is_reported() {
    if !needs::met("counts that are wrong", needs::AGENTS) {
        return;
    }
    let mut pair = Plan::default().peer(QUOTA).start();
    let exit = &mut pair.exit;
    refused(exit, &["nobody", "--quota-used", "0"], &["no peer is named", "(remedy: "]);
    refused(exit, &["entry", "--quota-used", "many"], &["is no number of bytes", "(remedy: "]);
    refused(exit, &["entry", "--quota-used", "0", "--rate", "1Mbit"], &["cannot be used with"]);
    let config = fs::read_to_string(exit.config()).unwrap();
    fs::write(exit.config(), config.replace(QUOTA, "")).unwrap();
    let said = exit.ask(&["reload"]);
    assert!(said.contains("- peer \"entry\": quota"), "{said}");
    refused(exit, &["entry", "--quota-used", "0"], &["has no quota", "(remedy: peer.quota"]);
    assert_eq!(exit.terminate().code(), Some(0));
    refused(exit, &["entry", "--quota-used", "0"], &["(remedy: culvert run"]);

    fs::write(exit.config(), config).unwrap();
    fs::write(exit.folder().join("state/quotas"), "entry 700 99999999999\nentry seventy 0\n").unwrap();
    exit.start();
    exit.wait_for_log(&[
        "not all that peers have carried",
        "line 2 is no count",
        "quotas.broken",
        "(remedy: ",
    ]);
    wait_for_quota(exit, "used_bytes", 700);
}
