//! Whether the kernel takes super-packets of packets inside of VXLAN and Geneve tunnels, and cuts them as it should: tried once, before
//! there is a packet to carry.
//!
//! ```text
//!   ours:  packets → joined as for the device → written to a TUN device of its own ┐ 192.0.0.6/31, fe80::1/64
//!   kernel:                            a UDP socket of ours at that device's address ┘
//! ```
//!
//! The kernel cuts a super-packet of UDP for an ordinary socket, and must give the packets that went in. One of TCP it gives as it
//! is. That device has a link of two addresses to itself and goes when it is closed; nothing that is written to it, or that
//! the host sends into it, is ever read or sent on.

use std::{
    io,
    net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, SocketAddrV6, UdpSocket},
    os::fd::AsFd,
    time::Duration,
};

use ip::{
    checksum,
    merge::Merger,
    packets::{Packet, PacketDelivery, TunOffload, TunnelOffload},
    view::{IPV4_HEADER, IPV6_HEADER, IpView, TCP, UDP},
    vnet::VnetHeader,
};
use ipnet::IpNet;
use socket2::{Domain, Protocol, Socket, Type};
use tun_rs::{DeviceBuilder, SyncDevice};

use crate::{
    netlink::{LinkChange, Netlink},
    sys,
    tun::cut_tunnels,
};

/// How long a super-packet may take from the device to a socket of this host; in each version of IP one may be waited for in vain.
const PATIENCE: Duration = Duration::from_millis(20);

/// Single packets that are written before, until one comes, and how long each may take: the kernel takes an IPv6 address into use a
/// moment after it was set.
const GREETINGS: usize = 10;
const GREETING_PATIENCE: Duration = Duration::from_millis(5);
const GREETING: [u8; 1] = [0];

/// A link for the host itself (RFC 7335), of two addresses.
const HERE_IPV4: Ipv4Addr = Ipv4Addr::new(192, 0, 0, 6);
const THERE_IPV4: Ipv4Addr = Ipv4Addr::new(192, 0, 0, 7);
const LINK_IPV4: u8 = 31;
const HERE_IPV6: Ipv6Addr = Ipv6Addr::new(0xfe80, 0, 0, 0, 0, 0, 0, 1);
const THERE_IPV6: Ipv6Addr = Ipv6Addr::new(0xfe80, 0, 0, 0, 0, 0, 0, 2);
const LINK_IPV6: u8 = 64;

/// The port of VXLAN, at which packets are joined, and at the other end of the link.
const VXLAN: u16 = 4789;
const UDP_HEADER: usize = 8;

/// Packets in a super-packet, and bytes of payload of each but the last.
const PACKETS: usize = 3;
const SEGMENT: usize = 600;

/// Tries what of it may be written, on a kernel that hands them over.
#[must_use]
pub fn probe() -> TunnelOffload {
    let mut offload = TunnelOffload { cut: true, ..TunnelOffload::default() };
    match Link::open() {
        Ok(mut link) => {
            offload.join_ipv4 = link.takes_all(false);
            offload.join_ipv6 = link.takes_all(true);
        }
        Err(error) => tracing::debug!(%error, "super-packets of tunnels cannot be tried"),
    }
    offload
}

/// A TUN device of its own.
struct Link {
    device: SyncDevice,
    index: u32,
    scratch: sys::Scratch,
}

/// A kind of super-packet.
#[derive(Clone, Copy, Debug)]
struct Form {
    ipv6: bool,
    inner_ipv6: bool,
    tcp: bool,
    /// With outer checksums.
    summed: bool,
}

impl Link {
    fn open() -> io::Result<Self> {
        // The kernel puts a number in.
        let builder = DeviceBuilder::new().name("culvert-probe%d").offload(true);
        let device = builder.inherit_enable_state().build_sync()?;
        device.set_nonblocking(true)?;
        if !cut_tunnels(device.as_fd()) {
            return Err(io::ErrorKind::Unsupported.into());
        }
        let (index, mut netlink) = (device.if_index()?, Netlink::open()?);
        netlink.set_link(index, LinkChange { up: true, mtu: None, queue_packets: None })?;
        let addresses: [(IpAddr, u8); 2] = [(HERE_IPV6.into(), LINK_IPV6), (HERE_IPV4.into(), LINK_IPV4)];
        for (here, prefix) in addresses {
            let net = IpNet::new(here, prefix).map_err(|_| io::ErrorKind::InvalidInput)?;
            if let Err(error) = netlink.add_address(index, net) {
                // This host is without that version of IP, or without this address, at which nothing will come.
                tracing::debug!(%error, %net, "super-packets of tunnels cannot be tried in this version of IP");
            }
        }
        Ok(Self { device, index, scratch: sys::Scratch::default() })
    }

    /// Whether all kinds over a version of IP come as they should.
    fn takes_all(&mut self, ipv6: bool) -> bool {
        let taken = self.socket(ipv6).and_then(|socket| {
            for bits in 0..8 {
                let [inner_ipv6, tcp, summed] = [0, 1, 2].map(|bit| bits >> bit & 1 != 0);
                let form = Form { ipv6, inner_ipv6, tcp, summed };
                if !self.takes(form, &socket)? {
                    tracing::debug!(?form, "a super-packet of a tunnel came as something else");
                    return Ok(false);
                }
            }
            Ok(true)
        });
        taken.unwrap_or_else(|error| {
            tracing::debug!(%error, ipv6, "super-packets of tunnels do not pass");
            false
        })
    }

    /// A socket at this end of the link that has sent something to the other end, so that a firewall that keeps states knows both.
    fn socket(&mut self, ipv6: bool) -> io::Result<UdpSocket> {
        let [there, here] = ends(ipv6);
        let at = |address: IpAddr, port: u16| match address {
            IpAddr::V4(address) => SocketAddr::new(address.into(), port),
            IpAddr::V6(address) => SocketAddrV6::new(address, port, 0, self.index).into(),
        };
        let socket = Socket::new(Domain::for_address(at(here, 0)), Type::DGRAM, Some(Protocol::UDP))?;
        // Whatever routing rules the host has, nothing leaves by another interface.
        socket.bind_device(Some(self.device.name()?.as_bytes()))?;
        socket.bind(&at(here, 0).into())?;
        if ipv6 {
            sys::accept_no_checksum(socket.as_fd())?;
        }
        socket.connect(&at(there, VXLAN).into())?;
        let socket = UdpSocket::from(socket);
        socket.set_read_timeout(Some(GREETING_PATIENCE))?;
        let [port_high, port_low] = socket.local_addr()?.port().to_be_bytes();
        let [from_high, from_low] = VXLAN.to_be_bytes();
        let length = (UDP_HEADER + GREETING.len()) as u8;
        let udp = [&[from_high, from_low, port_high, port_low, 0, length, 0, 0][..], &GREETING].concat();
        let greeting = enclosed(there, here, UDP, 0, &udp, Some(6));
        for _ in 0..GREETINGS {
            let has_sent = socket.send(&GREETING).is_ok();
            self.write(&VnetHeader::default(), &greeting)?;
            if has_sent && socket.recv(&mut [0; 8]).is_ok() {
                socket.set_read_timeout(Some(PATIENCE))?;
                return Ok(socket);
            }
        }
        Err(io::ErrorKind::TimedOut.into())
    }

    fn write(&mut self, vnet: &VnetHeader, packet: &[u8]) -> io::Result<()> {
        let pieces = [&vnet.encode()[..], packet];
        sys::write_gathered(self.device.as_fd(), &mut self.scratch, pieces.into_iter()).map(drop)
    }

    /// Whether a super-packet of this kind comes to `socket` as the packets that it is made of.
    fn takes(&mut self, form: Form, socket: &UdpSocket) -> io::Result<bool> {
        let packets: Vec<Vec<u8>> = (0..PACKETS).map(|index| packet(form, index)).collect();
        let Some((vnet, mut bytes)) = joined(packets.clone()) else { return Ok(false) };
        let transport_at = if form.ipv6 { IPV6_HEADER } else { IPV4_HEADER };
        // Only the partial checksum does not cover it.
        let port = socket.local_addr()?.port();
        bytes[transport_at + 2..transport_at + 4].copy_from_slice(&port.to_be_bytes());
        self.write(&vnet, &bytes)?;
        let expected = if form.tcp { vec![bytes] } else { packets };
        let mut buffer = [0; 2 * PACKETS * SEGMENT];
        for packet in expected {
            let mut received = socket.recv(&mut buffer)?;
            while buffer[..received] == GREETING {
                received = socket.recv(&mut buffer)?;
            }
            if buffer[..received] != packet[transport_at + UDP_HEADER..] {
                return Ok(false);
            }
        }
        Ok(true)
    }
}

/// What is written of packets of one flow, if they are joined.
fn joined(mut packets: Vec<Vec<u8>>) -> Option<(VnetHeader, Vec<u8>)> {
    let offload = TunOffload { tcp: true, udp: true, tunnels: TunnelOffload::ALL };
    let (mut list, mut merger) = (PacketDelivery::default(), Merger::default());
    for slot in 0..packets.len() {
        let view = IpView::parse(&packets[slot]).ok()?;
        let packet = Packet { slot, range: 0..packets[slot].len(), partial: false, owner: 0 };
        merger.push(&mut list, &mut packets, packet, &view, offload);
    }
    let [message] = list.messages() else { return None };
    let mut bytes = list.header(message).to_vec();
    bytes.extend(list.pieces(message, &packets).flatten());
    message.vnet.tunnel.is_some().then_some((message.vnet, bytes))
}

/// One packet of a flow inside of VXLAN, from the other end of the link, with all checksums that it is to have.
fn packet(form: Form, index: usize) -> Vec<u8> {
    let id = index as u16;
    let payload: Vec<u8> = (0..if index + 1 == PACKETS { SEGMENT - 7 } else { SEGMENT })
        .map(|at| (at + 3 * index) as u8)
        .collect();
    let (protocol, checksum_at, header) = if form.tcp {
        let [s0, s1, s2, s3] = ((index * SEGMENT) as u32).to_be_bytes();
        // Ports, sequence, acknowledgement, 5 words and ACK, window.
        (TCP, 16, vec![4, 0, 4, 1, s0, s1, s2, s3, 0, 0, 0, 1, 0x50, 0x10, 1, 0, 0, 0, 0, 0])
    } else {
        let [high, low] = ((UDP_HEADER + payload.len()) as u16).to_be_bytes();
        (UDP, 6, vec![4, 0, 4, 1, high, low, 0, 0])
    };
    let [from, to] = ends(form.inner_ipv6);
    let inner = enclosed(from, to, protocol, id, &[&header[..], &payload].concat(), Some(checksum_at));
    let [from, to] = ends(form.ipv6);
    let ethertype: u16 = if form.inner_ipv6 { 0x86dd } else { 0x0800 };
    let vxlan = [8, 0, 0, 0, 0, 0, 1, 0];
    let ethernet = [[2, 0, 0, 0, 0, 2], [2, 0, 0, 0, 0, 1]].concat();
    let within = [&vxlan[..], &ethernet, &ethertype.to_be_bytes(), &inner].concat();
    let [high, low] = ((UDP_HEADER + within.len()) as u16).to_be_bytes();
    let [port_high, port_low] = VXLAN.to_be_bytes();
    let udp = [port_high, port_low, port_high, port_low, high, low, 0, 0];
    enclosed(from, to, UDP, id, &[&udp[..], &within].concat(), form.summed.then_some(6))
}

/// The other end of the link, and this one.
fn ends(ipv6: bool) -> [IpAddr; 2] {
    if ipv6 { [THERE_IPV6.into(), HERE_IPV6.into()] } else { [THERE_IPV4.into(), HERE_IPV4.into()] }
}

/// An IP packet with `payload`, whose checksum at `checksum_at` is completed.
fn enclosed(
    from: IpAddr,
    to: IpAddr,
    protocol: u8,
    id: u16,
    payload: &[u8],
    checksum_at: Option<usize>,
) -> Vec<u8> {
    let length = payload.len() as u16;
    let mut packet = match (from, to) {
        (IpAddr::V4(from), IpAddr::V4(to)) => {
            let [total_high, total_low] = (length + IPV4_HEADER as u16).to_be_bytes();
            let [id_high, id_low] = id.to_be_bytes();
            let fixed = [0x45, 0, total_high, total_low, id_high, id_low, 0, 0, 64, protocol, 0, 0];
            let mut header = [&fixed[..], &from.octets(), &to.octets()].concat();
            let right = !checksum::sum(&header);
            header[10..12].copy_from_slice(&right.to_be_bytes());
            header
        }
        (from, to) => {
            let [high, low] = length.to_be_bytes();
            let mut header = vec![0x60, 0, 0, 0, high, low, protocol, 64];
            for address in [from, to] {
                header.extend(match address {
                    IpAddr::V4(address) => address.to_ipv6_mapped().octets(),
                    IpAddr::V6(address) => address.octets(),
                });
            }
            header
        }
    };
    let start = packet.len();
    packet.extend_from_slice(payload);
    if let Some(at) = checksum_at {
        let sum = u64::from(checksum::pseudo_header(from, to, protocol))
            + u64::from(length)
            + u64::from(checksum::sum(payload));
        let right = checksum::finish(checksum::fold(sum));
        packet[start + at..start + at + 2].copy_from_slice(&right.to_be_bytes());
    }
    packet
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_packets_of_every_kind_are_joined_as_inside_of_a_tunnel() {
        for bits in 0..16 {
            let [ipv6, inner_ipv6, tcp, summed] = [0, 1, 2, 3].map(|bit| bits >> bit & 1 != 0);
            let form = Form { ipv6, inner_ipv6, tcp, summed };
            let packets: Vec<Vec<u8>> = (0..PACKETS).map(|index| packet(form, index)).collect();
            let bytes: usize = packets.iter().map(Vec::len).sum();
            let (vnet, joined) = joined(packets).expect("one message");
            let tunnel = vnet.tunnel.expect("a tunnel");
            assert_eq!((tunnel.ipv6, tunnel.checksum), (ipv6, summed));
            assert_eq!(joined.len(), bytes - (PACKETS - 1) * usize::from(vnet.header_len), "{form:?}");
        }
    }
}
