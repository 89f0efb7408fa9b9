//! `culvert uplink`

use std::{path::PathBuf, time::Duration};

use anyhow::anyhow;
use clap::{Args, Subcommand};
use config::Config;
use engine::status::{LineState, LineStatus};
use net::folder;
use ops::control_socket::{
    client::{self, AskError},
    protocol::{Answer, Request},
    status::{PeerStatus, Scope, Status, table},
};
use serde_json::{Value, json};

use super::{Failure, reach::DEFAULT_CONFIG};
use crate::{
    doctor::line_test::{Measured, Outcome, TestOptions, Tested, test_lines},
    out,
};

/// The version of the JSON; it changes when a reader of the old one would be misled.
const VERSION: u64 = 1;

/// Test the lines of this host, of one that has several ([[transport.uplink]])
#[derive(Debug, Args)]
pub(super) struct Uplink {
    #[command(subcommand)]
    command: Command,
}

#[derive(Debug, Subcommand)]
enum Command {
    Test(Test),
}

/// Dial each peer over each line, and measure round trip, loss and packet size
///
/// If no daemon runs, every peer that has endpoints is dialled with the daemon's key, over one line after the other, and each
/// connection is measured for some seconds. If one runs, nothing is dialled, because a handshake would end its connections: what it
/// has measured itself is shown.
///
/// Exit codes: 0: each line reaches each peer. 1: one does not, or the test could not be made. 2: wrong usage or configuration.
#[derive(Debug, Args)]
struct Test {
    /// The line to test, by its name in the configuration [default: all of them]
    name: Option<String>,
    /// The configuration file
    #[arg(long, value_name = "FILE", default_value = DEFAULT_CONFIG)]
    config: PathBuf,
    /// How long a peer may take to answer, 10ms to 60s
    #[arg(long, value_name = "TIME", default_value = "3s", value_parser = time)]
    wait: Duration,
    /// How long each connection is measured, 10ms to 60s; at least as long as the search for the packet size takes
    #[arg(long = "for", value_name = "TIME", default_value = "5s", value_parser = time)]
    time: Duration,
    /// Print JSON instead of text
    #[arg(long)]
    json: bool,
}

fn time(text: &str) -> Result<Duration, &'static str> {
    let range = Duration::from_millis(10)..=Duration::from_secs(60);
    humantime::parse_duration(text).ok().filter(|time| range.contains(time)).ok_or("write 10ms to 60s")
}

impl Uplink {
    pub(super) fn execute(self) -> Result<(), Failure> {
        match self.command {
            Command::Test(test) => test.execute(),
        }
    }
}

impl Test {
    fn execute(self) -> Result<(), Failure> {
        let (config, identity) = Config::load(&self.config)?;
        self.check(&config)?;
        let (rows, by_daemon) = match daemon(&config)? {
            Some(status) => (self.known(&config, &status), true),
            None => {
                let options = TestOptions { line: self.name.clone(), wait: self.wait, time: self.time };
                (test_lines(&config, &identity, &options)?, false)
            }
        };
        if self.json {
            out::say(&format_args!("{:#}", as_json(&rows, by_daemon)))?;
        } else {
            if by_daemon {
                out::say(
                    &"measured by the daemon that runs; nothing was dialled, which would end its connections",
                )?;
            }
            out::say(&as_text(&rows))?;
        }
        let all = rows.iter().all(|tested| matches!(tested.outcome, Outcome::Answers(_)));
        if all { Ok(()) } else { Err(Failure::Found(1)) }
    }

    /// Refuses what there is nothing to test for.
    fn check(&self, config: &Config) -> Result<(), Failure> {
        let file = self.config.display();
        let uplinks = &config.transport.uplinks;
        if uplinks.is_empty() {
            return Err(Failure::Input(format!(
                "{file} has no [[transport.uplink]]: this host has one line (remedy: culvert doctor examines that; docs/uplinks.md \
                 says how a second one is added)"
            )));
        }
        if let Some(name) = &self.name
            && !uplinks.iter().any(|uplink| *uplink.name == **name)
        {
            let names: Vec<&str> = uplinks.iter().map(|uplink| &*uplink.name).collect();
            return Err(Failure::Input(format!(
                "{file} has no line {name:?} (remedy: name one of {})",
                names.join(", ")
            )));
        }
        if config.peers.iter().all(|peer| peer.endpoints.is_empty()) {
            return Err(Failure::Input(format!(
                "{file} has no peer with endpoints, so nobody is dialled over a line (remedy: endpoints of a [[peer]])"
            )));
        }
        Ok(())
    }

    /// What the daemon knows of each line to each peer that it dials.
    fn known(&self, config: &Config, status: &Status) -> Vec<Tested> {
        let asked = |name: &str| self.name.as_deref().is_none_or(|asked| asked == name);
        let uplinks = config.transport.uplinks.iter().filter(|uplink| asked(&uplink.name));
        let dialled = |peer: &&PeerStatus| {
            config.peers.iter().any(|it| *it.name == *peer.name && !it.endpoints.is_empty())
        };
        let of_line = |uplink: &config::Uplink| {
            let row = |peer: &PeerStatus| Tested {
                line: uplink.name.to_string(),
                way: uplink.way(),
                peer: peer.name.to_string(),
                remote: peer.address,
                source: None,
                outcome: outcome(peer, peer.lines.iter().find(|line| line.name == uplink.name)),
            };
            status.peers.iter().filter(dialled).map(row).collect::<Vec<_>>()
        };
        uplinks.flat_map(of_line).collect()
    }
}

/// What the daemon says of a line, as a test would.
fn outcome(peer: &PeerStatus, line: Option<&LineStatus>) -> Outcome {
    let fails = |reason: String| {
        let error = peer.last_error.as_ref().map(|error| &error.failure);
        let causes = error.map_or_else(
            || format!("culvert status {}, and the daemon's log", peer.name),
            |error| error.causes.join("; "),
        );
        Outcome::Fails { reason, causes }
    };
    let Some(line) = line else {
        return fails("the daemon does not know the line: it runs with another configuration".to_owned());
    };
    match line.state {
        LineState::InUse | LineState::Standby | LineState::Held => Outcome::Answers(Measured {
            rtt: line.rtt_seconds.map(Duration::from_secs_f64),
            rtt_min: None,
            packets: line.sent_packets,
            lost: line.lost_packets,
            path_mtu: line.packet_bytes.and_then(|bytes| u32::try_from(bytes).ok()).map(|bytes| {
                let v6 = peer.address.is_some_and(|address| address.is_ipv6());
                bytes + 8 + if v6 { 40 } else { 20 }
            }),
            inner_mtu: peer.inner_mtu,
        }),
        LineState::Suspect | LineState::Down if peer.connected() => {
            fails(format!("the line is {}", line.in_words()))
        }
        LineState::Suspect | LineState::Down => fails("the peer is not connected".to_owned()),
    }
}

/// The status of the daemon that runs with this configuration; `None` if none does.
fn daemon(config: &Config) -> Result<Option<Status>, Failure> {
    let asked = config
        .control
        .as_ref()
        .map(|socket| client::ask(socket, &Request::Status(Scope::default()), env!("CULVERT_VERSION")));
    match asked {
        Some(Ok(Answer::Status { status })) => return Ok(Some(*status)),
        Some(Ok(_)) => return Err(super::reach::unexpected()),
        Some(Err(AskError::NotRunning(_))) | None => {}
        Some(Err(error)) => return Err(Failure::Runtime(error.into())),
    }
    if folder::is_taken(&config.state_dir).is_ok_and(|taken| taken) {
        return Err(Failure::Runtime(anyhow!(
            "a daemon seems to run, which holds {}, and cannot be asked: a handshake of ours would end its connections (remedy: a \
             control.socket, or stop it for the test)",
            config.state_dir.display()
        )));
    }
    Ok(None)
}

/// A time as an operator reads it.
fn short(time: Option<Duration>) -> String {
    time.map_or_else(|| "-".to_owned(), |time| format!("{:.1} ms", time.as_secs_f64() * 1_000.0))
}

/// A row for each line and peer, and behind them why some have failed.
fn as_text(rows: &[Tested]) -> String {
    let or_dash = |text: Option<String>| text.unwrap_or_else(|| "-".to_owned());
    let head = ["LINE", "BY", "PEER", "ADDRESS", "RESULT", "RTT", "LEAST", "LOST", "PATH MTU", "INNER MTU"];
    let mut cells = vec![head.map(str::to_owned)];
    for tested in rows {
        let Tested { line, way, peer, remote, outcome, .. } = tested;
        let start = [line.clone(), way.clone(), peer.clone(), or_dash(remote.map(|at| at.to_string()))];
        let rest = match outcome {
            Outcome::Answers(Measured { rtt, rtt_min, packets, lost, path_mtu, inner_mtu }) => [
                "answers".to_owned(),
                short(*rtt),
                short(*rtt_min),
                format!("{lost} of {packets}"),
                or_dash(path_mtu.map(|bytes| bytes.to_string())),
                or_dash(inner_mtu.map(|bytes| bytes.to_string())),
            ],
            Outcome::Fails { .. } => ["FAILS", "-", "-", "-", "-", "-"].map(str::to_owned),
        };
        let mut row = start.into_iter().chain(rest);
        cells.push(std::array::from_fn(|_| row.next().unwrap_or_default()));
    }
    let mut text = table(&cells).trim_end().to_owned();
    for Tested { line, peer, outcome, .. } in rows {
        if let Outcome::Fails { reason, causes } = outcome {
            text += &format!("\n{line}: {peer}: {reason} (remedy: {causes})");
        }
    }
    text
}

fn as_json(rows: &[Tested], by_daemon: bool) -> Value {
    let millis = |time: &Option<Duration>| time.map(|time| time.as_secs_f64());
    let row = |Tested { line, way, peer, remote, source, outcome }: &Tested| {
        let (measured, failure) = match outcome {
            Outcome::Answers(it) => (
                json!({
                    "rtt_seconds": millis(&it.rtt),
                    "rtt_min_seconds": millis(&it.rtt_min),
                    "packets": it.packets,
                    "lost_packets": it.lost,
                    "path_mtu": it.path_mtu,
                    "inner_mtu": it.inner_mtu,
                }),
                Value::Null,
            ),
            Outcome::Fails { reason, causes } => (Value::Null, json!({ "reason": reason, "causes": causes })),
        };
        json!({
            "line": line, "way": way, "peer": peer, "address": remote, "source": source,
            "answers": failure.is_null(), "measured": measured, "failure": failure,
        })
    };
    json!({
        "version": VERSION,
        "measured_by": if by_daemon { "daemon" } else { "test" },
        "lines": rows.iter().map(row).collect::<Vec<_>>(),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn tested(line: &str, outcome: Outcome) -> Tested {
        Tested {
            line: line.to_owned(),
            way: "interface eth0".to_owned(),
            peer: "exit".to_owned(),
            remote: "192.0.2.1:4433".parse().ok(),
            source: None,
            outcome,
        }
    }

    #[test]
    fn a_time_has_a_unit_and_bounds() {
        assert_eq!(time("3s"), Ok(Duration::from_secs(3)));
        for bad in ["", "3", "9ms", "61s"] {
            assert_eq!(time(bad), Err("write 10ms to 60s"), "{bad}");
        }
    }

    #[test]
    fn what_fails_is_told_below_the_table() {
        let measured = Measured {
            rtt: Some(Duration::from_micros(12_340)),
            rtt_min: None,
            packets: 131,
            lost: 2,
            path_mtu: Some(1_480),
            inner_mtu: Some(1_421),
        };
        let failed = Outcome::Fails { reason: "no answer".to_owned(), causes: "a firewall".to_owned() };
        let text = as_text(&[tested("dsl", Outcome::Answers(measured)), tested("lte", failed)]);
        let expected = "\
LINE  BY              PEER  ADDRESS         RESULT   RTT      LEAST  LOST      PATH MTU  INNER MTU
dsl   interface eth0  exit  192.0.2.1:4433  answers  12.3 ms  -      2 of 131  1480      1421
lte   interface eth0  exit  192.0.2.1:4433  FAILS    -        -      -         -         -
lte: exit: no answer (remedy: a firewall)";
        assert_eq!(text, expected);
    }

    #[test]
    fn a_daemon_that_is_not_connected_or_has_another_file_reaches_nobody() {
        let line = |state| LineStatus { state, ..LineStatus::default() };
        let answers = |peer: &PeerStatus, line: Option<&LineStatus>| match outcome(peer, line) {
            Outcome::Answers(_) => "answers".to_owned(),
            Outcome::Fails { reason, .. } => reason,
        };
        let peer =
            PeerStatus { state: ops::control_socket::status::PeerState::Connected, ..PeerStatus::default() };
        assert_eq!(answers(&peer, Some(&line(LineState::Standby))), "answers");
        assert_eq!(answers(&peer, Some(&line(LineState::Down))), "the line is down");
        assert_eq!(
            answers(&PeerStatus::default(), Some(&line(LineState::Down))),
            "the peer is not connected"
        );
        assert!(answers(&peer, None).contains("another configuration"));
    }
}
