//! An IP packet that is larger than its way.
#![no_main]

culvert_fuzz::target!(testkit::fuzz::ip_fragments);
