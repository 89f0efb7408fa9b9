//! A hostile peer at a real agent, each attack for a moment: the agent lives, an innocent peer keeps its session, memory stays bounded, and
//! every datagram is accounted for. What it costs others is measured by command: `tests/perf/hostile`.
//!
//! | question | file |
//! |---|---|
//! | what a hostile peer does | `peer/` |
//! | the same peer as a program | `program.rs` |
//! | what it does where it has a quota, a map, or ends what is recorded | `counted.rs` |
//! | what comes to a port that expects PROXY headers | `proxy.rs` |

#![expect(clippy::unwrap_used, reason = "a test that cannot go on has failed")]

mod counted;
mod peer;
mod proxy;

use std::{
    fs,
    net::{Ipv4Addr, SocketAddr, TcpListener, UdpSocket},
    os::unix::fs::PermissionsExt,
    path::Path,
    thread,
    time::Duration,
};

use clap::ValueEnum;
use culvert_tests::{
    client::Client,
    http::Samples,
    needs::{self, Need},
    pair::{Pair, Plan},
    place::{Cable, Place},
    ports,
    upstream::Echo,
};
use data_encoding::BASE64URL_NOPAD;
use gate::identity::{Identity, PublicKey};

use tempfile::TempDir;

use peer::{Attack, Mode, Options, Pace, rotations::KEYS};

/// How long an attack lasts.
const LENGTH: Duration = Duration::from_secs(1);

/// How long an attack lasts whose payloads are given up after two seconds.
const LENGTH_OF_HELD: Duration = Duration::from_secs(3);

/// How often a machine that stands still is tried again.
const ATTEMPTS: usize = 5;

/// Percent of a processor that the attacker has.
const CPU: u32 = 20;

/// What the exit may grow to: a multiple of what all ceilings of these short attacks allow.
const MOST_RESIDENT_BYTES: u64 = 512 << 20;

/// Who the hostile peers are to the exit, and what it has.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Setting {
    /// Peers of its configuration.
    Listed,
    /// Guests of open mode.
    Guests,
    /// Peers of its configuration, with inner addresses of its TUN device.
    Device,
    /// The same, whose network has other addresses here than there.
    Mapped,
    /// Peers of its configuration, each with a quota.
    Quota,
    /// Peers of its configuration, and what their flows carry is recorded in a folder of its own.
    Recorded,
}

/// An innocent entry, and an exit that a hostile peer may connect to.
struct Scene {
    pair: Pair,
    client: Client,
    /// A key for each attack: a peer that broke the protocol has to wait before it may connect again.
    identities: Vec<Identity>,
    /// Where the exit dials the peer that waits for it.
    dialled: SocketAddr,
    _keys: TempDir,
    _echo: Echo,
    _sink: UdpSocket,
    /// Its backlog takes the connections of an attack, which nobody reads.
    mute: TcpListener,
}

impl Scene {
    #[track_caller]
    fn new(place: &Place, setting: Setting) -> Self {
        let (echo, keys) = (Echo::new(), preshared_keys());
        let identities: Vec<_> =
            Attack::value_variants().iter().map(|_| Identity::generate().unwrap()).collect();
        let [sink, mute, dialled] = [(); 3].map(|()| SocketAddr::from((Ipv4Addr::LOCALHOST, ports::free())));
        let ingress: SocketAddr = (Ipv4Addr::LOCALHOST, ports::free()).into();
        let peers = || -> String {
            let peers = Attack::value_variants().iter().zip(&identities).map(|(attack, identity)| {
                let (name, key) = (name(*attack), identity.public_key());
                let more = peer_lines(*attack, setting, keys.path(), dialled);
                format!(
                    "[[peer]]\nname = \"{name}\"\npublic_key = \"{key}\"\nservices = [\"sink\", \"mute\"]\n{more}"
                )
            });
            peers.collect()
        };
        let hostile = match setting {
            Setting::Guests => "[access]\nmode = \"open\"\nservices = [\"sink\", \"mute\"]\n".to_owned(),
            Setting::Listed | Setting::Quota => peers(),
            Setting::Recorded => format!("{}{}", counted::RECORDS, peers()),
            Setting::Device | Setting::Mapped => format!(
                "[tun]\naddress = [\"10.9.0.1/24\"]\nrouting = \"kernel\"\nmulticast = true\n{}",
                peers()
            ),
        };
        let pair = Plan::default()
            .at([place.clone(), place.clone()])
            .workers([2, 2])
            .service("echo", echo.address, "")
            .forbidden_service("sink", sink, "idle = \"2s\"\noversize = \"fragment\"")
            .forbidden_service("mute", mute, "protocol = \"tcp\"")
            .exit(&hostile)
            .forward("echo", ingress)
            .prepare();
        let mut pair = pair;
        if setting == Setting::Recorded {
            fs::create_dir(pair.exit.folder().join("records")).unwrap();
        }
        pair.exit.start();
        pair.entry.start();
        pair.wait_for_connection();
        let mut client = Client::new(0, ingress);
        client.converse(3);
        let (_sink, mute) = (UdpSocket::bind(sink).unwrap(), TcpListener::bind(mute).unwrap());
        mute.set_nonblocking(true).unwrap();
        Self { pair, client, identities, mute, dialled, _keys: keys, _echo: echo, _sink }
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
            length: if matches!(attack, Attack::Held | Attack::HeldPackets) {
                LENGTH_OF_HELD
            } else {
                LENGTH
            },
            cpu: CPU,
            pace: (attack == Attack::Honest)
                .then_some(Pace { packets_per_second: 2_000.0, packet_bytes: 1_200 }),
            datagram: None,
            flows: 8,
            inner: inner(attack),
            listen: Some(self.dialled),
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

    /// Payloads of the attacker that were delivered: IP packets to the device.
    fn written(&self, attack: Attack) -> u64 {
        let labels = [("peer", &*name(attack)), ("direction", "downlink")];
        self.pair.exit.samples().count("culvert_peer_datagrams_delivered_total", &labels)
    }

    /// The attack came to where it aims.
    #[track_caller]
    fn assert_came(&self, attack: Attack) {
        self.pair.exit.wait_for("the attack is seen", |samples| match trace(attack, samples) {
            Some(0) => Err(format!("{attack:?} has left no trace")),
            Some(_) | None => Ok(()),
        });
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

/// Its address inside.
fn inner(attack: Attack) -> Ipv4Addr {
    Ipv4Addr::new(10, 9, 0, 100 + attack as u8)
}

/// The files with the preshared keys.
fn preshared_keys() -> TempDir {
    let folder = TempDir::new().unwrap();
    for (place, key) in KEYS.iter().enumerate() {
        let file = folder.path().join(place.to_string());
        fs::write(&file, BASE64URL_NOPAD.encode(key)).unwrap();
        fs::set_permissions(&file, fs::Permissions::from_mode(0o600)).unwrap();
    }
    folder
}

/// What the exit says of the peer with this attack beside its key and services.
fn peer_lines(attack: Attack, setting: Setting, keys: &Path, dialled: SocketAddr) -> String {
    let keys = keys.display();
    let mut lines = String::new();
    if attack == Attack::Reports {
        lines += "rate = \"auto\"\n";
    }
    if attack == Attack::PresharedKeys {
        lines += &format!("preshared_key_file = [\"{keys}/0\", \"{keys}/1\"]\n");
    }
    if attack == Attack::Leaving {
        lines += &format!("endpoints = [\"{dialled}\"]\n");
    }
    match setting {
        Setting::Device => lines += &format!("address = [\"{}\"]\n", inner(attack)),
        Setting::Mapped => lines += &counted::mapped(inner(attack)),
        Setting::Quota => lines += counted::QUOTA,
        Setting::Listed | Setting::Guests | Setting::Recorded => {}
    }
    lines
}

/// A counter of the exit by which an attack on lanes by a listed peer shows that it came to where it aims.
fn trace(attack: Attack, samples: &Samples) -> Option<u64> {
    let count = |name, labels: &[(&str, &str)]| Some(samples.count(name, labels));
    if attack == Attack::Reports {
        // Those that are too many are looked at by nobody.
        let kinds =
            ["taken", "ignored"].map(|kind| samples.count("culvert_reports_total", &[("kind", kind)]));
        Some(kinds[0].min(kinds[1]))
    } else if attack == Attack::Joins {
        count("culvert_stream_connections_opened_total", &[])
    } else if attack == Attack::PresharedKeys {
        count("culvert_preshared_key_refusals_total", &[("reason", "different")])
    } else if attack == Attack::Leaving {
        count("culvert_sessions_suspected_total", &[("reason", "leaving")])
    } else if attack == Attack::Lines {
        let count = |name| samples.count(name, &[("peer", &*crate::name(attack))]);
        let arrivals =
            ["culvert_copies_first_total", "culvert_copies_duplicate_total", "culvert_copies_old_total"];
        Some(arrivals.map(count).into_iter().min().unwrap_or(0))
    } else if attack == Attack::HalfHellos {
        count("culvert_gate_incomplete_expired_total", &[])
    } else {
        None
    }
}

/// Whether it is another attack in standard mode: one on streams or messages is not, and lanes there are none.
fn differs_in_standard_mode(attack: Attack) -> bool {
    attack.is_of_contents() || matches!(attack, Attack::ServicesChanged | Attack::Farewells)
}

#[test]
fn attacks_on_lanes_harm_nobody_else() {
    if !needs::met("hostile lanes", needs::AGENTS) {
        return;
    }
    let mut scene = Scene::new(&Place::Host, Setting::Listed);
    for attack in Attack::value_variants() {
        scene.harm(*attack, Mode::Lanes);
        scene.assert_came(*attack);
    }
    scene.assert_accounted_for();
}

#[test]
fn attacks_in_standard_mode_harm_nobody_else() {
    if !needs::met("hostile standard mode", needs::AGENTS) {
        return;
    }
    let mut scene = Scene::new(&Place::Host, Setting::Listed);
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
    let mut scene = Scene::new(&Place::Host, Setting::Guests);
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
        Attack::Reports,
        Attack::Packets,
        Attack::Inside,
        Attack::HeldPackets,
        Attack::Joins,
        Attack::PresharedKeys,
        Attack::HalfHellos,
        Attack::WrongShares,
        Attack::Farewells,
        Attack::Lines,
        Attack::Hellos,
    ] {
        scene.harm(attack, Mode::Lanes);
    }
}

#[test]
fn attacks_with_ip_packets_at_a_device_harm_nobody_else() {
    attack_a_device("hostile IP packets", Setting::Device);
}

/// Sends hostile IP packets to an exit with a TUN device.
#[track_caller]
fn attack_a_device(test: &str, setting: Setting) {
    const NEEDS: [Need; 4] =
        [Need::Root, Need::Tun, Need::Tool("ip", "iproute2"), Need::Tool("setpriv", "util-linux")];
    if !needs::met(test, &[&NEEDS[..], needs::AGENTS].concat()) {
        return;
    }
    let cable = Cable::new();
    let [place, _] = cable.places();
    place.enter(|| {
        let mut scene = Scene::new(&place, setting);
        for attack in [Attack::Packets, Attack::Inside, Attack::HeldPackets] {
            for mode in [Mode::Lanes, Mode::Standard] {
                let before = scene.written(attack);
                scene.harm(attack, mode);
                assert!(scene.written(attack) > before, "{attack:?} {mode:?}: the device got none");
            }
        }
        scene.assert_accounted_for();
        // What the kernel refuses to take was joined wrongly, or has a sum or a length that a map has made wrong.
        let refused =
            scene.pair.exit.samples().count("culvert_tun_errors_total", &[("direction", "downlink")]);
        assert_eq!(refused, 0, "packets that the device did not take");
        assert!(scene.pair.exit.samples().dropped("spoofed") > 0, "some had a source of somebody else");
    });
}
