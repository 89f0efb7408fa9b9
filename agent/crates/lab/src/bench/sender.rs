//! The load of one thread: bursts that rotate over its flows, at its rate.

use std::time::{Duration, Instant};

use net::{Path, SendBatch, SendFailure, SendOutcome, UdpSocket, batch::MAX_MESSAGE_BYTES};

use crate::bench::{
    datagram::{Header, Kind, Plan},
    pace::Pacer,
    party::{Common, Turn},
};

/// Bursts that one turn sends at most, so that what arrives meanwhile is not left waiting.
const BURSTS_PER_TURN: usize = 16;

/// A flow of the load, as its sender sees it.
#[derive(Clone, Copy, Debug)]
pub(super) struct Target {
    pub(super) flow: u32,
    /// The index of the thread's socket that the flow leaves by.
    pub(super) socket: usize,
    pub(super) path: Path,
    sequence: u64,
    /// Counted datagrams that the kernel took.
    pub(super) sent: u64,
}

impl Target {
    pub(super) fn new(flow: u32, socket: usize, path: Path) -> Self {
        Self { flow, socket, path, sequence: 0, sent: 0 }
    }
}

/// The outcome of the counted datagrams of a sender.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Sent {
    /// Counted datagrams that the kernel took.
    pub(super) datagrams: u64,
    /// Times the socket had no room.
    pub(super) blocked: u64,
    /// Counted datagrams that the kernel refused.
    pub(super) errors: u64,
    /// The reason of the last refusal.
    pub(super) failure: Option<SendFailure>,
}

impl Sent {
    pub(super) fn add(&mut self, other: &Self) {
        self.datagrams += other.datagrams;
        self.blocked += other.blocked;
        self.errors += other.errors;
        self.failure = self.failure.or(other.failure);
    }
}

/// The least time to wait for the next burst.
const LEAST_REST: Duration = Duration::from_micros(50);

/// Sends first what is not counted, then what is, until its time is over.
pub(super) struct Sender {
    common: Common,
    run: u32,
    down: bool,
    plan: Plan,
    pub(super) targets: Vec<Target>,
    next_target: usize,
    /// The end of the warm-up, until then; what is sent later is counted.
    warmup: Option<Instant>,
    end: Instant,
    pacer: Pacer,
    batch: SendBatch,
    /// The socket that has no room for what is in `batch`.
    waiting: Option<usize>,
    bursts: u32,
    pub(super) sent: Sent,
}

impl Sender {
    /// A sender that begins at `start`.
    ///
    /// `plan.bits_per_second` is what these targets share.
    pub(super) fn new(
        common: Common,
        run: u32,
        start: Instant,
        down: bool,
        plan: Plan,
        targets: Vec<Target>,
    ) -> Self {
        let counted_from = start + Duration::from_millis(plan.warmup_ms.into());
        Self {
            common,
            run,
            down,
            plan,
            targets,
            next_target: 0,
            warmup: Some(counted_from),
            end: counted_from + Duration::from_millis(plan.measured_ms.into()),
            pacer: Pacer::new(start, plan.size, plan.bits_per_second),
            batch: SendBatch::with_segments(
                MAX_MESSAGE_BYTES.max(usize::from(plan.burst) * usize::from(plan.size)),
                plan.burst.max(1),
            ),
            waiting: None,
            bursts: 0,
            sent: Sent::default(),
        }
    }

    /// Sends the bursts that are due. It waits for the next one, for room in the socket, or for the end.
    pub(super) fn turn(&mut self, sockets: &mut [Box<dyn UdpSocket>]) -> Turn {
        if self.targets.is_empty() {
            return Turn::Ended;
        }
        for _ in 0..BURSTS_PER_TURN {
            let now = self.common.clock.now();
            if now >= self.end {
                // What the kernel has not taken by now is not sent.
                self.batch.clear();
                return Turn::Ended;
            }
            if let Some(socket) = self.waiting
                && !self.flush(socket, sockets)
            {
                return Turn::At(self.end);
            }
            if let Some(until) = self.warmup.filter(|until| now >= *until) {
                self.count_from(until);
            }
            let due = self.pacer.due();
            if due > now {
                let boundary = self.warmup.unwrap_or(self.end);
                // Less than that costs more than the bursts; the schedule is made up for.
                return Turn::At(due.max(now + LEAST_REST).min(boundary));
            }
            let socket = self.fill(now);
            if !self.flush(socket, sockets) {
                self.sent.blocked += u64::from(self.warmup.is_none());
                return Turn::At(self.end);
            }
        }
        Turn::Now
    }

    /// Starts the schedule and the counts anew at `start`.
    fn count_from(&mut self, start: Instant) {
        self.warmup = None;
        self.pacer = Pacer::new(start, self.plan.size, self.plan.bits_per_second);
        for target in &mut self.targets {
            target.sequence = 0;
        }
    }

    /// Writes the next burst; returns the socket that it leaves by.
    fn fill(&mut self, now: Instant) -> usize {
        let owner = self.owner();
        let target = &mut self.targets[self.next_target];
        let size = usize::from(self.plan.size);
        let mut header = Header {
            kind: if self.warmup.is_none() { Kind::Data } else { Kind::Warmup },
            down: self.down,
            run: self.run,
            flow: target.flow,
            sequence: target.sequence,
            sent_ns: self.common.nanoseconds(now),
        };
        for _ in 0..self.plan.burst {
            let Some(room) = self.batch.tail(size) else { break };
            header.write(room);
            self.batch.commit(&target.path, owner, size, 1);
            header.sequence += 1;
        }
        let count = header.sequence - target.sequence;
        self.pacer.sent(u16::try_from(count).unwrap_or(u16::MAX));
        target.sequence = header.sequence;
        let socket = target.socket;
        self.next_target = (self.next_target + 1) % self.targets.len();
        self.bursts = self.bursts.wrapping_add(1);
        socket
    }

    /// Names the burst's target, and whether it is counted. Neighbours differ, so that no message joins two bursts.
    fn owner(&self) -> u32 {
        // There are fewer flows than 2^15.
        (self.next_target as u32) << 2 | (self.bursts & 1) << 1 | u32::from(self.warmup.is_none())
    }

    /// Gives the batch to the kernel; false if it has no room for all of it.
    fn flush(&mut self, socket: usize, sockets: &mut [Box<dyn UdpSocket>]) -> bool {
        let Self { batch, targets, sent, .. } = self;
        sockets[socket].send(batch, &mut |message, outcome| {
            if message.owner & 1 == 0 {
                return;
            }
            let (failed, why) = refused(outcome, message.segments);
            let taken = u64::from(message.segments - failed);
            targets[(message.owner >> 2) as usize].sent += taken;
            sent.datagrams += taken;
            sent.errors += u64::from(failed);
            sent.failure = why.or(sent.failure);
        });
        self.waiting = if self.batch.is_empty() { None } else { Some(socket) };
        self.waiting.is_none()
    }
}

/// How many of the `segments` of a message the kernel did not take, and why.
pub(crate) fn refused(outcome: SendOutcome, segments: u16) -> (u16, Option<SendFailure>) {
    match outcome {
        SendOutcome::Sent => (0, None),
        SendOutcome::Partly { failed, why } => (failed, Some(why)),
        SendOutcome::Failed(why) => (segments, Some(why)),
    }
}
