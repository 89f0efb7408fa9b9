//! Culvert.

pub mod control;
