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
//!
//! | question | file |
//! |---|---|
//! | what a forward consists of, and what is done each time it is served | this one |
//! | how it is opened, or refused | `opening.rs` |
//! | where a service is tried, and for how long | `places.rs` |
//! | what moves in each direction | `direction.rs` |
//! | what is read from a stream, and how it gets to TCP in one call | `stream.rs` |
//! | which stream of a connection sends first | `order.rs` |
//! | when its reader has stopped, and how far the peer may send to it | `reader.rs` |
//! | how a forward ends after a reset | `ending.rs` |

use std::{
    io,
    time::{Duration, Instant},
};

use net::{TcpStream, Token};
use quinn_proto::{Connection, StreamId};
use wire::messages::{Framer, MAX_STREAM_HEADER_BYTES, StreamAnswer, StreamOpen};

use direction::Direction;
use ending::Ending;
pub use ending::LAST_BYTES_TIMEOUT;
use opening::Stage;
pub use opening::{ANSWER_TIMEOUT, HEADER_TIMEOUT, answer_for};
pub use order::Order;
pub use places::{CONNECT_TIMEOUT, Places};
pub use reader::LEAST_CREDIT;
use reader::Reader;
use stream::{Broken, was_reset};
pub use stream::{PIECE, RESET, Scratch};

mod direction;
mod ending;
mod opening;
mod order;
mod places;
mod reader;
mod stream;

/// The index of a TCP forward among those of its worker.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct TcpId(pub u32);

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
    /// The service was not reached at one place, and there is another: [`TcpForward::take_places`] is to follow.
    Unreached,
    /// The peer did not open the forward.
    Refused(StreamAnswer),
    /// Its TCP connection was reset after this many bytes of the stream, its end included: the peer is to be told.
    /// [`TcpForward::is_over`] says whether it is to be kept until the peer stops the stream.
    Aborted {
        bytes: u64,
    },
    Done,
}

pub struct TcpForward {
    stream: StreamId,
    /// The connection, with its token; `None` until the service's address is known.
    tcp: Option<(Box<dyn TcpStream>, Token)>,
    stage: Stage,
    /// Our service that it leads to, once the peer has named it; `None` if it was opened here.
    service: Option<u32>,
    /// The direction from TCP to the stream, which starts with the header or the answer.
    outward: Direction,
    /// The direction from the stream to TCP.
    inward: Direction,
    /// True if its stream has had an event and the forward waits to be served.
    pub stirred: bool,
    /// The pass in which its stream took something last: the forward for which that was longest ago comes first. One that is served and
    /// finds no room keeps its place.
    pub sent: u64,
    /// How it ends, once either side was reset; boxed, as few forwards have that.
    ending: Option<Box<Ending>>,
    knows: Knows,
    /// How far our end may send on the stream, as the peer says, in bytes.
    limit: u64,
    reader: Reader,
    /// The kernel's error of the attempt to connect to the service.
    failure: Option<io::Error>,
}

/// What the peer knows of forwards beyond their streams.
#[derive(Clone, Copy, Debug, Default)]
pub struct Knows {
    /// How one ends by a reset: `StreamAbort`.
    pub aborts: bool,
    /// How far it may send on one: `StreamCredit`.
    pub credit: bool,
}

impl TcpForward {
    /// A client's connection, for which `stream` was opened; `read` was read from it already.
    #[must_use]
    pub fn opened(
        stream: StreamId,
        (tcp, token): (Box<dyn TcpStream>, Token),
        open: StreamOpen,
        read: &[u8],
        knows: Knows,
        now: Instant,
    ) -> Self {
        let mut header = Vec::new();
        open.encode(&mut header);
        let framer = Box::new(Framer::new(MAX_STREAM_HEADER_BYTES));
        let stage = Stage::AwaitingAnswer { framer, until: now + ANSWER_TIMEOUT };
        let outward = Direction::beginning_with_both(header, read);
        Self { tcp: Some((tcp, token)), outward, ..Self::new(stream, stage, knows) }
    }

    /// A stream that the peer opened.
    #[must_use]
    pub fn accepted(stream: StreamId, knows: Knows, now: Instant) -> Self {
        let framer = Box::new(Framer::new(MAX_STREAM_HEADER_BYTES));
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
            ending: None,
            knows,
            limit: u64::MAX,
            reader: Reader::default(),
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

    /// The index of our service that it leads to, once the peer has named it; `None` if it was opened here.
    #[must_use]
    pub fn service(&self) -> Option<u32> {
        self.service
    }

    /// Bytes from TCP to the stream and from the stream to TCP so far.
    #[must_use]
    pub fn bytes(&self) -> (u64, u64) {
        (self.outward.bytes(), self.inward.bytes())
    }

    /// Whether bytes wait for the stream, and for TCP, which took no more when they were last served. The peer's reader has stopped, too,
    /// if the peer lets us send no more.
    #[must_use]
    pub fn waits(&self) -> [bool; 2] {
        let held_back = !self.outward.is_closed() && self.outward.offset() >= self.limit;
        [held_back || self.outward.held() > 0, self.inward.held() > 0]
    }

    /// Whether nothing more passes, in either direction.
    #[must_use]
    pub fn is_over(&self) -> bool {
        self.outward.is_closed() && self.inward.is_closed()
    }

    /// Whether it is over, and neither side was reset.
    #[must_use]
    pub fn ended_in_order(&self) -> bool {
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

    /// The number of bytes that it has read and could not pass on.
    #[must_use]
    pub fn held(&self) -> usize {
        self.outward.held() + self.inward.held()
    }

    /// Takes its TCP connection's token out, once that connection is done for and the forward is not.
    pub fn take_token(&mut self) -> Option<Token> {
        let is_told = self.ending.as_ref().is_some_and(|ending| ending.is_told());
        self.tcp.take_if(|_| is_told).map(|(_, token)| token)
    }

    /// Whether bytes of its stream wait because the peer has sent more than it may, as of the last call of [`TcpForward::pump`].
    #[must_use]
    pub fn rests(&self) -> bool {
        self.inward.rests()
    }

    /// The time at which [`TcpForward::pump`] is to be called although nothing happens; `crowded` if readers that stop are in the way of
    /// others.
    #[must_use]
    pub fn look_at(&self, crowded: bool) -> Option<Instant> {
        match &self.ending {
            Some(ending) => ending.look_at(),
            None if crowded && self.knows.credit => self.reader.stops_at(),
            None => None,
        }
    }

    /// Since when its reader has been stopped, as of the last call of [`TcpForward::reader_changed`]: bytes have waited for it at
    /// each call since, the same ones or others.
    #[must_use]
    pub fn reader_stopped(&self) -> Option<Instant> {
        self.reader.stopped()
    }

    /// Whether its reader has stopped, if that has changed since the last call.
    pub fn reader_changed(&mut self, now: Instant) -> Option<bool> {
        self.reader.look(self.inward.held() > 0, now)
    }

    /// Whether the peer keeps to what it is told of how far it may send.
    #[must_use]
    pub fn keeps_credit(&self) -> bool {
        self.knows.credit
    }

    /// The peer says how far our end may send on the stream.
    pub fn limit_to(&mut self, limit: u64) {
        self.limit = limit;
    }

    /// Notes that the peer was told of `window` bytes before the stream began, or may have been; returns how far it may send.
    pub fn begin_limited(&mut self, window: u64, now: Instant) -> u64 {
        self.reader.limit(self.inward.offset(), window, now)
    }

    /// How far the peer may send on the stream from now on, if it is to be told. `most` is how far it may send ahead of a reader that
    /// goes on, without limit if that is `None`.
    pub fn credit_to_tell(&mut self, most: Option<u64>, rtt: Duration, now: Instant) -> Option<u64> {
        if !self.knows.credit || self.inward.is_closed() {
            return None;
        }
        self.reader.credit_to_tell(self.inward.offset(), most, rtt, now)
    }

    /// Resets both directions of the stream.
    pub fn reset(&mut self, quinn: &mut Connection) {
        // A direction that has ended already needs no reset.
        let _reset = quinn.send_stream(self.stream).reset(RESET).is_ok();
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
        if self.stop_sending(quinn, now) {
            return self.end(quinn);
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
        if self.ending.as_ref().is_some_and(|ending| ending.is_told()) {
            return self.await_stop(quinn);
        }
        let moved = self.moved();
        let outward = self.pump_outward(quinn, order, scratch);
        if self.outward.take_stopped() {
            self.stopped(quinn, now);
        }
        let inward = if self.was_open() { self.pump_inward(quinn, scratch) } else { Ok(false) };
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

    /// What changes whenever bytes pass on either side.
    fn moved(&self) -> (u64, u64) {
        (self.outward.offset(), self.inward.bytes())
    }

    /// Resets both sides of the forward.
    fn end(&mut self, quinn: &mut Connection) -> Pumped {
        self.abort();
        self.reset(quinn);
        Pumped::Done
    }
}
