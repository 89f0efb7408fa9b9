//! Many strangers at an agent with a decoy: what each gets, what peers keep, what the books say.

use std::{
    net::{IpAddr, SocketAddr},
    time::Duration,
};

use base::clock::Clock;
use gate::decoy::{DecoyDirection, DecoyDrop};
use net::ReceiveBatch;
use rand::{RngExt, SeedableRng, rngs::StdRng};

use crate::{
    INGRESS,
    decoy::{DECOY, PORT, Site, THERE, initial, long, short},
    harness::Host,
    number_of, numbered,
};

impl Site {
    /// How many datagrams went on to the decoy, or to unauthenticated senders: those that came less those that were dropped.
    fn went_on(&mut self, direction: DecoyDirection) -> u64 {
        let came = format!("culvert_decoy_datagrams_total{{direction=\"{}\"}}", direction.label());
        let reasons = DecoyDrop::ALL.into_iter().filter(|reason| reason.direction() == direction);
        let dropped: u64 = reasons.map(|reason| self.dropped(reason.label())).sum();
        self.metric(&came) - dropped
    }

    /// How many flows the agent has, and how large its tables of them have become.
    fn sizes(&mut self) -> (usize, usize) {
        let agent = self.pair.world.agent(self.pair.exit);
        assert!(agent.workers[1..].iter().all(|worker| worker.decoys().is_none()));
        agent.workers[0].decoys().unwrap()
    }

    /// Strangers who have answered, each of a network of its own: the addresses by which the decoy knows them, and their host.
    fn crowd(&mut self, size: u16) -> (Vec<SocketAddr>, Host) {
        let homes: Vec<IpAddr> = (0..size).map(|place| crowded(place).ip()).collect();
        let homes = self.pair.world.host(&homes);
        let cid = |place: u16| [&b"decoys"[..], &place.to_be_bytes()].concat();
        for place in 0..size {
            self.pair.world.forge(crowded(place), PORT, &initial(&cid(place), 1200));
        }
        let known: Vec<SocketAddr> = self.arrived().into_iter().map(|(from, ..)| from).collect();
        for (place, from) in (0..size).zip(&known) {
            self.decoy.send(*from, &long(b"stranger", &cid(place)));
        }
        self.pair.world.run(THERE);
        for place in 0..size {
            self.pair.world.forge(crowded(place), PORT, &short(&cid(place), 40));
        }
        assert_eq!((known.len(), self.arrived().len()), (usize::from(size), usize::from(size)));
        (known, homes)
    }
}

/// The address of a stranger in a crowd.
fn crowded(place: u16) -> SocketAddr {
    let [high, low] = place.to_be_bytes();
    SocketAddr::from(([10, high, low, 1], 2000))
}

/// An Initial that could carry a knock, and does not.
fn bogus(rng: &mut StdRng) -> Vec<u8> {
    let mut packet = long(&rng.random::<[u8; 8]>(), b"");
    // 136 bytes of token, as a variable-length integer.
    packet.extend([0x40, 136]);
    packet.extend(std::array::from_fn::<u8, 136, _>(|_| rng.random()));
    let rest = u16::try_from(1200 - packet.len() - 2).unwrap();
    packet.extend((0x4000 | rest).to_be_bytes());
    packet.resize(1200, 0);
    packet
}

#[test]
fn five_hundred_flows_of_the_decoy_leave_peers_their_share_and_each_other_theirs() {
    let mut site = Site::new(1010, 1, "");
    site.pair.wait_for_lanes(1);
    let (known, _homes) = site.crowd(500);
    let (entry, exit) = (site.pair.entry, site.pair.exit);
    // A flow of the peer's is open; then 200 packets, of which no two are joined, are held back on their way.
    let mut client = site.pair.client(4000);
    client.send(INGRESS, &numbered(0));
    site.pair.run_served(Duration::from_millis(30));
    assert_eq!(client.receive().len(), 1);
    let _before = site.pair.world.tapped();
    site.pair.world.weather.borrow_mut().block = Box::new(|_, to| to == PORT);
    for len in 0..200 {
        client.send(INGRESS, &vec![7; 800 + len]);
    }
    site.pair.world.run(THERE);
    site.pair.world.weather.borrow_mut().block = Box::new(|_, _| false);
    let mut held = site.pair.world.tapped();
    held.retain(|datagram| datagram.to == PORT);
    assert!(held.len() >= 200, "seed 1010: {}", held.len());
    // What the decoy sends each: no two of these are joined either.
    for (address, len) in known.iter().flat_map(|address| (100..140).map(move |len| (*address, len))) {
        site.pair.world.forge(DECOY, address, &vec![0x41; len]);
    }
    for datagram in &held {
        site.pair.world.send_as(datagram);
    }
    let before = site.pair.world.peer(exit).downlink.account.received;
    let (mut got, mut turns, mut turns_of_peers) = (vec![0_usize; 500], 0, 0);
    loop {
        let now = site.pair.world.clock.now();
        let busy = site.pair.world.agent(exit).workers[0].turn(now).busy;
        turns += 1;
        let mut answers = 0;
        for answer in site.pair.world.tapped() {
            let address = answer.to;
            if let Some(place) = (0..500).find(|place| crowded(*place) == address) {
                got[usize::from(place)] += 1;
                answers += 1;
            }
        }
        // One source has packets of peers, so strangers have two batches; alone, they have one.
        assert!(answers <= 2 * ReceiveBatch::DEFAULT_SLOTS, "{answers} in turn {turns}");
        let spread = got.iter().max().unwrap() - got.iter().min().unwrap();
        assert!(spread <= ReceiveBatch::DEFAULT_SLOTS, "{spread} after {turns} turns");
        if site.pair.world.peer(exit).downlink.account.received < before + 200 {
            assert!(answers >= ReceiveBatch::DEFAULT_SLOTS, "strangers do not starve: {answers}");
            turns_of_peers = turns;
        }
        if !busy {
            break;
        }
    }
    assert_eq!(site.pair.world.peer(exit).downlink.account.received, before + 200);
    let needed = held.len().div_ceil(ReceiveBatch::DEFAULT_SLOTS);
    assert!(turns_of_peers < needed, "{turns_of_peers} turns, as without strangers: {needed}");
    assert!(got.iter().all(|got| *got == 40), "{got:?}");
    assert_eq!(site.sizes(), (500, 500));
    site.pair.run_served(Duration::from_millis(50));
    assert!(site.pair.world.peer(entry).connected());
    site.pair.assert_balanced();
}

#[test]
fn what_came_and_was_not_dropped_went_on() {
    for (seed, workers, steering) in [(1020, 1, true), (1021, 2, true), (1022, 3, false), (1023, 3, true)] {
        let mut site = Site::new(seed, workers, "decoy_flows = 40");
        site.pair.world.fabric.set_steering(steering);
        let mut rng = StdRng::seed_from_u64(seed);
        // There is a way back to most of them.
        let homes: Vec<IpAddr> = (0..70).map(|network| IpAddr::from([10, 0, network, 1])).collect();
        let _homes = site.pair.world.host(&homes);
        let _before = site.pair.world.tapped();
        let (mut known, mut gone) = (Vec::new(), [0, 0]);
        for _ in 0..200 {
            for _ in 0..rng.random_range(0..30) {
                // Half of them share a network, so that every limit is met.
                let network = if rng.random() { 0 } else { rng.random_range(1..80) };
                let from = SocketAddr::from(([10, 0, network, 1], rng.random_range(2000..2040)));
                let cid = *b"decoys##";
                let datagram = match rng.random_range(0..4) {
                    0 => vec![0; rng.random_range(0..1500)],
                    1 => short(&cid, rng.random_range(9..1500)),
                    _ => initial(&rng.random::<[u8; 8]>(), rng.random_range(40..1500)),
                };
                site.pair.world.forge(from, PORT, &datagram);
            }
            let arrived = site.arrived();
            gone[0] += arrived.len() as u64;
            known.extend(arrived.into_iter().map(|(from, ..)| from));
            for _ in 0..rng.random_range(0..30) {
                let Some(to) = known.len().checked_sub(1).map(|last| known[rng.random_range(0..=last)])
                else {
                    break;
                };
                let len = rng.random_range(30..1500);
                let mut answer = long(b"stranger", b"decoys##");
                answer.resize(len, 1);
                site.decoy.send(to, &answer);
            }
            site.pair.world.run(THERE);
            let tapped = site.pair.world.tapped();
            gone[1] += tapped.iter().filter(|datagram| homes.contains(&datagram.to.ip())).count() as u64;
        }
        assert_eq!(DecoyDirection::ALL.map(|direction| site.went_on(direction)), gone, "seed {seed}");
        for reason in ["source_flows", "source_rate", "amplification", "to_sender"] {
            assert!(site.dropped(reason) > 0, "seed {seed}: {reason}");
        }
        assert!(gone.iter().all(|gone| *gone > 300), "seed {seed}: {gone:?}");
    }
}

#[test]
fn a_flood_from_a_thousand_sources_stays_within_its_bounds_and_harms_no_peer() {
    for (seed, workers, steering) in [(1030, 1, true), (1031, 3, true), (1032, 2, false)] {
        let mut site = Site::new(seed, workers, "decoy_flows = 256");
        site.pair.world.fabric.set_steering(steering);
        site.pair.wait_for_lanes(1);
        let mut rng = StdRng::seed_from_u64(seed);
        let (mut client, mut answers, mut arrived) = (site.pair.client(4000), Vec::new(), 0);
        // Six hundred networks, and four hundred ports of one more; each sends twice.
        let sources = (0..600).map(crowded);
        let sources = sources.chain((0..400).map(|port| SocketAddr::from(([172, 16, 0, 1], 3000 + port))));
        let sources: Vec<SocketAddr> = sources.collect();
        let sends = [&sources[..], &sources[..]].concat();
        for (number, some) in (0..).zip(sends.chunks(50)) {
            for source in some {
                site.pair.world.forge(*source, PORT, &bogus(&mut rng));
            }
            client.send(INGRESS, &numbered(number));
            site.pair.run_served(Duration::from_millis(20));
            answers.extend(client.receive().iter().map(|(_, payload)| number_of(payload)));
            arrived += site.decoy.receive_marked().len() as u64;
            let (flows, places) = site.sizes();
            assert!(flows <= 256 && places <= 256, "seed {seed}: {flows} flows, {places} places");
        }
        site.pair.run_served(Duration::from_millis(50));
        answers.extend(client.receive().iter().map(|(_, payload)| number_of(payload)));
        arrived += site.decoy.receive_marked().len() as u64;
        assert_eq!(answers, (0..40).collect::<Vec<_>>(), "seed {seed}");
        assert_eq!(site.metric("culvert_gate_datagrams_total{step=\"mac\"}"), 2000);
        assert_eq!(DecoyDirection::ALL.map(|direction| site.went_on(direction)), [arrived, 0]);
        // A burst of 1,000 and 400 in each second, of the one network 50 and 20.
        let opened = site.metric("culvert_decoy_flows_opened_total");
        assert!((256..=1000 + 400).contains(&opened), "seed {seed}: {opened}");
        assert!(site.dropped("source_flows") + site.dropped("source_rate") >= 2 * 400 - 100, "seed {seed}");
        let peers = site.pair.assert_balanced();
        assert!(peers.iter().all(|peer| peer.connected() && peer.more.lanes.lost_packets == 0));
        assert_eq!(peers.iter().map(|peer| peer.downlink.account.dropped_total()).sum::<u64>(), 0);
        site.pair.world.run(Duration::from_secs(61));
        assert_eq!(site.sizes().0, 0, "nothing is left of it");
    }
}
