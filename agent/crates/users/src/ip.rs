//! CONNECT-IP (RFC 9484): IP packets of users, through the TUN device. No version of HTTP is known here: each gives capsules and the
//! payloads of datagrams to a [`Link`], and sends what an [`IpSession`] has to say.
//!
//! | question | file |
//! |---|---|
//! | what does a client ask for | [`scope`] |
//! | which addresses are given, and to whom do packets of the device go | `ip_links.rs` |
//! | which packets pass | `ip_link.rs` |
//! | how do they get to the TUN device | `ip_device.rs` |
//! | what happens as long as a session is open | `ip_session.rs` |
//! | which addresses are this host's own | `ip_own.rs` |
//! | sets of addresses | [`ranges`] |
//!
//! ```text
//!   user ── datagram ──► Link::from_user: source, destination, protocol ──► TUN device ──► the host's routing
//!        ◄── datagram ── Link::to_user: source, protocol, size ◄── Links ◄── TUN device ◄──
//! ```
//!
//! The host's routing lowers the TTL, once for each packet that it forwards and for none of its own (RFC 9484 §4.3): nothing here does.

#[path = "ip_device.rs"]
mod device;
#[path = "ip_link.rs"]
mod link;
#[path = "ip_links.rs"]
mod links;
#[path = "ip_own.rs"]
mod own;
#[path = "ip_ranges.rs"]
pub mod ranges;
#[path = "ip_scope.rs"]
pub mod scope;
#[path = "ip_session.rs"]
mod session;

pub(crate) use self::own::Own;
pub use self::{
    device::Device,
    link::{Link, Outcome},
    links::Links,
    session::{IpSession, Next},
};

/// The least that a path has to carry, in bytes (RFC 9484 §7.1, RFC 8200 §5).
pub const LEAST_MTU: u16 = 1_280;

#[cfg(test)]
#[path = "ip_tests.rs"]
mod tests;
