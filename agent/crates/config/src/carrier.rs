//! How a peer is reached over TCP where UDP does not pass: `https://` endpoints, and the proxy on the way.

use std::{fmt, mem, path::Path, sync::Arc};

use base::files;
use gate::identity::Endpoint;

use crate::{
    checks::{Checks, Holder, LookedUp},
    kinds::{Kind, text},
    peers::Peer,
    problem::At,
    spelled::spelled,
    value::{self, Bad, bad},
};

/// The longest file of certificates, in bytes: the system's have a quarter of a megabyte.
pub const MOST_CA_BYTES: usize = 4 << 20;

spelled! {
    /// `peer.carrier`: when the peer is dialled at its `https://` endpoints.
    #[derive(Default)]
    pub enum Carrier {
        /// After the other endpoints, which go over UDP.
        #[default]
        Fallback => "fallback",
        /// They alone are dialled.
        Always => "always",
        /// They are never dialled.
        Off => "off",
    }
}

/// A proxy that takes CONNECT (RFC 9110 §9.3.6) over plain TCP.
#[derive(Clone, PartialEq, Eq)]
pub struct Proxy {
    /// Where the proxy listens, without TLS.
    pub at: Endpoint,
    /// The name and the password, as they stand in the URL.
    login: Option<String>,
}

impl Proxy {
    /// The name and the password with a colon between, if the proxy wants them (RFC 7617).
    #[must_use]
    pub fn login(&self) -> Option<Vec<u8>> {
        percent_decoded(self.login.as_ref()?)
    }

    /// The proxy at `http://user:password@host:port`; the name and the password may be left out, and so may the port, which is 80.
    #[must_use]
    pub fn of_url(text: &str) -> Option<Self> {
        Self::parse(text).ok()
    }

    /// The same, with what is wrong, which does not say the password.
    pub(crate) fn parse(text: &str) -> Result<Self, Bad> {
        const REMEDY: &str =
            "write http://host:port or http://user:password@host:port, other characters as %40 or the like";
        let wrong = || bad("is not the address of a proxy", REMEDY);
        let rest = text.strip_prefix("http://").ok_or_else(wrong)?;
        let rest = rest.strip_suffix('/').unwrap_or(rest);
        let (login, authority) = match rest.rsplit_once('@') {
            Some((login, authority)) => (Some(login), authority),
            None => (None, rest),
        };
        let well_spelled = |login: &str| {
            login.contains(':')
                && login.bytes().all(|byte| byte.is_ascii_graphic() && !b"@/?#".contains(&byte))
                && percent_decoded(login).is_some_and(|login| !login.iter().any(u8::is_ascii_control))
        };
        if login.is_some_and(|login| !well_spelled(login)) {
            return Err(wrong());
        }
        Ok(Self { at: value::endpoint(&with_port(authority, 80))?, login: login.map(str::to_owned) })
    }
}

impl fmt::Display for Proxy {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.login {
            Some(login) => write!(f, "http://{login}@{}", self.at),
            None => write!(f, "http://{}", self.at),
        }
    }
}

impl fmt::Debug for Proxy {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let login = if self.login.is_some() { "…@" } else { "" };
        write!(f, "http://{login}{}", self.at)
    }
}

/// The value of a key as a log may have it: a URL in it without its name and password.
pub(crate) fn without_password(text: &str) -> String {
    let login = text.split_once("://").and_then(|(scheme, rest)| Some((scheme, rest.rsplit_once('@')?.1)));
    login.map_or_else(|| text.to_owned(), |(scheme, rest)| format!("{scheme}://…@{rest}"))
}

/// The kind of `peer.proxy`, which is a URL.
pub(crate) fn proxy() -> Kind<Proxy> {
    text("http://host:port", Proxy::parse, ToString::to_string)
}

/// An endpoint of a peer: UDP at `host:port`, or TCP at `https://host/`.
pub(crate) fn peer_endpoint() -> Kind<Endpoint> {
    text("endpoint", parsed_endpoint, ToString::to_string)
}

fn parsed_endpoint(text: &str) -> Result<Endpoint, Bad> {
    const REMEDY: &str = "write https://host/ or https://host:port/";
    let Some((scheme, rest)) = text.split_once("://") else { return value::reached(text) };
    if !scheme.eq_ignore_ascii_case("https") {
        return Err(bad(format!("{text:?} has a scheme other than https"), REMEDY));
    }
    let authority = rest.strip_suffix('/').unwrap_or(rest);
    if authority.contains(['/', '?', '#', '@']) {
        return Err(bad(format!("{text:?} has more than a host and a port"), REMEDY));
    }
    if authority.contains('%') {
        return Err(bad("names an interface, which a URL cannot", REMEDY));
    }
    Ok(value::endpoint(&with_port(authority, 443))?.over_tcp())
}

/// The authority of a URL with a port, which is `default` unless it has one.
fn with_port(authority: &str, default: u16) -> String {
    let after_host = authority.rsplit(']').next().unwrap_or(authority);
    if after_host.contains(':') { authority.to_owned() } else { format!("{authority}:{default}") }
}

/// The bytes that percent-encoding (RFC 3986 §2.1) stands for; `None` for a `%` without two digits.
fn percent_decoded(text: &str) -> Option<Vec<u8>> {
    let mut bytes = text.bytes();
    let mut decoded = Vec::with_capacity(text.len());
    while let Some(byte) = bytes.next() {
        decoded.push(match byte {
            b'%' => {
                let digit =
                    |byte: u8| char::from(byte).to_digit(16).and_then(|digit| u8::try_from(digit).ok());
                digit(bytes.next()?)? << 4 | digit(bytes.next()?)?
            }
            _ => byte,
        });
    }
    Some(decoded)
}

impl Peer {
    /// The endpoints at which it is dialled, in the order in which they have their turns: those over UDP first.
    #[must_use]
    pub fn dialled(&self) -> Vec<Endpoint> {
        let of =
            |over_tcp: bool| self.endpoints.iter().filter(move |it| it.is_over_tcp() == over_tcp).cloned();
        match self.carrier {
            Carrier::Fallback => of(false).chain(of(true)).collect(),
            Carrier::Always => of(true).collect(),
            Carrier::Off => of(false).collect(),
        }
    }
}

impl Checks {
    /// An `https://` endpoint is one peer's, because it says by itself whose streams are dialled there.
    pub(crate) fn is_only_url(&mut self, endpoint: &Endpoint, at: &At) {
        if !endpoint.is_over_tcp() {
            return;
        }
        let owner = (endpoint.host.clone(), Arc::clone(&self.peer));
        match self.urls.iter().find(|(url, _)| *url == owner.0) {
            Some((url, other)) if *other != owner.1 => {
                let problem = format!("{url} is an endpoint of {other:?} already");
                self.report.add(at, problem, "write it at one of the two, or use two host names");
            }
            Some(_) => {}
            None => self.urls.push(owner),
        }
    }

    /// Checks what the keys about carriers say together.
    pub(crate) fn check_carrier(&mut self, peer: &Peer, at: &At, has_endpoints: bool) {
        let problem = match peer.carrier {
            Carrier::Always => "is \"always\", and no endpoint is an https:// one",
            Carrier::Off => "is \"off\", and all endpoints are https:// ones",
            Carrier::Fallback => return,
        };
        if peer.dialled().is_empty() && (has_endpoints || peer.carrier == Carrier::Always) {
            self.report.add(at, problem, "add an endpoint, or leave this out");
        }
    }
}

impl Checks {
    /// Notes where the proxy is: packets to it have to stay out of the tunnel, as those to an endpoint.
    pub(crate) fn check_proxy(&mut self, peer: &Peer, at: &At) {
        let Some(proxy) = &peer.proxy else { return };
        let name = Arc::clone(&peer.name);
        match proxy.at.name().parse() {
            Ok(address) => self.carried_by(address, Holder::Peer(name), at.clone()),
            Err(_) => self.looked_up.push(LookedUp { what: "proxy", name, at: at.clone() }),
        }
    }

    /// Looks at the files of certificates that these peers name.
    pub(crate) fn check_ca_files(&mut self, peers: &[Peer]) {
        for (place, at) in mem::take(&mut self.ca_files) {
            let Some(path) = peers.get(place).and_then(|peer| peer.ca_file.as_deref()) else { continue };
            if let Err(error) = check_ca_file(path) {
                let remedy =
                    files::remedy(&error).unwrap_or("name a file of certificates, or leave the key out");
                self.report.add(&at, format!("{}: {error}", path.display()), remedy);
            }
        }
    }
}

fn check_ca_file(path: &Path) -> std::io::Result<()> {
    let text = files::read(path, MOST_CA_BYTES)?;
    let begins = b"-----BEGIN CERTIFICATE-----";
    let has_one = text.windows(begins.len()).any(|window| window == begins);
    if has_one { Ok(()) } else { Err(std::io::Error::other("has no certificate")) }
}

#[cfg(test)]
#[path = "carrier_tests.rs"]
mod tests;
