//! TCP forwards.

use std::{
    io::{Read, Write},
    net::{Ipv4Addr, Shutdown, SocketAddr, TcpListener, TcpStream},
    process::Command,
    sync::Barrier,
    thread,
};

use culvert_tests::{
    agent::{Agent, culvert},
    clock::PATIENCE,
    needs,
    pair::{Pair, Plan},
    ports,
    random::Random,
    upstream::Echo,
};
use serde_json::Value;
use socket2::SockRef;

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

/// Sends bytes of its own through `target`, half of them at first, and compares what comes back.
fn compare(number: u64, target: SocketAddr, all_connected: &Barrier) {
    let bytes = Random::new(number).bytes(60_000);
    let (first, second) = bytes.split_at(bytes.len() / 2);
    let mut stream = connect(target);
    stream.write_all(first).unwrap();
    // All are open at the same time, and looked at.
    all_connected.wait();
    all_connected.wait();
    stream.write_all(second).unwrap();
    // The upstream answers once it has seen the end.
    stream.shutdown(Shutdown::Write).unwrap();
    let mut answer = Vec::new();
    stream.read_to_end(&mut answer).unwrap();
    assert!(answer == bytes, "connection {number} got {} other bytes", answer.len());
}

/// TCP forwards on the stream connections of an agent's only peer.
fn stream_forwards(agent: &Agent) -> u64 {
    let config = agent.config();
    let answer = culvert(&["status", "--json", "--config", config.to_str().unwrap()]);
    let answer: Value = serde_json::from_slice(&answer.stdout).unwrap();
    let connections = answer["status"]["peers"][0]["stream_connections"].as_array().unwrap();
    connections.iter().map(|connection| connection["forwards"].as_u64().unwrap()).sum()
}

#[test]
fn connections_of_both_ends_use_both_workers() {
    const EACH_WAY: u64 = 64;
    if !needs::met("TCP over two workers", needs::AGENTS) {
        return;
    }
    let echoes = [Echo::new(), Echo::new()];
    let [there, back]: [SocketAddr; 2] = [(); 2].map(|()| (Ipv4Addr::LOCALHOST, ports::free()).into());
    let pair = Plan::default().workers([2, 2]).prepare();
    let Pair { mut entry, mut exit, underlay } = pair;
    let sections = |service: &str, upstream: SocketAddr, listen: SocketAddr, other: &str, key: &str| {
        format!(
            "[[service]]\nname = \"{service}\"\nupstream = \"{upstream}\"\n\
             [[tcp]]\nlisten = \"{listen}\"\npeer = \"{other}\"\nservice = \"{other}\"\n\
             [[peer]]\nname = \"{other}\"\npublic_key = \"{key}\"\nservices = [\"{service}\"]\n"
        )
    };
    exit.configure(&format!(
        "[transport]\nlisten = [\"{underlay}\"]\nworkers = 2\n{}",
        sections("exit", echoes[0].address, back, "entry", entry.key())
    ));
    entry.configure(&format!(
        "[transport]\nworkers = 2\n{}endpoints = [\"{underlay}\"]\n",
        sections("entry", echoes[1].address, there, "exit", exit.key())
    ));
    exit.start();
    entry.start();
    let pair = Pair { entry, exit, underlay };
    pair.wait_for_lanes(2);
    // The first ones are served by the control connection, and have the other one opened.
    for target in [there, back] {
        compare(0, target, &Barrier::new(1));
    }
    for (_, agent) in pair.ends() {
        agent.wait_for_count("culvert_stream_connections", &[], 1);
    }
    let all_connected = Barrier::new(2 * EACH_WAY as usize + 1);
    thread::scope(|scope| {
        for number in 0..EACH_WAY {
            for (target, number) in [(there, number), (back, EACH_WAY + number)] {
                let all_connected = &all_connected;
                scope.spawn(move || compare(number, target, all_connected));
            }
        }
        all_connected.wait();
        for (_, agent) in pair.ends() {
            agent.wait_for_count("culvert_tcp_streams", &[], 2 * EACH_WAY);
            // One worker has the control connection, the other one the stream connection: half of all, give or take those that a
            // worker took before it heard of the other's.
            let on_stream = stream_forwards(agent);
            assert!(
                (EACH_WAY / 2..=3 * EACH_WAY / 2).contains(&on_stream),
                "{on_stream} of {}",
                2 * EACH_WAY
            );
        }
        all_connected.wait();
    });
    for (_, agent) in pair.ends() {
        agent.wait_for_count("culvert_tcp_streams", &[], 0);
        agent.wait_for_count("culvert_tcp_streams_opened_total", &[], 2 * EACH_WAY + 2);
    }
    assert_eq!(pair.handed_over(), 0);
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

/// Lets this process have so many files open, if the hard limit does.
fn allow_files(most: u32) {
    let (process, limit) = (std::process::id().to_string(), format!("--nofile={most}:"));
    let status = Command::new("prlimit").args(["--pid", &process, &limit]).status().unwrap();
    assert!(status.success(), "ulimit -Hn is below {most}");
}

#[test]
fn two_thousand_connections_are_open_at_a_time_and_all_get_answers() {
    const CONNECTIONS: u32 = 2_000;
    if !needs::met("2,000 TCP connections", needs::AGENTS) {
        return;
    }
    allow_files(3 * CONNECTIONS);
    let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, ports::free())).unwrap();
    // With std's backlog of 128 the kernel sends SYN cookies, and resets a connection now and then.
    SockRef::from(&listener).listen(4096).unwrap();
    let (upstream, ingress) = (listener.local_addr().unwrap(), (Ipv4Addr::LOCALHOST, ports::free()).into());
    let pair = Plan::default().service("count", upstream, "").forward("count", ingress).start();
    let service = thread::spawn(move || {
        let answer = |(mut stream, _): (TcpStream, SocketAddr)| {
            let mut number = [0; 4];
            stream.set_read_timeout(Some(PATIENCE)).unwrap();
            stream.read_exact(&mut number).unwrap();
            stream.write_all(&number).unwrap();
            stream
        };
        // They stay open.
        (0..CONNECTIONS).map(|_| answer(listener.accept().unwrap())).collect::<Vec<_>>()
    });
    let mut clients: Vec<TcpStream> = (0..CONNECTIONS)
        .map(|number| {
            let mut stream = connect(ingress);
            stream.write_all(&number.to_be_bytes()).unwrap();
            stream
        })
        .collect();
    for (number, stream) in (0..).zip(&mut clients) {
        let mut answer = [0; 4];
        stream.read_exact(&mut answer).unwrap();
        assert_eq!(u32::from_be_bytes(answer), number);
    }
    let served = service.join().unwrap();
    for (name, agent) in pair.ends() {
        agent.wait_for_count("culvert_tcp_streams", &[], u64::from(CONNECTIONS));
        assert_eq!(agent.samples().count("culvert_tcp_refused_total", &[]), 0, "{name}");
    }
    drop((clients, served));
    for (name, agent) in pair.ends() {
        agent.wait_for(&format!("{name}: no connection is left"), |samples| {
            match samples.count("culvert_tcp_streams", &[]) {
                0 => Ok(()),
                open => Err(format!("{open} open")),
            }
        });
    }
}
