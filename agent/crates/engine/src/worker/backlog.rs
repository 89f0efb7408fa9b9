//! What waits in the listen backlogs of `[[tcp]]` ports: which worker takes it, and how long it waits for what is missing.
//!
//! All workers listen at a port, and share one backlog. What is missing may come: room for another forward, or an answer of a peer
//! whose session is in doubt. Until then connections stay in the backlog, whose wait is counted for the port ([`Crowds`]), not for each.

use std::time::{Duration, Instant};

use wire::ids::PeerId;

use crate::{
    hub::WorkerMessage,
    worker::{
        context::Context,
        dial::DIAL_SOON_LASTS,
        parts::{Sessions, TcpForwards},
        sources::{Class, Party},
        timer::Timer,
    },
};

/// How long connections wait in the listen backlog for what is missing; then they are reset, so that clients learn it.
const BACKLOG_PATIENCE: Duration = Duration::from_secs(5);

/// What a connection to a `[[tcp]]` port would be refused for, and may get if it waits.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Obstacle {
    /// No room: other forwards may end, or the far end lets us open more streams.
    Room,
    /// The session with the peer is in doubt: it may be heard again, or another one replaces it.
    Doubt,
}

impl TcpForwards {
    /// Whether the next connection to this port is for this worker. All of them listen; of those that have a connection to the
    /// peer the one with the fewest forwards accepts. The owner of the session lets wait, and refuses, what none can carry, and
    /// without a session the worker that dials the peer refuses.
    pub(super) fn may_accept(&self, cx: &Context, sessions: &Sessions, place: usize) -> bool {
        let Some(id) = cx.config.tcp.get(place).map(|forward| self.forward_peer(forward)) else {
            return true;
        };
        let Some(peer) = cx.peers.get(id) else { return true };
        let Some(link) = peer.data.link.as_ref() else { return cx.dialler_of(id) == cx.id.index };
        let (owner, has_streams) = (link.pool.owner(), link.connections > 1);
        // Others may go by what was so a moment ago.
        sessions.note_carrier(cx, id);
        let carries = sessions.carrier(cx, id).is_some();
        let other = match (carries, has_streams) {
            (true, _) => peer.forwards.less_busy_than(cx.id.index),
            (false, true) => {
                let beside = peer.forwards.least_busy_beside(cx.id.index);
                beside.or_else(|| (owner != cx.id.index).then_some(owner))
            }
            (false, false) => None,
        };
        if let Some(other) = other {
            // It may have looked when it was not the one.
            cx.hub.post(other, WorkerMessage::AcceptTcp { place });
            return false;
        }
        carries || owner == cx.id.index
    }

    /// What the next connection to this port would be refused for, if that may change.
    pub(super) fn obstacle(&self, cx: &Context, sessions: &mut Sessions, place: usize) -> Option<Obstacle> {
        let forward = cx.config.tcp.get(place)?;
        let id = self.forward_peer(forward);
        let peer = cx.peers.get(id)?;
        let link = peer.data.link.as_ref()?;
        if !link.services.iter().any(|service| service.tcp && *service.name == *forward.service) {
            return None;
        }
        let is_full = cx.is_full() || peer.forwards.total() >= cx.config.limits.tcp_streams_per_peer;
        let Some(handle) = sessions.carrier(cx, id) else { return Some(Obstacle::Doubt) };
        (is_full || !sessions.control.has_stream(handle)).then_some(Obstacle::Room)
    }

    /// Whether connections wait at this port, before an obstacle, and have time left.
    pub(super) fn lets_wait(&self, cx: &mut Context, place: usize, obstacle: Obstacle, now: Instant) -> bool {
        let listener = self.listeners.get(place).and_then(Option::as_ref);
        if !listener.is_some_and(|(listener, _)| listener.has_waiting()) {
            return false;
        }
        let (since, begins) = cx.hub.crowds().wait(place, now);
        cx.stats.totals.tcp.accept_pauses += u64::from(begins);
        let until = since + BACKLOG_PATIENCE;
        if until <= now {
            return false;
        }
        let next_look = match obstacle {
            Obstacle::Room => until,
            Obstacle::Doubt => {
                self.await_peer(cx, place, now);
                until.min(now + DIAL_SOON_LASTS)
            }
        };
        cx.timers.arm(Timer::Listener(place), next_look);
        true
    }

    /// There may be room for what waits in the listen backlogs.
    pub(super) fn retry_listeners(&mut self, cx: &mut Context) {
        for place in cx.hub.crowds().places() {
            self.wake_listener(cx, place);
        }
    }

    /// Somebody wants the peer of a `[[tcp]]` port and could not be served: it is dialled soon.
    pub(super) fn await_peer(&self, cx: &mut Context, place: usize, now: Instant) {
        let Some(id) = cx.config.tcp.get(place).map(|forward| self.forward_peer(forward)) else {
            return;
        };
        if let Some(peer) = cx.peers.get_mut(id) {
            peer.awaited_until = Some(now + DIAL_SOON_LASTS);
        }
        cx.dial_soon(id, now);
    }

    /// Whose turn it is to accept a peer's TCP connections may have changed.
    pub(super) fn wake_listeners(&self, cx: &mut Context, id: PeerId) {
        for (listener, forward) in self.listeners.iter().zip(&cx.config.tcp) {
            if let Some((_, token)) = listener
                && self.peers.get(forward.peer) == Some(&id)
            {
                cx.sources.add(*token, Class::Other, Party::Source(*token));
            }
        }
    }

    /// A port may have connections for this worker.
    pub(super) fn wake_listener(&self, cx: &mut Context, place: usize) {
        if let Some(Some((_, token))) = self.listeners.get(place) {
            cx.sources.add(*token, Class::Other, Party::Source(*token));
        }
    }
}

impl Context {
    /// Whether all peers together may have no more forwards.
    pub(super) fn is_full(&self) -> bool {
        self.hub.streams().forwards() >= self.config.limits.tcp_streams
    }
}
