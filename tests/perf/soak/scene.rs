//! Who runs where: an entry, an exit, a branch that comes and goes, and an upstream that answers.

use std::{
    fs,
    net::{IpAddr, Ipv4Addr, SocketAddr, UdpSocket},
    path::Path,
};

use culvert_tests::{
    agent::{Agent, culvert},
    needs,
    pair::{Pair, Plan},
    place::{Cable, Place},
    ports,
    process::text,
    upstream::Echo,
};
use serde_json::Value;

/// The exit's inner address.
pub(crate) const EXIT_INSIDE: Ipv4Addr = Ipv4Addr::new(10, 9, 0, 2);

/// The ceiling that reloads change, and change back.
pub(crate) const CEILINGS: [&str; 2] = ["flows = 20000", "flows = 20001"];

/// The agents and what is around them.
pub(crate) struct Scene {
    pub(crate) pair: Pair,
    /// An agent that the exit knows only while it runs.
    pub(crate) branch: Agent,
    /// Where the entry and its applications are, and where the exit and its upstreams are.
    pub(crate) places: [Place; 2],
    /// The entry's ports: of a service that answers, and of one that only takes.
    pub(crate) echo_port: SocketAddr,
    pub(crate) sink_port: SocketAddr,
    /// The branch's port of the service that answers.
    pub(crate) branch_port: SocketAddr,
    /// The upstream's port, which is also reached through the tunnel.
    pub(crate) echo: SocketAddr,
    /// Whether there is a tunnel.
    pub(crate) tunnel: bool,
    _echo: Echo,
    _sink: UdpSocket,
    _cable: Option<Cable>,
}

impl Scene {
    /// Starts all but the branch.
    pub(crate) fn new() -> Self {
        let tunnel = needs::is_root() && Path::new("/dev/net/tun").exists();
        let cable = tunnel.then(Cable::new);
        let places = cable.as_ref().map_or([Place::Host, Place::Host], Cable::places);
        let underlay: IpAddr =
            if tunnel { Cable::SECOND[0].parse().expect("an address") } else { Ipv4Addr::LOCALHOST.into() };
        let upstream = places[1].enter(|| Echo::on(Ipv4Addr::UNSPECIFIED.into()));
        let sink = places[1].enter(|| UdpSocket::bind((Ipv4Addr::LOCALHOST, 0)).expect("a port is free"));
        let [echo_port, sink_port, branch_port] =
            [(); 3].map(|()| SocketAddr::from((Ipv4Addr::LOCALHOST, ports::free())));
        let echo = SocketAddr::from((Ipv4Addr::LOCALHOST, upstream.address.port()));
        let pair = Plan::default()
            .at(places.clone())
            .underlay(underlay)
            .service("echo", echo, "idle = \"3s\"\n")
            .service("sink", sink.local_addr().expect("it is bound"), "idle = \"3s\"\n")
            // quinn-proto keeps a receive buffer, some 12 KiB, for each stream that a peer may open, from when one was used until
            // the connection ends: few streams, so that all have been used after the first round.
            .exit(&format!("[limits]\ntcp_streams_per_peer = 64\n{}\n", CEILINGS[0]))
            .forward("echo", echo_port)
            .forward("sink", sink_port)
            .prepare();
        let branch = Agent::new("branch", &places[0]);
        branch.configure(&format!(
            "[transport]\nworkers = 1\n[[peer]]\nname = \"exit\"\npublic_key = \"{}\"\nendpoints = [\"{}\"]\n\
             [[udp]]\nlisten = \"{branch_port}\"\npeer = \"exit\"\nservice = \"echo\"\n",
            pair.exit.key(),
            pair.underlay
        ));
        for agent in [&pair.entry, &pair.exit, &branch] {
            replace(agent, "log.level = \"debug\"", "log.level = \"info\"");
        }
        if tunnel {
            for (agent, own, other) in
                [(&pair.entry, "10.9.0.1", "10.9.0.2"), (&pair.exit, "10.9.0.2", "10.9.0.1")]
            {
                let with = format!(
                    "[tun]\nname = \"soak0\"\naddress = [\"{own}/24\"]\n[[peer]]\nallowed_ips = [\"{other}\"]\n"
                );
                replace(agent, "[[peer]]\n", &with);
            }
        }
        let mut scene = Self {
            pair,
            branch,
            places,
            echo_port,
            sink_port,
            branch_port,
            echo,
            tunnel,
            _echo: upstream,
            _sink: sink,
            _cable: cable,
        };
        scene.pair.exit.start();
        scene.pair.entry.start();
        scene.pair.wait_for_connection();
        scene
    }

    /// Kills the entry, and starts it again.
    pub(crate) fn restart_entry(&mut self) {
        self.pair.entry.kill();
        self.pair.entry.start();
    }

    /// Ends the exit, and starts it again.
    pub(crate) fn restart_exit(&mut self, kill: bool) {
        if kill {
            self.pair.exit.kill();
        } else {
            self.pair.exit.terminate();
        }
        self.pair.exit.start();
    }
}

/// Changes an agent's configuration file.
pub(crate) fn replace(agent: &Agent, from: &str, to: &str) {
    let text = fs::read_to_string(agent.config()).expect("it is configured");
    assert!(text.contains(from), "{from}: {text}");
    fs::write(agent.config(), text.replacen(from, to, 1)).expect("the folder is ours");
}

/// Runs a command about the daemon with the configuration `config`; what it said if it failed.
pub(crate) fn ask(config: &Path, args: &[&str]) -> Result<(), String> {
    let output = culvert(&[args, &["--config", config.to_str().expect("our own path")]].concat());
    if output.status.success() { Ok(()) } else { Err(text(&output.stderr)) }
}

/// The names of the peers that the daemon with the configuration `config` knows.
pub(crate) fn known(config: &Path) -> Vec<String> {
    let output = culvert(&["peer", "list", "--json", "--config", config.to_str().expect("our own path")]);
    assert!(output.status.success(), "{}", text(&output.stderr));
    let list: Value = serde_json::from_slice(&output.stdout).expect("JSON");
    let peers = list["peers"].as_array().expect("a list");
    peers.iter().map(|peer| peer["name"].as_str().expect("a name").to_owned()).collect()
}
