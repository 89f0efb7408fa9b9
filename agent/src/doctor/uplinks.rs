//! The lines of `[[transport.uplink]]`, and the ways to the peers over each (pure).

use config::{Config, Uplink};
use engine::status::{LineState, LineStatus};

use super::{
    Check, Finding, Severity,
    facts::{Answer, Facts, Line, LineEnd, LinePeer},
    peers::after_comma,
};

pub(super) fn checks(facts: &Facts, config: &Config) -> Vec<Finding> {
    let mut findings = Vec::new();
    for (uplink, line) in config.transport.uplinks.iter().zip(&facts.lines) {
        let others = config.transport.uplinks.len() > 1;
        findings.push(end(uplink, line, others));
        for peer in &line.peers {
            let elsewhere = facts.lines.iter().filter(|other| other.name != line.name);
            let elsewhere: Vec<&LinePeer> =
                elsewhere.flat_map(|other| &other.peers).filter(|other| other.peer == peer.peer).collect();
            findings.push(route(uplink, line, peer, elsewhere.iter().any(|other| other.has_way())));
            let status = facts.daemon.status().into_iter().flat_map(|status| &status.peers);
            let status = status.into_iter().find(|status| *status.name == *peer.peer);
            match status {
                Some(status) => {
                    let known = status.lines.iter().find(|known| *known.name == *line.name);
                    findings.extend(known.map(|known| by_daemon(line, peer, known)));
                }
                None => {
                    let answered = elsewhere.iter().any(|other| other.answers());
                    findings.extend(by_dialling(line, peer, answered));
                }
            }
        }
    }
    findings
}

/// Who carries what a line does not.
fn consequence(others: bool) -> &'static str {
    if others {
        "the other lines carry everything meanwhile"
    } else {
        "no peer is reached: there is no other line"
    }
}

/// Whether the line's interface or source is there.
fn end(uplink: &Uplink, line: &Line, others: bool) -> Finding {
    let severity = if others { Severity::Warning } else { Severity::Error };
    let at = |value: String| Finding::ok(Check::Uplink, format!("{}: {}", line.name, line.way), value);
    let is_interface = uplink.interface.is_some();
    match &line.end {
        LineEnd::There { interface, up: false, .. } => at("down".to_owned()).but(
            severity,
            consequence(others),
            format!(
                "ip link set {interface} up, or what brings up its connection (nmcli, a modem, a DHCP client)"
            ),
        ),
        LineEnd::There { interface, addresses, .. } if addresses.is_empty() => at("no address".to_owned())
            .but(
                severity,
                format!(
                    "packets would leave from an address of another interface, if at all; {}",
                    consequence(others)
                ),
                format!(
                    "ip address show {interface}; the DHCP client or the modem's connection of {interface}"
                ),
            ),
        LineEnd::There { interface, addresses, .. } if is_interface => {
            let shown: Vec<String> = addresses.iter().map(ToString::to_string).collect();
            at(format!("{interface} is up, with {}", shown.join(", ")))
        }
        LineEnd::There { interface, .. } => at(format!("of {interface}, which is up")),
        LineEnd::Missing => {
            let (value, remedy) = if is_interface {
                (
                    "there is no such interface now",
                    "ip link shows the interfaces; the line is used as soon as it appears",
                )
            } else {
                (
                    "not an address of this host now",
                    "ip address shows the addresses; the line is used as soon as it appears",
                )
            };
            at(value.to_owned()).but(severity, consequence(others), remedy)
        }
        LineEnd::Unknown(error) => {
            at("not known".to_owned()).note(error.clone(), "ip address shows what the kernel has")
        }
    }
}

/// Whether packets to a peer have a way over the line.
fn route(uplink: &Uplink, line: &Line, peer: &LinePeer, elsewhere: bool) -> Finding {
    let at = |value: String| Finding::ok(Check::UplinkRoute, format!("{}: {}", line.name, peer.peer), value);
    if let Some((address, way)) =
        peer.addresses.iter().find_map(|address| Some((address, address.way.as_ref().ok()?)))
    {
        return at(format!("from {} to {}", way.source, address.remote.ip()));
    }
    let severity = if elsewhere { Severity::Warning } else { Severity::Error };
    let Some(address) = peer.addresses.first() else {
        return at("not looked up".to_owned()).note("no address of the peer is known", "getent ahosts NAME");
    };
    let error = address.way.as_ref().err().cloned().unwrap_or_default();
    let to = address.remote.ip();
    let remedy = match (&uplink.interface, uplink.source) {
        (Some(interface), _) => format!(
            "ip route show dev {interface} must list a route that holds {to}: a default route, with a metric of its own (ip route add \
             default via GATEWAY dev {interface} metric 200)"
        ),
        (None, Some(source)) => format!(
            "a rule and a table for its packets: ip rule add from {source} table 100; ip route add default via GATEWAY table 100"
        ),
        (None, None) => format!("ip route get {to}"),
    };
    at(error).but(severity, "no address of the peer has a way over this line", remedy)
}

/// What the daemon that runs knows of the line.
fn by_daemon(line: &Line, peer: &LinePeer, known: &LineStatus) -> Finding {
    let rtt = after_comma(known.rtt_seconds);
    let value = format!("{}{rtt}", known.in_words());
    let at = Finding::ok(Check::UplinkReachability, format!("{}: {}", line.name, peer.peer), value);
    let problem = match known.state {
        LineState::InUse | LineState::Standby | LineState::Held => return at,
        LineState::Suspect => "packets leave the line for the others",
        LineState::Down => "none of its lanes is up",
    };
    at.warning(
        problem,
        format!(
            "culvert status {}, its log, and then culvert uplink test {} after the daemon was stopped",
            peer.peer, line.name
        ),
    )
}

/// What came of dialling the peer over the line, if that was tried.
fn by_dialling(line: &Line, peer: &LinePeer, elsewhere: bool) -> Option<Finding> {
    let (address, answer) =
        peer.addresses.iter().find_map(|address| Some((address, address.answer.as_ref()?)))?;
    let at = |value: String| {
        Finding::ok(
            Check::UplinkReachability,
            format!("{}: {} {}", line.name, peer.peer, address.remote),
            value,
        )
    };
    Some(match answer {
        Answer::Connected { rtt, .. } => {
            at(format!("answers{}", after_comma(rtt.map(|rtt| rtt.as_secs_f64()))))
        }
        Answer::Failed { reason, causes } => {
            let severity = if elsewhere { Severity::Warning } else { Severity::Error };
            let remedy = if causes.is_empty() { "culvert uplink test says more" } else { causes };
            at("no connection".to_owned()).but(severity, reason.clone(), remedy)
        }
    })
}
