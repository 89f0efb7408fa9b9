//! HTTP/3 as a server speaks it, without I/O and without a clock: the caller brings what QUIC's streams and datagrams carry, and sends
//! what it is given.
//!
//! | question | module |
//! |---|---|
//! | what does a connection do with streams and datagrams | [`connection`] |
//! | what is a request, what a response | [`message`], and its [`fields`] |
//! | how are field sections written | [`qpack`] |
//! | what stands on streams | [`frame`], [`settings`], [`stream`] |
//! | what stands in tunnels and datagrams | [`capsule`], [`mod@datagram`]; of connect-ip: [`addresses`] |
//! | how do packets stand in a WebSocket, at either end | [`websocket`] |
//! | with which code does something end | [`error`] |
//! | how are integers written | [`varint`] |
//!
//! There are no pushes, and QPACK's dynamic table has no entries.

#![warn(missing_docs)]
#![warn(clippy::missing_errors_doc)]

pub mod addresses;
pub mod capsule;
pub mod connection;
pub mod datagram;
pub mod error;
pub mod fields;
pub mod frame;
pub mod message;
pub mod qpack;
pub mod settings;
pub mod stream;
pub mod varint;
pub mod websocket;
