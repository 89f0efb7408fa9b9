//! What a connected peer is told: rates, reports, services, repair, leave.

use std::{sync::Arc, time::Instant};

use base::ids::PeerId;
use config::{self, Config, Rate};
use wire::messages::{self, Features, Message};

use crate::worker::{
    context::{Context, peer_maker::told_bits, timer::index_u32},
    session::Conn,
};

impl Conn<'_> {
    /// Tells the peer which of its settings have changed.
    pub(crate) fn follow(&mut self, old: &config::Peer, now: Instant) {
        let new = Arc::clone(&self.data.config);
        if old.services != new.services {
            self.offer_services();
        }
        if old.rate != new.rate {
            self.ask_for_reports(now);
        }
        if old.rate_receive != new.rate_receive {
            self.tell_rate(true);
        }
        if old.repair != new.repair {
            self.tell_packet_repair(true);
            self.warn_of_missing_repair(now);
        }
    }

    /// Asks the peer to leave, because this agent drains, if the peer has dialled it and knows what that means.
    pub(crate) fn ask_to_leave(&mut self) {
        if !self.session.agreed.dialled && self.knows(Features::LEAVE) {
            self.control.send(&Message::Leave);
        }
    }

    /// Sends the peer the services that it may use, if they have changed since they were last sent.
    pub(crate) fn offer_services(&mut self) {
        let services = services_for(self.cx.config, &self.data.config);
        if !self.control.has_told(&services) {
            self.control.send(&Message::ServicesChanged(services));
        }
    }

    /// Tells the peer whether this end wants reports about its lanes. Warns if it does and there are none to be had.
    pub(crate) fn ask_for_reports(&mut self, now: Instant) {
        let knows = self.knows(Features::REPORTS);
        let Some(link) = &self.data.link else { return };
        let is_able = !link.is_standard() && knows;
        self.cx.hub.rates(self.data.id).set_measurable(is_able, now);
        let wanted = self.data.config.rate == Some(Rate::Auto);
        if is_able && wanted != self.session.wants_reports {
            self.control.send(&Message::ReportsWanted { wanted });
            self.session.wants_reports = wanted;
        }
        if wanted && !is_able {
            let why = if link.is_standard() {
                "the session has no lanes"
            } else {
                "the peer's version reports nothing"
            };
            throttled!(
                warn, self.throttles.unmeasured.allow(now),
                { peer = self.name(), why, rate_max = self.data.config.rate_max },
                "peer.rate = \"auto\" cannot be measured; only peer.rate_max limits what is sent (remedy: lanes and this version at \
                 both ends, or a number as peer.rate)"
            );
        }
    }

    /// Tells the peer the most that it should send; at first only if that is limited.
    pub(crate) fn tell_rate(&mut self, always: bool) {
        let limit = told_bits(&self.data.config, self.data.relay.held);
        if always || limit.is_some() {
            self.control.send(&Message::ReceiveRate { bits_per_second: limit.unwrap_or(0) });
        }
    }

    /// Tells the peer how we repair the IP packets that we send, if it can do its part; at first only if we do.
    pub(crate) fn tell_packet_repair(&mut self, always: bool) {
        let terms = self.data.config.repair.terms.in_use();
        if self.knows(Features::REPAIR) && (always || terms.is_some()) {
            self.control.send(&Message::PacketRepair(terms));
        }
    }

    /// Warns that the peer cannot repair what is to be repaired.
    pub(crate) fn warn_of_missing_repair(&mut self, now: Instant) {
        let services = services_for(self.cx.config, &self.data.config);
        let services = services.iter().filter(|service| service.repair.is_some()).count();
        let packets = self.data.config.repair.terms.in_use().is_some();
        if !self.knows(Features::REPAIR) && (services > 0 || packets) {
            throttled!(
                warn, self.throttles.no_repair.allow(now),
                { peer = self.name(), software = &*self.session.agreed.software, services, packets },
                "the peer cannot repair lost payloads: they travel plain (remedy: a newer version there)"
            );
        }
    }

    /// Warns that the peer does not tell who its clients are, where a service is to be told.
    pub(crate) fn warn_of_missing_clients(&mut self, now: Instant) {
        let services = services_for(self.cx.config, &self.data.config);
        let [streams, flows] =
            [Features::STREAM_CLIENT, Features::FLOW_CLIENT].map(|tells| self.knows(tells));
        let untold = |service: &messages::Service| {
            service.client && (service.tcp && !streams || service.udp && !flows)
        };
        let services = services.iter().filter(|service| untold(service)).count();
        if services > 0 {
            throttled!(
                warn, self.throttles.no_clients.allow(now),
                { peer = self.name(), software = &*self.session.agreed.software, services },
                "the peer does not tell its clients' addresses: services with a proxy_protocol get LOCAL headers (remedy: a newer version \
                 there)"
            );
        }
    }

    /// Whether the peer's hello offers a feature.
    fn knows(&self, feature: Features) -> bool {
        self.session.agreed.hello.features.contains(feature)
    }
}

/// The services of this agent that a peer may use.
pub(super) fn services_for(config: &Config, peer: &config::Peer) -> Vec<messages::Service> {
    let services = peer.services.iter().filter_map(|index| {
        let service = config.services.get(*index)?;
        let (udp, tcp, idle) = (service.udp, service.tcp, service.idle);
        let name = service.name.to_string();
        let fragment = service.oversize == config::Oversize::Fragment;
        let (number, repair) = (index_u32(*index), service.repair.in_use().filter(|_| udp));
        let client = service.proxy_protocol != config::ProxyProtocol::Off;
        (udp || tcp).then_some(messages::Service { number, name, udp, tcp, idle, fragment, repair, client })
    });
    services.collect()
}

impl Context {
    /// Warns once, and again after a change, about services that our forwards need and the peer does not offer.
    pub(crate) fn warn_of_missing_services(&mut self, id: PeerId, now: Instant) {
        let Some(peer) = self.peers.get(id) else { return };
        let Some(offered) = peer.session.as_ref().map(|session| &session.services) else { return };
        if Some(offered) == peer.reported.services.as_ref() {
            return;
        }
        let offered = offered.clone();
        let offers = |name: &str, udp: bool| {
            offered.iter().any(|service| service.name == name && if udp { service.udp } else { service.tcp })
        };
        let wanted = self.config.udp.iter().map(|forward| (forward, true));
        let wanted = wanted.chain(self.config.tcp.iter().map(|forward| (forward, false)));
        let missing = wanted.filter(|(forward, udp)| {
            let leads_here = forward.open && self.peers.of_forward(forward) == id;
            leads_here && !offers(&forward.service, *udp)
        });
        let missing: Vec<_> = missing.collect();
        let Some(peer) = self.peers.get_mut(id) else { return };
        if missing.is_empty() {
            peer.reported.services = Some(offered);
            return;
        }
        // A suppressed line is repeated when the peer connects again.
        let Some(suppressed) = peer.throttles.no_service.allow(now) else { return };
        peer.reported.services = Some(offered.clone());
        let named = missing.iter().take(MOST_NAMED).map(|(forward, udp)| {
            let protocol = if *udp { "udp" } else { "tcp" };
            format!("{} ({protocol} {})", forward.service, forward.listen)
        });
        let near = missing.iter().find_map(|(forward, udp)| {
            let offered = offered.iter().filter(|service| if *udp { service.udp } else { service.tcp });
            let known = config::nearest(&forward.service, offered.map(|service| &*service.name))?;
            Some(format!("did you mean {known}? or "))
        });
        let offers = base::throttle::list(offered.iter().take(MOST_NAMED).map(|service| &*service.name));
        let offers = if offered.is_empty() { "nothing" } else { &*offers };
        tracing::warn!(
            peer = &**peer.name(),
            missing = missing.len(),
            services = base::throttle::list(named),
            offers,
            suppressed = base::throttle::counted(suppressed),
            "the peer does not offer services that our forwards need (remedy: {}add them to `services` of our [[peer]] there)",
            near.as_deref().unwrap_or_default()
        );
    }
}

/// Limit on missing services that a log line names.
const MOST_NAMED: usize = 10;
