//! A TUN device of the kernel: how it is opened, a queue for each worker, packets in and out. Its addresses, its MTU and its
//! routes are set in `engine/src/tunnel/`.
//!
//! ```text
//!   with offload:     virtio header (10 B) | packet, or super-packet of up to 64 KiB
//!   from Linux 6.17:  virtio header (24 B) | also those of packets inside of VXLAN and Geneve tunnels
//!   without:          packet
//! ```
//!
//! The device lives as long as one of its queues is open, unless it is removed: when the process ends, it and its routes
//! are gone.

use std::{
    fs,
    io::{self, IoSliceMut},
    iter,
    os::fd::{AsFd, BorrowedFd},
    sync::Arc,
    task::{Context, Poll, Waker},
};

use ip::{
    packets::{PacketDelivery, PacketMessage, TunOffload, TunnelOffload},
    vnet::{Gso, TUNNEL_VNET_HEADER_BYTES, VNET_HEADER_BYTES, VnetHeader},
};
use tokio::io::{Interest, unix::AsyncFd};
use tun_rs::{DeviceBuilder, SyncDevice};

use crate::{
    ReceiveBatch, SendFailure, SendOutcome, Token, TunQueue, TunStats, batch::Meta, ready::SourceWaker, sys,
    udp::Shared,
};

/// The device file of the kernel's TUN driver.
pub const DRIVER: &str = "/dev/net/tun";

/// A device that was opened: its name, and a share for each worker.
pub struct TunDevice {
    /// The index of the network interface.
    pub index: u32,
    /// The offloads that the device supports.
    pub offload: TunOffload,
    /// One for each worker, in worker order.
    pub ports: Vec<TunPort>,
    /// Keeps it when the workers have let go of theirs.
    pub hold: TunHold,
}

/// Keeps a device open until it is dropped.
#[derive(Clone)]
pub struct TunHold(Arc<SyncDevice>);

impl TunHold {
    /// Whether there is still a device behind the open file, in whatever network namespace it is.
    #[must_use]
    pub fn is_there(&self) -> bool {
        self.0.name().is_ok()
    }
}

/// One worker's share of a device, to be registered with that worker's runtime.
pub struct TunPort {
    queue: Arc<SyncDevice>,
    /// False on a device with a single queue, which another worker reads: this one only writes.
    reads: bool,
    offload: TunOffload,
}

impl TunDevice {
    /// Makes device `name`, which does not exist yet, with a queue for each of `workers`; it is down and has no addresses.
    ///
    /// A kernel without multi-queue devices gives one queue, which the first worker reads and all write to. A kernel that
    /// does not take `offload` gives none.
    ///
    /// # Errors
    /// The kernel's: `PermissionDenied` without CAP_NET_ADMIN, `NotFound` or ENODEV without `/dev/net/tun`, EBUSY or EINVAL
    /// when the name is taken.
    pub fn open(name: &str, workers: u8, offload: bool) -> io::Result<Self> {
        // The library would make it itself, for root and with whatever mode.
        fs::metadata(DRIVER)?;
        let (first, several) = make(name, offload)?;
        first.set_nonblocking(true)?;
        let (tcp, udp) = (first.tcp_gso(), first.tcp_gso() && first.udp_gso());
        let index = first.if_index()?;
        let first = Arc::new(first);
        let hold = TunHold(Arc::clone(&first));
        let mut queues = vec![(Arc::clone(&first), true)];
        for _ in 1..workers {
            let queue = if several {
                let queue = first.try_clone()?;
                queue.set_nonblocking(true)?;
                Arc::new(queue)
            } else {
                Arc::clone(&first)
            };
            queues.push((queue, several));
        }
        // Each new queue sets the offloads of the device anew, so this comes last.
        let tunnels = TunnelOffload { cut: udp && cut_tunnels(first.as_fd()), ..TunnelOffload::default() };
        let offload = TunOffload { tcp, udp, tunnels };
        let port = |(queue, reads)| TunPort { queue, reads, offload };
        let ports = queues.into_iter().map(port).collect();
        Ok(Self { index, offload, ports, hold })
    }

    /// Lets packets inside of tunnels be written as super-packets, as far as `trial` finds that the kernel takes them
    /// ([`crate::tunnels::probe`]); it is asked only where the kernel hands them over.
    pub fn join_tunnels(&mut self, trial: impl FnOnce() -> TunnelOffload) {
        if self.offload.tunnels.cut {
            self.offload.tunnels = trial();
            self.ports.iter_mut().for_each(|port| port.offload = self.offload);
        }
    }
}

/// The offloads of linux/if_tun.h: checksums, TCP and UDP over both versions of IP.
const TUN_F_PLAIN: libc::c_uint =
    libc::TUN_F_CSUM | libc::TUN_F_TSO4 | libc::TUN_F_TSO6 | libc::TUN_F_USO4 | libc::TUN_F_USO6;

/// Super-packets inside of UDP tunnels without an outer checksum, and with one (Linux 6.17).
const TUN_F_UDP_TUNNELS: libc::c_uint = 0x80 | 0x100;

/// Has a TUN device hand over super-packets inside of tunnels, behind the longer virtio header; false where the kernel has none,
/// and then the device is as it was.
pub(crate) fn cut_tunnels(device: BorrowedFd<'_>) -> bool {
    let header = |bytes: usize| sys::set_vnet_header(device, bytes as libc::c_int);
    // In this order: with these offloads and the short header, reads fail and lose their packets.
    let enabled = header(TUNNEL_VNET_HEADER_BYTES)
        .and_then(|()| sys::set_tun_offload(device, TUN_F_PLAIN | TUN_F_UDP_TUNNELS));
    if let Err(error) = &enabled {
        tracing::debug!(%error, "the kernel hands over no super-packets of tunnels");
        if let Err(error) = header(VNET_HEADER_BYTES).and_then(|()| sys::set_tun_offload(device, TUN_F_PLAIN))
        {
            tracing::warn!(%error, "the TUN device may hand over nothing (remedy: tun.offload = \"off\")");
        }
    }
    enabled.is_ok()
}

/// Makes the device with the most that the kernel gives: several queues and offload, one of them, none; and whether it may
/// have several queues.
fn make(name: &str, offload: bool) -> io::Result<(SyncDevice, bool)> {
    let attempt = |several: bool, offload: bool| {
        let builder = DeviceBuilder::new().name(name).multi_queue(several).offload(offload);
        builder.inherit_enable_state().build_sync()
    };
    let (most, fallbacks) = match offload {
        true => ((true, true), &[(true, false), (false, true), (false, false)][..]),
        false => ((true, false), &[(false, false)][..]),
    };
    let error = match attempt(most.0, most.1) {
        Ok(device) => return Ok((device, most.0)),
        // What an old kernel says of a flag that it does not know; any other error is of another kind.
        Err(error) if error.raw_os_error() == Some(libc::EINVAL) => error,
        Err(error) => return Err(error),
    };
    for (several, offload) in fallbacks {
        if let Ok(device) = attempt(*several, *offload) {
            tracing::warn!(
                several,
                offload,
                "the kernel does not take a TUN device with several queues and offload: packets cost more (remedy: none is needed)"
            );
            return Ok((device, *several));
        }
    }
    Err(error)
}

/// A queue of a TUN device of the kernel.
pub(super) struct KernelTun {
    queue: Arc<SyncDevice>,
    /// The registered queue; none when another worker reads it.
    reader: Option<AsyncFd<Arc<SyncDevice>>>,
    waker: Waker,
    shared: Shared,
    offload: TunOffload,
    stats: TunStats,
}

impl KernelTun {
    /// Registers `port` with the current runtime, and reports its first readiness under `token`.
    pub(super) fn new(port: TunPort, token: Token, shared: &Shared) -> io::Result<Self> {
        let TunPort { queue, reads, offload } = port;
        let waker = SourceWaker::waker(token, &shared.ready);
        let reader = if reads { Some(sys::watch(Arc::clone(&queue), Interest::READABLE)?) } else { None };
        if let Some(reader) = &reader
            && reader.poll_read_ready(&mut Context::from_waker(&waker)).is_ready()
        {
            waker.wake_by_ref();
        }
        Ok(Self { queue, reader, waker, shared: shared.clone(), offload, stats: TunStats::default() })
    }

    /// Writes one packet, and counts it.
    fn write<'b>(&mut self, vnet: &VnetHeader, pieces: impl Iterator<Item = &'b [u8]>) -> SendOutcome {
        let header = vnet.encode();
        // In one chain, whose lifetime is the header's.
        let header = &header[..header_bytes(self.offload)];
        let packet = iter::once(header).chain(pieces.map(|piece: &[u8]| piece));
        let result = sys::write_gathered(self.queue.as_fd(), &mut self.shared.scratch.borrow_mut(), packet);
        match result {
            Ok(written) => {
                self.stats.writes += 1;
                self.stats.write_bytes += written.saturating_sub(header.len()) as u64;
                self.stats.write_super += u64::from(vnet.gso != Gso::None);
                self.stats.write_tunnel += u64::from(vnet.tunnel.is_some());
                SendOutcome::Sent
            }
            Err(error) => {
                self.stats.write_errors += 1;
                tracing::trace!(%error, ?vnet, "the TUN device does not take a packet");
                SendOutcome::Failed(failure(&error))
            }
        }
    }
}

impl TunQueue for KernelTun {
    fn receive(
        &mut self,
        batch: &mut ReceiveBatch,
        headers: &mut Vec<VnetHeader>,
        most_bytes: usize,
    ) -> io::Result<()> {
        batch.clear();
        headers.clear();
        let Some(reader) = &self.reader else { return Err(io::ErrorKind::WouldBlock.into()) };
        let mut bytes = 0;
        while batch.is_empty() {
            // Where nothing waits, this is what has the token reported.
            let Poll::Ready(guard) = reader.poll_read_ready(&mut Context::from_waker(&self.waker)) else {
                return Err(io::ErrorKind::WouldBlock.into());
            };
            let mut guard = guard?;
            while batch.len() < batch.slots() && bytes < most_bytes {
                let slot = batch.len();
                let (header, len) = match read(reader.get_ref(), header_bytes(self.offload), batch.room(slot))
                {
                    Ok(packet) => packet,
                    Err(error) if error.kind() == io::ErrorKind::WouldBlock => {
                        guard.clear_ready();
                        break;
                    }
                    // One packet that the kernel cannot describe in its header, which is lost.
                    Err(error) if error.raw_os_error() == Some(libc::EINVAL) => {
                        self.stats.read_errors += 1;
                        continue;
                    }
                    // The device is gone. It comes again, with nothing before it; then the token is not reported any more.
                    Err(_) if !batch.is_empty() => break,
                    Err(error) => return Err(error),
                };
                let Some(header) = header else {
                    self.stats.read_errors += 1;
                    continue;
                };
                self.stats.reads += 1;
                self.stats.read_bytes += len as u64;
                self.stats.read_super += u64::from(header.gso != Gso::None);
                self.stats.read_tunnel += u64::from(header.tunnel.is_some());
                bytes += len;
                batch.accept(slot, Meta { len, segment: len, ..Meta::EMPTY });
                headers.push(header);
            }
        }
        Ok(())
    }

    fn deliver(
        &mut self,
        received: &ReceiveBatch,
        delivery: &mut PacketDelivery,
        outcome: &mut dyn FnMut(&PacketMessage, SendOutcome),
    ) {
        for message in delivery.messages() {
            let pieces = iter::once(delivery.header(message)).chain(delivery.pieces(message, received));
            let result = self.write(&message.vnet, pieces);
            outcome(message, result);
        }
        delivery.clear();
    }

    fn send(&mut self, packet: &[u8]) -> SendOutcome {
        self.write(&VnetHeader::default(), iter::once(packet))
    }

    fn offload(&self) -> TunOffload {
        self.offload
    }

    fn stats(&self) -> TunStats {
        self.stats
    }
}

/// The bytes of the virtio header before each packet.
fn header_bytes(offload: TunOffload) -> usize {
    match (offload.tcp, offload.tunnels.cut) {
        (false, _) => 0,
        (true, false) => VNET_HEADER_BYTES,
        (true, true) => TUNNEL_VNET_HEADER_BYTES,
    }
}

/// Reads one packet, behind a virtio header of `header_bytes`, into `room`: its header, if it is of a kind that we know, and its length.
fn read(queue: &SyncDevice, header_bytes: usize, room: &mut [u8]) -> io::Result<(Option<VnetHeader>, usize)> {
    if header_bytes == 0 {
        return Ok((Some(VnetHeader::default()), queue.recv(room)?));
    }
    let mut header = [0; TUNNEL_VNET_HEADER_BYTES];
    let header = &mut header[..header_bytes];
    let read = queue.recv_vectored(&mut [IoSliceMut::new(header), IoSliceMut::new(room)])?;
    let known = VnetHeader::decode(header).filter(|_| read > header_bytes);
    Ok((known, read.saturating_sub(header_bytes)))
}

/// The reason for a drop that an error of `writev` stands for.
fn failure(error: &io::Error) -> SendFailure {
    match error.raw_os_error() {
        Some(libc::EAGAIN) => SendFailure::WouldBlock,
        // The device is down, or gone.
        Some(libc::EIO | libc::ENETDOWN | libc::EBADFD | libc::ENODEV) => SendFailure::Unreachable,
        Some(libc::ENOBUFS | libc::ENOMEM) => SendFailure::NoBuffers,
        Some(libc::EINVAL | libc::EMSGSIZE) => SendFailure::TooLarge,
        Some(libc::EPERM | libc::EACCES) => SendFailure::Forbidden,
        _ => SendFailure::Other,
    }
}
