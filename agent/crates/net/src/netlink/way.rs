//! The way that the kernel's packets to an address take.

use std::{io, net::SocketAddr};

use netlink_packet_core::NLM_F_ACK;
use netlink_packet_route::{
    RouteNetlinkMessage,
    route::{RouteAttribute, RouteMessage},
};

use crate::netlink::{Netlink, Which, family};

impl Netlink {
    /// The MTU of the interface by which packets to `to` leave that have the firewall mark `mark`, in bytes; `None` if there is no way,
    /// or if the interface is gone. What a path's ICMP messages say is not in it.
    ///
    /// # Errors
    /// As [`Netlink::addresses`].
    pub fn mtu_towards(&mut self, to: SocketAddr, mark: u32) -> io::Result<Option<u32>> {
        let mut message = RouteMessage::default();
        message.header.address_family = family(to.ip());
        message.header.destination_prefix_length = if to.is_ipv4() { 32 } else { 128 };
        let attributes = &mut message.attributes;
        attributes.push(RouteAttribute::Destination(to.ip().into()));
        attributes.extend((mark != 0).then_some(RouteAttribute::Mark(mark)));
        if let SocketAddr::V6(to) = to
            && to.scope_id() != 0
        {
            attributes.push(RouteAttribute::Oif(to.scope_id()));
        }
        let mut index = None;
        let asked = self.request(RouteNetlinkMessage::GetRoute(message), NLM_F_ACK, &mut |message| {
            if let RouteNetlinkMessage::NewRoute(message) = message {
                index = message.attributes.iter().find_map(|attribute| {
                    if let RouteAttribute::Oif(index) = attribute { Some(*index) } else { None }
                });
            }
        });
        match asked {
            Ok(()) => {}
            Err(error) if is_no_way(&error) => return Ok(None),
            Err(error) => return Err(error),
        }
        let Some(index) = index else { return Ok(None) };
        Ok(self.link(Which::Index(index))?.map(|link| link.mtu))
    }
}

/// Whether an error says that no route leads there, or that it is one that drops packets.
fn is_no_way(error: &io::Error) -> bool {
    matches!(
        error.raw_os_error(),
        Some(libc::ENETUNREACH | libc::EHOSTUNREACH | libc::EACCES | libc::EINVAL | libc::ENODEV)
    )
}
