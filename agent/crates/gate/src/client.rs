//! Puts a knock into the token of a connection attempt, with hooks of an unmodified quinn-proto.
//!
//! A knock needs the destination connection ID and the ClientHello, and quinn-proto asks for its token after both exist:
//!
//! ```text
//!  Endpoint::connect ─▶ initial_dst_cid_provider    chooses the DCID                 → slot
//!                    ─▶ ClientConfig::start_session takes the complete ClientHello from
//!                       │                           rustls, seals the knock          → slot
//!                       └ Session::write_handshake  gives the same bytes back, once
//!                    ─▶ TokenStore::take            the knock                        ← slot
//! ```
//!
//! quinn-proto repeats the token in every Initial packet of the attempt, or the token of a Retry instead.

use std::{
    fmt,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
};

use bytes::Bytes;
use quinn_proto::{
    ConnectError, ConnectionId, TokenStore,
    crypto::{self, Session, UnsupportedVersion},
    transport_parameters::TransportParameters,
};
use zeroize::Zeroizing;

use crate::{
    identity::AgreementKey,
    initial::is_complete,
    knock::{About, KNOCK_BYTES, ServerKey, seal},
    suite::SuiteClientConfig,
};

/// The material of the knock for one connection attempt.
pub struct Knock {
    /// The X25519 key of the client.
    pub own: Arc<AgreementKey>,
    /// The public key of the server to knock at.
    pub server: Arc<ServerKey>,
    /// The time of the client's wall clock.
    pub unix_seconds: u64,
    /// 32 random bytes, for this attempt only.
    pub ephemeral: Zeroizing<[u8; 32]>,
    /// Whether the attempt offers a weaker key exchange than the client can do: see [`Opened::fallback`](crate::knock::Opened).
    pub fallback: bool,
}

impl fmt::Debug for Knock {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Knock({:?}, {} s)", self.server, self.unix_seconds)
    }
}

/// The client configuration of one `Endpoint::connect` whose Initial packets carry `knock`.
///
/// `config` is the TLS to dial with, `dcid_provider` makes the destination of the first packet. The transport parameters
/// are the default; set them on the result. A second `connect` with it fails with `ConnectError::EndpointStopping`, as
/// does one whose TLS does not give its complete ClientHello at once: its knock would open nothing.
pub fn arm(
    config: Arc<SuiteClientConfig>,
    knock: Knock,
    dcid_provider: Arc<dyn Fn() -> ConnectionId + Send + Sync>,
) -> quinn_proto::ClientConfig {
    let slot = Arc::new(Slot(Mutex::new(State { knock: Some(knock), dcid: None, token: None })));
    let crypto = KnockClientConfig { inner: config, slot: Arc::clone(&slot) };
    let mut armed = quinn_proto::ClientConfig::new(Arc::new(crypto));
    let remembers = Arc::clone(&slot);
    armed.initial_dst_cid_provider(Arc::new(move || {
        let dcid = dcid_provider();
        remembers.lock().dcid = Some(dcid);
        dcid
    }));
    armed.token_store(slot);
    armed
}

/// The state that the hooks of one attempt share.
struct Slot(Mutex<State>);

struct State {
    knock: Option<Knock>,
    dcid: Option<ConnectionId>,
    token: Option<[u8; KNOCK_BYTES]>,
}

impl Slot {
    fn lock(&self) -> MutexGuard<'_, State> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Seals the knock of this attempt; once, because the same ephemeral key must not seal two messages.
    fn seal(&self, client_hello: &[u8]) -> Result<(), ConnectError> {
        let mut state = self.lock();
        let (knock, dcid) =
            state.knock.take().zip(state.dcid.take()).ok_or(ConnectError::EndpointStopping)?;
        let Knock { own, server, unix_seconds, ephemeral, fallback } = knock;
        let about = About { client_hello, unix_seconds, fallback };
        let token = seal(&own, &server, &dcid, about, &ephemeral);
        state.token = Some(token.map_err(|_| ConnectError::EndpointStopping)?);
        Ok(())
    }
}

impl TokenStore for Slot {
    /// No agent sends NEW_TOKEN, and a token from elsewhere would displace the knock.
    fn insert(&self, _server_name: &str, _token: Bytes) {}

    fn take(&self, _server_name: &str) -> Option<Bytes> {
        self.lock().token.take().map(|token| Bytes::copy_from_slice(&token))
    }
}

/// A client's TLS whose first session seals the knock.
struct KnockClientConfig {
    inner: Arc<SuiteClientConfig>,
    slot: Arc<Slot>,
}

impl crypto::ClientConfig for KnockClientConfig {
    fn start_session(
        self: Arc<Self>,
        version: u32,
        server_name: &str,
        params: &TransportParameters,
    ) -> Result<Box<dyn Session>, ConnectError> {
        // The knock names the version that it travels in.
        if version != 1 {
            return Err(UnsupportedVersion.into());
        }
        let mut session = self.inner.start(version, server_name, params)?;
        let mut client_hello = Vec::new();
        let keys = session.write_handshake(&mut client_hello);
        if !is_complete(&client_hello) {
            return Err(ConnectError::EndpointStopping);
        }
        self.slot.seal(&client_hello)?;
        session.written = Some((client_hello, keys));
        Ok(Box::new(session))
    }
}

#[cfg(test)]
#[path = "client_tests.rs"]
mod tests;
