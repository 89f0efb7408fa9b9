//! Applies a plan to the kernel: routes, rules and the device's MTU, one change at a time.
//!
//! ```text
//!   main table:             our routes beside everybody else's
//!
//!   priority  31900 + 2n    lookup main suppress_prefixlength 0            } only if there are routes
//!             31901 + 2n    not from all fwmark MARK lookup 51900 + n      } in that table,
//!   table     51900 + n     our routes that would take the underlay's      } and for their family
//!   priority  32766         lookup main                                      (the kernel's own)
//! ```
//!
//! `n` counts the agents of one host that have a `transport.mark`, for without it there are no such routes. All of it is of protocol
//! 199, and only that is ever removed. Whatever the main table has, but for its default routes, goes before the table of our own.

use std::{
    collections::{BTreeMap, BTreeSet},
    io,
};

use ipnet::IpNet;
use net::netlink::{Entry, LinkChange, Netlink, PROTOCOL, Route, Rule, TABLE_MAIN, lacks_ipv6};

use crate::tunnel::{
    TunnelError,
    plan::{FAMILIES, Plan, Wish},
    table::{self, Apart},
};

/// A metric that goes before the kernel's own route for an on-link prefix of IPv6, which has 256.
const BEFORE_ON_LINK: u32 = 128;

/// The other interface that has a route, by prefix and table; 0 if the route names none.
type Taken = BTreeMap<(IpNet, u32), u32>;

/// A route through the device for a prefix of ours, as far as it may differ.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Seen {
    protocol: u8,
    mtu: Option<u32>,
    metric: u32,
}

/// How the kernel's routes differ from ours.
#[derive(Debug, Default)]
pub(super) struct Compared {
    /// The number of routes that were removed.
    pub(super) lost: usize,
    /// The number of routes with another MTU or metric.
    pub(super) changed: usize,
    /// The routes that other programs have taken over since the last look, with the protocol that they have now.
    pub(super) foreign: Vec<(IpNet, u8)>,
}

/// The changes that we have made in the kernel. Dropping it takes the rules back; the routes go with the device.
pub(super) struct Kernel {
    pub(super) netlink: Netlink,
    index: u32,
    /// The mark of the underlay's packets, or 0.
    mark: u32,
    /// The table of our own, if there is a mark.
    apart: Option<Apart>,
    mtu: u16,
    /// Our routes, by prefix and whether they are in the table of our own: a route that moves is in both for a moment.
    routes: BTreeMap<(IpNet, bool), Wish>,
    rules: Vec<Rule>,
    /// Routes of ours that other programs have taken over: they are left.
    foreign: BTreeSet<(IpNet, bool)>,
    /// Routes that could not be set, each of which has been logged.
    refused: BTreeSet<IpNet>,
}

impl Kernel {
    /// The kernel of the device `index`, which has this MTU and no routes yet. With a `mark` it also removes the rules that
    /// killed agents have left.
    pub(super) fn new(mut netlink: Netlink, index: u32, mtu: u16, mark: u32) -> Result<Self, TunnelError> {
        let mut apart = None;
        if mark != 0 {
            if let Some(other) = table::clear_up(&mut netlink, mark)? {
                tracing::warn!(
                    mark,
                    other,
                    "another agent of this host has another mark, and takes our packets to the peers into its tunnel (remedy: \
                     the same transport.mark for all agents of one host)"
                );
            }
            apart = match Apart::take(&mut netlink) {
                Ok(apart) => Some(apart),
                // There may never be need of one.
                Err(TunnelError::Tables { .. }) => None,
                Err(error) => return Err(error),
            };
        }
        let (routes, rules) = (BTreeMap::new(), Vec::new());
        let (foreign, refused) = (BTreeSet::new(), BTreeSet::new());
        Ok(Self { netlink, index, mark, apart, mtu, routes, rules, foreign, refused })
    }

    /// Compares our routes with those that the kernel has: removed ones, as all are when the device goes down however shortly, and those
    /// whose MTU or metric was changed, are set again by the next plan. One that another program has taken over, by its
    /// protocol, is left as it is.
    ///
    /// # Errors
    /// The kernel's; the routes count as they were.
    pub(super) fn compare_routes(&mut self) -> io::Result<Compared> {
        let mut found = self.list_routes()?;
        if self.differs(&found) {
            // A list may have gaps if the table changes meanwhile.
            let again = self.list_routes()?;
            for (key, seen) in again {
                found.entry(key).or_default().extend(seen);
            }
        }
        let mut compared = Compared::default();
        let (mut foreign, mut stray) = (BTreeSet::new(), Vec::new());
        let keys: Vec<_> = self.routes.iter().map(|(key, wish)| (*key, *wish)).collect();
        for (key, wish) in keys {
            let Some(route) = self.route(key.0, wish) else { continue };
            let seen = found.get(&key).map_or(&[][..], Vec::as_slice);
            let mut in_place = seen.iter().filter(|seen| seen.metric == route.metric());
            let ours = in_place.clone().find(|seen| seen.protocol == PROTOCOL);
            let other = in_place.find(|seen| seen.protocol != PROTOCOL);
            match (ours, other) {
                (Some(ours), _) if ours.mtu == wish.mtu.map(u32::from) => {}
                (Some(ours), _) => {
                    // Another wish than this one, so that the plan replaces it.
                    let there = ours.mtu.map_or(0, |mtu| u16::try_from(mtu).unwrap_or(u16::MAX));
                    self.routes.insert(key, Wish { mtu: Some(there), ..wish });
                    compared.changed += 1;
                }
                (None, Some(other)) => {
                    foreign.insert(key);
                    if !self.foreign.contains(&key) {
                        compared.foreign.push((key.0, other.protocol));
                    }
                }
                (None, None) => {
                    self.routes.remove(&key);
                    compared.lost += 1;
                }
            }
            let moved = seen.iter().filter(|seen| seen.protocol == PROTOCOL && seen.metric != route.metric());
            stray.extend(moved.map(|seen| Route { metric: Some(seen.metric), ..route }));
        }
        self.foreign = foreign;
        for route in stray {
            // The second list may have it no more.
            compared.changed += usize::from(self.netlink.remove_route(&route).is_ok());
        }
        Ok(compared)
    }

    /// Whether any of our routes is not exactly once among those that were `found`.
    fn differs(&self, found: &BTreeMap<(IpNet, bool), Vec<Seen>>) -> bool {
        self.routes.iter().any(|(key, wish)| {
            let wanted = self.route(key.0, *wish).map(|route| Seen {
                protocol: PROTOCOL,
                mtu: wish.mtu.map(u32::from),
                metric: route.metric(),
            });
            !found.get(key).is_some_and(|seen| wanted.is_none_or(|wanted| seen.contains(&wanted)))
        })
    }

    /// The routes through the device for our prefixes, of the families in which we have some: a routing daemon may have ten thousand
    /// routes on the device, which take 8 ms to list.
    fn list_routes(&mut self) -> io::Result<BTreeMap<(IpNet, bool), Vec<Seen>>> {
        let mut found: BTreeMap<_, Vec<Seen>> = BTreeMap::new();
        let own = self.apart.as_ref().map(Apart::table);
        let Self { netlink, routes, index, .. } = self;
        for family_of in FAMILIES {
            if !routes.keys().any(|(prefix, _)| prefix.addr().is_ipv4() == family_of.is_ipv4()) {
                continue;
            }
            netlink.routes(family_of, Some(*index), &mut |route| {
                let key = (route.prefix, route.table != TABLE_MAIN);
                let table = route.table == TABLE_MAIN || Some(route.table) == own;
                if table && route.unicast && routes.contains_key(&key) {
                    let Entry { protocol, mtu, metric, .. } = route;
                    found.entry(key).or_default().push(Seen { protocol, mtu, metric });
                }
            })?;
        }
        Ok(found)
    }

    /// Sets rules again that were removed: without them all packets take the host's other routes. Returns their number. A rule
    /// that fails is left to the next plan.
    ///
    /// # Errors
    /// The kernel's, if it does not list its rules.
    pub(super) fn restore_rules(&mut self) -> io::Result<usize> {
        let mut restored = 0;
        for family_of in FAMILIES {
            let of = |rule: &&Rule| rule.family_of == family_of;
            if !self.rules.iter().any(|rule| of(&rule)) {
                continue;
            }
            let there = self.netlink.rules(family_of)?;
            for rule in self.rules.iter().filter(of).filter(|rule| !there.contains(rule)) {
                // One that fails is tried again, and taken back at the end.
                restored += usize::from(self.netlink.add_rule(rule).is_ok());
            }
        }
        Ok(restored)
    }

    /// Sets our MTU again if the device has another one, `there` bytes; a failure is left to the next plan.
    pub(super) fn restore_mtu(&mut self, there: u32) -> bool {
        if there == u32::from(self.mtu) {
            return false;
        }
        let change = LinkChange { mtu: Some(self.mtu), ..LinkChange::default() };
        let restored = self.netlink.set_link(self.index, change).is_ok();
        if !restored {
            self.mtu = u16::try_from(there).unwrap_or(u16::MAX);
        }
        restored
    }

    /// Applies a plan. Returns what failed and is tried again with the next plan; a refused route is reported once.
    pub(super) fn apply(&mut self, plan: &Plan) -> Vec<TunnelError> {
        let mut failed = Vec::new();
        failed.extend(self.take_table(plan).err());
        let taken = self.find_taken(plan);
        let mut no_ipv6 = false;
        // Routes with less than the device come before it, and those that have what it has after it: no packet meets too large
        // an MTU, whether the device's grows or shrinks.
        for has_less in [true, false] {
            if !has_less && plan.mtu != self.mtu {
                failed.extend(self.set_mtu(plan.mtu).err());
            }
            let Ok(taken) = &taken else { continue };
            for (prefix, wish) in plan.routes.iter().filter(|(_, wish)| wish.mtu.is_some() == has_less) {
                if no_ipv6 && prefix.addr().is_ipv6() {
                    continue;
                }
                let done = self.set_route(*prefix, *wish, taken);
                // None of the others will be taken, either.
                no_ipv6 |= matches!(done, Err(TunnelError::NoIpv6 { .. }));
                failed.extend(done.err());
            }
        }
        failed.extend(taken.err().map(|error| TunnelError::Kernel { what: "the routes", error }));
        // After the routes that they lead to.
        failed.extend(self.set_rules(plan).err());
        // Once no rule leads to them, and routes that move are in their new table.
        failed.extend(self.remove_routes(plan).err());
        self.refused.retain(|prefix| plan.routes.contains_key(prefix));
        failed
    }

    fn set_mtu(&mut self, mtu: u16) -> Result<(), TunnelError> {
        let change = LinkChange { mtu: Some(mtu), ..LinkChange::default() };
        self.netlink
            .set_link(self.index, change)
            .map_err(|error| TunnelError::Kernel { what: "the device's MTU", error })?;
        tracing::info!(before = self.mtu, mtu, "the TUN device's MTU follows the paths");
        self.mtu = mtu;
        Ok(())
    }

    /// Takes a table of our own if one is needed, and none was free at the start.
    fn take_table(&mut self, plan: &Plan) -> Result<(), TunnelError> {
        if self.apart.is_none() && plan.has_apart(None) {
            self.apart = Some(Apart::take(&mut self.netlink)?);
        }
        Ok(())
    }

    /// A route in the kernel's form; `None` if it needs a table of our own and there is none.
    fn route(&self, prefix: IpNet, wish: Wish) -> Option<Route> {
        let table = if wish.apart { self.apart.as_ref()?.table() } else { TABLE_MAIN };
        let metric = (wish.on_link && prefix.addr().is_ipv6()).then_some(BEFORE_ON_LINK);
        Some(Route { prefix, table, index: self.index, mtu: wish.mtu, metric })
    }

    fn remove_routes(&mut self, plan: &Plan) -> Result<(), TunnelError> {
        let stays = |(prefix, apart): &(IpNet, bool)| {
            plan.routes.get(prefix).is_some_and(|wish| wish.apart == *apart)
        };
        let gone: Vec<_> =
            self.routes.iter().filter(|(key, _)| !stays(key)).map(|(key, wish)| (*key, *wish)).collect();
        for (key, wish) in gone {
            if let Some(route) = self.route(key.0, wish) {
                match self.netlink.remove_route(&route) {
                    Ok(()) => {}
                    // Another program has removed it.
                    Err(error) if error.raw_os_error() == Some(libc::ESRCH) => {}
                    Err(error) => return Err(TunnelError::Kernel { what: "a route", error }),
                }
            }
            self.routes.remove(&key);
        }
        Ok(())
    }

    /// Routes of other interfaces for the prefixes to set for the first time: whatever their metrics, one of both would
    /// be unused. So would a route in our own table if the main table, which goes first, has one, unless it is a default route.
    fn find_taken(&mut self, plan: &Plan) -> io::Result<Taken> {
        let new: BTreeSet<IpNet> = plan
            .routes
            .iter()
            .filter(|(prefix, wish)| !wish.on_link && !self.routes.contains_key(&(**prefix, wish.apart)))
            .map(|(prefix, _)| *prefix)
            .collect();
        let (own, index) = (self.apart.as_ref().map(Apart::table), self.index);
        let mut taken = Taken::new();
        for family_of in FAMILIES {
            if !new.iter().any(|prefix| prefix.addr().is_ipv4() == family_of.is_ipv4()) {
                continue;
            }
            self.netlink.routes(family_of, None, &mut |route| {
                let table = route.table == TABLE_MAIN || Some(route.table) == own;
                if table && route.unicast && route.index != index && new.contains(&route.prefix) {
                    taken.insert((route.prefix, route.table), route.index);
                }
            })?;
        }
        Ok(taken)
    }

    fn set_route(&mut self, prefix: IpNet, wish: Wish, taken: &Taken) -> Result<(), TunnelError> {
        let Some(route) = self.route(prefix, wish) else { return Ok(()) };
        let key = (prefix, wish.apart);
        let there = self.routes.get(&key);
        if there == Some(&wish) || self.foreign.contains(&key) {
            return Ok(());
        }
        let in_main = (prefix.prefix_len() > 0).then(|| taken.get(&(prefix, TABLE_MAIN))).flatten();
        let holder = taken.get(&(prefix, route.table)).or(in_main).copied();
        let done = match (there, holder) {
            (Some(_), _) => self.netlink.replace_route(&route),
            (None, None) => self.netlink.add_route(&route, wish.on_link),
            (None, Some(_)) => Err(io::ErrorKind::AlreadyExists.into()),
        };
        let Err(error) = done else {
            self.routes.insert(key, wish);
            self.refused.remove(&prefix);
            return Ok(());
        };
        if prefix.addr().is_ipv6() && lacks_ipv6(&error) {
            return Err(TunnelError::NoIpv6 { prefix });
        }
        if !self.refused.insert(prefix) {
            return Ok(());
        }
        if error.kind() != io::ErrorKind::AlreadyExists {
            return Err(TunnelError::Route { prefix, error });
        }
        let interface = match holder {
            Some(index) if index > 0 => self.netlink.name(index),
            // Several interfaces, or a route that drops packets.
            Some(_) | None => "somebody else".to_owned(),
        };
        Err(TunnelError::RouteTaken { prefix, interface })
    }

    fn set_rules(&mut self, plan: &Plan) -> Result<(), TunnelError> {
        let Some(apart) = &self.apart else { return Ok(()) };
        let families = FAMILIES.into_iter().filter(|family| plan.has_apart(Some(*family)));
        let wanted: Vec<Rule> = families.flat_map(|family| apart.rules(family, self.mark)).collect();
        let failed = |error| TunnelError::Kernel { what: "a routing rule", error };
        for rule in &wanted {
            if !self.rules.contains(rule) {
                match self.netlink.add_rule(rule) {
                    Ok(()) => {}
                    // The table is ours, so the rule is, too.
                    Err(error) if error.kind() == io::ErrorKind::AlreadyExists => {}
                    // Its routes have been refused, and reported.
                    Err(error) if rule.family_of.is_ipv6() && lacks_ipv6(&error) => continue,
                    Err(error) => return Err(failed(error)),
                }
                self.rules.push(*rule);
            }
        }
        // The last one first: the rule that leads into our table, then the one before it.
        while let Some(index) = self.rules.iter().rposition(|rule| !wanted.contains(rule)) {
            self.netlink.remove_rule(&self.rules[index]).map_err(failed)?;
            self.rules.remove(index);
        }
        Ok(())
    }
}

impl Drop for Kernel {
    fn drop(&mut self) {
        for rule in self.rules.iter().rev() {
            if let Err(error) = self.netlink.remove_rule(rule) {
                tracing::warn!(%error, "a routing rule is left (remedy: `ip rule del priority {}`)", rule.priority);
            }
        }
    }
}
