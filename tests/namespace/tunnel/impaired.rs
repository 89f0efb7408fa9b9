//! Paths that delay, lose and reorder, and the order of what a path keeps.

use std::{net::SocketAddr, net::UdpSocket, thread, time::Duration};

use culvert_tests::{
    clock::{self, PATIENCE},
    impairment::{Impairment, Path},
    place::Place,
    ports,
    sites::{DEVICE, Family, Plan, Site, Sites},
    transfer::Transfer,
};
use socket2::SockRef;

use super::possible;

/// Sites whose agents speak through a relay in the western router.
fn sites(workers: u8, path: Path) -> (Sites, Impairment) {
    // The router's address on its link to a gateway; it is the same in every test.
    let address = Impairment::reserve("192.0.2.1".parse().unwrap());
    let mut sites = Plan::two().workers(workers).endpoint(address).prepare();
    let relay = Impairment::new(&sites.west(), address, sites.listening(), path);
    sites.start();
    (sites, relay)
}

#[test]
fn a_file_crosses_a_path_that_loses_doubles_and_reorders() {
    if !possible("an impaired path") {
        return;
    }
    let bad = Path {
        delay: Duration::from_millis(25),
        loss: 0.01,
        doubled: 0.01,
        detoured: 0.05,
        detour: Duration::from_millis(4),
        ..Path::default()
    };
    let (sites, relay) = sites(2, bad);
    let (a, b) = (sites.a(), sites.b());
    Transfer::new(&a.host, &b.host, b.host_address(Family::V4), 3 << 20).run();
    Transfer::new(&b.host, &a.host, a.host_address(Family::V6), 3 << 20).run();
    let fates = relay.fates();
    assert!(fates.lost > 10 && fates.doubled > 10 && fates.detoured > 50, "{fates:?}, seed {}", relay.seed());
    // What shows elsewhere that nothing was overtaken does show it.
    assert!(sites.all().iter().all(|site| out_of_order(&site.host) > 0));
    sites.accounts();
}

#[test]
fn a_transfer_outlives_a_path_that_drops_large_packets_from_now_on_and_says_nothing() {
    const LENGTH: usize = 16 << 20;
    if !possible("a silent path") {
        return;
    }
    let short = Path { delay: Duration::from_millis(5), ..Path::default() };
    let (sites, relay) = sites(2, short);
    let (a, b) = (sites.a(), sites.b());
    let transfer = Transfer::new(&a.host, &b.host, b.host_address(Family::V4), LENGTH).window(256 << 10);
    transfer.stopping_at(LENGTH / 8).run_while(|progress| {
        clock::until("a part has arrived", PATIENCE, || {
            if progress.received() == LENGTH / 8 { Ok(()) } else { Err(progress.received()) }
        });
        relay.change(Path { largest: 1300, ..short });
    });
    let too_large = relay.fates().too_large;
    assert!(too_large > 0, "{:?}", relay.fates());
    for family in Family::BOTH {
        Transfer::new(&b.host, &a.host, a.host_address(family), 1 << 20).run();
    }
    sites.accounts();
}

/// A path of 40 ms there and back, without any fault.
fn long() -> Path {
    Path { delay: Duration::from_millis(20), ..Path::default() }
}

/// Waits until every lane is up at both ends: a flow that begins before takes another lane when its own comes up, and what is on the
/// way then may be overtaken.
fn wait_for_lanes(sites: &Sites) {
    for site in sites.all() {
        site.agent.wait_for_count("culvert_lanes", &[("state", "up")], 4);
    }
}

/// Checks that nothing was lost on the way: what came late then was overtaken.
fn check_complete(sites: &Sites, relay: &Impairment) {
    let fates = relay.fates();
    assert_eq!((fates.lost, fates.too_large, fates.refused), (0, 0, 0), "{fates:?}");
    let mut places = vec![sites.west(), sites.east()];
    places.extend(sites.all().iter().flat_map(|site| [site.gateway.clone(), site.host.clone()]));
    assert_eq!(places.iter().map(Place::udp_receive_drops).sum::<u64>(), 0, "a socket's buffer was full");
    assert_eq!(sites.drops(), []);
}

/// Segments that came before one that was sent earlier, at `place`.
fn out_of_order(place: &Place) -> u64 {
    let text = place.tell(&["cat", "/proc/net/netstat"]);
    let mut lines = text.lines().filter_map(|line| line.strip_prefix("TcpExt: "));
    let (names, values) = (lines.next().unwrap(), lines.next().unwrap());
    let mut pairs = names.split(' ').zip(values.split(' '));
    pairs.find(|(name, _)| *name == "TCPOFOQueue").unwrap().1.parse().unwrap()
}

/// How many lanes have fallen silent: on a machine that stands still for half a second there are some. What is on the way on such a
/// lane is overtaken.
fn silent_lanes(sites: &Sites) -> u64 {
    let count = |site: &Site| {
        // It publishes its counts before it answers.
        drop(site.agent.ask(&["status"]));
        site.agent.samples().count("culvert_lanes_reopened_total", &[("reason", "unresponsive")])
    };
    sites.all().iter().map(count).sum()
}

/// Sites with long paths between them and lanes that are up.
fn far_apart() -> (Sites, Impairment) {
    let (sites, relay) = sites(4, long());
    for site in sites.all() {
        // What comes in two seconds waits for a machine that stands still, instead of being dropped after a quarter of one.
        site.gateway.tell(&["ip", "link", "set", DEVICE, "txqueuelen", "10000"]);
    }
    wait_for_lanes(&sites);
    (sites, relay)
}

#[test]
fn no_segment_of_a_tcp_stream_overtakes_another() {
    if !possible("a long path") {
        return;
    }
    let (sites, relay) = far_apart();
    let late = || sites.all().iter().map(|site| out_of_order(&site.host)).sum::<u64>();
    let mut in_order = 0;
    for family in Family::BOTH {
        for (from, to) in [(sites.a(), sites.b()), (sites.b(), sites.a())] {
            let before = (late(), silent_lanes(&sites));
            // A window that a busy machine can carry in one burst.
            let transfer = Transfer::new(&from.host, &to.host, to.host_address(family), 8 << 20);
            transfer.window(256 << 10).run();
            let (late, silent) = (late() - before.0, silent_lanes(&sites) - before.1);
            assert!(
                late == 0 || silent > 0,
                "{family:?}: {late} segments were overtaken, and each lane was well"
            );
            in_order += u64::from(late == 0);
        }
    }
    assert!(in_order > 0, "in each of the transfers a lane fell silent");
    check_complete(&sites, &relay);
}

/// Datagrams of the one-way stream, in each millisecond that it sends.
const BURST: u32 = 4;

/// How long it lasts: the other direction is heard at its beginning and twice more.
const MILLISECONDS: u32 = 11_000;

/// How often the receiver sends: more rarely than the kernel remembers on which queue a flow was, which is 3 s.
const REPORT: u32 = 5_000;

/// How often the kernel gives the flow another queue of the device meanwhile: with each report, and when it forgets after each
/// of the first two.
///
/// What lies unread in the queue of before is overtaken by what is read from the next one, if the worker of the first is kept from
/// the processor meanwhile: nobody but the kernel knows what was sent first. Beside a busy machine that happens now and then.
const MOVES: usize = 5;

/// How long nothing comes until what is missing is lost.
const SILENCE: Duration = Duration::from_secs(5);

/// The numbers of the datagrams in the order in which they came; sends a report every 5 s worth of them.
fn receive(socket: &UdpSocket) -> Vec<u32> {
    let (mut numbers, mut next) = (Vec::new(), 0);
    let mut buffer = [0; 2000];
    while numbers.len() < (BURST * MILLISECONDS) as usize {
        let Ok((_, sender)) = socket.recv_from(&mut buffer) else { break };
        let number = u32::from_be_bytes(*buffer.first_chunk().unwrap());
        numbers.push(number);
        if number >= next {
            next += BURST * REPORT;
            socket.send_to(b"report", sender).unwrap();
        }
    }
    numbers
}

/// Sends the stream from host a to host b; the numbers that came there.
fn stream(sites: &Sites) -> Vec<u32> {
    let address = SocketAddr::new(sites.b().host_address(Family::V4), ports::free());
    let receiver = sites.b().host.enter(|| UdpSocket::bind(address)).unwrap();
    receiver.set_read_timeout(Some(SILENCE)).unwrap();
    SockRef::from(&receiver).set_recv_buffer_size(4 << 20).unwrap();
    let sender = sites.a().host.enter(|| UdpSocket::bind(("0.0.0.0", 0))).unwrap();
    thread::scope(|scope| {
        let numbers = scope.spawn(|| receive(&receiver));
        let (mut due, mut payload) = (clock::now(), [0; 1150]);
        for millisecond in 0..MILLISECONDS {
            thread::sleep(due.saturating_duration_since(clock::now()));
            for number in BURST * millisecond..BURST * (millisecond + 1) {
                payload[..4].copy_from_slice(&number.to_be_bytes());
                sender.send_to(&payload, address).unwrap();
            }
            // What a busy machine has kept from being sent is not sent in a burst, which the device's queue would not hold.
            due = (due + Duration::from_millis(1)).max(clock::now());
        }
        numbers.join().expect("it does not panic")
    })
}

#[test]
fn a_one_way_stream_keeps_its_lane_and_its_order_when_the_other_way_is_rarely_used() {
    const COUNT: u32 = BURST * MILLISECONDS;
    if !possible("a one-way stream") {
        return;
    }
    let (sites, relay) = far_apart();
    let before = silent_lanes(&sites);
    let numbers = stream(&sites);
    assert_eq!(silent_lanes(&sites) - before, 0, "a lane fell silent");
    check_complete(&sites, &relay);
    assert_eq!(numbers.len(), COUNT as usize, "all arrive");
    let overtaken: Vec<&[u32]> = numbers.windows(2).filter(|pair| pair[0] >= pair[1]).collect();
    assert!(overtaken.len() <= MOVES, "came one after the other: {overtaken:?}");
    // Whichever worker has read them: all were on the lane of their flow.
    sites.a().agent.wait_for("the packets of one lane", |samples| {
        let lanes = samples.by_label("culvert_lane_tun_packets_total", "lane");
        if lanes.values().eq(&[f64::from(COUNT)]) { Ok(()) } else { Err(format!("{lanes:?}")) }
    });
    sites.accounts();
}
