//! An entry and an exit on two hosts: network namespaces with a cable between them.

#![expect(clippy::unwrap_used, reason = "a test that cannot go on has failed")]

mod database;
mod hop;
mod jumbo;
mod lines;
mod reach;
mod refused;
mod striping;
mod vanished;

use culvert_tests::{
    iperf::{self, Books, Server},
    needs,
    pair::Plan,
    place::Cable,
    ports,
};

/// iperf3 on the entry's host through the cable, to its server on the exit's host.
fn relay(underlay: &str) {
    let cable = Cable::new();
    let places = cable.places();
    let (upstream, ingress) = (ports::loopback(), ports::loopback());
    let _server = Server::start(&places[1], upstream);
    let plan = Plan::default().at(places.clone()).underlay(underlay.parse().unwrap());
    let pair = plan.service("iperf", upstream, "").forward("iperf", ingress).start();
    for reverse in [false, true] {
        let books = Books::open(&pair);
        let result = iperf::udp(&places[0], ingress, 1, reverse);
        books.close(&pair, result, reverse);
        let result = iperf::tcp(&places[0], ingress, reverse);
        assert!(result.received > 0 && result.received <= result.sent, "{result:?}");
    }
}

#[test]
fn iperf3_crosses_a_cable_over_ipv4_and_ipv6() {
    if needs::met("two hosts", needs::NETNS) {
        // One after the other: both at once would overrun a small machine.
        for underlay in Cable::SECOND {
            relay(underlay);
        }
    }
}
