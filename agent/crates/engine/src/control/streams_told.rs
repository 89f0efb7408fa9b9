//! What the ends of a connection say about its streams beside them: after how many bytes one was reset (`StreamAbort`), and how far one
//! may be sent (`StreamCredit`).
//!
//! What is to be told waits here until the control stream has room, several streams in a message, so that ten thousand resets at
//! once fill nothing. A message may come before the stream that it is about: what it says is kept until the stream is accepted.

use std::collections::{BTreeMap, VecDeque};

use quinn_proto::{Side, StreamId};
use wire::messages::{MOST_STREAMS, Message, StreamOffset};

/// What the far end has said of a stream.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Said {
    /// After how many bytes its TCP connection was reset.
    pub abort: Option<u64>,
    /// How far it may be sent.
    pub limit: Option<u64>,
}

#[derive(Debug, Default)]
pub struct StreamsTold {
    aborts: VecDeque<StreamOffset>,
    /// Limits to be told, by stream.
    limits: BTreeMap<u64, u64>,
    /// Whether the far end keeps to what it is told of limits.
    keeps_limits: bool,
    /// Our limit for new streams, and whether it is still to be told.
    initial: u64,
    initial_waits: bool,
    /// Whether a limit for new streams was ever told, so that the far end may have an older one in mind.
    has_limited: bool,
    /// How far a new stream may be sent, as the far end said last; 0 is without limit.
    far_initial: u64,
    /// The number of streams of the far end that were accepted.
    accepted: u64,
    /// What was said of streams that are not accepted yet, by stream.
    early: BTreeMap<u64, Said>,
}

impl StreamsTold {
    /// Has the far end told that the TCP connection of a stream was reset after `bytes` bytes of the stream.
    pub fn abort(&mut self, stream: StreamId, bytes: u64) {
        self.limits.remove(&stream.into());
        self.aborts.push_back(StreamOffset { stream: stream.into(), offset: bytes });
    }

    /// Has the far end told how far a stream may be sent.
    pub fn limit(&mut self, stream: StreamId, bytes: u64) {
        self.limits.insert(stream.into(), bytes);
    }

    /// The far end keeps to what it is told of limits.
    pub fn keeps_limits(&mut self) {
        self.keeps_limits = true;
    }

    /// Has the far end told how far new streams may be sent, unless it knows; 0 is without limit.
    pub fn limit_new(&mut self, bytes: u64) {
        if bytes != self.initial && self.keeps_limits {
            self.initial = bytes;
            self.initial_waits = true;
            self.has_limited = true;
        }
    }

    /// Our limit for new streams, if the far end was ever told one: it may have another in mind when it opens a stream.
    #[must_use]
    pub fn limit_of_new(&self) -> Option<u64> {
        self.has_limited.then_some(self.initial)
    }

    /// How far we may send on a stream that begins.
    #[must_use]
    pub fn far_limit(&self) -> u64 {
        if self.far_initial == 0 { u64::MAX } else { self.far_initial }
    }

    /// The far end has said how far streams that begin may be sent.
    pub fn far_limits_new(&mut self, bytes: u64) {
        self.far_initial = bytes;
    }

    /// The next message to the far end.
    pub(super) fn next(&mut self) -> Option<Message> {
        if !self.aborts.is_empty() {
            let most = self.aborts.len().min(MOST_STREAMS);
            let aborts = self.aborts.drain(..most).collect();
            if self.aborts.is_empty() {
                self.aborts.shrink_to_fit();
            }
            return Some(Message::StreamAbort(aborts));
        }
        if !self.initial_waits && self.limits.is_empty() {
            return None;
        }
        self.initial_waits = false;
        let mut limits = Vec::with_capacity(self.limits.len().min(MOST_STREAMS));
        while limits.len() < MOST_STREAMS
            && let Some((stream, offset)) = self.limits.pop_first()
        {
            limits.push(StreamOffset { stream, offset });
        }
        Some(Message::StreamCredit { initial: self.initial, limits })
    }

    /// Notes that a stream of the far end was accepted; returns what was said of it before.
    pub(super) fn accepted(&mut self, stream: StreamId) -> Said {
        self.accepted = self.accepted.max(stream.index() + 1);
        self.early.remove(&stream.into()).unwrap_or_default()
    }

    /// Keeps what the far end says of a stream that is not known here, if it is one that it may open: `side` is ours, and `granted`
    /// how many it may have. Otherwise the stream has ended.
    pub fn note_early(&mut self, side: Side, stream: u64, granted: u64) -> Option<&mut Said> {
        let id = quinn_proto::VarInt::from_u64(stream).ok().map(StreamId::from)?;
        let is_far = id.initiator() != side && id.dir() == quinn_proto::Dir::Bi;
        let may_come = id.index() >= self.accepted && id.index() - self.accepted < granted;
        (is_far && may_come).then(|| self.early.entry(stream).or_default())
    }
}

#[cfg(test)]
mod tests {
    use quinn_proto::Dir;

    use super::*;

    fn stream(index: u64) -> StreamId {
        StreamId::new(Side::Client, Dir::Bi, index)
    }

    #[test]
    fn ten_thousand_resets_are_told_in_few_messages_and_leave_nothing() {
        let mut told = StreamsTold::default();
        for index in 0..10_000 {
            told.abort(stream(index), index);
        }
        let mut seen = Vec::new();
        let mut messages = 0;
        while let Some(Message::StreamAbort(aborts)) = told.next() {
            messages += 1;
            seen.extend(aborts);
        }
        assert_eq!(messages, 10_000_usize.div_ceil(MOST_STREAMS));
        assert_eq!(seen.len(), 10_000);
        assert!(seen.iter().enumerate().all(|(index, at)| at.offset == index as u64));
        assert_eq!(told.aborts.capacity(), 0);
    }

    #[test]
    fn only_the_last_limit_of_a_stream_is_told() {
        let mut told = StreamsTold::default();
        told.keeps_limits();
        told.limit(stream(1), 10);
        told.limit(stream(1), 20);
        told.limit_new(7);
        let limits = vec![StreamOffset { stream: stream(1).into(), offset: 20 }];
        assert_eq!(told.next(), Some(Message::StreamCredit { initial: 7, limits }));
        told.limit_new(7);
        assert_eq!(told.next(), None);
    }

    #[test]
    fn what_is_said_of_a_stream_before_it_comes_waits_for_it_and_of_others_is_ignored() {
        let mut told = StreamsTold::default();
        told.accepted(stream(0));
        told.note_early(Side::Server, stream(2).into(), 4).unwrap().abort = Some(5);
        assert!(told.note_early(Side::Server, stream(0).into(), 4).is_none(), "it has ended");
        assert!(told.note_early(Side::Server, stream(5).into(), 4).is_none(), "it cannot be opened");
        assert!(told.note_early(Side::Client, stream(2).into(), 4).is_none(), "it is ours");
        assert!(told.note_early(Side::Server, u64::MAX, 4).is_none());
        assert_eq!(told.accepted(stream(1)), Said::default());
        assert_eq!(told.accepted(stream(2)), Said { abort: Some(5), limit: None });
        assert_eq!(told.accepted(stream(2)), Said::default());
    }
}
