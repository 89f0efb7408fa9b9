//! A listening UDP socket whose worker has clients over streams, too.
//!
//! A client may come over UDP now and over a stream a moment later: the same connections, from another address. So one socket has both,
//! and the destination says which way a packet takes.

use std::{io, net::SocketAddr, sync::Arc};

use crate::{
    Delivery, DeliveryMessage, KernelQueue, Path, Ready, ReceiveBatch, SendBatch, SendOutcome, SendRefusal,
    Token, UdpOffload, UdpSocket, UdpStats,
    batch::{Burst, Message},
    carrier::{PROBE_BYTES, Port, put},
    udp::KernelUdp,
};

/// A listening UDP socket, and the streams of its worker's clients.
pub(crate) struct Listening {
    udp: KernelUdp,
    port: Arc<Port>,
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
        let (stats, ready) = (UdpStats::default(), ready.clone());
        Self { udp, port, takes, streams_first: false, ready, token, stats }
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
            if self.port.has_lines() {
                self.answer_questions(batch);
            }
            // Of the next batch it is not known yet whether it is the last.
            if !batch.is_empty() || batch.last {
                return Ok(());
            }
        }
    }

    /// Answers those who ask whether UDP passes, and keeps what else there is.
    fn answer_questions(&mut self, batch: &mut ReceiveBatch) {
        let Self { udp, port, .. } = self;
        batch.retain(|meta, bytes| {
            if meta.len != PROBE_BYTES || meta.segment < PROBE_BYTES {
                return true;
            }
            let Some(probe) = port.answer(bytes) else { return true };
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
        if !self.port.has_lines() {
            return self.udp.send(batch, outcome);
        }
        while let Some(message) = batch.messages().first() {
            if let Some(line) = self.port.line(message.path.destination) {
                self.stats.send_calls += 1;
                let result = put(&line, batch, message, &mut self.stats);
                outcome(message, result);
                batch.release(1);
                continue;
            }
            let is_udp = |message: &&Message| self.port.line(message.path.destination).is_none();
            let count = batch.messages().iter().take_while(is_udp).count();
            if !self.udp.send_first(batch, count, outcome) {
                return;
            }
        }
    }

    fn send_now(&mut self, burst: &Burst<'_>, outcome: &mut dyn FnMut(SendOutcome)) -> usize {
        if self.port.has_lines() { 0 } else { self.udp.send_now(burst, outcome) }
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
