//! Certificates of users (mutual TLS): a user is known by the SHA-256 of the key in it, its SubjectPublicKeyInfo (RFC 5280 §4.1.2.7).
//!
//! No chain and no date is looked at: who has the private key is the user, as its signature of the handshake shows. A certificate of
//! anybody else, or none, is no error, so that nothing tells it from the right one but what it opens.

use std::{any::Any, fmt, str::FromStr, sync::Arc};

use data_encoding::{BASE64, HEXLOWER, HEXLOWER_PERMISSIVE};
use ring::digest::{SHA256, digest};
use rustls::{
    CertificateError, DigitallySignedStruct, DistinguishedName, Error, PeerMisbehaved, SignatureScheme,
    client::danger::HandshakeSignatureValid,
    crypto::{WebPkiSupportedAlgorithms, verify_tls13_signature_with_raw_key},
    server::danger::{ClientCertVerified, ClientCertVerifier},
};
use rustls_pki_types::{CertificateDer, SubjectPublicKeyInfoDer, UnixTime, pem::PemObject as _};

use crate::web::{element, public_key_info};

const HASH_BYTES: usize = 32;

/// What a hash begins with in a configuration.
const PREFIX: &str = "sha256:";

/// The most bytes of a client's certificates, which stay with the connection. A chain has less than 8 KiB.
const MOST_CHAIN_BYTES: usize = 16 << 10;

/// The key of a user's certificate, by its hash.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct ClientKey([u8; HASH_BYTES]);

/// Why a text is no [`ClientKey`].
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("is not sha256: and 64 hexadecimal digits, or the same hash in base64")]
pub struct NotAClientKey;

impl ClientKey {
    /// The key in a certificate; `None` if that cannot be read.
    #[must_use]
    pub fn of_certificate(certificate: &[u8]) -> Option<Self> {
        public_key_info(certificate).map(Self::of_public_key)
    }

    /// The key in the first certificate, or the first public key, of a file in PEM form.
    #[must_use]
    pub fn of_pem(pem: &[u8]) -> Option<Self> {
        if let Ok(certificate) = CertificateDer::from_pem_slice(pem) {
            return Self::of_certificate(&certificate);
        }
        let key = SubjectPublicKeyInfoDer::from_pem_slice(pem).ok()?;
        let (.., rest) = element(&key)?;
        rest.is_empty().then(|| Self::of_public_key(&key))
    }

    /// The key that the client of a handshake has shown to have, of what TLS knows of its certificates.
    #[must_use]
    pub fn of_chain(chain: Option<&[CertificateDer<'_>]>) -> Option<Self> {
        Self::of_certificate(chain?.first()?)
    }

    /// The same, of what quinn-proto has as the identity of a peer.
    #[must_use]
    pub fn of_identity(identity: Option<Box<dyn Any>>) -> Option<Self> {
        let chain = identity?.downcast::<Vec<CertificateDer<'static>>>().ok()?;
        Self::of_chain(Some(&chain))
    }

    fn of_public_key(info: &[u8]) -> Self {
        let mut hash = [0; HASH_BYTES];
        hash.copy_from_slice(digest(&SHA256, info).as_ref());
        Self(hash)
    }
}

impl fmt::Display for ClientKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{PREFIX}{}", HEXLOWER.encode(&self.0))
    }
}

impl fmt::Debug for ClientKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

impl FromStr for ClientKey {
    type Err = NotAClientKey;

    fn from_str(text: &str) -> Result<Self, NotAClientKey> {
        let text = text.strip_prefix(PREFIX).ok_or(NotAClientKey)?.as_bytes();
        let hash = HEXLOWER_PERMISSIVE.decode(text).or_else(|_| BASE64.decode(text));
        let hash = hash.ok().and_then(|hash| hash.try_into().ok());
        hash.map(Self).ok_or(NotAClientKey)
    }
}

/// Takes every certificate, and none, if the client has the key of the one that it shows.
#[derive(Debug)]
pub(crate) struct AnyClient(pub(crate) WebPkiSupportedAlgorithms);

impl AnyClient {
    pub(crate) fn verifier(algorithms: WebPkiSupportedAlgorithms) -> Arc<dyn ClientCertVerifier> {
        Arc::new(Self(algorithms))
    }
}

const BAD_SIGNATURE: Error = Error::InvalidCertificate(CertificateError::BadSignature);

impl ClientCertVerifier for AnyClient {
    fn client_auth_mandatory(&self) -> bool {
        false
    }

    fn root_hint_subjects(&self) -> &[DistinguishedName] {
        &[]
    }

    fn verify_client_cert(
        &self,
        end_entity: &CertificateDer<'_>,
        intermediates: &[CertificateDer<'_>],
        _now: UnixTime,
    ) -> Result<ClientCertVerified, Error> {
        let bytes = end_entity.len() + intermediates.iter().map(|one| one.len()).sum::<usize>();
        if bytes > MOST_CHAIN_BYTES {
            return Err(Error::InvalidCertificate(CertificateError::BadEncoding));
        }
        Ok(ClientCertVerified::assertion())
    }

    fn verify_tls12_signature(
        &self,
        message: &[u8],
        cert: &CertificateDer<'_>,
        dss: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, Error> {
        // Whose key cannot be read is nobody, whatever the signature: `ClientKey::of_certificate` reads the same bytes.
        let Some(info) = public_key_info(cert) else { return Ok(HandshakeSignatureValid::assertion()) };
        let info = SubjectPublicKeyInfoDer::from(info);
        let key = webpki::RawPublicKeyEntity::try_from(&info).map_err(|_| BAD_SIGNATURE)?;
        let known = self.0.mapping.iter().find(|(scheme, _)| *scheme == dss.scheme);
        let algorithms =
            known.ok_or(Error::PeerMisbehaved(PeerMisbehaved::SignedHandshakeWithUnadvertisedSigScheme))?.1;
        // In TLS 1.2 a scheme of ECDSA says nothing of the curve.
        let verifies = |algorithm| key.verify_signature(algorithm, message, dss.signature()).is_ok();
        if algorithms.iter().copied().any(verifies) {
            Ok(HandshakeSignatureValid::assertion())
        } else {
            Err(BAD_SIGNATURE)
        }
    }

    fn verify_tls13_signature(
        &self,
        message: &[u8],
        cert: &CertificateDer<'_>,
        dss: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, Error> {
        let Some(info) = public_key_info(cert) else { return Ok(HandshakeSignatureValid::assertion()) };
        verify_tls13_signature_with_raw_key(message, &SubjectPublicKeyInfoDer::from(info), dss, &self.0)
    }

    fn supported_verify_schemes(&self) -> Vec<SignatureScheme> {
        self.0.supported_schemes()
    }
}

#[cfg(test)]
#[path = "client_key_tests.rs"]
mod handshake_tests;

#[cfg(test)]
mod tests {
    use super::*;

    /// Made by `openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:P-256`; the hash by
    /// `openssl x509 -pubkey -noout | openssl pkey -pubin -outform der | sha256sum`.
    const CERTIFICATE: &str = "-----BEGIN CERTIFICATE-----\n\
         MIIBdTCCARugAwIBAgIUEiRBAOxkjszBAO7ueRvlEVJg22YwCgYIKoZIzj0EAwIw\n\
         DzENMAsGA1UEAwwEYW5uYTAgFw0yNjExMjkxODU4MTFaGA8yMTI2MTEwNTE4NTgx\n\
         MVowDzENMAsGA1UEAwwEYW5uYTBZMBMGByqGSM49AgEGCCqGSM49AwEHA0IABKe9\n\
         KUZ8h/zIDT5tGmnolFS2mVMgvPo5ereyhIQXkCLJQqaOS5gXngj6zeXSA7wa1rF9\n\
         aJhClZC3htTtewYEx3OjUzBRMB0GA1UdDgQWBBQZv8wj3GbBR1EbERXCzbcbsN+g\n\
         iDAfBgNVHSMEGDAWgBQZv8wj3GbBR1EbERXCzbcbsN+giDAPBgNVHRMBAf8EBTAD\n\
         AQH/MAoGCCqGSM49BAMCA0gAMEUCIHKRQaEP9qt1S1NaP2hpLDm5UjcyzHR06YfC\n\
         8hCOpn04AiEAwpeOeL1lJguJJa/yA6GGhZMv9kCEcn24S6bfy9f8GQk=\n\
         -----END CERTIFICATE-----";
    const PUBLIC_KEY: &str = "-----BEGIN PUBLIC KEY-----\n\
         MFkwEwYHKoZIzj0CAQYIKoZIzj0DAQcDQgAEp70pRnyH/MgNPm0aaeiUVLaZUyC8\n\
         +jl6t7KEhBeQIslCpo5LmBeeCPrN5dIDvBrWsX1omEKVkLeG1O17BgTHcw==\n\
         -----END PUBLIC KEY-----";
    const HASH: &str = "sha256:f5a23c10b8c0ad541457c53d7e0f632087b2749fe230423c641d4977f4ea4aeb";
    const IN_BASE64: &str = "sha256:9aI8ELjArVQUV8U9fg9jIIeydJ/iMEI8ZB1Jd/TqSus=";

    #[test]
    fn a_key_is_known_by_the_hash_that_openssl_makes() {
        let key: ClientKey = HASH.parse().unwrap();
        assert_eq!(key.to_string(), HASH);
        assert_eq!(IN_BASE64.parse(), Ok(key));
        assert_eq!(HASH.to_uppercase().replace("SHA256", "sha256").parse(), Ok(key));
        assert_eq!(ClientKey::of_pem(CERTIFICATE.as_bytes()), Some(key));
        assert_eq!(ClientKey::of_pem(PUBLIC_KEY.as_bytes()), Some(key));
        let certificate = CertificateDer::from_pem_slice(CERTIFICATE.as_bytes()).unwrap();
        assert_eq!(ClientKey::of_chain(Some(std::slice::from_ref(&certificate))), Some(key));
        assert_eq!(ClientKey::of_identity(Some(Box::new(vec![certificate]))), Some(key));
    }

    #[test]
    fn what_is_no_key_is_nobodys() {
        for wrong in ["", "sha256:", &HASH[..70], &HASH[7..], &format!("{HASH}0"), "sha1:00", "sha256:zz"] {
            assert_eq!(wrong.parse::<ClientKey>(), Err(NotAClientKey), "{wrong:?}");
        }
        assert_eq!(ClientKey::of_chain(None), None);
        assert_eq!(ClientKey::of_chain(Some(&[])), None);
        assert_eq!(ClientKey::of_identity(Some(Box::new(()))), None);
        let certificate = CertificateDer::from_pem_slice(CERTIFICATE.as_bytes()).unwrap();
        for end in 0..certificate.len() {
            assert_eq!(ClientKey::of_certificate(&certificate[..end]), None, "{end}");
        }
        assert_eq!(ClientKey::of_pem(b"-----BEGIN PUBLIC KEY-----\nAAAA\n-----END PUBLIC KEY-----\n"), None);
    }
}
