//! The packet path of a lane.
#![forbid(unsafe_code)]
