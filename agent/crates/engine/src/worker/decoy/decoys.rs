//! The flows of unauthenticated senders to the decoy, and their sockets.

use std::{
    collections::VecDeque,
    io,
    net::SocketAddr,
    time::{Duration, Instant},
};

use base::throttle::Throttle;
use config::Config;
use dataplane::{socket_stats::SocketStats, sockets::SocketFactory};
use gate::decoy::{DecoyDrop, DecoyFlows, DecoyId, DecoyStats, Sender};
use net::{Path, SendBatch, SendFailure, SendOutcome, Token, UdpRole, UdpSocket, stats::Booked};

use crate::worker::context::timer::{LOG_INTERVAL, index_u32};

/// The flows to the decoy, and their sockets.
pub(crate) struct Decoys {
    decoy: SocketAddr,
    /// Limit on the number of flows, from `limits.decoy_flows`.
    limit: usize,
    pub(crate) flows: DecoyFlows,
    /// The sockets to the decoy, indexed by [`DecoyId`].
    pub(crate) sockets: Vec<Option<DecoySocket>>,
    /// Datagrams for the socket of the flow `sending`.
    send_buffer: SendBatch,
    sending: Option<DecoyId>,
    /// Sockets that may have replies, each once, the least recently served first.
    ready: VecDeque<DecoyId>,
    /// Sockets with traffic since the kernel was last asked for drops, each once.
    touched: Vec<DecoyId>,
    refused_log: Throttle,
    socket_log: Throttle,
}

impl Decoys {
    /// Makes the flows of `worker`: `None` without a decoy, or if `worker` is not [`OWNER`].
    pub(crate) fn of_worker(worker: u8, config: &Config, now: Instant) -> Option<Self> {
        let decoy = config.access.decoy.filter(|_| worker == OWNER)?;
        Some(Self {
            decoy,
            limit: config.limits.decoy_flows,
            flows: DecoyFlows::new(config.limits.decoy_flows, now),
            sockets: Vec::new(),
            send_buffer: SendBatch::default(),
            sending: None,
            ready: VecDeque::new(),
            touched: Vec::new(),
            refused_log: Throttle::new(LOG_INTERVAL),
            socket_log: Throttle::new(LOG_INTERVAL),
        })
    }

    /// Whether the decoy and the limit are those of `config`.
    pub(crate) fn follows(&self, config: &Config) -> bool {
        config.access.decoy == Some(self.decoy) && self.limit == config.limits.decoy_flows
    }

    /// Sends the datagrams in the send buffer and closes all sockets.
    pub(crate) fn close_all(&mut self, factory: &mut SocketFactory, stats: &mut DecoyStats) {
        self.flush(stats);
        for index in 0..self.sockets.len() {
            self.close(DecoyId(index_u32(index)), factory);
        }
    }

    /// Adds what sockets with traffic have counted to `stats`; with `drops`, also asks the kernel what it dropped.
    pub(crate) fn read_sockets(&mut self, stats: &mut SocketStats, drops: bool) {
        for id in &self.touched {
            if let Some(Some(socket)) = self.sockets.get_mut(id.0 as usize) {
                socket.touched = !drops;
                stats.look_at(UdpRole::Decoy, &*socket.socket, &mut socket.booked, drops);
            }
        }
        if drops {
            self.touched.clear();
        }
    }

    /// Adds a sender's datagram to the send buffer of its flow's socket.
    pub(crate) fn forward(
        &mut self,
        sender: Sender,
        ecn: u8,
        datagram: &[u8],
        factory: &mut SocketFactory,
        stats: &mut DecoyStats,
        now: Instant,
    ) {
        let admitted = match self.flows.admit(sender, datagram, now) {
            Ok(admitted) => admitted,
            Err(reason) => {
                stats.drop(reason, 1);
                return;
            }
        };
        if let Some(evicted) = admitted.evicted {
            stats.evicted += 1;
            self.flush(stats);
            self.close(evicted, factory);
        }
        if admitted.new && !self.open(admitted.id, factory, now) {
            stats.drop(DecoyDrop::NoSocket, 1);
            return;
        }
        stats.opened += u64::from(admitted.new);
        if self.sending != Some(admitted.id) || self.send_buffer.tail(datagram.len()).is_none() {
            self.flush(stats);
        }
        let Some(tail) = self.send_buffer.tail(datagram.len()) else {
            // Unreachable: an empty send buffer takes any datagram.
            stats.drop(DecoyDrop::ToDecoy, 1);
            return;
        };
        tail.copy_from_slice(datagram);
        let path = Path { destination: self.decoy, source: None, tos: ecn };
        self.send_buffer.commit(&path, 0, datagram.len(), 1);
        self.sending = Some(admitted.id);
    }

    /// Sends the datagrams in the send buffer to the decoy.
    pub(crate) fn flush(&mut self, stats: &mut DecoyStats) {
        let Some(id) = self.sending.take() else { return };
        self.touch(id);
        if let Some(Some(socket)) = self.sockets.get_mut(id.0 as usize) {
            socket.socket.send(&mut self.send_buffer, &mut |message, outcome| {
                let (lost, why) = match outcome {
                    SendOutcome::Sent => return,
                    SendOutcome::Partly { failed, why } => (failed, why),
                    SendOutcome::Failed(why) => (message.segments, why),
                };
                let refused = why == SendFailure::Refused;
                stats.drop(if refused { DecoyDrop::Refused } else { DecoyDrop::ToDecoy }, lost.into());
            });
        }
        // Datagrams for which the kernel has no room are lost, as they might be on the path.
        stats.drop(DecoyDrop::ToDecoy, self.send_buffer.datagrams() as u64);
        self.send_buffer.clear();
    }

    /// Opens the socket of a new flow. Ends the flow and returns false if no socket can be opened.
    fn open(&mut self, id: DecoyId, factory: &mut SocketFactory, now: Instant) -> bool {
        let index = id.0 as usize;
        match factory.open_decoy(self.decoy, id) {
            Ok((socket, token)) => {
                if self.sockets.len() <= index {
                    self.sockets.resize_with(index + 1, || None);
                }
                let booked = Booked::default();
                self.sockets[index] =
                    Some(DecoySocket { socket, token, booked, ready: false, touched: false });
                true
            }
            Err(error) => {
                self.flows.remove(id);
                throttled!(
                    warn, self.socket_log.allow(now), { decoy = %self.decoy, %error },
                    "cannot open a socket to the decoy for an unauthenticated sender (remedy: a route to it, more open files, or a \
                    lower limits.decoy_flows)"
                );
                false
            }
        }
    }

    /// Closes the socket of a flow that has ended.
    pub(crate) fn close(&mut self, id: DecoyId, factory: &mut SocketFactory) {
        if let Some(mut socket) = self.sockets.get_mut(id.0 as usize).and_then(Option::take) {
            factory.stats.book(UdpRole::Decoy, &*socket.socket, &mut socket.booked, true);
            factory.release(socket.token);
            // The next flow with this id must not be in either list yet, lest it is in one twice.
            if socket.ready {
                self.ready.retain(|ready| *ready != id);
            }
            if socket.touched {
                self.touched.retain(|touched| *touched != id);
            }
        }
    }

    /// Notes that a socket may have replies.
    pub(crate) fn mark(&mut self, id: DecoyId) {
        if let Some(Some(socket)) = self.sockets.get_mut(id.0 as usize)
            && !std::mem::replace(&mut socket.ready, true)
        {
            self.ready.push_back(id);
        }
    }

    /// Whether any socket may have replies.
    pub(crate) fn is_busy(&self) -> bool {
        !self.ready.is_empty()
    }

    /// Takes the next socket that may have replies.
    pub(crate) fn next(&mut self) -> Option<DecoyId> {
        let id = self.ready.pop_front()?;
        if let Some(Some(socket)) = self.sockets.get_mut(id.0 as usize) {
            socket.ready = false;
        }
        Some(id)
    }

    /// Notes that a socket has had traffic.
    pub(crate) fn touch(&mut self, id: DecoyId) {
        if let Some(Some(socket)) = self.sockets.get_mut(id.0 as usize)
            && !std::mem::replace(&mut socket.touched, true)
        {
            self.touched.push(id);
        }
    }

    pub(crate) fn report_refusal(&mut self, error: &io::Error, now: Instant) {
        throttled!(
            warn, self.refused_log.allow(now), { decoy = %self.decoy, %error },
            "the decoy does not take datagrams, so unauthenticated senders get no answer (remedy: is it running, and listening at \
            access.decoy?)"
        );
    }
}

#[cfg(feature = "inspection")]
impl Decoys {
    /// The number of flows, and the largest size of any other table.
    pub(crate) fn sizes(&self) -> (usize, usize) {
        (self.flows.len(), self.sockets.len().max(self.ready.len()).max(self.touched.len()))
    }
}

pub(crate) struct DecoySocket {
    pub(crate) socket: Box<dyn UdpSocket>,
    token: Token,
    booked: Booked,
    /// Whether the socket is in [`Decoys::ready`].
    ready: bool,
    /// Whether the socket is in [`Decoys::touched`].
    touched: bool,
}

/// The minimum interval between checks for idle flows.
pub(crate) const EXPIRY_STEP: Duration = Duration::from_millis(100);

/// The worker that has all flows.
pub(crate) const OWNER: u8 = 0;
