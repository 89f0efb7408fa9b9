//! How TCP forwards end by a reset, in every state and from either side; readers that stop, and those beside them.

use std::{io::ErrorKind, time::Duration};

use engine::worker::Worker;
use net::{TcpListener, TcpStream};
use wire::messages::Features;

use crate::{INGRESS, Pair, UPSTREAM};

/// A forward's two programs.
type Ends = (Box<dyn TcpStream>, Box<dyn TcpStream>);

struct Stage {
    pair: Pair,
    listener: Box<dyn TcpListener>,
}

impl Stage {
    fn of(mut pair: Pair) -> Self {
        pair.wait_for_lanes(1);
        Self { listener: pair.services.tcp_listen(UPSTREAM), pair }
    }

    fn new(seed: u64) -> Self {
        Self::of(Pair::new(seed, "", ""))
    }

    /// Without lanes: one connection carries the forwards and the datagrams.
    fn standard(seed: u64) -> Self {
        let mut pair = Pair::new(seed, "", "");
        let entry = pair.entry;
        pair.world.agent(entry).workers.iter_mut().for_each(Worker::withhold_lanes);
        pair.world.run(Duration::from_secs(2));
        Self { listener: pair.services.tcp_listen(UPSTREAM), pair }
    }

    fn run(&mut self, millis: u64) {
        self.pair.world.run(Duration::from_millis(millis));
    }

    fn open(&mut self) -> Ends {
        let client = self.pair.clients.tcp(INGRESS);
        for _ in 0..100 {
            self.run(10);
            let token = self.pair.services.token();
            if let Ok((service, _)) = self.listener.accept(token) {
                return (client, service);
            }
        }
        panic!("no connection came");
    }

    /// The forwards that either end has.
    fn left(&mut self) -> [u64; 2] {
        [self.pair.entry, self.pair.exit].map(|agent| self.pair.world.metric(agent, "culvert_tcp_streams"))
    }
}

/// Writes until nothing is taken for a second.
fn fill(stage: &mut Stage, mut end: impl FnMut() -> Option<usize>) -> usize {
    let (mut total, mut idle) = (0, 0);
    while idle < 100 {
        match end() {
            Some(written) => (total, idle) = (total + written, 0),
            None => idle += 1,
        }
        stage.run(10);
    }
    total
}

/// Reads what there is; the error or the end that follows.
fn read(end: &mut dyn TcpStream, into: &mut Vec<u8>) -> Result<(), ErrorKind> {
    let mut buffer = [0; 4_096];
    loop {
        match end.read(&mut buffer) {
            Ok(0) => return Ok(()),
            Ok(len) => into.extend_from_slice(&buffer[..len]),
            Err(error) => return Err(error.kind()),
        }
    }
}

/// Reads until the connection ends, for 5 s at most; returns how it ended.
fn read_to_end(stage: &mut Stage, end: &mut dyn TcpStream, into: &mut Vec<u8>) -> Result<(), ErrorKind> {
    for _ in 0..500 {
        match read(end, into) {
            Err(ErrorKind::WouldBlock) => stage.run(10),
            ended => return ended,
        }
    }
    Err(ErrorKind::WouldBlock)
}

fn bytes(count: usize) -> Vec<u8> {
    (0..count).map(|index| (index * 31 + index / 251) as u8).collect()
}

#[test]
fn an_abort_ends_a_forward_of_which_both_directions_are_full_at_both_ends() {
    for (seed, service_aborts) in [(4000, false), (4001, true)] {
        let mut stage = Stage::new(seed);
        let (mut client, mut service) = stage.open();
        let piece = vec![7; 60_000];
        fill(&mut stage, || client.write(&piece).ok());
        fill(&mut stage, || service.write(&piece).ok());
        assert_eq!(stage.left(), [1, 1]);
        let (mut aborted, mut other) = if service_aborts { (service, client) } else { (client, service) };
        aborted.abort();
        stage.run(2_500);
        assert_eq!(stage.left(), [0, 0], "{service_aborts}");
        assert_eq!(other.write(&piece).unwrap_err().kind(), ErrorKind::ConnectionReset);
    }
}

#[test]
fn an_idle_forward_ends_within_a_second_of_an_abort_in_each_state_of_its_halves() {
    for seed in 4010..4018 {
        let [service_aborts, client_closed, service_closed] = [1, 2, 4].map(|bit| (seed - 4010) & bit > 0);
        let mut stage = Stage::new(seed);
        let (mut client, mut service) = stage.open();
        if client_closed {
            client.shutdown_write().unwrap();
        }
        if service_closed {
            service.shutdown_write().unwrap();
        }
        stage.run(200);
        if client_closed && service_closed {
            assert_eq!(stage.left(), [0, 0], "it has ended in order");
            continue;
        }
        let (mut aborted, mut other) = if service_aborts { (service, client) } else { (client, service) };
        aborted.abort();
        stage.run(500);
        assert_eq!(stage.left(), [0, 0], "seed {seed}");
        let mut rest = Vec::new();
        let ended = read(&mut *other, &mut rest);
        let far_closed = if service_aborts { service_closed } else { client_closed };
        if !far_closed {
            assert_eq!(ended, Err(ErrorKind::ConnectionReset), "seed {seed}");
        }
        assert!(other.write(b"more").is_err(), "seed {seed}: the reset was passed on after a FIN, too");
    }
}

#[test]
fn what_came_before_an_abort_is_delivered_before_it() {
    for (seed, count) in [(4020, 1), (4021, 1_000), (4022, 30_000), (4023, 65_536), (4024, 500_000)] {
        for service_aborts in [false, true] {
            let mut stage = Stage::new(seed);
            let (client, service) = stage.open();
            let (mut from, mut to) = if service_aborts { (service, client) } else { (client, service) };
            let (sent, mut received) = (bytes(count), Vec::new());
            let mut written = 0;
            while written < count {
                match from.write(&sent[written..]) {
                    Ok(len) => written += len,
                    Err(_) => stage.run(5),
                }
                // A reader that keeps up only just.
                if count > 100_000 {
                    let _more = read(&mut *to, &mut received).is_err();
                }
            }
            from.abort();
            let ended = read_to_end(&mut stage, &mut *to, &mut received);
            assert_eq!(ended, Err(ErrorKind::ConnectionReset), "{count} bytes");
            assert!(received == sent, "{} of {count} bytes", received.len());
            stage.run(500);
            assert_eq!(stage.left(), [0, 0]);
        }
    }
}

#[test]
fn a_client_may_send_and_abort_before_the_service_has_accepted() {
    let mut stage = Stage::new(4030);
    let mut client = stage.pair.clients.tcp(INGRESS);
    stage.run(1);
    client.write(b"last words").unwrap();
    stage.run(1);
    client.abort();
    stage.run(1_000);
    let token = stage.pair.services.token();
    let (mut service, _) = stage.listener.accept(token).unwrap();
    let mut received = Vec::new();
    assert_eq!(read(&mut *service, &mut received), Err(ErrorKind::ConnectionReset));
    assert_eq!(received, b"last words");
    assert_eq!(stage.left(), [0, 0]);
}

#[test]
fn a_service_may_answer_and_abort_at_once() {
    for seed in 4032..4040 {
        let mut stage = Stage::new(seed);
        stage.pair.world.weather.borrow_mut().delay = Duration::from_millis(seed % 4 * 3);
        let mut client = stage.pair.clients.tcp(INGRESS);
        let mut service = loop {
            stage.run(1);
            let token = stage.pair.services.token();
            if let Ok((service, _)) = stage.listener.accept(token) {
                break service;
            }
        };
        service.write(b"no, thank you").unwrap();
        service.abort();
        let mut received = Vec::new();
        let ended = read_to_end(&mut stage, &mut *client, &mut received);
        assert_eq!(
            (ended, &received[..]),
            (Err(ErrorKind::ConnectionReset), &b"no, thank you"[..]),
            "seed {seed}"
        );
        stage.run(200);
        assert_eq!(stage.left(), [0, 0]);
    }
}

#[test]
fn a_reader_that_stands_still_delays_an_abort_by_two_seconds_only() {
    let mut stage = Stage::new(4031);
    let (mut client, service) = stage.open();
    let piece = vec![7; 60_000];
    for _ in 0..10 {
        let _written = client.write(&piece).is_ok();
        stage.run(20);
    }
    client.abort();
    stage.run(1_500);
    assert!(stage.left()[1] == 1, "the service may read on");
    stage.run(1_000);
    assert_eq!(stage.left(), [0, 0]);
    drop(service);
}

#[test]
fn a_peer_that_does_not_know_how_aborts_are_told_is_served_as_before() {
    for (seed, old) in [(4040, 0), (4041, 1)] {
        let mut pair = Pair::new(seed, "", "");
        let agent = [pair.entry, pair.exit][old];
        let withheld = Features::STREAM_ABORT.and(Features::STREAM_CREDIT);
        pair.world.agent(agent).workers.iter_mut().for_each(|worker: &mut Worker| worker.withhold(withheld));
        let mut stage = Stage::of(pair);
        for service_aborts in [false, true] {
            let (mut client, mut service) = stage.open();
            let piece = vec![7; 60_000];
            fill(&mut stage, || client.write(&piece).ok());
            fill(&mut stage, || service.write(&piece).ok());
            if service_aborts {
                service.abort();
            } else {
                client.abort();
            }
            stage.run(2_500);
            assert_eq!(stage.left(), [0, 0], "old end {old}, {service_aborts}");
        }
    }
}

#[test]
fn ten_thousand_aborts_at_once_in_all_states_leave_nothing_and_end_no_session() {
    let mut stage = Stage::new(4050);
    let mut ends = Vec::new();
    for wave in 0..200 {
        let clients: Vec<_> = (0..50).map(|_| stage.pair.clients.tcp(INGRESS)).collect();
        for client in clients {
            let service = loop {
                let token = stage.pair.services.token();
                match stage.listener.accept(token) {
                    Ok((service, _)) => break service,
                    Err(_) => stage.run(10),
                }
            };
            ends.push((client, service));
        }
        assert_eq!(ends.len(), 50 * (wave + 1));
    }
    for (number, (client, service)) in ends.iter_mut().enumerate() {
        // One in ten fills what there is to fill.
        let piece = vec![7; if number % 10 == 0 { 30_000 } else { 300 }];
        for _ in 0..number % 3 {
            let _written = client.write(&piece).is_ok();
        }
        for _ in 0..number % 5 {
            let _written = service.write(&piece).is_ok();
        }
        if number % 7 == 0 {
            client.shutdown_write().unwrap();
        }
    }
    stage.run(1_000);
    let before =
        stage.pair.world.metric(stage.pair.entry, "culvert_handshakes_total{outcome=\"established\"}");
    for (number, (client, service)) in ends.iter_mut().enumerate() {
        if number % 2 == 0 { client.abort() } else { service.abort() }
    }
    stage.run(3_000);
    assert_eq!(stage.left(), [0, 0]);
    assert_eq!(
        stage.pair.world.metric(stage.pair.entry, "culvert_handshakes_total{outcome=\"established\"}"),
        before
    );
    let (mut client, mut service) = stage.open();
    client.write(b"question").unwrap();
    stage.run(100);
    let mut received = Vec::new();
    assert_eq!(read(&mut *service, &mut received), Err(ErrorKind::WouldBlock));
    assert_eq!(received, b"question");
}

/// Downloads much, so that the windows grow.
fn warm_up(stage: &mut Stage) {
    let (mut client, mut service) = stage.open();
    let (piece, mut received) = (vec![7; 60_000], Vec::new());
    for _ in 0..3_000 {
        while service.write(&piece).is_ok() {}
        stage.run(1);
        received.clear();
        let _more = read(&mut *client, &mut received).is_err();
    }
}

#[test]
fn any_number_of_readers_that_stop_leave_the_others_their_rate_and_go_on_later() {
    for (seed, services_stop, stopped, standard) in [
        (4060, false, 9, false),
        (4061, true, 9, false),
        (4062, false, 100, false),
        (4063, true, 100, false),
        (4064, false, 100, true),
        (4065, true, 9, true),
    ] {
        let mut stage = if standard { Stage::standard(seed) } else { Stage::new(seed) };
        warm_up(&mut stage);
        let mut ends: Vec<Ends> = (0..stopped).map(|_| stage.open()).collect();
        let (mut client, mut service) = stage.open();
        let (piece, mut buffer) = (vec![7; 60_000], vec![0; 60_000]);
        let mut written = vec![0; stopped];
        let mut rates = Vec::new();
        // The last forward is read; before the others begin, and beside them.
        for beside in [false, true] {
            let mut received = 0;
            for round in 0..4_000 {
                if beside && round % 10 == 0 {
                    for ((client, service), written) in ends.iter_mut().zip(&mut written) {
                        let from = if services_stop { client } else { service };
                        while let Ok(len) = from.write(&piece) {
                            *written += len;
                        }
                    }
                }
                let (from, to) =
                    if services_stop { (&mut client, &mut service) } else { (&mut service, &mut client) };
                while from.write(&piece).is_ok() {}
                stage.run(1);
                while let Ok(len) = to.read(&mut buffer) {
                    received += len;
                }
            }
            rates.push(received);
        }
        println!("seed {seed}: {rates:?} bytes, {} stopped after {:?}", stopped, written.iter().max());
        assert!(rates[1] * 5 >= rates[0] * 4, "{rates:?}");
        // Each of those that stopped gets every byte, once it reads again.
        let mut left: Vec<usize> = written.clone();
        for _ in 0..20_000 {
            if left.iter().all(|left| *left == 0) {
                break;
            }
            for ((client, service), left) in ends.iter_mut().zip(&mut left) {
                let to = if services_stop { service } else { client };
                while let Ok(len) = to.read(&mut buffer) {
                    assert!(len > 0 && buffer[..len].iter().all(|byte| *byte == 7));
                    *left -= len;
                }
            }
            stage.run(1);
        }
        assert!(left.iter().all(|left| *left == 0), "{} wait", left.iter().filter(|left| **left > 0).count());
    }
}
