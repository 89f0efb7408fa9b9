//! Why a peer is not reached: what is known comes first, and what has been proved meanwhile is not offered as a cause.
//!
//! ```text
//!   what the kernel of this host refused ──► when the peer last answered ──► what a silent peer may mean
//! ```

use std::{
    borrow::Cow,
    io,
    time::{Duration, Instant},
};

use base::ids::PeerId;
use net::{RefusedBy, SendRefusal};
use quinn_proto::ConnectionError;
use wire::messages::CloseReason;

use crate::{reach::Failure, worker::context::Context};

/// Packets that the kernel refused so recently are why an attempt fails: an attempt sends at least one within that time.
const RECENT: Duration = Duration::from_secs(15);

/// Limit on the characters of a far end's reason phrase that are shown.
const MOST_PHRASE: usize = 100;

/// Why a connection ended, in words.
pub(crate) fn in_words(reason: &ConnectionError) -> String {
    match reason {
        ConnectionError::ApplicationClosed(close) => match CloseReason::from_code(close.error_code) {
            Some(known) => format!("closed by the peer: {}", known.label()),
            None => format!("closed by the peer with code {}", close.error_code),
        },
        ConnectionError::TimedOut => "no answer".to_owned(),
        // The reason phrase comes from the far end or, before the handshake is complete, from anyone on the path.
        ConnectionError::ConnectionClosed(close) => {
            let phrase: String =
                String::from_utf8_lossy(&close.reason).escape_debug().take(MOST_PHRASE).collect();
            format!("closed by the far end: {} {phrase:?}", close.error_code)
        }
        ConnectionError::VersionMismatch
        | ConnectionError::TransportError(_)
        | ConnectionError::Reset
        | ConnectionError::LocallyClosed
        | ConnectionError::CidsExhausted => reason.to_string(),
    }
}

/// Causes for an operator to check when the kernel has no route to an endpoint.
pub(crate) const NO_ROUTE: &[&str] = &["has this host a route there, and an address of that family? (path)"];

/// Causes for an operator to check when an ICMP message has answered a handshake.
pub(crate) fn of_icmp(error: &io::Error) -> &'static [&'static str] {
    match error.raw_os_error() {
        Some(libc::EMSGSIZE) => &[
            "a router on the way carries less than QUIC needs, 1228 bytes over IPv4 and 1248 over IPv6: tracepath to its address \
             finds it (path)",
        ],
        Some(libc::EHOSTUNREACH | libc::ENETUNREACH) => {
            &["a router on the way has no route there, or its host is down: traceroute finds it (path)"]
        }
        Some(libc::EACCES | libc::EPERM) => &["a firewall on the way refuses it (path)"],
        _ => &["is the peer running, and its endpoint right? (path)"],
    }
}

/// Causes for an operator to check when a peer is silent that answered before in this run: allowlist, key exchange and clock have
/// been proved, and its key, which is another one only after a restart with another file.
const ANSWERED_BEFORE: &[&str] = &[
    "the path to it is down, or a firewall or NAT on the way drops UDP since then (path)",
    "it is not running any more, or its address has changed: `endpoints` (path)",
    "somebody gave it another key since then: `public_key` is not its key (key)",
];

/// Causes for an operator to check when a dialled handshake fails, the likeliest first.
///
/// A peer that does not accept us sends nothing, as if it were not there. Only its own log tells the difference.
fn likely_causes(reason: &ConnectionError) -> &'static [&'static str] {
    match reason {
        ConnectionError::TimedOut => &[
            "it is not running, `endpoints` is wrong, or a firewall on the way drops UDP (path)",
            "our key is not among its peers (allowlist): its log names the key that was refused",
            "`public_key` is not its key (key): it cannot read our knock and drops it",
            "it wants another transport.key_exchange (key exchange), or the way drops one of the two datagrams that a hybrid one \
                 begins with (path): its log says so",
            "our clock differs from its by more than its access.clock_window (clock): its log says by how much if that is little, \
             and treats us as an unauthenticated sender otherwise",
        ],
        ConnectionError::TransportError(_) => &[
            "the key it proved is not one of `public_key` of this [[peer]] (key)",
            "it refuses us, and shows us its decoy instead: our key is not among its peers (allowlist), or our clock is off \
                 (clock)",
        ],
        ConnectionError::ConnectionClosed(_) => &[
            "our transport.key_exchange and its have nothing in common, if it says so (key exchange)",
            "it gave up on a slow handshake (path), or our key was removed there meanwhile (allowlist)",
            "it refuses us, and shows us its decoy instead: our key is not among its peers (allowlist), or our clock is off \
                 (clock)",
        ],
        ConnectionError::ApplicationClosed(_) => &["the peer ended it, and says why"],
        ConnectionError::Reset
        | ConnectionError::LocallyClosed
        | ConnectionError::CidsExhausted
        | ConnectionError::VersionMismatch => &[],
    }
}

/// What an operator can do about packets that the kernel refuses.
pub(crate) fn remedy(refusal: SendRefusal) -> &'static str {
    match refusal.by() {
        RefusedBy::Mtu => {
            "the MTU of the interface, or of the tunnel that leads to the peer, is below the 1228 bytes that QUIC needs over IPv4 \
             (1248 over IPv6): `ip route get` its address names the interface, `ip link set DEV mtu` raises it (path)"
        }
        RefusedBy::Firewall => {
            "a firewall rule of this host drops what it sends itself: `nft list ruleset`, or `iptables -S OUTPUT` (path)"
        }
        RefusedBy::Route => {
            "a route or rule of this host prohibits it: `ip route get` its address, `ip rule` (path)"
        }
        RefusedBy::Memory => {
            "the queue of the interface is full, or the kernel has no memory for packets: `tc -s qdisc`, `free` (path)"
        }
        RefusedBy::Address => {
            "the source address is gone, or the route does not suit it: `ip address`, `ip route get` its address (path)"
        }
        RefusedBy::Other => "the kernel's log, and `ip route get` its address, may say more (path)",
    }
}

/// What the kernel of this host has refused, in words.
pub(crate) fn refused_in_words(refusal: SendRefusal) -> String {
    let SendRefusal { destination, bytes, .. } = refusal;
    format!("this host refuses to send {bytes} bytes to {destination}: {}", refusal.error())
}

impl Context {
    /// Why an attempt ended, and what to look at.
    pub(crate) fn diagnose(&self, id: PeerId, reason: &ConnectionError, now: Instant) -> Failure {
        match reason {
            ConnectionError::TimedOut => self.no_answer(id, "no answer", now),
            ConnectionError::VersionMismatch
            | ConnectionError::TransportError(_)
            | ConnectionError::ConnectionClosed(_)
            | ConnectionError::ApplicationClosed(_)
            | ConnectionError::Reset
            | ConnectionError::LocallyClosed
            | ConnectionError::CidsExhausted => Failure::new(in_words(reason), likely_causes(reason)),
        }
    }

    /// Why a peer may be silent. Says so in `words`.
    pub(crate) fn no_answer(&self, id: PeerId, words: &str, now: Instant) -> Failure {
        let Some(peer) = self.peers.get(id) else { return Failure::new(words, &[]) };
        let proved = peer.reach.proved();
        let since = proved.map(|at| now.saturating_duration_since(at));
        let mut failure = match since {
            Some(since) => {
                let since = self.hub.silence(id, now).map_or(since, |silence| silence.min(since));
                let words = format!("{words}; it answered until {} s ago", since.as_secs());
                Failure::new(words, ANSWERED_BEFORE)
            }
            None => Failure::new(words, likely_causes(&ConnectionError::TimedOut)),
        };
        let refused = peer.reach.kernel_refusal().filter(|it| now.saturating_duration_since(it.at) < RECENT);
        if let Some(refused) = refused {
            failure.reason = format!("{}; {}", refused_in_words(refused.last), failure.reason);
            failure.causes.insert(0, Cow::Borrowed(remedy(refused.last)));
        }
        failure
    }
}
