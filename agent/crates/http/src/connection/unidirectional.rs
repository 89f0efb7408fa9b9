//! The client's streams with one direction (RFC 9114 §6.2): its control stream and those of QPACK.

use bytes::{Buf, Bytes};

use crate::{
    error::{Code, Error},
    frame::{self, Collector, Head, HeadReader, take_payload},
    settings::{self, Settings},
    varint::{self, Partial},
};

/// What a stream with one direction is, as far as is known.
#[derive(Debug)]
pub(super) enum Unidirectional {
    /// Its type is not whole yet.
    Pending(Partial),
    Control(ControlStream),
    QpackEncoder,
    QpackDecoder(Cancellations),
}

impl Unidirectional {
    /// The stream ended, or was reset.
    ///
    /// # Errors
    ///
    /// The connection needs this stream.
    pub(super) fn ended(&self) -> Result<(), Error> {
        match self {
            Self::Pending(_) => Ok(()),
            Self::Control(_) | Self::QpackEncoder | Self::QpackDecoder(_) => Err(Error::connection(
                Code::ClosedCriticalStream,
                "a stream that the connection needs was closed",
            )),
        }
    }

    pub(super) const fn held_bytes(&self) -> usize {
        match self {
            Self::Control(control) => control.held_bytes(),
            Self::Pending(_) | Self::QpackEncoder | Self::QpackDecoder(_) => 0,
        }
    }
}

/// What the client says on its control stream.
#[derive(Debug, PartialEq)]
pub(super) enum Said {
    Settings(Settings),
    GoAway,
}

/// The client's control stream: SETTINGS, and then frames about the whole connection.
#[derive(Debug)]
pub(super) struct ControlStream {
    at: At,
    has_settings: bool,
    /// The push ID of the last GOAWAY.
    last_push: Option<u64>,
    /// That of the last MAX_PUSH_ID. There are no pushes; the client may raise it all the same.
    max_push: Option<u64>,
}

#[derive(Debug)]
enum At {
    Head(HeadReader),
    /// A payload that is read when it is whole.
    Payload {
        kind: u64,
        payload: Collector,
    },
    /// PRIORITY_UPDATE, and frames that nobody knows.
    Skip {
        left: u64,
    },
}

impl ControlStream {
    pub(super) fn new() -> Self {
        Self { at: At::Head(HeadReader::default()), has_settings: false, last_push: None, max_push: None }
    }

    /// Takes bytes from the front of `input` up to the next thing said.
    ///
    /// # Errors
    ///
    /// The connection ends.
    pub(super) fn read(&mut self, input: &mut Bytes) -> Result<Option<Said>, Error> {
        loop {
            match &mut self.at {
                At::Head(head) => {
                    let Some(head) = head.take(input) else { return Ok(None) };
                    self.at = self.begin(head)?;
                }
                At::Payload { kind, payload } => {
                    let kind = *kind;
                    let Some(payload) = payload.take(input) else { return Ok(None) };
                    self.at = At::Head(HeadReader::default());
                    if let Some(said) = self.payload(kind, &payload)? {
                        return Ok(Some(said));
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
        let wrong = |code, reason| Err(Error::connection(code, reason));
        if !self.has_settings && kind != frame::SETTINGS {
            return wrong(Code::MissingSettings, "the control stream does not begin with SETTINGS");
        }
        match kind {
            frame::SETTINGS if self.has_settings => {
                wrong(Code::FrameUnexpected, "SETTINGS for a second time")
            }
            frame::SETTINGS if length > settings::MOST_BYTES => {
                wrong(Code::ExcessiveLoad, "SETTINGS of more than a kilobyte")
            }
            frame::GOAWAY | frame::MAX_PUSH_ID | frame::CANCEL_PUSH if length == 0 || length > 8 => {
                wrong(Code::FrameError, "a frame that is no one integer")
            }
            frame::SETTINGS | frame::GOAWAY | frame::MAX_PUSH_ID | frame::CANCEL_PUSH => {
                self.has_settings = true;
                Ok(At::Payload { kind, payload: Collector::new(length) })
            }
            frame::DATA | frame::HEADERS | frame::PUSH_PROMISE => {
                wrong(Code::FrameUnexpected, "a frame of a request on the control stream")
            }
            _ if frame::is_of_http2(kind) => wrong(Code::FrameUnexpected, "a frame of HTTP/2"),
            _ => Ok(At::Skip { left: length }),
        }
    }

    fn payload(&mut self, kind: u64, mut payload: &[u8]) -> Result<Option<Said>, Error> {
        if kind == frame::SETTINGS {
            return Settings::read(payload).map(|settings| Some(Said::Settings(settings)));
        }
        let number = varint::take(&mut payload).filter(|_| payload.is_empty());
        let number = number.ok_or(Error::connection(Code::FrameError, "a frame that is no one integer"))?;
        let id_error = |reason| Err(Error::connection(Code::IdError, reason));
        match kind {
            frame::GOAWAY if self.last_push.is_some_and(|last| number > last) => id_error("GOAWAY goes up"),
            frame::GOAWAY => {
                self.last_push = Some(number);
                Ok(Some(Said::GoAway))
            }
            frame::MAX_PUSH_ID if self.max_push.is_some_and(|max| number < max) => {
                id_error("MAX_PUSH_ID goes down")
            }
            frame::MAX_PUSH_ID => {
                self.max_push = Some(number);
                Ok(None)
            }
            _ => id_error("CANCEL_PUSH of what was never promised"),
        }
    }

    const fn held_bytes(&self) -> usize {
        match &self.at {
            At::Payload { payload, .. } => payload.held_bytes(),
            At::Head(_) | At::Skip { .. } => 0,
        }
    }
}

/// Reads QPACK's encoder stream (RFC 9204 §4.3). A table of capacity 0 takes one instruction: that its capacity be 0.
///
/// # Errors
///
/// The connection ends.
pub(super) fn read_qpack_encoder(input: &mut Bytes) -> Result<(), Error> {
    /// Set Dynamic Table Capacity: `001`, and five bits of capacity.
    const CAPACITY_0: u8 = 0b0010_0000;
    if input.iter().any(|byte| *byte != CAPACITY_0) {
        return Err(Error::connection(
            Code::QpackEncoderStreamError,
            "an entry for a table without capacity",
        ));
    }
    input.clear();
    Ok(())
}

/// The client's decoder stream (RFC 9204 §4.4). To an encoder without a dynamic table it can only say that a stream was cancelled.
#[derive(Debug, Default)]
pub(super) struct Cancellations {
    /// How many bytes the number of the stream in hand has beyond its first one; `None` between two instructions.
    more_bytes: Option<u32>,
}

impl Cancellations {
    /// Takes all of `input`.
    ///
    /// # Errors
    ///
    /// The connection ends.
    pub(super) fn read(&mut self, input: &mut Bytes) -> Result<(), Error> {
        /// The most bytes beyond the first of an integer up to 2^62 - 1: seven bits each.
        const MOST_MORE: u32 = 9;
        let wrong = |reason| Err(Error::connection(Code::QpackDecoderStreamError, reason));
        while input.has_remaining() {
            let byte = input.get_u8();
            match self.more_bytes {
                // Stream Cancellation: `01`, and six bits of the number.
                None if byte >> 6 == 0b01 => self.more_bytes = (byte & 0x3f == 0x3f).then_some(0),
                None => return wrong("an acknowledgement of what was never sent"),
                Some(MOST_MORE) => return wrong("the number of a stream above the largest"),
                Some(more) => self.more_bytes = (byte & 0x80 != 0).then_some(more + 1),
            }
        }
        Ok(())
    }
}
