//! The agents of a schedule: addresses, keys, configurations.

use std::{
    fmt::Write as _,
    net::{IpAddr, Ipv4Addr, SocketAddr},
};

use gate::identity::{Identity, PublicKey};
use zeroize::Zeroizing;

use super::schedule::{EXIT, Service, Setup};

pub(crate) const CLIENTS: IpAddr = IpAddr::V4(Ipv4Addr::new(192, 0, 2, 9));
pub(crate) const SERVICES: IpAddr = IpAddr::V4(Ipv4Addr::new(198, 51, 100, 9));

/// How long a flow may be silent.
pub(crate) const IDLE_MS: u64 = 3_000;

/// The address of an agent.
pub(crate) fn address(agent: u8) -> IpAddr {
    if agent == EXIT {
        Ipv4Addr::new(198, 51, 100, 1).into()
    } else {
        Ipv4Addr::new(192, 0, 2, 1 + agent).into()
    }
}

/// Where a NAT lets an agent appear.
pub(crate) fn outside(agent: u8, host: u8) -> IpAddr {
    Ipv4Addr::new(203, 0, 113, 10 * agent + host).into()
}

/// Where an entry takes a service's datagrams and connections.
pub(crate) fn ingress(entry: u8, service: Service) -> SocketAddr {
    let port = match service {
        Service::Echo => 5300,
        Service::Sink => 5301,
    };
    SocketAddr::new(address(entry), port)
}

/// Where the services are.
pub(crate) fn upstream(service: Service) -> SocketAddr {
    match service {
        Service::Echo => SocketAddr::new(SERVICES, 7),
        Service::Sink => SocketAddr::new(SERVICES, 9),
    }
}

/// The inner address of a host behind an agent's device.
pub(crate) fn inner(agent: u8, flow: u8) -> Ipv4Addr {
    Ipv4Addr::new(10, 9, agent, flow)
}

/// The agent and the flow of an inner address.
pub(crate) fn of_inner(octets: [u8; 4]) -> (u8, u8) {
    (octets[2], octets[3])
}

/// The key of an agent.
pub(crate) fn identity(setup: &Setup, agent: u8) -> Identity {
    let mut seed = [agent + 1; 32];
    seed[..8].copy_from_slice(&setup.seed.to_be_bytes());
    Identity::from_seed(Zeroizing::new(seed)).expect("any seed is a key")
}

/// The configuration of an agent.
pub(crate) fn configuration(setup: &Setup, agent: u8, variant: u8) -> String {
    let keys = [0, 1, EXIT].map(|agent| identity(setup, agent).public_key());
    let mut text = String::from("identity = { key_file = \"none\" }\n");
    if agent == EXIT || setup.is_mutual {
        _ = writeln!(text, "transport = {{ listen = [\"{}:4433\"] }}", address(agent));
    }
    let mut peers = String::new();
    if agent == EXIT {
        for (name, service) in [("echo", Service::Echo), ("sink", Service::Sink)] {
            let idle = format!("idle = \"{IDLE_MS}ms\"\nrepair = {}", repair(setup));
            _ = writeln!(
                text,
                "[[service]]\nname = \"{name}\"\nupstream = \"{}\"\n{idle}",
                upstream(service)
            );
        }
        for entry in 0..setup.entries {
            peers += &peer(setup, entry, &keys[usize::from(entry)], setup.is_mutual, variant);
            peers += "services = [\"echo\", \"sink\"]\n";
        }
    } else {
        for (name, service) in [("echo", Service::Echo), ("sink", Service::Sink)] {
            // One of the variants lacks a port.
            if variant != 3 || service == Service::Echo {
                let listen = ingress(agent, service);
                _ = writeln!(text, "[[udp]]\nlisten = \"{listen}\"\npeer = \"agent2\"\nservice = \"{name}\"");
            }
        }
        let listen = ingress(agent, Service::Echo);
        _ = writeln!(text, "[[tcp]]\nlisten = \"{listen}\"\npeer = \"agent2\"\nservice = \"echo\"");
        peers += &peer(setup, EXIT, &keys[usize::from(EXIT)], true, variant);
    }
    let (flows, bytes) = (setup.flows_per_peer, setup.repair_bytes());
    _ = writeln!(text, "[limits]\nflows_per_peer = {flows}\nrepair_bytes = \"{}MiB\"", bytes >> 20);
    if setup.has_tun {
        _ = writeln!(text, "[tun]\naddress = [\"{}/24\"]", inner(agent, 254));
    }
    text + &peers
}

/// What an agent says of another. `variant` is what a reload changes.
fn peer(setup: &Setup, of: u8, key: &PublicKey, dials: bool, variant: u8) -> String {
    let Setup { lanes, keepalive_seconds, packets, kilobytes, queue_ms, quota, .. } = setup;
    let (keepalive, quota) = match variant {
        2 => (keepalive_seconds.div_ceil(2), 100),
        _ => (*keepalive_seconds, *quota),
    };
    let drops_newest = setup.drops_newest != (variant == 1);
    let packets = if variant == 1 { packets.div_ceil(2) } else { *packets };
    let drop = if drops_newest { "newest" } else { "oldest" };
    let mut text = format!(
        "[[peer]]\nname = \"agent{of}\"\npublic_key = \"{key}\"\nkeepalive = \"{keepalive}s\"\nlanes = {lanes}\n\
         drop = \"{drop}\"\nflow_quota = {}\n\
         queue = {{ packets = {packets}, bytes = \"{kilobytes}KiB\", time = \"{queue_ms}ms\" }}\n",
        f64::from(quota) / 100.0
    );
    if dials {
        _ = writeln!(text, "endpoints = [\"{}:4433\"]", address(of));
    }
    if setup.has_tun {
        _ = writeln!(text, "allowed_ips = [\"{}/24\"]\nrepair = {}", inner(of, 0), repair(setup));
    }
    if setup.rate > 0 {
        _ = writeln!(text, "rate = \"{}Mbit\"", setup.rate);
    }
    text
}

/// What repairs payloads.
fn repair(setup: &Setup) -> String {
    let Setup { repair, holds, deadline_ms, .. } = setup;
    let order = if *holds { "hold" } else { "asap" };
    format!("{{ mode = \"{}\", deadline = \"{deadline_ms}ms\", order = \"{order}\" }}", repair.label())
}
