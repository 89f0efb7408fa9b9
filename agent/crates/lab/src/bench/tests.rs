//! Clients and a sink over a network in memory, on a clock of their own: every count is known beforehand.

use std::{
    cell::RefCell,
    collections::VecDeque,
    net::{IpAddr, SocketAddr},
    rc::Rc,
    sync::{Arc, atomic::Ordering},
    time::{Duration, Instant},
};

use base::clock::{Clock, ManualClock};
use net::{
    Net, Path, Ready, Token, UdpOptions, UdpRole, UdpSocket,
    memory::{Datagram, MemoryFabric, MemoryNet, Verdict},
};
use rand::{RngExt, SeedableRng, rngs::SmallRng};

use crate::bench::{
    client::{Client, Outcome, Setup},
    datagram::{Direction, Header, Kind, Plan},
    party::{Common, Party, Shared, Turn, nanoseconds},
    sink::{self, Sink},
    tally::Counts,
};

const CLIENT: IpAddr = IpAddr::V4(std::net::Ipv4Addr::new(192, 0, 2, 1));
const SINK: IpAddr = IpAddr::V4(std::net::Ipv4Addr::new(192, 0, 2, 2));

/// 1,000 datagrams of 125 bytes a second in each direction: a datagram a millisecond.
const PLAN: Plan = Plan {
    direction: Direction::Both,
    flows: 3,
    size: 125,
    burst: 4,
    bits_per_second: Some(1_000_000),
    warmup_ms: 100,
    measured_ms: 1_200,
};

fn socket(
    net: &mut MemoryNet,
    bind: SocketAddr,
    connect: Option<SocketAddr>,
    token: u32,
) -> Box<dyn UdpSocket> {
    let role = if connect.is_some() { UdpRole::Upstream } else { UdpRole::Ingress };
    let options =
        UdpOptions { bind, connect, role, buffer_bytes: 1 << 20, interface: None, mark: 0, gso: true };
    net.udp(&options, Token(token)).unwrap()
}

/// Takes turns until the client has ended; returns what both found.
fn run(plan: Plan, fabric: &MemoryFabric) -> (Outcome, sink::Outcome) {
    let clock = ManualClock::default();
    let (epoch, shared) = (clock.now(), Arc::new(Shared::default()));
    let (client_ready, sink_ready) = (Ready::default(), Ready::default());
    let mut sink_net = fabric.host(&[SINK], sink_ready.clone());
    let at_sink = socket(&mut sink_net, (SINK, 5_500).into(), None, 0);
    let to = at_sink.local_addr();
    let mut client_net = fabric.host(&[CLIENT], client_ready.clone());
    let sockets =
        (0..plan.flows).map(|flow| socket(&mut client_net, (CLIENT, 0).into(), Some(to), flow)).collect();
    let path = Path { destination: to, source: None, tos: 0 };
    let flows: Vec<(u32, Path)> = (0..plan.flows).map(|flow| (flow, path)).collect();

    let given: Rc<dyn Clock> = Rc::new(clock.clone());
    let common = Common { clock: given, epoch, one_clock: true, shared: Arc::clone(&shared) };
    let mut sink = Sink::new(common.clone(), at_sink);
    let setup = Setup { common, run: 9, plan, total_plan: plan };
    let mut client = Client::new(setup, sockets, &flows);
    let take_turn = |party: &mut dyn Party, ready: &Ready| {
        let mut tokens = Vec::new();
        ready.drain(&mut tokens);
        party.turn(&tokens)
    };
    clock.advance(Duration::from_millis(1));
    loop {
        let now = clock.now();
        if shared.welcomed.load(Ordering::Relaxed) == plan.flows
            && shared.start_ns.load(Ordering::Relaxed) == 0
        {
            shared.start_ns.store(nanoseconds(epoch, now), Ordering::Relaxed);
        }
        let turns = [take_turn(&mut client, &client_ready), take_turn(&mut sink, &sink_ready)];
        if turns[0] == Turn::Ended {
            break;
        }
        if let Some(wait) = idle(turns, now).filter(|_| client_ready.is_empty() && sink_ready.is_empty()) {
            clock.advance(wait);
        }
        assert!(clock.elapsed() < Duration::from_secs(60), "the run does not end");
    }
    (client.finish(), sink.finish().expect("flows were opened"))
}

/// How long until one of them has something to do; none if one has now.
fn idle(turns: [Turn; 2], now: Instant) -> Option<Duration> {
    let wait = turns.map(|turn| match turn {
        Turn::At(at) => at.saturating_duration_since(now),
        Turn::Now | Turn::Ended => Duration::ZERO,
    });
    Some(wait[0].min(wait[1])).filter(|wait| !wait.is_zero())
}

#[test]
fn a_network_without_loss_delivers_all_and_the_sink_says_so() {
    let (client, sink) = run(PLAN, &MemoryFabric::default());
    let all = Counts { distinct: 1_200, duplicates: 0, reordered: 0 };
    assert_eq!((client.sent.datagrams, sink.sent.datagrams), (1_200, 1_200));
    assert_eq!((client.received.counts, sink.received.counts), (all, all));
    let reports: Vec<_> = client.reports.iter().map(|report| report.unwrap()).collect();
    assert_eq!(reports.iter().map(|report| report.counts.distinct).sum::<u64>(), 1_200);
    assert_eq!(reports.iter().map(|report| report.sent).collect::<Vec<_>>(), [400; 3]);
}

#[test]
fn what_the_network_does_is_what_is_counted() {
    let fabric = MemoryFabric::default();
    let done = Rc::new(RefCell::new([0_u64; 2]));
    let counted = Rc::clone(&done);
    fabric.set_hook(move |datagram| {
        let mut counted = counted.borrow_mut();
        match Header::read(datagram.payload) {
            Ok(Header { kind: Kind::Data, down: false, sequence, .. }) => match sequence % 10 {
                3 => {
                    counted[0] += 1;
                    Verdict::Drop
                }
                5 => {
                    counted[1] += 1;
                    Verdict::Duplicate
                }
                _ => Verdict::Deliver,
            },
            Ok(_) => Verdict::Deliver,
            Err(corrupt) => panic!("{corrupt:?}"),
        }
    });
    let (client, sink) = run(PLAN, &fabric);
    let [dropped, duplicated] = *done.borrow();
    assert_eq!((dropped, duplicated), (120, 120));
    assert_eq!(client.sent.datagrams, 1_200);
    let expected = Counts { distinct: 1_200 - dropped, duplicates: duplicated, reordered: 0 };
    assert_eq!(sink.received.counts, expected);
    assert_eq!(client.received.counts.distinct, 1_200);
}

#[test]
fn stragglers_are_waited_for_while_they_come() {
    let fabric = MemoryFabric::default();
    let (network, mut held, mut ends) = (fabric.clone(), VecDeque::new(), 0_u32);
    fabric.set_hook(move |datagram| match Header::read(datagram.payload) {
        Ok(Header { kind: Kind::Data, down: false, sequence, .. }) if sequence % 100 == 50 => {
            held.push_back((datagram.from, datagram.to, datagram.payload.to_vec()));
            Verdict::Drop
        }
        Ok(Header { kind: Kind::End, .. }) => {
            ends += 1;
            // Each flow that misses something asks 20 times a second: the last straggler comes after some three seconds.
            if ends.is_multiple_of(12)
                && let Some((from, to, payload)) = held.pop_front()
            {
                assert!(network.inject(&Datagram { from, to, tos: 0, payload: &payload }));
            }
            Verdict::Deliver
        }
        Ok(_) => Verdict::Deliver,
        Err(corrupt) => panic!("{corrupt:?}"),
    });
    let (client, sink) = run(PLAN, &fabric);
    assert_eq!(client.sent.datagrams, 1_200);
    assert_eq!(sink.received.counts, Counts { distinct: 1_200, duplicates: 0, reordered: 12 });
    let reported = client.reports.iter().map(|report| report.unwrap().counts.distinct);
    assert_eq!(reported.sum::<u64>(), 1_200);
}

#[test]
fn lost_control_datagrams_are_repeated() {
    let fabric = MemoryFabric::default();
    let seed = 20_261_121;
    println!("seed {seed}");
    let mut random = SmallRng::seed_from_u64(seed);
    fabric.set_hook(move |datagram| match Header::read(datagram.payload) {
        Ok(Header { kind: Kind::Data | Kind::Warmup, .. }) => Verdict::Deliver,
        Ok(_) | Err(_) if random.random_range(0..3) == 0 => Verdict::Drop,
        Ok(_) | Err(_) => Verdict::Deliver,
    });
    let (client, sink) = run(PLAN, &fabric);
    assert_eq!((client.sent.datagrams, sink.received.counts.distinct), (1_200, 1_200));
    assert_eq!((sink.sent.datagrams, client.received.counts.distinct), (1_200, 1_200));
}
