//! The services that a peer offers, and those that our ingresses are for.

use std::{net::SocketAddr, sync::Arc, time::Duration};

use base::ids::IngressId;
use wire::{context::ServiceNumber, messages, repair_terms::Terms};

/// The longest that a flow to a peer's service may be silent here, whatever the peer allows: the flow counts against our limits.
pub const MOST_IDLE: Duration = Duration::from_secs(3600);

/// A service that the peer offers to us.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RemoteService {
    /// The service's number on the wire.
    pub number: ServiceNumber,
    /// How long a flow to it may be silent, at most [`MOST_IDLE`].
    pub idle: Duration,
    /// Whether datagrams to it that fit into no packet travel in pieces.
    pub fragment: bool,
    /// How datagrams to it are repaired.
    pub repair: Option<Terms>,
    /// Whether openings of flows to it are to say who the client is.
    pub client: bool,
}

impl RemoteService {
    /// The service as the peer describes it, within our limits.
    fn of(service: &messages::Service) -> Self {
        Self {
            number: ServiceNumber(service.number),
            idle: service.idle.min(MOST_IDLE),
            fragment: service.fragment,
            repair: service.repair,
            client: service.client,
        }
    }
}

/// A `[[udp]]` port of this agent.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Ingress {
    /// The address that clients ask.
    pub listen: SocketAddr,
    /// The name of the service that its datagrams are for.
    pub service: Arc<str>,
}

impl Ingress {
    /// Those of a configuration.
    #[must_use]
    pub fn all(forwards: &[config::Forward]) -> Vec<Self> {
        let one = |forward: &config::Forward| Self {
            listen: forward.listen,
            service: Arc::clone(&forward.service),
        };
        forwards.iter().map(one).collect()
    }
}

#[derive(Debug, Default)]
pub struct Services {
    /// Each ingress, and what the peer says of its service.
    of_ingresses: Vec<(Ingress, Option<RemoteService>)>,
    /// What the peer offered last.
    offered: Vec<messages::Service>,
}

impl Services {
    /// Changes the ingresses as the operator wants.
    pub(super) fn set_ingresses(&mut self, ingresses: &[Ingress]) {
        self.of_ingresses = ingresses.iter().map(|ingress| (ingress.clone(), None)).collect();
        self.find();
    }

    pub(super) fn learn(&mut self, offered: &[messages::Service]) {
        self.offered = offered.to_vec();
        self.find();
    }

    fn find(&mut self) {
        for (Ingress { service: name, .. }, known) in &mut self.of_ingresses {
            let found = self.offered.iter().find(|service| service.udp && *service.name == **name);
            *known = found.map(RemoteService::of);
        }
    }

    /// The service that an ingress's datagrams are for, if the peer offers it.
    #[inline]
    #[must_use]
    pub fn of(&self, ingress: IngressId) -> Option<RemoteService> {
        self.of_ingresses.get(ingress.0 as usize).and_then(|(_, known)| *known)
    }

    /// The address that clients of an ingress ask.
    #[must_use]
    pub fn listen(&self, ingress: IngressId) -> Option<SocketAddr> {
        self.of_ingresses.get(ingress.0 as usize).map(|(ingress, _)| ingress.listen)
    }

    /// The name of the service that an ingress's datagrams are for.
    #[must_use]
    pub fn name_of(&self, ingress: IngressId) -> Option<&str> {
        self.of_ingresses.get(ingress.0 as usize).map(|(ingress, _)| &*ingress.service)
    }

    /// The service of this name for TCP, if the peer offered it last.
    #[must_use]
    pub fn of_tcp(&self, name: &str) -> Option<&messages::Service> {
        self.offered.iter().find(|service| service.tcp && service.name == name)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_peer_does_not_have_our_flows_live_for_weeks() {
        let says = |idle| messages::Service {
            number: 1,
            name: "dns".to_owned(),
            udp: true,
            tcp: false,
            idle,
            fragment: false,
            repair: None,
            client: false,
        };
        let minute = Duration::from_secs(60);
        assert_eq!(RemoteService::of(&says(minute)).idle, minute);
        assert_eq!(RemoteService::of(&says(MOST_IDLE)).idle, MOST_IDLE);
        let most = Duration::from_millis(u32::MAX.into());
        assert_eq!(RemoteService::of(&says(most)).idle, MOST_IDLE);
    }
}
