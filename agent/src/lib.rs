//! Culvert.

pub mod clock;
pub mod task;
