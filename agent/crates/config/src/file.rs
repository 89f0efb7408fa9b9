//! The serde mirror of the file: which keys exist, and of which TOML type each one is.
//!
//! Every value keeps its position, and a value of the wrong type is kept as such instead of ending the reading, so
//! that all problems of a file are reported at once.

use std::mem;

use serde::{
    Deserialize, Deserializer,
    de::{self, DeserializeOwned, Visitor, value},
    forward_to_deserialize_any,
};
use toml::{
    Spanned,
    de::{DeTable, DeValue},
};

use crate::{
    field::{Amount, Field, OneOrMany},
    problem::Report,
};

/// The whole file.
#[derive(Default, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub(super) struct File {
    pub(super) identity: Option<Identity>,
    pub(super) transport: Option<Transport>,
    pub(super) access: Option<Access>,
    pub(super) peer: Vec<Spanned<Peer>>,
    pub(super) udp: Vec<Spanned<Forward>>,
    pub(super) tcp: Vec<Spanned<Forward>>,
    pub(super) service: Vec<Spanned<Service>>,
    pub(super) tun: Option<Spanned<Tun>>,
    pub(super) metrics: Option<Metrics>,
    pub(super) control: Option<Control>,
    pub(super) log: Option<Log>,
    pub(super) limits: Option<Limits>,
}

#[derive(Default, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub(super) struct Identity {
    pub(super) key_file: Option<Field<String>>,
    pub(super) state_dir: Option<Field<String>>,
}

#[derive(Default, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub(super) struct Transport {
    pub(super) listen: Option<Field<Vec<Field<String>>>>,
    pub(super) workers: Option<Field<i64>>,
    pub(super) pin_cpus: Option<Field<bool>>,
    pub(super) gso: Option<Field<String>>,
    pub(super) mark: Option<Field<i64>>,
    pub(super) advertise: Option<Field<String>>,
    pub(super) max_packet: Option<Field<Amount>>,
}

#[derive(Default, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub(super) struct Access {
    pub(super) mode: Option<Field<String>>,
    pub(super) services: Option<Field<Vec<Field<String>>>>,
    pub(super) clock_window: Option<Field<String>>,
    pub(super) knock: Option<Field<String>>,
    pub(super) decoy: Option<Field<String>>,
}

#[derive(Default, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub(super) struct Peer {
    pub(super) name: Option<Field<String>>,
    pub(super) public_key: Option<Field<OneOrMany>>,
    pub(super) endpoints: Option<Field<Vec<Field<String>>>>,
    pub(super) lanes: Option<Field<i64>>,
    pub(super) profile: Option<Field<String>>,
    pub(super) keepalive: Option<Field<String>>,
    pub(super) drop: Option<Field<String>>,
    pub(super) queue: Option<Queue>,
    pub(super) quota: Option<Field<f64>>,
    pub(super) services: Option<Field<Vec<Field<String>>>>,
    pub(super) allowed_ips: Option<Field<Vec<Field<String>>>>,
    pub(super) dscp: Option<Field<Amount>>,
    pub(super) congestion: Option<Field<String>>,
    pub(super) rate: Option<Field<String>>,
}

#[derive(Default, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub(super) struct Queue {
    pub(super) packets: Option<Field<i64>>,
    pub(super) bytes: Option<Field<Amount>>,
    pub(super) time: Option<Field<String>>,
}

#[derive(Default, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub(super) struct Forward {
    pub(super) listen: Option<Field<String>>,
    pub(super) peer: Option<Field<String>>,
    pub(super) service: Option<Field<String>>,
}

#[derive(Default, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub(super) struct Service {
    pub(super) name: Option<Field<String>>,
    pub(super) upstream: Option<Field<String>>,
    pub(super) idle: Option<Field<String>>,
    pub(super) burst: Option<Field<i64>>,
    pub(super) oversize: Option<Field<String>>,
    pub(super) protocol: Option<Field<String>>,
}

#[derive(Default, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub(super) struct Tun {
    pub(super) name: Option<Field<String>>,
    pub(super) address: Option<Field<Vec<Field<String>>>>,
    pub(super) mtu: Option<Field<Amount>>,
    pub(super) offload: Option<Field<String>>,
    pub(super) routes: Option<Field<bool>>,
}

#[derive(Default, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub(super) struct Metrics {
    pub(super) listen: Option<Field<String>>,
}

#[derive(Default, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub(super) struct Control {
    pub(super) socket: Option<Field<String>>,
}

#[derive(Default, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub(super) struct Log {
    pub(super) level: Option<Field<String>>,
    pub(super) format: Option<Field<String>>,
}

#[derive(Default, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub(super) struct Limits {
    pub(super) flows_per_peer: Option<Field<i64>>,
    pub(super) flows: Option<Field<i64>>,
    pub(super) tcp_streams_per_peer: Option<Field<i64>>,
    pub(super) tcp_streams: Option<Field<i64>>,
    pub(super) stream_bytes: Option<Field<Amount>>,
    pub(super) pending_open_packets: Option<Field<i64>>,
    pub(super) receive_buffer: Option<Field<Amount>>,
    pub(super) receive_rate: Option<Field<Amount>>,
    pub(super) reassembly_bytes: Option<Field<Amount>>,
    pub(super) queue_bytes: Option<Field<Amount>>,
    pub(super) peers: Option<Field<i64>>,
    pub(super) open_peers: Option<Field<i64>>,
    pub(super) decoy_flows: Option<Field<i64>>,
    pub(super) handshakes: Option<Field<i64>>,
}

/// The state file: what `culvert peer` has changed.
#[derive(Default, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub(super) struct State {
    pub(super) removed: Option<Field<Vec<Field<String>>>>,
    pub(super) peer: Vec<Spanned<Peer>>,
}

/// Reads `text`, reporting what is not TOML, keys that do not exist and sections of the wrong shape.
/// `None` when it is no TOML at all.
pub(super) fn read<T: DeserializeOwned>(text: &str, schema: &Schema, report: &mut Report) -> Option<T> {
    let (mut root, errors) = DeTable::parse_recoverable(text);
    for error in &errors {
        report.add(
            "",
            error.span(),
            format!("not TOML: {}", one_line(error.message())),
            "see https://toml.io",
        );
    }
    if !errors.is_empty() {
        return None;
    }
    schema.prune(root.get_mut(), "", report);
    match T::deserialize(toml::Deserializer::from(root)) {
        Ok(file) => Some(file),
        Err(error) => {
            let problem = one_line(error.message());
            report.add("", error.span(), problem, "see the reference of this key in docs/configuration.md");
            None
        }
    }
}

fn one_line(message: &str) -> String {
    message.split_whitespace().collect::<Vec<_>>().join(" ")
}

/// Which keys a table may have, taken from the mirror above.
pub(super) struct Schema {
    /// Its name in the table around it, empty for the file.
    name: &'static str,
    /// Whether it is written `[[name]]`.
    many: bool,
    keys: &'static [&'static str],
    tables: Vec<Self>,
}

/// The schema of the whole file.
pub(super) fn schema() -> Schema {
    let tables = vec![
        Schema::table::<Identity>("identity"),
        Schema::table::<Transport>("transport"),
        Schema::table::<Access>("access"),
        peer_schema(),
        Schema::list::<Forward>("udp"),
        Schema::list::<Forward>("tcp"),
        Schema::list::<Service>("service"),
        Schema::table::<Tun>("tun"),
        Schema::table::<Metrics>("metrics"),
        Schema::table::<Control>("control"),
        Schema::table::<Log>("log"),
        Schema::table::<Limits>("limits"),
    ];
    Schema { tables, ..Schema::table::<File>("") }
}

/// The schema of the state file.
pub(super) fn state_schema() -> Schema {
    Schema { tables: vec![peer_schema()], ..Schema::table::<State>("") }
}

fn peer_schema() -> Schema {
    Schema { tables: vec![Schema::table::<Queue>("queue")], ..Schema::list::<Peer>("peer") }
}

impl Schema {
    fn table<T: DeserializeOwned>(name: &'static str) -> Self {
        Self { name, many: false, keys: fields_of::<T>(), tables: Vec::new() }
    }

    fn list<T: DeserializeOwned>(name: &'static str) -> Self {
        Self { many: true, ..Self::table::<T>(name) }
    }

    /// Reports and removes what `table` must not have.
    fn prune(&self, table: &mut DeTable<'_>, path: &str, report: &mut Report) {
        let inner = |key: &str| if path.is_empty() { key.to_owned() } else { format!("{path}.{key}") };
        for (key, mut value) in mem::take(table) {
            let name = key.get_ref().as_ref();
            if !self.keys.contains(&name) {
                report.add(&inner(name), Some(key.span()), "unknown key", self.remedy(name));
                continue;
            }
            let schema = self.tables.iter().find(|t| t.name == name);
            if schema.is_none_or(|schema| schema.prune_value(&mut value, &inner(name), report)) {
                table.insert(key, value);
            }
        }
    }

    /// Whether `value` has the shape of this table; its inside is pruned.
    fn prune_value(&self, value: &mut Spanned<DeValue<'_>>, path: &str, report: &mut Report) -> bool {
        let span = value.span();
        let fits = match (value.get_mut(), self.many) {
            (DeValue::Table(table), false) => {
                self.prune(table, path, report);
                true
            }
            (DeValue::Array(elements), true) => {
                for (index, element) in elements.iter_mut().enumerate() {
                    if let DeValue::Table(table) = element.get_mut() {
                        self.prune(table, &format!("{path}[{index}]"), report);
                    }
                }
                elements.iter().all(|element| element.get_ref().is_table())
            }
            (_, _) => false,
        };
        if !fits {
            let remedy = match (self.many, path.contains('.')) {
                (true, _) => format!("write [[{path}]] and its keys below"),
                (false, false) => format!("write [{path}] and its keys below"),
                (false, true) => format!("write {} = {{ … }}", self.name),
            };
            report.add(path, Some(span), "is not a table of its own".to_owned(), remedy);
        }
        fits
    }

    fn remedy(&self, key: &str) -> String {
        match self.keys.iter().map(|known| (distance(key, known), known)).min() {
            Some((typos, known)) if typos <= 1 + known.len() / 4 => format!("did you mean {known}?"),
            _ => format!("the keys here are {}", self.keys.join(", ")),
        }
    }

    /// Every key that holds a value, as in `peer.queue.packets`.
    #[cfg(test)]
    pub(super) fn key_paths(&self) -> Vec<String> {
        let table = |key: &str| self.tables.iter().find(|t| t.name == key);
        let paths = self.keys.iter().flat_map(|&key| match table(key) {
            Some(inner) => inner.key_paths().iter().map(|path| format!("{key}.{path}")).collect(),
            None => vec![key.to_owned()],
        });
        paths.collect()
    }
}

/// Levenshtein's distance: how many characters were mistyped, left out or added.
fn distance(a: &str, b: &str) -> usize {
    let mut row: Vec<usize> = (0..=b.len()).collect();
    for (i, x) in a.bytes().enumerate() {
        let mut diagonal = row[0];
        row[0] = i + 1;
        for (j, y) in b.bytes().enumerate() {
            let replaced = diagonal + usize::from(x != y);
            diagonal = row[j + 1];
            row[j + 1] = replaced.min(row[j] + 1).min(diagonal + 1);
        }
    }
    row[b.len()]
}

/// The names of the fields of `T`, as its derived `Deserialize` asks for them.
fn fields_of<T: DeserializeOwned>() -> &'static [&'static str] {
    struct Fields<'a>(&'a mut &'static [&'static str]);

    impl<'de> Deserializer<'de> for Fields<'_> {
        type Error = value::Error;

        fn deserialize_any<V: Visitor<'de>>(self, _: V) -> Result<V::Value, value::Error> {
            Err(de::Error::custom("not a struct"))
        }

        fn deserialize_struct<V: Visitor<'de>>(
            self,
            _: &'static str,
            fields: &'static [&'static str],
            _: V,
        ) -> Result<V::Value, value::Error> {
            *self.0 = fields;
            Err(de::Error::custom("only the names were wanted"))
        }

        forward_to_deserialize_any! {
            bool i8 i16 i32 i64 i128 u8 u16 u32 u64 u128 f32 f64 char str string bytes byte_buf option unit
            unit_struct newtype_struct seq tuple tuple_struct map enum identifier ignored_any
        }
    }

    let mut names: &'static [&'static str] = &[];
    // The error is how the walk ends: no value was given, only the names were asked for.
    drop(T::deserialize(Fields(&mut names)));
    names
}
