//! A change of one peer or one user of the state file: what `culvert peer set` and `culvert user set` ask for.

use std::collections::{BTreeMap, BTreeSet};

use serde::{Deserialize, Serialize};
use toml::{Table, Value};

use crate::{map::mapping, prefix::allowed_prefix, state::StateError};

/// A change of a peer or a user of the state file, not checked yet. On the control socket it is the JSON of `peer-set` and `user-set`.
///
/// First `set` and `unset`, then `remove`, then `add`: each of them is about keys of its `[[peer]]` or `[[user]]`.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct PeerChange {
    pub name: String,
    /// The keys that have these values from now on.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub set: BTreeMap<String, KeyValue>,
    /// The keys that are left out from now on.
    #[serde(default, skip_serializing_if = "BTreeSet::is_empty")]
    pub unset: BTreeSet<String>,
    /// What is taken out of lists.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub remove: BTreeMap<String, Vec<String>>,
    /// What lists get, unless they have it.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub add: BTreeMap<String, Vec<String>>,
}

/// The value that a key is given.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(untagged)]
pub enum KeyValue {
    Switch(bool),
    Number(u32),
    Text(String),
    List(Vec<String>),
}

impl KeyValue {
    fn to_toml(&self) -> Value {
        match self {
            Self::Switch(on) => (*on).into(),
            Self::Number(number) => i64::from(*number).into(),
            Self::Text(text) => text.as_str().into(),
            Self::List(list) => list.clone().into(),
        }
    }
}

impl PeerChange {
    /// Makes the change in the table of the peer; the outcome is to be checked.
    ///
    /// # Errors
    /// A list has not what is to be taken out.
    pub(super) fn apply(&self, peer: &mut Table) -> Result<(), StateError> {
        for (key, value) in &self.set {
            peer.insert(key.clone(), value.to_toml());
        }
        for key in &self.unset {
            peer.remove(key);
        }
        for (key, values) in &self.remove {
            let mut list = texts_of(peer.get(key));
            for value in values {
                let Some(place) = list.iter().position(|has| is_same(key, has, value)) else {
                    let (name, key, value) = (self.name.clone(), key.clone(), value.clone());
                    return Err(StateError::NotThere { name, key, value, has: list });
                };
                list.remove(place);
            }
            peer.insert(key.clone(), list.into());
        }
        for (key, values) in &self.add {
            let mut list = texts_of(peer.get(key));
            for value in values {
                if !list.iter().any(|has| is_same(key, has, value)) {
                    list.push(value.clone());
                }
            }
            peer.insert(key.clone(), list.into());
        }
        // A list without elements is written by leaving its key out.
        peer.retain(|_, value| value.as_array().is_none_or(|list| !list.is_empty()));
        Ok(())
    }
}

/// The texts of a key, whether it is one or a list.
fn texts_of(value: Option<&Value>) -> Vec<String> {
    let list = value.and_then(Value::as_array).into_iter().flatten();
    value.into_iter().chain(list).filter_map(Value::as_str).map(str::to_owned).collect()
}

/// Whether two elements of a list mean the same, however they are written.
fn is_same(key: &str, one: &str, other: &str) -> bool {
    let net = |text: &str| allowed_prefix(text).ok().filter(|_| key == "allowed_ips");
    let map = |text: &str| mapping(text).ok().filter(|_| key == "map");
    one == other
        || net(one).is_some_and(|one| net(other) == Some(one))
        || map(one).is_some_and(|one| map(other) == Some(one))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn changed(before: &str, change: &PeerChange) -> Result<String, StateError> {
        let mut table: Table = before.parse().unwrap_or_else(|error| panic!("{before}: {error}"));
        change.apply(&mut table).map(|()| table.to_string())
    }

    fn lists(key: &str, values: &[&str]) -> BTreeMap<String, Vec<String>> {
        BTreeMap::from([(key.to_owned(), values.iter().map(|value| (*value).to_owned()).collect())])
    }

    #[test]
    fn lists_get_and_lose_elements_however_they_are_written() {
        let before = "allowed_ips = [\"10.9.0.2\", \"10.3.0.0/16\"]\n";
        let change = PeerChange {
            remove: lists("allowed_ips", &["10.9.0.2/32"]),
            add: lists("allowed_ips", &["10.3.0.0/16", "fd09::2"]),
            ..PeerChange::default()
        };
        assert_eq!(changed(before, &change).unwrap(), "allowed_ips = [\"10.3.0.0/16\", \"fd09::2\"]\n");
        let all = PeerChange {
            remove: lists("allowed_ips", &["10.9.0.2", "10.3.0.0/16"]),
            ..PeerChange::default()
        };
        assert_eq!(changed(before, &all).unwrap(), "", "an empty list is left out");
        let map = PeerChange {
            remove: lists("map", &["10.1.0.0/16=192.168.0.0/16"]),
            add: lists("map", &["10.2.0.0/16 = 172.16.0.0/16"]),
            ..PeerChange::default()
        };
        let before = "map = [\"10.1.0.0/16 = 192.168.0.0/16\"]\n";
        assert_eq!(changed(before, &map).unwrap(), "map = [\"10.2.0.0/16 = 172.16.0.0/16\"]\n");
        let none =
            PeerChange { name: "b".to_owned(), remove: lists("services", &["dns"]), ..PeerChange::default() };
        let error = changed("services = \"web\"\n", &none).unwrap_err().to_string();
        assert_eq!(error, "services of \"b\" has no \"dns\" (remedy: it has [\"web\"])");
    }

    #[test]
    fn keys_are_set_and_left_out() {
        let change = PeerChange {
            set: BTreeMap::from([
                ("lanes".to_owned(), KeyValue::Number(4)),
                ("rate".to_owned(), KeyValue::Text("5Mbit".to_owned())),
                ("services".to_owned(), KeyValue::List(Vec::new())),
            ]),
            unset: BTreeSet::from(["weight".to_owned()]),
            ..PeerChange::default()
        };
        let before = "lanes = 1\nservices = [\"dns\"]\nweight = 3\nflow_quota = 0.25\n";
        assert_eq!(changed(before, &change).unwrap(), "flow_quota = 0.25\nlanes = 4\nrate = \"5Mbit\"\n");
    }
}
