//! UDP sockets in memory: a queue bounded as a kernel's receive buffer is, GRO, and refusals.

use std::{
    collections::VecDeque,
    io,
    net::{IpAddr, SocketAddr},
    time::Duration,
};

use crate::{
    Delivery, DeliveryMessage, Gso, KernelQueue, Path, ReceiveBatch, SendBatch, SendOutcome, SendRefusal,
    UdpOffload, UdpOptions, UdpRole, UdpSocket, UdpStats,
    batch::{MAX_SEGMENTS, Message, Meta, Progress},
    memory::{Arrival, Datagram, MemoryFabric, Waiter, WorkerId},
    transmit::failure,
};

/// The cost of a queued datagram beside its payload, so that empty ones are bounded too; about an `sk_buff`.
const OVERHEAD_BYTES: usize = 256;

/// The largest buffer that GRO makes.
const MAX_JOINED_BYTES: usize = 65_535;

/// The fabric's side of a socket.
pub(super) struct Endpoint {
    pub(super) worker: WorkerId,
    pub(super) role: UdpRole,
    pub(super) local: SocketAddr,
    connected: Option<SocketAddr>,
    queue: VecDeque<Queued>,
    queued_bytes: usize,
    limit_bytes: usize,
    drops: u64,
    refused: bool,
    /// The owner, who may wait to hear of the next arrival.
    waiter: Waiter,
}

struct Queued {
    from: SocketAddr,
    to: IpAddr,
    tos: u8,
    payload: Vec<u8>,
}

impl Endpoint {
    pub(super) fn new(worker: WorkerId, local: SocketAddr, options: &UdpOptions, waiter: Waiter) -> Self {
        Self {
            worker,
            role: options.role,
            local,
            connected: options.connect,
            queue: VecDeque::new(),
            queued_bytes: 0,
            limit_bytes: options.buffer_bytes,
            drops: 0,
            refused: false,
            waiter,
        }
    }

    /// The quality of the match between the socket and a datagram's addresses; none if it does not receive the datagram.
    pub(super) fn hears(&self, datagram: &Datagram<'_>) -> Option<u8> {
        let ip = self.local.ip();
        if ip.is_ipv4() != datagram.to.is_ipv4() || !(ip.is_unspecified() || ip == datagram.to.ip()) {
            return None;
        }
        match self.connected {
            Some(remote) => (remote == datagram.from).then_some(2),
            None => Some(u8::from(!ip.is_unspecified())),
        }
    }

    pub(super) fn enqueue(&mut self, datagram: &Datagram<'_>) -> Arrival {
        let cost = datagram.payload.len() + OVERHEAD_BYTES;
        if self.queued_bytes + cost > self.limit_bytes {
            self.drops += 1;
            return Arrival::Full;
        }
        self.queued_bytes += cost;
        self.queue.push_back(Queued {
            from: datagram.from,
            to: datagram.to.ip(),
            tos: datagram.tos,
            payload: datagram.payload.to_vec(),
        });
        self.waiter.wake();
        Arrival::Queued
    }

    /// Tells a connected socket that nobody listens at the far end.
    pub(super) fn refuse(&mut self) {
        if self.connected.is_some() {
            self.refused = true;
            self.waiter.wake();
        }
    }

    fn pop(&mut self) -> Option<Queued> {
        let datagram = self.queue.pop_front()?;
        self.queued_bytes -= datagram.payload.len() + OVERHEAD_BYTES;
        Some(datagram)
    }

    /// Takes the next datagram and appends the payloads that GRO joins to it to `joined`.
    fn pop_joined(&mut self, joined: &mut Vec<u8>, limit_bytes: usize, gro: bool) -> Option<Queued> {
        let first = self.pop()?;
        joined.clear();
        joined.extend_from_slice(&first.payload);
        let segment = first.payload.len();
        let mut last = segment;
        for _ in 1..MAX_SEGMENTS {
            let joins = self.queue.front().is_some_and(|next| {
                gro && last == segment
                    && segment > 0
                    && (1..=segment).contains(&next.payload.len())
                    && joined.len() + next.payload.len() <= limit_bytes
                    && (next.from, next.to, next.tos) == (first.from, first.to, first.tos)
            });
            if !joins {
                break;
            }
            let next = self.pop()?;
            last = next.payload.len();
            joined.extend_from_slice(&next.payload);
        }
        Some(first)
    }
}

/// The owner's side of a socket.
pub(super) struct MemoryUdp {
    fabric: MemoryFabric,
    id: usize,
    local: SocketAddr,
    connected: Option<SocketAddr>,
    joined: Vec<u8>,
    stats: UdpStats,
    refusals: Vec<SendRefusal>,
}

impl MemoryUdp {
    pub(super) fn new(
        fabric: MemoryFabric,
        id: usize,
        local: SocketAddr,
        connected: Option<SocketAddr>,
    ) -> Self {
        Self {
            fabric,
            id,
            local,
            connected,
            joined: Vec::new(),
            stats: UdpStats::default(),
            refusals: Vec::new(),
        }
    }

    /// Sends `payloads`, the datagrams of one message, each on its own.
    fn send_each<'a>(
        &mut self,
        path: Option<&Path>,
        payloads: impl Iterator<Item = &'a [u8]>,
    ) -> SendOutcome {
        let mut progress = Progress::default();
        let (mut sent, mut bytes) = (0, 0);
        let to = path.map(|path| path.destination);
        for payload in payloads {
            progress.done += 1;
            let path = path.ok_or_else(|| io::Error::from_raw_os_error(libc::EDESTADDRREQ));
            let result = path.and_then(|path| self.fabric.send(self.id, path, payload));
            match result {
                Ok(()) => {
                    sent += 1;
                    bytes += payload.len() as u64;
                }
                Err(error) => {
                    self.stats.send_failures += 1;
                    progress.failed += 1;
                    progress.why = Some(failure(&error));
                    let refusal = to.and_then(|to| SendRefusal::of(&error, to, payload.len()));
                    if let Some(refusal) = refusal {
                        refusal.note(&mut self.refusals);
                    }
                }
            }
        }
        self.fabric.count_sent(sent.into(), bytes);
        if sent > 0 {
            self.stats.count_sent(sent, bytes);
        }
        progress.outcome(progress.done)
    }
}

impl UdpSocket for MemoryUdp {
    fn local_addr(&self) -> SocketAddr {
        self.local
    }

    fn receive(&mut self, batch: &mut ReceiveBatch) -> io::Result<()> {
        batch.clear();
        let mut state = self.fabric.state.borrow_mut();
        state.calls.calls += 1;
        let gro = !state.no_gro;
        let endpoint = &mut state.udp[self.id];
        if std::mem::take(&mut endpoint.refused) {
            return Err(io::ErrorKind::ConnectionRefused.into());
        }
        let limit_bytes = batch.slot_bytes.min(MAX_JOINED_BYTES);
        while batch.len() < batch.slots() {
            let Some(first) = endpoint.pop_joined(&mut self.joined, limit_bytes, gro) else { break };
            let meta = Meta {
                len: self.joined.len(),
                segment: first.payload.len().max(1),
                source: first.from,
                local: endpoint.role.listens().then_some(first.to),
                ecn: if endpoint.role.is_quic() { first.tos & 0b11 } else { 0 },
                age: Duration::ZERO,
            };
            if !batch.push(meta, &self.joined) {
                self.stats.truncated += 1;
            }
        }
        if batch.is_empty() {
            endpoint.waiter.armed = true;
            return Err(io::ErrorKind::WouldBlock.into());
        }
        let before = (self.stats.received_datagrams, self.stats.received_bytes);
        self.stats.count_received(batch, false);
        state.calls.datagrams += self.stats.received_datagrams - before.0;
        state.calls.bytes += self.stats.received_bytes - before.1;
        Ok(())
    }

    fn send(&mut self, batch: &mut SendBatch, outcome: &mut dyn FnMut(&Message, SendOutcome)) {
        self.stats.send_calls += u64::from(!batch.is_empty());
        for message in batch.messages() {
            let result = self.send_each(Some(&message.path), batch.segments(message));
            outcome(message, result);
        }
        batch.clear();
    }

    fn deliver(
        &mut self,
        received: &ReceiveBatch,
        delivery: &mut Delivery,
        outcome: &mut dyn FnMut(&DeliveryMessage, SendOutcome),
    ) {
        self.stats.send_calls += u64::from(!delivery.is_empty());
        for message in delivery.messages() {
            let to = message.to.destination.or(self.connected);
            let path = to.map(|destination| Path { destination, source: message.to.source, tos: 0 });
            let result = self.send_each(path.as_ref(), delivery.payloads(message, received));
            outcome(message, result);
        }
        delivery.clear();
    }

    fn take_refusals(&mut self) -> Vec<SendRefusal> {
        std::mem::take(&mut self.refusals)
    }

    fn stats(&self) -> UdpStats {
        self.stats
    }

    fn offload(&self, _: SocketAddr) -> UdpOffload {
        UdpOffload { gso: Gso::On, gro: !self.fabric.state.borrow().no_gro }
    }

    fn receive_buffer(&self) -> Option<usize> {
        Some(self.fabric.state.borrow().udp[self.id].limit_bytes)
    }

    fn kernel_queue(&self) -> KernelQueue {
        let endpoint = &self.fabric.state.borrow().udp[self.id];
        KernelQueue { drops: endpoint.drops, bytes: endpoint.queued_bytes as u64 }
    }
}

impl Drop for MemoryUdp {
    fn drop(&mut self) {
        let mut state = self.fabric.state.borrow_mut();
        let endpoint = state.udp.remove(self.id);
        let key = (endpoint.worker.host, endpoint.local.port());
        if let Some(sockets) = state.ports.get_mut(&key) {
            sockets.retain(|id| *id != self.id);
            if sockets.is_empty() {
                state.ports.remove(&key);
            }
        }
    }
}
