//! Header protection masks (RFC 9001 §5.4).

use std::fmt;

use ring::aead::quic::HeaderProtectionKey;

/// The header-protection key of one direction; it outlives key updates (RFC 9001 §6).
pub(crate) struct HeaderKey(HeaderProtectionKey);

impl HeaderKey {
    pub(super) fn new(key: HeaderProtectionKey) -> Self {
        Self(key)
    }

    /// The mask for a packet: byte 0 for its flags, bytes 1 to 4 for its number.
    #[inline]
    pub(crate) fn mask(&self, sample: &[u8; 16]) -> [u8; 5] {
        self.0.new_mask(sample).expect("a sample has 16 bytes for every algorithm")
    }
}

impl fmt::Debug for HeaderKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("HeaderKey").finish_non_exhaustive()
    }
}
