//! TCP forwards.

use std::{
    io::{Read, Write},
    net::{Ipv4Addr, Shutdown, SocketAddr, TcpListener, TcpStream},
    thread,
};

use culvert_tests::{clock::PATIENCE, needs, pair::Plan, ports, random::Random, upstream::Echo};

fn connect(address: SocketAddr) -> TcpStream {
    let stream = TcpStream::connect(address).unwrap();
    stream.set_read_timeout(Some(PATIENCE)).unwrap();
    stream.set_write_timeout(Some(PATIENCE)).unwrap();
    stream
}

#[test]
fn a_file_arrives_whole_and_the_answer_comes_after_the_half_close() {
    if !needs::met("TCP copy and half-close", needs::AGENTS) {
        return;
    }
    let echo = Echo::new();
    let ingress: SocketAddr = (Ipv4Addr::LOCALHOST, ports::free()).into();
    let pair = Plan::default().service("echo", echo.address, "").forward("echo", ingress).start();
    let mut random = Random::new(2);
    let file = random.bytes(10 << 20);
    let mut stream = connect(ingress);
    stream.write_all(&file).unwrap();
    // The upstream answers once it has seen the end.
    stream.shutdown(Shutdown::Write).unwrap();
    let mut answer = Vec::with_capacity(file.len());
    stream.read_to_end(&mut answer).unwrap();
    assert_eq!(answer.len(), file.len(), "seed {}", random.seed);
    assert!(answer == file, "the bytes differ; seed {}", random.seed);
    for (_, agent) in pair.ends() {
        agent.wait_for("the stream is counted and gone", |samples| {
            let count = |name, labels: &[_]| samples.count(name, labels);
            let (open, opened) =
                (count("culvert_tcp_streams", &[]), count("culvert_tcp_streams_opened_total", &[]));
            let bytes = ["uplink", "downlink"]
                .map(|direction| count("culvert_tcp_bytes_total", &[("direction", direction)]));
            let expected = [file.len() as u64; 2];
            if (open, opened, bytes) == (0, 1, expected) {
                return Ok(());
            }
            Err(format!("{open} open, {opened} opened, {bytes:?} bytes"))
        });
    }
}

#[test]
fn many_connections_at_once_do_not_mix() {
    const CONNECTIONS: u64 = 50;
    if !needs::met("many TCP connections", needs::AGENTS) {
        return;
    }
    let echo = Echo::new();
    let ingress: SocketAddr = (Ipv4Addr::LOCALHOST, ports::free()).into();
    let _pair = Plan::default().service("echo", echo.address, "").forward("echo", ingress).start();
    thread::scope(|scope| {
        for number in 0..CONNECTIONS {
            scope.spawn(move || {
                let bytes = Random::new(number).bytes(20_000);
                let mut stream = connect(ingress);
                stream.write_all(&bytes).unwrap();
                stream.shutdown(Shutdown::Write).unwrap();
                let mut answer = Vec::new();
                stream.read_to_end(&mut answer).unwrap();
                assert!(answer == bytes, "connection {number} got {} other bytes", answer.len());
            });
        }
    });
}

#[test]
fn the_upstream_may_end_first() {
    if !needs::met("TCP ended by the upstream", needs::AGENTS) {
        return;
    }
    let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, ports::free())).unwrap();
    let ingress: SocketAddr = (Ipv4Addr::LOCALHOST, ports::free()).into();
    let upstream = listener.local_addr().unwrap();
    let _pair = Plan::default().service("greeter", upstream, "").forward("greeter", ingress).start();
    let greeter = thread::spawn(move || {
        let (mut stream, _) = listener.accept().unwrap();
        stream.set_read_timeout(Some(PATIENCE)).unwrap();
        stream.write_all(b"hello").unwrap();
        stream.shutdown(Shutdown::Write).unwrap();
        let mut rest = String::new();
        stream.read_to_string(&mut rest).unwrap();
        rest
    });
    let mut stream = connect(ingress);
    let mut greeting = String::new();
    stream.read_to_string(&mut greeting).unwrap();
    assert_eq!(greeting, "hello");
    // Its half is still open.
    stream.write_all(b"goodbye").unwrap();
    stream.shutdown(Shutdown::Write).unwrap();
    assert_eq!(greeter.join().unwrap(), "goodbye");
}
