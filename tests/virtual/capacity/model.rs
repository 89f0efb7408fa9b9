//! The model: peers that dial by the agent's dialler, exits that admit by its budget and its limit on handshakes. Packets take half
//! a round trip, and work at an exit waits for the worker; what is inside a packet does not matter.
//!
//! ```text
//!   exit dies ──noticed_after──► Suspect ──Dialler──► Initial ─► queue of the worker ─► Budget, Pending ─► Answer
//!                                                                                                         │
//!        Up ◄── lane asked for, accepted, validated ◄── Established ◄── hello, after hello_delay ◄────────┘
//! ```

use std::{
    cmp::Reverse,
    collections::{BTreeMap, BTreeSet, BinaryHeap, VecDeque},
    net::{IpAddr, Ipv4Addr, SocketAddr},
    time::{Duration, Instant},
};

use base::{
    clock::{Clock as _, ManualClock},
    ids::PeerId,
};
use engine::control::{
    dial::{Dialler, IDLE_INTERVAL, Step},
    driver::accept::Pending,
    liveness::{LEAST_SILENCE, hello_delay},
};
use gate::{
    admission::Room,
    budget::{Budget, Take},
    identity::Endpoint,
};
use net::Token;
use quinn_proto::ConnectionHandle;
use rand::{SeedableRng, rngs::StdRng};

use crate::{
    scenario::{Change, Costs, Outcome, Refused, Scenario},
    silence::noticed_after,
};

/// The port of every exit.
const PORT: u16 = 4433;

/// Flights from the hello of the listener until a lane carries payloads: request, answer, challenge, response.
const LANE_FLIGHTS: u32 = 4;

/// The delay before a client repeats its first packet, which doubles with each (RFC 9002 §6.2.2: three initial round trips).
const FIRST_REPEAT: Duration = Duration::from_millis(999);

/// After this time without an answer an attempt is over (`max_idle_timeout`).
const ATTEMPT_LIMIT: Duration = Duration::from_secs(30);

/// Datagrams of a first flight.
const FIRST_FLIGHT: usize = 2;

/// Datagrams of 1,200 bytes that a socket's buffer holds with the default `limits.receive_rate`: 4 MiB at 2,304 bytes each.
const MOST_WAITING: usize = 1_820;

/// The default `limits.handshakes`.
const HANDSHAKES: usize = 256;

/// The default `peer.queue.time`.
const QUEUE_TIME: Duration = Duration::from_millis(100);

/// The number of phases between two packets for which the time until an exit is missed is worked out.
const PHASES: u32 = 64;

/// Runs a scenario with the randomness of `seed`.
pub(crate) fn run(scenario: &Scenario, seed: u64) -> Outcome {
    let mut model = Model::new(scenario, seed);
    model.connect_all();
    let changes = scenario.changes.iter();
    for (at, exit, change) in changes {
        model.schedule(model.start + *at, Event::Change(*exit, *change));
    }
    model.run_until(model.start + scenario.length);
    model.outcome()
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Event {
    Change(usize, Change),
    /// The dialler of a peer may have something to do.
    Dial(usize),
    /// A peer without a working session wants to send a packet.
    Traffic(usize),
    /// A peer has heard nothing in this session for too long.
    Suspect(usize, u64),
    /// The exit has asked a peer to leave.
    Leave(usize, u64),
    /// The exit has closed a session.
    Closed(usize, u64),
    /// The first packets of an attempt, with a Retry token or without, are due for the `n`th time.
    Repeat {
        attempted: Attempted,
        retried: bool,
        times: u32,
    },
    Arrives(Attempted, Kind),
    /// A worker has done its work.
    Free {
        exit: usize,
        worker: usize,
        process: u32,
    },
    /// The exit asks a client to prove its address.
    Retry(Attempted),
    /// The exit's part of a handshake arrives.
    Answer(Attempted),
    /// The client's answer, and its hello, leave.
    Hello(Attempted),
    /// The exit's hello arrives.
    Established(Attempted),
    /// A lane carries payloads.
    Up(usize, u64),
    /// An attempt is over.
    Over(Attempted),
    /// The exit learns that a client has given up.
    Dropped(Attempted),
}

/// An attempt of a peer at a process of an exit.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
struct Attempted {
    peer: usize,
    handle: usize,
    exit: usize,
}

/// A packet of a handshake.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Kind {
    First { fallback: bool, retried: bool },
    Hello,
}

#[derive(Clone, Copy, Debug)]
struct Attempt {
    fallback: bool,
    retried: bool,
    answered: bool,
}

/// A session, as its peer sees it.
#[derive(Clone, Copy, Debug)]
struct Session {
    number: u64,
    exit: usize,
    process: u32,
    suspect: bool,
    leaving: bool,
}

struct Peer {
    dialler: Dialler,
    attempts: BTreeMap<usize, Attempt>,
    session: Option<Session>,
    /// The process of an exit that gets the peer's packets.
    served: Option<(usize, u32)>,
    without_since: Option<Instant>,
    /// The time of its first packet after the start.
    phase: Duration,
    /// Whether a [`Event::Traffic`] is scheduled.
    sends: bool,
    /// The time of the next [`Event::Dial`].
    woken: Option<Instant>,
}

struct Exit {
    /// The number of its process; 0 while there is none.
    process: u32,
    started: u32,
    drains: bool,
    workers: Vec<Worker>,
    /// When sessions began that peers brought from elsewhere or anew.
    taken: Vec<Instant>,
}

struct Worker {
    budget: Budget,
    pending: Pending,
    /// Attempts that were admitted: what else comes of them is a repetition.
    admitted: BTreeSet<usize>,
    queue: VecDeque<(Attempted, Kind)>,
    waiting: usize,
    busy: bool,
    /// CPU time spent in each second of the run.
    spent: BTreeMap<u64, Duration>,
}

struct Model<'a> {
    scenario: &'a Scenario,
    start: Instant,
    now: Instant,
    rng: StdRng,
    events: BinaryHeap<Reverse<(Instant, u64, Event)>>,
    scheduled: u64,
    handles: usize,
    sessions: u64,
    peers: Vec<Peer>,
    exits: Vec<Exit>,
    /// The time until a peer misses its exit, by the phase between two of its packets.
    noticed: Vec<Duration>,
    outcome: Outcome,
}

impl<'a> Model<'a> {
    fn new(scenario: &'a Scenario, seed: u64) -> Self {
        let start = ManualClock::default().now();
        let phases = (0..PHASES).map(|phase| {
            let phase = scenario.interval.mul_f64((f64::from(phase) + 0.5) / f64::from(PHASES));
            noticed_after(scenario.interval, phase, scenario.round_trip)
        });
        let peers = (0..scenario.peers).map(|number| {
            let endpoints = scenario.endpoints_of(number).into_iter().map(endpoint).collect();
            Peer {
                dialler: Dialler::new(endpoints, start),
                attempts: BTreeMap::new(),
                session: None,
                served: None,
                without_since: None,
                phase: scenario.phase_of(number),
                sends: false,
                woken: None,
            }
        });
        let mut model = Self {
            scenario,
            start,
            now: start,
            rng: StdRng::seed_from_u64(seed),
            events: BinaryHeap::new(),
            scheduled: 0,
            handles: 0,
            sessions: 0,
            peers: peers.collect(),
            exits: Vec::new(),
            noticed: phases.collect(),
            outcome: Outcome::default(),
        };
        model.exits = (0..scenario.exits)
            .map(|_| Exit {
                process: 1,
                started: 1,
                drains: false,
                workers: model.workers(),
                taken: Vec::new(),
            })
            .collect();
        model
    }

    fn workers(&self) -> Vec<Worker> {
        let workers = self.scenario.workers;
        let worker = |_| Worker {
            budget: Budget::new(workers, self.now),
            pending: Pending::new(HANDSHAKES.div_ceil(usize::from(workers))),
            admitted: BTreeSet::new(),
            queue: VecDeque::new(),
            waiting: 0,
            busy: false,
            spent: BTreeMap::new(),
        };
        (0..workers).map(worker).collect()
    }

    /// Every peer has a session with its first exit, long since.
    fn connect_all(&mut self) {
        for number in 0..self.peers.len() {
            let exit = self.scenario.endpoints_of(number)[0];
            self.sessions += 1;
            let peer = &mut self.peers[number];
            // The dialler learns the address of its first endpoint, as it did when it dialled.
            let (now, rng) = (self.now, &mut self.rng);
            while let Some(step) = peer.dialler.step(false, IDLE_INTERVAL, false, now, rng) {
                if let Step::LookUp(endpoint) = step {
                    peer.dialler.looks_up(TOKEN, now);
                    peer.dialler.answered(TOKEN, &[address(&endpoint)], now);
                }
            }
            peer.dialler.stop();
            peer.session =
                Some(Session { number: self.sessions, exit, process: 1, suspect: false, leaving: false });
            peer.served = Some((exit, 1));
        }
    }

    fn schedule(&mut self, at: Instant, event: Event) {
        self.scheduled += 1;
        self.events.push(Reverse((at, self.scheduled, event)));
    }

    fn one_way(&self) -> Duration {
        self.scenario.round_trip / 2
    }

    fn run_until(&mut self, end: Instant) {
        while let Some(Reverse((at, _, event))) = self.events.pop() {
            if at > end {
                break;
            }
            self.now = at;
            self.handle(event);
        }
    }

    fn handle(&mut self, event: Event) {
        match event {
            Event::Change(exit, change) => self.change(exit, change),
            Event::Dial(peer) => self.dial(peer),
            Event::Traffic(peer) => self.traffic(peer),
            Event::Suspect(peer, session) => self.suspect(peer, session),
            Event::Leave(peer, session) => self.leave(peer, session),
            Event::Closed(peer, session) => self.closed(peer, session),
            Event::Repeat { attempted, retried, times } => {
                if self.attempt(attempted).is_some_and(|attempt| attempt.retried == retried) {
                    self.send_first(attempted, times);
                }
            }
            Event::Arrives(attempted, kind) => self.arrives(attempted, kind),
            Event::Free { exit, worker, process } => {
                if self.exits[exit].process == process {
                    self.exits[exit].workers[worker].busy = false;
                    self.work(exit, worker);
                }
            }
            Event::Retry(attempted) => {
                if let Some(attempt) = self.attempt(attempted).filter(|attempt| !attempt.answered) {
                    attempt.retried = true;
                    self.send_first(attempted, 0);
                }
            }
            Event::Answer(attempted) => self.answered(attempted),
            Event::Hello(attempted) => {
                if self.attempt(attempted).is_some() {
                    self.schedule(self.now + self.one_way(), Event::Arrives(attempted, Kind::Hello));
                }
            }
            Event::Established(attempted) => self.established(attempted),
            Event::Up(peer, session) => self.up(peer, session),
            Event::Over(attempted) => {
                let peer = &mut self.peers[attempted.peer];
                if peer.attempts.remove(&attempted.handle).is_some() {
                    peer.dialler.ended(ConnectionHandle(attempted.handle));
                }
            }
            Event::Dropped(attempted) => {
                let worker = self.worker_of(attempted);
                self.exits[attempted.exit].workers[worker].pending.end(ConnectionHandle(attempted.handle));
            }
        }
    }

    fn attempt(&mut self, attempted: Attempted) -> Option<&mut Attempt> {
        self.peers[attempted.peer].attempts.get_mut(&attempted.handle)
    }

    /// The worker that a peer's handshakes come to: the peer's connection IDs name it.
    fn worker_of(&self, attempted: Attempted) -> usize {
        attempted.peer % usize::from(self.scenario.workers)
    }

    fn change(&mut self, number: usize, change: Change) {
        let process = self.exits[number].process;
        match change {
            Change::Starts => {
                let workers = self.workers();
                let exit = &mut self.exits[number];
                exit.started += 1;
                (exit.process, exit.drains, exit.workers) = (exit.started, false, workers);
            }
            Change::Drains => {
                self.exits[number].drains = true;
                for (peer, session) in self.sessions_at(number, process) {
                    self.schedule(self.now + self.one_way(), Event::Leave(peer, session));
                }
            }
            Change::Dies | Change::Stops => {
                for (peer, session) in self.sessions_at(number, process) {
                    if change == Change::Stops {
                        self.schedule(self.now + self.one_way(), Event::Closed(peer, session));
                    } else {
                        let noticed = self.noticed_by(peer);
                        self.schedule(self.now + noticed, Event::Suspect(peer, session));
                    }
                }
                for peer in &mut self.peers {
                    if peer.served == Some((number, process)) {
                        peer.served = None;
                        peer.without_since = Some(self.now);
                    }
                }
                self.exits[number].process = 0;
            }
        }
    }

    /// The peers with a session at a process of an exit, and those sessions.
    fn sessions_at(&self, exit: usize, process: u32) -> Vec<(usize, u64)> {
        let sessions =
            self.peers.iter().enumerate().filter_map(|(number, peer)| Some((number, peer.session?)));
        sessions
            .filter(|(_, session)| session.exit == exit && session.process == process)
            .map(|(peer, session)| (peer, session.number))
            .collect()
    }

    /// How long a peer takes to miss its exit, which has just died.
    fn noticed_by(&self, peer: usize) -> Duration {
        let since =
            self.now.saturating_duration_since(self.start) + self.scenario.interval - self.peers[peer].phase;
        let phase = since.as_nanos() % self.scenario.interval.as_nanos();
        let index = phase * u128::from(PHASES) / self.scenario.interval.as_nanos();
        self.noticed[index as usize]
    }

    /// When a peer sends its next packet.
    fn next_packet(&self, peer: usize) -> Instant {
        let first = self.start + self.peers[peer].phase;
        let since = self.now.saturating_duration_since(first).as_nanos();
        let next = since / self.scenario.interval.as_nanos() + 1;
        first + self.scenario.interval * u32::try_from(next).unwrap_or(u32::MAX)
    }

    /// Whether the last packet of a peer without a working session still waits.
    fn traffic_waits(&self, peer: usize) -> bool {
        self.next_packet(peer) >= self.now + self.scenario.interval.saturating_sub(QUEUE_TIME)
    }

    fn needs_dialling(&self, peer: usize) -> bool {
        self.peers[peer].session.is_none_or(|session| session.suspect || session.leaving)
    }

    fn traffic(&mut self, number: usize) {
        self.peers[number].sends = false;
        let session = self.peers[number].session;
        if session.is_some_and(|session| !session.suspect) {
            return;
        }
        let now = self.now;
        self.peers[number].dialler.dial_soon(now);
        self.watch_dialler(number);
        self.watch_traffic(number);
    }

    fn watch_traffic(&mut self, number: usize) {
        if !std::mem::replace(&mut self.peers[number].sends, true) {
            self.schedule(self.next_packet(number), Event::Traffic(number));
        }
    }

    fn watch_dialler(&mut self, number: usize) {
        let peer = &mut self.peers[number];
        let Some(at) = peer.dialler.deadline().map(|at| at.max(self.now)) else { return };
        if peer.woken.is_none_or(|woken| at < woken) {
            peer.woken = Some(at);
            self.schedule(at, Event::Dial(number));
        }
    }

    fn suspect(&mut self, number: usize, name: u64) {
        let (now, peer) = (self.now, &mut self.peers[number]);
        let Some(session) = peer.session.as_mut().filter(|session| session.number == name) else { return };
        session.suspect = true;
        if !peer.dialler.is_scheduled() {
            peer.dialler.restart(Some(Duration::ZERO), now, &mut self.rng);
        }
        self.watch_dialler(number);
        self.watch_traffic(number);
    }

    fn leave(&mut self, number: usize, name: u64) {
        let (now, peer) = (self.now, &mut self.peers[number]);
        let Some(session) = peer.session.as_mut().filter(|session| session.number == name) else { return };
        session.leaving = true;
        let here = address(&endpoint(session.exit));
        peer.dialler.restart_elsewhere(Some(here), now);
        self.watch_dialler(number);
    }

    fn closed(&mut self, number: usize, name: u64) {
        let (now, peer) = (self.now, &mut self.peers[number]);
        if peer.session.is_none_or(|session| session.number != name) {
            return;
        }
        peer.session = None;
        if !peer.dialler.is_scheduled() {
            peer.dialler.restart(None, now, &mut self.rng);
        }
        self.watch_dialler(number);
        self.watch_traffic(number);
    }

    fn dial(&mut self, number: usize) {
        let peer = &mut self.peers[number];
        if peer.woken == Some(self.now) {
            peer.woken = None;
        }
        if !self.needs_dialling(number) {
            return;
        }
        let waits =
            self.peers[number].session.is_some_and(|session| session.leaving) || self.traffic_waits(number);
        let now = self.now;
        loop {
            let dialler = &mut self.peers[number].dialler;
            match dialler.step(waits, IDLE_INTERVAL, true, now, &mut self.rng) {
                None => break,
                Some(Step::LookUp(endpoint)) => {
                    dialler.looks_up(TOKEN, now);
                    if let Some(to) = dialler.answered(TOKEN, &[address(&endpoint)], now) {
                        self.begin(number, to, false);
                    }
                }
                Some(Step::Dial(to)) => self.begin(number, to, false),
                Some(Step::FallBack(to)) => self.begin(number, to, true),
            }
        }
        self.watch_dialler(number);
    }

    fn begin(&mut self, number: usize, to: SocketAddr, fallback: bool) {
        self.handles += 1;
        self.outcome.attempts += 1;
        let attempted = Attempted { peer: number, handle: self.handles, exit: exit_at(to) };
        let peer = &mut self.peers[number];
        peer.attempts.insert(self.handles, Attempt { fallback, retried: false, answered: false });
        if let Some(ConnectionHandle(oldest)) = peer.dialler.started(ConnectionHandle(self.handles), fallback)
        {
            peer.attempts.remove(&oldest);
            self.give_up(number, oldest);
        }
        self.schedule(self.now + ATTEMPT_LIMIT, Event::Over(attempted));
        self.send_first(attempted, 0);
    }

    /// Sends the first flight of an attempt that has no answer, and plans its repetition.
    fn send_first(&mut self, attempted: Attempted, times: u32) {
        let Some(attempt) = self.attempt(attempted).filter(|attempt| !attempt.answered) else { return };
        let Attempt { fallback, retried, .. } = *attempt;
        let kind = Kind::First { fallback, retried };
        self.schedule(self.now + self.one_way(), Event::Arrives(attempted, kind));
        let again = Event::Repeat { attempted, retried, times: times + 1 };
        self.schedule(self.now + FIRST_REPEAT * (1 << times), again);
    }

    fn arrives(&mut self, attempted: Attempted, kind: Kind) {
        let worker = self.worker_of(attempted);
        let exit = &mut self.exits[attempted.exit];
        if exit.process == 0 {
            return;
        }
        let at = &mut exit.workers[worker];
        let datagrams = datagrams_of(kind);
        if at.waiting + datagrams > MOST_WAITING {
            self.outcome.refused.overflow += 1;
            return;
        }
        at.waiting += datagrams;
        at.queue.push_back((attempted, kind));
        if !at.busy {
            self.work(attempted.exit, worker);
        }
    }

    /// The worker takes the next packet of its queue, which keeps it busy for a while.
    fn work(&mut self, number: usize, index: usize) {
        let exit = &mut self.exits[number];
        let (process, drains, worker) = (exit.process, exit.drains, &mut exit.workers[index]);
        let Some((attempted, kind)) = worker.queue.pop_front() else { return };
        worker.waiting -= datagrams_of(kind);
        let source = source_of(attempted.peer % self.scenario.sources);
        let costs = self.scenario.costs;
        let (cost, answer) = match kind {
            // An exit that drains begins no handshake, and completes those that it has begun.
            Kind::First { .. } if drains => (costs.knock, None),
            Kind::First { .. } => {
                worker.first(attempted, kind, source, self.now, costs, &mut self.outcome.refused)
            }
            // Of a process that is gone.
            Kind::Hello if !worker.admitted.contains(&attempted.handle) => (costs.refusal, None),
            Kind::Hello => {
                worker.pending.end(ConnectionHandle(attempted.handle));
                exit.taken.push(self.now);
                (costs.session / 2, Some(Event::Established(attempted)))
            }
        };
        let second = self.now.saturating_duration_since(self.start).as_secs();
        *worker.spent.entry(second).or_default() += cost;
        worker.busy = true;
        self.schedule(self.now + cost, Event::Free { exit: number, worker: index, process });
        if let Some(answer) = answer {
            self.schedule(self.now + cost + self.one_way(), answer);
        }
    }

    fn answered(&mut self, attempted: Attempted) {
        let Some(attempt) = self.attempt(attempted).filter(|attempt| !attempt.answered) else { return };
        attempt.answered = true;
        let delay = if self.peers[attempted.peer].session.is_some() {
            hello_delay(self.scenario.round_trip)
        } else {
            Duration::ZERO
        };
        self.schedule(self.now + delay, Event::Hello(attempted));
    }

    /// Tells the exit that an attempt has ended. The handle is known at one of the peer's exits at most.
    fn give_up(&mut self, peer: usize, handle: usize) {
        for exit in self.scenario.endpoints_of(peer) {
            self.schedule(self.now + self.one_way(), Event::Dropped(Attempted { peer, handle, exit }));
        }
    }

    fn established(&mut self, attempted: Attempted) {
        let process = self.exits[attempted.exit].process;
        let peer = &mut self.peers[attempted.peer];
        if !peer.attempts.contains_key(&attempted.handle) {
            return;
        }
        self.sessions += 1;
        let name = self.sessions;
        peer.session =
            Some(Session { number: name, exit: attempted.exit, process, suspect: false, leaving: false });
        peer.dialler.succeeded(ConnectionHandle(attempted.handle));
        peer.dialler.stop();
        for handle in
            std::mem::take(&mut peer.attempts).into_keys().filter(|handle| *handle != attempted.handle)
        {
            self.give_up(attempted.peer, handle);
        }
        if self.exits[attempted.exit].drains {
            self.schedule(self.now, Event::Leave(attempted.peer, name));
        }
        if process == 0 {
            // The request for a lane is not answered.
            let limit = LEAST_SILENCE.max(self.scenario.round_trip * 6);
            self.schedule(self.now + limit, Event::Suspect(attempted.peer, name));
        } else {
            self.schedule(self.now + self.one_way() * LANE_FLIGHTS, Event::Up(attempted.peer, name));
        }
    }

    fn up(&mut self, number: usize, name: u64) {
        let Some(session) = self.peers[number].session.filter(|session| session.number == name) else {
            return;
        };
        if self.exits[session.exit].process != session.process {
            return;
        }
        let arrives = self.now + self.one_way();
        let peer = &mut self.peers[number];
        peer.served = Some((session.exit, session.process));
        if let Some(since) = peer.without_since.take() {
            self.outcome.gaps.push(arrives.saturating_duration_since(since));
        }
    }

    fn outcome(mut self) -> Outcome {
        self.outcome.gaps.sort_unstable();
        self.outcome.unserved = self.peers.iter().filter(|peer| peer.without_since.is_some()).count();
        self.outcome.peak =
            self.exits.iter().map(|exit| most_within_a_second(&exit.taken)).max().unwrap_or(0);
        let spent = self.exits.iter().flat_map(|exit| &exit.workers).flat_map(|worker| worker.spent.values());
        self.outcome.busiest = spent.max().copied().unwrap_or_default().as_secs_f64();
        self.outcome
    }
}

impl Worker {
    /// Decides about a first packet, in the order of the gate: its cost, and the answer.
    fn first(
        &mut self,
        attempted: Attempted,
        kind: Kind,
        source: IpAddr,
        now: Instant,
        costs: Costs,
        refused: &mut Refused,
    ) -> (Duration, Option<Event>) {
        let Kind::First { fallback, retried } = kind else { unreachable!("a hello is no first packet") };
        if self.admitted.contains(&attempted.handle) {
            return (costs.refusal, None);
        }
        let (room, handle) = (self.pending.room(), ConnectionHandle(attempted.handle));
        let busy = room != Room::Free && !retried;
        match if busy { Take::Retry } else { self.budget.take(source, retried, now) } {
            Take::Granted => {}
            Take::Retry => {
                refused.retry += 1;
                return (costs.refusal, Some(Event::Retry(attempted)));
            }
            Take::Refused => {
                refused.budget += 1;
                return (costs.refusal, None);
            }
        }
        let peer = PeerId(u32::try_from(attempted.peer).expect("peers are fewer than 2^32"));
        self.budget.charge_to_peer(peer, source, retried, now);
        if fallback {
            refused.fallback += 1;
            return (costs.knock, None);
        }
        let mut key = [0; 32];
        key[..4].copy_from_slice(&peer.0.to_be_bytes());
        if self.pending.is_full_for(Some(&key)) {
            refused.full += 1;
            return (costs.knock, None);
        }
        if let Some(oldest) = self.pending.surplus(&key) {
            self.pending.end(oldest);
        }
        self.pending.begin(handle, Some(key));
        self.admitted.insert(attempted.handle);
        (costs.knock + costs.session / 2, Some(Event::Answer(attempted)))
    }
}

fn datagrams_of(kind: Kind) -> usize {
    match kind {
        Kind::First { .. } => FIRST_FLIGHT,
        Kind::Hello => 1,
    }
}

/// The token of a lookup: each is answered at once.
const TOKEN: Token = Token(1);

fn endpoint(exit: usize) -> Endpoint {
    let number = u32::try_from(exit).expect("exits are fewer than 2^24");
    Endpoint::new(Ipv4Addr::from_bits(0x0a00_0000 + number).to_string(), PORT)
}

fn address(endpoint: &Endpoint) -> SocketAddr {
    SocketAddr::new(endpoint.host.parse().expect("it is an address"), endpoint.port)
}

/// The exit that has an address.
fn exit_at(address: SocketAddr) -> usize {
    match address.ip() {
        IpAddr::V4(ip) => (ip.to_bits() - 0x0a00_0000) as usize,
        IpAddr::V6(_) => unreachable!("all exits have IPv4 addresses"),
    }
}

fn source_of(number: usize) -> IpAddr {
    let number = u32::try_from(number).expect("sources are fewer than 2^24");
    Ipv4Addr::from_bits(0x6440_0000 + number).into()
}

/// The largest number of `times`, which ascend, that lie within one second.
fn most_within_a_second(times: &[Instant]) -> usize {
    let mut first = 0;
    let mut most = 0;
    for (last, at) in times.iter().enumerate() {
        while at.saturating_duration_since(times[first]) >= Duration::from_secs(1) {
            first += 1;
        }
        most = most.max(last + 1 - first);
    }
    most
}
