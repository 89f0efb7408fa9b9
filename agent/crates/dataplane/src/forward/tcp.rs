//! A TCP forward: one TCP connection, one QUIC stream.
//!
//! ```text
//!   client ─TCP─ [opener]  ══ stream: StreamOpen │ bytes ══►  [acceptor] ─TCP─ service
//!                          ◄═ StreamAnswer │ bytes ═════════
//! ```
//!
//! Each direction holds at most [`PIECE`] bytes: it reads no more until the other side has taken them, so a slow
//! reader slows its writer and nothing grows. The packets of a stream go to TCP in one call. An end of stream is passed on as
//! such (half-close); a reset ends both directions.

use std::{
    io::{self, ErrorKind, IoSlice},
    time::{Duration, Instant},
};

use bytes::{Buf, Bytes};
use net::{TcpStream, Token};
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
    /// The number of bytes of the piece that are the forward's own: a header or an answer.
    framing: usize,
    /// The number of bytes of the TCP connection that were written.
    bytes: u64,
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
}

impl TcpForward {
    /// A client's connection, for which `stream` was opened.
    #[must_use]
    pub fn opened(
        stream: StreamId,
        tcp: Box<dyn TcpStream>,
        token: Token,
        service: u32,
        now: Instant,
    ) -> Self {
        let mut header = Vec::new();
        StreamOpen { service }.encode(&mut header);
        let framer = Framer::new(MAX_STREAM_HEADER_BYTES);
        let stage = Stage::AwaitingAnswer { framer, until: now + ANSWER_TIMEOUT };
        let outward = Direction::beginning_with(header);
        Self { tcp: Some((tcp, token)), outward, ..Self::new(stream, stage) }
    }

    /// A stream that the peer opened.
    #[must_use]
    pub fn accepted(stream: StreamId, now: Instant) -> Self {
        let framer = Framer::new(MAX_STREAM_HEADER_BYTES);
        Self::new(stream, Stage::AwaitingHeader { framer, until: now + HEADER_TIMEOUT })
    }

    fn new(stream: StreamId, stage: Stage) -> Self {
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
    pub fn stall_changed(&mut self) -> Option<bool> {
        let stalled = !self.inward.piece.is_empty();
        (std::mem::replace(&mut self.stalled, stalled) != stalled).then_some(stalled)
    }

    /// The number of bytes that it has read and could not pass on.
    #[must_use]
    pub fn held(&self) -> usize {
        self.outward.piece.len() + self.inward.piece.len()
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
    pub fn pump(&mut self, quinn: &mut Connection, order: &mut Order, scratch: &mut Scratch) -> Pumped {
        match &self.stage {
            Stage::AwaitingHeader { .. } => return self.read_header(quinn),
            Stage::Connecting { .. } => return self.finish_connect(quinn).unwrap_or(Pumped::Waiting),
            Stage::AwaitingAnswer { .. } => {
                if let Err(ended) = self.read_answer(quinn) {
                    return ended;
                }
            }
            Stage::Open => {}
        }
        let outward = self.pump_outward(quinn, order, scratch);
        let is_open = matches!(self.stage, Stage::Open);
        let inward = if is_open { self.pump_inward(quinn, scratch) } else { Ok(false) };
        match (outward, inward) {
            (Ok(_), Ok(_)) if self.outward.closed && self.inward.closed => Pumped::Done,
            (Ok(false), Ok(false)) => Pumped::Waiting,
            (Ok(_), Ok(_)) => Pumped::Busy,
            (Err(Broken), _) | (_, Err(Broken)) => self.end(quinn),
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
        match read_frame(quinn, self.stream, framer, StreamOpen::decode) {
            Ok(Some((header, rest))) => {
                self.inward.piece = rest;
                Pumped::Wants(header)
            }
            Ok(None) => Pumped::Waiting,
            Err(Broken) => self.end(quinn),
        }
    }

    fn read_answer(&mut self, quinn: &mut Connection) -> Result<(), Pumped> {
        let Stage::AwaitingAnswer { framer, .. } = &mut self.stage else { return Ok(()) };
        match read_frame(quinn, self.stream, framer, StreamAnswer::decode) {
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
            Err(Broken) => Err(self.end(quinn)),
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
        let Some((tcp, _)) = self.tcp.as_mut() else { return Ok(false) };
        let outward = &mut self.outward;
        if !std::mem::replace(&mut outward.placed, true) {
            let _set = quinn.send_stream(self.stream).set_priority(order.of_new());
        }
        let mut moved = 0;
        while !outward.closed {
            if outward.piece.has_remaining() {
                match quinn.send_stream(self.stream).write_chunks(&mut [outward.piece.clone()]) {
                    Ok(written) => {
                        let was_worth_it = outward.piece.len() >= WORTH_A_BLOCK;
                        outward.wrote(written.bytes);
                        moved += written.bytes;
                        if was_worth_it && outward.piece.len() < WORTH_A_BLOCK {
                            // Otherwise a few bytes that wait would keep a block.
                            outward.piece = Bytes::copy_from_slice(&outward.piece);
                        }
                    }
                    Err(WriteError::Blocked) => return Ok(false),
                    // The peer takes no more, but data of its service may still come the other way.
                    Err(WriteError::Stopped(_)) => {
                        outward.closed = true;
                        outward.piece = Bytes::new();
                        // Otherwise quinn-proto would keep the stream open for an end that never comes.
                        let _reset = quinn.send_stream(self.stream).reset(RESET).is_ok();
                    }
                    Err(WriteError::ClosedStream) => return Err(Broken),
                }
            } else if outward.ended {
                outward.closed = true;
                return quinn.send_stream(self.stream).finish().map(|()| false).map_err(|_| Broken);
            } else if moved >= BUDGET {
                return Ok(true);
            } else {
                let room = &mut scratch.blocks.room()[..scratch.piece];
                match tcp.read(room) {
                    Ok(0) => outward.ended = true,
                    Ok(len) => {
                        order.bytes += len as u64;
                        outward.since_placed += len;
                        if outward.since_placed >= WORTH_A_BLOCK {
                            outward.since_placed = 0;
                            // The stream may be gone; writing says so.
                            let _set = quinn.send_stream(self.stream).set_priority(order.last());
                        }
                        if len >= WORTH_A_BLOCK {
                            outward.piece = scratch.blocks.hand_over(len);
                            continue;
                        }
                        // quinn-proto copies what it takes. What it does not take is kept here, and meets the error, too.
                        let written = quinn.send_stream(self.stream).write(&room[..len]).unwrap_or_default();
                        outward.bytes += written as u64;
                        moved += written;
                        if written < len {
                            outward.piece = Bytes::copy_from_slice(&room[written..len]);
                        }
                    }
                    Err(error) if error.kind() == ErrorKind::WouldBlock => return Ok(false),
                    Err(_) => return Err(Broken),
                }
            }
        }
        Ok(false)
    }

    /// Stream to TCP; true if the budget ended before the data did.
    fn pump_inward(&mut self, quinn: &mut Connection, scratch: &mut Scratch) -> Result<bool, Broken> {
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
                    Err(error) if error.kind() == ErrorKind::WouldBlock => return Ok(false),
                    Err(_) => return Err(Broken),
                }
            } else if inward.ended {
                inward.closed = true;
                return tcp.shutdown_write().map(|()| false).map_err(|_| Broken);
            } else if moved >= BUDGET {
                return Ok(true);
            } else {
                let gathered = gather(quinn, self.stream, parts, *piece)?;
                let written = write_parts(&mut **tcp, parts, gathered.bytes);
                let written = written.inspect_err(|_| parts.clear()).map_err(|_| Broken)?;
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
    let mut chunks = stream.read(true).map_err(|_| Broken)?;
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
                return Err(Broken);
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

/// A reset on either side, or a stream that quinn-proto has forgotten.
#[derive(Clone, Copy, Debug)]
struct Broken;

/// Reads the frame at the start of a stream, with the bytes behind it that came along; `None` if it is not complete yet.
fn read_frame<T>(
    quinn: &mut Connection,
    stream: StreamId,
    framer: &mut Framer,
    decode: impl FnOnce(&[u8]) -> Result<T, MessageError>,
) -> Result<Option<(T, Bytes)>, Broken> {
    let mut stream = quinn.recv_stream(stream);
    let mut chunks = stream.read(true).map_err(|_| Broken)?;
    loop {
        match chunks.next(PIECE) {
            Ok(Some(Chunk { mut bytes, .. })) => {
                if let Some(frame) = framer.pull(&mut bytes).map_err(|_| Broken)? {
                    // A copy: the service may take its time, and the packet lies in a block with others.
                    let rest = Bytes::copy_from_slice(&bytes);
                    return decode(&frame).map(|frame| Some((frame, rest))).map_err(|_| Broken);
                }
            }
            Err(ReadError::Blocked) => return Ok(None),
            Ok(None) | Err(ReadError::Reset(_)) => return Err(Broken),
        }
    }
}

/// The answer to the peer about a failed connection attempt.
#[must_use]
pub fn answer_for(error: &io::Error) -> StreamAnswer {
    if error.kind() == ErrorKind::TimedOut {
        StreamAnswer::UpstreamTimeout
    } else {
        StreamAnswer::UpstreamRefused
    }
}
