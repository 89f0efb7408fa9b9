//! The end of connections and sessions.

use std::{
    sync::Arc,
    time::{Duration, Instant},
};

use base::ids::{PeerId, SessionRef};
use dataplane::{
    peer::PeerStanding,
    relay::{DropReason, FlowEnd},
};
use gate::identity::PublicKey;
use quinn_proto::ConnectionHandle;
use wire::messages::CloseReason;

use crate::{
    hub::WorkerMessage,
    origin::PeerOrigin,
    worker::{
        context::{Context, Effect, timer::Timer},
        lanes::LaneHost,
        report::stats::{Ceiling, Drained},
        session::Sessions,
    },
};

/// How long the connection of a session stays that was left on request, because its listener still has payloads for us: shorter
/// than the time for which its lanes open packets.
pub(crate) const LINGER: Duration = Duration::from_secs(2);

impl Sessions {
    /// Closes the sessions that peers have dialled and not left in time.
    pub(crate) fn close_remaining(&mut self, cx: &mut Context, now: Instant) {
        if cx.stopping {
            return;
        }
        for id in cx.peers.ids() {
            let dialled = cx.peers.link(id).is_some_and(|link| link.dialled);
            if dialled {
                continue;
            }
            if cx.peers.session(id).is_some_and(|session| !session.agreed.dialled) {
                cx.stats.totals.drain_closed += 1;
                self.end_session(cx, id, Some(CloseReason::Shutdown), now);
            }
            self.end_stream_connections(cx, id, CloseReason::Shutdown, now);
        }
    }

    /// How far this worker has come with draining; nothing if it does not.
    pub(crate) fn drained(&self, cx: &Context) -> Drained {
        if !self.drains() {
            return Drained::default();
        }
        let inbound = |id: &PeerId| cx.peers.session(*id).is_some_and(|session| !session.agreed.dialled);
        let waiting = cx.peers.ids().filter(inbound).count() as u64;
        Drained { waiting, closed: cx.stats.totals.drain_closed }
    }
}

impl Sessions {
    /// Handles a connection that is gone, because the far end planned it if `planned`. If it carried a session, the session ends
    /// and the peer is dialled again.
    pub(crate) fn lose(
        &mut self,
        cx: &mut Context,
        handle: ConnectionHandle,
        words: &str,
        planned: bool,
        now: Instant,
    ) {
        cx.effects.push_back(Effect::AbortForwards(handle));
        let Some(id) = self.peer_of(handle) else { return };
        if self.stream_connection_lost(cx, id, handle, None, now) {
            return;
        }
        if let Some(peer) = cx.peers.get_mut(id) {
            peer.dialler.ended(handle);
        }
        if !cx.peers.is_session(id, handle) {
            return;
        }
        self.end_session(cx, id, None, now);
        let Some(peer) = cx.peers.get_mut(id) else { return };
        peer.reach.fail(words, &[], now);
        if let Some(suppressed) = peer.throttles.connections.allow(now) {
            if planned {
                tracing::info!(
                    peer = &**peer.name(),
                    reason = words,
                    suppressed = base::throttle::counted(suppressed),
                    "connection ended"
                );
            } else {
                tracing::warn!(
                    peer = &**peer.name(),
                    reason = words,
                    suppressed = base::throttle::counted(suppressed),
                    "connection lost (remedy: none if it comes back; culvert status names the likely causes)"
                );
            }
        }
    }

    /// Ends a peer's session at its owner: its lanes drain and its TCP forwards are reset; its UDP flows stay.
    pub(crate) fn end_session(
        &mut self,
        cx: &mut Context,
        id: PeerId,
        close: Option<CloseReason>,
        now: Instant,
    ) {
        let Some(session) = cx.peers.get_mut(id).and_then(|peer| peer.session.take()) else { return };
        cx.effects.push_back(Effect::AbortForwards(session.handle));
        let of = SessionRef { peer: id, session: session.id };
        cx.hub.end(of, cx.id.index);
        cx.effects.push_back(Effect::Message(WorkerMessage::Disconnected { of }));
        match close {
            Some(CloseReason::Replaced) if session.leaving => {
                self.left.push(session.handle);
                cx.timers.arm(Timer::Left(session.handle), now + LINGER);
            }
            Some(reason) => self.control.close(session.handle, reason, now),
            None => {}
        }
    }

    /// Closes the connection to a peer that asked to be left, and was.
    pub(crate) fn close_left(&mut self, cx: &mut Context, handle: ConnectionHandle, now: Instant) {
        if self.has_left(handle) {
            self.close_connection(cx, handle, CloseReason::Replaced, now);
        }
    }

    /// Whether the session of a connection was left.
    pub(crate) fn is_left(&self, handle: ConnectionHandle) -> bool {
        self.left.contains(&handle)
    }

    /// Forgets that a connection was left; returns whether it was.
    fn has_left(&mut self, handle: ConnectionHandle) -> bool {
        let before = self.left.len();
        self.left.retain(|left| *left != handle);
        self.left.len() < before
    }

    /// Closes a connection, tells the far end the reason, and ends everything that the connection carried.
    pub(crate) fn close_connection(
        &mut self,
        cx: &mut Context,
        handle: ConnectionHandle,
        reason: CloseReason,
        now: Instant,
    ) {
        self.control.close(handle, reason, now);
        self.lose(cx, handle, reason.label(), false, now);
    }

    /// Closes a connection whose peer broke the protocol: it has to wait before it may connect again.
    pub(crate) fn close_offender(
        &mut self,
        cx: &mut Context,
        handle: ConnectionHandle,
        reason: CloseReason,
        now: Instant,
    ) {
        if let Some(peer) = self.control.open(handle).and_then(|connection| connection.identity.peer()) {
            cx.registry.pause(peer, now);
        }
        self.close_connection(cx, handle, reason, now);
    }

    /// Removes a connection that quinn-proto has forgotten, after which quinn-proto may use its handle again.
    pub(crate) fn connection_drained(&mut self, cx: &mut Context, handle: ConnectionHandle, now: Instant) {
        self.lose(cx, handle, "it is gone", false, now);
        self.has_left(handle);
        self.admission_ended(handle);
        if let Some(underlay) = self.control.remove(handle) {
            cx.effects.push_back(Effect::ReleaseSocket(underlay));
        }
    }

    /// Closes the connection of a peer that sends more control messages than it may, or than there is memory for.
    pub(crate) fn flooded(
        &mut self,
        cx: &mut Context,
        handle: ConnectionHandle,
        ceiling: Ceiling,
        now: Instant,
    ) {
        if self.control.open(handle).is_none() {
            return;
        }
        let allowed = cx.stats.ceilings.count(ceiling, now);
        let peer = self.name_of(cx, handle);
        if ceiling == Ceiling::ControlBytes {
            throttled!(
                warn, allowed, { peer, waiting = cx.hub.streams.messages() },
                "the control messages of all peers that wait fill a sixteenth of limits.stream_bytes; closing the connection \
                (remedy: see which peers send so many)"
            );
            self.close_connection(cx, handle, CloseReason::LimitReached, now);
        } else {
            throttled!(
                warn,
                allowed,
                { peer },
                "the peer sends more control messages than an agent does; closing the connection (remedy: see what runs \
                there)"
            );
            self.close_offender(cx, handle, CloseReason::LimitReached, now);
        }
    }

    /// Handles the removal of a peer by the registry: ends its connections, attempts and flows, and drops its waiting payloads.
    pub(crate) fn peer_removed(&mut self, cx: &mut Context, host: &mut LaneHost, id: PeerId, now: Instant) {
        let dials = cx.dialler_of(id) == cx.id.index;
        let Some(peer) = cx.peers.get_mut(id).filter(|peer| peer.data.is_live()) else { return };
        peer.data.standing = PeerStanding::Leaving { since: now };
        // Packets that are under way on its lanes must not open flows.
        Arc::make_mut(&mut peer.data.config).services.clear();
        if dials {
            match peer.origin {
                PeerOrigin::Config | PeerOrigin::State => {
                    tracing::info!(peer = &**peer.name(), origin = peer.origin.label(), "peer removed");
                }
                PeerOrigin::Open => tracing::debug!(peer = &**peer.name(), "peer of open mode removed"),
            }
        }
        // The attempts are among the connections that are closed below.
        drop(peer.dialler.stop());
        peer.dialler.forget_lookups();
        for token in peer.dialler.take_abandoned() {
            cx.sockets.factory.release(token);
        }
        self.end_session(cx, id, Some(CloseReason::KeyRemoved), now);
        if let Some(of) = cx.peers.linked(id) {
            // Whichever worker owns the session.
            self.link_down(cx, host, of, now);
        }
        self.end_stream_connections(cx, id, CloseReason::KeyRemoved, now);
        for handle in self.control.handles() {
            if self.peer_of(handle) == Some(id) {
                self.close_connection(cx, handle, CloseReason::KeyRemoved, now);
            }
        }
        let Some(peer) = cx.peers.get_mut(id) else { return };
        for flow in peer.data.relay.flows.all() {
            let (why, reason) = (Some(FlowEnd::PeerRemoved), DropReason::PeerRemoved);
            if let Some(flow) = peer.data.end_flow(flow, why, reason, &cx.config) {
                cx.sockets.factory.close_flow_later(flow.origin);
            }
        }
        // The rest of the queue are IP packets, which belong to no flow.
        peer.data.relay.clear_queues(DropReason::PeerRemoved);
        cx.sockets.factory.close_now(&mut cx.sockets.locals);
        cx.stats.unpublished = true;
    }

    /// Closes the connections of a peer that have proved a key which the peer no longer has.
    pub(crate) fn end_connections_of_other_keys(&mut self, cx: &mut Context, id: PeerId, now: Instant) {
        let Some(config) = cx.peers.get(id).map(|peer| Arc::clone(&peer.data.config)) else { return };
        let is_other =
            |key: Option<[u8; 32]>| key.is_some_and(|key| !config.public_keys.contains(&PublicKey(key)));
        let session = cx.peers.session(id).map(|session| session.handle);
        let proved = session
            .and_then(|handle| self.control.get(handle))
            .and_then(|connection| connection.identity.key());
        if is_other(proved) {
            self.end_session(cx, id, Some(CloseReason::KeyRemoved), now);
        }
        for handle in self.control.handles() {
            let of_peer =
                self.control.get(handle).filter(|connection| connection.identity.peer() == Some(id));
            if of_peer.is_some_and(|connection| is_other(connection.identity.key())) {
                self.close_connection(cx, handle, CloseReason::KeyRemoved, now);
            }
        }
    }
}
