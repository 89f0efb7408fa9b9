//! Why the peer registry was not changed.

use std::sync::Arc;

use ipnet::IpNet;

/// Why the list was not changed.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum RegistryError {
    /// Another peer has this name already.
    #[error("there is a peer {0:?} already (remedy: another name, or remove that one first)")]
    NameTaken(Arc<str>),
    /// Names of this form are given to peers of open mode.
    #[error("the name {0:?} is kept for peers of open mode (remedy: another name)")]
    NameReserved(Arc<str>),
    #[error("peer {0:?} has this public key already (remedy: remove that one first)")]
    KeyTaken(Arc<str>),
    /// A peer has this prefix of `allowed_ips`, and one of both does not share it.
    #[error(
        "peer {1:?} has the prefix {0} already (remedy: remove that one first, or a longer prefix, or a priority or a weight for \
         each of the two)"
    )]
    PrefixTaken(IpNet, Arc<str>),
    /// The key is our own public key.
    #[error("this is our own public key (remedy: write the peer's, as `culvert pubkey` prints it there)")]
    OwnKey,
    /// No private key belongs to it.
    #[error("this is no Ed25519 public key (remedy: write what `culvert pubkey` prints at the peer)")]
    NoKey,
    /// The limit on peers is reached.
    #[error("{0} peers are known, more may not be (remedy: remove some, or a higher limits.peers)")]
    Full(usize),
    /// The limit on peers of open mode is reached.
    #[error("{0} peers of open mode are there, more may not be (remedy: a higher limits.open_peers)")]
    OpenFull(usize),
    /// The access mode is not open, so only known peers may connect.
    #[error("access.mode is not \"open\"")]
    NotOpen,
    /// No peer in the peer registry has this name.
    #[error("there is no peer {0:?} (remedy: see `culvert peer list`)")]
    Unknown(Arc<str>),
}
