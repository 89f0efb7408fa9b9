//! Encodes and decodes DATAGRAM frames (RFC 9221 §4).

use crate::varint::{self, Reader};

/// A DATAGRAM frame that extends to the end of the packet.
pub const DATAGRAM: u8 = 0x30;
/// A DATAGRAM frame with a length field.
pub const DATAGRAM_WITH_LEN: u8 = 0x31;

/// The bytes that a frame with a length field (0x31) adds before a payload of this length: its type and the length field.
#[inline]
pub const fn header_len(payload_len: usize) -> usize {
    1 + varint::len(payload_len as u64)
}

/// Length of a complete frame with a length field (0x31).
#[inline]
pub const fn encoded_len(payload_len: usize) -> usize {
    header_len(payload_len) + payload_len
}

/// Length of a complete frame without a length field (0x30).
#[inline]
pub const fn encoded_len_to_end(payload_len: usize) -> usize {
    1 + payload_len
}

/// Writes type 0x31 and the length field at the front of `buf`: the number of bytes written.
///
/// The payload follows them. `None` if `buf` is too short for the header, or the length is no varint.
#[inline]
pub fn write_header_with_len(buf: &mut [u8], payload_len: usize) -> Option<usize> {
    let (kind, rest) = buf.split_first_mut()?;
    let len = varint::write(rest, payload_len as u64)?;
    *kind = DATAGRAM_WITH_LEN;
    Some(1 + len)
}

/// Writes type 0x30 at the front of `buf`: 1, the number of bytes written. The payload is the rest of the packet.
#[inline]
pub fn write_header_to_end(buf: &mut [u8]) -> Option<usize> {
    *buf.first_mut()? = DATAGRAM;
    Some(1)
}

/// The payload of a frame whose type 0x31 was taken.
#[inline]
pub(super) fn parse_with_len<'a>(reader: &mut Reader<'a>) -> Option<&'a [u8]> {
    let len = reader.varint()?;
    reader.take(usize::try_from(len).ok()?)
}
