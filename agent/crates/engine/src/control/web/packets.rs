//! IP packets of users on their way to the TUN device: a worker writes what waits here at the end of its turn.

use std::sync::{Arc, Mutex};

use base::panics::lock;
use bytes::Bytes;
use net::{Ready, SendOutcome, Token, TunQueue};
use users::{
    account::{Account, Dropped, Place},
    ip::Device,
};

/// Packets that wait for the end of a turn.
const MOST_PACKETS: usize = 4_096;

/// Their bytes.
const MOST_BYTES: usize = 4 << 20;

/// A packet of fewer bytes is copied, where it would keep what else its connection has read with it.
const SMALL: usize = 512;

/// The packets of users for the device at one worker.
#[derive(Default)]
pub(crate) struct ForDevice(Mutex<Waiting>);

#[derive(Default)]
struct Waiting {
    packets: Vec<(Bytes, Arc<Account>)>,
    bytes: usize,
}

impl Device for ForDevice {
    fn put(&self, packet: Bytes, account: &Arc<Account>) {
        self.push(packet, account);
    }
}

impl ForDevice {
    /// Puts a packet; whether it is the first that waits.
    fn push(&self, packet: Bytes, account: &Arc<Account>) -> bool {
        let mut waiting = lock(&self.0);
        if waiting.packets.len() >= MOST_PACKETS || waiting.bytes + packet.len() > MOST_BYTES {
            account.dropped_from_user(Dropped::QueueFull, 1);
            return false;
        }
        waiting.bytes += packet.len();
        waiting.packets.push((packet, Arc::clone(account)));
        waiting.packets.len() == 1
    }

    /// Writes what waits to `queue`; how many packets were written.
    pub(crate) fn write(&self, queue: &mut dyn TunQueue) -> u64 {
        let waiting = std::mem::take(&mut *lock(&self.0));
        let mut written = 0;
        for (packet, account) in waiting.packets {
            match queue.send(&packet) {
                SendOutcome::Sent => {
                    account.datagram(Place::ToTarget, packet.len());
                    written += 1;
                }
                SendOutcome::Partly { .. } | SendOutcome::Failed(_) => {
                    account.dropped_from_user(Dropped::SendError, 1);
                }
            }
        }
        written
    }
}

/// The same for other threads, which wake the worker: it writes at the end of every turn.
pub(crate) struct FromElsewhere {
    pub(crate) packets: Arc<ForDevice>,
    pub(crate) ready: Ready,
    pub(crate) token: Token,
}

impl Device for FromElsewhere {
    fn put(&self, packet: Bytes, account: &Arc<Account>) {
        let packet = if packet.len() < SMALL { Bytes::copy_from_slice(&packet) } else { packet };
        if self.packets.push(packet, account) {
            self.ready.mark(self.token);
        }
    }
}
