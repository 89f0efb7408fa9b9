//! An IP packet to or from a peer with `peer.map`.
#![no_main]

culvert_fuzz::target!(testkit::fuzz::ip_map);
