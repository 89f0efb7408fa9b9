//! What the value of a key may be: one [`Kind`] for each way to write a value, whatever section it stands in.

use std::{fmt::Display, ops::RangeInclusive, time::Duration};

use toml::de::{DeFloat, DeInteger, DeValue};

use crate::{
    checks::Checks,
    section::{At, Names},
    value::{self, Bad, bad},
};

/// A way to write a value of type `T`.
pub(super) trait Kind<T> {
    /// What may be written, as the reference says it.
    fn words(&self) -> String;

    /// The value, or what is wrong with it. Problems of its elements are reported.
    fn read(&self, given: Given<'_>) -> Result<T, Bad>;

    /// The value as it is written; `None`: nothing is.
    fn show(&self, value: &T, names: Names<'_>) -> Option<Shown>;
}

/// A value of a file, where it stands, and what was read before it.
pub(super) struct Given<'g> {
    pub(super) value: &'g DeValue<'g>,
    pub(super) at: &'g At,
    pub(super) checks: &'g mut Checks,
}

impl<'g> Given<'g> {
    /// Reads the value, and reports what is wrong with it.
    pub(super) fn read<T>(self, kind: &impl Kind<T>) -> Option<T> {
        let (value, at) = (self.value, self.at);
        let again = Given { value, at, checks: &mut *self.checks };
        kind.read(again).map_err(|Bad { problem, remedy }| self.checks.report.add(at, problem, remedy)).ok()
    }

    /// The text that the value is; `words` says which.
    pub(super) fn text(&self, words: impl FnOnce() -> String) -> Result<&'g str, Bad> {
        let remedy = || format!("write a text in quotes: {}", words().replace('`', ""));
        self.value.as_str().ok_or_else(|| self.wrong_type(remedy()))
    }

    pub(super) fn wrong_type(&self, remedy: impl Into<String>) -> Bad {
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

    /// The elements of a list, each read by `read`, which gets an element with its place; those that are wrong are left out.
    pub(super) fn elements<T>(self, mut read: impl FnMut(Given<'_>) -> Option<T>) -> Result<Vec<T>, Bad> {
        let list = self.value.as_array().ok_or_else(|| self.wrong_type("write a list in brackets"))?;
        let elements = list.iter().enumerate().filter_map(|(index, element)| {
            let at = self.at.element(index, element.span());
            read(Given { value: element.get_ref(), at: &at, checks: &mut *self.checks })
        });
        Ok(elements.collect())
    }
}

/// The number, if it is not too large.
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
    fn text(text: impl Into<String>) -> Option<Self> {
        Some(Self { text: text.into(), is_text: true })
    }

    fn bare(text: impl Into<String>) -> Option<Self> {
        Some(Self { text: text.into(), is_text: false })
    }

    /// As the file has it.
    pub(super) fn toml(&self) -> String {
        if self.is_text { format!("\"{}\"", self.text) } else { self.text.clone() }
    }
}

/// `["a", "b"]`
pub(super) fn list(shown: impl IntoIterator<Item = Shown>) -> Option<Shown> {
    let all: Vec<String> = shown.into_iter().map(|one| one.toml()).collect();
    Shown::bare(format!("[{}]", all.join(", ")))
}

/// A key without a default.
pub(super) struct Optional<K>(pub(super) K);

impl<T, K: Kind<T>> Kind<Option<T>> for Optional<K> {
    fn words(&self) -> String {
        self.0.words()
    }

    fn read(&self, given: Given<'_>) -> Result<Option<T>, Bad> {
        self.0.read(given).map(Some)
    }

    fn show(&self, value: &Option<T>, names: Names<'_>) -> Option<Shown> {
        self.0.show(value.as_ref()?, names)
    }
}

/// A value of an enum, by its spelling.
pub(super) trait Spelled: Copy + 'static {
    const ALL: &'static [Self];

    fn label(self) -> &'static str;
}

/// What the kernel may do where it can, or not at all.
impl Spelled for bool {
    const ALL: &'static [Self] = &[true, false];

    fn label(self) -> &'static str {
        if self { "auto" } else { "off" }
    }
}

/// One of the spellings of its type.
pub(super) struct OneOf;

impl<T: Spelled> Kind<T> for OneOf {
    fn words(&self) -> String {
        T::ALL.iter().map(|choice| format!("`{:?}`", choice.label())).collect::<Vec<_>>().join(", ")
    }

    fn read(&self, given: Given<'_>) -> Result<T, Bad> {
        let text = given.text(|| Kind::<T>::words(self))?;
        T::ALL.iter().copied().find(|choice| choice.label() == text).ok_or_else(|| {
            let names: Vec<String> = T::ALL.iter().map(|choice| format!("{:?}", choice.label())).collect();
            bad(format!("{text:?} is not a choice here"), format!("write {}", names.join(" or ")))
        })
    }

    fn show(&self, value: &T, _: Names<'_>) -> Option<Shown> {
        Shown::text(value.label())
    }
}

/// `true` or `false`.
pub(super) struct Truth;

impl Kind<bool> for Truth {
    fn words(&self) -> String {
        "`true`, `false`".to_owned()
    }

    fn read(&self, given: Given<'_>) -> Result<bool, Bad> {
        given.value.as_bool().ok_or_else(|| given.wrong_type("write true or false, without quotes"))
    }

    fn show(&self, value: &bool, _: Names<'_>) -> Option<Shown> {
        Shown::bare(value.to_string())
    }
}

/// A whole number.
pub(super) struct Whole(pub(super) RangeInclusive<i64>);

impl<T: TryFrom<i64> + Display> Kind<T> for Whole {
    fn words(&self) -> String {
        format!("{} to {}", self.0.start(), self.0.end())
    }

    fn read(&self, given: Given<'_>) -> Result<T, Bad> {
        let remedy =
            format!("write a whole number from {} to {}, without quotes", self.0.start(), self.0.end());
        let number = given.value.as_integer().and_then(integer);
        let Some(number) = number else { return Err(given.wrong_type(remedy)) };
        let value = T::try_from(number).ok().filter(|_| self.0.contains(&number));
        value.ok_or_else(|| bad(format!("{number} is out of range"), remedy))
    }

    fn show(&self, value: &T, _: Names<'_>) -> Option<Shown> {
        Shown::bare(value.to_string())
    }
}

/// A number above 0 and at most 1.
pub(super) struct Share;

impl Kind<f64> for Share {
    fn words(&self) -> String {
        "above 0, at most 1".to_owned()
    }

    fn read(&self, given: Given<'_>) -> Result<f64, Bad> {
        let remedy = "write a number above 0 and at most 1, without quotes";
        let whole = given.value.as_integer().map(DeInteger::as_str);
        let number = whole.or_else(|| given.value.as_float().map(DeFloat::as_str));
        let Some(share) = number.and_then(|number| number.parse::<f64>().ok()) else {
            return Err(given.wrong_type(remedy));
        };
        if share > 0.0 && share <= 1.0 {
            Ok(share)
        } else {
            Err(bad(format!("{share} is not a share"), remedy))
        }
    }

    fn show(&self, value: &f64, _: Names<'_>) -> Option<Shown> {
        Shown::bare(value.to_string())
    }
}

/// A number of bytes, with or without a unit.
pub(super) struct Size(pub(super) RangeInclusive<u64>);

impl Size {
    fn shown(bytes: u64) -> Shown {
        let text = value::size_text(bytes);
        let is_text = !text.bytes().all(|byte| byte.is_ascii_digit());
        Shown { text, is_text }
    }
}

impl<T: TryFrom<u64> + TryInto<u64> + Copy> Kind<T> for Size {
    fn words(&self) -> String {
        format!("size, {} to {}", value::size_text(*self.0.start()), value::size_text(*self.0.end()))
    }

    fn read(&self, given: Given<'_>) -> Result<T, Bad> {
        let [least, most] = [self.0.start(), self.0.end()].map(|bytes| Self::shown(*bytes).toml());
        let remedy = format!("write {least} to {most}");
        let bytes = match (given.value.as_integer(), given.value.as_str()) {
            (Some(number), _) => integer(number).and_then(|number| u64::try_from(number).ok()),
            (None, Some(text)) => match value::size(text) {
                Some(bytes) => Some(bytes),
                None => return Err(bad(format!("{text:?} is not a size"), remedy)),
            },
            (None, None) => return Err(given.wrong_type(remedy)),
        };
        let value = bytes.filter(|bytes| self.0.contains(bytes)).and_then(|bytes| T::try_from(bytes).ok());
        value.ok_or_else(|| bad("is out of range", remedy))
    }

    fn show(&self, value: &T, _: Names<'_>) -> Option<Shown> {
        (*value).try_into().ok().map(Self::shown)
    }
}

/// A word that stands for no number, or a number.
pub(super) struct Or<K, N, T> {
    pub(super) word: &'static str,
    pub(super) number: K,
    pub(super) wrap: fn(Option<N>) -> T,
    pub(super) unwrap: fn(T) -> Option<N>,
}

/// `or!("auto", kind of the number, Enum::{Auto, Number})`
macro_rules! or {
    ($word:literal, $number:expr, $name:ident::{$without:ident, $with:ident}) => {
        $crate::kinds::Or {
            word: $word,
            number: $number,
            wrap: |number| number.map_or($name::$without, $name::$with),
            unwrap: |value| match value {
                $name::$without => None,
                $name::$with(number) => Some(number),
            },
        }
    };
}
pub(super) use or;

impl<N, T: Copy, K: Kind<N>> Kind<T> for Or<K, N, T> {
    fn words(&self) -> String {
        format!("`{:?}`, {}", self.word, self.number.words())
    }

    fn read(&self, given: Given<'_>) -> Result<T, Bad> {
        if given.value.as_str() == Some(self.word) {
            return Ok((self.wrap)(None));
        }
        self.number.read(given).map(|number| (self.wrap)(Some(number))).map_err(|Bad { problem, remedy }| {
            let rest = remedy.strip_prefix("write ").unwrap_or(&remedy);
            bad(problem, format!("write {:?}, or {rest}", self.word))
        })
    }

    fn show(&self, value: &T, names: Names<'_>) -> Option<Shown> {
        let number = (self.unwrap)(*value);
        number.map_or_else(|| Shown::text(self.word), |number| self.number.show(&number, names))
    }
}

/// A duration, and why it may not be shorter and not be longer.
pub(super) struct Time {
    pub(super) range: RangeInclusive<Duration>,
    pub(super) why: Option<[&'static str; 2]>,
}

impl Time {
    pub(super) fn new(range: RangeInclusive<Duration>) -> Self {
        Self { range, why: None }
    }

    fn limits(&self) -> [String; 2] {
        [self.range.start(), self.range.end()].map(|time| humantime::format_duration(*time).to_string())
    }
}

impl Kind<Duration> for Time {
    fn words(&self) -> String {
        let [least, most] = self.limits();
        format!("duration, {least} to {most}")
    }

    fn read(&self, given: Given<'_>) -> Result<Duration, Bad> {
        let text = given.text(|| self.words())?;
        let duration = value::duration(text)?;
        if self.range.contains(&duration) {
            return Ok(duration);
        }
        let problem = match (self.why, duration < *self.range.start()) {
            (None, _) => format!("{text:?} is out of range"),
            (Some([why, _]), true) => format!("{text:?} is too short: {why}"),
            (Some([_, why]), false) => format!("{text:?} is too long: {why}"),
        };
        let [least, most] = self.limits();
        Err(bad(problem, format!("write \"{least}\" to \"{most}\"")))
    }

    fn show(&self, value: &Duration, _: Names<'_>) -> Option<Shown> {
        Shown::text(humantime::format_duration(*value).to_string())
    }
}

/// A text that is parsed.
pub(super) struct Text<T> {
    words: &'static str,
    parse: fn(&str) -> Result<T, Bad>,
    show: fn(&T) -> String,
    /// What else is checked and remembered.
    then: fn(&mut Checks, &T, &At) -> Result<(), Bad>,
}

impl<T> Text<T> {
    /// A text that `parse` understands.
    pub(super) const fn new(
        words: &'static str,
        parse: fn(&str) -> Result<T, Bad>,
        show: fn(&T) -> String,
    ) -> Self {
        Self { words, parse, show, then: |_, _, _| Ok(()) }
    }

    /// The same, and what is right is handed to `then`.
    pub(super) fn then(self, then: fn(&mut Checks, &T, &At) -> Result<(), Bad>) -> Self {
        Self { then, ..self }
    }
}

impl<T> Kind<T> for Text<T> {
    fn words(&self) -> String {
        self.words.to_owned()
    }

    fn read(&self, given: Given<'_>) -> Result<T, Bad> {
        let value = (self.parse)(given.text(|| self.words())?)?;
        (self.then)(given.checks, &value, given.at)?;
        Ok(value)
    }

    /// Nothing is written for an empty text.
    fn show(&self, value: &T, _: Names<'_>) -> Option<Shown> {
        Shown::text((self.show)(value)).filter(|shown| !shown.text.is_empty())
    }
}

/// A list.
pub(super) struct List<K> {
    of: K,
    /// What to do about an empty one; `None`: it may be empty.
    empty: Option<&'static str>,
    /// Whether one element may stand alone.
    or_one: bool,
}

impl<K> List<K> {
    /// A list of elements of this kind.
    pub(super) fn of(of: K) -> Self {
        Self { of, empty: None, or_one: false }
    }

    /// The same; an empty one is refused with this remedy, and is how the key is left out.
    pub(super) fn not_empty(self, remedy: &'static str) -> Self {
        Self { empty: Some(remedy), ..self }
    }

    /// The same, and one element may stand alone.
    pub(super) fn or_one(self) -> Self {
        Self { or_one: true, ..self }
    }
}

impl<T, K: Kind<T>> Kind<Vec<T>> for List<K> {
    fn words(&self) -> String {
        let one = self.of.words();
        let plural = if one.ends_with(['s', 'x']) { "es" } else { "s" };
        let list = format!("list of {one}{plural}");
        if self.or_one { format!("{one}, or {list}") } else { list }
    }

    fn read(&self, given: Given<'_>) -> Result<Vec<T>, Bad> {
        match (given.value.as_array(), self.empty) {
            (Some(list), Some(remedy)) if list.is_empty() => Err(bad("is an empty list", remedy)),
            (None, _) if self.or_one && given.value.is_str() => Ok(vec![self.of.read(given)?]),
            (None, _) if self.or_one => Err(given.wrong_type("write a text in quotes, or a list of them")),
            (Some(_), _) | (None, _) => given.elements(|element| element.read(&self.of)),
        }
    }

    fn show(&self, value: &Vec<T>, names: Names<'_>) -> Option<Shown> {
        let left_out = value.is_empty() && self.empty.is_some();
        let shown = || value.iter().filter_map(|element| self.of.show(element, names));
        if left_out { None } else { list(shown()) }
    }
}
