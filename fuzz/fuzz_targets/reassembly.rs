//! Pieces of datagrams, in any order.
#![no_main]

culvert_fuzz::target!(culvert::fuzz::reassembly);
