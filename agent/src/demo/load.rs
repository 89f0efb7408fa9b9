//! The demo's load: paced datagrams that carry their number and their time, and what comes back.

use std::{
    net::{SocketAddr, UdpSocket},
    os::fd::AsFd,
    sync::{
        Arc, Mutex, PoisonError,
        atomic::{AtomicBool, AtomicU64, Ordering},
    },
    thread::JoinHandle,
    time::{Duration, Instant},
};

use anyhow::Context as _;
use base::clock::{Clock, SystemClock};
use clap::{Args, value_parser};
use hdrhistogram::Histogram;
use lab::rate::bits_per_second;

#[derive(Clone, Copy, Debug, Args)]
pub(super) struct Options {
    /// How long to send
    #[arg(long, value_name = "N", default_value_t = 10, value_parser = value_parser!(u32).range(1..=86_400))]
    pub(super) seconds: u32,
    /// Payload bits per second of all flows together, with a unit: 500k, 200M, 2G
    #[arg(long, value_name = "RATE", default_value = "200M", value_parser = bits_per_second)]
    pub(super) rate: u64,
    /// UDP flows
    #[arg(long, value_name = "N", default_value_t = 4, value_parser = value_parser!(u16).range(1..=10_000))]
    pub(super) flows: u16,
    /// Payload of a datagram in bytes; each carries its sequence number and its time
    #[arg(long, value_name = "BYTES", default_value_t = 1150, value_parser = value_parser!(u16).range(32..=9000))]
    pub(super) size: u16,
}

/// Datagrams are sent in bursts this far apart: what a timer manages without spinning.
const TICK: Duration = Duration::from_millis(1);

/// What has been measured so far.
#[derive(Clone, Debug)]
pub(super) struct Measured {
    /// The number of datagrams that were sent.
    pub(super) sent: u64,
    /// Datagrams that came back, each counted once.
    pub(super) echoed: u64,
    /// The round-trip times of the datagrams, in nanoseconds.
    pub(super) rtt: Histogram<u64>,
    /// Buffers that the kernel dropped at the load's sockets.
    pub(super) kernel_drops: u64,
}

impl Default for Measured {
    fn default() -> Self {
        // 1 ns to a minute, to a tenth of a percent.
        let rtt =
            Histogram::new_with_max(60_000_000_000, 3).expect("the bounds are more than a factor of 2 apart");
        Self { sent: 0, echoed: 0, rtt, kernel_drops: 0 }
    }
}

/// The load of a demo while it is sent.
pub(super) struct Load {
    shared: Arc<Shared>,
    sender: JoinHandle<()>,
    receiver: JoinHandle<()>,
}

struct Shared {
    start: Instant,
    sent: AtomicU64,
    stop: AtomicBool,
    received: Mutex<Measured>,
    sockets: Vec<UdpSocket>,
}

impl Load {
    /// Starts to send the load to `ingress`.
    pub(super) fn start(ingress: SocketAddr, options: Options) -> anyhow::Result<Self> {
        let sockets = (0..options.flows)
            .map(|_| {
                let socket = UdpSocket::bind("127.0.0.1:0")?;
                socket.connect(ingress)?;
                socket.set_nonblocking(true)?;
                enlarge_buffers(&socket);
                Ok(socket)
            })
            .collect::<std::io::Result<Vec<_>>>()
            .context("cannot open the load's sockets (remedy: fewer --flows, or a higher `ulimit -n`)")?;
        let shared = Arc::new(Shared {
            start: SystemClock.now(),
            sent: AtomicU64::new(0),
            stop: AtomicBool::new(false),
            received: Mutex::default(),
            sockets,
        });
        let (duration, bytes) = (Duration::from_secs(options.seconds.into()), usize::from(options.size));
        let per_second = options.rate as f64 / 8.0 / bytes as f64;
        let sending = Arc::clone(&shared);
        let sender = std::thread::Builder::new()
            .name("demo-load".to_owned())
            .spawn(move || sending.send(duration, bytes, per_second))?;
        let receiving = Arc::clone(&shared);
        let receiver =
            std::thread::Builder::new().name("demo-sink".to_owned()).spawn(move || receiving.receive())?;
        Ok(Self { shared, sender, receiver })
    }

    /// Waits until the load has run for so many seconds.
    pub(super) fn wait(&self, seconds: u32) {
        let until = self.shared.start + Duration::from_secs(seconds.into());
        std::thread::sleep(until.saturating_duration_since(SystemClock.now()));
    }

    /// What has been measured so far.
    pub(super) fn measured(&self) -> Measured {
        self.shared.measured()
    }

    /// Waits until nothing has come for `quiet`, and returns everything.
    pub(super) fn finish(self, quiet: Duration) -> anyhow::Result<Measured> {
        self.sender.join().map_err(|_| anyhow::anyhow!("the load panicked"))?;
        let mut before = None;
        loop {
            let echoed = self.shared.measured().echoed;
            if before == Some(echoed) {
                break;
            }
            before = Some(echoed);
            std::thread::sleep(quiet);
        }
        self.shared.stop.store(true, Ordering::Relaxed);
        self.receiver.join().map_err(|_| anyhow::anyhow!("the sink panicked"))?;
        let mut measured = self.shared.measured();
        measured.kernel_drops =
            self.shared.sockets.iter().map(|socket| net::process::kernel_drops(socket.as_fd())).sum();
        Ok(measured)
    }
}

impl Shared {
    fn measured(&self) -> Measured {
        // What came back first: more may be sent meanwhile, but nothing comes back that was not sent.
        let mut measured = self.received.lock().unwrap_or_else(PoisonError::into_inner).clone();
        measured.sent = self.sent.load(Ordering::Relaxed);
        measured
    }

    fn send(&self, duration: Duration, bytes: usize, per_second: f64) {
        let mut datagram = vec![0; bytes];
        let (mut number, mut flow) = (0_u64, 0);
        loop {
            let elapsed = SystemClock.now().saturating_duration_since(self.start);
            #[expect(
                clippy::cast_possible_truncation,
                clippy::cast_sign_loss,
                reason = "a positive count, far below 2^53"
            )]
            let due = (elapsed.min(duration).as_secs_f64() * per_second) as u64;
            while number < due {
                datagram[..8].copy_from_slice(&number.to_be_bytes());
                datagram[8..16].copy_from_slice(&nanos(self.start).to_be_bytes());
                // A full send buffer is retried at the next tick; nothing counts as sent that was not.
                if self.sockets[flow].send(&datagram).is_err() {
                    break;
                }
                number += 1;
                flow = (flow + 1) % self.sockets.len();
                self.sent.fetch_add(1, Ordering::Relaxed);
            }
            if elapsed >= duration {
                return;
            }
            std::thread::sleep(TICK);
        }
    }

    fn receive(&self) {
        let mut buffer = vec![0; 65_536];
        let mut seen = Seen::default();
        while !self.stop.load(Ordering::Relaxed) {
            let mut idle = true;
            for socket in &self.sockets {
                while let Ok(len) = socket.recv(&mut buffer) {
                    idle = false;
                    let Some((number, sent)) = read(&buffer[..len]) else { continue };
                    if seen.first(number) {
                        let rtt = nanos(self.start).saturating_sub(sent);
                        let mut measured = self.received.lock().unwrap_or_else(PoisonError::into_inner);
                        measured.echoed += 1;
                        measured.rtt.saturating_record(rtt);
                    }
                }
            }
            if idle {
                std::thread::sleep(Duration::from_micros(50));
            }
        }
    }
}

/// The number and the time that a datagram carries.
fn read(datagram: &[u8]) -> Option<(u64, u64)> {
    let (number, rest) = datagram.split_first_chunk()?;
    let (sent, _) = rest.split_first_chunk()?;
    Some((u64::from_be_bytes(*number), u64::from_be_bytes(*sent)))
}

/// Which numbers have been seen, a bit each.
#[derive(Default)]
struct Seen(Vec<u64>);

impl Seen {
    /// Whether this is the first time.
    fn first(&mut self, number: u64) -> bool {
        let Ok(word) = usize::try_from(number / 64) else { return false };
        if self.0.len() <= word {
            self.0.resize(word + 1, 0);
        }
        let bit = 1 << (number % 64);
        let first = self.0[word] & bit == 0;
        self.0[word] |= bit;
        first
    }
}

/// A demo on a machine with small default buffers should show the agents' losses, not its own.
pub(super) fn enlarge_buffers(socket: &UdpSocket) {
    const BYTES: usize = 4 << 20;
    let socket = socket2::SockRef::from(socket);
    // The kernel grants what its limits allow.
    let _granted = socket.set_recv_buffer_size(BYTES).is_ok() && socket.set_send_buffer_size(BYTES).is_ok();
}

/// The time since `start`, in nanoseconds.
fn nanos(start: Instant) -> u64 {
    u64::try_from(SystemClock.now().saturating_duration_since(start).as_nanos()).unwrap_or(u64::MAX)
}
