//! TCP connections that wait in a listen backlog: for room, and for a peer whose session is in doubt.

use std::{io::ErrorKind, time::Duration};

use ::gate::identity::Identity;
use base::ids::SessionRef;
use dataplane::peer::Suspicion;
use engine::origin::PeerOrigin;
use net::{TcpListener, TcpStream};

use super::{ENTRY, EXIT, INGRESS, Pair, UPSTREAM, numbered};

const SECOND: Duration = Duration::from_secs(1);
const MOMENT: Duration = Duration::from_millis(200);
const NOT_CONNECTED: &str = "culvert_tcp_refused_total{reason=\"not_connected\"}";
const PAUSES: &str = "culvert_tcp_accept_pauses_total";

/// A pair, a service behind its exit that accepts whoever connects, and its clients, oldest first.
struct Queue {
    pair: Pair,
    listener: Box<dyn TcpListener>,
    served: Vec<Box<dyn TcpStream>>,
    clients: Vec<Box<dyn TcpStream>>,
}

impl Queue {
    fn new(seed: u64, workers: (u8, u8), entry_extra: &str) -> Self {
        let mut pair = Pair::with_workers(seed, workers, entry_extra, "");
        pair.wait_for_lanes(usize::from(workers.0.max(workers.1)));
        let listener = pair.services.tcp_listen(UPSTREAM);
        Self { pair, listener, served: Vec::new(), clients: Vec::new() }
    }

    fn run(&mut self, time: Duration) {
        self.pair.world.run(time);
        let token = self.pair.services.token();
        while let Ok((stream, _)) = self.listener.accept(token) {
            self.served.push(stream);
        }
    }

    /// Clients connect, one after the other; the first of them has stream connections dialled.
    fn open(&mut self, count: usize) {
        for _ in 0..count {
            self.clients.push(self.pair.clients.tcp(INGRESS));
            self.run(if self.clients.len() == 1 { SECOND } else { MOMENT });
        }
    }

    /// The forward of the client that was served in this place ends.
    fn close(&mut self, place: usize) {
        drop(self.clients.remove(place));
        self.served.remove(place).shutdown_write().unwrap();
        self.run(MOMENT);
    }

    /// Why the client that came last can read nothing.
    fn last(&mut self) -> ErrorKind {
        self.clients.last_mut().unwrap().read(&mut [0; 4]).unwrap_err().kind()
    }

    fn count(&mut self, name: &str) -> u64 {
        self.pair.world.metric(self.pair.entry, name)
    }

    /// A client keeps sending datagrams for a while, so that silence is noticed.
    fn run_with_traffic(&mut self, time: Duration) {
        let mut client = self.pair.client(3000);
        for number in 0..time.as_millis() / 20 {
            client.send(INGRESS, &numbered(number as u32));
            self.pair.run_served(Duration::from_millis(20));
        }
        self.run(Duration::ZERO);
    }

    /// Nothing passes between the agents, or all does.
    fn block(&mut self, blocked: bool) {
        self.pair.world.weather.borrow_mut().block = Box::new(move |from, to| {
            blocked && [[ENTRY, EXIT], [EXIT, ENTRY]].contains(&[from.ip(), to.ip()])
        });
    }
}

#[test]
fn who_comes_to_a_ceiling_that_was_reached_long_ago_waits_for_as_long_as_others() {
    for (seed, workers) in [(9600, (1, 1)), (9601, (2, 2)), (9602, (3, 3))] {
        let mut queue = Queue::new(seed, workers, "[limits]\ntcp_streams_per_peer = 4");
        queue.open(4);
        queue.run(8 * SECOND);
        assert_eq!((queue.served.len(), queue.count(PAUSES)), (4, 0), "seed {seed}: nobody has waited");
        for round in 1..=2 {
            queue.open(1);
            queue.run(4 * SECOND);
            assert_eq!(queue.last(), ErrorKind::WouldBlock, "seed {seed}, round {round}");
            queue.run(SECOND);
            assert_eq!(queue.last(), ErrorKind::ConnectionReset, "seed {seed}, round {round}");
            assert_eq!(queue.count(PAUSES), round, "seed {seed}");
            queue.run(3 * SECOND);
        }
    }
}

#[test]
fn a_crowd_that_another_worker_has_taken_is_forgotten() {
    for seed in 9610..9614 {
        let mut queue = Queue::new(seed, (2, 2), "[limits]\ntcp_streams_per_peer = 4");
        queue.open(4);
        // Both workers see the first that waits; either may take it when there is room.
        queue.open(1);
        queue.run(SECOND);
        queue.close((seed % 4) as usize);
        assert_eq!(queue.served.len(), 4, "seed {seed}: the first that waited has the place");
        queue.run(SECOND);
        queue.open(1);
        // The first came more than 5 s ago by now, the second has not waited for as long.
        queue.run(4 * SECOND);
        assert_eq!(queue.last(), ErrorKind::WouldBlock, "seed {seed}");
        queue.run(SECOND);
        assert_eq!(queue.last(), ErrorKind::ConnectionReset, "seed {seed}");
    }
}

#[test]
fn room_that_comes_at_any_worker_is_used_at_once() {
    let mut queue = Queue::new(9620, (3, 3), "[limits]\ntcp_streams_per_peer = 6");
    queue.open(6);
    for place in [0, 4, 1, 3, 2, 5, 0, 5] {
        queue.open(1);
        assert_eq!((queue.served.len(), queue.last()), (6, ErrorKind::WouldBlock));
        queue.close(place);
        assert_eq!(queue.served.len(), 6, "place {place}");
    }
    assert_eq!(queue.count("culvert_tcp_refused_total{reason=\"limit\"}"), 0);
}

#[test]
fn who_comes_while_the_peer_is_in_doubt_is_served_when_it_is_heard_again() {
    for (seed, workers) in [(9630, (1, 1)), (9631, (2, 2)), (9632, (1, 3))] {
        let mut queue = Queue::new(seed, workers, "");
        queue.open(1);
        queue.block(true);
        queue.run_with_traffic(SECOND);
        assert_eq!(
            queue.count("culvert_sessions_suspected_total{reason=\"unresponsive\"}"),
            1,
            "seed {seed}"
        );
        queue.open(1);
        queue.run_with_traffic(2 * SECOND);
        assert_eq!((queue.served.len(), queue.last()), (1, ErrorKind::WouldBlock), "seed {seed}");
        queue.block(false);
        queue.run_with_traffic(2 * SECOND);
        assert_eq!((queue.served.len(), queue.last()), (2, ErrorKind::WouldBlock), "seed {seed}");
        assert_eq!(queue.clients.last_mut().unwrap().write(b"ping").unwrap(), 4);
        queue.run(MOMENT);
        assert_eq!(queue.served[1].read(&mut [0; 10]).unwrap(), 4, "seed {seed}");
        assert_eq!((queue.count(NOT_CONNECTED), queue.count(PAUSES)), (0, 1), "seed {seed}");
    }
}

#[test]
fn who_waits_for_a_peer_that_is_not_heard_is_reset_after_five_seconds() {
    let mut queue = Queue::new(9640, (1, 1), "");
    queue.block(true);
    queue.run_with_traffic(SECOND);
    queue.open(1);
    queue.run(Duration::from_millis(3_800));
    assert_eq!(queue.last(), ErrorKind::WouldBlock);
    queue.run(SECOND);
    assert_eq!(queue.last(), ErrorKind::ConnectionReset);
    assert_eq!(queue.count(NOT_CONNECTED), 1);
}

#[test]
fn while_the_control_connection_does_not_answer_stream_connections_take_who_comes() {
    let mut queue = Queue::new(9650, (2, 2), "");
    queue.open(3);
    let worker = &queue.pair.world.agent(queue.pair.entry).workers[0];
    let (peer, link) = (worker.peers()[0].data.id, worker.peers()[0].data.link.as_ref().unwrap());
    let (session, doubt) = (link.session, Suspicion::ControlDead);
    for place in 0..2 {
        worker.hub().send_suspicion(place, SessionRef { peer, session }, doubt);
    }
    let before = queue.served.len();
    for _ in 0..3 {
        queue.clients.push(queue.pair.clients.tcp(INGRESS));
    }
    queue.run(Duration::from_millis(50));
    assert_eq!((queue.served.len() - before, queue.last()), (3, ErrorKind::WouldBlock));
    assert_eq!(queue.count(NOT_CONNECTED), 0);
}

#[test]
fn no_connection_is_refused_while_configurations_are_read_again_and_other_peers_come_and_go() {
    for (seed, workers) in [(9670, (1, 1)), (9671, (2, 3)), (9672, (3, 2))] {
        let mut queue = Queue::new(seed, workers, "");
        let guest = config::Peer {
            name: "guest".into(),
            origin: config::PeerOrigin::State,
            endpoints: Vec::new(),
            public_keys: vec![Identity::generate().unwrap().public_key()],
            ..config::Peer::clone(&queue.pair.world.agent(queue.pair.entry).workers[0].peers()[0].data.config)
        };
        let (entry, exit) = (queue.pair.entry, queue.pair.exit);
        let tomls = [queue.pair.entry_toml.clone(), queue.pair.exit_toml.clone()];
        for round in 0..300 {
            for (place, toml) in [(entry, &tomls[0]), (exit, &tomls[1])] {
                let toml = format!("{toml}[limits]\nflows = {}\n", 20_000 + round % 2);
                queue.pair.world.reload(place, &toml).unwrap();
                let registry = &queue.pair.world.agent(place).registry;
                if round % 2 == 0 {
                    registry.add(guest.clone(), PeerOrigin::State).unwrap();
                } else {
                    registry.remove("guest").unwrap();
                }
            }
            queue.clients.push(queue.pair.clients.tcp(INGRESS));
            queue.run(Duration::from_millis(50));
            assert_eq!(queue.served.len(), queue.clients.len(), "seed {seed}, round {round}");
            assert_eq!(queue.clients.last_mut().unwrap().write(b"ping").unwrap(), 4);
            queue.run(Duration::from_millis(20 + round % 31));
            let read = queue.served.last_mut().unwrap().read(&mut [0; 10]);
            assert_eq!(read.unwrap(), 4, "seed {seed}, round {round}");
            if queue.clients.len() > 5 {
                // Some at a time, each for a while.
                queue.close(0);
                assert_eq!(queue.last(), ErrorKind::WouldBlock, "seed {seed}, round {round}");
            }
        }
    }
}
