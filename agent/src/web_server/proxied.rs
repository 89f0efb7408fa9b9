//! Whose request it is, if a trusted server in front says so: PROXY headers (versions 1 and 2), X-Forwarded-For, Forwarded (RFC 7239).

use std::net::{IpAddr, SocketAddr};

use hyper::HeaderMap;
use ipnet::IpNet;
use wire::proxy::{self, Header, ProxyError};

/// What the first bytes of a connection are.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Beginning {
    /// More bytes are needed to tell.
    Incomplete,
    /// No PROXY header.
    Other,
    /// A PROXY header of so many bytes, and whose connection it is, if it says so.
    Header { length: usize, source: Option<SocketAddr> },
    /// The header cannot be read.
    Wrong,
}

/// Whether `source` is one of the servers in front.
pub(super) fn is_trusted(trusted: &[IpNet], source: IpAddr) -> bool {
    let source = source.to_canonical();
    trusted.iter().any(|net| net.contains(&source))
}

/// Reads the PROXY header at the beginning of `bytes`.
pub(super) fn read(bytes: &[u8]) -> Beginning {
    match proxy::read(bytes, proxy::Transport::Stream) {
        Ok(Some(Header { client, length })) => {
            Beginning::Header { length, source: client.map(|client| client.source()) }
        }
        Ok(None) => Beginning::Incomplete,
        Err(ProxyError::Missing) => Beginning::Other,
        Err(ProxyError::Malformed | ProxyError::TooLong) => Beginning::Wrong,
    }
}

/// The client of a request that a trusted server has sent: the last address of its header that is not a server's.
///
/// A server writes one of the two headers, and passes the other one on as the client wrote it: `None` if both are there and differ, since
/// a request that is not known to be anybody's would count against the server's share, and be the server's own for the site.
pub(super) fn client(headers: &HeaderMap, trusted: &[IpNet], front: IpAddr) -> Option<IpAddr> {
    let x_forwarded = last(addresses(headers, "x-forwarded-for", Some), trusted);
    let forwarded = last(addresses(headers, "forwarded", for_parameter), trusted);
    let is_there = |name| headers.contains_key(name);
    if is_there("x-forwarded-for") && is_there("forwarded") && x_forwarded != forwarded {
        return None;
    }
    Some(x_forwarded.or(forwarded).unwrap_or(front))
}

/// Whether a trusted server says that its client speaks TLS: the last value is its own, what stands further left came with the request.
pub(super) fn is_https(headers: &HeaderMap) -> Option<bool> {
    let said = headers.get_all("x-forwarded-proto").iter().next_back()?.to_str().ok()?;
    match said.rsplit(',').next().unwrap_or_default().trim() {
        "https" => Some(true),
        "http" => Some(false),
        _ => None,
    }
}

/// The addresses of a list, the last one first; `None`: an element that names none.
fn addresses<'h>(
    headers: &'h HeaderMap,
    name: &str,
    of: impl Fn(&'h str) -> Option<&'h str>,
) -> impl Iterator<Item = Option<IpAddr>> {
    let values: Vec<&str> = headers.get_all(name).iter().map(|value| value.to_str().unwrap_or("")).collect();
    let elements: Vec<&str> = values.iter().flat_map(|value| value.split(',')).collect();
    elements.into_iter().rev().map(move |element| of(element.trim()).and_then(address))
}

fn last(mut addresses: impl Iterator<Item = Option<IpAddr>>, trusted: &[IpNet]) -> Option<IpAddr> {
    let mut found = None;
    // Behind an element that says nothing, whatever stands further left was not seen by a trusted server.
    while let Some(Some(address)) = addresses.next() {
        found = Some(address);
        if !is_trusted(trusted, address) {
            break;
        }
    }
    found
}

/// The value of `for=` in an element of Forwarded.
fn for_parameter(element: &str) -> Option<&str> {
    let mut pairs = element.split(';').filter_map(|pair| pair.split_once('='));
    let (_, value) = pairs.find(|(name, _)| name.trim().eq_ignore_ascii_case("for"))?;
    Some(value.trim().trim_matches('"'))
}

/// An address, with or without a port, in brackets or not.
fn address(text: &str) -> Option<IpAddr> {
    let inner = text.strip_prefix('[').and_then(|rest| rest.split_once(']')).map(|(inner, _)| inner);
    let plain = inner.unwrap_or(text).parse().ok();
    let found: Option<IpAddr> = plain.or_else(|| text.parse::<SocketAddr>().ok().map(|it| it.ip()));
    found.map(|address| address.to_canonical())
}

#[cfg(test)]
mod tests {
    use super::*;

    const SIGNATURE: &[u8] = b"\r\n\r\n\0\r\nQUIT\n";

    fn header(length: usize, source: Option<&str>) -> Beginning {
        Beginning::Header { length, source: source.map(|text| text.parse().unwrap()) }
    }

    /// Version 2 with a command, a family and addresses, as the specification of HAProxy has it.
    fn second(command: u8, family: u8, content: &[u8]) -> Vec<u8> {
        let length = u16::try_from(content.len()).unwrap().to_be_bytes();
        [SIGNATURE, &[command, family], &length, content].concat()
    }

    #[test]
    fn proxy_headers_of_both_versions() {
        let text = b"PROXY TCP4 192.0.2.1 198.51.100.1 56324 443\r\nGET";
        assert_eq!(read(text), header(45, Some("192.0.2.1:56324")));
        assert_eq!(read(b"PROXY TCP6 2001:db8::1 ::1 1 2\r\n"), header(32, Some("[2001:db8::1]:1")));
        assert_eq!(read(b"PROXY UNKNOWN\r\n"), header(15, None));
        for wrong in
            ["PROXY TCP4 ::1 ::1 1 2\r\n", "PROXY TCP4 192.0.2.1 1\r\n", "PROXY \r\n", "PROXY UDP4 1\r\n"]
        {
            assert_eq!(read(wrong.as_bytes()), Beginning::Wrong, "{wrong}");
        }
        let v4 = second(0x21, 0x11, &[192, 0, 2, 1, 198, 51, 100, 1, 0xdc, 4, 1, 187, 3, 0, 0]);
        assert_eq!(read(&v4), header(31, Some("192.0.2.1:56324")));
        let mut v6 = [0; 36];
        (v6[0], v6[1], v6[15], v6[33]) = (0x20, 1, 1, 7);
        assert_eq!(read(&second(0x21, 0x21, &v6)), header(52, Some("[2001::1]:7")));
        assert_eq!(read(&second(0x20, 0, &[])), header(16, None));
        assert_eq!(read(&second(0x21, 0x11, &[1; 12])), header(28, Some("1.1.1.1:257")));
        for wrong in
            [second(0x21, 0x11, &[1; 11]), second(0x31, 0x11, &[1; 12]), second(0x21, 0x21, &[1; 33])]
        {
            assert_eq!(read(&wrong), Beginning::Wrong, "{wrong:?}");
        }
        assert_eq!(read(&[SIGNATURE, &[0x21, 0x11, 0xff, 0xff]].concat()), Beginning::Wrong, "too long");
    }

    #[test]
    fn every_beginning_of_a_header_waits_for_more() {
        let v1 = b"PROXY TCP4 192.0.2.1 198.51.100.1 56324 443\r\n".to_vec();
        for whole in [v1, second(0x21, 0x11, &[1; 12])] {
            for end in 0..whole.len() {
                assert_eq!(read(&whole[..end]), Beginning::Incomplete, "{end}");
            }
            assert!(matches!(read(&whole), Beginning::Header { .. }));
        }
        for other in ["GET / HTTP/1.1\r\n", "POST", "\x16\x03\x01", "PRI * HTTP/2.0", "\r\n\r\nX"] {
            assert_eq!(read(other.as_bytes()), Beginning::Other, "{other}");
        }
        assert_eq!(read(&[b"PROXY TCP4 ".as_slice(), &[b'1'; 200]].concat()), Beginning::Wrong);
    }

    #[test]
    fn the_client_is_the_last_address_that_is_no_server() {
        let trusted: Vec<IpNet> = ["127.0.0.0/8", "10.0.0.0/8"].map(|net| net.parse().unwrap()).into();
        let front: IpAddr = "127.0.0.1".parse().unwrap();
        let of = |lines: &[(&'static str, &str)]| {
            let mut headers = HeaderMap::new();
            for (name, value) in lines {
                headers.append(*name, value.parse().unwrap());
            }
            client(&headers, &trusted, front).map_or_else(|| "?".to_owned(), |client| client.to_string())
        };
        assert_eq!(of(&[]), "127.0.0.1");
        assert_eq!(of(&[("x-forwarded-for", "192.0.2.1")]), "192.0.2.1");
        // What the client wrote itself stands further left.
        assert_eq!(of(&[("x-forwarded-for", "203.0.113.9, 192.0.2.1, 10.1.1.1")]), "192.0.2.1");
        assert_eq!(
            of(&[("x-forwarded-for", "203.0.113.9"), ("x-forwarded-for", "192.0.2.1:80")]),
            "192.0.2.1"
        );
        assert_eq!(of(&[("x-forwarded-for", "10.0.0.2, 10.0.0.1")]), "10.0.0.2");
        assert_eq!(of(&[("x-forwarded-for", "192.0.2.1, unknown")]), "127.0.0.1");
        assert_eq!(
            of(&[("forwarded", "for=192.0.2.1;proto=https, For=\"[2001:db8::7]:4711\"")]),
            "2001:db8::7"
        );
        assert_eq!(of(&[("forwarded", "for=_hidden, for=\"_x\"")]), "127.0.0.1");
        // One of the two is the client's own.
        assert_eq!(of(&[("forwarded", "for=192.0.2.1"), ("x-forwarded-for", "192.0.2.2")]), "?");
        assert_eq!(of(&[("forwarded", "for=unknown"), ("x-forwarded-for", "192.0.2.2")]), "?");
        assert_eq!(of(&[("forwarded", "for=unknown"), ("x-forwarded-for", "unknown")]), "127.0.0.1");
        assert_eq!(of(&[("forwarded", "for=192.0.2.1"), ("x-forwarded-for", "192.0.2.1")]), "192.0.2.1");
    }

    #[test]
    fn the_last_scheme_is_that_of_the_server_in_front() {
        let of = |values: &[&str]| {
            let mut headers = HeaderMap::new();
            for value in values {
                headers.append("x-forwarded-proto", value.parse().unwrap());
            }
            is_https(&headers)
        };
        assert_eq!(
            (of(&[]), of(&["https"]), of(&["http"]), of(&["ws"])),
            (None, Some(true), Some(false), None)
        );
        // What the client wrote itself stands further left.
        assert_eq!((of(&["https", "http"]), of(&["https, http"])), (Some(false), Some(false)));
        assert_eq!(of(&["http,http", "http ,https"]), Some(true));
    }
}
