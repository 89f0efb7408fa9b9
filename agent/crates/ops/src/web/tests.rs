//! Screens of peers and their history, over a daemon of which the test says what it published.

use std::sync::Mutex;

use base::clock::{Clock, ManualClock};
use engine::{
    reach::Failure,
    status::{LastError, PeerRates, PeerState},
};
use serde_json::{Value, json};

use super::*;

#[derive(Default)]
struct Daemon {
    peers: Mutex<Vec<PeerBrief>>,
    asked: Mutex<usize>,
}

impl Figures for Daemon {
    fn published(&self) -> Vec<PeerBrief> {
        *panics::lock(&self.asked) += 1;
        panics::lock(&self.peers).clone()
    }

    fn asked(&self, _: &Scope) -> Status {
        Status::default()
    }
}

fn page(peers: Vec<PeerBrief>) -> (StatusPage, Arc<Daemon>, ManualClock) {
    let (daemon, clock) = (Arc::new(Daemon::default()), ManualClock::default());
    *panics::lock(&daemon.peers) = peers;
    let health = Arc::new(Health::new(1, clock.now()));
    (StatusPage::new(Arc::clone(&daemon) as _, health), daemon, clock)
}

fn peer(name: &str, state: PeerState) -> PeerBrief {
    PeerBrief { name: name.into(), state, ..PeerBrief::default() }
}

fn connected(name: &str, up: f64, rtt: f64) -> PeerBrief {
    let rates = PeerRates { uplink_bytes_per_second: up, ..PeerRates::default() };
    PeerBrief { rates: Some(rates), rtt_seconds: Some(rtt), ..peer(name, PeerState::Connected) }
}

fn failed(name: &str, reason: &str) -> PeerBrief {
    let failure = Arc::new(Failure { reason: reason.to_owned(), causes: Vec::new() });
    let last_error = Some(LastError { age_seconds: 1.0, failure });
    PeerBrief { last_error, ..peer(name, PeerState::Dialling) }
}

fn query(text: &str) -> PeersQuery {
    Query::parse(text).and_then(PeersQuery::new).unwrap_or_else(|error| panic!("{text}: {error}"))
}

/// The names of a screen.
fn names(page: &StatusPage, text: &str, now: Instant) -> Vec<String> {
    page.screen(&query(text), now).peers.columns.name.iter().map(ToString::to_string).collect()
}

/// A peer that has sent and received so much.
fn counted(name: &str, up: u64, down: u64, [sent, lost]: [u64; 2]) -> PeerBrief {
    PeerBrief {
        up_bytes: up,
        down_bytes: down,
        sent_packets: sent,
        lost_packets: lost,
        ..peer(name, PeerState::Connected)
    }
}

#[test]
fn a_screen_is_chosen_sorted_and_cut() {
    let address = Some("192.0.2.7:4433".parse().unwrap());
    let (page, _, clock) = page(vec![
        connected("c", 10.0, 0.2),
        peer("b", PeerState::Waiting),
        connected("a", 30.0, 0.1),
        failed("d", "no answer"),
        PeerBrief { address, software: Some("Other/1".into()), ..peer("e", PeerState::Dialling) },
    ]);
    let now = clock.now();
    for (text, expected) in [
        ("", "d e b a c"),
        ("order=desc", "a c b e d"),
        ("sort=name", "a b c d e"),
        ("sort=name&order=desc&rows=2", "e d"),
        ("sort=name&skip=2&rows=2", "c d"),
        ("sort=name&skip=900&rows=2", "e"),
        ("sort=up&order=desc&rows=2", "a c"),
        ("sort=rtt", "a c b d e"),
        ("sort=rtt&order=desc", "c a b d e"),
        ("show=down", "d e b"),
        ("show=failed", "d"),
        ("show=connected", "a c"),
        ("find=other%2F", "e"),
        ("find=192.0", "e"),
        ("find=A", "a"),
        ("find=nobody", ""),
        ("rows=0", ""),
    ] {
        assert_eq!(names(&page, text, now).join(" "), expected, "{text}");
    }
    let screen = page.screen(&query("find=d"), now).peers;
    assert_eq!((screen.matching, screen.sums.peers, screen.sums.connected, screen.sums.failed), (1, 5, 2, 1));
    assert_eq!(screen.sums.up, 40);
    assert_eq!(screen.columns.failure, [Some("no answer".to_owned())]);
}

#[test]
fn the_screens_one_after_the_other_are_the_whole_order() {
    let peers: Vec<PeerBrief> = (0..57_u64)
        .map(|number| connected(&format!("p{:02}", number * 20 % 57), (number % 7) as f64, 0.1))
        .collect();
    let (page, _, clock) = page(peers);
    for order in ["sort=name", "sort=up&order=desc", "sort=state&order=desc", "sort=mtu"] {
        let whole = names(&page, &format!("{order}&rows=100"), clock.now());
        assert_eq!(whole.len(), 57);
        for rows in [1, 10, 19, 56] {
            let skips = (0..57).step_by(rows);
            let screen = |skip| names(&page, &format!("{order}&rows={rows}&skip={skip}"), clock.now());
            assert_eq!(skips.flat_map(screen).collect::<Vec<_>>(), whole, "{order}, {rows} rows");
        }
    }
    let by_name = names(&page, "sort=name&rows=100", clock.now());
    assert!(by_name.is_sorted(), "{by_name:?}");
}

#[test]
fn a_query_that_cannot_be_answered_says_what_to_write() {
    for (text, words) in [
        ("sort=colour", "state or name or since"),
        ("order=up", "asc or desc"),
        ("rows=101", "a number from 0 to 100"),
        ("rows=-1", "a number from 0 to 100"),
        ("skip=4294967296", "a number"),
        ("colour=red", "\"colour\""),
        ("sort=name&sort=name", "\"sort\""),
        ("find", "name=value pairs"),
        ("find=%f", "name=value pairs"),
        ("find=%ff", "name=value pairs"),
        (&format!("find={}", "x".repeat(1_024)), "at most 1024 bytes"),
    ] {
        let error = Query::parse(text).and_then(PeersQuery::new).unwrap_err().to_string();
        assert!(error.contains(words), "{text}: {error}");
    }
    assert_eq!(query("find=a%20b+%C3%A9&&"), query("find=a+b%20%c3%a9"));
}

#[test]
fn many_pages_cost_ten_sums_a_second() {
    let (page, daemon, clock) = page(vec![peer("a", PeerState::Waiting)]);
    for _ in 0..100 {
        names(&page, "", clock.now());
        clock.advance(Duration::from_millis(10));
    }
    assert_eq!(*panics::lock(&daemon.asked), 10);
}

#[test]
fn the_history_has_rates_and_loss_between_samples() {
    let (page, daemon, clock) = page(vec![counted("a", 0, 0, [0, 0]), counted("b", 7, 7, [7, 7])]);
    let sample = |peers: Vec<PeerBrief>| {
        *panics::lock(&daemon.peers) = peers;
        page.sample(clock.now());
        clock.advance(SAMPLE_INTERVAL);
    };
    sample(vec![counted("a", 0, 0, [0, 0]), counted("b", 7, 7, [7, 7])]);
    sample(vec![counted("a", 500, 50, [100, 1]), counted("b", 7, 7, [7, 7])]);
    sample(vec![counted("a", 500, 1_050, [100, 1]), counted("b", 107, 7, [7, 7])]);
    let shown = |peer: Option<&str>, after: u64| -> Value {
        serde_json::to_value(page.history(peer, after).expect("there is a history")).unwrap()
    };
    let all = json!({ "interval_seconds": 5, "taken": 3, "up": [null, 100, 20], "down": [null, 10, 200], "loss": [null, 0.01, null] });
    assert_eq!(shown(None, 0), all);
    assert_eq!(shown(Some("a"), 0)["up"], json!([null, 100, 0]));
    assert_eq!(shown(Some("b"), 1)["up"], json!([0, 20]));
    assert_eq!(shown(None, 3)["up"], json!([]));
    assert_eq!(shown(None, 99), all, "a page that an earlier run of the agent showed begins anew");
    assert_eq!(page.history(Some("nobody"), 0), None);
}

#[test]
fn a_history_ends_with_its_peer_and_keeps_ten_minutes() {
    let (page, daemon, clock) = page(Vec::new());
    for sample in 0..200 {
        let mut peers = vec![counted("stays", sample * 50, 0, [0, 0])];
        if sample < 150 {
            peers.push(counted("goes", sample * 10, 0, [0, 0]));
        }
        *panics::lock(&daemon.peers) = peers;
        page.sample(clock.now());
        clock.advance(SAMPLE_INTERVAL);
    }
    assert_eq!(page.history(Some("goes"), 0), None);
    let history = page.history(Some("stays"), 0).unwrap();
    assert_eq!((history.up.len(), history.taken), (SAMPLES, 200));
    assert!(history.up.iter().all(|rate| *rate == Some(10)), "{history:?}");
    // Another peer of that name, whose counts begin at 0.
    *panics::lock(&daemon.peers) = vec![counted("stays", 0, 0, [0, 0])];
    page.sample(clock.now());
    assert_eq!(page.history(Some("stays"), 200).unwrap().up, [None]);
}

#[test]
fn a_trend_has_a_digit_for_each_quarter_of_a_minute() {
    let (page, daemon, clock) = page(Vec::new());
    let trend = |page: &StatusPage| {
        let screen = page.screen(&query("trends=1"), clock.now());
        screen.peers.columns.trend.first().cloned()
    };
    let mut bytes = 0;
    for sample in 0..9 {
        // 35 units in the last of the nine, one before.
        bytes += if sample == 8 { 35_000 } else { 1_000 };
        *panics::lock(&daemon.peers) = vec![counted("a", bytes, 0, [0, 0])];
        page.sample(clock.now());
        clock.advance(SAMPLE_INTERVAL);
    }
    assert_eq!(trend(&page).as_deref(), Some("11z"));
    assert_eq!(page.screen(&query(""), clock.now()).peers.columns.trend, Vec::<String>::new());
}

#[test]
fn the_memory_of_the_history_is_bounded() {
    let peers = (0..MOST_SERIES + 100).map(|number| counted(&format!("p{number:05}"), 0, 0, [0, 0]));
    let (page, _, clock) = page(peers.collect());
    page.sample(clock.now());
    let bytes = page.history_bytes();
    assert!((5 << 20..7 << 20).contains(&bytes), "{bytes}");
    assert!(page.history(Some("p00000"), 0).is_some());
    assert_eq!(page.history(Some("p04150"), 0), None, "beyond the ceiling");
}
