//! The table that the kernel's routes make (`tun.routing = "kernel"`): made on the tunnel's thread, shared by all workers.

use std::{
    collections::{BTreeMap, BTreeSet},
    net::IpAddr,
    sync::Arc,
};

use base::ids::PeerId;
use ip::{routes::Routes, view::IpView};
use ipnet::IpNet;

use crate::forward::{
    multicast::{GROUPS, is_group},
    peer_routes::{Holder, Target},
};

/// Which peers each prefix leads to, and which may send from each address.
#[derive(Debug, Default)]
pub struct LearnedRoutes {
    pub(super) routes: Arc<Routes<Target>>,
    /// The peers of routes with several next hops, each with the number of its prefixes.
    pub(super) groups: Vec<(Vec<Holder>, u32)>,
    sources: Routes<u32>,
    /// Sets of peers that may send from the same addresses, each in order.
    senders: Vec<Vec<PeerId>>,
    /// With `tun.multicast`: the peers' own addresses, from which alone multicast may come.
    hosts: Option<BTreeMap<IpAddr, PeerId>>,
    /// The next hop of each prefix that leads to nobody, if its route has one.
    unknown: BTreeMap<IpNet, IpAddr>,
}

impl LearnedRoutes {
    /// The table of these prefixes. Of `ways`, a prefix without a peer is one whose next hop nobody has; of equal prefixes the last
    /// one counts. What lies in a prefix of `senders` may come from its peers, and from those of every wider prefix. `hosts`, with
    /// `tun.multicast`: the peers' own addresses. Link-local groups then lead to nobody, whatever wider prefix holds them.
    #[must_use]
    pub fn new(
        ways: impl IntoIterator<Item = (IpNet, Vec<Holder>)>,
        senders: &BTreeMap<IpNet, BTreeSet<PeerId>>,
        hosts: Option<BTreeMap<IpAddr, PeerId>>,
    ) -> Self {
        let mut groups: Vec<(Vec<Holder>, u32)> = Vec::new();
        let mut known = BTreeMap::<Vec<Holder>, usize>::new();
        let mut ways: BTreeMap<IpNet, Vec<Holder>> = ways.into_iter().collect();
        if hosts.is_some() {
            ways.extend(GROUPS.map(|group| (group, Vec::new())));
        }
        let target = |(prefix, holders): (IpNet, Vec<Holder>)| {
            let target = match merged(holders) {
                holders if holders.is_empty() => Target::NOBODY,
                holders if holders.len() == 1 => holders[0].peer.into(),
                holders => {
                    let index = *known.entry(holders).or_insert_with_key(|holders| {
                        groups.push((holders.clone(), 0));
                        groups.len() - 1
                    });
                    groups[index].1 += 1;
                    Target::group(index)
                }
            };
            (prefix, target)
        };
        let routes = Arc::new(ways.into_iter().map(target).collect());
        let (sources, senders) = united(senders);
        Self { routes, groups, sources, senders, hosts, unknown: BTreeMap::new() }
    }

    /// The same table, with the next hops of prefixes that lead to nobody.
    #[must_use]
    pub fn with_unknown(self, unknown: BTreeMap<IpNet, IpAddr>) -> Self {
        Self { unknown, ..self }
    }

    /// The next hop of a prefix that leads to nobody; `None` if its route has none.
    pub(super) fn unknown_hop(&self, prefix: IpNet) -> Option<IpAddr> {
        self.unknown.get(&prefix).copied()
    }

    /// Whether a packet may come from `peer`, by its addresses.
    #[inline]
    #[must_use]
    pub fn may_send(&self, view: &IpView, peer: PeerId) -> bool {
        if let Some(hosts) = &self.hosts
            && is_group(view.destination)
        {
            return hosts.get(&view.source) == Some(&peer);
        }
        let set = self.sources.lookup(view.source).and_then(|set| self.senders.get(set as usize));
        set.is_some_and(|senders| senders.binary_search(&peer).is_ok())
    }
}

/// The holders in order, each peer once: next hops of one peer add up.
fn merged(holders: Vec<Holder>) -> Vec<Holder> {
    let mut by_peer = BTreeMap::<PeerId, Holder>::new();
    for holder in holders {
        by_peer
            .entry(holder.peer)
            .and_modify(|known| known.weight = known.weight.saturating_add(holder.weight))
            .or_insert(holder);
    }
    let mut merged: Vec<Holder> = by_peer.into_values().collect();
    merged.sort_unstable();
    merged.truncate(config::MOST_HOLDERS);
    merged
}

/// The set of each prefix, united with those of all prefixes that hold it; equal sets are one.
fn united(senders: &BTreeMap<IpNet, BTreeSet<PeerId>>) -> (Routes<u32>, Vec<Vec<PeerId>>) {
    let (mut sets, mut known) = (Vec::new(), BTreeMap::<Vec<PeerId>, u32>::new());
    // The prefixes that hold the present one: a wider prefix comes before those in it.
    let mut around: Vec<(IpNet, BTreeSet<PeerId>)> = Vec::new();
    let mut entries = Vec::with_capacity(senders.len());
    for (prefix, own) in senders {
        while around.last().is_some_and(|(wider, _)| !wider.contains(prefix)) {
            around.pop();
        }
        let mut all = around.last().map(|(_, wider)| wider.clone()).unwrap_or_default();
        all.extend(own);
        let set = *known.entry(all.iter().copied().collect()).or_insert_with_key(|set| {
            sets.push(set.clone());
            u32::try_from(sets.len() - 1).unwrap_or(u32::MAX)
        });
        entries.push((*prefix, set));
        around.push((*prefix, all));
    }
    (entries.into_iter().collect(), sets)
}
