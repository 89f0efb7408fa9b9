//! How many connections and requests there may be, in all and from one prefix.

use std::{
    collections::BTreeMap,
    net::{IpAddr, Ipv4Addr, Ipv6Addr},
    sync::{Arc, Mutex},
    time::Duration,
};

use base::panics::lock;
use config::MOST_WEB_CONNECTIONS;
use ops::metrics::{Metrics, TcpRefused};
use tokio::{
    sync::{OwnedSemaphorePermit, Semaphore},
    time::{Instant, timeout},
};

use super::activity::Activity;

/// Connections of one /24 or /56: an eighth of all.
const MOST_OF_ONE: usize = MOST_WEB_CONNECTIONS / 8;

/// Requests that are asked of the site at a time; each has a connection of its own.
const MOST_ASKED: usize = 128;

/// Requests that are at the site or wait for their turn.
const MOST_WAITING: usize = 2 * MOST_ASKED;

/// Requests of one /24 or /56 among those.
const MOST_ASKED_OF_ONE: usize = MOST_ASKED / 4;

/// WebSockets, in all and of one /24 or /56.
const MOST_TUNNELS: usize = 256;
const MOST_TUNNELS_OF_ONE: usize = MOST_TUNNELS / 4;

/// How long a request waits for its turn.
const TURN_WITHIN: Duration = Duration::from_secs(10);

/// TLS handshakes that may begin in a second, at some 0.7 ms each with a key for RSA: a seventh of a core.
const HANDSHAKES: u32 = 200;

/// The places of connections and of requests.
pub(super) struct Places {
    table: Mutex<Table>,
    metrics: Arc<Metrics>,
    waiting: Arc<Semaphore>,
    asked: Arc<Semaphore>,
    tunnels: Arc<Semaphore>,
}

#[derive(Default)]
struct Table {
    /// By the order in which they came.
    open: BTreeMap<u64, Arc<Activity>>,
    next: u64,
    connections: Shares,
    requests: Shares,
    tunnels: Shares,
    /// The second that is counted, and the handshakes in it.
    handshakes: Option<(Instant, u32)>,
}

/// How many each prefix has.
#[derive(Default)]
struct Shares(BTreeMap<IpAddr, usize>);

impl Shares {
    fn take(&mut self, prefix: IpAddr, most: usize) -> bool {
        let has = self.0.entry(prefix).or_default();
        let may = *has < most;
        *has += usize::from(may);
        may
    }

    fn give_back(&mut self, prefix: IpAddr) {
        if let Some(has) = self.0.get_mut(&prefix) {
            *has -= 1;
            if *has == 0 {
                self.0.remove(&prefix);
            }
        }
    }
}

/// The place of a connection, which it has until this is dropped.
pub(super) struct Place {
    places: Arc<Places>,
    number: u64,
    prefix: Option<IpAddr>,
    pub(super) activity: Arc<Activity>,
}

/// The place of a WebSocket.
pub(super) struct TunnelPlace {
    places: Arc<Places>,
    prefix: IpAddr,
    _place: OwnedSemaphorePermit,
}

impl Drop for TunnelPlace {
    fn drop(&mut self) {
        lock(&self.places.table).tunnels.give_back(self.prefix);
    }
}

/// The turn of a request to be asked of the site.
pub(super) struct Turn {
    _asked: OwnedSemaphorePermit,
    _share: RequestShare,
}

struct RequestShare {
    places: Arc<Places>,
    prefix: IpAddr,
    _waiting: OwnedSemaphorePermit,
}

impl Drop for RequestShare {
    fn drop(&mut self) {
        lock(&self.places.table).requests.give_back(self.prefix);
    }
}

impl Places {
    pub(super) fn new(metrics: Arc<Metrics>) -> Arc<Self> {
        let places = |most| Arc::new(Semaphore::new(most));
        let [waiting, asked, tunnels] = [MOST_WAITING, MOST_ASKED, MOST_TUNNELS].map(places);
        Arc::new(Self { table: Mutex::default(), metrics, waiting, asked, tunnels })
    }

    /// A place for a connection from `source`, whose share it counts against; `None`: against that of nobody.
    ///
    /// If there is none, the connection that came first of those without an open request gives way.
    pub(super) fn enter(self: &Arc<Self>, source: Option<IpAddr>) -> Result<Place, TcpRefused> {
        let prefix = source.map(prefix_of);
        let mut table = lock(&self.table);
        if prefix.is_some_and(|prefix| !table.connections.take(prefix, MOST_OF_ONE)) {
            return Err(TcpRefused::Source);
        }
        if table.open.len() >= MOST_WEB_CONNECTIONS {
            let Some(first) = table.open.iter().find_map(|(number, it)| it.replace().then_some(*number))
            else {
                prefix.into_iter().for_each(|prefix| table.connections.give_back(prefix));
                return Err(TcpRefused::Full);
            };
            table.open.remove(&first);
        }
        let (number, activity) = (table.next, Activity::new());
        table.next += 1;
        table.open.insert(number, Arc::clone(&activity));
        drop(table);
        self.metrics.visitors.opened();
        Ok(Place { places: Arc::clone(self), number, prefix, activity })
    }

    /// Whether another TLS handshake may begin now.
    pub(super) fn may_shake_hands(&self, now: Instant) -> bool {
        let mut table = lock(&self.table);
        let (since, count) = table.handshakes.get_or_insert((now, 0));
        if now.duration_since(*since) >= Duration::from_secs(1) {
            (*since, *count) = (now, 0);
        }
        *count += 1;
        *count <= HANDSHAKES
    }

    /// Waits for the turn of a request from `source`; `None`: too many are there, or before it.
    pub(super) async fn turn(self: &Arc<Self>, source: IpAddr) -> Option<Turn> {
        let waiting = Arc::clone(&self.waiting).try_acquire_owned().ok()?;
        let prefix = prefix_of(source);
        if !lock(&self.table).requests.take(prefix, MOST_ASKED_OF_ONE) {
            return None;
        }
        let share = RequestShare { places: Arc::clone(self), prefix, _waiting: waiting };
        let asked = timeout(TURN_WITHIN, Arc::clone(&self.asked).acquire_owned()).await.ok()?.ok()?;
        Some(Turn { _asked: asked, _share: share })
    }

    /// A place for a WebSocket of `source`; `None`: all of them, or its share, are taken.
    pub(super) fn tunnel(self: &Arc<Self>, source: IpAddr) -> Option<TunnelPlace> {
        let place = Arc::clone(&self.tunnels).try_acquire_owned().ok()?;
        let prefix = prefix_of(source);
        let may = lock(&self.table).tunnels.take(prefix, MOST_TUNNELS_OF_ONE);
        may.then(|| TunnelPlace { places: Arc::clone(self), prefix, _place: place })
    }
}

impl Place {
    /// A server in front says that the connection is `source`'s: it counts against that share from now on.
    pub(super) fn comes_from(&mut self, source: IpAddr) -> Result<(), TcpRefused> {
        let prefix = prefix_of(source);
        let mut table = lock(&self.places.table);
        if !table.connections.take(prefix, MOST_OF_ONE) {
            return Err(TcpRefused::Source);
        }
        if let Some(before) = self.prefix.replace(prefix) {
            table.connections.give_back(before);
        }
        Ok(())
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        let mut table = lock(&self.places.table);
        table.open.remove(&self.number);
        if let Some(prefix) = self.prefix {
            table.connections.give_back(prefix);
        }
        drop(table);
        self.places.metrics.visitors.closed();
    }
}

/// The /24 or /56 of an address.
fn prefix_of(source: IpAddr) -> IpAddr {
    match source.to_canonical() {
        IpAddr::V4(address) => Ipv4Addr::from_bits(address.to_bits() & !0xff).into(),
        IpAddr::V6(address) => Ipv6Addr::from_bits(address.to_bits() >> 72 << 72).into(),
    }
}

#[cfg(test)]
mod tests {
    use engine::{health::Health, worker::Snapshots};

    use super::*;

    fn places() -> Arc<Places> {
        let health = Arc::new(Health::new(1, base::clock::Clock::now(&base::clock::SystemClock)));
        Places::new(Arc::new(Metrics::new("0", None, 1, Arc::<Snapshots>::default(), health)))
    }

    fn address(text: &str) -> IpAddr {
        text.parse().unwrap()
    }

    #[test]
    fn one_prefix_has_an_eighth_and_gets_it_back() {
        let places = places();
        let enter = |text: &str| places.enter(Some(address(text)));
        let mut mine: Vec<Place> =
            (0..MOST_OF_ONE).map(|n| enter(&format!("192.0.2.{n}")).ok().unwrap()).collect();
        assert_eq!(enter("192.0.2.200").err(), Some(TcpRefused::Source));
        assert_eq!(enter("::ffff:192.0.2.201").err(), Some(TcpRefused::Source), "the same address");
        let other = enter("192.0.3.1").ok().unwrap();
        mine.pop();
        assert!(enter("192.0.2.200").is_ok());
        let (v6, same) = (enter("2001:db8:1:100::1"), prefix_of(address("2001:db8:1:1ff::2")));
        assert_eq!(v6.ok().unwrap().prefix, Some(same));
        assert_eq!(places.metrics.visitors.open(), MOST_OF_ONE, "those that are held");
        drop((mine, other));
        assert!(lock(&places.table).connections.0.is_empty() && places.metrics.visitors.open() == 0);
    }

    #[test]
    fn the_first_idle_connection_gives_way_and_busy_ones_stay() {
        let places = places();
        let all: Vec<Place> = (0..MOST_WEB_CONNECTIONS).map(|_| places.enter(None).ok().unwrap()).collect();
        let busy: Vec<_> = all.iter().skip(1).map(|place| place.activity.request()).collect();
        let newer = places.enter(Some(address("192.0.2.1"))).ok().unwrap();
        assert!(!all[0].activity.replace(), "it is told to end");
        let _open = newer.activity.request();
        assert_eq!(places.enter(Some(address("192.0.2.1"))).err(), Some(TcpRefused::Full));
        assert_eq!(
            lock(&places.table).connections.0.values().sum::<usize>(),
            1,
            "a refused one has no share"
        );
        drop(busy);
        assert!(places.enter(None).is_ok());
    }

    #[test]
    fn a_place_that_moves_counts_once() {
        let places = places();
        let mut place = places.enter(None).ok().unwrap();
        for source in ["192.0.2.1", "2001:db8::1"] {
            place.comes_from(address(source)).unwrap();
            assert_eq!(lock(&places.table).connections.0.len(), 1);
        }
    }

    #[tokio::test]
    async fn requests_of_one_prefix_leave_room_for_others() {
        let places = places();
        let mut turns = Vec::new();
        while let Some(turn) = places.turn(address("192.0.2.1")).await {
            turns.push(turn);
        }
        assert_eq!(turns.len(), MOST_ASKED_OF_ONE);
        for other in 1..4 {
            for _ in 0..MOST_ASKED_OF_ONE {
                turns.push(places.turn(address(&format!("198.51.{other}.1"))).await.unwrap());
            }
        }
        let waits = timeout(Duration::from_millis(50), places.turn(address("203.0.113.1"))).await;
        assert!(waits.is_err(), "all are at the site");
        turns.clear();
        assert!(places.turn(address("192.0.2.1")).await.is_some());
    }

    #[test]
    fn handshakes_have_a_rate() {
        let places = places();
        let now = Instant::now();
        assert_eq!((0..1000).filter(|_| places.may_shake_hands(now)).count(), HANDSHAKES as usize);
        assert!(places.may_shake_hands(now + Duration::from_secs(1)));
    }
}
