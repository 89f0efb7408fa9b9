//! Frames (RFC 9114 §7): type, length, and then that many bytes, which nobody has to hold together.

use bytes::Bytes;

use crate::varint::{self, Partial};

/// DATA: content of a message, or bytes of a tunnel.
pub const DATA: u64 = 0x00;
/// HEADERS: a field section.
pub const HEADERS: u64 = 0x01;
/// CANCEL_PUSH: a push is not wanted.
pub const CANCEL_PUSH: u64 = 0x03;
/// SETTINGS, the first frame of a control stream.
pub const SETTINGS: u64 = 0x04;
/// PUSH_PROMISE, which only servers send.
pub const PUSH_PROMISE: u64 = 0x05;
/// GOAWAY: the end of a connection begins.
pub const GOAWAY: u64 = 0x07;
/// MAX_PUSH_ID: how many pushes a server may promise.
pub const MAX_PUSH_ID: u64 = 0x0d;
/// PRIORITY_UPDATE about a request (RFC 9218 §7.2).
pub const PRIORITY_UPDATE_REQUEST: u64 = 0xf_0700;
/// PRIORITY_UPDATE about a push.
pub const PRIORITY_UPDATE_PUSH: u64 = 0xf_0701;

/// Whether `kind` is a frame of HTTP/2 that HTTP/3 does not have (RFC 9114 §7.2.8): PRIORITY, PING, WINDOW_UPDATE, CONTINUATION.
pub(crate) const fn is_of_http2(kind: u64) -> bool {
    matches!(kind, 0x02 | 0x06 | 0x08 | 0x09)
}

/// Appends the head of a frame; `length` bytes of payload have to follow.
pub fn put_head(out: &mut Vec<u8>, kind: u64, length: u64) {
    varint::put(out, kind);
    varint::put(out, length);
}

/// Appends a whole frame.
pub fn put(out: &mut Vec<u8>, kind: u64, payload: &[u8]) {
    put_head(out, kind, payload.len() as u64);
    out.extend_from_slice(payload);
}

/// Type and length of a frame or a capsule: both have the same head.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Head {
    pub(crate) kind: u64,
    pub(crate) length: u64,
}

/// The head of a frame or a capsule, of which bytes may still be missing.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct HeadReader {
    kind: Option<u64>,
    next: Partial,
}

impl HeadReader {
    /// Takes bytes from the front of `input` until the head is whole.
    pub(crate) fn take(&mut self, input: &mut Bytes) -> Option<Head> {
        let kind = match self.kind {
            Some(kind) => kind,
            None => *self.kind.insert(self.next.take(input)?),
        };
        let length = self.next.take(input)?;
        self.kind = None;
        Some(Head { kind, length })
    }

    /// Whether no byte of the next head came yet.
    pub(crate) const fn is_empty(&self) -> bool {
        self.kind.is_none() && self.next.is_empty()
    }
}

/// Takes at most `left` bytes from the front of `input`, and counts them down.
pub(crate) fn take_payload(input: &mut Bytes, left: &mut u64) -> Bytes {
    let count = usize::try_from(*left).unwrap_or(usize::MAX).min(input.len());
    *left -= count as u64;
    input.split_to(count)
}

/// A payload that is held until it is whole.
#[derive(Debug)]
pub(crate) struct Collector {
    held: Vec<u8>,
    left: u64,
}

impl Collector {
    pub(crate) const fn new(length: u64) -> Self {
        Self { held: Vec::new(), left: length }
    }

    /// Takes bytes from the front of `input`. Returns the payload when it is whole, uncopied if it lies in `input` in one piece.
    pub(crate) fn take(&mut self, input: &mut Bytes) -> Option<Bytes> {
        let piece = take_payload(input, &mut self.left);
        if self.held.is_empty() && self.left == 0 {
            return Some(piece);
        }
        // Twice what it needs when it has to grow, so that single bytes are not copied over and over, but never more than the payload.
        let needed = self.held.len() + piece.len();
        if needed > self.held.capacity() {
            let whole = usize::try_from(self.left).unwrap_or(usize::MAX).saturating_add(needed);
            self.held.reserve_exact((2 * needed).min(whole) - self.held.len());
        }
        self.held.extend_from_slice(&piece);
        (self.left == 0).then(|| std::mem::take(&mut self.held).into())
    }

    /// How much memory the bytes have that came so far.
    pub(crate) const fn held_bytes(&self) -> usize {
        self.held.capacity()
    }
}
