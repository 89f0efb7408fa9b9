//! The certificate of a run: a listener makes it, a sender trusts it and no other.

use std::{fs, path::Path, sync::Arc};

use anyhow::Context;
use rustls::{
    ClientConfig, RootCertStore, ServerConfig,
    crypto::{
        CryptoProvider,
        ring::{cipher_suite, default_provider},
    },
    pki_types::{CertificateDer, PrivateKeyDer, PrivatePkcs8KeyDer},
    version::TLS13,
};

/// The name in the certificate.
pub(crate) const NAME: &str = "transports.test";

/// The protocol that QUIC's handshake agrees on.
const ALPN: &[u8] = b"transports";

/// TLS 1.3 with AES-128-GCM, the suite that all encrypting candidates use.
fn provider() -> Arc<CryptoProvider> {
    Arc::new(CryptoProvider {
        cipher_suites: vec![cipher_suite::TLS13_AES_128_GCM_SHA256],
        ..default_provider()
    })
}

/// Makes a certificate: itself, and what a listener needs of it.
pub(crate) fn generate() -> anyhow::Result<(CertificateDer<'static>, ServerConfig)> {
    let certified = rcgen::generate_simple_self_signed([NAME.into()])?;
    let der = certified.cert.der().clone();
    let key = PrivateKeyDer::from(PrivatePkcs8KeyDer::from(certified.signing_key.serialize_der()));
    let mut server = ServerConfig::builder_with_provider(provider())
        .with_protocol_versions(&[&TLS13])?
        .with_no_client_auth()
        .with_single_cert(vec![der.clone()], key)?;
    server.alpn_protocols = vec![ALPN.to_vec()];
    Ok((der, server))
}

/// Makes a certificate and writes it where a sender looks for it.
pub(crate) fn write(path: &Path) -> anyhow::Result<ServerConfig> {
    let (der, server) = generate()?;
    fs::write(path, &der).with_context(|| format!("no certificate at {}", path.display()))?;
    Ok(server)
}

/// What a sender needs to trust the certificate in this file.
pub(crate) fn client_of(path: &Path) -> anyhow::Result<ClientConfig> {
    let der = fs::read(path).with_context(|| format!("no certificate in {}", path.display()))?;
    client(CertificateDer::from(der))
}

/// What a sender needs to trust this certificate.
pub(crate) fn client(der: CertificateDer<'static>) -> anyhow::Result<ClientConfig> {
    let mut roots = RootCertStore::empty();
    roots.add(der)?;
    let mut client = ClientConfig::builder_with_provider(provider())
        .with_protocol_versions(&[&TLS13])?
        .with_root_certificates(roots)
        .with_no_client_auth();
    client.alpn_protocols = vec![ALPN.to_vec()];
    Ok(client)
}
