//! A hostile peer at a real agent, each attack for a moment: the agent lives, an innocent peer keeps its session, memory stays bounded, and
//! every datagram is accounted for. What it costs others is measured by command: `tests/perf/hostile`.
//!
//! | question | file |
//! |---|---|
//! | what a hostile peer does | `peer/` |
//! | the same peer as a program | `program.rs` |

#![expect(clippy::unwrap_used, reason = "a test that cannot go on has failed")]

mod peer;

use std::{
    fs,
    net::{Ipv4Addr, SocketAddr, TcpListener, UdpSocket},
    thread,
    time::Duration,
};

use clap::ValueEnum;
use culvert_tests::{
    client::Client,
    needs,
    pair::{Pair, Plan},
    ports,
    upstream::Echo,
};
use gate::identity::{Identity, PublicKey};

use peer::{Attack, Mode, Options, Pace};

/// How long each attack lasts.
const LENGTH: Duration = Duration::from_secs(1);

/// How often a machine that stands still is tried again.
const ATTEMPTS: usize = 5;

/// Percent of a processor that the attacker has.
const CPU: u32 = 20;

/// What the exit may grow to: a multiple of what all ceilings of these short attacks allow.
const MOST_RESIDENT_BYTES: u64 = 512 << 20;

/// An innocent entry, and an exit that a hostile peer may connect to.
struct Scene {
    pair: Pair,
    client: Client,
    /// A key for each attack: a peer that broke the protocol has to wait before it may connect again.
    identities: Vec<Identity>,
    _echo: Echo,
    _sink: UdpSocket,
    /// Its backlog takes the connections of an attack, which nobody reads.
    mute: TcpListener,
}

impl Scene {
    #[track_caller]
    fn new(is_guest: bool) -> Self {
        let echo = Echo::new();
        let identities: Vec<_> =
            Attack::value_variants().iter().map(|_| Identity::generate().unwrap()).collect();
        let [sink, mute] = [(); 2].map(|()| SocketAddr::from((Ipv4Addr::LOCALHOST, ports::free())));
        let ingress: SocketAddr = (Ipv4Addr::LOCALHOST, ports::free()).into();
        let hostile = if is_guest {
            "[access]\nmode = \"open\"\nservices = [\"sink\", \"mute\"]\n".to_owned()
        } else {
            let peers = Attack::value_variants().iter().zip(&identities).map(|(attack, identity)| {
                let (name, key) = (name(*attack), identity.public_key());
                format!(
                    "[[peer]]\nname = \"{name}\"\npublic_key = \"{key}\"\nservices = [\"sink\", \"mute\"]\n"
                )
            });
            peers.collect()
        };
        let pair = Plan::default()
            .workers([2, 2])
            .service("echo", echo.address, "")
            .forbidden_service("sink", sink, "idle = \"2s\"\noversize = \"fragment\"")
            .forbidden_service("mute", mute, "protocol = \"tcp\"")
            .exit(&hostile)
            .forward("echo", ingress)
            .start();
        let mut client = Client::new(0, ingress);
        client.converse(3);
        let (_sink, mute) = (UdpSocket::bind(sink).unwrap(), TcpListener::bind(mute).unwrap());
        mute.set_nonblocking(true).unwrap();
        Self { pair, client, identities, _echo: echo, _sink, mute }
    }

    /// Runs one attack beside the innocent's datagrams, and looks at what is left.
    #[track_caller]
    fn harm(&mut self, attack: Attack, mode: Mode) {
        let (mut is_attack, mut report) = self.attacked(attack, mode);
        for _ in 1..ATTEMPTS {
            if !is_attack {
                // A machine that stands still for the length of an attack has seen none.
                (is_attack, report) = self.attacked(attack, mode);
            }
        }
        assert!(is_attack, "{attack:?} {mode:?} was no attack: {report}");
        assert_eq!(self.pair.exit.process().ended(), None, "{attack:?} {mode:?} ended the agent");
        self.client.reach();
        self.assert_unharmed(attack, mode);
    }

    /// Runs one attack beside the innocent's datagrams; whether there was a session with packets, and the attacker's report.
    #[track_caller]
    fn attacked(&mut self, attack: Attack, mode: Mode) -> (bool, String) {
        let identity = &self.identities[attack as usize];
        let options = Options {
            agent: self.pair.underlay,
            agent_key: self.pair.exit.key().parse::<PublicKey>().unwrap(),
            identity: Identity::from_pem(identity.to_pem().as_bytes()).unwrap(),
            attack,
            mode,
            length: LENGTH,
            cpu: CPU,
            pace: (attack == Attack::Honest)
                .then_some(Pace { packets_per_second: 2_000.0, packet_bytes: 1_200 }),
            datagram: None,
            flows: 8,
        };
        let attacker = thread::spawn(move || peer::run(options));
        while !attacker.is_finished() {
            self.client.send();
            thread::sleep(Duration::from_millis(10));
        }
        let report = attacker.join().unwrap().unwrap();
        // The next attack finds the backlog empty.
        while self.mute.accept().is_ok() {}
        (report.sessions > 0 && report.packets > 0, format!("{report:?}"))
    }

    #[track_caller]
    fn assert_unharmed(&mut self, attack: Attack, mode: Mode) {
        let what = format!("{attack:?} {mode:?}");
        let established =
            self.pair.entry.samples().count("culvert_handshakes_total", &[("outcome", "established")]);
        assert_eq!(established, 1, "{what}: the innocent has its first session");
        let pid = self.pair.exit.process().pid();
        let status = fs::read_to_string(format!("/proc/{pid}/status")).unwrap();
        let resident = status.lines().find_map(|line| line.strip_prefix("VmRSS:")).unwrap();
        let kib: u64 = resident.trim().trim_end_matches(" kB").parse().unwrap();
        assert!(kib << 10 <= MOST_RESIDENT_BYTES, "{what}: {kib} KiB are resident");
        self.pair.accounts();
    }

    /// What came of the attackers is delivered, or dropped for a reason that is counted.
    #[track_caller]
    fn assert_accounted_for(&self) {
        for attack in Attack::value_variants() {
            self.pair.exit.wait_for("the attacker's accounts balance", |samples| {
                let account = |direction| samples.account(&name(*attack), direction);
                let accounts = ["uplink", "downlink"].map(account);
                if accounts.iter().all(|account| account.balances()) {
                    Ok(())
                } else {
                    Err(format!("{attack:?}: {accounts:?}"))
                }
            });
        }
    }
}

/// The name of the peer that attacks so.
fn name(attack: Attack) -> String {
    format!("hostile-{}", attack as usize)
}

/// Whether it is another attack in standard mode: one on streams or messages is not, and lanes there are none.
fn differs_in_standard_mode(attack: Attack) -> bool {
    attack.is_of_contents() || attack == Attack::ServicesChanged
}

#[test]
fn attacks_on_lanes_harm_nobody_else() {
    if !needs::met("hostile lanes", needs::AGENTS) {
        return;
    }
    let mut scene = Scene::new(false);
    for attack in Attack::value_variants() {
        scene.harm(*attack, Mode::Lanes);
    }
    scene.assert_accounted_for();
}

#[test]
fn attacks_in_standard_mode_harm_nobody_else() {
    if !needs::met("hostile standard mode", needs::AGENTS) {
        return;
    }
    let mut scene = Scene::new(false);
    for attack in Attack::value_variants().iter().filter(|attack| differs_in_standard_mode(**attack)) {
        scene.harm(*attack, Mode::Standard);
    }
    scene.assert_accounted_for();
}

#[test]
fn attacks_of_a_guest_harm_nobody_else() {
    if !needs::met("hostile guest", needs::AGENTS) {
        return;
    }
    let mut scene = Scene::new(true);
    for attack in [
        Attack::Openings,
        Attack::Mixed,
        Attack::TinyMessages,
        Attack::Unread,
        Attack::StreamAborts,
        Attack::StreamCredits,
        Attack::Held,
        Attack::Gaps,
        Attack::Symbols,
        Attack::Hellos,
    ] {
        scene.harm(attack, Mode::Lanes);
    }
}
