//! The serde mirror of the file: which keys exist, and of which TOML type each one is.
//!
//! Every value keeps its position, and a value of the wrong type is kept as such instead of ending the reading, so
//! that all problems of a file are reported at once.

use std::{fmt, mem, ops::Range};

use serde::{
    Deserialize, Deserializer,
    de::{self, DeserializeOwned, MapAccess, SeqAccess, Visitor, value},
    forward_to_deserialize_any,
};
use toml::{
    Spanned,
    de::{DeTable, DeValue},
};

use super::problem::Report;

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
    pub(super) metrics: Option<Metrics>,
    pub(super) log: Option<Log>,
    pub(super) limits: Option<Limits>,
}

#[derive(Default, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub(super) struct Identity {
    pub(super) key_file: Option<Field<String>>,
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
    pub(super) protocol: Option<Field<String>>,
}

#[derive(Default, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub(super) struct Metrics {
    pub(super) listen: Option<Field<String>>,
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
    pub(super) pending_open_packets: Option<Field<i64>>,
    pub(super) receive_buffer: Option<Field<Amount>>,
    pub(super) decoy_flows: Option<Field<i64>>,
}

/// Keys of later versions, as (table, key): refused like a typo, but with another remedy.
const NOT_YET: &[(&str, &str)] =
    &[("access", "mode"), ("", "tun"), ("", "control"), ("peer", "dscp"), ("peer", "allowed_ips")];

/// Reads `text`, reporting what is not TOML, keys that do not exist and sections of the wrong shape.
/// `None` when it is no TOML at all.
pub(super) fn read(text: &str, report: &mut Report<'_>) -> Option<File> {
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
    schema().prune(root.get_mut(), "", report);
    match File::deserialize(toml::Deserializer::from(root)) {
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
        Schema { tables: vec![Schema::table::<Queue>("queue")], ..Schema::list::<Peer>("peer") },
        Schema::list::<Forward>("udp"),
        Schema::list::<Forward>("tcp"),
        Schema::list::<Service>("service"),
        Schema::table::<Metrics>("metrics"),
        Schema::table::<Log>("log"),
        Schema::table::<Limits>("limits"),
    ];
    Schema { tables, ..Schema::table::<File>("") }
}

impl Schema {
    fn table<T: DeserializeOwned>(name: &'static str) -> Self {
        Self { name, many: false, keys: fields_of::<T>(), tables: Vec::new() }
    }

    fn list<T: DeserializeOwned>(name: &'static str) -> Self {
        Self { many: true, ..Self::table::<T>(name) }
    }

    /// Reports and removes what `table` must not have.
    fn prune(&self, table: &mut DeTable<'_>, path: &str, report: &mut Report<'_>) {
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
    fn prune_value(&self, value: &mut Spanned<DeValue<'_>>, path: &str, report: &mut Report<'_>) -> bool {
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
        if NOT_YET.contains(&(self.name, key)) {
            return "not available in this version: remove it".to_owned();
        }
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

/// A value with its position, or the TOML type that stands there instead.
pub(super) struct Field<T> {
    pub(super) span: Range<usize>,
    pub(super) value: Result<T, &'static str>,
}

impl<'de, T: Leaf> Deserialize<'de> for Field<T> {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let raw = Spanned::<Raw>::deserialize(deserializer)?;
        let span = raw.span();
        Ok(Self { span, value: T::from_raw(raw.into_inner()) })
    }
}

/// A type that a value in the file may have.
pub(super) trait Leaf: Sized {
    /// What an operator is told to write.
    const EXPECTED: &'static str;
    /// Takes the value, or names the type that it has instead.
    fn from_raw(raw: Raw) -> Result<Self, &'static str>;
}

/// A number or a text with a unit.
pub(super) enum Amount {
    Number(i64),
    Text(String),
}

/// A text, or a list of them.
pub(super) enum OneOrMany {
    One(String),
    Many(Vec<Field<String>>),
}

/// Any TOML value.
pub(super) enum Raw {
    Text(String),
    Integer(i64),
    Float(f64),
    Bool(bool),
    List(Vec<Spanned<Self>>),
    Other(&'static str),
}

impl Raw {
    fn type_name(&self) -> &'static str {
        match self {
            Self::Text(_) => "a text",
            Self::Integer(_) => "an integer",
            Self::Float(_) => "a fraction",
            Self::Bool(_) => "a boolean",
            Self::List(_) => "a list",
            Self::Other(name) => name,
        }
    }
}

impl Leaf for String {
    const EXPECTED: &'static str = "a text in quotes";
    fn from_raw(raw: Raw) -> Result<Self, &'static str> {
        if let Raw::Text(text) = raw { Ok(text) } else { Err(raw.type_name()) }
    }
}

impl Leaf for i64 {
    const EXPECTED: &'static str = "a whole number without quotes";
    fn from_raw(raw: Raw) -> Result<Self, &'static str> {
        if let Raw::Integer(number) = raw { Ok(number) } else { Err(raw.type_name()) }
    }
}

impl Leaf for bool {
    const EXPECTED: &'static str = "true or false, without quotes";
    fn from_raw(raw: Raw) -> Result<Self, &'static str> {
        if let Raw::Bool(value) = raw { Ok(value) } else { Err(raw.type_name()) }
    }
}

impl Leaf for f64 {
    const EXPECTED: &'static str = "a number such as 0.5, without quotes";
    #[expect(clippy::cast_precision_loss, reason = "shares are small")]
    fn from_raw(raw: Raw) -> Result<Self, &'static str> {
        match raw {
            Raw::Float(number) => Ok(number),
            Raw::Integer(number) => Ok(number as Self),
            Raw::Text(_) | Raw::Bool(_) | Raw::List(_) | Raw::Other(_) => Err(raw.type_name()),
        }
    }
}

impl Leaf for Amount {
    const EXPECTED: &'static str = "a whole number, or a text in quotes";
    fn from_raw(raw: Raw) -> Result<Self, &'static str> {
        match raw {
            Raw::Integer(number) => Ok(Self::Number(number)),
            Raw::Text(text) => Ok(Self::Text(text)),
            Raw::Float(_) | Raw::Bool(_) | Raw::List(_) | Raw::Other(_) => Err(raw.type_name()),
        }
    }
}

impl<T: Leaf> Leaf for Vec<Field<T>> {
    const EXPECTED: &'static str = "a list in brackets";
    fn from_raw(raw: Raw) -> Result<Self, &'static str> {
        let Raw::List(elements) = raw else { return Err(raw.type_name()) };
        let field = |e: Spanned<Raw>| Field { span: e.span(), value: T::from_raw(e.into_inner()) };
        Ok(elements.into_iter().map(field).collect())
    }
}

impl Leaf for OneOrMany {
    const EXPECTED: &'static str = "a text in quotes, or a list of them";
    fn from_raw(raw: Raw) -> Result<Self, &'static str> {
        match raw {
            Raw::Text(text) => Ok(Self::One(text)),
            Raw::List(_) => Vec::from_raw(raw).map(Self::Many),
            Raw::Integer(_) | Raw::Float(_) | Raw::Bool(_) | Raw::Other(_) => Err(raw.type_name()),
        }
    }
}

impl<'de> Deserialize<'de> for Raw {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Any;

        impl<'de> Visitor<'de> for Any {
            type Value = Raw;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("a value")
            }
            fn visit_bool<E>(self, value: bool) -> Result<Raw, E> {
                Ok(Raw::Bool(value))
            }
            fn visit_i64<E>(self, number: i64) -> Result<Raw, E> {
                Ok(Raw::Integer(number))
            }
            fn visit_u64<E>(self, number: u64) -> Result<Raw, E> {
                Ok(i64::try_from(number).map_or(Raw::Other("a huge integer"), Raw::Integer))
            }
            fn visit_i128<E>(self, _: i128) -> Result<Raw, E> {
                Ok(Raw::Other("a huge integer"))
            }
            fn visit_u128<E>(self, _: u128) -> Result<Raw, E> {
                Ok(Raw::Other("a huge integer"))
            }
            fn visit_f64<E>(self, number: f64) -> Result<Raw, E> {
                Ok(Raw::Float(number))
            }
            fn visit_str<E>(self, text: &str) -> Result<Raw, E> {
                Ok(Raw::Text(text.to_owned()))
            }
            fn visit_seq<A: SeqAccess<'de>>(self, mut list: A) -> Result<Raw, A::Error> {
                let mut elements = Vec::new();
                while let Some(element) = list.next_element()? {
                    elements.push(element);
                }
                Ok(Raw::List(elements))
            }
            fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Raw, A::Error> {
                while map.next_entry::<de::IgnoredAny, de::IgnoredAny>()?.is_some() {}
                Ok(Raw::Other("a table or date"))
            }
        }

        deserializer.deserialize_any(Any)
    }
}
