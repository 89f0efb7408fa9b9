//! Stream connections, which carry a peer's TCP forwards beside its control connection: one for each worker of the end with more
//! workers, of which the control connection is the first.
//!
//! ```text
//!   dialler: owner                    dialler: worker (c + i) mod W            listener: worker (c + i) mod W
//!   a forward is wanted
//!   DialStream i ───────────────────► handshake ─────────────────────────────► connection
//!                                     Join { session, i } ───────────────────► up
//!   StreamEnded { Up } ◄───────────── up ◄──────────────────────────── Joined
//! ```
//!
//! They belong to the peer's process: they stay when another control connection of the same process replaces the session.

use std::{
    sync::Arc,
    time::{Duration, Instant},
};

use base::ids::{PeerId, SessionRef};
use dataplane::lanes::pool;
use quinn_proto::{ConnectionError, ConnectionHandle};
use rand::RngExt;
use wire::{
    join::{self, MAX_STREAM_CONNECTIONS},
    messages::{self, CloseReason, Join, Message},
};

use crate::{
    control::{
        connections::{EarlyJoin, Outcome, Stage, StreamConnection},
        liveness::{Finding, FrameCounts, Liveness, Look},
    },
    hub::{StreamRequest, ToOwner, WorkerMessage},
    peer::Peer,
    worker::{
        context::{Context, Effect},
        lanes::host::TELL_INTERVAL,
        report::stats::StreamFailure,
        session::{
            Conn, Sessions,
            liveness::{LEAST_CONTROL_SILENCE, counts},
        },
    },
};

/// How long a stream connection without forwards stays open.
const IDLE: Duration = Duration::from_secs(60);

/// How long the far end may take to close a stream connection after it was asked to.
const RELEASE_TIMEOUT: Duration = Duration::from_secs(5);

/// Limit on the time of handshake and join together, with losses.
const JOIN_TIMEOUT: Duration = Duration::from_secs(10);

/// How long a join waits for its session to become known.
pub(crate) const EARLY_JOIN_TIMEOUT: Duration = Duration::from_secs(2);

/// Limit on joins of one peer that wait at a worker.
pub(crate) const MOST_EARLY: usize = 8;

/// Limit on stream connections of one peer at all workers: two sets, because those of the previous session may still be in use.
const MOST_CONNECTIONS: u32 = 2 * (MAX_STREAM_CONNECTIONS as u32 - 1);

/// The minimum interval between a worker's requests for stream connections of a peer.
const ASK_INTERVAL: Duration = Duration::from_secs(1);

/// A stream connection that was up for less than this is dialled again only after a pause.
const LEAST_LIFE: Duration = Duration::from_secs(1);

/// The result of the check of a stream connection, once a second.
enum Action {
    /// Close it: it did not get up in time, or was not closed in time.
    GiveUp,
    /// Ask the far end to close it, because it is idle.
    Release,
    /// Send a message that shows our address.
    SendHere,
    Ping,
    /// Close it: it does not answer.
    Dead,
}

impl Sessions {
    /// The connection at this worker for the next TCP forward of a peer: the one with the fewest forwards.
    pub(crate) fn carrier(&self, cx: &Context, id: PeerId) -> Option<ConnectionHandle> {
        let peer = cx.peers.get(id)?;
        let link = peer.data.link.as_ref().filter(|link| !link.suspicions.unresponsive)?;
        let session = peer.session.as_ref().filter(|_| !link.suspicions.any());
        let control = session.map(|session| (session.handle, session.forwards));
        let streams = peer.streams.carriers().filter(|stream| self.outlived(stream));
        let carriers = control.into_iter().chain(streams.map(|stream| (stream.handle, stream.forwards)));
        carriers.min_by_key(|(_, forwards)| *forwards).map(|(handle, _)| handle)
    }

    /// Whether a stream connection has answered since the session was replaced.
    fn outlived(&self, stream: &StreamConnection) -> bool {
        let acks = self.control.get(stream.handle).map(|connection| counts(&connection.quinn().stats()).acks);
        stream.asked.is_none_or(|asked| acks.is_some_and(|acks| acks > asked))
    }

    /// Pings on each stream connection after the session was replaced, perhaps because the far end's address has changed. A stream
    /// connection takes new forwards once it has answered.
    pub(crate) fn ping_stream_connections(&mut self, cx: &mut Context, id: PeerId) {
        let Some(peer) = cx.peers.get_mut(id) else { return };
        for stream in &mut peer.streams.all {
            if let Some(quinn) = self.control.quinn(stream.handle) {
                stream.asked = Some(counts(&quinn.stats()).acks);
                quinn.ping();
            }
        }
    }

    /// Shares with the other workers whether this one takes TCP forwards of a peer.
    pub(crate) fn note_carrier(&self, cx: &Context, id: PeerId) {
        let takes = !cx.stopping && self.carrier(cx, id).is_some();
        if let Some(peer) = cx.peers.get(id) {
            peer.forwards.of_all.set_takes(cx.id.index, takes);
        }
    }

    /// Handles a request for stream connections of a dialled session, by the peer or by a worker.
    pub(super) fn peer_wants_streams(&mut self, cx: &mut Context, id: PeerId, now: Instant) {
        if let Some(peer) = cx.peers.get_mut(id) {
            peer.streams.plan.wish(now);
        }
        self.open_stream_connections(cx, id, now);
        self.note_carrier(cx, id);
    }

    /// The line of this host that a session's control connection is on, if the host has several.
    fn line_of_session(&self, cx: &Context, id: PeerId) -> Option<u8> {
        let connection = self.control.get(cx.peers.session(id)?.handle)?;
        cx.sockets.underlays.get(connection.underlay)?.line
    }

    /// Has missing stream connections dialled if they are wanted, as many at a time as a listener accepts.
    pub(crate) fn open_stream_connections(&mut self, cx: &mut Context, id: PeerId, now: Instant) {
        let (stopping, line) = (cx.stopping, self.line_of_session(cx, id));
        let Some(conn) = self.conn(cx, id).filter(|conn| conn.session.agreed.dialled && !stopping) else {
            return;
        };
        let Conn { data, session, control, dialler, streams, ids, mut cx, .. } = conn;
        if !data.is_live() || !data.is_well() || !streams.plan.is_wished(now) {
            return;
        }
        let (Some(link), Some(key)) = (&data.link, control.identity.key()) else { return };
        let Some(number) = streams.plan.next(link.connections, now) else { return };
        let (choice, workers) = (cx.rng.random(), session.agreed.hello.workers);
        let request = StreamRequest {
            of: SessionRef { peer: id, session: session.id },
            number,
            remote: control.path().destination,
            line,
            key,
            own: control.identity.own(),
            first: join::first_byte(ids.first_byte(id), number, workers, choice),
            fallback: dialler.fell_back(),
            server: session.server,
        };
        let worker = pool::lane_host(cx.id.index, number, cx.id.count);
        cx.send(worker, WorkerMessage::DialStream(Box::new(request)));
        // The next one follows when this one has been dialled.
        cx.effects.push_back(Effect::OpenStreams(id));
    }

    /// Dials a stream connection for the owner of its session.
    pub(crate) fn dial_stream(&mut self, cx: &mut Context, request: &StreamRequest, now: Instant) {
        let (id, number) = (request.of.peer, request.number);
        if cx.stopping || cx.peers.link_named(request.of).is_none() {
            return cx.report_stream(id, number, Outcome::Ended);
        }
        if self.start_stream(cx, request, now).is_none() {
            cx.stats.totals.streams.failed[StreamFailure::Local] += 1;
            cx.report_stream(id, number, Outcome::Failed);
        }
    }

    /// Dials a stream connection, from a socket of its own.
    fn start_stream(&mut self, cx: &mut Context, request: &StreamRequest, now: Instant) -> Option<()> {
        let (id, number) = (request.of.peer, request.number);
        let client = self.client_config(cx, id, request.remote, Some(request), request.fallback, now)?;
        let underlay = match cx.sockets.factory.dial(&mut cx.sockets.underlays, request.remote, request.line)
        {
            Ok(underlay) => underlay,
            Err(error) => {
                throttled!(
                    warn, cx.logs.lane_socket.allow(now), { peer = cx.peers.name(id), number, %error },
                    "cannot open a socket for a stream connection (remedy: a higher limit on open files)"
                );
                return None;
            }
        };
        let Some(handle) = self.control.dial(id, request.remote, underlay, client, now) else {
            cx.sockets.factory.close_underlay(&mut cx.sockets.underlays, underlay);
            return None;
        };
        if let Some(connection) = self.control.get_mut(handle) {
            connection.identity.join(number);
        }
        let peer = cx.peers.get_mut(id)?;
        self.control.set_congestion(handle, &peer.data.config, cx.hub.rate(id), now);
        peer.streams.all.push(stream_connection(number, handle, true, now));
        tracing::debug!(peer = &**peer.name(), number, remote = %request.remote, "dialling a stream connection");
        Some(())
    }

    /// Handles the outcome of a stream connection, at the worker that dials the peer.
    pub(crate) fn stream_ended(
        &mut self,
        cx: &mut Context,
        id: PeerId,
        number: u8,
        outcome: Outcome,
        now: Instant,
    ) {
        if let Some(peer) = cx.peers.get_mut(id) {
            peer.streams.plan.ended(number, outcome, now);
        }
        self.open_stream_connections(cx, id, now);
    }

    /// Joins the session after the handshake of a dialled stream connection; returns false if the connection is not one.
    pub(crate) fn stream_connected(
        &mut self,
        cx: &mut Context,
        handle: ConnectionHandle,
        id: PeerId,
        key: &[u8; 32],
        now: Instant,
    ) -> bool {
        let Some(connection) = self.control.get_mut(handle) else { return false };
        let Some(number) = connection.identity.stream_number() else { return false };
        connection.identity.prove(id, *key);
        let own = cx.identity.of(connection.identity.own());
        let exported = connection.exported();
        let possession = exported.and_then(|exported| own.sign(&messages::possession(&exported)));
        let instance = self.instance;
        let Some(peer) = cx.peers.get_mut(id) else { return true };
        let session = peer.data.link.as_ref().map(|link| link.name);
        let (Some(stream), Some(session)) = (peer.streams.find_mut(handle), session) else {
            // The session has ended meanwhile; the next one will have it dialled again.
            self.end_stream_connection(cx, id, handle, CloseReason::Replaced, now);
            return true;
        };
        stream.enter(Stage::Joining, now);
        self.control.send(handle, &Message::Join(Join { instance, session, number, possession }));
        true
    }

    /// Completes joins that have waited for the current session.
    pub(crate) fn take_early_joins(&mut self, cx: &mut Context, id: PeerId, now: Instant) {
        let Some(peer) = cx.peers.get_mut(id) else { return };
        let Some(link) = peer.data.link.as_ref() else { return };
        let (name, instance) = (link.name, peer.data.instance);
        let is_known =
            |early: &mut EarlyJoin| early.join.session == name && Some(early.join.instance) == instance;
        let known: Vec<EarlyJoin> = peer.streams.early.extract_if(.., is_known).collect();
        for early in known {
            self.complete_join(cx, id, &early, now);
        }
    }

    /// Makes a connection a stream connection of a peer's session, or closes it.
    fn complete_join(&mut self, cx: &mut Context, id: PeerId, early: &EarlyJoin, now: Instant) {
        let &EarlyJoin { handle, join: Join { number, .. } } = early;
        let Some(peer) = cx.peers.get_mut(id) else { return };
        let link = peer.data.link.as_ref();
        // Stream connections are dialled only by the end that dialled the session.
        if link.is_none_or(|link| link.connections <= 1 || link.dialled) || cx.stopping {
            return self.close_connection(cx, handle, CloseReason::NoSession, now);
        }
        let is_same = |other: &&StreamConnection| other.number == number && !other.dialled;
        let replaced: Vec<_> = peer.streams.all.iter().filter(is_same).map(|other| other.handle).collect();
        let forwards = Arc::clone(&peer.forwards.of_all);
        for old in replaced {
            self.end_stream_connection(cx, id, old, CloseReason::Replaced, now);
        }
        if !forwards.connection_up(MOST_CONNECTIONS) {
            return self.close_connection(cx, handle, CloseReason::LimitReached, now);
        }
        self.control.established(handle, now);
        if let Some(connection) = self.control.get_mut(handle) {
            connection.identity.join(number);
        }
        if let Some(peer) = cx.peers.get_mut(id) {
            peer.streams.all.push(stream_connection(number, handle, false, now));
        }
        self.control.send(handle, &Message::Joined);
        self.stream_is_up(cx, id, number);
    }

    /// Closes a connection whose join has waited too long for its session.
    pub(crate) fn early_join_timeout(&mut self, cx: &mut Context, handle: ConnectionHandle, now: Instant) {
        let peer = self.peer_of(handle).and_then(|id| cx.peers.get(id));
        if peer.is_some_and(|peer| waits(peer, handle)) {
            cx.stats.totals.streams.failed[StreamFailure::Refused] += 1;
            self.close_connection(cx, handle, CloseReason::NoSession, now);
        }
    }

    fn stream_is_up(&self, cx: &mut Context, id: PeerId, number: u8) {
        cx.stats.totals.streams.opened += 1;
        tracing::debug!(peer = cx.peers.name(id), number, "stream connection up");
        self.note_carrier(cx, id);
        cx.effects.push_back(Effect::WakeListeners(id));
        cx.stats.unpublished = true;
    }

    /// Handles a control message on a stream connection.
    pub(crate) fn stream_message(
        &mut self,
        cx: &mut Context,
        handle: ConnectionHandle,
        id: PeerId,
        message: &Message,
        now: Instant,
    ) {
        let Some(peer) = cx.peers.get_mut(id) else { return };
        let forwards = Arc::clone(&peer.forwards.of_all);
        let Some(stream) = peer.streams.find_mut(handle) else { return };
        let (number, stage, dialled) = (stream.number, stream.stage, stream.dialled);
        match message {
            Message::Joined if stage == Stage::Joining => {
                if !forwards.connection_up(MOST_CONNECTIONS) {
                    return self.close_connection(cx, handle, CloseReason::LimitReached, now);
                }
                stream.enter(Stage::Up, now);
                self.control.established(handle, now);
                cx.report_stream(id, number, Outcome::Up);
                self.stream_is_up(cx, id, number);
                if let Some(of) = cx.peers.linked(id) {
                    self.follow_lines(cx, of, now);
                }
            }
            Message::Release if !dialled => {
                if stream.forwards == 0 {
                    self.end_stream_connection(cx, id, handle, CloseReason::Idle, now);
                }
            }
            // quinn-proto has noted the source address.
            Message::Here => {}
            Message::Hello(_)
            | Message::LaneOpen(_)
            | Message::LaneAccept(_)
            | Message::LaneRefuse(_)
            | Message::LaneClose(_)
            | Message::ServicesChanged(_)
            | Message::Join(_)
            | Message::Joined
            | Message::StreamsWanted
            | Message::Release
            | Message::StreamAbort(_)
            | Message::StreamCredit { .. }
            | Message::Leave
            | Message::ReceiveRate { .. }
            | Message::ReportsWanted { .. }
            | Message::PacketRepair(_)
            | Message::LineState(_)
            | Message::PresharedKeys(_) => self.out_of_order(cx, handle, now),
        }
    }

    /// Handles a stream connection that is gone, for `reason` unless this end closed it. Its forwards end with it. Returns false if the
    /// connection was no stream connection.
    pub(crate) fn stream_connection_lost(
        &self,
        cx: &mut Context,
        id: PeerId,
        handle: ConnectionHandle,
        reason: Option<&ConnectionError>,
        now: Instant,
    ) -> bool {
        let number = self.control.get(handle).and_then(|connection| connection.identity.stream_number());
        let Some(peer) = cx.peers.get_mut(id) else { return number.is_some() };
        peer.streams.early.retain(|early| early.handle != handle);
        if number.is_none() {
            return false;
        }
        cx.effects.push_back(Effect::AbortForwards(handle));
        let Some(stream) = self.forget_stream(cx, id, handle) else { return true };
        let failure = match stream.stage {
            Stage::Handshake => Some(StreamFailure::Handshake),
            Stage::Joining => Some(StreamFailure::Refused),
            Stage::Up | Stage::Releasing => {
                reason.filter(|reason| !is_orderly(reason)).map(|_| StreamFailure::Lost)
            }
        };
        if let Some(failure) = failure {
            cx.stats.totals.streams.failed[failure] += 1;
        }
        let peer = cx.peers.name(id);
        let why = failure.map_or("ended", StreamFailure::label);
        tracing::debug!(peer, number, ?reason, why, "stream connection gone");
        if stream.dialled {
            let lived = now.saturating_duration_since(stream.since);
            let well = matches!(stream.stage, Stage::Up | Stage::Releasing) && lived >= LEAST_LIFE;
            let outcome = if well { Outcome::Ended } else { Outcome::Failed };
            cx.report_stream(id, stream.number, outcome);
        }
        true
    }

    /// Removes a stream connection from the list of its peer.
    fn forget_stream(
        &self,
        cx: &mut Context,
        id: PeerId,
        handle: ConnectionHandle,
    ) -> Option<StreamConnection> {
        let peer = cx.peers.get_mut(id)?;
        let stream = peer.streams.take(handle)?;
        match stream.stage {
            Stage::Handshake | Stage::Joining => {}
            Stage::Up | Stage::Releasing => peer.forwards.of_all.connection_down(),
        }
        self.note_carrier(cx, id);
        cx.stats.unpublished = true;
        Some(stream)
    }

    /// Closes a stream connection and ends the forwards on it.
    pub(crate) fn end_stream_connection(
        &mut self,
        cx: &mut Context,
        id: PeerId,
        handle: ConnectionHandle,
        reason: CloseReason,
        now: Instant,
    ) {
        cx.effects.push_back(Effect::AbortForwards(handle));
        self.control.close(handle, reason, now);
        if let Some(stream) = self.forget_stream(cx, id, handle).filter(|stream| stream.dialled) {
            cx.report_stream(id, stream.number, Outcome::Ended);
        }
    }

    /// Closes all stream connections of a peer at this worker.
    pub(crate) fn end_stream_connections(
        &mut self,
        cx: &mut Context,
        id: PeerId,
        reason: CloseReason,
        now: Instant,
    ) {
        for handle in handles(cx, id) {
            self.end_stream_connection(cx, id, handle, reason, now);
        }
    }

    /// Once a second: closes stream connections that are idle or do not answer, and has missing ones dialled.
    pub(crate) fn check_stream_connections(&mut self, cx: &mut Context, id: PeerId, now: Instant) {
        for handle in handles(cx, id) {
            match self.check_stream_connection(cx, id, handle, now) {
                Some(Action::GiveUp) => self.close_connection(cx, handle, CloseReason::Idle, now),
                Some(Action::Dead) => {
                    cx.stats.totals.streams.failed[StreamFailure::Lost] += 1;
                    self.close_connection(cx, handle, CloseReason::Idle, now);
                }
                Some(Action::Release) => self.control.send(handle, &Message::Release),
                Some(Action::SendHere) => {
                    self.control.send(handle, &Message::Here);
                    cx.ping_lanes(id);
                }
                Some(Action::Ping) => {
                    if let Some(quinn) = self.control.quinn(handle) {
                        quinn.ping();
                    }
                    cx.ping_lanes(id);
                }
                None => {}
            }
        }
        self.open_stream_connections(cx, id, now);
    }

    /// Checks one stream connection. Only its dialler acts, because it is the end that can dial another one.
    fn check_stream_connection(
        &self,
        cx: &mut Context,
        id: PeerId,
        handle: ConnectionHandle,
        now: Instant,
    ) -> Option<Action> {
        let connection = self.control.get(handle)?;
        let (stats, rtt) = (connection.quinn().stats(), connection.quinn().rtt());
        // On its line, if there are several: that another one is alive does not say that a connection on a dead one, which leaves it, is.
        let lanes = match cx.sockets.underlays.get(connection.underlay).and_then(|underlay| underlay.line) {
            Some(line) => cx.hub.line_silence(id, line, now),
            None => cx.hub.silence(id, now),
        };
        let seen = Look { frames: counts(&stats), lanes, rtt };
        let stream = cx.peers.get_mut(id)?.streams.find_mut(handle)?;
        if !stream.dialled {
            return None;
        }
        let age = now.saturating_duration_since(stream.since);
        match stream.stage {
            Stage::Handshake | Stage::Joining => return (age >= JOIN_TIMEOUT).then_some(Action::GiveUp),
            Stage::Releasing => return (age >= RELEASE_TIMEOUT).then_some(Action::GiveUp),
            Stage::Up => {}
        }
        if stream.forwards > 0 {
            stream.idle_since = None;
        } else {
            let since = *stream.idle_since.get_or_insert(now);
            if now.saturating_duration_since(since) >= IDLE {
                stream.enter(Stage::Releasing, now);
                stream.idle_since = None;
                self.note_carrier(cx, id);
                return Some(Action::Release);
            }
        }
        let waited = stream.liveness.waits;
        match stream.liveness.look(seen, LEAST_CONTROL_SILENCE.max(rtt * 6), now) {
            Finding::Answers => None,
            // If a NAT gave us another address, the far end cannot answer packets as short as pings.
            Finding::Waits if !waited => Some(Action::SendHere),
            Finding::Waits => Some(Action::Ping),
            Finding::ControlDead => Some(Action::Dead),
        }
    }

    /// Shows the far end our address on each stream connection that we dialled.
    pub(crate) fn send_here_on_streams(&mut self, cx: &mut Context, id: PeerId, now: Instant) {
        let Some(peer) = cx.peers.get_mut(id) else { return };
        for stream in &mut peer.streams.all {
            let recently = stream.told.is_some_and(|at| now.saturating_duration_since(at) < TELL_INTERVAL);
            if stream.dialled && stream.stage == Stage::Up && !recently {
                stream.told = Some(now);
                self.control.send(stream.handle, &Message::Here);
            }
        }
    }
}

impl Context {
    /// The count of forwards on a connection of a peer, if it is one that carries them.
    pub(crate) fn forwards_on(&mut self, id: PeerId, handle: ConnectionHandle) -> Option<&mut u32> {
        let peer = self.peers.get_mut(id)?;
        match peer.session.as_mut().filter(|session| session.handle == handle) {
            Some(session) => Some(&mut session.forwards),
            None => peer.streams.find_mut(handle).map(|connection| &mut connection.forwards),
        }
    }

    /// Whether a connection on which the far end opened a stream carries forwards, or will in a moment.
    pub(crate) fn takes_streams(&mut self, id: PeerId, handle: ConnectionHandle, now: Instant) -> bool {
        if self.peers.session(id).is_some_and(|session| session.handle == handle) {
            return true;
        }
        let Some(peer) = self.peers.get_mut(id) else { return false };
        let Some(connection) = peer.streams.find_mut(handle) else { return false };
        match connection.stage {
            Stage::Handshake => false,
            Stage::Joining | Stage::Up => true,
            // The stream was opened before the request to close the connection arrived, so the connection stays.
            Stage::Releasing => {
                connection.enter(Stage::Up, now);
                true
            }
        }
    }

    /// Requests stream connections, after this worker has accepted a TCP connection for a peer.
    pub(crate) fn want_stream_connections(&mut self, id: PeerId, now: Instant) {
        let Some(peer) = self.peers.get_mut(id) else { return };
        let Some(link) = peer.data.link.as_ref() else { return };
        if peer.forwards.of_all.connections() + 1 >= u32::from(link.connections)
            || peer.streams.asked.is_some_and(|at| now.saturating_duration_since(at) < ASK_INTERVAL)
        {
            return;
        }
        peer.streams.asked = Some(now);
        let of = SessionRef { peer: id, session: link.session };
        self.tell_owner(of, ToOwner::StreamsWanted);
    }

    /// Tells the worker that dials a peer the outcome of a stream connection.
    fn report_stream(&mut self, id: PeerId, number: u8, outcome: Outcome) {
        self.send(self.dialler_of(id), WorkerMessage::StreamEnded { peer: id, number, outcome });
    }

    /// Pings the peer on all lanes: a stream connection that does not answer while lanes do is dead.
    pub(crate) fn ping_lanes(&mut self, id: PeerId) {
        if let Some(link) = self.peers.link(id).filter(|link| !link.suspicions.unresponsive) {
            let of = SessionRef { peer: id, session: link.session };
            self.broadcast(|| WorkerMessage::AskForLife { of });
        }
    }
}

/// Whether a connection waits to join a session of `peer`.
pub(crate) fn waits(peer: &Peer, handle: ConnectionHandle) -> bool {
    peer.streams.early.iter().any(|early| early.handle == handle)
}

/// The stream connections of a peer at this worker.
pub(super) fn handles(cx: &Context, id: PeerId) -> Vec<ConnectionHandle> {
    cx.peers.get(id).into_iter().flat_map(|peer| &peer.streams.all).map(|stream| stream.handle).collect()
}

/// Makes the entry of a stream connection that begins to be dialled, or that the peer has dialled and joined.
fn stream_connection(number: u8, handle: ConnectionHandle, dialled: bool, now: Instant) -> StreamConnection {
    StreamConnection {
        number,
        handle,
        dialled,
        stage: if dialled { Stage::Handshake } else { Stage::Up },
        since: now,
        forwards: 0,
        idle_since: None,
        liveness: Liveness::new(FrameCounts::default(), now),
        told: None,
        asked: None,
    }
}

/// Whether the far end closed a connection because it was no longer needed.
fn is_orderly(error: &ConnectionError) -> bool {
    CloseReason::of(error).is_some_and(|reason| {
        reason.is_planned() || [CloseReason::Idle, CloseReason::KeyRemoved].contains(&reason)
    })
}
