//! TLS whose every random byte comes from a seed, so that a handshake repeats itself byte for byte.
//!
//! The generator belongs to the thread, because rustls keeps what draws from it for ever: a world seeds it, and one world
//! at a time runs on a thread. Only [`TlsIdentity::with_randomness`](gate::tls::TlsIdentity::with_randomness)
//! leads here, which no daemon calls.

use std::cell::RefCell;

use curve25519_dalek::{MontgomeryPoint, traits::IsIdentity};
use gate::{hybrid::Hybrid, tls::Randomness};
use rand::{Rng, SeedableRng, rngs::StdRng};
use rustls::{
    NamedGroup, PeerMisbehaved,
    crypto::{ActiveKeyExchange, GetRandomFailed, SecureRandom, SharedSecret, SupportedKxGroup},
};

thread_local! {
    static GENERATOR: RefCell<Option<StdRng>> = const { RefCell::new(None) };
}

/// Seeds the generator of this thread.
pub(super) fn seed(seed: u64) {
    GENERATOR.set(Some(StdRng::seed_from_u64(seed)));
}

/// The source of randomness for TLS.
pub(super) const RANDOMNESS: Randomness = Randomness {
    random: &Generator,
    x25519: &Generator,
    hybrid: &Hybrid { classical: &Generator, random: &Generator },
};

/// The seeded random number generator of the current thread, from which TLS draws.
#[derive(Debug)]
struct Generator;

impl SecureRandom for Generator {
    fn fill(&self, bytes: &mut [u8]) -> Result<(), GetRandomFailed> {
        GENERATOR.with_borrow_mut(|generator| {
            generator.as_mut().ok_or(GetRandomFailed)?.fill_bytes(bytes);
            Ok(())
        })
    }
}

impl SupportedKxGroup for Generator {
    fn start(&self) -> Result<Box<dyn ActiveKeyExchange>, rustls::Error> {
        let mut secret = [0; 32];
        self.fill(&mut secret)?;
        let public = MontgomeryPoint::mul_base_clamped(secret).to_bytes();
        Ok(Box::new(KeyExchange { secret, public }))
    }

    fn name(&self) -> NamedGroup {
        NamedGroup::X25519
    }
}

/// One X25519 key exchange (RFC 7748 §6.1).
struct KeyExchange {
    secret: [u8; 32],
    public: [u8; 32],
}

impl ActiveKeyExchange for KeyExchange {
    fn complete(self: Box<Self>, theirs: &[u8]) -> Result<SharedSecret, rustls::Error> {
        let theirs: [u8; 32] = theirs.try_into().map_err(|_| PeerMisbehaved::InvalidKeyShare)?;
        let shared = MontgomeryPoint(theirs).mul_clamped(self.secret);
        if shared.is_identity() {
            return Err(PeerMisbehaved::InvalidKeyShare.into());
        }
        Ok(SharedSecret::from(&shared.to_bytes()[..]))
    }

    fn pub_key(&self) -> &[u8] {
        &self.public
    }

    fn group(&self) -> NamedGroup {
        NamedGroup::X25519
    }
}
