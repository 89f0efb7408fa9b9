//! What is received, what is acknowledged, and what the sender makes of it.
#![no_main]

culvert_fuzz::target!(quic_core::fuzz::ack_ranges);
