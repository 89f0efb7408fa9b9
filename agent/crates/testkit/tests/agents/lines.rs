//! Several lines at the entry: both carry, one that is pulled is left, and what costs is spared in both directions.

use std::{
    cell::RefCell,
    collections::BTreeMap,
    net::{IpAddr, SocketAddr},
    rc::Rc,
    time::Duration,
};

use wire::messages::Features;

use crate::{
    ENTRY, EXIT, INGRESS, Pair,
    restarts::{Crowd, report},
    roaming::{ENTRY_2, ESTABLISHED, SECOND, between_agents, longest_gap},
};

/// The two lines of the entry, of which the second has these keys, too.
fn two_lines(second: &str) -> String {
    format!(
        "lanes = 2\n[[transport.uplink]]\nname = \"one\"\nsource = \"{ENTRY}\"\n[[transport.uplink]]\nname = \"other\"\n\
         source = \"{ENTRY_2}\"\n{second}\n"
    )
}

/// A pair whose entry has both addresses, before anything is dialled.
pub(crate) fn pair_of(seed: u64, workers: (u8, u8), second: &str) -> Pair {
    let pair = Pair::with_workers(seed, workers, &two_lines(second), "");
    pair.world.set_addresses(ENTRY, &[ENTRY, ENTRY_2]);
    pair
}

/// Datagrams between the agents, by who sent them on which line.
#[derive(Clone, Default)]
pub(crate) struct Seen(Rc<RefCell<BTreeMap<(IpAddr, bool), usize>>>);

impl Seen {
    /// Counts from now on, while the lines of these addresses are dead.
    pub(crate) fn count(&self, pair: &mut Pair, dead: &'static [IpAddr]) {
        self.0.borrow_mut().clear();
        let seen = Rc::clone(&self.0);
        pair.world.weather.borrow_mut().block = Box::new(move |from: SocketAddr, to: SocketAddr| {
            if !between_agents(from, to) {
                return false;
            }
            let is_up = from.ip() != EXIT;
            let line = if is_up { from.ip() } else { to.ip() };
            *seen.borrow_mut().entry((line, is_up)).or_default() += 1;
            dead.contains(&line)
        });
    }

    fn of(&self, line: IpAddr) -> [usize; 2] {
        [true, false].map(|is_up| self.0.borrow().get(&(line, is_up)).copied().unwrap_or(0))
    }
}

#[test]
fn packets_pass_over_both_lines_and_leave_one_that_is_pulled() {
    let mut gaps = Vec::new();
    for seed in 9700..9706 {
        let workers = [(1, 1), (2, 2), (1, 2)][(seed % 3) as usize];
        let (mut pair, seen) = (pair_of(seed, workers, ""), Seen::default());
        pair.wait_for_lanes(4);
        let mut crowd = Crowd::new(&mut pair, 8, seed);
        seen.count(&mut pair, &[]);
        crowd.run(&mut pair, 2 * SECOND);
        for line in [ENTRY, ENTRY_2] {
            let [up, down] = seen.of(line);
            assert!(up > 200 && down > 200, "seed {seed}: {up} and {down} on {line}");
        }
        for dead in [&[ENTRY_2][..], &[ENTRY]] {
            let dead: &'static [IpAddr] = if dead == [ENTRY] { &[ENTRY] } else { &[ENTRY_2] };
            seen.count(&mut pair, dead);
            gaps.push(longest_gap(&mut pair, &mut crowd, INGRESS, 3 * SECOND));
            seen.count(&mut pair, &[]);
            // Its lanes are opened again, by a new session if the control connection was on it.
            longest_gap(&mut pair, &mut crowd, INGRESS, 8 * SECOND);
            pair.wait_for_lanes(4);
        }
        pair.assert_balanced();
    }
    assert!(report("gap, one of two lines is pulled", gaps) <= SECOND);
}

/// A NAT forgets the port of one lane, for instance: the lane is opened again, and nothing else changes.
#[test]
fn a_lane_that_dies_alone_does_not_make_its_line_suspect() {
    let mut pair = pair_of(9705, (1, 1), "");
    pair.wait_for_lanes(4);
    let mut crowd = Crowd::new(&mut pair, 16, 9705);
    let ports = Rc::new(RefCell::new(BTreeMap::<u16, usize>::new()));
    let seen = Rc::clone(&ports);
    pair.world.weather.borrow_mut().block = Box::new(move |from: SocketAddr, to: SocketAddr| {
        if between_agents(from, to) && from.ip() == ENTRY_2 {
            *seen.borrow_mut().entry(from.port()).or_default() += 1;
        }
        false
    });
    crowd.run(&mut pair, SECOND);
    let busiest = ports.borrow().iter().max_by_key(|(_, packets)| **packets).map(|(port, _)| *port);
    let dead = SocketAddr::new(ENTRY_2, busiest.expect("the line carries packets"));
    pair.world.weather.borrow_mut().block = Box::new(move |from, to| from == dead || to == dead);
    let entry = pair.entry;
    let reopened = "culvert_lanes_reopened_total{reason=\"unresponsive\"}";
    assert_eq!(pair.world.metric(entry, reopened), 0);
    crowd.run(&mut pair, 5 * SECOND);
    assert!(pair.world.metric(entry, reopened) > 0, "the lane died");
    for place in [entry, pair.exit] {
        let suspicions: Vec<u64> = pair.world.peer(place).lines.iter().map(|line| line.suspicions).collect();
        assert_eq!(suspicions, [0, 0], "at agent {place}");
    }
    pair.wait_for_lanes(4);
    pair.assert_balanced();
}

#[test]
fn a_metered_line_and_a_backup_carry_nothing_while_the_other_is_well() {
    for (seed, second) in [(9710, "cost = \"metered\""), (9711, "backup = true")] {
        let (mut pair, seen) = (pair_of(seed, (2, 2), second), Seen::default());
        pair.wait_for_lanes(4);
        let mut crowd = Crowd::new(&mut pair, 8, seed);
        crowd.run(&mut pair, SECOND);
        seen.count(&mut pair, &[]);
        crowd.run(&mut pair, 4 * SECOND);
        let [[up, down], [up_2, down_2]] = [ENTRY, ENTRY_2].map(|line| seen.of(line));
        assert!(up > 1_000 && down > 1_000, "{second}: {up} and {down}");
        assert!(up_2 < 50 && down_2 < 50, "{second}: {up_2} up and {down_2} down");
        seen.count(&mut pair, &[ENTRY]);
        let gap = longest_gap(&mut pair, &mut crowd, INGRESS, 3 * SECOND);
        assert!(gap < SECOND, "{second}: {gap:?}");
        let [up_2, down_2] = seen.of(ENTRY_2);
        assert!(up_2 > 500 && down_2 > 500, "{second}: it stands in: {up_2} and {down_2}");
        pair.assert_balanced();
    }
}

#[test]
fn a_dead_first_line_does_not_delay_the_start() {
    for seed in 9720..9724 {
        let dead: &'static [IpAddr] = if seed % 2 == 0 { &[ENTRY] } else { &[ENTRY_2] };
        let (mut pair, seen) = (pair_of(seed, (1, 1), ""), Seen::default());
        seen.count(&mut pair, dead);
        let begin = pair.world.now();
        pair.wait_for_lanes(2);
        let time = pair.world.now() - begin;
        assert!(time < SECOND, "seed {seed}: {time:?}");
        let mut crowd = Crowd::new(&mut pair, 4, seed);
        crowd.run(&mut pair, SECOND);
        assert!(crowd.answers.iter().all(|answers| *answers > 0), "seed {seed}: {:?}", crowd.answers);
        pair.assert_balanced();
    }
}

#[test]
fn a_line_whose_address_appears_later_is_used_from_then_on() {
    let (mut pair, seen) = (Pair::with_workers(9730, (1, 1), &two_lines(""), ""), Seen::default());
    pair.wait_for_lanes(2);
    let mut crowd = Crowd::new(&mut pair, 8, 9730);
    crowd.run(&mut pair, SECOND);
    pair.world.set_addresses(ENTRY, &[ENTRY, ENTRY_2]);
    pair.wait_for_lanes(4);
    // Flows of clients that were busy stay; new ones go where there is room.
    crowd.run(&mut pair, SECOND);
    seen.count(&mut pair, &[]);
    let mut clients: Vec<_> = (0..8).map(|place| pair.client(3000 + place)).collect();
    for _ in 0..100 {
        clients.iter_mut().for_each(|client| client.send(INGRESS, b"new"));
        pair.run_served(Duration::from_millis(10));
    }
    let [up, down] = seen.of(ENTRY_2);
    assert!(up > 50 && down > 50, "{up} and {down}");
    assert_eq!(pair.world.metric(pair.exit, ESTABLISHED), 1, "the session goes on");
    pair.assert_balanced();
}

#[test]
fn an_end_that_does_not_know_lines_sends_on_all_lanes() {
    let (mut pair, seen) = (pair_of(9740, (1, 1), "backup = true"), Seen::default());
    let exit = pair.exit;
    for worker in &mut pair.world.agent(exit).workers {
        worker.withhold(Features::LINES);
    }
    pair.wait_for_lanes(4);
    let mut crowd = Crowd::new(&mut pair, 8, 9740);
    crowd.run(&mut pair, SECOND);
    seen.count(&mut pair, &[]);
    crowd.run(&mut pair, 2 * SECOND);
    assert!(crowd.answers.iter().all(|answers| *answers > 0));
    let [up, _] = seen.of(ENTRY_2);
    assert!(up < 500, "this end knows what costs: {up}");
    pair.assert_balanced();
}
