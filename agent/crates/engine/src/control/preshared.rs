//! What the two ends of a control connection have shown each other of their preshared keys.

use gate::preshared::{Disagreement, PresharedKey};
use wire::messages::KeyProof;

/// The preshared keys of a control connection.
#[derive(Debug, Default)]
pub struct Preshared {
    agreed: Option<Agreed>,
    shown: Vec<KeyProof>,
}

impl Preshared {
    /// The key that both ends use; `None` if neither end has any.
    pub(crate) fn agreed(&self) -> Option<&Agreed> {
        self.agreed.as_ref()
    }

    /// Sets the key that both ends use; returns whether it is another one than before.
    pub(crate) fn agree(&mut self, agreed: Option<Agreed>) -> bool {
        let before = std::mem::replace(&mut self.agreed, agreed);
        before.map(|before| before.key) != self.agreed.as_ref().map(|agreed| agreed.key.clone())
    }

    /// The proofs of our keys that the far end was shown last.
    pub(crate) fn shown(&self) -> &[KeyProof] {
        &self.shown
    }

    /// Notes that the far end is shown these proofs of our keys.
    pub(crate) fn show(&mut self, proofs: Vec<KeyProof>) {
        self.shown = proofs;
    }
}

/// The preshared key that both ends use.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Agreed {
    pub key: PresharedKey,
    /// The dialler's proof of it, by which the opening of a lane names it.
    pub named: KeyProof,
    /// Its place among our keys: 0 is the preferred one.
    pub place: usize,
    /// True if the key exchange of the connection withstands a quantum computer by itself: payloads may then travel without a lane.
    pub post_quantum: bool,
}

base::labelled! {
    /// The reason why a connection does not become a session, or ends, because of a preshared key.
    #[derive(Clone, Copy, Debug, PartialEq, Eq)]
    pub enum KeyRefusal {
        /// We have a key, and the peer has none for us.
        Missing => "missing",
        /// We have a key, and the peer's software knows none.
        Unsupported => "unsupported",
        /// The peer has a key for us, and we have none.
        Unexpected => "unexpected",
        /// Both ends have keys, and none in common.
        Different => "different",
        /// Both ends have the key, and there are to be no lanes that it would protect.
        NoLanes => "no_lanes",
    }
}

impl KeyRefusal {
    /// The refusal of a peer whose software knows preshared keys or not.
    #[must_use]
    pub fn new(disagreement: Disagreement, knows_keys: bool) -> Self {
        match disagreement {
            Disagreement::Missing if !knows_keys => Self::Unsupported,
            Disagreement::Missing => Self::Missing,
            Disagreement::Unexpected => Self::Unexpected,
            Disagreement::Different => Self::Different,
        }
    }

    /// The reason in words, for the log and `culvert status`.
    #[must_use]
    pub fn words(self) -> &'static str {
        match self {
            Self::Missing => "the peer has no preshared key for us, and we have one for it",
            Self::Unsupported => "the peer's software knows no preshared keys, and we have one for it",
            Self::Unexpected => "the peer has a preshared key for us, and we have none for it",
            Self::Different => "the peer has another preshared key than we have",
            Self::NoLanes => {
                "the peer wants no lanes (standard mode), where X25519 alone would protect what a preshared key is to protect"
            }
        }
    }

    /// What an operator can do.
    #[must_use]
    pub fn remedy(self) -> &'static str {
        match self {
            Self::Missing => "copy our file there and name it in its `preshared_key_file`, or remove ours",
            Self::Unsupported => "a newer version there, or remove our `preshared_key_file`",
            Self::Unexpected => {
                "copy its file here and name it in `preshared_key_file`, or have it removed there"
            }
            Self::Different => {
                "copy one file to both ends; for a rotation name the new and the old one at both, and then reload"
            }
            Self::NoLanes => {
                "have it open lanes, or connect by the hybrid key exchange (`transport.key_exchange`), or remove the preshared key at both ends"
            }
        }
    }
}

/// The reason for the end of a connection that the peer closed because of a preshared key; only its log has the exact one.
pub const REFUSED_BY_PEER: &str = "the peer closed the connection: no preshared key in common";

/// What an operator can do about [`REFUSED_BY_PEER`]; whether we have a key decides.
#[must_use]
pub fn refused_by_peer(have_key: bool) -> &'static [&'static str] {
    if have_key {
        &[
            "`preshared_key_file` is set here only, or holds another key than there: its log says which",
            "it runs a version that knows no preshared keys",
        ]
    } else {
        &["it has a preshared key for us, and this [[peer]] has no `preshared_key_file`: copy its file here"]
    }
}
