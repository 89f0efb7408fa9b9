//! From control connection to session: which keys may connect, which of two connections stays, and control messages.
//!
//! ```text
//!   dialler                                       listener
//!   handshake, both keys pinned ◄───────────────► handshake, key on the allowlist
//!   Hello ──────────────────────────────────────► session established
//!   session established ◄──────────────────────── Hello
//!   LaneOpen 0 … n ─────────────────────────────► lanes (see lanes.rs)
//! ```
//!
//! A peer has one session, at the worker that has its control connection; the other workers are told (`turn/messages.rs`). If both ends
//! dialled, the connection dialled by the end with the smaller key stays. Of two dialled by the same end, the one begun later stays.
//! A session of an earlier process (another instance) never stays.

use std::time::Instant;

use base::ids::PeerId;
use config::Uplink;
use dataplane::{
    lanes::pool,
    lines::Lines,
    relay::{DropReason, FlowEnd},
};
use gate::{
    OwnKey,
    identity::PublicKey,
    refusals::{Refusal, Why},
};
use quinn_proto::{ConnectionHandle, Side};
use wire::{
    line::MOST_LINES,
    messages::{self, CloseReason, Hello, Message, MessageError, MessageFault},
};

use crate::{
    control::liveness::{MOST_CROSSING, hello_delay},
    hub::Connected,
    worker::{
        context::{Context, packet_sizes::accepted_packet, parity, timer::Timer},
        device::Tunnel,
        report::stats::Ceiling,
        session::{
            Sessions,
            announce::services_for,
            preshared::{self, keys_for},
        },
    },
};

impl Sessions {
    /// The number of lanes that a session with a peer that sent this hello is to have, and the lines that they are spread over if we have
    /// several.
    pub(crate) fn wanted_lanes(
        &self,
        cx: &Context,
        id: PeerId,
        hello: &Hello,
        dialled: bool,
    ) -> (u8, Option<Lines>) {
        let most = hello.max_lanes.min(self.most_lanes);
        if !dialled {
            // The dialler decides, and its requests will tell.
            return (u8::from(most > 0), None);
        }
        let configured = cx.peers.get(id).map_or(0, |peer| peer.data.config.lanes);
        let wanted =
            pool::wanted(configured, u32::from(cx.id.count), u32::from(hello.workers), u32::from(most));
        let uplinks = cx.sockets.factory.uplinks();
        if uplinks.is_empty() || wanted == 0 {
            return (wanted, None);
        }
        // Rather fewer lanes for each line than a line without one; with fewer lanes than lines, the first lines have one.
        let lines = u8::try_from(uplinks.len()).unwrap_or(MOST_LINES).min(most);
        let each = wanted.min(most / lines);
        let terms = uplinks.iter().take(lines.into()).map(Uplink::terms);
        (each * lines, Some(Lines::with(each, terms)))
    }

    /// Charges the peer behind a connection for a control message. Beyond its allowance the connection is closed, and the result is
    /// false.
    pub(crate) fn charge(
        &mut self,
        cx: &mut Context,
        handle: ConnectionHandle,
        units: u32,
        now: Instant,
    ) -> bool {
        let Some(connection) = self.control.open(handle) else { return false };
        let peer = connection.identity.peer().and_then(|id| cx.peers.get_mut(id));
        if peer.is_none_or(|peer| peer.data.allowances.messages.take(units, now)) {
            return true;
        }
        self.flooded(cx, handle, Ceiling::ControlMessages, now);
        false
    }

    /// Holds back the hello that would replace a suspect session: the path works again, so the session may be heard, and its TCP
    /// forwards survive. Returns false if the hello was held back before.
    pub(crate) fn defer_hello(
        &mut self,
        cx: &mut Context,
        handle: ConnectionHandle,
        peer: PeerId,
        key: &[u8; 32],
        now: Instant,
    ) -> bool {
        let Some(connection) = self.control.get_mut(handle) else { return false };
        if !connection.identity.hold_hello(*key) {
            return false;
        }
        let delay = hello_delay(connection.quinn().rtt());
        cx.timers.arm(Timer::Hello(handle), now + delay);
        cx.ask_the_session(peer);
        true
    }

    /// Tells the gate that an admitted handshake is over, so that its token is forgotten.
    pub(crate) fn admission_ended(&mut self, handle: ConnectionHandle) {
        if let Some(admission) =
            self.control.get(handle).and_then(|connection| connection.identity.admission())
        {
            self.gate.handshake_ended(admission);
        }
    }

    /// Whether the dialler of a connection has proved, with its hello or join, that it holds the private key that TLS has seen; if not,
    /// the connection is closed.
    ///
    /// TLS has checked a signature already. But a knock can be forged with our own private key, so a client that was admitted by a
    /// knock must sign once more, bound to this connection.
    pub(crate) fn is_possessed(
        &mut self,
        cx: &mut Context,
        handle: ConnectionHandle,
        proof: Option<&[u8; messages::SIGNATURE_BYTES]>,
        now: Instant,
    ) -> bool {
        let Some(connection) = self.control.get(handle) else { return false };
        let is_right = match proof {
            None => connection.identity.admission().is_none(),
            Some(signature) => {
                connection.identity.key().zip(connection.exported()).is_some_and(|(key, exported)| {
                    PublicKey(key).verify(&messages::possession(&exported), signature)
                })
            }
        };
        if !is_right {
            self.note_refusal(handle, Why::Possession, now);
            self.close_offender(cx, handle, CloseReason::ProtocolViolation, now);
        }
        is_right
    }

    /// Takes the hello of a connection that is no session yet, and answers its dialler. Returns false if the connection was closed.
    pub(crate) fn take_hello(
        &mut self,
        cx: &mut Context,
        tunnel: &Tunnel,
        handle: ConnectionHandle,
        peer: PeerId,
        hello: &Hello,
        now: Instant,
    ) -> bool {
        let is_server = self.control.get(handle).is_some_and(|connection| connection.side() == Side::Server);
        if is_server && !self.is_possessed(cx, handle, hello.possession.as_ref(), now) {
            return false;
        }
        let Some(mut connection) = self.control.resolve(handle) else { return false };
        if let Err(why) = preshared::settle(&mut connection, keys_for(cx, peer), hello, &hello.preshared_keys)
        {
            self.refuse_for_key(cx, handle, peer, why, now);
            return false;
        }
        if is_server {
            let answer = self.hello(cx, tunnel, peer, handle, None);
            self.control.send(handle, &answer);
        }
        true
    }

    /// Makes our hello to `peer`.
    pub(crate) fn hello(
        &mut self,
        cx: &Context,
        tunnel: &Tunnel,
        peer: PeerId,
        handle: ConnectionHandle,
        possession: Option<[u8; messages::SIGNATURE_BYTES]>,
    ) -> Message {
        let services = cx.peers.get(peer).map(|peer| services_for(&cx.config, &peer.data.config));
        Message::Hello(Hello {
            instance: self.instance,
            software: (*cx.software).to_owned(),
            workers: u16::from(cx.id.count),
            max_lanes: self.most_lanes,
            max_datagram_packet: accepted_packet(&cx.config.transport, self.receive_buffer(cx, handle)),
            services: services.unwrap_or_default(),
            features: tunnel.features().without(self.withheld),
            possession,
            preshared_keys: self
                .control
                .resolve(handle)
                .map(|mut connection| preshared::show(&mut connection, keys_for(cx, peer)))
                .unwrap_or_default(),
        })
    }

    /// The receive buffer of a connection's socket, which is that of its lanes' sockets.
    fn receive_buffer(&self, cx: &Context, handle: ConnectionHandle) -> Option<usize> {
        cx.sockets.underlays.get(self.control.get(handle)?.underlay)?.socket.receive_buffer()
    }

    /// Adds the client of a connection to the list of refusals.
    pub(crate) fn note_refusal(&self, handle: ConnectionHandle, why: Why, now: Instant) {
        if let Some(connection) = self.control.get(handle) {
            let (at, source) = (self.clock.unix_seconds(), connection.path().destination);
            self.refusals.note(Refusal { at, source, why }, now);
        }
    }

    /// Closes the connection of a peer that does not read the answers to its messages.
    pub(crate) fn overflowed(&mut self, cx: &mut Context, handle: ConnectionHandle, now: Instant) {
        throttled!(
            warn,
            cx.logs.violation.allow(now),
            { peer = self.name_of(cx, handle) },
            "the peer asks and does not read the answers; closing the connection (remedy: the same version at both ends)"
        );
        self.close_connection(cx, handle, CloseReason::LimitReached, now);
    }

    /// Closes a connection on which a control message came out of order.
    pub(crate) fn out_of_order(&mut self, cx: &mut Context, handle: ConnectionHandle, now: Instant) {
        cx.stats.totals.message_errors[MessageFault::OutOfOrder] += 1;
        throttled!(
            warn,
            cx.logs.violation.allow(now),
            { peer = self.name_of(cx, handle) },
            "a control message came out of order; closing the connection (remedy: the same version at both ends)"
        );
        self.close_offender(cx, handle, CloseReason::ProtocolViolation, now);
    }

    pub(crate) fn control_violation(
        &mut self,
        cx: &mut Context,
        handle: ConnectionHandle,
        error: &MessageError,
        now: Instant,
    ) {
        cx.stats.totals.message_errors[error.fault()] += 1;
        match error.close_reason() {
            Some(reason) => {
                throttled!(
                    warn, cx.logs.violation.allow(now), { peer = self.name_of(cx, handle), %error },
                    "bad control message; closing the connection (remedy: the same version at both ends)"
                );
                if reason == CloseReason::VersionMismatch {
                    self.close_connection(cx, handle, reason, now);
                } else {
                    self.close_offender(cx, handle, reason, now);
                }
            }
            None => {
                if let Some(suppressed) = cx.debug_lines.allow(now) {
                    tracing::debug!(peer = self.name_of(cx, handle), %error, suppressed = base::throttle::counted(suppressed), "control message ignored");
                }
            }
        }
    }
}

impl Context {
    /// Whether a peer's existing session stays and the new connection is closed.
    ///
    /// A peer dials only if it has lost the session, or suspects that we have, so the new connection usually stays. The exceptions are
    /// attempts older than the session: one that the session overtook, or one that crossed ours because both ends dialled at once.
    /// The time at which an attempt began counts, not the time of its hello. Of two connections that the peer dialled, only the
    /// listener decides.
    pub(crate) fn old_session_stays(&self, new: &Connected, old: &Connected) -> bool {
        // During a rotation they may prove two keys of an end: both ends compare the smaller ones.
        let ours = self.identity.of(old.own).public_key().min(self.identity.of(new.own).public_key());
        let we_are_smaller = *ours < old.key.min(new.key);
        let same_process = old.hello.instance == new.hello.instance;
        let overtaken = !new.dialled && !old.dialled && new.begun < old.begun;
        let is_twin = old.dialled != new.dialled && new.begun < old.since + MOST_CROSSING;
        same_process && (overtaken || is_twin && old.dialled == we_are_smaller)
    }

    /// Ends the flows that an earlier process of the peer had opened; flows that we opened start anew.
    pub(crate) fn orphan_flows(&mut self, id: PeerId, key: [u8; 32], own: OwnKey) {
        let parity = parity(self.identity.of(own).public_key(), &key);
        let Some(peer) = self.peers.get_mut(id) else { return };
        for flow in peer.data.relay.flows.accepted() {
            let (why, reason) = (Some(FlowEnd::Orphaned), DropReason::Shutdown);
            if let Some(flow) = peer.data.end_flow(flow, why, reason, &self.config) {
                self.sockets.factory.close_flow_later(flow.origin);
            }
        }
        // The flows that stay: the new process numbers its datagrams anew.
        peer.data.relay.reassembly.clear(&mut peer.data.relay.downlink);
        // Afterwards, because it may reuse the numbers of the flows removed above.
        peer.data.relay.flows.reopen_all(parity);
        self.sockets.factory.close_now(&mut self.sockets.locals);
    }
}
