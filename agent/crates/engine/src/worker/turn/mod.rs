//! A turn: everything that is due and ready, once. What several parts do together is here, as lists of calls: a message, a reload,
//! the removal of a peer, a publication.
//!
//! | question | file |
//! |---|---|
//! | what happens in a turn, in which order | `mod.rs`; sources and batches: `serve.rs` |
//! | messages from other workers, and effects | `messages.rs`; sending them: `engine/src/hub/` |
//! | control connections and their messages | `control.rs`; a connection becomes the session: `establish.rs` |
//! | frames of peers without lanes | `plain.rs`; lost payloads that are repaired: `repair.rs` |
//! | what the kernel refuses to send | `kernel_refusals.rs` |
//! | once a second | `housekeeping.rs` |
//! | a reload, a changed peer | `reload.rs`; a peer at its quota: `quota.rs` |
//! | snapshots; what `culvert status PEER` reads | `publish.rs`; `inspect.rs` |
//! | the start and the end of a worker | `start.rs`; `ending.rs` |
//! | what tests read of a worker | `inspection.rs`, behind a feature |
//!
//! ```text
//!   turn:  commands, messages → hand-off batches → ready sources, a batch each, within budgets → timers → some of the decoy's
//!          replies → control connections → repairs → lanes' own packets → send → count → send hand-off batches
//! ```

use std::{
    sync::Arc,
    time::{Duration, Instant},
};

use base::fault::{self, Fault};
use dataplane::datapath::work::Work;
use net::{Ready, Token};
use quic_core::TRANSMIT_CAPACITY;
use quinn_proto::ConnectionHandle;

use crate::{
    hub::{LaneEvent, LaneLoss},
    worker::{
        context::{
            Context, Sockets,
            timer::{Timer, coarse, index_u32},
        },
        decoy::Decoy,
        device::Tunnel,
        lanes::{LaneHost, host as lane_host},
        local::DataPlane,
        report::{
            Publisher,
            inbox::{Command, Inbox},
        },
        session::Sessions,
        streams::TcpForwards,
    },
};

pub(crate) mod control;
pub(crate) mod ending;
pub(crate) mod establish;
pub(crate) mod housekeeping;
pub(crate) mod inspect;
#[cfg(feature = "inspection")]
pub(crate) mod inspection;
pub(crate) mod kernel_refusals;
pub(crate) mod messages;
pub(crate) mod plain;
pub(crate) mod publish;
mod quota;
pub(crate) mod reload;
pub(crate) mod repair;
pub(crate) mod serve;
pub(crate) mod start;

/// The interval between publications while something happens.
const PUBLISH_INTERVAL: Duration = Duration::from_millis(50);

/// The addition to [`PUBLISH_INTERVAL`] for each peer.
const PUBLISH_PER_PEER: Duration = Duration::from_micros(200);

/// The addition for each peer beyond [`FEW_PEERS`], whose state is not in the CPU's cache when it is published. Readers that need
/// newer figures ask for them ([`Snapshots::renew`]).
const PUBLISH_PER_FURTHER_PEER: Duration = Duration::from_millis(10);

/// The longest interval between publications while something happens.
const LONGEST_PUBLISH_INTERVAL: Duration = Duration::from_secs(10);

/// The number of peers whose state stays in the CPU's cache between two publications.
const FEW_PEERS: u32 = 100;

/// The interval between publications of a worker with this many peers: each is looked at.
fn publish_interval(peers: u32) -> Duration {
    let all = PUBLISH_PER_PEER.saturating_mul(peers);
    let further = PUBLISH_PER_FURTHER_PEER.saturating_mul(peers.saturating_sub(FEW_PEERS));
    (PUBLISH_INTERVAL + all + further).min(LONGEST_PUBLISH_INTERVAL)
}

/// When the worker wants its next turn.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Turn {
    /// At once, because work is left.
    pub busy: bool,
    /// If not `busy`: at this time, or earlier when a source is ready.
    pub deadline: Option<Instant>,
    /// The worker has shut down and wants no further turn.
    pub ended: bool,
}

/// A worker of the agent: its sockets, sessions, lanes and forwards, which it serves in turns.
pub struct Worker {
    cx: Context,
    data: DataPlane,
    sessions: Sessions,
    host: LaneHost,
    tcp: TcpForwards,
    tunnel: Tunnel,
    decoy: Decoy,
    metrics: Publisher,
    ready: Ready,
    /// Scratch space for sources that have become ready since the last turn.
    fresh: Vec<Token>,
    /// Scratch space for timers that are due in this turn.
    due: Vec<Timer>,
    inbox: Arc<Inbox>,
    /// True once the hub knows that this worker has shut down.
    stopped: bool,
    ended: bool,
}

impl Worker {
    /// The queue for commands to this worker.
    #[must_use]
    pub fn inbox(&self) -> Arc<Inbox> {
        Arc::clone(&self.inbox)
    }

    /// The queue in which sources report that they are ready.
    #[must_use]
    pub fn ready(&self) -> &Ready {
        &self.ready
    }

    /// Runs one turn: serves everything that is due and ready at `now`, with at most one batch from each source.
    pub fn turn(&mut self, now: Instant) -> Turn {
        // A source that is marked after this comes in the next turn.
        self.ready.drain(&mut self.fresh);
        let mut fresh = std::mem::take(&mut self.fresh);
        for token in fresh.drain(..) {
            self.cx.add_source(&self.tcp, token);
        }
        self.fresh = fresh;
        self.data.notes.work = Work::default();
        self.data.notes.shares.begin_turn(now);
        self.cx.stats.work.begin(self.cx.sockets.factory.opened, self.sessions.control.stats.quic_packets);
        self.sessions.control.begin_turn();
        self.data.rests.forget(|id| self.cx.sockets.underlays.get(id).is_none());
        let all_stopped = self.cx.hub.all_stopped();
        fault::point(Fault::Worker);
        while let Some(command) = self.inbox.take() {
            match command {
                Command::Shutdown { within } => self.shut_down(within, now),
                Command::Drain { within } => self.drain_sessions(within, now),
                Command::Inspect(inspection) => self.inspect(&inspection, now),
                Command::Forwards(portion) => self.tell_forwards(&portion, now),
                Command::EndForward(end) => self.end_forward(&end, now),
                Command::Publish => self.renew(now),
            }
            self.settle_effects(now);
        }
        self.read_messages(now);
        self.accept_hand_offs(now);
        let batches = self.serve_sources(now);
        // After the sockets: a worker that stood still finds there what timers would take for missing. Only timers that are due now: one
        // that these arm with a deadline in the past is for the next turn.
        while let Some(timer) = self.cx.timers.pop(now) {
            self.due.push(timer);
        }
        for index in 0..self.due.len() {
            self.timeout(self.due[index], now);
        }
        self.due.clear();
        self.host.look_at_quiet(&mut self.cx, now);
        self.settle_effects(now);
        let Self { cx, data, decoy, .. } = self;
        decoy.serve_decoys(cx, data, batches, now);
        decoy.serve_unauthenticated(cx, data, now);
        self.poll_control(now);
        self.drive_repairs(now);
        self.drive_lanes(now);
        let Self { cx, sessions, .. } = self;
        let Sockets { lanes, underlays, .. } = &mut cx.sockets;
        underlays.flush(lanes, now);
        // What is then to be said on other ways is said in the next turn.
        let is_unreachable = !underlays.unreachable.is_empty();
        sessions.follow_unreachable(cx, now);
        self.settle_effects(now);
        self.take_refusals(now);
        let Self { cx, data, sessions, host, tunnel, .. } = self;
        data.watch_send_buffers(cx, &mut sessions.control, now);
        host.drain_captures(cx, now);
        data.settle(cx, sessions.control.settlements(), tunnel.settlements());
        data.send_hand_offs(cx, now);
        self.end_if_done(all_stopped);
        debug_assert!(self.cx.effects.is_empty(), "a step asked for something, and nobody did it");
        if self.cx.stats.unpublished {
            let interval = publish_interval(index_u32(self.cx.peers.len()));
            self.cx.timers.arm(Timer::Publish, now + interval);
        }
        let quic_packets = self.sessions.control.stats.quic_packets;
        self.cx.stats.work.end(&self.data.notes.work, self.cx.sockets.factory.opened, quic_packets);
        let waits = self.sessions.control.has_unread() || !self.data.plain_waiting.is_empty();
        let busy = self.decoy.is_busy()
            || waits
            || is_unreachable
            || !self.cx.sources.is_empty()
            || self.cx.hub.has_hand_offs(self.cx.id.index)
            || !self.ready.is_empty();
        Turn { busy, deadline: self.cx.timers.next(), ended: self.ended }
    }

    fn timeout(&mut self, timer: Timer, now: Instant) {
        let Self { cx, data, sessions, host, tcp, decoy, .. } = self;
        // A timer may cause something that is counted, such as a packet.
        cx.stats.unpublished |= timer != Timer::Publish;
        match timer {
            Timer::Connection(index) => {
                let handle = ConnectionHandle(index);
                if let Some(at) = sessions.control.timeout(handle, now) {
                    cx.timers.arm(timer, coarse(cx.hub.base, at, now));
                }
                sessions.look_after_forwards(cx, handle);
            }
            Timer::Lane(id) => host.lane_timeout(cx, id, now),
            Timer::Pool(peer) => {
                if let Some(mut conn) = sessions.conn(cx, peer) {
                    conn.pool_timeout(now);
                }
            }
            Timer::Lines(peer) => {
                if let Some(mut conn) = sessions.conn(cx, peer) {
                    conn.lines_timeout(now);
                }
            }
            Timer::FollowLines(peer) => {
                if let Some(of) = cx.peers.linked(peer) {
                    sessions.follow_lines(cx, of, now);
                }
            }
            Timer::Hop(peer) => sessions.hop(cx, peer, now),
            Timer::OldPort(id) => cx.release_underlay(&sessions.control, id),
            Timer::Hello(handle) => self.send_deferred_hello(handle, now),
            Timer::Flow(peer, flow) => data.flow_timeout(cx, peer, flow, now),
            Timer::Repair(peer) => self.drive_plain_repair(peer, now),
            Timer::Queue(peer) => {
                if let Some(state) = cx.peers.get_mut(peer) {
                    state.data.relay.expire(now);
                }
                data.look_at_queue(cx, peer, now);
            }
            Timer::Listener(port) => tcp.wake_listener(cx, port),
            Timer::Left(handle) => sessions.close_left(cx, handle, now),
            Timer::Join(handle) => sessions.early_join_timeout(cx, handle, now),
            Timer::SendBuffer(id) => data.send_buffer_timeout(cx, &mut sessions.control, id, now),
            Timer::Dial(peer) => sessions.dial(cx, peer, now),
            Timer::Tcp(id) => tcp.tcp_timeout(cx, sessions, id, now),
            Timer::Proxied(index) => tcp.proxy_timeout(cx, index, now),
            Timer::Keepalive => tcp.look_at_watched(cx, sessions, now),
            Timer::Interfaces => host.look_at_unknown(cx, now),
            Timer::Publish => self.publish(now),
            Timer::Housekeeping => self.housekeeping(now),
            Timer::Decoys => decoy.expire_flows(cx, now),
            Timer::Drained => sessions.close_remaining(cx, now),
            Timer::Stop => self.ended = true,
        }
        self.settle_effects(now);
    }

    /// Drives lanes that sent or received: seals challenges, acknowledgements and probes, then arms the lanes' deadlines.
    fn drive_lanes(&mut self, now: Instant) {
        let Sockets { lanes, underlays, .. } = &mut self.cx.sockets;
        underlays.finish(lanes, now);
        while let Some(id) = self.cx.sockets.lanes.next_touched() {
            self.cx.note_heard(id, now);
            self.settle_effects(now);
            self.cx.note_path_packet(id, now);
            self.settle_effects(now);
            let Some(slot) = self.cx.sockets.lanes.get_mut(id) else { continue };
            let (underlay, path) = (slot.underlay, slot.path());
            if slot.is_exhausted() {
                self.host.end_lane(&mut self.cx, id, LaneLoss::Ended(None), now);
                self.settle_effects(now);
                continue;
            }
            if slot.note_near_limit(now) {
                let lane = lane_host::name_of_lane(slot);
                self.cx.lane_event(lane, LaneEvent::NearLimit);
                self.settle_effects(now);
            }
            self.cx.send_report(id, now);
            let cx = &mut self.cx;
            let Sockets { lanes, underlays, .. } = &mut cx.sockets;
            while let Some((data, path, most)) =
                lanes.get_mut(id).and_then(|slot| slot.paths.due_challenge(now))
            {
                underlays.packet(lanes, underlay, &path, most, now, |lanes, tail| {
                    lanes.get_mut(id)?.core.seal_path_challenge(data, tail, now).ok()
                });
            }
            if let Some(path) = path {
                while let Some(most) = lanes.get(id).map(|slot| slot.core.transmit_capacity(now)) {
                    let is_probe = most > TRANSMIT_CAPACITY;
                    if is_probe {
                        underlays.end_message(underlay);
                    }
                    let sent = underlays.packet(lanes, underlay, &path, most, now, |lanes, tail| {
                        lanes.get_mut(id)?.core.poll_transmit(tail, now).ok().flatten()
                    });
                    if is_probe {
                        underlays.end_message(underlay);
                    }
                    if !sent {
                        break;
                    }
                }
            }
            if let Some(slot) = lanes.get_mut(id) {
                if let Some(peer) = cx.peers.get(slot.peer) {
                    slot.charge(peer.data.relay.share_of(slot.line), now);
                }
                if let Some(at) = slot.poll_timeout() {
                    cx.timers.arm(Timer::Lane(id), at);
                }
            }
        }
    }
}
