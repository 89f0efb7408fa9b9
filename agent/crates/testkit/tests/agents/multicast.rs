//! Link-local multicast of a host, copied to its peers (`tun.multicast`).

use std::{
    collections::{BTreeMap, BTreeSet},
    net::{IpAddr, Ipv4Addr},
    time::Duration,
};

use base::ids::PeerId;
use dataplane::forward::{learned::LearnedRoutes, peer_routes::Holder};
use engine::worker::Worker;
use gate::identity::Identity;
use ip::{model::Recipe, vnet::Gso};
use ipnet::IpNet;

use crate::{
    World,
    tunnel::{Given, How, altered, assert_books, cut},
};

/// Sites that are all connected with each other; the last one does not want multicast.
struct Sites {
    world: World,
    keys: Vec<Identity>,
    /// Packets that each site's kernel has given, copies counted.
    read: Vec<u64>,
}

const COUNT: usize = 4;

fn underlay(site: usize) -> IpAddr {
    Ipv4Addr::new(192, 0, 2, site as u8 + 1).into()
}

/// The address of a site in the tunnel.
fn inner(site: usize) -> [u8; 4] {
    [10, 9, 0, site as u8 + 1]
}

fn inner_v6(site: usize) -> [u8; 16] {
    let [a, b, .., host] = inner(site);
    [0xfd, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, a, b, host]
}

impl Sites {
    fn new(seed: u64, workers: u8) -> Self {
        println!("seed {seed}, {workers} workers");
        let mut world = World::new(seed);
        world.workers = workers;
        let keys: Vec<Identity> = (0..COUNT).map(|_| Identity::generate().unwrap()).collect();
        Self { world, keys, read: vec![0; COUNT] }
    }

    fn start(&mut self, site: usize) {
        let mut toml = format!(
            "identity = {{ key_file = \"none\" }}\ntransport = {{ listen = [\"{}:4433\"] }}\n",
            underlay(site)
        );
        for other in (0..COUNT).filter(|other| *other != site) {
            let endpoints = if other < site {
                format!("endpoints = [\"{}:4433\"]\n", underlay(other))
            } else {
                String::new()
            };
            toml += &format!(
                "[[peer]]\nname = \"site-{other}\"\npublic_key = \"{}\"\naddress = [\"{}\", \"{}\"]\n\
                 allowed_ips = [\"0.0.0.0/0\"]\n{endpoints}",
                self.keys[other].public_key(),
                IpAddr::from(inner(other)),
                IpAddr::from(inner_v6(other)),
            );
        }
        // The third one has an address of which the first does not know.
        let more = if site == 2 { ", \"10.9.7.3/24\"" } else { "" };
        toml += &format!(
            "[tun]\naddress = [\"{}/24\", \"{}/96\"{more}]\nrouting = \"kernel\"\nmulticast = {}\n",
            IpAddr::from(inner(site)),
            IpAddr::from(inner_v6(site)),
            site != COUNT - 1
        );
        let place = self.world.start(&toml, &self.keys[site], &[underlay(site)], site as u8 + 1);
        assert_eq!(place, site);
        let learned = self.table(site);
        self.world.agent(site).learn_routes(learned);
    }

    /// The table of a site whose kernel has a default route by its first peer.
    fn table(&self, site: usize) -> LearnedRoutes {
        let (mut hosts, mut ways, mut senders) =
            (BTreeMap::new(), Vec::new(), BTreeMap::<IpNet, BTreeSet<PeerId>>::new());
        let default: IpNet = "0.0.0.0/0".parse().unwrap();
        for (id, other) in (0..).map(PeerId).zip((0..COUNT).filter(|other| *other != site)) {
            let own = self.keys[other].public_key().link_local();
            for address in [inner(other).into(), inner_v6(other).into(), IpAddr::V6(own)] {
                hosts.insert(address, id);
                ways.push((address.into(), vec![Holder { priority: 0, peer: id, weight: 1 }]));
                senders.entry(address.into()).or_default().insert(id);
            }
            senders.entry(default).or_default().insert(id);
        }
        ways.push((default, vec![Holder { priority: 0, peer: PeerId(0), weight: 1 }]));
        LearnedRoutes::new(ways, &senders, (site != COUNT - 1).then_some(hosts))
    }

    /// Sites whose sessions have no lanes.
    fn without_lanes(seed: u64) -> Self {
        let mut sites = Self::new(seed, 1);
        for site in 0..COUNT {
            sites.start(site);
            sites.world.agent(site).workers.iter_mut().for_each(Worker::withhold_lanes);
        }
        sites.world.run(Duration::from_secs(5));
        sites
    }

    fn connected(seed: u64, workers: u8) -> Self {
        let mut sites = Self::new(seed, workers);
        (0..COUNT).for_each(|site| sites.start(site));
        sites.world.run_till(Duration::from_secs(10), |world| {
            (0..COUNT).all(|site| world.peers(site).iter().all(|peer| peer.lanes_up >= usize::from(workers)))
        });
        sites
    }

    /// The kernel of a site gives a packet, which makes this many.
    fn push(&mut self, site: usize, queue: u8, given: &Given, makes: u64) {
        assert!(self.world.agent(site).tun().push(queue, given.vnet, &given.bytes));
        self.read[site] += makes;
    }

    /// The packets that each site's kernel has got since the last call.
    fn written(&mut self) -> Vec<Vec<Vec<u8>>> {
        self.world.run(Duration::from_millis(100));
        let written = (0..COUNT).map(|site| {
            let written = self.world.agent(site).tun().take_written();
            written.iter().flat_map(|one| cut(&one.vnet, &one.packet)).collect()
        });
        written.collect()
    }

    fn dropped(&mut self, site: usize, reason: &str) -> u64 {
        self.world.metric(site, &format!("culvert_tun_dropped_packets_total{{reason=\"{reason}\"}}"))
    }

    fn spoofed(&mut self, site: usize) -> u64 {
        let series = "culvert_datagrams_dropped_total{direction=\"downlink\",reason=\"spoofed\"}";
        self.world.metric(site, series)
    }

    fn assert_balanced(&mut self) {
        for (site, read) in self.read.clone().into_iter().enumerate() {
            assert_books(&mut self.world, site, read);
        }
    }
}

/// A UDP packet with these addresses, as a kernel gives it that leaves checksums to us.
fn udp(source: &[u8], destination: &[u8], fill: u8) -> Given {
    let ipv6 = source.len() == 16;
    let Given { vnet, bytes } = Given::new(&Recipe { ipv6, fill, ..Recipe::UDP }, How::Partial);
    let given = altered(bytes, if ipv6 { 8 } else { 12 }, &[source, destination].concat());
    Given { vnet, ..given }
}

/// `ff02::5`, and `224.0.0.5`.
const GROUP_V6: [u8; 16] = [0xff, 2, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 5];
const GROUP: [u8; 4] = [224, 0, 0, 5];

#[test]
fn peers_in_standard_mode_get_multicast() {
    let mut sites = Sites::without_lanes(2110);
    let given = udp(&inner(0), &GROUP, 1);
    sites.push(0, 0, &given, 2);
    assert_eq!(sites.written(), [vec![], given.packets(), given.packets(), vec![]]);
    assert_eq!(sites.world.peers(1)[0].lanes_up, 0);
    sites.assert_balanced();
}

#[test]
fn multicast_of_the_host_reaches_each_peer_that_wants_it_once_and_unchanged() {
    for (seed, workers) in [(2100, 1), (2101, 2), (2102, 3)] {
        let mut sites = Sites::connected(seed, workers);
        let link_local = sites.keys[0].public_key().link_local().octets();
        for queue in 0..workers {
            for given in [udp(&inner(0), &GROUP, queue), udp(&link_local, &GROUP_V6, queue)] {
                sites.push(0, queue, &given, 2);
                assert_eq!(sites.written(), [vec![], given.packets(), given.packets(), vec![]], "{queue}");
            }
        }
        assert_eq!(sites.world.metric(0, "culvert_tun_multicast_copies_total"), u64::from(workers) * 4);

        // Nobody copies what came from a peer, and a wider group goes where its route leads.
        assert_eq!(sites.world.metric(1, "culvert_tun_multicast_copies_total"), 0);
        let given = udp(&inner(1), &[224, 0, 1, 5], 1);
        sites.push(1, 0, &given, 1);
        assert_eq!(sites.written(), [given.packets(), vec![], vec![], vec![]]);
        // Even if the kernel gave it back.
        for given in [udp(&inner(0), &GROUP, 1), udp(&[0; 16], &GROUP_V6, 1)] {
            sites.push(1, 0, &given, 1);
        }
        assert_eq!(sites.written().concat(), Vec::<Vec<u8>>::new());
        assert_eq!(sites.dropped(1, "multicast_source"), 2);

        // Without the key it goes where other packets do, as a wider group does.
        let given = udp(&inner(3), &GROUP, 1);
        sites.push(3, 0, &given, 1);
        assert_eq!(sites.written(), [given.packets(), vec![], vec![], vec![]]);
        assert_eq!(sites.world.metric(3, "culvert_tun_multicast_copies_total"), 0);
        assert_eq!((0..COUNT).map(|site| sites.spoofed(site)).sum::<u64>(), 0);
        sites.assert_balanced();
    }
}

#[test]
fn multicast_from_another_address_than_the_peers_own_is_dropped_where_it_arrives() {
    let mut sites = Sites::connected(2110, 2);
    // The source is the sender's, and within its `allowed_ips` everywhere.
    let given = udp(&[10, 9, 7, 3], &GROUP, 1);
    sites.push(2, 0, &given, 2);
    assert_eq!(sites.written().concat(), Vec::<Vec<u8>>::new());
    assert_eq!([0, 1, 3].map(|site| sites.spoofed(site)), [1, 1, 0]);
    // To an address it passes.
    let given = udp(&[10, 9, 7, 3], &inner(0), 1);
    sites.push(2, 0, &given, 1);
    assert_eq!(sites.written()[0], given.packets());
    sites.assert_balanced();
}

#[test]
fn copies_stop_with_the_peer_and_at_the_rate() {
    let mut sites = Sites::new(2120, 2);
    sites.start(0);
    let given = udp(&inner(0), &GROUP, 1);
    sites.push(0, 0, &given, 1);
    sites.world.run(Duration::from_millis(100));
    assert_eq!(sites.dropped(0, "no_receiver"), 1);
    (1..COUNT).for_each(|site| sites.start(site));
    sites.world.run(Duration::from_secs(5));
    sites.push(0, 1, &given, 2);
    assert_eq!(sites.written(), [vec![], given.packets(), given.packets(), vec![]]);

    // A burst is 5,000 copies, and a super-packet counts as what it is cut into.
    let (mut vnet, bytes) = Recipe { payload: 2_500, ..Recipe::UDP }.super_packet(1);
    vnet.gso = Gso::Udp;
    let many = Given { vnet, ..altered(bytes, 12, &[inner(0), GROUP].concat()) };
    for _ in 0..3 {
        sites.push(0, 0, &many, 5_000);
    }
    let written: Vec<usize> = sites.written().iter().map(Vec::len).collect();
    assert_eq!(written, [0, 2_500, 2_500, 0]);
    assert_eq!(sites.dropped(0, "multicast_rate"), 10_000);

    sites.world.kill(1);
    sites.world.run(Duration::from_secs(60));
    sites.push(0, 0, &given, 1);
    sites.world.run(Duration::from_millis(100));
    let written = sites.world.agent(2).tun().take_written();
    assert_eq!(written.len(), 1, "a peer that is gone gets none");
    assert_eq!(sites.world.metric(0, "culvert_tun_multicast_copies_total"), 2 + 5_000 + 1);
    assert_books(&mut sites.world, 0, sites.read[0]);
}
