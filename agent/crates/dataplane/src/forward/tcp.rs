//! A TCP forward: one TCP connection, one QUIC stream.
//!
//! ```text
//!   client ─TCP─ [opener]  ══ stream: StreamOpen │ bytes ══►  [acceptor] ─TCP─ service
//!                          ◄═ StreamAnswer │ bytes ═════════
//! ```
//!
//! Each direction holds at most [`PIECE`] bytes: it reads no more until the other side has taken them, so a slow
//! reader slows its writer and nothing grows. The packets of a stream go to TCP in one call. An end of stream is passed on as
//! such (half-close).
//!
//! A reset of a TCP connection ends both directions, at once where nothing moves, and after what came before it where something does:
//!
//! ```text
//!   TCP fails ─► [Ours] what it had received goes to the stream ─► StreamAbort { bytes } ─► [Told] until the far end stops the stream
//!                   │ stands still for 2 s
//!                   ▼
//!              RESET_STREAM                                    StreamAbort ─► [Theirs] `bytes` go to TCP, its kernel has sent them
//!                   │                                                            │ or it stands still for 2 s
//!                   └────────────────────────► both sides are reset ◄────────────┘
//! ```
//!
//! RESET_STREAM discards what it overtakes, so it is sent only where that is meant, or where the far end knows no `StreamAbort`.

use std::{
    io::{self, ErrorKind, IoSlice},
    time::{Duration, Instant},
};

use bytes::{Buf, Bytes};
use net::{
    TcpStream, Token,
    process::{is_out_of_descriptors, is_out_of_resources},
};
use quinn_proto::{Chunk, Connection, ReadError, StreamId, VarInt, WriteError};
use wire::messages::{Framer, MAX_STREAM_HEADER_BYTES, MessageError, StreamAnswer, StreamOpen};

use crate::forward::blocks::{BLOCK, Blocks, WORTH_A_BLOCK};

/// The index of a TCP forward among those of its worker.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct TcpId(pub u32);

/// The largest number of bytes that one call of [`TcpForward::pump`] moves in each direction before others have their turn.
const BUDGET: usize = 256 * 1024;

/// The largest number of bytes that are read at once.
pub const PIECE: usize = BLOCK;

/// The number of parts of a stream that are written to TCP at once: [`PIECE`] in packets of Ethernet.
const MOST_PARTS: usize = 64;

/// How long the end that opened a stream may take to send its header, which is in the first packet of the stream.
pub const HEADER_TIMEOUT: Duration = Duration::from_secs(10);

/// How long a service may take to accept a connection.
pub const CONNECT_TIMEOUT: Duration = Duration::from_secs(10);

/// How long a forward whose TCP connection was reset may stand still while what came before the reset is passed on.
pub const LAST_BYTES_TIMEOUT: Duration = Duration::from_secs(2);

/// How soon the kernel is asked again whether it has sent the last bytes.
const LOOK_AGAIN: Duration = Duration::from_millis(10);

/// How long the other end may take to answer: [`CONNECT_TIMEOUT`] for its service, and as long again for the network.
pub const ANSWER_TIMEOUT: Duration = CONNECT_TIMEOUT.saturating_mul(2);

/// The error code of streams that are reset because their TCP connection was.
pub const RESET: VarInt = VarInt::from_u32(1);

/// The progress of a forward. A `framer` has the part of the frame that has come; `until` is when waiting is given up.
#[derive(Debug)]
enum Stage {
    /// Opened here: the answer has not come. Bytes of the client are sent already.
    AwaitingAnswer { framer: Framer, until: Instant },
    /// Opened by the peer: the header has not come.
    AwaitingHeader { framer: Framer, until: Instant },
    /// Opened by the peer: the service is being connected.
    Connecting { until: Instant },
    /// The forward is open, and bytes flow.
    Open,
}

/// How a forward ends after a reset.
#[derive(Clone, Copy, Debug)]
enum Ending {
    /// Our TCP connection was reset: what it had received is passed on until `until`, which each byte postpones. `read` once TCP has
    /// no more. `tells_end` if TCP reads as ended only where a FIN came before the reset: the kernel tells a reset once.
    Ours { until: Instant, read: bool, tells_end: bool },
    /// The far end was told, and is to stop the stream.
    Told,
    /// The far end's TCP connection was reset after this many bytes of the stream: they are passed on until `until`, likewise. The kernel
    /// had `unsent` bytes left when it was last asked, and is asked again at `look`.
    Theirs { bytes: u64, until: Instant, unsent: usize, look: Instant },
}

/// What made a worker serve a forward.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Cause {
    /// The kernel reported something about its TCP connection.
    Tcp,
    /// Its stream had an event, or its time has come.
    Other,
}

/// The result of a call of [`TcpForward::pump`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Pumped {
    /// Nothing more to do until a source is ready.
    Waiting,
    /// There is more to do at once.
    Busy,
    /// The peer asks for this service: [`TcpForward::connect`] or [`TcpForward::refuse`] is to follow.
    Wants(StreamOpen),
    /// The service's connection attempt ended; the answer was sent.
    Answered(StreamAnswer),
    /// The peer did not open the forward.
    Refused(StreamAnswer),
    /// Its TCP connection was reset after this many bytes of the stream, its end included: the peer is to be told. [`TcpForward::is_over`] says whether it
    /// is to be kept until the peer stops the stream.
    Aborted {
        bytes: u64,
    },
    Done,
}

/// One direction of a TCP forward.
#[derive(Debug, Default)]
struct Direction {
    /// Bytes that were read and not written yet.
    piece: Bytes,
    /// True once the reading side has ended.
    ended: bool,
    /// True once the end was passed on, or the direction was given up.
    closed: bool,
    /// Whether the end was passed on.
    finished: bool,
    /// Whether the peer has just stopped its stream.
    stopped: bool,
    /// The number of bytes of the piece that are the forward's own: a header or an answer.
    framing: usize,
    /// The number of bytes of the TCP connection that were written.
    bytes: u64,
    /// The number of bytes of the stream, framing included, that were written to it or read from it.
    offset: u64,
    /// Whether TCP reports its next byte, or its end, because everything was read.
    waits_for_tcp: bool,
    /// Whether its stream has a place in the [`Order`].
    placed: bool,
    /// Bytes read since it got that place.
    since_placed: usize,
}

impl Direction {
    /// A direction that begins with bytes of our own.
    fn beginning_with(framing: Vec<u8>) -> Self {
        Self { framing: framing.len(), piece: framing.into(), ..Self::default() }
    }

    /// Gives the direction up with what it holds.
    fn close(&mut self) {
        self.closed = true;
        self.piece = Bytes::new();
    }

    /// Gives the direction up because the peer has stopped its stream.
    fn stop(&mut self) {
        self.close();
        self.stopped = true;
    }

    /// `written` bytes of the piece were taken.
    fn wrote(&mut self, written: usize) {
        self.piece.advance(written);
        if self.piece.is_empty() {
            // An empty piece keeps what it was a part of.
            self.piece = Bytes::new();
        }
        let framing = written.min(self.framing);
        self.framing -= framing;
        self.bytes += (written - framing) as u64;
    }
}

pub struct TcpForward {
    pub stream: StreamId,
    /// The connection, with its token; `None` until the service's address is known.
    tcp: Option<(Box<dyn TcpStream>, Token)>,
    stage: Stage,
    /// Our service that it leads to, once the peer has named it; `None` if it was opened here.
    pub service: Option<u32>,
    /// TCP to stream; starts with the header or the answer.
    outward: Direction,
    /// The direction from the stream to TCP.
    inward: Direction,
    /// True if its stream has had an event and the forward waits to be served.
    pub stirred: bool,
    /// The pass in which its stream took something last: the forward for which that was longest ago comes first. One that is served and
    /// finds no room keeps its place.
    pub sent: u64,
    /// True if its reader had stopped when [`TcpForward::stall_changed`] was last called.
    pub stalled: bool,
    /// From a reset on.
    ending: Option<Ending>,
    knows: Knows,
    /// How far our end may send on the stream, as the peer says, in bytes.
    limit: u64,
    /// How far the peer may, if it is limited.
    credit: Option<Credit>,
    /// Since when its reader has been stopped.
    pub stalled_since: Option<Instant>,
    /// The kernel's error of the attempt to connect to the service, once it has failed.
    pub failure: Option<io::Error>,
}

/// What the peer knows of forwards beyond their streams.
#[derive(Clone, Copy, Debug, Default)]
pub struct Knows {
    /// How one ends by a reset: `StreamAbort`.
    pub aborts: bool,
    /// How far it may send on one: `StreamCredit`.
    pub credit: bool,
}

/// How far the peer may send on a stream: `window` bytes ahead of the reader when it was told.
#[derive(Clone, Copy, Debug)]
struct Credit {
    window: u64,
    limit: u64,
    told: Instant,
}

/// How long a reader takes nothing before the peer is asked to send it no more: longer than a fast one is behind now and then.
const STOPPED_AFTER: Duration = Duration::from_millis(20);

/// What a window that is too small is multiplied by.
const GROWTH: u64 = 4;

/// The least time for which a window is to last by half.
const LEAST_INTERVAL: Duration = Duration::from_millis(1);

/// The credit of a stream whose reader has stopped, in bytes: 1,000 such readers hold a quarter of the default `limits.stream_bytes`.
pub const LEAST_CREDIT: u64 = 64 << 10;

impl TcpForward {
    /// A client's connection, for which `stream` was opened.
    #[must_use]
    pub fn opened(
        stream: StreamId,
        tcp: Box<dyn TcpStream>,
        token: Token,
        service: u32,
        knows: Knows,
        now: Instant,
    ) -> Self {
        let mut header = Vec::new();
        StreamOpen { service }.encode(&mut header);
        let framer = Framer::new(MAX_STREAM_HEADER_BYTES);
        let stage = Stage::AwaitingAnswer { framer, until: now + ANSWER_TIMEOUT };
        let outward = Direction::beginning_with(header);
        Self { tcp: Some((tcp, token)), outward, ..Self::new(stream, stage, knows) }
    }

    /// A stream that the peer opened.
    #[must_use]
    pub fn accepted(stream: StreamId, knows: Knows, now: Instant) -> Self {
        let framer = Framer::new(MAX_STREAM_HEADER_BYTES);
        Self::new(stream, Stage::AwaitingHeader { framer, until: now + HEADER_TIMEOUT }, knows)
    }

    fn new(stream: StreamId, stage: Stage, knows: Knows) -> Self {
        Self {
            stream,
            tcp: None,
            stage,
            service: None,
            outward: Direction::default(),
            inward: Direction::default(),
            stirred: false,
            sent: 0,
            stalled: false,
            ending: None,
            knows,
            limit: u64::MAX,
            credit: None,
            stalled_since: None,
            failure: None,
        }
    }

    /// Its TCP connection; none before the service is being connected.
    #[must_use]
    pub fn tcp(&self) -> Option<&dyn TcpStream> {
        self.tcp.as_ref().map(|(tcp, _)| &**tcp)
    }

    /// The token of its TCP connection.
    #[must_use]
    pub fn token(&self) -> Option<Token> {
        self.tcp.as_ref().map(|(_, token)| *token)
    }

    /// Bytes from TCP to the stream and from the stream to TCP so far.
    #[must_use]
    pub fn bytes(&self) -> (u64, u64) {
        (self.outward.bytes, self.inward.bytes)
    }

    /// Whether its reader has stopped, if that has changed since the last call.
    pub fn stall_changed(&mut self, now: Instant) -> Option<bool> {
        let stalled = !self.inward.piece.is_empty();
        if stalled != self.stalled {
            self.stalled_since = stalled.then_some(now);
        }
        (std::mem::replace(&mut self.stalled, stalled) != stalled).then_some(stalled)
    }

    /// Whether bytes wait for the stream, and for TCP, which took no more when they were last served. The peer's reader has stopped, too,
    /// if the peer lets us send no more.
    #[must_use]
    pub fn waits(&self) -> [bool; 2] {
        let held_back = !self.outward.closed && self.outward.offset >= self.limit;
        [held_back || !self.outward.piece.is_empty(), !self.inward.piece.is_empty()]
    }

    /// Whether both directions have ended in order.
    #[must_use]
    pub fn is_finished(&self) -> bool {
        self.is_over() && self.ending.is_none()
    }

    /// The progress of the forward, for an operator.
    #[must_use]
    pub fn state(&self) -> &'static str {
        match self.stage {
            Stage::AwaitingAnswer { .. } => "awaiting_answer",
            Stage::AwaitingHeader { .. } => "awaiting_header",
            Stage::Connecting { .. } => "connecting",
            Stage::Open if self.ending.is_some() => "ending",
            Stage::Open => "open",
        }
    }

    /// Whether it was ever open.
    #[must_use]
    pub fn was_open(&self) -> bool {
        matches!(self.stage, Stage::Open)
    }

    /// The number of bytes that it has read and could not pass on.
    #[must_use]
    pub fn held(&self) -> usize {
        self.outward.piece.len() + self.inward.piece.len()
    }

    /// Whether nothing more is to come of it.
    #[must_use]
    pub fn is_over(&self) -> bool {
        self.outward.closed && self.inward.closed
    }

    /// Takes its TCP connection's token out, once that connection is done for and the forward is not.
    pub fn take_token(&mut self) -> Option<Token> {
        self.tcp.take_if(|_| matches!(self.ending, Some(Ending::Told))).map(|(_, token)| token)
    }

    /// The peer says that its TCP connection was reset after `bytes` bytes of the stream.
    pub fn abort_after(&mut self, bytes: u64, now: Instant) {
        // If both connections were reset, nobody waits for anything.
        if self.ending.is_none() {
            self.ending =
                Some(Ending::Theirs { bytes, until: now + LAST_BYTES_TIMEOUT, unsent: 0, look: now });
        }
    }

    /// Whether the peer keeps to what it is told of how far it may send.
    #[must_use]
    pub fn keeps_credit(&self) -> bool {
        self.knows.credit
    }

    /// How far our end may send on the stream, as the peer says.
    pub fn limit_to(&mut self, limit: u64) {
        self.limit = limit;
    }

    /// Notes that the peer was told of `window` bytes before the stream began, or may have been; returns how far it may send.
    pub fn begin_limited(&mut self, window: u64, now: Instant) -> u64 {
        let limit = self.inward.offset + window;
        self.credit = Some(Credit { window, limit, told: now });
        limit
    }

    /// How far the peer may send on the stream from now on, if it is to be told. `most` is how far it may send ahead of a reader that
    /// goes on, without limit if that is `None`.
    pub fn credit_to_tell(&mut self, most: Option<u64>, rtt: Duration, now: Instant) -> Option<u64> {
        if self.credit.is_none() && self.stalled_since.is_none() || !self.knows.credit || self.inward.closed {
            return None;
        }
        if let Some(stops_at) = self.stopped_at() {
            return (most.is_some() && stops_at <= now).then(|| self.begin_limited(LEAST_CREDIT, now));
        }
        if self.stalled_since.is_some() {
            return None;
        }
        let Credit { window, limit, told } = self.credit?;
        if limit.saturating_sub(self.inward.offset) >= window / 2 {
            return None;
        }
        let Some(most) = most else {
            // No reader is in the way of others any more.
            self.credit = None;
            return Some(u64::MAX);
        };
        // As receivers of TCP do: a window that lasts for less than four round trips is too small.
        let is_short = now.saturating_duration_since(told) < (2 * rtt).max(LEAST_INTERVAL);
        let window = if is_short { GROWTH * window } else { window };
        Some(self.begin_limited(window.clamp(LEAST_CREDIT, most.max(LEAST_CREDIT)), now))
    }

    /// When its reader counts as stopped, unless the peer knows already that it may not send it much.
    fn stopped_at(&self) -> Option<Instant> {
        let is_large = self.credit.is_none_or(|credit| credit.window > LEAST_CREDIT);
        self.stalled_since.filter(|_| is_large).map(|since| since + STOPPED_AFTER)
    }

    /// The time at which [`TcpForward::pump`] is to be called although nothing happens; `crowded` if readers that stop are in the way of
    /// others.
    #[must_use]
    pub fn look_at(&self, crowded: bool) -> Option<Instant> {
        match self.ending {
            Some(Ending::Ours { until, .. } | Ending::Theirs { until, unsent: 0, .. }) => Some(until),
            // The kernel does not say when it has sent everything.
            Some(Ending::Theirs { until, look, .. }) => Some(look.min(until)),
            Some(Ending::Told) => None,
            None if crowded && self.knows.credit => self.stopped_at(),
            None => None,
        }
    }

    /// The time at which it is given up, unless it is open by then.
    #[must_use]
    pub fn open_by(&self) -> Option<Instant> {
        match self.stage {
            Stage::Connecting { until }
            | Stage::AwaitingAnswer { until, .. }
            | Stage::AwaitingHeader { until, .. } => Some(until),
            Stage::Open => None,
        }
    }

    /// Gives up a forward that was not open in time: tells the other end, and the client if it has one.
    pub fn give_up(&mut self, quinn: &mut Connection) {
        if let Stage::Connecting { .. } = self.stage {
            self.refuse(quinn, StreamAnswer::UpstreamTimeout);
        } else {
            self.end(quinn);
        }
    }

    /// Resets both directions of the stream.
    pub fn reset(&mut self, quinn: &mut Connection) {
        // A direction that has ended already needs no reset.
        let _reset = quinn.send_stream(self.stream).reset(RESET).is_ok();
        let _stopped = quinn.recv_stream(self.stream).stop(RESET).is_ok();
    }

    /// Notes that `service` is being connected, for [`CONNECT_TIMEOUT`] at most.
    pub fn connect(&mut self, service: u32, tcp: Box<dyn TcpStream>, token: Token, now: Instant) {
        self.service = Some(service);
        self.tcp = Some((tcp, token));
        self.stage = Stage::Connecting { until: now + CONNECT_TIMEOUT };
    }

    /// Refuses the forward and tells the peer why.
    pub fn refuse(&mut self, quinn: &mut Connection, answer: StreamAnswer) {
        let mut bytes = Vec::new();
        answer.encode(&mut bytes);
        let mut stream = quinn.send_stream(self.stream);
        // A few bytes at the start of a stream; a stream that takes none is being reset by the peer.
        let _written = stream.write(&bytes).is_ok() && stream.finish().is_ok();
        let _stopped = quinn.recv_stream(self.stream).stop(RESET).is_ok();
    }

    /// Resets the TCP side, because the connection to the peer is gone.
    pub fn abort(&mut self) {
        if let Some((tcp, _)) = self.tcp.as_mut() {
            tcp.abort();
        }
    }

    /// Moves the bytes that can be moved now.
    pub fn pump(
        &mut self,
        quinn: &mut Connection,
        order: &mut Order,
        scratch: &mut Scratch,
        cause: Cause,
        now: Instant,
    ) -> Pumped {
        if let Some(Ending::Theirs { until, .. }) = self.ending {
            if !matches!(self.stage, Stage::Open) && until <= now {
                return self.end(quinn);
            }
            if !self.outward.closed && matches!(self.stage, Stage::Open) {
                // The peer takes nothing more.
                self.outward.close();
                let _reset = quinn.send_stream(self.stream).reset(RESET).is_ok();
            }
        }
        match &self.stage {
            Stage::AwaitingHeader { .. } => return self.read_header(quinn),
            Stage::Connecting { .. } => {
                if was_reset(quinn, self.stream) {
                    return self.end(quinn);
                }
                return self.finish_connect(quinn).unwrap_or(Pumped::Waiting);
            }
            Stage::AwaitingAnswer { .. } => {
                if let Err(ended) = self.read_answer(quinn) {
                    return ended;
                }
            }
            Stage::Open => {}
        }
        if let Some(Ending::Told) = self.ending {
            return self.await_stop(quinn);
        }
        let moved = self.moved();
        let outward = self.pump_outward(quinn, order, scratch);
        if std::mem::take(&mut self.outward.stopped) {
            self.stopped(quinn, now);
        }
        let is_open = matches!(self.stage, Stage::Open);
        let inward = if is_open { self.pump_inward(quinn, scratch) } else { Ok(false) };
        let is_busy = match (outward, inward) {
            (Err(Broken::Stream), _) | (_, Err(Broken::Stream)) => return self.end(quinn),
            // Nothing is left to read if reading was what failed.
            (Err(Broken::Tcp { .. }), _) => return self.tcp_failed(quinn, true, false, now),
            (_, Err(Broken::Tcp { ended })) => return self.tcp_failed(quinn, false, ended, now),
            (Ok(outward), Ok(inward)) => outward || inward,
        };
        match self.ending {
            Some(_) => self.go_on_ending(quinn, moved, is_busy, now),
            None if self.is_over() => Pumped::Done,
            None if is_busy => Pumped::Busy,
            None if cause == Cause::Tcp && self.has_failed() => self.tcp_failed(quinn, false, true, now),
            None => Pumped::Waiting,
        }
    }

    /// Whether its TCP connection has failed where reading does not find out.
    fn has_failed(&self) -> bool {
        !self.outward.waits_for_tcp && self.tcp.as_ref().is_some_and(|(tcp, _)| tcp.has_failed())
    }

    /// The peer has stopped the stream.
    fn stopped(&mut self, quinn: &mut Connection, now: Instant) {
        // Otherwise quinn-proto would keep the stream open for an end that never comes.
        let _reset = quinn.send_stream(self.stream).reset(RESET).is_ok();
        if self.inward.closed {
            // After the end of its own stream only a reset makes the peer do that.
            self.abort_after(self.inward.offset, now);
        }
    }

    /// What changes whenever bytes pass on either side.
    fn moved(&self) -> (u64, u64) {
        (self.outward.offset, self.inward.bytes)
    }

    /// Its TCP connection was reset, or failed otherwise; `read` if it has nothing more to read, `tells_end` as in [`Ending::Ours`].
    fn tcp_failed(&mut self, quinn: &mut Connection, read: bool, tells_end: bool, now: Instant) -> Pumped {
        if !self.knows.aborts || matches!(self.ending, Some(Ending::Theirs { .. })) {
            return self.end(quinn);
        }
        self.inward.close();
        let _stopped = quinn.recv_stream(self.stream).stop(RESET).is_ok();
        if let Stage::AwaitingAnswer { .. } = self.stage {
            self.stage = Stage::Open;
        }
        let read = read || self.outward.ended || matches!(self.ending, Some(Ending::Ours { read: true, .. }));
        self.ending = Some(Ending::Ours { until: now + LAST_BYTES_TIMEOUT, read, tells_end });
        // What is left to read and to write follows at once.
        self.go_on_ending(quinn, self.moved(), !read, now)
    }

    /// Goes on after a reset on either side; `before` is what [`TcpForward::moved`] was, `is_busy` whether more can be moved at once.
    fn go_on_ending(
        &mut self,
        quinn: &mut Connection,
        before: (u64, u64),
        is_busy: bool,
        now: Instant,
    ) -> Pumped {
        let moved = self.moved();
        match &mut self.ending {
            Some(Ending::Ours { until, read, .. }) => {
                if moved.0 != before.0 {
                    *until = now + LAST_BYTES_TIMEOUT;
                }
                let all_is_told = self.outward.closed || *read && self.outward.piece.is_empty();
                if !all_is_told && *until > now {
                    return if is_busy { Pumped::Busy } else { Pumped::Waiting };
                }
                if !all_is_told {
                    return self.end(quinn);
                }
                self.abort();
                self.ending = Some(Ending::Told);
                // The end of the stream counts as a byte: it is to be passed on before the reset, too.
                Pumped::Aborted { bytes: self.outward.offset + u64::from(self.outward.finished) }
            }
            Some(Ending::Theirs { bytes, until, unsent, look }) => {
                let left = self.tcp.as_ref().map_or(0, |(tcp, _)| tcp.unacknowledged().unwrap_or(0));
                if moved.1 != before.1 || left < *unsent {
                    *until = now + LAST_BYTES_TIMEOUT;
                }
                let has_all =
                    self.inward.closed || self.inward.offset >= *bytes && self.inward.piece.is_empty();
                (*unsent, *look) = (if has_all { left } else { 0 }, now + LOOK_AGAIN);
                if has_all && left == 0 || *until <= now {
                    return self.end(quinn);
                }
                if is_busy { Pumped::Busy } else { Pumped::Waiting }
            }
            Some(Ending::Told) | None => Pumped::Waiting,
        }
    }

    /// Ends the forward once the far end, which was told of the reset, has stopped the stream.
    fn await_stop(&mut self, quinn: &mut Connection) -> Pumped {
        match quinn.send_stream(self.stream).stopped() {
            Ok(None) => Pumped::Waiting,
            Ok(Some(_)) | Err(_) => self.end(quinn),
        }
    }

    /// Resets both sides of the forward.
    fn end(&mut self, quinn: &mut Connection) -> Pumped {
        self.abort();
        self.reset(quinn);
        Pumped::Done
    }

    fn read_header(&mut self, quinn: &mut Connection) -> Pumped {
        let Stage::AwaitingHeader { framer, .. } = &mut self.stage else { return Pumped::Waiting };
        match read_frame(quinn, self.stream, framer, &mut self.inward.offset, StreamOpen::decode) {
            Ok(Some((header, rest))) => {
                self.inward.piece = rest;
                Pumped::Wants(header)
            }
            Ok(None) => Pumped::Waiting,
            Err(_) => self.end(quinn),
        }
    }

    fn read_answer(&mut self, quinn: &mut Connection) -> Result<(), Pumped> {
        let Stage::AwaitingAnswer { framer, .. } = &mut self.stage else { return Ok(()) };
        match read_frame(quinn, self.stream, framer, &mut self.inward.offset, StreamAnswer::decode) {
            Ok(Some((StreamAnswer::Ok, rest))) => {
                self.inward.piece = rest;
                self.stage = Stage::Open;
                Ok(())
            }
            Ok(Some((refused, _))) => {
                self.end(quinn);
                Err(Pumped::Refused(refused))
            }
            Ok(None) => Ok(()),
            Err(_) => Err(self.end(quinn)),
        }
    }

    /// If the service's connection attempt has ended, tells the peer how.
    fn finish_connect(&mut self, quinn: &mut Connection) -> Option<Pumped> {
        let (tcp, _) = self.tcp.as_mut()?;
        match tcp.connected() {
            Ok(()) => {
                let mut answer = Vec::new();
                StreamAnswer::Ok.encode(&mut answer);
                self.outward = Direction::beginning_with(answer);
                self.stage = Stage::Open;
                Some(Pumped::Answered(StreamAnswer::Ok))
            }
            Err(error) if error.kind() == ErrorKind::WouldBlock => None,
            Err(error) => {
                let answer = answer_for(&error);
                self.failure = Some(error);
                self.refuse(quinn, answer);
                Some(Pumped::Answered(answer))
            }
        }
    }

    /// TCP to stream; true if the budget ended before the data did.
    fn pump_outward(
        &mut self,
        quinn: &mut Connection,
        order: &mut Order,
        scratch: &mut Scratch,
    ) -> Result<bool, Broken> {
        let Self { tcp, outward, ending, stream, limit, .. } = self;
        let Some((tcp, _)) = tcp.as_mut() else { return Ok(false) };
        if !std::mem::replace(&mut outward.placed, true) {
            let _set = quinn.send_stream(*stream).set_priority(order.of_new());
        }
        outward.waits_for_tcp = false;
        let mut moved = 0;
        while !outward.closed {
            if outward.piece.has_remaining() {
                match quinn.send_stream(*stream).write_chunks(&mut [outward.piece.clone()]) {
                    Ok(written) => {
                        let was_worth_it = outward.piece.len() >= WORTH_A_BLOCK;
                        outward.offset += written.bytes as u64;
                        outward.wrote(written.bytes);
                        moved += written.bytes;
                        if was_worth_it && outward.piece.len() < WORTH_A_BLOCK {
                            // Otherwise a few bytes that wait would keep a block.
                            outward.piece = Bytes::copy_from_slice(&outward.piece);
                        }
                    }
                    Err(WriteError::Blocked) => return Ok(false),
                    // Data of the peer's program may still come the other way.
                    Err(WriteError::Stopped(_)) => outward.stop(),
                    Err(WriteError::ClosedStream) => return Err(Broken::Stream),
                }
            } else if outward.ended {
                (outward.closed, outward.finished) = (true, true);
                return quinn.send_stream(*stream).finish().map(|()| false).map_err(|_| Broken::Stream);
            } else if let Some(Ending::Ours { read: true, .. }) = ending {
                return Ok(false);
            } else if moved >= BUDGET {
                return Ok(true);
            } else {
                let credit = usize::try_from(limit.saturating_sub(outward.offset)).unwrap_or(usize::MAX);
                if credit == 0 {
                    break;
                }
                let room = &mut scratch.blocks.room()[..scratch.piece.min(credit)];
                match (tcp.read(room), &mut *ending) {
                    (Ok(0), Some(Ending::Ours { read, tells_end, .. })) => {
                        (outward.ended, *read) = (*tells_end, true);
                    }
                    (Ok(0), _) => outward.ended = true,
                    (Ok(len), _) => {
                        order.bytes += len as u64;
                        outward.since_placed += len;
                        if outward.since_placed >= WORTH_A_BLOCK {
                            outward.since_placed = 0;
                            // The stream may be gone; writing says so.
                            let _set = quinn.send_stream(*stream).set_priority(order.last());
                        }
                        if len >= WORTH_A_BLOCK {
                            outward.piece = scratch.blocks.hand_over(len);
                            continue;
                        }
                        // quinn-proto copies what it takes. What it does not take is kept here, and meets the error, too.
                        let written = quinn.send_stream(*stream).write(&room[..len]).unwrap_or_default();
                        outward.bytes += written as u64;
                        outward.offset += written as u64;
                        moved += written;
                        if written < len {
                            outward.piece = Bytes::copy_from_slice(&room[written..len]);
                        }
                    }
                    (Err(error), _) if error.kind() == ErrorKind::WouldBlock => {
                        outward.waits_for_tcp = true;
                        break;
                    }
                    (Err(_), Some(Ending::Ours { read, .. })) => *read = true,
                    (Err(_), _) => return Err(Broken::Tcp { ended: false }),
                }
            }
        }
        if moved == 0 && !outward.closed && is_stopped(quinn, *stream) {
            outward.stop();
        }
        Ok(false)
    }

    /// Stream to TCP; true if the budget ended before the data did.
    fn pump_inward(&mut self, quinn: &mut Connection, scratch: &mut Scratch) -> Result<bool, Broken> {
        let stream = self.stream;
        let Some((tcp, _)) = self.tcp.as_mut() else { return Ok(false) };
        let Scratch { piece, parts, .. } = scratch;
        let inward = &mut self.inward;
        let mut moved = 0;
        while !inward.closed {
            if inward.piece.has_remaining() {
                match tcp.write(&inward.piece) {
                    Ok(written) => {
                        inward.wrote(written);
                        moved += written;
                    }
                    Err(error) if error.kind() == ErrorKind::WouldBlock => {
                        return if was_reset(quinn, stream) { Err(Broken::Stream) } else { Ok(false) };
                    }
                    Err(error) => return Err(Broken::by_write(&error)),
                }
            } else if inward.ended {
                inward.closed = true;
                return tcp.shutdown_write().map(|()| false).map_err(|_| Broken::Tcp { ended: true });
            } else if moved >= BUDGET {
                return Ok(true);
            } else {
                let gathered = gather(quinn, stream, parts, *piece)?;
                inward.offset += gathered.bytes as u64;
                let written = write_parts(&mut **tcp, parts, gathered.bytes);
                let written =
                    written.inspect_err(|_| parts.clear()).map_err(|error| Broken::by_write(&error))?;
                inward.bytes += written as u64;
                moved += written;
                inward.piece = rest(parts, written, gathered.bytes);
                inward.ended = gathered.ended;
                if gathered.emptied && !inward.ended && inward.piece.is_empty() {
                    return Ok(false);
                }
            }
        }
        Ok(false)
    }
}

/// The order in which the streams of a connection send what quinn-proto holds of them.
///
/// quinn-proto takes a packet's worth from each stream in turn, so that the far end finds a few packets of each: many small writes to
/// TCP. Here each half block that a stream takes in puts it behind the others, by its priority, and what is in front is sent as a whole.
/// A stream that sends little stays in front of what came after it, and a new one begins [`AHEAD`] half blocks before the end, so that
/// no number of short ones holds up a long one. Control messages come first. After 2³¹ half blocks, 70 TB, all streams get the last
/// place and take turns.
#[derive(Debug, Default)]
pub struct Order {
    /// Bytes that the streams took in so far.
    bytes: u64,
}

/// The number of half blocks that a new stream overtakes.
const AHEAD: i32 = 8;

impl Order {
    /// The priority of a stream behind all others.
    fn last(&self) -> i32 {
        i32::try_from(self.bytes / WORTH_A_BLOCK as u64).map_or(i32::MIN, |place| -place)
    }

    /// The priority of a new stream.
    fn of_new(&self) -> i32 {
        self.last().saturating_add(AHEAD).min(0)
    }
}

/// Buffers that the forwards of a worker share: each uses them only while it is served.
#[derive(Debug)]
pub struct Scratch {
    /// The number of bytes that a forward may take at once and then hold; [`PIECE`] at most.
    pub piece: usize,
    /// What TCP is read into.
    pub blocks: Blocks,
    /// Parts of a stream on their way to TCP.
    parts: Vec<Bytes>,
}

impl Default for Scratch {
    fn default() -> Self {
        Self { piece: PIECE, blocks: Blocks::default(), parts: Vec::with_capacity(MOST_PARTS) }
    }
}

#[derive(Clone, Copy, Debug)]
struct Gathered {
    bytes: usize,
    /// True if the stream has no more for now.
    emptied: bool,
    /// True if the stream has ended.
    ended: bool,
}

/// Takes up to `most` bytes and [`MOST_PARTS`] parts out of a stream.
fn gather(
    quinn: &mut Connection,
    stream: StreamId,
    parts: &mut Vec<Bytes>,
    most: usize,
) -> Result<Gathered, Broken> {
    let mut gathered = Gathered { bytes: 0, emptied: false, ended: false };
    let mut stream = quinn.recv_stream(stream);
    let mut chunks = stream.read(true).map_err(|_| Broken::Stream)?;
    while gathered.bytes < most && parts.len() < MOST_PARTS {
        match chunks.next(most - gathered.bytes) {
            Ok(Some(chunk)) => {
                gathered.bytes += chunk.bytes.len();
                parts.push(chunk.bytes);
            }
            Ok(None) => {
                (gathered.emptied, gathered.ended) = (true, true);
                break;
            }
            Err(ReadError::Blocked) => {
                gathered.emptied = true;
                break;
            }
            Err(ReadError::Reset(_)) => {
                parts.clear();
                return Err(Broken::Stream);
            }
        }
    }
    // Flow control updates are sent anyway: the worker polls the connection after it was used.
    let _transmit = chunks.finalize();
    Ok(gathered)
}

/// Writes as much of `parts` as TCP takes at once.
fn write_parts(tcp: &mut dyn TcpStream, parts: &[Bytes], bytes: usize) -> io::Result<usize> {
    let written = match parts {
        [] => return Ok(0),
        [only] => tcp.write(only),
        several => {
            let mut slices = [IoSlice::new(&[]); MOST_PARTS];
            for (slice, part) in slices.iter_mut().zip(several) {
                *slice = IoSlice::new(part);
            }
            tcp.write_vectored(&slices[..several.len()])
        }
    };
    match written {
        Err(error) if error.kind() == ErrorKind::WouldBlock => Ok(0),
        written => written.map(|written| written.min(bytes)),
    }
}

/// The rest of `parts`, which have `bytes` bytes, after `written` bytes: as one piece, so that a forward holds no more memory than
/// it reports.
fn rest(parts: &mut Vec<Bytes>, written: usize, bytes: usize) -> Bytes {
    let mut left = Vec::new();
    if written < bytes {
        left.reserve_exact(bytes - written);
        let mut skip = written;
        for part in &*parts {
            let skipped = skip.min(part.len());
            left.extend_from_slice(&part[skipped..]);
            skip -= skipped;
        }
    }
    parts.clear();
    left.into()
}

/// Why a forward cannot go on.
#[derive(Clone, Copy, Debug)]
enum Broken {
    /// Its TCP connection was reset, or failed otherwise. `ended` if it reads as ended only where a FIN came before the reset.
    Tcp { ended: bool },
    /// The peer has reset its stream, or quinn-proto has forgotten it.
    Stream,
}

impl Broken {
    /// A write was told the error: no read is any more. Behind a FIN, a reset is a broken pipe.
    fn by_write(error: &io::Error) -> Self {
        Self::Tcp { ended: error.kind() == ErrorKind::BrokenPipe }
    }
}

/// Whether the peer has reset a stream of which not everything is read.
fn was_reset(quinn: &mut Connection, stream: StreamId) -> bool {
    matches!(quinn.recv_stream(stream).received_reset(), Ok(Some(_)))
}

/// Whether the peer wants no more of a stream.
fn is_stopped(quinn: &mut Connection, stream: StreamId) -> bool {
    matches!(quinn.send_stream(stream).stopped(), Ok(Some(_)))
}

/// Reads the frame at the start of a stream, with the bytes behind it that came along; `None` if it is not complete yet. What is
/// read is added to `offset`.
fn read_frame<T>(
    quinn: &mut Connection,
    stream: StreamId,
    framer: &mut Framer,
    offset: &mut u64,
    decode: impl FnOnce(&[u8]) -> Result<T, MessageError>,
) -> Result<Option<(T, Bytes)>, Broken> {
    let mut stream = quinn.recv_stream(stream);
    let mut chunks = stream.read(true).map_err(|_| Broken::Stream)?;
    loop {
        match chunks.next(PIECE) {
            Ok(Some(Chunk { mut bytes, .. })) => {
                *offset += bytes.len() as u64;
                if let Some(frame) = framer.pull(&mut bytes).map_err(|_| Broken::Stream)? {
                    // A copy: the service may take its time, and the packet lies in a block with others.
                    let rest = Bytes::copy_from_slice(&bytes);
                    return decode(&frame).map(|frame| Some((frame, rest))).map_err(|_| Broken::Stream);
                }
            }
            Err(ReadError::Blocked) => return Ok(None),
            Ok(None) | Err(ReadError::Reset(_)) => return Err(Broken::Stream),
        }
    }
}

/// The answer to the peer about a failed connection attempt. What this host lacks is not the service's refusal.
#[must_use]
pub fn answer_for(error: &io::Error) -> StreamAnswer {
    // A firewall of this host, or a prohibiting route, is EPERM or EACCES.
    let no_way = [
        ErrorKind::NetworkUnreachable,
        ErrorKind::HostUnreachable,
        ErrorKind::NetworkDown,
        ErrorKind::PermissionDenied,
    ];
    if is_out_of_descriptors(error) {
        StreamAnswer::TooManyFiles
    } else if is_out_of_resources(error) {
        StreamAnswer::NoResources
    } else if no_way.contains(&error.kind()) {
        StreamAnswer::NoRoute
    } else if error.kind() == ErrorKind::TimedOut {
        StreamAnswer::UpstreamTimeout
    } else {
        StreamAnswer::UpstreamRefused
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_this_host_lacks_is_not_called_a_refusal_of_the_service() {
        // Numbers of Linux: EMFILE, ENFILE, EADDRNOTAVAIL, EAGAIN, ENOBUFS, ENOMEM, ENETUNREACH, EHOSTUNREACH, EACCES, EPERM,
        // ETIMEDOUT, ECONNREFUSED, ECONNRESET.
        for (code, answer) in [
            (24, StreamAnswer::TooManyFiles),
            (23, StreamAnswer::TooManyFiles),
            (99, StreamAnswer::NoResources),
            (11, StreamAnswer::NoResources),
            (105, StreamAnswer::NoResources),
            (12, StreamAnswer::NoResources),
            (101, StreamAnswer::NoRoute),
            (113, StreamAnswer::NoRoute),
            (13, StreamAnswer::NoRoute),
            (1, StreamAnswer::NoRoute),
            (110, StreamAnswer::UpstreamTimeout),
            (111, StreamAnswer::UpstreamRefused),
            (104, StreamAnswer::UpstreamRefused),
        ] {
            assert_eq!(answer_for(&io::Error::from_raw_os_error(code)), answer, "{code}");
        }
    }
}
