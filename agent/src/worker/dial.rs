//! Dialling: when it is time, where to, and what an operator is told when it fails.

use std::{io, net::SocketAddr, sync::Arc, time::Instant};

use quinn_proto::{ConnectionError, ConnectionHandle, Side};
use rand::{RngExt, seq::IndexedRandom};
use zeroize::Zeroizing;

use super::{Timer, Worker, keeper::LEAST_SILENCE, session::max_packet};
use crate::{
    control::{
        knock::{self, Knock},
        messages::CloseReason,
        tls,
    },
    gate::knock::ServerKey,
    identity::PublicKey,
    io::Token,
    lanes::UnderlayId,
    peer::{Failure, PeerId},
};

impl Worker {
    /// It is time to dial a peer, or soon will be.
    pub(super) fn dial(&mut self, id: PeerId, now: Instant) {
        if self.stopping || !self.is_live(id) {
            return;
        }
        if !self.needs_dialling(id, now) {
            if self.peers.get(id.0 as usize).is_some_and(|peer| !peer.is_reachable()) {
                // It was heard a moment ago, and is suspect still.
                self.timers.arm(Timer::Dial(id), now + LEAST_SILENCE);
            }
            return;
        }
        let Some(peer) = self.peers.get_mut(id.0 as usize) else { return };
        let waiting = peer.relay.oldest().is_some() || peer.awaited_until.is_some_and(|until| until > now);
        if let Some(endpoint) = peer.dialler.due(waiting, now, self.doors.rng()) {
            tracing::debug!(peer = &*peer.name, %endpoint, "looking up");
            self.doors.resolve(&endpoint.host, endpoint.port, peer.resolve);
        }
        if let Some(at) = peer.dialler.deadline() {
            self.timers.arm(Timer::Dial(id), at);
        }
    }

    /// Whether no worker has a session with a peer that is one, or it fell silent.
    fn needs_dialling(&self, id: PeerId, now: Instant) -> bool {
        let linked = self.peers.get(id.0 as usize).is_some_and(|peer| peer.link.is_some());
        self.is_live(id) && (!linked || self.is_suspect(id, now))
    }

    /// A peer's endpoint was looked up: dials it.
    pub(super) fn resolved(&mut self, id: PeerId, token: Token, now: Instant) {
        let Some(answer) = self.doors.resolved(token) else { return };
        self.dial_resolved(id, answer, now);
        if let Some(at) = self.peers.get(id.0 as usize).and_then(|peer| peer.dialler.deadline()) {
            self.timers.arm(Timer::Dial(id), at);
        }
    }

    fn dial_resolved(&mut self, id: PeerId, answer: io::Result<Vec<SocketAddr>>, now: Instant) {
        // Meanwhile the peer may have come to us, or another attempt may have succeeded.
        let needed = !self.stopping && self.needs_dialling(id, now);
        let failure = if answer.is_err() { self.failed_lookup() } else { "" };
        let Some(peer) = self.peers.get_mut(id.0 as usize) else { return };
        if !needed {
            peer.dialler.failed();
            return;
        }
        let name = Arc::clone(&peer.name);
        let addresses = match answer {
            Ok(addresses) => addresses,
            Err(error) => {
                if let Some(suppressed) = self.resolve_log.allow(now) {
                    tracing::warn!(
                        peer = &*name,
                        endpoint = peer.dialler.endpoint().map(tracing::field::display),
                        %error,
                        suppressed,
                        "cannot resolve the peer's endpoint (remedy: {failure})"
                    );
                }
                peer.dialler.failed();
                return;
            }
        };
        let Some(remote) = peer.dialler.choose(&addresses) else { return };
        let keys: Vec<[u8; 32]> = peer.config.public_keys.iter().map(|key| key.0).collect();
        let crypto = match tls::client_crypto(&self.identity, &keys) {
            Ok(crypto) => crypto,
            Err(error) => {
                tracing::error!(peer = &*name, %error, "cannot set up TLS for the peer");
                return;
            }
        };
        let streams = self.config.limits.tcp_streams_per_peer;
        let mut transport = tls::transport_config(peer.config.keepalive, max_packet(&self.config), streams);
        transport.qlog_stream(self.exchange.taps().stream(id, now));
        // During a rotation the peer holds one of its keys, and the next attempt may choose another.
        let choice = keys.choose(self.doors.rng());
        let Some(server) = choice.and_then(|key| ServerKey::new(&PublicKey(*key))) else {
            tracing::error!(peer = &*name, "the peer's key is no point of its curve (remedy: culvert check)");
            return;
        };
        let knock = Knock {
            own: Arc::clone(self.own.agreement()),
            server: Arc::new(server),
            unix_seconds: self.clock.unix_seconds(),
            ephemeral: Zeroizing::new(self.doors.rng().random()),
        };
        let mut client = knock::arm(crypto, knock, self.ids.initial(id));
        client.transport_config(Arc::new(transport));
        let underlay = match self.doors.dial(&mut self.underlays, remote) {
            Ok(underlay) => underlay,
            Err(error) => {
                tracing::warn!(peer = &*name, %remote, %error, "cannot open a socket to the peer");
                return;
            }
        };
        peer.dialled = Some(remote);
        match self.control.dial(id, remote, underlay, client, now) {
            Some(handle) => {
                if peer.dialler.is_first() {
                    tracing::info!(peer = &*name, %remote, "dialling");
                } else {
                    tracing::debug!(peer = &*name, %remote, "dialling again");
                }
                let again = !peer.dialler.is_first();
                if again {
                    let (reason, causes) =
                        ("no answer yet".to_owned(), likely_causes(&ConnectionError::TimedOut));
                    peer.failure = Some(Arc::new(Failure { at: now, reason, causes }));
                }
                let surplus = peer.dialler.started(handle);
                self.totals.handshakes.dialled += 1;
                if again {
                    self.warn_of_loop(Some(id), remote, now);
                }
                if let Some(oldest) = surplus {
                    self.control.close(oldest, CloseReason::Replaced, now);
                    self.totals.handshakes.failed += 1;
                    self.report_failure(id, "no answer", likely_causes(&ConnectionError::TimedOut), now);
                }
            }
            None => self.doors.close_underlay(&mut self.underlays, underlay),
        }
    }

    /// A connection has ended.
    pub(super) fn connection_lost(
        &mut self,
        handle: ConnectionHandle,
        reason: &ConnectionError,
        now: Instant,
    ) {
        let Some(connection) = self.control.get(handle) else { return };
        let (peer, side) = (connection.peer, connection.side());
        let words = in_words(reason);
        let Some(id) = peer else {
            self.totals.handshakes.failed += 1;
            tracing::debug!(%reason, "a handshake that another started has failed");
            return;
        };
        let session = self.session_of(id).is_some_and(|session| session.handle == handle);
        if !session && side == Side::Client {
            self.totals.handshakes.failed += 1;
            self.report_failure(id, &words, likely_causes(reason), now);
        }
        let planned = match reason {
            ConnectionError::ApplicationClosed(close) => {
                let known = CloseReason::from_code(close.error_code);
                known == Some(CloseReason::Shutdown) || known == Some(CloseReason::Replaced)
            }
            ConnectionError::TimedOut
            | ConnectionError::VersionMismatch
            | ConnectionError::TransportError(_)
            | ConnectionError::ConnectionClosed(_)
            | ConnectionError::Reset
            | ConnectionError::LocallyClosed
            | ConnectionError::CidsExhausted => false,
        };
        self.lose_as(handle, &words, planned, now);
    }

    /// The kernel learnt that nobody listens where a peer is being dialled.
    pub(super) fn report_unreachable(&mut self, underlay: UnderlayId, error: &io::Error, now: Instant) {
        let attempt = self.control.iter().find(|connection| connection.underlay() == underlay);
        let Some(id) =
            attempt.filter(|connection| connection.key.is_none()).and_then(|connection| connection.peer)
        else {
            return;
        };
        self.report_failure(id, &error.to_string(), NOBODY_LISTENS, now);
    }

    fn report_failure(&mut self, id: PeerId, reason: &str, causes: &'static [&'static str], now: Instant) {
        let Some(peer) = self.peers.get_mut(id.0 as usize) else { return };
        peer.failure = Some(Arc::new(Failure { at: now, reason: reason.to_owned(), causes }));
        if let Some(suppressed) = peer.attempts_log.allow(now) {
            let causes = causes.join("; ");
            tracing::warn!(
                peer = &*peer.name,
                reason,
                suppressed,
                "could not connect. Likely causes: {causes}"
            );
        }
    }
}

/// Characters of a far end's reason phrase that are shown.
const MOST_PHRASE: usize = 100;

/// Why a connection ended, in words.
fn in_words(reason: &ConnectionError) -> String {
    match reason {
        ConnectionError::ApplicationClosed(close) => match CloseReason::from_code(close.error_code) {
            Some(known) => format!("closed by the peer: {}", known.words()),
            None => format!("closed by the peer with code {}", close.error_code),
        },
        ConnectionError::TimedOut => "no answer".to_owned(),
        // Its reason phrase comes from the far end, or before the handshake is complete from anyone on the path.
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

/// What an operator should look at when the kernel says that nobody listens at the endpoint.
const NOBODY_LISTENS: &[&str] = &["is the peer running, and its endpoint right? (path)"];

/// What an operator should look at when a dialled handshake fails, the likeliest first.
///
/// A peer that does not accept us is silent, as one that is not there: only its own log says which it is.
fn likely_causes(reason: &ConnectionError) -> &'static [&'static str] {
    match reason {
        ConnectionError::TimedOut => &[
            "it is not running, `endpoints` is wrong, or a firewall on the way drops UDP (path)",
            "our key is not among its peers (allowlist): its log names the key that was refused",
            "`public_key` is not its key (key): it cannot even tell that somebody knocks",
            "our clock differs from its by more than its access.clock_window (clock): up to minutes, its log says by how much",
        ],
        ConnectionError::TransportError(_) => &[
            "the key it proved is not one of `public_key` of this [[peer]] (key)",
            "it refuses us, and shows us its decoy instead: our key is not among its peers (allowlist), or our clock is off \
                 (clock)",
        ],
        ConnectionError::ConnectionClosed(_) => &[
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
