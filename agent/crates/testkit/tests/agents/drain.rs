//! An exit that drains hands its peers over to another one: without a lost packet where there is one, and in bounded time where
//! there is none.

use std::{
    net::{IpAddr, Ipv4Addr},
    time::Duration,
};

use gate::identity::Identity;
use ip::{model::Recipe, view::UDP};
use wire::messages::Features;

use crate::{
    ENTRY, EXIT, World,
    harness::Weather,
    tunnel::{BEHIND_ENTRY, BEHIND_EXIT, ENTRY_TUN, EXIT_TUN, Given, How, cut},
};

/// The other exit.
const EXIT_2: IpAddr = IpAddr::V4(Ipv4Addr::new(203, 0, 113, 1));

const SUSPECTED: &str = "culvert_sessions_suspected_total{reason=\"leaving\"}";

/// An entry, and two exits with one identity that are endpoints of one peer.
struct Fleet {
    world: World,
    entry: usize,
    exits: [usize; 2],
    keys: [Identity; 2],
    entry_toml: String,
    /// Packets that the entry's kernel, and those of the exits, have given.
    given: [u64; 2],
    /// Packets that the exits' kernels have got, and that of the entry.
    got: [u64; 2],
}

impl Fleet {
    fn new(seed: u64, workers: u8, exits: usize) -> Self {
        println!("seed {seed}, {workers} workers");
        let mut world = World::new(seed);
        world.workers = workers;
        let keys: [Identity; 2] = std::array::from_fn(|_| Identity::generate().unwrap());
        let exit = |address: IpAddr, server: u8| {
            format!(
                "identity = {{ key_file = \"none\" }}\n\
                 transport = {{ listen = [\"{address}:4433\"], server_id = {server} }}\n\
                 [[peer]]\nname = \"entry\"\npublic_key = \"{}\"\n{BEHIND_ENTRY}\n{EXIT_TUN}",
                keys[0].public_key()
            )
        };
        let both = [
            world.start(&exit(EXIT, 1), &keys[1], &[EXIT], 1),
            world.start(&exit(EXIT_2, 2), &keys[1], &[EXIT_2], 2),
        ];
        let endpoints = if exits == 1 {
            format!("\"{EXIT}:4433\"")
        } else {
            format!("\"{EXIT}:4433\", \"{EXIT_2}:4433\"")
        };
        let entry_toml = format!(
            "identity = {{ key_file = \"none\" }}\n[[peer]]\nname = \"fleet\"\npublic_key = \"{}\"\n\
             endpoints = [{endpoints}]\n{BEHIND_EXIT}\n{ENTRY_TUN}\n",
            keys[1].public_key()
        );
        let entry = world.start(&entry_toml, &keys[0], &[ENTRY], 3);
        let mut all = Self { world, entry, exits: both, keys, entry_toml, given: [0; 2], got: [0; 2] };
        all.wait_for_lanes(workers);
        // From here on a round trip takes 20 ms.
        let weather = Weather {
            delay: Duration::from_millis(10),
            loss_percent: 0,
            block: Box::new(|_, _| false),
            mark: None,
        };
        *all.world.weather.borrow_mut() = weather;
        all.world.run(Duration::from_secs(4));
        all
    }

    fn wait_for_lanes(&mut self, lanes: u8) {
        let entry = self.entry;
        self.world
            .run_till(Duration::from_secs(10), |world| world.peer(entry).lanes_up >= usize::from(lanes));
    }

    /// The exit that the entry is connected with, by its place.
    fn serving(&mut self) -> Option<usize> {
        let address = self.world.peer(self.entry).address?;
        [EXIT, EXIT_2].iter().position(|exit| address.ip() == *exit)
    }

    /// A packet each way, every millisecond: from the exits, one of each that has a session.
    fn flow(&mut self, milliseconds: u64) {
        for number in 0..milliseconds {
            let fill = u8::try_from(number % 251).unwrap();
            let recipe = Recipe { protocol: UDP, flow: 1, payload: 200, fill, ..Recipe::TCP };
            self.give(self.entry, 0, Given::new(&recipe, How::Complete));
            if let Some(exit) = self.exits.into_iter().find(|exit| self.world.peer(*exit).lanes_up > 0) {
                self.give(exit, 1, Given::new(&recipe, How::Complete).back());
            }
            self.world.run(Duration::from_millis(1));
            self.take();
        }
    }

    fn give(&mut self, place: usize, way: usize, given: Given) {
        assert!(self.world.agent(place).tun().push(0, given.vnet, &given.bytes));
        self.given[way] += 1;
    }

    fn take(&mut self) {
        for (place, way) in [(self.exits[0], 0), (self.exits[1], 0), (self.entry, 1)] {
            let written = self.world.agent(place).tun().take_written();
            // What waited is written as a super-packet.
            let packets = written.iter().map(|one| cut(&one.vnet, &one.packet).len() as u64);
            self.got[way] += packets.sum::<u64>();
        }
    }

    fn waiting(&mut self, exit: usize, state: &str) -> u64 {
        self.world.metric(self.exits[exit], &format!("culvert_drain_sessions{{state=\"{state}\"}}"))
    }
}

#[test]
fn a_drained_exit_hands_its_peer_over_without_a_lost_packet_either_way() {
    for (seed, workers) in [(2_200, 1), (2_201, 2), (2_202, 3)] {
        let mut fleet = Fleet::new(seed, workers, 2);
        assert_eq!(fleet.serving(), Some(0));
        fleet.flow(300);
        fleet.world.drain(fleet.exits[0], Duration::from_secs(20));
        fleet.flow(1_500);
        assert_eq!(fleet.serving(), Some(1), "seed {seed}");
        fleet.flow(2_500);
        assert_eq!(fleet.waiting(0, "waiting"), 0, "seed {seed}: the old session was left");
        fleet.world.run(Duration::from_millis(300));
        fleet.take();
        assert_eq!(fleet.got, fleet.given, "seed {seed}: nothing is lost");
        assert_eq!(fleet.world.metric(fleet.entry, SUSPECTED), 1);
        assert_eq!(fleet.waiting(0, "closed"), 0);
    }
}

#[test]
fn a_peer_with_nowhere_to_go_is_served_until_the_bound_and_closed_then() {
    let mut fleet = Fleet::new(2_210, 2, 1);
    fleet.world.drain(fleet.exits[0], Duration::from_secs(5));
    fleet.flow(4_500);
    assert_eq!((fleet.serving(), fleet.waiting(0, "waiting")), (Some(0), 1));
    fleet.world.run(Duration::from_millis(200));
    fleet.take();
    assert_eq!(fleet.got, fleet.given, "it works to the end");
    fleet.world.run(Duration::from_secs(1));
    assert_eq!((fleet.waiting(0, "waiting"), fleet.waiting(0, "closed")), (0, 1));
    assert!(!fleet.world.peer(fleet.entry).connected());
}

#[test]
fn a_drained_exit_draws_no_byte_from_who_dials_it() {
    let mut fleet = Fleet::new(2_220, 1, 1);
    fleet.world.drain(fleet.exits[0], Duration::from_secs(1));
    fleet.world.run(Duration::from_secs(2));
    fleet.world.tapped();
    fleet.world.run(Duration::from_secs(20));
    let tapped = fleet.world.tapped();
    assert!(tapped.iter().any(|sent| sent.from.ip() == ENTRY), "it is dialled");
    assert!(tapped.iter().all(|sent| sent.from.ip() != EXIT), "{:?}", tapped.len());
}

#[test]
fn a_peer_that_does_not_know_how_to_leave_is_closed_at_the_bound_and_finds_the_other_exit() {
    let mut fleet = Fleet::new(2_230, 1, 2);
    let key = Identity::from_pem(fleet.keys[0].to_pem().as_bytes()).unwrap();
    let toml = fleet.entry_toml.clone();
    fleet.world.restart(fleet.entry, &toml, &key, &[ENTRY], 9);
    for worker in &mut fleet.world.agent(fleet.entry).workers {
        worker.withhold(Features::LEAVE);
    }
    fleet.wait_for_lanes(1);
    let first = fleet.serving().unwrap();
    fleet.world.drain(fleet.exits[first], Duration::from_secs(3));
    fleet.world.run(Duration::from_millis(2_500));
    assert_eq!(fleet.serving(), Some(first), "it was not asked");
    fleet.world.run(Duration::from_secs(4));
    assert_eq!(fleet.serving(), Some(1 - first));
    assert_eq!(fleet.waiting(first, "closed"), 1);
    assert_eq!(fleet.world.metric(fleet.entry, SUSPECTED), 0);
}
