//! Carriers at an exit: who may open one, and how many.

use std::{
    collections::HashMap,
    net::{IpAddr, SocketAddr},
    sync::{Arc, Mutex, atomic::AtomicU64},
    time::{Duration, Instant},
};

use base::{
    clock::Clock,
    ids::PeerId,
    panics::lock,
    token_bucket::{Allowance, Pace},
};
use config::MOST_WEB_CONNECTIONS;
use data_encoding::BASE64;
use gate::{
    Own,
    admission::{Admits, Allowlist},
    carrier::{TokenError, Tokens},
};
use h3::websocket::ACCEPT_GUID;
use net::carrier::{self, Accepted, PROBE_BYTES, Port, Probe};
use ring::digest;

use crate::site::turns::prefix_of;

/// Carriers that are open at a time: each is a connection of the web server, of which visitors keep the other half.
const MOST: usize = MOST_WEB_CONNECTIONS / 2;

/// Carriers of one peer: twice the most lanes that it may open, which are what it needs most of.
const MOST_OF_ONE: usize = 128;

/// Of those, the ones of all clients together that open mode lets in, and of one /24 or /56 of them.
const MOST_OF_STRANGERS: usize = MOST / 2;
const MOST_OF_A_PREFIX: usize = 16;

/// Tokens of one /24 or /56 that open nothing, before its paths are the site's for a moment: each costs the budget of all tokens one.
const FAILURES: Pace = Pace { per_second: 5, at_once: 20 };

/// Prefixes with such tokens that are remembered.
const MOST_PREFIXES: usize = 1_024;

/// Whose carriers count against one share.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
enum Whose {
    Peer(PeerId),
    /// Those that open mode lets in, by their /24 or /56.
    At(IpAddr),
}

/// The listening end of carriers.
pub(crate) struct Exit {
    ports: carrier::Exit,
    tokens: Mutex<Tokens>,
    clock: Arc<dyn Clock + Send + Sync>,
    open: Mutex<HashMap<Whose, usize>>,
    failures: Mutex<HashMap<IpAddr, Allowance>>,
}

impl Exit {
    /// The end of the agent with these keys, for so many workers; `discarded` counts packets that carriers leave behind.
    pub(crate) fn new(
        own: &Arc<Own>,
        allowlist: Arc<dyn Allowlist>,
        workers: u8,
        clock: Arc<dyn Clock + Send + Sync>,
        discarded: &Arc<AtomicU64>,
    ) -> Arc<Self> {
        let tokens = Tokens::new(Arc::clone(own), allowlist, clock.now(), clock.unix_seconds());
        Arc::new(Self {
            ports: carrier::Exit::new(workers, discarded),
            tokens: Mutex::new(tokens),
            clock,
            open: Mutex::default(),
            failures: Mutex::default(),
        })
    }

    pub(crate) fn port(&self, worker: u8) -> Option<Arc<Port>> {
        self.ports.port(worker).map(Arc::clone)
    }

    /// Opens a carrier of the client at `source`, if `path` is a token; `None`: the path is one of the site.
    pub(crate) fn open(
        self: &Arc<Self>,
        path: &str,
        window: Duration,
        source: SocketAddr,
        probe: Option<Probe>,
    ) -> Option<Carrier> {
        let (now, unix_seconds) = (self.clock.now(), self.clock.unix_seconds());
        let prefix = prefix_of(source.ip());
        if lock(&self.failures).get(&prefix).is_some_and(|failures| failures.is_spent(now)) {
            return None;
        }
        let admits = match lock(&self.tokens).take(path, window, now, unix_seconds) {
            Ok(admits) => admits,
            Err(TokenError::Other) => return None,
            Err(error) => {
                tracing::debug!(%source, %error, "no carrier is opened");
                self.failed(prefix, now);
                return None;
            }
        };
        let whose = match admits {
            Admits::Peer(peer) => Whose::Peer(peer),
            Admits::Anyone | Admits::Paused(_) | Admits::Nobody => Whose::At(prefix),
        };
        let mut open = lock(&self.open);
        let all = |theirs: bool| -> usize {
            open.iter()
                .filter(|(whose, _)| !theirs || matches!(whose, Whose::At(_)))
                .map(|(_, open)| open)
                .sum()
        };
        let (most, together) = match whose {
            Whose::Peer(_) => (MOST_OF_ONE, all(false) >= MOST),
            Whose::At(_) => (MOST_OF_A_PREFIX, all(false) >= MOST || all(true) >= MOST_OF_STRANGERS),
        };
        if together || open.get(&whose).is_some_and(|open| *open >= most) {
            tracing::debug!(%source, "no carrier is opened: there are too many");
            return None;
        }
        *open.entry(whose).or_default() += 1;
        drop(open);
        Some(Carrier { accepted: self.ports.open(source, probe), whose, exit: Arc::clone(self) })
    }

    /// A token of this prefix has opened nothing.
    fn failed(&self, prefix: IpAddr, now: Instant) {
        let mut failures = lock(&self.failures);
        if failures.len() >= MOST_PREFIXES {
            // Of those that have every token again nothing needs to be known.
            failures.retain(|_, failures| {
                let mut copy = *failures;
                !copy.take(FAILURES.at_once, now)
            });
        }
        if failures.len() < MOST_PREFIXES || failures.contains_key(&prefix) {
            failures.entry(prefix).or_insert_with(|| Allowance::new(FAILURES, now)).spend(1, now);
        }
    }
}

/// A carrier of a client, until it is dropped.
pub(crate) struct Carrier {
    pub(crate) accepted: Accepted,
    whose: Whose,
    exit: Arc<Exit>,
}

impl Drop for Carrier {
    fn drop(&mut self) {
        let mut open = lock(&self.exit.open);
        if let Some(count) = open.get_mut(&self.whose) {
            *count -= 1;
            if *count == 0 {
                open.remove(&self.whose);
            }
        }
    }
}

/// How both ends of a stream find out whether UDP passes, by the client's key, which only they know and who ends TLS for one of them.
pub(crate) fn probe(key: &[u8]) -> Probe {
    let bytes_of = |purpose: &[u8]| {
        let mut bytes: Vec<u8> = Vec::with_capacity(PROBE_BYTES + digest::SHA256_OUTPUT_LEN);
        for block in 0_u8.. {
            let mut hash = digest::Context::new(&digest::SHA256);
            for part in [purpose, key, &[block]] {
                hash.update(part);
            }
            bytes.extend_from_slice(hash.finish().as_ref());
            if bytes.len() >= PROBE_BYTES {
                break;
            }
        }
        bytes.truncate(PROBE_BYTES);
        // As a packet that belongs to a connection, so that nobody takes it for the first of one.
        bytes[0] = bytes[0] & 0x3f | 0x40;
        bytes.into_boxed_slice()
    };
    Probe { question: bytes_of(b"culvert: does UDP pass?"), answer: bytes_of(b"culvert: UDP passes") }
}

/// What a server answers to a client's key, so that both speak WebSocket (RFC 6455 §4.2.2).
pub(crate) fn accept(key: &[u8]) -> String {
    let mut hash = digest::Context::new(&digest::SHA1_FOR_LEGACY_USE_ONLY);
    hash.update(key);
    hash.update(ACCEPT_GUID);
    BASE64.encode(hash.finish().as_ref())
}

#[cfg(test)]
#[path = "exit_tests.rs"]
mod tests;
