//! Messages on a QUIC stream: each is preceded by its length as a QUIC variable-length integer (RFC 9000 §16).

use bytes::{Buf, BufMut};
use quinn_proto::{VarInt, coding::Codec};

/// The longest message on the control stream, bytes. 256 services with the longest names take 18 KiB.
pub const MAX_MESSAGE_BYTES: usize = 64 * 1024;

/// The longest header of a TCP forward's stream, bytes: small, because it is read before the peer's rights are checked.
pub const MAX_STREAM_HEADER_BYTES: usize = 1024;

/// A peer announced a message longer than the stream carries. The stream cannot be read any further.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("a message of {bytes} bytes was announced, {limit} are allowed")]
pub struct FrameTooLong {
    /// The length that the peer announced.
    pub bytes: u64,
    /// The greatest length that is allowed.
    pub limit: usize,
}

/// Cuts a stream into messages. It holds at most one unfinished message, and no byte that did not arrive.
#[derive(Debug)]
pub struct Framer {
    limit: usize,
    prefix: [u8; 8],
    prefix_bytes: usize,
    body: Vec<u8>,
}

impl Framer {
    /// A framer for messages of up to `limit` bytes.
    pub fn new(limit: usize) -> Self {
        Self { limit, prefix: [0; 8], prefix_bytes: 0, body: Vec::new() }
    }

    /// Takes from `input` up to the end of the next message and returns it, or takes all of it and returns `None`.
    ///
    /// Call it until it returns `None`. What follows a message stays in `input`: after the header of a TCP forward
    /// those are the bytes to forward.
    pub fn pull(&mut self, input: &mut impl Buf) -> Result<Option<Vec<u8>>, FrameTooLong> {
        let Some(length) = self.length(input) else { return Ok(None) };
        let Some(length) = usize::try_from(length).ok().filter(|length| *length <= self.limit) else {
            return Err(FrameTooLong { bytes: length, limit: self.limit });
        };
        let missing = length - self.body.len();
        self.body.put(input.take(missing));
        if self.body.len() < length {
            return Ok(None);
        }
        self.prefix_bytes = 0;
        Ok(Some(std::mem::take(&mut self.body)))
    }

    /// Whether the stream ended inside a message, if it ended here.
    pub fn is_inside_message(&self) -> bool {
        self.prefix_bytes > 0
    }

    /// The length of the message under way, completing its prefix from `input`.
    fn length(&mut self, input: &mut impl Buf) -> Option<u64> {
        loop {
            let mut prefix = &self.prefix[..self.prefix_bytes];
            if let Ok(length) = VarInt::decode(&mut prefix) {
                return Some(length.into_inner());
            }
            if !input.has_remaining() {
                return None;
            }
            // A prefix of 8 bytes always decodes.
            self.prefix[self.prefix_bytes] = input.get_u8();
            self.prefix_bytes += 1;
        }
    }
}

/// Appends `message` to `out`, with its length in front.
pub fn frame(message: &impl prost::Message, out: &mut Vec<u8>) {
    let length = message.encoded_len();
    debug_assert!(length <= MAX_MESSAGE_BYTES, "we never build a message that the other end refuses");
    VarInt::try_from(length as u64).unwrap_or(VarInt::MAX).encode(out);
    message.encode_raw(out);
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use crate::framing::*;

    fn framed(message: &[u8]) -> Vec<u8> {
        let mut out = Vec::new();
        VarInt::try_from(message.len()).unwrap().encode(&mut out);
        out.extend(message);
        out
    }

    #[test]
    fn what_follows_a_message_is_left_alone() {
        let stream = [&framed(b"header")[..], b"payload"].concat();
        let mut input = &stream[..];
        let mut framer = Framer::new(16);
        assert_eq!(framer.pull(&mut input), Ok(Some(b"header".to_vec())));
        assert_eq!(input, b"payload");
        assert!(!framer.is_inside_message());
    }

    #[test]
    fn the_limit_is_inclusive_and_checked_before_the_body() {
        let mut framer = Framer::new(MAX_MESSAGE_BYTES);
        let longest = vec![7; MAX_MESSAGE_BYTES];
        assert_eq!(framer.pull(&mut &framed(&longest)[..]), Ok(Some(longest)));
        let mut announced = Vec::new();
        VarInt::from_u32(65_537).encode(&mut announced);
        let refused = Err(FrameTooLong { bytes: 65_537, limit: MAX_MESSAGE_BYTES });
        assert_eq!(framer.pull(&mut &announced[..]), refused);
        assert_eq!(framer.pull(&mut &[0; 100][..]), refused, "the stream stays unreadable");
        assert_eq!(framer.body.capacity(), 0);
    }

    #[test]
    fn an_announced_length_costs_no_memory() {
        let mut framer = Framer::new(MAX_MESSAGE_BYTES);
        let mut announced = Vec::new();
        VarInt::from_u32(65_536).encode(&mut announced);
        announced.push(1);
        assert_eq!(framer.pull(&mut &announced[..]), Ok(None));
        assert!(framer.is_inside_message());
        assert!(framer.body.capacity() <= 64, "{}", framer.body.capacity());
    }

    #[test]
    fn a_length_may_be_longer_than_it_need_be() {
        // RFC 9000 §16: 5 in two, four and eight bytes.
        for prefix in [&[0x40, 5][..], &[0x80, 0, 0, 5], &[0xc0, 0, 0, 0, 0, 0, 0, 5]] {
            let stream = [prefix, b"12345"].concat();
            assert_eq!(Framer::new(5).pull(&mut &stream[..]), Ok(Some(b"12345".to_vec())));
        }
    }

    proptest! {
        #[test]
        fn chunking_does_not_matter(
            messages in prop::collection::vec(prop::collection::vec(any::<u8>(), 0..200), 0..8),
            cuts in prop::collection::vec(0_usize..50, 0..40),
        ) {
            let stream: Vec<u8> = messages.iter().flat_map(|message| framed(message)).collect();
            let mut framer = Framer::new(200);
            let mut pulled = Vec::new();
            let mut rest = &stream[..];
            for cut in cuts.into_iter().chain([usize::MAX]) {
                let (mut chunk, after) = rest.split_at(cut.min(rest.len()));
                while let Some(message) = framer.pull(&mut chunk).unwrap() {
                    pulled.push(message);
                }
                prop_assert!(chunk.is_empty());
                rest = after;
            }
            prop_assert_eq!(pulled, messages);
            prop_assert!(!framer.is_inside_message());
        }

        #[test]
        fn any_bytes_are_harmless(chunks in prop::collection::vec(prop::collection::vec(any::<u8>(), 0..100), 0..20)) {
            let mut framer = Framer::new(64);
            for chunk in &chunks {
                let mut input = &chunk[..];
                while let Ok(Some(message)) = framer.pull(&mut input) {
                    prop_assert!(message.len() <= 64);
                }
                prop_assert!(framer.body.len() <= 64);
            }
        }
    }
}
