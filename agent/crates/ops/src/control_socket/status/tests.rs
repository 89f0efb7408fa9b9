use std::{collections::BTreeSet, fs, path::Path};

use serde_json::Value;

use super::{examples::*, *};

#[test]
fn the_status_is_readable() {
    let expected = format!(
        "\
gw1: culvert 1.2.3 (0123456789ab 2026-11-27), up 1m 1s, 2 workers
key {KEY}
used: peers 2/1000, flows 3/1000, handshakes 1/1000, descriptors 44/1000
service dns at dns.example:53: failed 5s ago: 192.0.2.53:53: Connection refused
peer file left out: peers/b.toml:3: lanes: is 65
draining: 2 sessions to leave, 1 closed
web server at 0.0.0.0:443: 3 of 1000 connections, its certificate ends in 1month 29days
worker 1 did not answer: its lanes, sockets and share of the device are missing here

PEER  STATE      SINCE  ADDRESS         RTT      LOSS    UP          DOWN        LANES  FLOWS  MTU   SOFTWARE
exit  connected  2h 3m  192.0.2.1:4433  12.3 ms  0.02 %  1.2 Gbit/s  8.0 Mbit/s  1      3      1421  culvert/0.1.0
b     dialling   -      -               -        -       -           -           -      0      -     -
UP is to the peer, DOWN from it; SINCE: connected, or not, for so long

PEER  SENT     RECEIVED  ALLOWED IPS
exit  97.5 kB  75.0 MB   10.9.0.1/32, 10.1.0.0/16

UPLINK  BY              SENT     RECEIVED  THIS MONTH
dsl     interface eth0  64.0 MB  9.0 kB    412.0 GB

LINE      STATE             LANES  RTT      UP           LIMIT        DOWN     SENT     RECEIVED  LOST  PACKET  SUSPECTED
exit/dsl  in use            2      12.3 ms  10.0 Mbit/s  48.0 Mbit/s  0 bit/s  64.0 MB  9.0 kB    3     1452    0
exit/lte  suspect (silent)  0      -        0 bit/s      -            0 bit/s  0 B      0 B       0     -       4

LANE    STATE  SENT                  RECEIVED      LOST       UNACKED  RTT      KEYS    PACKET  OFFLOAD         FLOWS  HEARD
exit/0  up     1.2 Gbit/s 130.0 k/s  0 bit/s 0 /s  18 (3 /s)  7        12.3 ms  1 (3)…  1452 …  GSO failed+GRO  1      2.0 ms
… 7 more lanes

ACCOUNT        RECEIVED  DELIVERED  QUEUED  DROPPED
exit uplink    100       95         2       3
exit downlink  9         2          0       7
all uplink     100       95         2       3
all downlink   9         2          0       7

USER  SEEN   SESSIONS  RATE         ADDRESS   FROM IT  TO IT  DROPPED  REFUSED
anna  1m 1s  2         20.0 Mbit/s  10.9.1.7  700      9000   3        4

tun culvert0: up, MTU 1421, TCP offload, no UDP offload, tunnels cut, joined over IPv4 only, 10.9.0.1/24 fe80::9fef:fb02:4102:57d4/64

TUN              PACKETS  RATE               SUPER-PACKETS  ERRORS  KERNEL DROPS
from the device  1000     5.6 Mbit/s 500 /s  20             0       4
to the device    1000     -                  20             0       -
copies of multicast: 3
to no peer: no_route 2
  - no_route: goes to nobody
answered by ICMP: unreachable 1

SOCKETS    OPEN  RECEIVED  SENT  BLOCKED  FAILED  NO GSO  KERNEL DROPS
quic dial  2     10        20    1        3       4       6

exit: two agents use its key, 192.0.2.13:5 and 192.0.2.14:6, last 2s ago: give each a key of its own
exit: line lte is suspect: packets leave it for the other lines (silent); connected for 2h 3m

b: 1m 30s ago: no answer
  - the clock is off
  - the key is wrong

exit dropped: uplink expired 2, too_large 1; downlink spoofed 7
  - spoofed: is of another source

handshakes: established 3, failed 1

REFUSED  PACKETS  SOURCE       REASON
3s ago   5        192.0.2.7:1  not on the allowlist
"
    );
    assert_eq!(full().to_page(Show::default()).to_text(), expected);
}

#[test]
fn one_peer_is_readable_in_full() {
    let status = Status { peers: vec![connected()], ..full() };
    let text = status.peer_page().to_text();
    let expected = "
exit: connected
  from           config
  public key     bYSIEhy5wmscRtaGPXZXQJ_z71gzt0VIOrC_gSKcVMA
  allowed ips    10.9.0.1/32, 10.1.0.0/16
  address        192.0.2.1:4433
  since          2h 3m
  over           both (udp_silent) for 2m 5s
  oldest port    31s
  no carrier     the web server answers 302 (location: http://portal/), 1m 5s ago
  software       culvert/0.1.0
  preshared key  in use: number 1 of 2
  our key        current
  datagrams by   lanes
  key exchange   x25519mlkem768
  RTT            12.3 ms
  least RTT      10.1 ms
  lane packets   sent 10000, received 12, lost 18
  loss           0.02 % in the last second, 0.20 % in all
  reordering     31.0 ms late, 9 packets overtaken, 2 of them first taken for lost
  up             1.2 Gbit/s, 126.0 k/s
  down           96 bit/s, 0.5 /s
  carried        95.0 kB up, 2.0 kB down
  TCP rates      0 bit/s up, 8.0 Mbit/s down
  TCP carried    2.5 kB up, 75.0 MB down
  waiting        2 datagrams, 2.0 kB, the oldest for 4.0 ms
  rate limit     48.0 Mbit/s (measured), wait 500 µs median, 7.0 ms p99, 12 marked
  quota          82.40 % of 500GB used until 2026-06-01, free
  path           steady, takes 49.0 Mbit/s, delivered 47.5 Mbit/s, queue 1.2 ms, 1.00 % lost, congested
  repair         retransmit, 80 of 90 payloads numbered, 4 sent again, 0 symbols, overhead 3.10 %, 0 without memory
  repaired       lost 5 (6.60 %), 4 came again, 0 from symbols, 1 given up after 200.0 ms, 0 late, 0 twice, delay 81.0 ms (0 µs median, 90.0 ms p99 of all)
  two lines      90 sent, 80 copies of them, 10 alone; 70 came, 65 again, 1 too late
  lanes up       1
  flows          3
  TCP streams    3, stalled 1
  congestion     bbr, window 4.0 MB, paced at 200.0 Mbit/s, delivered 192.0 Mbit/s
  link-local     fe80::9fef:fb02:4102:57d4
  inner MTU      1421
  UDP payload    1417
";
    assert!(text.contains(expected), "{text}");
    let streams = "
STREAMS  STATE  WORKER  DIALLED BY  FORWARDS
exit/1   up     1       us          5
";
    assert!(text.contains(streams), "{text}");
    let flows = "
FLOW  SERVICE  OPENED BY  LOCAL        STATE      LANE      WORKER  SILENT    ENDS AFTER
5     dns      us         127.0.0.1:9  confirmed  0, for 1  1       250.0 ms  1m
… 2 more flows

TCP SERVICE  OPEN  UP      DOWN
web          3     2.5 kB  75.0 MB

FORWARD    SERVICE  OPENED BY  LOCAL            STATE  AGE    UP      DOWN     STALLED  NOT READ  WORKER
5f3a9c-17  web      us         127.0.0.1:40000  open   1h 1m  1.0 kB  64.0 MB  2m 5s    here      1
5f3a9c-9   web      us         127.0.0.1:40000  open   1h 1m  1.0 kB  64.0 MB  -        -         1
… 1 more TCP forwards: culvert status exit --json has them all
";
    assert!(text.ends_with(flows), "{text}");
}

#[test]
fn one_lane_is_readable_in_full() {
    let status = Status { peers: vec![connected()], unanswered_workers: Vec::new(), ..full() };
    let text = status.lane_page().to_text();
    let expected = "
lane exit/0: up
  opened          1m 1s ago, epoch 1, by worker 1
  local address   192.0.2.2:5
  remote address  192.0.2.1:4433
  heard           2.0 ms ago
  flows           1
  sending         1.2 Gbit/s, 130.0 k/s
  receiving       0 bit/s, 0 /s
  sent            11 packets, 12.3 kB
  received        12 packets, 999 B
  lost            18 (3 /s)
  reordering      31.0 ms late, 9 packets overtaken, 2 of them first taken for lost
  in flight       7 packets, 8.4 kB
  keys            phase 1, updated 3 times, 5 packets sealed with these, the peer has not followed yet
  packet size     1452, the path carries 1460, larger ones are being tried
  offload         GSO failed+GRO
  RTT             12.3 ms
  RTT samples     latest 12.0 ms, least 11.0 ms, deviation 500 µs
  probe timeout   39.0 ms, 0 probes unanswered
  silent          -
  delivered       1.0 Mbit/s
  packet numbers  next 11, largest acknowledged 9
  replay window   top -
  ACKs            1 packets not acknowledged yet, held back for 3.0 ms at most
  ACK packets     sent 2, received 3
  acknowledged    10 packets
  datagrams       sent 8, received 7
  refused         4 duplicates, 5 too old, 6 not authentic
  MTU probes      sent 2, lost 1; 0 black holes
  key updates     1 begun here
  outbox          3 datagrams, 4.2 kB: the kernel has no room
  connection ID   0011223344556677
";
    assert!(text.ends_with(expected), "{text}");
}

#[test]
fn an_agent_without_peers_says_how_one_is_let_in() {
    let status = Status { peers: Vec::new(), host: String::new(), commit: None, ..full() };
    let text = status.to_page(Show::default()).to_text();
    assert!(text.starts_with("culvert 1.2.3, up 1m 1s"), "{text}");
    assert!(text.contains("\nno peers: culvert peer add lets one in") && !text.contains("SINCE"), "{text}");
}

#[test]
fn many_prefixes_of_a_peer_are_counted() {
    let allowed_ips = (1..=6).map(|number| format!("10.{number}.0.0/16")).collect();
    let status = Status { peers: vec![PeerStatus { allowed_ips, ..connected() }], ..full() };
    let text = status.to_page(Show::default()).to_text();
    assert!(text.contains("10.1.0.0/16, 10.2.0.0/16, 10.3.0.0/16, 10.4.0.0/16 and 2 more\n"), "{text}");
}

#[test]
fn an_account_that_does_not_balance_is_marked() {
    let mut status = full();
    status.peers[0].uplink.balances = false;
    let text = status.to_page(Show::default()).to_text();
    let marked: Vec<_> = text.lines().filter(|line| line.contains("DOES NOT BALANCE")).collect();
    assert_eq!(marked.len(), 1, "{text}");
    assert!(marked[0].starts_with("exit uplink "), "{text}");
}

#[test]
fn a_thousand_peers_fit_the_screen_and_the_busiest_come_first() {
    let peer = |place: u32| PeerStatus {
        name: format!("a-peer-with-quite-a-long-name-{place}").into(),
        rates: Some(PeerRates { uplink_bytes_per_second: place.into(), ..PeerRates::default() }),
        ..connected()
    };
    let mut status = Status { peers: (0..1_000).map(peer).collect(), ..full() };
    status.sort_by_traffic();
    let page = status.to_page(Show::default()).cut(40, 120);
    let lines: Vec<&str> = page.lines().iter().map(|(_, line)| line.as_str()).collect();
    assert_eq!(lines.len(), 40);
    assert!(lines.iter().all(|line| line.chars().count() <= 120), "{lines:#?}");
    assert!(lines[10].starts_with("a-peer-with-quite-a-long-name-999  connected  "), "{lines:#?}");
    assert!(lines[38].starts_with("a-peer-with-quite-a-long-name-971 "), "{lines:#?}");
    assert!(lines[39].starts_with("… ") && lines[39].ends_with(" more lines"), "{lines:#?}");
    // Neither every lane nor every account is on the whole page, but for one that does not balance.
    assert!(!status.to_page(Show::default()).to_text().contains("/0 "), "lanes were not asked for");
    assert!(status.to_page(Show { lanes: true }).to_text().contains("-long-name-7/0 "));
    assert!(!status.to_page(Show::default()).to_text().contains("name-7 uplink"));
    status.peers[0].uplink.balances = false;
    assert!(status.to_page(Show::default()).to_text().contains("name-999 uplink"));
}

#[test]
fn a_page_is_cut_to_any_size() {
    let page = full().to_page(Show::default());
    for (height, width) in [(1, 1), (2, 200), (500, 3), (500, 500)] {
        let cut = page.clone().cut(height, width);
        assert!(cut.lines().len() <= height);
        assert!(cut.lines().iter().all(|(_, line)| line.chars().count() <= width));
    }
    assert_eq!(page.clone().cut(500, 500), page, "what fits is left as it is");
}

/// Replaces every text in `value` for which that leaves a status.
fn replace_texts(value: &mut Value, with: &str) {
    match value {
        Value::String(text) => with.clone_into(text),
        Value::Array(values) => values.iter_mut().for_each(|value| replace_texts(value, with)),
        Value::Object(members) => {
            for (name, value) in members {
                // Words of ours, which no peer chooses, and addresses, which hold no other text.
                let ours = ["state", "origin", "link_local"].contains(&name.as_str());
                if !ours && !name.ends_with("address") && name != "addresses" || value.is_object() {
                    replace_texts(value, with);
                }
            }
        }
        Value::Null | Value::Bool(_) | Value::Number(_) => {}
    }
}

#[test]
fn nobody_writes_to_the_operators_terminal() {
    let told = |text: &str| {
        let mut value = serde_json::to_value(full()).unwrap();
        replace_texts(&mut value, text);
        let status: Status = serde_json::from_value(value).unwrap();
        [status.to_page(Show::default()), status.peer_page(), status.lane_page()].map(|page| page.to_text())
    };
    let harmless = told("name");
    let hostile = told("\x1b[2J\x1b]0;title\x07\r\n\tfake line\u{9b}31m\u{202e}\u{200b}\u{2028}é");
    for (text, harmless) in hostile.iter().zip(&harmless) {
        let bad: Vec<char> = text.chars().filter(|char| char.is_control() && *char != '\n').collect();
        assert_eq!(bad, [], "{text}");
        assert!(!text.contains(['\u{202e}', '\u{200b}', '\u{2028}']), "{text}");
        assert_eq!(text.lines().count(), harmless.lines().count(), "nobody adds a line: {text}");
        assert!(text.contains("\\u{1b}[2J\\u{1b}]0;title\\u{7}\\r\\n\\tfake line\\u{9b}31m"), "{text}");
    }
    assert!(table(&[["a\x1b".to_owned()]]).contains("a\\u{1b}"));
}

#[test]
fn ages_and_rates_are_short() {
    use crate::control_socket::status::page::{bits, bytes, per_second, short_time};
    assert_eq!([0.0, 59.9, 3_661.0, -1.0].map(age), ["0s", "59s", "1h 1m", "0s"]);
    let texts = [0.0, 1.0, 124.99, 125.0, 124_999_999.0, 125_000_000.0, 1.25e14].map(bits);
    let expected =
        ["0 bit/s", "8 bit/s", "1.0 kbit/s", "1.0 kbit/s", "1.0 Gbit/s", "1.0 Gbit/s", "1000.0 Tbit/s"];
    assert_eq!(texts, expected);
    assert_eq!([0.25, 1.0, 999.0, 3_400.0].map(per_second), ["0.2 /s", "1 /s", "999 /s", "3.4 k/s"]);
    assert_eq!([0, 999, 1_500, u64::MAX].map(bytes), ["0 B", "999 B", "1.5 kB", "18446744.1 TB"]);
    assert_eq!([0.0, 0.000_999_6, 0.5, 2.0].map(short_time), ["0 µs", "1.0 ms", "500.0 ms", "2.0 s"]);
}

#[test]
fn what_is_missing_is_said() {
    let scope = |lane| Scope { peer: Some("exit".to_owned()), lane, ..Scope::default() };
    let mut status = Status { peers: vec![connected()], unanswered_workers: Vec::new(), ..full() };
    assert_eq!((status.lacks(&Scope::default()), status.lacks(&scope(Some(0)))), (None, None));
    status.peers[0].lanes.clear();
    assert_eq!(status.lacks(&scope(None)), None);
    assert!(status.lacks(&scope(Some(4))).unwrap().contains("has no lane 4 (remedy: "));
    status.peers[0].mode = None;
    assert!(status.lacks(&scope(Some(4))).unwrap().contains("is not connected (remedy: "));
    status.peers.clear();
    assert!(status.lacks(&scope(None)).unwrap().contains("no peer is named \"exit\" (remedy: "));
}

#[test]
fn an_older_daemons_status_is_understood() {
    let old = r#"{"software":"0.1.0","public_key":"k","uptime_seconds":1.0,"workers":1,"peers":[{"name":"a","origin":"config",
        "state":"connected","address":null,"since_seconds":null,"software":null,"rtt_seconds":null,"lanes_up":1,"flows":2,
        "last_error":null}],"handshakes":{},"gate":{},"refusals":[]}"#;
    let status: Status = serde_json::from_str(old).unwrap();
    let text = status.to_page(Show::default()).to_text();
    assert!(text.contains("a     connected") && !text.contains("ACCOUNT"), "{text}");
    // And it understands what it is asked.
    assert_eq!(serde_json::to_string(&Scope::default()).unwrap(), "{}");
}

/// The paths of all members in `value`; those of `maps` have names that are data.
fn paths(value: &Value, at: &str, found: &mut BTreeSet<String>) {
    const MAPS: [&str; 12] = [
        "peers[].dropped",
        "tun.dropped",
        "tun.meanings",
        "tun.answers",
        "handshakes",
        "gate",
        "meanings",
        "users[].bytes",
        "users[].datagrams",
        "users[].dropped_from_user",
        "users[].dropped_to_user",
        "users[].refused",
    ];
    match value {
        Value::Object(members) if !MAPS.contains(&at) => {
            for (name, value) in members {
                let path = if at.is_empty() { name.clone() } else { format!("{at}.{name}") };
                paths(value, &path, found);
                if !value.is_object() || MAPS.contains(&path.as_str()) {
                    found.insert(path);
                }
            }
        }
        Value::Array(values) => values.iter().for_each(|value| paths(value, &format!("{at}[]"), found)),
        Value::Object(_) | Value::Null | Value::Bool(_) | Value::Number(_) | Value::String(_) => {}
    }
}

/// The paths of a status's members; what has members is named by them.
fn members(status: &Status) -> BTreeSet<String> {
    let mut found = BTreeSet::new();
    paths(&serde_json::to_value(status).unwrap(), "", &mut found);
    let has_members = |path: &String| {
        let begins = |other: &String| {
            other
                .strip_prefix(path.as_str())
                .is_some_and(|rest| rest.starts_with('.') || rest.starts_with("[]."))
        };
        found.iter().any(begins)
    };
    found.iter().filter(|path| !has_members(path)).cloned().collect()
}

#[test]
fn the_document_names_every_member_and_no_other() {
    let members = members(&full());
    let document = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../../docs/status.md");
    let document = fs::read_to_string(document).unwrap();
    let table = document.split("| member of `status` |").nth(1).unwrap().split("\n\n").next().unwrap();
    let documented: BTreeSet<String> = table
        .lines()
        .filter_map(|line| Some(line.strip_prefix("| `")?.split('`').next()?.to_owned()))
        .collect();
    let missing: Vec<_> = members.difference(&documented).collect();
    let surplus: Vec<_> = documented.difference(&members).collect();
    assert_eq!((missing, surplus), (vec![], vec![]));
}
