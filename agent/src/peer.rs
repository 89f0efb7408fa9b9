//! One peer, as a worker sees it.

use std::{sync::Arc, time::Instant};

use quinn_proto::ConnectionHandle;

use crate::{
    config,
    control::{
        dial::Dialler,
        messages::{self, Hello},
    },
    datapath::uplink::{TooLarge, Uplink},
    identity::PublicKey,
    io::Token,
    lanes::{Lanes, Plain, Pool, Underlays},
    relay::DatagramRelay,
};

/// A peer's place in the configuration's list.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct PeerId(pub u32);

/// The established control connection with a peer.
#[derive(Debug)]
pub struct Session {
    /// The connection.
    pub handle: ConnectionHandle,
    /// Whether this end dialled it.
    pub dialled: bool,
    /// The key that the peer proved.
    pub key: [u8; 32],
    /// What the peer said of itself.
    pub hello: Hello,
    /// Its lanes.
    pub pool: Pool,
    /// In place of lanes, if one of the ends has none: standard mode.
    pub plain: Option<Plain>,
    /// When it was established.
    pub since: Instant,
    /// When the control connection was last pinged because its lanes are in use.
    pub pinged: Instant,
}

/// A peer: its configuration, its connection, its datagrams.
#[derive(Debug)]
pub struct Peer {
    /// Its place.
    pub id: PeerId,
    /// Its name in logs and metrics.
    pub name: Arc<str>,
    /// What the operator decided.
    pub config: config::Peer,
    /// The relay of its datagrams.
    pub relay: DatagramRelay,
    /// When and where to dial it.
    pub dialler: Dialler,
    /// The connection with it, once established.
    pub session: Option<Session>,
    /// The process that the peer's flows belong to; survives a reconnect.
    pub instance: Option<[u8; 16]>,
    /// TCP forwards that are open.
    pub tcp_streams: u32,
    /// The last payload that fitted into no packet, until it has been logged.
    pub too_large: Option<TooLarge>,
    /// What it offered when missing services were last looked for.
    pub known_services: Option<Vec<messages::Service>>,
    /// Nothing was heard of it while something was outstanding: it is being dialled anew.
    pub suspect: bool,
    /// The token under which its endpoints are looked up.
    pub resolve: Token,
}

impl Peer {
    /// The way of datagrams to it.
    pub fn uplink<'a>(
        &'a mut self,
        lanes: &'a mut Lanes,
        underlays: &'a mut Underlays,
        now: Instant,
    ) -> Uplink<'a> {
        // What a peer that fell silent is sent would only be lost: it waits, and expires if nobody answers.
        let (pool, plain) = match self.session.as_mut().filter(|_| !self.suspect) {
            Some(session) => (Some(&session.pool), session.plain.as_mut()),
            None => (None, None),
        };
        Uplink { relay: &mut self.relay, pool, plain, lanes, underlays, now, too_large: &mut self.too_large }
    }

    /// Whether `key` is one of the keys that this peer may prove.
    #[must_use]
    pub fn has_key(&self, key: &[u8; 32]) -> bool {
        self.config.public_keys.contains(&PublicKey(*key))
    }
}
