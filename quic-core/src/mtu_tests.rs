use proptest::prelude::*;

use super::*;

const RTT: Duration = Duration::from_millis(20);

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
    black_holes: u32,
}

impl Sim {
    fn new(mtu: u16, max: u16, from: u16) -> Self {
        let mut search = MtuSearch::new();
        search.start(max, from);
        Self { search, now: start(), mtu, lost_percent: 0, random: 1, probes: 0, black_holes: 0 }
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

    /// Sends the probe that is due, and lets its round trip pass; false if none is.
    fn probe(&mut self) -> bool {
        let Some(size) = self.search.due(self.now) else { return false };
        self.search.on_sent(self.now);
        assert_eq!(self.search.due(self.now + RAISE_AFTER), None, "one at a time");
        assert_eq!(self.search.timeout(), None, "the probe's own timers run");
        self.probes += 1;
        self.now += RTT;
        let fate = if self.carries(size) { Fate::Acked } else { Fate::Lost };
        self.black_holes += u32::from(self.search.on_settled(fate, self.now));
        true
    }

    /// Probes until nothing is to be done without traffic.
    fn settle(&mut self) {
        for _ in 0..1000 {
            if self.probe() {
                continue;
            }
            let Some(at) = self.search.timeout() else { return };
            self.now = self.now.max(at);
            self.search.on_timeout(self.now);
        }
        panic!("a search without end: {:?}", self.search);
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
        assert!((path - STEP..=path).contains(&found), "{found} of {path}");
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
        // The maximum, then one size for each halving.
        let sizes = 1 + u32::from(max).ilog2();
        prop_assert!(sim.probes <= sizes * u32::from(MAX_PROBES), "{} probes", sim.probes);
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
        let limit = (RTT + PAUSE) * 3 * 14;
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
fn the_maximum_is_tried_first_and_one_probe_finds_it() {
    let mut sim = Sim::new(1500, 1452, BASE);
    assert_eq!(sim.search.due(sim.now), Some(1452));
    sim.settle();
    assert_eq!((sim.search.current, sim.probes), (1452, 1));
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
    assert_eq!((sim.search.current, sim.probes), (BASE, 3));
    assert_eq!(sim.now - changed, 3 * RTT + 2 * PAUSE);
    // What was under way is lost now, and says nothing new.
    sim.search.on_packets_lost(1452);
    sim.settle();
    assert_eq!((sim.search.current, sim.black_holes), (1297, 1));
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
            sim.search.on_timeout(sim.now);
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
