//! The peers, and the ways to them (pure).

use std::net::IpAddr;

use config::Config;
use dataplane::relay::DropReason;
use engine::{status::meanings, tunnel::LEAST_MTU};
use ops::control_socket::status::{PeerState, PeerStatus};
use wire::context::INNER_OVERHEAD;

use super::{
    Check, Finding, Severity,
    facts::{Address, Answer, Endpoint, Facts, Limits, Lookup, Peer},
};

/// The UDP payload that every path of QUIC carries (RFC 9000 §14).
const LEAST_QUIC: u32 = 1_200;

/// The length of a UDP header in bytes.
const UDP_HEADER: u32 = 8;

pub(super) fn checks(facts: &Facts, config: &Config) -> Vec<Finding> {
    let tunnel = config.tun.is_some();
    let mut findings = Vec::new();
    for peer in &facts.peers {
        let addresses: Vec<&Address> = peer.endpoints.iter().flat_map(Endpoint::addresses).collect();
        let statuses = facts.daemon.status().into_iter().flat_map(|status| &status.peers);
        let status = statuses.into_iter().find(|listed| *listed.name == *peer.name);
        findings.extend(peer.endpoints.iter().map(|endpoint| name(peer, endpoint)));
        let any_way = addresses.iter().any(|address| address.way.is_ok());
        let connected = status.is_some_and(|status| status.state == PeerState::Connected);
        findings.extend(addresses.iter().map(|address| {
            let looped = !connected && is_swallowed(facts, config, address);
            route(peer, address, any_way, looped)
        }));
        let udp = peer.endpoints.iter().filter(|endpoint| !endpoint.is_over_tcp());
        let udp: Vec<&Address> = udp.flat_map(Endpoint::addresses).collect();
        findings.extend(udp.iter().filter_map(|address| path_mtu(peer, address, tunnel)));
        match status {
            Some(status) => {
                findings.push(by_daemon(status));
                findings.push(contested(status));
                findings.extend(drops(status));
            }
            None => findings.extend(by_dialling(peer, &udp)),
        }
        let measured = addresses.iter().find_map(|address| match &address.answer {
            Some(Answer::Connected { inner_mtu, .. }) => *inner_mtu,
            Some(Answer::Failed { .. }) | None => None,
        });
        let measured = status.and_then(|status| status.inner_mtu).or(measured);
        findings.extend(measured.map(|mtu| inner_mtu(peer, mtu, tunnel)));
    }
    findings
}

fn name(peer: &Peer, endpoint: &Endpoint) -> Finding {
    let any = peer.endpoints.iter().any(|endpoint| !endpoint.addresses().is_empty());
    let severity = if any { Severity::Warning } else { Severity::Error };
    let at =
        |value: &str| Finding::ok(Check::EndpointName, format!("{}: {}", peer.name, endpoint.text), value);
    let text = endpoint.text.trim_start_matches("https://").trim_end_matches('/');
    let host = text.rsplit_once(':').map_or(text, |(host, _)| host);
    match &endpoint.lookup {
        Lookup::Found(addresses) if addresses.is_empty() => at("no address").but(
            severity,
            "the name has no address",
            format!("getent ahosts {host}; the peer's endpoints"),
        ),
        Lookup::Found(addresses) => {
            let shown = addresses.iter().map(|address| address.remote.ip().to_string());
            at(&shown.collect::<Vec<_>>().join(", "))
        }
        Lookup::Unasked => {
            at("not looked up").note("--offline: nobody is asked", "culvert doctor without --offline")
        }
        Lookup::Failed(error) => at("not found").but(
            severity,
            format!("its address is not known: {error}"),
            format!("getent ahosts {host}; /etc/resolv.conf; or an address instead of the name"),
        ),
    }
}

/// Whether packets to an endpoint go into the tunnel: they leave from an inner address of ours.
fn is_swallowed(facts: &Facts, config: &Config, address: &Address) -> bool {
    // Without the capability the way was that of packets without a mark.
    let asked = config.transport.mark == 0 || facts.limits.has(Limits::NET_ADMIN);
    let is_inner = |source: IpAddr| {
        config.tun.iter().any(|tun| tun.addresses.iter().any(|inner| inner.addr() == source))
    };
    asked && !address.is_own() && address.way.as_ref().is_ok_and(|way| is_inner(way.source))
}

fn route(peer: &Peer, address: &Address, any_way: bool, looped: bool) -> Finding {
    let Address { remote, way, .. } = address;
    let at = |value: String| Finding::ok(Check::EndpointRoute, format!("{}: {remote}", peer.name), value);
    let remedy = format!("ip route get {}", remote.ip());
    match way {
        Ok(_) if address.is_own() => at("this host".to_owned()).note(
            "the peer's address is our own",
            "another address in its endpoints, unless it runs on this host",
        ),
        Ok(way) => at(format!("from {}", way.source)).error_if(
            looped,
            "the kernel routes the tunnel's own packets to the peer into the tunnel",
            format!(
                "ip route get {}; transport.mark, a table of their own for learned routes, and rules that keep marked packets out \
                 of it: docs/operations.md, \"Routing daemons\"",
                remote.ip()
            ),
        ),
        Err(error) => at(error.clone())
            .note_if(any_way, "attempts over it fail; others of its addresses are tried", remedy.clone())
            .error_if(!any_way, "no address of the peer can be reached", remedy),
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
    let (subject, value) =
        (format!("{}: {remote}", peer.name), format!("{mtu} bytes, as far as the kernel knows"));
    let remedy = format!("ip route get {}; the MTU of that interface, or of that route", remote.ip());
    let found = Finding::ok(Check::PathMtu, subject, value)
        .error_if(mtu < least, format!("QUIC needs {least}: no connection is made"), remedy.clone())
        .warning_if(
            tunnel && mtu < for_tunnel,
            format!("IPv6 inside needs {for_tunnel}: only IPv4 is carried to this peer"),
            remedy,
        );
    Some(found)
}

/// What the daemon that runs knows.
fn by_daemon(peer: &PeerStatus) -> Finding {
    let address = peer.address.map_or_else(|| "no address yet".to_owned(), |address| address.to_string());
    let at = |value: String| Finding::ok(Check::Reachability, format!("{}: {address}", peer.name), value);
    match peer.state {
        PeerState::Connected => {
            let refused = peer.send_error.as_ref().filter(|error| error.age_seconds < SEND_ERROR_LASTS);
            let (reason, remedy) =
                refused.map(|error| (error.reason.clone(), error.remedy.to_string())).unwrap_or_default();
            at(format!("connected{}", after_comma(peer.rtt_seconds))).warning_if(
                refused.is_some(),
                reason,
                remedy,
            )
        }
        PeerState::Dialling => {
            let failure = peer.last_error.as_ref().map(|error| &error.failure);
            let reason = failure.map_or("no answer yet", |failure| &failure.reason);
            let causes = failure.map(|failure| listed(&failure.causes)).filter(|causes| !causes.is_empty());
            let remedy = causes.unwrap_or_else(|| "culvert status, in some seconds".to_owned());
            at("not connected".to_owned()).error(reason, remedy)
        }
        PeerState::Waiting => at("not connected".to_owned())
            .note("it has no endpoints here: only the peer can make a connection", "culvert doctor there"),
    }
}

/// What the kernel has refused so long ago is not worth a warning any more.
const SEND_ERROR_LASTS: f64 = 60.0;

/// Likely causes, each on a line of its own if there are several.
pub(super) fn listed<T: AsRef<str>>(causes: &[T]) -> String {
    match causes {
        [] => String::new(),
        [only] => only.as_ref().to_owned(),
        several => {
            let lines = several.iter().map(|cause| format!("\n    - {}", cause.as_ref()));
            format!("the likely causes, in their order:{}", lines.collect::<String>())
        }
    }
}

/// Two agents with the key of one peer.
fn contested(peer: &PeerStatus) -> Finding {
    let finding = |value| Finding::ok(Check::OneKey, peer.name.to_string(), value);
    let Some(found) = &peer.contested else { return finding("used by one agent".to_owned()) };
    finding(found.addresses.join(" and ")).warning(
        "two agents use its key, and take each other's place",
        "a key of its own for each: remove identity.key_file on one of them, culvert init there, culvert peer add here",
    )
}

/// Reasons of drops that a configuration explains, and that go on until it is changed.
const MENDABLE: [DropReason; 7] = [
    DropReason::Spoofed,
    DropReason::UnknownService,
    DropReason::NotAllowed,
    DropReason::NoTun,
    DropReason::SocketOpen,
    DropReason::SendForbidden,
    DropReason::SendRefused,
];

/// The share of what came that must have been dropped for one reason to be worth a warning.
const MANY: f64 = 0.01;

fn drops(peer: &PeerStatus) -> Vec<Finding> {
    let mut findings = Vec::new();
    for (way, side) in [("uplink", &peer.uplink), ("downlink", &peer.downlink)] {
        let counts = peer.dropped.get(way).into_iter().flatten();
        for reason in MENDABLE {
            let count =
                counts.clone().find(|(label, _)| **label == reason.label()).map_or(0, |(_, count)| *count);
            if count == 0 {
                continue;
            }
            let meanings::Meaning { what, aside } = meanings::of_drop(reason);
            let subject = format!("{}: {way} {}", peer.name, reason.label());
            let found = Finding::ok(Check::Drops, subject, format!("{count} of {}", side.account.received));
            let is_much = count as f64 >= MANY * side.account.received as f64;
            let problem = format!("each of them {}", what.replace('`', ""));
            let remedy = aside.replace('`', "");
            findings.push(
                found.warning_if(is_much, problem.clone(), remedy.clone()).note_if(true, problem, remedy),
            );
        }
    }
    if findings.is_empty() {
        findings.push(Finding::ok(Check::Drops, peer.name.to_string(), "none that a configuration explains"));
    }
    findings
}

/// A round-trip time as the end of a value, if it is known.
pub(super) fn after_comma(rtt_seconds: Option<f64>) -> String {
    rtt_seconds.map_or_else(String::new, |rtt| format!(", {:.1} ms", rtt * 1_000.0))
}

/// What came of dialling, if that was tried.
fn by_dialling(peer: &Peer, addresses: &[&Address]) -> Vec<Finding> {
    let at = |subject: String, value: String| Finding::ok(Check::Reachability, subject, value);
    if peer.endpoints.is_empty() {
        return vec![at(peer.name.clone(), "not dialled: it dials us".to_owned())];
    }
    if let Some(why) = peer.not_dialled {
        let found = at(peer.name.clone(), "not dialled".to_owned());
        return vec![found.note(why, "culvert status, while the daemon runs")];
    }
    if peer.endpoints.iter().all(Endpoint::is_over_tcp) {
        let found = at(peer.name.clone(), "not dialled".to_owned());
        return vec![
            found.note("all of its endpoints are over TCP", "culvert status, while the daemon runs"),
        ];
    }
    let connected = |address: &&Address| matches!(address.answer, Some(Answer::Connected { .. }));
    let severity = if addresses.iter().any(connected) { Severity::Warning } else { Severity::Error };
    let finding = |address: &&Address| {
        let subject = format!("{}: {}", peer.name, address.remote);
        Some(match address.answer.as_ref()? {
            Answer::Connected { rtt, .. } => {
                at(subject, format!("answers{}", after_comma(rtt.map(|rtt| rtt.as_secs_f64()))))
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
    let least = usize::from(LEAST_MTU) + INNER_OVERHEAD;
    let value = format!("{mtu} bytes fit into one packet, measured");
    Finding::ok(Check::InnerMtu, peer.name.clone(), value).warning_if(
        tunnel && mtu < LEAST_MTU,
        format!("the path is too narrow for {LEAST_MTU} inside: IPv6 is not carried to this peer"),
        format!(
            "tracepath to its address finds the narrow link, which must carry {} bytes over IPv4, {} over IPv6",
            least + 28,
            least + 48
        ),
    )
}
