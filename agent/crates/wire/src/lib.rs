//! The messages of two Culvert agents, and the few things that every layer of an agent names.
//!
//! | what | module |
//! |---|---|
//! | control messages, on the first stream of a connection | [`messages`], `stream_messages` about TCP forwards; [`framing`] cuts the stream, `protobuf` is the encoding |
//! | what a DATAGRAM frame carries | [`context`]; a report about a lane: [`report`] |
//! | how lost payloads are repaired, as both ends have to know it | [`repair`] |
//! | how many stream connections there are, and how each finds its worker | [`join`] |
//! | connection IDs, which name a worker and a lane | [`cid`] |
//! | numbers for peers, sessions and local sockets | [`ids`] |
//! | time, deadlines | [`clock`], [`timers`] |
//! | how often something may happen, how often it is logged, how fast it grows | [`rate`], [`throttle`], [`sampler`] |
//! | maps, by who chooses their keys | [`hash`] |
//! | tables that give memory back | [`pages`], [`sparse`] |
//! | files that a person names, read so that nobody waits for them | [`files`] |
//! | enums with labels for operators, and counts by their variants | [`labelled!`], [`counts`] |
//! | what a panic ends, and locks that a panic may not leave half changed | [`panics`], [`fault`] for its tests |

#![warn(missing_docs)]

// Sizes are `usize` and shared counters `AtomicU64` in all crates; what overflows first with fewer bits, nobody has tested.
#[cfg(not(target_pointer_width = "64"))]
compile_error!("Culvert runs on 64-bit machines only (remedy: build for x86_64 or aarch64)");

pub mod cid;
pub mod clock;
pub mod context;
pub mod counts;
pub mod fault;
pub mod files;
pub mod framing;
pub mod hash;
pub mod ids;
pub mod join;
mod labels;
pub mod messages;
pub mod pages;
pub mod panics;
#[cfg(any(test, feature = "fuzzing"))]
#[doc(hidden)]
pub mod properties;
mod protobuf;
pub mod rate;
pub mod repair;
pub mod report;
pub mod sampler;
pub mod sparse;
mod stream_messages;
pub mod throttle;
pub mod timers;
