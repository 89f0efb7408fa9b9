//! Two configuration files, of which the second is reloaded.
#![no_main]

culvert_fuzz::target!(testkit::fuzz::reload_files);
