//! The routes of one device as the kernel has them, whoever set them, with their next hops; and word of their changes.

use std::{
    collections::BTreeMap,
    io::{self, Read},
    net::IpAddr,
    os::fd::AsFd,
    time::Duration,
};

use ipnet::IpNet;
use netlink_packet_route::{
    RouteNetlinkMessage,
    route::{RouteAddress, RouteAttribute, RouteMessage, RouteNextHop, RouteType, RouteVia},
};
use socket2::Socket;

use crate::{
    netlink::{Entry, Netlink, Which, answers, family},
    sys,
};

/// The table of addresses of this host and of broadcasts, which lead to nobody else.
const TABLE_LOCAL: u32 = 255;

/// `RTM_NEWNEXTHOP` and `RTM_GETNEXTHOP` (`linux/rtnetlink.h`).
const NEW_NEXT_HOP: u16 = 104;
const GET_NEXT_HOP: u16 = 106;

/// Of what the kernel tells: changes of links, addresses, routes and next hop objects (`enum rtnetlink_groups`).
const GROUPS: [u32; 6] = [1, 5, 7, 9, 11, 32];

/// A next hop of a route through the device.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Hop {
    /// The router, or nobody: the destination is on the link.
    pub gateway: Option<IpAddr>,
    /// The share of flows, 1 to 256, or more for a group of next hop objects.
    pub weight: u16,
}

/// A route that leads into the device.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DeviceRoute {
    /// The prefix that the route leads to.
    pub prefix: IpNet,
    /// The number of its routing table.
    pub table: u32,
    /// The lowest of a table counts.
    pub metric: u32,
    /// Its next hops through this device.
    pub hops: Vec<Hop>,
}

/// The objects of `ip nexthop`, by number.
#[derive(Clone, Debug, Default)]
pub struct NextHops(BTreeMap<u32, NextHop>);

/// An object of `ip nexthop`, which routes name by its number.
#[derive(Clone, Debug, PartialEq, Eq)]
enum NextHop {
    One {
        device: u32,
        gateway: Option<IpAddr>,
    },
    /// The numbers of other objects, each with its weight.
    Group(Vec<(u32, u16)>),
}

impl NextHops {
    /// The next hops through `device` that an object stands for.
    fn resolve(&self, id: u32, device: u32) -> Vec<Hop> {
        let one = |id: &u32, weight| match self.0.get(id) {
            Some(NextHop::One { device: its, gateway }) if *its == device => {
                Some(Hop { gateway: *gateway, weight })
            }
            // A group is never part of another one.
            Some(NextHop::One { .. } | NextHop::Group(_)) | None => None,
        };
        match self.0.get(&id) {
            Some(NextHop::Group(members)) => {
                members.iter().filter_map(|(id, weight)| one(id, *weight)).collect()
            }
            Some(NextHop::One { .. }) | None => one(&id, 1).into_iter().collect(),
        }
    }

    /// Notes the object that a message is about; what is malformed is left out.
    fn read(&mut self, message: &[u8]) {
        /// `struct nhmsg`: family, scope, protocol, a reserved byte, flags.
        const HEADER: usize = 8;
        let (mut id, mut device, mut gateway, mut group) = (None, 0, None, None);
        for (kind, value) in attributes(message.get(HEADER..).unwrap_or_default()) {
            let number = || value.first_chunk().map(|bytes| u32::from_ne_bytes(*bytes));
            match kind {
                1 => id = number(),
                2 => group = Some(value.chunks_exact(8).map(member).collect()),
                5 => device = number().unwrap_or(0),
                6 => gateway = address(value),
                _ => {}
            }
        }
        if let Some(id) = id {
            self.0.insert(id, group.map_or(NextHop::One { device, gateway }, NextHop::Group));
        }
    }
}

/// `struct nexthop_grp`: the number of an object, the low and the high byte of its weight less one.
fn member(bytes: &[u8]) -> (u32, u16) {
    let [a, b, c, d, low, high, ..] = *bytes else { return (0, 1) };
    (u32::from_ne_bytes([a, b, c, d]), u16::from_le_bytes([low, high]).saturating_add(1))
}

fn address(bytes: &[u8]) -> Option<IpAddr> {
    <[u8; 4]>::try_from(bytes)
        .map(IpAddr::from)
        .or_else(|_| <[u8; 16]>::try_from(bytes).map(IpAddr::from))
        .ok()
}

/// The attributes of a netlink message: kind and value.
fn attributes(mut bytes: &[u8]) -> impl Iterator<Item = (u16, &[u8])> {
    std::iter::from_fn(move || {
        let [len_0, len_1, kind_0, kind_1, ..] = *bytes else { return None };
        let len = usize::from(u16::from_ne_bytes([len_0, len_1]));
        let value = bytes.get(4..len)?;
        bytes = bytes.get(len.next_multiple_of(4)..).unwrap_or_default();
        // The two highest bits are flags.
        Some((u16::from_ne_bytes([kind_0, kind_1]) & 0x3fff, value))
    })
}

impl Netlink {
    /// The unicast routes of the family of `family_of` through interface `device`, in every table but the local one; and whether they
    /// changed meanwhile, so that some may be missing.
    ///
    /// # Errors
    /// As [`Netlink::addresses`].
    pub fn device_routes(
        &mut self,
        family_of: IpAddr,
        device: u32,
        next_hops: &NextHops,
        each: &mut dyn FnMut(DeviceRoute),
    ) -> io::Result<bool> {
        let mut message = RouteMessage::default();
        message.header.address_family = family(family_of);
        message.attributes.push(RouteAttribute::Oif(device));
        self.interrupted = false;
        self.dump(RouteNetlinkMessage::GetRoute(message), &mut |message| {
            if let RouteNetlinkMessage::NewRoute(message) = message
                && let Some(route) = DeviceRoute::read(&message, device, next_hops)
            {
                each(route);
            }
        })?;
        Ok(self.interrupted)
    }

    /// All next hop objects.
    ///
    /// # Errors
    /// As [`Netlink::addresses`]; none on a kernel without such objects, before 5.3.
    pub fn next_hops(&mut self) -> io::Result<NextHops> {
        self.sequence = self.sequence.wrapping_add(1);
        let mut request = Vec::with_capacity(24);
        request.extend(24_u32.to_ne_bytes());
        request.extend(GET_NEXT_HOP.to_ne_bytes());
        request.extend((netlink_packet_core::NLM_F_REQUEST | netlink_packet_core::NLM_F_DUMP).to_ne_bytes());
        request.extend(self.sequence.to_ne_bytes());
        request.extend([0; 12]);
        self.socket.send(&request)?;
        let mut found = NextHops::default();
        loop {
            let len = self.socket.read(&mut self.answer)?;
            let mut end = None;
            for (header, payload) in answers(&self.answer[..len]) {
                match header.kind {
                    _ if header.sequence != self.sequence => {}
                    NEW_NEXT_HOP => found.read(payload),
                    // NLMSG_ERROR and NLMSG_DONE: both begin with a code, which is negative for an error.
                    2 | 3 => end = payload.first_chunk().map(|code| i32::from_ne_bytes(*code)).or(Some(0)),
                    _ => {}
                }
            }
            match end {
                None => {}
                Some(code) if code < 0 && ![-libc::EOPNOTSUPP, -libc::EINVAL].contains(&code) => {
                    return Err(io::Error::from_raw_os_error(-code));
                }
                Some(_) => return Ok(found),
            }
        }
    }

    /// Has the kernel tell of changes of links, addresses, routes and next hops from now on.
    ///
    /// # Errors
    /// The kernel's.
    pub fn follow(mut self) -> io::Result<RouteChanges> {
        // A question gives the socket its address, without which nothing is delivered.
        self.link(Which::Index(1))?;
        for group in GROUPS {
            sys::join_netlink_group(self.socket.as_fd(), group)?;
        }
        Ok(RouteChanges { netlink: self })
    }
}

/// Word of changes of the kernel's routes, of any device.
pub struct RouteChanges {
    netlink: Netlink,
}

impl RouteChanges {
    /// Waits for a change for at most `within`, and takes all that have come; false if there was none. Changes that were lost
    /// because too many came at once count.
    ///
    /// # Errors
    /// The kernel's.
    pub fn wait(&mut self, within: Duration) -> io::Result<bool> {
        let Netlink { socket, answer, .. } = &mut self.netlink;
        socket.set_nonblocking(false)?;
        socket.set_read_timeout(Some(within.max(Duration::from_millis(1))))?;
        if !read_change(socket, answer)? {
            return Ok(false);
        }
        self.came()?;
        Ok(true)
    }

    /// Takes the changes that have come, and waits for none; false if there was none.
    ///
    /// # Errors
    /// The kernel's.
    pub fn came(&mut self) -> io::Result<bool> {
        // What is left after so many is taken the next time.
        const MOST_READ: usize = 10_000;

        let Netlink { socket, answer, .. } = &mut self.netlink;
        socket.set_nonblocking(true)?;
        for count in 0..MOST_READ {
            if !read_change(socket, answer)? {
                return Ok(count > 0);
            }
        }
        Ok(true)
    }
}

/// Reads word of a change; false if there is none in time. Changes that were lost count.
fn read_change(socket: &mut Socket, answer: &mut [u8]) -> io::Result<bool> {
    match socket.read(answer) {
        Ok(_) => Ok(true),
        Err(error) if error.raw_os_error() == Some(libc::ENOBUFS) => Ok(true),
        Err(error) if matches!(error.kind(), io::ErrorKind::WouldBlock | io::ErrorKind::Interrupted) => {
            Ok(false)
        }
        Err(error) => Err(error),
    }
}

impl DeviceRoute {
    fn read(message: &RouteMessage, device: u32, next_hops: &NextHops) -> Option<Self> {
        let Entry { prefix, table, unicast, .. } = Entry::read(message)?;
        if !unicast || table == TABLE_LOCAL || message.header.kind != RouteType::Unicast {
            return None;
        }
        let (mut metric, mut oif, mut object) = (0, 0, None);
        let (mut gateway, mut several) = (None, None);
        for attribute in &message.attributes {
            if let RouteAttribute::Priority(number) = attribute {
                metric = *number;
            } else if let RouteAttribute::Oif(number) = attribute {
                oif = *number;
            } else if let RouteAttribute::MultiPath(hops) = attribute {
                several = Some(hops);
            } else if let RouteAttribute::NhId(id) = attribute {
                object = Some(*id);
            } else {
                gateway = gateway.or_else(|| router(attribute));
            }
        }
        let hops = match (object, several) {
            (Some(id), _) => next_hops.resolve(id, device),
            (None, Some(hops)) => hops.iter().filter_map(|hop| through(hop, device)).collect(),
            (None, None) if oif == device => vec![Hop { gateway, weight: 1 }],
            (None, None) => Vec::new(),
        };
        (!hops.is_empty()).then_some(Self { prefix, table, metric, hops })
    }
}

/// The router that an attribute names, if it names one.
fn router(attribute: &RouteAttribute) -> Option<IpAddr> {
    if let RouteAttribute::Gateway(RouteAddress::Inet(v4)) | RouteAttribute::Via(RouteVia::Inet(v4)) =
        attribute
    {
        Some((*v4).into())
    } else if let RouteAttribute::Gateway(RouteAddress::Inet6(v6))
    | RouteAttribute::Via(RouteVia::Inet6(v6)) = attribute
    {
        Some((*v6).into())
    } else {
        None
    }
}

/// One of several next hops, if it is through `device`.
fn through(hop: &RouteNextHop, device: u32) -> Option<Hop> {
    let gateway = hop.attributes.iter().find_map(router);
    (hop.interface_index == device).then(|| Hop { gateway, weight: u16::from(hop.hops) + 1 })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn attribute(kind: u16, value: &[u8]) -> Vec<u8> {
        let mut bytes = Vec::from(((value.len() + 4) as u16).to_ne_bytes());
        bytes.extend(kind.to_ne_bytes());
        bytes.extend(value);
        bytes.resize(bytes.len().next_multiple_of(4), 0);
        bytes
    }

    fn object(attributes: &[Vec<u8>]) -> Vec<u8> {
        [vec![0; 8], attributes.concat()].concat()
    }

    #[test]
    fn next_hop_objects_and_groups_of_them_are_resolved() {
        let id = |id: u32| attribute(1, &id.to_ne_bytes());
        let device = |device: u32| attribute(5, &device.to_ne_bytes());
        let gateway = |text: &str| match text.parse::<IpAddr>().unwrap() {
            IpAddr::V4(v4) => attribute(6, &v4.octets()),
            IpAddr::V6(v6) => attribute(6, &v6.octets()),
        };
        let member = |id: u32, weight: u16| {
            let [low, high] = (weight - 1).to_le_bytes();
            [&id.to_ne_bytes()[..], &[low, high, 0, 0]].concat()
        };
        let mut objects = NextHops::default();
        objects.read(&object(&[id(1), device(7), gateway("10.9.0.2")]));
        objects.read(&object(&[id(2), device(7), gateway("fe80::2")]));
        objects.read(&object(&[id(3), device(8), gateway("10.9.0.3")]));
        objects.read(&object(&[id(4), device(7)]));
        objects.read(&object(&[id(9), attribute(2, &[member(1, 1), member(2, 300), member(3, 5)].concat())]));
        let hop = |gateway: &str, weight| Hop { gateway: gateway.parse().ok(), weight };
        assert_eq!(objects.resolve(1, 7), [hop("10.9.0.2", 1)]);
        assert_eq!(objects.resolve(3, 7), [], "of another device");
        assert_eq!(objects.resolve(4, 7), [hop("", 1)], "on the link");
        assert_eq!(objects.resolve(9, 7), [hop("10.9.0.2", 1), hop("fe80::2", 300)]);
        assert_eq!(objects.resolve(5, 7), [], "unknown");
    }

    #[test]
    fn what_is_cut_short_is_no_object() {
        let whole = object(&[attribute(1, &1_u32.to_ne_bytes()), attribute(6, &[10, 9, 0, 2])]);
        for len in 0..whole.len() {
            let mut objects = NextHops::default();
            objects.read(&whole[..len]);
            assert!(objects.0.len() <= 1);
        }
        for len in [0, 1, 2, 3, 255] {
            assert_eq!(attributes(&[len, 0, 1, 0]).count(), 0, "{len}");
        }
        assert_eq!(attributes(&[4, 0, 1, 0]).count(), 1);
    }
}
