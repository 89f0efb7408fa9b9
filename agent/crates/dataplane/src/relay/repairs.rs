//! Which payloads of a peer are repaired, how, and what came of it.

use repair::{LaneRepair, ReceiverCounts, SenderCounts};
use wire::{
    messages,
    repair_terms::{StreamNumber, StreamOf, Terms},
};

/// What is repaired between us and one peer, as this worker knows it.
#[derive(Clone, Debug, Default)]
pub struct Repairs {
    /// For each of our services, by index. Usually none, and then no memory is held for it.
    own: Box<[Option<Terms>]>,
    /// The peer's services that are repaired, by their numbers.
    theirs: Vec<(u32, Terms)>,
    /// How the peer repairs the IP packets that it sends to us.
    pub packets: Option<Terms>,
    pub sent: SenderCounts,
    pub received: ReceiverCounts,
}

impl Repairs {
    /// Notes how our services are repaired.
    pub fn set_own(&mut self, services: &[config::Service]) {
        let terms = |service: &config::Service| service.repair.in_use().filter(|_| service.udp);
        let most = services.iter().rposition(|service| terms(service).is_some()).map_or(0, |last| last + 1);
        self.own = services[..most].iter().map(terms).collect();
    }

    /// Notes how the peer's services are repaired.
    pub fn set_theirs(&mut self, offered: &[messages::Service]) {
        let repaired = offered.iter().filter_map(|service| Some((service.number, service.repair?)));
        self.theirs = repaired.collect();
    }

    /// How our service with this index is repaired.
    #[inline]
    #[must_use]
    pub fn of_own(&self, service: usize) -> Option<Terms> {
        self.own.get(service).copied().flatten()
    }

    /// Adds what these streams counted since they were last asked.
    pub fn take_counts(&mut self, streams: &mut LaneRepair) {
        let (sent, received) = streams.take_counts();
        self.sent.add(&sent);
        self.received.add(&received);
    }

    /// Whether any service is repaired, ours or the peer's.
    #[must_use]
    pub fn any_service(&self) -> bool {
        !self.own.is_empty() || !self.theirs.is_empty()
    }

    /// How the payloads of a stream are repaired that the peer numbers.
    #[must_use]
    pub fn of_stream(&self, stream: StreamNumber) -> Option<Terms> {
        match stream.carries() {
            StreamOf::Packets => self.packets,
            StreamOf::SendersService(number) => {
                let found = self.theirs.iter().find(|(known, _)| *known == u32::from(number));
                found.map(|(_, terms)| *terms)
            }
            StreamOf::ReceiversService(number) => self.of_own(number.into()),
        }
    }
}
