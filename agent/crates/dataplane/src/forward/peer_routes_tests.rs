use std::collections::BTreeSet;

use base::clock::{Clock, ManualClock};
use ip::view::{Fragment, UDP};

use super::*;
use crate::relay::Stripes;

const HOLD: Duration = Duration::from_secs(5);
const A: PeerId = PeerId(0);
const B: PeerId = PeerId(1);
const C: PeerId = PeerId(2);

fn net(text: &str) -> IpNet {
    text.parse().unwrap()
}

/// A packet from `source` to 10.1.0.1.
fn view(source: IpAddr) -> IpView {
    IpView {
        source,
        destination: "10.1.0.1".parse().unwrap(),
        protocol: UDP,
        transport_at: 20,
        len: 28,
        fragment: Fragment::No,
        ports: Some((1, 2)),
        traffic_class: 0,
        dont_fragment: true,
    }
}

/// Peers of which some share prefixes, and how ready each is.
struct Case {
    routes: PeerRoutes,
    readiness: BTreeMap<PeerId, Readiness>,
    clock: ManualClock,
}

impl Case {
    /// Peers with 10.1.0.0/16, each with its priority and weight; all are ready, and have been for long.
    fn new(peers: &[(PeerId, u16, u16)]) -> Self {
        let clock = ManualClock::default();
        let mut routes = PeerRoutes::new(Spread::Addresses, HOLD, false);
        for (peer, priority, weight) in peers {
            routes.set_peer(*peer, &[net("10.1.0.0/16")], *priority, *weight);
        }
        let mut case = Self { routes, readiness: BTreeMap::new(), clock };
        case.elect();
        case.clock.advance(HOLD);
        case.elect();
        case
    }

    fn elect(&mut self) -> Vec<Handover> {
        let readiness = |peer| self.readiness.get(&peer).copied().unwrap_or(Readiness::Ready);
        self.routes.elect(readiness, self.clock.now())
    }

    fn set(&mut self, peer: PeerId, readiness: Readiness) -> Vec<Handover> {
        self.readiness.insert(peer, readiness);
        self.elect()
    }

    /// The carrier of a packet from each of 4,000 addresses to 10.1.0.1.
    fn carriers(&self) -> Vec<PeerId> {
        let view = |source: u32| view(IpAddr::V4((0x0a09_0000 + source).into()));
        (0..4_000).map(|source| self.routes.elected(&view(source)).unwrap()).collect()
    }

    fn carry(&self) -> BTreeSet<PeerId> {
        self.carriers().into_iter().collect()
    }
}

#[test]
fn the_lowest_priority_that_is_ready_carries_and_one_that_comes_back_waits() {
    let mut case = Case::new(&[(A, 1, 1), (B, 2, 1), (C, 3, 1)]);
    assert_eq!(case.carry(), [A].into());
    let over = |from, to| vec![Handover { from: vec![from], to: vec![to], prefixes: 1 }];
    assert_eq!(case.set(A, Readiness::Late), over(A, B), "at the first doubt");
    assert_eq!(case.set(B, Readiness::Away), over(B, C));
    assert_eq!(case.carry(), [C].into());
    assert_eq!(case.set(A, Readiness::Ready), []);
    case.clock.advance(HOLD - Duration::from_millis(1));
    assert_eq!(case.set(B, Readiness::Ready), [], "B's hold begins now");
    assert_eq!(case.routes.waiting(case.clock.now()).collect::<Vec<_>>(), [A, B], "to be asked");
    case.clock.advance(Duration::from_millis(1));
    assert_eq!(case.elect(), over(C, A));
}

#[test]
fn a_peer_that_flaps_does_not_carry_and_nobody_waits_if_nobody_else_is_ready() {
    let mut case = Case::new(&[(A, 1, 1), (B, 2, 1)]);
    case.set(A, Readiness::Late);
    for _ in 0..20 {
        assert_eq!(case.set(A, Readiness::Ready), []);
        case.clock.advance(HOLD / 2);
        assert_eq!(case.set(A, Readiness::Late), []);
    }
    assert_eq!(case.carry(), [B].into());
    assert_eq!(case.set(B, Readiness::Away).len(), 1, "late is better than away");
    assert_eq!(case.set(B, Readiness::Ready).len(), 1, "its hold does not count: nobody else is ready");
    assert_eq!(case.set(B, Readiness::Away).len(), 1);
    assert_eq!(case.set(A, Readiness::Away), []);
    assert_eq!(case.carry(), [A].into(), "packets wait for the best if all are away");
}

#[test]
fn equals_share_flows_by_weight_and_only_flows_of_the_failed_one_move() {
    let mut case = Case::new(&[(A, 1, 1), (B, 1, 3), (C, 1, 4)]);
    let before = case.carriers();
    let share = |carriers: &[PeerId], peer| carriers.iter().filter(|carrier| **carrier == peer).count();
    for (peer, expected) in [(A, 500), (B, 1_500), (C, 2_000)] {
        let share = share(&before, peer);
        assert!(share.abs_diff(expected) < 250, "{peer:?}: {share} of 4,000, expected {expected}");
    }
    case.set(C, Readiness::Late);
    let without = case.carriers();
    assert_eq!(share(&without, C), 0);
    assert!(before.iter().zip(&without).all(|(before, after)| *before == C || before == after));
    assert!(share(&without, B) > 2 * share(&without, A), "its flows are shared by weight, too");
    case.set(C, Readiness::Ready);
    assert_eq!(case.carriers(), without, "it waits for its hold");
    case.clock.advance(HOLD);
    case.elect();
    assert_eq!(case.carriers(), before, "and has its flows again, and no others");
}

#[test]
fn every_holder_may_send_and_what_is_given_up_is_nobodys() {
    let mut routes = PeerRoutes::new(Spread::Ports, HOLD, false);
    let shared = [net("10.1.0.0/16"), net("fd01::/64")];
    routes.set_peer(A, &[shared[0], shared[1], net("10.2.0.0/16")], 1, 1);
    assert!(!routes.shares(A));
    routes.set_peer(B, &shared, 2, 1);
    routes.set_peer(C, &[net("10.1.9.0/24")], 100, 1);
    let may = |routes: &PeerRoutes, source: &str| {
        [A, B, C].map(|peer| routes.may_send(&view(source.parse().unwrap()), peer))
    };
    assert_eq!(may(&routes, "10.1.0.1"), [true, true, false]);
    assert_eq!(may(&routes, "fd01::1"), [true, true, false]);
    assert_eq!(may(&routes, "10.2.0.1"), [true, false, false]);
    assert_eq!(may(&routes, "10.1.9.1"), [false, false, true], "a longer prefix is its holder's alone");
    assert_eq!([A, B, C].map(|peer| routes.shares(peer)), [true, true, false]);
    assert_eq!(routes.groups.iter().map(|group| group.users).collect::<Vec<_>>(), [2]);
    assert_eq!(routes.holders("10.1.0.1".parse().unwrap()), [A, B]);

    routes.set_peer(B, &[], 0, 0);
    assert_eq!(may(&routes, "10.1.0.1"), [true, false, false]);
    assert!(!routes.shares(A));
    routes.set_peer(A, &[], 0, 0);
    assert_eq!(may(&routes, "10.1.0.1"), [false; 3]);
    assert_eq!(routes.groups.iter().map(|group| group.users).collect::<Vec<_>>(), [0]);
    assert_eq!((routes.holders.len(), routes.prefixes.len()), (1, 1), "C's");
    routes.set_peer(A, &shared, 2, 1);
    routes.set_peer(C, &shared, 1, 1);
    assert_eq!(
        routes.groups.iter().map(|group| group.users).collect::<Vec<_>>(),
        [2],
        "the slot is used again"
    );
    assert_eq!(routes.holders("fd01::1".parse().unwrap()), [C, A], "the best first");
}

/// Packets of 4,096 flows between 64 pairs of hosts, whose addresses and ports follow each other as they do in practice.
fn flows(ipv6: bool, ports: bool) -> Vec<IpView> {
    let pair = |pair: u32| -> [IpAddr; 2] {
        let [near, far] = [pair % 8, pair / 8];
        if ipv6 {
            let address = |net: u128, host: u32| IpAddr::V6((net << 64 | u128::from(host + 1)).into());
            [address(0xfd09_0000_0000_0000, near), address(0xfd01_0000_0000_0000, far)]
        } else {
            [0x0a09_0001 + near, 0x0a01_0001 + far].map(|address| IpAddr::V4(address.into()))
        }
    };
    let flow = |number: u32| {
        // Without ports each flow is a pair of hosts.
        let [source, destination] = pair(if ports { number % 64 } else { number });
        IpView {
            source,
            destination,
            ports: ports.then_some((40_000 + (number / 64) as u16, 443)),
            ..view(source)
        }
    };
    (0..4_096).map(flow).collect()
}

/// Pearson's statistic of a table of peers and lanes: how far it is from what independent choices make.
fn chi_square(pairs: impl Iterator<Item = (PeerId, u8)>) -> f64 {
    let mut cells = BTreeMap::<(PeerId, u8), f64>::new();
    let (mut peers, mut lanes) = (BTreeMap::<PeerId, f64>::new(), BTreeMap::<u8, f64>::new());
    let mut all = 0.0;
    for (peer, lane) in pairs {
        *cells.entry((peer, lane)).or_default() += 1.0;
        *peers.entry(peer).or_default() += 1.0;
        *lanes.entry(lane).or_default() += 1.0;
        all += 1.0;
    }
    let part = |(peer, of_peer): (&PeerId, &f64)| -> f64 {
        let cell = |(lane, of_lane): (&u8, &f64)| {
            let expected = of_peer * of_lane / all;
            (cells.get(&(*peer, *lane)).copied().unwrap_or_default() - expected).powi(2) / expected
        };
        lanes.iter().map(cell).sum()
    };
    peers.iter().map(part).sum()
}

#[test]
fn the_peer_of_a_flow_tells_nothing_of_its_lane() {
    /// What chance exceeds once in 10,000 times, at (3 − 1) × (8 − 1) degrees of freedom; with fewer, less often.
    const BOUND: f64 = 42.6;
    let now = ManualClock::default().now();
    for (spread, ipv6, ports) in [
        (Spread::Addresses, false, true),
        (Spread::Addresses, true, true),
        (Spread::Addresses, false, false),
        (Spread::Addresses, true, false),
        (Spread::Ports, false, true),
        (Spread::Ports, true, true),
        (Spread::Ports, false, false),
        (Spread::Ports, true, false),
    ] {
        let mut case = Case::new(&[(A, 1, 1), (B, 1, 1), (C, 1, 2)]);
        case.routes.spread = spread;
        let flows = flows(ipv6, ports);
        for lanes in [2, 3, 4, 8] {
            let mut stripes = Stripes::new(now);
            let mut both = |view: &IpView| {
                let lane = stripes.lane(Stripes::bucket(view.flow_hash()), lanes, |_| true, now);
                (case.routes.of_group(0, view).unwrap(), lane)
            };
            let chosen: Vec<(PeerId, u8)> = flows.iter().map(&mut both).collect();
            let found = chi_square(chosen.iter().copied());
            assert!(found < BOUND, "{found} {spread:?}, IPv6 {ipv6}, ports {ports}, {lanes} lanes");
            // Peers that were chosen by the same bits would show.
            let same = chi_square(chosen.iter().map(|(_, lane)| (PeerId(u32::from(*lane) % 3), *lane)));
            assert!(same > 1_000.0, "{same}");
        }
    }
}
