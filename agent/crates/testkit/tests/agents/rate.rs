//! A rate to a peer: flows take turns, whoever sends them, and the far end may say what it takes.

use std::time::Duration;

use dataplane::relay::DropReason;

use ip::{model::Recipe, view::TCP};
use net::TcpStream;

use base::clock::Clock;
use wire::messages::Features;

use crate::{
    INGRESS, Pair, UPSTREAM,
    flood::{ECHO, GateFlood},
    number_of, numbered,
    paths::PathTrial,
    tunnel::{Given, How, Tunnel},
};

const MS: Duration = Duration::from_millis(1);

/// Datagrams of the first greedy sender have these numbers and more, of the second twice these, and so on.
const GREEDY: u32 = 1_000_000;

/// What came to the service in three seconds: bytes of greedy senders, and numbers of the modest one.
struct Arrived {
    greedy: Vec<u64>,
    modest: Vec<u32>,
    /// The longest that a datagram of the modest one took.
    slowest: Duration,
}

impl Arrived {
    /// The rate of greedy sender `place`, in Mbit/s of payload.
    fn mbit(&self, place: usize) -> f64 {
        self.greedy[place] as f64 * 8.0 / 3e6
    }
}

/// Each greedy sender offers 19.2 Mbit/s in datagrams of 1,200 bytes, the modest one 20 datagrams of 600 bytes a second.
fn load(pair: &mut Pair, greedy: usize) -> Arrived {
    load_beside(pair, greedy, || {})
}

/// The same, and `each` is done in every millisecond.
fn load_beside(pair: &mut Pair, greedy: usize, mut each: impl FnMut()) -> Arrived {
    let mut senders = Vec::from_iter((0..greedy).map(|place| pair.client(8000 + place as u16)));
    let mut modest = pair.client(7000);
    let mut arrived = Arrived { greedy: vec![0; greedy], modest: Vec::new(), slowest: Duration::ZERO };
    for ms in 0..4_000_u32 {
        for (place, sender) in senders.iter_mut().enumerate() {
            let number = GREEDY * (place as u32 + 1) + ms;
            let datagram = [numbered(number), numbered(number)].concat();
            sender.send(INGRESS, &datagram);
            sender.send(INGRESS, &datagram);
        }
        if ms % 50 == 0 {
            modest.send(INGRESS, &numbered(ms));
        }
        pair.world.run(MS);
        each();
        for (_, payload) in pair.echo.receive() {
            let number = number_of(&payload);
            if number < GREEDY {
                arrived.modest.push(number);
                arrived.slowest = arrived.slowest.max((ms + 1 - number) * MS);
            } else if ms >= 1_000 {
                arrived.greedy[(number / GREEDY - 1) as usize] += payload.len() as u64;
            }
        }
    }
    arrived
}

/// A TCP forward whose client always has more to send.
struct ForwardLoad {
    client: Box<dyn TcpStream>,
    service: Box<dyn TcpStream>,
    received: u64,
}

impl ForwardLoad {
    fn open(pair: &mut Pair) -> Self {
        let mut listener = pair.services.tcp_listen(UPSTREAM);
        let client = pair.clients.tcp(INGRESS);
        let token = pair.services.token();
        let accepted = (0..500).find_map(|_| {
            pair.world.run(MS);
            listener.accept(token).ok()
        });
        let (service, _) = accepted.expect("the forward connects");
        Self { client, service, received: 0 }
    }

    fn pump(&mut self) {
        while self.client.write(&[0; 4096]).is_ok() {}
        let mut buffer = vec![0; 64 * 1024];
        while let Ok(count @ 1..) = self.service.read(&mut buffer) {
            self.received += count as u64;
        }
    }
}

/// No datagram of the modest sender was lost, or waited long.
fn assert_unharmed(arrived: &Arrived) {
    let sent = Vec::from_iter((0..4_000).step_by(50));
    assert_eq!(arrived.modest, sent, "in order, and all of them");
    // The three networks on the way take 5 ms each.
    assert!(arrived.slowest <= 18 * MS, "one took {:?}", arrived.slowest);
}

#[test]
fn greedy_flows_are_held_to_the_rate_and_a_modest_one_keeps_its_own() {
    for workers in [(1, 1), (3, 2)] {
        let mut pair = Pair::with_workers(900, workers, "rate = \"10Mbit\"", "");
        pair.wait_for_lanes(1);
        let arrived = load(&mut pair, 4);
        assert_unharmed(&arrived);
        let each = Vec::from_iter((0..4).map(|place| arrived.mbit(place)));
        let sum: f64 = each.iter().sum();
        println!("{workers:?}: {each:?}, {sum} Mbit/s, the modest one within {:?}", arrived.slowest);
        // 1,200 of 1,257 bytes are payload: 9.5 of 10 Mbit/s, and the modest one has its part.
        assert!((9.1..9.6).contains(&sum), "{sum} Mbit/s");
        let (sum_of_squares, count) = (each.iter().map(|rate| rate * rate).sum::<f64>(), each.len() as f64);
        let fairness = sum * sum / (count * sum_of_squares);
        assert!(fairness > 0.95, "Jain's index {fairness} of {each:?}");
        let [entry, _] = pair.assert_balanced();
        let rate = entry.rate.expect("a rate is set");
        assert_eq!((rate.bits_per_second, &*rate.from), (10_000_000, "configured"));
        assert!(entry.uplink.account.dropped[DropReason::Aqm] > 0);
    }
}

#[test]
fn the_far_end_says_how_much_it_takes_and_may_change_its_mind() {
    let mut pair = Pair::connected(901, "rate = \"10Mbit\"", "rate_receive = \"4Mbit\"");
    let arrived = load(&mut pair, 1);
    assert_unharmed(&arrived);
    assert!((3.6..3.85).contains(&arrived.mbit(0)), "{} Mbit/s", arrived.mbit(0));
    let entry = pair.world.peer(pair.entry);
    let rate = entry.rate.expect("the far end set one");
    assert_eq!((rate.bits_per_second, &*rate.from), (4_000_000, "peer"));

    let toml = pair.exit_toml.replace("rate_receive = \"4Mbit\"", "");
    pair.world.reload(pair.exit, &toml).unwrap();
    pair.world.run(100 * MS);
    let entry = pair.world.peer(pair.entry);
    assert_eq!(entry.rate.map(|rate| rate.bits_per_second), Some(10_000_000));
    pair.assert_balanced();
}

#[test]
fn a_rate_that_is_taken_back_loses_nothing_that_waits() {
    let mut pair = Pair::connected(902, "rate = \"64kbit\"", "");
    let mut client = pair.client(7000);
    for number in 0..50 {
        client.send(INGRESS, &numbered(number));
    }
    pair.world.run(20 * MS);
    let before = pair.echo.receive().len();
    assert!((1..10).contains(&before), "{before} have left at 64 kbit/s");
    let toml = pair.entry_toml.replace("rate = \"64kbit\"", "");
    pair.world.reload(pair.entry, &toml).unwrap();
    pair.world.run(20 * MS);
    assert_eq!(before + pair.echo.receive().len(), 50);
    let [entry, _] = pair.assert_balanced();
    assert_eq!((entry.rate, entry.uplink.account.dropped_total()), (None, 0));
}

#[test]
fn forwards_are_held_to_the_rate_and_leave_the_modem_empty() {
    for congestion in ["congestion = \"bbr\"\nrate = \"20Mbit\"", "congestion = \"cubic\"\nrate = \"20Mbit\""]
    {
        let trial = PathTrial {
            rate_bits: 25_000_000,
            rtt: 40 * MS,
            streams: 4,
            seconds: 10,
            workers: (2, 2),
            peer: congestion,
            ..PathTrial::LONG
        };
        let outcome = trial.queue_of(10.0).run();
        let (mbit, rtt) = (outcome.mbit(3), outcome.rtt(0.99));
        println!("{congestion:?}: {mbit} Mbit/s, RTT {rtt:?}");
        assert!((18.0..19.6).contains(&mbit), "{congestion}: {mbit} Mbit/s");
        assert!(rtt < 45 * MS, "{congestion}: the path takes 40 ms, not {rtt:?}");
    }
}

#[test]
fn a_forward_and_flows_of_datagrams_share_a_rate() {
    let mut pair = Pair::with_workers(903, (2, 2), "rate = \"10Mbit\"", "");
    pair.wait_for_lanes(1);
    let mut stream = ForwardLoad::open(&mut pair);
    let arrived = load_beside(&mut pair, 3, || stream.pump());
    assert_unharmed(&arrived);
    let forward = stream.received as f64 * 8.0 / 4e6;
    let each = Vec::from_iter((0..3).map(|place| arrived.mbit(place)));
    println!("the forward {forward}, the flows {each:?} Mbit/s");
    assert!((1.6..2.9).contains(&forward), "{forward} of 10 Mbit/s, a quarter of which is its share");
    assert!(each.iter().all(|mbit| (1.9..2.9).contains(mbit)), "{each:?}");
}

/// In three seconds, of IP packets through a tunnel: Mbit/s of the flow that understands marks and of the one that does not, its
/// marked packets, and how many of the sparse flow came within a few milliseconds.
fn ip_flows(peer: &str) -> ([f64; 2], u64, usize) {
    let mut tunnel = Tunnel::new(905, (2, 2), peer).settled(2);
    let [entry, exit] = tunnel.ends();
    let (mut bytes, mut marked, mut sparse, mut read) = ([0_u64; 2], 0, 0, 0);
    for ms in 0..4_000_u32 {
        if ms % 4 == 0 {
            for (flow, ecn) in [(1, 2), (2, 0)] {
                let bulk = Recipe { protocol: TCP, flow, traffic_class: ecn, payload: 12_000, ..Recipe::UDP };
                tunnel.push(entry, flow % 2, &Given::new(&bulk, How::Super(1_000)));
                read += 12;
            }
        }
        if ms % 50 == 0 {
            let recipe = Recipe { flow: 3, payload: 100, ..Recipe::UDP };
            tunnel.push(entry, 0, &Given::new(&recipe, How::Partial));
            read += 1;
        }
        tunnel.run(1);
        for packet in tunnel.written(exit) {
            if packet.len() < 500 {
                // The network takes 5 ms, and a turn comes after one large packet at most.
                sparse += usize::from((4..=6).contains(&(ms % 50)));
            } else if ms >= 1_000 {
                let ecn = packet[1] & 3;
                bytes[usize::from(ecn == 0)] += packet.len() as u64;
                marked += u64::from(ecn == 3);
            }
        }
    }
    tunnel.run(500);
    tunnel.written(exit);
    tunnel.assert_balanced([read, 0]);
    let status = tunnel.pair.world.peer(entry).rate.expect("a rate is set");
    assert!(status.marked >= marked && (status.marked > 0) == (marked > 0), "{status:?}");
    (bytes.map(|bytes| bytes as f64 * 8.0 / 3e6), marked, sparse)
}

#[test]
fn ip_packets_are_held_to_the_rate_and_those_that_understand_it_are_marked() {
    let ([ect, plain], marked, sparse) = ip_flows("rate = \"10Mbit\"");
    println!("{ect} and {plain} Mbit/s, {marked} marked, {sparse} of the sparse flow in time");
    assert!((9.0..9.9).contains(&(ect + plain)), "{ect} and {plain} of 10 Mbit/s");
    assert!((0.8..1.25).contains(&(ect / plain)), "{ect} and {plain}");
    assert!(marked > 100, "{marked}");
    assert_eq!(sparse, 80);
    // What a link below adds to each packet counts: 100 bytes beside some 1,090.
    let ([ect, plain], ..) = ip_flows("rate = \"10Mbit\"\nrate_overhead = 100");
    assert!((8.2..9.0).contains(&(ect + plain)), "{ect} and {plain} of 10 Mbit/s");
}

/// Lets time pass in which the service says nothing by itself.
fn run_unserved(flood: &mut GateFlood, milliseconds: u32) {
    for _ in 0..milliseconds {
        flood.pair.world.run(MS);
        flood.malicious.poll(flood.pair.world.clock.now());
    }
}

#[test]
fn a_peer_without_lanes_is_held_to_the_rate_too() {
    let mut flood = GateFlood::new(904, "rate = \"1Mbit\"");
    flood.say_hello(true, Features::default());
    let opening = [&flood.open(0, ECHO)[..], b"opens"].concat();
    flood.malicious.send_plain(&opening);
    run_unserved(&mut flood, 50);
    let flow = flood.pair.echo.receive()[0].0;
    // They fit into the initial window.
    for number in 0..20 {
        flood.pair.echo.send(flow, &numbered(number));
    }
    run_unserved(&mut flood, 30);
    let came = |flood: &GateFlood| flood.malicious.data.iter().filter(|data| data.len() > 600).count();
    let before = came(&flood);
    run_unserved(&mut flood, 60);
    let within = came(&flood) - before;
    // 7,500 bytes, in packets of 1,267 with two datagrams each.
    assert!((8..=13).contains(&within), "{within} datagrams in 60 ms");
    run_unserved(&mut flood, 100);
    assert_eq!(came(&flood), 20, "and nothing was lost");
}

/// Datagrams that an exit has dropped because the peer sends more than it was told.
fn over_rate(pair: &mut Pair) -> u64 {
    let exit = pair.exit;
    pair.world.metric(exit, "culvert_datagrams_dropped_total{direction=\"downlink\",reason=\"over_rate\"}")
}

/// The entry forgets what it was told, and sends all that it has.
fn ignore_what_was_told(pair: &mut Pair) {
    let now = pair.world.clock.now();
    let entry = pair.entry;
    for worker in &pair.world.agent(entry).workers {
        for peer in worker.peers().iter() {
            peer.data.relay.share.account.set_granted(None, now);
        }
    }
}

#[test]
fn who_keeps_to_what_it_was_told_loses_nothing_at_the_far_end() {
    for (seed, workers) in [(920, (1, 1)), (921, (3, 2))] {
        let mut pair = Pair::with_workers(seed, workers, "", "rate_receive = \"10Mbit\"");
        pair.wait_for_lanes(1);
        let arrived = load(&mut pair, 4);
        assert_unharmed(&arrived);
        let all: f64 = (0..4).map(|place| arrived.mbit(place)).sum();
        assert!((9.0..10.0).contains(&all), "{all} of 10 Mbit/s");
        assert_eq!(over_rate(&mut pair), 0);
        pair.assert_balanced();
    }
}

#[test]
fn a_peer_that_ignores_what_it_was_told_gets_a_tenth_more() {
    for (seed, workers) in [(922, (1, 1)), (923, (3, 2))] {
        let mut pair = Pair::with_workers(seed, workers, "", "rate_receive = \"10Mbit\"");
        pair.wait_for_lanes(1);
        ignore_what_was_told(&mut pair);
        // 77 Mbit/s, of which a second's worth passes at once before the measurement begins.
        let arrived = load(&mut pair, 4);
        let all: f64 = (0..4).map(|place| arrived.mbit(place)).sum();
        assert!((9.9..11.1).contains(&all), "{all} Mbit/s, told 10");
        assert!(over_rate(&mut pair) > 20_000, "{}", over_rate(&mut pair));
        pair.assert_balanced();
        // Another rate is in effect at once, and none takes all.
        let toml = pair.exit_toml.clone();
        for (rate, least, most) in [("rate_receive = \"20Mbit\"", 19.0, 22.2), ("", 70.0, 80.0)] {
            let exit = pair.exit;
            pair.world.reload(exit, &toml.replace("rate_receive = \"10Mbit\"", rate)).unwrap();
            pair.world.run(50 * MS);
            ignore_what_was_told(&mut pair);
            let arrived = load(&mut pair, 4);
            let all: f64 = (0..4).map(|place| arrived.mbit(place)).sum();
            assert!((least..most).contains(&all), "{all} Mbit/s with {rate:?}");
        }
        pair.assert_balanced();
    }
}

#[test]
fn the_streams_of_a_peer_that_ignores_what_it_was_told_wait() {
    let mut pair = Pair::with_workers(925, (1, 1), "", "rate_receive = \"10Mbit\"");
    pair.wait_for_lanes(1);
    ignore_what_was_told(&mut pair);
    let mut forward = ForwardLoad::open(&mut pair);
    let mut begun = 0;
    for ms in 0..6_000 {
        forward.pump();
        pair.world.run(MS);
        // A second's worth passes at once.
        if ms == 3_000 {
            begun = forward.received;
        }
    }
    let mbit = (forward.received - begun) as f64 * 8.0 / 3e6;
    assert!((10.0..11.2).contains(&mbit), "{mbit} Mbit/s, told 10");
    // Without the limit the same forward goes on, and is faster.
    let (exit, toml) = (pair.exit, pair.exit_toml.clone());
    pair.world.reload(exit, &toml.replace("rate_receive = \"10Mbit\"", "")).unwrap();
    let begun = forward.received;
    for _ in 0..2_000 {
        forward.pump();
        pair.world.run(MS);
    }
    let faster = (forward.received - begun) as f64 * 8.0 / 2e6;
    assert!(faster > 2.0 * mbit, "{faster} Mbit/s after {mbit}");
    pair.assert_balanced();
}

#[test]
fn forwards_that_have_nothing_to_read_are_not_served_while_their_peer_is_over_its_rate() {
    let mut pair = Pair::with_workers(926, (1, 1), "", "rate_receive = \"2Mbit\"");
    pair.wait_for_lanes(1);
    ignore_what_was_told(&mut pair);
    let mut idle = Vec::from_iter((0..40).map(|_| ForwardLoad::open(&mut pair)));
    let (mut talking, mut sender) = (ForwardLoad::open(&mut pair), pair.client(8000));
    let served = |pair: &mut Pair| pair.world.agent(pair.exit).workers[0].forwards_served();
    let mut begun = 0;
    for ms in 0..3_000_u32 {
        // Five times the rate, in datagrams: the debt is never paid, and each piece of the one stream adds to it.
        for number in 0..5 {
            sender.send(INGRESS, &[number; 250]);
        }
        let _full_sometime = talking.client.write(&[0; 100]);
        if ms % 100 == 0 {
            // What the idle ones have to say is a reply, which no rate holds up here.
            idle.iter_mut().for_each(|one| assert!(one.service.write(&[1]).is_ok()));
        }
        pair.world.run(MS);
        if ms == 1_000 {
            begun = served(&mut pair);
        }
    }
    // The 40 have spoken 19 times each since, and bytes of the one came 2,000 times. With every forward looked at after each rest, of a
    // millisecond, it was 4,141 times.
    let count = served(&mut pair) - begun;
    assert!(over_rate(&mut pair) > 5_000, "{}", over_rate(&mut pair));
    assert!((700..3_300).contains(&count), "forwards were served {count} times in 2 s");
    pair.assert_balanced();
}

#[test]
fn a_reader_that_goes_on_leaves_room_for_the_datagrams_of_a_peer_that_keeps_to_the_rate() {
    for (seed, workers) in [(927, (1, 1)), (928, (2, 2))] {
        let mut pair = Pair::with_workers(seed, workers, "", "rate_receive = \"1Mbit\"");
        pair.wait_for_lanes(1);
        let mut forwards = Vec::from_iter((0..3).map(|_| ForwardLoad::open(&mut pair)));
        let mut sender = pair.client(8000);
        let mut arrived = 0;
        // The readers stop for a while, twice, and the windows fill within the rate.
        for ms in 0..24_000_u32 {
            for forward in &mut forwards {
                while forward.client.write(&[0; 4096]).is_ok() {}
                let mut buffer = vec![0; 64 * 1024];
                while ms / 6_000 % 2 == 1 && forward.service.read(&mut buffer).is_ok_and(|count| count > 0) {}
            }
            if ms % 20 == 0 {
                sender.send(INGRESS, &numbered(ms));
            }
            pair.world.run(MS);
            arrived += pair.echo.receive().len();
        }
        pair.world.run(100 * MS);
        arrived += pair.echo.receive().len();
        assert_eq!((over_rate(&mut pair), arrived), (0, 1_200), "seed {seed}");
        pair.assert_balanced();
    }
}

#[test]
fn payloads_that_are_numbered_for_repair_count_too() {
    let repair = "repair = { mode = \"retransmit\", max_overhead = 1.0 }";
    let mut tunnel = Tunnel::with_ends(
        924,
        (1, 1),
        (repair, crate::tunnel::ENTRY_TUN),
        ("rate_receive = \"5Mbit\"", crate::tunnel::EXIT_TUN),
    );
    tunnel.pair.wait_for_lanes(1);
    tunnel.run(2_000);
    ignore_what_was_told(&mut tunnel.pair);
    let [entry, exit] = tunnel.ends();
    let mut bytes = 0;
    for ms in 0..5_000_u32 {
        for flow in 1..4 {
            let recipe = Recipe { flow, payload: 1_000, ..Recipe::UDP };
            tunnel.push(entry, 0, &Given::new(&recipe, How::Complete));
        }
        tunnel.run(1);
        let written = tunnel.written(exit);
        if ms >= 2_000 {
            bytes += written.iter().map(Vec::len).sum::<usize>();
        }
    }
    let mbit = bytes as f64 * 8.0 / 3e6;
    assert!(mbit < 5.6, "{mbit} of 24 Mbit/s, told 5");
    assert!(over_rate(&mut tunnel.pair) > 5_000, "{}", over_rate(&mut tunnel.pair));
    tunnel.run(500);
    tunnel.pair.assert_balanced();
}
