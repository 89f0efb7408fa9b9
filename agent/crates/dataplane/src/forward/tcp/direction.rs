//! The two directions of a forward, and what moves in each.

use std::io::ErrorKind;

use bytes::{Buf, Bytes};
use quinn_proto::{Connection, StreamId, WriteError};
use wire::messages::{Framer, MessageError};

use crate::forward::{
    blocks::WORTH_A_BLOCK,
    tcp::{
        Order, Scratch, TcpForward,
        stream::{self, Broken, Next, gather, rest, write_parts},
    },
};

/// The largest number of bytes that one call of [`TcpForward::pump`] moves in each direction before others have their turn.
const BUDGET: usize = 256 * 1024;

/// One direction of a TCP forward.
#[derive(Debug, Default)]
pub(super) struct Direction {
    /// Bytes that were read and not written yet.
    piece: Bytes,
    /// The number of bytes of the TCP connection that were written.
    bytes: u64,
    /// The number of bytes of the stream, framing included, that were written to it or read from it.
    offset: u64,
    /// The number of bytes of the piece that are the forward's own: a header or an answer.
    framing: u32,
    /// Bytes read since the stream got its place in the [`Order`]: below [`WORTH_A_BLOCK`].
    since_placed: u32,
    /// Whether the stream has a place in the [`Order`].
    placed: bool,
    /// True once the reading side has ended.
    ended: bool,
    /// True once the end was passed on, or the direction was given up.
    closed: bool,
    /// Whether the end was passed on.
    finished: bool,
    /// Whether the peer has just stopped its stream.
    stopped: bool,
    /// Whether TCP reports its next byte, or its end, because everything was read.
    waits_for_tcp: bool,
    /// Whether bytes of the stream wait because the peer has sent more than it may.
    rests: bool,
}

impl Direction {
    /// A direction that begins with bytes of our own, which are few.
    pub(super) fn beginning_with(framing: Vec<u8>) -> Self {
        Self { framing: framing.len() as u32, piece: framing.into(), ..Self::default() }
    }

    /// The same, before `bytes` that were read from TCP already.
    pub(super) fn beginning_with_both(mut framing: Vec<u8>, bytes: &[u8]) -> Self {
        let own = framing.len() as u32;
        framing.extend_from_slice(bytes);
        Self { framing: own, piece: framing.into(), ..Self::default() }
    }

    /// Puts bytes of our own, which are few, before what it holds.
    pub(super) fn put_first(&mut self, framing: Vec<u8>) {
        *self = Self {
            offset: self.offset,
            ended: self.ended,
            ..Self::beginning_with_both(framing, &self.piece)
        };
    }

    /// The number of bytes of the TCP connection that have passed.
    pub(super) fn bytes(&self) -> u64 {
        self.bytes
    }

    /// How far the stream was written or read, framing included.
    pub(super) fn offset(&self) -> u64 {
        self.offset
    }

    /// The same, where the end of the stream counts as a byte.
    pub(super) fn offset_with_end(&self) -> u64 {
        self.offset + u64::from(self.finished)
    }

    /// The number of bytes that were read and not passed on.
    pub(super) fn held(&self) -> usize {
        self.piece.len()
    }

    /// Whether the reading side has ended.
    pub(super) fn has_ended(&self) -> bool {
        self.ended
    }

    pub(super) fn is_closed(&self) -> bool {
        self.closed
    }

    /// Whether TCP reports its next byte, or its end.
    pub(super) fn waits_for_tcp(&self) -> bool {
        self.waits_for_tcp
    }

    /// Whether bytes of the stream wait because the peer has sent more than it may.
    pub(super) fn rests(&self) -> bool {
        self.rests && !self.closed
    }

    /// Whether the peer has stopped its stream since the last call.
    pub(super) fn take_stopped(&mut self) -> bool {
        std::mem::take(&mut self.stopped)
    }

    /// Gives the direction up with what it holds.
    pub(super) fn close(&mut self) {
        self.closed = true;
        self.piece = Bytes::new();
    }

    /// Reads the frame at the start of the stream, and holds the bytes behind it that came along; `None` if it is not complete yet.
    pub(super) fn read_frame<T>(
        &mut self,
        quinn: &mut Connection,
        stream: StreamId,
        framer: &mut Framer,
        decode: impl FnOnce(&[u8]) -> Result<T, MessageError>,
    ) -> Result<Option<T>, Broken> {
        let read = stream::read_frame(quinn, stream, framer, &mut self.offset, decode)?;
        Ok(read.map(|(frame, rest)| {
            self.piece = rest;
            frame
        }))
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
        let framing = written.min(self.framing as usize);
        self.framing -= framing as u32;
        self.bytes += (written - framing) as u64;
    }

    /// Notes that `len` bytes, a piece at the most, were read from TCP; returns whether the stream is to have a new place in the [`Order`].
    fn took_in(&mut self, len: usize) -> bool {
        self.since_placed += len as u32;
        let is_due = self.since_placed as usize >= WORTH_A_BLOCK;
        if is_due {
            self.since_placed = 0;
        }
        is_due
    }
}

impl TcpForward {
    /// TCP to stream; true if the budget ended before the data did.
    pub(super) fn pump_outward(
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
            } else if ending.as_ref().is_some_and(|ending| ending.has_read_all()) {
                return Ok(false);
            } else if moved >= BUDGET {
                return Ok(true);
            } else {
                let credit = usize::try_from(limit.saturating_sub(outward.offset)).unwrap_or(usize::MAX);
                if credit == 0 {
                    break;
                }
                let room = &mut scratch.blocks.room()[..scratch.piece.min(credit)];
                match tcp.read(room) {
                    Ok(0) => outward.ended = ending.as_mut().is_none_or(|ending| ending.reads_end()),
                    Ok(len) => {
                        order.took(len);
                        if outward.took_in(len) {
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
                    Err(error) if error.kind() == ErrorKind::WouldBlock => {
                        outward.waits_for_tcp = true;
                        break;
                    }
                    Err(_) if ending.as_mut().is_some_and(|ending| ending.expects_error()) => {}
                    Err(_) => return Err(Broken::Tcp { ended: false }),
                }
            }
        }
        if moved == 0 && !outward.closed && stream::is_stopped(quinn, *stream) {
            outward.stop();
        }
        Ok(false)
    }

    /// Stream to TCP; true if the budget ended before the data did.
    pub(super) fn pump_inward(
        &mut self,
        quinn: &mut Connection,
        scratch: &mut Scratch,
    ) -> Result<bool, Broken> {
        let stream = self.stream;
        let Some((tcp, _)) = self.tcp.as_mut() else { return Ok(false) };
        let inward = &mut self.inward;
        inward.rests = false;
        let (mut moved, mut left) = (0, scratch.takes);
        while !inward.closed {
            if inward.piece.has_remaining() {
                match tcp.write(&inward.piece) {
                    Ok(written) => {
                        inward.wrote(written);
                        moved += written;
                    }
                    Err(error) if error.kind() == ErrorKind::WouldBlock => {
                        return if stream::was_reset(quinn, stream) {
                            Err(Broken::Stream)
                        } else {
                            Ok(false)
                        };
                    }
                    Err(error) => return Err(Broken::by_write(&error)),
                }
            } else if inward.ended {
                inward.closed = true;
                return tcp.shutdown_write().map(|()| false).map_err(|_| Broken::Tcp { ended: true });
            } else if moved >= BUDGET {
                return Ok(true);
            } else if scratch.takes == 0 {
                match stream::next(quinn, stream)? {
                    Next::End => inward.ended = true,
                    next @ (Next::Bytes | Next::Nothing) => {
                        inward.rests = next == Next::Bytes;
                        return Ok(false);
                    }
                }
            } else if left == 0 {
                return Ok(true);
            } else {
                let parts = &mut scratch.parts;
                let gathered = gather(quinn, stream, parts, scratch.piece.min(left))?;
                left -= gathered.bytes;
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
