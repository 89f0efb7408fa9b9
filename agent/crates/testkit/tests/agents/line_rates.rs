//! Two lines of unlike rates and delays, each with a long queue in its modem: what both carry together, how long their queues are, and
//! what a single flow and a call have of them.
//!
//! Times are the world's. By default the lines have a fifth of 300 and 80 Mbit/s. The command that prints the figures at those rates takes
//! minutes:
//! `CULVERT_LINE_PARTS=1 cargo test -p culvert-testkit --test agents line_rates -- --nocapture`

use std::{net::IpAddr, time::Duration};

use testkit::simulation::{
    BottleneckId, NetworkPath,
    bottleneck::{Parameters, bytes_at},
};

use crate::{ENTRY, EXIT, INGRESS, Pair, Udp, cubic::Cubic, number_of, roaming::ENTRY_2};

const MS: Duration = Duration::from_millis(1);

const LINES: [IpAddr; 2] = [ENTRY, ENTRY_2];

/// What the lines carry in full, in Mbit/s, and their one-way delays.
const RATES: [u64; 2] = [300, 80];
const DELAYS: [Duration; 2] = [Duration::from_millis(5), Duration::from_millis(15)];

/// Payload of a flow's datagram, and the IP and UDP headers that it would have without a tunnel.
const BYTES: usize = 1_400;
const HEADERS: usize = 28;

/// The kinds of datagrams: of a flow that fills a line, of a call.
const BULK: u8 = 2;
const CALL: u8 = 1;

/// Milliseconds between two datagrams of a call.
const CALL_EVERY: u32 = 20;

/// The part of [`RATES`] that the lines have: one over this.
fn parts() -> u64 {
    std::env::var("CULVERT_LINE_PARTS").ok().and_then(|parts| parts.parse().ok()).unwrap_or(5)
}

/// Bits a second of a line.
fn bits(line: usize) -> u64 {
    RATES[line] * 1_000_000 / parts()
}

/// Two agents with one line or both between them, CUBIC flows over them towards the service, and a call.
struct Bed {
    pair: Pair,
    /// Of each line, towards the exit and back.
    modems: Vec<[BottleneckId; 2]>,
    flows: Vec<(Udp, Cubic)>,
    call: Option<Udp>,
    ms: u32,
    /// Bytes of the flows' IP packets that came to the service, in each millisecond.
    came: Vec<usize>,
    /// How long each datagram of a call took, in milliseconds, and when it came.
    delays: Vec<(u32, u32)>,
    /// How long a packet would wait at each modem on its way up, in each millisecond.
    queues: Vec<Vec<Duration>>,
    port: u16,
}

impl Bed {
    /// With this rate at the entry, and these keys of the lines.
    fn new(seed: u64, workers: (u8, u8), rate: &str, lines: &[&str]) -> Self {
        let uplinks: String = LINES
            .iter()
            .zip(lines)
            .map(|(line, keys)| {
                format!("[[transport.uplink]]\nname = \"line-{line}\"\nsource = \"{line}\"\n{keys}\n")
            })
            .collect();
        let uplinks = if lines.len() == 1 { String::new() } else { uplinks };
        let mut pair = Pair::with_workers(seed, workers, &format!("{rate}\nlanes = 2\n{uplinks}"), "");
        pair.world.set_addresses(ENTRY, &LINES[..lines.len()]);
        pair.world.weather.borrow_mut().delay = Duration::ZERO;
        let mut modems = Vec::new();
        for (place, line) in LINES.into_iter().take(lines.len()).enumerate() {
            let rate_bits = bits(place);
            let parameters = Parameters {
                rate_bits: Some(rate_bits),
                queue_bytes: bytes_at(rate_bits, 200 * MS),
                delay: DELAYS[place],
                ..Parameters::OPEN
            };
            let ways = [0, 1].map(|way| pair.world.add_bottleneck(parameters, seed + way));
            for (from, to, way) in [(line, EXIT, ways[0]), (EXIT, line, ways[1])] {
                let path =
                    NetworkPath { delay: Duration::ZERO, bottleneck: Some(way), ..NetworkPath::default() };
                pair.world.set_path(from, to, path);
            }
            modems.push(ways);
        }
        pair.wait_for_lanes(2 * lines.len());
        pair.world.run(Duration::from_secs(2));
        Self {
            queues: vec![Vec::new(); modems.len()],
            pair,
            modems,
            flows: Vec::new(),
            call: None,
            ms: 0,
            came: Vec::new(),
            delays: Vec::new(),
            port: 9_000,
        }
    }

    /// Adds flows that begin now.
    fn begin(&mut self, flows: u16) {
        for _ in 0..flows {
            self.port += 1;
            let flow = (self.pair.client(self.port), Cubic::new(self.pair.world.now()));
            self.flows.push(flow);
        }
    }

    fn begin_call(&mut self) {
        self.port += 1;
        self.call = Some(self.pair.client(self.port));
    }

    fn run(&mut self, time: Duration) {
        for _ in 0..time.as_millis() {
            self.millisecond();
        }
    }

    fn millisecond(&mut self) {
        let now = self.pair.world.now();
        for (socket, cubic) in &mut self.flows {
            for (_, answer) in socket.receive() {
                cubic.acknowledged(u64::from(number_of(&answer)), now);
            }
            if cubic.timeout().is_some_and(|timeout| timeout <= now) {
                cubic.on_timeout(now);
            }
            while let Some(number) = cubic.send(now) {
                socket.send(INGRESS, &payload(BULK, number as u32, BYTES));
            }
        }
        if let Some(call) = self.call.as_mut().filter(|_| self.ms.is_multiple_of(CALL_EVERY)) {
            call.send(INGRESS, &payload(CALL, self.ms, 200));
        }
        self.pair.world.run(MS);
        self.ms += 1;
        let mut came = 0;
        for (from, payload) in self.pair.echo.receive() {
            if payload[4] == CALL {
                self.delays.push((self.ms, self.ms - number_of(&payload)));
            } else {
                came += payload.len() + HEADERS;
                self.pair.echo.send(from, &payload[..24]);
            }
        }
        self.came.push(came);
        for (place, (modem, queue)) in self.modems.iter().zip(&mut self.queues).enumerate() {
            let waiting = self.pair.world.queued_bytes(modem[0]) as u64 * 8;
            queue.push(Duration::from_micros(waiting * 1_000_000 / bits(place)));
        }
    }

    /// Mbit/s of the flows' IP packets that came to the service within the last so many milliseconds.
    fn mbit(&self, last: usize) -> f64 {
        let bytes: usize = self.came[self.came.len() - last..].iter().sum();
        bytes as f64 * 8e-3 / last as f64
    }

    /// The median and the 99th percentile of the queue at a modem, over the last so many milliseconds.
    fn queue(&self, line: usize, last: usize) -> [Duration; 2] {
        let mut queue = self.queues[line][self.queues[line].len() - last..].to_vec();
        queue.sort_unstable();
        [queue[queue.len() / 2], queue[queue.len() * 99 / 100]]
    }

    /// The 99th percentile of the delays of the call since `from`, in milliseconds.
    fn call_delay(&self, from: u32) -> u32 {
        let delays = self.delays.iter().filter(|(came, _)| *came >= from);
        let mut delays: Vec<u32> = delays.map(|(_, delay)| *delay).collect();
        delays.sort_unstable();
        delays[delays.len() * 99 / 100]
    }

    /// The flows end, and nothing is under way any more.
    fn pause(&mut self) {
        self.flows.clear();
        self.run(Duration::from_millis(1_500));
    }

    /// What the entry has measured that each line takes, in bits a second.
    fn measured(&mut self) -> [Option<u64>; 2] {
        let entry = self.pair.entry;
        let lines = self.pair.world.peer(entry).lines;
        [0, 1].map(|line| lines.get(line).and_then(|line| line.capacity_bits_per_second))
    }
}

/// A datagram of this kind that has this number.
fn payload(kind: u8, number: u32, bytes: usize) -> Vec<u8> {
    let mut payload = vec![kind; bytes];
    payload[..4].copy_from_slice(&number.to_be_bytes());
    payload
}

const AUTO: &str = "rate = \"auto\"";

#[test]
fn both_lines_are_full_and_their_queues_are_short() {
    for (seed, workers) in [(9_900, (1, 1)), (9_901, (2, 2))] {
        let mut bed = Bed::new(seed, workers, AUTO, &["", ""]);
        bed.begin(16);
        bed.run(Duration::from_secs(15));
        for (line, measured) in bed.measured().into_iter().enumerate() {
            let measured = measured.expect("it was full") as f64 / bits(line) as f64;
            assert!((0.9..1.1).contains(&measured), "line {line}: {measured}");
        }
        let (mbit, queues) = (bed.mbit(8_000), [0, 1].map(|line| bed.queue(line, 8_000)));
        let all = 380.0 / parts() as f64;
        println!("{workers:?}: {mbit:.1} Mbit/s of {all}, queues at the modems (median, p99) {queues:?}");
        assert!(mbit >= all * 340.0 / 380.0, "{mbit}");
        for [median, most] in queues {
            assert!(median < 5 * MS && most < 25 * MS, "what the law aims at: {queues:?}");
        }
        bed.pair.assert_balanced();
    }
}

#[test]
fn one_flow_has_the_better_line_and_a_call_is_not_delayed() {
    let (seed, seconds) = (9_902, Duration::from_secs(3));
    // What the better line gives alone: to one flow, and to a call beside 16 flows.
    let mut alone = Bed::new(seed, (1, 1), AUTO, &[""]);
    alone.begin(16);
    alone.begin_call();
    alone.run(5 * seconds);
    let call_alone = alone.call_delay(5_000);
    alone.call = None;
    alone.pause();
    alone.begin(1);
    alone.run(seconds);
    let flow_alone = alone.mbit(2_000);
    alone.pair.assert_balanced();
    let mut bed = Bed::new(seed, (1, 1), AUTO, &["", ""]);
    bed.begin(16);
    bed.run(Duration::from_secs(5));
    bed.begin_call();
    bed.run(4 * seconds);
    let call = bed.call_delay(7_000);
    bed.call = None;
    let mut flows = Vec::new();
    for _ in 0..6 {
        bed.pause();
        bed.begin(1);
        bed.run(seconds);
        flows.push(bed.mbit(2_000));
    }
    println!(
        "one flow: {flows:.1?} Mbit/s, alone {flow_alone:.1}; a call's p99 {call} ms, alone {call_alone} ms"
    );
    let least = flows.iter().copied().fold(f64::MAX, f64::min);
    assert!(least >= 0.95 * flow_alone, "{least} and {flow_alone}");
    assert!(f64::from(call) <= 1.1 * f64::from(call_alone), "{call} and {call_alone}");
    bed.pair.assert_balanced();
}

/// More than its line takes waits in the agent when the line dies: it goes to the other line, in order.
#[test]
fn what_waits_for_a_line_that_dies_goes_to_the_other_one_in_order() {
    for seed in 9_910..9_914 {
        let mut bed = Bed::new(seed, (1, 1), "", &["rate = \"5Mbit\"", "rate = \"4Mbit\""]);
        let flow = bed.pair.client(8_000);
        let (mut numbers, mut flow) = (Vec::new(), flow);
        let entry = bed.pair.entry;
        let mut waited = 0;
        for ms in 0..4_000 {
            // 9.6 Mbit/s for a second, then 2.4 Mbit/s.
            if ms < 1_000 || ms % 4 == 0 {
                flow.send(INGRESS, &payload(BULK, ms, 1_200));
            }
            bed.pair.world.run(MS);
            numbers.extend(bed.pair.echo.receive().iter().map(|(_, payload)| number_of(payload)));
            if ms == 500 {
                let lines = bed.pair.world.peer(entry).lines;
                let place = lines.iter().position(|line| line.queued > 0).expect("a line's queue stands");
                waited = lines[place].queued;
                let dead = NetworkPath { is_cut: true, ..NetworkPath::default() };
                bed.pair.world.set_path(LINES[place], EXIT, dead);
                bed.pair.world.set_path(EXIT, LINES[place], dead);
            }
        }
        println!("seed {seed}: {waited} waited, {} of 1750 came", numbers.len());
        assert!(waited > 50, "seed {seed}: {waited}");
        assert!(numbers.is_sorted(), "seed {seed}: nothing overtakes within a flow");
        assert!(numbers.iter().any(|number| (400..500).contains(number)), "seed {seed}: what waited came");
        let [entry, _] = bed.pair.assert_balanced();
        assert_eq!(entry.uplink.queued, 0, "seed {seed}");
    }
}
