//! Addresses and routes of CONNECT-IP.
#![no_main]

culvert_fuzz::target!(testkit::fuzz::ip_capsules);
