//! A line that a client writes to the control socket.
#![no_main]

culvert_fuzz::target!(testkit::fuzz::socket_request);
