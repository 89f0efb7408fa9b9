//! The command line: exit codes, and that an operator is told what to change.

#![expect(clippy::unwrap_used, reason = "a test that cannot go on has failed")]

mod bench;
mod check;
mod demo;
mod doctor;
mod forward;
mod import;
mod init;
mod logs;
mod manual;
mod metrics_reload;
mod peer;
mod peer_quota;
mod peer_set;
mod pipe;
mod preflight;
mod qlog;
mod records;
mod reload;
mod run;
mod service;
mod status;
mod uplink;
