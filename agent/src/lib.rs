//! Culvert: a gateway that carries UDP flows, IP packets and TCP forwards between sites over QUIC.
//!
//! `docs/architecture.md` is the map; the way of a datagram starts in [`datapath`].

pub mod admin;
pub mod bench;
pub mod cli;
pub mod control_socket;
pub mod daemon;
pub mod demo;
pub mod doctor;
#[cfg(any(test, feature = "fuzzing"))]
#[doc(hidden)]
pub mod fuzz;
pub mod log;
pub mod notify;
pub mod operator;
pub mod probe;
pub mod reload;
pub mod run;
pub mod service;
