//! What TCP forwards ask of their connection: streams, room for what waits, whether what they sent is acknowledged.

use std::time::Instant;

use dataplane::forward::tcp::Order;
use quinn_proto::{Connection, ConnectionHandle, Dir, StreamId};

use crate::control::{
    driver::{Control, Later},
    streams_told::{Said, StreamsTold},
    windows::Windows,
};

impl Control {
    /// Sets the limit on concurrent TCP forwards that the far end opens on a connection.
    pub fn set_most_forwards(&mut self, handle: ConnectionHandle, most: u32) {
        if let Some(connection) = self.open_mut(handle) {
            connection.most_forwards = most;
            connection.grant_streams();
        }
    }

    /// Whether a stream can be opened now: [`Control::open_stream`] will.
    pub fn has_stream(&mut self, handle: ConnectionHandle) -> bool {
        let Some(connection) = self.open_mut(handle) else { return false };
        connection.spare = connection.spare.or_else(|| connection.quinn.streams().open(Dir::Bi));
        connection.spare.is_some()
    }

    /// Opens a stream, if the far end lets us.
    pub fn open_stream(&mut self, handle: ConnectionHandle) -> Option<StreamId> {
        self.has_stream(handle).then(|| self.connections.get_mut(&handle)?.spare.take()).flatten()
    }

    /// Accepts the oldest stream that the far end opened for a TCP forward, with what the far end has said of it already.
    pub fn accept(&mut self, handle: ConnectionHandle) -> Option<(StreamId, Said)> {
        let connection = self.open_mut(handle)?;
        let stream = connection.quinn.streams().accept(Dir::Bi)?;
        Some((stream, connection.streams_told.accepted(stream)))
    }

    /// Leaves the other streams that the far end opened for a later turn, at `at`; [`Event::Opened`](super::Event::Opened) comes again then.
    pub fn accept_later(&mut self, handle: ConnectionHandle, at: Instant, now: Instant) {
        let turn = self.turn;
        if let Some(connection) = self.get_mut(handle) {
            connection.streams = Some(Later { at, turn: turn + 1 });
            if at <= now && !std::mem::replace(&mut connection.has_more, true) {
                self.unread.push(handle);
            }
        }
    }

    /// What is said of streams to the far end, and what it has said of some that were not accepted yet.
    pub fn streams_told(&mut self, handle: ConnectionHandle) -> Option<&mut StreamsTold> {
        self.open_mut(handle).map(|connection| &mut connection.streams_told)
    }

    /// quinn-proto's connection, and the order in which its streams send.
    pub fn streams(&mut self, handle: ConnectionHandle) -> Option<(&mut Connection, &mut Order)> {
        self.open_mut(handle).map(|connection| (&mut connection.quinn, &mut connection.order))
    }

    /// A forward has passed on `delivered` bytes of the far end; `stalled` says whether its reader has stopped, if that has changed.
    pub fn forward_moved(&mut self, handle: ConnectionHandle, delivered: u64, stalled: Option<bool>) {
        if let Some(windows) =
            self.connections.get_mut(&handle).and_then(|connection| connection.windows.as_mut())
        {
            windows.delivered(delivered);
            if let Some(stopped) = stalled {
                windows.stalled(stopped);
            }
        }
    }

    /// A forward has handed bytes of its client, or of its service, to a connection.
    pub fn forward_sent(&mut self, handle: ConnectionHandle, now: Instant) {
        if let Some(connection) = self.connections.get_mut(&handle) {
            connection.answers.sent(now);
        }
    }

    /// Whether bytes of forwards wait for an acknowledgement on a connection.
    #[must_use]
    pub fn forwards_wait(&self, handle: ConnectionHandle) -> bool {
        self.open(handle).is_some_and(|connection| connection.answers.wait(connection.quinn.rtt()))
    }

    /// Whether quinn-proto has just probed again after a probe that was not acknowledged, on a connection that forwards have used.
    pub fn probes_in_vain(&mut self, handle: ConnectionHandle) -> bool {
        self.open_mut(handle).is_some_and(|connection| connection.answers.take_in_vain())
    }

    /// Notes that a forward was ended so that others go on.
    pub fn made_room(&mut self, handle: ConnectionHandle) {
        let Some(connection) = self.open_mut(handle) else { return };
        if let Some(change) = connection.windows.as_mut().map(Windows::made_room) {
            connection.set_windows(change);
        }
    }

    /// Has the connections polled whose windows may be larger than needed, so that those of idle ones shrink, too.
    pub fn look_at_windows(&mut self) {
        for handle in self.handles() {
            let windows = self.connections.get(&handle).and_then(|connection| connection.windows.as_ref());
            if windows.is_some_and(Windows::is_waiting) {
                self.touch(handle);
            }
        }
    }
}
