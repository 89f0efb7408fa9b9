//! Ports, forwarding, filters and the interfaces towards the peers (pure).

use config::{Config, SourceCheck};
use ipnet::IpNet;

use super::{
    Check, Finding,
    facts::{Conntrack, Daemon, Facts, Opened, Port},
    unit::NAME,
};

/// What does not need a configuration.
pub(super) fn host(facts: &Facts, config: Option<&Config>) -> Vec<Finding> {
    let offload = |(name, joins): &(String, bool)| {
        let value = if *joins { "on" } else { "off" };
        Finding::ok(Check::InterfaceOffload, format!("GRO of {name}"), value).warning_if(
            !joins,
            "each packet crosses the kernel by itself, which costs several times the CPU",
            format!("ethtool -K {name} gro on"),
        )
    };
    let conntrack = facts.network.conntrack.iter().map(|table| conntrack(table, config));
    conntrack.chain(facts.network.interfaces.iter().map(offload)).collect()
}

/// Checks the network for what the configuration asks of it.
pub(super) fn checks(facts: &Facts, config: &Config) -> Vec<Finding> {
    let mut findings: Vec<Finding> = facts.network.ports.iter().map(|found| port(facts, found)).collect();
    findings.extend(status_page(config));
    findings.extend(forwarding(facts, config));
    findings.extend(redirects(facts, config));
    findings.extend(rp_filter(facts, config));
    findings.extend(device_filter(facts, config));
    findings.extend(facts.network.conntrack.and_then(|table| conntrack_timeout(&table, config)));
    findings
}

/// Who can read the status page, and who can read the secret on its way there.
fn status_page(config: &Config) -> Option<Finding> {
    let admin = &config.admin;
    let address = admin.listen.filter(|_| admin.page)?;
    let at = |value: &str| Finding::ok(Check::StatusPage, format!("http://{address}/"), value);
    let remedy = "metrics.token_file = \"admin.token\"";
    Some(if admin.is_public() {
        let problem = "every host that reaches this address can read names and addresses of the peers";
        at("for everybody").warning(problem, format!("write who may in metrics.allow, or {remedy}"))
    } else if !admin.has_token() && !admin.is_remote() {
        at("for every user of this host").note("they can read names and addresses of the peers", remedy)
    } else if admin.has_token() && admin.is_remote() {
        let problem = "the secret crosses the network in the clear, as HTTP does";
        at("for those who have the secret")
            .note(problem, "listen on an address inside the tunnel, or on loopback behind a proxy with TLS")
    } else {
        at(if admin.has_token() { "for those who have the secret" } else { "for metrics.allow" })
    })
}

fn port(facts: &Facts, port: &Port) -> Finding {
    let Port { key, tcp, address, opened } = port;
    let (protocol, option) = if *tcp { ("TCP", "-ltnp") } else { ("UDP", "-lunp") };
    let number = address.port();
    let at = |value: &str| Finding::ok(Check::Ports, format!("{key} {address} {protocol}"), value);
    match (opened, &facts.daemon) {
        (Opened::Taken, Daemon::Running(_)) => at("open, of the running daemon"),
        (Opened::Taken, Daemon::Mute(_)) => at("taken")
            .note("probably by the daemon that seems to run", format!("ss {option} 'sport = :{number}'")),
        (Opened::Taken, Daemon::Unasked | Daemon::Absent) => at("taken").error(
            "another process listens there: the agent does not start",
            format!("stop it: ss {option} 'sport = :{number}' shows it; or another {key}"),
        ),
        (Opened::Free, Daemon::Running(_)) => at("free").note_if(
            number != 0,
            "the daemon that runs does not listen there: it has an older configuration",
            "culvert reload, or systemctl restart culvert where that says so",
        ),
        (Opened::Free, Daemon::Mute(_) | Daemon::Unasked | Daemon::Absent) => at("free"),
        (Opened::Forbidden, Daemon::Running(_)) => at("of the running daemon, or not for this user"),
        (Opened::Forbidden, Daemon::Mute(_) | Daemon::Unasked | Daemon::Absent) => {
            let first = facts.network.unprivileged_ports.unwrap_or(1_024);
            let given = facts.service.unit.as_ref().is_some_and(|unit| unit.gives("CAP_NET_BIND_SERVICE"));
            let problem = format!("ports below {first} need CAP_NET_BIND_SERVICE");
            let remedy = format!(
                "AmbientCapabilities=CAP_NET_BIND_SERVICE in the unit, sysctl -w \
                 net.ipv4.ip_unprivileged_port_start={number}, or a port from {first} on"
            );
            at("not for this user")
                .note_if(given, format!("{problem}, which {NAME} gives"), facts.service.look())
                .error_if(true, problem, remedy)
        }
        (Opened::NoAddress, _) => at("not an address of this host").error(
            "the agent does not start",
            format!("an address that `ip address` shows, or 0.0.0.0 or [::] for all, in {key}"),
        ),
        (Opened::Failed(error), _) => at(error).error(
            "the agent does not start",
            format!("another address or port in {key}; for IPv6, sysctl -w net.ipv6.conf.all.disable_ipv6=0"),
        ),
    }
}

fn forwarding(facts: &Facts, config: &Config) -> Vec<Finding> {
    let families = [
        ("net.ipv4.ip_forward", "IPv4", facts.network.forwards_ipv4),
        ("net.ipv6.conf.all.forwarding", "IPv6", facts.network.forwards_ipv6),
    ];
    if config.tun.is_none() {
        return Vec::new();
    }
    let mut findings = Vec::new();
    for (parameter, family, on) in families {
        let is_of = |prefix: &IpNet| (family == "IPv6") == prefix.addr().is_ipv6();
        let with = config.peers.iter().filter(|peer| peer.allowed_ips.iter().any(is_of)).count();
        let (Some(on), true) = (on, with > 0) else { continue };
        let uplinks: &[String] = if family == "IPv6" { &facts.network.advertised } else { &[] };
        let remedy = forward(parameter, uplinks);
        findings.push(
            Finding::ok(Check::Forwarding, parameter, if on { "1" } else { "0" })
                .note_if(
                    !on && with == 1,
                    format!("{family} ends at this host: networks behind it are not reached through the tunnel"),
                    remedy.clone(),
                )
                .warning_if(
                    !on,
                    format!("{with} peers have {family} addresses, and cannot reach each other, nor networks behind this host"),
                    remedy,
                ),
        );
    }
    findings
}

/// A hub sends packets of one peer back into the device that they came from, to another: the kernel says "redirect" for each.
fn redirects(facts: &Facts, config: &Config) -> Option<Finding> {
    let tun = config.tun.as_ref()?;
    let with = |peer: &&config::Peer| peer.allowed_ips.iter().any(|prefix| prefix.addr().is_ipv4());
    let peers = config.peers.iter().filter(with).count();
    let sends = facts.network.sends_redirects.filter(|_| peers > 0)?;
    let hub = peers >= 2 && facts.network.forwards_ipv4 == Some(true);
    let parameter = "net.ipv4.conf.all.send_redirects";
    Some(Finding::ok(Check::Redirects, format!("redirects of {}", tun.name), if sends { "sent" } else { "not sent" }).warning_if(
        sends && hub,
        "a peer that reaches another one through this host is told with each packet that there is a shorter way (ping prints \
         \"Redirect Host\"), and there is none",
        format!(
            "sysctl -w {parameter}=0 {}=0 (to keep it, line \"{parameter}=0\" in /etc/sysctl.d/60-culvert.conf; the device's the \
             agent sets)",
            of_interface("ipv4", &tun.name, "send_redirects")
        ),
    ))
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

/// The value of `rp_filter` that is strict; 2 is loose, 0 off.
const STRICT: u8 = 1;

/// The filter of the device, where routes choose the peer and the source is checked by `allowed_ips`, not by routes.
fn device_filter(facts: &Facts, config: &Config) -> Option<Finding> {
    let tun = config.tun.as_ref()?;
    let asymmetric = tun.follows_routes() && tun.source_check == SourceCheck::AllowedIps;
    let (name, mode) = facts.network.rp_filter.iter().find(|(name, _)| asymmetric && **name == *tun.name)?;
    let value = if *mode == STRICT { "strict" } else { "not strict" };
    let parameter = of_interface("ipv4", name, "rp_filter");
    Some(Finding::ok(Check::RpFilter, parameter.clone(), value).warning_if(
        *mode == STRICT,
        "the kernel drops what a peer sends from a source whose route is not through the device, although the peer's allowed_ips \
         have it: routes of daemons are often asymmetric",
        format!("sysctl -w {parameter}=2; or tun.source_check = \"route\", if the way back is always the same"),
    ))
}

fn rp_filter(facts: &Facts, config: &Config) -> Option<Finding> {
    let tun = config.tun.as_ref()?;
    let strict = facts.network.rp_filter.iter().filter(|(name, mode)| *mode == STRICT && **name != *tun.name);
    let strict: Vec<&str> = strict.map(|(name, _)| name.as_str()).collect();
    let value = if strict.is_empty() {
        "nowhere strict".to_owned()
    } else {
        format!("strict on {}", strict.join(", "))
    };
    let remedies = strict.iter().map(|name| of_interface("ipv4", name, "rp_filter") + "=2");
    Some(Finding::ok(Check::RpFilter, "net.ipv4.conf.*.rp_filter", value).warning_if(
        !strict.is_empty() && config.transport.mark != 0,
        "with transport.mark the way back to a peer seems to be the tunnel: what peers send is dropped unseen where the \
         filter is strict",
        format!("sysctl -w {}", remedies.collect::<Vec<_>>().join(" ")),
    ))
}

/// Shares of the table from which on it is short, and as good as full.
const SHORT: f64 = 0.8;
const FULL: f64 = 0.95;

fn conntrack(table: &Conntrack, config: Option<&Config>) -> Finding {
    let Conntrack { count, max, .. } = *table;
    let filled = count as f64 / max.max(1) as f64;
    let flows = config.filter(|config| !config.services.is_empty()).map_or(0, |config| config.limits.flows);
    let double = |of: u64| format!("sysctl -w net.netfilter.nf_conntrack_max={}", of.saturating_mul(2));
    Finding::ok(Check::Conntrack, "nf_conntrack_count", format!("{count} of {max}"))
        .error_if(filled >= FULL, "the table is full: the kernel drops new flows", double(max))
        .warning_if(filled >= SHORT, "when it is full, the kernel drops new flows", double(max))
        .note_if(
            max < flows as u64,
            format!("fewer than limits.flows, {flows}: each flow to a service takes an entry"),
            double(flows as u64),
        )
}

fn conntrack_timeout(table: &Conntrack, config: &Config) -> Option<Finding> {
    let timeout = table.udp_timeout;
    let mut dialled = config.peers.iter().filter(|peer| !peer.endpoints.is_empty()).peekable();
    dialled.peek()?;
    let silent = dialled.filter(|peer| peer.keepalive.is_none_or(|keepalive| keepalive >= timeout));
    let silent: Vec<&str> = silent.map(|peer| &*peer.name).collect();
    let subject = "nf_conntrack_udp_timeout_stream";
    Some(Finding::ok(Check::ConntrackTimeout, subject, format!("{} s", timeout.as_secs())).warning_if(
        !silent.is_empty(),
        format!(
            "a stateful firewall here forgets an idle tunnel to {}, and what the peer sends is lost",
            silent.join(", ")
        ),
        "peer.keepalive = \"20s\", or a firewall rule that lets the peer's UDP in",
    ))
}
