//! TCP forwards over all workers of both ends.

use std::{io::ErrorKind, net::SocketAddr, time::Duration};

use base::ids::PeerId;
use engine::worker::Worker;
use gate::preshared::PresharedKey;
use net::{TcpListener, TcpStream};
use wire::messages::{CloseReason, Features};

use crate::{CLIENT, ENTRY, EXIT, INGRESS, Pair, UPSTREAM};

const OPENED: &str = "culvert_stream_connections_opened_total";
const OPEN: &str = "culvert_stream_connections";
const SECOND: Duration = Duration::from_secs(1);

/// A TCP port at the exit, which leads to a service beside the entry.
const BACK: SocketAddr = SocketAddr::new(EXIT, 5400);
const BACK_SERVICE: SocketAddr = SocketAddr::new(CLIENT, 7);

/// A connection through the agents, its two ends.
struct Forward {
    client: Box<dyn TcpStream>,
    server: Box<dyn TcpStream>,
}

impl Forward {
    /// Whether bytes pass in both directions.
    fn works(&mut self, pair: &mut Pair) -> bool {
        let mut buffer = [0; 16];
        if self.client.write(b"ping").is_err() {
            return false;
        }
        pair.world.run(Duration::from_millis(120));
        if self.server.read(&mut buffer).ok() != Some(4) || self.server.write(b"answer").is_err() {
            return false;
        }
        pair.world.run(Duration::from_millis(120));
        self.client.read(&mut buffer).ok() == Some(6)
    }

    fn is_reset(&mut self) -> bool {
        let reset = |stream: &mut Box<dyn TcpStream>| match stream.read(&mut [0; 16]) {
            // The error is told once, and a write may have been told.
            Ok(0) => stream.write(b"ping").is_err_and(|error| error.kind() == ErrorKind::BrokenPipe),
            read => read.is_err_and(|error| error.kind() == ErrorKind::ConnectionReset),
        };
        reset(&mut self.client) && reset(&mut self.server)
    }
}

/// A pair, the service behind its exit, and forwards between them.
struct Forwarding {
    pair: Pair,
    service: Box<dyn TcpListener>,
    forwards: Vec<Forward>,
}

impl Forwarding {
    fn new(seed: u64, workers: (u8, u8)) -> Self {
        Self::with(seed, workers, "keepalive = \"5s\"")
    }

    fn with(seed: u64, workers: (u8, u8), extra: &str) -> Self {
        let mut pair = Pair::with_workers(seed, workers, extra, "");
        pair.wait_for_lanes(usize::from(workers.0.max(workers.1)));
        let service = pair.services.tcp_listen(UPSTREAM);
        Self { pair, service, forwards: Vec::new() }
    }

    /// Opens `count` forwards, one after the other.
    fn open(&mut self, count: usize) {
        for _ in 0..count {
            let client = self.pair.clients.tcp(INGRESS);
            self.pair.world.run(Duration::from_millis(40));
            let token = self.pair.services.token();
            let (server, _) = self.service.accept(token).expect("the service is connected");
            self.forwards.push(Forward { client, server });
        }
    }

    /// Opens forwards until all stream connections are up.
    fn warm_up(&mut self) {
        self.open(1);
        self.pair.world.run(SECOND);
    }

    fn all_work(&mut self) {
        for (place, forward) in self.forwards.iter_mut().enumerate() {
            assert!(forward.works(&mut self.pair), "forward {place}");
        }
    }
}

/// How many forwards each worker of an agent has.
fn shares(pair: &mut Pair, agent: usize) -> Vec<usize> {
    pair.world.agent(agent).workers.iter().map(|worker| worker.forwards()).collect()
}

/// How many stream connections each worker of an agent has.
fn connections(pair: &mut Pair, agent: usize) -> Vec<usize> {
    let of = |worker: &Worker| worker.peers()[0].streams.all.len();
    pair.world.agent(agent).workers.iter().map(of).collect()
}

#[test]
fn stream_connections_end_when_a_reload_leaves_no_preshared_key_in_common() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("psk");
    PresharedKey::generate().unwrap().write_new(&file).unwrap();
    for (seed, end) in [(2790, 0), (2791, 1)] {
        let mut forwarding = Forwarding::new(seed, (2, 2));
        forwarding.warm_up();
        forwarding.open(3);
        forwarding.all_work();
        let pair = &mut forwarding.pair;
        let ends = [pair.entry, pair.exit];
        assert!(ends.iter().all(|end| connections(pair, *end).iter().sum::<usize>() > 0));
        let toml = format!("{}\npreshared_key_file = {file:?}\n", [&pair.entry_toml, &pair.exit_toml][end]);
        pair.world.reload(ends[end], &toml).unwrap();
        pair.world.run(SECOND);
        for end in ends {
            assert_eq!(connections(pair, end), [0, 0]);
            assert!(!pair.world.peer(end).connected());
        }
        assert!(forwarding.forwards.iter_mut().all(Forward::is_reset));
    }
}

#[test]
fn forwards_spread_over_all_workers_of_both_ends() {
    for (place, workers) in [(2, 2), (4, 2), (2, 4), (1, 3), (3, 1), (4, 4)].into_iter().enumerate() {
        let mut forwarding = Forwarding::new(2800 + place as u64, workers);
        forwarding.warm_up();
        let pair = &mut forwarding.pair;
        let count = usize::from(workers.0.max(workers.1)) - 1;
        for agent in [pair.entry, pair.exit] {
            assert_eq!(connections(pair, agent).iter().sum::<usize>(), count, "{workers:?}");
            assert_eq!(pair.world.metric(agent, OPEN), count as u64);
            assert_eq!(pair.world.metric(agent, OPENED), count as u64);
        }
        forwarding.open(15);
        forwarding.all_work();
        let pair = &mut forwarding.pair;
        let entry = shares(pair, pair.entry);
        assert_eq!(entry.iter().sum::<usize>(), 16);
        assert!(entry.iter().max().unwrap() - entry.iter().min().unwrap() <= 1, "{workers:?}: {entry:?}");
        let exit = shares(pair, pair.exit);
        assert!(exit.iter().all(|share| *share >= 16 / usize::from(workers.1) - 2), "{workers:?}: {exit:?}");
        assert_eq!(pair.world.peer(pair.entry).tcp_streams, 16);
        // Each end of each forward is where its connection is: none is handed over.
        assert_eq!(pair.handed_over(), 0);
    }
}

#[test]
fn an_agent_with_one_worker_at_both_ends_has_no_stream_connections() {
    let mut forwarding = Forwarding::new(2810, (1, 1));
    forwarding.warm_up();
    forwarding.open(4);
    forwarding.all_work();
    assert_eq!(connections(&mut forwarding.pair, 0), [0]);
    assert_eq!(forwarding.pair.world.metric(forwarding.pair.entry, OPENED), 0);
}

#[test]
fn without_tcp_connections_none_is_opened() {
    let mut pair = Pair::with_workers(2815, (3, 3), "", "");
    pair.wait_for_lanes(3);
    let mut client = pair.client(4000);
    for _ in 0..50 {
        client.send(INGRESS, b"a datagram");
        pair.run_served(Duration::from_millis(100));
    }
    for agent in [pair.entry, pair.exit] {
        assert_eq!(pair.world.metric(agent, OPENED), 0);
        assert_eq!(pair.world.metric(agent, "culvert_connections"), 1);
    }
}

#[test]
fn a_peer_that_does_not_know_stream_connections_is_served_over_the_control_connection() {
    for (old, seed) in [(0, 2820), (1, 2821)] {
        let mut pair = Pair::with_workers(seed, (2, 2), "", "");
        let agent = [pair.entry, pair.exit][old];
        for worker in &mut pair.world.agent(agent).workers {
            worker.withhold(Features::STREAM_CONNECTIONS);
        }
        pair.wait_for_lanes(2);
        let service = pair.services.tcp_listen(UPSTREAM);
        let mut forwarding = Forwarding { pair, service, forwards: Vec::new() };
        forwarding.warm_up();
        forwarding.open(7);
        forwarding.all_work();
        let pair = &mut forwarding.pair;
        // An older dialler dials none, and an older listener is asked for none.
        for agent in [pair.entry, pair.exit] {
            if agent != [pair.entry, pair.exit][1 - old] {
                continue;
            }
            assert_eq!(pair.world.metric(agent, OPENED), 0);
            assert_eq!(shares(pair, agent).iter().filter(|share| **share > 0).count(), 1);
        }
    }
}

#[test]
fn the_listener_asks_for_them_when_its_own_forwards_come() {
    let extra = format!("services = [\"back\"]\n[[service]]\nname = \"back\"\nupstream = \"{BACK_SERVICE}\"");
    let port = format!("\n[[tcp]]\nlisten = \"{BACK}\"\npeer = \"entry\"\nservice = \"back\"");
    let mut pair = Pair::with_workers(2830, (2, 3), &extra, &port);
    pair.wait_for_lanes(3);
    let mut service = pair.clients.tcp_listen(BACK_SERVICE);
    let mut ends = Vec::new();
    for _ in 0..9 {
        let client = pair.services.tcp(BACK);
        pair.world.run(Duration::from_millis(200));
        let token = pair.clients.token();
        ends.push(Forward { client, server: service.accept(token).unwrap().0 });
    }
    assert_eq!(pair.world.metric(pair.exit, OPENED), 2);
    assert!(shares(&mut pair, 1).iter().all(|share| *share > 0) || shares(&mut pair, 0).len() == 3);
    for agent in [pair.entry, pair.exit] {
        let shares = shares(&mut pair, agent);
        assert!(shares.iter().max().unwrap() - shares.iter().min().unwrap() <= 3, "{shares:?}");
    }
    for forward in &mut ends {
        assert!(forward.works(&mut pair));
    }
}

#[test]
fn forwards_outlive_a_control_connection_that_is_replaced() {
    let mut forwarding = Forwarding::new(2840, (3, 3));
    forwarding.warm_up();
    forwarding.open(8);
    let pair = &mut forwarding.pair;
    let control: Vec<usize> = pair
        .world
        .agent(pair.entry)
        .workers
        .iter()
        .map(|worker| worker.peers()[0].session.as_ref().map_or(0, |session| session.forwards as usize))
        .collect();
    let on_control = control.iter().sum::<usize>();
    assert!((1..9).contains(&on_control));
    pair.world.agent(pair.entry).workers[0].hub().end_session(PeerId(0), CloseReason::Replaced);
    pair.world.run(2 * SECOND);
    assert!(pair.world.peer(pair.entry).connected());
    assert_eq!(pair.world.metric(pair.entry, OPEN), 2);
    let (mut reset, mut alive) = (0, 0);
    for forward in &mut forwarding.forwards {
        if forward.works(&mut forwarding.pair) {
            alive += 1;
        } else {
            assert!(forward.is_reset());
            reset += 1;
        }
    }
    assert_eq!((reset, alive), (on_control, 9 - on_control));
    forwarding.forwards.clear();
    // The next session uses them as they are.
    forwarding.open(6);
    forwarding.all_work();
    assert_eq!(forwarding.pair.world.metric(forwarding.pair.entry, OPENED), 2);
}

#[test]
fn another_process_of_the_peer_ends_them() {
    let mut forwarding = Forwarding::new(2850, (2, 2));
    forwarding.warm_up();
    forwarding.open(5);
    let pair = &mut forwarding.pair;
    // Until nobody wishes for stream connections any more: the next session would have them dialled at once.
    pair.world.run(6 * SECOND);
    pair.world.restart(pair.exit, &pair.exit_toml, &pair.exit_key, &[EXIT], 9);
    pair.world.run(15 * SECOND);
    assert_eq!(pair.world.metric(pair.entry, OPEN), 0);
    assert_eq!(shares(pair, pair.entry), [0, 0]);
    forwarding.forwards.clear();
    forwarding.warm_up();
    forwarding.open(5);
    forwarding.all_work();
    assert_eq!(forwarding.pair.world.metric(forwarding.pair.exit, OPEN), 1);
}

#[test]
fn the_death_of_one_ends_its_own_forwards_only() {
    let mut forwarding = Forwarding::new(2860, (2, 2));
    forwarding.warm_up();
    forwarding.open(7);
    let pair = &mut forwarding.pair;
    let worker = connections(pair, pair.entry).iter().position(|count| *count > 0).unwrap();
    let dead = stream_port(pair, worker);
    pair.world.weather.borrow_mut().block =
        Box::new(move |from, to| [from, to].iter().any(|end| end.ip() == ENTRY && end.port() == dead));
    let mut alive = 0;
    for _ in 0..40 {
        pair.world.run(SECOND);
    }
    for forward in &mut forwarding.forwards {
        alive += usize::from(forward.works(&mut forwarding.pair));
    }
    assert_eq!(alive, 4, "those on the control connection");
    let pair = &mut forwarding.pair;
    assert!(pair.world.peer(pair.entry).connected());
    let lost = "culvert_stream_connections_failed_total{reason=\"lost\"}";
    assert_eq!(pair.world.metric(pair.entry, lost), 1);
    // The next forward has it dialled again, from another port.
    forwarding.forwards.clear();
    forwarding.warm_up();
    forwarding.open(7);
    forwarding.all_work();
    assert_eq!(shares(&mut forwarding.pair, 0).iter().filter(|share| **share > 2).count(), 2);
}

/// The local port of the only stream connection at a worker of the entry.
fn stream_port(pair: &mut Pair, worker: usize) -> u16 {
    let worker = &pair.world.agent(pair.entry).workers[worker];
    let handle = worker.peers()[0].streams.all[0].handle;
    let underlay = worker.control().get(handle).unwrap().underlay;
    worker.underlays().get(underlay).unwrap().socket.local_addr().port()
}

#[test]
fn an_idle_one_is_closed_after_a_minute_and_opened_again() {
    let mut forwarding = Forwarding::new(2870, (2, 2));
    forwarding.warm_up();
    forwarding.open(3);
    forwarding.pair.world.run(90 * SECOND);
    assert_eq!(
        forwarding.pair.world.metric(forwarding.pair.entry, OPEN),
        1,
        "its forwards are silent, not gone"
    );
    forwarding.all_work();
    forwarding.forwards.clear();
    forwarding.pair.world.run(50 * SECOND);
    assert_eq!(forwarding.pair.world.metric(forwarding.pair.entry, OPEN), 1);
    forwarding.pair.world.run(20 * SECOND);
    for agent in [forwarding.pair.entry, forwarding.pair.exit] {
        assert_eq!(forwarding.pair.world.metric(agent, OPEN), 0);
        for reason in ["local", "handshake", "refused", "lost"] {
            let series = format!("culvert_stream_connections_failed_total{{reason=\"{reason}\"}}");
            assert_eq!(forwarding.pair.world.metric(agent, &series), 0, "{reason}");
        }
    }
    forwarding.warm_up();
    forwarding.open(3);
    forwarding.all_work();
    assert_eq!(forwarding.pair.world.metric(forwarding.pair.exit, OPENED), 2);
}

#[test]
fn a_nat_that_rebinds_moves_them() {
    let mut forwarding = Forwarding::with(2880, (2, 2), "keepalive = \"2s\"");
    forwarding.warm_up();
    forwarding.open(5);
    let pair = &mut forwarding.pair;
    let worker = connections(pair, pair.entry).iter().position(|count| *count > 0).unwrap();
    let inside = SocketAddr::new(ENTRY, stream_port(pair, worker));
    pair.world.translate(inside, SocketAddr::new(ENTRY, 20_001));
    pair.world.run(4 * SECOND);
    // Only the far end speaks.
    for forward in &mut forwarding.forwards {
        forward.server.write(b"downwards").unwrap();
    }
    forwarding.pair.world.run(4 * SECOND);
    for forward in &mut forwarding.forwards {
        assert_eq!(forward.client.read(&mut [0; 16]).unwrap(), 9);
    }
    forwarding.all_work();
    let pair = &mut forwarding.pair;
    assert_eq!(pair.world.metric(pair.exit, "culvert_path_moves_total{what=\"control\"}"), 1);
}

#[test]
fn they_end_with_the_peer_and_with_the_agent() {
    for (side, seed) in [(0, 2890), (1, 2891), (2, 2892), (3, 2893)] {
        let mut forwarding = Forwarding::new(seed, (2, 3));
        forwarding.warm_up();
        forwarding.open(5);
        let pair = &mut forwarding.pair;
        match side {
            0 => pair.world.agent(pair.entry).registry.remove("exit").map(drop).unwrap(),
            1 => pair.world.agent(pair.exit).registry.remove("entry").map(drop).unwrap(),
            2 => pair.world.stop(pair.entry),
            _ => pair.world.stop(pair.exit),
        }
        pair.world.run(SECOND);
        assert!(forwarding.forwards.iter_mut().all(Forward::is_reset), "{side}");
        if side < 2 {
            for agent in [pair.entry, pair.exit] {
                assert_eq!(connections(pair, agent).iter().sum::<usize>(), 0, "{side}");
                assert_eq!(shares(pair, agent).iter().sum::<usize>(), 0, "{side}");
                assert_eq!(pair.world.metric(agent, "culvert_tcp_streams"), 0);
                let forwards = &pair.world.agent(agent).workers[0].peers()[0].forwards.of_all;
                assert_eq!((forwards.total(), forwards.connections()), (0, 0), "{side}");
            }
        } else {
            let agent = [pair.entry, pair.exit][side - 2];
            assert!(pair.world.has_ended(agent));
        }
    }
}

#[test]
fn the_ceiling_on_forwards_is_one_for_all_workers() {
    let mut pair = Pair::with_workers(2900, (3, 3), "[limits]\ntcp_streams_per_peer = 10", "");
    pair.wait_for_lanes(3);
    let service = pair.services.tcp_listen(UPSTREAM);
    let mut forwarding = Forwarding { pair, service, forwards: Vec::new() };
    forwarding.warm_up();
    forwarding.open(9);
    let mut refused = forwarding.pair.clients.tcp(INGRESS);
    forwarding.pair.world.run(SECOND);
    assert_eq!(
        refused.read(&mut [0; 4]).unwrap_err().kind(),
        ErrorKind::WouldBlock,
        "it waits in the backlog"
    );
    forwarding.pair.world.run(5 * SECOND);
    assert_eq!(refused.read(&mut [0; 4]).unwrap_err().kind(), ErrorKind::ConnectionReset);
    let pair = &mut forwarding.pair;
    assert_eq!(pair.world.metric(pair.entry, "culvert_tcp_refused_total{reason=\"limit\"}"), 1);
    forwarding.forwards.pop();
    forwarding.pair.world.run(SECOND);
    forwarding.open(1);
    forwarding.all_work();
}

#[test]
fn a_reload_that_takes_the_service_away_ends_forwards_at_all_workers() {
    let mut forwarding = Forwarding::new(2910, (3, 3));
    forwarding.warm_up();
    forwarding.open(8);
    let pair = &mut forwarding.pair;
    let without = pair.exit_toml.replace("services = [\"echo\"]", "services = []");
    pair.world.reload(pair.exit, &without).unwrap();
    pair.world.run(SECOND);
    assert!(forwarding.forwards.iter_mut().all(Forward::is_reset));
    assert_eq!(shares(pair, pair.entry), [0, 0, 0]);
    let refused = pair.clients.tcp(INGRESS);
    pair.world.run(SECOND);
    drop(refused);
    assert_eq!(pair.world.metric(pair.entry, "culvert_tcp_refused_total{reason=\"unknown_service\"}"), 1);
    let with = pair.exit_toml.clone();
    pair.world.reload(pair.exit, &with).unwrap();
    pair.world.run(SECOND);
    forwarding.forwards.clear();
    forwarding.open(6);
    forwarding.all_work();
}

#[test]
fn stream_connections_begin_with_packets_as_large_as_the_lanes_have_proved() {
    let mut forwarding = Forwarding::new(2_890, (2, 2));
    for host in [ENTRY, EXIT] {
        forwarding.pair.world.fabric.set_device_mtu(host, 8_972);
    }
    // The interface of each lane is looked at once in ten seconds.
    forwarding.pair.world.run(11 * SECOND);
    let entry = forwarding.pair.entry;
    let largest = forwarding.pair.world.metric(entry, "culvert_lane_packet_bytes{peer=\"exit\"}");
    assert_eq!(largest, 8_972);
    forwarding.warm_up();
    forwarding.open(4);
    forwarding.pair.world.tapped();
    for forward in &mut forwarding.forwards {
        assert!(forward.client.write(&[7; 30_000]).is_ok());
    }
    forwarding.pair.world.run(Duration::from_millis(200));
    let tapped = forwarding.pair.world.tapped();
    let sizes = tapped.iter().filter(|sent| sent.to.ip() == EXIT).map(|sent| sent.payload.len());
    let full = sizes.filter(|bytes| (8_000..=8_972).contains(bytes)).count();
    assert!(full >= 6, "{full} packets as large as the path carries");
}
