//! The counts of a worker's UDP sockets, by role.

use net::{UdpRole, UdpSocket, stats::Booked};

use crate::forward::Local;

/// The counts of the sockets of each role, those that are closed included.
#[derive(Clone, Copy, Debug, Default)]
pub struct SocketStats(pub [Booked; 5]);

impl SocketStats {
    /// Each role and its label, by [`role_place`].
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

    /// The number of buffers that the kernel dropped at all sockets.
    #[must_use]
    pub fn kernel_drops(&self) -> u64 {
        self.0.iter().map(|booked| booked.kernel_drops).sum()
    }

    /// Forgets the bytes that waited in the kernel, before all sockets are looked at again.
    pub fn forget_kernel_queues(&mut self) {
        self.0.iter_mut().for_each(|booked| booked.kernel_queue = 0);
    }

    /// Adds the counts of `socket` since the last call; with `drops`, also asks the kernel for its drops, and adds the bytes that
    /// wait there.
    pub fn look_at(&mut self, role: UdpRole, socket: &dyn UdpSocket, booked: &mut Booked, drops: bool) {
        self.0[role_place(role)].kernel_queue += self.book(role, socket, booked, drops);
    }

    /// The same for a socket that is about to close: the bytes that wait there are returned and not added, since nobody will
    /// read them.
    pub fn book(&mut self, role: UdpRole, socket: &dyn UdpSocket, booked: &mut Booked, drops: bool) -> u64 {
        let sum = &mut self.0[role_place(role)];
        let stats = socket.stats();
        sum.stats.add_since(&stats, &booked.stats);
        booked.stats = stats;
        if !drops {
            return 0;
        }
        let queue = socket.kernel_queue();
        sum.kernel_drops += queue.drops.saturating_sub(booked.kernel_drops);
        booked.kernel_drops = queue.drops;
        queue.bytes
    }
}

/// The index of a role in [`SocketStats::ROLES`].
pub fn role_place(role: UdpRole) -> usize {
    role as usize
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
        for (index, (role, _)) in SocketStats::ROLES.into_iter().enumerate() {
            assert_eq!(role_place(role), index, "{role:?}");
        }
    }
}
