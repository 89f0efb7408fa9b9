//! A request stream (RFC 9114 §4.1): what has come of the request, and what was sent of the answer.

use bytes::{Buf, Bytes};

use crate::{
    capsule::{Capsule, CapsuleReader},
    error::{Code, Error},
    fields::{Field, Fields},
    frame::{self, Collector, Head, HeadReader, take_payload},
    message::{self, Malformed},
    qpack::{self, BadSection},
};

/// The receiving half, frame by frame:
///
/// ```text
///   Head ── HEADERS ──► Content ── HEADERS ──► Behind      other known frames: the connection ends
///    │                    │ ▲
///    └── too large ─┐    DATA           after CONNECT there is only DATA
///                   ▼
///                Ignored
/// ```
#[derive(Debug)]
pub(super) struct RequestStream {
    at: At,
    message: Message,
    /// The method, once the head is known.
    is_connect: Option<bool>,
    /// How many bytes of content are still to come, if the head said how many there are.
    content_left: Option<u64>,
    capsules: Option<CapsuleReader>,
    pub(super) receives: bool,
    pub(super) sends: Sends,
}

#[derive(Debug)]
enum At {
    Head(HeadReader),
    Section(Collector),
    Data { left: u64 },
    Skip { left: u64 },
}

/// Which part of the message is next.
#[derive(Debug, Clone, Copy, PartialEq)]
enum Message {
    Head,
    Content,
    /// Behind the trailers.
    Behind,
    /// The head was too large; nothing of the rest is read.
    Ignored,
}

/// What may be sent next.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(super) enum Sends {
    Head,
    Content,
    /// Only the end of the stream.
    End,
    Nothing,
}

/// A part of a request.
#[derive(Debug)]
pub(super) enum Part {
    Head(Box<message::Request>),
    HeadTooLarge,
    Content(Bytes),
    Capsule(Capsule),
    Trailers(Fields),
}

impl RequestStream {
    pub(super) fn new() -> Self {
        Self {
            at: At::Head(HeadReader::default()),
            message: Message::Head,
            is_connect: None,
            content_left: None,
            capsules: None,
            receives: true,
            sends: Sends::Head,
        }
    }

    /// Takes bytes from the front of `input` up to the next part. `section_bytes` is the largest field section.
    ///
    /// # Errors
    ///
    /// The stream or the connection ends.
    pub(super) fn read(
        &mut self,
        input: &mut Bytes,
        section_bytes: u64,
        extended_connect: bool,
    ) -> Result<Option<Part>, Error> {
        loop {
            if self.message == Message::Ignored {
                input.clear();
                return Ok(None);
            }
            match &mut self.at {
                At::Head(head) => {
                    let Some(head) = head.take(input) else { return Ok(None) };
                    self.at = self.begin(head)?;
                    if matches!(&self.at, At::Section(_)) && head.length > section_bytes {
                        return self.too_large().map(Some);
                    }
                }
                At::Section(section) => {
                    let Some(section) = section.take(input) else { return Ok(None) };
                    self.at = At::Head(HeadReader::default());
                    return self.section(&section, section_bytes, extended_connect).map(Some);
                }
                At::Data { left: 0 } => self.at = At::Head(HeadReader::default()),
                At::Data { left } => {
                    if input.is_empty() {
                        return Ok(None);
                    }
                    let Some(capsules) = &mut self.capsules else {
                        return Ok(Some(Part::Content(take_payload(input, left))));
                    };
                    let mut before = *left;
                    let mut content = take_payload(&mut input.clone(), &mut before);
                    let available = content.len();
                    let capsule = capsules.take(&mut content);
                    let taken = available - content.len();
                    input.advance(taken);
                    *left -= taken as u64;
                    if let Some(capsule) = capsule {
                        return Ok(Some(Part::Capsule(capsule)));
                    }
                }
                At::Skip { left } => {
                    take_payload(input, left);
                    if *left > 0 {
                        return Ok(None);
                    }
                    self.at = At::Head(HeadReader::default());
                }
            }
        }
    }

    fn begin(&mut self, Head { kind, length }: Head) -> Result<At, Error> {
        let unexpected = |reason| Err(Error::connection(Code::FrameUnexpected, reason));
        match (kind, self.message) {
            (frame::DATA, Message::Content) => {
                if let Some(left) = &mut self.content_left {
                    *left = left.checked_sub(length).ok_or(LONGER_OR_SHORTER)?;
                }
                Ok(At::Data { left: length })
            }
            (frame::DATA, _) => unexpected("DATA before the head of a request or behind its trailers"),
            (frame::HEADERS, Message::Head) => Ok(At::Section(Collector::new(length))),
            (frame::HEADERS, Message::Content) if self.is_connect == Some(false) => {
                Ok(At::Section(Collector::new(length)))
            }
            (frame::HEADERS, _) => unexpected("HEADERS behind the trailers or in a tunnel"),
            (frame::SETTINGS | frame::GOAWAY | frame::MAX_PUSH_ID | frame::CANCEL_PUSH, _) => {
                unexpected("a frame of the control stream on a request")
            }
            (frame::PUSH_PROMISE, _) => unexpected("a client does not push"),
            (frame::PRIORITY_UPDATE_REQUEST | frame::PRIORITY_UPDATE_PUSH, _) => {
                unexpected("PRIORITY_UPDATE on a request")
            }
            (kind, _) if frame::is_of_http2(kind) => unexpected("a frame of HTTP/2"),
            _ => Ok(At::Skip { left: length }),
        }
    }

    fn section(&mut self, section: &[u8], limit_bytes: u64, extended_connect: bool) -> Result<Part, Error> {
        let lines = match qpack::decode(section, limit_bytes) {
            Ok(lines) => lines,
            Err(BadSection::TooLarge) => return self.too_large(),
            Err(BadSection::BadName) => return Err(MALFORMED),
            Err(BadSection::Undecodable) => {
                return Err(Error::connection(
                    Code::QpackDecompressionFailed,
                    "a field section cannot be decoded",
                ));
            }
        };
        if self.message == Message::Content {
            self.message = Message::Behind;
            return message::trailers(lines).map(Part::Trailers).map_err(|_: Malformed| MALFORMED);
        }
        self.head(lines, extended_connect).map_err(|_: Malformed| MALFORMED)
    }

    fn head(&mut self, lines: Vec<Field>, extended_connect: bool) -> Result<Part, Malformed> {
        let head = message::Request::from_lines(lines, extended_connect)?;
        self.message = Message::Content;
        self.is_connect = Some(head.is_connect());
        self.content_left = head.content_length();
        Ok(Part::Head(Box::new(head)))
    }

    /// A head that is too large is answered; the request is over with trailers that are.
    fn too_large(&mut self) -> Result<Part, Error> {
        if self.message == Message::Content {
            return Err(Error::stream(Code::ExcessiveLoad, "trailers above the limit"));
        }
        self.message = Message::Ignored;
        self.at = At::Head(HeadReader::default());
        Ok(Part::HeadTooLarge)
    }

    /// The stream ends behind what was read.
    ///
    /// # Errors
    ///
    /// It may not end here.
    pub(super) fn ended(&mut self) -> Result<(), Error> {
        self.receives = false;
        let is_between = match &self.at {
            At::Head(head) => head.is_empty(),
            At::Data { left } | At::Skip { left } => *left == 0,
            At::Section(_) => false,
        };
        if !is_between {
            return Err(Error::connection(Code::FrameError, "a request ends within a frame"));
        }
        if self.message == Message::Head {
            return Err(Error::stream(Code::RequestIncomplete, "a stream without a request"));
        }
        if self.content_left.is_some_and(|left| left > 0) {
            return Err(LONGER_OR_SHORTER);
        }
        if self.capsules.as_ref().is_some_and(|capsules| !capsules.is_between()) {
            return Err(Error::stream(Code::MessageError, "a tunnel ends within a capsule"));
        }
        Ok(())
    }

    /// From here on the content consists of capsules of at most `limit_bytes`.
    pub(super) fn carry_capsules(&mut self, limit_bytes: u64) {
        self.capsules.get_or_insert_with(|| CapsuleReader::new(limit_bytes));
    }

    /// Whether datagrams have a meaning for this request; `None` as long as its head is not known.
    pub(super) const fn takes_datagrams(&self) -> Option<bool> {
        self.is_connect
    }

    pub(super) fn is_over(&self) -> bool {
        !self.receives && self.sends == Sends::Nothing
    }

    pub(super) fn held_bytes(&self) -> usize {
        let section = match &self.at {
            At::Section(section) => section.held_bytes(),
            At::Head(_) | At::Data { .. } | At::Skip { .. } => 0,
        };
        section + self.capsules.as_ref().map_or(0, CapsuleReader::held_bytes)
    }
}

const MALFORMED: Error = Error::stream(Code::MessageError, "a malformed request");
const LONGER_OR_SHORTER: Error =
    Error::stream(Code::MessageError, "content of another length than content-length");
