//! A worker: one thread's share of everything, driven in turns.
//!
//! | question | file |
//! |---|---|
//! | what happens in a turn, in which order | this one: [`Worker::turn`] |
//! | which source has its turn, and how much of it | `sources.rs` |
//! | how much work a turn takes, and what is left of a batch that holds more | `work.rs` |
//! | what waits for room in a socket | `waiting.rs` |
//! | what it is made of, and how it begins | `start.rs` |
//! | dialling, and what an operator is told when it fails | `dial.rs` |
//! | what control messages lead to | `session.rs` |
//! | how connections, sessions and flows end | `ending.rs` |
//! | when flows and what waits for them have been silent for too long; what is said of datagrams that nobody takes | `flows.rs` |
//! | the QUIC endpoint, and who may connect | `endpoint.rs` |
//! | whether a session still answers, and what keeps it alive | `vigil.rs` |
//! | the lanes of a session that this worker owns: asked for, lost, asked for again | `lanes.rs` |
//! | the lanes that this worker keeps: opened, found silent, drained | `keeper.rs` |
//! | what a change of addresses leads to | `routes.rs` |
//! | what workers tell each other, and how | `orders.rs`, `exchange.rs`; how nothing of it is lost or waits for ever: `mailbox.rs` |
//! | peers that are added and removed meanwhile | `peers.rs` |
//! | another configuration meanwhile | `reload.rs` |
//! | what came to the wrong worker | `handover.rs` |
//! | the lanes that an operator looks at | `capture.rs` |
//! | strangers' datagrams to the decoy, its answers back | `strangers.rs` (what waits), `decoy.rs` |
//! | peers without lanes: standard mode | `plain.rs` |
//! | TCP forwards | `streams.rs`; what waits to become one | `backlog.rs` |
//! | the connections that carry TCP forwards beside the control connection | `stream_connections.rs` |
//! | the TUN device | `tun.rs` |
//! | sockets, names, tokens | `doors.rs` |
//! | the knocks that were used, over a restart | `knocks.rs` |
//! | the thread and the runtime around it | `shell.rs` |
//! | what it counts itself, and how others see it | `books.rs` |
//! | what an operator is told when a ceiling is reached | `ceilings.rs` |
//! | how its counts reach a snapshot | `publish.rs` |
//! | which metrics are made of them, one line each | `families.rs` |
//! | what an operator may look at inside it | `inspect.rs` |
//! | whole agents in memory and virtual time, for tests | `simulation/` |
//!
//! A worker has no thread, no clock and no sockets of its own: `turn` takes the time, [`io::Net`](net::Net) gives
//! the sockets. The daemon runs it over the kernel, tests run it over `io::memory`.
//!
//! ```text
//!   turn:  commands, orders → hand-over → timers → ready sources, a batch each, within budgets → some of the decoy's answers → control connections → lanes' own packets → send → count
//! ```

use std::{
    collections::VecDeque,
    io,
    sync::Arc,
    time::{Duration, Instant},
};

use config::Config;
use dataplane::{
    forward::{
        Local, Locals,
        tcp::{self, TcpForward, TcpId},
        tun::TunSide,
    },
    lanes::{Due, LaneId, Lanes, STRANGERS, UnderlayId, Underlays},
    relay::FlowId,
};
use gate::{Gate, Own, refusals::Refusals, tls::TlsIdentity};
use quinn_proto::ConnectionHandle;
use slab::Slab;
use wire::{
    cid::ConnectionIds,
    clock::Clock,
    fault::{self, Fault},
    hash::{Issued, PeerMap},
    ids::{LocalId, PeerId, WorkerId},
    messages::Features,
    rate::Lines,
    throttle::Throttle,
    timers::Timers,
};
use {
    net as sockets,
    net::{Ready, ReceiveBatch, TcpListener, Token, UdpRole},
};

use crate::{
    control::driver::{Control, Event},
    datapath::{
        downlink::{Downlink, Notes, Place, Received},
        shares,
        uplink::Uplink,
        work::{FRAMES_PER_UNIT, Work},
    },
    peer::Peer,
    roster::Roster,
    tunnel::Board,
};

mod backlog;
mod books;
mod capture;
mod ceilings;
mod decoy;
mod dial;
mod doors;
mod ending;
mod endpoint;
mod exchange;
mod families;
mod flows;
mod handover;
mod inspect;
mod keeper;
mod knocks;
mod lanes;
mod mailbox;
mod orders;
mod peers;
mod plain;
mod publish;
mod reload;
mod routes;
mod session;
pub mod shell;
#[doc(hidden)]
#[cfg(any(test, feature = "simulation"))]
pub mod simulation;
mod sources;
mod start;
mod strangers;
mod stream_connections;
mod streams;
#[cfg(test)]
mod tests;
mod tun;
mod vigil;
mod waiting;
mod work;

pub use books::{DeviceSnapshot, InUse, Snapshot, Snapshots, SocketBooks, Summary};
pub use ceilings::Ceiling;
pub(crate) use ceilings::Refused;
pub use doors::{Doors, Source, StreamKey, more_ports, port_plan};
pub use exchange::Exchange;
use exchange::{LaneLoss, Order};
pub use handover::Outgoing;
pub use inspect::{Asks, Inspection, MOST_FLOWS, WorkerView};
pub use keeper::LaneLimits;
pub use knocks::used_knocks;
pub use publish::Publisher;
use sources::{Class, Party, Served};
pub use start::remedy;
pub use start::{Addresses, Setup, StartError, TunSetup};
pub use strangers::Strangers;
pub use streams::TcpRefusal;
pub use tun::most_mtu;
pub use work::TurnWork;
use work::{Rest, Rests};

/// How often counts are published while there is something new.
const PUBLISH_INTERVAL: Duration = Duration::from_millis(50);

/// How much longer that takes for each peer: publishing costs half a microsecond per peer, and so 0.2 % of a CPU at most
/// (docs/reliability.md).
const PUBLISH_PER_PEER: Duration = Duration::from_micros(200);

/// How often idle peers are looked after: keepalives, kernel drop counters.
const HOUSEKEEPING_INTERVAL: Duration = Duration::from_secs(1);

/// The interval between log lines about the same recurring condition.
const LOG_INTERVAL: Duration = Duration::from_secs(10);

/// A command from outside.
#[derive(Clone, Debug)]
pub enum Command {
    /// Stop taking traffic in, tell the peers, end.
    Shutdown {
        /// How long that may take.
        within: Duration,
    },
    /// Say what it has, for an operator.
    Inspect(Arc<Inspection>),
}

/// When the worker wants its next turn.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Turn {
    /// At once: sources still have something.
    pub busy: bool,
    /// Else at this time, or when a source is ready.
    pub deadline: Option<Instant>,
    /// Never: it has shut down.
    pub ended: bool,
}

/// What a deadline is for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
enum Timer {
    Connection(usize),
    Lane(LaneId),
    Pool(PeerId),
    Flow(PeerId, FlowId),
    Queue(PeerId),
    Outbox(UnderlayId),
    Dial(PeerId),
    Hello(ConnectionHandle),
    Join(ConnectionHandle),
    Tcp(TcpId),
    Listener(usize),
    Publish,
    Housekeeping,
    Decoys,
    Stop,
}

impl Issued for Timer {}

/// One worker.
pub struct Worker {
    config: Arc<Config>,
    identity: Arc<TlsIdentity>,
    instance: [u8; 16],
    /// Which worker this is, and of how many.
    id: WorkerId,
    exchange: Arc<Exchange>,
    /// Who the peers are.
    roster: Arc<Roster>,
    /// What goes to other workers at the end of the turn.
    outgoing: Outgoing,
    /// What came from them and has not been looked at.
    parcels: VecDeque<handover::Parcel>,
    /// It has shut down and said so.
    stopped: bool,
    /// The listening sockets, in the order of `transport.listen`.
    ports: Vec<UnderlayId>,
    ready: Ready,
    doors: Doors,
    ids: ConnectionIds,
    own: Arc<Own>,
    clock: Arc<dyn Clock + Send + Sync>,
    gate: Gate,
    refusals: Arc<Refusals>,
    control: Control,
    /// By [`PeerId`].
    peers: Vec<Peer>,
    /// By place in [`Config::peers`]: which peer bears that name now.
    forward_peers: Vec<PeerId>,
    lanes: Lanes,
    /// What operators look at; nothing, almost always.
    captures: Vec<capture::Armed>,
    underlays: Underlays,
    locals: Locals,
    /// The TUN device, of an agent that has one, and where the tunnel's thread reads what fits into packets.
    tun: Option<(TunSide, Arc<Board>)>,
    /// What came from strangers in this turn.
    strangers: Strangers,
    /// Where it goes, at worker 0 of an agent with a decoy.
    decoys: Option<decoy::Decoys>,
    /// By place in [`Config::tcp`]; none where the port is closed.
    listeners: Vec<Option<(Box<dyn TcpListener>, Token)>>,
    tcp: Slab<(StreamKey, PeerId, TcpForward)>,
    /// Keyed by streams that a peer opened, and chose which of them stay open.
    tcp_by_stream: PeerMap<StreamKey, TcpId>,
    timers: Timers<Timer>,
    /// What is due in this turn.
    due: Vec<Timer>,
    /// Sources that have, or may have, something.
    sources: sources::Sources,
    fresh: Vec<Token>,
    batch: Box<ReceiveBatch>,
    notes: Notes,
    /// What is left of batches that held more work than a turn takes.
    rests: Rests,
    /// What this turn did.
    work: TurnWork,
    /// Connections of peers in standard mode that have more frames than a turn takes.
    plain_waiting: Vec<ConnectionHandle>,
    events: Vec<(ConnectionHandle, Event)>,
    inbox: Arc<shell::Inbox>,
    stopping: bool,
    ended: bool,
    /// Something happened since the last publication.
    unpublished: bool,
    metrics: Publisher,
    totals: books::Totals,
    ceilings: ceilings::Ceilings,
    too_large_log: Throttle,
    refusal_log: Throttle,
    accept_log: Throttle,
    lane_logs: lanes::LaneLogs,
    lane_limits: LaneLimits,
    /// What it does not say that it can do: for tests.
    withheld: Features,
    drops_log: Throttle,
    resolve_log: Throttle,
    service_log: Throttle,
    journal_log: Throttle,
    tun_log: Throttle,
    source_log: Throttle,
    loop_log: Throttle,
    /// Peers that packets of the device were for, in this batch.
    served: Vec<PeerId>,
    /// Whose queue is sent from first, once a socket has room again: who comes after the first that got something the last time.
    first_to_drain: usize,
    violation_log: Throttle,
    /// What is said at debug level of single events.
    details_log: Lines,
    /// Forwards whose streams have something to say, each once.
    stirred: Vec<TcpId>,
    /// How often a forward was served.
    passes: u64,
    tcp_scratch: tcp::Scratch,
}

impl Worker {
    /// Lowers the limits of lanes that are opened from now on, so that a test can reach them.
    #[doc(hidden)]
    pub fn set_lane_limits(&mut self, limits: LaneLimits) {
        self.lane_limits = limits;
    }

    /// Says to peers that it cannot do `features`, as an older version does, so that a test can tell.
    #[doc(hidden)]
    pub fn withhold(&mut self, features: Features) {
        self.withheld = features;
    }

    /// Where commands are put.
    #[must_use]
    pub fn inbox(&self) -> Arc<shell::Inbox> {
        Arc::clone(&self.inbox)
    }

    /// The queue of ready sources.
    #[must_use]
    pub fn ready(&self) -> &Ready {
        &self.ready
    }

    /// One turn: everything that is due and ready at `now`, at most one batch from each source.
    pub fn turn(&mut self, now: Instant) -> Turn {
        // First: who is marked from now on comes in the next turn.
        self.ready.drain(&mut self.fresh);
        let mut fresh = std::mem::take(&mut self.fresh);
        for token in fresh.drain(..) {
            self.add_source(token);
        }
        self.fresh = fresh;
        self.notes.work = Work::default();
        self.notes.shares.begin_turn(now);
        self.work.begin(self.doors.opened());
        self.control.begin_turn();
        self.rests.forget(|id| self.underlays.get(id).is_none());
        let all_stopped = self.exchange.all_stopped();
        fault::point(Fault::Worker);
        self.commands(now);
        self.read_orders(now);
        self.take_parcels(now);
        // All that are due now, and not what they arm: a deadline that is set to the past comes again in the next turn.
        while let Some(timer) = self.timers.pop(now) {
            self.due.push(timer);
        }
        for place in 0..self.due.len() {
            self.timeout(self.due[place], now);
        }
        self.due.clear();
        let batches = self.serve_sources(now);
        self.serve_decoys(batches, now);
        self.serve_strangers(now);
        self.poll_control(now);
        self.see_to_lanes(now);
        self.underlays.flush(&mut self.lanes, now);
        self.see_to_unreachable(now);
        self.watch_outboxes(now);
        self.see_to_captures(now);
        self.settle();
        self.hand_over(now);
        self.end_if_done(all_stopped);
        if self.unpublished {
            let peers = number(self.peers.len());
            let interval = PUBLISH_INTERVAL + PUBLISH_PER_PEER.saturating_mul(peers);
            self.timers.arm(Timer::Publish, now + interval.min(HOUSEKEEPING_INTERVAL));
        }
        let decoys_busy = self.decoys.as_ref().is_some_and(decoy::Decoys::is_busy);
        self.work.end(&self.notes.work, self.doors.opened());
        let waits = self.control.has_unread() || !self.plain_waiting.is_empty();
        let busy = decoys_busy
            || waits
            || !self.sources.is_empty()
            || !self.parcels.is_empty()
            || !self.ready.is_empty();
        Turn { busy, deadline: self.timers.next(), ended: self.ended }
    }

    /// Serves the sources that have something, in turn, as many of a class as were ready when it began: one that has more may be
    /// served again, in the place of one whose share is used up. Returns how many times there may have been more.
    fn serve_sources(&mut self, now: Instant) -> usize {
        let mut batches = 0;
        for class in Class::ALL {
            self.notes.work.begin_share();
            let mut left = self.sources.budget(class);
            for _ in 0..self.sources.count(class) {
                if left <= 0 || class == Class::Underlay && self.notes.work.is_over() {
                    self.totals.turns_full += 1;
                    break;
                }
                let Some(token) = self.sources.next(class) else { break };
                let served = self.service(token, now);
                batches += usize::from(served.more);
                left -= i64::from(served.units);
                self.sources.served(token, served);
            }
        }
        batches
    }

    /// Notes that a source has, or may have, something.
    fn add_source(&mut self, token: Token) {
        let peers = |peer| (Class::Local, Party::Peer(peer));
        let (class, party) = match self.doors.source(token) {
            Some(Source::Underlay(_)) => (Class::Underlay, Party::Source(token)),
            Some(Source::Local(id)) => match self.locals.get(id).map(|socket| socket.local) {
                Some(Local::Ingress { peer, .. } | Local::Upstream { peer, .. }) => peers(peer),
                None => return,
            },
            Some(Source::Tcp(id)) => match self.tcp.get(id.0 as usize) {
                Some((_, peer, _)) => peers(*peer),
                None => return,
            },
            Some(Source::Tun) => (Class::Device, Party::Source(token)),
            Some(Source::Listener(_) | Source::Resolve(_) | Source::Decoy(_) | Source::Inbox) => {
                (Class::Other, Party::Source(token))
            }
            // It has been closed meanwhile.
            None => return,
        };
        self.sources.add(token, class, party);
    }

    /// Gives one ready source its share of the turn.
    fn service(&mut self, token: Token, now: Instant) -> Served {
        self.unpublished = true;
        self.batch.clear();
        let more = match self.doors.source(token) {
            Some(Source::Underlay(id)) => {
                let served = self.service_underlay(id, now);
                self.take_plain(now);
                return served;
            }
            Some(Source::Local(id)) => self.service_local(id, now),
            Some(Source::Tun) => self.service_tun(now),
            Some(Source::Listener(place)) => self.accept_tcp(place, now),
            Some(Source::Tcp(id)) => {
                let before = self.tcp_bytes(id);
                self.pump(id, now);
                let bytes = self.tcp_bytes(id).saturating_sub(before);
                // What it has more of, it reports.
                return Served { more: false, units: sockets::batch::units(0, bytes) };
            }
            Some(Source::Resolve(peer)) => {
                self.resolved(peer, token, now);
                false
            }
            Some(Source::Decoy(id)) => {
                if let Some(decoys) = &mut self.decoys {
                    decoys.mark(id);
                }
                false
            }
            // Commands are looked at in every turn; what has been closed meanwhile has nothing to say.
            Some(Source::Inbox) | None => false,
        };
        Served { more, units: self.batch.units() }
    }

    /// A batch from a socket that carries QUIC, or what an earlier turn left of one.
    fn service_underlay(&mut self, id: UnderlayId, now: Instant) -> Served {
        let before = (self.notes.work.done(), self.notes.shares.dropped());
        let more = match self.rests.take_of(id) {
            Some(rest) => {
                self.resume(rest, now);
                true
            }
            // Where nothing more can be laid aside nothing is taken that may have to be.
            None if self.rests.is_full() => true,
            None => self.receive_underlay(id, now),
        };
        let work = self.notes.work.done() - before.0;
        // What was dropped unopened cost less.
        let units = u64::from(self.batch.units())
            .saturating_sub(shares::saved(self.notes.shares.dropped() - before.1));
        Served { more, units: u32::try_from(units.max(work / FRAMES_PER_UNIT)).unwrap_or(u32::MAX) }
    }

    /// Goes on with what an earlier turn left of a batch.
    fn resume(&mut self, rest: Rest, now: Instant) {
        let fresh = std::mem::replace(&mut self.batch, rest.batch);
        self.rests.keep(fresh);
        self.take_batch(rest.received, rest.from, now);
        // What it counts for in datagrams it counted for when it came.
        self.batch.clear();
    }

    /// Takes the received batch as far as the turn's share of work goes, and lays the rest aside.
    fn take_batch(&mut self, received: Received, from: Place, now: Instant) {
        let mut left = None;
        self.downlink(now, |downlink, batch| left = downlink.batch(batch, received, from));
        if let Some(from) = left {
            let batch = std::mem::replace(&mut self.batch, self.rests.fresh());
            self.rests.lay_aside(Rest { batch, received, from });
        }
    }

    fn receive_underlay(&mut self, id: UnderlayId, now: Instant) -> bool {
        if self.underlays.unblock(id, &mut self.lanes, now) {
            self.unblocked(id, now);
        }
        let Some(underlay) = self.underlays.get_mut(id) else { return false };
        let port = match underlay.role {
            UdpRole::QuicListen => self.ports.iter().position(|port| *port == id),
            UdpRole::QuicDial | UdpRole::Ingress | UdpRole::Upstream | UdpRole::Decoy => None,
        };
        let outcome = underlay.socket.receive(&mut self.batch);
        if let Some(port) = port {
            self.notes.shares.received(port, self.batch.is_full(), now);
        }
        match outcome {
            Ok(()) => {}
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => return false,
            // An ICMP error about an earlier packet; more may wait behind it. The other end's silence says the rest.
            Err(error) => {
                self.totals.refusals[books::role_place(underlay.role)] += 1;
                self.report_unreachable(id, &error, now);
                return true;
            }
        }
        let received = Received { underlay: id, port };
        self.take_batch(received, Place::default(), now);
        true
    }

    /// Lets `pass` take the received batch, then delivers what it listed and does what it noted.
    fn downlink(&mut self, now: Instant, pass: impl FnOnce(&mut Downlink<'_>, &mut ReceiveBatch)) {
        let mut downlink = Downlink {
            peers: &mut self.peers,
            gate: &mut self.gate,
            control: &mut self.control,
            lanes: &mut self.lanes,
            underlays: &mut self.underlays,
            locals: &mut self.locals,
            tun: self.tun.as_mut().map(|(tun, _)| tun),
            doors: &mut self.doors,
            config: &self.config,
            notes: &mut self.notes,
            outgoing: &mut self.outgoing,
            strangers: &mut self.strangers,
            worker: self.id,
            now,
        };
        pass(&mut downlink, &mut self.batch);
        self.locals.flush(&self.batch);
        if let Some((tun, _)) = &mut self.tun {
            tun.flush(&self.batch);
        }
        self.doors.close_now(&mut self.locals);
        self.renew_upstreams(now);
        self.take_notes(now);
    }

    /// A batch from a local socket.
    fn service_local(&mut self, id: LocalId, now: Instant) -> bool {
        if self.stopping {
            // Nothing more is taken in: what comes now stays with the kernel.
            return false;
        }
        let Some(socket) = self.locals.get_mut(id) else { return false };
        let local = socket.local;
        if let Err(error) = socket.socket.receive(&mut self.batch) {
            if error.kind() == io::ErrorKind::WouldBlock {
                return false;
            }
            self.report_refusal(&local, &error, now);
            return true;
        }
        self.locals.touch(id);
        let (Local::Ingress { peer, .. } | Local::Upstream { peer, .. }) = local;
        if !self.is_live(peer) {
            self.drop_batch_of_removed(peer);
            return true;
        }
        let Some(state) = self.peers.get_mut(peer.0 as usize) else { return false };
        let mut uplink = state.uplink(&mut self.lanes, &mut self.underlays, &mut self.outgoing, now);
        match local {
            Local::Ingress { ingress, .. } => {
                let mut new_flows = Vec::new();
                uplink.ingress(&self.batch, id, ingress, &self.config.limits, &mut new_flows);
                for flow in new_flows {
                    self.watch_flow(peer, flow, now);
                }
            }
            Local::Upstream { flow, .. } => uplink.upstream(&self.batch, flow),
        }
        self.report_too_large(peer, now);
        self.watch_queue(peer, now);
        true
    }

    /// What a pass over a batch of the underlay left to be done.
    fn take_notes(&mut self, now: Instant) {
        while let Some((peer, flow)) = self.notes.new_flows.pop() {
            self.watch_flow(peer, flow, now);
        }
        while let Some(lane) = self.notes.lanes_up.pop() {
            self.lane_up(lane, now);
        }
        while let Some((lane, data)) = self.notes.challenged.pop() {
            self.lane_challenged(lane, data, now);
        }
        while let Some((lane, error)) = self.notes.violations.pop() {
            self.end_lane(lane, LaneLoss::Ended(Some(error)), now);
        }
        while let Some(peer) = self.notes.incomplete.pop() {
            self.watch_queue(peer, now);
        }
        if let Some((peer, source)) = self.notes.spoofed.take() {
            self.warn_of_source(peer, source, now);
        }
    }

    fn timeout(&mut self, timer: Timer, now: Instant) {
        // What it leads to, such as a packet that is sent, is counted.
        self.unpublished |= timer != Timer::Publish;
        match timer {
            Timer::Connection(place) => self.control.timeout(ConnectionHandle(place), now),
            Timer::Lane(id) => self.lane_timeout(id, now),
            Timer::Pool(peer) => self.pool_timeout(peer, now),
            Timer::Hello(handle) => self.greet(handle, now),
            Timer::Flow(peer, flow) => self.flow_timeout(peer, flow, now),
            Timer::Queue(peer) => {
                if let Some(state) = self.peers.get_mut(peer.0 as usize) {
                    state.relay.expire(now);
                }
                self.watch_queue(peer, now);
            }
            Timer::Listener(place) => self.wake_listener(place),
            Timer::Join(handle) => self.early_join_timeout(handle, now),
            Timer::Outbox(id) => self.outbox_timeout(id, now),
            Timer::Dial(peer) => self.dial(peer, now),
            Timer::Tcp(id) => self.tcp_timeout(id, now),
            Timer::Publish => self.publish(now),
            Timer::Housekeeping => {
                self.housekeeping(now);
                self.rests.tidy();
                self.timers.arm(Timer::Housekeeping, now + HOUSEKEEPING_INTERVAL);
            }
            Timer::Decoys => self.end_silent_strangers(now),
            Timer::Stop => self.ended = true,
        }
    }

    fn lane_timeout(&mut self, id: LaneId, now: Instant) {
        let Some(slot) = self.lanes.get_mut(id) else { return };
        match slot.on_timeout(now) {
            Due::Nothing => {
                if let Some(at) = slot.poll_timeout() {
                    self.timers.arm(Timer::Lane(id), at);
                }
            }
            Due::Transmit => {
                self.lanes.touch(id);
                self.check_silence(id, now);
            }
            Due::Moved => self.lane_up(id, now),
            Due::Reopen => self.end_lane(id, LaneLoss::Unvalidated, now),
            Due::Remove => self.remove_lane(id, now),
        }
    }

    /// Lanes that sent or received: their challenges, acknowledgements and probes, then their deadlines.
    fn see_to_lanes(&mut self, now: Instant) {
        self.underlays.finish(&mut self.lanes, now);
        while let Some(id) = self.lanes.next_touched() {
            self.note_heard(id, now);
            self.note_path_packet(id, now);
            let Some(slot) = self.lanes.get_mut(id) else { continue };
            let (underlay, path) = (slot.underlay, slot.path());
            if slot.exhausted {
                self.end_lane(id, LaneLoss::Ended(None), now);
                continue;
            }
            if slot.note_worn(now) {
                let lane = keeper::name_of_lane(slot);
                self.tell_owner(lane, Order::LaneWorn { lane }, now);
            }
            while let Some((data, path, most)) =
                self.lanes.get_mut(id).and_then(|slot| slot.due_challenge(now))
            {
                self.underlays.packet(&mut self.lanes, underlay, &path, most, now, |lanes, tail| {
                    lanes.get_mut(id)?.core.seal_path_challenge(data, tail, now).ok()
                });
            }
            if let Some(path) = path {
                while let Some(most) = self.lanes.get(id).map(|slot| slot.core.transmit_capacity(now))
                    && self.underlays.packet(&mut self.lanes, underlay, &path, most, now, |lanes, tail| {
                        lanes.get_mut(id)?.core.poll_transmit(tail, now).ok().flatten()
                    })
                {}
            }
            if let Some(at) = self.lanes.get(id).and_then(|slot| slot.poll_timeout()) {
                self.timers.arm(Timer::Lane(id), at);
            }
        }
    }

    /// The way of datagrams to a peer.
    fn uplink(&mut self, peer: PeerId, now: Instant) -> Option<Uplink<'_>> {
        let state = self.peers.get_mut(peer.0 as usize)?;
        Some(state.uplink(&mut self.lanes, &mut self.underlays, &mut self.outgoing, now))
    }

    /// Books what became of payloads in outboxes and deliveries.
    fn settle(&mut self) {
        for settled in self.underlays.settlements().chain(self.control.settlements()) {
            if let Some(peer) = self.peers.get_mut(settled.peer.0 as usize) {
                peer.relay.settle_uplink(settled);
            } else if settled.peer == STRANGERS {
                self.strangers.settle(&settled);
            }
        }
        let written = self.tun.as_mut().map(|(tun, _)| tun.settlements()).into_iter().flatten();
        for settled in self.locals.settlements().chain(written) {
            if let Some(peer) = self.peers.get_mut(settled.peer.0 as usize) {
                peer.relay.settle_downlink(settled);
            }
        }
    }

    fn commands(&mut self, now: Instant) {
        while let Some(command) = self.inbox.take() {
            match command {
                Command::Shutdown { within } => self.shut_down(within, now),
                Command::Inspect(inspection) => self.inspect(&inspection, now),
            }
        }
    }
}

/// A place in a list of the configuration as an identifier; such lists are far shorter than 2^32.
fn number(place: usize) -> u32 {
    u32::try_from(place).unwrap_or(u32::MAX)
}
