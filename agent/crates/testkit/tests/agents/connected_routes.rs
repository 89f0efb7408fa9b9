//! `tun.routes = "connected"`: a peer that does not answer loses its routes, and has them again when it has stayed for the hold.

use std::time::Duration;

use ip::model::Recipe;

use crate::{
    EXIT,
    harness::Weather,
    tunnel::{ENTRY_TUN, EXIT_TUN, Given, How, Tunnel},
};

const HOLD: Duration = Duration::from_secs(3);

/// Of an entry whose routes are those of connected peers, and that learns of a dead exit by packets only.
fn tunnel(seed: u64, workers: u8) -> Tunnel {
    println!("seed {seed}, {workers} workers");
    let tun = format!("{ENTRY_TUN}\nroutes = \"connected\"\nhold = \"3s\"");
    let mut tunnel = Tunnel::with_ends(seed, (workers, workers), ("", &tun), ("", EXIT_TUN));
    set_path(&tunnel, true);
    assert!(!is_routed(&mut tunnel), "seed {seed}: it is not connected yet");
    tunnel.pair.wait_for_lanes(usize::from(workers));
    tunnel.run(5);
    assert!(is_routed(&mut tunnel), "seed {seed}: at once with the first connection");
    tunnel
}

fn is_routed(tunnel: &mut Tunnel) -> bool {
    let entry = tunnel.pair.entry;
    !tunnel.pair.world.agent(entry).mtu_table.paths().routed.is_empty()
}

/// The path has 10 ms one way, or loses everything without a sign.
fn set_path(tunnel: &Tunnel, is_whole: bool) {
    let delay = Duration::from_millis(10);
    *tunnel.pair.world.weather.borrow_mut() =
        Weather { delay, loss_percent: 0, block: Box::new(move |_, _| !is_whole), mark: None };
}

/// Lets time pass, in which the kernel gives a packet each millisecond while it has a route; returns how long it has had one, and how
/// often that was taken away.
fn flow(tunnel: &mut Tunnel, time: Duration) -> (Duration, usize) {
    let (entry, mut routed, mut withdrawn) = (tunnel.pair.entry, Duration::ZERO, 0);
    let given = Given::new(&Recipe { payload: 200, ..Recipe::UDP }, How::Complete);
    let mut before = is_routed(tunnel);
    for _ in 0..time.as_millis() {
        if before {
            tunnel.push(entry, 0, &given);
            routed += Duration::from_millis(1);
        }
        tunnel.run(1);
        let now = is_routed(tunnel);
        withdrawn += usize::from(before && !now);
        before = now;
    }
    (routed, withdrawn)
}

#[test]
fn a_killed_peer_loses_its_routes_at_the_first_unanswered_probe_and_has_them_again_after_the_hold() {
    for (seed, workers) in [(2_300, 1), (2_301, 2), (2_302, 3)] {
        let mut tunnel = tunnel(seed, workers);
        assert_eq!(flow(&mut tunnel, Duration::from_secs(2)).1, 0, "seed {seed}: it answers");
        let exit = tunnel.pair.exit;
        tunnel.pair.world.kill(exit);
        let (routed, withdrawn) = flow(&mut tunnel, Duration::from_secs(2));
        assert!(routed < Duration::from_millis(200) && withdrawn == 1, "seed {seed}: {routed:?}");

        let toml = tunnel.pair.exit_toml.clone();
        tunnel.pair.world.restart(exit, &toml, &tunnel.pair.exit_key, &[EXIT], 9);
        let entry = tunnel.pair.entry;
        // Nothing waits for it, so it is dialled after growing intervals.
        tunnel.pair.world.run_till(Duration::from_secs(30), |world| world.peer(entry).lanes_up > 0);
        tunnel.run(100);
        assert!(!is_routed(&mut tunnel), "seed {seed}: its hold has begun");
        // The end of the hold is noticed within a second.
        let (routed, withdrawn) = flow(&mut tunnel, HOLD + Duration::from_secs(2));
        assert!(withdrawn == 0, "seed {seed}");
        assert!(
            routed > Duration::from_secs(1) && routed < Duration::from_millis(2_300),
            "seed {seed}: {routed:?}"
        );
    }
}

#[test]
fn a_peer_that_flaps_loses_its_routes_once_although_nothing_is_sent_to_it() {
    let mut tunnel = tunnel(2_310, 2);
    flow(&mut tunnel, Duration::from_secs(1));
    set_path(&tunnel, false);
    let (routed, withdrawn) = flow(&mut tunnel, Duration::from_millis(600));
    assert!(routed < Duration::from_millis(200) && withdrawn == 1, "{routed:?}");
    for _ in 0..5 {
        set_path(&tunnel, true);
        assert_eq!(flow(&mut tunnel, Duration::from_secs(2)), (Duration::ZERO, 0));
        set_path(&tunnel, false);
        // Long enough that a ping is lost.
        assert_eq!(flow(&mut tunnel, Duration::from_millis(1_400)), (Duration::ZERO, 0));
    }
    set_path(&tunnel, true);
    flow(&mut tunnel, Duration::from_secs(25));
    assert_eq!(flow(&mut tunnel, Duration::from_secs(1)), (Duration::from_secs(1), 0));
}

#[test]
fn a_peer_that_drains_has_its_routes_until_its_session_ends() {
    let mut tunnel = tunnel(2_320, 2);
    let exit = tunnel.pair.exit;
    tunnel.pair.world.drain(exit, Duration::from_secs(20));
    assert_eq!(flow(&mut tunnel, Duration::from_secs(1)).1, 0);
    tunnel.pair.world.stop(exit);
    let (routed, withdrawn) = flow(&mut tunnel, Duration::from_secs(5));
    assert!(withdrawn == 1 && routed < Duration::from_millis(3_200), "{routed:?}");
}
