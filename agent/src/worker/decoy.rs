//! Strangers' datagrams to the decoy, byte for byte, and its answers back.
//!
//! ```text
//!   any worker                        worker 0, which has all flows
//!   stranger ─► Strangers::push ─┬─► serve_strangers ─► a connected socket of its own ─► decoy
//!                  (a batch)     └─ hand-over ─┘                     │
//!   stranger ◄── the listening socket, the address it used ◄── service_decoy
//! ```
//!
//! Which worker a datagram comes to depends on the connection ID that the decoy chose, so one worker has all flows: else the
//! decoy would see a stranger come from several ports. What is a stranger's is decided for each datagram, never for an
//! address. Nothing is allocated per datagram once the buffers have grown.

use std::{
    io,
    net::SocketAddr,
    ops::Range,
    time::{Duration, Instant},
};

use super::{Booked, Doors, LOG_INTERVAL, SocketBooks, Timer, Worker, books::role_place, handover::Parcel};
use crate::{
    config::Config,
    gate::decoy::{DecoyDrop, DecoyFlows, DecoyId, DecoyStats, Stranger},
    io::{Path, SendBatch, SendFailure, SendOutcome, Token, UdpRole, UdpSocket, batch::Meta},
    log::RateLimit,
    metrics::{Counters, DecoyMetrics, Metrics},
    relay::{DropReason, Settlement},
};

/// The worker that has all flows.
const OWNER: u8 = 0;

/// Bytes of strangers' datagrams that are kept in one turn: a full receive batch.
const MOST_BYTES: usize = 2 << 20;

/// How many of them.
const MOST_DATAGRAMS: usize = 4_096;

/// What strangers sent in this turn, or would have, had there been a decoy.
pub struct Strangers {
    has_decoy: bool,
    waiting: Waiting,
    /// What became of it.
    pub(super) stats: DecoyStats,
}

/// Datagrams that wait, in buffers that keep their capacity.
#[derive(Default)]
struct Waiting {
    bytes: Vec<u8>,
    /// The listening port of each, what came with it, and where it lies.
    datagrams: Vec<(usize, Meta, Range<usize>)>,
}

impl Strangers {
    pub(super) fn new(decoy: Option<SocketAddr>) -> Self {
        Self { has_decoy: decoy.is_some(), waiting: Waiting::default(), stats: DecoyStats::default() }
    }

    /// Whether they meet a decoy, not silence.
    #[must_use]
    pub fn have_a_decoy(&self) -> bool {
        self.has_decoy
    }

    /// Takes one datagram that came to listening port `port` and is a stranger's; `meta` may be that of its whole buffer.
    pub fn push(&mut self, port: usize, meta: Meta, datagram: &[u8]) {
        self.stats.to_decoy.count(datagram.len());
        if !self.has_decoy {
            self.stats.drop(DecoyDrop::NoDecoy, 1);
            return;
        }
        self.keep(port, meta, datagram);
    }

    /// Takes what another worker handed over and has counted.
    pub(super) fn take_over(&mut self, parcel: &Parcel, port: usize) {
        for (piece, datagram) in parcel.pieces() {
            self.keep(port, piece.meta, datagram);
        }
    }

    /// Counts what became of answers that were handed to the kernel.
    pub(super) fn settle(&mut self, settled: &Settlement) {
        match settled.dropped {
            None => {}
            Some(DropReason::SendTooLarge) => self.stats.drop(DecoyDrop::TooLarge, settled.payloads),
            Some(_) => self.stats.drop(DecoyDrop::ToStranger, settled.payloads),
        }
    }

    fn keep(&mut self, port: usize, meta: Meta, datagram: &[u8]) {
        let Waiting { bytes, datagrams } = &mut self.waiting;
        let start = bytes.len();
        if start + datagram.len() > MOST_BYTES || datagrams.len() >= MOST_DATAGRAMS {
            self.stats.drop(DecoyDrop::Overload, 1);
            return;
        }
        bytes.extend_from_slice(datagram);
        let meta = Meta { len: datagram.len(), segment: datagram.len().max(1), ..meta };
        datagrams.push((port, meta, start..bytes.len()));
    }
}

impl Waiting {
    fn iter(&self) -> impl Iterator<Item = (usize, Meta, &[u8])> {
        self.datagrams.iter().map(|(port, meta, range)| (*port, *meta, &self.bytes[range.clone()]))
    }

    fn clear(&mut self) {
        self.bytes.clear();
        self.datagrams.clear();
    }
}

/// The strangers that have a flow, and their sockets.
pub(super) struct Decoys {
    decoy: SocketAddr,
    flows: DecoyFlows,
    /// By the flows' places.
    sockets: Vec<Option<DecoySocket>>,
    /// Datagrams for the socket of the flow `sending`.
    outbox: SendBatch,
    sending: Option<DecoyId>,
    /// Sockets with traffic since the kernel was last asked what it dropped, each once.
    touched: Vec<DecoyId>,
    refused_log: RateLimit,
    socket_log: RateLimit,
}

struct DecoySocket {
    socket: Box<dyn UdpSocket>,
    token: Token,
    booked: Booked,
    touched: bool,
}

impl Decoys {
    /// What `worker` needs of it: nothing without a decoy, or if it is not the one that has the flows.
    pub(super) fn of_worker(worker: u8, config: &Config, now: Instant) -> Option<Self> {
        let decoy = config.access.decoy.filter(|_| worker == OWNER)?;
        Some(Self {
            decoy,
            flows: DecoyFlows::new(config.limits.decoy_flows, now),
            sockets: Vec::new(),
            outbox: SendBatch::default(),
            sending: None,
            touched: Vec::new(),
            refused_log: RateLimit::new(LOG_INTERVAL),
            socket_log: RateLimit::new(LOG_INTERVAL),
        })
    }

    /// Books what the sockets that had traffic did; with `drops`, they are forgotten until they have more.
    pub(super) fn book(&mut self, books: &mut SocketBooks, drops: bool) {
        for id in &self.touched {
            if let Some(Some(socket)) = self.sockets.get_mut(id.0 as usize) {
                socket.touched = !drops;
                books.book(UdpRole::Decoy, &*socket.socket, &mut socket.booked, drops);
            }
        }
        if drops {
            self.touched.clear();
        }
    }

    /// Adds a stranger's datagram to what its socket is to send.
    fn forward(
        &mut self,
        (stranger, ecn): (Stranger, u8),
        datagram: &[u8],
        (doors, stats): (&mut Doors, &mut DecoyStats),
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
            self.flush(stats);
            self.close(evicted, doors);
        }
        if admitted.new && !self.open(admitted.id, doors, now) {
            stats.drop(DecoyDrop::NoSocket, 1);
            return;
        }
        stats.opened += u64::from(admitted.new);
        if self.sending != Some(admitted.id) || self.outbox.tail(datagram.len()).is_none() {
            self.flush(stats);
        }
        let Some(tail) = self.outbox.tail(datagram.len()) else {
            // No datagram is larger than an empty outbox takes.
            stats.drop(DecoyDrop::ToDecoy, 1);
            return;
        };
        tail.copy_from_slice(datagram);
        let path = Path { destination: self.decoy, source: None, ecn };
        self.outbox.commit(&path, 0, datagram.len(), 1);
        self.sending = Some(admitted.id);
    }

    /// Sends what was added.
    fn flush(&mut self, stats: &mut DecoyStats) {
        let Some(id) = self.sending.take() else { return };
        self.touch(id);
        if let Some(Some(socket)) = self.sockets.get_mut(id.0 as usize) {
            socket.socket.send(&mut self.outbox, &mut |message, outcome| {
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
        stats.drop(DecoyDrop::ToDecoy, self.outbox.datagrams() as u64);
        self.outbox.clear();
    }

    /// Opens the socket of a new flow; ends the flow if there is none to be had.
    fn open(&mut self, id: DecoyId, doors: &mut Doors, now: Instant) -> bool {
        let place = id.0 as usize;
        match doors.open_decoy(self.decoy, id) {
            Ok((socket, token)) => {
                if self.sockets.len() <= place {
                    self.sockets.resize_with(place + 1, || None);
                }
                self.sockets[place] =
                    Some(DecoySocket { socket, token, booked: Booked::default(), touched: false });
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
    fn close(&mut self, id: DecoyId, doors: &mut Doors) {
        if let Some(mut socket) = self.sockets.get_mut(id.0 as usize).and_then(Option::take) {
            doors.books().book(UdpRole::Decoy, &*socket.socket, &mut socket.booked, true);
            doors.release(socket.token);
        }
        self.touched.retain(|touched| *touched != id);
    }

    fn touch(&mut self, id: DecoyId) {
        if let Some(Some(socket)) = self.sockets.get_mut(id.0 as usize)
            && !socket.touched
        {
            socket.touched = true;
            self.touched.push(id);
        }
    }

    fn report_refusal(&mut self, error: &io::Error, now: Instant) {
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

impl Worker {
    /// Sends on what strangers sent in this turn: to the decoy, or to the worker that has the flows.
    pub(super) fn serve_strangers(&mut self, now: Instant) {
        if self.strangers.waiting.datagrams.is_empty() {
            return;
        }
        self.unpublished = true;
        let mut waiting = std::mem::take(&mut self.strangers.waiting);
        if self.stopping {
            self.strangers.stats.drop(DecoyDrop::Stopping, waiting.datagrams.len() as u64);
        } else if self.place.0 != OWNER {
            for (port, meta, datagram) in waiting.iter() {
                self.outgoing.stranger(OWNER, port, meta, datagram);
            }
        } else if let Some(decoys) = &mut self.decoys {
            let stats = &mut self.strangers.stats;
            for (port, meta, datagram) in waiting.iter() {
                let stranger = Stranger { source: meta.source, port, local: meta.local };
                decoys.forward((stranger, meta.ecn), datagram, (&mut self.doors, &mut *stats), now);
            }
            decoys.flush(stats);
            if let Some(at) = decoys.flows.deadline() {
                self.timers.arm(Timer::Decoys, at);
            }
        }
        waiting.clear();
        self.strangers.waiting = waiting;
    }

    /// A batch of the decoy's answers to one stranger; true if there may be more.
    pub(super) fn service_decoy(&mut self, id: DecoyId, now: Instant) -> bool {
        let Some(decoys) = &mut self.decoys else { return false };
        let Some(Some(socket)) = decoys.sockets.get_mut(id.0 as usize) else { return false };
        let stats = &mut self.strangers.stats;
        match socket.socket.receive(&mut self.batch) {
            Ok(()) => {}
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => return false,
            Err(error) => {
                // ICMP's, about a datagram that was sent before; more may wait behind it.
                self.totals.refusals[role_place(UdpRole::Decoy)] += 1;
                stats.drop(DecoyDrop::Refused, 1);
                decoys.report_refusal(&error, now);
                return true;
            }
        }
        decoys.touch(id);
        for slot in 0..self.batch.len() {
            let meta = *self.batch.meta(slot);
            for range in meta.segments() {
                let answer = &self.batch.buffer(slot)[range];
                stats.to_stranger.count(answer.len());
                let Stranger { source, port, local } = match decoys.flows.answer(id, answer) {
                    Ok(stranger) => stranger,
                    Err(reason) => {
                        stats.drop(reason, 1);
                        continue;
                    }
                };
                let path = Path { destination: source, source: local, ecn: meta.ecn };
                let sent = self.ports.get(port).is_some_and(|underlay| {
                    self.underlays.answer(&mut self.lanes, *underlay, &path, answer, now)
                });
                if !sent {
                    stats.drop(DecoyDrop::ToStranger, 1);
                }
            }
        }
        true
    }

    /// Forgets strangers that have been silent for too long.
    pub(super) fn end_silent_strangers(&mut self, now: Instant) {
        let Some(decoys) = &mut self.decoys else { return };
        while let Some(id) = decoys.flows.expire(now) {
            decoys.close(id, &mut self.doors);
            self.unpublished = true;
        }
        if let Some(at) = decoys.flows.deadline() {
            // What ends one of two flows that are a moment apart ends both.
            self.timers.arm(Timer::Decoys, at + EXPIRY_STEP);
        }
    }

    /// Publishes what became of strangers' datagrams.
    pub(super) fn publish_decoy(&mut self) {
        let (stats, handles) = (&self.strangers.stats, &mut self.metrics.decoy);
        for (metrics, traffic) in handles.directions.iter_mut().zip([stats.to_decoy, stats.to_stranger]) {
            metrics.decoy_datagrams.publish(traffic.datagrams);
            metrics.decoy_bytes.publish(traffic.bytes);
        }
        handles.drops.publish(&stats.dropped);
        let own = &mut self.metrics.own;
        own.decoy_flows.set(self.decoys.as_ref().map_or(0, |decoys| decoys.flows.len() as u64));
        own.decoy_flows_opened.publish(stats.opened);
    }
}

/// Flows are looked at no more often than this for their end.
const EXPIRY_STEP: Duration = Duration::from_millis(100);

/// The metrics of strangers and the decoy, bound once.
pub(super) struct DecoyHandles {
    directions: [DecoyMetrics; 2],
    drops: Counters,
}

impl DecoyHandles {
    pub(super) fn bind(metrics: &Metrics) -> Self {
        Self {
            directions: ["to_decoy", "to_stranger"].map(|label| DecoyMetrics::bind(metrics, label)),
            drops: Counters::bind(
                &metrics.families().decoy_drops,
                &[],
                &DecoyDrop::ALL.map(DecoyDrop::label),
            ),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::lanes::STRANGERS;

    #[test]
    fn what_waits_is_bounded_and_each_datagram_is_kept_or_counted() {
        let decoy = SocketAddr::from(([127, 0, 0, 1], 8443));
        for (len, kept) in [(0, MOST_DATAGRAMS), (1_000, MOST_BYTES / 1_000), (65_507, MOST_BYTES / 65_507)] {
            let (mut strangers, datagram) = (Strangers::new(Some(decoy)), vec![0; len]);
            for _ in 0..5_000 {
                strangers.push(0, Meta::EMPTY, &datagram);
            }
            let stats = &strangers.stats;
            assert_eq!(
                strangers.waiting.iter().filter(|(_, meta, data)| meta.len == data.len()).count(),
                kept
            );
            assert_eq!((stats.to_decoy.datagrams, stats.to_decoy.bytes), (5_000, 5_000 * len as u64));
            assert_eq!(stats.dropped[DecoyDrop::Overload as usize], 5_000 - kept as u64);
            // The buffers keep what they have grown to.
            let capacity = strangers.waiting.bytes.capacity();
            strangers.waiting.clear();
            assert!(strangers.waiting.iter().next().is_none());
            assert_eq!(strangers.waiting.bytes.capacity(), capacity);
        }
    }

    #[test]
    fn answers_that_the_kernel_refused_are_counted_by_reason() {
        let mut strangers = Strangers::new(None);
        for (dropped, payloads) in
            [(None, 7), (Some(DropReason::SendTooLarge), 2), (Some(DropReason::SendBlocked), 3)]
        {
            strangers.settle(&Settlement { peer: STRANGERS, payloads, dropped });
        }
        let mut expected = DecoyStats::default();
        expected.drop(DecoyDrop::TooLarge, 2);
        expected.drop(DecoyDrop::ToStranger, 3);
        assert_eq!(strangers.stats, expected);
    }
}
