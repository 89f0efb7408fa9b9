//! Control connections: their events and messages.

use std::time::Instant;

use base::ids::PeerId;
use dataplane::datapath::work::PER_TURN;
use gate::refusals::Why;
use quinn_proto::{ConnectionHandle, Side};
use wire::messages::{self, CloseReason, Join, Message};

use crate::{
    control::{TooMuch, connections::EarlyJoin, driver::Event},
    worker::{
        context::timer::Timer,
        report::stats::Ceiling,
        session::stream_connections::{EARLY_JOIN_TIMEOUT, MOST_EARLY, waits},
        turn::Worker,
    },
};

impl Worker {
    /// Returns the peer that has `key`; in open mode a new peer, if no peer has the key.
    pub(crate) fn peer_behind(&mut self, key: &[u8; 32], now: Instant) -> Result<PeerId, CloseReason> {
        let id = match self.cx.registry.peer_of(key) {
            Some(id) => id,
            None if self.cx.registry.is_open() => {
                self.cx.registry.admit(*key).map_err(|_| CloseReason::LimitReached)?
            }
            None => return Err(CloseReason::KeyRemoved),
        };
        if !self.cx.knows(id, key) {
            // The message that adds the peer has been sent and not been read.
            self.read_messages(now);
        }
        if self.cx.knows(id, key) { Ok(id) } else { Err(CloseReason::KeyRemoved) }
    }

    /// Polls the control connections until they have no more events.
    pub(crate) fn poll_control(&mut self, now: Instant) {
        self.data.notes.work.begin_share(PER_TURN);
        self.take_waiting_plain(now);
        self.take_plain(now);
        loop {
            let Self { cx, data, sessions, .. } = self;
            let moved = data.send_plain(cx, sessions, now);
            let mut events = sessions.poll(cx, now);
            let quiet = events.is_empty();
            self.cx.stats.work.events(&events);
            for (handle, event) in events.drain(..) {
                self.control_event(handle, event, now);
                self.settle_effects(now);
            }
            self.sessions.reuse(events);
            self.tcp.pump_stirred(&mut self.cx, &mut self.sessions, now);
            // Frames that quinn-proto has sent have made room for more.
            if quiet && !moved {
                break;
            }
        }
        self.tunnel.write_for_users(self.sessions.control.guests.device.as_ref());
    }

    fn control_event(&mut self, handle: ConnectionHandle, event: Event, now: Instant) {
        let Self { cx, sessions, tcp, .. } = self;
        match event {
            Event::Connected { key } => self.connected(handle, &key, now),
            Event::Message { message, units } => {
                if sessions.charge(cx, handle, units, now) {
                    self.message(handle, message, now);
                }
            }
            Event::Violation { error, units } => {
                if sessions.charge(cx, handle, units, now) {
                    sessions.control_violation(cx, handle, &error, now);
                }
            }
            Event::Opened => tcp.streams_opened(cx, sessions, handle, now),
            Event::Stream(stream) => tcp.stream_ready(handle, stream),
            Event::Lost(reason) => sessions.connection_lost(cx, handle, &reason, now),
            Event::Mtu => sessions.mtu_changed(cx, handle),
            Event::Moved { from, to } => sessions.control_moved(cx, handle, from, to, now),
            Event::Datagrams => self.plain_datagrams(handle, now),
            Event::Crowded => tcp.crowded(cx, sessions, handle, now),
            Event::Starved => tcp.end_longest_stopped(cx, sessions, handle, now),
            Event::Overflow => sessions.overflowed(cx, handle, now),
            Event::Flooded(TooMuch::OfConnection) => {
                sessions.flooded(cx, handle, Ceiling::ControlMessages, now);
            }
            Event::Flooded(TooMuch::OfAll) => sessions.flooded(cx, handle, Ceiling::ControlBytes, now),
            Event::MoreStreams => tcp.retry_listeners(cx),
            Event::Drained => sessions.connection_drained(cx, handle, now),
        }
    }

    /// Handles a completed handshake: finds the peer that proved `key`, or closes the connection.
    fn connected(&mut self, handle: ConnectionHandle, key: &[u8; 32], now: Instant) {
        self.sessions.admission_ended(handle);
        // The limit may have changed since the endpoint was made.
        self.sessions.control.set_most_forwards(handle, self.cx.config.limits.tcp_streams_per_peer);
        if self.cx.identity.is_own(key) {
            throttled!(
                warn,
                self.cx.logs.violation.allow(now),
                "this agent reached itself (remedy: an endpoint in the configuration is its own, take it out)"
            );
            self.sessions.close_connection(&mut self.cx, handle, CloseReason::SelfConnect, now);
            return;
        }
        let Some(connection) = self.sessions.control.open(handle) else { return };
        let (side, dialled) = (connection.side(), connection.identity.peer());
        let found = match dialled {
            Some(id) if self.cx.knows(id, key) => Ok(id),
            Some(_) => Err(CloseReason::KeyRemoved),
            None => self.peer_behind(key, now),
        };
        let Self { cx, sessions, tunnel, .. } = self;
        let peer = match found {
            Ok(peer) => peer,
            Err(reason) => {
                if reason == CloseReason::LimitReached {
                    sessions.note_refusal(handle, Why::OpenPeers, now);
                }
                sessions.close_connection(cx, handle, reason, now);
                return;
            }
        };
        if side == Side::Server && cx.registry.is_paused(peer, now) {
            // Its handshake had begun before it broke the protocol on another connection, or it need not knock.
            sessions.note_refusal(handle, Why::Paused, now);
            sessions.close_connection(cx, handle, CloseReason::LimitReached, now);
            return;
        }
        if side == Side::Client && sessions.stream_connected(cx, handle, peer, key, now) {
            return;
        }
        let (linked, suspect) = (cx.peers.link(peer).is_some(), cx.is_suspect(peer, now));
        if side == Side::Client && linked && !suspect {
            // The suspect session is heard again: it stays, with the TCP forwards on it.
            sessions.close_connection(cx, handle, CloseReason::Replaced, now);
            return;
        }
        let doubtful = suspect && !cx.is_leaving(peer);
        if side == Side::Client && doubtful && sessions.defer_hello(cx, handle, peer, key, now) {
            return;
        }
        if let Some(connection) = sessions.control.get_mut(handle) {
            connection.identity.prove(peer, *key);
        }
        if let Some(state) = cx.peers.get(peer) {
            sessions.control.set_congestion(handle, &state.data.config, cx.hub.rate(peer), now);
        }
        if side == Side::Client {
            let possession = sessions.control.get(handle).and_then(|connection| {
                let exported = connection.exported()?;
                cx.identity.of(connection.identity.own()).sign(&messages::possession(&exported))
            });
            let hello = sessions.hello(cx, tunnel, peer, handle, possession);
            sessions.control.send(handle, &hello);
        }
    }

    /// Checks a suspect session that has had its time to be heard, then completes the connection that was to replace it.
    pub(crate) fn send_deferred_hello(&mut self, handle: ConnectionHandle, now: Instant) {
        let Some(connection) = self.sessions.control.get(handle) else { return };
        let peer = connection.identity.peer();
        if let Some(key) = connection.identity.key_of_held_hello().filter(|_| !connection.is_over()) {
            if let Some(peer) = peer {
                if let Some(mut conn) = self.sessions.conn(&mut self.cx, peer) {
                    conn.check_control(now);
                }
                self.settle_effects(now);
            }
            self.connected(handle, &key, now);
        }
    }

    fn message(&mut self, handle: ConnectionHandle, message: Message, now: Instant) {
        let Self { cx, sessions, tunnel, tcp, .. } = self;
        let Some(connection) = sessions.control.open(handle) else { return };
        let (Some(peer), Some(_), side) =
            (connection.identity.peer(), connection.identity.key(), connection.side())
        else {
            return;
        };
        // Of both kinds of connections.
        if let Message::StreamAbort(aborts) = &message {
            return tcp.streams_aborted(cx, sessions, handle, aborts, now);
        }
        if let Message::StreamCredit { initial, limits } = &message {
            return tcp.streams_limited(cx, sessions, handle, *initial, limits, now);
        }
        if connection.identity.stream_number().is_some() {
            return sessions.stream_message(cx, handle, peer, &message, now);
        }
        if cx.peers.is_session(peer, handle) {
            sessions.session_message(cx, handle, message, now);
        } else if let Message::Hello(hello) = message {
            if sessions.take_hello(cx, tunnel, handle, peer, &hello, now) {
                self.establish(handle, hello, now);
            }
        } else if let Message::Join(join) = message
            && side == Side::Server
        {
            self.join_asked(handle, peer, join, now);
        } else if !sessions.is_left(handle) {
            // It came before the hello, or on a connection that has been replaced. The sender of one that was left does not know yet
            // that we have another session.
            sessions.out_of_order(cx, handle, now);
        }
    }

    /// Handles the request of a connection's dialler to join a session.
    pub(crate) fn join_asked(&mut self, handle: ConnectionHandle, id: PeerId, join: Join, now: Instant) {
        if !self.sessions.is_possessed(&mut self.cx, handle, join.possession.as_ref(), now) {
            return;
        }
        // The message about the session may be among them.
        self.read_messages(now);
        let Some(peer) = self.cx.peers.get_mut(id) else { return };
        if waits(peer, handle) {
            return self.sessions.out_of_order(&mut self.cx, handle, now);
        }
        if peer.streams.early.len() >= MOST_EARLY {
            return self.sessions.close_connection(&mut self.cx, handle, CloseReason::LimitReached, now);
        }
        peer.streams.early.push(EarlyJoin { handle, join });
        self.sessions.take_early_joins(&mut self.cx, id, now);
        if self.cx.peers.get(id).is_some_and(|peer| waits(peer, handle)) {
            self.cx.timers.arm(Timer::Join(handle), now + EARLY_JOIN_TIMEOUT);
        }
    }
}
