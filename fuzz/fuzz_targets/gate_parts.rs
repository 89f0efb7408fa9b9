//! The datagrams of three ClientHellos: their order, when they come and from where.
#![no_main]

culvert_fuzz::target!(testkit::fuzz::gate_parts);
