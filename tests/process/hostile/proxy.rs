//! Connections and datagrams to a port that expects PROXY headers: garbage, halves, slow ones, some from where no balancer is, and floods
//! of clients that one names.

use std::{
    io::{Read as _, Write as _},
    net::{SocketAddr, TcpStream, UdpSocket},
    thread,
    time::Duration,
};

use culvert_tests::{
    client::Client,
    needs,
    pair::{Pair, Plan},
    place::Place,
    ports,
    tcp_echo::TcpEcho,
    upstream::Echo,
};

/// How many connections of each kind come.
const EACH: u64 = 40;

/// The first bytes of a header of version 2.
const SIGNATURE: &[u8; 12] = b"\r\n\r\n\0\r\nQUIT\n";

/// A good header of version 2, of a client at 192.0.2.9.
fn good() -> Vec<u8> {
    let mut header = SIGNATURE.to_vec();
    header.extend([0x21, 0x11, 0, 12, 192, 0, 2, 9, 192, 0, 2, 1]);
    header.extend([1_234_u16, 80].map(u16::to_be_bytes).concat());
    header
}

/// Of each kind one that is no header; the rest of it is `random`.
fn wrong(kind: u64, random: u64) -> Vec<u8> {
    let noise: Vec<u8> = (0..64).map(|place| (random >> (place % 56)) as u8 | 0x80).collect();
    match kind {
        // A request without a header; noise.
        0 => b"GET / HTTP/1.1\r\nHost: a\r\n\r\n".to_vec(),
        1 => noise,
        // Version 1: no end, no numbers, too many words.
        2 => [b"PROXY TCP4 ".to_vec(), vec![b'1'; 200]].concat(),
        3 => b"PROXY TCP4 192.0.2.256 192.0.2.1 1 2\r\n".to_vec(),
        4 => b"PROXY TCP6 192.0.2.9 192.0.2.1 70000 2 3\r\n".to_vec(),
        // Version 2: of another version, of an unknown command, with an address that is cut off, longer than any may be.
        5 => [&SIGNATURE[..], &[0x31, 0x11, 0, 12], &noise].concat(),
        6 => [&SIGNATURE[..], &[0x2f, 0x11, 0, 12], &noise].concat(),
        7 => [&SIGNATURE[..], &[0x21, 0x11, 0, 4], &noise].concat(),
        _ => [&SIGNATURE[..], &[0x21, 0x11, 0xff, 0xff], &noise].concat(),
    }
}

/// Sends `bytes` on a new connection; whether it is open afterwards.
fn stays(at: SocketAddr, bytes: &[u8]) -> bool {
    let mut stream = TcpStream::connect(at).unwrap();
    stream.set_read_timeout(Some(Duration::from_secs(20))).unwrap();
    stream.write_all(bytes).is_ok() && stream.read(&mut [0; 16]).is_ok_and(|length| length > 0)
}

fn refused(pair: &Pair, reason: &str, count: u64) {
    pair.entry.wait_for_count("culvert_tcp_refused_total", &[("reason", reason)], count);
}

#[test]
fn what_is_no_proxy_header_ends_alone() {
    if !needs::met("hostile PROXY headers", needs::AGENTS) {
        return;
    }
    let (echo, [ingress, other]) = (TcpEcho::new(), [ports::loopback(), ports::loopback()]);
    let mut pair = Plan::default()
        .at([Place::Host, Place::Host])
        .service("web", echo.address, "protocol = \"tcp\"\n")
        .forward("web", ingress)
        .entry("accept_proxy = [\"127.0.0.0/8\"]\n")
        .forward("web", other)
        .entry("accept_proxy = [\"192.0.2.0/24\"]\n")
        .start();
    let mut seed = 0x5eed_u64;
    println!("seed {seed:#x}");
    for _ in 0..EACH {
        for kind in 0..9 {
            seed = seed.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
            assert!(!stays(ingress, &wrong(kind, seed)), "{kind} {seed:#x}");
        }
        // From where no balancer is, whatever it says.
        assert!(!stays(other, &good()));
    }
    refused(&pair, "proxy_header", 9 * EACH);
    refused(&pair, "proxy_source", EACH);
    // A half that is all: it is ended by its end, or by the clock.
    for half in [&good()[..5], &good()[..20], b"PROXY TCP4 192.0"] {
        drop(TcpStream::connect(ingress).map(|mut stream| stream.write_all(half)).unwrap());
    }
    refused(&pair, "proxy_header", 9 * EACH + 3);
    let held: Vec<_> = (0..EACH)
        .map(|place| {
            let mut stream = TcpStream::connect(ingress).unwrap();
            stream.write_all(&good()[..place as usize % 28]).unwrap();
            stream
        })
        .collect();
    // One that comes byte by byte, in time, is a header like any other, and what follows it is the client's.
    let mut slow = TcpStream::connect(ingress).unwrap();
    for byte in good() {
        slow.write_all(&[byte]).unwrap();
        thread::sleep(Duration::from_millis(20));
    }
    slow.write_all(b"hello").unwrap();
    let mut came = [0; 5];
    slow.read_exact(&mut came).unwrap();
    assert_eq!(&came, b"hello");
    refused(&pair, "proxy_timeout", EACH);
    drop(held);
    assert_eq!(pair.entry.process().ended(), None);
    // Others hear of it once in ten seconds.
    let said = pair.entry.log().lines().filter(|line| line.contains("expects a PROXY header")).count();
    assert!((1..=10).contains(&said), "{said} lines");
}

/// A datagram of a client with this number behind a good header.
fn datagram_of(client: u32) -> Vec<u8> {
    let mut datagram = good();
    // UDP over IPv4.
    datagram[13] = 0x12;
    datagram[16..20].copy_from_slice(&(0xcb00_0000 + client).to_be_bytes());
    datagram.extend(client.to_be_bytes());
    datagram
}

/// Flows of a peer at the entry.
fn flows(pair: &Pair) -> u64 {
    pair.entry.samples().count("culvert_flows", &[("peer", "exit")])
}

#[test]
fn datagrams_without_a_proxy_header_are_counted_and_clients_that_are_named_are_bounded() {
    const MOST_FLOWS: u64 = 1_000;
    if !needs::met("hostile PROXY datagrams", needs::AGENTS) {
        return;
    }
    let (echo, [ingress, other, plain]) = (Echo::new(), [(); 3].map(|()| ports::loopback()));
    let port = |listen: SocketAddr, lines: &str| {
        format!("[[udp]]\nlisten = \"{listen}\"\npeer = \"exit\"\nservice = \"web\"\n{lines}")
    };
    let mut pair = Plan::default()
        .at([Place::Host, Place::Host])
        .service("web", echo.address, "")
        .entry(&port(ingress, "accept_proxy = [\"127.0.0.0/8\"]\n"))
        .entry(&port(other, "accept_proxy = [\"192.0.2.0/24\"]\n"))
        .entry(&port(plain, ""))
        .entry(&format!("[limits]\nflows_per_peer = {MOST_FLOWS}\n"))
        .start();
    let socket = UdpSocket::bind("127.0.0.1:0").unwrap();
    let dropped = |pair: &Pair, count: u64| {
        pair.entry.wait_for_count("culvert_datagrams_dropped_total", &[("reason", "no_proxy_header")], count);
    };
    let mut seed = 0xda7a_u64;
    println!("seed {seed:#x}");
    for round in 0..EACH {
        for kind in 0..9 {
            seed = seed.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
            socket.send_to(&wrong(kind, seed), ingress).unwrap();
        }
        // Torn at each place; of TCP; from where no proxy is, whatever it says.
        socket.send_to(&datagram_of(1)[..round as usize % 28], ingress).unwrap();
        socket.send_to(&good(), ingress).unwrap();
        socket.send_to(&datagram_of(1), other).unwrap();
        dropped(&pair, 12 * (round + 1));
    }
    assert_eq!(flows(&pair), 0);
    // One of the many is answered, behind no header, and so is whoever needs none.
    socket.set_read_timeout(Some(Duration::from_secs(20))).unwrap();
    socket.send_to(&datagram_of(7), ingress).unwrap();
    let mut answer = [0; 64];
    let length = socket.recv(&mut answer).unwrap();
    assert_eq!(answer[..length], 7_u32.to_be_bytes());
    let mut client = Client::new(0, plain);
    client.converse(3);
    for client in 0..20_000 {
        socket.send_to(&datagram_of(client), ingress).unwrap();
        if client % 64 == 0 {
            thread::sleep(Duration::from_millis(2));
        }
    }
    // How many came to the agent is the kernel's business; half of the flows and one of each worker's are theirs.
    let most = MOST_FLOWS / 2 + 64;
    pair.entry.wait_for("the oldest gave way", |samples| {
        let [ended, flows] =
            [("culvert_flows_evicted_total", "reason", "proxied"), ("culvert_flows", "peer", "exit")]
                .map(|(name, label, value)| samples.count(name, &[(label, value)]));
        if ended > 1_000 && flows <= most { Ok(()) } else { Err(format!("{ended} ended, {flows} flows")) }
    });
    client.converse(20);
    assert_eq!(pair.entry.process().ended(), None);
    pair.accounts();
    let said = pair.entry.log().lines().filter(|line| line.contains("expects a PROXY header")).count();
    assert!((1..=10).contains(&said), "{said} lines");
}
