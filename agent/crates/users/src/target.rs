//! What a client wants to reach: the authority of a CONNECT, or the path of a CONNECT-UDP (RFC 9298 §2, the default template).

use std::net::{IpAddr, Ipv6Addr};

/// A host and a port.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Target {
    /// The host.
    pub host: Host,
    /// The port; 1 at least.
    pub port: u16,
}

/// A host as a client names it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Host {
    /// A name, in lower case and without a final dot.
    Name(String),
    /// An address.
    Address(IpAddr),
}

/// The default template's beginning (RFC 9298 §3.1).
pub(crate) const UDP: &str = "/.well-known/masque/udp/";

impl Target {
    /// The target of a CONNECT: `host:port`, an IPv6 address in brackets.
    #[must_use]
    pub fn of_connect(authority: &str) -> Option<Self> {
        let (host, port) = authority.rsplit_once(':')?;
        let host = match host.strip_prefix('[') {
            Some(inside) => Host::Address(IpAddr::V6(inside.strip_suffix(']')?.parse::<Ipv6Addr>().ok()?)),
            None if host.contains(':') => return None,
            None => Host::read(host)?,
        };
        Some(Self { host, port: port_of(port)? })
    }

    /// The target of a CONNECT-UDP: `/.well-known/masque/udp/{target_host}/{target_port}/`.
    #[must_use]
    pub fn of_connect_udp(path: &str) -> Option<Self> {
        let (host, port) = path.strip_prefix(UDP)?.split_once('/')?;
        let host = decoded(host)?;
        Some(Self { host: Host::read(&host)?, port: port_of(port.strip_suffix('/')?)? })
    }
}

impl Host {
    pub(crate) fn read(text: &str) -> Option<Self> {
        if let Ok(address) = text.parse() {
            return Some(Self::Address(address));
        }
        let name = text.strip_suffix('.').unwrap_or(text).to_ascii_lowercase();
        let fits = |byte: u8| byte.is_ascii_alphanumeric() || b"-_.".contains(&byte);
        let is_name = (1..=253).contains(&name.len()) && name.bytes().all(fits) && !name.starts_with('.');
        is_name.then_some(Self::Name(name))
    }
}

fn port_of(text: &str) -> Option<u16> {
    text.bytes().all(|byte| byte.is_ascii_digit()).then(|| text.parse().ok())?.filter(|port| *port > 0)
}

/// Text without percent-encoding (RFC 3986 §2.1).
pub(crate) fn decoded(text: &str) -> Option<String> {
    let mut bytes = Vec::with_capacity(text.len());
    let mut rest = text.bytes();
    while let Some(byte) = rest.next() {
        if byte != b'%' {
            bytes.push(byte);
            continue;
        }
        let mut digit = || char::from(rest.next()?).to_digit(16);
        let value = digit()? << 4 | digit()?;
        bytes.push(u8::try_from(value).ok()?);
    }
    String::from_utf8(bytes).ok()
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn name(name: &str, port: u16) -> Option<Target> {
        Some(Target { host: Host::Name(name.to_owned()), port })
    }

    fn address(address: &str, port: u16) -> Option<Target> {
        Some(Target { host: Host::Address(address.parse().unwrap()), port })
    }

    #[test]
    fn authorities() {
        assert_eq!(Target::of_connect("Www.Example.org.:443"), name("www.example.org", 443));
        assert_eq!(Target::of_connect("web:80"), name("web", 80));
        assert_eq!(Target::of_connect("10.1.2.3:1"), address("10.1.2.3", 1));
        assert_eq!(Target::of_connect("[2001:db8::1]:65535"), address("2001:db8::1", 65535));
        for wrong in [
            "",
            ":",
            "a",
            "a:",
            ":1",
            "a:0",
            "a:65536",
            "a:+1",
            "a: 1",
            "::1:1",
            "[::1]",
            "[::1:1",
            "[10.0.0.1]:1",
            "[fe80::1%25eth0]:1",
            ".:1",
            "a b:1",
            "a/b:1",
            "[a]:1",
        ] {
            assert_eq!(Target::of_connect(wrong), None, "{wrong}");
        }
    }

    #[test]
    fn paths() {
        let of = |rest: &str| Target::of_connect_udp(&format!("/.well-known/masque/udp/{rest}"));
        // RFC 9298 §3.1's examples.
        assert_eq!(of("192.0.2.6/443/"), address("192.0.2.6", 443));
        assert_eq!(of("2001%3Adb8%3A%3A42/443/"), address("2001:db8::42", 443));
        assert_eq!(of("target.example.com/443/"), name("target.example.com", 443));
        for wrong in [
            "a/1", "a/1/x", "a/1//", "/1/", "a//", "a%/1/", "a%2/1/", "a%2f/1/", "%00/1/", "a%3A1/1/",
            "%ff/1/", "[::1]/1/",
        ] {
            assert_eq!(of(wrong), None, "{wrong}");
        }
        assert_eq!(Target::of_connect_udp("/masque/udp/a/1/"), None);
    }

    proptest! {
        #[test]
        fn any_text_will_do(text in "(/.well-known/masque/udp/)?[a-z0-9A-F.%:/\\[\\]_-]{0,40}(/[0-9]{1,5}/|:[0-9]{1,5})?") {
            crate::properties::user_request(text.as_bytes());
        }
    }
}
