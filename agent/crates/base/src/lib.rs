//! The few things that every layer of an agent uses. None of them is part of a protocol.
//!
//! | what | module |
//! |---|---|
//! | numbers for peers, sessions and local sockets | [`ids`] |
//! | time, deadlines | [`clock`], [`timers`] |
//! | how often something may happen, how often it is logged, how fast it grows | [`token_bucket`], [`throttle`], [`sampler`] |
//! | how long payloads waited lately | [`delays`] |
//! | maps, by who chooses their keys | [`hash`] |
//! | tables that give memory back | [`pages`], [`sparse`] |
//! | bytes that all peers together may hold | [`memory`] |
//! | files that a person names, read so that nobody waits for them | [`files`] |
//! | enums with labels for operators, and counts by their variants | [`labelled!`], [`counts`] |
//! | what a panic ends, and locks that a panic may not leave half changed | [`panics`], [`fault`] for its tests |

#![warn(missing_docs)]

// Sizes are `usize` and shared counters `AtomicU64` in all crates; what overflows first with fewer bits, nobody has tested.
#[cfg(not(target_pointer_width = "64"))]
compile_error!("Culvert runs on 64-bit machines only (remedy: build for x86_64 or aarch64)");

pub mod clock;
pub mod counts;
pub mod delays;
pub mod fault;
pub mod files;
pub mod hash;
pub mod ids;
mod labels;
pub mod memory;
pub mod pages;
pub mod panics;
pub mod sampler;
pub mod sparse;
pub mod throttle;
pub mod timers;
pub mod token_bucket;
