//! What the kernel refuses to send.

use std::{io, net::SocketAddr};

use crate::{SendFailure, transmit};

/// What the kernel said of a datagram that it refused at once, as opposed to what an ICMP message says later, which anybody on the
/// way can forge.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SendRefusal {
    /// The address to which the datagram was to go.
    pub destination: SocketAddr,
    /// The kernel's error number, of `errno(3)`.
    pub errno: i32,
    /// The size of the datagram, in bytes of UDP payload.
    pub bytes: usize,
}

/// What stands in the way of a datagram that the kernel refused.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RefusedBy {
    /// EMSGSIZE: the MTU of the interface.
    Mtu,
    /// EPERM: a firewall of this host.
    Firewall,
    /// EACCES: a route that prohibits it.
    Route,
    /// ENOBUFS, ENOMEM: a full queue, or no memory.
    Memory,
    /// EINVAL: the source address or the route does not suit the socket.
    Address,
    /// The error of a send that fails for another reason.
    Other,
}

impl SendRefusal {
    /// What stands in the way, as the error's number tells.
    #[must_use]
    pub fn by(self) -> RefusedBy {
        match self.errno {
            libc::EMSGSIZE => RefusedBy::Mtu,
            libc::EPERM => RefusedBy::Firewall,
            libc::EACCES => RefusedBy::Route,
            libc::ENOBUFS | libc::ENOMEM => RefusedBy::Memory,
            libc::EINVAL => RefusedBy::Address,
            _ => RefusedBy::Other,
        }
    }

    /// The error in the kernel's words.
    #[must_use]
    pub fn error(self) -> io::Error {
        io::Error::from_raw_os_error(self.errno)
    }

    /// Addresses of which a socket notes what it refused between two looks; more are only counted.
    const MOST: usize = 16;

    /// What `error` says of a datagram of `bytes` bytes. `None` where there was no way, for which another one is looked for, or no
    /// room; and for what only an ICMP message can say.
    pub(crate) fn of(error: &io::Error, destination: SocketAddr, bytes: usize) -> Option<Self> {
        match transmit::failure(error) {
            SendFailure::WouldBlock
            | SendFailure::CarrierFull
            | SendFailure::Refused
            | SendFailure::Unreachable => None,
            SendFailure::TooLarge | SendFailure::NoBuffers | SendFailure::Forbidden | SendFailure::Other => {
                Some(Self { destination, errno: error.raw_os_error()?, bytes })
            }
        }
    }

    /// Adds it to `all`, which have one for each destination: the smallest datagram that was too large, else the newest refusal.
    pub(crate) fn note(self, all: &mut Vec<Self>) {
        if let Some(older) = all.iter_mut().find(|older| older.destination == self.destination) {
            let too_large = older.by() == RefusedBy::Mtu && self.by() == RefusedBy::Mtu;
            if !too_large || self.bytes < older.bytes {
                *older = self;
            }
        } else if all.len() < Self::MOST {
            all.push(self);
        }
    }
}
