//! The thread that follows the kernel's routes (`tun.routing = "kernel"`).
//!
//! What the kernel tells says only that something has changed: the table is always made of all routes of the device, so that nothing
//! depends on messages that were lost, or that the kernel does not send (IPv4 routes vanish with an address or a link without one).

use std::{
    io,
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    time::{Duration, Instant},
};

use base::clock::{Clock, SystemClock};
use config::Tun;
use net::netlink::{DeviceRoute, Netlink, RouteChanges};

use crate::{
    registry::{Listed, PeerRegistry},
    tunnel::{TunnelError, learn::learn, logged::Logged, plan::FAMILIES},
};

/// How long changes are gathered: those of a batch of a routing daemon come at once.
const GATHER: Duration = Duration::from_millis(10);

/// The interval at which the peers are looked at, and whether the thread is to end.
const TICK: Duration = Duration::from_millis(200);

/// All routes are listed at least this often, whatever the kernel has told.
const LEAST_OFTEN: Duration = Duration::from_secs(10);

/// Of the time, listing the routes takes at most a share of one in this many: a table that changes all the time is behind by as much.
const SHARE: u32 = 5;

/// A list that changed meanwhile is made again, this many times.
const TRIES: u32 = 3;

/// The thread; dropping it ends it, within a [`TICK`] for which nobody waits.
pub(super) struct RouteFollower {
    stop: Arc<AtomicBool>,
}

impl RouteFollower {
    /// Follows the routes of the device `index`, which is `tun`, and whose peers are those of `registry`.
    ///
    /// # Errors
    /// The kernel's.
    pub(super) fn start(index: u32, registry: &Arc<PeerRegistry>, tun: Tun) -> Result<Self, TunnelError> {
        let failed = |error| TunnelError::Kernel { what: "a view of the routes", error };
        let changes = Netlink::open().and_then(Netlink::follow).map_err(failed)?;
        let netlink = Netlink::open().map_err(failed)?;
        let mut known = Known {
            netlink,
            index,
            tun,
            registry: Arc::clone(registry),
            routes: Vec::new(),
            peers: Vec::new(),
            logged: Logged::default(),
        };
        known.list(SystemClock.now()).map_err(failed)?;
        let stop = Arc::<AtomicBool>::default();
        let stopped = Arc::clone(&stop);
        std::thread::Builder::new()
            .name("culvert-routes".to_owned())
            .spawn(move || known.run(changes, &stopped, &SystemClock))
            .map_err(|error| TunnelError::Kernel { what: "the thread of the routes", error })?;
        Ok(Self { stop })
    }
}

impl Drop for RouteFollower {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::Relaxed);
    }
}

/// What the table was last made of.
struct Known {
    netlink: Netlink,
    index: u32,
    tun: Tun,
    registry: Arc<PeerRegistry>,
    routes: Vec<DeviceRoute>,
    /// As far as the table depends on them; compared by address, as a changed peer is another one.
    peers: Vec<Listed>,
    logged: Logged,
}

impl Known {
    fn run(mut self, mut changes: RouteChanges, stop: &AtomicBool, clock: &dyn Clock) {
        let (mut dirty, mut not_before, mut listed) = (true, clock.now(), clock.now());
        while !stop.load(Ordering::Relaxed) {
            let wait = if dirty { not_before.saturating_duration_since(clock.now()).min(TICK) } else { TICK };
            match changes.wait(wait) {
                Ok(changed) => dirty |= changed,
                Err(error) => {
                    // It may go on failing at once.
                    std::thread::sleep(TICK);
                    self.warn(&format!("cannot follow the kernel's routes: {error}"), clock.now());
                    dirty = true;
                }
            }
            dirty |= clock.now().saturating_duration_since(listed) >= LEAST_OFTEN;
            if dirty && clock.now() >= not_before {
                std::thread::sleep(GATHER);
                let begun = clock.now();
                // What was told until now is in the list.
                let drained = changes.wait(Duration::ZERO);
                dirty = drained.is_err();
                if let Err(error) = self.list(begun) {
                    self.warn(&format!("cannot list the routes of the tunnel: {error}"), begun);
                    dirty = true;
                }
                listed = clock.now();
                not_before = listed + listed.saturating_duration_since(begun) * SHARE;
            } else if self.peers_changed() {
                self.publish();
            }
        }
    }

    fn warn(&mut self, text: &str, now: Instant) {
        if self.logged.is_due(text, now) {
            tracing::warn!("{text}");
        }
    }

    /// Lists the routes, and publishes the table if they are others than before.
    fn list(&mut self, begun: Instant) -> io::Result<()> {
        let mut routes = Vec::with_capacity(self.routes.len());
        for _ in 0..TRIES {
            routes.clear();
            let next_hops = self.netlink.next_hops()?;
            let mut interrupted = false;
            for family_of in FAMILIES {
                let mut each = |route| routes.push(route);
                interrupted |= self.netlink.device_routes(family_of, self.index, &next_hops, &mut each)?;
            }
            if !interrupted {
                break;
            }
        }
        if routes != self.routes || self.peers_changed() {
            self.routes = routes;
            self.publish();
            let took = SystemClock.now().saturating_duration_since(begun);
            tracing::debug!(routes = self.routes.len(), ?took, "the kernel's routes make another table");
        }
        Ok(())
    }

    fn peers_changed(&self) -> bool {
        let listed = self.registry.list();
        let same = |(new, old): (&Listed, &Listed)| new.id == old.id && Arc::ptr_eq(&new.peer, &old.peer);
        listed.len() != self.peers.len() || !listed.iter().zip(&self.peers).all(same)
    }

    fn publish(&mut self) {
        let peers = self.registry.list();
        let learned = Arc::new(learn(&self.routes, &peers, &self.tun));
        self.peers = peers;
        if let Some(hub) = self.registry.hub() {
            hub.learn_routes(&learned);
        }
    }
}
