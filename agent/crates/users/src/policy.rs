//! Which addresses users may reach, pure: the services with `upstream = "any"` say what may be reached through this host at all, and
//! `user.networks` what of it a user may.
//!
//! ```text
//!   the user's networks ∋ address, port ─ no ─► network
//!   some service with upstream = "any", of this protocol:
//!     deny ∋ address ───────────────────────► address
//!     in a special range R: allow has A ∋ address, A ⊆ R; an address of this host: A is that address alone
//!     else: allow is left out, or has A ∋ address
//! ```

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

use config::{Network, Protocol, Service};
use ipnet::{IpNet, Ipv4Net, Ipv6Net};

use crate::{account::Refusal, ip::ranges::Ranges};

/// What is opened.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Transport {
    /// A TCP connection.
    Tcp,
    /// A UDP socket.
    Udp,
}

/// What may be reached through this host at all.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Policy(Vec<Any>);

/// A service with `upstream = "any"`.
#[derive(Debug, Clone, PartialEq, Eq)]
struct Any {
    allow: Vec<IpNet>,
    deny: Vec<IpNet>,
    protocol: Protocol,
}

const fn v4(a: u8, b: u8, c: u8, length: u8) -> IpNet {
    IpNet::V4(Ipv4Net::new_assert(Ipv4Addr::new(a, b, c, 0), length))
}

const fn v6(a: u16, b: u16, c: u16, f: u16, length: u8) -> IpNet {
    IpNet::V6(Ipv6Net::new_assert(Ipv6Addr::new(a, b, c, 0, 0, f, 0, 0), length))
}

/// Ranges whose addresses are nobody's on the Internet, or another address in disguise. The wider ones come first.
const SPECIAL: [IpNet; 19] = [
    // This network, private, shared (RFC 6598), loopback, link-local, multicast, reserved and broadcast.
    v4(0, 0, 0, 8),
    v4(10, 0, 0, 8),
    v4(100, 64, 0, 10),
    v4(127, 0, 0, 8),
    v4(169, 254, 0, 16),
    v4(172, 16, 0, 12),
    v4(192, 168, 0, 16),
    v4(224, 0, 0, 4),
    v4(240, 0, 0, 4),
    // Unspecified, loopback and IPv4-compatible; IPv4-mapped; NAT64 of both kinds; 6to4 and Teredo, which hold IPv4 addresses.
    v6(0, 0, 0, 0, 96),
    v6(0, 0, 0, 0xffff, 96),
    v6(0x64, 0xff9b, 0, 0, 96),
    v6(0x64, 0xff9b, 1, 0, 48),
    v6(0x2002, 0, 0, 0, 16),
    v6(0x2001, 0, 0, 0, 32),
    // Unique local, link-local, formerly site-local, multicast.
    v6(0xfc00, 0, 0, 0, 7),
    v6(0xfe80, 0, 0, 0, 10),
    v6(0xfec0, 0, 0, 0, 10),
    v6(0xff00, 0, 0, 0, 8),
];

impl Policy {
    /// The one of these services.
    #[must_use]
    pub fn new(services: &[Service]) -> Self {
        let any = services.iter().filter(|service| service.is_any());
        let any = any.map(|service| Any {
            allow: service.allow.clone(),
            deny: service.deny.clone(),
            protocol: service.protocol,
        });
        Self(any.collect())
    }

    /// Whether a user with these `networks` may reach an address; `is_own` says that it is one of this host.
    ///
    /// # Errors
    ///
    /// What forbids it.
    pub fn may_reach(
        &self,
        networks: &[Network],
        transport: Transport,
        address: IpAddr,
        port: u16,
        is_own: bool,
    ) -> Result<(), Refusal> {
        if port == 0 || !networks.iter().any(|network| network.contains(address, port)) {
            return Err(Refusal::Network);
        }
        let serves = |any: &&Any| match any.protocol {
            Protocol::Both => true,
            Protocol::Udp => transport == Transport::Udp,
            Protocol::Tcp => transport == Transport::Tcp,
        };
        let allowed = self.0.iter().filter(serves).any(|any| any.allows(address, is_own));
        if allowed { Ok(()) } else { Err(Refusal::Address) }
    }
}

impl Policy {
    /// Where IP packets of a user with these `networks` may go, whatever their protocol; `own` are the addresses of this host.
    #[must_use]
    pub fn packets_reach(&self, networks: &[Network], own: &[IpNet]) -> Ranges {
        let own = Ranges::of(own);
        // A packet of ICMP is neither of UDP nor of TCP.
        let both = self.0.iter().filter(|any| any.protocol == Protocol::Both);
        let mut reach = Ranges::union(both.map(|any| any.packets_reach(&own)));
        let whole = networks.iter().filter(|network| network.port.is_none());
        reach.keep(&Ranges::of(whole.map(|network| &network.net)));
        reach
    }
}

impl Any {
    /// [`Any::allows`] for all addresses at once.
    fn packets_reach(&self, own: &Ranges) -> Ranges {
        let mut reach = Ranges::default();
        if self.allow.is_empty() {
            let everywhere = [v4(0, 0, 0, 0), v6(0, 0, 0, 0, 0)];
            reach = Ranges::of(&everywhere);
            reach.remove(&Ranges::of(&SPECIAL));
            reach.remove(own);
        }
        let parts = self.allow.iter().map(|net| {
            let mut part = Ranges::of([net]);
            part.remove(&Ranges::of(SPECIAL.iter().filter(|range| !range.contains(net))));
            if net.prefix_len() < net.max_prefix_len() {
                part.remove(own);
            }
            part
        });
        reach = Ranges::union(parts.chain([reach]));
        reach.remove(&Ranges::of(&self.deny));
        reach
    }

    fn allows(&self, address: IpAddr, is_own: bool) -> bool {
        if self.deny.iter().any(|net| net.contains(&address)) {
            return false;
        }
        let special = || SPECIAL.iter().filter(|range| range.contains(&address));
        let names = |net: &IpNet| {
            let is_whole = net.prefix_len() == net.max_prefix_len();
            net.contains(&address) && (!is_own || is_whole) && special().all(|range| range.contains(net))
        };
        let is_public = !is_own && special().next().is_none();
        (self.allow.is_empty() && is_public) || self.allow.iter().any(names)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn policy(allow: &[&str], deny: &[&str]) -> Policy {
        let net = |text: &&str| text.parse().unwrap_or_else(|_| IpNet::from(text.parse::<IpAddr>().unwrap()));
        let nets = |texts: &[&str]| texts.iter().map(net).collect();
        Policy(vec![Any { allow: nets(allow), deny: nets(deny), protocol: Protocol::Both }])
    }

    fn everywhere() -> Vec<Network> {
        ["0.0.0.0/0", "::/0"].map(|net| Network { net: net.parse().unwrap(), port: None }).to_vec()
    }

    fn reaches(policy: &Policy, address: &str) -> bool {
        policy.may_reach(&everywhere(), Transport::Tcp, address.parse().unwrap(), 443, false).is_ok()
    }

    #[test]
    fn special_addresses_have_to_be_named() {
        let special = [
            "0.0.0.0",
            "0.1.2.3",
            "10.0.0.1",
            "100.64.0.1",
            "100.127.255.255",
            "127.0.0.1",
            "127.255.0.1",
            "169.254.169.254",
            "172.16.0.1",
            "172.31.255.255",
            "192.168.1.1",
            "224.0.0.1",
            "255.255.255.255",
            "::",
            "::1",
            "::127.0.0.1",
            "::ffff:8.8.8.8",
            "64:ff9b::7f00:1",
            "64:ff9b:1::1",
            "2002:7f00:1::",
            "2001::1",
            "fc00::1",
            "fd09::1",
            "fe80::1",
            "fec0::1",
            "ff02::1",
        ];
        let public = [
            "8.8.8.8",
            "100.63.255.255",
            "100.128.0.0",
            "172.15.0.1",
            "172.32.0.1",
            "192.167.0.1",
            "11.0.0.1",
            "2001:db8::1",
            "2a00::1",
        ];
        for policy in [
            policy(&[], &[]),
            policy(&["0.0.0.0/0", "::/0"], &[]),
            policy(&["0.0.0.0/1", "128.0.0.0/1", "::/1", "8000::/1"], &[]),
        ] {
            for address in special {
                assert!(!reaches(&policy, address), "{address}");
            }
            for address in public {
                assert!(reaches(&policy, address), "{address}");
            }
        }
        for address in special {
            let named = policy(&[address], &[]);
            assert!(reaches(&named, address) && !reaches(&named, "8.8.8.8"), "{address}");
        }
    }

    #[test]
    fn a_prefix_names_what_lies_in_it() {
        let lan = policy(&["10.1.0.0/16", "fd09:1::/32"], &["10.1.9.0/24"]);
        for (address, reached) in [
            ("10.1.2.3", true),
            ("10.2.0.1", false),
            ("10.1.9.1", false),
            ("8.8.8.8", false),
            ("fd09:1::1", true),
            ("fd09:2::1", false),
            // As an IPv4 packet it would get there.
            ("::ffff:10.1.2.3", false),
        ] {
            assert_eq!(reaches(&lan, address), reached, "{address}");
        }
        let wide = policy(&["10.0.0.0/7"], &[]);
        assert!(!reaches(&wide, "10.1.2.3") && reaches(&wide, "11.1.2.3"));
    }

    #[test]
    fn packets_reach_what_connections_reach() {
        let own: Vec<IpNet> = ["192.0.2.1/32", "10.1.0.1/32"].map(|net| net.parse().unwrap()).to_vec();
        let addresses = [
            "0.0.0.0",
            "8.8.8.8",
            "10.0.0.1",
            "10.1.0.0",
            "10.1.0.1",
            "10.1.255.255",
            "10.2.0.0",
            "127.0.0.1",
            "169.254.1.1",
            "192.0.2.1",
            "192.0.2.2",
            "224.0.0.1",
            "255.255.255.255",
            "::",
            "::1",
            "::ffff:8.8.8.8",
            "64:ff9b::1",
            "2001:db8::1",
            "fd09::1",
            "fe80::1",
            "ff02::1",
        ];
        let cases: [(&[&str], &[&str]); 9] = [
            (&[], &[]),
            (&["0.0.0.0/0", "::/0"], &[]),
            (&["0.0.0.0/1", "8000::/1"], &["8.0.0.0/8"]),
            (&["10.1.0.0/16"], &["10.1.128.0/17"]),
            (&["10.1.0.1/32", "192.0.2.0/24"], &[]),
            (&["10.1.0.0/16", "10.1.0.1/32"], &["10.1.0.1/32"]),
            (&["127.0.0.1/32", "::1/128"], &[]),
            (&["fd00::/8", "fe80::1/128"], &[]),
            (&["224.0.0.0/4", "255.255.255.255/32", "ff02::/16"], &[]),
        ];
        for (allow, deny) in cases {
            let policy = policy(allow, deny);
            let reach = policy.packets_reach(&everywhere(), &own);
            for address in addresses {
                let address: IpAddr = address.parse().unwrap();
                let is_own = own.iter().any(|net| net.contains(&address));
                let may = policy.may_reach(&everywhere(), Transport::Udp, address, 1, is_own).is_ok();
                assert_eq!(reach.contains(address), may, "{allow:?} without {deny:?}: {address}");
            }
        }
        // Networks with a port, and services of one protocol, are not for packets.
        let mut lan = policy(&["10.1.0.0/16"], &[]);
        let network = |port| Network { net: "10.1.2.0/24".parse().unwrap(), port };
        assert!(lan.packets_reach(&[network(Some(443))], &own).is_empty());
        assert_eq!(lan.packets_reach(&[network(None)], &own), Ranges::of(&["10.1.2.0/24".parse().unwrap()]));
        lan.0[0].protocol = Protocol::Udp;
        assert!(lan.packets_reach(&[network(None)], &own).is_empty());
    }

    #[test]
    fn addresses_of_this_host_are_named_one_by_one() {
        let own = |policy: &Policy, address: &str| {
            policy.may_reach(&everywhere(), Transport::Udp, address.parse().unwrap(), 53, true).is_ok()
        };
        assert!(
            !own(&policy(&[], &[]), "192.0.2.1")
                && !own(&policy(&["192.0.2.0/24", "10.1.0.0/16"], &[]), "192.0.2.1")
        );
        assert!(
            !own(&policy(&["10.1.0.0/16"], &[]), "10.1.0.1")
                && own(&policy(&["10.1.0.1/32"], &[]), "10.1.0.1")
        );
        assert!(!own(&policy(&["10.1.0.1/32"], &["10.1.0.0/16"]), "10.1.0.1"));
    }

    #[test]
    fn networks_ports_and_protocols_narrow_it() {
        let networks = [
            Network { net: "8.8.0.0/16".parse().unwrap(), port: Some(443) },
            Network { net: "9.9.9.9/32".parse().unwrap(), port: None },
        ];
        let mut policy = policy(&[], &[]);
        let asked = |policy: &Policy, address: &str, port, transport| {
            policy.may_reach(&networks, transport, address.parse().unwrap(), port, false)
        };
        assert_eq!(asked(&policy, "8.8.8.8", 443, Transport::Tcp), Ok(()));
        assert_eq!(asked(&policy, "8.8.8.8", 80, Transport::Tcp), Err(Refusal::Network));
        assert_eq!(asked(&policy, "9.9.9.9", 1, Transport::Udp), Ok(()));
        assert_eq!(asked(&policy, "9.9.9.9", 0, Transport::Udp), Err(Refusal::Network));
        assert_eq!(asked(&policy, "1.1.1.1", 443, Transport::Tcp), Err(Refusal::Network));
        policy.0[0].protocol = Protocol::Tcp;
        assert_eq!(asked(&policy, "9.9.9.9", 1, Transport::Udp), Err(Refusal::Address));
        assert_eq!(asked(&policy, "9.9.9.9", 1, Transport::Tcp), Ok(()));
        assert_eq!(asked(&Policy::default(), "9.9.9.9", 1, Transport::Tcp), Err(Refusal::Address));
    }
}
