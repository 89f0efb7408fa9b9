//! Strangers at an agent with a decoy, with one worker and with several.

use std::{net::SocketAddr, time::Duration};

use gate::decoy::{DecoyDirection, DecoyDrop};
use rand::{Rng, RngExt, SeedableRng, rngs::StdRng};

use crate::{CLIENT, ENTRY, EXIT, INGRESS, Pair, SERVICE, harness::Udp, number_of, numbered};

pub(super) const DECOY: SocketAddr = SocketAddr::new(SERVICE, 8443);
pub(super) const PORT: SocketAddr = SocketAddr::new(EXIT, 4433);

/// Long enough for a datagram to come to the agent and to the decoy.
pub(super) const THERE: Duration = Duration::from_millis(12);

pub(super) struct Site {
    pub(super) pair: Pair,
    pub(super) decoy: Udp,
}

impl Site {
    pub(super) fn new(seed: u64, workers: u8, limits: &str) -> Self {
        let toml = format!("[access]\ndecoy = \"{DECOY}\"\n[limits]\n{limits}");
        let mut pair = Pair::with_workers(seed, (1, workers), "", &toml);
        let decoy = pair.services.quic(DECOY);
        Self { pair, decoy }
    }

    fn stranger(&mut self, port: u16) -> Udp {
        self.pair.clients.quic(SocketAddr::new(CLIENT, port))
    }

    /// What the decoy gets, after a while.
    pub(super) fn arrived(&mut self) -> Vec<(SocketAddr, u8, Vec<u8>)> {
        self.pair.world.run(THERE);
        self.decoy.receive_marked()
    }

    /// The address that the decoy knows a stranger by, who sends this.
    fn address_of(&mut self, stranger: &mut Udp, datagram: &[u8]) -> SocketAddr {
        stranger.send(PORT, datagram);
        let arrived = self.arrived();
        assert_eq!(arrived.len(), 1);
        assert_eq!(arrived[0].2, datagram);
        arrived[0].0
    }

    /// How many bytes of `answers` a stranger gets.
    fn returned(&mut self, stranger: &mut Udp, to: SocketAddr, answers: &[Vec<u8>]) -> usize {
        for answer in answers {
            self.decoy.send(to, answer);
        }
        self.pair.world.run(THERE);
        stranger.receive().iter().map(|(_, answer)| answer.len()).sum()
    }

    pub(super) fn metric(&mut self, series: &str) -> u64 {
        self.pair.world.metric(self.pair.exit, series)
    }

    pub(super) fn dropped(&mut self, reason: &str) -> u64 {
        let drop = DecoyDrop::ALL.into_iter().find(|drop| drop.label() == reason).unwrap();
        let direction = drop.direction().label();
        self.metric(&format!("culvert_decoy_drops_total{{direction=\"{direction}\",reason=\"{reason}\"}}"))
    }
}

/// An Initial with a token that no agent makes.
pub(super) fn initial(dcid: &[u8], len: usize) -> Vec<u8> {
    let mut packet = long(dcid, b"stranger");
    packet.extend([5, 1, 2, 3, 4, 5]);
    packet.resize(len, 9);
    packet
}

/// The start of a packet with a long header.
pub(super) fn long(dcid: &[u8], scid: &[u8]) -> Vec<u8> {
    let mut packet = vec![0xc0, 0, 0, 0, 1];
    for cid in [dcid, scid] {
        packet.push(u8::try_from(cid.len()).unwrap());
        packet.extend(cid);
    }
    packet
}

pub(super) fn short(dcid: &[u8], len: usize) -> Vec<u8> {
    let mut packet = vec![0x41];
    packet.extend(dcid);
    packet.resize(len, 3);
    packet
}

#[test]
fn strangers_reach_the_decoy_byte_for_byte_whichever_worker_they_come_to() {
    for (seed, workers, steering) in (900..)
        .zip([1, 2, 3])
        .flat_map(|(seed, workers)| [(seed, workers, true), (seed + 10, workers, false)])
    {
        let mut site = Site::new(seed, workers, "");
        site.pair.world.fabric.set_steering(steering);
        let mut strangers: Vec<Udp> = (0..6).map(|port| site.stranger(2000 + port)).collect();
        let mut known = Vec::new();
        for (stranger, place) in strangers.iter_mut().zip(0..) {
            // Every worker is chosen, by the stranger first and by the decoy's connection ID then.
            let (first, later) = (initial(&[place, 1, 2, 3, 4, 5, 6, 7], 1200), [place + 1; 20]);
            stranger.send_marked(PORT, &first, 1);
            let arrived = site.arrived();
            let [(from, ecn, datagram)] = &arrived[..] else { panic!("{arrived:?}") };
            assert_eq!((from.ip(), *ecn, datagram), (EXIT, 1, &first), "workers {workers}");
            assert!(!known.contains(from), "a socket of its own");
            known.push(*from);
            let answers = [long(b"stranger", &later), short(b"stranger", 1200), short(b"stranger", 900)];
            for (answer, ecn) in answers.iter().zip([2, 3, 0]) {
                site.decoy.send_marked(*from, answer, ecn);
            }
            site.pair.world.run(THERE);
            let answered: Vec<_> = answers.into_iter().zip([2, 3, 0]).map(|(a, e)| (PORT, e, a)).collect();
            assert_eq!(stranger.receive_marked(), answered);
            stranger.send_marked(PORT, &short(&later, 50), 3);
            assert_eq!(site.arrived(), [(*from, 3, short(&later, 50))], "the decoy sees one port");
            assert_eq!(site.returned(stranger, *from, &vec![vec![7; 1200]; 20]), 24_000, "no limit now");
        }
        let totals = ["datagrams", "bytes"].map(|what| {
            DecoyDirection::LABELS.map(|direction| {
                site.metric(&format!("culvert_decoy_{what}_total{{direction=\"{direction}\"}}"))
            })
        });
        assert_eq!(totals, [[12, 138], [7500, 6 * (35 + 2100 + 24_000)]]);
        assert_eq!(
            (site.metric("culvert_decoy_flows"), site.metric("culvert_decoy_flows_opened_total")),
            (6, 6)
        );
        let handed = site.metric("culvert_handed_over_datagrams_total{kind=\"unauthenticated\"}");
        assert_eq!(handed > 0, workers > 1);
        assert_eq!(site.metric("culvert_socket_sent_datagrams_total{socket=\"decoy\"}"), 12);
    }
}

#[test]
fn datagrams_of_every_length_come_through_as_they_are() {
    for workers in [1, 3] {
        let mut site = Site::new(920, workers, "");
        let mut rng = StdRng::seed_from_u64(920);
        let mut stranger = site.stranger(2000);
        let mut sent = Vec::new();
        for len in (0..1500).chain([9000, 65_507]) {
            let mut datagram = vec![0; len];
            rng.fill_bytes(&mut datagram);
            // Those of one length come in one buffer.
            for _ in 0..1 + usize::from(len % 64 == 0) {
                stranger.send(PORT, &datagram);
                sent.push(datagram.clone());
            }
            if len % 100 == 0 {
                site.pair.world.run(THERE);
            }
        }
        let mut got: Vec<Vec<u8>> = site.arrived().into_iter().map(|(_, _, datagram)| datagram).collect();
        if workers > 1 {
            sent.sort();
            got.sort();
        }
        assert!(sent == got, "{} of {} came, workers {workers}", got.len(), sent.len());
    }
}

#[test]
fn a_stranger_that_has_not_answered_gets_three_times_what_it_sent() {
    for workers in [1, 2] {
        let mut site = Site::new(930, workers, "");
        let mut stranger = site.stranger(2000);
        let from = site.address_of(&mut stranger, &initial(b"whatever", 1000));
        let answers = vec![long(b"stranger", b"\x07decoys"); 20].into_iter().chain(vec![vec![7; 1000]; 5]);
        let answers: Vec<Vec<u8>> = answers.collect();
        let longs: usize = answers[..20].iter().map(Vec::len).sum();
        assert_eq!(site.returned(&mut stranger, from, &answers), longs + 2000);
        assert_eq!(site.dropped("amplification"), 3);
        assert_eq!(site.address_of(&mut stranger, &short(b"unknown", 100)), from);
        assert_eq!(site.returned(&mut stranger, from, &vec![vec![7; 800]; 2]), 800);
        assert_eq!(site.address_of(&mut stranger, &short(b"\x07decoys", 30)), from);
        assert_eq!(site.returned(&mut stranger, from, &vec![vec![7; 1200]; 50]), 60_000);
        assert_eq!(site.dropped("amplification"), 4);
    }
}

#[test]
fn a_stranger_that_moves_to_another_port_is_another_address_to_the_decoy_and_goes_on() {
    for workers in [1, 2, 3] {
        let mut site = Site::new(940, workers, "");
        let (mut stranger, mut moved) = (site.stranger(2000), site.stranger(2001));
        let cid = b"\x05decoys cid";
        let from = site.address_of(&mut stranger, &initial(b"whatever", 1200));
        assert!(site.returned(&mut stranger, from, &[long(b"stranger", cid)]) > 0);
        assert_eq!(site.address_of(&mut stranger, &short(cid, 100)), from);
        let after = site.address_of(&mut moved, &short(cid, 40));
        assert!(after.ip() == EXIT && after.port() != from.port());
        assert_eq!(site.returned(&mut moved, after, &vec![vec![7; 1200]; 20]), 24_000);
        assert!(stranger.receive().is_empty());
        assert_eq!(site.metric("culvert_decoy_flows"), 2);
    }
}

#[test]
fn a_full_table_gives_up_who_never_answered_first() {
    let mut site = Site::new(950, 2, "decoy_flows = 3");
    let mut strangers: Vec<Udp> = (0..6).map(|port| site.stranger(2000 + port)).collect();
    let first = site.address_of(&mut strangers[0], &initial(b"whatever", 1200));
    assert!(site.returned(&mut strangers[0], first, &[long(b"stranger", b"decoys")]) > 0);
    site.address_of(&mut strangers[0], &short(b"decoys", 40));
    for stranger in &mut strangers[1..] {
        site.address_of(stranger, &initial(b"whatever", 1200));
    }
    assert_eq!(site.metric("culvert_decoy_flows"), 3);
    assert_eq!(site.address_of(&mut strangers[0], &short(b"decoys", 40)), first, "it stayed");
    assert_eq!(site.metric("culvert_decoy_flows_opened_total"), 6);
    assert_eq!(site.returned(&mut strangers[0], first, &[vec![7; 5000]]), 5000);
    // The sockets of those that are gone are, too: what the decoy still sends them reaches nobody.
    let second = site.address_of(&mut strangers[1], &initial(b"whatever", 1200));
    assert_eq!(site.metric("culvert_decoy_flows_opened_total"), 7);
    assert_eq!(site.returned(&mut strangers[1], second, &[vec![7; 100]]), 100);
}

#[test]
fn one_source_opens_flows_at_a_bounded_rate() {
    let mut site = Site::new(960, 2, "");
    let mut strangers: Vec<Udp> = (0..60).map(|port| site.stranger(2000 + port)).collect();
    for stranger in &mut strangers {
        stranger.send(PORT, &initial(b"whatever", 100));
    }
    assert_eq!(site.arrived().len(), 50);
    assert_eq!(site.dropped("source_rate"), 10);
    site.pair.world.run(Duration::from_secs(1));
    for stranger in &mut strangers {
        stranger.send(PORT, &initial(b"whatever", 100));
    }
    assert_eq!(site.arrived().len(), 60);
}

#[test]
fn a_minute_of_silence_ends_a_flow() {
    let mut site = Site::new(970, 2, "");
    let mut strangers = [site.stranger(2000), site.stranger(2001)];
    let addresses =
        strangers.each_mut().map(|stranger| site.address_of(stranger, &initial(b"whatever", 100)));
    site.pair.world.run(Duration::from_secs(50));
    assert_eq!(site.address_of(&mut strangers[0], &initial(b"whatever", 100)), addresses[0]);
    site.pair.world.run(Duration::from_secs(11));
    assert_eq!(site.metric("culvert_decoy_flows"), 1);
    assert_eq!(site.returned(&mut strangers[1], addresses[1], &[vec![7; 10]]), 0, "its socket is closed");
    assert_eq!(site.returned(&mut strangers[0], addresses[0], &[vec![7; 10]]), 10);
    site.pair.world.run(Duration::from_secs(60));
    assert_eq!(site.metric("culvert_decoy_flows"), 0);
    site.address_of(&mut strangers[1], &initial(b"whatever", 100));
    assert_eq!(site.metric("culvert_decoy_flows_opened_total"), 3);
}

#[test]
fn without_a_decoy_strangers_meet_silence_and_are_counted() {
    let mut pair = Pair::with_workers(980, (1, 2), "", "");
    let mut stranger = pair.clients.quic(SocketAddr::new(CLIENT, 2000));
    for datagram in [short(b"whatever", 100), vec![0xc0; 1200], Vec::new()] {
        stranger.send(PORT, &datagram);
    }
    pair.world.run(THERE);
    assert!(stranger.receive().is_empty());
    let exit = pair.exit;
    assert_eq!(
        pair.world.metric(exit, "culvert_decoy_drops_total{direction=\"to_decoy\",reason=\"no_decoy\"}"),
        3
    );
    assert_eq!(pair.world.metric(exit, "culvert_decoy_flows_opened_total"), 0);
}

#[test]
fn a_decoy_that_does_not_listen_is_noticed_and_harms_nobody() {
    let toml = "[access]\ndecoy = \"127.0.0.1:8443\"";
    let mut pair = Pair::with_workers(990, (1, 2), "", toml);
    pair.wait_for_lanes(1);
    let (exit, mut stranger) = (pair.exit, pair.clients.quic(SocketAddr::new(CLIENT, 2000)));
    for _ in 0..5 {
        stranger.send(PORT, &initial(b"whatever", 1200));
        pair.world.run(THERE);
    }
    assert!(stranger.receive().is_empty());
    assert_eq!(
        pair.world.metric(exit, "culvert_decoy_drops_total{direction=\"to_decoy\",reason=\"refused\"}"),
        5
    );
    assert_eq!(pair.world.metric(exit, "culvert_socket_refusals_total{socket=\"decoy\"}"), 5);
    assert!(pair.world.peer(exit).connected());
}

#[test]
fn a_connected_peer_does_not_notice_strangers_even_at_its_own_address() {
    for (workers, steering) in [(1, true), (2, true), (3, false)] {
        let mut site = Site::new(1000, workers, "");
        site.pair.world.fabric.set_steering(steering);
        site.pair.wait_for_lanes(1);
        let peer = site.pair.world.agent(site.pair.entry).workers[0].addresses().transport[0];
        let peer = SocketAddr::new(ENTRY, peer.port());
        let mut rng = StdRng::seed_from_u64(1000);
        let (mut client, mut stranger) = (site.pair.client(4000), site.stranger(2000));
        let mut answers = Vec::new();
        let mut strange = 0;
        for number in 0..100 {
            client.send(INGRESS, &numbered(number));
            for _ in 0..20 {
                let datagram = initial(&rng.random::<[u8; 8]>(), rng.random_range(30..1400));
                stranger.send(PORT, &datagram);
                site.pair.world.forge(peer, PORT, &datagram);
                strange += 2;
            }
            site.pair.run_served(Duration::from_millis(3));
            answers.extend(client.receive().iter().map(|(_, payload)| number_of(payload)));
        }
        site.pair.run_served(Duration::from_millis(100));
        answers.extend(client.receive().iter().map(|(_, payload)| number_of(payload)));
        assert_eq!(answers, (0..100).collect::<Vec<_>>(), "workers {workers}");
        let arrived = site.decoy.receive_marked();
        assert_eq!(arrived.len(), strange);
        let peers = site.pair.assert_balanced();
        assert!(peers.iter().all(|peer| peer.connected() && peer.more.lanes.lost_packets == 0));
        let both = peers.iter().map(|peer| peer.downlink.account.dropped_total()).sum::<u64>();
        assert_eq!(both, 0);
        assert_eq!(site.metric("culvert_decoy_flows"), 2);
        // An answer to what was forged reaches the peer, to whom it means nothing.
        for (from, ..) in &arrived[..40] {
            site.decoy.send(*from, &[7; 20]);
        }
        site.pair.world.run(THERE);
        client.send(INGRESS, &numbered(100));
        site.pair.run_served(Duration::from_millis(100));
        assert_eq!(client.receive().len(), 1);
    }
}
