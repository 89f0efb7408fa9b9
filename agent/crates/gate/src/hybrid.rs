//! X25519MLKEM768: the key exchange of TLS 1.3 that holds as long as either X25519 or ML-KEM-768 (FIPS 203) does.
//!
//! ```text
//!  client share   encapsulation key 1184 │ X25519 32       code point 4588, draft-ietf-tls-ecdhe-mlkem §4
//!  server share   ciphertext        1088 │ X25519 32
//!  secret         shared key          32 │ X25519 32
//! ```
//!
//! rustls brings the group only with aws-lc-rs, which is C. This one is made of any X25519 of rustls and libcrux's ML-KEM.

use libcrux_ml_kem::mlkem768::{
    self, MlKem768Ciphertext, MlKem768KeyPair, MlKem768PrivateKey, MlKem768PublicKey,
};
use rustls::{
    Error, NamedGroup, PeerMisbehaved, ProtocolVersion,
    crypto::{ActiveKeyExchange, CompletedKeyExchange, SecureRandom, SharedSecret, SupportedKxGroup},
};
use zeroize::{Zeroize as _, Zeroizing};

/// The code point of the group in TLS.
pub const CODE_POINT: u16 = 4588;

/// The length of an ML-KEM-768 encapsulation key, the first part of a client's share, in bytes.
pub const ENCAPSULATION_KEY_BYTES: usize = 1184;

/// The length of an ML-KEM-768 ciphertext, the first part of a server's share, in bytes.
pub const CIPHERTEXT_BYTES: usize = 1088;

/// The length of an ML-KEM-768 decapsulation key in its expanded form, in bytes.
const DECAPSULATION_KEY_BYTES: usize = 2400;

/// The key-exchange group X25519MLKEM768 over another implementation of X25519.
#[derive(Clone, Copy, Debug)]
pub struct Hybrid {
    /// The X25519 that makes the classical half of the secret.
    pub classical: &'static dyn SupportedKxGroup,
    /// The source of the seeds of ML-KEM keys and ciphertexts.
    pub random: &'static dyn SecureRandom,
}

impl Hybrid {
    fn seed<const BYTES: usize>(&self) -> Result<Zeroizing<[u8; BYTES]>, Error> {
        let mut seed = Zeroizing::new([0; BYTES]);
        self.random.fill(seed.as_mut())?;
        Ok(seed)
    }
}

impl SupportedKxGroup for Hybrid {
    fn start(&self) -> Result<Box<dyn ActiveKeyExchange>, Error> {
        let classical = self.classical.start()?;
        let (decapsulation, encapsulation) = key_pair(&*self.seed()?);
        let share = [encapsulation.as_slice(), classical.pub_key()].concat();
        Ok(Box::new(Started { classical, decapsulation, share }))
    }

    fn start_and_complete(&self, client_share: &[u8]) -> Result<CompletedKeyExchange, Error> {
        let (key, classical) = client_share.split_first_chunk::<ENCAPSULATION_KEY_BYTES>().ok_or(INVALID)?;
        let classical = self.classical.start_and_complete(classical)?;
        let (ciphertext, shared) = encapsulate(key, &*self.seed()?).ok_or(INVALID)?;
        Ok(CompletedKeyExchange {
            group: self.name(),
            pub_key: [ciphertext.as_slice(), &classical.pub_key].concat(),
            secret: secret_of(&shared, &classical.secret),
        })
    }

    fn name(&self) -> NamedGroup {
        NamedGroup::X25519MLKEM768
    }

    fn usable_for_version(&self, version: ProtocolVersion) -> bool {
        version == ProtocolVersion::TLSv1_3
    }
}

/// A client's key exchange that waits for the share of the server.
struct Started {
    classical: Box<dyn ActiveKeyExchange>,
    decapsulation: DecapsulationKey,
    share: Vec<u8>,
}

impl ActiveKeyExchange for Started {
    fn complete(self: Box<Self>, server_share: &[u8]) -> Result<SharedSecret, Error> {
        let (ciphertext, classical) = server_share.split_first_chunk().ok_or(INVALID)?;
        let shared = self.decapsulation.decapsulate(ciphertext);
        Ok(secret_of(&shared, &self.classical.complete(classical)?))
    }

    /// With this rustls offers the same X25519 key as a share of its own, so that a server without ML-KEM can answer at once.
    fn hybrid_component(&self) -> Option<(NamedGroup, &[u8])> {
        Some((self.classical.group(), self.classical.pub_key()))
    }

    fn complete_hybrid_component(self: Box<Self>, server_share: &[u8]) -> Result<SharedSecret, Error> {
        self.classical.complete(server_share)
    }

    fn pub_key(&self) -> &[u8] {
        &self.share
    }

    fn group(&self) -> NamedGroup {
        NamedGroup::X25519MLKEM768
    }
}

const INVALID: Error = Error::PeerMisbehaved(PeerMisbehaved::InvalidKeyShare);

/// The 32 bytes on which both ends of ML-KEM agree.
type SharedKey = Zeroizing<[u8; 32]>;

fn secret_of(shared: &SharedKey, classical: &SharedSecret) -> SharedSecret {
    SharedSecret::from([shared.as_slice(), classical.secret_bytes()].concat())
}

/// The secret half of an ML-KEM-768 key pair, wiped when it is dropped.
struct DecapsulationKey(MlKem768PrivateKey);

impl DecapsulationKey {
    /// The key in `ciphertext` or, if it was made for another key, one that nobody else knows (FIPS 203 §6.3).
    fn decapsulate(&self, ciphertext: &[u8; CIPHERTEXT_BYTES]) -> SharedKey {
        Zeroizing::new(mlkem768::decapsulate(&self.0, &MlKem768Ciphertext::from(ciphertext)))
    }
}

impl Drop for DecapsulationKey {
    fn drop(&mut self) {
        self.0[0..DECAPSULATION_KEY_BYTES].zeroize();
    }
}

/// Makes a key pair from the seeds d ‖ z (FIPS 203 §6.1).
fn key_pair(seed: &[u8; 64]) -> (DecapsulationKey, [u8; ENCAPSULATION_KEY_BYTES]) {
    let pair: MlKem768KeyPair = mlkem768::generate_key_pair(*seed);
    let (decapsulation, encapsulation) = pair.into_parts();
    (DecapsulationKey(decapsulation), encapsulation.into())
}

/// Encapsulates a key, made from `seed`, to the holder of `key` (FIPS 203 §6.2); `None` if `key` fails the check of its
/// modulus (§7.2), which the draft demands of a server.
fn encapsulate(
    key: &[u8; ENCAPSULATION_KEY_BYTES],
    seed: &[u8; 32],
) -> Option<([u8; CIPHERTEXT_BYTES], SharedKey)> {
    let key = MlKem768PublicKey::from(key);
    if !mlkem768::validate_public_key(&key) {
        return None;
    }
    let (ciphertext, shared) = mlkem768::encapsulate(&key, *seed);
    Some((ciphertext.into(), Zeroizing::new(shared)))
}

#[cfg(test)]
#[path = "hybrid_tests.rs"]
mod tests;
