//! How many connections, WebSockets and handshakes there may be, in all and from one prefix.

use std::{
    collections::BTreeMap,
    net::IpAddr,
    sync::{Arc, Mutex, OnceLock},
    time::Duration,
};

use base::panics::lock;
use config::{MOST_USER_CONNECTIONS, MOST_WEB_CONNECTIONS};
use ops::metrics::{HttpVersion, Metrics, TcpRefused};
use tokio::{
    sync::{OwnedSemaphorePermit, Semaphore},
    time::Instant,
};

use users::{Grant, account::Refusal};

use super::activity::Activity;
use crate::site::turns::{Shares, Turns, prefix_of};

/// Connections of one /24 or /56: an eighth of all.
const MOST_OF_ONE: usize = MOST_WEB_CONNECTIONS / 8;

/// Requests that an HTTP/2 connection may have open.
pub(super) const MOST_STREAMS: u32 = 16;

/// WebSockets, in all and of one /24 or /56.
const MOST_TUNNELS: usize = 256;
const MOST_TUNNELS_OF_ONE: usize = MOST_TUNNELS / 4;

/// TLS handshakes that may begin in a second, at some 0.7 ms each with a key for RSA: a seventh of a core.
const HANDSHAKES: u32 = 200;

/// The places of connections and of requests.
pub(super) struct Places {
    table: Mutex<Table>,
    metrics: Arc<Metrics>,
    pub(super) turns: Arc<Turns>,
    tunnels: Arc<Semaphore>,
    of_users: Arc<Semaphore>,
}

#[derive(Default)]
struct Table {
    /// By the order in which they came.
    open: BTreeMap<u64, Arc<Activity>>,
    next: u64,
    connections: Shares,
    tunnels: Shares,
    /// The second that is counted, and the handshakes in it.
    handshakes: Option<(Instant, u32)>,
}

/// The place of a connection, which it has until this is dropped.
pub(super) struct Place {
    places: Arc<Places>,
    number: u64,
    prefix: Option<IpAddr>,
    pub(super) activity: Arc<Activity>,
    /// Set once it is a user's, and takes no visitor's place any more.
    of_a_user: OnceLock<UsersPlace>,
}

struct UsersPlace {
    _place: OwnedSemaphorePermit,
    /// Over HTTP/1.1 a connection has one session, whose place is enough.
    _connection: Option<users::Connection>,
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

impl Places {
    pub(super) fn new(metrics: Arc<Metrics>) -> Arc<Self> {
        let places = |most| Arc::new(Semaphore::new(most));
        let [tunnels, of_users] = [MOST_TUNNELS, MOST_USER_CONNECTIONS].map(places);
        Arc::new(Self { table: Mutex::default(), metrics, turns: Turns::new(), tunnels, of_users })
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
        Ok(Place { places: Arc::clone(self), number, prefix, activity, of_a_user: OnceLock::new() })
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

    /// A user with good credentials is let in on this connection, which takes nobody's place from now on, and nobody takes its own.
    pub(super) fn becomes_a_users(&self, grant: &Grant, version: HttpVersion) -> Result<(), Refusal> {
        if self.of_a_user.get().is_some() {
            return Ok(());
        }
        let place = Arc::clone(&self.places.of_users).try_acquire_owned();
        let _place = place.map_err(|_| Refusal::Connections)?;
        let _connection = match version {
            HttpVersion::Http1 => None,
            HttpVersion::Http2 => Some(grant.connection().ok_or(Refusal::Connections)?),
        };
        if self.of_a_user.set(UsersPlace { _place, _connection }).is_ok() {
            self.leave_visitors();
            self.places.metrics.visitors.is_a_users();
        }
        Ok(())
    }

    /// Whether its visitor has as many requests as one may have, open or with answers that it does not take.
    pub(super) fn has_its_share(&self) -> bool {
        self.of_a_user.get().is_none() && self.activity.held() > MOST_STREAMS
    }

    /// Gives back what a visitor has.
    fn leave_visitors(&self) {
        let mut table = lock(&self.places.table);
        table.open.remove(&self.number);
        if let Some(prefix) = self.prefix {
            table.connections.give_back(prefix);
        }
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        let is_a_users = self.of_a_user.get().is_some();
        if !is_a_users {
            self.leave_visitors();
        }
        self.places.metrics.visitors.closed(is_a_users);
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
        assert!(lock(&places.table).connections.sum() == 0 && places.metrics.visitors.open() == 0);
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
        assert_eq!(lock(&places.table).connections.sum(), 1, "a refused one has no share");
        drop(busy);
        assert!(places.enter(None).is_ok());
    }

    #[test]
    fn a_place_that_moves_counts_once() {
        let places = places();
        let mut place = places.enter(None).ok().unwrap();
        for source in ["192.0.2.1", "2001:db8::1"] {
            place.comes_from(address(source)).unwrap();
            assert_eq!(lock(&places.table).connections.sum(), 1);
        }
    }

    #[test]
    fn handshakes_have_a_rate() {
        let places = places();
        let now = Instant::now();
        assert_eq!((0..1000).filter(|_| places.may_shake_hands(now)).count(), HANDSHAKES as usize);
        assert!(places.may_shake_hands(now + Duration::from_secs(1)));
    }
}
