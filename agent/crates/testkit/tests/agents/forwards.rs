//! Many TCP forwards: ceilings, credit for streams, readers that stop, openings that never come to an end.

use std::{
    io::ErrorKind,
    net::{IpAddr, SocketAddr},
    time::Duration,
};

use gate::identity::Identity;
use net::{TcpListener, TcpStream};
use wire::messages::Features;

use crate::{ENTRY, INGRESS, Pair, UPSTREAM, flood::GateFlood, malicious::MaliciousPeer};

/// A service that accepts whoever connects.
struct Service {
    listener: Box<dyn TcpListener>,
    accepted: Vec<Box<dyn TcpStream>>,
}

impl Service {
    fn new(pair: &mut Pair) -> Self {
        Self { listener: pair.services.tcp_listen(UPSTREAM), accepted: Vec::new() }
    }

    /// Lets time pass; accepts what comes.
    fn run(&mut self, pair: &mut Pair, time: Duration) {
        for _ in 0..time.as_millis().div_ceil(10) {
            pair.world.run(Duration::from_millis(10));
            let token = pair.services.token();
            while let Ok((stream, _)) = self.listener.accept(token) {
                self.accepted.push(stream);
            }
        }
    }
}

/// Why nothing can be read.
fn state(client: &mut dyn TcpStream) -> ErrorKind {
    client.read(&mut [0; 10]).map(|len| panic!("{len} bytes")).unwrap_err().kind()
}

fn count(pair: &mut Pair, name: &str) -> u64 {
    pair.world.metric(pair.entry, name)
}

#[test]
fn at_a_ceiling_clients_wait_for_five_seconds_and_are_reset_then() {
    for (seed, key) in [(1800, "tcp_streams_per_peer"), (1801, "tcp_streams")] {
        let mut pair = Pair::connected(seed, &format!("[limits]\n{key} = 3"), "");
        let mut service = Service::new(&mut pair);
        let mut clients: Vec<_> = (0..5).map(|_| pair.clients.tcp(INGRESS)).collect();
        service.run(&mut pair, Duration::from_secs(4));
        let states: Vec<_> = clients.iter_mut().map(|client| state(&mut **client)).collect();
        assert_eq!(states, [ErrorKind::WouldBlock; 5], "nobody is turned away yet");
        assert_eq!(service.accepted.len(), 3);
        // One goes, and the first of those that wait has its place.
        drop(clients.remove(0));
        service.accepted.remove(0).shutdown_write().unwrap();
        service.run(&mut pair, Duration::from_secs(4));
        assert_eq!(service.accepted.len(), 3, "{key}");
        assert_eq!(count(&mut pair, "culvert_tcp_streams"), 3);
        service.run(&mut pair, Duration::from_secs(2));
        let states: Vec<_> = clients.iter_mut().map(|client| state(&mut **client)).collect();
        let [would_block, reset] = [ErrorKind::WouldBlock, ErrorKind::ConnectionReset];
        assert_eq!(states, [would_block, would_block, would_block, reset]);
        assert_eq!(count(&mut pair, "culvert_tcp_refused_total{reason=\"limit\"}"), 1);
        assert_eq!(count(&mut pair, &format!("culvert_limit_reached_total{{limit=\"{key}\"}}")), 1);
        assert_eq!(count(&mut pair, "culvert_tcp_accept_pauses_total"), 2, "before and after one went");
    }
}

#[test]
fn credit_for_streams_grows_with_their_number_and_no_client_is_reset_meanwhile() {
    let mut pair = Pair::connected(1802, "", "");
    let mut service = Service::new(&mut pair);
    let mut clients = Vec::new();
    // More than the first credit, in waves that fit into the backlog of the network in memory.
    for _ in 0..6 {
        clients.extend((0..100).map(|_| pair.clients.tcp(INGRESS)));
        service.run(&mut pair, Duration::from_millis(200));
    }
    assert_eq!(service.accepted.len(), 600);
    assert!(clients.iter_mut().all(|client| state(&mut **client) == ErrorKind::WouldBlock));
    assert_eq!(count(&mut pair, "culvert_tcp_refused_total{reason=\"limit\"}"), 0);
    clients.clear();
    service.accepted.clear();
    service.run(&mut pair, Duration::from_millis(500));
    assert_eq!(count(&mut pair, "culvert_tcp_streams"), 0);
}

/// What `count` clients write into a service that reads the last connection only, for `time`; what that one received.
fn beside_readers_that_stop(
    pair: &mut Pair,
    service: &mut Service,
    clients: &mut [Box<dyn TcpStream>],
) -> usize {
    let (piece, mut received, mut buffer) = (vec![7; 60_000], 0, vec![0; 100_000]);
    for _ in 0..600 {
        for client in &mut *clients {
            // The window is full, for those that are not read.
            let _written = client.write(&piece).is_ok();
        }
        service.run(pair, Duration::from_millis(10));
        if let Some(reader) = service.accepted.last_mut() {
            while let Ok(len) = reader.read(&mut buffer) {
                received += len;
            }
        }
    }
    received
}

#[test]
fn readers_that_stop_leave_room_for_the_others() {
    let mut pair = Pair::connected(1803, "", "");
    let mut service = Service::new(&mut pair);
    let mut clients: Vec<_> = (0..5).map(|_| pair.clients.tcp(INGRESS)).collect();
    service.run(&mut pair, Duration::from_millis(100));
    assert_eq!(service.accepted.len(), 5);
    let received = beside_readers_that_stop(&mut pair, &mut service, &mut clients);
    assert!(received > 10_000_000, "the fifth got {received} bytes beside four that are not read");
    let held = pair.world.metric(pair.exit, "culvert_stream_bytes");
    assert!(held < 16 << 20, "{held} bytes: the entry sends no more to who does not read");
}

#[test]
fn of_an_older_peers_forwards_the_longest_stopped_is_ended_so_that_the_others_go_on() {
    let mut pair = Pair::new(1808, "", "[limits]\nstream_bytes = \"32MiB\"");
    for worker in &mut pair.world.agent(pair.entry).workers {
        worker.withhold(Features::STREAM_CREDIT);
    }
    pair.wait_for_lanes(1);
    let mut service = Service::new(&mut pair);
    let mut clients: Vec<_> = (0..30).map(|_| pair.clients.tcp(INGRESS)).collect();
    service.run(&mut pair, Duration::from_millis(100));
    assert_eq!(service.accepted.len(), 30);
    let received = beside_readers_that_stop(&mut pair, &mut service, &mut clients);
    assert!(received > 10_000_000, "the last got {received} bytes beside 29 that are not read");
    let left = count(&mut pair, "culvert_tcp_streams");
    assert!((2..30).contains(&left), "{left}");
    assert!(pair.world.metric(pair.exit, "culvert_stream_bytes") <= 33 << 20);
    assert_ne!(state(&mut **clients.last_mut().unwrap()), ErrorKind::ConnectionReset);
}

#[test]
fn what_is_not_read_is_bounded_by_the_memory_of_streams() {
    let mut pair = Pair::connected(1804, "", "[limits]\nstream_bytes = \"8MiB\"");
    let mut service = Service::new(&mut pair);
    let mut clients: Vec<_> = (0..20).map(|_| pair.clients.tcp(INGRESS)).collect();
    service.run(&mut pair, Duration::from_millis(100));
    service.accepted.truncate(20);
    let (piece, mut written) = (vec![7; 60_000], 0);
    for _ in 0..500 {
        for client in &mut clients {
            written += client.write(&piece).unwrap_or(0);
        }
        service.run(&mut pair, Duration::from_millis(10));
    }
    assert!(pair.world.metric(pair.exit, "culvert_stream_bytes") <= 9 << 20);
    assert!(pair.world.metric(pair.exit, "culvert_limit_reached_total{limit=\"stream_bytes\"}") > 0);
    // The exit's windows, and the pipes of the network in memory and one piece of each forward at either end.
    assert!(written < (8 << 20) + 20 * 5 * (64 << 10), "{written}");
}

#[test]
fn six_peers_whose_service_reads_nothing_stay_within_the_memory_of_streams_and_give_it_back() {
    const POOL: u64 = 24 << 20;
    for seed in [1806, 1807] {
        let keys: Vec<Identity> = (1..6).map(|_| Identity::generate().unwrap()).collect();
        let known = |(place, key): (usize, &Identity)| {
            let key = key.public_key();
            format!("[[peer]]\nname = \"entry{place}\"\npublic_key = \"{key}\"\nservices = [\"echo\"]\n")
        };
        let limits = format!("[limits]\nstream_bytes = \"{}MiB\"\n", POOL >> 20);
        let known: String = keys.iter().enumerate().map(known).collect();
        let mut pair = Pair::with_workers(seed, (1, 2), "", &(known + &limits));
        let (mut addresses, mut places) = (vec![ENTRY], vec![pair.entry]);
        for (number, key) in (11..).zip(&keys) {
            let address = IpAddr::from([192, 0, 2, number]);
            let toml = pair.entry_toml.replace(&ENTRY.to_string(), &address.to_string());
            pair.world.workers = 1;
            places.push(pair.world.start(&toml, key, &[address], number));
            addresses.push(address);
        }
        let mut service = Service::new(&mut pair);
        service.run(&mut pair, Duration::from_secs(2));
        let held = |pair: &mut Pair| pair.world.metric(pair.exit, "culvert_stream_bytes");
        let before = held(&mut pair);
        let ingress = addresses.into_iter().map(|address| SocketAddr::new(address, INGRESS.port()));
        let mut clients: Vec<_> =
            ingress.cycle().take(6 * 8).map(|ingress| pair.clients.tcp(ingress)).collect();
        let (piece, mut most) = (vec![7; 60_000], 0);
        for _ in 0..300 {
            for client in &mut clients {
                // What has no room is not written.
                let _written = client.write(&piece).is_ok();
            }
            service.run(&mut pair, Duration::from_millis(10));
            most = most.max(held(&mut pair));
        }
        println!("seed {seed}: {before} bytes before, {most} at most");
        assert_eq!(service.accepted.len(), clients.len());
        assert!(before < most && most <= POOL, "{before} before, {most} at most");
        clients.clear();
        service.accepted.clear();
        service.run(&mut pair, Duration::from_secs(5));
        assert_eq!(pair.world.metric(pair.exit, "culvert_tcp_streams"), 0);
        // What the peers were promised is theirs as long as they are connected.
        assert!(held(&mut pair) <= most);
        for place in places {
            pair.world.kill(place);
        }
        service.run(&mut pair, Duration::from_secs(90));
        let after = held(&mut pair);
        assert!(after < before / 10, "{before} before, {after} after");
    }
}

#[test]
fn a_stream_without_its_header_is_given_up() {
    let mut flood = GateFlood::new(1805, "");
    flood.malicious.say(&MaliciousPeer::hello());
    flood.run(50);
    flood.malicious.open_stream(&[]);
    flood.malicious.open_stream(&[4]);
    flood.run(9_000);
    assert_eq!(flood.metric("culvert_tcp_streams"), 2);
    flood.run(2_000);
    assert_eq!(flood.metric("culvert_tcp_streams"), 0);
    assert_eq!(flood.metric("culvert_tcp_refused_total{reason=\"no_header\"}"), 2);
    assert_eq!(flood.malicious.closed(), None);
    flood.assert_innocent_is_unharmed();
}
