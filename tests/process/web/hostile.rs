//! Attacks by clients of HTTP on TCP: they end with their connections, memory stays bounded, and others are answered meanwhile.

use std::{path::Path, process::Stdio, time::Duration};

use culvert_tests::{clock, place::Place, process::Running};

use crate::{
    bed::{Bed, FOLDER},
    users::Users,
};

/// How long each attack lasts.
const EACH: Duration = Duration::from_secs(5);

/// What an attack may leave resident: all 512 connections of visitors could hold 64 MiB in their windows alone.
const MOST_GROWTH_BYTES: u64 = 96 << 20;

/// What another client may wait for its page, on a machine that has other things to do, too.
const MOST_WAIT: Duration = Duration::from_secs(10);

fn attack(bed: &Bed, verb: &str, credentials: &str) -> Running {
    // The attackers' own work is not the agent's fault.
    let mut command = Place::Host.command("nice");
    command.args(["-n", "19"]).arg(&bed.python).arg(Path::new(FOLDER).join("attacker.py"));
    command.args([verb, &bed.tcp.port().to_string(), credentials]);
    command.env("PYTHONDONTWRITEBYTECODE", "1").stdin(Stdio::piped()).stdout(Stdio::null());
    Running::start(verb, &mut command)
}

/// What the agent has resident, in bytes.
fn resident(bed: &Bed) -> u64 {
    bed.agent.samples().count("culvert_process_resident_memory_bytes", &[])
}

#[test]
fn attacks_leave_bounded_memory_and_others_are_answered_meanwhile() {
    let Some(users) = Users::new("attacks by HTTP", "") else { return };
    let bed = &users.bed;
    let page = || {
        let began = clock::now();
        // Another prefix than the attackers', whose share is used up.
        let page = bed.curl(&["--interface", "127.8.0.1", "--http2"], "/echo");
        assert!(page.contains("\"GET\""), "{page}");
        began.elapsed()
    };
    page();
    let before = resident(bed);
    for verb in [
        "rapid_reset",
        "continuation",
        "header_lists",
        "slow_readers",
        "slow_uploads",
        "streams",
        "user_resets",
        "user_capsules",
        "user_unread",
    ] {
        let mut attacker = attack(bed, verb, &users.credentials);
        let (began, mut worst, mut most) = (clock::now(), Duration::ZERO, 0);
        while began.elapsed() < EACH {
            worst = worst.max(page());
            most = most.max(resident(bed));
            std::thread::sleep(Duration::from_millis(50));
        }
        assert!(attacker.child().try_wait().unwrap().is_none(), "{verb} goes on");
        drop(attacker.child().stdin.take());
        let status = attacker.wait(Duration::from_secs(30));
        assert!(status.success(), "{verb}");
        let grown = most.saturating_sub(before);
        assert!(worst <= MOST_WAIT, "{verb}: a page took {worst:?}");
        assert!(grown <= MOST_GROWTH_BYTES, "{verb}: {grown} bytes more");
    }
    // Nothing of it stays: neither a session nor a connection.
    bed.agent.wait_for_count("culvert_user_sessions", &[("user", "anna")], 0);
    bed.agent.wait_for_count("culvert_http_tcp_connections", &[], 0);
    let user = users.figures();
    let count = |counts: &str, label: &str| user[counts][label].as_u64().unwrap_or(0);
    let dropped = |counts: &str| -> u64 {
        user[counts].as_object().map_or(0, |counts| counts.values().filter_map(|count| count.as_u64()).sum())
    };
    let [up, down] = [["from_user", "to_target"], ["from_target", "to_user"]];
    assert!(count("datagrams", "from_user") > 0, "{user}");
    for (places, drops) in [(up, "dropped_from_user"), (down, "dropped_to_user")] {
        let (came, went) = (count("datagrams", places[0]), count("datagrams", places[1]));
        assert_eq!(came, went + dropped(drops), "{places:?}: {user}");
    }
    let log = users.bed.agent.log();
    assert!(!log.contains("panic"), "{log}");
}
