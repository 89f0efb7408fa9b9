//! Unauthenticated senders that have a flow to the decoy.

use std::{
    collections::VecDeque,
    io,
    net::SocketAddr,
    time::{Duration, Instant},
};

use config::Config;
use dataplane::{socket_stats::SocketStats, sockets::SocketFactory};
use gate::decoy::{DecoyDrop, DecoyFlows, DecoyId, DecoyStats, Sender};
use net::{Path, SendBatch, SendFailure, SendOutcome, Token, UdpRole, UdpSocket, stats::Booked};
use wire::throttle::Throttle;

use crate::worker::timer::LOG_INTERVAL;

/// The strangers that have a flow, and their sockets.
pub(super) struct Decoys {
    decoy: SocketAddr,
    /// The most strangers that may have a flow at a time, from `limits.decoy_flows`.
    limit: usize,
    pub(super) flows: DecoyFlows,
    /// The sockets to the decoy, each at the index of its flow.
    pub(super) sockets: Vec<Option<DecoySocket>>,
    /// Datagrams for the socket of the flow `sending`.
    send_buffer: SendBatch,
    sending: Option<DecoyId>,
    /// Sockets that have, or may have, answers, each once: the one that was served longest ago first.
    ready: VecDeque<DecoyId>,
    /// Sockets with traffic since the kernel was last asked what it dropped, each once.
    touched: Vec<DecoyId>,
    refused_log: Throttle,
    socket_log: Throttle,
}

impl Decoys {
    /// Strangers whose datagrams go to the decoy.
    pub(super) fn count(&self) -> usize {
        self.flows.len()
    }

    /// What `worker` needs of it: nothing without a decoy, or if it is not the one that has the flows.
    pub(super) fn of_worker(worker: u8, config: &Config, now: Instant) -> Option<Self> {
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

    /// Whether it is what `config` wants.
    pub(super) fn follows(&self, config: &Config) -> bool {
        config.access.decoy == Some(self.decoy) && self.limit == config.limits.decoy_flows
    }

    /// Sends what still waits for the decoy and closes the sockets of all strangers.
    pub(super) fn close_all(&mut self, factory: &mut SocketFactory, stats: &mut DecoyStats) {
        self.flush(stats);
        for place in 0..self.sockets.len() {
            self.close(DecoyId(crate::worker::number(place)), factory);
        }
    }

    /// Books what the sockets that had traffic did; with `drops`, they are forgotten until they have more.
    pub(super) fn book(&mut self, books: &mut SocketStats, drops: bool) {
        for id in &self.touched {
            if let Some(Some(socket)) = self.sockets.get_mut(id.0 as usize) {
                socket.touched = !drops;
                books.look_at(UdpRole::Decoy, &*socket.socket, &mut socket.booked, drops);
            }
        }
        if drops {
            self.touched.clear();
        }
    }

    /// Adds a stranger's datagram to what its socket is to send.
    pub(super) fn forward(
        &mut self,
        stranger: Sender,
        ecn: u8,
        datagram: &[u8],
        factory: &mut SocketFactory,
        stats: &mut DecoyStats,
        now: Instant,
    ) {
        let admitted = match self.flows.admit(stranger, datagram, now) {
            Ok(admitted) => admitted,
            Err(reason) => {
                stats.drop(reason, 1);
                return;
            }
        };
        if let Some(evicted) = admitted.evicted {
            stats.gave_way += 1;
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
            // No datagram is larger than an empty send buffer takes.
            stats.drop(DecoyDrop::ToDecoy, 1);
            return;
        };
        tail.copy_from_slice(datagram);
        let path = Path { destination: self.decoy, source: None, tos: ecn };
        self.send_buffer.commit(&path, 0, datagram.len(), 1);
        self.sending = Some(admitted.id);
    }

    /// Sends the datagrams in the send buffer to the decoy.
    pub(super) fn flush(&mut self, stats: &mut DecoyStats) {
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
        // What the kernel has no room for is lost, as it would be on the way.
        stats.drop(DecoyDrop::ToDecoy, self.send_buffer.datagrams() as u64);
        self.send_buffer.clear();
    }

    /// Opens the socket of a new flow; ends the flow if there is none to be had.
    fn open(&mut self, id: DecoyId, factory: &mut SocketFactory, now: Instant) -> bool {
        let place = id.0 as usize;
        match factory.open_decoy(self.decoy, id) {
            Ok((socket, token)) => {
                if self.sockets.len() <= place {
                    self.sockets.resize_with(place + 1, || None);
                }
                let booked = Booked::default();
                self.sockets[place] =
                    Some(DecoySocket { socket, token, booked, ready: false, touched: false });
                true
            }
            Err(error) => {
                self.flows.remove(id);
                if let Some(suppressed) = self.socket_log.allow(now) {
                    tracing::warn!(
                        decoy = %self.decoy,
                        %error,
                        suppressed,
                        "cannot open a socket to the decoy for a stranger (remedy: a route to it, more open files, or a \
                         lower limits.decoy_flows)"
                    );
                }
                false
            }
        }
    }

    /// Closes the socket of a flow that has ended.
    pub(super) fn close(&mut self, id: DecoyId, factory: &mut SocketFactory) {
        if let Some(mut socket) = self.sockets.get_mut(id.0 as usize).and_then(Option::take) {
            factory.stats().book(UdpRole::Decoy, &*socket.socket, &mut socket.booked, true);
            factory.release(socket.token);
            // Its place is the next one's, who must be in neither list, and later not twice.
            if socket.ready {
                self.ready.retain(|ready| *ready != id);
            }
            if socket.touched {
                self.touched.retain(|touched| *touched != id);
            }
        }
    }

    /// Notes that a socket has, or may have, answers.
    pub(super) fn mark(&mut self, id: DecoyId) {
        if let Some(Some(socket)) = self.sockets.get_mut(id.0 as usize)
            && !std::mem::replace(&mut socket.ready, true)
        {
            self.ready.push_back(id);
        }
    }

    /// Whether any socket has, or may have, answers.
    pub(super) fn is_busy(&self) -> bool {
        !self.ready.is_empty()
    }

    /// The socket whose turn it is.
    pub(super) fn next(&mut self) -> Option<DecoyId> {
        let id = self.ready.pop_front()?;
        if let Some(Some(socket)) = self.sockets.get_mut(id.0 as usize) {
            socket.ready = false;
        }
        Some(id)
    }

    pub(super) fn touch(&mut self, id: DecoyId) {
        if let Some(Some(socket)) = self.sockets.get_mut(id.0 as usize)
            && !socket.touched
        {
            socket.touched = true;
            self.touched.push(id);
        }
    }

    pub(super) fn report_refusal(&mut self, error: &io::Error, now: Instant) {
        if let Some(suppressed) = self.refused_log.allow(now) {
            tracing::warn!(
                decoy = %self.decoy,
                %error,
                suppressed,
                "the decoy does not take datagrams, so strangers meet silence (remedy: is it running, and listening at \
                 access.decoy?)"
            );
        }
    }
}

#[cfg(feature = "inspection")]
impl Decoys {
    /// How many flows there are, and the most that any of its other tables holds or has places for.
    pub(super) fn sizes(&self) -> (usize, usize) {
        (self.flows.len(), self.sockets.len().max(self.ready.len()).max(self.touched.len()))
    }
}

pub(super) struct DecoySocket {
    pub(super) socket: Box<dyn UdpSocket>,
    token: Token,
    booked: Booked,
    /// Whether the socket is in [`Decoys::ready`].
    ready: bool,
    /// Whether the socket is in [`Decoys::touched`].
    touched: bool,
}

/// Flows are looked at no more often than this for their end.
pub(super) const EXPIRY_STEP: Duration = Duration::from_millis(100);

/// The worker that has all flows.
pub(super) const OWNER: u8 = 0;
