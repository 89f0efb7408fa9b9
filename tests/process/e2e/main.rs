//! Two agents, as processes, on loopback: what an operator and their applications see.

#![expect(clippy::unwrap_used, reason = "a test that cannot go on has failed")]

mod bench;
mod container;
mod datagrams;
mod decoy;
mod dns;
mod garbage;
mod gate;
mod iperf3;
mod metrics;
mod peers_dir;
mod previous;
mod ranges;
mod refusals;
mod reload;
mod restart;
mod streams;
mod workers;
