//! The PROXY protocol before datagrams: what proxies say at the entry, what a service is told at the exit, and who abuses it.

use std::{
    net::{IpAddr, SocketAddr},
    time::Duration,
};

use base::clock::Clock;
use wire::{
    messages::{Features, Hello, Message},
    proxy::{self, ClientAddresses, Header, ProxyError, Transport},
};

use crate::{
    CLIENT, ENTRY, INGRESS, Pair, UPSTREAM,
    flood::{ECHO, GateFlood, Log},
    fragments::pattern,
    harness::Udp,
    malicious::MaliciousPeer,
};

const MS: Duration = Duration::from_millis(1);

const ACCEPT: &str = "accept_proxy = [\"192.0.2.9/32\"]";

const TELL: &str = "proxy_protocol = \"v2\"";

/// Connected over `lanes` lanes at least; the entry and the exit have these keys of their `[[udp]]` and `[[service]]`.
fn pair_with(seed: u64, (workers, lanes): ((u8, u8), usize), entry: &str, exit: &str) -> Pair {
    let mut pair = Pair::with_workers(seed, workers, "", "");
    pair.wait_for_lanes(lanes);
    change(&mut pair, entry, exit);
    pair
}

/// Adds these keys by a reload.
fn change(pair: &mut Pair, entry: &str, exit: &str) {
    if !exit.is_empty() {
        let upstream = format!("upstream = \"{UPSTREAM}\"");
        pair.exit_toml = pair.exit_toml.replace(&upstream, &format!("{upstream}\n{exit}"));
        pair.world.reload(pair.exit, &pair.exit_toml.clone()).unwrap();
    }
    if !entry.is_empty() {
        let listen = "listen = \"0.0.0.0:5300\"";
        pair.entry_toml = pair.entry_toml.replace(listen, &format!("{listen}\n{entry}"));
        pair.world.reload(pair.entry, &pair.entry_toml.clone()).unwrap();
    }
    pair.world.run(50 * MS);
}

const ONE: ((u8, u8), usize) = ((1, 1), 1);

fn addresses(source: &str, destination: &str) -> ClientAddresses {
    ClientAddresses::new(source.parse().unwrap(), destination.parse().unwrap()).unwrap()
}

/// A datagram as a proxy sends it.
fn proxied(client: Option<ClientAddresses>, payload: &[u8]) -> Vec<u8> {
    let mut datagram = Vec::new();
    proxy::write(client, Transport::Datagram, &mut datagram);
    datagram.extend_from_slice(payload);
    datagram
}

/// What has come to the service: from which socket, whom the header names, and the rest.
fn served(pair: &mut Pair) -> Vec<(SocketAddr, Option<ClientAddresses>, Vec<u8>)> {
    let received = pair.echo.receive();
    let taken = received.into_iter().map(|(from, bytes)| {
        let Ok(Some(Header { client, length })) = proxy::read(&bytes, Transport::Datagram) else {
            panic!("{bytes:?}")
        };
        (from, client, bytes[length..].to_vec())
    });
    taken.collect()
}

fn dropped(pair: &mut Pair, reason: &str) -> u64 {
    let series = format!("culvert_datagrams_dropped_total{{direction=\"uplink\",reason=\"{reason}\"}}");
    pair.world.metric(pair.entry, &series)
}

fn payloads(client: &mut Udp) -> Vec<Vec<u8>> {
    client.receive().into_iter().map(|(_, payload)| payload).collect()
}

#[test]
fn each_datagram_says_who_sent_it_and_answers_say_nothing() {
    let cases = [ONE, ((2, 3), 2), ((3, 1), 3)];
    for (number, shape) in cases.into_iter().enumerate() {
        let mut pair = pair_with(9300 + number as u64, shape, "", TELL);
        let mut clients: Vec<Udp> = (0..10).map(|port| pair.client(1_000 + port)).collect();
        for round in 0..20_u8 {
            for client in &mut clients {
                // As many as GSO carries together, and one that is shorter.
                for payload in [[round; 300], [round + 1; 300]] {
                    client.send(INGRESS, &payload);
                }
                client.send(INGRESS, &[round]);
            }
            pair.world.run(2 * MS);
        }
        pair.world.run(100 * MS);
        let came = served(&mut pair);
        assert_eq!(came.len(), 600);
        for (from, told, payload) in came {
            let told = told.unwrap();
            assert_eq!((told.source().ip(), told.destination()), (CLIENT, INGRESS));
            pair.echo.send(from, &[&told.source().port().to_be_bytes()[..], &payload].concat());
        }
        pair.world.run(100 * MS);
        for (client, port) in clients.iter_mut().zip(1_000_u16..) {
            let answers = payloads(client);
            assert_eq!(answers.len(), 60);
            assert!(answers.iter().all(|answer| answer[..2] == port.to_be_bytes()), "one flow each");
        }
        let [entry, exit] = pair.assert_balanced();
        assert_eq!([entry.flows, exit.flows], [10; 2]);
        // A header is no byte of the client's.
        let bytes = 10 * 20 * (300 + 300 + 1);
        assert_eq!([entry.uplink.account.received_bytes, exit.downlink.delivered_bytes], [bytes; 2]);
    }
}

#[test]
fn clients_behind_one_proxy_are_flows_of_their_own_and_are_answered_there() {
    let mut pair = pair_with(9310, ONE, ACCEPT, TELL);
    let recorded = pair.world.record(pair.entry, 100);
    let mut proxies = [pair.client(53), pair.client(54)];
    let v4 = addresses("203.0.113.7:4660", "203.0.113.1:53");
    let v6 = addresses("[2001:db8::7]:4660", "[2001:db8::1]:53");
    for round in 0..3_u8 {
        for (place, proxy) in (0..).zip(&mut proxies) {
            for (number, client) in (0..).zip([Some(v4), Some(v6), None]) {
                proxy.send(INGRESS, &proxied(client, &[place, number, round]));
            }
        }
        pair.world.run(20 * MS);
        let came = served(&mut pair);
        assert_eq!(came.len(), 6);
        for (from, told, payload) in came {
            match payload[1] {
                0 => assert_eq!(told, Some(v4)),
                1 => assert_eq!(told, Some(v6)),
                // The proxy itself.
                _ => {
                    let told = told.unwrap();
                    assert_eq!(told.source(), SocketAddr::new(CLIENT, 53 + u16::from(payload[0])));
                    assert_eq!(told.destination(), INGRESS);
                }
            }
            pair.echo.send(from, &payload);
        }
        pair.world.run(20 * MS);
        for (place, proxy) in (0..).zip(&mut proxies) {
            let mut answers = payloads(proxy);
            answers.sort();
            assert_eq!(answers, [0, 1, 2].map(|number| vec![place, number, round]), "no header");
        }
    }
    assert_eq!(pair.assert_balanced().map(|peer| peer.flows), [6; 2]);
    assert_eq!(dropped(&mut pair, "no_proxy_header"), 0);
    // TLVs are passed over, whatever they are.
    let mut with_tlv = proxied(Some(v4), &[]);
    with_tlv[15] += 7;
    with_tlv.extend([0xe4, 0, 4, 1, 2, 3, 4]);
    with_tlv.extend(b"hello");
    proxies[0].send(INGRESS, &with_tlv);
    // A datagram may be a header alone.
    proxies[0].send(INGRESS, &proxied(Some(v4), &[]));
    pair.world.run(20 * MS);
    let came = served(&mut pair);
    assert_eq!(came.iter().map(|(_, told, _)| *told).collect::<Vec<_>>(), [Some(v4); 2]);
    assert_eq!(came.iter().map(|(_, _, payload)| &payload[..]).collect::<Vec<_>>(), [&b"hello"[..], b""]);
    // Operators are shown the clients.
    pair.world.run(Duration::from_secs(12));
    let sources: Vec<SocketAddr> = recorded.take().iter().filter_map(|ended| ended.source).collect();
    let of = |wanted: ClientAddresses| sources.iter().filter(|source| **source == wanted.source()).count();
    assert_eq!((sources.len(), of(v4), of(v6)), (6, 2, 2));
}

#[test]
fn a_port_of_proxies_drops_what_has_no_good_header_and_says_why() {
    let mut pair = pair_with(9320, ONE, ACCEPT, "");
    let mut proxy = pair.client(53);
    let client = addresses("203.0.113.7:4660", "203.0.113.1:53");
    let good = proxied(Some(client), b"hello");
    let mut of_streams = Vec::new();
    proxy::write(Some(client), Transport::Stream, &mut of_streams);
    let version_1 = b"PROXY UNKNOWN\r\n";
    let bad: [&[u8]; 6] = [b"hello", &good[..5], &good[..27], &of_streams, version_1, b""];
    let log = Log::default();
    log.record(|| {
        for (number, datagram) in (1..).zip(bad) {
            proxy.send(INGRESS, datagram);
            pair.world.run(20 * MS);
            assert_eq!(dropped(&mut pair, "no_proxy_header"), number, "{datagram:?}");
        }
    });
    assert!(log.text().contains(&ProxyError::Missing.to_string()), "{}", log.text());
    assert!(log.text().contains("udp.accept_proxy"), "{}", log.text());
    // From where no proxy is.
    let elsewhere: IpAddr = "192.0.2.77".parse().unwrap();
    let mut host = pair.world.host(&[elsewhere]);
    let mut other = host.udp(SocketAddr::new(elsewhere, 53), None);
    other.send(INGRESS, &good);
    pair.world.run(20 * MS);
    assert_eq!(dropped(&mut pair, "no_proxy_header"), 7);
    assert_eq!(pair.world.peer(pair.entry).flows, 0);
    assert!(pair.echo.receive().is_empty(), "nothing came to the service");
    proxy.send(INGRESS, &good);
    pair.world.run(20 * MS);
    assert_eq!(pair.echo.receive().into_iter().map(|(_, payload)| payload).collect::<Vec<_>>(), [b"hello"]);
    pair.assert_balanced();
}

#[test]
fn a_flood_of_clients_that_a_proxy_names_takes_half_of_the_flows_at_most() {
    const MOST: u64 = 100;
    let plain = format!("\n[[udp]]\nlisten = \"{ENTRY}:5400\"\npeer = \"exit\"\nservice = \"echo\"\n");
    let limits = format!("[limits]\nflows_per_peer = {MOST}\n");
    let mut pair = Pair::with_workers(9330, (2, 1), &format!("{plain}{limits}"), "");
    pair.wait_for_lanes(1);
    change(&mut pair, ACCEPT, TELL);
    let mut proxies = [pair.client(53), pair.client(54), pair.client(55)];
    for number in 0..2_000_u16 {
        let [high, low] = number.to_be_bytes();
        let client = addresses(&format!("203.0.{high}.{low}:7"), "203.0.113.1:53");
        for proxy in &mut proxies {
            proxy.send(INGRESS, &proxied(Some(client), b"hello"));
        }
        pair.world.run(2 * MS);
    }
    let flows = pair.world.peer(pair.entry).flows;
    assert!((MOST / 2 - 1..=MOST / 2 + 2).contains(&(flows as u64)), "{flows}");
    let evicted = pair.world.metric(pair.entry, "culvert_flows_evicted_total{reason=\"proxied\"}");
    assert!(evicted >= 5_800, "{evicted} of 6,000: the oldest gave way");
    let came = served(&mut pair).len();
    // The latest client's flow is there, and others have the other half.
    let mut clients: Vec<Udp> = (0..40).map(|port| pair.client(1_000 + port)).collect();
    for client in &mut clients {
        client.send(SocketAddr::new(ENTRY, 5400), b"plain");
    }
    pair.world.run(500 * MS);
    let plain = served(&mut pair).into_iter().filter(|(_, _, payload)| payload == b"plain").count();
    assert!(came > 0 && plain == 40, "{came}, {plain}");
    assert_eq!(dropped(&mut pair, "flow_limit"), 0);
    pair.assert_balanced();
}

#[test]
fn large_datagrams_in_pieces_and_those_that_leave_no_room_for_an_opening_are_told_too() {
    for (seed, workers) in [(9340, (1, 1)), (9341, (2, 3))] {
        let keys = format!("{TELL}\noversize = \"fragment\"\nrepair = \"auto\"");
        let mut pair = pair_with(seed, (workers, 1), "", &keys);
        let largest = 1_472 - 31;
        for (place, size) in (0..).zip([1, 1_000, largest - 40, largest - 20, largest, 5_000, 65_000]) {
            let mut client = pair.client(2_000 + place);
            let payload = pattern(size, usize::from(place));
            client.send(INGRESS, &payload);
            client.send(INGRESS, &payload);
            pair.world.run(300 * MS);
            let came = served(&mut pair);
            assert_eq!(came.len(), 2, "{size} bytes");
            for (_, told, bytes) in came {
                assert_eq!(told.unwrap().source(), SocketAddr::new(CLIENT, 2_000 + place));
                assert!(bytes == payload, "{size} bytes");
            }
        }
        pair.assert_balanced();
    }
}

#[test]
fn a_flow_follows_the_keys_at_a_reload() {
    let mut pair = pair_with(9350, ONE, "", "");
    let mut client = pair.client(7);
    let mut exchange = |pair: &mut Pair| {
        // The first one after a change may be of the flow before.
        for _ in 0..2 {
            client.send(INGRESS, b"hello");
            pair.world.run(50 * MS);
        }
        pair.echo.receive().pop().unwrap().1
    };
    assert_eq!(exchange(&mut pair), b"hello");
    change(&mut pair, "", TELL);
    let told = addresses("192.0.2.9:7", &INGRESS.to_string());
    assert_eq!(exchange(&mut pair), proxied(Some(told), b"hello"));
    let toml = pair.exit_toml.replace(TELL, "");
    pair.world.reload(pair.exit, &toml).unwrap();
    assert_eq!(exchange(&mut pair), b"hello");
    // A flow without a header ends where one is expected from now on.
    change(&mut pair, ACCEPT, "");
    assert_eq!(pair.world.peer(pair.entry).flows, 0);
    pair.assert_balanced();
}

#[test]
fn a_client_that_would_be_the_service_s_own_host_is_not_told() {
    let mut pair = pair_with(9360, ONE, ACCEPT, TELL);
    let mut proxy = pair.client(53);
    for (source, destination, told) in [
        ("127.0.0.1:7", "203.0.113.1:53", false),
        ("[::1]:7", "[2001:db8::1]:53", false),
        ("10.0.0.1:7", "203.0.113.1:53", true),
    ] {
        let client = addresses(source, destination);
        proxy.send(INGRESS, &proxied(Some(client), b"hello"));
        pair.world.run(50 * MS);
        let (_, named, _) = served(&mut pair).remove(0);
        assert_eq!(named, told.then_some(client), "{source}");
    }
}

#[test]
fn a_peer_of_the_version_before_gets_local_headers_and_the_log_says_so() {
    let mut flood = GateFlood::new(9370, "");
    let Message::Hello(hello) = MaliciousPeer::hello() else { panic!("a hello") };
    let features = Features(u64::MAX).without(Features::FLOW_CLIENT);
    flood.malicious.say(&Message::Hello(Hello { features, max_lanes: 0, ..hello }));
    flood.run(100);
    let upstream = format!("upstream = \"{UPSTREAM}\"");
    let toml = flood.pair.exit_toml.replace(&upstream, &format!("{upstream}\n{TELL}"));
    let log = Log::default();
    log.record(|| {
        flood.pair.world.reload(flood.pair.exit, &toml).unwrap();
        flood.run(100);
    });
    assert!(log.text().contains("the peer does not tell its clients' addresses"), "{}", log.text());
    let mut opening = flood.open(0, ECHO);
    opening.extend(b"hello");
    flood.malicious.send_plain(&opening);
    for _ in 0..100 {
        flood.malicious.poll(flood.pair.world.clock.now());
        flood.pair.world.run(MS);
    }
    let came = served(&mut flood.pair);
    assert_eq!(
        came.iter().map(|(_, told, rest)| (*told, &rest[..])).collect::<Vec<_>>(),
        [(None, &b"hello"[..])]
    );
}
