//! Whose prefixes have routes with `tun.routes = "connected"`. No system calls.

use std::{
    collections::{BTreeMap, BTreeSet},
    time::{Duration, Instant},
};

use ipnet::IpNet;
use wire::ids::PeerId;

use crate::registry::Listed;

/// Which peers are connected, and for how long.
///
/// A route goes as soon as its peer is away, and comes at once with the first connection. After a loss it comes back when the peer
/// has been there for `hold`: whoever announces the routes sees a peer that flaps go away once in that time at most.
#[derive(Debug)]
pub(super) struct ConnectedPeers {
    hold: Duration,
    /// The peers that have been connected.
    known: BTreeMap<PeerId, Seen>,
}

/// A peer that has been connected.
#[derive(Clone, Copy, Debug)]
struct Seen {
    connected: bool,
    /// Since when it may have routes while it is connected.
    from: Instant,
}

impl ConnectedPeers {
    pub(super) fn new(hold: Duration) -> Self {
        Self { hold, known: BTreeMap::new() }
    }

    /// The prefixes that may have routes now. To be called once a second at least.
    pub(super) fn prefixes(
        &mut self,
        peers: &[Listed],
        is_connected: impl Fn(PeerId) -> bool,
        now: Instant,
    ) -> BTreeSet<IpNet> {
        let listed: BTreeSet<PeerId> = peers.iter().map(|peer| peer.id).collect();
        self.known.retain(|id, _| listed.contains(id));
        let mut prefixes = BTreeSet::new();
        for peer in peers {
            if self.is_routed(peer.id, is_connected(peer.id), now) {
                prefixes.extend(peer.peer.allowed_ips.iter().map(IpNet::trunc));
            }
        }
        prefixes
    }

    fn is_routed(&mut self, id: PeerId, connected: bool, now: Instant) -> bool {
        let Some(seen) = self.known.get_mut(&id) else {
            if connected {
                self.known.insert(id, Seen { connected, from: now });
            }
            return connected;
        };
        if connected && !seen.connected {
            seen.from = now + self.hold;
        }
        seen.connected = connected;
        connected && now >= seen.from
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use wire::clock::{Clock as _, SystemClock};

    use super::*;
    use crate::origin::PeerOrigin;

    fn peer(id: u32, prefixes: &[&str]) -> Listed {
        let text = format!(
            "identity.key_file = \"k\"\ntransport.listen = [\"127.0.0.1:4433\"]\n[tun]\naddress = [\"10.9.0.1/24\"]\n[[peer]]\nname = \"p\"\n\
             public_key = \"AQEBAQEBAQEBAQEBAQEBAQEBAQEBAQEBAQEBAQEBAQE\"\nallowed_ips = {prefixes:?}\npriority = 1\n"
        );
        let config = config::Config::parse(&text, std::path::Path::new("/")).unwrap();
        let peer = Arc::new(config.peers[0].clone());
        Listed { id: PeerId(id), peer, origin: PeerOrigin::Config }
    }

    #[test]
    fn a_peer_that_flaps_has_its_route_once_in_the_hold() {
        let start = SystemClock.now();
        let peers = [peer(0, &["10.1.0.0/16"]), peer(1, &["10.1.0.0/16", "10.2.3.4/32"])];
        let mut connected = ConnectedPeers::new(Duration::from_secs(5));
        let mut routed = |second: u64, up: &[u32]| {
            let now = start + Duration::from_secs(second);
            let prefixes = connected.prefixes(&peers, |id| up.contains(&id.0), now);
            prefixes.iter().map(ToString::to_string).collect::<Vec<_>>().join(" ")
        };
        assert_eq!(routed(0, &[]), "");
        assert_eq!(routed(1, &[0]), "10.1.0.0/16");
        assert_eq!(routed(2, &[0, 1]), "10.1.0.0/16 10.2.3.4/32");
        assert_eq!(routed(3, &[1]), "10.1.0.0/16 10.2.3.4/32", "another peer has the prefix");
        assert_eq!(routed(4, &[0]), "", "both have been away");
        assert_eq!(routed(8, &[0]), "");
        assert_eq!(routed(9, &[0, 1]), "10.1.0.0/16", "five seconds");
        for second in 10..20 {
            let up = if second % 2 == 0 { &[][..] } else { &[0, 1] };
            assert_eq!(routed(second, up), "", "{second}");
        }
        assert_eq!(routed(24, &[0, 1]), "10.1.0.0/16 10.2.3.4/32");
    }
}
