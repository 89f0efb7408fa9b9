//! The sink: knows the flows that were opened, counts what arrives, answers, and sends back where the plan says so.

use std::{
    sync::atomic::Ordering,
    time::{Duration, Instant},
};

use net::{Path, ReceiveBatch, SendBatch, Token, UdpSocket};

use crate::bench::{
    datagram::{HEADER_LEN, Header, Kind, Plan, Report},
    party::{Common, Party, Turn},
    sender::{Sender, Sent, Target},
    tally::{FlowTally, Received},
};

/// The interval at which the sink checks whether it is to end.
const LOOK: Duration = Duration::from_millis(20);

/// Batches that one turn reads at most.
const BATCHES_PER_TURN: usize = 4;

/// The results of the run that the sink served last.
#[derive(Debug)]
pub(super) struct Outcome {
    pub(super) sent: Sent,
    pub(super) received: Received,
}

/// One run as the sink sees it.
struct Run {
    number: u32,
    plan: Plan,
    flows: Vec<Option<Flow>>,
    sender: Option<Sender>,
    sending: bool,
    received: Received,
    /// The kernel's count before the first counted datagram.
    drops_before: u64,
}

struct Flow {
    path: Path,
    tally: FlowTally,
    /// The index of the flow among the sender's targets.
    target: Option<usize>,
}

/// The sink of one address; it serves one run at a time.
pub(super) struct Sink {
    common: Common,
    /// One socket; a list, because a sender takes one.
    sockets: [Box<dyn UdpSocket>; 1],
    run: Option<Run>,
    batch: ReceiveBatch,
    replies: SendBatch,
    readable: bool,
}

impl Sink {
    pub(super) fn new(common: Common, socket: Box<dyn UdpSocket>) -> Self {
        Self {
            common,
            sockets: [socket],
            run: None,
            batch: ReceiveBatch::default(),
            replies: SendBatch::default(),
            readable: false,
        }
    }

    /// The results, after [`Turn::Ended`]; none if nobody opened a flow.
    pub(super) fn finish(self) -> Option<Outcome> {
        let drops = self.sockets[0].kernel_drops();
        let mut run = self.run?;
        for flow in run.flows.iter().flatten() {
            run.received.counts.add(&flow.tally.counts);
        }
        run.received.kernel_drops = drops.saturating_sub(run.drops_before);
        Some(Outcome {
            sent: run.sender.map(|sender| sender.sent).unwrap_or_default(),
            received: run.received,
        })
    }

    fn receive(&mut self) {
        for _ in 0..BATCHES_PER_TURN {
            match self.sockets[0].receive(&mut self.batch) {
                Ok(()) => self.take_batch(),
                Err(error) if error.kind() == std::io::ErrorKind::WouldBlock => {
                    self.readable = false;
                    break;
                }
                Err(error) => tracing::debug!(%error, "the sink's socket reports an error"),
            }
        }
        // An answer that the kernel has no room for is lost; what needs one asks again.
        self.sockets[0].send(&mut self.replies, &mut |_, _| {});
        self.replies.clear();
    }

    fn take_batch(&mut self) {
        let now = self.common.clock.now();
        let now_ns = self.common.nanoseconds(now);
        let mut arrived = 0;
        // Taken out of the sink, because answers change other parts of it.
        let mut batch = std::mem::replace(&mut self.batch, ReceiveBatch::new(0, 0));
        for index in 0..batch.len() {
            let (meta, buffer) = batch.buffer_mut(index);
            let path = Path { destination: meta.source, source: meta.local, tos: 0 };
            for segment in meta.segments() {
                let datagram = &mut buffer[segment];
                match Header::read(datagram) {
                    Ok(header) if header.kind == Kind::Data => {
                        arrived += u64::from(self.count(&header, now, now_ns));
                    }
                    Ok(header) => self.answer(&header, &path, datagram, now),
                    Err(_corrupt) => {
                        if let Some(run) = &mut self.run {
                            run.received.corrupt += 1;
                        }
                    }
                }
            }
        }
        self.batch = batch;
        self.common.shared.received.fetch_add(arrived, Ordering::Relaxed);
    }

    /// Counts load; whether it arrived for the first time.
    fn count(&mut self, header: &Header, now: Instant, now_ns: u64) -> bool {
        let Some(run) = self.run.as_mut().filter(|run| run.number == header.run) else { return false };
        let Some(Some(flow)) = run.flows.get_mut(header.flow as usize) else { return false };
        if run.received.span.is_none() {
            // What was dropped in the warm-up is not counted.
            run.drops_before = self.sockets[0].kernel_drops();
        }
        run.received.seen_at(now);
        let first = flow.tally.see(header.sequence);
        if first && self.common.one_clock {
            run.received.one_way.record(now_ns.saturating_sub(header.sent_ns));
        }
        first
    }

    fn answer(&mut self, header: &Header, path: &Path, datagram: &mut [u8], now: Instant) {
        let sent_ns = self.common.nanoseconds(now);
        let reply = |kind| Header { kind, down: true, sent_ns, ..*header };
        match header.kind {
            Kind::Open => {
                let Some(plan) = Plan::read(&datagram[HEADER_LEN..]) else { return };
                if self.open(header, path, plan) {
                    reply(Kind::Welcome).put_control(&mut self.replies, path, &|_| {});
                }
            }
            Kind::Probe => {
                // Back with the prober's own time in it.
                Header::set_echo(datagram);
                if let Some(room) = self.replies.tail(datagram.len()) {
                    room.copy_from_slice(datagram);
                    self.replies.commit(path, 0, datagram.len(), 1);
                }
            }
            Kind::Start => self.start(header.run, now),
            Kind::End => {
                let Some(report) = self.report(header) else { return };
                reply(Kind::Report).put_control(&mut self.replies, path, &|body| report.write(body));
            }
            Kind::Warmup | Kind::Data | Kind::Welcome | Kind::Echo | Kind::Report => {}
        }
    }

    /// Notes a flow; a new run ends the one before. False if the plan does not have the flow.
    fn open(&mut self, header: &Header, path: &Path, plan: Plan) -> bool {
        let drops_before = self.sockets[0].kernel_drops();
        let run = match &mut self.run {
            Some(run) if run.number == header.run => run,
            other => other.insert(Run {
                number: header.run,
                plan,
                flows: (0..plan.flows).map(|_| None).collect(),
                sender: None,
                sending: plan.direction.down(),
                received: Received::default(),
                drops_before,
            }),
        };
        let Some(slot) = run.flows.get_mut(header.flow as usize) else { return false };
        match slot {
            Some(flow) => flow.path = *path,
            None => *slot = Some(Flow { path: *path, tally: FlowTally::default(), target: None }),
        }
        true
    }

    /// Begins to send in the run with this number, once.
    fn start(&mut self, number: u32, now: Instant) {
        let Some(run) = self.run.as_mut().filter(|run| run.number == number) else { return };
        if run.sender.is_some() || !run.plan.direction.down() {
            return;
        }
        let mut targets = Vec::with_capacity(run.flows.len());
        for (number, flow) in (0_u32..).zip(&mut run.flows) {
            if let Some(flow) = flow {
                flow.target = Some(targets.len());
                targets.push(Target::new(number, 0, flow.path));
            }
        }
        run.sender = Some(Sender::new(self.common.clone(), run.number, now, true, run.plan, targets));
    }

    fn report(&self, header: &Header) -> Option<Report> {
        let run = self.run.as_ref().filter(|run| run.number == header.run)?;
        let flow = run.flows.get(header.flow as usize)?.as_ref()?;
        let sender = run.sender.as_ref();
        let target = sender.zip(flow.target).map(|(sender, target)| &sender.targets[target]);
        let sent = sender.map(|sender| sender.sent).unwrap_or_default();
        Some(Report {
            counts: flow.tally.counts,
            sent: target.map_or(0, |target| target.sent),
            sending: run.sending,
            corrupt: run.received.corrupt,
            kernel_drops: self.sockets[0].kernel_drops().saturating_sub(run.drops_before),
            blocked: sent.blocked,
            errors: sent.errors,
        })
    }

    fn send(&mut self) -> Turn {
        let Some(run) = &mut self.run else { return Turn::Ended };
        let Some(sender) = run.sender.as_mut().filter(|_| run.sending) else { return Turn::Ended };
        let next = sender.turn(&mut self.sockets);
        run.sending = next != Turn::Ended;
        next
    }
}

impl Party for Sink {
    fn turn(&mut self, ready: &[Token]) -> Turn {
        self.readable |= !ready.is_empty();
        if self.common.shared.stop.load(Ordering::Relaxed) {
            return Turn::Ended;
        }
        if self.readable {
            self.receive();
        }
        let next = self.send();
        let look = self.common.clock.now() + LOOK;
        match next {
            Turn::At(at) if !self.readable => Turn::At(at.min(look)),
            Turn::Ended if !self.readable => Turn::At(look),
            Turn::Now | Turn::At(_) | Turn::Ended => Turn::Now,
        }
    }
}
