//! A TCP forward beside a direct connection: the same scripts of two programs over both, and the same real programs.
//!
//! | question | file |
//! |---|---|
//! | what the programs of a script do, what is compared, which differences must be | `agent/crates/testkit/src/scripts/` |
//! | two agents, direct connections beside them, and HAProxy | `bed.rs` |
//! | scripts over all of these | `scripted.rs` |
//! | a real server, directly and over a forward | `server.rs` |
//! | the PROXY protocol, beside nginx and HAProxy | `proxy.rs` |
//! | the same before datagrams, beside dnsdist | `proxy_udp.rs` |
//! | a service at a Unix socket | `unix.rs` |
//! | one that refuses uploads; other real programs | `python.rs`, `refuses.py`, `uploads.py`; `programs.rs` |
//!
//! `CULVERT_FORWARD_SCRIPTS=10000` runs so many scripts, `CULVERT_FORWARD_SCRIPTS=5000..6000` those, and `CULVERT_TEST_SEED=17`
//! that one (both: that one so many times). `CULVERT_FORWARD_BESIDE=haproxy` also shows what HAProxy makes of them.
#![expect(clippy::unwrap_used, clippy::print_stdout, reason = "tests")]

mod bed;
mod programs;
mod proxy;
mod proxy_udp;
mod python;
mod scripted;
mod server;
mod unix;
