//! A share link, an endpoint, a public key.
#![no_main]

culvert_fuzz::target!(testkit::fuzz::share_link);
