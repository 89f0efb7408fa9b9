//! Addresses, routes and rules of the kernel, over a blocking rtnetlink socket. For the control plane only.

use std::{
    io::{self, Read},
    net::{IpAddr, Ipv4Addr, Ipv6Addr},
};

use ipnet::IpNet;
use netlink_packet_core::{
    NLM_F_ACK, NLM_F_CREATE, NLM_F_DUMP, NLM_F_EXCL, NLM_F_REPLACE, NLM_F_REQUEST, NetlinkHeader,
    NetlinkMessage, NetlinkPayload,
};
use netlink_packet_route::{
    AddressFamily, RouteNetlinkMessage,
    address::{AddressAttribute, AddressFlags, AddressMessage},
    link::{LinkAttribute, LinkFlags, LinkMessage},
    route::{RouteAddress, RouteAttribute, RouteMessage, RouteMetric, RouteProtocol, RouteScope, RouteType},
    rule::{RuleAction, RuleAttribute, RuleFlags, RuleMessage},
};
use socket2::{Domain, Protocol, Socket, Type};

/// Bytes of the largest message of an answer: the kernel fills its dumps up to 32 KiB.
const ANSWER_BYTES: usize = 64 << 10;

/// The routing table that is looked at without any rule of ours.
pub const TABLE_MAIN: u32 = 254;

/// By which `ip route` and `ip rule` tell what is ours (`proto 199`): a number that iproute2's `rt_protos` gives to nobody.
pub const PROTOCOL: u8 = 199;

/// A connection to the kernel's tables.
pub struct Netlink {
    socket: Socket,
    sequence: u32,
    answer: Box<[u8]>,
}

impl Netlink {
    /// Connects, to the network namespace of this thread.
    ///
    /// # Errors
    /// The kernel's.
    pub fn open() -> io::Result<Self> {
        let (domain, route) = (Domain::from(libc::AF_NETLINK), Protocol::from(libc::NETLINK_ROUTE));
        let socket = Socket::new(domain, Type::RAW, Some(route))?;
        Ok(Self { socket, sequence: 0, answer: vec![0; ANSWER_BYTES].into() })
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
            if let Some(end) = read_answer(&self.answer[..len], self.sequence, each) {
                return end;
            }
        }
    }

    /// Gives interface `index` an address, with the on-link prefix that it names.
    ///
    /// # Errors
    /// The kernel's.
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
    /// The kernel's.
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

    /// The addresses of all interfaces.
    ///
    /// # Errors
    /// The kernel's.
    pub fn addresses(&mut self) -> io::Result<Vec<Address>> {
        let mut found = Vec::new();
        self.dump(RouteNetlinkMessage::GetAddress(AddressMessage::default()), &mut |message| {
            if let RouteNetlinkMessage::NewAddress(message) = message {
                found.extend(Address::read(&message));
            }
        })?;
        Ok(found)
    }

    /// The interface of this name, or of this index; `None` when there is none.
    ///
    /// # Errors
    /// The kernel's.
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
    /// The kernel's: `AlreadyExists`.
    pub fn add_route(&mut self, route: &Route, beside: bool) -> io::Result<()> {
        let flags = if beside { NLM_F_CREATE } else { NLM_F_CREATE | NLM_F_EXCL };
        self.change(RouteNetlinkMessage::NewRoute(route.message()), flags)
    }

    /// Changes the MTU of a route that was added.
    ///
    /// # Errors
    /// The kernel's.
    pub fn replace_route(&mut self, route: &Route) -> io::Result<()> {
        self.change(RouteNetlinkMessage::NewRoute(route.message()), NLM_F_CREATE | NLM_F_REPLACE)
    }

    /// Removes a route of ours, whatever its MTU is.
    ///
    /// # Errors
    /// The kernel's: ESRCH when there is none of ours.
    pub fn remove_route(&mut self, route: &Route) -> io::Result<()> {
        let route = Route { mtu: None, ..*route };
        self.change(RouteNetlinkMessage::DelRoute(route.message()), 0)
    }

    /// Which interface has a route for exactly `prefix` in `table`, if any but `except` has.
    ///
    /// # Errors
    /// The kernel's.
    pub fn holder(&mut self, prefix: IpNet, table: u32, except: u32) -> io::Result<Option<u32>> {
        let mut holder = None;
        self.routes(family(prefix.addr()), &mut |(other, its_table, index)| {
            if (other, its_table) == (prefix, table) && index != except {
                holder = Some(index);
            }
        })?;
        Ok(holder)
    }

    /// Whether `table` has no route of the family of `any`.
    ///
    /// # Errors
    /// The kernel's.
    pub fn is_empty(&mut self, table: u32, any: IpAddr) -> io::Result<bool> {
        let mut empty = true;
        self.routes(family(any), &mut |(_, its_table, _)| empty &= its_table != table)?;
        Ok(empty)
    }

    /// Lists prefix, table and interface of the routes of one family, as far as they have one.
    fn routes(&mut self, family: AddressFamily, each: &mut dyn FnMut((IpNet, u32, u32))) -> io::Result<()> {
        let mut message = RouteMessage::default();
        message.header.address_family = family;
        self.dump(RouteNetlinkMessage::GetRoute(message), &mut |message| {
            if let RouteNetlinkMessage::NewRoute(message) = message
                && let Some(route) = read_route(&message)
            {
                each(route);
            }
        })
    }

    /// Adds a rule of ours.
    ///
    /// # Errors
    /// The kernel's: `AlreadyExists`.
    pub fn add_rule(&mut self, rule: &Rule) -> io::Result<()> {
        self.change(RouteNetlinkMessage::NewRule(rule.message()), NLM_F_CREATE | NLM_F_EXCL)
    }

    /// Removes the rules of ours with this family and priority; says how many there were.
    ///
    /// # Errors
    /// The kernel's.
    pub fn remove_rules(&mut self, family_of: IpAddr, priority: u32) -> io::Result<usize> {
        let mut message = RuleMessage::default();
        message.header.family = family(family_of);
        let mut ours = Vec::new();
        self.dump(RouteNetlinkMessage::GetRule(message), &mut |message| {
            if let RouteNetlinkMessage::NewRule(message) = message
                && message.attributes.contains(&RuleAttribute::Priority(priority))
                && message.attributes.contains(&RuleAttribute::Protocol(RouteProtocol::Other(PROTOCOL)))
            {
                ours.push(message);
            }
        })?;
        let count = ours.len();
        for rule in ours {
            self.change(RouteNetlinkMessage::DelRule(rule), 0)?;
        }
        Ok(count)
    }
}

/// An interface, to be asked for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Which<'a> {
    /// By its number.
    Index(u32),
    /// By its name.
    Name(&'a str),
}

/// An interface.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Link {
    /// Its name.
    pub name: String,
    /// Whether it is up.
    pub up: bool,
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
        let mut link = Self { up, ..Self::default() };
        for attribute in &message.attributes {
            if let LinkAttribute::IfName(name) = attribute {
                link.name.clone_from(name);
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

/// A route of ours.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Route {
    /// Where to.
    pub prefix: IpNet,
    /// In which table.
    pub table: u32,
    /// Through which interface.
    pub index: u32,
    /// The largest packet, in bytes; none: as the interface has it.
    pub mtu: Option<u16>,
    /// The metric, where the family's default is not meant: the lowest wins.
    pub metric: Option<u32>,
}

impl Route {
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

fn read_route(message: &RouteMessage) -> Option<(IpNet, u32, u32)> {
    let header = &message.header;
    let (mut table, mut index) = (u32::from(header.table), None);
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
            index = Some(*number);
        } else if let RouteAttribute::Destination(destination) = attribute {
            if let RouteAddress::Inet(v4) = destination {
                address = (*v4).into();
            } else if let RouteAddress::Inet6(v6) = destination {
                address = (*v6).into();
            }
        }
    }
    Some((IpNet::new(address, header.destination_prefix_length).ok()?, table, index.unwrap_or(0)))
}

/// A rule of ours.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Rule {
    /// An address of its family.
    pub family_of: IpAddr,
    /// When it is looked at: the lowest first. It tells our rules from one another.
    pub priority: u32,
    /// What it does.
    pub what: RuleKind,
}

/// What a rule of ours does.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RuleKind {
    /// Packets without `mark` look into `table`.
    Unmarked {
        /// That of the underlay's sockets.
        mark: u32,
        /// Ours.
        table: u32,
    },
    /// All packets look into the main table, except at its default route.
    MainButDefault,
}

impl Rule {
    fn message(&self) -> RuleMessage {
        let mut message = RuleMessage::default();
        message.header.family = family(self.family_of);
        message.header.action = RuleAction::ToTable;
        let attributes = &mut message.attributes;
        attributes.push(RuleAttribute::Priority(self.priority));
        attributes.push(RuleAttribute::Protocol(RouteProtocol::Other(PROTOCOL)));
        match self.what {
            RuleKind::Unmarked { mark, table } => {
                message.header.flags = RuleFlags::Invert;
                attributes.push(RuleAttribute::FwMark(mark));
                attributes.push(RuleAttribute::Table(table));
            }
            RuleKind::MainButDefault => {
                attributes.push(RuleAttribute::Table(TABLE_MAIN));
                attributes.push(RuleAttribute::SuppressPrefixLen(0));
            }
        }
        message
    }
}

/// What is to be changed of an interface.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct LinkChange {
    /// Bring it up.
    pub up: bool,
    /// Its MTU, in bytes.
    pub mtu: Option<u16>,
    /// Packets that wait in it, at most.
    pub queue_packets: Option<u32>,
}

/// An address of an interface.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Address {
    /// Whose it is.
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

/// Reads the messages of one answer; `Some` when it was the last.
fn read_answer(
    mut bytes: &[u8],
    sequence: u32,
    each: &mut dyn FnMut(RouteNetlinkMessage),
) -> Option<io::Result<()>> {
    /// Messages begin at multiples of this.
    const ALIGN: usize = 4;
    /// Bytes of the header.
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

fn family(address: IpAddr) -> AddressFamily {
    match address {
        IpAddr::V4(_) => AddressFamily::Inet,
        IpAddr::V6(_) => AddressFamily::Inet6,
    }
}
