//! Workers over the network in memory, in virtual time.

use std::{
    cell::RefCell,
    cmp::Reverse,
    collections::BinaryHeap,
    net::{IpAddr, SocketAddr},
    path::Path,
    rc::Rc,
    sync::Arc,
    time::{Duration, Instant},
};

use rand::{RngExt, SeedableRng, rngs::StdRng};

use crate::{
    admin::Health,
    clock::{Clock, ManualClock},
    config::Config,
    control::tls::TlsIdentity,
    identity::Identity,
    io::{
        Net, Path as UdpPath, Ready, ReceiveBatch, SendBatch, TcpStream, Token, UdpOptions, UdpRole,
        UdpSocket,
        memory::{Datagram, MemoryFabric, MemoryNet, Verdict},
    },
    metrics::Metrics,
    roster::Roster,
    worker::{Command, Exchange, PeerSnapshot, Publisher, Setup, Snapshots, Worker},
};

/// What the network between hosts does to datagrams.
pub(super) struct Weather {
    /// One way.
    pub(super) delay: Duration,
    /// How many of a hundred are lost between agents.
    pub(super) loss_percent: u32,
    /// Datagrams for which this is true are lost.
    pub(super) block: Box<dyn Fn(SocketAddr, SocketAddr) -> bool>,
}

/// A datagram under way.
#[derive(PartialEq, Eq, PartialOrd, Ord)]
struct InTransit {
    arrives: Instant,
    order: u64,
    from: SocketAddr,
    to: SocketAddr,
    ecn: u8,
    payload: Vec<u8>,
}

/// A simulated network, its clock and its agents.
pub(super) struct World {
    pub(super) clock: ManualClock,
    pub(super) weather: Rc<RefCell<Weather>>,
    fabric: MemoryFabric,
    transit: Rc<RefCell<BinaryHeap<Reverse<InTransit>>>>,
    agent_addresses: Rc<RefCell<Vec<IpAddr>>>,
    agents: Vec<Option<Agent>>,
    /// How many workers the next agent gets.
    workers: u8,
    /// What is done to the configuration of the next agents.
    tune: fn(&mut Config),
}

/// One agent of a world.
pub(super) struct Agent {
    pub(super) workers: Vec<Worker>,
    pub(super) metrics: Arc<Metrics>,
    pub(super) roster: Arc<Roster>,
    snapshots: Arc<Snapshots>,
    /// Of each worker, when it wants its next turn; `None` once it has ended.
    deadlines: Vec<Option<Option<Instant>>>,
}

impl Agent {
    /// Lanes of all workers.
    pub(super) fn lanes(&self) -> usize {
        self.workers.iter().map(|worker| worker.lanes.iter().count()).sum()
    }

    /// Local sockets of all workers, ports for clients included.
    pub(super) fn local_sockets(&self) -> usize {
        self.workers.iter().map(|worker| worker.locals.iter().count()).sum()
    }

    fn has_ended(&self) -> bool {
        self.deadlines.iter().all(Option::is_none)
    }
}

impl World {
    /// A network with 5 ms one way; randomness comes from `seed`.
    pub(super) fn new(seed: u64) -> Self {
        let clock = ManualClock::default();
        let fabric = MemoryFabric::new();
        let weather = Rc::new(RefCell::new(Weather {
            delay: Duration::from_millis(5),
            loss_percent: 0,
            block: Box::new(|_, _| false),
        }));
        let transit = Rc::<RefCell<BinaryHeap<Reverse<InTransit>>>>::default();
        let mut rng = StdRng::seed_from_u64(seed);
        let mut order = 0;
        let agent_addresses = Rc::<RefCell<Vec<IpAddr>>>::default();
        let (now, rules, heap) = (clock.clone(), Rc::clone(&weather), Rc::clone(&transit));
        let known = Rc::clone(&agent_addresses);
        fabric.set_hook(move |datagram| {
            if datagram.to.ip().is_loopback() {
                return Verdict::Deliver;
            }
            let rules = rules.borrow();
            let between_agents =
                [datagram.from, datagram.to].iter().all(|end| known.borrow().contains(&end.ip()));
            let lost = between_agents && rng.random_range(0..100) < rules.loss_percent;
            if lost || (rules.block)(datagram.from, datagram.to) {
                return Verdict::Drop;
            }
            order += 1;
            heap.borrow_mut().push(Reverse(InTransit {
                arrives: now.now() + rules.delay,
                order,
                from: datagram.from,
                to: datagram.to,
                ecn: datagram.ecn,
                payload: datagram.payload.to_vec(),
            }));
            Verdict::Drop
        });
        Self {
            clock,
            weather,
            fabric,
            transit,
            agent_addresses,
            agents: Vec::new(),
            tune: |_| (),
            workers: std::env::var("CW").map_or(1, |w| w.parse().unwrap()),
        }
    }

    /// How many workers the agents have that are started from now on.
    pub(super) fn set_workers(&mut self, workers: u8) {
        self.workers = workers;
    }

    /// What is done to the configuration of agents that are started from now on.
    pub(super) fn set_tune(&mut self, tune: fn(&mut Config)) {
        self.tune = tune;
    }

    /// Starts an agent on a host of its own with these addresses; returns its place.
    pub(super) fn start(&mut self, toml: &str, identity: &Identity, addresses: &[IpAddr], seed: u8) -> usize {
        self.agents.push(None);
        self.agent_addresses.borrow_mut().extend_from_slice(addresses);
        let place = self.agents.len() - 1;
        self.restart(place, toml, identity, addresses, seed);
        place
    }

    /// Starts an agent again under the same place, as a new process; the old one is gone without a word.
    pub(super) fn restart(
        &mut self,
        place: usize,
        toml: &str,
        identity: &Identity,
        addresses: &[IpAddr],
        seed: u8,
    ) {
        self.agents[place] = None;
        let mut config = Config::parse(toml, Path::new(".")).unwrap();
        (self.tune)(&mut config);
        let config = Arc::new(config);
        let (metrics, now) = (Arc::new(Metrics::new("test").unwrap()), self.clock.now());
        let health = Arc::new(Health::new(usize::from(self.workers), now));
        let snapshots = Arc::<Snapshots>::default();
        let exchange = Exchange::new(self.workers, config.peers.len(), now);
        let roster = Roster::new(&config, identity.public_key());
        roster.attach(&exchange);
        let readies: Vec<Ready> = (0..self.workers).map(|_| Ready::new()).collect();
        let nets = self.fabric.worker_hosts(addresses, &readies);
        let workers = (0..self.workers).zip(nets).zip(readies).map(|((worker, net), ready)| {
            let place = usize::from(worker);
            let setup = Setup {
                identity: Arc::new(TlsIdentity::from_pkcs8(&identity.pkcs8_der()).unwrap()),
                net: Box::new(net),
                ready,
                instance: [seed; 16],
                seed: [seed.wrapping_add(worker.wrapping_mul(101)); 32],
                worker,
                exchange: Arc::clone(&exchange),
                roster: Arc::clone(&roster),
                metrics: Publisher::new(
                    &metrics,
                    &config,
                    place,
                    Arc::clone(&health),
                    Arc::clone(&snapshots),
                ),
                config: Arc::clone(&config),
            };
            Worker::new(setup, now).unwrap()
        });
        let workers: Vec<Worker> = workers.collect();
        let deadlines = workers.iter().map(|_| Some(None)).collect();
        self.agents[place] = Some(Agent { workers, metrics, roster, snapshots, deadlines });
    }

    /// Ends an agent without a word, as `kill -9` does.
    pub(super) fn kill(&mut self, place: usize) {
        self.agents[place] = None;
    }

    /// Asks an agent to stop.
    pub(super) fn stop(&mut self, place: usize) {
        for worker in &self.agent(place).workers {
            assert!(worker.inbox().put(Command::Shutdown { within: Duration::from_secs(3) }));
        }
    }

    pub(super) fn has_ended(&self, place: usize) -> bool {
        self.agents[place].as_ref().is_none_or(Agent::has_ended)
    }

    pub(super) fn agent(&mut self, place: usize) -> &mut Agent {
        self.agents[place].as_mut().unwrap()
    }

    /// The first peer of an agent, as it is now.
    pub(super) fn peer(&mut self, place: usize) -> PeerSnapshot {
        self.peers(place).swap_remove(0)
    }

    /// The peers of an agent, as they are now.
    pub(super) fn peers(&mut self, place: usize) -> Vec<PeerSnapshot> {
        let now = self.clock.now();
        let agent = self.agent(place);
        for worker in &mut agent.workers {
            worker.publish_last(now);
        }
        agent.snapshots.get().peers
    }

    /// The value of a series of an agent's metrics, e.g. `culvert_flows{peer="exit"}`.
    pub(super) fn metric(&mut self, place: usize, series: &str) -> u64 {
        let now = self.clock.now();
        let agent = self.agent(place);
        for worker in &mut agent.workers {
            worker.publish_last(now);
        }
        let text = agent.metrics.render().unwrap();
        let line = text.lines().find_map(|line| line.strip_prefix(series));
        line.unwrap_or_else(|| panic!("no series {series}")).trim().parse().unwrap()
    }

    /// Lets `time` pass.
    pub(super) fn run(&mut self, time: Duration) {
        let until = self.clock.now() + time;
        self.run_until(until, |_| false);
    }

    /// Lets time pass until `done`, at most `limit`; panics if it does not come true.
    pub(super) fn run_till(&mut self, limit: Duration, done: impl FnMut(&mut Self) -> bool) {
        let until = self.clock.now() + limit;
        assert!(self.run_until(until, done), "not within {limit:?}");
    }

    fn run_until(&mut self, until: Instant, mut done: impl FnMut(&mut Self) -> bool) -> bool {
        loop {
            self.turns();
            if done(self) {
                return true;
            }
            let now = self.clock.now();
            if now >= until {
                return false;
            }
            let arrival = self.transit.borrow().peek().map(|Reverse(datagram)| datagram.arrives);
            let deadlines = self.agents.iter().flatten().flat_map(|agent| &agent.deadlines);
            let deadlines = deadlines.filter_map(|deadline| deadline.flatten());
            let next = deadlines.chain(arrival).min().unwrap_or(until).clamp(now, until);
            // A deadline that has passed needs a step of time all the same: timers fire at their time, not before.
            let step = next.saturating_duration_since(now).max(Duration::from_micros(1));
            self.clock.advance(step);
            self.arrive();
        }
    }

    /// Lets every agent take turns until none has anything to do now.
    fn turns(&mut self) {
        for _ in 0..10_000 {
            let mut busy = false;
            for agent in self.agents.iter_mut().flatten() {
                for (worker, deadline) in agent.workers.iter_mut().zip(&mut agent.deadlines) {
                    if deadline.is_none() {
                        continue;
                    }
                    let turn = worker.turn(self.clock.now());
                    *deadline = (!turn.ended).then_some(turn.deadline);
                    busy |= turn.busy && !turn.ended;
                }
                // A worker may have given another that had its turn something to do.
                let given = agent.workers.iter().zip(&agent.deadlines);
                busy |= given
                    .into_iter()
                    .any(|(worker, deadline)| deadline.is_some() && !worker.ready().is_empty());
            }
            if !busy {
                return;
            }
        }
        panic!("an agent is busy for ever");
    }

    fn arrive(&self) {
        let now = self.clock.now();
        while let Some(datagram) = self.next_arrival(now) {
            let InTransit { from, to, ecn, payload, .. } = &datagram;
            self.fabric.inject(&Datagram { from: *from, to: *to, ecn: *ecn, payload });
        }
    }

    fn next_arrival(&self, now: Instant) -> Option<InTransit> {
        let mut transit = self.transit.borrow_mut();
        if transit.peek().is_some_and(|Reverse(datagram)| datagram.arrives <= now) {
            return transit.pop().map(|Reverse(datagram)| datagram);
        }
        None
    }

    /// Whether datagrams to a listening port go to the worker that their connection ID names, or all to the first.
    pub(super) fn set_steering(&self, steering: bool) {
        self.fabric.set_steering(steering);
    }

    /// A host of its own, for clients and services; datagrams to agents pass the weather.
    pub(super) fn host(&self, addresses: &[IpAddr]) -> Host {
        Host { net: self.fabric.host(addresses, Ready::new()), next_token: 0 }
    }
}

/// A host with clients or services of a test.
pub(super) struct Host {
    net: MemoryNet,
    next_token: u32,
}

impl Host {
    /// A UDP socket, connected if `to` is given.
    pub(super) fn udp(&mut self, bind: SocketAddr, to: Option<SocketAddr>) -> Udp {
        let role = if to.is_some() { UdpRole::Upstream } else { UdpRole::Ingress };
        let options = UdpOptions { bind, connect: to, role, buffer_bytes: 4 << 20, mark: 0, gso: true };
        let token = self.token();
        Udp { socket: self.net.udp(&options, token).unwrap() }
    }

    pub(super) fn tcp(&mut self, to: SocketAddr) -> Box<dyn TcpStream> {
        let token = self.token();
        self.net.tcp_connect(to, token).unwrap()
    }

    pub(super) fn tcp_listen(&mut self, at: SocketAddr) -> Box<dyn crate::io::TcpListener> {
        let token = self.token();
        self.net.tcp_listen(at, token).unwrap()
    }

    pub(super) fn token(&mut self) -> Token {
        self.next_token += 1;
        Token(self.next_token)
    }
}

/// A UDP socket of a test.
pub(super) struct Udp {
    socket: Box<dyn UdpSocket>,
}

impl Udp {
    pub(super) fn send(&mut self, to: SocketAddr, payload: &[u8]) {
        let mut batch = SendBatch::default();
        batch.tail(payload.len()).unwrap().copy_from_slice(payload);
        batch.commit(&UdpPath { destination: to, source: None, ecn: 0 }, 0, payload.len(), 1);
        self.socket.send(&mut batch, &mut |_, _| {});
    }

    /// Datagrams that found the receive buffer full.
    pub(super) fn drops(&self) -> u64 {
        self.socket.kernel_drops()
    }

    /// Everything that waits: who sent it, and what.
    pub(super) fn receive(&mut self) -> Vec<(SocketAddr, Vec<u8>)> {
        let mut received = Vec::new();
        let mut batch = ReceiveBatch::default();
        while self.socket.receive(&mut batch).is_ok() {
            for slot in 0..batch.len() {
                let meta = *batch.meta(slot);
                for segment in meta.segments() {
                    received.push((meta.source, batch.buffer(slot)[segment].to_vec()));
                }
            }
        }
        received
    }
}
