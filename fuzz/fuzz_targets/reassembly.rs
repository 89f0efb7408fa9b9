//! Pieces of datagrams, in any order.
#![no_main]

culvert_fuzz::target!(testkit::fuzz::reassembly);
