//! Who is at the far end of a connection, and which of our keys it is shown.

use base::ids::PeerId;
use gate::{OwnKey, admission::Admission};

/// Who is at the far end of a connection, and as whom we meet it.
pub struct Identity {
    peer: Option<PeerId>,
    key: Key,
    admission: Option<Admission>,
    own: OwnKey,
    stream_number: Option<u8>,
}

/// The key that the far end proved.
enum Key {
    Unknown,
    /// Our hello is held back, because the existing session may be heard again.
    HelloWaits([u8; 32]),
    Proved([u8; 32]),
}

impl Identity {
    /// The identity of `peer`, which this end dials with the key `own`.
    pub(in crate::control) fn of_peer(peer: PeerId, own: OwnKey) -> Self {
        Self { peer: Some(peer), key: Key::Unknown, admission: None, own, stream_number: None }
    }

    /// The identity of a client, of which the knock is all that is known.
    pub(in crate::control) fn of_client(admission: Option<Admission>) -> Self {
        let own = admission.map(|admission| admission.own).unwrap_or_default();
        Self { peer: None, key: Key::Unknown, admission, own, stream_number: None }
    }

    /// The peer that was dialled, or that proved its key.
    pub(crate) fn peer(&self) -> Option<PeerId> {
        self.peer
    }

    /// The key that the far end proved, unless our hello is held back.
    #[must_use]
    pub fn key(&self) -> Option<[u8; 32]> {
        match self.key {
            Key::Proved(key) => Some(key),
            Key::Unknown | Key::HelloWaits(_) => None,
        }
    }

    /// The key that the far end proved, while our hello is held back.
    pub(crate) fn key_of_held_hello(&self) -> Option<[u8; 32]> {
        match self.key {
            Key::HelloWaits(key) => Some(key),
            Key::Unknown | Key::Proved(_) => None,
        }
    }

    /// Notes that the far end proved `key`, and that our hello is held back; false if it was held back before.
    pub(crate) fn hold_hello(&mut self, key: [u8; 32]) -> bool {
        let is_first = matches!(self.key, Key::Unknown);
        if is_first {
            self.key = Key::HelloWaits(key);
        }
        is_first
    }

    /// Notes that the far end is `peer`, because it proved `key`.
    pub(crate) fn prove(&mut self, peer: PeerId, key: [u8; 32]) {
        (self.peer, self.key) = (Some(peer), Key::Proved(key));
    }

    /// The knock that let the far end in.
    pub(crate) fn admission(&self) -> Option<&Admission> {
        self.admission.as_ref()
    }

    /// The key of ours that we prove.
    pub(crate) fn own(&self) -> OwnKey {
        self.own
    }

    /// The number of a stream connection; `None` for a control connection.
    pub(crate) fn stream_number(&self) -> Option<u8> {
        self.stream_number
    }

    /// Makes it the stream connection with this number.
    pub(crate) fn join(&mut self, number: u8) {
        self.stream_number = Some(number);
    }
}
