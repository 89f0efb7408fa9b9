//! A run: the world of a schedule, what happens in it, and what is looked at after every step.

use std::{collections::BTreeMap, net::IpAddr, time::Duration};

use engine::worker::Worker;
use ip::{packets::TunOffload, vnet::VnetHeader};
use net::Token;
use rand::{RngExt, SeedableRng, rngs::StdRng};
use testkit::simulation::{Host, NetworkPath, Udp, World};
use wire::repair_terms::Mode;

use super::{
    agents::{CLIENTS, SERVICES, address, configuration, identity, ingress, outside, upstream},
    invariants::{books_of, check, is_full, moved_and_refused, order_of, repaired},
    model::{Failure, Keeping, Model},
    packets,
    schedule::{EXIT, Schedule, Service, Setup, What},
    streams::Streams,
};

/// The hosts beside the agents are this far from them.
const NEAR: NetworkPath = NetworkPath::with_delay(Duration::from_micros(200));

/// A broken rule, to see that it is noticed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Fault {
    /// A service never sees one of the datagrams that came.
    Swallow,
    /// A client sees one twice.
    Double,
    /// A service sees one after the next.
    Swap,
    /// A bit of one is another.
    Flip,
    /// A client sees one that was for another.
    Stray,
    /// An agent counts one that never came.
    Miscount,
    /// An agent is not started again.
    Stuck,
    /// A datagram waits for ever.
    Hoard,
    /// A byte of a connection is another.
    Garble,
    /// A connection's service takes nobody.
    Deaf,
    /// An agent has more flows than it may.
    Crowd,
    /// An agent keeps a socket to a service.
    Leak,
    /// An agent does not count one that it delivered.
    Omit,
    /// A device never gets what came for it.
    Vanish,
    /// A turn does more than any may.
    Toil,
}

/// What a schedule came to.
#[derive(Debug, Default, PartialEq, Eq)]
pub(crate) struct Outcome {
    /// Of everything that was on the network.
    pub(crate) digest: u64,
    pub(crate) steps: u64,
    pub(crate) datagrams: u64,
    /// IP packets that arrived at devices.
    pub(crate) packets: u64,
    /// Connections whose bytes all came back.
    pub(crate) connections: u64,
    /// Agents that were started again.
    pub(crate) restarts: u64,
    /// Times that a flow, or a bucket of IP packets, went to another lane.
    pub(crate) moves: u64,
    /// Steps after which a peer had as many flows as it may.
    pub(crate) full: u64,
    /// Datagrams that were dropped for that.
    pub(crate) refused: u64,
    /// Payloads that came again after they were lost, or were recovered.
    pub(crate) repaired: u64,
}

impl Outcome {
    /// The counts of two runs together.
    pub(crate) fn and(&self, other: &Self) -> Self {
        Self {
            digest: self.digest ^ other.digest,
            steps: self.steps + other.steps,
            datagrams: self.datagrams + other.datagrams,
            packets: self.packets + other.packets,
            connections: self.connections + other.connections,
            restarts: self.restarts + other.restarts,
            moves: self.moves + other.moves,
            full: self.full + other.full,
            refused: self.refused + other.refused,
            repaired: self.repaired + other.repaired,
        }
    }
}

/// Something at a time of its own, in microseconds.
#[derive(Clone, Copy, Debug)]
enum Action {
    Event(usize),
    Datagram { flow: u16, bytes: u16 },
    Packet { way: (u8, u8, u8), bytes: u16 },
}

pub(crate) struct Run<'a> {
    pub(crate) schedule: &'a Schedule,
    pub(crate) world: World,
    pub(crate) model: Model,
    clients: Host,
    services: Host,
    pub(crate) streams: Streams,
    /// The clients' sockets, by flow.
    sockets: Vec<Udp>,
    by_token: BTreeMap<Token, u16>,
    echo: (Token, Udp),
    sink: (Token, Udp),
    pub(crate) variants: [u8; 3],
    is_stopping: [bool; 3],
    starts: u8,
    last_order: u64,
    last_counted: (u64, u64),
    pub(crate) fault: Option<Fault>,
    held: Option<(std::net::SocketAddr, Vec<u8>)>,
    outcome: Outcome,
}

/// Runs a schedule to its end.
pub(crate) fn run(schedule: &Schedule, fault: Option<Fault>) -> Result<Outcome, Failure> {
    let mut run = Run::new(schedule, fault);
    run.events()?;
    run.recover()?;
    run.rest()?;
    run.outcome.digest = run.world.digest();
    run.outcome.connections = run.streams.completed.into();
    Ok(run.outcome)
}

/// Has an agent want no lanes.
fn withhold_lanes(world: &mut World, agent: u8) {
    world.agent(usize::from(agent)).workers.iter_mut().for_each(Worker::withhold_lanes);
}

fn keeping(setup: &Setup) -> Keeping {
    match setup.repair {
        Mode::Off => Keeping::Path,
        _ if setup.keeps_order() => Keeping::Held,
        Mode::Retransmit | Mode::Fec | Mode::Auto => Keeping::None,
    }
}

impl<'a> Run<'a> {
    fn new(schedule: &'a Schedule, fault: Option<Fault>) -> Self {
        let setup = &schedule.setup;
        let mut world = World::new(setup.seed);
        world.digest();
        world.offload = TunOffload::default();
        for agent in 0..=EXIT {
            world.workers = setup.workers[usize::from(agent)];
            let seed = agent + 1;
            let toml = configuration(setup, agent, 0);
            world.start(&toml, &identity(setup, agent), &[address(agent)], seed);
            if !setup.agents().any(|place| place == agent) {
                world.kill(usize::from(agent));
            } else if setup.is_standard {
                withhold_lanes(&mut world, agent);
            }
            for host in [CLIENTS, SERVICES] {
                world.set_path(address(agent), host, NEAR);
                world.set_path(host, address(agent), NEAR);
            }
        }
        let (clients, mut services) = (world.host(&[CLIENTS]), world.host(&[SERVICES]));
        let [echo, sink] = [Service::Echo, Service::Sink].map(|service| {
            let socket = services.udp(upstream(service), None);
            (services.last_token(), socket)
        });
        let streams = Streams::new(&mut services, upstream(Service::Echo));
        Self {
            schedule,
            world,
            model: Model::new(keeping(setup)),
            clients,
            services,
            streams,
            sockets: Vec::new(),
            by_token: BTreeMap::new(),
            echo,
            sink,
            variants: [0; 3],
            is_stopping: [false; 3],
            starts: EXIT + 1,
            last_order: 0,
            last_counted: (0, 0),
            fault,
            held: None,
            outcome: Outcome::default(),
        }
    }

    /// Everything that the schedule says.
    fn events(&mut self) -> Result<(), Failure> {
        let mut actions: Vec<(u64, Action)> = Vec::new();
        let mut rng = StdRng::seed_from_u64(self.schedule.setup.seed);
        for (place, event) in self.schedule.events.iter().enumerate() {
            let at = u64::from(event.at) * 1_000;
            match &event.what {
                What::Datagrams { client, entry, service, least, most, every_us, count } => {
                    let flow = self.flow(*client, *entry, *service);
                    for number in 0..u64::from(*count) {
                        let bytes = rng.random_range(*least..=*most);
                        actions.push((at + number * u64::from(*every_us), Action::Datagram { flow, bytes }));
                    }
                }
                What::Packets { from, to, flow, most, every_us, count } => {
                    for number in 0..u64::from(*count) {
                        let (way, bytes) = ((*from, *to, *flow), rng.random_range(20..=*most));
                        actions.push((at + number * u64::from(*every_us), Action::Packet { way, bytes }));
                    }
                }
                What::Connection { .. }
                | What::Path { .. }
                | What::Clear
                | What::Rebind { .. }
                | What::Kill { .. }
                | What::Stop { .. }
                | What::Start { .. }
                | What::Reload { .. } => actions.push((at, Action::Event(place))),
            }
        }
        actions.sort_by_key(|(at, _)| *at);
        for (at, action) in actions {
            self.run_to(Duration::from_micros(at))?;
            if super::logs() {
                println!("{at} µs: {action:?}");
            }
            match action {
                Action::Event(place) => self.event(&self.schedule.events[place].what)?,
                Action::Datagram { flow, bytes } => self.send(flow, bytes),
                Action::Packet { way, bytes } => self.push(way, bytes),
            }
            self.world.settle();
            self.look()?;
        }
        self.run_to(Duration::from_millis(self.schedule.length().into()))
    }

    pub(crate) fn run_for(&mut self, time: Duration) -> Result<(), Failure> {
        self.run_to(self.world.clock.elapsed() + time)
    }

    /// Goes on until so long after the start.
    fn run_to(&mut self, at: Duration) -> Result<(), Failure> {
        let Some(left) = at.checked_sub(self.world.clock.elapsed()) else { return Ok(()) };
        let until = self.world.now() + left;
        while self.world.step(until) {
            self.look()?;
        }
        Ok(())
    }

    /// Looks at everything after a step: what arrived where, and what the agents say of themselves.
    fn look(&mut self) -> Result<(), Failure> {
        self.outcome.steps += 1;
        let setup = &self.schedule.setup;
        let mut books = books_of(&self.world, setup);
        if self.fault == Some(Fault::Miscount)
            && let Some(peer) = books[0].1.first_mut().and_then(|worker| worker.peers.first_mut())
        {
            peer.uplink.account.received += 1;
        }
        if self.fault == Some(Fault::Hoard)
            && let Some(peer) = books[0].1.first_mut().and_then(|worker| worker.peers.first_mut())
        {
            peer.oldest = self.world.now().checked_sub(Duration::from_secs(5));
        }
        if self.fault == Some(Fault::Crowd)
            && let Some(peer) = books[0].1.first_mut().and_then(|worker| worker.peers.first_mut())
        {
            peer.flows = peer.max_flows + 1;
        }
        if self.fault == Some(Fault::Toil)
            && let Some(worker) = books[0].1.first_mut()
        {
            worker.excess = Some("too much".to_owned());
        }
        // What an agent holds when it ends is never delivered.
        let ended = books.iter_mut().filter(|(agent, _)| self.world.has_ended(usize::from(*agent)));
        let peers = ended.flat_map(|(_, workers)| workers).flat_map(|worker| &mut worker.peers);
        peers.for_each(|peer| peer.repair.deadline = None);
        check(&books, setup, self.world.now())?;
        let counted = moved_and_refused(&books);
        // Of an agent that is started again the counts begin again.
        self.outcome.moves += counted.0.saturating_sub(self.last_counted.0);
        self.outcome.refused += counted.1.saturating_sub(self.last_counted.1);
        self.last_counted = counted;
        self.outcome.repaired = self.outcome.repaired.max(repaired(&books));
        self.outcome.full += u64::from(is_full(&books));
        let order = order_of(&books);
        if order != self.last_order {
            self.last_order = order;
            self.model.order += 1;
        }
        for token in self.services.ready() {
            for service in [Service::Echo, Service::Sink] {
                self.serve(service, token)?;
            }
            if self.fault != Some(Fault::Deaf) {
                self.streams.service_ready(&mut self.services, token)?;
            }
        }
        for token in self.clients.ready() {
            match self.by_token.get(&token) {
                Some(flow) => self.take(*flow)?,
                None => self.streams.client_ready(token, self.fault == Some(Fault::Garble))?,
            }
        }
        if setup.has_tun {
            for agent in setup.agents() {
                if self.world.has_ended(usize::from(agent)) {
                    continue;
                }
                for written in self.world.agent(usize::from(agent)).tun().take_written() {
                    if self.fault == Some(Fault::Vanish) {
                        continue;
                    }
                    self.outcome.packets += 1;
                    packets::written(&mut self.model, agent, &written.packet)?;
                }
            }
        }
        Ok(())
    }

    fn serve(&mut self, service: Service, token: Token) -> Result<(), Failure> {
        let (own, socket) = match service {
            Service::Echo => &mut self.echo,
            Service::Sink => &mut self.sink,
        };
        if *own != token {
            return Ok(());
        }
        let mut received = socket.receive();
        self.outcome.datagrams += received.len() as u64;
        match self.fault {
            Some(Fault::Swallow) => drop(received.pop()),
            Some(Fault::Flip) => received.iter_mut().for_each(|(_, payload)| payload[15] ^= 4),
            Some(Fault::Swap) => match (self.held.take(), received.pop()) {
                (Some(held), last) => received.extend(last.into_iter().chain([held])),
                (None, last) => self.held = last,
            },
            _ => {}
        }
        for (from, payload) in &received {
            if let Some(reply) = self.model.at_service(service, *from, payload)? {
                socket.send(*from, &reply);
            }
        }
        self.world.settle();
        Ok(())
    }

    /// What came to a client's socket.
    fn take(&mut self, flow: u16) -> Result<(), Failure> {
        let mut received = self.sockets[usize::from(flow)].receive();
        if self.fault == Some(Fault::Double) {
            received.extend(received.clone());
        }
        let state = &self.model.flows[usize::from(flow)];
        let ingress = ingress(state.entry, state.service);
        let flow =
            if self.fault == Some(Fault::Stray) { self.model.flow(2_000, 0, Service::Echo) } else { flow };
        for (from, payload) in &received {
            self.model.at_client(flow, *from, ingress, payload)?;
        }
        Ok(())
    }

    /// The flow of a client, and its socket.
    pub(crate) fn flow(&mut self, client: u16, entry: u8, service: Service) -> u16 {
        let flow = self.model.flow(client, entry, service);
        if usize::from(flow) == self.sockets.len() {
            let socket = self.clients.udp((CLIENTS, 1_000 + flow).into(), None);
            self.by_token.insert(self.clients.last_token(), flow);
            self.sockets.push(socket);
        }
        flow
    }

    pub(crate) fn send(&mut self, flow: u16, bytes: u16) {
        let payload = self.model.request(flow, bytes);
        let state = &self.model.flows[usize::from(flow)];
        let to = ingress(state.entry, state.service);
        self.sockets[usize::from(flow)].send(to, &payload);
    }

    pub(crate) fn push(&mut self, way: (u8, u8, u8), bytes: u16) {
        let agent = usize::from(way.0);
        if !self.schedule.setup.has_tun || self.world.has_ended(agent) {
            return;
        }
        let number = self.model.packet(way, bytes);
        let packet = packets::packet(way, number, bytes);
        let workers = self.world.agent(agent).workers.len();
        let queue = u8::try_from(usize::from(way.2) % workers).expect("few workers");
        self.world.agent(agent).tun().push(queue, VnetHeader::default(), &packet);
    }

    pub(crate) fn event(&mut self, what: &What) -> Result<(), Failure> {
        self.model.order += 1;
        match *what {
            What::Datagrams { .. } | What::Packets { .. } => {}
            What::Connection { entry, bytes } => {
                self.streams.connect(&mut self.clients, ingress(entry, Service::Echo), bytes);
            }
            What::Path { from, to, delay_ms, jitter_ms, loss, duplicates, corrupted, bytes } => {
                let path = NetworkPath {
                    delay: Duration::from_millis(delay_ms.into()),
                    jitter: Duration::from_millis(jitter_ms.into()),
                    loss,
                    duplicates,
                    corrupted,
                    most_bytes: bytes.into(),
                    is_cut: loss >= 1_000,
                    bottleneck: None,
                };
                match jitter_ms {
                    0 => self.model.jittered.remove(&(from, to)),
                    1.. => self.model.jittered.insert((from, to)),
                };
                self.world.set_path(address(from), address(to), path);
            }
            What::Clear => self.clear(),
            What::Rebind { agent, host } => self.world.rebind(address(agent), outside(agent, host)),
            What::Kill { agent } => self.kill(agent),
            What::Stop { agent } => {
                let is_running = !self.world.has_ended(usize::from(agent));
                if is_running && !std::mem::replace(&mut self.is_stopping[usize::from(agent)], true) {
                    self.world.stop(usize::from(agent));
                }
            }
            What::Start { agent, is_lost } => self.start(agent, is_lost),
            What::Reload { agent, variant } => self.reload(agent, variant),
        }
        Ok(())
    }

    /// The paths between agents are good ones.
    pub(crate) fn clear(&mut self) {
        self.model.order += 1;
        self.model.jittered.clear();
        let setup = &self.schedule.setup;
        let pairs = setup.agents().flat_map(|one| setup.agents().map(move |other| (one, other)));
        for (one, other) in pairs.filter(|(one, other)| one != other) {
            let ends: [IpAddr; 2] = [address(one), address(other)];
            self.world.set_path(ends[0], ends[1], NetworkPath::default());
        }
    }

    fn kill(&mut self, agent: u8) {
        self.world.kill(usize::from(agent));
        self.is_stopping[usize::from(agent)] = false;
        if agent == EXIT {
            self.model.forget_addresses();
        }
    }

    /// Starts an agent again, unless it is running.
    pub(crate) fn start(&mut self, agent: u8, is_lost: bool) {
        let place = usize::from(agent);
        let is_running = !self.world.has_ended(place) && !self.is_stopping[place];
        if is_running || self.fault == Some(Fault::Stuck) {
            return;
        }
        self.kill(agent);
        if is_lost {
            self.world.lose_state(place);
        }
        let setup = &self.schedule.setup;
        self.world.workers = setup.workers[place];
        self.starts = self.starts.wrapping_add(1);
        self.outcome.restarts += 1;
        let toml = configuration(setup, agent, self.variants[place]);
        self.world.restart(place, &toml, &identity(setup, agent), &[address(agent)], self.starts);
        if setup.is_standard {
            withhold_lanes(&mut self.world, agent);
        }
    }

    pub(crate) fn reload(&mut self, agent: u8, variant: u8) {
        let place = usize::from(agent);
        self.variants[place] = variant;
        if self.world.has_ended(place) || self.is_stopping[place] {
            return;
        }
        let toml = configuration(&self.schedule.setup, agent, variant);
        let changes = self.world.reload(place, &toml);
        assert!(changes.is_ok(), "the variants are valid");
    }
}
