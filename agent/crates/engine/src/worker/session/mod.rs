//! Control connections and sessions.
//!
//! | question | file |
//! |---|---|
//! | which keys may connect, and which of two connections stays | `hello.rs`; two agents with one key: `contested.rs` |
//! | what a connected peer is told | `announce.rs` |
//! | the link to a peer at each worker, while it has a session | `links.rs` |
//! | the lanes of a session that this worker owns | `lanes.rs` |
//! | the preshared key that both ends use | `preshared.rs` |
//! | dialling, and the log lines when it fails | `dial.rs` |
//! | liveness of a session, its keepalives, forwards that wait for the peer | `liveness.rs` |
//! | a changed address or route | `routes.rs` |
//! | stream connections | `stream_connections.rs` |
//! | peers without lanes: what they are sent | `plain.rs` |
//! | how connections and sessions end | `ending.rs` |
//! | what is published of sessions | `publish.rs` |

use std::{sync::Arc, time::Instant};

use base::{clock::Clock, ids::PeerId};
use gate::{Gate, Own, refusals::Refusals};
use quinn_proto::ConnectionHandle;
use wire::{
    cid::ConnectionIds,
    messages::{CloseReason, Features},
};

use crate::{
    control::driver::{Control, Event},
    worker::context::Context,
};

pub(crate) mod announce;
pub(crate) mod contested;
pub(crate) mod dial;
pub(crate) mod ending;
pub(crate) mod hello;
pub(crate) mod lanes;
pub(crate) mod links;
pub(crate) mod liveness;
pub(crate) mod plain;
pub(crate) mod preshared;
pub(crate) mod publish;
pub(crate) mod routes;
pub(crate) mod stream_connections;

/// Control connections, and the gate before them.
pub(crate) struct Sessions {
    pub(crate) control: Control,
    pub(crate) gate: Gate,
    pub(crate) own: Arc<Own>,
    pub(crate) ids: ConnectionIds,
    pub(crate) instance: [u8; 16],
    pub(crate) refusals: Arc<Refusals>,
    pub(crate) clock: Arc<dyn Clock + Send + Sync>,
    /// Scratch space for the events that [`Control::poll`] reports.
    pub(crate) events: Vec<(ConnectionHandle, Event)>,
    /// Connections whose sessions were left because their listeners asked for that; they are closed soon.
    pub(crate) left: Vec<ConnectionHandle>,
    /// Features that the hello leaves out, for tests.
    pub(crate) withheld: Features,
    /// How many lanes a session may have; none in tests of standard mode.
    pub(crate) most_lanes: u8,
}

impl Sessions {
    /// Stops dialling a peer. An attempt whose hello is on its way stays: the far end keeps the connection that began last, and both
    /// ends must agree.
    pub(crate) fn stop_dialling(&mut self, cx: &mut Context, id: PeerId, now: Instant) {
        let Some(peer) = cx.peers.get_mut(id) else { return };
        for attempt in peer.dialler.stop() {
            if self.control.get(attempt).is_some_and(|connection| connection.key.is_none()) {
                self.control.close(attempt, CloseReason::Replaced, now);
            }
        }
    }

    /// The name of the peer behind a connection, for logs.
    pub(crate) fn name_of<'a>(&self, cx: &'a Context, handle: ConnectionHandle) -> &'a str {
        self.peer_of(handle).map_or("?", |id| cx.peers.name(id))
    }

    /// The peer behind a connection, once it is known.
    pub(crate) fn peer_of(&self, handle: ConnectionHandle) -> Option<PeerId> {
        self.control.get(handle)?.peer
    }
}
