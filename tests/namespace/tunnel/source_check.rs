//! Which sources pass from a peer where the kernel's routes choose it (`tun.source_check`): out by one exit and back by the other,
//! and while a route moves.

use std::{net::IpAddr, time::Duration};

use culvert_tests::{
    clock,
    exits::{ENTRY, ENTRY_V6, Exits, Flow},
    probe,
    sites::DEVICE,
};

use crate::possible;

/// Each way, so that packets are under way whenever a route moves.
const DELAY: Duration = Duration::from_millis(10);

const MOMENT: Duration = Duration::from_millis(500);

const NAMES: [&str; 2] = ["exit-1", "exit-2"];

/// Has the kernel's route to the network behind the exits be this one, and waits until the agent follows it.
#[track_caller]
fn route(exits: &Exits, hops: &str, carriers: &[&str]) {
    let words = format!("ip route replace 10.77.0.0/16 {hops}");
    exits.entry.place().tell(&words.split(' ').collect::<Vec<_>>());
    exits.wait_for_carriers("10.77.0.1", carriers);
}

/// Packets of each exit that the entry has dropped for their source.
fn spoofed(exits: &Exits) -> [u64; 2] {
    // It publishes its counts before it answers.
    drop(exits.entry.ask(&["status"]));
    let samples = exits.entry.samples();
    NAMES.map(|name| samples.count("culvert_peer_spoofed_total", &[("peer", name)]))
}

/// Packets that the entry has dropped, but those for nobody in particular: the kernel asks for routers.
fn dropped(exits: &Exits) -> f64 {
    let samples = exits.entry.samples();
    samples.sum("culvert_datagrams_dropped_total", &[])
        + samples.sum("culvert_tun_dropped_packets_total", &[("reason", "no_next_hop")])
}

#[track_caller]
fn assert_answered(flow: &Flow) {
    assert!(flow.answered * 100 > flow.sent * 95, "{flow:?}");
}

/// Waits until a flow is answered.
#[track_caller]
fn wait_for_answers(exits: &mut Exits) {
    clock::until("answers", clock::PATIENCE, || {
        let flow = exits.flow(MOMENT / 5, |_| ());
        if flow.answered * 2 > flow.sent { Ok(()) } else { Err(format!("{flow:?}")) }
    });
}

#[test]
fn allowed_ips_pass_whatever_the_way_back_and_nothing_is_dropped_while_a_route_moves() {
    if !possible("asymmetric paths") {
        return;
    }
    let mut exits = Exits::start(DELAY, "routing = \"kernel\"");
    for (hop, out, back) in [("10.9.0.2", 0, 1), ("10.9.0.3", 1, 0)] {
        route(&exits, &format!("via {hop} dev {DEVICE}"), &[NAMES[out]]);
        exits.answer_by(Some(back));
        let flow = exits.flow(MOMENT, |_| ());
        assert_answered(&flow);
        assert_eq!(flow.by[back], 0, "{flow:?}");
    }
    // Symmetric, but for what is under way: it moves, and is shared and no longer shared.
    exits.answer_by(None);
    let flow = exits.flow(4 * MOMENT, |exits| {
        let both = format!("nexthop via 10.9.0.2 dev {DEVICE} nexthop via 10.9.0.3 dev {DEVICE}");
        route(exits, &format!("via 10.9.0.2 dev {DEVICE}"), &NAMES[..1]);
        route(exits, &both, &NAMES);
        route(exits, &format!("via 10.9.0.3 dev {DEVICE}"), &NAMES[1..]);
        route(exits, &format!("via 10.9.0.2 dev {DEVICE}"), &NAMES[..1]);
    });
    assert_answered(&flow);
    assert!(flow.by.iter().all(|answered| *answered > 0), "{flow:?}");
    assert_eq!((spoofed(&exits), dropped(&exits)), ([0; 2], 0.0));
}

#[test]
fn a_source_passes_when_some_route_to_it_leads_to_its_peer() {
    if !possible("sources by route") {
        return;
    }
    let mut exits = Exits::start(DELAY, "routing = \"kernel\"\nsource_check = \"route\"");
    let entry = exits.entry.place().clone();
    let ip = |words: &str| entry.tell(&[&["ip"][..], &words.split(' ').collect::<Vec<_>>()].concat());

    // Own and link-local addresses pass without any route.
    let address = ip(&format!("-6 -o addr show dev {DEVICE} scope link"));
    let link_local = address.split(' ').find_map(|word| word.split_once("/64")).expect("it has one").0;
    let link_local: IpAddr = link_local.parse().expect("an address");
    for exit in &exits.exits {
        for address in [ENTRY, ENTRY_V6] {
            probe::reaches(exit.place(), address, &[]);
        }
        probe::reaches(exit.place(), link_local, &["-I", DEVICE]);
    }
    assert_eq!(spoofed(&exits), [0; 2]);

    // No route leads to the exit by which the answers come.
    let first = format!("via 10.9.0.2 dev {DEVICE}");
    route(&exits, &first, &NAMES[..1]);
    assert_answered(&exits.flow(MOMENT, |_| ()));
    exits.answer_by(Some(1));
    let flow = exits.flow(MOMENT, |_| ());
    assert_eq!(flow.answered, 0, "{flow:?}");
    clock::until("all answers are counted", clock::PATIENCE, || match spoofed(&exits) {
        [0, dropped] if dropped * 100 > flow.sent as u64 * 95 => Ok(()),
        dropped => Err(format!("{dropped:?} of {}", flow.sent)),
    });
    exits.entry.wait_for_log(&["WARN", "exit-2", "no route to its source leads to the peer"]);

    // One that is not the best is enough, and so is one of several next hops.
    ip(&format!("route add 10.77.0.0/16 via 10.9.0.3 dev {DEVICE} metric 9"));
    wait_for_answers(&mut exits);
    let before = spoofed(&exits);
    let flow = exits.flow(MOMENT, |_| ());
    assert_answered(&flow);
    assert_eq!(flow.by[1], 0, "{flow:?}");
    let both = format!("nexthop via 10.9.0.2 dev {DEVICE} nexthop via 10.9.0.3 dev {DEVICE}");
    route(&exits, &both, &NAMES);
    ip(&format!("route del 10.77.0.0/16 via 10.9.0.3 dev {DEVICE} metric 9"));
    for back in [0, 1] {
        exits.answer_by(Some(back));
        assert_answered(&exits.flow(MOMENT, |_| ()));
    }
    assert_eq!(spoofed(&exits), before);

    // The route moves under traffic: what is under way from the exit that it has left may be dropped, and nothing else.
    exits.answer_by(None);
    route(&exits, &first, &NAMES[..1]);
    let flow = exits.flow(2 * MOMENT, |exits| {
        route(exits, &format!("via 10.9.0.3 dev {DEVICE}"), &NAMES[1..]);
    });
    assert!(flow.by.iter().all(|answered| *answered > 0), "{flow:?}");
    let [dropped, of_the_new] = spoofed(&exits);
    assert_eq!(of_the_new, before[1], "{flow:?}");
    let missing = (flow.sent - flow.answered) as u64;
    assert!(dropped <= before[0] + missing, "{dropped} {flow:?}");
    let before = spoofed(&exits);
    assert_answered(&exits.flow(MOMENT, |_| ()));
    assert_eq!(spoofed(&exits), before);
}
