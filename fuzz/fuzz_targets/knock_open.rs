//! The token of an Initial packet.
#![no_main]

culvert_fuzz::target!(culvert::fuzz::knock_open);
