//! The TCP forwards of a worker and the ports at which it accepts them.
//!
//! | question | file |
//! |---|---|
//! | forwards are accepted, opened, served, removed | `serve.rs` |
//! | how a service is reached | `connect.rs` |
//! | connections whose PROXY header is awaited | `awaited.rs`, `proxied.rs` |
//! | what the peer says of streams beside them, readers that have stopped | `ends.rs` |
//! | connections in the listen backlog | `backlog.rs` |
//! | ends that vanish | `keepalive.rs` |
//! | what is noted of forwards for operators | `sight.rs`; their list, and the end of one: `rows.rs` |
//! | what a peer sends on streams beyond the rate that it was told | `toll.rs` |
//! | the ports of `[[tcp]]` after a reload | `reload.rs` |

use std::net::SocketAddr;

use base::{hash::PeerMap, ids::PeerId, pages::Pages};
use dataplane::forward::tcp::{self, TcpForward, TcpId};
use net::{Ready, TcpListener, Token};

use crate::{
    control::StreamKey,
    worker::streams::{awaited::Awaited, keepalive::Keepalives, sight::Sight},
};

mod awaited;
mod backlog;
mod connect;
mod ends;
mod keepalive;
mod proxied;
mod reload;
mod rows;
mod serve;
mod sight;
mod toll;

/// A TCP forward and the stream that carries it.
struct OpenForward {
    key: StreamKey,
    peer: PeerId,
    forward: TcpForward,
    sight: Sight,
}

// A fifth of what an idle forward costs its agent (tests/perf/idle_forwards): what few forwards have is boxed.
const _: () = assert!(size_of::<OpenForward>() <= 392);

/// The TCP forwards of this worker and the ports at which it accepts them.
#[derive(Default)]
pub(crate) struct TcpForwards {
    /// The queue in which a forward that has more to do marks itself.
    ready: Ready,
    /// Indexed as [`config::Config::tcp`]; `None` where the port is closed.
    listeners: Vec<Option<(Box<dyn TcpListener>, Token)>>,
    open: Pages<OpenForward>,
    /// Connections whose PROXY header has not come.
    proxied: Pages<Awaited>,
    /// Keyed by stream numbers, which a peer chooses: the map has a keyed hasher.
    by_stream: PeerMap<StreamKey, TcpId>,
    /// Forwards whose streams have events, each once.
    stirred: Vec<TcpId>,
    /// Number of times that any forward was served, which orders them by when they sent something last.
    passes: u64,
    keepalives: Keepalives,
    scratch: tcp::Scratch,
}

impl TcpForwards {
    pub(crate) fn new(ready: Ready) -> Self {
        Self { ready, ..Self::default() }
    }

    /// Accepts connections at a port, the next one of the configuration.
    pub(crate) fn listen(&mut self, listener: (Box<dyn TcpListener>, Token)) {
        self.listeners.push(Some(listener));
    }

    pub(crate) fn addresses(&self) -> impl Iterator<Item = SocketAddr> {
        self.listeners.iter().flatten().map(|(listener, _)| listener.local_addr())
    }

    /// Closes the ports.
    pub(crate) fn close_ports(&mut self) {
        self.listeners.clear();
    }

    pub(crate) fn len(&self) -> usize {
        self.open.len()
    }

    /// How often forwards were served, all of them together.
    #[cfg(feature = "inspection")]
    pub(crate) fn passes(&self) -> u64 {
        self.passes
    }

    pub(crate) fn peer_of(&self, id: TcpId) -> Option<PeerId> {
        Some(self.open.get(id.0 as usize)?.peer)
    }

    /// Gives memory back that nothing uses.
    pub(crate) fn give_back(&mut self) {
        self.scratch.blocks.release();
        self.open.shrink();
        self.proxied.shrink();
        if self.by_stream.capacity() > 8 * self.open.len().max(16) {
            self.by_stream.shrink_to(2 * self.open.len());
        }
    }
}
