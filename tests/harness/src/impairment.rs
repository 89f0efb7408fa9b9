//! A path that delays, loses, doubles, damages and reorders datagrams, that carries none above a size, and whose NAT may
//! forget whom it knows.

use std::{
    collections::{BTreeMap, VecDeque},
    net::{IpAddr, SocketAddr, UdpSocket},
    sync::{
        Arc, Condvar, Mutex, MutexGuard, PoisonError,
        atomic::{AtomicBool, Ordering},
    },
    thread::{self, JoinHandle, Scope},
    time::{Duration, Instant},
};

use socket2::SockRef;

use crate::{clock, place::Place, ports, random::Random, stream::LENGTH};

/// How often a thread looks whether it shall end.
const TICK: Duration = Duration::from_millis(50);

/// A direction of the path.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Way {
    /// From clients to the server.
    There,
    /// From the server to clients.
    Back,
}

impl Way {
    /// Both.
    pub const BOTH: [Self; 2] = [Self::There, Self::Back];
}

/// What a datagram is to whoever sees it on its way.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// A packet of a lane with what a test has sent, as its size tells.
    Payload,
    /// All others: acknowledgements, handshakes, probes of the path.
    Other,
}

/// The UDP payload, in bytes, of packets that carry what a test sends: [`LENGTH`] bytes through a service and inside of UDP over
/// IPv4 and IPv6, and 1150 bytes through a service. Around a datagram of a service are 32 bytes, around an IP packet 31
/// (`docs/wire-format.md`). Two of them share no packet. A path that is validated is sent packets of almost any size, but
/// hardly one of these.
const PAYLOAD_SIZES: [usize; 4] = [LENGTH + 32, LENGTH + 28 + 31, LENGTH + 48 + 31, 1150 + 32];

impl Kind {
    fn of(datagram: &[u8]) -> Self {
        // RFC 9000 §17.2: the first bit of a long header is set. Handshakes have it.
        let short = datagram.first().is_some_and(|byte| byte & 0x80 == 0);
        // One byte more where it opens its flow or the flow's number has two, and some where a signal of a flow shares the packet.
        let fits = |size: &usize| matches!(datagram.len().checked_sub(*size), Some(0 | 1 | 5..=8));
        if short && PAYLOAD_SIZES.iter().any(fits) { Self::Payload } else { Self::Other }
    }
}

/// What happens to a datagram on its way.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Path {
    /// How long each one takes, one way.
    pub delay: Duration,
    /// Which share is lost, 0 to 1.
    pub loss: f64,
    /// Which share arrives twice, 0 to 1.
    pub doubled: f64,
    /// Which share takes [`detour`](Self::detour) longer than the others, and so is overtaken, 0 to 1.
    pub detoured: f64,
    /// How much longer.
    pub detour: Duration,
    /// In which share one bit arrives as another, 0 to 1.
    pub damaged: f64,
    /// The largest UDP payload that passes, in bytes.
    pub largest: usize,
}

impl Default for Path {
    fn default() -> Self {
        Self {
            delay: Duration::ZERO,
            loss: 0.0,
            doubled: 0.0,
            detoured: 0.0,
            detour: Duration::ZERO,
            damaged: 0.0,
            largest: 65_535,
        }
    }
}

/// What became of the datagrams that came.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Fates {
    /// They went on, or wait to.
    pub passed: u64,
    /// Lost on purpose, or for a port that the NAT has given up.
    pub lost: u64,
    /// Went on twice.
    pub doubled: u64,
    /// Went on late.
    pub detoured: u64,
    /// Went on with a bit that is another.
    pub damaged: u64,
    /// Larger than the path carries.
    pub too_large: u64,
    /// The kernel did not take them.
    pub refused: u64,
}

impl Fates {
    /// How many came.
    #[must_use]
    pub fn came(&self) -> u64 {
        self.passed + self.lost + self.too_large
    }

    fn joined(self, other: Self, join: impl Fn(u64, u64) -> u64) -> Self {
        Self {
            passed: join(self.passed, other.passed),
            lost: join(self.lost, other.lost),
            doubled: join(self.doubled, other.doubled),
            detoured: join(self.detoured, other.detoured),
            damaged: join(self.damaged, other.damaged),
            too_large: join(self.too_large, other.too_large),
            refused: join(self.refused, other.refused),
        }
    }

    /// Those that came after `earlier` ones.
    #[must_use]
    pub fn since(self, earlier: Self) -> Self {
        self.joined(earlier, |now, before| now - before)
    }

    /// These and others.
    #[must_use]
    pub fn and(self, other: Self) -> Self {
        self.joined(other, |one, other| one + other)
    }
}

/// Forwards UDP between clients and one server over a [`Path`], with a socket of its own for each address of a client, as
/// a NAT does; dropping it ends it.
///
/// Datagrams of one socket that take equally long keep their order.
#[derive(Debug)]
pub struct Impairment {
    /// Where clients send to.
    pub address: SocketAddr,
    inside: Arc<Inside>,
    threads: Vec<JoinHandle<()>>,
}

#[derive(Debug)]
struct Inside {
    place: Place,
    front: Arc<UdpSocket>,
    server: SocketAddr,
    stop: AtomicBool,
    /// The sockets towards the server, one for each address of a client, in the order in which those were first seen.
    mappings: Mutex<Vec<Mapping>>,
    road: Mutex<Road>,
    /// There is something new on the road.
    changed: Condvar,
}

/// What the NAT knows of a client.
#[derive(Debug)]
struct Mapping {
    client: SocketAddr,
    upstream: Arc<Upstream>,
}

#[derive(Debug)]
struct Upstream {
    socket: Arc<UdpSocket>,
    /// The NAT has given its port up.
    given_up: AtomicBool,
}

#[derive(Debug)]
struct Road {
    /// There, and back.
    paths: [Path; 2],
    random: Random,
    /// By way and kind.
    fates: [[Fates; 2]; 2],
    /// By when they are due; those that are due at the same time, in the order in which they came.
    waiting: BTreeMap<Instant, VecDeque<Waiting>>,
}

#[derive(Debug)]
struct Waiting {
    socket: Arc<UdpSocket>,
    /// None: the one to which the socket is connected.
    to: Option<SocketAddr>,
    payload: Vec<u8>,
    way: Way,
    kind: Kind,
}

impl Impairment {
    /// At `address` of `place`, on `port`, to `server`. What it decides follows from `CULVERT_TEST_SEED`, or from 6.
    ///
    /// # Panics
    /// When the kernel has no socket for it.
    #[must_use]
    #[track_caller]
    pub fn new(place: &Place, address: SocketAddr, server: SocketAddr, path: Path) -> Self {
        let front = Arc::new(place.enter(|| socket(address)));
        let road = Road::new(path);
        let inside = Arc::new(Inside {
            place: place.clone(),
            front,
            server,
            stop: AtomicBool::new(false),
            mappings: Mutex::default(),
            road: Mutex::new(road),
            changed: Condvar::new(),
        });
        let [one, other] = [(); 2].map(|()| Arc::clone(&inside));
        let threads = vec![
            thread::spawn(move || thread::scope(|scope| one.take_in(scope))),
            thread::spawn(move || other.let_out()),
        ];
        Self { address, inside, threads }
    }

    /// A free port at `address`, for [`new`](Self::new).
    #[must_use]
    pub fn reserve(address: IpAddr) -> SocketAddr {
        SocketAddr::new(address, ports::free())
    }

    /// What comes from now on goes over another path, in both directions.
    pub fn change(&self, path: Path) {
        self.inside.road().paths = [path; 2];
    }

    /// The same in one direction.
    pub fn change_way(&self, way: Way, path: Path) {
        self.inside.road().paths[way as usize] = path;
    }

    /// The NAT forgets the clients at these places in the order in which it first saw them: what they send from now on comes
    /// from other ports, and what the server sends to the ports of before is lost.
    pub fn forget(&self, fits: impl Fn(usize) -> bool) {
        let mut mappings = self.inside.mappings();
        let mut place = 0;
        mappings.retain(|mapping| {
            let forget = fits(place);
            place += 1;
            if forget {
                mapping.upstream.given_up.store(true, Ordering::SeqCst);
            }
            !forget
        });
    }

    /// Whether anything passes, in either direction.
    #[must_use]
    pub fn passes(&self) -> bool {
        self.inside.road().paths.iter().any(|path| path.loss < 1.0)
    }

    /// How many clients the NAT knows.
    #[must_use]
    pub fn clients(&self) -> usize {
        self.inside.mappings().len()
    }

    /// What became of what has come so far.
    #[must_use]
    pub fn fates(&self) -> Fates {
        let road = self.inside.road();
        road.fates.iter().flatten().fold(Fates::default(), |sum, fates| sum.and(*fates))
    }

    /// The same in one direction for one kind.
    #[must_use]
    pub fn fates_of(&self, way: Way, kind: Kind) -> Fates {
        self.inside.road().fates[way as usize][kind as usize]
    }

    /// What repeats its decisions; belongs into the messages of failed assertions.
    #[must_use]
    pub fn seed(&self) -> u64 {
        self.inside.road().random.seed
    }
}

impl Drop for Impairment {
    fn drop(&mut self) {
        self.inside.stop.store(true, Ordering::Relaxed);
        self.inside.changed.notify_all();
        for thread in self.threads.drain(..) {
            // Its panic has been written to standard error.
            drop(thread.join());
        }
    }
}

impl Inside {
    fn road(&self) -> MutexGuard<'_, Road> {
        self.road.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn is_over(&self) -> bool {
        self.stop.load(Ordering::Relaxed)
    }

    fn mappings(&self) -> MutexGuard<'_, Vec<Mapping>> {
        self.mappings.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Receives from clients.
    fn take_in<'scope>(&'scope self, scope: &'scope Scope<'scope, '_>) {
        let mut buffer = vec![0; 65_535];
        while !self.is_over() {
            let Ok((length, client)) = self.front.recv_from(&mut buffer) else { continue };
            let upstream = self.upstream_of(client, scope);
            self.set_out(Way::There, &upstream.socket, None, &buffer[..length]);
        }
    }

    /// The socket of a client towards the server.
    fn upstream_of<'scope>(
        &'scope self,
        client: SocketAddr,
        scope: &'scope Scope<'scope, '_>,
    ) -> Arc<Upstream> {
        let mut mappings = self.mappings();
        if let Some(known) = mappings.iter().find(|mapping| mapping.client == client) {
            return Arc::clone(&known.upstream);
        }
        let any = SocketAddr::new(self.front.local_addr().expect("bound").ip(), 0);
        let socket = Arc::new(self.place.enter(|| socket(any)));
        socket.connect(self.server).expect("there is a route");
        let upstream = Arc::new(Upstream { socket, given_up: AtomicBool::new(false) });
        let back = Arc::clone(&upstream);
        scope.spawn(move || self.take_back(&back, client));
        mappings.push(Mapping { client, upstream: Arc::clone(&upstream) });
        upstream
    }

    /// Receives from the server what is for `client`.
    fn take_back(&self, upstream: &Upstream, client: SocketAddr) {
        let mut buffer = vec![0; 65_535];
        while !self.is_over() {
            let Ok(length) = upstream.socket.recv(&mut buffer) else { continue };
            if upstream.given_up.load(Ordering::SeqCst) {
                let kind = Kind::of(&buffer[..length]);
                self.road().fates[Way::Back as usize][kind as usize].lost += 1;
            } else {
                self.set_out(Way::Back, &self.front, Some(client), &buffer[..length]);
            }
        }
    }

    /// A datagram sets out: what becomes of it is decided.
    fn set_out(&self, way: Way, socket: &Arc<UdpSocket>, to: Option<SocketAddr>, payload: &[u8]) {
        let mut road = self.road();
        let kind = Kind::of(payload);
        let arrivals = road.decide(way, kind, payload.len(), clock::now());
        for due in arrivals.due {
            let mut payload = payload.to_vec();
            if let Some((byte, bit)) = arrivals.damage {
                payload[byte] ^= 1 << bit;
            }
            let datagram = Waiting { socket: Arc::clone(socket), to, payload, way, kind };
            road.waiting.entry(due).or_default().push_back(datagram);
        }
        drop(road);
        self.changed.notify_all();
    }

    /// Sends what is due.
    fn let_out(&self) {
        let mut road = self.road();
        while !self.is_over() {
            let now = clock::now();
            let next = road.waiting.first_key_value().map(|(due, _)| *due);
            match next {
                Some(due) if due <= now => {
                    let (_, datagrams) = road.waiting.pop_first().expect("it has just been there");
                    drop(road);
                    let refused: Vec<_> =
                        datagrams.iter().filter(|datagram| datagram.send().is_err()).collect();
                    road = self.road();
                    for Waiting { way, kind, .. } in refused {
                        road.fates[*way as usize][*kind as usize].refused += 1;
                    }
                }
                Some(_) | None => {
                    let wait = next.map_or(TICK, |due| due.duration_since(now).min(TICK));
                    let waited = self.changed.wait_timeout(road, wait);
                    road = waited.unwrap_or_else(PoisonError::into_inner).0;
                }
            }
        }
    }
}

/// When a datagram arrives.
struct Arrivals {
    /// Never, once or twice.
    due: Vec<Instant>,
    /// The byte and the bit that arrive as others.
    damage: Option<(usize, u32)>,
}

impl Road {
    fn new(path: Path) -> Self {
        Self { paths: [path; 2], random: Random::new(6), fates: Default::default(), waiting: BTreeMap::new() }
    }

    /// What becomes of a datagram of so many bytes.
    fn decide(&mut self, way: Way, kind: Kind, length: usize, now: Instant) -> Arrivals {
        let Path { delay, loss, doubled, detoured, detour, damaged, largest } = self.paths[way as usize];
        // Always as many numbers for a datagram, so that one share does not change what another meets.
        let [loss, doubled, detoured, damaged] =
            [loss, doubled, detoured, damaged].map(|share| self.happens(share));
        let place = self.random.bits();
        let fates = &mut self.fates[way as usize][kind as usize];
        let none = Arrivals { due: Vec::new(), damage: None };
        if length > largest {
            fates.too_large += 1;
            return none;
        }
        if loss {
            fates.lost += 1;
            return none;
        }
        let damage = (damaged && length > 0).then(|| (place as usize / 8 % length, place as u32 % 8));
        fates.passed += 1;
        fates.doubled += u64::from(doubled);
        fates.detoured += u64::from(detoured);
        fates.damaged += u64::from(damage.is_some());
        let due = now + delay + if detoured { detour } else { Duration::ZERO };
        Arrivals { due: vec![due; 1 + usize::from(doubled)], damage }
    }

    fn happens(&mut self, share: f64) -> bool {
        // 53 bits: what an f64 holds.
        ((self.random.bits() >> 11) as f64) < share * (1_u64 << 53) as f64
    }
}

impl Waiting {
    fn send(&self) -> std::io::Result<usize> {
        match self.to {
            Some(to) => self.socket.send_to(&self.payload, to),
            None => self.socket.send(&self.payload),
        }
    }
}

fn socket(address: SocketAddr) -> UdpSocket {
    let socket = UdpSocket::bind(address).expect("the address is ours");
    socket.set_read_timeout(Some(TICK)).expect("not zero");
    let buffers = SockRef::from(&socket);
    buffers.set_recv_buffer_size(4 << 20).expect("a size");
    buffers.set_send_buffer_size(4 << 20).expect("a size");
    socket
}

#[cfg(test)]
#[path = "impairment_tests.rs"]
mod tests;
