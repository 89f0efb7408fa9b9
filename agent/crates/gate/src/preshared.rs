//! Preshared keys: 32 bytes that two agents have beside each other's public keys, mixed into the secrets of their lanes.
//!
//! ```text
//!   proof    = HKDF-Expand(HKDF-Extract(salt = key, IKM = exporter "EXPORTER culvert psk"), "culvert psk proof 1" | sender, 16)
//!   lane     = HKDF-Expand(HKDF-Extract(salt = key, IKM = the lane's exporter secret), "culvert psk lane 1", its length)
//! ```
//!
//! HKDF-Extract is HMAC, and HMAC is taken for a PRF in its key and in its message: what comes out cannot be told from random bytes as
//! long as one of the two is unknown. So a lane falls only with the key *and* the key exchange of TLS.

use std::{
    fmt,
    path::{Path, PathBuf},
    sync::Arc,
};

use data_encoding::BASE64URL_NOPAD;
use quic_core::Suite;
use ring::hkdf;
use subtle::ConstantTimeEq;
use wire::messages::{KeyProof, MAX_PRESHARED_KEYS};
use zeroize::Zeroizing;

use crate::identity::secret_file::{self, SecretError};

/// The label under which TLS exports the bytes that a proof of a preshared key is bound to (RFC 8446 §7.5).
pub const EXPORTER_LABEL: &[u8] = b"EXPORTER culvert psk";

const KEY_BYTES: usize = 32;

/// Characters of the written form: unpadded base64url, as public keys are written.
const TEXT_LEN: usize = 43;

/// The text of a key with padding and a line's end; a file has no more.
const MAX_FILE_BYTES: usize = TEXT_LEN + 3;

/// A key that two agents share; it is wiped when its last copy is dropped, and never shown.
#[derive(Clone)]
pub struct PresharedKey(Arc<Zeroizing<[u8; KEY_BYTES]>>);

impl fmt::Debug for PresharedKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("PresharedKey")
    }
}

impl PartialEq for PresharedKey {
    fn eq(&self, other: &Self) -> bool {
        self.0.as_slice().ct_eq(other.0.as_slice()).into()
    }
}

impl Eq for PresharedKey {}

/// Why a preshared key could not be read or written; [`PresharedKeyError::remedy`] says what to do.
#[derive(Debug, thiserror::Error)]
pub enum PresharedKeyError {
    /// The key was not made, or its file cannot be used.
    #[error(transparent)]
    Secret(#[from] SecretError),
    /// The file's content is not a preshared key.
    #[error("{} does not hold a preshared key: one line of 43 characters", .0.display())]
    NotAKey(PathBuf),
}

impl PresharedKeyError {
    /// The steps that an operator can take.
    #[must_use]
    pub fn remedy(&self) -> String {
        match self {
            Self::Secret(error) => error.remedy(
                |path| {
                    let path = path.display();
                    format!("copy the file from the peer, or write a new one for both with culvert genpsk --out {path}")
                },
                |path| {
                    let path = path.display();
                    format!("let the user that runs culvert read it, as in chgrp culvert {path} && chmod g+r {path}")
                },
            ),
            Self::NotAKey(_) => "write a new one for both ends with culvert genpsk".to_owned(),
        }
    }
}

/// The end of a connection that shows a proof; its number stands for it there, as in the context of a lane's secret.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Prover {
    /// The end that dialled the connection.
    Dialler = 0,
    /// The end at which the connection was accepted.
    Listener = 1,
}

impl Prover {
    /// The end that dialled, or the other one.
    #[must_use]
    pub fn new(dialled: bool) -> Self {
        if dialled { Self::Dialler } else { Self::Listener }
    }

    /// The far end of the connection.
    #[must_use]
    pub fn other(self) -> Self {
        match self {
            Self::Dialler => Self::Listener,
            Self::Listener => Self::Dialler,
        }
    }
}

/// The number of bytes that HKDF is to give.
struct Length(usize);

impl hkdf::KeyType for Length {
    fn len(&self) -> usize {
        self.0
    }
}

impl PresharedKey {
    /// The key with these bytes; `None` for zeros, which is what an unfilled key looks like.
    #[must_use]
    pub fn new(bytes: &[u8; KEY_BYTES]) -> Option<Self> {
        (*bytes != [0; KEY_BYTES]).then(|| Self(Arc::new(Zeroizing::new(*bytes))))
    }

    /// A new key from the system's random generator.
    ///
    /// # Errors
    /// [`SecretError::Random`].
    pub fn generate() -> Result<Self, PresharedKeyError> {
        Self::new(&*secret_file::random()?).ok_or_else(|| SecretError::Random.into())
    }

    /// Reads a file with one key. Standard base64 with padding, as other programs write such keys, is read as well.
    ///
    /// # Errors
    /// Every variant that is about reading; a file that everybody can access is refused.
    pub fn load(path: &Path) -> Result<Self, PresharedKeyError> {
        let text = secret_file::read(path, MAX_FILE_BYTES)?;
        Self::from_text(&text).ok_or_else(|| PresharedKeyError::NotAKey(path.to_owned()))
    }

    /// Reads the text of a key: 43 characters of base64url and at most a line's end, or standard base64 with padding.
    #[must_use]
    pub fn from_text(text: &[u8]) -> Option<Self> {
        let text = text.strip_suffix(b"\n").unwrap_or(text);
        let text = text.strip_suffix(b"\r").unwrap_or(text);
        let text = text.strip_suffix(b"=").unwrap_or(text);
        let mut plain = Zeroizing::new([0; TEXT_LEN]);
        if text.len() != TEXT_LEN {
            return None;
        }
        for (plain, byte) in plain.iter_mut().zip(text) {
            *plain = match byte {
                b'+' => b'-',
                b'/' => b'_',
                byte => *byte,
            };
        }
        let mut bytes = Zeroizing::new([0; KEY_BYTES]);
        let fits = BASE64URL_NOPAD.decode_mut(plain.as_ref(), bytes.as_mut()) == Ok(KEY_BYTES);
        if fits { Self::new(&bytes) } else { None }
    }

    /// The key as a line of a file, the form that [`PresharedKey::from_text`] reads.
    #[must_use]
    pub fn to_text(&self) -> Zeroizing<[u8; TEXT_LEN + 1]> {
        let mut text = Zeroizing::new([b'\n'; TEXT_LEN + 1]);
        BASE64URL_NOPAD.encode_mut(self.0.as_slice(), &mut text[..TEXT_LEN]);
        text
    }

    /// Writes the key to a new file that only its owner can read.
    ///
    /// # Errors
    /// [`SecretError::Exists`] rather than overwriting, or the kernel's refusal.
    pub fn write_new(&self, path: &Path) -> Result<(), PresharedKeyError> {
        Ok(secret_file::write_new(path, "a preshared key", self.to_text().as_ref())?)
    }

    /// The proof that `prover` has this key, on the connection that exports `exported` under [`EXPORTER_LABEL`].
    #[must_use]
    pub fn proof(&self, exported: &[u8; 32], prover: Prover) -> KeyProof {
        let mut proof = KeyProof([0; 16]);
        self.mix(hkdf::HKDF_SHA256, exported, &[b"culvert psk proof 1", &[prover as u8]], &mut proof.0);
        proof
    }

    /// Mixes the key into `secret`, the secret of one direction of a lane whose cipher suite is `suite`.
    pub fn mix_into_lane(&self, suite: Suite, secret: &mut [u8]) {
        let hash = match suite {
            Suite::Aes128Gcm | Suite::ChaCha20Poly1305 => hkdf::HKDF_SHA256,
            Suite::Aes256Gcm => hkdf::HKDF_SHA384,
        };
        let from_tls = Zeroizing::new(secret.to_vec());
        self.mix(hash, &from_tls, &[b"culvert psk lane 1"], secret);
    }

    fn mix(&self, hash: hkdf::Algorithm, exported: &[u8], info: &[&[u8]], out: &mut [u8]) {
        let length = Length(out.len());
        let mixed = hkdf::Salt::new(hash, self.0.as_slice()).extract(exported);
        mixed
            .expand(info, length)
            .and_then(|okm| okm.fill(out))
            .expect("HKDF gives 255 hashes, and no secret is longer than one");
    }
}

/// Why two ends with these keys do not connect.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Disagreement {
    /// We have a key, and the far end shows none.
    Missing,
    /// The far end shows a key, and we have none.
    Unexpected,
    /// Both have keys, and none in common.
    Different,
}

/// The keys of one end of a connection, and what the connection exports under [`EXPORTER_LABEL`].
#[derive(Clone, Copy)]
pub struct Holder<'a> {
    /// The keys of this end, the preferred one first.
    pub keys: &'a [PresharedKey],
    /// The bytes that TLS exports under [`EXPORTER_LABEL`] for this connection.
    pub exported: &'a [u8; 32],
    /// Whether this end dialled the connection or accepted it.
    pub end: Prover,
}

impl Holder<'_> {
    /// What this end shows of its keys.
    #[must_use]
    pub fn shows(&self) -> Vec<KeyProof> {
        let keys = self.keys.iter().take(MAX_PRESHARED_KEYS);
        keys.map(|key| key.proof(self.exported, self.end)).collect()
    }

    /// The place among our keys of the one that both ends use, which the far end finds as well; `None` if neither has any. The first
    /// key of the dialler that the listener has, too.
    ///
    /// It computes a hash for each of our keys, however many proofs the far end shows.
    ///
    /// # Errors
    /// The ends have no key in common, although one has any.
    pub fn agree(&self, theirs: &[KeyProof]) -> Result<Option<usize>, Disagreement> {
        match (self.keys.is_empty(), theirs.is_empty()) {
            (true, true) => return Ok(None),
            (true, false) => return Err(Disagreement::Unexpected),
            (false, true) => return Err(Disagreement::Missing),
            (false, false) => {}
        }
        let expected = self.expected();
        let shared = match self.end {
            Prover::Dialler => expected.iter().position(|own| theirs.iter().any(|proof| is_same(own, proof))),
            Prover::Listener => theirs.iter().find_map(|proof| place_of(&expected, proof)),
        };
        shared.map(Some).ok_or(Disagreement::Different)
    }

    /// The place among our keys of the one that the far end has shown with `proof`.
    #[must_use]
    pub fn find(&self, proof: &KeyProof) -> Option<usize> {
        place_of(&self.expected(), proof)
    }

    /// The proofs that the far end shows if it has our keys.
    fn expected(&self) -> Vec<KeyProof> {
        self.keys.iter().map(|key| key.proof(self.exported, self.end.other())).collect()
    }
}

fn place_of(expected: &[KeyProof], proof: &KeyProof) -> Option<usize> {
    expected.iter().position(|own| is_same(own, proof))
}

/// Compares in constant time: how many bytes of a guess are right must not show.
fn is_same(own: &KeyProof, proof: &KeyProof) -> bool {
    own.0.ct_eq(&proof.0).into()
}

#[cfg(test)]
#[path = "preshared_tests.rs"]
mod tests;
