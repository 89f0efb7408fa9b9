//! Clients in standard mode against the program: written from `docs/wire-format.md` and `docs/culvert.proto` alone, on
//! other QUIC stacks than the agent's control connection, and with nothing of its code.
//!
//! | question | file |
//! |---|---|
//! | the messages of `culvert.proto`, by hand | `protobuf.rs` |
//! | payloads and QUIC's integers | `payload.rs` |
//! | keys, certificates, pinning | `tls.rs` |
//! | a peer on stock quinn that dials or listens | `quinn_client.rs` |
//! | an agent for it, with services | `case.rs` |
//! | flows that the client opens | `flows.rs` |
//! | flows that the agent opens | `answers.rs` |
//! | TCP forwards | `streams.rs` |
//! | the agent dials, the client listens | `listener.rs` |
//! | what breaks the protocol, and what only seems to | `violations.rs` |
//! | a client in Python on aioquic | `aioquic.rs`, `aioquic_client.py` |
//! | a client of HTTP/3 on aioquic, at a port that is a web server too | `web.rs`, `web_client.py` |
//! | users of that web server | `users.rs`, `users_client.py` |
//! | the agent's key-exchange group against OpenSSL's, over TCP | `openssl.rs`, `openssl_peer.py` |
//!
//! The implementation in Go, with lanes, is a module of its own in `go/`: `go/check` runs its tests.

#![expect(clippy::unwrap_used, reason = "a test that cannot go on has failed")]

mod aioquic;
mod answers;
mod case;
mod flows;
mod listener;
mod openssl;
mod payload;
mod protobuf;
mod quinn_client;
mod streams;
mod tls;
mod users;
mod violations;
mod web;
