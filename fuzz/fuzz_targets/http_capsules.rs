//! The bytes of a tunnel, or the data of a DATAGRAM frame.
#![no_main]

culvert_fuzz::target!(testkit::fuzz::http_capsules);
