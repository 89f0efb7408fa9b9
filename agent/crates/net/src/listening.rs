//! A listening UDP socket whose worker has clients over streams, too.
//!
//! A client may come over UDP now and over a stream a moment later: the same connections, from another address. So one socket has both,
//! and the destination says which way a packet takes.

use std::{io, net::SocketAddr, sync::Arc};

use crate::{
    Delivery, DeliveryMessage, KernelQueue, Path, Ready, ReceiveBatch, SendBatch, SendFailure, SendOutcome,
    SendRefusal, Token, UdpOffload, UdpSocket, UdpStats,
    accepted::{Known, is_stream},
    batch::{Burst, Message, Meta},
    carrier::{PROBE_BYTES, Port, put},
    udp::KernelUdp,
};

/// A listening UDP socket, and the streams of its worker's clients.
pub(crate) struct Listening {
    udp: KernelUdp,
    port: Arc<Port>,
    streams: Known,
    /// Whether what comes over streams is received here: at the first of a worker's sockets.
    takes: bool,
    /// Whether streams have their turn before UDP.
    streams_first: bool,
    ready: Ready,
    token: Token,
    /// Of what went over streams.
    stats: UdpStats,
}

impl Listening {
    pub(crate) fn new(udp: KernelUdp, port: Arc<Port>, takes: bool, ready: &Ready, token: Token) -> Self {
        if takes {
            ready.mark(token);
        }
        let (stats, ready, streams) = (UdpStats::default(), ready.clone(), port.known());
        Self { udp, port, streams, takes, streams_first: false, ready, token, stats }
    }

    fn receive_streams(&mut self, batch: &mut ReceiveBatch) -> io::Result<()> {
        if !self.takes || !self.port.may_hold() {
            return Err(io::ErrorKind::WouldBlock.into());
        }
        batch.clear();
        self.port.receive(batch, (&self.ready, self.token), &mut self.stats)
    }

    fn receive_udp(&mut self, batch: &mut ReceiveBatch) -> io::Result<()> {
        loop {
            self.udp.receive(batch)?;
            batch.last &= !(self.takes && self.port.may_hold());
            self.answer_questions(batch);
            // Of the next batch it is not known yet whether it is the last.
            if !batch.is_empty() || batch.last {
                return Ok(());
            }
        }
    }

    /// Answers those who ask whether UDP passes, and keeps what else there is. Packets of another size cost a look at their lengths.
    fn answer_questions(&mut self, batch: &mut ReceiveBatch) {
        let Self { udp, streams, .. } = self;
        let is_large = |meta: &Meta| meta.len == PROBE_BYTES && meta.segment >= PROBE_BYTES;
        let streams = streams.now();
        if !streams.answers() || !(0..batch.len()).any(|at| is_large(batch.meta(at))) {
            return;
        }
        batch.retain(|meta, bytes| {
            let Some(probe) = Some(bytes).filter(|_| is_large(meta)).and_then(|bytes| streams.answer(bytes))
            else {
                return true;
            };
            let path = Path { destination: meta.source, source: meta.local, tos: 0 };
            let burst = Burst { path, bytes: &probe.answer, segment: probe.answer.len().max(1) };
            // One that is lost is asked for again.
            udp.send_now(&burst, &mut |_| {});
            false
        });
    }
}

impl UdpSocket for Listening {
    fn local_addr(&self) -> SocketAddr {
        self.udp.local_addr()
    }

    fn receive(&mut self, batch: &mut ReceiveBatch) -> io::Result<()> {
        self.streams_first = !self.streams_first;
        if self.streams_first && self.receive_streams(batch).is_ok() {
            return Ok(());
        }
        match self.receive_udp(batch) {
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => self.receive_streams(batch),
            received => received,
        }
    }

    fn send(&mut self, batch: &mut SendBatch, outcome: &mut dyn FnMut(&Message, SendOutcome)) {
        let is_udp = |message: &Message| !is_stream(&message.path.destination);
        if batch.messages().iter().all(is_udp) {
            return self.udp.send(batch, outcome);
        }
        while let Some(message) = batch.messages().first() {
            if !is_udp(message) {
                let result = match self.streams.now().queue(&message.path.destination) {
                    Some(line) => {
                        self.stats.send_calls += 1;
                        put(line, batch, message, &mut self.stats)
                    }
                    // Its client comes back by another stream, or over UDP, from another address.
                    None => {
                        self.stats.send_failures += u64::from(message.segments);
                        SendOutcome::Failed(SendFailure::CarrierFull)
                    }
                };
                outcome(message, result);
                batch.release(1);
                continue;
            }
            let count = batch.messages().iter().take_while(|message| is_udp(message)).count();
            if !self.udp.send_first(batch, count, outcome) {
                return;
            }
        }
    }

    fn send_now(&mut self, burst: &Burst<'_>, outcome: &mut dyn FnMut(SendOutcome)) -> usize {
        if is_stream(&burst.path.destination) { 0 } else { self.udp.send_now(burst, outcome) }
    }

    fn deliver(
        &mut self,
        received: &ReceiveBatch,
        delivery: &mut Delivery,
        outcome: &mut dyn FnMut(&DeliveryMessage, SendOutcome),
    ) {
        self.udp.deliver(received, delivery, outcome);
    }

    fn take_refusals(&mut self) -> Vec<SendRefusal> {
        self.udp.take_refusals()
    }

    fn stats(&self) -> UdpStats {
        let mut stats = self.udp.stats();
        stats.add_since(&self.stats, &UdpStats::default());
        stats
    }

    fn receive_buffer(&self) -> Option<usize> {
        self.udp.receive_buffer()
    }

    fn kernel_queue(&self) -> KernelQueue {
        let mut queue = self.udp.kernel_queue();
        if self.takes {
            let inbox = self.port.inbox();
            queue.drops += inbox.queue.drops;
            queue.bytes += inbox.queue.bytes as u64;
        }
        queue
    }

    fn offload(&self, destination: SocketAddr) -> UdpOffload {
        self.udp.offload(destination)
    }
}
