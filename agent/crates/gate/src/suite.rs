//! Learns the cipher suite that TLS negotiated, which quinn-proto's `Session` does not tell.
//!
//! The wrappers delegate everything and look at the one message that names the suite, the ServerHello, as it passes:
//!
//! ```text
//! client   read_handshake(CRYPTO bytes)  ─▶ HelloWatch ─▶ rustls
//! server   rustls ─▶ write_handshake(…)  ─▶ HelloWatch ─▶ CRYPTO frames
//! ```

use std::{any::Any, sync::Arc};

use quinn_proto::{
    ConnectError, ConnectionId, Side, TransportError,
    crypto::{self, Keys, Session, UnsupportedVersion, rustls::HandshakeData as RustlsHandshakeData},
    transport_parameters::TransportParameters,
};

use crate::session::{Hook, Hooked};

/// A TLS 1.3 cipher suite that we offer: those that lanes know.
pub use quic_core::Suite;

/// The type that `Session::handshake_data` downcasts to for sessions of this module.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct HandshakeData {
    /// The negotiated suite. The server knows it a step later than the rest; both know it at `Event::Connected`.
    pub suite: Option<Suite>,
    /// The application protocol that was negotiated (ALPN).
    pub protocol: Option<Vec<u8>>,
}

/// The suite that `session` negotiated; `Some` from `Event::Connected` on if the session is one of this module.
pub fn negotiated(session: &dyn Session) -> Option<Suite> {
    session.handshake_data()?.downcast::<HandshakeData>().ok()?.suite
}

/// A client's TLS whose sessions know their suite.
pub struct SuiteClientConfig(
    /// The TLS of rustls.
    pub Arc<dyn crypto::ClientConfig>,
);

impl crypto::ClientConfig for SuiteClientConfig {
    fn start_session(
        self: Arc<Self>,
        version: u32,
        server_name: &str,
        params: &TransportParameters,
    ) -> Result<Box<dyn Session>, ConnectError> {
        let inner = Arc::clone(&self.0).start_session(version, server_name, params)?;
        Ok(SuiteHook::watch(Side::Client, inner))
    }
}

/// A server's TLS whose sessions know their suite.
pub struct SuiteServerConfig(
    /// The TLS of rustls.
    pub Arc<dyn crypto::ServerConfig>,
);

impl crypto::ServerConfig for SuiteServerConfig {
    fn initial_keys(&self, version: u32, dst_cid: &ConnectionId) -> Result<Keys, UnsupportedVersion> {
        self.0.initial_keys(version, dst_cid)
    }

    fn retry_tag(&self, version: u32, orig_dst_cid: &ConnectionId, packet: &[u8]) -> [u8; 16] {
        self.0.retry_tag(version, orig_dst_cid, packet)
    }

    fn start_session(self: Arc<Self>, version: u32, params: &TransportParameters) -> Box<dyn Session> {
        let inner = Arc::clone(&self.0).start_session(version, params);
        SuiteHook::watch(Side::Server, inner)
    }
}

/// Watches one end's handshake for the ServerHello.
struct SuiteHook {
    side: Side,
    watch: HelloWatch,
}

impl SuiteHook {
    fn watch(side: Side, inner: Box<dyn Session>) -> Box<dyn Session> {
        Box::new(Hooked { inner, hook: Self { side, watch: HelloWatch::default() } })
    }
}

impl Hook for SuiteHook {
    fn read_handshake(&mut self, inner: &mut dyn Session, buf: &[u8]) -> Result<bool, TransportError> {
        if self.side.is_client() {
            self.watch.observe(buf);
        }
        inner.read_handshake(buf)
    }

    fn write_handshake(&mut self, inner: &mut dyn Session, buf: &mut Vec<u8>) -> Option<Keys> {
        let start = buf.len();
        let keys = inner.write_handshake(buf);
        if self.side.is_server() {
            self.watch.observe(&buf[start..]);
        }
        keys
    }

    fn handshake_data(&self, inner: &dyn Session) -> Option<Box<dyn Any>> {
        let inner = inner.handshake_data()?.downcast::<RustlsHandshakeData>().ok()?;
        Some(Box::new(HandshakeData { suite: self.watch.suite(), protocol: inner.protocol }))
    }
}

/// The suite of the ServerHello in a stream that arrives in `pieces`, for the fuzz target.
#[cfg(any(test, feature = "fuzzing"))]
pub(crate) fn suite_in<'a>(pieces: impl Iterator<Item = &'a [u8]>) -> Option<Suite> {
    let mut watch = HelloWatch::default();
    for piece in pieces {
        watch.observe(piece);
        if let HelloWatch::Reading(held) = &watch {
            assert!(held.len() <= HelloWatch::MAX_BYTES && held.capacity() <= 2 * HelloWatch::MAX_BYTES);
        }
    }
    watch.suite()
}

/// Reads a stream of TLS handshake messages up to the suite of the ServerHello.
///
/// The stream may arrive in pieces. A HelloRetryRequest is a ServerHello with a special random (RFC 8446 §4.1.4) and is
/// skipped: the real one follows.
#[derive(Debug)]
enum HelloWatch {
    /// The bytes so far, at most [`HelloWatch::MAX_BYTES`].
    Reading(Vec<u8>),
    Found(Suite),
    /// Not a ServerHello that we understand; rustls decides what becomes of the handshake.
    GaveUp,
}

impl Default for HelloWatch {
    fn default() -> Self {
        Self::Reading(Vec::new())
    }
}

/// The message that the bytes so far hold.
enum Hello {
    Incomplete,
    /// A ServerHello, with the code point of its suite.
    Real(u16),
    /// A HelloRetryRequest of this many bytes.
    Retry(usize),
    Foreign,
}

impl HelloWatch {
    /// A HelloRetryRequest and a ServerHello of rustls take less than 200 bytes together.
    const MAX_BYTES: usize = 1024;

    fn observe(&mut self, piece: &[u8]) {
        let Self::Reading(buffer) = self else { return };
        let room = Self::MAX_BYTES - buffer.len();
        buffer.extend_from_slice(&piece[..piece.len().min(room)]);
        loop {
            match Hello::parse(buffer) {
                Hello::Incomplete if piece.len() > room => *self = Self::GaveUp,
                Hello::Incomplete => return,
                Hello::Real(code_point) => {
                    *self = Suite::from_code_point(code_point).map_or(Self::GaveUp, Self::Found);
                }
                Hello::Retry(length) => {
                    buffer.drain(..length);
                    continue;
                }
                Hello::Foreign => *self = Self::GaveUp,
            }
            return;
        }
    }

    fn suite(&self) -> Option<Suite> {
        match self {
            Self::Found(suite) => Some(*suite),
            Self::Reading(_) | Self::GaveUp => None,
        }
    }
}

impl Hello {
    /// RFC 8446 §4 and §4.1.3: `02 | length 24 | legacy_version 16 | random 256 | session id 0..32 | suite 16 | …`.
    fn parse(bytes: &[u8]) -> Self {
        const SERVER_HELLO: u8 = 2;
        const HEADER_BYTES: usize = 4;
        // SHA-256 of "HelloRetryRequest" (RFC 8446 §4.1.3).
        const RETRY_RANDOM: [u8; 32] = [
            0xcf, 0x21, 0xad, 0x74, 0xe5, 0x9a, 0x61, 0x11, 0xbe, 0x1d, 0x8c, 0x02, 0x1e, 0x65, 0xb8, 0x91,
            0xc2, 0xa2, 0x11, 0x16, 0x7a, 0xbb, 0x8c, 0x5e, 0x07, 0x9e, 0x09, 0xe2, 0xc8, 0xa8, 0x33, 0x9c,
        ];
        if bytes.first().is_some_and(|kind| *kind != SERVER_HELLO) {
            return Self::Foreign;
        }
        let Some((header, rest)) = bytes.split_at_checked(HEADER_BYTES) else { return Self::Incomplete };
        let length = usize::from(header[1]) << 16 | usize::from(header[2]) << 8 | usize::from(header[3]);
        // Cut to the message, so that a wrong inner length cannot read the next one.
        let body = &rest[..rest.len().min(length)];
        match Self::random_and_suite(body) {
            Some((random, _)) if random == RETRY_RANDOM && rest.len() >= length => {
                Self::Retry(HEADER_BYTES + length)
            }
            Some((random, _)) if random == RETRY_RANDOM => Self::Incomplete,
            Some((_, suite)) => Self::Real(suite),
            None if body.len() == length => Self::Foreign,
            None => Self::Incomplete,
        }
    }

    fn random_and_suite(body: &[u8]) -> Option<([u8; 32], u16)> {
        const LEGACY_VERSION_BYTES: usize = 2;
        let random = body.get(LEGACY_VERSION_BYTES..)?.first_chunk::<32>()?;
        let after_random = body.get(LEGACY_VERSION_BYTES + random.len()..)?;
        let (session_id_bytes, rest) = after_random.split_first()?;
        let suite = rest.get(usize::from(*session_id_bytes)..)?.first_chunk::<2>()?;
        Some((*random, u16::from_be_bytes(*suite)))
    }
}

#[cfg(test)]
#[path = "suite_tests.rs"]
mod tests;
