//! A state file, and what `culvert peer` makes of it.
#![no_main]

culvert_fuzz::target!(testkit::fuzz::state_text);
