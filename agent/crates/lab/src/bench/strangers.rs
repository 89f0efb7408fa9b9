//! The load of strangers: Initials that look like a knock and are none, so that they end at the gate's first MAC.

use std::{
    fmt, io,
    net::SocketAddr,
    rc::Rc,
    time::{Duration, Instant},
};

use net::{
    Net, Path, ReceiveBatch, SendBatch, SendOutcome, Token, UdpSocket, batch::MAX_MESSAGE_BYTES, process,
};
use rand::{Rng, SeedableRng, rngs::SmallRng};
use wire::clock::Clock;

use crate::{
    bench::{
        Party, Turn,
        pace::{Pacer, default_burst, largest_burst},
        shell,
    },
    out,
};

/// Bytes of each datagram: the least that may carry an Initial (RFC 9000 §14.1), so that most fit a second.
pub(super) const BYTES: u16 = 1_200;

/// Bytes of a knock.
const TOKEN_BYTES: usize = 136;

/// Bursts that one turn sends at most, so that answers are not left waiting.
const BURSTS_PER_TURN: usize = 16;

/// The least time to wait for the next burst; less costs more than the burst.
const LEAST_REST: Duration = Duration::from_micros(50);

/// What is to be sent.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct StrangersOptions {
    /// Where to.
    pub to: SocketAddr,
    /// Datagrams per second; none is as fast as it goes.
    pub rate: Option<u64>,
    /// How long.
    pub duration: Duration,
    /// Source ports; bursts rotate over them.
    pub ports: u16,
    /// Whether bursts leave as GSO messages.
    pub gso: bool,
    /// What tokens and connection IDs are made from.
    pub seed: u64,
    /// Print JSON instead of words.
    pub json: bool,
}

/// Sends, and prints how much.
///
/// # Errors
/// Addresses that cannot be used.
pub fn run_strangers(options: StrangersOptions) -> anyhow::Result<()> {
    process::raise_descriptor_limit(64 + u64::from(options.ports))?;
    let make = move |net: &mut net::kernel::KernelNet, clock| Strangers::new(net, clock, options);
    let thread = shell::spawn("strangers".to_owned(), make, Strangers::finish)?;
    let outcome = thread.join().map_err(|_panic| anyhow::anyhow!("the sending thread panicked"))??;
    if options.json { out::say(&outcome.json()) } else { out::say(&outcome) }
}

/// What became of the load.
#[derive(Clone, Copy, Debug, PartialEq)]
struct Outcome {
    seconds: f64,
    sent: u64,
    blocked: u64,
    errors: u64,
    answers: u64,
    refused: u64,
}

impl Outcome {
    fn per_second(&self) -> f64 {
        self.sent as f64 / self.seconds
    }

    fn json(&self) -> serde_json::Value {
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

/// Sends bursts at its rate until its time is over.
struct Strangers {
    clock: Rc<dyn Clock>,
    start: Instant,
    end: Instant,
    to: SocketAddr,
    sockets: Vec<Box<dyn UdpSocket>>,
    /// The socket of the next burst.
    place: usize,
    burst: u16,
    pacer: Pacer,
    batch: SendBatch,
    /// The socket that has no room for what is in `batch`.
    waiting: Option<usize>,
    rng: SmallRng,
    received: ReceiveBatch,
    sent: u64,
    blocked: u64,
    errors: u64,
    answers: u64,
    refused: u64,
}

impl Strangers {
    fn new(net: &mut dyn Net, clock: Rc<dyn Clock>, options: StrangersOptions) -> anyhow::Result<Self> {
        let sockets = (0..u32::from(options.ports))
            .map(|token| shell::client_socket(net, options.to, options.gso, Token(token)))
            .collect::<anyhow::Result<Vec<_>>>()?;
        let bits_per_second = options.rate.map(|rate| rate.saturating_mul(u64::from(BYTES) * 8));
        let most = largest_burst(BYTES, net.most_segments());
        let start = clock.now();
        Ok(Self {
            clock,
            start,
            end: start + options.duration,
            to: options.to,
            sockets,
            place: 0,
            burst: default_burst(BYTES, bits_per_second, most),
            pacer: Pacer::new(start, BYTES, bits_per_second),
            batch: SendBatch::with_segments(MAX_MESSAGE_BYTES, most),
            waiting: None,
            rng: SmallRng::seed_from_u64(options.seed),
            received: ReceiveBatch::default(),
            sent: 0,
            blocked: 0,
            errors: 0,
            answers: 0,
            refused: 0,
        })
    }

    fn finish(self) -> Outcome {
        let seconds = self.clock.now().saturating_duration_since(self.start).as_secs_f64();
        let Self { sent, blocked, errors, answers, refused, .. } = self;
        Outcome { seconds, sent, blocked, errors, answers, refused }
    }

    /// Writes the next burst; returns the socket that it leaves by.
    fn fill(&mut self) -> usize {
        let path = Path { destination: self.to, source: None, tos: 0 };
        for _ in 0..self.burst {
            let Some(room) = self.batch.tail(BYTES.into()) else { break };
            bogus(room, &mut self.rng);
            self.batch.commit(&path, 0, BYTES.into(), 1);
        }
        self.pacer.sent(self.burst);
        let socket = self.place;
        self.place = (self.place + 1) % self.sockets.len();
        socket
    }

    /// Gives the batch to the kernel; false if it has no room for all of it.
    fn flush(&mut self, socket: usize) -> bool {
        let Self { batch, sockets, sent, errors, .. } = self;
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

    /// Counts what came back.
    fn receive(&mut self, socket: usize) {
        let Some(socket) = self.sockets.get_mut(socket) else { return };
        loop {
            match socket.receive(&mut self.received) {
                Ok(()) => {
                    let datagrams = |index| self.received.meta(index).segments().count() as u64;
                    self.answers += (0..self.received.len()).map(datagrams).sum::<u64>();
                }
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => return,
                Err(_) => self.refused += 1,
            }
        }
    }
}

impl Party for Strangers {
    fn turn(&mut self, ready: &[Token]) -> Turn {
        for token in ready {
            self.receive(token.0 as usize);
        }
        for _ in 0..BURSTS_PER_TURN {
            let now = self.clock.now();
            if now >= self.end {
                return Turn::Ended;
            }
            if let Some(socket) = self.waiting
                && !self.flush(socket)
            {
                return Turn::At(self.end);
            }
            let due = self.pacer.due();
            if due > now {
                return Turn::At(due.max(now + LEAST_REST).min(self.end));
            }
            let socket = self.fill();
            if !self.flush(socket) {
                self.blocked += 1;
                return Turn::At(self.end);
            }
        }
        Turn::Now
    }
}

/// Makes `datagram`, of [`BYTES`] bytes, an Initial of version 1 with a token as long as a knock; connection IDs and token
/// are random, the rest is what it was.
///
/// ```text
/// | c3 | 00000001 | 8 | destination | 8 | source | 4088 | token, 136 | length | packet number, ciphertext, tag |
/// ```
pub(super) fn bogus(datagram: &mut [u8], rng: &mut SmallRng) {
    const TOKEN_AT: usize = 5 + 9 + 9 + 2;
    const LENGTH_AT: usize = TOKEN_AT + TOKEN_BYTES;
    rng.fill_bytes(&mut datagram[5..LENGTH_AT]);
    datagram[..6].copy_from_slice(&[0xc3, 0, 0, 0, 1, 8]);
    datagram[14] = 8;
    // Lengths in two bytes (RFC 9000 §16).
    datagram[TOKEN_AT - 2..TOKEN_AT].copy_from_slice(&(0x4000 | TOKEN_BYTES as u16).to_be_bytes());
    let rest = BYTES - LENGTH_AT as u16 - 2;
    datagram[LENGTH_AT..LENGTH_AT + 2].copy_from_slice(&(0x4000 | rest).to_be_bytes());
}

#[cfg(test)]
mod tests {
    use std::{cell::RefCell, collections::HashSet, net::Ipv4Addr};

    use quinn_proto::{FixedLengthConnectionIdParser, ProtectedHeader};

    use super::*;
    use net::{
        Ready, UdpOptions, UdpRole,
        memory::{Datagram, MemoryFabric, Verdict},
    };
    use wire::clock::ManualClock;

    #[test]
    fn each_datagram_is_an_initial_with_a_token_of_its_own() {
        let (mut rng, mut seen) = (SmallRng::seed_from_u64(1), HashSet::new());
        for _ in 0..100 {
            let mut datagram = [0; BYTES as usize];
            bogus(&mut datagram, &mut rng);
            let parser = FixedLengthConnectionIdParser::new(8);
            let mut cursor = io::Cursor::new(bytes::BytesMut::from(datagram.as_slice()));
            let header = ProtectedHeader::decode(&mut cursor, &parser, &[1], false).unwrap();
            let ProtectedHeader::Initial(header) = header else { panic!("{header:?}") };
            assert_eq!((&header.dst_cid[..], header.token_pos), (&datagram[6..14], 25..161));
            assert_eq!(cursor.position() + header.len, u64::from(BYTES));
            assert!(seen.insert(datagram[25..161].to_vec()));
        }
    }

    #[test]
    fn the_rate_is_exact_and_ports_take_turns() {
        let (fabric, ready) = (MemoryFabric::new(), Ready::new());
        let clock = ManualClock::default();
        let to = SocketAddr::from((Ipv4Addr::new(192, 0, 2, 2), 4_433));
        let mut far = fabric.host(&[to.ip()], Ready::new());
        let role = UdpRole::Ingress;
        let options = UdpOptions { bind: to, connect: None, role, buffer_bytes: 1 << 20, mark: 0, gso: true };
        let _listener = far.udp(&options, Token(0)).unwrap();
        let heard = Rc::new(RefCell::new(Vec::new()));
        let log = Rc::clone(&heard);
        fabric.set_hook(move |datagram: &Datagram<'_>| {
            log.borrow_mut().push((datagram.from, datagram.payload.len()));
            Verdict::Drop
        });
        let mut near = fabric.host(&[Ipv4Addr::new(192, 0, 2, 1).into()], ready.clone());
        let duration = Duration::from_secs(2);
        let options =
            StrangersOptions { to, rate: Some(1_000), duration, ports: 3, gso: true, seed: 1, json: false };
        let mut strangers = Strangers::new(&mut near, Rc::new(clock.clone()), options).unwrap();
        loop {
            let mut tokens = Vec::new();
            ready.drain(&mut tokens);
            match strangers.turn(&tokens) {
                Turn::Ended => break,
                Turn::Now => {}
                Turn::At(at) => clock.advance(at.saturating_duration_since(clock.now())),
            }
        }
        let outcome = strangers.finish();
        assert_eq!((outcome.sent, outcome.errors, outcome.answers), (2_000, 0, 0));
        assert!((outcome.per_second() - 1_000.0).abs() < 1.0, "{outcome}");
        let heard = heard.borrow();
        assert!(heard.len() == 2_000 && heard.iter().all(|(_, bytes)| *bytes == 1_200));
        let ports: HashSet<SocketAddr> = heard.iter().map(|(from, _)| *from).collect();
        assert_eq!(ports.len(), 3);
    }
}
