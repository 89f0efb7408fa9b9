//! Whole agents over a network in memory, in virtual time: what the tests of this package and `tests/virtual/sim` drive.
//!
//! The agents' code is the daemon's own, from [`Worker::turn`] on: a [`World`] gives it the clock, the network and the seeds.
#![expect(clippy::unwrap_used, reason = "a mistake of a test is to end the test")]

use std::{
    cell::RefCell,
    net::{IpAddr, SocketAddr},
    path::Path,
    rc::Rc,
    sync::Arc,
    time::{Duration, Instant},
};

mod books;
pub mod bottleneck;
pub mod cost;
mod host;
mod network;
mod recording;
mod seeded;
mod trace;
use base::clock::{Clock, ManualClock};
pub use books::{DirectionBooks, PeerBooks, RepairBooks, WorkerBooks};
use bottleneck::{Bottleneck, Counts, Parameters};
use config::{
    Config, Peer,
    reload::{Change, Plan, plan, plan_peer},
};
use dataplane::forward::learned::LearnedRoutes;
use engine::{
    follow::follow,
    health::Health,
    hub::Hub,
    metrics::Value,
    mtu_table::MtuTable,
    registry::{PeerRegistry, RegistryError},
    status::PeerStatus,
    worker::{Command, Publisher, Setup, Snapshots, TurnWork, Worker},
};
use gate::{Own, identity::Identity, replay_log::MemoryReplayLog, table::SingleUse, tls::TlsIdentity};
pub use host::{Host, Udp};
use ip::packets::{TunOffload, TunnelOffload};
use net::{
    Ready,
    memory::{Datagram, MemoryFabric, MemoryTun},
};
use network::Network;
pub use network::{BottleneckId, NetworkPath, Tapped, Weather};
pub use recording::Recording;
use trace::{Trace, WorkerOf};

/// A machine's clock: that of the world, and the number of seconds that it is ahead.
struct Skewed(ManualClock, i64);

impl Clock for Skewed {
    fn now(&self) -> Instant {
        self.0.now()
    }

    fn unix_time(&self) -> Duration {
        let seconds = self.0.unix_time().as_secs().saturating_add_signed(self.1);
        Duration::from_secs(seconds)
    }
}

/// A simulated network, its clock and its agents.
pub struct World {
    pub clock: ManualClock,
    pub weather: Rc<RefCell<Weather>>,
    /// The hosts, their addresses and names, which may change at any time.
    pub fabric: MemoryFabric,
    network: Rc<RefCell<Network>>,
    /// The addresses of the hosts that are not agents.
    other_addresses: RefCell<Vec<IpAddr>>,
    agents: Vec<Option<Agent>>,
    /// The number of workers of agents that are started from now on.
    pub workers: u8,
    /// The number of seconds that the clocks of agents are ahead that are started from now on.
    pub skew: i64,
    /// Each agent's state directory: the replay logs of its workers. `None` if it is lost.
    replay_logs: Vec<Option<Vec<MemoryReplayLog>>>,
    /// Changes the configuration of agents that are started from now on.
    pub tune: fn(&mut Config),
    /// The offloads of the TUN devices of agents that are started from now on.
    pub offload: TunOffload,
    /// An agent with little CPU: its index, how long each of its turns takes, and when it may take the next.
    slow: Option<(usize, Duration, Instant)>,
}

/// An agent of a [`World`], with its workers and what they share.
pub struct Agent {
    pub workers: Vec<Worker>,
    pub registry: Arc<PeerRegistry>,
    config: Arc<Config>,
    hub: Arc<Hub>,
    tun: Option<MemoryTun>,
    /// What the tunnel's thread of a daemon reads.
    pub mtu_table: Arc<MtuTable>,
    pub snapshots: Arc<Snapshots>,
    /// When each worker wants its next turn; `None` once it has ended.
    deadlines: Vec<Option<Option<Instant>>>,
    /// The most work of each kind that any turn did since [`Agent::most_work`] was last called.
    most: TurnWork,
    /// The longest that any turn took by the model of `cost.rs`, since [`Agent::longest_turn`] was last called.
    longest: Duration,
    /// For each worker, the first excess of a turn over its bound, in words.
    excess: Vec<Option<String>>,
}

impl Agent {
    /// The number of lanes at all workers of the agent.
    pub fn lanes(&self) -> usize {
        self.workers.iter().map(|worker| worker.lanes().iter().count()).sum()
    }

    /// The number of local sockets of all workers, ports for clients included.
    pub fn local_sockets(&self) -> usize {
        self.workers.iter().map(|worker| worker.locals().iter().count()).sum()
    }

    /// The longest that any turn took since the last call, by the model of `cost.rs`.
    pub fn longest_turn(&mut self) -> Duration {
        std::mem::take(&mut self.longest)
    }

    /// The most work of each kind that any turn did since the last call.
    pub fn most_work(&mut self) -> TurnWork {
        std::mem::take(&mut self.most)
    }

    /// The kernel's routes make this table.
    pub fn learn_routes(&self, learned: LearnedRoutes) {
        self.hub.learn_routes(&Arc::new(learned));
    }

    /// Its TUN device, which its configuration asks for.
    pub fn tun(&self) -> &MemoryTun {
        self.tun.as_ref().expect("a [tun]")
    }

    fn has_ended(&self) -> bool {
        self.deadlines.iter().all(Option::is_none)
    }
}

impl World {
    /// A network with 5 ms one way; randomness comes from `seed`, that of TLS too: one world at a time runs on a thread.
    pub fn new(seed: u64) -> Self {
        seeded::seed(seed);
        let clock = ManualClock::new(Duration::from_secs(1_780_000_000));
        let fabric = MemoryFabric::default();
        let weather = Rc::new(RefCell::new(Weather::default()));
        let network = Rc::new(RefCell::new(Network::new(seed, clock.clone(), Rc::clone(&weather))));
        let passes = Rc::clone(&network);
        fabric.set_hook(move |datagram| passes.borrow_mut().take(datagram));
        Self {
            clock,
            weather,
            fabric,
            network,
            other_addresses: RefCell::default(),
            agents: Vec::new(),
            workers: 1,
            skew: 0,
            replay_logs: Vec::new(),
            tune: |_| (),
            offload: TunOffload { tcp: true, udp: true, tunnels: TunnelOffload::ALL },
            slow: None,
        }
    }

    /// Gives the host of an agent that has `address` these addresses instead.
    pub fn set_addresses(&self, address: IpAddr, addresses: &[IpAddr]) {
        self.network.borrow_mut().agents.extend_from_slice(addresses);
        self.fabric.set_addresses(address, addresses);
    }

    /// Lets each turn of an agent take `turn` from now on.
    pub fn slow_down(&mut self, place: usize, turn: Duration) {
        self.slow = Some((place, turn, self.clock.now()));
    }

    /// Ends what [`World::slow_down`] began.
    pub fn speed_up(&mut self) {
        self.slow = None;
    }

    /// The datagrams that were put on the network since the last call; none at the first call.
    pub fn tapped(&self) -> Vec<Tapped> {
        self.network.borrow_mut().tap.replace(Vec::new()).unwrap_or_default()
    }

    /// A hash of every datagram, deadline and account of the agents since the first call.
    pub fn digest(&self) -> u64 {
        self.network.borrow_mut().trace.get_or_insert_with(Trace::new).digest()
    }

    /// Sets the treatment of datagrams from `from` to `to`; datagrams that are under way are not affected.
    pub fn set_path(&self, from: IpAddr, to: IpAddr, path: NetworkPath) {
        self.network.borrow_mut().paths.insert((from, to), path);
    }

    /// A bottleneck for [`NetworkPath::bottleneck`]; its losses come from `seed` and change nobody else's.
    pub fn add_bottleneck(&self, parameters: Parameters, seed: u64) -> BottleneckId {
        let bottlenecks = &mut self.network.borrow_mut().bottlenecks;
        bottlenecks.push(Bottleneck::new(parameters, seed));
        BottleneckId(bottlenecks.len() - 1)
    }

    /// Changes the parameters of a bottleneck; packets that wait in it go on.
    pub fn set_bottleneck(&self, BottleneckId(id): BottleneckId, parameters: Parameters) {
        self.network.borrow_mut().bottlenecks[id].set(self.clock.now(), parameters);
    }

    /// The counts of the packets that a bottleneck took, and the number that it still holds.
    pub fn bottleneck(&self, BottleneckId(id): BottleneckId) -> (Counts, usize) {
        let bottleneck = &self.network.borrow().bottlenecks[id];
        (bottleneck.counts, bottleneck.held())
    }

    /// The bytes that wait at a bottleneck now.
    pub fn queued_bytes(&self, BottleneckId(id): BottleneckId) -> usize {
        self.network.borrow().bottlenecks[id].queued_bytes()
    }

    /// Has a NAT in front of `inside` forget its mappings: the ports that `inside` dials from appear as new ones of the address
    /// `outside`, and datagrams to the old ones are lost. Ports that it listens at stay.
    pub fn rebind(&self, inside: IpAddr, outside: IpAddr) {
        if inside != outside && !self.other_addresses.borrow().contains(&outside) {
            // The fabric would not even send datagrams to an address without a host.
            drop(self.host(&[outside]));
        }
        self.network.borrow_mut().rebind(inside, outside);
    }

    /// Has a NAT translate `inside` to `outside` from now on, instead of any address before.
    pub fn translate(&self, inside: SocketAddr, outside: SocketAddr) {
        self.network.borrow_mut().translate(inside, outside);
    }

    /// Puts a datagram on the network in anyone's name; it arrives at once, and the tap sees the answers.
    pub fn send_as(&self, datagram: &Tapped) {
        let from = datagram.from.ip();
        let known = [&self.network.borrow().agents[..], &self.other_addresses.borrow()[..]].concat();
        if !known.contains(&from) {
            // The fabric would not even send answers to an address without a host.
            drop(self.host(&[from]));
        }
        self.fabric.inject(&datagram.as_datagram());
    }

    /// Loses an agent's state directory, and with it the replay logs.
    pub fn lose_state(&mut self, place: usize) {
        self.replay_logs[place] = None;
    }

    /// Starts an agent on a host of its own with these addresses; returns its index.
    pub fn start(&mut self, toml: &str, identity: &Identity, addresses: &[IpAddr], seed: u8) -> usize {
        self.agents.push(None);
        self.replay_logs.push(Some(Vec::new()));
        self.network.borrow_mut().agents.extend_from_slice(addresses);
        let place = self.agents.len() - 1;
        self.restart(place, toml, identity, addresses, seed);
        place
    }

    /// Starts an agent again under the same index, as a new process; the old one is killed.
    pub fn restart(&mut self, place: usize, toml: &str, identity: &Identity, addresses: &[IpAddr], seed: u8) {
        self.agents[place] = None;
        let config = Arc::new(self.read(toml));
        let now = self.clock.now();
        let health = Arc::new(Health::new(usize::from(self.workers), now));
        let snapshots = Arc::<Snapshots>::default();
        let hub = Hub::new(self.workers, config.peers.len(), now);
        let clock: Arc<dyn Clock + Send + Sync> = Arc::new(Skewed(self.clock.clone(), self.skew));
        let knocks = self.knocks(place, &*clock);
        let tls = TlsIdentity::new(identity).unwrap();
        let tls = Arc::new(tls.with_randomness(seeded::RANDOMNESS));
        let (own, registry) = (Own::new(identity), PeerRegistry::new(&config, identity.public_key()));
        registry.attach(&hub);
        let readies: Vec<Ready> = (0..self.workers).map(|_| Ready::default()).collect();
        let mut nets = self.fabric.worker_hosts(addresses, &readies);
        let mtu_table = Arc::<MtuTable>::default();
        let tun = config.tun.as_ref().map(|_| MemoryTun::new(self.workers, self.offload));
        for (net, tun) in nets.iter_mut().zip(tun.iter().cycle()) {
            net.set_tun(tun);
        }
        let started = (0..self.workers).zip(nets).zip(readies).zip(knocks);
        let workers = started.map(|(((worker, net), ready), knocks)| {
            let place = usize::from(worker);
            let setup = Setup {
                identity: Arc::clone(&tls),
                own: Arc::clone(&own),
                registry: Arc::clone(&registry),
                refusals: Arc::default(),
                knocks,
                clock: Arc::clone(&clock),
                net: Box::new(net),
                ready,
                instance: [seed; 16],
                seed: [seed.wrapping_add(worker.wrapping_mul(101)); 32],
                software: concat!("culvert/", env!("CARGO_PKG_VERSION")).into(),
                worker,
                hub: Arc::clone(&hub),
                metrics: Publisher::new(place, Arc::clone(&health), Arc::clone(&snapshots)),
                site: None,
                tunnels: None,
                config: Arc::clone(&config),
                tun: tun.as_ref().map(|_| Arc::clone(&mtu_table)),
            };
            Worker::new(setup, now).unwrap()
        });
        let workers: Vec<Worker> = workers.collect();
        let deadlines = workers.iter().map(|_| Some(None)).collect();
        let excess = vec![None; workers.len()];
        self.agents[place] = Some(Agent {
            workers,
            registry,
            config,
            hub,
            tun,
            mtu_table: Arc::clone(&mtu_table),
            snapshots,
            deadlines,
            most: TurnWork::default(),
            longest: Duration::ZERO,
            excess,
        });
    }

    fn read(&self, toml: &str) -> Config {
        let mut config = Config::parse(toml, Path::new(".")).unwrap();
        config.peers.iter_mut().for_each(|peer| peer.load_preshared_keys().unwrap());
        (self.tune)(&mut config);
        config
    }

    /// Has an agent follow another configuration; returns what changed. Its workers do so with their next turns.
    pub fn reload(&mut self, place: usize, toml: &str) -> Result<Vec<Change>, RegistryError> {
        self.reload_with(place, toml, |_| ())
    }

    /// The same after `change` of the configuration that `toml` says.
    pub fn reload_with(
        &mut self,
        place: usize,
        toml: &str,
        change: impl FnOnce(&mut Config),
    ) -> Result<Vec<Change>, RegistryError> {
        let mut config = self.read(toml);
        change(&mut config);
        let plan = plan(&self.agent(place).config, config);
        self.follow(place, plan)
    }

    /// Has an agent change one of its peers while everything else goes on as it runs; returns what changed.
    pub fn change_peer(
        &mut self,
        place: usize,
        name: &str,
        change: impl FnOnce(&mut Peer),
    ) -> Result<Vec<Change>, RegistryError> {
        let agent = self.agent(place);
        let listed = agent.registry.list().into_iter().find(|listed| *listed.peer.name == *name);
        let old = listed.ok_or_else(|| RegistryError::Unknown(name.into()))?.peer;
        let mut new = Peer::clone(&old);
        change(&mut new);
        let plan = plan_peer(&agent.config, &old, new);
        self.follow(place, plan)
    }

    fn follow(&mut self, place: usize, mut plan: Plan) -> Result<Vec<Change>, RegistryError> {
        let agent = self.agent(place);
        let changes = std::mem::take(&mut plan.changes);
        if let Some(config) = plan.config.take() {
            let config = follow(config, &plan, &agent.registry, &agent.hub, Vec::new())?;
            agent.config = config;
        }
        Ok(changes)
    }

    /// The used knocks in an agent's state directory, which is empty at first, and gone after [`World::lose_state`].
    fn knocks(&mut self, place: usize, clock: &dyn Clock) -> Vec<SingleUse> {
        let (now, unix_seconds) = (clock.now(), clock.unix_seconds());
        let before = self.replay_logs[place].take();
        let blind_until = if before.is_some() { 0 } else { unix_seconds - 1 };
        let records: Vec<_> = before.iter().flatten().flat_map(MemoryReplayLog::records).collect();
        let logs: Vec<MemoryReplayLog> = (0..self.workers).map(|_| MemoryReplayLog::default()).collect();
        self.replay_logs[place] = Some(logs.clone());
        let table = |log| {
            let (workers, records) = (self.workers, records.clone());
            SingleUse::restore(Box::new(log), workers, records, blind_until, now, unix_seconds)
        };
        logs.into_iter().map(table).collect()
    }

    /// Kills an agent without notice, as `kill -9` does.
    pub fn kill(&mut self, place: usize) {
        self.agents[place] = None;
    }

    /// Asks all workers of an agent to shut down within 3 seconds.
    pub fn stop(&mut self, place: usize) {
        for worker in &self.agent(place).workers {
            assert!(worker.inbox().put(Command::Shutdown { within: Duration::from_secs(3) }));
        }
    }

    /// Asks all workers of an agent to drain.
    pub fn drain(&mut self, place: usize, within: Duration) {
        for worker in &self.agent(place).workers {
            assert!(worker.inbox().put(Command::Drain { within }));
        }
    }

    pub fn has_ended(&self, place: usize) -> bool {
        self.agents[place].as_ref().is_none_or(Agent::has_ended)
    }

    pub fn agent(&mut self, place: usize) -> &mut Agent {
        self.agents[place].as_mut().unwrap()
    }

    /// The first peer of an agent, as it is now.
    pub fn peer(&mut self, place: usize) -> PeerStatus {
        self.peers(place).swap_remove(0)
    }

    /// The peers of an agent, as they are now.
    pub fn peers(&mut self, place: usize) -> Vec<PeerStatus> {
        self.publish(place);
        self.agent(place).snapshots.get().peers
    }

    /// The value of a series of an agent's metrics, e.g. `culvert_flows{peer="exit"}`.
    pub fn metric(&mut self, place: usize, series: &str) -> u64 {
        self.publish(place);
        self.published(place, series)
    }

    fn publish(&mut self, place: usize) {
        let now = self.clock.now();
        self.agent(place).workers.iter_mut().for_each(|worker| worker.publish_last(now));
    }

    /// The value of a series, as the agent has last published it.
    pub fn published(&mut self, place: usize, series: &str) -> u64 {
        match self.agent(place).snapshots.value(series) {
            Some(Value::Count(count)) => count,
            Some(Value::Number(number)) => number.to_string().parse().unwrap(),
            Some(Value::Buckets(_)) | None => panic!("no series {series} of numbers"),
        }
    }

    /// Whether an agent shows a series of the peer `name`, as it has last published them.
    pub fn shows_peer(&mut self, place: usize, name: &str) -> bool {
        let all = self.agent(place).snapshots.series("");
        let mut of_peers = all.iter().filter(|(family, _)| family.labels.first() == Some(&"peer"));
        of_peers.any(|(_, samples)| samples.iter().any(|(labels, _)| labels[0] == name))
    }

    /// Runs the world until `time` has passed on its clock.
    pub fn run(&mut self, time: Duration) {
        let until = self.clock.now() + time;
        self.run_until(until, |_| false);
    }

    /// Lets time pass until `done`, at most `limit`; panics if it does not come true.
    pub fn run_till(&mut self, limit: Duration, done: impl FnMut(&mut Self) -> bool) {
        let until = self.clock.now() + limit;
        assert!(self.run_until(until, done), "not within {limit:?}");
    }

    fn run_until(&mut self, until: Instant, mut done: impl FnMut(&mut Self) -> bool) -> bool {
        loop {
            self.settle();
            if done(self) {
                return true;
            }
            if !self.step(until) {
                return false;
            }
        }
    }

    /// Goes on to the next moment at which something happens, at most `until`, and lets all agents have their turns; false
    /// if it is `until` already.
    pub fn step(&mut self, until: Instant) -> bool {
        let now = self.clock.now();
        if now >= until {
            return false;
        }
        let arrival = self.network.borrow().next_arrival();
        let deadlines = self.agents.iter().flatten().flat_map(|agent| &agent.deadlines);
        let deadlines = deadlines.filter_map(|deadline| deadline.flatten());
        let slow = self.slow.map(|(_, _, next)| next);
        let next = deadlines.chain(arrival).chain(slow).min().unwrap_or(until).clamp(now, until);
        // A deadline that has passed needs a step of time all the same: timers fire at their time, not before.
        let step = next.saturating_duration_since(now).max(Duration::from_micros(1));
        self.clock.advance(step);
        self.arrive();
        self.settle();
        true
    }

    /// The first excess of an agent's turn over the bound of any turn, in words.
    pub fn excess(&self, place: usize) -> Option<&str> {
        self.agents.get(place)?.as_ref()?.excess.iter().flatten().map(String::as_str).next()
    }

    pub fn now(&self) -> Instant {
        self.clock.now()
    }

    /// Lets every agent take turns until none has anything to do now. As with the daemon, a worker has a turn when something is
    /// ready or due, or it was busy.
    pub fn settle(&mut self) {
        for _ in 0..10_000 {
            let (mut busy, now) = (false, self.clock.now());
            for (place, agent) in self.agents.iter_mut().enumerate() {
                let Some(agent) = agent else { continue };
                let slow = self.slow.as_mut().filter(|(slow, ..)| *slow == place);
                let is_slow = slow.is_some();
                if let Some((_, turn, next)) = slow {
                    if now < *next {
                        continue;
                    }
                    *next = now + *turn;
                }
                let workers = agent.workers.iter_mut().zip(&mut agent.excess);
                for (index, ((worker, excess), deadline)) in workers.zip(&mut agent.deadlines).enumerate() {
                    let Some(due) = *deadline else { continue };
                    if due.is_some_and(|due| due > now) && worker.ready().is_empty() {
                        continue;
                    }
                    let written = |tun: &Option<MemoryTun>| tun.as_ref().map_or(0, MemoryTun::written);
                    let before = (self.fabric.calls(), written(&agent.tun));
                    let turn = worker.turn(now);
                    let counted = cost::Counted {
                        calls: self.fabric.calls().since(before.0),
                        written: written(&agent.tun) - before.1,
                    };
                    let took = cost::of(&worker.turn_work(), counted);
                    agent.longest = agent.longest.max(took);
                    if let Some(trace) = &mut self.network.borrow_mut().trace {
                        let of = WorkerOf { agent: place, worker: index };
                        trace.turn(self.clock.elapsed(), now, of, &turn, worker);
                    }
                    agent.most = agent.most.max(worker.turn_work());
                    if excess.is_none() {
                        let too_long =
                            || (took > cost::MOST_TURN).then(|| format!("a turn of {took:?}: {counted:?}"));
                        *excess = worker.excess_of_turn().or_else(too_long);
                    }
                    // A busy worker is due at once.
                    let due = if turn.busy { Some(now) } else { turn.deadline };
                    *deadline = (!turn.ended).then_some(due);
                    busy |= turn.busy && !turn.ended && !is_slow;
                }
                if is_slow {
                    continue;
                }
                // A worker may have given something to another one that had its turn before.
                let mut running = agent.workers.iter().zip(&agent.deadlines);
                busy |= running.any(|(worker, deadline)| deadline.is_some() && !worker.ready().is_empty());
            }
            if !busy {
                return;
            }
        }
        panic!("an agent is busy for ever");
    }

    fn arrive(&self) {
        let now = self.clock.now();
        loop {
            let Some(datagram) = self.network.borrow_mut().arrived(now) else { break };
            if !self.fabric.inject(&datagram.datagram.as_datagram()) {
                self.network.borrow_mut().refuse(&datagram);
            }
        }
    }

    /// Lets datagrams above `bytes` between these hosts vanish on their way, in both directions.
    pub fn set_mtu(&self, one: IpAddr, other: IpAddr, bytes: usize) {
        self.fabric.set_mtu(one, other, bytes);
        self.fabric.set_mtu(other, one, bytes);
    }

    /// Lets a datagram arrive with the forged source `from`.
    pub fn forge(&self, from: SocketAddr, to: SocketAddr, payload: &[u8]) {
        assert!(self.fabric.inject(&Datagram { from, to, tos: 0, payload }), "nobody listens at {to}");
    }

    /// A host of its own, for clients and services; datagrams to agents pass the weather.
    pub fn host(&self, addresses: &[IpAddr]) -> Host {
        self.other_addresses.borrow_mut().extend_from_slice(addresses);
        let ready = Ready::default();
        Host::new(self.fabric.host(addresses, ready.clone()), ready)
    }
}
