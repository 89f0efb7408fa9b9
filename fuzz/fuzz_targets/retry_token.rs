//! The token with which a client answers a Retry.
#![no_main]

culvert_fuzz::target!(testkit::fuzz::retry_token);
