//! The names of services: worker 0 looks them up, and every worker follows a change.
//!
//! ```text
//!   worker 0, once a second: due? ── resolve ──► resolved ── what leads back to us is refused ──► Upstreams
//!   every worker, once a second: changed? ── flows to an address that a service has no longer end; their next datagram opens new ones
//! ```

use std::{
    collections::{BTreeMap, BTreeSet},
    net::SocketAddr,
    sync::Arc,
    time::{Duration, Instant},
};

use config::{
    Config,
    leads_back::{self, OwnListeners},
};
use dataplane::{sockets::Source, upstreams::Addresses};
use gate::identity::Endpoint;
use net::Token;

use crate::worker::{context::Context, report::stats::NameLookup};

/// How often a name is looked up. The resolver of the C library tells no TTL; 30 s is what service discovery commonly gives its records
/// (Kubernetes, Consul behind a cache), and a look-up is one question to a caching resolver.
const PERIOD: Duration = Duration::from_secs(30);

/// How soon a name is looked up again that was not found, or at whose address an attempt has failed.
const AGAIN: Duration = Duration::from_secs(5);

/// How long an answer may take. glibc gives up after 10 s by default (resolv.conf(5)), for each search domain.
const ANSWER_WITHIN: Duration = Duration::from_secs(30);

/// The shortest time between two lines about other addresses: a name that has one of many addresses in turns changes with each look-up.
pub(crate) const MOVED_LOG_INTERVAL: Duration = Duration::from_secs(600);

/// The look-ups of worker 0, and what a worker has seen of their answers.
#[derive(Debug, Default)]
pub(crate) struct Names {
    asked: BTreeMap<Endpoint, Asked>,
    /// The number of changes that this worker has followed.
    generation: u64,
    /// Where the datagrams of each service went at that time.
    udp: Vec<Option<SocketAddr>>,
}

/// A name that is looked up.
#[derive(Debug)]
struct Asked {
    /// When the look-up began that is under way, or that has ended last.
    at: Instant,
    /// When it is looked up again.
    next: Instant,
    /// The token of the look-up that is under way.
    token: Option<Token>,
}

/// What of an answer can be used, and why the rest cannot.
#[derive(Debug, Default)]
struct Sifted {
    usable: Addresses,
    refused: BTreeSet<String>,
}

impl Context {
    /// Looks up the names that are due; worker 0 does that for all.
    pub(crate) fn look_up_names(&mut self, now: Instant) {
        if self.id.index != 0 || self.stopping {
            return;
        }
        let config = Arc::clone(&self.config);
        let served = config.services.iter().filter(|service| service.udp || service.tcp);
        let names: BTreeSet<&Endpoint> = served.flat_map(|service| service.upstream.names()).collect();
        if names.is_empty() && self.names.asked.is_empty() {
            return;
        }
        let is_doubted = self.sockets.factory.upstreams.take_doubt();
        let gone: Vec<Endpoint> =
            self.names.asked.keys().filter(|name| !names.contains(name)).cloned().collect();
        for name in gone {
            if let Some(token) = self.names.asked.remove(&name).and_then(|asked| asked.token) {
                self.sockets.factory.release(token);
            }
            self.sockets.factory.upstreams.retain(|known| *known != name);
        }
        for name in names {
            if let Some(asked) = self.names.asked.get_mut(name) {
                if is_doubted {
                    asked.next = asked.next.min(asked.at + AGAIN).max(now);
                }
                if let Some(token) = asked.token {
                    if now.saturating_duration_since(asked.at) < ANSWER_WITHIN {
                        continue;
                    }
                    asked.token = None;
                    self.sockets.factory.release(token);
                    self.name_failed(name, "no answer", now);
                } else if asked.next > now {
                    continue;
                }
            }
            let token = self.sockets.factory.token(Source::Name);
            let asked = Asked { at: now, next: now + PERIOD, token: Some(token) };
            self.names.asked.insert(name.clone(), asked);
            self.sockets.factory.resolve(&name.host, name.port, token);
        }
    }

    /// Takes the answer of a look-up.
    pub(crate) fn name_resolved(&mut self, token: Token, now: Instant) {
        let mut asked = self.names.asked.iter_mut();
        let Some((name, asked)) = asked.find(|(_, asked)| asked.token == Some(token)) else { return };
        let Some(answer) = self.sockets.factory.resolved(token) else { return };
        asked.token = None;
        let name = name.clone();
        self.sockets.factory.release(token);
        let answer = match answer {
            Ok(answer) => answer,
            Err(error) => return self.name_failed(&name, &error.to_string(), now),
        };
        let Sifted { usable, refused } = sift(&self.config, &name, &answer);
        if refused.is_empty() && usable == Addresses::default() {
            return self.name_failed(&name, "it has no address", now);
        }
        let problem = refused.into_iter().reduce(|all, one| format!("{all}; {one}"));
        self.stats.totals.lookups[if problem.is_some() { NameLookup::Refused } else { NameLookup::Found }] +=
            1;
        if let Some(problem) = &problem {
            throttled!(
                warn, self.logs.name_refused.allow(now), { upstream = %name, problem },
                "an address of a service's name is not used (remedy: correct the name's records; if this host is meant, write the \
                 address itself)"
            );
            if usable == Addresses::default() {
                // As when the name is not found, its last addresses stay.
                self.sockets.factory.upstreams.not_found(&name, problem.clone());
                return;
            }
        }
        let upstreams = &self.sockets.factory.upstreams;
        if let Some([from, to]) = upstreams.found(&name, usable, problem) {
            let [from, to] = [from, to].map(|address| address.map(tracing::field::display));
            // The first address is told always.
            let is_told = if from.is_some() { self.logs.name_moved.allow(now) } else { Some(0) };
            throttled!(
                info, is_told, { upstream = %name, from, to },
                "a service's name has another address"
            );
        }
        upstreams.keep_failures_of(self.config.services.iter().map(|service| &service.upstream));
    }

    /// Notes that a name was not found; it keeps its last addresses.
    fn name_failed(&mut self, name: &Endpoint, why: &str, now: Instant) {
        self.stats.totals.lookups[NameLookup::Failed] += 1;
        if let Some(asked) = self.names.asked.get_mut(name) {
            asked.next = now + AGAIN;
        }
        let keeps = self.sockets.factory.upstreams.not_found(name, why.to_owned());
        throttled!(
            warn, self.logs.name_failed.allow(now), { upstream = %name, error = why, keeps_addresses = keeps },
            "the name of a service was not found (remedy: `getent ahosts {}` on this host, /etc/resolv.conf and /etc/hosts)", name.host
        );
    }

    /// The services whose datagrams go to another address than when this was last asked.
    pub(crate) fn moved_services(&mut self) -> Vec<usize> {
        let upstreams = &self.sockets.factory.upstreams;
        let generation = upstreams.generation();
        if generation == self.names.generation {
            return Vec::new();
        }
        self.names.generation = generation;
        let services = self.config.services.iter();
        let udp: Vec<Option<SocketAddr>> = services.map(|service| upstreams.udp(&service.upstream)).collect();
        let pairs = self.names.udp.iter().zip(&udp).enumerate();
        let moved = pairs.filter(|(_, (old, new))| old.is_some() && new.is_some() && old != new);
        let moved = moved.map(|(index, _)| index).collect();
        // A service without an address for now has moved if it gets another one later.
        let olds = self.names.udp.iter().copied().chain(std::iter::repeat(None));
        self.names.udp = udp.into_iter().zip(olds).map(|(new, old)| new.or(old)).collect();
        moved
    }

    /// For metrics: the address that each name of a service is used with.
    pub(crate) fn upstream_rows(&self) -> Vec<[Arc<str>; 3]> {
        if self.id.index != 0 {
            return Vec::new();
        }
        let mut rows = Vec::new();
        for service in self.config.services.iter().filter(|service| service.udp || service.tcp) {
            if service.upstream.names().next().is_none() {
                continue;
            }
            for state in self.sockets.factory.upstreams.states(&service.upstream) {
                let address = state.addresses.first().map(ToString::to_string).unwrap_or_default();
                rows.push([Arc::clone(&service.name), state.target.into(), address.into()]);
            }
        }
        rows
    }
}

/// What of an answer can be used: nothing that leads back to this agent, or to no host.
fn sift(config: &Config, name: &Endpoint, answer: &[SocketAddr]) -> Sifted {
    let own = OwnListeners::new(config);
    let mut sifted = Sifted::default();
    for address in answer {
        let address = SocketAddr::new(address.ip().to_canonical(), address.port());
        if let Some(refused) = leads_back::not_followed(&name.host, address.ip()) {
            sifted.refused.insert(refused);
            continue;
        }
        for (listener, usable, protocol) in [
            (own.udp_at(address), &mut sifted.usable.udp, "UDP"),
            (own.tcp_at(address), &mut sifted.usable.tcp, "TCP"),
        ] {
            match listener {
                Some(own) => {
                    sifted.refused.insert(format!("{address} is our own {protocol} port {own}"));
                }
                None => usable.push(address),
            }
        }
        if sifted.refused.len() > MOST_REFUSED {
            break;
        }
    }
    sifted
}

/// Limit on refused addresses of one answer that are looked at.
const MOST_REFUSED: usize = 4;

#[cfg(test)]
mod tests {
    use std::path::Path;

    use super::*;

    #[test]
    fn what_leads_back_to_this_agent_is_refused_for_the_protocol_that_it_would_loop() {
        let config = Config::parse(
            "identity.key_file = \"x\"\ntransport.listen = [\"127.0.0.1:4433\", \"192.0.2.7:4433\"]\n",
            Path::new(""),
        );
        let config = config.unwrap();
        let sifted = |host: &str, ips: &[&str], port| {
            let answer: Vec<_> = ips.iter().map(|ip| SocketAddr::new(ip.parse().unwrap(), port)).collect();
            let sifted = sift(&config, &Endpoint::new(host.to_owned(), port), &answer);
            (sifted.usable.udp.len(), sifted.usable.tcp.len(), sifted.refused.len())
        };
        assert_eq!(sifted("db.example.net", &["192.0.2.1", "2001:db8::1"], 53), (2, 2, 0));
        assert_eq!(sifted("db.example.net", &["127.0.0.1", "::1", "192.0.2.1"], 53), (1, 1, 2));
        assert_eq!(sifted("db.example.net", &["::ffff:127.0.0.1", "0.0.0.0", "ff02::1"], 53), (0, 0, 3));
        assert_eq!(sifted("localhost", &["127.0.0.1", "::1"], 53), (2, 2, 0), "loopback is what it means");
        // Our UDP port loops for UDP, and not for TCP, where a web server may be.
        assert_eq!(sifted("localhost", &["127.0.0.1"], 4433), (0, 1, 1));
        assert_eq!(sifted("db.example.net", &["192.0.2.7"], 4433), (0, 1, 1));
        assert_eq!(sifted("db.example.net", &["192.0.2.8"], 4433), (1, 1, 0));
    }
}
