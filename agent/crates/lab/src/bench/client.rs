//! One thread of clients: opens its flows, sends, receives, and asks what arrived.
//!
//! ```text
//! Opening ── all flows are welcomed, the start is set ──► Running ── time is over ──► Draining ── all arrived, or a second ──► Ended
//! ```

use std::{
    sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering},
    time::{Duration, Instant},
};

use net::{Path, ReceiveBatch, SendBatch, Token, UdpSocket};

use crate::bench::{
    Common, Party, Turn,
    datagram::{CONTROL_LEN, HEADER_LEN, Header, Kind, Plan, Report},
    sender::{Next, Sender, Sent, Target},
    tally::{Counts, FlowTally, Received},
};

/// The interval at which a datagram that needs an answer is repeated: far above any round trip worth a measurement.
const REPEAT: Duration = Duration::from_millis(50);

/// The time for which stragglers are waited for.
const STRAGGLERS: Duration = Duration::from_secs(1);

/// Batches that one socket gives in one turn at most.
const BATCHES_PER_TURN: usize = 4;

/// The state that the threads of a run share. None of it is touched per datagram.
#[derive(Debug, Default)]
pub(super) struct Shared {
    /// Flows that the sink has welcomed.
    pub(super) welcomed: AtomicU32,
    /// When the load starts, in nanoseconds since the epoch; 0 until all flows are welcomed.
    pub(super) start_ns: AtomicU64,
    /// Counted datagrams so far, for the progress line.
    pub(super) sent: AtomicU64,
    pub(super) received: AtomicU64,
    /// The sink and the probe shall end; before the start, the clients too.
    pub(super) stop: AtomicBool,
    /// Nobody listens where a client sends to.
    pub(super) refused: AtomicBool,
}

/// The parameters of one thread of clients.
pub(super) struct Setup {
    pub(super) common: Common,
    pub(super) run: u32,
    /// The rate in it is this thread's share.
    pub(super) plan: Plan,
    /// The plan that the sink is told, for all threads together.
    pub(super) total_plan: Plan,
}

/// The results of one thread of clients.
#[derive(Debug)]
pub(super) struct Outcome {
    pub(super) sent: Sent,
    pub(super) received: Received,
    /// The report of the sink on each flow; none where it did not answer.
    pub(super) reports: Vec<Option<Report>>,
}

struct Flow {
    number: u32,
    path: Path,
    welcomed: bool,
    tally: FlowTally,
    /// The kernel's count before the first counted datagram.
    drops_before: u64,
    report: Option<Report>,
}

enum State {
    Opening { again: Instant },
    Running { again: Option<Instant>, until: Instant },
    Draining { again: Instant, until: Instant },
    Ended,
}

/// The clients of one thread, and what they counted.
pub(super) struct Client {
    setup: Setup,
    sockets: Vec<Box<dyn UdpSocket>>,
    /// The sockets that may have something to read, each once.
    readable: Vec<usize>,
    is_readable: Vec<bool>,
    flows: Vec<Flow>,
    state: State,
    sender: Option<Sender>,
    received: Received,
    /// Counted datagrams that arrived, each once.
    arrived: u64,
    /// Whether the sink has started to send.
    sink_sends: bool,
    batch: ReceiveBatch,
    control: SendBatch,
    /// Datagrams sent that were added to `shared`.
    published_sent: u64,
    /// Datagrams received that were added to `shared`.
    published_received: u64,
}

impl Client {
    /// A socket of `sockets` for each of `flows`: its number, and where it sends to.
    pub(super) fn new(setup: Setup, sockets: Vec<Box<dyn UdpSocket>>, flows: &[(u32, Path)]) -> Self {
        let flow = |(number, path): &(u32, Path)| Flow {
            number: *number,
            path: *path,
            welcomed: false,
            tally: FlowTally::default(),
            drops_before: 0,
            report: None,
        };
        let again = setup.common.clock.now();
        Self {
            setup,
            readable: Vec::with_capacity(sockets.len()),
            is_readable: vec![false; sockets.len()],
            sockets,
            flows: flows.iter().map(flow).collect(),
            state: State::Opening { again },
            sender: None,
            received: Received::default(),
            arrived: 0,
            sink_sends: false,
            batch: ReceiveBatch::default(),
            control: SendBatch::new(CONTROL_LEN),
            published_sent: 0,
            published_received: 0,
        }
    }

    /// The outcome of the clients, after [`Turn::Ended`].
    pub(super) fn finish(mut self) -> Outcome {
        for (flow, socket) in self.flows.iter().zip(&self.sockets) {
            self.received.counts.add(&flow.tally.counts);
            self.received.kernel_drops += socket.kernel_drops().saturating_sub(flow.drops_before);
        }
        Outcome {
            sent: self.sender.map(|sender| sender.sent).unwrap_or_default(),
            received: self.received,
            reports: self.flows.iter().map(|flow| flow.report).collect(),
        }
    }

    fn open(&mut self, again: Instant, now: Instant) -> Turn {
        let Common { shared, epoch, .. } = &self.setup.common;
        let (start, stop) = (shared.start_ns.load(Ordering::Acquire), shared.stop.load(Ordering::Relaxed));
        if stop {
            self.state = State::Ended;
            return Turn::Ended;
        }
        if start > 0 {
            let start = *epoch + Duration::from_nanos(start);
            self.start(start);
            return Turn::Now;
        }
        // The start is set by another thread: looked for more often than a flow is opened again.
        let look = now + Duration::from_millis(2);
        if now >= again {
            for index in 0..self.flows.len() {
                if !self.flows[index].welcomed {
                    let plan = self.setup.total_plan;
                    self.tell(index, Kind::Open, now, &|body| plan.write(body));
                }
            }
            self.state = State::Opening { again: now + REPEAT };
        }
        Turn::At(look)
    }

    fn start(&mut self, start: Instant) {
        let Setup { common, run, plan, .. } = &self.setup;
        let length = Duration::from_millis(u64::from(plan.warmup_ms) + u64::from(plan.measured_ms));
        if plan.direction.up() {
            let targets = self.flows.iter().enumerate();
            let targets = targets.map(|(index, flow)| Target::new(flow.number, index, flow.path)).collect();
            self.sender = Some(Sender::new(common.clone(), *run, start, false, *plan, targets));
        }
        self.state = State::Running { again: plan.direction.down().then_some(start), until: start + length };
    }

    fn run(&mut self, again: Option<Instant>, until: Instant, now: Instant) -> Turn {
        // The sink begins when the first flow says so; the other threads' word would be the same.
        let again = match again {
            Some(_) if self.sink_sends => None,
            Some(at) if now >= at => {
                self.tell(0, Kind::Start, now, &|_| {});
                Some(now + REPEAT)
            }
            other => other,
        };
        self.state = State::Running { again, until };
        let next = match &mut self.sender {
            Some(sender) => sender.turn(&mut self.sockets),
            None if now >= until => Next::Ended,
            None => Next::At(until),
        };
        match next {
            Next::Now => Turn::Now,
            Next::At(at) | Next::Room(at) => Turn::At(again.map_or(at, |again| again.min(at))),
            Next::Ended => {
                self.state = State::Draining { again: now, until: now + STRAGGLERS };
                Turn::Now
            }
        }
    }

    fn drain(&mut self, again: Instant, until: Instant, now: Instant) -> Turn {
        let complete = (0..self.flows.len()).all(|index| self.is_complete(index));
        if complete || now >= until {
            self.state = State::Ended;
            return Turn::Ended;
        }
        if now < again {
            return Turn::At(again.min(until));
        }
        for index in 0..self.flows.len() {
            if !self.is_complete(index) {
                self.tell(index, Kind::End, now, &|_| {});
            }
        }
        self.state = State::Draining { again: now + REPEAT, until };
        Turn::Now
    }

    /// Whether all that was sent on a flow has arrived, in both directions.
    fn is_complete(&self, index: usize) -> bool {
        let flow = &self.flows[index];
        let sent = self.sender.as_ref().map_or(0, |sender| sender.targets[index].sent);
        flow.report.is_some_and(|report| {
            report.distinct >= sent && !report.sending && flow.tally.counts.distinct >= report.sent
        })
    }

    /// Sends a control datagram; what the kernel refuses is repeated like what is lost.
    fn tell(&mut self, index: usize, kind: Kind, now: Instant, body: &dyn Fn(&mut [u8])) {
        let Flow { number: flow, path, .. } = self.flows[index];
        let (run, sent_ns) = (self.setup.run, self.setup.common.nanoseconds(now));
        let header = Header { kind, down: false, run, flow, sequence: 0, sent_ns };
        header.put_control(&mut self.control, &path, body);
        self.sockets[index].send(&mut self.control, &mut |_, _| {});
        self.control.clear();
    }

    /// Reads what is there; whether there may be more.
    fn receive(&mut self) -> bool {
        let mut index = 0;
        while index < self.readable.len() {
            let socket = self.readable[index];
            let mut more = true;
            for _ in 0..BATCHES_PER_TURN {
                match self.sockets[socket].receive(&mut self.batch) {
                    Ok(()) => self.take_batch(socket),
                    Err(error) if error.kind() == std::io::ErrorKind::WouldBlock => {
                        more = false;
                        break;
                    }
                    Err(error) => {
                        if error.kind() == std::io::ErrorKind::ConnectionRefused {
                            self.setup.common.shared.refused.store(true, Ordering::Relaxed);
                        }
                    }
                }
            }
            if more {
                index += 1;
            } else {
                self.is_readable[socket] = false;
                self.readable.swap_remove(index);
            }
        }
        !self.readable.is_empty()
    }

    fn take_batch(&mut self, socket: usize) {
        let Self { setup, sockets, flows, received, batch, sink_sends, arrived, .. } = self;
        let now = setup.common.clock.now();
        let now_ns = setup.common.nanoseconds(now);
        let flow = &mut flows[socket];
        for index in 0..batch.len() {
            let buffer = batch.buffer(index);
            for segment in batch.meta(index).segments() {
                let datagram = &buffer[segment];
                let Ok(header) = Header::read(datagram) else {
                    received.corrupt += 1;
                    continue;
                };
                if header.run != setup.run || header.flow != flow.number || !header.down {
                    continue;
                }
                match header.kind {
                    Kind::Data => {
                        *sink_sends = true;
                        if flow.tally.counts == Counts::default() {
                            // What was dropped in the warm-up is not counted.
                            flow.drops_before = sockets[socket].kernel_drops();
                        }
                        received.seen_at(now);
                        if flow.tally.see(header.sequence) {
                            *arrived += 1;
                            if setup.common.one_clock {
                                received.one_way.record(now_ns.saturating_sub(header.sent_ns));
                            }
                        }
                    }
                    Kind::Warmup => *sink_sends = true,
                    Kind::Welcome if !flow.welcomed => {
                        flow.welcomed = true;
                        setup.common.shared.welcomed.fetch_add(1, Ordering::AcqRel);
                    }
                    Kind::Report => flow.report = Some(Report::read(&datagram[HEADER_LEN..])),
                    Kind::Welcome | Kind::Open | Kind::Start | Kind::Probe | Kind::Echo | Kind::End => {}
                }
            }
        }
    }

    /// Brings the counts of the progress line up to date.
    fn publish(&mut self) {
        let sent = self.sender.as_ref().map_or(0, |sender| sender.sent.datagrams);
        let received = self.arrived;
        let shared = &self.setup.common.shared;
        shared.sent.fetch_add(sent - self.published_sent, Ordering::Relaxed);
        shared.received.fetch_add(received - self.published_received, Ordering::Relaxed);
        (self.published_sent, self.published_received) = (sent, received);
    }
}

impl Party for Client {
    fn turn(&mut self, ready: &[Token]) -> Turn {
        for Token(number) in ready {
            let socket = *number as usize;
            if let Some(is_readable) = self.is_readable.get_mut(socket)
                && !std::mem::replace(is_readable, true)
            {
                self.readable.push(socket);
            }
        }
        let more = self.receive();
        let now = self.setup.common.clock.now();
        let turn = match self.state {
            State::Opening { again } => self.open(again, now),
            State::Running { again, until } => self.run(again, until, now),
            State::Draining { again, until } => self.drain(again, until, now),
            State::Ended => Turn::Ended,
        };
        self.publish();
        match turn {
            Turn::At(_) if more => Turn::Now,
            Turn::Now | Turn::At(_) | Turn::Ended => turn,
        }
    }
}
