//! Ports that change (`transport.hop`): under load nothing is lost, nothing overtakes within a flow, and no port gets old.
//!
//! `CULVERT_HOP_MINUTES=10` has them change for so long.

use std::{
    collections::{BTreeMap, BTreeSet},
    net::SocketAddr,
    time::{Duration, Instant},
};

use net::{TcpListener, TcpStream};

use crate::{
    ENTRY, EXIT, INGRESS, Pair, UPSTREAM,
    harness::{
        NetworkPath, Udp,
        bottleneck::{Parameters, bytes_at},
    },
    number_of, numbered,
    roaming::{ENTRY_6, ESTABLISHED, EXIT_6, SECOND},
};

const LANE_HOPS: &str = "culvert_port_hops_total{what=\"lane\"}";
const CONNECTION_HOPS: &str = "culvert_port_hops_total{what=\"connection\"}";

/// The period of all tests here.
const PERIOD: Duration = Duration::from_secs(10);

/// What a hop takes beyond the period: the lane that is next is asked for a sign of life, and the new one is validated.
const HANDSHAKE: Duration = Duration::from_millis(600);

/// The time between two steps of the load.
const STEP: Duration = Duration::from_millis(20);

/// Datagrams of each flow in a step.
const BURST: u32 = 2;

/// Bytes that the forward is offered in a step, in each direction.
const CHUNK: usize = 4_000;

/// The one-way delay between the agents.
const DELAY: Duration = Duration::from_millis(15);

/// A forward that carries a known sequence of bytes in both directions.
struct Pump {
    ends: [Box<dyn TcpStream>; 2],
    written: [u64; 2],
    read: [u64; 2],
}

impl Pump {
    /// The bytes from `position` on.
    fn bytes(position: u64, buffer: &mut [u8]) {
        for (position, byte) in (position..).zip(buffer) {
            *byte = (position % 251) as u8;
        }
    }

    fn step(&mut self, writes: bool) {
        let mut buffer = [0; CHUNK];
        let mut expected = [0; CHUNK];
        for (end, stream) in self.ends.iter_mut().enumerate() {
            if writes {
                Self::bytes(self.written[end], &mut buffer);
                self.written[end] += stream.write(&buffer).unwrap_or(0) as u64;
            }
            while let Ok(count @ 1..) = stream.read(&mut buffer) {
                Self::bytes(self.read[end], &mut expected[..count]);
                assert_eq!(buffer[..count], expected[..count], "byte {} and on", self.read[end]);
                self.read[end] += count as u64;
            }
        }
    }
}

/// A pair whose entry changes its ports, with flows and a forward.
struct Bed {
    pair: Pair,
    flows: Vec<Udp>,
    /// The number of the newest datagram of each flow, and of the newest one that came back.
    sent: u32,
    answered: Vec<u32>,
    pump: Option<Pump>,
    service: Option<Box<dyn TcpListener>>,
    /// When each port of the entry was first and last seen in use at the exit.
    ports: BTreeMap<u16, (Instant, Instant)>,
}

impl Bed {
    fn new(seed: u64, workers: (u8, u8), lanes: u8, is_ipv6: bool, hop: &str) -> Self {
        let at = SocketAddr::new(if is_ipv6 { EXIT_6 } else { EXIT }, 4433).to_string();
        let at = [format!("\"{at}\""), at];
        Self::between(seed, workers, lanes, &at, hop)
    }

    /// With what the exit listens on, and the endpoint at which the entry dials it.
    fn between(seed: u64, workers: (u8, u8), lanes: u8, [listen, endpoint]: &[String; 2], hop: &str) -> Self {
        let extra = format!("lanes = {lanes}\n[transport]\nhop = \"{hop}\"\n");
        let mut pair = Pair::with_workers(seed, workers, &extra, "");
        pair.world.weather.borrow_mut().delay = Duration::ZERO;
        let usual = format!("{EXIT}:4433");
        if *endpoint != usual {
            pair.exit_toml = pair.exit_toml.replace(&format!("\"{usual}\""), listen);
            pair.entry_toml = pair.entry_toml.replace(&usual, endpoint);
            pair.world.workers = workers.1;
            pair.world.restart(pair.exit, &pair.exit_toml, &pair.exit_key, &[EXIT, EXIT_6], 71);
            pair.world.workers = workers.0;
            pair.world.restart(pair.entry, &pair.entry_toml, &pair.entry_key, &[ENTRY, ENTRY_6], 72);
        }
        for (one, other) in [(ENTRY, EXIT), (ENTRY_6, EXIT_6)] {
            pair.world.set_path(one, other, NetworkPath::with_delay(DELAY));
            pair.world.set_path(other, one, NetworkPath::with_delay(DELAY));
        }
        pair.wait_for_lanes(usize::from(lanes));
        let flows: Vec<Udp> = (0..2).map(|place| pair.client(3000 + place)).collect();
        let answered = vec![0; flows.len()];
        Self { pair, flows, sent: 0, answered, pump: None, service: None, ports: BTreeMap::new() }
    }

    fn forward(&mut self) {
        let mut service = self.pair.services.tcp_listen(UPSTREAM);
        let client = self.pair.clients.tcp(INGRESS);
        let token = self.pair.services.token();
        let mut served = None;
        self.pair.world.run_till(5 * SECOND, |_| {
            served = service.accept(token).ok().map(|(stream, _)| stream);
            served.is_some()
        });
        let ends = [client, served.expect("the service is connected")];
        self.service = Some(service);
        self.pump = Some(Pump { ends, written: [0; 2], read: [0; 2] });
    }

    /// The load goes on for so long; without `sends`, what is under way comes.
    fn run(&mut self, time: Duration, sends: bool) {
        for _ in 0..time.as_millis() / STEP.as_millis() {
            if sends {
                for _ in 0..BURST {
                    self.sent += 1;
                    self.flows.iter_mut().for_each(|flow| flow.send(INGRESS, &numbered(self.sent)));
                }
            }
            if let Some(pump) = &mut self.pump {
                pump.step(sends);
            }
            for _ in 0..5 {
                self.pair.world.run(STEP / 5);
                self.pair.serve();
            }
            for (flow, answered) in self.flows.iter_mut().zip(&mut self.answered) {
                for (_, payload) in flow.receive() {
                    assert_eq!(number_of(&payload), *answered + 1, "in order, and none is missing");
                    *answered += 1;
                }
            }
            self.note_ports();
        }
    }

    /// The ports of the entry that the exit sends to.
    fn in_use(&mut self) -> BTreeSet<u16> {
        let exit = self.pair.exit;
        let control = self.pair.world.peer(exit).address;
        let workers = &self.pair.world.agent(exit).workers;
        let slots = workers.iter().flat_map(|worker| worker.lanes().iter());
        let lanes = slots.filter(|(_, slot)| slot.is_up()).filter_map(|(_, slot)| slot.path());
        let addresses = lanes.map(|path| path.destination).chain(control);
        addresses.map(|address: SocketAddr| address.port()).collect()
    }

    fn note_ports(&mut self) {
        let now = self.pair.world.now();
        for port in self.in_use() {
            self.ports.entry(port).or_insert((now, now)).1 = now;
        }
    }

    /// All that was sent has come back.
    fn assert_whole(&mut self) {
        self.run(2 * SECOND, false);
        for _ in 0..20 {
            if self.pump.as_ref().is_some_and(|pump| pump.read != [pump.written[1], pump.written[0]]) {
                self.run(SECOND, false);
            }
        }
        assert!(self.answered.iter().all(|answered| *answered == self.sent), "{:?}", self.answered);
        if let Some(pump) = &self.pump {
            assert_eq!(pump.read, [pump.written[1], pump.written[0]], "the forward has carried all bytes");
        }
        for place in [self.pair.entry, self.pair.exit] {
            assert_eq!(self.pair.world.metric(place, ESTABLISHED), 1, "the session goes on");
        }
        self.pair.assert_balanced();
    }
}

/// Minutes under load, in which everything changes its port every ten seconds: two, or `CULVERT_HOP_MINUTES`.
fn under_load(seed: u64, workers: (u8, u8), is_ipv6: bool) {
    let lanes = 3;
    let mut bed = Bed::new(seed, workers, lanes, is_ipv6, "10s");
    bed.forward();
    let minutes: u32 = std::env::var("CULVERT_HOP_MINUTES").map_or(2, |text| text.parse().unwrap());
    bed.run(minutes * 60 * SECOND, true);
    let (entry, exit) = (bed.pair.entry, bed.pair.exit);
    let oldest = bed.ports.values().map(|(first, last)| *last - *first).max().unwrap_or_default();
    let [of_lanes, of_connections] =
        [LANE_HOPS, CONNECTION_HOPS].map(|name| bed.pair.world.metric(entry, name));
    println!(
        "{} ports, the oldest {oldest:?}; {of_lanes} lanes, {of_connections} connections",
        bed.ports.len()
    );
    assert!(oldest <= PERIOD + HANDSHAKE, "a port was in use for {oldest:?}");
    assert!(
        (u64::from(17 * minutes)..=u64::from(20 * minutes)).contains(&of_lanes),
        "three lanes, six times a minute: {of_lanes}"
    );
    assert!(of_connections >= u64::from(5 * minutes), "{of_connections}");
    assert!(bed.ports.len() >= 23 * minutes as usize, "{} ports", bed.ports.len());
    assert_eq!(bed.pair.world.metric(exit, LANE_HOPS), 0, "the dialler changes its ports");
    let pump = bed.pump.as_ref().map(|pump| pump.written).unwrap_or_default();
    // A tenth of a second without progress for each hop would be more than that.
    let offered = u64::from(minutes) * 60_000 / STEP.as_millis() as u64 * CHUNK as u64;
    assert!(pump.iter().all(|written| *written >= offered / 100 * 95), "{pump:?} of {offered}");
    bed.assert_whole();
    let sockets = |bed: &mut Bed| {
        bed.pair.world.agent(entry).workers.iter().map(|it| it.addresses().transport.len()).sum::<usize>()
    };
    assert!(sockets(&mut bed) <= 4 + 2 + 2 * 4, "old sockets are closed: {}", sockets(&mut bed));
}

#[test]
fn ports_change_under_load_and_nothing_is_lost_over_ipv4() {
    under_load(9900, (1, 1), false);
    under_load(9901, (2, 2), false);
}

#[test]
fn ports_change_under_load_and_nothing_is_lost_over_ipv6() {
    under_load(9902, (1, 1), true);
    under_load(9903, (2, 1), true);
}

#[test]
fn a_single_lane_that_is_idle_for_a_while_changes_its_port_and_carries_what_comes_then() {
    let mut bed = Bed::new(9910, (1, 1), 1, false, "10s");
    for _ in 0..30 {
        bed.run(SECOND / 10, true);
        bed.run(37 * SECOND / 10, false);
    }
    bed.assert_whole();
    let entry = bed.pair.entry;
    assert!(bed.pair.world.metric(entry, LANE_HOPS) >= 10);
}

#[test]
fn a_reload_begins_and_ends_the_changes() {
    let mut bed = Bed::new(9920, (2, 2), 2, false, "off");
    let entry = bed.pair.entry;
    let hops = |bed: &mut Bed| [LANE_HOPS, CONNECTION_HOPS].map(|name| bed.pair.world.metric(entry, name));
    bed.run(30 * SECOND, true);
    assert_eq!(hops(&mut bed), [0, 0]);
    let with = bed.pair.entry_toml.replace("\"off\"", "\"5s\"");
    bed.pair.world.reload(entry, &with).unwrap();
    bed.run(31 * SECOND, true);
    let [lanes, connections] = hops(&mut bed);
    assert!(lanes >= 10 && connections >= 5, "{lanes} lanes, {connections} connections");
    let without = bed.pair.entry_toml.clone();
    bed.pair.world.reload(entry, &without).unwrap();
    bed.run(30 * SECOND, true);
    assert_eq!(hops(&mut bed), [lanes, connections]);
    bed.assert_whole();
}

#[test]
fn old_ports_are_read_until_what_was_sent_there_has_come() {
    // The exit learns of each new port late: what it sends meanwhile goes to the old one.
    let late = Duration::from_millis(400);
    let mut bed = Bed::new(9930, (1, 1), 2, false, "5s");
    bed.pair.world.set_path(ENTRY, EXIT, NetworkPath::with_delay(late));
    bed.forward();
    bed.run(40 * SECOND, true);
    let entry = bed.pair.entry;
    assert!(bed.pair.world.metric(entry, LANE_HOPS) >= 10);
    bed.assert_whole();
}

#[test]
fn the_remote_port_changes_too_and_each_answer_comes_from_the_port_that_was_sent_to() {
    for (seed, workers) in [(9940, (1, 1)), (9941, (2, 2)), (9942, (1, 3))] {
        let ports: Vec<String> = (20_000..20_006).map(|port| format!("\"{EXIT}:{port}\"")).collect();
        let at = [ports.join(", "), format!("{EXIT}:20000-20005")];
        let mut bed = Bed::between(seed, workers, 2, &at, "5s");
        bed.forward();
        let (entry, mut remote, mut control) = (bed.pair.entry, BTreeSet::new(), BTreeSet::new());
        for _ in 0..120 {
            bed.run(SECOND, true);
            let workers = &bed.pair.world.agent(entry).workers;
            let slots = workers.iter().flat_map(|worker| worker.lanes().iter());
            remote.extend(slots.filter_map(|(_, slot)| slot.path()).map(|path| path.destination.port()));
            let exit = bed.pair.exit;
            control.extend(bed.pair.world.peer(exit).address.map(|address| address.port()));
        }
        bed.assert_whole();
        assert_eq!(remote.into_iter().collect::<Vec<_>>(), (20_000..20_006).collect::<Vec<_>>());
        assert!(control.len() >= 20, "the control connection moved: {control:?}");
        let suspected =
            bed.pair.world.metric(entry, "culvert_sessions_suspected_total{reason=\"control_dead\"}");
        assert_eq!(suspected, 0);
    }
}

/// The rate of the link in both directions, in bits per second.
const LINK_BITS: u64 = 20_000_000;

/// Bytes that a forward carries each way in half a minute over a full link: out of the first direction, then the other.
fn carried(seed: u64, is_ipv6: bool, hop: &str) -> [u64; 2] {
    [0, 1].map(|way: usize| {
        let mut bed = Bed::new(seed + way as u64, (1, 1), 1, is_ipv6, hop);
        let link = Parameters {
            rate_bits: Some(LINK_BITS),
            queue_bytes: bytes_at(LINK_BITS, Duration::from_millis(50)),
            delay: Duration::from_millis(10),
            ..Parameters::OPEN
        };
        let [out, back] = [0, 1].map(|way| {
            let bottleneck = Some(bed.pair.world.add_bottleneck(link, seed + way));
            NetworkPath { bottleneck, ..NetworkPath::with_delay(Duration::ZERO) }
        });
        for (one, other) in [(ENTRY, EXIT), (ENTRY_6, EXIT_6)] {
            bed.pair.world.set_path(one, other, out);
            bed.pair.world.set_path(other, one, back);
        }
        bed.forward();
        let mut pump = bed.pump.take().expect("it is open");
        let [from, to] = if way == 0 { [0, 1] } else { [1, 0] };
        let (chunk, mut buffer, mut bytes) = ([7; 16_384], [0; 16_384], 0);
        // The first seconds find the rate.
        for step in 0..35_000_u32 {
            while pump.ends[from].write(&chunk).is_ok_and(|count| count > 0) {}
            bed.pair.world.run(Duration::from_millis(1));
            while let Ok(count @ 1..) = pump.ends[to].read(&mut buffer) {
                bytes += if step < 5_000 { 0 } else { count as u64 };
            }
        }
        bytes
    })
}

#[test]
fn a_forward_over_a_full_link_is_hardly_slower() {
    for (seed, is_ipv6) in [(9950, false), (9960, true)] {
        let (without, with) = (carried(seed, is_ipv6, "off"), carried(seed, is_ipv6, "10s"));
        for (way, (without, with)) in ["up", "down"].iter().zip(without.into_iter().zip(with)) {
            let share = with as f64 / without as f64;
            let mbit = without * 8 / 30 / 1_000_000;
            println!("{way}, IPv6 {is_ipv6}: {share:.3} of {mbit} Mbit/s");
            assert!(share >= 0.95, "{way}, IPv6 {is_ipv6}: {share:.3} of {mbit} Mbit/s");
        }
    }
}

#[test]
fn a_peer_whose_address_changes_all_the_time_costs_the_exit_no_more() {
    let mut bed = Bed::new(9970, (1, 1), 2, false, "off");
    for (one, other) in [(ENTRY, EXIT), (EXIT, ENTRY)] {
        bed.pair.world.set_path(one, other, NetworkPath::with_delay(Duration::from_micros(500)));
    }
    let exit = bed.pair.exit;
    let (clients, mut number) = (bed.flows.len() as u64, 0);
    // What comes within a second, and the most that a turn of the exit had to do.
    let mut second = |bed: &mut Bed, moves: bool| {
        bed.pair.world.agent(exit).most_work();
        let mut came = 0;
        for step in 0..1_000 {
            // Answers to the address before are lost.
            if moves && step % 5 == 0 {
                bed.pair.world.rebind(ENTRY, ENTRY);
            }
            number += 1;
            bed.flows.iter_mut().for_each(|flow| flow.send(INGRESS, &numbered(number)));
            bed.pair.world.run(Duration::from_millis(1));
            bed.pair.serve();
            came += bed.flows.iter_mut().map(|flow| flow.receive().len() as u64).sum::<u64>();
        }
        (came, bed.pair.world.agent(exit).most_work())
    };
    second(&mut bed, false);
    let (_, quiet) = second(&mut bed, false);
    let lanes = bed.pair.world.agent(exit).lanes();
    let moves = ["lane", "control"].map(|what| format!("culvert_path_moves_total{{what=\"{what}\"}}"));
    let counts = |bed: &mut Bed| moves.clone().map(|name| bed.pair.world.metric(exit, &name));
    let before = counts(&mut bed);
    let attacked: Vec<_> = (0..5).map(|_| second(&mut bed, true).1).collect();
    let after = counts(&mut bed);
    println!("moves of lanes and connections: {before:?}, then {after:?}; {quiet:?}, then {attacked:?}");
    // Each of two lanes had 1,000 changes: it moves after 1.5 probe timeouts of silence, so most of them are over before.
    assert!(after[0] - before[0] <= 2 * 1_000 / 4, "lanes follow each change");
    for work in &attacked {
        assert!(
            work.work <= 4 * quiet.work.max(50) && work.quic_packets <= 20 && work.opened == 0,
            "{quiet:?}, then {work:?}"
        );
    }
    assert!(bed.pair.world.agent(exit).lanes() <= 2 * lanes, "no state is left");
    second(&mut bed, false);
    second(&mut bed, false);
    let (came, _) = second(&mut bed, false);
    assert!(came >= clients * 950, "it goes on afterwards: {came}");
}
