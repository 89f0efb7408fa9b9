//! TCP forwards, each a stream of a peer's connection and a TCP connection.

use std::{
    io::ErrorKind,
    net::SocketAddr,
    sync::Arc,
    time::{Duration, Instant},
};

use base::ids::PeerId;
use dataplane::{
    forward::tcp::{Cause, Knows, Pumped, TcpForward, TcpId},
    relay::Held,
    sockets::Source,
};
use net::{TcpStream, Token};
use quinn_proto::{ConnectionHandle, StreamId};
use wire::{
    messages::{self, Features, StreamAnswer, StreamOpen},
    proxy::ClientAddresses,
};

use crate::{
    control::StreamKey,
    worker::{
        context::{
            Context,
            ceilings::socket_remedy,
            timer::{Timer, index_u32},
        },
        report::stats::{TcpEnd, TcpRefusal},
        session::Sessions,
        streams::{OpenForward, TcpForwards, keepalive, sight::Sight, toll::Toll},
    },
};

/// How long a listener rests after an error that may last, such as a full table of descriptors.
const ACCEPT_PAUSE: Duration = Duration::from_millis(100);

/// Limit on connections accepted from one listener in one turn.
const ACCEPTS_PER_TURN: usize = 16;

/// Limit on streams accepted from one connection in one turn. Opening a connection to a service for one takes 20 to 40 µs.
const OPENED_PER_TURN: usize = 64;

/// A stream that this end opened for a TCP forward.
struct OpenedStream {
    peer: PeerId,
    key: StreamKey,
    /// The number of the service at the peer.
    service: u32,
    /// Whether the service is to be told who connected.
    tells_client: bool,
}

/// A client's connection, not forwarded yet.
pub(super) struct Accepted {
    pub(super) stream: Box<dyn TcpStream>,
    pub(super) token: Token,
    /// The address that an operator is shown.
    pub(super) client: SocketAddr,
    /// Who connected, if a PROXY header has said so.
    pub(super) told: Option<ClientAddresses>,
    /// What was read behind the header.
    pub(super) read: Vec<u8>,
}

impl TcpForwards {
    /// Accepts connections at a `[[tcp]]` port; returns whether more may wait.
    pub(crate) fn accept_tcp(
        &mut self,
        cx: &mut Context,
        sessions: &mut Sessions,
        port: usize,
        now: Instant,
    ) -> bool {
        for _ in 0..ACCEPTS_PER_TURN {
            if !self.may_accept(cx, sessions, port) {
                return false;
            }
            match self.obstacle(cx, sessions, port) {
                Some(obstacle) if self.lets_wait(cx, port, obstacle, now) => return false,
                // A connection that has waited for long enough is refused below.
                Some(_) => {}
                None => cx.hub.backlogs.end(port),
            }
            let proxied = cx.config.tcp.get(port).is_some_and(|forward| !forward.tcp.accept_proxy.is_empty());
            let source = if proxied {
                Source::Proxied(index_u32(self.proxied.next_place()))
            } else {
                Source::Tcp(TcpId(index_u32(self.open.next_place())))
            };
            let token = cx.sockets.factory.token(source);
            let Some(Some((listener, _))) = self.listeners.get_mut(port) else {
                cx.sockets.factory.release(token);
                return false;
            };
            match listener.accept(token) {
                Ok((stream, client)) => {
                    let accepted = Accepted { stream, token, client, told: None, read: Vec::new() };
                    if proxied {
                        self.await_proxy(cx, sessions, port, accepted, now);
                    } else {
                        self.forward(cx, sessions, port, accepted, now);
                    }
                }
                Err(error) => {
                    cx.sockets.factory.release(token);
                    if error.kind() == ErrorKind::WouldBlock {
                        // The backlog is empty: the next connection may wait for the full time.
                        cx.hub.backlogs.end(port);
                    } else {
                        cx.stats.totals.tcp.refused[TcpRefusal::Accept] += 1;
                        throttled!(
                            warn, cx.logs.accept.allow(now), { %error },
                            "cannot accept a TCP connection (remedy: {})", socket_remedy(&error)
                        );
                        // No event reports the connections that still wait, so a timer checks the listener again.
                        cx.timers.arm(Timer::Listener(port), now + ACCEPT_PAUSE);
                    }
                    return false;
                }
            }
        }
        true
    }

    /// Forwards a connection of a `[[tcp]]` port, or resets it.
    pub(super) fn forward(
        &mut self,
        cx: &mut Context,
        sessions: &mut Sessions,
        port: usize,
        accepted: Accepted,
        now: Instant,
    ) {
        let Accepted { mut stream, token, client, told, read } = accepted;
        match self.open_stream(cx, sessions, port) {
            Ok(opened) => {
                let OpenedStream { peer, key, service, tells_client } = opened;
                let mut sight = Sight::new(cx, Some(client), now);
                if let Some(name) = cx.config.tcp.get(port).map(|port| Arc::clone(&port.service)) {
                    cx.forward_serves(peer, &mut sight, &name);
                }
                tracing::debug!(%client, service, "TCP forward");
                let after = cx.config.tcp.get(port).and_then(|forward| forward.tcp.keepalive);
                let id = TcpId(index_u32(self.open.next_place()));
                self.keepalives.begin(id, &*stream, after);
                let direct = || {
                    let listen = || cx.config.tcp.get(port).map(|forward| forward.listen);
                    ClientAddresses::new(client, stream.near_end().or_else(listen)?)
                };
                let open = StreamOpen { service, client: told.or_else(direct).filter(|_| tells_client) };
                let knows = cx.known_by(peer);
                let forward = TcpForward::opened(key.stream, (stream, token), open, &read, knows, now);
                self.insert_tcp(cx, sessions, OpenForward { key, peer, forward, sight }, now);
                cx.want_stream_connections(peer, now);
            }
            Err(reason) => {
                if reason == TcpRefusal::NotConnected {
                    self.await_peer(cx, port, now);
                }
                // A reset: the client must not take an orderly end for an empty answer.
                stream.abort();
                cx.sockets.factory.release(token);
                cx.stats.totals.tcp.refused[reason] += 1;
                if reason == TcpRefusal::Limit
                    && let Some(peer) = self.port_peer(cx, port)
                {
                    cx.tcp_ceiling_reached(peer, now);
                }
                tracing::debug!(%client, reason = reason.label(), "TCP forward refused");
            }
        }
    }

    /// Opens a stream for the service of a `[[tcp]]` port.
    fn open_stream(
        &self,
        cx: &mut Context,
        sessions: &mut Sessions,
        port: usize,
    ) -> Result<OpenedStream, TcpRefusal> {
        let forward = cx.config.tcp.get(port).ok_or(TcpRefusal::UnknownService)?;
        let id = cx.peers.of_forward(forward);
        let peer = cx.peers.get_mut(id).ok_or(TcpRefusal::NotConnected)?;
        if peer.data.relay.held == Held::Stopped {
            return Err(TcpRefusal::Quota);
        }
        peer.data.link.as_ref().ok_or(TcpRefusal::NotConnected)?;
        let service = peer.data.relay.services.of_tcp(&forward.service);
        let messages::Service { number: service, client: tells_client, .. } =
            *service.ok_or(TcpRefusal::UnknownService)?;
        let forwards = Arc::clone(&peer.forwards.of_all);
        let handle = sessions.carrier(cx, id).ok_or(TcpRefusal::NotConnected)?;
        if cx.is_full() || !forwards.open(cx.id.index, cx.config.limits.tcp_streams_per_peer) {
            return Err(TcpRefusal::Limit);
        }
        let stream = sessions.control.open_stream(handle).ok_or_else(|| {
            forwards.close(cx.id.index);
            TcpRefusal::Limit
        })?;
        Ok(OpenedStream { peer: id, key: StreamKey { connection: handle.0, stream }, service, tells_client })
    }

    /// Accepts streams that the peer opened, as many as the turn and the peer's allowance permit; the others wait.
    pub(crate) fn streams_opened(
        &mut self,
        cx: &mut Context,
        sessions: &mut Sessions,
        handle: ConnectionHandle,
        now: Instant,
    ) {
        for _ in 0..OPENED_PER_TURN {
            let Some(peer) = sessions.peer_of(handle) else { return };
            let Some(state) = cx.peers.get_mut(peer) else { return };
            let next = state.data.allowances.streams.next(now);
            if next > now {
                sessions.control.accept_later(handle, next, now);
                return;
            }
            let Some((stream, said)) = sessions.control.accept(handle) else { return };
            state.data.allowances.streams.take(1, now);
            let key = StreamKey { connection: handle.0, stream };
            self.stream_opened(cx, sessions, peer, key, now);
            self.take_said(cx, sessions, key, said, now);
        }
        sessions.control.accept_later(handle, now, now);
    }

    /// Starts a TCP forward on a stream that the peer opened, or refuses it if a limit is reached.
    fn stream_opened(
        &mut self,
        cx: &mut Context,
        sessions: &mut Sessions,
        peer: PeerId,
        key: StreamKey,
        now: Instant,
    ) {
        let handle = ConnectionHandle(key.connection);
        let most = cx.config.limits.tcp_streams_per_peer;
        let mut forward = TcpForward::accepted(key.stream, cx.known_by(peer), now);
        if cx.peers.get(peer).is_some_and(|state| state.data.relay.held == Held::Stopped) {
            cx.stats.totals.tcp.refused[TcpRefusal::Quota] += 1;
            if let Some(quinn) = sessions.control.quinn(handle) {
                forward.refuse(quinn, StreamAnswer::LimitReached);
            }
            return;
        }
        // Asked last, because it counts the forward as one that is open.
        let full = cx.is_full()
            || !cx.takes_streams(peer, handle, now)
            || cx.peers.get(peer).is_none_or(|state| !state.forwards.of_all.open(cx.id.index, most));
        if full {
            cx.stats.totals.tcp.refused[TcpRefusal::Limit] += 1;
            cx.tcp_ceiling_reached(peer, now);
            if let Some(quinn) = sessions.control.quinn(handle) {
                forward.refuse(quinn, StreamAnswer::LimitReached);
            }
            return;
        }
        let sight = Sight::new(cx, None, now);
        self.insert_tcp(cx, sessions, OpenForward { key, peer, forward, sight }, now);
    }

    /// Notes that a stream may be readable or writable. quinn-proto reports that for every received frame, but the forward is served
    /// only once, after all reports.
    pub(crate) fn stream_ready(&mut self, handle: ConnectionHandle, stream: StreamId) {
        if let Some(id) = self.by_stream.get(&StreamKey { connection: handle.0, stream }).copied()
            && let Some(OpenForward { forward, .. }) = self.open.get_mut(id.0 as usize)
            && !std::mem::replace(&mut forward.stirred, true)
        {
            self.stirred.push(id);
        }
    }

    /// Serves the forwards whose streams had events, first the one that has sent nothing for longest. So each gets its turn if the
    /// connection has too little room for all; quinn-proto reports the streams first that were blocked last.
    pub(crate) fn pump_stirred(&mut self, cx: &mut Context, sessions: &mut Sessions, now: Instant) {
        let mut stirred = std::mem::take(&mut self.stirred);
        let sent = |id: &TcpId| self.open.get(id.0 as usize).map_or(0, |open| open.forward.sent);
        stirred.sort_by_key(sent);
        for id in stirred.drain(..) {
            if let Some(OpenForward { forward, .. }) = self.open.get_mut(id.0 as usize) {
                forward.stirred = false;
                self.pump(cx, sessions, id, Cause::Other, now);
            }
        }
        self.stirred = stirred;
    }

    /// Bytes that a forward has moved so far, in both directions.
    pub(crate) fn tcp_bytes(&self, id: TcpId) -> usize {
        let (out, back) = self.open.get(id.0 as usize).map_or((0, 0), |open| open.forward.bytes());
        usize::try_from(out + back).unwrap_or(usize::MAX)
    }

    /// Moves the bytes of a forward in both directions. A forward that has more is served again after the others.
    pub(crate) fn pump(
        &mut self,
        cx: &mut Context,
        sessions: &mut Sessions,
        id: TcpId,
        cause: Cause,
        now: Instant,
    ) {
        let Some(OpenForward { key, peer, forward, sight }) = self.open.get_mut(id.0 as usize) else {
            return;
        };
        let (key, peer) = (*key, *peer);
        let Some((quinn, order)) = sessions.control.streams(ConnectionHandle(key.connection)) else {
            forward.abort();
            sight.end = Some(TcpEnd::ConnectionLost);
            self.remove_tcp(cx, sessions, id);
            return;
        };
        self.passes += 1;
        let (before, held) = (forward.bytes(), forward.held());
        let tried = forward.place().cloned();
        let toll = Toll::of(cx, peer, now);
        (self.scratch.piece, self.scratch.takes) = (cx.hub.streams.piece(), toll.takes());
        let pumped = forward.pump(quinn, order, &mut self.scratch, cause, now);
        let rtt = quinn.rtt();
        let (token, after) = (forward.token(), forward.bytes());
        let delivered = after.1 - before.1;
        if after.0 > before.0 {
            forward.sent = self.passes;
            sessions.control.forward_sent(ConnectionHandle(key.connection), now);
        }
        cx.hub.streams.hold(held, forward.held());
        let stopped = forward.reader_changed(now);
        sessions.control.forward_moved(ConnectionHandle(key.connection), delivered, stopped);
        let credit = cx.hub.streams.credit();
        if let Some(limit) = forward.credit_to_tell(credit, rtt, now)
            && let Some(told) = sessions.control.streams_told(ConnectionHandle(key.connection))
        {
            told.limit(key.stream, limit);
        }
        if let Some(at) = forward.look_at(credit.is_some()) {
            cx.timers.arm(Timer::Tcp(id), at);
        }
        toll.charge(delivered, now);
        if let Some(at) = toll.rests_until().filter(|_| forward.rests()) {
            cx.timers.arm(Timer::Tcp(id), at);
        }
        cx.forward_moved(peer, sight, [after.0 - before.0, delivered], forward.waits(), now);
        if self.keepalives.served(id, now) {
            cx.timers.arm(Timer::Keepalive, now + keepalive::TICK);
        }
        match pumped {
            Pumped::Waiting => {}
            Pumped::Busy => {
                if let Some(token) = token {
                    self.ready.mark(token);
                }
            }
            Pumped::Wants(open) => self.connect_service(cx, sessions, id, &open, now),
            Pumped::Unreached => {
                let error = forward.take_failure();
                self.try_next(cx, sessions, id, error, now);
            }
            Pumped::Answered(StreamAnswer::Ok) => {
                if let Some(place) = tried {
                    cx.sockets.factory.upstreams.reach(&place);
                }
                self.pump(cx, sessions, id, Cause::Tcp, now);
            }
            Pumped::Answered(answer) => {
                let (service, error) = (forward.service().unwrap_or(0), forward.take_failure());
                if let Some((place, error)) = forward.place().zip(error.as_ref()) {
                    cx.note_unreached(place, error, now);
                }
                cx.report_service(peer, service, answer, error.as_ref(), now);
                cx.stats.totals.tcp.refused[TcpRefusal::from(answer)] += 1;
                self.remove_tcp(cx, sessions, id);
            }
            Pumped::Refused(answer) => {
                cx.report_refused(peer, sight, answer, now);
                cx.stats.totals.tcp.refused[TcpRefusal::from(answer)] += 1;
                self.remove_tcp(cx, sessions, id);
            }
            Pumped::Aborted { bytes } => {
                if let Some(told) = sessions.control.streams_told(ConnectionHandle(key.connection)) {
                    told.abort(key.stream, bytes);
                }
                let Some(opened) = self.open.get_mut(id.0 as usize) else { return };
                if opened.forward.is_over() {
                    return self.remove_tcp(cx, sessions, id);
                }
                if opened.forward.tcp().is_some_and(|tcp| tcp.is_lost()) {
                    cx.note_vanished(opened);
                }
                if let Some(token) = opened.forward.take_token() {
                    cx.sockets.factory.release(token);
                }
                // The peer may have stopped the stream already.
                self.pump(cx, sessions, id, Cause::Other, now);
            }
            Pumped::Done => self.remove_tcp(cx, sessions, id),
        }
    }

    /// Arms the timer that removes a forward that is not open in time.
    pub(super) fn watch_opening(&self, cx: &mut Context, id: TcpId) {
        if let Some(until) = self.open.get(id.0 as usize).and_then(|open| open.forward.open_by()) {
            cx.timers.arm(Timer::Tcp(id), until);
        }
    }

    /// Goes on with a forward whose time has come: removes one that is not open in time because the header, the service or the far end's
    /// answer has not come.
    pub(crate) fn tcp_timeout(&mut self, cx: &mut Context, sessions: &mut Sessions, id: TcpId, now: Instant) {
        self.pump(cx, sessions, id, Cause::Other, now);
        let Some(OpenForward { forward, .. }) = self.open.get_mut(id.0 as usize) else { return };
        let Some(until) = forward.open_by() else { return };
        if until > now {
            // The timer was set for an earlier stage, or for an earlier forward with this id.
            self.watch_opening(cx, id);
            return;
        }
        if forward.place().is_some() {
            let error = ErrorKind::TimedOut.into();
            if !self.try_next(cx, sessions, id, Some(error), now) {
                self.give_up(cx, sessions, id, now);
            }
            return;
        }
        self.give_up(cx, sessions, id, now);
    }

    /// Ends a forward that is not open in time.
    fn give_up(&mut self, cx: &mut Context, sessions: &mut Sessions, id: TcpId, now: Instant) {
        let Some(OpenForward { key, peer, forward, .. }) = self.open.get_mut(id.0 as usize) else { return };
        if let Some(quinn) = sessions.control.quinn(ConnectionHandle(key.connection)) {
            forward.give_up(quinn);
        }
        let (named, peer) = (forward.token().is_some(), *peer);
        if let Some(place) = forward.place() {
            cx.note_unreached(place, &ErrorKind::TimedOut.into(), now);
        }
        if let Some(service) = forward.service() {
            cx.report_service(peer, service, StreamAnswer::UpstreamTimeout, None, now);
        }
        cx.stats.totals.tcp.refused
            [if named { TcpRefusal::UpstreamTimeout } else { TcpRefusal::NoHeader }] += 1;
        self.remove_tcp(cx, sessions, id);
    }

    /// Resets both sides of forwards to our services for which `ends`, given the peer and the index of the service, is true.
    pub(crate) fn end_served(
        &mut self,
        cx: &mut Context,
        sessions: &mut Sessions,
        ends: impl Fn(PeerId, usize) -> bool,
    ) {
        for (_, OpenForward { key, peer, forward, sight }) in self.open.iter_mut() {
            if forward.service().is_some_and(|service| ends(*peer, service as usize))
                && let Some(quinn) = sessions.control.quinn(ConnectionHandle(key.connection))
            {
                forward.reset(quinn);
                sight.end = Some(TcpEnd::Reconfigured);
            }
        }
        self.abort_where(cx, sessions, |open| {
            open.forward.service().is_some_and(|service| ends(open.peer, service as usize))
        });
    }

    /// Resets both sides of the forwards with a peer that has used up its quota.
    pub(crate) fn end_at_quota(&mut self, cx: &mut Context, sessions: &mut Sessions, id: PeerId) {
        for (_, OpenForward { key, peer, forward, sight }) in self.open.iter_mut() {
            if *peer == id
                && let Some(quinn) = sessions.control.quinn(ConnectionHandle(key.connection))
            {
                forward.reset(quinn);
                sight.end = Some(TcpEnd::Quota);
            }
        }
        self.abort_where(cx, sessions, |open| open.peer == id);
    }

    /// Resets the TCP side of the forwards for which `ends` is true.
    fn abort_where(
        &mut self,
        cx: &mut Context,
        sessions: &mut Sessions,
        ends: impl Fn(&OpenForward) -> bool,
    ) {
        let gone = self.open.iter_mut().filter(|(_, open)| ends(open)).map(|(index, open)| {
            open.forward.abort();
            open.sight.end.get_or_insert(TcpEnd::ConnectionLost);
            TcpId(index_u32(index))
        });
        for id in gone.collect::<Vec<_>>() {
            self.remove_tcp(cx, sessions, id);
        }
    }

    fn insert_tcp(&mut self, cx: &mut Context, sessions: &mut Sessions, opened: OpenForward, now: Instant) {
        let (key, peer, held) = (opened.key, opened.peer, opened.forward.held());
        let id = TcpId(index_u32(self.open.insert(opened)));
        self.by_stream.insert(key, id);
        cx.hub.streams.enter(held);
        cx.stats.totals.tcp.opened += 1;
        if let Some(state) = cx.peers.get_mut(peer) {
            state.forwards.here += 1;
        }
        self.watch_opening(cx, id);
        self.limit_new(sessions, key, now);
        if let Some(forwards) = cx.forwards_on(peer, ConnectionHandle(key.connection)) {
            *forwards += 1;
        }
        self.pump(cx, sessions, id, Cause::Tcp, now);
    }

    pub(crate) fn remove_tcp(&mut self, cx: &mut Context, sessions: &mut Sessions, id: TcpId) {
        let Some(mut opened) = self.open.remove(id.0 as usize) else { return };
        if opened.forward.tcp().is_some_and(|tcp| tcp.is_lost()) {
            cx.note_vanished(&mut opened);
        }
        cx.forward_ended(&opened);
        let OpenForward { key, peer, forward, .. } = opened;
        self.by_stream.remove(&key);
        self.keepalives.forget(id);
        if let Some(token) = forward.token() {
            cx.sockets.factory.release(token);
        }
        cx.hub.streams.leave(forward.held());
        if forward.reader_stopped().is_some() {
            sessions.control.forward_moved(ConnectionHandle(key.connection), 0, Some(false));
        }
        if let Some(state) = cx.peers.get_mut(peer) {
            state.forwards.here = state.forwards.here.saturating_sub(1);
            state.forwards.of_all.close(cx.id.index);
        }
        if let Some(forwards) = cx.forwards_on(peer, ConnectionHandle(key.connection)) {
            *forwards = forwards.saturating_sub(1);
        }
        self.retry_listeners(cx);
    }

    /// Resets the forwards on a connection that is gone.
    pub(crate) fn abort_forwards(
        &mut self,
        cx: &mut Context,
        sessions: &mut Sessions,
        connection: ConnectionHandle,
    ) {
        self.abort_where(cx, sessions, |open| open.key.connection == connection.0);
    }
}

impl Context {
    /// What a peer knows of forwards.
    fn known_by(&self, peer: PeerId) -> Knows {
        let link = self.peers.link(peer);
        link.map_or_else(Knows::default, |link| Knows {
            aborts: link.has(Features::STREAM_ABORT),
            credit: link.has(Features::STREAM_CREDIT),
        })
    }
}
