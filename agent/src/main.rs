//! Culvert.
fn main() {}
