//! `culvert peer set`

use std::{
    collections::{BTreeMap, BTreeSet},
    path::PathBuf,
};

use clap::Args;
use config::{
    quota::parse_bytes,
    state::{KeyValue, PeerChange},
};
use gate::identity::PublicKey;
use ops::control_socket::protocol::{Answer, Request, ShownChange, VERSION};
use serde_json::json;

use super::{
    super::{
        Failure,
        reach::{Reach, Reached, unexpected},
        reload::shown,
    },
    absolute, change_offline, said,
};
use crate::out;

/// What is not given beside `--quota-used`: it is of the state file, and of its peers only.
const QUOTA_ALONE: [&str; 13] = [
    "services",
    "allowed_ips",
    "maps",
    "addresses",
    "endpoints",
    "key",
    "preshared_key_files",
    "priority",
    "weight",
    "lanes",
    "rate",
    "rate_receive",
    "unset",
];

/// Change a peer of the state file; its session goes on
///
/// A list takes +X (one more), -X (one less), =X,Y (exactly these; = alone: none), or X by itself, repeated for several. The
/// answer says what is in effect now. Only another key ends the session, or preshared keys of which the peer has none.
#[derive(Debug, Args)]
pub(super) struct Set {
    /// What it is called
    name: String,
    /// Services of ours that it may use
    #[arg(long = "service", value_name = "[+-=]NAME", allow_hyphen_values = true)]
    services: Vec<String>,
    /// Inner addresses or prefixes of its own
    #[arg(long = "allowed-ip", value_name = "[+-=]PREFIX", allow_hyphen_values = true)]
    allowed_ips: Vec<String>,
    /// A network of its own that has another prefix here than there
    #[arg(long = "map", value_name = "[+-=]HERE=THERE", allow_hyphen_values = true)]
    maps: Vec<String>,
    /// Its own addresses in the tunnel, for tun.routing = "kernel"
    #[arg(long = "address", value_name = "[+-=]ADDRESS", allow_hyphen_values = true)]
    addresses: Vec<String>,
    /// Where to dial it
    #[arg(long = "endpoint", value_name = "[+-=]HOST:PORT", allow_hyphen_values = true)]
    endpoints: Vec<String>,
    /// Its public key from now on: ends a session under the old one
    // One key in 64 begins with '-'.
    #[arg(long, value_name = "KEY", allow_hyphen_values = true)]
    key: Option<String>,
    /// A file with the preshared key of both ends; during a rotation twice, the new one first
    #[arg(long = "preshared-key-file", value_name = "FILE")]
    preshared_key_files: Vec<PathBuf>,
    /// Others may have its prefixes, too: the lowest that is connected carries them
    #[arg(long, value_name = "N")]
    priority: Option<u16>,
    /// Others may have its prefixes, too: its share among those of the same priority
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u16).range(1..=256))]
    weight: Option<u16>,
    /// How many lanes to open, with the next connection; 0 is one per worker
    #[arg(long, value_name = "N")]
    lanes: Option<u8>,
    /// The limit on what we send to it, as in 20Mbit, or auto
    #[arg(long, value_name = "RATE")]
    rate: Option<String>,
    /// The limit on what it sends to us
    #[arg(long, value_name = "RATE")]
    rate_receive: Option<String>,
    /// The bytes that it has carried in this month, as in 0 or 12GB, which count against peer.quota; any peer's, and alone
    #[arg(long, value_name = "BYTES", conflicts_with_all = QUOTA_ALONE)]
    quota_used: Option<String>,
    /// A key of its [[peer]] that is at its default again, as in rate; may be repeated
    #[arg(long, value_name = "KEY")]
    unset: Vec<String>,
    #[command(flatten)]
    reach: Reach,
    /// Say what was done as a JSON object
    #[arg(long)]
    json: bool,
}

impl Set {
    pub(super) fn execute(self) -> Result<(), Failure> {
        if let Some(used) = &self.quota_used {
            return self.set_quota_used(used);
        }
        let change = self.change()?;
        match self.reach.ask(&Request::PeerSet(change.clone()))? {
            Reached::Answer(Answer::Reloaded { changes, notes }) => {
                changed("changed", &self.name, &changes, &notes, self.json)
            }
            Reached::Answer(_) => Err(unexpected()),
            Reached::Offline(offline) => {
                let config = change_offline(&offline.file, &self.name, |edit| edit.set(&change))?;
                let note = offline.caution(&config);
                said("changed", &self.name, Some(&offline), note.as_deref(), self.json)
            }
        }
    }

    /// Needs the daemon, which keeps the count.
    fn set_quota_used(&self, used: &str) -> Result<(), Failure> {
        let used_bytes = parse_bytes(used).ok_or_else(|| {
            Failure::Input(format!("{used:?} is no number of bytes (remedy: write 0, or as in 12GB)"))
        })?;
        let request = Request::PeerQuota { name: self.name.clone(), used_bytes };
        let Answer::Done { note } = self.reach.ask_running(&request)? else { return Err(unexpected()) };
        said("changed", &self.name, None, note.as_deref(), self.json)
    }

    fn change(&self) -> Result<PeerChange, Failure> {
        let mut change = PeerChange { name: self.name.clone(), ..PeerChange::default() };
        let lists = [
            ("services", &self.services),
            ("allowed_ips", &self.allowed_ips),
            ("map", &self.maps),
            ("address", &self.addresses),
            ("endpoints", &self.endpoints),
        ];
        for (key, values) in lists {
            Elements::of(values).into_change(key, &mut change);
        }
        if let Some(text) = &self.key {
            let key: PublicKey = text.parse().map_err(|error| {
                let remedy = "copy what culvert pubkey or culvert link prints at the peer";
                Failure::Input(format!("{text:?} is no public key: {error} (remedy: {remedy})"))
            })?;
            change.set.insert("public_key".to_owned(), KeyValue::Text(key.to_string()));
        }
        if !self.preshared_key_files.is_empty() {
            let files = self.preshared_key_files.iter().map(absolute).collect::<Result<_, _>>()?;
            change.set.insert("preshared_key_file".to_owned(), KeyValue::List(files));
        }
        let numbers = [
            ("priority", self.priority.map(u32::from)),
            ("weight", self.weight.map(u32::from)),
            ("lanes", self.lanes.map(u32::from)),
        ];
        for (key, number) in numbers {
            change.set.extend(number.map(|number| (key.to_owned(), KeyValue::Number(number))));
        }
        for (key, text) in [("rate", &self.rate), ("rate_receive", &self.rate_receive)] {
            change.set.extend(text.as_ref().map(|text| (key.to_owned(), KeyValue::Text(text.clone()))));
        }
        change.unset = self.unset.iter().cloned().collect();
        let given: BTreeSet<&String> =
            change.set.keys().chain(change.remove.keys()).chain(change.add.keys()).collect();
        if let Some(both) = change.unset.iter().find(|key| given.contains(key)) {
            let problem = format!("{both:?} is to be changed and to be left out (remedy: one of the two)");
            return Err(Failure::Input(problem));
        }
        if change == (PeerChange { name: self.name.clone(), ..PeerChange::default() }) {
            let remedy = "say what, as in --allowed-ip +10.3.0.0/16; culvert peer set --help";
            return Err(Failure::Input(format!("nothing is to be changed (remedy: {remedy})")));
        }
        Ok(change)
    }
}

/// What is asked of one list.
#[derive(Default)]
pub(in crate::cli) struct Elements {
    /// All that it has from now on.
    exactly: Option<Vec<String>>,
    remove: Vec<String>,
    add: Vec<String>,
}

impl Elements {
    pub(in crate::cli) fn of(values: &[String]) -> Self {
        let mut elements = Self::default();
        for value in values {
            if let Some(more) = value.strip_prefix('+') {
                elements.add.push(more.to_owned());
            } else if let Some(less) = value.strip_prefix('-') {
                elements.remove.push(less.to_owned());
            } else {
                let list = value.strip_prefix('=').unwrap_or(value).split(',');
                let list = list.filter(|element| !element.is_empty()).map(str::to_owned);
                elements.exactly.get_or_insert_default().extend(list);
            }
        }
        elements
    }

    pub(in crate::cli) fn into_change(self, key: &str, change: &mut PeerChange) {
        change.set.extend(self.exactly.map(|list| (key.to_owned(), KeyValue::List(list))));
        let lists = |of: &mut BTreeMap<String, Vec<String>>, list: Vec<String>| {
            if !list.is_empty() {
                of.insert(key.to_owned(), list);
            }
        };
        lists(&mut change.remove, self.remove);
        lists(&mut change.add, self.add);
    }
}

/// Says what a change of a peer has done in the running daemon.
pub(super) fn changed(
    what: &str,
    name: &str,
    changes: &[ShownChange],
    notes: &[String],
    json: bool,
) -> Result<(), Failure> {
    if json {
        let done = json!({
            "version": VERSION, "done": what, "peer": name, "running": true, "changes": changes, "notes": notes,
        });
        return Ok(out::say(&done)?);
    }
    Ok(out::say(&shown(changes, notes, false).trim_end())?)
}

#[cfg(test)]
mod tests {
    use clap::Parser as _;

    use super::*;

    #[derive(clap::Parser)]
    struct Line {
        #[command(flatten)]
        set: Set,
    }

    fn change(args: &[&str]) -> Result<PeerChange, Failure> {
        let line =
            Line::try_parse_from([&["set", "b"], args].concat()).unwrap_or_else(|error| panic!("{error}"));
        line.set.change()
    }

    fn list(texts: &[&str]) -> Vec<String> {
        texts.iter().map(|text| (*text).to_owned()).collect()
    }

    #[test]
    fn lists_are_changed_by_signs_and_replaced_without() {
        let args = [
            "--allowed-ip",
            "-10.3.0.0/16",
            "--allowed-ip",
            "+fd09::/64",
            "--service",
            "=dns,web",
            "--endpoint",
            "=",
        ];
        let Ok(asked) = change(&args) else { panic!("it is right") };
        assert_eq!(asked.remove, BTreeMap::from([("allowed_ips".to_owned(), list(&["10.3.0.0/16"]))]));
        assert_eq!(asked.add, BTreeMap::from([("allowed_ips".to_owned(), list(&["fd09::/64"]))]));
        let services = KeyValue::List(list(&["dns", "web"]));
        let endpoints = KeyValue::List(Vec::new());
        let expected = [("endpoints".to_owned(), endpoints), ("services".to_owned(), services.clone())];
        assert_eq!(asked.set, BTreeMap::from(expected));
        let Ok(plain) = change(&["--service", "dns", "--service", "web"]) else { panic!("it is right") };
        assert_eq!(plain.set, BTreeMap::from([("services".to_owned(), services)]));
    }

    #[test]
    fn keys_are_set_and_unset_and_nothing_is_refused() {
        let Ok(asked) = change(&["--rate", "5Mbit", "--lanes", "2", "--unset", "weight"]) else {
            panic!("it is right")
        };
        let rate = ("rate".to_owned(), KeyValue::Text("5Mbit".to_owned()));
        assert_eq!(asked.set, BTreeMap::from([("lanes".to_owned(), KeyValue::Number(2)), rate]));
        assert_eq!(asked.unset, BTreeSet::from(["weight".to_owned()]));
        for wrong in [&[][..], &["--rate", "5Mbit", "--unset", "rate"], &["--key", "-AAA"]] {
            assert!(
                matches!(change(wrong), Err(Failure::Input(problem)) if problem.contains("(remedy: ")),
                "{wrong:?}"
            );
        }
    }
}
