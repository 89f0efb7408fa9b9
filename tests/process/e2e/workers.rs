//! Several workers at either end: where flows live, that they keep their order, what is handed over.

use std::{collections::BTreeMap, net::SocketAddr, thread, time::Duration};

use culvert_tests::{
    agent::Agent,
    client::Client,
    clock::PATIENCE,
    needs,
    pair::{Pair, Plan},
    ports,
    upstream::Echo,
};

/// So many that a worker without any of them is out of the question, however the kernel hashes.
const CLIENTS: u32 = 60;
const DATAGRAMS: u32 = 24;
/// So many of each client are on their way at once, far below every queue's bounds.
const WINDOW: u32 = 4;

/// Workers of the entry and of the exit, `lanes` of the configuration, lanes to expect.
type Mix = ([u8; 2], u8, u64);

/// The flows of each lane, once there are all.
fn lane_flows(agent: &Agent) -> BTreeMap<String, f64> {
    agent.wait_for("all flows are on lanes", |samples| {
        let flows = samples.by_label("culvert_lane_flows", "lane");
        if flows.values().sum::<f64>() == f64::from(CLIENTS) { Ok(flows) } else { Err(format!("{flows:?}")) }
    })
}

/// Checks how flows are striped: each lane has some, the same at both ends, and the lanes of one worker share evenly.
fn check_stripes(pair: &Pair, entry_workers: usize, lanes: u64) {
    let [entry, exit] = pair.ends().map(|(_, agent)| lane_flows(agent));
    assert_eq!(entry, exit, "the exit answers on the lane that a flow came by");
    let names: Vec<String> = (0..lanes).map(|lane| lane.to_string()).collect();
    assert!(entry.keys().eq(&names), "{entry:?}: each of {lanes} lanes has flows");
    // Lanes that are as many apart as there are workers live at the same one, which gives them out in turn.
    let flows: Vec<f64> = names.iter().map(|name| entry[name]).collect();
    if flows.len() > entry_workers {
        let neighbours = flows.iter().zip(&flows[entry_workers..]);
        assert!(neighbours.clone().all(|(one, other)| (one - other).abs() <= 1.0), "{flows:?}");
    }
}

/// Checks that the service got the datagrams of each client in order, all from one port.
fn check_arrivals(echo: &Echo) {
    let mut clients: BTreeMap<u32, (SocketAddr, Vec<u32>)> = BTreeMap::new();
    for arrival in echo.arrivals() {
        let (source, numbers) = clients.entry(arrival.client).or_insert((arrival.source, Vec::new()));
        assert_eq!(*source, arrival.source, "client {}", arrival.client);
        numbers.push(arrival.number);
    }
    assert_eq!(clients.len(), CLIENTS as usize);
    for (client, (_, numbers)) in clients {
        assert!(numbers.iter().copied().eq(0..DATAGRAMS), "client {client}: {numbers:?}");
    }
}

/// How often a machine that stands still is tried again.
const ATTEMPTS: usize = 5;

#[track_caller]
fn carries_flows_in_order(mix: Mix) {
    let carried = (0..ATTEMPTS).any(|_| carries_undisturbed(mix));
    assert!(carried, "{mix:?}: in each of {ATTEMPTS} attempts a lane fell silent");
}

/// Sends a window of each client after the other, and takes all of it back.
fn converse(clients: &mut [Client]) -> Result<(), String> {
    for first in (0..DATAGRAMS).step_by(WINDOW as usize) {
        for _ in 0..WINDOW {
            clients.iter_mut().for_each(Client::send);
        }
        for client in clients.iter() {
            for number in first..first + WINDOW {
                client.receive(number, PATIENCE)?;
            }
        }
    }
    Ok(())
}

/// Whether a lane fell silent, as one does on a machine that stands still for half a second: its flows move, and what is on the way
/// there is overtaken.
#[track_caller]
fn a_lane_fell_silent(pair: &Pair) -> bool {
    pair.sum("culvert_lanes_reopened_total", &[("reason", "unresponsive")]) > 0
}

/// Sends through a pair and checks where flows live, their order and what was handed over; false if a lane fell silent meanwhile.
#[track_caller]
fn carries_undisturbed((workers, configured, lanes): Mix) -> bool {
    let (echo, ingress) = (Echo::new(), ports::loopback());
    let plan = Plan::default().workers(workers).peer(&format!("lanes = {configured}\n"));
    let pair = plan.service("echo", echo.address, "").forward("echo", ingress).start();
    pair.wait_for_lanes(lanes);
    for ((_, agent), workers) in pair.ends().into_iter().zip(workers) {
        agent.wait_for_count("culvert_workers", &[], workers.into());
    }
    let mut clients: Vec<Client> = (0..CLIENTS).map(|number| Client::new(number, ingress)).collect();
    if let Err(error) = converse(&mut clients) {
        // Agents publish their counts some moments after the fact.
        thread::sleep(Duration::from_secs(1));
        assert!(a_lane_fell_silent(&pair), "{error}");
        return false;
    }
    let total = u64::from(CLIENTS * DATAGRAMS);
    pair.wait_for_accounts([(total, total); 4]);
    for (peer, agent) in pair.ends() {
        agent.wait_for_count("culvert_flows", &[("peer", peer)], CLIENTS.into());
    }
    if a_lane_fell_silent(&pair) {
        return false;
    }
    check_arrivals(&echo);
    let [entry_workers, exit_workers] = workers;
    check_stripes(&pair, entry_workers.into(), lanes);

    let kind = |agent: &Agent, family: &str, kind| {
        agent.samples().count(&format!("culvert_{family}_over_datagrams_total"), &[("kind", kind)])
    };
    // The exit's flows live where their lanes do; the entry's do as soon as each of its workers has one.
    assert_eq!(kind(&pair.exit, "handed", "frames") + kind(&pair.exit, "handed", "payloads"), 0);
    assert_eq!(
        pair.sum("culvert_handed_over_datagrams_total", &[("kind", "packets")]),
        0,
        "the kernel steers"
    );
    assert_eq!(pair.handed_over() > 0, lanes < entry_workers.into(), "{exit_workers} workers at the exit");
    if lanes < entry_workers.into() {
        for over in ["frames", "payloads"] {
            pair.entry.wait_for(&format!("all {over} arrived that were handed over"), |samples| {
                let count = |family: &str| {
                    samples.count(&format!("culvert_{family}_over_datagrams_total"), &[("kind", over)])
                };
                let (handed, taken) = (count("handed"), count("taken"));
                if handed == taken && handed >= u64::from(DATAGRAMS) {
                    return Ok(());
                }
                Err(format!("{handed} handed over, {taken} taken"))
            });
        }
    }
    for family in ["culvert_flows_moved_total", "culvert_lanes_reopened_total"] {
        assert_eq!(pair.sum(family, &[]), 0, "{family}");
    }
    let established = [("outcome", "established")];
    assert_eq!(pair.entry.samples().count("culvert_handshakes_total", &established), 1);
    true
}

#[test]
fn unequal_ends_open_a_lane_per_worker_of_the_larger() {
    if !needs::met("unequal workers", needs::AGENTS) {
        return;
    }
    for mix in [([1, 2], 0, 2), ([2, 1], 0, 2), ([2, 3], 0, 3), ([3, 1], 0, 3), ([3, 2], 0, 3)] {
        carries_flows_in_order(mix);
    }
}

#[test]
fn fewer_lanes_than_workers_are_shared_by_hand_over() {
    if !needs::met("fewer lanes than workers", needs::AGENTS) {
        return;
    }
    for mix in [([3, 3], 1, 1), ([1, 3], 1, 1), ([3, 1], 2, 2)] {
        carries_flows_in_order(mix);
    }
}

#[test]
fn more_lanes_than_workers_are_shared_out() {
    if !needs::met("more lanes than workers", needs::AGENTS) {
        return;
    }
    for mix in [([2, 2], 5, 5), ([1, 2], 3, 3)] {
        carries_flows_in_order(mix);
    }
}
