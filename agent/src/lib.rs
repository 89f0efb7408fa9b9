//! Culvert.

pub mod clock;
pub mod io;
pub mod task;
