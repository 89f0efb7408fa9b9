//! What a key is when it is left out: the one place of every default.

use std::time::Duration;

use crate::{
    Access, AccessMode, CongestionControl, DropPolicy, Dscp, InnerMtu, Knock, Limits, Log, LogFormat,
    LogLevel, MaxPacket, Oversize, Profile, Queue, Transport, socket_buffer_bytes,
};

/// `[transport]`: dials only, uses every CPU and what the kernel offers. Not pinned, because the scheduler knows what
/// else runs on a CPU.
pub const TRANSPORT: Transport = Transport {
    listen: Vec::new(),
    workers: 0,
    pin_cpus: false,
    gso: true,
    mark: 0,
    advertise: None,
    max_packet: MaxPacket::Auto,
};

/// `identity.state_dir`: where systemd's `StateDirectory=` puts it.
pub const STATE_DIR: &str = "/var/lib/culvert";

/// `control.socket`: where systemd's `RuntimeDirectory=` makes a folder for it.
pub const CONTROL_SOCKET: &str = "/run/culvert/culvert.sock";

/// `[access]`: 90 s are 15 s of a client's retransmissions, and what clocks without NTP are off by.
pub const ACCESS: Access = Access {
    mode: AccessMode::Allowlist,
    services: Vec::new(),
    clock_window: Duration::from_secs(90),
    knock: Knock::Required,
    decoy: None,
};

/// `peer.lanes`: one per worker.
pub const LANES: u8 = 0;

/// `peer.keepalive`: below the 30 s after which common NATs forget a UDP mapping (RFC 4787 REQ-5 allows no less than
/// 2 minutes, home routers do it all the same).
pub const KEEPALIVE: Option<Duration> = Some(Duration::from_secs(20));

/// `peer.queue`: 100 ms is where a queue hurts more than a loss; 4 MiB is 100 ms at 335 Mbit/s.
pub const QUEUE: Queue = Queue { packets: 4096, bytes: 4 << 20, time: Duration::from_millis(100) };

/// `peer.profile`: acknowledging every second packet costs a third more CPU per packet (docs/performance.md).
pub const PROFILE: Profile = Profile::Throughput;

/// `peer.drop`: in real-time traffic the newest datagram is worth the most.
pub const DROP: DropPolicy = DropPolicy::Oldest;

/// `peer.quota`: one flow leaves half of the queue to the others.
pub const QUOTA: f64 = 0.5;

/// `peer.dscp`: routers on the way treat a packet as they would treat the one inside.
pub const DSCP: Dscp = Dscp::Copy;

/// `tun.name`.
pub const TUN_NAME: &str = "culvert0";

/// `tun.mtu`: what fits, so that nothing is cut or lost on the way.
pub const TUN_MTU: InnerMtu = InnerMtu::Auto;

/// `tun.offload`: without it the kernel hands over every packet by itself.
pub const TUN_OFFLOAD: bool = true;

/// `tun.routes`: who names a peer's addresses wants to reach them.
pub const TUN_ROUTES: bool = true;

/// `service.idle`.
pub const IDLE: Duration = Duration::from_secs(60);

/// `service.burst`: what one send can carry. Small datagrams cost half as much in
/// sends of 128 as in sends of 64 (`docs/decisions/0005-batches.md`); larger ones are bounded by 64 KiB before that.
pub const BURST: u16 = 128;

/// `service.oversize`: a datagram that is lost when one of many packets is had better be made smaller by who sends it.
pub const OVERSIZE: Oversize = Oversize::Drop;

/// `[log]`.
pub const LOG: Log = Log { level: LogLevel::Info, format: LogFormat::Text };

/// `peer.congestion`: keeps its rate where packets are lost at random, and shares a bottleneck with CUBIC
/// (`docs/decisions/0014-congestion-of-streams.md`).
pub const CONGESTION: CongestionControl = CongestionControl::Bbr;

/// What `limits.receive_buffer = "auto"` comes to with the other defaults: 4 MiB, with which docs/performance.md was measured.
pub const SOCKET_BUFFER_BYTES: usize = socket_buffer_bytes(LIMITS.receive_rate, QUEUE.time);

/// `[limits]`: 25,000 flows are about what the ports of one source address allow; 16,384 TCP forwards are more than half of them;
/// 256 MiB of their windows are 32 forwards that nobody reads, or 5 Gbit/s over 100 ms; 4096 strangers at a decoy need as many
/// descriptors; 1 MiB holds 15 of the largest datagrams with pieces missing, and 200 of 4 KiB; 256 MiB are the queues of 64
/// peers that all stall at once, or a third of a second at 6 Gbit/s.
pub const LIMITS: Limits = Limits {
    flows_per_peer: 25_000,
    flows: 50_000,
    tcp_streams_per_peer: 16_384,
    tcp_streams: 32_768,
    stream_bytes: 256 << 20,
    pending_open_packets: 64,
    receive_buffer: None,
    receive_rate: 40 << 20,
    reassembly_bytes: 1 << 20,
    queue_bytes: 256 << 20,
    peers: 1000,
    open_peers: 256,
    decoy_flows: 4096,
    handshakes: 256,
};
