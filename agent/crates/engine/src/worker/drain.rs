//! Draining: the sessions that peers have dialled are handed over to other exits before the agent stops.
//!
//! ```text
//!   operator ── drain ──► no handshake is answered any more; Leave to every peer that knows it
//!                         dialler: another session beside this one, elsewhere; then closes this one
//!   the bound is over ──► what is still there is closed
//! ```
//!
//! Sessions that this agent has dialled stay: the far end has no other way to it.

use std::time::{Duration, Instant};

use base::ids::PeerId;
use wire::messages::{CloseReason, Features, Message};

use crate::worker::{Worker, context::Context, parts::Sessions, stats::Drained, timer::Timer};

impl Worker {
    /// Accepts no further connection, and asks the peers that have dialled this worker to leave it; `within` bounds the time that
    /// they have. Asked again, the newer bound holds.
    pub(super) fn drain_sessions(&mut self, within: Duration, now: Instant) {
        let Self { cx, sessions, .. } = self;
        if cx.stopping {
            return;
        }
        sessions.control.acceptor.close();
        sessions.refusals.drain();
        if cx.id.index == 0 {
            tracing::info!(?within, "draining: no new peers, and those that are here are asked to leave");
        }
        for id in cx.peers.ids() {
            sessions.ask_to_leave(cx, id);
        }
        cx.timers.arm(Timer::Drained, now + within);
    }
}

impl Sessions {
    /// Asks a peer to leave if this agent drains, the peer has dialled it, and knows what that means.
    pub(super) fn ask_to_leave(&mut self, cx: &Context, id: PeerId) {
        if !self.control.acceptor.is_closed() || cx.stopping {
            return;
        }
        let session = cx.peers.session(id).filter(|session| !session.dialled);
        let able = session.filter(|session| session.hello.features.contains(Features::LEAVE));
        if let Some(session) = able {
            self.control.send(session.handle, &Message::Leave);
        }
    }

    /// Closes the sessions that peers have dialled and not left in time.
    pub(super) fn close_remaining(&mut self, cx: &mut Context, now: Instant) {
        if cx.stopping {
            return;
        }
        for id in cx.peers.ids() {
            let dialled = cx.peers.link(id).is_some_and(|link| link.dialled);
            if dialled {
                continue;
            }
            if cx.peers.session(id).is_some_and(|session| !session.dialled) {
                cx.stats.totals.drain_closed += 1;
                self.end_session(cx, id, Some(CloseReason::Shutdown), now);
            }
            self.end_stream_connections(cx, id, CloseReason::Shutdown, now);
        }
    }

    /// How far this worker has come with draining; nothing if it does not.
    pub(super) fn drained(&self, cx: &Context) -> Drained {
        if !self.control.acceptor.is_closed() {
            return Drained::default();
        }
        let inbound = |id: &PeerId| cx.peers.session(*id).is_some_and(|session| !session.dialled);
        let waiting = cx.peers.ids().filter(inbound).count() as u64;
        Drained { waiting, closed: cx.stats.totals.drain_closed }
    }
}
