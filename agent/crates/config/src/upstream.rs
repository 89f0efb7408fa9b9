//! Where the traffic of a service goes: addresses, names that are looked up, Unix sockets, one of them or several.

use std::{
    fmt,
    net::SocketAddr,
    path::{Path, PathBuf},
    slice,
    sync::Arc,
};

use gate::identity::Endpoint;

use crate::{
    checks::Checks,
    kinds::{Given, Kind, Shown, text},
    problem::At,
    value::{self, Bad, bad},
};

/// Limit on the places that one service names.
const MOST_TARGETS: usize = 16;

/// `sun_path` of unix(7) has 108 bytes, the last one zero.
const MOST_PATH_BYTES: usize = 107;

/// A place to which the traffic of a service may go.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub enum Target {
    /// An address, which needs no look-up.
    Address(SocketAddr),
    /// A name, whose addresses are looked up and followed.
    Name(Endpoint),
    /// A stream socket of this host, for TCP forwards.
    Unix(Arc<Path>),
}

impl fmt::Display for Target {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Address(address) => address.fmt(f),
            Self::Name(name) => name.fmt(f),
            Self::Unix(path) => write!(f, "unix:{}", path.display()),
        }
    }
}

impl Target {
    fn parse(text: &str) -> Result<Self, Bad> {
        if let Some(path) = text.strip_prefix("unix:") {
            return unix(path);
        }
        let address = match value::socket_address(text) {
            Ok(address) => return Ok(Self::Address(address)),
            Err(address) => address,
        };
        let Some((host, _)) = text.rsplit_once(':') else { return Err(address) };
        // What looks like an address was meant as one: no top-level domain is a number (RFC 3696 §2).
        let last = host.trim_end_matches('.').rsplit('.').next().unwrap_or_default();
        let is_number = last.bytes().all(|byte| byte.is_ascii_digit());
        if host.contains([':', '[', '%']) || is_number || value::host_name(host).is_err() {
            return Err(address);
        }
        match text.parse::<Endpoint>() {
            Ok(endpoint) if !endpoint.is_range() && endpoint.host.parse::<std::net::IpAddr>().is_err() => {
                Ok(Self::Name(Endpoint::new(value::host_name(&endpoint.host)?, endpoint.port)))
            }
            Ok(_) | Err(_) => Err(address),
        }
    }
}

fn unix(path: &str) -> Result<Target, Bad> {
    let example = "write the path of the service's socket, as in \"unix:/run/app.sock\"";
    if !path.starts_with('/') {
        return Err(bad(format!("{path:?} is not an absolute path"), example));
    }
    if path.len() > MOST_PATH_BYTES || path.contains('\0') {
        let problem = format!("the path of a socket has at most {MOST_PATH_BYTES} bytes");
        return Err(bad(problem, "write a shorter path; a symbolic link will do"));
    }
    Ok(Target::Unix(PathBuf::from(path).into()))
}

/// `service.upstream`: the places in the order in which they are tried; none of a service that leads anywhere.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Upstream(Arc<[Target]>);

impl Upstream {
    /// The places in their order.
    pub fn targets(&self) -> slice::Iter<'_, Target> {
        self.0.iter()
    }

    /// The names among them.
    pub fn names(&self) -> impl Iterator<Item = &Endpoint> {
        self.targets().filter_map(|target| match target {
            Target::Name(name) => Some(name),
            Target::Address(_) | Target::Unix(_) => None,
        })
    }

    /// The address, if there is one place and it is an address.
    #[must_use]
    pub fn address(&self) -> Option<SocketAddr> {
        match &*self.0 {
            [Target::Address(address)] => Some(*address),
            [] | [_, ..] => None,
        }
    }

    /// Whether a Unix socket is among them.
    #[must_use]
    pub fn has_unix(&self) -> bool {
        self.targets().any(|target| matches!(target, Target::Unix(_)))
    }
}

impl Upstream {
    /// `"any"`: who asks says where it leads.
    #[must_use]
    pub fn any() -> Self {
        Self([].into())
    }

    /// Whether it is `"any"`.
    #[must_use]
    pub fn is_any(&self) -> bool {
        self.0.is_empty()
    }
}

impl From<SocketAddr> for Upstream {
    fn from(address: SocketAddr) -> Self {
        Self([Target::Address(address)].into())
    }
}

impl fmt::Display for Upstream {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.is_any() {
            return f.write_str("any");
        }
        for (index, target) in self.targets().enumerate() {
            write!(f, "{}{target}", if index > 0 { ", " } else { "" })?;
        }
        Ok(())
    }
}

/// An address, a name or a Unix socket, or a list of these.
pub(super) fn upstream() -> Kind<Upstream> {
    let one = || text("`host:port`, `unix:/socket`", Target::parse, ToString::to_string).then(sendable);
    let list = one().list().not_empty("write where the service listens").or_one(one());
    let read = move |given: Given<'_>| {
        if given.value.as_str() == Some("any") {
            return Ok(Upstream::any());
        }
        let targets = (list.read)(given)?;
        if targets.len() > MOST_TARGETS {
            let problem = format!("names {} places", targets.len());
            return Err(bad(
                problem,
                format!("write at most {MOST_TARGETS}; a name may have several addresses"),
            ));
        }
        if let Some(twice) = (1..targets.len()).find(|index| targets[..*index].contains(&targets[*index])) {
            return Err(bad(format!("names {} twice", targets[twice]), "remove one"));
        }
        Ok(Upstream(targets.into()))
    };
    let words = "`host:port`, `unix:/socket`, list of these, or `\"any\"`";
    Kind::new(words, read, |upstream, _| match &*upstream.0 {
        [] => Shown::text("any"),
        [one] => Shown::text(one),
        several => {
            let quoted: Vec<String> = several.iter().map(|one| format!("{:?}", one.to_string())).collect();
            Shown::bare(format!("[{}]", quoted.join(", ")))
        }
    })
}

/// A place that can be sent to.
fn sendable(checks: &mut Checks, target: &Target, at: &At) -> Result<(), Bad> {
    match target {
        Target::Address(address) => checks.sendable(address, at),
        Target::Name(_) | Target::Unix(_) => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parsed(text: &str) -> Result<String, String> {
        let described = |target: Target| match &target {
            Target::Address(_) => format!("address {target}"),
            Target::Name(_) => format!("name {target}"),
            Target::Unix(_) => format!("socket {target}"),
        };
        Target::parse(text).map(described).map_err(|Bad { problem, .. }| problem)
    }

    #[test]
    fn a_target_is_an_address_a_name_or_a_socket() {
        for (text, target) in [
            ("127.0.0.1:53", "address 127.0.0.1:53"),
            ("[::1]:53", "address [::1]:53"),
            ("db.example.net:5432", "name db.example.net:5432"),
            ("DB.Example.net.:5432", "name db.example.net:5432"),
            ("localhost:80", "name localhost:80"),
            ("unix:/run/app.sock", "socket unix:/run/app.sock"),
        ] {
            assert_eq!(parsed(text).as_deref(), Ok(target), "{text}");
        }
        for (text, problem) in [
            ("unix:app.sock", "not an absolute path"),
            ("db.example.net", "the port is missing"),
            ("db.example.net:0", "port"),
            ("[db]:53", "not an address"),
            ("::1:53", ""),
            ("a b:53", "not an address"),
            ("10.1.2:53", ""),
            ("300.1.2.3:53", ""),
            ("[::ffff:127.0.0.1]:53", "IPv4 in the form of IPv6"),
            ("224.0.0.1:53", "multicast"),
        ] {
            let found = parsed(text).expect_err(text);
            assert!(found.contains(problem), "{text}: {found}");
        }
        assert!(parsed(&format!("unix:/{}", "x".repeat(106))).is_ok());
        assert!(parsed(&format!("unix:/{}", "x".repeat(107))).unwrap_err().contains("107 bytes"));
    }
}
