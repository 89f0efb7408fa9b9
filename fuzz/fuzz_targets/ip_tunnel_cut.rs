//! What is read from a TUN device that hands over packets inside of tunnels.
#![no_main]

culvert_fuzz::target!(testkit::fuzz::ip_tunnel_cut);
