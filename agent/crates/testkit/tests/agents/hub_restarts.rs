//! A hub that restarts, and all of its peers behind one source prefix: a few hundred, and limits in proportion to those of a
//! thousand. The turns of a worker take no time here, so the path is long: a handshake keeps its place for three round trips.

use std::{
    net::{IpAddr, Ipv6Addr, SocketAddr},
    time::Duration,
};

use gate::identity::Identity;

use crate::harness::{Weather, World};

/// A third of a thousand, whose hub has a third of the default limit on handshakes.
const PEERS: usize = 333;
const HANDSHAKES: usize = 85;

/// The time between two looks.
const LOOK: Duration = Duration::from_millis(20);

struct Crowd {
    world: World,
    hub: usize,
    hub_toml: String,
    hub_key: Identity,
    address: IpAddr,
}

/// When half, 99 % and all of the peers were connected again, after the hub opened its port.
struct Returned {
    half: Duration,
    most: Duration,
    all: Duration,
}

impl Crowd {
    /// All are connected.
    fn new(seed: u64, one_way: Duration) -> Self {
        println!("seed {seed}");
        let mut world = World::new(seed);
        world.workers = 1;
        // All in one /56, which has one share of the gate's budget.
        let host = |last: u16| IpAddr::V6(Ipv6Addr::new(0x2001, 0xdb8, 0, 0, 0, 0, 0, last));
        let address = IpAddr::V6(Ipv6Addr::new(0x2001, 0xdb8, 1, 0, 0, 0, 0, 1));
        let listen = SocketAddr::new(address, 4433);
        let hub_key = Identity::generate().unwrap();
        let keys: Vec<Identity> = (0..PEERS).map(|_| Identity::generate().unwrap()).collect();
        let known = keys.iter().enumerate().map(|(number, key)| {
            format!("[[peer]]\nname = \"peer{number}\"\npublic_key = \"{}\"\n", key.public_key())
        });
        let hub_toml = format!(
            "identity.key_file = \"none\"\ntransport.listen = [\"{listen}\"]\nlimits.handshakes = {HANDSHAKES}\n{}",
            known.collect::<String>()
        );
        world.tapped();
        let hub = world.start(&hub_toml, &hub_key, &[address], 1);
        let entry = format!(
            "identity.key_file = \"none\"\n[[peer]]\nname = \"hub\"\npublic_key = \"{}\"\nlanes = 1\n\
             endpoints = [\"{listen}\"]\n",
            hub_key.public_key()
        );
        for (number, key) in (1..).zip(&keys) {
            world.run(Duration::from_millis(5));
            world.start(&entry, key, &[host(number)], number as u8);
        }
        *world.weather.borrow_mut() = Weather { delay: one_way, ..Weather::default() };
        let mut crowd = Self { world, hub, hub_toml, hub_key, address };
        crowd.wait_for(PEERS, Duration::from_secs(30));
        crowd
    }

    /// Waits until so many peers are connected to the hub; the time that took.
    fn wait_for(&mut self, peers: usize, limit: Duration) -> Duration {
        let begin = self.world.now();
        while self.world.peers(self.hub).iter().filter(|peer| peer.lanes_up > 0).count() < peers {
            assert!(self.world.now() < begin + limit, "{peers} peers: not within {limit:?}");
            self.world.run(LOOK);
            self.world.tapped();
        }
        self.world.now() - begin
    }

    /// Stops the hub for `away`, and has it back.
    fn restart(&mut self, away: Duration) -> Returned {
        let hub = self.hub;
        self.world.stop(hub);
        self.world.run_till(Duration::from_secs(5), |world| world.has_ended(hub));
        self.world.kill(hub);
        self.world.run(away);
        self.world.restart(hub, &self.hub_toml, &self.hub_key, &[self.address], 9);
        let limit = Duration::from_secs(30);
        let half = self.wait_for(PEERS / 2, limit);
        let most = half + self.wait_for(PEERS * 99 / 100, limit);
        let all = most + self.wait_for(PEERS, limit);
        Returned { half, most, all }
    }

    fn count(&mut self, series: &str) -> u64 {
        self.world.metric(self.hub, series)
    }
}

#[test]
fn peers_behind_one_prefix_are_back_within_three_seconds_of_their_hubs_return() {
    // A restart, an upgrade, a reboot; over a path as of one country, and over one around the world, where a handshake keeps its
    // place for long.
    for (seed, one_way, away) in [
        (900, 20, 100),
        (901, 20, 1_000),
        (902, 20, 3_000),
        (903, 100, 100),
        (904, 100, 1_000),
        (905, 100, 3_000),
    ] {
        let mut crowd = Crowd::new(seed, Duration::from_millis(one_way));
        let Returned { half, most, all } = crowd.restart(Duration::from_millis(away));
        println!(
            "seed {seed}, {one_way} ms one way, {away} ms away: half {half:?}, 99 % {most:?}, all {all:?}"
        );
        let [accepted, established] = ["accepted", "established"]
            .map(|outcome| crowd.count(&format!("culvert_handshakes_total{{outcome=\"{outcome}\"}}")));
        let [retry, budget, fallback, abandoned] = ["retry", "budget", "key_exchange", "abandoned"]
            .map(|step| crowd.count(&format!("culvert_gate_datagrams_total{{step=\"{step}\"}}")));
        println!(
            "  accepted {accepted}, established {established}; at the gate: retry {retry}, budget {budget}, key exchange {fallback}, \
             abandoned {abandoned}"
        );
        assert!(all <= Duration::from_secs(3), "seed {seed}");
        assert_eq!(budget, 0, "seed {seed}: no knock of a known peer is left without an answer");
        // Each attempt is asked once for its address. One that has been given up is not asked.
        assert!(retry <= 4 * PEERS as u64, "seed {seed}");
    }
}
