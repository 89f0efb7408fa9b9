//! Culvert.

pub mod control;
pub mod metrics;
