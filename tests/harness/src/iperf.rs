//! iperf3, and what became of each datagram between its client and its server.

use std::{
    fs::{self, File},
    io::{Read, Seek},
    net::SocketAddr,
    process::{Command, Stdio},
    time::Duration,
};

use serde_json::Value;
use tempfile::NamedTempFile;

use crate::{
    clock::{self, PATIENCE},
    http::Account,
    pair::Pair,
    place::Place,
    process::{Running, run, text},
};

/// A running `iperf3 -s`; dropping it kills it.
#[derive(Debug)]
pub struct Server {
    _process: Running,
}

/// Where its servers listen, unless a test says otherwise.
pub const PORT: u16 = 5201;

/// A client that runs beside something else; dropping it kills it.
#[derive(Debug)]
pub struct Client {
    process: Running,
    output: File,
}

/// What a UDP test transferred.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Udp {
    /// Parallel streams, each a UDP session of its own.
    pub streams: u64,
    /// Datagrams that the sender sent.
    pub sent: u64,
    /// Datagrams whose numbers the receiver missed.
    pub lost: u64,
    /// Datagrams that the receiver saw.
    pub received: u64,
}

/// What a TCP test transferred, in bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Tcp {
    /// Handed to the kernel by the sender.
    pub sent: u64,
    /// Read by the receiver.
    pub received: u64,
}

impl Server {
    /// Starts one at `place` and waits until it listens.
    ///
    /// # Panics
    /// When it does not.
    #[must_use]
    #[track_caller]
    pub fn start(place: &Place, address: SocketAddr) -> Self {
        let log = NamedTempFile::new().expect("the folder for temporary files is writable");
        let output = || Stdio::from(File::options().append(true).open(log.path()).expect("our own file"));
        let mut command = place.command("iperf3");
        command.args([
            "-s",
            "--forceflush",
            "-B",
            &address.ip().to_string(),
            "-p",
            &address.port().to_string(),
        ]);
        command.stdin(Stdio::null()).stdout(output()).stderr(output());
        let process = Running::start("iperf3 -s", &mut command);
        clock::until("iperf3 -s listens", PATIENCE, || {
            let text = fs::read_to_string(log.path()).unwrap_or_default();
            if text.contains("Server listening") { Ok(()) } else { Err(text) }
        });
        Self { _process: process }
    }
}

impl Client {
    /// Starts one at `place` with more options.
    ///
    /// # Panics
    /// When it cannot be started.
    #[must_use]
    #[track_caller]
    pub fn start(place: &Place, server: SocketAddr, args: &[&str]) -> Self {
        let output = tempfile::tempfile().expect("the folder for temporary files is writable");
        let mut command = command(place, server, args);
        let stdout = output.try_clone().expect("a descriptor is free");
        command.stdin(Stdio::null()).stdout(stdout).stderr(Stdio::null());
        Self { process: Running::start("iperf3 -c", &mut command), output }
    }

    /// Waits for its end, and returns its report: `intervals` of a second, and what is summed up at the `end`.
    ///
    /// # Panics
    /// When it does not end soon, or failed.
    #[must_use]
    #[track_caller]
    pub fn finish(mut self) -> Value {
        let status = self.process.wait(2 * PATIENCE);
        let report = self.report();
        let error = report["error"].as_str();
        assert!(status.success() && error.is_none(), "iperf3 -c: {error:?}");
        report
    }

    /// Ends it before its time, and returns the same; what is summed up is what its own end knows.
    ///
    /// # Panics
    /// When it has ended by itself, or does not end soon.
    #[must_use]
    #[track_caller]
    pub fn interrupt(mut self) -> Value {
        let ended = self.process.ended();
        assert_eq!(ended, None, "iperf3 -c has ended: {}", self.report()["error"]);
        self.process.signal("INT");
        self.process.wait(PATIENCE);
        self.report()
    }

    #[track_caller]
    fn report(&mut self) -> Value {
        let mut text = String::new();
        self.output.rewind().and_then(|()| self.output.read_to_string(&mut text)).expect("our own file");
        serde_json::from_str(&text).unwrap_or_else(|error| panic!("{error}: {text}"))
    }
}

/// Runs a UDP test of 3 s with 200 Mbit/s in datagrams of 1150 bytes, shared out among parallel streams.
///
/// # Panics
/// When iperf3 fails.
#[must_use]
#[track_caller]
pub fn udp(place: &Place, server: SocketAddr, streams: u32, reverse: bool) -> Udp {
    let (rate, count) = (format!("{}K", 200_000 / streams), streams.to_string());
    let args = ["-u", "-P", &count, "-b", &rate, "-l", "1150", "-w", "4M", "-t", "3"];
    let udp = Udp::of(&client(place, server, &args, reverse));
    assert_eq!(udp.streams, u64::from(streams));
    udp
}

impl Udp {
    /// What the part of a report says that sums up.
    ///
    /// # Panics
    /// When it is no UDP test's.
    #[must_use]
    #[track_caller]
    pub fn of(end: &Value) -> Self {
        let each = end["streams"].as_array().map(Vec::as_slice).unwrap_or_default();
        let sum = |key: &str| each.iter().map(|stream| number(&stream["udp"][key])).sum::<u64>();
        let (packets, lost) = (sum("packets"), sum("lost_packets"));
        let highest = number(&end["sum_received"]["packets"]);
        Self {
            streams: each.len() as u64,
            sent: number(&end["sum_sent"]["packets"]).max(packets),
            lost,
            received: highest.saturating_sub(lost),
        }
    }
}

/// Runs a TCP test of 2 s.
///
/// # Panics
/// When iperf3 fails.
#[must_use]
#[track_caller]
pub fn tcp(place: &Place, server: SocketAddr, reverse: bool) -> Tcp {
    let end = client(place, server, &["-t", "2"], reverse);
    Tcp { sent: number(&end["sum_sent"]["bytes"]), received: number(&end["sum_received"]["bytes"]) }
}

#[track_caller]
fn client(place: &Place, server: SocketAddr, args: &[&str], reverse: bool) -> Value {
    let mut command = command(place, server, args);
    if reverse {
        command.arg("-R");
    }
    let output = run(&mut command, Duration::from_secs(60));
    let (stdout, stderr) = (text(&output.stdout), text(&output.stderr));
    let mut result: Value = serde_json::from_str(&stdout)
        .unwrap_or_else(|error| panic!("{command:?}: {error}: {stdout} {stderr}"));
    let error = result["error"].as_str();
    assert!(output.status.success() && error.is_none(), "{command:?}: {error:?}: {stderr}");
    result["end"].take()
}

fn command(place: &Place, server: SocketAddr, args: &[&str]) -> Command {
    let mut command = place.command("iperf3");
    command.args(["-c", &server.ip().to_string(), "-p", &server.port().to_string(), "-J"]).args(args);
    command
}

#[track_caller]
fn number(value: &Value) -> u64 {
    value.as_u64().unwrap_or_else(|| panic!("iperf3 wrote {value} for a count"))
}

/// The kernel's counts of what it dropped between two agents, taken before a test.
///
/// The kernel counts buffers, each of which may hold many datagrams: a loss must have such a count at its hop, but
/// need not equal it.
#[derive(Clone, Copy, Debug)]
pub struct Books {
    accounts: [Account; 4],
    kernel: Kernel,
}

#[derive(Clone, Copy, Debug)]
struct Kernel {
    /// At the entry's `[[udp]]`.
    ingress: u64,
    /// At both agents' QUIC sockets.
    quic: u64,
    /// At the exit's sockets to its services.
    upstream: u64,
    /// At any socket where the client and the server run, the agents' included.
    anywhere: u64,
}

impl Books {
    /// Opens the books of a pair.
    #[must_use]
    #[track_caller]
    pub fn open(pair: &Pair) -> Self {
        let drops = |socket| pair.sum("culvert_socket_kernel_drops_total", &[("socket", socket)]);
        let mut places = vec![pair.entry.place(), pair.exit.place()];
        places.dedup();
        let kernel = Kernel {
            ingress: drops("ingress"),
            quic: drops("quic_listen") + drops("quic_dial"),
            upstream: drops("upstream"),
            anywhere: places.into_iter().map(Place::udp_receive_drops).sum(),
        };
        Self { accounts: pair.accounts(), kernel }
    }

    /// Checks that each datagram of `test` was received, or that a counter of the hop where it is missing says why.
    ///
    /// # Panics
    /// When a datagram is missing and nothing says why.
    #[track_caller]
    pub fn close(self, pair: &Pair, test: Udp, reverse: bool) {
        assert!(test.sent > 0 && test.received > 0, "nothing was carried: {test:?}");
        // The kernel's drops are polled once a second.
        clock::until("the books close", PATIENCE, || {
            let later = Self::open(pair);
            let missing = self.unexplained(&later, test, reverse);
            if missing.is_empty() { Ok(()) } else { Err(format!("{missing:?}: {test:?}, {later:?}")) }
        });
    }

    /// The hops that lost something without a count of it.
    fn unexplained(&self, later: &Self, test: Udp, reverse: bool) -> Vec<&'static str> {
        let path = if reverse { [2, 3] } else { [0, 1] };
        let [first, second] = path.map(|place| {
            let (before, after) = (self.accounts[place], later.accounts[place]);
            (after.received - before.received, after.delivered - before.delivered)
        });
        let (before, after) = (self.kernel, later.kernel);
        let arrival = if reverse { after.upstream > before.upstream } else { after.ingress > before.ingress };
        // iperf3 opens each stream with one datagram each way, which it does not count as sent.
        let entered = test.sent + test.streams;
        // iperf3's receiver stops first with `-R`: what it did not wait for is neither received nor lost. What it
        // did miss must be missing in front of it.
        let missing = entered.saturating_sub(second.1);
        let hops = [
            ("into the first agent", first.0 == entered, arrival),
            ("between the agents", second.0 == first.1, after.quic > before.quic),
            ("to the receiver", test.lost <= missing, after.anywhere > before.anywhere),
        ];
        hops.into_iter().filter(|(_, equal, counted)| !equal && !counted).map(|(hop, _, _)| hop).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn books(passed: [(u64, u64); 4], kernel: [u64; 4]) -> Books {
        let account =
            |(received, delivered)| Account { received, delivered, queued: 0, dropped: received - delivered };
        let [ingress, quic, upstream, anywhere] = kernel;
        Books { accounts: passed.map(account), kernel: Kernel { ingress, quic, upstream, anywhere } }
    }

    #[test]
    fn a_loss_needs_a_count_at_its_own_hop() {
        let before = books([(5, 5); 4], [1; 4]);
        let test = Udp { streams: 1, sent: 100, lost: 0, received: 100 };
        let one = (6, 6);
        // One datagram more than iperf3 counts opens the stream, in each direction.
        let all = [(106, 106), (106, 106), one, one];
        assert_eq!(before.unexplained(&books(all, [1; 4]), test, false), [""; 0]);
        let reverse = [one, one, (106, 106), (106, 106)];
        assert_eq!(before.unexplained(&books(reverse, [1; 4]), test, true), [""; 0]);

        // Dropped inside an agent: its account says so.
        let test = Udp { streams: 1, sent: 100, lost: 10, received: 90 };
        let dropped = [(106, 96), (96, 96), one, one];
        assert_eq!(before.unexplained(&books(dropped, [1; 4]), test, false), [""; 0]);
        // Between the agents, without and with a count there.
        let between = [(106, 106), (96, 96), one, one];
        assert_eq!(before.unexplained(&books(between, [2, 1, 2, 2]), test, false), ["between the agents"]);
        assert_eq!(before.unexplained(&books(between, [1, 2, 1, 1]), test, false), [""; 0]);
        // Before the first agent, and behind the second.
        let early = [(96, 96), (96, 96), one, one];
        assert_eq!(before.unexplained(&books(early, [1, 2, 2, 2]), test, false), ["into the first agent"]);
        let late = [(106, 106), (106, 106), one, one];
        assert_eq!(before.unexplained(&books(late, [2, 2, 2, 1]), test, false), ["to the receiver"]);
    }
}
