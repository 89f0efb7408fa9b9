//! The file of a private key.
#![no_main]

culvert_fuzz::target!(culvert::fuzz::key_file);
