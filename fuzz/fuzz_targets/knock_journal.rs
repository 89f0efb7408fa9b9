//! A file of used knocks.
#![no_main]

culvert_fuzz::target!(culvert::fuzz::knock_journal);
