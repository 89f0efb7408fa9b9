//! How quinn is set up: nothing that would hold the relay back, nothing that a user could not write.

use std::{any::Any, io, net::SocketAddr, sync::Arc, time::Instant};

use clap::ValueEnum;
use quinn::{
    ClientConfig, Endpoint, EndpointConfig, ServerConfig, TokioRuntime, TransportConfig,
    congestion::{Controller, ControllerFactory},
    crypto::rustls::{QuicClientConfig, QuicServerConfig},
};
use rustls::{
    DigitallySignedStruct, Error, SignatureScheme,
    client::danger::{HandshakeSignatureValid, ServerCertVerified, ServerCertVerifier},
    crypto::{CryptoProvider, ring},
    pki_types::{CertificateDer, PrivateKeyDer, ServerName, UnixTime},
    version::TLS13,
};

use crate::udp;

/// What the entry asks for; nobody checks it.
pub(crate) const SERVER_NAME: &str = "relay";

/// In bytes, of quinn's queues of datagrams in each direction.
const DATAGRAM_BUFFER_LEN: usize = 8 << 20;

#[derive(Clone, Copy, ValueEnum)]
pub(crate) enum Congestion {
    /// quinn's default, CUBIC with pacing.
    Stock,
    /// No window and no pacing.
    Unlimited,
}

/// An endpoint that accepts at `listen`.
pub(crate) fn server(listen: SocketAddr, congestion: Congestion) -> anyhow::Result<Endpoint> {
    let rcgen::CertifiedKey { cert, signing_key } =
        rcgen::generate_simple_self_signed([SERVER_NAME.to_owned()])?;
    let crypto = rustls::ServerConfig::builder_with_provider(provider())
        .with_protocol_versions(&[&TLS13])?
        .with_no_client_auth()
        .with_single_cert(
            vec![cert.der().clone()],
            PrivateKeyDer::Pkcs8(signing_key.serialize_der().into()),
        )?;
    let mut config = ServerConfig::with_crypto(Arc::new(QuicServerConfig::try_from(crypto)?));
    config.transport_config(transport(congestion));
    Ok(endpoint(listen, Some(config))?)
}

/// An endpoint that dials from `bind` and speaks one of `protocols` (ALPN); without any, none is named.
pub(crate) fn client(
    bind: SocketAddr,
    congestion: Congestion,
    protocols: &[&[u8]],
) -> anyhow::Result<Endpoint> {
    let mut endpoint = endpoint(bind, None)?;
    endpoint.set_default_client_config(client_config(congestion, protocols)?);
    Ok(endpoint)
}

/// What such an endpoint dials with.
pub(crate) fn client_config(congestion: Congestion, protocols: &[&[u8]]) -> anyhow::Result<ClientConfig> {
    let mut crypto = rustls::ClientConfig::builder_with_provider(provider())
        .with_protocol_versions(&[&TLS13])?
        .dangerous()
        .with_custom_certificate_verifier(Arc::new(Anyone(provider())))
        .with_no_client_auth();
    crypto.alpn_protocols = protocols.iter().map(|protocol| protocol.to_vec()).collect();
    let mut config = ClientConfig::new(Arc::new(QuicClientConfig::try_from(crypto)?));
    config.transport_config(transport(congestion));
    Ok(config)
}

fn endpoint(address: SocketAddr, server: Option<ServerConfig>) -> io::Result<Endpoint> {
    Endpoint::new(EndpointConfig::default(), server, udp::bound(address)?, Arc::new(TokioRuntime))
}

/// For an end of either kind.
pub(crate) fn transport(congestion: Congestion) -> Arc<TransportConfig> {
    let mut config = TransportConfig::default();
    config.datagram_send_buffer_size(DATAGRAM_BUFFER_LEN);
    config.datagram_receive_buffer_size(Some(DATAGRAM_BUFFER_LEN));
    // Idle while other kinds are measured.
    config.max_idle_timeout(None);
    match congestion {
        Congestion::Stock => {}
        Congestion::Unlimited => {
            config.congestion_controller_factory(Arc::new(Unlimited));
        }
    }
    Arc::new(config)
}

/// rustls's, with the suite first that Culvert prefers too.
fn provider() -> Arc<CryptoProvider> {
    let mut provider = ring::default_provider();
    provider
        .cipher_suites
        .sort_by_key(|suite| suite.suite() != rustls::CipherSuite::TLS13_AES_128_GCM_SHA256);
    Arc::new(provider)
}

/// No limit: quinn does not pace above a window of 2^32 bytes either.
#[derive(Clone, Copy)]
struct Unlimited;

const WINDOW: u64 = 1 << 40;

impl ControllerFactory for Unlimited {
    fn build(self: Arc<Self>, _: Instant, _: u16) -> Box<dyn Controller> {
        Box::new(Self)
    }
}

impl Controller for Unlimited {
    fn on_congestion_event(&mut self, _: Instant, _: Instant, _: bool, _: u64) {}

    fn on_mtu_update(&mut self, _: u16) {}

    fn window(&self) -> u64 {
        WINDOW
    }

    fn clone_box(&self) -> Box<dyn Controller> {
        Box::new(*self)
    }

    fn initial_window(&self) -> u64 {
        WINDOW
    }

    fn into_any(self: Box<Self>) -> Box<dyn Any> {
        self
    }
}

/// Takes any certificate: both ends are on this machine, and nothing secret crosses.
#[derive(Debug)]
struct Anyone(Arc<CryptoProvider>);

impl ServerCertVerifier for Anyone {
    fn verify_server_cert(
        &self,
        _: &CertificateDer<'_>,
        _: &[CertificateDer<'_>],
        _: &ServerName<'_>,
        _: &[u8],
        _: UnixTime,
    ) -> Result<ServerCertVerified, Error> {
        Ok(ServerCertVerified::assertion())
    }

    fn verify_tls12_signature(
        &self,
        _: &[u8],
        _: &CertificateDer<'_>,
        _: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, Error> {
        Err(Error::General("QUIC has TLS 1.3 only".to_owned()))
    }

    fn verify_tls13_signature(
        &self,
        _: &[u8],
        _: &CertificateDer<'_>,
        _: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, Error> {
        Ok(HandshakeSignatureValid::assertion())
    }

    fn supported_verify_schemes(&self) -> Vec<SignatureScheme> {
        self.0.signature_verification_algorithms.supported_schemes()
    }
}
