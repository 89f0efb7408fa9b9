//! What the driver tells the worker: what happened on a connection, and counts.

use std::{collections::HashSet, net::SocketAddr};

use quinn_proto::{ConnectionError, ConnectionHandle, StreamId};
use wire::messages::{Message, MessageError};

use crate::control::inward::TooMuch;

/// What happened on a control connection.
#[derive(Debug)]
pub enum Event {
    /// The handshake is complete; the key is the far end's, proved by its certificate.
    Connected { key: [u8; 32] },
    /// A control message came, which costs this many units.
    Message { message: Message, units: u32 },
    /// The far end broke the protocol of the control stream, which costs this many units.
    Violation { error: MessageError, units: u32 },
    /// The far end opened streams for TCP forwards: [`Control::accept`](super::Control::accept) has them.
    Opened,
    /// A stream may have something to read, may take more, or was stopped by the far end.
    Stream(StreamId),
    /// The connection has ended; it is gone after this event, its packets and deadlines are not.
    Lost(ConnectionError),
    /// Plain DATAGRAM frames have come.
    Datagrams,
    /// Path MTU discovery has found another size.
    Mtu,
    /// The far end has moved to another address.
    Moved { from: SocketAddr, to: SocketAddr },
    /// The far end does not read the control messages that wait for it.
    Overflow,
    /// The far end sends more control messages than may wait.
    Flooded(TooMuch),
    /// The far end lets us open more streams.
    MoreStreams,
    /// Readers of forwards have stopped, and the windows have grown by what they hold.
    Crowded,
    /// Readers of forwards have stopped, the far end waits for room beside them, and there is none.
    Starved,
    /// quinn-proto has forgotten the connection: [`Control::remove`](super::Control::remove) is to follow.
    Drained,
}

/// The number of events for which memory is kept: usually more than a turn has.
const SPARE_EVENTS: usize = 256;

/// What the worker is to be told at the end of a poll.
#[derive(Debug, Default)]
pub(super) struct Events {
    list: Vec<(ConnectionHandle, Event)>,
    /// Streams of the connection that is being polled for which there is an event already.
    named: HashSet<StreamId>,
}

impl Events {
    pub(super) fn begin(&mut self) {
        self.named.clear();
    }

    pub(super) fn push(&mut self, handle: ConnectionHandle, event: Event) {
        self.list.push((handle, event));
    }

    /// Something happened to a stream of the connection that is being polled; quinn-proto says so for each frame.
    pub(super) fn stream(&mut self, handle: ConnectionHandle, stream: StreamId) {
        if self.named.insert(stream) {
            self.push(handle, Event::Stream(stream));
        }
    }

    pub(super) fn append_to(&mut self, events: &mut Vec<(ConnectionHandle, Event)>) {
        events.append(&mut self.list);
        self.list.shrink_to(SPARE_EVENTS);
    }
}

/// Counts of the control plane; monotonic.
#[derive(Clone, Copy, Debug, Default)]
pub struct ControlStats {
    pub messages_sent: u64,
    pub messages_received: u64,
    /// The number of handshakes that far ends started.
    pub handshakes_accepted: u64,
    /// Handshakes not begun because too many were under way, or because the first packet was broken.
    pub handshakes_ignored: u64,
    /// Clients without a knock that were asked to prove their address, because many handshakes were under way.
    pub retries_sent: u64,
    /// Packets that quinn-proto would have sent to unauthenticated senders.
    pub answers_suppressed: u64,
    /// Datagrams that belong to no lane and no connection.
    pub unroutable: u64,
    /// Packets that quinn-proto read or made.
    pub quic_packets: u64,
    /// Packets of peers that ask for most, not opened because the worker had fallen behind.
    pub unopened: u64,
    /// Control packets that found no room in the socket.
    pub packets_blocked: u64,
}
