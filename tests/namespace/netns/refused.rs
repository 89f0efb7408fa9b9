//! What the kernel of an agent's host refuses to send: status, log and doctor name the kernel's error first, and the session is back
//! when it is over.

use std::time::Duration;

use culvert_tests::{
    agent::Agent,
    client::Client,
    clock::{self, PATIENCE},
    firewall::Blockade,
    needs::{self, Need},
    pair::{Pair, Plan},
    place::{Cable, Place},
    upstream::Echo,
};
use serde_json::Value;

use culvert_tests::ports::loopback;

use crate::reach::examine;

/// A cable between an entry and an exit that do not run yet, and a service at the exit.
struct Bed {
    _cable: Cable,
    places: [Place; 2],
    _echo: Echo,
    client: Client,
    pair: Pair,
}

impl Bed {
    fn new() -> Self {
        let cable = Cable::new();
        let places = cable.places();
        let (echo, ingress) = (places[1].enter(Echo::new), loopback());
        let plan = Plan::default().at(places.clone()).underlay(Cable::SECOND[0].parse().unwrap());
        let plan =
            plan.peer("keepalive = \"2s\"\n").service("echo", echo.address, "").forward("echo", ingress);
        let client = places[0].enter(|| Client::new(0, ingress));
        Self { _cable: cable, places, _echo: echo, client, pair: plan.prepare() }
    }

    fn start(&mut self) {
        self.pair.exit.start();
        self.pair.entry.start();
    }

    /// Sends datagrams of `bytes` bytes, a tenth of a second apart, until `look` finds what it looks for in the peer's status.
    #[track_caller]
    fn send_until(&self, bytes: usize, what: &str, look: impl Fn(&Value) -> bool) -> Value {
        clock::until(what, 3 * PATIENCE, || {
            drop(self.client.socket().send(&vec![7; bytes]));
            std::thread::sleep(Duration::from_millis(100));
            let peer = status(&self.pair.entry);
            if look(&peer) { Ok(peer) } else { Err(peer.to_string()) }
        })
    }

    /// Waits for an attempt that has failed.
    #[track_caller]
    fn failure(&self) -> String {
        let failed = |peer: &Value| {
            peer["last_error"]["reason"].as_str().is_some_and(|reason| reason.contains("refuses to send"))
        };
        self.send_until(100, "an attempt has failed", failed)["last_error"].to_string()
    }
}

/// What the entry says of its peer.
fn status(entry: &Agent) -> Value {
    let status: Value = serde_json::from_str(&entry.ask(&["status", "--json"])).unwrap();
    status["status"]["peers"][0].clone()
}

/// The remedy comes before every other cause.
#[track_caller]
fn says(error: &str, kernel: &str, remedy: &str) {
    let error: Value = serde_json::from_str(error).unwrap();
    let (reason, first) = (error["reason"].as_str().unwrap(), error["likely_causes"][0].as_str().unwrap());
    assert!(reason.contains(kernel) && first.starts_with(remedy), "{error:#}");
}

fn needs(test: &str) -> bool {
    let tools = [Need::Tool("nft", "nftables")];
    needs::met(test, needs::NETNS) && needs::met(test, &tools)
}

#[test]
fn a_firewall_of_this_host_is_named_and_the_session_comes_when_its_rule_goes() {
    if !needs("a firewall of this host") {
        return;
    }
    let mut bed = Bed::new();
    let pattern = format!("udp dport {}", bed.pair.underlay.port());
    let blockade = Blockade::of_own(&bed.places[0], &pattern);
    // The doctor dials by itself where no daemon runs.
    let (_, report) = examine(&bed.pair.entry);
    assert!(report.to_string().contains("Operation not permitted"), "{report:#}");
    bed.start();
    says(&bed.failure(), "Operation not permitted", "a firewall rule of this host");
    let line = bed
        .pair
        .entry
        .wait_for_log(&["this host refuses to send packets to the peer", "a firewall rule of this host"]);
    assert!(line.contains("Operation not permitted"), "{line}");
    drop(blockade);
    bed.pair.wait_for_connection();
    bed.client.reach();
    bed.client.converse(5);

    // With a session up, too.
    let blockade = Blockade::of_own(&bed.places[0], &pattern);
    let refused = bed.send_until(100, "a refusal is shown", |peer| {
        peer["send_error"]["reason"].as_str().is_some_and(|reason| reason.contains("Operation not permitted"))
    });
    let remedy = refused["send_error"]["remedy"].as_str().unwrap();
    assert!(remedy.starts_with("a firewall rule of this host"), "{refused:#}");
    drop(blockade);
    bed.client.reach();
    bed.client.converse(5);
}

#[test]
fn an_interface_below_1228_bytes_is_named_and_the_session_comes_when_it_is_larger() {
    if !needs("an interface below 1228 bytes") {
        return;
    }
    let set_mtu = |bed: &Bed, bytes| {
        bed.places[0].tell(&["ip", "link", "set", "veth0", "mtu", bytes]);
    };
    let mut bed = Bed::new();
    set_mtu(&bed, "1200");
    let (_, report) = examine(&bed.pair.entry);
    assert!(report.to_string().contains("QUIC needs 1228"), "{report:#}");
    bed.start();
    says(&bed.failure(), "Message too long", "the MTU of the interface");
    set_mtu(&bed, "1500");
    bed.pair.wait_for_connection();
    bed.client.reach();
    bed.client.converse(5);

    // A session that is up goes on with what still passes, and ends after half a minute of refusals: with their headers these
    // datagrams have between 1172 and 1200 bytes.
    set_mtu(&bed, "1200");
    let ended = bed.send_until(1_160, "the session has ended", |peer| peer["state"] != "connected");
    says(&bed.failure(), "Message too long", "the MTU of the interface");
    drop(ended);
    set_mtu(&bed, "1500");
    bed.client.reach();
    bed.client.converse(5);
}
