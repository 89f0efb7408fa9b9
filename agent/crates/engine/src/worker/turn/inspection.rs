//! What tests read and set in a worker, and the bounds on the work of a turn: a simulation in which a turn exceeds them fails.

use std::{sync::Arc, time::Instant};

use config::Config;
use dataplane::{
    datapath::work::MOST_PER_TURN,
    forward::{Locals, tun::TunSide},
    hand_off::Outgoing,
    lanes::{Lanes, Underlays},
    relay::Queue,
    sockets::SocketFactory,
};
use quinn_proto::ConnectionHandle;
use wire::messages::Features;

use crate::{
    control::driver::{Control, Event, UNITS_PER_TURN},
    hub::Hub,
    peer::Peers,
    worker::{context::work::TurnWork, lanes::LaneLimits, turn::Worker},
};

impl Worker {
    #[must_use]
    pub fn config(&self) -> &Arc<Config> {
        &self.cx.config
    }

    #[must_use]
    pub fn hub(&self) -> &Arc<Hub> {
        &self.cx.hub
    }

    /// How often TCP forwards were served, all of them together.
    #[must_use]
    pub fn forwards_served(&self) -> u64 {
        self.tcp.passes()
    }

    #[must_use]
    pub fn peers(&self) -> &Peers {
        &self.cx.peers
    }

    pub fn peers_mut(&mut self) -> &mut Peers {
        &mut self.cx.peers
    }

    /// The lanes that this worker hosts.
    #[must_use]
    pub fn lanes(&self) -> &Lanes {
        &self.cx.sockets.lanes
    }

    pub fn lanes_mut(&mut self) -> &mut Lanes {
        &mut self.cx.sockets.lanes
    }

    /// The number of captures of lanes that are armed.
    #[must_use]
    pub fn captures(&self) -> usize {
        self.host.armed()
    }

    #[must_use]
    pub fn locals(&self) -> &Locals {
        &self.cx.sockets.locals
    }

    #[must_use]
    pub fn underlays(&self) -> &Underlays {
        &self.cx.sockets.underlays
    }

    pub fn underlays_mut(&mut self) -> &mut Underlays {
        &mut self.cx.sockets.underlays
    }

    #[must_use]
    pub fn socket_factory(&self) -> &SocketFactory {
        &self.cx.sockets.factory
    }

    #[must_use]
    pub fn control(&self) -> &Control {
        &self.sessions.control
    }

    /// Capacity of the scratch space for events of control connections.
    #[must_use]
    pub fn events_capacity(&self) -> usize {
        self.sessions.events_capacity()
    }

    /// The memory that peers and unauthenticated senders make this worker hold.
    #[must_use]
    pub fn held(&self) -> HeldMemory {
        let (cx, data) = (&self.cx, &self.data);
        let relays = || cx.peers.iter().map(|peer| &peer.data.relay);
        let (messages, ring) = cx.hub.waiting(cx.id.index);
        HeldMemory {
            queues: relays()
                .map(|relay| relay.queues().map(Queue::bytes).sum::<usize>() + relay.awaiting.bytes())
                .sum(),
            reassembly: relays().map(|relay| relay.reassembly.held_bytes()).sum(),
            send_buffers: cx.sockets.underlays.send_buffer_bytes(),
            batches: data.rests.batches(),
            hand_offs: ring,
            unauthenticated: data.unauthenticated.waiting.bytes(),
            messages,
            events: self.sessions.events_capacity() * size_of::<(ConnectionHandle, Event)>(),
            streams: usize::try_from(cx.hub.streams.taken()).unwrap_or(usize::MAX),
        }
    }

    #[must_use]
    pub fn forwards(&self) -> usize {
        self.tcp.len()
    }

    /// The worker's queue of the TUN device.
    #[must_use]
    pub fn tun(&self) -> Option<&TunSide> {
        self.tunnel.side()
    }

    pub fn set_tun(&mut self, side: TunSide) {
        self.tunnel.set_side(side);
    }

    /// The number of flows to the decoy, and the largest size of any of the decoy's other tables.
    #[must_use]
    pub fn decoys(&self) -> Option<(usize, usize)> {
        self.decoy.sizes()
    }

    /// Sets the budget of a class of sources in one turn, in datagrams.
    pub fn set_budget(&mut self, units: i64) {
        self.cx.sources.set_budget(units);
    }

    /// Has control messages of other connections take `bytes`.
    pub fn hold_messages(&self, bytes: usize) {
        self.cx.hub.streams.hold_messages(0, bytes);
    }

    /// Spends the gate's budget for clients that have not proved their address.
    pub fn exhaust_gate_budget(&mut self, now: Instant) {
        self.sessions.exhaust_gate_budget(now);
    }

    /// Sends the hand-off batches for other workers that `fill` collects.
    pub fn hand_over(&mut self, fill: impl FnOnce(&mut Outgoing), now: Instant) {
        fill(&mut self.data.outgoing);
        self.data.send_hand_offs(&mut self.cx, now);
    }

    /// Lowers the limits of lanes opened from now on, so that a test reaches them.
    pub fn set_lane_limits(&mut self, limits: LaneLimits) {
        self.host.set_limits(limits);
    }

    /// Leaves `features` out of the hello, as an older version does.
    pub fn withhold(&mut self, features: Features) {
        self.sessions.withhold(features);
    }

    /// Has sessions be without lanes, like those with other implementations.
    pub fn withhold_lanes(&mut self) {
        self.sessions.withhold_lanes();
    }

    /// The work of the last turn.
    #[must_use]
    pub fn turn_work(&self) -> TurnWork {
        self.cx.stats.work
    }

    /// Describes the first count of the last turn that exceeds its bound.
    #[must_use]
    pub fn excess_of_turn(&self) -> Option<String> {
        let flows: usize = self.cx.peers.iter().map(|peer| peer.data.relay.flows.len()).sum();
        self.cx.stats.work.excess(self.sessions.control.len() as u64, flows as u64)
    }
}

/// Memory of a worker that grows with what others send, in bytes unless a field says otherwise.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct HeldMemory {
    /// Payloads that wait for a lane, or for the confirmation of their flow.
    pub queues: usize,
    /// Room that is reserved for incomplete datagrams.
    pub reassembly: usize,
    /// Send buffers of QUIC sockets, the spare ones included.
    pub send_buffers: usize,
    /// The number of receive batches, of 2 MiB each, whose rests wait for another turn.
    pub batches: usize,
    /// Hand-off batches of other workers, in the ring and taken out of it.
    pub hand_offs: usize,
    /// Datagrams of unauthenticated senders for the decoy.
    pub unauthenticated: usize,
    /// The number of messages of other workers that wait.
    pub messages: usize,
    /// Capacity of the scratch space for events of control connections.
    pub events: usize,
    /// Windows of the TCP forwards of all workers.
    pub streams: usize,
}

impl TurnWork {
    /// Describes the first count that exceeds its bound, given the number of control connections and flows of the worker.
    ///
    /// | count | bound | why |
    /// |---|---|---|
    /// | work, frames | `MOST_PER_TURN` | `dataplane/src/datapath/work.rs` |
    /// | message units | of each connection `UNITS_PER_TURN`, and 272 more | a last message of 64 KiB |
    /// | events | as many as message units, and 1,100 more of each connection | its streams, and each kind of event twice |
    /// | walked | sixteen times the flows | a session that is replaced and all of its lanes come up |
    /// | opened | 1,200, and 80 more of each connection | `MOST_PER_TURN` in openings of flows; streams, dialled lanes |
    fn excess(&self, connections: u64, flows: u64) -> Option<String> {
        let connections = connections.max(1);
        let units = connections * (u64::from(UNITS_PER_TURN) + 272);
        let events = units + connections * 1_100;
        let event_bytes = events * size_of::<(ConnectionHandle, Event)>() as u64;
        let checks = [
            ("work", self.work, MOST_PER_TURN),
            ("frames", self.frames, MOST_PER_TURN),
            ("events", self.events, events),
            ("bytes of events", self.event_bytes, event_bytes),
            ("units of messages", self.message_units, units),
            ("flows looked at", self.walked, 16 * (flows + 64)),
            ("sockets opened", self.opened, 1_200 + 80 * connections),
        ];
        let (what, count, most) = checks.into_iter().find(|(_, count, most)| count > most)?;
        Some(format!("{count} {what} in a turn, not {most}"))
    }
}
