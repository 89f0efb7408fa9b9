//! TLS 1.3 with pinned Ed25519 keys, and the QUIC parameters of a control connection.
//!
//! Neither end has a certificate authority: a certificate is the envelope of a public key, and the key is
//! compared with the pinned one. Its subject and validity are fixed and mean nothing.

use std::{
    fmt,
    sync::{Arc, LazyLock},
};

use data_encoding::BASE64URL_NOPAD;
use quinn_proto::{
    ConnectionIdGenerator, EndpointConfig, TransportConfig,
    crypto::{
        self, HandshakeTokenKey, HmacKey,
        rustls::{NoInitialCipherSuite, QuicClientConfig, QuicServerConfig},
    },
};
use rustls::{
    CertificateError, DigitallySignedStruct, DistinguishedName, SignatureScheme,
    client::{
        Resumption,
        danger::{HandshakeSignatureValid, ServerCertVerified, ServerCertVerifier},
    },
    crypto::{CryptoProvider, SecureRandom, SupportedKxGroup, ring as provider},
    server::danger::{ClientCertVerified, ClientCertVerifier},
    sign::{CertifiedKey, SingleCertAndKey},
};
use rustls_pki_types::{CertificateDer, PrivatePkcs8KeyDer, ServerName, UnixTime};

use crate::{
    OwnKey,
    certificate::{Subject, raw_key, self_signed, signature, spki_key},
    hybrid::Hybrid,
    identity::Identity,
    suite::{SuiteClientConfig, SuiteServerConfig},
    system::{self, System},
};

/// The application protocol that both ends name in the handshake (RFC 7301).
pub const ALPN: &[u8] = b"culvert/1";

/// The server name to give to `quinn_proto::Endpoint::connect`; it is never sent.
pub const SERVER_NAME: &str = "culvert";

/// Why a TLS configuration could not be made.
#[derive(Debug, thiserror::Error)]
pub enum TlsError {
    /// The bytes are not a PKCS#8 Ed25519 private key.
    #[error("the private key is not an Ed25519 key in PKCS#8 form")]
    Key(#[source] rustls::Error),
    /// The self-signed certificate could not be made.
    #[error("cannot make the certificate of the identity key")]
    Certificate(#[source] rcgen::Error),
    /// rustls refused the key or the parameters.
    #[error("cannot make the TLS configuration")]
    Tls(#[from] rustls::Error),
    /// The suites lack AES-128-GCM, which protects QUIC's Initial packets (RFC 9001 §5.2).
    #[error("cannot make the QUIC configuration")]
    InitialSuite(#[from] NoInitialCipherSuite),
}

/// An identity key and its self-signed certificate, ready for any number of configurations.
#[derive(Clone)]
pub struct TlsIdentity {
    key: Arc<CertifiedKey>,
    public_key: [u8; 32],
    randomness: Option<Randomness>,
    /// The identity of the key before it, while a rotation is under way.
    previous: Option<Arc<Self>>,
}

/// The sources of randomness that TLS uses instead of the system's generator.
#[derive(Clone, Copy, Debug)]
pub struct Randomness {
    /// Everything but the keys of key exchanges.
    pub random: &'static dyn SecureRandom,
    /// X25519 with keys of this source.
    pub x25519: &'static dyn SupportedKxGroup,
    /// X25519MLKEM768 with keys of this source.
    pub hybrid: &'static dyn SupportedKxGroup,
}

base::labelled! {
    /// `transport.key_exchange`: how the two ends of a handshake agree on a secret.
    #[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
    pub enum KeyExchange {
        /// X25519MLKEM768 where the other end has it, else X25519.
        #[default]
        Hybrid => "hybrid",
        /// X25519 alone, whatever the other end has.
        X25519 => "x25519",
        /// X25519MLKEM768; where the other end lacks it, there is no connection.
        HybridRequired => "hybrid-required",
    }
}

/// X25519MLKEM768 with the randomness of the system.
static HYBRID: LazyLock<Hybrid> =
    LazyLock::new(|| Hybrid { classical: provider::kx_group::X25519, random: &System });

/// The same, as rustls takes it.
pub(crate) fn hybrid() -> &'static dyn SupportedKxGroup {
    &*HYBRID
}

impl TlsIdentity {
    /// Wraps `pkcs8`, the PKCS#8 DER of an Ed25519 private key, in a fresh certificate.
    ///
    /// # Errors
    /// [`TlsError::Key`] if `pkcs8` is anything else; [`TlsError::Certificate`] or [`TlsError::Tls`] if the libraries refuse
    /// the certificate or its key.
    pub fn from_pkcs8(pkcs8: &[u8]) -> Result<Self, TlsError> {
        let key = provider::sign::any_eddsa_type(&PrivatePkcs8KeyDer::from(pkcs8)).map_err(TlsError::Key)?;
        let public_key =
            key.public_key().and_then(|spki| raw_key(&spki)).ok_or(CertificateError::BadEncoding);
        let public_key = public_key.map_err(rustls::Error::from)?;
        let certificate = self_signed(&Subject { key: &*key, public_key }).map_err(TlsError::Certificate)?;
        let key = Arc::new(CertifiedKey::new(vec![certificate], key));
        Ok(Self { key, public_key, randomness: None, previous: None })
    }

    /// Wraps each key of `identity` in a fresh certificate; [`TlsIdentity::of`] chooses one.
    ///
    /// # Errors
    /// As [`TlsIdentity::from_pkcs8`].
    pub fn new(identity: &Identity) -> Result<Self, TlsError> {
        let previous = identity.previous().map(|previous| Self::from_pkcs8(&previous.pkcs8_der()));
        let previous = previous.transpose()?.map(Arc::new);
        Ok(Self { previous, ..Self::from_pkcs8(&identity.pkcs8_der())? })
    }

    /// One of our keys; the current one where there is no other.
    #[must_use]
    pub fn of(&self, key: OwnKey) -> &Self {
        match (key, &self.previous) {
            (OwnKey::Previous, Some(previous)) => previous,
            (OwnKey::Current, _) | (OwnKey::Previous, None) => self,
        }
    }

    /// Whether this public key is one of ours.
    #[must_use]
    pub fn is_own(&self, key: &[u8; 32]) -> bool {
        self.public_key == *key || self.previous.as_ref().is_some_and(|previous| previous.public_key == *key)
    }

    /// The same identity in a simulation, whose handshakes repeat themselves: they are as secret as `randomness` is.
    #[must_use]
    pub fn with_randomness(self, randomness: Randomness) -> Self {
        let previous =
            self.previous.map(|previous| Arc::new(Self::clone(&previous).with_randomness(randomness)));
        Self { randomness: Some(randomness), previous, ..self }
    }

    /// The raw bytes of the Ed25519 public key.
    pub fn public_key(&self) -> &[u8; 32] {
        &self.public_key
    }

    /// Signs `message` with the identity key (RFC 8032 §5.1.6).
    pub fn sign(&self, message: &[u8]) -> Option<[u8; 64]> {
        signature(&*self.key.key, message)?.try_into().ok()
    }

    fn resolver(&self) -> Arc<SingleCertAndKey> {
        Arc::new(SingleCertAndKey::from(Arc::clone(&self.key)))
    }
}

impl fmt::Debug for TlsIdentity {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "TlsIdentity({})", BASE64URL_NOPAD.encode(&self.public_key))
    }
}

/// The client keys that a server admits. It is asked on every handshake, so the answer may change at run time.
pub trait ClientKeys: Send + Sync {
    /// Whether the holder of `key` may connect.
    fn is_allowed(&self, key: &[u8; 32]) -> bool;

    /// A handshake ends for `refusal`; called once per refused client, to log and to count.
    fn refused(&self, refusal: &Refusal);
}

/// Why a client's certificate was refused.
///
/// The decision comes before the client proves that it holds the key: anyone may *name* any key here.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Refusal {
    /// The key is not on the list.
    #[error("unknown key {}", BASE64URL_NOPAD.encode(.0))]
    UnknownKey([u8; 32]),
    /// The certificate does not parse, or does not hold an Ed25519 key.
    #[error("not a certificate of an Ed25519 key")]
    NotEd25519,
}

/// The TLS side of a server that admits the clients named by `allowed`.
///
/// # Errors
/// [`TlsError::Tls`] or [`TlsError::InitialSuite`] if the provider lacks TLS 1.3 or the suite of Initial packets; the one that
/// is compiled in has both.
pub fn server_crypto(
    identity: &TlsIdentity,
    key_exchange: KeyExchange,
    allowed: Arc<dyn ClientKeys>,
) -> Result<Arc<dyn crypto::ServerConfig>, TlsError> {
    server_crypto_with(FirstSuite::for_this_cpu(), key_exchange, identity, allowed)
}

/// The TLS side of a client that accepts the server only under one of the `expected` keys.
///
/// # Errors
/// As [`server_crypto`].
pub fn client_crypto(
    identity: &TlsIdentity,
    key_exchange: KeyExchange,
    expected: &[[u8; 32]],
) -> Result<Arc<SuiteClientConfig>, TlsError> {
    client_crypto_with(FirstSuite::for_this_cpu(), key_exchange, identity, expected)
}

/// The suite that heads the list that is offered and chosen from.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum FirstSuite {
    /// The CPU has AES and carry-less multiplication instructions.
    Aes128,
    /// The CPU lacks AES instructions, and AES-GCM would be several times slower.
    ChaCha20,
    /// No CPU asks for it; it makes the third suite reachable in tests.
    #[cfg(test)]
    Aes256,
}

impl FirstSuite {
    fn for_this_cpu() -> Self {
        if cpu_has_aes() { Self::Aes128 } else { Self::ChaCha20 }
    }

    fn provider(self, key_exchange: KeyExchange, randomness: Option<Randomness>) -> Arc<CryptoProvider> {
        use provider::cipher_suite::{
            TLS13_AES_128_GCM_SHA256 as AES_128, TLS13_AES_256_GCM_SHA384 as AES_256,
            TLS13_CHACHA20_POLY1305_SHA256 as CHACHA20,
        };
        let cipher_suites = match self {
            Self::Aes128 => vec![AES_128, CHACHA20, AES_256],
            Self::ChaCha20 => vec![CHACHA20, AES_128, AES_256],
            #[cfg(test)]
            Self::Aes256 => vec![AES_256, AES_128, CHACHA20],
        };
        let Randomness { random: secure_random, x25519, hybrid } = randomness.unwrap_or(Randomness {
            random: &System,
            x25519: provider::kx_group::X25519,
            hybrid: &*HYBRID,
        });
        let kx_groups = match key_exchange {
            KeyExchange::Hybrid => vec![hybrid, x25519],
            KeyExchange::X25519 => vec![x25519],
            KeyExchange::HybridRequired => vec![hybrid],
        };
        Arc::new(CryptoProvider {
            cipher_suites,
            kx_groups,
            signature_verification_algorithms: system::ED25519,
            secure_random,
            key_provider: &System,
        })
    }
}

/// Whether the CPU has the instructions that make AES-GCM the fastest suite.
pub fn cpu_has_aes() -> bool {
    #[cfg(target_arch = "x86_64")]
    {
        std::arch::is_x86_feature_detected!("aes") && std::arch::is_x86_feature_detected!("pclmulqdq")
    }
    #[cfg(target_arch = "aarch64")]
    {
        // The standard library's "aes" covers PMULL too.
        std::arch::is_aarch64_feature_detected!("aes")
    }
    #[cfg(not(any(target_arch = "x86_64", target_arch = "aarch64")))]
    {
        false
    }
}

/// The TLS side of a server that admits nobody: it removes the protection of Initial packets, whose keys follow from
/// their connection ID, and makes the tag of a Retry.
///
/// # Errors
/// As [`server_crypto`].
pub fn initial_crypto(identity: &TlsIdentity) -> Result<Arc<dyn crypto::ServerConfig>, TlsError> {
    struct Nobody;
    impl ClientKeys for Nobody {
        fn is_allowed(&self, _: &[u8; 32]) -> bool {
            false
        }
        fn refused(&self, _: &Refusal) {}
    }
    server_crypto(identity, KeyExchange::X25519, Arc::new(Nobody))
}

pub(super) fn server_crypto_with(
    first: FirstSuite,
    key_exchange: KeyExchange,
    identity: &TlsIdentity,
    allowed: Arc<dyn ClientKeys>,
) -> Result<Arc<dyn crypto::ServerConfig>, TlsError> {
    let provider = first.provider(key_exchange, identity.randomness);
    let mut config = rustls::ServerConfig::builder_with_provider(provider)
        .with_protocol_versions(&[&rustls::version::TLS13])?
        .with_client_cert_verifier(Arc::new(ClientVerifier { allowed }))
        .with_cert_resolver(identity.resolver());
    config.alpn_protocols = vec![ALPN.to_vec()];
    // The client's order decides, unless this end is the one that lacks AES instructions.
    config.ignore_client_order = first == FirstSuite::ChaCha20;
    // A resumed session would skip `verify_client_cert`, and with it a key that was removed since.
    config.send_tls13_tickets = 0;
    config.session_storage = Arc::new(rustls::server::NoServerSessionStorage {});
    config.max_early_data_size = 0;
    Ok(Arc::new(SuiteServerConfig(Arc::new(QuicServerConfig::try_from(config)?))))
}

pub(super) fn client_crypto_with(
    first: FirstSuite,
    key_exchange: KeyExchange,
    identity: &TlsIdentity,
    expected: &[[u8; 32]],
) -> Result<Arc<SuiteClientConfig>, TlsError> {
    let provider = first.provider(key_exchange, identity.randomness);
    let verifier = ServerVerifier { expected: expected.to_vec() };
    let mut config = rustls::ClientConfig::builder_with_provider(provider)
        .with_protocol_versions(&[&rustls::version::TLS13])?
        .dangerous()
        .with_custom_certificate_verifier(Arc::new(verifier))
        .with_client_cert_resolver(identity.resolver());
    config.alpn_protocols = vec![ALPN.to_vec()];
    config.resumption = Resumption::disabled();
    config.enable_early_data = false;
    // The name would be the same for everyone, readable by anyone, and checked by no one.
    config.enable_sni = false;
    Ok(Arc::new(SuiteClientConfig(Arc::new(QuicClientConfig::try_from(config)?))))
}

/// The public key with which the other end authenticated, once its certificate was verified.
pub fn peer_key(session: &dyn crypto::Session) -> Option<[u8; 32]> {
    let chain = session.peer_identity()?.downcast::<Vec<CertificateDer<'static>>>().ok()?;
    spki_key(chain.first()?)
}

fn refuse<T>() -> Result<T, rustls::Error> {
    Err(CertificateError::ApplicationVerificationFailure.into())
}

/// What both verifiers say about signatures: Ed25519 alone, of TLS 1.3 alone.
macro_rules! ed25519_signatures {
    () => {
        /// TLS 1.2 is not offered, so rustls never asks for its signatures.
        fn verify_tls12_signature(
            &self,
            _message: &[u8],
            _certificate: &CertificateDer<'_>,
            _signature: &DigitallySignedStruct,
        ) -> Result<HandshakeSignatureValid, rustls::Error> {
            Err(rustls::PeerIncompatible::Tls12NotOffered.into())
        }

        fn verify_tls13_signature(
            &self,
            message: &[u8],
            certificate: &CertificateDer<'_>,
            signature: &DigitallySignedStruct,
        ) -> Result<HandshakeSignatureValid, rustls::Error> {
            rustls::crypto::verify_tls13_signature(message, certificate, signature, &system::ED25519)
        }

        fn supported_verify_schemes(&self) -> Vec<SignatureScheme> {
            vec![SignatureScheme::ED25519]
        }
    };
}

#[derive(Debug)]
struct ServerVerifier {
    expected: Vec<[u8; 32]>,
}

impl ServerCertVerifier for ServerVerifier {
    fn verify_server_cert(
        &self,
        end_entity: &CertificateDer<'_>,
        _intermediates: &[CertificateDer<'_>],
        _server_name: &ServerName<'_>,
        _ocsp_response: &[u8],
        _now: UnixTime,
    ) -> Result<ServerCertVerified, rustls::Error> {
        match spki_key(end_entity) {
            Some(key) if self.expected.contains(&key) => Ok(ServerCertVerified::assertion()),
            Some(_) | None => refuse(),
        }
    }

    ed25519_signatures!();
}

struct ClientVerifier {
    allowed: Arc<dyn ClientKeys>,
}

impl fmt::Debug for ClientVerifier {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ClientVerifier").finish_non_exhaustive()
    }
}

impl ClientCertVerifier for ClientVerifier {
    fn root_hint_subjects(&self) -> &[DistinguishedName] {
        &[]
    }

    fn verify_client_cert(
        &self,
        end_entity: &CertificateDer<'_>,
        _intermediates: &[CertificateDer<'_>],
        _now: UnixTime,
    ) -> Result<ClientCertVerified, rustls::Error> {
        let refusal = match spki_key(end_entity) {
            Some(key) if self.allowed.is_allowed(&key) => return Ok(ClientCertVerified::assertion()),
            Some(key) => Refusal::UnknownKey(key),
            None => Refusal::NotEd25519,
        };
        self.allowed.refused(&refusal);
        refuse()
    }

    ed25519_signatures!();
}

/// The server's QUIC configuration around `crypto`.
///
/// `token_key` opens the tokens of a Retry; no NEW_TOKEN is ever sent, because a token admits its holder once.
pub fn server_config(
    crypto: Arc<dyn crypto::ServerConfig>,
    transport: Arc<TransportConfig>,
    token_key: Arc<dyn HandshakeTokenKey>,
) -> quinn_proto::ServerConfig {
    let mut config = quinn_proto::ServerConfig::new(crypto, token_key);
    config.transport_config(transport);
    config.validation_token.sent(0);
    config
}

/// The smallest QUIC packet that every path must carry, bytes (RFC 9000 §14).
pub const MIN_PACKET: u16 = 1200;

/// The largest UDP payload there is, bytes (RFC 9000 §18.2).
pub const LARGEST_UDP_PAYLOAD: u16 = 65_527;

/// The QUIC parameters that all connections of one endpoint share: version 1 only, no greasing.
///
/// `connection_ids` makes the generator of our connection IDs, of [`CONNECTION_ID_BYTES`](wire::cid::CONNECTION_ID_BYTES) each; `reset_key` keys the
/// stateless reset tokens that the connections announce; `rng_seed` makes the endpoint repeatable.
/// It accepts datagrams of any size: what the path carries is for the sender to find.
pub fn endpoint_config(
    connection_ids: impl Fn() -> Box<dyn ConnectionIdGenerator> + Send + Sync + 'static,
    reset_key: Arc<dyn HmacKey>,
    rng_seed: Option<[u8; 32]>,
) -> EndpointConfig {
    let mut config = EndpointConfig::new(reset_key);
    config
        .supported_versions(vec![1])
        .grease_quic_bit(false)
        .cid_generator(connection_ids)
        .rng_seed(rng_seed)
        .max_udp_payload_size(LARGEST_UDP_PAYLOAD)
        .expect("quinn-proto accepts 1200 to 65527");
    config
}

#[cfg(test)]
#[path = "tls_tests.rs"]
mod tests;
