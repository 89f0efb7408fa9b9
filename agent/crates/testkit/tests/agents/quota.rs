//! A peer's quota: what counts, what holds at it, and when a month ends.

use std::{io::ErrorKind, time::Duration};

use ip::model::Recipe;

use crate::{
    INGRESS, Pair, UPSTREAM, numbered,
    tunnel::{Given, How, Tunnel},
};

const MS: Duration = Duration::from_millis(1);

/// The world begins on 2026-05-28 at 20:26:40 UTC, this many seconds before the 29th.
const TO_THE_29TH: u64 = 12_800;

/// Sends datagrams of 1,200 bytes, ten in each millisecond; returns the bytes that came to the service, and those that came back.
fn load(pair: &mut Pair, ms: u32) -> (u64, u64) {
    let mut client = pair.client(8000);
    let datagram = numbered(7).repeat(2);
    let (mut came, mut back) = (0, 0);
    // What is on its way at the end arrives, too.
    for at in 0..ms + 100 {
        for _ in 0..if at < ms { 10 } else { 0 } {
            client.send(INGRESS, &datagram);
        }
        pair.world.run(MS);
        for (from, payload) in pair.echo.receive() {
            came += payload.len() as u64;
            pair.echo.send(from, &payload);
        }
        back += client.receive().iter().map(|(_, payload)| payload.len() as u64).sum::<u64>();
    }
    (came, back)
}

fn used(pair: &mut Pair, place: usize) -> (u64, String) {
    let status = pair.world.peer(place).quota.expect("it has a quota");
    (status.used_bytes, status.state.into_owned())
}

/// Of the peer at the exit.
fn gauge(pair: &mut Pair, name: &str) -> u64 {
    let exit = pair.exit;
    pair.world.metric(exit, &format!("culvert_peer_quota_{name}{{peer=\"entry\"}}"))
}

/// The bytes that the counters of the exit show for its peer, both directions together.
fn delivered(pair: &mut Pair) -> u64 {
    let exit = pair.exit;
    let mut count = |direction| {
        let labels = format!("{{direction=\"{direction}\",peer=\"entry\"}}");
        pair.world.metric(exit, &format!("culvert_peer_bytes_delivered_total{labels}"))
    };
    count("uplink") + count("downlink")
}

fn dropped(pair: &mut Pair, direction: &str) -> u64 {
    let exit = pair.exit;
    let series = format!("culvert_datagrams_dropped_total{{direction=\"{direction}\",reason=\"quota\"}}");
    pair.world.metric(exit, &series)
}

#[test]
fn a_peer_is_stopped_at_its_quota_until_the_month_ends() {
    for (seed, workers) in [(960, (1, 1)), (961, (3, 2))] {
        println!("seed {seed}");
        let quota = "quota = { bytes = \"20MB\", from = 29 }";
        let mut pair = Pair::with_workers(seed, workers, "", quota);
        pair.wait_for_lanes(1);
        let exit = pair.exit;
        let (came, back) = load(&mut pair, 300);
        pair.world.run(Duration::from_secs(2));
        let (count, state) = used(&mut pair, exit);
        assert_eq!((count, &*state), (came + back, "free"), "both directions count");
        assert_eq!((gauge(&mut pair, "used_bytes"), delivered(&mut pair)), (count, count));
        assert_eq!((gauge(&mut pair, "bytes"), gauge(&mut pair, "reached")), (20_000_000, 0));
        // Counted once a second, so at most a second of 2 × 12 MB/s too much.
        let (came, back) = load(&mut pair, 4_000);
        let (count, state) = used(&mut pair, exit);
        assert_eq!(state, "stopped");
        assert!((20_000_000..46_000_000).contains(&count), "{count}");
        assert!(came + back < 46_000_000);
        assert_eq!((gauge(&mut pair, "reached"), delivered(&mut pair)), (1, count));
        assert_eq!(load(&mut pair, 1_000), (0, 0));
        assert!(dropped(&mut pair, "downlink") > 0);
        assert_eq!(used(&mut pair, exit).0, count, "what is dropped does not count");
        pair.assert_balanced();
        // A forward is refused, and the session goes on.
        let mut listener = pair.services.tcp_listen(UPSTREAM);
        let _client = pair.clients.tcp(INGRESS);
        pair.world.run(Duration::from_secs(1));
        let token = pair.services.token();
        assert!(listener.accept(token).is_err());
        let series = "culvert_tcp_refused_total{reason=\"quota\"}";
        assert_eq!(pair.world.metric(exit, series), 1);
        assert!(pair.world.peer(exit).connected());
        // A second before the month ends nothing has changed, and two seconds later all has.
        let elapsed = pair.world.clock.elapsed().as_secs();
        pair.world.run(Duration::from_secs(TO_THE_29TH - 1 - elapsed - 1));
        assert_eq!(used(&mut pair, exit), (count, "stopped".to_owned()));
        pair.world.run(Duration::from_secs(4));
        assert_eq!(used(&mut pair, exit), (0, "free".to_owned()));
        let (came, back) = load(&mut pair, 200);
        assert!(came > 0 && back > 0);
        pair.assert_balanced();
    }
}

#[test]
fn a_peer_is_slowed_down_at_its_quota_in_both_directions() {
    for (seed, workers) in [(962, (1, 1)), (963, (3, 2))] {
        println!("seed {seed}");
        let quota = "quota = { bytes = \"10MB\", from = 29, then = \"2Mbit\" }";
        let mut pair = Pair::with_workers(seed, workers, "", quota);
        pair.wait_for_lanes(1);
        let exit = pair.exit;
        load(&mut pair, 4_000);
        assert_eq!(used(&mut pair, exit).1, "slowed");
        let (came, back) = load(&mut pair, 10_000);
        for way in [came, back] {
            let mbit = way as f64 * 8.0 / 10e6;
            assert!((1.4..2.4).contains(&mbit), "{mbit} Mbit/s");
        }
        // Without the quota all is as before; with a larger one, too.
        let toml = pair.exit_toml.clone();
        for other in ["", "quota = { bytes = \"1GB\", from = 29 }"] {
            pair.world.reload(exit, &toml.replace(quota, other)).unwrap();
            pair.world.run(Duration::from_secs(2));
            let (came, _) = load(&mut pair, 500);
            assert!(came > 4_000_000, "{came} with {other:?}");
        }
        pair.assert_balanced();
    }
}

#[test]
fn a_lowered_quota_stops_at_once_and_a_raised_one_lets_go() {
    let quota = |size: &str| format!("quota = {{ bytes = \"{size}\", from = 29 }}");
    let mut pair = Pair::with_workers(964, (1, 1), "", &quota("1GB"));
    pair.wait_for_lanes(1);
    let exit = pair.exit;
    load(&mut pair, 500);
    pair.world.run(Duration::from_secs(2));
    let toml = pair.exit_toml.clone();
    for (size, state) in [("1MB", "stopped"), ("1GB", "free"), ("2MB", "stopped")] {
        pair.world.reload(exit, &toml.replace(&quota("1GB"), &quota(size))).unwrap();
        pair.world.run(50 * MS);
        assert_eq!(used(&mut pair, exit).1, state);
        let (came, _) = load(&mut pair, 100);
        assert_eq!(came > 0, state == "free");
    }
    pair.assert_balanced();
}

#[test]
fn what_a_peer_carried_without_a_quota_does_not_count() {
    let (share, quota) = ("flow_quota = 0.5", "flow_quota = 0.5\nquota = { bytes = \"1MB\", from = 29 }");
    let mut pair = Pair::with_workers(966, (2, 2), "", share);
    pair.wait_for_lanes(2);
    let (exit, toml) = (pair.exit, pair.exit_toml.clone());
    load(&mut pair, 500);
    pair.world.reload(exit, &toml.replace(share, quota)).unwrap();
    pair.world.run(Duration::from_secs(2));
    assert_eq!(used(&mut pair, exit), (0, "free".to_owned()));
    let (came, back) = load(&mut pair, 10);
    pair.world.run(Duration::from_secs(2));
    assert_eq!(used(&mut pair, exit), (came + back, "free".to_owned()));
    // Nor what it carries while the quota is away.
    pair.world.reload(exit, &toml).unwrap();
    load(&mut pair, 500);
    pair.world.reload(exit, &toml.replace(share, quota)).unwrap();
    pair.world.run(Duration::from_secs(2));
    assert_eq!(used(&mut pair, exit), (came + back, "free".to_owned()));
    pair.assert_balanced();
}

#[test]
fn forwards_count_and_end_at_the_quota() {
    let quota = "quota = { bytes = \"1MB\", from = 29 }";
    let mut pair = Pair::with_workers(967, (2, 2), "", quota);
    pair.wait_for_lanes(2);
    let exit = pair.exit;
    let mut listener = pair.services.tcp_listen(UPSTREAM);
    let mut client = pair.clients.tcp(INGRESS);
    pair.world.run(Duration::from_secs(1));
    let (mut service, _) = listener.accept(pair.services.token()).unwrap();
    let mut ends = [None, None];
    for _ in 0..4_000 {
        for (stream, end) in [&mut client, &mut service].into_iter().zip(&mut ends) {
            let done = [stream.write(&[7; 1_000]), stream.read(&mut [0; 4_000])];
            let mut errors = done.into_iter().filter_map(Result::err).map(|error| error.kind());
            *end = end.or_else(|| errors.find(|kind| *kind != ErrorKind::WouldBlock));
        }
        pair.world.run(MS);
    }
    assert_eq!(ends, [Some(ErrorKind::ConnectionReset); 2]);
    let mut metric = |series: &str| pair.world.metric(exit, series);
    assert_eq!(metric("culvert_tcp_ended_total{reason=\"quota\"}"), 1);
    let ways = ["uplink", "downlink"].map(|way| {
        let labels = format!("{{direction=\"{way}\",peer=\"entry\",service=\"echo\"}}");
        metric(&format!("culvert_service_tcp_bytes_total{labels}"))
    });
    assert!(ways.iter().all(|bytes| *bytes > 400_000), "{ways:?}");
    assert_eq!(used(&mut pair, exit), (ways[0] + ways[1], "stopped".to_owned()));
    assert!(pair.world.peer(exit).connected());
}

#[test]
fn a_forward_that_is_refused_at_the_quota_takes_no_place_of_a_later_one() {
    let quota = |size: &str| format!("quota = {{ bytes = \"{size}\", from = 29 }}");
    let mut pair =
        Pair::with_workers(968, (1, 1), "", &format!("{}\n[limits]\ntcp_streams_per_peer = 2", quota("1MB")));
    pair.wait_for_lanes(1);
    let exit = pair.exit;
    load(&mut pair, 2_000);
    assert_eq!(used(&mut pair, exit).1, "stopped");
    for refused in 1..=5 {
        let _client = pair.clients.tcp(INGRESS);
        pair.world.run(100 * MS);
        assert_eq!(pair.world.metric(exit, "culvert_tcp_refused_total{reason=\"quota\"}"), refused);
    }
    let toml = pair.exit_toml.clone();
    pair.world.reload(exit, &toml.replace(&quota("1MB"), &quota("1GB"))).unwrap();
    pair.world.run(50 * MS);
    let mut listener = pair.services.tcp_listen(UPSTREAM);
    let _clients = [pair.clients.tcp(INGRESS), pair.clients.tcp(INGRESS)];
    pair.world.run(Duration::from_secs(1));
    for _ in 0..2 {
        listener.accept(pair.services.token()).unwrap();
    }
}

#[test]
fn ip_packets_count_and_stop_too() {
    let quota = "quota = { bytes = \"1MB\", from = 29 }";
    let mut tunnel =
        Tunnel::with_ends(965, (1, 1), ("", crate::tunnel::ENTRY_TUN), (quota, crate::tunnel::EXIT_TUN));
    tunnel.pair.wait_for_lanes(1);
    tunnel.run(2_000);
    let [entry, exit] = tunnel.ends();
    let mut bytes = 0;
    for ms in 0..5_000_u32 {
        let recipe = Recipe { flow: 1, payload: 1_000, ..Recipe::UDP };
        tunnel.push(entry, 0, &Given::new(&recipe, How::Complete));
        tunnel.run(1);
        let written = tunnel.written(exit).iter().map(Vec::len).sum::<usize>();
        bytes += written;
        assert!(ms < 3_000 || written == 0, "after {ms} ms");
    }
    assert!((1_000_000..2_200_000).contains(&bytes), "{bytes}");
    let place = tunnel.pair.exit;
    assert_eq!(used(&mut tunnel.pair, place), (bytes as u64, "stopped".to_owned()));
    assert!(dropped(&mut tunnel.pair, "downlink") > 1_000);
    tunnel.pair.assert_balanced();
}
