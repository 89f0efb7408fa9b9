//! The MSS option of TCP: lowered to what fits into a tunnel (RFC 9293 §3.7.1).

use crate::{
    checksum,
    view::{Fragment, IPV4_HEADER, IPV6_HEADER, IpView, TCP},
};

const END: u8 = 0;
const NO_OPERATION: u8 = 1;
const MAXIMUM_SEGMENT_SIZE: u8 = 2;
const SYN: u8 = 0x02;
/// Bytes of a TCP header without options, which the option's value does not count either (RFC 6691).
const TCP_HEADER: usize = 20;

/// Lowers the MSS option of a TCP SYN to what fits into `mtu`, and keeps a complete checksum right; a partial one does not
/// cover it yet. True if it changed something.
///
/// It never raises the value and adds no option.
pub fn clamp(packet: &mut [u8], view: &IpView, mtu: u16, partial: bool) -> bool {
    if view.protocol != TCP || view.fragment != Fragment::No {
        return false;
    }
    let ip_header = if view.is_ipv6() { IPV6_HEADER } else { IPV4_HEADER };
    let Some(most) = mtu.checked_sub((ip_header + TCP_HEADER) as u16).filter(|most| *most > 0) else {
        return false;
    };
    let Some(segment) = packet.get_mut(view.transport_at..view.len) else { return false };
    let Some(at) = mss_at(segment) else { return false };
    let old = u16::from_be_bytes([segment[at], segment[at + 1]]);
    if old <= most {
        return false;
    }
    segment[at..at + 2].copy_from_slice(&most.to_be_bytes());
    if !partial {
        // At an odd index the two bytes belong to two words, in which they add up as if they were swapped.
        let (old, new) = if at % 2 == 0 { (old, most) } else { (old.swap_bytes(), most.swap_bytes()) };
        let right = checksum::update(u16::from_be_bytes([segment[16], segment[17]]), old, new);
        segment[16..18].copy_from_slice(&right.to_be_bytes());
    }
    true
}

/// The index of the value of the MSS option in a SYN; the fixed header is complete before it.
fn mss_at(segment: &[u8]) -> Option<usize> {
    let fixed: &[u8; TCP_HEADER] = segment.first_chunk()?;
    let header = segment.get(..usize::from(fixed[12] >> 4) * 4)?;
    if fixed[13] & SYN == 0 {
        return None;
    }
    let mut at = TCP_HEADER;
    loop {
        match header.get(at..)? {
            [NO_OPERATION, ..] => at += 1,
            [MAXIMUM_SEGMENT_SIZE, 4, _, _, ..] => return Some(at + 2),
            [END, ..] | [_, 0 | 1, ..] => return None,
            [_, length, ..] => at += usize::from(*length),
            [] | [_] => return None,
        }
    }
}

#[cfg(test)]
#[path = "mss_tests.rs"]
mod tests;
