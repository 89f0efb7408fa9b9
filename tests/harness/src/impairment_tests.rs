use super::*;

#[test]
fn the_shares_are_what_was_asked_for() {
    let now = clock::now();
    let delay = Duration::from_millis(20);
    let detour = Duration::from_millis(5);
    let path = Path { delay, loss: 0.01, doubled: 0.02, detoured: 0.1, detour, damaged: 0.03, largest: 1400 };
    let mut road = Road::new(path);
    let arrivals: Vec<_> = (0..100_000).map(|_| road.decide(Way::Back, Kind::Other, 1400, now)).collect();
    let due: Vec<_> = arrivals.iter().flat_map(|arrivals| &arrivals.due).collect();
    let fates = road.fates[Way::Back as usize][Kind::Other as usize];
    let Fates { passed, lost, doubled, detoured, damaged, .. } = fates;
    assert_eq!((passed + lost, fates.came()), (100_000, 100_000));
    assert_eq!(due.len() as u64, passed + doubled);
    let seed = road.random.seed;
    assert!((900..1100).contains(&lost), "{lost}, seed {seed}");
    assert!((1800..2200).contains(&doubled), "{doubled}, seed {seed}");
    assert!((9500..10_500).contains(&detoured), "{detoured}, seed {seed}");
    assert!((2700..3300).contains(&damaged), "{damaged}, seed {seed}");
    let damages: Vec<_> = arrivals.iter().filter_map(|arrivals| arrivals.damage).collect();
    assert_eq!(damages.len() as u64, damaged);
    assert!(damages.iter().all(|(byte, bit)| *byte < 1400 && *bit < 8));
    assert!(due.iter().all(|due| [now + delay, now + delay + detour].contains(due)));
    assert!(road.decide(Way::Back, Kind::Other, 1401, now).due.is_empty());
    assert_eq!(road.fates[Way::Back as usize][Kind::Other as usize].too_large, 1);
}

#[test]
fn a_nat_that_has_forgotten_a_client_gives_it_another_port() {
    let address = Impairment::reserve(std::net::Ipv4Addr::LOCALHOST.into());
    let server = socket(Impairment::reserve(address.ip()));
    let road = Impairment::new(&Place::Host, address, server.local_addr().expect("bound"), Path::default());
    let clients = [(); 2].map(|()| socket(Impairment::reserve(address.ip())));
    let mut buffer = [0; 2];
    let mut pass = |client: usize| {
        clients[client].send_to(&[7], address).expect("loopback takes it");
        clock::until("the datagram", clock::PATIENCE, || server.recv_from(&mut buffer)).1
    };
    let before = [pass(0), pass(1)];
    road.forget(|place| place == 1);
    assert_eq!(road.clients(), 1);
    server.send_to(&[9], before[1]).expect("loopback takes it");
    let after = [pass(0), pass(1)];
    assert_eq!(before[0], after[0]);
    assert_ne!(before[1], after[1]);
    server.send_to(&[8], after[1]).expect("loopback takes it");
    clock::until("the answer", clock::PATIENCE, || clients[1].recv(&mut buffer));
    assert_eq!(buffer[0], 8, "what went to the port of before is lost");
    clock::until("what was lost is counted", clock::PATIENCE, || {
        match road.fates_of(Way::Back, Kind::Other).lost {
            1 => Ok(()),
            lost => Err(lost),
        }
    });
}

#[test]
fn a_path_without_faults_keeps_all_and_their_order() {
    let address = Impairment::reserve(std::net::Ipv4Addr::LOCALHOST.into());
    let server = socket(Impairment::reserve(address.ip()));
    let path = Path { delay: Duration::from_millis(10), ..Path::default() };
    let road = Impairment::new(&Place::Host, address, server.local_addr().expect("bound"), path);
    let client = socket(Impairment::reserve(address.ip()));
    for number in 0..200_u8 {
        client.send_to(&[number], address).expect("loopback takes it");
    }
    let mut byte = [0];
    for number in 0..200_u8 {
        clock::until("the datagram", clock::PATIENCE, || server.recv(&mut byte));
        assert_eq!(byte, [number]);
    }
    assert_eq!(road.fates(), Fates { passed: 200, ..Fates::default() });
}
