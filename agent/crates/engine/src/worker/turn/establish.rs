//! A connection becomes its peer's session.

use std::time::Instant;

use quinn_proto::ConnectionHandle;
use wire::messages::Hello;

use crate::worker::turn::Worker;

impl Worker {
    /// Makes a connection its peer's session after the peer's hello, unless another connection stays.
    pub(super) fn establish(&mut self, handle: ConnectionHandle, hello: Hello, now: Instant) {
        let Self { cx, data, sessions, host, .. } = self;
        let Some(agreed) = sessions.agree(cx, handle, hello, now) else { return };
        sessions.begin(cx, data, host, handle, &agreed, now);
        self.settle_effects(now);
        let Self { cx, sessions, tunnel, .. } = self;
        let (id, drains) = (agreed.peer, sessions.drains());
        if !sessions.conn(cx, id).is_some_and(|mut conn| conn.broadcast_budget()) {
            tunnel.budget_changed(cx, id, now);
        }
        tunnel.note_receiver(cx, id);
        // What was shown may be outdated: an operator changed the keys meanwhile.
        sessions.keys_changed(cx, id, now);
        if let Some(mut conn) = sessions.conn(cx, id) {
            for index in (0..agreed.wanted).filter(|_| agreed.dialled) {
                conn.ask_for_lane(index, now);
            }
            // Its handshake was under way when the drain began.
            if drains {
                conn.ask_to_leave();
            }
            // Our services may have changed since our hello was sent.
            conn.offer_services();
            conn.tell_packet_repair(false);
            conn.warn_of_missing_repair(now);
            conn.warn_of_missing_clients(now);
        }
        cx.warn_of_missing_services(id, now);
        tunnel.warn_of_missing_tunnel(cx, id, now);
        // Datagrams of a client without lanes may have overtaken its hello.
        self.plain_datagrams(handle, now);
    }
}
