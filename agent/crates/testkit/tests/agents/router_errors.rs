//! ICMP errors of routers behind a peer whose addresses are in nobody's prefixes (`tun.icmp_errors`).

use ip::{
    icmp::{self, MOST_ANSWER},
    model::Recipe,
    view::IpView,
    vnet::VnetHeader,
};

use crate::tunnel::{ENTRY_TUN, EXIT_TUN, Given, How, Tunnel};

/// The address of a router on a transit link behind the exit.
const ROUTER: [u8; 4] = [172, 31, 9, 1];

/// What the router says of a packet that a host behind the entry sends to one behind the exit; with `other` of one to elsewhere.
fn error(other: bool) -> Given {
    let packet = Recipe { payload: 1_300, ..Recipe::TCP }.complete();
    let mut out = [0; MOST_ANSWER];
    let view = IpView::parse(&packet).unwrap();
    let len = icmp::too_big(&packet, &view, 1_300, &mut out).unwrap();
    let mut bytes = out[..len].to_vec();
    bytes[12..16].copy_from_slice(&ROUTER);
    if other {
        // The quoted destination.
        bytes[28 + 16..28 + 20].copy_from_slice(&[192, 0, 2, 77]);
    }
    Given { vnet: VnetHeader::default(), bytes }
}

#[test]
fn errors_about_packets_to_the_peer_pass_if_they_are_to_and_no_more_than_ten_a_second() {
    for allowed in [false, true] {
        let entry = if allowed { format!("{ENTRY_TUN}\nicmp_errors = true") } else { ENTRY_TUN.to_owned() };
        let mut tunnel = Tunnel::with_ends(3_400, (1, 1), ("", &entry), ("", EXIT_TUN)).settled(1);
        let [entry, exit] = tunnel.ends();
        let mut pass = |given: Given, count: usize| {
            let before = tunnel.dropped(entry, "downlink", "spoofed");
            tunnel.written(entry);
            for _ in 0..count {
                tunnel.push(exit, 0, &given);
            }
            tunnel.run(200);
            let passed = tunnel.written(entry).iter().filter(|packet| packet[12..16] == ROUTER).count();
            assert_eq!(tunnel.dropped(entry, "downlink", "spoofed") - before, (count - passed) as u64);
            tunnel.run(2_000);
            passed
        };
        assert_eq!(pass(error(false), 1), usize::from(allowed));
        assert_eq!(pass(error(true), 1), 0, "about a packet that did not go to the peer");
        let mut forged = Given::new(&Recipe { payload: 100, ..Recipe::TCP }, How::Complete).back();
        forged.bytes[12..16].copy_from_slice(&ROUTER);
        assert_eq!(pass(forged, 1), 0, "no error");
        let passed = pass(error(false), 50);
        assert!(if allowed { (10..=13).contains(&passed) } else { passed == 0 }, "{passed}");
        tunnel.pair.assert_balanced();
    }
}
