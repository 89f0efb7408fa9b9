//! `culvert user`: users of the web server, who have a password or a certificate.

use std::path::{Path, PathBuf};

use anyhow::Context as _;
use clap::{Args, Subcommand};
use config::{
    Config, NewUser,
    state::{self, Edit, KeyValue, PeerChange},
};
use gate::password::PasswordKey;
use ops::control_socket::{
    protocol::{Answer, Request, ShownChange, VERSION},
    status::{bit_rate, rows, table},
    user_changes::{self, ListedUser, exported},
};
use serde_json::json;
use zeroize::Zeroizing;

use super::{
    Failure,
    peer::set::Elements,
    reach::{DEFAULT_CONFIG, Offline, Reach, Reached, unexpected},
    reload::shown,
    user_credentials::{Hash, chosen, client_key},
};
use crate::out;

/// List, add, change and remove users of the web server, effective at once if the daemon runs
#[derive(Debug, Args)]
pub(super) struct User {
    #[command(subcommand)]
    command: Command,
}

#[derive(Debug, Subcommand)]
enum Command {
    List(List),
    Add(Add),
    Set(Set),
    Export(Export),
    Hash(Hash),
    Remove(Remove),
}

/// Show the users of the configuration and of the state file
#[derive(Debug, Args)]
struct List {
    #[command(flatten)]
    reach: Reach,
    /// One JSON object, as docs/status.md describes it
    #[arg(long)]
    json: bool,
}

/// Let a user in, keep it in the state file, and show its password, once
///
/// Without one of the two options below that say otherwise, the password is made.
#[derive(Debug, Args)]
struct Add {
    /// What to call it
    name: String,
    /// A service of ours that it may reach; may be repeated
    #[arg(long = "service", value_name = "NAME")]
    services: Vec<String>,
    /// A network that it may reach, as in 10.1.0.0/16 or 0.0.0.0/0:443; may be repeated
    #[arg(long = "network", value_name = "PREFIX[:PORT]")]
    networks: Vec<String>,
    /// An inner address of http.pool that it has for good over CONNECT-IP; one of each family
    #[arg(long = "address", value_name = "ADDRESS")]
    addresses: Vec<String>,
    /// What may pass in each direction, as in 20Mbit
    #[arg(long, value_name = "RATE")]
    rate: Option<String>,
    /// From when on it is let in no more, as in 2027-01-31
    #[arg(long, value_name = "TIME")]
    expires: Option<String>,
    /// Let it in with a certificate: sha256: and the hash of its public key, or a file with the certificate (PEM)
    #[arg(long, value_name = "HASH|FILE")]
    client_key: Option<String>,
    /// Read a password that a person has chosen from standard input, and keep its Argon2id hash
    #[arg(long)]
    password_from_stdin: bool,
    #[command(flatten)]
    reach: Reach,
    /// Say what was done as a JSON object
    #[arg(long)]
    json: bool,
}

/// Change a user of the state file; what it may not have any more ends at once
#[derive(Debug, Args)]
struct Set {
    /// Which user
    name: String,
    /// Services: +NAME adds one, -NAME takes one out, and NAME,NAME or =NAME,NAME are all of them; may be repeated
    #[arg(long = "service", value_name = "[+-=]NAME", allow_hyphen_values = true)]
    services: Vec<String>,
    /// Networks, likewise
    #[arg(long = "network", value_name = "[+-=]PREFIX[:PORT]", allow_hyphen_values = true)]
    networks: Vec<String>,
    /// Inner addresses, likewise
    #[arg(long = "address", value_name = "[+-=]ADDRESS", allow_hyphen_values = true)]
    addresses: Vec<String>,
    /// What may pass in each direction, as in 20Mbit; none: as much as there is time for
    #[arg(long, value_name = "RATE")]
    rate: Option<String>,
    /// From when on it is let in no more, as in 2027-01-31; never: as long as it is there
    #[arg(long, value_name = "TIME")]
    expires: Option<String>,
    /// Shut it out for now
    #[arg(long, conflicts_with = "enable")]
    disable: bool,
    /// Let it in again
    #[arg(long)]
    enable: bool,
    /// Let it in with a certificate: sha256: and the hash of its public key, or a file with the certificate (PEM); none: no more
    #[arg(long, value_name = "HASH|FILE|none")]
    client_key: Option<String>,
    /// Make another password, and show it, once
    #[arg(long)]
    new_password: bool,
    /// Read a password that a person has chosen from standard input, and keep its Argon2id hash
    #[arg(long, conflicts_with = "new_password")]
    password_from_stdin: bool,
    #[command(flatten)]
    reach: Reach,
    /// Say what was done as a JSON object
    #[arg(long)]
    json: bool,
}

/// Print the [[user]] of a user, or of all, as a configuration file has it
#[derive(Debug, Args)]
struct Export {
    /// Which user; without it: all of both files
    name: Option<String>,
    #[command(flatten)]
    reach: Reach,
}

/// Shut a user out: what it has open ends
///
/// If no daemon answers, the state file alone is changed.
#[derive(Debug, Args)]
struct Remove {
    /// Which user
    name: String,
    #[command(flatten)]
    reach: Reach,
    /// Say what was done as a JSON object
    #[arg(long)]
    json: bool,
}

impl User {
    pub(super) fn execute(self) -> Result<(), Failure> {
        match self.command {
            Command::List(command) => command.execute(),
            Command::Add(command) => command.execute(),
            Command::Set(command) => command.execute(),
            Command::Export(command) => command.execute(),
            Command::Hash(command) => command.execute(),
            Command::Remove(command) => command.execute(),
        }
    }
}

impl List {
    fn execute(self) -> Result<(), Failure> {
        let (users, offline) = match self.reach.ask(&Request::UserList {})? {
            Reached::Answer(Answer::Users { users }) => (users, None),
            Reached::Answer(_) => return Err(unexpected()),
            Reached::Offline(offline) => {
                let (config, _) = Config::load(&offline.file)?;
                let users = config.users.iter().map(|user| ListedUser::new(user, &config));
                (users.collect(), Some(offline))
            }
        };
        if self.json {
            return Ok(out::say(
                &json!({ "version": VERSION, "running": offline.is_none(), "users": users }),
            )?);
        }
        let rows = rows(
            &users,
            [
                ("NAME", |user: &&ListedUser| user.name.clone()),
                ("FROM", |user| user.origin.clone()),
                ("SERVICES", |user| joined(&user.services)),
                ("NETWORKS", |user| joined(&user.networks)),
                ("WITH", |user| joined(&user.credentials)),
                ("RATE", |user| user.rate_bits_per_second.map_or_else(|| "-".to_owned(), bit_rate)),
                ("EXPIRES", |user| user.expires.map_or_else(|| "-".to_owned(), day)),
                ("STATE", |user| if user.disabled { "disabled" } else { "" }.to_owned()),
            ],
        );
        out::say(&table(&rows).trim_end())?;
        if let Some(offline) = offline {
            out::complain(&format_args!("{offline}: these are the users that it would start with"));
        }
        Ok(())
    }
}

fn joined(list: &[String]) -> String {
    if list.is_empty() { "-".to_owned() } else { list.join(",") }
}

fn day(seconds: u64) -> String {
    let time = std::time::UNIX_EPOCH + std::time::Duration::from_secs(seconds);
    humantime::format_rfc3339_seconds(time).to_string()
}

/// A password that was made, and what is kept of it.
fn password() -> Result<(PasswordKey, Zeroizing<String>), Failure> {
    Ok(PasswordKey::generate().context("cannot make a password")?)
}

impl Add {
    fn execute(self) -> Result<(), Failure> {
        let chosen = self.password_from_stdin.then(chosen).transpose()?;
        let client_key = self.client_key.as_deref().map(client_key).transpose()?;
        let made = (chosen.is_none() && client_key.is_none()).then(password).transpose()?;
        let new = NewUser {
            name: self.name.clone(),
            password_key: made.as_ref().map(|(key, _)| key.to_string()),
            password_hash: chosen.map(|hash| hash.to_string()),
            client_key: client_key.map(|key| key.to_string()),
            services: self.services,
            networks: self.networks,
            addresses: self.addresses,
            rate: self.rate,
            expires: self.expires,
            disabled: false,
        };
        let offline = match self.reach.ask(&Request::UserAdd(new.clone()))? {
            Reached::Answer(Answer::Reloaded { .. }) => None,
            Reached::Answer(_) => return Err(unexpected()),
            Reached::Offline(offline) => {
                change_offline(&offline.file, &new.name, |edit| edit.add_user(&new))?;
                Some(offline)
            }
        };
        let password = made.as_ref().map(|(_, password)| password);
        let said = Said { what: "added", name: &self.name, password, json: self.json };
        said.say(offline.as_ref(), &[], &self.reach)
    }
}

impl Set {
    fn execute(self) -> Result<(), Failure> {
        let made = self.new_password.then(password).transpose()?;
        let change = self.change(made.as_ref().map(|(key, _)| key))?;
        let (changes, offline) = match self.reach.ask(&Request::UserSet(change.clone()))? {
            Reached::Answer(Answer::Reloaded { changes, .. }) => (changes, None),
            Reached::Answer(_) => return Err(unexpected()),
            Reached::Offline(offline) => {
                change_offline(&offline.file, &self.name, |edit| edit.set_user(&change))?;
                (Vec::new(), Some(offline))
            }
        };
        let password = made.as_ref().map(|(_, password)| password);
        let said = Said { what: "changed", name: &self.name, password, json: self.json };
        said.say(offline.as_ref(), &changes, &self.reach)
    }

    fn change(&self, key: Option<&PasswordKey>) -> Result<PeerChange, Failure> {
        let mut change = PeerChange { name: self.name.clone(), ..PeerChange::default() };
        for (key, values) in
            [("services", &self.services), ("networks", &self.networks), ("address", &self.addresses)]
        {
            Elements::of(values).into_change(key, &mut change);
        }
        match self.expires.as_deref() {
            Some("never") => drop(change.unset.insert("expires".to_owned())),
            Some(time) => drop(change.set.insert("expires".to_owned(), KeyValue::Text(time.to_owned()))),
            None => {}
        }
        match self.rate.as_deref() {
            Some("none") => drop(change.unset.insert("rate".to_owned())),
            Some(rate) => drop(change.set.insert("rate".to_owned(), KeyValue::Text(rate.to_owned()))),
            None => {}
        }
        if self.disable || self.enable {
            change.set.insert("disabled".to_owned(), KeyValue::Switch(self.disable));
        }
        self.change_credentials(key, &mut change)?;
        if change == (PeerChange { name: self.name.clone(), ..PeerChange::default() }) {
            let remedy = "say what, as in --network +10.3.0.0/16; culvert user set --help";
            return Err(Failure::Input(format!("nothing is to be changed (remedy: {remedy})")));
        }
        Ok(change)
    }

    fn change_credentials(&self, made: Option<&PasswordKey>, change: &mut PeerChange) -> Result<(), Failure> {
        let chosen = self.password_from_stdin.then(chosen).transpose()?;
        let passwords = [
            ("password_key", "password_hash", made.map(ToString::to_string)),
            ("password_hash", "password_key", chosen.map(|hash| hash.to_string())),
        ];
        for (key, other, value) in passwords {
            if let Some(value) = value {
                change.set.insert(key.to_owned(), KeyValue::Text(value));
                change.unset.insert(other.to_owned());
            }
        }
        match self.client_key.as_deref() {
            Some("none") => drop(change.unset.insert("client_key".to_owned())),
            Some(text) => {
                let key = client_key(text)?.to_string();
                change.set.insert("client_key".to_owned(), KeyValue::Text(key));
            }
            None => {}
        }
        Ok(())
    }
}

impl Export {
    fn execute(self) -> Result<(), Failure> {
        let text = match self.reach.ask(&Request::UserExport { name: self.name.clone() })? {
            Reached::Answer(Answer::Exported { text }) => text,
            Reached::Answer(_) => return Err(unexpected()),
            Reached::Offline(offline) => {
                let (config, _) = Config::load(&offline.file)?;
                exported(&config, self.name.as_deref()).map_err(Failure::Input)?
            }
        };
        Ok(out::say(&text.trim_end())?)
    }
}

impl Remove {
    fn execute(self) -> Result<(), Failure> {
        let offline = match self.reach.ask(&Request::UserRemove { name: self.name.clone() })? {
            Reached::Answer(Answer::Reloaded { .. }) => None,
            Reached::Answer(_) => return Err(unexpected()),
            Reached::Offline(offline) => {
                let mut found = false;
                change_offline(&offline.file, &self.name, |edit| {
                    found = edit.remove_user(&self.name)?;
                    Ok(())
                })?;
                if !found {
                    let remedy = "see culvert user list";
                    let problem =
                        format!("no user of the state file is named {:?} (remedy: {remedy})", self.name);
                    return Err(Failure::Input(problem));
                }
                Some(offline)
            }
        };
        let said = Said { what: "removed", name: &self.name, password: None, json: self.json };
        said.say(offline.as_ref(), &[], &self.reach)
    }
}

/// What was done, for people or for a program.
struct Said<'s> {
    what: &'static str,
    name: &'s str,
    password: Option<&'s Zeroizing<String>>,
    json: bool,
}

impl Said<'_> {
    fn say(&self, offline: Option<&Offline>, changes: &[ShownChange], reach: &Reach) -> Result<(), Failure> {
        let Self { what, name, password, json } = self;
        let config = offline.and_then(|offline| Config::load(&offline.file).ok()).map(|(config, _)| config);
        let note = match (offline, &config) {
            (Some(offline), Some(config)) => offline.caution(config),
            (Some(_), None) | (None, _) => None,
        };
        if *json {
            let password = password.map(|password| password.as_str());
            return Ok(out::say(&json!({
                "version": VERSION, "done": what, "user": name, "running": offline.is_none(), "password": password, "note": note,
            }))?);
        }
        match offline {
            None if changes.is_empty() => out::say(&format_args!("{what} {name}: effective now"))?,
            None => out::say(&shown(changes, &[], false).trim_end())?,
            Some(offline) => {
                let when = "in the state file, effective when the daemon starts";
                out::say(&format_args!("{what} {name}: {when} ({offline})"))?;
            }
        }
        if let Some(password) = password {
            let config = config.or_else(|| reach.configuration());
            out::say(&format_args!("{}", instructions(name, password, config.as_ref())))?;
        }
        if let Some(note) = note {
            out::complain(&format_args!("note: {note}"));
        }
        Ok(())
    }
}

/// The password, and a line for each kind of client.
fn instructions(name: &str, password: &str, config: Option<&Config>) -> String {
    let host = config.and_then(|config| config.http.names.first()).map_or("gw.example.net", |name| name);
    let port = config.and_then(|config| config.transport.listen.first()).map_or(443, |listen| listen.port());
    let basic = basic(name, password);
    format!(
        "password, shown this once: {password}\n\
         proxy:                     https://{name}:{password}@{host}:{port}\n\
         curl --proxy-http3:        --proxy https://{host}:{port} --proxy-header \"proxy-authorization: Basic {basic}\"\n\
         CONNECT-UDP (RFC 9298):    https://{host}:{port}/.well-known/masque/udp/{{target_host}}/{{target_port}}/\n\
         CONNECT-IP (RFC 9484):     https://{host}:{port}/.well-known/masque/ip/{{target}}/{{ipproto}}/\n\
         field of each request:     proxy-authorization: Basic {basic}"
    )
}

/// Basic credentials (RFC 7617).
fn basic(name: &str, password: &str) -> String {
    data_encoding::BASE64.encode(format!("{name}:{password}").as_bytes())
}

impl Reach {
    /// The configuration of the daemon that was asked, if this user may read it.
    fn configuration(&self) -> Option<Config> {
        let file = self.file().map_or_else(|| PathBuf::from(DEFAULT_CONFIG), Path::to_owned);
        Config::load(&file).ok().map(|(config, _)| config)
    }
}

/// Changes the state file of the configuration at `file`, if the agent would start with the outcome.
fn change_offline(
    file: &Path,
    name: &str,
    change: impl FnOnce(&mut Edit) -> Result<(), state::StateError>,
) -> Result<(), Failure> {
    let (config, _) = Config::load(file)?;
    if let Some(refusal) = user_changes::of_configuration(&config, name) {
        return Err(Failure::Input(refusal));
    }
    if config.state_dir.as_os_str().is_empty() {
        return Err(state::StateError::Nowhere.into());
    }
    let mut edit = Edit::begin(&config.state_dir.join(state::FILE_NAME))?;
    change(&mut edit).map_err(|error| Failure::Input(error.to_string()))?;
    state::users(&config, edit.text()).map_err(|problems| Failure::Input(problems.to_string()))?;
    super::commit(edit)?;
    Ok(())
}

#[cfg(test)]
mod tests {
    use std::collections::{BTreeMap, BTreeSet};

    use clap::Parser as _;

    use super::*;

    #[derive(clap::Parser)]
    struct Line {
        #[command(flatten)]
        set: Set,
    }

    fn change(args: &[&str]) -> Result<PeerChange, Failure> {
        let line =
            Line::try_parse_from([&["set", "anna"], args].concat()).unwrap_or_else(|error| panic!("{error}"));
        line.set.change(None)
    }

    #[test]
    fn what_is_to_be_changed() {
        let Ok(asked) = change(&[
            "--network",
            "+10.3.0.0/16",
            "--network",
            "-10.1.0.0/16",
            "--expires",
            "never",
            "--disable",
        ]) else {
            panic!("it is right")
        };
        let list = |text: &str| BTreeMap::from([("networks".to_owned(), vec![text.to_owned()])]);
        assert_eq!((asked.add, asked.remove), (list("10.3.0.0/16"), list("10.1.0.0/16")));
        assert_eq!(asked.unset, BTreeSet::from(["expires".to_owned()]));
        assert_eq!(asked.set, BTreeMap::from([("disabled".to_owned(), KeyValue::Switch(true))]));
        assert!(matches!(change(&[]), Err(Failure::Input(problem)) if problem.contains("(remedy: ")));
    }

    #[test]
    fn the_lines_for_clients_name_user_and_password() {
        let text = instructions("anna", "secret", None);
        assert!(text.contains("https://anna:secret@gw.example.net:443\n"));
        // RFC 7617 §2's form.
        assert!(text.ends_with("Basic YW5uYTpzZWNyZXQ="), "{text}");
    }
}
