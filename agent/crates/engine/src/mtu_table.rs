//! The MTU towards each peer, and who has routes: workers write it, the thread of the tunnel reads it.

use std::{
    collections::{BTreeMap, BTreeSet},
    sync::{Condvar, Mutex},
    time::Duration,
};

use base::{
    ids::PeerId,
    panics::{Held, lock},
};

/// The largest inner packet to each peer whose path has been measured, in bytes.
pub type Mtus = BTreeMap<PeerId, u16>;

/// What the tunnel's thread is to know of the peers.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Paths {
    pub mtus: Mtus,
    /// With `tun.routes = "connected"`: the peers that have routes.
    pub routed: BTreeSet<PeerId>,
}

/// How long changes of paths are gathered, so that a thousand peers that connect at once are one plan.
const GATHER: Duration = Duration::from_millis(20);

/// Where workers write what fits into a packet to each peer, and which peers have routes; the tunnel's thread reads it.
#[derive(Debug, Default)]
pub struct MtuTable {
    state: Mutex<State>,
    changed: Condvar,
}

impl MtuTable {
    /// The largest inner packet to `peer` is `mtu` bytes from now on; `None` once it is not connected.
    pub fn set_mtu(&self, peer: PeerId, mtu: Option<u16>) {
        let mut state = self.lock();
        let before = match mtu {
            Some(mtu) => state.paths.mtus.insert(peer, mtu),
            None => state.paths.mtus.remove(&peer),
        };
        if before != mtu {
            state.changed = true;
            self.changed.notify_one();
        }
    }

    /// With `tun.routes = "connected"`: `peer` has routes from now on, or none.
    pub fn set_routed(&self, peer: PeerId, is_routed: bool) {
        let mut state = self.lock();
        let routed = &mut state.paths.routed;
        let is_other = if is_routed { routed.insert(peer) } else { routed.remove(&peer) };
        if is_other {
            state.changed = true;
            self.changed.notify_one();
        }
    }

    pub fn paths(&self) -> Paths {
        self.lock().paths.clone()
    }

    /// The peers are otherwise: the thread is to look at once.
    pub fn look_again(&self) {
        self.lock().changed = true;
        self.changed.notify_one();
    }

    /// Tells the tunnel's thread to end.
    pub fn stop(&self) {
        self.lock().stopped = true;
        self.changed.notify_one();
    }

    /// Waits for a change, or that `within` is over; then for more changes to come. `None` when it is to end.
    pub fn wait(&self, within: Duration) -> Option<Paths> {
        let quiet = |state: &mut State| !state.changed && !state.stopped;
        let state = self.lock().wait_while(&self.changed, within, quiet);
        let more = |state: &mut State| state.changed && !state.stopped;
        let mut state = state.wait_while(&self.changed, GATHER, more);
        state.changed = false;
        (!state.stopped).then(|| state.paths.clone())
    }

    fn lock(&self) -> Held<'_, State> {
        lock(&self.state)
    }
}

#[derive(Debug, Default)]
struct State {
    paths: Paths,
    changed: bool,
    stopped: bool,
}
