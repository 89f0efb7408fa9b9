//! What a worker is made from.

use std::sync::Arc;

use base::clock::Clock;
use config::Config;
use gate::{Own, refusals::Refusals, table::SingleUse, tls::TlsIdentity};
use net::{Net, Ready};

use crate::{
    control::web::{Site, Tunnels},
    hub::Hub,
    mtu_table::MtuTable,
    registry::PeerRegistry,
    worker::report::Publisher,
};

/// The configuration, the secrets and the shared objects that a worker starts with.
pub struct Setup {
    pub config: Arc<Config>,
    /// The key and the certificate of this agent.
    pub identity: Arc<TlsIdentity>,
    /// The other keys that are derived from the identity.
    pub own: Arc<Own>,
    /// The list in which refused handshakes are noted.
    pub refusals: Arc<Refusals>,
    /// The table of used knocks, which includes knocks used by earlier processes.
    pub knocks: SingleUse,
    pub clock: Arc<dyn Clock + Send + Sync>,
    /// Provides sockets, look-ups and the queue of the TUN device.
    pub net: Box<dyn Net>,
    /// The queue in which sources report that they are ready.
    pub ready: Ready,
    /// Random identifier of this process; flow numbers are unique within it.
    pub instance: [u8; 16],
    /// Seed of the worker's randomness: connection IDs, jitter, path challenges.
    pub seed: [u8; 32],
    /// What we call our program to peers, as in "culvert/0.1.0"; at most 64 bytes.
    pub software: Arc<str>,
    /// The index of this worker, from 0.
    pub worker: u8,
    /// The state that this worker shares with the others.
    pub hub: Arc<Hub>,
    /// The registry of peers, in which the peers of the configuration come first.
    pub registry: Arc<PeerRegistry>,
    pub metrics: Publisher,
    /// Where requests of clients that named us go; `None`: nowhere.
    pub site: Option<Site>,
    /// Where requests of users go; `None`: nobody is one.
    pub tunnels: Option<Tunnels>,
    /// With a `[tun]`: the table of packet sizes that the tunnel's thread reads. [`Net::tun`] provides the worker's queue.
    pub tun: Option<Arc<MtuTable>>,
}
