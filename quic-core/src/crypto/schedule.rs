//! From a secret to the keys of one direction (RFC 9001 §5.1).
//!
//! What passes through this file is wiped; the keys that `ring` makes of it are not, because `ring` wipes nothing.

use std::fmt;

use ring::aead::{self, LessSafeKey, UnboundKey, quic};
use ring::hkdf;
use zeroize::Zeroizing;

use super::aead::IV_LEN;
use super::{HeaderKey, PacketKey, Suite};
use crate::LaneError;

/// The longest key of a suite: 256 bits.
const MAX_KEY_LEN: usize = 32;

/// The longest secret of a suite: the output of SHA-384.
const MAX_SECRET_LEN: usize = 48;

/// The secret of one direction in one generation of keys.
pub(crate) struct Secret {
    suite: Suite,
    prk: hkdf::Prk,
}

impl Secret {
    /// Takes a secret of the length of the suite's hash.
    pub(crate) fn new(suite: Suite, secret: &[u8]) -> Result<Self, LaneError> {
        if secret.len() != suite.secret_len() {
            return Err(LaneError::SecretLength { want: suite.secret_len(), got: secret.len() });
        }
        Ok(Self { suite, prk: hkdf::Prk::new_less_safe(Algorithms::of(suite).hkdf, secret) })
    }

    /// The key and IV of this generation.
    pub(crate) fn packet_key(&self) -> PacketKey {
        let algorithm = Algorithms::of(self.suite).aead;
        let (mut key, mut iv) = (Zeroizing::new([0; MAX_KEY_LEN]), [0; IV_LEN]);
        let key = &mut key[..algorithm.key_len()];
        expand_label(&self.prk, b"quic key", key);
        expand_label(&self.prk, b"quic iv", &mut iv);
        let key = UnboundKey::new(algorithm, key).expect("the slice has the algorithm's key length");
        PacketKey::new(LessSafeKey::new(key), iv)
    }

    /// The header-protection key. Only that of the first generation is used (RFC 9001 §6).
    pub(crate) fn header_key(&self) -> HeaderKey {
        let algorithm = Algorithms::of(self.suite).header;
        let mut key = Zeroizing::new([0; MAX_KEY_LEN]);
        let key = &mut key[..algorithm.key_len()];
        expand_label(&self.prk, b"quic hp", key);
        let key =
            quic::HeaderProtectionKey::new(algorithm, key).expect("the slice has the algorithm's key length");
        HeaderKey::new(key)
    }

    /// The secret of the next generation (RFC 9001 §6.1).
    pub(crate) fn next(&self) -> Self {
        let mut secret = Zeroizing::new([0; MAX_SECRET_LEN]);
        let secret = &mut secret[..self.suite.secret_len()];
        expand_label(&self.prk, b"quic ku", secret);
        Self { suite: self.suite, prk: hkdf::Prk::new_less_safe(Algorithms::of(self.suite).hkdf, secret) }
    }
}

impl fmt::Debug for Secret {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Secret").finish_non_exhaustive()
    }
}

/// The algorithms of a suite, as `ring` names them.
struct Algorithms {
    aead: &'static aead::Algorithm,
    header: &'static quic::Algorithm,
    hkdf: hkdf::Algorithm,
}

impl Algorithms {
    fn of(suite: Suite) -> Self {
        match suite {
            Suite::Aes128Gcm => {
                Self { aead: &aead::AES_128_GCM, header: &quic::AES_128, hkdf: hkdf::HKDF_SHA256 }
            }
            Suite::Aes256Gcm => {
                Self { aead: &aead::AES_256_GCM, header: &quic::AES_256, hkdf: hkdf::HKDF_SHA384 }
            }
            Suite::ChaCha20Poly1305 => {
                Self { aead: &aead::CHACHA20_POLY1305, header: &quic::CHACHA20, hkdf: hkdf::HKDF_SHA256 }
            }
        }
    }
}

/// HKDF-Expand-Label with an empty context (RFC 8446 §7.1), filling `out`, which is at most 255 bytes.
pub(super) fn expand_label(secret: &hkdf::Prk, label: &[u8], out: &mut [u8]) {
    const PREFIX: &[u8] = b"tls13 ";
    let length = (out.len() as u16).to_be_bytes();
    let label_length = [(PREFIX.len() + label.len()) as u8];
    let info: [&[u8]; 5] = [&length, &label_length, PREFIX, label, &[0]];
    secret
        .expand(&info, OutputLen(out.len()))
        .and_then(|okm| okm.fill(out))
        .expect("the output has the length that was asked for, and HKDF gives 255 hashes");
}

struct OutputLen(usize);

impl hkdf::KeyType for OutputLen {
    fn len(&self) -> usize {
        self.0
    }
}
