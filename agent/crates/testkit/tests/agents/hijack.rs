//! Nobody but the far end makes its address seem to change: replays, forgeries, and copies that are faster than the packets.

use std::{net::SocketAddr, time::Duration};

use rand::{RngExt, SeedableRng, rngs::StdRng};

use crate::{
    ENTRY, EXIT, Pair,
    harness::Tapped,
    restarts::Crowd,
    roaming::{ATTACKER, CONTROL_MOVED, ESTABLISHED, LANES_MOVED, SECOND, between_agents, sockets, talking},
};

/// Sends every packet between entry and exit that the tap saw again as the attacker; what the attacker is sent meanwhile.
fn replayed(pair: &mut Pair, packets: &[Tapped]) -> usize {
    // They have arrived.
    pair.world.run(Duration::from_millis(10));
    pair.world.tapped();
    for packet in packets.iter().filter(|packet| between_agents(packet.from, packet.to)) {
        pair.world.send_as(&Tapped { from: ATTACKER, ..packet.clone() });
    }
    pair.world.run(Duration::from_millis(1));
    pair.world.tapped().iter().filter(|packet| packet.to == ATTACKER).count()
}

#[test]
fn a_replayed_packet_moves_nothing_and_draws_nothing() {
    for seed in 8660..8666 {
        let (mut pair, mut crowd) = talking(seed, (2, 2), "lanes = 3\nkeepalive = \"1s\"", 3);
        let inside = sockets(&mut pair);
        for round in 0..6 {
            pair.world.tapped();
            crowd.run(&mut pair, SECOND / 4);
            let packets = pair.world.tapped();
            assert!(packets.len() > 50);
            assert_eq!(replayed(&mut pair, &packets), 0, "seed {seed}");
            // Also while a real move is under way.
            if round == 3 {
                for (place, socket) in inside.iter().enumerate() {
                    pair.world.translate(*socket, SocketAddr::new(ENTRY, 21_000 + place as u16));
                }
                for _ in 0..40 {
                    pair.world.tapped();
                    crowd.run(&mut pair, Duration::from_millis(10));
                    let packets = pair.world.tapped();
                    assert_eq!(replayed(&mut pair, &packets), 0, "seed {seed}");
                }
            }
        }
        assert_eq!(pair.world.metric(pair.exit, LANES_MOVED), 3, "seed {seed}: the real move, and no other");
        assert_eq!(pair.world.metric(pair.exit, ESTABLISHED), 1);
        pair.assert_balanced();
    }
}

#[test]
fn a_spoofed_packet_moves_nothing() {
    let (mut pair, mut crowd) = talking(8670, (2, 2), "lanes = 3", 3);
    let mut rng = StdRng::seed_from_u64(8670);
    pair.world.tapped();
    crowd.run(&mut pair, SECOND / 4);
    let packets = pair.world.tapped();
    let genuine: Vec<&Tapped> =
        packets.iter().filter(|packet| packet.to.ip() == EXIT && packet.to.port() == 4433).collect();
    assert!(genuine.len() > 20);
    for packet in genuine {
        // The connection ID is right, the rest of it is not.
        let mut payload = packet.payload.clone();
        let place = rng.random_range(9..payload.len());
        payload[place] ^= rng.random_range(1..=255);
        pair.world.send_as(&Tapped { from: ATTACKER, payload, ..packet.clone() });
    }
    crowd.run(&mut pair, SECOND);
    assert!(pair.world.tapped().iter().all(|packet| packet.to != ATTACKER));
    assert_eq!(pair.world.metric(pair.exit, LANES_MOVED) + pair.world.metric(pair.exit, CONTROL_MOVED), 0);
    pair.assert_balanced();
}

/// An attacker whose copies of the entry's packets are always faster than they; with `relays`, what it is sent in return
/// reaches the entry as well, as if it came from the exit.
struct Copier {
    relays: bool,
    /// Bytes that it sent, and was sent.
    bytes: [usize; 2],
    /// Where packets to it really belong: which socket of the entry its last copy was of.
    last: Option<SocketAddr>,
}

impl Copier {
    fn step(&mut self, pair: &mut Pair, crowd: &mut Crowd) {
        crowd.step(pair, true);
        for packet in pair.world.tapped() {
            let listen = SocketAddr::new(EXIT, 4433);
            if packet.to == listen && packet.from != ATTACKER {
                self.last = Some(packet.from);
                self.bytes[0] += packet.payload.len();
                pair.world.send_as(&Tapped { from: ATTACKER, ..packet });
            } else if packet.to == ATTACKER {
                self.bytes[1] += packet.payload.len();
                if let Some(to) = self.last.filter(|_| self.relays) {
                    pair.world.send_as(&Tapped { from: listen, to, ..packet });
                }
            }
        }
    }
}

/// The far ends that the exit's lanes send to, and control connections whose handshake is complete.
fn destinations(pair: &mut Pair) -> Vec<SocketAddr> {
    let mut found = Vec::new();
    for worker in &pair.world.agent(pair.exit).workers {
        found.extend(
            worker.lanes().iter().filter(|(_, slot)| slot.is_up()).filter_map(|(_, slot)| slot.path()),
        );
        found.extend(
            worker
                .control()
                .iter()
                .filter(|control| !control.is_over() && control.identity.key().is_some())
                .map(|control| control.path()),
        );
    }
    found.into_iter().map(|path| path.destination).collect()
}

#[test]
fn copies_that_are_faster_than_the_packets_themselves_do_not_take_the_session_away() {
    for (seed, relays) in (8680..8692).zip([false, true].into_iter().cycle()) {
        let (mut pair, mut crowd) = talking(seed, (1, 1), "keepalive = \"1s\"", 1);
        pair.world.weather.borrow_mut().delay = Duration::from_millis(20);
        crowd.run(&mut pair, SECOND);
        pair.world.tapped();
        let mut copier = Copier { relays, bytes: [0; 2], last: None };
        crowd.mark();
        for _ in 0..1000 {
            copier.step(&mut pair, &mut crowd);
        }
        assert!(copier.bytes[0] > 10_000);
        assert_eq!(pair.world.metric(pair.exit, LANES_MOVED), 0, "seed {seed}: the lane's address answers");
        assert!(crowd.fresh > 1400, "seed {seed}: {} of 1500", crowd.fresh);
        // Without answers nothing but challenges and probes is sent there: less than came from there.
        assert!(relays || copier.bytes[1] < copier.bytes[0], "{:?}", copier.bytes);
        let real = sockets(&mut pair);
        crowd.run(&mut pair, 3 * SECOND);
        let found = destinations(&mut pair);
        assert!(
            found.len() == 2 && found.iter().all(|address| real.contains(address)),
            "seed {seed}: {found:?}"
        );
        assert_eq!(pair.world.metric(pair.exit, ESTABLISHED), 1, "seed {seed}");
        pair.assert_balanced();
    }
}

#[test]
fn copies_during_a_real_move_do_not_take_the_session_away_for_good() {
    for (seed, relays) in (8700..8710).zip([false, true].into_iter().cycle()) {
        let (mut pair, mut crowd) = talking(seed, (1, 1), "keepalive = \"1s\"", 1);
        pair.world.weather.borrow_mut().delay = Duration::from_millis(20);
        crowd.run(&mut pair, SECOND);
        pair.world.tapped();
        let mut copier = Copier { relays, bytes: [0; 2], last: None };
        let inside = sockets(&mut pair);
        let outside = SocketAddr::new(ENTRY, 22_000);
        pair.world.translate(inside[0], outside);
        for _ in 0..400 {
            copier.step(&mut pair, &mut crowd);
        }
        // The attacker is gone, or on no path any more.
        let time = crowd.recovery(&mut pair, 2 * SECOND);
        crowd.run(&mut pair, 3 * SECOND);
        let found = destinations(&mut pair);
        assert!(found.iter().all(|address| *address != ATTACKER), "seed {seed}: {found:?}, {time:?}");
        pair.assert_balanced();
    }
}
