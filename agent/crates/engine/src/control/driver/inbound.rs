//! The input of quinn-proto and from it: datagrams in order, its events, and the messages of the control stream.

use std::time::Instant;

use gate::{suite::packet_numbers, tls::peer_key};
use quinn_proto::{ConnectionEvent, ConnectionHandle, Dir, Event as QuinnEvent, Side, StreamEvent};
use wire::cid::CONNECTION_ID_BYTES;

use crate::control::{
    driver::{Control, ControlConnection, Event, Portion, UNITS_PER_TURN},
    in_order::{Held, Releases},
    inward::Pulled,
    windows::StreamMemory,
};

/// The memory that a held datagram takes beside its bytes: quinn-proto's event, its place in the map, and what the allocator adds.
const HELD_BYTES: usize = 384;

impl ControlConnection {
    /// Takes a datagram, of which quinn-proto's endpoint made `event`: at once, or once those before it have come. Returns whether
    /// datagrams that waited are left to the next turn.
    pub(super) fn receive(
        &mut self,
        datagram: &[u8],
        event: ConnectionEvent,
        arrived: Instant,
        memory: &StreamMemory,
        releases: &mut Releases,
    ) -> bool {
        let before = self.in_order.held_bytes();
        let number = match &self.numbers {
            Some(numbers) if self.in_order.needs_numbers() => {
                numbers.read(datagram, CONNECTION_ID_BYTES, self.in_order.expected())
            }
            Some(_) | None => None,
        };
        let (bytes, most) = (HELD_BYTES + datagram.len(), memory.most_out_of_order());
        if let Some(event) = self.in_order.admit(event, number, arrived, bytes, most) {
            self.pass(event, arrived);
        }
        let has_more = self.pass_held(releases);
        memory.hold(before, self.in_order.held_bytes());
        has_more
    }

    /// Takes the datagrams that have waited for others for long enough; returns whether some are left to the next turn.
    pub(super) fn receive_held(
        &mut self,
        now: Instant,
        memory: &StreamMemory,
        releases: &mut Releases,
    ) -> bool {
        if !self.in_order.needs_numbers() {
            return false;
        }
        let before = self.in_order.held_bytes();
        self.in_order.bound_patience(self.quinn.rtt());
        if self.lost {
            self.in_order.turn_off();
        }
        self.in_order.give_up(now);
        let has_more = self.pass_held(releases);
        memory.hold(before, self.in_order.held_bytes());
        has_more
    }

    fn pass_held(&mut self, releases: &mut Releases) -> bool {
        while self.in_order.has_due() {
            if !releases.take() {
                return true;
            }
            if let Some(Held { packet, arrived, .. }) = self.in_order.pop_due() {
                self.pass(packet, arrived);
            }
        }
        self.in_order.has_released();
        false
    }

    fn pass(&mut self, event: ConnectionEvent, arrived: Instant) {
        self.quinn.handle_event(event);
        if let Some(number) = self.numbers.as_ref().and_then(|numbers| numbers.take_opened()) {
            self.in_order.opened(number, arrived);
        }
    }
}

impl Control {
    pub(super) fn exchange_endpoint_events(
        &mut self,
        handle: ConnectionHandle,
        connection: &mut ControlConnection,
    ) {
        while let Some(event) = connection.quinn.poll_endpoint_events() {
            if let Some(answer) = self.endpoint.handle_event(handle, event) {
                connection.quinn.handle_event(answer);
            }
        }
    }

    pub(super) fn read_events(&mut self, handle: ConnectionHandle, connection: &mut ControlConnection) {
        self.named.clear();
        while let Some(event) = connection.quinn.poll() {
            match event {
                QuinnEvent::Connected => {
                    connection.numbers = packet_numbers(connection.quinn.crypto_session());
                    if let Some(key) = peer_key(connection.quinn.crypto_session()) {
                        self.events.push((handle, Event::Connected { key }));
                    }
                }
                QuinnEvent::ConnectionLost { reason } => {
                    self.pending.end(handle);
                    connection.lost = true;
                    connection.copies.cancel();
                    connection.end_ahead(&mut self.settlements);
                    self.events.push((handle, Event::Lost(reason)));
                }
                QuinnEvent::Stream(event) => self.stream_event(handle, connection, event),
                QuinnEvent::DatagramReceived => self.events.push((handle, Event::Datagrams)),
                // The worker offers waiting datagrams in every turn.
                QuinnEvent::HandshakeDataReady | QuinnEvent::DatagramsUnblocked => {}
            }
        }
    }

    fn stream_event(
        &mut self,
        handle: ConnectionHandle,
        connection: &mut ControlConnection,
        event: StreamEvent,
    ) {
        match event {
            StreamEvent::Opened { .. } => {
                // The dialler's first stream is the control stream.
                if connection.control.is_none() && connection.quinn.side() == Side::Server {
                    connection.control = connection.quinn.streams().accept(Dir::Bi);
                    self.read_control(handle, connection);
                }
                // If streams wait for a later turn already, these wait with them.
                if connection.streams.is_none() {
                    self.events.push((handle, Event::Opened));
                }
                connection.grant_streams();
            }
            StreamEvent::Readable { id } if connection.control == Some(id) => {
                self.read_control(handle, connection)
            }
            StreamEvent::Writable { id } if connection.control == Some(id) => connection.write_control(),
            StreamEvent::Readable { id }
            | StreamEvent::Writable { id }
            | StreamEvent::Finished { id }
            | StreamEvent::Stopped { id, .. } => {
                // quinn-proto has an event for each frame.
                if self.named.insert(id) {
                    self.events.push((handle, Event::Stream(id)));
                }
            }
            StreamEvent::Available { .. } => self.events.push((handle, Event::MoreStreams)),
        }
    }

    /// Takes the data that has come on the control stream.
    pub(super) fn read_control(&mut self, handle: ConnectionHandle, connection: &mut ControlConnection) {
        let Some(id) = connection.control else { return };
        let mut stream = connection.quinn.recv_stream(id);
        let Ok(mut chunks) = stream.read(false) else { return };
        while let Ok(Some(chunk)) = chunks.next(usize::MAX) {
            if let Err(excess) = connection.inward.add(chunk.offset, chunk.bytes) {
                self.events.push((handle, Event::Flooded(excess)));
            }
        }
        // Flow control updates are sent anyway: the connection is being polled.
        let _transmit = chunks.finalize();
        self.take_messages(handle, connection);
    }

    /// Takes the messages of a connection, as many as a turn allows.
    pub(super) fn take_messages(&mut self, handle: ConnectionHandle, connection: &mut ControlConnection) {
        let Portion { turn, left } = connection.portion;
        let mut left = if turn == self.turn { left } else { UNITS_PER_TURN };
        while left > 0
            && !connection.lost
            && let Some(Pulled { message, units }) = connection.inward.pull()
        {
            left = left.saturating_sub(units);
            let event = match message {
                Ok(message) => {
                    self.stats.messages_received += 1;
                    Event::Message { message, units }
                }
                Err(error) => Event::Violation { error, units },
            };
            self.events.push((handle, event));
        }
        connection.portion = Portion { turn: self.turn, left };
        let waits = !connection.lost && connection.inward.has_more();
        if waits && !std::mem::replace(&mut connection.has_more, true) {
            self.unread.push(handle);
        }
    }
}
