//! What travels on two lines: nothing is lost while one of them fails, nothing is delivered twice, and each packet is in a count.

use std::{net::IpAddr, time::Duration};

use dataplane::lines::CopyCounts;
use ip::model::Recipe;
use wire::{context::Context, messages::Features};

use crate::{
    ENTRY, EXIT, Pair,
    flood::{ECHO, GateFlood},
    harness::{NetworkPath, Udp},
    number_of, numbered,
    roaming::{ENTRY_2, LAN, SECOND},
    tunnel::{BEHIND_ENTRY, BEHIND_EXIT, ENTRY_TUN, EXIT_TUN, Given, How, Tunnel},
};

const MILLISECOND: Duration = Duration::from_millis(1);

/// The lines of the entry, by their numbers.
const LINES: [IpAddr; 2] = [ENTRY, ENTRY_2];

/// The keys of the two lines, of which the second one has these, too.
fn uplinks(second: &str) -> String {
    format!(
        "[[transport.uplink]]\nname = \"one\"\nsource = \"{ENTRY}\"\n[[transport.uplink]]\nname = \"other\"\n\
         source = \"{ENTRY_2}\"\n{second}\n"
    )
}

/// How a line fails.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Failure {
    /// It carries nothing, and nobody says so.
    Silent,
    /// It carries nothing upwards, or nothing downwards.
    Up,
    Down,
    /// The entry's kernel refuses packets.
    Told,
    /// It loses a fifth of all packets in both directions.
    Lossy,
}

/// A flow of 1,000 datagrams a second whose service travels on two lines, and its answers.
struct Bed {
    pair: Pair,
    /// The lines while they are well.
    paths: [NetworkPath; 2],
    client: Udp,
    sent: u32,
    /// The numbers as they came to the service, and back to the client.
    there: Vec<u32>,
    back: Vec<u32>,
}

impl Bed {
    /// With these workers, one-way delays in milliseconds, keys of both peers and of the second line.
    fn new(seed: u64, workers: (u8, u8), delays: [u64; 2], peers: &str, second: &str) -> Self {
        let entry = format!("lanes = 2\n{peers}\n{}", uplinks(second));
        let mut pair = Pair::with_workers(seed, workers, &entry, peers);
        pair.world.set_addresses(ENTRY, &[ENTRY, ENTRY_2, LAN.ip()]);
        pair.world.weather.borrow_mut().delay = Duration::ZERO;
        let paths = delays.map(|delay| NetworkPath::with_delay(Duration::from_millis(delay)));
        let client = pair.client(1999);
        let bed = Self { pair, paths, client, sent: 0, there: Vec::new(), back: Vec::new() };
        LINES.into_iter().zip(bed.paths).for_each(|(line, path)| bed.set(line, [path; 2]));
        bed
    }

    fn ready(mut self) -> Self {
        self.pair.wait_for_lanes(4);
        self
    }

    /// Sets the path of a line upwards and downwards.
    fn set(&self, line: IpAddr, [up, down]: [NetworkPath; 2]) {
        self.pair.world.set_path(line, EXIT, up);
        self.pair.world.set_path(EXIT, line, down);
    }

    fn fail(&self, line: IpAddr, failure: Failure) {
        let well = self.paths[usize::from(line == ENTRY_2)];
        let (cut, lossy) = (NetworkPath { is_cut: true, ..well }, NetworkPath { loss: 200, ..well });
        self.set(
            line,
            match failure {
                Failure::Silent | Failure::Told => [cut; 2],
                Failure::Up => [cut, well],
                Failure::Down => [well, cut],
                Failure::Lossy => [lossy; 2],
            },
        );
        if failure == Failure::Told {
            let left = LINES.into_iter().filter(|other| *other != line).chain([LAN.ip()]);
            self.pair.world.set_addresses(LAN.ip(), &left.collect::<Vec<_>>());
        }
    }

    fn mend(&self, line: IpAddr) {
        self.set(line, [self.paths[usize::from(line == ENTRY_2)]; 2]);
        self.pair.world.set_addresses(LAN.ip(), &[ENTRY, ENTRY_2, LAN.ip()]);
    }

    /// The flow talks for so long.
    fn talk(&mut self, time: Duration) {
        for _ in 0..time.as_millis() {
            self.sent += 1;
            self.client.send(LAN, &numbered(self.sent));
            self.run(MILLISECOND);
        }
    }

    /// What is under way arrives.
    fn settle(&mut self) {
        for _ in 0..300 {
            self.run(MILLISECOND);
        }
    }

    fn run(&mut self, time: Duration) {
        self.pair.world.run(time);
        for (from, payload) in self.pair.echo.receive() {
            self.there.push(number_of(&payload));
            self.pair.echo.send(from, &payload);
        }
        self.back.extend(self.client.receive().iter().map(|(_, payload)| number_of(payload)));
    }

    /// The counts of the entry and of the exit.
    fn copies(&mut self) -> [CopyCounts; 2] {
        [self.pair.entry, self.pair.exit].map(|place| self.pair.world.peer(place).copies.unwrap_or_default())
    }

    /// All that was sent has come once, in both directions, and none was overtaken by more than `most` others.
    fn assert_whole(&self, most: u32, why: &str) {
        for (way, numbers) in [("there", &self.there), ("back", &self.back)] {
            let mut sorted = numbers.clone();
            sorted.sort_unstable();
            let missing: Vec<u32> = (1..=self.sent).filter(|it| sorted.binary_search(it).is_err()).collect();
            assert!(
                missing.is_empty(),
                "{why}: {} of {} are lost {way}: {missing:?}",
                missing.len(),
                self.sent
            );
            assert_eq!(sorted.len(), self.sent as usize, "{why}: some came twice {way}");
            let mut highest = 0;
            for number in numbers {
                highest = highest.max(*number);
                assert!(highest - number <= most, "{why}: {number} came {way} after {highest}");
            }
        }
    }
}

/// What all services are that both ends call by this name.
const REDUNDANT: &str = "redundant = { services = [\"echo\"] }";

#[test]
fn a_flow_loses_nothing_while_either_line_fails_in_any_way() {
    let failures = [Failure::Silent, Failure::Up, Failure::Down, Failure::Told, Failure::Lossy];
    let workers = [(1, 1), (2, 2), (1, 2), (3, 2)].into_iter().cycle();
    for ((seed, failure), workers) in (10_000..).zip(failures.repeat(2)).zip(workers) {
        let line = LINES[(seed as usize / failures.len()) % 2];
        let mut bed = Bed::new(seed, workers, [10, 10], REDUNDANT, "").ready();
        bed.talk(2 * SECOND);
        bed.fail(line, failure);
        bed.talk(3 * SECOND);
        bed.mend(line);
        bed.talk(2 * SECOND);
        bed.settle();
        let why = format!("seed {seed}, {failure:?} of {line}");
        bed.assert_whole(5, &why);
        let [entry, exit] = bed.copies();
        println!("{why}: {entry:?}, {exit:?}");
        for (from, to) in [(entry, exit), (exit, entry)] {
            assert_eq!(from.numbered, to.first, "{why}: none is lost");
            assert!(from.sent > 1_900 && to.duplicates <= from.sent, "{why}");
            assert_eq!(to.old, 0, "{why}");
            // Each payload either has a copy, or travels alone.
            assert_eq!(from.sent + from.alone, u64::from(bed.sent), "{why}");
        }
        bed.pair.assert_balanced();
    }
}

#[test]
fn each_packet_is_in_a_count_and_the_account_has_each_payload_once() {
    for (seed, workers, delays) in [
        (10_020, (1, 1), [10, 10]),
        (10_021, (2, 2), [5, 60]),
        (10_022, (2, 3), [40, 10]),
        (10_023, (3, 2), [10, 30]),
    ] {
        let mut bed = Bed::new(seed, workers, delays, REDUNDANT, "").ready();
        bed.talk(SECOND);
        let early = bed.copies();
        bed.talk(2 * SECOND);
        bed.settle();
        // A payload is overtaken by no more than come within the difference of the delays.
        bed.assert_whole(delays[0].abs_diff(delays[1]) as u32 + 5, &format!("seed {seed}"));
        let [entry, exit] = bed.copies();
        println!("seed {seed}: {entry:?}, {exit:?}");
        for (from, to) in [(entry, exit), (exit, entry)] {
            assert_eq!(from.numbered + from.sent, to.first + to.duplicates + to.old, "seed {seed}");
            assert_eq!(from.sent + from.alone, 3_000, "seed {seed}");
            assert_eq!(from.sent_bytes, 600 * from.sent, "seed {seed}");
        }
        // The slower line may come up later.
        assert_eq!([entry.alone, exit.alone], early.map(|counts| counts.alone), "seed {seed}");
        assert!(entry.alone <= 100, "seed {seed}: {entry:?}");
        for peer in bed.pair.assert_balanced() {
            for account in [peer.uplink.account, peer.downlink.account] {
                assert_eq!((account.received, account.delivered), (3_000, 3_000), "seed {seed}");
            }
        }
        let series = "culvert_copies_duplicate_total{peer=\"entry\"}";
        assert_eq!(bed.pair.world.metric(bed.pair.exit, series), exit.duplicates);
    }
}

#[test]
fn both_lines_are_charged_and_what_waits_for_the_rate_travels_twice_too() {
    let peers = format!("{REDUNDANT}\nrate = \"40Mbit\"");
    let mut bed = Bed::new(10_030, (2, 2), [10, 10], &peers, "").ready();
    bed.talk(2 * SECOND);
    bed.fail(ENTRY, Failure::Silent);
    bed.talk(2 * SECOND);
    bed.settle();
    bed.assert_whole(30, "under a rate");
    let [entry, _] = bed.copies();
    assert!(entry.sent > 1_900, "{entry:?}");
    bed.pair.assert_balanced();
    // 600 bytes 1,000 times a second are some 5.4 Mbit/s with their headers, and twice that with copies.
    for (redundant, passes) in [("", true), (REDUNDANT, false)] {
        let peers = format!("{redundant}\nrate = \"8Mbit\"");
        let mut bed = Bed::new(10_031, (1, 1), [10, 10], &peers, "").ready();
        bed.talk(3 * SECOND);
        bed.settle();
        assert_eq!(bed.there.len() == bed.sent as usize, passes, "{} of {}", bed.there.len(), bed.sent);
        bed.pair.assert_balanced();
    }
}

#[test]
fn a_metered_line_gets_copies_only_if_that_is_wanted() {
    for (seed, metered) in [(10_040, false), (10_041, true)] {
        let peers = format!("redundant = {{ services = [\"echo\"], metered = {metered} }}");
        let mut bed = Bed::new(seed, (1, 1), [10, 10], &peers, "cost = \"metered\"").ready();
        bed.talk(SECOND);
        bed.settle();
        bed.assert_whole(5, "two good lines");
        for copies in bed.copies() {
            let expected = if metered { [1_000, 0] } else { [0, 1_000] };
            assert_eq!([copies.sent, copies.alone], expected, "{copies:?}");
        }
        bed.pair.assert_balanced();
    }
}

#[test]
fn an_end_that_does_not_know_copies_gets_none() {
    let mut bed = Bed::new(10_050, (1, 1), [10, 10], REDUNDANT, "");
    let exit = bed.pair.exit;
    for worker in &mut bed.pair.world.agent(exit).workers {
        worker.withhold(Features::COPIES);
    }
    let mut bed = bed.ready();
    bed.talk(SECOND);
    bed.settle();
    bed.assert_whole(0, "as without copies");
    let [entry, exit] = bed.copies();
    assert_eq!((entry.numbered, entry.sent, exit.first, exit.duplicates), (0, 0, 0, 0));
    assert_eq!(entry.alone, 1_000, "the operator sees it");
    assert_eq!((exit.sent, entry.duplicates), (1_000, 1_000), "the exit may send copies");
    bed.pair.assert_balanced();
}

#[test]
fn a_reload_begins_and_ends_copies() {
    let mut bed = Bed::new(10_060, (2, 2), [10, 10], "", "").ready();
    bed.talk(SECOND);
    bed.settle();
    assert_eq!(bed.copies(), [CopyCounts::default(); 2]);
    let entry = bed.pair.entry;
    let plain = bed.pair.entry_toml.clone();
    let twice = plain.replace("lanes = 2\n", &format!("lanes = 2\n{REDUNDANT}\n"));
    bed.pair.world.reload(entry, &twice).unwrap();
    bed.talk(SECOND);
    bed.pair.world.reload(entry, &plain).unwrap();
    bed.talk(SECOND);
    bed.settle();
    let [counts, _] = bed.copies();
    assert!(counts.sent.abs_diff(1_000) < 10, "{counts:?}");
    bed.assert_whole(5, "over reloads");
}

/// An IP packet of a flow with this DSCP.
fn packet(flow: u8, dscp: u8, id: u16, how: How) -> Given {
    let payload = if let How::Super(_) = how { 900 } else { 160 };
    Given::new(&Recipe { flow, traffic_class: dscp << 2, id, payload, ..Recipe::UDP }, how)
}

#[test]
fn ip_packets_travel_twice_by_their_dscp_and_super_packets_as_well() {
    for (seed, workers) in [(10_070, (1, 1)), (10_071, (2, 2)), (10_072, (3, 2))] {
        let redundant = "redundant = { dscp = [46, 34] }";
        let entry = format!("{BEHIND_EXIT}\nlanes = 2\n{redundant}\n{ENTRY_TUN}\n{}", uplinks(""));
        let exit = format!("{BEHIND_ENTRY}\n{redundant}\n{EXIT_TUN}");
        let tunnel = Tunnel { pair: Pair::with_workers(seed, workers, &entry, &exit) };
        tunnel.pair.world.set_addresses(ENTRY, &[ENTRY, ENTRY_2]);
        let mut tunnel = tunnel.settled(4);
        let ends = tunnel.ends();
        let flows =
            [(1, 46, How::Partial), (2, 34, How::Super(300)), (3, 0, How::Complete), (4, 10, How::Partial)];
        let mut expected = Vec::new();
        for turn in 0..400 {
            if turn == 200 {
                let cut = NetworkPath { is_cut: true, ..NetworkPath::with_delay(5 * MILLISECOND) };
                for (from, to) in [(ENTRY_2, EXIT), (EXIT, ENTRY_2)] {
                    tunnel.pair.world.set_path(from, to, cut);
                }
            }
            for (flow, dscp, how) in flows {
                let given = packet(flow, dscp, turn, how);
                if dscp >= 34 {
                    expected.extend(given.packets());
                }
                tunnel.push(ends[0], (turn % u16::from(workers.0)) as u8, &given);
            }
            tunnel.run(5);
        }
        tunnel.run(300);
        let written = tunnel.written(ends[1]);
        let mut came: Vec<_> = written.into_iter().filter(|packet| packet[1] >> 2 >= 34).collect();
        came.sort();
        expected.sort();
        assert_eq!(came.len(), expected.len(), "seed {seed}");
        assert!(came == expected, "seed {seed}: they arrive unchanged, once");
        let [entry, exit] = ends.map(|place| tunnel.pair.world.peer(place).copies.unwrap_or_default());
        println!("seed {seed}: {entry:?}, {exit:?}");
        assert_eq!(
            entry.sent + entry.alone,
            4 * 400,
            "those of two flows, of which one gives three at a time"
        );
        assert!(entry.sent >= 4 * 200, "{entry:?}");
        assert_eq!(entry.numbered, exit.first, "seed {seed}");
        tunnel.assert_balanced([(1 + 3 + 1 + 1) * 400, 0]);
    }
}

#[test]
fn copies_that_nobody_sent_cost_their_sender_no_memory_of_ours_and_what_is_none_is_malformed() {
    let mut flood = GateFlood::with_lane(10_080, "");
    let copied = |series, number, inner: &[u8]| {
        [Context::Copied { series, number, payload_at: 0 }.encode().as_slice(), inner].concat()
    };
    let open = [&flood.open(0, ECHO)[..], b"hello"].concat();
    let count = |flood: &mut GateFlood, what: &str| {
        flood.metric(&format!("culvert_copies_{what}_total{{peer=\"rogue\"}}"))
    };
    // Each series is new, and so is each payload.
    for series in 0..500 {
        flood.send(&copied(series, u32::MAX - series, &open));
        flood.run(u64::from(series % 8 == 0));
    }
    flood.run(50);
    assert_eq!(count(&mut flood, "first"), 500);
    // Of those that are known nothing comes twice, nor what is older than the window.
    for number in [0, 5_000, 5_000, 4_999, 4_999, 904, 905, 905, 0, u32::MAX, u32::MAX] {
        flood.send(&copied(7_777, number, &open));
        flood.run(2);
    }
    flood.run(50);
    let counts = ["first", "duplicate", "old"].map(|what| count(&mut flood, what));
    assert_eq!(counts, [500 + 4, 3, 4]);
    let before = flood.dropped("malformed");
    let closed = Context::Closed(flood.malicious.flow(0)).encode().as_slice().to_vec();
    let inside: [&[u8]; 9] = [
        b"",
        &copied(1, 1, &open),
        &[12, 1, 0, 0, 0, 0, 0, 0, 2, 2],
        &[13, 1, 0, 1, 0xf0, 1, 0, 0, 0, 0],
        &[14, 1, 0, 0, 0, 0, 0, 1, 0],
        &closed,
        &[10, 2, 7, 0x4b, 0xb8, 0],
        &[11, 0, 0, 0, 0, 0],
        &[9, 1],
    ];
    for inner in inside {
        flood.send(&copied(8_888, 1, inner));
    }
    // A number that is cut off.
    flood.send(&[17, 1, 2, 3, 4, 5, 6, 7]);
    flood.run(50);
    assert_eq!(flood.dropped("malformed") - before, 10);
    assert_eq!(count(&mut flood, "first"), 504, "such frames take no number");
    assert_eq!(flood.malicious.closed(), None);
    flood.assert_innocent_is_unharmed();
}
