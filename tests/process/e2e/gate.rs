//! Who is let in, and how often: replays after a restart, keys that change, peers that come and go, open mode, two that
//! dial each other.

use std::{
    fs,
    net::{Ipv4Addr, SocketAddr, UdpSocket},
    sync::atomic::{AtomicBool, Ordering},
    thread,
    time::Duration,
};

use culvert_tests::{
    agent::{Agent, culvert, keygen},
    client::Client,
    clock::{self, PATIENCE},
    http::Samples,
    needs,
    pair::{Pair, Plan},
    place::Place,
    ports,
    process::{StopOnDrop, text},
    relay::{Forwarded, Relay},
    upstream::Echo,
};
use serde_json::Value;

#[track_caller]
fn replace(agent: &Agent, from: &str, to: &str) {
    let text = fs::read_to_string(agent.config()).unwrap();
    assert!(text.contains(from), "{from}: {text}");
    fs::write(agent.config(), text.replace(from, to)).unwrap();
}

/// Runs a command about an agent's daemon; what it printed.
#[track_caller]
fn ask(agent: &Agent, args: &[&str]) -> String {
    let output = culvert(&[args, &["--config", agent.config().to_str().unwrap()]].concat());
    assert!(output.status.success(), "{args:?}: {}", text(&output.stderr));
    text(&output.stdout).trim().to_owned()
}

#[track_caller]
fn status(agent: &Agent) -> Value {
    let status: Value = serde_json::from_str(&ask(agent, &["status", "--json"])).unwrap();
    status["status"].clone()
}

/// Waits until an agent's status fits.
#[track_caller]
fn wait_for_status(agent: &Agent, what: &str, fits: impl Fn(&Value) -> bool) -> Value {
    clock::until(what, PATIENCE, || {
        let status = status(agent);
        if fits(&status) { Ok(status) } else { Err(status.to_string()) }
    })
}

fn refused_at(samples: &Samples, step: &str) -> u64 {
    samples.count("culvert_gate_datagrams_total", &[("step", step)])
}

/// A pair that a relay stands between.
struct Relayed {
    pair: Pair,
    relay: Relay,
    client: Client,
    _echo: Echo,
}

impl Relayed {
    fn new() -> Self {
        let (echo, ingress) = (Echo::new(), ports::loopback());
        let plan = Plan::default().service("echo", echo.address, "").forward("echo", ingress);
        let mut pair = plan.prepare();
        let relay = Relay::new(pair.underlay);
        replace(&pair.entry, &pair.underlay.to_string(), &relay.address.to_string());
        pair.exit.start();
        pair.entry.start();
        pair.wait_for_connection();
        Self { pair, relay, client: Client::new(0, ingress), _echo: echo }
    }

    /// Sends all of `datagrams` to the exit again, from the same sockets and from another one. Once `counted` says that
    /// the gate has seen them, not a byte has come back.
    #[track_caller]
    fn replay(&self, datagrams: &[Forwarded], counted: impl Fn(&Samples) -> Result<(), String>) {
        let stranger = UdpSocket::bind((Ipv4Addr::LOCALHOST, 0)).unwrap();
        let before = self.relay.returned();
        for datagram in datagrams {
            self.relay.repeat(datagram);
            stranger.send_to(&datagram.payload, self.pair.underlay).unwrap();
        }
        self.pair.exit.wait_for("the replays are counted", counted);
        stranger.set_read_timeout(Some(Duration::from_millis(300))).unwrap();
        let answer = stranger.recv_from(&mut [0; 2000]);
        assert!(answer.is_err(), "{answer:?}");
        assert_eq!(self.relay.returned(), before, "to the sockets that the entry had used");
    }
}

fn exactly(samples: &Samples, expected: &[(&str, usize)]) -> Result<(), String> {
    let counts: Vec<(&str, u64)> =
        expected.iter().map(|(step, _)| (*step, refused_at(samples, step))).collect();
    let fits = expected.iter().zip(&counts).all(|((_, expected), (_, count))| *expected as u64 == *count);
    if fits { Ok(()) } else { Err(format!("{counts:?} instead of {expected:?}")) }
}

#[test]
fn knocks_of_before_a_kill_open_nothing_after_it() {
    if !needs::met("replay after kill -9", needs::AGENTS) {
        return;
    }
    let mut case = Relayed::new();
    case.client.converse(3);
    // Before the exit is gone: what the entry sends to nobody is no knock that the exit has seen.
    case.relay.close();
    case.pair.exit.kill();
    let initials = case.relay.initials().concat();
    assert!(!initials.is_empty());
    case.pair.exit.start();
    case.replay(&initials, |samples| exactly(samples, &[("used", 2 * initials.len()), ("admitted", 0)]));
    case.relay.open();
    case.client.reach();
    case.client.converse(20);
    case.pair.accounts();
}

#[test]
fn knocks_of_before_the_state_was_lost_open_nothing_either() {
    if !needs::met("replay after the state was lost", needs::AGENTS) {
        return;
    }
    let mut case = Relayed::new();
    case.client.converse(3);
    case.relay.close();
    case.pair.exit.kill();
    let [first, later] = case.relay.initials();
    assert!(!first.is_empty());
    fs::remove_dir_all(case.pair.exit.folder().join("state")).unwrap();
    // Knocks count in whole seconds, and those of the second of a start are trusted.
    let killed = clock::unix_seconds();
    clock::until("the next second", PATIENCE, || {
        if clock::unix_seconds() > killed { Ok(()) } else { Err("not yet") }
    });
    case.pair.exit.start();
    // What went to a connection ID of the exit's has no proof that holds without the table.
    let expected = [("clock", 2 * first.len()), ("mac", 2 * later.len()), ("admitted", 0)];
    case.replay(&[first, later].concat(), |samples| exactly(samples, &expected));
    case.pair.exit.wait_for_log(&["handshake refused", "older than this process"]);
    case.relay.open();
    case.client.reach();
    case.client.converse(20);
    case.pair.accounts();
}

#[test]
fn an_exit_with_a_new_key_is_found_by_who_lists_both() {
    if !needs::met("key rotation", needs::AGENTS) {
        return;
    }
    let (echo, ingress) = (Echo::new(), ports::loopback());
    let mut pair = Plan::default().service("echo", echo.address, "").forward("echo", ingress).prepare();
    let file = pair.exit.folder().join("new.key");
    let (old, new) = (format!("\"{}\"", pair.exit.key()), keygen(&file));
    replace(&pair.entry, &old, &format!("[{old}, \"{new}\"]"));
    pair.exit.start();
    pair.entry.start();
    pair.wait_for_connection();
    let mut client = Client::new(0, ingress);
    client.converse(3);
    fs::rename(&file, pair.exit.folder().join("identity.key")).unwrap();
    assert_eq!(pair.exit.terminate().code(), Some(0));
    pair.exit.start();
    assert_eq!(status(&pair.exit)["public_key"], new.as_str());
    client.reach();
    client.converse(20);
    // What names only the old key does not find it.
    replace(&pair.entry, &format!("[{old}, \"{new}\"]"), &old);
    assert_eq!(pair.entry.terminate().code(), Some(0));
    pair.entry.start();
    client.send();
    pair.entry.wait_for_log(&["WARN", "could not connect", "(key)"]);
    assert_eq!(pair.sum("culvert_peer_connected", &[]), 0);
}

/// An entry without a peer, and an exit with a service and without a peer.
struct Apart {
    entry: Agent,
    exit: Agent,
    echo: Echo,
}

impl Apart {
    fn new(exit_more: &str) -> Self {
        let (entry, exit, echo) =
            (Agent::new("entry", &Place::Host), Agent::new("exit", &Place::Host), Echo::new());
        entry.configure(&format!("transport.listen = [\"{}\"]\n", ports::loopback()));
        exit.configure(&format!(
            "transport.listen = [\"{}\"]\n[[service]]\nname = \"echo\"\nupstream = \"{}\"\n{exit_more}",
            ports::loopback(),
            echo.address
        ));
        Self { entry, exit, echo }
    }

    #[track_caller]
    fn wait_for_connections(&self, count: u64) {
        for agent in [&self.entry, &self.exit] {
            agent.wait_for_count("culvert_peer_connected", &[], count);
        }
    }

    /// Ports at the entry for services of the peer "exit", for its next start.
    fn forwards(&self, forwards: &[(&str, SocketAddr)]) {
        let section = |(service, listen): &(&str, SocketAddr)| {
            format!("[[udp]]\nlisten = \"{listen}\"\npeer = \"exit\"\nservice = \"{service}\"\n")
        };
        self.entry.configure(&forwards.iter().map(section).collect::<String>());
    }
}

#[test]
fn a_link_and_a_key_are_all_it_takes_and_a_removed_key_ends_it_at_once() {
    if !needs::met("link, add, remove", needs::AGENTS) {
        return;
    }
    let mut apart = Apart::new("");
    apart.exit.start();
    apart.entry.start();
    let link = ask(&apart.exit, &["link"]);
    let key = apart.entry.key().to_owned();
    ask(&apart.exit, &["peer", "add", "entry", &key, "--service", "echo"]);
    assert_eq!(ask(&apart.entry, &["peer", "add", "exit", &link]), "added exit: effective now");
    apart.wait_for_connections(1);

    // Ports are opened when the agent starts.
    let ingress = ports::loopback();
    apart.forwards(&[("echo", ingress)]);
    assert_eq!(apart.entry.terminate().code(), Some(0));
    apart.entry.start();
    let mut client = Client::new(0, ingress);
    client.reach();
    let stop = AtomicBool::new(false);
    thread::scope(|scope| {
        let _stop = StopOnDrop(&stop);
        scope.spawn(|| {
            let mut sender = Client::new(1, ingress);
            while !stop.load(Ordering::Relaxed) {
                sender.send();
                sender.receive_numbers(Duration::from_millis(1));
            }
        });
        removed_under_traffic(&apart, &key);
        ask(&apart.exit, &["peer", "add", "entry", &key, "--service", "echo"]);
        let arrived = apart.echo.arrivals().len();
        clock::until("traffic flows again", PATIENCE, || {
            if apart.echo.arrivals().len() > arrived + 100 { Ok(()) } else { Err("no") }
        });
    });
    client.reach();
    client.converse(20);
}

/// Removes the entry at the exit while traffic flows; what both sides say about it.
fn removed_under_traffic(apart: &Apart, key: &str) {
    let Apart { entry, exit, echo } = apart;
    let before = echo.arrivals().len();
    clock::until("traffic flows", PATIENCE, || {
        if echo.arrivals().len() > before + 100 { Ok(()) } else { Err("no") }
    });
    ask(exit, &["peer", "remove", "entry"]);
    // QUIC's idle timeout would take 30 s.
    clock::until("the entry was told", Duration::from_secs(10), || {
        match entry.samples().count("culvert_peer_connected", &[]) {
            0 => Ok(()),
            connections => Err(format!("{connections} connections")),
        }
    });
    // The exit has shut it out before it answered the command: what arrives later is dropped. What it delivered before has been
    // read once this one is answered, which comes behind it.
    Client::new(2, echo.address).echo(b"behind it");
    let arrived = echo.arrivals().len();
    let dropped = || entry.samples().sum("culvert_datagrams_dropped_total", &[]);
    let before = dropped();
    entry.wait_for("traffic goes on and is dropped", |_| {
        let count = dropped() - before;
        if count > 100.0 { Ok(()) } else { Err(format!("{count} dropped")) }
    });
    assert_eq!(echo.arrivals().len(), arrived, "nothing arrives any more");

    let there = wait_for_status(exit, "the exit names the key that it refuses", |status| {
        status["refusals"]
            .as_array()
            .is_some_and(|list| list.iter().any(|refusal| refusal["public_key"] == key))
    });
    assert!(there["peers"].as_array().unwrap().is_empty(), "{there}");
    assert!(there["gate"]["key"].as_u64() > Some(0), "{there}");
    let here = wait_for_status(entry, "the entry says what it can be", |status| {
        let error = &status["peers"][0]["last_error"];
        let causes: Vec<&str> =
            error["likely_causes"].as_array().into_iter().flatten().filter_map(Value::as_str).collect();
        ["(clock)", "(key)", "(allowlist)", "(path)"]
            .iter()
            .all(|cause| causes.iter().any(|line| line.contains(cause)))
    });
    assert_eq!(here["peers"][0]["state"], "dialling", "{here}");
    entry.wait_for_log(&["key", "removed"]);
}

#[test]
fn in_open_mode_whoever_has_the_link_gets_what_is_granted_to_all() {
    if !needs::met("open mode", needs::AGENTS) {
        return;
    }
    let hidden = Echo::new();
    let service = format!("[[service]]\nname = \"hidden\"\nupstream = \"{}\"\n", hidden.address);
    let mut apart = Apart::new(&format!("{service}[access]\nmode = \"open\"\nservices = [\"echo\"]\n"));
    apart.exit.start();
    let link = ask(&apart.exit, &["link"]);
    ask(&apart.entry, &["peer", "add", "exit", &link]);
    let (open, closed) = (ports::loopback(), ports::loopback());
    apart.forwards(&[("echo", open), ("hidden", closed)]);
    apart.entry.start();
    apart.wait_for_connections(1);
    let mut client = Client::new(0, open);
    client.reach();
    client.converse(20);
    let mut refused = Client::new(1, closed);
    clock::until("what is not granted is dropped", PATIENCE, || {
        refused.send();
        let samples = apart.entry.samples();
        let dropped = samples.dropped("not_allowed") + samples.dropped("unknown_service");
        if dropped > 0 { Ok(()) } else { Err("nothing was") }
    });
    assert!(hidden.arrivals().is_empty());
    client.converse(20);
    let there = status(&apart.exit);
    assert_eq!(there["peers"].as_array().unwrap().len(), 1, "{there}");
    assert_eq!(there["peers"][0]["origin"], "open", "{there}");
}

#[test]
fn two_that_dial_each_other_keep_one_connection() {
    if !needs::met("both dial", needs::AGENTS) {
        return;
    }
    let echoes = [Echo::new(), Echo::new()];
    let [listen, ingress] = [(); 2].map(|()| [ports::loopback(), ports::loopback()]);
    // Each reaches the other through a relay: they open at once, so that both dial at the same time.
    let relays = listen.map(Relay::new);
    let mut agents = ["left", "right"].map(|name| Agent::new(name, &Place::Host));
    for (place, other) in [(0, 1), (1, 0)] {
        agents[place].configure(&format!(
            "transport.listen = [\"{}\"]\n[[service]]\nname = \"echo\"\nupstream = \"{}\"\n\
             [[udp]]\nlisten = \"{}\"\npeer = \"other\"\nservice = \"echo\"\n\
             [[peer]]\nname = \"other\"\npublic_key = \"{}\"\nendpoints = [\"{}\"]\nservices = [\"echo\"]\n\
             queue.time = \"5s\"\n",
            listen[place],
            echoes[place].address,
            ingress[place],
            agents[other].key(),
            relays[other].address,
        ));
    }
    relays.iter().for_each(Relay::close);
    agents.iter_mut().for_each(Agent::start);
    let mut clients = ingress.map(|address| Client::new(0, address));
    // What waits makes both dial.
    clients.iter_mut().for_each(Client::send);
    for agent in &agents {
        agent.wait_for("it dials", |samples| {
            let dialled = samples.count("culvert_handshakes_total", &[("outcome", "dialled")]);
            if dialled > 0 { Ok(()) } else { Err("not yet".to_owned()) }
        });
    }
    relays.iter().for_each(Relay::open);
    clients.iter_mut().for_each(Client::reach);
    for agent in &agents {
        agent.wait_for_count("culvert_peer_connected", &[("peer", "other")], 1);
        agent.wait_for_count("culvert_connections", &[], 1);
    }
    let established = || {
        let count =
            |agent: &Agent| agent.samples().count("culvert_handshakes_total", &[("outcome", "established")]);
        agents.iter().map(count).collect::<Vec<_>>()
    };
    let before = established();
    for _ in 0..50 {
        clients.iter_mut().for_each(|client| client.converse(1));
    }
    assert_eq!(established(), before, "it stays that one");
    let dialled = agents.each_ref().map(|agent| status(agent)["peers"][0]["state"].clone());
    assert_eq!(dialled, ["connected", "connected"]);
}
