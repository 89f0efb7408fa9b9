//! What the worker was told of a connection's path, and whether its socket refuses packets of every path.

use std::net::SocketAddr;

use quinn_proto::Connection;

use crate::control::{driver::Event, narrow::Narrow};

#[derive(Debug)]
pub(super) struct PathWatch {
    /// The last path MTU that was reported.
    mtu: u16,
    /// The last address of the far end that was reported.
    remote: SocketAddr,
    narrow: Narrow,
}

impl PathWatch {
    pub(super) fn new(remote: SocketAddr) -> Self {
        Self { mtu: 0, remote, narrow: Narrow::default() }
    }

    /// The path MTU is another one than was reported last, which a known peer's is.
    pub(super) fn take_mtu(&mut self, quinn: &Connection, is_known: bool) -> Option<Event> {
        let mtu = quinn.current_mtu();
        (is_known && std::mem::replace(&mut self.mtu, mtu) != mtu).then_some(Event::Mtu)
    }

    /// The far end has another address than was reported last.
    pub(super) fn take_move(&mut self, quinn: &Connection) -> Option<Event> {
        let to = quinn.remote_address();
        let from = std::mem::replace(&mut self.remote, to);
        (from != to).then_some(Event::Moved { from, to })
    }

    pub(super) fn narrow(&self) -> &Narrow {
        &self.narrow
    }

    pub(super) fn narrow_mut(&mut self) -> &mut Narrow {
        &mut self.narrow
    }
}
