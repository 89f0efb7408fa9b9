//! What the UDP sockets of a worker did, by role.

use net::{UdpRole, UdpSocket, stats::Booked};

use crate::forward::Local;

/// What the sockets of each role did, those that are closed included.
#[derive(Clone, Copy, Debug, Default)]
pub struct SocketStats(pub [Booked; 5]);

impl SocketStats {
    /// Each role and its label, by place.
    pub const ROLES: [(UdpRole, &'static str); 5] = [
        (UdpRole::QuicListen, "quic_listen"),
        (UdpRole::QuicDial, "quic_dial"),
        (UdpRole::Ingress, "ingress"),
        (UdpRole::Upstream, "upstream"),
        (UdpRole::Decoy, "decoy"),
    ];

    /// The labels of the roles, in the order of [`SocketStats::ROLES`].
    pub const LABELS: [&'static str; 5] = {
        let [(_, a), (_, b), (_, c), (_, d), (_, e)] = Self::ROLES;
        [a, b, c, d, e]
    };

    /// Buffers that the kernel dropped at all of them.
    #[must_use]
    pub fn kernel_drops(&self) -> u64 {
        self.0.iter().map(|booked| booked.kernel_drops).sum()
    }

    /// Before all sockets are looked at: what waited when they were last looked at no longer counts.
    pub fn forget_kernel_queues(&mut self) {
        self.0.iter_mut().for_each(|booked| booked.kernel_queue = 0);
    }

    /// Books what `socket` did since it was last booked; with `drops`, also asks the kernel what it dropped, and adds what
    /// waits there.
    pub fn look_at(&mut self, role: UdpRole, socket: &dyn UdpSocket, booked: &mut Booked, drops: bool) {
        self.0[role_place(role)].kernel_queue += self.book(role, socket, booked, drops);
    }

    /// The same of a socket that is about to close: what waits there, in bytes, is answered and not added, since nobody will
    /// read it.
    pub fn book(&mut self, role: UdpRole, socket: &dyn UdpSocket, booked: &mut Booked, drops: bool) -> u64 {
        let place = role_place(role);
        let stats = socket.stats();
        self.0[place].stats.add_since(&stats, &booked.stats);
        booked.stats = stats;
        if !drops {
            return 0;
        }
        let queue = socket.kernel_queue();
        self.0[place].kernel_drops += queue.drops.saturating_sub(booked.kernel_drops);
        booked.kernel_drops = queue.drops;
        queue.bytes
    }
}

/// The place of a role in [`SocketStats::ROLES`].
pub fn role_place(role: UdpRole) -> usize {
    match role {
        UdpRole::QuicListen => 0,
        UdpRole::QuicDial => 1,
        UdpRole::Ingress => 2,
        UdpRole::Upstream => 3,
        UdpRole::Decoy => 4,
    }
}

/// The role of a local socket.
pub fn role(local: &Local) -> UdpRole {
    match local {
        Local::Ingress { .. } => UdpRole::Ingress,
        Local::Upstream { .. } => UdpRole::Upstream,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_role_is_booked_under_its_own_label() {
        for (place, (role, _)) in SocketStats::ROLES.into_iter().enumerate() {
            assert_eq!(role_place(role), place, "{role:?}");
        }
    }
}
