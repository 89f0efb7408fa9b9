//! ECN (RFC 6040) and DSCP between the packets inside and those outside.

use std::net::UdpSocket;

use culvert_tests::{
    capture::{Capture, Recording},
    clock::{self, PATIENCE},
    place::Place,
    ports, probe,
    sites::{Family, PORT, Plan, Sites},
};
use socket2::SockRef;

use super::possible;

/// Sites whose links carry each datagram by itself, so that each can be counted.
fn start(plan: Plan) -> Sites {
    let sites = plan.start();
    sites.cut();
    sites
}

/// How many datagrams a test sends.
const COUNT: usize = 10;

/// Not ECT(0), ECT(0), CE (RFC 3168).
const ECT0: u8 = 2;
const CE: u8 = 3;

/// Sends datagrams with this traffic class from host a to host b, and captures them there.
fn send(sites: &Sites, family: Family, class: u8) -> Recording {
    let (a, b) = (sites.a(), sites.b());
    let port = ports::free();
    let capture = Capture::start(&b.host, "lan", &format!("udp port {port}"));
    let sender = a.host.enter(|| UdpSocket::bind((a.host_address(family), 0))).unwrap();
    let options = SockRef::from(&sender);
    match family {
        Family::V4 => options.set_tos_v4(class.into()).unwrap(),
        Family::V6 => options.set_tclass_v6(class.into()).unwrap(),
    }
    for _ in 0..COUNT {
        // The port is closed: after the first answer the kernel refuses once.
        let _refused = sender.send_to(b"marked", (b.host_address(family), port)).is_err();
    }
    capture.stop_when("datagrams arrive", |text| text.matches("UDP, length").count() == COUNT)
}

/// What `tcpdump` calls a traffic class.
fn shown(class: u8, family: Family) -> String {
    let ecn = ["", ",ECT(1)", ",ECT(0)", ",CE"][usize::from(class & 3)];
    match family {
        Family::V4 => format!("(tos {class:#x}{ecn},"),
        Family::V6 => format!("class {class:#04x},"),
    }
}

/// Has a router set the mark CE on what carries ECT(0), or on everything of the agents.
fn mark(router: &Place, everything: bool) {
    let rules = if everything {
        [format!("udp sport {PORT} ip ecn set ce"), format!("udp dport {PORT} ip ecn set ce")]
    } else {
        ["ip ecn ect0 ip ecn set ce".to_owned(), "ip6 ecn ect0 ip6 ecn set ce".to_owned()]
    };
    router.tell(&["nft", "add table inet marks"]);
    router.tell(&["nft", "add chain inet marks passing { type filter hook forward priority 0; }"]);
    for rule in rules {
        router.tell(&["nft", &format!("add rule inet marks passing {rule}")]);
    }
}

#[test]
fn congestion_that_a_router_marks_outside_is_marked_inside() {
    if !possible("ECN") {
        return;
    }
    for outer in Family::BOTH {
        let sites = start(Plan::two().outer(outer));
        mark(&sites.east(), false);
        for inner in Family::BOTH {
            for (sent, expected) in [(ECT0, CE), (0, 0), (1, 1), (CE, CE), (0xb8 | ECT0, 0xb8 | CE)] {
                let text = send(&sites, inner, sent).text();
                let count = text.matches("UDP, length").count();
                let expected = if expected == 0 && inner == Family::V6 {
                    // `tcpdump` shows no class that is zero.
                    assert!(!text.contains("class"), "{text}");
                    continue;
                } else {
                    shown(expected, inner)
                };
                assert_eq!(
                    text.matches(&expected).count(),
                    count,
                    "{outer:?}, {inner:?}, {expected}: {text}"
                );
            }
        }
        assert_eq!(sites.drops(), []);
    }
}

#[test]
fn a_mark_that_the_sender_would_not_understand_is_a_drop() {
    if !possible("ECN without ECT") {
        return;
    }
    let sites = start(Plan::two());
    mark(&sites.east(), true);
    let ping = probe::ping(&sites.a().gateway, sites.b().tunnel_address(Family::V4), &["-c", "3", "-W", "1"]);
    assert_eq!((ping.sent, ping.received), (3, 0), "{}", ping.text);
    sites.b().agent.wait_for("three drops", |samples| match samples.dropped("not_ecn_capable") {
        3 => Ok(()),
        other => Err(format!("{other}: {:?}", samples.by_label("culvert_datagrams_dropped_total", "reason"))),
    });
    // What does understand it arrives.
    let text = send(&sites, Family::V4, ECT0).text();
    assert!(text.contains(&shown(CE, Family::V4)), "{text}");
    sites.accounts();
}

/// The classes that the agents' packets have outside while datagrams of `class` are sent inside.
fn outside(sites: &Sites, class: u8, expected: &str) {
    clock::until(expected, PATIENCE, || {
        let wire = Capture::start(&sites.east(), "middle", &format!("udp port {PORT}"));
        let _inside = send(sites, Family::V4, class);
        // Small payloads share packets.
        let text = wire.stop_when("packets were sent", |text| text.contains("UDP, length")).text();
        if text.contains(expected) { Ok(()) } else { Err(text) }
    });
}

#[test]
fn the_dscp_is_copied_outside_or_is_the_configured_one() {
    if !possible("DSCP") {
        return;
    }
    const EXPEDITED: u8 = 46 << 2;
    let sites = start(Plan::two());
    outside(&sites, EXPEDITED, &shown(EXPEDITED, Family::V4));
    drop(sites);
    let sites = start(Plan::two().outer(Family::V6));
    outside(&sites, EXPEDITED, &shown(EXPEDITED, Family::V6));
    drop(sites);
    let sites = start(Plan::two().peer("dscp = 10\n"));
    for class in [EXPEDITED, 0] {
        outside(&sites, class, &shown(10 << 2, Family::V4));
        // What is inside stays as it was.
        let text = send(&sites, Family::V4, class).text();
        let count = text.matches("UDP, length").count();
        assert_eq!(text.matches(&shown(class, Family::V4)).count(), count, "{text}");
    }
}
