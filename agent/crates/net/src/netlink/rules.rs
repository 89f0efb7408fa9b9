//! The routing rules that the agent sets.

use std::{io, net::IpAddr};

use netlink_packet_core::{NLM_F_CREATE, NLM_F_EXCL};
use netlink_packet_route::{
    RouteNetlinkMessage,
    route::RouteProtocol,
    rule::{RuleAction, RuleAttribute, RuleFlags, RuleMessage},
};

use crate::netlink::{Netlink, PROTOCOL, TABLE_MAIN, family};

/// A routing rule that the agent sets.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Rule {
    /// Any address of the family that the rule applies to.
    pub family_of: IpAddr,
    /// When it is looked at: the lowest first. It tells our rules from one another.
    pub priority: u32,
    /// The selection that the rule makes.
    pub what: RuleKind,
}

/// The selection that a rule of ours makes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RuleKind {
    /// Packets without `mark` look into `table`.
    Unmarked {
        /// The firewall mark of the underlay's sockets.
        mark: u32,
        /// The routing table of the agent.
        table: u32,
    },
    /// All packets look into the main table, except at its default route.
    MainButDefault,
}

impl Netlink {
    /// Adds a rule of ours.
    ///
    /// # Errors
    /// The kernel's: `PermissionDenied` without CAP_NET_ADMIN, `AlreadyExists`, EOPNOTSUPP on a kernel without policy routing.
    pub fn add_rule(&mut self, rule: &Rule) -> io::Result<()> {
        self.change(RouteNetlinkMessage::NewRule(rule.message()), NLM_F_CREATE | NLM_F_EXCL)
    }

    /// The rules of our kinds and protocol, of the family of `family_of`; those of other agents are among them.
    ///
    /// # Errors
    /// As [`Netlink::addresses`], and EOPNOTSUPP on a kernel without policy routing.
    pub fn rules(&mut self, family_of: IpAddr) -> io::Result<Vec<Rule>> {
        let mut message = RuleMessage::default();
        message.header.family = family(family_of);
        let mut ours = Vec::new();
        self.dump(RouteNetlinkMessage::GetRule(message), &mut |message| {
            if let RouteNetlinkMessage::NewRule(message) = message {
                ours.extend(Rule::read(family_of, &message));
            }
        })?;
        Ok(ours)
    }

    /// Removes exactly this rule, if it is there.
    ///
    /// # Errors
    /// The kernel's, e.g. `PermissionDenied` without CAP_NET_ADMIN; none when the rule is not there.
    pub fn remove_rule(&mut self, rule: &Rule) -> io::Result<()> {
        match self.change(RouteNetlinkMessage::DelRule(rule.message()), 0) {
            // Another program has removed it.
            Err(error) if error.raw_os_error() == Some(libc::ENOENT) => Ok(()),
            other => other,
        }
    }
}

impl Rule {
    fn message(&self) -> RuleMessage {
        let mut message = RuleMessage::default();
        message.header.family = family(self.family_of);
        message.header.action = RuleAction::ToTable;
        let attributes = &mut message.attributes;
        attributes.push(RuleAttribute::Priority(self.priority));
        attributes.push(RuleAttribute::Protocol(RouteProtocol::Other(PROTOCOL)));
        match self.what {
            RuleKind::Unmarked { mark, table } => {
                message.header.flags = RuleFlags::Invert;
                attributes.push(RuleAttribute::FwMark(mark));
                attributes.push(RuleAttribute::Table(table));
            }
            RuleKind::MainButDefault => {
                attributes.push(RuleAttribute::Table(TABLE_MAIN));
                attributes.push(RuleAttribute::SuppressPrefixLen(0));
            }
        }
        message
    }

    fn read(family_of: IpAddr, message: &RuleMessage) -> Option<Self> {
        let (mut table, mut priority) = (u32::from(message.header.table), 0);
        let (mut mark, mut ours, mut no_default) = (None, false, false);
        for attribute in &message.attributes {
            if let RuleAttribute::Priority(number) = attribute {
                priority = *number;
            } else if let RuleAttribute::Table(number) = attribute {
                table = *number;
            } else if let RuleAttribute::FwMark(number) = attribute {
                mark = Some(*number);
            } else if let RuleAttribute::SuppressPrefixLen(length) = attribute {
                no_default = *length == 0;
            } else if let RuleAttribute::Protocol(protocol) = attribute {
                ours = *protocol == RouteProtocol::Other(PROTOCOL);
            }
        }
        let inverted = message.header.flags.contains(RuleFlags::Invert);
        let what = match mark {
            Some(mark) if inverted => RuleKind::Unmarked { mark, table },
            None if table == TABLE_MAIN && no_default => RuleKind::MainButDefault,
            Some(_) | None => return None,
        };
        ours.then_some(Self { family_of, priority, what })
    }
}
