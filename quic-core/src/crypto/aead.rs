//! Seals and opens packet payloads with an AEAD (RFC 9001 §5.3).

use std::fmt;

use ring::aead::{Aad, LessSafeKey, Nonce, Tag};
use ring::error::Unspecified;

use crate::PacketNumber;

/// Length of the IV and of the nonce, the same for all suites.
pub(super) const IV_LEN: usize = 12;

/// The key and IV of one direction in one generation.
pub(crate) struct PacketKey {
    key: LessSafeKey,
    iv: [u8; IV_LEN],
}

impl PacketKey {
    pub(super) fn new(key: LessSafeKey, iv: [u8; IV_LEN]) -> Self {
        Self { key, iv }
    }

    /// Encrypts `payload` in place; `header` is the associated data.
    #[inline]
    pub(crate) fn seal(
        &self,
        number: PacketNumber,
        header: &[u8],
        payload: &mut [u8],
    ) -> Result<Tag, Unspecified> {
        self.key.seal_in_place_separate_tag(self.nonce(number), Aad::from(header), payload)
    }

    /// Decrypts `payload_and_tag` in place; the payload is all of it but the tag.
    #[inline]
    pub(crate) fn open(
        &self,
        number: PacketNumber,
        header: &[u8],
        payload_and_tag: &mut [u8],
    ) -> Result<(), Unspecified> {
        self.key.open_in_place(self.nonce(number), Aad::from(header), payload_and_tag).map(|_payload| ())
    }

    /// The packet number, left-padded to the length of the IV, XOR the IV.
    #[inline]
    fn nonce(&self, number: PacketNumber) -> Nonce {
        let mut nonce = self.iv;
        for (byte, number) in nonce[IV_LEN - 8..].iter_mut().zip(number.0.to_be_bytes()) {
            *byte ^= number;
        }
        Nonce::assume_unique_for_key(nonce)
    }
}

impl fmt::Debug for PacketKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("PacketKey").finish_non_exhaustive()
    }
}
