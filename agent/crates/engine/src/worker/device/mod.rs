//! The TUN side of a worker.
//!
//! | question | file |
//! |---|---|
//! | packets from the device, inner addresses, the MTU towards each peer | `tun.rs` |
//! | which peers have routes | `routed.rs` |
//! | routes and traffic for an operator | `inspect.rs` |

use std::sync::Arc;

use dataplane::forward::tun::TunSide;

use crate::{mtu_table::MtuTable, worker::device::routed::RoutedPeers};

pub(crate) mod inspect;
pub(crate) mod routed;
pub(crate) mod tun;

/// The TUN side of a worker.
#[derive(Default)]
pub(crate) struct Tunnel {
    /// The worker's queue of the device, if the agent has one.
    pub(crate) device: Option<Tun>,
}

/// The TUN device, and the table from which the tunnel's thread reads the MTU towards each peer and who has routes.
pub(crate) struct Tun {
    pub(crate) side: TunSide,
    pub(crate) mtu_table: Arc<MtuTable>,
    /// With `tun.routes = "connected"`.
    pub(crate) routed: Option<RoutedPeers>,
}
