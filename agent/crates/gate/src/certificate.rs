//! The self-signed certificate around an Ed25519 key, and the key inside one.

use rustls::{SignatureScheme, server::ParsedCertificate, sign::SigningKey};
use rustls_pki_types::CertificateDer;

/// The key that a certificate is made for, and signed with.
pub(crate) struct Subject<'k> {
    pub(crate) key: &'k dyn SigningKey,
    pub(crate) public_key: [u8; 32],
}

impl rcgen::PublicKeyData for Subject<'_> {
    fn der_bytes(&self) -> &[u8] {
        &self.public_key
    }

    fn algorithm(&self) -> &'static rcgen::SignatureAlgorithm {
        &rcgen::PKCS_ED25519
    }
}

impl rcgen::SigningKey for Subject<'_> {
    fn sign(&self, message: &[u8]) -> Result<Vec<u8>, rcgen::Error> {
        signature(self.key, message).ok_or(rcgen::Error::RemoteKeyError)
    }
}

/// A certificate of `key`, with a name and dates that mean nothing.
pub(crate) fn self_signed(key: &impl rcgen::SigningKey) -> Result<CertificateDer<'static>, rcgen::Error> {
    let mut params = rcgen::CertificateParams::new(Vec::<String>::new())?;
    params.distinguished_name = rcgen::DistinguishedName::new();
    params.distinguished_name.push(rcgen::DnType::CommonName, "culvert");
    params.not_before = rcgen::date_time_ymd(2000, 1, 1);
    // RFC 5280 §4.1.2.5: the value for "no well-defined expiration date"; the pin decides, not a date.
    params.not_after = rcgen::date_time_ymd(9999, 12, 31);
    Ok(params.self_signed(key)?.der().clone())
}

/// Signs `message` with an Ed25519 key (RFC 8032 §5.1.6).
pub(crate) fn signature(key: &dyn SigningKey, message: &[u8]) -> Option<Vec<u8>> {
    key.choose_scheme(&[SignatureScheme::ED25519])?.sign(message).ok()
}

/// The Ed25519 key of a certificate, from its parsed SubjectPublicKeyInfo (RFC 8410 §4).
pub(crate) fn spki_key(certificate: &CertificateDer<'_>) -> Option<[u8; 32]> {
    raw_key(&ParsedCertificate::try_from(certificate).ok()?.subject_public_key_info())
}

/// The Ed25519 key of a SubjectPublicKeyInfo.
pub(crate) fn raw_key(spki: &[u8]) -> Option<[u8; 32]> {
    // SEQUENCE { SEQUENCE { OID 1.3.101.112 }, BIT STRING with no unused bits }
    const ED25519_SPKI: [u8; 12] = [0x30, 0x2a, 0x30, 0x05, 0x06, 0x03, 0x2b, 0x65, 0x70, 0x03, 0x21, 0x00];
    spki.strip_prefix(&ED25519_SPKI)?.try_into().ok()
}
