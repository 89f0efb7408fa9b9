//! START HERE: the way of a datagram through the agent.
//!
//! ```text
//!  UPLINK: local socket → peer                           DOWNLINK: peer → local socket
//!
//!  net: udp.rs        recvmmsg, GRO: a batch             net: udp.rs        recvmmsg, GRO: a batch
//!  uplink.rs          runs of one flow; admit,           downlink.rs
//!      │              queue or send                          │              connection ID → lane, or control
//!  relay/flow.rs      client → flow → header             quic-core: open.rs unprotect, check, decrypt in place
//!      │                                                     │              → ranges of the receive buffer
//!  lanes/send_buffer.rs    frames into the tail of            wire: context.rs   context → flow
//!      │              the socket's send batch            relay/flow.rs      flow → socket, client address
//!  quic-core: seal.rs encrypt in place                   forward/mod.rs     listed by socket, end to end
//!  net: udp.rs        sendmmsg, GSO                      net: udp.rs        sendmmsg, gather, GSO
//! ```
//!
//! IP packets take the same way between other ends:
//!
//! ```text
//!  UPLINK: TUN device → peer                             DOWNLINK: peer → TUN device
//!
//!  net: tun.rs        read: packets, super-packets       downlink.rs, as above
//!  ip_uplink.rs                                          ip_downlink.rs
//!      │              destination → peer, hash → lane        │              source checked, ECN
//!  ip: view, cut      headers; one becomes many          ip: merge.rs       many become one
//!  lanes/send_buffer.rs    as above                           net: tun.rs        writev: headers, pieces
//! ```
//!
//! `uplink.rs` to `ip_downlink.rs` are here, `relay/`, `lanes/` and `forward/` beside this folder, the rest in the crate that is named.
//!
//! What belongs to no lane goes from `downlink.rs` through `Outside` to the engine: the gate, then the control connections; other datagrams
//! to the decoy or nowhere. What begins and ends flows, and is said about them, is beside the way of a datagram: `flows.rs`. So is
//! what fits into no packet and travels in pieces: `pieces.rs`, and `relay/fragments.rs` for what waits until it is whole. Whole
//! datagrams are put end to end beside the received buffers, and are delivered like what lies in these. Reports of the far end
//! about its lanes: `reports.rs`.
//!
//! Headers of the PROXY protocol, before datagrams of clients and before those to a service: `proxied.rs`.
//!
//! Payloads that are repaired get numbers where they are sealed, and their frames are unwrapped before all this: `repair.rs`.
//!
//! What travels on two lines is sent twice where others are sent once, and dropped once where its frame is unwrapped: `copies.rs`.
//!
//! Both directions of a flow pass the same relay (`relay/`), which holds the accounts: for each direction,
//! `received = delivered + in queue + Σ dropped(reason)`.
//!
//! * Nothing is allocated per datagram; a queue item, made only when a lane is missing or full, is a batch.
//! * A bad datagram costs itself only: its error is counted, never returned out of a batch.
//! * Time is read once per turn of the worker.
//! * What a turn takes is bounded in frames and in what they ask for, not in datagrams alone: `work.rs`.
//! * What a peer sends beyond the rate that it was told is dropped before its frames are looked at: `over_rate.rs`.
//! * A worker that falls behind drops packets of the peers that ask for most, before it opens them: `shares.rs`.

mod copies;
pub mod downlink;
mod flows;
mod ip_downlink;
pub mod ip_uplink;
mod line_uplink;
mod over_rate;
mod pieces;
pub mod proxied;
pub mod repair;
mod reports;
pub mod segments;
pub mod shares;
pub mod uplink;
pub mod work;
