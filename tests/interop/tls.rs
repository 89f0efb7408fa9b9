//! Keys, certificates and pinning (`docs/wire-format.md` §1), for both ends of a connection.

use std::sync::Arc;

use quinn::crypto::rustls::{QuicClientConfig, QuicServerConfig};
use rcgen::{CertificateParams, KeyPair, PKCS_ED25519};
use rustls::{
    CertificateError, DigitallySignedStruct, DistinguishedName, Error, SignatureScheme,
    client::danger::{HandshakeSignatureValid, ServerCertVerified, ServerCertVerifier},
    crypto::{CryptoProvider, WebPkiSupportedAlgorithms, ring, verify_tls13_signature},
    pki_types::{CertificateDer, PrivateKeyDer, ServerName, UnixTime},
    server::{
        ParsedCertificate,
        danger::{ClientCertVerified, ClientCertVerifier},
    },
    version::TLS13,
};

const ALPN: &[u8] = b"culvert/1";

/// What stands before the 32 bytes of an Ed25519 key in a SubjectPublicKeyInfo (RFC 8410).
const SPKI_PREFIX: [u8; 12] = [0x30, 0x2a, 0x30, 0x05, 0x06, 0x03, 0x2b, 0x65, 0x70, 0x03, 0x21, 0x00];

/// An Ed25519 key and the certificate around it.
#[derive(Debug)]
pub(crate) struct Identity {
    certificate: CertificateDer<'static>,
    private: PrivateKeyDer<'static>,
    /// The public key.
    pub(crate) public: [u8; 32],
}

impl Identity {
    pub(crate) fn new() -> Self {
        Self::of(&KeyPair::generate_for(&PKCS_ED25519).unwrap())
    }

    /// The identity around an Ed25519 key that exists already.
    pub(crate) fn of(pair: &KeyPair) -> Self {
        let certificate = CertificateParams::new(Vec::new()).unwrap().self_signed(pair).unwrap();
        Self {
            certificate: certificate.der().clone(),
            private: PrivateKeyDer::Pkcs8(pair.serialize_der().into()),
            public: pair.public_key_raw().try_into().unwrap(),
        }
    }

    /// For dialling the end whose key is `pinned`.
    pub(crate) fn client(&self, pinned: [u8; 32]) -> QuicClientConfig {
        self.client_with(pinned, provider())
    }

    /// The same with the cipher suites of `provider`.
    pub(crate) fn client_with(&self, pinned: [u8; 32], provider: Arc<CryptoProvider>) -> QuicClientConfig {
        let pin = Arc::new(Pin::new(pinned));
        let mut config = rustls::ClientConfig::builder_with_provider(provider)
            .with_protocol_versions(&[&TLS13])
            .unwrap()
            .dangerous()
            .with_custom_certificate_verifier(pin)
            .with_client_auth_cert(vec![self.certificate.clone()], self.private.clone_key())
            .unwrap();
        config.alpn_protocols = vec![ALPN.to_vec()];
        config.enable_sni = false;
        config.try_into().unwrap()
    }

    /// For being dialled by the end whose key is `pinned`.
    pub(crate) fn server(&self, pinned: [u8; 32]) -> QuicServerConfig {
        let pin = Arc::new(Pin::new(pinned));
        let mut config = rustls::ServerConfig::builder_with_provider(provider())
            .with_protocol_versions(&[&TLS13])
            .unwrap()
            .with_client_cert_verifier(pin)
            .with_single_cert(vec![self.certificate.clone()], self.private.clone_key())
            .unwrap();
        config.alpn_protocols = vec![ALPN.to_vec()];
        config.send_tls13_tickets = 0;
        config.try_into().unwrap()
    }
}

impl Identity {
    /// The end of `builder`, with this identity.
    pub(crate) fn certify(
        &self,
        builder: rustls::ConfigBuilder<rustls::ServerConfig, rustls::server::WantsServerCert>,
    ) -> rustls::ServerConfig {
        builder.with_single_cert(vec![self.certificate.clone()], self.private.clone_key()).unwrap()
    }
}

fn provider() -> Arc<CryptoProvider> {
    Arc::new(ring::default_provider())
}

/// Accepts the certificate of one key.
#[derive(Debug)]
struct Pin {
    key: [u8; 32],
    algorithms: WebPkiSupportedAlgorithms,
}

impl Pin {
    fn new(key: [u8; 32]) -> Self {
        Self { key, algorithms: provider().signature_verification_algorithms }
    }

    fn check(&self, certificate: &CertificateDer<'_>) -> Result<(), Error> {
        let spki = ParsedCertificate::try_from(certificate)?.subject_public_key_info();
        if spki.as_ref().strip_prefix(&SPKI_PREFIX) == Some(&self.key) {
            return Ok(());
        }
        Err(CertificateError::ApplicationVerificationFailure.into())
    }
}

impl ServerCertVerifier for Pin {
    fn verify_server_cert(
        &self,
        certificate: &CertificateDer<'_>,
        _: &[CertificateDer<'_>],
        _: &ServerName<'_>,
        _: &[u8],
        _: UnixTime,
    ) -> Result<ServerCertVerified, Error> {
        self.check(certificate).map(|()| ServerCertVerified::assertion())
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
        message: &[u8],
        certificate: &CertificateDer<'_>,
        signed: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, Error> {
        verify_tls13_signature(message, certificate, signed, &self.algorithms)
    }

    fn supported_verify_schemes(&self) -> Vec<SignatureScheme> {
        vec![SignatureScheme::ED25519]
    }
}

/// Accepts any certificate of an Ed25519 key.
#[derive(Debug)]
pub(crate) struct AnyKey;

impl ServerCertVerifier for AnyKey {
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
        message: &[u8],
        certificate: &CertificateDer<'_>,
        signed: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, Error> {
        ServerCertVerifier::verify_tls12_signature(&Pin::new([0; 32]), message, certificate, signed)
    }

    fn verify_tls13_signature(
        &self,
        message: &[u8],
        certificate: &CertificateDer<'_>,
        signed: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, Error> {
        verify_tls13_signature(message, certificate, signed, &provider().signature_verification_algorithms)
    }

    fn supported_verify_schemes(&self) -> Vec<SignatureScheme> {
        vec![SignatureScheme::ED25519]
    }
}

impl ClientCertVerifier for Pin {
    fn root_hint_subjects(&self) -> &[DistinguishedName] {
        &[]
    }

    fn verify_client_cert(
        &self,
        certificate: &CertificateDer<'_>,
        _: &[CertificateDer<'_>],
        _: UnixTime,
    ) -> Result<ClientCertVerified, Error> {
        self.check(certificate).map(|()| ClientCertVerified::assertion())
    }

    fn verify_tls12_signature(
        &self,
        message: &[u8],
        certificate: &CertificateDer<'_>,
        signed: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, Error> {
        ServerCertVerifier::verify_tls12_signature(self, message, certificate, signed)
    }

    fn verify_tls13_signature(
        &self,
        message: &[u8],
        certificate: &CertificateDer<'_>,
        signed: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, Error> {
        verify_tls13_signature(message, certificate, signed, &self.algorithms)
    }

    fn supported_verify_schemes(&self) -> Vec<SignatureScheme> {
        vec![SignatureScheme::ED25519]
    }
}
