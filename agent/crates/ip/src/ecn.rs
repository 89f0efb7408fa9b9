//! Congestion marks of inner packets across the tunnel: RFC 6040 §4, normal mode.
//!
//! ```text
//!              | outer Not-ECT | ECT(0)  | ECT(1)  | CE
//!   inner      |               |         |         |
//!   Not-ECT    | Not-ECT       | Not-ECT | Not-ECT | drop
//!   ECT(0)     | ECT(0)        | ECT(0)  | ECT(1)  | CE
//!   ECT(1)     | ECT(1)        | ECT(1)  | ECT(1)  | CE
//!   CE         | CE            | CE      | CE      | CE
//! ```

use crate::checksum;

const NOT_ECT: u8 = 0;
const ECT_1: u8 = 1;
const ECT_0: u8 = 2;
/// The bits of a packet that met congestion (RFC 3168 §5).
pub const CE: u8 = 3;

/// The fate of an inner packet whose outer packet was marked or not.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Decapsulated {
    /// The inner packet stays as it is.
    Keep,
    /// The ECN bits of the inner packet become these.
    Mark(u8),
    /// The packet was to be marked and cannot be: it is dropped, and the loss tells its sender.
    Drop,
}

/// The outer ECN bits of an inner packet with this TOS or traffic class byte.
#[inline]
#[must_use]
pub fn encapsulate(traffic_class: u8) -> u8 {
    traffic_class & 3
}

/// The effect of the outer ECN bits on an inner packet with this TOS or traffic class byte (RFC 6040, Figure 4).
#[inline]
#[must_use]
pub fn decapsulate(inner: u8, outer: u8) -> Decapsulated {
    match (inner & 3, outer & 3) {
        (NOT_ECT, CE) => Decapsulated::Drop,
        (ECT_0 | ECT_1, CE) => Decapsulated::Mark(CE),
        (ECT_0, ECT_1) => Decapsulated::Mark(ECT_1),
        _ => Decapsulated::Keep,
    }
}

/// Sets the ECN bits of an IP packet, and keeps an IPv4 header checksum right. What is no IP packet stays as it is.
pub fn set_ecn(packet: &mut [u8], ecn: u8) {
    let ecn = ecn & 3;
    match packet {
        [first, class, _, _, _, _, _, _, _, _, high, low, ..] if *first >> 4 == 4 => {
            let old = u16::from_be_bytes([*first, *class]);
            *class = *class & !3 | ecn;
            let new = u16::from_be_bytes([*first, *class]);
            [*high, *low] = checksum::update(u16::from_be_bytes([*high, *low]), old, new).to_be_bytes();
        }
        [first, second, ..] if *first >> 4 == 6 => *second = *second & !0x30 | ecn << 4,
        _ => {}
    }
}

/// The ECN bits of an IP packet; 0 for what is no IP packet.
fn ecn_of(packet: &[u8]) -> u8 {
    match packet {
        [first, class, ..] if first >> 4 == 4 => class & 3,
        [first, second, ..] if first >> 4 == 6 => second >> 4 & 3,
        _ => NOT_ECT,
    }
}

/// Marks an IP packet as having met congestion; false if its sender does not understand that (Not-ECT), and it stays as it is.
#[must_use]
pub fn mark(packet: &mut [u8]) -> bool {
    let capable = ecn_of(packet) != NOT_ECT;
    if capable {
        set_ecn(packet, CE);
    }
    capable
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::view::IpView;

    #[test]
    fn the_table_of_rfc_6040() {
        use Decapsulated::{Drop, Keep, Mark};
        // Rows: the inner bits 0 to 3; columns: the outer ones.
        let table = [
            [Keep, Keep, Keep, Drop],
            [Keep, Keep, Keep, Mark(3)],
            [Keep, Mark(1), Keep, Mark(3)],
            [Keep, Keep, Keep, Keep],
        ];
        for (inner, row) in (0..).zip(table) {
            for (outer, expected) in (0..).zip(row) {
                assert_eq!(decapsulate(0xb8 | inner, 0x40 | outer), expected, "inner {inner} outer {outer}");
            }
            assert_eq!(encapsulate(0xb8 | inner), inner);
        }
    }

    #[test]
    fn bits_are_set_and_nothing_else() {
        let mut packet = [0; 40];
        (packet[0], packet[1], packet[3]) = (0x45, 0xba, 20);
        let right = !checksum::sum(&packet[..20]);
        packet[10..12].copy_from_slice(&right.to_be_bytes());
        for ecn in 0..4 {
            set_ecn(&mut packet, ecn);
            assert_eq!(IpView::parse(&packet).unwrap().traffic_class, 0xb8 | ecn);
            assert_eq!(checksum::sum(&packet[..20]), 0xffff);
        }
        let mut packet = [0; 40];
        (packet[0], packet[1], packet[6]) = (0x6b, 0xaf, 59);
        for ecn in 0..4 {
            set_ecn(&mut packet, ecn);
            assert_eq!(IpView::parse(&packet).unwrap().traffic_class, 0xb8 | ecn);
            assert_eq!((packet[0], packet[1] & 0xf), (0x6b, 0xf));
        }
        for short in [&mut [][..], &mut [0x45], &mut [0x60], &mut [0x45; 11], &mut [0; 40]] {
            let before = short.to_vec();
            set_ecn(short, 3);
            assert_eq!(short, before);
        }
    }
}
