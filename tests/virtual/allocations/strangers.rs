//! No kind of stranger's datagram makes a worker allocate, or send a byte.

use std::{net::SocketAddr, path::Path, rc::Rc, sync::Arc, time::Duration};

use base::clock::{Clock, ManualClock};
use config::Config;
use culvert_tests::random::Random;
use engine::{
    health::Health,
    hub::Hub,
    metrics::Value,
    registry::PeerRegistry,
    worker::{Publisher, Setup, Snapshots, Worker},
};
use gate::{Own, identity::Identity, replay_log::MemoryReplayLog, table::SingleUse, tls::TlsIdentity};
use net::{Ready, UdpRole, batch::Meta, steering};
use zeroize::Zeroizing;

use super::script::{Buffers, Script, ScriptNet};

const ENTRY: &str = "192.0.2.1:4433";
const EXIT: &str = "192.0.2.2:4433";
const STRANGER: &str = "203.0.113.66:50000";

/// Bytes of a knock, and of the token of a Retry.
const TOKENS: [usize; 2] = [136, 236];

/// The first worker of an agent over scripted sockets.
struct Agent {
    worker: Worker,
    script: Rc<Script>,
    snapshots: Arc<Snapshots>,
    clock: ManualClock,
}

impl Agent {
    fn new(identity: &Identity, toml: &str, workers: u8, clock: &ManualClock) -> Self {
        let toml = format!("identity = {{ key_file = \"none\" }}\n{toml}");
        let config = Arc::new(Config::parse(&toml, Path::new(".")).unwrap());
        let (snapshots, now) = (Arc::<Snapshots>::default(), clock.now());
        let health = Arc::new(Health::new(usize::from(workers), now));
        let (ready, journal) = (Ready::default(), Box::new(MemoryReplayLog::default()));
        let script = Script::new(&ready);
        let setup = Setup {
            identity: Arc::new(TlsIdentity::from_pkcs8(&identity.pkcs8_der()).unwrap()),
            own: Own::new(identity),
            registry: PeerRegistry::new(&config, identity.public_key()),
            refusals: Arc::default(),
            knocks: SingleUse::restore(journal, workers, Vec::new(), 0, now, clock.unix_seconds()),
            clock: Arc::new(clock.clone()),
            net: Box::new(ScriptNet(Rc::clone(&script))),
            ready,
            instance: [1; 16],
            seed: [2; 32],
            worker: 0,
            hub: Hub::new(workers, config.peers.len(), now),
            metrics: Publisher::new(0, health, Arc::clone(&snapshots)),
            config: Arc::clone(&config),
            site: None,
            tunnels: None,
            tun: None,
        };
        Self { worker: Worker::new(setup, now).unwrap(), script, snapshots, clock: clock.clone() }
    }

    /// Turns until nothing waits.
    fn settle(&mut self) {
        while self.worker.turn(self.clock.now()).busy {}
    }

    /// Lets time pass in steps of a second.
    fn wait(&mut self, seconds: u32) {
        for _ in 0..seconds {
            self.clock.advance(Duration::from_secs(1));
            self.settle();
        }
    }

    /// How many datagrams have ended at each step of the gate.
    fn ended(&mut self) -> Vec<(String, u64)> {
        self.wait(1);
        let (_, steps) = self.snapshots.series("culvert_gate_datagrams_total").remove(0);
        let steps = steps.iter().map(|(labels, value)| match value {
            Value::Count(count) => (labels[0].clone(), *count),
            Value::Number(_) | Value::Buckets(_) => panic!("{value:?}"),
        });
        steps.collect()
    }
}

fn listening(agent: &str, more: &str) -> String {
    format!("transport = {{ listen = [\"{agent}\"] }}\n{more}")
}

fn peer(name: &str, identity: &Identity, more: &str) -> String {
    format!("[[peer]]\nname = \"{name}\"\npublic_key = \"{}\"\n{more}\n", identity.public_key())
}

/// A long header with these fields, `length` bytes in all; what there is no room for is cut off.
fn long(
    random: &mut Random,
    (first, version): (u8, u32),
    (dcid, token): (u8, usize),
    length: usize,
) -> Vec<u8> {
    let mut datagram = vec![first];
    datagram.extend(version.to_be_bytes());
    for id in [dcid, 8] {
        datagram.push(id);
        datagram.extend(random.bytes(id.into()));
    }
    let varint = |value: usize| (u16::try_from(value).unwrap() | 0x4000).to_be_bytes();
    datagram.extend(varint(token));
    datagram.extend(random.bytes(token));
    datagram.extend(varint(length.saturating_sub(datagram.len() + 2)));
    let rest = length.saturating_sub(datagram.len());
    datagram.extend(random.bytes(rest));
    datagram.truncate(length);
    datagram
}

/// Every kind of datagram that a stranger could send.
fn kinds(random: &mut Random) -> Vec<Vec<u8>> {
    let mut kinds: Vec<Vec<u8>> = (0..=1500).map(|length| random.bytes(length)).collect();
    let versions = [0, 1, 0x6b33_43cf, 0x1a2a_3a4a, 0xff00_001d];
    for first in [0xc0, 0xd0, 0xe0, 0xf0, 0x80, 0xff] {
        for version in versions {
            for dcid in [0, 7, 8, 20, 21, 255] {
                for token in [0, 15, 16, TOKENS[0], TOKENS[1], 1000] {
                    for length in [60, 1199, 1200, 1452] {
                        kinds.push(long(random, (first, version), (dcid, token), length));
                    }
                }
            }
        }
    }
    for length in [9, 25, 600, 1200] {
        let mut short = random.bytes(length);
        short[0] = 0x40 | short[0] & 0x3f;
        kinds.push(short);
    }
    kinds
}

/// `datagrams` as a socket receives them from `source`: each by itself, then those of 1200 bytes as GRO joins them.
fn buffers(datagrams: &[Vec<u8>], source: &str) -> Buffers {
    let meta =
        |len, segment| Meta { len, segment, source: source.parse::<SocketAddr>().unwrap(), ..Meta::EMPTY };
    let mut buffers: Vec<_> = datagrams
        .iter()
        .map(|datagram| (meta(datagram.len(), datagram.len().max(1)), datagram.clone()))
        .collect();
    let full: Vec<&[u8]> = datagrams.iter().filter(|one| one.len() == 1200).map(Vec::as_slice).collect();
    for joined in full.chunks(54) {
        buffers.push((meta(joined.len() * 1200, 1200), joined.concat()));
    }
    Rc::new(buffers)
}

/// Sends `buffers` to all sockets of `role`, again and again: the first time may allocate, the others must not. Returns
/// where in the gate they ended.
#[track_caller]
fn assert_free(agent: &mut Agent, role: UdpRole, buffers: &Buffers) -> Vec<(String, u64)> {
    const PASSES: u64 = 5;
    let before = agent.ended();
    agent.script.sent();
    let mut sockets = agent.script.receive(role, buffers);
    agent.settle();
    let allocated = dhat::HeapStats::get().total_blocks;
    for _ in 1..PASSES {
        sockets = agent.script.receive(role, buffers);
        agent.settle();
    }
    assert!(allocated > 0, "the profiler sees the first pass");
    assert_eq!(dhat::HeapStats::get().total_blocks, allocated, "{role:?}");
    assert_eq!(agent.script.sent(), Vec::<Vec<u8>>::new(), "{role:?}");
    let datagrams =
        PASSES * sockets as u64 * buffers.iter().map(|(meta, _)| meta.datagrams() as u64).sum::<u64>();
    let grown: Vec<_> = agent
        .ended()
        .into_iter()
        .zip(before)
        .map(|((step, after), (_, before))| (step, after - before))
        .filter(|(_, count)| *count > 0)
        .collect();
    assert!(sockets > 0 && datagrams == grown.iter().map(|(_, count)| count).sum::<u64>(), "{grown:?}");
    assert!(
        grown.iter().all(|(step, _)| ["class", "token", "used", "mac"].contains(&step.as_str())),
        "{grown:?}"
    );
    grown
}

#[test]
fn strangers_make_a_worker_neither_allocate_nor_speak() {
    let _profiler = dhat::Profiler::builder().testing().build();
    let mut random = Random::new(60);
    let [entry, exit] = [1, 2].map(|seed| Identity::from_seed(Zeroizing::new([seed; 32])).unwrap());
    let clock = ManualClock::new(Duration::from_secs(1_780_000_000));
    let kinds = kinds(&mut random);

    // The entry dials: strangers come to the socket that it dials with, too.
    let toml = listening(ENTRY, &peer("exit", &exit, &format!("endpoints = [\"{EXIT}\"]")));
    let mut dialling = Agent::new(&entry, &toml, 1, &clock);
    dialling.settle();
    let knocks = dialling.script.sent();
    assert_eq!(knocks.len(), 2, "the two datagrams of a hybrid handshake");
    for role in [UdpRole::QuicListen, UdpRole::QuicDial] {
        assert_free(&mut dialling, role, &buffers(&kinds, STRANGER));
    }

    // The exit takes the knock; once that handshake has ended, whoever repeats it is a stranger.
    let toml = listening(EXIT, &peer("entry", &entry, ""));
    let mut alone = Agent::new(&exit, &toml, 1, &clock);
    for (knock, answered) in knocks.iter().zip([false, true]) {
        alone.script.receive(UdpRole::QuicListen, &buffers(std::slice::from_ref(knock), ENTRY));
        alone.settle();
        assert_eq!(
            !alone.script.sent().is_empty(),
            answered,
            "the handshake begins with the second datagram"
        );
    }
    alone.wait(30);
    let with_replays: Vec<_> = kinds.iter().chain(&knocks).cloned().collect();
    for source in [STRANGER, ENTRY] {
        let ended = assert_free(&mut alone, UdpRole::QuicListen, &buffers(&with_replays, source));
        assert!(ended.iter().any(|(step, _)| step == "used"), "{ended:?}");
    }

    // What another worker is to check is told apart before it is handed over.
    let mut first_of_two = Agent::new(&exit, &toml, 2, &clock);
    assert!(kinds.iter().any(|datagram| steering::owner(datagram, 2) == 1));
    assert_free(&mut first_of_two, UdpRole::QuicListen, &buffers(&kinds, STRANGER));
}
