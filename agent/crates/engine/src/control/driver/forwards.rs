//! What TCP forwards have of their connection: streams, room for what waits, whether what they sent is acknowledged.

use std::{sync::Arc, time::Instant};

use dataplane::forward::tcp::Order;
use quinn_proto::{Connection, ConnectionHandle, Dir, StreamId, VarInt};

use crate::control::{
    answers::Answers,
    driver::{Control, ControlConnection, Event},
    streams_told::{Said, StreamsTold},
    transport::{FIRST_STREAMS, streams_for},
    windows::{Change, Shown, StreamMemory, Windows},
};

/// The earliest time and the earliest turn at which something goes on.
#[derive(Clone, Copy, Debug)]
struct Later {
    at: Instant,
    turn: u64,
}

/// The part of a connection that its TCP forwards use.
#[derive(Debug)]
pub(super) struct Forwards {
    /// When streams that the far end opened and that wait are accepted.
    later: Option<Later>,
    /// A stream that was opened and not used: the far end does not know of it.
    spare: Option<StreamId>,
    /// The order in which they send.
    order: Order,
    /// The limit on those that the far end may have open.
    most: u32,
    /// What is to be said about streams, and what was said of some too early.
    told: StreamsTold,
    /// The flow-control windows, once the connection is a session.
    windows: Option<Windows>,
    /// Whether what they send is acknowledged.
    answers: Answers,
}

impl Default for Forwards {
    fn default() -> Self {
        Self {
            later: None,
            spare: None,
            order: Order::default(),
            most: FIRST_STREAMS,
            told: StreamsTold::default(),
            windows: None,
            answers: Answers::default(),
        }
    }
}

impl Forwards {
    pub(super) fn told(&mut self) -> &mut StreamsTold {
        &mut self.told
    }

    pub(super) fn answers(&mut self) -> &mut Answers {
        &mut self.answers
    }

    /// When [`Forwards::take_due`] is to be called.
    pub(super) fn deadline(&self) -> Option<Instant> {
        self.later.map(|later| later.at)
    }

    /// Whether streams that were left for later are to be accepted now; true once.
    pub(super) fn take_due(&mut self, turn: u64, now: Instant) -> bool {
        self.later.take_if(|later| later.at <= now && later.turn <= turn).is_some()
    }

    /// The far end has opened streams: lets it open twice the streams that it has open, within what the operator allows. Returns
    /// whether those that have come may be accepted: if others wait for a later turn already, these wait with them.
    pub(super) fn opened(&mut self, quinn: &mut Connection) -> bool {
        self.grant(quinn);
        self.later.is_none()
    }

    fn grant(&mut self, quinn: &mut Connection) {
        let open = u32::try_from(quinn.streams().remote_open_streams(Dir::Bi)).unwrap_or(u32::MAX);
        let wanted = open.saturating_mul(2).max(FIRST_STREAMS).checked_next_power_of_two();
        let most = streams_for(wanted.unwrap_or(u32::MAX).min(self.most));
        if quinn.max_concurrent_streams(Dir::Bi) != u64::from(most) {
            quinn.set_max_concurrent_streams(Dir::Bi, most);
        }
    }

    /// Begins with the windows of a session.
    pub(super) fn establish(&mut self, quinn: &mut Connection, memory: &Arc<StreamMemory>, now: Instant) {
        let (windows, change) = Windows::new(memory, now);
        self.windows = Some(windows);
        set_windows(quinn, change);
    }

    /// Adapts the windows to what the connection has shown; returns what forwards are to do about others whose readers
    /// have stopped.
    pub(super) fn look_at_windows(&mut self, quinn: &mut Connection, now: Instant) -> Option<Event> {
        let windows = self.windows.as_mut()?;
        self.told.limit_new(windows.credit_of_new());
        let least_rtt = quinn.min_rtt();
        if !windows.is_due(least_rtt, now) {
            return None;
        }
        let stats = quinn.stats();
        let shown = Shown {
            least_rtt,
            rtt: stats.path.rtt,
            sent: stats.udp_tx.bytes,
            lost: stats.path.lost_bytes,
            blocked: stats.frame_rx.data_blocked,
        };
        let change = windows.look(&shown, now);
        set_windows(quinn, change);
        match (change.starved, change.crowded) {
            (true, _) => Some(Event::Starved),
            (false, true) => Some(Event::Crowded),
            (false, false) => None,
        }
    }
}

fn set_windows(quinn: &mut Connection, change: Change) {
    if let Some(receive) = change.receive.and_then(|bytes| VarInt::from_u64(bytes).ok()) {
        quinn.set_receive_window(receive);
    }
    if let Some(send) = change.send {
        quinn.set_send_window(send);
    }
}

impl ControlConnection {
    /// What the far end has said of a stream that has not come; `None` if none can come with this number.
    pub fn note_early(&mut self, stream: u64) -> Option<&mut Said> {
        let granted = self.quinn.max_concurrent_streams(Dir::Bi);
        self.forwards.told.note_early(self.quinn.side(), stream, granted)
    }
}

impl Control {
    /// Sets the limit on concurrent TCP forwards that the far end opens on a connection.
    pub fn set_most_forwards(&mut self, handle: ConnectionHandle, most: u32) {
        if let Some(connection) = self.open_mut(handle) {
            connection.forwards.most = most;
            connection.forwards.grant(&mut connection.quinn);
        }
    }

    /// Whether a stream can be opened now: [`Control::open_stream`] will.
    pub fn has_stream(&mut self, handle: ConnectionHandle) -> bool {
        let Some(ControlConnection { forwards, quinn, .. }) = self.open_mut(handle) else { return false };
        forwards.spare = forwards.spare.or_else(|| quinn.streams().open(Dir::Bi));
        forwards.spare.is_some()
    }

    /// Opens a stream, if the far end lets us.
    pub fn open_stream(&mut self, handle: ConnectionHandle) -> Option<StreamId> {
        self.has_stream(handle).then(|| self.connections.get_mut(&handle)?.forwards.spare.take()).flatten()
    }

    /// Accepts the oldest stream that the far end opened for a TCP forward, with what the far end has said of it already.
    pub fn accept(&mut self, handle: ConnectionHandle) -> Option<(StreamId, Said)> {
        let connection = self.open_mut(handle)?;
        let stream = connection.quinn.streams().accept(Dir::Bi)?;
        Some((stream, connection.forwards.told.accepted(stream)))
    }

    /// Leaves the other streams that the far end opened for a later turn, at `at`; [`Event::Opened`] comes again then.
    pub fn accept_later(&mut self, handle: ConnectionHandle, at: Instant, now: Instant) {
        self.touch(handle);
        let Some(connection) = self.connections.get_mut(&handle) else { return };
        connection.forwards.later = Some(Later { at, turn: self.turn + 1 });
        if at <= now {
            self.lists.defer(handle, &mut connection.listed);
        }
    }

    /// What is said of streams to the far end, and what it has said of some that were not accepted yet.
    pub fn streams_told(&mut self, handle: ConnectionHandle) -> Option<&mut StreamsTold> {
        self.open_mut(handle).map(|connection| connection.forwards.told())
    }

    /// quinn-proto's connection, and the order in which its streams send.
    pub fn streams(&mut self, handle: ConnectionHandle) -> Option<(&mut Connection, &mut Order)> {
        self.open_mut(handle).map(|connection| (&mut connection.quinn, &mut connection.forwards.order))
    }

    /// A forward has passed on `delivered` bytes of the far end; `stalled` says whether its reader has stopped, if that has changed.
    pub fn forward_moved(&mut self, handle: ConnectionHandle, delivered: u64, stalled: Option<bool>) {
        let connection = self.connections.get_mut(&handle);
        if let Some(windows) = connection.and_then(|connection| connection.forwards.windows.as_mut()) {
            windows.delivered(delivered);
            if let Some(stopped) = stalled {
                windows.stalled(stopped);
            }
        }
    }

    /// A forward has handed bytes of its client, or of its service, to a connection.
    pub fn forward_sent(&mut self, handle: ConnectionHandle, now: Instant) {
        if let Some(connection) = self.connections.get_mut(&handle) {
            connection.forwards.answers.sent(now);
        }
    }

    /// Sends two PINGs in packets of their own. The far end acknowledges the second one at once (RFC 9000 §13.2.2); a single one
    /// would be acknowledged by a timer, for which it has to wake up again.
    pub fn ping_for_an_answer(&mut self, handle: ConnectionHandle) {
        if let Some(connection) = self.open_mut(handle) {
            connection.forwards.answers.ask_twice();
            connection.quinn.ping();
        }
    }

    /// Whether bytes of forwards wait for an acknowledgement on a connection.
    #[must_use]
    pub fn forwards_wait(&self, handle: ConnectionHandle) -> bool {
        self.open(handle).is_some_and(|connection| connection.forwards.answers.wait(connection.quinn.rtt()))
    }

    /// Whether quinn-proto has just probed again after a probe that was not acknowledged, on a connection that forwards have used.
    pub fn probes_in_vain(&mut self, handle: ConnectionHandle) -> bool {
        self.open_mut(handle).is_some_and(|connection| connection.forwards.answers.take_in_vain())
    }

    /// Notes that a forward was ended so that others go on.
    pub fn made_room(&mut self, handle: ConnectionHandle) {
        let Some(ControlConnection { forwards, quinn, .. }) = self.open_mut(handle) else { return };
        if let Some(windows) = &mut forwards.windows {
            set_windows(quinn, windows.made_room());
        }
    }

    /// Has the connections polled whose windows may be larger than needed, so that those of idle ones shrink, too.
    pub fn look_at_windows(&mut self) {
        for handle in self.handles() {
            let windows =
                self.connections.get(&handle).and_then(|connection| connection.forwards.windows.as_ref());
            if windows.is_some_and(Windows::is_waiting) {
                self.touch(handle);
            }
        }
    }
}
