//! A server's end of an HTTP/3 connection, without I/O and without a clock.
//!
//! | question | file |
//! |---|---|
//! | what does the caller do with QUIC's events, and what may it send | this one |
//! | what may come on a request stream | `request.rs` |
//! | what holds of any bytes of a client | `properties.rs`, for the fuzz targets |
//! | what may come on the control stream and QPACK's streams | `unidirectional.rs` |

use std::collections::BTreeMap;

use bytes::Bytes;
use thiserror::Error as ThisError;

use crate::{
    capsule::Capsule,
    datagram,
    error::{Code, Error},
    fields::Fields,
    frame,
    message::{self, Response},
    qpack,
    settings::Settings,
    stream::{self, StreamId},
    varint::{self, Partial},
};

#[cfg(any(test, feature = "fuzzing"))]
#[doc(hidden)]
pub mod properties;
mod request;
mod unidirectional;

use self::{
    request::{Part, RequestStream, Sends},
    unidirectional::{Cancellations, ControlStream, Said, Unidirectional, read_qpack_encoder},
};

/// What a connection offers, and how much it holds.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Limits {
    /// How many requests may be open. Further ones are rejected.
    pub requests: usize,
    /// How many streams with one direction the client may have open whose type is known or still to come. Beyond that the connection ends.
    pub unidirectional: usize,
    /// The largest field section, as RFC 9114 §4.2.2 counts it; also the most bytes of a HEADERS frame.
    pub field_section_bytes: u64,
    /// The largest value of a capsule that is read.
    pub capsule_bytes: u64,
    /// Whether `:protocol` is allowed (RFC 9220).
    pub extended_connect: bool,
    /// Whether HTTP datagrams are taken (RFC 9297).
    pub datagrams: bool,
}

impl Limits {
    /// The most memory, in bytes, that a connection has for what came and is not whole: field sections or capsules, and SETTINGS. Lists of
    /// fields, contents and whole capsules are the caller's as soon as they are told.
    #[must_use]
    pub fn most_held_bytes(&self) -> u64 {
        let capsules = if self.extended_connect { self.capsule_bytes } else { 0 };
        crate::settings::MOST_BYTES + self.requests as u64 * (self.field_section_bytes + capsules)
    }

    const fn settings(&self) -> Settings {
        Settings {
            max_field_section_bytes: Some(self.field_section_bytes),
            extended_connect: self.extended_connect,
            datagrams: self.datagrams,
        }
    }
}

/// What came on the stream that was read.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Event {
    /// The client's settings.
    Settings(Settings),
    /// The client sends no further requests.
    GoAway,
    /// The head of a request.
    Request(Box<message::Request>),
    /// The head of a request is above the limit. It is to be answered with 431; the rest of the stream is not read.
    HeadTooLarge,
    /// Some content, or bytes of a tunnel; never empty.
    Content(Bytes),
    /// A capsule, after [`Connection::carry_capsules`].
    Capsule(Capsule),
    /// The trailers of a request.
    Trailers(Fields),
    /// The end of a request.
    End,
}

/// To whom a DATAGRAM frame belongs.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Delivery<'a> {
    /// To an open CONNECT.
    To(StreamId, &'a [u8]),
    /// To a request that is over or did not come yet, or nobody takes datagrams. It is to be dropped.
    Nobody,
    /// To a request that has no use for datagrams. The stream is to be ended with [`Code::DatagramError`]; it is forgotten.
    Ends(StreamId),
}

/// Why something cannot be sent.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ThisError)]
pub enum SendError {
    /// The request is over, or its answer was stopped.
    #[error("the request is over")]
    Over,
    /// The parts of an answer have another order, or 101 is not a status of HTTP/3.
    #[error("this part of an answer is not next")]
    Order,
    /// The client does not take field sections that large.
    #[error("a field section above the client's limit")]
    TooLarge,
}

/// A server's end of an HTTP/3 connection.
///
/// The caller owns the QUIC connection. It opens one stream, writes [`start`](Self::start) to it, and then reports what happens:
///
/// ```text
///   stream opened by the client ──► opened(stream)              error: stop and reset, or close
///   bytes, perhaps the end      ──► read(stream, bytes, end)    again until it returns None
///   RESET_STREAM, STOP_SENDING  ──► was_reset, was_stopped
///   DATAGRAM frame              ──► datagram(frame)
/// ```
///
/// What the caller sends, these methods frame: [`respond`](Self::respond), [`content`](Self::content), [`trailers`](Self::trailers),
/// then [`finished`](Self::finished) with the end of the stream, or [`abandoned`](Self::abandoned) with a reset.
///
/// Nothing is queued here: whoever does not call `read` leaves the bytes where they are, to QUIC's flow control.
#[derive(Debug)]
pub struct Connection {
    limits: Limits,
    requests: BTreeMap<StreamId, RequestStream>,
    unidirectional: BTreeMap<StreamId, Unidirectional>,
    /// Which of the streams that a client has once were opened.
    has: Opened,
    /// The number that follows the highest request stream.
    next_request: u64,
    /// Requests from this number on are rejected.
    last_request: Option<u64>,
    client: Settings,
}

#[derive(Debug, Default)]
struct Opened {
    control: bool,
    qpack_encoder: bool,
    qpack_decoder: bool,
}

impl Connection {
    /// A connection of which nothing is known yet.
    #[must_use]
    pub fn new(limits: Limits) -> Self {
        Self {
            limits,
            requests: BTreeMap::new(),
            unidirectional: BTreeMap::new(),
            has: Opened::default(),
            next_request: 0,
            last_request: None,
            client: Settings::default(),
        }
    }

    /// Appends what the first stream of the server, its control stream, begins with. QPACK's streams are not needed without a dynamic table
    /// (RFC 9204 §4.2).
    pub fn start(&self, out: &mut Vec<u8>) {
        varint::put(out, stream::CONTROL);
        self.limits.settings().put(out);
    }

    /// The client opened `stream`.
    ///
    /// # Errors
    ///
    /// A request beyond the limit or behind [`go_away`](Self::go_away) is rejected; too many streams with one direction end the
    /// connection.
    pub fn opened(&mut self, stream: StreamId) -> Result<(), Error> {
        if !stream.is_request() {
            if self.unidirectional.len() >= self.limits.unidirectional {
                return Err(Error::connection(Code::ExcessiveLoad, "too many streams with one direction"));
            }
            self.unidirectional.insert(stream, Unidirectional::Pending(Partial::default()));
            return Ok(());
        }
        self.next_request = self.next_request.max(stream.index().saturating_add(4));
        let is_late = self.last_request.is_some_and(|last| stream.index() >= last);
        if is_late || self.requests.len() >= self.limits.requests {
            return Err(Error::stream(Code::RequestRejected, "too many requests"));
        }
        self.requests.insert(stream, RequestStream::new());
        Ok(())
    }

    /// Takes bytes of `stream` from the front of `input`, up to and including the next event. `is_last` says that the stream ends behind
    /// `input`. `None`: all bytes were taken, and the end if it is there. Bytes of streams that are over are thrown away.
    ///
    /// # Errors
    ///
    /// What ends: the stream, which is forgotten then, or the connection.
    pub fn read(
        &mut self,
        stream: StreamId,
        input: &mut Bytes,
        is_last: bool,
    ) -> Result<Option<Event>, Error> {
        let result = if stream.is_request() {
            self.read_request(stream, input, is_last)
        } else {
            self.read_unidirectional(stream, input, is_last)
        };
        if matches!(result, Err(Error::Stream { .. })) {
            self.requests.remove(&stream);
            self.unidirectional.remove(&stream);
        }
        result
    }

    fn read_request(
        &mut self,
        id: StreamId,
        input: &mut Bytes,
        is_last: bool,
    ) -> Result<Option<Event>, Error> {
        let Some(request) = self.requests.get_mut(&id).filter(|request| request.receives) else {
            input.clear();
            return Ok(None);
        };
        let part = request.read(input, self.limits.field_section_bytes, self.limits.extended_connect)?;
        let event = match part {
            Some(Part::Head(head)) => Event::Request(head),
            Some(Part::HeadTooLarge) => Event::HeadTooLarge,
            Some(Part::Content(bytes)) => Event::Content(bytes),
            Some(Part::Capsule(capsule)) => Event::Capsule(capsule),
            Some(Part::Trailers(fields)) => Event::Trailers(fields),
            None if is_last => {
                request.ended()?;
                self.forget_if_over(id);
                Event::End
            }
            None => return Ok(None),
        };
        Ok(Some(event))
    }

    fn read_unidirectional(
        &mut self,
        id: StreamId,
        input: &mut Bytes,
        is_last: bool,
    ) -> Result<Option<Event>, Error> {
        let Some(unidirectional) = self.unidirectional.get_mut(&id) else {
            input.clear();
            return Ok(None);
        };
        if let Unidirectional::Pending(kind) = unidirectional
            && let Some(kind) = kind.take(input)
        {
            *unidirectional = self.has.place(kind)?;
        }
        let said = match unidirectional {
            Unidirectional::Pending(_) => None,
            Unidirectional::Control(control) => control.read(input)?,
            Unidirectional::QpackEncoder => read_qpack_encoder(input).map(|()| None)?,
            Unidirectional::QpackDecoder(cancellations) => cancellations.read(input).map(|()| None)?,
        };
        match said {
            Some(Said::Settings(settings)) => {
                self.client = settings;
                Ok(Some(Event::Settings(settings)))
            }
            Some(Said::GoAway) => Ok(Some(Event::GoAway)),
            None if is_last => self.was_reset(id).map(|()| None),
            None => Ok(None),
        }
    }

    /// The client reset `stream`: no bytes of it come any more.
    ///
    /// # Errors
    ///
    /// The connection needs this stream.
    pub fn was_reset(&mut self, stream: StreamId) -> Result<(), Error> {
        if let Some(unidirectional) = self.unidirectional.remove(&stream) {
            unidirectional.ended()?;
        }
        if let Some(request) = self.requests.get_mut(&stream) {
            request.receives = false;
            self.forget_if_over(stream);
        }
        Ok(())
    }

    /// The client asks to send nothing more on `stream`. QUIC resets it, so nothing more is to be sent.
    ///
    /// # Errors
    ///
    /// The connection needs this stream: each that the server opened.
    pub fn was_stopped(&mut self, stream: StreamId) -> Result<(), Error> {
        if !stream.is_clients() {
            return Err(Error::connection(Code::ClosedCriticalStream, "the control stream was stopped"));
        }
        self.finished(stream);
        Ok(())
    }

    /// Finds the request to which the data of a DATAGRAM frame belongs.
    ///
    /// # Errors
    ///
    /// The connection ends: it is no HTTP datagram.
    pub fn datagram<'a>(&mut self, frame: &'a [u8]) -> Result<Delivery<'a>, Error> {
        let (stream, payload) = datagram::split(frame)?;
        let request = self.requests.get(&stream).filter(|request| self.limits.datagrams && request.receives);
        match request.and_then(RequestStream::takes_datagrams) {
            Some(true) => Ok(Delivery::To(stream, payload)),
            Some(false) => {
                self.requests.remove(&stream);
                Ok(Delivery::Ends(stream))
            }
            None => Ok(Delivery::Nobody),
        }
    }

    /// Reads what follows on `stream`, an accepted CONNECT, as capsules.
    pub fn carry_capsules(&mut self, stream: StreamId) {
        if let Some(request) = self.requests.get_mut(&stream) {
            request.carry_capsules(self.limits.capsule_bytes);
        }
    }

    /// Appends the head of an answer to the request on `stream`.
    ///
    /// # Errors
    ///
    /// Why it cannot be sent; nothing was appended.
    pub fn respond(
        &mut self,
        stream: StreamId,
        response: &Response,
        out: &mut Vec<u8>,
    ) -> Result<(), SendError> {
        let request = self.requests.get_mut(&stream).ok_or(SendError::Over)?;
        if !message::is_status(response.status) {
            return Err(SendError::Order);
        }
        request.sends.require(Sends::Head)?;
        put_section(out, self.client, |section| response.encode(section))?;
        if !response.is_interim() {
            request.sends = Sends::Content;
        }
        Ok(())
    }

    /// Appends the head of a DATA frame; `length` bytes of content have to follow on `stream`.
    ///
    /// # Errors
    ///
    /// Why they cannot be sent; nothing was appended.
    pub fn content(&mut self, stream: StreamId, length: u64, out: &mut Vec<u8>) -> Result<(), SendError> {
        self.requests.get(&stream).ok_or(SendError::Over)?.sends.require(Sends::Content)?;
        frame::put_head(out, frame::DATA, length);
        Ok(())
    }

    /// Appends the trailers of an answer; the end of the stream has to follow.
    ///
    /// # Errors
    ///
    /// Why they cannot be sent; nothing was appended.
    pub fn trailers(
        &mut self,
        stream: StreamId,
        fields: &Fields,
        out: &mut Vec<u8>,
    ) -> Result<(), SendError> {
        let request = self.requests.get_mut(&stream).ok_or(SendError::Over)?;
        request.sends.require(Sends::Content)?;
        let lines = || fields.iter().map(|line| (line.name(), line.value()));
        put_section(out, self.client, |section| qpack::encode(lines(), section))?;
        request.sends = Sends::End;
        Ok(())
    }

    /// The answer on `stream` was sent with its end, or the client stopped it.
    pub fn finished(&mut self, stream: StreamId) {
        if let Some(request) = self.requests.get_mut(&stream) {
            request.sends = Sends::Nothing;
            self.forget_if_over(stream);
        }
    }

    /// The caller reset and stopped `stream`, or wants nothing more of it: what still comes is thrown away.
    pub fn abandoned(&mut self, stream: StreamId) {
        self.requests.remove(&stream);
    }

    /// Appends GOAWAY for the control stream: requests that were opened are answered, later ones rejected.
    pub fn go_away(&mut self, out: &mut Vec<u8>) {
        let last = *self.last_request.get_or_insert_with(|| self.next_request.min(varint::MAX - 3));
        let mut payload = Vec::new();
        varint::put(&mut payload, last);
        frame::put(out, frame::GOAWAY, &payload);
    }

    /// How many requests are open, in either direction.
    #[must_use]
    pub fn open_requests(&self) -> usize {
        self.requests.len()
    }

    /// How many bytes of memory hold what came and is not whole: at most [`Limits::most_held_bytes`].
    #[must_use]
    pub fn held_bytes(&self) -> u64 {
        let requests = self.requests.values().map(RequestStream::held_bytes);
        requests.chain(self.unidirectional.values().map(Unidirectional::held_bytes)).sum::<usize>() as u64
    }

    fn forget_if_over(&mut self, stream: StreamId) {
        if self.requests.get(&stream).is_some_and(RequestStream::is_over) {
            self.requests.remove(&stream);
        }
    }
}

impl Sends {
    fn require(self, next: Self) -> Result<(), SendError> {
        match self {
            Self::Nothing => Err(SendError::Over),
            _ if self == next => Ok(()),
            Self::Head | Self::Content | Self::End => Err(SendError::Order),
        }
    }
}

impl Opened {
    /// What a stream of this type is. A type that nobody knows ends the stream only.
    fn place(&mut self, kind: u64) -> Result<Unidirectional, Error> {
        let (opened, role) = match kind {
            stream::CONTROL => (&mut self.control, Unidirectional::Control(ControlStream::new())),
            stream::QPACK_ENCODER => (&mut self.qpack_encoder, Unidirectional::QpackEncoder),
            stream::QPACK_DECODER => {
                (&mut self.qpack_decoder, Unidirectional::QpackDecoder(Cancellations::default()))
            }
            stream::PUSH => {
                return Err(Error::connection(Code::StreamCreationError, "a client does not push"));
            }
            _ => return Err(Error::stream(Code::StreamCreationError, "a stream of an unknown type")),
        };
        if std::mem::replace(opened, true) {
            return Err(Error::connection(
                Code::StreamCreationError,
                "a stream that there is once was opened again",
            ));
        }
        Ok(role)
    }
}

/// Appends a HEADERS frame with what `encode` writes, if the client takes it.
fn put_section(
    out: &mut Vec<u8>,
    client: Settings,
    encode: impl FnOnce(&mut Vec<u8>) -> u64,
) -> Result<(), SendError> {
    let mut section = Vec::new();
    let size_bytes = encode(&mut section);
    if client.max_field_section_bytes.is_some_and(|most| size_bytes > most) {
        return Err(SendError::TooLarge);
    }
    frame::put(out, frame::HEADERS, &section);
    Ok(())
}

#[cfg(test)]
mod tests;
