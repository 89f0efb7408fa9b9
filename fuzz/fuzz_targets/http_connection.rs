//! What a client does on the streams of an HTTP/3 connection.
#![no_main]

culvert_fuzz::target!(testkit::fuzz::http_connection);
