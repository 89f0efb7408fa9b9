//! Two agents that use one key: what the listener says of them, and what the one that was replaced does.

use std::time::Instant;

use base::ids::PeerId;
use quinn_proto::ConnectionHandle;
use wire::messages::CloseReason;

use crate::{
    hub::{Connected, Contender},
    worker::{context::Context, session::Sessions},
};

/// Causes for an operator to check when another connection took the place of a session, and this agent made none.
const OUSTED: &[&str] = &[
    "another agent uses this agent's key: a cloned machine, or a copied key file. Each agent needs a key of its own: remove \
     identity.key_file on one of them, `culvert init` or `culvert keygen` there, and `culvert peer add` at the peer (key)",
];

impl Context {
    /// Notes that a session that a peer dialled took the place of another, and warns of two agents with the peer's key.
    pub(crate) fn note_replaced(&mut self, old: &Connected, new: &Connected, now: Instant) {
        if old.dialled || new.dialled {
            return;
        }
        let end = |of: &Connected| Some(Contender { instance: of.hello.instance, address: of.remote? });
        let Some((from, to)) = end(old).zip(end(new)) else { return };
        let Some(contested) = self.hub.note_replaced(new.peer, from, to, now) else { return };
        self.stats.totals.sessions_contested += 1;
        let Some(peer) = self.peers.get_mut(new.peer) else { return };
        let [one, other] = contested.addresses;
        throttled!(
            warn, peer.throttles.contested.allow(now), { peer = &**peer.name(), %one, %other },
            "two agents use the key of this peer, and take each other's place (remedy: a key of its own for each: remove \
             identity.key_file on one of them, culvert init there, and culvert peer add here)"
        );
    }
}

impl Sessions {
    /// Whether another agent has taken the place of the session on `handle` at the far end: it closes the session because of a newer
    /// connection, and we have none.
    pub(crate) fn is_ousted(
        &self,
        cx: &Context,
        id: PeerId,
        handle: ConnectionHandle,
        why: Option<CloseReason>,
    ) -> bool {
        let Some(session) = cx.peers.session(id).filter(|session| session.handle == handle) else {
            return false;
        };
        let newer = |connection: &crate::control::driver::ControlConnection| {
            connection.identity.peer() == Some(id)
                && connection.identity.stream_number().is_none()
                && !connection.is_over()
        };
        let mut others = self.control.handles().into_iter().filter(|other| *other != handle);
        why == Some(CloseReason::Replaced)
            && session.agreed.dialled
            && !session.leaving
            && !others.any(|other| self.control.get(other).is_some_and(newer))
    }
}

impl Context {
    /// Says that another agent has probably taken the place of our session.
    pub(crate) fn report_ousted(&mut self, id: PeerId, now: Instant) {
        let Some(peer) = self.peers.get_mut(id) else { return };
        peer.reach.fail("closed by the peer: replaced by a connection that is not ours", OUSTED, now);
        throttled!(
            warn,
            peer.throttles.contested.allow(now),
            { peer = &**peer.name() },
            "the peer has replaced our session by a connection that is not ours (remedy: a key of its own for each agent). Likely cause: {}",
            OUSTED.join("; ")
        );
    }
}
