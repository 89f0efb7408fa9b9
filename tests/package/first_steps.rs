//! The first steps of the README, as they stand there: with the package at hand, on two machines that have a systemd.

use std::{fs, time::Duration};

use culvert_tests::{
    clock::{self, PATIENCE},
    needs::{self, Need},
    place::Cable,
    probe,
    process::{run, text},
};

use crate::{BUILD, built, debian, machine::Machine, repository};

const NEEDS: &[Need] = &[Need::Tun, Need::Tool("ping", "iputils-ping"), Need::Tool("setpriv", "util-linux")];

/// The most that a newcomer types beside the two installations and the ping.
const MOST_COMMANDS: usize = 3;

/// How long that may take, from the first command to the answer to a ping.
const WITHIN: Duration = Duration::from_secs(60);

/// The lines of the README's tunnel: which host, and what is typed there.
fn steps() -> Vec<(String, String)> {
    let readme = fs::read_to_string(repository("README.md")).unwrap();
    let mut blocks = readme.split("\n```").map(str::trim_start);
    let block = blocks.find(|block| block.starts_with("exit$")).unwrap();
    let lines = block.lines().filter_map(|line| line.split_once("$ "));
    lines.map(|(host, typed)| (host.to_owned(), typed.trim().to_owned())).collect()
}

/// What is printed below a heading.
fn below(said: &str, heading: &str) -> Option<String> {
    let line = said.lines().skip_while(|line| !line.starts_with(heading)).nth(1)?;
    Some(line.trim().to_owned())
}

/// What `init` says, of both its outputs.
fn types(machine: &Machine, typed: &str) -> String {
    let output = run(machine.command().args(["sh", "-c", &format!("{typed} 2>&1")]), Duration::from_secs(60));
    let said = text(&output.stdout);
    assert!(output.status.success(), "{typed}: {said}{}", machine.journal());
    said
}

#[test]
fn two_fresh_hosts_reach_each_other_by_the_three_commands_of_the_readme() {
    let Some(debian) = debian::clean("the README's first steps") else { return };
    if !needs::met("the README's first steps", &[BUILD, NEEDS].concat()) {
        return;
    }
    let cable = Cable::new();
    let [near, far] = cable.places();
    // What a host has, and what the link of an exit is found by.
    far.tell(&["ip", "route", "add", "default", "via", Cable::FIRST[0]]);
    let [entry, exit] = [&near, &far].map(|place| Machine::with_systemd(debian, place));
    for machine in [&entry, &exit] {
        fs::copy(built::package(), machine.path("/root/culvert.deb")).unwrap();
        machine.tell(&["dpkg", "--install", "/root/culvert.deb"]);
    }

    let (mut link, mut key) = (String::new(), String::new());
    let (begin, mut commands) = (clock::now(), 0);
    for (host, typed) in steps() {
        let words = typed.split_whitespace().map(|word| match word {
            _ if !word.ends_with('…') => word,
            _ if word.starts_with("culvert://192.0.2.2:4433/") => &link,
            _ => &key,
        });
        let typed = words.collect::<Vec<_>>().join(" ");
        if typed == "ping 10.9.0.1" {
            clock::until("the first ping", PATIENCE, || {
                let ping = probe::ping(&near, "10.9.0.1".parse().unwrap(), &["-c", "1"]);
                if ping.received == 1 { Ok(()) } else { Err(ping.text) }
            });
            continue;
        }
        commands += 1;
        let said = types(if host == "exit" { &exit } else { &entry }, &typed);
        link = below(&said, "Its link, for entries:").unwrap_or(link);
        key = below(&said, "Its public key:").unwrap_or(key);
    }
    let taken = clock::now() - begin;
    assert!(link.starts_with("culvert://192.0.2.2:4433/") && !key.is_empty(), "{link} {key}");
    assert!(commands <= MOST_COMMANDS && taken < WITHIN, "{commands} commands in {taken:?}");

    for machine in [&entry, &exit] {
        is_a_service(machine);
    }
}

/// What `--now` has started is the package's service: it is there after a boot, stays stopped if it was stopped, and goes with the
/// package.
fn is_a_service(machine: &Machine) {
    assert_eq!(machine.tell(&["systemctl", "is-enabled", "culvert"]).trim(), "enabled");
    assert_eq!(["ActiveState", "SubState"].map(|name| machine.property(name)), ["active", "running"]);
    let pid = machine.property("MainPID");
    machine.tell(&["dpkg", "--install", "/root/culvert.deb"]);
    clock::until("it runs again after the upgrade", PATIENCE, || match machine.property("ActiveState") {
        state if state == "active" && machine.property("MainPID") != pid => Ok(()),
        state => Err(state),
    });
    machine.tell(&["systemctl", "stop", "culvert"]);
    assert_eq!(["ActiveState", "Result"].map(|name| machine.property(name)), ["inactive", "success"]);
    assert_eq!(machine.processes("culvert"), [""; 0]);
    machine.tell(&["systemctl", "start", "culvert"]);
    machine.tell(&["dpkg", "--remove", "culvert"]);
    assert_eq!(machine.processes("culvert"), [""; 0]);
    assert!(machine.path("/etc/culvert/agent.toml").exists() && !machine.path("/run/culvert").exists());
}
