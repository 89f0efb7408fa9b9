//! What a listener writes before it is known, in any pieces.
#![no_main]

culvert_fuzz::target!(testkit::fuzz::server_hello);
