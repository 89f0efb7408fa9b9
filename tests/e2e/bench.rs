//! `culvert bench` through two agents.

use std::net::{Ipv4Addr, SocketAddr};

use culvert_tests::{agent::culvert, needs, pair::Plan, ports, process::text};
use serde_json::Value;

#[test]
fn the_bench_and_the_agents_count_the_same() {
    if !needs::met("culvert bench through agents", needs::AGENTS) {
        return;
    }
    let [sink, ingress] =
        [ports::free(), ports::free()].map(|port| SocketAddr::from((Ipv4Addr::LOCALHOST, port)));
    let pair = Plan::default().service("bench", sink, "").forward("bench", ingress).start();
    let output = culvert(&[
        "bench",
        "--json",
        "--to",
        &ingress.to_string(),
        "--sink",
        &sink.to_string(),
        "--direction",
        "both",
        "--flows",
        "4",
        "--rate",
        "20M",
        "--seconds",
        "1",
        "--warmup",
        "0.2",
    ]);
    assert_eq!(output.status.code(), Some(0), "{}", text(&output.stderr));
    let run: Value = serde_json::from_slice(&output.stdout).unwrap();
    // Each account also holds what is not counted: the warm-up, the probe, the control datagrams.
    let [entry_up, exit_down, exit_up, entry_down] = pair.accounts();
    for (direction, sent_to, received_from) in [("up", entry_up, exit_down), ("down", exit_up, entry_down)] {
        let way = &run[direction];
        let count = |key: &str| way[key].as_u64().unwrap_or_else(|| panic!("{key}: {way:#}"));
        assert!(count("received_datagrams") > 0, "{way:#}");
        assert_eq!(count("sent_datagrams"), count("received_datagrams") + count("lost"), "{way:#}");
        assert_eq!((count("corrupt"), count("duplicates"), count("reordered")), (0, 0, 0), "{way:#}");
        assert!(sent_to.received >= count("received_datagrams"), "{sent_to:?} {way:#}");
        assert!(received_from.delivered >= count("received_datagrams"), "{received_from:?} {way:#}");
    }
}
