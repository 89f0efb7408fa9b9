//! Several uplinks, over addresses of loopback: `culvert uplink test`, and what check, doctor, status and metrics say of each line.

use std::fs;

use culvert_tests::{
    agent::{Agent, culvert},
    client::Client,
    needs,
    pair::{Pair, Plan},
    ports,
    process::text,
    upstream::Echo,
};
use serde_json::Value;

/// A line from an address that only loopback has, and one that stands by.
const LINES: &str = "[[transport.uplink]]\nname = \"dsl\"\nsource = \"127.0.0.2\"\n\
                     [[transport.uplink]]\nname = \"lte\"\nsource = \"127.0.0.3\"\ncost = \"metered\"\n";

/// A line of which this host has no interface.
const ABSENT: &str = "[[transport.uplink]]\nname = \"modem\"\ninterface = \"nosuchif0\"\n";

/// Runs a command with the configuration of `agent`: its exit code, what it printed, and what it complained of.
fn run(agent: &Agent, args: &[&str]) -> (Option<i32>, String, String) {
    let file = agent.config();
    let output = culvert(&[args, &["--config", file.to_str().unwrap()]].concat());
    (output.status.code(), text(&output.stdout), text(&output.stderr))
}

fn json(agent: &Agent, args: &[&str]) -> (Option<i32>, Value) {
    let (code, said, complaint) = run(agent, &[args, &["--json"]].concat());
    (code, serde_json::from_str(&said).unwrap_or_else(|error| panic!("{error}: {said}{complaint}")))
}

/// The findings of a check of the doctor: subjects and severities.
fn findings(report: &Value, check: &str) -> Vec<(String, String)> {
    let findings = report["findings"].as_array().unwrap().iter();
    let of_check = findings.filter(|finding| finding["check"] == check);
    of_check
        .map(|it| (it["subject"].as_str().unwrap().to_owned(), it["severity"].as_str().unwrap().to_owned()))
        .collect()
}

#[track_caller]
fn refused(agent: &Agent, args: &[&str], words: &[&str]) {
    let (code, said, complaint) = run(agent, &[&["uplink", "test"][..], args].concat());
    assert_eq!((code, said.as_str()), (Some(2), ""), "{complaint}");
    assert!(words.iter().all(|word| complaint.contains(word)), "{words:?}: {complaint}");
}

#[test]
fn a_test_of_lines_that_there_are_not_is_refused() {
    if !needs::met("refusals of uplink test", needs::AGENTS) {
        return;
    }
    let pair = Plan::default().prepare();
    refused(&pair.entry, &[], &["has no [[transport.uplink]]", "(remedy: "]);
    let pair = Plan::default().entry(LINES).prepare();
    refused(&pair.entry, &["cable"], &["has no line \"cable\"", "(remedy: name one of dsl, lte)"]);
    refused(&pair.entry, &["--wait", "1"], &["write 10ms to 60s"]);
    let text = fs::read_to_string(pair.entry.config()).unwrap();
    let silent = text.lines().filter(|line| !line.starts_with("endpoints")).collect::<Vec<_>>().join("\n");
    fs::write(pair.entry.config(), silent).unwrap();
    refused(&pair.entry, &[], &["peer \"exit\".endpoints: missing", "(remedy: "]);
}

/// The lines of a test by name, and whether each has reached the exit.
fn reached(report: &Value) -> Vec<(String, bool)> {
    let lines = report["lines"].as_array().unwrap().iter();
    lines
        .map(|line| (line["line"].as_str().unwrap().to_owned(), line["answers"].as_bool().unwrap()))
        .collect()
}

#[test]
fn each_line_is_dialled_and_measured_if_no_daemon_runs() {
    if !needs::met("uplink test", needs::AGENTS) {
        return;
    }
    let mut pair = Plan::default().entry(&format!("{LINES}{ABSENT}")).prepare();
    let lines = |answers: [bool; 3]| {
        ["dsl", "lte", "modem"].map(str::to_owned).into_iter().zip(answers).collect::<Vec<_>>()
    };
    let (code, report) = json(&pair.entry, &["uplink", "test", "--wait", "300ms", "--for", "100ms"]);
    assert_eq!((code, reached(&report)), (Some(1), lines([false; 3])), "the exit does not run: {report:#}");

    pair.exit.start();
    let (code, report) = json(&pair.entry, &["uplink", "test", "--wait", "3s", "--for", "3s"]);
    assert_eq!((code, reached(&report)), (Some(1), lines([true, true, false])), "{report:#}");
    assert_eq!(report["measured_by"], "test");
    for (line, source) in [(0, "127.0.0.2"), (1, "127.0.0.3")] {
        let line = &report["lines"][line];
        assert_eq!(line["source"], source, "{report:#}");
        let measured = &line["measured"];
        assert!(measured["rtt_seconds"].as_f64().unwrap() > 0.0, "{report:#}");
        // Beside the search for the packet size, each lane was asked for an answer.
        assert!(measured["packets"].as_u64().unwrap() >= 16, "{report:#}");
        assert!(measured["path_mtu"].as_u64().unwrap() >= 1_280, "{report:#}");
    }
    let (code, said, _) = run(&pair.entry, &["uplink", "test", "modem", "--wait", "300ms"]);
    assert_eq!(code, Some(1));
    let why = said.lines().last().unwrap();
    assert!(
        why.starts_with("modem: exit: cannot open a socket to ") && why.contains("No such device"),
        "{said}"
    );
    assert!(why.contains("(remedy: "), "{said}");
    let (code, said, _) = run(&pair.entry, &["uplink", "test", "lte", "--for", "1s"]);
    assert_eq!((code, said.lines().count()), (Some(0), 2), "{said}");

    // The doctor dials over each line, too.
    let (code, report) = json(&pair.entry, &["doctor", "--wait", "1s"]);
    let of = |check| findings(&report, check);
    let found = |line: &str, severity: &str| (line.to_owned(), severity.to_owned());
    assert_eq!(
        of("uplink"),
        [
            found("dsl: source 127.0.0.2", "ok"),
            found("lte: source 127.0.0.3", "ok"),
            found("modem: interface nosuchif0", "warning")
        ],
        "{report:#}"
    );
    assert_eq!(
        of("uplink-route"),
        [found("dsl: exit", "ok"), found("lte: exit", "ok"), found("modem: exit", "warning")]
    );
    let severities: Vec<String> =
        of("uplink-reachability").into_iter().map(|(_, severity)| severity).collect();
    assert_eq!(severities, ["ok", "ok"], "{report:#}");
    assert!(code >= Some(1), "{report:#}");
}

#[test]
fn check_names_a_line_that_is_not_there_and_how_full_lines_share() {
    let pair = Plan::default().entry(&format!("{LINES}{ABSENT}")).prepare();
    let (code, said, complaint) = run(&pair.entry, &["check"]);
    assert_eq!((code, complaint.as_str()), (Some(0), ""), "a line may appear later");
    for words in [
        "note: full lines share by weight: dsl 50 %, modem 50 %",
        "note: the line \"modem\" has the interface nosuchif0, which this host does not have now",
    ] {
        assert!(said.contains(words), "{said}");
    }
}

fn started(echo: &Echo, ingress: std::net::SocketAddr) -> Pair {
    Plan::default().service("echo", echo.address, "").forward("echo", ingress).entry(LINES).start()
}

#[test]
fn a_daemon_says_what_each_line_does_and_has_carried() {
    if !needs::met("status of lines", needs::AGENTS) {
        return;
    }
    let (echo, ingress) = (Echo::new(), ports::loopback());
    let mut pair = started(&echo, ingress);
    let line = |name| [("peer", "exit"), ("line", name)];
    for name in ["dsl", "lte"] {
        pair.entry.wait_for("lanes on the line", |samples| {
            let lanes = samples.count("culvert_line_lanes", &line(name));
            if lanes > 0 { Ok(()) } else { Err(format!("{name} has none")) }
        });
    }
    Client::new(0, ingress).converse(20);
    pair.entry.wait_for_count("culvert_line_in_use", &line("dsl"), 1);
    for name in ["dsl", "lte"] {
        pair.entry.wait_for_count("culvert_line_suspect", &line(name), 0);
    }
    pair.entry.wait_for_count("culvert_line_in_use", &line("lte"), 0);
    // The other end has numbers for them, and spares the metered one, too.
    pair.exit.wait_for_count("culvert_line_in_use", &[("peer", "entry"), ("line", "0")], 1);
    pair.exit.wait_for_count("culvert_line_in_use", &[("peer", "entry"), ("line", "1")], 0);

    let status = pair.entry.ask(&["status"]);
    let row = |begin: &str| {
        status.lines().find(|line| line.starts_with(begin)).unwrap_or_else(|| panic!("{status}"))
    };
    assert!(
        row("exit/dsl").contains("  in use  ") && row("exit/lte").contains("  standby (metered)  "),
        "{status}"
    );
    assert!(row("dsl  ").contains("source 127.0.0.2"), "{status}");
    let (code, report) = json(&pair.entry, &["status", "exit"]);
    let lines = &report["status"]["peers"][0]["lines"];
    assert_eq!(
        (code, &lines[0]["state"], &lines[1]["state"]),
        (Some(0), &"in-use".into(), &"standby".into()),
        "{report:#}"
    );
    assert_eq!((&lines[1]["cause"], &lines[1]["metered"]), (&"metered".into(), &true.into()));
    let sent = |line: usize| lines[line]["sent_bytes"].as_u64().unwrap();
    assert!(sent(0) > 0 && sent(1) > 0, "{report:#}");

    // While a daemon runs, a test shows what it has measured.
    let (code, report) = json(&pair.entry, &["uplink", "test"]);
    assert_eq!((code, &report["measured_by"]), (Some(0), &"daemon".into()), "{report:#}");
    assert_eq!(reached(&report), [("dsl".to_owned(), true), ("lte".to_owned(), true)]);
    let (_, report) = json(&pair.entry, &["doctor"]);
    let severities: Vec<String> =
        findings(&report, "uplink-reachability").into_iter().map(|(_, severity)| severity).collect();
    assert_eq!(severities, ["ok", "ok"], "{report:#}");

    // The month outlives a restart, the counters do not.
    let month = |agent: &Agent| agent.samples().count("culvert_uplink_month_bytes", &[("line", "dsl")]);
    pair.entry.wait_for("what the line has carried, counted once a second", |samples| {
        let bytes = samples.count("culvert_uplink_month_bytes", &[("line", "dsl")]);
        if bytes > 0 { Ok(()) } else { Err("nothing".to_owned()) }
    });
    let before = month(&pair.entry);
    assert_eq!(pair.entry.terminate().code(), Some(0));
    let file = pair.entry.folder().join("state/lines");
    let kept = fs::read_to_string(&file).unwrap();
    let count = |name: &str| -> u64 {
        let line = kept
            .lines()
            .find(|line| line.starts_with(&format!("{name} ")))
            .unwrap_or_else(|| panic!("{kept}"));
        line.split(' ').nth(1).unwrap().parse().unwrap()
    };
    assert!(count("dsl") >= before && count("lte") > 0, "{kept}");
    pair.entry.start();
    assert!(month(&pair.entry) >= count("dsl"), "{kept}");
    let direction = |direction| [("line", "dsl"), ("direction", direction)];
    pair.entry.wait_for("the new session's bytes", |samples| {
        let [sent, received] =
            ["uplink", "downlink"].map(|way| samples.count("culvert_uplink_bytes_total", &direction(way)));
        if sent > 0 && received > 0 { Ok(()) } else { Err(format!("{sent} sent, {received} received")) }
    });
}
