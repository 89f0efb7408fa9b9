//! Connections of QUIC are charged to the line that they are on.

use std::time::Instant;

use base::ids::PeerId;
use quinn_proto::ConnectionHandle;

use crate::worker::{
    context::Context,
    session::{Sessions, stream_connections::handles},
};

impl Sessions {
    /// Charges each connection of a peer with several lines, at this worker, to the account of the line that it is on.
    pub(crate) fn follow_line_rates(&mut self, cx: &Context, id: PeerId, now: Instant) {
        if cx.peers.get(id).is_none_or(|peer| peer.data.relay.line_queues.is_empty()) {
            return;
        }
        let rates = cx.hub.rates(id);
        let control = cx.peers.session(id).map(|session| session.handle);
        for handle in control.into_iter().chain(handles(cx, id)) {
            let line = self.line_of(cx, id, handle);
            self.control.set_line(handle, line, &rates, now);
        }
    }

    /// The line of a connection: that of our socket, or, if the peer has dialled, that of the lanes from the same address.
    fn line_of(&self, cx: &Context, id: PeerId, handle: ConnectionHandle) -> Option<u8> {
        let connection = self.control.get(handle)?;
        let of_socket = cx.sockets.underlays.get(connection.underlay)?.line;
        of_socket.or_else(|| {
            let remote = connection.path().destination.ip();
            let link = cx.peers.link(id)?;
            let mut lanes = link.pool.lanes().filter_map(|lane| cx.sockets.lanes.get(lane));
            lanes.find(|slot| slot.path().is_some_and(|path| path.destination.ip() == remote))?.line
        })
    }
}
