//! Peers where UDP does not pass: their packets go over TCP, through the exit's web server, and others on the way (`fronts.rs`).
//! What attackers may do to that is in `attacks.rs`.

#![expect(clippy::unwrap_used, reason = "a test that cannot go on has failed")]

use std::{
    fs,
    io::{Read, Write},
    net::{SocketAddr, TcpListener, TcpStream},
    path::Path,
    process::Command,
    thread,
    time::Duration,
};

use culvert_tests::{
    agent::Agent,
    client::Client,
    clock::PATIENCE,
    firewall::Blockade,
    needs::{self, Need},
    place::{Cable, Place},
    ports, probe,
    process::{run, text},
    upstream::Echo,
};

mod attacks;
mod fronts;

const NEEDS: &[Need] = &[
    Need::Root,
    Need::Tun,
    Need::Tool("setpriv", "util-linux"),
    Need::Tool("ip", "iproute2"),
    Need::Tool("nft", "nftables"),
    Need::Tool("ping", "iputils-ping"),
    Need::Tool("openssl", "openssl"),
];

/// All UDP between the two, in the words of nftables.
const UDP: &str = "ip saddr 192.0.2.0/24 meta l4proto udp";

/// The bytes that cross a forward in each direction: more than any queue on the way holds.
const BYTES: usize = 4 << 20;

/// Writes `ca.pem`, and `cert.pem` and `key.pem` of a server at the second end of a cable.
#[track_caller]
fn certificates(folder: &Path) {
    let config = folder.join("openssl.cnf");
    fs::write(&config, "[req]\ndistinguished_name = name\n[name]\n").unwrap();
    let make = |name: &str, files: [&str; 2], extensions: &[&str], issuer: &[&str]| {
        let mut command = Command::new("openssl");
        command.current_dir(folder).args(["req", "-x509", "-nodes", "-days", "60", "-config"]).arg(&config);
        command.args([
            "-newkey",
            "ec",
            "-pkeyopt",
            "ec_paramgen_curve:P-256",
            "-subj",
            &format!("/CN={name}"),
        ]);
        command.args(["-out", files[0], "-keyout", files[1]]).args(issuer);
        command.args(extensions.iter().flat_map(|extension| ["-addext", *extension]));
        let output = run(&mut command, PATIENCE);
        assert!(output.status.success(), "{}", text(&output.stderr));
    };
    make("authority", ["ca.pem", "ca.key"], &["basicConstraints=critical,CA:TRUE"], &[]);
    let names = format!("subjectAltName=DNS:gw.example.net,IP:{}", Cable::SECOND[0]);
    let server = [&*names, "basicConstraints=critical,CA:FALSE"];
    make("server", ["cert.pem", "key.pem"], &server, &["-CA", "ca.pem", "-CAkey", "ca.key"]);
}

/// An entry and an exit with a cable between them, and what crosses it.
struct Bed {
    cable: Cable,
    entry: Agent,
    exit: Agent,
    echo: Echo,
    /// Where the exit listens, on both UDP and TCP.
    at: SocketAddr,
    /// The entry's ports that lead to the two.
    forwards: [SocketAddr; 2],
}

impl Bed {
    /// With more lines of the entry's peer; nothing runs yet.
    fn new(endpoints: &[&str], lines: &str) -> Self {
        Self::with(endpoints, lines, "listen = [\"AT\"]")
    }

    /// The same, with more lines of the exit's web server.
    fn with(endpoints: &[&str], lines: &str, web: &str) -> Self {
        let cable = Cable::new();
        let [here, there] = cable.places();
        let (entry, exit) = (Agent::new("entry", &here), Agent::new("exit", &there));
        certificates(exit.folder());
        let at = SocketAddr::new(Cable::SECOND[0].parse().unwrap(), ports::free());
        let echo = there.enter(Echo::new);
        let tcp = echo_of_streams(&there);
        let forwards = [ports::loopback(), ports::loopback()];
        exit.configure(&format!(
            "[transport]\nlisten = [\"{at}\"]\nworkers = 2\n[tun]\naddress = [\"10.9.0.2/24\"]\n\
             [http]\ncertificate_file = \"cert.pem\"\nkey_file = \"key.pem\"\nnames = [\"gw.example.net\"]\n\
             {}\n\
             [[service]]\nname = \"udp\"\nupstream = \"{}\"\n[[service]]\nname = \"tcp\"\nupstream = \"{tcp}\"\n\
             [[peer]]\nname = \"entry\"\npublic_key = \"{}\"\nservices = [\"udp\", \"tcp\"]\n\
             allowed_ips = [\"10.9.0.1\"]\n",
            web.replace("AT", &at.to_string()),
            echo.address,
            entry.key()
        ));
        let endpoints: Vec<String> =
            endpoints.iter().map(|endpoint| endpoint.replace("AT", &at.to_string())).collect();
        let ca = exit.folder().join("ca.pem");
        entry.configure(&format!(
            "[transport]\nworkers = 2\n[tun]\naddress = [\"10.9.0.1/24\"]\n\
             [[peer]]\nname = \"exit\"\npublic_key = \"{}\"\nendpoints = {endpoints:?}\n\
             ca_file = \"{}\"\nallowed_ips = [\"10.9.0.2\"]\n{lines}\n\
             [[udp]]\nlisten = \"{}\"\npeer = \"exit\"\nservice = \"udp\"\n\
             [[tcp]]\nlisten = \"{}\"\npeer = \"exit\"\nservice = \"tcp\"\n",
            exit.key(),
            ca.display(),
            forwards[0],
            forwards[1]
        ));
        Self { cable, entry, exit, echo, at, forwards }
    }

    fn block(&self) -> [Blockade; 2] {
        self.cable.places().map(|place| Blockade::new(&place, UDP))
    }

    #[track_caller]
    fn start(&mut self) {
        self.exit.start();
        self.entry.start();
        for (agent, peer) in [(&self.entry, "exit"), (&self.exit, "entry")] {
            agent.wait_for_count("culvert_peer_connected", &[("peer", peer)], 1);
        }
    }

    /// Carriers that the exit's web server has opened.
    fn carriers(&self) -> u64 {
        let labels = [("version", "http1"), ("outcome", "carrier")];
        self.exit.samples().count("culvert_http_tcp_requests_total", &labels)
    }

    /// Waits until both ends show that TCP carries their packets, or that UDP does.
    #[track_caller]
    fn wait_for_way(&self, over_tcp: bool) {
        for (agent, peer) in [(&self.entry, "exit"), (&self.exit, "entry")] {
            agent.wait_for_count("culvert_peer_over_tcp", &[("peer", peer)], over_tcp.into());
        }
    }

    /// Has IP packets, a flow and a forward cross.
    #[track_caller]
    fn crosses(&self) {
        let [here, _] = self.cable.places();
        probe::reaches(&here, "10.9.0.2".parse().unwrap(), &[]);
        let mut client = here.enter(|| Client::new(1, self.forwards[0]));
        client.reach();
        client.converse(20);
        assert!(!self.echo.arrivals().is_empty());
        exchange(&self.forward());
    }

    /// IP packets of the entry that are to be repaired, and those of them that have numbers.
    fn repaired(&self) -> [u64; 2] {
        ["culvert_repair_payloads_total", "culvert_repair_numbered_total"]
            .map(|name| self.entry.samples().count(name, &[("peer", "exit")]))
    }

    /// Opens a forward.
    #[track_caller]
    fn forward(&self) -> TcpStream {
        let [here, _] = self.cable.places();
        here.enter(|| TcpStream::connect(self.forwards[1])).unwrap()
    }

    /// Sessions that the entry has had with the exit.
    fn sessions(&self) -> u64 {
        self.entry.samples().count("culvert_handshakes_total", &[("outcome", "established")])
    }
}

/// What an agent shows of its one peer.
#[track_caller]
fn status_of_peer(agent: &Agent) -> serde_json::Value {
    let status: serde_json::Value = serde_json::from_str(&agent.ask(&["status", "--json"])).unwrap();
    status["status"]["peers"][0].clone()
}

/// A service that returns what it gets.
fn echo_of_streams(place: &Place) -> SocketAddr {
    let listener = place.enter(|| TcpListener::bind("127.0.0.1:0")).unwrap();
    let address = listener.local_addr().unwrap();
    thread::spawn(move || {
        for stream in listener.incoming() {
            let mut stream = stream.unwrap();
            thread::spawn(move || {
                let mut back = stream.try_clone().unwrap();
                // A connection that the test has ended.
                drop(std::io::copy(&mut stream, &mut back));
            });
        }
    });
    address
}

/// Sends bytes, and has the same ones come back.
#[track_caller]
fn exchange(mut stream: &TcpStream) {
    stream.set_read_timeout(Some(Duration::from_secs(60))).unwrap();
    let sent: Vec<u8> = (0..BYTES).map(|at| (at * 31 % 251) as u8).collect();
    let (mut sender, bytes) = (stream.try_clone().unwrap(), sent.clone());
    let sends = thread::spawn(move || sender.write_all(&bytes).unwrap());
    let mut received = vec![0; BYTES];
    stream.read_exact(&mut received).unwrap();
    sends.join().unwrap();
    assert!(received == sent, "other bytes came back");
}

#[test]
fn a_peer_that_is_always_reached_over_tcp_sends_no_udp() {
    if !needs::met("carrier: always", NEEDS) {
        return;
    }
    let mut bed = Bed::new(&["https://AT/"], "carrier = \"always\"\nrepair = \"fec\"\n");
    let blockades = bed.block();
    bed.start();
    bed.crosses();
    bed.wait_for_way(true);
    let [repaired, numbered] = bed.repaired();
    assert!(repaired > 0 && numbered == 0, "TCP repairs what is lost: {numbered} of {repaired}");
    // The exit shows the client's address of TCP, and sends nothing there over UDP.
    let peer = status_of_peer(&bed.exit);
    assert!(peer["address"].as_str().unwrap().starts_with(&format!("{}:", Cable::FIRST[0])), "{peer}");
    assert_eq!([&peer["way"]["over"], &peer["way"]["because"]], ["carrier", "peer_chose"], "{peer}");
    assert_eq!(status_of_peer(&bed.entry)["way"]["because"], "dialled");
    assert!(bed.carriers() >= 2, "a control connection and a lane at least");
    for blockade in blockades {
        assert_eq!(blockade.discarded(), 0);
    }
}

#[test]
fn a_peer_whose_udp_is_dropped_is_reached_over_tcp() {
    if !needs::met("carrier: fallback", NEEDS) {
        return;
    }
    let mut bed = Bed::new(&["https://AT/", "AT"], "");
    let [_here, there] = bed.block();
    bed.start();
    bed.crosses();
    assert!(there.discarded() > 0, "UDP was tried first");
}

#[test]
fn a_peer_that_udp_reaches_opens_no_carrier() {
    if !needs::met("carrier: not needed", NEEDS) {
        return;
    }
    let mut bed = Bed::new(&["https://AT/", "AT"], "");
    bed.start();
    bed.crosses();
    assert_eq!(bed.carriers(), 0);
    bed.wait_for_way(false);
}

#[test]
fn a_live_session_goes_over_tcp_while_udp_is_dropped_and_comes_back() {
    if !needs::met("carrier: a live session", NEEDS) {
        return;
    }
    let mut bed = Bed::new(&["https://AT/", "AT"], "");
    bed.start();
    let [here, _] = bed.cable.places();
    let mut client = here.enter(|| Client::new(1, bed.forwards[0]));
    client.reach();
    client.converse(20);
    let forward = bed.forward();
    exchange(&forward);
    let (carriers, sessions) = (bed.carriers(), bed.sessions());
    assert_eq!(carriers, 0);

    let blockades = bed.block();
    // The forward was opened before, and goes on.
    exchange(&forward);
    probe::reaches(&here, "10.9.0.2".parse().unwrap(), &[]);
    client.reach();
    client.converse(20);
    assert!(bed.carriers() >= 2, "the forward's connection, and a lane");
    bed.wait_for_way(true);
    drop(blockades);

    exchange(&forward);
    client.converse(20);
    bed.entry.wait_for_log(&["UDP passes again"]);
    client.converse(20);
    bed.wait_for_way(false);
    // Now TCP between the two is dropped: what goes on goes over UDP.
    let tcp = bed.cable.places().map(|place| Blockade::new(&place, "ip saddr 192.0.2.0/24 meta l4proto tcp"));
    exchange(&forward);
    probe::reaches(&here, "10.9.0.2".parse().unwrap(), &[]);
    client.reach();
    client.converse(20);
    exchange(&bed.forward());
    drop(tcp);
    assert_eq!(bed.sessions(), sessions, "it is the same session");
}
