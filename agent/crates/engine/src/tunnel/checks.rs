//! The errors of the tunnel, and the checks before the device is made.

use std::{fs::File, io, sync::Arc};

use config;
use ipnet::IpNet;
use net::{
    netlink::{Address, Netlink, TABLE_MAIN, Which, lacks_ipv6},
    tun::DRIVER,
};

/// The reason why the tunnel cannot be set up.
#[derive(Debug, thiserror::Error)]
pub enum TunnelError {
    /// The process has no permission to change network interfaces.
    #[error(
        "cannot make the TUN device {name}: not permitted (remedy: CAP_NET_ADMIN; `AmbientCapabilities=CAP_NET_ADMIN` in the \
         unit, `setcap cap_net_admin+ep` on the program, or `--cap-add NET_ADMIN` for a container)"
    )]
    Permission { name: Arc<str> },
    /// The kernel's TUN driver cannot be opened.
    #[error(
        "cannot open /dev/net/tun: {error} (remedy: `modprobe tun`, or `--device /dev/net/tun` for a container; where only \
         root may open it, `chmod 666 /dev/net/tun`)"
    )]
    Driver { error: io::Error },
    /// There is an interface of this name.
    #[error(
        "there is an interface {name} already (remedy: another tun.name; or stop what made it, `ip -details link show {name}` \
         shows more, or `ip link delete {name}`)"
    )]
    NameTaken { name: Arc<str> },
    /// Another interface has one of our addresses.
    #[error("tun.address {address}: {interface} has this address already (remedy: another inner address)")]
    AddressTaken { address: IpNet, interface: String },
    /// Another interface has some of the addresses of our link.
    #[error(
        "tun.address {address}: {interface} leads to {other}, which overlaps it (remedy: inner addresses that nothing outside \
         uses, or a longer prefix, as in \"{}/{}\" with the peers' in allowed_ips)", .address.addr(), .address.max_prefix_len()
    )]
    Overlap { address: IpNet, other: IpNet, interface: String },
    /// An IPv6 address cannot be set.
    #[error(
        "tun.address {address}: IPv6 is disabled (remedy: `sysctl net.ipv6.conf.default.disable_ipv6=0`, and no ipv6.disable=1 \
         among the kernel's parameters; or no IPv6 addresses in tun.address)"
    )]
    Ipv6Disabled { address: IpNet },
    /// Another program has set a route for exactly this prefix.
    #[error(
        "no route to {prefix} through the tunnel: {interface} has one already (remedy: remove that one, another prefix in the \
         peer's allowed_ips, or tun.routes = false)"
    )]
    RouteTaken { prefix: IpNet, interface: String },
    /// The kernel does not accept a route through the tunnel.
    #[error(
        "no route to {prefix} through the tunnel: {error} (remedy: tun.routes = false, and routes by hand)"
    )]
    Route { prefix: IpNet, error: io::Error },
    /// The host has no IPv6, and so no routes of it.
    #[error(
        "no route to {prefix} through the tunnel, nor to any other IPv6 prefix: IPv6 is disabled on this host; IPv4 goes on (remedy: \
         `sysctl net.ipv6.conf.default.disable_ipv6=0` and the same of net.ipv6.conf.all, and no ipv6.disable=1 among the kernel's \
         parameters; or no IPv6 prefixes in allowed_ips)"
    )]
    NoIpv6 { prefix: IpNet },
    /// There are too many agents with a mark.
    #[error(
        "routing tables {first} and the {count} after it are all in use (remedy: stop some agents that have a transport.mark)"
    )]
    Tables { first: u32, count: u32 },
    /// The kernel refuses another of the tunnel's settings.
    #[error("cannot set {what} of the tunnel: {error}")]
    Kernel { what: &'static str, error: io::Error },
}

impl TunnelError {
    /// Why the device `name` could not be made.
    pub(super) fn of_device(name: &Arc<str>, error: io::Error) -> Self {
        // The same error may come from the driver's file and from the device: the file is opened again.
        if let Err(error) = File::options().read(true).write(true).open(DRIVER) {
            return Self::Driver { error };
        }
        match error.raw_os_error() {
            Some(libc::EPERM | libc::EACCES) => Self::Permission { name: Arc::clone(name) },
            Some(libc::EBUSY | libc::EEXIST) => Self::NameTaken { name: Arc::clone(name) },
            _ => Self::Kernel { what: "the device", error },
        }
    }

    /// Why an address of the device `name` could not be set.
    pub(super) fn of_address(name: &Arc<str>, address: IpNet, error: io::Error) -> Self {
        if address.addr().is_ipv6() && lacks_ipv6(&error) {
            return Self::Ipv6Disabled { address };
        }
        Self::of_setting(name, "an address", error)
    }

    /// The prefix that has no route, if that is all that is wrong.
    pub(super) fn prefix(&self) -> Option<IpNet> {
        let (Self::RouteTaken { prefix, .. } | Self::Route { prefix, .. }) = self else { return None };
        Some(*prefix)
    }

    /// Why something of the device `name` could not be set.
    pub(super) fn of_setting(name: &Arc<str>, what: &'static str, error: io::Error) -> Self {
        match error.raw_os_error() {
            Some(libc::EPERM) => Self::Permission { name: Arc::clone(name) },
            _ => Self::Kernel { what, error },
        }
    }
}

/// Checks that name and addresses are free. A device that was opened under a taken name would be another agent's, and we would
/// take packets away from it.
pub fn before(netlink: &mut Netlink, tun: &config::Tun) -> Result<(), TunnelError> {
    let failed = |error| TunnelError::of_setting(&tun.name, "the addresses", error);
    if netlink.link(Which::Name(&tun.name)).map_err(failed)?.is_some() {
        return Err(TunnelError::NameTaken { name: Arc::clone(&tun.name) });
    }
    let there = netlink.addresses().map_err(failed)?;
    match collision(&tun.addresses, &there) {
        None => Ok(()),
        Some((address, other)) if address.addr() == other.address.addr() => {
            Err(TunnelError::AddressTaken { address, interface: netlink.name(other.index) })
        }
        Some((address, other)) => {
            let interface = netlink.name(other.index);
            Err(TunnelError::Overlap { address, other: other.address.trunc(), interface })
        }
    }
}

/// Checks that the main table, which goes first, has no routes of other interfaces for `prefixes`, which belong to a peer that is
/// to be added while the device `tun` runs. If the kernel cannot be asked, they count as free.
///
/// # Errors
/// [`TunnelError::RouteTaken`].
pub fn routes_are_free(tun: &config::Tun, prefixes: &[IpNet]) -> Result<(), TunnelError> {
    if !tun.sets_routes() || prefixes.is_empty() {
        return Ok(());
    }
    let asked = Netlink::open().and_then(|mut netlink| {
        let there = netlink.addresses()?;
        let is_ours = |address: &&Address| tun.addresses.contains(&address.address);
        let own = there.iter().find(is_ours).map_or(0, |address| address.index);
        // The main table's default routes give way to ours, which have a table of their own.
        for prefix in prefixes.iter().map(IpNet::trunc).filter(|prefix| prefix.prefix_len() > 0) {
            let mut holder = None;
            netlink.routes(prefix.addr(), None, &mut |route| {
                if route.unicast && route.table == TABLE_MAIN && route.index != own && route.prefix == prefix
                {
                    holder = Some(route.index);
                }
            })?;
            if let Some(holder) = holder {
                return Ok(Some((prefix, netlink.name(holder))));
            }
        }
        Ok(None)
    });
    match asked {
        Ok(Some((prefix, interface))) => Err(TunnelError::RouteTaken { prefix, interface }),
        Ok(None) => Ok(()),
        Err(error) => {
            tracing::debug!(%error, "cannot ask for the routes of other interfaces");
            Ok(())
        }
    }
}

/// The first of our addresses that is taken, or whose link has addresses in common with another interface's.
fn collision(ours: &[IpNet], there: &[Address]) -> Option<(IpNet, Address)> {
    let pairs = || ours.iter().flat_map(|own| there.iter().map(move |other| (*own, *other)));
    let taken = |(own, other): &(IpNet, Address)| own.addr() == other.address.addr();
    let overlaps = |(own, other): &(IpNet, Address)| {
        let (own, other) = (own.trunc(), other.address.trunc());
        // A single address claims no link, so it may lie in one.
        let single = |net: IpNet| net.prefix_len() == net.max_prefix_len();
        !single(own) && !single(other) && (own.contains(&other) || other.contains(&own))
    };
    pairs().find(taken).or_else(|| pairs().find(overlaps))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_link_that_somebody_else_has_is_found() {
        let net = |text: &str| text.parse::<IpNet>().unwrap();
        let there: Vec<Address> =
            ["127.0.0.1/8", "192.168.1.5/24", "10.0.0.1/8", "fe80::1/64", "172.16.0.1/32"]
                .into_iter()
                .zip(1..)
                .map(|(address, index)| Address { index, address: net(address) })
                .collect();
        let found =
            |text: &str| collision(&[net("192.0.2.1/24"), net(text)], &there).map(|(_, other)| other.index);
        assert_eq!(found("192.168.1.5/32"), Some(2), "the address itself");
        assert_eq!(found("192.168.0.1/16"), Some(2), "a wider link");
        assert_eq!(found("10.9.0.1/24"), Some(3), "a part of a link");
        assert_eq!(found("10.9.0.1/32"), None, "an address without a link");
        assert_eq!(found("172.16.0.2/24"), None, "an address without a link, the other's");
        assert_eq!(found("192.168.2.1/24"), None);
        assert_eq!(found("fd09::1/64"), None);
    }
}
