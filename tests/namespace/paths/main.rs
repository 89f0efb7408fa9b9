//! The bed of the measurements on bad paths, against the kernel: what `path_relay` says is what two hosts see.

#![expect(clippy::unwrap_used, reason = "a test that cannot go on has failed")]

use std::{
    net::{IpAddr, SocketAddr, UdpSocket},
    thread,
    time::Duration,
};

use culvert_tests::{
    capture::Capture,
    clock::{self, PATIENCE},
    iperf::{Client, Server},
    needs::{self, Need},
    path::Path,
    ports, probe, process,
};
use serde_json::Value;
use socket2::SockRef;

/// What a path needs.
const NEEDS: &[Need] = &[
    Need::Root,
    Need::Tun,
    Need::Tool("setpriv", "util-linux"),
    Need::Tool("ip", "iproute2"),
    Need::Tool("tc", "iproute2"),
    Need::Tool("iperf3", "iperf3"),
    Need::Tool("ping", "iputils-ping"),
    Need::Tool("tcpdump", "tcpdump"),
];

/// Whether this machine can run a test here.
#[track_caller]
fn possible(test: &str) -> bool {
    needs::met(test, NEEDS)
}

fn count(account: &Value, direction: &str, what: &str) -> u64 {
    account[direction][what].as_u64().unwrap_or_else(|| panic!("{direction}, {what}: {account}"))
}

/// Waits until nothing is under way in either direction, and checks that every packet has its fate and that none met one that
/// nobody asked for.
#[track_caller]
fn settled(path: &mut Path) -> Value {
    let account = clock::until("nothing is under way", PATIENCE, || {
        let account = path.account();
        let held: u64 = ["there", "back"].iter().map(|direction| count(&account, direction, "held")).sum();
        if held == 0 { Ok(account) } else { Err(account.to_string()) }
    });
    for direction in ["there", "back"] {
        let of = |what| count(&account, direction, what);
        let fates = of("passed") + of("lost_random") + of("lost_burst") + of("tail_dropped");
        assert_eq!((of("came"), of("refused")), (fates, 0), "{account}");
    }
    account
}

/// Sends datagrams of 1000 bytes with this traffic class from one host to a socket of the other; how many of them come, which are
/// those that passed.
#[track_caller]
fn send(path: &mut Path, direction: &str, datagrams: u64, class: u8) -> u64 {
    let (mut places, mut addresses) = (path.places(), [Path::LEFT[0], Path::RIGHT[0]]);
    if direction == "back" {
        places.reverse();
        addresses.reverse();
    }
    let open = |end: usize| {
        let address = SocketAddr::new(addresses[end].parse().unwrap(), 0);
        places[end].enter(|| UdpSocket::bind(address)).unwrap()
    };
    let (sender, receiver) = (open(0), open(1));
    SockRef::from(&sender).set_tos_v4(class.into()).unwrap();
    SockRef::from(&receiver).set_recv_buffer_size(4 << 20).unwrap();
    let destination = receiver.local_addr().unwrap();
    let before = path.account();
    for number in 0..datagrams {
        sender.send_to(&[7; 1000], destination).unwrap();
        if number % 16 == 15 {
            // At most some 16 Mbyte a second, which any machine takes.
            thread::sleep(Duration::from_millis(1));
        }
    }
    clock::until("all have come to the relay", PATIENCE, || {
        let came = count(&path.account(), direction, "came") - count(&before, direction, "came");
        if came == datagrams { Ok(()) } else { Err(came) }
    });
    let passed = count(&settled(path), direction, "passed") - count(&before, direction, "passed");
    receiver.set_read_timeout(Some(PATIENCE)).unwrap();
    let mut buffer = [0; 2000];
    (0..passed).for_each(|_| assert_eq!(receiver.recv(&mut buffer).unwrap(), 1000));
    receiver.set_nonblocking(true).unwrap();
    assert!(receiver.recv(&mut buffer).is_err(), "one more than passed");
    passed
}

#[test]
fn a_ping_takes_the_delay_of_both_directions() {
    if !possible("pings over a path") {
        return;
    }
    let mut path = Path::new(&["--delay", "20ms", "--back", "delay=35ms"]);
    let [left, _] = path.places();
    let mut sent = 0;
    for target in Path::RIGHT {
        let ping = probe::reaches(&left, target.parse().unwrap(), &[]);
        sent += u64::from(ping.sent);
        let times = ping.text.split("time=").skip(1);
        let times: Vec<f64> = times.map(|rest| rest.split(' ').next().unwrap().parse().unwrap()).collect();
        assert!(times.len() >= 5 && times.iter().all(|time| *time >= 55.0), "{}", ping.text);
    }
    // The answer to a sixth ping, which nobody waits for, may still be to come.
    clock::until("every ping and every answer has passed", PATIENCE, || {
        let account = settled(&mut path);
        let passed = ["there", "back"].map(|direction| count(&account, direction, "passed"));
        if passed == [sent, sent] { Ok(()) } else { Err(format!("{passed:?} of {sent}")) }
    });
}

#[test]
fn a_tcp_stream_gets_no_more_than_the_rate_in_real_size_packets() {
    const BYTES: u64 = 8_000_000;
    if !possible("a stream over a path") {
        return;
    }
    let mut path = Path::new(&["--rate", "40Mbit", "--queue", "40ms", "--delay", "5ms"]);
    let [left, right] = path.places();
    let server = SocketAddr::new(Path::RIGHT[0].parse().unwrap(), ports::free());
    let _server = Server::start(&right, server);
    let begin = clock::now();
    let report = Client::start(&left, server, &["-C", "cubic", "-n", &BYTES.to_string()]).finish();
    let took = begin.elapsed();
    let received = report["end"]["sum_received"]["bytes"].as_u64().unwrap();
    let account = settled(&mut path);
    let there = |what| count(&account, "there", what);
    assert!((BYTES / 2..there("passed_bytes")).contains(&received), "{received}, and headers: {account}");
    // Super-packets are cut before they come.
    assert!(there("passed_bytes") <= 1500 * there("passed"), "{account}");
    assert!(received as f64 * 8.0 / 40e6 <= took.as_secs_f64(), "{took:?}");
    assert!(there("most_queued_bytes") <= 200_000, "{account}");
    assert!(
        there("tail_dropped") > 0 && there("most_queued_bytes") > 190_000,
        "CUBIC fills the queue: {account}"
    );
    assert_eq!(there("lost_random") + there("marked"), 0);
}

#[test]
fn what_is_lost_is_in_the_account_and_what_is_not_arrives() {
    const SENT: u64 = 2000;
    if !possible("loss on a path") {
        return;
    }
    let mut path = Path::new(&["--loss", "0.05", "--back", "loss=0,gilbert=0.01/0.2", "--seed", "7"]);
    let received = send(&mut path, "there", SENT, 0);
    let account = settled(&mut path);
    let lost = count(&account, "there", "lost_random");
    assert_eq!((count(&account, "there", "came"), received + lost), (SENT, SENT), "{account}");
    assert!((60..140).contains(&lost), "a twentieth: {account}");

    let received = send(&mut path, "back", SENT, 0);
    let account = settled(&mut path);
    let lost = count(&account, "back", "lost_burst");
    assert_eq!((count(&account, "back", "came"), received + lost), (SENT, SENT), "{account}");
    assert!((30..200).contains(&lost), "p / (p + r) is a twenty-first: {account}");

    // A step: nothing is lost any more.
    path.set("loss=0,gilbert=0/1");
    assert_eq!([send(&mut path, "there", 300, 0), send(&mut path, "back", 300, 0)], [300, 300]);
}

#[test]
fn the_traffic_class_passes_and_only_ect_is_marked() {
    const SENT: u64 = 40;
    if !possible("ECN on a path") {
        return;
    }
    // At 1 Mbit/s 40 datagrams queue up within milliseconds.
    let mut path = Path::new(&["--rate", "1Mbit", "--ecn-threshold", "10000"]);
    let [_, right] = path.places();
    for (class, shown) in
        [(0xb8, "(tos 0xb8,"), (0xb8 | 0b10, "(tos 0xba,ECT(0),"), (0x01, "(tos 0x1,ECT(1),")]
    {
        let before = path.account();
        let capture = Capture::start(&right, "lan", "udp");
        assert_eq!(send(&mut path, "there", SENT, class), SENT);
        let text =
            capture.stop_when("all arrive", |text| text.matches("UDP, length").count() as u64 == SENT).text();
        let marked = count(&path.account(), "there", "marked") - count(&before, "there", "marked");
        let marks = text.matches(&format!("(tos {:#x},CE,", class | 0b11)).count() as u64;
        assert_eq!((marks, marked > 0), (marked, class & 0b11 != 0), "{text}");
        assert_eq!(text.matches(shown).count() as u64, SENT - marked, "{text}");
        assert!(!text.contains("bad cksum"), "{text}");
    }
}

#[test]
fn a_step_at_its_time_changes_the_path_and_late_packets_are_told() {
    if !possible("a step of a path") {
        return;
    }
    // Every packet is later than not at all.
    let mut path = Path::new(&["--delay", "1ms", "--step", "500ms:there:delay=120ms", "--late", "0us"]);
    let [left, _] = path.places();
    let target: IpAddr = Path::RIGHT[0].parse().unwrap();
    clock::until("pings take longer", PATIENCE, || {
        let ping = probe::ping(&left, target, &["-c", "1"]);
        let time =
            ping.text.split("time=").nth(1).and_then(|rest| rest.split(' ').next()?.parse::<f64>().ok());
        if time.is_some_and(|time| time >= 121.0) { Ok(()) } else { Err(ping.text) }
    });
    let account = settled(&mut path);
    let void = account["void"].to_string();
    assert!(["there: ", "back: "].iter().all(|direction| void.contains(direction)), "{void}");
}

#[test]
fn packets_larger_than_those_of_ethernet_void_a_run() {
    if !possible("a path of jumbo frames") {
        return;
    }
    let mut path = Path::new(&[]);
    let ([left, right], router) = (path.places(), path.router());
    let interfaces =
        [(&router, "west"), (&router, "east"), (&router, "there"), (&left, "lan"), (&right, "lan")];
    for (place, interface) in interfaces {
        place.tell(&["ip", "link", "set", interface, "mtu", "9000"]);
    }
    let ping = probe::ping(&left, Path::RIGHT[0].parse().unwrap(), &["-c", "1", "-M", "do", "-s", "4000"]);
    let account = path.account();
    assert_eq!((ping.received, count(&account, "there", "too_large")), (0, 1), "{account}");
    assert!(account["void"].to_string().contains("more than 1500 bytes"), "{account}");
    // A router whose links carry more is refused before any packet.
    let output = process::run(&mut Path::relay(&router), PATIENCE);
    assert!(process::text(&output.stderr).contains("west carries packets of 9000 bytes"), "{output:?}");
}
