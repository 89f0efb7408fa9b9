//! Culvert.

pub mod cli;
pub mod config;
pub mod identity;
pub mod log;
