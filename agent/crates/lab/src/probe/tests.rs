//! The packets against a real QUIC server in memory, and the runner over a network in memory.

use std::{
    cell::RefCell,
    net::{IpAddr, Ipv4Addr, SocketAddr},
    rc::Rc,
    sync::Arc,
    time::Duration,
};

use base::clock::{Clock, ManualClock};
use gate::{knock::KNOCK_BYTES, retry::RETRY_TOKEN_BYTES};
use net::{
    Net, Path, Ready, ReceiveBatch, SendBatch, Token, UdpOptions, UdpRole,
    memory::{Datagram, MemoryFabric, Verdict as Fate},
};
use quinn_proto::{DatagramEvent, Endpoint, EndpointConfig, ServerConfig, crypto::rustls::QuicServerConfig};

use super::*;
use crate::{
    bench::party::{Party, Turn},
    probe::runner::{Runner, ports},
};

const SEED: u64 = 5;

#[test]
fn the_same_seed_makes_the_same_packets_and_another_makes_others() {
    assert_eq!(packets(SEED), packets(SEED));
    assert_ne!(packets(SEED), packets(SEED + 1));
}

#[test]
fn every_class_has_packets_in_order_and_none_is_too_long() {
    let probes = packets(SEED);
    let mut classes: Vec<Class> = probes.iter().map(|probe| probe.class).collect();
    classes.sort_unstable();
    classes.dedup();
    assert_eq!(classes, Class::ALL);
    assert!(probes.iter().all(|probe| probe.bytes.len() <= 1_500 && (1..=2).contains(&probe.rounds)));
    assert!(probes.len() < 4_000, "{}: the promise of `doctor --help`", probes.len());
    assert!(ports(&probes) < 300, "{}", ports(&probes));
}

/// A server that anyone may talk to, as quinn makes it.
fn server() -> Endpoint {
    let key = rcgen::generate_simple_self_signed(["example.com".to_owned()]).unwrap();
    let private = rustls_pki_types::PrivateKeyDer::try_from(key.signing_key.serialize_der()).unwrap();
    let provider = Arc::new(rustls::crypto::ring::default_provider());
    let mut tls = rustls::ServerConfig::builder_with_provider(provider)
        .with_protocol_versions(&[&rustls::version::TLS13])
        .unwrap()
        .with_no_client_auth()
        .with_single_cert(vec![key.cert.der().clone()], private)
        .unwrap();
    tls.alpn_protocols = vec![b"h3".to_vec(), b"culvert/1".to_vec()];
    let crypto = QuicServerConfig::try_from(tls).unwrap();
    let config = ServerConfig::with_crypto(Arc::new(crypto));
    Endpoint::new(Arc::new(EndpointConfig::default()), Some(Arc::new(config)), true, None)
}

/// The reaction of the server to a probe.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Reaction {
    Nothing,
    /// A packet without any connection: Version Negotiation, a close, a reset.
    Response,
    /// The server goes on with the handshake.
    Handshake,
    /// The server begins a connection and closes it.
    Refusal,
}

fn reaction(server: &mut Endpoint, probe: &Probe) -> Reaction {
    let (now, mut buffer) = (ManualClock::default().now(), Vec::new());
    let from = SocketAddr::from((Ipv4Addr::LOCALHOST, 5_000));
    let datagram = bytes::BytesMut::from(probe.bytes.as_slice());
    match server.handle(now, from, None, None, datagram, &mut buffer) {
        None => Reaction::Nothing,
        Some(DatagramEvent::Response(_)) => Reaction::Response,
        Some(DatagramEvent::ConnectionEvent(..)) => Reaction::Nothing,
        Some(DatagramEvent::NewConnection(incoming)) => {
            match server.accept(incoming, now, &mut buffer, None) {
                Err(error) if error.response.is_some() => Reaction::Refusal,
                Err(_) => Reaction::Nothing,
                Ok((_, mut connection)) => {
                    let sent = connection.poll_transmit(now, 1, &mut buffer);
                    if connection.is_closed() {
                        Reaction::Refusal
                    } else if sent.is_some_and(|sent| sent.size > 200) {
                        Reaction::Handshake
                    } else {
                        Reaction::Nothing
                    }
                }
            }
        }
    }
}

#[test]
fn a_server_takes_whole_initials_up_and_every_class_for_what_it_is() {
    for probe in packets(SEED) {
        let mut server = server();
        let found = reaction(&mut server, &probe);
        let expected: &[Reaction] = match probe.class {
            Class::Initial | Class::InitialWithToken => &[Reaction::Handshake],
            Class::BrokenTag | Class::ZeroRtt | Class::Handshake | Class::Retry | Class::VersionZero => {
                &[Reaction::Nothing, Reaction::Response]
            }
            Class::SmallInitial | Class::SplitInitial => &[Reaction::Nothing],
            // What makes quinn answer differs from one to the next; the point is that some of them do.
            Class::UnknownVersion
            | Class::FixedBit
            | Class::ConnectionId
            | Class::IllegalFrames
            | Class::BrokenLength
            | Class::Coalesced
            | Class::Mixture => {
                &[Reaction::Nothing, Reaction::Response, Reaction::Handshake, Reaction::Refusal]
            }
            Class::ShortHeader | Class::OtherProtocol | Class::Random => continue,
        };
        assert!(expected.contains(&found), "{:?} {}: {found:?}", probe.class, probe.detail);
    }
}

#[test]
fn a_server_puts_a_split_client_hello_together() {
    let parts: Vec<Probe> =
        packets(SEED).into_iter().filter(|probe| probe.class == Class::SplitInitial).collect();
    assert_eq!(parts.len(), 8);
    let (now, from) = (ManualClock::default().now(), SocketAddr::from((Ipv4Addr::LOCALHOST, 5_000)));
    for parts in parts.chunks(2) {
        let (mut server, mut buffer) = (server(), Vec::new());
        let datagram = |part: &Probe| bytes::BytesMut::from(part.bytes.as_slice());
        let first = server.handle(now, from, None, None, datagram(&parts[0]), &mut buffer);
        let Some(DatagramEvent::NewConnection(incoming)) = first else { panic!("{}", parts[0].detail) };
        let (_, mut connection) = server.accept(incoming, now, &mut buffer, None).unwrap();
        let second = server.handle(now, from, None, None, datagram(&parts[1]), &mut buffer);
        let Some(DatagramEvent::ConnectionEvent(_, event)) = second else { panic!("{}", parts[1].detail) };
        connection.handle_event(event);
        let sent = connection.poll_transmit(now, 1, &mut buffer);
        assert!(sent.is_some_and(|sent| sent.size > 200) && !connection.is_closed());
    }
}

/// Each class that some server answers does have a packet that makes this one answer: silence is worth something.
#[test]
fn a_server_that_is_not_silent_gives_itself_away() {
    let probes = packets(SEED);
    let gives_away = |class: Class, reaction_to: Reaction| {
        let found = probes
            .iter()
            .filter(|probe| probe.class == class)
            .any(|probe| reaction(&mut server(), probe) == reaction_to);
        assert!(found, "no packet of {class:?} leads to {reaction_to:?}");
    };
    gives_away(Class::UnknownVersion, Reaction::Response);
    gives_away(Class::UnknownVersion, Reaction::Handshake);
    gives_away(Class::FixedBit, Reaction::Handshake);
    gives_away(Class::ConnectionId, Reaction::Response);
    gives_away(Class::ConnectionId, Reaction::Handshake);
    gives_away(Class::IllegalFrames, Reaction::Refusal);
    gives_away(Class::Coalesced, Reaction::Handshake);
}

const OURS: IpAddr = IpAddr::V4(Ipv4Addr::new(192, 0, 2, 1));
const THEIRS: IpAddr = IpAddr::V4(Ipv4Addr::new(192, 0, 2, 2));
const WAIT: Duration = Duration::from_millis(300);

/// Probes a port on a network in memory; `listens` is what stands there.
fn probe(fabric: &MemoryFabric, target: SocketAddr, mut listens: impl FnMut()) -> Report {
    let (clock, ready) = (ManualClock::default(), Ready::default());
    let mut net = fabric.host(&[OURS], ready.clone());
    let options = Options { target, seed: SEED, wait: WAIT };
    let mut runner = Runner::new(&mut net, Rc::new(clock.clone()), options, packets(SEED)).unwrap();
    for _ in 0..100_000 {
        let mut tokens = Vec::new();
        ready.drain(&mut tokens);
        match runner.turn(&tokens) {
            Turn::Ended => {
                assert!(clock.elapsed() < Duration::from_secs(5), "{:?}", clock.elapsed());
                return runner.finish();
            }
            Turn::Now => {}
            Turn::At(at) => {
                listens();
                // What came meanwhile is taken before the time goes on.
                if !ready.is_empty() {
                    continue;
                }
                clock.advance(at.saturating_duration_since(clock.now()));
            }
        }
    }
    panic!("the runner does not end");
}

fn listener(fabric: &MemoryFabric, port: u16) -> (SocketAddr, Box<dyn net::UdpSocket>, Ready) {
    let ready = Ready::default();
    let mut net = fabric.host(&[THEIRS], ready.clone());
    let bind = SocketAddr::from((THEIRS, port));
    let role = UdpRole::Ingress;
    let options =
        UdpOptions { bind, connect: None, role, buffer_bytes: 8 << 20, interface: None, mark: 0, gso: true };
    (bind, net.udp(&options, Token(0)).unwrap(), ready)
}

#[test]
fn a_silent_port_is_found_silent_and_hears_every_packet_of_each_round() {
    let fabric = MemoryFabric::default();
    let heard = Rc::new(RefCell::new(Vec::new()));
    let log = Rc::clone(&heard);
    fabric.set_hook(move |datagram: &Datagram<'_>| {
        log.borrow_mut().push(datagram.payload.to_vec());
        Fate::Deliver
    });
    let (target, mut socket, _ready) = listener(&fabric, 4_433);
    let mut batch = ReceiveBatch::default();
    let report = probe(&fabric, target, || while socket.receive(&mut batch).is_ok() {});
    assert_eq!(report.verdict(), Verdict::Silence, "{report}");
    let mut expected: Vec<Vec<u8>> = Vec::new();
    for round in 1..=2 {
        let probes = packets(SEED).into_iter();
        expected.extend(probes.filter(|probe| probe.rounds >= round).map(|probe| probe.bytes));
    }
    assert!(*heard.borrow() == expected, "{} of {}", heard.borrow().len(), expected.len());
    assert_eq!(report.rows.iter().map(|row| row.sent).sum::<u64>(), expected.len() as u64);
    assert!(report.rows.iter().all(|row| row.sent > 0 && row.unsent + row.answers + row.refused == 0));
}

#[test]
fn an_answer_is_noted_with_its_class_and_its_first_bytes() {
    let fabric = MemoryFabric::default();
    let (target, mut socket, _ready) = listener(&fabric, 4_433);
    let mut batch = ReceiveBatch::default();
    let mut outgoing = SendBatch::default();
    let report = probe(&fabric, target, || {
        while socket.receive(&mut batch).is_ok() {
            for index in 0..batch.len() {
                let meta = *batch.meta(index);
                for segment in meta.segments() {
                    // An echo of DNS alone.
                    let datagram = &batch.buffer(index)[segment];
                    if datagram.get(12..20) != Some(b"\x07example".as_slice()) {
                        continue;
                    }
                    let path = Path { destination: meta.source, source: None, tos: 0 };
                    outgoing.tail(datagram.len()).unwrap().copy_from_slice(datagram);
                    outgoing.commit(&path, 0, datagram.len(), 1);
                }
            }
            socket.send(&mut outgoing, &mut |_, _| {});
        }
    });
    assert_eq!(report.verdict(), Verdict::Answers);
    let (answered, silent): (Vec<&Row>, Vec<&Row>) = report.rows.iter().partition(|row| row.answers > 0);
    assert_eq!(silent.len(), Class::ALL.len() - 1);
    let [row] = answered.as_slice() else { panic!("{report}") };
    assert_eq!((row.class, row.answers, row.answer_bytes), (Class::OtherProtocol, 2, 58));
    let first = row.first.as_ref().unwrap();
    assert_eq!((first.to.as_str(), first.bytes, first.start.len()), ("DNS query", 29, 16));
    let json = report.json();
    assert_eq!(json["verdict"], "answers");
    assert_eq!(json["classes"].as_array().map(Vec::len), Some(Class::ALL.len()));
    assert!(report.to_string().contains("29 bytes to \"DNS query\": "), "{report}");
}

#[test]
fn a_closed_port_is_refused_not_silent() {
    let fabric = MemoryFabric::default();
    // The host is there; nothing listens.
    let (_, _socket, _ready) = listener(&fabric, 4_433);
    let report = probe(&fabric, SocketAddr::from((THEIRS, 4_434)), || {});
    assert_eq!(report.verdict(), Verdict::Refused, "{report}");
}

#[test]
fn what_was_not_sent_is_not_called_silent() {
    let rows = || Class::ALL.map(|class| Row { sent: 90, unsent: 10, ..Row::new(class) }).to_vec();
    let verdict = |rows: Vec<Row>| {
        let target = SocketAddr::from((THEIRS, 4_433));
        Report { target, seed: SEED, wait: WAIT, rows }.verdict()
    };
    assert_eq!(verdict(rows()), Verdict::Silence);
    let mut without_a_class = rows();
    without_a_class[3].sent = 0;
    without_a_class[4].sent = 1_000;
    assert_eq!(verdict(without_a_class.clone()), Verdict::Incomplete);
    without_a_class[5].refused = 1;
    assert_eq!(verdict(without_a_class), Verdict::Refused);
    let mut too_few = rows();
    too_few[0].unsent += 1;
    assert_eq!(verdict(too_few), Verdict::Incomplete);
    let none = rows().into_iter().map(|row| Row { sent: 0, ..row }).collect();
    assert_eq!(verdict(none), Verdict::NothingSent);
}

/// The lengths that docs/probes.md promises: those that the gate looks closer at.
#[test]
fn tokens_as_long_as_those_of_knocks_and_retries_are_among_the_packets() {
    assert_eq!((KNOCK_BYTES, RETRY_TOKEN_BYTES), (136, 236));
    let probes = packets(SEED);
    for bytes in [KNOCK_BYTES, RETRY_TOKEN_BYTES] {
        let end = format!("token of {bytes} bytes");
        let of_length =
            |probe: &Probe| probe.class == Class::InitialWithToken && probe.detail.ends_with(&end);
        assert_eq!(probes.iter().filter(|probe| of_length(probe)).count(), 2, "{bytes}");
    }
}
