//! The metrics of workers, one line each: name, labels, meaning, and how the value is read from the published snapshots.
//!
//! Values of workers are summed over the workers, values of sockets over the sockets of one role. A counter of the peers under a label
//! ([`PeersOfLabel`]) covers all peers that `ever` had the label, so it never decreases.

use std::{cell::OnceCell, collections::BTreeMap, sync::Arc};

use config::OPEN_LABEL;
use dataplane::{
    lines::CopyCounts,
    relay::{Direction, DropReason, ReportCount},
};
use gate::decoy::DecoyDirection;
use net::stats::Booked;

use crate::{
    control::driver::ControlStats,
    metrics::{Buckets, FamilyInfo, Kind as Type, Samples, Value},
    origin::PeerOrigin,
    status::{
        Accounting, LineState, LineStatus, PeerStatus, QuotaStatus, RateStatus, RepairStatus, StreamsStatus,
        TcpServiceStatus, WayStatus,
    },
    worker::report::stats::{
        DeviceSnapshot, Handshakes, IndexCounts, Published, Snapshots, WorkerSnapshot, label,
    },
};

/// Values of the label `direction`.
const UP: &str = Direction::Uplink.label();

const DOWN: &str = Direction::Downlink.label();

type Labels = &'static [&'static str];

type OfWorker = fn(&WorkerSnapshot, &mut Samples);

type OfSocket = fn(&Booked) -> Value;

type OfPeer = fn(&PeersOfLabel) -> Value;

type Peers = BTreeMap<Arc<str>, PeersOfLabel>;

type OfRepair = fn(&RepairStatus) -> Value;

type OfCopies = fn(&CopyCounts) -> u64;

type OfWay = fn(&Accounting) -> u64;

type OfLine = fn(&LineStatus) -> Value;

type OfService = fn(&TcpServiceStatus) -> Value;

type OfServiceWay = fn(&TcpServiceStatus, Direction) -> u64;

/// The source of a family's values.
enum Read {
    Worker(OfWorker),
    Device(fn(&DeviceSnapshot, &mut Samples)),
    Socket(OfSocket),
    Peer(OfPeer),
    /// Only for peers with which something is repaired: over all that have had the label, and over those that have it now.
    Repair(OfRepair),
    RepairNow(OfRepair),
    /// Only for peers of which something travels on two lines: over all that have had the label.
    Copies(OfCopies),
    /// Of both directions of a peer: over all that have had the label, and over those that have it now.
    Ways(OfWay),
    WaysNow(OfWay),
    /// Of each line of the peers that have several: over the peers that have the label now, and over all that have had it.
    LineNow(OfLine),
    Line(OfLine),
    /// Of the services for which a peer has had TCP forwards: over the peers that have the label now, and over all that have had it.
    ServiceNow(OfService),
    ServiceWays(OfServiceWay),
}

struct Family {
    info: FamilyInfo,
    read: Read,
}

const fn family(kind: Type, name: &'static str, labels: Labels, help: &'static str, read: Read) -> Family {
    Family { info: FamilyInfo { name, kind, labels, help }, read }
}

const fn counter(name: &'static str, labels: Labels, help: &'static str, read: OfWorker) -> Family {
    family(Type::Counter, name, labels, help, Read::Worker(read))
}

const fn gauge(name: &'static str, labels: Labels, help: &'static str, read: OfWorker) -> Family {
    family(Type::Gauge, name, labels, help, Read::Worker(read))
}

const fn repair(name: &'static str, help: &'static str, read: OfRepair) -> Family {
    family(Type::Counter, name, &["peer"], help, Read::Repair(read))
}

const fn copies(name: &'static str, help: &'static str, read: OfCopies) -> Family {
    family(Type::Counter, name, &["peer"], help, Read::Copies(read))
}

const fn socket(kind: Type, name: &'static str, help: &'static str, read: OfSocket) -> Family {
    family(kind, name, &["socket"], help, Read::Socket(read))
}

const fn peer(kind: Type, name: &'static str, help: &'static str, read: OfPeer) -> Family {
    family(kind, name, &["peer"], help, Read::Peer(read))
}

const fn line(kind: Type, name: &'static str, help: &'static str, read: Read) -> Family {
    family(kind, name, &["peer", "line"], help, read)
}

const fn ways(name: &'static str, help: &'static str, read: OfWay) -> Family {
    family(Type::Counter, name, &["peer", "direction"], help, Read::Ways(read))
}

#[rustfmt::skip]
static FAMILIES: &[Family] = &[
    // A peer.
    peer(Type::Gauge, "culvert_peer_connected", "Established control connections of the peer.", |it| it.connected.into()),
    peer(Type::Gauge, "culvert_peer_over_tcp", "1 while packets of the peer's control connection go over TCP, or over both ways.", |it| u64::from(it.own.way.as_ref().is_some_and(WayStatus::is_over_tcp)).into()),
    peer(Type::Gauge, "culvert_peer_endpoints", "Configured endpoints at which the peer is dialled; 0 if only the peer can connect.", |it| it.own.more.endpoints.into()),
    peer(Type::Gauge, "culvert_peer_preshared_key", "The preshared key in use with the connected peer, by its place in peer.preshared_key_file: 1 or 2; 0 without one.", |it| it.own.preshared_key_in_use.unwrap_or(0).into()),
    peer(Type::Gauge, "culvert_peer_lanes", "Lanes of the peer that carry payloads.", |it| it.own.more.owned_lanes.unwrap_or_default().up.into()),
    peer(Type::Gauge, "culvert_peer_lanes_wanted", "Lanes wanted with the connected peer; 0 in standard mode, and while it is not connected.", |it| it.own.more.owned_lanes.unwrap_or_default().wanted.into()),
    line(Type::Gauge, "culvert_line_in_use", "1 while the line carries payloads to the peer.", Read::LineNow(|line| u64::from(line.state == LineState::InUse).into())),
    line(Type::Gauge, "culvert_line_suspect", "1 while packets leave the line for others: it is suspect, or none of its lanes is up.", Read::LineNow(|line| u64::from(line.state <= LineState::Suspect).into())),
    line(Type::Gauge, "culvert_line_lanes", "Lanes on the line that carry payloads.", Read::LineNow(|line| line.lanes_up.into())),
    line(Type::Gauge, "culvert_line_rtt_seconds", "Smoothed round-trip time of a lane on the line; 0 while it is not known.", Read::LineNow(|line| line.rtt_seconds.unwrap_or(0.0).into())),
    line(Type::Gauge, "culvert_line_rate_limit_bytes_per_second", "Limit on what is sent to the peer on the line, in bytes of IP packets a second: uplink.rate, or what an automatic rate is now; 0 without one.", Read::LineNow(|line| (line.rate_bits_per_second.unwrap_or(0) as f64 / 8.0).into())),
    line(Type::Gauge, "culvert_line_queue_bytes", "Bytes of payload waiting for the line.", Read::LineNow(|line| (line.queued_bytes as u64).into())),
    line(Type::Counter, "culvert_line_packets_sent_total", "QUIC packets sent to the peer on lanes of the line.", Read::Line(|line| line.sent_packets.into())),
    line(Type::Counter, "culvert_line_packets_lost_total", "Those of them that were lost, without those that were acknowledged later.", Read::Line(|line| line.lost_packets.into())),
    line(Type::Counter, "culvert_line_sent_bytes_total", "Bytes of UDP payload sent to the peer on lanes of the line.", Read::Line(|line| line.sent_bytes.into())),
    line(Type::Counter, "culvert_line_received_bytes_total", "Bytes of UDP payload received from the peer on lanes of the line.", Read::Line(|line| line.received_bytes.into())),
    copies("culvert_copies_numbered_total", "Payloads sent with a number by which the peer tells a copy, each with a copy on a second line or without.", |it| it.numbered),
    copies("culvert_copies_sent_total", "Copies of them that were sent on a second line; no account has them.", |it| it.sent),
    copies("culvert_copies_sent_bytes_total", "Bytes of those copies.", |it| it.sent_bytes),
    copies("culvert_copies_alone_total", "Payloads that were to travel on two lines and had no copy: no second line was up, or it had no room.", |it| it.alone),
    copies("culvert_copies_first_total", "Numbered payloads of the peer that came for the first time.", |it| it.first),
    copies("culvert_copies_duplicate_total", "Numbered payloads of the peer that came again and were dropped; no account has them.", |it| it.duplicates),
    copies("culvert_copies_old_total", "Numbered payloads of the peer that were dropped because 4,096 newer ones had come; no account has them.", |it| it.old),
    peer(Type::Gauge, "culvert_peer_rtt_seconds", "Smoothed round-trip time of the first lane, in standard mode of the control connection; 0 while it is not known.", |it| it.own.rtt_seconds.unwrap_or(0.0).into()),
    peer(Type::Gauge, "culvert_peer_stream_window_bytes", "Bytes that congestion control lets be in flight on the peer's control and stream connections.", |it| streams(it, |streams| streams.window_bytes)),
    peer(Type::Gauge, "culvert_peer_stream_pacing_bytes_per_second", "Rate at which packets of those connections leave; 0 with peer.congestion = \"cubic\" and before the first round trip.", |it| streams(it, |streams| streams.pacing_bytes_per_second)),
    peer(Type::Gauge, "culvert_peer_stream_delivery_bytes_per_second", "Rate at which data of those connections last arrived at the peer, from its acknowledgements.", |it| streams(it, |streams| streams.delivery_bytes_per_second)),
    peer(Type::Gauge, "culvert_flows", "UDP sessions now known, of both openers.", |it| it.now.flows.into()),
    peer(Type::Counter, "culvert_flows_opened_total", "Flows opened, of both openers.", |it| it.ever.more.flows_opened.into()),
    peer(Type::Counter, "culvert_lane_packets_sent_total", "QUIC packets sent on lanes.", |it| it.ever.more.lanes.sealed_packets.into()),
    peer(Type::Counter, "culvert_lane_packets_received_total", "QUIC packets received on lanes that passed authentication and the replay window.", |it| it.ever.more.lanes.opened_packets.into()),
    peer(Type::Counter, "culvert_lane_packets_acked_total", "Packets sent on lanes that the peer acknowledged.", |it| it.ever.more.lanes.acked_packets.into()),
    peer(Type::Counter, "culvert_lane_packets_lost_total", "Packets sent on lanes and declared lost.", |it| it.ever.more.lanes.lost_packets.into()),
    peer(Type::Counter, "culvert_lane_packets_spuriously_lost_total", "Packets declared lost and acknowledged later.", |it| it.ever.more.lanes.spuriously_lost_packets.into()),
    peer(Type::Counter, "culvert_lane_packets_reordered_total", "Packets sent on lanes and acknowledged after later ones.", |it| it.ever.more.lanes.reordered_packets.into()),
    peer(Type::Gauge, "culvert_lane_reordering_seconds", "Longest time for which the peer's lanes wait for a packet that later ones have overtaken, beyond a round trip; 0 while none was overtaken.", |it| it.now.more.reordering.unwrap_or_default().as_secs_f64().into()),
    peer(Type::Counter, "culvert_lane_mtu_probes_total", "Packets sent on lanes to discover the path MTU.", |it| it.ever.more.lanes.mtu_probes_sent.into()),
    peer(Type::Counter, "culvert_lane_mtu_probes_lost_total", "MTU probes declared lost, most of them because of their size; no other loss counter includes them.", |it| it.ever.more.lanes.mtu_probes_lost.into()),
    peer(Type::Counter, "culvert_lane_black_holes_total", "Times that a lane's path stopped carrying packets of the size in use.", |it| it.ever.more.lanes.black_holes.into()),
    peer(Type::Gauge, "culvert_lane_packet_bytes", "Largest packet that the peer's lanes currently send, in bytes of UDP payload.", |it| it.own.more.owned_lanes.unwrap_or_default().packet_bytes.into()),
    peer(Type::Counter, "culvert_peer_oversized_total", "Payloads for the peer dropped because they fit into no packet to it (reason too_large).", |it| it.ever.uplink.account.dropped[DropReason::TooLarge].into()),
    peer(Type::Counter, "culvert_peer_spoofed_total", "IP packets from the peer dropped because their source address is not its own (reason spoofed).", |it| it.ever.downlink.account.dropped[DropReason::Spoofed].into()),
    peer(Type::Gauge, "culvert_peer_inner_mtu_bytes", "Largest IP packet that fits into one packet to the peer; 0 while that is not known.", |it| u32::from(it.own.inner_mtu.unwrap_or(0)).into()),
    peer(Type::Gauge, "culvert_queue_packets", "Payloads waiting in the relay's queue.", |it| it.now.queue.datagrams.into()),
    peer(Type::Gauge, "culvert_queue_bytes", "Bytes of payload waiting in the relay's queue.", |it| it.now.queue.bytes.into()),
    peer(Type::Gauge, "culvert_queue_age_seconds", "Age of the oldest payload in the relay's queue.", |it| it.own.queue.age_seconds.into()),
    peer(Type::Gauge, "culvert_queue_limit_packets", "Payloads that may wait in the relay's queue, all workers together.", |it| it.now.more.queue_packets.into()),
    peer(Type::Gauge, "culvert_queue_limit_bytes", "Bytes of payload that may wait in the relay's queue, all workers together.", |it| it.now.more.queue_bytes.into()),
    peer(Type::Gauge, "culvert_queue_limit_seconds", "How long a payload may wait before it is dropped.", |it| it.own.more.queue_time.into()),
    peer(Type::Gauge, "culvert_peer_rate_limit_bytes_per_second", "Limit on all that is sent to the peer, in bytes of IP packets a second: peer.rate, what an automatic rate is now, or the rate_receive of the peer; 0 without one.", |it| rate(&it.own, |rate| rate.limit().unwrap_or(0) as f64 / 8.0)),
    peer(Type::Gauge, "culvert_peer_quota_bytes", "Bytes that the peer may have carried in a month; 0 without peer.quota.", |it| quota(it, |quota| quota.bytes)),
    peer(Type::Gauge, "culvert_peer_quota_used_bytes", "Bytes that the peer has carried in this month, both directions together; 0 without peer.quota.", |it| quota(it, |quota| quota.used_bytes)),
    peer(Type::Gauge, "culvert_peer_quota_reached", "1 while the peer has used up its quota: it is stopped, or slowed down.", |it| quota(it, |quota| u64::from(quota.used_bytes >= quota.bytes))),
    peer(Type::Gauge, "culvert_peer_path_queue_seconds", "Median wait of packets in queues of the path to the peer, as the peer reports; 0 unless the rate is automatic.", |it| rate(&it.now, |rate| rate.auto.as_ref().map_or(0.0, |auto| auto.queue_delay_seconds))),
    peer(Type::Gauge, "culvert_peer_path_delivered_bytes_per_second", "Bytes of IP packets a second that arrive at the peer, as it reports; 0 unless the rate is automatic.", |it| rate(&it.now, |rate| rate.auto.as_ref().map_or(0.0, |auto| auto.delivered_bits_per_second as f64 / 8.0))),
    peer(Type::Gauge, "culvert_peer_path_congested", "1 while the queue of the path to the peer says congestion: the link is full, by us or by others; 0 unless the rate is automatic.", |it| rate(&it.now, |rate| f64::from(u8::from(rate.auto.as_ref().is_some_and(|auto| auto.congested))))),
    peer(Type::Gauge, "culvert_queue_delay_median_seconds", "Median wait of payloads for their turn at the limit, in the last seconds; 0 without a limit.", |it| rate(&it.now, |rate| rate.delay_p50_seconds.unwrap_or(0.0))),
    peer(Type::Gauge, "culvert_queue_delay_p99_seconds", "Wait for their turn that 99 % of payloads did not exceed in the last seconds; 0 without a limit.", |it| rate(&it.now, |rate| rate.delay_p99_seconds.unwrap_or(0.0))),
    repair("culvert_repair_payloads_total", "Payloads sent that are to be repaired, whether they got numbers or not.", |repair| repair.sent.into()),
    repair("culvert_repair_payload_bytes_total", "Bytes of those payloads.", |repair| repair.payload_bytes.into()),
    repair("culvert_repair_extra_bytes_total", "Bytes of numbers, retransmissions and repair symbols that were sent.", |repair| repair.extra_bytes.into()),
    repair("culvert_repair_numbered_total", "Payloads sent with a number, so that they can be repaired.", |repair| repair.numbered.into()),
    repair("culvert_repair_retransmitted_total", "Payloads sent again: the peer asked for them, or nothing was sent after them.", |repair| repair.retransmitted.into()),
    repair("culvert_repair_symbols_total", "Repair symbols sent.", |repair| repair.symbols.into()),
    repair("culvert_repair_unanswered_total", "Payloads that the peer asked for too late, or beyond the share of bytes for repair.", |repair| repair.unanswered.into()),
    repair("culvert_repair_without_memory_total", "Payloads that went without a number, or symbols that were not used, because limits.repair_bytes or the peer's quarter of it was reached.", |repair| repair.without_memory.into()),
    repair("culvert_repair_received_total", "Numbered payloads from the peer that were delivered.", |repair| repair.received.into()),
    repair("culvert_repair_missing_total", "Numbered payloads from the peer that were missing when a later one came: lost, or late.", |repair| repair.missing.into()),
    repair("culvert_repair_came_again_total", "Missing payloads that came in time, because they were sent again or were late.", |repair| repair.came_again.into()),
    repair("culvert_repair_recovered_total", "Payloads that repair symbols gave in time.", |repair| repair.recovered.into()),
    repair("culvert_repair_given_up_total", "Missing payloads that did not come in time.", |repair| repair.given_up.into()),
    repair("culvert_repair_duplicate_total", "Numbered payloads that came again in vain.", |repair| repair.duplicate.into()),
    repair("culvert_repair_late_total", "Numbered payloads that came after their deadline; they are dropped (reason expired).", |repair| repair.late.into()),
    repair("culvert_repair_malformed_total", "Repair symbols from the peer that contradict its payloads, or are no symbols.", |repair| repair.malformed.into()),
    repair("culvert_repair_delay_seconds_total", "How long repaired payloads from the peer were missing, together.", |repair| (repair.missed_micros as f64 / 1e6).into()),
    family(Type::Gauge, "culvert_repair_delay_median_seconds", &["peer"], "How much later than without repair numbered payloads from the peer were delivered in the last seconds: the median; 0 if none was.", Read::RepairNow(|repair| repair.added_delay_p50_seconds.unwrap_or(0.0).into())),
    family(Type::Gauge, "culvert_repair_delay_p99_seconds", &["peer"], "The delay that 99 % of those payloads did not exceed; 0 if none was delivered.", Read::RepairNow(|repair| repair.added_delay_p99_seconds.unwrap_or(0.0).into())),
    gauge("culvert_repair_bytes", &[], "Memory for payloads that are kept or held for repair, of all peers.", |it, out| out.add(&[], it.in_use.repair_bytes)),
    peer(Type::Counter, "culvert_aqm_marked_total", "IP packets marked as having met congestion (ECN) because they waited too long at the limit; those that cannot be marked are dropped (reason aqm).", |it| it.ever.more.aqm_marked.into()),
    peer(Type::Gauge, "culvert_peer_tcp_streams", "TCP forwards now open with the peer.", |it| it.now.tcp_streams.into()),
    peer(Type::Gauge, "culvert_peer_tcp_stalled", "Those of them of which bytes have waited for a second or more because a reader has stopped, sampled once a second.", |it| it.now.tcp.stalled.into()),
    family(Type::Gauge, "culvert_service_tcp_streams", &["peer", "service"], "TCP forwards now open with the peer, by service.", Read::ServiceNow(|service| service.open.into())),
    family(Type::Counter, "culvert_service_tcp_bytes_total", &["peer", "service", "direction"], "Bytes of TCP payload forwarded, by peer and service.", Read::ServiceWays(|service, way| match way { Direction::Uplink => service.uplink_bytes, Direction::Downlink => service.downlink_bytes })),
    peer(Type::Gauge, "culvert_reassembly_bytes", "Memory held for the peer's incomplete datagrams, summed over all workers.", |it| it.now.more.reassembly_bytes.into()),
    // One direction of a peer: received = delivered + queued + dropped.
    ways("culvert_peer_datagrams_received_total", "Payloads that entered the agent for or from the peer.", |way| way.account.received),
    ways("culvert_peer_datagrams_delivered_total", "Payloads handed to the kernel.", |way| way.account.delivered),
    ways("culvert_peer_datagrams_dropped_total", "Payloads dropped for any reason.", |way| way.account.dropped_total()),
    // Payloads between two workers are left out: workers publish at different times, so the difference could be negative.
    family(Type::Gauge, "culvert_peer_datagrams_queued", &["peer", "direction"], "Payloads inside the agent: neither delivered nor dropped yet.", Read::WaysNow(|way| way.queued)),
    ways("culvert_peer_bytes_received_total", "Bytes of the payloads received.", |way| way.account.received_bytes),
    ways("culvert_peer_bytes_delivered_total", "Bytes of the payloads delivered.", |way| way.delivered_bytes),
    ways("culvert_peer_tun_packets_total", "IP packets from the TUN device for the peer (uplink) or from the peer for the device (downlink); they are among the payloads received.", |way| way.packets.packets),
    ways("culvert_peer_tun_bytes_total", "Bytes of those IP packets.", |way| way.packets.bytes),
    ways("culvert_peer_fragmented_datagrams_total", "Payloads too large for one packet that were sent in pieces (uplink), or reassembled from pieces (downlink).", |way| way.pieces.datagrams),
    ways("culvert_peer_pieces_total", "Pieces of such payloads that were sent (uplink) or received (downlink).", |way| way.pieces.pieces),
    // The sockets of one use.
    socket(Type::Counter, "culvert_socket_received_buffers_total", "Buffers received; GRO joins several datagrams into one.", |socket| socket.stats.received_buffers.into()),
    socket(Type::Counter, "culvert_socket_received_datagrams_total", "Datagrams received.", |socket| socket.stats.received_datagrams.into()),
    socket(Type::Counter, "culvert_socket_received_bytes_total", "Bytes of UDP payload received.", |socket| socket.stats.received_bytes.into()),
    socket(Type::Counter, "culvert_socket_receive_calls_total", "System calls that received something.", |socket| socket.stats.receive_calls.into()),
    socket(Type::Counter, "culvert_socket_sent_datagrams_total", "Datagrams handed to the kernel.", |socket| socket.stats.sent_datagrams.into()),
    socket(Type::Counter, "culvert_socket_sent_bytes_total", "Bytes of UDP payload handed to the kernel.", |socket| socket.stats.sent_bytes.into()),
    socket(Type::Counter, "culvert_socket_send_calls_total", "System calls that sent something.", |socket| socket.stats.send_calls.into()),
    socket(Type::Counter, "culvert_socket_gso_messages_total", "Messages that the kernel cut into segments.", |socket| socket.stats.gso_messages.into()),
    socket(Type::Counter, "culvert_socket_gso_segments_total", "Segments of those messages.", |socket| socket.stats.gso_segments.into()),
    socket(Type::Counter, "culvert_socket_gso_fallbacks_total", "Times that GSO was turned off for a destination after an error.", |socket| socket.stats.gso_fallbacks.into()),
    socket(Type::Counter, "culvert_socket_would_block_total", "Sends that found the kernel's send buffer full.", |socket| socket.stats.would_block.into()),
    socket(Type::Counter, "culvert_socket_send_failures_total", "Datagrams that the kernel refused to send.", |socket| socket.stats.send_failures.into()),
    counter("culvert_socket_refusals_total", &["socket"], "ICMP errors that the kernel reported about datagrams sent earlier, for example because nobody listens there.", |it, out| out.each(it.totals.refusals.by_label())),
    socket(Type::Counter, "culvert_socket_truncated_total", "Received buffers that were longer than ours.", |socket| socket.stats.truncated.into()),
    socket(Type::Counter, "culvert_socket_kernel_drops_total", "Buffers (not datagrams) that the kernel dropped because the receive buffer was full.", |socket| socket.kernel_drops.into()),
    socket(Type::Gauge, "culvert_socket_kernel_queue_bytes", "Kernel memory of the buffers waiting to be read, sampled once a second.", |socket| socket.kernel_queue.into()),
    socket(Type::Histogram, "culvert_socket_receive_batch_datagrams", "Datagrams that one system call received.", |socket| Buckets::sizes(&socket.stats.receive_sizes, socket.stats.received_datagrams).into()),
    socket(Type::Histogram, "culvert_socket_send_segments", "Datagrams of one message that was sent; above 1 the kernel cut it.", |socket| Buckets::sizes(&socket.stats.send_sizes, socket.stats.sent_datagrams).into()),
    socket(Type::Histogram, "culvert_socket_receive_age_seconds", "How long received buffers (not datagrams) waited in the kernel, sampled in one call of 16.", |socket| Buckets::ages(&socket.stats.ages, socket.stats.age_sum_nanos).into()),
    // Lanes.
    counter("culvert_lane_ack_packets_total", &["direction"], "Lane packets without payload, sent (uplink) or received (downlink).", |it, out| out.each([(UP, it.lanes.ack_packets_sent), (DOWN, it.lanes.ack_packets_received)])),
    counter("culvert_lane_ack_frames_total", &["direction"], "ACK frames on lanes, sent (uplink) or received (downlink).", |it, out| out.each([(UP, it.lanes.ack_frames_sent), (DOWN, it.lanes.ack_frames_received)])),
    counter("culvert_lane_datagram_frames_total", &["direction"], "DATAGRAM frames on lanes, sent (uplink) or received (downlink).", |it, out| out.each([(UP, it.lanes.datagrams_sent), (DOWN, it.lanes.datagrams_received)])),
    gauge("culvert_lane_flows", &["lane"], "Flows of all peers by the index of their lane; shows how evenly flows are spread over lanes.", |it, out| by_index(it, out, |index| index.flows)),
    counter("culvert_lane_sent_bytes_total", &["lane"], "Bytes of UDP payload sent on the lanes of this index, of all peers.", |it, out| by_index(it, out, |index| index.bytes.sent)),
    counter("culvert_lane_tun_packets_total", &["lane"], "IP packets from the TUN device, of all peers, by the index of the lane that the hash of their flow selects; shows how evenly they are spread over lanes.", |it, out| by_index(it, out, |index| index.packets)),
    counter("culvert_lane_received_bytes_total", &["lane"], "Bytes of UDP payload received and authenticated on the lanes of this index, of all peers.", |it, out| by_index(it, out, |index| index.bytes.received)),
    gauge("culvert_lanes", &["state"], "Lanes by state.", |it, out| out.each(it.lane_states.by_label())),
    counter("culvert_lanes_reopened_total", &["reason"], "Lanes that were opened again or refused, by reason.", |it, out| out.each(it.totals.lanes_reopened.by_label())),
    counter("culvert_lane_refused_packets_total", &["reason"], "Packets to a lane's connection ID that were not accepted, by reason.", |it, out| {
        out.each([
            ("duplicate", it.lanes.duplicates),
            ("too_old", it.lanes.too_old),
            ("header", it.lanes.header_errors),
            ("authentication", it.lanes.authentication_failures),
            ("other_phase", it.lanes.other_phase_failures),
            ("integrity_limit", it.lanes.integrity_limit),
            ("violation", it.lanes.violations),
        ]);
    }),
    counter("culvert_lane_key_updates_total", &["initiator"], "Key updates of lanes, by the end that began them: local or remote.", |it, out| {
        out.each([("local", it.lanes.key_updates_initiated), ("remote", it.lanes.key_updates_followed)]);
    }),
    counter("culvert_lane_probes_total", &[], "Probe packets sent on lanes because earlier packets were not acknowledged in time.", |it, out| out.add(&[], it.lanes.probes_sent)),
    counter("culvert_lane_window_overflows_total", &[], "Packets sent on lanes and no longer tracked, because too many were unacknowledged.", |it, out| out.add(&[], it.lanes.window_overflows)),
    counter("culvert_lane_packets_unopened_total", &[], "Lane packets dropped before decryption because the worker had fallen behind; it drops those of its heaviest peers first.", |it, out| out.add(&[], it.unopened)),
    counter("culvert_sessions_suspected_total", &["reason"], "Sessions suspected to be dead, by reason; the peer is then dialled again if this end has an endpoint for it.", |it, out| out.each(it.totals.sessions_suspected.by_label())),
    counter("culvert_sessions_contested_total", &[], "Sessions that were replaced by another agent with the same key, from the third replacement within a minute on.", |it, out| out.add(&[], it.totals.sessions_contested)),
    gauge("culvert_drain_sessions", &["state"], "Sessions that peers had dialled when this agent began to drain: waiting for the peer to leave, or closed because it did not.", |it, out| out.each([("waiting", it.drained.waiting), ("closed", it.drained.closed)])),
    counter("culvert_port_hops_total", &["what"], "Lanes and connections that this end has moved to fresh ports because of transport.hop.", |it, out| out.each(it.totals.port_hops.by_label())),
    counter("culvert_path_moves_total", &["what"], "Address changes that the session survived: of the peer, as seen by a lane or a control connection, or of this host (socket).", |it, out| out.each(it.totals.path_moves.by_label())),
    // Control connections and the gate.
    counter("culvert_control_messages_total", &["direction"], "Control messages, sent (uplink) or received (downlink).", |it, out| out.each([(UP, it.control.messages_sent), (DOWN, it.control.messages_received)])),
    counter("culvert_control_datagrams_total", &["direction"], "UDP datagrams of control connections, sent (uplink) or received (downlink, copies included).", |it, out| out.each([(UP, it.totals.control.sent.datagrams), (DOWN, it.totals.control.received.datagrams)])),
    counter("culvert_control_bytes_total", &["direction"], "Bytes of UDP payload of those datagrams.", |it, out| out.each([(UP, it.totals.control.sent.bytes), (DOWN, it.totals.control.received.bytes)])),
    counter("culvert_control_ack_frames_total", &["direction"], "ACK frames on control connections, sent (uplink) or received (downlink).", |it, out| out.each([(UP, it.totals.control.sent.ack_frames), (DOWN, it.totals.control.received.ack_frames)])),
    counter("culvert_control_datagram_frames_total", &["direction"], "DATAGRAM frames on control connections (standard mode), sent (uplink) or received (downlink).", |it, out| out.each([(UP, it.totals.control.sent.datagram_frames), (DOWN, it.totals.control.received.datagram_frames)])),
    gauge("culvert_connections", &[], "QUIC connections, half-open ones included.", |it, out| out.add(&[], it.connections as u64)),
    counter("culvert_control_packets_sent_total", &[], "QUIC packets sent on control connections.", |it, out| out.add(&[], it.totals.control.packets_sent)),
    counter("culvert_control_packets_lost_total", &[], "QUIC packets sent on control connections and declared lost.", |it, out| out.add(&[], it.totals.control.packets_lost)),
    counter("culvert_control_packets_held_total", &[], "QUIC packets of control connections that waited for earlier ones which they had overtaken.", |it, out| out.add(&[], it.totals.control.overtaking.held)),
    counter("culvert_control_packets_late_total", &[], "QUIC packets of control connections that came after later ones had been used.", |it, out| out.add(&[], it.totals.control.overtaking.late)),
    counter("culvert_control_copies_total", &["direction"], "Packets of thin streams that were sent again before anybody missed them (uplink), or came although they had come before (downlink).", |it, out| out.each([(UP, it.totals.control.copied.packets), (DOWN, it.totals.control.overtaking.copies)])),
    counter("culvert_control_copied_bytes_total", &[], "Bytes of UDP payload of the packets that were sent again.", |it, out| out.add(&[], it.totals.control.copied.bytes)),
    counter("culvert_control_packets_blocked_total", &[], "Datagrams of control connections that found no room in the socket; QUIC sends again what they held.", |it, out| out.add(&[], it.control.packets_blocked)),
    counter("culvert_control_black_holes_total", &[], "Times that a control connection's path stopped carrying packets of the size in use.", |it, out| out.add(&[], it.totals.control.black_holes)),
    counter("culvert_control_message_errors_total", &["reason"], "Control messages that could not be used, by reason.", |it, out| {
        out.each(it.totals.message_errors.by_label());
    }),
    counter("culvert_preshared_key_refusals_total", &["reason"], "Connections that this agent ended because of a preshared key, by reason.", |it, out| out.each(it.totals.preshared_refused.by_label())),
    gauge("culvert_handshakes_pending", &["worker"], "Incomplete inbound handshakes; each worker has its share of limits.handshakes.", |it, out| out.add(&[&it.worker.to_string()], it.in_use.handshakes as u64)),
    counter("culvert_handshakes_total", &["outcome"], "Handshakes of control connections, by outcome.", |it, out| {
        let Handshakes { dialled, established, failed } = it.totals.handshakes;
        out.each([("dialled", dialled), ("established", established), ("failed", failed)]);
        out.each([("accepted", it.control.handshakes_accepted), ("refused_key", it.refused_keys), ("ignored", it.control.handshakes_ignored)]);
    }),
    counter("culvert_refused_datagrams_total", &["reason"], "Datagrams at the QUIC sockets that did not reach a connection or a lane, by reason.", |it, out| {
        let ControlStats { unroutable, answers_suppressed, unopened, .. } = it.control;
        out.each([("unroutable", unroutable), ("answer_suppressed", answers_suppressed), ("unopened", unopened)]);
    }),
    counter("culvert_gate_datagrams_total", &["step"], "Datagrams at the gate, by the step at which they ended.", |it, out| out.each(it.gate.by_label())),
    gauge("culvert_gate_incomplete", &[], "ClientHellos of which a datagram is missing, and is waited for.", |it, out| out.add(&[], it.in_use.incomplete as u64)),
    counter("culvert_gate_incomplete_expired_total", &[], "ClientHellos given up because a datagram of them did not come within 3 s.", |it, out| out.add(&[], it.incomplete_expired)),
    gauge("culvert_http_connections", &[], "QUIC connections of clients that named one of http.names, closing ones included.", |it, out| out.add(&[], it.web.open as u64)),
    counter("culvert_http_connections_total", &[], "Connections of clients that named one of http.names and were accepted.", |it, out| out.add(&[], it.web.accepted)),
    counter("culvert_http_dropped_packets_total", &[], "Packets of those connections that were dropped unopened, because a worker had opened 10,000 of visitors, or 100,000 of users, in this second.", |it, out| out.add(&[], it.web.unopened)),
    counter("culvert_http_refused_total", &["reason"], "Connections of clients that named one of http.names which were not accepted, or closed, by reason.", |it, out| out.each(it.web.refused.by_label())),
    counter("culvert_http_requests_total", &["outcome"], "Requests of clients that named one of http.names, by outcome.", |it, out| out.each(it.web.requests.by_label())),
    gauge("culvert_sessions", &["key_exchange"], "Sessions, by the key exchange of their control connection.", |it, out| out.each(it.sessions.by_label())),
    gauge("culvert_previous_key_sessions", &[], "Sessions with peers that know us by the key of identity.previous_key_file.", |it, out| out.add(&[], it.previous_key_sessions)),
    gauge("culvert_gate_used_tokens", &[], "Used knocks that the agent remembers, so that none works twice.", |it, out| out.add(&[], it.in_use.used_tokens as u64)),
    counter("culvert_gate_replay_log_errors_total", &[], "Failed writes to the replay log of used knocks; after a restart, the agent refuses knocks made before it.", |it, out| out.add(&[], it.totals.replay_log_errors)),
    // Flows and payloads.
    counter("culvert_datagrams_dropped_total", &["direction", "reason"], "Payloads dropped, by reason; the sum equals that over all peers as long as none was removed.", |it, out| {
        it.drops().iter().for_each(|(way, counts)| out.each_of(way.label(), counts.by_label()));
    }),
    counter("culvert_flow_messages_total", &["direction", "kind"], "Flow signals (open, confirmed, refused, unknown, closed), sent (uplink) or received (downlink).", |it, out| {
        it.relays.messages.iter().for_each(|(way, counts)| out.each_of(way.label(), counts.by_label()));
    }),
    counter("culvert_reports_total", &["kind"], "Reports about lanes, for an automatic rate: sent to peers that asked for them; taken from peers; ignored, because they came too often, were not asked for, or made no sense.", |it, out| {
        let ReportCount { sent, taken, ignored } = it.relays.reports;
        out.each([("sent", sent), ("taken", taken), ("ignored", ignored)]);
    }),
    counter("culvert_flows_evicted_total", &["reason"], "Flows forgotten, by reason.", |it, out| out.each(it.relays.ended.by_label())),
    counter("culvert_flows_moved_total", &[], "Flows that moved to another lane because theirs was dead or drained.", |it, out| out.add(&[], it.relays.moved)),
    counter("culvert_handed_over_datagrams_total", &["kind"], "Datagrams handed to another worker, because their connection, lane or flow lives there.", |it, out| out.each(it.totals.handed_out.by_label())),
    counter("culvert_taken_over_datagrams_total", &["kind"], "Datagrams taken from another worker.", |it, out| out.each(it.totals.handed_in.by_label())),
    counter("culvert_hand_over_dropped_datagrams_total", &["kind"], "Datagrams dropped because the ring of the worker that they were for was full.", |it, out| out.each(it.totals.hand_over_drops.by_label())),
    gauge("culvert_send_buffer_bytes", &[], "Memory of the send buffers of QUIC sockets, spare ones included; at most 38 MiB for each worker.", |it, out| out.add(&[], it.send_buffer_bytes as u64)),
    gauge("culvert_flow_sockets", &[], "Sockets to services for flows that peers opened, at all workers.", |it, out| out.add(&[], it.in_use.flow_sockets as u64)),
    gauge("culvert_control_message_bytes", &["direction"], "Memory of control messages that wait until the peer reads them (uplink) or until they are complete and handled (downlink).", |it, out| out.each(it.message_bytes.by_label())),
    // TCP forwards.
    counter("culvert_tcp_bytes_total", &["direction"], "Bytes of TCP payload forwarded.", |it, out| out.each([(UP, it.totals.tcp.bytes_outward), (DOWN, it.totals.tcp.bytes_inward)])),
    gauge("culvert_tcp_streams", &[], "TCP forwards now open.", |it, out| out.add(&[], it.tcp_streams as u64)),
    counter("culvert_tcp_streams_opened_total", &[], "TCP forwards started by either end, including those that were then refused.", |it, out| out.add(&[], it.totals.tcp.opened)),
    counter("culvert_tcp_refused_total", &["reason"], "TCP forwards refused, by reason.", |it, out| out.each(it.totals.tcp.refused.by_label())),
    counter("culvert_tcp_ended_total", &["reason"], "TCP forwards that were open and have ended, by reason.", |it, out| out.each(it.totals.tcp.ended.by_label())),
    counter("culvert_upstream_unreached_total", &["reason"], "Attempts to connect to a place of a service that failed, whether another place was tried after them or not.", |it, out| out.each(it.totals.tcp.unreached.by_label())),
    counter("culvert_upstream_lookups_total", &["result"], "Look-ups of names in service.upstream.", |it, out| out.each(it.totals.lookups.by_label())),
    gauge("culvert_upstream_info", &["service", "upstream", "address"], "1 for each name in service.upstream: the address that is used first, empty while none is known.", |it, out| out.ones(&it.upstreams)),
    counter("culvert_tcp_accept_pauses_total", &[], "Times that connections were left in the listen backlog because there was no room for another TCP forward, or the session with the peer was suspected to be dead.", |it, out| out.add(&[], it.totals.tcp.accept_pauses)),
    gauge("culvert_stream_bytes", &[], "Bytes that TCP forwards of all peers may hold unread or unacknowledged: their windows.", |it, out| out.add(&[], it.in_use.stream_bytes)),
    gauge("culvert_stream_connections", &[], "Connections that carry TCP forwards beside the control connections.", |it, out| out.add(&[], it.stream_connections as u64)),
    counter("culvert_stream_connections_opened_total", &[], "Stream connections that were established.", |it, out| out.add(&[], it.totals.streams.opened)),
    counter("culvert_stream_connections_failed_total", &["reason"], "Stream connections that failed, by reason: no local socket (local), no answer to the handshake (handshake), refused by the far end (refused), lost while in use (lost).", |it, out| out.each(it.totals.streams.failed.by_label())),
    // Unauthenticated senders and the decoy.
    counter("culvert_decoy_datagrams_total", &["direction"], "Datagrams from unauthenticated senders (to_decoy) or from the decoy (to_sender); those that were not dropped were forwarded.", |it, out| {
        out.each([(DecoyDirection::ToDecoy.label(), it.decoy.from_senders.datagrams), (DecoyDirection::ToSender.label(), it.decoy.from_decoy.datagrams)]);
    }),
    counter("culvert_decoy_bytes_total", &["direction"], "Bytes of UDP payload of those datagrams.", |it, out| {
        out.each([(DecoyDirection::ToDecoy.label(), it.decoy.from_senders.bytes), (DecoyDirection::ToSender.label(), it.decoy.from_decoy.bytes)]);
    }),
    counter("culvert_decoy_drops_total", &["direction", "reason"], "Datagrams from unauthenticated senders or from the decoy that were dropped, by reason; no_decoy counts those that got no answer because there is no decoy.", |it, out| {
        for (reason, count) in it.decoy.dropped.iter() {
            out.add(&[reason.direction().label(), reason.label()], *count);
        }
    }),
    gauge("culvert_decoy_flows", &[], "Unauthenticated senders whose datagrams go to the decoy.", |it, out| out.add(&[], it.in_use.decoy_flows as u64)),
    counter("culvert_decoy_flows_opened_total", &[], "Unauthenticated senders that were given a socket to the decoy.", |it, out| out.add(&[], it.decoy.opened)),
    // The TUN device.
    counter("culvert_tun_packets_total", &["direction"], "IP packets read from the TUN device (uplink) or written to it (downlink), super-packets and fragments cut; a super-packet that goes to no peer counts as one.", |it, out| out.each([(UP, it.tun_totals.received), (DOWN, it.tun_totals.delivered)])),
    counter("culvert_tun_bytes_total", &["direction"], "Bytes that were read or written, headers of super-packets once.", |it, out| out.each([(UP, it.tun.read_bytes), (DOWN, it.tun.write_bytes)])),
    counter("culvert_tun_calls_total", &["direction"], "System calls that read or wrote a packet or super-packet.", |it, out| out.each([(UP, it.tun.reads), (DOWN, it.tun.writes)])),
    gauge("culvert_tun_prefixes", &[], "Prefixes by which packets of the TUN device find a peer: those of allowed_ips, or those of the kernel's routes.", |it, out| out.add(&[], it.tun_totals.prefixes)),
    counter("culvert_tun_super_packets_total", &["direction"], "Super-packets (TSO, USO) that were read or written.", |it, out| out.each([(UP, it.tun.read_super), (DOWN, it.tun.write_super)])),
    counter("culvert_tun_tunnel_super_packets_total", &["direction"], "Of those super-packets, those of packets inside of VXLAN and Geneve tunnels.", |it, out| out.each([(UP, it.tun.read_tunnel), (DOWN, it.tun.write_tunnel)])),
    counter("culvert_tun_errors_total", &["direction"], "Reads and writes of packets that the kernel refused or that could not be understood.", |it, out| out.each([(UP, it.tun.read_errors), (DOWN, it.tun.write_errors)])),
    counter("culvert_tun_dropped_packets_total", &["reason"], "IP packets of the TUN device that went to no peer, by reason; those that did are among the peer's payloads.", |it, out| out.each(it.tun_totals.dropped.by_label())),
    counter("culvert_tun_multicast_copies_total", &[], "Copies of link-local multicast packets of this host for peers.", |it, out| out.add(&[], it.tun_totals.multicast_copies)),
    counter("culvert_tun_icmp_sent_total", &["kind"], "ICMP messages sent to senders of IP packets that could not be carried, by kind.", |it, out| out.each(it.tun_totals.answers.by_label())),
    counter("culvert_tun_handovers_total", &[], "Times that other peers took over the prefixes that several peers hold.", |it, out| out.add(&[], it.tun_totals.handovers)),
    counter("culvert_tun_mss_clamped_total", &[], "TCP SYNs whose maximum segment size was lowered to what fits into a packet to the peer.", |it, out| out.add(&[], it.tun_totals.mss_clamped)),
    counter("culvert_tun_icmp_withheld_total", &[], "ICMP messages withheld from senders of IP packets because of the rate limit.", |it, out| out.add(&[], it.tun_totals.answers_withheld)),
    counter("culvert_tun_flows_moved_total", &[], "Buckets of IP packets that moved to another lane because theirs was dead or drained.", |it, out| out.add(&[], it.relays.buckets_moved)),
    family(Type::Counter, "culvert_tun_kernel_dropped_packets_total", &["direction"], "Packets that the kernel dropped at the TUN device: not read in time (uplink), or not taken (downlink).", Read::Device(|device, out| out.each(device.dropped.by_label()))),
    family(Type::Gauge, "culvert_tun_device", &[], "1 while the agent has its TUN device, 0 after somebody removed it; absent without a section tun.", Read::Device(|device, out| {
        device.present.into_iter().for_each(|present| out.add(&[], u64::from(present)));
    })),
    // The workers and what they share.
    counter("culvert_worker_beats_total", &["worker"], "Signs of life of the worker, at least one a second.", |it, out| out.add(&[&it.worker.to_string()], it.beats)),
    counter("culvert_turns_full_total", &[], "Turns that used up the budget of a kind of source (underlay, local, device) before all of its sources were served; the others come first in the next turn.", |it, out| out.add(&[], it.totals.turns_full)),
    gauge("culvert_peers", &["origin"], "Known peers by origin: from the configuration (config), added at run time (state), or admitted by open mode (open).", |it, out| out.each(it.known.by_label())),
    counter("culvert_limit_reached_total", &["limit"], "Times that a limit was reached and something was refused, dropped or evicted, by its key in the section limits; sockets, used_tokens, flow_rate, control_messages, control_bytes and send_buffers are not keys.", |it, out| out.each(it.limit_reached.by_label())),
];

fn by_index(worker: &WorkerSnapshot, out: &mut Samples, read: fn(&IndexCounts) -> u64) {
    for (index, counts) in worker.lane_indices.iter().enumerate() {
        out.add(&[&index.to_string()], read(counts));
    }
}

/// The peers under one label: open-mode peers share a label, and a removed peer may have a successor with its name.
#[derive(Default)]
struct PeersOfLabel {
    /// Established connections of the peers that have the label now.
    connected: u64,
    /// The sum over the peers that have the label now.
    now: PeerStatus,
    /// The sum over all peers that have had the label.
    ever: PeerStatus,
    /// The live peer with that name, if it is not an open-mode peer.
    own: PeerStatus,
}

impl PeersOfLabel {
    fn all(published: &Published) -> Peers {
        let mut all = Peers::new();
        for peer in published.workers.iter().flat_map(|worker| &worker.peers).filter(|peer| !peer.more.vacant)
        {
            let Self { connected, now, ever, own } = all.entry(label(peer)).or_default();
            *connected += u64::from(peer.connected());
            now.add(peer);
            ever.add(peer);
            if peer.origin != PeerOrigin::Open && !peer.more.removed {
                own.add(peer);
            }
        }
        for (label, removed) in &published.removed {
            // A removed peer counts while another worker still has it. The label of open mode always stays.
            if all.contains_key(label) || **label == *OPEN_LABEL {
                all.entry(Arc::clone(label)).or_default().ever.add(removed);
            }
        }
        all
    }
}

/// A figure of a peer's limit, 0 without one.
pub(crate) fn rate(peer: &PeerStatus, read: fn(&RateStatus) -> f64) -> Value {
    peer.rate.as_ref().map_or(0.0, read).into()
}

fn quota(peers: &PeersOfLabel, read: fn(&QuotaStatus) -> u64) -> Value {
    peers.own.quota.as_ref().map_or(0, read).into()
}

fn streams(peers: &PeersOfLabel, read: fn(&StreamsStatus) -> u64) -> Value {
    peers.now.streams.as_ref().map_or(0, read).into()
}

/// The services for which peers have had TCP forwards.
fn services(peers: &Peers) -> impl Iterator<Item = (&Arc<str>, &PeersOfLabel, &TcpServiceStatus)> {
    peers
        .iter()
        .flat_map(|(label, peer)| peer.ever.tcp.services.iter().map(move |service| (label, peer, service)))
}

impl PeerStatus {
    fn ways(&self, read: OfWay) -> [(&'static str, u64); 2] {
        [(UP, read(&self.uplink)), (DOWN, read(&self.downlink))]
    }
}

impl Family {
    fn samples(&self, moment: &Moment) -> Samples {
        let published = &moment.published;
        // Summing a thousand peers takes milliseconds, and most families of the workers do without.
        let peers = || moment.peers.get_or_init(|| PeersOfLabel::all(published));
        let mut out = Samples::default();
        match self.read {
            Read::Worker(read) => published.workers.iter().for_each(|worker| read(worker, &mut out)),
            Read::Device(read) => read(&published.device, &mut out),
            Read::Socket(read) => {
                for worker in &published.workers {
                    for (role, counts) in worker.sockets.0.iter() {
                        out.add(&[role.label()], read(counts));
                    }
                }
            }
            Read::Peer(read) => peers().iter().for_each(|(label, peer)| out.add(&[label], read(peer))),
            Read::Repair(read) => {
                for (label, peer) in peers().iter() {
                    peer.ever.repair.iter().for_each(|repair| out.add(&[label], read(repair)));
                }
            }
            Read::RepairNow(read) => {
                let none = RepairStatus::default();
                for (label, peer) in peers().iter().filter(|(_, peer)| peer.ever.repair.is_some()) {
                    out.add(&[label], read(peer.now.repair.as_ref().unwrap_or(&none)));
                }
            }
            Read::Copies(read) => {
                for (label, peer) in peers().iter() {
                    peer.ever.copies.iter().for_each(|copies| out.add(&[label], read(copies)));
                }
            }
            Read::LineNow(read) => {
                let none = LineStatus::default();
                for (label, peer) in peers().iter() {
                    for line in &peer.ever.lines {
                        let now = peer.now.lines.iter().find(|now| now.number == line.number);
                        out.add(&[label, &line.name], read(now.unwrap_or(&none)));
                    }
                }
            }
            Read::Line(read) => {
                for (label, peer) in peers().iter() {
                    peer.ever.lines.iter().for_each(|line| out.add(&[label, &line.name], read(line)));
                }
            }
            Read::ServiceNow(read) => {
                let none = TcpServiceStatus::default();
                for (label, peer, service) in services(peers()) {
                    let mut now = peer.now.tcp.services.iter();
                    let now = now.find(|now| now.service == service.service).unwrap_or(&none);
                    out.add(&[label, &service.service], read(now));
                }
            }
            Read::ServiceWays(read) => {
                for (label, _, service) in services(peers()) {
                    for way in Direction::ALL {
                        out.add(&[label, &service.service, way.label()], read(service, way));
                    }
                }
            }
            Read::Ways(read) => {
                peers().iter().for_each(|(label, peer)| out.each_of(label, peer.ever.ways(read)));
            }
            Read::WaysNow(read) => {
                peers().iter().for_each(|(label, peer)| out.each_of(label, peer.now.ways(read)));
            }
        }
        out
    }
}

/// What the workers had published at one moment, from which families are read one at a time.
pub struct Moment {
    published: Published,
    /// The sums by label, once a family asks for them.
    peers: OnceCell<Peers>,
}

impl Moment {
    /// All families, each with what reads its series.
    pub fn families(&self) -> impl Iterator<Item = (&'static FamilyInfo, impl Fn() -> Samples)> {
        FAMILIES.iter().map(|family| (&family.info, || family.samples(self)))
    }
}

impl Snapshots {
    /// All families, including those without a value yet.
    pub fn families() -> impl Iterator<Item = &'static FamilyInfo> {
        FAMILIES.iter().map(|family| &family.info)
    }

    /// What the workers last published.
    #[must_use]
    pub fn moment(&self) -> Moment {
        let mut published = self.published();
        if published.workers.is_empty() {
            // Before the first publication every counter is 0.
            published.workers.push(Arc::default());
        }
        Moment { published, peers: OnceCell::new() }
    }

    /// The families whose names begin with `prefix`, as the workers last published their series.
    #[must_use]
    pub fn series(&self, prefix: &str) -> Vec<(&'static FamilyInfo, Samples)> {
        let moment = self.moment();
        let asked = moment.families().filter(|(family, _)| family.name.starts_with(prefix));
        asked.map(|(family, read)| (family, read())).collect()
    }

    /// The value of a series, e.g. `culvert_flows{peer="exit"}`.
    #[must_use]
    pub fn value(&self, series: &str) -> Option<Value> {
        let name = series.split_once('{').map_or(series, |(name, _)| name);
        let all = self.series(name);
        let (family, samples) = all.iter().find(|(family, _)| family.name == name)?;
        let (_, value) = samples.iter().find(|(labels, _)| family.series(labels) == series)?;
        Some(value.clone())
    }
}

#[cfg(test)]
mod tests {
    use base::ids::PeerId;
    use net::UdpRole;
    use quic_core::LaneStats;

    use super::*;
    use crate::status::{PeerFigures, PeerState};

    fn peer(name: &str, origin: PeerOrigin, sent: u64, flows: usize) -> PeerStatus {
        let lanes = LaneStats { sealed_packets: sent, ..LaneStats::default() };
        let more = PeerFigures { endpoints: 2, lanes, ..PeerFigures::default() };
        PeerStatus {
            name: name.into(),
            origin,
            state: PeerState::Connected,
            flows,
            more,
            ..PeerStatus::default()
        }
    }

    fn set(snapshots: &Snapshots, worker: u8, peers: &[PeerStatus]) {
        snapshots.set(WorkerSnapshot { worker, peers: peers.to_vec(), ..WorkerSnapshot::default() });
    }

    /// The packets sent, flows, connections and endpoints of a label.
    fn shown(snapshots: &Snapshots, label: &str) -> [Option<u64>; 4] {
        let families = [
            "culvert_lane_packets_sent_total",
            "culvert_flows",
            "culvert_peer_connected",
            "culvert_peer_endpoints",
        ];
        families.map(|family| match snapshots.value(&format!("{family}{{peer=\"{label}\"}}"))? {
            Value::Count(count) => Some(count),
            other @ (Value::Number(_) | Value::Buckets(_)) => panic!("{other:?}"),
        })
    }

    #[test]
    fn a_counter_never_goes_backwards_while_a_peer_has_its_label() {
        let snapshots = Snapshots::default();
        let mut old = peer("a", PeerOrigin::State, 10, 1);
        old.more.removed = true;
        for worker in [0, 1] {
            set(&snapshots, worker, std::slice::from_ref(&old));
        }
        assert_eq!(shown(&snapshots, "a"), [Some(20), Some(2), Some(2), Some(0)], "it was removed");
        snapshots.retire(0, PeerId(0));
        assert_eq!(shown(&snapshots, "a"), [Some(20), Some(1), Some(1), Some(0)]);
        // Another peer of the name has another slot, while one worker still has the first peer.
        old.more.vacant = true;
        set(&snapshots, 0, &[old.clone(), peer("a", PeerOrigin::State, 3, 5)]);
        assert_eq!(shown(&snapshots, "a"), [Some(23), Some(6), Some(2), Some(2)]);
        snapshots.retire(1, PeerId(0));
        assert_eq!(shown(&snapshots, "a"), [Some(23), Some(5), Some(1), Some(2)]);
        // No peer is left.
        snapshots.retire(0, PeerId(1));
        snapshots.forget("a");
        assert_eq!(shown(&snapshots, "a"), [None; 4]);
        set(&snapshots, 0, &[old.clone(), old, peer("a", PeerOrigin::State, 1, 0)]);
        assert_eq!(shown(&snapshots, "a"), [Some(1), Some(0), Some(1), Some(2)], "from the beginning");
    }

    #[test]
    fn peers_of_open_mode_share_a_label_that_stays() {
        let snapshots = Snapshots::default();
        assert_eq!(shown(&snapshots, OPEN_LABEL), [None; 4]);
        set(&snapshots, 0, &[peer("open-1", PeerOrigin::Open, 4, 1), peer("open-2", PeerOrigin::Open, 5, 1)]);
        assert_eq!(shown(&snapshots, OPEN_LABEL), [Some(9), Some(2), Some(2), Some(0)]);
        snapshots.retire(0, PeerId(0));
        snapshots.retire(0, PeerId(1));
        assert_eq!(shown(&snapshots, OPEN_LABEL), [Some(9), Some(0), Some(0), Some(0)]);
    }

    #[test]
    fn counts_and_histograms_of_workers_add_up_and_begin_at_zero() {
        let snapshots = Snapshots::default();
        assert_eq!(snapshots.value("culvert_flows_moved_total"), Some(Value::Count(0)));
        for worker in [0, 1] {
            let mut snapshot = WorkerSnapshot { worker, beats: 3, ..WorkerSnapshot::default() };
            snapshot.relays.moved = 4;
            snapshot.sockets.0[UdpRole::Ingress].stats.receive_sizes = [1, 0, 2, 0, 0, 0, 1];
            snapshot.sockets.0[UdpRole::Ingress].stats.received_datagrams = 45;
            snapshots.set(snapshot);
        }
        assert_eq!(snapshots.value("culvert_flows_moved_total"), Some(Value::Count(8)));
        assert_eq!(snapshots.value("culvert_worker_beats_total{worker=\"1\"}"), Some(Value::Count(3)));
        let sizes = snapshots.value("culvert_socket_receive_batch_datagrams{socket=\"ingress\"}");
        assert_eq!(sizes, Some(Buckets::sizes(&[2, 0, 4, 0, 0, 0, 2], 90).into()));
    }
}
