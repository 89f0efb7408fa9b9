//! The QUIC endpoint of a worker: which clients may connect, and how large packets may be.

use std::{
    io,
    net::SocketAddr,
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
    time::{SystemTime, UNIX_EPOCH},
};

use base::clock::Clock;
use config;
use gate::{
    admission::Admission,
    identity::PublicKey,
    refusals::{Refusal, Refusals, Why},
    tls,
};
use quinn_proto::{TransportConfig, crypto::HandshakeTokenKey};
use ring::{hkdf, hmac};
use wire::cid::ConnectionIds;

use crate::{
    control::{
        driver::{
            Control,
            accept::{Acceptance, OwnTransport},
        },
        transport,
    },
    hub::Hub,
    registry::PeerRegistry,
    worker::context::{max_packet, setup::Setup},
};

/// Checks the certificate of the client in one handshake.
struct Client {
    registry: Arc<PeerRegistry>,
    /// The X25519 key in the client's knock. Without a knock, any allowed key is accepted.
    agreement: Option<[u8; 32]>,
    source: SocketAddr,
    refused: Arc<AtomicU64>,
    refusals: Arc<Refusals>,
    clock: Arc<dyn Clock + Send + Sync>,
}

impl Client {
    pub(crate) fn knocked_with(&self, key: &[u8; 32]) -> bool {
        self.agreement.is_none_or(|knocked| PublicKey(*key).agreement() == Some(knocked))
    }
}

impl tls::ClientKeys for Client {
    fn is_allowed(&self, key: &[u8; 32]) -> bool {
        // The registry is asked again here: the key may have been removed since the knock.
        self.knocked_with(key) && self.registry.allows(key)
    }

    fn refused(&self, refusal: &tls::Refusal) {
        self.refused.fetch_add(1, Ordering::Relaxed);
        let why = match refusal {
            tls::Refusal::UnknownKey(key) if self.knocked_with(key) => Why::Key(Some(PublicKey(*key))),
            tls::Refusal::UnknownKey(_) | tls::Refusal::NotEd25519 => Why::Certificate,
        };
        let refusal = Refusal { at: self.clock.unix_seconds(), source: self.source, why };
        self.refusals.note(refusal, self.clock.now());
    }
}

/// Makes the endpoint of a worker's control connections.
///
/// The endpoint's own keys are made from `seed`.
pub(crate) fn control(setup: &Setup, ids: &ConnectionIds, seed: [u8; 32]) -> Result<Control, StartError> {
    let Setup { config, identity, own, registry, refusals, hub, metrics, clock, .. } = setup;
    let generator = ids.clone();
    let reset_key = Arc::new(hmac::Key::new(hmac::HMAC_SHA256, &seed));
    let endpoint =
        tls::endpoint_config(move || Box::new(generator.clone()), reset_key, max_packet(config), Some(seed));
    let acceptance = if config.transport.listen.is_empty() {
        None
    } else {
        let knock = config.access.knock == config::Knock::Required;
        let token_key: Arc<dyn HandshakeTokenKey> = if knock {
            Arc::clone(&own.retry) as _
        } else {
            Arc::new(hkdf::Salt::new(hkdf::HKDF_SHA256, &[]).extract(&seed))
        };
        let (max_packet, limits) = (max_packet(config), config.limits);
        // The dialler keeps the connection alive, because it is the end that may be behind a NAT.
        let transport = move || {
            transport::transport_config(None, max_packet, limits.tcp_streams_per_peer, limits.stream_bytes)
        };
        let mut server = tls::server_config(tls::initial_crypto(identity)?, Arc::new(transport()), token_key);
        server.time_source(Arc::new(WallClock(Arc::clone(clock))));
        let transport = captured(transport, registry, hub, clock);
        let (identity, registry, refusals, clock) =
            (Arc::clone(identity), Arc::clone(registry), Arc::clone(refusals), Arc::clone(clock));
        let refused = Arc::clone(metrics.refused_keys());
        let tls = move |admission: Option<&Admission>, source, key_exchange| {
            let client = Client {
                registry: Arc::clone(&registry),
                agreement: admission.map(|admission| admission.agreement),
                source,
                refused: Arc::clone(&refused),
                refusals: Arc::clone(&refusals),
                clock: Arc::clone(&clock),
            };
            let own = admission.map(|admission| admission.own).unwrap_or_default();
            tls::server_crypto(identity.of(own), key_exchange, Arc::new(client)).ok()
        };
        Some(Acceptance { server: Arc::new(server), tls: Box::new(tls), transport, knock })
    };
    // The operator's limit is for all workers together.
    let handshakes = config.limits.handshakes.div_ceil(usize::from(ids.workers()));
    let mut control = Control::new(endpoint, acceptance, handshakes, Arc::clone(&hub.streams));
    control.acceptor.configure(handshakes, config.transport.key_exchange);
    Ok(control)
}

/// Makes the transport configuration of each connection, with a qlog stream for peers that an operator captures.
fn captured(
    transport: impl Fn() -> TransportConfig + 'static,
    registry: &Arc<PeerRegistry>,
    hub: &Arc<Hub>,
    clock: &Arc<dyn Clock + Send + Sync>,
) -> OwnTransport {
    let (registry, hub, clock) = (Arc::clone(registry), Arc::clone(hub), Arc::clone(clock));
    Box::new(move |admission: Option<&Admission>| {
        let mut transport = transport();
        if let Some(admission) = admission
            && let Some(peer) = registry.peer_of_agreement(&admission.agreement)
        {
            transport.qlog_stream(hub.taps().stream(peer, clock.now()));
        }
        transport
    })
}

/// Gives quinn-proto the wall-clock time, which tells the age of Retry tokens.
struct WallClock(Arc<dyn Clock + Send + Sync>);

impl quinn_proto::TimeSource for WallClock {
    fn now(&self) -> SystemTime {
        UNIX_EPOCH + self.0.unix_time()
    }
}

/// Why a worker could not start.
#[derive(Debug, thiserror::Error)]
pub enum StartError {
    /// A port could not be opened.
    #[error("cannot listen on {address} ({what}): {error}{}", remedy(.error))]
    Listen {
        address: SocketAddr,
        /// The configuration key of the address.
        what: &'static str,
        error: io::Error,
    },
    /// This worker's queue of the TUN device cannot be used.
    #[error("cannot read and write the TUN device (tun): {0}")]
    Tun(io::Error),
    /// Packets cannot be marked as `transport.mark` asks.
    #[error("cannot set transport.mark: {0} (remedy: CAP_NET_ADMIN, or mark = 0)")]
    Mark(io::Error),
    /// The TLS configuration cannot be built.
    #[error("cannot set up TLS: {0}")]
    Tls(#[from] tls::TlsError),
}

/// Returns the end of an error message about a socket: a remedy, or an empty string if none is known.
pub fn remedy(error: &io::Error) -> &'static str {
    const REMEDIES: [(io::ErrorKind, &str); 3] = [
        (
            io::ErrorKind::AddrInUse,
            " (remedy: stop the other process, see `ss -lpn`, or choose another port)",
        ),
        (io::ErrorKind::PermissionDenied, " (remedy: a port from 1024 on, or CAP_NET_BIND_SERVICE)"),
        (io::ErrorKind::AddrNotAvailable, " (remedy: an address of this host, see `ip address`)"),
    ];
    REMEDIES.iter().find(|(kind, _)| *kind == error.kind()).map_or("", |(_, remedy)| remedy)
}
