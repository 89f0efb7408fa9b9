//! The Internet checksum (RFC 1071) and its incremental update (RFC 1624).
//!
//! A *sum* is the ones' complement sum of 16-bit big-endian words, folded to 16 bits and not complemented: what a partial
//! checksum field holds of the pseudo-header. A *checksum* is its complement. Sums of pieces add up where every piece but the
//! last has an even number of bytes.

use std::net::IpAddr;

/// The sum of `bytes`; an odd last byte counts as if a zero followed.
#[must_use]
pub fn sum(bytes: &[u8]) -> u16 {
    // The order of the bytes within the words does not matter until the end (RFC 1071 §2 (B)). Both halves of words of 64
    // bits in sums of 64 cannot overflow below 16 GiB, and the compiler adds several words at once.
    const HALF: u64 = 0xffff_ffff;
    let (blocks, rest) = bytes.as_chunks::<64>();
    let mut lanes = [0u64; 8];
    for block in blocks {
        for (lane, word) in lanes.iter_mut().zip(block.as_chunks::<8>().0) {
            let word = u64::from_ne_bytes(*word);
            *lane += (word & HALF) + (word >> 32);
        }
    }
    let (words, tail) = rest.as_chunks::<8>();
    let mut last = [0; 8];
    last[..tail.len()].copy_from_slice(tail);
    let mut total: u64 = lanes.iter().sum();
    for word in words.iter().chain([&last]) {
        let word = u64::from_ne_bytes(*word);
        total += (word & HALF) + (word >> 32);
    }
    u16::from_be(fold(total))
}

/// A sum of words that is folded to 16 bits; 0 only of nothing but zeros.
#[inline]
#[must_use]
pub fn fold(mut total: u64) -> u16 {
    total = (total & 0xffff_ffff) + (total >> 32);
    total = (total & 0xffff) + (total >> 16 & 0xffff) + (total >> 32);
    total = (total & 0xffff) + (total >> 16);
    total = (total & 0xffff) + (total >> 16);
    total as u16
}

/// The sum of the addresses and the protocol in a pseudo-header (RFC 9293 §3.1, RFC 8200 §8.1); the length is to be added.
#[must_use]
pub fn pseudo_header(source: IpAddr, destination: IpAddr, protocol: u8) -> u16 {
    let address = |address: IpAddr| match address {
        IpAddr::V4(address) => sum(&address.octets()),
        IpAddr::V6(address) => sum(&address.octets()),
    };
    fold(u64::from(address(source)) + u64::from(address(destination)) + u64::from(protocol))
}

/// The checksum of what has this sum.
///
/// 0 is written as 0xffff, which is the same number and in UDP does not say that there is none (RFC 768).
#[inline]
#[must_use]
pub fn finish(sum: u16) -> u16 {
    match !sum {
        0 => 0xffff,
        checksum => checksum,
    }
}

/// The checksum after one word that it covers has changed (RFC 1624 equation 3).
#[inline]
#[must_use]
pub fn update(checksum: u16, old: u16, new: u16) -> u16 {
    !fold(u64::from(!checksum) + u64::from(!old) + u64::from(new))
}

/// Completes the partial checksum that stands at `start + offset` and covers all from `start` on, whose field holds the
/// pseudo-header's sum. False, and nothing is written, if it lies outside of `packet`.
pub fn complete(packet: &mut [u8], start: usize, offset: usize) -> bool {
    let Some(covered) = packet.get_mut(start..) else { return false };
    let checksum = finish(sum(covered));
    match covered.get_mut(offset..).and_then(|bytes| bytes.first_chunk_mut()) {
        Some(field) => {
            *field = checksum.to_be_bytes();
            true
        }
        None => false,
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    /// The checksum as RFC 1071 defines it, word by word.
    fn by_words(bytes: &[u8]) -> u16 {
        let mut total = 0u32;
        for word in bytes.chunks(2) {
            total += u32::from(word[0]) << 8 | u32::from(*word.get(1).unwrap_or(&0));
            total = (total & 0xffff) + (total >> 16);
        }
        total as u16
    }

    #[test]
    fn the_example_of_rfc_1071() {
        assert_eq!(sum(&[0x00, 0x01, 0xf2, 0x03, 0xf4, 0xf5, 0xf6, 0xf7]), 0xddf2);
    }

    proptest! {
        #[test]
        fn sums_are_those_of_the_definition(bytes in prop::collection::vec(any::<u8>(), 0..200)) {
            prop_assert_eq!(sum(&bytes), by_words(&bytes));
        }

        #[test]
        fn an_update_is_a_new_sum(mut bytes in prop::collection::vec(any::<u8>(), 2..60), new in any::<u16>()) {
            let checksum = !sum(&bytes);
            let old = u16::from_be_bytes([bytes[0], bytes[1]]);
            bytes[..2].copy_from_slice(&new.to_be_bytes());
            bytes.resize(bytes.len().next_multiple_of(2), 0);
            bytes.extend(update(checksum, old, new).to_be_bytes());
            // 0 and 0xffff are the same number; RFC 1624 §3 keeps the one that a new sum would have, but for all zeros.
            prop_assert!(matches!(sum(&bytes), 0 | 0xffff));
        }

        #[test]
        fn what_is_completed_sums_up(bytes in prop::collection::vec(any::<u8>(), 0..100), start in 0usize..100, offset in 0usize..100) {
            let mut packet = bytes.clone();
            let fits = start + offset + 2 <= bytes.len();
            prop_assert_eq!(complete(&mut packet, start, offset), fits);
            if !fits {
                prop_assert_eq!(packet, bytes);
            } else if offset % 2 == 0 {
                let seed = u64::from(u16::from_be_bytes([bytes[start + offset], bytes[start + offset + 1]]));
                prop_assert_eq!(fold(u64::from(sum(&packet[start..])) + seed), 0xffff);
            }
        }
    }
}
