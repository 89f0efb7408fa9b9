//! The busy part of a round: what applications, strangers and an operator do at the same time.

use std::{
    fs,
    io::{ErrorKind, Read, Write},
    net::{Shutdown, SocketAddr, TcpStream, UdpSocket},
    path::PathBuf,
    sync::atomic::{AtomicBool, AtomicU64, Ordering::Relaxed},
    thread::{self, Scope},
    time::Duration,
};

use culvert_tests::{
    agent::keygen,
    clock::{self, PATIENCE},
    place::Place,
    random::Random,
};

use crate::scene::{CEILINGS, EXIT_INSIDE, Scene, ask, known};

/// UDP clients that are opened together, send, and are closed.
const WAVE: usize = 200;

/// Datagrams that strangers send in a second.
const STRANGERS_PER_SECOND: u64 = 500;

/// What was done in a round, or in all of them.
#[derive(Debug, Default)]
pub(crate) struct Tally {
    /// UDP clients that sent, each a flow.
    pub(crate) flows: u64,
    /// Answers that they got.
    pub(crate) answers: u64,
    /// Datagrams of the sender that does not pause, those into the tunnel, those of the branch that were answered.
    pub(crate) blasted: u64,
    pub(crate) tunnelled: u64,
    pub(crate) branch_answers: u64,
    /// TCP forwards whose bytes came back, that were cut on purpose, and that failed though nothing was restarted.
    pub(crate) forwards: u64,
    pub(crate) cut: u64,
    pub(crate) failed: u64,
    /// Datagrams of strangers, and answers to them.
    pub(crate) strange: u64,
    pub(crate) betrayed: u64,
    /// Peers that were added and removed, reloads, and either of them that was refused though nothing was restarted.
    pub(crate) peers: u64,
    pub(crate) reloads: u64,
    pub(crate) refused: u64,
}

impl Tally {
    /// The counts with their names.
    pub(crate) fn rows(&self) -> [(&'static str, u64); 13] {
        [
            ("UDP flows", self.flows),
            ("answers to them", self.answers),
            ("datagrams at full speed", self.blasted),
            ("datagrams answered through the tunnel", self.tunnelled),
            ("datagrams answered to the branch", self.branch_answers),
            ("TCP forwards, bytes compared", self.forwards),
            ("TCP forwards cut", self.cut),
            ("TCP forwards failed", self.failed),
            ("datagrams of strangers", self.strange),
            ("answers to strangers", self.betrayed),
            ("peers added and removed", self.peers),
            ("reloads", self.reloads),
            ("commands refused", self.refused),
        ]
    }

    pub(crate) fn add(&mut self, other: &Self) {
        self.flows += other.flows;
        self.answers += other.answers;
        self.blasted += other.blasted;
        self.tunnelled += other.tunnelled;
        self.branch_answers += other.branch_answers;
        self.forwards += other.forwards;
        self.cut += other.cut;
        self.failed += other.failed;
        self.strange += other.strange;
        self.betrayed += other.betrayed;
        self.peers += other.peers;
        self.reloads += other.reloads;
        self.refused += other.refused;
    }
}

/// The busy part of one round.
pub(crate) struct Load {
    place: Place,
    echo_port: SocketAddr,
    sink_port: SocketAddr,
    branch_port: SocketAddr,
    inside: Option<SocketAddr>,
    underlay: SocketAddr,
    exit_config: PathBuf,
    guest_keys: Vec<String>,
    round: u64,
    random: Random,
    counts: Counts,
    /// An agent was or is being restarted: not everything succeeds.
    restarting: AtomicBool,
    stop: AtomicBool,
}

#[derive(Default)]
struct Counts {
    flows: AtomicU64,
    answers: AtomicU64,
    blasted: AtomicU64,
    tunnelled: AtomicU64,
    branch_answers: AtomicU64,
    forwards: AtomicU64,
    cut: AtomicU64,
    failed: AtomicU64,
    strange: AtomicU64,
    betrayed: AtomicU64,
    peers: AtomicU64,
    reloads: AtomicU64,
    refused: AtomicU64,
}

impl Load {
    /// Of this round; the exit is told of the branch, and forgets guests whose removal a restart came in the way of.
    pub(crate) fn new(scene: &Scene, round: u64, random: Random) -> Self {
        let folder = scene.branch.folder().to_owned();
        let exit_config = scene.pair.exit.config();
        for guest in known(&exit_config).iter().filter(|name| name.starts_with("guest-")) {
            ask(&exit_config, &["peer", "remove", guest])
                .unwrap_or_else(|error| panic!("{guest} is not removed: {error}"));
        }
        // Where the exit was restarted meanwhile it may still be known.
        drop(ask(&exit_config, &["peer", "remove", "branch"]));
        ask(&exit_config, &["peer", "add", "branch", scene.branch.key(), "--service", "echo"])
            .unwrap_or_else(|error| panic!("the branch is not added: {error}"));
        let guest = |number: u32| {
            let file = folder.join(format!("guest-{round}-{number}.key"));
            let key = keygen(&file);
            fs::remove_file(file).expect("it was made");
            key
        };
        Self {
            place: scene.places[0].clone(),
            echo_port: scene.echo_port,
            sink_port: scene.sink_port,
            branch_port: scene.branch_port,
            inside: scene.tunnel.then(|| SocketAddr::from((EXIT_INSIDE, scene.echo.port()))),
            underlay: scene.pair.underlay,
            exit_config,
            guest_keys: (0..4).map(guest).collect(),
            round,
            random,
            counts: Counts::default(),
            restarting: AtomicBool::new(false),
            stop: AtomicBool::new(false),
        }
    }

    /// Starts all of it, on threads of `scope`.
    pub(crate) fn start<'scope>(&'scope self, scope: &'scope Scope<'scope, '_>) {
        scope.spawn(|| self.waves());
        scope.spawn(|| self.blast());
        scope.spawn(|| self.converse(self.branch_port, &self.counts.branch_answers));
        if let Some(inside) = self.inside {
            scope.spawn(move || self.converse(inside, &self.counts.tunnelled));
        }
        scope.spawn(|| self.forward(1));
        scope.spawn(|| self.forward(2));
        scope.spawn(|| self.strangers());
        scope.spawn(|| self.operate());
    }

    /// Whether failures from now on may be those of an agent that does not run.
    pub(crate) fn restarting(&self, restarting: bool) {
        self.restarting.store(restarting, Relaxed);
    }

    /// Ends it; the threads end soon.
    pub(crate) fn stop(&self) {
        self.stop.store(true, Relaxed);
    }

    /// What was done.
    pub(crate) fn tally(&self) -> Tally {
        let counts = &self.counts;
        Tally {
            flows: counts.flows.load(Relaxed),
            answers: counts.answers.load(Relaxed),
            blasted: counts.blasted.load(Relaxed),
            tunnelled: counts.tunnelled.load(Relaxed),
            branch_answers: counts.branch_answers.load(Relaxed),
            forwards: counts.forwards.load(Relaxed),
            cut: counts.cut.load(Relaxed),
            failed: counts.failed.load(Relaxed),
            strange: counts.strange.load(Relaxed),
            betrayed: counts.betrayed.load(Relaxed),
            peers: counts.peers.load(Relaxed),
            reloads: counts.reloads.load(Relaxed),
            refused: counts.refused.load(Relaxed),
        }
    }

    fn stopped(&self) -> bool {
        self.stop.load(Relaxed)
    }

    /// Sleeps, but not longer than the load lasts.
    fn pause(&self, pause: Duration) {
        let end = clock::now() + pause;
        while !self.stopped() && clock::now() < end {
            thread::sleep(Duration::from_millis(10));
        }
    }

    /// A socket at the applications' place.
    fn socket(&self, to: SocketAddr) -> UdpSocket {
        self.place.enter(|| {
            let socket = UdpSocket::bind(("0.0.0.0", 0)).expect("a port is free");
            socket.connect(to).expect("there is a route");
            socket.set_read_timeout(Some(Duration::from_millis(100))).expect("not zero");
            socket
        })
    }

    /// Many flows at once, then other ones.
    fn waves(&self) {
        while !self.stopped() {
            let clients: Vec<UdpSocket> = (0..WAVE).map(|_| self.socket(self.echo_port)).collect();
            for turn in 0..3_u8 {
                for client in &clients {
                    // Where nobody listens just now, the error of the datagram before is all there is.
                    drop(client.send(&[turn; 100]));
                }
                self.pause(Duration::from_millis(50));
            }
            let mut buffer = [0; 200];
            for client in &clients {
                client.set_nonblocking(true).expect("a socket");
                while client.recv(&mut buffer).is_ok() {
                    self.counts.answers.fetch_add(1, Relaxed);
                }
            }
            self.counts.flows.fetch_add(clients.len() as u64, Relaxed);
            self.pause(Duration::from_millis(500));
        }
    }

    /// As fast as the kernel takes it for some seconds, then nothing for some.
    fn blast(&self) {
        let socket = self.socket(self.sink_port);
        while !self.stopped() {
            let end = clock::now() + Duration::from_secs(5);
            while !self.stopped() && clock::now() < end {
                for _ in 0..64 {
                    let sent = socket.send(&[7; 1150]).is_ok();
                    self.counts.blasted.fetch_add(sent.into(), Relaxed);
                }
            }
            self.pause(Duration::from_secs(3));
        }
    }

    /// One datagram after the other, each after the answer to the one before.
    fn converse(&self, to: SocketAddr, answers: &AtomicU64) {
        let socket = self.socket(to);
        let mut buffer = [0; 1500];
        while !self.stopped() {
            let length = 1 + (answers.load(Relaxed) as usize * 37) % 1100;
            drop(socket.send(&vec![length as u8; length]));
            if socket.recv(&mut buffer).is_ok_and(|received| received == length) {
                answers.fetch_add(1, Relaxed);
            }
            self.pause(Duration::from_millis(5));
        }
    }

    /// TCP forwards, one after the other: three bring a file back, the fourth is cut.
    fn forward(&self, number: u64) {
        let mut random = Random::new(self.random.seed);
        for _ in 0..self.round * 7 + number {
            random.bits();
        }
        while !self.stopped() {
            let length = 1 + (random.bits() % 400_000) as usize;
            let bytes = random.bytes(length);
            let cut = random.bits().is_multiple_of(4);
            let begun = clock::now();
            let done = self.transfer(&bytes, cut);
            let counter = match done {
                Ok(()) if cut => &self.counts.cut,
                Ok(()) => &self.counts.forwards,
                Err(_) => &self.counts.failed,
            };
            let restarting = self.restarting.load(Relaxed);
            if done.is_ok() || !restarting {
                counter.fetch_add(1, Relaxed);
            }
            if let Err((step, error)) = done
                && !restarting
            {
                let after = begun.elapsed();
                crate::say(&format!(
                    "a forward of {length} bytes failed to {step} after {after:.1?}: {error}"
                ));
            }
            self.pause(Duration::from_millis(100));
        }
    }

    /// Sends `bytes` and compares what comes back, or ends in the midst of sending; the step that failed, and why.
    fn transfer(&self, bytes: &[u8], cut: bool) -> Result<(), (&'static str, std::io::Error)> {
        let at = |step| move |error| (step, error);
        let connected = self.place.enter(|| TcpStream::connect_timeout(&self.echo_port, PATIENCE));
        let mut stream = connected.map_err(at("connect"))?;
        stream.set_read_timeout(Some(PATIENCE)).map_err(at("set up"))?;
        stream.set_write_timeout(Some(PATIENCE)).map_err(at("set up"))?;
        if cut {
            return stream.write_all(&bytes[..bytes.len() / 2]).map_err(at("send"));
        }
        stream.write_all(bytes).map_err(at("send"))?;
        stream.shutdown(Shutdown::Write).map_err(at("end"))?;
        let mut back = Vec::new();
        stream.read_to_end(&mut back).map_err(at("receive"))?;
        if back == bytes { Ok(()) } else { Err(("receive the same", ErrorKind::InvalidData.into())) }
    }

    /// Datagrams that prove nothing, to the exit's port: no byte may come back.
    fn strangers(&self) {
        let socket = self.socket(self.underlay);
        socket.set_nonblocking(true).expect("a socket");
        let mut random = self.random.clone();
        let mut answer = [0; 1500];
        while !self.stopped() {
            for _ in 0..STRANGERS_PER_SECOND / 50 {
                let length = 1 + (random.bits() % 1400) as usize;
                let mut datagram = random.bytes(length);
                if random.bits().is_multiple_of(2) {
                    // An Initial of version 1 with a token as long as a knock.
                    datagram = random.bytes(1200);
                    datagram[..6].copy_from_slice(&[0xc3, 0, 0, 0, 1, 8]);
                    datagram[14..18].copy_from_slice(&[0, 0x40, 136, 0]);
                }
                let sent = socket.send(&datagram).is_ok();
                self.counts.strange.fetch_add(sent.into(), Relaxed);
            }
            while socket.recv(&mut answer).is_ok() {
                self.counts.betrayed.fetch_add(1, Relaxed);
            }
            self.pause(Duration::from_millis(20));
        }
    }

    /// Peers come and go, and the configuration changes.
    fn operate(&self) {
        let mut turn = 0;
        while !self.stopped() {
            let key = &self.guest_keys[turn % self.guest_keys.len()];
            let name = format!("guest-{}-{turn}", self.round);
            self.command(&["peer", "add", &name, key, "--service", "echo"], None);
            self.reload(turn);
            self.command(&["peer", "remove", &name], Some(&self.counts.peers));
            turn += 1;
            self.pause(Duration::from_millis(700));
        }
        self.command(&["peer", "remove", "branch"], Some(&self.counts.peers));
    }

    fn reload(&self, turn: usize) {
        let text = fs::read_to_string(&self.exit_config).expect("it is configured");
        let [from, to] = if text.contains(CEILINGS[0]) { CEILINGS } else { [CEILINGS[1], CEILINGS[0]] };
        assert!(text.contains(from), "turn {turn}");
        fs::write(&self.exit_config, text.replacen(from, to, 1)).expect("the folder is ours");
        self.command(&["reload"], Some(&self.counts.reloads));
    }

    /// Runs a command. While an agent is restarted it may fail, or be carried out without an answer.
    fn command(&self, args: &[&str], counter: Option<&AtomicU64>) {
        if let Err(error) = ask(&self.exit_config, args) {
            if !self.restarting.load(Relaxed) {
                self.counts.refused.fetch_add(1, Relaxed);
                crate::say(&format!("culvert {args:?}: {}", error.trim()));
            }
            return;
        }
        if let Some(counter) = counter {
            counter.fetch_add(1, Relaxed);
        }
    }
}
