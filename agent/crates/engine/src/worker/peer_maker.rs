//! How a worker begins with a peer.

use std::{sync::Arc, time::Instant};

use config::{self, Config};
use dataplane::{
    peer::{Allowances, PeerData, PeerStanding},
    relay::{DatagramRelay, Numbering},
};
use wire::{
    ids::{PeerId, WorkerId},
    sampler::Sampler,
    throttle::Throttle,
};

use crate::{
    control::dial::Dialler,
    hub::Hub,
    origin::PeerOrigin,
    peer::{Peer, Refused},
    worker::{context::parity, dial::dials, timer::LOG_INTERVAL},
};

/// The values that a worker makes its peers from.
pub(super) struct PeerMaker<'a> {
    pub(super) config: &'a Config,
    pub(super) hub: &'a Hub,
    pub(super) own_key: &'a [u8; 32],
    /// Which worker this is, and of how many.
    pub(super) worker: WorkerId,
}

impl PeerMaker<'_> {
    /// A peer as a worker begins with it: about to be dialled, without flows.
    pub(super) fn make(&self, id: PeerId, peer: Arc<config::Peer>, origin: PeerOrigin, now: Instant) -> Peer {
        // Of several keys the one that the peer proves counts; until then no number leaves this agent.
        let parity = peer.public_keys.first().map_or(0, |key| parity(self.own_key, &key.0));
        // One worker dials.
        let endpoints = if dials(id, self.worker) { peer.endpoints.clone() } else { Vec::new() };
        self.hub.rate(id).set_rate(peer.rate.map(|bits| bits / 8));
        Peer {
            name: Arc::clone(&peer.name),
            origin,
            generation: 0,
            idle_since: None,
            data: PeerData {
                id,
                standing: PeerStanding::Live,
                relay: self.relay(id, &peer, parity),
                config: peer,
                link: None,
                instance: None,
                too_large: None,
                allowances: Allowances::new(&self.config.limits, now),
            },
            dialler: Dialler::new(endpoints, now),
            session: None,
            asked_to_dial: None,
            awaited_until: None,
            tcp_streams: 0,
            forwards: self.hub.forwards(id),
            streams: crate::control::connections::StreamConnections::default(),
            refused: Refused::default(),
            known_services: None,
            route_asked: None,
            dialled: None,
            failure: None,
            meter: Sampler::new(now),
            attempts_log: Throttle::new(LOG_INTERVAL),
            connections_log: Throttle::new(LOG_INTERVAL),
            throttles: crate::peer::Throttles::new(LOG_INTERVAL),
        }
    }

    pub(super) fn relay(&self, id: PeerId, peer: &config::Peer, parity: u64) -> DatagramRelay {
        let names: Vec<Arc<str>> =
            self.config.udp.iter().map(|forward| Arc::clone(&forward.service)).collect();
        let numbering = Numbering { parity, worker: self.worker };
        let mut relay = DatagramRelay::new(peer, &self.config.limits, numbering, self.hub.flows(id), &names);
        relay.set_oversize(&self.config.services);
        relay
    }
}
