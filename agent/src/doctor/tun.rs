//! The TUN device: its driver, its name and addresses, its queue (pure).

use config::{self, Config};
use engine::tunnel::QUEUE_PACKETS;
use net::{host::TunFeatures, tun::DRIVER};

use super::{
    Check, Finding,
    facts::{Daemon, Facts},
    files::split,
    kernel::numbers,
    unit::NAME,
};

pub(super) fn checks(facts: &Facts, config: &Config, tun: &config::Tun) -> Vec<Finding> {
    let mut findings = Vec::new();
    match &facts.tun.driver {
        None => {}
        Some(Ok(features)) => {
            let opens = || Finding::ok(Check::TunDriver, DRIVER, "opens");
            findings
                .extend([kept(facts, "opens").unwrap_or_else(opens), offload(facts, config, tun, *features)]);
        }
        Some(Err(error)) => findings.push(unopened(facts, error)),
    }
    findings.extend(device(facts, tun));
    findings.extend(queue(facts, tun));
    findings.push(ipv6(facts, config, tun));
    findings
}

/// The driver, which this user cannot open.
fn unopened(facts: &Facts, error: &str) -> Finding {
    let denied = facts.tun.denied && facts.service.unit.is_some();
    let kept = kept(facts, error).filter(|_| denied);
    kept.unwrap_or_else(|| Finding::ok(Check::TunDriver, DRIVER, error))
        .note_if(
            facts.daemon.may_run(),
            "this user cannot open it; the daemon that runs could",
            facts.service.look(),
        )
        .note_if(
            denied,
            format!("this user cannot open it, and need not: {NAME} lets the daemon"),
            facts.service.look(),
        )
        .error_if(
            true,
            "there can be no TUN device: the agent does not start",
            "modprobe tun; --device /dev/net/tun for a container; where its mode keeps the daemon's user out, chgrp \
             GROUP /dev/net/tun && chmod 0660 /dev/net/tun, with that user's group",
        )
}

/// What keeps the driver's node from the daemon of a unit, whoever looks.
fn kept(facts: &Facts, value: &str) -> Option<Finding> {
    let service = &facts.service;
    let unit = service.unit.as_ref().filter(|_| !facts.daemon.may_run())?;
    let found = Finding::ok(Check::TunDriver, DRIVER, value);
    if !unit.tun {
        return Some(found.error(
            format!("{NAME} hides it from the daemon: the agent does not start"),
            format!("systemctl edit culvert: DeviceAllow={DRIVER} rw and BindPaths={DRIVER}"),
        ));
    }
    let node = facts.tun.node.filter(|node| !service.lets_in(*node))?;
    let user = service.account.as_ref().map_or("culvert", |account| &account.name);
    Some(found.error(
        format!("mode {:04o} keeps out {user}, the user of {NAME}: the agent does not start", node.mode),
        format!("chgrp {user} {DRIVER} && chmod 0660 {DRIVER}, and systemctl restart culvert"),
    ))
}

fn offload(facts: &Facts, config: &Config, tun: &config::Tun, features: TunFeatures) -> Finding {
    /// The first version of the kernel with `TUN_F_USO4` and `TUN_F_USO6`.
    const USO: (u32, u32) = (6, 2);
    /// The first one with `TUN_F_UDP_TUNNEL_GSO`.
    const TUNNELS: (u32, u32) = (6, 17);
    let TunFeatures { vnet_header, several_queues } = features;
    let uso = numbers(&facts.kernel.release).is_none_or(|version| version >= USO);
    let running = facts.daemon.status().and_then(|status| status.tun.as_ref());
    let tunnels = running.map_or_else(
        || numbers(&facts.kernel.release).is_some_and(|version| version >= TUNNELS),
        |running| running.tunnels_cut,
    );
    let value = match (tun.offload, vnet_header, uso) {
        (false, _, _) => "off",
        (true, true, true) if tunnels => "TCP and UDP, inside of VXLAN and Geneve, too",
        (true, true, true) => "TCP and UDP",
        (true, true, false) => "TCP",
        (true, false, _) => "none",
    };
    let unjoined = running.filter(|running| running.tunnels_cut).and_then(|running| {
        match (running.tunnels_joined_ipv4, running.tunnels_joined_ipv6 || facts.tun.no_ipv6) {
            (true, true) => None,
            (true, false) => Some("IPv6"),
            (false, true) => Some("IPv4"),
            (false, false) => Some("IPv4 and IPv6"),
        }
    });
    Finding::ok(Check::TunOffload, "super-packets", value)
        .warning_if(
            !vnet_header && tun.offload,
            "each packet of the tunnel costs a system call",
            "a kernel whose TUN driver has IFF_VNET_HDR",
        )
        .warning_if(
            !several_queues && config.worker_count() > 1,
            "one worker reads the TUN device for all",
            "a kernel whose TUN driver has IFF_MULTI_QUEUE, or transport.workers = 1",
        )
        .note_if(
            !tun.offload,
            "tun.offload = \"off\": each packet of the tunnel costs a system call",
            "tun.offload = \"auto\"",
        )
        .note_if(
            unjoined.is_some(),
            format!(
                "a trial at the daemon's start did not come back: packets of peers inside of VXLAN and Geneve over {} are \
                 written without joining those inside",
                unjoined.unwrap_or_default()
            ),
            "where a firewall drops UDP from 192.0.0.7 to 192.0.0.6 or between fe80::1 and fe80::2 on culvert-probe0, let it \
             pass and restart the daemon; else nothing, it costs speed only",
        )
        .note_if(!uso, "UDP crosses the TUN device packet by packet", "a kernel from 6.2 on")
}

fn device(facts: &Facts, tun: &config::Tun) -> Option<Finding> {
    let at = |value: &str| Finding::ok(Check::TunDevice, format!("device {}", tun.name), value);
    Some(match (facts.tun.free.as_ref()?, &facts.daemon) {
        (Ok(()), Daemon::Running(_)) => at("missing").error(
            "the daemon runs without its device: somebody has removed it, or it has an older configuration",
            "systemctl restart culvert",
        ),
        (Ok(()), Daemon::Mute(_) | Daemon::Unasked | Daemon::Absent) => at("name and addresses are free"),
        // The collision is that with itself.
        (Err(_), Daemon::Running(_)) => at("of the running daemon"),
        (Err(error), Daemon::Mute(_)) => {
            let (problem, remedy) = split(error);
            at("taken").note(format!("probably by the daemon that seems to run: {problem}"), remedy)
        }
        (Err(error), Daemon::Unasked | Daemon::Absent) => {
            let (problem, remedy) = split(error);
            at("taken").error(format!("{problem}: the agent does not start"), remedy)
        }
    })
}

/// Only of a running daemon's device: without one, the device is another program's, or not there.
fn queue(facts: &Facts, tun: &config::Tun) -> Option<Finding> {
    let packets = facts.tun.queue_packets.filter(|_| facts.daemon.status().is_some())?;
    let name = &tun.name;
    Some(Finding::ok(Check::TunQueue, format!("txqueuelen of {name}"), packets.to_string()).warning_if(
        packets < u64::from(QUEUE_PACKETS),
        "bursts into the tunnel are lost",
        format!("ip link set {name} txqueuelen {QUEUE_PACKETS}"),
    ))
}

/// Whether routes of IPv6 are to lead into the tunnel.
pub(crate) fn routes_ipv6(config: &Config, tun: &config::Tun) -> bool {
    let mut prefixes = config.peers.iter().flat_map(|peer| &peer.allowed_ips);
    tun.sets_routes() && prefixes.any(|prefix| prefix.addr().is_ipv6())
}

/// How IPv6 is switched on.
pub(crate) const ENABLE: &str =
    "sysctl -w net.ipv6.conf.default.disable_ipv6=0, and no ipv6.disable=1 among the kernel's parameters";

fn ipv6(facts: &Facts, config: &Config, tun: &config::Tun) -> Finding {
    let disabled = facts.tun.no_ipv6;
    Finding::ok(Check::TunIpv6, "IPv6", if disabled { "disabled" } else { "enabled" }).error_if(
        disabled && tun.addresses.iter().any(|address| address.addr().is_ipv6()),
        "tun.address has IPv6 addresses, which cannot be set: the agent does not start",
        ENABLE,
    ).warning_if(
        disabled && routes_ipv6(config, tun),
        "peers have IPv6 prefixes in allowed_ips, which get no routes: their packets do not enter the tunnel; IPv4 goes on",
        ENABLE,
    )
}
