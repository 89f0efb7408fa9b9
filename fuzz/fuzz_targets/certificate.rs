//! The certificate of whoever connects.
#![no_main]

culvert_fuzz::target!(testkit::fuzz::certificate);
