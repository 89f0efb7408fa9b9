//! How a file is walked, and how a section declares its keys.
//!
//! A section of the file is one `section!`. Each key has a line there: its consequence, name, type, default, check ([`Kind`])
//! and the [`Effect`] of a change. The struct that the daemon reads, its reading, the difference that a reload shows and the
//! rows of `docs/configuration.md` follow from it: each is a [`Walker`] over the keys.

use std::sync::Arc;

use toml::{
    Spanned,
    de::{DeTable, DeValue},
};

use crate::{
    checks::Checks,
    kinds::Kind,
    problem::{At, Report},
    spelled::spelled,
    syntax, value,
};

/// A table of a file, and which of its keys were asked for.
#[derive(Clone)]
pub(super) struct Table<'t> {
    pub(super) at: At,
    entries: Option<&'t DeTable<'t>>,
    known: Vec<&'static str>,
}

impl<'t> Table<'t> {
    /// A table with these entries; `None`: it is not there.
    pub(super) fn new(at: At, entries: Option<&'t DeTable<'t>>) -> Self {
        Self { at, entries, known: Vec::new() }
    }

    fn get(&self, key: &str) -> Option<&'t Spanned<DeValue<'t>>> {
        self.entries?.get(key)
    }

    /// Where the value of `key` stands; without one, where the table does.
    pub(super) fn place(&self, key: &str) -> At {
        let span = self.get(key).map(Spanned::span).or_else(|| self.at.span.clone());
        self.at.key(key, span)
    }

    pub(super) fn has(&self, key: &str) -> bool {
        self.get(key).is_some()
    }

    /// How many elements the list `key` has; `None`: it is no list.
    pub(super) fn length(&self, key: &str) -> Option<usize> {
        self.get(key).and_then(|value| value.get_ref().as_array()).map(|list| list.len())
    }

    /// The text of `key`; empty if it is no text.
    pub(super) fn text(&self, key: &str) -> &'t str {
        self.texts(key).next().unwrap_or_default()
    }

    /// The texts of `key`, whether it is one or a list, right or wrong.
    pub(super) fn texts(&self, key: &str) -> impl Iterator<Item = &'t str> {
        let value = self.get(key).map(Spanned::get_ref);
        let list = value.and_then(DeValue::as_array).into_iter().flat_map(|list| list.iter());
        value.into_iter().chain(list.map(Spanned::get_ref)).filter_map(DeValue::as_str)
    }

    /// The value of `key`, checked; `None` if it is missing or wrong.
    pub(super) fn value<T: 'static>(
        &mut self,
        key: &'static str,
        kind: &Kind<T>,
        checks: &mut Checks,
    ) -> Option<T> {
        self.known.push(key);
        kind.read(self.get(key)?.get_ref(), &self.place(key), checks)
    }

    /// The table `key`; one that is not there, or has the wrong shape, has no keys.
    pub(super) fn table(&mut self, key: &'static str, report: &mut Report) -> Self {
        self.known.push(key);
        let value = self.get(key);
        let entries = value.and_then(|value| value.get_ref().as_table());
        if value.is_some() && entries.is_none() {
            let inline = !self.at.path.is_empty();
            let how =
                if inline { format!("{key} = {{ … }}") } else { format!("[{key}] and its keys below") };
            report.add(&self.place(key), "is not a table of its own", format!("write {how}"));
        }
        Table::new(self.at.key(key, value.filter(|_| entries.is_some()).map(Spanned::span)), entries)
    }

    /// Returns the tables `[[key]]`, none if the key is missing.
    pub(super) fn tables(&mut self, key: &'static str, report: &mut Report) -> Vec<Self> {
        self.known.push(key);
        let Some(value) = self.get(key) else { return Vec::new() };
        let at = self.place(key);
        let list = value.get_ref().as_array().map(|list| &list[..]).unwrap_or_default();
        // Tables that stand for the ports of one range are one in the file.
        let is_one = |place: usize| {
            let before = place.checked_sub(1).and_then(|before| list.get(before));
            before.zip(list.get(place)).is_some_and(|(before, this)| before.span() == this.span())
        };
        let mut index = 0;
        let table = |(place, element): (usize, &'t Spanned<DeValue<'t>>)| {
            let entries = element.get_ref().as_table()?;
            index += usize::from(place > 0 && !is_one(place));
            let name = name_of(entries, is_one(place) || is_one(place + 1));
            let at = At { table: name, ..at.element(index, element.span()) };
            Some(Table::new(at, Some(entries)))
        };
        let tables: Option<Vec<Self>> = list.iter().enumerate().map(table).collect();
        tables.filter(|_| value.get_ref().as_array().is_some()).unwrap_or_else(|| {
            report.add(&at, "is not a table of its own", format!("write [[{key}]] and its keys below"));
            Vec::new()
        })
    }

    /// Reads the section that this table is; the default stands for what is missing or wrong.
    pub(super) fn fill<S: Section>(&mut self, checks: &mut Checks) -> S {
        let mut section = S::default();
        section.walk(&S::default(), &mut Reader { table: self, checks });
        self.end(&mut checks.report);
        section
    }

    /// Whether the table is in the file.
    pub(super) fn is_there(&self) -> bool {
        self.entries.is_some()
    }

    /// Reports the keys that nobody has asked for.
    pub(super) fn end(&self, report: &mut Report) {
        let keys = self.entries.into_iter().flat_map(DeTable::keys);
        for key in keys.filter(|key| !self.known.contains(&key.get_ref().as_ref())) {
            let at = self.at.key(key.get_ref(), Some(key.span()));
            report.add(&at, "unknown key", self.suggestion(key.get_ref()));
        }
    }

    fn suggestion(&self, key: &str) -> String {
        let plain = |name: &str| name.replace(['_', '-'], "").to_ascii_lowercase();
        let spelled = plain(key);
        let foreign = FOREIGN.iter().find(|(name, _)| *name == spelled).map(|(_, ours)| *ours);
        let known = |ours: &&str| self.known.contains(ours);
        let same = self.known.iter().copied().find(|known| plain(known) == spelled);
        let meant = foreign.filter(known).or(same);
        match meant.or_else(|| nearest(key, self.known.iter().copied())) {
            Some(known) => format!("did you mean {known}?"),
            None => format!("the keys here are {}", self.known.join(", ")),
        }
    }
}

/// The name that a table is shown by, if it is a good one; of one that stands for a port of a range, the name of the range.
fn name_of(entries: &DeTable<'_>, ranged: bool) -> Option<Arc<str>> {
    let name = value::name(entries.get("name")?.get_ref().as_str()?).ok()?;
    if !ranged {
        return Some(name);
    }
    name.rsplit_once('.').map(|(range, _)| range.into())
}

/// Keys of WireGuard, in lower case without underscores, and ours that say the same in a section that has them.
const FOREIGN: [(&str, &str); 8] = [
    ("endpoint", "endpoints"),
    ("fwmark", "mark"),
    ("listenport", "listen"),
    ("persistentkeepalive", "keepalive"),
    ("postup", "up"),
    ("presharedkey", "preshared_key_file"),
    ("predown", "down"),
    ("privatekey", "key_file"),
];

/// The name among `known` that `name` may be a misspelling of.
pub fn nearest<'a>(name: &str, known: impl IntoIterator<Item = &'a str>) -> Option<&'a str> {
    let (typos, known) = known.into_iter().map(|known| (strsim::levenshtein(name, known), known)).min()?;
    (typos <= 1 + known.len() / 4).then_some(known)
}

/// Parses `text`, which stands at `whole`, reporting what is not TOML.
pub(super) fn parse<'t>(text: &'t str, whole: &At, report: &mut Report) -> Option<DeTable<'t>> {
    let (root, errors) = DeTable::parse_recoverable(text);
    for error in &errors {
        let message = error.message().split_whitespace().collect::<Vec<_>>().join(" ");
        let at = At { span: error.span(), ..whole.clone() };
        let (problem, remedy) = syntax::explain(text, error.span(), &message);
        report.add(&at, format!("not TOML: {problem}"), remedy);
    }
    errors.is_empty().then(|| root.into_inner())
}

spelled! {
    /// When a change of the configuration takes effect.
    pub enum Effect {
        /// The change takes effect with the reload.
        Now => "now",
        /// With the next connection with the peer.
        NextConnection => "next-connection",
        /// With the next start of the daemon: until then the old value holds.
        Restart => "restart",
    }
}

/// A key as it is declared.
pub(super) struct Key {
    pub(super) name: &'static str,
    pub(super) effect: Effect,
    /// What to do when it is missing; `None`: its default stands for it.
    pub(super) required: Option<&'static str>,
    /// The lines of the doc comment that states what the key does.
    #[cfg(test)]
    pub(super) doc: &'static [&'static str],
}

/// What is done with each key of a section: it is read, compared or written into the reference.
pub(super) trait Walker {
    /// Visits a key with its value in the section, and in the other section that is walked beside it.
    fn key<T: Clone + 'static>(&mut self, key: &Key, kind: &Kind<T>, value: &mut T, other: &T);

    /// Visits a table of the section, likewise.
    fn table<S: Section>(&mut self, name: &'static str, section: &mut S, other: &S);
}

/// A section of the file, as `section!` declares it.
pub(super) trait Section: Default {
    /// Takes the walker to all keys, in the order of the reference; `other` is what the section is compared with.
    fn walk(&mut self, other: &Self, walker: &mut impl Walker);
}

/// Reads the keys of a table.
struct Reader<'r, 't> {
    table: &'r mut Table<'t>,
    checks: &'r mut Checks,
}

impl Walker for Reader<'_, '_> {
    fn key<T: Clone + 'static>(&mut self, key: &Key, kind: &Kind<T>, value: &mut T, _: &T) {
        if let Some(read) = self.table.value(key.name, kind, self.checks) {
            *value = read;
        }
        if let Some(remedy) = key.required.filter(|_| !self.table.has(key.name)) {
            self.checks.report.add(&self.table.place(key.name), "is missing", remedy);
        }
    }

    fn table<S: Section>(&mut self, name: &'static str, section: &mut S, _: &S) {
        *section = self.table.table(name, &mut self.checks.report).fill(self.checks);
    }
}

/// Declares a section: a struct, its [`Section`] and its `Default`.
///
/// ```text
/// section! {
///     /// What the section is.
///     pub struct Name {
///         /// The consequence of the key, as the reference says it.
///         field as key: Type = default, kind, Effect;
///         /// A key that must be there, and what to do when it is not.
///         field: Type = placeholder, kind, Effect, required "remedy";
///     }
///     tables { field: Section; }          tables inside it
///     also { field: Type = default; }     what else the struct has
///     const DEFAULT;                      the default as a constant
/// }
/// ```
macro_rules! section {
    (
        $(#[$meta:meta])*
        $vis:vis struct $name:ident {
            $(
                $(#[doc = $doc:literal])+
                $field:ident $(as $key:ident)?: $type:ty =
                    $default:expr, $kind:expr, $effect:ident $(, required $remedy:expr)?;
            )*
        }
        $(tables { $($(#[$table_meta:meta])* $table:ident: $table_type:ty;)* })?
        $(also { $($(#[$also_meta:meta])* $also:ident: $also_type:ty = $init:expr;)* })?
        $(const $constant:ident;)?
    ) => {
        $(#[$meta])*
        $vis struct $name {
            $($(#[doc = $doc])+ $vis $field: $type,)*
            $($($(#[$table_meta])* $vis $table: $table_type,)*)?
            $($($(#[$also_meta])* $vis $also: $also_type,)*)?
        }

        $crate::section::section! {
            @default $name [$($constant)?]
            $($field = $default;)*
            $($($table = <$table_type>::default();)*)?
            $($($also = $init;)*)?
        }

        impl $crate::section::Section for $name {
            fn walk(&mut self, other: &Self, walker: &mut impl $crate::section::Walker) {
                $(
                    let key = $crate::section::Key {
                        name: $crate::section::section!(@key $field $($key)?),
                        effect: $crate::section::Effect::$effect,
                        required: $crate::section::section!(@required $($remedy)?),
                        #[cfg(test)]
                        doc: &[$($doc),+],
                    };
                    walker.key(&key, &$kind, &mut self.$field, &other.$field);
                )*
                $($(walker.table(stringify!($table), &mut self.$table, &other.$table);)*)?
            }
        }
    };
    (@key $field:ident) => { stringify!($field) };
    (@key $field:ident $key:ident) => { stringify!($key) };
    (@required) => { None };
    (@required $remedy:expr) => { Some($remedy) };
    (@default $name:ident [] $($field:ident = $default:expr;)*) => {
        impl Default for $name {
            fn default() -> Self {
                Self { $($field: $default),* }
            }
        }
    };
    (@default $name:ident [$constant:ident] $($field:ident = $default:expr;)*) => {
        impl $name {
            /// What each key is when it is left out.
            pub const $constant: Self = Self { $($field: $default),* };
        }

        impl Default for $name {
            fn default() -> Self {
                Self::$constant
            }
        }
    };
}
pub(super) use section;
