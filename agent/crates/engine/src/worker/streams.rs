//! TCP forwards: streams and connections meet.

use std::{
    io::ErrorKind,
    sync::Arc,
    time::{Duration, Instant},
};

use dataplane::{
    forward::tcp::{Pumped, TcpForward, TcpId, answer_for},
    sockets::Source,
};
use quinn_proto::{ConnectionHandle, StreamId};
use wire::{
    ids::PeerId,
    messages::{StreamAnswer, StreamOpen},
};

use crate::{
    control::StreamKey,
    worker::{
        TcpRefusal,
        ceilings::socket_remedy,
        context::Context,
        parts::{OpenForward, Sessions, TcpForwards},
        timer::Timer,
    },
};

/// After an error that may last, such as a full table of descriptors.
const ACCEPT_PAUSE: Duration = Duration::from_millis(100);

/// Connections taken from one listener in one turn.
const ACCEPTS_PER_TURN: usize = 16;

/// Streams of the peer taken from one connection in one turn: each may be a connection to a service, which takes 20 to 40 µs to open.
const OPENED_PER_TURN: usize = 64;

impl TcpForwards {
    /// Clients connect to a local TCP port; true if more may be waiting.
    pub(super) fn accept_tcp(
        &mut self,
        cx: &mut Context,
        sessions: &mut Sessions,
        place: usize,
        now: Instant,
    ) -> bool {
        for _ in 0..ACCEPTS_PER_TURN {
            if !self.may_accept(cx, sessions, place) {
                return false;
            }
            match self.obstacle(cx, sessions, place) {
                Some(obstacle) if self.lets_wait(cx, place, obstacle, now) => return false,
                // Who has waited for long enough is refused below.
                Some(_) => {}
                None => cx.hub.crowds().end(place),
            }
            let id = self.vacant_tcp();
            let token = cx.sockets.factory.token(Source::Tcp(id));
            let Some(Some((listener, _))) = self.listeners.get_mut(place) else {
                cx.sockets.factory.release(token);
                return false;
            };
            match listener.accept(token) {
                Ok((mut stream, client)) => match self.open_stream(cx, sessions, place) {
                    Ok((peer, handle, id, service)) => {
                        tracing::debug!(%client, service, "TCP forward");
                        let forward = TcpForward::opened(id, stream, token, service, now);
                        self.insert_tcp(
                            cx,
                            sessions,
                            OpenForward {
                                key: StreamKey { connection: handle.0, stream: id },
                                peer,
                                forward,
                            },
                            now,
                        );
                        cx.want_stream_connections(peer, now);
                    }
                    Err(reason) => {
                        if reason == TcpRefusal::NotConnected {
                            self.await_peer(cx, place, now);
                        }
                        // A reset, not an orderly end: the client must not take it for an empty answer.
                        stream.abort();
                        cx.sockets.factory.release(token);
                        cx.stats.totals.tcp.refuse(reason);
                        if reason == TcpRefusal::Limit
                            && let Some(peer) = cx.config.tcp.get(place).map(|to| self.forward_peer(to))
                        {
                            cx.tcp_ceiling_reached(peer, now);
                        }
                        tracing::debug!(%client, reason = reason.label(), "TCP forward refused");
                    }
                },
                Err(error) => {
                    cx.sockets.factory.release(token);
                    if error.kind() == ErrorKind::WouldBlock {
                        // Who comes next has all of its time.
                        cx.hub.crowds().end(place);
                    } else {
                        cx.stats.totals.tcp.refuse(TcpRefusal::Accept);
                        if let Some(suppressed) = cx.logs.accept.allow(now) {
                            let remedy = socket_remedy(&error);
                            tracing::warn!(
                                %error,
                                suppressed,
                                "cannot accept a TCP connection (remedy: {remedy})"
                            );
                        }
                        // Nothing reports what still waits: the listener is asked again after a while.
                        cx.timers.arm(Timer::Listener(place), now + ACCEPT_PAUSE);
                    }
                    return false;
                }
            }
        }
        true
    }

    /// A stream to the service of a `[[tcp]]` forward.
    fn open_stream(
        &self,
        cx: &mut Context,
        sessions: &mut Sessions,
        place: usize,
    ) -> Result<(PeerId, ConnectionHandle, StreamId, u32), TcpRefusal> {
        let forward = cx.config.tcp.get(place).ok_or(TcpRefusal::UnknownService)?;
        let id = self.forward_peer(forward);
        let peer = cx.peers.get_mut(id).ok_or(TcpRefusal::NotConnected)?;
        let link = peer.data.link.as_ref().ok_or(TcpRefusal::NotConnected)?;
        let mut offered = link.services.iter();
        let service = offered
            .find(|service| service.tcp && *service.name == *forward.service)
            .ok_or(TcpRefusal::UnknownService)?
            .number;
        let forwards = Arc::clone(&peer.forwards);
        let handle = sessions.carrier(cx, id).ok_or(TcpRefusal::NotConnected)?;
        if cx.is_full() || !forwards.open(cx.id.index, cx.config.limits.tcp_streams_per_peer) {
            return Err(TcpRefusal::Limit);
        }
        let stream = sessions.control.open_stream(handle).ok_or_else(|| {
            forwards.close(cx.id.index);
            TcpRefusal::Limit
        })?;
        Ok((id, handle, stream, service))
    }

    /// The peer opened streams: takes as many as a turn and its allowance give, and leaves the others where they are.
    pub(super) fn streams_opened(
        &mut self,
        cx: &mut Context,
        sessions: &mut Sessions,
        handle: ConnectionHandle,
        now: Instant,
    ) {
        for _ in 0..OPENED_PER_TURN {
            let Some(peer) = sessions.control.get(handle).and_then(|connection| connection.peer) else {
                return;
            };
            let Some(state) = cx.peers.get_mut(peer) else { return };
            let next = state.data.allowances.streams.next(now);
            if next > now {
                sessions.control.accept_later(handle, next, now);
                return;
            }
            let Some(stream) = sessions.control.accept(handle) else { return };
            state.data.allowances.streams.take(1, now);
            self.stream_opened(cx, sessions, handle, stream, now);
        }
        sessions.control.accept_later(handle, now, now);
    }

    /// Begins a TCP forward on a stream that the peer opened, or refuses it at a ceiling.
    fn stream_opened(
        &mut self,
        cx: &mut Context,
        sessions: &mut Sessions,
        handle: ConnectionHandle,
        stream: StreamId,
        now: Instant,
    ) {
        let Some(peer) = sessions.control.get(handle).and_then(|connection| connection.peer) else {
            return;
        };
        let most = cx.config.limits.tcp_streams_per_peer;
        let full = cx.is_full()
            || !cx.takes_streams(peer, handle, now)
            || cx.peers.get(peer).is_none_or(|state| !state.forwards.open(cx.id.index, most));
        let mut forward = TcpForward::accepted(stream, now);
        if full {
            cx.stats.totals.tcp.refuse(TcpRefusal::Limit);
            cx.tcp_ceiling_reached(peer, now);
            if let Some(quinn) = sessions.control.quinn(handle) {
                forward.refuse(quinn, StreamAnswer::LimitReached);
            }
            return;
        }
        self.insert_tcp(
            cx,
            sessions,
            OpenForward { key: StreamKey { connection: handle.0, stream }, peer, forward },
            now,
        );
    }

    /// A stream may have something to read, or may take more. quinn-proto says so with every frame that comes: its forward is
    /// served once, after all have been heard.
    pub(super) fn stream_ready(&mut self, handle: ConnectionHandle, stream: StreamId) {
        if let Some(id) = self.by_stream.get(&StreamKey { connection: handle.0, stream }).copied()
            && let Some(OpenForward { forward, .. }) = self.open.get_mut(id.0 as usize)
            && !std::mem::replace(&mut forward.stirred, true)
        {
            self.stirred.push(id);
        }
    }

    /// Serves the forwards whose streams had something to say, those first that were served longest ago: room in the connection
    /// that is too little for all goes to each in turn (quinn-proto reports those first that were blocked last).
    pub(super) fn pump_stirred(&mut self, cx: &mut Context, sessions: &mut Sessions, now: Instant) {
        let mut stirred = std::mem::take(&mut self.stirred);
        let served = |id: &TcpId| self.open.get(id.0 as usize).map_or(0, |open| open.forward.served);
        stirred.sort_by_key(served);
        for id in stirred.drain(..) {
            if let Some(OpenForward { forward, .. }) = self.open.get_mut(id.0 as usize) {
                forward.stirred = false;
                self.pump(cx, sessions, id, now);
            }
        }
        self.stirred = stirred;
    }

    /// Bytes that a forward has moved so far, in both directions.
    pub(super) fn tcp_bytes(&self, id: TcpId) -> usize {
        let (out, back) = self.open.get(id.0 as usize).map_or((0, 0), |open| open.forward.bytes());
        usize::try_from(out + back).unwrap_or(usize::MAX)
    }

    /// Moves what a forward can move; one that could move more is given another turn after the others.
    pub(super) fn pump(&mut self, cx: &mut Context, sessions: &mut Sessions, id: TcpId, now: Instant) {
        let Some(OpenForward { key, peer, forward }) = self.open.get_mut(id.0 as usize) else { return };
        let (key, peer) = (*key, *peer);
        let Some(quinn) = sessions.control.quinn(ConnectionHandle(key.connection)) else {
            forward.abort();
            self.remove_tcp(cx, sessions, id);
            return;
        };
        self.passes += 1;
        forward.served = self.passes;
        let (before, held) = (forward.bytes(), forward.held());
        self.scratch.piece = cx.hub.streams().piece();
        let pumped = forward.pump(quinn, &mut self.scratch);
        let (token, after) = (forward.token(), forward.bytes());
        let delivered = after.1 - before.1;
        cx.hub.streams().hold(held, forward.held());
        sessions.control.forward_moved(ConnectionHandle(key.connection), delivered, forward.stall_changed());
        cx.stats.totals.tcp.bytes_outward += after.0 - before.0;
        cx.stats.totals.tcp.bytes_inward += delivered;
        match pumped {
            Pumped::Waiting => {}
            Pumped::Busy => {
                if let Some(token) = token {
                    cx.ready.mark(token);
                }
            }
            Pumped::Wants(open) => self.connect_service(cx, sessions, id, &open, now),
            Pumped::Answered(StreamAnswer::Ok) => self.pump(cx, sessions, id, now),
            Pumped::Answered(answer) => {
                cx.report_service(peer, &answer, now);
                cx.stats.totals.tcp.refuse(TcpRefusal::from(answer));
                self.remove_tcp(cx, sessions, id);
            }
            Pumped::Refused(answer) => {
                if let Some(suppressed) = cx.logs.details.allow(now) {
                    tracing::debug!(reason = ?answer, suppressed, "the peer refused a TCP forward");
                }
                cx.stats.totals.tcp.refuse(TcpRefusal::from(answer));
                self.remove_tcp(cx, sessions, id);
            }
            Pumped::Done => self.remove_tcp(cx, sessions, id),
        }
    }

    /// The peer named the service that its stream is for: connects it.
    fn connect_service(
        &mut self,
        cx: &mut Context,
        sessions: &mut Sessions,
        id: TcpId,
        open: &StreamOpen,
        now: Instant,
    ) {
        let Some(peer) = self.open.get(id.0 as usize).map(|opened| opened.peer) else { return };
        let place = open.service as usize;
        let service = cx.config.services.get(place).filter(|service| service.tcp);
        let allowed = cx.peers.get(peer).is_some_and(|state| state.data.config.services.contains(&place));
        let result = match service {
            None => Err(StreamAnswer::UnknownService),
            Some(_) if !allowed => Err(StreamAnswer::NotAllowed),
            Some(service) => {
                cx.sockets.factory.tcp_connect(service.upstream, id).map_err(|error| answer_for(&error))
            }
        };
        let Some(OpenForward { key, forward, .. }) = self.open.get_mut(id.0 as usize) else { return };
        match result {
            Ok((stream, token)) => {
                forward.connect(open.service, stream, token, now);
                self.watch_opening(cx, id);
                self.pump(cx, sessions, id, now);
            }
            Err(answer) => {
                if let Some(quinn) = sessions.control.quinn(ConnectionHandle(key.connection)) {
                    forward.refuse(quinn, answer);
                }
                cx.report_service(peer, &answer, now);
                cx.stats.totals.tcp.refuse(TcpRefusal::from(answer));
                self.remove_tcp(cx, sessions, id);
            }
        }
    }

    /// Makes sure that a forward that is never open does not stay.
    fn watch_opening(&self, cx: &mut Context, id: TcpId) {
        if let Some(until) = self.open.get(id.0 as usize).and_then(|open| open.forward.open_by()) {
            cx.timers.arm(Timer::Tcp(id), until);
        }
    }

    /// A forward may not have been open in time: the header, the service or the other end's answer has not come.
    pub(super) fn tcp_timeout(&mut self, cx: &mut Context, sessions: &mut Sessions, id: TcpId, now: Instant) {
        let Some(OpenForward { key, forward, .. }) = self.open.get_mut(id.0 as usize) else { return };
        let Some(until) = forward.open_by() else { return };
        if until > now {
            // The timer was set for an earlier stage, or for a forward that had this place before.
            self.watch_opening(cx, id);
            return;
        }
        if let Some(quinn) = sessions.control.quinn(ConnectionHandle(key.connection)) {
            forward.give_up(quinn);
        }
        let named = forward.token().is_some();
        cx.stats.totals.tcp.refuse(if named { TcpRefusal::UpstreamTimeout } else { TcpRefusal::NoHeader });
        self.remove_tcp(cx, sessions, id);
    }

    /// The connection is gone: resets the TCP side of its forwards.
    pub(super) fn abort_streams(
        &mut self,
        cx: &mut Context,
        sessions: &mut Sessions,
        handle: ConnectionHandle,
    ) {
        self.abort_forwards(cx, sessions, |open| open.key.connection == handle.0);
    }

    /// Connections to these services of ours, by peer and place, are ended: both sides are reset.
    pub(super) fn end_served(
        &mut self,
        cx: &mut Context,
        sessions: &mut Sessions,
        ends: impl Fn(PeerId, usize) -> bool,
    ) {
        for (_, OpenForward { key, peer, forward }) in &mut self.open {
            if forward.service().is_some_and(|service| ends(*peer, service as usize))
                && let Some(quinn) = sessions.control.quinn(ConnectionHandle(key.connection))
            {
                forward.reset(quinn);
            }
        }
        self.abort_forwards(cx, sessions, |open| {
            open.forward.service().is_some_and(|service| ends(open.peer, service as usize))
        });
    }

    fn abort_forwards(
        &mut self,
        cx: &mut Context,
        sessions: &mut Sessions,
        ends: impl Fn(&OpenForward) -> bool,
    ) {
        let gone = self.open.iter().filter(|(_, open)| ends(open));
        let gone: Vec<usize> = gone.map(|(place, _)| place).collect();
        for place in gone {
            if let Some(OpenForward { forward, .. }) = self.open.get_mut(place) {
                forward.abort();
            }
            self.remove_tcp(cx, sessions, TcpId(crate::worker::number(place)));
        }
    }

    fn vacant_tcp(&self) -> TcpId {
        TcpId(crate::worker::number(self.open.vacant_key()))
    }

    fn insert_tcp(&mut self, cx: &mut Context, sessions: &mut Sessions, opened: OpenForward, now: Instant) {
        let (key, peer, held) = (opened.key, opened.peer, opened.forward.held());
        let id = TcpId(crate::worker::number(self.open.insert(opened)));
        self.by_stream.insert(key, id);
        cx.hub.streams().enter(held);
        cx.stats.totals.tcp.opened += 1;
        if let Some(state) = cx.peers.get_mut(peer) {
            state.tcp_streams += 1;
        }
        self.watch_opening(cx, id);
        if let Some(forwards) = cx.forwards_on(peer, ConnectionHandle(key.connection)) {
            *forwards += 1;
        }
        self.pump(cx, sessions, id, now);
    }

    fn remove_tcp(&mut self, cx: &mut Context, sessions: &mut Sessions, id: TcpId) {
        let Some(OpenForward { key, peer, forward }) = self.open.try_remove(id.0 as usize) else { return };
        self.by_stream.remove(&key);
        if let Some(token) = forward.token() {
            cx.sockets.factory.release(token);
        }
        cx.hub.streams().leave(forward.held());
        if forward.is_stalled() {
            sessions.control.forward_moved(ConnectionHandle(key.connection), 0, Some(false));
        }
        if let Some(state) = cx.peers.get_mut(peer) {
            state.tcp_streams = state.tcp_streams.saturating_sub(1);
            state.forwards.close(cx.id.index);
        }
        if let Some(forwards) = cx.forwards_on(peer, ConnectionHandle(key.connection)) {
            *forwards = forwards.saturating_sub(1);
        }
        self.retry_listeners(cx);
    }
}

impl Context {
    /// A peer's TCP forward could not be connected to its service.
    fn report_service(&mut self, peer: PeerId, answer: &StreamAnswer, now: Instant) {
        if let (Some(state), Some(suppressed)) = (self.peers.get(peer), self.logs.service.allow(now)) {
            tracing::warn!(
                peer = &*state.name,
                reason = TcpRefusal::from(*answer).label(),
                suppressed,
                "a TCP forward of the peer was refused (remedy: is the service running, and in `services` of the peer?)"
            );
        }
    }
}
