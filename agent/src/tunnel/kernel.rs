//! How a plan becomes the kernel's: routes, rules and the device's MTU, one change at a time.
//!
//! ```text
//!   transport.mark = 0:   main table: our routes beside everybody else's
//!   else:                 priority  31900 + 2n   lookup main suppress_prefixlength 0      (if a default route is ours)
//!                                   31901 + 2n   not from all fwmark MARK lookup 51900 + n
//!                         table     51900 + n    our routes
//! ```
//!
//! `n` counts the agents of one host that have a mark. All of it is of protocol 199, and only that is ever removed.

use std::{collections::BTreeMap, io};

use ipnet::IpNet;

use super::{
    TunnelError,
    plan::{FAMILIES, Plan, Wish},
};
use crate::io::netlink::{LinkChange, Netlink, Route, Rule, RuleKind, TABLE_MAIN};

/// The table of the first agent of a host with a mark; the numbers around it are nobody's by default.
const FIRST_TABLE: u32 = 51_900;

/// The priority of its first rule; the kernel's own for the main table is 32,766.
const FIRST_PRIORITY: u32 = 31_900;

/// Agents of one host with a mark, at most.
const MOST_TABLES: u32 = 16;

/// A metric that goes before the kernel's own route for an on-link prefix of IPv6, which has 256.
const BEFORE_ON_LINK: u32 = 128;

/// A place for routes of its own, apart from the main table.
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
    apart: Option<Apart>,
    mtu: u16,
    routes: BTreeMap<IpNet, Wish>,
    rules: Vec<Rule>,
    /// Routes that could not be set, which has been said.
    refused: Vec<IpNet>,
}

impl Kernel {
    /// The kernel of the device `index`, which has this MTU and no routes yet. With a `mark` it also finds a table of its own,
    /// and removes the rules that an agent left there that was killed.
    pub(super) fn new(mut netlink: Netlink, index: u32, mtu: u16, mark: u32) -> Result<Self, TunnelError> {
        let apart = match mark {
            0 => None,
            mark => Some(find_table(&mut netlink, mark)?),
        };
        let (routes, rules, refused) = (BTreeMap::new(), Vec::new(), Vec::new());
        Ok(Self { netlink, index, apart, mtu, routes, rules, refused })
    }

    /// For other questions to the kernel.
    pub(super) fn netlink(&mut self) -> &mut Netlink {
        &mut self.netlink
    }

    /// Sees whether the kernel has removed our routes, as it does when the device goes down, however shortly: then the next plan
    /// sets them again. One route of each family tells of all.
    pub(super) fn find_lost_routes(&mut self) {
        for family_of in FAMILIES {
            let of_family = |prefix: &IpNet| prefix.addr().is_ipv4() == family_of.is_ipv4();
            let sample = self.routes.iter().find(|(prefix, wish)| of_family(prefix) && !wish.on_link);
            let Some((prefix, wish)) = sample.map(|(prefix, wish)| (*prefix, *wish)) else { continue };
            // It is refused when it is there.
            if self.netlink.add_route(&self.route(prefix, wish), false).is_ok() {
                self.routes.retain(|other, _| !of_family(other) || *other == prefix);
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
        note(self.remove_routes(plan));
        for (prefix, wish) in &plan.routes {
            note(self.set_route(*prefix, *wish));
        }
        // Once there is something to find.
        note(self.set_rules(plan));
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

    fn route(&self, prefix: IpNet, wish: Wish) -> Route {
        let table = self.apart.map_or(TABLE_MAIN, Apart::table);
        let metric = (wish.on_link && prefix.addr().is_ipv6()).then_some(BEFORE_ON_LINK);
        Route { prefix, table, index: self.index, mtu: wish.mtu, metric }
    }

    fn remove_routes(&mut self, plan: &Plan) -> Result<(), TunnelError> {
        let gone = |(prefix, _): &(&IpNet, &Wish)| !plan.routes.contains_key(prefix);
        let gone: Vec<(IpNet, Wish)> = self.routes.iter().filter(gone).map(|(p, w)| (*p, *w)).collect();
        for (prefix, wish) in gone {
            match self.netlink.remove_route(&self.route(prefix, wish)) {
                Ok(()) => {}
                // Somebody else has removed it.
                Err(error) if error.raw_os_error() == Some(libc::ESRCH) => {}
                Err(error) => return Err(TunnelError::Kernel { what: "a route", error }),
            }
            self.routes.remove(&prefix);
        }
        Ok(())
    }

    fn set_route(&mut self, prefix: IpNet, wish: Wish) -> Result<(), TunnelError> {
        let route = self.route(prefix, wish);
        let done = match self.routes.get(&prefix) {
            Some(there) if *there == wish => return Ok(()),
            Some(_) => self.netlink.replace_route(&route),
            None => self.netlink.add_route(&route, wish.on_link),
        };
        let Err(error) = done else {
            self.routes.insert(prefix, wish);
            self.refused.retain(|refused| *refused != prefix);
            return Ok(());
        };
        if self.refused.contains(&prefix) {
            return Ok(());
        }
        self.refused.push(prefix);
        if error.kind() != io::ErrorKind::AlreadyExists {
            return Err(TunnelError::Route { prefix, error });
        }
        let holder = self.netlink.holder(prefix, route.table, self.index);
        let interface = match holder {
            Ok(Some(index)) => self.netlink.name(index),
            Ok(None) | Err(_) => "somebody else".to_owned(),
        };
        Err(TunnelError::RouteTaken { prefix, interface })
    }

    fn set_rules(&mut self, plan: &Plan) -> Result<(), TunnelError> {
        let Some(apart) = self.apart else { return Ok(()) };
        let [before, into] = apart.priorities();
        let (mark, table) = (apart.mark, apart.table());
        let mut wanted = Vec::new();
        for family_of in FAMILIES {
            if plan.has_default(family_of) {
                wanted.push(Rule { family_of, priority: before, what: RuleKind::MainButDefault });
            }
            if plan.has_family(family_of) {
                let what = RuleKind::Unmarked { mark, table };
                wanted.push(Rule { family_of, priority: into, what });
            }
        }
        let failed = |error| TunnelError::Kernel { what: "a routing rule", error };
        for rule in &wanted {
            if !self.rules.contains(rule) {
                self.netlink.add_rule(rule).map_err(failed)?;
                self.rules.push(*rule);
            }
        }
        while let Some(place) = self.rules.iter().position(|rule| !wanted.contains(rule)) {
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

/// The first of our tables that is empty: its agent, if it ever had one, is gone, and its rules are removed.
fn find_table(netlink: &mut Netlink, mark: u32) -> Result<Apart, TunnelError> {
    let failed = |error| TunnelError::Kernel { what: "a routing table", error };
    for number in 0..MOST_TABLES {
        let apart = Apart { number, mark };
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
        return Ok(apart);
    }
    Err(TunnelError::Tables { first: FIRST_TABLE, count: MOST_TABLES })
}
