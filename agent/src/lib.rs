//! Culvert: a gateway that carries UDP flows, IP packets and TCP forwards between sites over QUIC.
//!
//! `docs/architecture.md` is the map; the way of a datagram starts in [`dataplane::datapath`].

pub mod admin;
mod carrier;
pub mod cli;
pub mod daemon;
pub mod demo;
pub mod doctor;
pub mod hook;
pub mod notify;
mod out;
mod packets;
mod program;
pub mod quotas;
pub mod records;
pub mod run;
pub mod service;
mod site;
mod tunnels;
mod web_server;
