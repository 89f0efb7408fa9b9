//! What the value of a key may be: a [`Kind`] for each way to write a value, whatever section it stands in.

use std::{fmt::Display, ops::RangeInclusive, path::PathBuf, sync::Arc, time::Duration};

use toml::de::{DeFloat, DeInteger, DeValue};

use crate::{
    checks::Checks,
    problem::At,
    ranges::services_of,
    spelled::Spelled,
    value::{self, Bad, bad},
};

/// A way to write a value of type `T`.
pub(super) struct Kind<T> {
    /// What may be written, as the reference says it.
    pub(super) words: String,
    pub(super) read: Read<T>,
    show: Show<T>,
}

/// The value, or what is wrong with it; problems of its elements are reported.
type Read<T> = Box<dyn Fn(Given<'_>) -> Result<T, Bad>>;

/// The value as it is written; `None`: nothing is.
type Show<T> = Box<dyn Fn(&T, Names<'_>) -> Option<Shown>>;

/// What values name by their index.
#[derive(Clone, Copy, Default)]
pub(super) struct Names<'a> {
    pub(super) services: &'a [Arc<str>],
    pub(super) peers: &'a [Arc<str>],
}

/// A value of a file, where it stands, and what was read before it.
pub(super) struct Given<'g> {
    pub(super) value: &'g DeValue<'g>,
    pub(super) at: &'g At,
    pub(super) checks: &'g mut Checks,
}

impl Given<'_> {
    /// The same, to be read by another kind first.
    pub(super) fn again(&mut self) -> Given<'_> {
        Given { value: self.value, at: self.at, checks: self.checks }
    }

    /// The value as a number, whether it is written as a whole one or not.
    pub(super) fn number(&self) -> Option<f64> {
        let whole = self.value.as_integer().map(DeInteger::as_str);
        whole.or_else(|| self.value.as_float().map(DeFloat::as_str))?.parse().ok()
    }

    fn wrong_type(&self, remedy: impl Into<String>) -> Bad {
        let found = match self.value {
            DeValue::String(_) => "a text",
            DeValue::Integer(number) if integer(number).is_none() => "a huge integer",
            DeValue::Integer(_) => "an integer",
            DeValue::Float(_) => "a fraction",
            DeValue::Boolean(_) => "a boolean",
            DeValue::Datetime(_) => "a date",
            DeValue::Array(_) => "a list",
            DeValue::Table(_) => "a table",
        };
        bad(format!("is {found}"), remedy)
    }
}

/// The whole number, if it is not too large.
fn integer(number: &DeInteger<'_>) -> Option<i64> {
    i64::from_str_radix(number.as_str(), number.radix()).ok()
}

/// A value as it is written.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Shown {
    pub(super) text: String,
    /// Whether the file has it in quotes.
    is_text: bool,
}

impl Shown {
    /// A text; nothing is written for an empty one.
    pub(super) fn text(text: impl ToString) -> Option<Self> {
        Some(Self { text: text.to_string(), is_text: true }).filter(|shown| !shown.text.is_empty())
    }

    pub(super) fn bare(text: impl ToString) -> Option<Self> {
        Some(Self { text: text.to_string(), is_text: false })
    }

    /// Returns the value as the TOML file has it, a text in quotes.
    pub(super) fn toml(&self) -> String {
        if self.is_text { toml::Value::from(&*self.text).to_string() } else { self.text.clone() }
    }
}

impl<T: 'static> Kind<T> {
    pub(super) fn new(
        words: impl Into<String>,
        read: impl Fn(Given<'_>) -> Result<T, Bad> + 'static,
        show: impl Fn(&T, Names<'_>) -> Option<Shown> + 'static,
    ) -> Self {
        Self { words: words.into(), read: Box::new(read), show: Box::new(show) }
    }

    /// The value, if it is right; else it is reported.
    pub(super) fn read(&self, value: &DeValue<'_>, at: &At, checks: &mut Checks) -> Option<T> {
        let read = (self.read)(Given { value, at, checks });
        read.map_err(|Bad { problem, remedy }| checks.report.add(at, problem, remedy)).ok()
    }

    pub(super) fn show(&self, value: &T, names: Names<'_>) -> Option<Shown> {
        (self.show)(value, names)
    }

    /// The same; what is right is handed to `then`, which checks and remembers more.
    pub(super) fn then(self, then: fn(&mut Checks, &T, &At) -> Result<(), Bad>) -> Self {
        let read = self.read;
        let read = move |mut given: Given<'_>| {
            let read = read(given.again())?;
            then(given.checks, &read, given.at).map(|()| read)
        };
        Self { read: Box::new(read), ..self }
    }

    /// The same for a key without a default.
    pub(super) fn optional(self) -> Kind<Option<T>> {
        let (read, show) = (self.read, self.show);
        Kind::new(
            self.words,
            move |given| read(given).map(Some),
            move |value, names| show(value.as_ref()?, names),
        )
    }

    /// `word` stands for no value: `wrap` and `unwrap` say how.
    pub(super) fn or<W: Copy + 'static>(
        self,
        word: &'static str,
        wrap: fn(Option<T>) -> W,
        unwrap: fn(W) -> Option<T>,
    ) -> Kind<W> {
        let (read, show) = (self.read, self.show);
        let read = move |given: Given<'_>| {
            if given.value.as_str() == Some(word) {
                return Ok(wrap(None));
            }
            read(given).map(|value| wrap(Some(value))).map_err(|Bad { problem, remedy }| {
                let rest = remedy.strip_prefix("write ").unwrap_or(&remedy);
                // Who has written a number does not mean the word.
                let meant =
                    if problem == NO_UNIT { remedy.clone() } else { format!("write {word:?}, or {rest}") };
                bad(problem, meant)
            })
        };
        Kind::new(format!("`{word:?}`, {}", self.words), read, move |value, names| {
            unwrap(*value).map_or_else(|| Shown::text(word), |value| show(&value, names))
        })
    }

    /// A list of such values; those that are wrong are left out.
    pub(super) fn list(self) -> Kind<Vec<T>> {
        let plural = if self.words.ends_with(['s', 'x']) { "es" } else { "s" };
        let words = format!("list of {}{plural}", self.words);
        let show = self.show;
        let read = move |given: Given<'_>| {
            let list = given.value.as_array().ok_or_else(|| given.wrong_type("write a list in brackets"))?;
            let Given { at, checks, .. } = given;
            let mut values = Vec::with_capacity(list.len());
            for (index, element) in list.iter().enumerate() {
                let at = at.element(index, element.span());
                match (self.read)(Given { value: element.get_ref(), at: &at, checks: &mut *checks }) {
                    Ok(value) => values.push(value),
                    Err(Bad { problem, remedy }) => checks.report.add(&at, problem, remedy),
                }
            }
            Ok(values)
        };
        Kind::new(words, read, move |values: &Vec<T>, names| {
            let shown = values.iter().filter_map(|value| show(value, names));
            Shown::bare(format!("[{}]", shown.map(|one| one.toml()).collect::<Vec<_>>().join(", ")))
        })
    }
}

impl<T: 'static> Kind<Vec<T>> {
    /// The same; an empty list is refused with this remedy, and is how the key is left out.
    pub(super) fn not_empty(self, remedy: &'static str) -> Self {
        let (read, show) = (self.read, self.show);
        let read = move |given: Given<'_>| match given.value.as_array() {
            Some(list) if list.is_empty() => Err(bad("is an empty list", remedy)),
            Some(_) | None => read(given),
        };
        let show =
            move |values: &Vec<T>, names: Names<'_>| show(values, names).filter(|_| !values.is_empty());
        Self::new(self.words, read, show)
    }

    /// The same, or one element `one` by itself.
    pub(super) fn or_one(self, one: Kind<T>) -> Self {
        let read = self.read;
        let read = move |given: Given<'_>| match given.value.as_array() {
            None if given.value.is_str() => (one.read)(given).map(|one| vec![one]),
            None => Err(given.wrong_type("write a text in quotes, or a list of them")),
            Some(_) => read(given),
        };
        Self { words: format!("{}, or {}", one.words, self.words), read: Box::new(read), ..self }
    }
}

/// Returns the kind of a value that is a text which `parse` understands.
pub(super) fn text<T: 'static>(
    words: impl Into<String>,
    parse: impl Fn(&str) -> Result<T, Bad> + 'static,
    show: impl Fn(&T) -> String + 'static,
) -> Kind<T> {
    let words = words.into();
    let remedy = format!("write a text in quotes: {}", words.replace('`', ""));
    let read = move |given: Given<'_>| match given.value.as_str() {
        Some(text) => parse(text),
        None => Err(given.wrong_type(&*remedy)),
    };
    Kind::new(words, read, move |value, _| Shown::text(show(value)))
}

/// One of the spellings of its type.
pub(super) fn one_of<T: Spelled>() -> Kind<T> {
    let names = |between: &str| {
        T::ALL.iter().map(|one| format!("{:?}", one.label())).collect::<Vec<_>>().join(between)
    };
    let remedy = format!("write {}", names(" or "));
    let parse = move |text: &str| {
        let found = T::ALL.iter().copied().find(|choice| choice.label() == text);
        found.ok_or_else(|| bad(format!("{text:?} is not a choice here"), &*remedy))
    };
    text(format!("`{}`", names("`, `")), parse, |value: &T| value.label().to_owned())
}

/// A path. Where it is empty, nothing is there.
pub(super) fn path() -> Kind<PathBuf> {
    text("path", |text| Ok(PathBuf::from(text)), |path| path.display().to_string())
}

/// Returns the kind of a value that is `true` or `false`.
pub(super) fn truth() -> Kind<bool> {
    let remedy = "write true or false, without quotes";
    let read = move |given: Given<'_>| given.value.as_bool().ok_or_else(|| given.wrong_type(remedy));
    Kind::new("`true`, `false`", read, |value, _| Shown::bare(value))
}

/// Returns the kind of a value that is a whole number within `range`.
pub(super) fn whole<T: TryFrom<i64> + Display + 'static>(range: RangeInclusive<i64>) -> Kind<T> {
    let words = format!("{} to {}", range.start(), range.end());
    let remedy = format!("write a whole number from {words}, without quotes");
    let read = move |given: Given<'_>| {
        let number = given.value.as_integer().and_then(integer);
        let number = number.ok_or_else(|| given.wrong_type(&*remedy))?;
        let value = T::try_from(number).ok().filter(|_| range.contains(&number));
        value.ok_or_else(|| bad(format!("{number} is out of range"), &*remedy))
    };
    Kind::new(words, read, |value, _| Shown::bare(value))
}

/// A number above 0 and at most 1.
pub(super) fn share() -> Kind<f64> {
    let remedy = "write a number above 0 and at most 1, without quotes";
    let read = move |given: Given<'_>| {
        let share = given.number().ok_or_else(|| given.wrong_type(remedy))?;
        let fits = share > 0.0 && share <= 1.0;
        fits.then_some(share).ok_or_else(|| bad(format!("{share} is not a share"), remedy))
    };
    Kind::new("above 0, at most 1", read, |value, _| Shown::bare(value))
}

/// A number of bytes, with or without a unit.
pub(super) fn size<T: TryFrom<u64> + TryInto<u64> + Copy + 'static>(range: RangeInclusive<u64>) -> Kind<T> {
    let shown = |bytes: u64| {
        let text = value::size_text(bytes);
        Shown { is_text: !text.bytes().all(|byte| byte.is_ascii_digit()), text }
    };
    let [least, most] = [*range.start(), *range.end()].map(shown);
    let remedy = format!("write {} to {}", least.toml(), most.toml());
    let read = move |given: Given<'_>| {
        let bytes = match (given.value.as_integer(), given.value.as_str()) {
            (Some(number), _) => integer(number).and_then(|number| u64::try_from(number).ok()),
            (None, Some(text)) => {
                Some(value::size(text).ok_or_else(|| bad(format!("{text:?} is not a size"), &*remedy))?)
            }
            (None, None) => return Err(given.wrong_type(&*remedy)),
        };
        let value = bytes.filter(|bytes| range.contains(bytes)).and_then(|bytes| T::try_from(bytes).ok());
        value.ok_or_else(|| bad("is out of range", &*remedy))
    };
    let words = format!("size, {} to {}", least.text, most.text);
    Kind::new(words, read, move |value, _| (*value).try_into().ok().map(shown))
}

/// What is said of a number in place of a duration.
const NO_UNIT: &str = "is a number without a unit";

/// A duration, and why it may not be shorter and not be longer.
pub(super) fn time(range: RangeInclusive<Duration>, why: Option<[&'static str; 2]>) -> Kind<Duration> {
    let shown = |time: &Duration| humantime::format_duration(*time).to_string();
    let [least, most] = [range.start(), range.end()].map(shown);
    let words = format!("duration, {least} to {most}");
    let parse = move |text: &str| {
        let duration = value::duration(text)?;
        let problem = match (why, duration < *range.start()) {
            _ if range.contains(&duration) => return Ok(duration),
            (None, _) => format!("{text:?} is out of range"),
            (Some([why, _]), true) => format!("{text:?} is too short: {why}"),
            (Some([_, why]), false) => format!("{text:?} is too long: {why}"),
        };
        Err(bad(problem, format!("write \"{least}\" to \"{most}\"")))
    };
    let inner = text(words, parse, shown);
    let read = inner.read;
    let read = move |mut given: Given<'_>| match given.value.as_integer().and_then(integer) {
        // Other programs count seconds here.
        Some(seconds) if seconds > 0 => {
            Err(bad(NO_UNIT, format!("write \"{seconds}s\" if seconds are meant")))
        }
        Some(_) | None => read(given.again()),
    };
    Kind { words: inner.words, read: Box::new(read), show: inner.show }
}

/// The name of a peer or a service.
pub(super) fn name() -> Kind<Arc<str>> {
    text("name", value::name, ToString::to_string)
}

/// The name of a peer or a service that another key refers to: whether it is a good name is checked where it is declared.
pub(super) fn named() -> Kind<Arc<str>> {
    text("name", |text| Ok(text.into()), ToString::to_string)
}

/// A list of names of services, each once, as their indices. The name of a range stands for the service of each of its ports.
pub(super) fn granted() -> Kind<Vec<usize>> {
    let read = |mut given: Given<'_>| {
        let name = (named().read)(given.again())?;
        let Given { at, checks, .. } = given;
        let mut found: Vec<usize> = match index_of(&name, &checks.services, "service") {
            Ok(index) => vec![index],
            Err(unknown) => Some(services_of(&name, &checks.services).collect())
                .filter(|found: &Vec<usize>| !found.is_empty())
                .ok_or(unknown)?,
        };
        if found.iter().any(|index| checks.any.contains(index)) {
            let remedy = "remove it here: networks of a [[user]] say what is reached through it";
            return Err(bad(format!("{name:?} has no address of its own"), remedy));
        }
        found.retain(|index| checks.granted.insert(format!("{:?} {} {index}", at.file, at.list())));
        Some(found).filter(|found| !found.is_empty()).ok_or_else(|| bad("is named twice", "remove one"))
    };
    let list = Kind::new("name", read, |_, _| None).list();
    let show = |indices: &Vec<usize>, names: Names<'_>| {
        let shown = indices.iter().filter_map(|index| Shown::text(names.services.get(*index)?));
        Shown::bare(format!("[{}]", shown.map(|one| one.toml()).collect::<Vec<_>>().join(", ")))
    };
    Kind::new(list.words, move |given| Ok((list.read)(given)?.concat()), show)
}

/// The index of the service or peer of this name.
pub(super) fn index_of(name: &Arc<str>, names: &[Arc<str>], section: &str) -> Result<usize, Bad> {
    names.iter().position(|known| known == name).ok_or_else(|| {
        let or_use = if names.is_empty() { "" } else { ", or use " };
        let meant = crate::section::nearest(name, names.iter().map(|name| &**name));
        let meant = meant.map(|meant| format!("did you mean {meant:?}? Else ")).unwrap_or_default();
        let remedy = format!("{meant}add that [[{section}]]{or_use}{}", names.join(" or "));
        bad(format!("no [[{section}]] is named {name:?}"), remedy)
    })
}

/// `or!(kind of the number, "auto", Enum::{Auto, Number})`
macro_rules! or {
    ($number:expr, $word:literal, $name:ident::{$without:ident, $with:ident}) => {
        $number.or(
            $word,
            |number| number.map_or($name::$without, $name::$with),
            |value| match value {
                $name::$without => None,
                $name::$with(number) => Some(number),
            },
        )
    };
}
pub(super) use or;
