//! Culvert.

pub mod admin;
pub mod control;
pub mod metrics;
pub mod task;
