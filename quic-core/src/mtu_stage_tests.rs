//! What the two stages of a search find, and what they cost.

use super::*;

/// What the first stage and the second cost and find, over the paths that networks have.
#[test]
fn what_is_lost_on_the_paths_that_networks_have() {
    // The maximum, the path, where the first stage ends: what is found, how many probes are lost.
    for (max, mtu, usual, found, lost) in [
        (1452, 1452, 1452, 1452, 0),
        (1472, 1472, 1472, 1472, 0),
        (1472, 1464, 1472, 1464, 3),
        (1472, 1452, 1472, 1452, 7),
        (1452, 1444, 1452, 1444, 3),
        (8972, 8972, 1472, 8972, 0),
        (8972, 1472, 1472, 1472, 7),
        (8952, 1452, 1452, 1452, 7),
        (8972, 1464, 1472, 1464, 3),
        (65_507, 65_507, 1472, 65_507, 0),
        (65_507, 1472, 1472, 1472, 7),
        (65_487, 1452, 1452, 1452, 7),
        (8972, 8922, 1472, 8868, 3),
        (9188, 8972, 1472, 8972, 6),
        (9188, 8952, 1452, 8922, 4),
        (16_356, 1472, 1472, 1472, 7),
    ] {
        let mut sim = Sim { lost: 0, ..Sim::new(mtu, BASE, BASE) };
        sim.search = MtuSearch { usual_most: usual, ..MtuSearch::new() };
        sim.search.start(max, BASE);
        let began = sim.now;
        while !sim.search.measured {
            sim.burst_or_wait();
        }
        assert!(sim.now - began <= RTT + GRACE, "{mtu} of {max}: in use after {:?}", sim.now - began);
        assert!(sim.search.current >= mtu.min(usual) - STEP, "{mtu} of {max}: {}", sim.search.current);
        sim.settle();
        println!("{max} over {mtu}: {} after {:?}, {} lost", sim.search.current, sim.now - began, sim.lost);
        assert_eq!((sim.search.current, sim.lost), (found, lost), "{mtu} of {max}");
    }
}

/// One at a time, the most usual sizes come first.
#[test]
fn the_second_size_that_is_tried_alone_is_that_of_pppoe() {
    for (max, mtu) in [(1472, 1464), (1452, 1444)] {
        let mut sim = Sim::new(mtu, BASE, BASE);
        sim.search = MtuSearch { usual_most: max, bursts: false, ..MtuSearch::new() };
        sim.search.start(max, BASE);
        sim.settle();
        assert_eq!((sim.search.current, sim.probes), (mtu, 4));
    }
}

#[test]
fn nothing_above_what_is_usual_is_used_before_it_was_acknowledged() {
    for mtu in [1472, 8972] {
        let mut sim = Sim::new(8972, 8972, BASE);
        sim.settle();
        assert_eq!(sim.search.current, 8972);
        // The path has moved: what the one before has carried is tried with the first burst.
        sim.mtu = mtu;
        sim.search.start(8972, sim.search.current);
        assert_eq!((sim.search.current, sim.search.measured, sim.search.most()), (1472, false, 8972));
        assert_eq!(sim.search.due(sim.now), Some(8972));
        let began = sim.now;
        while !sim.search.measured {
            sim.burst_or_wait();
        }
        assert_eq!(sim.search.current, mtu);
        assert!(sim.now - began <= RTT + GRACE);
        sim.settle();
        assert_eq!((sim.search.current, sim.black_holes), (mtu, 0));
    }
}

#[test]
fn a_jumbo_path_that_shrinks_falls_to_what_is_left_within_three_probes() {
    let mut sim = Sim::new(8972, 8972, BASE);
    sim.settle();
    sim.mtu = 1472;
    let changed = sim.now;
    sim.send();
    while sim.black_holes == 0 || sim.search.current < 1472 {
        sim.burst_or_wait();
    }
    assert!(sim.now - changed <= 4 * RTT + 2 * PAUSE + GRACE, "{:?}", sim.now - changed);
    sim.settle();
    assert_eq!((sim.search.current, sim.black_holes), (1472, 1));
    sim.mtu = 8972;
    sim.now += RAISE_AFTER;
    sim.settle();
    assert_eq!(sim.search.current, 8972);
}

#[test]
fn a_device_that_shrinks_leaves_what_the_first_stage_has_found_in_use() {
    let mut sim = Sim::new(8972, 8972, BASE);
    sim.settle();
    assert!(sim.search.on_refused(8972, sim.now));
    assert_eq!((sim.search.current, sim.search.measured), (1472, true));
    while sim.search.is_searching() {
        sim.probe_refused(1472);
        assert_eq!(sim.search.current, 1472);
    }
}

#[test]
fn the_end_of_the_search_follows_the_interface() {
    let mut sim = Sim::new(9000, 1472, BASE);
    sim.settle();
    assert_eq!(sim.search.current, 1472);
    sim.search.bound(8972, sim.now);
    assert_eq!((sim.search.current, sim.search.measured), (1472, true));
    sim.settle();
    assert_eq!(sim.search.current, 8972);
    sim.search.bound(4000, sim.now);
    assert_eq!((sim.search.current, sim.search.measured, sim.search.due(sim.now)), (4000, true, None));
    sim.search.bound(8972, sim.now);
    sim.settle();
    assert_eq!((sim.search.current, sim.black_holes, sim.lost), (8972, 0, 0));
    // Packets are refused before the interface is known to be another one.
    sim.search.on_refused(8972, sim.now);
    sim.search.bound(1472, sim.now);
    sim.settle();
    assert_eq!(sim.search.current, 1472);
    sim.search.bound(8972, sim.now);
    sim.settle();
    assert_eq!(sim.search.current, 8972);
    // While the first stage lasts, both ways.
    for bound in [1392, 8972] {
        let mut sim = Sim::new(9000, 1472, BASE);
        sim.search.on_sent(sim.now);
        sim.search.bound(bound, sim.now);
        sim.search.on_settled(1472, if bound < 1472 { Fate::Lost } else { Fate::Acked }, sim.now);
        sim.settle();
        assert_eq!(sim.search.current, bound);
    }
}

#[test]
fn an_end_that_rises_during_a_confirmation_or_a_search_is_reached() {
    let mut sim = Sim::new(8972, 1472, BASE);
    sim.settle();
    sim.search.on_packets_lost(1472);
    assert_eq!(sim.search.due(sim.now), Some(1472), "it is confirmed");
    sim.search.on_sent(sim.now);
    sim.search.bound(8972, sim.now);
    assert!(sim.search.due(sim.now).is_some(), "the confirmation does not stand in the way");
    sim.search.on_settled(1472, Fate::Acked, sim.now);
    sim.settle();
    assert_eq!(sim.search.current, 8972);
    for (before, start) in [(4078, 1472), (1400, BASE)] {
        let mut sim = Sim::new(8972, before, BASE);
        while sim.search.current < start {
            sim.burst_or_wait();
        }
        assert!(sim.search.is_searching());
        sim.search.bound(8972, sim.now);
        sim.settle();
        assert_eq!(sim.search.current, 8972, "from {before}");
    }
}

/// Whatever the far end acknowledges, probes are few: what is confirmed is not probed, what fails is tried again after ten minutes.
#[test]
fn probes_are_bounded_whatever_is_lost() {
    for (seed, lost_percent) in [(1, 0), (2, 5), (3, 50), (4, 90), (5, 100)] {
        println!("seed {seed}");
        let mut sim = Sim::new(65_507, 65_507, BASE);
        (sim.lost_percent, sim.random) = (lost_percent, seed << 20);
        sim.settle();
        assert!(sim.probes <= 100, "{} probes at the start", sim.probes);
        for minute in 0..60 {
            let before = sim.probes;
            for _ in 0..60_000 / 20 {
                sim.now += RTT;
                sim.on_timeout();
                sim.send();
                sim.probe();
            }
            // A confirmation every 200 ms at most, of which each that fails is repeated after 50 ms, and a search for each fall.
            assert!(sim.probes - before <= 1200, "{} probes in minute {minute}", sim.probes - before);
        }
    }
}

/// What never came may be acknowledged: whoever does that gets packets that do not come, and no more probes than others.
#[test]
fn a_far_end_that_acknowledges_whatever_is_probed_is_sent_no_more_probes() {
    let mut sim = Sim::new(65_507, 65_507, BASE);
    sim.settle();
    assert_eq!((sim.search.current, sim.search.measured), (65_507, true));
    assert!(sim.probes as usize <= RUNGS + 4, "{} probes", sim.probes);
    let before = sim.probes;
    for _ in 0..3600 {
        sim.now += Duration::from_secs(1);
        // Its packets are lost, and it says of each probe that it came.
        sim.search.on_packets_lost(sim.search.current);
        sim.on_timeout();
        sim.probe();
    }
    assert_eq!(sim.search.current, 65_507);
    // One confirmation for each loss, at most five a second.
    assert!(sim.probes - before <= 3600, "{} probes in an hour", sim.probes - before);
}
