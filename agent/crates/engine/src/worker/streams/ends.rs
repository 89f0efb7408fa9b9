//! What the peer says of streams beside them, and readers that have stopped.

use std::time::{Duration, Instant};

use dataplane::forward::tcp::{Cause, TcpId};
use quinn_proto::{ConnectionHandle, StreamId, VarInt};
use wire::messages::StreamOffset;

use crate::{
    control::{StreamKey, streams_told::Said},
    worker::{
        context::{Context, timer::index_u32},
        report::stats::TcpEnd,
        session::Sessions,
        streams::{OpenForward, TcpForwards},
    },
};

/// How long a reader has been stopped before its forward may be ended so that others go on.
const STOPPED_FOR_LONG: Duration = Duration::from_secs(1);

impl TcpForwards {
    /// TCP connections of the peer's were reset, after as many bytes of their streams.
    pub(crate) fn streams_aborted(
        &mut self,
        cx: &mut Context,
        sessions: &mut Sessions,
        handle: ConnectionHandle,
        aborts: &[StreamOffset],
        now: Instant,
    ) {
        for abort in aborts {
            match self.find(handle, abort.stream) {
                Some((key, _)) => {
                    let said = Said { abort: Some(abort.offset), limit: None };
                    self.take_said(cx, sessions, key, said, now);
                }
                None => sessions.keep_early(handle, abort.stream, |said| said.abort = Some(abort.offset)),
            }
        }
    }

    /// The peer has said how far we may send on streams.
    pub(crate) fn streams_limited(
        &mut self,
        cx: &mut Context,
        sessions: &mut Sessions,
        handle: ConnectionHandle,
        initial: u64,
        limits: &[StreamOffset],
        now: Instant,
    ) {
        if let Some(told) = sessions.control.streams_told(handle) {
            told.far_limits_new(initial);
        }
        for limit in limits {
            match self.find(handle, limit.stream) {
                Some((key, _)) => {
                    let said = Said { abort: None, limit: Some(limit.offset) };
                    self.take_said(cx, sessions, key, said, now);
                }
                None => sessions.keep_early(handle, limit.stream, |said| said.limit = Some(limit.offset)),
            }
        }
    }

    /// Acts on what the peer has said of a stream.
    pub(crate) fn take_said(
        &mut self,
        cx: &mut Context,
        sessions: &mut Sessions,
        key: StreamKey,
        said: Said,
        now: Instant,
    ) {
        let Some(id) = self.by_stream.get(&key).copied() else { return };
        let Some(OpenForward { forward, .. }) = self.open.get_mut(id.0 as usize) else { return };
        if let Some(limit) = said.limit {
            forward.limit_to(limit);
        }
        if let Some(bytes) = said.abort {
            forward.abort_after(bytes, now);
        }
        if said != Said::default() {
            self.pump(cx, sessions, id, Cause::Other, now);
        }
    }

    fn find(&self, handle: ConnectionHandle, stream: u64) -> Option<(StreamKey, TcpId)> {
        let stream = StreamId::from(VarInt::from_u64(stream).ok()?);
        let key = StreamKey { connection: handle.0, stream };
        self.by_stream.get(&key).map(|id| (key, *id))
    }

    /// Limits what both ends may send on a stream that begins, if readers that stopped are in the way of others.
    pub(crate) fn limit_new(&mut self, sessions: &mut Sessions, key: StreamKey, now: Instant) {
        let Some(told) = sessions.control.streams_told(ConnectionHandle(key.connection)) else { return };
        let Some(id) = self.by_stream.get(&key) else { return };
        let Some(OpenForward { forward, .. }) = self.open.get_mut(id.0 as usize) else { return };
        forward.limit_to(told.far_limit());
        if forward.keeps_credit() {
            told.keeps_limits();
        }
        // The peer may have had another limit in mind when the stream began.
        match told.limit_of_new() {
            Some(0) => told.limit(key.stream, u64::MAX),
            Some(window) => told.limit(key.stream, forward.begin_limited(window, now)),
            None => {}
        }
    }

    /// Readers have stopped and are in the way of others: the peer of `handle` is to send them no more.
    pub(crate) fn crowded(
        &mut self,
        cx: &mut Context,
        sessions: &mut Sessions,
        handle: ConnectionHandle,
        now: Instant,
    ) {
        let stopped = self
            .open
            .iter()
            .filter(|(_, open)| open.key.connection == handle.0 && open.forward.reader_stopped().is_some());
        for id in stopped.map(|(index, _)| TcpId(index_u32(index))).collect::<Vec<_>>() {
            self.pump(cx, sessions, id, Cause::Other, now);
        }
    }

    /// Ends the forward of a connection whose reader has been stopped for longest: others have no room to go on.
    pub(crate) fn end_longest_stopped(
        &mut self,
        cx: &mut Context,
        sessions: &mut Sessions,
        handle: ConnectionHandle,
        now: Instant,
    ) {
        let on_it = self.open.iter().filter(|(_, open)| open.key.connection == handle.0);
        let stopped = on_it.filter_map(|(index, open)| Some((open.forward.reader_stopped()?, index)));
        let Some((since, index)) = stopped.min() else { return };
        if now.saturating_duration_since(since) < STOPPED_FOR_LONG {
            return;
        }
        let id = TcpId(index_u32(index));
        let Some(OpenForward { peer, forward, sight, .. }) = self.open.get_mut(index) else { return };
        let stopped_for = now.saturating_duration_since(since);
        cx.report_stalled(*peer, sight, stopped_for, now);
        sight.end = Some(TcpEnd::Stalled);
        if let Some(quinn) = sessions.control.quinn(handle) {
            forward.reset(quinn);
        }
        forward.abort();
        sessions.control.made_room(handle);
        self.remove_tcp(cx, sessions, id);
    }
}

impl Sessions {
    /// Keeps what the peer says of a stream that it has opened and that has not come.
    fn keep_early(&mut self, handle: ConnectionHandle, stream: u64, keep: impl FnOnce(&mut Said)) {
        let Some(connection) = self.control.get_mut(handle) else { return };
        if let Some(said) = connection.note_early(stream) {
            keep(said);
        }
    }
}
