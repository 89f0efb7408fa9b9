//! `[[peer]]`, wherever it stands: in the configuration, in the state file, or in a request to the running daemon.

use std::{ops::Range, sync::Arc, time::Duration};

use gate::identity::{Endpoint, PublicKey};
use toml::Spanned;

use crate::{
    CongestionControl, DropPolicy, OPEN_LABEL, OPEN_PREFIX, Peer, PeerOrigin, Profile, Queue, Service,
    checks::{At, Checks, PinnedKey},
    defaults,
    field::{Field, OneOrMany},
    file,
    resolve::{TENTH, known},
    value,
};

/// What the checks of a peer look at besides its table.
#[derive(Clone, Copy)]
pub(super) struct Around<'a> {
    /// Our services.
    pub(super) services: &'a [Service],
    /// Whether a peer can dial us.
    pub(super) listens: bool,
    /// Whether there is a `[tun]`.
    pub(super) tunnel: bool,
    /// Which file the tables stand in.
    pub(super) origin: PeerOrigin,
}

impl Checks {
    /// Checks tables of one file, each with its place there, and appends the peers to `peers`.
    pub(super) fn peers(
        &mut self,
        file: impl IntoIterator<Item = (usize, Spanned<file::Peer>)>,
        around: Around<'_>,
        peers: &mut Vec<Peer>,
    ) {
        for (index, table) in file {
            let at = |key: &str| format!("peer[{index}].{key}");
            let (header, table) = (table.span(), table.into_inner());
            let name = self.unique_name(&at("name"), table.name, &header, |name| {
                let taker = peers.iter().find(|peer| *peer.name == *name)?;
                Some(match taker.origin {
                    origin if origin == around.origin => "an earlier one",
                    PeerOrigin::Config => "a [[peer]] of the configuration",
                    PeerOrigin::State => "a peer of the state file",
                })
            });
            if *name == *OPEN_LABEL || name.starts_with(OPEN_PREFIX) {
                let problem = format!("{name:?} is kept for peers of open mode");
                self.report.add(&at("name"), Some(header.clone()), problem, "choose another name");
            }
            let public_keys = self.public_keys(&at("public_key"), table.public_key, &header, around.origin);
            let dials = table.endpoints.is_some();
            let endpoints = self.endpoints(&at("endpoints"), table.endpoints, &name, around.origin);
            let allowed_ips =
                self.allowed_ips(&at("allowed_ips"), table.allowed_ips, &name, around.origin, around.tunnel);
            if !around.listens && !dials {
                let remedy = "add endpoints, or transport.listen so that it can dial us";
                let problem = "missing, and nobody can dial us either: this peer can never be connected";
                self.report.add(&at("endpoints"), Some(header.clone()), problem, remedy);
            }
            let profiles = [("throughput", Profile::Throughput), ("latency", Profile::Latency)];
            let congestion = self.congestion(&at("congestion"), table.congestion);
            let rate = self.rate(&at("rate"), table.rate, congestion, &header);
            let policies = [("oldest", DropPolicy::Oldest), ("newest", DropPolicy::Newest)];
            peers.push(Peer {
                name,
                origin: around.origin,
                public_keys,
                endpoints,
                lanes: self.number(&at("lanes"), table.lanes, 0..=64, defaults::LANES),
                profile: self.choice(&at("profile"), table.profile, &profiles).unwrap_or(defaults::PROFILE),
                keepalive: self.keepalive(&at("keepalive"), table.keepalive),
                queue: self.queue(&at("queue"), table.queue.unwrap_or_default()),
                drop: self.choice(&at("drop"), table.drop, &policies).unwrap_or(defaults::DROP),
                quota: self.quota(&at("quota"), table.quota),
                services: self.granted(&at("services"), table.services, around.services),
                allowed_ips,
                dscp: self.dscp(&at("dscp"), table.dscp),
                congestion,
                rate,
            });
        }
    }

    fn public_keys(
        &mut self,
        at: &str,
        field: Option<Field<OneOrMany>>,
        header: &Range<usize>,
        origin: PeerOrigin,
    ) -> Vec<PublicKey> {
        const REMEDY: &str = "write what culvert pubkey prints at that peer";
        let Some(field) = self.require(at, field, header, REMEDY) else { return Vec::new() };
        let texts = match field.value {
            OneOrMany::One(value) => vec![(at.to_owned(), At { value, span: field.span })],
            OneOrMany::Many(list) if list.is_empty() => {
                self.report.add(at, Some(field.span), "is an empty list", REMEDY);
                return Vec::new();
            }
            OneOrMany::Many(list) => self.elements(at, list),
        };
        let mut keys = Vec::with_capacity(texts.len());
        for (at, text) in texts {
            let Some(key) = self.parse::<PublicKey>(&at, &text, REMEDY) else { continue };
            if let Some(first) = self.keys.iter().find(|pinned| pinned.key == key) {
                let problem = if first.origin == origin {
                    format!("is the same key as {}", first.at)
                } else {
                    format!("is the same key as {} of {}", first.at, first.origin.words())
                };
                self.report.add(&at, Some(text.span), problem, "each peer has a key of its own: remove one");
                continue;
            }
            self.keys.push(PinnedKey { key, origin, at, span: text.span });
            keys.push(key);
        }
        keys
    }

    fn endpoints(
        &mut self,
        at: &str,
        field: Option<Field<Vec<Field<String>>>>,
        name: &Arc<str>,
        origin: PeerOrigin,
    ) -> Vec<Endpoint> {
        const REMEDY: &str = "write host:port, as in \"exit.example.net:4433\"";
        if let Some(Field { span, value: Ok(list) }) = &field
            && list.is_empty()
        {
            let remedy = "write host:port, or leave the key out: then the peer dials us";
            self.report.add(at, Some(span.clone()), "is an empty list", remedy);
        }
        let mut endpoints = Vec::new();
        for (at, text) in self.list(at, field) {
            if let Some(endpoint) = self.parse(&at, &text, REMEDY) {
                self.dials(&endpoint, name, origin, at, text.span);
                endpoints.push(endpoint);
            }
        }
        endpoints
    }

    fn keepalive(&mut self, at: &str, field: Option<Field<String>>) -> Option<Duration> {
        let Some(text) = self.take(at, field) else { return defaults::KEEPALIVE };
        let keepalive = self.read(at, &text, value::duration)?;
        // A connection that is silent for 30 s is closed, so a longer keepalive would not keep it alive.
        let useful = TENTH..=Duration::from_secs(25);
        if !keepalive.is_zero() && !useful.contains(&keepalive) {
            let problem = format!("{:?} is out of range", text.value);
            self.report.add(at, Some(text.span), problem, "write \"100ms\" to \"25s\", or \"0s\" for none");
        }
        (!keepalive.is_zero()).then_some(keepalive)
    }

    fn congestion(&mut self, at: &str, field: Option<Field<String>>) -> CongestionControl {
        let choices = CongestionControl::ALL.map(|choice| (choice.label(), choice));
        self.choice(at, field, &choices).unwrap_or(defaults::CONGESTION)
    }

    /// Bits a second.
    fn rate(
        &mut self,
        at: &str,
        field: Option<Field<String>>,
        congestion: CongestionControl,
        header: &Range<usize>,
    ) -> Option<u64> {
        const LEAST: u64 = 64_000;
        const MOST: u64 = 100_000_000_000;
        let is_required = match congestion {
            CongestionControl::Rate => true,
            CongestionControl::Bbr | CongestionControl::Cubic => false,
        };
        let Some(text) = self.take(at, field) else {
            if is_required {
                let problem = "missing, and congestion = \"rate\" sends at it";
                let remedy = "add what the path to the peer carries, as in rate = \"190Mbit\"";
                self.report.add(at, Some(header.clone()), problem, remedy);
            }
            return None;
        };
        let rate = self.read(at, &text, value::bit_rate)?;
        if !(LEAST..=MOST).contains(&rate) {
            let problem = format!("{:?} is out of range", text.value);
            self.report.add(at, Some(text.span), problem, "write \"64kbit\" to \"100Gbit\"");
            return Some(rate);
        }
        self.report.note(
            at,
            Some(text.span),
            "limits the TCP forwards to this peer, not yet its UDP flows and IP packets",
            "leave room for those, if the path carries both",
        );
        Some(rate)
    }

    fn queue(&mut self, at: &str, file: file::Queue) -> Queue {
        let default = defaults::QUEUE;
        let at = |key: &str| format!("{at}.{key}");
        Queue {
            packets: self.number(&at("packets"), file.packets, 1..=1 << 20, default.packets),
            // The largest UDP payload must fit.
            bytes: self.size(&at("bytes"), file.bytes, 64 << 10..=1 << 30, default.bytes),
            time: self.duration(
                &at("time"),
                file.time,
                Duration::from_millis(1)..=Duration::from_secs(10),
                default.time,
            ),
        }
    }

    fn quota(&mut self, at: &str, field: Option<Field<f64>>) -> f64 {
        let Some(quota) = self.take(at, field) else { return defaults::QUOTA };
        if !(quota.value > 0.0 && quota.value <= 1.0) {
            let problem = format!("{} is not a share", quota.value);
            self.report.add(at, Some(quota.span), problem, "write a number above 0 and at most 1");
        }
        quota.value
    }

    /// The indices of the services that a peer may use.
    pub(super) fn granted(
        &mut self,
        at: &str,
        field: Option<Field<Vec<Field<String>>>>,
        services: &[Service],
    ) -> Vec<usize> {
        let mut granted = Vec::new();
        for (at, name) in self.list(at, field) {
            match services.iter().position(|service| *service.name == *name.value) {
                Some(index) if granted.contains(&index) => {
                    self.report.add(&at, Some(name.span), "is named twice", "remove one");
                }
                Some(index) => granted.push(index),
                None => {
                    let problem = format!("no [[service]] is named {:?}", name.value);
                    let remedy = known("add that [[service]]", services.iter().map(|service| &service.name));
                    self.report.add(&at, Some(name.span), problem, remedy);
                }
            }
        }
        granted
    }
}
