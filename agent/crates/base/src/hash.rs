//! Hash maps, by who chooses their keys.
//!
//! | the key is | map | hash of a number |
//! |---|---|---|
//! | issued here: an index into a table, a token | [`IssuedMap`], for keys that are [`Issued`] | one multiplication, without a secret |
//! | a number that a peer chooses, looked up for each datagram | [`PeerMap`] | one multiplication to 128 bits, with two secrets |
//! | anything else that comes from outside | the standard `HashMap` | SipHash |
//!
//! A hash without a secret can be computed by a peer as well. Whoever chooses keys whose hashes are equal has each look-up walk
//! through all of them: 25,000 flows took 34 µs instead of 18 ns. `clippy.toml` keeps rustc-hash's own types out of all other modules.

use std::{
    collections::{HashMap, HashSet},
    fmt,
    hash::{BuildHasher, RandomState},
    marker::PhantomData,
    sync::OnceLock,
};

use foldhash::{
    SharedSeed,
    fast::{FoldHasher, SeedableRandomState},
};
#[expect(clippy::disallowed_types, reason = "behind `Issued`, which only keys that we issue are")]
use rustc_hash::FxHasher;

/// A type of keys whose values this agent issues itself, densely: nobody else can choose many that collide.
///
/// Others may have a say in which of them are in use, by ending what the rest stand for. Of `n` dense numbers a map then holds
/// about √n in one chain at most, some hundred of the 50,000 flows that an agent has by default.
pub trait Issued {}

/// A map whose keys are [`Issued`].
pub type IssuedMap<K, V> = HashMap<K, V, IssuedState<K>>;

/// A set whose members are [`Issued`].
pub type IssuedSet<K> = HashSet<K, IssuedState<K>>;

/// Makes the hashers of keys that are [`Issued`], and of no others. Where the keys' type is another crate's, `K` is a type of
/// the caller that stands for it.
pub struct IssuedState<K>(PhantomData<fn(K)>);

impl<K> Default for IssuedState<K> {
    fn default() -> Self {
        Self(PhantomData)
    }
}

impl<K> Clone for IssuedState<K> {
    fn clone(&self) -> Self {
        Self::default()
    }
}

impl<K> fmt::Debug for IssuedState<K> {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.write_str("IssuedState")
    }
}

#[expect(clippy::disallowed_types, reason = "behind `Issued`, which only keys that we issue are")]
impl<K: Issued> BuildHasher for IssuedState<K> {
    type Hasher = FxHasher;

    #[inline]
    fn build_hasher(&self) -> FxHasher {
        FxHasher::default()
    }
}

/// A map whose keys are small numbers that a peer chooses.
pub type PeerMap<K, V> = HashMap<K, V, PeerState>;

/// Makes hashers with a secret of the process and one of the map.
///
/// A look-up among 10,000 takes 46 instructions, 44 without a secret and 129 with SipHash (callgrind). A peer never sees a hash, only
/// how long we take in all, which does not show it the secrets.
#[derive(Clone)]
pub struct PeerState(SeedableRandomState);

impl Default for PeerState {
    fn default() -> Self {
        static OF_PROCESS: OnceLock<SharedSeed> = OnceLock::new();
        let shared = OF_PROCESS.get_or_init(|| SharedSeed::from_u64(secret()));
        Self(SeedableRandomState::with_seed(secret(), shared))
    }
}

impl BuildHasher for PeerState {
    type Hasher = FoldHasher<'static>;

    #[inline]
    fn build_hasher(&self) -> Self::Hasher {
        self.0.build_hasher()
    }
}

impl fmt::Debug for PeerState {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.write_str("PeerState")
    }
}

/// 64 bits that follow from the operating system's randomness by SipHash, so that they tell nothing of the next ones.
fn secret() -> u64 {
    RandomState::new().hash_one(0_u64)
}

#[cfg(test)]
mod tests {
    use crate::hash::*;

    #[test]
    fn each_map_has_a_secret_of_its_own() {
        let (one, other) = (PeerState::default(), PeerState::default());
        assert_eq!(one.hash_one(7_u64), one.hash_one(7_u64));
        assert_ne!(one.hash_one(7_u64), other.hash_one(7_u64));
    }

    /// Numbers that differ in few bits, or in the high ones alone, spread over the bits that choose a slot and those that tell
    /// entries apart there.
    #[test]
    fn regular_numbers_spread() {
        for shift in [0, 1, 8, 16, 24, 32, 40, 46] {
            let state = PeerState::default();
            let mut slots = vec![0_u32; 1 << 15];
            for number in 0..1_u64 << 15 {
                let hash = state.hash_one(number << shift);
                slots[(hash & 0x7f | hash >> 57 << 7 | (hash >> 7 & 1) << 14) as usize] += 1;
            }
            let most = slots.into_iter().max();
            assert!(most < Some(40), "{most:?} of 32,768 numbers shifted by {shift} share a slot and a tag");
        }
    }
}
