//! Handshakes that others start: whose are accepted, and how many at a time.

use std::{
    net::{IpAddr, SocketAddr},
    sync::Arc,
    time::{Duration, Instant},
};

use dataplane::lanes::UnderlayId;
use gate::{
    admission::{Admission, Room},
    tls::KeyExchange,
};
use net::Path;
use quinn_proto::{ConnectionHandle, Incoming, ServerConfig, TransportConfig, crypto};
use wire::messages::CloseReason;

use crate::control::{
    congestion::Congestion,
    driver::{Begun, Control, ControlConnection, Identity},
};

/// How long a connection that a far end started may take to become a session: handshake and hello, with losses.
pub(super) const ESTABLISH_TIMEOUT: Duration = Duration::from_secs(10);

/// The limit on concurrent handshakes of one knocking key at a worker: as many as a dialler keeps alive, at most a quarter of all
/// that are allowed.
const MOST_PER_KEY: usize = 4;

/// The number of concurrent handshakes, at most half of those allowed, from which on a client without a knock must prove its
/// address first (RFC 9000 §8.1.2).
const VALIDATE_FROM: usize = 32;

/// Makes the TLS of one client at this address, by these key exchanges: with a knock, of that client alone.
pub type OwnTls =
    Box<dyn Fn(Option<&Admission>, SocketAddr, KeyExchange) -> Option<Arc<dyn crypto::ServerConfig>>>;

/// Makes the transport of one connection with a client at this address, from the knock that admitted it.
pub type OwnTransport = Box<dyn Fn(Option<&Admission>, SocketAddr) -> TransportConfig>;

/// The settings by which an endpoint accepts handshakes.
pub struct Acceptance {
    /// The QUIC parameters and the key of Retry tokens; its TLS accepts nobody.
    pub server: Arc<ServerConfig>,
    /// Makes each client's own TLS, which replaces that of `server`.
    pub tls: OwnTls,
    /// Makes each client's own transport, which replaces that of `server`.
    pub transport: OwnTransport,
    /// Whether the gate must have admitted a client.
    pub knock: bool,
}

/// The handshakes that far ends started and that are no sessions yet.
#[derive(Debug)]
pub struct Pending {
    /// The handshakes, oldest first, each with the key that its client knocked with.
    begun: Vec<(ConnectionHandle, Option<[u8; 32]>)>,
    /// The limit on their number, beside the first of each known peer. Each costs some 20 KiB until it is a session or ends.
    most: usize,
}

impl Pending {
    /// No handshakes, of which there may be `most`.
    #[must_use]
    pub fn new(most: usize) -> Self {
        Self { begun: Vec::new(), most }
    }

    #[must_use]
    pub fn count(&self) -> usize {
        self.begun.len()
    }

    /// Counts a handshake of a client that knocked with the key `agreement`.
    pub fn begin(&mut self, handle: ConnectionHandle, agreement: Option<[u8; 32]>) {
        self.begun.push((handle, agreement));
    }

    /// Forgets a connection that is a session now, or over.
    pub fn end(&mut self, handle: ConnectionHandle) {
        self.begun.retain(|(begun, _)| *begun != handle);
    }

    #[must_use]
    pub fn room(&self) -> Room {
        match self.begun.len() {
            under_way if under_way >= self.most => Room::Full,
            under_way if under_way >= self.most.div_ceil(2) => Room::Busy,
            _ => Room::Free,
        }
    }

    /// Whether there is no room for one more, of the known peer with this key or of any other client. A known peer that has none
    /// under way always has room: a session takes more memory than a handshake, and the number of such peers is limited.
    #[must_use]
    pub fn is_full_for(&self, known: Option<&[u8; 32]>) -> bool {
        let has_none = |key| self.begun.iter().all(|(_, other)| other.as_ref() != Some(key));
        self.room() == Room::Full && !known.is_some_and(has_none)
    }

    fn must_validate(&self) -> bool {
        self.begun.len() >= VALIDATE_FROM.min(self.most.div_ceil(2))
    }

    /// The oldest handshake of this key, if it has as many as it may.
    #[must_use]
    pub fn surplus(&self, agreement: &[u8; 32]) -> Option<ConnectionHandle> {
        let mut of_key = self.begun.iter().filter(|(_, key)| key.as_ref() == Some(agreement));
        let oldest = of_key.next()?.0;
        (of_key.count() + 1 >= MOST_PER_KEY.min(self.most.div_ceil(4))).then_some(oldest)
    }
}

/// The part of an endpoint that accepts handshakes.
pub struct Acceptor {
    /// `None` if the endpoint only dials.
    acceptance: Option<Acceptance>,
    pending: Pending,
    /// Retry packets that are still to be sent.
    retries: Vec<(UnderlayId, Path, Box<[u8]>)>,
    is_closed: bool,
    key_exchange: KeyExchange,
}

impl Acceptor {
    pub(super) fn new(acceptance: Option<Acceptance>, most: usize) -> Self {
        let (pending, key_exchange) = (Pending::new(most), KeyExchange::default());
        Self { acceptance, pending, retries: Vec::new(), is_closed: false, key_exchange }
    }

    /// Sets the limit on handshakes under way, and the key exchanges of those that begin.
    pub fn configure(&mut self, most: usize, key_exchange: KeyExchange) {
        (self.pending.most, self.key_exchange) = (most, key_exchange);
    }

    /// Accepts no further connection.
    pub(crate) fn close(&mut self) {
        self.is_closed = true;
    }

    pub(crate) fn is_closed(&self) -> bool {
        self.is_closed
    }

    /// The parameters of a handshake, without a TLS that accepts anybody; `None` if the endpoint only dials.
    pub(super) fn server(&self) -> Option<&ServerConfig> {
        self.acceptance.as_ref().map(|acceptance| &*acceptance.server)
    }

    #[must_use]
    pub fn pending(&self) -> &Pending {
        &self.pending
    }

    /// Forgets a connection that is a session now, or over.
    pub(super) fn end(&mut self, handle: ConnectionHandle) {
        self.pending.end(handle);
    }

    pub(super) fn take_retries(&mut self) -> impl Iterator<Item = (UnderlayId, Path, Box<[u8]>)> + '_ {
        self.retries.drain(..)
    }

    /// Whether a client must prove its address before its handshake begins.
    fn asks_for_address(&self, incoming: &Incoming) -> bool {
        self.acceptance.as_ref().is_some_and(|acceptance| !acceptance.knock)
            && self.pending.must_validate()
            && !incoming.remote_address_validated()
    }

    /// The configuration for one client, if it may begin a handshake at all.
    fn own_config(
        &self,
        incoming: &Incoming,
        admission: Option<&Admission>,
        congestion: &Arc<Congestion>,
    ) -> Option<Arc<ServerConfig>> {
        let acceptance = self.acceptance.as_ref()?;
        // An admission holds for the handshake that the client started, and for that alone.
        let admission = admission.filter(|admission| *incoming.orig_dst_cid() == admission.dcid);
        if acceptance.knock && admission.is_none() {
            return None;
        }
        let mut own = ServerConfig::clone(&acceptance.server);
        own.crypto = (acceptance.tls)(admission, incoming.remote_address(), self.key_exchange)?;
        let mut transport = (acceptance.transport)(admission, incoming.remote_address());
        transport.congestion_controller_factory(Arc::clone(congestion) as _);
        own.transport_config(Arc::new(transport));
        Some(Arc::new(own))
    }
}

impl Control {
    /// Decides about a handshake that a far end starts; returns whether it began.
    pub(super) fn incoming(
        &mut self,
        incoming: Incoming,
        underlay: UnderlayId,
        local: Option<IpAddr>,
        admission: Option<Admission>,
        now: Instant,
    ) -> bool {
        let known = admission.as_ref().filter(|admission| admission.known);
        let acceptor = &self.acceptor;
        let full =
            acceptor.is_closed || acceptor.pending.is_full_for(known.map(|admission| &admission.agreement));
        if !full && acceptor.asks_for_address(&incoming) {
            self.retry(incoming, underlay, local);
            return false;
        }
        // The TLS of each client is made last: it costs more than all checks before.
        let congestion = Arc::default();
        let config =
            if full { None } else { acceptor.own_config(&incoming, admission.as_ref(), &congestion) };
        let Some(config) = config else {
            self.stats.handshakes_ignored += 1;
            self.endpoint.ignore(incoming);
            return false;
        };
        let agreement = admission.map(|admission| admission.agreement);
        if let Some(oldest) = agreement.and_then(|agreement| self.acceptor.pending.surplus(&agreement)) {
            self.close(oldest, CloseReason::Replaced, now);
        }
        self.scratch.clear();
        match self.endpoint.accept(incoming, now, &mut self.scratch, Some(config)) {
            Ok((handle, quinn)) => {
                self.stats.handshakes_accepted += 1;
                self.acceptor.pending.begin(handle, agreement);
                let by = Some(now + ESTABLISH_TIMEOUT);
                let identity = Identity::of_client(admission);
                let begun = Begun { identity, congestion, establish_by: by, at: now };
                self.insert(handle, ControlConnection::new(quinn, underlay, begun, &self.memory));
                true
            }
            Err(refused) => {
                self.stats.handshakes_ignored += 1;
                if refused.response.is_some() {
                    self.stats.answers_suppressed += 1;
                }
                false
            }
        }
    }

    /// Asks a client to prove its address.
    fn retry(&mut self, incoming: Incoming, underlay: UnderlayId, local: Option<IpAddr>) {
        self.scratch.clear();
        match self.endpoint.retry(incoming, &mut self.scratch) {
            Ok(transmit) => {
                let path = Path { destination: transmit.destination, source: local, tos: 0 };
                self.stats.retries_sent += 1;
                self.acceptor.retries.push((underlay, path, self.scratch[..transmit.size].into()));
            }
            Err(refused) => {
                self.stats.handshakes_ignored += 1;
                self.endpoint.ignore(refused.into_incoming());
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_full_listener_has_room_for_the_first_handshake_of_each_known_peer() {
        let mut pending = Pending::new(2);
        for number in 0..20 {
            assert!(!pending.is_full_for(Some(&[number; 32])));
            pending.begin(ConnectionHandle(number.into()), Some([number; 32]));
        }
        assert!(pending.is_full_for(Some(&[7; 32])), "it has one");
        assert!(pending.is_full_for(None), "no known peer");
        pending.end(ConnectionHandle(7));
        assert!(!pending.is_full_for(Some(&[7; 32])));
    }

    #[test]
    fn a_key_has_four_handshakes_and_all_of_them_have_a_ceiling() {
        let mut pending = Pending::new(16);
        assert_eq!((pending.room(), pending.must_validate()), (Room::Free, false));
        for place in 0..4 {
            assert_eq!(pending.surplus(&[7; 32]), None);
            pending.begin(ConnectionHandle(place), Some([7; 32]));
        }
        assert_eq!(pending.surplus(&[7; 32]), Some(ConnectionHandle(0)), "the oldest gives way");
        assert_eq!(pending.surplus(&[8; 32]), None);
        for place in 4..8 {
            pending.begin(ConnectionHandle(place), None);
        }
        assert_eq!((pending.room(), pending.must_validate()), (Room::Busy, true));
        for place in 8..16 {
            pending.begin(ConnectionHandle(place), None);
        }
        assert_eq!(pending.room(), Room::Full);
        pending.end(ConnectionHandle(2));
        pending.end(ConnectionHandle(2));
        assert_eq!((pending.room(), pending.surplus(&[7; 32])), (Room::Busy, None));
        // Where there are few places a key has a quarter of them.
        let mut few = Pending::new(4);
        assert_eq!(few.surplus(&[7; 32]), None);
        few.begin(ConnectionHandle(0), Some([7; 32]));
        assert_eq!(few.surplus(&[7; 32]), Some(ConnectionHandle(0)));
    }
}
