//! IP packets of users on their way to the TUN device: a worker writes what waits here at the end of its turn.

use std::sync::{Arc, Mutex};

use base::panics::lock;
use bytes::Bytes;
use net::{SendOutcome, TunQueue};
use users::account::{Account, Dropped, Place};

/// Packets that wait for the end of a turn.
const MOST_PACKETS: usize = 4_096;

/// The packets of users for the device at one worker.
#[derive(Default)]
pub(crate) struct ForDevice(Mutex<Vec<(Bytes, Arc<Account>)>>);

impl ForDevice {
    /// Puts a packet of the user with `account`.
    pub(super) fn put(&self, packet: Bytes, account: &Arc<Account>) {
        let mut waiting = lock(&self.0);
        if waiting.len() >= MOST_PACKETS {
            return account.dropped_from_user(Dropped::QueueFull, 1);
        }
        waiting.push((packet, Arc::clone(account)));
    }

    /// Writes what waits to `queue`; how many packets were written.
    pub(crate) fn write(&self, queue: &mut dyn TunQueue) -> u64 {
        let waiting = std::mem::take(&mut *lock(&self.0));
        let mut written = 0;
        for (packet, account) in waiting {
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
