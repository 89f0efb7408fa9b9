//! What holds for any packet that a map changes.

use std::net::IpAddr;

use super::*;
use crate::{
    model,
    view::{IPV4_HEADER, IPV6_HEADER},
};

/// A map of the networks that the packets of [`model::Recipe`] come from and go to, and of networks beside them.
pub fn example() -> Vec<Mapping> {
    let mapping = |here: &str, there: &str| Mapping {
        here: here.parse().expect("a prefix"),
        there: there.parse().expect("a prefix"),
    };
    vec![
        mapping("fd00::/64", "2001:db8:5:6::/64"),
        mapping("10.9.1.0/24", "192.168.7.0/24"),
        mapping("10.9.0.0/25", "172.16.255.128/25"),
        mapping("192.0.2.7/32", "198.51.100.9/32"),
        mapping("fd01::/16", "fc01::/16"),
    ]
}

/// The same map the other way round.
pub fn reverse(mappings: &[Mapping]) -> Vec<Mapping> {
    mappings.iter().map(|mapping| Mapping { here: mapping.there, there: mapping.here }).collect()
}

/// Takes `input` as a packet behind a byte that says where it goes and whether its checksum is partial.
///
/// What its headers say afterwards is what was returned; only addresses and checksums are others; each checksum is as right as it was;
/// and the reverse map gives the packet back.
pub fn ip_map(input: &[u8]) {
    let Some((how, packet)) = input.split_first() else { return };
    let (to_peer, partial, super_packet) = (how & 1 == 0, how & 2 != 0, how & 4 != 0);
    let view = if super_packet { IpView::super_packet(packet) } else { IpView::parse(packet) };
    let Ok(view) = view else { return };
    let partial = partial && view.checksum().is_some();
    let map = AddressMap::new(&example()).expect("mappings");
    let mut changed = packet.to_vec();
    let returned = match to_peer {
        true => map.to_peer(&mut changed, &view, partial),
        false => match map.from_peer(&mut changed, &view, partial) {
            Ok(returned) => returned,
            Err(Hidden) => return assert_eq!(changed, packet),
        },
    };
    assert_eq!(changed.len(), packet.len());
    let read = if super_packet { IpView::super_packet(&changed) } else { IpView::parse(&changed) };
    assert_eq!(read, Ok(returned));
    let (one, other) = (Sums::of(packet, &view, partial), Sums::of(&changed, &returned, partial));
    assert_eq!(one, other, "the checksums are as right as they were");
    assert_eq!(masked(packet, &view), masked(&changed, &returned), "nothing else is another");

    let back = AddressMap::new(&reverse(&example())).expect("mappings");
    if to_peer {
        // An address that was left alone may be one that the reverse map knows.
        let ambiguous = |address: IpAddr| back.to_there.look_up(address).is_some();
        let quoted = quoted_addresses(packet, &view).is_some_and(|[source, _]| ambiguous(source));
        if !ambiguous(view.destination) && !quoted {
            back.to_peer(&mut changed, &returned, partial);
            assert!(same_but_for_zeros(&changed, packet, &view), "the way back");
        }
    }
}

/// How far checksums are from right, as numbers below 0xffff; 0: they are right.
#[derive(Debug, PartialEq, Eq)]
struct Sums {
    header: u16,
    /// `None` where it is missing, or not the whole of what it covers.
    l4: Option<u16>,
    quoted_header: Option<u16>,
}

impl Sums {
    fn of(packet: &[u8], view: &IpView, partial: bool) -> Self {
        let packet = &packet[..view.len];
        let header =
            if view.is_ipv6() { 0 } else { model::sum(&packet[..view.transport_at.max(IPV4_HEADER)], 0) };
        let quoted_header = (!view.is_ipv6() && quoted_addresses(packet, view).is_some()).then(|| {
            let quote = &packet[view.transport_at + ICMP_HEADER..];
            let header = usize::from(quote[0] & 0xf) * 4;
            model::sum(quote.get(..header).unwrap_or_default(), 0) % 0xffff
        });
        let behind = &packet[view.transport_at..];
        let whole = view.fragment == Fragment::No;
        let l4 = match (view.protocol, l4_checksum(packet, view)) {
            (ICMP, _) if !view.is_ipv6() && whole => Some(model::sum(behind, 0)),
            (protocol, Some(at)) if whole && at + 2 <= packet.len() => {
                let field = u16::from_be_bytes([packet[at], packet[at + 1]]);
                let pseudo = checksum::pseudo_header(view.source, view.destination, protocol);
                match protocol {
                    _ if partial => Some(model::sum(&(!pseudo).to_be_bytes(), field)),
                    UDP if field == 0 => None,
                    _ => Some(model::sum(behind, pseudo)),
                }
            }
            _ => None,
        };
        Self { header: header % 0xffff, l4: l4.map(|sum| sum % 0xffff), quoted_header }
    }
}

/// Source and destination of the packet that an ICMP error quotes.
fn quoted_addresses(packet: &[u8], view: &IpView) -> Option<[IpAddr; 2]> {
    let message = packet.get(view.transport_at..view.len)?;
    let (kind, quote) = (*message.first()?, message.get(ICMP_HEADER..)?);
    let version = quote.first()? >> 4;
    if view.fragment == Fragment::Later {
        return None;
    }
    match (view.is_ipv6(), view.protocol, kind, version) {
        (false, ICMP, 3 | 4 | 5 | 11 | 12, 4) if quote.len() >= IPV4_HEADER => {
            let address = |at: usize| IpAddr::from([quote[at], quote[at + 1], quote[at + 2], quote[at + 3]]);
            Some([address(12), address(16)])
        }
        (true, ICMPV6, 1..=4, 6) if quote.len() >= IPV6_HEADER => {
            let address = |at: usize| {
                let bytes: [u8; 16] = quote[at..at + 16].try_into().expect("sixteen bytes");
                IpAddr::from(bytes)
            };
            Some([address(8), address(24)])
        }
        _ => None,
    }
}

/// The packet with zeros in place of all that a map may change.
fn masked(packet: &[u8], view: &IpView) -> Vec<u8> {
    let mut masked = packet.to_vec();
    if quoted_addresses(packet, view).is_some() {
        let quote = &mut masked[view.transport_at + ICMP_HEADER..view.len];
        if let Ok(quoted) = IpView::super_packet(quote) {
            mask_l4(quote, &quoted);
        }
        mask_addresses(quote, view.is_ipv6());
        mask(&mut masked[..view.len], view.transport_at + 2, 2);
    }
    mask_l4(&mut masked, view);
    mask_addresses(&mut masked, view.is_ipv6());
    masked
}

fn mask_l4(packet: &mut [u8], view: &IpView) {
    if let Some(at) = l4_checksum(packet, view) {
        mask(&mut packet[..view.len], at, 2);
    }
}

fn mask_addresses(header: &mut [u8], is_ipv6: bool) {
    if is_ipv6 {
        mask(header, 8, 32);
    } else {
        mask(header, 10, 10);
    }
}

fn mask(bytes: &mut [u8], at: usize, len: usize) {
    if let Some(bytes) = bytes.get_mut(at..at + len) {
        bytes.fill(0);
    }
}

/// Whether two packets are equal, but that the checksums 0 and 0xffff are the same number.
fn same_but_for_zeros(one: &[u8], other: &[u8], view: &IpView) -> bool {
    let differ = one.chunks(2).zip(other.chunks(2)).filter(|(one, other)| one != other);
    let zeros = differ.clone().all(|(one, other)| {
        let is_zero = |word: &[u8]| matches!(word, [0, 0] | [0xff, 0xff]);
        is_zero(one) && is_zero(other)
    });
    zeros && differ.count() <= 4 && view.transport_at.is_multiple_of(2)
}
