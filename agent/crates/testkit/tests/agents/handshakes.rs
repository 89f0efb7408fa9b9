//! Handshakes without a knock, under load, halfway when something changes, and over IPv6.

use std::{
    net::{IpAddr, Ipv6Addr, SocketAddr},
    time::Duration,
};

use base::clock::Clock;
use gate::identity::Identity;
use rand::{SeedableRng, rngs::StdRng};
use wire::messages::CloseReason;

use crate::{
    EXIT, INGRESS, Pair,
    flood::{GateFlood, ROGUE, dial},
    gate::{LISTEN, STRANGER, ended, foreign_initial, knocking, long, sent_by, stranger},
    harness::{Tapped, World},
    malicious::{MaliciousPeer, address},
    numbered,
};

/// The exit lets any QUIC client begin a handshake.
const OFF: &str = "[access]\nknock = \"off\"";

/// Unfinished handshakes from which on clients without a knock must prove their address.
const LOADED: u16 = 32;

const ESTABLISHED: &str = "culvert_handshakes_total{outcome=\"established\"}";

fn is_retry(datagram: &Tapped) -> bool {
    datagram.payload[0] & 0xf0 == 0xf0
}

/// A client's first Initial, in the name of `from`.
fn first_of(from: SocketAddr, to: SocketAddr, seed: u8) -> Tapped {
    Tapped { from, to, tos: 0, payload: foreign_initial(seed) }
}

/// So many strangers begin a handshake each and leave it there; what the exit sent them.
fn begin(pair: &mut Pair, strangers: std::ops::Range<u16>) -> Vec<Tapped> {
    pair.world.tapped();
    for number in strangers {
        let initial = first_of(stranger(number), LISTEN, u8::try_from(number).unwrap());
        pair.world.send_as(&initial);
    }
    pair.world.run(Duration::from_millis(20));
    pair.world.tapped().into_iter().filter(|sent| sent.to.ip() == STRANGER).collect()
}

/// Handshakes that the exit has begun.
fn accepted(pair: &mut Pair) -> u64 {
    pair.world.metric(pair.exit, "culvert_handshakes_total{outcome=\"accepted\"}")
}

/// A client that does not knock, and has the flood's allowed key.
fn unannounced(flood: &mut GateFlood, place: u16) -> MaliciousPeer {
    let keys = (&flood.identity, flood.pair.exit_key.public_key().0);
    let addresses = (address(ROGUE, place), LISTEN);
    MaliciousPeer::dial_unannounced(&mut flood.host, addresses, keys, &flood.pair.world.clock)
}

/// Lets a malicious peer take part beside the flood's own.
fn play(flood: &mut GateFlood, malicious: &mut MaliciousPeer, milliseconds: u64) {
    for _ in 0..milliseconds {
        malicious.poll(flood.pair.world.clock.now());
        flood.run(1);
    }
    malicious.poll(flood.pair.world.clock.now());
}

#[test]
fn a_client_without_a_knock_connects_where_none_is_required() {
    // Those that knock connect too: the flood's malicious peer and its innocent.
    let mut flood = GateFlood::new(700, OFF);
    let mut plain = unannounced(&mut flood, 1);
    play(&mut flood, &mut plain, 30);
    assert!(plain.connected && plain.lost.is_none());
    plain.say_unproven(None);
    play(&mut flood, &mut plain, 30);
    assert!(!plain.messages.is_empty(), "the exit's hello");
    assert!(flood.pair.world.peers(flood.pair.exit)[1].connected());
    flood.assert_innocent_is_unharmed();
}

#[test]
fn a_client_without_a_knock_is_refused_where_one_is_required() {
    let mut flood = GateFlood::new(701, "");
    let mut plain = unannounced(&mut flood, 1);
    flood.pair.world.tapped();
    play(&mut flood, &mut plain, 3000);
    let local = address(ROGUE, 1);
    assert!(flood.pair.world.tapped().iter().all(|sent| sent.to != local));
    assert!(!plain.connected);
    flood.assert_innocent_is_unharmed();
}

#[test]
fn a_key_that_is_not_allowed_is_refused_without_knocks_too() {
    let mut flood = GateFlood::new(702, OFF);
    flood.identity = Identity::generate().unwrap();
    let mut plain = unannounced(&mut flood, 1);
    play(&mut flood, &mut plain, 100);
    plain.say_unproven(None);
    play(&mut flood, &mut plain, 100);
    assert!(plain.lost.is_some() && plain.messages.is_empty());
    assert_eq!(flood.metric("culvert_handshakes_total{outcome=\"refused_key\"}"), 1);
    flood.assert_innocent_is_unharmed();
}

#[test]
fn under_load_clients_without_a_knock_prove_their_address_first() {
    let mut flood = GateFlood::new(710, OFF);
    // The flood's own has not said hello: it is under way still.
    let answers = begin(&mut flood.pair, 1..LOADED);
    for number in 1..LOADED {
        assert!(answers.iter().any(|sent| sent.to == stranger(number)), "stranger {number} is answered");
    }
    assert!(!answers.iter().any(is_retry), "below the load nobody is asked");
    let before = accepted(&mut flood.pair);

    // One that leaves it there gets the Retry and nothing else, and costs no handshake.
    let asked = begin(&mut flood.pair, LOADED..LOADED + 1);
    assert!(asked.len() == 1 && is_retry(&asked[0]), "{asked:?}");
    assert!(asked[0].payload.len() < 400, "less than what it answers");
    assert_eq!(accepted(&mut flood.pair), before);

    // Those that answer it come through, with a knock and without.
    let mut plain = unannounced(&mut flood, 1);
    flood.pair.world.tapped();
    play(&mut flood, &mut plain, 50);
    assert!(plain.connected && plain.lost.is_none());
    let mut knocking = dial(&flood.pair, &mut flood.host, &flood.identity, 2, None);
    play(&mut flood, &mut knocking, 50);
    assert!(knocking.connected && knocking.lost.is_none());
    let tapped = flood.pair.world.tapped();
    for place in [1, 2] {
        let first = sent_by(&tapped, EXIT).into_iter().find(|sent| sent.to == address(ROGUE, place));
        assert!(is_retry(first.unwrap()));
    }
    flood.assert_innocent_is_unharmed();
}

#[test]
fn without_knocks_and_under_load_nothing_but_initials_is_answered() {
    let mut pair = Pair::connected(711, "", OFF);
    let mut rng = StdRng::seed_from_u64(711);
    for loaded in [false, true] {
        if loaded {
            begin(&mut pair, 100..100 + LOADED);
            // Until the exit has given up repeating what these do not answer.
            pair.world.run(Duration::from_secs(8));
        }
        let from = SocketAddr::new(IpAddr::from([203, 0, 113, 77]), 1);
        let mut silent = |payload: &[u8], what: &str| {
            pair.world.tapped();
            pair.world.send_as(&Tapped { from, to: LISTEN, tos: 0, payload: payload.to_vec() });
            pair.world.run(Duration::from_millis(50));
            let tapped = pair.world.tapped();
            let answers = tapped.iter().filter(|sent| sent.to == from).count();
            assert_eq!(answers, 0, "{what}, loaded: {loaded}");
        };
        for version in [0, 0x1a2a_3a4a, 2] {
            silent(&long(&mut rng, 0xc0, version, 8, 1200), "version negotiation");
        }
        for (first, what) in [(0xd0, "0-RTT"), (0xe0, "Handshake"), (0xf0, "Retry")] {
            silent(&long(&mut rng, first, 1, 8, 1200), what);
        }
        silent(&long(&mut rng, 0xc0, 1, 8, 1199), "an Initial that is too short");
        if !loaded {
            // Whether it opens is looked at once its sender has proved its address.
            silent(&long(&mut rng, 0xc0, 1, 8, 1200), "an Initial that does not open");
        }
        for len in [21, 43, 1200] {
            let mut short = long(&mut rng, 0xc0, 1, 8, 1200);
            short.truncate(len);
            short[0] = 0x41;
            silent(&short, "a short header");
        }
    }
}

#[test]
fn the_ceiling_of_unfinished_handshakes_holds_and_gives_way_again() {
    let mut flood = GateFlood::with_lane(720, &format!("{OFF}\n[limits]\nhandshakes = 5"));
    for round in 0..3 {
        let before = accepted(&mut flood.pair);
        // Half of them for whoever comes, the others for those that have proved their address.
        let first = 1 + 20 * round;
        let answers = begin(&mut flood.pair, first..first + 15);
        assert_eq!(accepted(&mut flood.pair) - before, 3, "round {round}");
        let asked = answers.iter().filter(|sent| is_retry(sent)).count();
        assert_eq!(asked, 12, "round {round}");
        let mut rogues = [1, 2, 3].map(|place| unannounced(&mut flood, 5 * round + place));
        for malicious in &mut rogues {
            play(&mut flood, malicious, 50);
        }
        // They are under way until they say hello, and the third finds no room.
        assert_eq!(rogues.map(|malicious| malicious.connected), [true, true, false], "round {round}");
        assert_eq!(accepted(&mut flood.pair) - before, 5, "round {round}");
        // Longer than that may take.
        flood.run(11_000);
    }
    assert_eq!(
        flood.metric("culvert_connections"),
        1,
        "the innocent's; the flood's own was idle for too long"
    );
    flood.assert_innocent_is_unharmed();
}

#[test]
fn knocks_whose_handshakes_are_never_finished_keep_nobody_out() {
    let mut flood = GateFlood::new(721, "[limits]\nhandshakes = 20");
    for round in 0..3 {
        // The exit's answers are lost, so that these stay halfway.
        flood.pair.world.weather.borrow_mut().block = Box::new(|_, to| to.ip() == ROGUE);
        for number in 0..5 {
            let mut halfway =
                dial(&flood.pair, &mut flood.host, &flood.identity, 10 * round + number + 1, None);
            play(&mut flood, &mut halfway, 10);
        }
        let begun = 1 + 1 + 6 * u64::from(round) + 5;
        assert_eq!(
            accepted(&mut flood.pair),
            begun,
            "the pair's, the flood's, those that came through, five"
        );
        assert!(flood.metric("culvert_connections") <= 1 + 4 + 1, "four of one key, and one that drains");
        flood.run(11_000);
        flood.pair.world.weather.borrow_mut().block = Box::new(|_, _| false);
        let mut late = dial(&flood.pair, &mut flood.host, &flood.identity, 10 * round + 9, None);
        play(&mut flood, &mut late, 50);
        assert!(late.connected, "round {round}");
    }
    flood.assert_innocent_is_unharmed();
}

#[test]
fn a_client_whose_key_is_removed_between_its_knock_and_its_certificate_is_refused() {
    for mode in ["", OFF] {
        let mut flood = GateFlood::new(730, mode);
        let exit = flood.pair.exit;
        let established = flood.metric(ESTABLISHED);
        let mut halfway = dial(&flood.pair, &mut flood.host, &flood.identity, 1, None);
        // Its Initial has arrived, its certificate has not left.
        play(&mut flood, &mut halfway, 7);
        assert!(!halfway.connected);
        assert_eq!(accepted(&mut flood.pair), 3);
        flood.pair.world.agent(exit).registry.remove("rogue").unwrap();
        halfway.say(&MaliciousPeer::hello());
        play(&mut flood, &mut halfway, 200);
        assert!(halfway.lost.is_some() && halfway.messages.is_empty());
        assert_eq!(flood.metric(ESTABLISHED), established);
        assert!(!flood.pair.world.peers(exit)[1].connected());
        assert_eq!(flood.metric("culvert_handshakes_total{outcome=\"refused_key\"}"), 1);
        assert_eq!(flood.malicious.closed(), Some(CloseReason::KeyRemoved));
        flood.assert_innocent_is_unharmed();
    }
}

#[test]
fn a_first_initial_that_arrives_twice_begins_one_handshake() {
    for workers in [1, 2, 3] {
        let (mut pair, genuine) = knocking(740 + u64::from(workers), (1, workers));
        pair.world.weather.borrow_mut().block = Box::new(|_, _| false);
        pair.world.tapped();
        // From elsewhere too: whoever saw it under way and is faster than its second copy.
        for from in [genuine.from, stranger(1), genuine.from] {
            pair.world.send_as(&Tapped { from, ..genuine.clone() });
        }
        pair.world.run(Duration::from_millis(100));
        let counts = [accepted(&mut pair), ended(&mut pair, "admitted"), ended(&mut pair, "used")];
        assert_eq!(counts, [1, 1, 1]);
        assert!(pair.world.tapped().iter().all(|sent| sent.to.ip() != STRANGER));
        pair.wait_for_lanes(1);
        assert_eq!(accepted(&mut pair), 1, "that one became the session");
    }
}

/// What may be spent on clients without a proven address is spent now, and is there again soon.
fn exhaust(pair: &mut Pair) {
    let now = pair.world.clock.now();
    for worker in &mut pair.world.agent(pair.exit).workers {
        worker.exhaust_gate_budget(now);
    }
}

#[test]
fn a_first_initial_that_is_reordered_with_a_retry_begins_one_handshake() {
    // When the copy arrives: with the first one, while the Retry is under way, or behind the Retry's answer.
    for (seed, late) in (750..).zip([0, 4, 8, 9, 10, 11, 12, 30]) {
        let (mut pair, genuine) = knocking(seed, (1, 2));
        pair.world.weather.borrow_mut().block = Box::new(|_, _| false);
        let until = pair.world.clock.now() + Duration::from_millis(5);
        exhaust(&mut pair);
        pair.world.send_as(&genuine);
        // At the moment of its arrival there is nothing to be spent.
        while pair.world.clock.now() < until {
            pair.world.run(Duration::from_micros(500));
            exhaust(&mut pair);
        }
        pair.world.run(Duration::from_millis(1));
        assert_eq!(ended(&mut pair, "retry"), 1, "{late} ms");
        pair.world.run(Duration::from_millis(late));
        for from in [genuine.from, stranger(1), genuine.from] {
            pair.world.send_as(&Tapped { from, ..genuine.clone() });
        }
        pair.world.run(Duration::from_millis(100));
        assert_eq!(accepted(&mut pair), 1, "{late} ms");
        // Whichever it was, the client comes through: if need be, with its next knock.
        let mut client = pair.client(9000);
        let mut answers = 0;
        for number in 0..300 {
            client.send(INGRESS, &numbered(number));
            pair.run_served(Duration::from_millis(10));
            answers += client.receive().len();
        }
        assert!(answers > 50, "{late} ms: {answers} answers");
        assert_eq!(pair.world.metric(pair.exit, ESTABLISHED), 1, "{late} ms");
        // One that the copy began without its client is given up.
        pair.run_served(Duration::from_secs(10));
        assert_eq!(pair.world.metric(pair.exit, "culvert_connections"), 1, "{late} ms");
    }
}

/// An entry and an exit that reach each other over IPv6.
fn over_ipv6(seed: u64, access: &str) -> (World, [usize; 2], [SocketAddr; 2]) {
    let host = |last| IpAddr::V6(Ipv6Addr::new(0x2001, 0xdb8, last, 0, 0, 0, 0, 1));
    let (here, there) = (host(1), host(2));
    let listen = SocketAddr::new(there, 4433);
    let [entry_key, exit_key] = [(); 2].map(|()| Identity::generate().unwrap());
    println!("seed {seed}");
    let mut world = World::new(seed);
    world.workers = 2;
    let exit = format!(
        "identity.key_file = \"none\"\ntransport.listen = [\"{listen}\"]\n[[peer]]\nname = \"entry\"\n\
         public_key = \"{}\"\n{access}",
        entry_key.public_key()
    );
    let exit = world.start(&exit, &exit_key, &[there], 1);
    let entry = format!(
        "identity.key_file = \"none\"\n[[peer]]\nname = \"exit\"\npublic_key = \"{}\"\nendpoints = [\"{listen}\"]",
        exit_key.public_key()
    );
    world.tapped();
    let entry = world.start(&entry, &entry_key, &[here], 2);
    (world, [entry, exit], [SocketAddr::new(here, 0), listen])
}

#[test]
fn a_retry_reaches_clients_over_ipv6() {
    for access in ["", OFF] {
        let (mut world, [entry, exit], [here, listen]) = over_ipv6(760, access);
        if access.is_empty() {
            let later = world.clock.now() + Duration::from_secs(60);
            for worker in &mut world.agent(exit).workers {
                worker.exhaust_gate_budget(later);
            }
        } else {
            let host = Ipv6Addr::new(0x2001, 0xdb8, 3, 0, 0, 0, 0, 1);
            // Enough for each of two workers.
            for number in 1..=4 * LOADED {
                let from = SocketAddr::new(host.into(), number);
                world.send_as(&first_of(from, listen, u8::try_from(number).unwrap()));
            }
        }
        world.run_till(Duration::from_secs(5), |world| {
            world.peer(entry).lanes_up == 2 && world.peer(exit).lanes_up == 2
        });
        let tapped = world.tapped();
        let retries: Vec<_> =
            tapped.iter().filter(|sent| sent.to.ip() == here.ip() && is_retry(sent)).collect();
        // Without knocks, QUIC answers each datagram that begins a connection.
        assert_eq!(retries.len(), if access.is_empty() { 1 } else { 2 }, "{access}");
    }
}

#[test]
fn attempts_that_a_faster_one_makes_needless_are_no_refusals() {
    for seed in 3200..3212 {
        let mut pair = Pair::with_workers(seed, (2, 2), "", "");
        pair.wait_for_lanes(2);
        let mut client = pair.client(1000);
        // Nothing passes for so long that several attempts are under way, of which the exit knows nothing.
        pair.world.weather.borrow_mut().block = Box::new(|from, to| from.ip() == EXIT || to.ip() == EXIT);
        for number in 0..40 {
            client.send(INGRESS, &numbered(number));
            pair.world.run(Duration::from_millis(100));
        }
        pair.world.weather.borrow_mut().block = Box::new(|_, _| false);
        pair.world.run(Duration::from_secs(3));
        assert!(pair.world.peer(pair.entry).connected(), "seed {seed}");
        assert_eq!(ended(&mut pair, "hello"), 0, "seed {seed}");
        pair.assert_balanced();
    }
}
