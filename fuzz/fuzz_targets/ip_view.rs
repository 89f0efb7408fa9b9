//! An IP packet.
#![no_main]

culvert_fuzz::target!(testkit::fuzz::ip_view);
