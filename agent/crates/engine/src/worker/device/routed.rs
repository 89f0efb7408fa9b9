//! Whose prefixes have routes with `tun.routes = "connected"`.

use std::{
    collections::BTreeMap,
    time::{Duration, Instant},
};

use base::ids::PeerId;

/// Which peers carry packets, and for how long they have.
///
/// A peer loses its routes as soon as it does not answer or is away, and has them at once with its first connection. After a loss it
/// has them again when it has been there for `hold`: whoever announces the routes sees a peer that flaps go away once in that time at
/// most.
#[derive(Debug)]
pub(crate) struct RoutedPeers {
    hold: Duration,
    /// The peers that have been there.
    known: BTreeMap<PeerId, Seen>,
}

/// A peer that has been there.
#[derive(Clone, Copy, Debug)]
struct Seen {
    is_there: bool,
    /// Since when it may have routes while it is there.
    from: Instant,
}

impl RoutedPeers {
    pub(crate) fn new(hold: Duration) -> Self {
        Self { hold, known: BTreeMap::new() }
    }

    /// Notes whether a peer carries packets; returns whether it has its routes now.
    pub(crate) fn look(&mut self, peer: PeerId, is_there: bool, now: Instant) -> bool {
        let Some(seen) = self.known.get_mut(&peer) else {
            if is_there {
                self.known.insert(peer, Seen { is_there, from: now });
            }
            return is_there;
        };
        if is_there && !seen.is_there {
            seen.from = now + self.hold;
        }
        seen.is_there = is_there;
        is_there && now >= seen.from
    }

    /// Forgets a peer that was removed.
    pub(crate) fn forget(&mut self, peer: PeerId) {
        self.known.remove(&peer);
    }

    /// The peers that are there and wait for their hold. Nothing is sent to them yet, so they must be asked whether they answer.
    pub(crate) fn waiting(&self, now: Instant) -> impl Iterator<Item = PeerId> {
        self.known.iter().filter(move |(_, seen)| seen.is_there && now < seen.from).map(|(peer, _)| *peer)
    }
}

#[cfg(test)]
mod tests {
    use base::clock::{Clock as _, SystemClock};

    use super::*;

    #[test]
    fn a_peer_that_flaps_has_its_routes_once_in_the_hold() {
        let start = SystemClock.now();
        let mut peers = RoutedPeers::new(Duration::from_secs(5));
        let mut has_routes = |second: u64, is_there: bool| {
            let now = start + Duration::from_secs(second);
            let routed = peers.look(PeerId(3), is_there, now);
            assert_eq!(peers.waiting(now).count(), usize::from(is_there && !routed), "{second}");
            routed
        };
        assert!(!has_routes(0, false));
        assert!(has_routes(1, true), "at once with the first connection");
        assert!(has_routes(2, true));
        assert!(!has_routes(3, false));
        assert!(!has_routes(4, true));
        assert!(!has_routes(8, true));
        assert!(has_routes(9, true), "five seconds");
        for second in 10..20 {
            assert!(!has_routes(second, second % 2 == 1), "{second}");
        }
        assert!(!has_routes(20, true));
        assert!(!has_routes(23, true));
        assert!(has_routes(24, true));
        peers.forget(PeerId(3));
        let again = peers.look(PeerId(3), true, start + Duration::from_secs(30));
        assert!(again, "another peer, with the number of one that was removed");
    }
}
