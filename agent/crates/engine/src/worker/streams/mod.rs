//! The TCP forwards of a worker and the ports at which it accepts them.
//!
//! | question | file |
//! |---|---|
//! | forwards are accepted, opened, served, removed | `serve.rs` |
//! | what the peer says of streams beside them, readers that have stopped | `ends.rs` |
//! | connections in the listen backlog | `backlog.rs` |
//! | ends that vanish | `keepalive.rs` |
//! | what is noted of forwards for operators | `sight.rs`; their list, and the end of one: `rows.rs` |
//! | the ports of `[[tcp]]` after a reload, services that are missed | `reload.rs` |

use base::{hash::PeerMap, ids::PeerId};
use dataplane::forward::tcp::{self, TcpForward, TcpId};
use net::{TcpListener, Token};
use slab::Slab;

use crate::{
    control::StreamKey,
    worker::streams::{keepalive::Keepalives, sight::Sight},
};

pub(crate) mod backlog;
pub(crate) mod ends;
pub(crate) mod keepalive;
pub(crate) mod reload;
pub(crate) mod rows;
pub(crate) mod serve;
pub(crate) mod sight;

/// A TCP forward and the stream that carries it.
pub(crate) struct OpenForward {
    pub(crate) key: StreamKey,
    pub(crate) peer: PeerId,
    pub(crate) forward: TcpForward,
    pub(crate) sight: Sight,
}

// A fifth of what an idle forward costs its agent (tests/perf/idle_forwards): what few forwards have is boxed.
const _: () = assert!(size_of::<OpenForward>() <= 392);

/// The TCP forwards of this worker and the ports at which it accepts them.
#[derive(Default)]
pub(crate) struct TcpForwards {
    /// Indexed as [`config::Config::tcp`]; `None` where the port is closed.
    pub(crate) listeners: Vec<Option<(Box<dyn TcpListener>, Token)>>,
    pub(crate) open: Slab<OpenForward>,
    /// Keyed by stream numbers, which a peer chooses: the map has a keyed hasher.
    pub(crate) by_stream: PeerMap<StreamKey, TcpId>,
    /// Forwards whose streams have events, each once.
    pub(crate) stirred: Vec<TcpId>,
    /// Number of times that any forward was served, which orders them by when they sent something last.
    pub(crate) passes: u64,
    pub(crate) keepalives: Keepalives,
    pub(crate) scratch: tcp::Scratch,
}
