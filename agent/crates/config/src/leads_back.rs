//! Addresses that the name of a service must not lead to: who writes the records of a name is not who wrote the configuration.

use std::net::{IpAddr, Ipv4Addr, SocketAddr};

use net::ports;

use crate::{Config, Forward};

/// The ports at which an agent listens.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct OwnListeners {
    udp: Vec<SocketAddr>,
    tcp: Vec<SocketAddr>,
}

impl OwnListeners {
    /// Those of an agent with this configuration.
    #[must_use]
    pub fn new(config: &Config) -> Self {
        let open = |forwards: &[Forward]| -> Vec<SocketAddr> {
            forwards.iter().filter(|forward| forward.open).map(|forward| forward.listen).collect()
        };
        let [mut udp, mut tcp] = [open(&config.udp), open(&config.tcp)];
        udp.extend(&config.transport.listen);
        tcp.extend(config.admin.listen);
        tcp.extend(&config.http.listen);
        Self { udp, tcp }
    }

    /// The listener at which datagrams to `address` arrive.
    #[must_use]
    pub fn udp_at(&self, address: SocketAddr) -> Option<SocketAddr> {
        self.udp.iter().copied().find(|own| gets(*own, address))
    }

    /// The listener at which connections to `address` arrive.
    #[must_use]
    pub fn tcp_at(&self, address: SocketAddr) -> Option<SocketAddr> {
        self.tcp.iter().copied().find(|own| gets(*own, address))
    }
}

/// Why the name `host` is not followed to `ip`, whatever the protocol and the port; `None` if it may be.
#[must_use]
pub fn not_followed(host: &str, ip: IpAddr) -> Option<String> {
    let ip = ip.to_canonical();
    let means_loopback = host == "localhost" || host.ends_with(".localhost");
    if ip.is_unspecified() || ip.is_multicast() || ip == IpAddr::V4(Ipv4Addr::BROADCAST) {
        Some(format!("{ip} is the address of no host"))
    } else if ip.is_loopback() && !means_loopback {
        Some(format!("{ip} is this host itself"))
    } else {
        None
    }
}

/// Whether what is sent to `address` arrives at the listener `own` of this host.
fn gets(own: SocketAddr, address: SocketAddr) -> bool {
    let wildcard = own.ip().is_unspecified() && own.is_ipv4() == address.is_ipv4();
    own.port() == address.port()
        && (own.ip() == address.ip() || wildcard && (address.ip().is_loopback() || ports::is_own(address)))
}
