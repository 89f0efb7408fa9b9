//! The keys that the gate needs. All of them follow from the identity key, so they are the same after a restart.
//!
//! During a rotation of the identity key there are two: clients knock to the one that they know, and meet that one in TLS. What only
//! we read, connection IDs and Retry tokens, follows from the current key.

use std::{ops::RangeInclusive, sync::Arc};

use wire::cid::IssuedIds;
use zeroize::Zeroizing;

use crate::{
    identity::{AgreementKey, Identity},
    knock::{self, KNOCK_BYTES, KnockError, Opened, ServerKey},
    retry::RetryKey,
};

/// Which of our identity keys a connection is about.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum OwnKey {
    /// The identity's present key, that of `identity.key_file`.
    #[default]
    Current,
    /// The key before it, that of `identity.previous_key_file`, during a rotation.
    Previous,
}

/// What knocks need of one of our keys.
struct Knocked {
    /// The X25519 key of the identity.
    agreement: Arc<AgreementKey>,
    /// The values that clients derive from its public key.
    server: ServerKey,
}

impl Knocked {
    fn new(identity: &Identity) -> Self {
        let server =
            ServerKey::new(&identity.public_key()).expect("a public key made from a seed is a point");
        Self { agreement: Arc::new(identity.agreement_key()), server }
    }
}

/// The keys of an agent beside its certificate.
pub struct Own {
    current: Knocked,
    /// The key of our Retry tokens.
    pub retry: Arc<RetryKey>,
    /// The check for connection IDs that this identity issued.
    pub issued: IssuedIds,
    /// The key before it, while a rotation is under way.
    previous: Option<Knocked>,
}

impl Own {
    /// The keys that follow from `identity`.
    #[must_use]
    pub fn new(identity: &Identity) -> Arc<Self> {
        let ids = identity.derive("culvert connection ids");
        let mut key = Zeroizing::new([0; 16]);
        key.copy_from_slice(&ids[..16]);
        Arc::new(Self {
            current: Knocked::new(identity),
            retry: Arc::new(RetryKey::new(&identity.derive("culvert retry tokens"))),
            issued: IssuedIds::new(&key),
            previous: identity.previous().map(Knocked::new),
        })
    }

    /// Whether there is a previous key.
    #[must_use]
    pub fn has_previous(&self) -> bool {
        self.previous.is_some()
    }

    /// The X25519 key of one of our keys; of the current one where there is no other.
    #[must_use]
    pub fn agreement_of(&self, key: OwnKey) -> &Arc<AgreementKey> {
        &self.of(key).agreement
    }

    /// The values that clients derive from one of our public keys, likewise.
    #[must_use]
    pub fn server_of(&self, key: OwnKey) -> &ServerKey {
        &self.of(key).server
    }

    fn of(&self, key: OwnKey) -> &Knocked {
        match key {
            OwnKey::Current => &self.current,
            OwnKey::Previous => self.previous.as_ref().unwrap_or(&self.current),
        }
    }

    /// The key of ours that the sender of an Initial packet knows: mac1 holds for it in one of these epochs.
    #[must_use]
    pub fn proven(&self, dcid: &[u8], token: &[u8], epochs: RangeInclusive<u64>) -> Option<OwnKey> {
        if self.current.server.is_proof(dcid, token, epochs.clone()) {
            return Some(OwnKey::Current);
        }
        let previous = self.previous.as_ref()?;
        previous.server.is_proof(dcid, token, epochs).then_some(OwnKey::Previous)
    }

    /// Opens a knock that was sent to this key of ours, whose mac1 was verified before.
    ///
    /// # Errors
    /// As [`knock::open`].
    pub fn open(&self, key: OwnKey, dcid: &[u8], knock: &[u8; KNOCK_BYTES]) -> Result<Opened, KnockError> {
        knock::open(self.agreement_of(key), self.server_of(key), dcid, knock)
    }
}

impl std::fmt::Debug for Own {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Own")
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use data_encoding::HEXLOWER;

    use super::*;
    use crate::{knock::epochs, retry::Carried};

    /// Made outside, by Python's `cryptography` and `hashlib`: for the identity with the seed of 32 bytes `01`, the client
    /// 192.0.2.1:1111, unix seconds 1,700,000,000, a nonce of bytes `01` and a knock of bytes `09`.
    const TOKEN: &str = "\
        0101010101010101010101017c24d4770773795cb8f5d0321b515e48f5146a747cb56c40808755c8c366aef77660a3e9\
        4d9904c135e35dd2e7642d9450f362516ce972aa7e03413ef4f25e8c0e6f20fe88e56515ce4e03e0f2fc66afc8a19a4a\
        1ceea5069d918a6b2ac0643ad2678f85c4917e4ff38e521e5391189382df9858063bfb453c75951e58f7b0232560fc1c\
        e3801f6fd91f852c6afba73083d0d412e9fddacc1f863b7153ff4946ad38d511f0c778f849d0f122d2bf39ff0826ceed\
        f3a29df981edda58ff2f8dad7ad1cb0f363b4385ca5502136090b1da156de0ba7fb1c3066cd34ea830f015a9";

    fn own() -> Arc<Own> {
        Own::new(&Identity::from_seed(Zeroizing::new([1; 32])).unwrap())
    }

    #[test]
    fn a_connection_id_of_another_version_is_ours() {
        // The last three bytes: AES-128 of the others and zeros, under the secret of the label "culvert connection ids".
        assert!(own().issued.is_ours(&[1, 2, 3, 4, 5, 0x0b, 0xf2, 0x4d]));
    }

    #[test]
    fn a_retry_token_of_another_version_is_ours() {
        let (own, token) = (own(), HEXLOWER.decode(TOKEN.as_bytes()).unwrap());
        let (client, seconds) = ("192.0.2.1:1111".parse().unwrap(), 1_700_000_000);
        let (dcid, new_dcid) = ([1, 2, 3, 4, 5, 6, 7, 8], [0xaa, 7, 6, 5, 4, 3, 2, 1]);
        let carried = Carried::new(&dcid, &[9; KNOCK_BYTES]);
        assert!(own.current.server.is_proof(&new_dcid, &token, epochs(seconds, Duration::from_secs(20))));
        assert_eq!(own.retry.open(client, &new_dcid, &token, seconds), Ok(carried));
        let again = own.retry.token(&own.current.server, client, carried, seconds, &new_dcid, [1; 12]);
        assert_eq!(again[..], token);
    }
}
