//! `culvert doctor` and the other end of a cable: a peer that answers, one that does not, a path that is too narrow, a daemon that
//! knows already.

use std::time::Duration;

use culvert_tests::{
    agent::{Agent, binary},
    needs,
    place::{Cable, Place},
    process::{run, text},
};
use serde_json::Value;

/// Runs the doctor where the agent would run: the exit code and the report.
#[track_caller]
pub(crate) fn examine(agent: &Agent) -> (Option<i32>, Value) {
    let mut command = agent.place().command(binary());
    command.args(["doctor", "--json", "--wait", "2s", "--config"]).arg(agent.config());
    let output = run(&mut command, Duration::from_secs(60));
    let report = serde_json::from_slice(&output.stdout);
    (output.status.code(), report.unwrap_or_else(|error| panic!("{error}: {}", text(&output.stderr))))
}

/// Severity and value of the one finding of a check.
#[track_caller]
fn of<'r>(report: &'r Value, check: &str) -> (&'r str, &'r str) {
    let findings = report["findings"].as_array().unwrap().iter();
    let found: Vec<&Value> = findings.filter(|finding| finding["check"] == check).collect();
    let [finding] = found[..] else { panic!("{check}: {report:#}") };
    (finding["severity"].as_str().unwrap(), finding["value"].as_str().unwrap())
}

fn set_mtu(places: &[Place; 2], bytes: &str) {
    for place in places {
        place.tell(&["ip", "link", "set", "veth0", "mtu", bytes]);
    }
}

#[test]
fn a_peer_is_dialled_if_no_daemon_runs_and_else_the_daemon_is_asked() {
    if !needs::met("the doctor and a peer", needs::NETNS)
        || !needs::met("the doctor and a peer", needs::TUNNEL)
    {
        return;
    }
    let cable = Cable::new();
    let places = cable.places();
    let [mut entry, mut exit] = [Agent::new("entry", &places[0]), Agent::new("exit", &places[1])];
    exit.configure(&format!(
        "transport.listen = [\"192.0.2.2:4433\"]\ntransport.workers = 1\n[[peer]]\nname = \"entry\"\npublic_key = \"{}\"\n\
         allowed_ips = [\"10.9.0.1/32\"]\n[tun]\naddress = [\"10.9.0.2/24\"]\n",
        entry.key()
    ));
    entry.configure(&format!(
        "transport.workers = 1\n[[peer]]\nname = \"exit\"\npublic_key = \"{}\"\nendpoints = [\"192.0.2.2:4433\"]\n\
         allowed_ips = [\"10.9.0.2/32\"]\n[tun]\naddress = [\"10.9.0.1/24\"]\n",
        exit.key()
    ));

    let (code, report) = examine(&entry);
    assert_eq!(of(&report, "reachability"), ("error", "no connection"), "{report:#}");
    assert_eq!((code, of(&report, "endpoint-route")), (Some(2), ("ok", "from 192.0.2.1")));

    exit.start();
    let (_, report) = examine(&entry);
    let (severity, value) = of(&report, "reachability");
    assert!(severity == "ok" && value.starts_with("answers"), "{report:#}");
    assert_eq!(of(&report, "path-mtu").0, "ok");
    // The largest packet over IPv4, 1472 bytes, without 31 of QUIC and its frame.
    assert_eq!(of(&report, "inner-mtu"), ("ok", "1441 bytes fit into one packet, measured"));
    assert_eq!(of(&report, "tun-device").0, "ok", "nothing was made, or nothing is left");

    set_mtu(&places, "1300");
    let (code, report) = examine(&entry);
    assert_eq!(of(&report, "path-mtu").0, "warning", "{report:#}");
    // The search for what fits ends some bytes below it.
    assert_eq!((code, of(&report, "inner-mtu").0), (Some(1), "warning"), "{report:#}");
    set_mtu(&places, "1500");

    entry.start();
    entry.wait_for_log(&["connected"]);
    let (_, report) = examine(&entry);
    assert_eq!(of(&report, "daemon").0, "ok", "{report:#}");
    let (severity, value) = of(&report, "reachability");
    assert!(severity == "ok" && value.starts_with("connected"), "{report:#}");
    assert_eq!(of(&report, "tun-queue"), ("ok", "1000"));
    assert_eq!(of(&report, "tun-device"), ("ok", "of the running daemon"));
    assert!(!exit.log().contains("replaced"), "{}", exit.log());
}
