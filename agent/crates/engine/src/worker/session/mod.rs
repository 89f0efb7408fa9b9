//! Control connections and sessions.
//!
//! | question | file |
//! |---|---|
//! | which keys may connect, and which of two connections stays | `hello.rs`, `establish.rs`; two agents with one key: `contested.rs` |
//! | a session in hand for an event on it; what other workers say of it | `conn.rs` |
//! | messages of a connected peer; what it is told | `messages.rs`; `announce.rs` |
//! | the link to a peer at each worker, while it has a session | `links.rs` |
//! | the lanes of a session that this worker owns | `lanes.rs`; its lines: `lines.rs`; what is charged to them: `line_rates.rs` |
//! | the preshared key that both ends use | `preshared.rs` |
//! | dialling, and the log lines when it fails | `dial.rs` |
//! | liveness of a session, its keepalives, forwards that wait for the peer | `liveness.rs` |
//! | a changed address or route | `routes.rs`; ports that change: `hop.rs` |
//! | stream connections | `stream_connections.rs` |
//! | peers without lanes: what they are sent | `plain.rs` |
//! | how connections and sessions end | `ending.rs` |
//! | what is published of sessions | `publish.rs` |

use std::{mem, sync::Arc, time::Instant};

use base::{
    clock::Clock,
    ids::{PeerId, WorkerId},
};
use config::{Access, Config, Transport};
use dataplane::lanes::pool;
use gate::{Gate, Own, refusals::Refusals};
use quinn_proto::ConnectionHandle;
use wire::{
    cid::ConnectionIds,
    messages::{CloseReason, Features},
};

use crate::{
    control::driver::{Control, Event},
    worker::{
        context::{
            Context,
            timer::{Timer, coarse},
        },
        local::unauthenticated::Unauthenticated,
        outside::Gateway,
    },
};
pub(crate) use conn::Conn;

mod announce;
mod conn;
pub(crate) mod contested;
pub(crate) mod dial;
pub(crate) mod ending;
mod establish;
pub(crate) mod hello;
mod hop;
pub(crate) mod lanes;
mod line_rates;
mod lines;
pub(crate) mod links;
pub(crate) mod liveness;
mod messages;
pub(crate) mod plain;
pub(crate) mod preshared;
pub(crate) mod publish;
pub(crate) mod routes;
pub(crate) mod stream_connections;

/// Events for which memory is kept, usually more than a turn has.
const SPARE_EVENTS: usize = 256;

/// Control connections, and the gate before them.
pub(crate) struct Sessions {
    pub(crate) control: Control,
    gate: Gate,
    own: Arc<Own>,
    ids: ConnectionIds,
    instance: [u8; 16],
    refusals: Arc<Refusals>,
    clock: Arc<dyn Clock + Send + Sync>,
    /// Scratch space for the events that [`Control::poll`] reports.
    events: Vec<(ConnectionHandle, Event)>,
    /// Connections whose sessions were left because their listeners asked for that; they are closed soon.
    left: Vec<ConnectionHandle>,
    /// Features that the hello leaves out, for tests.
    withheld: Features,
    /// How many lanes a session may have; none in tests of standard mode.
    most_lanes: u8,
}

impl Sessions {
    /// The wall clock, in seconds.
    pub(crate) fn unix_seconds(&self) -> u64 {
        self.clock.unix_seconds()
    }

    /// Stops dialling a peer. An attempt whose hello is on its way stays: the far end keeps the connection that began last, and both
    /// ends must agree.
    pub(crate) fn stop_dialling(&mut self, cx: &mut Context, id: PeerId, now: Instant) {
        let Some(peer) = cx.peers.get_mut(id) else { return };
        for attempt in peer.dialler.stop() {
            if self.control.get(attempt).is_some_and(|connection| connection.identity.key().is_none()) {
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
        self.control.get(handle)?.identity.peer()
    }

    /// Polls the control connections; the memory of the events comes back with [`Self::reuse`].
    pub(crate) fn poll(&mut self, cx: &mut Context, now: Instant) -> Vec<(ConnectionHandle, Event)> {
        let mut events = mem::take(&mut self.events);
        let (base, timers) = (cx.hub.base, &mut cx.timers);
        let arm = |handle: ConnectionHandle, at| {
            timers.arm(Timer::Connection(handle.0), coarse(base, at, now));
        };
        self.control.poll(&mut cx.sockets.lanes, &mut cx.sockets.underlays, now, arm, &mut events);
        events
    }

    pub(crate) fn reuse(&mut self, mut events: Vec<(ConnectionHandle, Event)>) {
        events.shrink_to(SPARE_EVENTS);
        self.events = events;
    }

    /// What becomes of datagrams that belong to no lane.
    #[inline]
    pub(crate) fn gateway<'a>(
        &'a mut self,
        unauthenticated: &'a mut Unauthenticated,
        worker: WorkerId,
    ) -> Gateway<'a> {
        Gateway { gate: &mut self.gate, control: &mut self.control, unauthenticated, worker }
    }

    pub(crate) fn gate(&self) -> &Gate {
        &self.gate
    }

    pub(crate) fn instance(&self) -> &[u8; 16] {
        &self.instance
    }

    /// Whether no further connection is accepted.
    pub(crate) fn drains(&self) -> bool {
        self.control.acceptor.is_closed()
    }

    /// Accepts no further connection.
    pub(crate) fn refuse_all(&mut self) {
        self.control.acceptor.close();
        self.refusals.drain();
    }

    /// Follows a new configuration.
    pub(crate) fn follow(&mut self, cx: &Context, now: Instant) {
        let Config { access, transport, limits, .. } = &*cx.config;
        // As in `Worker::configured`.
        #[rustfmt::skip]
        let Access {
            clock_window,
            // Read where a handshake or a sender comes; the decoy follows its own.
            mode: _, services: _, decoy: _,
            // At a restart.
            knock: _,
        } = access;
        #[rustfmt::skip]
        let Transport {
            key_exchange,
            // Of the daemon around the workers.
            advertise: _,
            // By the sockets and the sessions (`Worker::configured`).
            uplinks: _,
            // By the ports of the sessions (`Worker::configured`).
            hop: _,
            // At a restart.
            listen: _, workers: _, pin_cpus: _, gso: _, mark: _, max_packet: _, server_id: _,
        } = transport;
        self.gate.set_window(*clock_window);
        self.gate.set_key_exchange(*key_exchange);
        self.follow_web(&cx.config, cx.id.count, now);
        let handshakes = limits.handshakes.div_ceil(usize::from(cx.id.count));
        self.control.acceptor.configure(handshakes, *key_exchange);
        for handle in self.control.handles() {
            self.control.set_most_forwards(handle, limits.tcp_streams_per_peer);
        }
    }

    /// Follows the web server of a configuration.
    pub(crate) fn follow_web(&mut self, config: &Config, workers: u8, now: Instant) {
        self.gate.set_names(config.web_names(), now);
        self.control.guests.follow(config, workers);
    }

    /// Forgets what the gate need not remember any more.
    pub(crate) fn expire_gate(&mut self, cx: &mut Context, now: Instant) {
        self.gate.expire(now);
        if let Some(error) = self.gate.take_replay_log_error() {
            cx.stats.totals.replay_log_errors += 1;
            cx.warn_of_replay_log(&error, now);
        }
    }

    pub(crate) fn new(
        control: Control,
        gate: Gate,
        own: Arc<Own>,
        ids: ConnectionIds,
        instance: [u8; 16],
        refusals: Arc<Refusals>,
        clock: Arc<dyn Clock + Send + Sync>,
    ) -> Self {
        let (withheld, most_lanes) = (Features::default(), pool::MAX_LANES);
        let (events, left) = (Vec::new(), Vec::new());
        Self { control, gate, own, ids, instance, refusals, clock, events, left, withheld, most_lanes }
    }
}

#[cfg(feature = "inspection")]
impl Sessions {
    pub(crate) fn events_capacity(&self) -> usize {
        self.events.capacity()
    }

    /// Leaves `features` out of the hello.
    pub(crate) fn withhold(&mut self, features: Features) {
        self.withheld = features;
    }

    pub(crate) fn withhold_lanes(&mut self) {
        self.most_lanes = 0;
    }

    pub(crate) fn exhaust_gate_budget(&mut self, now: Instant) {
        self.gate.exhaust_budget(now);
    }
}
