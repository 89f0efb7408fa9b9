//! The messages of two Culvert agents.
//!
//! | what | module |
//! |---|---|
//! | control messages, on the first stream of a connection | [`messages`], `stream_messages` about TCP forwards; [`framing`] cuts the stream, `protobuf` is the encoding |
//! | what a DATAGRAM frame carries | [`context`]; a report about a lane: [`report`] |
//! | how lost payloads are repaired, as both ends have to know it | [`repair_terms`] |
//! | how many stream connections there are, and how each finds its worker | [`join`] |
//! | how a balancer tells a service its client (PROXY protocol) | [`proxy`] |
//! | several lines of a dialler, as the listener knows them | [`mod@line`] |
//! | connection IDs, which name a worker and a lane | [`cid`] |

#![warn(missing_docs)]

pub mod cid;
pub mod context;
pub mod framing;
pub mod join;
pub mod line;
pub mod messages;
#[cfg(any(test, feature = "fuzzing"))]
#[doc(hidden)]
pub mod properties;
mod protobuf;
pub mod proxy;
pub mod repair_terms;
pub mod report;
mod stream_messages;
