//! Files of the kernel and of systemd.
#![no_main]

culvert_fuzz::target!(culvert::fuzz::host_text);
