//! What was read of the lines of `[[transport.uplink]]`.

use std::net::IpAddr;

use super::facts::{Address, Answer};

/// A line of the configuration, with the ways to the peers over it.
#[derive(Clone, Debug)]
pub struct Line {
    pub name: String,
    /// What its packets leave by, as in "interface eth0".
    pub way: String,
    pub end: LineEnd,
    /// The peers that are dialled over it.
    pub peers: Vec<LinePeer>,
}

/// The interface of a line, or the one that has its source.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum LineEnd {
    There {
        interface: String,
        up: bool,
        /// Its addresses, without link-local ones of IPv6.
        addresses: Vec<IpAddr>,
    },
    /// This host has none such now.
    Missing,
    /// The kernel was not asked, or did not say, for this reason.
    Unknown(String),
}

/// The addresses of a peer, as they are reached over a line.
#[derive(Clone, Debug)]
pub struct LinePeer {
    /// The place of the peer in the configuration.
    pub place: usize,
    pub peer: String,
    pub addresses: Vec<Address>,
}

impl LinePeer {
    /// Whether some address of it has a way over the line.
    #[must_use]
    pub fn has_way(&self) -> bool {
        self.addresses.iter().any(|address| address.way.is_ok())
    }

    /// Its place, and the first address of it that has a way over the line.
    pub(super) fn target(&mut self) -> Option<(usize, &mut Address)> {
        let place = self.place;
        self.addresses.iter_mut().find(|address| address.way.is_ok()).map(|address| (place, address))
    }

    /// Whether it has answered over the line.
    #[must_use]
    pub fn answers(&self) -> bool {
        let answers = |address: &Address| matches!(address.answer, Some(Answer::Connected { .. }));
        self.addresses.iter().any(answers)
    }
}
