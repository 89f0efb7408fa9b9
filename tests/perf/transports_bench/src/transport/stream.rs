//! Messages on a stream of bytes, which their length frames.

use std::io;

use tokio::io::{AsyncRead, AsyncReadExt as _, AsyncWrite, AsyncWriteExt as _};

use super::{Receiver, Sender};
use crate::message::{MAX_LEN, framed_len};

/// What is read at once, at most, beside the rest of a message.
const READ_BYTES: usize = 256 << 10;

/// The writing half of a stream; `_kept` is what would end the connection if it were dropped.
#[derive(Debug)]
pub(crate) struct Writer<W, K = ()> {
    pub(crate) stream: W,
    pub(crate) _kept: K,
}

impl<W: AsyncWrite + Unpin + Send + 'static, K: Send + 'static> Sender for Writer<W, K> {
    fn max_len(&self) -> Option<usize> {
        None
    }

    async fn send(&mut self, message: &[u8]) -> io::Result<()> {
        self.stream.write_all(message).await
    }

    async fn flush(&mut self) -> io::Result<()> {
        self.stream.flush().await
    }
}

/// The reading half of a stream, and what was read of messages that are not complete.
#[derive(Debug)]
pub(crate) struct Reader<R, K = ()> {
    stream: R,
    buffer: Vec<u8>,
    /// `buffer[begin..end]` was read and not yet returned.
    begin: usize,
    end: usize,
    _kept: K,
}

impl<R, K> Reader<R, K> {
    pub(crate) fn new(stream: R, kept: K) -> Self {
        Self { stream, buffer: Vec::new(), begin: 0, end: 0, _kept: kept }
    }
}

impl<R: AsyncRead + Unpin + Send + 'static, K: Send + 'static> Receiver for Reader<R, K> {
    async fn receive(&mut self) -> io::Result<Option<&[u8]>> {
        loop {
            let unread = &self.buffer[self.begin..self.end];
            let len = framed_len(unread);
            if let Some(len) = len.filter(|&len| len <= unread.len()) {
                if len == 0 {
                    return Err(io::Error::new(io::ErrorKind::InvalidData, "a message without a length"));
                }
                self.begin += len;
                return Ok(Some(&self.buffer[self.begin - len..self.begin]));
            }
            if len.is_some_and(|len| len > MAX_LEN) {
                return Err(io::Error::new(io::ErrorKind::InvalidData, "a message that is too long"));
            }
            self.buffer.copy_within(self.begin..self.end, 0);
            (self.begin, self.end) = (0, self.end - self.begin);
            let room = len.unwrap_or_default() + READ_BYTES;
            if self.buffer.len() < room {
                self.buffer.resize(room, 0);
            }
            match self.stream.read(&mut self.buffer[self.end..]).await? {
                0 => return Ok(None),
                read => self.end += read,
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::message::Header;

    #[tokio::test]
    async fn messages_are_cut_where_their_length_says() {
        let (near, far) = tokio::io::duplex(100);
        let mut sender = Writer { stream: near, _kept: () };
        let sending = async move {
            for len in [64, 40, 100_000, 33] {
                let mut message = vec![0; len];
                Header { len: len as u32, sent_ns: 1, from_ns: 0, until_ns: 2 }.write(&mut message);
                sender.send(&message).await.expect("the other end reads");
            }
        };
        let receiving = async {
            let mut reader = Reader::new(far, ());
            let mut lens = Vec::new();
            while let Some(message) = reader.receive().await.expect("all messages are well formed") {
                assert!(Header::read(message).is_some());
                lens.push(message.len());
            }
            lens
        };
        let ((), lens) = tokio::join!(sending, receiving);
        assert_eq!(lens, [64, 40, 100_000, 33]);
    }
}
