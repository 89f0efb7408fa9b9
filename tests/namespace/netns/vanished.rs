//! Clients and services that vanish: their host goes silent without a word. With a keepalive of a second, the least, they are gone
//! after four.

use std::{
    io::{ErrorKind, Read, Write},
    net::{SocketAddr, TcpListener, TcpStream},
    thread,
    time::Duration,
};

use culvert_tests::{
    clock::{self, PATIENCE},
    needs,
    pair::{Pair, Plan},
    place::{Cable, Place},
    ports,
};

use culvert_tests::ports::loopback;

/// `keepalive = "1s"`: a second, and three probes a second apart.
const LIMIT: Duration = Duration::from_secs(4);

const KEEPALIVE: &str = "keepalive = \"1s\"\n";

fn listen(place: &Place, at: SocketAddr) -> TcpListener {
    place.enter(|| TcpListener::bind(at)).unwrap()
}

/// A connection from `place` to `to` and what `listener` has accepted of it.
fn connect(place: &Place, to: SocketAddr, listener: &TcpListener) -> [TcpStream; 2] {
    let client = place.enter(|| TcpStream::connect(to)).unwrap();
    let (server, _) = listener.accept().unwrap();
    [client, server]
}

/// Writes until the other end has stopped everything in between for a while.
fn fill(stream: &mut TcpStream) -> usize {
    stream.set_write_timeout(Some(Duration::from_secs(2))).unwrap();
    let mut written = 0;
    loop {
        match stream.write(&[7; 65_536]) {
            Ok(more) => written += more,
            Err(error) if [ErrorKind::WouldBlock, ErrorKind::TimedOut].contains(&error.kind()) => {
                return written;
            }
            Err(error) => panic!("after {written} bytes: {error}"),
        }
    }
}

/// Waits until the connection is reset.
fn wait_for_reset(stream: &mut TcpStream, what: &str) {
    stream.set_read_timeout(Some(PATIENCE)).unwrap();
    let error = stream.read(&mut [0; 16]).expect_err(what);
    assert_eq!(error.kind(), ErrorKind::ConnectionReset, "{what}");
}

/// An entry and an exit beside a service, at the second of two hosts: clients, and a service, are at the first.
struct Hosts {
    cable: Cable,
    pair: Pair,
    near: TcpListener,
    far: TcpListener,
    /// The entry's ports for the service beside the exit, and for the one at the other host.
    to_near: SocketAddr,
    to_far: SocketAddr,
}

impl Hosts {
    fn new() -> Self {
        let cable = Cable::new();
        let [there, here] = cable.places();
        let port = |address: &str| SocketAddr::new(address.parse().unwrap(), ports::free());
        let (near, far) = (loopback(), port(Cable::FIRST[0]));
        let (to_near, to_far) = (port(Cable::SECOND[0]), loopback());
        let plan = Plan::default()
            .at([here.clone(), here.clone()])
            .service("near", near, "")
            .service("far", far, KEEPALIVE)
            .forward("far", to_far)
            .forward("near", to_near)
            .entry(KEEPALIVE);
        let (near, far) = (listen(&here, near), listen(&there, far));
        Self { pair: plan.start(), cable, near, far, to_near, to_far }
    }

    fn vanished(&self) -> [u64; 2] {
        let [client, service] =
            [("client_vanished", &self.pair.entry), ("service_vanished", &self.pair.exit)];
        [client, service]
            .map(|(reason, agent)| agent.samples().count("culvert_tcp_ended_total", &[("reason", reason)]))
    }
}

#[test]
fn who_vanishes_is_noticed_and_who_only_stops_reading_stays() {
    if !needs::met("ends that vanish", needs::NETNS) {
        return;
    }
    let hosts = Hosts::new();
    let [there, here] = hosts.cable.places();
    let [mut reader, mut writer] = connect(&there, hosts.to_near, &hosts.near);
    let [_stopped, mut to_stopped] = connect(&there, hosts.to_near, &hosts.near);
    let [_idle, mut to_idle] = connect(&there, hosts.to_near, &hosts.near);
    let [mut of_service, _service] = connect(&here, hosts.to_far, &hosts.far);
    let written = fill(&mut writer);

    // A reader that has stopped for several times the limit.
    thread::sleep(4 * LIMIT);
    assert_eq!(hosts.vanished(), [0; 2], "all are there");
    let reading = thread::spawn(move || {
        let mut read = 0;
        let mut buffer = [0; 65_536];
        while read < written + 100_000 {
            let more = reader.read(&mut buffer).unwrap();
            assert!(more > 0 && buffer[..more].iter().all(|byte| *byte == 7));
            read += more;
        }
        (reader, read)
    });
    writer.set_write_timeout(Some(PATIENCE)).unwrap();
    writer.write_all(&[7; 100_000]).unwrap();
    let (_reader, read) = reading.join().unwrap();
    assert_eq!(read, written + 100_000);

    // One has its window closed and bytes queued for it; the others wait for a word.
    fill(&mut to_stopped);
    there.tell(&["ip", "link", "set", "veth0", "down"]);
    let begin = clock::now();
    wait_for_reset(&mut to_idle, "the service of a client that was idle");
    wait_for_reset(&mut of_service, "the client of a service that was idle");
    let of_idle = begin.elapsed();
    wait_for_reset(&mut to_stopped, "the service of a client that had stopped reading");
    println!("idle: {of_idle:?}; bytes queued: {:?}", begin.elapsed());
    assert!(of_idle > LIMIT / 2, "{of_idle:?}");
    // The reader, which was idle in the end, goes with them.
    clock::until("all clients and the service", PATIENCE, || match hosts.vanished() {
        [3, 1] => Ok(()),
        other => Err(format!("{other:?}")),
    });
    for agent in [&hosts.pair.entry, &hosts.pair.exit] {
        agent.wait_for_count("culvert_tcp_streams", &[], 0);
    }
}
