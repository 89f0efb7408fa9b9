use super::*;
use crate::model::{self, Recipe};

/// A SYN whose options are `options`, with a complete or a partial checksum.
fn syn(ipv6: bool, options: &[u8], partial: bool) -> Vec<u8> {
    let recipe = Recipe { ipv6, flags: SYN, tcp_options: options.len(), payload: 0, ..Recipe::TCP };
    let mut packet = recipe.partial();
    let at = recipe.transport_at();
    packet[at + 20..].copy_from_slice(options);
    if !partial {
        model::complete(&mut packet, at, 16);
    }
    packet
}

fn clamped(packet: &[u8], mtu: u16, partial: bool) -> Option<Vec<u8>> {
    let mut clamped = packet.to_vec();
    let view = IpView::parse(packet).unwrap();
    clamp(&mut clamped, &view, mtu, partial).then_some(clamped)
}

#[test]
fn the_option_is_lowered_wherever_it_stands_and_the_checksum_stays_right() {
    for ipv6 in [false, true] {
        let header = if ipv6 { 60 } else { 40 };
        for partial in [false, true] {
            for before in 0..8 {
                let with = |mss: u16| {
                    let [high, low] = mss.to_be_bytes();
                    let mut options = vec![1; 16];
                    options[before..before + 4].copy_from_slice(&[2, 4, high, low]);
                    syn(ipv6, &options, partial)
                };
                assert_eq!(clamped(&with(1460), 1300, partial), Some(with(1300 - header)));
                assert_eq!(clamped(&with(1300 - header), 1300, partial), None);
                assert_eq!(clamped(&with(500), 1300, partial), None, "it is never raised");
            }
        }
    }
}

#[test]
fn other_options_are_stepped_over() {
    let options = [4, 2, 8, 10, 0, 0, 0, 1, 0, 0, 0, 0, 2, 4, 5, 0xb4, 1, 3, 3, 7];
    let mut lowered = options;
    lowered[14..16].copy_from_slice(&1240u16.to_be_bytes());
    assert_eq!(clamped(&syn(false, &options, false), 1280, false), Some(syn(false, &lowered, false)));
}

#[test]
fn nothing_else_is_touched() {
    let mss = [2, 4, 5, 0xb4];
    for options in
        [&[][..], &[0, 2, 4, 5], &[2, 3, 5, 0xb4], &[3, 0, 2, 4], &[3, 1, 2, 4], &[1, 1, 1, 2], &[1, 1, 2, 4]]
    {
        assert_eq!(clamped(&syn(false, options, false), 1280, false), None, "{options:?}");
    }
    let mut no_syn = syn(false, &mss, false);
    assert!(clamped(&no_syn, 1280, false).is_some());
    for mtu in [0, 39, 40] {
        assert_eq!(clamped(&no_syn, mtu, false), None, "nothing fits into {mtu} bytes");
    }
    no_syn[33] = ACK_ONLY;
    assert_eq!(clamped(&no_syn, 1280, false), None);
    let mut fragment = syn(false, &mss, false);
    fragment[6] = 0x20;
    assert_eq!(clamped(&fragment, 1280, false), None);
    let mut long_header = syn(false, &mss, false);
    long_header[32] = 0xf0;
    assert_eq!(clamped(&long_header, 1280, false), None);
    assert_eq!(clamped(&Recipe::UDP.complete(), 1280, false), None);
}

const ACK_ONLY: u8 = 0x10;
