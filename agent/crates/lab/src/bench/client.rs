//! One thread of clients: opens its flows, sends, receives, and asks what arrived.
//!
//! ```text
//! Opening ── all flows are welcomed, the start is set ──► Running ── time is over ──► Draining ── all arrived, or no more ──► Ended
//! ```

use std::{
    collections::BTreeSet,
    io::ErrorKind,
    sync::atomic::Ordering,
    time::{Duration, Instant},
};

use net::{Path, ReceiveBatch, SendBatch, Token, UdpSocket};

use crate::bench::{
    datagram::{CONTROL_LEN, HEADER_LEN, Header, Kind, Plan, Report},
    party::{Common, Party, Turn},
    sender::{Sender, Sent, Target},
    tally::{Counts, FlowTally, Received},
};

/// The interval at which a datagram that needs an answer is repeated: far above any round trip worth a measurement.
const REPEAT: Duration = Duration::from_millis(50);

/// The time for which the next straggler is waited for.
const STRAGGLERS: Duration = Duration::from_secs(1);

/// The time for which stragglers are waited for while they come: far above the time for which an agent holds a datagram.
const ALL_STRAGGLERS: Duration = Duration::from_secs(30);

/// Batches that one socket gives in one turn at most.
const BATCHES_PER_TURN: usize = 4;

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
    Draining(Drain),
    Ended,
}

/// How the clients wait for stragglers.
#[derive(Clone, Copy)]
struct Drain {
    /// When the sink is asked again.
    again: Instant,
    /// The end of the wait, unless something arrives before.
    until: Instant,
    /// The end of the wait in any case.
    latest: Instant,
    /// [`Client::progress`] when it was last found to have grown.
    progress: u64,
}

/// The clients of one thread, and what they counted.
pub(super) struct Client {
    setup: Setup,
    sockets: Vec<Box<dyn UdpSocket>>,
    /// The sockets that may have something to read.
    readable: BTreeSet<usize>,
    flows: Vec<Flow>,
    state: State,
    sender: Option<Sender>,
    received: Received,
    /// Whether the sink has started to send.
    sink_sends: bool,
    batch: ReceiveBatch,
    control: SendBatch,
    /// Datagrams sent that were added to `shared`.
    published_sent: u64,
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
            readable: BTreeSet::new(),
            sockets,
            flows: flows.iter().map(flow).collect(),
            state: State::Opening { again },
            sender: None,
            received: Received::default(),
            sink_sends: false,
            batch: ReceiveBatch::default(),
            control: SendBatch::new(CONTROL_LEN),
            published_sent: 0,
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
            None if now >= until => Turn::Ended,
            None => Turn::At(until),
        };
        match next {
            Turn::Now => Turn::Now,
            Turn::At(at) => Turn::At(again.map_or(at, |again| again.min(at))),
            Turn::Ended => {
                self.state = State::Draining(Drain {
                    again: now,
                    until: now + STRAGGLERS,
                    latest: now + ALL_STRAGGLERS,
                    progress: self.progress(),
                });
                Turn::Now
            }
        }
    }

    fn drain(&mut self, mut drain: Drain, now: Instant) -> Turn {
        if (0..self.flows.len()).all(|index| self.is_complete(index)) {
            self.state = State::Ended;
            return Turn::Ended;
        }
        if now < drain.again {
            return Turn::At(drain.again);
        }
        let progress = self.progress();
        if progress > drain.progress {
            drain = Drain { until: (now + STRAGGLERS).min(drain.latest), progress, ..drain };
        }
        if now >= drain.until {
            self.state = State::Ended;
            return Turn::Ended;
        }
        for index in 0..self.flows.len() {
            if !self.is_complete(index) {
                self.tell(index, Kind::End, now, &|_| {});
            }
        }
        self.state = State::Draining(Drain { again: now + REPEAT, ..drain });
        Turn::Now
    }

    /// A number that grows while something arrives at either end, or the sink sends.
    fn progress(&self) -> u64 {
        let of_flow = |flow: &Flow| {
            let report = flow.report.unwrap_or_default();
            flow.tally.counts.distinct + report.counts.distinct + report.sent
        };
        self.flows.iter().map(of_flow).sum()
    }

    /// Whether all that was sent on a flow has arrived, in both directions.
    fn is_complete(&self, index: usize) -> bool {
        let flow = &self.flows[index];
        let sent = self.sender.as_ref().map_or(0, |sender| sender.targets[index].sent);
        flow.report.is_some_and(|report| {
            report.counts.distinct >= sent && !report.sending && flow.tally.counts.distinct >= report.sent
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
        let mut readable = std::mem::take(&mut self.readable);
        readable.retain(|socket| self.receive_from(*socket));
        self.readable = readable;
        !self.readable.is_empty()
    }

    fn receive_from(&mut self, socket: usize) -> bool {
        for _ in 0..BATCHES_PER_TURN {
            match self.sockets[socket].receive(&mut self.batch).map_err(|error| error.kind()) {
                Ok(()) => self.take_batch(socket),
                Err(ErrorKind::WouldBlock) => return false,
                Err(ErrorKind::ConnectionRefused) => {
                    self.setup.common.shared.refused.store(true, Ordering::Relaxed);
                }
                Err(_) => {}
            }
        }
        true
    }

    fn take_batch(&mut self, socket: usize) {
        let Self { setup, sockets, flows, received, batch, sink_sends, .. } = self;
        let now = setup.common.clock.now();
        let now_ns = setup.common.nanoseconds(now);
        let flow = &mut flows[socket];
        let mut arrived = 0;
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
                            arrived += 1;
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
        setup.common.shared.received.fetch_add(arrived, Ordering::Relaxed);
    }

    /// Brings the count of what was sent up to date, for the progress line.
    fn publish(&mut self) {
        let sent = self.sender.as_ref().map_or(0, |sender| sender.sent.datagrams);
        self.setup.common.shared.sent.fetch_add(sent - self.published_sent, Ordering::Relaxed);
        self.published_sent = sent;
    }
}

impl Party for Client {
    fn turn(&mut self, ready: &[Token]) -> Turn {
        self.readable.extend(ready.iter().map(|Token(socket)| *socket as usize));
        let more = self.receive();
        let now = self.setup.common.clock.now();
        let turn = match self.state {
            State::Opening { again } => self.open(again, now),
            State::Running { again, until } => self.run(again, until, now),
            State::Draining(drain) => self.drain(drain, now),
            State::Ended => Turn::Ended,
        };
        self.publish();
        match turn {
            Turn::At(_) if more => Turn::Now,
            Turn::Now | Turn::At(_) | Turn::Ended => turn,
        }
    }
}
