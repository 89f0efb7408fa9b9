//! What the kernel of a host refuses to send: named before anything else, and not promised again.

use std::time::Duration;

use engine::worker::Worker;

use super::*;

const SECOND: Duration = Duration::from_secs(1);

/// EPERM, as a firewall's rule for the host's own packets makes it.
const EPERM: i32 = 1;

const ENOBUFS: i32 = 105;

/// The device's MTU is 1200.
const BELOW_QUIC: usize = 1200 - 28;

impl Pair {
    fn error(&mut self) -> engine::status::LastError {
        self.world.run(SECOND / 2);
        self.world.peer(self.entry).last_error.expect("there is no connection")
    }

    /// The budget of packets to the exit at the entry.
    fn budget(&mut self) -> usize {
        let workers = &self.world.agent(self.entry).workers;
        workers[0].peers().iter().find_map(|peer| Some(peer.data.link.as_ref()?.budget.bytes())).unwrap_or(0)
    }
}

#[test]
fn an_error_of_the_own_kernel_comes_before_the_causes_of_a_silent_peer() {
    for (errno, words, remedy) in [
        (EPERM, "Operation not permitted", "a firewall rule of this host"),
        (ENOBUFS, "No buffer space available", "the queue of the interface"),
        (13, "Permission denied", "a route or rule of this host"),
        (22, "Invalid argument", "the source address is gone"),
        (5, "Input/output error", "the kernel's log"),
    ] {
        let mut pair = Pair::new(3_100 + errno as u64, "", "");
        pair.world.fabric.set_send_error(ENTRY, Some(errno));
        pair.world.run(4 * SECOND);
        let error = pair.error().failure;
        assert!(
            error.reason.starts_with("this host refuses to send 1200 bytes to 198.51.100.1:"),
            "{error:?}"
        );
        assert!(error.reason.contains(words) && error.reason.contains("no answer"), "{error:?}");
        assert!(error.causes[0].starts_with(remedy) && error.causes.len() > 2, "{error:?}");
        let sent = pair.world.peer(pair.entry).send_error.clone().unwrap();
        assert!(sent.reason.contains(words) && sent.count >= 3 && sent.age_seconds < 4.0, "{sent:?}");
        pair.world.fabric.set_send_error(ENTRY, None);
        pair.wait_for_lanes(1);
    }
}

#[test]
fn dialling_over_a_device_with_a_small_mtu_names_it() {
    let mut pair = Pair::new(3_200, "", "");
    pair.world.fabric.set_device_mtu(ENTRY, BELOW_QUIC);
    pair.world.run(4 * SECOND);
    let error = pair.error().failure;
    assert!(error.reason.contains("Message too long"), "{error:?}");
    assert!(error.causes[0].starts_with("the MTU of the interface"), "{error:?}");
}

#[test]
fn a_device_that_is_merely_small_is_found_without_a_word() {
    let mut pair = Pair::new(3_201, "", "");
    pair.world.fabric.set_device_mtu(ENTRY, 1372);
    pair.wait_for_lanes(1);
    pair.world.run(5 * SECOND);
    let peer = pair.world.peer(pair.entry);
    assert!(peer.send_error.is_none() && peer.last_error.is_none(), "{:?}", peer.send_error);
    let budget = pair.budget();
    assert!((1364..=1372).contains(&budget), "{budget}");
}

#[test]
fn what_the_socket_has_refused_is_not_sent_again() {
    let mut pair = Pair::connected(3_202, "", "");
    let mut client = pair.client(1000);
    for _ in 0..20 {
        client.send(INGRESS, &[7; 1392]);
        pair.run_served(Duration::from_millis(5));
    }
    assert_eq!(pair.budget(), 1472);
    pair.world.fabric.set_device_mtu(ENTRY, 1300);
    let refused = "culvert_datagrams_dropped_total{direction=\"uplink\",reason=\"send_too_large\"}";
    client.send(INGRESS, &[7; 1392]);
    pair.run_served(Duration::from_millis(10));
    let budget = pair.budget();
    assert!(budget <= 1300, "{budget}");
    for _ in 0..200 {
        client.send(INGRESS, &[7; 1392]);
        pair.run_served(Duration::from_millis(5));
    }
    assert_eq!(pair.world.metric(pair.entry, refused), 1, "the rest is known not to fit");
    pair.assert_balanced();
}

#[test]
fn a_session_below_the_least_of_quic_ends_after_half_a_minute_and_says_why() {
    let mut pair = Pair::connected(3_203, "keepalive = \"5s\"", "");
    let mut client = pair.client(1000);
    let mut hub = |pair: &mut Pair, seconds: u32| {
        for _ in 0..seconds * 10 {
            client.send(INGRESS, &[7; 1392]);
            client.send(INGRESS, &[7; 100]);
            pair.run_served(SECOND / 10);
        }
        client.receive().len()
    };
    hub(&mut pair, 1);
    pair.world.fabric.set_device_mtu(ENTRY, BELOW_QUIC);
    hub(&mut pair, 2);
    let budget = pair.budget();
    assert!(budget <= BELOW_QUIC, "{budget}");
    assert!(hub(&mut pair, 25) >= 240, "small datagrams still pass");
    assert!(pair.world.peer(pair.entry).connected());
    // The device is as before for a while: nothing ends.
    pair.world.fabric.set_device_mtu(ENTRY, 1472);
    hub(&mut pair, 6);
    assert!(pair.world.peer(pair.entry).connected());
    assert_eq!(pair.budget(), 1472);
    pair.world.fabric.set_device_mtu(ENTRY, BELOW_QUIC);
    hub(&mut pair, 28);
    assert!(pair.world.peer(pair.entry).connected());
    hub(&mut pair, 6);
    assert!(!pair.world.peer(pair.entry).connected());
    let error = pair.error().failure;
    assert!(error.reason.contains("Message too long"), "{error:?}");
    assert!(error.causes[0].starts_with("the MTU of the interface"), "{error:?}");
    pair.world.fabric.set_device_mtu(ENTRY, 1472);
    hub(&mut pair, 20);
    assert!(pair.world.peer(pair.entry).connected());
    pair.assert_balanced();
}

/// Its packets are those of quinn-proto, which has no way to ask the socket.
#[test]
fn a_session_without_lanes_ends_after_half_a_minute_of_refusals_too() {
    let mut pair = Pair::new(3_205, "keepalive = \"5s\"", "");
    for place in [pair.entry, pair.exit] {
        pair.world.agent(place).workers.iter_mut().for_each(Worker::withhold_lanes);
    }
    let entry = pair.entry;
    let is_standard = |world: &mut World| world.peer(entry).mode.as_deref() == Some("standard");
    pair.world.run_till(5 * SECOND, is_standard);
    let mut client = pair.client(1000);
    let mut hub = |pair: &mut Pair, seconds: u32| {
        for _ in 0..seconds * 10 {
            // A packet of 1200 bytes, and one that passes.
            client.send(INGRESS, &[7; 1100]);
            pair.run_served(SECOND / 20);
            client.send(INGRESS, &[7; 100]);
            pair.run_served(SECOND / 20);
        }
        client.receive().len()
    };
    assert!(hub(&mut pair, 3) > 50);
    pair.world.fabric.set_device_mtu(ENTRY, 1100);
    assert!(hub(&mut pair, 20) >= 150, "small datagrams still pass");
    let refused = pair.world.peer(pair.entry).send_error.unwrap();
    assert!(refused.reason.contains("Message too long"), "{refused:?}");
    assert!(pair.world.peer(pair.entry).connected());
    // The device is as before for a while: nothing ends.
    pair.world.fabric.set_device_mtu(ENTRY, 1472);
    hub(&mut pair, 6);
    pair.world.fabric.set_device_mtu(ENTRY, 1100);
    hub(&mut pair, 25);
    assert!(pair.world.peer(pair.entry).connected());
    hub(&mut pair, 12);
    assert!(!pair.world.peer(pair.entry).connected());
    let error = pair.error().failure;
    assert!(error.reason.contains("Message too long"), "{error:?}");
    assert!(error.causes[0].starts_with("the MTU of the interface"), "{error:?}");
    pair.world.fabric.set_device_mtu(ENTRY, 1472);
    hub(&mut pair, 20);
    assert!(pair.world.peer(pair.entry).connected());
    pair.assert_balanced();
}

#[test]
fn a_peer_that_has_answered_is_not_suspected_of_what_it_has_proved() {
    let mut pair = Pair::connected(3_204, "", "");
    pair.world.run(5 * SECOND);
    pair.world.set_mtu(ENTRY, EXIT, 0);
    let mut client = pair.client(1000);
    for _ in 0..20 {
        client.send(INGRESS, &[7; 100]);
        pair.world.run(SECOND);
    }
    let error = pair.error().failure;
    assert!(error.reason.contains("it answered until ") && error.reason.ends_with(" s ago"), "{error:?}");
    assert!(error.causes[..2].iter().all(|cause| cause.ends_with("(path)")), "{error:?}");
    for proved in ["(allowlist)", "(key exchange)", "(clock)"] {
        assert!(!error.causes.iter().any(|cause| cause.contains(proved)), "{error:?}");
    }
    pair.world.set_mtu(ENTRY, EXIT, 1472);
    pair.world.run(20 * SECOND);
    assert!(pair.world.peer(pair.entry).connected());
}
