//! `culvert bench` through two agents.

use std::net::{Ipv4Addr, SocketAddr};

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

fn loopback() -> SocketAddr {
    (Ipv4Addr::LOCALHOST, ports::free()).into()
}

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

/// Checks one direction of a run against the accounts of the two agents in its way.
///
/// Each account also holds what is not counted: the warm-up, the probe, the control datagrams.
#[track_caller]
fn adds_up(way: &Value, sent_to: Account, received_from: Account) {
    let received = count(way, "received_datagrams");
    assert!(received > 0, "{way:#}");
    assert_eq!(count(way, "sent_datagrams"), received + count(way, "lost"), "{way:#}");
    assert_eq!(
        (count(way, "corrupt"), count(way, "duplicates"), count(way, "reordered")),
        (0, 0, 0),
        "{way:#}"
    );
    assert!(sent_to.received >= received, "{sent_to:?} {way:#}");
    assert!(received_from.delivered >= received, "{received_from:?} {way:#}");
}

#[test]
fn the_bench_and_the_agents_count_the_same() {
    if !needs::met("culvert bench through agents", needs::AGENTS) {
        return;
    }
    let [sink, ingress] = [loopback(), loopback()];
    let pair = Plan::default().service("bench", sink, "").forward("bench", ingress).start();
    let run = bench(ingress, sink, &["--flows", "4", "--rate", "20M", "--seconds", "1"]);
    let [entry_up, exit_down, exit_up, entry_down] = pair.accounts();
    adds_up(&run["up"], entry_up, exit_down);
    adds_up(&run["down"], exit_up, entry_down);
}

#[test]
fn many_flows_over_two_workers_keep_their_order() {
    if !needs::met("culvert bench over two workers", needs::AGENTS) {
        return;
    }
    let [sink, ingress] = [loopback(), loopback()];
    let pair = Plan::default().workers([2, 2]).service("bench", sink, "").forward("bench", ingress).start();
    pair.wait_for_lanes(2);
    let run = bench(ingress, sink, &["--flows", "8", "--rate", "100M", "--seconds", "2"]);
    let kernel = |pair: &Pair, sockets: &[&str]| -> u64 {
        let drops = |socket: &&str| pair.sum("culvert_socket_kernel_drops_total", &[("socket", *socket)]);
        sockets.iter().map(drops).sum()
    };
    // The kernel's drops are polled once a second.
    let [up, down] = clock::until("every loss is explained", PATIENCE, || {
        let [entry_up, exit_down, exit_up, entry_down] = pair.accounts();
        let [up, down] = ["up", "down"].map(|way| count(&run[way], "lost"));
        let ways = [(up, entry_up, exit_down, "ingress"), (down, exit_up, entry_down, "upstream")];
        for (lost, first, second, arrival) in ways {
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
        Ok([(entry_up, exit_down), (exit_up, entry_down)])
    });
    for (direction, (sent_to, received_from)) in [("up", up), ("down", down)] {
        adds_up(&run[direction], sent_to, received_from);
    }
    assert_eq!(pair.handed_over(), 0);
    assert_eq!(pair.sum("culvert_flows_moved_total", &[]), 0);
}
