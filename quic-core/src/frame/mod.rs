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
//! A caller writes DATAGRAM frames with [`datagram`] straight into its batch; all other frames are the lane's own business.

pub(crate) mod ack;
pub mod datagram;

pub(crate) use ack::AckFrame;

use crate::{
    Violation,
    varint::{self, Reader},
};

/// Type of a PING frame, which is this one byte.
pub const PING: u8 = 0x01;

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
