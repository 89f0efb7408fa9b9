//! What an operator sees of TCP forwards, and the end of one that an operator asks for.

use std::{collections::BTreeSet, io::ErrorKind, net::SocketAddr, sync::Arc, time::Duration};

use engine::{
    status::{ForwardId, ForwardStatus},
    worker::{Ended, ForwardEnd, ForwardList, Inbox, MOST_FORWARDS, Worker},
};
use net::{TcpListener, TcpStream};

use crate::{EXIT, INGRESS, Pair, UPSTREAM, flood::Log, harness::World};

const SECOND: Duration = Duration::from_secs(1);

fn inboxes(world: &mut World, place: usize) -> Vec<Arc<Inbox>> {
    world.agent(place).workers.iter().map(Worker::inbox).collect()
}

/// The forwards with `peer`, and in how many portions the workers told of them.
fn list(world: &mut World, place: usize, peer: &str, whole: bool) -> (Vec<ForwardStatus>, usize) {
    let inboxes = inboxes(world, place);
    let (mut list, mut portions) = (ForwardList::begin(peer, whole, inboxes.len()), 0);
    while let Some(portion) = list.ask(&inboxes) {
        world.run(Duration::ZERO);
        list.take(&portion, Duration::ZERO);
        portions += 1;
    }
    (list.finish(), portions)
}

fn end(world: &mut World, place: usize, id: &str) -> Ended {
    let inboxes = inboxes(world, place);
    let end = ForwardEnd::ask(id.parse().unwrap(), &inboxes);
    world.run(Duration::ZERO);
    end.wait(Duration::ZERO)
}

/// Clients, and the same connections at the service.
struct Forwards {
    pair: Pair,
    listener: Box<dyn TcpListener>,
    clients: Vec<Box<dyn TcpStream>>,
    served: Vec<Box<dyn TcpStream>>,
}

impl Forwards {
    fn new(mut pair: Pair) -> Self {
        let listener = pair.services.tcp_listen(UPSTREAM);
        Self { pair, listener, clients: Vec::new(), served: Vec::new() }
    }

    /// Opens forwards one after the other, so that each client is at its place.
    fn open(&mut self, count: usize) {
        for _ in 0..count {
            self.clients.push(self.pair.clients.tcp(INGRESS));
            self.pair.world.run(Duration::from_millis(20));
            let token = self.pair.services.token();
            self.served.push(self.listener.accept(token).unwrap().0);
        }
    }

    fn list(&mut self, place: usize) -> Vec<ForwardStatus> {
        let peer = if place == self.pair.entry { "exit" } else { "entry" };
        list(&mut self.pair.world, place, peer, true).0
    }

    /// Runs while the service at `place` writes all the time, and its client does not read.
    fn write_in_vain(&mut self, place: usize, time: Duration) -> u64 {
        let mut written = 0;
        for _ in 0..time.as_millis() / 10 {
            written += self.served[place].write(&[7; 50_000]).unwrap_or(0) as u64;
            self.pair.world.run(Duration::from_millis(10));
        }
        written
    }
}

fn is_reset(stream: &mut dyn TcpStream) -> bool {
    stream.read(&mut [0; 10]).is_err_and(|error| error.kind() == ErrorKind::ConnectionReset)
}

#[test]
fn each_end_lists_its_forwards_with_who_what_and_how_much() {
    let mut forwards = Forwards::new(Pair::connected(4400, "", ""));
    forwards.open(2);
    forwards.pair.world.run(10 * SECOND);
    forwards.clients[1].write(&[1; 300]).unwrap();
    forwards.pair.world.run(Duration::from_millis(50));
    forwards.served[1].write(&[2; 5_000]).unwrap();
    forwards.pair.world.run(Duration::from_millis(50));
    let (entry, exit) = (forwards.pair.entry, forwards.pair.exit);
    let [at_entry, at_exit] = [entry, exit].map(|place| forwards.list(place));
    assert_eq!((at_entry.len(), at_exit.len()), (2, 2));
    for (row, bytes) in at_entry.iter().zip([(0, 0), (300, 5_000)]) {
        assert_eq!((&*row.service, &*row.opened_by, &*row.state), ("echo", "here", "open"));
        assert_eq!((row.uplink_bytes, row.downlink_bytes), bytes);
        assert_eq!(row.local_address.map(|address| address.ip()), Some(crate::CLIENT));
        assert_eq!((row.stalled_seconds, &row.stopped, row.worker), (None, &None, 0));
        assert!(row.age_seconds > 10.0 && row.age_seconds < 10.3, "{row:?}");
    }
    for (row, bytes) in at_exit.iter().zip([(0, 0), (5_000, 300)]) {
        assert_eq!((&*row.service, &*row.opened_by, &*row.state), ("echo", "peer", "open"));
        assert_eq!(
            (row.uplink_bytes, row.downlink_bytes, row.local_address),
            (bytes.0, bytes.1, Some(UPSTREAM))
        );
    }
    // The same figures, by peer and by service.
    let world = &mut forwards.pair.world;
    for (place, peer, bytes) in [(entry, "exit", [300, 5_000]), (exit, "entry", [5_000, 300])] {
        let tcp = world.peer(place).tcp;
        assert_eq!([tcp.uplink_bytes, tcp.downlink_bytes], bytes);
        assert_eq!((tcp.services.len(), tcp.services[0].open, tcp.stalled), (1, 2, 0));
        for (way, bytes) in ["uplink", "downlink"].into_iter().zip(bytes) {
            let series = format!(
                "culvert_service_tcp_bytes_total{{direction=\"{way}\",peer=\"{peer}\",service=\"echo\"}}"
            );
            assert_eq!(world.metric(place, &series), bytes);
        }
        let series = format!("culvert_service_tcp_streams{{peer=\"{peer}\",service=\"echo\"}}");
        assert_eq!(world.metric(place, &series), 2);
    }
    // Orderly ends are counted as such.
    for stream in forwards.clients.iter_mut().chain(&mut forwards.served) {
        stream.shutdown_write().unwrap();
    }
    forwards.pair.world.run(SECOND);
    for (place, peer) in [(entry, "exit"), (exit, "entry")] {
        let world = &mut forwards.pair.world;
        assert_eq!(world.metric(place, "culvert_tcp_ended_total{reason=\"finished\"}"), 2);
        assert_eq!(
            world.metric(place, &format!("culvert_service_tcp_streams{{peer=\"{peer}\",service=\"echo\"}}")),
            0
        );
    }
}

#[test]
fn the_rates_of_a_peer_have_those_of_its_forwards() {
    let mut forwards = Forwards::new(Pair::connected(4401, "", ""));
    forwards.open(1);
    let mut buffer = vec![0; 100_000];
    for _ in 0..300 {
        forwards.clients[0].write(&[1; 1_000]).unwrap();
        forwards.pair.world.run(Duration::from_millis(10));
        while forwards.served[0].read(&mut buffer).is_ok() {}
    }
    let rates = forwards.pair.world.peer(forwards.pair.entry).rates.unwrap();
    assert!((rates.up() - 100_000.0).abs() < 5_000.0, "{rates:?}");
    assert_eq!((rates.uplink_bytes_per_second, rates.down()), (0.0, 0.0));
    let rates = forwards.pair.world.peer(forwards.pair.exit).rates.unwrap();
    assert!((rates.down() - 100_000.0).abs() < 5_000.0, "{rates:?}");
}

#[test]
fn a_reader_that_stops_is_first_in_the_list_of_both_ends_and_in_the_gauge_until_it_reads() {
    let mut forwards = Forwards::new(Pair::connected(4402, "", ""));
    forwards.open(3);
    let (entry, exit) = (forwards.pair.entry, forwards.pair.exit);
    let written = forwards.write_in_vain(1, 30 * SECOND);
    forwards.pair.world.run(5 * SECOND);
    let [at_entry, at_exit] = [entry, exit].map(|place| forwards.list(place));
    let stopped = |rows: &[ForwardStatus]| {
        rows.iter().map(|row| row.stopped.as_deref().map(str::to_owned)).collect::<Vec<_>>()
    };
    assert_eq!(stopped(&at_entry), [Some("here".to_owned()), None, None]);
    assert_eq!(stopped(&at_exit), [Some("peer".to_owned()), None, None]);
    assert_eq!(at_entry[0].local_address.map(|address| address.ip()), Some(crate::CLIENT));
    // The client's kernel is full long before all windows are.
    assert!(at_entry[0].stalled_seconds > at_exit[0].stalled_seconds, "{at_entry:?} {at_exit:?}");
    assert!(at_exit[0].stalled_seconds.is_some_and(|seconds| seconds > 5.0), "{at_exit:?}");
    assert!(at_exit[0].uplink_bytes < written);
    for (place, peer) in [(entry, "exit"), (exit, "entry")] {
        let gauge = format!("culvert_peer_tcp_stalled{{peer=\"{peer}\"}}");
        assert_eq!(forwards.pair.world.metric(place, &gauge), 1);
        assert_eq!(forwards.pair.world.peer(place).tcp.stalled, 1);
    }
    // It reads on.
    let (mut buffer, mut read) = (vec![0; 1 << 20], 0);
    for _ in 0..4_000 {
        while let Ok(len) = forwards.clients[1].read(&mut buffer) {
            read += len as u64;
        }
        forwards.pair.world.run(Duration::from_millis(10));
        if read == written {
            break;
        }
    }
    assert_eq!(read, written);
    forwards.pair.world.run(2 * SECOND);
    for place in [entry, exit] {
        assert_eq!(stopped(&forwards.list(place)), [None, None, None]);
        assert_eq!(forwards.pair.world.peer(place).tcp.stalled, 0);
    }
}

#[test]
fn a_list_comes_in_portions_whole_or_cut_and_ids_are_of_one_forward_at_all_workers() {
    let mut forwards = Forwards::new(Pair::with_workers(4403, (2, 2), "", ""));
    forwards.pair.wait_for_lanes(2);
    const COUNT: usize = 1_400;
    for _ in 0..COUNT / 100 {
        for _ in 0..100 {
            forwards.clients.push(forwards.pair.clients.tcp(INGRESS));
        }
        for _ in 0..30 {
            forwards.pair.world.run(Duration::from_millis(10));
            let token = forwards.pair.services.token();
            while let Ok((stream, _)) = forwards.listener.accept(token) {
                forwards.served.push(stream);
            }
        }
    }
    assert_eq!(forwards.served.len(), COUNT);
    let pair = &mut forwards.pair;
    for (place, peer) in [(pair.entry, "exit"), (pair.exit, "entry")] {
        let (whole, portions) = list(&mut pair.world, place, peer, true);
        let ids: BTreeSet<&str> = whole.iter().map(|row| &*row.id).collect();
        assert_eq!((whole.len(), ids.len()), (COUNT, COUNT));
        assert!(portions >= 2, "{portions} portions");
        assert!(whole.is_sorted_by(|one, other| one.age_seconds >= other.age_seconds), "the oldest first");
        let (cut, _) = list(&mut pair.world, place, peer, false);
        assert_eq!(cut.len(), MOST_FORWARDS);
        assert_eq!(cut[..], whole[..MOST_FORWARDS]);
        assert_eq!(list(&mut pair.world, place, "nobody", true).0, []);
        assert!(pair.world.books(place).iter().all(|books| books.excess.is_none()));
    }
}

#[test]
fn a_worker_that_does_not_answer_is_asked_once() {
    let mut forwards = Forwards::new(Pair::connected(4404, "", ""));
    forwards.open(1);
    let inboxes = inboxes(&mut forwards.pair.world, forwards.pair.entry);
    let mut list = ForwardList::begin("exit", true, inboxes.len());
    let portion = list.ask(&inboxes).unwrap();
    // It has no turn meanwhile.
    list.take(&portion, Duration::ZERO);
    assert!(list.ask(&inboxes).is_none());
    assert_eq!(list.finish(), []);
    let end = ForwardEnd::ask("5f3a9c-17".parse().unwrap(), &inboxes);
    assert_eq!(end.wait(Duration::ZERO), Ended::Unanswered);
}

#[test]
fn an_operator_ends_one_forward_at_either_end_and_no_other_by_its_old_id() {
    for (seed, workers) in [(4405, (1, 1)), (4406, (2, 3))] {
        let mut forwards = Forwards::new(Pair::with_workers(seed, workers, "", ""));
        forwards.pair.wait_for_lanes(usize::from(workers.1));
        forwards.open(6);
        let (entry, exit) = (forwards.pair.entry, forwards.pair.exit);
        for (place, other) in [(entry, exit), (exit, entry)] {
            let before = forwards.list(place);
            let victim = before[1].clone();
            assert_eq!(end(&mut forwards.pair.world, place, &victim.id), Ended::Done);
            forwards.pair.world.run(SECOND);
            let ids = |rows: Vec<ForwardStatus>| rows.into_iter().map(|row| row.id).collect::<Vec<_>>();
            let rest: Vec<_> =
                before.iter().filter(|row| row.id != victim.id).map(|row| row.id.clone()).collect();
            assert_eq!(ids(forwards.list(place)), rest);
            assert_eq!(forwards.list(other).len(), rest.len());
            let reset = |streams: &mut Vec<Box<dyn TcpStream>>| {
                let before = streams.len();
                streams.retain_mut(|stream| !is_reset(&mut **stream));
                before - streams.len()
            };
            assert_eq!((reset(&mut forwards.clients), reset(&mut forwards.served)), (1, 1));
            let metric = |world: &mut World, place, reason: &str| {
                world.metric(place, &format!("culvert_tcp_ended_total{{reason=\"{reason}\"}}"))
            };
            assert_eq!(metric(&mut forwards.pair.world, place, "operator"), 1);
            assert_eq!(metric(&mut forwards.pair.world, other, "reset"), 1);
            // Another forward takes its place in the table, and the old ID does not name it.
            forwards.open(1);
            assert_eq!(end(&mut forwards.pair.world, place, &victim.id), Ended::Unknown);
            forwards.pair.world.run(SECOND);
            assert_eq!(forwards.list(place).len(), rest.len() + 1);
        }
    }
}

#[test]
fn ids_outlast_a_reload_and_name_nothing_after_a_restart() {
    let mut forwards = Forwards::new(Pair::connected(4407, "", ""));
    forwards.open(2);
    let exit = forwards.pair.exit;
    let before = forwards.list(exit);
    let changed = forwards.pair.exit_toml.replace("idle = \"5s\"", "idle = \"6s\"");
    assert!(!forwards.pair.world.reload(exit, &changed).unwrap().is_empty());
    forwards.pair.world.run(SECOND);
    let ids = |rows: &[ForwardStatus]| rows.iter().map(|row| row.id.clone()).collect::<Vec<_>>();
    assert_eq!(ids(&forwards.list(exit)), ids(&before));
    assert_eq!(end(&mut forwards.pair.world, exit, &before[0].id), Ended::Done);
    forwards.pair.world.run(SECOND);
    forwards.pair.world.kill(exit);
    let (toml, key) = (forwards.pair.exit_toml.clone(), &forwards.pair.exit_key);
    forwards.pair.world.restart(exit, &toml, key, &[EXIT], 9);
    forwards.pair.world.run(60 * SECOND);
    (forwards.clients, forwards.served) = (Vec::new(), Vec::new());
    forwards.open(2);
    let after = forwards.list(exit);
    assert_eq!(after.len(), 2);
    let number = |row: &ForwardStatus| row.id.split_once('-').map(|(_, number)| number.to_owned());
    assert_eq!(
        number(&after[1]),
        number(&before[1]),
        "numbers begin again, so the part before them must differ"
    );
    assert_eq!(end(&mut forwards.pair.world, exit, &before[1].id), Ended::Unknown);
    assert_eq!(forwards.list(exit), after);
    assert!(after[0].id.parse::<ForwardId>().is_ok());
}

#[test]
fn a_refusal_is_counted_by_its_reason_at_both_ends() {
    // Nobody listens; and an upstream in a network to which the exit has no route.
    let nowhere = SocketAddr::from(([203, 0, 113, 9], 7));
    for (seed, upstream, reason) in [(4408, UPSTREAM, "upstream_refused"), (4409, nowhere, "no_route")] {
        let mut pair = Pair::connected(seed, "", "");
        let toml = pair.exit_toml.replace(&UPSTREAM.to_string(), &upstream.to_string());
        pair.world.reload(pair.exit, &toml).unwrap();
        pair.world.run(SECOND);
        let mut client = pair.clients.tcp(INGRESS);
        let log = Log::default();
        log.record(|| pair.world.run(SECOND));
        assert!(is_reset(&mut *client));
        // The exit's operator learns which service, where and why.
        let text = log.text();
        let lines: Vec<_> =
            text.lines().filter(|line| line.contains("a TCP forward of the peer was refused")).collect();
        assert_eq!(lines.len(), 1, "{text}");
        let error = if reason == "no_route" { "network unreachable" } else { "connection refused" };
        for words in [
            "peer=\"entry\" service=\"echo\"",
            &format!("upstream={upstream}"),
            &format!("reason=\"{reason}\""),
            &format!("error={error}"),
        ] {
            assert!(lines[0].contains(words), "{words}: {}", lines[0]);
        }
        for place in [pair.entry, pair.exit] {
            let refused = |reason| format!("culvert_tcp_refused_total{{reason=\"{reason}\"}}");
            assert_eq!(pair.world.metric(place, &refused(reason)), 1, "{reason}");
            assert_eq!(pair.world.metric(place, "culvert_tcp_ended_total{reason=\"reset\"}"), 0);
        }
    }
}
