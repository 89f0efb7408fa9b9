//! A configuration file.
#![no_main]

culvert_fuzz::target!(culvert::fuzz::config_text);
