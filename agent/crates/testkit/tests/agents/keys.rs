//! Key updates under load, and lanes whose limits (RFC 9001 §6.6) come near: nothing is lost for either.

use std::{net::SocketAddr, time::Duration};

use dataplane::lanes::VALIDATION_TIMEOUT;
use engine::worker::LaneLimits;
use ip::{
    model::Recipe,
    view::{TCP, UDP},
};
use rand::{RngExt, SeedableRng, rngs::StdRng};

use crate::{
    ENTRY, EXIT, INGRESS, Pair,
    harness::{Udp, Weather},
    number_of, numbered,
    tunnel::{Given, How, Tunnel, by_flow},
};

const MS: Duration = Duration::from_millis(1);

pub(super) fn limit(pair: &mut Pair, places: &[usize], limits: LaneLimits) {
    for place in places {
        pair.world.agent(*place).workers.iter_mut().for_each(|worker| worker.set_lane_limits(limits));
    }
}

pub(super) fn sealed(packets: u64) -> LaneLimits {
    LaneLimits { sealed: Some(packets), failed: None }
}

fn metric(pair: &mut Pair, place: usize, family: &str, label: &str) -> u64 {
    pair.world.metric(place, &format!("culvert_{family}_total{{{label}}}"))
}

pub(super) fn key_updates(pair: &mut Pair, place: usize) -> u64 {
    metric(pair, place, "lane_key_updates", "initiator=\"local\"")
}

/// Lanes that were opened again because of their limits: in time, and too late.
fn replaced(pair: &mut Pair) -> [u64; 2] {
    ["near_limit", "ended"].map(|reason| {
        let label = format!("reason=\"{reason}\"");
        [pair.entry, pair.exit].map(|place| metric(pair, place, "lanes_reopened", &label)).iter().sum()
    })
}

/// Packets that did not open with the key they were tried with.
fn failures(pair: &mut Pair, place: usize) -> u64 {
    metric(pair, place, "lane_refused_packets", "reason=\"authentication\"")
}

/// What the client was answered is all that it asked, in order.
fn assert_all_answered(client: &mut Udp, asked: u32) {
    let numbers: Vec<u32> = client.receive().iter().map(|(_, payload)| number_of(payload)).collect();
    assert_eq!(numbers, (0..asked).collect::<Vec<_>>());
}

#[test]
fn every_datagram_arrives_in_order_while_keys_are_updated() {
    for (seed, workers) in [(1200, (1, 1)), (1201, (2, 2))] {
        let mut pair = Pair::with_workers(seed, workers, "lanes = 2", "");
        let ends = [pair.entry, pair.exit];
        limit(&mut pair, &ends, sealed(200));
        pair.wait_for_lanes(2);
        let mut clients: Vec<Udp> = (0..4).map(|port| pair.client(1000 + port)).collect();
        for number in 0..600 {
            for client in &mut clients {
                client.send(INGRESS, &numbered(3 * number));
                client.send(INGRESS, &numbered(3 * number + 1));
                client.send(INGRESS, &numbered(3 * number + 2));
            }
            pair.run_served(MS);
        }
        pair.run_served(100 * MS);
        for client in &mut clients {
            assert_all_answered(client, 1800);
        }
        let begun = ends.map(|place| key_updates(&mut pair, place));
        let followed = ends.map(|place| metric(&mut pair, place, "lane_key_updates", "initiator=\"remote\""));
        println!("key updates begun {begun:?}, followed {followed:?}");
        assert!(begun.iter().sum::<u64>() >= 20, "{begun:?}");
        assert!(begun[0] >= followed[1] && begun[1] >= followed[0], "{begun:?} {followed:?}");
        assert_eq!(ends.map(|place| failures(&mut pair, place)), [0, 0]);
        assert_eq!(replaced(&mut pair), [0, 0]);
        let [entry, exit] = pair.assert_balanced();
        assert_eq!(entry.uplink.account.dropped_total() + exit.uplink.account.dropped_total(), 0);
    }
}

#[test]
fn what_a_bad_path_delivers_opens_while_keys_are_updated() {
    for seed in 1210..1214 {
        let mut pair = Pair::new(seed, "lanes = 2", "");
        let ends = [pair.entry, pair.exit];
        limit(&mut pair, &ends, sealed(600));
        pair.wait_for_lanes(2);
        *pair.world.weather.borrow_mut() =
            Weather { delay: 20 * MS, loss_percent: 4, block: Box::new(|_, _| false), mark: None };
        let mut clients: Vec<Udp> = (0..4).map(|port| pair.client(1000 + port)).collect();
        for number in 0..800 {
            for client in &mut clients {
                client.send(INGRESS, &numbered(2 * number));
                client.send(INGRESS, &numbered(2 * number + 1));
            }
            pair.run_served(MS);
        }
        pair.run_served(200 * MS);
        for client in &mut clients {
            let numbers: Vec<u32> = client.receive().iter().map(|(_, payload)| number_of(payload)).collect();
            assert!(numbers.is_sorted_by(|before, after| before < after), "seed {seed}");
            assert!(numbers.len() > 1300, "seed {seed}: {}", numbers.len());
        }
        assert!(ends.map(|place| key_updates(&mut pair, place)).iter().sum::<u64>() >= 6, "seed {seed}");
        assert_eq!(ends.map(|place| failures(&mut pair, place)), [0, 0], "seed {seed}");
        assert_eq!(replaced(&mut pair), [0, 0], "seed {seed}");
        pair.assert_balanced();
    }
}

#[test]
fn every_ip_packet_arrives_in_order_while_keys_are_updated() {
    let mut tunnel = Tunnel::new(1220, (1, 1), "lanes = 2");
    let ends = tunnel.ends();
    limit(&mut tunnel.pair, &ends, sealed(200));
    let mut tunnel = tunnel.settled(2);
    let mut given = [Vec::new(), Vec::new()];
    let recipe =
        |flow| Recipe { flow, protocol: [TCP, UDP][usize::from(flow % 2)], payload: 900, ..Recipe::TCP };
    let mut recipes: Vec<Recipe> = (1..=8).map(recipe).collect();
    for _ in 0..500 {
        for recipe in &mut recipes {
            recipe.sequence = recipe.sequence.wrapping_add(900);
            recipe.fill = recipe.fill.wrapping_add(1);
            for (end, given) in given.iter_mut().enumerate() {
                let packet = Given::new(recipe, How::Complete);
                let packet = if end == 0 { packet } else { packet.back() };
                tunnel.push(ends[end], 0, &packet);
                given.extend(packet.packets());
            }
        }
        tunnel.run(1);
    }
    tunnel.run(50);
    for (end, given) in given.into_iter().enumerate() {
        let written = tunnel.written(ends[1 - end]);
        assert_eq!(by_flow(written), by_flow(given));
    }
    let pair = &mut tunnel.pair;
    assert!(ends.map(|place| key_updates(pair, place)).iter().sum::<u64>() >= 20);
    assert_eq!(ends.map(|place| failures(pair, place)), [0, 0]);
    assert_eq!(replaced(pair), [0, 0]);
    tunnel.assert_balanced([4000, 4000]);
}

#[test]
fn a_lane_whose_key_update_is_not_confirmed_is_replaced_before_its_key_ends() {
    let mut pair = Pair::new(1230, "lanes = 2", "");
    let (entry, exit) = (pair.entry, pair.exit);
    limit(&mut pair, &[entry], sealed(600));
    pair.wait_for_lanes(2);
    // The other end hears lane 1, but what it says on it is lost.
    let ports = pair.world.agent(entry).workers[0].addresses().transport;
    let port = ports.iter().map(SocketAddr::port).max().unwrap();
    pair.world.weather.borrow_mut().block = Box::new(move |from, to| from.ip() == EXIT && to.port() == port);
    let mut clients: Vec<Udp> = (0..2).map(|port| pair.client(1000 + port)).collect();
    let mut arrived = vec![Vec::new(), Vec::new()];
    for number in 0..400 {
        for (place, client) in clients.iter_mut().enumerate() {
            for part in 0..6 {
                client.send(INGRESS, &numbered(100_000 * place as u32 + 6 * number + part));
            }
        }
        pair.world.run(MS);
        for (from, payload) in pair.echo.receive() {
            let number = number_of(&payload);
            arrived[(number / 100_000) as usize].push(number % 100_000);
            pair.echo.send(from, &payload);
        }
    }
    pair.world.run(50 * MS);
    for (_, payload) in pair.echo.receive() {
        let number = number_of(&payload);
        arrived[(number / 100_000) as usize].push(number % 100_000);
    }
    for numbers in arrived {
        assert_eq!(numbers, (0..2400).collect::<Vec<_>>(), "none is lost or overtaken");
    }
    assert_eq!(replaced(&mut pair), [1, 0]);
    assert_eq!(metric(&mut pair, entry, "lanes_reopened", "reason=\"unresponsive\""), 0);
    assert!(key_updates(&mut pair, entry) > 0, "lane 0, and the lane in the place of lane 1");
    assert_eq!([entry, exit].map(|place| pair.world.peer(place).lanes_up), [2, 2]);
    pair.assert_balanced();
}

/// The destination connection ID of the lane packets that an agent sends now.
fn lane_cid(pair: &Pair, from: std::net::IpAddr) -> (SocketAddr, SocketAddr, [u8; 8]) {
    let tapped = pair.world.tapped();
    let mut large = tapped
        .iter()
        .filter(|sent| sent.from.ip() == from && sent.payload.len() > 600 && sent.payload[0] & 0x80 == 0);
    let last = large.rfind(|sent| [ENTRY, EXIT].contains(&sent.to.ip())).unwrap();
    (last.from, last.to, last.payload[1..9].try_into().unwrap())
}

/// A packet to a lane that somebody made who saw its connection ID.
fn forged(cid: [u8; 8], rng: &mut StdRng) -> Vec<u8> {
    let rest: [u8; 48] = rng.random();
    [&[0x40][..], &cid, &rest].concat()
}

const FAILED: LaneLimits = LaneLimits { sealed: None, failed: Some(64) };

#[test]
fn a_lane_that_is_forged_at_is_replaced_before_its_integrity_limit_and_loses_nothing() {
    for (seed, at_exit) in [(1240, false), (1241, true)] {
        println!("seed {seed}, at the exit: {at_exit}");
        let mut pair = Pair::new(seed, "", "");
        let (victim, sender) = if at_exit { (pair.exit, ENTRY) } else { (pair.entry, EXIT) };
        limit(&mut pair, &[victim], FAILED);
        pair.wait_for_lanes(1);
        // A peer may not have a lane replaced that is younger.
        pair.world.run(VALIDATION_TIMEOUT);
        pair.world.tapped();
        let mut client = pair.client(1000);
        let (mut lane, mut rng) = (None, StdRng::seed_from_u64(seed));
        for number in 0..600 {
            client.send(INGRESS, &numbered(2 * number));
            client.send(INGRESS, &numbered(2 * number + 1));
            pair.run_served(MS);
            if number > 100 && failures(&mut pair, victim) < 56 {
                let (from, to, cid) = *lane.get_or_insert_with(|| lane_cid(&pair, sender));
                pair.world.forge(from, to, &forged(cid, &mut rng));
            }
        }
        pair.run_served(100 * MS);
        assert_all_answered(&mut client, 1200);
        assert_eq!(failures(&mut pair, victim), 56);
        assert_eq!(replaced(&mut pair), [1, 0]);
        assert_eq!(metric(&mut pair, victim, "lane_refused_packets", "reason=\"integrity_limit\""), 0);
        pair.world.run(Duration::from_secs(4));
        assert_eq!([pair.entry, pair.exit].map(|place| pair.world.peer(place).lanes_up), [1, 1]);
        let lanes = [pair.entry, pair.exit].map(|place| pair.world.agent(place).lanes());
        assert_eq!(lanes, [1, 1], "the old one has drained");
        pair.assert_balanced();
    }
}

#[test]
fn a_listener_does_not_have_young_lanes_replaced() {
    let mut pair = Pair::new(1245, "", "");
    let exit = pair.exit;
    limit(&mut pair, &[exit], FAILED);
    pair.wait_for_lanes(1);
    pair.world.tapped();
    let mut client = pair.client(1000);
    let (mut lane, mut rng) = (None, StdRng::seed_from_u64(1245));
    let mut young = None;
    for number in 0..3600 {
        client.send(INGRESS, &numbered(number));
        pair.run_served(MS);
        if number > 100 && failures(&mut pair, exit) < 56 {
            let (from, to, cid) = *lane.get_or_insert_with(|| lane_cid(&pair, ENTRY));
            pair.world.forge(from, to, &forged(cid, &mut rng));
        }
        if number == 2500 {
            young = Some((failures(&mut pair, exit), replaced(&mut pair)));
        }
    }
    pair.run_served(100 * MS);
    assert_eq!(young, Some((56, [0, 0])), "it was said, and is not believed");
    assert_eq!(replaced(&mut pair), [1, 0], "it is said again");
    assert_all_answered(&mut client, 3600);
    pair.assert_balanced();
}

#[test]
fn flows_of_other_workers_do_not_wait_while_the_only_lane_is_replaced() {
    for (seed, at_exit) in [(1260, false), (1261, true)] {
        println!("seed {seed}, at the exit: {at_exit}");
        let mut pair = Pair::with_workers(seed, (2, 2), "lanes = 1", "");
        let (victim, sender) = if at_exit { (pair.exit, ENTRY) } else { (pair.entry, EXIT) };
        limit(&mut pair, &[victim], FAILED);
        pair.wait_for_lanes(1);
        pair.world.weather.borrow_mut().delay = 20 * MS;
        // A peer may not have a lane replaced that is younger.
        pair.world.run(VALIDATION_TIMEOUT);
        let mut clients: Vec<Udp> = (0..8).map(|port| pair.client(1000 + port)).collect();
        let (mut lane, mut rng) = (None, StdRng::seed_from_u64(seed));
        for number in 0..600 {
            for client in &mut clients {
                client.send(INGRESS, &numbered(number));
            }
            pair.run_served(MS);
            let queued = [pair.entry, pair.exit].map(|place| pair.world.peer(place).uplink.queued);
            assert_eq!(queued, [0, 0], "after {number} ms");
            if number == 100 {
                pair.world.tapped();
            }
            if number > 200 && failures(&mut pair, victim) < 56 {
                let (from, to, cid) = *lane.get_or_insert_with(|| lane_cid(&pair, sender));
                pair.world.forge(from, to, &forged(cid, &mut rng));
            }
        }
        pair.run_served(200 * MS);
        clients.iter_mut().for_each(|client| assert_all_answered(client, 600));
        assert!(pair.handed_over() > 0, "some flows are at a worker without a lane");
        assert_eq!(replaced(&mut pair), [1, 0]);
        pair.assert_balanced();
    }
}

#[test]
fn a_lane_at_its_integrity_limit_opens_nothing_more_and_is_opened_again() {
    for (seed, at_exit) in [(1250, false), (1251, true)] {
        println!("seed {seed}, at the exit: {at_exit}");
        let mut pair = Pair::new(seed, "", "");
        let (victim, sender) = if at_exit { (pair.exit, ENTRY) } else { (pair.entry, EXIT) };
        limit(&mut pair, &[victim], FAILED);
        pair.wait_for_lanes(1);
        pair.world.tapped();
        let mut client = pair.client(1000);
        client.send(INGRESS, &numbered(0));
        pair.run_served(300 * MS);
        let (from, to, cid) = lane_cid(&pair, sender);
        let mut rng = StdRng::seed_from_u64(seed);
        // While nothing else is on the lane, all of them come in one turn.
        for _ in 0..1000 {
            pair.world.forge(from, to, &forged(cid, &mut rng));
        }
        pair.run_served(500 * MS);
        assert_eq!(failures(&mut pair, victim), 64, "no more were tried");
        assert!(metric(&mut pair, victim, "lane_refused_packets", "reason=\"integrity_limit\"") > 0);
        assert_eq!(replaced(&mut pair), [0, 1]);
        assert_eq!([pair.entry, pair.exit].map(|place| pair.world.peer(place).lanes_up), [1, 1]);
        client.send(INGRESS, &numbered(1));
        pair.run_served(100 * MS);
        assert_all_answered(&mut client, 2);
        pair.assert_balanced();
    }
}
