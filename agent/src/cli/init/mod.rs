//! `culvert init`: a key, a commented configuration, and what to type next.
//!
//! | question | file |
//! |---|---|
//! | which options there are, in which order things happen | this one |
//! | what the options mean together, and what the host adds to them | `plan.rs` |
//! | what the configuration looks like | `template.rs` |
//! | what the host knows | `host.rs` |
//! | how files are written: all of them or none | `files.rs` |
//! | what the operator is told to do next | `next.rs` |

use std::path::{Path, PathBuf};

use clap::{Args, ValueEnum};
use config::Config;
use gate::identity::{Identity, IdentityError};
use lab::out;

use super::{Failure, keygen::with_remedy, reach::DEFAULT_CONFIG};

mod files;
mod host;
mod next;
mod plan;
mod template;
#[cfg(test)]
mod tests;

use files::New;
use host::Facts;
use plan::Plan;

/// Write a key and a commented configuration, and say what to type next
///
/// An exit listens; an entry dials it. Begin at the exit: it prints the link that the entry needs, and the entry prints what
/// the exit must be told. Nothing that exists is overwritten; a key that exists is used.
#[derive(Debug, Args)]
pub(super) struct Init {
    /// What this host is to be
    #[arg(long, value_enum)]
    role: Role,
    /// Where to write the configuration; the key goes beside it
    #[arg(long, value_name = "FILE", default_value = DEFAULT_CONFIG)]
    config: PathBuf,
    /// Of an entry: the link of the exit
    #[arg(long, value_name = "LINK")]
    peer: Option<String>,
    /// Carry IP packets: our address in the tunnel, with the prefix of its link; may be repeated, once for IPv4 and once for
    /// IPv6. The prefix has room for the other end, and each entry of an exit needs an address of its own [without a value: 10.9.0.1/24 at an exit, 10.9.0.2/24 at an
    /// entry]
    #[arg(long, value_name = "PREFIX", num_args = 0..=1, default_missing_value = "")]
    tun: Vec<String>,
    /// Of an entry with --tun: a network behind the exit, besides those of --tun; may be repeated
    #[arg(long = "allowed-ip", value_name = "PREFIX")]
    allowed_ips: Vec<String>,
    /// Of an exit: a service that it offers, UDP and TCP; may be repeated
    #[arg(long = "service", value_name = "NAME=ADDR", value_parser = pair)]
    services: Vec<Pair>,
    /// Of an entry: a local UDP port that stands for a service of the exit; may be repeated
    #[arg(long, value_name = "LISTEN=SERVICE", value_parser = pair)]
    udp: Vec<Pair>,
    /// The same for TCP
    #[arg(long, value_name = "LISTEN=SERVICE", value_parser = pair)]
    tcp: Vec<Pair>,
    /// Of an exit: the UDP address to listen at; may be repeated [default: port 4433 of all addresses]
    #[arg(long, value_name = "ADDR")]
    listen: Vec<String>,
    /// Of an exit: where entries find it [default: the address from which this host sends to the Internet]
    #[arg(long, value_name = "HOST:PORT")]
    advertise: Option<String>,
}

/// What a host is to the others.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum Role {
    /// It dials an exit
    Entry,
    /// It listens, and offers its network or services
    Exit,
}

/// The two sides of a '='.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Pair {
    left: String,
    right: String,
}

/// Why a text is not a pair.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("write both sides of the '=', as in dns=127.0.0.1:53 or 127.0.0.1:5300=dns")]
struct NotAPair;

fn pair(text: &str) -> Result<Pair, NotAPair> {
    let sides = text.split_once('=').filter(|(left, right)| !left.is_empty() && !right.is_empty());
    sides.map(|(left, right)| Pair { left: left.to_owned(), right: right.to_owned() }).ok_or(NotAPair)
}

impl Init {
    pub(super) fn execute(self) -> Result<(), Failure> {
        let facts = Facts::gather(&self.config);
        let plan = Plan::new(&self, &facts).map_err(|problem| Failure::Input(problem.to_string()))?;
        files::is_free(&self.config).map_err(anyhow::Error::from)?;
        let folder = folder_of(&self.config);
        let key_file = folder.join(KEY_FILE);
        let (identity, made) = match Identity::load(&key_file) {
            Ok(identity) => (identity, false),
            Err(IdentityError::Missing(_)) => (Identity::generate().map_err(with_remedy)?, true),
            Err(error) => return Err(with_remedy(error).into()),
        };
        if plan.peer.as_ref().is_some_and(|link| link.key == identity.public_key()) {
            return Err(Failure::Input(format!(
                "--peer is the link of this host itself, by the key in {} (remedy: give the link of the exit)",
                key_file.display()
            )));
        }
        let text = template::render(&plan);
        let config = Config::parse(&text, folder).map_err(|problems| {
            let lines = problems.problems.iter().map(ToString::to_string).collect::<Vec<_>>();
            Failure::Input(format!("that makes no configuration; nothing was written: {}", lines.join("; ")))
        })?;
        let key = made.then_some((key_file.as_path(), &identity));
        files::write(&New { config: &self.config, text: &text, key, group: facts.group })
            .map_err(anyhow::Error::from)?;
        let key_what = if made { "wrote" } else { "kept " };
        out::say(&format_args!(
            "{key_what} {}: the private key; keep a copy, show it to nobody",
            key_file.display()
        ))?;
        out::say(&format_args!("wrote {}: the configuration", self.config.display()))?;
        for note in plan.notes.iter().cloned().chain(host::clashes(&config, &facts)) {
            out::complain(&format_args!("note: {note}"));
        }
        let steps = next::Steps {
            plan: &plan,
            config: &config,
            key: identity.public_key(),
            file: &self.config,
            facts: &facts,
        };
        Ok(out::say(&steps.text()?)?)
    }
}

/// The name of the key's file, in the folder of the configuration.
const KEY_FILE: &str = "identity.key";

/// The folder of a file; the parent of a bare name is the current folder.
fn folder_of(file: &Path) -> &Path {
    file.parent().filter(|folder| !folder.as_os_str().is_empty()).unwrap_or_else(|| Path::new("."))
}
