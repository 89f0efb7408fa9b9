//! Routing tables of our own: which agent of a host has which, and the rules that killed agents have left.

use std::{
    collections::BTreeSet,
    io,
    net::IpAddr,
    os::{
        linux::net::SocketAddrExt as _,
        unix::net::{SocketAddr, UnixDatagram},
    },
};

use net::netlink::{Netlink, Rule, RuleKind};

use crate::tunnel::{TunnelError, plan::FAMILIES};

/// The table of the first agent of a host that needs one; the numbers around it are not used by default.
const FIRST_TABLE: u32 = 51_900;

/// The priority of its first rule; the kernel's own for the main table is 32,766.
const FIRST_PRIORITY: u32 = 31_900;

/// The largest number of agents of one host that have a table of their own.
const MOST_TABLES: u32 = 16;

/// A routing table apart from the main table. It is ours until this is dropped, or the process ends.
pub(super) struct Apart {
    /// The number of the table among ours.
    number: u32,
    /// An abstract socket whose name stands for the table in this network namespace; the kernel releases it, however the process
    /// ends.
    _claim: UnixDatagram,
}

impl Apart {
    /// Takes the first of our tables that is free; rules that a killed agent has left for it are removed.
    ///
    /// # Errors
    /// [`TunnelError::Tables`] when all are in use; the kernel's.
    pub(super) fn take(netlink: &mut Netlink) -> Result<Self, TunnelError> {
        let used = used(netlink)?;
        for number in 0..MOST_TABLES {
            if let Some(apart) = Self::claim(number, &used)? {
                clear(netlink, number)?;
                return Ok(apart);
            }
        }
        Err(TunnelError::Tables { first: FIRST_TABLE, count: MOST_TABLES })
    }

    /// Claims a table; `None` if it is in use, by an agent or by another program.
    fn claim(number: u32, used: &BTreeSet<u32>) -> Result<Option<Self>, TunnelError> {
        if used.contains(&(FIRST_TABLE + number)) {
            return Ok(None);
        }
        let name = format!("culvert-table-{}", FIRST_TABLE + number);
        let bound = SocketAddr::from_abstract_name(name).and_then(|name| UnixDatagram::bind_addr(&name));
        match bound {
            Ok(claim) => Ok(Some(Self { number, _claim: claim })),
            Err(error) if error.kind() == io::ErrorKind::AddrInUse => Ok(None),
            Err(error) => Err(TunnelError::Kernel { what: "a claim to a routing table", error }),
        }
    }

    pub(super) fn table(&self) -> u32 {
        FIRST_TABLE + self.number
    }

    /// The rules that lead packets without `mark` to the table: the first keeps the main table's routes.
    pub(super) fn rules(&self, family_of: IpAddr, mark: u32) -> [Rule; 2] {
        let [before, into] = priorities(self.number);
        let unmarked = RuleKind::Unmarked { mark, table: self.table() };
        [
            Rule { family_of, priority: before, what: RuleKind::MainButDefault },
            Rule { family_of, priority: into, what: unmarked },
        ]
    }
}

/// Removes the rules of all killed agents, and returns a mark other than `mark` that another agent has.
pub(super) fn clear_up(netlink: &mut Netlink, mark: u32) -> Result<Option<u32>, TunnelError> {
    let used = used(netlink)?;
    let there = rules(netlink)?;
    for number in 0..MOST_TABLES {
        if there.iter().any(|rule| belongs(rule, number))
            && let Some(_claimed) = Apart::claim(number, &used)?
        {
            clear(netlink, number)?;
        }
    }
    let other = |rule: Rule| match rule.what {
        RuleKind::Unmarked { mark: other, .. } if other != mark => Some(other),
        RuleKind::Unmarked { .. } | RuleKind::MainButDefault => None,
    };
    Ok(rules(netlink)?.into_iter().find_map(other))
}

/// Removes the rules of a table that we have claimed: the agent that left them is gone.
fn clear(netlink: &mut Netlink, number: u32) -> Result<(), TunnelError> {
    for rule in rules(netlink)?.iter().filter(|rule| belongs(rule, number)) {
        netlink.remove_rule(rule).map_err(failed)?;
        tracing::info!(priority = rule.priority, "removed a routing rule that a killed agent had left");
    }
    Ok(())
}

/// Whether this rule leads into the table of this number, with any mark, or stands before one that does.
fn belongs(rule: &Rule, number: u32) -> bool {
    let [before, into] = priorities(number);
    match rule.what {
        RuleKind::MainButDefault => rule.priority == before,
        RuleKind::Unmarked { table, .. } => rule.priority == into && table == FIRST_TABLE + number,
    }
}

fn priorities(number: u32) -> [u32; 2] {
    [0, 1].map(|place| FIRST_PRIORITY + 2 * number + place)
}

/// Reads the routing rules of both address families from the kernel.
fn rules(netlink: &mut Netlink) -> Result<Vec<Rule>, TunnelError> {
    let mut rules = Vec::new();
    for family_of in FAMILIES {
        rules.extend(netlink.rules(family_of).map_err(failed)?);
    }
    Ok(rules)
}

/// The tables of ours that have routes, whoever set them.
fn used(netlink: &mut Netlink) -> Result<BTreeSet<u32>, TunnelError> {
    let mut used = BTreeSet::new();
    for family_of in FAMILIES {
        netlink
            .routes(family_of, None, &mut |route| {
                if (FIRST_TABLE..FIRST_TABLE + MOST_TABLES).contains(&route.table) {
                    used.insert(route.table);
                }
            })
            .map_err(failed)?;
    }
    Ok(used)
}

fn failed(error: io::Error) -> TunnelError {
    TunnelError::Kernel { what: "a routing table", error }
}
