//! One prefix behind two exits: the better one carries it, the other one when that does not answer.

use std::{
    collections::{BTreeMap, BTreeSet},
    net::{IpAddr, Ipv4Addr},
    time::{Duration, Instant},
};

use base::ids::PeerId;
use dataplane::forward::{learned::LearnedRoutes, peer_routes::Holder};
use gate::identity::Identity;
use ip::{
    model::Recipe,
    view::{IpView, UDP},
};

use crate::{
    ENTRY, EXIT, World,
    harness::Weather,
    tunnel::{BEHIND_ENTRY, BEHIND_EXIT, ENTRY_TUN, EXIT_TUN, Given, How, assert_books},
};

/// The other exit.
const EXIT_2: IpAddr = IpAddr::V4(Ipv4Addr::new(203, 0, 113, 1));

/// An entry, and two exits with the same network behind them.
struct Exits {
    world: World,
    entry: usize,
    exits: [usize; 2],
    keys: [Identity; 3],
    toml: [String; 3],
    /// Packets that the entry's kernel has given.
    given: u64,
    next: u8,
}

impl Exits {
    /// With this many workers each; what the entry says of each exit, and of its device.
    fn new(seed: u64, workers: u8, of_exits: [&str; 2], of_tun: &str) -> Self {
        println!("seed {seed}, {workers} workers");
        let mut world = World::new(seed);
        world.workers = workers;
        world.weather.borrow_mut().delay = Duration::from_millis(10);
        let keys: [Identity; 3] = std::array::from_fn(|_| Identity::generate().unwrap());
        let exit = |address: IpAddr| {
            format!(
                "identity = {{ key_file = \"none\" }}\ntransport = {{ listen = [\"{address}:4433\"] }}\n\
                 [[peer]]\nname = \"entry\"\npublic_key = \"{}\"\n{BEHIND_ENTRY}\n{EXIT_TUN}",
                keys[0].public_key()
            )
        };
        let toml = [entry(&keys, of_exits, of_tun), exit(EXIT), exit(EXIT_2)];
        let exits =
            [world.start(&toml[1], &keys[1], &[EXIT], 1), world.start(&toml[2], &keys[2], &[EXIT_2], 2)];
        let entry = world.start(&toml[0], &keys[0], &[ENTRY], 3);
        let mut all = Self { world, entry, exits, keys, toml, given: 0, next: 0 };
        all.world.run_till(Duration::from_secs(10), |world| {
            world.peers(entry).iter().all(|peer| peer.lanes_up >= usize::from(workers))
        });
        all
    }

    /// The entry's kernel gives a packet from each of `flows` addresses.
    fn give(&mut self, flows: std::ops::Range<u8>) {
        for flow in flows {
            self.next = self.next.wrapping_add(1);
            let recipe = Recipe { protocol: UDP, flow, payload: 200, fill: self.next, ..Recipe::TCP };
            let given = Given::new(&recipe, How::Complete);
            assert!(self.world.agent(self.entry).tun().push(0, given.vnet, &given.bytes));
            self.given += 1;
        }
    }

    /// The sources of packets that each exit's kernel has got.
    fn got(&mut self) -> [Vec<IpAddr>; 2] {
        self.exits.map(|place| {
            let alive = !self.world.has_ended(place);
            let written = if alive { self.world.agent(place).tun().take_written() } else { Vec::new() };
            written.iter().map(|one| IpView::parse(&one.packet).unwrap().source).collect()
        })
    }

    /// Gives packets of a flow each millisecond; returns the number at each exit, and the longest time without one at either.
    fn flow(&mut self, time: Duration) -> ([usize; 2], Duration) {
        let (mut counts, mut last, mut gap) = ([0; 2], self.world.now(), Duration::ZERO);
        let end: Instant = last + time;
        while self.world.now() < end {
            self.give(1..2);
            self.world.run(Duration::from_millis(1));
            let got = self.got().map(|packets| packets.len());
            if got.iter().any(|count| *count > 0) {
                gap = gap.max(self.world.now().saturating_duration_since(last));
                last = self.world.now();
            }
            counts = [counts[0] + got[0], counts[1] + got[1]];
        }
        (counts, gap)
    }

    /// Packets from and to an exit are lost without a sign from now on, or no longer.
    fn cut(&mut self, address: Option<IpAddr>) {
        let block: Box<dyn Fn(std::net::SocketAddr, std::net::SocketAddr) -> bool> = match address {
            Some(address) => Box::new(move |from, to| from.ip() == address || to.ip() == address),
            None => Box::new(|_, _| false),
        };
        let delay = Duration::from_millis(10);
        *self.world.weather.borrow_mut() = Weather { delay, loss_percent: 0, block, mark: None };
    }

    fn handovers(&mut self) -> u64 {
        self.world.metric(self.entry, "culvert_tun_handovers_total")
    }
}

fn entry(keys: &[Identity; 3], of_exits: [&str; 2], of_tun: &str) -> String {
    let peer = |index: usize, address: IpAddr| {
        format!(
            "[[peer]]\nname = \"exit-{index}\"\npublic_key = \"{}\"\nendpoints = [\"{address}:4433\"]\n{BEHIND_EXIT}\n{}\n",
            keys[index].public_key(),
            of_exits[index - 1]
        )
    };
    let peers = [peer(1, EXIT), peer(2, EXIT_2)].concat();
    format!("identity = {{ key_file = \"none\" }}\n{peers}{ENTRY_TUN}\n{of_tun}\n")
}

const PREFERRED: [&str; 2] = ["priority = 1", "priority = 2"];

#[test]
fn a_dead_exit_costs_a_flow_less_than_200_ms_and_has_it_again_after_the_hold() {
    for (seed, workers) in [(2_100, 1), (2_101, 2), (2_102, 3)] {
        let mut exits = Exits::new(seed, workers, PREFERRED, "");
        exits.world.run(Duration::from_secs(6));
        let (counts, _) = exits.flow(Duration::from_secs(1));
        assert!(counts[0] > 900 && counts[1] == 0, "seed {seed}: {counts:?}");
        exits.world.kill(exits.exits[0]);
        let before = exits.handovers();
        let (counts, gap) = exits.flow(Duration::from_secs(2));
        assert!(counts[1] > 1_700 && gap < Duration::from_millis(200), "seed {seed}: {counts:?} {gap:?}");
        assert_eq!(exits.handovers(), before + 1, "seed {seed}");

        let (place, toml) = (exits.exits[0], exits.toml[1].clone());
        exits.world.restart(place, &toml, &exits.keys[1], &[EXIT], 9);
        let (counts, gap) = exits.flow(Duration::from_secs(4));
        assert!(counts[0] == 0 && gap < Duration::from_millis(30), "seed {seed}: {counts:?} {gap:?}");
        let (counts, gap) = exits.flow(Duration::from_secs(20));
        assert!(counts[0] > 5_000 && gap < Duration::from_millis(30), "seed {seed}: {counts:?} {gap:?}");
        assert_eq!(exits.handovers(), before + 2, "seed {seed}");
        exits.world.run(Duration::from_secs(1));
        let given = exits.given;
        assert_books(&mut exits.world, exits.entry, given);
    }
}

#[test]
fn a_silent_path_is_left_at_the_first_unanswered_probe_and_a_flapping_one_until_it_stays() {
    let mut exits = Exits::new(2_110, 2, PREFERRED, "hold = \"3s\"");
    exits.world.run(Duration::from_secs(4));
    exits.flow(Duration::from_millis(300));
    let before = exits.handovers();
    exits.cut(Some(EXIT));
    let (_, gap) = exits.flow(Duration::from_millis(600));
    assert!(gap < Duration::from_millis(200), "{gap:?}");
    for _ in 0..5 {
        exits.cut(None);
        exits.flow(Duration::from_secs(2));
        exits.cut(Some(EXIT));
        // Long enough that a ping is lost: nothing else is sent there.
        let (counts, gap) = exits.flow(Duration::from_millis(1_400));
        assert!(counts[0] == 0 && gap < Duration::from_millis(30), "{counts:?} {gap:?}");
    }
    assert_eq!(exits.handovers(), before + 1);
    exits.cut(None);
    exits.flow(Duration::from_secs(25));
    let (counts, _) = exits.flow(Duration::from_secs(1));
    assert!(counts[0] > 900 && counts[1] == 0, "{counts:?}");
    assert_eq!(exits.handovers(), before + 2);
    exits.world.run(Duration::from_secs(1));
    let given = exits.given;
    assert_books(&mut exits.world, exits.entry, given);
}

#[test]
fn equals_share_hosts_and_a_reload_changes_who_carries_them() {
    let mut exits = Exits::new(2_120, 2, ["weight = 1", "weight = 1"], "hold = \"1s\"");
    // Whichever connected first has had them all.
    exits.world.run(Duration::from_secs(3));
    let sources = |exits: &mut Exits| -> [BTreeSet<IpAddr>; 2] {
        for _ in 0..3 {
            exits.give(1..101);
            exits.world.run(Duration::from_millis(50));
        }
        exits.got().map(|sources| sources.into_iter().collect())
    };
    let [first, second] = sources(&mut exits);
    assert_eq!(first.len() + second.len(), 100, "each host stays at one exit");
    assert!(first.len() > 25 && second.len() > 25, "{} {}", first.len(), second.len());

    let toml = entry(&exits.keys, ["priority = 7", "weight = 1"], "hold = \"1s\"");
    exits.world.reload(exits.entry, &toml).unwrap();
    let [first, second] = sources(&mut exits);
    assert_eq!((first.len(), second.len()), (100, 0));
    let toml = entry(&exits.keys, ["priority = 7", "priority = 6"], "hold = \"1s\"");
    exits.world.reload(exits.entry, &toml).unwrap();
    let [first, second] = sources(&mut exits);
    assert_eq!((first.len(), second.len()), (0, 100));

    // Either exit may send what comes from the prefix.
    for place in exits.exits {
        let recipe = Recipe { protocol: UDP, flow: 5, payload: 200, ..Recipe::TCP };
        let given = Given::new(&recipe, How::Complete).back();
        assert!(exits.world.agent(place).tun().push(0, given.vnet, &given.bytes));
    }
    exits.world.run(Duration::from_millis(50));
    assert_eq!(exits.world.agent(exits.entry).tun().take_written().len(), 2);
    let given = exits.given;
    assert_books(&mut exits.world, exits.entry, given);
}

#[test]
fn an_exit_that_drains_hands_its_packets_to_the_one_that_stands_in_at_once() {
    let mut exits = Exits::new(2_180, 2, PREFERRED, "");
    exits.world.run(Duration::from_secs(6));
    exits.world.drain(exits.exits[0], Duration::from_secs(20));
    let (counts, gap) = exits.flow(Duration::from_secs(1));
    assert!(counts[0] < 50 && counts[1] > 930 && gap < Duration::from_millis(30), "{counts:?} {gap:?}");
}

#[test]
fn next_hops_of_the_kernels_route_share_hosts_by_weight_and_a_dead_one_is_left_in_less_than_200_ms() {
    for (seed, workers) in [(2_190, 1), (2_191, 2), (2_192, 3)] {
        let of_exits = ["address = [\"10.9.0.252\"]", "address = [\"10.9.0.253\"]"];
        let mut exits = Exits::new(seed, workers, of_exits, "routing = \"kernel\"");
        let [first, second] =
            [(0, 1), (1, 3)].map(|(peer, weight)| Holder { priority: 0, peer: PeerId(peer), weight });
        let route = ("10.9.1.0/24".parse().unwrap(), vec![first, second]);
        let learned = LearnedRoutes::new([route], &BTreeMap::new(), None);
        exits.world.agent(exits.entry).learn_routes(learned);
        exits.world.run(Duration::from_secs(6));

        exits.give(1..101);
        exits.world.run(Duration::from_millis(50));
        let [first, second] = exits.got().map(|sources| sources.len());
        assert_eq!(first + second, 100, "seed {seed}");
        assert!((8..=45).contains(&first), "seed {seed}: a quarter of 100: {first}");

        let (counts, _) = exits.flow(Duration::from_millis(500));
        let carrier = usize::from(counts[1] > 0);
        assert!(counts[carrier] > 450 && counts[1 - carrier] == 0, "seed {seed}: {counts:?}");
        exits.world.kill(exits.exits[carrier]);
        let (counts, gap) = exits.flow(Duration::from_secs(2));
        assert!(counts[1 - carrier] > 1_700, "seed {seed}: {counts:?}");
        assert!(gap < Duration::from_millis(200), "seed {seed}: {gap:?}");
        exits.world.run(Duration::from_secs(1));
        let given = exits.given;
        assert_books(&mut exits.world, exits.entry, given);
    }
}
