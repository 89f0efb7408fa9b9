//! Interfaces for jumbo frames: all the way, and in front of one that drops what is larger than 1500 bytes.

use std::time::Duration;

use culvert_tests::{
    client::Client,
    needs,
    pair::{Pair, Plan},
    place::{Cable, Place},
    ports,
    upstream::Echo,
};

fn set_mtu(place: &Place, bytes: &str) {
    place.tell(&["ip", "link", "set", "veth0", "mtu", bytes]);
}

/// The largest packet of the entry is `bytes` bytes of UDP payload, and nothing else is tried.
fn wait_for_packets(pair: &Pair, bytes: u64) {
    pair.entry.wait_for_count("culvert_lane_packet_bytes", &[("peer", "exit")], bytes);
}

#[test]
fn packets_follow_the_interfaces_and_what_is_between_them() {
    let test = "jumbo frames on a cable";
    if !needs::met(test, needs::NETNS) {
        return;
    }
    for (underlay, headers) in Cable::SECOND.into_iter().zip([28, 48]) {
        let cable = Cable::new();
        let places = cable.places();
        places.iter().for_each(|place| set_mtu(place, "9000"));
        let ingress = ports::loopback();
        let echo = places[1].enter(Echo::new);
        let plan = Plan::default().at(places.clone()).underlay(underlay.parse().unwrap());
        let plan = plan.service("echo", echo.address, "").forward("echo", ingress);
        let pair = plan.start();
        let mut client = places[0].enter(|| Client::new(0, ingress));
        client.converse(3);
        wait_for_packets(&pair, 9000 - headers);
        let too_large = || pair.sum("culvert_datagrams_dropped_total", &[("reason", "too_large")]);
        let before = too_large();
        for _ in 0..20 {
            client.echo(&[8; 8_000]);
        }
        assert_eq!(too_large(), before, "each fits into a packet");

        // A veth drops what is larger than its own MTU, as a switch does.
        set_mtu(&places[1], "1500");
        client.reach();
        client.socket().send(&[8; 8_000]).unwrap();
        wait_for_packets(&pair, 1500 - headers);
        client.converse(20);

        // The end that shrank has noticed by itself, and its interface is followed again.
        set_mtu(&places[1], "9000");
        pair.exit.wait_for_count("culvert_lane_packet_bytes", &[("peer", "entry")], 9000 - headers);
        client.converse(3);
        pair.accounts();
    }
}

#[test]
fn a_switch_of_1500_bytes_behind_an_interface_for_jumbo_frames_costs_a_few_probes() {
    let test = "jumbo frames in front of a switch";
    if !needs::met(test, needs::NETNS) {
        return;
    }
    let cable = Cable::new();
    let places = cable.places();
    set_mtu(&places[0], "9000");
    let ingress = ports::loopback();
    let echo = places[1].enter(Echo::new);
    let plan = Plan::default().at(places.clone()).underlay(Cable::SECOND[0].parse().unwrap());
    let pair = plan.service("echo", echo.address, "").forward("echo", ingress).start();
    let mut client = places[0].enter(|| Client::new(0, ingress));
    client.converse(20);
    wait_for_packets(&pair, 1472);
    std::thread::sleep(Duration::from_secs(2));
    let lost = pair.entry.samples().count("culvert_lane_mtu_probes_lost_total", &[("peer", "exit")]);
    let lanes = pair.entry.samples().count("culvert_peer_lanes_wanted", &[("peer", "exit")]);
    assert!((lanes..=8 * lanes).contains(&lost), "{lost} probes of {lanes} lanes are lost");
    wait_for_packets(&pair, 1472);
    assert_eq!(pair.entry.samples().count("culvert_lane_black_holes_total", &[("peer", "exit")]), 0);
    for _ in 0..20 {
        client.echo(&[8; 1_400]);
    }
}
