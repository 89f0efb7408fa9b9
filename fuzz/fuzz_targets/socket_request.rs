//! A line that a client writes to the control socket.
#![no_main]

culvert_fuzz::target!(culvert::fuzz::socket_request);
