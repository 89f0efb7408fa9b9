//! Two workers, the real code, over the network in memory: every test prints its seed when it fails.
#![expect(
    clippy::unwrap_used,
    clippy::print_stdout,
    reason = "what is not as a test expects ends it; seeds and figures are shown"
)]

use std::{
    net::{IpAddr, Ipv4Addr, SocketAddr},
    time::Duration,
};

use ::gate::identity::Identity;
use engine::status::PeerStatus;
use testkit::{
    simulation as harness,
    simulation::{Host, Udp, World},
};
mod auto;
mod backlog;
mod bounds;
mod capture;
mod ceilings;
mod connected_routes;
mod cubic;
mod decoy;
mod decoy_load;
mod deferrals;
mod dialling;
mod drain;
mod fleet;
mod flood;
mod flow_confirmation;
mod forward_inspection;
mod forwards;
mod forwards_after_kills;
mod fragments;
mod gate;
mod handshakes;
mod hijack;
mod hop;
mod hostile;
mod hostile_work;
mod hub_restarts;
mod hybrid;
mod inspect;
mod jumbo;
mod kernel_refusals;
mod keys;
mod line_gaps;
mod line_rates;
mod line_status;
mod lines;
mod liveness;
mod malicious;
mod map;
mod memory_after_floods;
mod mtu;
mod multi_worker;
mod multicast;
mod next_hop;
mod one_key_twice;
mod operator_counts;
mod outer_packets_inside;
mod overload;
mod packing;
mod paths;
mod preshared;
mod proxy;
mod proxy_udp;
mod quota;
mod rate;
mod records;
mod redundant;
mod registry;
mod reload;
mod repair;
mod repair_hostile;
mod repair_standard;
mod replayed_handshakes;
mod restarts;
mod roaming;
mod rotation;
mod router_errors;
mod scripted_forwards;
mod shared_prefix;
mod shares;
mod standard;
mod standby;
mod stream_connections;
mod stream_ends;
mod stream_joins;
mod stream_messages;
mod tun;
mod tun_lanes;
mod tun_marks;
mod tun_refused;
mod tunnel;
mod upstreams;

const ENTRY: IpAddr = IpAddr::V4(Ipv4Addr::new(192, 0, 2, 1));
const EXIT: IpAddr = IpAddr::V4(Ipv4Addr::new(198, 51, 100, 1));
const CLIENT: IpAddr = IpAddr::V4(Ipv4Addr::new(192, 0, 2, 9));
const SERVICE: IpAddr = IpAddr::V4(Ipv4Addr::new(198, 51, 100, 9));
const INGRESS: SocketAddr = SocketAddr::new(ENTRY, 5300);
const UPSTREAM: SocketAddr = SocketAddr::new(SERVICE, 7);

/// Two agents, a client beside the one and a service beside the other.
struct Pair {
    world: World,
    entry: usize,
    exit: usize,
    entry_toml: String,
    entry_key: Identity,
    exit_toml: String,
    exit_key: Identity,
    clients: Host,
    services: Host,
    echo: Udp,
}

impl Pair {
    fn new(seed: u64, entry_extra: &str, exit_extra: &str) -> Self {
        Self::with_workers(seed, (1, 1), entry_extra, exit_extra)
    }

    /// With this many workers at the entry and at the exit.
    fn with_workers(seed: u64, workers: (u8, u8), entry_extra: &str, exit_extra: &str) -> Self {
        Self::with_all(seed, workers, 0, entry_extra, exit_extra)
    }

    /// The entry's clock is `skew` seconds ahead of the exit's.
    fn with_skew(seed: u64, skew: i64) -> Self {
        Self::with_all(seed, (1, 1), skew, "", "")
    }

    /// The entry's handshakes begin with one datagram.
    fn by_x25519(seed: u64, workers: (u8, u8)) -> Self {
        Self::with_key_exchange(seed, workers, ["x25519", "hybrid"])
    }

    /// By the key exchanges that the entry and the exit are configured for.
    fn with_key_exchange(seed: u64, workers: (u8, u8), [entry, exit]: [&str; 2]) -> Self {
        Self::configured(seed, workers, 0, [entry, exit], ["", ""])
    }

    fn with_all(seed: u64, workers: (u8, u8), skew: i64, entry_extra: &str, exit_extra: &str) -> Self {
        Self::configured(seed, workers, skew, ["hybrid"; 2], [entry_extra, exit_extra])
    }

    fn configured(
        seed: u64,
        workers: (u8, u8),
        skew: i64,
        [entry_exchange, exit_exchange]: [&str; 2],
        [entry_extra, exit_extra]: [&str; 2],
    ) -> Self {
        println!("seed {seed}, workers {workers:?}");
        let setting = |exchange| match exchange {
            "hybrid" => String::new(),
            other => format!("key_exchange = \"{other}\""),
        };
        let entry_exchange = match setting(entry_exchange) {
            empty if empty.is_empty() => empty,
            other => format!("transport = {{ {other} }}"),
        };
        let exit_exchange = match setting(exit_exchange) {
            empty if empty.is_empty() => empty,
            other => format!(", {other}"),
        };
        let mut world = World::new(seed);
        let (entry_key, exit_key) = (Identity::generate().unwrap(), Identity::generate().unwrap());
        let exit_toml = format!(
            r#"
            identity = {{ key_file = "none" }}
            transport = {{ listen = ["{EXIT}:4433"]{exit_exchange} }}
            [[service]]
            name = "echo"
            upstream = "{UPSTREAM}"
            idle = "5s"
            [[peer]]
            name = "entry"
            public_key = "{}"
            services = ["echo"]
            {exit_extra}
            "#,
            entry_key.public_key()
        );
        let entry_toml = format!(
            r#"
            identity = {{ key_file = "none" }}
            {entry_exchange}
            [[udp]]
            listen = "0.0.0.0:5300"
            peer = "exit"
            service = "echo"
            [[tcp]]
            listen = "{ENTRY}:5300"
            peer = "exit"
            service = "echo"
            [[peer]]
            name = "exit"
            public_key = "{}"
            endpoints = ["{EXIT}:4433"]
            {entry_extra}
            "#,
            exit_key.public_key()
        );
        world.workers = workers.1;
        let exit = world.start(&exit_toml, &exit_key, &[EXIT], 1);
        world.workers = workers.0;
        world.skew = skew;
        let entry = world.start(&entry_toml, &entry_key, &[ENTRY], 2);
        world.workers = workers.1;
        world.skew = 0;
        let clients = world.host(&[CLIENT]);
        let mut services = world.host(&[SERVICE]);
        let echo = services.udp(UPSTREAM, None);
        Self { world, entry, exit, entry_toml, entry_key, exit_toml, exit_key, clients, services, echo }
    }

    fn connected(seed: u64, entry_extra: &str, exit_extra: &str) -> Self {
        let mut pair = Self::new(seed, entry_extra, exit_extra);
        pair.wait_for_lanes(1);
        pair
    }

    fn wait_for_lanes(&mut self, lanes: usize) {
        let (entry, exit) = (self.entry, self.exit);
        self.world.run_till(Duration::from_secs(5), |world| {
            world.peer(entry).lanes_up >= lanes && world.peer(exit).lanes_up >= lanes
        });
    }

    fn client(&mut self, port: u16) -> Udp {
        self.clients.udp(SocketAddr::new(CLIENT, port), None)
    }

    /// Sends back what has come to the service; how many that were.
    fn serve(&mut self) -> usize {
        let received = self.echo.receive();
        for (from, payload) in &received {
            self.echo.send(*from, payload);
        }
        received.len()
    }

    /// Lets time pass while the service answers.
    fn run_served(&mut self, time: Duration) {
        for _ in 0..time.as_millis() {
            self.world.run(Duration::from_millis(1));
            self.serve();
        }
    }

    fn assert_balanced(&mut self) -> [PeerStatus; 2] {
        let peers = [self.world.peer(self.entry), self.world.peer(self.exit)];
        for peer in &peers {
            assert!(peer.uplink.balances, "{peer:?}");
            assert!(peer.downlink.balances, "{peer:?}");
        }
        peers
    }
}

fn numbered(number: u32) -> Vec<u8> {
    let mut payload = vec![7; 600];
    payload[..4].copy_from_slice(&number.to_be_bytes());
    payload
}

fn number_of(payload: &[u8]) -> u32 {
    u32::from_be_bytes(payload[..4].try_into().unwrap())
}

#[test]
fn datagrams_go_there_and_back_and_are_accounted_for() {
    let mut pair = Pair::connected(1, "", "");
    let mut clients: Vec<Udp> = (0..20).map(|port| pair.client(1000 + port)).collect();
    for number in 0..10 {
        for (place, client) in clients.iter_mut().enumerate() {
            client.send(INGRESS, &numbered(1000 * place as u32 + number));
        }
        pair.run_served(Duration::from_millis(3));
    }
    pair.run_served(Duration::from_millis(100));
    for (place, client) in clients.iter_mut().enumerate() {
        let answers = client.receive();
        let expected: Vec<u32> = (0..10).map(|number| 1000 * place as u32 + number).collect();
        assert!(
            answers.iter().all(|(from, _)| *from == INGRESS),
            "answers come from the address that was asked"
        );
        assert_eq!(answers.iter().map(|(_, payload)| number_of(payload)).collect::<Vec<_>>(), expected);
    }
    let [entry, exit] = pair.assert_balanced();
    assert_eq!([entry.uplink.account.delivered, exit.downlink.account.delivered], [200, 200]);
    assert_eq!([exit.uplink.account.delivered, entry.downlink.account.delivered], [200, 200]);
    assert_eq!([entry.flows, exit.flows], [20, 20]);
}

#[test]
fn under_loss_and_delay_nothing_is_unexplained_reordered_or_doubled() {
    for seed in 10..20 {
        let mut pair = Pair::connected(seed, "lanes = 3", "");
        pair.wait_for_lanes(3);
        *pair.world.weather.borrow_mut() = harness::Weather {
            delay: Duration::from_millis(40),
            loss_percent: 3,
            block: Box::new(|_, _| false),
            mark: None,
        };
        let mut clients: Vec<Udp> = (0..6).map(|port| pair.client(2000 + port)).collect();
        for number in 0..200 {
            for client in &mut clients {
                client.send(INGRESS, &numbered(number));
            }
            pair.run_served(Duration::from_millis(2));
        }
        pair.run_served(Duration::from_millis(400));
        for client in &mut clients {
            let numbers: Vec<u32> = client.receive().iter().map(|(_, payload)| number_of(payload)).collect();
            assert!(numbers.is_sorted_by(|before, after| before < after), "seed {seed}: {numbers:?}");
            assert!(numbers.len() > 150, "seed {seed}: {} of 200", numbers.len());
        }
        let [entry, exit] = pair.assert_balanced();
        assert_eq!(entry.uplink.account.received, 1200);
        assert_eq!(
            entry.uplink.account.dropped_total() + exit.downlink.account.dropped_total(),
            0,
            "seed {seed}"
        );
        assert!(entry.more.lanes.lost_packets > 0, "the lane saw the loss");
    }
}

#[test]
fn what_arrives_before_the_connection_waits_and_then_expires() {
    let mut pair = Pair::new(2, "", "");
    pair.world.weather.borrow_mut().block = Box::new(|_, _| true);
    let mut client = pair.client(3000);
    client.send(INGRESS, &numbered(0));
    pair.world.weather.borrow_mut().block = Box::new(|from, to| from.ip() == EXIT || to.ip() == EXIT);
    client.send(INGRESS, &numbered(1));
    pair.world.run(Duration::from_millis(50));
    assert_eq!(pair.world.peer(pair.entry).uplink.queued, 1);
    pair.world.run(Duration::from_millis(100));
    let entry = pair.world.peer(pair.entry);
    assert_eq!((entry.uplink.queued, entry.uplink.account.dropped_total()), (0, 1), "expired, not sent late");
    pair.world.weather.borrow_mut().block = Box::new(|_, _| false);
    pair.wait_for_lanes(1);
    client.send(INGRESS, &numbered(2));
    pair.run_served(Duration::from_millis(50));
    assert_eq!(client.receive().len(), 1);
    pair.assert_balanced();
}

#[test]
fn a_new_exit_process_takes_the_flows_over() {
    let mut pair = Pair::connected(3, "", "");
    let mut client = pair.client(3000);
    client.send(INGRESS, &numbered(0));
    pair.run_served(Duration::from_millis(50));
    assert_eq!(client.receive().len(), 1);
    let (exit, toml, key) =
        (pair.exit, pair.exit_toml.clone(), Identity::from_pem(pair.exit_key.to_pem().as_bytes()));
    pair.world.kill(exit);
    for number in 1..40 {
        client.send(INGRESS, &numbered(number));
        pair.run_served(Duration::from_millis(25));
    }
    pair.world.restart(exit, &toml, &key.unwrap(), &[EXIT], 77);
    // Within 2 s of its return, because traffic is waiting; no operator, same client socket.
    let mut answered = Vec::new();
    for number in 40..120 {
        client.send(INGRESS, &numbered(number));
        pair.run_served(Duration::from_millis(25));
        answered.extend(client.receive());
    }
    assert!(answered.len() > 10, "{} answers after the restart", answered.len());
    let [entry, _] = pair.assert_balanced();
    assert_eq!(entry.flows, 1);
}

#[test]
fn a_stopped_exit_is_noticed_at_once_and_ends_in_time() {
    let mut pair = Pair::connected(4, "", "");
    let (entry, exit) = (pair.entry, pair.exit);
    pair.world.stop(exit);
    pair.world.run(Duration::from_millis(20));
    assert!(!pair.world.peer(entry).connected());
    pair.world.run_till(Duration::from_secs(3), |world| world.has_ended(exit));
}

#[test]
fn a_blocked_lane_is_replaced_and_its_flows_take_lane_0_meanwhile() {
    let mut pair = Pair::connected(5, "lanes = 4\nkeepalive = \"1s\"", "");
    pair.wait_for_lanes(4);
    let mut clients: Vec<Udp> = (0..4).map(|port| pair.client(4000 + port)).collect();
    for client in &mut clients {
        client.send(INGRESS, &numbered(0));
    }
    pair.run_served(Duration::from_millis(50));
    assert!(clients.iter_mut().all(|client| client.receive().len() == 1));
    // The socket of one lane, by what the network sees: the last port that the entry dials from.
    let ports = pair.world.agent(pair.entry).workers[0].addresses().transport;
    let blocked = ports.iter().map(SocketAddr::port).max().unwrap();
    pair.world.weather.borrow_mut().block =
        Box::new(move |from, to| [from, to].iter().any(|end| end.ip() == ENTRY && end.port() == blocked));
    let mut answered = [0; 4];
    for number in 1..200 {
        for (client, answered) in clients.iter_mut().zip(&mut answered) {
            client.send(INGRESS, &numbered(number));
            *answered += client.receive().len();
        }
        pair.run_served(Duration::from_millis(20));
    }
    assert!(answered.iter().all(|count| *count > 100), "{answered:?}");
    assert_eq!(pair.world.metric(pair.entry, "culvert_lanes_reopened_total{reason=\"unresponsive\"}"), 1);
    assert!(pair.world.metric(pair.entry, "culvert_flows_moved_total") >= 1);
    assert_eq!(pair.world.peer(pair.entry).lanes_up, 4, "reopened under its index from another port");
    pair.assert_balanced();
}

#[test]
fn silent_flows_end_at_both_ends_and_give_their_sockets_back() {
    let mut pair = Pair::connected(6, "", "");
    let mut client = pair.client(5000);
    client.send(INGRESS, &numbered(0));
    pair.run_served(Duration::from_millis(50));
    assert_eq!(client.receive().len(), 1);
    pair.world.run(Duration::from_secs(6));
    for place in [pair.entry, pair.exit] {
        assert_eq!(pair.world.peer(place).flows, 0);
        let evicted = |world: &mut World, reason: &str| {
            world.metric(place, &format!("culvert_flows_evicted_total{{reason=\"{reason}\"}}"))
        };
        // Whichever end is first tells the other.
        assert_eq!(evicted(&mut pair.world, "idle") + evicted(&mut pair.world, "closed"), 1);
    }
    client.send(INGRESS, &numbered(1));
    pair.run_served(Duration::from_millis(50));
    assert_eq!(client.receive().len(), 1, "a new flow under a new number");
}

#[test]
fn a_service_that_is_not_offered_costs_its_own_datagrams_only() {
    let extra = r#"
        [[udp]]
        listen = "0.0.0.0:5999"
        peer = "exit"
        service = "nothing"
    "#;
    let mut pair = Pair::connected(7, extra, "");
    let mut client = pair.client(6000);
    client.send(SocketAddr::new(ENTRY, 5999), &numbered(0));
    client.send(INGRESS, &numbered(1));
    pair.run_served(Duration::from_millis(50));
    assert_eq!(client.receive().len(), 1);
    let dropped = "culvert_datagrams_dropped_total{direction=\"uplink\",reason=\"unknown_service\"}";
    assert_eq!(pair.world.metric(pair.entry, dropped), 1);
    pair.assert_balanced();
}

#[test]
fn the_largest_datagram_passes_from_the_first_on_and_one_byte_more_is_dropped() {
    let mut pair = Pair::connected(8, "", "");
    let mut client = pair.client(7000);
    // Of the 1200 bytes of a packet: header 13, frame type 1, context and flow number 1 each, tag 16.
    let largest = 1200 - 13 - 1 - 2 - 16;
    pair.world.run(Duration::from_secs(2));
    let largest =
        largest + (pair.world.metric(pair.entry, "culvert_lane_packet_bytes{peer=\"exit\"}") as usize - 1200);
    client.send(INGRESS, &vec![1; largest]);
    pair.run_served(Duration::from_millis(60));
    assert_eq!(
        client.receive().len(),
        1,
        "it waited for the confirmation, because the opening form is longer"
    );
    client.send(INGRESS, &vec![1; largest + 1]);
    client.send(INGRESS, &[]);
    pair.run_served(Duration::from_millis(60));
    assert_eq!(client.receive().iter().map(|(_, payload)| payload.len()).collect::<Vec<_>>(), [0]);
    let dropped = "culvert_datagrams_dropped_total{direction=\"uplink\",reason=\"too_large\"}";
    assert_eq!(pair.world.metric(pair.entry, dropped), 1);
    pair.assert_balanced();
}

#[test]
fn tcp_is_forwarded_with_back_pressure_and_half_close() {
    let mut pair = Pair::connected(9, "", "");
    let mut listener = pair.services.tcp_listen(UPSTREAM);
    let mut client = pair.clients.tcp(INGRESS);
    pair.world.run(Duration::from_millis(50));
    let token = pair.services.token();
    let (mut server, _) = listener.accept(token).unwrap();
    let sent: Vec<u8> = (0..3_000_000u32).map(|byte| (byte % 251) as u8).collect();
    let (mut written, mut received) = (0, Vec::new());
    let mut buffer = vec![0; 100_000];
    // The server does not read at first: the client is slowed, and nothing piles up beyond the windows.
    for _ in 0..200 {
        written += client.write(&sent[written..]).unwrap_or(0);
        pair.world.run(Duration::from_millis(5));
    }
    let stalled = written;
    for _ in 0..4000 {
        if written < sent.len() {
            written += client.write(&sent[written..]).unwrap_or(0);
            if written == sent.len() {
                client.shutdown_write().unwrap();
            }
        }
        pair.world.run(Duration::from_millis(1));
        match server.read(&mut buffer) {
            Ok(0) => break,
            Ok(len) => received.extend_from_slice(&buffer[..len]),
            Err(_) => {}
        }
    }
    if stalled == sent.len() {
        client.shutdown_write().unwrap();
    }
    assert_eq!(received.len(), sent.len());
    assert!(received == sent);
    // The other half is still open.
    server.write(b"the answer after the end").unwrap();
    server.shutdown_write().unwrap();
    pair.world.run(Duration::from_millis(50));
    let len = client.read(&mut buffer).unwrap();
    assert_eq!(&buffer[..len], b"the answer after the end");
    assert_eq!(client.read(&mut buffer).unwrap(), 0);
    assert_eq!(pair.world.metric(pair.exit, "culvert_tcp_streams"), 0);
    assert_eq!(pair.world.metric(pair.entry, "culvert_tcp_streams"), 0);
}

#[test]
fn a_tcp_service_that_refuses_resets_the_client() {
    let mut pair = Pair::connected(10, "", "");
    let mut client = pair.clients.tcp(INGRESS);
    pair.world.run(Duration::from_millis(100));
    let error = client.read(&mut [0; 10]).unwrap_err();
    assert_eq!(error.kind(), std::io::ErrorKind::ConnectionReset);
    assert_eq!(pair.world.metric(pair.entry, "culvert_tcp_refused_total{reason=\"upstream_refused\"}"), 1);
}

#[test]
fn ends_that_dial_each_other_settle_on_one_connection() {
    for seed in 30..40 {
        println!("seed {seed}");
        let mut world = World::new(seed);
        let keys = [Identity::generate().unwrap(), Identity::generate().unwrap()];
        let toml = |own: IpAddr, other: IpAddr, key: &Identity| {
            format!(
                r#"
                identity = {{ key_file = "none" }}
                transport = {{ listen = ["{own}:4433"] }}
                [[peer]]
                name = "other"
                public_key = "{}"
                endpoints = ["{other}:4433"]
                "#,
                key.public_key()
            )
        };
        let first = world.start(&toml(ENTRY, EXIT, &keys[1]), &keys[0], &[ENTRY], 1);
        let second = world.start(&toml(EXIT, ENTRY, &keys[0]), &keys[1], &[EXIT], 2);
        world.run(Duration::from_secs(10));
        for place in [first, second] {
            assert!(world.peer(place).connected() && world.peer(place).lanes_up == 1);
            assert_eq!(world.metric(place, "culvert_connections"), 1, "seed {seed}");
            let established = world.metric(place, "culvert_handshakes_total{outcome=\"established\"}");
            assert!(established <= 2, "seed {seed}: {established} connections");
        }
    }
}

#[test]
fn an_idle_pair_is_quiet() {
    let mut pair = Pair::connected(11, "keepalive = \"10s\"", "");
    pair.world.run(Duration::from_secs(5));
    let sent = |pair: &mut Pair| {
        let of = |place, socket, world: &mut World| {
            world.metric(place, &format!("culvert_socket_sent_datagrams_total{{socket=\"{socket}\"}}"))
        };
        [of(pair.entry, "quic_dial", &mut pair.world), of(pair.exit, "quic_listen", &mut pair.world)]
    };
    let before = sent(&mut pair);
    pair.world.run(Duration::from_secs(60));
    let after = sent(&mut pair);
    // Seven keepalives, of the control connection in two packets and of the lane in one, each answered at once.
    assert_eq!([after[0] - before[0], after[1] - before[1]], [21, 14], "packets in a minute");
    assert!(pair.world.peer(pair.entry).connected());
}

#[test]
fn an_exit_that_is_away_for_minutes_is_found_again() {
    let mut pair = Pair::connected(12, "", "");
    let mut client = pair.client(3000);
    let (exit, toml) = (pair.exit, pair.exit_toml.clone());
    let key = Identity::from_pem(pair.exit_key.to_pem().as_bytes()).unwrap();
    pair.world.kill(exit);
    // Longer than any handshake or idle time-out, with traffic waiting all the time.
    for number in 0..600 {
        client.send(INGRESS, &numbered(number));
        pair.world.run(Duration::from_millis(200));
    }
    assert!(!pair.world.peer(pair.entry).connected());
    // Four attempts and two fallbacks, and as many that end.
    assert!(pair.world.metric(pair.entry, "culvert_connections") <= 12, "attempts that ended are forgotten");
    pair.world.restart(exit, &toml, &key, &[EXIT], 77);
    let mut answered = 0;
    for number in 0..20 {
        client.send(INGRESS, &numbered(number));
        pair.run_served(Duration::from_millis(100));
        answered += client.receive().len();
    }
    assert!(answered > 0, "no answer within 2 s of its return");
    let entry = pair.world.peer(pair.entry);
    assert!(entry.uplink.balances && entry.downlink.balances);
}

#[test]
fn a_dead_connection_without_keepalive_is_noticed_and_replaced() {
    let mut pair = Pair::connected(13, "keepalive = \"0s\"", "");
    pair.world.weather.borrow_mut().block =
        Box::new(|from, to| [from.ip(), to.ip()] == [ENTRY, EXIT] || [from.ip(), to.ip()] == [EXIT, ENTRY]);
    pair.world.run(Duration::from_secs(60));
    assert!(!pair.world.peer(pair.entry).connected() && !pair.world.peer(pair.exit).connected());
    pair.world.weather.borrow_mut().block = Box::new(|_, _| false);
    pair.world.run(Duration::from_secs(20));
    assert!(pair.world.peer(pair.entry).connected());
    let mut client = pair.client(3000);
    client.send(INGRESS, &numbered(0));
    pair.run_served(Duration::from_millis(100));
    assert_eq!(client.receive().len(), 1);
    pair.assert_balanced();
}

#[test]
fn lanes_in_use_keep_their_connection_without_keepalive() {
    let mut pair = Pair::connected(14, "keepalive = \"0s\"", "");
    let mut client = pair.client(3000);
    for number in 0..900 {
        client.send(INGRESS, &numbered(number));
        pair.run_served(Duration::from_millis(100));
    }
    assert_eq!(pair.world.metric(pair.entry, "culvert_handshakes_total{outcome=\"established\"}"), 1);
    assert!(client.receive().len() >= 899);
}

#[test]
fn tcp_forwards_survive_a_short_silence_under_udp_load() {
    let mut pair = Pair::connected(15, "", "");
    let mut listener = pair.services.tcp_listen(UPSTREAM);
    let mut stream = pair.clients.tcp(INGRESS);
    let mut client = pair.client(3000);
    pair.run_served(Duration::from_millis(50));
    let token = pair.services.token();
    let (mut server, _) = listener.accept(token).unwrap();
    for blip in 0..3 {
        pair.world.weather.borrow_mut().block = Box::new(|from, to| {
            [from.ip(), to.ip()] == [ENTRY, EXIT] || [from.ip(), to.ip()] == [EXIT, ENTRY]
        });
        for number in 0..35 {
            client.send(INGRESS, &numbered(number));
            pair.run_served(Duration::from_millis(20));
        }
        pair.world.weather.borrow_mut().block = Box::new(|_, _| false);
        for number in 0..100 {
            client.send(INGRESS, &numbered(number));
            pair.run_served(Duration::from_millis(20));
        }
        assert!(stream.write(&[blip]).is_ok());
        pair.run_served(Duration::from_millis(200));
        assert_eq!(server.read(&mut [0; 10]).unwrap(), 1, "after silence {blip}");
    }
    assert_eq!(pair.world.metric(pair.entry, "culvert_tcp_streams"), 1);
    pair.assert_balanced();
}

#[test]
fn attempts_that_were_not_needed_leave_nothing_behind() {
    let mut pair = Pair::new(16, "", "");
    let (exit, toml) = (pair.exit, pair.exit_toml.clone());
    let key = Identity::from_pem(pair.exit_key.to_pem().as_bytes()).unwrap();
    pair.world.kill(exit);
    pair.world.run(Duration::from_millis(1500));
    pair.world.restart(exit, &toml, &key, &[EXIT], 77);
    pair.wait_for_lanes(1);
    pair.world.run(Duration::from_secs(12));
    for place in [pair.entry, exit] {
        assert_eq!(pair.world.metric(place, "culvert_connections"), 1);
    }
}
