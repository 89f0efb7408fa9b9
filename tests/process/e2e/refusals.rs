//! What is refused, how that is counted, and that it harms nothing else.

use std::{
    io::{ErrorKind, Read},
    net::{SocketAddr, TcpStream},
    process::Command,
    time::Duration,
};

use culvert_tests::{
    agent::{culvert, keygen},
    client::Client,
    clock::{self, PATIENCE},
    needs,
    pair::{Pair, Plan},
    ports,
    upstream::Echo,
};

struct Case {
    pair: Pair,
    /// The port of the service in question.
    bad: SocketAddr,
    /// A client of a service that works.
    good: Client,
    _echo: Echo,
}

/// A pair with a working service and one in question, which `plan` adds under the name "bad".
fn case(plan: impl FnOnce(Plan) -> Plan) -> Case {
    let (echo, good, bad) = (Echo::new(), ports::loopback(), ports::loopback());
    let pair = plan(Plan::default().service("echo", echo.address, ""));
    let pair = pair.forward("echo", good).forward("bad", bad).start();
    Case { pair, bad, good: Client::new(0, good), _echo: echo }
}

impl Case {
    /// Sends datagrams to the bad service amid traffic of the good one, until they are dropped for one of `reasons`.
    #[track_caller]
    fn expect_drops_for(self, reasons: &[&str]) {
        self.expect(&format!("drops for {reasons:?}"), |pair| {
            reasons.iter().any(|reason| pair.dropped(reason) > 0)
        });
    }

    /// Sends datagrams to the bad service amid traffic of the good one, until `counted`.
    #[track_caller]
    fn expect(mut self, what: &str, counted: impl Fn(&Pair) -> bool) {
        let mut bad = Client::new(1, self.bad);
        self.good.converse(5);
        clock::until(what, PATIENCE, || {
            bad.send();
            self.good.converse(1);
            if counted(&self.pair) { Ok(()) } else { Err(format!("{:?}", self.drops())) }
        });
        assert!(bad.receive_any(Duration::from_millis(100)).is_err(), "nobody is there to answer");
        self.good.converse(20);
        // Nothing of the good service is among the drops: all of it was answered, so all else is the bad one's.
        self.pair.accounts();
    }

    fn drops(&self) -> Vec<std::collections::BTreeMap<String, f64>> {
        let drops = |(_, agent): (_, &culvert_tests::agent::Agent)| {
            agent.samples().by_label("culvert_datagrams_dropped_total", "reason")
        };
        self.pair.ends().map(drops).into()
    }

    /// Connects to the bad service: the connection ends, and that is counted.
    #[track_caller]
    fn expect_close(mut self) {
        self.good.converse(3);
        // With a reset, which may come as early as now.
        if let Ok(mut stream) = TcpStream::connect(self.bad) {
            stream.set_read_timeout(Some(PATIENCE)).unwrap();
            match stream.read(&mut [0; 1]) {
                Ok(length) => assert_eq!(length, 0, "nobody is there to answer"),
                Err(error) => assert_ne!(error.kind(), ErrorKind::WouldBlock, "the connection hangs"),
            }
        }
        clock::until("the refusal is counted", PATIENCE, || {
            if self.pair.sum("culvert_tcp_refused_total", &[]) > 0 { Ok(()) } else { Err("not counted") }
        });
        self.good.converse(3);
    }
}

#[test]
fn datagrams_to_an_unknown_service_are_counted() {
    if needs::met("unknown service", needs::AGENTS) {
        case(|plan| plan).expect_drops_for(&["unknown_service"]);
    }
}

#[test]
fn datagrams_to_a_forbidden_service_are_counted() {
    if needs::met("forbidden service", needs::AGENTS) {
        let upstream = Echo::new();
        // The exit does not tell the entry of services that it may not use: to the entry they do not exist.
        let case = case(|plan| plan.forbidden_service("bad", upstream.address, ""));
        case.expect_drops_for(&["not_allowed", "unknown_service"]);
    }
}

#[test]
fn datagrams_to_an_upstream_that_is_not_there_are_counted() {
    if needs::met("absent upstream", needs::AGENTS) {
        // The kernel takes a datagram before it learns that nobody listens, and reports that later.
        case(|plan| plan.service("bad", ports::loopback(), "")).expect("refusals of the upstream", |pair| {
            pair.sum("culvert_socket_refusals_total", &[("socket", "upstream")]) > 0
        });
    }
}

#[test]
fn connections_to_an_unknown_service_are_closed() {
    if needs::met("TCP to an unknown service", needs::AGENTS) {
        case(|plan| plan).expect_close();
    }
}

#[test]
fn connections_to_a_forbidden_service_are_closed() {
    if needs::met("TCP to a forbidden service", needs::AGENTS) {
        let upstream = Echo::new();
        case(|plan| plan.forbidden_service("bad", upstream.address, "")).expect_close();
    }
}

#[test]
fn connections_to_an_upstream_that_is_not_there_are_closed() {
    if needs::met("TCP to an absent upstream", needs::AGENTS) {
        case(|plan| plan.service("bad", ports::loopback(), "")).expect_close();
    }
}

/// Starts a pair of which `change` has spoilt the configuration of one end.
fn misconfigured(change: impl FnOnce(&Pair)) -> Pair {
    let (echo, ingress) = (Echo::new(), ports::loopback());
    let mut pair = Plan::default().service("echo", echo.address, "").forward("echo", ingress).prepare();
    change(&pair);
    pair.exit.start();
    pair.entry.start();
    pair
}

fn replace(agent: &culvert_tests::agent::Agent, from: &str, to: &str) {
    let text = std::fs::read_to_string(agent.config()).unwrap();
    assert!(text.contains(from));
    std::fs::write(agent.config(), text.replace(from, to)).unwrap();
}

/// A key that nobody has.
fn foreign_key() -> String {
    let folder = tempfile::tempdir().unwrap();
    keygen(&folder.path().join("key"))
}

#[test]
fn a_peer_with_a_key_that_the_exit_does_not_know_is_refused() {
    if !needs::met("unknown key", needs::AGENTS) {
        return;
    }
    let pair = misconfigured(|pair| replace(&pair.exit, pair.entry.key(), &foreign_key()));
    // The operator of the exit finds the key that was refused, the one of the entry why it may have been.
    pair.exit.wait_for_log(&[pair.entry.key()]);
    pair.exit.wait_for("the refusal is counted", |samples| {
        let steps = samples.by_label("culvert_gate_datagrams_total", "step");
        if steps.get("key").is_some_and(|count| *count > 0.0) { Ok(()) } else { Err(format!("{steps:?}")) }
    });
    pair.entry.wait_for_log(&["WARN", "key"]);
    assert_eq!(pair.sum("culvert_peer_connected", &[]), 0);
}

#[test]
fn an_exit_with_another_key_than_expected_is_refused() {
    if !needs::met("wrong key", needs::AGENTS) {
        return;
    }
    let pair = misconfigured(|pair| replace(&pair.entry, pair.exit.key(), &foreign_key()));
    pair.entry.wait_for_log(&["WARN", "key"]);
    assert_eq!(pair.sum("culvert_peer_connected", &[]), 0);
}

/// From now on a process may have so many files open; it may raise that itself.
fn limit_files(pid: u32, most: u64) {
    let arguments = ["--pid".to_owned(), pid.to_string(), format!("--nofile={most}:")];
    let status = Command::new("prlimit").args(arguments).status();
    assert!(status.is_ok_and(|status| status.success()), "cannot limit the files of {pid}");
}

#[test]
fn an_exit_without_descriptors_refuses_flows_and_goes_on_with_all_else() {
    if !needs::met("descriptors", needs::AGENTS) {
        return;
    }
    let Case { mut pair, good: mut known, _echo: echo, .. } = case(|plan| plan);
    let ingress = known.socket().peer_addr().unwrap();
    known.converse(3);
    let open = pair.exit.samples().count("culvert_process_open_fds", &[]);
    let pid = pair.exit.process().pid();
    let enough = std::fs::read_to_string(format!("/proc/{pid}/limits")).unwrap();
    let enough = enough.lines().find_map(|line| line.strip_prefix("Max open files")).unwrap();
    let enough: u64 = enough.split_whitespace().next().unwrap().parse().unwrap();
    limit_files(pid, open + 60);
    let mut clients: Vec<Client> = (1..100).map(|number| Client::new(number, ingress)).collect();
    clock::until("flows are refused for want of a socket", PATIENCE, || {
        clients.iter_mut().for_each(Client::send);
        let refused = pair.exit.samples().count("culvert_limit_reached_total", &[("limit", "sockets")]);
        if refused > 0 { Ok(()) } else { Err("none was refused") }
    });
    pair.exit.wait_for_log(&["WARN", "no socket to a service could be opened", "LimitNOFILE="]);
    assert!(pair.dropped("socket_open") > 0);
    // Flows that there were, the operator's requests, scrapes and new sessions have what they need.
    known.converse(20);
    let socket = pair.exit.folder().join("control");
    let status = culvert(&["status", "--json", "--socket", socket.to_str().unwrap()]);
    assert!(status.status.success(), "{status:?}");
    pair.entry.kill();
    pair.entry.start();
    pair.exit.wait_for_count("culvert_peer_connected", &[("peer", "entry")], 1);
    // With descriptors again, whoever asks is served.
    limit_files(pid, enough);
    let mut late = Client::new(1000, ingress);
    late.reach();
    late.converse(3);
    drop(echo);
}
