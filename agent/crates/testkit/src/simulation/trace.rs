//! A hash over everything that a world's agents do: each datagram they send, each deadline they ask for, each account they keep.
//!
//! Two builds that behave alike give the same hash for the same seed, on any machine: `tests/virtual/sim/behaviour.txt` holds those of a
//! thousand seeds, and a refactoring leaves them as they are.

use std::{
    net::SocketAddr,
    time::{Duration, Instant},
};

use dataplane::relay::{Account, Direction};
use engine::worker::{Turn, Worker};
use net::memory::Datagram;
use ring::digest::{Context, SHA256};

/// Which worker of which agent of a world.
#[derive(Clone, Copy, Debug)]
pub(super) struct WorkerOf {
    pub(super) agent: usize,
    pub(super) worker: usize,
}

/// The records so far, hashed. Every record begins with its kind and its time in nanoseconds since the world began.
pub(super) struct Trace(Context);

impl Trace {
    pub(super) fn new() -> Self {
        Self(Context::new(&SHA256))
    }

    /// The first eight bytes of the hash of all records so far.
    pub(super) fn digest(&self) -> u64 {
        let digest = self.0.clone().finish();
        digest.as_ref().iter().take(8).fold(0, |sum, byte| (sum << 8) | u64::from(*byte))
    }

    /// Records a datagram between two hosts, with the addresses that its receiver sees.
    pub(super) fn datagram(
        &mut self,
        at: Duration,
        from: SocketAddr,
        to: SocketAddr,
        datagram: &Datagram<'_>,
    ) {
        self.begin(b'd', at);
        for address in [from, to] {
            match address {
                SocketAddr::V4(address) => self.0.update(&address.ip().octets()),
                SocketAddr::V6(address) => self.0.update(&address.ip().octets()),
            }
            self.number(address.port().into());
        }
        self.number(datagram.tos.into());
        self.number(datagram.payload.len() as u64);
        self.0.update(datagram.payload);
    }

    /// Records what a worker asked for at the end of a turn, and what it has counted by then.
    pub(super) fn turn(&mut self, at: Duration, now: Instant, of: WorkerOf, turn: &Turn, worker: &Worker) {
        self.begin(b't', at);
        self.number(of.agent as u64);
        self.number(of.worker as u64);
        self.number(u64::from(turn.busy));
        self.number(u64::from(turn.ended));
        let wait = turn.deadline.map(|deadline| deadline.saturating_duration_since(now));
        self.number(wait.map_or(u64::MAX, nanoseconds));
        for peer in worker.peers().iter() {
            for direction in [Direction::Uplink, Direction::Downlink] {
                self.account(peer.data.relay.account(direction));
            }
        }
    }

    fn account(&mut self, account: &Account) {
        let Account { received, received_bytes, delivered, dropped, handed_over, taken_over } = account;
        for number in [received, received_bytes, delivered, handed_over, taken_over] {
            self.number(*number);
        }
        // By label, so that a new reason changes nothing where it does not occur.
        for (label, count) in dropped.by_label().filter(|(_, count)| *count > 0) {
            self.0.update(label.as_bytes());
            self.number(count);
        }
        self.number(u64::MAX);
    }

    fn begin(&mut self, kind: u8, at: Duration) {
        self.0.update(&[kind]);
        self.number(nanoseconds(at));
    }

    fn number(&mut self, number: u64) {
        self.0.update(&number.to_be_bytes());
    }
}

fn nanoseconds(time: Duration) -> u64 {
    u64::try_from(time.as_nanos()).unwrap_or(u64::MAX)
}
