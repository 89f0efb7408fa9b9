//! The data of a DATAGRAM frame.
#![no_main]

culvert_fuzz::target!(culvert::fuzz::payload_context);
