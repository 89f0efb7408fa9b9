//! Two configuration files, of which the second is reloaded.
#![no_main]

culvert_fuzz::target!(culvert::fuzz::reload_files);
