//! What Prometheus and supervisors see, compared with what the test sent.

use std::net::{Ipv4Addr, SocketAddr};

use culvert_tests::{client::Client, needs, pair::Plan, ports, upstream::Echo};

/// What each agent must show, and of which type.
const FAMILIES: &[(&str, &str)] = &[
    ("culvert_build_info", "gauge"),
    ("culvert_ready", "gauge"),
    ("culvert_process_cpu_seconds", "counter"),
    ("culvert_process_open_fds", "gauge"),
    ("culvert_process_resident_memory_bytes", "gauge"),
    ("culvert_peer_connected", "gauge"),
    ("culvert_peer_rtt_seconds", "gauge"),
    ("culvert_peer_datagrams_received", "counter"),
    ("culvert_peer_datagrams_delivered", "counter"),
    ("culvert_peer_datagrams_dropped", "counter"),
    ("culvert_peer_datagrams_queued", "gauge"),
    ("culvert_datagrams_dropped", "counter"),
    ("culvert_flows", "gauge"),
    ("culvert_lanes", "gauge"),
    ("culvert_lane_packets_sent", "counter"),
    ("culvert_lane_packets_received", "counter"),
    ("culvert_queue_packets", "gauge"),
    ("culvert_socket_received_datagrams", "counter"),
    ("culvert_socket_sent_datagrams", "counter"),
    ("culvert_handshakes", "counter"),
    ("culvert_refused_datagrams", "counter"),
    ("culvert_tcp_streams", "gauge"),
];

#[test]
fn counters_agree_with_what_was_sent() {
    const DATAGRAMS: u32 = 100;
    if !needs::met("metrics", needs::AGENTS) {
        return;
    }
    let echo = Echo::new();
    let ingress: SocketAddr = (Ipv4Addr::LOCALHOST, ports::free()).into();
    let pair = Plan::default().service("echo", echo.address, "").forward("echo", ingress).start();
    Client::new(0, ingress).converse(DATAGRAMS);

    let expected = u64::from(DATAGRAMS);
    pair.wait_for_accounts([(expected, expected); 4]);
    for (peer, agent) in pair.ends() {
        let page = agent.get("/metrics").unwrap();
        assert!(page.content_type.starts_with("text/plain; version=0.0.4"), "{}", page.content_type);
        let samples = page.samples();
        for (family, kind) in FAMILIES {
            assert_eq!(samples.types.get(*family).map(String::as_str), Some(*kind), "{family}");
        }
        for direction in ["uplink", "downlink"] {
            let labels = [("peer", peer), ("direction", direction)];
            // Every datagram of the client has 64 bytes.
            for what in ["received", "delivered"] {
                assert_eq!(
                    samples.count(&format!("culvert_peer_bytes_{what}_total"), &labels),
                    expected * 64
                );
            }
        }
        assert_eq!(samples.count("culvert_peer_connected", &[("peer", peer)]), 1);
        assert_eq!(samples.count("culvert_flows", &[("peer", peer)]), 1);
        assert_eq!(samples.count("culvert_flows_opened_total", &[("peer", peer)]), 1);
        assert_eq!(samples.count("culvert_ready", &[]), 1);
        assert_eq!(samples.count("culvert_datagrams_dropped_total", &[]), 0);
        assert!(samples.sum("culvert_peer_rtt_seconds", &[("peer", peer)]) > 0.0);
        assert!(samples.count("culvert_lane_packets_sent_total", &[("peer", peer)]) >= expected);
    }
    let entry = pair.entry.samples();
    let socket =
        |what: &str, socket| entry.count(&format!("culvert_socket_{what}_total"), &[("socket", socket)]);
    assert_eq!(socket("received_datagrams", "ingress"), expected);
    assert_eq!(socket("sent_datagrams", "ingress"), expected);
    assert!(socket("sent_datagrams", "quic_dial") >= expected);
}

#[test]
fn health_and_readiness_are_served() {
    if !needs::met("health pages", needs::AGENTS) {
        return;
    }
    let echo = Echo::new();
    let ingress: SocketAddr = (Ipv4Addr::LOCALHOST, ports::free()).into();
    let mut pair = Plan::default().service("echo", echo.address, "").forward("echo", ingress).start();
    for (_, agent) in pair.ends() {
        assert_eq!(agent.get("/healthz").unwrap().status, 200);
        assert_eq!(agent.get("/readyz").unwrap().status, 200);
        assert_eq!(agent.get("/elsewhere").unwrap().status, 404);
        // Only a build for tests panics on demand.
        assert_eq!(agent.get("/fault/worker").unwrap().status, 404);
        assert_eq!(agent.get("/healthz").unwrap().status, 200);
    }
    assert_eq!(pair.exit.terminate().code(), Some(0));
    // The entry without its exit is alive all the same.
    assert_eq!(pair.entry.get("/healthz").unwrap().status, 200);
    assert!(pair.exit.get("/healthz").is_err());
}
