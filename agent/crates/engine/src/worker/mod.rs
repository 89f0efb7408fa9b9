//! A worker: one thread's share of the agent, driven in turns.
//!
//! [`Worker::turn`] runs the steps in order. The parts in `parts.rs` own the state. What a step asks of other parts is an effect
//! in `context.rs`, carried out when the step is over. `docs/architecture.md` lists the parts and follows five paths through them.
//!
//! | question | file |
//! |---|---|
//! | what happens in a turn, in which order | `mod.rs` |
//! | the parts and what they own | `context.rs`, `parts.rs`; the start of a worker: `setup.rs`, `start.rs`; of a peer: `peer_maker.rs` |
//! | which source is served next, and how much it may read | `sources.rs` |
//! | the work of a turn, and the rest of a batch that exceeds it | `work.rs` |
//! | sends that wait for room in a socket | `waiting.rs` |
//! | dialling, and the log lines and causes when it fails | `dial.rs` |
//! | control messages and what they cause | `session.rs` |
//! | how connections, sessions and flows end | `ending.rs` |
//! | timeouts of flows and queues; datagrams that a service does not take | `flows.rs` |
//! | the QUIC endpoint and its acceptance of connections | `endpoint.rs` |
//! | liveness of a session, and its keepalives | `liveness.rs`; forwards that wait for the peer: `forwards_waiting.rs` |
//! | the lanes of a session that this worker owns | `lanes.rs` |
//! | the preshared key that both ends use | `preshared.rs` |
//! | the lanes that this worker hosts | `lane_host.rs` |
//! | a changed address or route | `routes.rs` |
//! | why a peer is not reached, in words | `causes.rs`; what the kernel refuses to send: `kernel_refusals.rs` |
//! | two agents with one key | `contested.rs`, `engine/src/contest.rs` |
//! | messages from other workers | `messages.rs`; sending them: `engine/src/hub/` |
//! | lost payloads that are repaired | `repair.rs` |
//! | the link to a peer at each worker, while it has a session | `links.rs` |
//! | hand-off batches from and to other workers | `hand_off.rs` |
//! | peers that are added and removed | `peers.rs` |
//! | a reload | `reload.rs` |
//! | datagrams that belong to no lane: the gate, control connections, unauthenticated senders | `outside.rs` |
//! | recorded lanes | `capture.rs` |
//! | unauthenticated senders' datagrams to the decoy, and its replies | `unauthenticated.rs` (the queue), `decoy.rs`, `decoys.rs` (the flows) |
//! | reports about lanes, for an automatic rate | `reports.rs` |
//! | peers without lanes: standard mode | `plain.rs` |
//! | TCP forwards | `streams.rs`; connections in the listen backlog: `backlog.rs`; ends that vanish: `keepalive.rs`; what is noted of them for operators: `sight.rs` |
//! | stream connections | `stream_connections.rs` |
//! | the TUN device | `tun.rs`; which peers have routes: `routed.rs` |
//! | the replay log at the start | `knocks.rs` |
//! | the thread and the runtime around a worker, and its commands | `shell.rs`, `inbox.rs` |
//! | deadlines and intervals | `timer.rs` |
//! | counters and snapshots | `stats.rs`, `publish.rs`; who reads them: `publication.rs`; metrics: `families.rs`; limits that are reached: `ceilings.rs` |
//! | what `culvert status PEER` reads | `inspect.rs`; the request: `inspection_request.rs`; the answers: `answers.rs` |
//! | its list of TCP forwards, and the end of one | `forwards.rs`; the requests: `forwards_request.rs` |
//! | what tests read of a worker | `inspection.rs`, behind a feature |
//!
//! A worker has no thread and no clock: `turn` takes the time. [`net::Net`] provides the sockets: the kernel's in the daemon, a
//! network in memory in tests.
//!
//! ```text
//!   turn:  commands, messages → hand-off batches → ready sources, a batch each, within budgets → timers → some of the decoy's
//!          replies → control connections → lanes' own packets → send → count → send hand-off batches
//! ```

use std::{
    io,
    sync::Arc,
    time::{Duration, Instant},
};

use base::{
    fault::{self, Fault},
    ids::PeerId,
};
use dataplane::{
    datapath::{
        downlink::{Downlink, Position, Received},
        shares,
        work::{FRAMES_PER_UNIT, PER_TURN, Work},
    },
    forward::{Local, tcp::Cause},
    lanes::UnderlayId,
    sockets::Source,
};
use net as sockets;
use net::{Ready, ReceiveBatch, Token, UdpRole};
use quinn_proto::ConnectionHandle;

use crate::hub::{LaneLoss, WorkerMessage};

/// Writes a line to the log if a throttle lets it through: the level, the throttle's answer, the fields, the text. Field
/// `suppressed` says how many like it were held back before. Fields and text are evaluated only for a line that is written.
macro_rules! throttled {
    ($level:ident, $allowed:expr, { $($field:tt)+ }, $($text:tt)+) => {
        if let Some(suppressed) = $allowed {
            tracing::$level!($($field)+, suppressed, $($text)+);
        }
    };
    ($level:ident, $allowed:expr, $($text:tt)+) => {
        if let Some(suppressed) = $allowed {
            tracing::$level!(suppressed, $($text)+);
        }
    };
}

mod answers;
mod backlog;
mod capture;
mod causes;
mod ceilings;
mod contested;
mod context;
mod decoy;
mod decoys;
mod dial;
mod drain;
mod ending;
mod endpoint;
mod families;
mod flows;
mod forwards;
mod forwards_request;
mod forwards_waiting;
mod hand_off;
pub mod inbox;
mod inspect;
#[cfg(feature = "inspection")]
mod inspection;
mod inspection_request;
mod keepalive;
mod kernel_refusals;
mod knocks;
mod lane_host;
mod lanes;
mod links;
mod liveness;
mod messages;
mod outside;
mod parts;
mod peer_maker;
mod peers;
mod plain;
mod preshared;
mod publication;
mod publish;
mod reload;
mod repair;
mod reports;
mod routed;
mod routes;
mod session;
mod setup;
pub mod shell;
mod sight;
mod sources;
mod start;
mod stats;
mod stream_connections;
mod stream_ends;
mod streams;
mod timer;
mod tun;
mod unauthenticated;
mod waiting;
mod work;

use context::Context;
pub use families::Moment;
pub use publication::Publication;
pub use stats::{Ceiling, DeviceSnapshot, InUse, Snapshot, Snapshots, Summary, TcpEnd, TcpRefusal};

pub use endpoint::{StartError, remedy};
pub use forwards_request::{Ended, ForwardEnd, ForwardList, ForwardRows, ForwardsPortion, MOST_FORWARDS};
pub use inbox::{Command, Inbox};
#[cfg(feature = "inspection")]
pub use inspection::HeldMemory;
pub use inspection_request::{AskedRoutes, Asks, Inspection, MOST_FLOWS, WorkerView};
pub use knocks::used_knocks;
use outside::{Gateway, WorkerDownlink};
use parts::{DataPlane, Decoy, LaneHost, Sessions, TcpForwards, Tunnel};
pub use parts::{LaneLimits, Publisher};
pub use setup::Setup;
use sources::{Class, Party, Served};
pub use start::Addresses;
use timer::{Timer, coarse, index_u32};
pub use tun::most_mtu;
pub use unauthenticated::Unauthenticated;
use work::Rest;
pub use work::TurnWork;

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
        &self.cx.ready
    }

    /// Runs one turn: serves everything that is due and ready at `now`, with at most one batch from each source.
    pub fn turn(&mut self, now: Instant) -> Turn {
        // A source that is marked after this comes in the next turn.
        self.cx.ready.drain(&mut self.fresh);
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
        if !self.host.quiet.is_empty() {
            self.host.look_at_quiet(&mut self.cx, now);
            self.settle_effects(now);
        }
        let Self { cx, data, host, decoy, .. } = self;
        decoy.serve_decoys(cx, data, host, batches, now);
        decoy.serve_unauthenticated(cx, data, now);
        self.poll_control(now);
        self.drive_repairs(now);
        self.drive_lanes(now);
        let Self { cx, sessions, host, .. } = self;
        cx.sockets.underlays.flush(&mut host.lanes, now);
        sessions.follow_unreachable(cx, host, now);
        self.take_refusals(now);
        let Self { cx, data, sessions, host, tunnel, .. } = self;
        data.watch_send_buffers(cx, sessions, host, now);
        host.drain_captures(now);
        data.settle(cx, sessions, tunnel);
        data.send_hand_offs(cx, now);
        self.end_if_done(all_stopped);
        debug_assert!(self.cx.effects.is_empty(), "a step asked for something, and nobody did it");
        if self.cx.stats.unpublished {
            let interval = publish_interval(index_u32(self.cx.peers.len()));
            self.cx.timers.arm(Timer::Publish, now + interval);
        }
        let decoys_busy = self.decoy.flows.as_ref().is_some_and(decoys::Decoys::is_busy);
        let quic_packets = self.sessions.control.stats.quic_packets;
        self.cx.stats.work.end(&self.data.notes.work, self.cx.sockets.factory.opened, quic_packets);
        let waits = self.sessions.control.has_unread() || !self.data.plain_waiting.is_empty();
        let busy = decoys_busy
            || waits
            || !self.cx.sources.is_empty()
            || self.cx.hub.has_hand_offs(self.cx.id.index)
            || !self.cx.ready.is_empty();
        Turn { busy, deadline: self.cx.timers.next(), ended: self.ended }
    }

    /// Serves ready sources, one class after the other, as many times as sources of the class were ready at its start: a source that
    /// has more may be served again in place of one whose share is used up. Returns how often a source may have had more.
    fn serve_sources(&mut self, now: Instant) -> usize {
        let mut batches = 0;
        for class in Class::ALL {
            self.data.notes.work.begin_share(PER_TURN);
            let mut left = self.cx.sources.budget(class);
            for _ in 0..self.cx.sources.count(class) {
                if left <= 0 || class == Class::Underlay && self.data.notes.work.is_over() {
                    self.cx.stats.totals.turns_full += 1;
                    break;
                }
                let Some(token) = self.cx.sources.next(class) else { break };
                let served = self.service(token, now);
                self.settle_effects(now);
                // A socket that is empty now has given a batch, too.
                batches += usize::from(served.more || class == Class::Underlay && served.units > 0);
                // A socket that has nothing costs a system call, too.
                left -= i64::from(served.units.max(1));
                self.cx.sources.served(token, served);
            }
        }
        batches
    }

    /// Serves a ready source once; returns how much it read, and whether it may have more.
    fn service(&mut self, token: Token, now: Instant) -> Served {
        let Self { cx, data, sessions, host, tcp, tunnel, decoy, .. } = self;
        cx.stats.unpublished = true;
        data.batch.clear();
        let more = match cx.sockets.factory.source(token) {
            Some(Source::Underlay(id)) => {
                let served = self.service_underlay(id, now);
                self.take_plain(now);
                return served;
            }
            Some(Source::Local(id)) => data.service_local(cx, host, id, now),
            Some(Source::Tun) => return tunnel.service_tun(cx, data, host, now),
            Some(Source::Listener(port)) => tcp.accept_tcp(cx, sessions, port, now),
            Some(Source::Tcp(id)) => {
                let before = tcp.tcp_bytes(id);
                tcp.pump(cx, sessions, id, Cause::Tcp, now);
                let bytes = tcp.tcp_bytes(id).saturating_sub(before);
                // A connection that has more marks itself.
                return Served { more: false, units: sockets::batch::units(0, bytes) };
            }
            Some(Source::Resolve(peer)) => {
                sessions.resolved(cx, peer, token, now);
                false
            }
            Some(Source::Decoy(id)) => {
                if let Some(decoys) = &mut decoy.flows {
                    decoys.mark(id);
                }
                false
            }
            // Commands are read in every turn; a source without an entry has been closed meanwhile.
            Some(Source::Inbox) | None => false,
        };
        Served { more, units: data.batch.units() }
    }

    /// Handles a batch from a socket that carries QUIC, or the rest of a batch that an earlier turn left.
    fn service_underlay(&mut self, id: UnderlayId, now: Instant) -> Served {
        let before = (self.data.notes.work.done, self.data.notes.shares.dropped);
        let more = match self.data.rests.take_of(id) {
            Some(rest) => {
                let fresh = std::mem::replace(&mut self.data.batch, rest.batch);
                self.data.rests.keep(fresh);
                // What stands behind it in the kernel waits as long.
                self.data.notes.shares.received(rest.received.port, now - rest.since, true, now);
                self.take_batch(rest.received, rest.from, rest.since, now);
                // The datagrams of the rest were counted when the batch was received.
                self.data.batch.clear();
                true
            }
            // Without room for another rest, no batch is received that might leave one.
            None if self.data.rests.is_full() => true,
            None => self.receive_underlay(id, now),
        };
        let work = self.data.notes.work.done - before.0;
        // Datagrams that were dropped unopened cost less.
        let units = u64::from(self.data.batch.units())
            .saturating_sub(shares::saved(self.data.notes.shares.dropped - before.1));
        Served { more, units: u32::try_from(units.max(work / FRAMES_PER_UNIT)).unwrap_or(u32::MAX) }
    }

    /// Handles the received batch as far as the turn's share of work allows, and keeps the rest for the next turn; returns whether
    /// there is one.
    fn take_batch(&mut self, received: Received, from: Position, since: Instant, now: Instant) -> bool {
        let mut left = None;
        self.downlink(now, |downlink, batch| left = downlink.batch(batch, received, from));
        let Some(from) = left else { return false };
        let batch = std::mem::replace(&mut self.data.batch, self.data.rests.fresh());
        self.data.rests.push(Rest { batch, received, since, from });
        true
    }

    /// Receives a batch and handles it; returns whether there may be more.
    fn receive_underlay(&mut self, id: UnderlayId, now: Instant) -> bool {
        if self.cx.sockets.underlays.unblock(id, &mut self.host.lanes, now) {
            self.data.unblocked(&mut self.cx, &mut self.sessions, &mut self.host, id, now);
        }
        let Some(underlay) = self.cx.sockets.underlays.get_mut(id) else { return false };
        let port = match underlay.role {
            UdpRole::QuicListen => self.cx.sockets.ports.iter().position(|port| *port == id),
            UdpRole::QuicDial | UdpRole::Ingress | UdpRole::Upstream | UdpRole::Decoy => None,
        };
        let outcome = underlay.socket.receive(&mut self.data.batch);
        let is_full = self.data.batch.is_full();
        match outcome {
            Ok(()) => {}
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => {
                self.data.notes.shares.received(port, Duration::ZERO, false, now);
                return false;
            }
            // An ICMP error about an earlier packet; datagrams may wait behind it. Liveness checks find out whether it matters.
            Err(error) => {
                self.cx.stats.totals.refusals[underlay.role] += 1;
                self.sessions.report_unreachable(&mut self.cx, id, &error, now);
                return true;
            }
        }
        let last = self.data.batch.last;
        let waited = if self.data.batch.is_empty() { Duration::ZERO } else { self.data.batch.meta(0).age };
        let received = Received { underlay: id, port };
        let left = self.take_batch(received, Position::default(), now, now);
        // Joined datagrams are many: a batch that is not full may hold more than a turn takes.
        self.data.notes.shares.received(port, waited, is_full || left, now);
        left || !last
    }

    /// Runs `pass` over the received batch, then delivers the payloads and handles the notes that the pass has left.
    fn downlink(&mut self, now: Instant, pass: impl FnOnce(&mut WorkerDownlink<'_>, &mut ReceiveBatch)) {
        self.pass(now, pass);
        self.take_released(now);
    }

    fn pass(&mut self, now: Instant, pass: impl FnOnce(&mut WorkerDownlink<'_>, &mut ReceiveBatch)) {
        let mut downlink = Downlink {
            peers: &mut self.cx.peers,
            outside: Gateway {
                gate: &mut self.sessions.gate,
                control: &mut self.sessions.control,
                unauthenticated: &mut self.data.unauthenticated,
                worker: self.cx.id,
            },
            lanes: &mut self.host.lanes,
            underlays: &mut self.cx.sockets.underlays,
            locals: &mut self.cx.sockets.locals,
            tun: self.tunnel.device.as_mut().map(|tun| &mut tun.side),
            factory: &mut self.cx.sockets.factory,
            rng: &mut self.cx.rng,
            config: &self.cx.config,
            notes: &mut self.data.notes,
            outgoing: &mut self.data.outgoing,
            worker: self.cx.id,
            now,
        };
        pass(&mut downlink, &mut self.data.batch);
        self.cx.sockets.locals.flush(&self.data.batch);
        self.data.batch.forget_joined();
        if let Some(tun) = &mut self.tunnel.device {
            tun.side.flush(&self.data.batch);
        }
        self.cx.sockets.factory.close_now(&mut self.cx.sockets.locals);
        self.cx.renew_upstreams(now);
        self.take_notes(now);
    }

    /// Handles the notes that a pass over a batch of the underlay has left.
    fn take_notes(&mut self, now: Instant) {
        while let Some((peer, flow)) = self.data.notes.new_flows.pop() {
            self.cx.watch_flow(peer, flow, now);
        }
        while let Some(lane) = self.data.notes.lanes_up.pop() {
            self.host.lane_up(&mut self.cx, lane, now);
            self.settle_effects(now);
        }
        while let Some((lane, data)) = self.data.notes.challenged.pop() {
            self.host.lane_challenged(&mut self.cx, lane, data, now);
            self.settle_effects(now);
        }
        while let Some((lane, error)) = self.data.notes.violations.pop() {
            self.host.end_lane(&mut self.cx, lane, LaneLoss::Ended(Some(error)), now);
            self.settle_effects(now);
        }
        while let Some(peer) = self.data.notes.incomplete.pop() {
            self.cx.watch_queue(peer, now);
        }
        if let Some(spoofed) = self.data.notes.spoofed.take() {
            self.tunnel.warn_of_source(&mut self.cx, spoofed, now);
        }
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
            Timer::Pool(peer) => sessions.pool_timeout(cx, peer, now),
            Timer::Hello(handle) => self.send_deferred_hello(handle, now),
            Timer::Flow(peer, flow) => data.flow_timeout(cx, host, peer, flow, now),
            Timer::Repair(peer) => self.drive_plain_repair(peer, now),
            Timer::Queue(peer) => {
                if let Some(state) = cx.peers.get_mut(peer) {
                    state.data.relay.expire(now);
                }
                data.look_at_queue(cx, host, peer, now);
            }
            Timer::Listener(port) => tcp.wake_listener(cx, port),
            Timer::Left(handle) => sessions.close_left(cx, handle, now),
            Timer::Join(handle) => sessions.early_join_timeout(cx, handle, now),
            Timer::SendBuffer(id) => data.send_buffer_timeout(cx, sessions, host, id, now),
            Timer::Dial(peer) => sessions.dial(cx, peer, now),
            Timer::Tcp(id) => tcp.tcp_timeout(cx, sessions, id, now),
            Timer::Keepalive => tcp.look_at_watched(cx, sessions, now),
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
        self.cx.sockets.underlays.finish(&mut self.host.lanes, now);
        while let Some(id) = self.host.lanes.next_touched() {
            self.host.note_heard(&mut self.cx, id, now);
            self.settle_effects(now);
            self.host.note_path_packet(&mut self.cx, id, now);
            self.settle_effects(now);
            let Some(slot) = self.host.lanes.get_mut(id) else { continue };
            let (underlay, path) = (slot.underlay, slot.path());
            if slot.is_exhausted() {
                self.host.end_lane(&mut self.cx, id, LaneLoss::Ended(None), now);
                self.settle_effects(now);
                continue;
            }
            if slot.note_near_limit(now) {
                let lane = lane_host::name_of_lane(slot);
                self.cx.send_to_owner(lane, WorkerMessage::LaneNearLimit { lane });
                self.settle_effects(now);
            }
            let Self { cx, host, .. } = self;
            host.send_report(cx, id, now);
            let lanes = &mut host.lanes;
            let underlays = &mut cx.sockets.underlays;
            while let Some((data, path, most)) =
                lanes.get_mut(id).and_then(|slot| slot.paths.due_challenge(now))
            {
                underlays.packet(lanes, underlay, &path, most, now, |lanes, tail| {
                    lanes.get_mut(id)?.core.seal_path_challenge(data, tail, now).ok()
                });
            }
            if let Some(path) = path {
                while let Some(most) = lanes.get(id).map(|slot| slot.core.transmit_capacity(now))
                    && underlays.packet(lanes, underlay, &path, most, now, |lanes, tail| {
                        lanes.get_mut(id)?.core.poll_transmit(tail, now).ok().flatten()
                    })
                {}
            }
            if let Some(slot) = lanes.get_mut(id) {
                if let Some(peer) = cx.peers.get(slot.peer) {
                    slot.charge(&peer.data.relay.share.account, now);
                }
                if let Some(at) = slot.poll_timeout() {
                    cx.timers.arm(Timer::Lane(id), at);
                }
            }
        }
    }
}

impl Context {
    /// Queues a source that may have something to read.
    fn add_source(&mut self, tcp: &TcpForwards, token: Token) {
        let of_peer = |peer| (Class::Local, Party::Peer(peer));
        let (class, party) = match self.sockets.factory.source(token) {
            Some(Source::Underlay(_)) => (Class::Underlay, Party::Source(token)),
            Some(Source::Local(id)) => match self.sockets.locals.get(id).map(|socket| socket.local) {
                Some(Local::Ingress { peer, .. } | Local::Upstream { peer, .. }) => of_peer(peer),
                None => return,
            },
            Some(Source::Tcp(id)) => match tcp.open.get(id.0 as usize) {
                Some(opened) => of_peer(opened.peer),
                None => return,
            },
            Some(Source::Tun) => (Class::Device, Party::Source(token)),
            Some(Source::Listener(_) | Source::Resolve(_) | Source::Decoy(_) | Source::Inbox) => {
                (Class::Other, Party::Source(token))
            }
            // The source has been closed meanwhile.
            None => return,
        };
        self.sources.add(token, class, party);
    }
}
