//! Sockets, TUN queues and what else an agent asks of Linux; the only crate with `unsafe`.
//!
//! | question | file |
//! |---|---|
//! | what a worker asks of the outside world | this one: [`Net`], [`UdpSocket`], [`TcpListener`], [`TcpStream`] |
//! | what a batch of received or outgoing datagrams looks like | `batch.rs` (pure) |
//! | which payloads are delivered where | `delivery.rs` (pure) |
//! | which packets are written to a TUN device | `ip/src/packets.rs` |
//! | the system calls, the only `unsafe` | `sys.rs` |
//! | UDP on the kernel: options, GRO, readiness | `udp.rs` |
//! | the listening sockets of several workers, bound once | `ports.rs` |
//! | which worker a datagram belongs to, as the kernel's program | `steering.rs` (pure) |
//! | what a UDP socket counts | `stats.rs` (pure) |
//! | how messages are sent: GSO and its fallbacks | `transmit.rs` |
//! | packets that a stream carries in place of a UDP socket | `carrier.rs` |
//! | a dialled socket that has UDP and a stream · a listening one | `choosing.rs` · `listening.rs` |
//! | a dialled socket whose far end is at another port | `aliased.rs` |
//! | TCP and names on the kernel, readiness from tokio | `kernel.rs` |
//! | names that are looked up beside the packet path | `lookup.rs` |
//! | stream sockets of this host | `unix.rs` |
//! | TCP connections that were reset while nobody reads or writes | `failures.rs` |
//! | how a TCP connection notices that its far end is gone | `keepalive.rs` (pure) |
//! | a TUN device and its queues on the kernel | `tun.rs` |
//! | whether the kernel takes super-packets of packets inside of tunnels, and cuts them right | `tunnels/` |
//! | addresses, routes and rules of the kernel | `netlink/` |
//! | how large the datagrams are that the interfaces on the ways to peers take | `netlink/interfaces.rs` |
//! | private files in a folder that another user may own | `folder.rs` |
//! | the limits and CPUs of this process, and that nobody reads its memory | `process.rs` |
//! | what this host can do, tried without changing it | `host.rs` |
//! | waiting to the microsecond, for a load generator | `alarm.rs` |
//! | background tasks whose panic ends only them | `task.rs` |
//! | all of it in memory, for tests and the simulator (feature `memory`) | `memory/` |
//!
//! A worker never blocks and never polls: a source that answered [`io::ErrorKind::WouldBlock`] puts its [`Token`]
//! into the worker's [`Ready`] queue when it may make progress again, and not before.

#![warn(missing_docs)]
#![warn(clippy::missing_errors_doc)]

use std::{
    io,
    net::{IpAddr, SocketAddr},
    path::Path as FilePath,
    rc::Rc,
    sync::Arc,
    time::Instant,
};

use ip::{
    packets::{PacketDelivery, PacketMessage, TunOffload},
    vnet::VnetHeader,
};

mod accepted;
pub mod alarm;
pub mod aliased;
pub mod batch;
pub mod carrier;
pub mod ceiling;
mod choosing;
mod delivery;
mod failures;
pub mod folder;
pub mod host;
mod keepalive;
pub mod kernel;
mod listening;
pub mod lookup;
#[cfg(any(test, feature = "memory"))]
pub mod memory;
pub mod netlink;
pub mod ports;
pub mod process;
pub mod ready;
mod refusal;
pub mod stats;
pub mod steering;
mod sys;
pub mod task;
#[cfg(test)]
mod tests;
mod transmit;
pub mod tun;
pub mod tunnels;
mod udp;
mod unix;
pub mod way;

pub use batch::{Burst, Path, ReceiveBatch, SendBatch};
pub use delivery::{Delivery, DeliveryMessage, Recipient};
pub use keepalive::{Keepalive, Unanswered};
pub use ready::{Ready, Token};
pub use refusal::{RefusedBy, SendRefusal};
pub use stats::UdpStats;

/// The largest datagram, in bytes of UDP payload, that the interface on the way to an address takes; `None` if that is not known, or not
/// yet: ask again a moment later, and now and then, because routes and interfaces change.
pub type Ways = Rc<dyn Fn(SocketAddr) -> Option<usize>>;

/// The sockets and names of the outside world, as a worker uses them. The kernel implements it, and `memory` for tests.
pub trait Net {
    /// Opens a UDP socket whose readiness is reported under `token`.
    ///
    /// # Errors
    /// The kernel's, e.g. `AddrInUse` when another process listens there (checked by a probe bind without
    /// `SO_REUSEPORT`) or `PermissionDenied` for a port below 1024.
    fn udp(&mut self, options: &UdpOptions, token: Token) -> io::Result<Box<dyn UdpSocket>>;

    /// Segments that one message may have: [`batch::MOST_SEGMENTS`], or fewer on a kernel that takes no more.
    fn most_segments(&self) -> u16 {
        batch::MOST_SEGMENTS
    }

    /// What is known of the interfaces on the ways to addresses; nothing unless this is said.
    fn ways(&self) -> Ways {
        Rc::new(|_| None)
    }

    /// Takes sockets that were bound for this worker; [`Net::udp`] and [`Net::tcp_listen`] use them. A network that binds
    /// by itself has no use for them.
    fn adopt(&mut self, ports: ports::Ports) {
        drop(ports);
    }

    /// Listens for TCP connections.
    ///
    /// # Errors
    /// The kernel's, e.g. `AddrInUse`, `AddrNotAvailable`, or `PermissionDenied` for a port below 1024.
    fn tcp_listen(&mut self, address: SocketAddr, token: Token) -> io::Result<Box<dyn TcpListener>>;

    /// Starts to connect; `token` becomes ready when the attempt has ended (see [`TcpStream::connected`]).
    ///
    /// # Errors
    /// The kernel's, when not even the attempt could start, e.g. `NetworkUnreachable`, or EMFILE without descriptors.
    fn tcp_connect(&mut self, address: SocketAddr, token: Token) -> io::Result<Box<dyn TcpStream>>;

    /// Connects to a stream socket of this host; `token` becomes ready at once (see [`TcpStream::connected`]).
    ///
    /// # Errors
    /// The kernel's, in words where its own would mislead; `Unsupported` unless this is said.
    fn unix_connect(&mut self, path: &FilePath, token: Token) -> io::Result<Box<dyn TcpStream>> {
        let _ = (path, token);
        Err(io::ErrorKind::Unsupported.into())
    }

    /// Starts to resolve `host`; `token` becomes ready when [`Net::resolved`] has an answer.
    /// A literal address is answered at once.
    fn resolve(&mut self, host: &str, port: u16, token: Token);

    /// The answer to [`Net::resolve`] under `token`, once: every address, in the resolver's order.
    fn resolved(&mut self, token: Token) -> Option<io::Result<Vec<SocketAddr>>>;

    /// Why no stream could be opened to a peer last, and when; `None` since one was.
    fn carrier_failure(&self, peer: &str) -> Option<(Instant, Arc<str>)> {
        let _ = peer;
        None
    }

    /// This worker's queue of the TUN device, once; its readiness is reported under `token`. `None` without a `[tun]`.
    ///
    /// # Errors
    /// The kernel's, when the queue cannot be watched.
    fn tun(&mut self, token: Token) -> io::Result<Option<Box<dyn TunQueue>>> {
        let _ = token;
        Ok(None)
    }
}

/// The options with which a UDP socket is opened.
#[derive(Clone, Debug)]
pub struct UdpOptions {
    /// The address to bind; port 0 lets the kernel choose.
    pub bind: SocketAddr,
    /// Connect to this address, so that only its datagrams arrive and its refusals are reported.
    pub connect: Option<SocketAddr>,
    /// The role of the socket. It decides the path-MTU and steering options, and labels the socket's metrics.
    pub role: UdpRole,
    /// `SO_RCVBUF` and `SO_SNDBUF` to ask for, in bytes.
    pub buffer_bytes: usize,
    /// `SO_BINDTODEVICE`: packets leave by this interface alone, and only its packets come in.
    pub interface: Option<Arc<str>>,
    /// `SO_MARK`, 0 for none. Underlay sockets only.
    pub mark: u32,
    /// Whether `UDP_SEGMENT` may be used at all.
    pub gso: bool,
}

base::labelled! {
    /// The role of a UDP socket.
    #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
    pub enum UdpRole {
        /// The underlay: carries QUIC, listens for peers. `IP_MTU_DISCOVER = PROBE`, PKTINFO, a probe bind before.
        QuicListen => "quic_listen",
        /// The underlay: carries QUIC, one dialled lane or connection.
        QuicDial => "quic_dial",
        /// A local port whose datagrams go to a peer. PKTINFO, a probe bind before.
        Ingress => "ingress",
        /// One flow's connected socket to a service.
        Upstream => "upstream",
        /// A connected socket to the decoy, for one unauthenticated sender. `IP_MTU_DISCOVER = PROBE`, so that nothing is
        /// fragmented on the way.
        Decoy => "decoy",
    }
}

impl UdpRole {
    /// Whether the socket carries QUIC, which probes the path's MTU by itself and looks at the ECN bits.
    fn is_quic(self) -> bool {
        match self {
            Self::QuicListen | Self::QuicDial | Self::Decoy => true,
            Self::Ingress | Self::Upstream => false,
        }
    }

    /// Whether anyone may send to it: it tells at which local address each datagram came, and each worker has one.
    fn listens(self) -> bool {
        match self {
            Self::QuicListen | Self::Ingress => true,
            Self::QuicDial | Self::Upstream | Self::Decoy => false,
        }
    }
}

/// A non-blocking UDP socket that moves batches.
pub trait UdpSocket {
    /// The address that the socket is bound to.
    fn local_addr(&self) -> SocketAddr;

    /// Fills `batch` (cleared first) with what is waiting, up to its capacity.
    ///
    /// # Errors
    /// `WouldBlock` when nothing is waiting: the token is reported when something is. An ICMP error that the kernel
    /// reports on a connected socket is `ConnectionRefused` or the like and costs nothing else: call again until
    /// `WouldBlock`.
    fn receive(&mut self, batch: &mut ReceiveBatch) -> io::Result<()>;

    /// Sends the committed messages of `batch` in order and clears it, calling `outcome` once per message.
    /// When the kernel would block, what is left stays in `batch` and the token is reported when there is room.
    fn send(&mut self, batch: &mut SendBatch, outcome: &mut dyn FnMut(&batch::Message, SendOutcome));

    /// Sends a burst in one message and without a batch. Returns the bytes of the datagrams that are done, whatever became of them;
    /// `outcome` is called if that is the whole burst. The others need a batch: there is no room for them, or the socket sends batches
    /// only.
    fn send_now(&mut self, _burst: &Burst<'_>, _outcome: &mut dyn FnMut(SendOutcome)) -> usize {
        0
    }

    /// Sends payloads straight from the buffers of `received`, as `delivery` lists them (scattered pieces of one
    /// message are gathered by the kernel and cut by `UDP_SEGMENT`), clears `delivery`, and calls `outcome` once
    /// per message. A message that would block is reported as such and dropped: the caller counts it.
    fn deliver(
        &mut self,
        received: &ReceiveBatch,
        delivery: &mut Delivery,
        outcome: &mut dyn FnMut(&DeliveryMessage, SendOutcome),
    );

    /// The far end is silent: tries the other way to it as well, if the socket has one, and says whether it has.
    fn seek(&mut self) -> bool {
        false
    }

    /// The way that packets to the far end take, at a socket that may have others than UDP.
    fn taken(&self) -> Option<way::Taken> {
        None
    }

    /// Whether packets take another way since this was last asked, which the far end learns from a packet.
    fn take_moved(&mut self) -> bool {
        false
    }

    /// Takes what the kernel has refused since this was last asked.
    fn take_refusals(&mut self) -> Vec<SendRefusal> {
        Vec::new()
    }

    /// The monotonic counts of the socket so far.
    fn stats(&self) -> UdpStats;

    /// The bytes of the receive buffer that the kernel has granted, as they were asked for; `None` if that is not known.
    fn receive_buffer(&self) -> Option<usize> {
        None
    }

    /// The receive queue as the kernel knows it (`SO_MEMINFO`).
    fn kernel_queue(&self) -> KernelQueue;

    /// Buffers that the kernel dropped because the receive queue was full, buffers not datagrams.
    fn kernel_drops(&self) -> u64 {
        self.kernel_queue().drops
    }

    /// The way in which the kernel moves datagrams to and from `destination`. For operators: it may ask the kernel.
    fn offload(&self, destination: SocketAddr) -> UdpOffload {
        let _ = destination;
        UdpOffload::default()
    }
}

/// The receive queue of a UDP socket, as the kernel knows it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct KernelQueue {
    /// Buffers dropped because it was full, since the socket was opened.
    pub drops: u64,
    /// The bytes of the kernel's memory that wait in the buffer: payloads, and some hundred bytes of bookkeeping for each.
    pub bytes: u64,
}

/// The way in which the kernel moves the datagrams of a UDP socket.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct UdpOffload {
    /// Many datagrams in one message out (`UDP_SEGMENT`).
    pub gso: Gso,
    /// Many datagrams in one buffer in (`UDP_GRO`).
    pub gro: bool,
}

/// Whether a socket sends with `UDP_SEGMENT`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Gso {
    /// The socket sends with `UDP_SEGMENT` to every destination.
    On,
    /// The kernel has none, or `transport.gso` is off.
    #[default]
    Off,
    /// Not to this destination, where it failed; it is tried again within a minute.
    Failed,
}

/// One queue of a TUN device, not blocking.
pub trait TunQueue {
    /// Fills `batch` (cleared first) with the packets that wait, one in each slot without its virtio header, and `headers`
    /// (cleared first) with what was said of each, until the batch is full or holds `most_bytes`.
    ///
    /// # Errors
    /// `WouldBlock` when nothing waits: the token is reported when something does. Any other error is the device's, which is
    /// then down or gone.
    fn receive(
        &mut self,
        batch: &mut ReceiveBatch,
        headers: &mut Vec<VnetHeader>,
        most_bytes: usize,
    ) -> io::Result<()>;

    /// Writes the packets that `delivery` lists, whose bytes lie in `received`, clears the list, and calls `outcome` once per
    /// message.
    fn deliver(
        &mut self,
        received: &ReceiveBatch,
        delivery: &mut PacketDelivery,
        outcome: &mut dyn FnMut(&PacketMessage, SendOutcome),
    );

    /// Writes one packet of our own making, with complete checksums.
    fn send(&mut self, packet: &[u8]) -> SendOutcome;

    /// The offloads that the device supports in both directions.
    fn offload(&self) -> TunOffload;

    /// The monotonic counts of the queue so far.
    fn stats(&self) -> TunStats;
}

/// Monotonic counts of one queue of a TUN device.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct TunStats {
    /// `read` calls that returned a packet or super-packet.
    pub reads: u64,
    /// Bytes that were read, virtio headers excluded.
    pub read_bytes: u64,
    /// Reads that returned a super-packet, counted in `reads` as well.
    pub read_super: u64,
    /// Of those, super-packets of packets inside of a tunnel.
    pub read_tunnel: u64,
    /// Reads whose virtio header was of a kind that was not asked for; their packets are lost.
    pub read_errors: u64,
    /// `writev` calls that the kernel took.
    pub writes: u64,
    /// Bytes that were written, virtio headers excluded.
    pub write_bytes: u64,
    /// Writes that carried a super-packet, counted in `writes` as well.
    pub write_super: u64,
    /// Of those, super-packets of packets inside of a tunnel.
    pub write_tunnel: u64,
    /// Writes that the kernel refused to take.
    pub write_errors: u64,
}

/// The outcome of sending one message.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SendOutcome {
    /// The kernel took the whole message.
    Sent,
    /// The message was cut into single datagrams after a failed GSO send, and some of them were not sent.
    Partly {
        /// The number of segments that were not sent.
        failed: u16,
        /// Why, for the last of them.
        why: SendFailure,
    },
    /// The kernel took no part of the message.
    Failed(SendFailure),
}

/// Why the kernel refused a datagram.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum SendFailure {
    /// No room in the socket's send buffer.
    WouldBlock,
    /// EMSGSIZE, EINVAL: larger than the path or the interface takes.
    TooLarge,
    /// ECONNREFUSED: nobody listens at the far end (reported for an earlier datagram, and again after one retry).
    Refused,
    /// ENETUNREACH, EHOSTUNREACH, EADDRNOTAVAIL: no route, or the local address is gone.
    Unreachable,
    /// ENOBUFS, ENOMEM: the kernel is out of memory for packets.
    NoBuffers,
    /// A stream that carries packets does not take them as fast as they come, or has ended.
    CarrierFull,
    /// EPERM, EACCES: a firewall refused it.
    Forbidden,
    /// The kernel gave any other error.
    Other,
}

/// A listening TCP socket that does not block.
pub trait TcpListener {
    /// The address that the socket is bound to.
    fn local_addr(&self) -> SocketAddr;
    /// Takes the next connection; its readiness is reported under `token` from then on.
    ///
    /// # Errors
    /// `WouldBlock` when none waits. `EMFILE` and the like are returned as they are; the token is not reported for
    /// what still waits then, so try again after a while.
    fn accept(&mut self, token: Token) -> io::Result<(Box<dyn TcpStream>, SocketAddr)>;
    /// Whether a connection waits to be taken; the next one is reported only after an [`accept`](Self::accept) that found none.
    fn has_waiting(&self) -> bool;
}

/// A TCP connection that does not block.
pub trait TcpStream {
    /// Whether a connect that was started has ended: `WouldBlock` while it goes on, then its result.
    ///
    /// # Errors
    /// `WouldBlock`, or why the connection failed.
    fn connected(&mut self) -> io::Result<()>;
    /// Reads; `Ok(0)` is the end of the stream.
    ///
    /// # Errors
    /// `WouldBlock`, or what ended the connection.
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize>;
    /// Writes a part.
    ///
    /// # Errors
    /// `WouldBlock`, or what ended the connection.
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize>;
    /// Writes a part of several buffers, one after the other, in one call.
    ///
    /// # Errors
    /// As [`TcpStream::write`].
    fn write_vectored(&mut self, buffers: &[io::IoSlice<'_>]) -> io::Result<usize>;
    /// Sends a FIN: nothing more will be written.
    ///
    /// # Errors
    /// The kernel's, e.g. `NotConnected`.
    fn shutdown_write(&mut self) -> io::Result<()>;
    /// Whether the connection has ended by a reset or another error that no call has returned yet. What came before may still be to
    /// read. The token is reported when this becomes true, even if nothing was read or written since.
    fn has_failed(&self) -> bool;
    /// The number of bytes that were written and that the other end has not acknowledged (SIOCOUTQ); a reset discards them.
    ///
    /// # Errors
    /// The kernel's.
    fn unacknowledged(&self) -> io::Result<usize>;
    /// Drops the connection with a reset instead of a FIN (`SO_LINGER` 0).
    fn abort(&mut self);
    /// Has the kernel ask whether the far end is there while nothing comes from it and nothing waits for it. If it does not answer,
    /// the connection fails, which makes it ready.
    ///
    /// # Errors
    /// The kernel's, e.g. `NotConnected` after [`TcpStream::abort`].
    fn keep_alive(&self, keepalive: Keepalive) -> io::Result<()>;
    /// What waits for the far end and is not answered. While something does, the kernel's keepalive is silent.
    ///
    /// # Errors
    /// As [`TcpStream::keep_alive`].
    fn unanswered(&self) -> io::Result<Unanswered>;
    /// Whether the connection has failed because the far end does not answer, or no route leads to it any more.
    fn is_lost(&self) -> bool;
    /// The address of this end, likewise.
    fn near_end(&self) -> Option<SocketAddr> {
        None
    }
    /// The address of the far end, if it has one and the connection is there. For operators: it may ask the kernel.
    fn far_end(&self) -> Option<SocketAddr> {
        None
    }
}

/// The address family and address that a wildcard stands for when dialling `remote`.
#[must_use]
pub fn wildcard_for(remote: SocketAddr) -> SocketAddr {
    match remote.ip() {
        IpAddr::V4(_) => SocketAddr::from(([0, 0, 0, 0], 0)),
        IpAddr::V6(_) => SocketAddr::from(([0u16; 8], 0)),
    }
}

/// The address that `host` is, an IPv6 address also in brackets; `None`: it is a name.
fn literal(host: &str) -> Option<IpAddr> {
    host.strip_prefix('[').and_then(|rest| rest.strip_suffix(']')).unwrap_or(host).parse().ok()
}
