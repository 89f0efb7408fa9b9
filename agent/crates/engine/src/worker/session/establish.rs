//! A connection becomes the session of its peer.

use std::{sync::Arc, time::Instant};

use dataplane::{lanes::Openings, lines::LineWatch};
use quinn_proto::{ConnectionHandle, Side};
use rand::RngExt;
use wire::messages::{CloseReason, Hello};

use crate::{
    control::{driver::ControlConnection, liveness::Liveness},
    hub::Connected,
    origin::PeerOrigin,
    peer::Session,
    worker::{
        context::Context,
        lanes::LaneHost,
        local::DataPlane,
        session::{Sessions, liveness::counts},
    },
};

impl Sessions {
    /// What both ends agree on, if the connection becomes its peer's session after the peer's hello. If another one stays, or the agent
    /// stops, it is closed.
    pub(crate) fn agree(
        &mut self,
        cx: &mut Context,
        handle: ConnectionHandle,
        hello: Hello,
        now: Instant,
    ) -> Option<Arc<Connected>> {
        if cx.stopping {
            self.close_connection(cx, handle, CloseReason::Shutdown, now);
            return None;
        }
        let connection = self.control.get(handle)?;
        let (peer, key, dialled) =
            (connection.identity.peer()?, connection.identity.key()?, connection.side() == Side::Client);
        let (wanted, lines) = self.wanted_lanes(cx, peer, &hello, dialled);
        let agreed = Arc::new(Connected {
            peer,
            session: cx.hub.name_session(),
            owner: cx.id.index,
            dialled,
            key,
            own: connection.identity.own(),
            // A connection without a name is closing, so no stream connection can join it.
            name: connection.session_name().unwrap_or_else(|| cx.rng.random()),
            software: hello.software.as_str().into(),
            wanted,
            lines: lines.map(Arc::new),
            hello,
            begun: connection.begun(),
            since: now,
            remote: Some(connection.path().destination),
        });
        let suspect = cx.is_suspect(peer, now);
        let Ok(replaced) = cx.hub.establish(&agreed, |old| !suspect && cx.old_session_stays(&agreed, old))
        else {
            throttled!(
                debug,
                cx.debug_lines.allow(now),
                { peer = self.name_of(cx, handle) },
                "a second connection was not needed"
            );
            self.close_connection(cx, handle, CloseReason::Replaced, now);
            return None;
        };
        if let Some(old) = &replaced {
            cx.note_replaced(old, &agreed, now);
        }
        if replaced.is_some_and(|old| old.owner == cx.id.index) {
            self.end_session(cx, peer, Some(CloseReason::Replaced), now);
        }
        Some(agreed)
    }

    /// Makes a connection the session of its peer, and links this worker to the peer.
    pub(crate) fn begin(
        &mut self,
        cx: &mut Context,
        data: &mut DataPlane,
        host: &mut LaneHost,
        handle: ConnectionHandle,
        agreed: &Arc<Connected>,
        now: Instant,
    ) {
        let id = agreed.peer;
        self.control.established(handle, now);
        cx.hub.rates(id).set_granted(None, now);
        let Some(peer) = cx.peers.get_mut(id) else { return };
        let Connected { dialled, wanted, hello, software, remote, .. } = &**agreed;
        let offered: Vec<&str> = hello.services.iter().map(|service| &*service.name).collect();
        let (peer_name, remote) = (&*peer.data.config.name, remote.map(tracing::field::display));
        let software = &**software;
        match peer.origin {
            PeerOrigin::Open => {
                if let Some(suppressed) = cx.debug_lines.allow(now) {
                    tracing::debug!(
                        peer = peer_name,
                        remote,
                        software,
                        suppressed = base::throttle::counted(suppressed),
                        "a guest connected"
                    );
                }
            }
            PeerOrigin::Config | PeerOrigin::State => {
                throttled!(
                    info, peer.throttles.connected.allow(now),
                    { peer = peer_name, remote, software, services = base::throttle::list(offered), dialled, lanes = dialled.then_some(*wanted) },
                    "connected"
                );
            }
        }
        let connection = self.control.get(handle);
        let frames = connection.map(|connection| counts(&connection.quinn().stats())).unwrap_or_default();
        peer.dialler.succeeded(handle);
        peer.session = Some(Session {
            id: agreed.session,
            handle,
            key_exchange: connection.and_then(ControlConnection::key_exchange),
            services: hello.services.clone(),
            proofs: hello.preshared_keys.clone(),
            openings: Openings::new(*wanted).with_lines(agreed.lines.clone()),
            line_watch: LineWatch::default(),
            lines_unheard: 0,
            lines_asked: None,
            agreed: Arc::clone(agreed),
            pinged: now,
            here_sent: None,
            liveness: Liveness::new(frames, now),
            laneless_since: Some(now),
            wants_reports: false,
            forwards: 0,
            leaving: false,
            server: None,
        });
        cx.stats.totals.handshakes.established += 1;
        self.link_up(cx, data, host, agreed, now);
        if let Some(mut conn) = self.conn(cx, id) {
            conn.tell_rate(false);
            conn.ask_for_reports(now);
        }
    }
}
