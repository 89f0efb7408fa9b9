//! One of several lines fails: for how long a flow of 1,000 packets a second gets no answer, and what is not disturbed.
//!
//! Times are the world's. The command that prints them:
//! `cargo test -p culvert-testkit --test agents line_gaps -- --nocapture`

use std::{
    net::IpAddr,
    time::{Duration, Instant},
};

use base::clock::Clock;

use crate::{
    ENTRY, EXIT, INGRESS, Pair, UPSTREAM,
    harness::{NetworkPath, Udp},
    numbered,
    restarts::report,
    roaming::{ENTRY_2, ESTABLISHED, LAN, SECOND},
};

/// The bytes of a payload of the fast flow.
const FAST_BYTES: usize = 600;

const MILLISECOND: Duration = Duration::from_millis(1);

/// The lines of the entry, by their numbers.
const LINES: [IpAddr; 2] = [ENTRY, ENTRY_2];

/// The directions of a line that carry nothing.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Dead {
    Neither,
    Up,
    Down,
    Both,
}

/// A line with this one-way delay in milliseconds and this largest packet.
const fn path(delay: u64, most_bytes: usize) -> NetworkPath {
    NetworkPath { most_bytes, ..NetworkPath::with_delay(Duration::from_millis(delay)) }
}

/// A pair with two lines, one fast flow and some slow ones.
struct Bed {
    pair: Pair,
    /// The lines while they are well.
    paths: [NetworkPath; 2],
    fast: Udp,
    /// Flows of 50 packets a second.
    slow: Vec<Udp>,
    number: u32,
    /// When the fast flow was last answered.
    answered: Instant,
    /// The longest time since an answer, since it was last taken.
    gap: Duration,
    /// The same of what came to the service.
    came: Instant,
    gap_up: Duration,
    /// Sessions until the flows began; an attempt on each line may have become one.
    sessions: u64,
}

impl Bed {
    /// With these one-way delays of the lines.
    fn new(seed: u64, workers: (u8, u8), delays: [u64; 2], slow: u16) -> Self {
        Self::with(seed, workers, delays.map(|delay| path(delay, usize::MAX)), slow, "")
    }

    /// With these lines, and more keys of the second one.
    fn with(seed: u64, workers: (u8, u8), paths: [NetworkPath; 2], slow: u16, second: &str) -> Self {
        let lines = format!(
            "lanes = 2\n[[transport.uplink]]\nname = \"one\"\nsource = \"{ENTRY}\"\n[[transport.uplink]]\nname = \"other\"\n\
             source = \"{ENTRY_2}\"\n{second}\n"
        );
        let mut pair = Pair::with_workers(seed, workers, &lines, "");
        pair.world.set_addresses(ENTRY, &[ENTRY, ENTRY_2, LAN.ip()]);
        pair.world.weather.borrow_mut().delay = Duration::ZERO;
        let (fast, slow) = (pair.client(1999), (0..slow).map(|place| pair.client(2000 + place)).collect());
        let answered = pair.world.clock.now();
        let (gap, gap_up) = (Duration::ZERO, Duration::ZERO);
        let mut bed =
            Self { pair, paths, fast, slow, number: 0, answered, gap, came: answered, gap_up, sessions: 0 };
        LINES.into_iter().for_each(|line| bed.cut(line, Dead::Neither));
        bed.pair.wait_for_lanes(4);
        bed.talk(2 * SECOND);
        bed.take_gap();
        bed.sessions = bed.pair.world.metric(bed.pair.exit, ESTABLISHED);
        bed
    }

    /// Lets these directions of a line die, and the others live.
    fn cut(&self, line: IpAddr, dead: Dead) {
        let path = self.paths[usize::from(line == ENTRY_2)];
        let of = |is_cut| NetworkPath { is_cut, ..path };
        self.pair.world.set_path(line, EXIT, of(matches!(dead, Dead::Up | Dead::Both)));
        self.pair.world.set_path(EXIT, line, of(matches!(dead, Dead::Down | Dead::Both)));
    }

    /// The flows talk for so long.
    fn talk(&mut self, time: Duration) {
        for _ in 0..time.as_millis() {
            self.number += 1;
            self.fast.send(LAN, &numbered(self.number));
            if self.number.is_multiple_of(20) {
                self.slow.iter_mut().for_each(|flow| flow.send(LAN, b"slow"));
            }
            self.pair.world.run(MILLISECOND);
            let now = self.pair.world.clock.now();
            let received = self.pair.echo.receive();
            self.gap_up = self.gap_up.max(now - self.came);
            if received.iter().any(|(_, payload)| payload.len() == FAST_BYTES) {
                self.came = now;
            }
            received.iter().for_each(|(from, payload)| self.pair.echo.send(*from, payload));
            self.gap = self.gap.max(now - self.answered);
            if !self.fast.receive().is_empty() {
                self.answered = now;
            }
            self.slow.iter_mut().for_each(|flow| drop(flow.receive()));
        }
    }

    /// The longest gap in what came to the service, and in answers, since this was last called.
    fn take_gap(&mut self) -> [Duration; 2] {
        let now = self.pair.world.clock.now();
        (self.answered, self.came) = (now, now);
        [std::mem::take(&mut self.gap_up), std::mem::take(&mut self.gap)]
    }

    /// The line that carries the fast flow upwards, by the bytes of the lines' lanes in a tenth of a second.
    fn line(&mut self) -> IpAddr {
        let before = self.sent();
        self.talk(SECOND / 10);
        let after = self.sent();
        let grown = [0, 1].map(|line| after[line].saturating_sub(before[line]));
        LINES[usize::from(grown[1] > grown[0])]
    }

    /// The bytes that the entry's present lanes have sent, by line.
    fn sent(&mut self) -> [u64; 2] {
        let entry = self.pair.entry;
        let workers = &self.pair.world.agent(entry).workers;
        [0, 1].map(|line| {
            let slots = workers.iter().flat_map(|worker| worker.lanes().iter());
            let slots = slots.filter(|(_, slot)| slot.line == Some(line));
            slots.map(|(_, slot)| slot.core.stats().sealed_bytes).sum()
        })
    }

    /// Sessions since the flows began.
    fn sessions(&mut self) -> u64 {
        self.pair.world.metric(self.pair.exit, ESTABLISHED) - self.sessions
    }
}

/// How a line fails: what of it is dead, and whether the entry's kernel says so.
#[derive(Clone, Copy, Debug)]
struct Failure {
    dead: Dead,
    told: bool,
}

/// The gaps when the line of the fast flow fails in this way, on unlike numbers of workers, with and without flows on the other line.
fn gaps(seeds: std::ops::Range<u64>, failure: Failure) -> [Vec<Duration>; 2] {
    let (mut ups, mut answers) = (Vec::new(), Vec::new());
    for seed in seeds {
        let workers = [(1, 1), (2, 2), (1, 2)][(seed % 3) as usize];
        let mut bed = Bed::new(seed, workers, [10, 10], if seed % 2 == 0 { 6 } else { 0 });
        let line = bed.line();
        bed.take_gap();
        bed.cut(line, failure.dead);
        if failure.told {
            let left = LINES.into_iter().filter(|other| *other != line).chain([LAN.ip()]);
            bed.pair.world.set_addresses(LAN.ip(), &left.collect::<Vec<_>>());
        }
        bed.talk(3 * SECOND);
        let [up, answered] = bed.take_gap();
        println!("{failure:?}: {up:?} to the service, {answered:?} until an answer");
        ups.push(up);
        answers.push(answered);
        assert_eq!(bed.sessions(), 0, "seed {seed}: the session goes on");
        bed.pair.assert_balanced();
    }
    [ups, answers]
}

#[test]
fn a_line_that_dies_in_silence_is_left_after_a_probe_timeout() {
    let [_, answers] = gaps(9800..9812, Failure { dead: Dead::Both, told: false });
    assert!(report("gap, a line dies in silence", answers) <= Duration::from_millis(100));
}

#[test]
fn a_line_that_dies_in_one_direction_is_left_by_both_ends() {
    for dead in [Dead::Up, Dead::Down] {
        let [_, answers] = gaps(9820..9832, Failure { dead, told: false });
        assert!(report("gap, a line dies in one direction", answers) <= Duration::from_millis(150));
    }
}

#[test]
fn a_line_whose_address_is_gone_is_left_at_once() {
    let [ups, answers] = gaps(9840..9852, Failure { dead: Dead::Both, told: true });
    assert!(report("gap towards the service, an address is gone", ups) <= Duration::from_millis(20));
    // What is under way is lost, and a round trip takes 20 ms.
    assert!(report("gap in answers, an address is gone", answers) <= Duration::from_millis(40));
}

/// A line that is dead for two seconds of each four: traffic leaves it once, and its lanes use few openings.
#[test]
fn a_line_that_flaps_disturbs_a_flow_once_and_costs_no_session() {
    for (seed, workers) in [(9860, (1, 1)), (9861, (2, 2))] {
        let mut bed = Bed::new(seed, workers, [10, 10], 4);
        let line = bed.line();
        bed.take_gap();
        let mut later = Vec::new();
        for turn in 0..20 {
            for dead in [Dead::Both, Dead::Neither] {
                bed.cut(line, dead);
                bed.talk(2 * SECOND);
                let [_, gap] = bed.take_gap();
                if turn == 0 {
                    assert!(gap <= Duration::from_millis(100), "seed {seed}: {gap:?}");
                } else {
                    later.push(gap);
                }
            }
        }
        assert!(later.iter().max() <= Some(&Duration::from_millis(30)), "seed {seed}: {later:?}");
        assert_eq!(bed.sessions(), 0, "seed {seed}");
        let entry = bed.pair.entry;
        let workers = &bed.pair.world.agent(entry).workers;
        let epochs = workers.iter().flat_map(|worker| worker.lanes().iter()).map(|(_, slot)| slot.epoch);
        let newest = epochs.max().unwrap();
        println!("seed {seed}: {newest} openings of lanes in 80 s");
        assert!(newest < 200, "seed {seed}: {newest} openings");
        bed.pair.assert_balanced();
    }
}

#[test]
fn after_both_lines_were_dead_traffic_flows_again_within_a_second() {
    let mut times = Vec::new();
    for seed in 9870..9874 {
        let mut bed = Bed::new(seed, (1, 1), [10, 10], 4);
        LINES.into_iter().for_each(|line| bed.cut(line, Dead::Both));
        bed.talk(20 * SECOND);
        // One of them, or both.
        let back = if seed % 2 == 0 { &LINES[..1] } else { &LINES[..] };
        back.iter().for_each(|line| bed.cut(*line, Dead::Neither));
        bed.take_gap();
        bed.talk(5 * SECOND);
        let [_, gap] = bed.take_gap();
        println!("seed {seed}: {} sessions more", bed.sessions());
        times.push(gap);
        bed.pair.assert_balanced();
    }
    assert!(report("time to traffic after both lines were dead", times) <= SECOND);
}

#[test]
fn lines_of_unlike_delays_are_not_suspected_while_they_are_well() {
    for (seed, delays) in [(9880, [5, 40]), (9881, [60, 10])] {
        let mut bed = Bed::new(seed, (2, 2), delays, 6);
        bed.talk(20 * SECOND);
        let [_, gap] = bed.take_gap();
        assert!(gap <= Duration::from_millis(5), "seed {seed}: {gap:?}");
        let line = bed.line();
        bed.cut(line, Dead::Both);
        bed.talk(3 * SECOND);
        let [_, gap] = bed.take_gap();
        println!("seed {seed}, delays {delays:?}, {line} is dead: {gap:?}");
        assert!(gap <= Duration::from_millis(350), "seed {seed}: {gap:?}");
        assert_eq!(bed.sessions(), 0, "seed {seed}");
        bed.pair.assert_balanced();
    }
}

#[test]
fn a_forward_survives_the_death_of_each_line_in_turn() {
    for (seed, workers) in [(9890, (1, 1)), (9891, (2, 2)), (9892, (1, 2))] {
        let mut bed = Bed::new(seed, workers, [10, 10], 4);
        let mut service = bed.pair.services.tcp_listen(UPSTREAM);
        let mut stream = bed.pair.clients.tcp(INGRESS);
        bed.talk(SECOND / 2);
        let token = bed.pair.services.token();
        let (mut served, _) = service.accept(token).unwrap();
        let (mut written, mut read) = (0_u64, 0_u64);
        let mut stalls = Vec::new();
        for turn in 0..6 {
            let line = LINES[turn % 2];
            bed.cut(line, Dead::Both);
            let (mut stall, mut longest) = (0, 0);
            for _ in 0..2_500 {
                written += stream.write(&[7; 2_000]).unwrap_or(0) as u64;
                bed.talk(MILLISECOND);
                let came = served.read(&mut [0; 65_536]).unwrap_or(0) as u64;
                read += came;
                stall = if came == 0 { stall + 1 } else { 0 };
                longest = longest.max(stall);
            }
            stalls.push(longest);
            bed.cut(line, Dead::Neither);
            bed.talk(SECOND);
        }
        println!("seed {seed}: {read} of {written} bytes of a forward have come; stalled for {stalls:?} ms");
        assert_eq!(bed.sessions(), 0, "seed {seed}: the session goes on");
        assert!(read > 3_000_000, "seed {seed}: {read} of {written}, {stalls:?}");
        assert!(stalls.iter().all(|stall| *stall < 1_000), "seed {seed}: {stalls:?}");
        bed.pair.assert_balanced();
    }
}

/// What a line costs changes with a reload: both ends leave it, without a new lane.
#[test]
fn what_a_reload_says_of_a_line_reaches_the_other_end() {
    let mut bed = Bed::new(9895, (2, 2), [10, 10], 6);
    let line = bed.line();
    let number = usize::from(line == ENTRY_2);
    let (entry, exit) = (bed.pair.entry, bed.pair.exit);
    let name = ["one", "other"][number];
    let toml = bed
        .pair
        .entry_toml
        .replace(&format!("name = \"{name}\"\n"), &format!("name = \"{name}\"\ncost = \"metered\"\n"));
    bed.pair.world.reload(entry, &toml).unwrap();
    bed.talk(SECOND);
    let of_agent = |bed: &mut Bed, place| {
        let workers = &bed.pair.world.agent(place).workers;
        let slots = workers.iter().flat_map(|worker| worker.lanes().iter());
        let slots = slots.filter(|(_, slot)| slot.line == Some(number as u8));
        slots
            .map(|(_, slot)| (slot.epoch, slot.core.stats().sealed_packets))
            .fold((0, 0), |sum, one| (sum.0 + one.0, sum.1 + one.1))
    };
    let before = [entry, exit].map(|place| of_agent(&mut bed, place));
    bed.talk(2 * SECOND);
    let after = [entry, exit].map(|place| of_agent(&mut bed, place));
    for (before, after) in before.into_iter().zip(after) {
        assert_eq!(before.0, after.0, "the same lanes");
        assert!(after.1 - before.1 < 50, "{before:?}, {after:?}");
    }
    let [_, gap] = bed.take_gap();
    assert!(gap <= Duration::from_millis(40), "{gap:?}");
    bed.pair.assert_balanced();
}

#[test]
fn the_path_of_a_backup_bounds_datagrams_only_while_it_carries() {
    let lines = [path(10, usize::MAX), path(10, 1_300)];
    let mut bed = Bed::with(9898, (1, 1), lines, 4, "backup = true");
    let entry = bed.pair.entry;
    let largest = |bed: &mut Bed| bed.pair.world.peer(entry).largest_datagram.unwrap();
    let wide = largest(&mut bed);
    assert!(wide > 1_400, "{wide}");
    bed.cut(ENTRY, Dead::Both);
    bed.talk(5 * SECOND);
    assert!((1_000..1_300).contains(&largest(&mut bed)), "{}", largest(&mut bed));
    bed.cut(ENTRY, Dead::Neither);
    bed.talk(15 * SECOND);
    assert_eq!(largest(&mut bed), wide, "the first line is well again");
    bed.pair.assert_balanced();
}

/// Both lines lose a fifth of their packets in each direction, for ever: whatever is suspected, traffic goes on.
#[test]
fn lines_of_much_loss_carry_a_flow_without_long_gaps() {
    for (seed, workers, slow) in [(9896, (1, 1), 0), (9897, (2, 2), 6)] {
        let lossy = NetworkPath { loss: 200, ..path(10, usize::MAX) };
        let mut bed = Bed::with(seed, workers, [lossy; 2], slow, "");
        bed.talk(60 * SECOND);
        let [_, gap] = bed.take_gap();
        println!("seed {seed}: {gap:?} in a minute");
        assert!(gap <= Duration::from_millis(100), "seed {seed}: {gap:?}");
        assert_eq!(bed.sessions(), 0, "seed {seed}");
        bed.pair.assert_balanced();
    }
}
