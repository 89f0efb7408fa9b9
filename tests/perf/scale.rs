//! One agent with thousands of flows and peers: memory, descriptors and CPU, again after each round of comings and goings.
//!
//! ```text
//! cargo build --release -p culvert && cargo run --release -p culvert-tests --example scale -- --flows 10000 --peers 1000
//! ```
//!
//! ```text
//!   a socket per flow ─UDP─► entry ══QUIC══► hub ─a socket per flow─► echo
//!                            crowd ══QUIC══►      (a peer each: whole agents on threads of one process)
//! ```
//!
//! The hub and the entry are the real program; all sockets are real. Every flow has to get its answer in every round. The
//! program fails if the hub's memory after the last round is above that after the first one by more than a twentieth.
//!
//! `--flows 0 --rounds 0 --idle 60` measures idle peers alone.
//!
//! With `--page`, the hub serves the status page, and idle peers are measured once more while one is open.
//!
//! With `--restarts N` it measures only how soon all peers, which share one address, are connected again after a restart
//! of the hub, what both sides spend on that, and where their packets ended at the gate.

use std::{
    collections::{BTreeMap, HashSet},
    fs,
    io::{self, BufRead, BufReader, Read, Seek, SeekFrom, Write},
    net::{Ipv4Addr, SocketAddr, UdpSocket},
    path::Path,
    process::{Child, Command, Stdio},
    thread,
    time::Duration,
};

use clap::Parser;
use config::Config;
use culvert::daemon::Daemon;
use culvert_tests::{
    agent::{Agent, binary},
    clock,
    place::Place,
    ports,
    process::{Running, run, text},
};
use gate::identity::Identity;
use net::process::raise_descriptor_limit;
use serde_json::Value;

#[derive(Parser)]
struct Options {
    /// UDP flows through the hub.
    #[arg(long, default_value_t = 10_000)]
    flows: u32,
    /// Peers that are connected to it, beside the entry.
    #[arg(long, default_value_t = 1000)]
    peers: usize,
    /// Rounds: all flows end and others come, half of the peers leave and come back.
    #[arg(long, default_value_t = 4)]
    rounds: u32,
    /// For how long the CPU time of what is idle is measured, in seconds.
    #[arg(long, default_value_t = 20)]
    idle: u64,
    /// Serve the status page, and measure the hub with idle peers a second time while a page is open.
    #[arg(long)]
    page: bool,
    /// Restart the hub this many times with all peers connected, and measure their return instead of all else.
    #[arg(long, default_value_t = 0)]
    restarts: u32,
    /// For the process of the crowd: the hub's address and key.
    #[arg(long, hide = true, num_args = 2)]
    crowd: Vec<String>,
}

/// How long a flow may be silent: all of them are opened and answered well within it.
const FLOW_IDLE: Duration = Duration::from_secs(30);

/// For what takes long with thousands: handshakes from one address are let in at a limited rate.
const PATIENCE: Duration = Duration::from_secs(180);

fn main() {
    let options = Options::parse();
    // More than any of the processes needs.
    raise_descriptor_limit(200_000).expect("the kernel tells the limit");
    match &options.crowd[..] {
        [hub, key] => crowd(hub, key),
        _ => measure(&options),
    }
}

fn measure(options: &Options) {
    let Options { flows, peers, rounds, idle, .. } = *options;
    let [underlay, ingress] = [(); 2].map(|()| SocketAddr::from((Ipv4Addr::LOCALHOST, ports::free())));
    let (mut hub, mut entry) = (Agent::new("hub", &Place::Host), Agent::new("entry", &Place::Host));
    let mut crowd = Crowd::start(underlay, hub.key());
    let echo = echo();
    let mut known = format!(
        "metrics.page = {}\ntransport.listen = [\"{underlay}\"]\nlimits.peers = {}\n\
         [[service]]\nname = \"echo\"\nprotocol = \"udp\"\nupstream = \"{echo}\"\nidle = \"{}s\"\n{}",
        options.page,
        peers + 1,
        FLOW_IDLE.as_secs(),
        peer("entry", entry.key(), "services = [\"echo\"]\nlanes = 1\nqueue.time = \"5s\"\n")
    );
    for (place, key) in crowd.keys(peers).iter().enumerate() {
        known += &peer(&format!("crowd{place}"), key, "");
    }
    hub.configure(&known);
    entry.configure(&format!(
        "{}[[udp]]\nlisten = \"{ingress}\"\npeer = \"hub\"\nservice = \"echo\"\n",
        peer("hub", hub.key(), &format!("endpoints = [\"{underlay}\"]\nlanes = 1\nqueue.time = \"5s\"\n"))
    ));
    hub.start();
    entry.start();
    table_head();
    let mut before = None;
    let mut row = |what: &str, hub: &mut Agent| {
        // The allocator's and the kernel's lists come to rest.
        thread::sleep(Duration::from_secs(2));
        let now = Usage::of(hub.process().pid());
        say(&format!("{what:<44} {now}"));
        before.replace(now)
    };
    wait_for_peers(&hub, 1);
    row("only configured", &mut hub);
    let first = Usage::of(hub.process().pid());
    let before_sessions = cpu_time(hub.process().pid());
    crowd.be(peers);
    // Without the questions about its status, which cost CPU time as well.
    thread::sleep(Duration::from_secs(3));
    let sessions_cpu = cpu_time(hub.process().pid()) - before_sessions;
    wait_for_peers(&hub, peers + 1);
    row(&format!("{peers} peers connected"), &mut hub);
    if options.restarts > 0 {
        return measure_returns(&mut hub, &crowd, peers, options.restarts);
    }
    let connected = Usage::of(hub.process().pid());
    let peers_cpu = idle_cpu(&mut hub, idle);
    if options.page {
        let watched = watched_cpu(&mut hub, idle);
        row("with a page open", &mut hub);
        say(&format!("{peers_cpu:.2} % of a CPU while idle, {watched:.2} % with a page open"));
    }
    let mut clients = Clients::default();
    let mut after_first = None;
    let mut flows_cost = (0, 0, 0.0);
    for round in 0..rounds {
        if round > 0 {
            wait_for_flows(&hub, 0);
            wait_for_flows(&entry, 0);
            crowd.be(peers / 2);
            wait_for_peers(&hub, peers / 2 + 1);
            crowd.be(peers);
            wait_for_peers(&hub, peers + 1);
        }
        let entry_before = Usage::of(entry.process().pid());
        let hub_before = Usage::of(hub.process().pid());
        clients.ask_all(ingress, round, flows);
        wait_for_flows(&hub, u64::from(flows));
        row(&format!("round {round}: {flows} flows, {peers} peers"), &mut hub);
        let now = Usage::of(hub.process().pid());
        if round == 0 {
            let cpu = idle_cpu(&mut hub, idle.min(FLOW_IDLE.as_secs() / 2));
            let entry_now = Usage::of(entry.process().pid());
            flows_cost =
                (now.anonymous - hub_before.anonymous, entry_now.anonymous - entry_before.anonymous, cpu);
            after_first = Some(now);
        }
    }
    let last = Usage::of(hub.process().pid());
    let flat = after_first.map_or(1.0, |first| last.anonymous as f64 / first.anonymous as f64);
    let each = |bytes: u64, count: u64| bytes as f64 / count.max(1) as f64 * 1000.0 / f64::from(1 << 20);
    say(&format!(
        "\nper peer, from its first packet to its lane          {:.2} ms of CPU time\n\
         per 1,000 peers, connected with a lane per worker    {:.1} MiB, {:.2} % of a CPU while idle\n\
         per 1,000 flows, at the hub with a socket each       {:.2} MiB, with all peers {:.2} % of a CPU while idle\n\
         per 1,000 flows, at the entry which opened them      {:.2} MiB\n\
         peak of the hub                                      {:.1} MiB resident\n\
         the last round against the first                     {flat:.3} x",
        sessions_cpu as f64 / 1e6 / peers.max(1) as f64,
        each(connected.anonymous - first.anonymous, peers as u64),
        peers_cpu,
        each(flows_cost.0, flows.into()),
        flows_cost.2,
        each(flows_cost.1, flows.into()),
        last.peak as f64 / f64::from(1 << 20),
    ));
    assert!(flat <= 1.05, "memory grew from round to round: {flat:.3} x");
}

/// Restarts the hub, as systemd does, and prints when half, 99 % and all of its peers were connected again.
///
/// Time runs from the moment at which the new process starts; its port opens before it is ready. The hub's log says who is
/// connected, because it costs the hub nothing to be read.
fn measure_returns(hub: &mut Agent, crowd: &Crowd, peers: usize, restarts: u32) {
    quieten(hub);
    say(
        "\nafter a restart of the hub (SIGTERM, then a start), seconds from its start until peers are connected again; CPU seconds",
    );
    let columns = ["restart", "ready", "half", "99 %", "all", "hub", "peers"];
    say(&columns.map(|column| format!("{column:>8}")).join(" "));
    let everybody = peers + 1;
    for restart in 1..=restarts {
        hub.terminate();
        let mut log = LogTail::open(&hub.folder().join("log"));
        let crowd_before = cpu_time(crowd.process.pid());
        let begin = clock::now();
        hub.start();
        let mut times = vec![begin.elapsed()];
        let mut connected = HashSet::new();
        for goal in [everybody / 2, everybody * 99 / 100, everybody] {
            clock::until(&format!("{goal} connected peers"), PATIENCE, || {
                connected.extend(log.new_lines().iter().filter_map(|line| connected_peer(line)));
                let count = connected.len();
                if count >= goal { Ok(()) } else { Err(format!("{count} of {everybody}")) }
            });
            times.push(begin.elapsed());
        }
        let hub_cpu = cpu_time(hub.process().pid());
        let crowd_cpu = cpu_time(crowd.process.pid()) - crowd_before;
        let seconds = times.iter().map(Duration::as_secs_f64);
        let seconds = seconds.chain([hub_cpu, crowd_cpu].map(|nanoseconds| nanoseconds as f64 / 1e9));
        let columns: Vec<String> = seconds.map(|seconds| format!("{seconds:>8.2}")).collect();
        say(&format!("{restart:>8} {}", columns.join(" ")));
        wait_for_peers(hub, everybody);
        let status = status(hub);
        let counts = |key: &str| -> BTreeMap<String, u64> {
            serde_json::from_value(status[key].clone()).expect("counts by label")
        };
        let ended = ["handshakes", "gate"].map(|key| {
            let counts = counts(key).into_iter().filter(|(_, count)| *count > 0);
            counts.map(|(label, count)| format!("{label} {count}")).collect::<Vec<_>>().join(", ")
        });
        say(&format!("         handshakes: {}; datagrams at the gate: {}", ended[0], ended[1]));
    }
}

/// Lets an agent log as an installed one does from its next start on: the lines of the tests' level would be a part of what is
/// measured.
fn quieten(agent: &Agent) {
    let file = agent.config();
    let text = fs::read_to_string(&file).expect("it is configured");
    fs::write(&file, text.replace("log.level = \"debug\"", "log.level = \"info\""))
        .expect("the folder is ours");
}

/// The peer of a line that says that it is connected.
fn connected_peer(line: &str) -> Option<String> {
    let (_, rest) = line.split_once(": connected peer=\"")?;
    Some(rest.split_once('"')?.0.to_owned())
}

/// What is appended to a log.
struct LogTail {
    file: fs::File,
    /// The beginning of a line whose end has not been written.
    rest: String,
}

impl LogTail {
    /// A log from its present end on.
    fn open(path: &Path) -> Self {
        let mut file = fs::File::open(path).expect("the agent has logged");
        file.seek(SeekFrom::End(0)).expect("it is a file");
        Self { file, rest: String::new() }
    }

    /// The complete lines since the last call.
    fn new_lines(&mut self) -> Vec<String> {
        self.file.read_to_string(&mut self.rest).expect("an agent logs text");
        let end = self.rest.rfind('\n').map_or(0, |at| at + 1);
        let lines = self.rest[..end].lines().map(str::to_owned).collect();
        self.rest.drain(..end);
        lines
    }
}

/// Peers whose session has a lane.
fn connected_peers(agent: &Agent) -> usize {
    let status = status(agent);
    let with_lanes = |peer: &&Value| peer["lanes_up"].as_u64().unwrap_or(0) > 0;
    status["peers"].as_array().map_or(0, |peers| peers.iter().filter(with_lanes).count())
}

#[expect(clippy::print_stdout, reason = "the table is what this program is for")]
fn say(line: &str) {
    println!("{line}");
    drop(io::stdout().flush());
}

fn table_head() {
    say(&format!("{:<44} {:>10} {:>10} {:>12}", "the hub", "anonymous", "resident", "descriptors"));
}

fn peer(name: &str, key: &str, lines: &str) -> String {
    format!("[[peer]]\nname = \"{name}\"\npublic_key = \"{key}\"\n{lines}")
}

/// What a process uses.
#[derive(Clone, Copy)]
struct Usage {
    /// Anonymous resident memory, bytes.
    anonymous: u64,
    resident: u64,
    /// The most that was ever resident.
    peak: u64,
    descriptors: usize,
}

impl Usage {
    fn of(pid: u32) -> Self {
        let status = fs::read_to_string(format!("/proc/{pid}/status")).expect("it runs");
        let field = |key: &str| {
            let line = status.lines().find_map(|line| line.strip_prefix(key)).expect("the kernel says it");
            line.trim().trim_end_matches(" kB").parse::<u64>().expect("a number") * 1024
        };
        Self {
            anonymous: field("RssAnon:"),
            resident: field("VmRSS:"),
            peak: field("VmHWM:"),
            descriptors: fs::read_dir(format!("/proc/{pid}/fd")).expect("it is ours").count(),
        }
    }
}

impl std::fmt::Display for Usage {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let mib = |bytes: u64| format!("{:.1} MiB", bytes as f64 / f64::from(1 << 20));
        write!(f, "{:>10} {:>10} {:>12}", mib(self.anonymous), mib(self.resident), self.descriptors)
    }
}

/// The time that a process's threads have been on a CPU, in nanoseconds.
fn cpu_time(pid: u32) -> u64 {
    let threads = fs::read_dir(format!("/proc/{pid}/task")).expect("it runs");
    let of = |thread: io::Result<fs::DirEntry>| {
        let text = fs::read_to_string(thread.ok()?.path().join("schedstat")).ok()?;
        text.split_whitespace().next()?.parse::<u64>().ok()
    };
    threads.filter_map(of).sum()
}

/// The part of a CPU that an agent takes, in per cent.
fn idle_cpu(agent: &mut Agent, seconds: u64) -> f64 {
    let before = cpu_time(agent.process().pid());
    thread::sleep(Duration::from_secs(seconds));
    (cpu_time(agent.process().pid()) - before) as f64 / (seconds as f64 * 1e9) * 100.0
}

/// The same while a page is open: it asks as `page.js` does when all peers are shown.
fn watched_cpu(agent: &mut Agent, seconds: u64) -> f64 {
    const PATHS: [(u64, &str); 4] = [
        (1, "/api/peers?sort=state&order=asc&show=all&find=&skip=0&rows=25&trends=0"),
        (30, "/api/peers?sort=state&order=asc&show=all&find=&skip=0&rows=25&trends=1"),
        (5, "/api/history?after=0"),
        (8, "/api/status?peers=none"),
    ];
    let (before, begin) = (cpu_time(agent.process().pid()), clock::now());
    for second in 0..seconds {
        for (_, path) in PATHS.iter().filter(|(every, _)| second % every == 0) {
            agent.get(path).expect("the agent answers");
        }
        thread::sleep((begin + Duration::from_secs(second + 1)).saturating_duration_since(clock::now()));
    }
    (cpu_time(agent.process().pid()) - before) as f64 / begin.elapsed().as_nanos() as f64 * 100.0
}

/// What an agent says of itself.
fn status(agent: &Agent) -> Value {
    let socket = agent.folder().join("control");
    let mut command = Command::new(binary());
    command.args(["status", "--json", "--socket"]).arg(socket);
    let output = run(&mut command, Duration::from_secs(30));
    let answer: Result<Value, serde_json::Error> = serde_json::from_slice(&output.stdout);
    let mut answer: Value = answer.unwrap_or_else(|error| panic!("{error}: {}", text(&output.stderr)));
    answer["status"].take()
}

fn wait_for_flows(agent: &Agent, flows: u64) {
    clock::until(&format!("{flows} flows"), PATIENCE, || {
        let used = status(agent)["limits"]["flows"]["used"].as_u64().unwrap_or(u64::MAX);
        thread::sleep(Duration::from_millis(500));
        if used == flows { Ok(()) } else { Err(format!("{used} flows")) }
    });
}

fn wait_for_peers(agent: &Agent, peers: usize) {
    clock::until(&format!("{peers} connected peers"), PATIENCE, || {
        let connected = connected_peers(agent);
        thread::sleep(Duration::from_millis(500));
        if connected == peers { Ok(()) } else { Err(format!("{connected} of {peers}")) }
    });
}

/// Answers every datagram with itself, until the program ends.
fn echo() -> SocketAddr {
    let socket = UdpSocket::bind((Ipv4Addr::LOCALHOST, 0)).expect("a port is free");
    let address = socket.local_addr().expect("it is bound");
    thread::spawn(move || {
        let mut buffer = [0; 2048];
        while let Ok((len, from)) = socket.recv_from(&mut buffer) {
            drop(socket.send_to(&buffer[..len], from));
        }
    });
    address
}

/// A socket for each flow.
#[derive(Default)]
struct Clients(Vec<UdpSocket>);

impl Clients {
    /// Opens `flows` flows from addresses that no round before had, and waits for the answer on each.
    fn ask_all(&mut self, ingress: SocketAddr, round: u32, flows: u32) {
        self.0.clear();
        for place in 0..flows {
            let [_, b, c, d] = (round * flows + place).to_be_bytes();
            let socket = UdpSocket::bind((Ipv4Addr::new(127, b + 1, c, d), 0)).expect("all of 127/8 is ours");
            socket.set_read_timeout(Some(Duration::from_secs(1))).expect("the kernel takes it");
            self.0.push(socket);
        }
        for (place, socket) in self.0.iter().enumerate() {
            let question = (place as u64).to_be_bytes();
            let asked = |_: &u32| {
                socket.send_to(&question, ingress).expect("loopback takes it");
                let mut answer = [0; 16];
                matches!(socket.recv(&mut answer), Ok(8) if answer[..8] == question)
            };
            assert!((0..10).any(|attempt| asked(&attempt)), "flow {place} of round {round} has no answer");
        }
    }
}

/// The process of the crowd, as the measuring one drives it: a line each way.
struct Crowd {
    process: Running,
}

impl Crowd {
    fn start(hub: SocketAddr, key: &str) -> Self {
        let mut command = Command::new(std::env::current_exe().expect("the kernel knows our path"));
        command.args(["--crowd", &hub.to_string(), key]);
        Self { process: Running::start("crowd", command.stdin(Stdio::piped()).stdout(Stdio::piped())) }
    }

    fn ask(&mut self, line: &str) -> String {
        let child: &mut Child = self.process.child();
        writeln!(child.stdin.as_mut().expect("a pipe"), "{line}").expect("it reads");
        let mut answer = String::new();
        BufReader::new(child.stdout.as_mut().expect("a pipe")).read_line(&mut answer).expect("it answers");
        answer.trim().to_owned()
    }

    /// The public keys of its first agents.
    fn keys(&mut self, count: usize) -> Vec<String> {
        self.ask(&format!("keys {count}")).split(' ').map(str::to_owned).collect()
    }

    /// As many of its agents run as that.
    fn be(&mut self, count: usize) {
        assert_eq!(self.ask(&format!("be {count}")), "ok");
    }
}

/// Agents that dial the hub and do nothing else, as many as the measuring process asks for.
fn crowd(hub: &str, key: &str) {
    let mut identities: Vec<Identity> = Vec::new();
    let mut agents: Vec<Daemon> = Vec::new();
    for line in io::stdin().lines().map_while(Result::ok) {
        let (order, count) = line.split_once(' ').expect("our own words");
        let count: usize = count.parse().expect("a number");
        let answer = match order {
            "keys" => {
                identities.resize_with(count, || Identity::generate().expect("the kernel has randomness"));
                identities
                    .iter()
                    .map(|identity| identity.public_key().to_string())
                    .collect::<Vec<_>>()
                    .join(" ")
            }
            "be" => {
                let leaving = agents.split_off(count.min(agents.len()));
                let stops: Vec<_> = leaving.into_iter().map(|agent| thread::spawn(|| agent.stop())).collect();
                for stop in stops {
                    stop.join().expect("no thread panics").expect("no worker panics");
                }
                for identity in &identities[agents.len()..count] {
                    agents.push(one_of_many(identity, hub, key));
                    // Handshakes from one address are let in at a limited rate.
                    thread::sleep(Duration::from_millis(12));
                }
                "ok".to_owned()
            }
            _ => panic!("{order} is none of our words"),
        };
        say(&answer);
    }
}

fn one_of_many(identity: &Identity, hub: &str, key: &str) -> Daemon {
    let text = format!(
        "identity = {{ key_file = \"none\", state_dir = \"\" }}\ncontrol.socket = \"\"\ntransport.workers = 1\n\
         [[peer]]\nname = \"hub\"\npublic_key = \"{key}\"\nendpoints = [\"{hub}\"]\nlanes = 1\n"
    );
    let config = Config::parse(&text, Path::new(".")).expect("our own text");
    Daemon::start(config, identity).expect("loopback has room")
}
