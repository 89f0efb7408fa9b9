//! Addresses, routes and rules of the kernel, over a blocking rtnetlink socket. For the control plane only.

use std::{
    io::{self, Read},
    net::IpAddr,
};

use ipnet::IpNet;
use netlink_packet_core::{
    NLM_F_ACK, NLM_F_CREATE, NLM_F_DUMP, NLM_F_EXCL, NLM_F_REQUEST, NetlinkHeader, NetlinkMessage,
    NetlinkPayload,
};
use netlink_packet_route::{
    AddressFamily, RouteNetlinkMessage,
    address::{AddressAttribute, AddressFlags, AddressMessage},
    link::{LinkAttribute, LinkFlags, LinkMessage},
};
use socket2::{Domain, Protocol, Socket, Type};

/// Bytes of the largest message of an answer: the kernel fills its dumps up to 32 KiB.
const ANSWER_BYTES: usize = 64 << 10;

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
