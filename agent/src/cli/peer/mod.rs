//! `culvert peer`
//!
//! | question | file |
//! |---|---|
//! | listing, adding, removing | this one |
//! | changing one that is there | `set.rs` |
//! | printing its `[[peer]]` | `export.rs` |

mod export;
pub(super) mod set;

use std::path::{Path, PathBuf};

use anyhow::anyhow;
use clap::{Args, Subcommand};
use config::{
    self, AccessMode, Config, PeerOrigin,
    state::{self, Edit, NewPeer},
};
use gate::identity::{Endpoint, Identity, PublicKey, ShareLink};
use ops::control_socket::{
    self, AS_GUEST, peer_changes,
    protocol::{Answer, ListedPeer, Request, VERSION},
    status::{rows, table},
};
use serde_json::json;

use super::{
    Failure,
    reach::{Offline, Reach, Reached, unexpected},
};
use crate::out;

/// List, add, change and remove peers, effective at once if the daemon runs
#[derive(Debug, Args)]
pub(super) struct Peer {
    #[command(subcommand)]
    command: Command,
}

#[derive(Debug, Subcommand)]
enum Command {
    List(List),
    Add(Add),
    Set(set::Set),
    Export(export::Export),
    Remove(Remove),
}

/// Show the peers of the configuration and of the state file
#[derive(Debug, Args)]
struct List {
    #[command(flatten)]
    reach: Reach,
    /// One JSON object, as docs/status.md describes it
    #[arg(long)]
    json: bool,
    /// The names alone, one on a line, for completions
    #[arg(long, hide = true, conflicts_with = "json")]
    names: bool,
}

/// Let a peer in, and keep it in the state file
#[derive(Debug, Args)]
struct Add {
    /// What to call it
    name: String,
    /// Its link (`culvert://host:port/<public key>`), to dial it, or its public key, to be dialled
    // One key in 64 begins with '-'.
    #[arg(value_name = "LINK|KEY", allow_hyphen_values = true)]
    link: String,
    /// A service of ours that it may use; may be repeated
    #[arg(long = "service", value_name = "NAME")]
    services: Vec<String>,
    /// An inner address or prefix of its own; may be repeated. Needs [tun]
    #[arg(long = "allowed-ip", value_name = "PREFIX")]
    allowed_ips: Vec<String>,
    /// A network of its own that has another prefix here than there, as in 10.1.0.0/16=192.168.0.0/16; may be repeated
    #[arg(long = "map", value_name = "HERE=THERE")]
    maps: Vec<String>,
    /// Its own address in the tunnel, by which routes name it with tun.routing = "kernel"; may be repeated
    #[arg(long = "address", value_name = "ADDRESS")]
    addresses: Vec<String>,
    /// Others may have its prefixes, too: the lowest that is connected carries them
    #[arg(long, value_name = "N")]
    priority: Option<u16>,
    /// Others may have its prefixes, too: its share among those of the same priority
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u16).range(1..=256))]
    weight: Option<u16>,
    /// A file with the preshared key of both ends, as culvert genpsk writes it; during a rotation twice, the new one first
    #[arg(long = "preshared-key-file", value_name = "FILE")]
    preshared_key_files: Vec<PathBuf>,
    /// How many lanes to open; 0 is one per worker
    #[arg(long, value_name = "N")]
    lanes: Option<u8>,
    /// Where to dial it, besides the address of its link; may be repeated
    #[arg(long = "endpoint", value_name = "HOST:PORT")]
    endpoints: Vec<String>,
    /// The limit on what we send to it, as in 20Mbit, or auto
    #[arg(long, value_name = "RATE")]
    rate: Option<String>,
    /// Take the place of the peer of this name, with what is given here alone; its session goes on unless the key is another one
    #[arg(long)]
    replace: bool,
    #[command(flatten)]
    reach: Reach,
    /// Say what was done as a JSON object
    #[arg(long)]
    json: bool,
}

/// Shut a peer out: its connections end, and its keys are not let in any more
///
/// `culvert peer add` with the same key lets it in again, at once.
///
/// If no daemon answers, the state file alone is changed. That ends no connection: unless it is certain that no daemon runs,
/// it ends with 1.
#[derive(Debug, Args)]
struct Remove {
    /// What it is called
    name: String,
    /// No daemon runs: a change of the state file alone is no failure
    #[arg(long)]
    offline: bool,
    #[command(flatten)]
    reach: Reach,
    /// Say what was done as a JSON object
    #[arg(long)]
    json: bool,
}

impl Peer {
    pub(super) fn execute(self) -> Result<(), Failure> {
        match self.command {
            Command::List(command) => command.execute(),
            Command::Add(command) => command.execute(),
            Command::Set(command) => command.execute(),
            Command::Export(command) => command.execute(),
            Command::Remove(command) => command.execute(),
        }
    }
}

impl List {
    fn execute(self) -> Result<(), Failure> {
        let (peers, offline) = match self.reach.ask(&Request::PeerList {})? {
            Reached::Answer(Answer::Peers { peers }) => (peers, None),
            Reached::Answer(_) => return Err(unexpected()),
            Reached::Offline(offline) => {
                let (config, _) = Config::load(&offline.file)?;
                let listed = |peer: &config::Peer| ListedPeer::new(peer, peer.origin.into(), &config);
                (config.peers.iter().map(listed).collect(), Some(offline))
            }
        };
        if self.names {
            return peers.iter().try_for_each(|peer| Ok(out::say(&peer.name)?));
        }
        if self.json {
            return Ok(out::say(
                &json!({ "version": VERSION, "running": offline.is_none(), "peers": peers }),
            )?);
        }
        let rows = rows(
            &peers,
            [
                ("NAME", |peer| peer.name.clone()),
                ("FROM", |peer| peer.origin.clone()),
                ("PUBLIC KEY", |peer| joined(&peer.public_keys)),
                ("DIALLED AT", |peer| joined(&peer.endpoints)),
                ("LANES", |peer| peer.lanes.to_string()),
                ("SERVICES", |peer| joined(&peer.services)),
                ("ALLOWED IPS", |peer| joined(&peer.allowed_ips)),
            ],
        );
        if peers.is_empty() {
            out::say(&"no peers: culvert peer add lets one in, as culvert init prints it there")?;
        } else {
            out::say(&table(&rows).trim_end())?;
        }
        if let Some(offline) = offline {
            out::complain(&format_args!("{offline}: these are the peers that it would start with"));
        }
        Ok(())
    }
}

fn joined(list: &[String]) -> String {
    if list.is_empty() { "-".to_owned() } else { list.join(",") }
}

impl Add {
    fn execute(self) -> Result<(), Failure> {
        let new = self.new_peer()?;
        let request =
            if self.replace { Request::PeerReplace(new.clone()) } else { Request::PeerAdd(new.clone()) };
        match self.reach.ask(&request)? {
            Reached::Answer(Answer::Done { note }) => {
                said("added", &new.name, None, note.as_deref(), self.json)
            }
            Reached::Answer(Answer::Reloaded { changes, notes }) if self.replace => {
                set::changed("replaced", &new.name, &changes, &notes, self.json)
            }
            Reached::Answer(_) => Err(unexpected()),
            Reached::Offline(offline) if self.replace => {
                let config = change_offline(&offline.file, &new.name, |edit| edit.replace(&new))?;
                let idle = state::idle_note(&config, &new).map(str::to_owned);
                let note = offline.caution(&config).or(idle);
                said("replaced", &new.name, Some(&offline), note.as_deref(), self.json)
            }
            Reached::Offline(offline) => {
                let config = add_offline(&offline.file, &new)?;
                let idle = state::idle_note(&config, &new).map(str::to_owned);
                let note = offline.caution(&config).or(idle);
                said("added", &new.name, Some(&offline), note.as_deref(), self.json)
            }
        }
    }

    fn new_peer(&self) -> Result<NewPeer, Failure> {
        let wrong = |error: &dyn std::error::Error, what: &str, remedy: &str| {
            Failure::Input(format!("{:?} is no {what}: {error} (remedy: {remedy})", self.link))
        };
        let (link_endpoint, key) = if self.link.contains("://") {
            let remedy = "copy what culvert link prints at the peer";
            let link: ShareLink = self.link.parse().map_err(|error| wrong(&error, "link", remedy))?;
            (Some(link.endpoint), link.key)
        } else {
            let remedy = "copy what culvert pubkey or culvert link prints at the peer";
            (None, self.link.parse::<PublicKey>().map_err(|error| wrong(&error, "public key", remedy))?)
        };
        let mut endpoints: Vec<String> = link_endpoint.iter().map(Endpoint::to_string).collect();
        endpoints.extend_from_slice(&self.endpoints);
        Ok(NewPeer {
            name: self.name.clone(),
            public_key: key.to_string(),
            endpoints,
            lanes: self.lanes,
            services: self.services.clone(),
            allowed_ips: self.allowed_ips.clone(),
            map: self.maps.clone(),
            address: self.addresses.clone(),
            priority: self.priority,
            weight: self.weight,
            rate: self.rate.clone(),
            preshared_key_file: self.preshared_key_files.iter().map(absolute).collect::<Result<_, _>>()?,
        })
    }
}

/// The path of a file as the daemon, which runs in another folder, finds it.
pub(super) fn absolute(file: &PathBuf) -> Result<String, Failure> {
    let path = std::path::absolute(file).map_err(|error| anyhow!("{}: {error}", file.display()))?;
    path.into_os_string().into_string().map_err(|path| {
        Failure::Input(format!("{} is not UTF-8 (remedy: choose another path)", path.display()))
    })
}

impl Remove {
    fn execute(self) -> Result<(), Failure> {
        match self.reach.ask(&Request::PeerRemove { name: self.name.clone() })? {
            Reached::Answer(Answer::Done { note }) => {
                said("removed", &self.name, None, note.as_deref(), self.json)
            }
            Reached::Answer(_) => Err(unexpected()),
            Reached::Offline(offline) => {
                let (note, config) = remove_offline(&offline.file, &self.name)?;
                let caution = offline.caution(&config).filter(|_| !self.offline);
                said("removed", &self.name, Some(&offline), note.as_deref(), self.json)?;
                caution.map_or(Ok(()), |caution| {
                    let remedy = "culvert reload, or restart the daemon, or say --offline if none runs";
                    Err(Failure::Runtime(anyhow!("{caution} (remedy: {remedy})")))
                })
            }
        }
    }
}

/// Says what was done; if no daemon answered, also that it is not effective before the next start.
fn said(
    what: &str,
    name: &str,
    offline: Option<&Offline>,
    note: Option<&str>,
    json: bool,
) -> Result<(), Failure> {
    if json {
        let done = json!({ "version": VERSION, "done": what, "peer": name, "running": offline.is_none(), "note": note });
        return Ok(out::say(&done)?);
    }
    match offline {
        None => out::say(&format_args!("{what} {name}: effective now"))?,
        Some(offline) => {
            let when = "in the state file, effective when the daemon starts";
            out::say(&format_args!("{what} {name}: {when} ({offline})"))?
        }
    }
    if let Some(note) = note {
        out::complain(&format_args!("note: {note}"));
    }
    Ok(())
}

/// Adds `new` to the state file of the configuration at `file`, if the agent would start with it.
fn add_offline(file: &Path, new: &NewPeer) -> Result<Config, Failure> {
    let (mut edit, config, identity) = edit(file, |edit| edit.text_without(&new.name))?;
    state::check(&config, &identity.public_keys(), &config.peers, new)
        .map_err(|problems| Failure::Input(problems.to_string()))?;
    edit.add(new)?;
    super::commit(edit)?;
    Ok(config)
}

/// Changes the peer `name` in the state file of the configuration at `file`, if the agent would start with the outcome.
fn change_offline(
    file: &Path,
    name: &str,
    change: impl FnOnce(&mut Edit) -> Result<(), state::StateError>,
) -> Result<Config, Failure> {
    let mut outcome = Ok(());
    let edited = edit(file, |edit| {
        outcome = change(edit);
        Ok(edit.text().to_owned())
    });
    let before = Config::load(file).ok();
    if let Some(refusal) = before.and_then(|(config, _)| peer_changes::of_a_file(&config, name)) {
        return Err(Failure::Input(refusal));
    }
    let (edit, config, _) = edited?;
    outcome.map_err(|error| Failure::Input(error.to_string()))?;
    super::commit(edit)?;
    Ok(config)
}

/// Takes the peer `name` out of the state file of the configuration at `file`; says what the operator should know.
fn remove_offline(file: &Path, name: &str) -> Result<(Option<String>, Config), Failure> {
    let mut found = false;
    // Its name is kept for as long as it is not known whether a forward needs it.
    let (mut edit, config, _) = edit(file, |edit| {
        found = edit.remove(name, true)?;
        Ok(edit.text().to_owned())
    })?;
    if !found {
        let known = config.peers.iter().find(|peer| *peer.name == *name);
        let remedy = match known.map(|peer| peer.origin) {
            Some(PeerOrigin::Config) => format!("remove its [[peer]] in {}", file.display()),
            Some(PeerOrigin::State) | None => "see culvert peer list".to_owned(),
        };
        return Err(Failure::Input(format!(
            "no peer of the state file is named {name:?} (remedy: {remedy})"
        )));
    }
    let named = config.forwards_to(name);
    if !named {
        edit.forget(name)?;
    }
    super::commit(edit)?;
    let as_guest = (config.access.mode == AccessMode::Open).then_some(AS_GUEST.to_owned());
    Ok((control_socket::joined([named.then(|| control_socket::still_named(name)), as_guest]), config))
}

/// Begins to edit the state file that belongs to the configuration at `file`, and checks that with the text that `change`
/// returns, as `culvert check` would.
fn edit(
    file: &Path,
    change: impl FnOnce(&mut Edit) -> Result<String, state::StateError>,
) -> Result<(Edit, Config, Identity), Failure> {
    let mut edit = None;
    let loaded = Config::load_with(file, |path| {
        let mut begun = Edit::begin(path).map_err(std::io::Error::other)?;
        // What is no TOML is reported by those who read it next.
        let text = change(&mut begun).unwrap_or_else(|_| begun.text().to_owned());
        edit = Some(begun);
        Ok(Some(text))
    });
    match (loaded, edit) {
        (Ok((config, identity)), Some(edit)) => Ok((edit, config, identity)),
        // Only where there is no state folder, nothing is read.
        (Ok(_), None) => Err(state::StateError::Nowhere.into()),
        (Err(error), _) => {
            // Problems that were there before are told with the lines of the file as it is.
            Config::load(file)?;
            Err(error.into())
        }
    }
}

#[cfg(test)]
mod tests {
    use clap::Parser as _;

    use super::*;

    #[derive(clap::Parser)]
    struct Line {
        #[command(subcommand)]
        command: Command,
    }

    fn added(args: &[&str]) -> Add {
        let line =
            Line::try_parse_from([&["peer", "add"], args].concat()).unwrap_or_else(|error| panic!("{error}"));
        let Command::Add(add) = line.command else { panic!("another command") };
        add
    }

    #[test]
    fn a_key_that_begins_with_a_hyphen_is_a_key() {
        for key in ["-hAAA", "-VAAA", "-3AAA", "--AAA", "-AAAA"] {
            for args in [
                &["a", key][..],
                &["a", key, "--service", "dns"],
                &["a", "--service", "dns", key],
                &["--service", "dns", "a", key],
            ] {
                assert_eq!(added(args).link, key, "{args:?}");
            }
        }
    }

    #[test]
    fn the_endpoint_of_a_link_comes_first() {
        let key = Identity::generate().unwrap().public_key();
        let new = added(&["a", &format!("culvert://[::1]:1/{key}"), "--endpoint", "b:2", "--lanes", "4"]);
        let Ok(new) = new.new_peer() else { panic!("it is a link") };
        assert_eq!(
            (new.public_key, new.endpoints),
            (key.to_string(), vec!["[::1]:1".to_owned(), "b:2".to_owned()])
        );
        assert_eq!((new.lanes, new.allowed_ips), (Some(4), Vec::<String>::new()));
        let more = ["--allowed-ip", "10.9.0.2", "--allowed-ip", "fd09::2/128"];
        let Ok(new) = added(&[&["a", &key.to_string()], &more[..]].concat()).new_peer() else {
            panic!("a key")
        };
        assert_eq!(new.allowed_ips, ["10.9.0.2", "fd09::2/128"]);
    }
}
