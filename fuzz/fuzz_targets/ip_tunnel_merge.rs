//! Packets inside of tunnels that peers send.
#![no_main]

culvert_fuzz::target!(testkit::fuzz::ip_tunnel_merge);
