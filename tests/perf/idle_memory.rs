//! What idle lanes, peers and flows cost in user space, beside what they may cost. Kernel socket memory is not counted.
//!
//! ```text
//! cargo build --release -p culvert && cargo run --release -p culvert-tests --example idle_memory
//! ```
//!
//! Lanes are counted by the allocator, in this process. Peers and flows are the growth of the anonymous resident memory
//! (`RssAnon`) of a real agent, so that what the allocator adds is in.

use std::{
    fs,
    hint::black_box,
    mem::size_of,
    net::{Ipv4Addr, SocketAddr, UdpSocket},
    path::Path,
    process::Stdio,
    thread,
    time::Duration,
};

use base::ids::{PeerId, SessionId, SessionRef};
use culvert_tests::{
    agent::{Agent, binary, keygen},
    clock,
    pair::Plan,
    place::Place,
    ports,
    process::Running,
};
use dataplane::lanes::{LaneSlot, Lanes, OpeningId, PacketSize, UnderlayId};
use gate::identity::Identity;
use quic_core::{AckProfile, ConnectionId, HEADER_LEN, Lane, LaneConfig, Suite, TAG_LEN, TRANSMIT_CAPACITY};

#[global_allocator]
static ALLOCATOR: dhat::Alloc = dhat::Alloc;

const LANES: usize = 10_000;
const CONFIGURED_PEERS: u64 = 1000;
/// Connected before anything is measured: batch buffers and the allocator's first pages are not those of the peers.
const WARM_UP_PEERS: u64 = 16;
const CONNECTED_PEERS: u64 = 64;
const FLOWS: u64 = 10_000;

fn main() {
    row("", "bytes each", "target");
    lanes();
    peers();
    flows();
}

#[expect(clippy::print_stdout, reason = "the table is what this program is for")]
fn row(what: &str, bytes: impl ToString, target: impl ToString) {
    println!("{what:<64} {:>10} {:>8}", bytes.to_string(), target.to_string());
}

/// Lanes of one worker, before and after they carried something.
fn lanes() {
    const TARGET: usize = 4096;
    let size = size_of::<LaneSlot>();
    row("lane: size of its slot", size, "");
    row("lane: of which quic-core", size_of::<Lane>(), "");
    for packets in [0, 1, 100] {
        let profiler = dhat::Profiler::builder().testing().build();
        let mut lanes = Lanes::default();
        let before = dhat::HeapStats::get().curr_bytes;
        for place in 0..LANES {
            let cid = ConnectionId((place as u64).to_be_bytes());
            let owner = SessionRef { peer: PeerId(0), session: SessionId(1) };
            let opening = OpeningId { index: 0, epoch: 1 };
            let core = used_lane(cid, packets);
            let slot = LaneSlot::new(
                core,
                owner,
                opening,
                cid,
                UnderlayId(0),
                PacketSize::new(1200, 1200),
                clock::now(),
            );
            lanes.insert(slot);
        }
        let bytes = (dhat::HeapStats::get().curr_bytes - before) / LANES;
        row(&format!("lane: heap of {LANES}, each after {packets} packets there and back"), bytes, TARGET);
        black_box(&lanes);
        drop(lanes);
        drop(profiler);
    }
}

/// A lane after so many packets in each direction, all of them acknowledged.
fn used_lane(local: ConnectionId, packets: usize) -> Lane {
    let (secrets, remote) = ([[1; 32], [2; 32]], ConnectionId([0xff; 8]));
    let lane = |own: usize, local_cid, remote_cid| {
        let config = LaneConfig {
            suite: Suite::Aes128Gcm,
            send_secret: &secrets[own],
            receive_secret: &secrets[1 - own],
            remote_cid,
            local_cid,
            ack: AckProfile::Throughput,
            key_limit: None,
            initial_rtt: None,
        };
        Lane::new(&config).expect("the secrets have the suite's length")
    };
    let mut ends = [lane(0, local, remote), lane(1, remote, local)];
    let mut now = clock::now();
    for _ in 0..packets {
        // Twice with the roles exchanged, so that `ends[0]` is the same one at the end.
        for _ in 0..2 {
            let [from, to] = &mut ends;
            // PINGs, which are answered at once.
            let mut packet = [1; HEADER_LEN + 4 + TAG_LEN];
            from.seal(&mut packet, true, now).expect("the keys are fresh");
            to.open(&mut packet, now).expect("it was sealed for this end");
            let mut packet = [0; TRANSMIT_CAPACITY];
            while let Ok(Some(len)) = to.poll_transmit(&mut packet, now) {
                from.open(&mut packet[..len], now).expect("it was sealed for this end");
            }
            ends.reverse();
        }
        now += Duration::from_millis(1);
    }
    let [near, _far] = ends;
    near
}

/// Peers of a listening agent: first only configured, then connected with one lane each.
fn peers() {
    const TARGET: u64 = 64 * 1024;
    let folder = tempfile::tempdir().expect("the folder for temporary files is writable");
    let keys: Vec<String> = (0..WARM_UP_PEERS + CONNECTED_PEERS)
        .map(|place| keygen(&folder.path().join(format!("{place}.key"))))
        .collect();
    let underlay = SocketAddr::from((Ipv4Addr::LOCALHOST, ports::free()));
    let listen = format!("[transport]\nlisten = [\"{underlay}\"]\n");
    let peer = |name: &str, key: &str| format!("[[peer]]\nname = \"{name}\"\npublic_key = \"{key}\"\n");

    let mut exit = Agent::new("exit", &Place::Host);
    let mut strangers = String::new();
    for place in 0..CONFIGURED_PEERS {
        strangers += &peer(&format!("stranger{place}"), &stranger_key());
    }
    let configured = [listen.clone(), listen.clone() + &strangers].map(|configuration| {
        exit.configure(&configuration);
        exit.start();
        let resident = settled(&mut exit);
        exit.kill();
        resident
    });
    row(
        &format!("peer: resident, {CONFIGURED_PEERS} only configured"),
        grown(configured, CONFIGURED_PEERS),
        "",
    );

    let known = keys.iter().enumerate().map(|(place, key)| peer(&format!("entry{place}"), key));
    exit.configure(&(listen + &known.collect::<String>()));
    exit.start();
    let mut entries: Vec<Running> = Vec::new();
    let resident = [WARM_UP_PEERS, WARM_UP_PEERS + CONNECTED_PEERS].map(|count| {
        let more = entries.len() as u64..count;
        entries.extend(more.map(|place| entry(folder.path(), place, exit.key(), underlay)));
        exit.wait_for_count("culvert_lanes", &[("state", "up")], count);
        settled(&mut exit)
    });
    row(
        &format!("peer: resident, {CONNECTED_PEERS} connected with a lane each"),
        grown(resident, CONNECTED_PEERS),
        TARGET,
    );
    drop(entries);
}

/// A key that nobody has.
fn stranger_key() -> String {
    Identity::generate().expect("the kernel has randomness").public_key().to_string()
}

/// An agent that dials `underlay` and does nothing else.
fn entry(folder: &Path, place: u64, exit_key: &str, underlay: SocketAddr) -> Running {
    let file = folder.join(format!("{place}.toml"));
    let text = format!(
        "identity = {{ key_file = \"{place}.key\", state_dir = \"{place}\" }}\ncontrol.socket = \"\"\n[[peer]]\nname = \"exit\"\npublic_key = \"{exit_key}\"\n\
         endpoints = [\"{underlay}\"]\nlanes = 1\n"
    );
    fs::write(&file, text).expect("the folder is ours");
    let mut command = Place::Host.command(binary());
    command.args(["run", "--config"]).arg(file);
    Running::start("entry", command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null()))
}

/// Flows at both ends of a pair, each opened by one datagram of a client of its own, to a service that does not answer.
fn flows() {
    const TARGET: u64 = 1024;
    let sink = UdpSocket::bind((Ipv4Addr::LOCALHOST, 0)).expect("a port is free");
    let service = sink.local_addr().expect("it is bound");
    let ingress = SocketAddr::from((Ipv4Addr::LOCALHOST, ports::free()));
    let plan = Plan::default().service("sink", service, "idle = \"1h\"\n").forward("sink", ingress);
    let mut pair = plan.start();
    // Buffers of the first packets are not those of the flows.
    open_flows(ingress, 0..100);
    pair.exit.wait_for_count("culvert_flows", &[("peer", "entry")], 100);
    let before = [settled(&mut pair.entry), settled(&mut pair.exit)];
    open_flows(ingress, 100..100 + FLOWS);
    pair.exit.wait_for_count("culvert_flows", &[("peer", "entry")], 100 + FLOWS);
    let after = [settled(&mut pair.entry), settled(&mut pair.exit)];
    for (end, name) in ["entry, which opened them", "exit, with a socket each"].into_iter().enumerate() {
        let each = grown([before[end], after[end]], FLOWS);
        row(&format!("flow: resident, {FLOWS} at the {name}"), each, TARGET);
    }
}

/// One datagram from each of so many loopback addresses.
fn open_flows(ingress: SocketAddr, places: std::ops::Range<u64>) {
    for place in places {
        let [.., high, low] = place.to_be_bytes();
        let client = UdpSocket::bind((Ipv4Addr::new(127, 1, high, low), 0)).expect("all of 127/8 is ours");
        client.send_to(b"one datagram", ingress).expect("loopback takes it");
        if place % 100 == 0 {
            thread::sleep(Duration::from_millis(5));
        }
    }
}

/// The anonymous resident memory of an agent, once it has had time to come to rest; bytes.
fn settled(agent: &mut Agent) -> u64 {
    thread::sleep(Duration::from_secs(3));
    let status = fs::read_to_string(format!("/proc/{}/status", agent.process().pid())).expect("it runs");
    let field = status.lines().find_map(|line| line.strip_prefix("RssAnon:")).expect("the kernel says it");
    let kib: u64 = field.trim().trim_end_matches(" kB").parse().expect("a number");
    kib * 1024
}

/// What each of `count` things added, bytes.
fn grown([before, after]: [u64; 2], count: u64) -> u64 {
    after.saturating_sub(before) / count
}
