//! ICMP errors about packets that the tunnel cannot carry.
//!
//! They come from the destination of the packet, because the kernel takes one from our own address for a martian.

use std::{net::IpAddr, ops::Range};

use crate::{
    checksum,
    view::{Fragment, ICMP, ICMPV6, IPV4_HEADER, IPV6_HEADER, IpView},
};

/// Bytes of the longest answer: the smallest MTU of IPv6, which no ICMPv6 error exceeds (RFC 4443 §2.4 (c)).
pub const MOST_ANSWER: usize = 1280;

/// Bytes of the longest ICMPv4 error (RFC 1812 §4.3.2.3).
const MOST_ANSWER_V4: usize = 576;

const ICMP_HEADER: usize = 8;
const HOP_LIMIT: u8 = 64;
/// Precedence 6, internetwork control: what routers give their ICMP errors (RFC 1812 §4.3.2.5).
const CONTROL: u8 = 0xc0;

/// Type, code and the four bytes after the checksum.
struct Error {
    kind: u8,
    code: u8,
    rest: [u8; 4],
}

/// An ICMPv4 "fragmentation needed" (RFC 1191) or ICMPv6 "packet too big" (RFC 4443 §3.2) about `packet`, from its
/// destination to its source; returns its bytes.
///
/// `None` where none may be sent (RFC 1122 §3.2.2, RFC 4443 §2.4 (e)): about ICMP errors, about fragments without the
/// upper layer's header, to or from addresses that are not one host's; and of IPv4 without DF.
#[must_use]
pub fn too_big(packet: &[u8], view: &IpView, mtu: u16, out: &mut [u8; MOST_ANSWER]) -> Option<usize> {
    let [high, low] = mtu.to_be_bytes();
    let rest = [0, 0, high, low];
    let error =
        if view.is_ipv6() { Error { kind: 2, code: 0, rest } } else { Error { kind: 3, code: 4, rest } };
    if view.dont_fragment { answer(packet, view, &error, out) } else { None }
}

/// An ICMPv4 "host unreachable" or ICMPv6 "no route to destination" about `packet`, likewise.
#[must_use]
pub fn unreachable(packet: &[u8], view: &IpView, out: &mut [u8; MOST_ANSWER]) -> Option<usize> {
    let (kind, code) = if view.is_ipv6() { (1, 0) } else { (3, 1) };
    answer(packet, view, &Error { kind, code, rest: [0; 4] }, out)
}

/// An ICMPv4 "communication administratively prohibited" (RFC 1812 §5.2.7.1) or its counterpart of ICMPv6 (RFC 4443 §3.1) about `packet`,
/// likewise.
#[must_use]
pub fn prohibited(packet: &[u8], view: &IpView, out: &mut [u8; MOST_ANSWER]) -> Option<usize> {
    let (kind, code) = if view.is_ipv6() { (1, 1) } else { (3, 13) };
    answer(packet, view, &Error { kind, code, rest: [0; 4] }, out)
}

fn answer(packet: &[u8], view: &IpView, error: &Error, out: &mut [u8; MOST_ANSWER]) -> Option<usize> {
    if !may_answer(packet, view) {
        return None;
    }
    let (header, most) = match view.is_ipv6() {
        false => (IPV4_HEADER, MOST_ANSWER_V4),
        true => (IPV6_HEADER, MOST_ANSWER),
    };
    let quote = packet.get(..view.len.min(packet.len()).min(most - header - ICMP_HEADER))?;
    let len = header + ICMP_HEADER + quote.len();
    let message = &mut out[header..len];
    message[..4].copy_from_slice(&[error.kind, error.code, 0, 0]);
    message[4..ICMP_HEADER].copy_from_slice(&error.rest);
    message[ICMP_HEADER..].copy_from_slice(quote);
    let mut total = u64::from(checksum::sum(message));
    let [high, low] = (len as u16).to_be_bytes();
    match (view.destination, view.source) {
        (IpAddr::V4(from), IpAddr::V4(to)) => {
            out[..10].copy_from_slice(&[0x45, CONTROL, high, low, 0, 0, 0x40, 0, HOP_LIMIT, ICMP]);
            out[10..12].fill(0);
            out[12..16].copy_from_slice(&from.octets());
            out[16..20].copy_from_slice(&to.octets());
            let right = !checksum::sum(&out[..IPV4_HEADER]);
            out[10..12].copy_from_slice(&right.to_be_bytes());
        }
        (IpAddr::V6(from), IpAddr::V6(to)) => {
            let payload = (len - IPV6_HEADER) as u16;
            let [high, low] = payload.to_be_bytes();
            out[..8].copy_from_slice(&[0x60 | CONTROL >> 4, 0, 0, 0, high, low, ICMPV6, HOP_LIMIT]);
            out[8..24].copy_from_slice(&from.octets());
            out[24..40].copy_from_slice(&to.octets());
            total += u64::from(checksum::pseudo_header(view.destination, view.source, ICMPV6));
            total += u64::from(payload);
        }
        (IpAddr::V4(_), IpAddr::V6(_)) | (IpAddr::V6(_), IpAddr::V4(_)) => return None,
    }
    out[header + 2..header + 4].copy_from_slice(&(!checksum::fold(total)).to_be_bytes());
    Some(len)
}

/// The addresses of the packet that an ICMP error is about.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Quoted {
    /// Where that packet came from, which is where the error goes.
    pub source: IpAddr,
    /// The destination of the packet that is quoted.
    pub destination: IpAddr,
}

/// The packet that `packet` quotes, if that is a whole ICMP error of a router (unreachable, too big, time exceeded, parameter
/// problem) with at least 8 bytes of the transport header, by which its receiver finds the flow.
#[must_use]
pub fn quoted(packet: &[u8], view: &IpView) -> Option<Quoted> {
    let message = packet.get(view.transport_at..view.len)?;
    let (kind, quote) = (*message.first()?, message.get(ICMP_HEADER..)?);
    let octets = |range: Range<usize>| quote.get(range);
    if view.fragment != Fragment::No {
        return None;
    }
    match (view.protocol, kind, quote.first()? >> 4) {
        (ICMP, 3 | 11 | 12, 4) => {
            let header = usize::from(quote.first()? & 0x0f) * 4;
            if header < IPV4_HEADER || quote.len() < header + LEAST_QUOTE {
                return None;
            }
            let address = |at: usize| Some(<[u8; 4]>::try_from(octets(at..at + 4)?).ok()?.into());
            Some(Quoted { source: address(12)?, destination: address(16)? })
        }
        (ICMPV6, 1..=4, 6) if quote.len() >= IPV6_HEADER + LEAST_QUOTE => {
            let address = |at: usize| Some(<[u8; 16]>::try_from(octets(at..at + 16)?).ok()?.into());
            Some(Quoted { source: address(8)?, destination: address(24)? })
        }
        _ => None,
    }
}

/// Bytes of the transport header that an ICMP error quotes at least (RFC 792).
const LEAST_QUOTE: usize = 8;

fn may_answer(packet: &[u8], view: &IpView) -> bool {
    let is_error = |kind: u8| match view.protocol {
        // Queries and their answers; an unknown type counts as an error (RFC 1122 §3.2.2 names the known ones).
        ICMP => !matches!(kind, 0 | 8 | 9 | 10 | 13..=18),
        // Errors, and redirects.
        ICMPV6 => kind < 128 || kind == 137,
        _ => false,
    };
    let about_error = matches!(view.protocol, ICMP | ICMPV6)
        && packet.get(view.transport_at).is_none_or(|kind| is_error(*kind));
    view.fragment != Fragment::Later && !about_error && is_host(view.source) && is_host(view.destination)
}

/// Whether `address` is one host's, as far as it shows.
fn is_host(address: IpAddr) -> bool {
    match address {
        // 240.0.0.0/4 is reserved, and its last address is the broadcast.
        IpAddr::V4(address) => {
            let first = address.octets()[0];
            first != 0 && first != 127 && first < 224
        }
        IpAddr::V6(address) => !(address.is_unspecified() || address.is_multicast() || address.is_loopback()),
    }
}

#[cfg(test)]
#[path = "icmp_tests.rs"]
mod tests;
