//! Connections of clients that named us: accepting and polling them. What they say is in `control/web/`.

use std::{sync::Arc, time::Instant};

use dataplane::lanes::{Lanes, UnderlayId, Underlays};
use net::{Burst, Path};
use quinn_proto::{ConnectionHandle, EndpointEvent, Incoming, ServerConfig};

use crate::control::{
    driver::Control,
    web::{Guest, Refused, transport},
};

/// Packets that quinn-proto writes in one call.
const MOST_SEGMENTS: usize = 10;

/// How often a connection is polled again because there is room for more datagrams, before others have their turn.
const MOST_ROUNDS: usize = 32;

/// The largest packet that QUIC sends over Ethernet.
const MOST_PACKET_BYTES: usize = 1_500;

impl Control {
    /// A handshake of a client that named us; returns whether it began.
    pub(super) fn welcome(&mut self, incoming: Incoming, underlay: UnderlayId, now: Instant) -> bool {
        let crypto = self.guests.crypto();
        let refused = if self.acceptor.is_closed() {
            Some(Refused::Draining)
        } else if !self.guests.may_begin(now) {
            Some(Refused::Hurry)
        } else if crypto.is_none() {
            Some(Refused::Full)
        } else {
            self.guests.make_room(incoming.remote_address().ip(), now).err()
        };
        let config = crypto.zip(self.acceptor.server());
        let (None, Some((crypto, server))) = (refused, config) else {
            self.guests.stats.refused[refused.unwrap_or(Refused::Full)] += 1;
            self.endpoint.ignore(incoming);
            return false;
        };
        let mut own = ServerConfig::clone(server);
        own.crypto = crypto;
        let serves_users = self.guests.serves_users();
        own.transport_config(Arc::new(transport(serves_users)));
        self.scratch.clear();
        match self.endpoint.accept(incoming, now, &mut self.scratch, Some(Arc::new(own))) {
            Ok((handle, quinn)) => {
                self.guests.stats.accepted += 1;
                self.guests.beginning += 1;
                self.guests
                    .all
                    .insert(handle, Box::new(Guest::new(quinn, handle, underlay, serves_users, now)));
                self.guests.touch(handle);
                true
            }
            Err(_) => {
                self.guests.stats.refused[Refused::Broken] += 1;
                false
            }
        }
    }

    /// Polls each of those connections that something happened to.
    pub(super) fn poll_guests(
        &mut self,
        lanes: &mut Lanes,
        underlays: &mut Underlays,
        now: Instant,
        arm: &mut impl FnMut(ConnectionHandle, Instant),
    ) {
        let answers = self.guests.answers.as_ref().map(|answers| answers.take()).unwrap_or_default();
        for (handle, stream) in answers {
            if let Some((guest, mut around)) = self.guests.split(handle, now) {
                guest.look(stream, &mut around);
                self.guests.touch(handle);
            }
        }
        let any = !self.guests.dirty.is_empty();
        while let Some(handle) = self.guests.dirty.pop() {
            self.exchange_guest_events(handle);
            if let Some((guest, mut around)) = self.guests.split(handle, now) {
                guest.is_dirty = false;
                guest.read_events(&mut around);
            }
            self.transmit_guest(handle, lanes, underlays, now);
            // What was sent makes room for datagrams that wait.
            for _ in 0..MOST_ROUNDS {
                let Some((guest, mut around)) = self.guests.split(handle, now) else { break };
                if !guest.read_unblocked(&mut around) {
                    break;
                }
                self.transmit_guest(handle, lanes, underlays, now);
            }
            self.exchange_guest_events(handle);
            let Some(guest) = self.guests.all.get_mut(&handle) else { continue };
            if guest.quinn.is_drained() {
                self.guests.all.remove(&handle);
            } else if guest.is_over && !guest.has_begun {
                // It needs no draining; quinn-proto would keep some for 30 s.
                self.endpoint.handle_event(handle, EndpointEvent::drained());
                self.guests.all.remove(&handle);
            } else if let Some(at) = guest.deadline() {
                arm(handle, at);
            }
        }
        self.guests.stats.open = self.guests.all.len();
        if any {
            let all = self.guests.all.values();
            self.guests.beginning = all.filter(|guest| !guest.has_begun && !guest.is_over).count();
        }
    }

    fn exchange_guest_events(&mut self, handle: ConnectionHandle) {
        let Some(guest) = self.guests.all.get_mut(&handle) else { return };
        while let Some(event) = guest.quinn.poll_endpoint_events() {
            if let Some(answer) = self.endpoint.handle_event(handle, event) {
                guest.quinn.handle_event(answer);
            }
        }
    }

    fn transmit_guest(
        &mut self,
        handle: ConnectionHandle,
        lanes: &mut Lanes,
        underlays: &mut Underlays,
        now: Instant,
    ) {
        let Some(guest) = self.guests.all.get_mut(&handle) else { return };
        while underlays.takes_own(guest.underlay, MOST_PACKET_BYTES) {
            self.scratch.clear();
            let room = if underlays.is_blocked(guest.underlay) { 1 } else { MOST_SEGMENTS };
            let Some(transmit) = guest.quinn.poll_transmit(now, room, &mut self.scratch) else { return };
            let ecn = transmit.ecn.map_or(0, |codepoint| codepoint as u8);
            let path = Path { destination: transmit.destination, source: transmit.src_ip, tos: ecn };
            let segment = transmit.segment_size.unwrap_or(transmit.size).max(1);
            let burst = Burst { path, bytes: &self.scratch[..transmit.size], segment };
            self.stats.packets_blocked += underlays.packets(lanes, guest.underlay, &burst, now) as u64;
        }
    }
}
