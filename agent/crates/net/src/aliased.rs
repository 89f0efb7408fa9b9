//! A dialled socket whose far end has another port than the worker dialled.
//!
//! A connection of QUIC goes on at another port of the same agent (`transport.hop`, an endpoint with a range of ports), and its client
//! cannot know another address of the server (RFC 9000 §9): to it, packets keep coming from the one that it has dialled.

use std::{io, net::SocketAddr};

use crate::{
    Delivery, DeliveryMessage, KernelQueue, ReceiveBatch, SendBatch, SendOutcome, SendRefusal, UdpOffload,
    UdpSocket, UdpStats,
    batch::{Burst, Message, Path},
    way::Taken,
};

/// A socket that is connected to one address and stands for another one.
pub struct Aliased {
    socket: Box<dyn UdpSocket>,
    /// What the worker has dialled.
    remote: SocketAddr,
    /// Where packets go.
    to: SocketAddr,
}

impl Aliased {
    /// `socket`, which is connected to `to`, as if it were connected to `remote`.
    #[must_use]
    pub fn new(socket: Box<dyn UdpSocket>, remote: SocketAddr, to: SocketAddr) -> Self {
        Self { socket, remote, to }
    }
}

impl UdpSocket for Aliased {
    fn local_addr(&self) -> SocketAddr {
        self.socket.local_addr()
    }

    fn receive(&mut self, batch: &mut ReceiveBatch) -> io::Result<()> {
        self.socket.receive(batch)?;
        batch.come_from(self.remote);
        Ok(())
    }

    fn send(&mut self, batch: &mut SendBatch, outcome: &mut dyn FnMut(&Message, SendOutcome)) {
        batch.lead_to(self.to);
        self.socket.send(batch, outcome);
    }

    fn send_now(&mut self, burst: &Burst<'_>, outcome: &mut dyn FnMut(SendOutcome)) -> usize {
        let path = Path { destination: self.to, ..burst.path };
        self.socket.send_now(&Burst { path, ..*burst }, outcome)
    }

    fn deliver(
        &mut self,
        received: &ReceiveBatch,
        delivery: &mut Delivery,
        outcome: &mut dyn FnMut(&DeliveryMessage, SendOutcome),
    ) {
        self.socket.deliver(received, delivery, outcome);
    }

    fn seek(&mut self) -> bool {
        self.socket.seek()
    }

    fn taken(&self) -> Option<Taken> {
        self.socket.taken()
    }

    fn take_moved(&mut self) -> bool {
        self.socket.take_moved()
    }

    fn take_refusals(&mut self) -> Vec<SendRefusal> {
        let mut refusals = self.socket.take_refusals();
        refusals.iter_mut().for_each(|refusal| refusal.destination = self.remote);
        refusals
    }

    fn stats(&self) -> UdpStats {
        self.socket.stats()
    }

    fn receive_buffer(&self) -> Option<usize> {
        self.socket.receive_buffer()
    }

    fn kernel_queue(&self) -> KernelQueue {
        self.socket.kernel_queue()
    }

    fn offload(&self, _: SocketAddr) -> UdpOffload {
        self.socket.offload(self.to)
    }
}
