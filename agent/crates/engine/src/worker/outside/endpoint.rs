//! The QUIC endpoint of a worker: which clients may connect, and how large packets may be.

use std::{
    io,
    net::SocketAddr,
    rc::Rc,
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
    tls::{self, MIN_PACKET},
};
use net::Ways;
use quinn_proto::{TransportConfig, crypto::HandshakeTokenKey};
use ring::{hkdf, hmac};
use wire::cid::ConnectionIds;

use crate::{
    control::{
        driver::{
            Control,
            accept::{Acceptance, OwnTransport},
        },
        transport::{self, PacketSizes},
    },
    registry::PeerRegistry,
    worker::context::{
        packet_sizes::{most_at, most_towards},
        setup::Setup,
    },
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
    let endpoint = tls::endpoint_config(move || Box::new(generator.clone()), reset_key, Some(seed));
    let acceptance = if config.transport.listen.is_empty() {
        None
    } else {
        let knock = config.access.knock == config::Knock::Required;
        let token_key: Arc<dyn HandshakeTokenKey> = if knock {
            Arc::clone(&own.retry) as _
        } else {
            Arc::new(hkdf::Salt::new(hkdf::HKDF_SHA256, &[]).extract(&seed))
        };
        let limits = config.limits;
        // The dialler keeps the connection alive, because it is the end that may be behind a NAT.
        let transport = move |most| {
            let packets = PacketSizes::up_to(most);
            transport::transport_config(None, packets, limits.tcp_streams_per_peer, limits.stream_bytes)
        };
        let nobody = Arc::new(transport(MIN_PACKET));
        let mut server = tls::server_config(tls::initial_crypto(identity)?, nobody, token_key);
        server.time_source(Arc::new(WallClock(Arc::clone(clock))));
        let transport = own_transport(transport, setup);
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

/// Makes the transport configuration of each connection from the upper end of its path MTU discovery: with a qlog stream for peers that
/// an operator captures.
fn own_transport(transport: impl Fn(u16) -> TransportConfig + 'static, setup: &Setup) -> OwnTransport {
    let Setup { config, registry, hub, clock, net, .. } = setup;
    let (config, registry, hub, clock, ways) =
        (Arc::clone(config), Arc::clone(registry), Arc::clone(hub), Arc::clone(clock), net.ways());
    Box::new(move |admission: Option<&Admission>, source| {
        let peer = admission.and_then(|admission| registry.peer_of_agreement(&admission.agreement));
        // Only for who is known is anything looked up.
        let nothing: Ways = Rc::new(|_| None);
        let most =
            most_towards(&config.transport, if admission.is_some() { &ways } else { &nothing }, source);
        let by_rate = most_at(peer.and_then(|peer| hub.rate(peer).rate()), u16::MAX);
        let mut transport = transport(most.min(by_rate));
        if let Some(peer) = peer {
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
