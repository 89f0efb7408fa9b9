//! An agent for a foreign peer: services of its own, and local ports that lead to the peer's.

use std::net::{Ipv4Addr, SocketAddr};

use culvert_tests::{agent::Agent, client::Client, place::Place, ports, upstream::Echo};

use crate::{
    protobuf::Service,
    quinn_client::{Session, Site},
};

/// The number under which the peer offers "answers".
pub(crate) const ANSWERS: u64 = 41;

/// The agent calls the peer "foreign".
#[derive(Debug)]
pub(crate) struct Case {
    pub(crate) agent: Agent,
    /// What is behind the agent's services "echo" (UDP and TCP), "large" (the same, with datagrams in pieces), "streams" (TCP) and "brief" (idle after 300 ms).
    /// There is a service "forbidden" too, which the peer may not use.
    _echo: Echo,
    /// Where the agent listens for the peer, or the peer for the agent.
    pub(crate) underlay: SocketAddr,
    /// The agent's UDP and TCP port for the peer's service "answers".
    pub(crate) ingress: SocketAddr,
}

impl Case {
    /// Starts an agent that the peer with the public key `key` dials.
    #[track_caller]
    pub(crate) fn dialled(key: &str) -> Self {
        Self::start(key, false, "")
    }

    /// The same with more lines of `[transport]`.
    #[track_caller]
    pub(crate) fn dialled_with(key: &str, transport: &str) -> Self {
        Self::start(key, false, transport)
    }

    /// Starts an agent that dials the peer.
    #[track_caller]
    pub(crate) fn dialling(key: &str) -> Self {
        Self::start(key, true, "")
    }

    #[track_caller]
    fn start(key: &str, dials: bool, transport: &str) -> Self {
        let echo = Echo::new();
        let mut agent = Agent::new("agent", &Place::Host);
        let [underlay, ingress] = [(); 2].map(|()| SocketAddr::from((Ipv4Addr::LOCALHOST, ports::free())));
        let (listen, endpoints) = if dials {
            (String::new(), format!("endpoints = [\"{underlay}\"]\n"))
        } else {
            (format!("listen = [\"{underlay}\"]\n"), String::new())
        };
        let service = |name: &str, lines: &str| {
            format!("[[service]]\nname = \"{name}\"\nupstream = \"{}\"\n{lines}\n", echo.address)
        };
        let forward = |protocol: &str| {
            format!("[[{protocol}]]\nlisten = \"{ingress}\"\npeer = \"foreign\"\nservice = \"answers\"\n")
        };
        agent.configure(
            &[
                format!("[transport]\n{listen}{transport}[access]\nknock = \"off\"\n"),
                service("echo", ""),
                service("large", "oversize = \"fragment\""),
                service("streams", "protocol = \"tcp\""),
                service("brief", "idle = \"300ms\""),
                service("forbidden", ""),
                format!("[[peer]]\nname = \"foreign\"\npublic_key = \"{key}\"\n{endpoints}"),
                "services = [\"echo\", \"large\", \"streams\", \"brief\"]\nqueue.time = \"5s\"\n".to_owned(),
                forward("udp"),
                forward("tcp"),
            ]
            .concat(),
        );
        agent.start();
        Self { agent, _echo: echo, underlay, ingress }
    }

    /// A session of `site`, after the hellos; the peer offers "answers".
    #[track_caller]
    pub(crate) fn connect<'a>(&self, site: &'a Site) -> Session<'a> {
        let mut session = site.dial(self.underlay, self.agent.key());
        session.send_deferred_hello(&[answers()]);
        session
    }

    /// A local client of the peer's service.
    pub(crate) fn client(&self) -> Client {
        Client::new(0, self.ingress)
    }

    /// Waits for accounts that balance and say that so many datagrams were delivered to the peer and from it.
    #[track_caller]
    pub(crate) fn wait_for_delivered(&self, uplink: u64, downlink: u64) {
        self.agent.wait_for(&format!("{uplink} and {downlink} datagrams delivered"), |samples| {
            let accounts = ["uplink", "downlink"].map(|direction| samples.account("foreign", direction));
            let fits = accounts.map(|account| account.delivered) == [uplink, downlink]
                && accounts.iter().all(|account| account.balances() && account.queued == 0);
            if fits { Ok(()) } else { Err(format!("{accounts:?}")) }
        });
    }
}

/// The service that the peer offers.
pub(crate) fn answers() -> Service {
    let (number, name) = (ANSWERS, "answers".to_owned());
    Service { number, name, udp: true, tcp: true, idle_ms: 60_000, fragment: false }
}
