//! `[records]` of a running daemon: the file, and its sums beside the counters'.

use std::{
    fs,
    io::{Read as _, Write as _},
    net::{Shutdown, SocketAddr, TcpStream},
    path::Path,
    process::{Command, Stdio},
    thread,
    time::Duration,
};

use culvert_tests::{
    agent::{Agent, culvert},
    client::Client,
    clock::{self, PATIENCE},
    needs::{self, Need},
    pair::{Pair, Plan},
    ports,
    process::{Running, run, text},
    upstream::Echo,
};
use serde_json::Value;

const RECORDS: &str = "[records]\nfile = \"records.json\"\nmax_size = \"64KiB\"\nkeep = 3\n";

/// The records in the file of an agent, oldest first; those of a line that is being written are left out.
fn records(agent: &Agent, name: &str) -> Vec<Value> {
    let text = fs::read_to_string(agent.folder().join(name)).unwrap();
    text.lines().map(|line| serde_json::from_str(line).unwrap()).collect()
}

fn sum(records: &[Value], member: &str) -> u64 {
    records.iter().map(|record| record[member].as_u64().unwrap()).sum()
}

/// An exit that records, and whose flows end soon.
fn pair(echo: &Echo, ingress: SocketAddr) -> Pair {
    Plan::default()
        .service("echo", echo.address, "idle = \"1s\"\n")
        .forward("echo", ingress)
        .exit(RECORDS)
        .start()
}

#[test]
fn what_flows_have_carried_is_in_the_file_and_adds_up_to_the_counters() {
    if !needs::met("records", needs::AGENTS) {
        return;
    }
    let (echo, ingress) = (Echo::new(), ports::loopback());
    let mut pair = pair(&echo, ingress);
    for number in 0..5 {
        Client::new(number, ingress).converse(10);
    }
    pair.exit.wait_for_count("culvert_records_total", &[], 5);
    clock::until("five lines", PATIENCE, || {
        let count = records(&pair.exit, "records.json").len();
        if count == 5 { Ok(()) } else { Err(format!("{count} lines")) }
    });
    let found = records(&pair.exit, "records.json");
    for (direction, member) in [("uplink", "uplink"), ("downlink", "downlink")] {
        let labels = [("peer", "entry"), ("direction", direction)];
        let samples = pair.exit.samples();
        let [datagrams, bytes] = ["datagrams", "bytes"]
            .map(|what| samples.count(&format!("culvert_peer_{what}_delivered_total"), &labels));
        assert_eq!(sum(&found, &format!("{member}_packets")), datagrams);
        assert_eq!(sum(&found, &format!("{member}_bytes")), bytes);
        assert_eq!(datagrams, 50);
    }
    for record in &found {
        assert_eq!([&record["kind"], &record["peer"], &record["service"]], ["udp", "entry", "echo"]);
        assert_eq!(record["destination"], echo.address.to_string());
        assert!(record["reason"] == "idle" || record["reason"] == "closed", "{record}");
    }
    // What was there at the stop is written, too, and the next process goes on behind it.
    Client::new(6, ingress).converse(10);
    assert_eq!(pair.exit.terminate().code(), Some(0));
    let found = records(&pair.exit, "records.json");
    assert_eq!((found.len(), &found[5]["reason"]), (6, &Value::from("shutdown")));
    pair.exit.start();
    // One that was moved away is followed by a new one.
    let folder = pair.exit.folder().to_owned();
    fs::rename(folder.join("records.json"), folder.join("moved")).unwrap();
    clock::until("a new file", PATIENCE, || {
        let is_there = folder.join("records.json").exists();
        if is_there { Ok(()) } else { Err("there is no file".to_owned()) }
    });
    assert_eq!(records(&pair.exit, "moved").len(), 6);
}

#[test]
fn a_file_that_cannot_be_written_is_refused_at_the_start() {
    if !needs::met("records that cannot be written", needs::AGENTS) {
        return;
    }
    let (echo, ingress) = (Echo::new(), ports::loopback());
    let mut pair = pair(&echo, ingress);
    assert_eq!(pair.exit.terminate().code(), Some(0));
    let config = fs::read_to_string(pair.exit.config()).unwrap();
    for file in ["missing/records.json", "/dev/null"] {
        fs::write(pair.exit.config(), config.replace("\"records.json\"", &format!("\"{file}\""))).unwrap();
        let (status, log) = pair.exit.run_to_end();
        assert!(!status.success());
        assert!(log.contains("cannot write ") && log.contains("(remedy: records.file"), "{log}");
    }
    let checked = culvert(&["check", "--config", pair.exit.config().to_str().unwrap()]);
    assert!(checked.status.success(), "only the daemon's user can tell");
}

/// A flow as a collector shows it.
struct Shown {
    protocol: u64,
    bytes: u64,
    packets: u64,
}

/// Starts a collector, whose log says `ready` once it listens.
fn collector(tool: &str, args: &[&str], folder: &Path, ready: &str) -> Running {
    let log = folder.join("log");
    let out = fs::File::create(&log).unwrap();
    let mut command = Command::new(needs::tool(tool).unwrap());
    command.args(args).current_dir(folder).stdin(Stdio::null());
    command.stdout(out.try_clone().unwrap()).stderr(out);
    let running = Running::start(tool, &mut command);
    clock::until(&format!("{tool} listens"), PATIENCE, || {
        let said = fs::read_to_string(&log).unwrap();
        if said.contains(ready) { Ok(()) } else { Err(said) }
    });
    running
}

/// Has an entry send what three flows and a forward have carried; the flows as the collector shows them, which are as many as there are
/// directions, have the sums of the counters. It is asked once the entry has ended, so that all was sent.
fn collects(port: SocketAddr, mut shown: impl FnMut() -> Vec<Shown>) {
    let (echo, ingress) = (Echo::new(), ports::loopback());
    let mut pair = Plan::default()
        .service("echo", echo.address, "idle = \"1s\"\n")
        .forward("echo", ingress)
        .entry(&format!("[records]\ncollector = \"{port}\"\n"))
        .start();
    for number in 0..3 {
        Client::new(number, ingress).converse(10);
    }
    let mut stream = TcpStream::connect(ingress).unwrap();
    stream.write_all(&[7; 5_000]).unwrap();
    stream.shutdown(Shutdown::Write).unwrap();
    assert_eq!(stream.read_to_end(&mut Vec::new()).unwrap(), 5_000);
    drop(stream);
    pair.entry.wait_for_count("culvert_records_total", &[], 4);
    let samples = pair.entry.samples();
    let delivered = |what: &str| -> u64 {
        let of = |direction| {
            let labels = [("peer", "exit"), ("direction", direction)];
            samples.count(&format!("culvert_peer_{what}_delivered_total"), &labels)
        };
        of("uplink") + of("downlink")
    };
    let (datagrams, bytes) = (delivered("datagrams"), delivered("bytes"));
    assert_eq!(datagrams, 60);
    assert_eq!(pair.entry.terminate().code(), Some(0));
    clock::until("the collector has all", PATIENCE, || {
        let flows = shown();
        let found = [17, 6].map(|protocol| {
            let of = flows.iter().filter(|flow| flow.protocol == protocol);
            of.fold((0, 0, 0), |(count, packets, bytes), flow| {
                (count + 1, packets + flow.packets, bytes + flow.bytes)
            })
        });
        let expected = [(6, datagrams, bytes), (2, 0, 10_000)];
        if found == expected { Ok(()) } else { Err(format!("{found:?} of {expected:?}")) }
    });
}

#[test]
fn nfdump_shows_what_the_counters_count() {
    let tools = [Need::Tool("nfcapd", "nfdump"), Need::Tool("nfdump", "nfdump")];
    if !needs::met("records beside nfdump", &[needs::AGENTS, &tools].concat()) {
        return;
    }
    let (folder, port) = (tempfile::tempdir().unwrap(), ports::loopback());
    let (flows, at) = (folder.path().join("flows"), port.port().to_string());
    fs::create_dir(&flows).unwrap();
    let args = ["-w", "flows", "-b", "127.0.0.1", "-p", &at, "-t", "3600"];
    let mut nfcapd = collector("nfcapd", &args, folder.path(), "Startup nfcapd");
    let mut is_over = false;
    collects(port, || {
        // Its file is whole when it has ended, and that it does before it has read all that waits in its socket.
        if !is_over {
            let log = folder.path().join("log");
            thread::sleep(Duration::from_millis(500));
            nfcapd.terminate();
            nfcapd.wait(PATIENCE);
            let said = fs::read_to_string(&log).unwrap();
            assert!(said.contains("Sequence Errors: 0, Bad Packets: 0"), "{said}");
            is_over = true;
        }
        let mut nfdump = Command::new(needs::tool("nfdump").unwrap());
        nfdump.arg("-R").arg(&flows).args(["-q", "-N", "-o", "fmt:%pr %pkt %byt"]);
        let output = run(&mut nfdump, PATIENCE);
        assert!(output.status.success(), "{}", text(&output.stderr));
        let shown = |line: &str| {
            let mut numbers = line.split_whitespace().map(|word| word.parse().unwrap());
            let mut next = || numbers.next().unwrap();
            Shown { protocol: next(), packets: next(), bytes: next() }
        };
        text(&output.stdout).lines().filter(|line| !line.trim().is_empty()).map(shown).collect()
    });
}

#[test]
fn pmacct_shows_what_the_counters_count() {
    let needs = [needs::AGENTS, &[Need::Tool("nfacctd", "pmacct")]].concat();
    if !needs::met("records beside pmacct", &needs) {
        return;
    }
    let (folder, port) = (tempfile::tempdir().unwrap(), ports::loopback());
    let out = folder.path().join("flows");
    let config = format!(
        "nfacctd_ip: 127.0.0.1\nnfacctd_port: {}\nplugins: print\nprint_refresh_time: 1\nprint_output: json\n\
         print_output_file: {}\nprint_output_file_append: true\n\
         aggregate: src_host,dst_host,src_port,dst_port,proto\n",
        port.port(),
        out.display()
    );
    fs::write(folder.path().join("config"), config).unwrap();
    let _nfacctd = collector("nfacctd", &["-f", "config"], folder.path(), "waiting for NetFlow/IPFIX data");
    collects(port, || {
        let text = fs::read_to_string(&out).unwrap_or_default();
        // The last line may not be complete.
        let flows = text.lines().filter_map(|line| serde_json::from_str::<Value>(line).ok());
        let number = |flow: &Value, member: &str| flow[member].as_u64().unwrap();
        let shown = |flow: Value| Shown {
            protocol: if flow["ip_proto"] == "udp" { 17 } else { 6 },
            bytes: number(&flow, "bytes"),
            packets: number(&flow, "packets"),
        };
        flows.map(shown).collect()
    });
}
