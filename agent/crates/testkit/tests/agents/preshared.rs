//! Preshared keys: lanes need the key of both ends, which find the one in common, part without one, and change it without a loss.

use std::{fs, os::unix::fs::PermissionsExt, path::PathBuf, time::Duration};

use dataplane::relay::DropReason;
use gate::preshared::PresharedKey;
use tempfile::TempDir;
use wire::messages::{CloseReason, Features, Hello, KeyProof, Message};

use crate::{
    INGRESS, Pair,
    flood::{ECHO, GateFlood, Log, dial},
    harness::Udp,
    malicious::MaliciousPeer,
    number_of, numbered,
};

const MS: Duration = Duration::from_millis(1);

/// Files with preshared keys.
struct Files(TempDir);

impl Files {
    fn new() -> Self {
        let files = Self(tempfile::tempdir().unwrap());
        for name in ["old", "new", "other"] {
            PresharedKey::generate().unwrap().write_new(&files.path(name)).unwrap();
        }
        files
    }

    fn path(&self, name: &str) -> PathBuf {
        self.0.path().join(name)
    }

    fn key(&self, name: &str) -> PresharedKey {
        PresharedKey::load(&self.path(name)).unwrap()
    }

    /// The line of a `[[peer]]` that names these files; none without any.
    fn line(&self, names: &[&str]) -> String {
        let quoted: Vec<String> = names.iter().map(|name| format!("{:?}", self.path(name))).collect();
        match &*quoted {
            [] => String::new(),
            [one] => format!("preshared_key_file = {one}\n"),
            several => format!("preshared_key_file = [{}]\n", several.join(", ")),
        }
    }
}

/// A pair under a flow of which nothing may be lost.
struct Case {
    pair: Pair,
    files: Files,
    steady: Udp,
    next: u32,
    answered: u32,
    base: [String; 2],
}

impl Case {
    /// With these keys at the entry and at the exit.
    fn new(seed: u64, workers: (u8, u8), entry: &[&str], exit: &[&str]) -> Self {
        let files = Files::new();
        let lines = [files.line(entry), files.line(exit)];
        let mut pair = Pair::with_workers(seed, workers, &lines[0], &lines[1]);
        let base = [&pair.entry_toml, &pair.exit_toml].map(|toml| toml.replace("preshared_key_file", "#"));
        let steady = pair.client(1000);
        Self { pair, files, steady, next: 0, answered: 0, base }
    }

    /// The same, connected with `lanes` lanes.
    fn connected(seed: u64, workers: (u8, u8), keys: &[&str]) -> Self {
        let mut case = Self::new(seed, workers, keys, keys);
        case.pair.wait_for_lanes(usize::from(workers.0.max(workers.1)));
        case
    }

    fn ends(&self) -> [usize; 2] {
        [self.pair.entry, self.pair.exit]
    }

    /// Lets time pass under a flow of one datagram per millisecond, of which all come back in order.
    fn run(&mut self, milliseconds: u32) {
        for _ in 0..milliseconds {
            self.steady.send(INGRESS, &numbered(self.next));
            self.next += 1;
            self.pair.run_served(MS);
            for (_, payload) in self.steady.receive() {
                assert_eq!(number_of(&payload), self.answered, "in order, and none is missing");
                self.answered += 1;
            }
        }
    }

    /// Reloads one end, 0 or 1, with these keys.
    fn reload(&mut self, end: usize, keys: &[&str]) {
        let toml = format!("{}\n{}", self.base[end], self.files.line(keys));
        self.pair.world.reload(self.ends()[end], &toml).unwrap();
    }

    fn in_use(&mut self) -> [Option<usize>; 2] {
        self.ends().map(|place| self.pair.world.peer(place).preshared_key_in_use)
    }

    fn metrics(&mut self, series: &str) -> [u64; 2] {
        self.ends().map(|place| self.pair.world.metric(place, series))
    }

    fn metric_of_entry(&mut self) -> u64 {
        self.pair.world.metric(self.pair.entry, "culvert_peer_preshared_key{peer=\"exit\"}")
    }

    fn refusals(&mut self, reason: &str) -> [bool; 2] {
        let series = format!("culvert_preshared_key_refusals_total{{reason=\"{reason}\"}}");
        self.metrics(&series).map(|count| count > 0)
    }

    fn are_connected(&mut self) -> [bool; 2] {
        self.ends().map(|place| self.pair.world.peer(place).connected())
    }

    /// All that was sent came back, on the one connection.
    fn assert_nothing_was_lost(&mut self) {
        self.pair.run_served(50 * MS);
        self.answered += self.steady.receive().len() as u32;
        assert_eq!(self.next, self.answered);
        assert_eq!(self.metrics("culvert_handshakes_total{outcome=\"established\"}"), [1, 1]);
        for peer in self.pair.assert_balanced() {
            assert_eq!(peer.uplink.account.dropped_total() + peer.downlink.account.dropped_total(), 0);
        }
    }
}

#[test]
fn two_ends_with_a_key_use_it() {
    for (seed, workers) in [(1500, (1, 1)), (1501, (2, 2)), (1502, (1, 3))] {
        let mut case = Case::connected(seed, workers, &["old"]);
        case.run(100);
        assert_eq!(case.in_use(), [Some(1); 2]);
        assert_eq!(case.metric_of_entry(), 1);
        case.assert_nothing_was_lost();
    }
    let mut case = Case::connected(1503, (1, 1), &[]);
    case.run(100);
    assert_eq!(case.in_use(), [None; 2]);
    assert_eq!(case.metric_of_entry(), 0);
    case.assert_nothing_was_lost();
}

#[test]
fn a_key_is_changed_without_losing_a_datagram() {
    for (seed, workers) in [(1510, (1, 1)), (1511, (2, 2)), (1512, (2, 3))] {
        for first in [0, 1] {
            let mut case = Case::connected(seed, workers, &["old"]);
            let lanes = u64::from(workers.0.max(workers.1));
            case.run(300);
            case.reload(first, &["new", "old"]);
            case.run(300);
            let old_in_use = [[2, 1], [1, 2]][first].map(Some);
            assert_eq!(case.in_use(), old_in_use, "the other end does not have the new one");
            let rekeyed = "culvert_lanes_reopened_total{reason=\"rekeyed\"}";
            assert_eq!(case.metrics(rekeyed), [0, 0]);
            case.reload(1 - first, &["new", "old"]);
            case.run(300);
            assert_eq!(case.in_use(), [Some(1); 2]);
            assert_eq!(case.metrics(rekeyed), [lanes, 0], "every lane, by the dialler");
            case.reload(first, &["new"]);
            case.run(50);
            case.reload(1 - first, &["new"]);
            case.run(300);
            assert_eq!(case.in_use(), [Some(1); 2]);
            assert_eq!(case.metrics(rekeyed), [lanes, 0], "they have the new one already");
            let up = case.ends().map(|place| case.pair.world.peer(place).lanes_up as u64);
            assert_eq!(up, [lanes; 2]);
            case.assert_nothing_was_lost();
        }
    }
}

#[test]
fn keys_may_change_again_before_the_lanes_have_followed() {
    let mut case = Case::connected(1520, (2, 2), &["old", "new"]);
    // Lanes are too young to be replaced at once.
    for keys in [["new", "old"], ["old", "new"], ["new", "old"]] {
        case.reload(0, &keys);
        case.run(7);
    }
    case.run(700);
    assert_eq!(case.in_use(), [Some(1), Some(2)], "the dialler's preference");
    case.reload(1, &["new"]);
    case.reload(0, &["new"]);
    case.run(700);
    assert_eq!(case.in_use(), [Some(1); 2]);
    case.assert_nothing_was_lost();
}

#[test]
fn a_file_with_another_key_is_noticed_by_the_reload() {
    let mut case = Case::connected(1521, (1, 1), &["new", "old"]);
    case.run(300);
    let replaced = case.files.path("new");
    fs::remove_file(&replaced).unwrap();
    fs::copy(case.files.path("other"), &replaced).unwrap();
    assert_eq!(fs::metadata(&replaced).unwrap().permissions().mode() & 0o777, 0o600);
    let toml = format!("{}\n{}", case.base[0], case.files.line(&["new", "old"]));
    let changes = case.pair.world.reload(case.pair.entry, &toml).unwrap();
    assert_eq!(changes.len(), 1, "{changes:?}");
    assert_eq!(changes[0].what, "peer \"exit\": preshared_key_file");
    case.run(400);
    assert_eq!(case.in_use(), [Some(2); 2], "the old one is left");
    case.assert_nothing_was_lost();
}

#[test]
fn without_a_key_in_common_nothing_connects_and_both_logs_say_why() {
    let (ours, theirs) = (
        "the peer closed the connection: no preshared key in common (remedy: `preshared_key_file` is set here only",
        "the peer closed the connection: no preshared key in common (remedy: it has a preshared key for us",
    );
    for (seed, entry, exit, reason, words) in [
        (
            1530,
            &["old"][..],
            &[][..],
            "unexpected",
            [ours, "the peer has a preshared key for us, and we have none"],
        ),
        (
            1531,
            &[],
            &["old"],
            "missing",
            [theirs, "the peer has no preshared key for us, and we have one for it"],
        ),
        (
            1532,
            &["old", "other"],
            &["new"],
            "different",
            [ours, "the peer has another preshared key than we have"],
        ),
    ] {
        let mut case = Case::new(seed, (1, 2), entry, exit);
        let log = Log::default();
        log.record(|| {
            for _ in 0..300 {
                case.steady.send(INGRESS, &numbered(0));
                case.pair.run_served(10 * MS);
            }
        });
        let text = log.text();
        for words in words {
            assert_eq!(text.matches(words).count(), 1, "once in a while: {words}\n{text}");
        }
        assert_eq!(case.refusals(reason), [false, true]);
        assert_eq!(case.are_connected(), [false; 2]);
        assert_eq!(case.steady.receive().len(), 0);
        let errors = case.ends().map(|place| case.pair.world.peer(place).last_error.unwrap().failure);
        assert!(errors.iter().all(|error| !error.causes.is_empty()), "{errors:?}");
        case.pair.assert_balanced();
        // The operator follows the advice.
        case.reload(0, &["new"]);
        case.reload(1, &["new"]);
        case.pair.wait_for_lanes(1);
        assert_eq!(case.in_use(), [Some(1); 2]);
        case.steady.send(INGRESS, &numbered(1));
        case.pair.run_served(50 * MS);
        assert!(!case.steady.receive().is_empty());
    }
}

#[test]
fn a_reload_that_adds_or_removes_a_key_at_one_end_parts_them() {
    for end in [0, 1] {
        let mut case = Case::connected(1540 + end as u64, (2, 1), &[]);
        case.run(100);
        case.reload(end, &["old"]);
        case.pair.run_served(100 * MS);
        assert_eq!(case.are_connected(), [false; 2], "never silently without");
        assert!(case.refusals("missing")[end]);
        case.reload(1 - end, &["old"]);
        case.pair.wait_for_lanes(2);
        assert_eq!(case.in_use(), [Some(1); 2]);
        case.reload(1 - end, &[]);
        case.pair.run_served(100 * MS);
        assert_eq!(case.are_connected(), [false; 2]);
        assert!(case.refusals("unexpected")[1 - end]);
        case.reload(end, &[]);
        case.pair.wait_for_lanes(2);
        assert_eq!(case.in_use(), [None; 2]);
        case.pair.assert_balanced();
    }
}

/// An exit that has a preshared key for a peer with a program of its own.
struct Foreign {
    flood: GateFlood,
    files: Files,
}

impl Foreign {
    fn new(seed: u64) -> Self {
        let files = Files::new();
        Self { flood: GateFlood::new(seed, &files.line(&["new", "old"])), files }
    }

    /// The peer says hello with `max_lanes` and the proofs of these keys.
    fn say_hello(&mut self, max_lanes: u8, features: Features, keys: &[&str]) {
        self.flood.malicious.preshared = keys.iter().map(|name| self.files.key(name)).collect();
        let Message::Hello(hello) = MaliciousPeer::hello_with_lanes(max_lanes) else { panic!("a hello") };
        self.flood.malicious.say(&Message::Hello(Hello { features, ..hello }));
        self.flood.run(50);
    }

    fn refusals(&mut self, reason: &str) -> u64 {
        self.flood.metric(&format!("culvert_preshared_key_refusals_total{{reason=\"{reason}\"}}"))
    }

    fn lanes_up(&mut self) -> usize {
        self.flood.pair.world.peers(self.flood.pair.exit)[1].lanes_up
    }
}

#[test]
fn a_lane_whose_secrets_lack_the_key_never_opens() {
    for mixes in [true, false] {
        let mut foreign = Foreign::new(1550);
        foreign.say_hello(64, Features::PRESHARED_KEYS, &["old"]);
        foreign.flood.malicious.mixes = mixes;
        foreign.flood.malicious.ask_for_lane(0, 1);
        foreign.flood.run(100);
        assert_eq!(foreign.flood.malicious.lanes(), 1, "accepted: it names a key that the exit has");
        assert_eq!(foreign.lanes_up(), usize::from(mixes));
        let failed = foreign.flood.metric("culvert_lane_refused_packets_total{reason=\"authentication\"}");
        assert_eq!(failed > 0, !mixes);
    }
}

#[test]
fn a_lane_without_a_key_or_with_an_unknown_one_is_refused() {
    let mut foreign = Foreign::new(1551);
    foreign.say_hello(64, Features::PRESHARED_KEYS, &["new", "old"]);
    for (epoch, named) in [(1, None), (2, Some(KeyProof([9; 16])))] {
        foreign.flood.malicious.ask_for_lane_with(0, epoch, named);
    }
    foreign.flood.run(50);
    assert_eq!(foreign.flood.malicious.lanes(), 0);
    assert_eq!(foreign.flood.metric("culvert_lanes_reopened_total{reason=\"refused\"}"), 2);
    // The one before the newest is good, too: the dialler may not have followed yet.
    let old = foreign.flood.malicious.proof(&foreign.files.key("old"));
    foreign.flood.malicious.ask_for_lane_with(0, 3, Some(old));
    foreign.flood.run(50);
    assert_eq!(foreign.flood.malicious.lanes(), 1);
}

#[test]
fn standard_mode_is_refused_where_there_is_a_key() {
    let mut foreign = Foreign::new(1552);
    let log = Log::default();
    log.record(|| foreign.say_hello(0, Features::PRESHARED_KEYS, &["new"]));
    assert!(log.text().contains("(standard mode)") && log.text().contains("remedy: have it open lanes"));
    assert_eq!(foreign.refusals("no_lanes"), 1);
    foreign.flood.assert_closed(CloseReason::PresharedKey);
}

#[test]
fn software_that_knows_no_keys_is_refused() {
    let mut foreign = Foreign::new(1553);
    let log = Log::default();
    log.record(|| foreign.say_hello(64, Features::default(), &[]));
    assert!(log.text().contains("knows no preshared keys") && log.text().contains("a newer version there"));
    assert_eq!((foreign.refusals("unsupported"), foreign.refusals("missing")), (1, 0));
    foreign.flood.assert_closed(CloseReason::PresharedKey);
}

#[test]
fn payloads_that_tls_alone_protects_are_dropped_and_counted() {
    let mut foreign = Foreign::new(1554);
    foreign.say_hello(64, Features::PRESHARED_KEYS, &["new"]);
    foreign.flood.malicious.ask_for_lane(0, 1);
    foreign.flood.run(100);
    let opening = [&foreign.flood.open(0, ECHO)[..], b"opens"].concat();
    foreign.flood.malicious.send_plain(&opening);
    foreign.flood.run(50);
    let exit = foreign.flood.pair.exit;
    let peer = foreign.flood.pair.world.peers(exit).swap_remove(1);
    assert_eq!(peer.downlink.account.dropped[DropReason::NotAllowed], 1);
    assert!(peer.downlink.balances && peer.flows == 0, "{peer:?}");
    foreign.flood.send(&opening);
    foreign.flood.run(50);
    assert_eq!(foreign.flood.pair.world.peers(exit)[1].flows, 1, "on the lane it is welcome");
}

#[test]
fn wrong_proofs_cost_a_line_in_a_while_and_nobody_else_anything() {
    let mut foreign = Foreign::new(1555);
    let log = Log::default();
    log.record(|| {
        for round in 0..5 {
            let GateFlood { pair, malicious, host, identity, .. } = &mut foreign.flood;
            *malicious = dial(pair, host, identity, 1 + round, None);
            foreign.flood.run(50);
            foreign.say_hello(64, Features::PRESHARED_KEYS, &["other", "other"]);
            assert_eq!(foreign.flood.malicious.closed(), Some(CloseReason::PresharedKey));
        }
    });
    assert_eq!(log.text().matches("another preshared key than we have").count(), 1, "{}", log.text());
    assert_eq!(foreign.refusals("different"), 5);
    foreign.flood.assert_innocent_is_unharmed();
}

#[test]
fn a_peer_that_takes_its_key_back_is_cut_off() {
    let mut foreign = Foreign::new(1556);
    foreign.say_hello(64, Features::PRESHARED_KEYS, &["new"]);
    foreign.flood.malicious.ask_for_lane(0, 1);
    foreign.flood.run(100);
    foreign.flood.malicious.say(&Message::PresharedKeys(Vec::new()));
    foreign.flood.run(50);
    assert_eq!(foreign.refusals("missing"), 1);
    foreign.flood.assert_closed(CloseReason::PresharedKey);
    foreign.flood.assert_innocent_is_unharmed();
}
