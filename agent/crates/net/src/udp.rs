//! UDP sockets of the kernel: how each role is opened, batches in, readiness. How messages go out is in `transmit.rs`.
//!
//! Only readability is registered for good. A socket that also watched for writability would wake its worker each time
//! that the receiver frees a buffer; so writability is watched on a duplicate, from a full send buffer until there is room.

use std::{
    cell::{Cell, RefCell},
    io,
    net::SocketAddr,
    os::fd::{AsFd, BorrowedFd},
    rc::Rc,
    sync::Once,
    task::{Context, Poll, Waker},
    time::{Duration, Instant},
};

use base::clock::Clock;
use socket2::{Domain, Protocol, Socket, Type};
use tokio::{
    io::{Interest, unix::AsyncFd},
    task::JoinHandle,
};

use crate::{
    Delivery, DeliveryMessage, KernelQueue, Ready, ReceiveBatch, SendBatch, SendOutcome, SendRefusal, Token,
    UdpOffload, UdpOptions, UdpRole, UdpSocket, UdpStats,
    batch::{Burst, MAX_MESSAGE_BYTES, MAX_SEGMENTS, MOST_SEGMENTS, Message},
    process::leaves_descriptors,
    ready::SourceWaker,
    sys::{self, Received, Scratch},
    transmit::{Cargo, Contiguous, Means, Scattered, Transmitter, abandon},
};

/// The state that the sockets of one worker share.
#[derive(Clone)]
pub(super) struct Shared {
    pub(super) ready: Ready,
    pub(super) clock: Rc<dyn Clock>,
    pub(super) scratch: Rc<RefCell<Scratch>>,
}

/// A UDP socket of the kernel.
pub(super) struct KernelUdp {
    fd: AsyncFd<Socket>,
    /// A duplicate of the socket, while the send buffer is full.
    writable: Option<AsyncFd<Socket>>,
    /// The function that registers that duplicate; tests have it fail.
    pub(super) watch: fn(Socket) -> io::Result<AsyncFd<Socket>>,
    /// Wakes the worker later, while there is no descriptor for the duplicate.
    again: Option<JoinHandle<()>>,
    waker: Waker,
    shared: Shared,
    local: SocketAddr,
    pub(super) transmitter: Transmitter,
    stats: UdpStats,
    ages: Ages,
    /// The greatest age since the counts were last asked for.
    age_max_nanos: Cell<u64>,
    /// The kernel's drop count, which wraps at 2^32, and ours, which does not.
    drops: Cell<(u32, u64)>,
}

/// The knowledge of a socket about the ages of its buffers, from asking for timestamps in one call of [`STAMPED_CALLS`].
#[derive(Default)]
struct Ages {
    calls: u32,
    /// The age of the last buffer that was stamped, while the queue has not been empty since.
    held: Duration,
    /// The newest that is known of the last buffer, or of an empty queue.
    seen: Option<Seen>,
}

/// An upper bound of the time that a buffer had waited, at some time of the monotonic clock. Buffers that are read later came
/// later.
#[derive(Clone, Copy, Debug)]
struct Seen {
    age: Duration,
    at: Instant,
}

impl Seen {
    /// An upper bound of the time that the next buffers have waited.
    fn oldest(self, now: Instant) -> Duration {
        self.age + now.saturating_duration_since(self.at)
    }
}

/// Telling costs 65 ns per buffer, and switching it on and off 700 ns (measured on loopback, where receiving a buffer
/// takes 460 to 800 ns). In one call of 16 that adds 6 ns per buffer to calls of 32, and 26 ns to calls of 2.
const STAMPED_CALLS: u32 = 16;

impl Ages {
    /// Receives into `batch`; also tells whether its buffers are stamped. The stamps are of the wall clock, which may be set: an age
    /// is not above what the monotonic `clock` allows, which is read twice in [`STAMPED_CALLS`].
    fn receive(
        &mut self,
        socket: BorrowedFd<'_>,
        batch: &mut ReceiveBatch,
        scratch: &mut Scratch,
        clock: &dyn Clock,
    ) -> io::Result<(Received, bool)> {
        let stamped = self.calls.is_multiple_of(STAMPED_CALLS) && sys::set_timestamps(socket, true).is_ok();
        let result = sys::receive(socket, batch, scratch, (!stamped).then_some(self.held));
        if stamped && let Err(error) = sys::set_timestamps(socket, false) {
            tracing::debug!(%error, "a socket goes on telling timestamps");
        }
        let now = (stamped || self.calls % STAMPED_CALLS == STAMPED_CALLS - 1).then(|| clock.now());
        if stamped && let (Some(seen), Some(now)) = (self.seen, now) {
            batch.limit_ages(seen.oldest(now));
        }
        let last = batch.len().checked_sub(1).map(|last| batch.meta(last).age);
        self.held = match &result {
            Ok(received) if received.buffers == batch.slots() => last.unwrap_or(self.held),
            Ok(_) | Err(_) => Duration::ZERO,
        };
        if let Some(at) = now
            && (stamped || self.held.is_zero())
        {
            self.seen = Some(Seen { age: self.held, at });
        }
        let received = result?;
        self.calls = self.calls.wrapping_add(1);
        Ok((received, stamped))
    }
}

/// The time that a socket without room waits if it cannot be watched. A buffer of 4 MiB takes 34 ms to empty at 1 Gbit/s.
const UNWATCHED_RETRY: Duration = Duration::from_millis(5);

impl KernelUdp {
    /// Opens a socket and reports its first readiness under `token`.
    ///
    /// It sets neither `SO_REUSEPORT` nor `SO_REUSEADDR`, so the bind is also the probe that finds a second daemon.
    pub(super) fn open(options: &UdpOptions, token: Token, shared: &Shared) -> io::Result<Self> {
        let socket = configured(options)?;
        match options.role {
            UdpRole::Upstream | UdpRole::Decoy => leaves_descriptors(socket.as_fd())?,
            UdpRole::QuicListen | UdpRole::QuicDial | UdpRole::Ingress => {}
        }
        socket.bind(&options.bind.into())?;
        if let Some(remote) = options.connect {
            socket.connect(&remote.into())?;
        }
        Self::adopt(socket, options, token, shared)
    }

    /// Takes a socket that `configured` made and that is bound, and reports its first readiness under `token`.
    pub(super) fn adopt(
        socket: Socket,
        options: &UdpOptions,
        token: Token,
        shared: &Shared,
    ) -> io::Result<Self> {
        let local =
            socket.local_addr()?.as_socket().ok_or_else(|| io::Error::from(io::ErrorKind::Unsupported))?;
        let gso = options.gso && sys::probe_gso(socket.as_fd());
        let waker = SourceWaker::waker(token, &shared.ready);
        let fd = watch_readable(socket, options.connect.is_some(), &waker)?;
        Ok(Self {
            fd,
            writable: None,
            watch: |socket| sys::watch(socket, Interest::WRITABLE),
            again: None,
            waker,
            shared: shared.clone(),
            local,
            transmitter: Transmitter::new(options.connect, gso),
            stats: UdpStats::default(),
            ages: Ages::default(),
            age_max_nanos: Cell::new(0),
            drops: Cell::new((0, 0)),
        })
    }

    /// Connects a connected socket to another address of the same family.
    pub(super) fn reconnect(&mut self, remote: SocketAddr) -> io::Result<()> {
        self.fd.get_ref().connect(&remote.into())?;
        self.transmitter.set_connected(remote);
        Ok(())
    }

    /// The ICMP error that a connected socket met while it had no data; the kernel does not call that readable.
    fn take_error(&mut self) -> Option<io::Error> {
        let reported = self.transmitter.is_connected()
            && self.fd.poll_write_ready(&mut Context::from_waker(&self.waker)).is_ready();
        if !reported {
            return None;
        }
        let error = self.fd.get_ref().take_error().ok().flatten();
        // The runtime took the error for the end of the write side, which lasts; a new registration does not know it.
        let again =
            self.fd.get_ref().try_clone().and_then(|socket| watch_readable(socket, true, &self.waker));
        match again {
            Ok(fd) => self.fd = fd,
            Err(error) => tracing::debug!(%error, "the next refusal is seen when a send or receive meets it"),
        }
        error
    }

    /// Sends `messages` until the kernel would block; returns how many are done.
    fn transmit<'b, C: Cargo<'b>>(
        &mut self,
        messages: &mut [C::Message],
        cargo: &C,
        outcome: &mut dyn FnMut(&C::Message, SendOutcome),
    ) -> usize {
        // Taken out of `self`, because `outcome` may use another socket of the worker.
        let mut scratch = self.shared.scratch.take();
        let mut means = Means {
            socket: self.fd.get_ref().as_fd(),
            scratch: &mut scratch,
            clock: &*self.shared.clock,
            stats: &mut self.stats,
        };
        let done = self.transmitter.transmit(messages, cargo, &mut means, outcome);
        self.shared.scratch.replace(scratch);
        if self.transmitter.refused {
            self.waker.wake_by_ref();
        }
        done
    }

    /// Sends the first `count` messages of a batch as [`UdpSocket::send`] does all; returns whether they are done.
    pub(super) fn send_first(
        &mut self,
        batch: &mut SendBatch,
        count: usize,
        outcome: &mut dyn FnMut(&Message, SendOutcome),
    ) -> bool {
        if count == 0 {
            return true;
        }
        if self.is_blocked() {
            return false;
        }
        let (messages, bytes) = batch.parts();
        let done = self.transmit(&mut messages[..count], &Contiguous(bytes), outcome);
        batch.release(done);
        if done < count {
            self.watch_writable();
        }
        done == count
    }

    /// Whether the send buffer was full and still is.
    fn is_blocked(&mut self) -> bool {
        let Some(writable) = &self.writable else { return false };
        let blocked = writable.poll_write_ready(&mut Context::from_waker(&self.waker)).is_pending();
        if !blocked {
            self.writable = None;
        }
        blocked
    }

    /// Reports the token when the send buffer has room again.
    fn watch_writable(&mut self) {
        let watched = self.fd.get_ref().try_clone().and_then(self.watch);
        match watched {
            Ok(writable) => {
                if writable.poll_write_ready(&mut Context::from_waker(&self.waker)).is_ready() {
                    self.waker.wake_by_ref();
                }
                self.writable = Some(writable);
            }
            Err(error) => {
                // Out of descriptors: the worker comes back after a while instead of when there is room.
                tracing::debug!(%error, "cannot watch a socket for room to send");
                if self.again.as_ref().is_none_or(JoinHandle::is_finished) {
                    let waker = self.waker.clone();
                    #[expect(
                        clippy::disallowed_methods,
                        reason = "a panic in it ends the process, as one of the worker does"
                    )]
                    let again = tokio::spawn(async move {
                        tokio::time::sleep(UNWATCHED_RETRY).await;
                        waker.wake();
                    });
                    self.again = Some(again);
                }
            }
        }
    }
}

impl UdpSocket for KernelUdp {
    fn local_addr(&self) -> SocketAddr {
        self.local
    }

    fn receive(&mut self, batch: &mut ReceiveBatch) -> io::Result<()> {
        batch.clear();
        if std::mem::take(&mut self.transmitter.refused) {
            return Err(io::ErrorKind::ConnectionRefused.into());
        }
        loop {
            let Poll::Ready(guard) = self.fd.poll_read_ready(&mut Context::from_waker(&self.waker)) else {
                return Err(self.take_error().unwrap_or_else(|| io::ErrorKind::WouldBlock.into()));
            };
            let mut guard = guard?;
            let scratch = &mut self.shared.scratch.borrow_mut();
            let clock = &*self.shared.clock;
            let result = guard.try_io(|fd| self.ages.receive(fd.get_ref().as_fd(), batch, scratch, clock));
            let (received, stamped) = match result {
                Ok(result) => result?,
                Err(_would_block) => continue,
            };
            let emptied = received.buffers < batch.slots();
            if emptied {
                // The kernel met the end of its queue, so the next call need not ask again.
                guard.clear_ready();
            }
            drop(guard);
            self.stats.truncated += received.refused as u64;
            self.stats.count_received(batch, stamped);
            let oldest = std::mem::take(&mut self.stats.age_max_nanos);
            self.age_max_nanos.set(self.age_max_nanos.get().max(oldest));
            if !batch.is_empty() {
                // A connected socket may have met an error, which the next call takes.
                let watched = emptied && !self.transmitter.is_connected();
                if watched && self.fd.poll_read_ready(&mut Context::from_waker(&self.waker)).is_pending() {
                    batch.last = true;
                }
                return Ok(());
            }
        }
    }

    fn send(&mut self, batch: &mut SendBatch, outcome: &mut dyn FnMut(&Message, SendOutcome)) {
        let all = batch.messages().len();
        self.send_first(batch, all, outcome);
    }

    fn send_now(&mut self, burst: &Burst<'_>, outcome: &mut dyn FnMut(SendOutcome)) -> usize {
        let fits = burst.bytes.len() <= MAX_MESSAGE_BYTES
            && burst.bytes.len() <= burst.segment * MAX_SEGMENTS as usize;
        if !fits || self.is_blocked() {
            return 0;
        }
        let mut message = [Message::of_all(burst)];
        let cargo = Contiguous(burst.bytes);
        if self.transmit(&mut message, &cargo, &mut |_, result| outcome(result)) == 1 {
            return burst.bytes.len();
        }
        self.watch_writable();
        message[0].segment_range(message[0].progress.done).start
    }

    fn deliver(
        &mut self,
        received: &ReceiveBatch,
        delivery: &mut Delivery,
        outcome: &mut dyn FnMut(&DeliveryMessage, SendOutcome),
    ) {
        let (messages, pieces) = delivery.parts();
        let cargo = Scattered { received, pieces };
        let done = self.transmit(messages, &cargo, outcome);
        abandon(&mut messages[done..], &cargo, &mut self.stats, outcome);
        delivery.clear();
    }

    fn take_refusals(&mut self) -> Vec<SendRefusal> {
        std::mem::take(&mut self.transmitter.refusals)
    }

    fn stats(&self) -> UdpStats {
        UdpStats { age_max_nanos: self.age_max_nanos.take(), ..self.stats }
    }

    fn offload(&self, destination: SocketAddr) -> UdpOffload {
        let gro = sys::gro(self.fd.get_ref().as_fd()).unwrap_or(false);
        UdpOffload { gso: self.transmitter.gso_to(destination.ip()), gro }
    }

    fn receive_buffer(&self) -> Option<usize> {
        // The kernel reports it doubled.
        self.fd.get_ref().recv_buffer_size().ok().map(|bytes| bytes / 2)
    }

    fn kernel_queue(&self) -> KernelQueue {
        let (seen, total) = self.drops.get();
        // Without SO_MEMINFO (before Linux 4.12) the count stands still.
        let (bytes, now) = sys::receive_queue(self.fd.get_ref().as_fd()).unwrap_or((0, seen));
        let total = total + u64::from(now.wrapping_sub(seen));
        self.drops.set((now, total));
        KernelQueue { drops: total, bytes: u64::from(bytes) }
    }
}

/// Registers `socket` and reports its first readiness, and if it is `connected` its first error, to `waker`.
fn watch_readable(socket: Socket, connected: bool, waker: &Waker) -> io::Result<AsyncFd<Socket>> {
    let fd = sys::watch(socket, Interest::READABLE)?;
    let mut context = Context::from_waker(waker);
    // An error without data comes as the end of the write side.
    if fd.poll_read_ready(&mut context).is_ready()
        || (connected && fd.poll_write_ready(&mut context).is_ready())
    {
        waker.wake_by_ref();
    }
    Ok(fd)
}

/// The number of segments that this kernel takes in one message, found out by sending one over loopback.
///
/// # Errors
/// The kernel's, when that cannot be tried.
pub(super) fn probe_segments() -> io::Result<u16> {
    let (near, far) = (std::net::UdpSocket::bind("127.0.0.1:0")?, std::net::UdpSocket::bind("127.0.0.1:0")?);
    near.connect(far.local_addr()?)?;
    sys::set_segment(near.as_fd(), 1)?;
    let message = [0; MOST_SEGMENTS as usize];
    Ok(if near.send(&message).is_ok() { MOST_SEGMENTS } else { MAX_SEGMENTS })
}

/// An unbound socket with the options of its role.
pub(super) fn configured(options: &UdpOptions) -> io::Result<Socket> {
    let v6 = options.bind.is_ipv6();
    let socket = Socket::new(Domain::for_address(options.bind), Type::DGRAM, Some(Protocol::UDP))?;
    socket.set_nonblocking(true)?;
    if v6 {
        socket.set_only_v6(true)?;
    }
    if let Some(interface) = &options.interface {
        // A socket that is bound to a device stays so: without rights the kernel takes this once only, since Linux 5.7.
        socket.bind_device(Some(interface.as_bytes()))?;
    }
    if options.mark != 0 {
        socket.set_mark(options.mark)?;
    }
    if options.role.is_quic() {
        sys::set_mtu_probe(socket.as_fd(), v6)?;
        sys::set_receive_ecn(socket.as_fd(), v6)?;
    }
    if options.role.listens() {
        sys::set_pktinfo(socket.as_fd(), v6)?;
    }
    if let Err(error) = sys::set_gro(socket.as_fd()) {
        tracing::debug!(%error, "no UDP_GRO: each datagram comes in a buffer of its own");
    }
    let stamps = sys::set_timestamps(socket.as_fd(), true);
    if let Err(error) = stamps.and_then(|()| sys::set_timestamps(socket.as_fd(), false)) {
        tracing::debug!(%error, "no SO_TIMESTAMPNS: how long datagrams wait in the kernel is not known");
    }
    set_buffers(&socket, options.buffer_bytes)?;
    Ok(socket)
}

/// Asks for send and receive buffers of `bytes`, and warns once per process when the kernel gives less.
fn set_buffers(socket: &Socket, bytes: usize) -> io::Result<()> {
    // The kernel doubles the value for its bookkeeping, and reports it doubled.
    let bytes = i32::try_from(bytes).unwrap_or(i32::MAX).min(i32::MAX / 2);
    let asked = bytes.unsigned_abs() as usize;
    if sys::force_receive_buffer(socket.as_fd(), bytes).is_err() {
        socket.set_recv_buffer_size(asked)?;
    }
    if sys::force_send_buffer(socket.as_fd(), bytes).is_err() {
        socket.set_send_buffer_size(asked)?;
    }
    let receive = socket.recv_buffer_size()? / 2;
    let send = socket.send_buffer_size()? / 2;
    if receive < asked || send < asked {
        static WARNED: Once = Once::new();
        WARNED.call_once(|| {
            tracing::warn!(
                asked,
                receive,
                send,
                "socket buffers are smaller than asked, so bursts are lost (remedy: give the daemon CAP_NET_ADMIN, or run \
                 `sysctl -w net.core.rmem_max={asked} net.core.wmem_max={asked}`)"
            );
        });
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use base::clock::ManualClock;

    #[test]
    fn a_buffer_is_no_older_than_the_monotonic_clock_allows() {
        let clock = ManualClock::default();
        let seen = Seen { age: Duration::from_millis(3), at: clock.now() };
        assert_eq!(seen.oldest(clock.now()), Duration::from_millis(3));
        clock.advance(Duration::from_millis(20));
        assert_eq!(seen.oldest(clock.now()), Duration::from_millis(23));
        assert_eq!(Seen { age: Duration::ZERO, at: clock.now() }.oldest(clock.now()), Duration::ZERO);
    }
}
