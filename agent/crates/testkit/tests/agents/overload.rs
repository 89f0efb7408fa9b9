//! Overload: who is greedy loses, and nobody else does.

use std::{
    cell::Cell,
    collections::BTreeMap,
    io,
    net::{IpAddr, Ipv4Addr, SocketAddr},
    rc::Rc,
    time::Duration,
};

use base::clock::Clock;
use dataplane::relay::{DropReason, PacketClass, QueueClass};
use gate::identity::Identity;
use net::{
    Delivery, DeliveryMessage, KernelQueue, ReceiveBatch, SendBatch, SendOutcome, UdpSocket, UdpStats,
    batch::Message,
};

use crate::{ENTRY, EXIT, INGRESS, Pair, number_of, numbered};

const MS: Duration = Duration::from_millis(1);
const OTHER: IpAddr = IpAddr::V4(Ipv4Addr::new(192, 0, 2, 2));

/// Datagrams of a greedy sender have these numbers and more.
const GREEDY: u32 = 1_000_000;

impl Pair {
    /// The exit has two peers, each at a host of its own, and both are connected; and what `more` says.
    fn with_second_entry(seed: u64, exit_extra: &str, more: &str) -> (Self, usize) {
        let key = Identity::generate().unwrap();
        let second = format!(
            "{exit_extra}\n[[peer]]\nname = \"other\"\npublic_key = \"{}\"\nservices = [\"echo\"]\n{exit_extra}\n{more}",
            key.public_key()
        );
        let mut pair = Self::new(seed, "", &second);
        let other = pair.world.start(
            &pair.entry_toml.replace(&ENTRY.to_string(), &OTHER.to_string()),
            &key,
            &[OTHER],
            3,
        );
        pair.world.run_till(Duration::from_secs(5), |world| {
            world.peer(0).lanes_up > 0 && [1, other].iter().all(|place| world.peer(*place).lanes_up > 0)
        });
        pair.world.run_till(Duration::from_secs(5), |world| {
            world.peers(0).iter().filter(|peer| peer.lanes_up > 0).count() == 2
        });
        (pair, other)
    }

    /// One turn of the agent at `place` takes a millisecond, and carries so many datagrams of a kind of socket.
    fn slow_down(&mut self, place: usize, units: i64) {
        self.world.fabric.set_gro(false);
        self.world.slow_down(place, MS);
        for worker in &mut self.world.agent(place).workers {
            worker.set_budget(units);
        }
    }

    fn drops(&mut self, place: usize, reason: DropReason) -> u64 {
        let peers = self.world.peers(place);
        peers.iter().map(|peer| peer.uplink.account.dropped[reason]).sum()
    }

    /// No connection, and no lane, was lost to the load.
    fn assert_calm(&mut self, place: usize) {
        assert_eq!(self.world.metric(place, "culvert_lanes_reopened_total{reason=\"unresponsive\"}"), 0);
        assert!(self.world.peers(place).iter().all(|peer| peer.connected() && peer.lanes_up > 0));
    }
}

#[test]
fn a_greedy_socket_leaves_the_traffic_of_another_without_loss() {
    let ports = "[[udp]]\nlisten = \"0.0.0.0:5301\"\npeer = \"exit\"\nservice = \"echo\"\n[limits]\nreceive_buffer = \"128KiB\"";
    let mut pair = Pair::connected(701, ports, "");
    let (mut greedy, mut modest) = (pair.client(8000), pair.client(8001));
    pair.slow_down(pair.entry, 64);
    let mut delivered = [0_u32; 2];
    for round in 0..150 {
        for number in 0..320 {
            greedy.send(INGRESS, &numbered(GREEDY + 320 * round + number));
        }
        for number in 0..4 {
            modest.send(SocketAddr::new(ENTRY, 5301), &numbered(4 * round + number));
        }
        pair.world.run(MS);
        for (_, payload) in pair.echo.receive() {
            delivered[usize::from(number_of(&payload) >= GREEDY)] += 1;
        }
    }
    pair.world.run(Duration::from_millis(300));
    delivered[0] +=
        pair.echo.receive().iter().filter(|(_, payload)| number_of(payload) < GREEDY).count() as u32;
    assert_eq!(delivered[0], 600, "the modest one loses nothing");
    assert!(
        delivered[1] >= 3_000,
        "{} of 48,000 of the greedy one: as much as there is room for",
        delivered[1]
    );
    pair.assert_balanced();
    pair.assert_calm(pair.entry);
}

#[test]
fn a_greedy_peer_with_many_sockets_leaves_the_traffic_of_another_without_loss() {
    let (mut pair, other) = Pair::with_second_entry(702, "", "");
    let exit = pair.exit;
    let mut greedy = Vec::from_iter((0..40).map(|port| pair.client(8100 + port)));
    let mut modest = pair.client(8200);
    for (number, client) in (0..).zip(&mut greedy) {
        client.send(INGRESS, &numbered(GREEDY + number));
    }
    modest.send(SocketAddr::new(OTHER, 5300), &numbered(0));
    pair.world.run(Duration::from_millis(60));
    let flows: BTreeMap<u32, SocketAddr> =
        pair.echo.receive().into_iter().map(|(from, payload)| (number_of(&payload), from)).collect();
    assert_eq!(flows.len(), 41);

    pair.slow_down(exit, 64);
    for round in 0..150 {
        for flow in flows.range(GREEDY..).map(|(_, flow)| *flow) {
            for number in 0..16 {
                pair.echo.send(flow, &numbered(GREEDY + 16 * round + number));
            }
        }
        for number in 0..4 {
            pair.echo.send(flows[&0], &numbered(4 * round + number));
        }
        pair.world.run(MS);
    }
    let full = pair.world.metric(exit, "culvert_turns_full_total");
    pair.world.run(Duration::from_millis(200));
    assert!(full >= 100, "{full} turns ended before all sockets were read");
    let numbers: Vec<u32> = modest.receive().iter().map(|(_, payload)| number_of(payload)).collect();
    assert_eq!(numbers, (0..600).collect::<Vec<_>>(), "the modest one loses nothing");
    let carried: usize = greedy.iter_mut().map(|client| client.receive().len()).sum();
    assert!(carried >= 4_000, "{carried} of 96,000 of the greedy one");
    pair.assert_calm(exit);
    pair.assert_calm(other);
}

#[test]
fn a_greedy_flow_takes_its_quota_of_a_full_queue_and_pushes_nothing_else_out() {
    let mut pair = Pair::new(703, "queue.time = \"5s\"\nqueue.packets = 1000", "");
    pair.world.weather.borrow_mut().block = Box::new(|from, to| from.ip() == EXIT || to.ip() == EXIT);
    let (mut modest, mut greedy) = (pair.client(8300), pair.client(8301));
    for number in 0..100 {
        modest.send(INGRESS, &numbered(number));
    }
    pair.world.run(MS);
    for number in 0..3_000 {
        greedy.send(INGRESS, &numbered(GREEDY + number));
        if number % 100 == 0 {
            pair.world.run(MS);
        }
    }
    pair.world.run(10 * MS);
    assert_eq!(pair.world.peer(pair.entry).uplink.queued, 600, "100, and half of 1000");
    assert_eq!(pair.drops(pair.entry, DropReason::FlowQuota), 2_500);
    pair.world.weather.borrow_mut().block = Box::new(|_, _| false);
    pair.wait_for_lanes(1);
    pair.world.run(Duration::from_millis(100));
    let mut numbers: Vec<u32> = pair.echo.receive().iter().map(|(_, payload)| number_of(payload)).collect();
    numbers.sort_unstable();
    let expected: Vec<u32> = (0..100).chain(GREEDY + 2_500..GREEDY + 3_000).collect();
    assert_eq!(numbers, expected, "all of the modest one, and the newest of the greedy one");
    pair.assert_balanced();
}

/// Takes so many datagrams, then none until it is given more credit.
struct Narrow {
    inner: Box<dyn UdpSocket>,
    credit: Rc<Cell<usize>>,
}

impl UdpSocket for Narrow {
    fn local_addr(&self) -> SocketAddr {
        self.inner.local_addr()
    }

    fn receive(&mut self, batch: &mut ReceiveBatch) -> io::Result<()> {
        self.inner.receive(batch)
    }

    fn send(&mut self, batch: &mut SendBatch, outcome: &mut dyn FnMut(&Message, SendOutcome)) {
        let mut passed = SendBatch::default();
        let mut kept = 0;
        for message in batch.messages() {
            if usize::from(message.segments) > self.credit.get() {
                break;
            }
            self.credit.set(self.credit.get() - usize::from(message.segments));
            for packet in batch.segments(message) {
                passed.tail(packet.len()).unwrap()[..packet.len()].copy_from_slice(packet);
                passed.commit(&message.path, message.owner, packet.len(), 0);
            }
            outcome(message, SendOutcome::Sent);
            kept += 1;
        }
        let mut place = 0;
        batch.retain(|_| {
            place += 1;
            place > kept
        });
        self.inner.send(&mut passed, &mut |_, _| {});
    }

    fn deliver(
        &mut self,
        received: &ReceiveBatch,
        delivery: &mut Delivery,
        outcome: &mut dyn FnMut(&DeliveryMessage, SendOutcome),
    ) {
        self.inner.deliver(received, delivery, outcome);
    }

    fn stats(&self) -> UdpStats {
        self.inner.stats()
    }

    fn kernel_queue(&self) -> KernelQueue {
        self.inner.kernel_queue()
    }
}

impl Pair {
    /// Puts narrow sockets in the place of those that an agent has for its peers.
    pub(super) fn narrow_down(&mut self, place: usize) -> Rc<Cell<usize>> {
        let credit = Rc::new(Cell::new(0));
        let worker = &mut self.world.agent(place).workers[0];
        for underlay in worker.underlays_mut().iter_mut() {
            let inner = std::mem::replace(&mut underlay.socket, Box::new(Closed));
            underlay.socket = Box::new(Narrow { inner, credit: Rc::clone(&credit) });
        }
        credit
    }

    /// Lets the narrow sockets of an agent take so many datagrams.
    pub(super) fn widen(&mut self, place: usize, credit: &Cell<usize>, datagrams: usize) {
        credit.set(datagrams);
        let worker = &mut self.world.agent(place).workers[0];
        let tokens = Vec::from_iter(worker.underlays().iter().map(|underlay| underlay.token));
        for token in tokens {
            worker.ready().mark(token);
        }
    }
}

/// Stands where a socket was taken out.
struct Closed;

impl UdpSocket for Closed {
    fn local_addr(&self) -> SocketAddr {
        SocketAddr::new(EXIT, 0)
    }

    fn receive(&mut self, _: &mut ReceiveBatch) -> io::Result<()> {
        Err(io::ErrorKind::WouldBlock.into())
    }

    fn send(&mut self, _: &mut SendBatch, _: &mut dyn FnMut(&Message, SendOutcome)) {}

    fn deliver(
        &mut self,
        _: &ReceiveBatch,
        _: &mut Delivery,
        _: &mut dyn FnMut(&DeliveryMessage, SendOutcome),
    ) {
    }

    fn stats(&self) -> UdpStats {
        UdpStats::default()
    }

    fn kernel_queue(&self) -> KernelQueue {
        KernelQueue::default()
    }
}

#[test]
fn peers_whose_datagrams_wait_for_one_socket_get_its_room_in_equal_shares() {
    assert_equal_shares(704, "");
}

#[test]
fn a_peer_that_is_not_reached_does_not_hold_up_the_turns_of_others() {
    let key = Identity::generate().unwrap().public_key().to_string();
    let absent = format!("[[peer]]\nname = \"absent\"\npublic_key = \"{key}\"\nqueue.time = \"5s\"");
    assert_equal_shares(706, &absent);
}

/// Two peers share the room of a socket; for each of the others, `more` of them, a packet waits that has no way.
fn assert_equal_shares(seed: u64, more: &str) {
    let (mut pair, _) = Pair::with_second_entry(seed, "queue.time = \"5s\"\nflow_quota = 1.0", more);
    let (mut one, mut two) = (pair.client(8400), pair.client(8401));
    one.send(INGRESS, &numbered(0));
    two.send(SocketAddr::new(OTHER, 5300), &numbered(1));
    pair.world.run(Duration::from_millis(60));
    let flows: BTreeMap<u32, SocketAddr> =
        pair.echo.receive().into_iter().map(|(from, payload)| (number_of(&payload), from)).collect();
    let credit = pair.narrow_down(pair.exit);
    for number in 0..4_000 {
        for flow in flows.values() {
            pair.echo.send(*flow, &numbered(number));
        }
        if number % 50 == 0 {
            pair.world.run(MS);
        }
    }
    let now = pair.world.clock.now();
    for peer in pair.world.agent(pair.exit).workers[0].peers_mut().iter_mut().skip(2) {
        let class = PacketClass {
            turn: 0,
            partial: false,
            tos: 0,
            lane: None,
            ahead: false,
            repair: None,
            copied: false,
        };
        let relay = &mut peer.data.relay;
        relay.uplink.receive(1, 100);
        relay.enqueue(None, QueueClass::Packets(class), &[0; 100], 100, now, now);
    }
    // A send buffer that fits nobody's time is all that is in the way.
    let mut carried = [0; 2];
    for _ in 0..60 {
        pair.widen(pair.exit, &credit, 64);
        pair.world.run(5 * MS);
        carried[0] += one.receive().len();
        carried[1] += two.receive().len();
    }
    assert!(carried[0].min(carried[1]) >= 1_000, "{carried:?}");
    assert!(carried[0].abs_diff(carried[1]) <= 500, "{carried:?}");
    pair.assert_balanced();
}

#[test]
fn a_socket_without_room_says_what_keeps_the_lanes_alive_and_sends_nothing_late() {
    let mut pair = Pair::connected(705, "keepalive = \"1s\"", "");
    let mut client = pair.client(8500);
    client.send(INGRESS, &numbered(0));
    pair.world.run(Duration::from_millis(60));
    let flow = pair.echo.receive()[0].0;
    let credit = pair.narrow_down(pair.exit);
    let begun = pair.world.clock.now();
    let mut late = 0;
    for round in 0..3_000_u32 {
        for _ in 0..8 {
            pair.echo.send(flow, &numbered(round));
        }
        if round % 20 == 0 {
            pair.widen(pair.exit, &credit, 12);
        }
        pair.world.run(MS);
        let sent = |number: u32| begun + MS * number;
        let now = pair.world.clock.now();
        late += client
            .receive()
            .iter()
            .filter(|(_, payload)| {
                // The queue's time, the send buffer's, and the way.
                now.saturating_duration_since(sent(number_of(payload))) > Duration::from_millis(2 * 101 + 10)
            })
            .count();
    }
    assert_eq!(late, 0);
    assert!(pair.drops(pair.exit, DropReason::Expired) > 0);
    pair.assert_calm(pair.exit);
    pair.assert_calm(pair.entry);
    pair.assert_balanced();
}
