//! Received datagrams, some of them sealed by a sender that may do anything.
#![no_main]

culvert_fuzz::target!(quic_core::fuzz::packet_open);
