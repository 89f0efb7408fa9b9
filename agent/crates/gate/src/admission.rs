//! The keys that a gate admits, and the handshakes that it let through.

use std::time::Instant;

use base::ids::PeerId;
use quinn_proto::ConnectionId;

use crate::OwnKey;

/// Whom the holder of a key is admitted as.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Admits {
    /// The holder is a known peer.
    Peer(PeerId),
    /// The holder is a known peer that broke the protocol a moment ago, and has to wait.
    Paused(PeerId),
    /// The holder is unknown and admitted, because the agent is in open mode.
    Anyone,
    /// The holder is unknown and not admitted.
    Nobody,
}

/// The keys that a gate admits.
pub trait Allowlist: Send + Sync {
    /// Says whom the holder of this X25519 key is admitted as at `now`. Takes no lock and allocates nothing.
    fn admits(&self, agreement: &[u8; 32], now: Instant) -> Admits;
}

/// A handshake that the gate let through.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Admission {
    /// The destination that its client chose for its first Initial; the knock is bound to it.
    pub dcid: ConnectionId,
    /// The last bytes of the token: its name in the single-use table.
    pub tag: [u8; 16],
    /// The X25519 key of the knock. The key in TLS must be the Ed25519 key that it follows from.
    pub agreement: [u8; 32],
    /// The key of ours that the client knocked to, and expects in TLS.
    pub own: OwnKey,
    /// Whether the allowlist names the client's key; if not, the agent is in open mode.
    pub known: bool,
}

/// The room that there is for further handshakes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Room {
    /// A handshake may begin at once.
    Free,
    /// Half of the handshakes are under way: a client must prove its address before it begins one.
    Busy,
    /// The limit on handshakes under way is reached: only a known peer that has none may begin one, and must prove its address.
    Full,
}
