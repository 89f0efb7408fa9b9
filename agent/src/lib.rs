//! Culvert.
