//! A line that stands by: what it costs while it waits, how late its death is noticed, and that it is there when it is needed.

use std::{net::IpAddr, time::Duration};

use engine::status::LineState;

use crate::{
    ENTRY, EXIT, INGRESS, Pair,
    harness::{NetworkPath, Udp},
    lines::pair_of,
    numbered,
    roaming::{ENTRY_2, SECOND},
};

/// The IPv4 and UDP headers of a packet.
const HEADERS: usize = 28;

/// Bytes of IP packets that passed on the line of `line` since the network was last tapped, both ways.
fn passed(pair: &mut Pair, line: IpAddr) -> usize {
    let tapped = pair.world.tapped();
    let of_line = tapped.iter().filter(|sent| [sent.from.ip(), sent.to.ip()].contains(&line));
    of_line.map(|sent| sent.payload.len() + HEADERS).sum()
}

/// A flow of 10 packets a second talks for so long, and is answered.
fn talk(pair: &mut Pair, client: &mut Udp, time: Duration) -> usize {
    let mut answers = 0;
    for number in 0..time.as_millis() / 100 {
        client.send(INGRESS, &numbered(number as u32));
        for _ in 0..4 {
            pair.world.run(Duration::from_millis(25));
            pair.serve();
        }
        answers += client.receive().len();
    }
    answers
}

/// The state of the second line at the entry.
fn state(pair: &mut Pair) -> LineState {
    pair.world.peer(pair.entry).lines[1].state
}

#[test]
fn a_standby_line_costs_less_than_a_megabyte_a_day() {
    for (seed, workers, lanes, second) in [
        (10_100, (2, 2), 2, "cost = \"metered\""),
        (10_101, (4, 2), 8, "cost = \"metered\""),
        (10_102, (1, 1), 2, "backup = true"),
    ] {
        let entry = format!(
            "lanes = {lanes}\n[[transport.uplink]]\nname = \"one\"\nsource = \"{ENTRY}\"\n[[transport.uplink]]\n\
             name = \"other\"\nsource = \"{ENTRY_2}\"\n{second}\n"
        );
        let mut pair = Pair::with_workers(seed, workers, &entry, "");
        pair.world.set_addresses(ENTRY, &[ENTRY, ENTRY_2]);
        pair.wait_for_lanes(2 * lanes);
        let mut client = pair.client(2_000);
        // The search for the path's packet size is over.
        talk(&mut pair, &mut client, 60 * SECOND);
        passed(&mut pair, ENTRY_2);
        let (mut bytes, minutes) = (0, 30);
        for _ in 0..minutes {
            talk(&mut pair, &mut client, 60 * SECOND);
            bytes += passed(&mut pair, ENTRY_2);
        }
        let day = bytes * 24 * 60 / minutes;
        println!("seed {seed}: {lanes} lanes, {second}: {day} bytes a day");
        assert!((100_000..1_000_000).contains(&day), "seed {seed}: {day} bytes a day");
        assert_eq!(state(&mut pair), LineState::Standby);
        pair.assert_balanced();
    }
}

#[test]
fn a_standby_line_that_dies_is_noticed_with_the_next_keepalive() {
    let mut latest = Duration::ZERO;
    for seed in 10_110..10_116 {
        let mut pair = pair_of(seed, (2, 2), "cost = \"metered\"");
        pair.wait_for_lanes(4);
        let mut client = pair.client(2_000);
        talk(&mut pair, &mut client, (30 + seed as u32 % 7 * 3) * SECOND);
        let cut = NetworkPath { is_cut: true, ..NetworkPath::with_delay(Duration::from_millis(10)) };
        for (from, to) in [(ENTRY_2, EXIT), (EXIT, ENTRY_2)] {
            pair.world.set_path(from, to, cut);
        }
        let begin = pair.world.now();
        while state(&mut pair) == LineState::Standby {
            talk(&mut pair, &mut client, SECOND / 10);
            assert!(pair.world.now() - begin < 40 * SECOND, "seed {seed}: not noticed");
        }
        latest = latest.max(pair.world.now() - begin);
    }
    println!("a dead standby line is noticed after {latest:?} at the latest");
    assert!(latest <= 21 * SECOND, "{latest:?}");
}

#[test]
fn a_standby_line_stands_in_although_a_nat_has_forgotten_its_ports() {
    let mut gaps = Vec::new();
    for seed in 10_120..10_126 {
        let mut pair = pair_of(seed, (2, 2), "cost = \"metered\"");
        pair.wait_for_lanes(4);
        let mut client = pair.client(2_000);
        talk(&mut pair, &mut client, 90 * SECOND);
        if seed % 2 == 0 {
            pair.world.rebind(ENTRY_2, ENTRY_2);
        }
        let cut = NetworkPath { is_cut: true, ..NetworkPath::with_delay(Duration::from_millis(10)) };
        for (from, to) in [(ENTRY, EXIT), (EXIT, ENTRY)] {
            pair.world.set_path(from, to, cut);
        }
        let mut lost = 0;
        for _ in 0..30 {
            lost += usize::from(talk(&mut pair, &mut client, SECOND / 10) == 0);
        }
        gaps.push(lost);
        let answers = talk(&mut pair, &mut client, 5 * SECOND);
        assert!(answers >= 49, "seed {seed}: {answers} of 50");
        assert_eq!(state(&mut pair), LineState::InUse, "seed {seed}");
        pair.assert_balanced();
    }
    println!("tenths of a second without an answer: {gaps:?}");
    assert!(gaps.iter().all(|gap| *gap <= 6), "{gaps:?}");
}
