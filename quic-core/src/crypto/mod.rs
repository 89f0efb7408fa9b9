//! Packet protection (RFC 9001 §5 and §6).
//!
//! * `schedule.rs`: from a secret to keys, and to the secret of the next generation
//! * `aead.rs`, `header_mask.rs`: what a key does to a payload, and to a header
//! * `update.rs`: which generation of keys seals, and which opens

mod aead;
mod header_mask;
mod schedule;
mod update;

pub(crate) use aead::PacketKey;
pub(crate) use header_mask::HeaderKey;
pub(crate) use schedule::Secret;
pub(crate) use update::{KeyChoice, ReceiveKeys, SendKeys};

/// The cipher suite of a lane: the one that TLS negotiated on the control connection.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Suite {
    /// TLS_AES_128_GCM_SHA256, the TLS cipher suite 0x1301.
    Aes128Gcm,
    /// TLS_AES_256_GCM_SHA384, the TLS cipher suite 0x1302.
    Aes256Gcm,
    /// TLS_CHACHA20_POLY1305_SHA256, the TLS cipher suite 0x1303.
    ChaCha20Poly1305,
}

impl Suite {
    /// The suite of a TLS code point (RFC 8446 §B.4), if lanes know it.
    pub fn from_code_point(code_point: u16) -> Option<Self> {
        let suites = [Self::Aes128Gcm, Self::Aes256Gcm, Self::ChaCha20Poly1305];
        suites.into_iter().find(|suite| suite.code_point() == code_point)
    }

    /// The TLS code point of the suite (RFC 8446 §B.4).
    pub const fn code_point(self) -> u16 {
        match self {
            Self::Aes128Gcm => 0x1301,
            Self::Aes256Gcm => 0x1302,
            Self::ChaCha20Poly1305 => 0x1303,
        }
    }

    /// Length of a lane's secret in bytes: the output of the suite's hash.
    pub const fn secret_len(self) -> usize {
        match self {
            Self::Aes128Gcm | Self::ChaCha20Poly1305 => 32,
            Self::Aes256Gcm => 48,
        }
    }

    /// Packets that one key may seal (RFC 9001 §6.6).
    pub(crate) const fn confidentiality_limit(self) -> u64 {
        match self {
            Self::Aes128Gcm | Self::Aes256Gcm => 1 << 23,
            // More than there are packet numbers.
            Self::ChaCha20Poly1305 => u64::MAX,
        }
    }

    /// Packets that may fail authentication before a lane stops opening (RFC 9001 §6.6).
    pub(crate) const fn integrity_limit(self) -> u64 {
        match self {
            Self::Aes128Gcm | Self::Aes256Gcm => 1 << 52,
            Self::ChaCha20Poly1305 => 1 << 36,
        }
    }
}

#[cfg(test)]
mod tests;
