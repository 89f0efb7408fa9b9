//! `culvert bench` through two agents.

use std::net::SocketAddr;

use culvert_tests::{
    agent::culvert,
    clock::{self, PATIENCE},
    http::Account,
    needs,
    pair::{Pair, Plan},
    ports,
    process::text,
};
use serde_json::Value;

/// Runs it in both directions at once and reads what it prints.
#[track_caller]
fn bench(ingress: SocketAddr, sink: SocketAddr, more: &[&str]) -> Value {
    let (ingress, sink) = (ingress.to_string(), sink.to_string());
    let common = ["bench", "--json", "--to", &ingress, "--sink", &sink, "--direction", "both"];
    let output = culvert(&[&common, more, &["--warmup", "0.2"]].concat());
    assert_eq!(output.status.code(), Some(0), "{}", text(&output.stderr));
    serde_json::from_slice(&output.stdout).unwrap()
}

#[track_caller]
fn count(run: &Value, key: &str) -> u64 {
    run[key].as_u64().unwrap_or_else(|| panic!("{key}: {run:#}"))
}

/// How often a machine that stands still is tried again.
const ATTEMPTS: usize = 5;

/// Runs it through new agents, once they are `ready`, until no lane fell silent meanwhile. On a machine that stands still for half a
/// second one does, and what is on the way there is overtaken.
#[track_caller]
fn undisturbed(plan: &Plan, ready: impl Fn(&Pair), more: &[&str]) -> (Pair, Value) {
    for _ in 0..ATTEMPTS {
        let [sink, ingress] = [ports::loopback(), ports::loopback()];
        let pair = plan.clone().service("bench", sink, "").forward("bench", ingress).start();
        ready(&pair);
        let run = bench(ingress, sink, more);
        // Until nothing is on its way.
        pair.accounts();
        if pair.sum("culvert_lanes_reopened_total", &[("reason", "unresponsive")]) == 0 {
            return (pair, run);
        }
    }
    panic!("in each of {ATTEMPTS} attempts a lane fell silent");
}

/// Checks one direction of a run by itself.
#[track_caller]
fn adds_up(way: &Value) {
    let received = count(way, "received_datagrams");
    assert!(received > 0, "{way:#}");
    assert_eq!(count(way, "sent_datagrams"), received + count(way, "lost"), "{way:#}");
    assert_eq!(
        (count(way, "corrupt"), count(way, "duplicates"), count(way, "reordered")),
        (0, 0, 0),
        "{way:#}"
    );
}

/// Whether the two agents in the way of one direction have counted all that was received.
///
/// Each account also holds what is not counted: the warm-up, the probe, the control datagrams.
fn agents_counted(way: &Value, sent_to: Account, received_from: Account) -> Result<(), String> {
    let received = count(way, "received_datagrams");
    if sent_to.received >= received && received_from.delivered >= received {
        return Ok(());
    }
    Err(format!("{sent_to:?}, {received_from:?}: {way:#}"))
}

#[test]
fn the_bench_and_the_agents_count_the_same() {
    if !needs::met("culvert bench through agents", needs::AGENTS) {
        return;
    }
    let options = ["--flows", "4", "--rate", "20M", "--seconds", "1"];
    let (pair, run) = undisturbed(&Plan::default(), |_| (), &options);
    clock::until("the agents have counted what was received", PATIENCE, || {
        let [entry_up, exit_down, exit_up, entry_down] = pair.accounts();
        agents_counted(&run["up"], entry_up, exit_down)?;
        agents_counted(&run["down"], exit_up, entry_down)
    });
    for direction in ["up", "down"] {
        adds_up(&run[direction]);
    }
}

#[test]
fn many_flows_over_two_workers_keep_their_order() {
    if !needs::met("culvert bench over two workers", needs::AGENTS) {
        return;
    }
    let options = ["--flows", "8", "--rate", "100M", "--seconds", "2"];
    let (pair, run) = undisturbed(&Plan::default().workers([2, 2]), |pair| pair.wait_for_lanes(2), &options);
    let kernel = |pair: &Pair, sockets: &[&str]| -> u64 {
        let drops = |socket: &&str| pair.sum("culvert_socket_kernel_drops_total", &[("socket", *socket)]);
        sockets.iter().map(drops).sum()
    };
    // The kernel's drops are polled once a second.
    clock::until("every loss is explained", PATIENCE, || {
        let [entry_up, exit_down, exit_up, entry_down] = pair.accounts();
        let ways = [("up", entry_up, exit_down, "ingress"), ("down", exit_up, entry_down, "upstream")];
        for (way, first, second, arrival) in ways {
            agents_counted(&run[way], first, second)?;
            let lost = count(&run[way], "lost");
            let between = first.delivered.abs_diff(second.received);
            if between > 0 && kernel(&pair, &["quic_listen", "quic_dial"]) == 0 {
                return Err(format!("{between} between the agents: {first:?}, {second:?}"));
            }
            // The kernel counts buffers, each of which may hold many datagrams.
            let counted = first.dropped + second.dropped + between + kernel(&pair, &[arrival]);
            if lost > 0 && counted + count(&run, "receiver_kernel_drops") == 0 {
                return Err(format!("{lost} lost: {first:?}, {second:?}"));
            }
        }
        Ok(())
    });
    for direction in ["up", "down"] {
        adds_up(&run[direction]);
    }
    assert_eq!(pair.handed_over(), 0);
    assert_eq!(pair.sum("culvert_flows_moved_total", &[]), 0);
}
