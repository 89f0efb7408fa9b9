//! The counts of a worker's UDP sockets, by role.

use base::counts::PerKind;
use net::{UdpRole, UdpSocket, stats::Booked};

use crate::forward::Local;

/// The counts of the sockets of each role, those that are closed included.
#[derive(Clone, Copy, Debug, Default)]
pub struct SocketStats(pub PerKind<UdpRole, Booked>);

impl SocketStats {
    /// The number of buffers that the kernel dropped at all sockets.
    #[must_use]
    pub fn kernel_drops(&self) -> u64 {
        self.0.iter().map(|(_, booked)| booked.kernel_drops).sum()
    }

    /// Forgets the bytes that waited in the kernel, before all sockets are looked at again.
    pub fn forget_kernel_queues(&mut self) {
        self.0.iter_mut().for_each(|(_, booked)| booked.kernel_queue = 0);
    }

    /// Adds the counts of `socket` since the last call; with `drops`, also asks the kernel for its drops, and adds the bytes that
    /// wait there.
    pub fn look_at(&mut self, role: UdpRole, socket: &dyn UdpSocket, booked: &mut Booked, drops: bool) {
        self.0[role].kernel_queue += self.book(role, socket, booked, drops);
    }

    /// The same for a socket that is about to close: the bytes that wait there are returned and not added, since nobody will
    /// read them.
    pub fn book(&mut self, role: UdpRole, socket: &dyn UdpSocket, booked: &mut Booked, drops: bool) -> u64 {
        let sum = &mut self.0[role];
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

/// The role of a local socket.
pub fn role(local: &Local) -> UdpRole {
    match local {
        Local::Ingress { .. } => UdpRole::Ingress,
        Local::Upstream { .. } => UdpRole::Upstream,
    }
}
