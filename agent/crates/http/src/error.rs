//! What a client did wrong, and the code that it is told.

use thiserror::Error;

/// Codes of errors, of HTTP/3 (RFC 9114 §8.1), QPACK (RFC 9204 §6) and HTTP datagrams (RFC 9297 §5.2).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(u64)]
pub enum Code {
    /// `H3_DATAGRAM_ERROR`: a datagram or a capsule breaks RFC 9297.
    DatagramError = 0x33,
    /// `H3_NO_ERROR`: the end without an error.
    NoError = 0x100,
    /// `H3_GENERAL_PROTOCOL_ERROR`: a violation that no other code names.
    GeneralProtocolError = 0x101,
    /// `H3_INTERNAL_ERROR`: this end cannot go on.
    InternalError = 0x102,
    /// `H3_STREAM_CREATION_ERROR`: a stream that may not be opened, or whose type nobody knows.
    StreamCreationError = 0x103,
    /// `H3_CLOSED_CRITICAL_STREAM`: a stream that the connection needs was closed.
    ClosedCriticalStream = 0x104,
    /// `H3_FRAME_UNEXPECTED`: a frame that is not allowed in this state or on this stream.
    FrameUnexpected = 0x105,
    /// `H3_FRAME_ERROR`: a frame whose length does not fit its content.
    FrameError = 0x106,
    /// `H3_EXCESSIVE_LOAD`: the client asks for more than its share.
    ExcessiveLoad = 0x107,
    /// `H3_ID_ERROR`: a stream ID or a push ID that is not allowed.
    IdError = 0x108,
    /// `H3_SETTINGS_ERROR`: the payload of SETTINGS is wrong.
    SettingsError = 0x109,
    /// `H3_MISSING_SETTINGS`: the control stream does not begin with SETTINGS.
    MissingSettings = 0x10a,
    /// `H3_REQUEST_REJECTED`: nothing was done for the request.
    RequestRejected = 0x10b,
    /// `H3_REQUEST_CANCELLED`: the request or its answer is not wanted any more.
    RequestCancelled = 0x10c,
    /// `H3_REQUEST_INCOMPLETE`: the stream ended before the request.
    RequestIncomplete = 0x10d,
    /// `H3_MESSAGE_ERROR`: a malformed message.
    MessageError = 0x10e,
    /// `H3_CONNECT_ERROR`: the connection for a CONNECT was reset or closed.
    ConnectError = 0x10f,
    /// `H3_VERSION_FALLBACK`: the request has to be made over HTTP/1.1.
    VersionFallback = 0x110,
    /// `QPACK_DECOMPRESSION_FAILED`: a field section cannot be read.
    QpackDecompressionFailed = 0x200,
    /// `QPACK_ENCODER_STREAM_ERROR`: an instruction on the encoder stream is wrong.
    QpackEncoderStreamError = 0x201,
    /// `QPACK_DECODER_STREAM_ERROR`: an instruction on the decoder stream is wrong.
    QpackDecoderStreamError = 0x202,
}

impl Code {
    /// The number in CONNECTION_CLOSE, RESET_STREAM and STOP_SENDING.
    #[must_use]
    pub const fn value(self) -> u64 {
        self as u64
    }
}

/// What ends a connection or a stream. The reason is for logs, and may be sent in CONNECTION_CLOSE.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Error)]
pub enum Error {
    /// The connection has to be closed with this code.
    #[error("connection closed with {code:?}: {reason}")]
    Connection {
        /// The code for CONNECTION_CLOSE.
        code: Code,
        /// What was wrong.
        reason: &'static str,
    },
    /// Only the stream at hand ends: reading it is stopped with this code, and so is writing if it has two directions. The
    /// connection has forgotten it.
    #[error("stream ended with {code:?}: {reason}")]
    Stream {
        /// The code for RESET_STREAM and STOP_SENDING.
        code: Code,
        /// What was wrong.
        reason: &'static str,
    },
}

impl Error {
    pub(crate) const fn connection(code: Code, reason: &'static str) -> Self {
        Self::Connection { code, reason }
    }

    pub(crate) const fn stream(code: Code, reason: &'static str) -> Self {
        Self::Stream { code, reason }
    }

    /// The code that the client is told.
    #[must_use]
    pub const fn code(self) -> Code {
        match self {
            Self::Connection { code, .. } | Self::Stream { code, .. } => code,
        }
    }
}
