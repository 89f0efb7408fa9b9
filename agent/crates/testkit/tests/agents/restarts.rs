//! Either end goes away without a word and comes back: how soon traffic flows again, and whose replies reach whom.
//!
//! Times are the world's, so the figures are the same on every machine. The command that prints them:
//! `cargo test -p culvert-testkit --test agents restarts -- --nocapture`

use std::{collections::VecDeque, time::Duration};

use base::clock::Clock;
use gate::identity::Identity;
use rand::{RngExt, SeedableRng, rngs::StdRng, seq::SliceRandom};

use crate::{ENTRY, EXIT, INGRESS, Pair, harness::Udp};

/// Between two looks at the service and the clients.
const STEP: Duration = Duration::from_millis(5);

const ESTABLISHED: &str = "culvert_handshakes_total{outcome=\"established\"}";

/// Clients whose payloads name them, and a service that answers each payload twice: at once, and up to a second later.
pub(super) struct Crowd {
    clients: Vec<Udp>,
    late: VecDeque<(u64, std::net::SocketAddr, Vec<u8>)>,
    rng: StdRng,
    now: u64,
    pub(super) answers: Vec<u64>,
    /// Of those, to payloads sent since the last mark.
    pub(super) fresh: usize,
    mark: u32,
    number: u32,
}

impl Crowd {
    pub(super) fn new(pair: &mut Pair, clients: u16, seed: u64) -> Self {
        let clients: Vec<Udp> = (0..clients).map(|place| pair.client(2000 + place)).collect();
        Self {
            answers: vec![0; clients.len()],
            clients,
            late: VecDeque::new(),
            rng: StdRng::seed_from_u64(seed),
            now: 0,
            fresh: 0,
            mark: 0,
            number: 0,
        }
    }

    /// What is sent from now on is fresh.
    pub(super) fn mark(&mut self) {
        self.mark = self.number;
        self.fresh = 0;
    }

    /// One step of time; clients send in every fourth, each time in another order.
    pub(super) fn step(&mut self, pair: &mut Pair, sending: bool) {
        self.step_to(pair, INGRESS, sending);
    }

    pub(super) fn step_to(&mut self, pair: &mut Pair, ingress: std::net::SocketAddr, sending: bool) {
        self.now += 1;
        if sending && self.now.is_multiple_of(4) {
            let mut order: Vec<usize> = (0..self.clients.len()).collect();
            order.shuffle(&mut self.rng);
            for place in order {
                let mut payload = vec![0; 100];
                payload[..4].copy_from_slice(&(place as u32).to_be_bytes());
                payload[4..8].copy_from_slice(&self.number.to_be_bytes());
                self.clients[place].send(ingress, &payload);
            }
            self.number += 1;
        }
        pair.world.run(STEP);
        for (from, payload) in pair.echo.receive() {
            pair.echo.send(from, &payload);
            let later = self.now + self.rng.random_range(0..200);
            self.late.push_back((later, from, payload));
        }
        let now = self.now;
        self.late.retain(|(at, to, payload)| {
            if *at <= now {
                pair.echo.send(*to, payload);
            }
            *at > now
        });
        for (place, client) in self.clients.iter_mut().enumerate() {
            for (_, payload) in client.receive() {
                let number = |at: usize| u32::from_be_bytes(payload[at..at + 4].try_into().unwrap());
                assert_eq!(number(0) as usize, place, "a reply reached another client's flow");
                self.answers[place] += 1;
                self.fresh += usize::from(number(4) >= self.mark);
            }
        }
    }

    pub(super) fn run(&mut self, pair: &mut Pair, time: Duration) {
        for _ in 0..time.as_millis() / STEP.as_millis() {
            self.step(pair, true);
        }
    }

    /// How long it takes until a payload that is sent from now on is answered.
    pub(super) fn recovery(&mut self, pair: &mut Pair, most: Duration) -> Duration {
        let begin = pair.world.clock.now();
        self.mark();
        while self.fresh == 0 {
            let so_far = pair.world.clock.now() - begin;
            assert!(so_far <= most, "no answer within {most:?}");
            self.step(pair, true);
        }
        pair.world.clock.now() - begin
    }
}

/// Who goes away, and how they come back.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Outage {
    Exit,
    Entry,
    ExitThenEntry,
    EntryThenExit,
    ExitTwice,
    /// The exit, and the entry at the same moment; the exit comes back in the midst of the entry's handshakes.
    ExitDuringHandshake,
    /// The entry again before its first handshake is complete.
    EntryDuringHandshake,
}

/// A pair whose ends can be restarted, and the instances that they have had.
struct Restarts {
    pair: Pair,
    rng: StdRng,
    instance: u8,
}

impl Restarts {
    fn new(seed: u64, extra: &str) -> Self {
        let mut rng = StdRng::seed_from_u64(seed);
        let workers = (rng.random_range(1..=3), rng.random_range(1..=3));
        let mut pair = Pair::with_workers(seed, workers, extra, "");
        pair.world.weather.borrow_mut().delay = Duration::from_millis(rng.random_range(1..50));
        pair.wait_for_lanes(1);
        Self { pair, rng, instance: 10 }
    }

    fn lose_state_perhaps(&mut self, place: usize) {
        if self.rng.random_bool(0.5) {
            self.pair.world.lose_state(place);
        }
    }

    fn start_exit(&mut self) {
        self.instance += 1;
        let (exit, toml) = (self.pair.exit, self.pair.exit_toml.clone());
        self.lose_state_perhaps(exit);
        self.pair.world.workers = self.rng.random_range(1..=3);
        let key = Identity::from_pem(self.pair.exit_key.to_pem().as_bytes()).unwrap();
        self.pair.world.restart(exit, &toml, &key, &[EXIT], self.instance);
    }

    fn start_entry(&mut self) {
        self.instance += 1;
        let (entry, toml) = (self.pair.entry, self.pair.entry_toml.clone());
        self.lose_state_perhaps(entry);
        self.pair.world.workers = self.rng.random_range(1..=3);
        let key = Identity::from_pem(self.pair.entry_key.to_pem().as_bytes()).unwrap();
        self.pair.world.restart(entry, &toml, &key, &[ENTRY], self.instance);
    }

    fn kill(&mut self, place: usize) {
        self.pair.world.kill(place);
    }

    /// Plays `outage` while the crowd sends; ends with the return of the last that was away.
    fn play(&mut self, outage: Outage, crowd: &mut Crowd) {
        let (entry, exit) = (self.pair.entry, self.pair.exit);
        let away = Duration::from_millis(self.rng.random_range(0..4000));
        let moment = Duration::from_millis(self.rng.random_range(1..120));
        match outage {
            Outage::Exit => {
                self.kill(exit);
                crowd.run(&mut self.pair, away);
                self.start_exit();
            }
            Outage::Entry => {
                self.kill(entry);
                crowd.run(&mut self.pair, away);
                self.start_entry();
            }
            Outage::ExitThenEntry => {
                self.kill(exit);
                crowd.run(&mut self.pair, moment);
                self.kill(entry);
                crowd.run(&mut self.pair, away);
                self.start_exit();
                crowd.run(&mut self.pair, moment);
                self.start_entry();
            }
            Outage::EntryThenExit => {
                self.kill(entry);
                crowd.run(&mut self.pair, moment);
                self.kill(exit);
                crowd.run(&mut self.pair, away);
                self.start_entry();
                crowd.run(&mut self.pair, moment);
                self.start_exit();
            }
            Outage::ExitTwice => {
                self.kill(exit);
                crowd.run(&mut self.pair, away);
                self.start_exit();
                crowd.run(&mut self.pair, moment);
                self.kill(exit);
                crowd.run(&mut self.pair, moment);
                self.start_exit();
            }
            Outage::ExitDuringHandshake => {
                self.kill(entry);
                crowd.run(&mut self.pair, away);
                self.start_entry();
                crowd.run(&mut self.pair, moment);
                self.kill(exit);
                crowd.run(&mut self.pair, moment);
                self.start_exit();
            }
            Outage::EntryDuringHandshake => {
                self.kill(entry);
                crowd.run(&mut self.pair, away);
                self.start_entry();
                crowd.run(&mut self.pair, moment);
                self.kill(entry);
                self.start_entry();
            }
        }
    }

    fn assert_balanced(&mut self) {
        self.pair.assert_balanced();
    }
}

/// Prints the median and the worst of `times`; the worst.
pub(super) fn report(what: &str, mut times: Vec<Duration>) -> Duration {
    times.sort_unstable();
    let worst = times.last().copied().unwrap_or_default();
    println!("{what}: median {:?}, worst {worst:?} of {}", times[times.len() / 2], times.len());
    worst
}

const SEEDS: u64 = 20;

fn with_traffic(outage: Outage) {
    let mut times = Vec::new();
    for seed in 0..SEEDS {
        let extra = if seed % 2 == 0 { "keepalive = \"0s\"" } else { "" };
        let mut restarts = Restarts::new(8000 + seed, extra);
        let mut crowd = Crowd::new(&mut restarts.pair, 5, seed);
        crowd.run(&mut restarts.pair, Duration::from_millis(400));
        assert!(crowd.answers.iter().all(|answers| *answers > 0));
        restarts.play(outage, &mut crowd);
        times.push(crowd.recovery(&mut restarts.pair, Duration::from_secs(2)));
        // All of them, on the sockets that they had.
        crowd.answers.fill(0);
        crowd.run(&mut restarts.pair, Duration::from_millis(1500));
        assert!(crowd.answers.iter().all(|answers| *answers > 50), "seed {seed}: {:?}", crowd.answers);
        restarts.assert_balanced();
    }
    let worst = report(&format!("recovery, {outage:?}, with traffic"), times);
    assert!(worst <= Duration::from_secs(2));
}

#[test]
fn traffic_flows_again_within_two_seconds_of_the_exits_return() {
    with_traffic(Outage::Exit);
}

#[test]
fn traffic_flows_again_within_two_seconds_of_the_entrys_return() {
    with_traffic(Outage::Entry);
}

#[test]
fn traffic_flows_again_when_both_return_in_either_order() {
    with_traffic(Outage::ExitThenEntry);
    with_traffic(Outage::EntryThenExit);
}

#[test]
fn traffic_flows_again_after_an_exit_that_died_twice() {
    with_traffic(Outage::ExitTwice);
}

#[test]
fn traffic_flows_again_after_a_death_in_the_midst_of_a_handshake() {
    with_traffic(Outage::ExitDuringHandshake);
    with_traffic(Outage::EntryDuringHandshake);
}

#[test]
fn without_traffic_the_peer_is_found_again_within_one_keepalive() {
    const KEEPALIVE: Duration = Duration::from_secs(5);
    let mut times = Vec::new();
    for seed in 0..SEEDS {
        let mut restarts = Restarts::new(8100 + seed, "keepalive = \"5s\"");
        let away = Duration::from_millis(restarts.rng.random_range(3000..40_000));
        let idle = Duration::from_millis(restarts.rng.random_range(0..6000));
        restarts.pair.world.run(idle);
        let exit = restarts.pair.exit;
        restarts.kill(exit);
        restarts.pair.world.run(away);
        restarts.start_exit();
        let begin = restarts.pair.world.clock.now();
        let entry = restarts.pair.entry;
        restarts.pair.world.run_till(KEEPALIVE + Duration::from_secs(1), |world| {
            world.peer(entry).lanes_up > 0 && world.peer(exit).lanes_up > 0
        });
        times.push(restarts.pair.world.clock.now() - begin);
    }
    let worst = report("recovery without traffic, keepalive 5 s", times);
    // Beside the keepalive: a handshake and the opening of a lane, over a path of at most 100 ms.
    assert!(worst <= KEEPALIVE + Duration::from_millis(500), "{worst:?}");
}

#[test]
fn traffic_that_comes_after_a_long_silence_finds_the_peer_within_a_second() {
    let mut times = Vec::new();
    for seed in 0..SEEDS {
        let mut restarts = Restarts::new(8200 + seed, "keepalive = \"20s\"");
        let exit = restarts.pair.exit;
        restarts.kill(exit);
        // Attempts have become rare; the exit is back, and nobody knows.
        let away = Duration::from_millis(restarts.rng.random_range(60_000..100_000));
        restarts.pair.world.run(away);
        restarts.start_exit();
        let mut crowd = Crowd::new(&mut restarts.pair, 3, seed);
        times.push(crowd.recovery(&mut restarts.pair, Duration::from_secs(2)));
    }
    let worst = report("recovery, traffic after a long silence", times);
    assert!(worst <= Duration::from_millis(1500), "{worst:?}");
}

#[test]
fn where_the_state_was_lost_a_clock_that_is_behind_costs_as_much_time_and_no_more() {
    for (seed, skew) in (8300..).zip([-80, -30, 30, 80]) {
        let mut pair = Pair::with_skew(seed, skew);
        pair.wait_for_lanes(1);
        let mut crowd = Crowd::new(&mut pair, 3, seed);
        crowd.run(&mut pair, Duration::from_millis(400));
        let (exit, toml) = (pair.exit, pair.exit_toml.clone());
        let key = Identity::from_pem(pair.exit_key.to_pem().as_bytes()).unwrap();
        pair.world.kill(exit);
        crowd.run(&mut pair, Duration::from_millis(700));
        pair.world.lose_state(exit);
        pair.world.restart(exit, &toml, &key, &[EXIT], 77);
        // Knocks from before the start are refused, for they may have been used: so is one whose clock says so.
        let behind = Duration::from_secs(u64::try_from(-skew).unwrap_or(0));
        let time = crowd.recovery(&mut pair, behind + Duration::from_secs(2));
        println!("recovery, state lost, clock {skew} s off: {time:?}");
    }
}

#[test]
fn replies_reach_nobody_else_however_often_either_end_is_restarted() {
    for seed in 8400..8412 {
        // One lane: whatever the other workers have for it is handed over.
        let mut restarts = Restarts::new(seed, "lanes = 1");
        restarts.pair.world.weather.borrow_mut().delay = Duration::from_millis(1);
        let mut crowd = Crowd::new(&mut restarts.pair, 12, seed);
        for _ in 0..8 {
            let moment = Duration::from_millis(restarts.rng.random_range(100..900));
            crowd.run(&mut restarts.pair, moment);
            if restarts.rng.random_bool(0.7) {
                restarts.start_entry();
            } else {
                restarts.start_exit();
            }
        }
        crowd.recovery(&mut restarts.pair, Duration::from_secs(2));
        restarts.assert_balanced();
    }
}

#[test]
fn sessions_are_counted_and_do_not_flap_after_a_restart() {
    for seed in 8500..8510 {
        let mut restarts = Restarts::new(seed, "");
        let mut crowd = Crowd::new(&mut restarts.pair, 3, seed);
        restarts.play(Outage::Exit, &mut crowd);
        crowd.run(&mut restarts.pair, Duration::from_secs(8));
        let exit = restarts.pair.exit;
        let sessions = restarts.pair.world.metric(exit, ESTABLISHED);
        assert!(sessions <= 2, "seed {seed}: {sessions}");
        let before = restarts.pair.world.metric(restarts.pair.entry, ESTABLISHED);
        crowd.run(&mut restarts.pair, Duration::from_secs(4));
        assert_eq!(restarts.pair.world.metric(restarts.pair.entry, ESTABLISHED), before, "seed {seed}");
    }
}
