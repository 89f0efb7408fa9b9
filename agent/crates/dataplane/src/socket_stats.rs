//! The counts of a worker's UDP sockets, by role.

use base::counts::PerKind;
use net::{
    UdpRole, UdpSocket,
    stats::{Booked, UdpStats},
    way::Over,
};
use wire::line::MOST_LINES;

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

/// The bytes of IP packets, headers included, that sockets on one line have carried: as whoever bills the line counts them.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct LineBytes {
    pub sent: u64,
    pub received: u64,
}

impl LineBytes {
    pub fn add(&mut self, other: Self) {
        self.sent = self.sent.saturating_add(other.sent);
        self.received = self.received.saturating_add(other.received);
    }

    /// What was carried between `before` and `now` by one socket, whose packets have headers of so many bytes.
    fn between(now: &UdpStats, before: &UdpStats, headers: u64) -> Self {
        let (sent, received) =
            (now.sent_datagrams - before.sent_datagrams, now.received_datagrams - before.received_datagrams);
        Self {
            sent: now.sent_bytes - before.sent_bytes + sent * headers,
            received: now.received_bytes - before.received_bytes + received * headers,
        }
    }
}

/// The same of each line, by its number.
pub type BytesOfLines = [LineBytes; MOST_LINES as usize];

/// Adds what a socket on a line has carried since it was looked at; to be called before it is booked. What a stream carries in place of
/// UDP goes by the main routing table, and so counts for no line.
pub fn count_line(sums: &mut BytesOfLines, line: Option<u8>, socket: &dyn UdpSocket, booked: &Booked) {
    /// The bytes of an UDP header, and of an IP header of either version.
    const UDP: u64 = 8;
    const IPV4: u64 = 20;
    const IPV6: u64 = 40;
    let over_tcp = socket.taken().is_some_and(|taken| taken.over == Over::Carrier);
    if let Some(sum) = line.filter(|_| !over_tcp).and_then(|line| sums.get_mut(usize::from(line))) {
        let headers = UDP + if socket.local_addr().is_ipv4() { IPV4 } else { IPV6 };
        sum.add(LineBytes::between(&socket.stats(), &booked.stats, headers));
    }
}

/// The role of a local socket.
pub fn role(local: &Local) -> UdpRole {
    match local {
        Local::Ingress { .. } => UdpRole::Ingress,
        Local::Upstream { .. } => UdpRole::Upstream,
    }
}
