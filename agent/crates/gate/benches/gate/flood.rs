//! A flood of bogus Initials, over the kernel's sockets and at a rate that does not drift.

use std::{
    cell::RefCell,
    collections::HashSet,
    fmt, io,
    net::{Ipv4Addr, SocketAddr},
    rc::Rc,
    str::FromStr,
    time::{Duration, Instant},
};

use anyhow::Context as _;
use base::clock::{Clock, ManualClock, SystemClock};
use net::{
    Net, Path, Ready, ReceiveBatch, SendBatch, SendOutcome, Token, UdpOptions, UdpRole, UdpSocket,
    alarm::Alarm,
    batch::MAX_MESSAGE_BYTES,
    kernel::KernelNet,
    memory::{Datagram, MemoryFabric, Verdict},
    ports::Ports,
    process, wildcard_for,
};
use rand::{SeedableRng as _, rngs::SmallRng};

use crate::initial::{BYTES, bogus};

/// Bursts that one turn sends at most, so that answers are not left waiting.
const BURSTS_PER_TURN: usize = 16;

/// The least time to wait for the next burst; a shorter wait would cost more than the burst.
const LEAST_REST: Duration = Duration::from_micros(50);

/// Datagrams per second; none is as fast as it goes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Rate(Option<u64>);

impl FromStr for Rate {
    type Err = &'static str;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        if text == "max" {
            return Ok(Self(None));
        }
        let rate = text.parse().ok().filter(|rate| (1..=100_000_000).contains(rate));
        rate.map(|rate| Self(Some(rate))).ok_or("write datagrams per second, 1 to 100000000, or max")
    }
}

impl Rate {
    /// When a datagram is due after `earlier` others, counted from the first: late ones are made up for, so the rate never drifts.
    fn due(self, earlier: u64) -> Duration {
        let Some(rate) = self.0 else { return Duration::ZERO };
        let nanoseconds = u128::from(earlier) * 1_000_000_000 / u128::from(rate);
        Duration::from_nanos(u64::try_from(nanoseconds).unwrap_or(u64::MAX))
    }

    /// Datagrams of a burst: as many as a GSO message takes, but at most a millisecond of the rate.
    fn burst(self, most: u16) -> u16 {
        self.0.map_or(most, |rate| u16::try_from(rate / 1_000).unwrap_or(u16::MAX).clamp(1, most))
    }
}

/// The flood that is asked for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Load {
    pub(crate) to: SocketAddr,
    pub(crate) rate: Rate,
    pub(crate) duration: Duration,
    /// Source ports; bursts rotate over them.
    pub(crate) ports: u16,
    /// Whether bursts leave as GSO messages.
    pub(crate) gso: bool,
    /// The seed of tokens and connection IDs.
    pub(crate) seed: u64,
}

/// Sends the flood over the kernel's sockets.
pub(crate) fn run(load: Load) -> anyhow::Result<Outcome> {
    process::raise_descriptor_limit(64 + u64::from(load.ports))?;
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    runtime.block_on(async {
        let (ready, clock) = (Ready::default(), Rc::new(SystemClock));
        let mut net = KernelNet::new(ready.clone(), Rc::<SystemClock>::clone(&clock), Ports::default());
        let mut flood = Flood::new(&mut net, clock, load)?;
        let (mut alarm, mut tokens) = (Alarm::new()?, Vec::new());
        loop {
            tokens.clear();
            ready.drain(&mut tokens);
            match flood.turn(&tokens) {
                Turn::Ended => return Ok(flood.outcome()),
                // Lets the runtime look at the sockets.
                Turn::Now => tokio::task::yield_now().await,
                Turn::At(at) => {
                    alarm.wait(&ready, at.saturating_duration_since(SystemClock.now())).await?;
                }
            }
        }
    })
}

/// The outcome of a flood that was sent.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub(crate) struct Outcome {
    seconds: f64,
    sent: u64,
    /// How often a socket had no room.
    blocked: u64,
    /// Datagrams that the kernel did not take.
    errors: u64,
    /// Datagrams that came back from the target.
    answers: u64,
    /// ICMP errors that came back from the target.
    refused: u64,
}

impl Outcome {
    fn per_second(&self) -> f64 {
        self.sent as f64 / self.seconds
    }

    pub(crate) fn json(&self) -> serde_json::Value {
        let Self { seconds, sent, blocked, errors, answers, refused } = *self;
        serde_json::json!({
            "seconds": seconds,
            "sent_datagrams": sent,
            "sent_pps": self.per_second(),
            "sender_blocked": blocked,
            "sender_errors": errors,
            "answers": answers,
            "refused": refused,
        })
    }
}

impl fmt::Display for Outcome {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { seconds, sent, blocked, errors, answers, refused } = self;
        writeln!(f, "sent           {sent} in {seconds:.2} s: {:.0} a second", self.per_second())?;
        writeln!(f, "blocked        {blocked}")?;
        writeln!(f, "errors         {errors}")?;
        write!(f, "came back      {answers} datagrams, {refused} ICMP errors")
    }
}

/// The event that [`Flood::turn`] waits for.
enum Turn {
    Now,
    /// A socket, at most until then.
    At(Instant),
    Ended,
}

/// Sends bursts at its rate until its time is over.
struct Flood {
    clock: Rc<dyn Clock>,
    start: Instant,
    load: Load,
    sockets: Vec<Box<dyn UdpSocket>>,
    /// The socket of the next burst.
    next_socket: usize,
    burst: u16,
    /// Datagrams that were written to the batch so far.
    written: u64,
    batch: SendBatch,
    /// The socket that has no room for the rest of `batch`.
    waiting: Option<usize>,
    rng: SmallRng,
    received: ReceiveBatch,
    outcome: Outcome,
}

impl Flood {
    fn new(net: &mut dyn Net, clock: Rc<dyn Clock>, load: Load) -> anyhow::Result<Self> {
        let options = UdpOptions {
            bind: wildcard_for(load.to),
            connect: Some(load.to),
            role: UdpRole::Upstream,
            buffer_bytes: 8 << 20,
            interface: None,
            mark: 0,
            gso: load.gso,
        };
        let open = |token| net.udp(&options, Token(token)).context("cannot open a socket");
        let sockets = (0..u32::from(load.ports)).map(open).collect::<anyhow::Result<Vec<_>>>()?;
        let most = net.most_segments().min((MAX_MESSAGE_BYTES / usize::from(BYTES)) as u16);
        Ok(Self {
            start: clock.now(),
            clock,
            sockets,
            next_socket: 0,
            burst: load.rate.burst(most),
            written: 0,
            batch: SendBatch::with_segments(MAX_MESSAGE_BYTES, most),
            waiting: None,
            rng: SmallRng::seed_from_u64(load.seed),
            received: ReceiveBatch::default(),
            outcome: Outcome::default(),
            load,
        })
    }

    fn outcome(&self) -> Outcome {
        let seconds = self.clock.now().saturating_duration_since(self.start).as_secs_f64();
        Outcome { seconds, ..self.outcome }
    }

    /// Writes the next burst; returns the socket that it leaves by.
    fn fill(&mut self) -> usize {
        let path = Path { destination: self.load.to, source: None, tos: 0 };
        for _ in 0..self.burst {
            let Some(room) = self.batch.tail(BYTES.into()) else { break };
            bogus(room, &mut self.rng);
            self.batch.commit(&path, 0, BYTES.into(), 1);
        }
        self.written += u64::from(self.burst);
        let socket = self.next_socket;
        self.next_socket = (socket + 1) % self.sockets.len();
        socket
    }

    /// Gives the batch to the kernel; false if the socket has no room for all of it.
    fn flush(&mut self, socket: usize) -> bool {
        let Self { batch, sockets, outcome: Outcome { sent, errors, .. }, .. } = self;
        sockets[socket].send(batch, &mut |message, outcome| {
            let failed = match outcome {
                SendOutcome::Sent => 0,
                SendOutcome::Partly { failed, .. } => failed,
                SendOutcome::Failed(_) => message.segments,
            };
            *sent += u64::from(message.segments - failed);
            *errors += u64::from(failed);
        });
        self.waiting = (!self.batch.is_empty()).then_some(socket);
        self.waiting.is_none()
    }

    /// Counts the answers and errors at a socket.
    fn receive(&mut self, socket: usize) {
        let Some(socket) = self.sockets.get_mut(socket) else { return };
        loop {
            match socket.receive(&mut self.received) {
                Ok(()) => {
                    let datagrams = |index| self.received.meta(index).segments().count() as u64;
                    self.outcome.answers += (0..self.received.len()).map(datagrams).sum::<u64>();
                }
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => return,
                Err(_) => self.outcome.refused += 1,
            }
        }
    }

    fn turn(&mut self, ready: &[Token]) -> Turn {
        for token in ready {
            self.receive(token.0 as usize);
        }
        let end = self.start + self.load.duration;
        for _ in 0..BURSTS_PER_TURN {
            let now = self.clock.now();
            if now >= end {
                return Turn::Ended;
            }
            if let Some(socket) = self.waiting
                && !self.flush(socket)
            {
                return Turn::At(end);
            }
            let due = self.start + self.load.rate.due(self.written);
            if due > now {
                return Turn::At(due.max(now + LEAST_REST).min(end));
            }
            let socket = self.fill();
            if !self.flush(socket) {
                self.outcome.blocked += 1;
                return Turn::At(end);
            }
        }
        Turn::Now
    }
}

/// The rate is exact, ports take turns, and whatever comes back is counted.
pub(crate) fn self_test() -> anyhow::Result<()> {
    rates_are_read_and_kept();
    in_memory_the_rate_is_exact_and_ports_take_turns()?;
    at_a_closed_port_the_kernel_refuses()
}

fn rates_are_read_and_kept() {
    for text in ["0", "-1", "1e5", "fast", "100000001"] {
        assert!(text.parse::<Rate>().is_err(), "{text}");
    }
    assert_eq!("max".parse(), Ok(Rate(None)));
    let rate = Rate(Some(3_000_000));
    assert_eq!("3000000".parse(), Ok(rate));
    // 333.3 ns each: fractions of a nanosecond do not add up.
    assert_eq!(rate.due(3_000_000), Duration::from_secs(1));
    assert_eq!([rate.burst(54), Rate(Some(10_000)).burst(54), Rate(Some(1)).burst(54)], [54, 10, 1]);
}

fn in_memory_the_rate_is_exact_and_ports_take_turns() -> anyhow::Result<()> {
    let (fabric, ready, clock) = (MemoryFabric::default(), Ready::default(), ManualClock::default());
    let to = SocketAddr::from((Ipv4Addr::new(192, 0, 2, 2), 4_433));
    let mut far = fabric.host(&[to.ip()], Ready::default());
    let role = UdpRole::Ingress;
    let options = UdpOptions {
        bind: to,
        connect: None,
        role,
        buffer_bytes: 1 << 20,
        interface: None,
        mark: 0,
        gso: true,
    };
    let _listener = far.udp(&options, Token(0))?;
    let heard = Rc::new(RefCell::new(Vec::new()));
    let log = Rc::clone(&heard);
    fabric.set_hook(move |datagram: &Datagram<'_>| {
        log.borrow_mut().push((datagram.from, datagram.payload.len()));
        Verdict::Drop
    });
    let mut near = fabric.host(&[Ipv4Addr::new(192, 0, 2, 1).into()], ready.clone());
    let duration = Duration::from_secs(2);
    let load = Load { to, rate: Rate(Some(1_000)), duration, ports: 3, gso: true, seed: 1 };
    let mut flood = Flood::new(&mut near, Rc::new(clock.clone()), load)?;
    loop {
        let mut tokens = Vec::new();
        ready.drain(&mut tokens);
        match flood.turn(&tokens) {
            Turn::Ended => break,
            Turn::Now => {}
            Turn::At(at) => clock.advance(at.saturating_duration_since(clock.now())),
        }
    }
    let outcome = flood.outcome();
    assert_eq!((outcome.sent, outcome.errors, outcome.answers), (2_000, 0, 0));
    assert!((outcome.per_second() - 1_000.0).abs() < 1.0, "{outcome}");
    let heard = heard.borrow();
    assert!(heard.len() == 2_000 && heard.iter().all(|(_, bytes)| *bytes == 1_200));
    let ports: HashSet<SocketAddr> = heard.iter().map(|(from, _)| *from).collect();
    assert_eq!(ports.len(), 3);
    Ok(())
}

fn at_a_closed_port_the_kernel_refuses() -> anyhow::Result<()> {
    // Its socket is closed at once, so nobody listens there.
    let to = std::net::UdpSocket::bind((Ipv4Addr::LOCALHOST, 0))?.local_addr()?;
    let duration = Duration::from_millis(200);
    let outcome = run(Load { to, rate: Rate(Some(500)), duration, ports: 2, gso: true, seed: 1 })?;
    // However late a burst was; one that the end finds unsent is not sent.
    assert!(outcome.sent > 0 && outcome.sent + outcome.errors <= 101, "{outcome}");
    assert!(outcome.refused + outcome.errors > 0, "{outcome}");
    assert_eq!(outcome.answers, 0, "{outcome}");
    Ok(())
}
