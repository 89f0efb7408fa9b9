//! Who may ask the admin server: by address, by secret, and by the name under which a browser reached it.

use std::{
    fs,
    net::{IpAddr, Ipv4Addr, Ipv6Addr},
    sync::Mutex,
    time::Instant,
};

use base::{
    panics::lock,
    throttle::{Throttle, counted},
};
use config::Token;
use hyper::{
    HeaderMap,
    header::{AUTHORIZATION, HOST},
};

use super::LOG_INTERVAL;

/// The rules of `[metrics]` about clients.
pub(super) struct Access {
    config: config::Admin,
    /// The name of this host, in lower case.
    own_name: String,
    log: Mutex<Throttle>,
}

/// What a request has to show.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Guard {
    /// Nothing: the answer says no more than that an agent runs.
    Nothing,
    /// The secret, or without one a name of this host: see [`Access::names_us`].
    SecretOrName,
    /// Without a secret, a name of this host. What is answered is the same for every agent.
    Name,
}

/// Why a request is not answered.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Denied {
    /// The request does not show the secret.
    Token,
    /// The secret cannot be read, so nobody can show it.
    NoToken,
    Host,
}

impl Access {
    pub(super) fn new(config: config::Admin) -> Self {
        let own_name = fs::read_to_string("/proc/sys/kernel/hostname").unwrap_or_default();
        let log = Mutex::new(Throttle::new(LOG_INTERVAL));
        Self { config, own_name: own_name.trim().to_ascii_lowercase(), log }
    }

    pub(super) fn admits(&self, source: IpAddr) -> bool {
        self.config.admits(source)
    }

    pub(super) async fn check(&self, guard: Guard, headers: &HeaderMap, now: Instant) -> Result<(), Denied> {
        let has_token = self.config.has_token();
        match guard {
            Guard::Nothing => Ok(()),
            Guard::SecretOrName if has_token => self.secret(headers, now).await,
            Guard::SecretOrName | Guard::Name if !has_token && !self.names_us(headers) => Err(Denied::Host),
            Guard::SecretOrName | Guard::Name => Ok(()),
        }
    }

    async fn secret(&self, headers: &HeaderMap, now: Instant) -> Result<(), Denied> {
        let path = self.config.token_file.clone();
        // Elsewhere, as a disk that hangs must not keep /healthz from being answered.
        let read = tokio::task::spawn_blocking(move || Token::read(&path)).await;
        let token = read.map_err(|_| Denied::NoToken)?.map_err(|error| {
            if let Some(suppressed) = lock(&self.log).allow(now) {
                let (remedy, suppressed) = (error.remedy(), counted(suppressed));
                tracing::warn!(%error, remedy, suppressed, "the admin server refuses all that need metrics.token_file");
            }
            Denied::NoToken
        })?;
        let shown = headers.get(AUTHORIZATION).map(hyper::header::HeaderValue::as_bytes).and_then(bearer);
        if shown.is_some_and(|shown| token.matches(shown)) { Ok(()) } else { Err(Denied::Token) }
    }

    /// Whether a browser that sent this request reached us under a name that nobody else can give to us. A web site anywhere
    /// can let a name of its own lead to 127.0.0.1 (DNS rebinding), and would read what its visitors' browsers can reach; to the browser
    /// both are one origin, so that nothing but this name tells them apart. It cannot do so with an address, with `localhost`, with this
    /// host's own name, nor with those that the operator lists. A name without dots is no better than others: whoever answers LLMNR or
    /// mDNS in the browser's network, or owns a domain that is searched there, can give it.
    fn names_us(&self, headers: &HeaderMap) -> bool {
        let Some(host) = headers.get(HOST).and_then(|host| host.to_str().ok()) else {
            // A client of HTTP/1.0, and so no browser.
            return true;
        };
        let host = host.to_ascii_lowercase();
        if let Some(v6) = host.strip_prefix('[') {
            return v6.split_once(']').is_some_and(|(v6, _)| v6.parse::<Ipv6Addr>().is_ok());
        }
        let name = host.split_once(':').map_or(&*host, |(name, _)| name);
        let name = name.strip_suffix('.').unwrap_or(name);
        let is_local =
            name.strip_suffix("localhost").is_some_and(|rest| rest.is_empty() || rest.ends_with('.'));
        let is_own = name == self.own_name
            || self.own_name.split_once('.').is_some_and(|(first, _)| name == first)
            || self.config.names.iter().any(|known| known == name);
        name.parse::<Ipv4Addr>().is_ok() || is_local || (is_own && !name.is_empty())
    }
}

/// The secret in the value of a header `Authorization`.
fn bearer(value: &[u8]) -> Option<&[u8]> {
    let (scheme, secret) = value.split_at_checked(7)?;
    scheme.eq_ignore_ascii_case(b"bearer ").then(|| secret.trim_ascii())
}

#[cfg(test)]
mod tests {
    use base::clock::{Clock, ManualClock};
    use hyper::header::HeaderValue;

    use super::*;

    fn host(name: &str) -> HeaderMap {
        HeaderMap::from_iter([(HOST, HeaderValue::from_str(name).unwrap())])
    }

    #[tokio::test]
    async fn a_name_that_others_can_give_to_this_host_is_refused() {
        let names = vec!["metrics.example.org".to_owned(), "prom".to_owned()];
        let config = config::Admin { names, ..config::Admin::default() };
        let access = Access { own_name: "gw.example.net".to_owned(), ..Access::new(config) };
        let check = async |headers: HeaderMap| {
            access.check(Guard::SecretOrName, &headers, ManualClock::default().now()).await
        };
        for ours in [
            "127.0.0.1:9464",
            "192.0.2.7",
            "[::1]:9464",
            "[fd09::1]",
            "localhost:9464",
            "LocalHost",
            "a.localhost",
            "gw:9464",
            "GW.example.net:9464",
            "gw.example.net.",
            "metrics.example.org:9464",
            "prom",
        ] {
            assert_eq!(check(host(ours)).await, Ok(()), "{ours}");
        }
        assert_eq!(check(HeaderMap::new()).await, Ok(()));
        for other in [
            "evil.example:9464",
            "127.0.0.1.evil.example",
            "notlocalhost.",
            "[::1",
            "[x]",
            "a.b",
            "evil.localhost.example",
            // Of a neighbour that answers LLMNR.
            "printer:9464",
            "gw.evil.example",
            "",
            ".",
        ] {
            assert_eq!(check(host(other)).await, Err(Denied::Host), "{other}");
        }
    }

    #[test]
    fn a_bearer_is_what_follows_the_scheme() {
        assert_eq!(bearer(b"Bearer abc"), Some(&b"abc"[..]));
        assert_eq!(bearer(b"bEARER  abc "), Some(&b"abc"[..]));
        for other in [&b"Basic abc"[..], b"Bearer", b"", b"abc"] {
            assert_eq!(bearer(other), None);
        }
    }
}
