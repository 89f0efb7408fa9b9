//! What a peer says of streams beside them, in whatever order and however often: `StreamAbort` and `StreamCredit`.

use std::{io::ErrorKind, net::SocketAddr};

use net::{TcpListener, TcpStream};
use quinn_proto::{StreamId, VarInt};
use wire::messages::{Features, Hello, Message, Service, StreamOffset};

use crate::{EXIT, UPSTREAM, flood::GateFlood, malicious::MaliciousPeer};

/// A port of the exit that leads to the malicious peer's service.
const TO_ROGUE: SocketAddr = SocketAddr::new(EXIT, 7000);

/// `StreamOpen` for the exit's service, with its length.
const OPEN: [u8; 1] = [0];

/// `StreamAnswer` OK, with its length.
const OK: [u8; 3] = [2, 8, 1];

/// The first stream of the malicious peer behind its control stream.
const FIRST: u64 = 4;

struct Scene {
    flood: GateFlood,
    listener: Box<dyn TcpListener>,
}

impl Scene {
    /// The malicious peer has a session, knows both messages, and has a service of its own.
    fn new(seed: u64) -> Self {
        let port = format!("[[tcp]]\nlisten = \"{TO_ROGUE}\"\npeer = \"rogue\"\nservice = \"theirs\"");
        let mut flood = GateFlood::new(seed, &port);
        let Message::Hello(hello) = MaliciousPeer::hello() else { panic!("a hello") };
        let service = Service {
            number: 0,
            name: "theirs".to_owned(),
            udp: false,
            tcp: true,
            idle: wire::messages::DEFAULT_IDLE,
            fragment: false,
            repair: None,
            client: false,
        };
        let features = Features::STREAM_ABORT.and(Features::STREAM_CREDIT);
        flood.malicious.say(&Message::Hello(Hello { features, services: vec![service], ..hello }));
        flood.run(100);
        let listener = flood.pair.services.tcp_listen(UPSTREAM);
        Self { flood, listener }
    }

    fn run(&mut self, milliseconds: u64) {
        self.flood.run(milliseconds);
    }

    /// Opens a stream that begins with a header and `sent`.
    fn open(&mut self, sent: &[u8]) -> StreamId {
        self.flood.malicious.open_stream(&[&OPEN[..], sent].concat()).unwrap()
    }

    /// The service's connection of the oldest stream.
    fn accept(&mut self) -> Box<dyn TcpStream> {
        let token = self.flood.pair.services.token();
        self.listener.accept(token).unwrap().0
    }

    fn abort(&mut self, stream: u64, bytes: u64) {
        let aborts = vec![StreamOffset { stream, offset: bytes }];
        self.flood.malicious.say(&Message::StreamAbort(aborts));
    }

    fn credit(&mut self, initial: u64, limits: &[(u64, u64)]) {
        let limits = limits.iter().map(|&(stream, offset)| StreamOffset { stream, offset }).collect();
        self.flood.malicious.say(&Message::StreamCredit { initial, limits });
    }

    /// The forwards of the exit.
    fn forwards(&mut self) -> u64 {
        self.flood.metric("culvert_tcp_streams")
    }

    /// A forward of the peer carries bytes both ways, and nothing else is left of it or of the attack.
    fn goes_on(&mut self) {
        let before = self.forwards();
        let stream = self.open(b"question");
        self.run(50);
        let mut service = self.accept();
        assert_eq!(read(&mut *service), (b"question".to_vec(), Err(ErrorKind::WouldBlock)));
        service.write(b"answer").unwrap();
        self.run(50);
        assert_eq!(self.flood.malicious.read_stream(stream), Ok([&OK[..], b"answer"].concat()));
        service.abort();
        self.flood.malicious.reset_stream(stream);
        self.run(500);
        assert_eq!(self.forwards(), before);
        assert_eq!(self.flood.malicious.closed(), None);
        self.flood.assert_innocent_is_unharmed();
    }
}

/// What there is to read, and what follows.
fn read(end: &mut dyn TcpStream) -> (Vec<u8>, Result<(), ErrorKind>) {
    let (mut came, mut buffer) = (Vec::new(), [0; 4_096]);
    loop {
        match end.read(&mut buffer) {
            Ok(0) => return (came, Ok(())),
            Ok(len) => came.extend_from_slice(&buffer[..len]),
            Err(error) => return (came, Err(error.kind())),
        }
    }
}

const RESET: Result<(), ErrorKind> = Err(ErrorKind::ConnectionReset);

#[test]
fn an_abort_that_overtakes_its_stream_waits_for_it() {
    let mut scene = Scene::new(4100);
    scene.abort(FIRST, 1 + 10);
    scene.run(5_000);
    let stream = scene.open(b"0123456789");
    assert_eq!(u64::from(stream), FIRST);
    scene.run(100);
    let mut service = scene.accept();
    assert_eq!(read(&mut *service), (b"0123456789".to_vec(), RESET));
    assert!(scene.flood.malicious.is_stopped(stream));
    assert_eq!(scene.flood.malicious.read_stream(stream), Err(VarInt::from_u32(1)));
    assert_eq!(scene.forwards(), 0);
    scene.goes_on();
}

#[test]
fn an_abort_that_overtakes_the_end_of_its_stream_waits_for_it() {
    let mut scene = Scene::new(4101);
    let stream = scene.open(b"0123");
    scene.run(20);
    scene.abort(FIRST, 1 + 10);
    scene.run(1_000);
    assert_eq!(scene.forwards(), 1);
    scene.flood.malicious.write_stream(stream, b"456789");
    scene.run(100);
    let mut service = scene.accept();
    assert_eq!(read(&mut *service), (b"0123456789".to_vec(), RESET));
    assert_eq!(scene.forwards(), 0);
    scene.goes_on();
}

#[test]
fn an_abort_about_a_stream_that_is_not_there_is_ignored() {
    let mut scene = Scene::new(4102);
    scene.goes_on();
    // The control stream, one that the exit would open, two of one direction, one that has ended; numbers beyond what may come.
    for stream in [0, 1, 2, 3, FIRST, 1 << 20, (1 << 62) - 4, 1 << 62, u64::MAX] {
        scene.abort(stream, 0);
        scene.abort(stream, u64::MAX);
        scene.credit(0, &[(stream, 0)]);
    }
    scene.flood.malicious.say(&Message::StreamAbort(Vec::new()));
    scene.run(50);
    scene.goes_on();
}

#[test]
fn only_the_first_abort_of_a_stream_counts() {
    let mut scene = Scene::new(4103);
    let stream = scene.open(b"");
    scene.run(20);
    scene.abort(FIRST, 1 + 10);
    scene.abort(FIRST, 0);
    let twice = [0, 1 << 40].map(|offset| StreamOffset { stream: FIRST, offset });
    scene.flood.malicious.say(&Message::StreamAbort(twice.to_vec()));
    scene.run(100);
    scene.flood.malicious.write_stream(stream, b"0123456789");
    scene.run(100);
    let mut service = scene.accept();
    assert_eq!(read(&mut *service), (b"0123456789".to_vec(), RESET));
    scene.abort(FIRST, 5);
    scene.run(50);
    assert_eq!(scene.forwards(), 0);
    scene.goes_on();
}

#[test]
fn an_abort_after_fewer_bytes_than_came_resets_at_once() {
    let mut scene = Scene::new(4104);
    scene.open(b"0123456789");
    scene.run(50);
    let mut service = scene.accept();
    assert_eq!(read(&mut *service), (b"0123456789".to_vec(), Err(ErrorKind::WouldBlock)));
    scene.abort(FIRST, 3);
    scene.run(50);
    assert_eq!(read(&mut *service), (Vec::new(), RESET));
    assert_eq!(scene.forwards(), 0);
    scene.goes_on();
}

#[test]
fn an_abort_after_more_bytes_than_ever_come_resets_in_two_seconds() {
    for (seed, bytes) in [(4105, 1 + 11), (4106, u64::MAX)] {
        let mut scene = Scene::new(seed);
        scene.open(b"0123456789");
        scene.run(50);
        let mut service = scene.accept();
        scene.abort(FIRST, bytes);
        scene.run(1_900);
        assert_eq!(read(&mut *service), (b"0123456789".to_vec(), Err(ErrorKind::WouldBlock)));
        scene.run(200);
        assert_eq!(read(&mut *service), (Vec::new(), RESET));
        assert_eq!(scene.forwards(), 0);
        scene.goes_on();
    }
}

#[test]
fn an_abort_that_comes_with_the_answer_leaves_the_client_what_came_before_it() {
    for (seed, aborts_first) in [(4107, false), (4108, true)] {
        let mut scene = Scene::new(seed);
        let mut client = scene.flood.pair.clients.tcp(TO_ROGUE);
        scene.run(50);
        let stream = scene.flood.malicious.accept_stream().unwrap();
        let answer = [&OK[..], b"no, thank you"].concat();
        scene.flood.malicious.stop_stream(stream);
        scene.abort(stream.into(), answer.len() as u64);
        if aborts_first {
            scene.run(50);
        }
        scene.flood.malicious.write_stream(stream, &answer);
        scene.run(100);
        assert_eq!(read(&mut *client), (b"no, thank you".to_vec(), RESET), "{aborts_first}");
        assert!(scene.flood.malicious.is_stopped(stream));
        assert_eq!(scene.forwards(), 0);
        scene.goes_on();
    }
}

#[test]
fn an_abort_without_an_answer_resets_the_client_in_two_seconds() {
    let mut scene = Scene::new(4109);
    let mut client = scene.flood.pair.clients.tcp(TO_ROGUE);
    scene.run(50);
    let stream = scene.flood.malicious.accept_stream().unwrap();
    scene.abort(stream.into(), 0);
    scene.run(2_100);
    assert_eq!(read(&mut *client), (Vec::new(), RESET));
    assert_eq!(scene.forwards(), 0);
    scene.goes_on();
}

#[test]
fn a_stream_is_sent_as_far_as_the_peer_allows() {
    let mut scene = Scene::new(4110);
    // A limit for the streams that begin, and one for a stream that is to come.
    scene.credit(1_000, &[(FIRST + 4, 5_000)]);
    scene.run(50);
    let streams = [scene.open(b""), scene.open(b"")];
    scene.run(50);
    let mut services = [scene.accept(), scene.accept()];
    let mut came = |scene: &mut Scene| {
        let mut total = [0, 0];
        for _ in 0..50 {
            for service in &mut services {
                while service.write(&[7; 1_000]).is_ok() {}
            }
            scene.run(10);
            for (stream, total) in streams.iter().zip(&mut total) {
                *total += scene.flood.malicious.read_stream(*stream).unwrap().len();
            }
        }
        total
    };
    assert_eq!(came(&mut scene), [1_000, 5_000]);
    scene.credit(1_000, &[(FIRST, 3_000), (FIRST + 4, 9_000)]);
    assert_eq!(came(&mut scene), [2_000, 4_000]);
    // The last limit counts, be it smaller than what was sent.
    scene.credit(1_000, &[(FIRST, 0), (FIRST + 4, 9_001)]);
    assert_eq!(came(&mut scene), [0, 1]);
    scene.credit(1_000, &[(FIRST, 3_001)]);
    assert_eq!(came(&mut scene), [1, 0]);
    scene.credit(0, &[(FIRST, u64::MAX)]);
    let [first, second] = came(&mut scene);
    assert!(first > 100_000 && second == 0, "{first} {second}");
}
