//! The file of a private key.
#![no_main]

culvert_fuzz::target!(testkit::fuzz::key_file);
