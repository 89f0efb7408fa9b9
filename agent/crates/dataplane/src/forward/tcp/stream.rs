//! What is read from a stream, and how it is written to TCP in one call.

use std::io::{self, ErrorKind, IoSlice};

use bytes::Bytes;
use net::TcpStream;
use quinn_proto::{Chunk, Connection, ReadError, StreamId, VarInt};
use wire::messages::{Framer, MessageError};

use crate::forward::blocks::{BLOCK, Blocks};

/// The largest number of bytes that are read at once.
pub const PIECE: usize = BLOCK;

/// The number of parts of a stream that are written to TCP at once: [`PIECE`] in packets of Ethernet.
const MOST_PARTS: usize = 64;

/// The error code of streams that are reset because their TCP connection was.
pub const RESET: VarInt = VarInt::from_u32(1);

/// Buffers that the forwards of a worker share: each uses them only while it is served.
#[derive(Debug)]
pub struct Scratch {
    /// The number of bytes that a forward may take at once and then hold; [`PIECE`] at most.
    pub piece: usize,
    /// The number of bytes that a forward may take from its stream each time it is served; 0: the peer has sent more than it may.
    pub takes: usize,
    /// What TCP is read into.
    pub blocks: Blocks,
    /// Parts of a stream on their way to TCP.
    pub(super) parts: Vec<Bytes>,
}

impl Default for Scratch {
    fn default() -> Self {
        Self {
            piece: PIECE,
            takes: usize::MAX,
            blocks: Blocks::default(),
            parts: Vec::with_capacity(MOST_PARTS),
        }
    }
}

/// Why a forward cannot go on.
#[derive(Clone, Copy, Debug)]
pub(super) enum Broken {
    /// Its TCP connection was reset, or failed otherwise. `ended` if it reads as ended only where a FIN came before the reset.
    Tcp { ended: bool },
    /// The peer has reset its stream, or quinn-proto has forgotten it.
    Stream,
}

impl Broken {
    /// A write was told the error: no read is any more. Behind a FIN, a reset is a broken pipe.
    pub(super) fn by_write(error: &io::Error) -> Self {
        Self::Tcp { ended: error.kind() == ErrorKind::BrokenPipe }
    }
}

/// How much [`gather`] took.
#[derive(Clone, Copy, Debug)]
pub(super) struct Gathered {
    pub(super) bytes: usize,
    /// True if the stream has no more for now.
    pub(super) emptied: bool,
    /// True if the stream has ended.
    pub(super) ended: bool,
}

/// Takes up to `most` bytes and [`MOST_PARTS`] parts out of a stream.
pub(super) fn gather(
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
pub(super) fn write_parts(tcp: &mut dyn TcpStream, parts: &[Bytes], bytes: usize) -> io::Result<usize> {
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
pub(super) fn rest(parts: &mut Vec<Bytes>, written: usize, bytes: usize) -> Bytes {
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

/// Whether the peer has reset a stream of which not everything is read.
pub(super) fn was_reset(quinn: &mut Connection, stream: StreamId) -> bool {
    matches!(quinn.recv_stream(stream).received_reset(), Ok(Some(_)))
}

/// What is next on a stream.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Next {
    Bytes,
    /// Nothing has come yet.
    Nothing,
    End,
}

/// What is next on a stream, of which no byte is read; an end is.
pub(super) fn next(quinn: &mut Connection, stream: StreamId) -> Result<Next, Broken> {
    let mut stream = quinn.recv_stream(stream);
    let mut chunks = stream.read(true).map_err(|_| Broken::Stream)?;
    match chunks.next(0) {
        Ok(Some(_)) => Ok(Next::Bytes),
        Ok(None) => Ok(Next::End),
        Err(ReadError::Blocked) => Ok(Next::Nothing),
        Err(ReadError::Reset(_)) => Err(Broken::Stream),
    }
}

/// Whether the peer wants no more of a stream.
pub(super) fn is_stopped(quinn: &mut Connection, stream: StreamId) -> bool {
    matches!(quinn.send_stream(stream).stopped(), Ok(Some(_)))
}

/// Reads the frame at the start of a stream, with the bytes behind it that came along; `None` if it is not complete yet. What is
/// read is added to `offset`.
pub(super) fn read_frame<T>(
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
