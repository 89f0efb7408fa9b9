//! What a peer writes on the control stream, in any chunks.
#![no_main]

culvert_fuzz::target!(testkit::fuzz::control_messages);
