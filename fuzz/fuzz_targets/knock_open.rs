//! The token of an Initial packet.
#![no_main]

culvert_fuzz::target!(testkit::fuzz::knock_open);
