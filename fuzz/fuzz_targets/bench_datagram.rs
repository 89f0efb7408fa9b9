//! A datagram of `culvert bench`.
#![no_main]

culvert_fuzz::target!(testkit::fuzz::bench_datagram);
