//! What the host knows, so that nobody has to be asked. Whatever it does not say is as if it were not there.

use std::{
    fs,
    net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr},
    path::Path,
};

use config::Config;
use ipnet::{IpNet, Ipv4Net, Ipv6Net};
use net::ports;

use crate::cli::reach::DEFAULT_CONFIG;

/// What is known of the host.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct Facts {
    pub(super) ipv6: bool,
    /// From which addresses it sends to the Internet, IPv4 first.
    pub(super) outer: Vec<IpAddr>,
    /// Its name, as a peer may be called; "entry" if it has none.
    pub(super) name: String,
    /// Which prefixes lead through which devices, without default routes.
    pub(super) routes: Vec<(IpNet, String)>,
    /// Why systemd would not start the agent; `None` if it would.
    pub(super) no_service: Option<&'static str>,
    /// The group of the packaged service's user.
    pub(super) group: Option<u32>,
}

/// The group that packages make, whose members may read the configuration.
const GROUP: &str = "culvert";

impl Facts {
    /// Asks the host; `config` is the file that an agent would be started with.
    pub(super) fn gather(config: &Path) -> Self {
        let read = |path: &str| fs::read_to_string(path).unwrap_or_default();
        // Addresses of documentation: no host has them, so the default route leads there. Nothing is sent.
        let anywhere = [
            SocketAddr::from((Ipv4Addr::new(198, 51, 100, 1), 9)),
            SocketAddr::from((Ipv6Addr::new(0x2001, 0xdb8, 0, 0, 0, 0, 0, 1), 9)),
        ];
        let units = ["/etc", "/usr/lib", "/lib"].map(|root| format!("{root}/systemd/system/culvert.service"));
        let systemd = Path::new("/run/systemd/system").exists();
        let mut routes = ipv4_routes(&read("/proc/net/route"));
        routes.extend(ipv6_routes(&read("/proc/net/ipv6_route")));
        Self {
            ipv6: !read("/proc/net/if_inet6").is_empty(),
            outer: anywhere.into_iter().filter_map(|to| ports::source_towards(to).ok()).collect(),
            name: peer_name(&read("/proc/sys/kernel/hostname")),
            routes,
            no_service: if !systemd {
                Some("systemd does not run this host")
            } else if config.as_os_str() != DEFAULT_CONFIG {
                Some("the service has another configuration, /etc/culvert/agent.toml")
            } else if !units.iter().any(|unit| Path::new(unit).exists()) {
                Some("culvert.service is not installed")
            } else {
                None
            },
            group: group(&read("/etc/group"), GROUP),
        }
    }
}

/// Which prefixes of the tunnel the host reaches some other way already.
pub(super) fn clashes(config: &Config, facts: &Facts) -> Vec<String> {
    let Some(tun) = &config.tun else { return Vec::new() };
    let links = tun.addresses.iter().map(IpNet::trunc);
    let others = config.peers.iter().flat_map(|peer| peer.allowed_ips.iter().map(IpNet::trunc));
    let mut wanted: Vec<IpNet> = links.chain(others).filter(|net| net.prefix_len() > 0).collect();
    wanted.sort();
    wanted.dedup();
    let mut found = Vec::new();
    for net in wanted {
        let meets = |route: &&(IpNet, String)| {
            let overlap = route.0.contains(&net) || net.contains(&route.0);
            overlap && *route.1 != *tun.name
        };
        if let Some((route, device)) = facts.routes.iter().find(meets) {
            found.push(format!(
                "{net} is for the tunnel, and this host reaches {route} through {device}: the longer prefix wins \
                 (remedy: choose addresses that nothing here uses, at both ends)"
            ));
        }
    }
    found
}

/// Reads `/proc/net/route`: device, destination and mask among its columns, addresses as the processor's integers.
fn ipv4_routes(table: &str) -> Vec<(IpNet, String)> {
    let address =
        |hex: &str| u32::from_str_radix(hex, 16).ok().map(|word| Ipv4Addr::from(word.to_ne_bytes()));
    let route = |line: &str| {
        let columns: Vec<&str> = line.split_whitespace().collect();
        let [device, destination, .., mask, _mtu, _window, _irtt] = columns[..] else { return None };
        let net = Ipv4Net::with_netmask(address(destination)?, address(mask)?).ok()?;
        (net.prefix_len() > 0).then(|| (IpNet::V4(net), device.to_owned()))
    };
    table.lines().skip(1).filter_map(route).collect()
}

/// Reads `/proc/net/ipv6_route`: destination and length first, the device last. Link-local and multicast prefixes, which
/// every device has, are left out.
fn ipv6_routes(table: &str) -> Vec<(IpNet, String)> {
    let route = |line: &str| {
        let columns: Vec<&str> = line.split_whitespace().collect();
        let [destination, length, .., device] = columns[..] else { return None };
        let address = Ipv6Addr::from(u128::from_str_radix(destination, 16).ok()?);
        let net = Ipv6Net::new(address, u8::from_str_radix(length, 16).ok()?).ok()?;
        let common = address.is_multicast() || address.is_unicast_link_local() || device == "lo";
        (net.prefix_len() > 0 && !common).then(|| (IpNet::V6(net), device.to_owned()))
    };
    table.lines().filter_map(route).collect()
}

/// The first label of a host's name, if a peer may be called so.
fn peer_name(host: &str) -> String {
    let label = host.trim().split('.').next().unwrap_or_default();
    let fits = |c: char| c.is_ascii_alphanumeric() || matches!(c, '-' | '_');
    let good = (1..=64).contains(&label.len()) && label.chars().all(fits) && label != "localhost";
    // A name that begins with a hyphen would look like an option.
    if good && !label.starts_with('-') { label.to_owned() } else { "entry".to_owned() }
}

/// The number of a group, by the text of `/etc/group`.
fn group(table: &str, name: &str) -> Option<u32> {
    table.lines().find_map(|line| {
        let mut fields = line.split(':');
        (fields.next() == Some(name)).then(|| fields.nth(1)?.parse().ok()).flatten()
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn routes_are_read_as_the_kernel_writes_them() {
        let word = |address: [u8; 4]| format!("{:08X}", u32::from_ne_bytes(address));
        let line = |device: &str, to, mask| {
            format!("{device}\t{}\t00000000\t0001\t0\t0\t0\t{}\t0\t0\t0\n", word(to), word(mask))
        };
        let table = "Iface\tDestination\tGateway\tFlags\tRefCnt\tUse\tMetric\tMask\tMTU\tWindow\tIRTT\n"
            .to_owned()
            + &line("eth0", [0, 0, 0, 0], [0, 0, 0, 0])
            + &line("eth0", [10, 9, 0, 0], [255, 255, 0, 0])
            + "nonsense\n";
        assert_eq!(ipv4_routes(&table), [("10.9.0.0/16".parse().unwrap(), "eth0".to_owned())]);
        let zero = "00000000000000000000000000000000 00";
        let six = |to: &str, device: &str| {
            format!("{to} {zero} {} 00000100 00000001 00000000 00000001 {device}\n", &zero[..32])
        };
        let table = six("fd090000000000000000000000000000 40", "wg0")
            + &six("fe800000000000000000000000000000 40", "eth0")
            + &six("ff000000000000000000000000000000 08", "eth0")
            + &six("00000000000000000000000000000001 80", "lo")
            + &six(zero, "eth0");
        assert_eq!(ipv6_routes(&table), [("fd09::/64".parse().unwrap(), "wg0".to_owned())]);
    }

    #[test]
    fn a_host_is_called_by_its_name_if_a_peer_may_be() {
        assert_eq!(peer_name("branch-2.example.net\n"), "branch-2");
        for odd in ["", "localhost", "b\u{e4}r", "-x", "a b", ".net", &"x".repeat(65)] {
            assert_eq!(peer_name(odd), "entry", "{odd:?}");
        }
    }

    #[test]
    fn a_group_is_found_by_its_whole_name() {
        let table = "root:x:0:\nculverts:x:7:\nculvert:x:998:me\n";
        assert_eq!(group(table, "culvert"), Some(998));
        assert_eq!(group("culverts:x:7:\n", "culvert"), None);
        assert_eq!(group("culvert:x:\n", "culvert"), None);
    }

    #[test]
    fn this_host_answers() {
        let facts = Facts::gather(Path::new("elsewhere.toml"));
        assert!(facts.no_service.is_some() && !facts.name.is_empty(), "{facts:?}");
    }
}
