//! What is read from a TUN device.
#![no_main]

culvert_fuzz::target!(testkit::fuzz::ip_cut);
