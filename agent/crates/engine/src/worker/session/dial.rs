//! Dialling: when and where to, and the log lines about failures.

use std::{io, net::SocketAddr, sync::Arc, time::Instant};

use base::ids::PeerId;
use dataplane::lanes::UnderlayId;
use gate::{
    OwnKey,
    client::{self, Knock},
    identity::PublicKey,
    knock::ServerKey,
    tls::{self, KeyExchange},
};
use net::Token;
use quinn_proto::{ConnectionError, ConnectionHandle, Side};
use rand::{RngExt, rngs::StdRng, seq::IndexedRandom};
use wire::{line::MOST_LINES, messages::CloseReason};
use zeroize::Zeroizing;

use crate::{
    control::{
        dial::Step,
        driver::Dial,
        liveness::LEAST_SILENCE,
        transport::{self, PacketSizes},
    },
    hub::StreamRequest,
    peer::Peer,
    reach::Failure,
    worker::{
        context::{
            Context, Effect, causes,
            packet_sizes::{most_at, most_towards},
            timer::Timer,
        },
        session::{Sessions, liveness::IN_USE},
    },
};

/// The packets of a connection to a peer at `remote`: one for a session's streams begins with what its lanes have proved.
fn packet_sizes(cx: &Context, id: PeerId, remote: SocketAddr, is_of_session: bool) -> PacketSizes {
    let most = most_towards(&cx.config.transport, cx.sockets.factory.ways(), remote);
    let most = most.min(most_at(cx.hub.rate(id).rate(), u16::MAX));
    let link = cx.peers.get(id).and_then(|peer| peer.data.link.as_ref()).filter(|_| is_of_session);
    let proved = link.and_then(|link| u16::try_from(link.budget.measured()?).ok());
    proved.map_or_else(|| PacketSizes::up_to(most), |start| PacketSizes { start, most })
}

impl Sessions {
    /// Dials a peer if that is due, and arms the timer of the next attempt.
    pub(crate) fn dial(&mut self, cx: &mut Context, id: PeerId, now: Instant) {
        if cx.stopping || !cx.peers.is_live(id) {
            return;
        }
        if !cx.needs_dialling(id, now) {
            if cx.peers.get(id).is_some_and(|peer| !peer.data.is_well()) {
                // The peer is suspect, but was heard a moment ago.
                cx.timers.arm(Timer::Dial(id), now + LEAST_SILENCE);
            }
            return;
        }
        while let Some(step) = cx.next_step(id, now) {
            match step {
                Step::LookUp(endpoint) => cx.look_up(id, &endpoint, now),
                Step::Dial(remote) => self.dial_address(cx, id, remote, false, now),
                Step::FallBack(remote) => self.dial_address(cx, id, remote, true, now),
            }
        }
        cx.watch_dialler(id);
    }

    /// Dials a peer at the addresses of an endpoint that has been looked up.
    pub(crate) fn resolved(&mut self, cx: &mut Context, id: PeerId, token: Token, now: Instant) {
        let Some(answer) = cx.sockets.factory.resolved(token) else { return };
        cx.sockets.factory.release(token);
        if let Err(error) = &answer {
            cx.report_failed_lookup(id, token, error, now);
        }
        // Meanwhile the peer may have connected to us, or another attempt may have succeeded.
        let needed = !cx.stopping && cx.needs_dialling(id, now);
        let addresses = answer.unwrap_or_default();
        let peer = cx.peers.get_mut(id);
        let remote = peer.and_then(|peer| peer.dialler.answered(token, &addresses, now));
        if !needed {
            return;
        }
        if let Some(remote) = remote {
            self.dial_address(cx, id, remote, false, now);
        }
        self.dial(cx, id, now);
    }

    /// Dials a peer at `remote`, as a `fallback` by X25519 alone: on all lines at once if the host has several, so that a dead one delays
    /// nothing.
    fn dial_address(
        &mut self,
        cx: &mut Context,
        id: PeerId,
        remote: SocketAddr,
        fallback: bool,
        now: Instant,
    ) {
        let lines = u8::try_from(cx.sockets.factory.uplinks().len()).unwrap_or(MOST_LINES);
        if let Some(peer) = cx.peers.get_mut(id) {
            peer.dialler.set_lines(lines.into());
        }
        let any = match lines {
            0 => self.dial_on(cx, id, remote, None, fallback, now),
            lines => {
                let dialled =
                    (0..lines).filter(|line| self.dial_on(cx, id, remote, Some(*line), fallback, now));
                dialled.count() > 0
            }
        };
        if let Some(peer) = cx.peers.get_mut(id).filter(|_| !any) {
            // The host may lack one address family and have the other.
            peer.dialler.failed(now);
        }
    }

    /// Dials a peer at `remote` on a line. False if there is no socket for that.
    fn dial_on(
        &mut self,
        cx: &mut Context,
        id: PeerId,
        remote: SocketAddr,
        line: Option<u8>,
        fallback: bool,
        now: Instant,
    ) -> bool {
        let Some(client) = self.client_config(cx, id, remote, None, fallback, now) else { return true };
        let Some(peer) = cx.peers.get_mut(id) else { return true };
        let name = Arc::clone(peer.name());
        let underlay = match cx.sockets.factory.dial(&mut cx.sockets.underlays, remote, line) {
            Ok(underlay) => underlay,
            Err(error) => {
                let reason = format!("cannot open a socket to {remote}: {error}");
                peer.reach.fail(reason, causes::NO_ROUTE, now);
                if let Some(suppressed) = peer.throttles.attempts.allow(now) {
                    tracing::warn!(peer = &*name, %remote, line, %error, suppressed = base::throttle::counted(suppressed), "cannot open a socket to the peer (remedy: culvert doctor)");
                }
                return false;
            }
        };
        peer.reach.dials(remote);
        let Some(handle) = self.control.dial(id, remote, underlay, client, now) else {
            cx.sockets.factory.close_underlay(&mut cx.sockets.underlays, underlay);
            return true;
        };
        self.control.set_congestion(handle, &peer.data.config, cx.hub.rate(id), now);
        let is_first = peer.dialler.is_first();
        // A far end that accepts and closes is lost, and so dialled for the first time, each second.
        if let Some(suppressed) = is_first.then(|| peer.throttles.dialling.allow(now)).flatten() {
            tracing::info!(peer = &*name, %remote, suppressed = base::throttle::counted(suppressed), "dialling");
        } else {
            tracing::debug!(peer = &*name, %remote, fallback, "dialling again");
        }
        let again = peer.dialler.is_unanswered();
        let surplus = peer.dialler.started(handle, fallback);
        cx.stats.totals.handshakes.dialled += 1;
        if again {
            let failure = cx.no_answer(id, "no answer yet", now);
            cx.fail(id, failure, now);
            cx.effects.push_back(Effect::CheckLoop { peer: id, remote });
        }
        if let Some(oldest) = surplus {
            self.control.close(oldest, CloseReason::Replaced, now);
            cx.stats.totals.handshakes.failed += 1;
            let failure = cx.no_answer(id, "no answer", now);
            cx.report_failure(id, failure, now);
        }
        true
    }

    /// Makes the configuration of an attempt to connect to a peer: the keys to expect, the transport, and a fresh knock.
    pub(crate) fn client_config(
        &self,
        cx: &mut Context,
        id: PeerId,
        remote: SocketAddr,
        stream: Option<&StreamRequest>,
        fallback: bool,
        now: Instant,
    ) -> Option<Dial> {
        let packets = packet_sizes(cx, id, remote, stream.is_some());
        let peer = cx.peers.get_mut(id)?;
        let name = Arc::clone(peer.name());
        let keys: Vec<[u8; 32]> = match stream {
            // A stream connection expects the key that the session has proved.
            Some(stream) => vec![stream.key],
            None => peer.data.config.public_keys.iter().map(|key| key.0).collect(),
        };
        let own = match stream {
            Some(stream) => stream.own,
            None if self.own.has_previous() => next_own_key(peer, &mut cx.rng),
            None => OwnKey::Current,
        };
        let key_exchange = if fallback { KeyExchange::X25519 } else { cx.config.transport.key_exchange };
        let crypto = match tls::client_crypto(cx.identity.of(own), key_exchange, &keys) {
            Ok(crypto) => crypto,
            Err(error) => {
                if let Some(suppressed) = peer.throttles.attempts.allow(now) {
                    tracing::error!(peer = &*name, %error, suppressed = base::throttle::counted(suppressed), "cannot set up TLS for the peer (remedy: report it)");
                }
                return None;
            }
        };
        // A stream connection lives for as long as it has forwards, even idle ones. A session is kept alive with its lanes.
        let keepalive = stream.map(|_| peer.data.config.keepalive.unwrap_or(IN_USE));
        let limits = &cx.config.limits;
        let mut transport =
            transport::transport_config(keepalive, packets, limits.tcp_streams_per_peer, limits.stream_bytes);
        if stream.is_none() {
            transport.qlog_stream(cx.hub.taps().stream(id, now));
        }
        // During a key rotation the peer holds one of its keys, and the next attempt may choose another one.
        let choice = keys.choose(&mut cx.rng);
        let Some(server) = choice.and_then(|key| ServerKey::new(&PublicKey(*key))) else {
            throttled!(
                error,
                peer.throttles.attempts.allow(now),
                { peer = &*name },
                "the peer's key is no point of its curve (remedy: culvert check)"
            );
            return None;
        };
        let knock = Knock {
            own: Arc::clone(self.own.agreement_of(own)),
            server: Arc::new(server),
            unix_seconds: self.clock.unix_seconds(),
            ephemeral: Zeroizing::new(cx.rng.random()),
            fallback,
        };
        // A session of its own may be at any exit of a fleet.
        let (first, server) =
            stream.map_or_else(|| (self.ids.first_byte(id), None), |stream| (stream.first, stream.server));
        let client = client::arm(crypto, knock, self.ids.initial_from(first, server));
        Some(Dial { client, transport, own })
    }

    /// Handles the loss of a connection: counts and reports a failed attempt, and ends the session that the connection carried.
    pub(crate) fn connection_lost(
        &mut self,
        cx: &mut Context,
        handle: ConnectionHandle,
        reason: &ConnectionError,
        now: Instant,
    ) {
        let Some(connection) = self.control.get(handle) else { return };
        let (peer, side) = (connection.identity.peer(), connection.side());
        let (words, close) = (causes::in_words(reason), CloseReason::of(reason));
        let Some(id) = peer else {
            cx.stats.totals.handshakes.failed += 1;
            throttled!(debug, cx.debug_lines.allow(now), { %reason }, "a handshake that another started has failed");
            return;
        };
        if self.stream_connection_lost(cx, id, handle, Some(reason), now) {
            return;
        }
        // One that a newer one of ours replaced did not fail: a slow CPU dials again before it has an answer.
        let is_attempt = !cx.peers.is_session(id, handle) && side == Side::Client;
        if is_attempt && close != Some(CloseReason::Replaced) {
            cx.stats.totals.handshakes.failed += 1;
            if close != Some(CloseReason::PresharedKey) {
                let failure = cx.diagnose(id, reason, now);
                cx.report_failure(id, failure, now);
            }
        }
        let is_ousted = self.is_ousted(cx, id, handle, close);
        if close == Some(CloseReason::KeyRemoved)
            && let Some(peer) = cx.peers.get_mut(id)
        {
            peer.reach.shut_out();
        }
        self.lose(cx, handle, &words, close.is_some_and(CloseReason::is_planned), now);
        if is_ousted {
            cx.report_ousted(id, now);
        }
        if close == Some(CloseReason::PresharedKey) {
            cx.key_refused_by_peer(id, now);
        }
    }

    /// Reports a failed attempt when the kernel has learnt that no process listens at the dialled address.
    pub(crate) fn report_unreachable(
        &self,
        cx: &mut Context,
        underlay: UnderlayId,
        error: &io::Error,
        now: Instant,
    ) {
        let attempt = self.control.iter().find(|connection| connection.underlay == underlay);
        let Some(id) = attempt
            .filter(|connection| {
                connection.identity.key().is_none() && connection.identity.stream_number().is_none()
            })
            .and_then(|connection| connection.identity.peer())
        else {
            return;
        };
        let failure = Failure::new(error.to_string(), causes::of_icmp(error));
        cx.report_failure(id, failure, now);
    }
}

/// The key of ours for the next attempt during a rotation: the current one first, so that a peer that knows it gets it. A peer that
/// does not know it says nothing, so later attempts take either by chance: in turns, each of two addresses would always meet the
/// same one.
fn next_own_key(peer: &Peer, rng: &mut StdRng) -> OwnKey {
    if peer.dialler.is_first() {
        return OwnKey::Current;
    }
    *[OwnKey::Current, OwnKey::Previous].choose(rng).unwrap_or(&OwnKey::Current)
}

impl Context {
    fn report_failed_lookup(&mut self, id: PeerId, token: Token, error: &io::Error, now: Instant) {
        let remedy = self.failed_lookup();
        let Some(peer) = self.peers.get_mut(id) else { return };
        let Some(endpoint) = peer.dialler.looked_up(token) else { return };
        let reason = format!("cannot resolve {endpoint}: {error}");
        peer.reach.fail(reason, &[], now);
        throttled!(
            warn, self.logs.resolve.allow(now), { peer = &**peer.name(), %endpoint, %error },
            "cannot resolve the peer's endpoint (remedy: {remedy})"
        );
    }
}
