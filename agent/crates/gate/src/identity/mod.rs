//! Who an agent is: its Ed25519 key, the public key that others pin (both here), what the key is used for beside TLS
//! (`agreement.rs`), and the share link that tells others whom to expect where (`link.rs`).
//!
//! Our copies of private bytes are wiped when they are dropped: the file's text, its DER, the seed, and what is derived from it.
//! What libraries hold we cannot wipe: ring's key pair and digests, rustls' session secrets, snow's cipher states, the line that the
//! PEM reader decodes, and what a move leaves on the stack. So `culvert run` keeps the whole process from core files and debuggers,
//! too: `net::process::hide_memory`.

use std::{
    fmt,
    net::Ipv6Addr,
    path::{Path, PathBuf},
    str::FromStr,
};

use data_encoding::{BASE64, BASE64URL_NOPAD};
use ring::signature::{Ed25519KeyPair, KeyPair};
use rustls_pki_types::pem::{PemObject, SectionKind};
use zeroize::Zeroizing;

mod agreement;
mod link;
pub(crate) mod secret_file;

pub use agreement::AgreementKey;
pub use link::{Endpoint, EndpointError, ShareLink, ShareLinkError};
pub use secret_file::SecretError;

/// The Ed25519 public key by which an agent is known.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct PublicKey(pub [u8; 32]);

impl PublicKey {
    /// Characters of the written form: 32 bytes as unpadded base64url.
    pub const TEXT_LEN: usize = 43;

    /// The link-local address that the agent with this key has in the tunnel: the first half of the key behind fe80::/64. Both ends
    /// know it without a word about it.
    #[must_use]
    pub fn link_local(&self) -> Ipv6Addr {
        let mut octets = [0; 16];
        octets[..2].copy_from_slice(&[0xfe, 0x80]);
        octets[8..].copy_from_slice(&self.0[..8]);
        octets.into()
    }
}

impl fmt::Display for PublicKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&BASE64URL_NOPAD.encode(&self.0))
    }
}

impl fmt::Debug for PublicKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "PublicKey({self})")
    }
}

/// Why a text is not a public key.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum PublicKeyError {
    /// The text has another length than 43 characters.
    #[error("a public key has 43 characters, this has {0}")]
    Length(usize),
    /// The text is 32 bytes of base64, as WireGuard writes its keys.
    #[error("this looks like a key of WireGuard; Culvert's keys are its own, have 43 characters and no '='")]
    WireGuard,
    /// A character of the text is not base64url.
    #[error("character {position} is {character:?}; a public key has only A-Z, a-z, 0-9, '-' and '_'")]
    Character {
        /// The position of the character, counted from 1.
        position: usize,
        /// The character that stands at that position.
        character: char,
    },
    /// The last character carries bits that no 32-byte key has, so it was mistyped.
    #[error("the last character cannot end a public key: it was mistyped or cut")]
    NotCanonical,
    /// The bytes are no point of Ed25519's curve, or one of small order, so nobody has a private key for it.
    #[error("no private key belongs to it: a character was mistyped")]
    NotAKey,
}

impl FromStr for PublicKey {
    type Err = PublicKeyError;

    fn from_str(text: &str) -> Result<Self, PublicKeyError> {
        let length = text.chars().count();
        if length != Self::TEXT_LEN {
            let padded = length == Self::TEXT_LEN + 1 && text.ends_with('=');
            let is_base64 = padded && BASE64.decode(text.as_bytes()).is_ok_and(|key| key.len() == 32);
            return Err(if is_base64 { PublicKeyError::WireGuard } else { PublicKeyError::Length(length) });
        }
        let strange = |c: &char| !(c.is_ascii_alphanumeric() || *c == '-' || *c == '_');
        if let Some((index, character)) = text.chars().enumerate().find(|(_, c)| strange(c)) {
            return Err(PublicKeyError::Character { position: index + 1, character });
        }
        let bytes = BASE64URL_NOPAD.decode(text.as_bytes()).map_err(|_| PublicKeyError::NotCanonical)?;
        let key = <[u8; 32]>::try_from(bytes).map(Self).map_err(|_| PublicKeyError::NotCanonical)?;
        key.agreement().map(|_| key).ok_or(PublicKeyError::NotAKey)
    }
}

/// Our own Ed25519 key, and during a rotation the one before it. The private parts are wiped when dropped, and are never shown.
pub struct Identity {
    seed: Zeroizing<[u8; 32]>,
    public_key: PublicKey,
    previous: Option<Box<Self>>,
}

impl fmt::Debug for Identity {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Identity({})", self.public_key)
    }
}

/// Why an identity could not be loaded or written; [`IdentityError::remedy`] says what to do.
#[derive(Debug, thiserror::Error)]
pub enum IdentityError {
    /// The key was not made, or its file cannot be used.
    #[error(transparent)]
    Secret(#[from] SecretError),
    /// The file's content is not an identity.
    #[error("{} {cause}", path.display())]
    Key {
        /// The path of the file that holds no identity.
        path: PathBuf,
        /// The defect of the file's content.
        cause: KeyError,
    },
}

impl IdentityError {
    /// The steps that an operator can take.
    #[must_use]
    pub fn remedy(&self) -> String {
        match self {
            Self::Secret(error) => error.remedy(
                |path| format!("write one with culvert keygen --out {}", path.display()),
                |_| "let the user that runs culvert read it".to_owned(),
            ),
            Self::Key { cause, .. } => cause.remedy().to_owned(),
        }
    }
}

/// Why bytes are not an Ed25519 private key.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum KeyError {
    /// No `-----BEGIN PRIVATE KEY-----` section, or base64 that does not decode.
    #[error("holds no PEM private key")]
    NotPem,
    /// A public key or a certificate where the private key belongs.
    #[error("holds no private key, only a public key or certificate")]
    NotPrivate,
    /// The file holds more than one key.
    #[error("holds more than one private key")]
    Several,
    /// The key is of another type, such as RSA, ECDSA or X25519.
    #[error("holds a private key of another type than Ed25519")]
    WrongType,
    /// DER that is cut or not PKCS#8.
    #[error("holds a damaged private key")]
    Damaged,
    /// A v2 key whose two halves do not belong together.
    #[error("holds a private key and a public key that do not belong together")]
    Mismatch,
}

impl KeyError {
    fn remedy(self) -> &'static str {
        match self {
            Self::NotPem => "write a new one with culvert keygen; encrypted and OpenSSH keys are not read",
            Self::NotPrivate => "name the file that culvert keygen wrote",
            Self::Several => "leave one key in the file",
            Self::WrongType => "write an Ed25519 key with culvert keygen",
            Self::Damaged | Self::Mismatch => {
                "restore the file from a backup, or write a new key with culvert keygen"
            }
        }
    }
}

impl Identity {
    /// A new key from the system's random generator.
    ///
    /// # Errors
    /// [`SecretError::Random`].
    pub fn generate() -> Result<Self, IdentityError> {
        Self::from_seed(secret_file::random()?).map_err(|_| SecretError::Random.into())
    }

    /// The key whose 32 private bytes (RFC 8032 §5.1.5) are `seed`; the same seed gives the same key.
    ///
    /// # Errors
    /// Never for the seeds of today's Ed25519; the library's constructor is fallible.
    pub fn from_seed(seed: Zeroizing<[u8; 32]>) -> Result<Self, KeyError> {
        let pair = Ed25519KeyPair::from_seed_unchecked(seed.as_ref()).map_err(|_| KeyError::Damaged)?;
        let public_key = pair.public_key().as_ref().try_into().map_err(|_| KeyError::Damaged)?;
        Ok(Self { seed, public_key: PublicKey(public_key), previous: None })
    }

    /// The same identity while it is still known by `previous`, too.
    #[must_use]
    pub fn with_previous(self, previous: Self) -> Self {
        Self { previous: Some(Box::new(previous)), ..self }
    }

    /// The key before a rotation, by which some peers still know us.
    #[must_use]
    pub fn previous(&self) -> Option<&Self> {
        self.previous.as_deref()
    }

    /// The public keys by which peers may know us, the current one first.
    #[must_use]
    pub fn public_keys(&self) -> Vec<PublicKey> {
        [Some(self), self.previous()].into_iter().flatten().map(Self::public_key).collect()
    }

    /// Reads a PKCS#8 PEM file, version 1 (what `openssl genpkey -algorithm ed25519` writes) or 2.
    ///
    /// # Errors
    /// Every variant that is about reading; a file that everybody can access is refused.
    pub fn load(path: &Path) -> Result<Self, IdentityError> {
        let text = secret_file::read(path, MAX_FILE_BYTES)?;
        Self::from_pem(&text).map_err(|cause| IdentityError::Key { path: path.to_owned(), cause })
    }

    /// Reads the text of a PKCS#8 PEM file.
    ///
    /// # Errors
    /// Every variant of [`KeyError`].
    pub fn from_pem(pem: &[u8]) -> Result<Self, KeyError> {
        if pem.len() > MAX_FILE_BYTES {
            return Err(KeyError::NotPem);
        }
        let mut key = None;
        let mut other_type = false;
        let mut public_only = false;
        for section in <(SectionKind, Vec<u8>)>::pem_slice_iter(pem) {
            let (kind, der) = section.map_err(|_| KeyError::NotPem)?;
            let der = Zeroizing::new(der);
            if kind == SectionKind::PrivateKey {
                if key.replace(der).is_some() {
                    return Err(KeyError::Several);
                }
            } else if kind == SectionKind::RsaPrivateKey || kind == SectionKind::EcPrivateKey {
                other_type = true;
            } else {
                public_only = true;
            }
        }
        match key {
            Some(der) => Self::from_pkcs8(&der),
            None if other_type => Err(KeyError::WrongType),
            None if public_only => Err(KeyError::NotPrivate),
            None => Err(KeyError::NotPem),
        }
    }

    /// Reads a PKCS#8 structure (RFC 5958) as RFC 8410 §7 fills it for Ed25519.
    fn from_pkcs8(der: &[u8]) -> Result<Self, KeyError> {
        let (body, rest) = der_element(der, DER_SEQUENCE)?;
        let (version, body) = der_element(body, DER_INTEGER)?;
        let (algorithm, body) = der_element(body, DER_SEQUENCE)?;
        if !rest.is_empty() || !matches!(version, [0] | [1]) {
            return Err(KeyError::Damaged);
        }
        if algorithm != ED25519_OID {
            return Err(KeyError::WrongType);
        }
        let (private, mut body) = der_element(body, DER_OCTET_STRING)?;
        let (seed, rest) = der_element(private, DER_OCTET_STRING)?;
        if !rest.is_empty() {
            return Err(KeyError::Damaged);
        }
        let mut wiped = Zeroizing::new([0; 32]);
        if seed.len() != wiped.len() {
            return Err(KeyError::Damaged);
        }
        wiped.copy_from_slice(seed);
        let identity = Self::from_seed(wiped)?;
        if body.first() == Some(&DER_ATTRIBUTES) {
            body = der_element(body, DER_ATTRIBUTES)?.1;
        }
        // The public half of version 2: a bit string, tagged implicitly by RFC 5958, explicitly by older writers.
        let public = match body.first() {
            None => return Ok(identity),
            Some(&DER_PUBLIC_EXPLICIT) => {
                der_element(der_last(body, DER_PUBLIC_EXPLICIT)?, DER_BIT_STRING)?.0
            }
            Some(_) => der_last(body, DER_PUBLIC)?,
        };
        let Some((0, public)) = public.split_first() else { return Err(KeyError::Damaged) };
        if public == identity.public_key.0 { Ok(identity) } else { Err(KeyError::Mismatch) }
    }

    /// Writes the key to a new file that only its owner can read.
    ///
    /// # Errors
    /// [`SecretError::Exists`] rather than overwriting, or the kernel's refusal.
    pub fn write_new(&self, path: &Path) -> Result<(), IdentityError> {
        Ok(secret_file::write_new(path, "an identity", self.to_pem().as_bytes())?)
    }

    /// The key as a PKCS#8 PEM file, the form that [`Identity::from_pem`] reads.
    #[must_use]
    pub fn to_pem(&self) -> Zeroizing<String> {
        let body = Zeroizing::new(BASE64.encode(&self.pkcs8_der()));
        let lines = ["-----BEGIN PRIVATE KEY-----\n", &body, "\n-----END PRIVATE KEY-----\n"];
        // Room for all of it up front: growing would leave unwiped copies behind.
        let mut pem = Zeroizing::new(String::with_capacity(lines.map(str::len).iter().sum()));
        lines.iter().for_each(|line| pem.push_str(line));
        pem
    }

    /// The key as a PKCS#8 version 1 structure, which every TLS library reads; wiped when dropped.
    #[must_use]
    pub fn pkcs8_der(&self) -> Zeroizing<Vec<u8>> {
        let mut der = Zeroizing::new(Vec::with_capacity(PKCS8_V1_PREFIX.len() + self.seed.len()));
        der.extend_from_slice(&PKCS8_V1_PREFIX);
        der.extend_from_slice(self.seed.as_ref());
        der
    }

    /// The public key of this identity.
    #[must_use]
    pub fn public_key(&self) -> PublicKey {
        self.public_key
    }
}

/// Far above any key file, so that a wrong path costs no memory.
const MAX_FILE_BYTES: usize = 16 * 1024;

/// PKCS#8 version 1 of an Ed25519 key (RFC 8410 §10.3) up to its 32 private bytes.
const PKCS8_V1_PREFIX: [u8; 16] = [0x30, 46, 2, 1, 0, 0x30, 5, 6, 3, 0x2b, 0x65, 0x70, 4, 34, 4, 32];

/// `OBJECT IDENTIFIER 1.3.101.112` (RFC 8410 §3), with its tag and length.
const ED25519_OID: [u8; 5] = [6, 3, 0x2b, 0x65, 0x70];

const DER_INTEGER: u8 = 0x02;
const DER_BIT_STRING: u8 = 0x03;
const DER_OCTET_STRING: u8 = 0x04;
const DER_SEQUENCE: u8 = 0x30;
const DER_ATTRIBUTES: u8 = 0xa0;
const DER_PUBLIC: u8 = 0x81;
const DER_PUBLIC_EXPLICIT: u8 = 0xa1;

/// Splits the element with `tag` off the front of `der`: its content, and what follows.
fn der_element(der: &[u8], tag: u8) -> Result<(&[u8], &[u8]), KeyError> {
    let (found, rest) = der.split_first().ok_or(KeyError::Damaged)?;
    let (first, rest) = rest.split_first().ok_or(KeyError::Damaged)?;
    let (length, rest) = match *first {
        short @ 0..=0x7f => (usize::from(short), rest),
        0x81 => rest.split_first().map(|(b, rest)| (usize::from(*b), rest)).ok_or(KeyError::Damaged)?,
        0x82 => match rest {
            [high, low, rest @ ..] => (usize::from(u16::from_be_bytes([*high, *low])), rest),
            _ => return Err(KeyError::Damaged),
        },
        _ => return Err(KeyError::Damaged),
    };
    if *found != tag {
        return Err(KeyError::Damaged);
    }
    rest.split_at_checked(length).ok_or(KeyError::Damaged)
}

/// The element with `tag`, which must be all of `der`.
fn der_last(der: &[u8], tag: u8) -> Result<&[u8], KeyError> {
    match der_element(der, tag)? {
        (content, []) => Ok(content),
        _ => Err(KeyError::Damaged),
    }
}

#[cfg(test)]
mod tests;
