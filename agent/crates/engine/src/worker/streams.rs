//! TCP forwards: streams and connections meet.

use std::{
    io::ErrorKind,
    sync::Arc,
    time::{Duration, Instant},
};

use dataplane::forward::tcp::{Pumped, TcpForward, TcpId, answer_for};
use quinn_proto::{ConnectionHandle, StreamId};
use wire::{
    ids::PeerId,
    messages::{StreamAnswer, StreamOpen},
};

use crate::worker::{
    Source, StreamKey, Timer, Worker, ceilings::socket_remedy, exchange::Order, orders::HURRY_LASTS,
};

/// After an error that may last, such as a full table of descriptors.
const ACCEPT_PAUSE: Duration = Duration::from_millis(100);

/// Connections taken from one listener in one turn.
const ACCEPTS_PER_TURN: usize = 16;

/// Streams of the peer taken from one connection in one turn: each may be a connection to a service, which takes 20 to 40 µs to open.
const OPENED_PER_TURN: usize = 64;
/// How long connections wait in the listen backlog while there is no room for another forward; then they are reset, so that
/// clients learn it.
const BACKLOG_PATIENCE: Duration = Duration::from_secs(5);

impl Worker {
    /// Clients connect to a local TCP port; true if more may be waiting.
    pub(super) fn accept_tcp(&mut self, place: usize, now: Instant) -> bool {
        for _ in 0..ACCEPTS_PER_TURN {
            if !self.may_accept(place) {
                return false;
            }
            if self.is_crowded(place) {
                if !self.turns_away(place, now) {
                    return false;
                }
            } else {
                self.crowds.remove(&place);
            }
            let id = self.vacant_tcp();
            let token = self.doors.token(Source::Tcp(id));
            let Some(Some((listener, _))) = self.listeners.get_mut(place) else {
                self.doors.release(token);
                return false;
            };
            match listener.accept(token) {
                Ok((mut stream, client)) => match self.open_stream(place) {
                    Ok((peer, handle, id, service)) => {
                        tracing::debug!(%client, service, "TCP forward");
                        let forward = TcpForward::opened(id, stream, token, service, now);
                        self.insert_tcp(StreamKey { connection: handle.0, stream: id }, peer, forward, now);
                        self.want_stream_connections(peer, now);
                    }
                    Err(reason) => {
                        if reason == TcpRefusal::NotConnected {
                            self.await_peer(place, now);
                        }
                        // A reset, not an orderly end: the client must not take it for an empty answer.
                        stream.abort();
                        self.doors.release(token);
                        self.totals.tcp.refuse(reason);
                        if reason == TcpRefusal::Limit
                            && let Some(peer) = self.config.tcp.get(place).map(|to| self.forward_peer(to))
                        {
                            self.tcp_ceiling_reached(peer, now);
                        }
                        tracing::debug!(%client, reason = reason.label(), "TCP forward refused");
                    }
                },
                Err(error) => {
                    self.doors.release(token);
                    if error.kind() != ErrorKind::WouldBlock {
                        self.totals.tcp.refuse(TcpRefusal::Accept);
                        if let Some(suppressed) = self.accept_log.allow(now) {
                            let remedy = socket_remedy(&error);
                            tracing::warn!(
                                %error,
                                suppressed,
                                "cannot accept a TCP connection (remedy: {remedy})"
                            );
                        }
                        // Nothing reports what still waits: the listener is asked again after a while.
                        self.timers.arm(Timer::Listener(place), now + ACCEPT_PAUSE);
                    }
                    return false;
                }
            }
        }
        true
    }

    /// Whether the next connection to this port is for this worker. All of them listen; of those that have a connection to the
    /// peer the one with the fewest forwards accepts. The owner of the session refuses what none can carry, and without a session
    /// the worker that dials the peer does.
    fn may_accept(&self, place: usize) -> bool {
        let Some(id) = self.config.tcp.get(place).map(|forward| self.forward_peer(forward)) else {
            return true;
        };
        let Some(peer) = self.peers.get(id.0 as usize) else { return true };
        let Some(link) = peer.link.as_ref() else { return self.dialler_of(id) == self.place.0 };
        let (owner, has_streams) = (link.pool.owner(), link.connections > 1);
        if self.carrier(id).is_none() {
            if owner != self.place.0 && has_streams {
                // It may have left them to this worker, which had a connection a moment ago.
                self.note_carrier(id);
                self.exchange.post(owner, Order::AcceptTcp { place });
            }
            return owner == self.place.0;
        }
        let less_busy =
            self.peers.get(id.0 as usize).and_then(|peer| peer.forwards.less_busy_than(self.place.0));
        if let Some(other) = less_busy {
            // It may have looked when it was not the one.
            self.exchange.post(other, Order::AcceptTcp { place });
        }
        less_busy.is_none()
    }

    /// Whether a connection to this port would be refused for want of room that may come: others may end, or the far end lets us
    /// open more streams.
    fn is_crowded(&mut self, place: usize) -> bool {
        let forward = self.config.tcp.get(place).map(|forward| self.forward_peer(forward));
        let Some(peer) = forward.and_then(|id| self.peers.get(id.0 as usize)) else { return false };
        let (forwards, most) = (Arc::clone(&peer.forwards), self.config.limits.tcp_streams_per_peer);
        let Some(handle) = forward.and_then(|id| self.carrier(id)) else { return false };
        self.is_full() || forwards.total() >= most || !self.control.has_stream(handle)
    }

    /// Whether all peers together may have no more forwards.
    fn is_full(&self) -> bool {
        self.exchange.streams().forwards() >= self.config.limits.tcp_streams
    }

    /// Whether connections to a crowded port have waited for long enough; if not, they go on waiting.
    fn turns_away(&mut self, place: usize, now: Instant) -> bool {
        let accept_pauses = &mut self.totals.tcp.accept_pauses;
        let since = *self.crowds.entry(place).or_insert_with(|| {
            *accept_pauses += 1;
            now
        });
        let until = since + BACKLOG_PATIENCE;
        if until > now {
            self.timers.arm(Timer::Listener(place), until);
        }
        until <= now
    }

    /// There may be room for what waits in the listen backlogs.
    pub(super) fn retry_listeners(&mut self) {
        let mut places: Vec<usize> = self.crowds.keys().copied().collect();
        places.sort_unstable();
        for place in places {
            if let Some(Some((_, token))) = self.listeners.get(place) {
                let token = *token;
                self.add_source(token);
            }
        }
    }

    /// Somebody wants the peer of a `[[tcp]]` port and could not be served: it is dialled soon.
    fn await_peer(&mut self, place: usize, now: Instant) {
        let Some(id) = self.config.tcp.get(place).map(|forward| self.forward_peer(forward)) else { return };
        if let Some(peer) = self.peers.get_mut(id.0 as usize) {
            peer.awaited_until = Some(now + HURRY_LASTS);
        }
        self.hurry(id, now);
    }

    /// A stream to the service of a `[[tcp]]` forward.
    fn open_stream(&mut self, place: usize) -> Result<(PeerId, ConnectionHandle, StreamId, u32), TcpRefusal> {
        let forward = self.config.tcp.get(place).ok_or(TcpRefusal::UnknownService)?;
        let id = self.forward_peer(forward);
        let peer = self.peers.get_mut(id.0 as usize).ok_or(TcpRefusal::NotConnected)?;
        let link = peer.link.as_ref().ok_or(TcpRefusal::NotConnected)?;
        let mut offered = link.services.iter();
        let service = offered
            .find(|service| service.tcp && *service.name == *forward.service)
            .ok_or(TcpRefusal::UnknownService)?
            .number;
        let forwards = Arc::clone(&peer.forwards);
        let handle = self.carrier(id).ok_or(TcpRefusal::NotConnected)?;
        if self.is_full() || !forwards.open(self.place.0, self.config.limits.tcp_streams_per_peer) {
            return Err(TcpRefusal::Limit);
        }
        let stream = self.control.open_stream(handle).ok_or_else(|| {
            forwards.close(self.place.0);
            TcpRefusal::Limit
        })?;
        Ok((id, handle, stream, service))
    }

    /// The peer opened streams: takes as many as a turn and its allowance give, and leaves the others where they are.
    pub(super) fn streams_opened(&mut self, handle: ConnectionHandle, now: Instant) {
        for _ in 0..OPENED_PER_TURN {
            let Some(peer) = self.control.get(handle).and_then(|connection| connection.peer) else { return };
            let Some(state) = self.peers.get_mut(peer.0 as usize) else { return };
            let next = state.allowances.streams.next(now);
            if next > now {
                self.control.accept_later(handle, next, now);
                return;
            }
            let Some(stream) = self.control.accept(handle) else { return };
            state.allowances.streams.take(1, now);
            self.stream_opened(handle, stream, now);
        }
        self.control.accept_later(handle, now, now);
    }

    /// The peer opened a stream.
    fn stream_opened(&mut self, handle: ConnectionHandle, stream: StreamId, now: Instant) {
        let Some(peer) = self.control.get(handle).and_then(|connection| connection.peer) else { return };
        let most = self.config.limits.tcp_streams_per_peer;
        let full = self.is_full()
            || !self.takes_streams(peer, handle, now)
            || self.peers.get(peer.0 as usize).is_none_or(|state| !state.forwards.open(self.place.0, most));
        let mut forward = TcpForward::accepted(stream, now);
        if full {
            self.totals.tcp.refuse(TcpRefusal::Limit);
            self.tcp_ceiling_reached(peer, now);
            if let Some(quinn) = self.control.quinn(handle) {
                forward.refuse(quinn, StreamAnswer::LimitReached);
            }
            return;
        }
        self.insert_tcp(StreamKey { connection: handle.0, stream }, peer, forward, now);
    }

    /// A stream may have something to read, or may take more. quinn-proto says so with every frame that comes: its forward is
    /// served once, after all have been heard.
    pub(super) fn stream_ready(&mut self, handle: ConnectionHandle, stream: StreamId) {
        if let Some(id) = self.tcp_by_stream.get(&StreamKey { connection: handle.0, stream }).copied()
            && let Some((_, _, forward)) = self.tcp.get_mut(id.0 as usize)
            && !std::mem::replace(&mut forward.stirred, true)
        {
            self.stirred.push(id);
        }
    }

    /// Serves the forwards whose streams had something to say, those first that were served longest ago: room in the connection
    /// that is too little for all goes to each in turn (quinn-proto reports those first that were blocked last).
    pub(super) fn pump_stirred(&mut self, now: Instant) {
        let mut stirred = std::mem::take(&mut self.stirred);
        let served = |id: &TcpId| self.tcp.get(id.0 as usize).map_or(0, |(_, _, forward)| forward.served);
        stirred.sort_by_key(served);
        for id in stirred.drain(..) {
            if let Some((_, _, forward)) = self.tcp.get_mut(id.0 as usize) {
                forward.stirred = false;
                self.pump(id, now);
            }
        }
        self.stirred = stirred;
    }

    /// Bytes that a forward has moved so far, in both directions.
    pub(super) fn tcp_bytes(&self, id: TcpId) -> usize {
        let (out, back) = self.tcp.get(id.0 as usize).map_or((0, 0), |(_, _, forward)| forward.bytes());
        usize::try_from(out + back).unwrap_or(usize::MAX)
    }

    /// Moves what a forward can move; one that could move more is given another turn after the others.
    pub(super) fn pump(&mut self, id: TcpId, now: Instant) {
        let Some((key, peer, forward)) = self.tcp.get_mut(id.0 as usize) else { return };
        let (key, peer) = (*key, *peer);
        let Some(quinn) = self.control.quinn(ConnectionHandle(key.connection)) else {
            forward.abort();
            self.remove_tcp(id);
            return;
        };
        self.passes += 1;
        forward.served = self.passes;
        let (before, held) = (forward.bytes(), forward.held());
        self.tcp_scratch.piece = self.exchange.streams().piece();
        let pumped = forward.pump(quinn, &mut self.tcp_scratch);
        let (token, after) = (forward.token(), forward.bytes());
        let delivered = after.1 - before.1;
        self.exchange.streams().hold(held, forward.held());
        self.control.forward_moved(ConnectionHandle(key.connection), delivered, forward.stall_changed());
        self.totals.tcp.bytes_outward += after.0 - before.0;
        self.totals.tcp.bytes_inward += delivered;
        match pumped {
            Pumped::Waiting => {}
            Pumped::Busy => {
                if let Some(token) = token {
                    self.ready.mark(token);
                }
            }
            Pumped::Wants(open) => self.connect_service(id, peer, &open, now),
            Pumped::Answered(StreamAnswer::Ok) => self.pump(id, now),
            Pumped::Answered(answer) => {
                self.report_service(peer, &answer, now);
                self.totals.tcp.refuse(TcpRefusal::from(answer));
                self.remove_tcp(id);
            }
            Pumped::Refused(answer) => {
                if let Some(suppressed) = self.details_log.allow(now) {
                    tracing::debug!(reason = ?answer, suppressed, "the peer refused a TCP forward");
                }
                self.totals.tcp.refuse(TcpRefusal::from(answer));
                self.remove_tcp(id);
            }
            Pumped::Done => self.remove_tcp(id),
        }
    }

    /// The peer named the service that its stream is for: connects it.
    fn connect_service(&mut self, id: TcpId, peer: PeerId, open: &StreamOpen, now: Instant) {
        let place = open.service as usize;
        let service = self.config.services.get(place).filter(|service| service.tcp);
        let allowed =
            self.peers.get(peer.0 as usize).is_some_and(|state| state.config.services.contains(&place));
        let result = match service {
            None => Err(StreamAnswer::UnknownService),
            Some(_) if !allowed => Err(StreamAnswer::NotAllowed),
            Some(service) => self.doors.tcp_connect(service.upstream, id).map_err(|error| answer_for(&error)),
        };
        let Some((key, _, forward)) = self.tcp.get_mut(id.0 as usize) else { return };
        match result {
            Ok((stream, token)) => {
                forward.connect(open.service, stream, token, now);
                self.watch_opening(id);
                self.pump(id, now);
            }
            Err(answer) => {
                if let Some(quinn) = self.control.quinn(ConnectionHandle(key.connection)) {
                    forward.refuse(quinn, answer);
                }
                self.report_service(peer, &answer, now);
                self.totals.tcp.refuse(TcpRefusal::from(answer));
                self.remove_tcp(id);
            }
        }
    }

    /// A peer's TCP forward could not be connected to its service.
    fn report_service(&mut self, peer: PeerId, answer: &StreamAnswer, now: Instant) {
        if let (Some(state), Some(suppressed)) =
            (self.peers.get(peer.0 as usize), self.service_log.allow(now))
        {
            tracing::warn!(
                peer = &*state.name,
                reason = TcpRefusal::from(*answer).label(),
                suppressed,
                "a TCP forward of the peer was refused (remedy: is the service running, and in `services` of the peer?)"
            );
        }
    }

    /// Makes sure that a forward that is never open does not stay.
    fn watch_opening(&mut self, id: TcpId) {
        if let Some(until) = self.tcp.get(id.0 as usize).and_then(|(_, _, forward)| forward.open_by()) {
            self.timers.arm(Timer::Tcp(id), until);
        }
    }

    /// A forward may not have been open in time: the header, the service or the other end's answer has not come.
    pub(super) fn tcp_timeout(&mut self, id: TcpId, now: Instant) {
        let Some((key, _, forward)) = self.tcp.get_mut(id.0 as usize) else { return };
        let Some(until) = forward.open_by() else { return };
        if until > now {
            // The timer was set for an earlier stage, or for a forward that had this place before.
            self.watch_opening(id);
            return;
        }
        if let Some(quinn) = self.control.quinn(ConnectionHandle(key.connection)) {
            forward.give_up(quinn);
        }
        let named = forward.token().is_some();
        self.totals.tcp.refuse(if named { TcpRefusal::UpstreamTimeout } else { TcpRefusal::NoHeader });
        self.remove_tcp(id);
    }

    /// The connection is gone: resets the TCP side of its forwards.
    pub(super) fn abort_streams(&mut self, handle: ConnectionHandle) {
        self.abort_forwards(|key, _, _| key.connection == handle.0);
    }

    /// Connections to these services of ours, by peer and place, are ended: both sides are reset.
    pub(super) fn end_served(&mut self, ends: impl Fn(PeerId, usize) -> bool) {
        for (_, (key, peer, forward)) in &mut self.tcp {
            if forward.service().is_some_and(|service| ends(*peer, service as usize))
                && let Some(quinn) = self.control.quinn(ConnectionHandle(key.connection))
            {
                forward.reset(quinn);
            }
        }
        self.abort_forwards(|_, peer, forward| {
            forward.service().is_some_and(|service| ends(peer, service as usize))
        });
    }

    fn abort_forwards(&mut self, ends: impl Fn(&StreamKey, PeerId, &TcpForward) -> bool) {
        let gone = self.tcp.iter().filter(|(_, (key, peer, forward))| ends(key, *peer, forward));
        let gone: Vec<usize> = gone.map(|(place, _)| place).collect();
        for place in gone {
            if let Some((_, _, forward)) = self.tcp.get_mut(place) {
                forward.abort();
            }
            self.remove_tcp(TcpId(crate::worker::number(place)));
        }
    }

    fn vacant_tcp(&mut self) -> TcpId {
        TcpId(crate::worker::number(self.tcp.vacant_key()))
    }

    fn insert_tcp(&mut self, key: StreamKey, peer: PeerId, forward: TcpForward, now: Instant) {
        let held = forward.held();
        let id = TcpId(crate::worker::number(self.tcp.insert((key, peer, forward))));
        self.tcp_by_stream.insert(key, id);
        self.exchange.streams().enter(held);
        self.totals.tcp.opened += 1;
        if let Some(state) = self.peers.get_mut(peer.0 as usize) {
            state.tcp_streams += 1;
        }
        self.watch_opening(id);
        if let Some(forwards) = self.forwards_on(peer, ConnectionHandle(key.connection)) {
            *forwards += 1;
        }
        self.pump(id, now);
    }

    fn remove_tcp(&mut self, id: TcpId) {
        let Some((key, peer, forward)) = self.tcp.try_remove(id.0 as usize) else { return };
        self.tcp_by_stream.remove(&key);
        if let Some(token) = forward.token() {
            self.doors.release(token);
        }
        self.exchange.streams().leave(forward.held());
        if forward.is_stalled() {
            self.control.forward_moved(ConnectionHandle(key.connection), 0, Some(false));
        }
        if let Some(state) = self.peers.get_mut(peer.0 as usize) {
            state.tcp_streams = state.tcp_streams.saturating_sub(1);
            state.forwards.close(self.place.0);
        }
        if let Some(forwards) = self.forwards_on(peer, ConnectionHandle(key.connection)) {
            *forwards = forwards.saturating_sub(1);
        }
        self.retry_listeners();
    }
}

/// Why a TCP forward was not opened.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(usize)]
pub enum TcpRefusal {
    /// The peer is not connected.
    NotConnected,
    /// It offers no such service.
    UnknownService,
    /// It may not be used.
    NotAllowed,
    /// Too many forwards are open.
    Limit,
    /// The service refused the connection.
    UpstreamRefused,
    /// The service did not answer.
    UpstreamTimeout,
    /// This host has no resources for another connection.
    Accept,
    /// The peer opened a stream and did not say what for.
    NoHeader,
    /// A reason that this version does not know.
    Other,
}

impl TcpRefusal {
    /// All of them, in the order of their discriminants.
    pub const ALL: [Self; 9] = [
        Self::NotConnected,
        Self::UnknownService,
        Self::NotAllowed,
        Self::Limit,
        Self::UpstreamRefused,
        Self::UpstreamTimeout,
        Self::Accept,
        Self::NoHeader,
        Self::Other,
    ];

    /// The value of the metric label `reason`.
    #[must_use]
    pub const fn label(self) -> &'static str {
        match self {
            Self::NotConnected => "not_connected",
            Self::UnknownService => "unknown_service",
            Self::NotAllowed => "not_allowed",
            Self::Limit => "limit",
            Self::UpstreamRefused => "upstream_refused",
            Self::UpstreamTimeout => "upstream_timeout",
            Self::Accept => "accept",
            Self::NoHeader => "no_header",
            Self::Other => "other",
        }
    }
}

impl From<StreamAnswer> for TcpRefusal {
    fn from(answer: StreamAnswer) -> Self {
        match answer {
            StreamAnswer::UnknownService => Self::UnknownService,
            StreamAnswer::NotAllowed => Self::NotAllowed,
            StreamAnswer::LimitReached => Self::Limit,
            StreamAnswer::UpstreamRefused => Self::UpstreamRefused,
            StreamAnswer::UpstreamTimeout => Self::UpstreamTimeout,
            StreamAnswer::Unspecified | StreamAnswer::Ok => Self::Other,
        }
    }
}
