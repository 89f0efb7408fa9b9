//! A control connection that is not heard while lanes are: it follows them, is asked, and in the end replaced.

use std::time::Duration;

use base::clock::Clock;

use crate::{
    INGRESS, UPSTREAM,
    restarts::report,
    roaming::{
        CONTROL_MOVED, ESTABLISHED, LANES_MOVED, SECOND, between_agents, longest_gap, sockets, talking,
    },
};

const CONTROL_DEAD: &str = "culvert_sessions_suspected_total{reason=\"control_dead\"}";
const UNRESPONSIVE: &str = "culvert_sessions_suspected_total{reason=\"unresponsive\"}";
const REOPENED: &str = "culvert_lanes_reopened_total{reason=\"unresponsive\"}";

const FLOWS_IDLE: &str = "culvert_flows_evicted_total{reason=\"idle\"}";

const MS: Duration = Duration::from_millis(1);

#[test]
fn the_control_connection_and_idle_lanes_follow_a_nat_although_only_one_lane_carries_traffic() {
    let (mut pair, _) = talking(9400, (1, 1), "lanes = 3", 3);
    pair.world.run(2 * SECOND);
    for (place, socket) in sockets(&mut pair).into_iter().enumerate() {
        pair.world.translate(socket, (socket.ip(), 30_000 + place as u16).into());
    }
    // Nothing is sent on the control connection, and one flow has one lane.
    let mut client = pair.client(900);
    client.send(INGRESS, b"one");
    pair.world.run(SECOND);
    client.send(INGRESS, b"two");
    pair.world.run(SECOND / 2);
    assert_eq!(pair.world.metric(pair.exit, LANES_MOVED), 3);
    assert_eq!(pair.world.metric(pair.exit, CONTROL_MOVED), 1);
    assert_eq!(pair.world.metric(pair.exit, ESTABLISHED), 1);
    pair.assert_balanced();
}

#[test]
fn a_control_connection_that_answers_no_more_is_replaced_while_lanes_work() {
    let mut times = Vec::new();
    for seed in 9410..9420 {
        let (mut pair, mut crowd) = talking(seed, (1, 1), "lanes = 2", 2);
        let mut service = pair.services.tcp_listen(UPSTREAM);
        // The socket of the control connection, which is that of lane 0: the other lane has one of its own.
        let dead = sockets(&mut pair)[0];
        pair.world.weather.borrow_mut().block =
            Box::new(move |one, other| between_agents(one, other) && (one == dead || other == dead));
        let begin = pair.world.clock.now();
        // A connection that waits for it.
        let stream = pair.clients.tcp(INGRESS);
        let token = pair.services.token();
        while pair.world.metric(pair.exit, ESTABLISHED) < 2 {
            assert!(pair.world.clock.now() - begin < 8 * SECOND, "seed {seed}");
            longest_gap(&mut pair, &mut crowd, INGRESS, SECOND / 20);
        }
        times.push(pair.world.clock.now() - begin);
        assert_eq!(pair.world.metric(pair.entry, CONTROL_DEAD), 1, "seed {seed}");
        let gap = longest_gap(&mut pair, &mut crowd, INGRESS, 2 * SECOND);
        assert!(gap < SECOND, "seed {seed}: {gap:?}");
        drop(stream);
        let _later = pair.clients.tcp(INGRESS);
        longest_gap(&mut pair, &mut crowd, INGRESS, SECOND);
        assert!(service.accept(token).is_ok(), "seed {seed}: TCP forwards are opened again");
        pair.assert_balanced();
    }
    assert!(report("a new session, the control connection is deaf", times) <= 7 * SECOND);
}

#[test]
fn a_link_that_is_up_for_moments_only_keeps_its_session_and_its_forwards() {
    let mut times = Vec::new();
    for seed in 9420..9425 {
        let (mut pair, mut crowd) = talking(seed, (2, 2), "", 2);
        let mut service = pair.services.tcp_listen(UPSTREAM);
        let mut stream = pair.clients.tcp(INGRESS);
        longest_gap(&mut pair, &mut crowd, INGRESS, SECOND);
        let (mut served, _) = service.accept(pair.services.token()).unwrap();
        for _ in 0..10 {
            pair.world.weather.borrow_mut().block = Box::new(between_agents);
            longest_gap(&mut pair, &mut crowd, INGRESS, 5 * SECOND);
            pair.world.weather.borrow_mut().block = Box::new(|_, _| false);
            times.push(longest_gap(&mut pair, &mut crowd, INGRESS, Duration::from_millis(900)));
        }
        assert_eq!(pair.world.metric(pair.exit, ESTABLISHED), 1, "seed {seed}: the session goes on");
        assert_eq!(stream.write(b"still here").unwrap(), 10);
        longest_gap(&mut pair, &mut crowd, INGRESS, SECOND);
        assert_eq!(served.read(&mut [0; 20]).unwrap(), 10, "seed {seed}: and so does the forward");
        pair.assert_balanced();
    }
    report("gap, a link is back", times);
}

#[test]
fn a_forward_that_was_under_way_outlives_an_outage() {
    for seed in 9430..9440 {
        let workers = [(1, 1), (2, 2)][(seed % 2) as usize];
        let (mut pair, mut crowd) = talking(seed, workers, "", 1);
        let mut service = pair.services.tcp_listen(UPSTREAM);
        let mut stream = pair.clients.tcp(INGRESS);
        longest_gap(&mut pair, &mut crowd, INGRESS, SECOND);
        let (mut served, _) = service.accept(pair.services.token()).unwrap();
        let (mut sent, mut received) = (0, 0);
        let (data, mut buffer) = (vec![7; 65_536], vec![0; 1 << 20]);
        let outage = Duration::from_millis(1000 + 700 * (seed - 9430));
        let cut = pair.world.clock.now() + SECOND;
        while pair.world.clock.now() < cut + outage + 8 * SECOND {
            let now = pair.world.clock.now();
            let is_cut = (cut..cut + outage).contains(&now);
            pair.world.weather.borrow_mut().block =
                Box::new(move |from, to| is_cut && between_agents(from, to));
            // As much as goes in: QUIC's window is full when the link is cut.
            sent += stream.write(&data).unwrap_or(0);
            crowd.step_to(&mut pair, INGRESS, true);
            received += served.read(&mut buffer).unwrap_or(0);
        }
        assert_eq!(pair.world.metric(pair.exit, ESTABLISHED), 1, "seed {seed}: after {outage:?}");
        for _ in 0..200 {
            crowd.step_to(&mut pair, INGRESS, true);
            received += served.read(&mut buffer).unwrap_or(0);
        }
        assert_eq!(received, sent, "seed {seed}");
        pair.assert_balanced();
    }
}

/// A machine that stands still, as a virtual one does while it is moved to another host, has the answers in its sockets when it goes on.
#[test]
fn a_worker_that_stood_still_reads_its_sockets_before_it_takes_the_peer_for_silent() {
    for (seed, workers) in [(9480, (1, 1)), (9481, (3, 2))] {
        let (mut pair, mut crowd) = talking(seed, workers, "lanes = 4", 4);
        for worker in &mut pair.world.agent(pair.entry).workers {
            // A socket a turn: the lanes are on four.
            worker.set_budget(1);
        }
        for _ in 0..2 {
            pair.world.slow_down(pair.entry, 700 * MS);
            crowd.run(&mut pair, 650 * MS);
            pair.world.speed_up();
            crowd.run(&mut pair, SECOND / 2);
        }
        assert_eq!(pair.world.metric(pair.entry, UNRESPONSIVE), 0, "seed {seed}");
        assert_eq!(pair.world.metric(pair.entry, REOPENED), 0, "seed {seed}");
        assert_eq!(pair.world.metric(pair.exit, ESTABLISHED), 1, "seed {seed}");
        pair.assert_balanced();
    }
}

/// The service's idle time is over, but not for the flows: their clients have gone on.
#[test]
fn a_worker_that_stood_still_reads_its_sockets_before_it_ends_idle_flows() {
    const IDLE: Duration = Duration::from_secs(5);
    for (seed, workers) in [(9490, (1, 1)), (9491, (3, 2))] {
        let (mut pair, mut crowd) = talking(seed, workers, "lanes = 2", 2);
        pair.world.slow_down(pair.entry, IDLE + SECOND / 2);
        crowd.run(&mut pair, IDLE + SECOND / 4);
        pair.world.speed_up();
        crowd.run(&mut pair, SECOND);
        assert_eq!(pair.world.metric(pair.entry, FLOWS_IDLE), 0, "seed {seed}");
        pair.assert_balanced();
    }
}
