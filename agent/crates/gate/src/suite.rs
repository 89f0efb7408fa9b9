//! Learns the cipher suite and the key exchange that TLS negotiated, which quinn-proto's `Session` does not tell.
//!
//! The wrappers delegate everything and look at the one message that names them, the ServerHello, as it passes:
//!
//! ```text
//! client   read_handshake(CRYPTO bytes)  ─▶ HelloWatch ─▶ rustls
//! server   rustls ─▶ write_handshake(…)  ─▶ HelloWatch ─▶ CRYPTO frames
//! ```

use std::sync::Arc;

use crate::{hybrid, numbers::PacketNumbers, session::Watched};
use quic_core::varint::Reader;
use quinn_proto::{
    ConnectError, ConnectionId, Side,
    crypto::{self, Keys, Session, UnsupportedVersion},
    transport_parameters::TransportParameters,
};

/// A TLS 1.3 cipher suite that we offer: those that lanes know.
pub use quic_core::Suite;

base::labelled! {
    /// The key-exchange group of a handshake: those that we offer.
    #[derive(Clone, Copy, Debug, PartialEq, Eq)]
    pub enum Group {
        /// X25519 (RFC 7748) alone, without a second exchange.
        X25519 => "x25519",
        /// X25519MLKEM768, as module [`crate::hybrid`] makes it.
        Hybrid => "x25519mlkem768",
    }
}

impl Group {
    fn from_code_point(code_point: u16) -> Option<Self> {
        // RFC 8446 §4.2.7.
        const X25519: u16 = 0x001d;
        match code_point {
            X25519 => Some(Self::X25519),
            hybrid::CODE_POINT => Some(Self::Hybrid),
            _ => None,
        }
    }
}

/// What the server chose of the offers, as its ServerHello says.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Choice {
    /// The cipher suite that both ends use.
    pub suite: Suite,
    /// The group in which the keys are agreed.
    pub group: Group,
}

/// The type that `Session::handshake_data` downcasts to for sessions of this module.
#[derive(Clone)]
pub struct HandshakeData {
    /// What was negotiated. The server knows it a step later than the rest; both know it at `Event::Connected`.
    pub choice: Option<Choice>,
    /// The application protocol that was negotiated (ALPN).
    pub protocol: Option<Vec<u8>>,
    /// The numbers of the far end's packets.
    pub numbers: Arc<PacketNumbers>,
}

/// The numbers of the far end's 1-RTT packets on the connection of `session`; `None` if it is not one of this module.
pub fn packet_numbers(session: &dyn Session) -> Option<Arc<PacketNumbers>> {
    Some(session.handshake_data()?.downcast::<HandshakeData>().ok()?.numbers)
}

/// The suite that `session` negotiated; `Some` from `Event::Connected` on if the session is one of this module.
pub fn negotiated(session: &dyn Session) -> Option<Suite> {
    session.handshake_data()?.downcast::<HandshakeData>().ok()?.choice.map(|choice| choice.suite)
}

/// The key exchange that `session` negotiated; `Some` when [`negotiated`] is.
pub fn group(session: &dyn Session) -> Option<Group> {
    session.handshake_data()?.downcast::<HandshakeData>().ok()?.choice.map(|choice| choice.group)
}

/// A client's TLS whose sessions know their suite.
pub struct SuiteClientConfig(
    /// The TLS of rustls that it stands in front of.
    pub Arc<dyn crypto::ClientConfig>,
);

impl SuiteClientConfig {
    pub(crate) fn start(
        &self,
        version: u32,
        server_name: &str,
        params: &TransportParameters,
    ) -> Result<Watched, ConnectError> {
        let inner = Arc::clone(&self.0).start_session(version, server_name, params)?;
        Ok(Watched::new(inner, Side::Client))
    }
}

impl crypto::ClientConfig for SuiteClientConfig {
    fn start_session(
        self: Arc<Self>,
        version: u32,
        server_name: &str,
        params: &TransportParameters,
    ) -> Result<Box<dyn Session>, ConnectError> {
        Ok(Box::new(self.start(version, server_name, params)?))
    }
}

/// A server's TLS whose sessions know their suite.
pub struct SuiteServerConfig(
    /// The TLS of rustls that it stands in front of.
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
        Box::new(Watched::new(inner, Side::Server))
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
    watch.choice().map(|choice| choice.suite)
}

/// Reads a stream of TLS handshake messages up to the ServerHello.
///
/// The stream may arrive in pieces. A HelloRetryRequest is a ServerHello with a special random (RFC 8446 §4.1.4) and is
/// skipped: the real one follows.
#[derive(Debug)]
pub(crate) enum HelloWatch {
    /// The bytes so far, at most [`HelloWatch::MAX_BYTES`].
    Reading(Vec<u8>),
    Found(Choice),
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
    Real(Choice),
    /// A HelloRetryRequest of this many bytes.
    Retry(usize),
    Foreign,
}

impl HelloWatch {
    /// A HelloRetryRequest and a ServerHello of rustls take 1,300 bytes together, of which the hybrid's share is 1,120.
    const MAX_BYTES: usize = 2048;

    pub(crate) fn observe(&mut self, piece: &[u8]) {
        let Self::Reading(buffer) = self else { return };
        let room = Self::MAX_BYTES - buffer.len();
        buffer.extend_from_slice(&piece[..piece.len().min(room)]);
        loop {
            match Hello::parse(buffer) {
                Hello::Incomplete if piece.len() > room => *self = Self::GaveUp,
                Hello::Incomplete => return,
                Hello::Real(choice) => *self = Self::Found(choice),
                Hello::Retry(length) => {
                    buffer.drain(..length);
                    continue;
                }
                Hello::Foreign => *self = Self::GaveUp,
            }
            return;
        }
    }

    pub(crate) fn choice(&self) -> Option<Choice> {
        match self {
            Self::Found(choice) => Some(*choice),
            Self::Reading(_) | Self::GaveUp => None,
        }
    }
}

impl Hello {
    /// RFC 8446 §4: `02 | length 24 | body`.
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
        let Some(body) = rest.get(..length) else { return Self::Incomplete };
        match ServerHello::read(body) {
            Some(hello) if hello.random == RETRY_RANDOM => Self::Retry(HEADER_BYTES + length),
            Some(hello) => hello.choice().map_or(Self::Foreign, Self::Real),
            None => Self::Foreign,
        }
    }
}

/// The fields of a ServerHello that are looked at; its lengths are consistent.
struct ServerHello<'a> {
    random: [u8; 32],
    suite: u16,
    extensions: Reader<'a>,
}

impl<'a> ServerHello<'a> {
    /// RFC 8446 §4.1.3: `legacy_version 16 | random 256 | session id 0..32 | suite 16 | compression 8 | length 16 | extensions`.
    fn read(body: &'a [u8]) -> Option<Self> {
        let mut reader = Reader::new(body);
        let _legacy_version = reader.array::<2>()?;
        let random = reader.array()?;
        let session_id = usize::from(reader.array::<1>()?[0]);
        reader.take(session_id)?;
        let suite = u16::from_be_bytes(reader.array()?);
        let _compression = reader.array::<1>()?;
        let length = u16::from_be_bytes(reader.array()?);
        let extensions = Reader::new(reader.take(usize::from(length))?);
        Some(Self { random, suite, extensions })
    }

    /// The suite, and the group of the extension `key_share` (RFC 8446 §4.2.8).
    fn choice(mut self) -> Option<Choice> {
        const KEY_SHARE: u16 = 51;
        loop {
            let kind = u16::from_be_bytes(self.extensions.array()?);
            let length = u16::from_be_bytes(self.extensions.array()?);
            let content = self.extensions.take(usize::from(length))?;
            if kind == KEY_SHARE {
                let group = Group::from_code_point(u16::from_be_bytes(*content.first_chunk()?))?;
                return Some(Choice { suite: Suite::from_code_point(self.suite)?, group });
            }
        }
    }
}

#[cfg(test)]
#[path = "suite_tests.rs"]
mod tests;
