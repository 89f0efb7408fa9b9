//! An IP packet.
#![no_main]

culvert_fuzz::target!(culvert::fuzz::ip_view);
