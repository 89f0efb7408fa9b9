//! The frames of a lane's packets: a codec that borrows and does not allocate.
//!
//! | type | frame | here |
//! |---|---|---|
//! | 0x00 | PADDING | |
//! | 0x01 | PING | |
//! | 0x02, 0x03 | ACK, without and with ECN counts | `ack.rs` |
//! | 0x1a, 0x1b | PATH_CHALLENGE, PATH_RESPONSE | |
//! | 0x30, 0x31 | DATAGRAM, without and with length | [`datagram`] |
//!
//! Every other type is a [`Violation`] on a lane.
//!
//! A caller writes DATAGRAM frames with [`FrameWriter`], or with [`datagram`] straight into its batch; all other frames
//! are the lane's own business.

pub(crate) mod ack;
pub mod datagram;

pub(crate) use ack::AckFrame;

use crate::{
    Violation,
    varint::{self, Reader},
};

/// Type of a PING frame, which is this one byte.
pub const PING: u8 = 0x01;

/// Appends DATAGRAM frames to the caller's slice: the part of a packet between header and tag.
///
/// ```
/// use quic_core::frame::FrameWriter;
/// let mut frames = [0; 64];
/// let mut writer = FrameWriter::new(&mut frames);
/// writer.datagram(5).expect("64 bytes are enough").copy_from_slice(b"first");
/// writer.last_datagram(6).expect("64 bytes are enough").copy_from_slice(b"second");
/// assert_eq!(writer.len(), 7 + 7);
/// ```
#[derive(Debug)]
pub struct FrameWriter<'a> {
    frames: &'a mut [u8],
    len: usize,
}

impl<'a> FrameWriter<'a> {
    /// Starts at the front of `frames`.
    pub fn new(frames: &'a mut [u8]) -> Self {
        Self { frames, len: 0 }
    }

    /// Appends a DATAGRAM frame with a length field (0x31) and returns the room for its payload.
    ///
    /// `None` if it does not fit; nothing counts as written then.
    #[inline]
    pub fn datagram(&mut self, payload_len: usize) -> Option<&mut [u8]> {
        let room = &mut self.frames[self.len..];
        let header_len = datagram::write_header_with_len(room, payload_len)?;
        let payload = room[header_len..].get_mut(..payload_len)?;
        self.len += header_len + payload_len;
        Some(payload)
    }

    /// Appends a DATAGRAM frame that extends to the end of the packet (0x30) and returns the room for its payload.
    ///
    /// The packet must end after it: seal exactly [`len`](Self::len) bytes of frames, and append no other frame.
    /// `None` if it does not fit; nothing counts as written then.
    #[inline]
    pub fn last_datagram(&mut self, payload_len: usize) -> Option<&mut [u8]> {
        let room = &mut self.frames[self.len..];
        let header_len = datagram::write_header_to_end(room)?;
        let payload = room[header_len..].get_mut(..payload_len)?;
        self.len += header_len + payload_len;
        Some(payload)
    }

    /// The bytes of frames that were written so far.
    pub fn len(&self) -> usize {
        self.len
    }

    /// Whether no frame was written yet.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// The bytes that are left for further frames.
    pub fn remaining(&self) -> usize {
        self.frames.len() - self.len
    }
}

pub(crate) const PADDING: u8 = 0x00;
pub(crate) const PATH_CHALLENGE: u8 = 0x1a;
pub(crate) const PATH_RESPONSE: u8 = 0x1b;

/// One frame, borrowed from the packet.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Frame<'a> {
    /// A run of PADDING frames, skipped as one.
    Padding,
    Ping,
    Ack(AckFrame<'a>),
    PathChallenge([u8; 8]),
    PathResponse([u8; 8]),
    Datagram(&'a [u8]),
}

/// The frames of a payload, in order. Ends after the first violation.
#[derive(Debug, Clone)]
pub(crate) struct Frames<'a> {
    reader: Reader<'a>,
}

impl<'a> Frames<'a> {
    #[inline]
    pub(crate) fn new(payload: &'a [u8]) -> Self {
        Self { reader: Reader::new(payload) }
    }

    /// Bytes of the payload after the frames taken so far.
    #[inline]
    pub(crate) fn remaining(&self) -> usize {
        self.reader.rest().len()
    }

    #[inline]
    fn parse(&mut self) -> Result<Frame<'a>, Violation> {
        let reader = &mut self.reader;
        let kind = match reader.short_varint() {
            Some(kind) => kind,
            None => frame_type(reader)?,
        };
        let frame = match kind {
            datagram::DATAGRAM => reader.take(reader.rest().len()).map(Frame::Datagram),
            datagram::DATAGRAM_WITH_LEN => datagram::parse_with_len(reader).map(Frame::Datagram),
            PADDING => {
                let run = reader.rest().iter().take_while(|byte| **byte == PADDING).count();
                reader.take(run).map(|_| Frame::Padding)
            }
            PING => Some(Frame::Ping),
            ack::ACK | ack::ACK_ECN => return AckFrame::parse(reader, kind).map(Frame::Ack),
            PATH_CHALLENGE => reader.array().map(Frame::PathChallenge),
            PATH_RESPONSE => reader.array().map(Frame::PathResponse),
            _ => return Err(Violation::FrameType(kind.into())),
        };
        frame.ok_or_else(|| Violation::Truncated(kind.into()))
    }
}

impl<'a> Iterator for Frames<'a> {
    type Item = Result<Frame<'a>, Violation>;

    #[inline]
    fn next(&mut self) -> Option<Self::Item> {
        if self.reader.is_empty() {
            return None;
        }
        let frame = self.parse();
        if frame.is_err() {
            self.reader = Reader::new(&[]);
        }
        Some(frame)
    }
}

/// The content of a payload whose frames were all found valid.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(crate) struct Contents {
    pub(crate) datagrams: u32,
    pub(crate) acks: u32,
    pub(crate) ping: bool,
    /// The last one, if there are several.
    pub(crate) path_challenge: Option<[u8; 8]>,
    /// The last one, if there are several.
    pub(crate) path_response: Option<[u8; 8]>,
}

impl Contents {
    /// Reads all frames of an authenticated payload. `next_sent` is one above the highest packet number we have sent.
    #[inline]
    pub(crate) fn validate(payload: &[u8], next_sent: u64) -> Result<Self, Violation> {
        if payload.is_empty() {
            return Err(Violation::EmptyPayload);
        }
        let mut contents = Self::default();
        for frame in Frames::new(payload) {
            match frame? {
                Frame::Datagram(_) => contents.datagrams += 1,
                Frame::Ack(ack) if ack.largest >= next_sent => {
                    return Err(Violation::AckOfUnsent(ack.largest));
                }
                Frame::Ack(_) => contents.acks += 1,
                Frame::Padding => {}
                Frame::Ping => contents.ping = true,
                Frame::PathChallenge(data) => contents.path_challenge = Some(data),
                Frame::PathResponse(data) => contents.path_response = Some(data),
            }
        }
        Ok(contents)
    }

    /// Whether the packet is to be acknowledged (RFC 9000 §13.2).
    #[inline]
    pub(crate) fn ack_eliciting(&self) -> bool {
        self.datagrams > 0 || self.ping || self.path_challenge.is_some() || self.path_response.is_some()
    }
}

/// A frame type, which must be in its shortest form (RFC 9000 §12.4). All types of a lane have one byte.
#[inline]
fn frame_type(reader: &mut Reader<'_>) -> Result<u8, Violation> {
    let before = reader.rest().len();
    // A type that is cut short is named by the byte that is left of it.
    let first = reader.rest().first().copied().unwrap_or(0);
    let value = reader.varint().ok_or_else(|| Violation::Truncated(first.into()))?;
    if before - reader.rest().len() != varint::len(value) {
        return Err(Violation::FrameTypeNotMinimal(value));
    }
    u8::try_from(value).map_err(|_above| Violation::FrameType(value))
}

#[cfg(test)]
mod tests;
