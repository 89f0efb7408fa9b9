//! A field section or the settings of a client.
#![no_main]

culvert_fuzz::target!(testkit::fuzz::http_fields);
