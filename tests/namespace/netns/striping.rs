//! Several workers and lanes across the cable: GRO at the receiver, and a lane whose packets no longer arrive.

use std::{collections::BTreeMap, net::SocketAddr, time::Duration};

use culvert_tests::{
    agent::Agent,
    client::Client,
    clock::{self, PATIENCE},
    firewall::Blockade,
    iperf::{self, Books, Server},
    needs::{self, Need},
    pair::{Pair, Plan},
    place::{Cable, Place},
    upstream::Echo,
};

use culvert_tests::ports::loopback;

#[test]
fn parallel_streams_cross_two_lanes_with_gro() {
    let tools = [Need::Tool("ethtool", "ethtool")];
    if needs::met("GRO across a cable", needs::NETNS) && needs::met("GRO across a cable", &tools) {
        parallel_streams();
    }
}

/// How often lanes fell silent, and flows left one.
fn disturbances(pair: &Pair) -> u64 {
    let silent = pair.sum("culvert_lanes_reopened_total", &[("reason", "unresponsive")]);
    silent + pair.sum("culvert_flows_moved_total", &[])
}

/// Two workers each, whose lanes cross the cable.
fn plan(places: [Place; 2]) -> Plan {
    Plan::default().at(places).underlay(Cable::SECOND[0].parse().unwrap()).workers([2, 2])
}

fn parallel_streams() {
    let cable = Cable::new();
    cable.cut_and_join();
    let places = cable.places();
    let (upstream, ingress) = (loopback(), loopback());
    let _server = Server::start(&places[1], upstream);
    let plan = plan(places.clone());
    let pair = plan.service("iperf", upstream, "").forward("iperf", ingress).start();
    pair.wait_for_lanes(2);
    for reverse in [false, true] {
        let books = Books::open(&pair);
        let result = iperf::udp(&places[0], ingress, 4, reverse);
        books.close(&pair, result, reverse);
    }
    for (agent, socket) in [(&pair.exit, "quic_listen"), (&pair.entry, "quic_dial")] {
        let samples = agent.samples();
        let count = |what: &str| {
            samples.count(&format!("culvert_socket_received_{what}_total"), &[("socket", socket)])
        };
        assert!(count("datagrams") > count("buffers"), "GRO joined no datagrams at {socket}");
    }
    // GRO joins what comes from one port, and a lane has a port of its own: nothing comes to the wrong worker.
    let packets = pair.sum("culvert_handed_over_datagrams_total", &[("kind", "packets")]);
    assert_eq!(packets, 0, "they came to the wrong worker");
    // A flow of a lane that falls silent goes on over another worker's.
    let (handed_over, disturbances) = (pair.handed_over(), disturbances(&pair));
    assert!(handed_over == 0 || disturbances > 0, "{handed_over} datagrams handed over");
    pair.accounts();
}

/// So many that a worker without any of them is out of the question, however the kernel hashes.
const CLIENTS: u32 = 30;

/// The entry's port of a lane, as the exit saw it when the lane came up, each time that it did.
fn ports_of_lane(exit: &Agent, lane: u8) -> Vec<u16> {
    let lane = format!("lane={lane} ");
    let lines = exit.log();
    let ups = lines.lines().filter(|line| line.contains("lane up") && line.contains(&lane));
    ups.map(|line| {
        let address = line.split("remote=Some(").nth(1).and_then(|rest| rest.split(')').next());
        let address: SocketAddr = address.and_then(|text| text.parse().ok()).expect("an address");
        address.port()
    })
    .collect()
}

/// Clients, and what became of the datagrams that they sent.
struct Crowd {
    clients: Vec<Client>,
    /// The newest number that each got back.
    newest: Vec<Option<u32>>,
}

impl Crowd {
    fn new(place: &Place, ingress: SocketAddr) -> Self {
        let clients = place.enter(|| (0..CLIENTS).map(|number| Client::new(number, ingress)).collect());
        Self { clients, newest: vec![None; CLIENTS as usize] }
    }

    /// Each client sends a datagram; what has come back is looked at: nothing was overtaken.
    fn pass(&mut self) {
        for (client, newest) in self.clients.iter_mut().zip(&mut self.newest) {
            client.send();
            for number in client.receive_numbers(Duration::from_millis(1)) {
                assert!(newest.is_none_or(|newest| newest < number), "{number} after {newest:?}");
                *newest = Some(number);
            }
        }
    }

    /// Each client sends `count` datagrams more, each when the one before has come back: none is lost.
    fn converse(&mut self, count: u32) {
        for _ in 0..count {
            self.clients.iter_mut().for_each(Client::send);
            for (client, newest) in self.clients.iter().zip(&mut self.newest) {
                clock::until("the answer", PATIENCE, || {
                    *newest = client.receive_numbers(PATIENCE).last().copied().max(*newest);
                    if *newest == client.newest() { Ok(()) } else { Err(format!("{newest:?}")) }
                });
            }
        }
    }

    /// Sends on until `enough` is content, with what each client had newest when it began.
    fn until(&mut self, what: &str, mut enough: impl FnMut(&[Option<u32>], &[Option<u32>]) -> bool) {
        let before = self.newest.clone();
        clock::until(what, PATIENCE, || {
            self.pass();
            if enough(&before, &self.newest) { Ok(()) } else { Err(format!("{:?}", self.newest)) }
        });
    }
}

/// How many flows belong on a lane, once all flows are on lanes.
fn flows_on(agent: &Agent, lane: &str) -> u64 {
    agent.wait_for("all flows are on lanes", |samples| match samples.count("culvert_lane_flows", &[]) {
        all if all == u64::from(CLIENTS) => Ok(samples.count("culvert_lane_flows", &[("lane", lane)])),
        all => Err(format!("{all} flows")),
    })
}

/// Checks that the service saw each client from one port only, and nothing of it overtaken.
fn check_arrivals(echo: &Echo) {
    let mut last = BTreeMap::new();
    for arrival in echo.arrivals() {
        if let Some((source, number)) = last.insert(arrival.client, (arrival.source, arrival.number)) {
            assert_eq!(source, arrival.source, "client {} has another port upstream", arrival.client);
            assert!(number < arrival.number, "client {}: {} after {number}", arrival.client, arrival.number);
        }
    }
    assert_eq!(last.len(), CLIENTS as usize);
}

fn lanes_up(pair: &Pair) -> [u64; 2] {
    pair.ends().map(|(_, agent)| agent.samples().count("culvert_lanes", &[("state", "up")]))
}

#[test]
fn flows_of_a_blocked_lane_go_on_over_lane_0_until_it_is_open_again() {
    let tools = [Need::Tool("nft", "nftables")];
    if needs::met("a blocked lane", needs::NETNS) && needs::met("a blocked lane", &tools) {
        blocked_lane();
    }
}

fn blocked_lane() {
    let cable = Cable::new();
    let [here, there] = cable.places();
    let (echo, ingress) = (there.enter(Echo::new), loopback());
    let plan = plan(cable.places());
    let pair = plan.service("echo", echo.address, "").forward("echo", ingress).start();
    pair.wait_for_lanes(2);
    let mut crowd = Crowd::new(&here, ingress);
    crowd.converse(3);
    let [on_entry, on_exit] = pair.ends().map(|(_, agent)| flows_on(agent, "1"));
    let (handed_over, disturbances) = (pair.handed_over(), disturbances(&pair));
    let spread = on_entry == on_exit && (1..u64::from(CLIENTS)).contains(&on_entry);
    let figures = format!("{on_entry}, {on_exit} flows, {handed_over} handed over, {disturbances} disturbed");
    assert!(spread && handed_over == 0, "{figures}");

    let [control, blocked] = [0, 1].map(|lane| ports_of_lane(&pair.exit, lane)[0]);
    let quic = pair.underlay.port();
    // For as long as this stands, the lane cannot come back from another port either: all must take lane 0.
    let meanwhile =
        Blockade::new(&there, &format!("udp dport {quic} udp sport != {{ {control}, {blocked} }}"));
    let back = Blockade::new(&here, &format!("udp sport {quic} udp dport {blocked}"));
    crowd.pass();
    let forth = Blockade::new(&there, &format!("udp dport {quic} udp sport {blocked}"));
    crowd.until("an answer for each", |before, newest| before.iter().zip(newest).all(|(old, new)| new > old));
    for (_, agent) in pair.ends() {
        agent.wait_for("each flow of the lane has moved", |samples| {
            let moved = samples.count("culvert_flows_moved_total", &[]);
            if moved >= on_entry { Ok(()) } else { Err(format!("{moved} of {on_entry}")) }
        });
    }
    // On a busy machine the entry may have found the lane dead before `forth` stood.
    assert!(back.discarded() > 0, "{forth:?}, {back:?}");
    assert!(pair.handed_over() > 0, "lane 0 is the other worker's");

    drop(meanwhile);
    crowd.until("the lane is up again at both ends", |_, _| lanes_up(&pair) == [2, 2]);
    let ports = ports_of_lane(&pair.exit, 1);
    assert!(ports.len() > 1 && ports.last() != ports.first(), "{ports:?}: it comes from another port");
    crowd.converse(5);
    let entry = pair.entry.samples();
    let silent = entry.count("culvert_lanes_reopened_total", &[("reason", "unresponsive")]);
    assert!(silent >= 1, "the blocked lane was found dead");
    check_arrivals(&echo);
    assert_eq!(entry.count("culvert_handshakes_total", &[("outcome", "established")]), 1);
    for (peer, agent) in pair.ends() {
        agent.wait_for_count("culvert_flows_opened_total", &[("peer", peer)], CLIENTS.into());
    }
    assert!(pair.handed_over() > 0);
    pair.accounts();
}
