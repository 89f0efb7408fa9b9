//! What a test needs of the machine. Where that is missing, it is skipped in so many words; for root and in CI, where
//! everything can be installed, it fails instead.

use std::{
    env,
    fs::{self, OpenOptions},
    io::{self, Write},
    path::{Path, PathBuf},
    process::{Command, Stdio},
    sync::OnceLock,
};

/// Something that not every machine has.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Need {
    /// A user who may make network namespaces.
    Root,
    /// The same, because of this.
    RootFor(&'static str),
    /// A program in `PATH` or in `/usr/sbin`, and the Debian package that has it.
    Tool(&'static str, &'static str),
    /// A file, and the Debian package that has it.
    File(&'static str, &'static str),
    /// Prometheus' own parser, for Python.
    PrometheusParser,
    /// Socket buffers of 4 MiB: iperf3's `-w 4M` fails without.
    SocketBuffers,
    /// The address `::1`.
    Ipv6,
    /// The kernel's TUN devices.
    Tun,
}

/// What two agents and their metrics need.
pub const AGENTS: &[Need] = &[Need::Tool("setpriv", "util-linux"), Need::PrometheusParser];

/// What iperf3 between two agents needs.
pub const IPERF: &[Need] =
    &[Need::Tool("setpriv", "util-linux"), Need::PrometheusParser, IPERF3, Need::SocketBuffers];

/// What tests in network namespaces need.
pub const NETNS: &[Need] = &[
    Need::Root,
    Need::Tool("setpriv", "util-linux"),
    Need::Tool("ip", "iproute2"),
    Need::PrometheusParser,
    IPERF3,
    Need::SocketBuffers,
];

/// What sites with a tunnel between them need, besides what [`NETNS`] says.
pub const TUNNEL: &[Need] = &[
    Need::Tun,
    Need::Tool("ping", "iputils-ping"),
    Need::Tool("tracepath", "iputils-tracepath"),
    Need::Tool("tcpdump", "tcpdump"),
    Need::Tool("tshark", "tshark"),
    Need::Tool("ethtool", "ethtool"),
    Need::Tool("nft", "nftables"),
];

const IPERF3: Need = Need::Tool("iperf3", "iperf3");

/// Whether all of `needs` are there; if not, the test is listed as skipped and shall return.
///
/// # Panics
/// Instead of skipping, for root and in CI.
#[must_use]
#[track_caller]
pub fn met(test: &str, needs: &[Need]) -> bool {
    let missing: Vec<String> = needs.iter().filter_map(|need| need.missing()).collect();
    if missing.is_empty() {
        return true;
    }
    self::missing(test, &missing.join(", "));
    false
}

/// Lists the test as skipped, because `why` is missing; it shall return.
///
/// # Panics
/// Instead of skipping, for root and in CI.
#[track_caller]
pub fn missing(test: &str, why: &str) {
    assert!(!is_root() && env::var_os("CI").is_none(), "{test} needs {why}");
    skipped(test, why);
}

/// Lists the test as skipped, for root and in CI too: `why` cannot be had here.
pub fn skipped(test: &str, why: &str) {
    let line = format!("SKIPPED: {test}: needs {why}\n");
    // Not `eprintln`, whose output is captured when a test passes.
    io::stderr().write_all(line.as_bytes()).expect("standard error is open");
    if let Some(list) = env::var_os("CULVERT_TEST_SKIPPED") {
        let file = OpenOptions::new().append(true).create(true).open(list);
        file.and_then(|mut file| file.write_all(line.as_bytes()))
            .expect("the list of skipped tests is writable");
    }
}

/// Whether this user is root.
#[must_use]
pub fn is_root() -> bool {
    let status = fs::read_to_string("/proc/self/status").unwrap_or_default();
    status
        .lines()
        .any(|line| line.strip_prefix("Uid:").and_then(|ids| ids.split_whitespace().nth(1)) == Some("0"))
}

impl Need {
    /// What to tell whoever runs the tests, if it is missing.
    fn missing(self) -> Option<String> {
        let (met, remedy) = match self {
            Self::Root => (is_root(), "root".to_owned()),
            Self::RootFor(why) => (is_root(), format!("root: {why}")),
            Self::Tool(name, package) => {
                (tool(name).is_some(), format!("{name} (apt-get install {package})"))
            }
            Self::File(path, package) => {
                (Path::new(path).exists(), format!("{path} (apt-get install {package})"))
            }
            Self::PrometheusParser => (
                python().is_some(),
                "python3 -m prometheus_client (apt-get install python3-prometheus-client)".to_owned(),
            ),
            Self::SocketBuffers => (
                ["rmem_max", "wmem_max"].into_iter().all(|name| limit(name) >= 4 << 20),
                "socket buffers of 4 MiB (sysctl -w net.core.rmem_max=4194304 net.core.wmem_max=4194304)"
                    .to_owned(),
            ),
            Self::Ipv6 => (std::net::UdpSocket::bind("[::1]:0").is_ok(), "the address ::1".to_owned()),
            Self::Tun => (Path::new("/dev/net/tun").exists(), "/dev/net/tun (modprobe tun)".to_owned()),
        };
        (!met).then_some(remedy)
    }
}

fn limit(name: &str) -> u64 {
    let text = fs::read_to_string(Path::new("/proc/sys/net/core").join(name)).unwrap_or_default();
    text.trim().parse().unwrap_or(0)
}

/// Where a program is.
#[must_use]
pub fn tool(name: &str) -> Option<PathBuf> {
    let path = env::var_os("PATH").unwrap_or_default();
    let folders = env::split_paths(&path).chain([PathBuf::from("/usr/sbin"), PathBuf::from("/sbin")]);
    folders.map(|folder| folder.join(name)).find(|file| file.is_file())
}

/// A Python that has Prometheus' parser: the first in `PATH`, else Debian's.
#[must_use]
pub fn python() -> Option<&'static Path> {
    static FOUND: OnceLock<Option<PathBuf>> = OnceLock::new();
    let find = || {
        let candidates = [tool("python3"), Some(PathBuf::from("/usr/bin/python3"))];
        candidates.into_iter().flatten().find(|python| {
            let mut command = Command::new(python);
            command
                .args(["-c", "import prometheus_client.parser"])
                .stdin(Stdio::null())
                .stderr(Stdio::null());
            command.status().is_ok_and(|status| status.success())
        })
    };
    FOUND.get_or_init(find).as_deref()
}
