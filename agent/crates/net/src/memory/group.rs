//! Workers of one host: which of their sockets on one address hears a datagram.

use std::hash::{Hash, Hasher};

#[expect(clippy::disallowed_types, reason = "stands for the kernel's hash, the same in each run")]
use rustc_hash::FxHasher;

use crate::{UdpRole, memory::Datagram, ports::SocketKind, steering};

impl SocketKind {
    /// Whether the workers of a host bind it side by side, one socket each.
    pub(super) fn is_shared(self) -> bool {
        match self {
            Self::Udp(role) => role.listens(),
            Self::Tcp => true,
        }
    }
}

/// The worker, of `workers`, whose socket of this role hears `datagram`, as the kernel chooses within a group.
#[expect(clippy::disallowed_types, reason = "stands for the kernel's hash, the same in each run")]
pub(super) fn worker_for(role: UdpRole, steered: bool, datagram: &Datagram<'_>, workers: u8) -> u8 {
    match role {
        UdpRole::QuicListen if steered => steering::owner(datagram.payload, workers),
        UdpRole::QuicListen | UdpRole::Ingress | UdpRole::QuicDial | UdpRole::Upstream | UdpRole::Decoy => {
            let mut hasher = FxHasher::default();
            (datagram.from, datagram.to).hash(&mut hasher);
            // Less than `workers`.
            (hasher.finish() % u64::from(workers.max(1))) as u8
        }
    }
}
