//! `culvert demo`: two agents, an echo service and load in one process, without root.
//!
//! ```text
//!   load ──UDP──► entry agent ══QUIC lanes══► exit agent ──UDP──► echo
//!        ◄──────────────────────────────────────────────────────
//! ```
//!
//! Both agents are started as `culvert run` starts them, from TOML, on real sockets. The demo succeeds only if
//! every datagram is accounted for: inside each agent by the invariant, between counted points by the kernel's drops.

use std::{
    net::{SocketAddr, UdpSocket},
    os::fd::AsFd as _,
    path::Path,
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    thread::JoinHandle,
    time::Duration,
};

use anyhow::{Context as _, anyhow};
use base::clock::{Clock, SystemClock};
use clap::Args;
use config::Config;
use dataplane::relay::DropCounts;
use engine::{
    status::{Accounting, PeerStatus},
    worker::Snapshot,
};
use gate::identity::Identity;
use serde_json::{Map, Value, json};

use crate::{daemon::Daemon, out};

mod load;

use load::{Load, Measured, Options};

/// Run an entry agent, an exit agent, an echo service and load in one process, without root
#[derive(Debug, Args)]
pub struct Demo {
    #[command(flatten)]
    load: Options,
    /// Where /metrics is served meanwhile; port 0 lets the kernel choose
    #[arg(long, value_name = "ADDR", default_value = "127.0.0.1:0")]
    metrics: SocketAddr,
    /// Print the summary as JSON instead of the table
    #[arg(long)]
    json: bool,
}

/// How long the agents may take to connect.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(10);

/// After the load has ended, datagrams on their way have this long to arrive.
const QUIET: Duration = Duration::from_millis(500);

impl Demo {
    /// Runs the demo.
    ///
    /// # Errors
    /// An agent that cannot start or connect; a datagram that is not accounted for.
    pub fn run(&self) -> anyhow::Result<()> {
        let echo = Echo::start()?;
        let (exit_key, entry_key) = (Identity::generate()?, Identity::generate()?);
        let exit =
            start(&exit_toml(&entry_key, echo.address), &exit_key).context("cannot start the exit agent")?;
        let listen =
            exit.addresses.transport.first().copied().ok_or_else(|| anyhow!("the exit does not listen"))?;
        let entry = start(&entry_toml(&exit_key, listen, self.metrics), &entry_key)
            .context("cannot start the entry agent")?;
        let ingress =
            entry.addresses.udp.first().copied().ok_or_else(|| anyhow!("the entry has no ingress"))?;
        wait_for_connection(&entry)?;
        if !self.json {
            self.introduce(&entry, listen, ingress)?;
        }
        let load = Load::start(ingress, self.load)?;
        self.watch(&entry, &exit, &load)?;
        let measured = load.finish(QUIET)?;
        let (entry, exit) = (entry.stop()?, exit.stop()?);
        let echoed = echo.stop()?;
        let summary = Summary::new(self.load, &measured, &echoed, &entry, &exit)?;
        if self.json {
            out::say(&summary.json())?;
        } else {
            out::say(&summary.text())?;
        }
        let unexplained = |problem| Err(anyhow!("not every datagram is accounted for: {problem}"));
        summary.problem().map_or(Ok(()), unexplained)
    }

    fn introduce(&self, entry: &Daemon, listen: SocketAddr, ingress: SocketAddr) -> anyhow::Result<()> {
        out::say(&format!(
            "load ─UDP─► entry {ingress} ═QUIC═► exit {listen} ─UDP─► echo, and back\n\
             {} flows, {} bytes a datagram, {:.1} Mbit/s of payload each way, {} s",
            self.load.flows,
            self.load.size,
            self.load.rate as f64 / 1e6,
            self.load.seconds
        ))?;
        let profile = env!("CULVERT_PROFILE");
        if profile != "release" {
            out::say(&format!(
                "built with the profile {profile}, which is slower than release: for figures, cargo run --release -- demo"
            ))?;
        }
        if let Some(address) = entry.admin_address() {
            out::say(&format!("metrics meanwhile: http://{address}/metrics"))?;
        }
        out::say(&"")
    }

    /// A row a second while the load runs.
    fn watch(&self, entry: &Daemon, exit: &Daemon, load: &Load) -> anyhow::Result<()> {
        if self.json {
            load.wait(self.load.seconds);
            return Ok(());
        }
        out::say(
            &"    time   sent Mbit/s   echoed Mbit/s    RTT p50     RTT p99   outstanding   dropped by reason",
        )?;
        let seconds = self.load.seconds;
        let mut before = Measured::default();
        for second in 1..=seconds {
            load.wait(second);
            let now = load.measured();
            let rate = |after: u64, before: u64| {
                (after.saturating_sub(before) * u64::from(self.load.size) * 8) as f64 / 1e6
            };
            let [p50, p99] = [0.5, 0.99].map(|quantile| now.rtt.value_at_quantile(quantile) as f64 / 1e3);
            let bar =
                "#".repeat(usize::try_from(u64::from(second) * 10 / u64::from(seconds.max(1))).unwrap_or(10));
            out::say(&format!(
                "{second:>5}/{seconds:<3}{:>12.1}{:>16.1}{p50:>8.0} µs{p99:>8.0} µs{:>14}   {}   [{bar:<10}]",
                rate(now.sent, before.sent),
                rate(now.echoed, before.echoed),
                now.sent - now.echoed,
                drops(&[entry.snapshot(), exit.snapshot()]),
            ))?;
            before = now;
        }
        Ok(())
    }
}

fn start(toml: &str, identity: &Identity) -> anyhow::Result<Daemon> {
    let config = Config::parse(toml, Path::new(".")).map_err(|problems| anyhow!("{problems}"))?;
    Daemon::start(config, identity)
}

fn exit_toml(entry: &Identity, echo: SocketAddr) -> String {
    format!(
        r#"
        identity = {{ key_file = "generated for the demo", state_dir = "" }}
        control = {{ socket = "" }}
        transport = {{ listen = ["127.0.0.1:0"] }}
        peer = [{{ name = "entry", public_key = "{}", services = ["echo"] }}]
        service = [{{ name = "echo", upstream = "{echo}", protocol = "udp" }}]
        "#,
        entry.public_key()
    )
}

fn entry_toml(exit: &Identity, endpoint: SocketAddr, metrics: SocketAddr) -> String {
    format!(
        r#"
        identity = {{ key_file = "generated for the demo", state_dir = "" }}
        control = {{ socket = "" }}
        metrics = {{ listen = "{metrics}" }}
        peer = [{{ name = "exit", public_key = "{}", endpoints = ["{endpoint}"] }}]
        udp = [{{ listen = "127.0.0.1:0", peer = "exit", service = "echo" }}]
        "#,
        exit.public_key()
    )
}

fn wait_for_connection(entry: &Daemon) -> anyhow::Result<()> {
    let give_up = SystemClock.now() + CONNECT_TIMEOUT;
    while SystemClock.now() < give_up {
        if entry.snapshot().peers.first().is_some_and(|peer| peer.lanes_up > 0) {
            return Ok(());
        }
        std::thread::sleep(Duration::from_millis(10));
    }
    Err(anyhow!("the agents did not connect within {} s", CONNECT_TIMEOUT.as_secs()))
}

/// What was dropped, by the labels of the reasons.
fn dropped(counts: &DropCounts) -> impl Iterator<Item = (&'static str, u64)> {
    counts.by_label().filter(|(_, count)| *count > 0)
}

/// The drops of some agents, by reason, in words.
fn drops(snapshots: &[Snapshot]) -> String {
    let mut counts = DropCounts::default();
    for peer in snapshots.iter().flat_map(|snapshot| &snapshot.peers) {
        counts += &peer.uplink.account.dropped;
        counts += &peer.downlink.account.dropped;
    }
    let mut words: Vec<String> =
        dropped(&counts).map(|(reason, count)| format!("{reason} {count}")).collect();
    let kernel: u64 = snapshots.iter().map(|snapshot| snapshot.kernel_drops).sum();
    if kernel > 0 {
        words.push(format!("kernel {kernel} buffers"));
    }
    if words.is_empty() { "none".to_owned() } else { words.join(", ") }
}

struct Summary {
    seconds: f64,
    datagram_bytes: u64,
    measured: Measured,
    entry: PeerStatus,
    exit: PeerStatus,
    /// Datagrams that the kernel did not take back from the echo service.
    echo_refused: u64,
    kernel_drops: u64,
}

impl Summary {
    fn new(
        load: Options,
        measured: &Measured,
        echoed: &Echoed,
        entry: &Snapshot,
        exit: &Snapshot,
    ) -> anyhow::Result<Self> {
        let peer = |snapshot: &Snapshot| snapshot.peers.first().cloned().ok_or_else(|| anyhow!("no peer"));
        Ok(Self {
            seconds: load.seconds.into(),
            datagram_bytes: load.size.into(),
            measured: measured.clone(),
            entry: peer(entry)?,
            exit: peer(exit)?,
            echo_refused: echoed.refused,
            kernel_drops: entry.kernel_drops
                + exit.kernel_drops
                + measured.kernel_drops
                + echoed.kernel_drops,
        })
    }

    /// The four accounts, in the order in which a datagram and its echo pass them.
    fn accounts(&self) -> [(&'static str, &Accounting); 4] {
        [
            ("entry, to the exit", &self.entry.uplink),
            ("exit, to the echo", &self.exit.downlink),
            ("exit, to the entry", &self.exit.uplink),
            ("entry, to the load", &self.entry.downlink),
        ]
    }

    /// What was counted on both sides of each hop between the counted points: name, in, out.
    fn hops(&self) -> [(&'static str, u64, u64); 5] {
        let [there, at_exit, back, at_entry] = self.accounts().map(|(_, direction)| direction.account);
        [
            ("load to entry", self.measured.sent, there.received),
            ("entry to exit", there.delivered, at_exit.received),
            ("exit to echo and back", at_exit.delivered, back.received + self.echo_refused),
            ("exit to entry", back.delivered, at_entry.received),
            ("entry to load", at_entry.delivered, self.measured.echoed),
        ]
    }

    /// What is wrong with the accounting, if anything is.
    fn problem(&self) -> Option<String> {
        if let Some((name, _)) = self.accounts().into_iter().find(|(_, direction)| !direction.balances) {
            return Some(format!("{name}: received is not delivered + queued + dropped"));
        }
        if let Some((name, _)) = self.accounts().into_iter().find(|(_, direction)| direction.queued > 0) {
            return Some(format!("{name}: datagrams are still queued"));
        }
        if self.measured.echoed == 0 {
            return Some("nothing came back".to_owned());
        }
        // The kernel counts buffers it dropped, not datagrams: with none of them, nothing may be missing.
        let lost =
            self.hops().into_iter().find(|(_, before, after)| before > after && self.kernel_drops == 0);
        lost.map(|(name, before, after)| {
            format!("{name}: {} lost and no counter explains it", before - after)
        })
    }

    fn megabits(&self, datagrams: u64) -> f64 {
        (datagrams * self.datagram_bytes * 8) as f64 / 1e6 / self.seconds
    }

    fn text(&self) -> String {
        let Measured { sent, echoed, rtt, .. } = &self.measured;
        let [p50, p90, p99, p999] =
            [0.5, 0.9, 0.99, 0.999].map(|quantile| rtt.value_at_quantile(quantile) as f64 / 1e3);
        let mut text = format!(
            "\nthroughput   sent {:.1} Mbit/s, echoed {:.1} Mbit/s ({sent} and {echoed} datagrams, {:.4} % lost)\n\
             round trip   p50 {p50:.0} µs, p90 {p90:.0} µs, p99 {p99:.0} µs, p99.9 {p999:.0} µs, most {:.0} µs\n\n\
             accounting            received    delivered   queued   dropped\n",
            self.megabits(*sent),
            self.megabits(*echoed),
            (sent - echoed) as f64 * 100.0 / (*sent).max(1) as f64,
            rtt.max() as f64 / 1e3,
        );
        for (name, Accounting { account, queued, .. }) in self.accounts() {
            let reasons = dropped(&account.dropped).map(|(reason, count)| format!("{reason} {count}"));
            let reasons = reasons.collect::<Vec<_>>().join(", ");
            text += &format!(
                "{name:<20}{:>10}{:>13}{queued:>9}{:>10}   {reasons}\n",
                account.received,
                account.delivered,
                account.dropped_total(),
            );
        }
        text += "\nbetween them              in          out     lost\n";
        for (name, before, after) in self.hops() {
            text += &format!("{name:<21}{before:>9}{after:>13}{:>9}\n", before.saturating_sub(after));
        }
        let verdict = match self.problem() {
            None => "every datagram is accounted for".to_owned(),
            Some(problem) => format!("NOT accounted for: {problem}"),
        };
        text + &format!("kernel drops (buffers) {}\n\n{verdict}", self.kernel_drops)
    }

    fn json(&self) -> String {
        let Measured { sent, echoed, rtt, .. } = &self.measured;
        let accounts = self.accounts().map(|(name, Accounting { account, queued, .. })| {
            let dropped: Map<String, Value> =
                dropped(&account.dropped).map(|(reason, count)| (reason.to_owned(), count.into())).collect();
            json!({
                "at": name,
                "received": account.received,
                "delivered": account.delivered,
                "queued": queued,
                "dropped": dropped,
            })
        });
        let quantile = |quantile| rtt.value_at_quantile(quantile) as f64 / 1e9;
        json!({
            "seconds": self.seconds,
            "sent": sent,
            "echoed": echoed,
            "sent_bits_per_second": self.megabits(*sent) * 1e6,
            "echoed_bits_per_second": self.megabits(*echoed) * 1e6,
            "rtt_seconds": {
                "p50": quantile(0.5),
                "p90": quantile(0.9),
                "p99": quantile(0.99),
                "p999": quantile(0.999),
            },
            "echo_refused": self.echo_refused,
            "kernel_drops_buffers": self.kernel_drops,
            "accounts": accounts,
            "accounted": self.problem().is_none(),
        })
        .to_string()
    }
}

/// Sends every datagram back to where it came from.
struct Echo {
    address: SocketAddr,
    stop: Arc<AtomicBool>,
    thread: JoinHandle<Echoed>,
}

/// Datagrams that an [`Echo`] did not send back.
struct Echoed {
    /// Datagrams that the kernel did not take.
    refused: u64,
    /// Buffers that the kernel dropped, because more waited than it holds.
    kernel_drops: u64,
}

impl Echo {
    fn start() -> anyhow::Result<Self> {
        let socket = UdpSocket::bind("127.0.0.1:0").context("cannot open the echo service's socket")?;
        socket.set_read_timeout(Some(Duration::from_millis(50)))?;
        load::enlarge_buffers(&socket);
        let address = socket.local_addr()?;
        let stop = Arc::new(AtomicBool::new(false));
        let stopped = Arc::clone(&stop);
        let thread = std::thread::Builder::new().name("demo-echo".to_owned()).spawn(move || {
            let (mut buffer, mut refused) = (vec![0; 65_536], 0);
            while !stopped.load(Ordering::Relaxed) {
                if let Ok((len, from)) = socket.recv_from(&mut buffer) {
                    refused += u64::from(socket.send_to(&buffer[..len], from).is_err());
                }
            }
            Echoed { refused, kernel_drops: net::process::kernel_drops(socket.as_fd()) }
        })?;
        Ok(Self { address, stop, thread })
    }

    fn stop(self) -> anyhow::Result<Echoed> {
        self.stop.store(true, Ordering::Relaxed);
        self.thread.join().map_err(|_| anyhow!("the echo service panicked"))
    }
}
