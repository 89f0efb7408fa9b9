//! A datagram of `culvert bench`.
#![no_main]

culvert_fuzz::target!(culvert::fuzz::bench_datagram);
