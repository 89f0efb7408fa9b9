//! Sessions that we dialled move to fresh ports, for networks that throttle a 4-tuple by its age (`transport.hop`).
//!
//! ```text
//!   lane        opened anew over a fresh socket; the old one carries until the new one does, and drains
//!   connection  goes on over a fresh socket; the old one is read for as long as packets to it may be under way
//! ```
//!
//! So a packet that is under way to an old port arrives, and none of a flow overtakes another one: a lane takes over when its path has
//! answered, and all that was sent before is on its way by then. Streams in place of UDP stay: they do not age.

use std::{net::SocketAddr, sync::Arc, time::Instant};

use base::ids::PeerId;
use dataplane::lanes::{DRAIN_TIME, LaneId, OpeningId, UnderlayId};
use gate::identity::Endpoint;
use net::{UdpRole, carrier::number_of, way::Over};
use quinn_proto::ConnectionHandle;
use rand::{Rng, RngExt};
use wire::messages::Message;

use crate::{
    control::{connections::Stage, liveness::LEAST_SILENCE},
    hub::LaneEvent,
    worker::{
        context::{Context, timer::Timer},
        lanes::host::name_of_lane,
        report::stats::PortHop,
        session::{Conn, Sessions},
    },
};

/// How often in a period it is looked at how many ports there are: those that come later bring the next change forward.
const LOOKS: u32 = 16;

/// Something with ports of its own.
#[derive(Clone, Copy, Debug)]
enum Hopper {
    Lane(LaneId),
    Connection(ConnectionHandle),
}

/// What uses ports of a session at this worker, and since when.
#[derive(Clone, Copy, Debug)]
struct Aging {
    since: Instant,
    of: Hopper,
}

impl Sessions {
    /// Moves what has used its port for longest to a fresh one, if it is time for that.
    pub(crate) fn hop(&mut self, cx: &mut Context, id: PeerId, now: Instant) {
        let Some(period) = cx.config.transport.hop else { return };
        let Some(link) = cx.peers.link(id).filter(|link| link.dialled) else { return };
        let is_doubtful = link.suspicions.unresponsive;
        let aging = self.aging(cx, id);
        let Some(oldest) = aging.iter().min_by_key(|aging| aging.since).copied() else {
            return cx.timers.arm(Timer::Hop(id), now + period / LOOKS);
        };
        let Some(peer) = cx.peers.get_mut(id) else { return };
        let due = peer.hops.next(period, aging.len(), oldest.since, now);
        if due > now || is_doubtful {
            // While the path to the peer is in doubt, nothing moves.
            let again = if is_doubtful { now + LEAST_SILENCE } else { due };
            return cx.timers.arm(Timer::Hop(id), again.min(now + period / LOOKS));
        }
        if let Hopper::Lane(lane) = oldest.of
            && let Some(answered) = cx.asks_lane(id, lane, now)
        {
            return cx.timers.arm(Timer::Hop(id), answered);
        }
        match oldest.of {
            Hopper::Lane(lane) => cx.lane_to_hop(lane),
            Hopper::Connection(handle) => self.hop_connection(cx, id, handle, now),
        }
        if let Some(peer) = cx.peers.get_mut(id) {
            peer.hops.hopped(now);
            let looks = u32::try_from(aging.len()).unwrap_or(u32::MAX).max(LOOKS);
            cx.timers.arm(Timer::Hop(id), now + period / looks);
        }
    }

    /// What of a session that we dialled has ports of its own at this worker.
    fn aging(&self, cx: &Context, id: PeerId) -> Vec<Aging> {
        let Some(peer) = cx.peers.get(id) else { return Vec::new() };
        let lanes = peer.data.link.iter().flat_map(|link| link.pool.lanes()).filter_map(|lane| {
            let slot = cx.sockets.lanes.get(lane).filter(|slot| slot.is_up())?;
            cx.ages(slot.underlay).then(|| Aging { since: slot.meter.opened(), of: Hopper::Lane(lane) })
        });
        let control = peer.session.as_ref().map(|session| session.handle);
        // QUIC has no migration before the handshake is complete (RFC 9000 §9).
        let streams = peer.streams.all.iter().filter(|stream| stream.dialled && stream.stage == Stage::Up);
        let connections = control.into_iter().chain(streams.map(|stream| stream.handle));
        let connections = connections.filter_map(|handle| {
            let connection = self.control.open(handle).filter(|open| cx.ages(open.underlay))?;
            Some(Aging { since: connection.ports_since, of: Hopper::Connection(handle) })
        });
        lanes.chain(connections).collect()
    }

    /// Has a connection go on over a fresh socket of the same line.
    fn hop_connection(&mut self, cx: &mut Context, id: PeerId, handle: ConnectionHandle, now: Instant) {
        let Some(connection) = self.control.open(handle) else { return };
        let (old, remote) = (connection.underlay, connection.path().destination);
        let line = cx.sockets.underlays.get(old).and_then(|underlay| underlay.line);
        let endpoints = cx.peers.get(id).map(|peer| Arc::clone(&peer.data.config));
        let to = endpoints.map_or(remote, |peer| another_port(&peer.endpoints, remote, &mut cx.rng));
        let fresh = match cx.sockets.factory.dial_as(&mut cx.sockets.underlays, remote, to, line) {
            Ok(fresh) => fresh,
            Err(error) => return cx.report_no_port(id, to, &error, now),
        };
        if let Some(connection) = self.control.get_mut(handle) {
            (connection.underlay, connection.ports_since) = (fresh, now);
        }
        if let Some(quinn) = self.control.quinn(handle) {
            quinn.local_address_changed();
        }
        // The far end learns the address with as few packets as possible: it may send there three times what it received.
        self.control.send(handle, &Message::Here);
        cx.stats.totals.port_hops[PortHop::Connection] += 1;
        cx.timers.arm(Timer::OldPort(old), now + DRAIN_TIME);
    }
}

impl Conn<'_> {
    /// Opens a lane anew, because it has used its ports for long enough.
    pub(super) fn hop_lane(&mut self, of: OpeningId, now: Instant) {
        let openings = &self.session.openings;
        let is_settled = openings.is_up(of.index, of.epoch) && !openings.is_asked(of.index);
        if self.session.agreed.dialled && is_settled {
            self.cx.totals.port_hops[PortHop::Lane] += 1;
            self.ask_for_lane(of.index, now);
        }
    }
}

impl Context {
    /// Begins to count `transport.hop` for the ports of a session at this worker.
    pub(crate) fn begin_hops(&mut self, id: PeerId, now: Instant) {
        let (worker, period) = (self.id, self.config.transport.hop);
        let Some((peer, period)) = self.peers.get_mut(id).zip(period) else { return };
        if peer.data.link.as_ref().is_some_and(|link| link.dialled) {
            peer.hops.begin(period, worker, now);
            self.timers.arm(Timer::Hop(id), now);
        }
    }

    /// Whether a socket is a dialled one whose packets go over UDP.
    fn ages(&self, id: UnderlayId) -> bool {
        self.sockets.underlays.get(id).is_some_and(|underlay| {
            let taken = underlay.socket.taken();
            underlay.role == UdpRole::QuicDial && taken.is_none_or(|taken| taken.over == Over::Udp)
        })
    }

    /// Asks a lane on which nothing was heard of late for a sign of life, once, and says when that has come: a lane carries payloads until
    /// its replacement does only if it is known to work.
    fn asks_lane(&mut self, id: PeerId, lane: LaneId, now: Instant) -> Option<Instant> {
        let slot = self.sockets.lanes.get_mut(lane)?;
        let peer = self.peers.get_mut(id).filter(|peer| !peer.hops.asked)?;
        if slot.works(LEAST_SILENCE / 2, now) {
            return None;
        }
        peer.hops.asked = true;
        slot.core.request_ping();
        let answered = now + slot.core.rtt().pto();
        self.sockets.lanes.touch(lane);
        Some(answered)
    }

    /// Tells the owner of a lane's session that it is to be opened over another port.
    fn lane_to_hop(&mut self, id: LaneId) {
        if let Some(lane) = self.sockets.lanes.get(id).map(name_of_lane) {
            self.lane_event(lane, LaneEvent::OldPort);
        }
    }

    fn report_no_port(&mut self, id: PeerId, remote: SocketAddr, error: &std::io::Error, now: Instant) {
        let Some(peer) = self.peers.get_mut(id) else { return };
        throttled!(
            warn, peer.throttles.no_route.allow(now), { peer = &**peer.name(), %remote, %error },
            "cannot open a socket for a change of ports; the old one stays (remedy: a higher limit on open files, or a longer \
             transport.hop)"
        );
    }
}

/// Another port of the peer that was dialled at `remote`, by chance: one that each range of its endpoints has which has that port; `remote`
/// itself without such a range.
fn another_port(endpoints: &[Endpoint], remote: SocketAddr, rng: &mut impl Rng) -> SocketAddr {
    let has_it = |endpoint: &&Endpoint| (endpoint.port..=endpoint.last_port).contains(&remote.port());
    let ranges = endpoints.iter().filter(|endpoint| !endpoint.is_over_tcp()).filter(has_it);
    // An address does not say by which endpoint it was found.
    let ranges = ranges.map(|endpoint| (endpoint.port, endpoint.last_port));
    let common = ranges.reduce(|one, other| (one.0.max(other.0), one.1.min(other.1)));
    match common.filter(|_| number_of(remote).is_none()) {
        Some((first, last)) => SocketAddr::new(remote.ip(), rng.random_range(first..=last)),
        None => remote,
    }
}

impl Conn<'_> {
    /// Where a lane is dialled: at the address of the session, or at another port of it if ports change.
    pub(super) fn port_for_lane(&mut self, remote: SocketAddr) -> SocketAddr {
        match self.cx.config.transport.hop {
            Some(_) => another_port(&self.data.config.endpoints, remote, self.cx.rng),
            None => remote,
        }
    }
}

#[cfg(test)]
mod tests {
    use rand::{SeedableRng, rngs::StdRng};

    use super::*;

    #[test]
    fn another_port_is_in_every_range_that_may_be_meant() {
        let mut rng = StdRng::seed_from_u64(1);
        let mut ports = |endpoints: &[&str], remote: &str| {
            let endpoints: Vec<Endpoint> =
                endpoints.iter().map(|text| text.parse().expect("an endpoint")).collect();
            let remote: SocketAddr = remote.parse().expect("an address");
            let mut seen: Vec<u16> =
                (0..200).map(|_| another_port(&endpoints, remote, &mut rng).port()).collect();
            seen.sort_unstable();
            seen.dedup();
            seen
        };
        assert_eq!(ports(&["a:20-23"], "192.0.2.1:20"), [20, 21, 22, 23]);
        assert_eq!(ports(&["a:20-23", "b:22-30", "c:40-50"], "192.0.2.1:22"), [22, 23]);
        assert_eq!(ports(&["a:20-23", "b:20"], "192.0.2.1:20"), [20], "b has that port alone");
        assert_eq!(ports(&["a:20-23"], "192.0.2.1:19"), [19]);
        assert_eq!(
            ports(&["a:443-450"], &net::carrier::label(1).to_string()),
            [443],
            "a stream has its port"
        );
        assert_eq!(ports(&[], "192.0.2.1:7"), [7]);
    }
}
