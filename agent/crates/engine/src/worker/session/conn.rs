//! The session of a peer in hand, looked up once for each event on it.

use std::time::Instant;

use base::ids::{PeerId, SessionRef};
use dataplane::peer::{Link, PeerData};
use quinn_proto::ConnectionHandle;
use wire::{cid::ConnectionIds, messages::Message};

use crate::{
    control::{connections::StreamConnections, dial::Dialler, driver::ConnectionRef},
    hub::{ToOwner, WorkerMessage},
    peer::{Peer, Session, Throttles},
    worker::{
        context::{Beside, Context},
        session::Sessions,
    },
};

/// A session that this worker owns, its control connection, and what events on it concern beside them.
pub(crate) struct Conn<'a> {
    pub(super) data: &'a mut PeerData,
    pub(super) session: &'a mut Session,
    pub(super) control: ConnectionRef<'a>,
    pub(super) dialler: &'a Dialler,
    pub(super) streams: &'a mut StreamConnections,
    pub(super) throttles: &'a mut Throttles,
    pub(super) ids: &'a mut ConnectionIds,
    pub(super) cx: Beside<'a>,
}

impl Sessions {
    /// The session with a peer, if this worker owns it.
    pub(crate) fn conn<'a>(&'a mut self, cx: &'a mut Context, id: PeerId) -> Option<Conn<'a>> {
        let (peers, cx) = cx.split();
        let Peer { data, session, dialler, streams, throttles, .. } = peers.get_mut(id)?;
        let session = session.as_mut()?;
        let control = self.control.resolve(session.handle)?;
        Some(Conn { data, session, control, dialler, streams, throttles, ids: &mut self.ids, cx })
    }

    /// The session whose control connection is `handle`.
    pub(super) fn conn_on<'a>(
        &'a mut self,
        cx: &'a mut Context,
        handle: ConnectionHandle,
    ) -> Option<Conn<'a>> {
        let id = self.peer_of(handle)?;
        self.conn(cx, id).filter(|conn| conn.session.handle == handle)
    }

    /// Handles what another worker says of a session, unless that was replaced.
    pub(crate) fn told(&mut self, cx: &mut Context, of: SessionRef, what: ToOwner, now: Instant) {
        let Some(mut conn) = self.conn(cx, of.peer).filter(|conn| conn.session.id == of.session) else {
            return;
        };
        match what {
            ToOwner::End(reason) => self.end_session(cx, of.peer, Some(reason), now),
            ToOwner::StreamsWanted if conn.session.agreed.dialled => {
                self.peer_wants_streams(cx, of.peer, now);
            }
            ToOwner::StreamsWanted => conn.control.send(&Message::StreamsWanted),
            ToOwner::Challenged => conn.address_suspect(now),
            ToOwner::ListenerMoved => conn.listener_moved(),
            ToOwner::Heard => conn.heard(),
            ToOwner::Lane(opening, event) => conn.lane_event(opening, event, now),
            ToOwner::Line(line, event) => conn.line_event(line, event, now),
        }
    }
}

impl Conn<'_> {
    /// The name by which messages between workers refer to it.
    pub(super) fn of(&self) -> SessionRef {
        SessionRef { peer: self.data.id, session: self.session.id }
    }

    pub(super) fn name(&self) -> &str {
        &self.data.config.name
    }

    /// The link that this worker, too, has to the peer.
    pub(super) fn link(&mut self) -> Option<&mut Link> {
        self.data.link.as_mut().filter(|link| link.session == self.session.id)
    }

    /// Pings the peer on all lanes.
    pub(super) fn ask_for_life(&mut self) {
        let of = self.of();
        self.cx.broadcast(|| WorkerMessage::AskForLife { of });
    }
}
