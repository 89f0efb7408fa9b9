//! A datagram, or the frames of an Initial packet.
#![no_main]

culvert_fuzz::target!(testkit::fuzz::gate_initial);
