//! Payloads, repairs and requests of a peer that lies.
#![no_main]

culvert_fuzz::target!(testkit::fuzz::repair_peer);
