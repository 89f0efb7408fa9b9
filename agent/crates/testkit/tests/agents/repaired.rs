//! Payloads that a path loses and agents repair: what stays lost, what it costs, and what is never delivered twice, late or otherwise.
//!
//! `cargo test -p culvert-testkit --test agents repaired -- --nocapture` prints the figures.

use std::{collections::BTreeMap, time::Duration};

use engine::status::RepairStatus;
use testkit::simulation::{
    BottleneckId, NetworkPath,
    bottleneck::{Loss, Parameters},
};

use crate::{ENTRY, EXIT, INGRESS, Pair, harness::Udp};

const MILLISECOND: Duration = Duration::from_millis(1);

/// A flow of datagrams to a service over a path that loses some.
#[derive(Clone, Copy)]
struct Trial {
    /// `service.repair`.
    repair: &'static str,
    loss: Loss,
    rtt: Duration,
    /// Datagrams each millisecond, or one in this number of milliseconds.
    rate: Rate,
    bytes: usize,
    /// The agents learn the path in this time, which counts for nothing.
    warm_up: u64,
    seconds: u64,
    workers: (u8, u8),
    flows: u16,
    /// What either end says of the other, in its `[[peer]]`.
    peer: &'static str,
    seed: u64,
}

#[derive(Clone, Copy)]
enum Rate {
    EachMillisecond(u64),
    EveryMilliseconds(u64),
}

const fn random(ppm: u32) -> Loss {
    Loss { random_ppm: ppm, bursts: None }
}

impl Trial {
    /// 2,000 datagrams of 1,000 bytes a second over 80 ms.
    const LONG: Self = Self {
        repair: "\"auto\"",
        loss: random(0),
        rtt: Duration::from_millis(80),
        rate: Rate::EachMillisecond(2),
        bytes: 1_000,
        warm_up: 10,
        seconds: 10,
        workers: (1, 1),
        flows: 1,
        peer: "",
        seed: 1,
    };

    fn start(&self) -> (Pair, [BottleneckId; 2]) {
        let mut pair = Pair::with_workers(self.seed, self.workers, self.peer, self.peer);
        let paths = pair.over(self.loss, self.rtt, self.seed);
        pair.wait_for_lanes(1);
        pair.repair(self.repair);
        (pair, paths)
    }

    fn run(self) -> Outcome {
        let (mut pair, paths) = self.start();
        let mut clients: Vec<Udp> = (0..self.flows).map(|flow| pair.client(3000 + flow)).collect();
        let mut traffic = Traffic::default();
        traffic.run(&mut pair, &mut clients, &self, self.warm_up);
        traffic.settle(&mut pair);
        let (before, wire) = (pair.repaired(), pair.world.bottleneck(paths[0]).0.came_bytes);
        traffic.begin();
        traffic.run(&mut pair, &mut clients, &self, self.seconds);
        let wire = pair.world.bottleneck(paths[0]).0.came_bytes - wire;
        traffic.settle(&mut pair);
        let outcome = traffic.outcome(&pair.repaired(), &before, wire);
        pair.assert_balanced();
        println!(
            "{} over {:?}, {:?}: lost by the path {:.3} %, residual {:.4} %, extra {:.2} %, added p99 {:?}, {}; {:?}",
            self.repair,
            self.rtt,
            self.loss,
            100.0 * outcome.missing,
            100.0 * outcome.residual,
            100.0 * outcome.extra,
            outcome.added_p99,
            outcome.state,
            outcome.status,
        );
        outcome
    }
}

struct Outcome {
    missing: f64,
    residual: f64,
    /// Bytes of repair in proportion to those of payloads.
    extra: f64,
    added_p99: Duration,
    state: String,
    in_order: bool,
    status: [RepairStatus; 2],
    /// Bytes of IP packets on the way to the exit.
    wire: u64,
}

/// Datagrams with numbers and times, and those that came.
#[derive(Default)]
struct Traffic {
    next: u32,
    first_counted: u32,
    /// When each was sent, in milliseconds.
    sent: Vec<u64>,
    came: BTreeMap<u32, u64>,
    now: u64,
    highest: BTreeMap<std::net::SocketAddr, u32>,
    out_of_order: u64,
}

impl Traffic {
    fn begin(&mut self) {
        self.first_counted = self.next;
        self.out_of_order = 0;
    }

    fn run(&mut self, pair: &mut Pair, clients: &mut [Udp], trial: &Trial, seconds: u64) {
        for _ in 0..seconds * 1_000 {
            let due = match trial.rate {
                Rate::EachMillisecond(count) => count,
                Rate::EveryMilliseconds(every) => u64::from(self.now.is_multiple_of(every)),
            };
            for _ in 0..due {
                let client = &mut clients[self.next as usize % clients.len()];
                client.send(INGRESS, &payload(self.next, trial.bytes));
                self.sent.push(self.now);
                self.next += 1;
            }
            self.pass(pair);
        }
    }

    fn pass(&mut self, pair: &mut Pair) {
        pair.world.run(MILLISECOND);
        self.now += 1;
        for (from, bytes) in pair.echo.receive() {
            let number = u32::from_be_bytes(bytes[..4].try_into().unwrap());
            assert_eq!(bytes, payload(number, bytes.len()), "{number}, byte for byte");
            assert_eq!(self.came.insert(number, self.now), None, "{number} came twice");
            let highest = self.highest.entry(from).or_insert(number);
            self.out_of_order += u64::from(number < *highest);
            *highest = number.max(*highest);
        }
    }

    fn settle(&mut self, pair: &mut Pair) {
        (0..1_000).for_each(|_| self.pass(pair));
    }

    fn outcome(&self, after: &[RepairStatus; 2], before: &[RepairStatus; 2], wire: u64) -> Outcome {
        let counted = self.first_counted..self.next;
        let lost = counted.clone().filter(|number| !self.came.contains_key(number)).count();
        let least =
            counted.clone().filter_map(|number| Some(self.came.get(&number)? - self.sent[number as usize]));
        let least = least.min().unwrap_or(0);
        let added = counted.clone().filter_map(|number| {
            let came = self.came.get(&number)?;
            Some(came - self.sent[number as usize] - least)
        });
        let mut added: Vec<u64> = added.collect();
        added.sort_unstable();
        let p99 = added.get(added.len() * 99 / 100).copied().unwrap_or(0);
        let [(entry, exit), (entry_before, exit_before)] = [after, before].map(|ends| (&ends[0], &ends[1]));
        let bytes = |status: &RepairStatus| status.overhead.unwrap_or(0.0);
        let _ = (bytes, entry_before);
        let numbered = exit.received + exit.given_up - exit_before.received - exit_before.given_up;
        Outcome {
            missing: (exit.missing - exit_before.missing) as f64 / numbered.max(1) as f64,
            residual: lost as f64 / f64::from(self.next - self.first_counted),
            extra: entry.overhead.unwrap_or(0.0),
            added_p99: Duration::from_millis(p99),
            state: entry.state.to_string(),
            in_order: self.out_of_order == 0,
            status: [entry.clone(), exit.clone()],
            wire,
        }
    }
}

/// The bytes of a datagram follow from its number.
fn payload(number: u32, len: usize) -> Vec<u8> {
    let mut bytes: Vec<u8> = (0..len).map(|at| (at as u32 * 31 + number * 7) as u8).collect();
    bytes[..4].copy_from_slice(&number.to_be_bytes());
    bytes
}

impl Pair {
    /// Puts a path with this loss and round trip between the agents, without a limit on its rate.
    fn over(&mut self, loss: Loss, rtt: Duration, seed: u64) -> [BottleneckId; 2] {
        let parameters = Parameters { delay: rtt / 2, before: loss, ..Parameters::OPEN };
        let paths = [seed, seed + 1].map(|seed| self.world.add_bottleneck(parameters, seed));
        for (from, to, bottleneck) in [(ENTRY, EXIT, paths[0]), (EXIT, ENTRY, paths[1])] {
            let path =
                NetworkPath { delay: Duration::ZERO, bottleneck: Some(bottleneck), ..NetworkPath::default() };
            self.world.set_path(from, to, path);
        }
        paths
    }

    /// Has the exit's service repaired like this from now on.
    fn repair(&mut self, repair: &str) {
        let toml = self.exit_toml.replace("idle = \"5s\"", &format!("idle = \"5s\"\nrepair = {repair}"));
        let changes = self.world.reload(self.exit, &toml).unwrap();
        assert_eq!(changes.len(), 1, "{changes:?}");
        self.world.run(200 * MILLISECOND);
    }

    /// What the entry and the exit say of repair.
    fn repaired(&mut self) -> [RepairStatus; 2] {
        [self.entry, self.exit].map(|place| self.world.peer(place).repair.unwrap_or_default())
    }
}

#[test]
fn random_losses_are_sent_again_in_time() {
    for ppm in [10_000, 50_000, 100_000] {
        let outcome = Trial { loss: random(ppm), repair: "\"retransmit\"", ..Trial::LONG }.run();
        assert!(outcome.residual <= 0.000_5);
    }
}
