//! The network of the sites: namespaces, links between them, addresses and routes.

use std::{
    fmt::Write,
    net::{IpAddr, Ipv4Addr, Ipv6Addr},
    process::{self, Command},
    sync::atomic::{AtomicU32, Ordering},
    time::Duration,
};

use tempfile::NamedTempFile;

use crate::{
    place::Place,
    process::{run, text},
    sites::Family,
};

/// An address behind a gateway.
pub(crate) fn behind(site: u8, host: u8, family: Family) -> IpAddr {
    match family {
        Family::V4 => Ipv4Addr::new(10, 9, site, host).into(),
        Family::V6 => Ipv6Addr::new(0xfd09, 0, 0, site.into(), 0, 0, 0, host.into()).into(),
    }
}

/// The address of a gateway on its link to a router.
pub(crate) fn address_of_gateway(site: u8, family: Family) -> IpAddr {
    outer(site, 2, family)
}

/// Of the link between a router (1) and a gateway (2).
fn outer(site: u8, end: u8, family: Family) -> IpAddr {
    match (family, site) {
        (Family::V4, 1) => Ipv4Addr::new(192, 0, 2, end).into(),
        (Family::V4, _) => Ipv4Addr::new(198, 51, 100, 16 * site + end).into(),
        (Family::V6, _) => Ipv6Addr::new(0x2001, 0xdb8, 0, site.into(), 0, 0, 0, end.into()).into(),
    }
}

/// The network namespaces; dropping them removes them, with all that is in them.
#[derive(Debug)]
pub(crate) struct Namespaces {
    prefix: String,
    sites: &'static [&'static str],
}

impl Namespaces {
    #[track_caller]
    pub(crate) fn new(sites: &'static [&'static str]) -> Self {
        static NEXT: AtomicU32 = AtomicU32::new(0);
        let number = NEXT.fetch_add(1, Ordering::Relaxed);
        // The guard is there before the first namespace is, so that a failure on the way leaves none behind.
        let namespaces = Self { prefix: format!("culvert-{}-sites{number}", process::id()), sites };
        let added: String =
            namespaces.roles().map(|role| format!("netns add {}\n", namespaces.name(&role))).collect();
        batch(None, &added);
        for role in namespaces.roles() {
            let place = namespaces.place(&role);
            let forwarding = if role.starts_with("host") { "0" } else { "1" };
            place.sysctl("net.ipv6.conf.all.forwarding", forwarding);
            place.sysctl("net.ipv4.ip_forward", forwarding);
            // Nothing is forwarded to a neighbour while the router still probes for its own link-local address.
            place.sysctl("net.ipv6.conf.all.accept_dad", "0");
            place.sysctl("net.ipv6.conf.default.accept_dad", "0");
        }
        namespaces
    }

    fn roles(&self) -> impl Iterator<Item = String> {
        let routers = ["west", "east"].map(str::to_owned);
        let sites =
            self.sites.iter().flat_map(|name| ["gateway", "host"].map(|role| format!("{role}-{name}")));
        routers.into_iter().chain(sites)
    }

    fn name(&self, role: &str) -> String {
        format!("{}-{role}", self.prefix)
    }

    pub(crate) fn place(&self, role: &str) -> Place {
        Place::Namespace(self.name(role))
    }

    /// Takes away the link between the routers.
    #[track_caller]
    pub(crate) fn cut_middle(&self) {
        batch(Some(&self.name("west")), "link del middle\n");
    }

    /// Gives both interfaces `middle` their addresses, and the routers their routes through them.
    #[track_caller]
    pub(crate) fn join_middle(&self) {
        for (router, own) in ROUTERS {
            let (other, far) = if own == 1 {
                (2, ["198.51.100.0/24", "2001:db8::/32"])
            } else {
                (1, ["192.0.2.0/24", "2001:db8:0:1::/64"])
            };
            let mut commands = up("middle");
            for (end, length) in [("203.0.113.", 24), ("2001:db8:0:ff::", 64)] {
                commands += &format!("addr add {end}{own}/{length} dev middle{}\n", nodad(end));
            }
            for (far, via) in far.into_iter().zip(["203.0.113.", "2001:db8:0:ff::"]) {
                commands += &format!("route add {far} via {via}{other}\n");
            }
            batch(Some(&self.name(router)), &commands);
        }
    }

    /// Lays the links and gives all their addresses and routes.
    #[track_caller]
    pub(crate) fn join(&self) {
        let mut links = String::new();
        let mut link = |one: &str, interface: &str, other: &str, its: &str| {
            let [one, other] = [one, other].map(|role| self.name(role));
            writeln!(links, "link add name {interface} netns {one} type veth peer name {its} netns {other}")
                .expect("a String takes all");
        };
        link("west", "middle", "east", "middle");
        for (name, number) in self.sites.iter().zip(1..) {
            link(router_of(number), name, &format!("gateway-{name}"), "wan");
            link(&format!("gateway-{name}"), "lan", &format!("host-{name}"), "lan");
        }
        batch(None, &links);
        self.join_middle();
        for (router, _) in ROUTERS {
            let mut commands = up("lo");
            for (name, number) in
                self.sites.iter().zip(1..).filter(|(_, number)| router_of(*number) == router)
            {
                commands += &up(name);
                commands += &addresses(name, |family| outer(number, 1, family), [28, 64]);
            }
            batch(Some(&self.name(router)), &commands);
        }
        for (name, number) in self.sites.iter().zip(1..) {
            let gateway = up("lo")
                + &up("wan")
                + &up("lan")
                + &addresses("wan", |family| outer(number, 2, family), [28, 64])
                + &addresses("lan", |family| behind(number, 1, family), [24, 64])
                + &default(|family| outer(number, 1, family));
            batch(Some(&self.name(&format!("gateway-{name}"))), &gateway);
            let host = up("lo")
                + &up("lan")
                + &addresses("lan", |family| behind(number, 2, family), [24, 64])
                + &default(|family| behind(number, 1, family));
            batch(Some(&self.name(&format!("host-{name}"))), &host);
        }
    }
}

impl Drop for Namespaces {
    fn drop(&mut self) {
        for role in self.roles() {
            // Fails if `new` did not get as far as to make it.
            drop(Command::new("ip").args(["netns", "del", &self.name(&role)]).output());
        }
    }
}

/// The routers, and the last part of their addresses on the link between them.
const ROUTERS: [(&str, u8); 2] = [("west", 1), ("east", 2)];

/// Two hosts, `left` and `right`, with a `router` between them; dropping them removes them.
#[derive(Debug)]
pub(crate) struct Row {
    prefix: String,
}

impl Row {
    const ROLES: [&str; 3] = ["left", "router", "right"];

    /// The hosts have these addresses, IPv4 and IPv6, and the router the next ones, on its interfaces `west` and `east`.
    #[track_caller]
    pub(crate) fn new(hosts: [[&str; 2]; 2]) -> Self {
        static NEXT: AtomicU32 = AtomicU32::new(0);
        let number = NEXT.fetch_add(1, Ordering::Relaxed);
        let row = Self { prefix: format!("culvert-{}-row{number}", process::id()) };
        let added: String =
            Self::ROLES.iter().map(|role| format!("netns add {}\n", row.name(role))).collect();
        batch(None, &added);
        for role in Self::ROLES {
            row.place(role).sysctl("net.ipv6.conf.all.accept_dad", "0");
            row.place(role).sysctl("net.ipv6.conf.default.accept_dad", "0");
        }
        let router = row.name("router");
        let mut links = String::new();
        for (role, interface) in [("left", "west"), ("right", "east")] {
            let host = row.name(role);
            writeln!(links, "link add name {interface} netns {router} type veth peer name lan netns {host}")
                .expect("a String takes all");
        }
        batch(None, &links);
        let mut routers = up("lo");
        for ((role, interface), ours) in [("left", "west"), ("right", "east")].into_iter().zip(hosts) {
            let ours = ours.map(|address| address.parse::<IpAddr>().expect("an address"));
            let theirs = ours.map(beside);
            let pick = |of: [IpAddr; 2]| move |family| if family == Family::V4 { of[0] } else { of[1] };
            routers += &(up(interface) + &addresses(interface, pick(theirs), [24, 64]));
            let host =
                up("lo") + &up("lan") + &addresses("lan", pick(ours), [24, 64]) + &default(pick(theirs));
            batch(Some(&row.name(role)), &host);
        }
        batch(Some(&router), &routers);
        row
    }

    fn name(&self, role: &str) -> String {
        format!("{}-{role}", self.prefix)
    }

    pub(crate) fn place(&self, role: &str) -> Place {
        Place::Namespace(self.name(role))
    }
}

impl Drop for Row {
    fn drop(&mut self) {
        for role in Self::ROLES {
            // Fails if `new` did not get as far as to make it.
            drop(Command::new("ip").args(["netns", "del", &self.name(role)]).output());
        }
    }
}

/// The next address.
fn beside(address: IpAddr) -> IpAddr {
    match address {
        IpAddr::V4(address) => Ipv4Addr::from_bits(address.to_bits() + 1).into(),
        IpAddr::V6(address) => Ipv6Addr::from_bits(address.to_bits() + 1).into(),
    }
}

fn router_of(site: u8) -> &'static str {
    if site == 1 { "west" } else { "east" }
}

fn up(interface: &str) -> String {
    format!("link set dev {interface} up\n")
}

/// Without duplicate address detection, during which the address cannot be bound.
fn nodad(address: &str) -> &'static str {
    if address.contains(':') { " nodad" } else { "" }
}

fn addresses(interface: &str, address: impl Fn(Family) -> IpAddr, lengths: [u8; 2]) -> String {
    let one = |(family, length)| {
        let address = address(family).to_string();
        format!("addr add {address}/{length} dev {interface}{}\n", nodad(&address))
    };
    Family::BOTH.into_iter().zip(lengths).map(one).collect()
}

fn default(via: impl Fn(Family) -> IpAddr) -> String {
    let one = |(family, all)| format!("route add {all} via {}\n", via(family));
    Family::BOTH.into_iter().zip(["0.0.0.0/0", "::/0"]).map(one).collect()
}

/// Runs commands of `ip`, one a line, in a namespace.
#[track_caller]
fn batch(namespace: Option<&str>, commands: &str) {
    let file = NamedTempFile::new().expect("the folder for temporary files is writable");
    std::fs::write(file.path(), commands).expect("our own file");
    let mut command = Command::new("ip");
    command.args(namespace.into_iter().flat_map(|name| ["-n", name])).arg("-batch").arg(file.path());
    let output = run(&mut command, Duration::from_secs(30));
    assert!(output.status.success(), "{}{commands}", text(&output.stderr));
}

/// Has an interface send and receive packets as a cable carries them.
#[track_caller]
pub(crate) fn cut(place: &Place, interface: &str) {
    let off = ["tx", "rx", "tso", "gso", "gro", "tx-udp-segmentation"].map(|feature| [feature, "off"]);
    let words = [&["ethtool", "-K", interface], off.as_flattened()].concat();
    place.tell(&words);
}
