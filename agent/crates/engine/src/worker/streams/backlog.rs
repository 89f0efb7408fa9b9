//! Connections in the listen backlogs of `[[tcp]]` ports: which worker accepts them, and how long they wait if none can.
//!
//! All workers listen at a port and share one backlog. If there is no room for another forward, or the peer's session is suspect,
//! connections stay in the backlog for a while. The wait is measured for the port (`hub/backlogs.rs`), not for each connection.

use std::time::{Duration, Instant};

use base::ids::PeerId;

use crate::{
    hub::WorkerMessage,
    reach::DIAL_SOON_LASTS,
    worker::{
        context::{
            Context,
            sources::{Class, Party},
            timer::Timer,
        },
        session::Sessions,
        streams::TcpForwards,
    },
};

/// How long connections wait in the listen backlog. Then they are reset, so that their clients learn of the problem.
const BACKLOG_PATIENCE: Duration = Duration::from_secs(5);

/// Why a connection to a `[[tcp]]` port cannot be forwarded now, although it may be later.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Obstacle {
    /// A limit is reached: other forwards may end, or the far end may allow more streams.
    Room,
    /// The session with the peer is suspect: it may be heard again, or another one may replace it.
    Suspect,
}

impl TcpForwards {
    /// Whether this worker accepts the next connection to this port. All workers listen; of those that have a connection to the peer,
    /// the one with the fewest forwards accepts. If none has one, the session owner decides between waiting and refusal. Without a
    /// session, the worker that dials the peer refuses.
    pub(crate) fn may_accept(&self, cx: &Context, sessions: &Sessions, port: usize) -> bool {
        let Some(id) = self.port_peer(cx, port) else { return true };
        let Some(peer) = cx.peers.get(id) else { return true };
        let Some(link) = peer.data.link.as_ref() else { return cx.dialler_of(id) == cx.id.index };
        let (owner, has_streams) = (link.pool.owner, link.connections > 1);
        // The other workers may have an older value.
        sessions.note_carrier(cx, id);
        let carries = sessions.carrier(cx, id).is_some();
        let other = match (carries, has_streams) {
            (true, _) => peer.forwards.of_all.less_busy_than(cx.id.index),
            (false, true) => {
                let beside = peer.forwards.of_all.least_busy_beside(cx.id.index);
                beside.or_else(|| (owner != cx.id.index).then_some(owner))
            }
            (false, false) => None,
        };
        if let Some(other) = other {
            // The other worker may have checked before it had the fewest forwards.
            cx.hub.send(other, WorkerMessage::AcceptTcp { port });
            return false;
        }
        carries || owner == cx.id.index
    }

    /// The temporary reason, if there is one, for which the next connection to this port cannot be forwarded.
    pub(crate) fn obstacle(&self, cx: &Context, sessions: &mut Sessions, port: usize) -> Option<Obstacle> {
        let forward = cx.config.tcp.get(port)?;
        let id = cx.peers.of_forward(forward);
        let peer = cx.peers.get(id)?;
        peer.data.link.as_ref()?;
        peer.data.relay.services.of_tcp(&forward.service)?;
        // Connections whose header is awaited become forwards, too, and are reset if they find no room then.
        let awaits = !forward.tcp.accept_proxy.is_empty();
        let awaited = if awaits { self.proxied.len() } else { 0 };
        let (limits, streams) = (&cx.config.limits, peer.forwards.of_all.total() as usize);
        let is_full = cx.hub.streams.forwards() + awaited >= limits.tcp_streams
            || streams + awaited >= limits.tcp_streams_per_peer as usize;
        let Some(handle) = sessions.carrier(cx, id) else { return Some(Obstacle::Suspect) };
        (is_full || !sessions.control.has_stream(handle)).then_some(Obstacle::Room)
    }

    /// Whether connections that wait at this port, because of `obstacle`, have time left.
    pub(crate) fn lets_wait(&self, cx: &mut Context, port: usize, obstacle: Obstacle, now: Instant) -> bool {
        let listener = self.listeners.get(port).and_then(Option::as_ref);
        if !listener.is_some_and(|(listener, _)| listener.has_waiting()) {
            return false;
        }
        let (since, begins) = cx.hub.backlogs.wait(port, now);
        cx.stats.totals.tcp.accept_pauses += u64::from(begins);
        let until = since + BACKLOG_PATIENCE;
        if until <= now {
            return false;
        }
        let next_look = match obstacle {
            Obstacle::Room => until,
            Obstacle::Suspect => {
                self.await_peer(cx, port, now);
                until.min(now + DIAL_SOON_LASTS)
            }
        };
        cx.timers.arm(Timer::Listener(port), next_look);
        true
    }

    /// Checks the ports at which connections wait: there may be room for them.
    pub(crate) fn retry_listeners(&mut self, cx: &mut Context) {
        for port in cx.hub.backlogs.ports() {
            self.wake_listener(cx, port);
        }
    }

    /// Has the peer of a `[[tcp]]` port dialled soon, because a connection waits or was refused.
    pub(crate) fn await_peer(&self, cx: &mut Context, port: usize, now: Instant) {
        let Some(id) = self.port_peer(cx, port) else { return };
        cx.await_soon(id, now);
    }

    /// Checks all ports of a peer, after a change in which worker accepts their connections.
    pub(crate) fn wake_listeners(&self, cx: &mut Context, id: PeerId) {
        for port in 0..self.listeners.len() {
            let forward = cx.config.tcp.get(port);
            if forward.is_some_and(|forward| cx.peers.of_forward(forward) == id) {
                self.wake_listener(cx, port);
            }
        }
    }

    /// The peer that a `[[tcp]]` port leads to.
    pub(crate) fn port_peer(&self, cx: &Context, port: usize) -> Option<PeerId> {
        cx.config.tcp.get(port).map(|forward| cx.peers.of_forward(forward))
    }

    /// Checks a port, which may have connections for this worker.
    pub(crate) fn wake_listener(&self, cx: &mut Context, port: usize) {
        if let Some(Some((_, token))) = self.listeners.get(port) {
            cx.sources.add(*token, Class::Other, Party::Source(*token));
        }
    }
}

impl Context {
    /// Whether the limit on TCP forwards of all peers together is reached.
    pub(crate) fn is_full(&self) -> bool {
        self.hub.streams.forwards() >= self.config.limits.tcp_streams
    }
}
