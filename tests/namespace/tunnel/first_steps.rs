//! From nothing to the first ping, with the commands that `culvert init` prints, and none but those.

use culvert_tests::{
    clock::{self, PATIENCE},
    probe,
    sites::{Family, Plan},
};

use super::{possible, shell::Shell};

/// The command of a step that was printed.
#[track_caller]
fn command<'a>(said: &'a str, begin: &str) -> &'a str {
    let found =
        said.lines().filter_map(|line| line.strip_prefix("    ")).find(|line| line.starts_with(begin));
    found.unwrap_or_else(|| panic!("no command begins with {begin:?}: {said}"))
}

/// Two fresh hosts. The peer is added before the exit's daemon runs; or while it does, with the networks behind both hosts.
fn first_ping(first: &str, running: bool) {
    // What is behind the exit is among what `first` says.
    let behind_entry = if running { " --network 10.9.2.0/24" } else { "" };
    let sites = Plan::two().prepare();
    let mut exit = Shell::at(&sites.a().gateway);
    let mut entry = Shell::at(&sites.b().gateway);
    // The exit: one command. Its host finds out the address.
    let told = exit.does(first);
    assert!(told.contains("culvert://192.0.2.2:4433/"), "{told}");
    let start = command(&told, "culvert run").to_owned();
    if running {
        exit.starts(&start);
    }
    // The entry: the command that the exit printed.
    let at_entry = entry.does(&(command(&told, "culvert init").to_owned() + behind_entry));
    // The exit again, with what the entry printed.
    exit.does(command(&at_entry, "culvert peer add"));
    if !running {
        exit.starts(&start);
    }
    entry.starts(command(&at_entry, "culvert run"));
    let ping = command(&at_entry, "ping").replacen("ping", "ping -c 1 -W 1", 1);
    clock::until("the first ping", PATIENCE, || match entry.tries(&ping) {
        (code, _) if code == "0" => Ok(()),
        (_, said) => Err(said),
    });
    if running {
        let (from, to) = (&sites.b().host, sites.a().host_address(Family::V4));
        // What waits for longer than the queue's time, which is short by default, is dropped on a busy machine.
        clock::until("pings between the networks", PATIENCE, || probe::try_to_reach(from, to, &[]));
    }
    // Who reads on finds no mistake in what was written.
    for shell in [&mut exit, &mut entry] {
        shell.does("culvert check --config /etc/culvert/agent.toml");
        assert_eq!(shell.does("stat -c %a /etc/culvert /etc/culvert/identity.key"), "750\n600\n");
    }
}

#[test]
fn what_init_prints_leads_to_a_ping() {
    if possible("the first steps") {
        first_ping("culvert init --role exit --tun", false);
    }
}

#[test]
fn what_init_prints_leads_to_a_ping_through_a_daemon_that_runs() {
    if possible("the first steps at a running exit") {
        first_ping("culvert init --role exit --tun --tun fd09::1/64 --network 10.9.1.0/24", true);
    }
}
