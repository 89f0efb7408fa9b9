//! Retry packets (RFC 9000 §8.1.2), which the gate makes when knocks cost more than it may spend: a client that answers one can
//! receive at the address that it claims.
//!
//! quinn-proto's own Retry would replace the knock by its token. Here the knock travels inside:
//!
//! ```text
//!  token   nonce 12 │ sealed 192 + 16 │ mac1 16          AES-256-GCM under a key of ours
//!  sealed  issued, unix seconds 8 │ new DCID 8 │ family 1 │ address 16 │ port 2 │ length 1, original DCID 20 │ knock 136
//! ```
//!
//! Its last 16 bytes are its mac1 over the new connection ID and the epoch of `issued`, as those of a knock are over the original
//! one and its own epoch, so that the gate's first checks are the same for both. All tokens have one length, whatever the family.

use std::{
    fmt,
    net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr},
    sync::Arc,
};

use quinn_proto::{
    ConnectionId,
    crypto::{self, AeadKey, CryptoError, HandshakeTokenKey},
};
use ring::aead::{AES_256_GCM, Aad, LessSafeKey, Nonce, UnboundKey};

use crate::{
    classify::MAX_CID_BYTES,
    knock::{KNOCK_BYTES, MAC_BYTES, ServerKey, epoch},
};

/// The length of every token of ours.
pub const RETRY_TOKEN_BYTES: usize = NONCE_BYTES + PLAIN_BYTES + TAG_BYTES + MAC_BYTES;

/// The longest Retry packet: a client's connection ID may have 20 bytes.
pub const MAX_RETRY_BYTES: usize =
    1 + 4 + 1 + MAX_CID_BYTES + 1 + NEW_DCID_BYTES + RETRY_TOKEN_BYTES + TAG_BYTES;

/// How old a token may be, seconds. An unanswered client repeats it 1, 3, 7 and 15 s after the first time (RFC 9002 §6.2
/// with an initial PTO of 1 s); one second more is for the way and for whole seconds. It is our clock at both ends.
pub const RETRY_SECONDS: u64 = 16;

const NEW_DCID_BYTES: usize = 8;
const NONCE_BYTES: usize = 12;
const TAG_BYTES: usize = 16;
const PLAIN_BYTES: usize = 8 + NEW_DCID_BYTES + ADDRESS_BYTES + 1 + MAX_CID_BYTES + KNOCK_BYTES;
const ADDRESS_BYTES: usize = 1 + 16 + 2;
const _: () = assert!(RETRY_TOKEN_BYTES == 236, "the length that docs/wire-format.md names");

/// Why a token is no proof of its sender's address.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum RetryError {
    /// The token has another length than one of ours.
    #[error("the token is not one of a Retry")]
    Length,
    /// Not sealed by us, or damaged.
    #[error("the token of a Retry does not open")]
    Sealed,
    /// In a packet to another connection ID than the one that it was made for.
    #[error("the token of a Retry was made for another connection ID")]
    Destination,
    /// The packet comes from another address or port than the one it was made for.
    #[error("the token of a Retry was made for another address")]
    Address,
    /// Older than [`RETRY_SECONDS`], or from the future after our clock was set back by more than that.
    #[error("the token of a Retry is too old")]
    Age,
}

/// The content of a Retry token of ours.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Carried {
    /// The knock of the client's first packet; it is bound to the original destination.
    pub knock: [u8; KNOCK_BYTES],
    /// The destination of the client's first packet.
    pub original_dcid: ConnectionId,
}

impl Carried {
    /// A `knock` made for `original_dcid`, at most 20 bytes.
    #[must_use]
    pub fn new(original_dcid: &[u8], knock: &[u8; KNOCK_BYTES]) -> Self {
        Self { knock: *knock, original_dcid: cut(original_dcid) }
    }
}

/// The connection ID, without what is beyond the longest.
fn cut(cid: &[u8]) -> ConnectionId {
    ConnectionId::new(&cid[..cid.len().min(MAX_CID_BYTES)])
}

/// Writes `parts` one after the other at the front of `buffer`: their length.
fn put(parts: &[&[u8]], buffer: &mut [u8]) -> usize {
    let mut end = 0;
    for part in parts {
        buffer[end..end + part.len()].copy_from_slice(part);
        end += part.len();
    }
    end
}

/// The key of our tokens. As a `HandshakeTokenKey` it makes quinn-proto accept these tokens and no others; a bare knock
/// stays "no token" to it.
///
/// quinn-proto answers a token that opens, but is of another address, with a close: [`RetryKey::open`] must have accepted
/// it before. It is not asked for the age again. It must never make a token itself with this key, by `Endpoint::retry`
/// or NEW_TOKEN: sealing is refused, and it panics then.
#[derive(Clone)]
pub struct RetryKey(Arc<LessSafeKey>);

impl fmt::Debug for RetryKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("RetryKey")
    }
}

impl RetryKey {
    /// The key made of `secret`, for this purpose only.
    #[must_use]
    pub fn new(secret: &[u8; 32]) -> Self {
        let key = UnboundKey::new(&AES_256_GCM, secret).expect("AES-256 has keys of 32 bytes");
        Self(Arc::new(LessSafeKey::new(key)))
    }

    /// Whether quinn-proto would accept a token of `client`: it compares scopes and flow labels of IPv6 addresses, which
    /// its tokens do not carry. Clients on link-local addresses get no Retry.
    #[must_use]
    pub fn serves(client: &SocketAddr) -> bool {
        *client == SocketAddr::new(client.ip(), client.port())
    }

    /// The token that sends `client` to `new_dcid`, with what it is to bring back.
    ///
    /// `server` is our own public key, `nonce` 12 random bytes.
    #[must_use]
    pub fn token(
        &self,
        server: &ServerKey,
        client: SocketAddr,
        carried: Carried,
        unix_seconds: u64,
        new_dcid: &[u8; 8],
        nonce: [u8; 12],
    ) -> [u8; RETRY_TOKEN_BYTES] {
        let plain = Plain { issued: unix_seconds, new_dcid: *new_dcid, client, carried };
        let mut sealed = plain.encode();
        let tag = self
            .0
            .seal_in_place_separate_tag(Nonce::assume_unique_for_key(nonce), Aad::empty(), &mut sealed)
            .expect("192 bytes are below AES-GCM's limit");
        let mut token = [0; RETRY_TOKEN_BYTES];
        let (body, mac1) = token.split_at_mut(RETRY_TOKEN_BYTES - MAC_BYTES);
        body[..NONCE_BYTES].copy_from_slice(&nonce);
        body[NONCE_BYTES..NONCE_BYTES + PLAIN_BYTES].copy_from_slice(&sealed);
        body[NONCE_BYTES + PLAIN_BYTES..].copy_from_slice(tag.as_ref());
        mac1.copy_from_slice(&server.mac1(new_dcid, body, epoch(unix_seconds)));
        token
    }

    /// Opens `token` of a packet from `client` to `dcid`; its mac1 was verified before.
    ///
    /// # Errors
    /// Every variant of [`RetryError`]; the checks stand in its order.
    pub fn open(
        &self,
        client: SocketAddr,
        dcid: &[u8],
        token: &[u8],
        unix_seconds: u64,
    ) -> Result<Carried, RetryError> {
        let token: &[u8; RETRY_TOKEN_BYTES] = token.try_into().map_err(|_| RetryError::Length)?;
        let mut body = *token;
        let plain = self.open_body(&mut body[..RETRY_TOKEN_BYTES - MAC_BYTES]).ok_or(RetryError::Sealed)?;
        if plain.new_dcid != dcid {
            return Err(RetryError::Destination);
        }
        if plain.client != SocketAddr::new(client.ip(), client.port()) {
            return Err(RetryError::Address);
        }
        if unix_seconds.abs_diff(plain.issued) > RETRY_SECONDS {
            return Err(RetryError::Age);
        }
        Ok(plain.carried)
    }

    /// Opens all of a token but its mac1, in place.
    fn open_body(&self, body: &mut [u8]) -> Option<Plain> {
        let (nonce, sealed) = body.split_first_chunk_mut::<NONCE_BYTES>()?;
        let nonce = Nonce::assume_unique_for_key(*nonce);
        let plain = self.0.open_in_place(nonce, Aad::empty(), sealed).ok()?;
        Plain::decode(plain.first_chunk()?)
    }
}

/// Writes the Retry packet that answers an Initial from `client_scid` to `original_dcid` (at most 20 bytes each): the
/// client is to use `token` and `new_dcid` from now on.
pub fn packet<'a>(
    crypto: &dyn crypto::ServerConfig,
    client_scid: &[u8],
    original_dcid: &[u8],
    new_dcid: &[u8; 8],
    token: &[u8; RETRY_TOKEN_BYTES],
    buffer: &'a mut [u8; MAX_RETRY_BYTES],
) -> &'a [u8] {
    let (client_scid, original_dcid) = (cut(client_scid), cut(original_dcid));
    // Long form, fixed bit, type 3; the lower four bits are arbitrary (RFC 9000 §17.2.5).
    let flags = 0xf0 | token[0] & 0x0f;
    let [client_bytes, new_bytes] = [client_scid.len() as u8, new_dcid.len() as u8];
    let parts = [&[flags, 0, 0, 0, 1, client_bytes][..], &client_scid, &[new_bytes], new_dcid, token];
    let end = put(&parts, buffer);
    let tag = crypto.retry_tag(1, &original_dcid, &buffer[..end]);
    buffer[end..end + tag.len()].copy_from_slice(&tag);
    &buffer[..end + tag.len()]
}

/// The sealed part of a token.
#[derive(Debug)]
struct Plain {
    issued: u64,
    new_dcid: [u8; NEW_DCID_BYTES],
    client: SocketAddr,
    carried: Carried,
}

const IPV4: u8 = 4;
const IPV6: u8 = 6;

impl Plain {
    fn encode(&self) -> [u8; PLAIN_BYTES] {
        let mut address = [0; 16];
        let family = match self.client.ip() {
            IpAddr::V4(ip) => {
                address[..4].copy_from_slice(&ip.octets());
                IPV4
            }
            IpAddr::V6(ip) => {
                address = ip.octets();
                IPV6
            }
        };
        let Carried { knock, original_dcid } = &self.carried;
        let mut padded = [0; MAX_CID_BYTES];
        padded[..original_dcid.len()].copy_from_slice(original_dcid);
        let parts = [
            &self.issued.to_be_bytes()[..],
            &self.new_dcid,
            &[family],
            &address,
            &self.client.port().to_be_bytes(),
            &[original_dcid.len() as u8],
            &padded,
            knock,
        ];
        let mut plain = [0; PLAIN_BYTES];
        put(&parts, &mut plain);
        plain
    }

    fn decode(plain: &[u8; PLAIN_BYTES]) -> Option<Self> {
        let (issued, rest) = plain.split_first_chunk()?;
        let (new_dcid, rest) = rest.split_first_chunk()?;
        let (family, rest) = rest.split_first()?;
        let (address, rest) = rest.split_first_chunk::<16>()?;
        let (port, rest) = rest.split_first_chunk()?;
        let (original_dcid_bytes, rest) = rest.split_first()?;
        let (original_dcid, knock) = rest.split_first_chunk::<MAX_CID_BYTES>()?;
        let ip = match *family {
            IPV4 => Ipv4Addr::from(*address.first_chunk::<4>()?).into(),
            IPV6 => Ipv6Addr::from(*address).into(),
            _ => return None,
        };
        let original_dcid = original_dcid.get(..usize::from(*original_dcid_bytes))?;
        let carried =
            Carried { knock: knock.try_into().ok()?, original_dcid: ConnectionId::new(original_dcid) };
        Some(Self {
            issued: u64::from_be_bytes(*issued),
            new_dcid: *new_dcid,
            client: SocketAddr::new(ip, u16::from_be_bytes(*port)),
            carried,
        })
    }

    /// Writes what quinn-proto expects in the token of a Retry at the front of `buffer`: its length.
    ///
    /// `type 0 │ family 0 or 1 │ address 4 or 16 │ port 2 │ length 1, original DCID │ issued 8`
    fn encode_for_quinn(&self, buffer: &mut [u8]) -> usize {
        // Past every clock: quinn-proto reads one of its own, and the gate has judged the age by ours.
        const ISSUED: u64 = 1 << 40;
        let (family, address) = match self.client.ip() {
            IpAddr::V4(ip) => (0, &ip.octets()[..]),
            IpAddr::V6(ip) => (1, &ip.octets()[..]),
        };
        let original_dcid = &self.carried.original_dcid;
        let parts = [
            &[0, family][..],
            address,
            &self.client.port().to_be_bytes(),
            &[original_dcid.len() as u8],
            original_dcid,
            &ISSUED.to_be_bytes(),
        ];
        put(&parts, buffer)
    }
}

impl HandshakeTokenKey for RetryKey {
    /// quinn-proto takes the last 16 bytes for a nonce; they are mac1, and ours is in front.
    fn aead_from_hkdf(&self, _random_bytes: &[u8]) -> Box<dyn AeadKey> {
        Box::new(self.clone())
    }
}

impl AeadKey for RetryKey {
    fn seal(&self, _data: &mut Vec<u8>, _additional_data: &[u8]) -> Result<(), CryptoError> {
        Err(CryptoError)
    }

    fn open<'a>(&self, data: &'a mut [u8], _additional_data: &[u8]) -> Result<&'a mut [u8], CryptoError> {
        if data.len() != RETRY_TOKEN_BYTES - MAC_BYTES {
            return Err(CryptoError);
        }
        let plain = self.open_body(data).ok_or(CryptoError)?;
        let length = plain.encode_for_quinn(data);
        Ok(&mut data[..length])
    }
}

#[cfg(test)]
#[path = "retry_tests.rs"]
mod tests;
