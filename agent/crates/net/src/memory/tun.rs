//! A TUN device in memory: a test is the kernel on its other side.

use std::{
    cell::{Cell, RefCell},
    collections::VecDeque,
    io,
    rc::Rc,
};

use ip::{
    packets::{PacketDelivery, PacketMessage, TunOffload},
    vnet::{Gso, VnetHeader},
};

use crate::{
    Ready, ReceiveBatch, SendFailure, SendOutcome, Token, TunQueue, TunStats, batch::Meta, memory::Waiter,
};

/// A device with a queue for each worker of a host; clones share it.
#[derive(Clone, Debug)]
pub struct MemoryTun {
    device: Rc<Device>,
}

#[derive(Debug)]
struct Device {
    offload: TunOffload,
    queue_packets: usize,
    queues: RefCell<Vec<Queue>>,
    written: RefCell<Vec<Written>>,
    failure: Cell<Option<SendFailure>>,
    gone: Cell<bool>,
}

#[derive(Debug, Default)]
struct Queue {
    packets: VecDeque<(VnetHeader, Vec<u8>)>,
    /// Whoever has opened the queue, and may wait to hear of the next packet.
    reader: Waiter,
}

/// A packet that a worker wrote to the device.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Written {
    /// The index of the queue it was written to.
    pub queue: u8,
    /// The virtio header that came with it.
    pub vnet: VnetHeader,
    /// The bytes of the packet or super-packet.
    pub packet: Vec<u8>,
}

impl MemoryTun {
    /// Packets that wait in one queue at most, unless said otherwise: `txqueuelen` as we set it.
    pub const QUEUE_PACKETS: usize = 1_000;

    /// A device that is up, with `queues` queues and this offload.
    #[must_use]
    pub fn new(queues: u8, offload: TunOffload) -> Self {
        Self::bounded(queues, offload, Self::QUEUE_PACKETS)
    }

    /// The same with room for `queue_packets` in each queue.
    #[must_use]
    pub fn bounded(queues: u8, offload: TunOffload, queue_packets: usize) -> Self {
        let queues = RefCell::new((0..queues).map(|_| Queue::default()).collect());
        let (written, failure, gone) = (RefCell::default(), Cell::default(), Cell::default());
        Self { device: Rc::new(Device { offload, queue_packets, queues, written, failure, gone }) }
    }

    /// The host sends a packet, which the kernel puts on `queue`. False when that is full: it is lost.
    ///
    /// # Panics
    /// When there is no such queue.
    pub fn push(&self, queue: u8, vnet: VnetHeader, packet: &[u8]) -> bool {
        let queue = &mut self.device.queues.borrow_mut()[usize::from(queue)];
        if queue.packets.len() >= self.device.queue_packets {
            return false;
        }
        queue.packets.push_back((vnet, packet.to_vec()));
        queue.reader.wake();
        true
    }

    /// How many packets wait to be taken by [`MemoryTun::take_written`].
    #[must_use]
    pub fn written(&self) -> usize {
        self.device.written.borrow().len()
    }

    /// The packets written since the last call, in order, whatever the queue.
    #[must_use]
    pub fn take_written(&self) -> Vec<Written> {
        self.device.written.take()
    }

    /// The number of packets that wait in `queue` to be read.
    ///
    /// # Panics
    /// When there is no such queue.
    #[must_use]
    pub fn waiting(&self, queue: u8) -> usize {
        self.device.queues.borrow()[usize::from(queue)].packets.len()
    }

    /// Has every write fail from now on, or no longer: as on a device that is down (`Unreachable`).
    pub fn set_failure(&self, failure: Option<SendFailure>) {
        self.device.failure.set(failure);
    }

    /// Takes the device away, as `ip link del` does: reads fail with `NotConnected`, and writes.
    pub fn remove(&self) {
        self.device.gone.set(true);
        self.set_failure(Some(SendFailure::Unreachable));
        for queue in self.device.queues.borrow_mut().iter_mut() {
            queue.packets.clear();
            queue.reader.wake();
        }
    }

    /// Opens the queue with this index, if there is one. Its readiness is reported under `token`.
    pub(super) fn open(&self, index: u8, ready: &Ready, token: Token) -> Option<Box<dyn TunQueue>> {
        let mut queues = self.device.queues.borrow_mut();
        let queue = queues.get_mut(usize::from(index))?;
        queue.reader = Waiter::new(ready, token);
        if !queue.packets.is_empty() {
            queue.reader.wake();
        }
        Some(Box::new(OpenQueue { device: Rc::clone(&self.device), index, stats: TunStats::default() }))
    }
}

/// A queue that a worker has opened.
struct OpenQueue {
    device: Rc<Device>,
    index: u8,
    stats: TunStats,
}

impl OpenQueue {
    fn write(&mut self, vnet: VnetHeader, packet: Vec<u8>) -> SendOutcome {
        if let Some(failure) = self.device.failure.get() {
            self.stats.write_errors += 1;
            return SendOutcome::Failed(failure);
        }
        self.stats.writes += 1;
        self.stats.write_bytes += packet.len() as u64;
        self.stats.write_super += u64::from(vnet.gso != Gso::None);
        self.stats.write_tunnel += u64::from(vnet.tunnel.is_some());
        self.device.written.borrow_mut().push(Written { queue: self.index, vnet, packet });
        SendOutcome::Sent
    }
}

impl TunQueue for OpenQueue {
    fn receive(
        &mut self,
        batch: &mut ReceiveBatch,
        headers: &mut Vec<VnetHeader>,
        most_bytes: usize,
    ) -> io::Result<()> {
        batch.clear();
        headers.clear();
        if self.device.gone.get() {
            return Err(io::ErrorKind::NotConnected.into());
        }
        let queue = &mut self.device.queues.borrow_mut()[usize::from(self.index)];
        let mut bytes = 0;
        while batch.len() < batch.slots() && (bytes < most_bytes || batch.is_empty()) {
            let Some((vnet, packet)) = queue.packets.pop_front() else { break };
            // What is longer than a slot is cut, as by the kernel.
            let packet = &packet[..packet.len().min(batch.slot_bytes)];
            if !batch.push(Meta { segment: packet.len(), ..Meta::EMPTY }, packet) {
                break;
            }
            headers.push(vnet);
            bytes += packet.len();
            self.stats.reads += 1;
            self.stats.read_bytes += packet.len() as u64;
            self.stats.read_super += u64::from(vnet.gso != Gso::None);
            self.stats.read_tunnel += u64::from(vnet.tunnel.is_some());
        }
        if batch.is_empty() {
            queue.reader.armed = true;
            return Err(io::ErrorKind::WouldBlock.into());
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
            let mut packet = delivery.header(message).to_vec();
            packet.extend(delivery.pieces(message, received).flatten());
            outcome(message, self.write(message.vnet, packet));
        }
        delivery.clear();
    }

    fn send(&mut self, packet: &[u8]) -> SendOutcome {
        self.write(VnetHeader::default(), packet.to_vec())
    }

    fn offload(&self) -> TunOffload {
        self.device.offload
    }

    fn stats(&self) -> TunStats {
        self.stats
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Net, memory::MemoryFabric};

    const VNET: VnetHeader = VnetHeader {
        needs_checksum: true,
        gso: Gso::Udp,
        gso_ecn: false,
        header_len: 28,
        gso_size: 2,
        checksum_start: 20,
        checksum_offset: 6,
        tunnel: None,
    };

    #[test]
    fn each_worker_reads_its_queue_and_all_write_to_one_device() {
        let readies = [Ready::default(), Ready::default()];
        let tun = MemoryTun::bounded(2, TunOffload { tcp: true, udp: true, ..TunOffload::default() }, 3);
        assert!(tun.push(1, VnetHeader::default(), b"before"));
        let mut queues: Vec<Box<dyn TunQueue>> = Vec::new();
        for mut net in MemoryFabric::default().worker_hosts(&[], &readies) {
            assert!(net.tun(Token(1)).unwrap().is_none(), "without a device");
            net.set_tun(&tun);
            queues.push(net.tun(Token(7)).unwrap().unwrap());
            assert!(net.tun(Token(7)).unwrap().is_none(), "once");
        }
        assert!(readies[0].is_empty() && !readies[1].is_empty());
        let (mut batch, mut headers) = (ReceiveBatch::new(2, 64), Vec::new());
        let read = |queue: &mut Box<dyn TunQueue>, batch: &mut _, headers: &mut _, most| {
            queue.receive(batch, headers, most).map_err(|error| error.kind())
        };
        let blocked = Err(io::ErrorKind::WouldBlock);
        assert_eq!(read(&mut queues[0], &mut batch, &mut headers, 100), blocked);
        assert!(tun.push(1, VNET, b"second") && tun.push(1, VNET, b"third"));
        assert!(!tun.push(1, VNET, b"one too many"));
        assert_eq!(read(&mut queues[1], &mut batch, &mut headers, 6), Ok(()), "as many bytes as asked for");
        assert_eq!((batch.len(), batch.buffer(0)), (1, &b"before"[..]));
        assert_eq!(read(&mut queues[1], &mut batch, &mut headers, 100), Ok(()));
        assert_eq!((batch.buffer(1), &headers[..]), (&b"third"[..], &[VNET, VNET][..]));
        assert_eq!(read(&mut queues[1], &mut batch, &mut headers, 100), blocked);

        readies[1].drain(&mut Vec::new());
        assert!(tun.push(1, VNET, b"again") && !readies[1].is_empty(), "who waited is told");
        assert_eq!(tun.waiting(1), 1);

        let mut list = PacketDelivery::default();
        let index = list.begin(VNET, 3, b"header ");
        assert!(batch.push(Meta::EMPTY, b"second"));
        list.add(index, 0, 0..6);
        queues[0].deliver(&batch, &mut list, &mut |_, outcome| assert_eq!(outcome, SendOutcome::Sent));
        assert_eq!(queues[1].send(b"own"), SendOutcome::Sent);
        tun.set_failure(Some(SendFailure::NoBuffers));
        assert_eq!(queues[1].send(b"own"), SendOutcome::Failed(SendFailure::NoBuffers));
        let written = tun.take_written();
        let texts: Vec<(u8, &[u8])> = written.iter().map(|w| (w.queue, &w.packet[..])).collect();
        assert_eq!(texts, [(0, &b"header second"[..]), (1, b"own")]);
        assert_eq!((written[0].vnet, written[1].vnet), (VNET, VnetHeader::default()));
        let stats = queues[1].stats();
        assert_eq!((stats.reads, stats.read_super, stats.writes, stats.write_errors), (3, 2, 1, 1));
        tun.remove();
        let gone = read(&mut queues[0], &mut batch, &mut headers, 100);
        assert_eq!(gone, Err(io::ErrorKind::NotConnected));
    }
}
