//! An entry and an exit with services between them.

use std::{
    fmt::Write,
    net::{IpAddr, Ipv4Addr, SocketAddr},
};

use crate::{
    agent::Agent,
    clock::{self, PATIENCE},
    http::Account,
    place::Place,
    ports,
};

/// What the pair is to be.
#[derive(Clone, Debug)]
pub struct Plan {
    places: [Place; 2],
    underlay: IpAddr,
    transport: String,
    workers: [u8; 2],
    peer: String,
    services: String,
    allowed: Vec<String>,
    forwards: String,
}

/// An entry, which dials, and an exit, which listens. Each is called so by the other.
#[derive(Debug)]
pub struct Pair {
    /// Where applications send to.
    pub entry: Agent,
    /// Where the services are.
    pub exit: Agent,
    /// The exit's QUIC port.
    pub underlay: SocketAddr,
}

impl Default for Plan {
    fn default() -> Self {
        Self {
            places: [Place::Host, Place::Host],
            underlay: Ipv4Addr::LOCALHOST.into(),
            transport: String::new(),
            workers: [0; 2],
            // A machine that is busy with other tests is no reason to drop what waits.
            peer: "queue.time = \"5s\"\n".to_owned(),
            services: String::new(),
            allowed: Vec::new(),
            forwards: String::new(),
        }
    }
}

impl Plan {
    /// The entry at the first place, the exit at the second.
    #[must_use]
    pub fn at(mut self, places: [Place; 2]) -> Self {
        self.places = places;
        self
    }

    /// The address at which the exit listens for the entry.
    #[must_use]
    pub fn underlay(mut self, address: IpAddr) -> Self {
        self.underlay = address;
        self
    }

    /// Lines of `[transport]` for both.
    #[must_use]
    pub fn transport(mut self, lines: &str) -> Self {
        self.transport += lines;
        self
    }

    /// The entry's workers, and the exit's; 0 is one per CPU.
    #[must_use]
    pub fn workers(mut self, workers: [u8; 2]) -> Self {
        self.workers = workers;
        self
    }

    /// Lines of the `[[peer]]` of both.
    #[must_use]
    pub fn peer(mut self, lines: &str) -> Self {
        self.peer += lines;
        self
    }

    /// A service at the exit that the entry may use, with more lines of its section.
    #[must_use]
    pub fn service(mut self, name: &str, upstream: SocketAddr, lines: &str) -> Self {
        self.allowed.push(name.to_owned());
        self.forbidden_service(name, upstream, lines)
    }

    /// A service at the exit that the entry may not use.
    #[must_use]
    pub fn forbidden_service(mut self, name: &str, upstream: SocketAddr, lines: &str) -> Self {
        writeln!(self.services, "[[service]]\nname = \"{name}\"\nupstream = \"{upstream}\"\n{lines}")
            .expect("a String takes all");
        self
    }

    /// A service of [`Plan::exit`] that the entry may use.
    #[must_use]
    pub fn allow(mut self, name: &str) -> Self {
        self.allowed.push(name.to_owned());
        self
    }

    /// More sections of the exit's configuration.
    #[must_use]
    pub fn exit(mut self, sections: &str) -> Self {
        self.services += sections;
        self
    }

    /// A local UDP and TCP port at the entry.
    #[must_use]
    pub fn forward(mut self, service: &str, listen: SocketAddr) -> Self {
        for protocol in ["udp", "tcp"] {
            writeln!(
                self.forwards,
                "[[{protocol}]]\nlisten = \"{listen}\"\npeer = \"exit\"\nservice = \"{service}\""
            )
            .expect("a String takes all");
        }
        self
    }

    /// More lines of the entry's configuration, after those of its last port.
    #[must_use]
    pub fn entry(mut self, lines: &str) -> Self {
        self.forwards += lines;
        self
    }

    /// Starts both and waits for the connection.
    #[must_use]
    #[track_caller]
    pub fn start(self) -> Pair {
        let mut pair = self.prepare();
        pair.exit.start();
        pair.entry.start();
        pair.wait_for_connection();
        pair
    }

    /// Configures both and starts none.
    #[must_use]
    pub fn prepare(self) -> Pair {
        let entry = Agent::new("entry", &self.places[0]);
        let exit = Agent::new("exit", &self.places[1]);
        let underlay = SocketAddr::new(self.underlay, ports::free());
        let Self { transport, workers: [here, there], peer, services, allowed, forwards, .. } = self;
        exit.configure(&format!(
            "[transport]\nlisten = [\"{underlay}\"]\nworkers = {there}\n{transport}{services}\
             [[peer]]\nname = \"entry\"\npublic_key = \"{}\"\nservices = {allowed:?}\n{peer}",
            entry.key()
        ));
        entry.configure(&format!(
            "[transport]\nworkers = {here}\n{transport}\
             [[peer]]\nname = \"exit\"\npublic_key = \"{}\"\nendpoints = [\"{underlay}\"]\n{peer}{forwards}",
            exit.key()
        ));
        Pair { entry, exit, underlay }
    }
}

impl Pair {
    /// The peer's name, and the agent itself: the entry, then the exit.
    #[must_use]
    pub fn ends(&self) -> [(&'static str, &Agent); 2] {
        [("exit", &self.entry), ("entry", &self.exit)]
    }

    /// Waits until both ends have the control connection and a lane.
    ///
    /// # Panics
    /// When that takes too long.
    #[track_caller]
    pub fn wait_for_connection(&self) {
        for (peer, agent) in self.ends() {
            agent.wait_for_count("culvert_peer_connected", &[("peer", peer)], 1);
        }
    }

    /// Waits until both ends have so many lanes that carry payloads, and no others.
    ///
    /// # Panics
    /// When that takes too long.
    #[track_caller]
    pub fn wait_for_lanes(&self, count: u64) {
        for (_, agent) in self.ends() {
            agent.wait_for_count("culvert_lanes", &[("state", "up")], count);
        }
    }

    /// Datagrams that workers of either end handed to each other, of all kinds.
    ///
    /// # Panics
    /// When one was dropped on that way.
    #[must_use]
    #[track_caller]
    pub fn handed_over(&self) -> u64 {
        let dropped = self.sum("culvert_hand_over_dropped_datagrams_total", &[]);
        assert_eq!(dropped, 0, "dropped at the hand-over");
        self.sum("culvert_handed_over_datagrams_total", &[])
    }

    /// Waits until nothing is on its way inside the agents, and checks that each accounts for all that it received.
    /// Returns the accounts in the order of the uplink's path, then of the downlink's: entry up, exit down, exit up,
    /// entry down. They may be some moments old.
    ///
    /// # Panics
    /// When an account does not balance.
    #[track_caller]
    pub fn accounts(&self) -> [Account; 4] {
        let [entry, exit] = self.ends().map(|(peer, agent)| {
            agent.wait_for("the accounts balance and nothing waits", |samples| {
                let accounts = ["uplink", "downlink"].map(|direction| samples.account(peer, direction));
                let settled = accounts.iter().all(|account| account.balances() && account.queued == 0);
                if settled { Ok(accounts) } else { Err(format!("{accounts:?}")) }
            })
        });
        [entry[0], exit[1], exit[0], entry[1]]
    }

    /// Waits for accounts that balance and say, in the order of [`accounts`](Self::accounts), that so many datagrams
    /// were received and delivered.
    ///
    /// # Panics
    /// When they do not soon.
    #[track_caller]
    pub fn wait_for_accounts(&self, expected: [(u64, u64); 4]) {
        clock::until(&format!("the accounts are {expected:?}"), PATIENCE, || {
            let accounts = self.accounts();
            let fits = accounts.map(|account| (account.received, account.delivered)) == expected;
            if fits { Ok(()) } else { Err(format!("{accounts:?}")) }
        });
    }

    /// The sum of a metric over both ends.
    #[must_use]
    #[track_caller]
    pub fn sum(&self, name: &str, labels: &[(&str, &str)]) -> u64 {
        self.entry.samples().count(name, labels) + self.exit.samples().count(name, labels)
    }

    /// Datagrams that either end dropped for `reason`.
    #[must_use]
    #[track_caller]
    pub fn dropped(&self, reason: &str) -> u64 {
        self.sum("culvert_datagrams_dropped_total", &[("reason", reason)])
    }
}
