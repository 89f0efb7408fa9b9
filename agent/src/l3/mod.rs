//! L3: the pure side of the TUN tunnel. No system calls, no clock: bytes and addresses.
//!
//! | question | file |
//! |---|---|
//! | which peer has an inner address | `routes.rs` |
//! | what the kernel says of a packet, or is told of it | `vnet.rs` |
//! | what an IP packet's headers say, and which flow it is of | `view.rs` |
//! | which packets become of what was read | `cut.rs` |
//! | which packets are written together | `merge.rs` |
//! | which fragments become of a packet that is too large and may be cut | `fragment.rs` |
//! | what a sender is told whose packet cannot be carried | `icmp.rs` |
//! | what TCP is told to send at most | `mss.rs` |
//! | how congestion marks cross the tunnel | `ecn.rs` |
//! | how the Internet checksum is reckoned | `checksum.rs` |
//! | what holds for any packets, and a model of the kernel to compare with (tests and fuzzing) | `properties.rs`, `model.rs` |

use quic_core::{HEADER_LEN, TAG_LEN};

pub mod checksum;
pub mod cut;
pub mod ecn;
pub mod fragment;
pub mod icmp;
pub mod merge;
#[cfg(any(test, feature = "fuzzing"))]
pub(crate) mod model;
pub mod mss;
#[cfg(any(test, feature = "fuzzing"))]
pub(crate) mod properties;
pub mod routes;
pub mod view;
pub mod vnet;

/// Bytes of a QUIC packet around the IP packet that fills it: its header and tag, the type of a DATAGRAM frame without length
/// (RFC 9221 §4), and the context.
pub const INNER_OVERHEAD: usize = HEADER_LEN + 1 + 1 + TAG_LEN;
