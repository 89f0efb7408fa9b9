//! A connection becomes its peer's session.

use std::{sync::Arc, time::Instant};

use base::ids::PeerId;
use dataplane::lanes::Openings;
use quinn_proto::{ConnectionHandle, Side};
use rand::RngExt;
use wire::messages::{CloseReason, Hello};

use crate::{
    control::{driver::ControlConnection, liveness::Liveness},
    hub::Connected,
    origin::PeerOrigin,
    peer::Session,
    worker::{session::liveness, turn::Worker},
};

impl Worker {
    /// Makes a connection its peer's session after the peer's hello, unless another connection stays.
    pub(crate) fn establish(
        &mut self,
        id: PeerId,
        handle: ConnectionHandle,
        side: Side,
        key: [u8; 32],
        hello: Hello,
        now: Instant,
    ) {
        let Self { cx, data, sessions, host, .. } = self;
        if cx.stopping {
            sessions.close_connection(cx, handle, CloseReason::Shutdown, now);
            return;
        }
        let dialled = side == Side::Client;
        let wanted = sessions.wanted_lanes(cx, id, &hello, dialled);
        let session = cx.hub.name_session();
        // A connection without a name is closing, so no stream connection can join it.
        let name = sessions.control.get(handle).and_then(ControlConnection::session_name);
        let name = name.unwrap_or_else(|| cx.rng.random());
        let own = sessions.control.get(handle).map(|connection| connection.own).unwrap_or_default();
        let connected = Arc::new(Connected {
            peer: id,
            session,
            owner: cx.id.index,
            dialled,
            key,
            own,
            name,
            hello,
            wanted,
            begun: sessions.control.get(handle).map_or(now, |connection| connection.begun),
            since: now,
            remote: sessions.control.get(handle).map(|connection| connection.path().destination),
        });
        let suspect = cx.is_suspect(id, now);
        let Ok(replaced) =
            cx.hub.establish(&connected, |old| !suspect && cx.old_session_stays(&connected, old))
        else {
            throttled!(
                debug,
                cx.debug_lines.allow(now),
                { peer = sessions.name_of(cx, handle) },
                "a second connection was not needed"
            );
            sessions.close_connection(cx, handle, CloseReason::Replaced, now);
            return;
        };
        if let Some(old) = &replaced {
            cx.note_replaced(old, &connected, now);
        }
        if replaced.is_some_and(|old| old.owner == cx.id.index) {
            sessions.end_session(cx, id, Some(CloseReason::Replaced), now);
        }
        sessions.control.established(handle, now);
        cx.hub.rate(id).set_granted(None, now);
        sessions.ask_for_rate(cx, id, handle);
        let hello = connected.hello.clone();
        let Some(peer) = cx.peers.get_mut(id) else { return };
        let offered: Vec<&str> = hello.services.iter().map(|service| &*service.name).collect();
        let (peer_name, remote) = (&*peer.name, connected.remote.map(tracing::field::display));
        let software = &*hello.software;
        match peer.origin {
            PeerOrigin::Open => {
                if let Some(suppressed) = cx.debug_lines.allow(now) {
                    tracing::debug!(peer = peer_name, remote, software, suppressed, "a guest connected");
                }
            }
            PeerOrigin::Config | PeerOrigin::State => {
                throttled!(
                    info, peer.throttles.connected.allow(now),
                    { peer = peer_name, remote, software, services = base::throttle::list(offered), dialled, lanes = wanted },
                    "connected"
                );
            }
        }
        let openings = Openings::new(wanted);
        let stats = sessions.control.quinn(handle).map(|quinn| quinn.stats());
        let frames = stats.map(|stats| liveness::counts(&stats)).unwrap_or_default();
        let key_exchange = sessions.control.get(handle).and_then(ControlConnection::key_exchange);
        peer.dialler.succeeded(handle);
        peer.session = Some(Session {
            id: session,
            handle,
            dialled,
            software: hello.software.as_str().into(),
            key_exchange,
            hello,
            openings,
            since: now,
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
        sessions.link_up(cx, data, host, &connected, now);
        sessions.ask_for_reports(cx, id, now);
        self.settle_effects(now);
        let Self { cx, sessions, tunnel, .. } = self;
        sessions.begin_budget(cx, tunnel, id, now);
        tunnel.note_receiver(cx, id);
        // What was shown may be outdated: an operator changed the keys meanwhile.
        sessions.keys_changed(cx, id, now);
        if dialled {
            for index in 0..wanted {
                sessions.ask_for_lane(cx, id, index, now);
            }
        }
        // Its handshake was under way when the drain began.
        sessions.ask_to_leave(cx, id);
        // Our services may have changed since our hello was sent.
        sessions.offer_services(cx, id);
        sessions.tell_packet_repair(cx, id, false);
        cx.warn_of_missing_repair(id, now);
        cx.warn_of_missing_services(id, now);
        tunnel.warn_of_missing_tunnel(cx, id, now);
        // Datagrams of a client without lanes may have overtaken its hello.
        self.plain_datagrams(handle, now);
    }
}
