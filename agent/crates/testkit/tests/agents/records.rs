//! `[records]`: what is noted of UDP flows and TCP forwards when they end, and that its sums are those of the counters.

use std::time::Duration;

use base::clock::Clock;
use dataplane::records::{Carried, Ended, RecordKind};
use ip::model::Recipe;

use crate::{
    CLIENT, INGRESS, Pair, UPSTREAM,
    harness::{Recording, Udp},
    numbered,
    tunnel::{ENTRY_TUN, EXIT_TUN, Given, How, Tunnel},
};

const MS: Duration = Duration::from_millis(1);

/// What all records have carried together, to the peer and from it.
fn sums(records: &[Ended]) -> [Carried; 2] {
    let mut sums = [Carried::default(); 2];
    for ended in records {
        for (sum, carried) in sums.iter_mut().zip([ended.uplink, ended.downlink]) {
            sum.add(carried.packets, carried.bytes);
        }
    }
    sums
}

fn recorded(pair: &Pair, most: usize) -> [Recording; 2] {
    [pair.entry, pair.exit].map(|place| pair.world.record(place, most))
}

/// Has `clients` send as many datagrams as their number among them says, and lets their flows fall silent.
fn converse(pair: &mut Pair, clients: u16) {
    let mut clients: Vec<Udp> = (0..clients).map(|port| pair.client(1000 + port)).collect();
    for round in 0..clients.len() {
        for client in &mut clients[round..] {
            client.send(INGRESS, &numbered(round as u32));
        }
        pair.run_served(3 * MS);
    }
    pair.run_served(200 * MS);
    pair.world.run(Duration::from_secs(12));
}

#[test]
fn each_flow_is_recorded_once_and_the_sums_are_those_of_the_counters() {
    for (seed, workers, extra) in [(970, (1, 1), ""), (971, (3, 2), ""), (972, (1, 1), "lanes = 0")] {
        println!("seed {seed}");
        let mut pair = Pair::with_workers(seed, workers, extra, "");
        pair.world.run(Duration::from_secs(2));
        let [entry, exit] = recorded(&pair, 1_000);
        let before = pair.world.clock.unix_time();
        converse(&mut pair, 20);
        let now = pair.world.clock.unix_time();
        let [at_entry, at_exit] = pair.assert_balanced();
        for (recording, peer) in [(entry, at_entry), (exit, at_exit)] {
            let records = recording.take();
            assert_eq!((records.len(), recording.counts.noted(), recording.counts.lost()), (20, 20, 0));
            let [uplink, downlink] = sums(&records);
            let up =
                Carried { packets: peer.uplink.account.received, bytes: peer.uplink.account.received_bytes };
            let down =
                Carried { packets: peer.downlink.account.delivered, bytes: peer.downlink.delivered_bytes };
            assert_eq!((uplink, downlink), (up, down));
            assert_eq!(uplink.packets, 210);
            for ended in &records {
                let Ended { kind, peer: _, service, opened_here, source, destination, span, reason, .. } =
                    ended;
                assert_eq!((*kind, &**service), (RecordKind::Udp, "echo"));
                assert!(["idle", "closed"].contains(reason), "{reason}");
                // The end is that of the last datagram, not of the silence after it.
                assert!(before <= span.began && span.began <= span.ended);
                assert!(span.ended + Duration::from_secs(9) <= now, "{span:?} {now:?}");
                let asked = if *opened_here { INGRESS } else { UPSTREAM };
                assert_eq!(*destination, Some(asked));
                assert_eq!(source.map(|source| source.ip()), opened_here.then_some(CLIENT));
            }
            assert!(records.iter().all(|ended| ended.opened_here == (&*ended.peer == "exit")));
        }
    }
}

#[test]
fn what_a_reload_ends_is_recorded_as_what_it_was() {
    for (seed, workers) in [(980, (1, 1)), (981, (2, 2))] {
        println!("seed {seed}");
        let mut pair = Pair::with_workers(seed, workers, "", "");
        pair.wait_for_lanes(1);
        let [_entry, exit] = recorded(&pair, 100);
        let mut client = pair.client(1000);
        client.send(INGRESS, &numbered(1));
        pair.run_served(100 * MS);
        let moved = "198.51.100.9:77";
        let toml = pair.exit_toml.replace(&UPSTREAM.to_string(), moved);
        assert_ne!(toml, pair.exit_toml);
        // A reload before, which changes nothing for the flow, does not make it forget.
        let (place, same) = (pair.exit, pair.exit_toml.clone());
        pair.world.reload(place, &same).unwrap();
        pair.world.reload(place, &toml).unwrap();
        pair.world.run(100 * MS);
        let records = exit.take();
        let [ended] = &records[..] else { panic!("{records:?}") };
        assert_eq!(
            (ended.destination, &*ended.service, ended.reason),
            (Some(UPSTREAM), "echo", "reconfigured")
        );
    }
}

#[test]
fn what_the_reload_of_a_forward_ends_is_recorded_as_what_it_was() {
    for (seed, workers) in [(982, (1, 1)), (983, (2, 2))] {
        println!("seed {seed}");
        let mut pair = Pair::with_workers(seed, workers, "", "");
        pair.wait_for_lanes(1);
        let [entry, _exit] = recorded(&pair, 100);
        let mut client = pair.client(1000);
        client.send(INGRESS, &numbered(1));
        pair.run_served(100 * MS);
        let port = INGRESS.port();
        let toml = pair.entry_toml.replace(&format!("\"0.0.0.0:{port}\""), "\"0.0.0.0:9999\"");
        assert_ne!(toml, pair.entry_toml);
        let place = pair.entry;
        pair.world.reload(place, &toml).unwrap();
        pair.world.run(100 * MS);
        let records = entry.take();
        let [ended] = &records[..] else { panic!("{records:?}") };
        assert_eq!(
            (ended.destination, &*ended.service, ended.reason),
            (Some(INGRESS), "echo", "reconfigured")
        );
    }
}

#[test]
fn a_worker_does_not_wait_for_whoever_writes_the_records() {
    let mut pair = Pair::connected(973, "", "");
    let [entry, _exit] = recorded(&pair, 4);
    converse(&mut pair, 20);
    assert_eq!((entry.counts.noted(), entry.counts.lost()), (4, 16));
    assert_eq!(entry.take().len(), 4);
    // There is room again.
    converse(&mut pair, 1);
    assert_eq!((entry.counts.noted(), entry.counts.lost()), (5, 16));
}

#[test]
fn a_flow_without_a_recorder_has_no_tally() {
    let mut pair = Pair::connected(974, "", "");
    let mut client = pair.client(1000);
    client.send(INGRESS, &numbered(1));
    pair.run_served(100 * MS);
    // It was there before.
    let [entry, exit] = recorded(&pair, 4);
    pair.world.run(Duration::from_secs(12));
    assert_eq!([entry.counts.noted(), exit.counts.noted()], [0, 0]);
}

#[test]
fn a_forward_is_recorded_with_its_bytes_and_its_end() {
    for (seed, workers) in [(975, (1, 1)), (976, (2, 2))] {
        println!("seed {seed}");
        let mut pair = Pair::with_workers(seed, workers, "", "");
        pair.wait_for_lanes(1);
        let [entry, exit] = recorded(&pair, 100);
        let mut listener = pair.services.tcp_listen(UPSTREAM);
        let mut client = pair.clients.tcp(INGRESS);
        pair.world.run(Duration::from_secs(1));
        let (mut service, _) = listener.accept(pair.services.token()).unwrap();
        client.write(&[7; 1_000]).unwrap();
        service.write(&[7; 300]).unwrap();
        pair.world.run(Duration::from_secs(1));
        assert_eq!(client.read(&mut [0; 4_000]).unwrap(), 300);
        assert_eq!(service.read(&mut [0; 4_000]).unwrap(), 1_000);
        client.shutdown_write().unwrap();
        service.shutdown_write().unwrap();
        pair.world.run(Duration::from_secs(1));
        for (recording, bytes, peer) in [(entry, [1_000, 300], "exit"), (exit, [300, 1_000], "entry")] {
            let records = recording.take();
            let [ended] = &records[..] else { panic!("{records:?}") };
            assert_eq!((ended.kind, &*ended.peer, &*ended.service), (RecordKind::Tcp, peer, "echo"));
            assert_eq!([ended.uplink.bytes, ended.downlink.bytes], bytes);
            assert_eq!((ended.reason, ended.opened_here), ("finished", peer == "exit"));
            assert!(ended.span.ended - ended.span.began >= Duration::from_secs(2), "{:?}", ended.span);
        }
    }
}

#[test]
fn ip_packets_are_recorded_by_their_addresses_and_add_up_to_the_counters() {
    for (seed, workers, ports) in [(977, (1, 1), false), (978, (2, 2), false), (979, (1, 1), true)] {
        println!("seed {seed}");
        let tun = |tun: &str| format!("{tun}\n[records]\ncollector = \"192.0.2.99:4739\"\nports = {ports}");
        let mut tunnel = Tunnel::with_ends(seed, workers, ("", &tun(ENTRY_TUN)), ("", &tun(EXIT_TUN)));
        tunnel.pair.wait_for_lanes(1);
        tunnel.run(2_000);
        let recordings = recorded(&tunnel.pair, 10_000);
        let [entry, exit] = tunnel.ends();
        // Single ones, and several in one, which are many on the way and few again.
        for round in 0..400_u32 {
            let recipe =
                Recipe { flow: (round % 5) as u8, sequence: 1_000 + 6_000 * (round / 5), ..Recipe::TCP };
            let many = Given::new(&Recipe { payload: 6_000, ..recipe }, How::Super(1_000));
            tunnel.push(entry, 0, &many);
            tunnel.push(exit, 0, &Given::new(&Recipe { protocol: 17, ..recipe }, How::Complete).back());
            tunnel.run(2);
        }
        tunnel.run(200);
        assert!(tunnel.written(exit).len() >= 2_400 && tunnel.written(entry).len() >= 400);
        tunnel.run(90_000);
        let peers = tunnel.pair.assert_balanced();
        for ((recording, peer), is_entry) in recordings.into_iter().zip(&peers).zip([true, false]) {
            let records = recording.take();
            let [uplink, downlink] = sums(&records);
            let up = Carried { packets: peer.uplink.account.delivered, bytes: peer.uplink.delivered_bytes };
            let down =
                Carried { packets: peer.downlink.account.delivered, bytes: peer.downlink.delivered_bytes };
            assert_eq!((uplink, downlink), (up, down), "at the entry: {is_entry}");
            assert_eq!([uplink.packets, downlink.packets].iter().sum::<u64>(), 2_800);
            assert!(records.iter().all(|ended| ended.kind == RecordKind::Ip && ended.reason == "idle"));
            for protocol in [6, 17] {
                let of: Vec<_> = records.iter().filter(|ended| ended.protocol == protocol).collect();
                let workers = usize::from(if is_entry { workers.0 } else { workers.1 });
                assert!((5..=5 * workers).contains(&of.len()), "{}", of.len());
                assert!(of.iter().all(|ended| ended.opened_here == (is_entry == (protocol == 6))));
                assert!(of.iter().all(|ended| (ended.source.unwrap().port() != 0) == ports));
            }
        }
    }
}
