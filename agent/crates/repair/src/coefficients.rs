//! The coefficients of a repair symbol: RFC 8681 §3.6, from the generator TinyMT32 of RFC 8682 (pure).

use super::symbol::Density;

/// The parameters of TinyMT32 (RFC 8682 §2.1).
const MAT1: u32 = 0x8f70_11ee;
const MAT2: u32 = 0xfc78_ff1f;
const TMAT: u32 = 0x3793_fdff;

/// The generator TinyMT32: a state of 127 bits, and 32 bits each step.
struct TinyMt32 {
    state: [u32; 4],
}

impl TinyMt32 {
    fn new(seed: u32) -> Self {
        /// How many words the seed is spread over, and how many steps follow before the first number is given out.
        const ROUNDS: usize = 8;
        let mut state = [seed, MAT1, MAT2, TMAT];
        for round in 1..ROUNDS {
            let last = state[(round - 1) % 4];
            let mixed = (last ^ last >> 30).wrapping_mul(1_812_433_253).wrapping_add(round as u32);
            state[round % 4] ^= mixed;
        }
        let mut generator = Self { state };
        for _ in 0..ROUNDS {
            generator.step();
        }
        generator
    }

    fn step(&mut self) {
        let [first, second, third, fourth] = self.state;
        let x = (first & 0x7fff_ffff) ^ second ^ third;
        let x = x ^ x << 1;
        let y = fourth ^ fourth >> 1 ^ x;
        // All ones if y is odd.
        let odd = 0_u32.wrapping_sub(y & 1);
        self.state = [second, third ^ odd & MAT1, x ^ y << 10 ^ odd & MAT2, y];
    }

    fn next(&mut self) -> u32 {
        self.step();
        let [first, _, third, fourth] = self.state;
        let sum = first.wrapping_add(third >> 8);
        fourth ^ sum ^ 0_u32.wrapping_sub(sum & 1) & TMAT
    }

    fn below_16(&mut self) -> u8 {
        (self.next() & 0xf) as u8
    }

    /// A number from 1 to 255.
    fn element(&mut self) -> u8 {
        loop {
            let byte = (self.next() & 0xff) as u8;
            if byte != 0 {
                return byte;
            }
        }
    }
}

/// Fills `coefficients` with those of the repair symbol with this key, one for each source symbol of its window, oldest first.
pub(super) fn generate(key: u16, density: Density, coefficients: &mut [u8]) {
    let mut generator = TinyMt32::new(key.into());
    for coefficient in coefficients {
        let take = density == Density::FULL || generator.below_16() <= density.threshold();
        *coefficient = if take { generator.element() } else { 0 };
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The first numbers from the seed 1 (RFC 8682 §2.1).
    const FROM_ONE: [u32; 50] = [
        2_545_341_989,
        981_918_433,
        3_715_302_833,
        2_387_538_352,
        3_591_001_365,
        3_820_442_102,
        2_114_400_566,
        2_196_103_051,
        2_783_359_912,
        764_534_509,
        643_179_475,
        1_822_416_315,
        881_558_334,
        4_207_026_366,
        3_690_273_640,
        3_240_535_687,
        2_921_447_122,
        3_984_931_427,
        4_092_394_160,
        44_209_675,
        2_188_315_343,
        2_908_663_843,
        1_834_519_336,
        3_774_670_961,
        3_019_990_707,
        4_065_554_902,
        1_239_765_502,
        4_035_716_197,
        3_412_127_188,
        552_822_483,
        161_364_450,
        353_727_785,
        140_085_994,
        149_132_008,
        2_547_770_827,
        4_064_042_525,
        4_078_297_538,
        2_057_335_507,
        622_384_752,
        2_041_665_899,
        2_193_913_817,
        1_080_849_512,
        33_160_901,
        662_956_935,
        642_999_063,
        3_384_709_977,
        1_723_175_122,
        3_866_752_252,
        521_822_317,
        2_292_524_454,
    ];

    #[test]
    fn the_generator_gives_the_numbers_of_the_rfc() {
        let mut generator = TinyMt32::new(1);
        assert_eq!(std::array::from_fn(|_| generator.next()), FROM_ONE);
    }

    #[test]
    fn small_numbers_are_those_of_the_rfc() {
        // RFC 8681 §3.5, the first of its bytes and of its half bytes from the seed 1.
        let (mut bytes, mut halves) = (TinyMt32::new(1), TinyMt32::new(1));
        assert_eq!(std::array::from_fn(|_| bytes.element()), [37, 225, 177, 176, 21, 246, 54, 139, 168, 237]);
        assert_eq!(std::array::from_fn(|_| halves.below_16()), [5, 1, 1, 0, 5, 6, 6, 11, 8, 13]);
    }

    #[test]
    fn a_full_density_leaves_no_source_out_and_others_their_share() {
        for (threshold, share) in [(15, 1.0), (7, 0.5), (0, 1.0 / 16.0)] {
            let density = Density::new(threshold).unwrap();
            let mut used = 0;
            for key in 0..200 {
                let mut coefficients = [0; 128];
                generate(key, density, &mut coefficients);
                used += coefficients.iter().filter(|coefficient| **coefficient != 0).count();
            }
            let found = used as f64 / (200.0 * 128.0);
            assert!((found - share).abs() < 0.02, "{threshold}: {found}");
        }
    }

    #[test]
    fn coefficients_of_a_shorter_window_begin_alike() {
        let (mut short, mut long) = ([0; 10], [0; 128]);
        generate(77, Density::FULL, &mut short);
        generate(77, Density::FULL, &mut long);
        assert_eq!(short, long[..10]);
    }
}
