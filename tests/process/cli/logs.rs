//! What `culvert run` writes to standard error: lines that a machine reads, lines that systemd's journal reads, and nobody
//! who reads.

use std::{
    fs::{self, File},
    io::{BufRead, BufReader},
    os::unix::fs::MetadataExt,
    path::Path,
    process::{Command, Stdio},
};

use culvert_tests::{
    agent::{SHUTDOWN_LIMIT, binary},
    clock::{self, PATIENCE},
    needs::{self, Need},
    place::Place,
    process::Running,
};
use serde_json::Value;

use crate::run::configuration;

const NEEDS: &[Need] = &[Need::Tool("setpriv", "util-linux")];

fn command(file: &Path) -> Command {
    let mut command = Place::Host.command(binary());
    command.args(["run", "--config"]).arg(file).stdin(Stdio::null()).stdout(Stdio::null());
    command
}

/// Runs a daemon until it has dialled, lets it reload and end, and returns what it wrote.
fn log_of(more: &str, command: impl FnOnce(&Path, &File) -> Command) -> String {
    let (folder, file) = configuration(more);
    let path = folder.path().join("log");
    let log = File::create(&path).unwrap();
    let mut command = command(&file, &log);
    let mut daemon = Running::start("the daemon", command.stderr(log));
    let until = |words: &str| {
        clock::until(words, PATIENCE, || {
            let log = fs::read_to_string(&path).unwrap();
            if log.contains(words) { Ok(()) } else { Err(log) }
        });
    };
    until("dialling");
    daemon.signal("HUP");
    until("reload");
    daemon.terminate();
    assert_eq!(daemon.wait(SHUTDOWN_LIMIT).code(), Some(0));
    fs::read_to_string(path).unwrap()
}

#[test]
fn json_is_one_event_per_line_with_its_fields() {
    if !needs::met("a log", NEEDS) {
        return;
    }
    let log = log_of("log = { format = \"json\", level = \"debug\" }\n", |file, _| command(file));
    let events: Vec<Value> = log
        .lines()
        .map(|line| serde_json::from_str(line).unwrap_or_else(|error| panic!("{error}: {line:?}")))
        .collect();
    for event in &events {
        for key in ["timestamp", "level", "target", "message"] {
            assert!(event[key].is_string(), "{key} of {event}");
        }
        let level = event["level"].as_str().unwrap();
        assert!(["ERROR", "WARN", "INFO", "DEBUG"].contains(&level), "{event}");
    }
    let of = |message: &str| events.iter().find(|event| event["message"] == message);
    let ready = of("ready").unwrap_or_else(|| panic!("{log}"));
    assert_eq!((&ready["level"], &ready["target"]), (&"INFO".into(), &"culvert::daemon".into()));
    assert!(ready["workers"].as_u64().is_some_and(|workers| workers > 0), "{ready}");
    assert_eq!(ready["key"].as_str().map(str::len), Some(43), "{ready}");
    let dialling = of("dialling").unwrap_or_else(|| panic!("{log}"));
    assert_eq!((&dialling["peer"], &dialling["remote"]), (&"exit".into(), &"127.0.0.1:9".into()));
    assert!(of("stopped").is_some(), "{log}");
}

#[test]
fn what_keeps_it_from_starting_is_an_event_too() {
    if !needs::met("a log", NEEDS) {
        return;
    }
    let port = culvert_tests::ports::free();
    let _taken = std::net::UdpSocket::bind(("127.0.0.1", port)).unwrap();
    let (_folder, file) =
        configuration(&format!("log.format = \"json\"\ntransport.listen = [\"127.0.0.1:{port}\"]\n"));
    let output = culvert_tests::process::run(&mut command(&file), PATIENCE);
    assert_eq!(output.status.code(), Some(1));
    let log = culvert_tests::process::text(&output.stderr);
    let last: Value = serde_json::from_str(log.lines().last().unwrap()).unwrap();
    let message = last["message"].as_str().unwrap();
    assert!(last["level"] == "ERROR" && message.contains("in use") && message.contains("remedy: "), "{last}");
}

#[test]
fn the_journal_learns_the_priority_and_has_the_time_itself() {
    if !needs::met("a log", NEEDS) {
        return;
    }
    let log = log_of("log.level = \"debug\"\n", |file, log| {
        let stream = log.metadata().unwrap();
        let mut command = command(file);
        command.env("JOURNAL_STREAM", format!("{}:{}", stream.dev(), stream.ino()));
        command
    });
    for line in log.lines() {
        let level = line.get(3..8).unwrap_or_default().trim();
        let priority = match level {
            "ERROR" => "<3>",
            "WARN" => "<4>",
            "INFO" => "<6>",
            "DEBUG" => "<7>",
            other => panic!("the level {other:?} of {line:?}"),
        };
        assert!(line.starts_with(priority), "{line:?}");
    }
    assert!(log.contains("\n<6> INFO culvert::daemon: ready transport="), "{log}");
    // A stream of that name which is not ours: somebody has sent standard error elsewhere.
    let log = log_of("", |file, _| {
        let mut command = command(file);
        command.env("JOURNAL_STREAM", "1:1");
        command
    });
    assert!(!log.contains('<'), "{log}");
}

#[test]
fn a_log_that_nobody_reads_any_more_ends_nothing() {
    if !needs::met("a log", NEEDS) {
        return;
    }
    let (folder, file) = configuration("");
    let mut command = command(&file);
    // Where the end of the reload is told, since nobody reads the log.
    let manager = std::os::unix::net::UnixDatagram::bind(folder.path().join("notify")).unwrap();
    manager.set_read_timeout(Some(PATIENCE)).unwrap();
    command.env("NOTIFY_SOCKET", folder.path().join("notify"));
    let mut daemon = Running::start("the daemon", command.stderr(Stdio::piped()));
    let mut lines = BufReader::new(daemon.child().stderr.take().unwrap()).lines();
    assert!(lines.any(|line| line.unwrap().contains(": ready ")));
    drop(lines);
    daemon.signal("HUP");
    let mut ready = 0;
    while ready < 2 {
        let mut datagram = [0; 512];
        let length = manager.recv(&mut datagram).unwrap();
        ready += usize::from(datagram[..length].starts_with(b"READY=1"));
    }
    assert!(daemon.ended().is_none());
    daemon.terminate();
    assert_eq!(daemon.wait(SHUTDOWN_LIMIT).code(), Some(0));
}
