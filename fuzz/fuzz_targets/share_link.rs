//! A share link, an endpoint, a public key.
#![no_main]

culvert_fuzz::target!(culvert::fuzz::share_link);
