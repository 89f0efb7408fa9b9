//! `peer.rate = "auto"`: whole agents over a bottleneck with a long queue find its rate, keep its queue short and follow it.

use std::{
    net::SocketAddr,
    time::{Duration, Instant},
};

use dataplane::relay::DropReason;
use engine::status::RateStatus;
use ip::model::Recipe;
use rand::{RngExt, SeedableRng, rngs::StdRng};
use testkit::simulation::{
    BottleneckId, NetworkPath,
    bottleneck::{Loss, Parameters, bytes_at},
};
use wire::{context, messages::Features, report::Report};

use crate::{
    ENTRY, EXIT, INGRESS, Pair, Udp,
    cubic::Cubic,
    flood::{GateFlood, Log},
    number_of,
    paths::{FOREIGN, Foreign, PathTrial},
    roaming::{ENTRY_2, LANES_MOVED},
    tunnel::{ENTRY_TUN, EXIT_TUN, Given, How, Tunnel},
};

const MS: Duration = Duration::from_millis(1);

/// Payload of a greedy sender's datagram, and of a sparse one's.
const GREEDY_BYTES: usize = 1_200;
const SPARSE_BYTES: usize = 200;

/// Milliseconds between two datagrams of the sparse flow.
const SPARSE_EVERY: u32 = 20;

/// The kind of a CUBIC flow's datagrams.
const INNER: u8 = 2;

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
        let [up, down] = paths;
        for (from, to, bottleneck) in [
            (ENTRY, EXIT, up),
            (EXIT, ENTRY, down),
            (FOREIGN[0], FOREIGN[1], up),
            (FOREIGN[1], FOREIGN[0], down),
        ] {
            let path =
                NetworkPath { delay: Duration::ZERO, bottleneck: Some(bottleneck), ..NetworkPath::default() };
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
        if ms.is_multiple_of(SPARSE_EVERY) {
            self.sparse.send(INGRESS, &payload(1, ms, SPARSE_BYTES));
            if let Some(flow) = self.sparse_flow {
                self.pair.echo.send(flow, &payload(1, ms, SPARSE_BYTES));
            }
        }
        self.run_until(self.begin + (ms + 1) * MS);
        self.ms = ms + 1;
        for (from, payload) in self.pair.echo.receive() {
            self.ways[0].came(&payload, self.ms);
            if payload[4] == INNER {
                self.pair.echo.send(from, &payload[..24]);
            }
        }
        for (_, payload) in self.sparse.receive() {
            self.ways[1].came(&payload, self.ms);
        }
        for client in &mut self.clients {
            client.receive();
        }
        if self.ms.is_multiple_of(100) {
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
        let rates = within
            .iter()
            .map(|sample| sample.rate.as_ref().map_or(0.0, |rate| rate.bits_per_second as f64 * 1e-6));
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

const AUTO: &str = "rate = \"auto\"";

/// The time that a datagram of the sparse flow takes over an empty link: 10 ms on it, and 5 ms before and behind it.
const EMPTY: u32 = 20;

#[test]
fn a_link_with_a_long_queue_is_nearly_full_and_its_queue_nearly_empty() {
    for workers in [(1, 1), (3, 2)] {
        let mut bed = Bed::new(950, workers, link(50), AUTO, "");
        bed.ways[0].offer(70);
        bed.run(15);
        bed.show(0);
        let (mbit, delay) = (bed.mbit(0, 5, 15), bed.ways[0].delay(5_000, 0.99));
        let (least, most) = bed.rates(0, 5, 15);
        println!("{workers:?}: {mbit:.1} Mbit/s, {delay} ms at p99, rate {least:.1} to {most:.1}");
        assert!(mbit > 0.92 * 50.0, "{workers:?}: {mbit} Mbit/s");
        assert!(delay <= EMPTY + 20, "{workers:?}: {delay} ms");
        assert!(most - least < 0.2 * 50.0, "{workers:?}: {least} to {most} Mbit/s");
        let [entry, exit] = bed.pair.assert_balanced();
        let rate = entry.rate.expect("it is automatic");
        let auto = rate.auto.expect("it is measured");
        assert!((45e6..53e6).contains(&(auto.delivered_bits_per_second as f64)), "{auto:?}");
        assert!((45e6..53e6).contains(&(auto.capacity_bits_per_second as f64)), "{auto:?}");
        assert!(exit.rate.is_none(), "the exit limits nothing");
    }
}

#[test]
fn a_link_that_changes_is_followed_within_three_seconds() {
    let mut bed = Bed::new(952, (2, 2), link(50), AUTO, "");
    bed.ways[0].offer(70);
    for (place, mbit) in [50, 10, 30].into_iter().enumerate() {
        let queue_bytes = link(50).queue_bytes;
        bed.pair.world.set_bottleneck(bed.paths[0], Parameters { queue_bytes, ..link(mbit) });
        bed.run(8);
        let from = place as u32 * 8 + 3;
        let (passed, delay) = (bed.mbit(0, from, from + 5), bed.ways[0].delay(from * 1_000, 0.95));
        println!("{mbit} Mbit/s: {passed:.1} Mbit/s from 3 s on, {delay} ms at p95");
        bed.show(0);
        assert!(passed > 0.85 * mbit as f64, "{mbit} Mbit/s: {passed}");
        assert!(delay <= EMPTY + 30, "{mbit} Mbit/s: {delay} ms");
    }
    bed.pair.assert_balanced();
}

/// CUBIC flows inside the tunnel: they follow the link, and not the rate.
struct Inner {
    flows: Vec<(Udp, Cubic)>,
}

impl Inner {
    fn new(bed: &mut Bed, flows: u16) -> Self {
        let now = bed.pair.world.now();
        Self { flows: (0..flows).map(|flow| (bed.pair.client(9_000 + flow), Cubic::new(now))).collect() }
    }

    /// Lets the bed run; the service answers each datagram with a short one.
    fn run(&mut self, bed: &mut Bed, seconds: u32) {
        for _ in 0..seconds * 1_000 {
            let now = bed.pair.world.now();
            for (socket, cubic) in &mut self.flows {
                for (_, answer) in socket.receive() {
                    cubic.acknowledged(u64::from(number_of(&answer)), now);
                }
                if cubic.timeout().is_some_and(|timeout| timeout <= now) {
                    cubic.on_timeout(now);
                }
                while let Some(number) = cubic.send(now) {
                    socket.send(INGRESS, &payload(INNER, number as u32, GREEDY_BYTES));
                }
            }
            bed.millisecond();
        }
    }
}

#[test]
fn cubic_flows_inside_the_tunnel_leave_the_queue_of_a_link_empty_that_changes() {
    let mut bed = Bed::new(963, (2, 2), link(50), AUTO, "");
    let mut inner = Inner::new(&mut bed, 4);
    for (place, mbit) in [50, 10, 30].into_iter().enumerate() {
        let queue_bytes = link(50).queue_bytes;
        bed.pair.world.set_bottleneck(bed.paths[0], Parameters { queue_bytes, ..link(mbit) });
        inner.run(&mut bed, 9);
        let from = place as u32 * 9 + 4;
        let (passed, delay) = (bed.mbit(0, from, from + 5), bed.ways[0].delay(from * 1_000, 0.95));
        println!("{mbit} Mbit/s: {passed:.1} Mbit/s from 4 s on, {delay} ms at p95");
        bed.show(0);
        assert!(passed > 0.85 * mbit as f64, "{mbit} Mbit/s: {passed}");
        assert!(delay <= EMPTY + 30, "{mbit} Mbit/s: {delay} ms");
    }
    bed.pair.assert_balanced();
}

#[test]
fn both_directions_are_full_at_once_and_neither_waits() {
    let mut bed = Bed::new(953, (2, 1), link(20), AUTO, AUTO);
    bed.ways.iter_mut().for_each(|way| way.offer(30));
    bed.run(15);
    for way in [0, 1] {
        bed.show(way);
        let (mbit, delay) = (bed.mbit(way, 5, 15), bed.ways[way].delay(5_000, 0.99));
        println!("direction {way}: {mbit:.1} Mbit/s, {delay} ms at p99");
        assert!(mbit > 0.85 * 20.0, "direction {way}: {mbit} Mbit/s");
        assert!(delay <= EMPTY + 30, "direction {way}: {delay} ms");
    }
    bed.pair.assert_balanced();
}

#[test]
fn beside_a_foreign_cubic_flow_a_fifth_is_ours_at_least() {
    let mut bed = Bed::new(954, (1, 1), link(20), AUTO, "");
    bed.ways[0].offer(25);
    bed.run(3);
    bed.foreign = Some(Foreign::new(&bed.pair.world));
    bed.run(12);
    let before = bed.foreign_bytes;
    bed.run(20);
    bed.show(0);
    let foreign = (bed.foreign_bytes - before) as f64 * 8e-6 / 20.0;
    let ours = bed.mbit(0, 15, 35) - foreign * 1500.0 / 1448.0;
    println!("ours {ours:.1}, foreign {foreign:.1} of 20 Mbit/s");
    assert!(ours >= 4.0 && foreign >= 4.0, "ours {ours}, foreign {foreign} Mbit/s");
}

#[test]
fn reports_that_are_lost_change_little() {
    let mut bed = Bed::new(955, (1, 1), link(20), AUTO, "");
    let lossy = Parameters { before: Loss { random_ppm: 300_000, bursts: None }, ..link(20) };
    bed.pair.world.set_bottleneck(bed.paths[1], lossy);
    bed.ways[0].offer(30);
    bed.run(15);
    bed.show(0);
    let (mbit, delay) = (bed.mbit(0, 5, 15), bed.ways[0].delay(5_000, 0.99));
    println!("{mbit:.1} Mbit/s, {delay} ms at p99");
    assert!(mbit > 0.85 * 20.0 && delay <= EMPTY + 30, "{mbit} Mbit/s, {delay} ms");
}

#[test]
fn a_path_that_moves_is_measured_anew() {
    let mut bed = Bed::new(956, (1, 1), link(20), AUTO, "");
    bed.ways[0].offer(30);
    bed.run(6);
    // Behind another address of the NAT the way is 40 ms longer in each direction, and slower.
    let other = Parameters { delay: 50 * MS, ..link(15) };
    for path in bed.paths {
        bed.pair.world.set_bottleneck(path, other);
    }
    for (from, to, path) in [(ENTRY_2, EXIT, bed.paths[0]), (EXIT, ENTRY_2, bed.paths[1])] {
        let path = NetworkPath { delay: Duration::ZERO, bottleneck: Some(path), ..NetworkPath::default() };
        bed.pair.world.set_path(from, to, path);
    }
    bed.pair.world.rebind(ENTRY, ENTRY_2);
    bed.run(14);
    bed.show(0);
    assert!(bed.pair.world.metric(bed.pair.exit, LANES_MOVED) > 0, "the lane follows");
    let (mbit, delay) = (bed.mbit(0, 12, 20), bed.ways[0].delay(12_000, 0.95));
    println!("{mbit:.1} Mbit/s, {delay} ms at p95");
    assert!(mbit > 0.85 * 15.0, "{mbit} Mbit/s");
    assert!(delay <= EMPTY + 40 + 40, "{delay} ms");
    bed.pair.assert_balanced();
}

#[test]
fn reloads_between_a_number_auto_and_nothing_lose_no_datagram() {
    let mut bed = Bed::new(957, (2, 2), link(20), AUTO, "");
    bed.ways[0].offer(10);
    bed.run(3);
    let auto = bed.pair.entry_toml.clone();
    for (line, from) in [
        ("rate = \"15Mbit\"", Some("configured")),
        (AUTO, Some("no_queue")),
        ("", None),
        ("rate = \"auto\"\nrate_max = \"12Mbit\"", Some("ceiling")),
    ] {
        bed.pair.world.reload(bed.pair.entry, &auto.replace(AUTO, line)).unwrap();
        bed.run(2);
        let rate = bed.pair.world.peer(bed.pair.entry).rate;
        assert_eq!(rate.as_ref().map(|rate| &*rate.from), from, "{line:?}: {rate:?}");
        let sent =
            |bed: &mut Bed| bed.pair.world.metric(bed.pair.exit, "culvert_reports_total{kind=\"sent\"}");
        let before = sent(&mut bed);
        bed.run(1);
        let is_reported = sent(&mut bed) > before;
        assert_eq!(is_reported, line.contains("auto"), "{line:?}: reports are sent to who wants them");
    }
    let [entry, exit] = bed.pair.assert_balanced();
    // A rate that begins without a number is below 10 Mbit/s for a while, and the queue that it causes signals that.
    let signals = entry.uplink.account.dropped[DropReason::Aqm];
    assert_eq!(entry.uplink.account.dropped_total() - signals, 0, "no reload drops a datagram");
    assert_eq!((exit.downlink.account.dropped_total(), signals < 200), (0, true), "{signals}");
}

#[test]
fn an_idle_pair_sends_no_reports() {
    let mut bed = Bed::new(958, (1, 1), link(20), AUTO, AUTO);
    bed.ways.iter_mut().for_each(|way| way.offer(5));
    bed.run(2);
    let ends = [bed.pair.entry, bed.pair.exit];
    let sent =
        |bed: &mut Bed| ends.map(|end| bed.pair.world.metric(end, "culvert_reports_total{kind=\"sent\"}"));
    assert!(sent(&mut bed).iter().all(|sent| *sent > 20), "under load they come");
    // Until the flows have ended, and said so.
    bed.pair.world.run(Duration::from_secs(8));
    let before = sent(&mut bed);
    bed.pair.world.run(Duration::from_secs(20));
    assert_eq!(sent(&mut bed), before, "no end reports on the reports of the other");
}

#[test]
fn a_peer_that_reports_nothing_is_limited_by_rate_max_alone() {
    for (line, bits) in [(AUTO, 0), ("rate = \"auto\"\nrate_max = \"5Mbit\"", 5_000_000)] {
        let mut pair = Pair::with_workers(959, (1, 1), line, "");
        for worker in &mut pair.world.agent(pair.exit).workers {
            worker.withhold(Features::REPORTS);
        }
        let mut bed = Bed::over(pair, 959, link(50));
        bed.ways[0].offer(20);
        bed.run(2);
        let [entry, _] = bed.pair.assert_balanced();
        let rate = entry.rate.expect("an automatic rate is shown");
        assert_eq!((&*rate.from, rate.bits_per_second, rate.auto), ("unmeasured", bits, None));
        let mbit = bed.mbit(0, 1, 2);
        let expected = if bits > 0 { 4.5..5.3 } else { 18.0..23.0 };
        assert!(expected.contains(&mbit), "{line:?}: {mbit} Mbit/s");
    }
}

#[test]
fn a_peer_without_lanes_is_limited_by_rate_max_alone() {
    let mut flood = GateFlood::new(960, "rate = \"auto\"\nrate_max = \"1Mbit\"");
    let log = Log::default();
    log.record(|| flood.say_hello(true, Features::REPORTS));
    let text = log.text();
    assert!(text.contains("peer.rate") && text.contains("the session has no lanes"), "{text}");
    let peers = flood.pair.world.peers(flood.pair.exit);
    let rate = peers.iter().find(|peer| &*peer.name == "rogue").and_then(|peer| peer.rate.clone()).unwrap();
    assert_eq!((&*rate.from, rate.bits_per_second), ("unmeasured", 1_000_000));
}

#[test]
fn reports_of_a_malicious_peer_cost_little_and_keep_the_rate_in_its_bounds() {
    let limits = "rate = \"auto\"\nrate_min = \"1Mbit\"\nrate_max = \"8Mbit\"";
    let mut flood = GateFlood::new(961, limits);
    flood.say_hello(false, Features::REPORTS);
    let mut rng = StdRng::seed_from_u64(961);
    for _ in 0..400 {
        for _ in 0..20 {
            let mut frame = vec![context::REPORT; 1 + Report::MOST_BYTES];
            let mut number = || {
                let bits = rng.random_range(1..62);
                rng.random_range(0..1_u64 << bits)
            };
            let report = Report {
                highest: number() % 64,
                arrived_micros: number(),
                packets: number() % 64,
                bytes: number(),
                marked: number(),
            };
            let len = report.encode(&mut frame[1..]).unwrap();
            frame.truncate(1 + len - usize::from(number() % 8 == 0));
            flood.send(&frame);
        }
        flood.run(5);
        let peers = flood.pair.world.peers(flood.pair.exit);
        let rate = peers.iter().find(|peer| &*peer.name == "rogue").and_then(|peer| peer.rate.clone());
        let bits = rate.map_or(0, |rate| rate.bits_per_second);
        assert!((1_000_000..=8_000_000).contains(&bits), "{bits}");
    }
    let taken = flood.metric("culvert_reports_total{kind=\"taken\"}");
    let ignored = flood.metric("culvert_reports_total{kind=\"ignored\"}");
    println!("{taken} taken, {ignored} ignored");
    assert_eq!(taken + ignored, 8_000);
    assert!(taken <= 100 * 2 + 10, "a hundred a second");
    flood.assert_innocent_is_unharmed();
}

#[test]
fn marks_of_the_path_mean_that_it_is_full_and_marks_from_before_do_not() {
    for (on_the_path, inner, is_full) in [(Some(3), 2, true), (None, 2, false), (Some(3), 3, false)] {
        let mut tunnel = Tunnel::with_ends(962, (1, 1), (AUTO, ENTRY_TUN), ("", EXIT_TUN)).settled(1);
        let [entry, exit] = tunnel.ends();
        tunnel.pair.world.weather.borrow_mut().mark = on_the_path;
        let given = Given::new(&Recipe { traffic_class: inner, payload: 1_200, ..Recipe::UDP }, How::Partial);
        let (mut was_congested, mut arrived) = (false, 0);
        for _ in 0..100 {
            // 4 Mbit/s: more than it begins with.
            (0..4).for_each(|_| tunnel.push(entry, 0, &given));
            tunnel.run(10);
            arrived += tunnel.written(exit).len();
            let auto = tunnel.pair.world.peer(entry).rate.and_then(|rate| rate.auto);
            was_congested |= auto.is_some_and(|auto| auto.congested);
        }
        assert!(arrived > 150, "{arrived} packets");
        assert_eq!(was_congested, is_full, "on the path {on_the_path:?}, inside {inner}");
    }
}

#[test]
fn tcp_forwards_fill_a_link_and_leave_its_queue_empty() {
    for peer in [AUTO, "congestion = \"cubic\"\nrate = \"auto\""] {
        let trial = PathTrial {
            rate_bits: 25_000_000,
            rtt: 40 * MS,
            streams: 4,
            seconds: 16,
            workers: (2, 2),
            peer,
            ..PathTrial::LONG
        };
        let outcome = trial.queue_of(10.0).run();
        let (mbit, rtt) = (outcome.mbit(6), outcome.rtt(0.9));
        println!(
            "{peer:?}: {mbit} Mbit/s, RTT {:?} median, {rtt:?} p90; {:?}",
            outcome.rtt(0.5),
            outcome.per_second
        );
        assert!(mbit > 0.8 * 25.0, "{peer}: {mbit} Mbit/s");
        assert!(rtt < 90 * MS, "{peer}: the path takes 40 ms, not {rtt:?}");
    }
}
