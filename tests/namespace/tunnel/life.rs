//! Agents that start, that cannot, that end and that are killed: what they leave behind.

use std::{
    fs,
    net::{IpAddr, UdpSocket},
};

use culvert_tests::{
    clock::{self, PATIENCE},
    place::Place,
    probe,
    sites::{DEVICE, Family, Plan, Site},
    transfer::Transfer,
};

use super::{forwarding::everything_through_a, possible};

/// Pings until there is an answer.
#[track_caller]
fn wait_for_ping(from: &Place, to: IpAddr) {
    clock::until("an answer to a ping", PATIENCE, || match probe::ping(from, to, &["-c", "1", "-W", "1"]) {
        ping if ping.received == 1 => Ok(()),
        ping => Err(ping.text),
    });
}

#[test]
fn a_killed_agent_leaves_nothing_behind_and_goes_on_when_it_is_started_again() {
    if !possible("a killed agent") {
        return;
    }
    let mut sites = Plan::two().prepare();
    let before: Vec<String> = sites.all().iter().map(Site::routing).collect();
    sites.start();
    for killed in [0, 1] {
        probe::reaches(&sites.a().host, sites.b().host_address(Family::V4), &[]);
        let site = &mut sites.all_mut()[killed];
        let running = site.routing();
        assert_ne!(running, before[killed]);
        site.agent.kill();
        assert!(!site.has_device());
        assert_eq!(site.routing(), before[killed]);
        site.agent.start();
        let (a, b) = (sites.a(), sites.b());
        for family in Family::BOTH {
            wait_for_ping(&a.host, b.host_address(family));
            probe::reaches(&b.host, a.host_address(family), &[]);
        }
        clock::until("the same routes", PATIENCE, || {
            let now = sites.all()[killed].routing();
            if now == running { Ok(()) } else { Err(now) }
        });
    }
    for (site, before) in sites.all_mut().iter_mut().zip(before) {
        assert_eq!(site.agent.terminate().code(), Some(0));
        assert!(!site.has_device());
        assert_eq!(site.routing(), before);
    }
}

#[test]
fn hooks_find_the_device_and_one_that_fails_ends_nothing() {
    if !possible("hooks") {
        return;
    }
    let folder = tempfile::tempdir().unwrap();
    let seen = |hook: &str| folder.path().join(hook);
    let script = seen("hook");
    let look = "ip -oneline address show dev \"$CULVERT_DEVICE\" > \"$0.$CULVERT_HOOK.$(printf %s \"$CULVERT_ADDRESSES\" | tr / _)\"; exit 3";
    fs::write(&script, format!("{look}\n")).unwrap();
    let hook = format!("[\"/bin/sh\", \"{}\"]", script.display());
    let hooks = Plan::two().tun(&format!("up = {hook}\ndown = {hook}\n"));
    let mut sites = hooks.start();
    let found = || {
        let files = fs::read_dir(folder.path()).unwrap().map(|entry| entry.unwrap().path());
        let mut all: Vec<_> = files.filter(|path| *path != script).collect();
        all.sort();
        all
    };
    clock::until("both sites ran a hook", PATIENCE, || match found() {
        found if found.len() == 2 => Ok(()),
        found => Err(format!("{found:?}")),
    });
    probe::reaches(&sites.a().host, sites.b().host_address(Family::V4), &[]);
    for site in sites.all_mut() {
        assert_eq!(site.agent.terminate().code(), Some(0));
    }
    let found = found();
    assert_eq!(found.len(), 4, "{found:?}");
    for file in found {
        let text = fs::read_to_string(&file).unwrap();
        assert!(text.contains(DEVICE) && text.contains("inet "), "{}: {text}", file.display());
    }
}

#[test]
fn routes_of_connected_peers_come_and_go_with_the_connection() {
    if !possible("routes of connected peers") {
        return;
    }
    let mut sites = Plan::two().tun("routes = \"connected\"\nhold = \"2s\"\n").prepare();
    let is_routed = |site: &Site| {
        let ours = |line: &str| line.contains(DEVICE) && line.contains("proto 199");
        site.routing().lines().any(ours)
    };
    let wait = |site: &Site, routed: bool| {
        clock::until(if routed { "routes" } else { "no routes" }, PATIENCE, || match is_routed(site) {
            now if now == routed => Ok(()),
            _ => Err(site.routing()),
        });
    };
    sites.all_mut()[0].agent.start();
    assert!(!is_routed(sites.a()), "nobody is connected: {}", sites.a().routing());
    sites.all_mut()[1].agent.start();
    for _ in 0..2 {
        sites.all().iter().for_each(|site| wait(site, true));
        // An answer that is late on a busy machine takes the routes away for the hold.
        wait_for_ping(&sites.a().host, sites.b().host_address(Family::V4));
        assert_eq!(sites.all_mut()[1].agent.terminate().code(), Some(0));
        wait(sites.a(), false);
        sites.all_mut()[1].agent.start();
    }
}

#[test]
fn rules_of_a_killed_agent_are_replaced_and_those_of_an_ended_one_are_gone() {
    if !possible("routing rules") {
        return;
    }
    let mut sites = everything_through_a();
    let before: Vec<String> = sites.all().iter().map(Site::routing).collect();
    sites.start();
    probe::reaches(&sites.b().host, sites.a().host_address(Family::V6), &[]);
    let running = sites.b().routing();
    assert!(running.contains("fwmark 0x33"), "{running}");
    sites.all_mut()[1].agent.kill();
    sites.all_mut()[1].agent.start();
    clock::until("the rules and routes are as before", PATIENCE, || {
        let now = sites.b().routing();
        if now == running { Ok(()) } else { Err(now) }
    });
    for (site, before) in sites.all_mut().iter_mut().zip(before) {
        assert_eq!(site.agent.terminate().code(), Some(0));
        assert_eq!(site.routing(), before);
    }
}

#[test]
fn an_unprivileged_user_with_one_capability_runs_it() {
    if !possible("an unprivileged user") {
        return;
    }
    let mut sites = Plan::hub().prepare();
    let before: Vec<String> = sites.all().iter().map(Site::routing).collect();
    for site in sites.all_mut() {
        site.agent.unprivileged();
    }
    sites.start();
    for site in sites.all_mut() {
        let pid = site.agent.process().pid();
        let status = fs::read_to_string(format!("/proc/{pid}/status")).unwrap();
        let of = |name: &str| {
            let line = status.lines().find_map(|line| line.strip_prefix(name)).unwrap_or_default();
            line.split_whitespace().next().unwrap_or_default().to_owned()
        };
        // CAP_NET_ADMIN is number 12.
        assert_eq!(
            (of("Uid:"), of("CapEff:"), of("CapBnd:")),
            ("65534".into(), format!("{:016x}", 1 << 12), format!("{:016x}", 1 << 12))
        );
    }
    for family in Family::BOTH {
        probe::reaches(&sites.b().host, sites.c().host_address(family), &[]);
        Transfer::new(&sites.b().host, &sites.a().host, sites.a().host_address(family), 1 << 20).run();
    }
    for (site, before) in sites.all_mut().iter_mut().zip(before) {
        assert_eq!(site.agent.terminate().code(), Some(0));
        assert!(!site.has_device());
        assert_eq!(site.routing(), before);
    }
}

/// Starts an agent, which must end and say `words` and a remedy, and leave nothing behind.
#[track_caller]
fn refuses(site: &Site, words: &[&str]) {
    let before = site.routing();
    let had_device = site.has_device();
    let (status, said) = site.agent.run_to_end();
    assert_eq!(status.code(), Some(1), "{said}");
    let told = |line: &str| line.contains("remedy: ") && words.iter().all(|word| line.contains(word));
    assert!(said.lines().any(told), "{words:?} or the remedy is missing: {said}");
    assert_eq!(site.has_device(), had_device, "{said}");
    assert_eq!(site.routing(), before, "{said}");
}

#[test]
fn without_the_capability_it_says_so() {
    if !possible("no capability") {
        return;
    }
    let mut sites = Plan::two().prepare();
    let site = &mut sites.all_mut()[0];
    site.agent.powerless();
    refuses(site, &["CAP_NET_ADMIN"]);
}

#[test]
fn a_name_that_is_taken_is_named_and_its_device_left_alone() {
    if !possible("a taken name") {
        return;
    }
    let sites = Plan::two().prepare();
    // By a device of another kind.
    let a = sites.a();
    a.gateway.tell(&["ip", "link", "add", DEVICE, "type", "veth", "peer", "name", "other"]);
    refuses(a, &[DEVICE]);
    drop(sites);
    // By a running agent, whose queues a second one could otherwise join; by a device that outlives its maker.
    let mut sites = Plan::two().start();
    let b = sites.b();
    let second = b.agent.twin();
    let (status, said) = second.run_to_end();
    assert_eq!(status.code(), Some(1), "{said}");
    assert!(said.lines().any(|line| line.contains(DEVICE) && line.contains("remedy: ")), "{said}");
    probe::reaches(&sites.a().host, sites.b().host_address(Family::V4), &[]);
    sites.all_mut()[1].agent.terminate();
    let b = sites.b();
    b.gateway.tell(&["ip", "tuntap", "add", "dev", DEVICE, "mode", "tap"]);
    refuses(b, &[DEVICE]);
}

#[test]
fn addresses_that_collide_are_named() {
    if !possible("addresses that collide") {
        return;
    }
    let sites = Plan::two().prepare();
    let a = sites.a();
    let config = fs::read_to_string(a.agent.config()).unwrap();
    let replace = |from: &str, to: &str| {
        assert!(config.contains(from), "{config}");
        fs::write(a.agent.config(), config.replace(from, to)).unwrap();
    };
    // The same address on another interface; a prefix that another interface has.
    replace("10.9.0.1/24", "10.9.1.1/24");
    refuses(a, &["10.9.1.1", "lan"]);
    replace("10.9.0.1/24", "10.9.1.77/25");
    refuses(a, &["10.9.1.", "lan"]);
    replace("fd09::1/64", "fd09:0:0:1::77/64");
    refuses(a, &["fd09:0:0:1::", "lan"]);
    // A route of another interface to a peer's network is there first.
    a.gateway.tell(&["ip", "route", "add", "10.9.2.0/24", "via", "10.9.1.2", "dev", "lan"]);
    fs::write(a.agent.config(), &config).unwrap();
    refuses(a, &["10.9.2.0/24"]);
    a.gateway.tell(&["ip", "route", "del", "10.9.2.0/24"]);
    // A socket that takes the metrics' port: what was made before is undone.
    let port = config.split("metrics.listen = \"127.0.0.1:").nth(1).unwrap().split('"').next().unwrap();
    let port: u16 = port.parse().unwrap();
    let taken = a.gateway.enter(|| std::net::TcpListener::bind(("127.0.0.1", port))).unwrap();
    refuses(a, &["in use"]);
    drop(taken);
    let quic = a.gateway.enter(|| UdpSocket::bind(sites.listening())).unwrap();
    refuses(a, &["in use"]);
    drop(quic);
}
