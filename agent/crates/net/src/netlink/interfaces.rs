//! How large the datagrams are that the interfaces on the ways to peers take.
//!
//! The kernel is asked on a thread of its own, because another program may hold its tables for long. Whoever asks for an address first
//! waits for the answer, [`PATIENCE`] at most: a connection cannot change the bounds of its search once it is made. What was asked for
//! is looked at again every [`LOOK_AGAIN`], so that another route or a changed interface is followed, and forgotten when nobody asks any
//! more.

use std::{
    collections::HashMap,
    io,
    net::SocketAddr,
    rc::Rc,
    sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError},
    time::{Duration, Instant},
};

use base::clock::{Clock, SystemClock};

use crate::{Ways, batch::MAX_MESSAGE_BYTES, netlink::Netlink};

/// From one look at the kernel's routes to the next (our choice: a route is asked for and read in some 20 µs).
const LOOK_AGAIN: Duration = Duration::from_secs(10);

/// How long the first to ask for an address waits (our choice: a hundred times what the kernel takes).
const PATIENCE: Duration = Duration::from_millis(2);

/// After an answer that took longer nobody waits for so long.
const IMPATIENT: Duration = Duration::from_secs(1);

/// Looks after which an address that nobody has asked for is forgotten.
const FORGOTTEN_AFTER: u8 = 6;

/// Addresses that are looked at; of further ones nothing is known. As many as an agent has peers at most.
const MOST_ADDRESSES: usize = 16_384;

/// The interfaces on the ways to addresses, for all workers.
#[derive(Debug)]
pub struct Interfaces {
    shared: Arc<Shared>,
}

#[derive(Debug, Default)]
struct Shared {
    table: Mutex<Table>,
    /// Notified when a worker asks for an address that is not known, and when the thread is to end.
    changed: Condvar,
    /// Notified when such addresses were looked at.
    answered: Condvar,
}

#[derive(Debug, Default)]
struct Table {
    /// By address, of which the port is 0.
    ways: HashMap<SocketAddr, Way>,
    /// Until when nobody waits for the kernel, because it was slow.
    slow_until: Option<Instant>,
    is_wanted: bool,
    is_stopped: bool,
}

#[derive(Clone, Copy, Debug, Default)]
struct Way {
    /// The largest datagram; `None` while it is not known.
    most: Option<usize>,
    is_looked_at: bool,
    /// Looks since it was asked for.
    unasked: u8,
}

impl Interfaces {
    /// Starts the thread, in the network namespace of this one. Routes are those of packets with the firewall mark `mark`.
    ///
    /// # Errors
    /// The kernel's, e.g. EAFNOSUPPORT where a sandbox forbids netlink sockets.
    pub fn start(mark: u32) -> io::Result<Self> {
        let netlink = Netlink::open()?;
        let shared = Arc::<Shared>::default();
        let looked_at = Arc::clone(&shared);
        std::thread::Builder::new()
            .name("culvert-ways".to_owned())
            .spawn(move || looked_at.run(netlink, mark))?;
        Ok(Self { shared })
    }

    /// [`Self::largest_datagram`], for one thread.
    #[must_use]
    pub fn ways(self: Arc<Self>) -> Ways {
        Rc::new(move |to| self.largest_datagram(to))
    }

    /// The largest datagram, in bytes of UDP payload, that the interface on the way to `to` takes; `None` if that is not known, or not
    /// yet. Waits for 2 ms at most, once for each address.
    #[must_use]
    pub fn largest_datagram(&self, to: SocketAddr) -> Option<usize> {
        let mut table = self.shared.lock();
        let to = without_port(to);
        if let Some(way) = table.ways.get_mut(&to) {
            way.unasked = 0;
            return way.most;
        }
        if table.ways.len() < MOST_ADDRESSES {
            table.ways.insert(to, Way::default());
            table.is_wanted = true;
            self.shared.changed.notify_one();
            return self.shared.answer(table, to);
        }
        None
    }
}

impl Drop for Interfaces {
    fn drop(&mut self) {
        self.shared.lock().is_stopped = true;
        // The thread is not waited for: it may wait for the kernel's answer, and has nothing that anybody else needs.
        self.shared.changed.notify_one();
    }
}

impl Shared {
    fn lock(&self) -> MutexGuard<'_, Table> {
        self.table.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Waits for what the kernel says of `to`, unless it was slow a moment ago.
    fn answer(&self, table: MutexGuard<'_, Table>, to: SocketAddr) -> Option<usize> {
        if table.slow_until.is_some_and(|until| SystemClock.now() < until) {
            return None;
        }
        let unknown = |table: &mut Table| table.ways.get(&to).is_some_and(|way| !way.is_looked_at);
        let waited = self.answered.wait_timeout_while(table, PATIENCE, unknown);
        let (mut table, waited) = waited.unwrap_or_else(PoisonError::into_inner);
        table.slow_until = waited.timed_out().then(|| SystemClock.now() + IMPATIENT);
        table.ways.get(&to).and_then(|way| way.most)
    }

    fn run(&self, mut netlink: Netlink, mark: u32) {
        let mut looked = SystemClock.now();
        loop {
            let quiet = |table: &mut Table| !table.is_wanted && !table.is_stopped;
            let rest = LOOK_AGAIN.saturating_sub(SystemClock.now().saturating_duration_since(looked));
            let waited = self.changed.wait_timeout_while(self.lock(), rest, quiet);
            let (mut table, waited) = waited.unwrap_or_else(PoisonError::into_inner);
            if table.is_stopped {
                return;
            }
            table.is_wanted = false;
            let all = waited.timed_out();
            if all {
                looked = SystemClock.now();
            }
            let asked = table.ways.iter().filter(|(_, way)| all || !way.is_looked_at);
            let asked: Vec<SocketAddr> = asked.map(|(to, _)| *to).collect();
            drop(table);
            for to in asked {
                if self.lock().is_stopped {
                    return;
                }
                let found = netlink.mtu_towards(to, mark).unwrap_or_else(|error| {
                    tracing::debug!(%to, %error, "cannot look at the route to a peer");
                    None
                });
                let most = found.map(|mtu| datagram_of(to, mtu));
                let mut table = self.lock();
                if let Some(way) = table.ways.get_mut(&to) {
                    // Without a route there is nothing to be sent, whatever its interface was.
                    way.most = most.or(way.most);
                    way.is_looked_at = true;
                    way.unasked += u8::from(all);
                }
                self.answered.notify_all();
            }
            if all {
                self.lock().ways.retain(|_, way| way.unasked < FORGOTTEN_AFTER);
            }
        }
    }
}

/// The address without its port, which has no say in the route.
fn without_port(mut to: SocketAddr) -> SocketAddr {
    to.set_port(0);
    to
}

/// The UDP payload of the largest packet to `to` through an interface with this MTU.
fn datagram_of(to: SocketAddr, mtu: u32) -> usize {
    /// The bytes of an IPv4 or IPv6 header, with those of UDP.
    const HEADERS: [usize; 2] = [20 + 8, 40 + 8];
    let headers = HEADERS[usize::from(to.is_ipv6())];
    (mtu as usize).saturating_sub(headers).min(MAX_MESSAGE_BYTES)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// What is known of `to` once the thread has looked.
    fn known(interfaces: &Interfaces, to: &str) -> Option<usize> {
        let to: SocketAddr = to.parse().unwrap();
        for _ in 0..2_000 {
            if let Some(most) = interfaces.largest_datagram(to) {
                return Some(most);
            }
            let is_looked_at = interfaces.shared.lock().ways[&without_port(to)].is_looked_at;
            if is_looked_at {
                return None;
            }
            std::thread::sleep(Duration::from_millis(1));
        }
        panic!("nobody looks");
    }

    #[test]
    fn loopback_takes_what_fits_into_its_mtu() {
        let interfaces = Interfaces::start(0).unwrap();
        assert_eq!(known(&interfaces, "127.0.0.1:4433"), Some(65_507));
        assert!([None, Some(65_488)].contains(&known(&interfaces, "[::1]:4433")));
        // Nothing is sent to it.
        assert_eq!(known(&interfaces, "[100::1]:1").filter(|most| *most > 65_488), None);
    }

    #[test]
    fn nobody_waits_for_a_kernel_that_was_slow() {
        // There is no thread that would answer.
        let interfaces = Interfaces { shared: Arc::default() };
        let asked = |port| interfaces.largest_datagram(SocketAddr::from(([192, 0, 2, port], 1)));
        let began = SystemClock.now();
        assert_eq!(asked(1), None);
        let first = SystemClock.now() - began;
        assert!(first >= PATIENCE, "{first:?}");
        assert!(interfaces.shared.lock().slow_until.is_some());
        assert_eq!([asked(1), asked(2), asked(3)], [None; 3]);
        let until = interfaces.shared.lock().slow_until;
        assert!(until.is_some_and(|until| until <= began + first + IMPATIENT), "and is not waited for again");
    }

    #[test]
    fn headers_are_left_out() {
        let [v4, v6] = ["192.0.2.1:1", "[2001:db8::1]:1"].map(|to| to.parse().unwrap());
        assert_eq!([datagram_of(v4, 1500), datagram_of(v6, 1500)], [1472, 1452]);
        assert_eq!([datagram_of(v4, 65_536), datagram_of(v6, 65_536)], [65_507, 65_488]);
        assert_eq!(datagram_of(v6, 20), 0);
    }
}
