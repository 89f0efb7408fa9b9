//! Which peer has an inner address: the longest prefix of all peers' `allowed_ips` decides.

use std::net::IpAddr;

use ipnet::IpNet;
use prefix_trie::joint::JointPrefixMap;

use crate::peer::PeerId;

/// The inner addresses of all peers.
#[derive(Debug, Default)]
pub struct Routes {
    prefixes: JointPrefixMap<IpNet, PeerId>,
}

impl Routes {
    /// Gives `prefix` to `peer`; returns who had it before.
    pub fn insert(&mut self, prefix: IpNet, peer: PeerId) -> Option<PeerId> {
        self.prefixes.insert(prefix.trunc(), peer)
    }

    /// Takes all prefixes of `peer` away.
    pub fn remove(&mut self, peer: PeerId) {
        self.prefixes.retain(|_, owner| *owner != peer);
    }

    /// The peer whose prefix is the longest that holds `address`.
    #[inline]
    #[must_use]
    pub fn lookup(&self, address: IpAddr) -> Option<PeerId> {
        self.prefixes.get_lpm(&IpNet::from(address)).map(|(_, peer)| *peer)
    }
}
