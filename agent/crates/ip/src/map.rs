//! Networks under other addresses: a peer's network as this host sees it, and as it is there. One to one, without state.
//!
//! ```text
//!   to the peer     destination   here → there       quoted in an ICMP error   source        here → there
//!   from the peer   source        there → here       quoted in an ICMP error   destination   there → here
//! ```
//!
//! What covers a changed address is changed by the difference (RFC 1624): the header checksum of IPv4, and the checksum of an upper
//! layer with a pseudo-header, complete or partial, also in a fragment. A wrong checksum stays as wrong as it was. Of packets inside of
//! a tunnel only the outer addresses change, and an address that a payload names is left as it is.

use std::{
    fmt,
    net::{IpAddr, Ipv6Addr},
};

use ipnet::IpNet;

use crate::{
    checksum,
    view::{DCCP, Fragment, ICMP, ICMPV6, IpView, TCP, UDP, UDP_LITE},
};

const ICMP_HEADER: usize = 8;

/// A network under two prefixes of the same length.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Mapping {
    /// The network as this host sees it.
    pub here: IpNet,
    /// The same network as it is at the peer.
    pub there: IpNet,
}

impl fmt::Display for Mapping {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} = {}", self.here, self.there)
    }
}

/// The mappings of one peer, ready to be looked up.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct AddressMap {
    to_there: Side,
    to_here: Side,
}

/// The packet's source is an address that this host knows under another one, so the packet is not what it says.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Hidden;

impl AddressMap {
    /// `None` without mappings. Prefixes of one side that overlap, or of different lengths, are the caller's mistake: what they lead to is
    /// one of the addresses that they name.
    #[must_use]
    pub fn new(mappings: &[Mapping]) -> Option<Self> {
        let side = |of: fn(&Mapping) -> [IpNet; 2]| Side::new(mappings.iter().map(of));
        (!mappings.is_empty()).then(|| Self {
            to_there: side(|mapping| [mapping.here, mapping.there]),
            to_here: side(|mapping| [mapping.there, mapping.here]),
        })
    }

    /// Changes a packet or super-packet that goes to the peer; `partial`: its L4 checksum is the pseudo-header's sum. Returns what its
    /// headers say then.
    pub fn to_peer(&self, packet: &mut [u8], view: &IpView, partial: bool) -> IpView {
        let new = self.to_there.look_up(view.destination);
        let quoted = map_quoted(packet, view, Role::Source, &self.to_there);
        map_outer(packet, view, Role::Destination, new, quoted, partial);
        IpView { destination: new.unwrap_or(view.destination), ..*view }
    }

    /// Changes a packet that came from the peer, likewise.
    ///
    /// # Errors
    /// Its source is an address that hosts of the peer have here, and not there. Nothing was changed.
    pub fn from_peer(&self, packet: &mut [u8], view: &IpView, partial: bool) -> Result<IpView, Hidden> {
        let new = self.to_here.look_up(view.source);
        if new.is_none() && self.to_there.look_up(view.source).is_some() {
            return Err(Hidden);
        }
        let quoted = map_quoted(packet, view, Role::Destination, &self.to_here);
        map_outer(packet, view, Role::Source, new, quoted, partial);
        Ok(IpView { source: new.unwrap_or(view.source), ..*view })
    }
}

/// Prefixes in order, and where each leads to.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Side(Vec<Row>);

/// The addresses from `first` to `last`, of which the first one becomes `to`. An IPv4 address is a number as IPv6 maps it, which no packet
/// has as an IPv6 address.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Row {
    first: u128,
    last: u128,
    to: u128,
}

impl Side {
    fn new(pairs: impl Iterator<Item = [IpNet; 2]>) -> Self {
        let row = |[from, to]: [IpNet; 2]| {
            let first = number(from.network());
            let behind = u32::from(from.max_prefix_len() - from.prefix_len());
            let span = u128::MAX.checked_shr(128 - behind).unwrap_or(0);
            Row { first, last: first | span, to: number(to.network()) }
        };
        let mut rows: Vec<Row> = pairs.map(row).collect();
        rows.sort_by_key(|row| row.first);
        Self(rows)
    }

    fn look_up(&self, address: IpAddr) -> Option<IpAddr> {
        let wanted = number(address);
        let behind = self.0.partition_point(|row| row.first <= wanted);
        let row = self.0.get(behind.checked_sub(1)?).filter(|row| wanted <= row.last)?;
        let new = Ipv6Addr::from(row.to.wrapping_add(wanted - row.first));
        Some(match (address, new.to_ipv4_mapped()) {
            (IpAddr::V4(_), Some(new)) => IpAddr::V4(new),
            (IpAddr::V4(_) | IpAddr::V6(_), _) => IpAddr::V6(new),
        })
        .filter(|new| new.is_ipv4() == address.is_ipv4())
    }
}

fn number(address: IpAddr) -> u128 {
    match address {
        IpAddr::V4(address) => address.to_ipv6_mapped().into(),
        IpAddr::V6(address) => address.into(),
    }
}

/// Which of the two addresses of a header is meant.
#[derive(Clone, Copy, Debug)]
enum Role {
    Source,
    Destination,
}

impl Role {
    /// The index of the address within its header.
    fn at(self, is_ipv6: bool) -> usize {
        match (self, is_ipv6) {
            (Self::Source, false) => 12,
            (Self::Destination, false) => 16,
            (Self::Source, true) => 8,
            (Self::Destination, true) => 24,
        }
    }
}

/// By how much a sum of words becomes more, as such a sum.
#[derive(Clone, Copy, Debug, Default)]
struct Difference(u16);

impl Difference {
    fn between(old: u16, new: u16) -> Self {
        Self(checksum::fold(u64::from(!old) + u64::from(new)))
    }

    fn and(self, more: Self) -> Self {
        Self(checksum::fold(u64::from(self.0) + u64::from(more.0)))
    }

    /// Of two addresses of one kind.
    fn of_addresses(old: IpAddr, new: IpAddr) -> Self {
        let sum = |address: IpAddr| match address {
            IpAddr::V4(address) => checksum::sum(&address.octets()),
            IpAddr::V6(address) => checksum::sum(&address.octets()),
        };
        Self::between(sum(old), sum(new))
    }

    /// The field of a checksum that covers what became more by this. `complete` makes of a sum what stands there.
    fn applied(self, field: u16, complete: fn(u16) -> u16) -> u16 {
        complete(checksum::fold(u64::from(!field) + u64::from(self.0)))
    }
}

/// The complement, as a checksum that is never 0xffff: no sum over a header that has a version or a protocol in it is 0.
fn complement(sum: u16) -> u16 {
    match !sum {
        0xffff => 0,
        checksum => checksum,
    }
}

/// Changes one address of `packet` to `new`, its header's checksum and that of its upper layer, of which `quoted` has changed besides.
fn map_outer(
    packet: &mut [u8],
    view: &IpView,
    role: Role,
    new: Option<IpAddr>,
    quoted: Option<Difference>,
    partial: bool,
) {
    if new.is_none() && quoted.is_none() {
        return;
    }
    let old = match role {
        Role::Source => view.source,
        Role::Destination => view.destination,
    };
    let address = new.map(|new| {
        put_address(packet, role, new);
        Difference::of_addresses(old, new)
    });
    let pseudo = address.unwrap_or_default();
    let (behind, at) = match (view.protocol, l4_checksum(packet, view)) {
        // ICMP for IPv4 has no pseudo-header.
        (ICMP, _) if !view.is_ipv6() => (quoted.unwrap_or_default(), quoted.map(|_| view.transport_at + 2)),
        (_, at) => (pseudo.and(quoted.unwrap_or_default()), at),
    };
    if let Some(at) = at {
        change_l4(packet, view, at, behind, partial);
    }
}

/// Changes the L4 checksum at `at`, if there is one and it lies within the packet.
fn change_l4(
    packet: &mut [u8],
    view: &IpView,
    at: usize,
    by: Difference,
    partial: bool,
) -> Option<Difference> {
    let field = packet.get_mut(..view.len)?.get_mut(at..)?.first_chunk_mut::<2>()?;
    let old = u16::from_be_bytes(*field);
    let new = match view.protocol {
        // A partial one is a sum.
        _ if partial => checksum::fold(u64::from(old) + u64::from(by.0)),
        // The sender has left it out (RFC 768, RFC 6935).
        UDP if old == 0 => return None,
        UDP | UDP_LITE => by.applied(old, checksum::finish),
        _ => by.applied(old, complement),
    };
    *field = new.to_be_bytes();
    Some(Difference::between(old, new))
}

/// The index of the checksum of an upper layer with a pseudo-header. In a later fragment it is there if the first one ended before it.
fn l4_checksum(packet: &[u8], view: &IpView) -> Option<usize> {
    let offset = match view.protocol {
        TCP => 16,
        UDP | UDP_LITE | DCCP => 6,
        ICMPV6 if view.is_ipv6() => 2,
        _ => return None,
    };
    let before = match view.fragment {
        Fragment::No | Fragment::First => 0,
        Fragment::Later if view.is_ipv6() => {
            let header = packet.get(view.transport_at.checked_sub(8)?..)?.first_chunk::<4>()?;
            usize::from(u16::from_be_bytes([header[2], header[3]]) & 0xfff8)
        }
        Fragment::Later => {
            let header = packet.first_chunk::<8>()?;
            usize::from(u16::from_be_bytes([header[6], header[7]]) & 0x1fff) * 8
        }
    };
    Some(view.transport_at + usize::checked_sub(offset, before)?)
}

/// Writes an address and what the header's checksum becomes by it; returns by how much the header's sum became more, as far as `header`
/// reaches.
fn put_address(header: &mut [u8], role: Role, new: IpAddr) -> Difference {
    let at = role.at(new.is_ipv6());
    match new {
        IpAddr::V4(new) => {
            let Some(field) = header.get_mut(at..).and_then(|bytes| bytes.first_chunk_mut::<4>()) else {
                return Difference::default();
            };
            let by = Difference::between(checksum::sum(field), checksum::sum(&new.octets()));
            *field = new.octets();
            let Some(field) = header.get_mut(10..).and_then(|bytes| bytes.first_chunk_mut::<2>()) else {
                return by;
            };
            let old = u16::from_be_bytes(*field);
            let checksum = by.applied(old, complement);
            *field = checksum.to_be_bytes();
            by.and(Difference::between(old, checksum))
        }
        IpAddr::V6(new) => {
            let Some(field) = header.get_mut(at..).and_then(|bytes| bytes.first_chunk_mut::<16>()) else {
                return Difference::default();
            };
            let by = Difference::between(checksum::sum(field), checksum::sum(&new.octets()));
            *field = new.octets();
            by
        }
    }
}

/// Changes an address of the packet that an ICMP error quotes, and its checksums; returns by how much the sum of the quote became more.
fn map_quoted(packet: &mut [u8], view: &IpView, role: Role, side: &Side) -> Option<Difference> {
    if !matches!(view.protocol, ICMP | ICMPV6) || view.fragment == Fragment::Later {
        return None;
    }
    let message = packet.get_mut(view.transport_at..view.len)?;
    let kind = *message.first()?;
    let quote = message.get_mut(ICMP_HEADER..)?;
    let old = match (view.is_ipv6(), view.protocol, kind, quote.first()? >> 4) {
        // Unreachable, source quench, redirect, time exceeded, parameter problem.
        (false, ICMP, 3..=5 | 11 | 12, 4) => {
            IpAddr::from(*quote.get(role.at(false)..20)?.first_chunk::<4>()?)
        }
        // Unreachable, too big, time exceeded, parameter problem.
        (true, ICMPV6, 1..=4, 6) => IpAddr::from(*quote.get(role.at(true)..40)?.first_chunk::<16>()?),
        _ => return None,
    };
    let new = side.look_up(old)?;
    // It is rarely there as a whole, which its length says.
    let quoted = IpView::super_packet(quote).ok();
    let header = put_address(quote, role, new);
    let by = Difference::of_addresses(old, new);
    let behind = quoted.and_then(|view| change_l4(quote, &view, l4_checksum(quote, &view)?, by, false));
    Some(header.and(behind.unwrap_or_default()))
}

#[cfg(any(test, feature = "fuzzing"))]
#[doc(hidden)]
#[path = "map_properties.rs"]
pub mod properties;

#[cfg(test)]
#[path = "map_tests.rs"]
mod tests;
