//! The peers, and the ways to them (pure).

use config::Config;
use engine::tunnel::LEAST_MTU;
use ops::control_socket::status::{PeerState, PeerStatus};
use wire::context::INNER_OVERHEAD;

use super::{
    Check, Finding, Severity,
    facts::{Address, Answer, Facts, Lookup, Peer},
};

/// The UDP payload that every path of QUIC carries (RFC 9000 §14).
const LEAST_QUIC: u32 = 1_200;

/// The length of a UDP header in bytes.
const UDP_HEADER: u32 = 8;

pub(super) fn checks(facts: &Facts, config: &Config) -> Vec<Finding> {
    let tunnel = config.tun.is_some();
    let mut findings = Vec::new();
    for peer in &facts.peers {
        let addresses = || peer.endpoints.iter().flat_map(|endpoint| addresses(&endpoint.lookup));
        let status = facts
            .daemon
            .status()
            .and_then(|status| status.peers.iter().find(|listed| *listed.name == *peer.name));
        findings.extend(names(peer));
        let any_way = addresses().any(|address| address.way.is_ok());
        findings.extend(addresses().map(|address| route(peer, address, any_way)));
        findings.extend(addresses().filter_map(|address| path_mtu(peer, address, tunnel)));
        findings.extend(match status {
            Some(status) => vec![by_daemon(status)],
            None => by_dialling(peer, &addresses().collect::<Vec<_>>()),
        });
        let measured = addresses().find_map(|address| match &address.answer {
            Some(Answer::Connected { inner_mtu, .. }) => *inner_mtu,
            Some(Answer::Failed { .. }) | None => None,
        });
        let measured = status.and_then(|status| status.inner_mtu).or(measured);
        findings.extend(measured.map(|mtu| inner_mtu(peer, mtu, tunnel)));
    }
    findings
}

fn addresses(lookup: &Lookup) -> &[Address] {
    match lookup {
        Lookup::Found(addresses) => addresses,
        Lookup::Unasked | Lookup::Failed(_) => &[],
    }
}

fn names(peer: &Peer) -> Vec<Finding> {
    let any = peer.endpoints.iter().any(|endpoint| !addresses(&endpoint.lookup).is_empty());
    let severity = if any { Severity::Warning } else { Severity::Error };
    let finding = |endpoint: &super::facts::Endpoint| {
        let at = |value: &str| {
            Finding::ok(Check::EndpointName, format!("{}: {}", peer.name, endpoint.text), value)
        };
        match &endpoint.lookup {
            Lookup::Found(addresses) if addresses.is_empty() => at("no address").but(
                severity,
                "the name has no address",
                format!("getent ahosts {}; the peer's endpoints", host(&endpoint.text)),
            ),
            Lookup::Found(addresses) => {
                let shown: Vec<String> =
                    addresses.iter().map(|address| address.remote.ip().to_string()).collect();
                at(&shown.join(", "))
            }
            Lookup::Unasked => at("not looked up").but(
                Severity::Note,
                "--offline: nobody is asked",
                "culvert doctor without --offline",
            ),
            Lookup::Failed(error) => at("not found").but(
                severity,
                format!("its address is not known: {error}"),
                format!(
                    "getent ahosts {}; /etc/resolv.conf; or an address instead of the name",
                    host(&endpoint.text)
                ),
            ),
        }
    };
    peer.endpoints.iter().map(finding).collect()
}

fn host(endpoint: &str) -> &str {
    endpoint.rsplit_once(':').map_or(endpoint, |(host, _)| host)
}

fn route(peer: &Peer, address: &Address, any_way: bool) -> Finding {
    let Address { remote, way, .. } = address;
    let at = |value: String| Finding::ok(Check::EndpointRoute, format!("{}: {remote}", peer.name), value);
    match way {
        Ok(_) if address.is_own() => at("this host".to_owned()).but(
            Severity::Note,
            "the peer's address is our own",
            "another address in its endpoints, unless it runs on this host",
        ),
        Ok(way) => at(format!("from {}", way.source)),
        Err(error) => at(error.clone()).but(
            if any_way { Severity::Note } else { Severity::Error },
            if any_way {
                "attempts over it fail; others of its addresses are tried"
            } else {
                "no address of the peer can be reached"
            },
            format!("ip route get {}", remote.ip()),
        ),
    }
}

/// The bytes of the outer headers, IP and UDP.
fn headers(address: &Address) -> u32 {
    UDP_HEADER + if address.remote.is_ipv6() { 40 } else { 20 }
}

fn path_mtu(peer: &Peer, address: &Address, tunnel: bool) -> Option<Finding> {
    let mtu = address.way.as_ref().ok()?.mtu;
    let remote = address.remote;
    let least = LEAST_QUIC + headers(address);
    let for_tunnel = u32::from(LEAST_MTU) + INNER_OVERHEAD as u32 + headers(address);
    let found = Finding::ok(
        Check::PathMtu,
        format!("{}: {remote}", peer.name),
        format!("{mtu} bytes, as far as the kernel knows"),
    );
    let remedy = format!("ip route get {}; the MTU of that interface, or of that route", remote.ip());
    Some(if mtu < least {
        let problem = format!("QUIC needs {least}: no connection is made");
        found.but(Severity::Error, problem, remedy)
    } else if tunnel && mtu < for_tunnel {
        let problem = format!("IPv6 inside needs {for_tunnel}: only IPv4 is carried to this peer");
        found.but(Severity::Warning, problem, remedy)
    } else {
        found
    })
}

/// What the daemon that runs knows.
fn by_daemon(peer: &PeerStatus) -> Finding {
    let address = peer.address.map_or_else(|| "no address yet".to_owned(), |address| address.to_string());
    let at = |value: String| Finding::ok(Check::Reachability, format!("{}: {address}", peer.name), value);
    let error = peer.last_error.as_ref();
    match peer.state {
        PeerState::Connected => {
            let rtt = peer.rtt_seconds.map_or_else(String::new, |rtt| format!(", {:.1} ms", rtt * 1_000.0));
            at(format!("connected{rtt}"))
        }
        PeerState::Dialling => {
            let reason = error.map_or("no answer yet", |error| &error.failure.reason);
            let causes =
                error.map(|error| error.failure.causes.join("; ")).filter(|causes| !causes.is_empty());
            let remedy = causes.unwrap_or_else(|| "culvert status, in some seconds".to_owned());
            at("not connected".to_owned()).but(Severity::Error, reason, remedy)
        }
        PeerState::Waiting => at("not connected".to_owned()).but(
            Severity::Note,
            "it has no endpoints here: only the peer can make a connection",
            "culvert doctor there",
        ),
    }
}

/// What came of dialling, if that was tried.
fn by_dialling(peer: &Peer, addresses: &[&Address]) -> Vec<Finding> {
    let at = |subject: String, value: String| Finding::ok(Check::Reachability, subject, value);
    if peer.endpoints.is_empty() {
        return vec![at(peer.name.clone(), "not dialled: it dials us".to_owned())];
    }
    if let Some(why) = peer.not_dialled {
        let found = at(peer.name.clone(), "not dialled".to_owned());
        return vec![found.but(Severity::Note, why, "culvert status, while the daemon runs")];
    }
    let connected = |address: &&&Address| match address.answer {
        Some(Answer::Connected { .. }) => true,
        Some(Answer::Failed { .. }) | None => false,
    };
    let severity =
        if addresses.iter().any(|address| connected(&address)) { Severity::Warning } else { Severity::Error };
    let finding = |address: &&Address| {
        let subject = format!("{}: {}", peer.name, address.remote);
        Some(match address.answer.as_ref()? {
            Answer::Connected { rtt, .. } => {
                let rtt =
                    rtt.map_or_else(String::new, |rtt| format!(", {:.1} ms", rtt.as_secs_f64() * 1_000.0));
                at(subject, format!("answers{rtt}"))
            }
            Answer::Failed { reason, causes } => {
                let remedy = if causes.is_empty() { "culvert doctor there" } else { causes };
                at(subject, "no connection".to_owned()).but(severity, reason.clone(), remedy)
            }
        })
    };
    addresses.iter().filter_map(finding).collect()
}

fn inner_mtu(peer: &Peer, mtu: u16, tunnel: bool) -> Finding {
    let found =
        Finding::ok(Check::InnerMtu, peer.name.clone(), format!("{mtu} bytes fit into one packet, measured"));
    if !tunnel || mtu >= LEAST_MTU {
        return found;
    }
    found.but(
        Severity::Warning,
        format!("the path is too narrow for {LEAST_MTU} inside: IPv6 is not carried to this peer"),
        format!(
            "tracepath to its address finds the narrow link, which must carry {} bytes over IPv4, {} over IPv6",
            usize::from(LEAST_MTU) + INNER_OVERHEAD + 28,
            usize::from(LEAST_MTU) + INNER_OVERHEAD + 48
        ),
    )
}
