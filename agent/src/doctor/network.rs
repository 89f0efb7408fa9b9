//! Ports, forwarding, filters and the interfaces towards the peers (pure).

use config::Config;
use ipnet::IpNet;

use super::{
    Check, Finding, Severity,
    facts::{Conntrack, Daemon, Facts, Opened, Port},
    unit::NAME,
};

/// What does not need a configuration.
pub(super) fn host(facts: &Facts, config: Option<&Config>) -> Vec<Finding> {
    let mut findings: Vec<Finding> =
        facts.network.conntrack.iter().map(|table| conntrack(table, config)).collect();
    findings.extend(facts.network.interfaces.iter().map(|(name, joins)| {
        let found = |value: &str| Finding::ok(Check::InterfaceOffload, format!("GRO of {name}"), value);
        if *joins {
            return found("on");
        }
        let problem = "each packet crosses the kernel by itself, which costs several times the CPU";
        found("off").but(Severity::Warning, problem, format!("ethtool -K {name} gro on"))
    }));
    findings
}

/// Checks the network for what the configuration asks of it.
pub(super) fn checks(facts: &Facts, config: &Config) -> Vec<Finding> {
    let mut findings: Vec<Finding> = facts.network.ports.iter().map(|found| port(facts, found)).collect();
    findings.extend(forwarding(facts, config));
    findings.extend(rp_filter(facts, config));
    if let Some(table) = &facts.network.conntrack {
        findings.extend(conntrack_timeout(table, config));
    }
    findings
}

fn port(facts: &Facts, port: &Port) -> Finding {
    let Port { key, tcp, address, opened } = port;
    let (protocol, option) = if *tcp { ("TCP", "-ltnp") } else { ("UDP", "-lunp") };
    let number = address.port();
    let at = |value: &str| Finding::ok(Check::Ports, format!("{key} {address} {protocol}"), value);
    match (opened, &facts.daemon) {
        (Opened::Taken, Daemon::Running(_)) => at("open, of the running daemon"),
        (Opened::Taken, Daemon::Mute(_)) => at("taken").but(
            Severity::Note,
            "probably by the daemon that seems to run",
            format!("ss {option} 'sport = :{number}'"),
        ),
        (Opened::Taken, Daemon::Unasked | Daemon::Absent) => at("taken").but(
            Severity::Error,
            "another process listens there: the agent does not start",
            format!("stop it: ss {option} 'sport = :{number}' shows it; or another {key}"),
        ),
        (Opened::Free, Daemon::Running(_)) if number != 0 => at("free").but(
            Severity::Note,
            "the daemon that runs does not listen there: it has an older configuration",
            "culvert reload, or systemctl restart culvert where that says so",
        ),
        (Opened::Free, Daemon::Running(_) | Daemon::Mute(_) | Daemon::Unasked | Daemon::Absent) => at("free"),
        (Opened::Forbidden, Daemon::Running(_)) => at("of the running daemon, or not for this user"),
        (Opened::Forbidden, Daemon::Mute(_) | Daemon::Unasked | Daemon::Absent) => {
            let first = facts.network.unprivileged_ports.unwrap_or(1_024);
            if facts.service.unit.as_ref().is_some_and(|unit| unit.gives("CAP_NET_BIND_SERVICE")) {
                let problem = format!("ports below {first} need CAP_NET_BIND_SERVICE, which {NAME} gives");
                return at("not for this user").but(Severity::Note, problem, facts.service.look());
            }
            at("not for this user").but(
                Severity::Error,
                format!("ports below {first} need CAP_NET_BIND_SERVICE"),
                format!(
                    "AmbientCapabilities=CAP_NET_BIND_SERVICE in the unit, sysctl -w \
                     net.ipv4.ip_unprivileged_port_start={number}, or a port from {first} on"
                ),
            )
        }
        (Opened::NoAddress, _) => at("not an address of this host").but(
            Severity::Error,
            "the agent does not start",
            format!("an address that `ip address` shows, or 0.0.0.0 or [::] for all, in {key}"),
        ),
        (Opened::Failed(error), _) => at(error).but(
            Severity::Error,
            "the agent does not start",
            format!("another address or port in {key}; for IPv6, sysctl -w net.ipv6.conf.all.disable_ipv6=0"),
        ),
    }
}

fn forwarding(facts: &Facts, config: &Config) -> Vec<Finding> {
    const FAMILIES: [(&str, &str); 2] =
        [("net.ipv4.ip_forward", "IPv4"), ("net.ipv6.conf.all.forwarding", "IPv6")];
    if config.tun.is_none() {
        return Vec::new();
    }
    let mut findings = Vec::new();
    for ((parameter, family), on) in FAMILIES.into_iter().zip(facts.network.forwarding) {
        let is_of = |prefix: &IpNet| (family == "IPv6") == prefix.addr().is_ipv6();
        let with = config.peers.iter().filter(|peer| peer.allowed_ips.iter().any(is_of)).count();
        let (Some(on), true) = (on, with > 0) else { continue };
        let found = Finding::ok(Check::Forwarding, parameter, if on { "1" } else { "0" });
        let uplinks: &[String] = if family == "IPv6" { &facts.network.advertised } else { &[] };
        let remedy = forward(parameter, uplinks);
        findings.push(match (on, with) {
            (true, _) => found,
            (false, 1) => found.but(
                Severity::Note,
                format!("{family} ends at this host: networks behind it are not reached through the tunnel"),
                remedy,
            ),
            (false, _) => found.but(
                Severity::Warning,
                format!("{with} peers have {family} addresses, and cannot reach each other, nor networks behind this host"),
                remedy,
            ),
        });
    }
    findings
}

/// What turns forwarding on, for a host whose default route comes from the routers at `uplinks`: set in this order, it is
/// not lost.
fn forward(parameter: &str, uplinks: &[String]) -> String {
    let mut set: Vec<String> =
        uplinks.iter().map(|name| of_interface("ipv6", name, "accept_ra") + "=2").collect();
    set.push(format!("{parameter}=1"));
    let (lines, shown) = (if uplinks.is_empty() { "line" } else { "lines" }, set.join("\", \""));
    let mut remedy = format!(
        "sysctl -w {} (to keep it, {lines} \"{shown}\" in /etc/sysctl.d/60-culvert.conf)",
        set.join(" ")
    );
    if !uplinks.is_empty() {
        remedy += "; without accept_ra = 2 a host that forwards ignores router advertisements, and loses its IPv6 default \
                   route, which comes from them";
    }
    remedy
}

/// A parameter of an interface as sysctl takes it: with slashes, because a name may have dots, as those of VLANs do.
fn of_interface(family: &str, name: &str, parameter: &str) -> String {
    format!("net/{family}/conf/{name}/{parameter}")
}

fn rp_filter(facts: &Facts, config: &Config) -> Vec<Finding> {
    /// Loose; 1 is strict, 0 off.
    const STRICT: u8 = 1;
    let Some(tun) = &config.tun else { return Vec::new() };
    let strict = facts.network.rp_filter.iter().filter(|(name, mode)| *mode == STRICT && **name != *tun.name);
    let strict: Vec<&str> = strict.map(|(name, _)| name.as_str()).collect();
    let value = if strict.is_empty() {
        "nowhere strict".to_owned()
    } else {
        format!("strict on {}", strict.join(", "))
    };
    let found = Finding::ok(Check::RpFilter, "net.ipv4.conf.*.rp_filter", value);
    if strict.is_empty() || config.transport.mark == 0 {
        return vec![found];
    }
    let remedies: Vec<String> =
        strict.iter().map(|name| of_interface("ipv4", name, "rp_filter") + "=2").collect();
    vec![found.but(
        Severity::Warning,
        "with transport.mark the way back to a peer seems to be the tunnel: what peers send is dropped unseen where the \
         filter is strict",
        format!("sysctl -w {}", remedies.join(" ")),
    )]
}

/// Shares of the table from which on it is short, and as good as full.
const SHORT: f64 = 0.8;
const FULL: f64 = 0.95;

fn conntrack(table: &Conntrack, config: Option<&Config>) -> Finding {
    let Conntrack { count, max, .. } = *table;
    let found = Finding::ok(Check::Conntrack, "nf_conntrack_count", format!("{count} of {max}"));
    let filled = count as f64 / max.max(1) as f64;
    let raise = |to: u64| format!("sysctl -w net.netfilter.nf_conntrack_max={to}");
    let flows = config.filter(|config| !config.services.is_empty()).map_or(0, |config| config.limits.flows);
    if filled >= FULL {
        return found.but(Severity::Error, "the table is full: the kernel drops new flows", raise(max * 2));
    }
    if filled >= SHORT {
        return found.but(Severity::Warning, "when it is full, the kernel drops new flows", raise(max * 2));
    }
    if max < flows as u64 {
        let problem = format!("fewer than limits.flows, {flows}: each flow to a service takes an entry");
        return found.but(Severity::Note, problem, raise(flows as u64 * 2));
    }
    found
}

fn conntrack_timeout(table: &Conntrack, config: &Config) -> Option<Finding> {
    let timeout = table.udp_timeout;
    let dialled = config.peers.iter().filter(|peer| !peer.endpoints.is_empty());
    let silent: Vec<&str> = dialled
        .clone()
        .filter(|peer| peer.keepalive.is_none_or(|keepalive| keepalive >= timeout))
        .map(|peer| &*peer.name)
        .collect();
    let count = dialled.count();
    if count == 0 {
        return None;
    }
    let found = Finding::ok(
        Check::ConntrackTimeout,
        "nf_conntrack_udp_timeout_stream",
        format!("{} s", timeout.as_secs()),
    );
    Some(if silent.is_empty() {
        found
    } else {
        found.but(
            Severity::Warning,
            format!(
                "a stateful firewall here forgets an idle tunnel to {}, and what the peer sends is lost",
                silent.join(", ")
            ),
            "peer.keepalive = \"20s\", or a firewall rule that lets the peer's UDP in",
        )
    })
}
