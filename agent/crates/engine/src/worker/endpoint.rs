//! The QUIC endpoint of a worker: who may connect, and how large packets may be.

use std::{
    net::SocketAddr,
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
    time::{SystemTime, UNIX_EPOCH},
};

use config::{self, Config, MaxPacket};
use gate::{
    Own,
    admission::{Admission, Admits, Allowlist},
    identity::PublicKey,
    refusals::{Refusal, Refusals, Why},
    tls,
};
use quinn_proto::{TransportConfig, crypto::HandshakeTokenKey};
use ring::{hkdf, hmac};
use wire::{cid::ConnectionIds, clock::Clock};

use crate::{
    control::{
        accept::{Acceptance, OwnTransport},
        driver::Control,
        transport,
    },
    roster::Roster,
    worker::{StartError, exchange::Exchange, publish},
};

/// The client that presents its certificate in one handshake.
struct Guest {
    roster: Arc<Roster>,
    /// The X25519 key that knocked; without one, any allowed key.
    agreement: Option<[u8; 32]>,
    source: SocketAddr,
    refused: Arc<AtomicU64>,
    refusals: Arc<Refusals>,
    clock: Arc<dyn Clock + Send + Sync>,
}

impl Guest {
    fn knocked_with(&self, key: &[u8; 32]) -> bool {
        self.agreement.is_none_or(|knocked| PublicKey(*key).agreement() == Some(knocked))
    }
}

impl tls::ClientKeys for Guest {
    fn is_allowed(&self, key: &[u8; 32]) -> bool {
        // Asked in the midst of the handshake: the key may have been removed since it knocked.
        self.knocked_with(key) && self.roster.allows(key)
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

/// The endpoint of a worker.
pub(super) fn control(
    config: &Config,
    (identity, own): (&Arc<tls::TlsIdentity>, &Arc<Own>),
    (ids, roster, refusals, exchange): (&ConnectionIds, &Arc<Roster>, &Arc<Refusals>, &Arc<Exchange>),
    metrics: &publish::Publisher,
    (clock, seed): (&Arc<dyn Clock + Send + Sync>, [u8; 32]),
) -> Result<Control, StartError> {
    let generator = ids.clone();
    let reset_key = Arc::new(hmac::Key::new(hmac::HMAC_SHA256, &seed));
    let endpoint =
        tls::endpoint_config(move || Box::new(generator.clone()), reset_key, max_packet(config), Some(seed));
    let acceptance = if config.transport.listen.is_empty() {
        None
    } else {
        let knock = config.access.knock == config::Knock::Required;
        let token_key: Arc<dyn HandshakeTokenKey> = if knock {
            Arc::clone(own.retry()) as _
        } else {
            Arc::new(hkdf::Salt::new(hkdf::HKDF_SHA256, &[]).extract(&seed))
        };
        let (max_packet, limits) = (max_packet(config), config.limits);
        // The dialler keeps the connection alive: it is the one behind a NAT.
        let transport = move || {
            transport::transport_config(None, max_packet, limits.tcp_streams_per_peer, limits.stream_bytes)
        };
        let mut server = tls::server_config(tls::initial_crypto(identity)?, Arc::new(transport()), token_key);
        server.time_source(Arc::new(WallClock(Arc::clone(clock))));
        let transport = captured(transport, (roster, exchange), clock);
        let (identity, roster, refusals, clock) =
            (Arc::clone(identity), Arc::clone(roster), Arc::clone(refusals), Arc::clone(clock));
        let refused = metrics.refused_keys();
        let tls = move |admission: Option<&Admission>, source| {
            let guest = Guest {
                roster: Arc::clone(&roster),
                agreement: admission.map(|admission| admission.agreement),
                source,
                refused: Arc::clone(&refused),
                refusals: Arc::clone(&refusals),
                clock: Arc::clone(&clock),
            };
            tls::server_crypto(&identity, Arc::new(guest)).ok()
        };
        Some(Acceptance { server: Arc::new(server), tls: Box::new(tls), transport, knock })
    };
    // All workers together may have as many as the operator says.
    let handshakes = config.limits.handshakes.div_ceil(usize::from(ids.workers()));
    Ok(Control::new(endpoint, acceptance, handshakes, Arc::clone(exchange.streams())))
}

/// Makes the transport of each connection; that of a peer that an operator looks at is recorded.
fn captured(
    transport: impl Fn() -> TransportConfig + 'static,
    (roster, exchange): (&Arc<Roster>, &Arc<Exchange>),
    clock: &Arc<dyn Clock + Send + Sync>,
) -> OwnTransport {
    let (roster, exchange, clock) = (Arc::clone(roster), Arc::clone(exchange), Arc::clone(clock));
    Box::new(move |admission: Option<&Admission>| {
        let mut transport = transport();
        if let Some(admission) = admission
            && let Admits::Peer(peer) = roster.admits(&admission.agreement)
        {
            transport.qlog_stream(exchange.taps().stream(peer, clock.now()));
        }
        transport
    })
}

/// Our wall clock, as quinn-proto asks for it: when was a Retry token made?
struct WallClock(Arc<dyn Clock + Send + Sync>);

impl quinn_proto::TimeSource for WallClock {
    fn now(&self) -> SystemTime {
        UNIX_EPOCH + self.0.unix_time()
    }
}

pub(super) fn max_packet(config: &Config) -> Option<u16> {
    match config.transport.max_packet {
        MaxPacket::Auto => None,
        MaxPacket::Bytes(bytes) => Some(bytes),
    }
}

/// The largest packet that we send or accept on a lane, in bytes of UDP payload.
pub(super) fn largest_packet(config: &Config) -> u16 {
    max_packet(config).unwrap_or(tls::DEFAULT_MAX_PACKET)
}
