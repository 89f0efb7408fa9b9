//! Field lines: a list in the order in which they came, with repeated names kept apart (RFC 9110 §5, RFC 9114 §4.2).

use std::borrow::Cow;

use thiserror::Error;

/// What a field line costs beyond its name and value when field sections are measured (RFC 9114 §4.2.2).
pub const FIELD_OVERHEAD: u64 = 32;

/// Fields that are about one connection of HTTP/1.1, which HTTP/3 does not have (RFC 9114 §4.2).
pub const CONNECTION_FIELDS: [&str; 5] =
    ["connection", "keep-alive", "proxy-connection", "transfer-encoding", "upgrade"];

/// A field line.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Field {
    name: Cow<'static, str>,
    value: Cow<'static, [u8]>,
}

impl Field {
    /// A field line whose name and value are whatever they are: pseudo-headers have a name that [`Fields`] refuses.
    pub(crate) const fn new(name: Cow<'static, str>, value: Cow<'static, [u8]>) -> Self {
        Self { name, value }
    }

    /// The name of the field, in lowercase.
    #[must_use]
    pub fn name(&self) -> &str {
        &self.name
    }

    /// The value, which need not be UTF-8.
    #[must_use]
    pub fn value(&self) -> &[u8] {
        &self.value
    }

    pub(crate) fn into_value(self) -> Cow<'static, [u8]> {
        self.value
    }

    pub(crate) fn size(&self) -> u64 {
        size(self.name.len(), self.value.len())
    }
}

/// What a field line counts for in the size of a field section.
pub(crate) const fn size(name_bytes: usize, value_bytes: usize) -> u64 {
    (name_bytes + value_bytes) as u64 + FIELD_OVERHEAD
}

/// Why a field line may not stand in a message.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Error)]
pub enum BadField {
    /// The name is empty, has an uppercase letter, or a character that no name has.
    #[error("the name of a field is no token in lowercase")]
    Name,
    /// The value has a control character.
    #[error("the value of a field has a control character")]
    Value,
    /// The field is one of [`CONNECTION_FIELDS`], or `te` with another value than `trailers`.
    #[error("a field of HTTP/1.1's connections")]
    Connection,
}

/// Fields of a message, or its trailers. Each may stand in a message of HTTP/3.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Fields {
    lines: Vec<Field>,
}

impl Fields {
    /// Appends a line.
    ///
    /// # Errors
    ///
    /// Why it may not stand in a message. Pseudo-headers may not.
    pub fn push(
        &mut self,
        name: impl Into<Cow<'static, str>>,
        value: impl Into<Cow<'static, [u8]>>,
    ) -> Result<(), BadField> {
        self.push_line(Field::new(name.into(), value.into()))
    }

    pub(crate) fn push_line(&mut self, line: Field) -> Result<(), BadField> {
        if !is_name(line.name()) {
            return Err(BadField::Name);
        }
        if !line.value().iter().all(|byte| is_of_value(*byte)) {
            return Err(BadField::Value);
        }
        let only_trailers = || line.value().eq_ignore_ascii_case(b"trailers");
        if CONNECTION_FIELDS.contains(&line.name()) || (line.name() == "te" && !only_trailers()) {
            return Err(BadField::Connection);
        }
        self.lines.push(line);
        Ok(())
    }

    /// All lines in their order.
    pub fn iter(&self) -> std::slice::Iter<'_, Field> {
        self.lines.iter()
    }

    /// The values of a name in their order.
    pub fn values<'a>(&'a self, name: &'a str) -> impl Iterator<Item = &'a [u8]> {
        self.lines.iter().filter(move |line| line.name() == name).map(Field::value)
    }

    /// Takes out all lines of a name.
    pub fn remove(&mut self, name: &str) {
        self.lines.retain(|line| line.name() != name);
    }

    /// All `cookie` lines as the one that HTTP/1.1 and HTTP/2 without splitting have (RFC 9114 §4.2.1).
    #[must_use]
    pub fn cookie(&self) -> Option<Vec<u8>> {
        let mut values = self.values("cookie");
        let first = values.next()?.to_vec();
        Some(values.fold(first, |mut joined, value| {
            joined.extend_from_slice(b"; ");
            joined.extend_from_slice(value);
            joined
        }))
    }

    /// How many lines there are.
    #[must_use]
    pub const fn len(&self) -> usize {
        self.lines.len()
    }

    /// Whether there is no line.
    #[must_use]
    pub const fn is_empty(&self) -> bool {
        self.lines.is_empty()
    }
}

impl<'a> IntoIterator for &'a Fields {
    type Item = &'a Field;
    type IntoIter = std::slice::Iter<'a, Field>;

    fn into_iter(self) -> Self::IntoIter {
        self.iter()
    }
}

/// Whether `name` is a token without uppercase letters (RFC 9110 §5.6.2, RFC 9114 §4.2).
fn is_name(name: &str) -> bool {
    is_token(name.as_bytes()) && !name.bytes().any(|byte| byte.is_ascii_uppercase())
}

/// Whether `text` is a token (RFC 9110 §5.6.2).
pub(crate) fn is_token(text: &[u8]) -> bool {
    let of_token = |byte: &u8| byte.is_ascii_alphanumeric() || b"!#$%&'*+-.^_`|~".contains(byte);
    !text.is_empty() && text.iter().all(of_token)
}

/// Whether `byte` may stand in the value of a field (RFC 9110 §5.5): no control character but the tab.
const fn is_of_value(byte: u8) -> bool {
    byte == b'\t' || (byte >= 0x20 && byte != 0x7f)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_may_not_stand_in_a_message_is_refused() {
        let refused: [(&'static str, &'static [u8], BadField); 12] = [
            ("", b"x", BadField::Name),
            ("Accept", b"x", BadField::Name),
            ("a b", b"x", BadField::Name),
            (":path", b"/", BadField::Name),
            ("a", b"x\r\ny: z", BadField::Value),
            ("a", b"x\0", BadField::Value),
            ("a", b"\x7f", BadField::Value),
            ("connection", b"close", BadField::Connection),
            ("transfer-encoding", b"chunked", BadField::Connection),
            ("upgrade", b"websocket", BadField::Connection),
            ("te", b"gzip", BadField::Connection),
            ("keep-alive", b"", BadField::Connection),
        ];
        for (name, value, why) in refused {
            assert_eq!(Fields::default().push(name, value), Err(why), "{name}");
        }
        let mut fields = Fields::default();
        for (name, value) in [("te", &b"Trailers"[..]), ("a", b"\xe4\t "), ("x-1_y", b"")] {
            assert_eq!(fields.push(name, value), Ok(()), "{name}");
        }
        assert_eq!(fields.len(), 3);
    }

    #[test]
    fn repeated_names_stay_apart_and_cookies_can_be_joined() {
        let mut fields = Fields::default();
        assert_eq!(fields.cookie(), None);
        for (name, value) in
            [("cookie", &b"a=1"[..]), ("set-cookie", b"x"), ("cookie", b"b=2"), ("set-cookie", b"y")]
        {
            fields.push(name, value).unwrap();
        }
        assert_eq!(fields.values("set-cookie").collect::<Vec<_>>(), [b"x", b"y"]);
        assert_eq!(fields.cookie().as_deref(), Some(&b"a=1; b=2"[..]));
    }
}
