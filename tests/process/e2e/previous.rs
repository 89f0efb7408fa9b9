//! Agents of two versions: they carry each other's traffic, and each goes on from the files that the other one leaves. `tests/interop/previous`
//! builds the earlier version and runs this.

use std::{
    env,
    io::{Read, Write},
    net::{Shutdown, SocketAddr, TcpStream},
    path::{Path, PathBuf},
    thread,
    time::Duration,
};

use culvert_tests::{
    agent::{Agent, binary, keygen},
    client::Client,
    clock::{self, PATIENCE},
    needs,
    pair::Pair,
    place::Place,
    ports,
    random::Random,
    relay::Relay,
    upstream::Echo,
};
use serde_json::Value;

/// UDP clients and TCP connections in each direction: enough for both lanes and both workers.
const CLIENTS: u32 = 4;

/// Datagrams of a client in one conversation.
const DATAGRAMS: u32 = 20;

#[test]
#[ignore = "run by tests/interop/previous, which builds the previous version"]
fn the_previous_version_listens_and_the_present_one_dials() {
    let [previous, present] = programs();
    work_together(&previous, &present);
}

#[test]
#[ignore = "run by tests/interop/previous, which builds the previous version"]
fn the_present_version_listens_and_the_previous_one_dials() {
    let [previous, present] = programs();
    work_together(&present, &previous);
}

/// The program of the previous version, and that of the present one.
fn programs() -> [PathBuf; 2] {
    let previous =
        env::var_os("CULVERT_PREVIOUS_BIN").expect("tests/interop/previous names the previous version");
    [previous.into(), binary().to_owned()]
}

/// Traffic passes between the two programs, and goes on after each agent in turn has become one of the other program.
#[track_caller]
fn work_together(listener: &Path, dialler: &Path) {
    if !needs::met("two versions", needs::AGENTS) {
        return;
    }
    let mut case = Case::start(listener, dialler);
    case.converse_exactly();
    case.upgrade_exit(dialler);
    case.go_on();
    case.upgrade_entry(listener);
    case.go_on();
}

/// An exit and an entry with a service at either end, and a guest whom the exit was told of while it ran.
struct Case {
    pair: Pair,
    /// Between entry and exit.
    relay: Relay,
    _guest: Agent,
    /// Of the entry's ports, then of the exit's.
    clients: Vec<Client>,
    guest_client: Client,
    /// The TCP ports of the entry, the exit and the guest.
    ingress: [SocketAddr; 3],
    _echoes: [Echo; 2],
}

impl Case {
    #[track_caller]
    fn start(listener: &Path, dialler: &Path) -> Self {
        let mut exit = Agent::of(listener, "exit", &Place::Host);
        let mut entry = Agent::of(dialler, "entry", &Place::Host);
        let mut guest = Agent::of(dialler, "guest", &Place::Host);
        let echoes = [Echo::new(), Echo::new()];
        let (underlay, ingress) = (ports::loopback(), [(); 3].map(|()| ports::loopback()));
        let relay = Relay::new(underlay);
        let service = |name: &str, echo: &Echo| {
            format!("[[service]]\nname = \"{name}\"\nupstream = \"{}\"\n", echo.address)
        };
        // Both protocols of a port, and the peer with the service of the same name.
        let peer = |name: &str, key: &str, listen: SocketAddr, more: &str| {
            let forward = format!("listen = \"{listen}\"\npeer = \"{name}\"\nservice = \"{name}\"\n");
            format!(
                "[[udp]]\n{forward}[[tcp]]\n{forward}[[peer]]\nname = \"{name}\"\npublic_key = \"{key}\"\n\
                 queue.time = \"5s\"\n{more}"
            )
        };
        exit.configure(&format!(
            "[transport]\nlisten = [\"{underlay}\"]\nworkers = 2\n{}{}",
            service("exit", &echoes[0]),
            peer("entry", entry.key(), ingress[1], "services = [\"exit\"]\n"),
        ));
        let dialled = |address| format!("endpoints = [\"{address}\"]\n");
        entry.configure(&format!(
            "[transport]\nlisten = [\"{}\"]\nworkers = 2\n{}{}services = [\"entry\"]\n",
            ports::loopback(),
            service("entry", &echoes[1]),
            peer("exit", exit.key(), ingress[0], &dialled(relay.address)),
        ));
        guest.configure(&peer("exit", exit.key(), ingress[2], &dialled(underlay)));
        exit.start();
        entry.start();
        let added = exit.ask(&["peer", "add", "guest", guest.key(), "--service", "exit"]);
        assert_eq!(added, "added guest: effective now");
        guest.start();
        let spare = keygen(&entry.folder().join("spare.key"));
        let added = entry.ask(&["peer", "add", "spare", &spare]);
        assert_eq!(added, "added spare: effective now");
        let clients =
            (0..2 * CLIENTS).map(|number| Client::new(number, ingress[(number / CLIENTS) as usize]));
        Self {
            clients: clients.collect(),
            guest_client: Client::new(2 * CLIENTS, ingress[2]),
            pair: Pair { entry, exit, underlay },
            relay,
            _guest: guest,
            ingress,
            _echoes: echoes,
        }
    }

    /// Everything passes for the first time, and the accounts say so to the datagram.
    #[track_caller]
    fn converse_exactly(&mut self) {
        self.wait_for_lanes();
        self.clients.iter_mut().for_each(|client| client.converse(DATAGRAMS));
        self.guest_client.reach();
        self.compare_streams();
        let total = u64::from(2 * CLIENTS * DATAGRAMS);
        self.pair.wait_for_accounts([(total, total); 4]);
    }

    /// The same clients get answers again.
    #[track_caller]
    fn go_on(&mut self) {
        self.wait_for_lanes();
        for client in &mut self.clients {
            client.reach();
            client.converse(DATAGRAMS);
        }
        self.guest_client.reach();
        self.compare_streams();
        self.pair.accounts();
    }

    /// The listener goes on as another program, which knows the peer of the state file and the knocks that were used.
    #[track_caller]
    fn upgrade_exit(&mut self, program: &Path) {
        let exit = &mut self.pair.exit;
        let known = peers(exit);
        assert!(known.iter().any(|peer| peer.starts_with(r#"["guest","state","#)), "{known:?}");
        // From now on nobody but the test sends what comes from the entry.
        self.relay.close();
        let initials = self.relay.initials().concat();
        assert!(!initials.is_empty());
        upgrade(exit, program);
        assert_eq!(peers(exit), known);
        let before = self.relay.returned();
        initials.iter().for_each(|initial| self.relay.repeat(initial));
        exit.wait_for("the knocks are refused as used", |samples| {
            match samples.count("culvert_gate_datagrams_total", &[("step", "used")]) {
                used if used >= initials.len() as u64 => Ok(()),
                used => Err(format!("{used} of {}", initials.len())),
            }
        });
        // An answer would have come by then.
        thread::sleep(Duration::from_millis(300));
        assert_eq!(self.relay.returned(), before);
        self.relay.open();
    }

    /// The dialler goes on as another program.
    #[track_caller]
    fn upgrade_entry(&mut self, program: &Path) {
        let entry = &mut self.pair.entry;
        let known = peers(entry);
        assert!(known.iter().any(|peer| peer.starts_with(r#"["spare","state","#)), "{known:?}");
        upgrade(entry, program);
        assert_eq!(peers(entry), known);
    }

    /// Waits until both agents say that two lanes carry payloads to the other.
    #[track_caller]
    fn wait_for_lanes(&self) {
        self.wait_for("two lanes are up", |status| {
            let lanes = status["lanes"].as_array().unwrap().iter();
            let up = lanes.filter(|lane| lane["state"] == "up").map(|lane| &lane["index"]);
            up.eq([0, 1].iter()) && status["lanes_up"] == 2 && status["mode"] == "lanes"
        });
    }

    /// TCP connections over all forwards bring back what was sent on each, at first on the control connections, then on stream
    /// connections too.
    #[track_caller]
    fn compare_streams(&self) {
        self.compare_streams_at_once();
        self.wait_for("a stream connection is up", |status| {
            status["stream_connections"].as_array().unwrap().iter().any(|stream| stream["state"] == "up")
        });
        self.compare_streams_at_once();
    }

    /// Waits until what either agent says of the other fits.
    #[track_caller]
    fn wait_for(&self, what: &str, fits: impl Fn(&Value) -> bool) {
        for (peer, agent) in self.pair.ends() {
            clock::until(what, PATIENCE, || {
                let answer: Value = serde_json::from_str(&agent.ask(&["status", "--json"])).unwrap();
                let peers = answer["status"]["peers"].as_array().unwrap();
                let status = peers.iter().find(|status| status["name"] == peer).unwrap();
                if fits(status) { Ok(()) } else { Err(status.to_string()) }
            });
        }
    }

    fn compare_streams_at_once(&self) {
        thread::scope(|scope| {
            for (target, number) in self.ingress.into_iter().zip(0..) {
                for connection in 0..CLIENTS {
                    scope.spawn(move || compare_stream(target, CLIENTS * number + connection));
                }
            }
        });
    }
}

fn compare_stream(target: SocketAddr, number: u32) {
    let bytes = Random::new(number.into()).bytes(60_000);
    let mut stream = TcpStream::connect(target).unwrap();
    stream.set_read_timeout(Some(PATIENCE)).unwrap();
    stream.write_all(&bytes).unwrap();
    // The upstream answers once it has seen the end.
    stream.shutdown(Shutdown::Write).unwrap();
    let mut answer = Vec::new();
    stream.read_to_end(&mut answer).unwrap();
    assert!(answer == bytes, "connection {number} got {} other bytes", answer.len());
}

/// Ends an agent as a package does that brings another version, and starts that one on the same files.
#[track_caller]
fn upgrade(agent: &mut Agent, program: &Path) {
    assert_eq!(agent.terminate().code(), Some(0));
    agent.upgrade(program);
    agent.start();
    let status: Value = serde_json::from_str(&agent.ask(&["status", "--json"])).unwrap();
    assert_eq!(status["status"]["public_key"], agent.key());
}

/// The peers that an agent lists, each as a line of JSON: its name, where it is from, and what it may do. Both versions ask, as between
/// an update and the restart.
#[track_caller]
fn peers(agent: &Agent) -> Vec<String> {
    let [previous, present] = programs().map(|program| peers_by(&program, agent));
    assert_eq!(previous, present);
    present
}

#[track_caller]
fn peers_by(program: &Path, agent: &Agent) -> Vec<String> {
    let answer: Value = serde_json::from_str(&agent.ask_by(program, &["peer", "list", "--json"])).unwrap();
    assert_eq!(answer["running"], true);
    let members = ["name", "origin", "public_keys", "endpoints", "lanes", "services", "allowed_ips"];
    let line = |peer: &Value| Value::from_iter(members.map(|member| peer[member].clone())).to_string();
    answer["peers"].as_array().unwrap().iter().map(line).collect()
}
