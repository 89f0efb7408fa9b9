//! Packets from peers, to be written to a TUN device.
#![no_main]

culvert_fuzz::target!(testkit::fuzz::ip_merge);
