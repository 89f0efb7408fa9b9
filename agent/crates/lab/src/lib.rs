//! Loads and probes, apart from the daemon: `culvert bench`, and what `culvert doctor` sends.

pub mod bench;
pub mod probe;
pub mod rate;
