#![expect(clippy::unwrap_in_result, reason = "what the result is about is the handshake")]

use std::fs;

use rustls::{
    ClientConfig, ClientConnection, ServerConfig, ServerConnection, SupportedProtocolVersion,
    client::{
        ResolvesClientCert,
        danger::{ServerCertVerified, ServerCertVerifier},
    },
    crypto::ring as provider,
    sign::CertifiedKey,
    version::{TLS12, TLS13},
};
use rustls_pki_types::{PrivateKeyDer, ServerName};

use super::*;
use crate::web::WebCertificate;

/// A client that takes any server, and shows this certificate with this key.
#[derive(Debug)]
struct Shows(Option<Arc<CertifiedKey>>);

impl ResolvesClientCert for Shows {
    fn resolve(&self, _hints: &[&[u8]], _schemes: &[SignatureScheme]) -> Option<Arc<CertifiedKey>> {
        self.0.clone()
    }

    fn has_certs(&self) -> bool {
        self.0.is_some()
    }
}

impl ServerCertVerifier for Shows {
    fn verify_server_cert(
        &self,
        _end_entity: &CertificateDer<'_>,
        _intermediates: &[CertificateDer<'_>],
        _name: &ServerName<'_>,
        _ocsp: &[u8],
        _now: UnixTime,
    ) -> Result<ServerCertVerified, Error> {
        Ok(ServerCertVerified::assertion())
    }

    fn verify_tls12_signature(
        &self,
        _message: &[u8],
        _cert: &CertificateDer<'_>,
        _dss: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, Error> {
        Ok(HandshakeSignatureValid::assertion())
    }

    fn verify_tls13_signature(
        &self,
        _message: &[u8],
        _cert: &CertificateDer<'_>,
        _dss: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, Error> {
        Ok(HandshakeSignatureValid::assertion())
    }

    fn supported_verify_schemes(&self) -> Vec<SignatureScheme> {
        provider::default_provider().signature_verification_algorithms.supported_schemes()
    }
}

/// A certificate that its key has signed.
fn made(algorithm: &'static rcgen::SignatureAlgorithm) -> (CertificateDer<'static>, PrivateKeyDer<'static>) {
    let key = rcgen::KeyPair::generate_for(algorithm).unwrap();
    let certificate = rcgen::CertificateParams::new(Vec::new()).unwrap().self_signed(&key).unwrap();
    (certificate.der().clone(), PrivateKeyDer::try_from(key.serialize_der()).unwrap())
}

fn shown(chain: Vec<CertificateDer<'static>>, key: &PrivateKeyDer<'_>) -> Option<Arc<CertifiedKey>> {
    let key = provider::sign::any_supported_type(key).unwrap();
    Some(Arc::new(CertifiedKey::new(chain, key)))
}

fn server(asks: bool) -> Arc<ServerConfig> {
    let folder = tempfile::tempdir().unwrap();
    let (certificate, key) = made(&rcgen::PKCS_ECDSA_P256_SHA256);
    let pem = |label: &str, der: &[u8]| {
        format!("-----BEGIN {label}-----\n{}\n-----END {label}-----\n", BASE64.encode(der))
    };
    let paths = ["chain.pem", "key.pem"].map(|name| folder.path().join(name));
    fs::write(&paths[0], pem("CERTIFICATE", &certificate)).unwrap();
    fs::write(&paths[1], pem("PRIVATE KEY", key.secret_der())).unwrap();
    WebCertificate::load(&paths[0], &paths[1]).unwrap().tls(asks)
}

/// Whom the server knows after a handshake.
fn known(
    server: &Arc<ServerConfig>,
    version: &'static SupportedProtocolVersion,
    shown: Option<Arc<CertifiedKey>>,
) -> Result<Option<ClientKey>, Error> {
    let config = ClientConfig::builder_with_provider(Arc::new(provider::default_provider()))
        .with_protocol_versions(&[version])
        .unwrap()
        .dangerous()
        .with_custom_certificate_verifier(Arc::new(Shows(None)))
        .with_client_cert_resolver(Arc::new(Shows(shown)));
    let name = ServerName::try_from("gw.example.net").unwrap();
    let mut client = ClientConnection::new(Arc::new(config), name).unwrap();
    let mut server = ServerConnection::new(Arc::clone(server)).unwrap();
    while client.is_handshaking() || server.is_handshaking() || client.wants_write() {
        let mut bytes = Vec::new();
        client.write_tls(&mut bytes).unwrap();
        let mut rest = &*bytes;
        while !rest.is_empty() {
            server.read_tls(&mut rest).unwrap();
            server.process_new_packets()?;
        }
        bytes.clear();
        server.write_tls(&mut bytes).unwrap();
        client.read_tls(&mut &*bytes).unwrap();
        client.process_new_packets()?;
    }
    Ok(ClientKey::of_chain(server.peer_certificates()))
}

#[test]
fn a_client_is_whose_key_it_has() {
    let server = server(true);
    for version in [&TLS13, &TLS12] {
        for algorithm in
            [&rcgen::PKCS_ECDSA_P256_SHA256, &rcgen::PKCS_ECDSA_P384_SHA384, &rcgen::PKCS_ED25519]
        {
            let (certificate, key) = made(algorithm);
            let expected = ClientKey::of_certificate(&certificate);
            assert!(expected.is_some());
            let chain = vec![certificate.clone()];
            assert_eq!(known(&server, version, shown(chain.clone(), &key)), Ok(expected));
            // Whoever has seen the certificate has not its key, and what stands behind it is no proof either.
            let (other, other_key) = made(algorithm);
            for chain in [chain, vec![certificate.clone(), other.clone()]] {
                let error = known(&server, version, shown(chain, &other_key)).unwrap_err();
                assert_eq!(error, BAD_SIGNATURE, "{version:?} {algorithm:?}");
            }
            let behind = known(&server, version, shown(vec![other.clone(), certificate], &other_key));
            assert_eq!(behind, Ok(ClientKey::of_certificate(&other)));
        }
        assert_eq!(known(&server, version, None), Ok(None));
    }
}

#[test]
fn what_cannot_be_read_is_nobodys_and_what_is_long_is_refused() {
    let server = server(true);
    let (certificate, key) = made(&rcgen::PKCS_ECDSA_P256_SHA256);
    for version in [&TLS13, &TLS12] {
        let nothing = CertificateDer::from(vec![0x30, 0]);
        assert_eq!(known(&server, version, shown(vec![nothing], &key)), Ok(None));
        let long = vec![certificate.clone(), CertificateDer::from(vec![0; MOST_CHAIN_BYTES])];
        assert!(known(&server, version, shown(long, &key)).is_err());
    }
}

#[test]
fn nobody_is_asked_unless_that_is_wanted() {
    let (certificate, key) = made(&rcgen::PKCS_ECDSA_P256_SHA256);
    for version in [&TLS13, &TLS12] {
        assert_eq!(known(&server(false), version, shown(vec![certificate.clone()], &key)), Ok(None));
    }
}
