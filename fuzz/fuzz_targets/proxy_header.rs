//! The beginning of a balancer's connection, or of its datagram.
#![no_main]

culvert_fuzz::target!(testkit::fuzz::proxy_header);
