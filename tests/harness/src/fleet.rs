//! Exits behind one address, and entries before it, in network namespaces.
//!
//! ```text
//!  entry 1 ─┐                    ┌─ exit 1 ─ 10.77.0.1
//!  entry 2 ─┤ wan  balancer  lan ├─ exit 2 ─ 10.77.0.1
//!  entry 3 ─┘                    └─ exit 3 ─ 10.77.0.1
//! ```
//!
//! The balancer has the address, the ruleset that is shipped and `culvert fleet`. The first and the third entry speak IPv4 with
//! it, the second IPv6. The host behind each exit says by which exit a datagram came.

use std::{
    collections::BTreeSet,
    fs,
    net::{IpAddr, Ipv4Addr, SocketAddr, SocketAddrV4, UdpSocket},
    path::{Path, PathBuf},
    process::{self, Command},
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicU8, AtomicU32, Ordering},
    },
    thread::{self, JoinHandle},
    time::Duration,
};

use socket2::SockRef;

use crate::{
    agent::{Agent, binary},
    clock,
    exits::{BUFFER, Span, exchange},
    place::Place,
    process::{Running, run, text},
};

/// How many exits there are, and how many entries.
pub const COUNT: u8 = 3;

/// The host behind each exit.
const TARGET: SocketAddr = SocketAddr::V4(SocketAddrV4::new(Ipv4Addr::new(10, 77, 0, 1), 7_777));

/// The time between two datagrams of a flow.
pub const EVERY: Duration = Duration::from_millis(2);

/// How often `culvert fleet` asks an exit unless the operator says otherwise, and how long it waits for the answer.
pub const INTERVAL: Duration = Duration::from_millis(150);

/// The fleet and its entries. Dropping it ends the agents and removes the namespaces.
pub struct Fleet {
    pub entries: Vec<Agent>,
    pub exits: Vec<Agent>,
    pub balancer: Place,
    checker: Option<Running>,
    echoes: Vec<JoinHandle<()>>,
    host: Arc<Host>,
    // Declared last: the agents are in them.
    _namespaces: Namespaces,
}

/// The host behind the exits.
#[derive(Debug, Default)]
struct Host {
    over: AtomicBool,
    /// For each entry, the exit by which its newest datagram came.
    newest: [AtomicU8; COUNT as usize],
}

/// What became of the flow of an entry.
#[derive(Clone, Debug)]
pub struct Flow {
    pub sent: usize,
    pub answered: usize,
    /// The longest time without an answer while it was sent.
    pub gap: Duration,
    /// The longest time between two datagrams that were sent: it is long if this machine stood still.
    pub pause: Duration,
    /// The exits by which answers came, in their order.
    pub exits: Vec<u8>,
}

/// Namespaces with names of their own.
struct Namespaces(String);

impl Namespaces {
    const ROLES: [&str; 7] = ["balancer", "exit-1", "exit-2", "exit-3", "entry-1", "entry-2", "entry-3"];

    fn new() -> Self {
        static NEXT: AtomicU32 = AtomicU32::new(0);
        let number = NEXT.fetch_add(1, Ordering::Relaxed);
        // The guard is there before the first namespace is, so that a failure on the way leaves none behind.
        let made = Self(format!("culvert-{}-fleet{number}", process::id()));
        for role in Self::ROLES {
            let output = run(Command::new("ip").args(["netns", "add", &made.name(role)]), clock::PATIENCE);
            assert!(output.status.success(), "{}", text(&output.stderr));
            made.place(role).tell(&["ip", "link", "set", "lo", "up"]);
        }
        made
    }

    fn name(&self, role: &str) -> String {
        format!("{}-{role}", self.0)
    }

    fn place(&self, role: &str) -> Place {
        Place::Namespace(self.name(role))
    }

    /// Joins hosts to the balancer by a bridge: host n has the addresses `v4`.1n and `v6`::1n there, the balancer those with 1.
    fn join(&self, bridge: &str, role: &str, v4: &str, v6: &str) {
        let balancer = self.place("balancer");
        let tell = |place: &Place, line: &str| place.tell(&line.split(' ').collect::<Vec<_>>());
        tell(&balancer, &format!("ip link add {bridge} type bridge"));
        tell(&balancer, &format!("ip link set {bridge} up"));
        tell(&balancer, &format!("ip addr add {v4}.1/24 dev {bridge}"));
        tell(&balancer, &format!("ip addr add {v6}::1/64 dev {bridge} nodad"));
        for number in 1..=COUNT {
            let name = self.name(&format!("{role}-{number}"));
            let host = Place::Namespace(name.clone());
            tell(&balancer, &format!("ip link add {role}-{number} type veth peer name eth0 netns {name}"));
            tell(&balancer, &format!("ip link set {role}-{number} master {bridge} up"));
            tell(&host, "ip link set eth0 up");
            tell(&host, &format!("ip addr add {v4}.1{number}/24 dev eth0"));
            tell(&host, &format!("ip addr add {v6}::1{number}/64 dev eth0 nodad"));
            tell(&host, &format!("ip route add default via {v4}.1"));
            tell(&host, &format!("ip route add default via {v6}::1"));
        }
    }
}

impl Drop for Namespaces {
    fn drop(&mut self) {
        for role in Self::ROLES {
            // Fails if `new` did not get as far as to make it.
            drop(Command::new("ip").args(["netns", "del", &self.name(role)]).output());
        }
    }
}

impl Fleet {
    /// Makes all of it, starts the first `running` exits, has `culvert fleet` ask them every `interval`, and waits until every entry is
    /// connected.
    ///
    /// # Panics
    /// When one of them does not start, or they do not connect.
    #[must_use]
    pub fn start(running: u8, interval: Duration) -> Self {
        let namespaces = Namespaces::new();
        namespaces.join("lan", "exit", "10.66.0", "fd66");
        namespaces.join("wan", "entry", "198.51.100", "2001:db8:ff");
        let balancer = namespaces.place("balancer");
        balancer.sysctl("net.ipv4.ip_forward", "1");
        balancer.sysctl("net.ipv6.conf.all.forwarding", "1");
        let agent = |name: &'static str| Agent::new(name, &namespaces.place(name));
        let exits: Vec<Agent> = ["exit-1", "exit-2", "exit-3"].map(agent).into();
        let entries: Vec<Agent> = ["entry-1", "entry-2", "entry-3"].map(agent).into();
        let mut all = Self {
            entries,
            exits,
            balancer,
            checker: None,
            echoes: Vec::new(),
            host: Arc::default(),
            _namespaces: namespaces,
        };
        all.configure();
        all.load_rules();
        all.serve();
        for exit in &mut all.exits[..usize::from(running)] {
            exit.start();
        }
        all.watch(interval);
        all.entries.iter_mut().for_each(Agent::start);
        for entry in &all.entries {
            all.wait_for_session(entry);
        }
        all
    }

    /// One identity at all exits, and a server ID of its own at each.
    fn configure(&self) {
        let key = self.exits[0].key();
        let peers: String = (1..=COUNT).zip(&self.entries).map(|(number, entry)| {
            format!(
                "[[peer]]\nname = \"entry-{number}\"\npublic_key = \"{}\"\nallowed_ips = [\"10.9.0.{number}\"]\n\
                 queue.time = \"5s\"\n",
                entry.key()
            )
        }).collect();
        for (number, exit) in (1..=COUNT).zip(&self.exits) {
            let pem = fs::read(self.exits[0].folder().join("identity.key")).expect("the agent has one");
            fs::write(exit.folder().join("identity.key"), pem).expect("the folder is ours");
            exit.configure(&format!(
                "transport.listen = [\"0.0.0.0:4433\", \"[::]:4433\"]\ntransport.workers = 2\n\
                 transport.server_id = {number}\nmetrics.allow = [\"10.66.0.1\", \"127.0.0.1\"]\n{peers}[tun]\naddress = [\"10.9.0.10{number}/24\"]\n"
            ));
            // For the balancer too.
            let loopback = exit.metrics();
            let everywhere = SocketAddr::from((Ipv4Addr::UNSPECIFIED, loopback.port()));
            let config = fs::read_to_string(exit.config()).expect("written above");
            let config = config.replace(&loopback.to_string(), &everywhere.to_string());
            fs::write(exit.config(), config).expect("the folder is ours");
            exit.place().tell(&["ip", "addr", "add", &format!("{}/32", TARGET.ip()), "dev", "lo"]);
        }
        for (number, entry) in (1..=COUNT).zip(&self.entries) {
            let endpoint = if number == 2 { "[2001:db8:ff::1]:4433" } else { "198.51.100.1:4433" };
            entry.configure(&format!(
                "transport.workers = 2\n[[peer]]\nname = \"fleet\"\npublic_key = \"{key}\"\n\
                 endpoints = [\"{endpoint}\"]\nallowed_ips = [\"10.77.0.0/16\"]\nqueue.time = \"5s\"\n\
                 [tun]\naddress = [\"10.9.0.{number}/24\"]\n"
            ));
        }
    }

    /// Loads the ruleset as an operator would, and has the kernel track connections that the ruleset leaves alone.
    fn load_rules(&self) {
        let shipped = Path::new(env!("CARGO_MANIFEST_DIR")).join("../deploy/nftables/culvert-fleet.nft");
        let rules = fs::read_to_string(shipped).expect("it is shipped");
        let rules = rules
            .replace("define address4 = 192.0.2.1", "define address4 = 198.51.100.1")
            .replace("define address6 = 2001:db8::1", "define address6 = 2001:db8:ff::1");
        let file = self.exits[0].folder().join("fleet.nft");
        fs::write(&file, rules).expect("the folder is ours");
        self.balancer.tell(&["nft", "-f", &file.to_string_lossy()]);
        self.balancer.tell(&["nft", TRACKING]);
    }

    /// Has the host behind each exit answer with the exit's number.
    fn serve(&mut self) {
        for (number, exit) in (1..=COUNT).zip(&self.exits) {
            let socket = exit.place().enter(|| UdpSocket::bind(TARGET)).expect("the namespace is ours");
            SockRef::from(&socket).set_recv_buffer_size(BUFFER).expect("a size");
            let host = Arc::clone(&self.host);
            self.echoes.push(thread::spawn(move || echo(&socket, number, &host)));
        }
    }

    /// Has `culvert fleet` ask the exits every `interval`, in place of the one that did so before. An exit that leaves two questions
    /// in a row unanswered is dead to it.
    ///
    /// # Panics
    /// When it cannot be started.
    pub fn watch(&mut self, interval: Duration) {
        self.checker = None;
        let log = fs::OpenOptions::new().create(true).append(true).open(self.log_file());
        let mut command = self.balancer.command(binary());
        command.args(["fleet", "--interval", &interval.as_millis().to_string()]);
        command.stderr(log.expect("the folder is ours"));
        for (number, exit) in (1..=COUNT).zip(&self.exits) {
            let port = exit.metrics().port();
            command.args([
                "--exit",
                &format!("{number}=10.66.0.1{number},fd66::1{number},readyz=10.66.0.1{number}:{port}"),
            ]);
        }
        self.checker = Some(Running::start("culvert fleet", &mut command));
    }

    /// How often `culvert fleet` has said that exit `number` is dead.
    #[must_use]
    pub fn deaths(&self, number: u8) -> usize {
        let exit = format!("exit {number} (");
        let said = fs::read_to_string(self.log_file()).unwrap_or_default();
        said.lines().filter(|line| line.contains(&exit) && line.ends_with("is dead")).count()
    }

    fn log_file(&self) -> PathBuf {
        self.exits[0].folder().join("fleet.log")
    }

    fn wait_for_session(&self, entry: &Agent) {
        clock::until("a session with the fleet", clock::PATIENCE, || {
            let status = entry.ask(&["status", "--json"]);
            let status: serde_json::Value = serde_json::from_str(&status).expect("JSON");
            let peer = &status["status"]["peers"][0];
            if peer["lanes_up"].as_u64() >= Some(2) { Ok(()) } else { Err(peer.to_string()) }
        });
    }

    /// Sends datagrams from every entry for `time`, and calls `meanwhile` once, after a quarter: they are sent for another quarter at
    /// least after `meanwhile` has returned.
    ///
    /// # Panics
    /// When the kernel refuses a socket.
    pub fn flows(&mut self, time: Duration, meanwhile: impl FnOnce(&mut Self)) -> Vec<Flow> {
        let sockets: Vec<UdpSocket> = (1..=COUNT)
            .zip(&self.entries)
            .map(|(number, entry)| {
                let bind = || UdpSocket::bind((Ipv4Addr::new(10, 9, 0, number), 0));
                entry.place().enter(bind).expect("the tunnel's address")
            })
            .collect();
        let span = &Span::new(time);
        thread::scope(|scope| {
            let flows: Vec<_> =
                sockets.iter().map(|socket| scope.spawn(move || flow(socket, span))).collect();
            span.interrupt(|| meanwhile(self));
            flows.into_iter().map(|flow| flow.join().expect("it sends")).collect()
        })
    }

    /// For each entry, the number of the exit by which the host's newest datagram of it came.
    #[must_use]
    pub fn serving(&self) -> Vec<u8> {
        self.host.newest.iter().map(|newest| newest.load(Ordering::Relaxed)).collect()
    }

    /// Takes the cable of exit `number` away, so that nothing answers there, or plugs it in again.
    ///
    /// # Panics
    /// When the kernel refuses.
    pub fn plug(&self, number: u8, plugged: bool) {
        let state = if plugged { "up" } else { "down" };
        self.balancer.tell(&["ip", "link", "set", &format!("exit-{number}"), state]);
    }

    /// The exits that the balancer passes packets to over IPv4, by number.
    ///
    /// # Panics
    /// When nft does not say.
    #[must_use]
    pub fn alive(&self) -> BTreeSet<u8> {
        self.in_map("exits4")
    }

    /// The exits that new connections over IPv4 go to, by number.
    ///
    /// # Panics
    /// When nft does not say.
    #[must_use]
    pub fn takers(&self) -> BTreeSet<u8> {
        self.in_map("slots4")
    }

    fn in_map(&self, name: &str) -> BTreeSet<u8> {
        let said = self.balancer.tell(&["nft", "list", "map", "inet", "culvert_fleet", name]);
        let has = |number: &u8| {
            let address = format!("10.66.0.1{number}");
            said.split(|letter: char| !letter.is_ascii_digit() && letter != '.').any(|word| word == address)
        };
        (1..=COUNT).filter(has).collect()
    }

    /// Empties the balancer's table of connections.
    pub fn forget_connections(&self) {
        self.balancer.tell(&["conntrack", "-F"]);
    }

    /// The balancer's tracked connections that are of the fleet's port.
    #[must_use]
    pub fn tracked(&self) -> String {
        let all = self.balancer.tell(&["conntrack", "-L"]);
        all.lines().filter(|line| line.contains("=4433 ")).collect()
    }
}

impl Drop for Fleet {
    fn drop(&mut self) {
        self.host.over.store(true, Ordering::Relaxed);
        for thread in self.echoes.drain(..) {
            // Its panic has been written to standard error.
            drop(thread.join());
        }
    }
}

/// A table with a rule that has every packet tracked that is not exempt.
const TRACKING: &str =
    "table inet tracking { chain c { type filter hook forward priority 0; ct state established counter; }; }";

fn flow(socket: &UdpSocket, span: &Span) -> Flow {
    let mut exits = Vec::new();
    let all = exchange(socket, TARGET, EVERY, span, |exit| {
        if exits.last() != Some(&exit) {
            exits.push(exit);
        }
    });
    Flow { sent: all.sent, answered: all.answered, gap: all.gap, pause: all.pause, exits }
}

fn echo(socket: &UdpSocket, number: u8, host: &Host) {
    socket.set_read_timeout(Some(Duration::from_millis(50))).expect("not zero");
    let mut buffer = [0; 2_048];
    while !host.over.load(Ordering::Relaxed) {
        // An error is the timeout, or that the way back is gone.
        if let Ok((length, from)) = socket.recv_from(&mut buffer) {
            if let IpAddr::V4(from) = from.ip()
                && let Some(newest) = host.newest.get(usize::from(from.octets()[3]) - 1)
            {
                newest.store(number, Ordering::Relaxed);
            }
            buffer[0] = number;
            drop(socket.send_to(&buffer[..length], from));
        }
    }
}
