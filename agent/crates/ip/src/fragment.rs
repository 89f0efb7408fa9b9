//! IPv4 packets that are larger than the way and may be fragmented (RFC 791 §3.2).

use crate::{
    checksum,
    view::{IPV4_HEADER, IpView},
};

/// The unit of fragment offsets in bytes: the data of every fragment but the last is a multiple of it.
const UNIT: usize = 8;

/// The flag that says that more fragments follow.
const MORE: u16 = 0x2000;

/// The offset of a fragment's data, in units.
const OFFSET: u16 = 0x1fff;

/// An option of the IPv4 header that is copied into every fragment has this bit.
const COPIED: u8 = 0x80;

/// An IPv4 packet as the fragments that it becomes.
#[derive(Debug)]
pub struct Fragments<'a> {
    header: &'a [u8],
    data: &'a [u8],
    /// Bytes of data in each but the last.
    each: usize,
    /// Flags and offset of the packet, which may be a fragment itself.
    flags_and_offset: u16,
}

impl<'a> Fragments<'a> {
    /// Cuts `packet`, whose headers are `view` and whose checksums are complete, into fragments of at most `mtu` bytes. `None`
    /// if it must not be cut, need not be, or cannot be because its header leaves no room.
    #[must_use]
    pub fn new(packet: &'a [u8], view: &IpView, mtu: u16) -> Option<Self> {
        let packet = packet.get(..view.len)?;
        if view.is_ipv6() || view.dont_fragment || packet.len() <= usize::from(mtu) {
            return None;
        }
        let header = usize::from(packet.first()? & 0x0f) * 4;
        let (header, data) = packet.split_at_checked(header).filter(|(head, _)| head.len() >= IPV4_HEADER)?;
        let each = usize::from(mtu).checked_sub(header.len())? / UNIT * UNIT;
        let flags_and_offset = u16::from_be_bytes([header[6], header[7]]);
        (each > 0).then_some(Self { header, data, each, flags_and_offset })
    }

    /// The number of fragments that result.
    #[must_use]
    pub fn count(&self) -> usize {
        self.data.len().div_ceil(self.each)
    }

    /// Writes fragment `index` in place of what is in `out`.
    pub fn write(&self, index: usize, out: &mut Vec<u8>) {
        let start = (index * self.each).min(self.data.len());
        let end = (start + self.each).min(self.data.len());
        out.clear();
        out.extend_from_slice(self.header);
        out.extend_from_slice(&self.data[start..end]);
        let (length, more) = (out.len() as u16, self.flags_and_offset & MORE != 0 || end < self.data.len());
        let header = &mut out[..self.header.len()];
        if index > 0 {
            blank_options(&mut header[IPV4_HEADER..]);
        }
        // A packet has at most 65,535 bytes, so its offsets are below 2^13 units.
        let offset = (self.flags_and_offset & OFFSET).wrapping_add((start / UNIT) as u16) & OFFSET;
        let flags_and_offset =
            self.flags_and_offset & !(MORE | OFFSET) | if more { MORE } else { 0 } | offset;
        header[2..4].copy_from_slice(&length.to_be_bytes());
        header[6..8].copy_from_slice(&flags_and_offset.to_be_bytes());
        header[10..12].fill(0);
        let sum = !checksum::sum(header);
        header[10..12].copy_from_slice(&sum.to_be_bytes());
    }
}

/// Replaces the options that stand in a first fragment only by "no operation".
fn blank_options(mut options: &mut [u8]) {
    const END: u8 = 0;
    const NOTHING: u8 = 1;
    while let [kind, rest @ ..] = options {
        let len = match (*kind, rest.first()) {
            (END, _) | (_, None) => return,
            (NOTHING, _) => 1,
            (_, Some(len)) => usize::from(*len).max(2).min(rest.len() + 1),
        };
        let (option, after) = options.split_at_mut(len);
        if option[0] & COPIED == 0 {
            option.fill(NOTHING);
        }
        options = after;
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    /// A packet with these options, and data that says where it belongs.
    fn packet(options: &[u8], data: usize, flags_and_offset: u16) -> Vec<u8> {
        let header = IPV4_HEADER + options.len();
        let mut packet = vec![0; header];
        packet[0] = 0x40 | (header / 4) as u8;
        packet[2..4].copy_from_slice(&((header + data) as u16).to_be_bytes());
        packet[4..6].copy_from_slice(&[0x12, 0x34]);
        packet[6..8].copy_from_slice(&flags_and_offset.to_be_bytes());
        packet[8..10].copy_from_slice(&[64, 17]);
        packet[12..20].copy_from_slice(&[10, 9, 0, 1, 10, 9, 0, 2]);
        packet[20..header].copy_from_slice(options);
        let sum = !checksum::sum(&packet);
        packet[10..12].copy_from_slice(&sum.to_be_bytes());
        packet.extend((0..data).map(|at| (at * 7 % 251) as u8));
        packet
    }

    proptest! {
        #[test]
        fn put_together_the_fragments_are_the_packet(
            data in 0_usize..9_000,
            mtu in 68_u16..2_000,
            first in 0_u16..500,
            more in any::<bool>(),
            options in prop::sample::select(vec![vec![], vec![7, 7, 4, 0, 0, 0, 0, 0], vec![0x94, 4, 0, 0]]),
        ) {
            let unfragmented = packet(&options, data, first | if more { MORE } else { 0 });
            let view = IpView::parse(&unfragmented).unwrap();
            let Some(fragments) = Fragments::new(&unfragmented, &view, mtu) else {
                prop_assert!(unfragmented.len() <= usize::from(mtu));
                return Ok(());
            };
            prop_assert!(fragments.count() > 1);
            let mut again = Vec::new();
            let mut out = Vec::new();
            for index in 0..fragments.count() {
                fragments.write(index, &mut out);
                prop_assert!(out.len() <= usize::from(mtu));
                let header = IPV4_HEADER + options.len();
                prop_assert_eq!(checksum::sum(&out[..header]), 0xffff, "the header's checksum");
                let view = IpView::parse(&out).unwrap();
                prop_assert_eq!(view.len, out.len());
                let flags_and_offset = u16::from_be_bytes([out[6], out[7]]);
                prop_assert_eq!(usize::from((flags_and_offset & OFFSET) - first) * UNIT, again.len());
                let last = index + 1 == fragments.count();
                prop_assert_eq!(flags_and_offset & MORE != 0, more || !last);
                let kept = index == 0 || options.first() != Some(&7);
                prop_assert_eq!(out[20..header] == options[..], kept || options.is_empty());
                again.extend_from_slice(&out[header..]);
            }
            prop_assert_eq!(again, &unfragmented[IPV4_HEADER + options.len()..]);
        }
    }

    #[test]
    fn what_must_not_or_need_not_be_cut_is_not() {
        let view = |packet: &[u8]| IpView::parse(packet).unwrap();
        let unfragmented = packet(&[], 1_000, 0);
        assert!(Fragments::new(&unfragmented, &view(&unfragmented), 1_020).is_none());
        assert!(Fragments::new(&unfragmented, &view(&unfragmented), 1_019).is_some());
        assert!(Fragments::new(&unfragmented, &view(&unfragmented), 27).is_none(), "no room for 8 bytes");
        let fixed = packet(&[], 1_000, 0x4000);
        assert!(Fragments::new(&fixed, &view(&fixed), 576).is_none());
    }
}
