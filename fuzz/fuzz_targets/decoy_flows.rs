//! Datagrams of strangers and of the decoy, in any order.
#![no_main]

culvert_fuzz::target!(testkit::fuzz::decoy_flows);
