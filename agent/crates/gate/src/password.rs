//! Passwords of users that the agent makes, and what is kept of one: a keyed hash.
//!
//! ```text
//!   password      128 random bits as 22 characters of base64url, shown once
//!   password_key  base64url(key) "." base64url(HMAC-SHA-256(key, password)), the key 16 random bytes of its own
//! ```
//!
//! The key stands beside the hash, so that an exit needs nothing else to check a password, and the same line works at several exits. It
//! need not be secret: of 128 random bits nobody finds the right ones by trying. Passwords that people choose are not made for this.

use std::{fmt, str::FromStr};

use data_encoding::BASE64URL_NOPAD;
use ring::{
    hmac,
    rand::{SecureRandom, SystemRandom},
};
use zeroize::Zeroizing;

const KEY_BYTES: usize = 16;
const HASH_BYTES: usize = 32;

/// How many random bytes a password has.
const PASSWORD_BYTES: usize = 16;

/// What is kept of a password: enough to recognise it, and no more.
#[derive(Clone, PartialEq, Eq)]
pub struct PasswordKey {
    key: [u8; KEY_BYTES],
    hash: [u8; HASH_BYTES],
}

/// Why a text is no [`PasswordKey`].
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("is not what culvert user add writes: 22 characters, a dot and 43 characters")]
pub struct NotAPasswordKey;

/// The system gives no random numbers.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("the system gives no random numbers")]
pub struct NoRandomness;

impl PasswordKey {
    /// The one of no password: whatever is compared with it differs, at the same cost.
    pub const NOBODY: Self = Self { key: [0; KEY_BYTES], hash: [0; HASH_BYTES] };

    /// Makes a password; it is wiped when it is dropped.
    ///
    /// # Errors
    ///
    /// The system gives no random numbers.
    pub fn generate() -> Result<(Self, Zeroizing<String>), NoRandomness> {
        let mut bytes = Zeroizing::new([0; PASSWORD_BYTES]);
        SystemRandom::new().fill(bytes.as_mut_slice()).map_err(|_| NoRandomness)?;
        let password = Zeroizing::new(BASE64URL_NOPAD.encode(bytes.as_slice()));
        Ok((Self::of(password.as_bytes())?, password))
    }

    /// The hash of `password` under a new key. Of one that a person has chosen it is to be kept in memory only: it can be guessed.
    ///
    /// # Errors
    ///
    /// The system gives no random numbers.
    pub fn of(password: &[u8]) -> Result<Self, NoRandomness> {
        let (mut key, mut hash) = ([0; KEY_BYTES], [0; HASH_BYTES]);
        SystemRandom::new().fill(&mut key).map_err(|_| NoRandomness)?;
        hash.copy_from_slice(hmac::sign(&hmac::Key::new(hmac::HMAC_SHA256, &key), password).as_ref());
        Ok(Self { key, hash })
    }

    /// Whether `password` is the one that this was made of. The time depends on its length alone.
    #[must_use]
    pub fn is_of(&self, password: &[u8]) -> bool {
        hmac::verify(&hmac::Key::new(hmac::HMAC_SHA256, &self.key), password, &self.hash).is_ok()
    }
}

impl fmt::Display for PasswordKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}.{}", BASE64URL_NOPAD.encode(&self.key), BASE64URL_NOPAD.encode(&self.hash))
    }
}

impl fmt::Debug for PasswordKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("PasswordKey")
    }
}

impl FromStr for PasswordKey {
    type Err = NotAPasswordKey;

    fn from_str(text: &str) -> Result<Self, NotAPasswordKey> {
        let (key, hash) = text.split_once('.').ok_or(NotAPasswordKey)?;
        let decode = |text: &str| BASE64URL_NOPAD.decode(text.as_bytes()).map_err(|_| NotAPasswordKey);
        let (key, hash) = (decode(key)?, decode(hash)?);
        let fits = |_| NotAPasswordKey;
        Ok(Self {
            key: key.as_slice().try_into().map_err(fits)?,
            hash: hash.as_slice().try_into().map_err(fits)?,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_password_is_recognised_and_no_other() {
        let (kept, password) = PasswordKey::generate().unwrap();
        assert_eq!(password.len(), 22);
        let read: PasswordKey = kept.to_string().parse().unwrap();
        assert!(read.is_of(password.as_bytes()));
        let mut wrong = password.as_bytes().to_vec();
        wrong[0] ^= 1;
        let (other, _) = PasswordKey::generate().unwrap();
        assert!(!read.is_of(&wrong) && !read.is_of(b"") && !other.is_of(password.as_bytes()));
        assert!(!PasswordKey::NOBODY.is_of(password.as_bytes()) && !PasswordKey::NOBODY.is_of(b""));
    }

    /// The hash of another implementation: Python's `hmac.new(bytes(range(16)), b"password", "sha256")`.
    #[test]
    fn the_hash_is_hmac_sha_256() {
        let text = "AAECAwQFBgcICQoLDA0ODw.4yrzU_2JWBs4fsbjC2z6fYfYKhJg4K1iCCKIfaWj0So";
        let kept: PasswordKey = text.parse().unwrap();
        assert!(kept.is_of(b"password") && !kept.is_of(b"Password"));
        assert_eq!(kept.to_string(), text);
    }

    #[test]
    fn what_is_no_key_is_refused() {
        let (kept, _) = PasswordKey::generate().unwrap();
        let text = kept.to_string();
        for wrong in
            ["", ".", "a.b", &text[1..], &text[..text.len() - 1], &text.replace('.', ""), &format!("{text}=")]
        {
            assert_eq!(wrong.parse::<PasswordKey>(), Err(NotAPasswordKey), "{wrong:?}");
        }
        assert_eq!(format!("{kept:?}"), "PasswordKey");
    }
}
