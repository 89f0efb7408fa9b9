//! The knock: proof, in the token of an Initial packet, that the client knows our public key and holds its own.
//!
//! ```text
//!  ephemeral key, masked 32 │ static key, sealed 32 + 16 │ payload, sealed 24 + 16 │ mac1 16
//!  └──────────── message of the Noise one-way pattern X ──────────────────────────┘
//!
//!  payload   version 1 │ flags 1 │ reserved 1 │ unix seconds 5 │ ClientHello hash 16
//!  prologue  "culvert knock 1" │ QUIC version 4 │ DCID length 1 │ DCID │ Ed25519 public key of the server 32
//!  mac1      BLAKE2s-128, keyed, of  QUIC version 4 │ DCID length 1 │ DCID │ all before it in the token │ epoch 8
//! ```
//!
//! * Integers are big endian. The version of the payload is 1; bit 0 of the flags is the sign of
//!   the client's Ed25519 key, so that its owner can be named; bit 1 says that the client falls back to a weaker key exchange;
//!   the other bits and the reserved byte are 0 and not looked at.
//! * The keys of mac1 and of the mask are BLAKE2s-256 of a label and the server's public key, so that only those who
//!   know the key can make or recognise a knock. To anyone else all 136 bytes are random: without the mask the
//!   ephemeral key would not be (it is a point of the curve, and its top bit is 0).
//! * The epoch is the unix seconds by [`EPOCH_SECONDS`]. It makes mac1 expire, so that an attacker who recorded a knock can have us
//!   spend no more on it, minutes later, than on any unauthenticated datagram.
//! * It is bound to the destination connection ID and to the ClientHello: seen on the wire, it opens nothing for others.
//! * The server's private key alone makes knocks in anyone's name: their sender has to prove its key in TLS, and again
//!   after the handshake.

use std::{ops::RangeInclusive, time::Duration};

use blake2::{
    Blake2s256, Blake2sMac, Digest,
    digest::{
        KeyInit, Mac,
        consts::{U16, U32},
    },
};
use ring::digest;
use snow::{
    params::{CipherChoice, DHChoice, HashChoice, NoiseParams},
    resolvers::{CryptoResolver, DefaultResolver},
    types::{Cipher, Dh, Hash, Random},
};
use zeroize::Zeroizing;

use crate::{
    classify::MAX_CID_BYTES,
    identity::{AgreementKey, PublicKey},
};

/// The length of a knock, in bytes.
pub const KNOCK_BYTES: usize = 136;

/// The length of mac1, which closes every token that the gate looks at.
pub const MAC_BYTES: usize = 16;

/// The duration of an epoch of mac1. Shorter epochs would let mac1 expire sooner, and cost an unauthenticated datagram more of
/// them: each that the window touches is one block of BLAKE2s.
pub const EPOCH_SECONDS: u64 = 256;

/// The epochs that clocks show which differ from ours, at `unix_seconds`, by at most `window` (whole seconds).
#[must_use]
pub fn epochs(unix_seconds: u64, window: Duration) -> RangeInclusive<u64> {
    let window = window.as_secs();
    epoch(unix_seconds.saturating_sub(window))..=epoch(unix_seconds.saturating_add(window))
}

/// The epoch of a unix second.
#[must_use]
pub fn epoch(unix_seconds: u64) -> u64 {
    unix_seconds / EPOCH_SECONDS
}

/// The longest `access.clock_window`. An unauthenticated datagram costs one block of a hash more for each epoch of mac1
/// that the window touches ([`EPOCH_SECONDS`]), and a used knock is remembered for as long as the longest window could
/// make it good again.
pub const MAX_CLOCK_WINDOW: Duration = Duration::from_secs(10 * 60);

/// The length of a hash of a ClientHello: the first half of SHA-256.
pub const HELLO_HASH_BYTES: usize = 16;

/// Why a token is no knock for us.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum KnockError {
    /// The token has another length than a knock, or the connection ID is longer than QUIC allows.
    #[error("the token is not a knock")]
    Length,
    /// Sealed to another key, or damaged.
    #[error("the knock does not open")]
    Noise,
    /// A key in it is of small order: it stands for nobody, because anyone can compute what it shares.
    #[error("the knock has a key of small order")]
    SmallOrder,
    /// The payload is of another version than 1.
    #[error("the knock has version {0}, not 1")]
    Version(u8),
}

/// The values derived from a server's public key; every unauthenticated datagram is checked against them.
#[derive(Clone)]
pub struct ServerKey {
    public_key: PublicKey,
    agreement: [u8; 32],
    /// Both are keyed and have taken in the QUIC version: with that the block of the key is behind them, which would else
    /// be a quarter of an unauthenticated sender's mac1.
    mac: Blake2sMac<U16>,
    mask: Blake2sMac<U32>,
    noise: NoiseParams,
}

impl std::fmt::Debug for ServerKey {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "ServerKey({})", self.public_key)
    }
}

impl ServerKey {
    /// Prepares for knocks at the holder of `public_key`; `None` if no secret can be shared with it.
    #[must_use]
    pub fn new(public_key: &PublicKey) -> Option<Self> {
        let key = |label: &[u8]| Blake2s256::new().chain_update(label).chain_update(public_key.0).finalize();
        let mac: Blake2sMac<U16> = KeyInit::new_from_slice(&key(b"culvert knock mac1")).ok()?;
        let mask: Blake2sMac<U32> = KeyInit::new_from_slice(&key(b"culvert knock mask")).ok()?;
        Some(Self {
            public_key: *public_key,
            agreement: public_key.agreement()?,
            mac: mac.chain_update(VERSION_1),
            mask: mask.chain_update(VERSION_1),
            noise: "Noise_X_25519_ChaChaPoly_BLAKE2s".parse().ok()?,
        })
    }

    /// The Ed25519 public key of the server.
    #[must_use]
    pub fn public_key(&self) -> &PublicKey {
        &self.public_key
    }

    /// mac1 of a token made in `epoch` whose bytes before it are `body`, in a packet to `dcid` (at most 20 bytes).
    #[must_use]
    pub fn mac1(&self, dcid: &[u8], body: &[u8], epoch: u64) -> [u8; MAC_BYTES] {
        self.mac1_state(dcid, body).chain_update(epoch.to_be_bytes()).finalize().into_bytes().into()
    }

    /// Whether `token` ends with its mac1 of one of `epochs`, in a packet to `dcid`; each is compared in constant time.
    ///
    /// The token is hashed once. An epoch more costs one block.
    #[must_use]
    pub fn is_proof(&self, dcid: &[u8], token: &[u8], mut epochs: RangeInclusive<u64>) -> bool {
        let Some((body, mac1)) = token.split_last_chunk::<MAC_BYTES>() else { return false };
        if dcid.len() > MAX_CID_BYTES {
            return false;
        }
        let state = self.mac1_state(dcid, body);
        epochs.any(|epoch| state.clone().chain_update(epoch.to_be_bytes()).verify(mac1.into()).is_ok())
    }

    /// The state of mac1 before its epoch is added.
    fn mac1_state(&self, dcid: &[u8], body: &[u8]) -> Blake2sMac<U16> {
        let mut head = [0; 1 + MAX_CID_BYTES];
        let mut mac = self.mac.clone();
        mac.update(head_of(dcid, &mut head));
        mac.update(body);
        mac
    }

    /// Masks the ephemeral key of a knock to `dcid`, or takes the mask off.
    fn mask(&self, dcid: &[u8], ephemeral: &mut [u8; 32]) {
        let mut head = [0; 1 + MAX_CID_BYTES];
        let mask = self.mask.clone().chain_update(head_of(dcid, &mut head)).finalize().into_bytes();
        for (byte, mask) in ephemeral.iter_mut().zip(mask) {
            *byte ^= mask;
        }
    }

    fn prologue(&self, dcid: &[u8]) -> Vec<u8> {
        let mut head = [0; 1 + MAX_CID_BYTES];
        [&b"culvert knock 1"[..], &VERSION_1, head_of(dcid, &mut head), &self.public_key.0].concat()
    }
}

/// QUIC version 1, the only one that knocks travel in.
const VERSION_1: [u8; 4] = [0, 0, 0, 1];

/// DCID length │ DCID, in `head`. What is longer than any connection ID is cut.
fn head_of<'a>(dcid: &[u8], head: &'a mut [u8; 1 + MAX_CID_BYTES]) -> &'a [u8] {
    let dcid = &dcid[..dcid.len().min(MAX_CID_BYTES)];
    head[0] = u8::try_from(dcid.len()).unwrap_or(u8::MAX);
    head[1..1 + dcid.len()].copy_from_slice(dcid);
    &head[..1 + dcid.len()]
}

/// The first half of SHA-256 of a complete ClientHello, its four-byte handshake header included.
#[must_use]
pub fn hello_hash(client_hello: &[u8]) -> [u8; HELLO_HASH_BYTES] {
    let digest = digest::digest(&digest::SHA256, client_hello);
    *digest.as_ref().first_chunk().expect("SHA-256 has 32 bytes")
}

const NOISE_BYTES: usize = KNOCK_BYTES - MAC_BYTES;
const PAYLOAD_BYTES: usize = 24;
const _: () = assert!(NOISE_BYTES == 32 + 48 + PAYLOAD_BYTES + 16);

/// The version of the payload that this code writes and reads.
const VERSION: u8 = 1;

/// Bit 1 of the flags: [`Opened::fallback`] is set.
const FALLBACK: u8 = 2;

/// What a knock says, beside who made it.
#[derive(Clone, Copy, Debug)]
pub struct About<'a> {
    /// The complete ClientHello with which the connection attempt begins.
    pub client_hello: &'a [u8],
    /// The time by the client's clock; cut to 40 bits, which last for 34,000 years.
    pub unix_seconds: u64,
    /// Whether the client falls back, as [`Opened::fallback`] says.
    pub fallback: bool,
}

/// Makes the knock of a connection attempt to `dcid`.
///
/// `ephemeral` must be 32 random bytes, used once: they
/// are an argument so that a simulation repeats itself.
///
/// # Errors
/// [`KnockError::Length`] if `dcid` is longer than 20 bytes, [`KnockError::SmallOrder`] if `own` and `server` do not
/// share a secret.
pub fn seal(
    own: &AgreementKey,
    server: &ServerKey,
    dcid: &[u8],
    about: About<'_>,
    ephemeral: &[u8; 32],
) -> Result<[u8; KNOCK_BYTES], KnockError> {
    let About { client_hello, unix_seconds, fallback } = about;
    if dcid.len() > MAX_CID_BYTES {
        return Err(KnockError::Length);
    }
    let mut payload = [0; PAYLOAD_BYTES];
    payload[0] = VERSION;
    payload[1] = u8::from(own.sign()) | if fallback { FALLBACK } else { 0 };
    payload[3..8].copy_from_slice(&unix_seconds.to_be_bytes()[3..]);
    payload[8..].copy_from_slice(&hello_hash(client_hello));
    let mut knock = [0; KNOCK_BYTES];
    let prologue = server.prologue(dcid);
    let mut noise = noise(own, server, ephemeral)
        .prologue(&prologue)
        .and_then(|builder| builder.local_private_key(own.secret())?.remote_public_key(&server.agreement))
        .and_then(snow::Builder::build_initiator)
        .map_err(noise_error)?;
    noise.write_message(&payload, &mut knock[..NOISE_BYTES]).map_err(noise_error)?;
    if let Some(ephemeral) = knock.first_chunk_mut() {
        server.mask(dcid, ephemeral);
    }
    let mac1 = server.mac1(dcid, &knock[..NOISE_BYTES], epoch(unix_seconds));
    knock[NOISE_BYTES..].copy_from_slice(&mac1);
    Ok(knock)
}

/// The content of a knock that was opened.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Opened {
    /// The client's X25519 public key, [`PublicKey::agreement`] of its identity.
    pub client: [u8; 32],
    /// The sign of that key: what X25519 leaves out. The client says so; TLS proves the whole key.
    pub sign: bool,
    /// When it was made, by the client's clock.
    pub unix_seconds: u64,
    /// The hash of the ClientHello that it belongs to, [`hello_hash`].
    pub hello_hash: [u8; HELLO_HASH_BYTES],
    /// The client can do X25519MLKEM768 and offers X25519 alone, because an attempt with both was not answered.
    pub fallback: bool,
}

impl Opened {
    /// The client's identity, as it says.
    #[must_use]
    pub fn key(&self) -> Option<PublicKey> {
        PublicKey::from_agreement(&self.client, self.sign)
    }
}

/// Opens `token`, the knock of a packet to `dcid`, whose mac1 was verified before; `own` and `server` are the two halves of our key.
///
/// It costs two X25519 operations, so it stands behind a budget.
///
/// # Errors
/// Every variant of [`KnockError`]; the checks stand in its order.
pub fn open(own: &AgreementKey, server: &ServerKey, dcid: &[u8], token: &[u8]) -> Result<Opened, KnockError> {
    if token.len() != KNOCK_BYTES || dcid.len() > MAX_CID_BYTES {
        return Err(KnockError::Length);
    }
    let mut message = [0; NOISE_BYTES];
    message.copy_from_slice(&token[..NOISE_BYTES]);
    if let Some(ephemeral) = message.first_chunk_mut() {
        server.mask(dcid, ephemeral);
    }
    let prologue = server.prologue(dcid);
    let mut noise = noise(own, server, &[0; 32])
        .prologue(&prologue)
        .and_then(|builder| builder.local_private_key(own.secret()))
        .and_then(snow::Builder::build_responder)
        .map_err(noise_error)?;
    let mut payload = [0; PAYLOAD_BYTES];
    noise.read_message(&message, &mut payload).map_err(noise_error)?;
    let client = noise.get_remote_static().and_then(|key| key.try_into().ok()).ok_or(KnockError::Noise)?;
    if payload[0] != VERSION {
        return Err(KnockError::Version(payload[0]));
    }
    let unix_seconds = payload[3..8].iter().fold(0, |seconds, byte| seconds << 8 | u64::from(*byte));
    let mut hello_hash = [0; HELLO_HASH_BYTES];
    hello_hash.copy_from_slice(&payload[8..]);
    let (sign, fallback) = (payload[1] & 1 != 0, payload[1] & FALLBACK != 0);
    Ok(Opened { client, sign, unix_seconds, hello_hash, fallback })
}

fn noise_error(error: snow::Error) -> KnockError {
    if error == snow::Error::Dh { KnockError::SmallOrder } else { KnockError::Noise }
}

fn noise<'a>(own: &AgreementKey, server: &ServerKey, ephemeral: &[u8; 32]) -> snow::Builder<'a> {
    let primitives = Primitives { own_public: *own.public(), ephemeral: Zeroizing::new(*ephemeral) };
    snow::Builder::with_resolver(server.noise.clone(), Box::new(primitives))
}

/// snow's primitives, but for X25519 and for randomness.
struct Primitives {
    own_public: [u8; 32],
    ephemeral: Zeroizing<[u8; 32]>,
}

impl CryptoResolver for Primitives {
    fn resolve_rng(&self) -> Option<Box<dyn Random>> {
        Some(Box::new(Given(Some(self.ephemeral.clone()))))
    }

    fn resolve_dh(&self, choice: &DHChoice) -> Option<Box<dyn Dh>> {
        let key = X25519 { key: AgreementKey::from_halves(Zeroizing::new([0; 32]), self.own_public) };
        matches!(choice, DHChoice::Curve25519).then(|| -> Box<dyn Dh> { Box::new(key) })
    }

    fn resolve_hash(&self, choice: &HashChoice) -> Option<Box<dyn Hash>> {
        DefaultResolver.resolve_hash(choice)
    }

    fn resolve_cipher(&self, choice: &CipherChoice) -> Option<Box<dyn Cipher>> {
        DefaultResolver.resolve_cipher(choice)
    }
}

/// The bytes that the caller gave, once.
struct Given(Option<Zeroizing<[u8; 32]>>);

impl Random for Given {
    fn try_fill_bytes(&mut self, dest: &mut [u8]) -> Result<(), snow::Error> {
        let bytes = self.0.take().filter(|bytes| bytes.len() == dest.len()).ok_or(snow::Error::Rng)?;
        dest.copy_from_slice(bytes.as_ref());
        Ok(())
    }
}

/// X25519 that refuses an all-zero shared secret, which snow's own accepts: keys of small order would make a knock that
/// nobody in particular has made.
struct X25519 {
    key: AgreementKey,
}

impl Dh for X25519 {
    fn name(&self) -> &'static str {
        "25519"
    }

    fn pub_len(&self) -> usize {
        32
    }

    fn priv_len(&self) -> usize {
        32
    }

    /// snow sets the static key only. Its public half is known, and computing it would cost a third of opening a knock.
    fn set(&mut self, privkey: &[u8]) {
        let mut secret = Zeroizing::new([0; 32]);
        if privkey.len() == secret.len() {
            secret.copy_from_slice(privkey);
        }
        self.key = AgreementKey::from_halves(secret, *self.key.public());
    }

    fn generate(&mut self, rng: &mut dyn Random) -> Result<(), snow::Error> {
        let mut secret = Zeroizing::new([0; 32]);
        rng.try_fill_bytes(secret.as_mut())?;
        self.key = AgreementKey::from_secret(secret);
        Ok(())
    }

    fn pubkey(&self) -> &[u8] {
        self.key.public()
    }

    fn privkey(&self) -> &[u8] {
        self.key.secret()
    }

    fn dh(&self, pubkey: &[u8], out: &mut [u8]) -> Result<(), snow::Error> {
        let other = pubkey.first_chunk().ok_or(snow::Error::Input)?;
        let shared = self.key.shared(other).ok_or(snow::Error::Dh)?;
        out.first_chunk_mut::<32>().ok_or(snow::Error::Input)?.copy_from_slice(shared.as_ref());
        Ok(())
    }
}

#[cfg(test)]
#[path = "knock_tests.rs"]
mod tests;
