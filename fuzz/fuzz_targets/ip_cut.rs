//! What is read from a TUN device.
#![no_main]

culvert_fuzz::target!(culvert::fuzz::ip_cut);
