//! The PROXY protocol: what balancers say at the entry, what a service is told at the exit, and who abuses it.

use std::{io::ErrorKind, net::IpAddr, time::Duration};

use net::{TcpListener, TcpStream};
use wire::{
    messages::{Features, Hello, Message},
    proxy::{self, ClientAddresses, Header, Transport},
};

use crate::{
    CLIENT, INGRESS, Pair, UPSTREAM,
    flood::{GateFlood, Log},
    malicious::MaliciousPeer,
};

const SECOND: Duration = Duration::from_secs(1);

/// A pair whose entry and exit have these keys of their `[[tcp]]` and `[[service]]`.
fn pair_with(seed: u64, entry: &str, exit: &str) -> Pair {
    let mut pair = Pair::connected(seed, "", "");
    if !exit.is_empty() {
        let service = format!("upstream = \"{UPSTREAM}\"");
        let toml = pair.exit_toml.replace(&service, &format!("{service}\nprotocol = \"tcp\"\n{exit}"));
        pair.world.reload(pair.exit, &toml).unwrap();
        pair.exit_toml = toml;
    }
    if !entry.is_empty() {
        let tcp = format!("[[tcp]]\n            listen = \"{INGRESS}\"");
        let toml = pair.entry_toml.replace(&tcp, &format!("{tcp}\n{entry}"));
        assert_ne!(toml, pair.entry_toml);
        pair.world.reload(pair.entry, &toml).unwrap();
        pair.entry_toml = toml;
    }
    pair.world.run(SECOND);
    pair
}

/// Everything that can be read now.
fn read(stream: &mut dyn TcpStream) -> Vec<u8> {
    let (mut all, mut buffer) = (Vec::new(), [0; 4_096]);
    while let Ok(len) = stream.read(&mut buffer) {
        if len == 0 {
            break;
        }
        all.extend_from_slice(&buffer[..len]);
    }
    all
}

fn is_reset(client: &mut dyn TcpStream) -> bool {
    client.read(&mut [0; 8]).is_err_and(|error| error.kind() == ErrorKind::ConnectionReset)
}

/// What the service reads of the next connection, a second later.
fn served(pair: &mut Pair, listener: &mut dyn TcpListener) -> Option<(Box<dyn TcpStream>, Vec<u8>)> {
    pair.world.run(SECOND);
    let token = pair.services.token();
    let (mut stream, _) = listener.accept(token).ok()?;
    pair.world.run(SECOND);
    let bytes = read(&mut *stream);
    Some((stream, bytes))
}

fn refused(pair: &mut Pair, reason: &str) -> u64 {
    pair.world.metric(pair.entry, &format!("culvert_tcp_refused_total{{reason=\"{reason}\"}}"))
}

fn addresses(source: &str, destination: &str) -> Option<ClientAddresses> {
    ClientAddresses::new(source.parse().unwrap(), destination.parse().unwrap())
}

const ACCEPT: &str = "accept_proxy = [\"192.0.2.9/32\"]";

#[test]
fn a_service_is_told_who_connected_and_its_answers_are_the_same() {
    let mut pair = pair_with(9200, "", "proxy_protocol = \"v2\"");
    let mut listener = pair.services.tcp_listen(UPSTREAM);
    let mut client = pair.clients.tcp(INGRESS);
    client.write(b"hello").unwrap();
    let (mut service, bytes) = served(&mut pair, &mut *listener).unwrap();
    let Ok(Some(Header { client: Some(told), length })) = proxy::read(&bytes, Transport::Stream) else {
        panic!("{bytes:?}")
    };
    assert_eq!((told.source().ip(), told.destination()), (CLIENT, INGRESS));
    assert_eq!(&bytes[length..], b"hello");
    service.write(b"welcome").unwrap();
    service.shutdown_write().unwrap();
    pair.world.run(SECOND);
    assert_eq!(read(&mut *client), b"welcome");
    // The header is no byte of the client's.
    let peer = pair.world.peer(pair.exit);
    assert_eq!((peer.tcp.uplink_bytes, peer.tcp.downlink_bytes), (7, 5));
    // Who sends nothing is announced, too: the service may have to speak first.
    let _silent = pair.clients.tcp(INGRESS);
    let (_, bytes) = served(&mut pair, &mut *listener).unwrap();
    assert_eq!(bytes.len(), proxy::IPV4_HEADER);
}

#[test]
fn a_peer_of_the_version_before_gets_local_headers_and_the_log_says_so() {
    let mut flood = GateFlood::new(9210, "");
    let Message::Hello(hello) = MaliciousPeer::hello() else { panic!("a hello") };
    let features = Features(u64::MAX).without(Features::STREAM_CLIENT);
    flood.malicious.say(&Message::Hello(Hello { features, ..hello }));
    flood.run(100);
    let service = format!("upstream = \"{UPSTREAM}\"");
    let both = format!("{service}\nprotocol = \"tcp\"\nproxy_protocol = \"v2\"");
    let toml = flood.pair.exit_toml.replace(&service, &both);
    let log = Log::default();
    log.record(|| {
        flood.pair.world.reload(flood.pair.exit, &toml).unwrap();
        flood.run(100);
    });
    assert!(log.text().contains("the peer does not tell its clients' addresses"), "{}", log.text());
    let mut listener = flood.pair.services.tcp_listen(UPSTREAM);
    // StreamOpen as it was: no field but the service's number, which is 0.
    flood.malicious.open_stream(b"\0hello").unwrap();
    flood.run(100);
    let (mut service, _) = listener.accept(flood.pair.services.token()).unwrap();
    flood.run(100);
    let bytes = read(&mut *service);
    let header = Header { client: None, length: 16 };
    assert_eq!(proxy::read(&bytes, Transport::Stream), Ok(Some(header)));
    assert_eq!(&bytes[16..], b"hello");
}

#[test]
fn headers_of_balancers_are_taken_in_both_versions_and_in_pieces() {
    let mut pair = pair_with(9220, ACCEPT, "proxy_protocol = \"v2\"");
    let mut listener = pair.services.tcp_listen(UPSTREAM);
    let [v4, v6] = [
        addresses("203.0.113.7:4660", "203.0.113.1:443"),
        addresses("[2001:db8::7]:4660", "[2001:db8::1]:443"),
    ];
    let version_2 = |client| {
        let mut header = Vec::new();
        proxy::write(client, Transport::Stream, &mut header);
        header
    };
    let cases: [(&str, Vec<u8>, Option<ClientAddresses>); 6] = [
        ("1, IPv4", b"PROXY TCP4 203.0.113.7 203.0.113.1 4660 443\r\n".to_vec(), v4),
        ("1, IPv6", b"PROXY TCP6 2001:db8::7 2001:db8::1 4660 443\r\n".to_vec(), v6),
        ("1, unknown", b"PROXY UNKNOWN\r\n".to_vec(), None),
        ("2, IPv4", version_2(v4), v4),
        ("2, IPv6", version_2(v6), v6),
        ("2, local", version_2(None), None),
    ];
    for (what, header, client) in cases {
        for piece in [header.len() + 5, 1, 7] {
            let mut balancer = pair.clients.tcp(INGRESS);
            for bytes in [header.clone(), b"hello".to_vec()].concat().chunks(piece) {
                balancer.write(bytes).unwrap();
                pair.world.run(Duration::from_millis(10));
            }
            let (_service, bytes) = served(&mut pair, &mut *listener).unwrap();
            let Ok(Some(Header { client: told, length })) = proxy::read(&bytes, Transport::Stream) else {
                panic!("{what}: {bytes:?}")
            };
            assert_eq!(&bytes[length..], b"hello", "{what} in pieces of {piece}");
            match client {
                Some(_) => assert_eq!(told, client, "{what} in pieces of {piece}"),
                // The balancer itself is the client.
                None => assert_eq!(told.map(|told| told.source().ip()), Some(CLIENT), "{what}"),
            }
        }
    }
    assert_eq!(refused(&mut pair, "proxy_header") + refused(&mut pair, "proxy_timeout"), 0);
}

#[test]
fn connections_without_a_good_header_end_counted_and_never_reach_the_service() {
    let mut pair = pair_with(9230, ACCEPT, "");
    let mut listener = pair.services.tcp_listen(UPSTREAM);
    let endless = [&b"PROXY UNKNOWN "[..], &[b'x'; 5_000]].concat();
    let huge = b"\r\n\r\n\0\r\nQUIT\n\x21\x11\xff\xff".to_vec();
    let bad: [&[u8]; 4] = [b"GET / HTTP/1.1\r\n\r\n", b"PROXY TCP4 1.2.3.4\r\n", &endless, &huge];
    for (number, bytes) in (1..).zip(bad) {
        let mut client = pair.clients.tcp(INGRESS);
        client.write(bytes).unwrap();
        pair.world.run(SECOND);
        assert!(is_reset(&mut *client), "{number}");
        assert_eq!(refused(&mut pair, "proxy_header"), number);
    }
    // One that ends before its header, as a bare health check does.
    pair.clients.tcp(INGRESS).shutdown_write().unwrap();
    pair.world.run(SECOND);
    assert_eq!(refused(&mut pair, "proxy_header"), 5);
    // A header that comes a byte a second.
    let mut slow = pair.clients.tcp(INGRESS);
    let mut ended = false;
    for byte in b"PROXY T" {
        // The error is told once.
        ended |= slow.write(&[*byte]).is_err();
        pair.world.run(SECOND);
    }
    assert!(ended || is_reset(&mut *slow));
    assert_eq!(refused(&mut pair, "proxy_timeout"), 1);
    assert!(listener.accept(pair.services.token()).is_err(), "nothing came to the service");
    // From elsewhere, even with a header.
    let mut elsewhere = pair.world.host(&["192.0.2.77".parse::<IpAddr>().unwrap()]);
    let mut client = elsewhere.tcp(INGRESS);
    let _written = client.write(b"PROXY UNKNOWN\r\n").is_ok();
    let log = Log::default();
    log.record(|| pair.world.run(Duration::from_secs(12)));
    assert!(is_reset(&mut *client));
    assert_eq!(refused(&mut pair, "proxy_source"), 1);
    assert_eq!(pair.world.metric(pair.entry, "culvert_tcp_streams_opened_total"), 0);
}

#[test]
fn ten_thousand_connections_without_a_header_are_bounded_and_others_go_on() {
    let mut pair = pair_with(9240, ACCEPT, "");
    let mut listener = pair.services.tcp_listen(UPSTREAM);
    let mut silent = Vec::new();
    for _ in 0..100 {
        silent.extend((0..100).map(|_| pair.clients.tcp(INGRESS)));
        pair.world.run(Duration::from_millis(10));
    }
    assert_eq!(refused(&mut pair, "proxy_timeout"), 10_000 - 1_024, "the oldest gave way");
    let mut balancer = pair.clients.tcp(INGRESS);
    balancer.write(b"PROXY UNKNOWN\r\nhello").unwrap();
    let (_service, bytes) = served(&mut pair, &mut *listener).unwrap();
    assert_eq!(bytes, b"hello");
    pair.world.run(Duration::from_secs(6));
    assert_eq!(refused(&mut pair, "proxy_timeout"), 10_000);
    assert!(silent.iter_mut().all(|client| is_reset(&mut **client)));
    assert_eq!(pair.world.metric(pair.entry, "culvert_tcp_streams"), 1);
}

#[test]
fn connections_from_elsewhere_push_out_no_awaited_header() {
    let mut pair = pair_with(9250, ACCEPT, "");
    let mut listener = pair.services.tcp_listen(UPSTREAM);
    let mut balancers = Vec::new();
    while balancers.len() < 1_024 {
        balancers.extend((0..16).map(|_| pair.clients.tcp(INGRESS)));
        pair.world.run(Duration::from_millis(1));
    }
    let mut elsewhere = pair.world.host(&["192.0.2.77".parse::<IpAddr>().unwrap()]);
    let _others = Vec::from_iter((0..50).map(|_| elsewhere.tcp(INGRESS)));
    pair.world.run(SECOND);
    assert_eq!([refused(&mut pair, "proxy_source"), refused(&mut pair, "proxy_timeout")], [50, 0]);
    balancers[0].write(b"PROXY UNKNOWN\r\nhello").unwrap();
    let (_service, bytes) = served(&mut pair, &mut *listener).unwrap();
    assert_eq!(bytes, b"hello", "the oldest is awaited as before");
}

/// A pair whose entry expects headers and forwards so many connections.
fn limited(seed: u64, streams: u32) -> Pair {
    let mut pair = pair_with(seed, ACCEPT, "");
    let toml = format!("{}\n[limits]\ntcp_streams_per_peer = {streams}\n", pair.entry_toml);
    pair.world.reload(pair.entry, &toml).unwrap();
    pair
}

#[test]
fn connections_beyond_the_ceiling_wait_in_the_backlog_of_a_port_that_expects_headers() {
    let mut pair = limited(9260, 4);
    let mut listener = pair.services.tcp_listen(UPSTREAM);
    // All of them connect before the first header comes.
    let mut balancers = Vec::from_iter((0..6).map(|_| pair.clients.tcp(INGRESS)));
    pair.world.run(Duration::from_millis(200));
    for balancer in &mut balancers {
        balancer.write(b"PROXY UNKNOWN\r\nhello").unwrap();
    }
    let mut services = Vec::new();
    let mut accept = |pair: &mut Pair, services: &mut Vec<_>| {
        pair.world.run(SECOND);
        let token = pair.services.token();
        while let Ok((stream, _)) = listener.accept(token) {
            services.push(stream);
        }
    };
    accept(&mut pair, &mut services);
    assert_eq!((services.len(), refused(&mut pair, "limit")), (4, 0), "two wait");
    // One ends before its header, beside one forward that ends: both leave room.
    drop(balancers.remove(0));
    services.remove(0).shutdown_write().unwrap();
    accept(&mut pair, &mut services);
    assert_eq!((services.len(), refused(&mut pair, "limit")), (4, 0), "one waits");
    drop(balancers.remove(0));
    services.remove(0).shutdown_write().unwrap();
    accept(&mut pair, &mut services);
    assert_eq!((services.len(), refused(&mut pair, "limit")), (4, 0), "nobody waits");
    for service in &mut services {
        assert_eq!(read(&mut **service), b"hello");
    }
}

#[test]
fn a_header_that_does_not_come_leaves_its_room_to_who_waits() {
    let mut pair = limited(9270, 1);
    let mut listener = pair.services.tcp_listen(UPSTREAM);
    let mut silent = pair.clients.tcp(INGRESS);
    pair.world.run(3 * SECOND);
    let mut waits = pair.clients.tcp(INGRESS);
    waits.write(b"PROXY UNKNOWN\r\nhello").unwrap();
    pair.world.run(SECOND);
    assert!(listener.accept(pair.services.token()).is_err(), "the silent one has the room");
    // 5 s after the silent one came.
    pair.world.run(SECOND);
    let (_service, bytes) = served(&mut pair, &mut *listener).unwrap();
    assert_eq!(bytes, b"hello");
    assert!(is_reset(&mut *silent));
    assert_eq!([refused(&mut pair, "proxy_timeout"), refused(&mut pair, "limit")], [1, 0]);
}

#[test]
fn a_client_that_would_be_the_service_s_own_host_is_not_told() {
    let mut pair = pair_with(9280, ACCEPT, "proxy_protocol = \"v2\"");
    let mut listener = pair.services.tcp_listen(UPSTREAM);
    for (source, destination, told) in [
        ("127.0.0.1", "203.0.113.1", false),
        ("0.0.0.0", "203.0.113.1", false),
        ("224.0.0.1", "203.0.113.1", false),
        ("::1", "2001:db8::1", false),
        ("::ffff:127.0.0.1", "2001:db8::1", false),
        ("ff02::1", "2001:db8::1", false),
        ("10.0.0.1", "203.0.113.1", true),
        ("2001:db8::7", "2001:db8::1", true),
    ] {
        let mut balancer = pair.clients.tcp(INGRESS);
        let family = if source.contains(':') { 6 } else { 4 };
        balancer.write(format!("PROXY TCP{family} {source} {destination} 7 443\r\n").as_bytes()).unwrap();
        let (_service, bytes) = served(&mut pair, &mut *listener).unwrap();
        let Ok(Some(Header { client, .. })) = proxy::read(&bytes, Transport::Stream) else {
            panic!("{source}: {bytes:?}")
        };
        assert_eq!(
            client.map(|client| client.source().ip()),
            told.then(|| source.parse().unwrap()),
            "{source}"
        );
    }
}
