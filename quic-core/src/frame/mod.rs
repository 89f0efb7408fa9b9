//! Frames of a lane's packets.

pub mod datagram;

/// Type of a PING frame, which is this one byte.
pub const PING: u8 = 0x01;

/// Appends frames to the caller's slice: the part of a packet between header and tag.
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

    /// Appends a DATAGRAM frame with a length field (0x31) and returns the place of its payload.
    ///
    /// `None` if it does not fit; nothing is written then.
    pub fn datagram(&mut self, payload_len: usize) -> Option<&mut [u8]> {
        let room = &mut self.frames[self.len..];
        let header_len = datagram::header_len(payload_len);
        if header_len + payload_len > room.len() {
            return None;
        }
        datagram::write_header_with_len(room, payload_len)?;
        self.len += header_len + payload_len;
        Some(&mut room[header_len..header_len + payload_len])
    }

    /// Appends a DATAGRAM frame that extends to the end of the packet (0x30) and returns the place of its payload.
    ///
    /// The packet must end after it: seal exactly [`len`](Self::len) bytes of frames, and append no other frame.
    /// `None` if it does not fit; nothing is written then.
    pub fn last_datagram(&mut self, payload_len: usize) -> Option<&mut [u8]> {
        let room = &mut self.frames[self.len..];
        if 1 + payload_len > room.len() {
            return None;
        }
        datagram::write_header_to_end(room)?;
        self.len += 1 + payload_len;
        Some(&mut room[1..1 + payload_len])
    }

    /// Bytes of frames written.
    pub fn len(&self) -> usize {
        self.len
    }

    /// Whether no frame was written yet.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Bytes left for frames.
    pub fn remaining(&self) -> usize {
        self.frames.len() - self.len
    }
}
