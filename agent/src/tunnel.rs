//! The TUN device as the control plane sees it: what the workers find out about the paths becomes MTUs and kernel routes.

use std::{
    collections::BTreeMap,
    sync::{Mutex, PoisonError},
};

use crate::peer::PeerId;

/// Where workers write what fits into a packet to each peer; the tunnel's thread reads it.
#[derive(Debug, Default)]
pub struct Board {
    state: Mutex<State>,
}

#[derive(Debug, Default)]
struct State {
    /// The largest inner packet of each connected peer, in bytes.
    mtus: BTreeMap<PeerId, u16>,
    changed: bool,
}

impl Board {
    /// The largest inner packet to `peer` is `mtu` bytes from now on; `None` once it is not connected.
    pub fn set_mtu(&self, peer: PeerId, mtu: Option<u16>) {
        let mut state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        let before = match mtu {
            Some(mtu) => state.mtus.insert(peer, mtu),
            None => state.mtus.remove(&peer),
        };
        state.changed |= before != mtu;
    }
}
