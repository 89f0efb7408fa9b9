//! `culvert qlog` between two real agents: the file is what happened.

use std::{
    fs,
    io::Cursor,
    net::{Ipv4Addr, SocketAddr},
    os::unix::fs::PermissionsExt,
    path::Path,
    thread,
    time::Duration,
};

use culvert_tests::{
    agent::{Agent, culvert},
    client::Client,
    clock::{self, PATIENCE},
    needs,
    pair::{Pair, Plan},
    ports,
    process::text,
    upstream::Echo,
};
use qlog::{
    QlogSeq, VantagePointType,
    events::{EventData, quic::PacketType},
    reader::{Event, QlogSeqReader},
};

/// A pair of agents with one lane, and the port of an echo service.
fn pair(echo: &Echo) -> (Pair, SocketAddr) {
    let ingress: SocketAddr = (Ipv4Addr::LOCALHOST, ports::free()).into();
    // What an idle lane sends by itself would be counted, too.
    let quiet = "lanes = 1\nkeepalive = \"0s\"\n";
    let plan = Plan::default().peer(quiet).service("echo", echo.address, "").forward("echo", ingress);
    (plan.start(), ingress)
}

/// Runs `culvert qlog` with the daemon of an agent.
fn qlog(agent: &Agent, args: &[&str]) -> std::process::Output {
    let config = agent.config();
    culvert(&[&["qlog"], args, &["--config", config.to_str().unwrap()]].concat())
}

/// Header and events of a file, each of which the crate understands.
fn parsed(file: Vec<u8>) -> (QlogSeq, Vec<Event>) {
    let records = file.iter().filter(|byte| **byte == 0x1e).count();
    let reader = QlogSeqReader::new(Box::new(Cursor::new(file))).unwrap();
    let header = reader.qlog.clone();
    let events: Vec<Event> = reader.collect();
    assert_eq!(events.len() + 1, records);
    (header, events)
}

fn data(events: &[Event]) -> impl Iterator<Item = &EventData> {
    events.iter().filter_map(|event| match event {
        Event::Qlog(event) => Some(&event.data),
        Event::Json(_) => None,
    })
}

/// Packets that an agent sent and received on its lanes, once that changes no more.
fn lane_packets(agent: &Agent) -> [u64; 2] {
    let now = || {
        let samples = agent.samples();
        ["sent", "received"].map(|what| samples.count(&format!("culvert_lane_packets_{what}_total"), &[]))
    };
    clock::until("the lane is quiet", PATIENCE, || {
        let before = now();
        thread::sleep(Duration::from_millis(700));
        let after = now();
        if before == after { Ok(after) } else { Err(format!("{before:?}, then {after:?}")) }
    })
}

fn file_of(path: &Path) -> Vec<u8> {
    fs::read(path).unwrap()
}

#[test]
fn a_lane_is_captured_live_and_the_file_agrees_with_the_metrics() {
    if !needs::met("qlog", needs::AGENTS) {
        return;
    }
    let echo = Echo::new();
    let (pair, ingress) = pair(&echo);
    Client::new(0, ingress).converse(20);
    let before = lane_packets(&pair.entry);
    let path = pair.entry.folder().join("lane.sqlog");
    let out = path.to_str().unwrap();
    let output = thread::scope(|scope| {
        let capture = scope.spawn(|| qlog(&pair.entry, &["exit", "--for", "8s", "--out", out]));
        // It is made when the lane is being recorded.
        clock::until("the file is there", PATIENCE, || if path.exists() { Ok(()) } else { Err("it is not") });
        Client::new(1, ingress).converse(200);
        capture.join().unwrap()
    });
    assert_eq!(output.status.code(), Some(0), "{}", text(&output.stderr));
    let after = lane_packets(&pair.entry);
    let (header, events) = parsed(file_of(&path));
    assert_eq!(fs::metadata(&path).unwrap().permissions().mode() & 0o777, 0o600);
    assert_eq!(text(&output.stdout).trim(), format!("{out}: {} events", events.len()));
    assert_eq!(
        (header.qlog_format.as_str(), header.trace.vantage_point.ty),
        ("JSON-SEQ", VantagePointType::Client)
    );
    let sent: Vec<u64> = data(&events)
        .filter_map(|data| {
            let EventData::PacketSent(sent) = data else { return None };
            sent.header.packet_number
        })
        .collect();
    let received = data(&events).filter(|data| matches!(data, EventData::PacketReceived(_))).count();
    assert!(sent.len() >= 200 && sent.windows(2).all(|pair| pair[1] == pair[0] + 1), "{sent:?}");
    assert_eq!([sent.len() as u64, received as u64], [after[0] - before[0], after[1] - before[1]]);
    assert!(data(&events).any(|data| matches!(data, EventData::MetricsUpdated(_))));

    // Nothing of what it carries is in it.
    let file = text(&file_of(&path));
    assert!(!file.contains("\"raw\":\"") && !file.contains("\"data\":\""), "{file}");

    let again = qlog(&pair.entry, &["exit", "--out", out]);
    assert_eq!(again.status.code(), Some(2));
    assert!(text(&again.stderr).contains("not overwritten (remedy: "), "{}", text(&again.stderr));
    for (args, code, words) in [
        (&["nobody"][..], 2, "remedy: see culvert peer list"),
        (&["exit", "--lane", "9"], 1, "has no lane 9 now (remedy: "),
        (&["exit", "--lane", "64"], 2, "64 is not in 0.."),
        (&["exit", "--reconnect"], 2, "--control"),
        (&["exit", "--for", "1h"], 2, "write 1s to 10m"),
    ] {
        let folder = pair.entry.folder().join("none.sqlog");
        let output = qlog(&pair.entry, &[args, &["--out", folder.to_str().unwrap()]].concat());
        let stderr = text(&output.stderr);
        assert_eq!(output.status.code(), Some(code), "{args:?}: {stderr}");
        assert!(stderr.contains(words), "{args:?}: {stderr}");
        assert!(!folder.exists(), "{args:?}");
    }
}

#[test]
fn a_control_connection_is_captured_from_its_handshake_on() {
    if !needs::met("qlog of the control connection", needs::AGENTS) {
        return;
    }
    let echo = Echo::new();
    let (pair, ingress) = pair(&echo);
    let mut client = Client::new(0, ingress);
    client.converse(5);
    // The end that is dialled.
    let output = qlog(&pair.exit, &["entry", "--control", "--reconnect", "--for", "6s", "--out", "-"]);
    assert_eq!(output.status.code(), Some(0), "{}", text(&output.stderr));
    let (header, events) = parsed(output.stdout);
    assert_eq!(header.trace.vantage_point.ty, VantagePointType::Server);
    for what in [PacketType::Initial, PacketType::Handshake, PacketType::OneRtt] {
        let sent = data(&events)
            .any(|data| matches!(data, EventData::PacketSent(sent) if sent.header.packet_type == what));
        let received = data(&events)
            .any(|data| matches!(data, EventData::PacketReceived(got) if got.header.packet_type == what));
        assert!(sent && received, "{what:?}");
    }
    pair.wait_for_connection();
    client.converse(5);

    // No other begins by itself.
    let path = pair.exit.folder().join("none.sqlog");
    let output = qlog(&pair.exit, &["entry", "--control", "--for", "1s", "--out", path.to_str().unwrap()]);
    assert_eq!(output.status.code(), Some(1));
    assert!(
        text(&output.stderr).contains("remedy: a longer --for, or --reconnect"),
        "{}",
        text(&output.stderr)
    );
    assert!(!path.exists());
}
