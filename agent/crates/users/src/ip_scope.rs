//! What a client of CONNECT-IP asks for: the path of its request (RFC 9484 §4.6, the default template).

use std::net::IpAddr;

use ipnet::IpNet;

use crate::target::{Host, decoded};

/// The default template's beginning (RFC 9484 §3).
pub(crate) const IP: &str = "/.well-known/masque/ip/";

/// Which packets a session is for.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Scope {
    /// Where they go.
    pub target: Wanted,
    /// Their protocol; `None` for all. ICMP always passes.
    pub protocol: Option<u8>,
}

/// Where packets go.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Wanted {
    /// Wherever the user may.
    All,
    /// To the addresses of a prefix.
    Prefix(IpNet),
    /// To the addresses of a name, in lower case and without a final dot.
    Name(String),
}

impl Scope {
    /// The scope in `/.well-known/masque/ip/{target}/{ipproto}/`.
    #[must_use]
    pub fn of_path(path: &str) -> Option<Self> {
        let (target, protocol) = path.strip_prefix(IP)?.strip_suffix('/')?.split_once('/')?;
        let (target, protocol) = (decoded(target)?, decoded(protocol)?);
        let target = match target.split_once('/') {
            None if target == "*" => Wanted::All,
            None => match Host::read(&target)? {
                Host::Address(address) => Wanted::Prefix(address.into()),
                Host::Name(name) => Wanted::Name(name),
            },
            Some((address, length)) => {
                let net = IpNet::new(address.parse::<IpAddr>().ok()?, number(length)?).ok()?;
                Wanted::Prefix(Some(net).filter(|net| net.addr() == net.network())?)
            }
        };
        let protocol = if protocol == "*" { None } else { Some(number(&protocol)?) };
        Some(Self { target, protocol })
    }
}

fn number(text: &str) -> Option<u8> {
    text.bytes().all(|byte| byte.is_ascii_digit()).then(|| text.parse().ok())?
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn any_text_will_do(text in "/.well-known/masque/ip/[a-z0-9A-F.%:*-]{0,30}(%2F[0-9]{1,3})?/([0-9]{1,3}|\\*)/") {
            crate::properties::user_request(text.as_bytes());
        }
    }

    #[test]
    fn paths() {
        let of = |rest: &str| Scope::of_path(&format!("{IP}{rest}"));
        let prefix = |text: &str| Wanted::Prefix(text.parse().unwrap());
        let some = |target, protocol| Some(Scope { target, protocol });
        // RFC 9484 §4.6 and §8.
        assert_eq!(of("*/*/"), some(Wanted::All, None));
        assert_eq!(of("%2A/%2a/"), some(Wanted::All, None));
        assert_eq!(of("192.0.2.0%2F24/17/"), some(prefix("192.0.2.0/24"), Some(17)));
        assert_eq!(of("2001%3Adb8%3A%3A42/*/"), some(prefix("2001:db8::42/128"), None));
        assert_eq!(of("2001%3Adb8%3A%3A%2F32/255/"), some(prefix("2001:db8::/32"), Some(255)));
        assert_eq!(
            of("Target.example.com./132/"),
            some(Wanted::Name("target.example.com".to_owned()), Some(132))
        );
        for wrong in [
            "",
            "*",
            "*/",
            "*/*",
            "/*/",
            "*//",
            "*/*/x/",
            "**/*/",
            "*/256/",
            "*/+6/",
            "*/-1/",
            "192.0.2.1%2F24/*/",
            "192.0.2.0%2F33/*/",
            "192.0.2.0%2F/*/",
            "192.0.2.0/24/*/",
            "a%2F8/*/",
            "%2F/*/",
            "a%/*/",
            "%ff/*/",
        ] {
            assert_eq!(of(wrong), None, "{wrong}");
        }
        assert_eq!(Scope::of_path("/masque/ip/*/*/"), None);
    }
}
