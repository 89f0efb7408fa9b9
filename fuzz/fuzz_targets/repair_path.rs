//! An honest sender of repaired payloads, and a path that loses, delays and doubles.
#![no_main]

culvert_fuzz::target!(testkit::fuzz::repair_path);
