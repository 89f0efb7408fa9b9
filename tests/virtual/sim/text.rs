//! The text of schedules: a word, and fields with names.

use std::str::FromStr;

/// Why a text is no schedule.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Malformed {
    Empty,
    /// The line that says nothing known.
    Line(String),
    /// The line, and the field that it lacks or whose value cannot be read.
    Field(String, &'static str),
}

/// The fields of a line.
pub(crate) struct Fields<'a>(&'a str);

impl<'a> Fields<'a> {
    /// The first word of a line, and its fields.
    pub(crate) fn of(line: &'a str) -> Result<(&'a str, Self), Malformed> {
        let name = line.split_whitespace().next().ok_or(Malformed::Empty)?;
        Ok((name, Self(line)))
    }

    /// The value of a field.
    pub(crate) fn get<T: FromStr>(&self, name: &'static str) -> Result<T, Malformed> {
        let mut values =
            self.0.split_whitespace().filter_map(|word| word.strip_prefix(name)?.strip_prefix('='));
        let value = values.next().and_then(|value| value.parse().ok());
        value.ok_or_else(|| Malformed::Field(self.0.to_owned(), name))
    }
}

/// Writes variables as fields.
macro_rules! write_fields {
    ($f:expr, $($name:ident),+) => {
        $(write!($f, concat!(stringify!($name), "={} "), $name)?;)+
    };
}
pub(crate) use write_fields;
