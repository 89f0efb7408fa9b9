//! IP packets as bytes, between a TUN device and a tunnel: no system calls, no clock, no peers.
//!
//! | question | file |
//! |---|---|
//! | which owner has an address: the longest prefix | `routes.rs` |
//! | what the kernel says of a packet, or is told of it | `vnet.rs` |
//! | what an IP packet's headers say, and which flow it is of | `view.rs` |
//! | which packets become of what was read | `cut.rs` |
//! | which packets are written together | `merge.rs`, the list is in `packets.rs` |
//! | which of them are in a tunnel (VXLAN, Geneve), and what stands before them | `tunnels.rs` |
//! | which fragments become of a packet that is too large and may be cut | `fragment.rs` |
//! | how a network of a peer has other addresses here than there | `map.rs` |
//! | what a sender is told whose packet cannot be carried | `icmp.rs` |
//! | what TCP is told to send at most | `mss.rs` |
//! | how congestion marks cross the tunnel | `ecn.rs` |
//! | how the Internet checksum is reckoned | `checksum.rs` |
//! | what holds for any packets, and a model of the kernel to compare with (tests and fuzzing) | `properties.rs`, `model.rs` |

#![warn(missing_docs)]
#![warn(clippy::missing_errors_doc)]

pub mod checksum;
pub mod cut;
pub mod ecn;
pub mod fragment;
pub mod icmp;
pub mod map;
pub mod merge;
#[cfg(any(test, feature = "fuzzing"))]
#[doc(hidden)]
pub mod model;
pub mod mss;
pub mod packets;
#[cfg(any(test, feature = "fuzzing"))]
#[doc(hidden)]
pub mod properties;
pub mod routes;
mod tunnels;
pub mod view;
pub mod vnet;
