//! An exit of a fleet: its connection IDs name it, stream connections come to it, and packets of its siblings end here.

use std::time::Duration;

use ::gate::{
    Own,
    classify::{Class, Initial, classify},
    identity::Identity,
};
use wire::cid::ConnectionIds;

use crate::{
    ENTRY, EXIT, INGRESS, Pair, UPSTREAM,
    decoy::{long, short},
    gate::{LISTEN, assert_silence, ended, sent_by, stranger},
    numbered,
};

/// A pair whose exit has this server ID.
fn numbered_exit(seed: u64, workers: (u8, u8), server: u8, extra: &str) -> Pair {
    let mut pair = Pair::with_workers(seed, workers, "", extra);
    let toml = pair.exit_toml.replace("listen = [", &format!("server_id = {server}, listen = ["));
    let key = Identity::from_pem(pair.exit_key.to_pem().as_bytes()).unwrap();
    pair.world.tapped();
    pair.world.workers = workers.1;
    pair.world.restart(pair.exit, &toml, &key, &[EXIT], 77);
    pair.wait_for_lanes(usize::from(workers.0.max(workers.1)));
    pair
}

/// The second byte of the destination of a packet.
fn server_of(datagram: &[u8]) -> Option<u8> {
    match classify(datagram) {
        Class::Short { cid } => Some(cid[1]),
        Class::Handshake { dcid } | Class::Initial(Initial { dcid, .. }) => dcid.get(1).copied(),
        Class::Retry { .. } | Class::ZeroRtt { .. } | Class::Other => None,
    }
}

#[test]
fn every_packet_to_the_exit_but_the_first_ones_names_it() {
    let mut pair = numbered_exit(2100, (2, 3), 201, "");
    let service = pair.services.tcp_listen(UPSTREAM);
    let _forward = pair.clients.tcp(INGRESS);
    let mut client = pair.client(9000);
    for number in 0..20 {
        client.send(INGRESS, &numbered(number));
        pair.run_served(Duration::from_millis(20));
    }
    drop(service);
    let opened = "culvert_stream_connections_opened_total";
    assert!(pair.world.metric(pair.entry, opened) > 0, "a packet of each kind");
    let tapped = pair.world.tapped();
    let mut seen = [0; 2];
    for sent in sent_by(&tapped, ENTRY).into_iter().filter(|sent| sent.to == LISTEN) {
        let first = matches!(classify(&sent.payload), Class::Initial(initial) if initial.token.len() == 136);
        seen[usize::from(first)] += 1;
        // The first packets of the control connection go to any exit, those of stream connections to that of the session.
        assert!(first || server_of(&sent.payload) == Some(201), "{:?}", classify(&sent.payload));
    }
    assert!(seen.iter().all(|seen| *seen > 0), "{seen:?}");
}

#[test]
fn a_stream_connection_is_dialled_to_the_exit_of_its_session() {
    let mut pair = numbered_exit(2101, (3, 3), 5, "");
    pair.world.tapped();
    let service = pair.services.tcp_listen(UPSTREAM);
    let _forward = pair.clients.tcp(INGRESS);
    pair.world.run(Duration::from_secs(1));
    drop(service);
    let tapped = pair.world.tapped();
    let knocks = sent_by(&tapped, ENTRY).into_iter().filter(
        |sent| matches!(classify(&sent.payload), Class::Initial(initial) if initial.token.len() == 136),
    );
    let servers: Vec<Option<u8>> = knocks.map(|sent| server_of(&sent.payload)).collect();
    assert!(servers.len() >= 2 && servers.iter().all(|server| *server == Some(5)), "{servers:?}");
}

#[test]
fn packets_for_another_exit_draw_no_byte_and_reach_neither_a_connection_nor_the_decoy() {
    for workers in [1, 2] {
        let mut pair = numbered_exit(2110, (1, workers), 1, "[access]\ndecoy = \"198.51.100.9:443\"");
        let mut decoy = pair.services.quic("198.51.100.9:443".parse().unwrap());
        let own = Own::new(&pair.exit_key);
        let sibling = ConnectionIds::new(own.issued.clone(), [9; 32], 0, 1).with_server_id(Some(2));
        let handshake = |first: u8| {
            let mut packet = long(&sibling.next_id().0, b"client");
            packet[0] = first;
            packet.extend([0x44, 0xb0]);
            packet.resize(1_200, 7);
            packet
        };
        let mut expected = ended(&mut pair, "other_exit");
        let packets =
            [short(&sibling.next_for_lane(0).0, 1_200), short(&sibling.next_id().0, 30), handshake(0xe0)];
        for _ in 0..8 {
            for packet in &packets {
                expected += 1;
                assert_silence(&mut pair, stranger(1), packet, "another exit's");
                assert_eq!(ended(&mut pair, "other_exit"), expected);
            }
        }
        assert_eq!(decoy.receive().len(), 0, "a peer's packets are no stranger's");
        // What is nobody's is the decoy's as ever.
        assert!(pair.world.peer(pair.exit).lanes_up >= 1);
        let foreign = short(b"whatever", 1_200);
        pair.world.send_as(&crate::harness::Tapped {
            from: stranger(1),
            to: LISTEN,
            tos: 0,
            payload: foreign,
        });
        pair.world.run(Duration::from_millis(50));
        assert_eq!(decoy.receive().len(), 1);
    }
}

#[test]
fn an_exit_without_a_server_id_knows_no_other_exit() {
    let mut pair = Pair::connected(2120, "", "");
    let own = Own::new(&pair.exit_key);
    let sibling = ConnectionIds::new(own.issued.clone(), [9; 32], 0, 1).with_server_id(Some(2));
    let packet = short(&sibling.next_id().0, 40);
    assert_silence(&mut pair, stranger(1), &packet, "of an earlier process, as far as it knows");
    assert_eq!(ended(&mut pair, "other_exit"), 0);
}
