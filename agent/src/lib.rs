//! Culvert.
pub mod config;
pub mod identity;
