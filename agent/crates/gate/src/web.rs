//! The certificate that is shown to whoever names us, and the TLS of HTTP/3, and of HTTP/1.1 and HTTP/2 on TCP, with it.
//!
//! Browsers and authorities use curves and keys that agents do not: this is a provider of its own beside `tls.rs`.

use std::{
    fmt, io,
    path::{Path, PathBuf},
    sync::Arc,
};

use base::files;
use quinn_proto::crypto::{
    self,
    rustls::{NoInitialCipherSuite, QuicServerConfig},
};
use rustls::{
    ServerConfig,
    crypto::{CryptoProvider, ring as provider},
    server::{NoClientAuth, danger::ClientCertVerifier},
    sign::{CertifiedKey, SingleCertAndKey},
};
use rustls_pki_types::{CertificateDer, PrivateKeyDer, ServerName, pem::PemObject};

use crate::{client_key::AnyClient, tls::hybrid};

/// The application protocol of HTTP/3 (RFC 9114 §3.1).
const ALPN: &[u8] = b"h3";

/// The application protocols on TCP, the better first (RFC 9113 §3.1, RFC 9112).
const TCP_ALPN: [&[u8]; 2] = [b"h2", b"http/1.1"];

/// The longest file that is read, in bytes: chains have less than 20 KiB.
const MOST_FILE_BYTES: usize = 1 << 20;

/// A certificate with its key, ready for handshakes.
#[derive(Clone)]
pub struct WebCertificate {
    chain: Vec<CertificateDer<'static>>,
    expires: u64,
    quic: Asking<Arc<dyn crypto::ServerConfig>>,
    tls: Asking<Arc<ServerConfig>>,
}

/// The same TLS twice: one that asks clients for a certificate, and one that does not.
#[derive(Clone)]
struct Asking<T> {
    asks: T,
    asks_not: T,
}

impl<T: Clone> Asking<T> {
    fn new<E>(make: impl Fn(bool) -> Result<T, E>) -> Result<Self, E> {
        Ok(Self { asks: make(true)?, asks_not: make(false)? })
    }

    fn get(&self, asks: bool) -> T {
        if asks { self.asks.clone() } else { self.asks_not.clone() }
    }
}

/// Why there is no certificate.
#[derive(Debug, thiserror::Error)]
pub enum WebCertificateError {
    /// A file cannot be read.
    #[error("{}: {cause}", path.display())]
    Read {
        /// The file.
        path: PathBuf,
        /// What the system says.
        cause: io::Error,
    },
    /// There is no certificate in the file.
    #[error("{}: has no certificate in PEM form", .0.display())]
    NoCertificate(PathBuf),
    /// There is no private key in the file.
    #[error("{}: has no private key in PEM form", .0.display())]
    NoKey(PathBuf),
    /// The first certificate cannot be understood.
    #[error("{}: its first certificate cannot be read", .0.display())]
    Malformed(PathBuf),
    /// The key is not that of the certificate.
    #[error("the key in {} is not that of the certificate in {}", key.display(), certificate.display())]
    OtherKey {
        /// The file of the key.
        key: PathBuf,
        /// The file of the certificate.
        certificate: PathBuf,
    },
    /// The key is of a kind that TLS 1.3 has no use for here.
    #[error("{}: a key that cannot be used: {cause}", path.display())]
    Key {
        /// The file of the key.
        path: PathBuf,
        /// What rustls says.
        cause: rustls::Error,
    },
    /// TLS cannot be set up.
    #[error("cannot set up TLS")]
    Tls(#[from] rustls::Error),
    /// TLS lacks the suite of Initial packets.
    #[error("cannot set up QUIC")]
    InitialSuite(#[from] NoInitialCipherSuite),
}

impl WebCertificateError {
    /// Whether the file of the key is at fault, and not that of the certificate.
    #[must_use]
    pub fn is_about_key(&self, key_file: &Path) -> bool {
        match self {
            Self::Read { path, .. } => path == key_file,
            Self::NoKey(_) | Self::OtherKey { .. } | Self::Key { .. } => true,
            Self::NoCertificate(_) | Self::Malformed(_) | Self::Tls(_) | Self::InitialSuite(_) => false,
        }
    }

    /// What an operator can do.
    #[must_use]
    pub fn remedy(&self) -> &'static str {
        match self {
            Self::Read { cause, .. } => files::remedy(cause)
                .unwrap_or("let the user that runs culvert read it: a deploy hook can copy it"),
            Self::NoCertificate(_) | Self::Malformed(_) => {
                "name the file with the whole chain, as certbot's fullchain.pem"
            }
            Self::NoKey(_) | Self::Key { .. } => {
                "name the file of an ECDSA, RSA or Ed25519 key, as certbot's privkey.pem"
            }
            Self::OtherKey { .. } => "name the two files of one certificate",
            Self::Tls(_) | Self::InitialSuite(_) => "report it",
        }
    }
}

impl WebCertificate {
    /// Reads the chain and the key, both in PEM form.
    ///
    /// # Errors
    /// Why they cannot be used together.
    pub fn load(certificate_file: &Path, key_file: &Path) -> Result<Self, WebCertificateError> {
        let read = |path: &Path| {
            files::read(path, MOST_FILE_BYTES)
                .map_err(|cause| WebCertificateError::Read { path: path.to_owned(), cause })
        };
        let (pem, key_pem) = (read(certificate_file)?, zeroize::Zeroizing::new(read(key_file)?));
        let chain: Vec<_> = CertificateDer::pem_slice_iter(&pem).filter_map(Result::ok).collect();
        let first =
            chain.first().ok_or_else(|| WebCertificateError::NoCertificate(certificate_file.to_owned()))?;
        let expires =
            not_after(first).ok_or_else(|| WebCertificateError::Malformed(certificate_file.to_owned()))?;
        let key = PrivateKeyDer::from_pem_slice(&key_pem)
            .map_err(|_| WebCertificateError::NoKey(key_file.to_owned()))?;
        let provider = web_provider();
        let certified = CertifiedKey::from_der(chain.clone(), key, &provider).map_err(|cause| {
            let (certificate, key) = (certificate_file.to_owned(), key_file.to_owned());
            if matches!(cause, rustls::Error::InconsistentKeys(_)) {
                WebCertificateError::OtherKey { key, certificate }
            } else if matches!(cause, rustls::Error::InvalidCertificate(_)) {
                WebCertificateError::Malformed(certificate)
            } else {
                WebCertificateError::Key { path: key, cause }
            }
        })?;
        let tls = Asking::new(|asks| tcp_server(certified.clone(), asks))?;
        let quic = Asking::new(|asks| server(provider.clone(), certified.clone(), asks))?;
        Ok(Self { chain, expires, quic, tls })
    }

    /// When the certificate ends, in seconds since 1970.
    #[must_use]
    pub fn expires(&self) -> u64 {
        self.expires
    }

    /// Whether the certificate is valid for `name`.
    #[must_use]
    pub fn covers(&self, name: &str) -> bool {
        let end_entity = self.chain.first().and_then(|first| webpki::EndEntityCert::try_from(first).ok());
        let name = ServerName::try_from(name).ok();
        end_entity
            .zip(name)
            .is_some_and(|(certificate, name)| certificate.verify_is_valid_for_subject_name(&name).is_ok())
    }

    /// The TLS of a server that shows this certificate to everybody, and perhaps asks clients for one, which none must have.
    #[must_use]
    pub fn crypto(&self, asks: bool) -> Arc<dyn crypto::ServerConfig> {
        self.quic.get(asks)
    }

    /// The same on TCP, also of TLS 1.2, for HTTP/2 and HTTP/1.1.
    #[must_use]
    pub fn tls(&self, asks: bool) -> Arc<ServerConfig> {
        self.tls.get(asks)
    }
}

/// The same chain: it is used with one key.
impl PartialEq for WebCertificate {
    fn eq(&self, other: &Self) -> bool {
        self.chain == other.chain
    }
}

impl fmt::Debug for WebCertificate {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("WebCertificate").field("expires", &self.expires).finish_non_exhaustive()
    }
}

fn web_provider() -> CryptoProvider {
    CryptoProvider {
        kx_groups: vec![provider::kx_group::X25519, provider::kx_group::SECP256R1],
        ..provider::default_provider()
    }
}

/// What browsers, and programs older than TLS 1.3, agree on.
fn tcp_provider() -> CryptoProvider {
    use provider::kx_group::{SECP256R1, SECP384R1, X25519};
    let kx_groups = vec![hybrid(), X25519, SECP256R1, SECP384R1];
    CryptoProvider { kx_groups, ..provider::default_provider() }
}

fn tcp_server(certified: CertifiedKey, asks: bool) -> Result<Arc<ServerConfig>, rustls::Error> {
    let mut config = ServerConfig::builder_with_provider(Arc::new(tcp_provider()))
        .with_protocol_versions(&[&rustls::version::TLS13, &rustls::version::TLS12])?
        .with_client_cert_verifier(clients(asks))
        .with_cert_resolver(Arc::new(SingleCertAndKey::from(certified)));
    config.alpn_protocols = TCP_ALPN.map(<[u8]>::to_vec).into();
    keep_nothing(&mut config);
    Ok(Arc::new(config))
}

/// Who looks at certificates of clients.
fn clients(asks: bool) -> Arc<dyn ClientCertVerifier> {
    if asks {
        AnyClient::verifier(provider::default_provider().signature_verification_algorithms)
    } else {
        Arc::new(NoClientAuth)
    }
}

/// Nothing is kept of unauthenticated senders, and no early data is taken.
fn keep_nothing(config: &mut ServerConfig) {
    config.send_tls13_tickets = 0;
    config.session_storage = Arc::new(rustls::server::NoServerSessionStorage {});
    config.max_early_data_size = 0;
}

fn server(
    provider: CryptoProvider,
    certified: CertifiedKey,
    asks: bool,
) -> Result<Arc<dyn crypto::ServerConfig>, WebCertificateError> {
    let mut config = ServerConfig::builder_with_provider(Arc::new(provider))
        .with_protocol_versions(&[&rustls::version::TLS13])?
        .with_client_cert_verifier(clients(asks))
        .with_cert_resolver(Arc::new(SingleCertAndKey::from(certified)));
    config.alpn_protocols = vec![ALPN.to_vec()];
    keep_nothing(&mut config);
    Ok(Arc::new(QuicServerConfig::try_from(config)?))
}

/// A certificate from its validity on (RFC 5280 §4.1): that, the subject, the public key.
fn from_validity(certificate: &[u8]) -> Option<&[u8]> {
    const CONTEXT_0: u8 = 0xa0;
    let (_, whole, _) = element(certificate)?;
    let (_, mut fields, _) = element(whole)?;
    // The version, which may be left out; serial number, signature, issuer; then the validity.
    let leading = if fields.first() == Some(&CONTEXT_0) { 4 } else { 3 };
    for _ in 0..leading {
        fields = element(fields)?.2;
    }
    Some(fields)
}

/// The SubjectPublicKeyInfo of a certificate (RFC 5280 §4.1.2.7).
pub(crate) fn public_key_info(certificate: &[u8]) -> Option<&[u8]> {
    let (.., subject) = element(from_validity(certificate)?)?;
    let (.., info) = element(subject)?;
    let (.., behind) = element(info)?;
    Some(&info[..info.len() - behind.len()])
}

/// The end of the validity of a certificate (RFC 5280 §4.1.2.5), in seconds since 1970.
fn not_after(certificate: &[u8]) -> Option<u64> {
    let (_, validity, _) = element(from_validity(certificate)?)?;
    let (_, _, behind) = element(validity)?;
    let (kind, time, _) = element(behind)?;
    unix_seconds(kind, time)
}

/// Tag and content of the element of DER at the front of `bytes`, and what follows it.
pub(crate) fn element(bytes: &[u8]) -> Option<(u8, &[u8], &[u8])> {
    let [tag, length, rest @ ..] = bytes else { return None };
    let (length, rest) = if length & 0x80 == 0 {
        (usize::from(*length), rest)
    } else {
        let (digits, rest) = rest.split_at_checked(usize::from(length & 0x7f))?;
        if digits.len() > 4 {
            return None;
        }
        (digits.iter().fold(0, |sum, digit| sum << 8 | usize::from(*digit)), rest)
    };
    let (content, rest) = rest.split_at_checked(length)?;
    Some((*tag, content, rest))
}

/// UTCTime `YYMMDDhhmmssZ` or GeneralizedTime `YYYYMMDDhhmmssZ`.
fn unix_seconds(kind: u8, time: &[u8]) -> Option<u64> {
    const UTC_TIME: u8 = 0x17;
    let digits = time.strip_suffix(b"Z").filter(|digits| digits.iter().all(u8::is_ascii_digit))?;
    let number = |digits: &[u8]| digits.iter().fold(0_u64, |sum, digit| sum * 10 + u64::from(digit - b'0'));
    let (year, rest) = if kind == UTC_TIME {
        let (year, rest) = digits.split_at_checked(2)?;
        let year = number(year);
        (if year < 50 { 2000 + year } else { 1900 + year }, rest)
    } else {
        let (year, rest) = digits.split_at_checked(4)?;
        (number(year), rest)
    };
    let (pairs, []) = rest.as_chunks::<2>() else { return None };
    let [month, day, hour, minute, second] = pairs else { return None };
    let [month, day, hour, minute, second] = [month, day, hour, minute, second].map(|pair| number(pair));
    if !(1..=12).contains(&month) || !(1970..=9999).contains(&year) {
        return None;
    }
    // Days of the Gregorian calendar, with years that begin in March.
    let (years, months) = if month > 2 { (year, month - 3) } else { (year - 1, month + 9) };
    let days = 365 * years + years / 4 - years / 100 + years / 400 + (153 * months + 2) / 5 + day;
    let days = days.checked_sub(719_469)?;
    Some(((days * 24 + hour) * 60 + minute) * 60 + second)
}

#[cfg(test)]
mod tests {
    use std::fs;

    use super::*;

    /// A certificate for `name` and its key, as files.
    fn files(folder: &Path, file: &str, name: &str) -> [PathBuf; 2] {
        let key = rcgen::KeyPair::generate().unwrap();
        let mut params = rcgen::CertificateParams::new(vec![name.to_owned()]).unwrap();
        params.not_after = rcgen::date_time_ymd(2031, 2, 3);
        let certificate = params.self_signed(&key).unwrap();
        let paths = [".pem", ".key"].map(|end| folder.join(format!("{file}{end}")));
        fs::write(&paths[0], pem("CERTIFICATE", certificate.der())).unwrap();
        fs::write(&paths[1], pem("PRIVATE KEY", &key.serialize_der())).unwrap();
        paths
    }

    #[test]
    fn a_certificate_has_its_names_its_end_and_its_key() {
        let folder = tempfile::tempdir().unwrap();
        let [certificate, key] = files(folder.path(), "a", "gw.example.net");
        let loaded = WebCertificate::load(&certificate, &key).unwrap();
        assert_eq!(loaded.expires(), 1_927_843_200, "2031-02-03T00:00:00Z");
        assert!(loaded.covers("gw.example.net") && loaded.covers("GW.example.net"));
        assert!(!loaded.covers("example.net") && !loaded.covers("") && !loaded.covers("a b"));
        let [other, other_key] = files(folder.path(), "b", "*.example.net");
        let other = WebCertificate::load(&other, &other_key).unwrap();
        assert!(other.covers("gw.example.net") && !other.covers("example.net") && other != loaded);

        let wrong = |certificate: &Path, key: &Path| WebCertificate::load(certificate, key).unwrap_err();
        let error = wrong(&certificate, &other_key);
        assert!(matches!(error, WebCertificateError::OtherKey { .. }) && error.is_about_key(&other_key));
        assert!(matches!(wrong(&key, &key), WebCertificateError::NoCertificate(_)));
        assert!(matches!(wrong(&certificate, &certificate), WebCertificateError::NoKey(_)));
        let missing = folder.path().join("missing");
        assert!(wrong(&certificate, &missing).is_about_key(&missing));
        assert!(!wrong(&missing, &key).is_about_key(&key));
    }

    #[test]
    fn times_of_certificates() {
        for (kind, time, seconds) in [
            (0x17, "700101000000Z", Some(0)),
            (0x17, "261128220400Z", Some(1_795_903_440)),
            (0x17, "491231235959Z", Some(2_524_607_999)),
            (0x18, "20500101000000Z", Some(2_524_608_000)),
            (0x18, "20000229120000Z", Some(951_825_600)),
            (0x17, "700101000000", None),
            (0x17, "701301000000Z", None),
            (0x18, "1970", None),
            (0x17, "Z", None),
        ] {
            assert_eq!(unix_seconds(kind, time.as_bytes()), seconds, "{time}");
        }
        assert_eq!(not_after(&[]), None);
        assert_eq!(not_after(&[0x30, 0x84, 0xff, 0xff, 0xff, 0xff]), None);
    }

    /// `der` in PEM form (RFC 7468).
    fn pem(label: &str, der: &[u8]) -> String {
        let text = data_encoding::BASE64.encode(der);
        format!("-----BEGIN {label}-----\n{text}\n-----END {label}-----\n")
    }
}
