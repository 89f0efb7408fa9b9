//! Connection IDs: eight bytes, of which the first says which worker they belong to, and the last three that they are
//! ours.
//!
//! ```text
//!   | 0: ≡ worker mod W | 1..5: random                                    | 5..8: PRF(identity, bytes 0..5) |
//!   | 0: ≡ worker mod W | 1: server ID | 2: lane or connection, 2..5: random | 5..8: PRF(identity, bytes 0..5) |
//! ```
//!
//! The second form is that of an exit of a fleet (`transport.server_id`): a balancer reads the exit from a fixed place, in any
//! packet. It has 2^23 random values for each first byte, so lanes and control connections keep apart by a bit, quinn-proto draws
//! again until an ID of its own is free, and a lane's host refuses an ID that another of its lanes has.
//!
//! Whoever holds the identity key recognises them without a table, also those of an earlier process: packets that a
//! peer sends to an agent that was restarted are not taken for unauthenticated ones. A random ID passes for ours
//! once in 2^24; then quinn-proto or the lanes do not know it, and it is dropped in silence.

use std::sync::{Arc, Mutex, PoisonError};

use quic_core::ConnectionId;
use quinn_proto::{ConnectionId as QuinnConnectionId, ConnectionIdGenerator};
use rand::{Rng, RngExt, SeedableRng, rngs::StdRng};
use ring::aead::quic::{AES_128, HeaderProtectionKey};

use base::ids::PeerId;

/// The length of every connection ID that we issue, bytes.
pub const CONNECTION_ID_BYTES: usize = 8;

/// Bytes of a connection ID that are chosen; the rest is derived from them.
const CHOSEN: usize = 5;

/// The index of the byte that names the exit of a fleet.
pub const SERVER_ID_AT: usize = 1;

/// The index of the byte whose highest bit tells a lane's ID from a connection's, if there is a server ID.
const USE_AT: usize = 2;

/// The bit of an ID of a lane.
const OF_LANE: u8 = 0x80;

/// Tells connection IDs that an identity has issued, in this process or an earlier one.
#[derive(Clone)]
pub struct IssuedIds(Arc<HeaderProtectionKey>);

impl IssuedIds {
    /// The IDs that are made with `key`, which is derived from the identity.
    #[must_use]
    pub fn new(key: &[u8; 16]) -> Self {
        // The mask of header protection (RFC 9001 §5.4.3) is one AES block: a PRF at 6 ns, cut to what is needed.
        let key = HeaderProtectionKey::new(&AES_128, key).expect("16 bytes are an AES-128 key");
        Self(Arc::new(key))
    }

    /// Whether the identity has issued `id`.
    #[must_use]
    pub fn is_ours(&self, id: &[u8; 8]) -> bool {
        self.complete(*id) == *id
    }

    /// Derives the last bytes from the others.
    fn complete(&self, mut id: [u8; 8]) -> [u8; 8] {
        let mut block = [0; 16];
        block[..CHOSEN].copy_from_slice(&id[..CHOSEN]);
        let mask = self.0.new_mask(&block).expect("a sample has 16 bytes");
        id[CHOSEN..].copy_from_slice(&mask[..8 - CHOSEN]);
        id
    }
}

impl std::fmt::Debug for IssuedIds {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("IssuedIds")
    }
}

/// Makes connection IDs for one worker: control connections and lanes draw from the same source.
#[derive(Clone, Debug)]
pub struct ConnectionIds {
    rng: Arc<Mutex<StdRng>>,
    issued: IssuedIds,
    /// From which the first byte of Initial packets' destination is derived.
    seed: u64,
    worker: u8,
    workers: u8,
    /// Names this exit among those of one identity, in every ID that is made.
    server: Option<u8>,
}

impl ConnectionIds {
    /// A source for worker `worker` of `workers` (at least 1).
    #[must_use]
    pub fn new(issued: IssuedIds, seed: [u8; 32], worker: u8, workers: u8) -> Self {
        let mut rng = StdRng::from_seed(seed);
        let seed = rng.next_u64();
        Self { rng: Arc::new(Mutex::new(rng)), issued, seed, worker, workers: workers.max(1), server: None }
    }

    /// The same source, whose IDs name the exit `server` of a fleet.
    #[must_use]
    pub fn with_server_id(self, server: Option<u8>) -> Self {
        Self { server, ..self }
    }

    /// The number of workers of the agent.
    #[must_use]
    pub fn workers(&self) -> u8 {
        self.workers
    }

    /// Tells the IDs that this source makes.
    #[must_use]
    pub fn issued(&self) -> &IssuedIds {
        &self.issued
    }

    /// Whether `id` was issued by another exit of the fleet: one with our identity and another server ID.
    #[must_use]
    pub fn is_of_other_exit(&self, id: &[u8; 8]) -> bool {
        self.server.is_some_and(|server| server != id[SERVER_ID_AT]) && self.issued.is_ours(id)
    }

    /// The next one for a lane, which the worker `host` of this agent hosts.
    #[must_use]
    pub fn next_for_lane(&self, host: u8) -> ConnectionId {
        self.draw(host, OF_LANE)
    }

    /// The first byte of the destination of our Initial packets to `peer`: the same for as long as this process lives. A listener
    /// steers by it, so a reconnect comes to the worker that has the peer's flows.
    #[must_use]
    pub fn first_byte(&self, peer: PeerId) -> u8 {
        StdRng::seed_from_u64(self.seed ^ u64::from(peer.0)).random()
    }

    /// Makes destinations of Initial packets that begin with `first` and are random for the rest, but for the byte of the server ID
    /// if `server` is given.
    #[must_use]
    pub fn initial_from(
        &self,
        first: u8,
        server: Option<u8>,
    ) -> Arc<dyn Fn() -> QuinnConnectionId + Send + Sync> {
        let rng = Arc::clone(&self.rng);
        Arc::new(move || {
            let mut bytes = [0; 8];
            rng.lock().unwrap_or_else(PoisonError::into_inner).fill_bytes(&mut bytes);
            bytes[0] = first;
            if let Some(server) = server {
                bytes[SERVER_ID_AT] = server;
            }
            QuinnConnectionId::new(&bytes)
        })
    }

    /// The next one for a connection: its first byte is `worker` modulo `workers`.
    #[must_use]
    pub fn next_id(&self) -> ConnectionId {
        self.draw(self.worker, 0)
    }

    /// Draws an ID. Without a server ID it is one of 2^38: a repetition among the ten thousand that may be in use is not to be
    /// expected (once in 10^7).
    fn draw(&self, worker: u8, of: u8) -> ConnectionId {
        let mut rng = self.rng.lock().unwrap_or_else(PoisonError::into_inner);
        let mut bytes = [0; 8];
        rng.fill_bytes(&mut bytes);
        // The values of a byte that belong to this worker: worker, worker + workers, … below 256.
        let choices = (255 - u16::from(worker)) / u16::from(self.workers) + 1;
        let choice = rng.random_range(0..choices) * u16::from(self.workers) + u16::from(worker);
        bytes[0] = u8::try_from(choice).unwrap_or(worker);
        if let Some(server) = self.server {
            bytes[SERVER_ID_AT] = server;
            bytes[USE_AT] = bytes[USE_AT] & !OF_LANE | of;
        }
        ConnectionId(self.issued.complete(bytes))
    }
}

impl ConnectionIdGenerator for ConnectionIds {
    fn generate_cid(&mut self) -> QuinnConnectionId {
        QuinnConnectionId::new(&self.next_id().0)
    }

    fn cid_len(&self) -> usize {
        8
    }

    fn cid_lifetime(&self) -> Option<std::time::Duration> {
        None
    }
}

#[cfg(test)]
mod tests {
    use crate::cid::*;

    #[test]
    fn the_first_byte_names_the_worker_and_uses_its_whole_range() {
        for workers in [1u8, 2, 3, 7] {
            for worker in 0..workers {
                let ids = ConnectionIds::new(IssuedIds::new(&[9; 16]), [7; 32], worker, workers);
                let firsts: std::collections::BTreeSet<u8> = (0..8000).map(|_| ids.next_id().0[0]).collect();
                assert!(firsts.iter().all(|first| first % workers == worker));
                assert_eq!(firsts.len(), (0..=255u8).filter(|byte| byte % workers == worker).count());
            }
        }
    }

    #[test]
    fn ids_are_recognised_after_a_restart_and_others_are_not() {
        let ids = ConnectionIds::new(IssuedIds::new(&[9; 16]), [7; 32], 1, 3);
        let (later, other) = (IssuedIds::new(&[9; 16]), IssuedIds::new(&[8; 16]));
        for _ in 0..1000 {
            let id = ids.next_for_lane(2).0;
            assert!(later.is_ours(&id) && !other.is_ours(&id));
            for bit in 0..64 {
                let mut flipped = id;
                flipped[bit / 8] ^= 1 << (bit % 8);
                assert!(!later.is_ours(&flipped), "{flipped:?}");
            }
        }
    }

    #[test]
    fn the_second_byte_names_the_exit_and_the_next_bit_keeps_lanes_and_connections_apart() {
        let exit =
            |server| ConnectionIds::new(IssuedIds::new(&[9; 16]), [7; 32], 1, 3).with_server_id(Some(server));
        let (ours, other) = (exit(200), exit(7));
        for _ in 0..1000 {
            let (connection, lane) = (ours.next_id().0, ours.next_for_lane(2).0);
            assert_eq!((connection[0] % 3, lane[0] % 3), (1, 2));
            assert_eq!((connection[1], lane[1]), (200, 200));
            assert_eq!((connection[2] >> 7, lane[2] >> 7), (0, 1));
            for id in [connection, lane] {
                assert!(ours.issued().is_ours(&id) && !ours.is_of_other_exit(&id));
                assert!(other.is_of_other_exit(&id));
            }
        }
    }

    #[test]
    fn no_id_is_of_another_exit_without_a_fleet_or_with_another_identity() {
        let source = |key| ConnectionIds::new(IssuedIds::new(&[key; 16]), [7; 32], 0, 1);
        for _ in 0..1000 {
            let id = source(9).next_id().0;
            assert!(!source(9).is_of_other_exit(&id));
            assert!(!source(8).with_server_id(Some(id[1] ^ 1)).is_of_other_exit(&id));
        }
    }

    #[test]
    fn the_destination_of_an_initial_names_an_exit_only_if_one_is_meant() {
        let ids = ConnectionIds::new(IssuedIds::new(&[9; 16]), [7; 32], 0, 2).with_server_id(Some(3));
        let meant = ids.initial_from(5, Some(77));
        let free = ids.initial_from(5, None);
        let mut seen = std::collections::BTreeSet::new();
        for _ in 0..4000 {
            assert_eq!(meant()[..2], [5, 77]);
            assert_eq!(free()[0], 5);
            seen.insert(free()[1]);
        }
        assert_eq!(seen.len(), 256, "a dialler must not choose an exit");
    }
}
