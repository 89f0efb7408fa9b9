//! A path that delays, loses, doubles and reorders datagrams, and carries none above a size.

use std::{
    collections::{BTreeMap, VecDeque},
    net::{IpAddr, SocketAddr, UdpSocket},
    sync::{
        Arc, Condvar, Mutex, MutexGuard, PoisonError,
        atomic::{AtomicBool, Ordering},
    },
    thread::{self, JoinHandle},
    time::{Duration, Instant},
};

use socket2::SockRef;

use crate::{clock, place::Place, ports, random::Random};

/// How often a thread looks whether it shall end.
const TICK: Duration = Duration::from_millis(50);

/// What happens to a datagram on its way, in either direction.
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
            largest: 65_535,
        }
    }
}

/// What became of the datagrams that came.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Fates {
    /// They went on, or wait to.
    pub passed: u64,
    /// Lost on purpose.
    pub lost: u64,
    /// Went on twice.
    pub doubled: u64,
    /// Went on late.
    pub detoured: u64,
    /// Larger than the path carries.
    pub too_large: u64,
    /// The kernel did not take them.
    pub refused: u64,
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
    road: Mutex<Road>,
    /// There is something new on the road.
    changed: Condvar,
}

#[derive(Debug)]
struct Road {
    path: Path,
    random: Random,
    fates: Fates,
    /// By when they are due; those that are due at the same time, in the order in which they came.
    waiting: BTreeMap<Instant, VecDeque<Waiting>>,
}

#[derive(Debug)]
struct Waiting {
    socket: Arc<UdpSocket>,
    /// None: the one to which the socket is connected.
    to: Option<SocketAddr>,
    payload: Vec<u8>,
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
        let random = Random::new(6);
        let road = Road { path, random, fates: Fates::default(), waiting: BTreeMap::new() };
        let inside = Arc::new(Inside {
            place: place.clone(),
            front,
            server,
            stop: AtomicBool::new(false),
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

    /// What comes from now on goes over another path.
    pub fn change(&self, path: Path) {
        self.inside.road().path = path;
    }

    /// What became of what has come so far.
    #[must_use]
    pub fn fates(&self) -> Fates {
        self.inside.road().fates
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

    /// Receives from clients.
    fn take_in<'scope>(&'scope self, scope: &'scope thread::Scope<'scope, '_>) {
        let mut buffer = vec![0; 65_535];
        let mut sockets = BTreeMap::new();
        while !self.is_over() {
            let Ok((length, client)) = self.front.recv_from(&mut buffer) else { continue };
            let upstream = sockets.entry(client).or_insert_with(|| {
                let any = SocketAddr::new(self.front.local_addr().expect("bound").ip(), 0);
                let upstream = Arc::new(self.place.enter(|| socket(any)));
                upstream.connect(self.server).expect("there is a route");
                let back = Arc::clone(&upstream);
                scope.spawn(move || self.take_back(&back, client));
                upstream
            });
            self.set_out(upstream, None, &buffer[..length]);
        }
    }

    /// Receives from the server what is for `client`.
    fn take_back(&self, upstream: &UdpSocket, client: SocketAddr) {
        let mut buffer = vec![0; 65_535];
        while !self.is_over() {
            let Ok(length) = upstream.recv(&mut buffer) else { continue };
            self.set_out(&self.front, Some(client), &buffer[..length]);
        }
    }

    /// A datagram sets out: what becomes of it is decided.
    fn set_out(&self, socket: &Arc<UdpSocket>, to: Option<SocketAddr>, payload: &[u8]) {
        let mut road = self.road();
        let now = clock::now();
        for due in road.decide(payload.len(), now) {
            let datagram = Waiting { socket: Arc::clone(socket), to, payload: payload.to_vec() };
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
                    let refused = datagrams.iter().filter(|datagram| datagram.send().is_err()).count();
                    road = self.road();
                    road.fates.refused += refused as u64;
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

impl Road {
    /// When a datagram of so many bytes arrives: never, once or twice.
    fn decide(&mut self, length: usize, now: Instant) -> Vec<Instant> {
        let Path { delay, loss, doubled, detoured, detour, largest } = self.path;
        if length > largest {
            self.fates.too_large += 1;
            return Vec::new();
        }
        // Always as many numbers for a datagram, so that one share does not change what another meets.
        let [loss, doubled, detoured] = [loss, doubled, detoured].map(|share| self.happens(share));
        if loss {
            self.fates.lost += 1;
            return Vec::new();
        }
        self.fates.passed += 1;
        self.fates.doubled += u64::from(doubled);
        self.fates.detoured += u64::from(detoured);
        let due = now + delay + if detoured { detour } else { Duration::ZERO };
        vec![due; 1 + usize::from(doubled)]
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
mod tests {
    use super::*;

    fn road(path: Path) -> Road {
        Road { path, random: Random::new(6), fates: Fates::default(), waiting: BTreeMap::new() }
    }

    #[test]
    fn the_shares_are_what_was_asked_for() {
        let now = clock::now();
        let delay = Duration::from_millis(20);
        let detour = Duration::from_millis(5);
        let path = Path { delay, loss: 0.01, doubled: 0.02, detoured: 0.1, detour, largest: 1400 };
        let mut road = road(path);
        let arrivals: Vec<_> = (0..100_000).flat_map(|_| road.decide(1400, now)).collect();
        let Fates { passed, lost, doubled, detoured, .. } = road.fates;
        assert_eq!(passed + lost, 100_000);
        assert_eq!(arrivals.len() as u64, passed + doubled);
        let seed = road.random.seed;
        assert!((900..1100).contains(&lost), "{lost}, seed {seed}");
        assert!((1800..2200).contains(&doubled), "{doubled}, seed {seed}");
        assert!((9500..10_500).contains(&detoured), "{detoured}, seed {seed}");
        assert!(arrivals.iter().all(|due| [now + delay, now + delay + detour].contains(due)));
        assert_eq!(road.decide(1401, now), []);
        assert_eq!(road.fates.too_large, 1);
    }

    #[test]
    fn a_path_without_faults_keeps_all_and_their_order() {
        let address = Impairment::reserve(std::net::Ipv4Addr::LOCALHOST.into());
        let server = socket(Impairment::reserve(address.ip()));
        let path = Path { delay: Duration::from_millis(10), ..Path::default() };
        let road = Impairment::new(&Place::Host, address, server.local_addr().expect("bound"), path);
        let client = socket(Impairment::reserve(address.ip()));
        for number in 0..200_u8 {
            client.send_to(&[number], address).expect("loopback takes it");
        }
        let mut byte = [0];
        for number in 0..200_u8 {
            clock::until("the datagram", clock::PATIENCE, || server.recv(&mut byte));
            assert_eq!(byte, [number]);
        }
        assert_eq!(road.fates(), Fates { passed: 200, ..Fates::default() });
    }
}
