//! A file of used knocks.
#![no_main]

culvert_fuzz::target!(testkit::fuzz::knock_journal);
