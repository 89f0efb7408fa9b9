//! An IP packet that is larger than its way.
#![no_main]

culvert_fuzz::target!(culvert::fuzz::ip_fragments);
