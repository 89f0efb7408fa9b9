//! A configuration file.
#![no_main]

culvert_fuzz::target!(testkit::fuzz::config_text);
