//! What a user presents and asks for.
#![no_main]

culvert_fuzz::target!(testkit::fuzz::user_request);
