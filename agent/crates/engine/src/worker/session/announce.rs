//! What a connected peer is told: rates, reports, services, repair, leave.

use std::time::Instant;

use base::ids::PeerId;
use config::Rate;
use quinn_proto::ConnectionHandle;
use wire::messages::{Features, Message};

use crate::worker::{context::Context, session::Sessions};

impl Sessions {
    /// Asks a peer to leave if this agent drains, the peer has dialled it, and knows what that means.
    pub(crate) fn ask_to_leave(&mut self, cx: &Context, id: PeerId) {
        if !self.control.acceptor.is_closed() || cx.stopping {
            return;
        }
        let session = cx.peers.session(id).filter(|session| !session.agreed.dialled);
        let able = session.filter(|session| session.agreed.hello.features.contains(Features::LEAVE));
        if let Some(session) = able {
            self.control.send(session.handle, &Message::Leave);
        }
    }

    /// Sends a connected peer the services that it may use, if they have changed since they were last sent.
    pub(crate) fn offer_services(&mut self, cx: &Context, id: PeerId) {
        let services = cx.services_for(id);
        let Some(handle) = cx.peers.session(id).map(|session| session.handle) else { return };
        if self.control.get(handle).is_some_and(|connection| !connection.has_told(&services)) {
            self.control.send(handle, &Message::ServicesChanged(services));
        }
    }

    /// Tells a connected peer whether this end wants reports about its lanes. Warns if it does and there are none to be had.
    pub(crate) fn ask_for_reports(&mut self, cx: &mut Context, id: PeerId, now: Instant) {
        let account = cx.hub.rate(id);
        let Some(peer) = cx.peers.get_mut(id) else { return };
        let (Some(session), Some(link)) = (&mut peer.session, &peer.data.link) else { return };
        let is_able = !link.is_standard() && session.agreed.hello.features.contains(Features::REPORTS);
        account.set_measurable(is_able, now);
        let wanted = peer.data.config.rate == Some(Rate::Auto);
        if is_able && wanted != session.wants_reports {
            self.control.send(session.handle, &Message::ReportsWanted { wanted });
            session.wants_reports = wanted;
        }
        if wanted && !is_able {
            let why = if link.is_standard() {
                "the session has no lanes"
            } else {
                "the peer's version reports nothing"
            };
            throttled!(
                warn, peer.throttles.unmeasured.allow(now),
                { peer = &**peer.name(), why, rate_max = peer.data.config.rate_max },
                "peer.rate = \"auto\" cannot be measured; only peer.rate_max limits what is sent (remedy: lanes and this version at \
                 both ends, or a number as peer.rate)"
            );
        }
    }

    /// Tells a peer the most that it should send, if that is limited.
    pub(crate) fn ask_for_rate(&mut self, cx: &Context, id: PeerId, handle: ConnectionHandle) {
        if let Some(bits_per_second) = cx.peers.get(id).and_then(|peer| peer.data.config.rate_receive) {
            self.control.send(handle, &Message::ReceiveRate { bits_per_second });
        }
    }

    /// Tells a connected peer how we repair the IP packets that we send, if it can do its part; at first only if we do.
    pub(crate) fn tell_packet_repair(&mut self, cx: &Context, id: PeerId, always: bool) {
        let Some(peer) = cx.peers.get(id) else { return };
        let terms = peer.data.config.repair.terms.in_use();
        let session =
            peer.session.as_ref().filter(|session| session.agreed.hello.features.contains(Features::REPAIR));
        if let Some(session) = session.filter(|_| always || terms.is_some()) {
            self.control.send(session.handle, &Message::PacketRepair(terms));
        }
    }

    /// Tells a connected peer that the most that it should send has changed.
    pub(crate) fn rate_receive_changed(&mut self, cx: &Context, id: PeerId) {
        let Some(peer) = cx.peers.get(id) else { return };
        if let Some(session) = &peer.session {
            let bits_per_second = peer.data.config.rate_receive.unwrap_or(0);
            self.control.send(session.handle, &Message::ReceiveRate { bits_per_second });
        }
    }
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
            suppressed,
            "the peer does not offer services that our forwards need (remedy: {}add them to `services` of our [[peer]] there)",
            near.as_deref().unwrap_or_default()
        );
    }

    /// Warns that a peer cannot repair what is to be repaired.
    pub(crate) fn warn_of_missing_repair(&mut self, id: PeerId, now: Instant) {
        let services = self.services_for(id).iter().filter(|service| service.repair.is_some()).count();
        let Some(peer) = self.peers.get_mut(id) else { return };
        let packets = peer.data.config.repair.terms.in_use().is_some();
        let Some(session) = &peer.session else { return };
        let able = session.agreed.hello.features.contains(Features::REPAIR);
        if able || services == 0 && !packets {
            return;
        }
        throttled!(
            warn, peer.throttles.no_repair.allow(now),
            { peer = &**peer.name(), software = &*session.agreed.software, services, packets },
            "the peer cannot repair lost payloads: they travel plain (remedy: a newer version there)"
        );
    }
}

/// Limit on missing services that a log line names.
const MOST_NAMED: usize = 10;
