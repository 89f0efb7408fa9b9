//! A line that a daemon answers, and what is shown of it.
#![no_main]

culvert_fuzz::target!(testkit::fuzz::socket_answer);
