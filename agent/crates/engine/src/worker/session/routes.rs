//! Changes of addresses: the far end's, which quinn-proto and the lanes have validated, and our own.
//!
//! A dialled socket is connected, so its local address is fixed. If packets to a peer leave from another address now (the host has
//! moved, an interface is gone), a fresh socket replaces it, and the session continues from there.

use std::{
    net::SocketAddr,
    time::{Duration, Instant},
};

use base::ids::{PeerId, SessionRef};
use dataplane::{forward::Local, lanes::UnderlayId, relay::Origin};
use net::carrier::{client_of, is_stream};
use quinn_proto::ConnectionHandle;
use wire::messages::Message;

use crate::{
    control::connections::{Stage, StreamConnection},
    hub::{LineEvent, ToOwner},
    worker::{
        context::{Context, timer::Timer},
        report::stats::PathMove,
        session::Sessions,
    },
};

/// After a socket to a service was replaced in vain, none is replaced for this long.
const RENEWAL_INTERVAL: Duration = Duration::from_millis(100);

impl Sessions {
    /// Looks for another route to peers for whose packets the kernel had none.
    pub(crate) fn follow_unreachable(&mut self, cx: &mut Context, now: Instant) {
        while let Some(underlay) = cx.sockets.underlays.unreachable.pop() {
            let lane = cx.sockets.lanes.iter().find(|(_, slot)| slot.underlay == underlay);
            let of_lane = lane.map(|(_, slot)| slot.peer);
            let connection = || self.control.iter().find(|connection| connection.underlay == underlay);
            if let Some(peer) = of_lane.or_else(|| connection()?.identity.peer()) {
                cx.note_unreachable_line(peer, underlay, now);
                self.follow_route(cx, peer, now);
            }
        }
    }

    /// Replaces the sockets of a dialled session if packets to the peer leave from another address now. Returns whether it
    /// replaced any.
    pub(crate) fn follow_route(&mut self, cx: &mut Context, id: PeerId, now: Instant) -> bool {
        let Some(peer) = cx.peers.get_mut(id) else { return false };
        if !peer.data.link.as_ref().is_some_and(|link| link.dialled) || !peer.reach.asks_route(now) {
            return false;
        }
        let (mut moves, mut moved) = (0, None);
        for (underlay, remote) in self.sockets_towards(cx, id) {
            match cx.sockets.factory.redial(&mut cx.sockets.underlays, underlay, remote) {
                Ok(None) => {}
                Ok(Some(addresses)) => {
                    (moves, moved) = (moves + 1, Some(addresses));
                    self.socket_moved(cx, underlay);
                }
                // The others carry on, and the line is suspect.
                Err(_) if cx.sockets.underlays.get(underlay).is_some_and(|it| it.line.is_some()) => {}
                Err(error) => cx.report_no_route(id, remote, &error, now),
            }
        }
        cx.stats.totals.path_moves[PathMove::Socket] += moves;
        let Some((from, to)) = moved else { return false };
        if let Some(peer) = cx.peers.get_mut(id) {
            let (from, to) = (from.ip(), to.ip());
            throttled!(
                info, peer.throttles.moved.allow(now), { peer = &**peer.name(), %from, %to, sockets = moves },
                "packets to the peer leave from another address now; its session goes on from there"
            );
        }
        true
    }

    /// Moves the connections of a dialled session at this worker off lines that are worse than the best one, once a second at most
    /// unless the kernel has no way for what they send. Those whose handshake is under way follow when they are up: QUIC has no migration
    /// before (RFC 9000 §9).
    pub(crate) fn follow_lines(&mut self, cx: &mut Context, of: SessionRef, now: Instant) {
        let link = cx.peers.link(of.peer).filter(|link| link.session == of.session && link.dialled);
        let Some(link) = link else { return };
        let Some(lines) = &link.pool.lines else { return };
        let better = |underlay| {
            let on = cx.sockets.underlays.get(underlay)?.line?;
            Some((on, lines.better_than(on)?))
        };
        let connections = self
            .connections_towards(cx, of.peer, |stream| matches!(stream.stage, Stage::Up | Stage::Releasing));
        let moves =
            connections.into_iter().filter_map(|(underlay, to)| Some((underlay, to, better(underlay)?)));
        let moves: Vec<_> = moves.collect();
        let Some(reach) = cx.peers.get(of.peer).map(|peer| &peer.reach) else { return };
        let (put_off, moves): (Vec<_>, Vec<_>) =
            moves.into_iter().partition(|(_, _, (on, _))| reach.stays_on(*on, now).is_some());
        let again = put_off.iter().filter_map(|(_, _, (on, _))| reach.stays_on(*on, now)).min();
        if let Some(at) = again {
            cx.timers.arm(Timer::FollowLines(of.peer), at);
        }
        for (underlay, remote, (_, line)) in moves {
            match cx.sockets.factory.change_line(&mut cx.sockets.underlays, underlay, remote, line) {
                Ok(false) => {}
                Ok(true) => {
                    cx.stats.totals.path_moves[PathMove::Socket] += 1;
                    self.socket_moved(cx, underlay);
                    self.show_address(underlay);
                    if let Some(peer) = cx.peers.get_mut(of.peer) {
                        peer.reach.line_moves(now);
                    }
                }
                Err(error) => cx.report_no_route(of.peer, remote, &error, now),
            }
        }
    }

    /// Has the far end learn the address of the connections on a socket with as few packets as possible: it may send there three times
    /// what it received.
    fn show_address(&mut self, underlay: UnderlayId) {
        for handle in self.control.handles() {
            if self.control.get(handle).is_some_and(|connection| connection.underlay == underlay) {
                self.control.send(handle, &Message::Here);
            }
        }
    }

    /// The sockets of a peer's control connection and of these stream connections at this worker, and the address to which each sends.
    fn connections_towards(
        &self,
        cx: &Context,
        id: PeerId,
        counts: impl Fn(&&StreamConnection) -> bool,
    ) -> Vec<(UnderlayId, SocketAddr)> {
        let session = cx.peers.session(id).map(|session| session.handle);
        let streams = cx.peers.get(id).into_iter().flat_map(|peer| &peer.streams.all).filter(counts);
        let handles = session.into_iter().chain(streams.map(|stream| stream.handle));
        let connections = handles.filter_map(|handle| self.control.get(handle));
        connections.map(|connection| (connection.underlay, connection.path().destination)).collect()
    }

    /// Has the sockets of a dialled session try their other way to the peer. Returns whether any has one.
    pub(crate) fn try_other_way(&mut self, cx: &mut Context, id: PeerId) -> bool {
        if !cx.peers.link(id).is_some_and(|link| link.dialled) {
            return false;
        }
        let mut has_one = false;
        for (underlay, _) in self.sockets_towards(cx, id) {
            if cx.sockets.underlays.get_mut(underlay).is_some_and(|underlay| underlay.socket.seek()) {
                has_one = true;
                self.socket_moved(cx, underlay);
            }
        }
        has_one
    }

    /// A socket sends over UDP again, where a stream stood in for it.
    pub(crate) fn way_changed(&mut self, cx: &mut Context, underlay: UnderlayId, now: Instant) {
        self.socket_moved(cx, underlay);
        cx.stats.totals.path_moves[PathMove::Socket] += 1;
        let lane = cx.sockets.lanes.iter().find(|(_, slot)| slot.underlay == underlay);
        let of_lane = lane.map(|(_, slot)| slot.peer);
        let connection = || self.control.iter().find(|connection| connection.underlay == underlay);
        if let Some(id) = of_lane.or_else(|| connection()?.identity.peer())
            && let Some(peer) = cx.peers.get_mut(id)
        {
            throttled!(
                info,
                peer.throttles.moved.allow(now),
                { peer = &**peer.name() },
                "UDP passes again; packets to the peer leave over it"
            );
        }
    }

    /// The sockets of a peer's session at this worker, and the address to which each sends.
    fn sockets_towards(&self, cx: &Context, id: PeerId) -> Vec<(UnderlayId, SocketAddr)> {
        let lanes = cx.sockets.lanes.iter().filter(|(_, slot)| slot.peer == id && slot.is_up());
        let lanes = lanes.filter_map(|(_, slot)| Some((slot.underlay, slot.path()?.destination)));
        let mut sockets: Vec<_> =
            self.connections_towards(cx, id, |_| true).into_iter().chain(lanes).collect();
        sockets.sort_unstable_by_key(|(underlay, _)| *underlay);
        sockets.dedup_by_key(|(underlay, _)| *underlay);
        sockets
    }

    /// Sends a packet on everything that uses a socket whose packets come from another address now, so that the far end learns it.
    fn socket_moved(&mut self, cx: &mut Context, underlay: UnderlayId) {
        for handle in self.control.handles() {
            if self.control.get(handle).is_some_and(|connection| connection.underlay == underlay)
                && let Some(quinn) = self.control.quinn(handle)
            {
                quinn.local_address_changed();
            }
        }
        let lanes: Vec<_> = cx
            .sockets
            .lanes
            .iter()
            .filter(|(_, slot)| slot.underlay == underlay)
            .map(|(lane, _)| lane)
            .collect();
        for lane in lanes {
            if let Some(slot) = cx.sockets.lanes.get_mut(lane) {
                slot.core.request_ping();
                slot.paths.changed();
            }
            cx.sockets.lanes.touch(lane);
        }
    }

    /// Counts and logs that the far end of a control connection is at another address.
    pub(crate) fn control_moved(
        &mut self,
        cx: &mut Context,
        handle: ConnectionHandle,
        from: SocketAddr,
        to: SocketAddr,
        now: Instant,
    ) {
        cx.stats.totals.path_moves[PathMove::Control] += 1;
        if let Some(connection) = self.control.get_mut(handle) {
            connection.ports_since = now;
        }
        let Some(id) = self.peer_of(handle) else { return };
        let Some(peer) = cx.peers.get_mut(id) else { return };
        if is_stream(&from) != is_stream(&to) {
            peer.reach.way_changed(now);
        }
        if let Some(suppressed) = peer.throttles.moved.allow(now) {
            let (over_tcp, from, to) = (is_stream(&to), client_of(from), client_of(to));
            tracing::info!(peer = &**peer.name(), %from, %to, over_tcp, suppressed = base::throttle::counted(suppressed), "the peer's address changed");
        }
    }
}

impl Context {
    /// Replaces sockets to services whose local address this host has lost.
    pub(crate) fn renew_upstreams(&mut self, now: Instant) {
        while let Some(socket) = self.sockets.locals.unreachable.pop() {
            if self
                .sockets
                .locals
                .renewed
                .is_some_and(|at| now.saturating_duration_since(at) < RENEWAL_INTERVAL)
            {
                continue;
            }
            let Some(Local::Upstream { peer, flow }) =
                self.sockets.locals.get(socket).map(|socket| socket.local)
            else {
                continue;
            };
            let flow = self.peers.get(peer).and_then(|peer| peer.data.relay.flows.get(flow));
            let Some(Origin::Upstream { service, .. }) = flow.map(|flow| flow.origin) else { continue };
            let Some(service) = self.config.services.get(service) else { continue };
            // Replacing the other sockets would most likely not help either.
            if !self
                .sockets
                .factory
                .renew_upstream(&mut self.sockets.locals, socket, &service.upstream)
                .unwrap_or(false)
            {
                self.sockets.locals.renewed = Some(now);
            }
        }
    }

    /// Tells the owner of a peer's session if a socket whose packets have no way is on one of several lines.
    fn note_unreachable_line(&mut self, id: PeerId, underlay: UnderlayId, now: Instant) {
        let line = self.sockets.underlays.get(underlay).and_then(|underlay| underlay.line);
        if let (Some(peer), Some(line)) = (self.peers.get_mut(id), line) {
            peer.reach.line_refuses(line, now);
        }
        if let Some((of, line)) = self.peers.linked(id).zip(line) {
            self.tell_owner(of, ToOwner::Line(line, LineEvent::Unreachable));
        }
    }

    fn report_no_route(&mut self, id: PeerId, remote: SocketAddr, error: &std::io::Error, now: Instant) {
        let Some(peer) = self.peers.get_mut(id) else { return };
        let reason = format!("no way to {remote}: {error}");
        peer.reach.fail(reason, &[], now);
        throttled!(
            warn, peer.throttles.no_route.allow(now), { peer = &**peer.name(), %remote, %error },
            "no way to the peer; its session goes on when there is one again (remedy: this host's interfaces and routes)"
        );
    }
}
