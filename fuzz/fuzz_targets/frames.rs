//! The frames of an authenticated payload.
#![no_main]

culvert_fuzz::target!(quic_core::fuzz::frames);
