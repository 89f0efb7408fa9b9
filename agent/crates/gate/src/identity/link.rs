//! The endpoint of an agent, and the share link that holds all that a dialler needs.

use std::{fmt, net::Ipv6Addr, str::FromStr};

use crate::identity::{PublicKey, PublicKeyError};

/// A host and a port to dial; the host is a name or an address.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Endpoint {
    /// A DNS name, an IPv4 address, or an IPv6 address without brackets, with `%` and the interface where that matters; the whole URL
    /// of one [over TCP](Endpoint::over_tcp).
    pub host: String,
    /// The port of the agent, or of a web server, never 0; the first one of a range.
    pub port: u16,
    /// The last port of a range, at each of which the same agent is reached; otherwise the same as `port`.
    pub last_port: u16,
}

/// What begins the URL of an endpoint over TCP.
const WEB: &str = "https://";

impl Endpoint {
    /// An agent at one port.
    #[must_use]
    pub const fn new(host: String, port: u16) -> Self {
        Self { host, port, last_port: port }
    }

    /// Whether it has more ports than one.
    #[must_use]
    pub const fn is_range(&self) -> bool {
        self.port != self.last_port
    }

    /// The web server at this host and port, through which the agent is reached. Equal ones have equal URLs.
    #[must_use]
    pub fn over_tcp(self) -> Self {
        let (host, port) = (self.host.to_ascii_lowercase(), self.port);
        let host = if host.contains(':') { format!("[{host}]") } else { host };
        let host = match port {
            443 => format!("{WEB}{host}/"),
            _ => format!("{WEB}{host}:{port}/"),
        };
        Self::new(host, port)
    }

    /// Whether it is the URL of a web server.
    #[must_use]
    pub fn is_over_tcp(&self) -> bool {
        self.host.starts_with(WEB)
    }

    /// The name or the address of the host, also of one over TCP.
    #[must_use]
    pub fn name(&self) -> &str {
        let Some(url) = self.host.strip_prefix(WEB) else { return &self.host };
        match url.strip_prefix('[') {
            Some(rest) => rest.split(']').next().unwrap_or(rest),
            None => url.split([':', '/']).next().unwrap_or(url),
        }
    }
}

impl Endpoint {
    fn fmt_range(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.is_range() { write!(f, "-{}", self.last_port) } else { Ok(()) }
    }
}

impl fmt::Display for Endpoint {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.is_over_tcp() {
            f.write_str(&self.host)
        } else if self.host.contains(':') {
            write!(f, "[{}]:{}", self.host, self.port)?;
            self.fmt_range(f)
        } else {
            write!(f, "{}:{}", self.host, self.port)?;
            self.fmt_range(f)
        }
    }
}

/// Why a text is not an endpoint.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum EndpointError {
    /// No colon and port follow the host.
    #[error("the port is missing: write host:port")]
    NoPort,
    /// Not a number from 1 to 65535.
    #[error("the port {0:?} is not a number from 1 to 65535")]
    Port(String),
    /// The last port of a range is not above the first one.
    #[error("the ports {0:?} are no range: write the lower one first, as in 20000-20100")]
    Ports(String),
    /// No host stands before the port.
    #[error("the host is missing: write host:port")]
    NoHost,
    /// A character that no host name has.
    #[error("the host {host:?} has the character {character:?}, which no host name has")]
    HostCharacter {
        /// The host as it was written.
        host: String,
        /// The first character that no host name has.
        character: char,
    },
    /// Longer than DNS allows, or with an empty or too long label.
    #[error("the host {0:?} is not a DNS name: at most 253 characters, each part 1 to 63")]
    HostName(String),
    /// Brackets without an IPv6 address, or not closed.
    #[error("{0:?} is not an IPv6 address in brackets")]
    Brackets(String),
    /// An IPv6 address stands without its brackets.
    #[error("an IPv6 address stands in brackets: [{0}]:port")]
    NoBrackets(String),
}

impl FromStr for Endpoint {
    type Err = EndpointError;

    fn from_str(text: &str) -> Result<Self, EndpointError> {
        let (host, port) = if let Some(rest) = text.strip_prefix('[') {
            let bad = || EndpointError::Brackets(text.to_owned());
            let (host, rest) = rest.split_once(']').ok_or_else(bad)?;
            let (address, zone) = host.split_once('%').map_or((host, None), |(ip, zone)| (ip, Some(zone)));
            address.parse::<Ipv6Addr>().map_err(|_| bad())?;
            // The name of an interface (RFC 6874 §2 leaves open which characters it has; Linux allows 15 bytes of most).
            let is_name = |zone: &str| {
                (1..=15).contains(&zone.len())
                    && zone.chars().all(|c| c.is_ascii_graphic() && !matches!(c, '/' | '%' | '[' | ']'))
            };
            if zone.is_some_and(|zone| !is_name(zone)) {
                return Err(bad());
            }
            (host, rest.strip_prefix(':').ok_or(EndpointError::NoPort)?)
        } else {
            if text.parse::<Ipv6Addr>().is_ok() {
                return Err(EndpointError::NoBrackets(text.to_owned()));
            }
            let (host, port) = text.rsplit_once(':').ok_or(EndpointError::NoPort)?;
            if host.parse::<Ipv6Addr>().is_ok() {
                return Err(EndpointError::NoBrackets(host.to_owned()));
            }
            check_host(host)?;
            (host, port)
        };
        let (first, last) = port.split_once('-').map_or((port, None), |(first, last)| (first, Some(last)));
        let first = port_number(first)?;
        let last_port = last.map_or(Ok(first), port_number)?;
        if last.is_some() && last_port <= first {
            return Err(EndpointError::Ports(port.to_owned()));
        }
        Ok(Self { host: host.to_owned(), port: first, last_port })
    }
}

fn port_number(text: &str) -> Result<u16, EndpointError> {
    let digits = !text.is_empty() && text.bytes().all(|b| b.is_ascii_digit());
    let number = text.parse().ok().filter(|number| digits && *number != 0);
    number.ok_or_else(|| EndpointError::Port(text.to_owned()))
}

fn check_host(host: &str) -> Result<(), EndpointError> {
    if host.is_empty() {
        return Err(EndpointError::NoHost);
    }
    let strange = |c: &char| !(c.is_ascii_alphanumeric() || matches!(c, '-' | '_' | '.'));
    if let Some(character) = host.chars().find(strange) {
        return Err(EndpointError::HostCharacter { host: host.to_owned(), character });
    }
    // A trailing dot makes a name absolute and is not a label.
    let name = host.strip_suffix('.').unwrap_or(host);
    if name.len() > 253 || name.split('.').any(|label| label.is_empty() || label.len() > 63) {
        return Err(EndpointError::HostName(host.to_owned()));
    }
    Ok(())
}

/// All that a dialler needs: `culvert://host:port/<public key>`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ShareLink {
    /// The address at which the agent is dialled.
    pub endpoint: Endpoint,
    /// The public key that the agent has.
    pub key: PublicKey,
}

pub(super) const SCHEME: &str = "culvert://";

impl fmt::Display for ShareLink {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{SCHEME}{}/{}", self.endpoint, self.key)
    }
}

/// The part of a share link that is wrong.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ShareLinkError {
    /// The text begins with another scheme, or with none.
    #[error("the scheme: a link begins with culvert://")]
    Scheme,
    /// The part between the scheme and the slash.
    #[error("the address: {0}")]
    Endpoint(EndpointError),
    /// No slash and key follow the address.
    #[error("the public key is missing: write culvert://host:port/<public key>")]
    NoKey,
    /// The part after the slash is no public key.
    #[error("the public key: {0}")]
    Key(PublicKeyError),
}

impl FromStr for ShareLink {
    type Err = ShareLinkError;

    fn from_str(text: &str) -> Result<Self, ShareLinkError> {
        let rest = text.strip_prefix(SCHEME).ok_or(ShareLinkError::Scheme)?;
        let (endpoint, key) = rest.split_once('/').ok_or(ShareLinkError::NoKey)?;
        Ok(Self {
            endpoint: endpoint.parse().map_err(ShareLinkError::Endpoint)?,
            key: key.parse().map_err(ShareLinkError::Key)?,
        })
    }
}
