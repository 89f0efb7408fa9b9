//! All streams of numbered payloads on one opening of a lane, or in one session without lanes (pure).

use std::{
    sync::Arc,
    time::{Duration, Instant},
};

use base::delays::{Delays, WaitQuantiles};
use wire::repair_terms::{StreamNumber, Terms};

use super::{
    counts::{ReceiverCounts, SenderCounts},
    memory::RepairMemory,
    plan::Plan,
    receiver::Receiver,
    sender::Sender,
};

/// Streams of which payloads may come before their terms: more than most peers have.
const MOST_EARLY: usize = 64;

/// The ends of a lane's streams; there are as many as services are repaired, and one for IP packets.
#[derive(Debug, Default)]
pub struct LaneRepair {
    memory: Arc<RepairMemory>,
    /// All ends of streams that we number.
    pub senders: Vec<Sender>,
    /// All ends of streams that the peer numbers.
    pub receivers: Vec<Receiver>,
    /// Streams whose payloads came before their terms, and the number after the last of them: those were delivered at once.
    early: Vec<(StreamNumber, u32)>,
    sent: SenderCounts,
    received: ReceiverCounts,
    /// Whether nothing is sent any more, so that neither requests nor repairs are.
    closed: bool,
}

impl LaneRepair {
    #[must_use]
    pub fn new(memory: &Arc<RepairMemory>) -> Self {
        Self { memory: Arc::clone(memory), ..Self::default() }
    }

    /// Nothing is sent from now on: what waits for missing payloads does so until its deadline.
    pub fn close(&mut self) {
        self.closed = true;
        self.senders.clear();
    }

    /// The end of a stream that we number, if it has begun.
    pub fn sender(&mut self, stream: StreamNumber) -> Option<&mut Sender> {
        self.senders.iter_mut().find(|sender| sender.stream == stream)
    }

    /// The same; it begins now if it has not. `None` if there is no memory for it, which is counted for `payloads`.
    pub fn sender_for(
        &mut self,
        stream: StreamNumber,
        terms: &Terms,
        payloads: usize,
    ) -> Option<&mut Sender> {
        let index = match self.senders.iter().position(|sender| sender.stream == stream) {
            Some(index) => index,
            None => {
                let Some(sender) = Sender::new(stream, *terms, &self.memory) else {
                    self.sent.without_memory += payloads as u64;
                    return None;
                };
                self.senders.push(sender);
                self.senders.len() - 1
            }
        };
        self.senders.get_mut(index)
    }

    /// What is done about each stream that we number.
    pub fn plans(&self) -> impl Iterator<Item = Plan> {
        self.senders.iter().map(Sender::plan)
    }

    /// The longest time that a missing payload of any stream may take now; `None` if there is no stream.
    pub fn deadline(&self) -> Option<Duration> {
        let senders = self.senders.iter().map(|sender| sender.planner.deadline);
        senders.chain(self.receivers.iter().map(|receiver| receiver.deadline)).max()
    }

    /// Notes a payload of a stream whose terms the peer has not told yet: a datagram may overtake the control message. Once they are
    /// known the stream begins behind it, as it would otherwise ask for what was delivered.
    pub fn came_early(&mut self, stream: StreamNumber, number: u32) {
        let next = number.wrapping_add(1);
        if let Some((_, known)) = self.early.iter_mut().find(|(known, _)| *known == stream) {
            *known = (*known).max(next);
        } else if self.early.len() < MOST_EARLY {
            self.early.push((stream, next));
        }
    }

    /// The end of a stream that the peer numbers; it begins now if it has not. `None` if there is no memory for it. Without `terms` a
    /// stream that has begun goes on by the old ones: what it delivered is not delivered again.
    pub fn receiver_for(&mut self, stream: StreamNumber, terms: Option<&Terms>) -> Option<&mut Receiver> {
        let Some(terms) = terms else {
            return self.receivers.iter_mut().find(|receiver| receiver.stream == stream);
        };
        let index = match self.receivers.iter().position(|receiver| receiver.stream == stream) {
            Some(index) => index,
            None => {
                let Some(mut receiver) = Receiver::new(stream, *terms, &self.memory) else {
                    self.received.without_memory += 1;
                    return None;
                };
                if let Some(early) = self.early.iter().position(|(known, _)| *known == stream) {
                    receiver.begin_at(self.early.swap_remove(early).1.into());
                }
                self.receivers.push(receiver);
                self.receivers.len() - 1
            }
        };
        let receiver = self.receivers.get_mut(index)?;
        if receiver.terms != *terms {
            receiver.set(*terms);
        }
        Some(receiver)
    }

    /// How long payloads that the peer numbers were missing and waited here lately, on all these lanes.
    #[must_use]
    pub fn delays<'a>(lanes: impl IntoIterator<Item = &'a Self>, now: Instant) -> Option<WaitQuantiles> {
        let receivers = lanes.into_iter().flat_map(|lane| &lane.receivers);
        Delays::quantiles(receivers.filter_map(|receiver| receiver.sequencer.delays.as_deref()), now)
    }

    /// When something has to be sent, asked for or given up.
    #[must_use]
    pub fn next_deadline(&self) -> Option<Instant> {
        let senders = self.senders.iter().filter_map(Sender::next_deadline);
        let asks = self.receivers.iter().filter(|_| !self.closed).filter_map(Receiver::next_ask);
        senders.chain(asks).chain(self.next_expiry()).min()
    }

    /// When the first of the missing payloads misses its deadline.
    #[must_use]
    pub fn next_expiry(&self) -> Option<Instant> {
        self.receivers.iter().filter_map(|receiver| receiver.sequencer.next_deadline()).min()
    }

    /// How many payloads wait for missing ones.
    #[must_use]
    pub fn held_packets(&self) -> usize {
        self.receivers.iter().map(|receiver| receiver.sequencer.held_packets()).sum()
    }

    /// The counts since this was last asked.
    pub fn take_counts(&mut self) -> (SenderCounts, ReceiverCounts) {
        let (mut sent, mut received) = (std::mem::take(&mut self.sent), std::mem::take(&mut self.received));
        self.senders.iter_mut().for_each(|sender| sent.add(&sender.take_counts()));
        self.receivers.iter_mut().for_each(|receiver| received.add(&receiver.sequencer.take_counts()));
        (sent, received)
    }
}
