//! A message: a header that says when it was sent and whether it counts, then padding.

/// Bytes of a header; no message is shorter.
pub(crate) const HEADER_LEN: usize = 32;

/// Bytes of the longest message.
pub(crate) const MAX_LEN: usize = 1 << 20;

/// The header of a message, in little endian, the length first: it frames messages on a stream.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Header {
    /// Of the whole message, in bytes.
    pub(crate) len: u32,
    /// When it was sent, in nanoseconds of [`now_ns`](crate::clock::now_ns).
    pub(crate) sent_ns: u64,
    /// From when on messages count.
    pub(crate) from_ns: u64,
    /// When messages cease to count.
    pub(crate) until_ns: u64,
}

impl Header {
    /// Writes the header at the front of `message`, which has at least [`HEADER_LEN`] bytes.
    pub(crate) fn write(&self, message: &mut [u8]) {
        message[..4].copy_from_slice(&self.len.to_le_bytes());
        message[4..8].fill(0);
        message[8..16].copy_from_slice(&self.sent_ns.to_le_bytes());
        message[16..24].copy_from_slice(&self.from_ns.to_le_bytes());
        message[24..32].copy_from_slice(&self.until_ns.to_le_bytes());
    }

    /// Reads the header of `message`, if that is as long as its header says.
    pub(crate) fn read(message: &[u8]) -> Option<Self> {
        let number = |at: usize| Some(u64::from_le_bytes(message.get(at..at + 8)?.try_into().ok()?));
        let header = Self {
            len: framed_len(message)? as u32,
            sent_ns: number(8)?,
            from_ns: number(16)?,
            until_ns: number(24)?,
        };
        (header.len as usize == message.len()).then_some(header)
    }
}

/// The length of the message at the front of `bytes`, or `None` while there are too few to tell.
pub(crate) fn framed_len(bytes: &[u8]) -> Option<usize> {
    let len = bytes.first_chunk::<4>()?;
    Some(u32::from_le_bytes(*len) as usize)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_header_is_read_as_it_was_written() {
        let header = Header { len: 64, sent_ns: 1, from_ns: u64::MAX, until_ns: 3 };
        let mut message = [9; 64];
        header.write(&mut message);
        assert_eq!(Header::read(&message), Some(header));
        assert_eq!(Header::read(&message[..63]), None);
    }
}
