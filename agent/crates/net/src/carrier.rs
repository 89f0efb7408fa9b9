//! Carriers: packets that another thread takes over a stream, in place of a UDP socket.
//!
//! ```text
//!   worker ── CarrierUdp ── StreamQueue (bounded, drops) ──► a stream's task      one for each stream
//!   worker ◄─ CarrierUdp ── Port (bounded, drops) ◄── a stream's task      one port for each socket
//! ```
//!
//! To a worker a carrier is a UDP socket: a dialled one has one queue, and a listening UDP socket has a queue for each client, by the
//! address that its packets seem to come from (`accepted.rs`, `listening.rs`). What does not fit is dropped and counted, as the kernel does; nothing waits
//! for a stream. A dialled socket may have both, UDP and a stream, and chooses between them (`choosing.rs`).
//!
//! A stream that is yet to be dialled has no address. The worker dials a [`label`] in its place: an address out of the prefix of which
//! routers discard all (RFC 6666), so that it is nobody's.

use std::{
    collections::VecDeque,
    io,
    net::{IpAddr, Ipv6Addr, SocketAddr},
    rc::Rc,
    sync::{
        Arc, Mutex,
        atomic::{AtomicBool, AtomicU64, Ordering},
    },
    time::{Duration, Instant},
};

use base::{
    clock::{Clock, SystemClock},
    panics::{Held, lock},
};
use tokio::sync::Notify;

use crate::{
    Delivery, DeliveryMessage, KernelQueue, Ready, ReceiveBatch, SendBatch, SendFailure, SendOutcome, Token,
    UdpSocket, UdpStats,
    accepted::{Known, Table},
    batch::{Message, Meta},
    way::{Because, Over, Taken},
};

pub use crate::accepted::{Accepted, Exit, client_of, is_stream};

/// The most that waits for a stream, in bytes: two bursts of a lane.
const MOST_OUT_BYTES: usize = 128 << 10;

/// How long a packet may wait for an open stream before others are dropped behind it: TCP repairs what it has taken, and a queue would only
/// add to the delay.
const LONGEST_WAIT: Duration = Duration::from_millis(5);

/// What may always wait, in bytes: one record of TLS.
const LEAST_OUT_BYTES: usize = 16 << 10;

/// The most that waits for a worker at one socket, in bytes.
const MOST_IN_BYTES: usize = 2 << 20;

/// The cost of a packet beside its bytes, so that empty ones are bounded too.
const OVERHEAD_BYTES: usize = 64;

/// The largest packet over a carrier: what Ethernet carries over IPv6, so that a session keeps its size when it comes from UDP.
pub const PACKET_BYTES: usize = 1_452;

/// The network of labels: 100:0:0:0::/64, whose packets are discarded.
const LABELS: [u16; 4] = [0x100, 0, 0, 0];

/// The address that stands for a stream to be dialled, by its number; 0 is the listening end's own.
#[must_use]
pub fn label(number: u32) -> SocketAddr {
    let [a, b, c, d] = LABELS;
    let [high, low] = [(number >> 16) as u16, number as u16];
    SocketAddr::new(IpAddr::V6(Ipv6Addr::new(a, b, c, d, 0, 0, high, low)), 443)
}

/// The number of a label; `None` for any other address.
#[must_use]
pub fn number_of(address: SocketAddr) -> Option<u32> {
    let IpAddr::V6(ip) = address.ip() else { return None };
    let segments = ip.segments();
    (segments[..4] == LABELS && segments[4..6] == [0, 0])
        .then(|| u32::from(segments[6]) << 16 | u32::from(segments[7]))
}

/// A queue of packets with a bound, which drops what does not fit.
#[derive(Debug)]
pub(super) struct Queue<T> {
    packets: VecDeque<(T, Vec<u8>)>,
    pub(super) bytes: usize,
    most_bytes: usize,
    pub(super) drops: u64,
}

impl<T> Queue<T> {
    fn new(most_bytes: usize) -> Self {
        Self { packets: VecDeque::new(), bytes: 0, most_bytes, drops: 0 }
    }

    fn put(&mut self, about: T, packet: &[u8]) -> bool {
        let cost = packet.len() + OVERHEAD_BYTES;
        if self.bytes + cost > self.most_bytes {
            self.drops += 1;
            return false;
        }
        self.bytes += cost;
        self.packets.push_back((about, packet.to_vec()));
        true
    }

    fn take(&mut self) -> Option<(T, Vec<u8>)> {
        let (about, packet) = self.packets.pop_front()?;
        self.bytes -= packet.len() + OVERHEAD_BYTES;
        Some((about, packet))
    }

    /// Forgets what waits: how many packets.
    fn clear(&mut self) -> u64 {
        self.bytes = 0;
        self.packets.drain(..).count() as u64
    }
}

/// The bytes of a question and of its answer: what QUIC asks of any path (RFC 9000 §14).
pub const PROBE_BYTES: usize = 1_200;

/// The bytes at the beginning of a question that name it.
pub(super) const NAME_BYTES: usize = 16;

/// How the dialling end of a stream finds out whether UDP passes: it sends the question, and the exit knows the answer. Both follow from
/// what only the ends of the stream know, and touch no connection.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Probe {
    /// What the dialling end sends, of [`PROBE_BYTES`].
    pub question: Box<[u8]>,
    /// What the exit sends back, as long.
    pub answer: Box<[u8]>,
}

impl Probe {
    pub(super) fn name(question: &[u8]) -> Option<[u8; NAME_BYTES]> {
        question.first_chunk().copied()
    }
}

/// The way on which a peer was heard last.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Heard {
    Udp,
    Stream,
}

/// What all sockets to one peer know of its ways.
#[derive(Debug, Default)]
pub struct Experience(Mutex<Option<(Heard, Instant)>>);

/// How long it counts where a peer was heard.
const FRESH: Duration = Duration::from_secs(3);

impl Experience {
    pub(super) fn note(&self, heard: Heard, now: Instant) {
        *lock(&self.0) = Some((heard, now));
    }

    pub(super) fn newest(&self, now: Instant) -> Option<Heard> {
        let newest = *lock(&self.0);
        newest.filter(|(_, at)| now.saturating_duration_since(*at) < FRESH).map(|(heard, _)| heard)
    }
}

/// The other way to an address, and what is known of both.
#[derive(Clone, Debug)]
pub struct Beside {
    /// The label of the stream that leads where UDP to the address does, or the address of UDP beside a stream.
    pub other: SocketAddr,
    /// What the sockets to the peer have found.
    pub experience: Arc<Experience>,
}

/// What waits for one stream.
#[derive(Debug)]
pub struct StreamQueue {
    state: Mutex<StreamState>,
    news: Notify,
    discarded: Arc<AtomicU64>,
}

#[derive(Debug)]
struct StreamState {
    /// Packets, and since when each waits.
    queue: Queue<Instant>,
    is_open: bool,
    is_closed: bool,
    /// Of the stream that is open.
    probe: Option<Arc<Probe>>,
}

impl StreamState {
    /// Whether an open stream does not take packets as fast as they come.
    fn is_behind(&self, now: Instant) -> bool {
        let oldest = self.queue.packets.front().filter(|_| self.is_open);
        self.queue.bytes > LEAST_OUT_BYTES
            && oldest.is_some_and(|(since, _)| now.saturating_duration_since(*since) > LONGEST_WAIT)
    }
}

impl StreamQueue {
    pub(super) fn new(is_open: bool, discarded: &Arc<AtomicU64>) -> Arc<Self> {
        let state = StreamState { queue: Queue::new(MOST_OUT_BYTES), is_open, is_closed: false, probe: None };
        let discarded = Arc::clone(discarded);
        Arc::new(Self { state: Mutex::new(state), news: Notify::new(), discarded })
    }

    /// Gives up what waits, and counts it.
    pub fn discard(&self) {
        self.discarded.fetch_add(lock(&self.state).queue.clear(), Ordering::Relaxed);
    }

    fn put(&self, packet: &[u8], now: Instant) -> bool {
        let (was_put, wakes) = {
            let mut state = lock(&self.state);
            let was_empty = state.queue.packets.is_empty();
            let takes = !state.is_closed && !state.is_behind(now);
            if !takes {
                state.queue.drops += 1;
            }
            (takes && state.queue.put(now, packet), was_empty)
        };
        if was_put && wakes {
            self.news.notify_one();
        }
        was_put
    }

    /// The next packet, if one waits.
    #[must_use]
    pub fn take(&self) -> Option<Vec<u8>> {
        lock(&self.state).queue.take().map(|(_, packet)| packet)
    }

    /// Waits until [`StreamQueue::take`] has something; false when the worker is done with the stream.
    pub async fn ready(&self) -> bool {
        loop {
            let news = self.news.notified();
            {
                let state = lock(&self.state);
                if !state.queue.packets.is_empty() {
                    return true;
                }
                // The last packets say that a connection ends.
                if state.is_closed {
                    return false;
                }
            }
            news.await;
        }
    }

    /// Whether the worker is done with the stream, although something may still wait.
    #[must_use]
    pub fn is_closed(&self) -> bool {
        lock(&self.state).is_closed
    }

    /// Packets that found no room.
    #[must_use]
    pub fn drops(&self) -> u64 {
        lock(&self.state).queue.drops
    }

    /// Notes that a stream has been opened, or with `None` that there is no open one.
    pub fn opens(&self, probe: Option<Probe>) {
        let mut state = lock(&self.state);
        state.is_open = probe.is_some();
        state.probe = probe.map(Arc::new);
    }

    pub(super) fn probe(&self) -> Option<Arc<Probe>> {
        lock(&self.state).probe.clone()
    }

    pub(super) fn close(&self) {
        lock(&self.state).is_closed = true;
        self.news.notify_one();
    }
}

impl Drop for StreamQueue {
    fn drop(&mut self) {
        self.discard();
    }
}

/// What came over streams and waits for a worker.
#[derive(Debug)]
pub struct Port {
    inbox: Mutex<Inbox>,
    /// Whether the inbox is empty and its owner is told of what comes.
    is_watched: AtomicBool,
    /// The streams of an exit's clients.
    table: Arc<Table>,
    discarded: Arc<AtomicU64>,
}

#[derive(Debug)]
pub(super) struct Inbox {
    pub(super) queue: Queue<SocketAddr>,
    /// Whom to tell of what comes, once the worker has found nothing.
    owner: Option<(Ready, Token)>,
}

impl Port {
    /// A port of an exit's streams.
    pub(super) fn of(table: &Arc<Table>, discarded: &Arc<AtomicU64>) -> Arc<Self> {
        let inbox = Mutex::new(Inbox { queue: Queue::new(MOST_IN_BYTES), owner: None });
        let (table, discarded) = (Arc::clone(table), Arc::clone(discarded));
        Arc::new(Self { inbox, is_watched: AtomicBool::new(false), table, discarded })
    }

    pub(super) fn known(&self) -> Known {
        Known::new(&self.table)
    }

    /// Takes a packet that seems to come from `source`; false: there was no room.
    pub fn put(&self, source: SocketAddr, packet: &[u8]) -> bool {
        let (was_put, owner) = {
            let mut inbox = self.inbox();
            self.is_watched.store(false, Ordering::Release);
            (inbox.queue.put(source, packet), inbox.owner.take())
        };
        if let Some((ready, token)) = &owner {
            ready.mark(*token);
        }
        was_put
    }

    /// Fills `batch`, which is empty, with what waits; if nothing does, `owner` is told when something comes.
    pub(super) fn receive(
        &self,
        batch: &mut ReceiveBatch,
        owner: (&Ready, Token),
        stats: &mut UdpStats,
    ) -> io::Result<()> {
        let mut inbox = self.inbox();
        while !batch.is_full() {
            let Some((source, packet)) = inbox.queue.take() else { break };
            let meta = Meta { len: packet.len(), segment: packet.len().max(1), source, ..Meta::EMPTY };
            if !batch.push(meta, &packet) {
                stats.truncated += 1;
            }
        }
        if batch.is_empty() {
            inbox.owner = Some((owner.0.clone(), owner.1));
            self.is_watched.store(true, Ordering::Release);
            return Err(io::ErrorKind::WouldBlock.into());
        }
        drop(inbox);
        stats.count_received(batch, false);
        Ok(())
    }

    /// Whether something may wait.
    pub(super) fn may_hold(&self) -> bool {
        !self.is_watched.load(Ordering::Acquire)
    }

    pub(super) fn inbox(&self) -> Held<'_, Inbox> {
        lock(&self.inbox)
    }
}

impl Drop for Port {
    fn drop(&mut self) {
        self.discarded.fetch_add(self.inbox().queue.clear(), Ordering::Relaxed);
    }
}

/// A stream that a worker wants, for whoever dials it.
#[derive(Debug)]
pub struct Wanted {
    /// The label that stands for the stream's far end.
    pub label: SocketAddr,
    /// Where what comes is put, as from the label.
    pub port: Arc<Port>,
    /// What waits for it; its end is the stream's.
    pub queue: Arc<StreamQueue>,
}

/// What a worker's network needs for carriers.
pub trait Carriers {
    /// The label of what this endpoint names; `None`: it is no stream's.
    fn label(&self, endpoint: &str) -> Option<SocketAddr>;

    /// Dials a stream, with its first packet. It must not block.
    fn dial(&self, wanted: Wanted);

    /// Where packets are counted that a stream leaves behind.
    fn discarded(&self) -> Arc<AtomicU64>;

    /// Why no stream could be opened to this peer last, and when; `None` since one was.
    fn failure(&self, peer: &str) -> Option<(Instant, Arc<str>)>;

    /// Where packets come in from clients at this worker; `None` if none can.
    fn listens(&self) -> Option<Arc<Port>>;

    /// Notes the addresses of an endpoint over UDP.
    fn resolved(&self, host: &str, port: u16, addresses: &[SocketAddr]);

    /// The other way to an address or to a label, if the peer there has one.
    fn beside(&self, address: SocketAddr) -> Option<Beside>;

    /// Where UDP beside a label leads if no name of the peer has the address `from` any more; `None` while one has. The names are looked
    /// up again, for whoever asks next.
    fn moved(&self, label: SocketAddr, from: SocketAddr) -> Option<SocketAddr>;
}

/// A carrier as a worker sees it.
pub(crate) struct CarrierUdp {
    port: Arc<Port>,
    pub(super) queue: Arc<StreamQueue>,
    /// Dials it, until it was.
    dials: Option<Box<dyn FnOnce()>>,
    ready: Ready,
    token: Token,
    stats: UdpStats,
}

impl CarrierUdp {
    /// One that is dialled with its first packet.
    pub(crate) fn dialled(
        label: SocketAddr,
        carriers: &Rc<dyn Carriers>,
        ready: &Ready,
        token: Token,
    ) -> Self {
        ready.mark(token);
        let discarded = carriers.discarded();
        let (port, queue) = (Port::of(&Arc::default(), &discarded), StreamQueue::new(false, &discarded));
        let wanted = Wanted { label, port: Arc::clone(&port), queue: Arc::clone(&queue) };
        let carriers = Rc::clone(carriers);
        let dials: Box<dyn FnOnce()> = Box::new(move || carriers.dial(wanted));
        let (stats, ready) = (UdpStats::default(), ready.clone());
        Self { port, queue, dials: Some(dials), ready, token, stats }
    }
}

/// Puts the datagrams of `message` on a queue, and counts them.
pub(super) fn put(
    queue: &StreamQueue,
    batch: &SendBatch,
    message: &Message,
    stats: &mut UdpStats,
) -> SendOutcome {
    let (mut failed, mut sent) = (0, 0);
    let now = SystemClock.now();
    for packet in batch.segments(message) {
        if queue.put(packet, now) {
            sent += 1;
            stats.count_sent(1, packet.len() as u64);
        } else {
            failed += 1;
        }
    }
    stats.send_failures += u64::from(failed);
    match (failed, sent) {
        (0, _) => SendOutcome::Sent,
        (_, 0) => SendOutcome::Failed(SendFailure::CarrierFull),
        (failed, _) => SendOutcome::Partly { failed, why: SendFailure::CarrierFull },
    }
}

impl UdpSocket for CarrierUdp {
    fn local_addr(&self) -> SocketAddr {
        label(0)
    }

    fn receive(&mut self, batch: &mut ReceiveBatch) -> io::Result<()> {
        batch.clear();
        self.port.receive(batch, (&self.ready, self.token), &mut self.stats)
    }

    fn send(&mut self, batch: &mut SendBatch, outcome: &mut dyn FnMut(&Message, SendOutcome)) {
        if batch.is_empty() {
            return;
        }
        self.stats.send_calls += 1;
        for message in batch.messages() {
            outcome(message, put(&self.queue, batch, message, &mut self.stats));
        }
        batch.clear();
        if let Some(dial) = self.dials.take() {
            dial();
        }
    }

    fn deliver(
        &mut self,
        _: &ReceiveBatch,
        delivery: &mut Delivery,
        outcome: &mut dyn FnMut(&DeliveryMessage, SendOutcome),
    ) {
        // It faces no client and no service.
        for message in delivery.messages() {
            outcome(message, SendOutcome::Failed(SendFailure::Other));
        }
        delivery.clear();
    }

    fn taken(&self) -> Option<Taken> {
        Some(Taken { over: Over::Carrier, because: Because::Dialled, since: None })
    }

    fn stats(&self) -> UdpStats {
        self.stats
    }

    fn receive_buffer(&self) -> Option<usize> {
        Some(MOST_IN_BYTES)
    }

    fn kernel_queue(&self) -> KernelQueue {
        let inbox = self.port.inbox();
        KernelQueue { drops: inbox.queue.drops, bytes: inbox.queue.bytes as u64 }
    }
}

impl Drop for CarrierUdp {
    fn drop(&mut self) {
        self.queue.close();
    }
}

#[cfg(test)]
#[path = "tests/carrier.rs"]
mod tests;
