//! Packets whose route of the kernel leads to a next hop that is no peer's (`tun.routing = "kernel"`): counted, and told now and then.

use std::{collections::BTreeMap, time::Duration};

use base::ids::PeerId;
use dataplane::forward::{learned::LearnedRoutes, peer_routes::Holder};
use gate::identity::Identity;
use ip::model::Recipe;
use ipnet::IpNet;

use crate::{
    ENTRY, World,
    flood::Log,
    tunnel::{Given, How, altered},
};

/// A packet of the host to an address.
fn to(destination: [u8; 4]) -> Given {
    let Given { vnet, bytes } = Given::new(&Recipe::UDP, How::Partial);
    Given { vnet, ..altered(bytes, 16, &destination) }
}

#[test]
fn a_route_to_nobody_is_told_with_destination_and_next_hop_and_not_for_each_packet() {
    let mut world = World::new(2210);
    let [own, site] = [0; 2].map(|_| Identity::generate().unwrap());
    let toml = format!(
        "identity = {{ key_file = \"none\" }}\ntransport = {{ listen = [\"{ENTRY}:4433\"] }}\n\
         [[peer]]\nname = \"site\"\npublic_key = \"{}\"\naddress = [\"10.9.0.2\"]\nallowed_ips = [\"10.0.0.0/8\"]\n\
         [tun]\naddress = [\"10.9.0.1/24\"]\nrouting = \"kernel\"\n",
        site.public_key()
    );
    let agent = world.start(&toml, &own, &[ENTRY], 1);
    let [link, stray]: [IpNet; 2] = ["10.9.0.0/24", "10.1.0.0/16"].map(|net| net.parse().unwrap());
    let site = vec![Holder { priority: 0, peer: PeerId(0), weight: 1 }];
    let ways = [("10.9.0.2/32".parse().unwrap(), site), (link, Vec::new()), (stray, Vec::new())];
    let learned = LearnedRoutes::new(ways, &BTreeMap::new(), None);
    let learned = learned.with_unknown([(stray, "10.9.0.9".parse().unwrap())].into());
    world.agent(agent).learn_routes(learned);
    world.run(Duration::from_millis(100));

    let mut told = |destinations: &[[u8; 4]]| {
        let log = Log::default();
        log.record(|| {
            for destination in destinations {
                let given = to(*destination);
                assert!(world.agent(agent).tun().push(0, given.vnet, &given.bytes));
                world.run(Duration::from_millis(100));
            }
        });
        let lines = log.text();
        // The interval between two lines of a kind.
        world.run(Duration::from_secs(10));
        lines
            .lines()
            .filter(|line| line.contains("next hop of its route"))
            .map(str::to_owned)
            .collect::<Vec<_>>()
    };
    let lines = told(&[[10, 1, 2, 3], [10, 1, 2, 4], [10, 1, 2, 5]]);
    let [line] = &lines[..] else { panic!("{lines:#?}") };
    assert!(line.contains("WARN") && line.ends_with("destination=10.1.2.3 next_hop=10.9.0.9"), "{line}");
    let lines = told(&[[10, 9, 0, 77]]);
    let [line] = &lines[..] else { panic!("{lines:#?}") };
    assert!(line.contains("destination=10.9.0.77 next_hop=10.9.0.77 suppressed=2"), "{line}");
    // No route at all is another matter.
    assert_eq!(told(&[[192, 0, 2, 7]]), [""; 0]);
    let dropped = |reason: &str| format!("culvert_tun_dropped_packets_total{{reason=\"{reason}\"}}");
    assert_eq!(world.metric(agent, &dropped("no_next_hop")), 4);
    assert_eq!(world.metric(agent, &dropped("no_route")), 1);
}
