//! Sites with a tunnel between them: gateways with an agent, hosts behind them, and routers between.
//!
//! ```text
//!  host a ── gateway a ── west ══ middle ══ east ── gateway b ── host b
//!                                             └──── gateway c ── host c
//! ```
//!
//! Each box is a network namespace. Gateway a listens, the others dial it, and with three sites it is the hub: what b has
//! for c goes through a. Behind gateway n (a is 1) are 10.9.n.0/24 and fd09:0:0:n::/64; its device in the tunnel has
//! 10.9.0.n and `fd09::n`. None of the routers knows these networks.

use std::{
    fmt::Write,
    fs,
    net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr},
    time::Duration,
};

use serde_json::Value;

use crate::{
    agent::Agent,
    clock::{self, PATIENCE},
    http::Account,
    links::{Namespaces, address_of_gateway, behind, cut},
    place::Place,
    process::run,
    qdiscs::Qdiscs,
};

/// The device of every agent.
pub const DEVICE: &str = "culvert0";

/// The QUIC port of gateway a.
pub const PORT: u16 = 4433;

/// A version of the Internet protocol.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Family {
    /// IPv4.
    V4,
    /// IPv6.
    V6,
}

impl Family {
    /// Both.
    pub const BOTH: [Self; 2] = [Self::V4, Self::V6];
}

/// What the sites are to be.
#[derive(Clone, Debug)]
pub struct Plan {
    count: u8,
    outer: Family,
    workers: u8,
    endpoint: Option<SocketAddr>,
    tun: String,
    peer: String,
    transport: String,
    /// What the others send to a: all, or only what belongs to its site.
    everything: bool,
}

/// The sites. Dropping them ends the agents and removes the namespaces.
#[derive(Debug)]
pub struct Sites {
    sites: Vec<Site>,
    namespaces: Namespaces,
    outer: Family,
}

/// A gateway with an agent, and a host behind it.
#[derive(Debug)]
pub struct Site {
    /// The gateway's agent.
    pub agent: Agent,
    /// The gateway. Its interfaces are `wan`, `lan` and the tunnel's [`DEVICE`].
    pub gateway: Place,
    /// The host; its interface is `lan`, and all that it sends goes to the gateway.
    pub host: Place,
    /// From 1.
    pub number: u8,
}

/// Names of sites, and what the other agents call them.
const NAMES: [&str; 3] = ["a", "b", "c"];

impl Plan {
    /// Two sites, each of which may send only from its own addresses.
    #[must_use]
    pub fn two() -> Self {
        Self {
            count: 2,
            outer: Family::V4,
            workers: 2,
            endpoint: None,
            tun: String::new(),
            // A machine that is busy with other tests is no reason to drop what waits.
            peer: "queue.time = \"5s\"\n".to_owned(),
            transport: String::new(),
            everything: false,
        }
    }

    /// A hub and two spokes: what a spoke has for any inner address goes to the hub.
    #[must_use]
    pub fn hub() -> Self {
        Self { count: 3, everything: true, ..Self::two() }
    }

    /// The agents speak over this version of the Internet protocol.
    #[must_use]
    pub fn outer(mut self, outer: Family) -> Self {
        self.outer = outer;
        self
    }

    /// Workers of each agent.
    #[must_use]
    pub fn workers(mut self, workers: u8) -> Self {
        self.workers = workers;
        self
    }

    /// The others find a at this address instead of its own.
    #[must_use]
    pub fn endpoint(mut self, endpoint: SocketAddr) -> Self {
        self.endpoint = Some(endpoint);
        self
    }

    /// More lines of every `[tun]`.
    #[must_use]
    pub fn tun(mut self, lines: &str) -> Self {
        self.tun += lines;
        self
    }

    /// More lines of every `[[peer]]`.
    #[must_use]
    pub fn peer(mut self, lines: &str) -> Self {
        self.peer += lines;
        self
    }

    /// More lines of every `[transport]`.
    #[must_use]
    pub fn transport(mut self, lines: &str) -> Self {
        self.transport += lines;
        self
    }

    /// Makes the namespaces and the links, starts the agents, and waits until they are connected.
    ///
    /// # Panics
    /// When any of that fails.
    #[must_use]
    #[track_caller]
    pub fn start(self) -> Sites {
        let mut sites = self.prepare();
        sites.start();
        sites
    }

    /// Makes the namespaces and the links, configures the agents and starts none.
    ///
    /// # Panics
    /// When `ip` fails.
    #[must_use]
    #[track_caller]
    pub fn prepare(self) -> Sites {
        let namespaces = Namespaces::new(&NAMES[..usize::from(self.count)]);
        namespaces.join();
        let site = |(name, number): (&'static str, u8)| {
            let [gateway, host] = ["gateway", "host"].map(|role| namespaces.place(&format!("{role}-{name}")));
            Site { agent: Agent::new(name, &gateway), gateway, host, number }
        };
        let sites: Vec<Site> = NAMES.into_iter().zip(1..=self.count).map(site).collect();
        for site in &sites {
            let peers = sites.iter().filter(|peer| (peer.number == 1) != (site.number == 1));
            site.agent.configure(&self.configuration(site, peers));
        }
        Sites { sites, namespaces, outer: self.outer }
    }

    fn configuration<'a>(&self, site: &Site, peers: impl Iterator<Item = &'a Site>) -> String {
        let listening = SocketAddr::new(address_of_gateway(1, self.outer), PORT);
        let mut text = format!("[transport]\nworkers = {}\n{}", self.workers, self.transport);
        if site.number == 1 {
            writeln!(text, "listen = [\"{listening}\"]").expect("a String takes all");
        }
        let number = site.number;
        write!(
            text,
            "[tun]\nname = \"{DEVICE}\"\naddress = [\"10.9.0.{number}/24\", \"fd09::{number}/64\"]\n{}",
            self.tun
        )
        .expect("a String takes all");
        for peer in peers {
            let number = peer.number;
            let allowed = if number == 1 && self.everything {
                "\"10.9.0.0/16\", \"fd09::/48\"".to_owned()
            } else {
                format!(
                    "\"10.9.0.{number}/32\", \"10.9.{number}.0/24\", \"fd09::{number}/128\", \
                     \"fd09:0:0:{number}::/64\""
                )
            };
            let (name, key) = (NAMES[usize::from(number - 1)], peer.agent.key());
            let more = &self.peer;
            write!(
                text,
                "[[peer]]\nname = \"{name}\"\npublic_key = \"{key}\"\nallowed_ips = [{allowed}]\n{more}"
            )
            .expect("a String takes all");
            if number == 1 {
                let endpoint = self.endpoint.unwrap_or(listening);
                writeln!(text, "endpoints = [\"{endpoint}\"]").expect("a String takes all");
            }
        }
        text
    }
}

impl Sites {
    /// Site a, which listens.
    #[must_use]
    pub fn a(&self) -> &Site {
        &self.sites[0]
    }

    /// Site b, which dials a.
    #[must_use]
    pub fn b(&self) -> &Site {
        &self.sites[1]
    }

    /// Site c, which dials a.
    ///
    /// # Panics
    /// When there are two sites only.
    #[must_use]
    pub fn c(&self) -> &Site {
        &self.sites[2]
    }

    /// All of them.
    #[must_use]
    pub fn all(&self) -> &[Site] {
        &self.sites
    }

    /// All of them, to start and to end agents.
    pub fn all_mut(&mut self) -> &mut [Site] {
        &mut self.sites
    }

    /// The router to which gateway a is connected: on its interface `a`, and on `middle`.
    #[must_use]
    pub fn west(&self) -> Place {
        self.namespaces.place("west")
    }

    /// The router to which the other gateways are connected: on interfaces of their names, and on `middle`.
    #[must_use]
    pub fn east(&self) -> Place {
        self.namespaces.place("east")
    }

    /// Starts all agents and waits until they are connected.
    ///
    /// # Panics
    /// When they are not soon.
    #[track_caller]
    pub fn start(&mut self) {
        for site in &mut self.sites {
            site.agent.start();
        }
        self.wait_for_connection();
    }

    /// Waits until each two agents that are peers have their connection, seen from both ends.
    ///
    /// # Panics
    /// When they have not soon.
    #[track_caller]
    pub fn wait_for_connection(&self) {
        for (site, peer) in self.peers() {
            site.agent.wait_for_count("culvert_peer_connected", &[("peer", peer)], 1);
        }
    }

    /// Each agent with the name of each of its peers.
    fn peers(&self) -> impl Iterator<Item = (&Site, &'static str)> {
        let spokes = self.sites[1..]
            .iter()
            .flat_map(|spoke| [(spoke, NAMES[0]), (&self.sites[0], NAMES[usize::from(spoke.number - 1)])]);
        spokes.into_iter()
    }

    /// The largest IP packet of the link between the routers, in both directions, from now on.
    ///
    /// # Panics
    /// When `ip` fails.
    #[track_caller]
    pub fn set_middle_mtu(&self, bytes: u16) {
        for router in [self.west(), self.east()] {
            router.tell(&["ip", "link", "set", "middle", "mtu", &bytes.to_string()]);
        }
    }

    /// Puts a cable with qdiscs in place of the link between the routers: what west sends leaves it by `vec1`, what east sends
    /// by `vec0`.
    ///
    /// # Panics
    /// When that fails.
    #[must_use]
    #[track_caller]
    pub fn lay_qdiscs(&self) -> Qdiscs {
        self.namespaces.cut_middle();
        let qdiscs = Qdiscs::between(&self.west(), &self.east(), "middle");
        self.namespaces.join_middle();
        qdiscs
    }

    /// Has every link carry packets as a cable does: no super-packets, and checksums complete.
    ///
    /// # Panics
    /// When `ethtool` fails.
    #[track_caller]
    pub fn cut(&self) {
        for site in &self.sites {
            let name = NAMES[usize::from(site.number - 1)];
            let router = if site.number == 1 { self.west() } else { self.east() };
            for (place, interface) in
                [(&site.gateway, "wan"), (&site.gateway, "lan"), (&site.host, "lan"), (&router, name)]
            {
                cut(place, interface);
            }
        }
        cut(&self.west(), "middle");
        cut(&self.east(), "middle");
    }

    /// Waits until nothing is on its way inside the agents, and checks that each accounts for all that it received.
    /// Returns the accounts of every agent with each of its peers, uplink then downlink.
    ///
    /// # Panics
    /// When an account does not balance.
    #[track_caller]
    pub fn accounts(&self) -> Vec<[Account; 2]> {
        self.peers()
            .map(|(site, peer)| {
                site.agent.wait_for("the accounts balance and nothing waits", |samples| {
                    let accounts = ["uplink", "downlink"].map(|direction| samples.account(peer, direction));
                    let settled = accounts.iter().all(|account| account.balances() && account.queued == 0);
                    if settled { Ok(accounts) } else { Err(format!("{accounts:?}")) }
                })
            })
            .collect()
    }

    /// Checks that each agent accounts for all that it received while traffic goes on. The status takes what is on its way between two
    /// workers into account; metrics show what each worker has published, at different times.
    ///
    /// # Panics
    /// When an account does not balance.
    #[track_caller]
    pub fn check_accounts_in_motion(&self) {
        for (site, peer) in self.peers() {
            let ask = || site.agent.try_to_ask(&["status", "--json"]);
            let status = clock::until("the status", PATIENCE, ask);
            let status: Value = serde_json::from_str(&status).expect("JSON");
            let peers = status["status"]["peers"].as_array().expect("a list of peers");
            let found = peers.iter().find(|found| found["name"] == peer).expect("a configured peer");
            for direction in ["uplink", "downlink"] {
                let account = &found[direction];
                assert_eq!(account["balances"], true, "{peer}, {direction}: {account:#}");
            }
        }
    }

    /// Why agents have dropped packets, and how many.
    #[must_use]
    #[track_caller]
    pub fn drops(&self) -> Vec<(String, f64)> {
        let drops = |site: &Site| site.agent.samples().by_label("culvert_datagrams_dropped_total", "reason");
        self.sites.iter().flat_map(drops).collect()
    }

    /// The address at which gateway a listens.
    #[must_use]
    pub fn listening(&self) -> SocketAddr {
        SocketAddr::new(address_of_gateway(1, self.outer), PORT)
    }
}

impl Site {
    /// Puts `new` for `old` in the agent's configuration, which it reads when it starts.
    ///
    /// # Panics
    /// When `old` is not in it.
    #[track_caller]
    pub fn edit(&self, old: &str, new: &str) {
        let file = self.agent.config();
        let config = fs::read_to_string(&file).expect("the harness has written it");
        assert!(config.contains(old), "{old} is not in {config}");
        fs::write(file, config.replace(old, new)).expect("the folder is ours");
    }

    /// Appends sections to the agent's configuration, which it reads when it starts.
    ///
    /// # Panics
    /// When the disk is full.
    #[track_caller]
    pub fn append(&self, sections: &str) {
        let file = self.agent.config();
        let config = fs::read_to_string(&file).expect("the harness has written it");
        fs::write(file, config + sections).expect("the folder is ours");
    }

    /// The host's address behind the gateway.
    #[must_use]
    pub fn host_address(&self, family: Family) -> IpAddr {
        behind(self.number, 2, family)
    }

    /// The gateway's address before its host.
    #[must_use]
    pub fn lan_address(&self, family: Family) -> IpAddr {
        behind(self.number, 1, family)
    }

    /// The gateway's address in the tunnel.
    #[must_use]
    pub fn tunnel_address(&self, family: Family) -> IpAddr {
        match family {
            Family::V4 => Ipv4Addr::new(10, 9, 0, self.number).into(),
            Family::V6 => Ipv6Addr::new(0xfd09, 0, 0, 0, 0, 0, 0, self.number.into()).into(),
        }
    }

    /// The gateway's address before the routers.
    #[must_use]
    pub fn outer_address(&self, family: Family) -> IpAddr {
        address_of_gateway(self.number, family)
    }

    /// The MTU of the tunnel's device, in bytes.
    ///
    /// # Panics
    /// When there is no such device.
    #[must_use]
    #[track_caller]
    pub fn device_mtu(&self) -> u64 {
        let json = self.gateway.tell(&["ip", "-j", "link", "show", "dev", DEVICE]);
        let links: Value = serde_json::from_str(&json).expect("ip -j writes JSON");
        links[0]["mtu"].as_u64().expect("a number")
    }

    /// Waits until the tunnel's device has this MTU.
    ///
    /// # Panics
    /// When it has not soon.
    #[track_caller]
    pub fn wait_for_device_mtu(&self, expected: u64) {
        clock::until(&format!("{DEVICE} has an MTU of {expected}"), PATIENCE, || match self.device_mtu() {
            mtu if mtu == expected => Ok(()),
            mtu => Err(mtu.to_string()),
        });
    }

    /// Whether the tunnel's device exists.
    #[must_use]
    pub fn has_device(&self) -> bool {
        let mut command = self.gateway.command("ip");
        run(command.args(["link", "show", "dev", DEVICE]), Duration::from_secs(10)).status.success()
    }

    /// Everything of the gateway's routing that an agent may change: rules and routes of all tables.
    ///
    /// # Panics
    /// When `ip` fails.
    #[must_use]
    #[track_caller]
    pub fn routing(&self) -> String {
        ["-4", "-6"]
            .map(|family| {
                let rules = self.gateway.tell(&["ip", family, "rule"]);
                rules + &self.gateway.tell(&["ip", family, "route", "show", "table", "all"])
            })
            .concat()
    }
}
