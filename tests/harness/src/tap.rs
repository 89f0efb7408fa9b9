//! What arrives at a place from its cable, seen before any socket and any firewall.

use std::{
    io::{ErrorKind, Read},
    net::{IpAddr, Ipv4Addr, Ipv6Addr},
};

use socket2::{Domain, Protocol, Socket, Type};

use crate::place::Place;

/// `AF_PACKET`: packets below the Internet protocols.
const AF_PACKET: i32 = 17;

/// Numbers of Ethernet for the two Internet protocols. A socket for one of them sees what arrives; what leaves is shown
/// only to sockets for all.
const ETHERTYPES: [u16; 2] = [0x0800, 0x86dd];

/// An ear on every interface of a place.
#[derive(Debug)]
pub struct Tap {
    sockets: [Socket; 2],
}

/// An IP packet, as the cable carried it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Packet {
    /// Who sent it.
    pub source: IpAddr,
    /// Whom to.
    pub destination: IpAddr,
    /// What it carries.
    pub what: What,
}

/// What an IP packet carries.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum What {
    /// A UDP datagram, or several that the sender's kernel has not cut.
    Udp {
        /// The sender's port.
        from: u16,
        /// The receiver's port.
        to: u16,
        /// The datagram.
        payload: Vec<u8>,
    },
    /// A message of ICMP or ICMPv6.
    Icmp {
        /// Its type.
        kind: u8,
        /// Its code.
        code: u8,
    },
    /// A packet of another protocol, or a fragment that is not the first.
    Other {
        /// The number of the protocol.
        protocol: u8,
    },
}

impl Tap {
    /// Listens at `place` from now on.
    ///
    /// # Panics
    /// When the test is not root.
    #[must_use]
    #[track_caller]
    pub fn new(place: &Place) -> Self {
        let open = |ethertype: u16| {
            // The kernel wants the number in network order.
            let protocol = Protocol::from(i32::from(ethertype.to_be()));
            let socket = Socket::new(Domain::from(AF_PACKET), Type::DGRAM, Some(protocol));
            let socket = socket.expect("the test runs as root");
            socket.set_nonblocking(true).expect("a socket");
            // A test that looks late must not miss anything; more than allowed is cut by the kernel.
            socket.set_recv_buffer_size(4 << 20).expect("a size");
            socket
        };
        Self { sockets: place.enter(|| ETHERTYPES.map(open)) }
    }

    /// What has come from `sources` since the last call; neighbour discovery is left out.
    ///
    /// # Panics
    /// When the kernel does not say.
    #[must_use]
    #[track_caller]
    pub fn take(&self, sources: &[IpAddr]) -> Vec<Packet> {
        let mut packets = Vec::new();
        let mut buffer = vec![0; 1 << 17];
        for mut socket in &self.sockets {
            loop {
                match socket.read(&mut buffer) {
                    Ok(length) => packets.extend(parse(&buffer[..length])),
                    Err(error) if error.kind() == ErrorKind::WouldBlock => break,
                    Err(error) => panic!("the tap: {error}"),
                }
            }
        }
        packets.retain(|packet| sources.contains(&packet.source) && !packet.is_neighbour_discovery());
        packets
    }
}

impl Packet {
    /// Whether it is a datagram to one of `ports`.
    #[must_use]
    pub fn is_udp_to(&self, ports: &[u16]) -> bool {
        matches!(&self.what, What::Udp { to, .. } if ports.contains(to))
    }

    /// Whether it says that nobody listens at a port.
    #[must_use]
    pub fn is_port_unreachable(&self) -> bool {
        match self.what {
            What::Icmp { kind, code } if self.source.is_ipv4() => (kind, code) == (3, 3),
            What::Icmp { kind, code } => (kind, code) == (1, 4),
            What::Udp { .. } | What::Other { .. } => false,
        }
    }

    /// What hosts on a cable say to each other to find each other: routers, neighbours, multicast listeners.
    fn is_neighbour_discovery(&self) -> bool {
        matches!(self.what, What::Icmp { kind: 130..=137 | 143, .. } if self.source.is_ipv6())
            // Reports of multicast listeners come behind a hop-by-hop header.
            || matches!(self.what, What::Other { protocol: 0 })
    }
}

/// None for what is no IP packet.
fn parse(bytes: &[u8]) -> Option<Packet> {
    let (source, destination, protocol, rest): (IpAddr, IpAddr, u8, &[u8]) = match bytes.first()? >> 4 {
        4 => {
            let header = bytes.first_chunk::<20>()?;
            let address = |at: usize| Ipv4Addr::from([0, 1, 2, 3].map(|byte| header[at + byte]));
            let later_fragment = u16::from_be_bytes([header[6], header[7]]) & 0x1fff != 0;
            let rest = bytes.get(usize::from(header[0] & 15) * 4..)?;
            let rest = if later_fragment { &[] } else { rest };
            (address(12).into(), address(16).into(), header[9], rest)
        }
        6 => {
            let header = bytes.first_chunk::<40>()?;
            let address = |at: usize| {
                Ipv6Addr::from(*header[at..].first_chunk::<16>().expect("40 bytes have two addresses"))
            };
            (address(8).into(), address(24).into(), header[6], &bytes[40..])
        }
        _ => return None,
    };
    let what = match (protocol, rest) {
        (17, &[from, from_low, to, to_low, _, _, _, _, ref payload @ ..]) => What::Udp {
            from: u16::from_be_bytes([from, from_low]),
            to: u16::from_be_bytes([to, to_low]),
            payload: payload.to_vec(),
        },
        (1 | 58, &[kind, code, ..]) => What::Icmp { kind, code },
        (protocol, _) => What::Other { protocol },
    };
    Some(Packet { source, destination, what })
}
