//! TCP forwards that wait for the peer are traffic that waits: an unresponsive peer is found by what they send, and dialled as often
//! as for datagrams.

use std::time::Instant;

use base::ids::PeerId;
use quinn_proto::ConnectionHandle;

use crate::worker::{context::Context, dial::DIAL_SOON_LASTS, parts::Sessions};

impl Sessions {
    /// Has the lanes asked whether the peer lives, after quinn-proto has probed in vain on a connection that carries forwards. While
    /// nothing else is sent, the lanes could not tell before the next keepalive.
    pub(super) fn look_after_forwards(&mut self, cx: &mut Context, handle: ConnectionHandle) {
        if self.control.probes_in_vain(handle)
            && let Some(id) = self.peer_of(handle)
            && cx.forwards_on(id, handle).is_some_and(|forwards| *forwards > 0)
        {
            cx.ping_lanes(id);
        }
    }

    /// Once a second while a peer is unresponsive: has it dialled soon if bytes of forwards at this worker wait for it.
    pub(super) fn await_for_forwards(&self, cx: &mut Context, id: PeerId, now: Instant) {
        let Some(peer) = cx.peers.get_mut(id).filter(|peer| peer.tcp_streams > 0) else { return };
        let control = peer.session.as_ref().map(|session| (session.handle, session.forwards));
        let streams = peer.streams.all.iter().map(|stream| (stream.handle, stream.forwards));
        let mut carriers = control.into_iter().chain(streams).filter(|(_, forwards)| *forwards > 0);
        if carriers.any(|(handle, _)| self.control.forwards_wait(handle)) {
            peer.awaited_until = Some(now + DIAL_SOON_LASTS);
            cx.dial_soon(id, now);
        }
    }
}
