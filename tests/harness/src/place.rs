//! Where a process runs, and a socket is: on this host, or in a network namespace that the test made.

use std::{
    ffi::OsStr,
    fs::{self, File},
    process::{self, Command},
    sync::atomic::{AtomicU32, Ordering},
    thread,
    time::Duration,
};

use nix::sched::{CloneFlags, setns};

use crate::{
    needs,
    process::{run, text},
};

/// A network.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Place {
    /// The one in which the tests run.
    Host,
    /// A network namespace, by name.
    Namespace(String),
}

impl Place {
    /// A command that runs here, and that the kernel kills when the thread that starts it ends.
    #[must_use]
    pub fn command(&self, program: impl AsRef<OsStr>) -> Command {
        let mut command = match self {
            Self::Host => Command::new("setpriv"),
            Self::Namespace(name) => {
                let mut command = Command::new("ip");
                command.args(["netns", "exec", name, "setpriv"]);
                command
            }
        };
        command.args(["--pdeathsig", "KILL", "--"]).arg(program);
        command
    }

    /// Runs a command here to its end, and returns what it printed.
    ///
    /// # Panics
    /// When it fails.
    #[track_caller]
    pub fn tell(&self, words: &[&str]) -> String {
        let [program, args @ ..] = words else { panic!("no program") };
        let program = needs::tool(program).unwrap_or_else(|| panic!("{program} is missing"));
        let output = run(self.command(program).args(args), Duration::from_secs(60));
        assert!(output.status.success(), "{words:?}: {} {}", text(&output.stdout), text(&output.stderr));
        text(&output.stdout)
    }

    /// Sets a kernel parameter here: `net.ipv4.ip_forward`.
    ///
    /// # Panics
    /// When the kernel refuses, and on this host, whose parameters are not the test's business.
    #[track_caller]
    pub fn sysctl(&self, name: &str, value: &str) {
        assert_ne!(*self, Self::Host, "the host's parameters are not the test's business");
        let file = format!("/proc/sys/{}", name.replace('.', "/"));
        let written = self.enter(|| fs::write(&file, value));
        written.unwrap_or_else(|error| panic!("{file}: {error}"));
    }

    /// Runs `make` on a thread that is here: sockets that it opens stay here, whichever thread uses them later.
    ///
    /// # Panics
    /// When `make` does, or the namespace is gone.
    #[track_caller]
    pub fn enter<T: Send>(&self, make: impl FnOnce() -> T + Send) -> T {
        let inside = || {
            if let Self::Namespace(name) = self {
                let file = File::open(format!("/run/netns/{name}")).expect("the test made it");
                setns(file, CloneFlags::CLONE_NEWNET).expect("the test runs as root");
            }
            make()
        };
        thread::scope(|scope| scope.spawn(inside).join()).expect("it has said why")
    }

    /// The kernel's UDP counters here: datagrams dropped because a receive buffer was full.
    ///
    /// # Panics
    /// When the kernel does not say.
    #[must_use]
    pub fn udp_receive_drops(&self) -> u64 {
        let read = |file: &str| match self {
            Self::Host => fs::read_to_string(file).unwrap_or_default(),
            Self::Namespace(_) => text(&run(self.command("cat").arg(file), Duration::from_secs(10)).stdout),
        };
        let snmp = read("/proc/net/snmp");
        let mut lines = snmp.lines().filter_map(|line| line.strip_prefix("Udp: "));
        let (names, values) = (lines.next().expect("names"), lines.next().expect("values"));
        let v4 = names.split(' ').zip(values.split(' ')).find(|(name, _)| *name == "RcvbufErrors");
        let v6 = read("/proc/net/snmp6");
        let v6 = v6.lines().find_map(|line| line.strip_prefix("Udp6RcvbufErrors"));
        let number = |text: &str| text.trim().parse::<u64>().expect("a number");
        v4.map_or(0, |(_, value)| number(value)) + v6.map_or(0, number)
    }

    /// Messages that the kernel could not give to netlink sockets here, because they were full.
    ///
    /// # Panics
    /// When the kernel does not say.
    #[must_use]
    pub fn netlink_overruns(&self) -> u64 {
        // Of the thread that is here.
        let read = || fs::read_to_string("/proc/thread-self/net/netlink").expect("the kernel has it");
        let table = self.enter(read);
        let mut lines = table.lines().map(|line| line.split_whitespace().collect::<Vec<_>>());
        let titles = lines.next().expect("titles");
        let column = titles.iter().position(|title| *title == "Drops").expect("a column");
        lines.map(|line| line[column].parse::<u64>().expect("a number")).sum()
    }

    /// Buffers that the kernel has dropped here: sockets that were full or not there, no route, too large, links that were
    /// down. Each held one datagram or more.
    ///
    /// # Panics
    /// When the kernel does not say.
    #[must_use]
    pub fn kernel_drops(&self) -> u64 {
        // Those of the thread that is here, not those of the process.
        let read =
            |file| fs::read_to_string(format!("/proc/thread-self/net/{file}")).expect("the kernel has it");
        let [snmp, extended, snmp6, devices] = self.enter(|| ["snmp", "netstat", "snmp6", "dev"].map(read));
        let number = |text: &str| text.parse::<u64>().expect("a number");
        let mut sum = 0;
        let lines: Vec<&str> = snmp.lines().chain(extended.lines()).collect();
        for pair in lines.chunks(2) {
            let [names, values] = [pair[0], pair[1]].map(|line| line.split(' '));
            let protocol = pair[0].split(':').next().unwrap_or_default();
            let counts = names.zip(values).skip(1).filter(|(name, _)| COUNTERS.contains(&(protocol, *name)));
            sum += counts.map(|(_, value)| number(value)).sum::<u64>();
        }
        for line in snmp6.lines() {
            let mut words = line.split_whitespace();
            if let (Some(name), Some(value)) = (words.next(), words.next()) {
                let known = |(protocol, counter): &(&str, &str)| {
                    name.strip_prefix(protocol) == Some(&format!("6{counter}"))
                };
                sum += if COUNTERS.iter().any(known) { number(value) } else { 0 };
            }
        }
        for line in devices.lines() {
            let Some((_, counts)) = line.split_once(':') else { continue };
            let counts: Vec<&str> = counts.split_whitespace().collect();
            // Received and dropped, sent and dropped, no carrier; those of the headings have no colon.
            sum += [3, 11, 14].iter().map(|column| number(counts[*column])).sum::<u64>();
        }
        sum
    }
}

/// The kernel's counters of what it has dropped, of IPv4; those of IPv6 have the same names after a 6.
const COUNTERS: [(&str, &str); 9] = [
    ("Ip", "InAddrErrors"),
    ("Ip", "InDiscards"),
    ("Ip", "InNoRoutes"),
    ("Ip", "InTooBigErrors"),
    ("Ip", "OutDiscards"),
    ("Ip", "OutNoRoutes"),
    ("Ip", "FragFails"),
    ("IpExt", "InNoRoutes"),
    ("Udp", "RcvbufErrors"),
];

/// Two network namespaces with a cable between them; dropping it removes both.
#[derive(Debug)]
pub struct Cable {
    names: [String; 2],
}

impl Cable {
    /// The addresses of the first end.
    pub const FIRST: [&str; 2] = ["192.0.2.1", "2001:db8::1"];
    /// The addresses of the second end.
    pub const SECOND: [&str; 2] = ["192.0.2.2", "2001:db8::2"];

    /// Makes them.
    ///
    /// # Panics
    /// When `ip` fails.
    #[must_use]
    pub fn new() -> Self {
        static NEXT: AtomicU32 = AtomicU32::new(0);
        let number = NEXT.fetch_add(1, Ordering::Relaxed);
        let name = |end| format!("culvert-{}-{number}{end}", process::id());
        // The guard is there before the first namespace is, so that a failure on the way leaves none behind.
        let cable = Self { names: [name('a'), name('b')] };
        let [a, b] = &cable.names;
        ip(&["netns", "add", a]);
        ip(&["netns", "add", b]);
        ip(&["link", "add", "veth0", "netns", a, "type", "veth", "peer", "name", "veth0", "netns", b]);
        for (name, addresses) in cable.names.iter().zip([Self::FIRST, Self::SECOND]) {
            ip(&["-n", name, "link", "set", "lo", "up"]);
            ip(&["-n", name, "link", "set", "veth0", "up"]);
            let [v4, v6] = addresses;
            ip(&["-n", name, "addr", "add", &format!("{v4}/24"), "dev", "veth0"]);
            // Without duplicate address detection, during which the address cannot be bound.
            ip(&["-n", name, "addr", "add", &format!("{v6}/64"), "dev", "veth0", "nodad"]);
        }
        cable
    }

    /// Has both ends do what a network card would: what was sent as one buffer crosses as single packets, and the
    /// receiver's GRO joins them again.
    ///
    /// # Panics
    /// When `ethtool` fails; the test must have asked [`needs::met`].
    pub fn cut_and_join(&self) {
        for place in self.places() {
            let mut command = place.command(needs::tool("ethtool").expect("asked for"));
            // Without TSO, because a veth leaves what comes from an end with it to no GRO.
            command.args(["-K", "veth0", "gro", "on", "tso", "off", "tx-udp-segmentation", "off"]);
            let output = run(&mut command, Duration::from_secs(10));
            assert!(output.status.success(), "{command:?}: {}", text(&output.stderr));
        }
    }

    /// The first namespace, then the second.
    #[must_use]
    pub fn places(&self) -> [Place; 2] {
        self.names.clone().map(Place::Namespace)
    }
}

impl Default for Cable {
    fn default() -> Self {
        Self::new()
    }
}

impl Drop for Cable {
    fn drop(&mut self) {
        for name in &self.names {
            // Fails if `new` did not get as far as to make it.
            drop(Command::new("ip").args(["netns", "del", name]).output());
        }
    }
}

#[track_caller]
fn ip(args: &[&str]) {
    let output = run(Command::new("ip").args(args), Duration::from_secs(10));
    assert!(output.status.success(), "ip {}: {}", args.join(" "), text(&output.stderr));
}
