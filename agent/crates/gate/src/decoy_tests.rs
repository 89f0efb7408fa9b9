//! The decoy's flows: who gets one, who loses it, how much goes back.

use std::net::{Ipv4Addr, Ipv6Addr};

use base::{
    clock::{Clock, ManualClock},
    counts::Counts,
};

use super::*;

/// A limit that no test but those of eviction meets.
const PLENTY: usize = 100_000;

fn start() -> Instant {
    ManualClock::default().now()
}

/// An unauthenticated sender in the network 10.x.y.0/24.
fn sender(network: u16, host: u8, port: u16) -> Sender {
    let [x, y] = network.to_be_bytes();
    Sender { source: SocketAddr::new(Ipv4Addr::new(10, x, y, host).into(), port), port: 0, local: None }
}

/// A packet with a long header.
fn long(version: u32, destination: &[u8], source: &[u8], len: usize) -> Vec<u8> {
    let mut packet = vec![0xc3];
    packet.extend(version.to_be_bytes());
    for cid in [destination, source] {
        packet.push(u8::try_from(cid.len()).unwrap());
        packet.extend(cid);
    }
    packet.resize(len.max(packet.len()), 0);
    packet
}

fn short(destination: &[u8], len: usize) -> Vec<u8> {
    let mut packet = vec![0x43];
    packet.extend(destination);
    packet.resize(len.max(packet.len()), 0);
    packet
}

fn answers(flows: &mut DecoyFlows, id: DecoyId, len: usize) -> bool {
    flows.answer(id, &vec![0x43; len]).is_ok()
}

#[test]
fn a_sender_is_its_address_and_ours() {
    let (now, mut flows) = (start(), DecoyFlows::new(PLENTY, start()));
    let one = sender(1, 1, 1000);
    let local = Some(Ipv4Addr::new(192, 0, 2, 1).into());
    let others = [sender(1, 1, 1001), Sender { port: 1, ..one }, Sender { local, ..one }];
    let first = flows.admit(one, b"x", now).unwrap();
    assert!(first.new && first.evicted.is_none());
    for other in others {
        let admitted = flows.admit(other, b"x", now).unwrap();
        assert!(admitted.new && admitted.id != first.id);
    }
    assert_eq!(flows.admit(one, b"x", now), Ok(Admitted { new: false, ..first }));
    assert_eq!(flows.len(), 4);
}

#[test]
fn three_times_what_came_goes_back_until_the_sender_has_answered() {
    let (now, mut flows) = (start(), DecoyFlows::new(PLENTY, start()));
    let one = sender(1, 1, 1000);
    let id = flows.admit(one, &long(1, b"original", b"client", 1200), now).unwrap().id;
    assert_eq!(flows.answer(id, &long(1, b"client", b"the-decoys", 1200)), Ok(one));
    assert!(answers(&mut flows, id, 1200) && answers(&mut flows, id, 1199));
    assert_eq!(flows.answer(id, &[0; 2]), Err(DecoyDrop::Amplification));
    assert!(answers(&mut flows, id, 1), "what still fits goes back");
    flows.admit(one, &[0; 10], now).unwrap();
    assert!(!answers(&mut flows, id, 31) && answers(&mut flows, id, 30));
    // Neither what the client chose nor a part of the decoy's connection ID is an answer.
    for packet in [
        long(1, b"original", b"client", 20),
        long(1, b"the-decoy", b"client", 0),
        long(1, b"the-decoyz", b"client", 0),
        long(1, b"the-decoys+", b"client", 0),
        short(b"client", 20),
        b"\x43the-dec".to_vec(),
        Vec::new(),
    ] {
        flows.admit(one, &packet, now).unwrap();
        assert!(!answers(&mut flows, id, 1200), "{packet:?}");
    }
    flows.admit(one, &short(b"the-decoys", 30), now).unwrap();
    assert!((0..100).all(|_| answers(&mut flows, id, 65_000)));
}

#[test]
fn a_long_header_to_the_decoys_connection_id_is_an_answer_too() {
    for (retry, initial) in [(&b"retry-id"[..], &b"initial!"[..]), (b"four", b"initial!")] {
        let (now, mut flows) = (start(), DecoyFlows::new(PLENTY, start()));
        let one = sender(1, 1, 1000);
        let id = flows.admit(one, &long(1, b"original", b"", 1200), now).unwrap().id;
        for source in [retry, initial, initial] {
            assert!(flows.answer(id, &long(1, b"", source, 100)).is_ok());
        }
        // The last two are remembered.
        flows.admit(one, &long(1, retry, b"", 0), now).unwrap();
        assert!(answers(&mut flows, id, 60_000));
    }
}

#[test]
fn what_a_forger_could_know_is_no_answer() {
    for (version, chosen) in [(0, &b"original"[..]), (1, b""), (1, b"abc"), (1, &[7; 21])] {
        let (now, mut flows) = (start(), DecoyFlows::new(PLENTY, start()));
        let one = sender(1, 1, 1000);
        let id = flows.admit(one, &long(1, b"original", b"client", 1200), now).unwrap().id;
        assert!(flows.answer(id, &long(version, b"client", chosen, 100)).is_ok());
        flows.admit(one, &long(1, chosen, b"client", 0), now).unwrap();
        flows.admit(one, &short(chosen, 0), now).unwrap();
        assert!(!answers(&mut flows, id, 60_000), "{chosen:?}");
    }
    // A short header names its destination alone, whatever follows.
    let mut packet = long(1, b"client", b"the-decoys", 0);
    for (first, chosen) in [(0x80, true), (0xff, true), (0x00, false), (0x7f, false)] {
        packet[0] = first;
        assert_eq!(chosen_cid(&packet).is_some(), chosen, "{first:#x}");
    }
    // What is cut off says nothing.
    let complete = long(1, b"client", b"the-decoys", 0);
    for len in 0..complete.len() {
        assert_eq!(chosen_cid(&complete[..len]), None);
    }
}

#[test]
fn another_port_of_an_address_that_answered_is_not_limited() {
    let (now, mut flows) = (start(), DecoyFlows::new(PLENTY, start()));
    let one = sender(1, 1, 1000);
    let id = flows.admit(one, &[0; 1200], now).unwrap().id;
    assert!(flows.answer(id, &long(1, b"", b"the-decoys", 100)).is_ok());
    let before = flows.admit(sender(1, 1, 1001), &[0; 10], now).unwrap().id;
    flows.admit(one, &short(b"the-decoys", 20), now).unwrap();
    let moved = flows.admit(sender(1, 1, 1002), &short(b"another", 10), now).unwrap().id;
    let neighbour = flows.admit(sender(1, 2, 1000), &[0; 10], now).unwrap().id;
    assert!(!answers(&mut flows, before, 1000), "it came before");
    assert!(answers(&mut flows, moved, 1000));
    assert!(!answers(&mut flows, neighbour, 1000), "another address");
    flows.remove(id);
    let late = flows.admit(sender(1, 1, 1003), &[0; 10], now).unwrap().id;
    assert!(!answers(&mut flows, late, 1000), "nothing is remembered of a flow that has ended");
}

#[test]
fn a_full_table_forgets_who_never_answered_and_then_who_was_silent_longest() {
    let (now, mut flows) = (start(), DecoyFlows::new(4, start()));
    let at = |millis| now + Duration::from_millis(millis);
    let senders: Vec<Sender> = (0..4).map(|network| sender(network, 1, 1000)).collect();
    let ids: Vec<DecoyId> =
        senders.iter().zip(0..).map(|(one, time)| flows.admit(*one, b"x", at(time)).unwrap().id).collect();
    // 0 answers; 1 is heard again, so 2 was silent longest.
    assert!(flows.answer(ids[0], &long(1, b"", b"cid!", 0)).is_err(), "one byte came");
    flows.admit(senders[0], &[0; 100], at(5)).unwrap();
    assert!(flows.answer(ids[0], &long(1, b"", b"cid!", 0)).is_ok());
    flows.admit(senders[0], &short(b"cid!", 0), at(6)).unwrap();
    flows.admit(senders[1], b"x", at(7)).unwrap();
    let evicted = |flows: &mut DecoyFlows, network, time| {
        let admitted = flows.admit(sender(network, 1, 1000), b"x", at(time)).unwrap();
        assert!(admitted.new);
        admitted.evicted
    };
    assert_eq!(evicted(&mut flows, 10, 20), Some(ids[2]));
    assert_eq!(evicted(&mut flows, 11, 21), Some(ids[3]));
    assert_eq!(evicted(&mut flows, 12, 22), Some(ids[1]));
    assert_eq!(flows.len(), 4);
    assert_eq!(flows.by_sender.get(&senders[0]), Some(&ids[0]), "it answered");
    // With answered ones alone, the one that was silent longest goes.
    let mut flows = DecoyFlows::new(2, now);
    for (network, time) in [(0, 0), (1, 1), (0, 2)] {
        let one = sender(network, 1, 1000);
        let id = flows.admit(one, &[0; 100], at(time)).unwrap().id;
        assert!(flows.answer(id, &long(1, b"", b"cid!", 0)).is_ok());
        flows.admit(one, &short(b"cid!", 0), at(time)).unwrap();
    }
    assert_eq!(evicted(&mut flows, 2, 11), Some(DecoyId(1)));
}

#[test]
fn new_flows_of_a_prefix_are_limited_and_others_are_not_affected() {
    let now = start();
    // What two prefixes share by chance is tried with other keys.
    let neighbours = [IpAddr::from([10, 1, 2, 200]), "2001:db8:1:2ff::9".parse().unwrap()];
    let others = [IpAddr::from([10, 1, 3, 1]), "2001:db8:1:300::1".parse().unwrap()];
    let firsts = [IpAddr::from([10, 1, 2, 1]), "2001:db8:1:200::1".parse().unwrap()];
    for ((first, neighbour), other) in firsts.into_iter().zip(neighbours).zip(others) {
        assert_eq!(prefix(first), prefix(neighbour));
        assert_ne!(prefix(first), prefix(other));
        let mut flows = DecoyFlows::new(PLENTY, now);
        let at = |ip, port| Sender { source: SocketAddr::new(ip, port), port: 0, local: None };
        for port in 0..50 {
            assert!(flows.admit(at(first, port), b"x", now).unwrap().new);
        }
        assert_eq!(flows.admit(at(first, 50), b"x", now), Err(DecoyDrop::SourceRate));
        assert_eq!(flows.admit(at(neighbour, 1), b"x", now), Err(DecoyDrop::SourceRate));
        assert!(!flows.admit(at(first, 7), b"x", now).unwrap().new, "known ones cost nothing");
        let unlike = flows.admit(at(other, 1), b"x", now);
        let limiter = |ip| flows.hasher.hash_one(prefix(ip)) as usize % LIMITERS;
        assert_eq!(unlike.is_ok(), limiter(first) != limiter(other));
        let later = now + Duration::from_millis(105);
        for port in 60..62 {
            assert!(flows.admit(at(first, port), b"x", later).is_ok(), "20 per second");
        }
        assert_eq!(flows.admit(at(first, 62), b"x", later), Err(DecoyDrop::SourceRate));
    }
    assert_ne!(prefix(IpAddr::V4(Ipv4Addr::UNSPECIFIED)), prefix(Ipv6Addr::UNSPECIFIED.into()));
}

#[test]
fn one_prefix_has_an_eighth_of_all_flows_and_others_find_room() {
    for (limit, most) in [(400, 50), (200, 25), (128, 16), (100, 16), (10, 10)] {
        let (mut now, mut flows) = (start(), DecoyFlows::new(limit, start()));
        for port in 0..3 * u16::try_from(most).unwrap() {
            // Slow enough for the rates, too fast for the idle time-out.
            now += Duration::from_millis(100);
            let admitted = flows.admit(sender(1, 1, port), b"x", now);
            let refused = usize::from(port) >= most && limit > most;
            assert_eq!(admitted.err(), refused.then_some(DecoyDrop::SourceFlows), "{limit}: {port}");
        }
        assert_eq!(flows.len(), most);
        if limit == most {
            continue;
        }
        assert!(!flows.admit(sender(1, 1, 0), b"x", now).unwrap().new, "known ones go on");
        assert_eq!(flows.admit(sender(1, 200, 0), b"x", now), Err(DecoyDrop::SourceFlows), "a neighbour");
        // Two prefixes may share a limiter by chance, so more than one other is tried.
        assert!((2..5).any(|network| flows.admit(sender(network, 1, 0), b"x", now).is_ok()));
        flows.remove(DecoyId(1));
        now += Duration::from_secs(1);
        assert!(flows.admit(sender(1, 1, 9000), b"x", now).unwrap().new, "one that ended makes room");
    }
}

#[test]
fn new_flows_of_all_senders_together_are_limited() {
    let now = start();
    let mut flows = DecoyFlows::new(PLENTY, now);
    let mut refused = Counts::<DecoyDrop>::default();
    for network in 0..3000 {
        if let Err(reason) = flows.admit(sender(network, 1, 1), b"x", now) {
            refused[reason] += 1;
        }
    }
    assert_eq!((flows.len(), refused[DecoyDrop::TotalRate]), (1000, 2000));
    let later = now + Duration::from_secs(1);
    let opened = (3000..6000).filter(|network| flows.admit(sender(*network, 1, 1), b"x", later).is_ok());
    assert_eq!(opened.count(), 400);
}

#[test]
fn who_is_silent_for_a_minute_is_forgotten() {
    let (now, mut flows) = (start(), DecoyFlows::new(PLENTY, start()));
    let at = |secs| now + Duration::from_secs(secs);
    assert_eq!((flows.deadline(), flows.expire(at(1000))), (None, None));
    let one = flows.admit(sender(1, 1, 1), &[0; 100], at(0)).unwrap().id;
    let two = flows.admit(sender(2, 1, 1), b"x", at(10)).unwrap().id;
    // One is heard again and answers, which the other list must not hide.
    assert!(flows.answer(one, &long(1, b"", b"cid!", 0)).is_ok());
    flows.admit(sender(1, 1, 1), &short(b"cid!", 0), at(5)).unwrap();
    assert_eq!((flows.deadline(), flows.is_empty()), (Some(at(65)), false));
    assert_eq!(flows.expire(at(64)), None);
    // What the decoy sends keeps nobody alive.
    assert!(answers(&mut flows, one, 1000));
    assert_eq!(flows.expire(at(65)), Some(one));
    assert_eq!((flows.expire(at(65)), flows.deadline()), (None, Some(at(70))));
    assert_eq!((flows.expire(at(70)), flows.len()), (Some(two), 0));
    assert!(flows.is_empty());
    assert_eq!(flows.answer(two, b"x"), Err(DecoyDrop::ToSender));
    flows.remove(two);
}

#[test]
fn lists_and_indices_agree_whatever_happens() {
    use rand::{RngExt, SeedableRng, rngs::StdRng};
    for seed in 0..20 {
        println!("seed {seed}");
        let mut rng = StdRng::seed_from_u64(seed);
        let (mut now, mut flows) = (start(), DecoyFlows::new(16, start()));
        for _ in 0..2000 {
            now += Duration::from_millis(rng.random_range(0..3000));
            let one = sender(rng.random_range(0..40), 1, rng.random_range(0..2));
            let datagram = if rng.random() { short(b"cid!", 40) } else { long(1, b"dest", b"src!", 40) };
            if let Ok(admitted) = flows.admit(one, &datagram, now)
                && rng.random()
            {
                let (id, packet) = (admitted.id, long(1, b"", b"cid!", 0));
                assert!(flows.answer(id, &packet).is_ok_and(|sender| sender == one));
            }
            if rng.random_range(0..10) == 0 {
                flows.remove(DecoyId(rng.random_range(0..16)));
            }
            while flows.expire(now).is_some() {}
            check(&flows);
        }
    }
}

fn check(flows: &DecoyFlows) {
    let mut seen = 0;
    for (index, list) in flows.by_silence.iter().enumerate() {
        for (last_active, id) in list {
            let flow = &flows.flows[id.0 as usize];
            assert_eq!((flow.last_active, usize::from(flow.answered)), (*last_active, index));
            assert_eq!(flows.by_sender.get(&flow.sender), Some(id));
            seen += 1;
        }
    }
    assert_eq!((seen, flows.by_sender.len()), (flows.len(), flows.len()));
    assert!(flows.len() <= flows.limit);
    let answered = flows.flows.iter().filter(|(_, flow)| flow.answered).count();
    assert_eq!(flows.answered_hosts.values().sum::<usize>(), answered);
    assert_eq!(flows.by_prefix.values().sum::<usize>(), flows.len());
    assert!(flows.by_prefix.values().all(|flows| *flows > 0));
}
