//! What is warned of because packets that carry the tunnel, or lookups that it waits for, may go into the tunnel.

use std::{
    net::{IpAddr, Ipv4Addr, SocketAddr},
    time::Duration,
};

use base::{clock::Clock, ids::PeerId};
use dataplane::forward::tun::TunSide;
use gate::identity::Identity;
use ip::packets::TunOffload;
use net::{
    Net, Ready, Token,
    memory::{MemoryFabric, MemoryTun},
};

use crate::{ENTRY, flood::Log, harness::World};

/// Where nobody answers.
const NOBODY: IpAddr = IpAddr::V4(Ipv4Addr::new(198, 51, 100, 77));

/// An agent with a tunnel that dials one peer at this endpoint.
fn entry(endpoint: &str, transport: &str, allowed: &str) -> String {
    let key = Identity::generate().unwrap().public_key();
    format!(
        "identity = {{ key_file = \"none\" }}\n{transport}\n[tun]\naddress = [\"10.9.0.1/24\"]\n\
         [[peer]]\nname = \"exit\"\npublic_key = \"{key}\"\nendpoints = [\"{endpoint}\"]\nallowed_ips = [\"{allowed}\"]\n"
    )
}

#[test]
fn an_attempt_that_may_go_into_the_tunnel_is_said_once_in_a_while() {
    // As after the lookup of a name: the configuration knows no address.
    for (transport, held) in
        [("", "198.51.100.0/24"), ("", "203.0.113.0/24"), ("transport.mark = 1", "198.51.100.0/24")]
    {
        let mut world = World::new(1);
        let toml = entry(&format!("{NOBODY}:4433"), transport, "203.0.113.0/25");
        let mut silent = world.host(&[NOBODY]);
        let _port = silent.udp(SocketAddr::new(NOBODY, 4433), None);
        let place = world.start(&toml, &Identity::generate().unwrap(), &[ENTRY], 1);
        let mut host = MemoryFabric::default().host(&[], Ready::default());
        host.set_tun(&MemoryTun::new(1, TunOffload::default()));
        let queue = host.tun(Token(0)).unwrap().unwrap();
        let mut tun = TunSide::new(queue, Token(0), 1421, world.clock.now());
        tun.routes.set_peer(PeerId(0), &[held.parse().unwrap()], 0, 1);
        world.agent(place).workers[0].set_tun(tun);
        let log = Log::default();
        log.record(|| world.run(Duration::from_secs(9)));
        let words = "the tunnel's own packets go into the tunnel (remedy: set transport.mark";
        let expected = usize::from(transport.is_empty() && held == "198.51.100.0/24");
        assert_eq!(log.text().matches(words).count(), expected, "{}", log.text());
    }
}

#[test]
fn a_lookup_that_fails_names_the_tunnel_where_it_may_be_the_cause() {
    for (allowed, words) in [
        (
            "0.0.0.0/0",
            "(remedy: write an address, or use a resolver to which this host has a route of its own",
        ),
        ("10.20.0.0/16", "(remedy: is the name right, does this host's resolver answer?)"),
    ] {
        let mut world = World::new(1);
        let toml = entry("nobody.example:4433", "transport.mark = 1", allowed);
        let log = Log::default();
        log.record(|| {
            world.start(&toml, &Identity::generate().unwrap(), &[ENTRY], 1);
            world.run(Duration::from_secs(3));
        });
        assert_eq!(log.text().matches(words).count(), 1, "{}", log.text());
    }
}
