//! What the kernel keeps for this host itself.

use std::{
    io,
    net::{IpAddr, Ipv4Addr, Ipv6Addr},
};

use ipnet::IpNet;
use netlink_packet_route::{RouteNetlinkMessage, route::RouteMessage};

use super::{Entry, Netlink, TABLE_LOCAL, family, lacks_family};

/// How often a table is listed that changes meanwhile.
const MOST_TRIES: usize = 5;

impl Netlink {
    /// The prefixes whose packets the kernel keeps for this host: its addresses, and those of broadcast and anycast.
    ///
    /// # Errors
    /// As [`Netlink::addresses`]; `Interrupted` if addresses come and go all the time.
    pub fn local_prefixes(&mut self) -> io::Result<Vec<IpNet>> {
        self.whole(Self::list_local_prefixes)
    }

    /// Lists by `list` until nothing has changed meanwhile, which may have left out some.
    fn whole<T>(&mut self, mut list: impl FnMut(&mut Self) -> io::Result<T>) -> io::Result<T> {
        for _ in 0..MOST_TRIES {
            self.interrupted = false;
            let listed = list(self)?;
            if !self.interrupted {
                return Ok(listed);
            }
        }
        Err(io::ErrorKind::Interrupted.into())
    }

    fn list_local_prefixes(&mut self) -> io::Result<Vec<IpNet>> {
        let mut prefixes = Vec::new();
        for family_of in [IpAddr::V4(Ipv4Addr::UNSPECIFIED), IpAddr::V6(Ipv6Addr::UNSPECIFIED)] {
            let mut message = RouteMessage::default();
            message.header.address_family = family(family_of);
            // The kernel lists this table alone: others may have a million routes.
            message.header.table = TABLE_LOCAL;
            let listed = self.dump(RouteNetlinkMessage::GetRoute(message), &mut |message| {
                if let RouteNetlinkMessage::NewRoute(message) = message
                    && let Some(route) = Entry::read(&message)
                    && route.table == TABLE_LOCAL.into()
                {
                    prefixes.push(route.prefix);
                }
            });
            match listed {
                // A kernel without IPv6 has no such table of it.
                Err(error)
                    if family_of.is_ipv6()
                        && (lacks_family(&error) || error.kind() == io::ErrorKind::NotFound) => {}
                listed => listed?,
            }
        }
        Ok(prefixes)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_local_table_alone_is_listed() {
        let mut netlink = Netlink::open().unwrap();
        let mut local = netlink.local_prefixes().unwrap();
        let mut all = Vec::new();
        for family_of in ["0.0.0.0", "::"] {
            let mut each =
                |route: Entry| all.extend((route.table == TABLE_LOCAL.into()).then_some(route.prefix));
            netlink.routes(family_of.parse().unwrap(), None, &mut each).unwrap();
        }
        local.sort_unstable();
        all.sort_unstable();
        assert_eq!(local, all);
        assert!(local.iter().any(|prefix| prefix.contains(&IpAddr::V4(Ipv4Addr::LOCALHOST))));
    }

    #[test]
    fn a_table_that_changes_while_it_is_listed_is_listed_again_and_not_for_ever() {
        let mut netlink = Netlink::open().unwrap();
        let mut listed = |changes: usize| {
            let mut count = 0;
            let outcome = netlink.whole(|netlink| {
                count += 1;
                netlink.interrupted = count <= changes;
                netlink.list_local_prefixes()
            });
            (count, outcome.map(|prefixes| prefixes.is_empty()).map_err(|error| error.kind()))
        };
        assert_eq!(listed(0), (1, Ok(false)));
        assert_eq!(listed(MOST_TRIES - 1), (MOST_TRIES, Ok(false)));
        assert_eq!(listed(usize::MAX), (MOST_TRIES, Err(io::ErrorKind::Interrupted)));
    }
}
