//! Two sites whose agents speak through an impairment, with numbered datagrams between their hosts: what things are done to.
//!
//! ```text
//!  host a ── gateway a ── west (the impairment) ══ middle ══ east ── gateway b ── host b
//! ```
//!
//! Each way there is a line through a service of the agent there, and one through the tunnel: to a over IPv4, to b over IPv6.

use std::{
    net::{IpAddr, SocketAddr},
    ops::RangeInclusive,
    thread,
    time::{Duration, Instant},
};

use crate::{
    agent::Agent,
    clock::{self, PATIENCE},
    firewall::Blockade,
    impairment::{Impairment, Path, Way},
    iperf,
    names::Names,
    ports,
    sites::{Family, PORT, Plan, Site, Sites},
    stream::{Line, Streams},
};

/// The name under which agent b knows agent a, if it does not know it by an address.
const NAME: &str = "gw.example.net";

/// Addresses of the western router, in the order in which an impairment is at them: on its link to gateway a, on the one to
/// the eastern router, and the first of IPv6.
const FRONTS: [&str; 3] = ["192.0.2.1", "203.0.113.1", "2001:db8:0:1::1"];

/// Gateway b's addresses before its router: the one it has at first, and another.
const ADDRESSES: [&str; 2] = ["198.51.100.34", "198.51.100.35"];

/// Which of the sites.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum End {
    /// a, whose agent listens.
    Listener,
    /// b, whose agent dials.
    Dialler,
}

/// How an agent ends.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Ending {
    /// SIGKILL.
    Killed,
    /// SIGTERM.
    Asked,
}

/// Where agent b finds agent a.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Entrance {
    /// At one of the addresses, the impairment there.
    Address,
    /// At a name that has the first of the addresses; there is an impairment at each of them.
    Name,
}

/// What is set up.
#[derive(Debug)]
pub struct Stage {
    // Dropped in this order: traffic, what is in the network, agents with their network, what is between them.
    streams: Option<Streams>,
    /// Has the routers discard what is for an address that gateway b no longer has, and count it, which they else would not.
    gone: Option<Blockade>,
    /// The sites.
    pub sites: Sites,
    relays: Vec<Impairment>,
    names: Option<Names>,
    /// Which of its addresses gateway b has.
    address: usize,
    /// What was discarded for addresses of before.
    discarded: u64,
    /// What the gateways had before their agents were started.
    before: Vec<String>,
    /// Where a client at site b finds the iperf3 server of site a: through the service, and through the tunnel.
    pub iperf: [SocketAddr; 2],
}

impl Stage {
    /// Sets up everything but the traffic; `peer` are more lines of every `[[peer]]`.
    ///
    /// # Panics
    /// When that fails.
    #[must_use]
    #[track_caller]
    pub fn new(plan: Plan, entrance: Entrance, path: Path) -> (Self, Vec<Line>) {
        let fronts: Vec<IpAddr> = FRONTS.iter().map(|text| text.parse().expect("an address")).collect();
        let port = ports::free();
        let mut sites = plan
            .peer("services = [\"echo\", \"iperf\"]\n")
            .endpoint(SocketAddr::new(fronts[0], port))
            .prepare();
        let names = (entrance == Entrance::Name).then(|| {
            let b = sites.b();
            b.edit(&format!("{}:{port}", fronts[0]), &format!("{NAME}:{port}"));
            let a = sites.a();
            let both = Family::BOTH.map(|family| SocketAddr::new(a.outer_address(family), PORT).to_string());
            a.edit(&format!("listen = [\"{}\"]", both[0]), &format!("listen = {both:?}"));
            Names::new(&b.gateway, &[(NAME, fronts[0])])
        });
        let used = if names.is_some() { fronts.len() } else { 1 };
        let relays = fronts[..used].iter().map(|front| {
            let family = if front.is_ipv4() { Family::V4 } else { Family::V6 };
            let server = SocketAddr::new(sites.a().outer_address(family), PORT);
            Impairment::new(&sites.west(), SocketAddr::new(*front, port), server, path)
        });
        let relays = relays.collect();
        let (lines, iperf) = lines(&sites);
        // Its one address is taken from it in a test; others on the interface are not to go with it.
        sites.b().gateway.sysctl("net.ipv4.conf.wan.promote_secondaries", "1");
        let before = sites.all().iter().map(routing).collect();
        sites.start();
        (
            Self { streams: None, sites, relays, names, address: 0, gone: None, discarded: 0, before, iperf },
            lines,
        )
    }

    /// The same with two workers each, and traffic on all lines.
    ///
    /// # Panics
    /// When nothing comes back.
    #[must_use]
    #[track_caller]
    pub fn start(entrance: Entrance, path: Path) -> Self {
        let (mut stage, lines) = Self::new(Plan::two(), entrance, path);
        stage.stream(lines);
        stage
    }

    /// Begins to send on these lines, and waits until each is answered.
    ///
    /// # Panics
    /// When one is not.
    #[track_caller]
    pub fn stream(&mut self, lines: Vec<Line>) {
        let streams = Streams::start(lines);
        streams.wait_for_answers("the start");
        self.streams = Some(streams);
    }

    /// For each line the newest number that came back: what has been sent later may be lost from now on.
    #[must_use]
    pub fn newest(&self) -> Vec<u64> {
        self.streams().lines().iter().map(|line| line.newest().unwrap_or(0)).collect()
    }

    /// How many datagrams have been sent on each line: what is sent later is not to be lost.
    #[must_use]
    pub fn sent(&self) -> Vec<u64> {
        self.streams().lines().iter().map(|line| line.sent()).collect()
    }

    /// The traffic.
    ///
    /// # Panics
    /// When there is none.
    #[must_use]
    #[track_caller]
    pub fn streams(&self) -> &Streams {
        self.streams.as_ref().expect("it has been started")
    }

    /// What is between the agents at first.
    #[must_use]
    pub fn relay(&self) -> &Impairment {
        &self.relays[0]
    }

    /// All that is between the agents.
    #[must_use]
    pub fn relays(&self) -> &[Impairment] {
        &self.relays
    }

    /// A site.
    #[must_use]
    pub fn site(&self, end: End) -> &Site {
        &self.sites.all()[end as usize]
    }

    fn agent(&mut self, end: End) -> &mut Agent {
        &mut self.sites.all_mut()[end as usize].agent
    }

    /// An agent ends, stays away for a while and is started again; returns when it was.
    ///
    /// # Panics
    /// When it does not end, or is not ready soon.
    #[track_caller]
    pub fn restart(&mut self, end: End, ending: Ending, away: Duration) -> Instant {
        match ending {
            Ending::Killed => self.agent(end).kill(),
            Ending::Asked => assert_eq!(self.agent(end).terminate().code(), Some(0)),
        }
        thread::sleep(away);
        let started = clock::now();
        self.agent(end).start();
        started
    }

    /// The host of agent b has another address from now on, and the one that it had no more.
    ///
    /// # Panics
    /// When `ip` fails.
    #[track_caller]
    pub fn move_dialler(&mut self) {
        let (old, new) = (ADDRESSES[self.address], ADDRESSES[1 - self.address]);
        self.address = 1 - self.address;
        self.discarded = self.discarded();
        self.gone = None;
        self.gone = Some(Blockade::on_the_way(&self.sites.east(), &format!("ip daddr {old}")));
        let gateway = &self.site(End::Dialler).gateway;
        gateway.tell(&["ip", "addr", "add", &format!("{new}/28"), "dev", "wan"]);
        gateway.tell(&["ip", "addr", "del", &format!("{old}/28"), "dev", "wan"]);
        self.route();
    }

    /// Datagrams for addresses that gateway b no longer had.
    ///
    /// # Panics
    /// When nftables does not say.
    #[must_use]
    #[track_caller]
    pub fn discarded(&self) -> u64 {
        self.discarded + self.gone.as_ref().map_or(0, Blockade::discarded)
    }

    /// What leads gateway b's packets out, after the kernel has taken it away with an address or a link.
    fn route(&self) {
        let gateway = &self.site(End::Dialler).gateway;
        gateway.tell(&["ip", "route", "replace", "default", "via", "198.51.100.33"]);
        gateway.tell(&["ip", "-6", "route", "replace", "default", "via", "2001:db8:0:2::1"]);
    }

    /// Gateway b's link is down for a while; returns when it was up again.
    ///
    /// # Panics
    /// When `ip` fails.
    #[track_caller]
    pub fn cut_link(&self, time: Duration) -> Instant {
        let gateway = &self.site(End::Dialler).gateway;
        gateway.sysctl("net.ipv6.conf.wan.keep_addr_on_down", "1");
        gateway.tell(&["ip", "link", "set", "wan", "down"]);
        thread::sleep(time);
        gateway.tell(&["ip", "link", "set", "wan", "up"]);
        self.route();
        clock::now()
    }

    /// The path is another for a while, in one direction or in both; returns when it was as before again, which is without faults.
    pub fn spoil(&self, ways: &[Way], path: Path, time: Duration) -> Instant {
        for way in ways {
            self.relay().change_way(*way, path);
        }
        thread::sleep(time);
        self.relay().change(Path::default());
        clock::now()
    }

    /// Agent a is at another of the addresses from now on, the names say so, and nothing passes at those of before.
    ///
    /// # Panics
    /// When it is not known by a name.
    #[track_caller]
    pub fn move_listener(&self, place: usize) {
        let names = self.names.as_ref().expect("the dialler knows a name");
        names.set(&[(NAME, FRONTS[place].parse().expect("an address"))]);
        self.open_only(place);
    }

    /// The name has several of the addresses.
    ///
    /// # Panics
    /// When there is no name.
    #[track_caller]
    pub fn name(&self, places: &[usize]) {
        let names = self.names.as_ref().expect("the dialler knows a name");
        let addresses: Vec<_> =
            places.iter().map(|place| (NAME, FRONTS[*place].parse().expect("an address"))).collect();
        names.set(&addresses);
    }

    /// Nothing passes but at this address.
    pub fn open_only(&self, place: usize) {
        for (number, relay) in self.relays.iter().enumerate() {
            let loss = if number == place { 0.0 } else { 1.0 };
            relay.change(Path { loss, ..Path::default() });
        }
    }

    /// Waits until both agents have as many lanes up as `lanes`, and no others.
    ///
    /// # Panics
    /// When they have not soon.
    #[track_caller]
    pub fn wait_for_lanes(&self, lanes: u64) {
        for site in self.sites.all() {
            site.agent.wait_for_count("culvert_lanes", &[("state", "up")], lanes);
            site.agent.wait_for_count("culvert_lanes", &[], lanes);
        }
    }

    /// Waits until the largest packet of an agent, in bytes of UDP payload, is in `range`.
    ///
    /// # Panics
    /// When it is not soon.
    #[track_caller]
    pub fn wait_for_packets(&self, end: End, range: RangeInclusive<u64>) {
        self.site(end).agent.wait_for(&format!("packets of {range:?} bytes"), |samples| {
            let bytes = samples.count("culvert_lane_packet_bytes", &[]);
            if range.contains(&bytes) { Ok(()) } else { Err(bytes.to_string()) }
        });
    }

    /// How many descriptors each agent has open.
    ///
    /// # Panics
    /// When one does not run.
    #[track_caller]
    pub fn descriptors(&mut self) -> [usize; 2] {
        [End::Listener, End::Dialler].map(|end| {
            let pid = self.agent(end).process().pid();
            std::fs::read_dir(format!("/proc/{pid}/fd")).expect("it runs").count()
        })
    }

    /// Waits until no agent has more descriptors open than it had.
    ///
    /// # Panics
    /// When one has.
    #[track_caller]
    pub fn wait_for_descriptors(&mut self, before: [usize; 2]) {
        clock::until("no more descriptors than before", PATIENCE, || {
            let now = self.descriptors();
            if now[0] <= before[0] && now[1] <= before[1] {
                Ok(())
            } else {
                Err(format!("{now:?}, {before:?}"))
            }
        });
    }

    /// Ends the traffic and the agents, and checks that their gateways have what they had before those were started, and
    /// nothing else.
    ///
    /// # Panics
    /// When something is left.
    #[track_caller]
    pub fn end(mut self) {
        self.streams = None;
        for (site, before) in self.sites.all_mut().iter_mut().zip(&self.before) {
            assert_eq!(site.agent.terminate().code(), Some(0));
            assert!(!site.has_device());
            assert_eq!(routing(site), *before);
        }
    }
}

/// Rules and routes, in no order: routes that were taken away and set again are elsewhere in the list.
fn routing(site: &Site) -> String {
    let routing = site.routing();
    let mut lines: Vec<&str> = routing.lines().collect();
    lines.sort_unstable();
    // Neighbours that gateway b's addresses have answered have left their marks.
    lines.join("\n").replace(ADDRESSES[1], ADDRESSES[0])
}

/// Lines between the hosts of the sites, and the services that they need; where iperf3's clients at b find its server at a.
fn lines(sites: &Sites) -> (Vec<Line>, [SocketAddr; 2]) {
    let [a, b] = [sites.a(), sites.b()];
    let mut lines = Vec::new();
    for (name, from, to, peer) in [("service of a", b, a, "a"), ("service of b", a, b, "b")] {
        let listen = SocketAddr::new(from.lan_address(Family::V4), ports::free());
        let line = Line::new(name, &from.host, &to.host, to.host_address(Family::V4)).through(listen);
        to.append(&format!("[[service]]\nname = \"echo\"\nupstream = \"{}\"\n", line.echo_address()));
        from.append(&format!("[[udp]]\nlisten = \"{listen}\"\npeer = \"{peer}\"\nservice = \"echo\"\n"));
        lines.push(line);
    }
    lines.push(Line::new("packets to a", &b.host, &a.host, a.host_address(Family::V4)));
    lines.push(Line::new("packets to b", &a.host, &b.host, b.host_address(Family::V6)));
    let server = SocketAddr::new(a.host_address(Family::V4), iperf::PORT);
    let listen = SocketAddr::new(b.lan_address(Family::V4), iperf::PORT);
    for site in [a, b] {
        site.append(&format!("[[service]]\nname = \"iperf\"\nupstream = \"{server}\"\nidle = \"2s\"\n"));
    }
    for protocol in ["udp", "tcp"] {
        b.append(&format!("[[{protocol}]]\nlisten = \"{listen}\"\npeer = \"a\"\nservice = \"iperf\"\n"));
    }
    (lines, [listen, server])
}
