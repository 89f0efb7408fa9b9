//! What scripts run over: listeners that are reached directly, through two agents, and through HAProxy.

use std::{
    fmt::Write as _,
    fs,
    net::{Ipv4Addr, SocketAddr, TcpListener, TcpStream},
    process::{Command, Stdio},
};

use culvert_tests::{
    clock::{self, PATIENCE},
    needs,
    pair::{Pair, Plan},
    place::Place,
    ports,
    process::{Running, run, text},
};
use socket2::{Domain, Socket, Type};
use tempfile::TempDir;
/// What the programs of a script do, and what is compared.
pub(crate) use testkit::scripts;

/// A service of a script, of which one runs at a time, and the addresses at which it is reached.
pub(crate) struct Lane {
    pub(crate) listener: TcpListener,
    /// Through the agents.
    pub(crate) forward: SocketAddr,
    /// Through HAProxy.
    pub(crate) beside: SocketAddr,
}

/// Two agents, and services behind them.
pub(crate) struct Bed {
    pub(crate) pair: Pair,
    pub(crate) place: Place,
    pub(crate) lanes: Vec<Lane>,
    /// A port at which nobody listens: directly, through the agents, through HAProxy.
    pub(crate) nobody: [SocketAddr; 3],
    /// Has that port, so that nobody else can listen there.
    _nobody: Socket,
}

impl Bed {
    /// So many lanes; `lines` are of each `[[service]]` and of each `[[tcp]]`.
    pub(crate) fn new(place: &Place, lanes: usize, lines: &str) -> Self {
        let mut plan = Plan::default().at([place.clone(), place.clone()]);
        let nobody: [SocketAddr; 3] = place.enter(|| [(); 3].map(|()| ports::loopback()));
        let holder = place.enter(|| Socket::new(Domain::IPV4, Type::STREAM, None)).unwrap();
        holder.bind(&nobody[0].into()).unwrap();
        plan = plan.service("nobody", nobody[0], lines).forward("nobody", nobody[1]).entry(lines);
        let lanes: Vec<Lane> = (0..lanes)
            .map(|_| {
                place.enter(|| {
                    let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, ports::free())).unwrap();
                    Lane { listener, forward: ports::loopback(), beside: ports::loopback() }
                })
            })
            .collect();
        for (number, lane) in lanes.iter().enumerate() {
            let (name, upstream) = (format!("lane{number}"), lane.listener.local_addr().unwrap());
            plan = plan.service(&name, upstream, lines).forward(&name, lane.forward).entry(lines);
        }
        Self { pair: plan.start(), place: place.clone(), lanes, nobody, _nobody: holder }
    }

    /// Lets whole connections be cut off from now on; the bed is in a namespace of its own.
    pub(crate) fn prepare_cuts(&self) {
        const RULES: &str = "add table inet cuts; \
            add set inet cuts cut { type inet_service . inet_service; flags timeout; }; \
            add chain inet cuts arriving { type filter hook input priority 0; }; \
            add rule inet cuts arriving tcp sport . tcp dport @cut drop";
        assert_ne!(self.place, Place::Host, "the host's packets are not the test's business");
        self.place.enter(|| nft(RULES));
    }

    /// Discards all packets between two ports, both ways, for as long as a script may run. To be called by a thread in the bed's
    /// namespace.
    pub(crate) fn cut(&self, one: SocketAddr, other: SocketAddr) {
        let (one, other) = (one.port(), other.port());
        nft(&format!(
            "add element inet cuts cut {{ {one} . {other} timeout 40s, {other} . {one} timeout 40s }}"
        ));
    }

    /// Waits until no forward is left at either end.
    pub(crate) fn assert_that_nothing_is_left(&self) {
        for (_, agent) in self.pair.ends() {
            agent.wait_for_count("culvert_tcp_streams", &[], 0);
        }
    }

    /// HAProxy before the same services.
    pub(crate) fn haproxy(&self) -> HaProxy {
        let mut text =
            "global\n  maxconn 1000\ndefaults\n  mode tcp\n  timeout connect 10s\n  timeout client 60s\n  \
                        timeout server 60s\n"
                .to_owned();
        let ways = self.lanes.iter().map(|lane| (lane.beside, lane.listener.local_addr().unwrap()));
        for (number, (listen, upstream)) in ways.chain([(self.nobody[2], self.nobody[0])]).enumerate() {
            writeln!(text, "listen lane{number}\n  bind {listen}\n  server service {upstream}").unwrap();
        }
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("haproxy.cfg");
        fs::write(&file, text).unwrap();
        let mut command = self.place.command("haproxy");
        command.arg("-db").arg("-f").arg(&file).stdout(Stdio::null()).stderr(Stdio::null());
        let process = Running::start("haproxy", &mut command);
        let first = self.nobody[2];
        self.place.enter(|| {
            clock::until("haproxy listens", PATIENCE, || TcpStream::connect(first).map(drop));
        });
        HaProxy { _process: process, _folder: folder }
    }
}

/// Tells the packet filter of this thread's namespace. Not by way of `ip netns exec`, whose mounts wait for each other.
fn nft(words: &str) {
    let output = run(Command::new(needs::tool("nft").unwrap()).arg(words), PATIENCE);
    assert!(output.status.success(), "nft {words}: {}", text(&output.stderr));
}

/// A running HAProxy.
pub(crate) struct HaProxy {
    _process: Running,
    _folder: TempDir,
}
