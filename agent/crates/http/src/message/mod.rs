//! Heads of requests and responses: field sections whose pseudo-headers are as RFC 9114 §4.3 and RFC 9220 demand.

use std::borrow::Cow;

use thiserror::Error;

use crate::{
    fields::{BadField, Field, Fields, is_token},
    qpack,
};

/// Text of a pseudo-header, which is visible ASCII.
pub type Text = Cow<'static, str>;

/// The head of a request.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Request {
    /// The method, a token.
    pub method: Text,
    /// The scheme; `None` only for a plain CONNECT.
    pub scheme: Option<Text>,
    /// Host and port that the request is for: `:authority`, or else `host`. A plain CONNECT's is the target.
    pub authority: Text,
    /// Path and query; `None` only for a plain CONNECT.
    pub path: Option<Text>,
    /// The protocol of an extended CONNECT (RFC 9220).
    pub protocol: Option<Text>,
    /// All other fields.
    pub fields: Fields,
}

/// Why a head is malformed (RFC 9114 §4.1.2).
#[derive(Debug, Clone, Copy, PartialEq, Eq, Error)]
pub enum Malformed {
    /// A line may not stand in a message.
    #[error("{0}")]
    Field(#[from] BadField),
    /// A pseudo-header that is not defined, occurs twice, or stands behind a field.
    #[error("a pseudo-header that is unknown, repeated or late")]
    Pseudo,
    /// A pseudo-header is missing, or one is there that this method may not have.
    #[error("pseudo-headers that do not make a request")]
    Missing,
    /// The value of a pseudo-header has characters or a form that it may not have.
    #[error("the value of a pseudo-header has a wrong form")]
    Value,
    /// `host` contradicts `:authority`, or occurs twice.
    #[error("two hosts")]
    Host,
    /// `content-length` is no number, or two different ones.
    #[error("no length, or two")]
    ContentLength,
}

impl Request {
    /// A request with `https` as its scheme and no fields.
    #[must_use]
    pub fn new(method: impl Into<Text>, authority: impl Into<Text>, path: impl Into<Text>) -> Self {
        Self {
            method: method.into(),
            scheme: Some(Cow::Borrowed("https")),
            authority: authority.into(),
            path: Some(path.into()),
            protocol: None,
            fields: Fields::default(),
        }
    }

    /// Makes a request of `lines`. `:protocol` is allowed if `extended_connect`, which is what this end said in its settings.
    ///
    /// # Errors
    ///
    /// Why the request is malformed.
    pub fn from_lines(lines: Vec<Field>, extended_connect: bool) -> Result<Self, Malformed> {
        let (pseudo, fields) = split(lines, &[":method", ":scheme", ":authority", ":path", ":protocol"])?;
        let [method, scheme, authority, path, protocol] = pseudo;
        let host = host(&fields)?;
        content_length(&fields)?;
        let method = method.filter(|method| is_token(method.as_bytes())).ok_or(Malformed::Missing)?;
        let is_connect = method == "CONNECT";
        if protocol.is_some() && !(extended_connect && is_connect) {
            return Err(Malformed::Pseudo);
        }
        // A plain CONNECT has a target and nothing else; everything else has a scheme and a path.
        if (is_connect && protocol.is_none()) != (scheme.is_none() && path.is_none()) {
            return Err(Malformed::Missing);
        }
        if scheme.is_some() != path.is_some() || (is_connect && authority.is_none()) {
            return Err(Malformed::Missing);
        }
        if let (Some(authority), Some(host)) = (&authority, &host)
            && !authority.eq_ignore_ascii_case(host)
        {
            return Err(Malformed::Host);
        }
        let authority = authority.or(host).ok_or(Malformed::Missing)?;
        let has_form = is_authority(&authority)
            && scheme.as_deref().is_none_or(is_scheme)
            && path.as_deref().is_none_or(|path| is_path(path, &method))
            && protocol.as_deref().is_none_or(|protocol| is_token(protocol.as_bytes()));
        if !has_form {
            return Err(Malformed::Value);
        }
        Ok(Self { method, scheme, authority, path, protocol, fields })
    }

    /// Whether the stream becomes a tunnel if the request succeeds: it has no content, and no trailers.
    #[must_use]
    pub fn is_connect(&self) -> bool {
        self.method == "CONNECT"
    }

    /// How many bytes of content the request says to have.
    #[must_use]
    pub fn content_length(&self) -> Option<u64> {
        if self.is_connect() { None } else { content_length(&self.fields).ok().flatten() }
    }

    /// Whether content is expected after the head, and is passed on.
    #[must_use]
    pub fn has_content(&self) -> bool {
        self.method == "POST" || self.content_length().is_some_and(|length| length > 0)
    }

    /// Appends the request as a field section; its size as RFC 9114 §4.2.2 counts it.
    pub fn encode(&self, out: &mut Vec<u8>) -> u64 {
        let pseudo = [
            (":method", Some(&self.method)),
            (":scheme", self.scheme.as_ref()),
            (":authority", Some(&self.authority)),
            (":path", self.path.as_ref()),
            (":protocol", self.protocol.as_ref()),
        ];
        let pseudo = pseudo.iter().filter_map(|(name, value)| Some((*name, (*value)?.as_bytes())));
        qpack::encode(pseudo.chain(self.fields.iter().map(|line| (line.name(), line.value()))), out)
    }
}

/// The head of a response.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Response {
    /// The status, 100 to 999, but for 101, which HTTP/3 does not have.
    pub status: u16,
    /// All fields.
    pub fields: Fields,
}

impl Response {
    /// A response without fields.
    #[must_use]
    pub fn new(status: u16) -> Self {
        Self { status, fields: Fields::default() }
    }

    /// Makes a response of `lines`, as a client does.
    ///
    /// # Errors
    ///
    /// Why the response is malformed.
    pub fn from_lines(lines: Vec<Field>) -> Result<Self, Malformed> {
        let ([status], fields) = split(lines, &[":status"])?;
        let status = status.ok_or(Malformed::Missing)?;
        let digits = status.len() == 3 && status.bytes().all(|byte| byte.is_ascii_digit());
        let status =
            status.parse().ok().filter(|status| digits && is_status(*status)).ok_or(Malformed::Value)?;
        Ok(Self { status, fields })
    }

    /// Whether another response follows on the stream.
    #[must_use]
    pub const fn is_interim(&self) -> bool {
        self.status < 200
    }

    /// Appends the response as a field section; its size as RFC 9114 §4.2.2 counts it.
    pub fn encode(&self, out: &mut Vec<u8>) -> u64 {
        let status = self.status.to_string();
        let pseudo = std::iter::once((":status", status.as_bytes()));
        qpack::encode(pseudo.chain(self.fields.iter().map(|line| (line.name(), line.value()))), out)
    }
}

/// Whether a message of HTTP/3 may have `status`.
pub(crate) const fn is_status(status: u16) -> bool {
    status >= 100 && status < 1000 && status != 101
}

/// Trailers: fields without pseudo-headers.
///
/// # Errors
///
/// Why they are malformed.
pub fn trailers(lines: Vec<Field>) -> Result<Fields, Malformed> {
    Ok(split(lines, &[])?.1)
}

/// Takes the pseudo-headers `names` from the front of `lines`; the rest are fields.
fn split<const N: usize>(
    lines: Vec<Field>,
    names: &[&str; N],
) -> Result<([Option<Text>; N], Fields), Malformed> {
    let mut pseudo = [const { None }; N];
    let mut fields = Fields::default();
    for line in lines {
        if !line.name().starts_with(':') {
            fields.push_line(line)?;
            continue;
        }
        let place = names.iter().position(|name| *name == line.name()).ok_or(Malformed::Pseudo)?;
        if !fields.is_empty() || pseudo[place].is_some() {
            return Err(Malformed::Pseudo);
        }
        pseudo[place] = Some(visible(line.into_value()).ok_or(Malformed::Value)?);
    }
    Ok((pseudo, fields))
}

/// `value` as text if it is visible ASCII and not empty.
fn visible(value: Cow<'static, [u8]>) -> Option<Text> {
    if value.is_empty() || !value.iter().all(u8::is_ascii_graphic) {
        return None;
    }
    match value {
        Cow::Borrowed(bytes) => Some(Cow::Borrowed(std::str::from_utf8(bytes).ok()?)),
        Cow::Owned(bytes) => Some(Cow::Owned(String::from_utf8(bytes).ok()?)),
    }
}

/// The value of `host`, which may occur once.
fn host(fields: &Fields) -> Result<Option<Text>, Malformed> {
    let mut values = fields.values("host");
    let host = values.next();
    if values.next().is_some() {
        return Err(Malformed::Host);
    }
    host.map(|host| visible(Cow::Owned(host.to_vec())).ok_or(Malformed::Host)).transpose()
}

/// The number in `content-length`, which may be repeated if it is the same.
fn content_length(fields: &Fields) -> Result<Option<u64>, Malformed> {
    let mut length = None;
    for value in fields.values("content-length") {
        let text =
            std::str::from_utf8(value).ok().filter(|text| text.bytes().all(|byte| byte.is_ascii_digit()));
        let number: u64 = text.and_then(|text| text.parse().ok()).ok_or(Malformed::ContentLength)?;
        if length.is_some_and(|length| length != number) {
            return Err(Malformed::ContentLength);
        }
        length = Some(number);
    }
    Ok(length)
}

/// Whether `text` can be host and port, without the user that RFC 9114 §4.3.1 forbids.
fn is_authority(text: &str) -> bool {
    text.bytes().all(|byte| byte.is_ascii_alphanumeric() || b"-._~%!$&'()*+,;=:[]".contains(&byte))
}

/// RFC 3986 §3.1.
fn is_scheme(text: &str) -> bool {
    text.starts_with(|first: char| first.is_ascii_alphabetic())
        && text.bytes().all(|byte| byte.is_ascii_alphanumeric() || b"+-.".contains(&byte))
}

fn is_path(text: &str, method: &str) -> bool {
    (text.starts_with('/') && !text.contains('#')) || (text == "*" && method == "OPTIONS")
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn lines(lines: &[(&'static str, &'static str)]) -> Vec<Field> {
        lines.iter().map(|(name, value)| Field::new((*name).into(), value.as_bytes().into())).collect()
    }

    const GET: [(&str, &str); 4] =
        [(":method", "GET"), (":scheme", "https"), (":authority", "a.example"), (":path", "/")];
    const CONNECT_UDP: [(&str, &str); 5] = [
        (":method", "CONNECT"),
        (":protocol", "connect-udp"),
        (":scheme", "https"),
        (":authority", "a.example"),
        (":path", "/.well-known/masque/udp/b/53/"),
    ];

    #[test]
    fn the_three_kinds_of_requests() {
        let get = Request::from_lines(lines(&GET), false).unwrap();
        assert_eq!(get, Request::new("GET", "a.example", "/"));
        let connect = [(":method", "CONNECT"), (":authority", "b.example:443")];
        let connect = Request::from_lines(lines(&connect), false).unwrap();
        assert!(connect.is_connect() && connect.path.is_none() && connect.scheme.is_none());
        let udp = Request::from_lines(lines(&CONNECT_UDP), true).unwrap();
        assert_eq!(udp.protocol.as_deref(), Some("connect-udp"));
        assert_eq!(Request::from_lines(lines(&CONNECT_UDP), false), Err(Malformed::Pseudo));
        let host = [(":method", "GET"), (":scheme", "https"), (":path", "/"), ("host", "a.example")];
        assert_eq!(Request::from_lines(lines(&host), false).unwrap().authority, "a.example");
        let star = [(":method", "OPTIONS"), (":scheme", "https"), (":authority", "a"), (":path", "*")];
        assert!(Request::from_lines(lines(&star), false).is_ok());
    }

    #[test]
    fn malformed_requests() {
        let with = |more: &[(&'static str, &'static str)]| {
            let mut all = lines(&GET);
            all.extend(lines(more));
            Request::from_lines(all, true).map(|_| ())
        };
        let cases = [
            (&[(":path", "/again")][..], Err(Malformed::Pseudo)),
            (&[("a", "b"), (":status", "200")], Err(Malformed::Pseudo)),
            (&[(":protocol", "websocket")], Err(Malformed::Pseudo)),
            (&[("host", "b.example")], Err(Malformed::Host)),
            (&[("host", "a.example"), ("host", "a.example")], Err(Malformed::Host)),
            (&[("host", "A.example")], Ok(())),
            (&[("content-length", "1"), ("content-length", "2")], Err(Malformed::ContentLength)),
            (&[("content-length", "1"), ("content-length", "1")], Ok(())),
            (&[("content-length", "+1")], Err(Malformed::ContentLength)),
            (&[("content-length", "99999999999999999999")], Err(Malformed::ContentLength)),
            (&[("content-length", "")], Err(Malformed::ContentLength)),
            (&[("connection", "close")], Err(Malformed::Field(BadField::Connection))),
            (&[("Upper", "x")], Err(Malformed::Field(BadField::Name))),
        ];
        for (more, result) in cases {
            assert_eq!(with(more), result, "{more:?}");
        }
    }

    #[test]
    fn each_pseudo_header_is_needed_and_has_its_form() {
        for (missing, (name, _)) in GET.iter().enumerate() {
            let mut some = lines(&GET);
            some.remove(missing);
            assert_eq!(Request::from_lines(some, true), Err(Malformed::Missing), "{name}");
        }
        for (missing, (name, _)) in CONNECT_UDP.iter().enumerate() {
            let mut some = lines(&CONNECT_UDP);
            some.remove(missing);
            assert!(Request::from_lines(some, true).is_err(), "{name}");
        }
        let wrong = [
            (0, "G T"),
            (0, ""),
            (1, "1http"),
            (2, "user@a.example"),
            (2, "a/b"),
            (2, ""),
            (3, ""),
            (3, "x"),
            (3, "/ x"),
            (3, "/\u{e4}"),
            (3, "/a#b"),
            (3, "*"),
        ];
        for (place, value) in wrong {
            let mut some = GET;
            some[place].1 = value;
            assert!(Request::from_lines(lines(&some), true).is_err(), "{value:?}");
        }
    }

    #[test]
    fn responses_and_trailers() {
        for wrong in ["99", "101", "1000", "+20", "abc", ""] {
            assert!(Response::from_lines(lines(&[(":status", wrong)])).is_err(), "{wrong}");
        }
        let mut response = Response::new(204);
        response.fields.push("server", "x".as_bytes()).unwrap();
        let mut section = Vec::new();
        assert_eq!(response.encode(&mut section), (7 + 3 + 32) + (6 + 1 + 32));
        let decoded = qpack::decode(&section, 1_000).unwrap();
        assert_eq!(Response::from_lines(decoded).unwrap(), response);
        assert_eq!(trailers(lines(&[(":status", "200")])), Err(Malformed::Pseudo));
        assert_eq!(trailers(lines(&[("a", "b")])).unwrap().len(), 1);
    }

    proptest! {
        #[test]
        fn a_request_that_is_written_is_read_again(
            method in "[A-Z]{1,10}", path in "/[a-z0-9/?=&%.-]{0,40}", names in proptest::collection::vec("[a-z][a-z0-9-]{0,20}", 0..8),
            value in proptest::collection::vec(0x20..0x7e_u8, 0..40)
        ) {
            prop_assume!(method != "CONNECT");
            let mut request = Request::new(method, "a.example:443", path);
            for name in names {
                // Names with rules of their own are refused, or contradict the request.
                let is_free = !["host", "content-length", "te"].contains(&name.as_str());
                if is_free && !crate::fields::CONNECTION_FIELDS.contains(&name.as_str()) {
                    request.fields.push(name, value.clone()).unwrap();
                }
            }
            let mut section = Vec::new();
            let size = request.encode(&mut section);
            let decoded = qpack::decode(&section, size).unwrap();
            prop_assert_eq!(qpack::decode(&section, size - 1), Err(qpack::BadSection::TooLarge));
            prop_assert_eq!(Request::from_lines(decoded, true), Ok(request));
        }
    }
}
