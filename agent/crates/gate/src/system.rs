//! What rustls is given of ring for TLS between peers: as much as two Ed25519 keys take. RSA and the curves of NIST are for the web server's
//! certificates, which has a provider of its own.

use std::sync::Arc;

use ring::rand::{SecureRandom as _, SystemRandom};
use rustls::{
    Error, SignatureScheme,
    crypto::{GetRandomFailed, KeyProvider, SecureRandom, WebPkiSupportedAlgorithms, ring::sign},
    sign::SigningKey,
};
use rustls_pki_types::PrivateKeyDer;

/// The generator of the system, and a reader of Ed25519 keys.
#[derive(Debug)]
pub(crate) struct System;

/// The signatures that are verified: Ed25519 (RFC 8032).
pub(crate) static ED25519: WebPkiSupportedAlgorithms = WebPkiSupportedAlgorithms {
    all: &[webpki::ring::ED25519],
    mapping: &[(SignatureScheme::ED25519, &[webpki::ring::ED25519])],
};

impl SecureRandom for System {
    fn fill(&self, buffer: &mut [u8]) -> Result<(), GetRandomFailed> {
        SystemRandom::new().fill(buffer).map_err(|_| GetRandomFailed)
    }
}

impl KeyProvider for System {
    fn load_private_key(&self, key: PrivateKeyDer<'static>) -> Result<Arc<dyn SigningKey>, Error> {
        let PrivateKeyDer::Pkcs8(der) = &key else {
            return Err(Error::General("not an Ed25519 key in PKCS#8 form".to_owned()));
        };
        sign::any_eddsa_type(der)
    }
}
