//! The packet path of a lane: QUIC short-header packets, sealed and opened in place.
#![forbid(unsafe_code)]

mod crypto;
mod error;
pub mod frame;
mod lane;
mod stats;

pub use crypto::Suite;
pub use error::{HeaderError, LaneError, OpenError, SealError, Violation};
pub use lane::{AckProfile, Datagrams, InFlight, Lane, LaneConfig, Opened, Received, Rtt, Timer};
pub use packet::{ConnectionId, HEADER_LEN, OVERHEAD, PacketNumber, TAG_LEN, destination};
pub use stats::LaneStats;
mod packet;
