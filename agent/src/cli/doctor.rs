//! `culvert doctor`

use std::{
    net::{SocketAddr, ToSocketAddrs},
    path::{Path, PathBuf},
    time::Duration,
};

use anyhow::{Context as _, anyhow};
use clap::{Args, ValueEnum};
use lab::{
    probe::{self, Verdict},
    rate::bits_per_second,
};

use super::{Failure, reach::DEFAULT_CONFIG};
use crate::{
    doctor::{self, Report, Severity},
    out,
};

/// Look for what keeps an agent from working well on this host, with a remedy for each finding
///
/// Looks at the kernel, its limits, the network, the files of the configuration, and the ways to the peers. Changes nothing.
/// Names of endpoints are looked up; if no daemon runs, the peers are dialled with the daemon's key, and a running one is
/// asked instead. Permissions are this user's: run it as root beside the packaged service, else as the daemon's user.
///
/// With --probe it finds out what a UDP port tells unauthenticated senders: sends every kind of packet that a scanner could send to a QUIC
/// port, about 3,500 datagrams in 2 seconds, and prints what came back to each kind. That needs no key and no configuration.
/// Probe hosts of your own. An agent answers none of them. With a decoy, all answers are the decoy's.
///
/// Exit codes: 0 nothing above a note, 1 warnings, 2 errors or wrong usage. With --probe: 0 as expected, 1 not as expected or
/// not possible, 2 wrong usage.
#[derive(Debug, Args)]
pub(super) struct Doctor {
    /// The configuration file; without it: /etc/culvert/agent.toml, or the host alone if there is none
    #[arg(long, value_name = "FILE", conflicts_with = "probe")]
    config: Option<PathBuf>,
    /// The rate that the socket buffers must be large enough for, with a unit: 500M, 5G [default: limits.receive_buffer counts]
    #[arg(long, value_name = "RATE", value_parser = bits_per_second, conflicts_with = "probe")]
    rate: Option<u64>,
    /// Send nothing: no questions for names, no handshakes
    #[arg(long, conflicts_with = "probe")]
    offline: bool,
    /// The port to probe instead: of a name, the first address is taken
    #[arg(long, value_name = "HOST:PORT", value_parser = host_and_port)]
    probe: Option<String>,
    /// What the packets are made from; the same number makes the same packets [default: a random one, printed]
    #[arg(long, value_name = "N", requires = "probe")]
    seed: Option<u64>,
    /// How long an answer may take, 10ms to 10s [default: 3s for each round of handshakes, 300ms with --probe]
    #[arg(long, value_name = "TIME", value_parser = wait)]
    wait: Option<Duration>,
    /// What should come back
    #[arg(long, value_enum, default_value_t = Expect::Silence, requires = "probe")]
    expect: Expect,
    /// Print JSON instead of text
    #[arg(long)]
    json: bool,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum Expect {
    /// Nothing, not even ICMP errors: an agent without a decoy
    Silence,
    /// At least one datagram: a decoy, or another server
    Answers,
}

/// A handshake takes a round trip; a lost packet of it costs a second.
const HANDSHAKE_WAIT: Duration = Duration::from_secs(3);

/// Above the round trips of most paths.
const PROBE_WAIT: Duration = Duration::from_millis(300);

impl Doctor {
    pub(super) fn execute(self) -> Result<(), Failure> {
        match &self.probe {
            Some(target) => self.probe(target),
            None => self.examine(),
        }
    }

    fn examine(&self) -> Result<(), Failure> {
        let default = || Some(PathBuf::from(DEFAULT_CONFIG)).filter(|path| Path::exists(path));
        let options = doctor::Options {
            config: self.config.clone().or_else(default),
            rate: self.rate,
            offline: self.offline,
            wait: self.wait.unwrap_or(HANDSHAKE_WAIT),
        };
        let (facts, config) = doctor::gather(&options);
        let report = Report::new(&facts, doctor::examine(&facts, config.as_ref()));
        if self.json {
            out::say(&format_args!("{:#}", report.json()))?;
        } else {
            out::say(&report)?;
        }
        match report.severity() {
            Severity::Ok | Severity::Note => Ok(()),
            Severity::Warning => Err(Failure::Found(1)),
            Severity::Error => Err(Failure::Found(2)),
        }
    }

    fn probe(&self, target: &str) -> Result<(), Failure> {
        let target = resolve(target)?;
        let seed = self.seed.unwrap_or_else(|| rand::random::<u32>().into());
        let wait = self.wait.unwrap_or(PROBE_WAIT);
        let report = probe::run(probe::Options { target, seed, wait })?;
        if self.json {
            out::say(&report.json())?
        } else {
            out::say(&report)?
        }
        let (verdict, expected) = match self.expect {
            Expect::Silence => (report.verdict(), Verdict::Silence),
            Expect::Answers => (report.verdict(), Verdict::Answers),
        };
        if verdict == expected {
            return Ok(());
        }
        Err(anyhow!("expected {}, found {} (seed {seed})", expected.label(), verdict.label()).into())
    }
}

/// Why a text names no port.
const NOT_A_PORT: &str = "write a host and a port, as in gw.example.net:4433 or [2001:db8::1]:4433";

fn host_and_port(text: &str) -> Result<String, &'static str> {
    let fits = |(host, port): (&str, &str)| {
        let literal = host.starts_with('[') && host.ends_with(']');
        let named = !host.is_empty() && !host.contains(':');
        (literal || named) && port.parse::<u16>().is_ok_and(|port| port > 0)
    };
    text.rsplit_once(':').filter(|parts| fits(*parts)).map(|_| text.to_owned()).ok_or(NOT_A_PORT)
}

fn wait(text: &str) -> Result<Duration, &'static str> {
    let range = Duration::from_millis(10)..=Duration::from_secs(10);
    humantime::parse_duration(text).ok().filter(|wait| range.contains(wait)).ok_or("write 10ms to 10s")
}

fn resolve(target: &str) -> anyhow::Result<SocketAddr> {
    let mut addresses = target.to_socket_addrs().with_context(|| format!("cannot resolve {target}"))?;
    addresses.next().ok_or_else(|| anyhow!("{target} has no address"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_target_has_a_host_and_a_port() {
        for good in ["gw.example.net:4433", "192.0.2.1:1", "[2001:db8::1]:65535"] {
            assert_eq!(host_and_port(good).as_deref(), Ok(good));
        }
        for bad in ["", ":1", "host", "host:", "host:0", "host:65536", "2001:db8::1", "[::1]"] {
            assert_eq!(host_and_port(bad), Err(NOT_A_PORT), "{bad}");
        }
    }

    #[test]
    fn a_wait_is_neither_nothing_nor_for_ever() {
        assert_eq!(wait("300ms"), Ok(Duration::from_millis(300)));
        for bad in ["", "0s", "9ms", "11s", "300"] {
            assert_eq!(wait(bad), Err("write 10ms to 10s"), "{bad}");
        }
    }
}
