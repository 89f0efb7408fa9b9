//! The token with which a client answers a Retry.
#![no_main]

culvert_fuzz::target!(culvert::fuzz::retry_token);
