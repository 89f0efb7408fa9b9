//! The initial state of a peer at a worker.

use std::{
    sync::Arc,
    time::{Duration, Instant},
};

use base::{
    ids::{PeerId, WorkerId},
    sampler::Sampler,
    throttle::Throttle,
};
use config::{self, Config, Rate};
use dataplane::{
    peer::{Allowances, PeerData, PeerStanding},
    relay::{DatagramRelay, Held, Ingress, Numbering},
};
use ip::map::AddressMap;
use rate::{AutoLimits, Limit, Share};

use crate::{
    control::{connections::StreamConnections, dial::Dialler},
    hops::Hops,
    hub::Hub,
    origin::PeerOrigin,
    peer::{Forwards, Peer, Reported, Throttles},
    reach::{Demand, Reach},
    worker::context::{dialling::dials, parity, timer::LOG_INTERVAL},
};

/// The limit that a peer's settings put on what is sent to it.
pub(crate) fn limit_of(peer: &config::Peer, held: Held) -> Limit {
    let most = |bits: u64| held.rate().unwrap_or(bits).min(bits) / 8;
    match (peer.rate, held.rate()) {
        (None, None) => Limit::None,
        (None, Some(bits)) => Limit::Fixed(bits / 8),
        (Some(Rate::Fixed(bits)), _) => Limit::Fixed(most(bits)),
        (Some(Rate::Auto), slowed) => {
            let max = peer.rate_max.into_iter().chain(slowed).min();
            Limit::Auto(AutoLimits { min: most(peer.least_rate()), max: max.map(|bits| bits / 8) })
        }
    }
}

/// What the peer is told to send at most, in bytes a second.
pub(crate) fn told_rate(peer: &config::Peer, held: Held) -> Option<u64> {
    told_bits(peer, held).map(|bits| bits / 8)
}

/// The same in bits a second.
pub(crate) fn told_bits(peer: &config::Peer, held: Held) -> Option<u64> {
    peer.rate_receive.into_iter().chain(held.rate()).min()
}

/// Makes the peers of a worker.
pub(crate) struct PeerMaker<'a> {
    pub(crate) config: &'a Config,
    pub(crate) hub: &'a Hub,
    pub(crate) own_key: &'a [u8; 32],
    pub(crate) worker: WorkerId,
}

impl PeerMaker<'_> {
    /// Makes a peer without flows, ready to be dialled by the worker that dials it.
    pub(crate) fn make(&self, id: PeerId, peer: Arc<config::Peer>, origin: PeerOrigin, now: Instant) -> Peer {
        // If the peer has several keys, the key that it proves will count. Until then no flow number leaves this agent.
        let parity = peer.public_keys.first().map_or(0, |key| parity(self.own_key, &key.0));
        // Exactly one worker dials a peer.
        let endpoints = if dials(id, self.worker) { peer.dialled() } else { Vec::new() };
        let rates = self.hub.rates(id);
        rates.set_limit(limit_of(&peer, Held::Free), peer.rate_overhead, now);
        rates.whole().received().set(told_rate(&peer, Held::Free));
        Peer {
            origin,
            generation: 0,
            idle_since: None,
            data: PeerData {
                id,
                standing: PeerStanding::Live,
                map: AddressMap::new(&peer.map).map(Box::new),
                relay: self.relay(id, &peer, parity, now),
                config: peer,
                link: None,
                instance: None,
                too_large: None,
                allowances: Allowances::new(&self.config.limits, now),
                is_watched: false,
            },
            dialler: Dialler::new(endpoints, now),
            session: None,
            forwards: Forwards::new(self.hub.forwards(id)),
            streams: StreamConnections::default(),
            reported: Reported::default(),
            demand: Demand::default(),
            hops: Hops::default(),
            reach: Reach::default(),
            rates: Sampler::new(now),
            charged: 0,
            throttles: Throttles {
                connected: Throttle::new(Duration::from_secs(1)),
                ..Throttles::new(LOG_INTERVAL)
            },
        }
    }

    pub(crate) fn relay(&self, id: PeerId, peer: &config::Peer, parity: u64, now: Instant) -> DatagramRelay {
        let ingresses = Ingress::all(&self.config.udp);
        let numbering = Numbering { parity, worker: self.worker };
        let (registry, share) = (self.hub.flows(id), Share::new(self.hub.rate(id), now));
        let mut relay = DatagramRelay::new(peer, &self.config.limits, numbering, registry, share, &ingresses);
        relay.set_own_services(&self.config.services);
        relay
    }
}
