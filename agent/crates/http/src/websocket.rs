//! WebSocket frames (RFC 6455) for a carrier: each binary message is one packet, whole in one frame or in several.
//!
//! ```text
//!  FIN 1, RSV 3, opcode 4 │ mask 1, length 7 │ length 0, 2 or 8 │ masking key 0 or 4 │ payload
//! ```
//!
//! Pings are answered, pongs are passed over, and texts are a violation: nothing of ours sends them. No extension is spoken.

use std::ops::Range;

/// The longest message that is taken, in bytes: the longest payload of a UDP datagram.
pub const MOST_MESSAGE_BYTES: usize = 65_535;

/// The longest payload of a frame that controls the connection (RFC 6455 §5.5).
const MOST_CONTROL_BYTES: usize = 125;

/// The head of a frame at its longest.
pub const MOST_HEAD_BYTES: usize = 14;

/// What a server appends to a client's key before it hashes it (RFC 6455 §1.3).
pub const ACCEPT_GUID: &[u8] = b"258EAFA5-E914-47DA-95CA-C5AB0DC85B11";

const CONTINUATION: u8 = 0x0;
const BINARY: u8 = 0x2;
const CLOSE: u8 = 0x8;
const PING: u8 = 0x9;
const PONG: u8 = 0xa;

const FIN: u8 = 0x80;
const RESERVED: u8 = 0x70;
const MASKED: u8 = 0x80;

/// Which end of a connection writes or reads.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Role {
    /// It masks what it sends, and takes no masked frame.
    Client,
    /// It masks nothing, and takes masked frames only (RFC 6455 §5.1).
    Server,
}

/// Why the far end does not speak as this one expects. The connection has to end.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Violation {
    /// A frame of a client is not masked, or one of a server is.
    #[error("a frame is masked that must not be, or the other way round")]
    Mask,
    /// A reserved bit is set, an opcode is not known, or a text came.
    #[error("a frame is of no kind that is expected here")]
    Kind,
    /// A frame that controls the connection is longer than 125 bytes, or in pieces.
    #[error("a control frame is too long, or in pieces")]
    Control,
    /// A message does not end before the next one begins, or continues without a beginning.
    #[error("the pieces of a message do not follow each other")]
    Order,
    /// A message is longer than [`MOST_MESSAGE_BYTES`].
    #[error("a message is longer than any packet")]
    Long,
}

/// What was read.
#[derive(Debug, PartialEq, Eq)]
pub enum Event<'a> {
    /// A packet.
    Packet(&'a [u8]),
    /// The far end asks whether this one is there: [`put_pong`] has the answer.
    Ping(&'a [u8]),
    /// The far end closes the connection.
    Close,
}

/// Appends a packet as one message. `key` masks it, if this end is the client; it must be random.
pub fn put_packet(out: &mut Vec<u8>, packet: &[u8], key: Option<[u8; 4]>) {
    put(out, BINARY, packet, key);
}

/// Appends a question whether the far end is there.
pub fn put_ping(out: &mut Vec<u8>, key: Option<[u8; 4]>) {
    put(out, PING, &[], key);
}

/// Appends the answer to a question with this payload.
pub fn put_pong(out: &mut Vec<u8>, payload: &[u8], key: Option<[u8; 4]>) {
    put(out, PONG, &payload[..payload.len().min(MOST_CONTROL_BYTES)], key);
}

/// Appends the end of the connection, without a reason.
pub fn put_close(out: &mut Vec<u8>, key: Option<[u8; 4]>) {
    put(out, CLOSE, &[], key);
}

fn put(out: &mut Vec<u8>, opcode: u8, payload: &[u8], key: Option<[u8; 4]>) {
    let masked = if key.is_some() { MASKED } else { 0 };
    out.push(FIN | opcode);
    match (u8::try_from(payload.len()), u16::try_from(payload.len())) {
        (Ok(short @ ..=125), _) => out.push(masked | short),
        (_, Ok(long)) => {
            out.push(masked | 126);
            out.extend_from_slice(&long.to_be_bytes());
        }
        (_, Err(_)) => {
            out.push(masked | 127);
            out.extend_from_slice(&(payload.len() as u64).to_be_bytes());
        }
    }
    out.extend_from_slice(key.as_ref().map_or(&[], |key| &key[..]));
    let at = out.len();
    out.extend_from_slice(payload);
    if let Some(key) = key {
        mask(&mut out[at..], key);
    }
}

/// Masks or unmasks (RFC 6455 §5.3).
fn mask(bytes: &mut [u8], key: [u8; 4]) {
    let wide = u64::from_ne_bytes([key[0], key[1], key[2], key[3], key[0], key[1], key[2], key[3]]);
    let mut words = bytes.chunks_exact_mut(8);
    for word in &mut words {
        let masked = u64::from_ne_bytes((&*word).try_into().expect("chunks of eight bytes")) ^ wide;
        word.copy_from_slice(&masked.to_ne_bytes());
    }
    for (byte, key) in words.into_remainder().iter_mut().zip(key.iter().cycle()) {
        *byte ^= key;
    }
}

/// The head of a frame.
#[derive(Clone, Copy, Debug)]
struct Head {
    is_final: bool,
    opcode: u8,
    key: Option<[u8; 4]>,
    length: usize,
    /// The bytes of the head itself.
    bytes: usize,
}

/// Reads frames out of bytes as they come, and holds what is not whole: a frame, and the message that it continues.
#[derive(Debug)]
pub struct Reader {
    role: Role,
    /// Bytes that came; those before `at` were read.
    bytes: Vec<u8>,
    at: usize,
    /// The pieces of a message that has not ended.
    message: Option<Vec<u8>>,
    /// The last one that has ended.
    whole: Vec<u8>,
}

impl Reader {
    /// A reader at this end of a connection.
    #[must_use]
    pub fn new(role: Role) -> Self {
        Self { role, bytes: Vec::new(), at: 0, message: None, whole: Vec::new() }
    }

    /// Where bytes that come are appended, after all that can be read was read: it holds no more than one frame then.
    pub fn buffer(&mut self) -> &mut Vec<u8> {
        if self.at > 0 {
            self.bytes.drain(..self.at);
            self.at = 0;
        }
        &mut self.bytes
    }

    /// What comes next; nothing while it is not whole.
    ///
    /// # Errors
    /// The far end does not speak as expected.
    pub fn read(&mut self) -> Result<Option<Event<'_>>, Violation> {
        loop {
            let Some(head) = self.head()? else { return Ok(None) };
            let start = self.at + head.bytes;
            let payload = start..start + head.length;
            if self.bytes.len() < payload.end {
                return Ok(None);
            }
            if let Some(key) = head.key {
                mask(&mut self.bytes[payload.clone()], key);
            }
            self.at = payload.end;
            match head.opcode {
                CLOSE => return Ok(Some(Event::Close)),
                PING => return Ok(Some(Event::Ping(&self.bytes[payload]))),
                PONG => {}
                _ => {
                    if self.is_whole(head, payload.clone())? {
                        return Ok(Some(Event::Packet(match self.message.is_some() {
                            true => self.put_together(),
                            false => &self.bytes[payload],
                        })));
                    }
                }
            }
        }
    }

    /// Takes a frame of a message; whether the message is whole with it.
    fn is_whole(&mut self, head: Head, payload: Range<usize>) -> Result<bool, Violation> {
        match (head.opcode == CONTINUATION, &mut self.message) {
            (true, None) | (false, Some(_)) => return Err(Violation::Order),
            (false, None) if head.is_final => {}
            (false, None) => self.message = Some(self.bytes[payload].to_vec()),
            (true, Some(message)) => {
                if message.len() + payload.len() > MOST_MESSAGE_BYTES {
                    return Err(Violation::Long);
                }
                message.extend_from_slice(&self.bytes[payload]);
            }
        }
        Ok(head.is_final)
    }

    /// A message that came in pieces.
    fn put_together(&mut self) -> &[u8] {
        self.whole = self.message.take().unwrap_or_default();
        &self.whole
    }

    /// The head of the next frame, checked as far as it goes; nothing while it is not whole.
    fn head(&self) -> Result<Option<Head>, Violation> {
        let bytes = &self.bytes[self.at..];
        let &[first, second, ..] = bytes else { return Ok(None) };
        let (is_final, opcode) = (first & FIN != 0, first & 0xf);
        if first & RESERVED != 0 || ![CONTINUATION, BINARY, CLOSE, PING, PONG].contains(&opcode) {
            return Err(Violation::Kind);
        }
        let is_masked = second & MASKED != 0;
        if is_masked != (self.role == Role::Server) {
            return Err(Violation::Mask);
        }
        let short = usize::from(second & !MASKED);
        if opcode & CLOSE != 0 && (!is_final || short > MOST_CONTROL_BYTES) {
            return Err(Violation::Control);
        }
        let (length, at) = match short {
            126 => match bytes.get(2..4).and_then(|bytes| bytes.try_into().ok()) {
                Some(length) => (usize::from(u16::from_be_bytes(length)), 4),
                None => return Ok(None),
            },
            127 => match bytes.get(2..10).and_then(|bytes| bytes.try_into().ok()) {
                Some(length) => (usize::try_from(u64::from_be_bytes(length)).unwrap_or(usize::MAX), 10),
                None => return Ok(None),
            },
            _ => (short, 2),
        };
        if length > MOST_MESSAGE_BYTES {
            return Err(Violation::Long);
        }
        if !is_masked {
            return Ok(Some(Head { is_final, opcode, key: None, length, bytes: at }));
        }
        let key = bytes.get(at..at + 4).and_then(|key| key.try_into().ok());
        Ok(key.map(|key| Head { is_final, opcode, key: Some(key), length, bytes: at + 4 }))
    }
}

#[cfg(test)]
mod tests {
    use proptest::{collection::vec, prelude::*};

    use super::*;

    /// What a reader makes of `bytes` that come `step` at a time.
    fn read(role: Role, bytes: &[u8], step: usize) -> Result<Vec<Vec<u8>>, Violation> {
        let mut reader = Reader::new(role);
        let mut events = Vec::new();
        for bytes in bytes.chunks(step) {
            reader.buffer().extend_from_slice(bytes);
            while let Some(event) = reader.read()? {
                events.push(match event {
                    Event::Packet(packet) => [b"packet ", packet].concat(),
                    Event::Ping(payload) => [b"ping ", payload].concat(),
                    Event::Close => b"close".to_vec(),
                });
            }
        }
        Ok(events)
    }

    /// RFC 6455 §5.7.
    #[test]
    fn the_examples_of_the_rfc() {
        let ping = [0x89, 0x05, 0x48, 0x65, 0x6c, 0x6c, 0x6f];
        assert_eq!(read(Role::Client, &ping, 1).unwrap(), [b"ping Hello"]);
        let masked_pong = [0x8a, 0x85, 0x37, 0xfa, 0x21, 0x3d, 0x7f, 0x9f, 0x4d, 0x51, 0x58];
        assert!(read(Role::Server, &masked_pong, 1).unwrap().is_empty());
        let mut pong = Vec::new();
        put_pong(&mut pong, b"Hello", Some([0x37, 0xfa, 0x21, 0x3d]));
        assert_eq!(pong, masked_pong);
        let long = [&[0x82, 0x7e, 0x01, 0x00][..], &[7; 256]].concat();
        let mut ours = Vec::new();
        put_packet(&mut ours, &[7; 256], None);
        assert_eq!(ours, long);
        let longer = [&[0x82, 0x7f, 0, 0, 0, 0, 0, 1, 0, 0][..], &[7; 65_536]].concat();
        assert_eq!(read(Role::Client, &longer, 9_999), Err(Violation::Long));
        let text = [0x81, 0x05, 0x48, 0x65, 0x6c, 0x6c, 0x6f];
        assert_eq!(read(Role::Client, &text, 1), Err(Violation::Kind));
    }

    #[test]
    fn a_message_in_pieces_is_one_packet_with_a_ping_between() {
        let pieces = [0x02, 3, b'H', b'e', b'l', 0x89, 0, 0x00, 0, 0x80, 2, b'l', b'o', 0x82, 1, b'!'];
        for step in 1..=pieces.len() {
            let events = read(Role::Client, &pieces, step).unwrap();
            assert_eq!(events, [&b"ping "[..], b"packet Hello", b"packet !"], "{step} at a time");
        }
    }

    #[test]
    fn what_is_wrong_is_told_apart() {
        let wrong = |role, bytes: &[u8]| read(role, bytes, 1).unwrap_err();
        assert_eq!(wrong(Role::Server, &[0x82, 1, 0]), Violation::Mask);
        assert_eq!(wrong(Role::Client, &[0x82, 0x81, 0, 0, 0, 0, 0]), Violation::Mask);
        assert_eq!(wrong(Role::Client, &[0xc2, 0]), Violation::Kind, "a reserved bit");
        assert_eq!(wrong(Role::Client, &[0x83, 0]), Violation::Kind);
        assert_eq!(wrong(Role::Client, &[0x09, 0]), Violation::Control, "in pieces");
        assert_eq!(wrong(Role::Client, &[0x88, 126, 0, 126]), Violation::Control);
        assert_eq!(wrong(Role::Client, &[0x80, 0]), Violation::Order);
        assert_eq!(wrong(Role::Client, &[0x02, 0, 0x82, 0]), Violation::Order);
        let endless = [0x02, 126, 0xff, 0xff];
        let endless = [&endless[..], &[0; 65_535], &[0x00, 1, 0]].concat();
        assert_eq!(wrong(Role::Client, &endless), Violation::Long);
    }

    proptest! {
        #[test]
        fn packets_arrive_as_they_were(
            packets in vec((vec(any::<u8>(), 0..300), any::<[u8; 4]>()), 0..6),
            from_client in any::<bool>(),
            step in 1..400_usize,
        ) {
            let mut bytes = Vec::new();
            for (packet, key) in &packets {
                put_packet(&mut bytes, packet, from_client.then_some(*key));
                put_ping(&mut bytes, from_client.then_some(*key));
            }
            put_close(&mut bytes, from_client.then_some([1; 4]));
            let role = if from_client { Role::Server } else { Role::Client };
            let mut expected: Vec<_> =
                packets.iter().flat_map(|(packet, _)| [[b"packet ", &packet[..]].concat(), b"ping ".to_vec()]).collect();
            expected.push(b"close".to_vec());
            prop_assert_eq!(read(role, &bytes, step).unwrap(), expected);
        }

        #[test]
        fn no_bytes_break_it_and_it_holds_no_more_than_a_frame_and_a_message(
            bytes in vec(any::<u8>(), 0..2_000), step in 1..300_usize,
        ) {
            let mut reader = Reader::new(Role::Server);
            'all: for bytes in bytes.chunks(step) {
                reader.buffer().extend_from_slice(bytes);
                loop {
                    match reader.read() {
                        Ok(Some(Event::Packet(packet))) => prop_assert!(packet.len() <= MOST_MESSAGE_BYTES),
                        Ok(Some(Event::Ping(payload))) => prop_assert!(payload.len() <= MOST_CONTROL_BYTES),
                        Ok(Some(Event::Close)) => {}
                        Ok(None) => break,
                        Err(_) => break 'all,
                    }
                }
                prop_assert!(reader.buffer().len() < MOST_MESSAGE_BYTES + MOST_HEAD_BYTES);
            }
        }
    }
}
