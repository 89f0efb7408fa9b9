//! The field GF(2^8) of RFC 8681 §3.7, and sums of symbols over it (pure).
//!
//! A sum needs the eight doublings of each block once, however many symbols it has: the coefficients are cut into bits, and symbols
//! whose coefficient has a bit are added between two doublings. The compiler makes vector instructions of both loops;
//! `docs/measured/lossy.md` has the rates.

/// The field's polynomial x⁸ + x⁴ + x³ + x² + 1 without its highest term.
const POLYNOMIAL: u8 = 0x1d;

/// How many symbols a [`Sum`] takes.
pub(super) const MOST_TERMS: usize = 128;

/// Bytes whose sum stays in registers: eight of the vectors that every x86-64 has.
const BLOCK: usize = 128;

pub(super) const fn multiply(a: u8, b: u8) -> u8 {
    let (mut a, mut b, mut product) = (a, b, 0);
    while b != 0 {
        if b & 1 != 0 {
            product ^= a;
        }
        a = double(a);
        b >>= 1;
    }
    product
}

/// The inverse of an element; 0 for 0.
pub(super) const fn inverse(a: u8) -> u8 {
    // a^254, since a^255 is 1.
    let (mut power, mut result, mut left) = (a, 1, 254);
    while left != 0 {
        if left & 1 != 0 {
            result = multiply(result, power);
        }
        power = multiply(power, power);
        left >>= 1;
    }
    result
}

const fn double(a: u8) -> u8 {
    // The sign spread over all bits tells whether the highest term leaves.
    (a << 1) ^ ((a.cast_signed() >> 7).cast_unsigned() & POLYNOMIAL)
}

/// A linear combination of symbols. Symbols that are shorter than the longest one end in zeros.
pub(super) struct Sum<'a> {
    symbols: [&'a [u8]; MOST_TERMS],
    pub(super) terms: usize,
    /// For each bit, lowest first: which symbols have it in their coefficient.
    planes: [Plane; 8],
}

#[derive(Clone, Copy)]
struct Plane {
    symbols: [u8; MOST_TERMS],
    len: usize,
}

impl<'a> Sum<'a> {
    pub(super) fn new() -> Self {
        Self { symbols: [&[]; MOST_TERMS], terms: 0, planes: [Plane { symbols: [0; MOST_TERMS], len: 0 }; 8] }
    }

    /// Adds `coefficient` times `symbol`.
    ///
    /// # Panics
    /// Beyond [`MOST_TERMS`] symbols.
    pub(super) fn add(&mut self, coefficient: u8, symbol: &'a [u8]) {
        self.symbols[self.terms] = symbol;
        for (bit, plane) in self.planes.iter_mut().enumerate() {
            if coefficient >> bit & 1 != 0 {
                plane.symbols[plane.len] = self.terms as u8;
                plane.len += 1;
            }
        }
        self.terms += 1;
    }

    /// Adds the sum to `out`; bytes of symbols beyond its end are left out.
    pub(super) fn add_to(&self, out: &mut [u8]) {
        let blocks = out.len() / BLOCK * BLOCK;
        for at in (0..blocks).step_by(BLOCK) {
            add(&mut out[at..at + BLOCK], &self.block::<BLOCK>(at));
        }
        if let Some(last) = out.len().checked_sub(BLOCK) {
            // The last block overlaps the one before, which costs less than smaller blocks.
            add(&mut out[blocks..], &self.block::<BLOCK>(last)[blocks - last..]);
        } else {
            for (at, out) in out.chunks_mut(16).enumerate() {
                add(out, &self.block::<16>(at * 16));
            }
        }
    }

    /// The bytes of the sum from `at` on.
    fn block<const N: usize>(&self, at: usize) -> [u8; N] {
        let mut sum = [0; N];
        for plane in self.planes.iter().rev() {
            sum = sum.map(double);
            for &symbol in &plane.symbols[..plane.len] {
                let symbol = self.symbols[usize::from(symbol)].get(at..).unwrap_or_default();
                match symbol.first_chunk::<N>() {
                    Some(block) => add(&mut sum, block),
                    None => add(&mut sum, symbol),
                }
            }
        }
        sum
    }
}

/// Adds `coefficient` times `symbol` to `sum`, as far as both reach.
pub(super) fn add_times(coefficient: u8, symbol: &[u8], sum: &mut [u8]) {
    let len = symbol.len().min(sum.len());
    let blocks = len / 64 * 64;
    let words = len / 8 * 8;
    add_blocks_times::<64>(coefficient, &symbol[..blocks], &mut sum[..blocks]);
    add_blocks_times::<8>(coefficient, &symbol[blocks..words], &mut sum[blocks..words]);
    add_blocks_times::<1>(coefficient, &symbol[words..len], &mut sum[words..len]);
}

fn add_blocks_times<const N: usize>(coefficient: u8, symbol: &[u8], sum: &mut [u8]) {
    for (sum, block) in sum.as_chunks_mut::<N>().0.iter_mut().zip(symbol.as_chunks::<N>().0) {
        let mut multiple = *block;
        for bit in 0..8 {
            let mask = 0_u8.wrapping_sub(coefficient >> bit & 1);
            for (sum, byte) in sum.iter_mut().zip(&multiple) {
                *sum ^= byte & mask;
            }
            multiple = multiple.map(double);
        }
    }
}

fn add(sum: &mut [u8], symbol: &[u8]) {
    for (sum, byte) in sum.iter_mut().zip(symbol) {
        *sum ^= byte;
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::{collection::vec, prelude::*};

    #[test]
    fn products_by_hand() {
        // x⁷ times x is the polynomial without x⁸; the others by long division.
        assert_eq!(multiply(0x80, 2), 0x1d);
        assert_eq!(multiply(0x57, 0x83), 0x31);
        assert_eq!([multiply(0, 0xff), multiply(1, 0xfe)], [0, 0xfe]);
    }

    #[test]
    fn two_generates_every_element_but_zero() {
        let (mut power, mut seen) = (1, [false; 256]);
        for _ in 0..255 {
            assert!(!std::mem::replace(&mut seen[usize::from(power)], true));
            power = multiply(power, 2);
        }
        assert_eq!((power, seen[0]), (1, false));
    }

    #[test]
    fn multiplication_is_a_group_and_distributes() {
        for a in 0..=255 {
            assert_eq!(multiply(a, inverse(a)), u8::from(a != 0));
            for b in 0..=255 {
                assert_eq!(multiply(a, b), multiply(b, a));
                assert_eq!(multiply(a, b ^ 0x5a), multiply(a, b) ^ multiply(a, 0x5a));
            }
        }
    }

    proptest! {
        #[test]
        fn a_sum_is_the_sum_of_products(
            terms in vec((any::<u8>(), vec(any::<u8>(), 0..300)), 0..20),
            start in vec(any::<u8>(), 0..300),
        ) {
            let mut sum = Sum::new();
            for (coefficient, symbol) in &terms {
                sum.add(*coefficient, symbol);
            }
            prop_assert_eq!(sum.terms, terms.len());
            let mut out = start.clone();
            sum.add_to(&mut out);
            for (at, (start, out)) in start.iter().zip(&out).enumerate() {
                let product = |(c, symbol): &(u8, Vec<u8>)| multiply(*c, symbol.get(at).copied().unwrap_or(0));
                prop_assert_eq!(terms.iter().map(product).fold(*start, |a, b| a ^ b), *out);
            }
            let mut again = start;
            for (coefficient, symbol) in &terms {
                add_times(*coefficient, symbol, &mut again);
            }
            prop_assert_eq!(out, again);
        }
    }
}
