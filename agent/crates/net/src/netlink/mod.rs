//! Addresses, routes and rules of the kernel, over a blocking rtnetlink socket. For the control plane only.

use std::{
    io::{self, Read},
    iter,
    net::{IpAddr, Ipv4Addr, Ipv6Addr},
    os::fd::AsFd,
};

use ipnet::IpNet;
use netlink_packet_core::{
    NLM_F_ACK, NLM_F_CREATE, NLM_F_DUMP, NLM_F_DUMP_INTR, NLM_F_EXCL, NLM_F_REPLACE, NLM_F_REQUEST,
    NetlinkHeader, NetlinkMessage, NetlinkPayload,
};
use netlink_packet_route::{
    AddressFamily, RouteNetlinkMessage,
    address::{AddressAttribute, AddressFlags, AddressMessage},
    link::{LinkAttribute, LinkFlags, LinkMessage},
    route::{RouteAddress, RouteAttribute, RouteMessage, RouteMetric, RouteProtocol, RouteScope, RouteType},
};
use socket2::{Domain, Protocol, Socket, Type};

use crate::sys;

mod followed;
pub mod interfaces;
mod local;
mod rules;
mod way;

pub use followed::{DeviceRoute, Hop, NextHops, RouteChanges};
pub use rules::{Rule, RuleKind};

/// Bytes of the largest message of an answer: the kernel fills its dumps up to 32 KiB.
const ANSWER_BYTES: usize = 64 << 10;

/// The routing table that is looked at without any rule of ours.
pub const TABLE_MAIN: u32 = 254;

/// The routing table that the kernel keeps itself, of what it takes in.
const TABLE_LOCAL: u8 = 255;

/// The number that marks routes and rules as ours in `ip route` and `ip rule` (`proto 199`). iproute2's `rt_protos` gives it to
/// nobody.
pub const PROTOCOL: u8 = 199;

/// A connection to the kernel's tables.
pub struct Netlink {
    socket: Socket,
    sequence: u32,
    answer: Box<[u8]>,
    /// Whether a table changed while it was listed.
    interrupted: bool,
}

impl Netlink {
    /// Connects, to the network namespace of this thread.
    ///
    /// # Errors
    /// The kernel's, e.g. EAFNOSUPPORT where a sandbox forbids netlink sockets.
    pub fn open() -> io::Result<Self> {
        let (domain, route) = (Domain::from(libc::AF_NETLINK), Protocol::from(libc::NETLINK_ROUTE));
        let socket = Socket::new(domain, Type::RAW, Some(route))?;
        // A kernel before 4.20 has no such dumps: it lists everything, of which we take what we have asked for.
        if let Err(error) = sys::set_filtered_dumps(socket.as_fd()) {
            tracing::debug!(%error, "the kernel lists all routes, whichever are asked for");
        }
        Ok(Self { socket, sequence: 0, answer: vec![0; ANSWER_BYTES].into(), interrupted: false })
    }

    /// Sends `message` and waits until it is done.
    ///
    /// # Errors
    /// The kernel's.
    fn change(&mut self, message: RouteNetlinkMessage, flags: u16) -> io::Result<()> {
        self.request(message, NLM_F_ACK | flags, &mut |_| {})
    }

    /// Asks for a whole table; those of its messages that cannot be read are left out.
    fn dump(
        &mut self,
        message: RouteNetlinkMessage,
        each: &mut dyn FnMut(RouteNetlinkMessage),
    ) -> io::Result<()> {
        self.request(message, NLM_F_DUMP, each)
    }

    fn request(
        &mut self,
        message: RouteNetlinkMessage,
        flags: u16,
        each: &mut dyn FnMut(RouteNetlinkMessage),
    ) -> io::Result<()> {
        self.sequence = self.sequence.wrapping_add(1);
        let mut header = NetlinkHeader::default();
        header.flags = NLM_F_REQUEST | flags;
        header.sequence_number = self.sequence;
        let mut request = NetlinkMessage::new(header, NetlinkPayload::from(message));
        request.finalize();
        let mut bytes = vec![0; request.buffer_len()];
        request.serialize(&mut bytes);
        self.socket.send(&bytes)?;
        loop {
            let len = self.socket.read(&mut self.answer)?;
            let answer = &self.answer[..len];
            self.interrupted |= answers(answer).any(|(header, _)| header.flags & NLM_F_DUMP_INTR != 0);
            if let Some(end) = read_answer(answer, self.sequence, each) {
                return end;
            }
        }
    }

    /// Gives interface `index` an address, with the on-link prefix that it names.
    ///
    /// # Errors
    /// The kernel's: `PermissionDenied` without CAP_NET_ADMIN, `AlreadyExists` when the interface has the address, ENODEV
    /// when it is gone.
    pub fn add_address(&mut self, index: u32, address: IpNet) -> io::Result<()> {
        let mut message = AddressMessage::default();
        message.header.family = family(address.addr());
        message.header.index = index;
        message.header.prefix_len = address.prefix_len();
        // Nobody else is on the link, so nobody is asked whether the address is free.
        message.attributes.push(AddressAttribute::Flags(AddressFlags::Nodad));
        message.attributes.push(AddressAttribute::Local(address.addr()));
        message.attributes.push(AddressAttribute::Address(address.addr()));
        self.change(RouteNetlinkMessage::NewAddress(message), NLM_F_CREATE | NLM_F_EXCL)
    }

    /// Sets what is given of interface `index`.
    ///
    /// # Errors
    /// The kernel's: `PermissionDenied` without CAP_NET_ADMIN, ENODEV when the interface is gone, EINVAL for an MTU that
    /// it cannot have.
    pub fn set_link(&mut self, index: u32, change: LinkChange) -> io::Result<()> {
        let mut message = LinkMessage::default();
        message.header.index = index;
        if change.up {
            message.header.flags = LinkFlags::Up;
            message.header.change_mask = LinkFlags::Up;
        }
        message.attributes.extend(change.mtu.map(|mtu| LinkAttribute::Mtu(mtu.into())));
        message.attributes.extend(change.queue_packets.map(LinkAttribute::TxQueueLen));
        self.change(RouteNetlinkMessage::SetLink(message), 0)
    }

    /// Removes interface `index`.
    ///
    /// # Errors
    /// As [`Netlink::set_link`].
    pub fn remove_link(&mut self, index: u32) -> io::Result<()> {
        let mut message = LinkMessage::default();
        message.header.index = index;
        self.change(RouteNetlinkMessage::DelLink(message), 0)
    }

    /// The addresses of all interfaces.
    ///
    /// # Errors
    /// The kernel's, when it has no memory for the answer or a sandbox forbids the question; `InvalidData` for an answer that
    /// cannot be taken apart.
    pub fn addresses(&mut self) -> io::Result<Vec<Address>> {
        self.list_addresses(None)
    }

    /// The addresses of one interface.
    ///
    /// # Errors
    /// As [`Netlink::addresses`].
    pub fn addresses_of(&mut self, index: u32) -> io::Result<Vec<IpNet>> {
        let found = self.list_addresses(Some(index))?;
        Ok(found.into_iter().map(|found| found.address).collect())
    }

    fn list_addresses(&mut self, only: Option<u32>) -> io::Result<Vec<Address>> {
        let mut message = AddressMessage::default();
        // Kernels before 4.20 take no notice, and list those of all interfaces.
        message.header.index = only.unwrap_or(0);
        let mut found = Vec::new();
        self.dump(RouteNetlinkMessage::GetAddress(message), &mut |message| {
            if let RouteNetlinkMessage::NewAddress(message) = message
                && let Some(address) = Address::read(&message)
                && only.is_none_or(|only| address.index == only)
            {
                found.push(address);
            }
        })?;
        Ok(found)
    }

    /// The interface of this name, or of this index; `None` when there is none.
    ///
    /// # Errors
    /// As [`Netlink::addresses`].
    pub fn link(&mut self, which: Which<'_>) -> io::Result<Option<Link>> {
        let mut message = LinkMessage::default();
        match which {
            Which::Index(index) => message.header.index = index,
            Which::Name(name) => message.attributes.push(LinkAttribute::IfName(name.to_owned())),
        }
        let mut found = None;
        let asked = self.request(RouteNetlinkMessage::GetLink(message), NLM_F_ACK, &mut |message| {
            if let RouteNetlinkMessage::NewLink(message) = message {
                found = Some(Link::read(&message));
            }
        });
        match asked {
            Ok(()) => Ok(found),
            Err(error) if error.raw_os_error() == Some(libc::ENODEV) => Ok(None),
            Err(error) => Err(error),
        }
    }

    /// The name of an interface, or its number when it has none any more.
    pub fn name(&mut self, index: u32) -> String {
        match self.link(Which::Index(index)) {
            Ok(Some(link)) => link.name,
            Ok(None) | Err(_) => format!("interface {index}"),
        }
    }

    /// Adds a route of ours, which the table must not have yet (same prefix and metric), unless it may stand `beside` one.
    ///
    /// # Errors
    /// The kernel's: `PermissionDenied` without CAP_NET_ADMIN, `AlreadyExists` when the table has it, ENODEV or ENETDOWN
    /// when the interface is gone or down.
    pub fn add_route(&mut self, route: &Route, beside: bool) -> io::Result<()> {
        let flags = if beside { NLM_F_CREATE } else { NLM_F_CREATE | NLM_F_EXCL };
        self.change(RouteNetlinkMessage::NewRoute(route.message()), flags)
    }

    /// Changes the MTU of a route that was added.
    ///
    /// # Errors
    /// As [`Netlink::add_route`], but for `AlreadyExists`.
    pub fn replace_route(&mut self, route: &Route) -> io::Result<()> {
        self.change(RouteNetlinkMessage::NewRoute(route.message()), NLM_F_CREATE | NLM_F_REPLACE)
    }

    /// Removes a route of ours, whatever its MTU is.
    ///
    /// # Errors
    /// The kernel's: `PermissionDenied` without CAP_NET_ADMIN, ESRCH when there is none of ours.
    pub fn remove_route(&mut self, route: &Route) -> io::Result<()> {
        let route = Route { mtu: None, ..*route };
        self.change(RouteNetlinkMessage::DelRoute(route.message()), 0)
    }

    /// Lists the routes of the family of `family_of`; only those through interface `only`, if it is given.
    ///
    /// # Errors
    /// As [`Netlink::addresses`].
    pub fn routes(
        &mut self,
        family_of: IpAddr,
        only: Option<u32>,
        each: &mut dyn FnMut(Entry),
    ) -> io::Result<()> {
        let mut message = RouteMessage::default();
        message.header.address_family = family(family_of);
        message.attributes.extend(only.map(RouteAttribute::Oif));
        let listed = self.dump(RouteNetlinkMessage::GetRoute(message), &mut |message| {
            if let RouteNetlinkMessage::NewRoute(message) = message
                && let Some(route) = Entry::read(&message)
                && only.is_none_or(|only| route.index == only)
            {
                each(route);
            }
        });
        match listed {
            // A kernel without IPv6 has no routes of it.
            Err(error) if family_of.is_ipv6() && lacks_family(&error) => Ok(()),
            listed => listed,
        }
    }
}

/// An interface, to be asked for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Which<'a> {
    /// The interface that has this number.
    Index(u32),
    /// The interface that has this name.
    Name(&'a str),
}

/// An interface as the kernel describes it.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Link {
    /// The interface's number in its network namespace.
    pub index: u32,
    /// The interface's name in its network namespace.
    pub name: String,
    /// Whether the interface is administratively up.
    pub up: bool,
    /// The MTU of the interface, in bytes.
    pub mtu: u32,
    /// Packets that may wait in it.
    pub queue_packets: u32,
    /// Packets for it that were lost because its queue was full.
    pub tx_dropped: u64,
    /// Packets from it that the kernel dropped.
    pub rx_dropped: u64,
    /// Packets for it that could not be handed over.
    pub tx_errors: u64,
    /// Packets from it that were malformed.
    pub rx_errors: u64,
}

impl Link {
    fn read(message: &LinkMessage) -> Self {
        let up = message.header.flags.contains(LinkFlags::Up);
        let mut link = Self { index: message.header.index, up, ..Self::default() };
        for attribute in &message.attributes {
            if let LinkAttribute::IfName(name) = attribute {
                link.name.clone_from(name);
            } else if let LinkAttribute::Mtu(mtu) = attribute {
                link.mtu = *mtu;
            } else if let LinkAttribute::TxQueueLen(packets) = attribute {
                link.queue_packets = *packets;
            } else if let LinkAttribute::Stats64(stats) = attribute {
                link.tx_dropped = stats.tx_dropped;
                link.rx_dropped = stats.rx_dropped;
                link.tx_errors = stats.tx_errors;
                link.rx_errors = stats.rx_errors;
            }
        }
        link
    }
}

/// A route that the agent sets.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Route {
    /// The prefix that the route leads to.
    pub prefix: IpNet,
    /// The number of its routing table.
    pub table: u32,
    /// The number of the interface it uses.
    pub index: u32,
    /// The largest packet, in bytes; none: as the interface has it.
    pub mtu: Option<u16>,
    /// The metric, where the family's default is not meant: the lowest wins.
    pub metric: Option<u32>,
}

impl Route {
    /// The metric that the route has in the kernel.
    #[must_use]
    pub fn metric(&self) -> u32 {
        /// What IPv6 gives to a route that names none (`IP6_RT_PRIO_USER`).
        const IPV6_METRIC: u32 = 1024;
        let usual = if self.prefix.addr().is_ipv6() { IPV6_METRIC } else { 0 };
        self.metric.unwrap_or(usual)
    }

    fn message(&self) -> RouteMessage {
        let mut message = RouteMessage::default();
        let header = &mut message.header;
        header.address_family = family(self.prefix.addr());
        header.destination_prefix_length = self.prefix.prefix_len();
        header.protocol = RouteProtocol::Other(PROTOCOL);
        header.kind = RouteType::Unicast;
        // Without a gateway (IPv6 takes no notice).
        header.scope = RouteScope::Link;
        let attributes = &mut message.attributes;
        attributes.push(RouteAttribute::Table(self.table));
        attributes.push(RouteAttribute::Oif(self.index));
        if self.prefix.prefix_len() > 0 {
            attributes.push(RouteAttribute::Destination(self.prefix.network().into()));
        }
        attributes.extend(self.mtu.map(|mtu| RouteAttribute::Metrics(vec![RouteMetric::Mtu(mtu.into())])));
        attributes.extend(self.metric.map(RouteAttribute::Priority));
        message
    }
}

/// A route in the kernel, whoever set it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Entry {
    /// The prefix that the route leads to.
    pub prefix: IpNet,
    /// The number of its routing table.
    pub table: u32,
    /// Through which interface; 0 if it names none, or several.
    pub index: u32,
    /// Whether packets are sent on: neither dropped nor taken in.
    pub unicast: bool,
    /// Who has set it, as in `/etc/iproute2/rt_protos`.
    pub protocol: u8,
    /// The largest packet, in bytes; none: as the interface has it.
    pub mtu: Option<u32>,
    /// The lowest of a table counts.
    pub metric: u32,
}

impl Entry {
    fn read(message: &RouteMessage) -> Option<Self> {
        let header = &message.header;
        if header.source_prefix_length > 0 {
            // For some senders only: another route than one for all.
            return None;
        }
        let (mut table, mut index, mut mtu, mut metric) = (u32::from(header.table), 0, None, 0);
        // A default route names no destination. Other families are not asked for.
        let mut address = if header.address_family == AddressFamily::Inet6 {
            IpAddr::V6(Ipv6Addr::UNSPECIFIED)
        } else {
            IpAddr::V4(Ipv4Addr::UNSPECIFIED)
        };
        for attribute in &message.attributes {
            if let RouteAttribute::Table(number) = attribute {
                table = *number;
            } else if let RouteAttribute::Oif(number) = attribute {
                index = *number;
            } else if let RouteAttribute::Priority(number) = attribute {
                metric = *number;
            } else if let RouteAttribute::Metrics(metrics) = attribute {
                mtu = metrics.iter().find_map(|metric| {
                    if let RouteMetric::Mtu(bytes) = metric { Some(*bytes) } else { None }
                });
            } else if let RouteAttribute::Destination(destination) = attribute {
                if let RouteAddress::Inet(v4) = destination {
                    address = (*v4).into();
                } else if let RouteAddress::Inet6(v6) = destination {
                    address = (*v6).into();
                }
            }
        }
        Some(Self {
            prefix: IpNet::new(address, header.destination_prefix_length).ok()?,
            table,
            index,
            unicast: header.kind == RouteType::Unicast,
            protocol: header.protocol.into(),
            mtu,
            metric,
        })
    }
}

/// A change to be made to an interface.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct LinkChange {
    /// Whether the interface is to be brought up.
    pub up: bool,
    /// The new MTU of the interface, in bytes.
    pub mtu: Option<u16>,
    /// Packets that wait in it, at most.
    pub queue_packets: Option<u32>,
}

/// An address that an interface has.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Address {
    /// The number of the interface that has it.
    pub index: u32,
    /// The address, with its on-link prefix.
    pub address: IpNet,
}

impl Address {
    fn read(message: &AddressMessage) -> Option<Self> {
        let (mut local, mut other) = (None, None);
        for attribute in &message.attributes {
            if let AddressAttribute::Local(address) = attribute {
                local = Some(*address);
            } else if let AddressAttribute::Address(address) = attribute {
                other = Some(*address);
            }
        }
        // Of a pair the second one is the other end's.
        let address = IpNet::new(local.or(other)?, message.header.prefix_len).ok()?;
        Some(Self { index: message.header.index, address })
    }
}

/// What a message of the kernel begins with (`struct nlmsghdr`).
#[derive(Clone, Copy, Debug)]
struct AnswerHeader {
    kind: u16,
    flags: u16,
    sequence: u32,
}

/// The messages of one answer, with what each is about; ends at one whose length makes no sense.
fn answers(mut bytes: &[u8]) -> impl Iterator<Item = (AnswerHeader, &[u8])> {
    iter::from_fn(move || {
        let header: &[u8; 16] = bytes.first_chunk()?;
        let [len_0, len_1, len_2, len_3, kind_0, kind_1, flags_0, flags_1, a, b, c, d, ..] = *header;
        let len = u32::from_ne_bytes([len_0, len_1, len_2, len_3]) as usize;
        let payload = bytes.get(16..len)?;
        bytes = bytes.get(len.next_multiple_of(4)..).unwrap_or_default();
        let kind = u16::from_ne_bytes([kind_0, kind_1]);
        let flags = u16::from_ne_bytes([flags_0, flags_1]);
        Some((AnswerHeader { kind, flags, sequence: u32::from_ne_bytes([a, b, c, d]) }, payload))
    })
}

/// Reads the messages of one answer; `Some` when it was the last.
fn read_answer(
    mut bytes: &[u8],
    sequence: u32,
    each: &mut dyn FnMut(RouteNetlinkMessage),
) -> Option<io::Result<()>> {
    /// Messages begin at multiples of this.
    const ALIGN: usize = 4;
    /// The bytes of a netlink message header.
    const HEADER: usize = 16;
    while let Some(length) = bytes.first_chunk().map(|length| u32::from_ne_bytes(*length) as usize) {
        if length < HEADER || length > bytes.len() {
            return Some(Err(io::ErrorKind::InvalidData.into()));
        }
        let message = NetlinkMessage::<RouteNetlinkMessage>::deserialize(&bytes[..length]);
        bytes = &bytes[length.next_multiple_of(ALIGN).min(bytes.len())..];
        let message = match message {
            Ok(message) if message.header.sequence_number == sequence => message,
            Ok(_) => continue,
            Err(error) => {
                tracing::debug!(%error, "a netlink message of an unknown form");
                continue;
            }
        };
        match message.payload {
            NetlinkPayload::InnerMessage(message) => each(message),
            NetlinkPayload::Done(_) => return Some(Ok(())),
            NetlinkPayload::Error(error) if error.code.is_none() => return Some(Ok(())),
            NetlinkPayload::Error(error) => return Some(Err(error.to_io())),
            NetlinkPayload::Overrun(_) => return Some(Err(io::ErrorKind::OutOfMemory.into())),
            NetlinkPayload::Noop | _ => {}
        }
    }
    None
}

/// Whether an error says that this host has no IPv6: by a sysctl, or there is none in this kernel.
#[must_use]
pub fn lacks_ipv6(error: &io::Error) -> bool {
    error.raw_os_error() == Some(libc::EACCES) || lacks_family(error)
}

fn lacks_family(error: &io::Error) -> bool {
    matches!(error.raw_os_error(), Some(libc::EOPNOTSUPP | libc::EAFNOSUPPORT))
}

fn family(address: IpAddr) -> AddressFamily {
    match address {
        IpAddr::V4(_) => AddressFamily::Inet,
        IpAddr::V6(_) => AddressFamily::Inet6,
    }
}
