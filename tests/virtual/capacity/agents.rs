//! The same scenario with whole agents over the network in memory. The turns of a worker take no time there, so scenarios without
//! costs can be compared.

use std::{
    net::{IpAddr, Ipv4Addr, SocketAddr},
    time::{Duration, Instant},
};

use gate::identity::Identity;
use testkit::simulation::{Host, NetworkPath, Udp, Weather, World};

use crate::scenario::{Change, Outcome, Scenario};

const CLIENT: IpAddr = IpAddr::V4(Ipv4Addr::new(192, 0, 2, 9));
const SERVICE: SocketAddr = SocketAddr::new(IpAddr::V4(Ipv4Addr::new(198, 51, 100, 9)), 7);

/// The time for which peers connect and send before anything happens.
const BEFORE: Duration = Duration::from_secs(3);

/// The time between two looks at clients and service.
const STEP: Duration = Duration::from_millis(1);

/// Runs a scenario of exits that die or drain, and measures the gaps of peers as their service sees them.
pub(crate) fn run(scenario: &Scenario, seed: u64) -> Outcome {
    let mut agents = Agents::start(scenario, seed);
    agents.run(BEFORE);
    let begin = agents.world.now();
    assert!(agents.came.iter().all(Option::is_some), "all peers are served at first");
    let mut changes = scenario.changes.iter().peekable();
    while agents.world.now() < begin + scenario.length {
        while let Some((_, exit, change)) = changes.next_if(|(at, ..)| begin + *at <= agents.world.now()) {
            agents.change(*exit, *change);
        }
        agents.run(STEP);
    }
    agents.gaps.sort_unstable();
    let unserved = agents.without.iter().filter(|without| without.is_some()).count();
    Outcome { gaps: agents.gaps, unserved, ..Outcome::default() }
}

struct Agents<'a> {
    scenario: &'a Scenario,
    world: World,
    start: Instant,
    exits: Vec<usize>,
    dead: Vec<IpAddr>,
    /// All hosts beside the agents.
    _hosts: [Host; 2],
    client: Udp,
    service: Udp,
    /// The number of packets that each peer was given.
    given: Vec<u32>,
    /// The exit that the last packet of each peer came from, and when it came.
    came: Vec<Option<(IpAddr, Instant)>>,
    /// When each peer without an exit lost it.
    without: Vec<Option<Instant>>,
    gaps: Vec<Duration>,
}

impl<'a> Agents<'a> {
    fn start(scenario: &'a Scenario, seed: u64) -> Self {
        let mut world = World::new(seed);
        world.workers = scenario.workers;
        let key = identity();
        let keys: Vec<Identity> = (0..scenario.peers).map(|_| identity()).collect();
        let known: String = keys
            .iter()
            .enumerate()
            .map(|(number, key)| {
                format!(
                    "[[peer]]\nname = \"peer{number}\"\npublic_key = \"{}\"\nservices = [\"sink\"]\n",
                    key.public_key()
                )
            })
            .collect();
        let exits = (0..scenario.exits).map(|number| {
            let address = exit_address(number);
            let toml = format!(
                "identity = {{ key_file = \"none\" }}\ntransport = {{ listen = [\"{address}:4433\"], server_id = {} }}\n\
                 [[service]]\nname = \"sink\"\nupstream = \"{SERVICE}\"\n{known}",
                number + 1
            );
            world.start(&toml, &key, &[address], u8::try_from(number).expect("few exits"))
        });
        let exits: Vec<usize> = exits.collect();
        world.workers = 1;
        for (number, own) in keys.iter().enumerate() {
            let address = peer_address(number);
            let endpoints: Vec<String> = scenario
                .endpoints_of(number)
                .into_iter()
                .map(|exit| format!("\"{}:4433\"", exit_address(exit)))
                .collect();
            let toml = format!(
                "identity = {{ key_file = \"none\" }}\n[[udp]]\nlisten = \"{address}:5300\"\npeer = \"exits\"\nservice = \"sink\"\n\
                 [[peer]]\nname = \"exits\"\npublic_key = \"{}\"\nlanes = 1\nendpoints = [{}]\n",
                key.public_key(),
                endpoints.join(", ")
            );
            // As if they had not all been started at once.
            world.run(Duration::from_millis(5));
            world.start(&toml, own, &[address], (number % 200) as u8 + 50);
        }
        *world.weather.borrow_mut() = Weather { delay: scenario.round_trip / 2, ..Weather::default() };
        let (mut clients, mut services) = (world.host(&[CLIENT]), world.host(&[SERVICE.ip()]));
        // What is beside the agents is near them.
        for number in 0..scenario.peers {
            world.set_path(CLIENT, peer_address(number), NEAR);
            world.set_path(peer_address(number), CLIENT, NEAR);
        }
        for number in 0..scenario.exits {
            world.set_path(SERVICE.ip(), exit_address(number), NEAR);
            world.set_path(exit_address(number), SERVICE.ip(), NEAR);
        }
        let client = clients.udp(SocketAddr::new(CLIENT, 900), None);
        let service = services.udp(SERVICE, None);
        let start = world.now();
        Self {
            scenario,
            world,
            start,
            exits,
            dead: Vec::new(),
            _hosts: [clients, services],
            client,
            service,
            given: vec![0; scenario.peers],
            came: vec![None; scenario.peers],
            without: vec![None; scenario.peers],
            gaps: Vec::new(),
        }
    }

    fn change(&mut self, number: usize, change: Change) {
        let (exit, address) = (self.exits[number], exit_address(number));
        match change {
            Change::Drains => self.world.drain(exit, Duration::from_secs(10)),
            Change::Dies => {
                self.loses(address);
                let dead = self.dead.clone();
                self.world.weather.borrow_mut().block =
                    Box::new(move |from, to| dead.contains(&from.ip()) || dead.contains(&to.ip()));
            }
            Change::Stops => {
                self.loses(address);
                self.world.stop(exit);
            }
            Change::Starts => unreachable!("only the model starts exits again"),
        }
    }

    /// The exit at `address` serves nobody from now on.
    fn loses(&mut self, address: IpAddr) {
        self.dead.push(address);
        let now = self.world.now();
        for (without, came) in self.without.iter_mut().zip(&self.came) {
            if came.is_some_and(|(last, _)| last == address) {
                *without = Some(now);
            }
        }
    }

    fn run(&mut self, time: Duration) {
        let until = self.world.now() + time;
        while self.world.now() < until {
            for number in 0..self.scenario.peers {
                let due =
                    self.start + self.scenario.phase_of(number) + self.scenario.interval * self.given[number];
                if due <= self.world.now() {
                    let payload = u32::try_from(number).expect("few peers").to_be_bytes();
                    self.client.send(SocketAddr::new(peer_address(number), 5300), &payload);
                    self.given[number] += 1;
                }
            }
            self.world.run(STEP);
            self.take();
        }
    }

    fn take(&mut self) {
        let now = self.world.now();
        for (from, payload) in self.service.receive() {
            self.service.send(from, &payload);
            let number = u32::from_be_bytes(payload[..4].try_into().expect("our own payload")) as usize;
            if self.dead.contains(&from.ip()) {
                continue;
            }
            self.came[number] = Some((from.ip(), now));
            if let Some(since) = self.without[number].take() {
                self.gaps.push(now - since);
            }
        }
        // Answers are of no interest.
        self.client.receive();
    }
}

/// Next door: what the network in memory takes as the least delay.
const NEAR: NetworkPath = NetworkPath::with_delay(Duration::from_micros(10));

fn identity() -> Identity {
    Identity::generate().expect("the kernel has randomness")
}

fn exit_address(number: usize) -> IpAddr {
    Ipv4Addr::new(10, 255, 0, u8::try_from(number + 1).expect("few exits")).into()
}

fn peer_address(number: usize) -> IpAddr {
    Ipv4Addr::from_bits(0x0a00_0001 + u32::try_from(number).expect("few peers")).into()
}
