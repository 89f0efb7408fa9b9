//! Every metric of the agent, one line each: handle, kind, name, meaning.
//!
//! A group is bound to the values of its labels once, and its handles are then set without looking anything up.
//! Kinds: `counter` counts up ([`Published`]); `level` is the sum of what its sources hold ([`Level`]);
//! `gauge` is set by a single owner; `sizes` and `ages` are histograms ([`PublishedHistogram`]). Families at the end, whose last label is an enum of some other module, are bound
//! with [`Labelled::bind`](crate::metrics::Labelled::bind).

use prometheus::{Gauge, GaugeVec, IntCounterVec, IntGaugeVec};

use crate::metrics::{HistogramVec, Level, Metrics, MetricsError, Published, PublishedHistogram, Registrar};

macro_rules! family {
    (counter) => {
        IntCounterVec
    };
    (level) => {
        IntGaugeVec
    };
    (flag) => {
        IntGaugeVec
    };
    (gauge) => {
        GaugeVec
    };
    (sizes) => {
        HistogramVec
    };
    (ages) => {
        HistogramVec
    };
}

macro_rules! handle {
    (counter) => {
        Published
    };
    (level) => {
        Level
    };
    (flag) => {
        IntGauge
    };
    (gauge) => {
        Gauge
    };
    (sizes) => {
        PublishedHistogram
    };
    (ages) => {
        PublishedHistogram
    };
}

macro_rules! metrics {
    (
        $( $(#[$doc:meta])* group $group:ident($($label:ident),*) {
            $( $handle:ident: $kind:ident $name:literal, $help:literal; )*
        } )*
        families {
            $( $family:ident: $family_kind:ident $family_name:literal [$($family_label:ident),*], $family_help:literal; )*
        }
    ) => {
        /// All families of the registry; handles are bound from them.
        pub struct Families {
            $( $( $handle: family!($kind), )* )*
            $( #[doc = $family_help] pub $family: family!($family_kind), )*
        }

        impl Families {
            pub(super) fn register(registrar: &mut Registrar) -> Result<Self, MetricsError> {
                Ok(Self {
                    $( $( $handle: registrar.$kind($name, $group::LABELS, $help)?, )* )*
                    $( $family: registrar.$family_kind($family_name, &[$(stringify!($family_label)),*], $family_help)?, )*
                })
            }
        }

        $(
            $(#[$doc])*
            #[derive(Debug)]
            pub struct $group {
                $( #[doc = $help] pub $handle: handle!($kind), )*
            }

            impl $group {
                /// The names of the labels that [`bind`](Self::bind) takes values for.
                pub const LABELS: &[&str] = &[$(stringify!($label)),*];

                /// Binds the handles to these label values; each then shows its value, zero at first.
                pub fn bind(metrics: &Metrics, $($label: &str),*) -> Self {
                    let families = metrics.families();
                    let values: &[&str] = &[$($label),*];
                    Self { $( $handle: families.$handle.with_label_values(values).into(), )* }
                }

                /// Removes these label values from what is shown; handles that are still bound count unseen.
                pub fn forget(metrics: &Metrics, $($label: &str),*) {
                    let families = metrics.families();
                    let values: &[&str] = &[$($label),*];
                    // Values that were never bound are an error, and nothing is left to do.
                    $( families.$handle.remove_label_values(values).ok(); )*
                }
            }
        )*
    };
}

metrics! {
    /// One peer on one worker.
    group PeerMetrics(peer) {
        peer_connected: level "culvert_peer_connected", "Established control connections of the peer.";
        peer_endpoints: gauge "culvert_peer_endpoints", "Endpoints at which the peer is dialled, as configured; 0 if only the peer can connect.";
        peer_lanes: gauge "culvert_peer_lanes", "Lanes of the peer that carry payloads.";
        peer_lanes_wanted: gauge "culvert_peer_lanes_wanted", "Lanes that the connected peer is to have; 0 in standard mode, and while it is not connected.";
        peer_rtt: gauge "culvert_peer_rtt_seconds", "Smoothed round-trip time of the first lane, in standard mode of the control connection; 0 while it is not known.";
        peer_stream_window: level "culvert_peer_stream_window_bytes", "Bytes that congestion control lets be in flight on the peer's control and stream connections.";
        peer_stream_pacing: level "culvert_peer_stream_pacing_bytes_per_second", "Rate at which packets of those connections leave; 0 with peer.congestion = \"cubic\" and before the first round trip.";
        peer_stream_delivery: level "culvert_peer_stream_delivery_bytes_per_second", "Rate at which data of those connections last arrived at the peer, from its acknowledgements.";
        flows: level "culvert_flows", "UDP sessions now known, of both openers.";
        flows_opened: counter "culvert_flows_opened_total", "Flows opened, of both openers.";
        lane_packets_sent: counter "culvert_lane_packets_sent_total", "QUIC packets sent on lanes.";
        lane_packets_received: counter "culvert_lane_packets_received_total", "QUIC packets received on lanes that passed authentication and the replay window.";
        lane_packets_acked: counter "culvert_lane_packets_acked_total", "Packets sent on lanes that the peer acknowledged.";
        lane_packets_lost: counter "culvert_lane_packets_lost_total", "Packets sent on lanes and declared lost.";
        lane_packets_spuriously_lost: counter "culvert_lane_packets_spuriously_lost_total", "Packets declared lost and acknowledged later.";
        lane_mtu_probes: counter "culvert_lane_mtu_probes_total", "Packets sent on lanes to find out how large the path lets them be.";
        lane_mtu_probes_lost: counter "culvert_lane_mtu_probes_lost_total", "MTU probes declared lost, most of them for their size; no other count of losses holds them.";
        lane_black_holes: counter "culvert_lane_black_holes_total", "Times that a lane's path stopped carrying packets of the size in use.";
        lane_packet_bytes: gauge "culvert_lane_packet_bytes", "Largest packet that the peer's lanes send now, in bytes of UDP payload.";
        peer_oversized: counter "culvert_peer_oversized_total", "Payloads for the peer dropped because they fit into no packet to it (reason too_large).";
        peer_spoofed: counter "culvert_peer_spoofed_total", "IP packets from the peer dropped because their source address is not its own (reason spoofed).";
        peer_inner_mtu: gauge "culvert_peer_inner_mtu_bytes", "Largest IP packet that fits into one packet to the peer; 0 while that is not known.";
        queue_packets: level "culvert_queue_packets", "Payloads waiting in the relay's queue.";
        queue_bytes: level "culvert_queue_bytes", "Bytes of payload waiting in the relay's queue.";
        queue_age: gauge "culvert_queue_age_seconds", "Age of the oldest payload in the relay's queue.";
        queue_limit_packets: level "culvert_queue_limit_packets", "Payloads that may wait in the relay's queue, all workers together.";
        queue_limit_bytes: level "culvert_queue_limit_bytes", "Bytes of payload that may wait in the relay's queue, all workers together.";
        queue_limit_age: gauge "culvert_queue_limit_seconds", "How long a payload may wait before it is dropped.";
        peer_tcp_streams: level "culvert_peer_tcp_streams", "TCP forwards now open with the peer.";
        reassembly_bytes: level "culvert_reassembly_bytes", "What datagrams of the peer take of which pieces are missing, all workers together.";
    }

    /// One direction of one peer on one worker: received = delivered + queued + dropped.
    group PeerDirectionMetrics(peer, direction) {
        peer_datagrams_received: counter "culvert_peer_datagrams_received_total", "Payloads that entered the agent for or from the peer.";
        peer_datagrams_delivered: counter "culvert_peer_datagrams_delivered_total", "Payloads handed to the kernel.";
        peer_datagrams_dropped: counter "culvert_peer_datagrams_dropped_total", "Payloads dropped for any reason.";
        peer_datagrams_queued: level "culvert_peer_datagrams_queued", "Payloads inside the agent: neither delivered nor dropped yet.";
        peer_bytes_received: counter "culvert_peer_bytes_received_total", "Bytes of the payloads received.";
        peer_bytes_delivered: counter "culvert_peer_bytes_delivered_total", "Bytes of the payloads delivered.";
        peer_tun_packets: counter "culvert_peer_tun_packets_total", "IP packets from the TUN device for the peer (uplink) or from the peer for the device (downlink); they are among the payloads received.";
        peer_tun_bytes: counter "culvert_peer_tun_bytes_total", "Bytes of those IP packets.";
        peer_fragmented: counter "culvert_peer_fragmented_datagrams_total", "Payloads that fitted into no packet and were put into packets in pieces (uplink), or were put together from pieces (downlink).";
        peer_pieces: counter "culvert_peer_pieces_total", "Pieces of such payloads that were put into packets (uplink) or came (downlink).";
    }

    /// All sockets of one use on one worker.
    group SocketMetrics(socket) {
        socket_received_buffers: counter "culvert_socket_received_buffers_total", "Buffers received; GRO joins several datagrams into one.";
        socket_received_datagrams: counter "culvert_socket_received_datagrams_total", "Datagrams received.";
        socket_received_bytes: counter "culvert_socket_received_bytes_total", "Bytes of UDP payload received.";
        socket_receive_calls: counter "culvert_socket_receive_calls_total", "System calls that received something.";
        socket_sent_datagrams: counter "culvert_socket_sent_datagrams_total", "Datagrams handed to the kernel.";
        socket_sent_bytes: counter "culvert_socket_sent_bytes_total", "Bytes of UDP payload handed to the kernel.";
        socket_send_calls: counter "culvert_socket_send_calls_total", "System calls that sent something.";
        socket_gso_messages: counter "culvert_socket_gso_messages_total", "Messages that the kernel cut into segments.";
        socket_gso_segments: counter "culvert_socket_gso_segments_total", "Segments of those messages.";
        socket_gso_fallbacks: counter "culvert_socket_gso_fallbacks_total", "Times that GSO was turned off for a destination after an error.";
        socket_would_block: counter "culvert_socket_would_block_total", "Sends that found the kernel's send buffer full.";
        socket_send_failures: counter "culvert_socket_send_failures_total", "Datagrams that the kernel refused to send.";
        socket_refusals: counter "culvert_socket_refusals_total", "ICMP errors that the kernel reported about datagrams sent earlier: nobody listens there.";
        socket_truncated: counter "culvert_socket_truncated_total", "Received buffers that were longer than ours.";
        socket_kernel_drops: counter "culvert_socket_kernel_drops_total", "Buffers (not datagrams) that the kernel dropped because the receive buffer was full.";
        socket_kernel_queue: level "culvert_socket_kernel_queue_bytes", "Kernel memory of the buffers that waited to be read when the sockets were last looked at, which is once a second.";
        socket_receive_batch: sizes "culvert_socket_receive_batch_datagrams", "Datagrams that one system call received.";
        socket_send_segments: sizes "culvert_socket_send_segments", "Datagrams of one message that was sent; above 1 the kernel cut it.";
        socket_receive_age: ages "culvert_socket_receive_age_seconds", "How long received buffers (not datagrams) waited in the kernel, sampled in one call of 16.";
    }

    /// One direction of all lanes of one worker.
    group LaneDirectionMetrics(direction) {
        lane_ack_packets: counter "culvert_lane_ack_packets_total", "Lane packets without payload, sent (uplink) or received (downlink).";
        lane_ack_frames: counter "culvert_lane_ack_frames_total", "ACK frames on lanes, sent (uplink) or received (downlink).";
        lane_datagram_frames: counter "culvert_lane_datagram_frames_total", "DATAGRAM frames on lanes, sent (uplink) or received (downlink).";
    }

    /// The lanes of one index, of all peers, of one worker.
    group LaneIndexMetrics(lane) {
        lane_flows: level "culvert_lane_flows", "Flows by the index of the lane that they belong on, of all peers: how evenly they are striped.";
        lane_sent_bytes: counter "culvert_lane_sent_bytes_total", "Bytes of UDP payload sent on the lanes of this index, of all peers.";
        lane_tun_packets: counter "culvert_lane_tun_packets_total", "IP packets from the TUN device by the index of the lane that the hash of their flow gave them, of all peers: how evenly they are striped.";
        lane_received_bytes: counter "culvert_lane_received_bytes_total", "Bytes of UDP payload received and authenticated on the lanes of this index, of all peers.";
    }

    /// One direction of all control connections of one worker.
    group ControlMetrics(direction) {
        control_messages: counter "culvert_control_messages_total", "Control messages, sent (uplink) or received (downlink).";
        control_datagrams: counter "culvert_control_datagrams_total", "UDP datagrams of control connections, sent (uplink) or received (downlink).";
        control_bytes: counter "culvert_control_bytes_total", "Bytes of UDP payload of those datagrams.";
        control_ack_frames: counter "culvert_control_ack_frames_total", "ACK frames on control connections, sent (uplink) or received (downlink).";
        control_datagram_frames: counter "culvert_control_datagram_frames_total", "DATAGRAM frames on control connections (standard mode), sent (uplink) or received (downlink).";
    }

    /// One direction of all TCP forwards of one worker.
    group TcpDirectionMetrics(direction) {
        tcp_bytes: counter "culvert_tcp_bytes_total", "Bytes of TCP payload forwarded.";
    }

    /// One direction between strangers and the decoy, of one worker.
    group DecoyMetrics(direction) {
        decoy_datagrams: counter "culvert_decoy_datagrams_total", "Datagrams that came from strangers (to_decoy) or from the decoy (to_stranger); those that were not dropped went on.";
        decoy_bytes: counter "culvert_decoy_bytes_total", "Bytes of UDP payload of those datagrams.";
    }

    /// One direction of the TUN device on one worker: uplink is from the device, downlink to it.
    group TunDirectionMetrics(direction) {
        tun_packets: counter "culvert_tun_packets_total", "IP packets read from the TUN device (uplink) or written to it (downlink), super-packets and fragments cut; a super-packet that goes to no peer counts as one.";
        tun_bytes: counter "culvert_tun_bytes_total", "Bytes that were read or written, headers of super-packets once.";
        tun_calls: counter "culvert_tun_calls_total", "System calls that read or wrote a packet or super-packet.";
        tun_super_packets: counter "culvert_tun_super_packets_total", "Super-packets (TSO, USO) that were read or written.";
        tun_errors: counter "culvert_tun_errors_total", "Reads and writes of packets that the kernel refused or that could not be understood.";
    }

    /// What one worker counts without labels.
    group WorkerMetrics() {
        tun_mss_clamped: counter "culvert_tun_mss_clamped_total", "TCP SYNs whose maximum segment size was lowered to what fits into a packet to the peer.";
        tun_answers_withheld: counter "culvert_tun_icmp_withheld_total", "ICMP messages to senders of IP packets that were due and not sent, because their rate is limited.";
        tun_buckets_moved: counter "culvert_tun_flows_moved_total", "Times that IP packets of one hash went to another lane because theirs was dead or drained.";
        flows_moved: counter "culvert_flows_moved_total", "Flows that moved to another lane because theirs was dead or drained.";
        gate_used_tokens: level "culvert_gate_used_tokens", "Knocks that were used and are remembered, so that none works twice.";
        send_buffer_bytes: level "culvert_send_buffer_bytes", "What the outboxes of QUIC sockets take, those kept for the next ones included; at most 38 MiB for each worker.";
        connections: level "culvert_connections", "QUIC connections, half-open ones included.";
        control_packets_sent: counter "culvert_control_packets_sent_total", "QUIC packets sent on control connections.";
        control_packets_lost: counter "culvert_control_packets_lost_total", "QUIC packets sent on control connections and declared lost.";
        control_packets_blocked: counter "culvert_control_packets_blocked_total", "Datagrams of control connections that found no room in the socket; QUIC sends again what they held.";
        control_black_holes: counter "culvert_control_black_holes_total", "Times that a control connection's path stopped carrying packets of the size in use.";
        lane_probes: counter "culvert_lane_probes_total", "Packets sent on lanes because the last ones stayed unacknowledged.";
        lane_window_overflows: counter "culvert_lane_window_overflows_total", "Packets sent on lanes whose fate is unknown, because too many were unacknowledged to remember them.";
        gate_journal_errors: counter "culvert_gate_journal_errors_total", "Times that used knocks could not be written down; after a restart none of before would be trusted.";
        lane_packets_unopened: counter "culvert_lane_packets_unopened_total", "Packets on lanes that were dropped unopened: their peers asked for most of a worker that fell behind.";
        turns_full: counter "culvert_turns_full_total", "Turns that ended before all sources of a kind (underlay, local, device) were served, because those before them had all of its budget; the others come first in the next turn.";
        tcp_streams: level "culvert_tcp_streams", "TCP forwards now open.";
        stream_bytes: level "culvert_stream_bytes", "Bytes that TCP forwards of all peers may hold unread or unacknowledged: their windows.";
        tcp_accept_pauses: counter "culvert_tcp_accept_pauses_total", "Times that connections were left in the listen backlog because there was no room for another TCP forward, or the peer was in doubt.";
        stream_connections: level "culvert_stream_connections", "Connections that carry TCP forwards beside the control connections.";
        stream_connections_opened: counter "culvert_stream_connections_opened_total", "Stream connections that came up.";
        decoy_flows: level "culvert_decoy_flows", "Strangers whose datagrams go to the decoy.";
        decoy_flows_opened: counter "culvert_decoy_flows_opened_total", "Strangers who got a socket to the decoy.";
        tcp_streams_opened: counter "culvert_tcp_streams_opened_total", "TCP forwards begun by either end, those that were then refused included.";
    }

    families {
        build_info: level "culvert_build_info" [version], "Always 1; the label is the program's version.";
        reloads: counter "culvert_reloads_total" [outcome], "Reloads by outcome: done, also where nothing had changed; refused, because the configuration was wrong; failed.";
        reload_successful: level "culvert_config_last_reload_successful" [], "1 if the last reload put its configuration into effect, 0 if the old one still runs.";
        reload_time: gauge "culvert_config_last_reload_success_timestamp_seconds" [], "When the configuration that runs was read, since the Unix epoch.";
        limit: level "culvert_limit" [limit], "Ceilings of the section limits, by key; those on what grows.";
        limit_reached: counter "culvert_limit_reached_total" [limit], "Times that something was refused, dropped or gave way because a ceiling was reached, by its key in the section limits; sockets, used_tokens, flow_rate and control_messages have none there.";
        ready: level "culvert_ready" [], "1 if the agent carries traffic, 0 while it starts or drains, or once its TUN device is gone.";
        workers: level "culvert_workers" [], "Threads that move packets.";
        worker_beats: counter "culvert_worker_beats_total" [worker], "Times that a worker showed that it is alive: at least once a second.";
        peers: level "culvert_peers" [origin], "Peers that are known, by how: of the configuration (config), added at run time (state), let in by open mode (open).";
        datagrams_dropped: counter "culvert_datagrams_dropped_total" [direction, reason], "Payloads dropped, by reason; the sum equals that over all peers as long as none was removed.";
        flow_messages: counter "culvert_flow_messages_total" [direction, kind], "Flow signals (open, confirmed, refused, unknown, closed), sent (uplink) or received (downlink).";
        flows_evicted: counter "culvert_flows_evicted_total" [reason], "Flows forgotten, by reason.";
        lanes: level "culvert_lanes" [state], "Lanes by state.";
        lanes_reopened: counter "culvert_lanes_reopened_total" [reason], "Lanes that were opened again or refused, by reason.";
        sessions_doubted: counter "culvert_sessions_doubted_total" [reason], "Sessions beside which the peer was dialled anew, or would be if this end had an endpoint.";
        path_moves: counter "culvert_path_moves_total" [what], "Addresses that changed while the session went on: of the far end, as a lane or a control connection sees it, or our own (socket).";
        lane_refused_packets: counter "culvert_lane_refused_packets_total" [reason], "Packets to a lane's connection ID that were not accepted, by reason.";
        lane_key_updates: counter "culvert_lane_key_updates_total" [initiator], "Key updates of lanes, by the end that began them: local or remote.";
        handshakes_pending: level "culvert_handshakes_pending" [worker], "Handshakes that others have begun and not completed; each worker has its share of limits.handshakes.";
        handshakes: counter "culvert_handshakes_total" [outcome], "Handshakes of control connections, by outcome.";
        refused_datagrams: counter "culvert_refused_datagrams_total" [reason], "Datagrams at the QUIC sockets that did not reach a connection or a lane, by reason.";
        gate_datagrams: counter "culvert_gate_datagrams_total" [step], "Datagrams at the gate, by the step at which they ended.";
        control_message_errors: counter "culvert_control_message_errors_total" [reason], "Control messages that could not be used, by reason.";
        handed_over: counter "culvert_handed_over_datagrams_total" [kind], "Datagrams handed to another worker, because their connection, lane or flow lives there.";
        taken_over: counter "culvert_taken_over_datagrams_total" [kind], "Datagrams taken from another worker.";
        hand_over_dropped: counter "culvert_hand_over_dropped_datagrams_total" [kind], "Datagrams dropped because another worker did not take what waits for it.";
        decoy_drops: counter "culvert_decoy_drops_total" [direction, reason], "Datagrams of strangers or of the decoy that were dropped, by reason; no_decoy counts those that met silence.";
        tun_dropped: counter "culvert_tun_dropped_packets_total" [reason], "IP packets of the TUN device that went to no peer, by reason; those that did are among the peer's payloads.";
        tun_answers: counter "culvert_tun_icmp_sent_total" [kind], "ICMP messages sent to senders of IP packets that could not be carried, by kind.";
        tun_kernel_dropped: counter "culvert_tun_kernel_dropped_packets_total" [direction], "Packets that the kernel dropped at the TUN device: not read in time (uplink), or not taken (downlink).";
        tun_device: level "culvert_tun_device" [], "1 while the agent has its TUN device, 0 once somebody removed it; not there without a section tun.";
        stream_connections_failed: counter "culvert_stream_connections_failed_total" [reason], "Stream connections that could not be made or were lost, by reason: no socket for one (local), no answer to the handshake (handshake), not let in by the far end (refused), ended while it was in use (lost).";
        tcp_refused: counter "culvert_tcp_refused_total" [reason], "TCP forwards refused, by reason.";
    }
}
