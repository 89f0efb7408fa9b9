//! What an identity brings to the gate: all of it follows from the identity key, so it is the same after a restart.

use std::sync::Arc;

use wire::cid::IssuedIds;
use zeroize::Zeroizing;

use crate::{
    identity::{AgreementKey, Identity},
    knock::{self, KNOCK_BYTES, KnockError, Opened, ServerKey},
    retry::RetryKey,
};

/// The keys of an agent beside its certificate.
pub struct Own {
    agreement: Arc<AgreementKey>,
    server: ServerKey,
    retry: Arc<RetryKey>,
    issued: IssuedIds,
}

impl Own {
    /// The keys that follow from `identity`.
    #[must_use]
    pub fn new(identity: &Identity) -> Arc<Self> {
        let server =
            ServerKey::new(&identity.public_key()).expect("a public key made from a seed is a point");
        let ids = identity.derive("culvert connection ids");
        let mut key = Zeroizing::new([0; 16]);
        key.copy_from_slice(&ids[..16]);
        Arc::new(Self {
            agreement: Arc::new(identity.agreement_key()),
            server,
            retry: Arc::new(RetryKey::new(&identity.derive("culvert retry tokens"))),
            issued: IssuedIds::new(&key),
        })
    }

    /// Our X25519 key.
    #[must_use]
    pub fn agreement(&self) -> &Arc<AgreementKey> {
        &self.agreement
    }

    /// What others derive from our public key.
    #[must_use]
    pub fn server(&self) -> &ServerKey {
        &self.server
    }

    /// The key of our Retry tokens.
    #[must_use]
    pub fn retry(&self) -> &Arc<RetryKey> {
        &self.retry
    }

    /// Which connection IDs are ours.
    #[must_use]
    pub fn issued(&self) -> &IssuedIds {
        &self.issued
    }

    /// Opens a knock that was sent to us, whose mac1 was verified before.
    ///
    /// # Errors
    /// As [`knock::open`].
    pub fn open(&self, dcid: &[u8], knock: &[u8; KNOCK_BYTES]) -> Result<Opened, KnockError> {
        knock::open(&self.agreement, &self.server, dcid, knock)
    }
}

impl std::fmt::Debug for Own {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Own")
    }
}
