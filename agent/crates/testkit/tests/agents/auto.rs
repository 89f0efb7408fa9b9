//! `peer.rate = "auto"`: whole agents over a bottleneck with a long queue find its rate, keep its queue short and follow it.

use std::{
    net::SocketAddr,
    time::{Duration, Instant},
};

use engine::status::RateStatus;
use testkit::simulation::{
    BottleneckId, NetworkPath,
    bottleneck::{Parameters, bytes_at},
};

use crate::{ENTRY, EXIT, INGRESS, Pair, Udp, number_of, paths::Foreign};

const MS: Duration = Duration::from_millis(1);

/// Payload of a greedy sender's datagram, and of a sparse one's.
const GREEDY_BYTES: usize = 1_200;
const SPARSE_BYTES: usize = 200;

/// Milliseconds between two datagrams of the sparse flow.
const SPARSE_EVERY: u32 = 20;

/// Greedy flows in each direction that has a load.
const GREEDY: u16 = 4;

/// A path of an access link, the same in both directions: 20 ms there and back, half a second of queue.
fn link(mbit: u64) -> Parameters {
    let rate_bits = mbit * 1_000_000;
    Parameters {
        rate_bits: Some(rate_bits),
        queue_bytes: bytes_at(rate_bits, 500 * MS),
        delay: 10 * MS,
        ..Parameters::OPEN
    }
}

/// One direction of the bed: what is offered to it, and what came.
#[derive(Debug, Default)]
struct Way {
    /// Datagrams that greedy flows send in a millisecond, in thousandths.
    offered: u64,
    credit: u64,
    /// How long each datagram of the sparse flow took, in milliseconds, and when it came.
    delays: Vec<(u32, u32)>,
}

impl Way {
    fn offer(&mut self, mbit: u64) {
        self.offered = mbit * 1_000_000 / 8 / GREEDY_BYTES as u64;
    }

    fn due(&mut self) -> u64 {
        self.credit += self.offered;
        let due = self.credit / 1_000;
        self.credit %= 1_000;
        due
    }

    /// The quantile of the delays of what came from `from` on, in milliseconds.
    fn delay(&self, from: u32, quantile: f64) -> u32 {
        let mut delays: Vec<u32> =
            self.delays.iter().filter(|(came, _)| *came >= from).map(|(_, delay)| *delay).collect();
        delays.sort_unstable();
        let place = (delays.len() as f64 * quantile) as usize;
        delays.get(place.min(delays.len().saturating_sub(1))).copied().unwrap_or(u32::MAX)
    }
}

/// The rate of one end at one time, and what the bottleneck had passed until then.
#[derive(Clone, Debug)]
struct Sample {
    ms: u32,
    rate: Option<RateStatus>,
    passed: u64,
}

/// Two agents, greedy flows and a sparse one between them, and a bottleneck in each direction.
struct Bed {
    pair: Pair,
    paths: [BottleneckId; 2],
    /// Up: from the entry to the exit; down.
    ways: [Way; 2],
    clients: Vec<Udp>,
    sparse: Udp,
    /// The addresses of the greedy flows at the service, and of the sparse one.
    flows: Vec<SocketAddr>,
    sparse_flow: Option<SocketAddr>,
    foreign: Option<Foreign>,
    foreign_bytes: u64,
    begin: Instant,
    ms: u32,
    /// Of each end, ten a second.
    samples: [Vec<Sample>; 2],
}

impl Bed {
    fn new(seed: u64, workers: (u8, u8), link: Parameters, entry: &str, exit: &str) -> Self {
        let pair = Pair::with_workers(seed, workers, entry, exit);
        Self::over(pair, seed, link)
    }

    fn over(mut pair: Pair, seed: u64, link: Parameters) -> Self {
        let paths = [0, 1].map(|way| pair.world.add_bottleneck(link, seed + way));
        for (from, to, bottleneck) in [(ENTRY, EXIT, paths[0]), (EXIT, ENTRY, paths[1])] {
            let path = NetworkPath { delay: Duration::ZERO, bottleneck: Some(bottleneck), ..NetworkPath::default() };
            pair.world.set_path(from, to, path);
        }
        pair.wait_for_lanes(1);
        let clients = (0..GREEDY).map(|number| pair.client(8_000 + number)).collect();
        let sparse = pair.client(7_000);
        let begin = pair.world.now();
        let mut bed = Self {
            pair,
            paths,
            ways: Default::default(),
            clients,
            sparse,
            flows: Vec::new(),
            sparse_flow: None,
            foreign: None,
            foreign_bytes: 0,
            begin,
            ms: 0,
            samples: Default::default(),
        };
        bed.open();
        bed
    }

    /// Opens the flows, so that the service knows where to send.
    fn open(&mut self) {
        for client in self.clients.iter_mut() {
            client.send(INGRESS, &payload(0, 0, GREEDY_BYTES));
            self.pair.world.run(30 * MS);
            self.flows.extend(self.pair.echo.receive().first().map(|(from, _)| *from));
        }
        self.sparse.send(INGRESS, &payload(1, 0, SPARSE_BYTES));
        self.pair.world.run(30 * MS);
        self.sparse_flow = self.pair.echo.receive().first().map(|(from, _)| *from);
        self.begin = self.pair.world.now();
    }

    fn run(&mut self, seconds: u32) {
        for _ in 0..seconds * 1_000 {
            self.millisecond();
        }
    }

    fn millisecond(&mut self) {
        let ms = self.ms;
        for place in 0..self.ways[0].due() {
            let client = &mut self.clients[(place + u64::from(ms)) as usize % usize::from(GREEDY)];
            client.send(INGRESS, &payload(0, ms, GREEDY_BYTES));
        }
        for place in 0..self.ways[1].due() {
            if let Some(flow) = self.flows.get((place + u64::from(ms)) as usize % usize::from(GREEDY)) {
                self.pair.echo.send(*flow, &payload(0, ms, GREEDY_BYTES));
            }
        }
        if ms % SPARSE_EVERY == 0 {
            self.sparse.send(INGRESS, &payload(1, ms, SPARSE_BYTES));
            if let Some(flow) = self.sparse_flow {
                self.pair.echo.send(flow, &payload(1, ms, SPARSE_BYTES));
            }
        }
        self.run_until(self.begin + (ms + 1) * MS);
        self.ms = ms + 1;
        for (_, payload) in self.pair.echo.receive() {
            self.ways[0].came(&payload, self.ms);
        }
        for (_, payload) in self.sparse.receive() {
            self.ways[1].came(&payload, self.ms);
        }
        for client in &mut self.clients {
            client.receive();
        }
        if self.ms % 100 == 0 {
            for (end, path) in self.paths.iter().enumerate() {
                let agent = [self.pair.entry, self.pair.exit][end];
                let rate = self.pair.world.peer(agent).rate;
                let passed = self.pair.world.bottleneck(*path).0.passed_bytes;
                self.samples[end].push(Sample { ms: self.ms, rate, passed });
            }
        }
    }

    fn run_until(&mut self, until: Instant) {
        let Some(foreign) = &mut self.foreign else {
            self.pair.world.run(until.saturating_duration_since(self.pair.world.now()));
            return;
        };
        loop {
            self.pair.world.settle();
            self.foreign_bytes += foreign.hub(self.pair.world.now());
            let next = foreign.timeout().map_or(until, |timeout| timeout.min(until));
            if !self.pair.world.step(next) && next == until {
                return;
            }
        }
    }

    /// What the bottleneck of a direction passed within these seconds, in Mbit/s.
    fn mbit(&self, way: usize, from: u32, to: u32) -> f64 {
        let at = |second: u32| match second {
            0 => 0,
            second => self.samples[way][second as usize * 10 - 1].passed,
        };
        (at(to) - at(from)) as f64 * 8e-6 / f64::from(to - from)
    }

    /// The lowest and the highest rate in force within these seconds, in Mbit/s.
    fn rates(&self, end: usize, from: u32, to: u32) -> (f64, f64) {
        let within = &self.samples[end][from as usize * 10..to as usize * 10];
        let rates = within.iter().map(|sample| {
            sample.rate.as_ref().map_or(0.0, |rate| rate.bits_per_second as f64 * 1e-6)
        });
        rates.fold((f64::MAX, 0.0), |(least, most), rate| (rate.min(least), rate.max(most)))
    }

    fn show(&self, end: usize) {
        if std::env::var_os("CULVERT_TEST_SERIES").is_none() {
            return;
        }
        let mut before = 0;
        for sample in &self.samples[end] {
            let rate = sample.rate.as_ref();
            let auto = rate.and_then(|rate| rate.auto.as_ref());
            println!(
                "{:>6} ms: {:>6.2} Mbit/s {:<10} {:<10} capacity {:>6.2}, passed {:>6.2}, queue {:>5.1} ms, loss {:.3}, {} reports",
                sample.ms,
                rate.map_or(0.0, |rate| rate.bits_per_second as f64 * 1e-6),
                rate.map_or("-", |rate| &*rate.from),
                auto.map_or("-", |auto| &*auto.phase),
                auto.map_or(0.0, |auto| auto.capacity_bits_per_second as f64 * 1e-6),
                (sample.passed - before) as f64 * 8e-5,
                auto.map_or(0.0, |auto| auto.queue_delay_seconds * 1e3),
                auto.map_or(0.0, |auto| auto.path_loss_share),
                auto.map_or(0, |auto| auto.reports),
            );
            before = sample.passed;
        }
    }
}

impl Way {
    fn came(&mut self, payload: &[u8], ms: u32) {
        if payload[4] == 1 {
            self.delays.push((ms, ms - number_of(payload)));
        }
    }
}

/// A datagram that says when it left; `kind` is 1 of the sparse flow.
fn payload(kind: u8, ms: u32, bytes: usize) -> Vec<u8> {
    let mut payload = vec![kind; bytes];
    payload[..4].copy_from_slice(&ms.to_be_bytes());
    payload
}

#[test]
fn a_link_with_a_long_queue_is_nearly_full_and_its_queue_nearly_empty() {
    for workers in [(1, 1), (3, 2)] {
        let mut bed = Bed::new(950, workers, link(50), "rate = \"auto\"", "");
        bed.ways[0].offer(70);
        bed.run(20);
        bed.show(0);
        let (mbit, delay) = (bed.mbit(0, 5, 20), bed.ways[0].delay(5_000, 0.99));
        let (least, most) = bed.rates(0, 5, 20);
        println!("{workers:?}: {mbit:.1} Mbit/s, {delay} ms at p99, rate {least:.1} to {most:.1}");
        assert!(mbit > 0.85 * 50.0, "{workers:?}: {mbit} Mbit/s");
        // 10 ms on the link, 5 ms to the entry and from the exit each.
        assert!(delay <= 20 + 30, "{workers:?}: {delay} ms");
        bed.pair.assert_balanced();
    }
}
