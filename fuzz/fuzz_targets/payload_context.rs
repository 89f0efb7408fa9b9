//! The data of a DATAGRAM frame.
#![no_main]

culvert_fuzz::target!(testkit::fuzz::payload_context);
