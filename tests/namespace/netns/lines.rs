//! Two lines between an entry and an exit, in a tunnel's packets: both carry, and either of them may be pulled.
//!
//! ```text
//!   entry, 192.0.2.2 ─── veth0 ─── 192.0.2.1 ───┐
//!   10.9.0.2                                     exit, 203.0.113.1, behind it 10.9.1.0/24
//!          198.51.100.2 ─── veth1 ─── 198.51.100.1
//! ```
//!
//! Both lines lead to the same address of the exit. Without the interface, the kernel would send everything by the first.

use std::{fs, thread, time::Duration};

use culvert_tests::{
    agent::Agent,
    needs::{self, Need},
    place::{Cable, Place},
    process::{Running, run, text},
};

const EXIT: &str = "203.0.113.1:4433";

/// Addresses behind the exit: enough for buckets on both lines.
const INSIDE: u8 = 16;

const MOST: Duration = Duration::from_secs(60);

struct Bed {
    entry: Agent,
    exit: Agent,
    cable: Cable,
}

impl Bed {
    /// The agents run; the entry as `nobody`, whom the kernel lets bind a fresh socket to an interface.
    fn start() -> Self {
        Self::with("")
    }

    /// The same, where both ends say this of each other, too.
    fn with(peers: &str) -> Self {
        let cable = Cable::new();
        let [there, here] = cable.places();
        let name = |place: &Place| match place {
            Place::Namespace(name) => name.clone(),
            Place::Host => unreachable!("a cable is between namespaces"),
        };
        let (far, near) = (name(&there), name(&here));
        let ip = |place: &Place, words: &str| {
            let words: Vec<&str> = ["ip"].into_iter().chain(words.split(' ')).collect();
            place.tell(&words);
        };
        ip(&Place::Namespace(far), &format!("link add veth1 type veth peer name veth1 netns {near}"));
        for (place, address) in [(&there, "198.51.100.1/24"), (&here, "198.51.100.2/24")] {
            ip(place, &format!("addr add {address} dev veth1"));
            ip(place, "link set veth1 up");
        }
        ip(&there, "addr add 203.0.113.1/32 dev lo");
        (1..=INSIDE).for_each(|last| ip(&there, &format!("addr add 10.9.1.{last}/32 dev lo")));
        ip(&here, "route add default via 192.0.2.1 dev veth0 metric 100");
        ip(&here, "route add default via 198.51.100.1 dev veth1 metric 200");

        let (mut entry, mut exit) = (Agent::new("entry", &here), Agent::new("exit", &there));
        exit.configure(&format!(
            "transport.listen = [\"{EXIT}\"]\n[[peer]]\nname = \"entry\"\npublic_key = \"{}\"\nallowed_ips = [\"10.9.0.2/32\"]\n\
             {peers}\n[tun]\naddress = [\"10.9.0.1/24\"]\n",
            entry.key()
        ));
        let line =
            |number| format!("[[transport.uplink]]\nname = \"line{number}\"\ninterface = \"veth{number}\"\n");
        entry.configure(&format!(
            "[[peer]]\nname = \"exit\"\npublic_key = \"{}\"\nendpoints = [\"{EXIT}\"]\n\
             allowed_ips = [\"10.9.0.1/32\", \"10.9.1.0/24\"]\n{peers}\n[tun]\naddress = [\"10.9.0.2/24\"]\n{}{}",
            exit.key(),
            line(0),
            line(1)
        ));
        exit.start();
        entry.unprivileged();
        entry.start();
        let bed = Self { entry, exit, cable };
        bed.wait_for_lanes();
        bed
    }

    /// Waits until there are lanes on both lines: as many as this session wants.
    fn wait_for_lanes(&self) {
        for agent in [&self.entry, &self.exit] {
            agent.wait_for("lanes on both lines", |samples| {
                let [wanted, up] =
                    ["culvert_peer_lanes_wanted", "culvert_peer_lanes"].map(|name| samples.count(name, &[]));
                (wanted >= 2 && up == wanted)
                    .then_some(())
                    .ok_or_else(|| format!("{up} of {wanted} lanes are up"))
            });
        }
    }

    /// Pings each address behind the exit 50 times a second for `seconds`, with something done after one; the most answers that one
    /// lacks.
    fn ping_while(&self, seconds: u32, what: impl FnOnce()) -> u64 {
        let here = self.entry.place();
        let count = (seconds * 50).to_string();
        let pings = (1..=INSIDE).map(|last| {
            let mut command = here.command("ping");
            command.args(["-q", "-i", "0.02", "-c", &count, "-W", "1", &format!("10.9.1.{last}")]);
            command
        });
        let pings: Vec<_> =
            pings.map(|mut command| thread::spawn(move || text(&run(&mut command, MOST).stdout))).collect();
        thread::sleep(Duration::from_secs(1));
        what();
        let lost = pings.into_iter().map(|ping| {
            let said = ping.join().unwrap();
            let received =
                said.split(", ").nth(1).and_then(|part| part.split(' ').next()?.parse::<u64>().ok());
            u64::from(seconds * 50) - received.unwrap_or_else(|| panic!("{said}"))
        });
        lost.max().unwrap()
    }

    /// Packets that the entry has sent on each line.
    fn sent(&self) -> [u64; 2] {
        self.entry.place().enter(|| {
            [0, 1].map(|line| {
                // Of the thread that is here.
                let table = fs::read_to_string("/proc/thread-self/net/dev").unwrap();
                let row =
                    table.lines().find_map(|row| row.trim().strip_prefix(&format!("veth{line}:"))).unwrap();
                row.split_whitespace().nth(9).unwrap().parse::<u64>().unwrap()
            })
        })
    }

    fn ip(&self, at_exit: bool, words: &[&str]) {
        let [there, here] = self.cable.places();
        (if at_exit { there } else { here }).tell(words);
    }
}

#[test]
fn pings_pass_over_both_lines_and_go_on_when_one_is_pulled() {
    let test = "two lines";
    if !needs::met(test, needs::NETNS) || !needs::met(test, &[Need::Tun, Need::Tool("ping", "iputils-ping")])
    {
        return;
    }
    let mut bed = Bed::start();
    let before = bed.sent();
    assert!(bed.ping_while(2, || ()) <= 1, "nothing is lost on two good lines");
    let after = bed.sent();
    for line in 0..2 {
        assert!(after[line] - before[line] > 100, "{before:?}, then {after:?}");
    }
    for (line, at_exit) in [("veth1", false), ("veth0", true)] {
        // At its far end, the near one notices no more than that the cable is out.
        let lost = bed.ping_while(4, || bed.ip(at_exit, &["ip", "link", "set", line, "down"]));
        println!("{line} pulled: {lost} of 200 pings lost");
        assert!(lost <= 25, "{lost} pings, 20 ms apart, on the line that was pulled");
        bed.ip(at_exit, &["ip", "link", "set", line, "up"]);
        if line == "veth0" {
            // The kernel of the end whose interface goes down forgets the routes over it.
            assert!(at_exit);
        } else {
            bed.ip(
                false,
                &["ip", "route", "add", "default", "via", "198.51.100.1", "dev", "veth1", "metric", "200"],
            );
        }
        bed.wait_for_lanes();
    }
    for agent in [&mut bed.entry, &mut bed.exit] {
        assert!(Running::ended(agent.process()).is_none());
    }
}

#[test]
fn pings_of_a_call_lose_nothing_when_a_line_is_pulled() {
    let test = "copies on two lines";
    if !needs::met(test, needs::NETNS) || !needs::met(test, &[Need::Tun, Need::Tool("ping", "iputils-ping")])
    {
        return;
    }
    let mut bed = Bed::with("redundant = { dscp = [46] }");
    // At either end, so that once the kernel says so and once it does not; of addresses on both lines.
    for (line, at_exit) in [("veth1", false), ("veth1", true)] {
        let here = bed.entry.place();
        let pings: Vec<_> = (1..=INSIDE / 2)
            .map(|last| {
                let mut command = here.command("ping");
                command.args([
                    "-q",
                    "-Q",
                    "0xb8",
                    "-i",
                    "0.01",
                    "-c",
                    "200",
                    "-W",
                    "1",
                    &format!("10.9.1.{last}"),
                ]);
                thread::spawn(move || text(&run(&mut command, MOST).stdout))
            })
            .collect();
        thread::sleep(Duration::from_secs(1));
        bed.ip(at_exit, &["ip", "link", "set", line, "down"]);
        for ping in pings {
            let said = ping.join().unwrap();
            assert!(
                said.contains("200 packets transmitted, 200 received"),
                "{line}, at exit {at_exit}: {said}"
            );
            assert!(!said.contains("duplicates"), "{said}");
        }
        bed.ip(at_exit, &["ip", "link", "set", line, "up"]);
        if !at_exit {
            bed.ip(
                false,
                &["ip", "route", "add", "default", "via", "198.51.100.1", "dev", "veth1", "metric", "200"],
            );
        }
        bed.wait_for_lanes();
    }
    let copies = |agent: &Agent, what: &str, peer: &str| {
        agent.samples().count(&format!("culvert_copies_{what}_total"), &[("peer", peer)])
    };
    for (agent, peer) in [(&bed.entry, "exit"), (&bed.exit, "entry")] {
        // Of 3,200 pings half come before the line is pulled, but for the time that its start takes.
        let counts = ["sent", "duplicate"].map(|what| copies(agent, what, peer));
        assert!(counts.iter().all(|count| *count > 1_000), "{counts:?}");
    }
    for agent in [&mut bed.entry, &mut bed.exit] {
        assert!(Running::ended(agent.process()).is_none());
    }
}
