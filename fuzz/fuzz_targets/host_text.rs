//! Files of the kernel and of systemd.
#![no_main]

culvert_fuzz::target!(testkit::fuzz::host_text);
