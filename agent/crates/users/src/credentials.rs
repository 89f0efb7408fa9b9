//! Basic credentials (RFC 7617): the value of `authorization` or `proxy-authorization` as a name and a password.

use data_encoding::BASE64;

/// The most bytes of a name and a password, far above what `culvert user add` makes. A longer value is as good as none, so that its
/// length costs nothing.
pub(crate) const MOST_BYTES: usize = 256;

/// What a client presents.
#[derive(Debug, PartialEq)]
pub(crate) struct Presented<'p> {
    pub(crate) name: &'p str,
    pub(crate) password: &'p [u8],
}

impl Presented<'_> {
    /// What stands for no credentials: no user has an empty name, and the password is as long as one of ours.
    pub(crate) const NOTHING: Presented<'static> =
        Presented { name: "", password: b"----------------------" };
}

/// Reads the value of a field into `buffer`; `None` if it is not of Basic, or too long.
pub(crate) fn presented<'b>(value: &[u8], buffer: &'b mut [u8; MOST_BYTES]) -> Option<Presented<'b>> {
    let (scheme, rest) = value.split_at_checked(5)?;
    if !scheme.eq_ignore_ascii_case(b"basic") || !rest.starts_with(b" ") {
        return None;
    }
    let encoded = rest.trim_ascii();
    let length = BASE64.decode_len(encoded.len()).ok().filter(|length| *length <= MOST_BYTES)?;
    let written = BASE64.decode_mut(encoded, &mut buffer[..length]).ok()?;
    let text = &buffer[..written];
    let colon = text.iter().position(|byte| *byte == b':')?;
    Some(Presented { name: std::str::from_utf8(&text[..colon]).ok()?, password: &text[colon + 1..] })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_basic_credentials_are() {
        let mut buffer = [0; MOST_BYTES];
        // RFC 7617 §2.
        let read = presented(b"Basic QWxhZGRpbjpvcGVuIHNlc2FtZQ==", &mut buffer);
        assert_eq!(read, Some(Presented { name: "Aladdin", password: b"open sesame" }));
        let read = presented(b"bASIC   YTo6Yg== ", &mut buffer);
        assert_eq!(read, Some(Presented { name: "a", password: b":b" }));
        let long = format!("Basic {}", BASE64.encode(&[b':'; MOST_BYTES + 1]));
        for wrong in [
            "",
            "Basic",
            "Basic ",
            "BasicYTpi",
            "Bearer YTpi",
            "Basic YTp",
            "Basic YQ==",
            "Basic /zpi",
            &long,
        ] {
            assert_eq!(presented(wrong.as_bytes(), &mut buffer), None, "{wrong}");
        }
    }
}
