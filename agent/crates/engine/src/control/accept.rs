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
    driver::{Begun, Control, ControlConnection},
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

/// Makes the transport of one connection, from the knock that admitted it.
pub type OwnTransport = Box<dyn Fn(Option<&Admission>) -> TransportConfig>;

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
    pub begun: Vec<(ConnectionHandle, Option<[u8; 32]>)>,
    /// The limit on their number, beside the first of each known peer. Each costs some 20 KiB until it is a session or ends.
    pub most: usize,
}

impl Pending {
    /// No handshakes, of which there may be `most`.
    #[must_use]
    pub fn new(most: usize) -> Self {
        Self { begun: Vec::new(), most }
    }

    /// Counts a handshake of a client that knocked with the key `agreement`.
    pub fn begin(&mut self, handle: ConnectionHandle, agreement: Option<[u8; 32]>) {
        self.begun.push((handle, agreement));
    }

    /// Forgets a connection that is a session now, or over.
    pub fn end(&mut self, handle: ConnectionHandle) {
        self.begun.retain(|(begun, _)| *begun != handle);
    }

    /// The room for further ones.
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
        let full = self.closed || self.pending.is_full_for(known.map(|admission| &admission.agreement));
        if !full
            && self.acceptance.as_ref().is_some_and(|acceptance| !acceptance.knock)
            && self.pending.must_validate()
            && !incoming.remote_address_validated()
        {
            self.retry(incoming, underlay, local);
            return false;
        }
        // The TLS of each client is made last: it costs more than all checks before.
        let congestion = Arc::default();
        let config = if full { None } else { self.own_config(&incoming, admission.as_ref(), &congestion) };
        let Some(config) = config else {
            self.stats.handshakes_ignored += 1;
            self.endpoint.ignore(incoming);
            return false;
        };
        let agreement = admission.map(|admission| admission.agreement);
        if let Some(oldest) = agreement.and_then(|agreement| self.pending.surplus(&agreement)) {
            self.close(oldest, CloseReason::Replaced, now);
        }
        self.scratch.clear();
        match self.endpoint.accept(incoming, now, &mut self.scratch, Some(config)) {
            Ok((handle, quinn)) => {
                self.stats.handshakes_accepted += 1;
                self.pending.begin(handle, agreement);
                let by = Some(now + ESTABLISH_TIMEOUT);
                let own = admission.map(|admission| admission.own).unwrap_or_default();
                let begun = Begun { peer: None, admission, own, congestion, establish_by: by, at: now };
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
        let mut transport = (acceptance.transport)(admission);
        transport.congestion_controller_factory(Arc::clone(congestion) as _);
        own.transport_config(Arc::new(transport));
        Some(Arc::new(own))
    }

    /// Asks a client to prove its address.
    fn retry(&mut self, incoming: Incoming, underlay: UnderlayId, local: Option<IpAddr>) {
        self.scratch.clear();
        match self.endpoint.retry(incoming, &mut self.scratch) {
            Ok(transmit) => {
                let path = Path { destination: transmit.destination, source: local, tos: 0 };
                self.stats.retries_sent += 1;
                self.retries.push((underlay, path, self.scratch[..transmit.size].into()));
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
