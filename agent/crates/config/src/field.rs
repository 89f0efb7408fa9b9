//! The values of the mirror in `file.rs`: each with its position, and with the type that stands there if it is the wrong one.

use std::{fmt, ops::Range};

use serde::{
    Deserialize, Deserializer,
    de::{self, MapAccess, SeqAccess, Visitor},
};
use toml::Spanned;

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
