//! The packet path of a lane: QUIC short-header packets, sealed and opened in place in the caller's slices.
//!
//! A [`Lane`] is one sequence of short-header packets (RFC 9000 §17.3.1) under packet protection (RFC 9001 §5) that carry
//! DATAGRAM frames (RFC 9221). It numbers and seals what the caller sends, opens and checks what the caller received,
//! acknowledges it, and tells from the other end's acknowledgements what was lost and how long the round trip takes. It
//! updates its keys by itself (RFC 9001 §6).
//!
//! ```text
//!  Lane::seal                                             Lane::open
//!  ┌──────────────────────────────────┐                   ┌──────────────────────────────────┐
//!  │ room │ frames             │ room │  caller's slice   │ a received datagram              │
//!  └──────────────────────────────────┘                   └──────────────────────────────────┘
//!     │ new keys due?        crypto/update.rs                │ shape, connection ID    packet/header.rs
//!     │ number, key budget   seal.rs                         ▼
//!     │ header               packet/header.rs             Protected
//!     ▼                                                      │ remove header mask      crypto/header_mask.rs
//!   Plain                                                    │ expand the number       packet/number.rs
//!     │ encrypt, tag         crypto/aead.rs                  ▼
//!     ▼                                                   Encrypted
//!  Encrypted                                                 │ duplicate, too old?     replay.rs
//!     │ apply header mask    crypto/header_mask.rs           │ which key               crypto/update.rs
//!     ▼                                                      │ decrypt, check tag      crypto/aead.rs
//!  Protected                                                 ▼
//!     │                                                    Plain
//!     │ into the window      ack/sent.rs                     │ slide the window        replay.rs
//!     ▼                                                      │ new keys?               crypto/update.rs
//!   the wire                                                 │ validate all frames     frame/mod.rs
//!                                                            ▼
//!                                                         Opened
//!                                                            │ follow new keys         crypto/update.rs
//!                                                            │ what to acknowledge     ack/received.rs
//!                                                            │ acked, lost, RTT        ack/sent.rs
//!                                                            │ the path's MTU          mtu.rs
//!                                                            ▼
//!                                                          the caller takes the datagrams
//! ```
//!
//! `seal.rs` and `open.rs` are the two columns, top to bottom; `lane.rs` joins them to what each packet changes.
//!
//! # What it does not do
//!
//! * No I/O, no clock, no threads, no logging: time is an argument, and what happened is a value or a counter, or, where the
//!   caller puts a [`record::Recorder`] in, a record.
//! * No handshake: secrets and connection IDs come from the control connection.
//! * No retransmission and no streams: a lost datagram stays lost.
//! * No allocation per packet: the only memory beyond the lane itself is the sent window, made with the first packet.
//! * No congestion control: the traffic inside controls itself.
//!
//! # The contract
//!
//! In each turn: [`Lane::open`] what arrived, [`Lane::seal`] what is to be sent, then [`Lane::poll_transmit`] until `None`, then
//! set a timer for [`Lane::poll_timeout`]. When it fires: [`Lane::handle_timeout`], then [`Lane::poll_transmit`] again.
//!
//! After [`Lane::start_mtu_search`] the caller keeps packets within [`Lane::max_packet`], and gives [`Lane::poll_transmit`]
//! [`Lane::transmit_capacity`] bytes.

#![warn(missing_docs)]
#![forbid(unsafe_code)]
#![warn(clippy::missing_errors_doc)]

mod ack;
mod bits;
mod crypto;
mod error;
pub mod frame;
#[cfg(any(test, feature = "fuzzing"))]
#[doc(hidden)]
pub mod fuzz;
mod lane;
mod mtu;
mod open;
mod packet;
pub mod record;
mod replay;
mod seal;
mod stats;
pub mod varint;

pub use ack::{AckProfile, Rtt, Volume};
pub use crypto::Suite;
pub use error::{HeaderError, LaneError, OpenError, SealError, Violation};
pub use lane::{Lane, LaneConfig, PATH_PACKET_MIN, TRANSMIT_CAPACITY, Timer};
pub use open::{Datagram, Datagrams, Opened};
pub use packet::{ConnectionId, HEADER_LEN, OVERHEAD, PacketNumber, TAG_LEN, destination};
pub use stats::{LaneStats, LaneView};
