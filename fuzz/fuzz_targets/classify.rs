//! A datagram before the gate.
#![no_main]

culvert_fuzz::target!(testkit::fuzz::classify);
