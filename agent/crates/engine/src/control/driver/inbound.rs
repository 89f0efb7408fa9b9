//! The input of quinn-proto and from it: datagrams in order, its events, and the messages of the control stream.

use std::{sync::Arc, time::Instant};

use gate::{numbers::PacketNumbers, suite::packet_numbers, tls::peer_key};
use quinn_proto::{Connection, ConnectionEvent, ConnectionHandle, Event as QuinnEvent, StreamEvent};
use wire::cid::CONNECTION_ID_BYTES;

use crate::control::{
    driver::{Control, ControlConnection, Event},
    in_order::{Buffered, InOrder, Overtaking, Releases},
    inward::Pulled,
    windows::StreamMemory,
};

/// The memory that a held datagram takes beside its bytes: quinn-proto's event, its place in the map, and what the allocator adds.
const HELD_BYTES: usize = 384;

/// A datagram of which quinn-proto's endpoint made `event`.
pub(super) struct Received<'a> {
    pub(super) bytes: &'a [u8],
    pub(super) event: ConnectionEvent,
    pub(super) arrived: Instant,
}

/// Received packets on their way to quinn-proto.
#[derive(Default)]
pub(super) struct Inbound {
    in_order: InOrder<ConnectionEvent>,
    /// The numbers of the far end's packets, once the handshake is complete.
    numbers: Option<Arc<PacketNumbers>>,
}

impl Inbound {
    /// Takes a datagram: at once, or once those before it have come. Returns whether datagrams that waited are left to the next turn.
    pub(super) fn receive(
        &mut self,
        quinn: &mut Connection,
        received: Received<'_>,
        memory: &StreamMemory,
        releases: &mut Releases,
    ) -> bool {
        let Received { bytes, event, arrived } = received;
        let before = self.in_order.held_bytes();
        let number = match &self.numbers {
            Some(numbers) if self.in_order.needs_numbers() => {
                numbers.read(bytes, CONNECTION_ID_BYTES, self.in_order.expected())
            }
            Some(_) | None => None,
        };
        let (held, most) = (HELD_BYTES + bytes.len(), memory.most_out_of_order());
        if let Some(event) = self.in_order.admit(event, number, arrived, held, most) {
            self.pass(quinn, event, arrived);
        }
        let has_more = self.pass_held(quinn, releases);
        memory.hold(before, self.in_order.held_bytes());
        has_more
    }

    /// Takes the datagrams that have waited for others for long enough; returns whether some are left to the next turn.
    pub(super) fn receive_held(
        &mut self,
        quinn: &mut Connection,
        is_over: bool,
        now: Instant,
        memory: &StreamMemory,
        releases: &mut Releases,
    ) -> bool {
        if !self.in_order.needs_numbers() {
            return false;
        }
        let before = self.in_order.held_bytes();
        self.in_order.bound_patience(quinn.rtt());
        if is_over {
            self.in_order.turn_off();
        }
        self.in_order.give_up(now);
        let has_more = self.pass_held(quinn, releases);
        memory.hold(before, self.in_order.held_bytes());
        has_more
    }

    fn pass_held(&mut self, quinn: &mut Connection, releases: &mut Releases) -> bool {
        while self.in_order.has_due() {
            if !releases.take() {
                return true;
            }
            if let Some(Buffered { packet, arrived, .. }) = self.in_order.pop_due() {
                self.pass(quinn, packet, arrived);
            }
        }
        self.in_order.has_released();
        false
    }

    fn pass(&mut self, quinn: &mut Connection, event: ConnectionEvent, arrived: Instant) {
        quinn.handle_event(event);
        if let Some(number) = self.numbers.as_ref().and_then(|numbers| numbers.take_opened()) {
            self.in_order.opened(number, arrived);
        }
    }

    /// Lets no packet wait for others any more.
    pub(super) fn turn_off(&mut self) {
        self.in_order.turn_off();
    }

    /// When [`Inbound::receive_held`] is to be called.
    pub(super) fn deadline(&self) -> Option<Instant> {
        self.in_order.deadline()
    }

    pub(super) fn counts(&self) -> Overtaking {
        self.in_order.counts
    }

    pub(super) fn end(&self, memory: &StreamMemory) {
        memory.hold(self.in_order.held_bytes(), 0);
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
        self.events.begin();
        while let Some(event) = connection.quinn.poll() {
            match event {
                QuinnEvent::Connected => {
                    connection.inbound.numbers = packet_numbers(connection.quinn.crypto_session());
                    if let Some(key) = peer_key(connection.quinn.crypto_session()) {
                        self.events.push(handle, Event::Connected { key });
                    }
                }
                QuinnEvent::ConnectionLost { reason } => {
                    self.acceptor.end(handle);
                    connection.end(&mut self.settlements);
                    self.events.push(handle, Event::Lost(reason));
                }
                QuinnEvent::Stream(event) => self.stream_event(handle, connection, event),
                QuinnEvent::DatagramReceived => self.events.push(handle, Event::Datagrams),
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
                if connection.control.accept(&mut connection.quinn) {
                    self.read_control(handle, connection);
                }
                if connection.forwards.opened(&mut connection.quinn) {
                    self.events.push(handle, Event::Opened);
                }
            }
            StreamEvent::Readable { id } if connection.control.is(id) => {
                self.read_control(handle, connection)
            }
            StreamEvent::Writable { id } if connection.control.is(id) => connection.write_control(),
            StreamEvent::Readable { id }
            | StreamEvent::Writable { id }
            | StreamEvent::Finished { id }
            | StreamEvent::Stopped { id, .. } => self.events.stream(handle, id),
            StreamEvent::Available { .. } => self.events.push(handle, Event::MoreStreams),
        }
    }

    fn read_control(&mut self, handle: ConnectionHandle, connection: &mut ControlConnection) {
        let flooded = |excess| self.events.push(handle, Event::Flooded(excess));
        connection.control.read(&mut connection.quinn, flooded);
        self.take_messages(handle, connection);
    }

    /// Takes the messages of a connection, as many as a turn allows.
    pub(super) fn take_messages(&mut self, handle: ConnectionHandle, connection: &mut ControlConnection) {
        while !connection.is_over()
            && let Some(Pulled { message, units }) = connection.control.pull(self.turn)
        {
            let event = match message {
                Ok(message) => {
                    self.stats.messages_received += 1;
                    Event::Message { message, units }
                }
                Err(error) => Event::Violation { error, units },
            };
            self.events.push(handle, event);
        }
        if !connection.is_over() && connection.control.has_more() {
            self.lists.defer(handle, &mut connection.listed);
        }
    }
}
