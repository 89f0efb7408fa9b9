//! The local side: where datagrams and connections enter and leave this host.
//!
//! | question | file |
//! |---|---|
//! | which local UDP sockets are there, and how payloads are delivered to them | this one |
//! | TCP forwards on QUIC streams | `tcp/` |
//! | the connections that carry them, and how they are shared out | `engine/src/control/connections.rs` |
//! | the TUN device: what is about to be written, the answers to packets that cannot be carried | `tun.rs` |
//! | the table that the kernel's routes make | `learned.rs` |
//! | link-local multicast of the host: who gets copies, and how many | `multicast.rs` |
//! | the peer of each inner address, and which of several carries a prefix | `peer_routes.rs` |

use std::time::Instant;

use base::{
    ids::{IngressId, LocalId, PeerId},
    pages::Pages,
    sparse,
};
use net::{Delivery, ReceiveBatch, SendFailure, SendOutcome, Token, UdpSocket, stats::Booked};

use crate::relay::{FlowId, Settlements};

pub mod blocks;
pub mod learned;
pub mod multicast;
pub mod peer_routes;
pub mod tcp;
pub mod tun;

/// The purpose of a local socket.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Local {
    /// `[[udp]]`: receives datagrams of clients and sends them the answers; `peer` offers the service.
    Ingress { ingress: IngressId, peer: PeerId },
    /// Connected to a service, for one flow.
    Upstream { peer: PeerId, flow: FlowId },
}

/// A local UDP socket and the payloads that are about to be delivered to it.
pub struct LocalSocket {
    pub socket: Box<dyn UdpSocket>,
    pub local: Local,
    /// Its token, to be released with it.
    pub token: Token,
    /// The counts that [`crate::socket_stats`] has added already.
    pub booked: Booked,
    /// True if it had traffic since the kernel was last asked for its drops.
    touched: bool,
    delivery: Option<Delivery>,
}

/// The number of unreachable sockets that are noted at a time: others are noted with their next datagram.
const MOST_UNREACHABLE: usize = 64;

/// The number of lists without a socket that are kept from second to second.
const MOST_SPARE: usize = 8;

/// All local UDP sockets of a worker.
#[derive(Default)]
pub struct Locals {
    sockets: Pages<LocalSocket>,
    /// Lists that no socket is using: an idle socket costs none.
    spare: Vec<Delivery>,
    dirty: Vec<LocalId>,
    /// Sockets with traffic since the kernel was last asked for its drops, each once.
    touched: Vec<LocalId>,
    /// Sockets from whose address the kernel had no route to their service, of the last batches.
    pub unreachable: Vec<LocalId>,
    /// When a fresh socket in place of one of those was last of no use.
    pub renewed: Option<Instant>,
    pub settlements: Settlements,
    /// The number of payloads that the kernel takes in one message.
    most_segments: u16,
}

impl Locals {
    /// Gives memory back if there were many more sockets once.
    pub fn shrink(&mut self) {
        self.sockets.shrink();
        if self.spare.len() > MOST_SPARE {
            self.spare.truncate(MOST_SPARE);
            self.spare.shrink_to_fit();
        }
        sparse::shrink_list(&mut self.dirty);
        sparse::shrink_list(&mut self.touched);
    }

    /// No sockets yet; messages of at most `most_segments` payloads.
    #[must_use]
    pub fn new(most_segments: u16) -> Self {
        Self { most_segments, ..Self::default() }
    }

    /// The number of payloads in one message, within the `burst` that the operator allows.
    #[inline]
    #[must_use]
    pub fn burst(&self, burst: u16) -> u16 {
        burst.min(self.most_segments)
    }

    /// The id that [`Locals::insert`] will give the next socket.
    #[must_use]
    pub fn vacant(&mut self) -> LocalId {
        LocalId(u32::try_from(self.sockets.next_place()).unwrap_or(u32::MAX))
    }

    pub fn insert(&mut self, socket: Box<dyn UdpSocket>, local: Local, token: Token) -> LocalId {
        let id = self.vacant();
        self.sockets.insert(LocalSocket {
            socket,
            local,
            token,
            booked: Booked::default(),
            touched: false,
            delivery: None,
        });
        id
    }

    /// Says which flow the socket `id` was opened for.
    pub fn set_flow(&mut self, id: LocalId, flow: FlowId) {
        if let Some(LocalSocket { local: Local::Upstream { flow: named, .. }, .. }) = self.get_mut(id) {
            *named = flow;
        }
    }

    /// Closes a socket. What was to be delivered to it must have been flushed.
    pub fn remove(&mut self, id: LocalId) -> Option<LocalSocket> {
        self.sockets.remove(id.0 as usize)
    }

    #[inline]
    #[must_use]
    pub fn get(&self, id: LocalId) -> Option<&LocalSocket> {
        self.sockets.get(id.0 as usize)
    }

    #[inline]
    pub fn get_mut(&mut self, id: LocalId) -> Option<&mut LocalSocket> {
        self.sockets.get_mut(id.0 as usize)
    }

    pub fn iter(&self) -> impl Iterator<Item = &LocalSocket> {
        self.sockets.iter().map(|(_, socket)| socket)
    }

    /// The sockets whose purpose satisfies `is_it`.
    #[must_use]
    pub fn find(&self, is_it: impl Fn(&Local) -> bool) -> Vec<LocalId> {
        let found = self.sockets.iter().filter(|(_, socket)| is_it(&socket.local));
        found.filter_map(|(id, _)| u32::try_from(id).ok().map(LocalId)).collect()
    }

    pub fn iter_mut(&mut self) -> impl Iterator<Item = &mut Local> {
        self.sockets.iter_mut().map(|(_, socket)| &mut socket.local)
    }

    /// Notes that a socket had traffic.
    #[inline]
    pub fn touch(&mut self, id: LocalId) {
        if let Some(socket) = self.sockets.get_mut(id.0 as usize)
            && !socket.touched
        {
            socket.touched = true;
            self.touched.push(id);
        }
    }

    /// Calls `visit` for each socket that had traffic; with `forget`, they are forgotten until they have more.
    pub fn each_touched(&mut self, forget: bool, mut visit: impl FnMut(&mut LocalSocket)) {
        for id in &self.touched {
            if let Some(socket) = self.sockets.get_mut(id.0 as usize) {
                socket.touched = !forget;
                visit(socket);
            }
        }
        if forget {
            self.touched.clear();
        }
    }

    /// The list to which payloads for socket `id` are added, until [`Locals::flush`] delivers them.
    #[inline]
    pub fn delivery(&mut self, id: LocalId) -> Option<&mut Delivery> {
        let socket = self.sockets.get_mut(id.0 as usize)?;
        if socket.delivery.is_none() {
            socket.delivery = Some(self.spare.pop().unwrap_or_default());
            self.dirty.push(id);
            if !socket.touched {
                socket.touched = true;
                self.touched.push(id);
            }
        }
        socket.delivery.as_mut()
    }

    /// Delivers everything that was listed, straight from the buffers of `received`.
    pub fn flush(&mut self, received: &ReceiveBatch) {
        while let Some(id) = self.dirty.pop() {
            let Some(socket) = self.sockets.get_mut(id.0 as usize) else { continue };
            let Some(mut delivery) = socket.delivery.take() else { continue };
            let settlements = &mut self.settlements;
            let mut unreachable = false;
            socket.socket.deliver(received, &mut delivery, &mut |message, outcome| {
                unreachable |= outcome == SendOutcome::Failed(SendFailure::Unreachable);
                let payloads = u64::from(message.payloads);
                settlements.message(PeerId(message.to.owner), payloads, payloads, outcome);
            });
            self.spare.push(delivery);
            if unreachable && self.unreachable.len() < MOST_UNREACHABLE {
                self.unreachable.push(id);
            }
        }
    }
}
