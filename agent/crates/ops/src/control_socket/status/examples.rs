//! Examples of what a status is made of.

use std::sync::Arc;

use dataplane::{lines::CopyCounts, relay::Account};
use engine::{origin::PeerOrigin, reach::Failure, status::PeerFigures};

use super::*;

pub(super) const KEY: &str = "bYSIEhy5wmscRtaGPXZXQJ_z71gzt0VIOrC_gSKcVMA";

pub(super) fn counts(counts: &[(&'static str, u64)]) -> Counts {
    counts.iter().map(|(name, count)| ((*name).into(), *count)).collect()
}

pub(super) fn account(received: u64, delivered: u64, dropped: u64) -> Accounting {
    Accounting {
        account: Account { received, received_bytes: received * 1_000, delivered, ..Account::default() },
        delivered_bytes: delivered * 1_000,
        queued: received - delivered - dropped,
        dropped,
        balances: true,
        ..Accounting::default()
    }
}

pub(super) fn details() -> LaneDetails {
    LaneDetails {
        connection_id: "0011223344556677".to_owned(),
        next_packet: 11,
        largest_acked: Some(9),
        largest_received: None,
        unacknowledged: 1,
        ack_delay_seconds: 0.003,
        rtt_latest_seconds: Some(0.012),
        rtt_min_seconds: Some(0.011),
        rtt_variation_seconds: 0.000_5,
        pto_seconds: 0.039,
        probes: 0,
        silent_seconds: None,
        delivery_bytes_per_second: Some(125_000),
        acked_packets: 10,
        datagrams_sent: 8,
        datagrams_received: 7,
        ack_packets_sent: 2,
        ack_packets_received: 3,
        duplicates: 4,
        too_old: 5,
        authentication_failures: 6,
        mtu_probes_sent: 2,
        mtu_probes_lost: 1,
        black_holes: 0,
        key_updates_begun: 1,
        waiting_datagrams: 3,
        waiting_bytes: 4_200,
        blocked: true,
    }
}

pub(super) fn lane() -> LaneStatus {
    LaneStatus {
        index: 0,
        epoch: 1,
        worker: 1,
        state: "up".into(),
        age_seconds: 61.0,
        heard_seconds: Some(0.002),
        local_address: "192.0.2.2:5".parse().ok(),
        remote_address: "192.0.2.1:4433".parse().ok(),
        rates: Some(LaneRates {
            sent_bytes_per_second: 150_000_000.0,
            sent_packets_per_second: 130_000.0,
            received_bytes_per_second: 0.0,
            received_packets_per_second: 0.0,
            lost_packets_per_second: 3.0,
        }),
        sent_packets: 11,
        sent_bytes: 12_345,
        received_packets: 12,
        received_bytes: 999,
        lost_packets: 20,
        spuriously_lost_packets: 2,
        reordered_packets: 9,
        reordering_seconds: Some(0.031),
        in_flight_packets: 7,
        in_flight_bytes: 8_400,
        rtt_seconds: Some(0.0123),
        key_updates: 3,
        key_phase: 1,
        key_update_under_way: true,
        sealed_with_keys: 5,
        packet_bytes: 1452,
        path_packet_bytes: 1460,
        mtu_search: true,
        gso: "failed".into(),
        gro: true,
        flows: 1,
        details: Some(details()),
    }
}

pub(super) fn lines() -> Vec<LineStatus> {
    let dsl = LineStatus {
        number: 0,
        name: "dsl".into(),
        state: LineState::InUse,
        lanes_up: 2,
        rtt_seconds: Some(0.012_3),
        packet_bytes: Some(1_452),
        sent_bytes_per_second: 1_250_000.0,
        sent_packets: 70,
        sent_bytes: 64_000_000,
        received_packets: 60,
        received_bytes: 9_000,
        lost_packets: 3,
        rate_bits_per_second: Some(48_000_000),
        ..LineStatus::default()
    };
    let lte = LineStatus {
        number: 1,
        name: "lte".into(),
        state: LineState::Suspect,
        cause: Some("silent".into()),
        metered: true,
        suspicions: 4,
        ..LineStatus::default()
    };
    vec![dsl, lte]
}

pub(super) fn uplink() -> UplinkStatus {
    UplinkStatus {
        name: "dsl".to_owned(),
        way: "interface eth0".to_owned(),
        sent_bytes: 64_000_000,
        received_bytes: 9_000,
        month_bytes: 412_000_000_000,
        month_until_unix: 1_780_272_000,
    }
}

pub(super) fn flow() -> FlowStatus {
    FlowStatus {
        number: 5,
        service: "dns".into(),
        opened_by: "here".into(),
        local_address: "127.0.0.1:9".parse().ok(),
        standing: "confirmed".into(),
        lane: Some(1),
        on_lane: Some(0),
        worker: 1,
        silent_seconds: 0.25,
        idle_seconds: 60.0,
    }
}

pub(super) fn forward(id: &str, stalled_seconds: Option<f64>) -> ForwardStatus {
    ForwardStatus {
        id: id.to_owned(),
        service: "web".into(),
        opened_by: "here".into(),
        local_address: "127.0.0.1:40000".parse().ok(),
        state: "open".into(),
        age_seconds: 3_700.0,
        uplink_bytes: 1_000,
        downlink_bytes: 64_000_000,
        stalled_seconds,
        stopped: stalled_seconds.map(|_| "here".into()),
        worker: 1,
    }
}

pub(super) fn send_error() -> SendError {
    SendError {
        age_seconds: 61.0,
        reason: "this host refuses to send 1200 bytes to 192.0.2.1:4433: Operation not permitted".to_owned(),
        remedy: "a firewall rule".into(),
        count: 7,
    }
}

pub(super) fn talker() -> TalkerStatus {
    TalkerStatus {
        peer: "exit".into(),
        protocol: 6,
        here: Some("10.1.0.9".to_owned()),
        there: Some("10.2.0.1".to_owned()),
        seconds: 10.0,
        uplink_packets: 1_000,
        uplink_bytes: 1_250_000,
        downlink_packets: 500,
        downlink_bytes: 25_000,
    }
}

pub(super) fn rate() -> RateStatus {
    RateStatus {
        bits_per_second: 48_000_000,
        from: "measured".into(),
        delay_p50_seconds: Some(0.000_5),
        delay_p99_seconds: Some(0.007),
        marked: 12,
        auto: Some(AutoRateStatus {
            phase: "steady".into(),
            capacity_bits_per_second: 49_000_000,
            delivered_bits_per_second: 47_500_000,
            queue_delay_seconds: 0.001_2,
            path_loss_share: 0.01,
            congested: true,
            reports: 700,
        }),
    }
}

pub(super) fn repair() -> RepairStatus {
    RepairStatus {
        state: "retransmit".into(),
        deadline_seconds: Some(0.2),
        sent: 90,
        numbered: 80,
        retransmitted: 4,
        overhead: Some(0.031),
        received: 70,
        missing: 5,
        missing_share: Some(0.066),
        came_again: 4,
        given_up: 1,
        added_delay_seconds: Some(0.081),
        added_delay_p50_seconds: Some(0.0),
        added_delay_p99_seconds: Some(0.09),
        bytes: 200_000,
        ..RepairStatus::default()
    }
}

fn copies() -> CopyCounts {
    CopyCounts { numbered: 90, sent: 80, sent_bytes: 16_000, alone: 10, first: 70, duplicates: 65, old: 1 }
}

pub(super) fn connected() -> PeerStatus {
    PeerStatus {
        name: "exit".into(),
        public_keys: vec![KEY.to_owned()],
        allowed_ips: vec!["10.9.0.1/32".to_owned(), "10.1.0.0/16".to_owned()],
        origin: PeerOrigin::Config,
        state: PeerState::Connected,
        address: "192.0.2.1:4433".parse().ok(),
        way: Some(WayStatus { over: "both".into(), since_seconds: 125.0, because: "udp_silent".into() }),
        carrier_error: Some(CarrierError {
            age_seconds: 65.0,
            reason: "the web server answers 302 (location: http://portal/)".to_owned(),
        }),
        since_seconds: Some(7384.9),
        software: Some("culvert/0.1.0".into()),
        preshared_keys: 2,
        preshared_key_in_use: Some(1),
        uses_previous_key: false,
        mode: Some("lanes".into()),
        key_exchange: Some("x25519mlkem768".into()),
        rtt_seconds: Some(0.0123),
        ports_age_seconds: Some(31.0),
        rtt_min_seconds: Some(0.0101),
        lanes_up: 1,
        lines: lines(),
        flows: 3,
        tcp_streams: 3,
        tcp: TcpStatus {
            uplink_bytes: 2_500,
            downlink_bytes: 75_000_000,
            stalled: 1,
            services: vec![TcpServiceStatus {
                service: "web".into(),
                open: 3,
                uplink_bytes: 2_500,
                downlink_bytes: 75_000_000,
            }],
        },
        streams: Some(StreamsStatus {
            congestion: "bbr".into(),
            connections: 1,
            window_bytes: 4_000_000,
            pacing_bytes_per_second: 25_000_000,
            delivery_bytes_per_second: 24_000_000,
        }),
        link_local: vec!["fe80::9fef:fb02:4102:57d4".parse().unwrap()],
        inner_mtu: Some(1421),
        largest_datagram: Some(1417),
        rates: Some(PeerRates {
            uplink_bytes_per_second: 145_000_000.0,
            uplink_datagrams_per_second: 126_000.0,
            downlink_bytes_per_second: 12.0,
            downlink_datagrams_per_second: 0.5,
            tcp_downlink_bytes_per_second: 1_000_000.0,
            ..PeerRates::default()
        }),
        queue: QueueStatus { datagrams: 2, bytes: 2_000, age_seconds: 0.004 },
        rate: Some(rate()),
        quota: Some(QuotaStatus {
            bytes: 500_000_000_000,
            used_bytes: 412_000_000_000,
            until_unix: 1_780_272_000,
            state: "free".into(),
        }),
        repair: Some(repair()),
        copies: Some(copies()),
        lane_packets: LanePackets {
            sent: 10_000,
            received: 12,
            lost: 20,
            spuriously_lost: 2,
            reordered: 9,
            reordering_seconds: Some(0.031),
            lost_share: Some(0.002),
            lost_share_last_second: Some(0.000_23),
        },
        uplink: account(100, 95, 3),
        downlink: account(9, 2, 7),
        dropped: BTreeMap::from([
            ("downlink".into(), counts(&[("spoofed", 7)])),
            ("uplink".into(), counts(&[("expired", 2), ("too_large", 1)])),
        ]),
        lanes: vec![lane()],
        stream_connections: vec![StreamConnectionStatus {
            number: 1,
            worker: 1,
            state: "up".into(),
            dialled_by: "here".into(),
            forwards: 5,
        }],
        recent_flows: vec![flow()],
        forwards: vec![forward("5f3a9c-17", Some(125.0)), forward("5f3a9c-9", None)],
        send_error: Some(send_error()),
        contested: Some(ContestedStatus {
            addresses: vec!["192.0.2.13:5".to_owned(), "192.0.2.14:6".to_owned()],
            age_seconds: 2.0,
        }),
        last_error: None,
        more: PeerFigures::default(),
    }
}

pub(super) fn device() -> TunStatus {
    let direction = TunDirection {
        packets: 1_000,
        bytes: 1_400_000,
        super_packets: 20,
        tunnel_super_packets: 7,
        errors: 0,
        kernel_drops: Some(4),
        packets_per_second: Some(500.0),
        bytes_per_second: Some(700_000.0),
    };
    TunStatus {
        name: "culvert0".into(),
        up: Some(true),
        mtu: Some(1421),
        addresses: vec!["10.9.0.1/24".to_owned(), "fe80::9fef:fb02:4102:57d4/64".to_owned()],
        tcp_offload: true,
        udp_offload: false,
        tunnels_cut: true,
        tunnels_joined_ipv4: true,
        tunnels_joined_ipv6: false,
        uplink: direction.clone(),
        downlink: TunDirection { kernel_drops: None, bytes_per_second: None, ..direction },
        multicast_copies: 3,
        dropped: counts(&[("no_route", 2)]),
        meanings: [("no_route".into(), "goes to nobody".into())].into_iter().collect(),
        answers: counts(&[("unreachable", 1)]),
    }
}

pub(super) fn service() -> ServiceStatus {
    ServiceStatus {
        name: "dns".to_owned(),
        upstream: vec![UpstreamStatus {
            target: "dns.example:53".to_owned(),
            addresses: vec!["192.0.2.53:53".parse().unwrap()],
            failure: Some("192.0.2.53:53: Connection refused".to_owned()),
            failed_seconds: Some(5.0),
        }],
    }
}

pub(super) fn user() -> UserStatus {
    UserStatus {
        name: "anna".to_owned(),
        rate_bits_per_second: Some(20_000_000),
        addresses: vec!["10.9.1.7".to_owned(), "fd09:1::7".to_owned()],
        sessions: 2,
        sessions_total: 5,
        seen_seconds: Some(61),
        bytes: counts(&[("from_user", 700), ("to_user", 9_000)]),
        datagrams: counts(&[("from_user", 7)]),
        dropped_from_user: counts(&[("queue_full", 1)]),
        dropped_to_user: counts(&[("unsent", 2)]),
        refused: counts(&[("address", 4)]),
    }
}

/// An agent of which everything is known.
pub(super) fn full() -> Status {
    let error = LastError {
        age_seconds: 90.0,
        failure: Arc::new(Failure {
            reason: "no answer".to_owned(),
            causes: vec!["the clock is off".into(), "the key is wrong".into()],
        }),
    };
    let dialling = PeerStatus {
        name: "b".into(),
        state: PeerState::Dialling,
        last_error: Some(error),
        ..PeerStatus::default()
    };
    let refusal = Refusal {
        age_seconds: 3.0,
        source: "192.0.2.7:1".to_owned(),
        count: 5,
        reason: "not on the allowlist".to_owned(),
        public_key: None,
    };
    let used = |used| Used { used, limit: 1_000 };
    Status {
        software: "1.2.3".to_owned(),
        commit: Some("0123456789ab 2026-11-27".to_owned()),
        host: "gw1".to_owned(),
        public_key: KEY.to_owned(),
        uptime_seconds: 61.0,
        workers: 2,
        cpus: 4,
        unanswered_workers: vec![1],
        peer_file_problems: vec!["peers/b.toml:3: lanes: is 65".to_owned()],
        drain: Some(Drain { waiting: 2, closed: 1 }),
        web_server: Some(WebServerStatus {
            addresses: vec!["0.0.0.0:443".to_owned()],
            connections: used(3),
            certificate_seconds_left: Some(5_184_000),
        }),
        peers: vec![connected(), dialling],
        lanes_left_out: 7,
        uplinks: vec![uplink()],
        totals: Totals { uplink: account(100, 95, 3), downlink: account(9, 2, 7) },
        tun: Some(device()),
        routes: vec![RouteStatus {
            prefix: "10.1.0.0/16".to_owned(),
            peers: vec![RoutePeerStatus {
                name: "exit".into(),
                state: "carries".into(),
                priority: 1,
                weight: 1,
            }],
        }],
        talkers: vec![talker()],
        services: vec![service()],
        sockets: vec![SocketStatus {
            role: "quic_dial".into(),
            open: 2,
            received_datagrams: 10,
            received_bytes: 100,
            sent_datagrams: 20,
            sent_bytes: 200,
            would_block: 1,
            send_failures: 3,
            gso_fallbacks: 4,
            refusals: 5,
            kernel_drops: 6,
        }],
        limits: LimitsStatus {
            peers: used(2),
            open_peers: used(0),
            flows: used(3),
            flows_per_peer: used(3),
            queue_bytes: used(0),
            tcp_streams_per_peer: used(0),
            tcp_streams: used(0),
            stream_bytes: used(0),
            repair_bytes: used(0),
            handshakes: used(1),
            used_tokens: used(0),
            decoy_flows: used(0),
            descriptors: used(44),
        },
        handshakes: counts(&[("established", 3), ("failed", 1), ("ignored", 0)]),
        gate: counts(&[("mac", 0)]),
        meanings: [("spoofed".into(), "is of another source".into())].into_iter().collect(),
        refusals: vec![refusal],
        users: vec![user()],
    }
}
