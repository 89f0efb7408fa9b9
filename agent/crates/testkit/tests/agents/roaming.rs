//! Addresses change: the dialler's, the listener's, what a name says; and nobody else can make them seem to.

use std::{
    net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr},
    time::Duration,
};

use base::clock::Clock;
use rand::{RngExt, SeedableRng, rngs::StdRng};

use crate::{
    ENTRY, EXIT, INGRESS, Pair, UPSTREAM,
    harness::World,
    numbered,
    restarts::{Crowd, report},
};

pub(super) const ESTABLISHED: &str = "culvert_handshakes_total{outcome=\"established\"}";
pub(super) const LANES_MOVED: &str = "culvert_path_moves_total{what=\"lane\"}";
pub(super) const CONTROL_MOVED: &str = "culvert_path_moves_total{what=\"control\"}";
pub(super) const SOCKETS_MOVED: &str = "culvert_path_moves_total{what=\"socket\"}";

pub(super) const FLOWS_ORPHANED: &str = "culvert_flows_evicted_total{reason=\"orphaned\"}";

pub(super) const SECOND: Duration = Duration::from_secs(1);

/// Where clients reach the entry, however else it moves.
pub(super) const LAN: SocketAddr = SocketAddr::new(IpAddr::V4(Ipv4Addr::new(10, 9, 0, 1)), 5300);
pub(super) const ENTRY_2: IpAddr = IpAddr::V4(Ipv4Addr::new(192, 0, 2, 66));
pub(super) const EXIT_2: IpAddr = IpAddr::V4(Ipv4Addr::new(198, 51, 100, 66));
pub(super) const ENTRY_6: IpAddr = IpAddr::V6(Ipv6Addr::new(0x2001, 0xdb8, 1, 0, 0, 0, 0, 1));
pub(super) const EXIT_6: IpAddr = IpAddr::V6(Ipv6Addr::new(0x2001, 0xdb8, 2, 0, 0, 0, 0, 1));
pub(super) const ATTACKER: SocketAddr = SocketAddr::new(IpAddr::V4(Ipv4Addr::new(203, 0, 113, 7)), 7);

/// The sockets from which the entry's packets leave.
pub(super) fn sockets(pair: &mut Pair) -> Vec<SocketAddr> {
    let workers = &pair.world.agent(pair.entry).workers;
    let of_all = workers.iter().flat_map(|worker| worker.addresses().transport);
    of_all.filter(|address| address.ip() == ENTRY || address.ip() == ENTRY_2).collect()
}

pub(super) fn between_agents(from: SocketAddr, to: SocketAddr) -> bool {
    let exit = |ip: IpAddr| ip == EXIT || ip == EXIT_2 || ip == EXIT_6;
    (exit(from.ip()) && to.port() != UPSTREAM.port()) || (exit(to.ip()) && from.port() != UPSTREAM.port())
}

/// A pair with several workers and lanes, and clients that talk.
pub(super) fn talking(seed: u64, workers: (u8, u8), extra: &str, lanes: usize) -> (Pair, Crowd) {
    let mut pair = Pair::with_workers(seed, workers, extra, "");
    pair.wait_for_lanes(lanes);
    let mut crowd = Crowd::new(&mut pair, 6, seed);
    crowd.run(&mut pair, SECOND / 2);
    (pair, crowd)
}

/// The crowd talks for `time`; the longest time without an answer to a payload sent after it began.
pub(super) fn longest_gap(
    pair: &mut Pair,
    crowd: &mut Crowd,
    ingress: SocketAddr,
    time: Duration,
) -> Duration {
    let end = pair.world.clock.now() + time;
    let (mut last, mut gap) = (pair.world.clock.now(), Duration::ZERO);
    crowd.mark();
    while pair.world.clock.now() < end {
        let before = crowd.fresh;
        crowd.step_to(pair, ingress, true);
        let now = pair.world.clock.now();
        gap = gap.max(now - last);
        if crowd.fresh > before {
            last = now;
        }
    }
    gap
}

#[test]
fn a_nat_that_rebinds_moves_each_lane_by_itself_and_all_at_once() {
    let (mut each, mut all) = (Vec::new(), Vec::new());
    for seed in 8600..8620 {
        let workers = [(1, 1), (2, 2), (3, 2)][(seed % 3) as usize];
        let (mut pair, mut crowd) = talking(seed, workers, "lanes = 3\nkeepalive = \"2s\"", 3);
        let mut rng = StdRng::seed_from_u64(seed);
        pair.world.weather.borrow_mut().delay = Duration::from_millis(rng.random_range(1..60));
        crowd.run(&mut pair, SECOND);
        let inside = sockets(&mut pair);
        assert_eq!(inside.len(), 3);
        let mut outside = 20_000;
        for socket in &inside {
            outside += 1;
            pair.world.translate(*socket, SocketAddr::new(ENTRY, outside));
            each.push(longest_gap(&mut pair, &mut crowd, INGRESS, 3 * SECOND));
        }
        let exit = pair.exit;
        assert_eq!(pair.world.metric(exit, LANES_MOVED), 3, "seed {seed}");
        assert_eq!(pair.world.metric(exit, CONTROL_MOVED), 1, "seed {seed}");
        for socket in &inside {
            outside += 1;
            pair.world.translate(*socket, SocketAddr::new(ENTRY, outside));
        }
        all.push(longest_gap(&mut pair, &mut crowd, INGRESS, 3 * SECOND));
        assert_eq!(pair.world.metric(exit, LANES_MOVED), 6, "seed {seed}");
        for place in [pair.entry, exit] {
            assert_eq!(pair.world.metric(place, ESTABLISHED), 1, "seed {seed}: the session goes on");
        }
        pair.assert_balanced();
    }
    assert!(report("gap, a NAT rebinds one lane", each) <= SECOND);
    assert!(report("gap, a NAT rebinds all lanes", all) <= SECOND);
}

/// The entry's addresses from now on; clients reach it at [`LAN`].
fn move_entry(pair: &mut Pair, to: &[IpAddr]) {
    let addresses: Vec<IpAddr> = to.iter().copied().chain([LAN.ip()]).collect();
    pair.world.set_addresses(LAN.ip(), &addresses);
}

#[test]
fn a_host_that_roams_to_another_address_keeps_its_session() {
    let mut times = Vec::new();
    for seed in 8620..8640 {
        let workers = [(1, 1), (2, 2), (2, 3)][(seed % 3) as usize];
        let (mut pair, mut crowd) = talking(seed, workers, "lanes = 3", 3);
        let mut service = pair.services.tcp_listen(UPSTREAM);
        let mut stream = pair.clients.tcp(INGRESS);
        pair.world.set_addresses(ENTRY, &[ENTRY, LAN.ip()]);
        longest_gap(&mut pair, &mut crowd, LAN, SECOND);
        let token = pair.services.token();
        let (mut served, _) = service.accept(token).unwrap();
        // There and back; the old address is gone at once, or lingers without a way.
        for (place, to) in [ENTRY_2, ENTRY, ENTRY_2].into_iter().enumerate() {
            let lingers = (seed + place as u64).is_multiple_of(2);
            let from = if to == ENTRY { ENTRY_2 } else { ENTRY };
            let left: &[IpAddr] = if lingers { &[to, from] } else { &[to] };
            move_entry(&mut pair, left);
            pair.world.weather.borrow_mut().block = Box::new(move |one, other| {
                between_agents(one, other) && (one.ip() == from || other.ip() == from)
            });
            times.push(longest_gap(&mut pair, &mut crowd, LAN, 3 * SECOND));
            assert!(sockets(&mut pair).iter().all(|socket| socket.ip() == to), "seed {seed}");
        }
        assert_eq!(stream.write(b"still here").unwrap(), 10);
        longest_gap(&mut pair, &mut crowd, LAN, SECOND);
        assert_eq!(served.read(&mut [0; 20]).unwrap(), 10, "a TCP forward goes on as well");
        // Those of the lanes, and of stream connections.
        let moved = 3 * sockets(&mut pair).len() as u64;
        assert_eq!(pair.world.metric(pair.entry, SOCKETS_MOVED), moved, "seed {seed}");
        for place in [pair.entry, pair.exit] {
            assert_eq!(pair.world.metric(place, ESTABLISHED), 1, "seed {seed}: the session goes on");
        }
        pair.assert_balanced();
    }
    assert!(report("gap, the host has another address", times) <= Duration::from_millis(1500));
}

#[test]
fn a_session_whose_interface_goes_away_recovers_when_it_is_back() {
    let mut times = Vec::new();
    for seed in 8640..8660 {
        let mut rng = StdRng::seed_from_u64(seed);
        let (mut pair, mut crowd) = talking(seed, (2, 2), "", 2);
        let handle = "fd09::1".parse().unwrap();
        pair.world.set_addresses(ENTRY, &[ENTRY, handle]);
        let away = Duration::from_millis(rng.random_range(200..20_000));
        // Clients do not reach it either.
        pair.world.set_addresses(handle, &[handle]);
        let (steps, mut client) = (away.as_millis() / 20, pair.client(999));
        for number in 0..steps {
            client.send(INGRESS, &numbered(number as u32));
            pair.world.run(Duration::from_millis(20));
        }
        let back = if seed.is_multiple_of(2) { ENTRY } else { ENTRY_2 };
        pair.world.set_addresses(handle, &[back, handle]);
        let ingress = SocketAddr::new(back, 5300);
        let begin = pair.world.clock.now();
        crowd.mark();
        while crowd.fresh == 0 {
            assert!(pair.world.clock.now() - begin < 2 * SECOND, "seed {seed}");
            crowd.step_to(&mut pair, ingress, true);
        }
        times.push(pair.world.clock.now() - begin);
        pair.assert_balanced();
    }
    assert!(report("recovery, an interface is back", times) <= 2 * SECOND);
}

#[test]
fn an_interface_that_is_away_is_the_peers_last_error() {
    let (mut pair, mut crowd) = talking(8930, (1, 1), "keepalive = \"1s\"", 1);
    let handle: IpAddr = "fd09::1".parse().unwrap();
    pair.world.set_addresses(ENTRY, &[ENTRY, handle]);
    pair.world.set_addresses(handle, &[handle]);
    for _ in 0..400 {
        crowd.step(&mut pair, true);
    }
    let peers: Vec<_> = pair.world.agent(pair.entry).workers[0].peers().iter().collect();
    let (_, failure) = peers[0].reach.failure().cloned().unwrap();
    let reason = &failure.reason;
    assert!(reason.contains("198.51.100.1:4433") && reason.contains("unreachable"), "{reason}");
}

#[test]
fn an_address_that_a_host_loses_is_unreachable_until_it_is_back() {
    // The network of these tests itself.
    let mut world = World::new(1);
    let mut host = world.host(&[ENTRY]);
    let mut socket = host.udp(SocketAddr::new(ENTRY, 1), None);
    let mut far = world.host(&[EXIT]).udp(SocketAddr::new(EXIT, 2), None);
    for (addresses, arrives) in [(vec![ENTRY_2], false), (vec![ENTRY], true)] {
        let from = if arrives { ENTRY_2 } else { ENTRY };
        world.set_addresses(from, &addresses);
        socket.send(SocketAddr::new(EXIT, 2), b"x");
        world.run(Duration::from_millis(50));
        assert_eq!(far.receive().len(), usize::from(arrives));
    }
}
