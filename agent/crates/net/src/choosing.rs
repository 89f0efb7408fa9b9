//! A dialled socket with two ways to the far end: UDP, and a stream where UDP does not pass.
//!
//! ```text
//!            silence: Choosing::seek                     heard over the stream for half a second,
//!   Udp ──────────────────────────────► Both             UDP answers no question
//!    ▲                                  │   │
//!    │      UDP answers the question    │   └────────────► Stream ── asks over UDP after 1, 2, 4, 5 … 30 s
//!    └──────────────────────────────────┴───────────────────┘
//! ```
//!
//! The worker sees one address. The far end sees a client that has moved, as after a NAT rebinding, so connections and lanes go on. A
//! question about UDP is no packet of theirs ([`Probe`]): a lane would stay on the stream as long as that is alive.

use std::{
    io,
    net::SocketAddr,
    rc::Rc,
    sync::Arc,
    time::{Duration, Instant},
};

use base::clock::Clock;

use crate::{
    Delivery, DeliveryMessage, KernelQueue, Ready, ReceiveBatch, SendBatch, SendOutcome, SendRefusal, Token,
    UdpOffload, UdpSocket, UdpStats,
    batch::{Burst, Message, Path},
    carrier::{CarrierUdp, Carriers, Experience, Heard, Probe, number_of},
    udp::KernelUdp,
    way::{Because, Over, Taken},
};

/// How long after a stream was first heard UDP may still answer, a few round trips, before it is given up for a while.
const DECISION: Duration = Duration::from_millis(500);

/// The time between two questions while both ways are tried.
const QUESTION_INTERVAL: Duration = Duration::from_millis(100);

/// How long UDP is left alone, at first and at most.
const PAUSES: [Duration; 2] = [Duration::from_secs(1), Duration::from_secs(30)];

/// How often at least UDP is asked while a stream has carried for less than a minute: most cuts are short.
const OFTEN: Duration = Duration::from_secs(5);
const OFTEN_FOR: Duration = Duration::from_secs(60);

/// After UDP has carried for so long, its next failure is treated as its first.
const TRUSTED: Duration = Duration::from_secs(60);

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Way {
    Udp,
    /// Both, since the stream was first heard.
    Both(Option<Instant>),
    Stream,
}

/// What a socket needs to open a stream.
pub(crate) struct Dials {
    pub(crate) label: SocketAddr,
    pub(crate) carriers: Rc<dyn Carriers>,
    pub(crate) ready: Ready,
    pub(crate) token: Token,
    pub(crate) clock: Rc<dyn Clock>,
}

/// A dialled socket with two ways.
pub(crate) struct Choosing {
    /// What the worker has dialled: an address, or the label.
    remote: SocketAddr,
    /// Where UDP leads.
    over_udp: SocketAddr,
    udp: KernelUdp,
    stream: Option<CarrierUdp>,
    dials: Dials,
    experience: Arc<Experience>,
    way: Way,
    /// When UDP is asked again, and how long it is left alone after that.
    next: Instant,
    pause: Duration,
    /// When UDP was last chosen.
    chosen: Instant,
    /// Since when and why the way is what it is; both ways at once and a stream that has won are one.
    since: Instant,
    because: Because,
    has_moved: bool,
    /// The counts of streams that have ended.
    past: UdpStats,
    past_drops: u64,
}

impl Choosing {
    /// A socket to `remote`, with `udp` connected to `over_udp`.
    pub(crate) fn new(
        remote: SocketAddr,
        over_udp: SocketAddr,
        udp: KernelUdp,
        dials: Dials,
        experience: Arc<Experience>,
    ) -> Self {
        let now = dials.clock.now();
        let (begins, because) = match experience.newest(now) {
            Some(heard) => (heard, Because::HeardThere),
            None if number_of(remote).is_some() => (Heard::Stream, Because::Dialled),
            None => (Heard::Udp, Because::Dialled),
        };
        let mut this = Self {
            remote,
            over_udp,
            udp,
            stream: None,
            dials,
            experience,
            way: Way::Udp,
            next: now + PAUSES[0],
            pause: PAUSES[0],
            chosen: now,
            since: now,
            because,
            has_moved: false,
            past: UdpStats::default(),
            past_drops: 0,
        };
        if begins == Heard::Stream {
            this.open();
            this.way = Way::Stream;
        }
        this
    }

    fn now(&self) -> Instant {
        self.dials.clock.now()
    }

    fn open(&mut self) {
        let Dials { label, carriers, ready, token, .. } = &self.dials;
        self.stream.get_or_insert_with(|| CarrierUdp::dialled(*label, carriers, ready, *token));
    }

    /// Ends the stream, and keeps what it has counted.
    fn end_stream(&mut self) {
        if let Some(stream) = self.stream.take() {
            self.past.add_since(&stream.stats(), &UdpStats::default());
            self.past_drops += stream.kernel_drops();
        }
    }

    fn probe(&self) -> Option<Arc<Probe>> {
        self.stream.as_ref()?.queue.probe()
    }

    /// Sends a question over UDP, if a stream is open and it is time for one.
    fn ask(&mut self) {
        if self.stream.is_none() {
            return;
        }
        let now = self.now();
        if now < self.next {
            return;
        }
        let Some(probe) = self.probe() else { return };
        self.next = match self.way {
            Way::Udp | Way::Both(_) => now + QUESTION_INTERVAL,
            Way::Stream => {
                if self.pause == PAUSES[1] {
                    self.follow();
                }
                let recent = now.saturating_duration_since(self.since) < OFTEN_FOR;
                self.pause = (self.pause * 2).min(if recent { OFTEN } else { PAUSES[1] });
                now + self.pause
            }
        };
        let path = Path { destination: self.over_udp, source: None, tos: 0 };
        let question = &probe.question;
        self.udp.send_now(&Burst { path, bytes: question, segment: question.len().max(1) }, &mut |_| {});
    }

    /// Has UDP lead to another address, if the peer has one since it was looked up: a stream may last for months.
    fn follow(&mut self) {
        let moved = self.dials.carriers.moved(self.dials.label, self.over_udp);
        let Some(to) = moved.filter(|to| to.is_ipv6() == self.over_udp.is_ipv6()) else { return };
        match self.udp.reconnect(to) {
            Ok(()) => {
                tracing::debug!(from = %self.over_udp, %to, "UDP beside a stream is tried at another address");
                self.over_udp = to;
            }
            Err(error) => tracing::debug!(%error, %to, "no socket for UDP beside a stream"),
        }
    }

    /// UDP passes: the stream has had its time.
    fn choose_udp(&mut self) {
        self.end_stream();
        (self.way, self.chosen, self.has_moved) = (Way::Udp, self.now(), true);
        (self.since, self.because) = (self.chosen, Because::UdpAnswers);
    }

    /// Takes note of what has come over UDP, without the answers to questions.
    fn heard_udp(&mut self, batch: &mut ReceiveBatch) {
        let probe = self.probe();
        let mut answered = false;
        if let Some(probe) = &probe {
            batch.retain(|_, bytes| {
                let is_answer = *bytes == *probe.answer;
                answered |= is_answer;
                !is_answer
            });
        }
        match self.way {
            Way::Both(_) | Way::Stream if answered => self.choose_udp(),
            // It was heard before a stream could be opened.
            Way::Both(_) if probe.is_none() => self.choose_udp(),
            Way::Both(_) | Way::Stream => return,
            Way::Udp => {}
        }
        self.experience.note(Heard::Udp, self.now());
    }

    fn heard_stream(&mut self) {
        let now = self.now();
        if let Way::Both(since) = &mut self.way {
            let since = *since.get_or_insert(now);
            if now.saturating_duration_since(since) >= DECISION {
                self.way = Way::Stream;
                self.next = now + self.pause;
            }
        }
        if self.way != Way::Udp {
            self.experience.note(Heard::Stream, now);
        }
    }

    /// Receives over UDP; `WouldBlock` also for errors, as long as there is another way.
    fn receive_udp(&mut self, batch: &mut ReceiveBatch) -> io::Result<()> {
        loop {
            match self.udp.receive(batch) {
                Ok(()) => {
                    self.heard_udp(batch);
                    batch.come_from(self.remote);
                    if !batch.is_empty() {
                        return Ok(());
                    }
                }
                Err(error) if error.kind() == io::ErrorKind::WouldBlock || self.way == Way::Udp => {
                    return Err(error);
                }
                Err(error) => tracing::trace!(%error, "UDP beside a stream"),
            }
        }
    }

    /// Sends what is in `batch` over UDP as well, and keeps it.
    fn send_copies(&mut self, batch: &mut SendBatch) {
        let (messages, bytes) = batch.parts();
        for message in messages {
            let path = Path { destination: self.over_udp, ..message.path };
            let burst = Burst { path, bytes: &bytes[message.range.clone()], segment: message.segment.max(1) };
            if !burst.bytes.is_empty() {
                self.udp.send_now(&burst, &mut |_| {});
            }
        }
    }
}

impl UdpSocket for Choosing {
    fn local_addr(&self) -> SocketAddr {
        self.udp.local_addr()
    }

    fn receive(&mut self, batch: &mut ReceiveBatch) -> io::Result<()> {
        match self.receive_udp(batch) {
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
            received => return received,
        }
        let Some(stream) = &mut self.stream else { return Err(io::ErrorKind::WouldBlock.into()) };
        stream.receive(batch)?;
        batch.come_from(self.remote);
        self.heard_stream();
        Ok(())
    }

    fn send(&mut self, batch: &mut SendBatch, outcome: &mut dyn FnMut(&Message, SendOutcome)) {
        if batch.is_empty() {
            return;
        }
        if let Way::Both(_) = self.way {
            self.send_copies(batch);
        }
        match (&mut self.stream, self.way) {
            (Some(stream), Way::Both(_) | Way::Stream) => {
                stream.send(batch, outcome);
                self.ask();
            }
            (None, _) | (_, Way::Udp) => {
                if self.remote != self.over_udp {
                    batch.lead_to(self.over_udp);
                }
                self.udp.send(batch, outcome);
            }
        }
    }

    fn send_now(&mut self, burst: &Burst<'_>, outcome: &mut dyn FnMut(SendOutcome)) -> usize {
        if self.way != Way::Udp {
            return 0;
        }
        let path = Path { destination: self.over_udp, ..burst.path };
        self.udp.send_now(&Burst { path, ..*burst }, outcome)
    }

    fn deliver(
        &mut self,
        received: &ReceiveBatch,
        delivery: &mut Delivery,
        outcome: &mut dyn FnMut(&DeliveryMessage, SendOutcome),
    ) {
        self.udp.deliver(received, delivery, outcome);
    }

    fn seek(&mut self) -> bool {
        let now = self.now();
        if self.way == Way::Udp && now.saturating_duration_since(self.chosen) >= TRUSTED {
            self.pause = PAUSES[0];
        }
        if !matches!(self.way, Way::Both(_)) {
            self.open();
            if self.way == Way::Udp {
                (self.since, self.because) = (now, Because::UdpSilent);
            }
            (self.way, self.next) = (Way::Both(None), now);
        }
        true
    }

    fn taken(&self) -> Option<Taken> {
        let over = match self.way {
            Way::Udp => Over::Udp,
            Way::Both(_) => Over::Both,
            Way::Stream => Over::Carrier,
        };
        Some(Taken { over, because: self.because, since: Some(self.since) })
    }

    fn take_moved(&mut self) -> bool {
        std::mem::take(&mut self.has_moved)
    }

    fn take_refusals(&mut self) -> Vec<SendRefusal> {
        let mut refusals = self.udp.take_refusals();
        refusals.iter_mut().for_each(|refusal| refusal.destination = self.remote);
        if self.way == Way::Udp { refusals } else { Vec::new() }
    }

    fn stats(&self) -> UdpStats {
        let mut stats = self.udp.stats();
        stats.add_since(&self.past, &UdpStats::default());
        if let Some(stream) = &self.stream {
            stats.add_since(&stream.stats(), &UdpStats::default());
        }
        stats
    }

    fn receive_buffer(&self) -> Option<usize> {
        self.udp.receive_buffer()
    }

    fn kernel_queue(&self) -> KernelQueue {
        let mut queue = self.udp.kernel_queue();
        queue.drops += self.past_drops;
        if let Some(stream) = &self.stream {
            let of_stream = stream.kernel_queue();
            queue.drops += of_stream.drops;
            queue.bytes += of_stream.bytes;
        }
        queue
    }

    fn offload(&self, _: SocketAddr) -> UdpOffload {
        match self.way {
            Way::Udp => self.udp.offload(self.over_udp),
            Way::Both(_) | Way::Stream => UdpOffload::default(),
        }
    }
}
