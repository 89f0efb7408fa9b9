//! The capsules of connect-ip (RFC 9484 §4.7): addresses that are assigned or asked for, and routes.
//!
//! ```text
//!   ADDRESS_ASSIGN, ADDRESS_REQUEST:  request (i) | 4 or 6 (8) | address (32 or 128) | prefix length (8)   each
//!   ROUTE_ADVERTISEMENT:              4 or 6 (8) | first (32 or 128) | last (32 or 128) | protocol (8)     each
//! ```

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

use thiserror::Error;

use crate::{
    capsule::{self, ADDRESS_ASSIGN, ADDRESS_REQUEST, ROUTE_ADVERTISEMENT},
    varint,
};

/// An address of ADDRESS_ASSIGN or ADDRESS_REQUEST.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Address {
    /// The request that it answers; 0 in an assignment that nobody asked for.
    pub request: u64,
    /// The first address of the prefix; the unspecified one stands for any in a request, and for a refusal in an assignment.
    pub address: IpAddr,
    /// The length of the prefix.
    pub prefix_len: u8,
}

/// A range of ROUTE_ADVERTISEMENT.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Route {
    /// The first address.
    pub first: IpAddr,
    /// The last address, of the same family.
    pub last: IpAddr,
    /// The number of the one protocol that is meant; 0 for all. ICMP always is.
    pub protocol: u8,
}

/// Why a capsule is malformed: the request stream is to be aborted.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Error)]
pub enum BadCapsule {
    /// It ends within an entry.
    #[error("it ends within an entry")]
    Truncated,
    /// An address is neither of IPv4 nor of IPv6.
    #[error("an address of neither family")]
    Version,
    /// A prefix is longer than its address.
    #[error("a prefix longer than its address")]
    Length,
    /// An address has bits behind its prefix.
    #[error("bits behind a prefix")]
    HostBits,
    /// A request without an address, or with the number 0.
    #[error("a request for nothing, or without a number")]
    Request,
    /// Routes overlap, or are not in order.
    #[error("routes that overlap or are out of order")]
    Order,
    /// There are more entries than are read.
    #[error("too many entries")]
    TooMany,
}

/// Reads the value of an ADDRESS_ASSIGN with at most `most` addresses.
///
/// # Errors
///
/// Why it is malformed.
pub fn assigned(mut value: &[u8], most: usize) -> Result<Vec<Address>, BadCapsule> {
    let mut addresses = Vec::new();
    while !value.is_empty() {
        if addresses.len() == most {
            return Err(BadCapsule::TooMany);
        }
        let request = varint::take(&mut value).ok_or(BadCapsule::Truncated)?;
        let is_ipv4 = take_version(&mut value)?;
        let address = take_address(&mut value, is_ipv4)?;
        let prefix_len = take_byte(&mut value)?;
        let (bits, width) = match address {
            IpAddr::V4(address) => (u128::from(address.to_bits()) << 96, 32),
            IpAddr::V6(address) => (address.to_bits(), 128),
        };
        if prefix_len > width {
            return Err(BadCapsule::Length);
        }
        if bits.checked_shl(prefix_len.into()).is_some_and(|behind| behind != 0) {
            return Err(BadCapsule::HostBits);
        }
        addresses.push(Address { request, address, prefix_len });
    }
    Ok(addresses)
}

/// Reads the value of an ADDRESS_REQUEST with at most `most` addresses.
///
/// # Errors
///
/// Why it is malformed.
pub fn requested(value: &[u8], most: usize) -> Result<Vec<Address>, BadCapsule> {
    let addresses = assigned(value, most)?;
    let is_right = !addresses.is_empty() && addresses.iter().all(|address| address.request > 0);
    if is_right { Ok(addresses) } else { Err(BadCapsule::Request) }
}

/// Reads the value of a ROUTE_ADVERTISEMENT with at most `most` ranges.
///
/// # Errors
///
/// Why it is malformed.
pub fn routes(mut value: &[u8], most: usize) -> Result<Vec<Route>, BadCapsule> {
    let mut routes: Vec<Route> = Vec::new();
    while !value.is_empty() {
        if routes.len() == most {
            return Err(BadCapsule::TooMany);
        }
        let is_ipv4 = take_version(&mut value)?;
        let first = take_address(&mut value, is_ipv4)?;
        let last = take_address(&mut value, is_ipv4)?;
        let route = Route { first, last, protocol: take_byte(&mut value)? };
        let follows = routes.last().is_none_or(|before| {
            let key = |route: &Route| (route.first.is_ipv6(), route.protocol);
            key(before) < key(&route) || key(before) == key(&route) && before.last < first
        });
        if first > last || !follows {
            return Err(BadCapsule::Order);
        }
        routes.push(route);
    }
    Ok(routes)
}

/// Appends an ADDRESS_ASSIGN of all addresses that are assigned from now on.
pub fn put_assigned(out: &mut Vec<u8>, addresses: &[Address]) {
    capsule::put(out, ADDRESS_ASSIGN, &value_of(addresses));
}

/// Appends an ADDRESS_REQUEST, as a client does.
pub fn put_requested(out: &mut Vec<u8>, addresses: &[Address]) {
    capsule::put(out, ADDRESS_REQUEST, &value_of(addresses));
}

fn value_of(addresses: &[Address]) -> Vec<u8> {
    let mut value = Vec::new();
    for Address { request, address, prefix_len } in addresses {
        varint::put(&mut value, *request);
        put_version(&mut value, *address);
        put_address(&mut value, *address);
        value.push(*prefix_len);
    }
    value
}

/// Appends a ROUTE_ADVERTISEMENT of `routes`, which are in the order of family, protocol and address.
pub fn put_routes(out: &mut Vec<u8>, routes: &[Route]) {
    let mut value = Vec::new();
    for Route { first, last, protocol } in routes {
        put_version(&mut value, *first);
        put_address(&mut value, *first);
        put_address(&mut value, *last);
        value.push(*protocol);
    }
    capsule::put(out, ROUTE_ADVERTISEMENT, &value);
}

fn put_version(out: &mut Vec<u8>, address: IpAddr) {
    out.push(if address.is_ipv4() { 4 } else { 6 });
}

fn put_address(out: &mut Vec<u8>, address: IpAddr) {
    match address {
        IpAddr::V4(address) => out.extend_from_slice(&address.octets()),
        IpAddr::V6(address) => out.extend_from_slice(&address.octets()),
    }
}

fn take_byte(value: &mut &[u8]) -> Result<u8, BadCapsule> {
    let (byte, rest) = value.split_first().ok_or(BadCapsule::Truncated)?;
    *value = rest;
    Ok(*byte)
}

/// Whether an address of IPv4 follows.
fn take_version(value: &mut &[u8]) -> Result<bool, BadCapsule> {
    match take_byte(value)? {
        4 => Ok(true),
        6 => Ok(false),
        _ => Err(BadCapsule::Version),
    }
}

fn take_address(value: &mut &[u8], is_ipv4: bool) -> Result<IpAddr, BadCapsule> {
    let (address, rest): (IpAddr, _) = if is_ipv4 {
        let (octets, rest) = value.split_first_chunk::<4>().ok_or(BadCapsule::Truncated)?;
        (Ipv4Addr::from(*octets).into(), rest)
    } else {
        let (octets, rest) = value.split_first_chunk::<16>().ok_or(BadCapsule::Truncated)?;
        (Ipv6Addr::from(*octets).into(), rest)
    };
    *value = rest;
    Ok(address)
}

/// The property for the fuzz target: takes `input` as the number of entries that are read, and as the value of each capsule.
///
/// What is read reads the same when it is written again, in order and within its bounds.
#[cfg(any(test, feature = "fuzzing"))]
#[doc(hidden)]
pub fn ip_capsules(input: &[u8]) {
    use crate::capsule::{Capsule, CapsuleReader};

    let value_in = |written: Vec<u8>| {
        let mut written = written.into();
        match CapsuleReader::new(1 << 30).take(&mut written) {
            Some(Capsule::Whole { value, .. }) => value,
            other => panic!("a capsule of ours is read as {other:?}"),
        }
    };
    let Some((&most, value)) = input.split_first() else { return };
    let most = usize::from(most);
    let mut written = Vec::new();
    if let Ok(addresses) = assigned(value, most) {
        assert!(addresses.len() <= most);
        put_assigned(&mut written, &addresses);
        assert_eq!(assigned(&value_in(std::mem::take(&mut written)), most), Ok(addresses));
    }
    if let Ok(addresses) = requested(value, most) {
        assert!(!addresses.is_empty() && assigned(value, most).as_ref() == Ok(&addresses));
        put_requested(&mut written, &addresses);
        assert_eq!(requested(&value_in(std::mem::take(&mut written)), most), Ok(addresses));
    }
    if let Ok(ranges) = routes(value, most) {
        assert!(ranges.len() <= most && ranges.iter().all(|range| range.first <= range.last));
        put_routes(&mut written, &ranges);
        assert_eq!(value_in(written), value, "routes have one form");
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn address(request: u64, address: &str, prefix_len: u8) -> Address {
        Address { request, address: address.parse().unwrap(), prefix_len }
    }

    fn route(first: &str, last: &str, protocol: u8) -> Route {
        Route { first: first.parse().unwrap(), last: last.parse().unwrap(), protocol }
    }

    #[test]
    fn the_bytes_are_those_of_the_rfc() {
        let mut out = Vec::new();
        put_assigned(&mut out, &[address(0, "192.0.2.11", 32), address(1, "2001:db8::", 64)]);
        let mut expected = vec![1, 7 + 19, 0, 4, 192, 0, 2, 11, 32, 1, 6, 0x20, 1, 0x0d, 0xb8];
        expected.extend([0; 12]);
        expected.push(64);
        assert_eq!(out, expected);
        out.clear();
        put_routes(&mut out, &[route("0.0.0.0", "192.168.1.255", 0)]);
        assert_eq!(out, [3, 10, 4, 0, 0, 0, 0, 192, 168, 1, 255, 0]);
        assert_eq!(routes(&out[2..], 1), Ok(vec![route("0.0.0.0", "192.168.1.255", 0)]));
    }

    #[test]
    fn malformed_ones() {
        assert_eq!(assigned(&[], 0), Ok(vec![]));
        assert_eq!(requested(&[], 9), Err(BadCapsule::Request));
        let cases: [(&[u8], BadCapsule); 7] = [
            (&[0], BadCapsule::Truncated),
            (&[0, 4, 10, 0, 0, 1], BadCapsule::Truncated),
            (&[0x40], BadCapsule::Truncated),
            (&[0, 5, 10, 0, 0, 1, 32], BadCapsule::Version),
            (&[0, 4, 10, 0, 0, 1, 33], BadCapsule::Length),
            (&[0, 4, 10, 0, 0, 1, 31], BadCapsule::HostBits),
            (&[0, 4, 10, 0, 0, 1, 0], BadCapsule::HostBits),
        ];
        for (value, error) in cases {
            assert_eq!(assigned(value, 9), Err(error), "{value:?}");
        }
        let any = [7, 4, 0, 0, 0, 0, 0];
        assert_eq!(requested(&any, 9), Ok(vec![address(7, "0.0.0.0", 0)]));
        assert_eq!(requested(&[0, 4, 0, 0, 0, 0, 0], 9), Err(BadCapsule::Request));
        assert_eq!(requested(&any.repeat(10), 9), Err(BadCapsule::TooMany));
        let order = [
            [route("10.0.0.2", "10.0.0.1", 0), route("10.0.0.3", "10.0.0.4", 0)],
            [route("10.0.0.1", "10.0.0.3", 0), route("10.0.0.3", "10.0.0.4", 0)],
            [route("10.0.0.1", "10.0.0.3", 6), route("10.0.0.5", "10.0.0.6", 0)],
            [route("::", "::1", 0), route("10.0.0.3", "10.0.0.4", 0)],
        ];
        for wrong in order {
            let mut out = Vec::new();
            put_routes(&mut out, &wrong);
            assert_eq!(routes(&out[2..], 9), Err(BadCapsule::Order), "{wrong:?}");
        }
        let mut right = Vec::new();
        put_routes(&mut right, &[route("10.0.0.9", "10.0.0.9", 0), route("10.0.0.1", "10.0.0.1", 6)]);
        assert!(routes(&right[2..], 2).is_ok());
        assert_eq!(routes(&right[2..], 1), Err(BadCapsule::TooMany));
    }

    proptest! {
        #[test]
        fn any_bytes_will_do(
            most: u8,
            entries in proptest::collection::vec(
                (0_u8..70, prop_oneof![Just(4_u8), Just(6), any::<u8>()], proptest::collection::vec(prop_oneof![Just(0_u8), any::<u8>()], 4..18), 0_u8..40),
                0..6,
            ),
            tail in proptest::collection::vec(any::<u8>(), 0..9),
        ) {
            let mut input = vec![most];
            for (request, version, bytes, length) in entries {
                input.push(request);
                input.push(version);
                input.extend(bytes);
                input.push(length);
            }
            input.extend(tail);
            ip_capsules(&input);
        }

        #[test]
        fn addresses_are_read_as_they_were_written(
            list in proptest::collection::vec((1_u64..varint::MAX, any::<u32>(), any::<u128>(), any::<bool>(), 0_u8..=32), 1..9)
        ) {
            let addresses: Vec<_> = list.into_iter().map(|(request, v4, v6, is_ipv4, prefix_len)| {
                let cut = u32::MAX.checked_shl(32 - u32::from(prefix_len)).unwrap_or(0);
                let address = if is_ipv4 {
                    Ipv4Addr::from_bits(v4 & cut).into()
                } else {
                    Ipv6Addr::from_bits(v6 & u128::from(cut) << 96).into()
                };
                Address { request, address, prefix_len }
            }).collect();
            let value = value_of(&addresses);
            prop_assert_eq!(assigned(&value, 9), Ok(addresses.clone()));
            prop_assert_eq!(requested(&value, 9), Ok(addresses));
        }
    }
}
