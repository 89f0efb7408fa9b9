use proptest::prelude::*;

use super::*;

#[path = "mtu_stage_tests.rs"]
mod stages;

const RTT: Duration = Duration::from_millis(20);

/// Whatever carries more than is usual carries that.
const BEYOND: u16 = 2020;

#[expect(
    clippy::disallowed_methods,
    reason = "a test needs some instant to start from; only differences matter"
)]
fn start() -> Instant {
    Instant::now()
}

/// A path, and a search over it.
struct Sim {
    search: MtuSearch,
    now: Instant,
    /// The largest packet that the simulated path carries.
    mtu: u16,
    lost_percent: u64,
    random: u64,
    probes: u32,
    lost: u32,
    black_holes: u32,
}

impl Sim {
    fn new(mtu: u16, max: u16, from: u16) -> Self {
        let mut search = MtuSearch::new();
        search.start(max, from);
        Self { search, now: start(), mtu, lost_percent: 0, random: 1, probes: 0, lost: 0, black_holes: 0 }
    }

    /// Whether a packet of this size gets through.
    fn carries(&mut self, size: u16) -> bool {
        // SplitMix64: small, and the same everywhere.
        self.random = self.random.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut word = self.random;
        word = (word ^ (word >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        word = (word ^ (word >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        size <= self.mtu && (word ^ (word >> 31)) % 100 >= self.lost_percent
    }

    /// Sends the probes that are due, and lets their round trip pass; false if none is.
    fn probe(&mut self) -> bool {
        let mut sent = Vec::new();
        while let Some(size) = self.search.due(self.now) {
            self.search.on_sent(self.now);
            sent.push(size);
        }
        if sent.is_empty() {
            return false;
        }
        assert!(sent.len() <= RUNGS && sent.is_sorted_by(|one, other| one > other), "{sent:?}");
        assert_eq!(self.search.due(self.now + RAISE_AFTER), None, "no more at a time");
        assert_eq!(self.search.timeout(), None, "the probe's own timers run");
        self.probes += sent.len() as u32;
        self.now += RTT;
        for size in sent {
            let fate = if self.carries(size) { Fate::Acked } else { Fate::Lost };
            self.lost += u32::from(fate == Fate::Lost);
            self.black_holes += u32::from(self.search.on_settled(size, fate, self.now));
        }
        true
    }

    fn on_timeout(&mut self) {
        self.black_holes += u32::from(self.search.on_timeout(self.now));
    }

    /// Probes until nothing is to be done without traffic.
    fn settle(&mut self) {
        for _ in 0..1000 {
            if self.probe() {
                continue;
            }
            let Some(at) = self.search.timeout() else { return };
            self.now = self.now.max(at);
            self.on_timeout();
        }
        panic!("a search without end: {:?}", self.search);
    }

    /// Sends the probes that are due, or lets the wait for the next pass.
    fn burst_or_wait(&mut self) {
        if !self.probe() {
            self.now = self.search.timeout().map_or(self.now, |at| at.max(self.now));
            self.on_timeout();
        }
    }

    /// Lets the burst that is due, and what follows from it, come to an end.
    fn burst(&mut self) {
        assert!(self.probe());
        if let (Phase::Burst(_), Some(at)) = (self.search.phase, self.search.timeout()) {
            self.now = at;
            self.on_timeout();
        }
    }

    /// Sends a packet of the current size, and tells its fate.
    fn send(&mut self) {
        let size = self.search.current;
        if self.carries(size) {
            self.search.on_packets_acked(Volume { packets: 1, bytes: size.into() });
        } else {
            self.search.on_packets_lost(size);
        }
    }

    fn assert_found(&self, max: u16) {
        let (found, path) = (self.search.current, self.mtu.min(max));
        // Between what is usual and what nobody has there is nothing to look for.
        let is_near = if path < BEYOND { path.min(USUAL_MOST) - STEP } else { path - step(path) };
        assert!((is_near..=path).contains(&found), "{found} of {path}");
        assert!(self.mtu < max || found == max, "{found} of {max}");
    }
}

proptest! {
    #[test]
    fn what_the_path_carries_is_found(
        mtu in BASE..=65_000, max in BASE..=65_000, from in BASE..=65_000_u16,
    ) {
        let mut sim = Sim::new(mtu, max, from.min(mtu));
        sim.settle();
        sim.assert_found(max);
        // Two bursts, the second three times; the maximum, two sizes that they lost; then one for each halving.
        let sizes = 3 + u32::from(max).ilog2();
        let bursts = RUNGS as u32 + 4 * 3;
        prop_assert!(sim.probes <= bursts + sizes * u32::from(MAX_PROBES), "{} probes", sim.probes);
        prop_assert_eq!((sim.black_holes, sim.search.due(sim.now)), (0, None));
    }

    #[test]
    fn a_path_that_shrinks_and_grows_is_followed(before in BASE + 9..=9000, after in BASE..=9000_u16) {
        let mut sim = Sim::new(before, 9000, BASE);
        sim.settle();
        sim.mtu = after;
        let (changed, shrunk) = (sim.now, after < sim.search.current);
        sim.send();
        sim.settle();
        prop_assert_eq!(sim.black_holes, u32::from(shrunk));
        if shrunk {
            sim.assert_found(9000);
        }
        let limit = (RTT + PAUSE) * 3 * 16;
        prop_assert!(sim.now - changed <= limit, "{:?} of {limit:?}", sim.now - changed);

        sim.now += RAISE_AFTER;
        prop_assert_eq!(sim.search.timeout(), None, "an idle lane runs no timer");
        sim.settle();
        sim.assert_found(9000);
        sim.mtu = 9000;
        sim.now += RAISE_AFTER;
        sim.settle();
        prop_assert_eq!(sim.search.current, 9000);
        sim.now += RAISE_AFTER;
        prop_assert_eq!(sim.search.due(sim.now), None, "nothing is above the maximum");
    }
}

#[test]
fn one_round_trip_finds_the_maximum() {
    let mut sim = Sim::new(1500, 1452, BASE);
    let began = sim.now;
    sim.settle();
    assert_eq!((sim.search.current, sim.search.measured), (1452, true));
    assert_eq!((sim.probes as usize, sim.now - began), (RUNGS, RTT));
}

#[test]
fn one_round_trip_finds_the_usual_size_below_what_the_path_carries() {
    for (max, mtu, found) in [
        (1452, 1451, 1444),
        (1452, 1400, 1392),
        (1452, 1372, 1372),
        (1452, 1352, 1352),
        (1452, 1311, 1311),
        (1452, 1310, BASE),
        (1472, 1471, 1464),
        (1472, 1464, 1464),
        (1400, 1400, 1400),
        (1400, 1399, 1392),
        (8972, 8971, 1472),
        (65_507, 1452, 1452),
        (1300, 1299, BASE),
    ] {
        let mut sim = Sim::new(mtu, max, BASE);
        assert!(!sim.search.measured);
        let began = sim.now;
        sim.burst();
        assert_eq!((sim.search.current, sim.search.measured), (found, true), "{mtu} of {max}");
        assert!(sim.now - began <= RTT + GRACE && sim.probes as usize <= RUNGS);
        sim.settle();
        sim.assert_found(max);
    }
}

#[test]
fn a_probe_that_is_lost_while_a_larger_one_arrives_says_nothing() {
    let mut search = MtuSearch::new();
    search.start(1452, BASE);
    let now = start();
    while search.due(now).is_some() {
        search.on_sent(now);
    }
    for size in [BASE, 1311, 1352, 1372, 1392, 1412, 1432] {
        search.on_settled(size, Fate::Lost, now);
        assert!(!search.measured);
    }
    search.on_settled(1452, Fate::Acked, now);
    assert_eq!(
        (search.current, search.measured, search.phase),
        (1452, true, Phase::Found { raise_at: None })
    );
    // What comes late of it is of no use.
    search.on_settled(1432, Fate::Late, now);
    assert_eq!((search.current, search.phase), (1452, Phase::Found { raise_at: None }));
}

#[test]
fn probes_of_a_burst_that_are_merely_late_count_if_they_come_within_the_grace() {
    let mut search = MtuSearch::new();
    search.start(1452, BASE);
    let now = start();
    while search.due(now).is_some() {
        search.on_sent(now);
    }
    for (size, fate) in [(1392, Fate::Acked), (1452, Fate::Lost), (1444, Fate::Lost), (1432, Fate::Lost)] {
        search.on_settled(size, fate, now);
    }
    assert_eq!((search.timeout(), search.measured), (Some(now + GRACE), false));
    search.on_settled(1444, Fate::Late, now);
    search.on_timeout(now + GRACE);
    assert_eq!((search.current, search.measured), (1444, true));
    // The maximum alone was lost: that is tried again before anything.
    assert_eq!(search.phase, Phase::Searching { limit: 1452, size: 1452, lost: 1 });
}

#[test]
fn after_a_burst_of_which_nothing_arrives_the_search_goes_on_with_the_maximum() {
    let mut sim = Sim::new(1452, 1452, BASE);
    sim.lost_percent = 100;
    sim.burst();
    assert_eq!((sim.search.current, sim.search.measured), (BASE, false), "nobody is told anything");
    sim.lost_percent = 0;
    sim.settle();
    assert_eq!((sim.search.current, sim.search.measured, sim.probes as usize), (1452, true, RUNGS + 1));
}

#[test]
fn a_path_that_has_moved_is_measured_in_one_round_trip_and_the_size_before_holds_until_then() {
    for (mtu, found, black_holes) in [(1452, 1452, 0), (1392, 1392, 1), (1311, 1311, 1), (1250, BASE, 1)] {
        let mut sim = Sim::new(1452, 1452, 1452);
        sim.settle();
        assert_eq!((sim.probes, sim.search.measured), (0, true));
        sim.mtu = mtu;
        sim.search.start(1452, sim.search.current);
        assert_eq!((sim.search.current, sim.search.measured), (1452, true));
        let began = sim.now;
        sim.burst();
        assert_eq!((sim.search.current, sim.search.measured, sim.black_holes), (found, true, black_holes));
        assert!(sim.now - began <= RTT + GRACE);
        sim.settle();
        sim.assert_found(1452);
    }
}

/// One or two probes may be lost by chance: what is in use falls only after three.
#[test]
fn a_path_that_carries_a_little_less_after_it_has_moved_falls_to_what_the_burst_has_found() {
    let mut sim = Sim::new(1452, 1452, 1452);
    sim.mtu = 1440;
    sim.search.start(1452, 1452);
    sim.burst();
    assert_eq!((sim.search.current, sim.search.suspect, sim.search.unconfirmed), (1452, 1452, 2));
    let began = sim.now;
    while sim.black_holes == 0 {
        sim.now = sim.search.timeout().unwrap_or(sim.now);
        sim.on_timeout();
        sim.probe();
    }
    assert_eq!((sim.search.current, sim.search.measured), (1432, true));
    assert!(sim.now - began <= 2 * (RTT + PAUSE));
    sim.settle();
    sim.assert_found(1452);
}

#[test]
fn a_burst_that_loses_one_in_ten_packets_is_seldom_wrong_for_long() {
    let (mut below, mut far_below, mut below_at_last) = (0, 0, 0);
    for seed in 0..1000 {
        let mut sim = Sim::new(1452, 1452, BASE);
        (sim.lost_percent, sim.random) = (10, seed << 20);
        sim.burst();
        below += u32::from(sim.search.current < 1452);
        far_below += u32::from(sim.search.current < 1412);
        sim.settle();
        below_at_last += u32::from(sim.search.current < 1452 - 2 * STEP);
    }
    assert!((70..130).contains(&below) && far_below <= 5, "{below} {far_below}");
    assert!(below_at_last <= 5, "{below_at_last}");
}

#[test]
fn it_does_nothing_before_it_starts_or_when_there_is_nothing_to_find() {
    let mut search = MtuSearch::new();
    search.on_packets_lost(9000);
    assert_eq!((search.due(start()), search.timeout(), search.current), (None, None, BASE));
    search.start(1000, 900);
    assert_eq!((search.due(start()), search.timeout(), search.current), (None, None, BASE));
}

#[test]
fn a_black_hole_is_found_within_three_probes_and_the_current_size_falls_to_what_every_path_carries() {
    let mut sim = Sim::new(1452, 1452, 1452);
    sim.mtu = 1300;
    let changed = sim.now;
    sim.send();
    while sim.black_holes == 0 {
        assert_eq!(sim.search.current, 1452);
        sim.now = sim.search.timeout().unwrap_or(sim.now);
        assert!(sim.probe());
    }
    assert_eq!((sim.search.current, sim.search.measured, sim.probes), (BASE, false, 3));
    assert_eq!(sim.now - changed, 3 * RTT + 2 * PAUSE);
    // What was under way is lost now, and says nothing new.
    sim.search.on_packets_lost(1452);
    sim.burst();
    assert!(sim.search.measured);
    sim.settle();
    assert_eq!((sim.search.current, sim.black_holes), (1297, 1));
}

impl Sim {
    /// Sends probes through a socket that refuses what is larger than `takes`; the others come back.
    fn probe_refused(&mut self, takes: u16) {
        let mut taken = Vec::new();
        for _ in 0..100 {
            let Some(size) = self.search.due(self.now) else { break };
            self.search.on_sent(self.now);
            if size > takes {
                self.search.on_refused(size, self.now);
            } else {
                taken.push(size);
            }
        }
        self.now += RTT;
        for size in taken {
            self.search.on_settled(size, Fate::Acked, self.now);
        }
        self.now = self.search.timeout().unwrap_or(self.now);
        self.on_timeout();
    }
}

#[test]
fn what_the_local_socket_refuses_is_not_in_use_from_the_next_packet_on_and_the_rest_is_found() {
    for takes in [1201, 1300, 1372, 1451] {
        let mut sim = Sim::new(1452, 1452, 1452);
        assert!(sim.search.on_refused(1452, sim.now));
        assert_eq!((sim.search.current, sim.search.measured, sim.search.most()), (BASE, false, 1451));
        while sim.search.is_searching() {
            sim.probe_refused(takes);
            assert!(sim.search.current <= takes);
        }
        assert!(
            sim.search.measured && (takes - STEP..=takes).contains(&sim.search.current),
            "{:?}",
            sim.search
        );
        assert!(sim.search.most() < 1452);
        // The device is as before, and that is noticed when the maximum is tried again.
        sim.now += RAISE_AFTER;
        sim.settle();
        assert_eq!((sim.search.current, sim.search.most()), (1452, 1452));
    }
}

#[test]
fn a_refused_probe_is_not_waited_for() {
    let mut sim = Sim::new(1452, 1452, BASE);
    sim.search.bursts = false;
    sim.search.start(1452, BASE);
    let mut rounds = 0;
    while sim.search.is_searching() {
        sim.probe_refused(1300);
        rounds += 1;
    }
    assert!((1292..=1300).contains(&sim.search.current) && rounds <= 6, "{} {rounds}", sim.search.current);
}

#[test]
fn a_size_that_every_path_carries_is_not_given_up_but_asked_for() {
    let mut sim = Sim::new(1452, 1452, 1452);
    assert!(!sim.search.on_refused(BASE, sim.now));
    assert_eq!((sim.search.current, sim.search.due(sim.now)), (1452, None));
    sim.search.check_base();
    assert_eq!(sim.search.due(sim.now), Some(BASE));
    sim.search.on_sent(sim.now);
    assert_eq!((sim.search.due(sim.now), sim.search.timeout()), (None, None));
}

#[test]
fn a_probe_without_any_acknowledgement_changes_nothing() {
    let mut sim = Sim::new(1452, 1452, 1452);
    sim.search.on_packets_lost(1452);
    sim.search.on_sent(sim.now);
    sim.now += RAISE_AFTER;
    sim.search.on_timeout(sim.now);
    assert_eq!((sim.search.due(sim.now), sim.search.timeout(), sim.search.current), (None, None, 1452));
}

#[test]
fn a_loss_is_looked_into_unless_packets_of_that_size_get_through() {
    let mut sim = Sim::new(1452, 1452, 1452);
    sim.search.on_packets_lost(1300);
    assert_eq!(sim.search.due(sim.now), Some(1452));
    sim.search.on_packets_acked(Volume { packets: 2, bytes: 2 * 1299 });
    assert_eq!(sim.search.due(sim.now), Some(1452), "they were smaller");
    sim.search.on_packets_acked(Volume { packets: 2, bytes: 2 * 1300 });
    assert_eq!(sim.search.due(sim.now), None);
    sim.search.on_packets_lost(BASE);
    assert_eq!(sim.search.due(sim.now), None, "every path carries that");

    // Confirmed, the size is trusted for a while.
    sim.search.on_packets_lost(1452);
    assert!(sim.probe());
    sim.search.on_packets_lost(1452);
    assert_eq!((sim.search.due(sim.now), sim.search.timeout()), (None, Some(sim.now + TRUST)));
    sim.now += TRUST;
    sim.search.on_timeout(sim.now);
    assert_eq!((sim.search.due(sim.now), sim.search.timeout()), (Some(1452), None));
}

/// An hour of 1000 packets per second: what random losses make of the size is a few bytes, and seldom a fall.
#[test]
fn random_losses_rarely_look_like_a_black_hole() {
    for (seed, smaller_get_through) in [(1, false), (2, false), (3, true), (4, true)] {
        println!("seed {seed}");
        let mut sim = Sim::new(1452, 1452, BASE);
        (sim.lost_percent, sim.random) = (5, seed);
        sim.settle();
        let mut seconds_below = 0;
        for millis in 0..3_600_000_u32 {
            sim.now += Duration::from_millis(1);
            sim.on_timeout();
            if !smaller_get_through {
                sim.send();
            } else if !sim.carries(BASE) {
                // Nothing but the losses says anything of this size.
                sim.search.on_packets_lost(sim.search.current);
            }
            sim.probe();
            seconds_below += u32::from(millis % 1000 == 0 && sim.search.current < 1400);
        }
        let most = if smaller_get_through { 6 } else { 0 };
        assert!(sim.black_holes <= most && seconds_below <= most, "{} black holes", sim.black_holes);
        // Each time that one size was lost thrice in vain cost less than two steps.
        assert!(sim.search.current > 1452 - 10 * STEP, "{}", sim.search.current);
    }
}
