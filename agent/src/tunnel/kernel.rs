//! How a plan becomes the kernel's: routes, rules and the device's MTU, one change at a time.
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
//! `n` counts the agents of one host that have such routes, for which there must be a `transport.mark`. All of it is of protocol
//! 199, and only that is ever removed. Whatever the main table has, but for its default routes, goes before the table of our own.

use std::{collections::BTreeMap, io};

use ipnet::IpNet;

use super::{
    TunnelError,
    plan::{FAMILIES, Plan, Wish},
};
use crate::io::netlink::{LinkChange, Netlink, Route, Rule, RuleKind, TABLE_MAIN};

/// The table of the first agent of a host that needs one; the numbers around it are nobody's by default.
const FIRST_TABLE: u32 = 51_900;

/// The priority of its first rule; the kernel's own for the main table is 32,766.
const FIRST_PRIORITY: u32 = 31_900;

/// Agents of one host that have a table of their own, at most.
const MOST_TABLES: u32 = 16;

/// A metric that goes before the kernel's own route for an on-link prefix of IPv6, which has 256.
const BEFORE_ON_LINK: u32 = 128;

/// A place for routes apart from the main table.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Apart {
    /// Which of the tables it is.
    number: u32,
    mark: u32,
}

impl Apart {
    fn table(self) -> u32 {
        FIRST_TABLE + self.number
    }

    /// Of the rule that keeps the main table's routes, then of the one that leads into ours.
    fn priorities(self) -> [u32; 2] {
        [0, 1].map(|place| FIRST_PRIORITY + 2 * self.number + place)
    }
}

/// What we have changed in the kernel. Dropping it takes the rules back; the routes go with the device.
pub(super) struct Kernel {
    netlink: Netlink,
    index: u32,
    /// Of the underlay's packets, or 0.
    mark: u32,
    /// The table of our own, while there is need of one.
    apart: Option<Apart>,
    mtu: u16,
    /// By prefix, and whether it is in the table of our own: a route that moves is in both for a moment.
    routes: BTreeMap<(IpNet, bool), Wish>,
    rules: Vec<Rule>,
    /// Routes that could not be set, which has been said.
    refused: Vec<IpNet>,
}

impl Kernel {
    /// The kernel of the device `index`, which has this MTU and no routes yet. With a `mark` it also removes the rules that an
    /// agent left that was killed.
    pub(super) fn new(mut netlink: Netlink, index: u32, mtu: u16, mark: u32) -> Result<Self, TunnelError> {
        if mark != 0 {
            find_table(&mut netlink)?;
        }
        let (routes, rules, refused) = (BTreeMap::new(), Vec::new(), Vec::new());
        Ok(Self { netlink, index, mark, apart: None, mtu, routes, rules, refused })
    }

    /// For other questions to the kernel.
    pub(super) fn netlink(&mut self) -> &mut Netlink {
        &mut self.netlink
    }

    /// Sees whether the kernel has removed our routes, as it does when the device goes down, however shortly: then the next plan
    /// sets them again. One route of each family tells of all.
    pub(super) fn find_lost_routes(&mut self) {
        for family_of in FAMILIES {
            let of_family = |(prefix, _): &(IpNet, bool)| prefix.addr().is_ipv4() == family_of.is_ipv4();
            let sample = self.routes.iter().find(|(key, wish)| of_family(key) && !wish.on_link);
            let Some((key, wish)) = sample.map(|(key, wish)| (*key, *wish)) else { continue };
            let Some(route) = self.route(key.0, wish) else { continue };
            // It is refused when it is there.
            if self.netlink.add_route(&route, false).is_ok() {
                self.routes.retain(|other, _| !of_family(other) || *other == key);
                tracing::info!("the routes into the tunnel were gone, and are set again");
            }
        }
    }

    /// Makes it so. What fails is tried again with the next plan.
    ///
    /// # Errors
    /// The first of what failed; everything else was done.
    pub(super) fn apply(&mut self, plan: &Plan) -> Result<(), TunnelError> {
        let mut first = Ok(());
        let mut note = |result: Result<(), TunnelError>| {
            if first.is_ok() {
                first = result;
            }
        };
        // A larger device before routes with less, and a smaller one after them: no packet meets too large an MTU.
        if plan.mtu > self.mtu {
            note(self.set_mtu(plan.mtu));
        }
        note(self.take_table(plan));
        for (prefix, wish) in &plan.routes {
            note(self.set_route(*prefix, *wish));
        }
        // Once there is something to find.
        note(self.set_rules(plan));
        // Once nothing looks for them there, and what moves is in its new place.
        note(self.remove_routes(plan));
        if plan.mtu < self.mtu {
            note(self.set_mtu(plan.mtu));
        }
        self.refused.retain(|prefix| plan.routes.contains_key(prefix));
        first
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

    /// Finds a table of our own if there is need of one; only now, as one that is empty is anybody's.
    fn take_table(&mut self, plan: &Plan) -> Result<(), TunnelError> {
        if !self.rules.is_empty() || self.routes.keys().any(|(_, apart)| *apart) {
            return Ok(());
        }
        self.apart = None;
        if plan.has_apart(None) {
            let number = find_table(&mut self.netlink)?
                .ok_or(TunnelError::Tables { first: FIRST_TABLE, count: MOST_TABLES })?;
            self.apart = Some(Apart { number, mark: self.mark });
        }
        Ok(())
    }

    /// A route as the kernel is told of it; `None` if it needs a table of our own and there is none.
    fn route(&self, prefix: IpNet, wish: Wish) -> Option<Route> {
        let table = if wish.apart { self.apart?.table() } else { TABLE_MAIN };
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
                    // Somebody else has removed it.
                    Err(error) if error.raw_os_error() == Some(libc::ESRCH) => {}
                    Err(error) => return Err(TunnelError::Kernel { what: "a route", error }),
                }
            }
            self.routes.remove(&key);
        }
        Ok(())
    }

    fn set_route(&mut self, prefix: IpNet, wish: Wish) -> Result<(), TunnelError> {
        let Some(route) = self.route(prefix, wish) else { return Ok(()) };
        let key = (prefix, wish.apart);
        let done = match self.routes.get(&key) {
            Some(there) if *there == wish => return Ok(()),
            Some(_) => self.netlink.replace_route(&route),
            None => self.netlink.add_route(&route, wish.on_link),
        };
        let Err(error) = done else {
            let new = self.routes.insert(key, wish).is_none();
            self.refused.retain(|refused| *refused != prefix);
            return if new && wish.apart { self.check_main(prefix) } else { Ok(()) };
        };
        if self.refused.contains(&prefix) {
            return Ok(());
        }
        self.refused.push(prefix);
        if error.kind() != io::ErrorKind::AlreadyExists {
            return Err(TunnelError::Route { prefix, error });
        }
        let interface = match self.netlink.holder(prefix, route.table, self.index) {
            Ok(Some(index)) => self.netlink.name(index),
            Ok(None) | Err(_) => "somebody else".to_owned(),
        };
        Err(TunnelError::RouteTaken { prefix, interface })
    }

    /// A route of our own table that somebody has in the main table, too, is there in vain: that one goes first, unless it is a
    /// default route.
    fn check_main(&mut self, prefix: IpNet) -> Result<(), TunnelError> {
        if prefix.prefix_len() == 0 {
            return Ok(());
        }
        match self.netlink.holder(prefix, TABLE_MAIN, self.index) {
            Ok(Some(index)) => Err(TunnelError::RouteTaken { prefix, interface: self.netlink.name(index) }),
            Ok(None) | Err(_) => Ok(()),
        }
    }

    fn set_rules(&mut self, plan: &Plan) -> Result<(), TunnelError> {
        let Some(apart) = self.apart else { return Ok(()) };
        let [before, into] = apart.priorities();
        let (mark, table) = (apart.mark, apart.table());
        let mut wanted = Vec::new();
        for family_of in FAMILIES.into_iter().filter(|family| plan.has_apart(Some(*family))) {
            wanted.push(Rule { family_of, priority: before, what: RuleKind::MainButDefault });
            let what = RuleKind::Unmarked { mark, table };
            wanted.push(Rule { family_of, priority: into, what });
        }
        let failed = |error| TunnelError::Kernel { what: "a routing rule", error };
        for rule in &wanted {
            if !self.rules.contains(rule) {
                self.netlink.add_rule(rule).map_err(failed)?;
                self.rules.push(*rule);
            }
        }
        // The last one first: what leads into our table, then what goes before it.
        while let Some(place) = self.rules.iter().rposition(|rule| !wanted.contains(rule)) {
            let rule = self.rules[place];
            self.netlink.remove_rules(rule.family_of, rule.priority).map_err(failed)?;
            self.rules.remove(place);
        }
        Ok(())
    }
}

impl Drop for Kernel {
    fn drop(&mut self) {
        for rule in &self.rules {
            if let Err(error) = self.netlink.remove_rules(rule.family_of, rule.priority) {
                tracing::warn!(%error, "a routing rule is left (remedy: `ip rule del priority {}`)", rule.priority);
            }
        }
    }
}

/// The number of the first of our tables that is empty: its agent, if it ever had one, is gone, and its rules are removed.
/// `None` when all are in use.
fn find_table(netlink: &mut Netlink) -> Result<Option<u32>, TunnelError> {
    let failed = |error| TunnelError::Kernel { what: "a routing table", error };
    for number in 0..MOST_TABLES {
        let apart = Apart { number, mark: 0 };
        let mut empty = true;
        for family_of in FAMILIES {
            empty &= netlink.is_empty(apart.table(), family_of).map_err(failed)?;
        }
        if !empty {
            continue;
        }
        for (family_of, priority) in
            FAMILIES.into_iter().flat_map(|family| apart.priorities().map(|priority| (family, priority)))
        {
            let stale = netlink.remove_rules(family_of, priority).map_err(failed)?;
            if stale > 0 {
                tracing::info!(priority, "removed a routing rule that a killed agent had left");
            }
        }
        return Ok(Some(number));
    }
    Ok(None)
}
