//! Numbers of streams (RFC 9000 §2.1) and the types of those with one direction (RFC 9114 §6.2, RFC 9204 §4.2).

/// The control stream.
pub const CONTROL: u64 = 0x00;
/// A push, which only servers open.
pub const PUSH: u64 = 0x01;
/// QPACK's encoder stream.
pub const QPACK_ENCODER: u64 = 0x02;
/// QPACK's decoder stream.
pub const QPACK_DECODER: u64 = 0x03;

/// The number of a QUIC stream.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub struct StreamId(u64);

impl StreamId {
    /// The stream with this number.
    #[must_use]
    pub const fn new(index: u64) -> Self {
        Self(index)
    }

    /// The number, whose lowest two bits say who opened the stream and in how many directions it goes.
    #[must_use]
    pub const fn index(self) -> u64 {
        self.0
    }

    /// Whether the stream is a request's: opened by the client, in both directions.
    #[must_use]
    pub const fn is_request(self) -> bool {
        self.0 & 3 == 0
    }

    /// Whether the client opened the stream.
    #[must_use]
    pub const fn is_clients(self) -> bool {
        self.0 & 1 == 0
    }
}
