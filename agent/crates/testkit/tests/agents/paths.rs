//! TCP forwards over paths with a bottleneck: what arrives each second, and beside whom.
//!
//! `cargo test -p culvert-testkit --test agents paths -- --nocapture` prints the tables.

use std::{
    net::{IpAddr, Ipv4Addr, SocketAddr},
    time::{Duration, Instant},
};

use net::{TcpListener, TcpStream, Token};
use testkit::simulation::{
    BottleneckId, NetworkPath,
    bottleneck::{Counts, Gilbert, Jitter, Loss, Parameters, bytes_at},
};

use crate::{ENTRY, EXIT, Host, INGRESS, Pair, UPSTREAM, Udp, World, cubic::Cubic};

pub(super) const FOREIGN: [IpAddr; 2] =
    [IpAddr::V4(Ipv4Addr::new(192, 0, 2, 77)), IpAddr::V4(Ipv4Addr::new(198, 51, 100, 77))];

/// UDP payload of a foreign packet, which makes it 1500 bytes long, and of its acknowledgement, which makes it 52.
const FOREIGN_BYTES: [usize; 2] = [1472, 24];

/// How often RTTs are looked at.
const SAMPLE: Duration = Duration::from_millis(10);

/// A change of a path, some time after the transfer begins.
#[derive(Clone, Copy, Debug)]
pub(super) struct Step {
    pub(super) after: Duration,
    pub(super) change: fn(&mut Parameters),
}

/// A transfer over a path.
#[derive(Clone, Copy, Debug)]
pub(super) struct PathTrial {
    pub(super) rate_bits: u64,
    /// Without the queue.
    pub(super) rtt: Duration,
    /// Of the direction of the data; there is room for more in the other.
    pub(super) queue_bytes: usize,
    /// Before the queue, in both directions.
    pub(super) loss: Loss,
    /// In both directions.
    pub(super) jitter: Jitter,
    /// Where the queue marks ECT packets.
    pub(super) ecn_bytes: Option<usize>,
    pub(super) seconds: u64,
    pub(super) streams: usize,
    /// From the service to the client.
    pub(super) is_download: bool,
    /// A foreign flow shares the path from this second on.
    pub(super) foreign_from: Option<u64>,
    pub(super) workers: (u8, u8),
    /// What either end says of the other, in its `[[peer]]`.
    pub(super) peer: &'static str,
    /// What happens to the direction of the data, and when.
    pub(super) steps: &'static [Step],
    pub(super) seed: u64,
}

impl PathTrial {
    /// 200 Mbit/s, 80 ms, a queue of one bandwidth-delay product, no loss.
    pub(super) const LONG: Self = Self {
        rate_bits: 200_000_000,
        rtt: Duration::from_millis(80),
        queue_bytes: 2_000_000,
        loss: Loss { random_ppm: 0, bursts: None },
        jitter: Jitter::None,
        ecn_bytes: None,
        seconds: 20,
        streams: 1,
        is_download: false,
        foreign_from: None,
        workers: (1, 1),
        peer: "",
        steps: &[],
        seed: 1,
    };

    pub(super) fn random_loss(self, ppm: u32) -> Self {
        Self { loss: Loss { random_ppm: ppm, bursts: None }, ..self }
    }

    pub(super) fn bursts(self, packets: u32, ppm: u32) -> Self {
        Self { loss: Loss { random_ppm: 0, bursts: Some(Gilbert::bursts(packets, ppm)) }, ..self }
    }

    /// With a queue of so many bandwidth-delay products.
    pub(super) fn queue_of(self, products: f64) -> Self {
        let product = bytes_at(self.rate_bits, self.rtt) as f64;
        Self { queue_bytes: (product * products) as usize, ..self }
    }

    pub(super) fn run(self) -> PathOutcome {
        Trial::new(self).run()
    }

    fn parameters(&self) -> Parameters {
        Parameters {
            rate_bits: Some(self.rate_bits),
            queue_bytes: self.queue_bytes,
            delay: self.rtt / 2,
            jitter: self.jitter,
            before: self.loss,
            ecn_bytes: self.ecn_bytes,
            ..Parameters::OPEN
        }
    }
}

/// What came of a transfer.
#[derive(Clone, Debug, Default)]
pub(super) struct PathOutcome {
    /// Bytes that the reading end got in each second.
    pub(super) per_second: Vec<u64>,
    /// The same of the foreign flow.
    pub(super) foreign: Vec<u64>,
    /// Packets that the sender declared lost.
    pub(super) retransmits: u64,
    /// Smoothed RTTs of the sender's connections, sorted.
    pub(super) rtts: Vec<Duration>,
    /// The direction of the data.
    pub(super) counts: Counts,
    /// Packets of either direction that found no room in a socket.
    pub(super) refused: u64,
}

impl PathOutcome {
    /// The mean from second `from` on, in Mbit/s.
    pub(super) fn mbit(&self, from: usize) -> f64 {
        mean_mbit(&self.per_second, from)
    }

    /// The same of the foreign flow.
    pub(super) fn foreign_mbit(&self, from: usize) -> f64 {
        mean_mbit(&self.foreign, from)
    }

    /// The RTT below which this share of the samples is.
    pub(super) fn rtt(&self, share: f64) -> Duration {
        let place = (self.rtts.len() as f64 * share) as usize;
        self.rtts.get(place.min(self.rtts.len().saturating_sub(1))).copied().unwrap_or_default()
    }
}

fn mean_mbit(per_second: &[u64], from: usize) -> f64 {
    let counted = &per_second[from.min(per_second.len())..];
    counted.iter().sum::<u64>() as f64 * 8e-6 / counted.len().max(1) as f64
}

/// A stream, the end that writes and the end that reads.
struct Streams {
    writers: Vec<(Token, Box<dyn TcpStream>)>,
    readers: Vec<(Token, Box<dyn TcpStream>)>,
}

struct Trial {
    trial: PathTrial,
    pair: Pair,
    paths: [BottleneckId; 2],
    streams: Streams,
    foreign: Option<Foreign>,
    begin: Instant,
    outcome: PathOutcome,
    buffer: Vec<u8>,
}

impl Trial {
    fn new(trial: PathTrial) -> Self {
        let mut pair = Pair::with_workers(trial.seed, trial.workers, trial.peer, trial.peer);
        let loaded = trial.parameters();
        let returning = Parameters { queue_bytes: usize::MAX, ..loaded };
        let world = &pair.world;
        let paths =
            [world.add_bottleneck(loaded, trial.seed), world.add_bottleneck(returning, trial.seed + 1)];
        let [data, back] = paths;
        let (up, down) = if trial.is_download { (back, data) } else { (data, back) };
        for (from, to, bottleneck) in [
            (ENTRY, EXIT, up),
            (EXIT, ENTRY, down),
            (FOREIGN[0], FOREIGN[1], data),
            (FOREIGN[1], FOREIGN[0], back),
        ] {
            let bottleneck = Some(bottleneck);
            let path = NetworkPath { delay: Duration::ZERO, bottleneck, ..NetworkPath::default() };
            world.set_path(from, to, path);
        }
        let ends = [pair.entry, pair.exit];
        pair.world.run_till(Duration::from_secs(60), |world| {
            ends.iter().all(|place| world.peer(*place).lanes_up >= 1)
        });
        let streams = Streams::open(&mut pair, &trial);
        let begin = pair.world.now();
        let (outcome, buffer) = (PathOutcome::default(), vec![0; 64 * 1024]);
        Self { trial, pair, paths, streams, foreign: None, begin, outcome, buffer }
    }

    fn run(mut self) -> PathOutcome {
        let (mut steps, mut parameters) = (self.trial.steps.iter(), self.trial.parameters());
        let mut sampled = self.begin;
        for second in 1..=self.trial.seconds {
            self.outcome.per_second.push(0);
            self.outcome.foreign.push(0);
            if self.trial.foreign_from == Some(second - 1) {
                self.foreign = Some(Foreign::new(&self.pair.world));
            }
            let until = self.begin + Duration::from_secs(second);
            while self.pair.world.now() < until {
                sampled += SAMPLE;
                self.sample();
                let due = steps.as_slice().first().filter(|step| self.begin + step.after < sampled);
                if let Some(step) = due {
                    (step.change)(&mut parameters);
                    self.pair.world.set_bottleneck(self.paths[0], parameters);
                    steps.next();
                }
                self.run_until(sampled.min(until));
            }
        }
        self.finish()
    }

    fn run_until(&mut self, until: Instant) {
        loop {
            while self.hub() {
                self.pair.world.settle();
            }
            let timeout = self.foreign.as_ref().and_then(|foreign| foreign.timeout());
            let next = timeout.map_or(until, |timeout| timeout.min(until));
            if !self.pair.world.step(next) && next == until {
                return;
            }
        }
    }

    /// Writes and reads all there is to until that time; adds up what each reader got. For uploads.
    fn run_counting(&mut self, until: Instant, bytes: &mut [u64]) {
        loop {
            let Pair { clients, services, world, .. } = &mut self.pair;
            let mut is_busy = false;
            for token in clients.ready() {
                is_busy |= self.streams.write(token, &self.buffer);
            }
            for token in services.ready() {
                let reader = self.streams.readers.iter().position(|(known, _)| *known == token);
                let came = self.streams.read(token, &mut self.buffer);
                is_busy |= came > 0;
                if let Some(reader) = reader {
                    bytes[reader] += came;
                }
            }
            match is_busy {
                true => world.settle(),
                false if world.step(until) => {}
                false => return,
            }
        }
    }

    /// Writes and reads what there is to; false if nothing.
    fn hub(&mut self) -> bool {
        let Pair { clients, services, world, .. } = &mut self.pair;
        let (writing, reading) =
            if self.trial.is_download { (services, clients) } else { (clients, services) };
        let mut is_busy = false;
        for token in writing.ready() {
            is_busy |= self.streams.write(token, &self.buffer);
        }
        for token in reading.ready() {
            let bytes = self.streams.read(token, &mut self.buffer);
            is_busy |= bytes > 0;
            *self.outcome.per_second.last_mut().unwrap() += bytes;
        }
        if let Some(foreign) = &mut self.foreign {
            *self.outcome.foreign.last_mut().unwrap() += foreign.hub(world.now());
        }
        is_busy
    }

    fn sample(&mut self) {
        let sender = if self.trial.is_download { self.pair.exit } else { self.pair.entry };
        let workers = &self.pair.world.agent(sender).workers;
        let connections = workers.iter().flat_map(|worker| worker.control().iter());
        self.outcome.rtts.extend(connections.map(|connection| connection.quinn().rtt()));
    }

    fn finish(mut self) -> PathOutcome {
        let sender = if self.trial.is_download { self.pair.exit } else { self.pair.entry };
        let workers = &self.pair.world.agent(sender).workers;
        self.outcome.retransmits = workers.iter().map(|worker| worker.control().traffic().packets_lost).sum();
        self.outcome.rtts.sort_unstable();
        let [(counts, _), (back, _)] = self.paths.map(|id| self.pair.world.bottleneck(id));
        self.outcome.counts = counts;
        self.outcome.refused = counts.refused + back.refused;
        self.outcome
    }
}

impl Streams {
    fn open(pair: &mut Pair, trial: &PathTrial) -> Self {
        let mut listener = pair.services.tcp_listen(UPSTREAM);
        let clients = (0..trial.streams).map(|_| {
            let stream = pair.clients.tcp(INGRESS);
            (pair.clients.last_token(), stream)
        });
        let clients: Vec<_> = clients.collect();
        let mut accepted: Vec<(Token, Box<dyn TcpStream>)> = Vec::new();
        for _ in 0..6000 {
            pair.world.run(Duration::from_millis(10));
            while let Some(stream) = accept(&mut *listener, &mut pair.services) {
                accepted.push(stream);
            }
            if accepted.len() == trial.streams {
                break;
            }
        }
        assert_eq!(accepted.len(), trial.streams, "connections to the service");
        let (mut writers, readers) =
            if trial.is_download { (accepted, clients) } else { (clients, accepted) };
        // A pipe that was never full wakes nobody.
        for (_, stream) in &mut writers {
            while stream.write(&[0; 4096]).is_ok() {}
        }
        Self { writers, readers }
    }

    fn write(&mut self, token: Token, bytes: &[u8]) -> bool {
        let Some((_, stream)) = self.writers.iter_mut().find(|(known, _)| *known == token) else {
            return false;
        };
        let mut is_busy = false;
        while stream.write(bytes).is_ok() {
            is_busy = true;
        }
        is_busy
    }

    fn read(&mut self, token: Token, buffer: &mut [u8]) -> u64 {
        let Some((_, stream)) = self.readers.iter_mut().find(|(known, _)| *known == token) else { return 0 };
        let mut bytes = 0;
        while let Ok(count @ 1..) = stream.read(buffer) {
            bytes += count as u64;
        }
        bytes
    }
}

fn accept(listener: &mut dyn TcpListener, services: &mut Host) -> Option<(Token, Box<dyn TcpStream>)> {
    let token = services.token();
    listener.accept(token).ok().map(|(stream, _)| (token, stream))
}

/// A foreign flow through the same bottleneck.
pub(super) struct Foreign {
    sender: Cubic,
    sockets: [(Host, Udp); 2],
}

impl Foreign {
    pub(super) fn new(world: &World) -> Self {
        let sockets = FOREIGN.map(|address| {
            let mut host = world.host(&[address]);
            let socket = host.quic(SocketAddr::new(address, 9));
            (host, socket)
        });
        Self { sender: Cubic::new(world.now()), sockets }
    }

    /// When it is to be served although nothing came.
    pub(super) fn timeout(&self) -> Option<Instant> {
        self.sender.timeout()
    }

    /// Sends, acknowledges and hears acknowledgements; returns how many bytes came, as a TCP stream's.
    pub(super) fn hub(&mut self, now: Instant) -> u64 {
        let [(near_host, near), (far_host, far)] = &mut self.sockets;
        let [sent_bytes, acknowledged_bytes] = FOREIGN_BYTES;
        let mut payload = [0; 1472];
        let mut came = 0;
        if !far_host.ready().is_empty() {
            for (from, packet) in far.receive() {
                came += 1448;
                far.send(from, &packet[..acknowledged_bytes]);
            }
        }
        if !near_host.ready().is_empty() {
            for (_, packet) in near.receive() {
                let number = u64::from_be_bytes(packet[..8].try_into().unwrap());
                self.sender.acknowledged(number, now);
            }
        }
        if self.sender.timeout().is_some_and(|timeout| timeout <= now) {
            self.sender.on_timeout(now);
        }
        while let Some(number) = self.sender.send(now) {
            payload[..8].copy_from_slice(&number.to_be_bytes());
            near.send(SocketAddr::new(FOREIGN[1], 9), &payload[..sent_bytes]);
        }
        came
    }
}

/// Runs a trial and prints what came of it, from its fourth second on.
#[expect(clippy::disallowed_methods, reason = "what a trial takes is printed")]
fn show(name: &str, trial: PathTrial) -> PathOutcome {
    let begin = Instant::now();
    let outcome = trial.run();
    println!(
        "{name:>28}: {:>5.1} Mbit/s, beside {:>5.1}; {} of {} packets declared lost, {} dropped; RTT {:.1?}, p99 {:.1?}; \
         took {:.1?}",
        outcome.mbit(3),
        outcome.foreign_mbit(3),
        outcome.retransmits,
        outcome.counts.came,
        outcome.counts.tail_dropped,
        outcome.rtt(0.5),
        outcome.rtt(0.99),
        begin.elapsed(),
    );
    assert_eq!(outcome.refused, 0, "{name}: the bed itself drops nothing");
    outcome
}

/// The first `few` rows, which say the most; all of them with `CULVERT_PATHS=all`.
fn all_or<T: Copy>(few: usize, rows: &[T]) -> impl Iterator<Item = T> {
    let most =
        if std::env::var_os("CULVERT_PATHS").is_some_and(|rows| rows == "all") { rows.len() } else { few };
    rows.iter().copied().take(most)
}

#[test]
fn a_forward_over_a_long_path_by_loss() {
    for (ppm, least) in [(0, 170.0), (1_000, 165.0), (10_000, 160.0), (30_000, 150.0), (100_000, 130.0)] {
        let outcome = show(&format!("{} % lost", f64::from(ppm) / 1e4), PathTrial::LONG.random_loss(ppm));
        let (lost, came) = (outcome.counts.lost_random as f64, outcome.counts.came as f64);
        assert!((lost - came * f64::from(ppm) / 1e6).abs() < 5.0 * lost.sqrt().max(1.0), "{lost} of {came}");
        assert!(outcome.mbit(0) > least, "{ppm} in a million lost: {} Mbit/s", outcome.mbit(0));
    }
    show("1 % lost in bursts of 10", PathTrial::LONG.bursts(10, 10_000));
}

#[test]
fn packets_that_overtake_each_other_do_not_slow_a_forward_down() {
    let uniform = |millis| Jitter::Uniform(Duration::from_millis(millis));
    let rows = [
        (uniform(10), 0, 165.0),
        (uniform(5), 10_000, 150.0),
        (Jitter::Normal(Duration::from_millis(5)), 0, 150.0),
        (uniform(1), 0, 165.0),
        (uniform(5), 0, 165.0),
        (uniform(10), 10_000, 145.0),
        (uniform(5), 30_000, 140.0),
        (uniform(10), 30_000, 120.0),
    ];
    for (jitter, ppm, least) in all_or(3, &rows) {
        let trial = PathTrial { jitter, seconds: 8, ..PathTrial::LONG.random_loss(ppm) };
        let outcome = show(&format!("{jitter:?}, {} % lost", f64::from(ppm) / 1e4), trial);
        let overtaken = outcome.counts.overtaken as f64 / outcome.counts.came as f64;
        assert!(overtaken > 0.5, "{overtaken} of the packets arrived after a later one");
        assert!(outcome.mbit(3) > least, "{jitter:?}, {ppm} lost: {} Mbit/s", outcome.mbit(3));
        // What was declared lost beyond what was: once in a thousand, after the first second.
        let spurious = outcome.retransmits.saturating_sub(outcome.counts.lost_random) as f64;
        assert!(spurious < 0.01 * outcome.counts.came as f64, "{spurious} of {}", outcome.counts.came);
    }
}

#[test]
fn a_fixed_rate_holds_whatever_is_lost() {
    let trial = PathTrial { peer: "congestion = \"rate\"\nrate = \"190Mbit\"", ..PathTrial::LONG };
    let rows = [(10_000, 175.0), (100_000, 150.0), (0, 175.0), (1_000, 175.0), (30_000, 172.0)];
    for (ppm, least) in all_or(2, &rows) {
        let outcome = show(&format!("190 Mbit/s, {} % lost", f64::from(ppm) / 1e4), trial.random_loss(ppm));
        assert!(outcome.mbit(2) > least, "{ppm} in a million lost: {} Mbit/s", outcome.mbit(2));
    }
}

#[test]
fn cubic_fills_a_clean_path_and_takes_loss_for_congestion() {
    let trial = PathTrial { peer: "congestion = \"cubic\"", ..PathTrial::LONG };
    let clean = show("cubic, nothing lost", trial);
    assert!(clean.mbit(5) > 150.0, "{} Mbit/s", clean.mbit(5));
    let lossy = show("cubic, 1 % lost", trial.random_loss(10_000));
    assert!(lossy.mbit(5) < 20.0, "{} Mbit/s", lossy.mbit(5));
}

#[test]
fn forwards_that_send_much_share_a_path_and_one_that_sends_little_does_not_wait_for_them() {
    const GREEDY: usize = 4;
    let trial = PathTrial {
        rate_bits: 20_000_000,
        rtt: Duration::from_millis(40),
        streams: GREEDY + 1,
        ..PathTrial::LONG
    };
    let mut trial = Trial::new(trial.queue_of(2.0));
    let (_, mut modest) = trial.streams.writers.remove(GREEDY);
    let (_, mut reader) = trial.streams.readers.remove(GREEDY);
    let (mut bytes, mut slowest, mut asked) = ([0; GREEDY], Duration::ZERO, None);
    let mut run = |trial: &mut Trial, milliseconds: u64| {
        for _ in 0..milliseconds {
            let until = trial.pair.world.now() + Duration::from_millis(1);
            trial.run_counting(until, &mut bytes);
            let now = trial.pair.world.now();
            if reader.read(&mut [0; 64]).is_ok()
                && let Some(at) = asked.take()
            {
                slowest = slowest.max(now - at);
            }
            if asked.is_none() && modest.write(b"a key that somebody pressed").is_ok() {
                asked = Some(now);
            }
        }
        (std::mem::take(&mut bytes), std::mem::take(&mut slowest))
    };
    // What filled the pipes at the beginning is on its way.
    run(&mut trial, 4_000);
    for second in 0..4 {
        let (bytes, slowest) = run(&mut trial, 2_000);
        let sum = bytes.iter().sum::<u64>();
        println!("{bytes:?}, {slowest:?}");
        assert!(sum > 2 * 2_000_000, "{second}: {bytes:?}");
        assert!(bytes.iter().all(|bytes| *bytes * 10 > sum), "{second}: none starves: {bytes:?}");
        // 20 ms on the cable and some in its queue, which has room for 80; behind what the others hold it would be half a second.
        assert!(slowest < Duration::from_millis(300), "{second}: {slowest:?}");
    }
}

#[test]
fn no_number_of_short_forwards_holds_up_a_long_one() {
    const SHORT: usize = 40;
    let trial = PathTrial { rate_bits: 20_000_000, rtt: Duration::from_millis(40), ..PathTrial::LONG };
    let mut trial = Trial::new(trial.queue_of(2.0));
    let mut listener = trial.pair.services.tcp_listen(UPSTREAM);
    let (mut clients, mut accepted) = (Vec::new(), Vec::new());
    let (mut long, mut short, mut ended) = ([0], 0, 0);
    for _ in 0..8_000 {
        let until = trial.pair.world.now() + Duration::from_millis(1);
        trial.run_counting(until, &mut long);
        // As many short ones as the path takes: each sends less than what would put it behind the others.
        while clients.len() < SHORT {
            clients.push((trial.pair.clients.tcp(INGRESS), 30_000));
        }
        clients.retain_mut(|(client, left)| {
            if *left > 0 {
                *left -= client.write(&trial.buffer[..*left]).unwrap_or(0);
                if *left == 0 {
                    client.shutdown_write().unwrap();
                }
            }
            // Until the service has ended it, too.
            client.read(&mut [0; 1]).is_err_and(|error| error.kind() == std::io::ErrorKind::WouldBlock)
        });
        while let Some((_, stream)) = accept(&mut *listener, &mut trial.pair.services) {
            accepted.push(stream);
        }
        accepted.retain_mut(|stream| {
            loop {
                match stream.read(&mut trial.buffer) {
                    Ok(0) => {
                        ended += 1;
                        return stream.shutdown_write().is_err();
                    }
                    Ok(len) => short += len as u64,
                    Err(error) => return error.kind() == std::io::ErrorKind::WouldBlock,
                }
            }
        });
    }
    let [long] = long;
    println!("{long} bytes of the long one, {short} of {ended} short ones");
    assert!(long + short > 8 * 2_000_000 && short > 2_000_000, "{long} and {short}");
    assert!(long > 2_000_000, "{long} bytes beside {short}");
}

#[test]
fn several_forwards_share_a_path_in_either_direction() {
    let trial =
        PathTrial { rate_bits: 50_000_000, seconds: 8, streams: 4, workers: (2, 2), ..PathTrial::LONG };
    for is_download in [false, true] {
        let name = if is_download { "four, downwards" } else { "four, upwards" };
        let outcome = show(name, PathTrial { is_download, ..trial }.queue_of(1.0));
        assert!(outcome.mbit(3) > 42.0);
    }
}

#[test]
fn a_step_of_the_rate_is_followed() {
    const SLOWER: Step =
        Step { after: Duration::from_secs(6), change: |path| path.rate_bits = Some(10_000_000) };
    let trial = PathTrial { rate_bits: 40_000_000, seconds: 14, steps: &[SLOWER], ..PathTrial::LONG };
    let outcome = show("40 Mbit/s, then 10", trial.queue_of(1.0));
    let (before, after) = (mean_mbit(&outcome.per_second[3..6], 0), outcome.mbit(10));
    assert!((34.0..40.0).contains(&before) && (8.0..10.0).contains(&after), "{before}, {after}");
}

#[test]
fn the_foreign_flow_fills_a_path_and_yields_to_loss() {
    let alone = PathTrial { rate_bits: 50_000_000, streams: 0, foreign_from: Some(0), ..PathTrial::LONG };
    let clean = show("a foreign flow alone", alone.queue_of(1.0));
    // 1448 of 1500 bytes are its own.
    assert!((46.0..48.3).contains(&clean.foreign_mbit(3)), "{}", clean.foreign_mbit(3));
    let lossy = show("the same at 1 % loss", alone.queue_of(1.0).random_loss(10_000));
    assert!((0.5..5.0).contains(&lossy.foreign_mbit(3)), "{}", lossy.foreign_mbit(3));
}

#[test]
fn a_forward_and_a_foreign_flow_share_a_bottleneck() {
    let trial = PathTrial {
        rate_bits: 50_000_000,
        rtt: Duration::from_millis(40),
        seconds: 90,
        foreign_from: Some(2),
        ..PathTrial::LONG
    };
    for products in all_or(2, &[1.0, 8.0, 2.0, 4.0]) {
        let outcome = show(&format!("beside, {products} BDP"), trial.queue_of(products));
        let [ours, theirs] = [outcome.mbit(30), outcome.foreign_mbit(30)];
        assert!(ours + theirs > 43.0, "{products}: together {ours} + {theirs}");
        let share = ours / (ours + theirs);
        println!("{products}: {share:.2}");
        assert!((0.25..=0.75).contains(&share), "{products}: {ours} and {theirs}");
    }
}
