//! Sending: control messages to quinn-proto, its packets to the send buffers.

use std::{net::SocketAddr, ops::Deref, time::Instant};

use bytes::Bytes;
use dataplane::lanes::{Lanes, UnderlayId, Underlays};
use net::{Burst, Path, batch::MAX_MESSAGE_BYTES};
use quinn_proto::{Connection, ConnectionHandle, SendDatagramError};
use wire::messages::Message;

use crate::control::{
    congestion::pacing::Congested,
    copies::Copy,
    driver::{Control, ControlConnection, lists::Lists},
};

/// The packets of `mtu` bytes that quinn-proto writes in one call: as many as one send of the kernel carries.
fn segments_of(mtu: usize) -> usize {
    /// Of packets of Ethernet.
    const MOST: usize = 44;
    (MAX_MESSAGE_BYTES / mtu.max(1)).clamp(1, MOST)
}

/// The largest packet that QUIC sends over Ethernet: a larger one may find no room and count as lost.
const MOST_PACKET_BYTES: usize = 1_500;

/// A connection that was looked up in the table, and what sending on it concerns beside it.
pub(crate) struct ConnectionRef<'a> {
    handle: ConnectionHandle,
    connection: &'a mut ControlConnection,
    lists: &'a mut Lists,
    messages_sent: &'a mut u64,
}

impl Deref for ConnectionRef<'_> {
    type Target = ControlConnection;

    fn deref(&self) -> &ControlConnection {
        self.connection
    }
}

impl ConnectionRef<'_> {
    /// Queues a control message; the dialler's first opens the control stream.
    pub(crate) fn send(&mut self, message: &Message) {
        let ControlConnection { control, quinn, listed, .. } = &mut *self.connection;
        if !control.queue(quinn, message) {
            self.lists.overflow(self.handle);
        }
        *self.messages_sent += 1;
        self.lists.touch(self.handle, listed);
    }

    /// The connection, to be changed: the next [`Control::poll`] polls it.
    pub(crate) fn touched(&mut self) -> &mut ControlConnection {
        self.lists.touch(self.handle, &mut self.connection.listed);
        self.connection
    }

    /// quinn-proto's connection, unless it is over.
    pub(crate) fn open(&mut self) -> Option<&mut Connection> {
        let connection = self.touched();
        (!connection.is_over()).then_some(&mut connection.quinn)
    }

    /// Hands quinn-proto one frame of standard mode; `counted` if it carries a datagram, which is settled then.
    ///
    /// # Errors
    /// quinn-proto's; the frame is then not taken.
    pub(crate) fn send_frame(&mut self, data: Bytes, counted: bool) -> Result<(), SendDatagramError> {
        let len = data.len();
        self.open().ok_or(SendDatagramError::Disabled)?.datagrams().send(data, false)?;
        self.connection.ahead.push(len, counted);
        Ok(())
    }

    pub(crate) fn ping(&mut self) {
        if let Some(quinn) = self.open() {
            quinn.ping();
        }
    }

    /// Whether it was polled since the last call: else nothing was sent or received on it.
    pub(crate) fn take_changed(&mut self) -> bool {
        self.connection.counted.take_for_liveness()
    }
}

impl Control {
    /// Looks a connection up, to read it and send on it.
    pub(crate) fn resolve(&mut self, handle: ConnectionHandle) -> Option<ConnectionRef<'_>> {
        let connection = self.connections.get_mut(&handle)?;
        Some(ConnectionRef {
            handle,
            connection,
            lists: &mut self.lists,
            messages_sent: &mut self.stats.messages_sent,
        })
    }

    /// Queues a control message on a connection.
    pub fn send(&mut self, handle: ConnectionHandle, message: &Message) {
        if let Some(mut connection) = self.resolve(handle) {
            connection.send(message);
        }
    }

    /// Notes that a packet of this size on the path to `destination` was too large for the interface.
    pub fn packet_refused(
        &mut self,
        underlay: UnderlayId,
        destination: SocketAddr,
        bytes: usize,
        now: Instant,
    ) {
        let is_it = |it: &&mut Box<ControlConnection>| {
            it.underlay == underlay && it.path().destination == destination
        };
        if let Some(connection) = self.connections.values_mut().find(is_it) {
            connection.path_watch.narrow_mut().refused(bytes, now);
        }
    }

    pub(super) fn transmit(
        &mut self,
        connection: &mut ControlConnection,
        lanes: &mut Lanes,
        underlays: &mut Underlays,
        now: Instant,
    ) {
        self.send_copies(connection, lanes, underlays, now);
        // Packets stay in quinn-proto until the socket or the reserve of its send buffer has room for them.
        let mtu = usize::from(connection.quinn.current_mtu());
        while underlays.takes_own(connection.underlay, mtu.max(MOST_PACKET_BYTES)) {
            self.scratch.clear();
            let room = if underlays.is_blocked(connection.underlay) { 1 } else { segments_of(mtu) };
            let Some(most) = connection.pace.packets(&connection.quinn, room, now) else { return };
            let received = connection.inbound.counts().copies;
            connection.copies.before_packet(&connection.quinn, received, now);
            let transmit = connection.quinn.poll_transmit(now, most, &mut self.scratch);
            let Some(transmit) = transmit.or_else(|| {
                // Acknowledgements that quinn-proto holds back while data waits for the window.
                connection.pace.lift(&connection.quinn, now)?;
                let transmit = connection.quinn.poll_transmit(now, 1, &mut self.scratch);
                connection.pace.lower();
                transmit
            }) else {
                connection.pace.has_sent_all();
                connection.settle_ahead(0, 1, &mut self.settlements);
                return;
            };
            let probes = transmit.segment_size.is_none()
                && transmit.size > usize::from(connection.quinn.current_mtu());
            if probes && self.is_futile(connection, transmit.size) {
                // It counts as a lost probe, which costs nobody anything.
                continue;
            }
            connection.pace.sent(&connection.quinn, &transmit, now);
            if connection.forwards.answers().take_second() {
                connection.quinn.ping();
            }
            let ecn = transmit.ecn.map_or(0, |codepoint| codepoint as u8);
            let path = Path { destination: transmit.destination, source: transmit.src_ip, tos: ecn };
            let segment = transmit.segment_size.unwrap_or(transmit.size).max(1);
            let burst = Burst { path, bytes: &self.scratch[..transmit.size], segment };
            connection.path_watch.narrow_mut().sent(segment.min(transmit.size), now);
            let refused = underlays.packets(lanes, connection.underlay, &burst, now) as u64;
            if probes {
                // What joined it would take it past devices that drop it when it is alone.
                underlays.end_message(connection.underlay);
            }
            self.stats.packets_blocked += refused;
            let all = transmit.size.div_ceil(segment) as u64;
            self.stats.quic_packets += all;
            connection.settle_ahead(refused, all, &mut self.settlements);
            if all == 1 && refused == 0 && connection.lifetime.is_session() && !connection.is_over() {
                let Congested { in_flight, rate } = connection.pace.congested();
                connection.copies.sent(&connection.quinn, burst.bytes, path, in_flight, rate, now);
            }
        }
    }

    /// Whether a probe of the path's MTU with `bytes` bytes is for a size that the path has been found not to carry. quinn-proto
    /// searches by halves, three probes each, whatever our lanes know.
    fn is_futile(&self, connection: &ControlConnection, bytes: usize) -> bool {
        let proved = connection.identity.peer().and_then(|peer| self.proved.get(&peer));
        proved.is_some_and(|proved| bytes > *proved)
    }

    /// Sends the packets again whose time has come.
    fn send_copies(
        &mut self,
        connection: &mut ControlConnection,
        lanes: &mut Lanes,
        underlays: &mut Underlays,
        now: Instant,
    ) {
        while let Some(Copy { path, packet, .. }) = connection.copies.take_due(now) {
            // Not to where the peer, or this host, no longer is.
            let is_current = path.destination == connection.quinn.remote_address()
                && path.source == connection.quinn.local_ip();
            if !is_current || underlays.is_blocked(connection.underlay) {
                continue;
            }
            connection.pace.sent_copy(&connection.quinn, packet.len(), now);
            let burst = Burst { path, bytes: &packet, segment: packet.len() };
            // A copy that finds no room is missed by nobody.
            let _refused = underlays.packets(lanes, connection.underlay, &burst, now);
        }
    }
}
