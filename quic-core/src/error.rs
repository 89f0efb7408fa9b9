//! The errors of making a lane, and of sealing and opening its packets.

use thiserror::Error;

/// Why a lane cannot be made.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Error)]
pub enum LaneError {
    /// A secret has not the length of the suite's hash.
    #[error("a secret of {got} bytes where the suite needs {want}")]
    SecretLength {
        /// The bytes that the suite needs: [`Suite::secret_len`](crate::Suite::secret_len).
        want: usize,
        /// The bytes of the secret that was given.
        got: usize,
    },
}

/// Why a packet was not sealed. Nothing was sent, and no packet number was used.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Error)]
pub enum SealError {
    /// The slice is too short for a packet with at least one byte of frames, or longer than a UDP datagram.
    #[error("no room for a packet in {len} bytes")]
    Size {
        /// The length of the caller's slice.
        len: usize,
    },
    /// The key has sealed as many packets as RFC 9001 §6.6 allows; the lane must be reopened.
    ///
    /// The lane updates its keys long before; it comes to this only if the other end acknowledges nothing for so long.
    #[error("the key reached its confidentiality limit")]
    KeyExhausted,
    /// All 2^62 packet numbers were used; the lane must be reopened.
    #[error("the packet numbers are used up")]
    NumbersExhausted,
}

/// Why a received packet was refused. The lane is as if it had not come, but for its counters
/// and, for a [`Violation`], the replay window.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Error)]
pub enum OpenError {
    /// The bytes are not a short-header packet for this lane.
    #[error(transparent)]
    Header(#[from] HeaderError),
    /// A packet of this number was opened before.
    #[error("duplicate packet")]
    Duplicate,
    /// The number is below the replay window.
    #[error("packet below the replay window")]
    TooOld,
    /// The AEAD tag does not match.
    #[error("authentication failed")]
    Authentication,
    /// The key-phase bit is not that of the current keys, and the one key that the packet number then allows does not match.
    #[error("authentication failed in the other key phase")]
    AuthenticationOtherPhase,
    /// More packets failed authentication, under all keys together, than RFC 9001 §6.6 allows; the lane must be reopened.
    #[error("the keys reached their integrity limit")]
    IntegrityLimit,
    /// The other end, authenticated, broke the protocol; the lane must be closed.
    #[error(transparent)]
    Violation(#[from] Violation),
}

/// Why bytes are not a short-header packet for this lane. No key was needed to tell.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Error)]
pub enum HeaderError {
    /// Shorter than the shortest packet that can be unprotected.
    #[error("packet too short")]
    TooShort,
    /// The header form bit is set.
    #[error("long header")]
    LongHeader,
    /// The fixed bit is clear (RFC 9000 §17.3.1).
    #[error("fixed bit clear")]
    FixedBitClear,
    /// The connection ID is not this lane's.
    #[error("destination connection ID of another lane")]
    WrongDestination,
}

/// The way in which the other end broke the protocol, in a packet that it authenticated.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Error)]
pub enum Violation {
    /// Reserved header bits are set (RFC 9000 §17.3.1).
    #[error("reserved header bits set")]
    ReservedBits,
    /// Keys were updated out of order: a higher packet number has older keys than a lower one (RFC 9001 §6.4), or a second
    /// update came before we had sent a packet in the phase of the first (§6.2).
    #[error("key update out of order")]
    KeyUpdate,
    /// The packet has no frames (RFC 9000 §12.4).
    #[error("packet without frames")]
    EmptyPayload,
    /// A frame type that is not allowed on a lane.
    #[error("frame type {0:#x} is not allowed on a lane")]
    FrameType(u64),
    /// A frame type in more bytes than it needs (RFC 9000 §12.4).
    #[error("frame type {0:#x} not in its shortest form")]
    FrameTypeNotMinimal(u64),
    /// A frame ends before its last field.
    #[error("frame of type {0:#x} cut short")]
    Truncated(u64),
    /// An ACK frame's ranges go below packet number 0 (RFC 9000 §19.3.1).
    #[error("ACK range below packet number 0")]
    AckRange,
    /// An ACK frame acknowledges a packet that was never sent (RFC 9000 §13.1).
    #[error("ACK of packet {0}, which was never sent")]
    AckOfUnsent(u64),
}
